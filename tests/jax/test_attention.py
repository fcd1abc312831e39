"""The public function: its arguments, its errors, and its agreement with jax.nn.dot_product_attention."""

import inspect
import itertools
import pathlib
import re
import subprocess
import sys
import tomllib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash_jvp
import oracle
from jax_flash_jvp import dot_product_attention

B, T, S, N, K, H = 2, 5, 7, 4, 2, 8
QUERY, KEY, VALUE = (oracle.normal(i, *shape) for i, shape in enumerate([(B, T, N, H), (B, S, K, H), (B, S, K, H)]))
LENGTHS = np.array([3, 5], np.int32)
BIAS = oracle.normal(3, B, N, T, S)
MASK = (oracle.normal(4, B, N, T, S) > 0) | (np.arange(S) == 0)  # every query sees a key

ARGUMENTS = {
    "plain": {},
    "scale": dict(scale=-0.3),
    "scale-zero": dict(scale=0),
    "scale-numpy": dict(scale=np.float32(0.5)),
    "causal": dict(is_causal=True),
    "query-lengths": dict(query_seq_lengths=LENGTHS),
    "key-lengths": dict(key_value_seq_lengths=LENGTHS),
    "both-lengths": dict(query_seq_lengths=LENGTHS, key_value_seq_lengths=LENGTHS[::-1]),
    "window": dict(local_window_size=(2, 1)),
    "window-one-number": dict(local_window_size=1),
    "window-causal": dict(local_window_size=(2, 1), is_causal=True),
    "window-ahead": dict(local_window_size=(-1, 2)),
    "everything": dict(
        bias=BIAS, mask=MASK, scale=0.5, is_causal=True, key_value_seq_lengths=LENGTHS, local_window_size=(9, 3)
    ),
    **{f"bias-{s}": dict(bias=oracle.normal(3, *s)) for s in [(B, N, T, S), (1, 1, T, 1), (T, S), (S,), ()]},
    **{f"mask-{a.shape}": dict(mask=a) for a in (MASK, MASK[:, :1], MASK[0], MASK[0, 0], MASK[0, 0, :1])},
}


def float32(*arrays):
    return tuple(jnp.asarray(a, jnp.float32) for a in arrays)


# ------------------------------------------------------------------------------------------------ like jax.nn's


def test_signature():
    ours, theirs = (inspect.signature(f).parameters for f in (dot_product_attention, jax.nn.dot_product_attention))
    ours, theirs = ([(p.name, p.kind, p.default) for p in parameters.values()] for parameters in (ours, theirs))
    assert ours[: len(theirs)] == theirs


@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
def test_agrees_with_jax(arguments):
    arrays = {name: a for name, a in arguments.items() if isinstance(a, np.ndarray)}
    static = {name: a for name, a in arguments.items() if name not in arrays}

    def compute(attention, query, key, value, arrays):
        output, residual = attention(query, key, value, **arrays, **static, return_residual=True)
        if "query_seq_lengths" in arrays:  # of rows that see nothing we give a residual of -inf, jax.nn some number
            seen = jnp.arange(T)[:, None] < arrays["query_seq_lengths"][:, None, None]
            residual = jnp.where(seen, residual, 0)
        return output, residual

    def compute_all(attentions, *arrays):
        return [compute(attention, *arrays) for attention in attentions]

    arrays = (QUERY, KEY, VALUE, arrays)
    exact = oracle.evaluate(compute, oracle.attention, arrays, "float64")
    attentions = (oracle.attention, jax.nn.dot_product_attention, dot_product_attention)
    naive, theirs, ours = oracle.evaluate(compute_all, attentions, arrays, "float32")
    oracle.assert_close(theirs, exact, naive)
    oracle.assert_close(ours, exact, naive)


