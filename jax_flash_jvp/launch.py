"""Where a job of attention is computed: by the kernels through jax-triton, by the interpreter, or by the reference.

A job is a function of arrays, x first, and of the static `problem`, `want` and `want_tangent`.  Which implementation
computes it is settled when JAX lowers it, so that one traced program runs on any platform.
"""

import dataclasses
import functools
import importlib.metadata
import logging
import math
import os
import pathlib
import threading
import warnings
import zlib
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash_jvp import context_parallel, gluon_launch, reference
from jax_flash_jvp.kernel_primitive import lead_of, leaves_like
from jax_flash_jvp.kernels import jobs
from jax_flash_jvp.kernels.launcher import DESCRIBED, Blocks, InPlace, Launch, Launcher, Output, Rows
from jax_flash_jvp.partition import on_shards
from jax_flash_jvp.private import SUPPORTED
from jax_flash_jvp.problem import DIFFERENTIABLE, KERNEL_IMPLEMENTATIONS, Operands, unserved

logger = logging.getLogger(__name__)
MASKS = ("mask", "key_ranges")  # which batch entries may share, and heads
SMALLEST_NORMAL = 2.0**-126  # of float32


# ------------------------------------------------------------------------------------------------ by the reference


def _pair(name: str, problem: Any, x: Operands, *args: Any, **static: Any) -> Any:
    """The four jobs that the reference has."""
    job: Callable = getattr(reference, name)
    return job(x, *args, problem, *static.values())


def _job(name: str, problem: Any, *args: Any, **static: Any) -> Any:
    if problem.context is not None:
        return context_parallel.run(_pair, name, problem, *args, **static)
    return _pair(name, problem, *args, **static)


def _second(x, tx, _, t, *, problem):
    """The tangent of (forward, its tangent) along t = (ẋ, ṫx)."""
    inputs, tangents = (x[:DIFFERENTIABLE], tx[:DIFFERENTIABLE]), (t[0][:DIFFERENTIABLE], t[1][:DIFFERENTIABLE])
    leaves, tree = jax.tree.flatten(inputs)
    pairs = zip(leaves, leaves_like(inputs, tangents), strict=True)
    filled = tree.unflatten([jnp.zeros_like(a) if t is None else t for a, t in pairs])
    rest = x[DIFFERENTIABLE:]
    job = functools.partial(_job, "forward_dual", problem)
    return jax.jvp(lambda x, tx: job(Operands(*x, *rest), Operands(*tx)), inputs, filled)[1]


def _backward_tangent(x, y, cy, _, t, *, problem, want):
    return _job("backward_dual", problem, x, y, cy, t, want=(False,) * len(want), want_tangent=want)[1]


def _total_backward_dual(x, _, cy, t, *, problem, want, want_tangent):
    """With y and ty computed afresh from x and tx, so that it can be differentiated in them."""
    tx, _, tcy = t
    y, ty = _job("forward_dual", problem, x, tx)
    return _job("backward_dual", problem, x, y, cy, (tx, ty, tcy), want=want, want_tangent=want_tangent)


def _total_backward_tangent(x, _, cy, __, t, *, problem, want):
    return _total_backward_dual(x, _, cy, t, problem=problem, want=(False,) * len(want), want_tangent=want)[1]


_REFERENCE: dict[str, Callable] = {
    "forward": lambda x, *, problem: _job("forward", problem, x),
    "forward_dual": lambda x, tx, *, problem: _job("forward_dual", problem, x, tx),
    "tangent": lambda x, y, tx, *, problem: _job("forward_dual", problem, x, tx)[1],
    "second": _second,
    "backward": lambda x, y, cy, *, problem, want: _job("backward", problem, x, y, cy, want=want),
    "backward_dual": lambda x, y, cy, t, *, problem, want, want_tangent: _job(
        "backward_dual", problem, x, y, cy, t, want=want, want_tangent=want_tangent
    ),
    "backward_tangent": _backward_tangent,
    "total_backward_dual": _total_backward_dual,
    "total_backward_tangent": _total_backward_tangent,
}


