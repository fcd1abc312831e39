"""Lowers JAX functions for CUDA on a machine without a GPU, and records what jax-triton would launch."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import pytest
from jaxlib import gpu_triton as library


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    `parameters` are what the kernel takes, in order: ("array", bytes to zero beforehand, known alignment) or ("scalar",
    value, Triton type). Constants, integers of 1 among them, are compiled in and missing here.
    """

    name: str
    kernel: str
    grid: tuple[int, int, int]
    parameters: tuple[tuple, ...]
    shared: int
    num_warps: int
    capability: int
    ptx: str = field(repr=False)


class _Kernel(NamedTuple):
    """Takes the place of jaxlib's `TritonKernel`, with its positional arguments."""

    name: str
    num_warps: int
    num_ctas: int
    shared: int
    ptx: str
    ttir: str
    capability: int
    scratch_size: int = 0
    scratch_alignment: int = 1


_kernels: dict[Any, Any] = {}  # kept between recordings, apart from the cache of real launches


@contextlib.contextmanager
def record_launches(capability: int = 90) -> Iterator[list[Launch]]:
    """Within it, lowering for CUDA needs no GPU and each kernel launch is appended to the list that it gives.

    What was compiled inside must not be run. Kernels are compiled for `capability`. JAX lowers equal calls within one
    program once, so a launch that occurs several times with the same shapes and constants may be recorded once.
    """
    launcher = import_jax_triton().triton_lib
    launches: list[Launch] = []

    class Call:
        def __init__(self, kernel: _Kernel, x: int, y: int, z: int, parameters: list[tuple]):
            self.kernel, self.grid, self.parameters = kernel, (x, y, z), tuple(parameters)

        def to_proto(self, name: str, metadata: bytes) -> bytes:
            kernel = self.kernel
            launches.append(
                Launch(
                    name=name,
                    kernel=kernel.name,
                    grid=self.grid,
                    parameters=self.parameters,
                    shared=kernel.shared,
                    num_warps=kernel.num_warps,
                    capability=kernel.capability,
                    ptx=kernel.ptx,
                )
            )
            return name.encode()

    stand_ins = {
        "TritonKernel": _Kernel,
        "TritonKernelCall": Call,
        "create_array_parameter": lambda zeroed, alignment: ("array", zeroed, alignment),
        "create_scalar_parameter": lambda value, dtype: ("scalar", value, dtype),
        "get_compute_capability": lambda device: capability,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in stand_ins.items():
            patch.setattr(library, name, value, raising=False)
        if hasattr(launcher, "_COMPILED_KERNEL_CACHE"):  # 0.3.1
            patch.setattr(launcher, "_COMPILED_KERNEL_CACHE", _kernels)
        else:  # 0.4.1
            patch.setattr(launcher.TritonFunction, "_kernel_cache", _kernels)
        yield launches


def launches_of(function: Callable, *arguments: Any, capability: int = 90) -> list[Launch]:
    """The launches of `jax.jit(function)` for arguments of these shapes (arrays or `jax.ShapeDtypeStruct`)."""
    with record_launches(capability) as launches:
        # A new function each time: JAX remembers what it has lowered.
        jax.jit(lambda *inner: function(*inner)).trace(*arguments).lower(lowering_platforms=("cuda",))
    return launches


def import_jax_triton() -> Any:
    """jax_triton, repaired where it does not go together with the JAX and the Triton of today."""
    cache_directory = os.environ.get("TRITON_CACHE_DIR")
    from jax._src.interpreters import partial_eval
    from triton.backends.nvidia import driver

    if not hasattr(driver, "TMA_TF32"):  # Triton 3.6 has no name for it, and jax-triton 0.4.1 gives up on NVIDIA GPUs
        driver.TMA_TF32 = 11
    with pytest.MonkeyPatch.context() as patch:
        for name in ("get_compute_capability", "get_serialized_metadata"):  # 0.3.1 asks for them when imported
            if not hasattr(library, name):
                patch.setattr(library, name, None, raising=False)
        if "jax_triton" not in sys.modules:
            # An import that failed leaves its submodules, which the next would not bind.
            for name in [name for name in sys.modules if name.startswith("jax_triton.")]:
                del sys.modules[name]
        import jax_triton

    if cache_directory is None:  # importing jax_triton unsets it or sets it to the empty string
        os.environ.pop("TRITON_CACHE_DIR", None)
    else:
        os.environ["TRITON_CACHE_DIR"] = cache_directory
    primitive = jax_triton.triton_lib.triton_kernel_call_p
    rule = partial_eval.dce_rules.get(primitive)
    if rule is not None and len(inspect.signature(rule).parameters) == 2:  # JAX 0.12 passes three arguments
        partial_eval.dce_rules[primitive] = lambda used, *rest: ([True] * len(rest[-1].invars), rest[-1])
    return jax_triton
