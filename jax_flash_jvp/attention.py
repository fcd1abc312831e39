"""The public function."""

import dataclasses
import functools
import os
import pathlib
import warnings
from typing import Any, Literal, Never, TypedDict, Unpack, get_args, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_flash_jvp.context import ORDERS, Context, Order, Strategy, strategy_of
from jax_flash_jvp.differentiation import attend, attend_scaled
from jax_flash_jvp.exchange import by_heads, by_sequence, with_all_columns
from jax_flash_jvp.problem import (
    DTYPES,
    KERNEL_IMPLEMENTATIONS,
    Alignment,
    Implementation,
    Operands,
    Precision,
    Problem,
    check_operands,
    dropout_rate_of,
    lower_right_of,
    mask_block_of,
    refuse_unknown,
    soft_cap_of,
    unserved,
    warn_of_lengths,
    warn_of_window,
    window_of,
)
from jax_flash_jvp.reference import cut, inside_of

IMPLEMENTATIONS = (None, *get_args(Implementation))
LARGEST = np.iinfo(np.int32).max
XLA_DETERMINISTIC = ("--xla_gpu_deterministic_ops", "--xla_gpu_exclude_nondeterministic_ops")
OURS = {  # by their names in other libraries
    "sm_scale": "scale", "softmax_scale": "scale", "causal": "is_causal", "window_size": "local_window_size",
    "sliding_window": "local_window_size", "softcap": "logits_soft_cap", "attn_mask": "mask", "dropout_p": "dropout_rate",
    "dropout_rng": "dropout_key", "return_lse": "return_residual", "segment_ids": "query_segment_ids",
    **dict.fromkeys(("dtype", "precision", "broadcast_dropout"), "jax_flash_jvp.flax.attention_fn"),
}  # fmt: skip