@pytest.mark.parametrize("arguments", [{}, dict(bias=BIAS[0]), dict(mask=MASK[0], is_causal=True)])
def test_without_batch_axis(arguments):
    query, key, value = float32(QUERY[0], KEY[0], VALUE[0])
    output, residual = dot_product_attention(query, key, value, **arguments, return_residual=True)
    expected = dot_product_attention(query[None], key[None], value[None], **arguments, return_residual=True)
    assert (output.shape, residual.shape) == ((T, N, H), (T, N))
    np.testing.assert_array_equal(output, expected[0][0])
    np.testing.assert_array_equal(residual, expected[1][0])
    assert dot_product_attention(query, key, value).shape == (T, N, H)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_grouped_queries_share_consecutive_heads(heads):
    query, key, value = float32(QUERY, oracle.normal(1, B, S, heads, H), oracle.normal(2, B, S, heads, H))
    repeated = [jnp.repeat(a, N // heads, axis=2) for a in (key, value)]
    np.testing.assert_allclose(
        dot_product_attention(query, key, value), dot_product_attention(query, *repeated), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dtypes(dtype):
    def compute(attention, query, key, value, bias):
        return attention(query, key, value, bias, return_residual=True)

    oracle.assert_as_exact_as_naive(compute, dot_product_attention, (QUERY, KEY, VALUE, BIAS), dtype)


def test_bias_of_another_dtype():
    query, key, value = (jnp.asarray(a, jnp.bfloat16) for a in (QUERY, KEY, VALUE))
    (bias,) = float32(BIAS)

    def total(attention):
        return jax.value_and_grad(lambda b: attention(query, key, value, b).astype(jnp.float32).sum())(bias)

    got, expected = total(dot_product_attention), total(oracle.attention)
    assert got[1].dtype == jnp.float32
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2**-6, atol=2**-6)


def test_value_with_channels_of_its_own():
    value = oracle.normal(2, B, S, K, 3)
    oracle.assert_as_exact_as_naive(lambda f, *x: f(*x), dot_product_attention, (QUERY, KEY, value), "float32")


def test_numpy_arrays_and_static_arguments_under_jit():
    arrays = [np.float32(a) for a in (QUERY, KEY, VALUE)]
    eager = dot_product_attention(*arrays, is_causal=np.True_, local_window_size=[np.int32(2), jnp.array(1)])
    jitted = jax.jit(dot_product_attention, static_argnames=("is_causal", "local_window_size", "implementation"))
    got = jitted(*float32(QUERY, KEY, VALUE), is_causal=True, local_window_size=(2, 1), implementation="xla")
    np.testing.assert_allclose(got, eager, rtol=1e-6, atol=1e-6)
    of_jax = dot_product_attention(*arrays, is_causal=jnp.bool_(True), local_window_size=[2, 1])
    np.testing.assert_array_equal(of_jax, eager)


# ------------------------------------------------------------------------------------------------ edges


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
@pytest.mark.parametrize("sizes", [(0, T, S), (B, 0, S), (B, T, 0)], ids=["no-batch", "no-queries", "no-keys"])
def test_empty_axes(sizes, implementation):
    b, t, s = sizes
    x = [jnp.ones(shape) for shape in [(b, t, N, H), (b, s, K, H), (b, s, K, H)]]

    def attend(*x):
        return dot_product_attention(*x, implementation=implementation, return_residual=True)

    (output, residual), (t_output, t_residual) = jax.jvp(attend, x, x)
    for a in (output, t_output, t_residual):
        assert not a.any()
    assert output.shape == (b, t, N, H)
    assert residual.shape == (b, t, N)
    assert np.isneginf(residual).all()
    for gradient, a in zip(jax.grad(lambda *x: attend(*x)[0].sum(), (0, 1, 2))(*x), x, strict=True):
        assert gradient.shape == a.shape
        assert not gradient.any()


@pytest.mark.parametrize("sizes", [(0, 0, H), (0, K, H), (N, K, 0)], ids=["no-heads", "no-query-heads", "no-channels"])
def test_no_heads_or_no_channels(sizes):
    heads, key_heads, channels = sizes
    x = [jnp.zeros(s) for s in [(B, T, heads, channels), (B, S, key_heads, channels)]] + [
        jnp.ones((B, S, key_heads, 3))
    ]
    attend = lambda *x: dot_product_attention(
        *x, bias=jnp.asarray(BIAS[:, :1]), is_causal=True, local_window_size=(9, None)
    )
    output = attend(*x)
    np.testing.assert_allclose(output, jnp.ones((B, T, heads, 3)), rtol=1e-6)
    gradient = jax.grad(lambda *x: (attend(*x) ** 2).sum(), (0, 1, 2))
    for derivatives in jax.jvp(gradient, x, x):
        for a, b in zip(derivatives, x, strict=True):
            assert a.shape == b.shape
            assert jnp.isfinite(a).all()


@pytest.mark.parametrize(
    "arguments",
    [
        dict(bias=BIAS, is_causal=True, key_value_seq_lengths=LENGTHS, local_window_size=(9, 3)),
        dict(mask=MASK, logits_soft_cap=2.0, sinks=np.ones(N)),
        dict(dropout_rate=0.5, dropout_key=jax.random.key(0), query_seq_lengths=LENGTHS),
    ],
    ids=["bias-causal-lengths-window", "mask-cap-sinks", "dropout"],
)
def test_heads_that_are_too_wide_for_the_kernels(arguments, caplog):
    """The references serve them: here with channels of zero, which change nothing."""
    value = oracle.normal(5, B, S, K, 300)
    few = float32(QUERY, KEY, value)
    wide = float32(*(np.pad(a, [(0, 0)] * 3 + [(0, 272)]) for a in (QUERY, KEY)), value)
    attend = lambda *x: dot_product_attention(*x, scale=0.1, **arguments)

    def derivatives(x, t):
        gradient = jax.grad(lambda *x: jnp.sin(attend(*x)).sum(), (0, 1, 2))
        through = jax.grad(lambda *x: (jnp.sin(attend(*x)) * jax.jvp(attend, x, t)[1]).sum(), (0, 1, 2))
        return attend(*x), jax.jvp(attend, x, t)[1], *gradient(*x), *jax.jvp(gradient, x, t)[1], *through(*x)

    for got, expected in zip(derivatives(wide, wide), derivatives(few, few), strict=True):
        np.testing.assert_allclose(got[..., : expected.shape[-1]], expected, rtol=2e-4, atol=2e-4)
    reason = "a head dimension of 280 in `query` (1 to 256 are served)"
    with pytest.raises(
        ValueError, match=re.escape(f"'interpret' does not serve {reason}; leave `implementation` None")
    ):
        dot_product_attention(*wide, implementation="interpret")
    with caplog.at_level("DEBUG", "jax_flash_jvp"):
        jax.jit(attend).trace(*wide).lower(lowering_platforms=("cuda",))
    assert f"the kernels do not serve {reason}; the tiled reference computes it" in caplog.text


def test_the_log_says_that_there_is_no_gpu(caplog):
    with caplog.at_level("DEBUG", "jax_flash_jvp"):
        attend = lambda *x: dot_product_attention(*x)  # anew: JAX remembers what it has lowered
        jax.jit(attend).trace(*float32(QUERY, KEY, VALUE)).lower(lowering_platforms=("cpu",))
    assert "attention forward: this is not computed on an NVIDIA GPU; the tiled reference computes it" in caplog.text


def test_everything_is_dropped():
    x = float32(QUERY, KEY, VALUE)
    attend = lambda *x: dot_product_attention(*x, return_residual=True, **dropout)
    dropout = dict(dropout_rate=1, dropout_key=jax.random.key(0))
    (output, residual), tangents = jax.jvp(attend, x, x)
    assert not output.any()
    assert not tangents[0].any()
    assert not any(a.any() for a in jax.grad(lambda *x: (attend(*x)[0] + 1).sum(), (0, 1, 2))(*x))
    dropout = dict()
    expected, t_expected = jax.jvp(lambda *x: attend(*x)[1], x, x)
    np.testing.assert_array_equal(residual, expected)
    np.testing.assert_allclose(tangents[1], t_expected, rtol=1e-6)
    with pytest.raises(ValueError, match="`dropout_key` must be given"):
        dot_product_attention(*x, dropout_rate=1)


@pytest.mark.parametrize(
    ("dtype", "x64"),
    [*itertools.product(["int4", "uint8", "int16", "uint32"], [False, True]), ("int64", True), ("uint64", True)],
)
def test_every_dtype_of_integers_is_an_index(dtype, x64):
    x, draw = float32(QUERY, KEY, VALUE), np.random.default_rng(0)
    arrays = dict(key_value_seq_lengths=LENGTHS, query_segment_ids=draw.integers(0, 3, (B, T)))
    arrays = {
        n: a.astype(np.int32) for n, a in (arrays | dict(key_value_segment_ids=draw.integers(0, 3, (B, S)))).items()
    }
    expected = dot_product_attention(*x, **arrays)
    with jax.enable_x64(x64):
        attend = jax.jit(lambda arrays: dot_product_attention(*x, **arrays))
        for given in (arrays, {n: jnp.asarray(a, jnp.dtype(dtype)) for n, a in arrays.items()}):
            np.testing.assert_allclose(attend(given), expected, rtol=1e-6, atol=1e-6)


def test_indices_beyond_int32():
    x, long = float32(QUERY, KEY, VALUE), 2**32
    with jax.enable_x64(True):
        segments = np.array([[0, long, long, 0, 3 * long]] * B), np.array([[0, long, 3 * long, 0, long, 0, 0]] * B)
        expected = dot_product_attention(*x, mask=(segments[0][:, :, None] == segments[1][:, None])[:, None])
        segments = dict(zip(("query_segment_ids", "key_value_segment_ids"), map(jnp.asarray, segments), strict=True))
        got = jax.jit(lambda **k: dot_product_attention(*x, **k))(
            key_value_seq_lengths=jnp.array([long, S]), **segments
        )
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("window", [dict(local_window_size=(-1, -1)), dict(local_window_size=(-1, 4), is_causal=True)])
def test_a_window_without_keys_is_told_of(window):
    with pytest.warns(
        UserWarning, match="hides every key from every query: .*for no limit on a side pass None"
    ) as told:
        assert not dot_product_attention(*float32(QUERY, KEY, VALUE), **window).any()
    assert told[0].filename == __file__


@pytest.mark.parametrize(
    ("window", "keys"),
    [
        (dict(local_window_size=(3, -1)), "i - 3 … i - 1"),
        (dict(local_window_size=(3, -1), is_causal=True), "i - 3 … i - 1"),
        (dict(local_window_size=(-1, 2)), "i + 1 … i + 2"),
        (dict(local_window_size=(3, -2)), None),
        (dict(local_window_size=(None, -1)), None),
    ],
)
def test_a_window_with_a_limit_of_less_one_is_told_of(window, keys):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        dot_product_attention(*float32(QUERY, KEY, VALUE), **window)
    text = f"shows query i only the keys {keys}; for no limit on a side pass None, not -1"
    assert [text in str(warning.message) for warning in told] == ([True] if keys else [])


@pytest.mark.parametrize("make", [list, np.array, jnp.array])
def test_lengths_out_of_range_are_told_of(make):
    x = float32(QUERY, KEY, VALUE)
    with pytest.warns(
        UserWarning, match=r"`key_value_seq_lengths` should be between 0 and 7, .*: got \[-1, 9\]"
    ) as told:
        got = dot_product_attention(*x, key_value_seq_lengths=make([-1, 9]))
    assert told[0].filename == __file__
    with warnings.catch_warnings(action="error"):
        expected = dot_product_attention(*x, key_value_seq_lengths=make([0, S]))
        traced = jax.jit(lambda n: dot_product_attention(*x, key_value_seq_lengths=[n, 9]))(-1)
        dot_product_attention(*x, query_seq_lengths=make([0, T]))
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_allclose(traced, expected, rtol=1e-6, atol=1e-6)


def test_a_mask_for_batch_entries_or_heads():
    x = float32(QUERY[:, :, :B], KEY, VALUE)
    with pytest.warns(
        UserWarning, match=r"`mask` of three axes means one for each head, .*`mask\[None\]` if that is meant"
    ):
        by_head = dot_product_attention(*x, mask=MASK[0, :B])
    with warnings.catch_warnings(action="error"):
        np.testing.assert_array_equal(by_head, dot_product_attention(*x, mask=MASK[None, 0, :B]))
        dot_product_attention(*(a[0] for a in x), mask=MASK[0, :B])


@pytest.mark.parametrize("by", ["mask", "bias", "query_seq_lengths", "key_value_seq_lengths", "local_window_size"])
def test_queries_that_see_nothing(by):
    """They give zeros and -inf, and derivatives of zero, not NaN, in every order."""
    hidden = {
        "mask": dict(mask=MASK & (np.arange(T) != 2)[:, None]),
        "bias": dict(bias=np.where((np.arange(T) == 2)[:, None], -np.inf, BIAS)),
        "query_seq_lengths": dict(query_seq_lengths=np.array([0, 2], np.int32)),
        "key_value_seq_lengths": dict(key_value_seq_lengths=np.array([0, 2], np.int32)),
        "local_window_size": dict(query_length=12, local_window_size=(2, 0)),
    }[by]
    query = oracle.normal(0, B, hidden.pop("query_length", T), N, H)
    arrays = {name: a for name, a in hidden.items() if isinstance(a, np.ndarray)}
    static = {name: a for name, a in hidden.items() if name not in arrays}

    def compute(attention, x, arrays):
        def attend(*x):
            return attention(*x, **arrays, **static, return_residual=True)

        def loss(*x):
            output, residual = attend(*x)
            return jnp.sin(output).sum() + jnp.where(jnp.isneginf(residual), 0, residual).sum()

        gradient = jax.grad(loss, (0, 1, 2))
        return attend(*x), jax.jvp(attend, x, x)[1], gradient(*x), jax.jvp(gradient, x, x)[1]

    oracle.assert_as_exact_as_naive(compute, dot_product_attention, ((query, KEY, VALUE), arrays), "float32")


def test_tangents_of_what_only_selects():
    query, key, value = float32(QUERY, KEY, VALUE)
    mask, lengths = jnp.asarray(MASK), jnp.asarray(LENGTHS)

    def attend(query, mask, lengths):
        return dot_product_attention(query, key, value, mask=mask, key_value_seq_lengths=lengths)

    none = [np.zeros(a.shape, jax.dtypes.float0) for a in (mask, lengths)]
    got = jax.jvp(attend, (query, mask, lengths), (query, *none))[1]
    np.testing.assert_array_equal(got, jax.jvp(lambda q: attend(q, mask, lengths), (query,), (query,))[1])
    with pytest.raises(TypeError, match="tangent"):
        jax.jvp(attend, (query, mask, lengths), (query, mask, lengths))
    with pytest.raises(TypeError, match="bool"):
        jax.grad(lambda m: attend(query, m, lengths).sum())(mask)
    with pytest.raises((TypeError, ValueError), match="tangent"):
        jax.jvp(lambda q: attend(q, mask, lengths), (query,), (query[:1],))


# ------------------------------------------------------------------------------------------------ errors


def changed(**arrays):
    """The usual call, with arrays (or their shapes) replaced."""
    usual = dict(query=(B, T, N, H), key=(B, S, K, H), value=(B, S, K, H))
    return {
        n: np.zeros(a, np.float32) if isinstance(a, tuple) and n != "local_window_size" else a
        for n, a in (usual | arrays).items()
    }


ERRORS = {
    "none": (changed(key=None), TypeError, "`key` must be an array: got None"),
    "set": (changed(query={1}), TypeError, "`query` must be an array: got set"),
    "rank": (changed(value=(S, K, H)), ValueError, "all have shape [batch, length, heads, head dimension] or all [length, "),
    "rank-2": (changed(query=(T, H), key=(S, H), value=(S, H)), ValueError, "got query of shape (5, 8)"),
    "batch": (changed(key=(3, S, K, H), value=(3, S, K, H)), ValueError, "the same batch size: got 2, 3 and 3"),
    "length": (changed(value=(B, 6, K, H)), ValueError, "must be as long as `key`: got 6 rows in value and 7 in key"),
    "heads": (changed(value=(B, S, 1, H)), ValueError, "`value` must have as many heads as `key`: got 1 heads"),
    "channels": (changed(key=(B, S, K, 6)), ValueError, "got query[..., 8] and key[..., 6]"),
    "group": (changed(query=(B, T, 3, H)), ValueError, "must be a multiple of that of `key`: got 3 and 2"),
    "no-heads": (changed(key=(B, S, 0, H), value=(B, S, 0, H)), ValueError, "must be a multiple of that of `key`: got 4 and 0"),
    "swapped": (changed(query=(B, 3, 9, H), key=(B, 3, 7, H), value=(B, 3, 7, H)), ValueError, "swap these two axes of each"),
    "integers": (changed(query=jnp.zeros((B, T, N, H), int)), TypeError, "got int32; cast it first"),
    "random-keys": (changed(query=jax.random.split(jax.random.key(0), (B, T, N, H))), TypeError, "got key<fry>; cast"),
    "dtypes": (changed(key=jnp.zeros((B, S, K, H), "bfloat16")), TypeError, "got bfloat16 and float32; cast one"),
    "bias-bool": (changed(bias=jnp.ones((T, S), bool)), TypeError, "a boolean array belongs in `mask`"),
    "bias-integers": (changed(bias=jnp.ones((T, S), int)), TypeError, "float64: got int32; cast it"),
    "mask-float": (changed(mask=(T, S)), TypeError, "pass an additive mask as `bias`"),
    "bias-shape": (changed(bias=(B, N, S, T)), ValueError, "= (2, 4, 5, 7), or have the 2 heads of `key`: got (2, 4, 7, 5)"),
    "bias-rank": (changed(bias=(1, B, N, T, S)), ValueError, "`bias` must have at most four dimensions"),
    "mask-batch": (changed(mask=jnp.ones((3, T, S), bool)), ValueError, "entry pass `mask[:, None]`"),
    "mask-group": (changed(mask=jnp.ones((B, 3, T, S), bool)), ValueError, "`mask` must broadcast to (batch,"),
    "mask-of-padding": (
        changed(mask=jnp.ones((B, S), bool)), ValueError,
        "got (2, 7); if this is padding [batch, key length], pass `mask[:, None, None]`, or lengths as `key_value_seq_lengths`",
    ),
    "bias-of-padding": (changed(bias=(B, S)), ValueError, "got (2, 7); if this is padding [batch, key length], pass `bias["),
    "mask-two-axes": (changed(mask=jnp.ones((3, S), bool)), ValueError, "of `key`: got (3, 7)"),
    "lengths-shape": (
        changed(query_seq_lengths=jnp.ones(3, jnp.int32)), ValueError, "`query_seq_lengths` must have shape (2,), one"
    ),
    "lengths-dtype": (
        changed(key_value_seq_lengths=jnp.ones(B)), TypeError, "`key_value_seq_lengths` must be of integers: got float32"
    ),
    "scale-text": (changed(scale="big"), TypeError, "`scale` must be a number: got str"),
    "scale-nan": (changed(scale=float("nan")), ValueError, "`scale` must be finite in float32: got nan"),
    "scale-huge": (changed(scale=10**400), ValueError, "`scale` must be finite in float32: got inf"),
    "scale-digits": (changed(scale="0.5"), TypeError, "`scale` must be a number: got str"),
    "scale-complex": (changed(scale=np.complex64(1j)), TypeError, "`scale` must be a number: got complex64"),
    "scale-array": (changed(scale=np.ones(2)), TypeError, "`scale` must be a number: got ndarray"),
    "causal": (changed(is_causal="yes"), TypeError, "`is_causal` must be True or False: got str"),
    "window-three": (changed(local_window_size=(1, 2, 3)), TypeError, "or a pair of integers or None: got (1, 2, 3)"),
    "window-float": (changed(local_window_size=1.5), TypeError, "an integer or a pair of integers or None: got 1.5"),
    "window-bool": (changed(local_window_size=True), TypeError, "an integer or a pair of integers or None: got True"),
    "alignment": (changed(causal_alignment="right"), ValueError, "or 'lower_right': got 'right'"),
    "alignment-array": (changed(causal_alignment=np.arange(2)), ValueError, "or 'lower_right': got array([0, 1])"),
    "residual": (changed(return_residual="no"), TypeError, "`return_residual` must be True or False: got str"),
    "segments-alone": (
        changed(query_segment_ids=jnp.zeros((B, T), jnp.int32)), ValueError, "must be given together, or neither"
    ),
    "segments-shape": (
        changed(query_segment_ids=jnp.zeros((B, T), jnp.int32), key_value_segment_ids=jnp.zeros((B, T), jnp.int32)),
        ValueError, "`key_value_segment_ids` must have shape (2, 7), one segment for each key: got (2, 5)",
    ),
    "segments-dtype": (
        changed(query_segment_ids=jnp.zeros((B, T)), key_value_segment_ids=jnp.zeros((B, S), jnp.int32)),
        TypeError, "`query_segment_ids` must be of integers: got float32",
    ),
    "soft-cap": (
        changed(logits_soft_cap=-1.0), ValueError,
        "`logits_soft_cap` must be positive and at least 1e-30: got -1.0; leave it None",
    ),
    "tiny soft-cap": (changed(logits_soft_cap=1e-39), ValueError, "`logits_soft_cap` must be positive and at least"),
    "sinks-shape": (changed(sinks=jnp.zeros(K)), ValueError, "`sinks` must have shape (4,), one number for each query head: got"),
    "segments-of-two-dtypes": (
        changed(query_segment_ids=jnp.zeros((B, T), jnp.uint32), key_value_segment_ids=jnp.zeros((B, S), jnp.int32)),
        TypeError, "must fit one dtype: got uint32 and int32; cast one of them",
    ),
    "length-too-large": (
        changed(key_value_seq_lengths=[1, 2**40]), ValueError, "`key_value_seq_lengths` must fit int32 unless"
    ),
    "length-far-too-large": (
        changed(query_seq_lengths=np.array([1, 2**63], np.uint64)), ValueError, "`query_seq_lengths` must fit uint32 unless"
    ),
    "another-name": (changed(sm_scale=0.5), TypeError, "keyword argument 'sm_scale': did you mean `scale`?"),
    "of-flax": (changed(dtype="bfloat16"), TypeError, "'dtype': did you mean `jax_flash_jvp.flax.attention_fn`?"),
    "no-name": (changed(temperature=0.5), TypeError, "dot_product_attention() got an unexpected keyword argument 'temperature'"),
    "dropout-rate": (changed(dropout_rate=1.1), ValueError, "`dropout_rate` must be between 0 and 1: got 1.1"),
    "dropout-key": (changed(dropout_rate=0.5), ValueError, "`dropout_key` must be given where `dropout_rate` is above 0"),
    "dropout-key-alone": (
        changed(dropout_key=jax.random.key(0)), ValueError, "`dropout_key` has no effect without a `dropout_rate`: pass a rate"
    ),
    "dropout-key-type": (
        changed(dropout_rate=0.5, dropout_key="seed"), TypeError,
        "`dropout_key` must be one key of jax.random: got str of shape ()",
    ),
}  # fmt: skip


@pytest.mark.parametrize("implementation", [None, "xla", "triton", "interpret"])
@pytest.mark.parametrize(("arguments", "error", "text"), ERRORS.values(), ids=ERRORS)
def test_errors_at_the_door(arguments, error, text, implementation):
    with pytest.raises(error, match=re.escape(text)):
        dot_product_attention(**arguments, implementation=implementation)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_traced_scale_is_differentiated(dtype):
    x = tuple(jnp.asarray(a, dtype) for a in (QUERY, KEY, VALUE))

    def derivatives(attention):
        loss = lambda scale: (attention(*x, scale=scale, is_causal=True).astype(jnp.float32) ** 2).sum()
        scales = jnp.array([0.5, -0.25])
        return jax.jit(jax.vmap(jax.value_and_grad(loss)))(scales), jax.jvp(jax.grad(loss), (0.5,), (1.0,))

    want, got = derivatives(jax.nn.dot_product_attention), derivatives(dot_product_attention)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4 if dtype == jnp.float32 else 3e-2), got, want)
    root = jax.jit(lambda *x: dot_product_attention(*x, scale=1 / jnp.sqrt(H)))(*x)
    np.testing.assert_allclose(*np.float32([root, dot_product_attention(*x)]), rtol=1e-5, atol=2e-2)


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_a_traced_scale_and_padding_that_is_nan(implementation):
    query, lengths = jnp.asarray(QUERY, jnp.float32), jnp.full(QUERY.shape[0], 2, jnp.int32)

    def derivative(query):
        attend = lambda scale: dot_product_attention(
            query, KEY, VALUE, scale=scale, query_seq_lengths=lengths, implementation=implementation
        )
        return jax.grad(lambda scale: jnp.sin(attend(scale)).sum())(0.3)

    np.testing.assert_allclose(derivative(query.at[:, 2:].set(jnp.nan)), derivative(query), rtol=1e-5)


