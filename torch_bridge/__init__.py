"""Attention for PyTorch whose derivatives, of any mode and order, run as flash kernels.  Imports no JAX."""

from torch_bridge.attention import scaled_dot_product_attention
from torch_bridge.compare import compare_compiled
from torch_bridge.flash_attn import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from torch_bridge.patching import patch

__all__ = [
    "compare_compiled",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "patch",
    "scaled_dot_product_attention",
]
