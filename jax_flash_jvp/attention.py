"""The public function."""

import dataclasses
from typing import Any, Literal, Never, TypedDict, Unpack, get_args, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_flash_jvp.arguments import (
    LENGTHS,
    SEGMENTS,
    block_of,
    flag,
    in_int32,
    known,
    normalised,
    number,
    precision,
    rate_of,
    seed_of,
    sinks_of,
    traced_scale,
    warn_of_drift,
    window,
    with_all_axes,
    xla_is_deterministic,
)  # fmt: skip
from jax_flash_jvp.context import ORDERS, Context, Order, Strategy, strategy_of
from jax_flash_jvp.differentiation import attend, attend_scaled
from jax_flash_jvp.exchange import by_heads, by_sequence, with_all_columns
from jax_flash_jvp.problem import (
    Alignment,
    Implementation,
    Operands,
    Problem,
    check_implementation,
    check_operands,
    check_served,
    lower_right_of,
    refuse_unknown,
    soft_cap_of,
    warn_of_lengths,
    warn_of_window,
)
from jax_flash_jvp.reference import cut, inside_of

IMPLEMENTATIONS = (None, *get_args(Implementation))
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
    r"""Flash attention with fused JVPs, gradients and Hessian-vector products.

    .. math::  O = \mathrm{softmax}(\sigma Q K^T + B) V

    Replaces :func:`jax.nn.dot_product_attention`.  The arguments up to `return_residual`, and the results, are those of
    `jax.nn`, with two exceptions: the implementations have other names, and the log-sum-exp is float32 and differentiable,
    where `jax.nn`'s has the dtype of `query` and no derivative.  In shapes, B is the batch size, T the number of queries, S of
    keys, N the number of query heads, K of key heads, H and Hv the head dimensions.

    Args:
      query: [B, T, N, H] or [T, N, H]; float16, bfloat16, float32 or float64.  The kernels serve H and Hv from 1 to 256.
      key: [B, S, K, H] or [S, K, H], in the dtype of `query`.  N must be a multiple of K: with K < N, consecutive groups of
        N // K query heads share a key head (grouped-query attention, arXiv:2305.13245).
      value: [B, S, K, Hv] or [S, K, Hv], in the dtype of `query`.
      bias: added to the scores, and differentiable; up to four dimensions, broadcast to [B, N, T, S], or with K heads.  -1e5 or
        less hides the key, as -inf does, and a row with no sum above -9e4 may count as fully hidden.
      mask: boolean, True where a query sees a key; broadcasts like `bias`.
      scale: σ, a number; 1 / sqrt(H) by default.  A traced scale is differentiable.  It multiplies `query` and is rounded with
        it; in float16 the result must stay below 65,504.
      is_causal: query i sees keys 0 … i; but see `causal_alignment`.
      query_seq_lengths: integers [B], or one integer if `query` is [T, N, H]; queries beyond give zeros.  Lengths below 0 count
        as 0, and lengths beyond the array as its length; a warning says so if the host knows their numbers.
      key_value_seq_lengths: the same for keys; keys beyond are hidden.  Beyond the lengths, `query`, `key` and `value` may hold
        anything.  NaN in keys that are hidden in another way may reach queries nearby.
      local_window_size: (left, right), or one number for both: query i sees keys i - left … i + right.  Either may be negative.
        None for one of the two means no limit on that side.
      implementation: None runs the kernels on an NVIDIA GPU if they serve the call, else the tiled reference.  "triton": the
        kernels up to second order, or an error; "hopper" and "portable": one family of them.  "xla": the tiled reference, in
        pure JAX on any platform.  "interpret": the kernels on numpy, slowly, for debugging them.
      return_residual: also return the log-sum-exp of the scores.
      causal_alignment: "upper_left", as in `jax.nn`, or "lower_right".  With "lower_right", `is_causal` and `local_window_size`
        count from the last key: i + S - T replaces i, so that the last query sees the last key, as when decoding.  T and S are
        those of the arrays, whatever the lengths: of a padded cache, pass the filled part, or a `mask`.
      query_segment_ids: integers [B, T], or [T] if `query` is [T, N, H]; a query sees the keys of its own segment (packed
        documents).  If they are in order, tiles without a common segment are skipped.  Ids of dtype int64, uint32 or uint64 are
        sorted first.
      key_value_segment_ids: integers [B, S], or [S]; must be given together with `query_segment_ids`.
      key_ranges: integers [B, N, T, R, 2]; the heads may be K or one, B may be one or absent.  Query t sees the keys in any of
        the R intervals [start, end).  Intervals may be empty, overlap or pass the ends.  R is small and static, the numbers may
        be traced; :mod:`jax_flash_jvp.visibility` makes the usual ones.  Fully masked tiles are skipped.
      mask_block_size: (b_q, b_k); each element of `mask`, [B, N, ⌈T / b_q⌉, ⌈S / b_k⌉] with axes of batch and heads as above,
        then stands for a block of b_q queries and b_k keys.  Hidden blocks are skipped.
      logits_soft_cap: c; scores become c tanh(σ q·k / c), before bias and masks (arXiv:2408.00118, section 2).
      sinks: [N]; one more score for each head, with a value of zero (arXiv:2309.17453).  Differentiable, but
        ``jax.linear_transpose`` does not transpose a call with sinks in its values.
      dropout_rate: the share of probabilities to drop, in [0, 1]; the others are divided by 1 - rate.  None means 0.
      dropout_key: a key of jax.random; must be given together with a `dropout_rate`.  Every derivative drops the same
        probabilities.
      context_axis: inside `jax.shard_map`, the axis or axes of the mesh whose devices share the sequence, queries and keys
        alike.  T, S and segment ids are then those of a shard.  Lengths are those of the whole sequence.  A `mask` or `bias`
        has the rows of the shard and all columns.  `key_ranges` have the rows of the shard and positions in the whole sequence.
        `mask_block_size` raises.  Outside `jax.shard_map`, leave it None: JAX knows how arrays are sharded.
      context_strategy: "ulysses" exchanges shards of the sequence for shards of the heads, "ring" passes keys and values
        around, "all_gather" gives them to every device.  None: "ulysses" if the devices divide K and neither `bias` nor `mask`
        varies along the queries, else "ring".
      context_order: "contiguous", or "zigzag" if the sequence is in the order of :func:`jax_flash_jvp.reorder_zigzag`, which
        saves a causal ring the exchange of half of each shard.  Columns of masks and biases stay in the order of the sequence.
      deterministic: True: gradients have the same bits on every run.  None: True if XLA's operations are, by
        ``--xla_gpu_deterministic_ops`` or ``--xla_gpu_exclude_nondeterministic_ops`` in XLA_FLAGS.  False: in long sequences,
        where a fixed order would take more than 5% longer, the terms of the query's gradient are added in any order, which
        changes its last bits.  Devices that compute the same thing get the same bits, whatever this says, except inside a
        `shard_map` whose types do not tell, as without `check_vma`.

    Returns:
      [B, T, N, Hv] or [T, N, Hv] in the dtype of `query`.  With `return_residual`, the pair of the output and the log-sum-exp
      (natural logarithm) of each row of scores, [B, T, N] or [T, N], in float32 (float64 for float64 arrays), differentiable
      like the output.  Scores and sums are accumulated in float32 (float64).  A query that sees no key gives zeros and a
      log-sum-exp of -inf, with zero derivatives.  With `sinks` its log-sum-exp is the sink.

    Raises:
      ValueError: shapes that do not fit or are symbolic beyond the batch, numbers out of range, one of two arguments that must
        be given together, an `implementation` that is unknown or does not serve the call.
      TypeError: dtypes that are not supported or differ, arguments that should be a number or a flag and are not, arguments
        that are traced (except `scale`).
      UserWarning: a window that hides all keys, such as (-1, -1), or that has a -1 beside another number, such as (3, -1);
        known lengths that are out of range; a `mask` or `bias` [B, T, S] that may have been meant as one of heads.
      NotImplementedError: kernels are asked for by name, and one of the derivative's kernels does not fit the GPU.

    Float32 matmuls follow ``jax.default_matmul_precision``: IEEE for "highest" and "float32", else TF32 on the GPU.

    Flax's function of the same name has `dtype` and `precision`: :func:`jax_flash_jvp.flax.attention_fn` replaces it.

    FlashAttention: arXiv:2205.14135, arXiv:2307.08691; its tangent: arXiv:2410.11081, appendix.
    """
    if unknown:
        refuse_unknown("dot_product_attention", unknown, OURS)
    arrays = dict(
        query=query, key=key, value=value, bias=bias, mask=mask, query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths, query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids, key_ranges=key_ranges,
    )  # fmt: skip
    given = normalised(arrays)
    batched, rate = given["query"].ndim == 4, rate_of(dropout_rate, dropout_key)
    seed = seed_of(dropout_key, given["query"].shape[0] if batched else 1) if rate else None
    x = Operands(*[*(with_all_axes(name, a, batched) for name, a in given.items()), seed])
    context = context_of(context_axis, context_strategy, context_order, query=x.query.shape[1], key=x.key.shape[1])
    mask_block = block_of(mask_block_size, x.mask)
    devices = 1 if context is None else context.devices
    _check(x, given, devices, context, mask_block)
    for name, a in zip(LENGTHS, (x.query, x.key), strict=True):
        if arrays[name] is not None:
            warn_of_lengths(name, known(arrays[name]), a.shape[1] * devices)
    x = in_int32(x)
    if rate == 1:  # o is zero, which does not reach ℓ
        x, rate = x._replace(value=x.value * 0, seed=None), 0.0
    scaled_by = None
    if isinstance(scale, jax.core.Tracer):
        scaled_by, scale = traced_scale(scale), 1
        x = x._replace(query=cut(x.query, inside_of(x)[0]))
    sink_scores = None if sinks is None else sinks_of(sinks, x.query.shape[2])
    with_residual = flag("return_residual", return_residual)
    problem = Problem(
        scale=number("scale", scale, max(1, x.query.shape[-1]) ** -0.5),
        is_causal=flag("is_causal", is_causal),
        window=window(local_window_size),
        lower_right=lower_right_of(causal_alignment),
        soft_cap=None if logits_soft_cap is None else soft_cap_of(number("logits_soft_cap", logits_soft_cap, 0.0)),
        dropout_rate=rate,
        mask_block=mask_block,
        precision=precision(),
        deterministic=xla_is_deterministic() if deterministic is None else flag("deterministic", deterministic),
        implementation=implementation,
    )
    check_implementation(implementation, IMPLEMENTATIONS, "xla")
    check_served(implementation, x, "xla")
    warn_of_window(problem.window, problem.is_causal)
    back = None
    if context is not None:
        problem, x, back = _shared(problem, x, context, context_strategy)
    output, log_sum_exp = attend(problem, *x) if scaled_by is None else attend_scaled(problem, scaled_by, *x)
    if back is not None:
        output, log_sum_exp = by_sequence((output, log_sum_exp), back)
    if sink_scores is not None:
        output, log_sum_exp = _with_sinks(output, log_sum_exp, sink_scores)
    if not batched:
        output, log_sum_exp = output[0], log_sum_exp[0]
    return (output, log_sum_exp.mT) if with_residual else output