def test_a_traced_scale_under_strict_promotion():
    x = tuple(jnp.asarray(a, jnp.bfloat16) for a in (QUERY, KEY, VALUE))
    with jax.numpy_dtype_promotion("strict"):
        assert jax.jit(lambda scale: dot_product_attention(*x, scale=scale))(jnp.float32(0.3)).dtype == jnp.bfloat16


def test_errors_under_jit():
    with pytest.raises(TypeError, match=r"`logits_soft_cap` must be a number known when .* traced; make it a static"):
        jax.jit(lambda c: dot_product_attention(**changed(), logits_soft_cap=c))(0.5)
    for scale, got in ((jnp.ones(2), r"float32 of shape \(2,\)"), (1j, r"complex64 of shape \(\)")):
        with pytest.raises(TypeError, match="`scale` must be a real number: got " + got):
            jax.jit(lambda s: dot_product_attention(**changed(), scale=s))(scale)
    with pytest.raises(TypeError, match=r"`is_causal` must be True or False when .* traced; make it a static argument"):
        jax.jit(lambda c: dot_product_attention(**changed(), is_causal=c))(True)
    with pytest.raises(TypeError, match=r"`local_window_size` must be known when .* traced; make it a static argument"):
        jax.jit(lambda w: dot_product_attention(**changed(), local_window_size=(w, None)))(3)
    with pytest.raises(ValueError, match=r"`implementation` must be one of .*: got 'cudnn'; None takes the kernels"):
        dot_product_attention(**changed(), implementation="cudnn")


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_length_of_one_sequence_is_a_number(x64, wrap):
    x = [jnp.asarray(oracle.normal(i, n, 2, H), jnp.float32) for i, n in enumerate((T, S, S))]
    attend = wrap(lambda n: dot_product_attention(*x, query_seq_lengths=n, key_value_seq_lengths=jnp.int32(4)))
    with jax.enable_x64(x64):
        got = attend(3)
    np.testing.assert_allclose(got[:3], dot_product_attention(x[0][:3], x[1][:4], x[2][:4]), rtol=1e-5, atol=1e-6)
    assert not got[3:].any()


