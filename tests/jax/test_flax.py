"""Flax's attention layers with our attention agree with the same layers with Flax's own, in value and derivatives."""

import functools
import inspect

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_flash_jvp.flax
import oracle
from jax_flash_jvp import dot_product_attention
from jax_flash_jvp.flax import attention_fn

HEADS, FEATURES, LENGTH = 2, 12, 7


def nnx_layer(attention, dtype, **options):
    layer = nnx.MultiHeadAttention(
        HEADS, FEATURES, attention_fn=attention, dtype=dtype, decode=False, rngs=nnx.Rngs(0), **options
    )
    graph, parameters = nnx.split(layer)
    return parameters, lambda parameters, x, **arguments: nnx.merge(graph, parameters)(x, **arguments)


def linen_layer(attention, dtype, **options):
    layer = flax.linen.MultiHeadDotProductAttention(HEADS, attention_fn=attention, dtype=dtype, **options)
    parameters = layer.init(jax.random.key(0), jnp.zeros((1, LENGTH, FEATURES)))
    return parameters, layer.apply


LAYERS = {
    "nnx": (nnx_layer, nnx.dot_product_attention),
    "linen": (linen_layer, flax.linen.dot_product_attention),
}


def random(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def random_mask(shape: tuple[int, ...]) -> np.ndarray:
    """True for about half, and always for a query's own key, so that every query sees something."""
    return (random(9, shape) > 0) | np.eye(LENGTH, dtype=bool)


def value_and_derivatives(make_layer, attention, dtype, batch, **arguments):
    """The output, its tangent, and the gradients of parameters and input, computed in `dtype`."""
    with jax.enable_x64(dtype == "float64"):
        parameters, apply = make_layer(attention, jnp.dtype(dtype))
        parameter_dtype = jnp.promote_types(dtype, jnp.float32)
        parameters = jax.tree.map(lambda a: jnp.asarray(a, parameter_dtype), parameters)
        x, t_x, d_o = (jnp.asarray(random(i, (*batch, LENGTH, FEATURES)), parameter_dtype) for i in range(3))
        t_parameters = jax.tree.map(lambda a: jnp.asarray(random(3, a.shape), a.dtype), parameters)

        @jax.jit
        def everything(parameters, x):
            function = functools.partial(apply, **arguments)
            output, tangent = jax.jvp(function, (parameters, x), (t_parameters, t_x))
            gradients = jax.grad(lambda *primals: jnp.sum(function(*primals) * d_o), argnums=(0, 1))(parameters, x)
            return output, tangent, gradients

        return everything(parameters, x)


def assert_as_exact_as_flax(flavour, dtype, batch, **arguments):
    make_layer, flax_attention = LAYERS[flavour]
    exact = value_and_derivatives(make_layer, flax_attention, "float64", batch, **arguments)
    naive = value_and_derivatives(make_layer, flax_attention, dtype, batch, **arguments)
    ours = value_and_derivatives(make_layer, attention_fn, dtype, batch, **arguments)
    oracle.assert_close(ours, exact, naive)


@pytest.mark.parametrize(
    ("flavour", "batch", "dtype"),
    [("nnx", (), "float32"), ("nnx", (2, 3), "bfloat16"), ("linen", (), "bfloat16")],
    ids=["nnx-B-float32", "nnx-B2x3-bfloat16", "linen-B-bfloat16"],
)
def test_without_mask(flavour, batch, dtype):
    assert_as_exact_as_flax(flavour, dtype, batch)


@pytest.mark.parametrize("flavour", LAYERS)
@pytest.mark.parametrize(("heads", "kind"), [(1, np.float32), (HEADS, bool)], ids=["shared-float", "per-head-bool"])
def test_mask(flavour, heads, kind):
    mask = random_mask((2, 3, heads, LENGTH, LENGTH)).astype(kind)
    assert_as_exact_as_flax(flavour, "float32", (2, 3), mask=mask)


def test_causal_mask_of_flax():
    """Flax makes its masks in float32, one for every element of the batch."""
    assert_as_exact_as_flax("linen", "float32", (3,), mask=flax.linen.make_causal_mask(jnp.ones((3, LENGTH))))


def test_no_batch_and_no_keys():
    query, key = jnp.zeros((0, 4, HEADS, 8)), jnp.zeros((0, 0, HEADS, 8))
    assert attention_fn(query, key, key, mask=jnp.ones((0, 1, 4, 0), bool)).shape == query.shape


def test_softmax_is_in_float32_whatever_linen_asks():
    x = jnp.asarray(random(0, (3, LENGTH, HEADS, 8)), jnp.bfloat16)
    np.testing.assert_array_equal(attention_fn(x, x, x, force_fp32_for_softmax=True), attention_fn(x, x, x))


def test_is_causal():
    assert_as_exact_as_flax("nnx", "float32", (3,), is_causal=True)


@pytest.mark.parametrize("shape", [(), (HEADS,), (3, 1), (1, 1, HEADS), (1, 3, 1), (2, 3, HEADS)], ids=str)
@pytest.mark.parametrize("name", ["bias", "mask"])
def test_broadcast_over_batch_and_heads(name, shape):
    query, key, value = (jnp.asarray(random(i, (2, 3, LENGTH, HEADS, 8)), jnp.float32) for i in range(3))
    array = (random_mask if name == "mask" else functools.partial(random, 5))((*shape, LENGTH, LENGTH))
    whole = np.broadcast_to(array, (2, 3, HEADS, LENGTH, LENGTH))
    expected = jax.vmap(lambda q, k, v, b: jax.nn.dot_product_attention(q, k, v, **{name: b}))(query, key, value, whole)
    np.testing.assert_allclose(attention_fn(query, key, value, **{name: array}), expected, rtol=1e-5, atol=1e-5)


def test_grouped_queries():
    query = jnp.asarray(random(0, (2, 3, LENGTH, 4, 8)), jnp.float32)
    key, value = (jnp.asarray(random(i, (2, 3, LENGTH, 2, 8)), jnp.float32) for i in (1, 2))
    repeated = attention_fn(query, jnp.repeat(key, 2, axis=-2), jnp.repeat(value, 2, axis=-2))
    np.testing.assert_allclose(attention_fn(query, key, value), repeated, rtol=1e-5, atol=1e-5)


def test_dtypes_are_promoted():
    query, key, value = (jnp.asarray(random(i, (LENGTH, HEADS, 8)), jnp.float32) for i in range(3))
    assert attention_fn(query, key.astype(jnp.bfloat16), value).dtype == jnp.float32
    assert attention_fn(query, key, value, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    by_flax = attention_fn(query, key, value, dtype=jnp.bfloat16, promote_dtype=nnx.nn.dtypes.promote_dtype)
    assert by_flax.dtype == jnp.bfloat16


def test_options_are_fixed_with_partial():
    query, key, value = (jnp.asarray(random(i, (1, LENGTH, HEADS, 8)), jnp.float32) for i in range(3))
    windowed = functools.partial(attention_fn, local_window_size=(2, 0), scale=0.5, implementation="xla")
    expected = jax.nn.dot_product_attention(query, key, value, local_window_size=(2, 0), scale=0.5)
    np.testing.assert_allclose(windowed(query, key, value), expected, rtol=1e-5, atol=1e-5)
    for make_layer, _ in LAYERS.values():
        parameters, apply = make_layer(windowed, jnp.float32)
        assert apply(parameters, jnp.ones((1, LENGTH, FEATURES))).shape == (1, LENGTH, FEATURES)


def test_every_argument_of_flax_is_known():
    ours = inspect.signature(attention_fn).parameters
    assert set(inspect.signature(nnx.dot_product_attention).parameters) <= set(ours)


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        (None, "tensorfloat32"),
        ("highest", "highest"),
        (jax.lax.Precision.HIGH, "high"),
        ((jax.lax.Precision.HIGHEST,) * 2, "highest"),
        (jax.lax.DotAlgorithmPreset.F32_F32_F32, "F32_F32_F32"),
    ],
    ids=str,
)
def test_precision_holds_for_the_call(monkeypatch, precision, expected):
    seen = []

    def spy(query, *_, **__):
        seen.append(jax.config.jax_default_matmul_precision)
        return query

    monkeypatch.setattr(jax_flash_jvp.flax, "dot_product_attention", spy)
    array = jnp.ones((LENGTH, HEADS, 8))
    with jax.default_matmul_precision("tensorfloat32"):
        attention_fn(array, array, array, precision=precision)
    assert seen == [expected]


