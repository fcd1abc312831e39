"""`attention_fn` for Flax's attention layers.

Pass it to `flax.nnx.MultiHeadAttention` or `flax.linen.MultiHeadDotProductAttention`.  Or call it in place of
`flax.nnx.dot_product_attention` and `flax.linen.dot_product_attention`.

    from jax_flash_jvp.flax import attention_fn
    layer = nnx.MultiHeadAttention(..., attention_fn=attention_fn)
    output = attention_fn(query, key, value, dtype=jnp.bfloat16)

Fix options with `functools.partial(attention_fn, implementation="triton", local_window_size=(256, 0))`.
Flax itself is not imported: the layers and this function agree on the names of the arguments.
"""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jax_flash_jvp.arguments import as_array, number
from jax_flash_jvp.attention import dot_product_attention
from jax_flash_jvp.problem import Implementation


def attention_fn(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: Any = None,
    module: Any = None,
    promote_dtype: Callable[..., Any] | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    key_ranges: ArrayLike | None = None,
    mask_block_size: tuple[int, int] | None = None,
    implementation: Implementation | None = None,
    force_fp32_for_softmax: bool = True,
    einsum_dot_general: None = None,
    qk_attn_weights_einsum: None = None,
    attn_weights_value_einsum: None = None,
) -> jax.Array:
    """`jax_flash_jvp.dot_product_attention` with the signature that Flax's attention layers call.

    Args:
        query: `[batch..., query_length, heads, head_dim]`, with any number of leading axes, none included.
        key, value: `[batch..., key_length, key_value_heads, head_dim]`; heads is a multiple of key_value_heads.
        bias: added to the logits; broadcasts to `[batch..., heads, query_length, key_length]`.
        mask: broadcasts like `bias`; zero or False hides the key. A query that sees no key gives zeros, where Flax's own
            attention gives the mean of the values.
        broadcast_dropout: must be False if dropout is on: each head and batch entry drops its own probabilities.
        dropout_rng, dropout_rate, deterministic: as in Flax; every derivative drops the same probabilities.
        dtype: the dtype to compute in; None promotes query, key and value to their common dtype.
        precision: as in Flax; None leaves `jax.default_matmul_precision` as the caller set it.
        module: must be None: there are no attention weights to sow.
        promote_dtype: nnx's way of casting, called as `promote_dtype((query, key, value), dtype=dtype)`.
        is_causal: a query sees only keys at its own position and before.
        scale, local_window_size, key_ranges, mask_block_size, implementation: passed on to `dot_product_attention`.
        force_fp32_for_softmax: linen's argument, without effect: softmax always runs in float32 or more.
        einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum: linen's arguments; must be None: the kernels
            have their own matmuls.

    Returns:
        `[batch..., query_length, heads, head_dim]`.

    Raises:
        ValueError: dropout with `broadcast_dropout`, a `module` or one of linen's einsums, a `precision` that is unknown or
            differs between the operands, axes that do not fit.
        TypeError: an argument that should be an array and is not, a complex array, a `dropout_rate` that is traced or not a
            number.
    """
    dropout_rate = number("dropout_rate", dropout_rate, 0.0)
    dropout = dropout_rate > 0.0 and not deterministic
    if dropout and broadcast_dropout:
        raise ValueError(
            f"`broadcast_dropout` must be False where `dropout_rate` is above 0: got {dropout_rate}. The kernels drop for "
            "each head and batch entry on its own: pass broadcast_dropout=False to the layer, or deterministic=True"
        )
    if dropout and dropout_rng is None:
        raise ValueError("`dropout_rng` must be given where `dropout_rate` is above 0 and `deterministic` is not set")
    if module is not None:
        raise ValueError(
            f"`module` must be None: got {type(module).__name__}. The attention weights are never formed, so there are "
            "none to sow: call the layer with sow_weights=False, or give it Flax's own dot_product_attention"
        )
    einsums = dict(
        einsum_dot_general=einsum_dot_general, qk_attn_weights_einsum=qk_attn_weights_einsum,
        attn_weights_value_einsum=attn_weights_value_einsum,
    )  # fmt: skip
    for name, einsum in einsums.items():
        if einsum is not None:
            raise ValueError(
                f"`{name}` must be None: got {type(einsum).__name__}. The kernels have their own matmuls: leave it out, say "
                "how exact these are by `precision`, or give the layer Flax's own dot_product_attention"
            )
    named: dict[str, Any] = dict(query=query, key=key, value=value)
    named = {name: as_array(name, array) for name, array in named.items()}
    for name, array in named.items():
        if jnp.iscomplexobj(array):
            raise TypeError(
                f"`{name}` must be real: got {array.dtype}. The kernels have no complex numbers: give the layer Flax's own "
                "dot_product_attention"
            )
    query, key, value = named.values()
    if promote_dtype is not None:
        arrays: Any = promote_dtype((query, key, value), dtype=dtype)
    else:
        dtype = jnp.result_type(query, key, value) if dtype is None else dtype
        arrays = [jnp.asarray(array, dtype) for array in (query, key, value)]

    for name, array in zip(("query", "key", "value"), arrays, strict=True):
        if array.ndim < 3:
            raise ValueError(f"`{name}` must have shape [batch..., length, heads, head_dim]: got {array.shape}")
    *batch_shape, query_length, heads, _ = arrays[0].shape
    for name, array in zip(("key", "value"), arrays[1:], strict=True):
        if [*array.shape[:-3]] != batch_shape:
            raise ValueError(
                f"`{name}` must have the batch axes of `query`, {tuple(batch_shape)}: got {array.shape[:-3]}"
            )
    if mask is not None:
        mask = _merge_batch_axes("mask", as_array("mask", mask).astype(bool), batch_shape)
    if bias is not None:
        bias = _merge_batch_axes("bias", as_array("bias", bias), batch_shape)
    query, key, value = (array.reshape(math.prod(batch_shape), *array.shape[-3:]) for array in arrays)
    with _matmul_precision(precision):
        output = dot_product_attention(
            query,
            key,
            value,
            bias,
            mask,
            scale=scale,
            is_causal=is_causal,
            local_window_size=local_window_size,
            key_ranges=key_ranges,
            mask_block_size=mask_block_size,
            implementation=implementation,
            dropout_rate=dropout_rate if dropout else 0.0,
            dropout_key=dropout_rng,
        )
    return output.reshape(*batch_shape, query_length, heads, output.shape[-1])