def test_only_the_batch_may_be_symbolic():
    batch, length = jax.export.symbolic_shape("batch, length")
    export = jax.export.export(jax.jit(dot_product_attention))
    of_shape = lambda *shape: [jax.ShapeDtypeStruct((*shape, heads, H), "float32") for heads in (N, K, K)]
    x = [oracle.normal(i, *a.shape).astype(np.float32) for i, a in enumerate(of_shape(3, T))]
    got = export(*of_shape(batch, T)).call(*x)
    np.testing.assert_allclose(got, dot_product_attention(*x), rtol=1e-6, atol=1e-6)
    fixed = [jax.ShapeDtypeStruct((batch, T, N, H), "float32")] * 3
    mask = MASK[:1, :, :, :T]
    masked = lambda *x: jax.vmap(lambda *x: dot_product_attention(*x, mask=mask))(*(a[:, None] for a in x))
    dropped = lambda *x: dot_product_attention(*x, dropout_rate=0.5, dropout_key=jax.random.key(0))
    bias = lambda bias, *x: jax.vmap(lambda *x: dot_product_attention(*x, bias=bias))(*(a[:, None] for a in x)).sum()
    gradient = lambda *x: jax.grad(bias)(jnp.zeros((T, T)), *x)
    for function in (masked, dropped, gradient):
        jax.export.export(jax.jit(function))(*fixed)
    assert not gradient(*(jnp.zeros((0, T, N, H)),) * 3).any()
    with pytest.raises(ValueError, match="'interpret' does not serve a symbolic batch"):
        jax.export.export(jax.jit(lambda *x: dot_product_attention(*x, implementation="interpret")))(*fixed)
    with pytest.raises(
        ValueError, match=r"only the batch of a symbolic shape .* got query .*; export the function once for each"
    ):
        export(*of_shape(B, length))


