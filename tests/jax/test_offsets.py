"""Data that trainers have and normal numbers are not: keys and values with a part in common (arXiv:2510.04212).

The rows of dS sum to zero, so that nothing of what all keys share reaches dQ; but in 16 bits the rounding of o and of dS leaves
sums of their own, and a large part in common multiplies them.  Naive attention, whose softmax sees to the sums, is not worse
there than elsewhere, and errors may be twice its at the root of the mean square.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gluon_on_numpy
import oracle
from in_one_pass import take_one_pass
from jax_flash_jvp import dot_product_attention
from jax_flash_jvp.kernels import jobs
from jax_flash_jvp.kernels.portable import backward, means
from jax_flash_jvp.kernels.portable import jobs as portable_jobs
from jax_flash_jvp.problem import Operands, Problem
from offset_data import HIDING, OFFSETS, SEEING_ALL, B, D, L, N, check, derivatives, draw, feature


def cases(names, interpreted):
    """Of the reference, and of the kernels interpreted, of which CI alone runs those that are not named."""
    for name in names:
        yield pytest.param("xla", name, id=f"{name}-xla")
        marks = [pytest.mark.thorough] * (name not in interpreted)
        yield pytest.param("interpret", name, marks=marks, id=f"{name}-interpret")


@pytest.mark.parametrize(("implementation", "name"), [*cases(OFFSETS, ("keys-16", "both"))])
@pytest.mark.parametrize("scale", [D**-0.5, *(pytest.param(s, marks=pytest.mark.thorough) for s in (0.1, 0.3))])
def test_offsets(implementation, name, scale):
    check(implementation, OFFSETS[name], scale)


@pytest.mark.parametrize(
    ("implementation", "name"), [*cases((*SEEING_ALL[1:], *HIDING), ("lengths", "log-sum-exp", "causal"))]
)
def test_features(implementation, name):
    check(implementation, (4, 2), **feature(name))


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_sharp_attention(implementation):
    """Where few keys have the weight, the mean key is far from theirs, and δ as exact as o and P are: up to four times."""
    check(implementation, (4, 2), scale=1.0, times=4.0)


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
@pytest.mark.parametrize("offset", [pytest.param((0, 0), marks=pytest.mark.thorough), (4, 2)], ids=["none", "both"])
def test_gradient_along_the_scale(implementation, offset):
    """Most terms of it cancel: of naive attention it errs by some 1e-3, of dQ, rounded, it would by 1e-1.  Powers of two, with
    which queries are not rounded."""
    q, k, v, g = draw(offset)[:4]

    def compute(attention, q, k, v, g):
        wide = jnp.promote_types(q.dtype, jnp.float32)
        value = lambda s: (attention(q, k, v, scale=s).astype(wide) * g.astype(wide)).sum()
        return jax.vmap(jax.grad(value))(0.5 ** jnp.arange(4, dtype=wide))

    attention = functools.partial(dot_product_attention, implementation=implementation)
    oracle.assert_as_exact_on_average(
        compute, attention, (q, k, v, g), "bfloat16", times=2.0 if offset == (0, 0) else 4.0
    )


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_a_bias_that_keys_share_has_no_gradient(implementation):
    q, k, v, g = (jnp.asarray(a, jnp.bfloat16) for a in draw((4, 2))[:4])
    bias = jnp.zeros((1, N, L, 1), jnp.bfloat16)
    loss = lambda b: (dot_product_attention(q, k, v, b, implementation=implementation) * g).astype(jnp.float32).sum()
    assert not jax.grad(loss)(bias).any()
    assert not jax.jvp(jax.grad(loss), (bias,), (bias + 1,))[1].any()


@pytest.mark.parametrize(
    ("implementation", "feature"), [*cases(("causal", "window", "mask", "bias", "segments"), ("causal", "mask"))]
)
def test_hidden_keys_reach_no_gradient(implementation, feature):
    """Whatever they are: no part of what other rows' keys, or keys that no row sees, have in common."""
    q, k, v, g, t_q, t_k, _ = (jnp.asarray(a, jnp.bfloat16) for a in draw((4, 2)))
    seen = jnp.arange(L) < 64
    q, g, t_q = q[:, :64], g[:, :64], t_q[:, :64]
    features = {
        "causal": dict(is_causal=True),
        "window": dict(local_window_size=(8, 0)),
        "mask": dict(mask=seen[None, None, None]),
        "bias": dict(bias=jnp.where(seen, 0, -jnp.inf)[None, None, None]),
        "segments": dict(
            query_segment_ids=jnp.zeros((B, 64), int), key_value_segment_ids=jnp.asarray([~seen] * B).astype(int)
        ),
    }[feature]

    def gradients(k, t_k):
        attend = lambda q, k: dot_product_attention(q, k, v, implementation=implementation, **features)
        loss = lambda q, k: (attend(q, k) * g).astype(jnp.float32).sum()
        both = jax.jvp(jax.grad(loss), (q, k), (t_q, t_k))
        return [np.asarray(a, np.float32) for a in both]

    hidden = jnp.nan if (feature, implementation) == ("causal", "interpret") else 1000  # NaN in tiles that nobody sees
    other = [jnp.where(seen[:, None, None], a, hidden) for a in (k, t_k)]
    for got, expected in zip(gradients(*other), gradients(k, t_k), strict=True):
        np.testing.assert_array_equal(got, expected)


