"""The kernels on a GPU, launched by jax-triton, at real sizes: `pytest -m gpu`."""

import functools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import offset_data
import oracle
from families import FAMILIES, hopper
from in_one_pass import take_one_pass
from jax_flash_jvp import dot_product_attention
from jax_flash_jvp.launch import JaxTriton

pytestmark = pytest.mark.gpu

# B, T, S, N, K, D, causal
SHAPES = [
    (2, 256, 256, 4, 4, 64, False),
    (1, 512, 512, 4, 2, 128, True),
    (2, 333, 257, 6, 2, 64, False),
    (1, 191, 450, 4, 1, 128, True),
    (1, 450, 191, 2, 2, 128, True),
    (3, 1, 65, 2, 2, 32, False),
    (1, 100, 1, 2, 1, 16, False),
    (2, 129, 129, 3, 3, 8, True),
    (1, 200, 200, 4, 4, 72, True),
    (1, 130, 140, 2, 2, 80, False),
    (1, 130, 130, 2, 2, 96, True),
    (1, 140, 150, 2, 2, 28, False),
    (1, 150, 140, 2, 1, 40, True),
    (1, 257, 200, 2, 2, 192, False),
    (1, 200, 257, 2, 2, 256, True),
    (64, 50, 50, 4, 4, 64, False),  # one tile
    (64, 64, 49, 2, 2, 32, True),
    (64, 9, 120, 4, 4, 64, False),  # few queries
    (64, 30, 32, 4, 4, 40, True),
]
HOPPER_SHAPES = [
    (2, 1, 65, 2, 2, 64, False),
    (1, 100, 1, 2, 1, 128, True),
    (2, 1000, 1000, 4, 2, 64, True),
    (1, 383, 385, 2, 2, 128, True),
    (9, 300, 260, 8, 4, 64, False),  # more blocks than multiprocessors
    (8, 384, 200, 8, 4, 128, False),
    (35, 190, 180, 4, 4, 64, False),  # three warpgroups
    (35, 190, 180, 4, 4, 64, True),
    (35, 190, 180, 4, 4, 72, True),
    (35, 100, 100, 4, 4, 128, False),  # no whole tile
    (66, 130, 150, 16, 16, 72, False),  # in waves
    (35, 190, 180, 4, 4, 80, False),
    (2, 300, 260, 2, 1, 88, True),
    (9, 300, 260, 8, 4, 96, False),
    (2, 300, 260, 2, 1, 40, True),
    (2, 300, 260, 4, 2, 32, True),
    (35, 190, 180, 4, 4, 16, False),
    (1, 150, 330, 2, 1, 24, True),
    (1, 130, 140, 2, 2, 8, False),
    (35, 190, 180, 4, 4, 256, False),  # wide rows, whose sums two warpgroups divide
    (2, 300, 260, 4, 2, 256, True),
    (35, 190, 180, 4, 2, 192, True),
    (1, 150, 330, 2, 1, 160, False),
    (1, 300, 200, 2, 2, 136, True),
    *(SHARED := [  # whose last blocks, or all of them, programs share
        (1, 1100, 2000, 4, 2, 64, False),
        (1, 2100, 2500, 9, 9, 64, False),
        (1, 2000, 1100, 3, 3, 128, False),
        (1, 2100, 1500, 9, 9, 128, False),
        (1, 900, 1900, 2, 1, 72, False),
        (2, 1500, 1400, 2, 2, 32, False),
        (1, 1100, 900, 3, 3, 256, False),
        (1, 900, 1300, 4, 2, 192, False),
    ]),
]  # fmt: skip


def name(shape):
    b, t, s, n, k, d, causal = shape
    return f"B{b}-T{t}-S{s}-N{n}-K{k}-D{d}{'-causal' if causal else ''}"


def by(implementation):
    return lambda *args, **kwargs: dot_product_attention(*args, **{**kwargs, "implementation": implementation})


triton = by("triton")
same_bits = functools.partial(triton, deterministic=True)


def operands(shape, seed=0):
    b, t, s, n, k, d, _ = shape
    q, g, h, tq = (oracle.normal(seed + i, b, t, n, d) for i in range(4))
    k_, v, tk, tv = (oracle.normal(seed + 10 + i, b, s, k, d) for i in range(4))
    return (q, k_, v), (tq, tk, tv), (g, h)


