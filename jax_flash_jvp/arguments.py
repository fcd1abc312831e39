"""The arguments of the public function: what they must be, and in the form in which all that follows has them."""

import functools
import os
import pathlib
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash_jvp.problem import DTYPES, Operands, Precision, dropout_rate_of, mask_block_of, window_of

LARGEST = np.iinfo(np.int32).max
XLA_DETERMINISTIC = ("--xla_gpu_deterministic_ops", "--xla_gpu_exclude_nondeterministic_ops")
LENGTHS = ("query_seq_lengths", "key_value_seq_lengths")
SEGMENTS = ("query_segment_ids", "key_value_segment_ids")
FLOATING = ("query", "key", "value", "bias", "mask")  # the others are integers


# ------------------------------------------------------------------------------------------------ arrays


def normalised(arrays: dict[str, Any]) -> dict[str, Any]:
    """By name, arrays of JAX with the axes that were given; shapes that cannot be meant raise."""
    given = {name: as_array(name, a) if name in FLOATING else _index(name, a) for name, a in arrays.items()}
    ndim = given["query"].ndim
    for name in ("query", "key", "value"):
        if given[name].ndim != ndim or ndim not in (3, 4):
            raise ValueError(
                f"`query`, `key` and `value` must all have shape [batch, length, heads, head dimension] or all "
                f"[length, heads, head dimension]: got {name} of shape {given[name].shape}"
            )
        if not all(isinstance(n, int) for n in given[name].shape[-3:]):
            raise ValueError(
                f"only the batch of a symbolic shape (jax.export) may be a symbol: got {name} of shape {given[name].shape}; "
                "export the function once for each length"
            )
    for name in ("bias", "mask"):
        if given[name] is not None and given[name].ndim == 3:
            _check_three_axes(name, given[name], given["query"], given["key"])
    return given


def _check_three_axes(name: str, a: jax.Array, query: jax.Array, key: jax.Array) -> None:
    """Checks a bias or mask of three axes: the first is that of the heads, not of the batch."""
    if a.shape[0] not in {1, query.shape[-2], key.shape[-2]}:
        raise ValueError(
            f"`{name}` of three axes must be [heads, query length, key length]: got {a.shape}; for one for each batch entry "
            f"pass `{name}[:, None]`"
        )
    if query.ndim == 4 and a.shape[0] == query.shape[0] != 1:
        warnings.warn(
            f"`{name}` of three axes means one for each head, and there are as many heads as batch entries: got {a.shape}; write "
            f"`{name}[None]` if that is meant, or `{name}[:, None]` for one for each batch entry",
            stacklevel=4,
        )


def with_all_axes(name: str, a: jax.Array | None, batched: bool) -> jax.Array | None:
    """With one for the batch, and those along which it is broadcast."""
    if a is None:
        return None
    if name in FLOATING:
        return _four_dimensional(name, a)
    if name in (*LENGTHS, *SEGMENTS):
        return a[None] if not batched and a.ndim == (name in SEGMENTS) else a
    return _five_dimensional(a)


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
        raise TypeError(f"`{name}` is {a.dtype}: set `jax_enable_x64` where the call is traced, or cast it")
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
            raise ValueError(f"`{name}` must fit {limits.dtype} unless `jax_enable_x64` is set: got {least} to {most}")
    return as_array(name, a)


def known(a: Any) -> list[int] | None:
    """The numbers of an array in the host's memory, whose reading waits for no device."""

    def elsewhere(a: Any) -> bool:
        on_host = lambda: a.is_fully_addressable and all(d.platform == "cpu" for d in a.devices())
        return isinstance(a, jax.core.Tracer) or (isinstance(a, jax.Array) and not on_host())

    return None if any(map(elsewhere, jax.tree.leaves(a))) else np.ravel(a).tolist()


def in_int32(x: Operands) -> Operands:
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


