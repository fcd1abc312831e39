"""Sums that several programs share, interpreted, against dense attention in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from jax_flash_jvp import dot_product_attention
from jax_flash_jvp.kernels.portable import shares
from jax_flash_jvp.launch import Interpreter


@pytest.fixture
def on(monkeypatch):
    """on(multiprocessors): the attention of the interpreted kernels, as on a GPU of so many, and a list of what it launches."""

    def attention(multiprocessors):
        launches, launch = [], Interpreter.launch
        monkeypatch.setattr(Interpreter, "multiprocessors", multiprocessors)

        def recorded(self, given):
            launches.append(given)
            return launch(self, given)

        monkeypatch.setattr(Interpreter, "launch", recorded)
        return functools.partial(dot_product_attention, implementation="interpret"), launches

    return attention


def named(launches, kernel):
    return [launch for launch in launches if launch.kernel.__name__ == kernel]


# ------------------------------------------------------------------------------------------------ gradients of a bias

B, T, S, N, K, D = 5, 18, 20, 4, 2, 16
BIASES = {
    "matrix": ((1, 1, T, S), {}),
    "by-head": ((1, N, T, S), dict(is_causal=True)),
    "by-key-head": ((1, K, T, S), dict(logits_soft_cap=1.5)),
    "by-batch": ((B, 1, T, S), {}),
    "by-key": ((1, 1, 1, S), dict(key_value_seq_lengths=np.array([20, 0, 3, 17, 20]))),
    "by-head-and-key": ((1, N, 1, S), {}),
    "by-batch-and-key": ((B, 1, 1, S), dict(local_window_size=(4, 2))),
}


def gradients_of_a_bias(features):
    def compute(attention, x, tx, cy, cty):
        def f(*x):
            return attention(*x, **features)

        gradient = lambda *x: jax.vjp(f, *x)[1](cy.astype(x[0].dtype))[3]
        of_tangent = jax.vjp(lambda bias: jax.jvp(f, (*x[:3], bias), tx)[1], x[3])[1](cty.astype(x[0].dtype))
        return {"first": gradient(*x), "second": jax.jvp(gradient, x, tx)[1], "of a tangent": of_tangent}

    return compute


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", BIASES)
def test_gradient_of_a_bias(name, dtype, on):
    axes, features = BIASES[name]
    shapes = (B, T, N, D), (B, S, K, D), (B, S, K, D), axes
    x, tx = (tuple(oracle.normal(10 * i + j, *s) for j, s in enumerate(shapes)) for i in range(2))
    cotangents = [oracle.normal(20 + i, *shapes[0]) for i in range(2)]
    attention, launches = on(10)
    oracle.assert_as_exact_as_naive(gradients_of_a_bias(features), attention, (x, tx, *cotangents), dtype)
    assert {launch.scalars["n_shares"] > 1 for launch in named(launches, "score_side")} == {True}


def test_shares_of_many_short_sequences(on):
    """As many programs as the GPU has room for, however few tiles the bias has; and the sum is the same on every run."""
    attention, launches = on(4)
    q, bias = jnp.asarray(oracle.normal(0, 64, 16, 2, 16), "bfloat16"), jnp.zeros((1, 2, 16, 16), "bfloat16")
    gradient = jax.jit(jax.grad(lambda bias: jnp.sin(attention(q, q, q, bias).astype("float32")).sum()))
    first, second = gradient(bias), gradient(bias)
    assert first.tobytes() == second.tobytes()
    (launch,), (added,) = named(launches, "score_side"), named(launches, "sum_shares")
    assert launch.programs == 4 * 8 == 2 * launch.scalars["n_shares"]
    assert added.outputs["SUM"].shape == bias.shape


@pytest.mark.parametrize("n_shares", [1, 31, 32, 33])
def test_sum_of_shares(n_shares):
    x = oracle.normal(0, n_shares, 7, 11).astype("float32")
    got = shares.added(Interpreter(), jnp.asarray(x), "float32")
    np.testing.assert_allclose(got, x.sum(0), rtol=1e-5, atol=1e-5)


def test_number_of_shares():
    number = functools.partial(shares.number, Interpreter(), each=4, least=1, most_bytes=2**20)
    assert number(8, steps=1000, floats=1) == 66  # programs for 132 multiprocessors
    assert number(8, steps=10, floats=1) == 10
    assert number(8, steps=1000, floats=2**16) == 4  # in memory
    assert number(8, steps=1000, floats=2**20) == 1
    assert number(8, steps=1000, floats=1, least=100) == 10
    assert number(1000, steps=1000, floats=1) == 1
