"""The tiled reference against dense attention, and its memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from jax_flash_jvp import reference
from jax_flash_jvp.problem import DIFFERENTIABLE, Operands, Problem

ALL = (True,) * len(Operands._fields)
NONE = Operands(None, None, None)


@pytest.fixture(autouse=True)
def small_blocks_in_float64(monkeypatch):
    monkeypatch.setattr(reference, "BLOCK", 8)
    with jax.enable_x64(True):
        yield


# ---------------------------------------------------------------------------------------------------- calls


def call(
    queries=20, keys=20, heads=2, key_heads=2, channels=4, value_channels=4, scale=0.5, size=1.0,
    bias=None, mask=None, query_lengths=None, key_lengths=None, dtype="float64", **options,
):  # fmt: skip
    """(x, tx, cy, cty) of random numbers, and the Problem; `bias` and `mask` are shapes."""
    random = np.random.default_rng(0)

    def normal(*shape, dtype=dtype):
        return jnp.asarray(random.normal(size=shape), dtype)

    shapes = ((2, queries, heads, channels), (2, keys, key_heads, channels), (2, keys, key_heads, value_channels), bias)
    x = Operands(
        *[None if shape is None else size * normal(*shape) for shape in shapes],
        None if mask is None else jnp.asarray(random.random(size=mask) < 0.6),
        *[None if a is None else jnp.asarray(a, jnp.int32) for a in (query_lengths, key_lengths)],
    )
    tx = Operands(*[None if shape is None else normal(*shape) for shape in shapes])
    wide = jnp.promote_types(dtype, jnp.float32)
    cotangents = [(normal(2, queries, heads, value_channels), normal(2, heads, queries, dtype=wide)) for _ in range(2)]
    return (x, tx, *cotangents), Problem(scale, **options)


CALLS = {
    "T19-S23": {"queries": 19, "keys": 23},
    "T5-S3-one-tile-scale-zero": {"queries": 5, "keys": 3, "scale": 0.0, "bias": (1, 1, 5, 3)},
    "T1-S17-bias": {"queries": 1, "keys": 17, "bias": (2, 2, 1, 17)},
    "T17-S1-bias": {"queries": 17, "keys": 1, "bias": (1, 2, 17, 1)},
    "T19-S23-causal": {"queries": 19, "keys": 23, "is_causal": True},
    "T23-S9-N4-K1-causal": {"queries": 23, "keys": 9, "heads": 4, "key_heads": 1, "is_causal": True},
    "T22-S19-window": {"queries": 22, "keys": 19, "window": (3, 1)},
    "window-causal-bias-by-column": {"window": (6, 2), "is_causal": True, "bias": (1, 2, 1, 20)},
    "N6-K2-H4-Hv3-bias-by-both": {"heads": 6, "value_channels": 3, "bias": (1, 6, 20, 20)},
    "bias-by-row-mask-by-column": {"bias": (2, 1, 20, 1), "keys": 19, "mask": (2, 1, 1, 19)},
    "bias-one-number-mask-by-both": {"bias": (1, 1, 1, 1), "queries": 19, "mask": (2, 2, 19, 20)},
    "lengths-zero": {"query_lengths": (0, 15), "key_lengths": (15, 0)},
    "everything": {
        "queries": 19, "keys": 21, "heads": 4, "bias": (1, 4, 1, 21), "mask": (2, 1, 19, 21), "is_causal": True,
        "query_lengths": (7, 19), "key_lengths": (21, 12), "window": (13, 2), "scale": -0.7,
    },
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------- derivatives


def dense(x, problem):
    mask = x.mask
    if x.bias is not None:
        finite = x.bias > -jnp.inf
        mask = finite if mask is None else mask & finite
    output, log_sum_exp = oracle.attention(
        *x[:DIFFERENTIABLE],
        mask,
        scale=problem.scale,
        is_causal=problem.is_causal,
        query_seq_lengths=x.query_lengths,
        key_value_seq_lengths=x.key_lengths,
        local_window_size=problem.window,
        return_residual=True,
    )
    return output, log_sum_exp.mT


def moving(x):
    return tuple(a for a in x[:DIFFERENTIABLE] if a is not None)


def of_moving(function, x, problem):
    def f(*arrays):
        arrays = iter(arrays)
        return function(Operands(*[None if a is None else next(arrays) for a in x[:DIFFERENTIABLE]], *x[4:]), problem)

    return f


def by_jax(function, x, tx, cy, cty, problem):
    """(y, ty), the gradients for cy, and (the gradients for cty, their tangents), by JAX from `function` alone."""
    f = of_moving(function, x, problem)

    def gradients(arrays, cotangents):
        return jax.vjp(f, *arrays)[1](cotangents)

    second = jax.jvp(gradients, (moving(x), cty), (moving(tx), cy))
    return jax.jvp(f, moving(x), moving(tx)), gradients(moving(x), cy), second


def by_reference(x, tx, cy, cty, problem):
    """The same, by the functions of the reference."""
    y, ty = reference.forward_dual(x, tx, problem)
    second = reference.backward_dual(x, y, cty, (tx, ty, cy), problem, ALL, ALL)
    return (y, ty), moving(reference.backward(x, y, cy, problem, ALL)), tuple(map(moving, second))


def third_by_jax(function, x, tx, problem):
    """A second tangent and its gradients."""

    def second(*arrays):
        f = of_moving(function, x, problem)
        return jax.jvp(lambda *a: jax.jvp(f, a, moving(tx))[1], arrays, moving(tx))[1]

    output, pull = jax.vjp(second, *moving(x))
    return output, pull(jax.tree.map(jnp.cos, output))


@functools.cache
def jitted(function):
    return jax.jit(function, static_argnames="problem")


def compiled(function, *arrays_and_problem):
    *arrays, problem = arrays_and_problem
    return jitted(function)(*arrays, problem=problem)


by_oracle = functools.partial(by_jax, dense)
third_by_oracle = functools.partial(third_by_jax, dense)


def assert_equal(actual, exact, tolerance=1e-10):
    assert jax.tree.structure(actual) == jax.tree.structure(exact)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(exact), strict=True):
        largest = np.abs(np.where(np.isfinite(b), b, 1)).max(initial=1)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * largest)


# ---------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_equals_dense_attention_to_second_order(options):
    (x, tx, cy, cty), problem = call(**options)

    def both(x, tx, cy, cty, problem):
        return by_reference(x, tx, cy, cty, problem), reference.forward(x, problem)

    exact = compiled(by_oracle, x, tx, cy, cty, problem)
    assert_equal(compiled(both, x, tx, cy, cty, problem), (exact, exact[0][0]))


def test_differentiates_by_jax():
    arrays, problem = call(**CALLS["everything"])
    exact = compiled(by_oracle, *arrays, problem)
    assert_equal(compiled(functools.partial(by_jax, reference.forward), *arrays, problem), exact)


def test_third_order():
    (x, tx, _, _), problem = call(**CALLS["everything"])
    exact = compiled(third_by_oracle, x, tx, problem)
    assert_equal(compiled(functools.partial(third_by_jax, reference.forward), x, tx, problem), exact)


def test_the_backward_differentiates_by_jax():
    arrays, problem = call(bias=(1, 2, 1, 20), is_causal=True)

    def pairs(x, tx, cy, cty, problem):
        y, ty = reference.forward_dual(x, tx, problem)

        def gradients(x, y, cotangents):
            return reference.backward(x, y, cotangents, problem, ALL)

        dual = jax.jvp(gradients, (x, y, cty), (tx, ty, cy))
        return dual, reference.backward_dual(x, y, cty, (tx, ty, cy), problem, ALL, ALL)

    assert_equal(*compiled(pairs, *arrays, problem))


@pytest.mark.parametrize("i", range(DIFFERENTIABLE))
def test_none_is_zero(i):
    """One tangent, one cotangent, one gradient at a time."""
    (x, tx, cy, cty), problem = call(queries=19, bias=(2, 1, 19, 1), is_causal=True)
    zeros = jax.tree.map(jnp.zeros_like, (tx, cy))
    one = tuple(j == i for j in range(len(x)))
    tx, full_tx = (Operands(*map(pick, one, tx, z)) for z in (NONE, zeros[0]))
    cy, full_cy = (tuple(map(pick, (i == 0, i == 1), cy, z)) for z in ((None, None), zeros[1]))
    cty, full_cty = (tuple(map(pick, (i == 2, i in (0, 3)), cty, z)) for z in ((None, None), zeros[1]))

    def sparse(x, tx, cy, cty, problem):
        y, ty = reference.forward_dual(x, tx, problem)
        first = reference.backward(x, y, cy, problem, one)
        second = reference.backward_dual(x, y, cty, (tx, ty, cy), problem, one, one)
        assert all([a is not None for a in gradients] == list(one) for gradients in (first, *second))
        return (y, ty), first[i], (second[0][i], second[1][i])

    dual, first, second = compiled(by_oracle, x, full_tx, full_cy, full_cty, problem)
    exact = dual, first[i], (second[0][i], second[1][i])
    assert_equal(compiled(sparse, x, tx, cy, cty, problem), exact)


def pick(condition, a, b):
    return a if condition else b


def test_no_tangent_at_all():
    (x, _, cy, cty), problem = call()

    def pairs(x, cy, cty, problem):
        y, ty = reference.forward_dual(x, NONE, problem)
        dual = reference.backward_dual(x, y, cty, (NONE, (None, None), cy), problem, ALL, ALL)
        plain = tuple(reference.backward(x, y, c, problem, ALL) for c in (cty, cy))
        still = reference.backward_dual(x, y, (None, None), (NONE, (None, None), (None, None)), problem, ALL, ALL)
        zeros = jax.tree.map(jnp.zeros_like, (y, plain))
        return (dual, ty, still), (plain, *zeros)

    assert_equal(*compiled(pairs, x, cy, cty, problem))


# ---------------------------------------------------------------------------------------------------- edges


@pytest.mark.parametrize("order", ["second", "third"])
def test_rows_without_keys_are_zero(order):
    """Hidden by the mask, by a bias of -∞, by lengths; large logits beside them."""
    (x, tx, cy, cty), problem = call(bias=(1, 2, 20, 20), mask=(2, 1, 20, 20), query_lengths=(20, 12), size=10.0)
    bias = x.bias.at[:, :, :, 3].set(-jnp.inf).at[:, :, 5].set(-jnp.inf)
    x = x._replace(bias=bias, mask=x.mask.at[0, 0, 9:17].set(False).at[1, 0, 2].set(False))
    hidden = np.zeros((2, 20), bool)
    hidden[:, 5] = hidden[0, 9:17] = hidden[1, 2] = hidden[1, 12:] = True
    if order == "second":
        exact, actual = (compiled(f, x, tx, cy, cty, problem) for f in (by_oracle, by_reference))
        ((o, log_sum_exp), (t_o, mu)), first, second = actual
        assert np.array_equal(log_sum_exp[:, 0] == -np.inf, hidden)
        rows = [o, t_o, mu.mT, first[0], second[0][0], second[1][0]]
    else:
        exact = compiled(third_by_oracle, x, tx, problem)
        actual = compiled(functools.partial(third_by_jax, reference.forward), x, tx, problem)
        rows = [actual[0][0], actual[0][1].mT, actual[1][0]]
    assert_equal(actual, exact)
    assert all(np.isfinite(a).all() for a in rows)
    assert not any(np.asarray(a)[hidden].any() for a in rows)


def test_huge_logits():
    arrays, problem = call(size=200.0, dtype="float16", is_causal=True)
    for a in jax.tree.leaves(compiled(by_reference, *arrays, problem)):
        assert np.isfinite(a).all()


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 5, 5), (2, 0, 5), (2, 9, 0)])
def test_nothing_to_attend_to(batch, queries, keys):
    shapes = ((batch, queries, 4, 3), (batch, keys, 2, 3), (batch, keys, 2, 5), (1, 4, queries, keys))
    x = Operands(*map(jnp.ones, shapes))
    cy = jnp.ones((batch, queries, 4, 5)), jnp.ones((batch, 4, queries))
    ((o, log_sum_exp), ty), first, second = compiled(by_reference, x, x, cy, cy, Problem(1.0, is_causal=True))
    assert log_sum_exp.shape == cy[1].shape
    assert (log_sum_exp == -np.inf).all()
    for actual, like in ((o, cy[0]), (ty, cy), (first, moving(x)), (second, (moving(x), moving(x)))):
        assert_equal(actual, jax.tree.map(jnp.zeros_like, like))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_as_exact_as_dense_attention_in_the_same_dtype(dtype):
    options = {"queries": 29, "keys": 37, "heads": 4, "channels": 16, "value_channels": 8, "bias": (1, 4, 1, 37)}
    arrays, problem = call(dtype=dtype, scale=0.25, **options)
    wide = jax.tree.map(lambda a: a.astype(jnp.float64), arrays)
    exact = compiled(by_oracle, *wide, problem)
    oracle.assert_close(compiled(by_reference, *arrays, problem), exact, compiled(by_oracle, *arrays, problem))


def test_a_tangent_that_moves_all_scores_alike_loses_nothing():
    """As exact as with the softmax's tangent formed at once, in which μ is subtracted before any rounding."""
    (x, tx, _, _), problem = call(dtype="bfloat16", keys=37, heads=4, channels=16)
    tx = tx._replace(key=(tx.key + 30 * tx.key[:, :1]).astype(jnp.bfloat16))

    def tangent(x, tx, problem):
        return reference.forward_dual(x, tx, problem)[1]

    def of_dense(x, tx, problem):
        return jax.jvp(of_moving(dense, x, problem), moving(x), moving(tx))[1]

    exact = compiled(of_dense, *jax.tree.map(lambda a: a.astype(jnp.float64), (x, tx)), problem)
    actual, naive = compiled(tangent, x, tx, problem), compiled(of_dense, x, tx, problem)
    for i in range(2):  # the output apart from μ, which is large
        oracle.assert_close(*(result[i] for result in (actual, exact, naive)))