def jobs(causal, **features):
    def f(attention):
        return lambda *x: attention(*x, is_causal=causal, **features)

    return {
        "forward": lambda attention, x, tx, g: f(attention)(*x),
        "jvp": lambda attention, x, tx, g: jax.jvp(f(attention), x, tx),
        "linearize": lambda attention, x, tx, g: jax.linearize(f(attention), *x)[1](*tx),
        "gradient": lambda attention, x, tx, g: jax.vjp(f(attention), *x)[1](g[0]),
        "gradient through the tangent": lambda attention, x, tx, g: jax.vjp(
            lambda x, tx: jax.jvp(f(attention), x, tx), x, tx
        )[1](g),
        "tangent of the gradient": lambda attention, x, tx, g: jax.jvp(
            lambda *x: jax.vjp(f(attention), *x)[1](g[0]), x, tx
        ),
    }


SECOND_ORDER = ("gradient through the tangent", "tangent of the gradient")


def together(named):
    """All of them in one program, which is compiled at once; results by name."""
    return jax.jit(
        lambda attention, *arrays: {n: job(attention, *arrays) for n, job in named.items()}, static_argnums=0
    )


def check(family, shape, dtype, **features):
    attention, arrays = by(family), operands(shape)
    every = jobs(shape[-1], **features)
    if dtype == "float32" and shape[5] > 128:  # no tile is worth launching
        every = {title: job for title, job in every.items() if title not in SECOND_ORDER}
    every = together(every)
    if dtype == "float32":  # in TF32, whose largest of many errors are a matter of luck
        oracle.assert_as_exact_on_average(every, attention, arrays, dtype)
    oracle.assert_as_exact_as_naive(
        every, attention, arrays, dtype, 0, oracle.TF32_EPSILON if dtype == "float32" else 0
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", SHAPES, ids=name)
def test_portable_kernels_agree_with_float64(shape, dtype):
    if dtype == "float32" and 1 in shape[1:3]:
        pytest.skip("XLA multiplies vectors exactly, not in TF32: the naive computation is no measure")
    check("portable", shape, dtype)


HEADS_AS_ROWS = [
    (4, 8, 4000, 32, 8, 128, True),
    (2, 8, 700, 16, 2, 64, True),
    (2, 4, 700, 8, 2, 128, True),
    (3, 3, 333, 6, 2, 72, True),
    (200, 5, 130, 6, 2, 256, True),  # keys are not divided
    (2, 2, 500, 8, 1, 64, True),
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", HEADS_AS_ROWS, ids=name)
def test_heads_as_rows(shape, dtype):
    """The last queries of a sequence, as in speculative decoding."""
    check("portable", shape, dtype, causal_alignment="lower_right")


@hopper
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", [s for s in SHAPES if s[5] in (64, 128)] + HOPPER_SHAPES, ids=name)
def test_hopper_kernels_agree_with_float64(shape, dtype):
    check("hopper", shape, dtype)


@pytest.mark.parametrize("shape", [SHAPES[i] for i in (0, 11, 12, 1, 13, 14)], ids=name)
def test_float32_is_ieee_when_asked(shape):
    """Wide heads: first order."""
    every = {t: job for t, job in jobs(shape[-1]).items() if shape[5] <= 64 or t not in SECOND_ORDER}
    with jax.default_matmul_precision("highest"):
        oracle.assert_as_exact_as_naive(together(every), triton, operands(shape), "float32", largest_score=4)


IEEE = {  # shape, and by how much queries are larger
    "B2-L256-D64": ((2, 256, 256, 4, 4, 64, False), 1),
    "B1-L1000-D64-causal": ((1, 1000, 1000, 2, 1, 64, True), 1),
    "large-logits": ((2, 256, 256, 4, 4, 64, False), 10),
    "B8-L16-D64": ((8, 16, 16, 4, 4, 64, False), 1),
    "B8-L32-D64": ((8, 32, 32, 4, 4, 64, True), 1),
    "B8-L50-S16-D64": ((8, 50, 16, 4, 4, 64, False), 1),
    "B2-T3-S4000-D64": ((2, 3, 4000, 4, 2, 64, False), 1),
    "B8-L32-D16": ((8, 32, 32, 4, 4, 16, False), 1),
    "B2-L200-D32": ((2, 200, 200, 2, 2, 32, True), 1),
    "B2-L200-D48": ((2, 200, 200, 2, 2, 48, False), 1),
    "B2-L200-D72": ((2, 200, 200, 2, 2, 72, True), 1),
    "B8-L20-D80": ((8, 20, 20, 2, 2, 80, False), 1),
}


@pytest.mark.parametrize("case", IEEE)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_float32_is_ieee_on_average(case, bias):
    """Of every derivative, with that of a bias: naive attention's own errors are largest where a few of many are."""
    shape, of_queries = IEEE[case]
    _, t, s, n, _, _, causal = shape
    ((query, *x), tx, g), more = operands(shape), [oracle.normal(40 + i, 1, n, t, s) for i in range(2)]
    arrays = ((query * of_queries, *x, *more[:bias]), (*tx, *more[1 : 1 + bias]), g)
    largest = 0 if of_queries == 1 else 5 * of_queries
    with jax.default_matmul_precision("highest"):
        every = together(jobs(causal))
        oracle.assert_as_exact_as_naive(every, triton, arrays, "float32", largest)
        oracle.assert_as_exact_on_average(every, triton, arrays, "float32", times=2.5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("wrt", ["q", "k", "v", "qk", "qv", "kv"])
def test_tangents_may_be_absent(wrt, family):
    x, tx, g = operands(SHAPES[2])

    def job(attention, x, tx, g):
        moving = ["qkv".index(c) for c in wrt]

        def f(*moved):
            full = list(x)
            for i, a in zip(moving, moved, strict=True):
                full[i] = a
            return attention(*full)

        t = tuple(tx[i] for i in moving)
        first = jax.jvp(f, tuple(x[i] for i in moving), t)
        second = jax.vjp(lambda *p: jax.jvp(f, p, t), *[x[i] for i in moving])[1](g)
        return first, second

    oracle.assert_as_exact_as_naive(jax.jit(job, static_argnums=0), by(family), (x, tx, g), "bfloat16")


@pytest.mark.parametrize("family", FAMILIES)
def test_tangents_common_to_all_keys(family):
    """They move all scores of a row alike: Ṡ and μ are large, the output does not move with them."""

    def job(attention, x, tx):
        return jax.jvp(attention, x, tx)[1], jax.linearize(attention, *x)[1](*tx)

    for shape in (SHAPES[0], HOPPER_SHAPES[3]):
        x, (t_q, t_k, t_v), _ = operands(shape)
        oracle.assert_as_exact_as_naive(job, by(family), (x, (t_q, t_k + 100, t_v)), "bfloat16")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("sharpness", [1, 3, 10])
@pytest.mark.parametrize("family", FAMILIES)
def test_tangents_of_sharp_attention(family, sharpness, dtype):
    for head_dim, causal in ((64, False), (72, True), (128, False)):
        (query, *x), *_ = operands((1, 700, 700, 2, 2, head_dim, causal))
        attend = functools.partial(by(family), is_causal=causal)
        oracle.assert_as_exact_on_average(
            oracle.tangents_along_the_scores, attend, (sharpness * query, *x), dtype,
            functools.partial(oracle.attention, is_causal=causal),
        )  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_growing_scores(family, dtype):
    for head_dim, causal in ((64, False), (72, True), (128, False)):
        ((query, key, value), tx, _) = operands((1, 900, 900, 2, 2, head_dim, causal))
        x = (*oracle.with_growing_scores(query, key), value)
        attend = functools.partial(by(family), is_causal=causal)
        oracle.assert_as_exact_on_average(
            lambda attention, *arrays: jax.jvp(attention, arrays[:3], arrays[3:]), attend, (*x, *tx), dtype,
            functools.partial(oracle.attention, is_causal=causal),
        )  # fmt: skip


CALL = 'custom_call_target="triton_kernel_call'


def launches(function, *args):
    return jax.jit(function).lower(*args).compile().as_text().count(CALL)


def test_which_kernels_are_launched():
    x, tx, g = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), operands(SHAPES[0]))
    run = {n: launches(lambda *a, j=job: j(triton, *a), x, tx, g) for n, job in jobs(False).items()}
    assert run["forward"] == 1
    assert run["jvp"] == 1
    assert run["linearize"] == 2
    assert run["gradient"] == 1 + 4  # statistics, means of keys, query side, key side
    assert run["gradient through the tangent"] <= 1 + 5  # the key side may be split in two


@hopper
def test_programs_share_blocks_within_a_launch():
    """They have memory for the parts, which causal calls do not need."""
    for causal in (False, True):
        x, tx, g = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), operands((*SHARED[0][:-1], causal)))
        for job, launched in (("forward", 1), ("jvp", 1), ("gradient", 1 + 4)):  # means of keys and of rows, both sides
            run = jax.jit(lambda *a, job=job, causal=causal: jobs(causal)[job](by("hopper"), *a))
            compiled = run.lower(x, tx, g).compile()
            assert compiled.as_text().count(CALL) == launched
            assert (compiled.memory_analysis().temp_size_in_bytes > 4 * 2**20) != causal


