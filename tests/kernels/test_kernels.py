"""The Triton kernels, interpreted in tiles of 16 x 16, against dense attention in float64; broken ones fail."""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

import gluon_on_numpy
import oracle
from jax_flash_jvp import dot_product_attention, interpret
from jax_flash_jvp.kernels.portable import backward, forward, scores, visibility

ALL = (0, 1, 2)


class Shape(NamedTuple):
    T: int  # queries
    S: int  # keys
    N: int = 1  # query heads
    K: int = 1  # key heads
    D: int = 8  # channels
    causal: bool = False
    scale: float | None = None
    B: int = 1

    def __str__(self):
        name = "-".join(f"{n}{getattr(self, n)}" for n in "BTSNKD")
        return name + "-causal" * self.causal + f"-scale{self.scale}" * (self.scale is not None)


SHAPES = [
    Shape(1, 1),
    Shape(1, 33, causal=True),
    Shape(33, 1, N=2, K=2),
    Shape(7, 33, causal=True),
    Shape(33, 7, causal=True),
    Shape(32, 32, causal=True, scale=-0.4),
    Shape(17, 37, N=4, K=2, D=20, B=2),
    Shape(37, 17, N=3, K=1, D=28, causal=True),
    Shape(16, 18, D=1),
    Shape(18, 16, D=40, scale=-1.3),
    Shape(9, 20, D=72, scale=0),
    Shape(17, 20, D=136),
]
HALF = [Shape(7, 33, N=2, causal=True), Shape(19, 35, N=2, K=1, D=20), Shape(33, 16, D=40, scale=-0.5)]


def attention(*args, **kwargs):
    return dot_product_attention(*args, **kwargs, implementation="interpret")


def operands(shape):
    """x, its tangents, and cotangents of o and ℓ for the results and for their tangents."""
    shapes = [(shape.B, shape.T, shape.N, shape.D), *[(shape.B, shape.S, shape.K, shape.D)] * 2]
    x, tx = (tuple(oracle.normal(10 * i + j, *s) for j, s in enumerate(shapes)) for i in range(2))
    cy, cty = ((oracle.normal(20 + i, *shapes[0]), oracle.normal(30 + i, *shapes[0][:3])) for i in range(2))
    return x, tx, cy, cty


def like(cotangents, results):
    return jax.tree.map(lambda c, y: c.astype(y.dtype), cotangents, results)


@functools.cache
def every_kernel(causal=False, scale=None):
    """Each kernel's results, with cotangents of the log-sum-exp as well."""

    def compute(attention, x, tx, cy, cty):
        def f(*x):
            return attention(*x, is_causal=causal, scale=scale, return_residual=True)

        y, tangent = jax.linearize(f, *x)
        cy, cty = like(cy, y), like(cty, y)
        return {
            "forward": y,
            "forward with tangent": jax.jvp(f, x, tx),
            "tangent": tangent(*tx),
            "backward": jax.linear_transpose(tangent, *x)(cy),
            "gradient of the tangent": jax.vjp(lambda x, tx: jax.jvp(f, x, tx), x, tx)[1]((cy, cty)),
            "tangent of the gradient": jax.jvp(lambda x, cy: jax.vjp(f, *x)[1](cy), (x, cy), (tx, cty)),
        }

    return compute