def reference_job(name: str) -> Callable:
    """The job in pure JAX, mapped over leading axes."""

    def call(x, *args, problem, **static):
        job = functools.partial(_REFERENCE[name], problem=problem, **static)
        for _ in x.query.shape[:-4]:
            job = _mapped(job)
        with jax.default_matmul_precision("float32" if problem.precision == "ieee" else "tensorfloat32"):
            return job(x, *args)

    return call


def _mapped(job: Callable) -> Callable:
    """Over one more leading axis, in which what all entries share has length one: what depends on that alone is computed once."""

    def call(x, *args):
        leaves, tree = jax.tree.flatten((x, *args))
        (size,), _ = lead_of(leaves, 1)
        shared = [a.shape[0] == 1 != size for a in leaves]
        squeezed = [a[0] if s else a for a, s in zip(leaves, shared, strict=True)]
        axes = [None if s else 0 for s in shared]
        out = jax.vmap(lambda *leaves: job(*tree.unflatten(leaves)), axes)(*squeezed)
        return jax.tree.map(lambda part: _summed(part, x.bias, 1), out, is_leaf=is_operands)

    return call


def is_operands(part: Any) -> bool:
    return isinstance(part, Operands)


def _summed(part: Any, bias: Any, axes: int) -> Any:
    """`part`, its gradient of a bias summed over those of the first `axes` in which the bias has length one."""
    if not is_operands(part) or part.bias is None:
        return part
    over = [i for i in range(axes) if bias.shape[i] != part.bias.shape[i]]
    return part._replace(bias=part.bias.sum(over, keepdims=True)) if over else part


# ------------------------------------------------------------------------------------------------ by the kernels


def _kernel_forward_dual(launcher, problem, x, tx):
    o, log_sum_exp, t_o, mu = jobs.forward(launcher, problem, x, tx)
    return (o, log_sum_exp), (t_o, mu)


_KERNELS: dict[str, Callable] = {
    "forward": lambda launcher, problem, x: jobs.forward(launcher, problem, x)[:2],
    "forward_dual": _kernel_forward_dual,
    "tangent": lambda launcher, problem, x, y, tx: jobs.tangent(launcher, problem, x, y[1], tx),
    "backward": jobs.backward,
    "backward_dual": jobs.backward_dual,
    "backward_tangent": lambda launcher, problem, x, y, cy, _, t, want: jobs.backward_dual(
        launcher, problem, x, y, cy, t, (False,) * len(want), want
    )[1],
}


def _by_kernels(name: str, launcher: Launcher, x: Operands, *args: Any, problem: Any, **static: Any) -> Any:
    """The leading axes are folded into the batch: here, where a device sees its own shard alone, see `partition.py`."""

    def pair(name, problem, *args, **static):
        return _KERNELS[name](launcher, problem, *args, **static)

    job: Callable = pair if problem.context is None else functools.partial(context_parallel.run, pair)
    n = x.query.ndim - 3
    if n == 1:
        return job(name, problem, x, *args, **static)
    (lead, _), batch = lead_of((x, *args), n - 1), x.query.shape[-4]

    def fold(a):
        return a.reshape(-1, *a.shape[n:])

    def unfold(a):
        return a.reshape(*lead, -1, *a.shape[1:])

    def spread(part):  # but for masks and a bias that all entries share
        if not is_operands(part):
            return jnp.broadcast_to(part, (*lead, *part.shape[n - 1 :]))
        arrays = part._asdict()
        alone = {k for k in ("bias", *MASKS) if arrays[k] is not None and math.prod(arrays[k].shape[:n]) == 1}
        of = lambda k, a: (*lead, batch if k in ("bias", *MASKS) else a.shape[n - 1], *a.shape[n:])
        return Operands(
            **{k: a if a is None or k in alone else jnp.broadcast_to(a, of(k, a)) for k, a in arrays.items()}
        )

    def restored(part):
        if not is_operands(part) or part.bias is None:
            return jax.tree.map(unfold, part)
        one = part.bias.shape[0] == 1  # shared by all entries: summed by the kernel
        part = jax.tree.map(unfold, part._replace(bias=None))._replace(
            bias=part.bias.reshape(bias.shape) if one else unfold(part.bias)
        )
        return _summed(part, bias, n)

    bias = x.bias
    x, *args = jax.tree.map(fold, jax.tree.map(spread, (x, *args), is_leaf=is_operands))
    return jax.tree.map(restored, job(name, problem, x, *args, **static), is_leaf=is_operands)


