"""Times a gradient of a gradient through attention in the shapes of end-to-end test-time training (arXiv:2512.23675), on the GPU
at hand: a chunk of queries, keys of a sliding window before it and of the chunk itself, QK-norm, bfloat16.

    python benchmarks/gradient_of_gradient.py                        # 1,024 queries, 9,216 keys, 16 heads of 96, 32 of 80
    python benchmarks/gradient_of_gradient.py --framework torch
    python benchmarks/gradient_of_gradient.py --chunk 16 --window 48 --shapes 2x8 --matmul-size 64 --quick        # on a CPU

An inner step of such training descends along g = ∇ℓ, ℓ = ½ ‖attention‖², and its outer gradient has the part ∇⟨g, w⟩, w what the
later loss wants of the step.  Timed is that, forward and inner gradient included, with respect to queries, keys and values.
Every contender is first checked against float64 on one head, and may err twice as much as naive attention in bfloat16 does.
"""

import argparse
import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from measure import add_timing_options, in_turns, parse, relative_errors, right_ones, write

COLUMNS = ("framework", "who", "queries", "keys", "heads", "head_dim", "milliseconds", "temporary_mib")


class Shape(NamedTuple):
    chunk: int
    window: int
    heads: int
    head_dim: int

    def draw(self) -> list[np.ndarray]:
        """q, k, v, then what their gradients are multiplied by: [length, heads, head dimension]."""
        random = np.random.default_rng(0)
        lengths = (self.chunk, *[self.chunk + self.window] * 2) * 2
        return [random.standard_normal((n, self.heads, self.head_dim), np.float32) for n in lengths]

    def visible(self, xp: Any, **on: Any) -> Any:
        """[chunk, chunk + window]: query i sees itself and as many keys before it as the window has, less one."""
        i, j = xp.arange(self.chunk, **on)[:, None] + self.window, xp.arange(self.chunk + self.window, **on)
        return (j <= i) & (j > i - self.window)


class Prepared(NamedTuple):
    call: Callable[[], Any]
    results: list[np.ndarray]
    temporary_mib: float


def in_jax(shape: Shape) -> tuple[dict[str, Callable[..., Prepared]], Callable]:
    """Contenders, each a function of arrays; and naive attention's in float64 or bfloat16."""
    import jax
    import jax.numpy as jnp

    from jax_flash_jvp import dot_product_attention

    def normed(a):
        wide = a.astype(jnp.promote_types(a.dtype, jnp.float32))
        return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(a.dtype)

    def naive(q, k, v):
        s = jnp.einsum("tnh,snh->nts", q, k).astype(jnp.promote_types(q.dtype, jnp.float32)) * q.shape[-1] ** -0.5
        p = jax.nn.softmax(jnp.where(shape.visible(jnp), s, -jnp.inf))
        return jnp.einsum("nts,snh->tnh", p.astype(v.dtype), v)

    def outer(attention, *arrays):
        x, w = arrays[:3], arrays[3:]
        square = lambda *x: 0.5 * jnp.sum(jnp.square(wide(attention(normed(x[0]), normed(x[1]), x[2]))))
        wide = lambda a: a.astype(jnp.promote_types(a.dtype, jnp.float32))
        inner = jax.grad(square, (0, 1, 2))
        return jax.grad(
            lambda *x: sum(jnp.vdot(wide(a), wide(b)) for a, b in zip(inner(*x), w, strict=True)), (0, 1, 2)
        )(*x)

    def prepare(attention, arrays):
        arrays = [jnp.asarray(a, jnp.bfloat16) for a in arrays]
        compiled = jax.jit(functools.partial(outer, attention)).lower(*arrays).compile()
        results = [np.asarray(a, np.float64) for a in compiled(*arrays)]
        return Prepared(lambda: compiled(*arrays), results, compiled.memory_analysis().temp_size_in_bytes / 2**20)

    def check(arrays, exact):
        with jax.enable_x64(True):
            arrays = [jnp.asarray(jnp.asarray(a, jnp.bfloat16), jnp.float64 if exact else jnp.bfloat16) for a in arrays]
            return [np.asarray(a, np.float64) for a in jax.jit(functools.partial(outer, naive))(*arrays)]

    window = dict(is_causal=True, local_window_size=(shape.window - 1, 0))
    ours = functools.partial(dot_product_attention, causal_alignment="lower_right", **window)
    xla = lambda *x: jax.nn.dot_product_attention(*x, mask=shape.visible(jnp)[None], implementation="xla")
    contenders = {"jax-flash-jvp": ours, "XLA": xla}
    return {who: functools.partial(prepare, a) for who, a in contenders.items()}, check