def check(shape, dtype, attention=attention):
    compute = every_kernel(shape.causal, shape.scale)
    arrays = (query, key, _), *_ = operands(shape)
    scale = shape.D**-0.5 if shape.scale is None else shape.scale
    scores = scale * np.einsum("btnh,bsnh->bnts", query, np.repeat(key, shape.N // shape.K, axis=2))
    oracle.assert_as_exact_as_naive(compute, attention, arrays, dtype, np.abs(scores).max())


# ------------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float32(shape):
    check(shape, "float32")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", HALF, ids=str)
def test_half_precision(shape, dtype):
    check(shape, dtype)


@pytest.mark.thorough
@settings(max_examples=5, derandomize=True, deadline=None, database=None)
@given(
    shape=st.builds(
        lambda T, S, K, group, D, causal: Shape(T, S, K * group, K, D, causal),
        *[st.integers(1, 40)] * 2, *[st.integers(1, 2)] * 2, st.integers(1, 24), st.booleans(),
    ),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
)  # fmt: skip
def test_any_shape(shape, dtype):
    check(shape, dtype)


SUBSETS = [s for n in (1, 2) for s in itertools.combinations(ALL, n)]


@functools.cache
def subset_of_operands(moving):
    """Tangents of `moving` alone, and the gradients of `moving` alone."""

    def compute(attention, x, tx, cy, cty):
        def f(*moved):
            full = list(x)
            for i, a in zip(moving, moved, strict=True):
                full[i] = a
            return attention(*full, return_residual=True)

        x_moving, tx_moving = ([a[i] for i in moving] for a in (x, tx))
        y, tangent = jax.linearize(f, *x_moving)
        cy, cty = like(cy, y), like(cty, y)
        return {
            "forward with tangent": jax.jvp(f, x_moving, tx_moving),
            "tangent": tangent(*tx_moving),
            "backward": jax.linear_transpose(tangent, *x_moving)(cy),
            "backward from o": jax.linear_transpose(tangent, *x_moving)((cy[0], jnp.zeros_like(cy[1]))),
            "gradient of the tangent": jax.vjp(lambda *x: jax.jvp(f, x, tuple(tx_moving)), *x_moving)[1]((cy, cty)),
            "tangent of the gradient": jax.jvp(lambda *x: jax.vjp(f, *x)[1](cy), x_moving, tx_moving),
        }

    return compute


@pytest.mark.parametrize("moving", SUBSETS, ids=lambda s: "".join("qkv"[i] for i in s))
def test_subset_of_operands(moving):
    oracle.assert_as_exact_as_naive(subset_of_operands(moving), attention, operands(Shape(17, 18, D=4)), "float32")


@pytest.mark.parametrize("part", [0, 1], ids=["output", "log-sum-exp"])
def test_cotangents_of_one_result(part):
    """The other cotangent is absent, not an array of zeros."""

    def compute(attention, x, tx, cy, cty):
        def f(*x):
            return attention(*x, is_causal=True, return_residual=True)[part]

        cy, cty = like((cy[part], cty[part]), (f(*x),) * 2)
        return {
            "backward": jax.vjp(f, *x)[1](cy),
            "gradient of the tangent": jax.vjp(lambda *x: jax.jvp(f, x, tx)[1], *x)[1](cty),
            "tangent of the gradient": jax.jvp(lambda *x: jax.vjp(f, *x)[1](cy), x, tx),
        }

    oracle.assert_as_exact_as_naive(compute, attention, operands(Shape(18, 17, D=4)), "float32")


def test_huge_scores():
    check(Shape(18, 33, scale=1000.0), "float32")


@pytest.mark.parametrize("offset", [10, 100])
@pytest.mark.parametrize("cap", [None, 1.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tangents_common_to_all_keys(dtype, cap, offset):
    """They move all scores of a row alike: the output does not move with them, but Ṡ and μ are large."""

    def compute(attention, x, tx):
        attend = lambda *x: attention(*x, logits_soft_cap=cap)
        return {"fused": jax.jvp(attend, x, tx)[1], "linear": jax.linearize(attend, *x)[1](*tx)}

    x, (t_query, t_key, t_value), *_ = operands(Shape(18, 33))
    oracle.assert_as_exact_as_naive(compute, attention, (x, (t_query, t_key + offset, t_value)), dtype)


@pytest.mark.parametrize("sharpness", [1, 3, 10])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("implementation", ["interpret", "xla"])
def test_tangents_of_sharp_attention(implementation, dtype, sharpness):
    (query, *x), *_ = operands(Shape(64, 96 if implementation == "interpret" else 600, D=32))
    attend = functools.partial(dot_product_attention, implementation=implementation)
    oracle.assert_as_exact_on_average(oracle.tangents_along_the_scores, attend, (sharpness * query, *x), dtype)


@pytest.mark.parametrize("implementation", ["interpret", "xla"])
def test_tangents_of_scores_that_do_not_count(implementation):
    """Of the first tile nothing remains, however large its Ṡ was."""

    def compute(attention, x, tx):
        return {"fused": jax.jvp(attention, x, tx)[1], "linear": jax.linearize(attention, *x)[1](*tx)}

    (x, tx, *_), bias = operands(Shape(18, 40)), np.zeros((18, 40))
    bias[:, :16] = -1e9
    attend = functools.partial(dot_product_attention, implementation=implementation)
    oracle.assert_as_exact_as_naive(compute, attend, ((*x, bias), (*tx, bias)), "float32")


# ------------------------------------------------------------------------------------------------ properties


def test_linear_in_the_tangent_and_adjoint():
    """Numbers that are zero are as near to zero as for the naive computation."""

    def compute(attention, x, tx, cy, cty):
        _, tangent = jax.linearize(attention, *x)
        ux = jax.tree.map(lambda a: jnp.flip(a, 1), tx)

        def along(tx):
            return jax.jvp(attention, x, tx)[1]

        both = jax.tree.map(lambda a, b: a - 2 * b, tx, ux)
        gradients = jax.vjp(attention, *x)[1](cy[0])
        products = [jnp.vdot(tangent(*tx), cy[0]), sum(jnp.vdot(a, b) for a, b in zip(gradients, tx, strict=True))]
        return {
            "fused": (along(tx), along(both) - along(tx) + 2 * along(ux)),
            "linear": (tangent(*tx), tangent(*both) - tangent(*tx) + 2 * tangent(*ux)),
            "adjoint": (products, products[0] - products[1]),
        }

    oracle.assert_as_exact_as_naive(compute, attention, operands(Shape(18, 33, N=2)), "float32")


def test_shift_invariance():
    """Adding one vector to all keys shifts the scores of a row alike: nothing but ℓ changes."""

    def compute(attention, x, tx, cy, cty):
        q, k, v = x
        shift = jnp.linspace(-2, 2, q.shape[-1], dtype=q.dtype)
        f = lambda k: attention(q, k, v)
        shifted, t_shifted = jax.jvp(f, (k + shift,), (tx[1] + shift,))
        y, ty = jax.jvp(f, (k,), (tx[1],))
        return y, ty, shifted - y, t_shifted - ty

    oracle.assert_as_exact_as_naive(compute, attention, operands(Shape(18, 33)), "float32")


@pytest.mark.slow
def test_the_same_bits_every_time():
    x, tx, cy, cty = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), operands(Shape(18, 33, N=2)))
    runs = [every_kernel()(attention, x, tx, cy, cty) for _ in range(2)]
    for first, second in zip(*map(jax.tree.leaves, runs), strict=True):
        assert np.asarray(first).tobytes() == np.asarray(second).tobytes()


# ------------------------------------------------------------------------------------------------ broken kernels

PLAIN, CAUSAL = Shape(17, 35, N=2, D=4), Shape(33, 17, D=4, causal=True)
MUTANTS = {
    "mu-dropped": (forward, "b_to = without(b_to, moved[:, None], b_o)", "pass", PLAIN),
    "mean-of-one-tile": (forward, "b_pl, b_l_before, b_l)", "b_pl, b_l * 0, b_l)", PLAIN),
    "scale-doubled": (scores, "b_ts = b_ts * scale\n", "b_ts = b_ts * scale * 2\n", PLAIN),
    "not-rescaled": (forward, "b_to = scaled(b_to, alpha[:, None])", "pass", PLAIN),
    "last-block-unmasked": (
        visibility,
        "(o_n < sight.key_end) & (o_m >= 0)",
        "(o_n < sight.key_end + 16) & (o_m >= 0)",
        PLAIN,
    ),
    "causal-by-one": (visibility, "o_n <= o_q + sight.right", "o_n < o_q + sight.right", CAUSAL),
    "causal-stop": (visibility, "i_last + 1 + right", "i_last + 1 - BM + right", CAUSAL),
    "group-not-summed": (backward, "for i_g in range(GROUP)", "for i_g in range(1)", PLAIN),
    "delta-dropped": (backward, "b_delta += inner(b_do, b_o)", "b_delta += 0.0", PLAIN),
    "tangent-of-delta-dropped": (backward, "b_t_delta += inner(b_do, b_to)", "b_t_delta += 0.0", PLAIN),
    "log-sum-exp-cotangent-sign": (backward, "b_delta -= tl.load(D_LSE", "b_delta += tl.load(D_LSE", PLAIN),
    "tangent-of-P-dropped": (backward, "b_tds += b_ds * b_w", "b_tds += 0.0", PLAIN),
    "tangent-of-values-dropped": (backward, "if HAS_TV and HAS_DO", "if HAS_TV and not HAS_DO", PLAIN),
    "not-written": (backward, "store_rows(TD_V + v_offset, i_n", "store_rows(TD_V + v_offset, 99 + i_n", PLAIN),
}


@pytest.mark.thorough
@pytest.mark.parametrize(("module", "old", "new", "shape"), MUTANTS.values(), ids=MUTANTS)
def test_broken_kernels_fail(module, old, new, shape, broken_kernels):
    broken_kernels(module, old, new)
    with pytest.raises(AssertionError, match="error"):
        check(shape, "float32", functools.partial(attention))  # another function, to be compiled anew


@pytest.mark.parametrize("old", ["# what is not there", "# [BM"], ids=["nowhere", "comment"])
def test_a_text_that_no_kernel_has_breaks_none(old, broken_kernels):
    """Else its test would go on to pass, or fail for no reason that one sees."""
    with pytest.raises(LookupError, match="no kernel is broken"):
        broken_kernels(forward, old, "#")
    with pytest.raises(LookupError, match="no kernel is broken"):
        gluon_on_numpy.emulated(old, "#")


@pytest.mark.parametrize("shape", [PLAIN, CAUSAL], ids=str)
def test_whole_kernels_pass(shape):
    check(shape, "float32")


@triton.jit
def distances(X, OUT, row, STRIDE: tl.constexpr, D: tl.constexpr, N: tl.constexpr):
    pointers, o_d = scores.block_pointers(X, row, STRIDE, tl.arange(0, N), D, 0)
    tl.store(OUT + tl.arange(0, N)[:, None] * D + o_d[None, :], (pointers.to(tl.int64) - X.to(tl.int64)) // 2)


@pytest.mark.parametrize("stride", [64, 2**27])
def test_rows_that_lie_far_apart(stride):
    """As in sequence-first arrays of more than 2³¹ elements."""
    got = np.zeros(32 * 16, np.int64)
    interpret.launch(distances, (1,), np.zeros(8, np.float16), got, 3, STRIDE=stride, D=16, N=32)
    np.testing.assert_array_equal(got.reshape(32, 16), (3 + np.arange(32))[:, None] * stride + np.arange(16))