# ------------------------------------------------------------------------------------------------ the choice


def implementations(name: str) -> dict[str, Callable]:
    """By platform, for a `KernelPrimitive`."""
    return {platform: functools.partial(_run, name, platform) for platform in ("default", "cuda")}


def _run(
    name: str, platform: str, x: Operands, *args: Any, problem: Any, divided: bool | str, replicated: bool, **static: Any
) -> Any:  # fmt: skip
    wanted = problem.implementation
    if wanted in KERNEL_IMPLEMENTATIONS and platform != "cuda":
        raise ValueError(
            f"`implementation`={wanted!r} needs an NVIDIA GPU, and this computation is placed elsewhere; leave "
            "`implementation` None, or ask for 'xla' (the tiled reference) or 'interpret' (the kernels on numpy)"
        )
    if replicated:
        problem = dataclasses.replace(problem, deterministic=True)
    nothing_to_do = 0 in x.query.shape or 0 in x.key.shape
    divide = divided is True and not nothing_to_do

    def by_reference() -> Any:
        def job(problem: Any, *args: Any) -> Any:
            return reference_job(name)(*args, problem=problem, **static)

        return on_shards(job, problem, x, *args, label=label("xla")) if divide else job(problem, x, *args)

    def label(*target: Any) -> str:
        return " ".join(map(str, (name, problem, sorted(static.items()), *target, _code())))

    elsewhere = wanted is None and platform != "cuda"
    if elsewhere:
        logger.debug("attention %s: this is not computed on an NVIDIA GPU; the tiled reference computes it", name)
    if platform == "cuda" and wanted != "xla" and name not in _KERNELS:
        logger.debug("attention %s: the tiled reference alone computes this derivative", name)
    if wanted == "xla":
        logger.debug("attention %s: the tiled reference computes it: it is asked for", name)
    if wanted == "xla" or name not in _KERNELS or nothing_to_do or elsewhere:
        return by_reference()
    reason = unserved(x)
    if reason is not None:
        logger.debug("attention %s: the kernels do not serve %s; the tiled reference computes it", name, reason)
        return by_reference()
    if wanted == "interpret":
        problem = dataclasses.replace(problem, precision="ieee")  # its products are exact
    try:
        launcher: Interpreter | JaxTriton = Interpreter() if wanted == "interpret" else JaxTriton()
    except ImportError as error:
        if wanted is not None or _gpus():
            raise
        # lowered for another machine, as by jax.export
        logger.warning("attention %s: %s; the exported program will run the tiled reference on its GPU", name, error)
        return by_reference()

    def job(problem: Any, *args: Any) -> Any:
        return _by_kernels(name, launcher, *args, problem=problem, **static)

    if isinstance(divided, str) and launcher.on_shards:
        logger.warning(
            "attention %s: %s, XLA cannot divide it: it gathers sharded arrays, and every device computes all of it",
            name, divided,
        )  # fmt: skip
        problem = dataclasses.replace(problem, deterministic=True)  # the same on all
    elif divided and launcher.on_shards:
        job = functools.partial(on_shards, job, label=label(launcher.target, launcher.multiprocessors))
    try:
        return job(problem, x, *args)
    except NotImplementedError as error:  # no tile of this one job fits the GPU
        if wanted is not None:
            raise
        logger.debug("attention %s: %s; the tiled reference computes it", name, error)
        return by_reference()


@functools.cache
def _code() -> str:
    """What may change in the code that makes kernels: sources and versions."""
    sources = b"".join(path.read_bytes() for path in sorted(pathlib.Path(__file__).parent.rglob("*.py")))
    found = [find_spec(package.replace("-", "_")) and package for package in ("triton", "jax-triton")]
    versions = [importlib.metadata.version(package) for package in found if package]
    return " ".join([f"{zlib.crc32(sources):08x}", *versions])


