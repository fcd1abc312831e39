"""Attention of packed sequences, from where each begins."""

from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_flash_jvp import visibility
from jax_flash_jvp.arguments import LENGTHS, as_array, known
from jax_flash_jvp.attention import context_of, dot_product_attention
from jax_flash_jvp.context import Order, Strategy, chunks_of
from jax_flash_jvp.problem import Implementation, check_cu_seqlens, warn_of_window, window_of


class Options(TypedDict, total=False):
    """The keywords of `dot_product_attention` that are passed on."""

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
    """:func:`jax_flash_jvp.dot_product_attention` for packed sequences, without padding, with every derivative.

    Sequences follow one another along the first axis.  One compiled program serves every packing of the same number of sequences
    in the same number of tokens.

    Args:
      query: [total, N, H].
      key: [total of keys, K, H].
      value: [total of keys, K, Hv].
      cu_seqlens_q: integers [sequences + 1]: where each sequence begins, and where the last one ends.  A sequence may be empty.
      cu_seqlens_k: the same for the keys.  None: as the queries.
      is_causal, local_window_size: count from the lower right corner of each sequence, as in flash-attn: its last query sees
        its last key.
      return_residual, options: as in `dot_product_attention`: scale, implementation, logits_soft_cap, sinks, dropout_rate,
        dropout_key, deterministic, context_axis, context_strategy, context_order.  With a `context_axis`, totals are those of the
        shard, and `cu_seqlens` those of all devices together.

    Returns:
      [total, N, Hv].  With `return_residual`, also the log-sum-exp [total, N].  Tokens that are in no sequence or see no key give
      zeros, and a log-sum-exp of -inf.

    Raises:
      ValueError: `cu_seqlens` that decrease, begin below zero or end beyond the tokens, if the host knows their numbers.
        Numbers that are traced or on a device are not checked.
      TypeError: `cu_seqlens` that are not integers.
      UserWarning: `cu_seqlens` that are known and do not begin with zero; a window with -1 beside another number.

    Tokens of no sequence, and those of a sequence that has no tokens on the other side, may hold NaN, in arrays, tangents and
    cotangents.

    Other errors are those of `dot_product_attention`.
    """
    q, k = as_array("query", query), as_array("key", key)
    if q.ndim != 3 or k.ndim != 3:
        raise ValueError(
            f"`query` and `key` must have shape [tokens, heads, head dimension]: got {q.shape} and {k.shape}"
        )
    names = "cu_seqlens_q", "cu_seqlens_q" if cu_seqlens_k is None else "cu_seqlens_k"
    edges = dict(cu_seqlens_k=cu_seqlens_k, cu_seqlens_q=cu_seqlens_q)
    arrays = {name: as_array(name, edges[name]) for name in names}
    numbers = {name: known(edges[name]) for name in names}
    how = (options.get(f"context_{name}", otherwise) for name, otherwise in CONTEXT.items())
    context = context_of(*how, query=q.shape[0], key=k.shape[0])
    devices = 1 if context is None else context.devices
    totals = devices * q.shape[0], devices * k.shape[0]
    for name, total in dict.fromkeys(zip(names, totals, strict=True)):  # one warning of what queries and keys share
        check_cu_seqlens(name, arrays[name], arrays["cu_seqlens_q"], total, numbers[name])
    window = window_of(local_window_size) or (None, None)
    warn_of_window(window, is_causal)
    ranges = visibility.documents(totals[0], *map(arrays.get, names), is_causal=is_causal, window=window, like=q)

    def of_device(a: Any, axis: int) -> Any:
        """Its rows, of those of the whole sequence."""
        if context is None:
            return a
        chunks = jnp.stack(chunks_of(context.order, devices, jax.lax.axis_index(context.axes)))
        rows = jnp.arange(a.shape[axis]).reshape(devices * len(chunks), -1)[chunks].ravel()
        return jnp.take(a, rows, axis)

    # Tokens of no sequence may hold anything: lengths hide those behind the last one, and others become zeros.
    lengths: dict[str, Any] = {}
    inside = [None, None]
    for i, (field, own, other) in enumerate(zip(LENGTHS, names, names[::-1], strict=True)):
        some, others = numbers[own], numbers[other]
        if some is None or some[-1] < totals[i]:
            lengths[field] = arrays[own][-1:]
        there = some and others and visibility.tokens_in_documents(totals[i], some, others)
        inside[i] = None if there is None else of_device(jnp.asarray(there), 0)
    x = (_only(rows, a) for rows, a in zip((*inside, inside[1]), (q, k, as_array("value", value)), strict=True))
    result = dot_product_attention(
        *x, key_ranges=of_device(ranges, 2), return_residual=return_residual, **lengths, **options
    )
    if not return_residual:
        return _only(inside[0], result)
    if inside[0] is None and options.get("sinks") is not None:
        # elsewhere the log-sum-exp would be the sinks, and its cotangents would be theirs
        own = visibility.documents(totals[0], *map(arrays.get, names), like=q)[0, 0, :, 0]
        inside[0] = of_device(own[:, 0] < own[:, 1], 0)
    return _only(inside[0], result[0]), _only(inside[0], result[1], -np.inf)


def _only(inside: Any, a: Any, otherwise: float = 0) -> Any:
    """`a`, with something else in the place of rows that are not inside; None: all are."""
    if inside is None or a.shape[:1] != inside.shape:
        return a
    return jnp.where(inside.reshape(-1, *[1] * (a.ndim - 1)), a, otherwise)