class Options(TypedDict, total=False):
    """The keywords of `dot_product_attention`, but `return_residual`, by which its result differs."""

    scale: float | jax.Array | None
    is_causal: bool
    query_seq_lengths: ArrayLike | None
    key_value_seq_lengths: ArrayLike | None
    local_window_size: int | tuple[int | None, int | None] | None
    implementation: Implementation | None
    causal_alignment: Alignment
    query_segment_ids: ArrayLike | None
    key_value_segment_ids: ArrayLike | None
    key_ranges: ArrayLike | None
    mask_block_size: tuple[int, int] | None
    logits_soft_cap: float | None
    sinks: ArrayLike | None
    dropout_rate: float | None
    dropout_key: ArrayLike | None
    context_axis: str | tuple[str, ...] | None
    context_strategy: Strategy | None
    context_order: Order
    deterministic: bool | None


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: Literal[False] = False,
    **options: Unpack[Options],
) -> jax.Array: ...
@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: Literal[True],
    **options: Unpack[Options],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: bool,
    **options: Unpack[Options],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | jax.Array | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
    causal_alignment: Alignment = "upper_left",
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    key_ranges: ArrayLike | None = None,
    mask_block_size: tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    dropout_rate: float | None = None,
    dropout_key: ArrayLike | None = None,
    context_axis: str | tuple[str, ...] | None = None,
    context_strategy: Strategy | None = None,
    context_order: Order = "contiguous",
    deterministic: bool | None = None,
    **unknown: Never,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Attention that can be differentiated in any mode and order, by fused kernels on a GPU.

    .. math::  O = \mathrm{softmax}(\sigma Q K^T + B) V

    Arguments up to `return_residual`, and results, are those of :func:`jax.nn.dot_product_attention`, but for the names of
    implementations, and for the log-sum-exp, which there has the dtype of `query` and no derivative; the other arguments are
    what other attention libraries offer.  In shapes, B is the batch size, T the number of queries, S of keys, N the number
    of query heads, K of key heads, H the channels of a query's head and Hv of a value's.

    Args:
      query: [B, T, N, H] or [T, N, H]; float16, bfloat16, float32 or float64.  The kernels serve H and Hv from 1 to 256.
      key: [B, S, K, H] or [S, K, H], in the dtype of `query`.  N must be a multiple of K: with K < N, consecutive groups of
        N // K query heads share a key head (grouped-query attention, arXiv:2305.13245).
      value: [B, S, K, Hv] or [S, K, Hv], like `key`.
      bias: added to the scores; up to four dimensions, broadcast to [B, N, T, S], or with K heads.  Differentiable.  Where
        it is -1e5 or less, the key is hidden, as by -inf; where no score with it is above -9e4, all keys may be.
      mask: boolean, True where a query attends to a key; broadcast likewise.
      scale: σ, a number; 1 / sqrt(H) by default.  A traced one, differentiable, multiplies `query`, and is rounded with it;
        in float16 the product must stay below 65,504.
      is_causal: query i attends to keys 0 … i; but see `causal_alignment`.
      query_seq_lengths: integers [B], or one where `query` is [T, N, H]; queries from there on give zeros.  Lengths below 0
        count as 0, those beyond the array as its length: with a warning where their numbers are known to the host.
      key_value_seq_lengths: likewise; keys from there on are hidden.  Past the lengths, `query`, `key` and `value`
        may hold anything; NaN in keys that are hidden otherwise may reach queries nearby.
      local_window_size: (left, right) or one number for both: query i attends to keys i - left … i + right, either of
        which may be negative; None for one of the two does not limit it.
      implementation: None chooses the kernels on an NVIDIA GPU where they serve the call, and the tiled reference
        elsewhere.  "triton": the kernels up to second order, or an error; "hopper" and "portable" name one family of
        them.  "xla": the tiled reference, pure JAX on any platform.  "interpret": the kernels on numpy, slowly, for
        debugging them.
      return_residual: also return the log-sum-exp of the scores.
      causal_alignment: "upper_left", as in jax.nn, or "lower_right": then `is_causal` and `local_window_size` count queries
        from the end, i + S - T in place of i, so that the last query sees the last key, as when decoding.  T and S are those
        of the arrays, whatever the lengths: of a padded cache, pass what is filled, or a `mask`.
      query_segment_ids: integers [B, T], or [T] where `query` is [T, N, H]; a query attends to keys of its own segment: packed
        documents.  Where they are in order, tiles without a common segment are not visited.  Those that int32 need not hold
        (int64, uint32, uint64) are sorted first.
      key_value_segment_ids: integers [B, S], or [S]; given together with `query_segment_ids`.
      key_ranges: integers [B, N, T, R, 2], or with K heads or one, one batch entry or none: query t attends to the keys in any of
        the R intervals [start, end), which may be empty, overlap or pass the ends.  R is small and static, the numbers may be
        traced: :mod:`jax_flash_jvp.visibility` makes them.  Tiles that nobody sees are not visited.
      mask_block_size: (b_q, b_k); then an element of `mask`, [B, N, ⌈T / b_q⌉, ⌈S / b_k⌉] or with axes of batch and heads as
        above, stands for a block of so many queries and keys.  Tiles of hidden blocks are not visited.
      logits_soft_cap: c; scores become c tanh(σ q·k / c), before bias and masks (arXiv:2408.00118, section 2).
      sinks: [N]; one more score for each head, with a value of zero (arXiv:2309.17453).  Differentiable, but
        ``jax.linear_transpose`` does not transpose a call with sinks in its values.
      dropout_rate: the share of probabilities that are dropped, in [0, 1]; the others are divided by 1 - rate.  None: 0.
      dropout_key: a key of jax.random, from which the same are dropped in every derivative; goes with a `dropout_rate`.
      context_axis: inside `jax.shard_map`, the axis or axes of the mesh over whose devices the sequence is divided, queries and
        keys alike: T and S are then those of a shard, and so are segment ids; lengths are those of the sequence, a `mask` or
        `bias` has the rows of the shard and all columns, `key_ranges` have the rows of the shard and places in the
        sequence; `mask_block_size` raises.  Outside, None: there JAX knows how arrays are divided.
      context_strategy: "ulysses" exchanges shards of the sequence for shards of the heads, "ring" sends keys and values around,
        "all_gather" gives them to every device.  None: "ulysses" where the devices divide K and neither `bias` nor `mask`
        varies along the queries, else "ring".
      context_order: "contiguous", or "zigzag" where the sequence is in the order of
        :func:`jax_flash_jvp.reorder_zigzag`, which spares a causal ring the exchange of half of each shard.  Masks and
        biases have their columns in the order of the sequence.
      deterministic: True: gradients have the same bits on every run.  None: if XLA's operations have, by
        ``--xla_gpu_deterministic_ops`` or ``--xla_gpu_exclude_nondeterministic_ops`` in XLA_FLAGS.  Else terms of the
        query's gradients are added up in whatever order they come, which changes their last bits, in long sequences where
        a fixed order would take more than 5% longer.  What several devices compute alike has the same bits on all, whatever
        this says; not inside a `shard_map` whose types do not tell, as without `check_vma`.

    Returns:
      The output, [B, T, N, Hv] or [T, N, Hv] in the dtype of `query`; with `return_residual`, a pair of it and of the
      log-sum-exp (natural logarithm) of each row of scores, [B, T, N] or [T, N], in float32 (float64 for float64 arrays),
      differentiable like the output.  Scores and sums are accumulated in float32 (float64).  A query that sees no key gives
      zeros and -inf, with zero derivatives (but for the log-sum-exp with `sinks`, which is then the sink).

    Raises:
      ValueError: shapes that do not fit or are symbolic beyond the batch, numbers out of range, one of two arguments that go
        together, or an `implementation` that is unknown or does not serve the call.
      TypeError: dtypes that are not supported or differ, arguments that are no number or flag, or traced (but `scale`).
      UserWarning: a window that hides all keys, as (-1, -1) does, or has a -1 beside another number, as (3, -1); lengths that are
        known and out of range; a `mask` or `bias` [B, T, S] that may be one of heads.
      NotImplementedError: kernels are asked for by name, and a job of the derivative does not fit the GPU.

    Float32 products follow ``jax.default_matmul_precision``: IEEE for "highest" and "float32", else TF32 on the GPU.

    In place of Flax's function of the same name, with its `dtype` and `precision`, see :func:`jax_flash_jvp.flax.attention_fn`.

    FlashAttention: arXiv:2205.14135, arXiv:2307.08691; its tangent: arXiv:2410.11081, appendix.
    """
    if unknown:
        refuse_unknown("dot_product_attention", unknown, OURS)
    arrays = dict(query=query, key=key, value=value, bias=bias, mask=mask)
    lengths = dict(query_seq_lengths=query_seq_lengths, key_value_seq_lengths=key_value_seq_lengths)
    segments = dict(query_segment_ids=query_segment_ids, key_value_segment_ids=key_value_segment_ids)
    ranges = dict(key_ranges=key_ranges)
    given = {name: as_array(name, a) for name, a in arrays.items()}
    given |= {name: _index(name, a) for name, a in {**lengths, **segments, **ranges}.items()}
    ndim = given["query"].ndim
    for name in ("query", "key", "value"):
        if given[name].ndim != ndim or ndim not in (3, 4):
            raise ValueError(
                f"`query`, `key` and `value` must all have shape [batch, length, heads, channels] or all "
                f"[length, heads, channels]: got {name} of shape {given[name].shape}"
            )
        if not all(isinstance(n, int) for n in given[name].shape[-3:]):
            raise ValueError(
                f"of a symbolic shape (jax.export) only the batch may be a symbol: got {name} of shape {given[name].shape}; "
                "export the function once for each length"
            )
    heads = {1, given["query"].shape[-2], given["key"].shape[-2]}
    for name in ("bias", "mask"):
        if given[name] is None or given[name].ndim != 3:
            continue
        if given[name].shape[0] not in heads:
            raise ValueError(
                f"`{name}` of three axes must be [heads, query length, key length]: got {given[name].shape}; one for each "
                f"batch entry is `{name}[:, None]`"
            )
        if ndim == 4 and given[name].shape[0] == given["query"].shape[0] != 1:
            warnings.warn(
                f"`{name}` of three axes is taken as one for each head, of which there are as many as batch entries: got "
                f"{given[name].shape}; write `{name}[None]` to say so, or `{name}[:, None]` for one for each batch entry",
                stacklevel=2,
            )
    shapes = {name: a.shape for name, a in given.items() if a is not None}
    for name in arrays:
        if given[name] is not None:
            given[name] = _four_dimensional(name, given[name])
    for name in (*lengths, *segments):
        if given[name] is not None and ndim == 3 and given[name].ndim == (name in segments):
            given[name] = given[name][None]
    if given["key_ranges"] is not None:
        given["key_ranges"] = _five_dimensional(given["key_ranges"])
    if dropout_key is not None and dropout_rate is None:
        raise ValueError("a `dropout_key` drops nothing without a `dropout_rate`: give a rate, 0 to drop nothing")
    rate = dropout_rate_of("dropout_rate", number("dropout_rate", dropout_rate, 0.0))
    given["seed"] = _seed(dropout_key, given["query"].shape[0]) if rate else None
    x = Operands(*given.values())
    context = context_of(context_axis, context_strategy, context_order, query=x.query.shape[1], key=x.key.shape[1])
    mask_block = _mask_block(mask_block_size, x.mask)
    if context is not None and mask_block is not None:
        raise ValueError(
            "`mask_block_size` does not go with a `context_axis`: say it in `key_ranges`, or in a `mask` without blocks"
        )
    check_operands(x, x.key.shape[1] * (1 if context is None else context.devices), mask_block, shapes)
    for name, a in zip(lengths, (x.query, x.key), strict=True):
        if lengths[name] is not None:
            warn_of_lengths(name, known(lengths[name]), a.shape[1] * (1 if context is None else context.devices))
    if context is not None:
        for name, ids in segments.items():
            if ids is not None and jnp.iinfo(given[name].dtype).bits > 16 and given[name].dtype != jnp.int32:
                raise TypeError(
                    f"`{name}` must fit int32 where there is a `context_axis`: got {given[name].dtype}; cast it"
                )
    x = _in_int32(x)
    if rate == 1:  # o is zero, which does not reach ℓ
        x, rate = x._replace(value=x.value * 0, seed=None), 0.0
    scaled_by = None
    if isinstance(scale, jax.core.Tracer):
        scaled_by, scale = _traced_scale(scale), 1
        x = x._replace(query=cut(x.query, inside_of(x)[0]))
    sink_scores = as_array("sinks", sinks)
    if sinks is not None and sink_scores.dtype.name not in DTYPES:
        raise TypeError(f"`sinks` must be one of {', '.join(DTYPES)}: got {sink_scores.dtype}; cast it")
    if sinks is not None and sink_scores.shape != x.query.shape[2:3]:
        raise ValueError(
            f"`sinks` must have shape ({x.query.shape[2]},), one number a query head: got {sink_scores.shape}"
        )
    with_residual = _flag("return_residual", return_residual)
    problem = Problem(
        scale=number("scale", scale, max(1, x.query.shape[-1]) ** -0.5),
        is_causal=_flag("is_causal", is_causal),
        window=_window(local_window_size),
        lower_right=lower_right_of(causal_alignment),
        soft_cap=None if logits_soft_cap is None else soft_cap_of(number("logits_soft_cap", logits_soft_cap, 0.0)),
        dropout_rate=rate,
        mask_block=mask_block,
        precision=_precision(),
        deterministic=_xla_is_deterministic() if deterministic is None else _flag("deterministic", deterministic),
        implementation=implementation,
    )
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"`implementation` must be one of {IMPLEMENTATIONS}: got {implementation!r}")
    warn_of_window(problem.window, problem.is_causal)
    reason = unserved(x)
    if implementation in (*KERNEL_IMPLEMENTATIONS, "interpret") and reason is not None:
        raise ValueError(
            f"`implementation`={implementation!r} does not serve {reason}; leave `implementation` None or ask for 'xla': the "
            "tiled reference computes it"
        )
    back = None
    if context is not None:
        problem, x, back = _shared(problem, x, context, context_strategy)
    output, log_sum_exp = attend(problem, *x) if scaled_by is None else attend_scaled(problem, scaled_by, *x)
    if back is not None:
        output, log_sum_exp = by_sequence((output, log_sum_exp), back)
    if sinks is not None:
        output, log_sum_exp = _with_sinks(output, log_sum_exp, sink_scores)
    if ndim == 3:
        output, log_sum_exp = output[0], log_sum_exp[0]
    return (output, log_sum_exp.mT) if with_residual else output


def as_array(name: str, a: Any) -> Any:
    if a is None:
        if name in ("query", "key", "value"):
            raise TypeError(f"`{name}` must be an array: got None")
        return None
    try:
        a = jnp.asarray(a)
    except (TypeError, ValueError) as error:
        raise TypeError(f"`{name}` must be an array: got {type(a).__name__}") from error
    extended = jax.dtypes.issubdtype(a.dtype, jax.dtypes.extended)  # a key of jax.random
    if not extended and a.dtype != jax.dtypes.canonicalize_dtype(a.dtype):
        raise TypeError(f"`{name}` is {a.dtype}, which needs `jax_enable_x64` where the call is traced; or cast it")
    return a


def _four_dimensional(name: str, a: jax.Array) -> jax.Array:
    if a.ndim > 4:
        raise ValueError(f"`{name}` must have at most four dimensions: got shape {a.shape}")
    return a.reshape((1,) * (4 - a.ndim) + a.shape)


def _five_dimensional(a: jax.Array) -> jax.Array:
    return a.reshape((1,) * (5 - a.ndim) + a.shape) if a.ndim < 5 else a


def _index(name: str, a: Any) -> Any:
    """An array; without int64, JAX would cut off what numbers of the host have beyond int32."""
    for leaf in jax.tree.leaves(a):
        if isinstance(leaf, int):
            dtype, least, most = "int64", leaf, leaf
        elif isinstance(leaf, np.integer | np.ndarray) and leaf.dtype.kind in "iu" and leaf.size:
            dtype, least, most = leaf.dtype.name, int(leaf.min()), int(leaf.max())
        else:
            continue
        limits = jnp.iinfo(jax.dtypes.canonicalize_dtype(dtype))
        if not limits.min <= least <= most <= limits.max:
            raise ValueError(f"`{name}` must fit {limits.dtype}, or `jax_enable_x64` be set: got {least} to {most}")
    return as_array(name, a)


def known(a: Any) -> list[int] | None:
    """The numbers of an array in the host's memory, whose reading waits for no device."""

    def elsewhere(a: Any) -> bool:
        on_host = lambda: a.is_fully_addressable and all(d.platform == "cpu" for d in a.devices())
        return isinstance(a, jax.core.Tracer) or (isinstance(a, jax.Array) and not on_host())

    return None if any(map(elsewhere, jax.tree.leaves(a))) else np.ravel(a).tolist()


