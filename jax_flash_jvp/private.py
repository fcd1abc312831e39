"""The names of JAX, jax-triton and Triton on which this package depends and which these do not document, in one place.

`torch_bridge/private.py` has those of PyTorch.  Without a name that is `needed` there is an ImportError, which says which
versions have it; one that is `optional` has something else in its place, or takes a convenience with it.
"""

import importlib.metadata
import pkgutil
from collections.abc import Iterable
from typing import Any

SUPPORTED = {"jax": "0.10 to 0.12", "jax_triton": "0.3 and 0.4", "triton": "3.6 to 3.9", "torch": "2.11 to 2.13"}

JAX = (  # the machinery of primitives, in `kernel_primitive.py`
    "jax.core.ShapedArray.mat",
    "jax.extend.core.DropVar",
    "jax.extend.core.Primitive",
    "jax.extend.core.Var",
    "jax.extend.core.set_current_trace",
    "jax.interpreters.ad.Zero",
    "jax.interpreters.ad.is_undefined_primal",
    "jax.interpreters.ad.primitive_jvps",
    "jax.interpreters.ad.primitive_transposes",
    "jax.interpreters.batching.primitive_batchers",
    "jax.interpreters.mlir.SPMDAxisContext",
    "jax.interpreters.mlir.ShardingContext",
    "jax.interpreters.mlir.lower_fun",
    "jax.interpreters.mlir.register_lowering",
    "jax.interpreters.partial_eval.custom_partial_eval_rules",
    "jax.interpreters.partial_eval.dce_rules",
    "jax.interpreters.partial_eval.partial_eval_jaxpr_custom_rules",
    "jax.sharding.ManualAxisType",
)
HOPPER_FROM_JAX = (  # what `gluon_launch.py` changes; without, the portable kernels run
    "jax_triton.triton_lib.CompilationResult",
    "jax_triton.triton_lib.TensorDescMeta.__required_keys__",
    "jax_triton.triton_lib.TritonFunction._compile_kernel",
    "jax_triton.triton_lib.compile_ttir_to_ptx_inplace",
    "jax_triton.triton_lib.triton_kernel_call_lib.TritonKernel",
    "triton.experimental.gluon._runtime.GluonJITFunction",
)
INTERPRETER = (  # `interpret.py`: `implementation`='interpret' needs them
    "triton.runtime.interpreter.ASTTransformer",
    "triton.runtime.interpreter.InterpreterBuilder.binary_op",
    "triton.runtime.interpreter.InterpreterBuilder.cast_impl",
    "triton.runtime.interpreter.InterpreterBuilder.create_dot",
    "triton.runtime.interpreter.InterpreterBuilder.unary_op",
    "triton.runtime.interpreter.TensorHandle",
    "triton.runtime.interpreter._MISSING",
    "triton.runtime.interpreter._get_np_dtype",
    "triton.runtime.interpreter._patch_lang",
    "triton.runtime.interpreter.interpreter_builder",
)


def needed(path: str) -> Any:
    try:
        return pkgutil.resolve_name(path)
    except (AttributeError, ImportError) as error:
        package = path.partition(".")[0]
        raise ImportError(
            f"`{path}` is missing in {package} {version(package)}: this package supports {SUPPORTED[package]}"
        ) from error


def check(paths: Iterable[str]) -> None:
    for path in paths:
        needed(path)


def optional(path: str, instead: Any = None) -> Any:
    try:
        return pkgutil.resolve_name(path)
    except (AttributeError, ImportError):
        return instead


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of this environment"
