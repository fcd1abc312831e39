"""Flash attention with fused JVPs, gradients and Hessian-vector products, for PyTorch.  Imports no JAX."""

from jax_flash_jvp.context import zigzag_positions
from torch_bridge.attention import scaled_dot_product_attention
from torch_bridge.compare import compare_compiled
from torch_bridge.context import context_parallel, reorder_zigzag, restore_zigzag
from torch_bridge.flash_attn import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from torch_bridge.implementation import use_implementation
from torch_bridge.kv_cache import flash_attn_with_kvcache
from torch_bridge.patching import patch
from torch_bridge.varlen import flash_attn_varlen_func
from torch_bridge.varlen_packed import flash_attn_varlen_kvpacked_func, flash_attn_varlen_qkvpacked_func

__all__ = [
    "compare_compiled",
    "context_parallel",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "patch",
    "reorder_zigzag",
    "restore_zigzag",
    "scaled_dot_product_attention",
    "use_implementation",
    "zigzag_positions",
]
