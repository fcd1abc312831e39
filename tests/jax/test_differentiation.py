"""Derivatives of every mode and order, and vmap: their values in float64, and which kernels they run.

Control flow, rematerialisation and several devices are in test_control_flow.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from jax_flash_jvp import dot_product_attention
from oracle import normal

B, T, S, N, K, H = 2, 5, 6, 4, 2, 3
SHAPES = [(B, T, N, H), (B, S, K, H), (B, S, K, H)]
X, TX, UX = (tuple(normal(10 * i + j, *shape) for j, shape in enumerate(SHAPES)) for i in range(3))
Q, _, V = X
D_O = normal(30, B, T, N, H)
BIAS, T_BIAS = normal(31, 1, N, T, S), normal(32, 1, N, T, S)  # broadcast over the batch
MASK = normal(33, B, 1, T, S) > -1
LENGTHS = np.array([5, 6], np.int32)
ALL = (0, 1, 2)
STACKED, T_STACKED = (tuple(np.stack([a, 0.7 * a, -1.1 * a]) for a in x) for x in (X, TX))

SELECTION = dict(mask=MASK, key_value_seq_lengths=LENGTHS, query_seq_lengths=LENGTHS - 1, local_window_size=(3, 2))
EVERYTHING = dict(SELECTION, is_causal=True, scale=-0.7, return_residual=True)


def finite(residual):
    """Rows that see nothing have a log-sum-exp of -∞."""
    return jnp.where(jnp.isneginf(residual), 0, residual)


def call(a, **static):
    """Of the positional arguments alone."""

    def attend(*x):
        out = a(*x, **static)
        return (out[0], finite(out[1])) if static.get("return_residual") else out

    return attend


def sine(tree):
    return sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves(tree))


def dot(tree, other):
    return sum((a * b).sum() for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True))


def loss(a, **static):
    return lambda *x: (jnp.sin(call(a, **static)(*x)) * D_O).sum()


def gradient(a):
    return jax.grad(loss(a), ALL)


def jvp(a, **static):
    return lambda *x: jax.jvp(call(a, **static), x, TX)


def of_tangents(a, x):
    return lambda *t: jax.jvp(call(a), x, t)[1]


def both(a, stop=False):
    """A loss of the output and of its tangent."""

    def function(*x):
        y, ty = jvp(a)(*x)
        return (jnp.sin(y) * D_O).sum() + (jnp.cos(jax.lax.stop_gradient(ty) if stop else ty) * y).sum()

    return function


def linearized(a, *x):
    return jax.linearize(call(a), *x)


def hvp(a):
    return lambda *x: jax.jvp(gradient(a), x, TX)[1]


def gradient_of_gradient(a):
    return jax.grad(lambda *x: dot(gradient(a)(*x), TX), ALL)


def applied(pair, *tangents):
    """linearize's result, and its tangents."""
    return pair[0], [pair[1](*t) for t in tangents]


def transposed(a, q, k, v, *bias):
    """Of attention itself, as a function of the values."""

    def output(v):
        out = a(q, k, v, *bias)
        return out[0] if isinstance(out, tuple) else out

    return jax.linear_transpose(output, v)(D_O)


def solution(a, b):
    """x of 3 x + attention of x = b, which is transposed to be differentiated."""
    q = X[0][:, :, ::2]
    return jax.scipy.sparse.linalg.gmres(lambda x: 3 * x + a(q, q, x), b, tol=1e-14, solve_method="incremental")[0]


FORWARD_BACKWARD = dict(forward=1, backward=1)
DUAL = dict(forward_dual=1, backward_dual=1)

