"""flash-attn's entry points for packed sequences whose queries, keys and values are in one tensor."""

from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from torch_bridge.flash_attn import unpacked
from torch_bridge.varlen import flash_attn_varlen_func


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_varlen_func` of qkv [total, 3, H, E].  The packed tensor is not copied.

    Raises:
      ValueError: `qkv` has another shape; also as in :func:`flash_attn_varlen_func`.
      TypeError: `qkv` is not a tensor; also as in :func:`flash_attn_varlen_func`.
    """
    named: dict[str, Any] = dict(
        dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        alibi_slopes=alibi_slopes, deterministic=deterministic, return_attn_probs=return_attn_probs,
    )  # fmt: skip
    tensors = qkv, cu_seqlens
    if has_torch_function(tensors):
        return handle_torch_function(flash_attn_varlen_qkvpacked_func, tensors, qkv, cu_seqlens, max_seqlen, **named)
    q, k, v = unpacked("qkv", qkv, 3, ("tokens",))
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, **named)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_varlen_func` of q [total, Hq, E] and kv [total of keys, 2, H, E].  The packed tensor is not copied.

    Raises:
      ValueError: `kv` has another shape; also as in :func:`flash_attn_varlen_func`.
      TypeError: `kv` is not a tensor; also as in :func:`flash_attn_varlen_func`.
    """
    named: dict[str, Any] = dict(
        dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        alibi_slopes=alibi_slopes, deterministic=deterministic, return_attn_probs=return_attn_probs,
    )  # fmt: skip
    tensors = q, kv, cu_seqlens_q, cu_seqlens_k
    if has_torch_function(tensors):
        return handle_torch_function(
            flash_attn_varlen_kvpacked_func, tensors, q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **named
        )  # fmt: skip
    k, v = unpacked("kv", kv, 2, ("tokens",))
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, **named)