def _in_int32(x: Operands) -> Operands:
    """Lengths, ranges and segments, of whatever integers."""

    def length(a: Any) -> Any:  # beyond all arrays is as good as at their end
        if a is None or a.dtype == jnp.int32:
            return a
        limits = jnp.iinfo(a.dtype)
        return jnp.clip(a, max(-1, limits.min), min(LARGEST, limits.max)).astype(jnp.int32)

    x = x._replace(query_lengths=length(x.query_lengths), key_lengths=length(x.key_lengths))
    x = x._replace(key_ranges=length(x.key_ranges))
    segments = (x.query_segments, x.key_segments)
    if segments[0] is None or all(a.dtype == jnp.int32 for a in segments):
        return x
    if any(jnp.iinfo(a.dtype).bits > 16 and a.dtype != jnp.int32 for a in segments):
        dtype = np.promote_types(*(a.dtype for a in segments))
        if dtype.kind not in "iu" or dtype != jax.dtypes.canonicalize_dtype(dtype):
            raise TypeError(
                f"`query_segment_ids` and `key_value_segment_ids` must fit one dtype: got {segments[0].dtype} and "
                f"{segments[1].dtype}; cast one of them"
            )
        queries = segments[0].shape[1]
        both = jnp.concatenate([a.astype(dtype) for a in segments], 1)
        ranks = jax.vmap(jnp.searchsorted)(jnp.sort(both), both)
        segments = ranks[:, :queries], ranks[:, queries:]
    queries, keys = (a.astype(jnp.int32) for a in segments)
    return x._replace(query_segments=queries, key_segments=keys)