CASES = {
    # ---- forward mode
    "primal": (lambda a: call(a), X, dict(forward=1)),
    "jvp": (jvp, X, dict(forward_dual=1)),
    "jvp-of-jit": (lambda a: lambda *x: jax.jvp(jax.jit(call(a)), x, TX), X, None, dict(forward_dual=1)),
    "jvp-everything": (
        lambda a: lambda *x: jax.jvp(call(a, **EVERYTHING), x, (*TX, T_BIAS)), (*X, BIAS), dict(forward_dual=1)
    ),
    "jvp-residual": (lambda a: jvp(a, return_residual=True), X, dict(forward_dual=1)),
    # ---- reverse mode
    "grad": (gradient, X, FORWARD_BACKWARD),
    "grad-of-jit": (lambda a: jax.grad(jax.jit(loss(a)), ALL), X, None, FORWARD_BACKWARD),
    "grad-everything": (
        lambda a: jax.grad(lambda *x: sine(call(a, **EVERYTHING)(*x)), (0, 1, 2, 3)), (*X, BIAS), FORWARD_BACKWARD
    ),
    "grad-residual": (
        lambda a: jax.grad(lambda *x: sine(call(a, return_residual=True)(*x)[1]), ALL), X, FORWARD_BACKWARD
    ),
    "grad-of-query": (lambda a: jax.grad(loss(a)), X, FORWARD_BACKWARD),
    "grad-of-bias": (lambda a: jax.grad(loss(a, **SELECTION), 3), (*X, BIAS), FORWARD_BACKWARD),
    # ---- the linear map
    "linearize": (lambda a: lambda *x: applied(linearized(a, *x), TX, UX), X, dict(forward=1, tangent=2)),
    "linearize-everything": (
        lambda a: lambda *x: applied(jax.linearize(call(a, **EVERYTHING), *x), (*TX, T_BIAS)),
        (*X, BIAS), dict(forward=1, tangent=1),
    ),
    "transpose-of-linearize": (
        lambda a: lambda *x: jax.linear_transpose(linearized(a, *x)[1], *x)(D_O), X, FORWARD_BACKWARD
    ),
    "transpose-of-jvp": (lambda a: lambda *x: jax.linear_transpose(of_tangents(a, x), *x)(D_O), X, FORWARD_BACKWARD),
    "transpose-of-jit-of-jvp": (
        lambda a: lambda *x: jax.linear_transpose(jax.jit(of_tangents(a, x)), *x)(D_O), X, None, FORWARD_BACKWARD
    ),
    "transpose-of-attention": (lambda a: lambda *x: transposed(a, *x), X, FORWARD_BACKWARD),
    "transpose-of-jit-of-attention": (
        lambda a: lambda *x: transposed(jax.jit(call(a, **EVERYTHING)), *x, BIAS), X, None, FORWARD_BACKWARD
    ),
    "jvp-of-transpose": (lambda a: lambda *x: jax.jvp(lambda *x: transposed(a, *x), x, TX), X),
    "grad-of-transpose": (lambda a: jax.grad(lambda *x: sine(transposed(a, *x)), (0, 1)), X),
    "grad-of-linear-solver": (lambda a: jax.grad(lambda v: sine(solution(a, v))), (normal(34, B, T, K, H),)),
    "vjp-of-jvp-in-tangents": (lambda a: lambda *x: jax.vjp(of_tangents(a, x), *TX)[1](D_O), X),
    # ---- gradients through the tangent
    "grad-of-jvp": (lambda a: jax.grad(both(a), ALL), X, DUAL),
    "grad-of-jit-of-jvp": (lambda a: jax.grad(jax.jit(both(a)), ALL), X, None, DUAL),
    "grad-of-jvp-everything": (
        lambda a: jax.grad(
            lambda q, k, v, b, tq: sine(jax.jvp(call(a, **EVERYTHING), (q, k, v, b), (tq, *TX[1:], T_BIAS))),
            (0, 1, 2, 3, 4),
        ),
        (*X, BIAS, TX[0]), DUAL,
    ),
    "grad-of-jvp-stopped": (lambda a: jax.grad(both(a, stop=True), ALL), X, dict(forward_dual=1, backward=1)),
    "grad-of-jit-of-jvp-stopped": (
        lambda a: jax.grad(jax.jit(both(a, stop=True)), ALL), X, None, dict(forward_dual=1, backward=1)
    ),
    # ---- second order
    "jvp-of-grad": (lambda a: lambda *x: jax.jvp(gradient(a), x, TX), X, DUAL),
    "jvp-of-grad-of-jit": (
        lambda a: lambda *x: jax.jvp(jax.grad(jax.jit(loss(a)), ALL), x, TX), X, None, DUAL
    ),
    "jvp-of-grad-everything": (
        lambda a: lambda *x: jax.jvp(
            jax.grad(lambda *x: sine(call(a, **EVERYTHING)(*x)), (0, 1, 2, 3)), x, (*TX, T_BIAS)
        ),
        (*X, BIAS), DUAL,
    ),
    "grad-of-jvp-of-loss": (lambda a: jax.grad(lambda *x: jax.jvp(loss(a), x, TX)[1], ALL), X, DUAL),
    "grad-of-grad": (
        gradient_of_gradient, X,
        dict(forward=1, backward=2, tangent=1, backward_dual=1),
        dict(forward=1, backward=1, tangent=1, backward_dual=1),
    ),
    "grad-of-grad-everything": (
        lambda a: jax.grad(
            lambda *x: dot(jax.grad(lambda *x: sine(call(a, **EVERYTHING)(*x)), (0, 3))(*x), (TX[0], T_BIAS)),
            (0, 1, 2, 3),
        ),
        (*X, BIAS),
    ),
    "linearize-grad": (
        lambda a: lambda *x: applied(jax.linearize(gradient(a), *x), TX),
        X, dict(forward=1, backward=1, tangent=1, backward_tangent=1),
    ),
    "jvp-of-jvp": (lambda a: lambda *x: jax.jvp(jvp(a), x, UX), X, dict(forward_dual=1, second=1)),
    "jvp-of-jvp-everything": (
        lambda a: lambda *x: jax.jvp(lambda *x: jax.jvp(call(a, **EVERYTHING), x, (*TX, T_BIAS)), x, (*UX, T_BIAS)),
        (*X, BIAS), dict(forward_dual=1, second=1),
    ),
    "grad-of-linearized": (lambda a: jax.grad(lambda *x: jnp.sin(linearized(a, *x)[1](*TX)).sum(), ALL), X),
    # ---- vmap
    "vmap": (lambda a: jax.vmap(call(a)), STACKED, dict(forward=1)),
    "vmap-of-grad": (lambda a: jax.vmap(gradient(a)), STACKED, FORWARD_BACKWARD),
    "grad-of-vmap": (lambda a: jax.grad(lambda *x: sine(jax.vmap(call(a))(*x)), ALL), STACKED, FORWARD_BACKWARD),
    "vmap-of-jvp": (
        lambda a: jax.vmap(lambda x, t: jax.jvp(call(a), x, t)), (STACKED, T_STACKED), dict(forward_dual=1)
    ),
    "vmap-of-grad-of-jvp": (lambda a: jax.vmap(jax.grad(both(a), ALL)), STACKED, DUAL),
    "vmap-of-jvp-of-grad": (lambda a: jax.vmap(lambda *x: jax.jvp(gradient(a), x, TX)[1]), STACKED, DUAL),
    "vmap-of-grad-of-grad": (lambda a: jax.vmap(gradient_of_gradient(a)), STACKED),
    "vmap-everything": (
        lambda a: jax.vmap(
            lambda q, m, n: call(a, **dict(EVERYTHING, mask=m, key_value_seq_lengths=n))(q, *X[1:], BIAS), (0, 1, None)
        ),
        (STACKED[0], np.stack([MASK, ~MASK, MASK], 1), LENGTHS), dict(forward=1),
    ),
    "vmap-of-vmap": (
        lambda a: jax.vmap(jax.vmap(gradient(a), (0, None, None)), (None, 0, 0)), STACKED, FORWARD_BACKWARD
    ),
    "vmap-over-queries": (
        lambda a: jax.vmap(gradient(a), in_axes=(1, None, None)),
        (np.moveaxis(STACKED[0], 0, 1), *X[1:]), FORWARD_BACKWARD,
    ),
    "vmap-over-tangents": (
        lambda a: lambda *x: jax.vmap(of_tangents(a, x))(*T_STACKED), X, dict(forward=1, tangent=1)
    ),
    "vmap-of-linearized": (
        lambda a: lambda *x: jax.vmap(linearized(a, *x)[1])(*T_STACKED), X, dict(forward=1, tangent=1)
    ),
    "jacfwd": (lambda a: jax.jacfwd(call(a)), X, dict(forward=1, tangent=1)),
    "jacrev": (lambda a: jax.jacrev(call(a)), X, FORWARD_BACKWARD),
    "hessian": (lambda a: jax.hessian(lambda q: loss(a)(q, *X[1:])), (Q,)),
    # ---- tangents that are zero
    "jvp-in-query": (lambda a: lambda q, k, v: jax.jvp(lambda q: a(q, k, v), (q,), TX[:1]), X, dict(forward_dual=1)),
    "grad-of-jvp-in-query": (
        lambda a: jax.grad(lambda q, k, v: sine(jax.jvp(lambda q: a(q, k, v), (q,), TX[:1])), ALL), X, DUAL
    ),
    "jvp-of-grad-in-value": (
        lambda a: lambda q, k, v: jax.jvp(lambda v: gradient(a)(q, k, v), (v,), TX[2:]), X, DUAL
    ),
    "jvp-in-bias": (
        lambda a: lambda b: jax.jvp(lambda b: call(a, **SELECTION)(*X, b), (b,), (T_BIAS,)),
        (BIAS,), dict(forward_dual=1),
    ),
    "grad-beside-mask": (
        lambda a: lambda q, m: jax.grad(lambda q, m: jnp.sin(a(q, *X[1:], None, m)).sum(), allow_int=True)(q, m),
        (Q, MASK), FORWARD_BACKWARD,
    ),
    "jvp-beside-mask-and-lengths": (
        lambda a: lambda q, m, n: jax.jvp(
            lambda q, m, n: a(q, *X[1:], mask=m, key_value_seq_lengths=n),
            (q, m, n), (TX[0], *(np.zeros(i.shape, jax.dtypes.float0) for i in (m, n))),
        ),
        (Q, MASK, LENGTHS), dict(forward_dual=1),
    ),
}  # fmt: skip

