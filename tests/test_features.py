"""Every feature of attention, with derivatives of first and second order, on the interpreted kernels and on the tiled
reference, against dense attention in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from jax_flash_jvp import dot_product_attention

SHAPE = B, T, S, N, K = 2, 19, 35, 2, 2  # in tiles of 16, the last ragged
D, E = 4, 4  # channels of queries and keys, and of values
SEGMENTS = [np.sort(np.random.default_rng(i).integers(0, 4, (B, n)), 1).astype(np.int32) for i, n in enumerate((T, S))]
SPARSE = np.random.default_rng(2).random((B, N, T, S)) < 0.1
SPARSE[:, :, 16:] = False  # rows that see nothing, and tiles to leave out
SPARSE[:, 0, :, :16] = False


def lengths(*numbers):
    return np.array(numbers, np.int32)


def bias(*shape):
    return dict(bias=oracle.normal(9, *shape))


CASES = {
    "bias": bias(B, N, T, S),
    "bias-by-key": bias(1, 1, 1, S),
    "bias-by-query": bias(B, N, T, 1),
    "bias-by-head": bias(1, N, 1, 1),
    "bias-by-batch-and-key": bias(B, 1, 1, S),
    "bias-hides": dict(bias=np.where(np.arange(S) % 3, 0.0, -np.inf)[None, None, None]),
    "mask": dict(mask=SPARSE),
    "mask-by-key": dict(mask=np.arange(S)[None, None, None] > 20),
    "mask-by-batch": dict(mask=SPARSE[:, :1]),
    "key-lengths": dict(key_value_seq_lengths=lengths(18, 0)),
    "query-lengths": dict(query_seq_lengths=lengths(19, 7)),
    "lengths-causal": dict(
        query_seq_lengths=lengths(17, 19), key_value_seq_lengths=lengths(35, 7), is_causal=True
    ),
    "segments": dict(query_segment_ids=SEGMENTS[0], key_value_segment_ids=SEGMENTS[1]),
    "segments-causal": dict(query_segment_ids=SEGMENTS[0], key_value_segment_ids=SEGMENTS[1], is_causal=True),
    "window": dict(local_window_size=(5, 3)),
    "window-left": dict(local_window_size=(19, None)),
    "window-right": dict(local_window_size=(None, 2)),
    "window-causal": dict(local_window_size=(17, 0), is_causal=True, causal_alignment="lower_right"),
    "window-wide": dict(local_window_size=(30, 20), key_value_seq_lengths=lengths(35, 30)),
    "lower-right": dict(is_causal=True, causal_alignment="lower_right"),
    "soft-cap": dict(logits_soft_cap=0.7),
    "soft-cap-bias-causal": dict(logits_soft_cap=1.3, is_causal=True, **bias(1, N, T, S)),
    "sinks": dict(sinks=oracle.normal(8, N), is_causal=True),
    "sinks-without-keys": dict(sinks=oracle.normal(8, N), mask=SPARSE),
    "dropout": dict(dropout_rate=0.4),
    "dropout-bias-window": dict(dropout_rate=0.25, local_window_size=(20, 4), **bias(1, 1, T, S)),
    "values-of-other-width": dict(width=7),
    "grouped-bias": dict(shape=(1, 9, 18, 4, 2), bias=oracle.normal(9, 1, 2, 9, 18)),
    "grouped-bias-of-all-heads": dict(shape=(1, 9, 18, 4, 2), dropout_rate=0.3, bias=oracle.normal(9, 1, 4, 1, 18)),
    "grouped-mask": dict(shape=(2, 9, 18, 4, 2), mask=SPARSE[:, :, :9, :18], logits_soft_cap=1.0),
    "grouped-segments": dict(
        shape=(2, 9, 18, 4, 1), query_segment_ids=SEGMENTS[0][:, :9], key_value_segment_ids=SEGMENTS[1][:, :18]
    ),
    "long-window": dict(shape=(1, 70, 90, 1, 1), local_window_size=(40, 9), causal_alignment="lower_right"),
    "long-causal-lengths": dict(
        shape=(2, 50, 50, 1, 1), is_causal=True, local_window_size=(30, 0),
        query_seq_lengths=lengths(50, 33), key_value_seq_lengths=lengths(41, 50),
    ),
    "everything": dict(
        mask=SPARSE | (np.arange(S) == 3), is_causal=True, logits_soft_cap=2.0, dropout_rate=0.1, width=3,
        key_value_seq_lengths=lengths(35, 22), query_segment_ids=SEGMENTS[0] // 2, key_value_segment_ids=SEGMENTS[1] // 2,
        sinks=oracle.normal(8, N), local_window_size=(30, 5), **bias(B, N, 1, S),
    ),
}  # fmt: skip
SIZES = ("shape", "width")
SEED = jax.random.key_data(jax.random.key(5))


@functools.cache
def every_derivative(case):
    static = {name: a for name, a in CASES[case].items() if not isinstance(a, np.ndarray) and name not in SIZES}

    def compute(attention, x, tx, extra, t_extra, fixed, cy, cty):
        moving = (*x, extra), (*tx, t_extra)

        def f(*x):
            *x, extra = x
            return attention(*x, **extra, **fixed, **static, return_residual=True)

        y, tangent = jax.linearize(f, *moving[0])
        cy, cty = (jax.tree.map(lambda c, y: jnp.where(jnp.isneginf(y), 0, c).astype(y.dtype), c, y) for c in (cy, cty))
        return {
            "forward": y,
            "forward with tangent": jax.jvp(f, *moving),
            "tangent": tangent(*moving[1]),
            "backward": jax.linear_transpose(tangent, *moving[0])(cy),
            "gradient of the tangent": jax.vjp(lambda x, tx: jax.jvp(f, x, tx), *moving)[1]((cy, cty)),
            "tangent of the gradient": jax.jvp(lambda x, cy: jax.vjp(f, *x)[1](cy), (moving[0], cy), (moving[1], cty)),
        }

    return compute


@functools.cache
def kept(rate, B, T, S, N, K):
    """What dropout multiplies the probabilities by: shown by equal scores and unit vectors for values."""
    x = jnp.zeros((B, T, N, 1)), jnp.zeros((B, S, K, 1)), jnp.broadcast_to(jnp.eye(S)[None, :, None], (B, S, K, S))
    key = jax.random.wrap_key_data(SEED)
    probabilities = np.asarray(dot_product_attention(*x, dropout_rate=rate, dropout_key=key)).transpose(0, 2, 1, 3)
    return (probabilities > 0) / np.float32(1 - rate)


def check(case, implementation, dtype):
    arrays = {name: a for name, a in CASES[case].items() if isinstance(a, np.ndarray)}
    width, (B, T, S, N, K) = CASES[case].get("width", E), CASES[case].get("shape", SHAPE)
    shapes = [(B, T, N, D), (B, S, K, D), (B, S, K, width)]
    x, tx = ([oracle.normal(10 * i + j, *s) for j, s in enumerate(shapes)] for i in range(2))
    cy, cty = ((oracle.normal(20 + i, B, T, N, width), oracle.normal(30 + i, B, T, N)) for i in range(2))
    extra = {name: a for name, a in arrays.items() if np.issubdtype(a.dtype, np.floating)}
    t_extra = {name: oracle.normal(40, *a.shape) for name, a in extra.items()}
    fixed = {name: a for name, a in arrays.items() if name not in extra}
    rate = CASES[case].get("dropout_rate", 0)
    factors = kept(rate, B, T, S, N, K) if rate else None  # now, not while JAX traces

    def result_of(*args, **named):
        if rate:
            named["dropout_key"] = jax.random.wrap_key_data(jnp.asarray(SEED))
        return dot_product_attention(*args, **named, implementation=implementation)

    def naive(*args, dropout_rate=0, **named):
        return oracle.attention(*args, **named, kept=factors)

    inputs = (x, tx, extra, t_extra, fixed, cy, cty)
    oracle.assert_as_exact_as_naive(every_derivative(case), result_of, inputs, dtype, largest_score=4, naive=naive)


@pytest.mark.parametrize("implementation", ["interpret", "xla"])
@pytest.mark.parametrize("case", CASES)
def test_float32(case, implementation):
    check(case, implementation, "float32")


@pytest.mark.parametrize("case", ["bias", "mask", "soft-cap", "dropout", "everything"])
def test_bfloat16(case):
    check(case, "interpret", "bfloat16")


@pytest.mark.parametrize("implementation", ["interpret", "xla"])
def test_vmap(implementation):
    """Over some arguments, and over a batch that shares the others."""
    x = [
        jnp.asarray(oracle.normal(i, 3, *s), jnp.float32)
        for i, s in enumerate([(B, 5, N, D), (B, 18, N, D), (B, 18, N, E)])
    ]
    bias, t_bias = (jnp.asarray(oracle.normal(i, 1, 1, 5, 18), jnp.float32) for i in (8, 9))
    fixed = dict(
        mask=jnp.asarray(SPARSE[:, :1, :5, :18] | (np.arange(18) == 0)), key_value_seq_lengths=jnp.asarray(lengths(18, 9)),
        dropout_rate=0.3, implementation=implementation,
    )  # fmt: skip
    keys = jax.random.split(jax.random.key(0), 3)

    def f(q, k, v, key, bias):
        attend = lambda bias, q: dot_product_attention(q, k, v, bias, dropout_key=key, **fixed)
        o, pull = jax.vjp(attend, bias, q)
        return o, jax.jvp(attend, (bias, q), (t_bias, q))[1], pull(o)

    got = jax.vmap(f, in_axes=(0, 0, 0, 0, None))(*x, keys, bias)
    expected = jax.tree.map(lambda *a: jnp.stack(a), *(f(*(a[i] for a in x), keys[i], bias) for i in range(3)))
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_is_random(rate):
    """At its rate, and independent of the neighbour along every axis and of what another key drops."""
    shape = (2, 200, 210, 3, 3)
    dropped = kept(rate, *shape) == 0
    deviation = (rate * (1 - rate) / dropped.size) ** 0.5
    assert abs(dropped.mean() - rate) < 4 * deviation
    for axis in range(4):
        first, second = (np.take(dropped, range(i, dropped.shape[axis] - 1 + i), axis) for i in range(2))
        correlation = np.corrcoef(first.ravel(), second.ravel())[0, 1]
        assert abs(correlation) < 4 / first.size**0.5
    rows = dropped.mean(-1).ravel()  # binomial, too
    assert rows.std() == pytest.approx((rate * (1 - rate) / shape[2]) ** 0.5, rel=0.1)


def test_dropout_of_two_keys_and_none():
    x = [jnp.asarray(oracle.normal(i, B, 9, N, D), jnp.float32) for i in range(3)]
    attend = lambda seed, rate: dot_product_attention(*x, dropout_rate=rate, dropout_key=jax.random.key(seed))
    assert (attend(0, 0.3) == attend(0, 0.3)).all()
    assert (attend(0, 0.3) != attend(1, 0.3)).any()
    assert (attend(0, 0.0) == dot_product_attention(*x)).all()