MUTANTS = {
    "excess-of-dS": ("b_dq = without_mean(b_dq, b_r, KEY_MEAN", "_ = without_mean(b_dq, b_r, KEY_MEAN"),
    "excess-of-its-tangent": ("b_tdq = without_mean(b_tdq, b_tr, KEY_MEAN", "_ = without_mean(b_tdq, b_tr, KEY_MEAN"),
    "mean-of-the-tangents": ("b_tdq = without_mean(b_tdq, b_r, T_KEY_MEAN", "_ = without_mean(b_tdq, b_r, T_KEY_MEAN"),
    "sums-before-rounding": ("b_rounded = operand(b_dx, dtype, PRECISION).to(tl.float32)", "b_rounded = b_dx"),
    "log-sum-exp-ignored": ("b_r -= tl.where(", "tl.where("),
}


@pytest.mark.thorough
@pytest.mark.parametrize(("old", "new"), MUTANTS.values(), ids=MUTANTS)
def test_broken_kernels_fail(old, new, broken_kernels):
    broken_kernels(backward, old, new)

    def check_both():
        check("interpret", (16, 2), return_residual=True)
        check("interpret", (16, 0))

    with pytest.raises(AssertionError, match="error"):
        check_both()


MUTANTS_OF_ROWS = {
    "heads-without-one": (means, "common | store_mean(MEAN, V", "False & store_mean(MEAN, V"),
    "rows-without-one": (backward, "tl.where(common != 0, LQ, 0)", "0"),
    "of-other-rows": (backward, "load_rows(MEAN + offset, row,", "load_rows(MEAN + offset, 0,"),
    "not-of-the-tangents": (means, "b_tmean = accumulated(", "accumulated("),
    "sums-not-rescaled": (means, "scaled(b_mean, alpha[:, None])", "b_mean"),
}


@pytest.mark.parametrize(("module", "old", "new"), MUTANTS_OF_ROWS.values(), ids=MUTANTS_OF_ROWS)
@pytest.mark.thorough
def test_broken_means_of_rows_fail(module, old, new, broken_kernels):
    broken_kernels(module, old, new)

    def check_both():
        check("interpret", (16, 4), is_causal=True)
        check("interpret", (0, 4), is_causal=True, scale=0.3)

    with pytest.raises(AssertionError, match="error"):
        check_both()


@pytest.mark.thorough
def test_delta_is_corrected(broken_kernels):
    """Which leaves dK less than the half of naive attention's error, that of rounding dP."""
    arrays = [np.asarray(a, jnp.bfloat16).astype(np.float64) for a in draw((4, 4))]
    compute = functools.partial(derivatives, scale=0.1)
    exact, naive = (oracle.evaluate(compute, oracle.attention, arrays, d)["dk"] for d in ("float64", "bfloat16"))
    error = lambda got: np.square(np.float64(got) - np.asarray(exact)).mean() ** 0.5 / np.abs(exact).max()

    def ours():
        attention = functools.partial(dot_product_attention, implementation="interpret")  # another each time
        return error(oracle.evaluate(compute, attention, arrays, "bfloat16")["dk"]) / error(naive)

    corrected = ours()
    broken_kernels(backward, "    delta += b_r\n", "    pass\n")
    assert corrected < 0.7 < ours()


def hopper(launcher, arrays, scale, dtype, feature, zeros=False):
    """As `derivatives`, but for the JVP, by the Hopper kernels on numpy.  The tangent of the cotangent is none, or zeros."""
    q, k, v, g, *tx = (np.asarray(jnp.asarray(a, dtype)) for a in arrays)
    options, operands = feature
    x, tx = Operands(q, k, v, **operands), Operands(*tx)
    problem = Problem(scale=scale, implementation="hopper", **options)
    o, lse, *ty = jobs.forward(launcher, problem, x, tx)
    every = (True, True, True, False)
    got = jobs.backward(launcher, problem, x, (o, lse), (g, None), every)[:3]
    along = (tx, tuple(ty), (0 * g if zeros else None, None))
    dx, tdx = jobs.backward_dual(launcher, problem, x, (o, lse), (g, None), along, every, every)
    return dict(zip(HOPPER, (*got, *tdx[:3], *dx[:3]), strict=True))