def number(name: str, value: Any, default: float) -> float:
    if value is None:
        return default
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"`{name}` must be a number known when the call is traced; make it a static argument")
    try:
        if isinstance(value, str | bytes) or np.iscomplexobj(value):  # which float reads, numpy's complex in part
            raise TypeError
        value = float(value)
    except OverflowError:
        value = np.inf
    except (TypeError, ValueError) as error:
        raise TypeError(f"`{name}` must be a number: got {type(value).__name__}") from error
    if not abs(value) <= np.finfo(np.float32).max:
        raise ValueError(f"`{name}` must be finite in float32: got {value}")
    return value


def _traced_scale(scale: jax.Array) -> jax.Array:
    if scale.shape or jnp.issubdtype(scale.dtype, jnp.complexfloating):
        raise TypeError(f"`scale` must be a real number: got {scale.dtype} of shape {scale.shape}")
    return scale


def _with_sinks(o: jax.Array, log_sum_exp: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A sink takes the share sigmoid(sink - ℓ) of the probability; in a row that sees no key, all of it.  What it leaves,
    sigmoid(ℓ - sink), is written so that derivatives keep their digits where it is nearly one: those of a sigmoid are
    multiples of its difference from one."""
    sinks = sinks.astype(log_sum_exp.dtype)[None, :, None]
    seen = log_sum_exp != -jnp.inf  # NaN is seen
    log_sum_exp = jnp.where(seen, log_sum_exp, 0)
    share = jnp.where(seen, jnp.exp(-jax.nn.softplus(sinks - log_sum_exp)), 0).mT[..., None]
    return (o.astype(share.dtype) * share).astype(o.dtype), jnp.where(seen, jnp.logaddexp(log_sum_exp, sinks), sinks)


def _seed(key: Any, batch: int) -> jax.Array:
    if key is None:
        raise ValueError("`dropout_key` must be given where `dropout_rate` is above 0")
    try:
        numbers = jax.lax.bitcast_convert_type(jax.random.bits(key, (batch, 2), "uint32"), jnp.int32)
    except (TypeError, ValueError) as error:
        got = f"{type(key).__name__} of shape {np.shape(key)}"
        raise TypeError(f"`dropout_key` must be one key of jax.random: got {got}") from error
    return jnp.pad(numbers, ((0, 0), (0, 3)))


def context_of(axis: Any, strategy: Any, order: Any, **rows: int) -> Context | None:
    """The devices that share the sequence, in a ring unless something else is found to be better; each has so many rows."""
    if order not in ORDERS:
        raise ValueError(f"`context_order` must be one of {ORDERS}: got {order!r}")
    if axis is None:
        for name, given in (
            ("context_strategy", strategy),
            ("context_order", None if order == "contiguous" else order),
        ):
            if given is not None:
                raise ValueError(
                    f"`{name}`={given!r} goes with a `context_axis`, inside jax.shard_map; elsewhere JAX divides arrays in the "
                    "order of the sequence, and attention follows"
                )
        return None
    axes = axis if isinstance(axis, tuple) else (axis,)
    if not axes or not all(isinstance(a, str) for a in axes):
        raise TypeError(f"`context_axis` must be the name of an axis of the mesh, or a tuple of names: got {axis!r}")
    try:
        devices = jax.lax.axis_size(axes)
    except NameError:
        raise ValueError(
            f"`context_axis` must name axes of a jax.shard_map around the call: got {axis!r}; outside of one leave it None: "
            "arrays that are sharded along the sequence are divided as they are"
        ) from None
    for name, n in rows.items():
        if order == "zigzag" and n % 2:
            raise ValueError(
                f"`{name}` must be two chunks of a sequence in zig-zag order: got {n} rows on each device; pad the sequence to a "
                f"multiple of {2 * devices}"
            )
    return Context(axes, devices, "ring", order)


def _shared(
    problem: Problem, x: Operands, context: Context, strategy: Strategy | None
) -> tuple[Problem, Operands, Context | None]:
    """The call of this device, and if results are to be exchanged, among whom."""
    rows = [
        name for name, a in (("bias", x.bias), ("mask", x.mask)) if a is not None and (a.shape[2] > 1 or name == "bias")
    ]
    chosen = strategy_of(strategy, context.devices, x.key.shape[2], rows)
    if context.devices == 1:
        return problem, x, None
    if chosen == "ulysses":
        return problem, by_heads(x, context), context
    if chosen == "all_gather":
        x, context = with_all_columns(x, context), dataclasses.replace(context, strategy="rows")
    return dataclasses.replace(problem, context=context), x, None


def _window(size: Any) -> tuple[int | None, int | None] | None:
    if any(isinstance(n, jax.core.Tracer) for n in jax.tree.leaves(size)):
        raise TypeError("`local_window_size` must be known when the call is traced; make it a static argument")
    return window_of(size)


def _mask_block(size: Any, mask: Any) -> tuple[int, int] | None:
    if any(isinstance(n, jax.core.Tracer) for n in jax.tree.leaves(size)):
        raise TypeError("`mask_block_size` must be known when the call is traced; make it a static argument")
    return mask_block_of(size, mask)


def _flag(name: str, value: Any) -> bool:
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"`{name}` must be True or False when the call is traced; make it a static argument")
    if np.ndim(value) or np.asarray(value).dtype != bool:
        raise TypeError(f"`{name}` must be True or False: got {type(value).__name__}")
    return bool(value)


def _xla_is_deterministic() -> bool:
    """By its own flags."""
    return _asks_for_determinism(os.environ.get("XLA_FLAGS", "").strip())


@functools.cache  # XLA reads them once
def _asks_for_determinism(text: str) -> bool:
    """Flags, of which the last counts, or the file where they stand."""
    if text and not text.startswith("-") and os.path.isfile(text):
        text = pathlib.Path(text).read_text()
    flags = dict(word.partition("=")[::2] for word in text.split())
    return any(flags.get(name, "false").lower() in ("", "true", "1") for name in XLA_DETERMINISTIC)


def _precision() -> Precision:
    """Of float32 products in the kernels, from the matrix-product precision in force."""
    exact = ("highest", "float32", "f32_f32_f32")
    asked = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    return "ieee" if str(asked).lower() in exact else "tf32"
