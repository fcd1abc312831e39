"""The backward of short sequences, interpreted, against dense attention in float64; broken ones fail.  And compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from compiled import Recorder, compiled
from jax_flash_jvp import dot_product_attention
from jax_flash_jvp.kernels.portable import jobs, one_tile
from jax_flash_jvp.launch import Interpreter
from jax_flash_jvp.problem import Operands, Problem

B, T, S, H, D = 3, 13, 16, 2, 24
IDS = np.arange(16) // 5
CASES = {  # shape of the bias, features
    "plain": (None, {}),
    "causal": (None, dict(is_causal=True)),
    "window": (None, dict(local_window_size=(4, 2))),
    "lengths": (None, dict(query_seq_lengths=np.array([13, 5, 0]), key_value_seq_lengths=np.array([0, 16, 7]))),
    "segments": (
        None, dict(query_segment_ids=np.stack([IDS[:T] + 1] * B), key_value_segment_ids=np.stack([IDS] * B)),
    ),
    "mask": (None, dict(mask=oracle.normal(7, B, 1, T, S) > 0.5)),
    "mask-by-key": (None, dict(mask=oracle.normal(7, B, 1, 1, S) > 0.5)),
    "cap": (None, dict(logits_soft_cap=1.3)),
    "negative": (None, dict(scale=-0.7)),
    "bias": ((B, H, T, S), {}),
    "bias-shared": ((B, 1, T, S), dict(is_causal=True)),
    "bias-by-key": ((B, 1, 1, S), dict(logits_soft_cap=1.5)),
    "bias-of-all": ((1, H, T, S), dict(key_value_seq_lengths=np.array([16, 0, 7]))),
    "bias-by-row": ((B, H, T, 1), {}),
}  # fmt: skip


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels that are launched, on a GPU that two programs fill."""
    names, launch = [], Interpreter.launch
    monkeypatch.setattr(Interpreter, "multiprocessors", 2)
    monkeypatch.setattr(one_tile, "PROGRAMS", 1)
    monkeypatch.setattr(
        Interpreter, "launch", lambda self, given: names.append(given.kernel.__name__) or launch(self, given)
    )
    return names


def attention(*args, **features):
    return dot_product_attention(*args, implementation="interpret", **features)


def everything(features):
    def compute(attention, x, tx, cy, cty):
        f = lambda *x: attention(*x, **features)
        return {
            "backward": jax.vjp(f, *x)[1](cy.astype(x[0].dtype)),
            "dual backward": jax.vjp(lambda x, tx: jax.jvp(f, x, tx), x, tx)[1]((cy.astype(x[0].dtype), cty.astype(x[0].dtype))),
        }  # fmt: skip

    return compute