def test_precision_that_differs_between_operands():
    array = jnp.ones((LENGTH, HEADS, 8))
    with pytest.raises(ValueError, match="`precision` must be the same for both operands"):
        attention_fn(array, array, array, precision=("high", "highest"))


@pytest.mark.parametrize("flavour", LAYERS)
def test_dropout(flavour):
    """Each head drops its own; not the same for all, which is what Flax does unless asked otherwise."""
    make_layer, _ = LAYERS[flavour]
    options = dict(keep_rngs=False) if flavour == "nnx" else {}
    parameters, apply = make_layer(attention_fn, jnp.float32, dropout_rate=0.1, deterministic=True, **options)
    x = jnp.ones((1, LENGTH, FEATURES))
    assert apply(parameters, x).shape == x.shape
    array = jax.random.normal(jax.random.key(1), (LENGTH, HEADS, 8))
    dropout = dict(dropout_rng=jax.random.key(0), dropout_rate=0.1)
    with pytest.raises(ValueError, match=r"`broadcast_dropout` must be False where .* above 0: got 0.1.*deterministic"):
        attention_fn(array, array, array, **dropout)
    dropped = attention_fn(array, array, array, broadcast_dropout=False, **dropout)
    expected = dot_product_attention(array, array, array, dropout_rate=0.1, dropout_key=dropout["dropout_rng"])
    np.testing.assert_array_equal(dropped, expected)
    kept = attention_fn(array, array, array, deterministic=True, **dropout)
    np.testing.assert_array_equal(kept, attention_fn(array, array, array))


