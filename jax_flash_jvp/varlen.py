"""Attention of packed sequences, from where each begins."""

from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_flash_jvp import visibility
from jax_flash_jvp.attention import as_array, context_of, dot_product_attention, known
from jax_flash_jvp.context import Order, Strategy, chunks_of
from jax_flash_jvp.problem import Implementation, check_cu_seqlens, warn_of_window, window_of


class Options(TypedDict, total=False):
    """Those keywords of `dot_product_attention` that are passed on."""

    scale: float | jax.Array | None
    implementation: Implementation | None
    logits_soft_cap: float | None
    sinks: ArrayLike | None
    dropout_rate: float
    dropout_key: ArrayLike | None
    deterministic: bool | None
    context_axis: str | tuple[str, ...] | None
    context_strategy: Strategy | None
    context_order: Order


CONTEXT = dict(axis=None, strategy=None, order="contiguous")


@overload
def varlen_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, cu_seqlens_q: ArrayLike, cu_seqlens_k: ArrayLike | None = None,
    *, is_causal: bool = False, local_window_size: int | tuple[int | None, int | None] | None = None,
    return_residual: Literal[False] = False, **options: Unpack[Options],
) -> jax.Array: ...  # fmt: skip
@overload
def varlen_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, cu_seqlens_q: ArrayLike, cu_seqlens_k: ArrayLike | None = None,
    *, is_causal: bool = False, local_window_size: int | tuple[int | None, int | None] | None = None,
    return_residual: Literal[True], **options: Unpack[Options],
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip
def varlen_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None = None,
    *,
    is_causal: bool = False,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    return_residual: bool = False,
    **options: Unpack[Options],
) -> Any:
    """:func:`jax_flash_jvp.dot_product_attention` of sequences that lie one behind the other, without padding; every derivative
    likewise.  One compiled program serves every packing of as many sequences in as many tokens.

    Args:
      query: [total, N, H]; key, value: [total of keys, K, H] and [total of keys, K, Hv].
      cu_seqlens_q: integers [sequences + 1], where each sequence begins, and where the last one ends; a sequence may be empty.
      cu_seqlens_k: likewise of the keys; those of the queries where it is None.
      is_causal, local_window_size: count from the lower right corner of each sequence, as in flash-attn: its last query sees
        its last key.
      return_residual, options: as of `dot_product_attention`: scale, implementation, logits_soft_cap, sinks, dropout_rate,
        dropout_key, deterministic, context_axis, context_strategy, context_order; with a `context_axis` totals are those of the
        shard, and `cu_seqlens` of all devices together.

    Returns:
      [total, N, Hv], and the log-sum-exp [total, N] if asked for; zeros and -inf for tokens that are in no sequence, and for
      those that see no key.

    Raises:
      ValueError: `cu_seqlens` that decrease, or do not end at the number of tokens: where their numbers are in the host's memory.
        Where they are traced or on a device they are not looked at: what lies beyond the last sequence belongs to none.
      TypeError: `cu_seqlens` that are no integers.
      UserWarning: a window with -1 beside another number, as of `dot_product_attention`.

    Other errors are those of `dot_product_attention`.
    """
    q, k = as_array("query", query), as_array("key", key)
    if q.ndim != 3 or k.ndim != 3:
        raise ValueError(f"`query` and `key` must have shape [tokens, heads, channels]: got {q.shape} and {k.shape}")
    edges = dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k)
    arrays = {name: as_array(name, a) for name, a in edges.items()}
    how = (options.get(f"context_{name}", otherwise) for name, otherwise in CONTEXT.items())
    context = context_of(*how, query=q.shape[0], key=k.shape[0])
    devices = 1 if context is None else context.devices
    for (name, a), tokens in zip(edges.items(), (q.shape[0], k.shape[0]), strict=True):
        check_cu_seqlens(name, arrays[name], arrays["cu_seqlens_q"], devices * tokens, known(a))
    window = window_of(local_window_size) or (None, None)
    warn_of_window(window, is_causal)
    ranges = visibility.documents(devices * q.shape[0], *arrays.values(), is_causal=is_causal, window=window, like=q)
    if context is not None:
        chunks = jnp.stack(chunks_of(context.order, devices, jax.lax.axis_index(context.axes)))
        rows = jnp.arange(devices * q.shape[0]).reshape(devices * len(chunks), -1)[chunks].ravel()
        ranges = ranges[:, :, rows]
    return dot_product_attention(q, k, value, key_ranges=ranges, return_residual=return_residual, **options)