HOPPER = ("dq", "dk", "dv", "dq of JVP", "dk of JVP", "dv of JVP", "dt_q", "dt_k", "dt_v")


IDS = np.arange(150, dtype=np.int32)[None] // 40
MASK = np.random.default_rng(5).random((1, 1, 150, 150)) < 0.7
HOPPER_FEATURES = {  # fields of the problem, arrays, and the oracle's arguments
    "none": ({}, {}, {}),
    "causal": (dict(is_causal=True), {}, dict(is_causal=True)),
    "window": (dict(window=(30, 10)), {}, dict(local_window_size=(30, 10))),
    "mask": ({}, dict(mask=MASK), dict(mask=MASK)),
    "segments": (
        {}, dict(query_segments=IDS, key_segments=IDS), dict(query_segment_ids=IDS, key_value_segment_ids=IDS),
    ),
}  # fmt: skip


def check_hopper(launcher, offset, dtype="bfloat16", name="none", zeros=False):
    """Heads of 64 channels; those of the second key head have an offset, those of the first have none."""
    rng, common = np.random.default_rng(3), np.array([0, 1]).reshape(1, 1, 2, 1)
    draws = [rng.standard_normal((1, 150, 2, 64)) for _ in range(7)]
    for i, size in ((1, offset[0]), (2, offset[1]), (5, offset[0])):
        draws[i] += size * common * rng.standard_normal((1, 1, 1, 64))
    rounded = [a.astype(dtype).astype(np.float64) for a in draws]
    *feature, arguments = HOPPER_FEATURES[name]
    compute = functools.partial(derivatives, scale=0.125, **arguments)
    exact, naive = (oracle.evaluate(compute, oracle.attention, rounded, d) for d in ("float64", dtype))
    got = hopper(launcher, rounded, 0.125, dtype, feature, zeros)
    for name in HOPPER:
        for head in range(2):
            error, allowed = (
                np.square(np.float64(a[name][:, :, head]) - np.asarray(exact[name])[:, :, head]).mean() ** 0.5
                for a in (got, naive)
            )
            assert error <= 2 * allowed, f"{name}, head {head}: error {error:.2g}, naive {allowed:.2g}"


@pytest.mark.parametrize(
    ("offset", "dtype"),
    [
        ((4, 0), np.float16),
        ((16, 4), jnp.bfloat16),
        *(
            pytest.param(offset, dtype, marks=pytest.mark.thorough)
            for offset, dtype in itertools.product([(0, 0), (4, 0), (16, 4)], [jnp.bfloat16, np.float16])
            if (offset, dtype) not in (((4, 0), np.float16), ((16, 4), jnp.bfloat16))
        ),
    ],
    ids=str,
)
def test_hopper(offset, dtype):
    check_hopper(gluon_on_numpy.Launcher(), offset, dtype)


@pytest.mark.parametrize(
    "name", ["causal", *(pytest.param(n, marks=pytest.mark.thorough) for n in ("window", "mask", "segments"))]
)
def test_features_of_hopper(name):
    check_hopper(gluon_on_numpy.Launcher(), (16, 4), name=name)


@pytest.mark.thorough
def test_mean_keys_of_rows_that_see_all(monkeypatch):
    """As long sequences have them."""
    monkeypatch.setattr(portable_jobs, "ROW_MEANS_FROM", 0)
    check_hopper(gluon_on_numpy.Launcher(), (16, 4))
    check("interpret", (0, 4))


def test_hidden_keys_reach_no_gradient_of_hopper():
    """Whose masks are packed otherwise than those of the portable kernels, by which mean keys go."""
    arrays = [np.asarray(a, jnp.bfloat16) for a in draw((4, 2), 128, 64)]
    seen = np.random.default_rng(7).random(128) < 0.7
    mask = (np.random.default_rng(8).random((1, 1, 128, 128)) < 0.7) & seen
    results = []
    for hidden in (4, 1000):
        k, t_k = (np.where(seen[:, None, None], a, hidden).astype(a.dtype) for a in (arrays[1], arrays[5]))
        some = arrays[0], k, *arrays[2:5], t_k, arrays[6]
        got = hopper(gluon_on_numpy.Launcher(), some, 0.125, "bfloat16", ({}, dict(mask=mask)))
        results.append([got[name] for name in ("dq", "dq of JVP", "dt_q")])
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("family", ["portable", "hopper"])
def test_parts_of_the_keys(family):
    """Their rows sum to something, of which nothing is taken off."""
    arrays = [np.asarray(a, jnp.bfloat16) for a in draw((1, 0), 128, 64)[:4]]
    compute = functools.partial(derivatives, scale=0.125)
    tangents = [np.zeros_like(a) for a in arrays[:3]]
    exact = np.asarray(
        oracle.evaluate(compute, oracle.attention, [np.float64(a) for a in (*arrays, *tangents)], "float64")["dq"]
    )
    q, k, v, g = arrays
    launcher, problem = gluon_on_numpy.Launcher(), Problem(scale=0.125, implementation=family)
    y = jobs.forward(launcher, problem, Operands(q, k, v))[:2]
    problem = Problem(scale=0.125, implementation=family, partial=True)
    parts = [Operands(q, *(np.ascontiguousarray(a[:, i : i + 64]) for a in (k, v))) for i in (0, 64)]
    got = sum(jobs.backward(launcher, problem, x, y, (g, None), (True, False, False, False)).query for x in parts)
    assert np.abs(got - exact).max() < 0.02 * np.abs(exact).max()


