"""vmap of what depends on one part of the operands alone: the rest goes in once, and the derivatives are as of a loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash_jvp import dot_product_attention


def naive(q, k, v, bias=None):
    s = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s if bias is None else s + bias), v)


def products(attention):
    loss = lambda *x: jnp.sin(attention(*x)).sum()
    gradients = jax.grad(loss, (0, 1, 2))
    along = lambda x, t: jax.jvp(gradients, x, t)[1]
    back = lambda x, c: jax.vjp(attention, *x)[1](c)

    def of_cotangents(x, t):  # a gradient through gradients for many cotangents at one point
        some = lambda x: jax.vmap(lambda c: back(x, c))(t[0])
        return jax.grad(lambda x: sum(jnp.sin(a).sum() for a in some(x)))(x)

    def of_tangents(x, t):
        some = lambda x: jax.vmap(lambda t: jax.jvp(attention, x, t)[1])(t)
        return jax.grad(lambda x: jnp.sin(some(x)).sum())(x)

    def of_one_operand(x, t):  # many queries for the same keys, whose gradients are sums
        many = lambda k, v: jnp.sin(jax.vmap(lambda q: attention(q, k, v))(t[0])).sum()
        return jax.grad(many, (0, 1))(*x[1:])

    def of_second_tangents(x, t):  # of which the first part is not mapped
        first = jax.tree.map(lambda a: a[0], t)
        inner = lambda x, tx: jax.jvp(attention, x, tx)
        return jax.vmap(lambda tt: jax.jvp(inner, (x, first), (first, tt))[1])(t)

    return dict(
        hessian_vector=lambda x, t: jax.vmap(lambda t: along(x, t))(t),
        linearized=lambda x, t: jax.vmap(jax.linearize(lambda x: gradients(*x), x)[1])(t),
        twice=lambda x, t: jax.vmap(lambda a: jax.vmap(lambda t: along((a, *x[1:]), t))(t))(t[0]),
        of_cotangents=of_cotangents,
        of_tangents=of_tangents,
        of_one_operand=of_one_operand,
        of_second_tangents=of_second_tangents,
    )


@pytest.mark.parametrize("what", products(naive))
@pytest.mark.parametrize("implementation", [None, "interpret"])
def test_what_is_not_mapped_goes_in_once(what, implementation):
    if implementation == "interpret" and what == "of_second_tangents":
        pytest.skip("the reference alone computes it")
    dtype = jnp.float64 if implementation is None else jnp.float32
    attention = lambda *x: dot_product_attention(*x, implementation=implementation)
    with jax.enable_x64(implementation is None):
        draw = lambda seed, *lead: tuple(
            jax.random.normal(jax.random.key(seed + i), (*lead, 1, n, 2, 4), dtype) for i, n in enumerate((5, 6, 6))
        )
        x, t = draw(0), draw(3, 3)
        got, want = (jax.jit(products(f)[what])(x, t) for f in (attention, naive))
        tolerance = 1e-10 if implementation is None else 2e-5
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * float(jnp.abs(b).max()))


def test_scores_are_computed_once_for_many_tangents():
    attention = lambda *x: jnp.sin(dot_product_attention(*x)).sum()
    x = tuple(jnp.ones((1, 8, 2, 4)) for _ in range(3))
    t = tuple(jnp.ones((50, *a.shape)) for a in x)
    compiled = jax.jit(lambda x, t: jax.vmap(lambda t: jax.jvp(jax.grad(attention), x, t)[1])(t)).lower(x, t).compile()
    exponentials = [line for line in compiled.as_text().splitlines() if " exponential(" in line]
    assert exponentials
    assert not any("50," in line.partition("=")[2].partition("{")[0] for line in exponentials)