def _check(x: Operands, given: dict, devices: int, context: Context | None, mask_block: tuple[int, int] | None) -> None:
    """What the arrays must be to one another, whose axes are those that were given."""
    if context is not None and mask_block is not None:
        raise ValueError(
            "`mask_block_size` does not go with a `context_axis`: say it in `key_ranges`, or in a `mask` without blocks"
        )
    shapes = {name: a.shape for name, a in given.items() if a is not None}
    check_operands(x, x.key.shape[1] * devices, mask_block, shapes)
    for name in SEGMENTS if context is not None else ():
        ids = given[name]
        if ids is not None and jnp.iinfo(ids.dtype).bits > 16 and ids.dtype != jnp.int32:
            raise TypeError(f"`{name}` must fit int32 where there is a `context_axis`: got {ids.dtype}; cast it")


def _with_sinks(o: jax.Array, log_sum_exp: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A sink takes the share sigmoid(sink - ℓ) of the probability; in a row that sees no key, all of it.  What it leaves,
    sigmoid(ℓ - sink), is written so that derivatives keep their digits where it is nearly one: those of a sigmoid are
    multiples of its difference from one."""
    sinks = sinks.astype(log_sum_exp.dtype)[None, :, None]
    seen = log_sum_exp != -jnp.inf  # NaN is seen
    log_sum_exp = jnp.where(seen, log_sum_exp, 0)
    share = jnp.where(seen, jnp.exp(-jax.nn.softplus(sinks - log_sum_exp)), 0).mT[..., None]
    return (o.astype(share.dtype) * share).astype(o.dtype), jnp.where(seen, jnp.logaddexp(log_sum_exp, sinks), sinks)


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
                    f"`{name}`={given!r} needs a `context_axis`, inside jax.shard_map; elsewhere leave it out: attention "
                    "follows the sharding of the arrays"
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
            "attention follows the sharding of the arrays"
        ) from None
    for name, n in rows.items():
        if order == "zigzag" and n % 2:
            raise ValueError(
                f"`{name}` must have an even number of rows on each device for `context_order`='zigzag': got {n}; "
                f"pad the sequence to a multiple of {2 * devices}"
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
    warn_of_drift()
    if chosen == "ulysses":
        return problem, by_heads(x, context), context
    if chosen == "all_gather":
        x, context = with_all_columns(x, context), dataclasses.replace(context, strategy="rows")
    return dataclasses.replace(problem, context=context), x, None