@pytest.mark.parametrize("multiprocessors", [5, 3])
@pytest.mark.thorough
def test_hopper_blocks_that_programs_share(multiprocessors, monkeypatch):
    """Row sums are handed over with the sums."""
    from jax_flash_jvp.kernels.hopper import config

    monkeypatch.setattr(config, "FRAGMENT", dict.fromkeys(config.FRAGMENT, -10000))
    launcher = gluon_on_numpy.Launcher(multiprocessors=multiprocessors)
    check_hopper(launcher, (16, 4))
    assert any(features.shared for name, features, _ in launcher.launched if name == "backward")


HOPPER_MUTANTS = {
    "excess-of-dS": ("b_dk = products.without_mean(b_dk, excess, X.KEY_MEAN, mean, options.C, FIRST)", "pass"),
    "excess-of-its-tangent": (
        "b_tdk = products.without_mean(b_tdk, excess, X.KEY_MEAN, mean, options.C, FIRST)",
        "pass",
    ),
    "mean-of-the-tangents": (
        "b_tdk = products.without_mean(b_tdk, excess, X.T_KEY_MEAN, mean, options.C, FIRST)",
        "pass",
    ),
    "of-another-head": (
        "statistics.COMMON + block.i_b * (ints.HQ // ints.GROUP) + block.i_stream",
        "statistics.COMMON",
    ),
    "of-rows": ("LQ - row, HQ * C", "0, HQ * C"),
}


@pytest.mark.parametrize(
    ("mutant", "name"),
    [*((m, "none") for m in HOPPER_MUTANTS if m != "of-rows"), *((m, "causal") for m in HOPPER_MUTANTS)],
)
@pytest.mark.thorough
def test_broken_hopper_kernels_fail(mutant, name):
    launcher = gluon_on_numpy.Launcher(*HOPPER_MUTANTS[mutant])
    with pytest.raises(AssertionError, match="error"):
        check_hopper(launcher, (16, 4), name=name)


@pytest.fixture
def in_one_pass(monkeypatch):
    take_one_pass(monkeypatch)


@pytest.mark.usefixtures("in_one_pass")
@pytest.mark.parametrize("name", ["none", "causal"])
@pytest.mark.thorough
def test_hopper_in_one_pass(name):
    launcher = gluon_on_numpy.Launcher()
    check_hopper(launcher, (16, 4), name=name, zeros=True)
    assert {"one_pass", "one_pass_dual"} <= {kernel for kernel, *_ in launcher.launched}


ONE_PASS_MUTANTS = {
    "excess-of-dS": ("b_dq = products.without_mean(b_dq, excess, KEY_MEAN, mean, C, 0)", "pass"),
    "sums-not-added": (
        "add_async(arrays.rows, [of_tile * arrays.rows.block_type.shape[0]], memory.rows.index(0))",
        "pass",
    ),
    "of-another-head": ("gl.load(COMMON + i_b * (HQ // GROUP) + i_k)", "gl.load(COMMON)"),
    "sums-of-one-warpgroup": ("memory.ones, b_r, use_acc=w > 0", "memory.ones, b_r, use_acc=False"),
    "tangent-of-the-excess": ("b_tdq = products.without_mean(b_tdq, t_excess, KEY_MEAN, mean, C, 0)", "pass"),
    "tangent-of-the-mean": ("b_tdq = products.without_mean(b_tdq, excess, T_KEY_MEAN, mean, C, 0)", "pass"),
    "dual-sums-not-added": (
        "memory.rows.index(0).store(row_sums(use.slot, memory, options))  # of dS, then of ḋS",
        "pass",
    ),
    "sums-of-another-tile": ("gl.load(ROWS + o_r + T)", "gl.load(ROWS + o_r)"),
}


@pytest.mark.usefixtures("in_one_pass")
@pytest.mark.parametrize(("old", "new"), ONE_PASS_MUTANTS.values(), ids=ONE_PASS_MUTANTS)
@pytest.mark.thorough
def test_one_pass_broken_fails(old, new):
    with pytest.raises(AssertionError, match="error"):
        check_hopper(gluon_on_numpy.Launcher(old, new), (16, 4), zeros=True)