def _merge_batch_axes(name: str, array: jax.Array, batch_shape: list[int]) -> jax.Array:
    """`[batch..., heads, query, key]` with any axis 1 or absent → `[batch or 1, heads, query, key]`."""
    batch = array.shape[:-3][::-1]
    if len(batch) > len(batch_shape) or any(n not in (1, m) for n, m in zip(batch, batch_shape[::-1], strict=False)):
        raise ValueError(
            f"`{name}` must broadcast to [batch..., heads, query, key] with the batch axes {tuple(batch_shape)}: got shape "
            f"{array.shape}"
        )
    array = array.reshape((1,) * (len(batch_shape) + 3 - array.ndim) + array.shape)
    if math.prod(array.shape[:-3]) != 1:  # one mask for the whole batch stays one: attention broadcasts it unrepeated
        array = jnp.broadcast_to(array, (*batch_shape, *array.shape[-3:]))
    return array.reshape(math.prod(array.shape[:-3]), *array.shape[-3:])


def _matmul_precision(precision: Any) -> contextlib.AbstractContextManager[None]:
    """Flax's `precision` (a name, a `jax.lax.Precision`, or a pair of one of these) as a context."""
    if precision is None:
        return contextlib.nullcontext()
    if isinstance(precision, tuple) and not isinstance(precision, jax.lax.DotAlgorithm):
        if len(set(precision)) != 1:
            raise ValueError(f"`precision` must be the same for both operands of a matmul: got {precision}")
        precision = precision[0]
    if isinstance(precision, jax.lax.Precision):
        precision = precision.name.lower()
    try:
        return jax.default_matmul_precision(getattr(precision, "name", precision))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"`precision` must be a `jax.lax.Precision`, a name that `jax.default_matmul_precision` knows, or a pair of one: "
            f"got {precision!r}"
        ) from error