def sinks_of(sinks: Any, heads: int) -> jax.Array:
    scores = as_array("sinks", sinks)
    if scores.dtype.name not in DTYPES:
        raise TypeError(f"`sinks` must be one of {', '.join(DTYPES)}: got {scores.dtype}; cast it")
    if scores.shape != (heads,):
        raise ValueError(f"`sinks` must have shape ({heads},), one number for each query head: got {scores.shape}")
    return scores


def seed_of(key: Any, batch: int) -> jax.Array:
    if key is None:
        raise ValueError("`dropout_key` must be given where `dropout_rate` is above 0")
    try:
        numbers = jax.lax.bitcast_convert_type(jax.random.bits(key, (batch, 2), "uint32"), jnp.int32)
    except (TypeError, ValueError) as error:
        got = f"{type(key).__name__} of shape {np.shape(key)}"
        raise TypeError(f"`dropout_key` must be one key of jax.random: got {got}") from error
    return jnp.pad(numbers, ((0, 0), (0, 3)))


# ------------------------------------------------------------------------------------------------ numbers and flags


def rate_of(dropout_rate: Any, dropout_key: Any) -> float:
    if dropout_key is not None and dropout_rate is None:
        raise ValueError("`dropout_key` has no effect without a `dropout_rate`: pass a rate, or leave out the key")
    return dropout_rate_of("dropout_rate", number("dropout_rate", dropout_rate, 0.0))


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


def traced_scale(scale: jax.Array) -> jax.Array:
    if scale.shape or jnp.issubdtype(scale.dtype, jnp.complexfloating):
        raise TypeError(f"`scale` must be a real number: got {scale.dtype} of shape {scale.shape}")
    return scale


def window(size: Any) -> tuple[int | None, int | None] | None:
    if any(isinstance(n, jax.core.Tracer) for n in jax.tree.leaves(size)):
        raise TypeError("`local_window_size` must be known when the call is traced; make it a static argument")
    return window_of(size)


def block_of(size: Any, mask: Any) -> tuple[int, int] | None:
    if any(isinstance(n, jax.core.Tracer) for n in jax.tree.leaves(size)):
        raise TypeError("`mask_block_size` must be known when the call is traced; make it a static argument")
    return mask_block_of(size, mask)


def flag(name: str, value: Any) -> bool:
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"`{name}` must be True or False when the call is traced; make it a static argument")
    if np.ndim(value) or np.asarray(value).dtype != bool:
        raise TypeError(f"`{name}` must be True or False: got {type(value).__name__}")
    return bool(value)


def xla_is_deterministic() -> bool:
    """By its own flags."""
    return _asks_for_determinism(os.environ.get("XLA_FLAGS", "").strip())


@functools.cache  # XLA reads them once
def _asks_for_determinism(text: str) -> bool:
    """Flags, of which the last counts, or the file where they stand."""
    if text and not text.startswith("-") and os.path.isfile(text):
        text = pathlib.Path(text).read_text()
    flags = dict(word.partition("=")[::2] for word in text.split())
    return any(flags.get(name, "false").lower() in ("", "true", "1") for name in XLA_DETERMINISTIC)


def warn_of_drift() -> None:
    """That copies of the weights may differ where GPUs share a sequence: once, and not where XLA_FLAGS say otherwise."""
    if jax.default_backend() == "gpu" and not xla_is_deterministic():
        _warn_of_drift()


@functools.cache
def _warn_of_drift() -> None:
    warnings.warn(
        "several GPUs share a sequence, and XLA may add the same sums in another order on each: their copies of the weights can "
        "drift apart. Compile the training step with compiler_options={'xla_gpu_deterministic_ops': True}, or set "
        "XLA_FLAGS=--xla_gpu_deterministic_ops=true, which also silences this warning",
        stacklevel=4,
    )


def precision() -> Precision:
    """The precision of float32 products in the kernels, from the matrix-product precision in force."""
    exact = ("highest", "float32", "f32_f32_f32")
    asked = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    return "ieee" if str(asked).lower() in exact else "tf32"