HIGH_ORDER = {
    "jvp-of-hvp": (lambda a: lambda *x: jax.jvp(hvp(a), x, UX), X),
    "grad-of-hvp": (lambda a: jax.grad(lambda *x: dot(hvp(a)(*x), TX), ALL), X),
    "grad-of-jvp-of-jvp": (lambda a: jax.grad(lambda *x: sine(jax.jvp(jvp(a), x, UX)), ALL), X),
    "grad-of-grad-of-grad": (lambda a: jax.grad(lambda *x: sine(gradient_of_gradient(a)(*x)), ALL), X),
    "hvp-of-grad-of-jvp": (
        lambda a: lambda *x: jax.jvp(jax.grad(lambda *x: dot(hvp(a)(*x), TX), ALL), x, UX)[1], X
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_value_and_kernels(case, check):
    check(*case)


@pytest.mark.parametrize("name", HIGH_ORDER)
def test_third_and_fourth_order(name, check):
    check(*HIGH_ORDER[name], eager=name == "jvp-of-hvp")  # the other ones take long outside jit


def bound(function, kernel):
    """The arguments and parameters with which the traced program of `function` of X calls a kernel."""
    with jax.enable_x64(True):
        equations = jax.make_jaxpr(function)(*X).eqns
    (equation,) = (e for e in equations if e.primitive.name == "attention_" + kernel)
    return jax.tree.unflatten(equation.params["tree"], equation.invars), equation.params


def test_zero_tangents_reach_the_kernel_as_none():
    a = dot_product_attention
    (_, tangents), _ = bound(lambda q, k, v: jax.jvp(lambda q: a(q, k, v), (q,), TX[:1]), "forward_dual")
    assert [i for i, t in enumerate(tangents) if t is not None] == [0]
    (_, tangents), _ = bound(lambda q, k, v: jax.jvp(lambda k, v: a(q, k, v), (k, v), TX[1:]), "forward_dual")
    assert [i for i, t in enumerate(tangents) if t is not None] == [1, 2]


def test_only_wanted_gradients_are_computed():
    for argnums in (0, 1, (0, 2)):
        _, parameters = bound(jax.grad(loss(dot_product_attention), argnums), "backward")
        wanted = {i for i, w in enumerate(parameters["want"]) if w}
        assert wanted == set(np.atleast_1d(argnums))


@pytest.mark.thorough
def test_float64_enabled_around_the_call_alone():
    """What is lowered, or applied, where it is no longer enabled stays float64."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 5, 2, 4)), jnp.float32)

    def within(attention, x):
        with jax.enable_x64(True):
            value = x.astype(jnp.float64)
            key = 1e4 + 1e-5 * value  # scores of 10⁸ that float32 does not tell apart
            y = attention(jnp.full_like(key, 1e4), key, value)
        return y.astype(jnp.float32)

    def second(f):
        return jax.grad(lambda x: jnp.sin(jax.grad(lambda x: jnp.sin(f(x)).sum())(x)).sum())

    def check(run):
        got, expected = run(dot_product_attention), run(oracle.attention)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())

    check(lambda a: jax.jit(functools.partial(within, a))(x))
    check(lambda a: jax.jit(lambda x: jax.jvp(functools.partial(within, a), (x,), (x,))[1])(x))
    check(lambda a: jax.grad(lambda x: within(a, x).sum())(x))
    check(lambda a: jax.jvp(second(functools.partial(within, a)), (x,), (x,))[1])
    with jax.enable_x64(True):
        wide = x.astype(jnp.float64)
        _, pull = jax.vjp(lambda x: dot_product_attention(x, x, x), wide)
        expected = jax.vjp(lambda x: oracle.attention(x, x, x), wide)[1](wide)[0]
    got = pull(wide)[0]
    assert got.dtype == jnp.float64
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)