@hopper
def test_jax_says_how_many_multiprocessors_there_are():
    """Else no program of the Hopper kernels would compute several blocks."""
    assert JaxTriton().multiprocessors >= 66


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_memory_is_linear(head_dim, causal):
    """Beyond inputs and outputs: two float32 numbers a query row, what is saved for the backward, where it corrects dQ a mean
    key of each row, parts of blocks that programs share, which they do not under causality, and in one pass dQ in float32, with
    three more numbers a row and one a tile, which adds in no order under causality at 128 channels."""
    length, heads = 8192, 24  # blocks of keys keep the multiprocessors busy
    x = tx = (jax.ShapeDtypeStruct((1, length, heads, head_dim), jnp.bfloat16),) * 3
    f = lambda *x, **how: triton(*x, is_causal=causal, **how)
    parts = 0 if causal else 192 * (2 * head_dim + 28) * 4 * (jax.devices()[0].core_count or 0)
    rows = 2 * 4 * length * heads + parts

    def temporaries(function, *args):
        return jax.jit(function).lower(*args).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(lambda x: f(*x), x) <= rows + 4096
    assert temporaries(lambda x, tx: jax.jvp(f, x, tx), x, tx) <= rows + 4096
    means = 2 * length * heads * head_dim
    for deterministic in (True, False):
        sums = 4 * heads * (length * (head_dim + 3) + length // 64)
        sums *= not (deterministic and causal and head_dim > 64)
        pull = jax.eval_shape(lambda x, d=deterministic: jax.vjp(functools.partial(f, deterministic=d), *x)[1], x)
        assert temporaries(lambda pull, g: pull(g), pull, x[0]) <= rows + means + sums + 4096


@pytest.mark.parametrize("shape", [(2, 1000, 900, 8, 2, 64, True), *SHARED[:2]], ids=name)
def test_same_bits_every_time(shape):
    x, tx, g = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), operands(shape))
    for job in jobs(shape[-1]).values():
        run = jax.jit(lambda *a, j=job: j(same_bits, *a))
        first = jax.tree.map(np.asarray, run(x, tx, g))
        for _ in range(5):
            jax.tree.map(np.testing.assert_array_equal, first, jax.tree.map(np.asarray, run(x, tx, g)))