# ------------------------------------------------------------------------------------------------ the launchers


class _Contiguous:
    """Arrays of JAX reach a kernel row-major."""

    def strides(self, array: Any) -> tuple[int, ...]:
        return tuple(math.prod(array.shape[i:]) for i in range(1, array.ndim + 1))

    def round_to_tf32(self, array: Any) -> Any:
        """As `to_tf32` of the kernels, to the bit: some kernels of a call may round what they read themselves."""
        bits = (jax.lax.bitcast_convert_type(array, jnp.int32) + 2**12) & -(2**13)
        return jnp.where(jnp.isnan(array), array, jax.lax.bitcast_convert_type(bits, jnp.float32))

    def padded(self, array: Any, n: int) -> Any:
        return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, n)])

    def summed(self, array: Any, by_column: bool, shape: Sequence[int], dtype: str) -> Any:
        array = array[:, :, None, :] if by_column else array[..., None]
        array = array.reshape(array.shape[0], shape[1], -1, *array.shape[2:]).sum(2)
        axes = [axis for axis in (0, 2, 3) if shape[axis] == 1]
        return array.sum(axes, keepdims=True).astype(dtype)


def _shapes(outputs: Sequence[Output]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in outputs]


class Interpreter(_Contiguous):
    """The kernels on numpy arrays, in a callback; outputs are full of NaN beforehand, so that a gap shows."""

    target: int | str = "interpret"
    descriptors = False
    multiprocessors: int | None = None
    on_shards = False  # XLA would call what is gone: callbacks that are made while it compiles are not kept

    def __init__(self):
        _import_triton()

    def launch(self, launch: Launch) -> dict[str, Any]:
        from jax_flash_jvp import interpret

        outputs = launch.allocations()

        def host(*arrays):
            arrays = [np.ascontiguousarray(a) for a in arrays]
            results = [np.full(o.shape, interpret.unwritten(o.dtype), jnp.dtype(o.dtype)) for o in outputs]
            interpret.launch(
                launch.kernel, (launch.programs,), *arrays, *launch.numbers(), *results, **launch.constants
            )
            return tuple(results)

        return launch.results(jax.pure_callback(host, tuple(_shapes(outputs)), *launch.arrays()))


class JaxTriton(_Contiguous):
    """The kernels on an NVIDIA GPU, as custom calls."""

    on_shards = True

    def __init__(self):
        self.jax_triton = _import_jax_triton()
        library = self.jax_triton.triton_lib
        gpus = _gpus()
        _check_kinds(tuple(sorted({gpu.compute_capability for gpu in gpus})))
        first = gpus[0].local_hardware_id if gpus else 0
        self.target = library.triton_kernel_call_lib.get_compute_capability(first)
        self.typed = hasattr(library, "TensorDescriptor")  # results are given by `out_type`: from 0.4 on
        self.descriptors = self.typed and _launches_gluon(library)
        # programs of a launch that wait for each other must run at once, on every one of them
        self.multiprocessors: int | None = min((gpu.core_count for gpu in gpus), default=None)

    def launch(self, launch: Launch) -> dict[str, Any]:
        logger.debug("kernel %s", launch)
        described = lambda a: self._descriptor(a) if isinstance(a, DESCRIBED) else a
        arguments = [described(i) for i in launch.arrays()]
        scalars, shapes, registers = launch.numbers(), _shapes(launch.allocations()), launch.registers
        options: dict[str, Any] = dict(
            kernel=launch.kernel, grid=(launch.programs,), num_warps=launch.num_warps, num_stages=launch.num_stages,
            compute_capability=self.target,
        )  # fmt: skip
        if self.typed:
            # what is subnormal in float32 would become fp64
            arguments += [0.0 if isinstance(s, float) and abs(s) < SMALLEST_NORMAL else s for s in scalars]
            backend = (
                dict(enable_fp_fusion=True) if registers is None else dict(enable_fp_fusion=True, maxnreg=registers)
            )
            options.update(out_type=shapes, backend_options=backend)
        else:  # a Python float would become fp64
            arguments += [np.float32(s) if isinstance(s, float) else s for s in scalars]
            options.update(out_shape=shapes, enable_fp_fusion=True)
        in_place = launch.in_place()
        if not in_place:
            return launch.results(self.jax_triton.triton_call(*arguments, **options, **launch.constants))
        # results have the order of outputs, those changed in place last, which the kernel gets as operands
        operands = [a for a in arguments if a is not None]
        options.update({name: described(a.of) for name, a in in_place.items()})
        in_place = {name: a for name, a in in_place.items() if a.array is not None}
        options["out_type"] = [
            *shapes,
            *(jax.ShapeDtypeStruct(a.array.shape, a.array.dtype) for a in in_place.values()),
        ]
        aliases = {len(operands) + i: len(shapes) + i for i in range(len(in_place))}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the other way, references, wants a jit around it
            got = self.jax_triton.triton_call(*arguments, **options, **launch.constants, input_output_aliases=aliases)
        changed = {name: InPlace(a) for name, a in zip(in_place, got[len(shapes) :], strict=True)}
        return dataclasses.replace(launch, outputs={**launch.outputs, **changed}).results(got[: len(shapes)])

    def _descriptor(self, rows: Rows | Blocks) -> Any:
        from jax_flash_jvp.kernels.hopper.ring import shared_layout

        if rows.array is None:
            return None
        shape, strides, block = rows.view(self.strides(rows.array))
        layout = shared_layout(block, str(rows.array.dtype))
        return self.jax_triton.TensorDescriptor(rows.array, shape, strides, block, layout)


