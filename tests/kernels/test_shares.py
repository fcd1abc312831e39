"""Few blocks: results that several programs share, and heads that are rows, interpreted, against dense attention in float64;
and which calls have smaller blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from compiled import Recorder
from jax_flash_jvp import dot_product_attention
from jax_flash_jvp.kernels.portable import jobs, shares, visibility
from jax_flash_jvp.launch import Interpreter
from jax_flash_jvp.problem import Operands, Problem


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


# ------------------------------------------------------------------------------------------------ keys

KEYS = {  # T, S, features; of 40 keys a share of 16 or 24
    "plain": (5, 70, {}),
    "whole": (16, 64, {}),
    "grouped": (5, 70, dict(heads=4)),
    "one-query": (1, 70, dict(heads=4)),
    "causal": (20, 70, dict(is_causal=True)),
    "last-queries": (3, 70, dict(is_causal=True, causal_alignment="lower_right")),
    "window": (20, 70, dict(local_window_size=(40, 3))),
    "lengths": (3, 70, dict(key_value_seq_lengths=np.array([0, 33]), query_seq_lengths=np.array([2, 3]))),
    "segments": (
        6, 70, dict(
            query_segment_ids=np.array([[0, 1, 1, 2, 2, 9]] * 2), key_value_segment_ids=np.arange(140).reshape(2, 70) // 40
        ),
    ),
    "mask": (5, 70, dict(mask=oracle.normal(7, 2, 1, 5, 70) > 1.5)),
    "cap": (5, 70, dict(logits_soft_cap=1.3)),
    "bias": (5, 70, dict(bias=np.where(np.arange(70) < 40, -1e9, oracle.normal(6, 1, 1, 5, 70)))),
    "negative": (5, 70, dict(scale=-0.7)),
}  # fmt: skip


def every_job(features):
    def compute(attention, x, tx, cy, cty):
        def f(*x):
            return attention(*x, **features, return_residual=True)

        y, tangent = jax.linearize(f, *x)
        cy, cty = (jax.tree.map(lambda c, y: c.astype(y.dtype), c, y) for c in (cy, cty))
        return {
            "forward": f(*x),
            "forward with tangent": jax.jvp(f, x, tx),
            "tangent": tangent(*tx),
            "backward": jax.linear_transpose(tangent, *x)(cy),
            "gradient of the tangent": jax.vjp(lambda x, tx: jax.jvp(f, x, tx), x, tx)[1]((cy, cty)),
            "tangent of the gradient": jax.jvp(lambda x, cy: jax.vjp(f, *x)[1](cy), (x, cy), (tx, cty)),
        }

    return compute


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in KEYS for dtype in ("float32", "bfloat16")[name not in ("plain", "mask") :]],
)
def test_shares_of_keys(name, dtype, on, monkeypatch):
    """Of which some see nothing; also of keys that have much in common, so that the excess of row sums is taken off."""
    monkeypatch.setattr(jobs, "LEAST_KEYS", 16)
    T, S, features = KEYS[name]
    features = dict(features)
    N = features.pop("heads", 2)
    shapes = (2, T, N, D), (2, S, 2, D), (2, S, 2, D)
    x, tx = (tuple(oracle.normal(10 * i + j, *s) for j, s in enumerate(shapes)) for i in range(2))
    x = (x[0], x[1] + 2, x[2])
    cy, cty = ((oracle.normal(20 + i, *shapes[0]), oracle.normal(30 + i, 2, T, N)) for i in range(2))
    attention, launches = on(8)
    oracle.assert_as_exact_as_naive(every_job(features), attention, (x, tx, cy, cty), dtype)
    assert {launch.scalars["n_shares"] for launch in named(launches, "forward")} <= {2, 3, 4}
    assert len(named(launches, "merge")) == len(named(launches, "forward"))


def test_dropout_in_shares(on, monkeypatch):
    """Drops what it would drop without them."""
    monkeypatch.setattr(jobs, "LEAST_KEYS", 16)
    q, k = jnp.asarray(oracle.normal(0, 1, 5, 2, D), "float32"), jnp.asarray(oracle.normal(1, 1, 70, 2, D), "float32")
    f = lambda attend: attend(q, k, k, dropout_rate=0.3, dropout_key=jax.random.key(0))
    shared, launches = on(8)
    np.testing.assert_allclose(f(shared), f(on(1)[0]), rtol=1e-5, atol=1e-5)
    assert len(named(launches, "merge")) == 1


# ------------------------------------------------------------------------------------------------ heads that are rows

CACHE = 50  # keys
ONE = {  # features; whether the query heads of a head of keys are the rows of one block
    "plain": ({}, True),
    "three-heads-a-key": (dict(heads=6), True),
    "one-head": (dict(heads=2), False),
    "first": (dict(is_causal=True), True),
    "last": (dict(is_causal=True, causal_alignment="lower_right"), True),
    "last-window": (dict(local_window_size=(20, 0), causal_alignment="lower_right"), True),
    "window": (dict(local_window_size=(3, 18)), True),
    "lengths": (dict(query_seq_lengths=np.array([1, 0]), key_value_seq_lengths=np.array([33, 9])), True),
    "mask": (dict(mask=oracle.normal(7, 2, 2, 1, CACHE) > 0.5), True),
    "mask-of-heads": (dict(mask=oracle.normal(7, 1, 4, 1, CACHE) > 0), False),
    "cap": (dict(logits_soft_cap=1.3), True),
    "bias": (dict(bias=(2, 1, 1, CACHE)), True),
    "bias-of-key-heads": (dict(bias=(1, 2, 1, CACHE)), True),
    "bias-of-heads": (dict(bias=(1, 4, 1, CACHE)), False),
    "bias-of-a-row": (dict(bias=(2, 1, 1, 1)), True),
    "segments": (
        dict(query_segment_ids=np.array([[1], [0]]), key_value_segment_ids=np.arange(2 * CACHE).reshape(2, CACHE) // 30), False
    ),
}  # fmt: skip


def check_rows(queries, features, on, multiprocessors, dtype):
    """The `rows_of_head` of the launches, which are right."""
    features = dict(features)
    N, S, axes = features.pop("heads", 4), features.pop("keys", CACHE), features.pop("bias", None)
    shapes = (2, queries, N, D), (2, S, 2, D), (2, S, 2, D), *([] if axes is None else [axes])
    x, tx = (tuple(oracle.normal(10 * i + j, *s) for j, s in enumerate(shapes)) for i in range(2))
    cy, cty = ((oracle.normal(20 + i, *shapes[0]), oracle.normal(30 + i, 2, queries, N)) for i in range(2))
    attention, launches = on(multiprocessors)
    x = (x[0], x[1] + 2, *x[2:])
    oracle.assert_as_exact_as_naive(every_job(features), attention, (x, tx, cy, cty), dtype)
    assert bool(named(launches, "merge")) == (multiprocessors == 32)
    (rows,) = {launch.constants["FEATURES"].rows_of_head for launch in named(launches, "forward")}
    return rows


@pytest.mark.parametrize("multiprocessors", [1, 32])
@pytest.mark.parametrize("name", ONE)
def test_one_query(name, multiprocessors, on, monkeypatch):
    monkeypatch.setattr(jobs, "LEAST_KEYS", 16)
    features, as_rows = ONE[name]
    assert check_rows(1, features, on, multiprocessors, "bfloat16") == as_rows


LAST = dict(is_causal=True, causal_alignment="lower_right")
FEW = {  # queries, features; whether the query heads of a head of keys are the rows of one block
    "two-of-two-heads": (2, LAST, True),
    "two-of-four": (2, dict(heads=8, **LAST), True),
    "three-of-two": (3, LAST, True),
    "three-of-four": (3, dict(heads=8, **LAST), True),
    "eight-of-two": (8, LAST, True),
    "eight-of-four": (8, dict(heads=8, **LAST), True),  # two blocks
    "one-head": (8, dict(heads=2, **LAST), False),
    "all": (8, {}, True),
    "first": (8, dict(heads=8, is_causal=True), True),
    "last-window": (8, dict(heads=8, local_window_size=(20, 0), causal_alignment="lower_right"), True),
    "window": (8, dict(heads=8, local_window_size=(3, 18)), True),
    "rows-that-see-nothing": (8, dict(heads=8, local_window_size=(-47, 60)), True),
    "key-lengths": (8, dict(heads=8, key_value_seq_lengths=np.array([33, 0]), **LAST), True),
    "mask": (3, dict(mask=oracle.normal(7, 2, 1, 1, CACHE) > 0.5, **LAST), True),
    "mask-of-key-heads": (3, dict(mask=oracle.normal(7, 1, 2, 1, CACHE) > 0.5), True),
    "cap": (3, dict(logits_soft_cap=1.3, **LAST), True),
    "bias": (8, dict(heads=8, bias=(2, 1, 1, CACHE), **LAST), True),
    "bias-of-key-heads": (3, dict(bias=(1, 2, 1, CACHE), **LAST), True),
    "query-lengths": (3, dict(query_seq_lengths=np.array([2, 3])), False),
    "mask-of-queries": (3, dict(mask=oracle.normal(7, 2, 1, 3, CACHE) > 0.5), False),
    "bias-of-queries": (3, dict(bias=(1, 1, 3, 1)), False),
}  # fmt: skip


@pytest.mark.parametrize("name", FEW)
def test_few_queries(name, on, monkeypatch):
    """Also where blocks begin within a head, of which positions know nothing."""
    monkeypatch.setattr(jobs, "LEAST_KEYS", 16)
    queries, features, as_rows = FEW[name]
    assert check_rows(queries, features, on, 32, "bfloat16") == queries * as_rows


@pytest.mark.parametrize(("queries", "dtype", "as_rows"), [
    (4, "float32", True), (5, "float32", False), (16, "bfloat16", True), (17, "bfloat16", False)
])  # fmt: skip
def test_how_many_queries_are_few(queries, dtype, as_rows, on):
    assert check_rows(queries, dict(heads=8, **LAST), on, 1, dtype) == queries * as_rows


def test_programs_of_heads_that_are_rows(on):
    """One for each head of keys and block of rows, in every kernel but that of statistics."""
    q, k = (jnp.asarray(oracle.normal(i, 2, n, h, D), "bfloat16") for i, (n, h) in enumerate(((4, 8), (CACHE, 2))))
    attention, launches = on(1)
    attend = functools.partial(attention, **LAST)
    jax.jvp(jax.grad(lambda *x: attend(*x).astype("float32").sum(), range(3)), (q, k, k), (q, k, k))
    programs = {}
    for launch in launches:
        programs.setdefault(launch.kernel.__name__, set()).add(launch.programs)
    blocks = -(-CACHE // 16)
    heads = dict(key_means=2 * 2, row_means=2 * 2, query_side=2 * 2, key_side=2 * 2 * blocks)
    expected = dict(heads, forward=2 * 2, statistics=2 * 8)
    assert programs == {name: {n} for name, n in expected.items()}


@pytest.mark.parametrize("wrt", ["q", "k", "v", "qk", "qv", "kv"])
def test_tangents_of_few_queries_may_be_absent(wrt, on):
    def compute(attention, x, tx, g):
        def along(*some):
            return attention(*(dict(zip("qkv", x, strict=True)) | dict(zip(wrt, some, strict=True))).values(), **LAST)

        x_some, t_some = ([a["qkv".index(name)] for name in wrt] for a in (x, tx))
        gradient = lambda *some: jax.vjp(along, *some)[1](g)
        return {"forward": jax.jvp(along, x_some, t_some), "gradient": jax.jvp(gradient, x_some, t_some)}

    shapes = (2, 3, 8, D), (2, CACHE, 2, D), (2, CACHE, 2, D)
    x, tx = ([oracle.normal(10 * i + j, *s) for j, s in enumerate(shapes)] for i in range(2))
    oracle.assert_as_exact_as_naive(compute, on(1)[0], (x, tx, oracle.normal(20, *shapes[0])), "bfloat16")


def test_parts_of_the_keys_of_few_queries():
    """Merged, they are the whole."""
    draw = lambda seed, n, heads: np.asarray(oracle.normal(seed, 2, n, heads, D), "float32")
    q, k, v = draw(0, 3, 8), draw(1, CACHE, 2), draw(2, CACHE, 2)
    problem = Problem(scale=0.2, partial=True)
    parts = [Operands(q, *(np.ascontiguousarray(a[:, keys]) for a in (k, v))) for keys in (np.s_[:20], np.s_[20:])]
    assert jobs.PortableCall(Interpreter(), problem, parts[0]).features.rows_of_head == 3
    o, lse = zip(*(jobs.forward(Interpreter(), problem, x)[:2] for x in parts), strict=True)
    weights = np.exp(lse - np.logaddexp(*lse)).swapaxes(2, 3)[..., None]
    whole = lambda attend, *x: attend(*x, scale=0.2)
    exact = oracle.evaluate(whole, oracle.attention, [np.float64(a) for a in (q, k, v)], "float64")
    np.testing.assert_allclose((weights * o).sum(0), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("o_q = o_m % T if T > 0 else o_m", "o_q = o_m"),
        ("i_first = 0 if T > 0 else i_m * BM", "i_first = i_m * BM"),
        ("i_last = T - 1 if T > 0", "i_last = 0 if T > 0"),
        ("tl.where(i_n * BN <= T - 1 + right", "tl.where(i_n * BN <= right"),
    ],
    ids=["visible", "seen-whole", "stop", "stop-of-keys"],
)
def test_positions_from_rows_fail(old, new, broken_kernels, on):
    broken_kernels(visibility, old, new)
    with pytest.raises(AssertionError, match="error"):
        check_rows(8, dict(heads=8, keys=36, **LAST), on, 1, "bfloat16")


# ------------------------------------------------------------------------------------------------ smaller blocks

ATOMS = dict(shape=(1, 400, 10, 64), dtype="float32", precision="tf32")
SMALLER = {  # a call; rows of the result, warps and programs of the forward, the query side and the key side
    "tf32": (ATOMS, [(64, 4, 70), (64, 4, 70), (64, 4, 70)]),
    "ieee": (ATOMS | dict(precision="ieee"), [(64, 4, 70), (64, 4, 70), (64, 4, 70)]),
    "segments": (ATOMS | dict(precision="ieee", segments=True), [(64, 4, 70), (64, 4, 70), (64, 4, 70)]),
    "narrow": (ATOMS | dict(shape=(1, 400, 10, 32), precision="ieee"), [(64, 4, 70), (64, 4, 70), (64, 4, 70)]),
    "as-many-as-multiprocessors": (ATOMS | dict(shape=(1, 384, 22, 64)), [(64, 4, 132), (64, 4, 132), (64, 4, 132)]),
    "more": (ATOMS | dict(shape=(1, 384, 23, 64)), [(64, 4, 138), (128, 8, 69), (128, 8, 69)]),
    "of-a-smaller-gpu": (ATOMS | dict(multiprocessors=69), [(64, 4, 70), (128, 8, 40), (128, 8, 40)]),
    "of-an-unknown-gpu": (ATOMS | dict(multiprocessors=None), [(64, 4, 70), (64, 4, 70), (64, 4, 70)]),
    "bfloat16": (ATOMS | dict(dtype="bfloat16"), [(128, 8, 40), (64, 4, 70), (64, 4, 70)]),
    "wide": (ATOMS | dict(shape=(1, 400, 10, 72)), [(128, 8, 40), (128, 8, 40), (128, 8, 40)]),
    "another-gpu": (ATOMS | dict(target=80), [(64, 4, 70), (64, 4, 70), (32, 4, 130)]),
    "keys-divided": (ATOMS | dict(shape=(1, 128, 8, 64), keys=4096, precision="ieee"), [(128, 8, 8 * 16)]),
}  # fmt: skip


@pytest.mark.parametrize("name", SMALLER)
def test_rows_of_blocks(name):
    """Half as many where multiprocessors would have no program: not below 64, and not where shares of keys keep them busy."""
    call = dict(multiprocessors=132, target=90, segments=False, keys=None) | SMALLER[name][0]
    batch, length, heads, channels = call["shape"]
    recorder, problem = Recorder(call["target"]), Problem(scale=0.125, precision=call["precision"])
    recorder.multiprocessors = call["multiprocessors"]
    array = lambda n: jax.ShapeDtypeStruct((batch, n, heads, channels), call["dtype"])
    q, k, statistic = (
        array(length),
        array(call["keys"] or length),
        jax.ShapeDtypeStruct((batch, heads, length), "float32"),
    )
    ids = jax.ShapeDtypeStruct((batch, length), "int32") if call["segments"] else None
    x, launches = Operands(q, k, k, query_segments=ids, key_segments=ids), []
    recorder.launch = lambda launch: (launches.append(launch), Recorder.launch(recorder, launch))[1]
    jobs.forward(recorder, problem, x)
    jobs.backward(recorder, problem, x, (q, statistic), (q, None), (True, True, True, False))
    sides = dict(forward="BM", query_side="BM", key_side="BN")
    found = [
        (launch.constants[sides[launch.kernel.__name__]], launch.num_warps, launch.programs)
        for launch in launches if launch.kernel.__name__ in sides
    ]  # fmt: skip
    assert found[: len(SMALLER[name][1])] == SMALLER[name][1]