@hopper
@pytest.mark.parametrize(("head_dim", "ring"), [(64, 0), (64, 1), (72, 0), (96, 0), (128, 0)])
def test_one_pass(monkeypatch, head_dim, ring):
    """Of the backward, which calls as short as these do not take by themselves."""
    taken = take_one_pass(monkeypatch, ring=ring)
    causal = head_dim > 72
    x, _, (g, _) = jax.tree.map(
        lambda a: a.astype(jnp.bfloat16).astype(np.float64), operands((2, 700, 600, 4, 2, head_dim, causal))
    )

    def gradients(attention, x, g):
        return jax.vjp(lambda *x: attention(*x, is_causal=causal), *x)[1](g)

    got = oracle.evaluate(gradients, by("hopper"), (x, g), "bfloat16")
    assert taken
    naive, exact = (oracle.evaluate(gradients, oracle.attention, (x, g), d) for d in ("bfloat16", "float64"))
    oracle.assert_close(got, exact, naive)


@hopper
@pytest.mark.parametrize(("head_dim", "causal", "ring"), [(64, False, 0), (64, True, 1), (128, True, 0)])
def test_one_pass_in_order(monkeypatch, head_dim, causal, ring):
    """Has the same bits on every run, where so many blocks add to a tile that some wait."""
    taken = take_one_pass(monkeypatch, in_order=True, ring=ring)
    x, tx, (g, tg) = jax.tree.map(
        lambda a: jnp.asarray(a, jnp.bfloat16), operands((2, 1700, 1900, 8, 4, head_dim, causal))
    )
    attend = functools.partial(by("hopper"), is_causal=causal)
    runs = [jax.jit(lambda: jax.vjp(attend, *x)[1](g))]
    if head_dim == 64:
        runs.append(jax.jit(lambda: jax.vjp(lambda x, tx: jax.jvp(attend, x, tx), x, tx)[1]((g, tg))))
    for run in runs:
        first = jax.tree.map(np.asarray, run())
        for _ in range(20):
            jax.tree.map(np.testing.assert_array_equal, first, jax.tree.map(np.asarray, run()))
    assert taken == ["one_pass", "one_pass_dual"][: len(runs)]