def _gpus() -> list[Any]:
    try:
        return jax.local_devices(backend="cuda")
    except RuntimeError:  # compiled where there is none
        return []


@functools.cache
def _check_kinds(capabilities: tuple[str, ...]) -> None:
    if len(capabilities) > 1:
        logger.warning(
            "this process has GPUs of compute capabilities %s, but JAX compiles one program for all of them, so kernels are "
            "compiled for the first: hide the others with CUDA_VISIBLE_DEVICES", " and ".join(capabilities),
        )  # fmt: skip


def _import_triton() -> None:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "the kernels need Triton, which is not installed: install it, or leave `implementation` None where there is no "
            "NVIDIA GPU, or ask for 'xla'"
        ) from error


_importing = threading.Lock()  # what it guards belongs to the whole process


def _import_jax_triton() -> Any:
    with _importing:  # else a thread would take what jax-triton makes of os.environ for the user's
        return _imported()


@functools.cache
def _imported() -> Any:
    """Imported when the first kernel is lowered: it cannot be used beside a jaxlib without CUDA."""
    _import_triton()
    cache = os.environ.get("TRITON_CACHE_DIR")
    try:
        import triton.backends.nvidia.driver as driver

        if not hasattr(driver, "TMA_TF32"):
            driver.TMA_TF32 = 11  # jax-triton 0.4 reads it, Triton 3.6 lacks it
        import jax_triton

        jax_triton.triton_lib.triton_kernel_call_lib.get_compute_capability  # noqa: B018  (0.4 misses it only where it is used)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            "the kernels cannot be compiled here: jax-triton needs a JAX with CUDA; install that (`jax[cuda12]` or "
            f"`jax[cuda13]`), or ask for `implementation`='xla'; jax-triton {SUPPORTED['jax_triton']} and Triton "
            f"{SUPPORTED['triton']} are supported"
        ) from error
    finally:  # jax-triton sets or deletes TRITON_CACHE_DIR, which breaks Triton's own launches in this process
        if cache is None:
            os.environ.pop("TRITON_CACHE_DIR", None)
        else:
            os.environ["TRITON_CACHE_DIR"] = cache
    return jax_triton


def _launches_gluon(library: Any) -> bool:
    """Whether jax-triton launches the Hopper kernels; else the portable ones run."""
    with _importing:
        return _extended(library)


@functools.cache
def _extended(library: Any) -> bool:
    try:
        gluon_launch.install(library)
    except (AttributeError, ImportError) as error:
        logger.warning("only the portable kernels run: jax-triton cannot launch the Hopper kernels: %s", error)
        return False
    return True
