"""flash-attn's entry point for packed sequences."""

from typing import Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from jax_flash_jvp import visibility
from jax_flash_jvp.problem import SELECTORS, check_cu_seqlens
from torch_bridge.attention import attend, context_of_call, options_of
from torch_bridge.checks import check_devices, check_flag, check_integers, check_number, check_tensor, known
from torch_bridge.flash_attn import Results, window_from
from torch_bridge.packing import blank, counted

LENGTHS = ("query_lengths", "key_lengths")


class Options(TypedDict, total=False):
    """The keywords of `flash_attn_varlen_func`, but `return_attn_probs`, by which its result differs."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    alibi_slopes: None
    deterministic: bool
    block_table: None
    seqused_q: Tensor | None
    seqused_k: Tensor | None


@overload
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    return_attn_probs: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    return_attn_probs: Literal[True],
    **options: Unpack[Options],
) -> Results: ...
@overload
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    return_attn_probs: bool,
    **options: Unpack[Options],
) -> Tensor | Results: ...
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    block_table: None = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> Tensor | Results:
    """Attention of packed sequences, without padding, with the arguments of the flash-attn package and every derivative.

    q [total, Hq, E], k [total of keys, H, E] and v [total of keys, H, Ev] give [total, Hq, Ev].

    Args:
      cu_seqlens_q, cu_seqlens_k: integers [sequences + 1]: where each sequence begins, and where the last one ends.  A sequence
        may be empty.  In a context (:func:`context_parallel`) they are those of all processes together, while the totals are
        those of this process.
      max_seqlen_q, max_seqlen_k: not needed.
      causal, window_size: count from the lower right corner of each sequence: its last query sees its last key.  -1 means no
        limit on that side.
      dropout_p, softmax_scale, softcap, deterministic: as in :func:`flash_attn_func`.
      alibi_slopes, block_table: not served; must be None.
      seqused_q, seqused_k: integers [sequences]: how many of the first tokens of each sequence are used.  The memory of the
        others may hold anything; nobody sees them, and they give zeros.  In a context they raise a ValueError.
      return_attn_probs: also return the log-sum-exp of the scores, [Hq, total] and differentiable, and None for the
        probabilities, which are never formed.

    Raises:
      ValueError: shapes or devices that do not fit, numbers out of range, `alibi_slopes`, `block_table`.  Also `cu_seqlens`
        that decrease, begin below zero or end beyond the tokens, if they are on the CPU; on a GPU, and where torch.compile
        traces, they are not checked.
      TypeError: `cu_seqlens` that are not integers; also as in :func:`flash_attn_func`.
      UserWarning: `cu_seqlens` on the CPU that do not begin with zero.

    Tokens of no sequence give zeros.  They may hold NaN, in tensors, tangents and cotangents, and so may those of a sequence
    that has no tokens on the other side.
    """
    tensors = q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    if has_torch_function(tensors):
        return handle_torch_function(
            flash_attn_varlen_func, tensors, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
            alibi_slopes=alibi_slopes, deterministic=deterministic, return_attn_probs=return_attn_probs,
            block_table=block_table, seqused_q=seqused_q, seqused_k=seqused_k,
        )  # fmt: skip
    for name, value in (("alibi_slopes", alibi_slopes), ("block_table", block_table)):
        if value is not None:
            raise ValueError(f"`{name}` is not served: leave it out")
    for name, a in zip("qkv", (q, k, v), strict=True):
        check_tensor(name, a)
        if a.dim() != 3:
            hint = (
                "; a batch goes to flash_attn_func, or with lengths to scaled_dot_product_attention"
                if a.dim() == 4
                else ""
            )
            raise ValueError(f"`{name}` must have shape [tokens, heads, head dimension]: got {tuple(a.shape)}{hint}")
    check_flag("causal", causal)
    check_flag("deterministic", deterministic)
    check_flag("return_attn_probs", return_attn_probs)
    check_number("softcap", softcap)
    if softcap < 0:
        raise ValueError(f"`softcap` must be positive, or 0 for none: got {softcap}")
    if softmax_scale is not None:
        check_number("softmax_scale", softmax_scale)
    edges = dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    check_devices(q, edges.items())
    context = context_of_call(q)
    parts = 1 if context is None else context.parts
    lengths = {}  # what lies behind the last sequence may hold anything
    for field, (name, a), tokens in zip(LENGTHS, edges.items(), (q.shape[0], k.shape[0]), strict=True):
        numbers = known(a)
        check_cu_seqlens(name, a, cu_seqlens_q, parts * tokens, numbers)
        if numbers is None or numbers[-1] < parts * tokens:
            lengths[field] = a[-1:].to(torch.int32)
    options = options_of(dropout_p, "upper_left", None, softcap or None)
    window = window_from(window_size) or (None, None)
    for name, used in (("seqused_q", seqused_q), ("seqused_k", seqused_k)):
        if used is not None:
            check_integers(name, used, q, cu_seqlens_q.shape[0] - 1)
            if context is not None:
                raise ValueError(f"`{name}` does not go with a context: leave unused tokens out of what is shared")
    of_queries, of_keys = counted(q.shape[0], cu_seqlens_q, seqused_q), counted(k.shape[0], cu_seqlens_k, seqused_k)
    ranges = visibility.documents(
        parts * q.shape[0], cu_seqlens_q, cu_seqlens_k, lengths=seqused_q, key_lengths=seqused_k, is_causal=causal,
        window=window, like=q,
    )  # fmt: skip
    ranges = ranges if context is None else context.part_of(ranges)
    q, k, v = (a.transpose(0, 1)[None] for a in (q, k, v * 0 if dropout_p == 1 else v))
    q, k, v = blank(q, of_queries), blank(k, of_keys), blank(v, of_keys)
    selection = [ranges if name == "key_ranges" else lengths.get(name) for name in SELECTORS]
    o, log_sum_exp = attend(
        q, k, v, None, False, softmax_scale, True, options, selection, context=context, with_lse=return_attn_probs,
        deterministic=deterministic or None,
    )  # fmt: skip
    o = blank(o[0], of_queries).transpose(0, 1)
    if not return_attn_probs:
        return o
    return o, blank(log_sum_exp[0, ..., None], of_queries, -torch.inf)[..., 0], None