def test_batch_axes_must_agree():
    q, k = jnp.ones((2, 3, 4, 2, 4)), jnp.ones((3, 2, 4, 2, 4))
    with pytest.raises(ValueError, match=r"`key` must have the batch axes of `query`, \(2, 3\): got \(3, 2\)"):
        attention_fn(q, k, k)
    with pytest.raises(ValueError, match="`query` must have shape"):
        attention_fn(jnp.ones((4, 4)), k, k)
    with pytest.raises(ValueError, match="`dropout_rng` must be given"):
        attention_fn(q, q, q, dropout_rate=0.1, broadcast_dropout=False)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        (dict(query=None), TypeError, "`query` must be an array: got None"),
        (dict(mask=np.ones((3, 4, 5, 5))), ValueError, r"`mask` must broadcast to .* batch axes \(2,\): got shape"),
        (dict(bias=np.ones((1, 2, 4, 5, 5))), ValueError, r"`bias` must broadcast to"),
        (dict(precision="bogus"), ValueError, r"`precision` must be a .* got 'bogus'"),
        (
            dict(precision=jax.lax.DotAlgorithm(np.float32, np.float32, np.float32)),
            ValueError,
            "`precision` must be a ",
        ),
        (dict(dropout_rate="much"), TypeError, "`dropout_rate` must be a number: got str"),
        (
            dict(einsum_dot_general=jax.lax.dot_general),
            ValueError,
            "`einsum_dot_general` must be None: got .*own matmuls",
        ),
        (
            dict(qk_attn_weights_einsum=jnp.einsum),
            ValueError,
            "`qk_attn_weights_einsum` must be None: got .*own matmuls",
        ),
        (
            dict(attn_weights_value_einsum=jnp.einsum),
            ValueError,
            "`attn_weights_value_einsum` must be None: got .*own matmuls",
        ),
        (
            dict(value=1j * np.ones((2, 5, 4, 8)), dtype="float32"),
            TypeError,
            "`value` must be real: got complex.*Flax's own",
        ),
    ],
)
def test_errors_name_the_argument(changes, error, text):
    x = np.ones((2, 5, 4, 8), np.float32)
    with pytest.raises(error, match=text):
        attention_fn(**{**dict(query=x, key=x, value=x), **changes})


@pytest.mark.parametrize("of", [nnx, flax.linen], ids=["nnx", "linen"])
def test_in_place_of_the_function_of_flax(of):
    x = [jnp.asarray(random(i, (2, LENGTH, HEADS, 4)), jnp.float32) for i in range(3)]
    got, expected = (f(*x, dtype=jnp.bfloat16).astype(jnp.float32) for f in (attention_fn, of.dot_product_attention))
    np.testing.assert_allclose(got, expected, rtol=2**-6, atol=2**-6)
    assert attention_fn(*x, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    dropped = attention_fn(*x, dropout_rate=1.0, broadcast_dropout=False, dropout_rng=jax.random.key(0))
    assert not dropped.any()
