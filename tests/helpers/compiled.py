"""Compiles a kernel ahead of time, on any machine, and reads off what it would take of a GPU."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from jax_flash_jvp.kernels.hopper.ring import shared_layout
from jax_flash_jvp.kernels.launcher import DESCRIBED, InPlace, Launch

# The most shared memory that a block may ask for, in bytes, by compute capability.
SHARED_LIMITS = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 103: 232448, 120: 101376}
# Columns of tensor memory. Beyond them Triton emits a kernel that traps: no matrix instructions, no spills.
TENSOR_MEMORY_LIMIT = 512

_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int16": "i16", "int32": "i32", "bool": "i1"}
_INSTRUCTIONS = {"wgmma": r"wgmma\.mma_async", "mma.sync": r"mma\.sync", "tcgen05.mma": r"tcgen05\.mma"}
_ASYNC_COPY = r"cp\.async\.(?:c[ag]|bulk\.tensor)"


class Recorder:
    """A launcher of nothing: arrays are shapes, and what would be launched is what `compiled` takes.  `ones`: integers that are 1
    are constants, as PyTorch launches them."""

    descriptors, multiprocessors = True, 132

    def __init__(self, target, ones=False):
        self.target, self.ones = target, ones
        self.launches = []

    def strides(self, array):
        _, length, heads, head_dim = array.shape
        return length * heads * head_dim, heads * head_dim, head_dim, 1

    def round_to_tf32(self, array):
        return array

    def padded(self, array, n):
        return jax.ShapeDtypeStruct((*array.shape[:-1], array.shape[-1] + n), array.dtype)

    def summed(self, array, by_column, shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    def launch(self, launch: Launch):
        kernel, allocated = launch.kernel, [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in launch.allocations()]
        written = [a.of if isinstance(a, InPlace) else a for a in launch.written(allocated).values()]
        types = [self._type(a) for a in (*launch.arrays(), *launch.numbers(), *written)]
        names = [p.name for p in kernel.params if not p.is_constexpr]
        options = dict(num_warps=launch.num_warps, num_stages=launch.num_stages, registers=launch.registers)
        signature = dict(zip(names, types, strict=True))
        known = {name: None for name in signature if signature[name] is None}
        if self.ones:
            known |= {name: 1 for name, n in launch.scalars.items() if isinstance(n, int) and n == 1}
        signature = {n: t for n, t in signature.items() if n not in known}
        self.launches.append((kernel, signature, launch.constants | known, options))
        return launch.results(allocated)

    def _type(self, argument):
        if isinstance(argument, DESCRIBED):
            if argument.array is None:
                return None
            block, dtype = argument.block, str(argument.array.dtype)
            sizes = ", ".join(map(str, block))
            return f"tensordesc<{_TYPES[dtype]}[{sizes}],{shared_layout(block, dtype)!r}>"
        if isinstance(argument, int | float):
            return "i32" if isinstance(argument, int) else "fp32"
        return "*" + _TYPES[str(argument.dtype)]


@dataclass(frozen=True)
class Resources:
    """What one thread (registers, stack and spills, in bytes) and one block of a compiled kernel use."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int
    tensor_memory: int
    mma: Mapping[str, int]
    async_copies: int
    ptx: str = field(repr=False, compare=False)
    binary: Any = field(repr=False, compare=False)
    warnings: tuple[str, ...] = ()  # the assembler's codes, such as C7510: wgmma serialised

    @property
    def sass(self) -> dict[int, str]:
        """What the assembler made of it: instructions by address."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.binary.asm["cubin"])
            file.flush()
            tool = triton.knobs.nvidia.cuobjdump.path
            text = subprocess.run([tool, "-sass", file.name], check=True, capture_output=True, text=True).stdout
        return {int(at, 16): " ".join(i.split()) for at, i in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]*);", text)}

    def fits(self, capability: int) -> bool:
        """Whether a GPU of this compute capability can launch the kernel. The compiler does not check."""
        return self.shared <= SHARED_LIMITS[capability] and self.tensor_memory <= TENSOR_MEMORY_LIMIT


def compiled(
    kernel: triton.JITFunction,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    capability: int,
    num_warps: int,
    num_stages: int,
    registers: int | None = None,
) -> Resources:
    """Compiles `kernel` as jax-triton does: arrays aligned to 16 bytes, nothing known of the integers.

    Args:
        kernel: a function decorated with `triton.jit`.
        signature: the Triton type of each parameter that is no constant: "*bf16", "i32", "fp32", ...
        constants: the values of the others. An integer argument of 1 belongs here as well, being made a constant.
        capability: the compute capability, 90 for a Hopper GPU.
        num_warps: warps of a block.
        num_stages: depth of the software pipeline.
        registers: cap on those of a thread.
    """
    names = list(kernel.arg_names)
    if set(signature) & set(constants) or set(signature) | set(constants) != set(names):
        raise ValueError(f"`signature` and `constants` must name each parameter once: got {[*signature, *constants]} "
                         f"for {names}")  # fmt: skip
    types = {name: signature.get(name, "constexpr") for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types[name].startswith("*")}
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    if registers is not None:
        options["maxnreg"] = registers
    source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    log = io.StringIO()
    with _compiler_settings(), contextlib.redirect_stdout(log):
        binary = triton.compile(source(kernel, types, places, aligned), GPUTarget("cuda", capability, 32), options)
    ptx, log = binary.asm["ptx"], log.getvalue()
    stack, spill_stores, spill_loads = re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log
    ).groups()
    return Resources(
        registers=int(re.search(r"Used (\d+) registers", log)[1]),
        stack=int(stack),  # may also hold indexed arrays
        spill_stores=int(spill_stores),
        spill_loads=int(spill_loads),
        shared=binary.metadata.shared,
        tensor_memory=getattr(binary.metadata, "tmem_size", None) or 0,
        mma={name: count for name, pattern in _INSTRUCTIONS.items() if (count := len(re.findall(pattern, ptx)))},
        async_copies=len(re.findall(_ASYNC_COPY, ptx)),
        ptx=ptx,
        binary=binary,
        warnings=tuple(re.findall(r"\bC75\d\d\b", log)),
    )


@contextlib.contextmanager
def _compiler_settings() -> Iterator[None]:
    """The assembler's log is printed, for which it must run, whatever is in Triton's cache; that is the ordinary one, even
    after jax-triton 0.3.1, which sets its directory to the empty string."""
    empty = os.environ.get("TRITON_CACHE_DIR") == ""
    if empty:
        del os.environ["TRITON_CACHE_DIR"]
    try:
        with triton.knobs.nvidia.scope(), triton.knobs.compilation.scope():
            triton.knobs.nvidia.dump_ptxas_log = triton.knobs.compilation.always_compile = True
            yield
    finally:
        if empty:
            os.environ["TRITON_CACHE_DIR"] = ""
