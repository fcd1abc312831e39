"""Flash attention with fused JVPs, gradients and Hessian-vector products, for JAX.

Public names are resolved on first use, so that importing the package, or its kernels, imports neither JAX nor PyTorch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax_flash_jvp.attention import dot_product_attention
    from jax_flash_jvp.context import zigzag_positions
    from jax_flash_jvp.exchange import reorder_zigzag, restore_zigzag
    from jax_flash_jvp.varlen import varlen_attention

__version__ = "0.1.0"
__all__ = ["dot_product_attention", "reorder_zigzag", "restore_zigzag", "varlen_attention", "zigzag_positions"]

_HOME = {
    "dot_product_attention": "jax_flash_jvp.attention",
    "reorder_zigzag": "jax_flash_jvp.exchange",
    "restore_zigzag": "jax_flash_jvp.exchange",
    "varlen_attention": "jax_flash_jvp.varlen",
    "zigzag_positions": "jax_flash_jvp.context",
}


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
