"""Times attention in the shapes of interatomic potentials, whose loss is made of forces, on the GPU at hand: thousands of short
sequences with a bias (PET in metatrain), and one packed sequence of molecules (AllScAIP in fairchem), in float32.

    python benchmarks/forces.py                                                                    # both, in JAX
    python benchmarks/forces.py --framework torch --precision tf32
    python benchmarks/forces.py --framework torch --pet triton_memory_efficient_attention.py       # a file of metatrain's
    python benchmarks/forces.py --shapes 4x8x2x8:key 1x24x2x8:segments --matmul-size 64 --quick    # on a CPU

Three jobs, each with those before it: the forward; forces, g = ∇E of E = ½ ‖attention‖² with respect to queries, keys, values
and bias; and the training step, ∇⟨g, w⟩, w what a loss wants of the forces.  Every contender is first checked against float64,
and may err twice as much as attention written out in float32 does.
"""

import argparse
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from measure import add_timing_options, in_turns, parse, relative_errors, right_ones, write

COLUMNS = ("framework", "precision", "shape", "job", "who", "milliseconds", "temporary_mib")
JOBS = ("forward", "forces", "training step")
SHAPES = ["4096x32x8x16:key", "4096x32x8x16:pair", "1x400x10x64:segments", "1x400x10x64:segments+pair"]
MOLECULE = 50  # atoms, of one segment
CHECKED = 8  # sequences
PRECISIONS = {
    "ieee": ("highest", "highest", 1e-5),
    "tf32": ("tensorfloat32", "high", 1e-3),
}  # JAX's name, PyTorch's, rounding