def test_attention_is_linear_in_the_values_alone():
    with pytest.raises(ValueError, match="linear in `value` alone"):
        jax.linear_transpose(lambda key: dot_product_attention(QUERY, key, VALUE), KEY)(QUERY)


def test_float64_is_not_served_by_the_kernels():
    with (
        jax.enable_x64(True),
        pytest.raises(ValueError, match=r"'interpret' does not serve float64 arrays \(cast them to float32\); leave"),
    ):
        dot_product_attention(*map(jnp.asarray, (QUERY, KEY, VALUE)), implementation="interpret")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of hosts without a GPU")
def test_triton_without_a_gpu():
    for function in (dot_product_attention, jax.jit(dot_product_attention, static_argnames="implementation")):
        with pytest.raises(ValueError, match=r"'triton' needs an NVIDIA GPU.*'xla'.*'interpret'"):
            function(*float32(QUERY, KEY, VALUE), implementation="triton")


# ------------------------------------------------------------------------------------------------ the package


def test_names_are_resolved_lazily():
    program = (
        "import sys, jax_flash_jvp, jax_flash_jvp.kernels.portable.jobs\n"
        "loaded = {'jax', 'jaxlib', 'torch'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
        "assert 'dot_product_attention' in dir(jax_flash_jvp)\n"
        "from jax_flash_jvp import dot_product_attention\n"
        "assert 'jax' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert set(jax_flash_jvp.__all__) <= set(dir(jax_flash_jvp))
    with pytest.raises(AttributeError, match="has no attribute 'attention_of_nobody'"):
        _ = jax_flash_jvp.attention_of_nobody


@pytest.mark.thorough
def test_numpy_as_strict_as_can_be():
    """No implicit promotion of dtypes or of ranks, in bfloat16 and float32."""
    ids = jnp.zeros((1, 300), jnp.int32)
    features = dict(
        is_causal=True, key_value_seq_lengths=jnp.array([280]), query_seq_lengths=jnp.array([290]), logits_soft_cap=2.0,
        local_window_size=(200, 3), query_segment_ids=ids, key_value_segment_ids=ids, sinks=jnp.ones(2), dropout_rate=0.1,
        dropout_key=jax.random.key(0), implementation="xla",
    )  # fmt: skip
    attend = lambda q: dot_product_attention(q, q, q, **features)
    loss = lambda q: attend(q).astype(jnp.float32).sum()
    for x64 in (False, True):
        with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"), jax.enable_x64(x64):
            for dtype in (jnp.bfloat16, jnp.float32):
                q = jnp.ones((1, 300, 2, 4), dtype)
                jax.jvp(jax.grad(loss), (q,), (q,))
                jax.linearize(attend, q)[1](q)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_nan_is_found_where_jax_looks_for_it(wrap):
    q = jnp.ones((1, 5, 2, 4))
    attend = wrap(lambda q: dot_product_attention(q, q, q, implementation="xla"))
    with jax.debug_nans(True):
        attend(q)
        with pytest.raises(FloatingPointError, match="nan"):
            attend(q.at[0, 0].set(jnp.nan))


def test_rows_that_see_nothing_where_jax_looks_for_infinities():
    attend = lambda q: dot_product_attention(q, q, q, key_value_seq_lengths=jnp.zeros(1, jnp.int32))
    q = jnp.ones((1, 5, 2, 4))
    with jax.debug_infs(True):
        assert not attend(q).any()
        assert not jax.grad(lambda q: attend(q).sum())(q).any()


@pytest.mark.parametrize("sink", [20.0, 0.0, -8.0, -16.0, -60.0])
def test_sinks_far_from_the_scores(sink):
    """Derivatives keep their digits where a sink takes next to nothing, or nearly all."""
    x = [oracle.normal(i, 1, 32, 2, 8) for i in range(3)]
    g, sinks = oracle.normal(3, 1, 32, 2, 8), np.full(2, sink)

    def derivatives(attend, dtype):
        *arrays, cotangent, at = (jnp.asarray(a, dtype) for a in (*x, g, sinks))
        loss = lambda s: (attend(*arrays, sinks=s) * cotangent).sum()
        along = jax.jvp(lambda s: attend(*arrays, sinks=s), (at,), (jnp.ones_like(at),))[1]
        return along, jax.grad(loss)(at), jax.hessian(loss)(at)

    with jax.enable_x64(True):
        exact = derivatives(oracle.attention, jnp.float64)
    for a, b in zip(derivatives(dot_product_attention, jnp.float32), exact, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * abs(b).max())


@pytest.mark.parametrize("sink", [np.inf, -np.inf])
def test_sinks_that_are_infinite(sink):
    q, at = jnp.asarray(oracle.normal(0, 1, 5, 2, 4), jnp.float32), jnp.full(2, sink)
    attend = lambda q, s: dot_product_attention(q, q, q, sinks=s)
    np.testing.assert_allclose(attend(q, at), dot_product_attention(q, q, q) if sink < 0 else 0 * q, atol=1e-6)
    loss = lambda q, s: (attend(q, s) ** 2).sum()
    for result in jax.tree.leaves(jax.jvp(jax.grad(loss, (0, 1)), (q, at), (q, jnp.ones(2)))):
        assert jnp.isfinite(result).all()


def test_sinks_do_not_hide_nan():
    q, k = jnp.full((1, 2, 1, 4), jnp.nan), jnp.ones((1, 3, 1, 4))
    attend = lambda sinks: dot_product_attention(q, k, k, sinks=sinks, return_residual=True)
    for result in range(2):
        value, gradient = jax.value_and_grad(lambda sinks, i=result: attend(sinks)[i].sum())(jnp.zeros(1))
        assert jnp.isnan(value)
        assert jnp.isnan(gradient).all()


@pytest.mark.parametrize(
    "case", [dict(logits_soft_cap=3.0), dict(dropout_rate=0.1, dropout_key=jax.random.key(0))], ids=str
)
def test_nothing_leaks_while_it_is_traced(case):
    """Beside causality, under which tiles are left out by a condition."""
    q = jnp.ones((1, 5, 2, 4))
    attend = lambda q: dot_product_attention(q, q, q, is_causal=True, implementation="xla", **case)
    with jax.checking_leaks():
        jax.jit(jax.grad(lambda q: jax.jvp(attend, (q,), (q,))[1].sum()))(q)


def test_float64_from_elsewhere():
    with jax.enable_x64(True):
        q = jnp.ones((1, 5, 2, 4), "float64")
    with pytest.raises(TypeError, match="`query` is float64: set `jax_enable_x64`"):
        dot_product_attention(q, q, q)


def test_vmap_over_nothing():
    x = jnp.ones((0, 2, 4, 2, 4))
    mask = jnp.ones((4, 4), bool)
    assert jax.vmap(lambda x: dot_product_attention(x, x, x, mask=mask))(x).shape == x.shape


@pytest.mark.parametrize("spec", [("x",), (None, "x"), (None, None, "x"), ("x", None, "y"), ()], ids=str)
def test_explicit_axes(spec):
    """Each result is spread as what it belongs to: the output as the queries, a gradient as its operand."""
    mesh = jax.make_mesh((2, 1), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    x = [jnp.asarray(oracle.normal(i, 4, 300, 4, 8), jnp.float32) for i in range(3)]
    attend = lambda *x: dot_product_attention(*x, is_causal=True, implementation="xla")

    def derivatives(*x):
        o, pull = jax.vjp(attend, *x)
        return o, pull(o), jax.jvp(attend, x, x), jax.jvp(jax.grad(lambda *x: attend(*x).sum(), (0, 1, 2)), x, x)

    expected = jax.jit(derivatives)(*x)
    specs = [jax.sharding.PartitionSpec(*spec), jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec()]
    with jax.set_mesh(mesh):
        q, k, v = (jax.device_put(a, jax.sharding.NamedSharding(mesh, s)) for a, s in zip(x, specs, strict=True))
        got = jax.jit(derivatives)(q, k, v)
        assert jax.typeof(got[0]).sharding == jax.typeof(q).sharding
        for a, like in zip(got[1], (q, k, v), strict=True):
            assert jax.typeof(a).sharding == jax.typeof(like).sharding
        attend(q, q, q)  # eager
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_what_is_not_mapped_is_spread_as_what_is():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    query, key = (jnp.asarray(oracle.normal(i, *lead, 1, 9, 2, 4), jnp.float32) for i, lead in enumerate(((), (4,))))
    attend = lambda query, key: dot_product_attention(query, key, key, implementation="xla")
    mapped = jax.jit(jax.vmap(lambda query, key: jax.jvp(attend, (query, key), (query, key))[1], (None, 0)))
    expected = mapped(query, key)
    with jax.set_mesh(mesh):
        got = mapped(query, jax.device_put(key, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))))
        assert jax.typeof(got).sharding.spec[0] == "x"
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)
    many = jax.device_put(key, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))
    got = jax.vmap(attend, (0, None))(many, query)  # where no mesh is set
    np.testing.assert_allclose(got, jax.vmap(attend, (0, None))(key, query), rtol=2e-5, atol=2e-5)


