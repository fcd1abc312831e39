"""What jax-triton 0.4 lacks to launch the Hopper kernels, in Triton 3.6 to 3.9.

1. It passes on the warps that a kernel declares; a warp-specialised kernel needs those of all its partitions, which the
   compiler knows only in the end.
2. It sends Gluon modules through Triton's own passes instead of `gluon_to_ttgir`.
3. It expects a key in the metadata of descriptors that Triton 3.6 does not give.
"""

import threading
from typing import Any

from jax_flash_jvp import private


class _Library:
    """jaxlib's Triton module, with the number of warps that the compiler settled on."""

    def __init__(self, library: Any):
        self._library = library
        self.warps: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def TritonKernel(self, *args: Any, **named: Any) -> Any:
        if self.warps is not None:
            name, _, *rest = args
            args = (name, self.warps, *rest)
        return self._library.TritonKernel(*args, **named)


def install(triton_lib: Any) -> None:
    """Extend `jax_triton.triton_lib`; kernels that are not Gluon's compile as before.

    Raises:
      ImportError: jax-triton or Triton looks otherwise; then nothing has been changed.
    """
    *_, gluon_function = [private.needed(path) for path in private.HOPPER_FROM_JAX]
    library = triton_lib.triton_kernel_call_lib = _Library(triton_lib.triton_kernel_call_lib)
    original_compile, original_kernel = (
        triton_lib.compile_ttir_to_ptx_inplace,
        triton_lib.TritonFunction._compile_kernel,
    )
    compiling_gluon = False
    lock = threading.RLock()  # one kernel at a time: which one is being compiled is known process-wide
    triton_lib.TensorDescMeta.__required_keys__ = frozenset()

    def compile_kernel(self, *args, **named):
        nonlocal compiling_gluon
        with lock:
            compiling_gluon = any(isinstance(value, gluon_function) for value in vars(self).values())
            library.warps = None
            return original_kernel(self, *args, **named)

    def compile_to_ptx(*args, **named):
        if not compiling_gluon:
            return original_compile(*args, **named)
        module, backend, options, capability = args
        metadata: dict[str, Any] = {}
        ttgir = backend.gluon_to_ttgir(module, metadata, options, capability)
        llir = backend.make_llir(ttgir, metadata, options, capability)
        library.warps, shared = metadata.get("num_warps"), metadata["shared"]
        ptx = backend.make_ptx(llir, metadata, options, capability)
        align = metadata.get("global_scratch_align")
        return triton_lib.CompilationResult(
            binary=ptx, name=metadata["name"], shared_mem_bytes=shared, ttgir=str(ttgir), llir=str(llir),
            global_scratch_size=metadata.get("global_scratch_size") or None,
            global_scratch_align=None if align in (1, None) else align, tensordesc_meta=metadata["tensordesc_meta"],
        )  # fmt: skip

    triton_lib.compile_ttir_to_ptx_inplace = compile_to_ptx
    triton_lib.TritonFunction._compile_kernel = compile_kernel