@hopper
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_one_pass_dual(monkeypatch, causal):
    """Of the gradient through forward and tangent, likewise."""
    taken = take_one_pass(monkeypatch)
    x, tx, (g, tg) = jax.tree.map(
        lambda a: a.astype(jnp.bfloat16).astype(np.float64), operands((2, 700, 600, 4, 2, 64, causal))
    )

    def gradients(attention, x, tx, g):
        both = lambda x, tx: jax.jvp(lambda *x: attention(*x, is_causal=causal), x, tx)
        return jax.vjp(both, x, tx)[1](g)

    got = oracle.evaluate(gradients, by("hopper"), (x, tx, (g, tg)), "bfloat16")
    assert "one_pass_dual" in taken
    naive, exact = (oracle.evaluate(gradients, oracle.attention, (x, tx, (g, tg)), d) for d in ("bfloat16", "float64"))
    oracle.assert_close(got, exact, naive)


BUSY = """
import jax, sys, time
a = jax.numpy.ones((4096, 4096), "bfloat16")
product, end = jax.jit(lambda a: a @ a), time.time() + 400
while time.time() < end:
    product(a).block_until_ready()
    sys.stdout.write(".")
    sys.stdout.flush()
"""


def test_same_bits_beside_another_process():
    """Blocks are interrupted then, and others' data lie in their shared memory."""
    jitted = []
    for head_dim in (64, 128):
        x, tx, g = jax.tree.map(
            lambda a: jnp.asarray(a, jnp.bfloat16), operands((4, 2000, 2000, 5, 5, head_dim, False))
        )
        for job in jobs(False).values():
            run = jax.jit(lambda *a, j=job: jax.tree.map(lambda a: a.astype(jnp.float32).sum(-1), j(same_bits, *a)))
            jitted.append((run, (x, tx, g), jax.tree.map(np.asarray, run(x, tx, g))))
    environment = dict(os.environ, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, env=environment) as other:
        try:
            assert other.stdout.read(1) == b"."  # it runs
            for _ in range(20):
                for run, args, first in jitted:
                    jax.tree.map(np.testing.assert_array_equal, first, jax.tree.map(np.asarray, run(*args)))
            assert other.poll() is None
        finally:
            other.kill()


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_long_sequences(head_dim, causal, family):
    """L = 8192: each head attends on its own, so that two of them tell, one after the other for want of memory."""
    shape = (1, 8192, 8192, 8, 8, head_dim, causal)
    x, tx, g = jax.tree.map(lambda a: a.astype(jnp.bfloat16).astype(np.float64), operands(shape))
    for job in jobs(causal).values():
        got = oracle.evaluate(job, by(family), (x, tx, g), "bfloat16")
        for head in (0, 7):
            of_head = lambda tree, head=head: jax.tree.map(lambda a: a[:, :, head : head + 1], tree)
            one = of_head((x, tx, g))
            naive, exact = (oracle.evaluate(job, oracle.attention, one, d) for d in ("bfloat16", "float64"))
            oracle.assert_close(of_head(got), exact, naive)