def test_third_order_on_explicit_axes():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = jnp.asarray(oracle.normal(0, 2, 300, 1, 4), jnp.float32)
    attend = lambda x: dot_product_attention(x, x, x, is_causal=True, implementation="xla")
    along = lambda f: lambda x: jax.jvp(f, (x,), (jnp.sin(x),))[1]
    third = jax.jit(jax.grad(lambda x: along(along(attend))(x).sum()))
    expected = third(x)
    with jax.set_mesh(mesh):
        got = third(jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))))
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("manual", ["x", "y"])
def test_explicit_axes_beside_manual_ones(manual):
    mesh = jax.make_mesh((2, 1), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    x = jnp.asarray(oracle.normal(0, 4, 5, 4, 8), jnp.float32)
    attend = lambda x: dot_product_attention(x, x, x, is_causal=True, implementation="xla")
    spec = jax.sharding.PartitionSpec(manual)
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(attend, in_specs=spec, out_specs=spec, axis_names={manual})
        got = jax.jit(mapped)(jax.device_put(x, jax.sharding.NamedSharding(mesh, spec)))
    np.testing.assert_allclose(got, attend(x), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("implementation", ["interpret", "xla"])
def test_a_bias_that_hides_in_every_dtype(implementation):
    q = jnp.ones((1, 5, 2, 4), jnp.bfloat16)
    for dtype in (jnp.bfloat16, jnp.float32):
        o = dot_product_attention(q, q, q, jnp.full((5, 5), -1e5, dtype), implementation=implementation)
        assert not o.any()


def test_without_triton():
    """As where there is none: macOS and Windows."""
    program = """
import sys
sys.modules["triton"] = sys.modules["jax_triton"] = None
import jax, jax.numpy as jnp
import jax_flash_jvp.flax
from jax_flash_jvp import dot_product_attention
q = jnp.ones((1, 4, 2, 8))
for implementation in (None, "xla"):
    gradient = jax.grad(lambda q: dot_product_attention(q, q, q, implementation=implementation).sum())
    assert jax.jvp(gradient, (q,), (q,))[1].shape == q.shape
try:
    dot_product_attention(q, q, q, implementation="interpret")
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("the kernels need Triton, which is not installed")
    text = (pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text()
    wanted = [d for d in tomllib.loads(text)["project"]["dependencies"] if "triton" in d]
    assert len(wanted) == 2
    assert all(d.endswith("; sys_platform == 'linux'") for d in wanted)


@pytest.mark.parametrize(
    ("flags", "deterministic", "expected"),
    [
        ("", None, False),
        ("", True, True),
        ("--xla_gpu_deterministic_ops=true", None, True),
        ("--xla_gpu_deterministic_ops --xla_other=1", None, True),
        ("--xla_gpu_deterministic_ops=true --xla_gpu_deterministic_ops=false", None, False),
        ("--xla_gpu_exclude_nondeterministic_ops=true", None, True),
        ("--xla_gpu_deterministic_ops=true", False, False),
    ],
)
def test_deterministic_or_as_the_framework_is(monkeypatch, flags, deterministic, expected):
    monkeypatch.setenv("XLA_FLAGS", flags)
    attend = lambda q: dot_product_attention(q, q, q, deterministic=deterministic)
    program = str(jax.make_jaxpr(attend)(jnp.ones((1, 4, 2, 8))))
    assert ("deterministic=True" in program) == expected


def test_flags_of_xla_may_stand_in_a_file(monkeypatch, tmp_path):
    (tmp_path / "flags").write_text("--xla_gpu_deterministic_ops=true\n")
    monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "flags"))
    program = str(jax.make_jaxpr(lambda q: dot_product_attention(q, q, q))(jnp.ones((1, 4, 2, 8))))
    assert "deterministic=True" in program