def in_torch(shape: Shape) -> tuple[dict[str, Callable[..., Prepared]], Callable]:
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import torch_calls
    from torch_bridge import scaled_dot_product_attention

    on = dict(device=torch_calls.DEVICE)
    visible = shape.visible(torch, **on)

    def normed(a):
        wide = a.to(torch.promote_types(a.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(a.dtype)

    def naive(q, k, v):
        s = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * q.shape[-1] ** -0.5
        return s.masked_fill(~visible, -torch.inf).softmax(-1).to(v.dtype) @ v

    def math(q, k, v):
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)

    def outer(attention, *arrays):
        x, w = arrays[:3], arrays[3:]
        wide = lambda a: a.to(torch.promote_types(a.dtype, torch.float32))
        square = lambda *x: 0.5 * wide(attention(normed(x[0]), normed(x[1]), x[2])).square().sum()
        inner = torch.func.grad(square, (0, 1, 2))
        wanted = lambda *x: sum((wide(a) * wide(b)).sum() for a, b in zip(inner(*x), w, strict=True))
        return torch.func.grad(wanted, (0, 1, 2))(*x)

    def heads_first(arrays, dtype):
        return [torch.as_tensor(a).to(torch.bfloat16).to(dtype).transpose(0, 1)[None].to(**on) for a in arrays]

    to_numpy = lambda tensors: [a[0].transpose(0, 1).double().cpu().numpy() for a in tensors]

    def prepare(attention, arrays, compiled=False):
        arrays = heads_first(arrays, torch.bfloat16)
        torch.compiler.reset()
        run = torch.compile(outer, dynamic=False) if compiled else outer
        results = to_numpy(run(attention, *arrays))  # compiles, whose memory does not count
        before = torch_calls.allocated()
        given = run(attention, *arrays)
        temporary = torch_calls.peak() - before - sum(a.nbytes for a in given)
        return Prepared(lambda: run(attention, *arrays), results, temporary / 2**20)

    def check(arrays, exact):
        return to_numpy(outer(naive, *heads_first(arrays, torch.float64 if exact else torch.bfloat16)))

    window = dict(is_causal=True, causal_alignment="lower_right", local_window_size=(shape.window - 1, 0))
    ours = functools.partial(scaled_dot_product_attention, **window)
    return {
        "torch_bridge": functools.partial(prepare, ours),
        "torch_bridge, compiled": functools.partial(prepare, ours, compiled=True),
        "SDPA math, compiled": functools.partial(prepare, math, compiled=True),
        "SDPA math": functools.partial(prepare, math),
    }, check


def measure(name: str, shape: Shape, options: argparse.Namespace) -> tuple[list[tuple], bool]:
    """Rows of the table, and whether all that fitted into memory was right."""
    framework = importlib.import_module(f"{name}_calls")
    contenders, check = dict(jax=in_jax, torch=in_torch)[name](shape)
    contenders = {who: prepare for who, prepare in contenders.items() if who in (options.contenders or contenders)}
    arrays = shape.draw()
    first = [a[:, :1] for a in arrays]
    exact = check(first, exact=True)
    allowed = relative_errors(check(first, exact=False), exact)
    makers = {who: functools.partial(prepare, arrays) for who, prepare in contenders.items()}
    prepared, good = right_ones(framework, makers, lambda p: [a[:, :1] for a in p.results], exact, allowed)
    medians, matmul = in_turns(framework, {who: p.call for who, p in prepared.items()}, options)
    print(f"{name}, {shape}: the bf16 matmul {matmul:.0f} TFLOP/s")
    for who, ms in medians.items():
        print(f"  {who:24} {ms:9.3f} ms {prepared[who].temporary_mib:10.1f} MiB of temporary memory", flush=True)
    sizes = shape.chunk, shape.chunk + shape.window, shape.heads, shape.head_dim
    return [(name, who, *sizes, ms, prepared[who].temporary_mib) for who, ms in medians.items()], good


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=("jax", "torch"), default="jax")
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--window", type=int, default=8192)
    parser.add_argument("--shapes", nargs="+", default=["16x96", "32x80"], help="heads x head dimension")
    parser.add_argument("--contenders", nargs="+", help="by the names that the table has")
    parser.add_argument("--output", type=Path, default=Path("results/gradient_of_gradient"), help="without an ending")
    add_timing_options(parser, rounds=7)
    options = parse(parser, arguments)
    print(importlib.import_module(f"{options.framework}_calls").describe())
    rows, good = [], True
    for sizes in options.shapes:
        shape = Shape(options.chunk, options.window, *map(int, sizes.split("x")))
        more, right = measure(options.framework, shape, options)
        rows, good = rows + more, good and right
    write(options.output.with_suffix(".csv"), COLUMNS, rows)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