def arrays(bias, shift=0.0, keys=S):
    shapes = [(B, T, H, D), (B, keys, H, D), (B, keys, H, D), *([bias] if bias else [])]
    x, tx = (tuple(oracle.normal(10 * i + j, *s) for j, s in enumerate(shapes)) for i in range(2))
    for of in (x, tx):
        of[1][...] += shift * oracle.normal(5, 1, 1, H, D)
    return x, tx, *(oracle.normal(20 + i, *shapes[0]) for i in range(2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_gradients(name, dtype, launched):
    bias, features = CASES[name]
    oracle.assert_as_exact_as_naive(everything(features), attention, arrays(bias), dtype)
    assert launched.count("one_tile") == 2
    assert not {"query_side", "key_side"} & {*launched}
    assert ("score_side" in launched) == (name == "bias-of-all")


@pytest.mark.parametrize("name", ["plain", "lengths", "bias-shared", "mask"])
def test_few_queries_and_many_keys(name, launched, monkeypatch):
    monkeypatch.setattr(one_tile, "LONGEST_INTERPRETED", 100)
    bias, features = CASES[name]
    shape, more = (*bias[:-1], 100) if bias else None, dict(features)
    if name == "mask":
        more["mask"] = oracle.normal(7, B, 1, T, 100) > 0.5
    if name == "lengths":
        more["key_value_seq_lengths"] = np.array([0, 100, 70])
    oracle.assert_as_exact_as_naive(everything(more), attention, arrays(shape, keys=100), "bfloat16")
    assert launched.count("one_tile") == 2


@pytest.mark.parametrize(("batch", "alone"), [(7, True), (8, False)])
def test_few_batch_entries_leave_a_shared_bias_to_its_kernel(batch, alone, launched, monkeypatch):
    """Else a program would go through all heads while most of the GPU is idle."""
    monkeypatch.setattr(one_tile, "PROGRAMS", 4)
    q, bias = jnp.ones((batch, 5, 2, 8)), jnp.ones((batch, 1, 5, 5))
    jax.grad(lambda bias: attention(q, q, q, bias).sum())(bias)
    assert ("score_side" in launched) == alone


@pytest.mark.parametrize("features", [{}, dict(is_causal=True)], ids=["all", "causal"])
def test_keys_with_a_part_in_common(features):
    check_common(features)


def check_common(features):
    x, tx, cy, cty = arrays(None, 16.0)
    oracle.assert_as_exact_on_average(
        everything(features), attention, ((x[0] / 16, *x[1:]), tx, cy, cty), "bfloat16", times=2.0
    )


def test_hidden_nan_reaches_no_other_key(launched):
    """A row's sums leave out what the row does not see."""
    q, k, v = (jnp.asarray(oracle.normal(i, 1, n, 1, 16), "float32") for i, n in enumerate((5, 8, 8)))
    gradient = jax.grad(lambda k, v: attention(q, k, v, is_causal=True).sum())
    got, expected = gradient(k, v.at[:, 5:].set(jnp.nan)), gradient(k, v)
    np.testing.assert_array_equal(got[:, :5], expected[:, :5])
    assert "one_tile" in launched


HIDING = {  # the second batch entry, or the second query
    "lengths": (dict(key_value_seq_lengths=np.array([8, 0])), 1, slice(None)),
    "mask": (dict(mask=np.arange(2)[:, None, None, None] * np.ones((1, 1, 5, 8)) < 1), 1, slice(None)),
    "query": (dict(mask=np.arange(5)[None, None, :, None] != 1), slice(None), 1),
}


@pytest.mark.parametrize("name", HIDING)
def test_cotangents_where_nothing_is_seen_may_be_nan(name, launched):
    """Those of the log-sum-exp; and all, where no query of a head sees a key."""
    features, entry, row = HIDING[name]
    q, k, v = (jnp.asarray(oracle.normal(i, 2, n, 1, 16), "float32") for i, n in enumerate((5, 8, 8)))
    cy, tcy = ((q + i, q[..., 0] + i) for i in range(2))
    alone = isinstance(entry, int)

    def gradients(hidden):
        f = lambda *x: attention(*x, return_residual=True, **features)
        bad = [(o.at[entry, row].set(hidden) if alone else o, lse.at[entry, row].set(hidden)) for o, lse in (cy, tcy)]
        x = (q.at[entry, row].set(hidden) if alone else q, k, v)
        pulled = jax.vjp(lambda x, tx: jax.jvp(f, x, tx), x, x)[1](tuple(bad))
        return pulled, jax.vjp(f, *x)[1](bad[0])

    got, expected = map(jax.tree.leaves, map(gradients, (jnp.nan, 0.0)))
    for a, b in zip(got, expected, strict=True):
        assert np.isfinite(b).all()
        np.testing.assert_array_equal(a, b)
    assert launched.count("one_tile") == 2  # launches are traced once


def test_nan_of_a_query_reaches_the_values_that_it_sees():
    q, k, v = (jnp.asarray(oracle.normal(i, 1, n, 1, 16), "float32") for i, n in enumerate((5, 8, 8)))
    got = jax.grad(lambda q, v: attention(q, k, v, is_causal=True).sum(), 1)(q.at[:, 2].set(jnp.nan), v)
    assert np.isnan(got[:, :3]).all()
    assert np.isfinite(got[:, 3:]).all()


def test_gradients_along_a_tangent_of_the_bias(monkeypatch):
    """Of a bias whose gradient is another kernel's, without the tangent of that gradient: all is there that is written."""
    launch = Interpreter.launch

    def checked(self, given):
        if given.kernel.__name__ == "one_tile" and given.constants["STATISTICS"] and given.constants["TANGENT"]:
            checks.append(given.outputs["T_DELTA"] is not None)
            assert checks[-1]
        return launch(self, given)

    checks = []
    monkeypatch.setattr(Interpreter, "launch", checked)

    def compute(attention, x, tx, cy):
        tangent = lambda q, t_bias: jax.jvp(attention, (q, *x[1:]), (*tx[:3], t_bias))[1]
        return jax.vjp(tangent, x[0], tx[3])[1](cy.astype(x[0].dtype))

    oracle.assert_as_exact_as_naive(compute, attention, arrays((1, H, T, S))[:3], "float32")
    assert checks


@pytest.mark.parametrize("lengths", [(33, 5), (5, 33), (17, 16)])
def test_longer_sequences_have_two_sides(lengths, launched):
    q, k = (jnp.ones((1, n, 1, 8)) for n in lengths)
    jax.grad(lambda q: attention(q, k, k).sum())(q)
    assert "one_tile" not in launched


@pytest.mark.parametrize(("dtype", "capability", "expected"), [
    ("float32", 80, False), ("float32", 90, True), ("float32", 120, False), ("bfloat16", 80, True),
])  # fmt: skip
def test_what_would_spill_has_two_sides(dtype, capability, expected):
    """float32 of 64 channels, up to 15,000 bytes on sm_80."""
    recorder, array = Recorder(capability), jax.ShapeDtypeStruct((512, 64, 4, 64), dtype)
    x, y = Operands(array, array, array), (array, jax.ShapeDtypeStruct((512, 4, 64), "float32"))
    jobs.backward(recorder, Problem(scale=0.3, precision="tf32"), x, y, (array, None), (True, True, True, False))
    assert (one_tile.one_tile in [kernel for kernel, *_ in recorder.launches]) == expected


MUTANTS = {
    "scale": ("scaled(b_dk, scale)", "b_dk"),
    "delta": ("b_ds = b_p * (b_dp - b_delta[:, None])", "b_ds = b_p * b_dp"),
    "mean-tangent": ("b_w -= tl.sum(b_p * b_w, 1)[:, None]", "b_w -= 0.0"),
    "tangent-of-P": ("- b_t_delta[:, None]) + b_ds * b_w", "- b_t_delta[:, None])"),
    "tangent-of-keys": ("b_tdq = accumulated(b_tdq, b_dx, b_tk, PRECISION)", "b_tdq = b_tdq"),
    "values-by-w": ("thinned(b_p * b_w, b_kept, FEATURES)", "thinned(b_p, b_kept, FEATURES)"),
    "bias": ("b_sum += b_ds", "b_sum = b_ds"),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new"), MUTANTS.values(), ids=MUTANTS)
def test_broken_kernels_fail(old, new, broken_kernels, launched, monkeypatch):
    broken_kernels(one_tile, old, new)
    monkeypatch.setitem(one_tile.backward.__globals__, "PROGRAMS", 1)  # of the broken module
    with pytest.raises(AssertionError):
        oracle.assert_as_exact_as_naive(everything({}), attention, arrays((B, 1, T, S)), "float32")
    assert "one_tile" in launched


@pytest.mark.thorough
@pytest.mark.parametrize("old", ["b_dq = without(b_dq, ", "b_tdq = without(b_tdq, excess(b_tdx"])
def test_rows_that_are_not_corrected_fail(old, broken_kernels):
    broken_kernels(one_tile, old, f"_ = {old.partition(' = ')[2]}")
    with pytest.raises(AssertionError, match="error"):
        check_common({})


@pytest.mark.parametrize(("length", "head_dim", "dtype", "precision", "capability"), [
    *((32, 16, "float32", "tf32", c) for c in (80, 86, 90)), (32, 64, "float32", "tf32", 90),
    *((n, d, "bfloat16", "ieee", c) for n, d in ((17, 32), (64, 64), (32, 40)) for c in (80, 86, 90)),
    (64, 64, "float32", "ieee", 90), (20, 48, "float32", "tf32", 90),
])  # fmt: skip
def test_compiles(length, head_dim, dtype, precision, capability):
    recorder, array = Recorder(capability), jax.ShapeDtypeStruct((1024, length, 4, head_dim), dtype)
    bias = jax.ShapeDtypeStruct((1024, 1, length, length), dtype)
    statistic = jax.ShapeDtypeStruct((1024, 4, length), "float32")
    x, y, want = Operands(array, array, array, bias), (array, statistic), (True,) * 4
    problem = Problem(scale=0.3, precision=precision)
    jobs.backward(recorder, problem, x, y, (array, None), want)
    if length <= (one_tile.LONGEST if capability == 90 else one_tile.FEWER):
        jobs.backward_dual(recorder, problem, x, y, (array, None), (x, y, (array, None)), want, want)
    most = {"float32": 5300, "bfloat16": 2300}[dtype] if length == one_tile.LONGEST else 2000
    check_launches(recorder, capability, most)


def check_launches(recorder, capability, most):
    for kernel, signature, constants, options in recorder.launches:
        assert kernel.__name__ == "one_tile"
        resources = compiled(kernel, signature, constants, capability=capability, **options)
        assert resources.fits(capability), resources
        assert resources.spill_stores <= most, resources


@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("queries", "head_dim", "warps"), [(16, 32, 2), (1, 64, 4), (5, 24, 2)])
def test_few_queries_compile(queries, head_dim, warps, biased):
    """The plain backward of up to KEYS_OF_FEW keys; with tangents, of more queries or of more keys there are two sides."""

    def launched(queries, keys):
        recorder, array = Recorder(90), lambda n: jax.ShapeDtypeStruct((512, n, 8, head_dim), "bfloat16")
        bias = jax.ShapeDtypeStruct((512, 8, queries, keys), "bfloat16") if biased else None
        x, y = (
            Operands(array(queries), array(keys), array(keys), bias),
            (array(queries), jax.ShapeDtypeStruct((512, 8, queries), "float32")),
        )
        given, want = (Problem(scale=0.3), x, y, (y[0], None)), (True, True, True, biased)
        jobs.backward(recorder, *given, want)
        plain = [*recorder.launches]
        jobs.backward_dual(recorder, *given, (x, y, (y[0], None)), want, want)
        assert one_tile.one_tile not in [kernel for kernel, *_ in recorder.launches[len(plain) :]]
        recorder.launches[:] = plain
        return recorder

    check_launches(few := launched(queries, one_tile.KEYS_OF_FEW), 90, 300)
    assert few.launches[0][3]["num_warps"] == warps
    for other in (
        launched(queries, one_tile.KEYS_OF_FEW + 1),
        launched(one_tile.FEW_QUERIES + 1, one_tile.KEYS_OF_FEW),
    ):
        assert one_tile.one_tile not in [kernel for kernel, *_ in other.launches]