class Shape(NamedTuple):
    sequences: int
    length: int
    heads: int
    head_dim: int
    features: tuple[str, ...]  # a bias per "key" or "pair", and "segments"

    @classmethod
    def read(cls, text: str) -> "Shape":
        """Of sequences x length x heads x head dimension, a colon, and features with + between."""
        sizes, _, features = text.partition(":")
        return cls(*map(int, sizes.split("x")), tuple(filter(None, features.split("+"))))

    def __str__(self) -> str:
        sizes = "x".join(map(str, self[:4]))
        return f"{sizes}:{'+'.join(self.features)}" if self.features else sizes

    def draw(self) -> list[np.ndarray]:
        """q, k, v [B, L, H, D] and the bias, if there is one; then what their gradients are multiplied by."""
        shapes = [(self.sequences, self.length, self.heads, self.head_dim)] * 3
        if "key" in self.features:
            shapes.append((self.sequences, 1, 1, self.length))
        if "pair" in self.features:
            shapes.append((self.sequences, self.heads, self.length, self.length))
        random = np.random.default_rng(0)
        return [random.standard_normal(shape, np.float32) for shape in shapes * 2]

    def segments(self) -> np.ndarray | None:
        """[B, L]: molecules one after the other."""
        if "segments" not in self.features:
            return None
        return np.broadcast_to(np.arange(self.length, dtype=np.int32) // MOLECULE, (self.sequences, self.length))


class Prepared(NamedTuple):
    call: Callable[[], Any]
    results: list[np.ndarray]  # of the first sequences
    temporary_mib: float


def in_jax(shape: Shape, precision: str) -> tuple[dict[str, Callable[..., Prepared]], Callable]:
    """Contenders, each a function of a job and arrays; and the written-out attention's results in float64 or float32."""
    import jax
    import jax.numpy as jnp

    from jax_flash_jvp import dot_product_attention

    ids = shape.segments()
    seen = lambda n: None if ids is None else (ids[:n, :, None] == ids[:n, None])[:, None]

    def ours(q, k, v, bias=None):
        return dot_product_attention(q, k, v, bias, query_segment_ids=ids, key_value_segment_ids=ids)

    def xla(q, k, v, bias=None):
        return jax.nn.dot_product_attention(q, k, v, bias, seen(len(q)), implementation="xla")

    def naive(q, k, v, bias=0.0):
        s = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5 + bias
        s = s if ids is None else jnp.where(seen(len(q)), s, -jnp.inf)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)

    def run(job, attention, *arrays):
        with jax.default_matmul_precision(PRECISIONS[precision][0]):
            x, w = arrays[: len(arrays) // 2], arrays[len(arrays) // 2 :]
            if job == "forward":
                return [attention(*x)]
            every = tuple(range(len(x)))
            forces = jax.grad(lambda *x: 0.5 * jnp.sum(attention(*x) ** 2), every)
            if job == "forces":
                return forces(*x)
            return jax.grad(lambda *x: sum(jnp.vdot(a, b) for a, b in zip(forces(*x), w, strict=True)), every)(*x)

    to_numpy = lambda arrays: [np.asarray(a[:CHECKED], np.float64) for a in arrays]

    def prepare(attention, job, arrays):
        arrays = [jnp.asarray(a) for a in arrays]
        compiled = jax.jit(functools.partial(run, job, attention)).lower(*arrays).compile()
        temporary = compiled.memory_analysis().temp_size_in_bytes / 2**20
        return Prepared(lambda: compiled(*arrays), to_numpy(compiled(*arrays)), temporary)

    def check(job, arrays, exact):
        with jax.enable_x64(exact):
            arrays = [jnp.asarray(a[:CHECKED], jnp.float64 if exact else jnp.float32) for a in arrays]
            return to_numpy(jax.jit(functools.partial(run, job, naive))(*arrays))

    contenders = {"jax-flash-jvp": ours, "XLA": xla}
    return {who: functools.partial(prepare, a) for who, a in contenders.items()}, check


def in_torch(shape: Shape, precision: str, pet: Path | None) -> tuple[dict[str, Callable[..., Prepared]], Callable]:
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import torch_calls
    from torch_bridge import scaled_dot_product_attention

    torch.set_float32_matmul_precision(PRECISIONS[precision][1])
    on = dict(device=torch_calls.DEVICE)
    ids = None if shape.segments() is None else torch.tensor(shape.segments(), **on)
    seen = None if ids is None else (ids[:, :, None] == ids[:, None])[:, None]

    def ours(q, k, v, bias=None):
        return scaled_dot_product_attention(q, k, v, bias, query_segment_ids=ids, key_value_segment_ids=ids)

    def math(q, k, v, bias=None):
        if bias is None or seen is None:
            mask = seen if bias is None else bias
        else:
            mask = bias.masked_fill(~seen, -torch.inf)
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, mask)

    def naive(q, k, v, bias=0.0):
        s = q @ k.mT * q.shape[-1] ** -0.5 + bias
        s = s if seen is None else s.masked_fill(~seen[: len(q)], -torch.inf)
        return s.softmax(-1) @ v

    def run(job, attention, *arrays):
        """By PyTorch's transforms, which torch.compile knows."""
        x, w = arrays[: len(arrays) // 2], arrays[len(arrays) // 2 :]
        if job == "forward":
            return [attention(*x)]
        every = tuple(range(len(x)))
        forces = torch.func.grad(lambda *x: 0.5 * attention(*x).square().sum(), every)
        if job == "forces":
            return forces(*x)
        return torch.func.grad(lambda *x: sum((a * b).sum() for a, b in zip(forces(*x), w, strict=True)), every)(*x)

    def run_eagerly(job, attention, *arrays):
        """By the autograd engine, which such models are trained with."""
        x, w = [a.requires_grad_() for a in arrays[: len(arrays) // 2]], arrays[len(arrays) // 2 :]
        o = attention(*x)
        if job == "forward":
            return [o.detach()]
        forces = torch.autograd.grad(0.5 * o.square().sum(), x, create_graph=job != "forces")
        if job == "forces":
            return forces
        return torch.autograd.grad(sum((a * b).sum() for a, b in zip(forces, w, strict=True)), x)

    def heads_first(arrays, dtype):
        turned = [torch.tensor(a, dtype=dtype, **on) for a in arrays]
        half = len(turned) // 2
        return [a.transpose(1, 2).contiguous() if i % half < 3 else a for i, a in enumerate(turned)]

    def to_numpy(tensors):
        turned = [a.detach()[:CHECKED].double().cpu() for a in tensors]
        return [(a.transpose(1, 2) if i < 3 else a).numpy() for i, a in enumerate(turned)]

    def prepare(attention, job, arrays, compiled=False):
        arrays = heads_first(arrays, torch.float32)
        torch.compiler.reset()
        take = torch.compile(run, dynamic=False) if compiled else run_eagerly
        results = to_numpy(take(job, attention, *arrays))  # compiles, whose memory does not count
        before = torch_calls.allocated()
        given = take(job, attention, *arrays)
        temporary = torch_calls.peak() - before - sum(a.nbytes for a in given)
        del given
        return Prepared(lambda: take(job, attention, *arrays), results, temporary / 2**20)

    def check(job, arrays, exact):
        some = [a[:CHECKED] for a in arrays]
        return to_numpy(run(job, naive, *heads_first(some, torch.float64 if exact else torch.float32)))

    contenders = {
        "torch_bridge": functools.partial(prepare, ours),
        "torch_bridge, compiled": functools.partial(prepare, ours, compiled=True),
        "SDPA math": functools.partial(prepare, math),
        "SDPA math, compiled": functools.partial(prepare, math, compiled=True),
    }
    if pet is not None and shape.features == ("key",):
        spec = importlib.util.spec_from_file_location("pet", pet)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kernel = lambda q, k, v, bias: module.triton_memory_efficient_attention(q, k, v, bias[:, 0, 0].contiguous())
        contenders["PET"] = functools.partial(prepare, kernel)
    return contenders, check


def measure(shape: Shape, options: argparse.Namespace) -> tuple[list[tuple], bool]:
    """Rows of the table, and whether all that fitted into memory was right."""
    name, precision, good, rows = options.framework, options.precision, True, []
    framework = importlib.import_module(f"{name}_calls")
    contenders, check = in_jax(shape, precision) if name == "jax" else in_torch(shape, precision, options.pet)
    contenders = {who: prepare for who, prepare in contenders.items() if who in (options.contenders or contenders)}
    arrays = shape.draw()
    for job in options.jobs:
        exact = check(job, arrays, exact=True)
        allowed = relative_errors(check(job, arrays, exact=False), exact)
        makers = {who: functools.partial(prepare, job, arrays) for who, prepare in contenders.items()}
        prepared, right = right_ones(
            framework, makers, lambda p: p.results, exact, allowed, PRECISIONS[precision][2], f"{shape}, {job}, "
        )
        good &= right
        medians, matmul = in_turns(framework, {who: p.call for who, p in prepared.items()}, options)
        print(f"{name}, {precision}, {shape}, {job}: the bf16 matmul {matmul:.0f} TFLOP/s")
        for who, ms in medians.items():
            mib = prepared[who].temporary_mib
            print(f"  {who:24} {ms:9.3f} ms {mib:10.1f} MiB of temporary memory", flush=True)
            rows.append((name, precision, shape, job, who, ms, mib))
    return rows, good


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=("jax", "torch"), default="jax")
    parser.add_argument("--precision", choices=tuple(PRECISIONS), default="ieee", help="of float32 matmuls")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help=Shape.read.__doc__)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=JOBS)
    parser.add_argument("--contenders", nargs="+", help="by the names that the table has")
    parser.add_argument(
        "--pet", type=Path, help="metatrain's file of PET's kernels, which are timed too where they can be"
    )
    parser.add_argument("--output", type=Path, default=Path("results/forces"), help="without an ending")
    add_timing_options(parser, rounds=7)
    options = parse(parser, arguments)
    print(importlib.import_module(f"{options.framework}_calls").describe())
    rows, good = [], True
    for shape in map(Shape.read, options.shapes):
        more, right = measure(shape, options)
        rows, good = rows + more, good and right
    write(options.output.with_suffix(".csv"), COLUMNS, rows)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