@pytest.mark.parametrize("family", FAMILIES)
def test_very_long_sequence(family):
    """L = 131072: a query attends on its own, so that a few of them tell."""
    x, tx, _ = operands((1, 2**17, 2**17, 1, 1, 64, False))
    x, tx = jax.tree.map(lambda a: a.astype(jnp.bfloat16).astype(np.float64), (x, tx))
    rows = np.array([0, *range(63, 2**17, 4099), 2**17 - 1])

    def job(attention, x, tx):
        return jax.jvp(attention, x, tx), jax.linearize(attention, *x)[1](*tx)

    few = [(q[:, rows], *rest) for q, *rest in (x, tx)]
    got = jax.tree.map(lambda a: a[:, rows], oracle.evaluate(job, by(family), (x, tx), "bfloat16"))
    naive, exact = (oracle.evaluate(job, oracle.attention, few, dtype) for dtype in ("bfloat16", "float64"))
    oracle.assert_close(got, exact, naive)


def test_consistency_step_under_transformations():
    """A model of three layers: JVP with a stopped tangent, then its gradient, in scan, remat and vmap."""
    rng = np.random.default_rng(0)
    width, heads, length = 128, 2, 96
    weights = jnp.asarray(rng.standard_normal((3, width, 3 * width)) * width**-0.5, jnp.float32)
    h, t_h = (jnp.asarray(rng.standard_normal((2, length, width)), jnp.float32) for _ in range(2))

    def loss(implementation, weights, h, t_h):
        @jax.checkpoint
        def layer(h, w):
            q, k, v = jnp.split((h @ w).reshape(*h.shape[:2], heads, -1), 3, axis=-1)
            return h + dot_product_attention(q, k, v, implementation=implementation).reshape(h.shape), None

        net = lambda h: jax.lax.scan(layer, h, weights)[0]
        y, t_y = jax.jvp(net, (h,), (t_h,))
        return jnp.mean((y - jax.lax.stop_gradient(jnp.sin(t_y))) ** 2)

    with jax.default_matmul_precision("highest"):
        many = lambda w: jnp.stack([w, 0.5 * w])
        step = lambda implementation: jax.jit(jax.vmap(jax.value_and_grad(lambda w: loss(implementation, w, h, t_h))))
        got, expected = step("triton")(many(weights)), step("xla")(many(weights))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5), got, expected)


def test_heads_that_the_kernels_do_not_serve(caplog):
    x = [jnp.asarray(oracle.normal(i, 1, 40, 2, 264), jnp.float32) for i in range(3)]

    def derivatives(attention):
        gradient = jax.grad(lambda *x: jnp.sin(attention(*x)).sum(), (0, 1, 2))
        return attention(*x), gradient(*x), jax.jvp(gradient, x, x)[1]

    with jax.default_matmul_precision("highest"), caplog.at_level("DEBUG", "jax_flash_jvp"):
        got, expected = derivatives(dot_product_attention), derivatives(jax.nn.dot_product_attention)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)
    assert (
        "do not serve a head dimension of 264 in `query` (1 to 256 are served); the tiled reference computes it"
        in caplog.text
    )


def test_the_log_says_which_kernels_run(caplog):
    q = jnp.asarray(oracle.normal(0, 1, 1030, 2, 64), jnp.bfloat16)  # a length of no other test: it is compiled anew
    with caplog.at_level("DEBUG", "jax_flash_jvp"):
        jax.jit(dot_product_attention)(q, q, q)
    assert re.search(r"the (Hopper|portable) kernels run: ", caplog.text)
    assert re.search(r"kernel forward in \d+ programs of \d+ warps", caplog.text)


FAMILIES = ["portable", pytest.param("hopper", marks=hopper)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head_dim", [64, 72, 128])
@pytest.mark.parametrize("name", [*offset_data.SEEING_ALL, *offset_data.HIDING])
def test_offsets_of_keys_and_values(family, head_dim, name):
    """Half the length of Hopper's rings and more; up to three times naive attention's error where δ is what remains of it, and
    one mean key serves all rows, or under a cap, whose second derivative multiplies with what keys have in common."""
    if family == "hopper" and name in ("soft-cap", "bias"):
        pytest.skip("served by the portable kernels alone")
    times = 3.0 if name in offset_data.SEEING_ALL else 2.0
    times = {(0, 0): 2.0, (1, 2): times, (16, 0): 3.0 if name == "soft-cap" else 2.0, (4, 2): times}
    offset_data.check_all(family, times, head_dim**-0.5, shape=(700, head_dim), **offset_data.feature(name, 700))