# ---------------------------------------------------------------------------------------------------- memory


def jvp(function):
    return lambda x, problem: jax.jvp(lambda x: function(x, problem), (x,), (x,))[1]


def grad(function):
    def squares(x, problem):
        return sum((a**2).sum() for a in jax.tree.leaves(function(x, problem)))

    return lambda x, problem: jax.grad(squares)(x, problem)


def every_kernel(x, problem):
    y, ty = reference.forward_dual(x, x, problem)
    dual = reference.backward_dual(x, y, ty, (x, ty, y), problem, ALL, ALL)
    return dual, reference.backward(x, y, y, problem, ALL)


FUNCTIONS = {
    "every-kernel": every_kernel,
    "grad": grad(reference.forward),
    "jvp-of-jvp": jvp(jvp(reference.forward)),
    "jvp-of-grad": jvp(grad(reference.forward)),
    "grad-of-jvp": grad(jvp(reference.forward)),
    "grad-of-dual": grad(lambda x, problem: reference.forward_dual(x, x, problem)),
    "grad-of-jvp-of-jvp": grad(jvp(jvp(reference.forward))),
    "grad-of-every-kernel": grad(every_kernel),
}


def long_call(length):
    array = jax.ShapeDtypeStruct((1, length, 1, 4), jnp.float32)
    return Operands(array, array, array, jax.ShapeDtypeStruct((1, 1, 1, length), jnp.float32))


def largest(jaxpr):
    """The number of elements of the largest array in a jaxpr, inner ones included."""
    sizes = [v.aval.size for e in jaxpr.eqns for v in e.outvars]
    return max(sizes + [largest(getattr(j, "jaxpr", j)) for e in jaxpr.eqns for j in inner_jaxprs(e)], default=0)


def inner_jaxprs(equation):
    return [j for j in jax.tree.leaves(list(equation.params.values())) if hasattr(j, "eqns")]


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_arrays_grow_as_the_length(function):
    problem = Problem(0.5, is_causal=True)
    short, long = (largest(jax.make_jaxpr(lambda x: function(x, problem))(long_call(n)).jaxpr) for n in (128, 256))
    assert 0 < short < long <= 2 * short


@pytest.mark.parametrize("name", ["every-kernel", "grad-of-jvp", "jvp-of-jvp"])
def test_compiled_memory_grows_as_the_length(name):
    problem = Problem(0.5)
    short, long = (
        jax.jit(lambda x: FUNCTIONS[name](x, problem))
        .lower(long_call(n))
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
        for n in (512, 1024)
    )
    assert long <= 2.1 * short
