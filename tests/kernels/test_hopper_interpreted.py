"""The Hopper kernels on numpy, against the tiled reference."""

import contextlib
import dataclasses
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gluon_on_numpy
import oracle
from compiled import Recorder
from in_one_pass import take_one_pass
from jax_flash_jvp import reference, visibility
from jax_flash_jvp.kernels import jobs
from jax_flash_jvp.kernels.features import Features
from jax_flash_jvp.kernels.hopper import config, one_pass
from jax_flash_jvp.kernels.hopper.call import HopperCall
from jax_flash_jvp.problem import Operands, Problem

QKV = ("query", "key", "value")


def past(a, ends):
    return (np.arange(a.shape[1]) >= ends[:, None])[:, :, None, None]


def unseen(x):
    """[B, T, N, 1] and [B, S, K, 1]: of queries without keys in their ranges, within the lengths, and of keys in none."""
    (b, t, n, _), (_, s, k, _) = x.query.shape, x.key.shape
    query, key = np.zeros((b, t, n), bool), np.zeros((b, s, k), bool)
    if x.key_ranges is not None:
        start, end = np.moveaxis(x.key_ranges, -1, 0)[..., None]
        seen = np.broadcast_to(
            ((start <= np.arange(s)) & (np.arange(s) < end)).any(3), (b, x.key_ranges.shape[1], t, s)
        )
        seen = seen.repeat(n // seen.shape[1], 1)  # of each query head
        for lengths, axis in ((x.query_lengths, 2), (x.key_lengths, 3)):
            if lengths is not None:
                there = np.arange(seen.shape[axis]) < lengths[:, None]
                seen = seen & (there[:, None, :, None] if axis == 2 else there[:, None, None])
        query, key = ~seen.any(3).mT, ~seen.reshape(b, k, n // k, t, s).any((2, 3)).mT
    return tuple(
        a[..., None] if lengths is None else a[..., None] | past(a, lengths)
        for a, lengths in ((query, x.query_lengths), (key, x.key_lengths))
    )


def draw(seed, *shape):
    return oracle.normal(seed, *shape).astype(jnp.bfloat16)


_known = {}


def by_reference(job, problem, arrays, static):
    """(In float32, in the dtype of the arrays): once for all kernels, broken ones among them, that are given the same."""
    leaves, tree = jax.tree.flatten(arrays)
    looks = ((a.shape, str(a.dtype), hash(np.asarray(a).tobytes())) for a in leaves)
    key = job.__name__, problem, tree, *static.items(), *looks
    if key not in _known:
        wide = lambda a: jnp.asarray(a, None if a.dtype in (np.int32, bool) else jnp.float32)
        results = (job(*jax.tree.map(convert, arrays), problem, **static) for convert in (wide, jnp.asarray))
        _known[key] = jax.tree.map(np.asarray, tuple(results))
    return _known[key]


def check(problem, x, tx, want=(True,) * 3, want_tangent=(True,) * 3, launcher=None):
    """Every job, on the same arrays: as near to the reference in float32 as the reference in the dtype of x is.  What the
    kernels see holds NaN past the lengths, and in rows that nobody sees."""
    launcher = launcher or gluon_on_numpy.Launcher()
    rows, keys = unseen(x)

    def torn(arrays):
        """q, k, v or the cotangent of o."""
        places = (rows, keys, keys)[: len(arrays)]
        pairs = zip(arrays, places, strict=True)
        return [a if a is None else np.where(nobody, np.nan, a).astype(a.dtype) for a, nobody in pairs]

    batch, length, heads, _ = x.query.shape
    cy, tcy = (
        (draw(20 + i, batch, length, heads, x.value.shape[3]), np.float32(oracle.normal(30 + i, batch, heads, length)))
        for i in range(2)
    )

    def near(got, job, *arrays, of=lambda results: results, **static):
        exact, naive = map(of, by_reference(job, problem, arrays, static))
        oracle.assert_close(got, exact, naive)
        return naive

    torn_x, torn_tx = x._replace(**dict(zip(QKV, torn(x[:3]), strict=True))), Operands(*torn(tx[:3]))
    torn_cy, torn_tcy = ((*torn(c[:1]), np.where(rows[..., 0].mT, np.float32(np.nan), c[1])) for c in (cy, tcy))
    y = near(jobs.forward(launcher, problem, torn_x)[:2], reference.forward, x)
    dual, ty = any(t is not None for t in tx), (None, None)
    if dual:
        o, lse, *ty = jobs.forward(launcher, problem, torn_x, torn_tx)
        _, ty = near(((o, lse), tuple(ty)), reference.forward_dual, x, tx)
        got = jobs.tangent(launcher, problem, torn_x, y[1], torn_tx)
        near(got, reference.forward_dual, x, tx, of=lambda results: results[1])
    want, want_tangent = (*want, False), (*want_tangent, False)
    if any(want):
        got = jobs.backward(launcher, problem, torn_x, y, torn_cy, want)
        near(got, reference.backward, x, y, cy, want=want)
    if dual:
        along = torn_tx, ty, torn_tcy
        got = jobs.backward_dual(launcher, problem, torn_x, y, torn_cy, along, want, want_tangent)
        near(got, reference.backward_dual, x, y, cy, (tx, ty, tcy), want=want, want_tangent=want_tangent)


def operands(shape, seed=0):
    b, t, s, n, k, d = shape
    shapes = (b, t, n, d), (b, s, k, d), (b, s, k, d)
    return (Operands(*(draw(10 * j + i + seed, *size) for i, size in enumerate(shapes))) for j in range(2))


def problem(d, causal):
    return Problem(scale=d**-0.5, is_causal=causal, implementation="hopper")


@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("shape", [(1, 70, 300, 2, 1, 64), (2, 200, 129, 1, 1, 128)], ids=["D64", "D128"])
def test_every_job(shape, causal, late):
    check(problem(shape[-1], causal), *operands(shape), launcher=gluon_on_numpy.Launcher(late=late))


@pytest.fixture
def as_if_long(monkeypatch):
    """Rings are those of the tables, with three warpgroups where they may have them, and loops with masks follow others."""
    for name in ("SHORT", "ONE_LOOP"):
        monkeypatch.setattr(config, name, 0)
    monkeypatch.setattr(config, "PAIR_UP_TO", {True: 0, False: 0})


@pytest.mark.usefixtures("as_if_long")
@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.thorough
def test_long_loops(causal, late):
    """Of 64 channels, whose last product waits for the next tile, but not in short loops."""
    launcher = gluon_on_numpy.Launcher(late=late)
    check(problem(64, causal), *operands((1, 70, 300, 2, 1, 64)), launcher=launcher)
    assert sum(features.deferred for _, features, _ in launcher.launched) == 3  # a query side, and both key sides


DEFERRED_MUTANTS = {
    "of-another-tile": ("_at, 2, options.SLOTS)", "_at, 1, options.SLOTS)"),
    "before-the-first-tile": (
        "gl.where(tile.t > tile.t_first, slot_before(tile.q_at, 2, options.SLOTS), tile.q_at.slot)",
        "slot_before(tile.q_at, 2, options.SLOTS)",
    ),
    "last-tile-lost": (
        "if t_first < t_end:\n                        sums",
        "if t_first < 0:\n                        sums",
    ),
    "operand-of-another-tile": ("ds = products.unpacked(b_ds, dtype, products.operand_layout(options.T))", "ds = ds"),
    "tangent-of-another-tile": ("tds = products.unpacked(b_tds, dtype, products.operand_layout(T))", "tds = tds"),
}


@pytest.mark.parametrize(("old", "new"), DEFERRED_MUTANTS.values(), ids=DEFERRED_MUTANTS)
@pytest.mark.thorough
def test_broken_deferred_products_fail(old, new):
    with pytest.raises(AssertionError):
        check(problem(128, False), *operands((1, 200, 90, 1, 1, 128)), launcher=gluon_on_numpy.Launcher(old, new))


@pytest.mark.parametrize(
    "shape",
    [
        (1, 150, 130, 2, 1, 72),
        (1, 70, 150, 1, 1, 88),
        (2, 90, 140, 1, 1, 40),
        (1, 70, 150, 2, 1, 24),
        (1, 70, 90, 1, 1, 8),
        (1, 70, 520, 2, 1, 72),
    ],
    ids=["D72", "D88", "D40", "D24", "D8", "D72-long"],
)
@pytest.mark.thorough
def test_channels_fewer_than_those_of_a_tile(shape):
    check(problem(shape[-1], True), *operands(shape))


PARTS_MUTANTS = {
    "columns-of-the-first-part": ("[i_b, i_h, row, column]", "[i_b, i_h, row, 0]"),
    "bytes-of-the-first-part": (
        "descs[0].block_type.nbytes + descs[1].block_type.nbytes",
        "descs[0].block_type.nbytes",
    ),
    "scores-of-the-first-part": ("for PART in gl.static_range(len(a)):", "for PART in gl.static_range(1):"),
}


@pytest.mark.parametrize(("old", "new"), PARTS_MUTANTS.values(), ids=PARTS_MUTANTS)
@pytest.mark.thorough
def test_broken_second_parts_fail(old, new):
    with pytest.raises(AssertionError):
        check(problem(72, False), *operands((1, 70, 90, 1, 1, 72)), launcher=gluon_on_numpy.Launcher(old, new))


WIDE_ROWS = {"D256": (1, 70, 150, 2, 1, 256), "D192": (2, 90, 140, 1, 1, 192), "D136": (1, 130, 70, 1, 1, 136)}
SPLIT_MUTANTS = {
    "columns-of-the-streamed-rows": ("return (tile[w],)", "return (tile[0],)"),
    "columns-of-the-output": ("w if options.SPLIT else 0  # part of the columns\n    r_l", "0\n    r_l"),
    "columns-of-the-gradients": ("w if options.SPLIT else 0  # part of the columns\n    ints", "0\n    ints"),
    "rows-of-the-next-block": ("barriers(RESIDENT, GROUPS // options.HEIGHT)", "barriers(RESIDENT, 1)"),
}


@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
@pytest.mark.parametrize("shape", WIDE_ROWS.values(), ids=WIDE_ROWS)
@pytest.mark.thorough
def test_columns_that_warpgroups_divide(shape, late):
    check(problem(shape[-1], True), *operands(shape), launcher=gluon_on_numpy.Launcher(late=late))


@pytest.mark.parametrize(("old", "new"), SPLIT_MUTANTS.values(), ids=SPLIT_MUTANTS)
@pytest.mark.thorough
def test_broken_division_of_columns_fails(old, new):
    launcher = gluon_on_numpy.Launcher(old, new, multiprocessors=1)
    with pytest.raises(AssertionError):
        check(problem(256, False), *operands((1, 140, 70, 1, 1, 256)), launcher=launcher)


def lengths(*numbers):
    return np.array(numbers, np.int32)


def documents(*lengths):
    return np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None].repeat(2, 0)


def patches(b, h, t, s, size=64):
    """A mask that leaves whole tiles, cut ones and empty ones, and rows that see nothing."""
    kinds = oracle.normal(40, b, h, -(-t // size), -(-s // size))
    wide = lambda a: a.repeat(size, 2).repeat(size, 3)[:, :, :t, :s]
    some = oracle.normal(41, b, h, t, s) > 0.5
    mask = np.where(wide(kinds > 0.7), True, wide(kinds > 0) & some)
    mask[:, :, 5:6] = False
    return mask


def intervals(b, h, t, s, several=2):
    """Ranges that see whole tiles, cut ones and none, past the ends too, and rows that see nothing."""
    rng = np.random.default_rng(42)
    ends = rng.integers(-20, s + 20, (b, h, -(-t // 40), several, 2)).astype(np.int32).repeat(40, 2)[:, :, :t]
    ends[:, :, ::7, 0] += [3, 5]
    ends[:, :, 5:6] = 9
    return ends


def blocks(b, h, t, s, queries, keys):
    return oracle.normal(43, b, h, -(-t // queries), -(-s // keys)) > 0


def packed(queries, *edges):
    """Sequences, of which the last leave tokens behind them, and not every one has queries or keys."""
    return dict(
        key_ranges=visibility.documents(queries, *map(np.array, edges), is_causal=True),
        query_lengths=lengths(*[edges[0][-1]] * 2), key_lengths=lengths(*[edges[1][-1]] * 2),
    )  # fmt: skip


SHARED = {
    "more-blocks": ((2, 250, 580, 4, 2, 64), 3, False),
    "fewer-blocks": ((1, 140, 700, 1, 1, 64), 8, False),
    "D128": ((1, 300, 290, 1, 1, 128), 5, False),
    "D72": ((1, 260, 300, 2, 1, 72), 5, False),
    "D256": ((1, 260, 300, 1, 1, 256), 2, False),
    "three-warpgroups": ((1, 900, 400, 1, 1, 64), 3, False),
    "two-and-three": ((1, 900, 200, 1, 1, 64), 7, False),
    "whole-tiles-late": ((1, 256, 384, 1, 1, 64), 5, True),
}


@pytest.fixture
def shared_always(monkeypatch):
    monkeypatch.setattr(config, "FRAGMENT", dict.fromkeys(config.FRAGMENT, -10000))
    monkeypatch.setattr(config, "PAIR_UP_TO", {True: 0, False: 0})


@pytest.mark.usefixtures("shared_always")
@pytest.mark.parametrize(("shape", "multiprocessors", "late"), SHARED.values(), ids=SHARED)
@pytest.mark.thorough
def test_blocks_that_programs_share(shape, multiprocessors, late):
    launcher = gluon_on_numpy.Launcher(multiprocessors=multiprocessors, late=late)
    check(problem(shape[-1], False), *operands(shape), launcher=launcher)
    kernels = {
        (name, features.shared)
        for name, features, _ in launcher.launched
        if name not in ("statistics", "key_means", "row_means")
    }
    assert kernels == {("forward", True), ("backward", True)}


@pytest.mark.usefixtures("shared_always")
@pytest.mark.thorough
def test_parts_that_see_nothing():
    """The scores of the first keys are −∞, so that those programs have no sum to divide by."""
    x, _ = operands((1, 128, 512, 1, 1, 64))
    x = x._replace(query=np.abs(x.query))
    x.key[:, :256] = -np.inf
    got = jobs.forward(gluon_on_numpy.Launcher(multiprocessors=3), problem(64, False), x)[0]
    x.key[:, :256], x.value[:, :256] = -1e3, 0  # as good as hidden
    alone = jobs.forward(gluon_on_numpy.Launcher(multiprocessors=3), problem(64, False), x)[0]
    assert np.isfinite(np.float32(got)).all()
    np.testing.assert_allclose(np.float32(got), np.float32(alone), rtol=1e-2, atol=1e-2)


@pytest.mark.thorough
def test_shared_blocks_have_the_bits_of_others(monkeypatch):
    """Where whole blocks come before a part, whose loop goes on from the one before."""
    x, tx = operands((1, 300, 330, 1, 1, 64))
    cotangents, every = (x.query[:, ::-1], None), (True, True, True, False)

    def run(part):
        monkeypatch.setattr(config, "FRAGMENT", dict.fromkeys(config.FRAGMENT, part))
        launcher = gluon_on_numpy.Launcher(multiprocessors=2)
        o, lse, t_o, mu = jobs.forward(launcher, problem(64, False), x, tx)
        along = tx, (t_o, mu), cotangents
        got = jobs.backward_dual(launcher, problem(64, False), x, (o, lse), cotangents, along, every, every)
        return {features.shared for _, features, _ in launcher.launched}, jax.tree.leaves(((o, lse, t_o, mu), got))

    (some, shared), (none, alone) = run(-10000), run(10000)
    assert True in some
    assert none == {False}
    for a, b in zip(shared, alone, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("broken", [False, True], ids=["", "broken"])
@pytest.mark.thorough
def test_programs_without_a_share_compute_whole_blocks(monkeypatch, broken):
    """Where parts are dear, few programs have any."""
    monkeypatch.setattr(config, "FRAGMENT", dict.fromkeys(config.FRAGMENT, 100))
    change = ("gl.minimum(first + ints.shared_tiles, (ints.n - ints.n_whole) * n_tiles)", "first + ints.shared_tiles")
    launcher = gluon_on_numpy.Launcher(*change if broken else (), multiprocessors=5)
    with pytest.raises((AssertionError, IndexError)) if broken else contextlib.nullcontext():
        check(problem(128, False), *operands((1, 768, 512, 1, 1, 128)), launcher=launcher)
        assert {"forward", "backward"} <= {name for name, features, _ in launcher.launched if features.shared}


@pytest.mark.usefixtures("shared_always")
@pytest.mark.parametrize("wrt", [(0,), (1,), (2,), (0, 2)], ids=str)
@pytest.mark.thorough
def test_blocks_that_programs_share_without_some_tangents(wrt):
    x, tx = operands((1, 140, 300, 1, 1, 64))
    tx = Operands(*(t if i in wrt else None for i, t in enumerate(tx[:3])))
    alone = tuple(i in wrt for i in range(3))
    check(problem(64, False), x, tx, alone, alone, gluon_on_numpy.Launcher(multiprocessors=5))


@pytest.mark.parametrize("change", [(), ("rounds * wave // waves", "rounds * wave")], ids=["", "broken"])
@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
@pytest.mark.thorough
def test_programs_in_waves(monkeypatch, shared, change):
    """Where rows are not whole sectors of memory, and two arrays are written."""
    monkeypatch.setattr(config, "ROUNDS", 2)
    monkeypatch.setattr(config, "FRAGMENT", dict.fromkeys(config.FRAGMENT, -10000 if shared else 100000))
    launcher = gluon_on_numpy.Launcher(*change, multiprocessors=3)
    with pytest.raises(AssertionError) if change else contextlib.nullcontext():
        check(problem(72, False), *operands((2, 250, 140, 4, 4, 72)), launcher=launcher)
        alone = Features(persistent=True, shared=shared)
        both = dataclasses.replace(alone, ahead=True, waves=True)
        launched = {(name, dataclasses.replace(f, makes_statistics=False), n) for name, f, n in launcher.launched}
        assert {(name, *launch) for name in ("forward", "backward") for launch in ((alone, 3), (both, 6))} <= launched


COUNTED = {
    "heads-left-over": (1, 250, 330, 9, 9, 64), "keys-nobody-sees": (1, 100, 400, 4, 4, 128),
    "queries-that-see-nothing": (1, 400, 100, 4, 4, 128),
}  # fmt: skip


@pytest.mark.parametrize("ahead", [1024, 0], ids=["ahead", ""])
@pytest.mark.parametrize("shape", COUNTED.values(), ids=COUNTED)
@pytest.mark.thorough
def test_programs_take_blocks_from_a_counter(monkeypatch, shape, ahead):
    monkeypatch.setattr(config, "AHEAD", ahead)
    launcher = gluon_on_numpy.Launcher(multiprocessors=3)
    causal = dataclasses.replace(problem(shape[-1], True), lower_right=shape[1] > shape[2])
    check(causal, *operands(shape), launcher=launcher)
    taking = {(name, features.ahead, n) for name, features, n in launcher.launched if features.dynamic}
    assert taking == {(name, ahead > 0, 3) for name in ("forward", "backward")}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("with_counter(COUNTER, ints.concurrent, BEGIN)", "with_counter(COUNTER, ints.concurrent + 1, BEGIN)"),
        ("ints.n + ints.concurrent - 1", "ints.n + ints.concurrent"),
        ("index(cursor.slot).store(number)", "index(cursor.slot).store(number - 1)"),
        ("return block, first + i_head", "return block, i_head"),
        ("if AFTER and options.FEATURES.dynamic:", "if False:"),
    ],
    ids=["begins-too-late", "does-not-end", "wrongly-sent", "first-heads-again", "resident-rows-not-loaded"],
)
@pytest.mark.thorough
def test_a_broken_counter_fails(monkeypatch, old, new):
    monkeypatch.setattr(config, "AHEAD", 0)
    shape = COUNTED["keys-nobody-sees" if "AFTER" in old else "heads-left-over"]
    with pytest.raises(AssertionError):
        check(problem(shape[-1], True), *operands(shape), launcher=gluon_on_numpy.Launcher(old, new, multiprocessors=3))


@pytest.mark.thorough
def test_division_by_multiplication():
    work = gluon_on_numpy.emulated()[f"{gluon_on_numpy.PACKAGE}.programs"]
    draw = np.random.default_rng(0)
    for n in (*range(1, 100), *draw.integers(100, work.DIVISIBLE, 1000)):
        multiples = draw.integers(0, work.DIVISIBLE // n, 100) * n
        i = gluon_on_numpy.block(np.clip([multiples - 1, multiples, multiples + n - 1], 0, work.DIVISIBLE - 1))
        number = gluon_on_numpy.block(work.reciprocal(int(n)))
        assert number < 2**31
        quotient, rest = work.divided(i, int(n), number)
        np.testing.assert_array_equal(quotient, i // n)
        np.testing.assert_array_equal(rest, i % n)


SHARED_MUTANTS = {
    "a-tile-lost": ("gl.minimum(first + ints.shared_tiles,", "gl.minimum(first + ints.shared_tiles - 1,"),
    "handed-over-to-another-warpgroup": ("(program * GROUPS + w)", "program * GROUPS"),
    "first-part-left-out": ("divided(block * n_tiles, ints", "divided((block + 1) * n_tiles, ints"),
    "parts-for-others-lost": ("(wave == 0) & (over > 0)", "wave < 0"),
    "waits-for-itself": ("since, in_wave(ints, FEATURES))", "since, in_wave(ints, FEATURES) + 1)"),
    "nothing-said": ("flags(fragment, sums, row_values, C, SAY)", "pass"),
    "weights-ignored": ("increased(products.scaled(sums[0], a_0), a_1, b_x)", "increased(sums[0], a_1, b_x)"),
    "weights-without-a-tangent-ignored": (
        "increased(products.scaled(sums[0], a_0), a_1, stored",
        "increased(sums[0], a_1, stored",
    ),
    "mean-ignored": ("products.increased(sums[1], -step, sums[0])", "sums[1]"),
    "mean-of-the-other-ignored": ("b_to = products.increased(b_to, a_1 * (between - step), b_x)", "pass"),
    "gradients-of-the-last-alone": ("(sums[I][PART] + b_x[PART],)", "(sums[I][PART],)"),
}
RESUMED_MUTANTS = {  # where a part is gone on with
    "twice": ("range(work.since + work.resumed", "range(work.since"),
    "from-zeros": ("sums = some\n", "pass\n"),
    "without-statistics": ("        row_values = stored_row_values(", "        _ = stored_row_values("),
    "of-another": ("fragment_at(EXCHANGE, work.since, w", "fragment_at(EXCHANGE, work.since + 1, w"),
}


@pytest.mark.usefixtures("shared_always")
@pytest.mark.parametrize(
    ("multiprocessors", "change"),
    [*((5, change) for change in SHARED_MUTANTS.values()), *((2, change) for change in RESUMED_MUTANTS.values())],
    ids=[*SHARED_MUTANTS, *RESUMED_MUTANTS],
)
@pytest.mark.thorough
def test_broken_sharing_fails(multiprocessors, change):
    with pytest.raises(AssertionError):
        check(
            problem(64, False),
            *operands((1, 300, 330, 1, 1, 64)),
            launcher=gluon_on_numpy.Launcher(*change, multiprocessors=multiprocessors),
        )


FEATURES = {
    "window": dict(window=(100, 30)),
    "window-left": dict(window=(20, None)),
    "window-ahead": dict(window=(-20, 90)),
    "lower-right": dict(is_causal=True, lower_right=True),
    "key-lengths": dict(key_lengths=lengths(200, 0)),
    "query-lengths": dict(query_lengths=lengths(150, 70)),
    "lengths-causal": dict(is_causal=True, query_lengths=lengths(150, 0), key_lengths=lengths(130, 40)),
    "all": dict(
        window=(64, 10), is_causal=True, lower_right=True, query_lengths=lengths(190, 33), key_lengths=lengths(100, 250)
    ),
}


SHAPE, WIDE = (2, 200, 300, 1, 1, 64), (2, 300, 140, 1, 1, 128)
LISTED = {  # tiles in which something is seen
    "segments": dict(query_segments=documents(90, 110), key_segments=documents(100, 130, 70)),
    "segments-causal": dict(
        is_causal=True, query_segments=documents(90, 210), key_segments=documents(100, 40), shape=WIDE
    ),
    "mask": dict(mask=patches(2, 1, 200, 300)),
    "mask-by-head": dict(mask=patches(1, 4, 150, 144), shape=(2, 150, 144, 4, 2, 64)),
    "mask-by-key": dict(mask=patches(2, 2, 1, 300), shape=(2, 70, 300, 4, 2, 64)),
    "mask-wide": dict(mask=patches(2, 1, 100, 140), shape=(2, 100, 140, 2, 1, 256)),
    "ranges": dict(key_ranges=intervals(2, 1, 200, 300, 1)),
    "ranges-by-head": dict(key_ranges=intervals(1, 4, 150, 144), shape=(2, 150, 144, 4, 2, 64)),
    "ranges-wide": dict(key_ranges=intervals(1, 1, 300, 140), is_causal=True, shape=WIDE),
    "ranges-mask": dict(
        key_ranges=intervals(2, 1, 150, 140),
        mask=patches(1, 2, 150, 140),
        shape=(2, 150, 140, 2, 2, 64),
        query_lengths=lengths(140, 150),
        key_lengths=lengths(140, 90),
    ),
    "blocks": dict(mask=blocks(2, 1, 200, 300, 32, 48), mask_block=(32, 48)),
    "blocks-ranges": dict(
        mask=blocks(1, 2, 150, 144, 64, 128),
        mask_block=(64, 128),
        key_ranges=intervals(2, 1, 150, 144, 1),
        is_causal=True,
        shape=(2, 150, 144, 4, 2, 128),
    ),
    "packed": packed(200, [0, 60, 60, 100, 150], [0, 90, 130, 130, 250]),
    "packed-from-the-middle": dict(
        key_ranges=visibility.documents(200, np.array([20, 80, 80, 130, 190]), np.array([70, 90, 160, 160, 280]))
    ),
    "mask-lengths": dict(mask=patches(1, 1, 200, 300), query_lengths=lengths(150, 200), key_lengths=lengths(260, 40)),
}
SLOW = {"window-left", "window-ahead", "lower-right", "key-lengths", "query-lengths"}


@pytest.mark.parametrize("late", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "late"])
@pytest.mark.parametrize(
    ("feature", "shape"),
    [
        pytest.param(feature, shape, id=f"{feature}-T{shape[1]}-D{shape[-1]}", marks=[pytest.mark.slow] * slow)
        for feature, shape, slow in (
            *((feature, SHAPE, feature in SLOW) for feature in FEATURES),
            *((feature, WIDE, feature != "all") for feature in FEATURES),
            ("all", (2, 400, 300, 1, 1, 64), True),  # three warpgroups
            ("all", (2, 200, 300, 1, 1, 72), False),  # two parts of columns
            ("all", (2, 150, 200, 1, 1, 192), False),  # which warpgroups divide
            *((feature, case.get("shape", SHAPE), False) for feature, case in LISTED.items()),
        )
    ],
)
@pytest.mark.thorough
def test_features(request, feature, shape, late):
    if shape == WIDE or shape[1] == 400:
        request.getfixturevalue("as_if_long")
    given = {name: value for name, value in (FEATURES | LISTED)[feature].items() if name != "shape"}
    x, tx = operands(shape)
    arrays = {name: given.pop(name) for name in x._fields if name in given}
    case = Problem(scale=shape[-1] ** -0.5, implementation="hopper", **given)
    launcher = gluon_on_numpy.Launcher(late=late, multiprocessors=1 if shape[1] == 400 else 2)
    check(case, x._replace(**arrays), tx, launcher=launcher)


UNSEEN_MUTANTS = {
    "all": ("piece.store(gl.where(gl.expand_dims(b_bit != 0, 1), piece.load(LAYOUT), zeros))", "pass"),
    "resident": ("if others.end > others.first:", "if False:"),
    "streamed": ("if MASKED == 2:\n        others", "if False:\n        others"),
    "cotangents": ("if options.FEATURES.ranges.present:  # of a row", "if False:  # of a row"),
}


@pytest.mark.parametrize(("old", "new"), UNSEEN_MUTANTS.values(), ids=UNSEEN_MUTANTS)
@pytest.mark.thorough
def test_rows_left_as_they_are_fail(old, new):
    """What they hold, NaN, reaches others."""
    x, tx = operands((1, 200, 300, 1, 1, 64))
    x = x._replace(**LISTED["packed-from-the-middle"])
    with pytest.raises(AssertionError):
        check(problem(64, False), x, tx, launcher=gluon_on_numpy.Launcher(old, new))


NO_TANGENT = Operands(None, None, None)
ALONE = {  # of the forward, or of one gradient
    "nine-heads-causal": dict(shape=(1, 150, 130, 9, 9, 64), is_causal=True),
    "rows-that-see-nothing": dict(shape=(1, 300, 140, 1, 1, 64), is_causal=True, lower_right=True),
    "blocks-that-see-nothing": dict(shape=(1, 400, 140, 1, 1, 64), window=(20, None), multiprocessors=1),
    "mask-of-three-heads-a-key": dict(shape=(2, 70, 150, 6, 2, 64), mask=patches(2, 2, 70, 150)),
    "mask-of-one-batch": dict(shape=(1, 70, 150, 4, 2, 64), mask=patches(1, 2, 70, 150)),
    "keys-beyond": dict(shape=(2, 70, 140, 1, 1, 64), key_lengths=lengths(1000, 40)),
    "queries-beyond": dict(shape=(2, 70, 140, 1, 1, 64), query_lengths=lengths(1000, 40), want=(False, True, True)),
    "padding-in-whole-tiles": dict(
        shape=(2, 128, 128, 1, 1, 128), query_lengths=lengths(100, 128), want=(False, True, False)
    ),
}


@pytest.mark.parametrize("case", ALONE)
@pytest.mark.thorough
def test_one_job(case):
    given = dict(ALONE[case])
    shape, want = given.pop("shape"), given.pop("want", (False,) * 3)
    launcher = gluon_on_numpy.Launcher(multiprocessors=given.pop("multiprocessors", 2))
    x, _ = operands(shape)
    x = x._replace(**{name: given.pop(name) for name in x._fields if name in given})
    check(Problem(scale=shape[-1] ** -0.5, implementation="hopper", **given), x, NO_TANGENT, want, launcher=launcher)


REACHES = [
    (None, 0),
    (None, 1),
    (None, 62),
    (None, 126),
    (1, None),
    (62, None),
    (126, None),
    (1, 1),
    (90, -70),
    (-70, 200),
]


@pytest.mark.parametrize("one_loop", [False, True], ids=["", "one-loop"])
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("side", ["queries", "keys"])
@pytest.mark.thorough
def test_tiles_that_a_block_visits(side, padded, one_loop):
    """Those in which something is seen; without a mask those that are seen whole, by rows past the array's end too."""
    module = lambda name: gluon_on_numpy.emulated()[f"{gluon_on_numpy.PACKAGE}.{name}"]
    visibility, number, pointer = module("visibility"), gluon_on_numpy.block, gluon_on_numpy.Pointer
    blocks, by_query, ROWS = module("blocks"), side != "keys", 128
    for (left, right), (LQ, LK), T in itertools.product(REACHES, [(300, 300), (200, 320), (384, 256)], (32, 64, 128)):
        ends = (LQ - 70, LK - 90) if padded else (LQ, LK)
        features = Features(
            left=left is not None, right=right is not None, query_lengths=padded, key_lengths=padded, one_loop=one_loop
        )
        (resident, length), (streamed, stop) = (
            zip((LQ, LK), ends, strict=True) if by_query else zip((LK, LQ), ends[::-1], strict=True)
        )
        n = -(-resident // ROWS)
        reciprocals = map(module("programs").reciprocal, (n, 1, 1, 1, 8, 1))
        call = module("programs").Integers(
            *map(number, (n, 1, 1, LQ, LK, left or 0, right or 0, n, 0, n, *reciprocals))
        )
        names = visibility.Selection._fields
        arrays = dict.fromkeys(names, 0) | dict(zip(("Q_LENGTHS", "K_LENGTHS"), ends, strict=True))
        selection = visibility.Selection(*(pointer(np.array([arrays[name]], np.int32)) for name in names))
        options = types.SimpleNamespace(T=T, HEIGHT=2, ROW=by_query, HAS_MASKED=True, FEATURES=features)
        for b in range(n):
            block = blocks.block_of(number(b), call, selection, options)
            row = int(block.i_block) * ROWS
            visits = blocks.visits_of_head(number(0), block, call, selection, options)
            ranges = (range(*map(int, visibility.range_of(visits, masked))) for masked in (False, True))
            whole, masked = (
                [int(visibility.tile_at(number(t), visits, m, options.FEATURES)) for t in r]
                for m, r in enumerate(ranges)
            )
            i, j = row + np.arange(ROWS)[:, None], np.arange(-(-streamed // T) * T)
            i, j = (i, j) if by_query else (j, i)
            seen = (j >= i - (9**9 if left is None else left)) & (j <= i + (9**9 if right is None else right))
            zeros = not by_query and not padded  # stand for queries past the end
            inside = np.arange(seen.shape[1]) < (seen.shape[1] if zeros else stop)
            tiles = np.split(seen & inside, seen.shape[1] // T, 1)
            alive = row < length or not padded
            case = (left, right, LQ, LK, T, row, whole, masked)
            some = [t for t, a in enumerate(tiles) if a.any() and alive]
            more = {*whole, *masked} - {*some}
            assert more <= {stop // T}, case  # the tile that the end cuts
            assert sorted(whole + masked) == sorted([*some, *more]), case
            assert whole == [t for t, a in enumerate(tiles) if a.all() and alive and not one_loop], case


LISTED_MUTANTS = {
    "another-tile": ("visits.plain_end + t if MASKED else t)", "t)"),
    "whole-tiles-left-out": ("plain = 0 if FEATURES.one_loop else", "plain ="),
    "mask-ignored": ("b_bits & (1 <<", "b_bits | (1 <<"),
    "word-of-another-thread": ("* 4 + o_w)", "* 4 + 3 - o_w)"),
    "bits-of-another-tile": (">> column % 128 // 4", ">> 0"),
    "words-of-another-tile": ("column // 128 * 4", "0"),
    "first-head-for-all": ("head_slice(selection.MASK, i_b, i_h,", "head_slice(selection.MASK, i_b, i_h * 0,"),
}


@pytest.mark.parametrize(("old", "new"), LISTED_MUTANTS.values(), ids=LISTED_MUTANTS)
@pytest.mark.thorough
def test_broken_lists_fail(old, new):
    x, tx = operands((2, 200, 300, 4, 2, 64))
    mask = patches(2, 2, 200, 300, size=128)
    mask[0, 0, :, 205] = False  # so that the words of a row differ
    x = x._replace(mask=mask)
    with pytest.raises(AssertionError):
        check(problem(64, False), x, tx, launcher=gluon_on_numpy.Launcher(old, new))


@pytest.mark.parametrize("wrt", [s for n in (1, 2) for s in itertools.combinations(range(3), n)], ids=str)
@pytest.mark.thorough
def test_tangents_may_be_absent(wrt):
    x, tx = operands((1, 80, 150, 1, 1, 64))
    check(problem(64, False), x, Operands(*(t if i in wrt else None for i, t in enumerate(tx[:3]))))


@pytest.mark.parametrize("wrt", range(3))
def test_one_operand_moves(wrt):
    """Whose gradient's tangent is all that is wanted, as by the gradient through a JVP."""
    x, tx = operands((1, 80, 150, 1, 1, 64))
    alone = tuple(i == wrt for i in range(3))
    moving = Operands(*(t if a else None for a, t in zip(alone, tx[:3], strict=True)))
    check(problem(64, False), x, moving, (False,) * 3, alone)


@pytest.mark.parametrize("wrt", range(3))
@pytest.mark.thorough
def test_a_gradient_alone(wrt):
    x, tx = operands((1, 80, 150, 1, 1, 64))
    alone = tuple(i == wrt for i in range(3))
    check(problem(64, True), x, tx, alone, alone)
    check(problem(64, True), x, tx, (False,) * 3, alone)


MUTANTS = {  # and whether it takes late copies to notice
    "values-given-back-early": (
        "b_o, p = settled(b_o, p)\n                ring.give_back(empty, v_at)",
        "ring.give_back(empty, v_at)\n                b_o, p = settled(b_o, p)",
        False,
    ),
    "keys-not-given-back": ("ring.give_back(empty, k_at)", "pass", False),
    "scores-not-waited-for": ("b_s = warpgroup_mma_wait(N_TS, deps=[b_s])", "pass", False),
    "values-not-waited-for": ("wait(full, v_at)", "pass", True),
    "resident-not-waited-for": ("mbarrier.wait(memory.resident_full.index(resident), resident_at.phase)", "pass", True),
    "resident-overwritten": ("mbarrier.wait(memory.resident_empty.index(i), resident_at.phase)", "pass", False),
    "queries-overwritten": ("mbarrier.wait(memory.q_empty.index(i), q_at.phase)", "pass", False),
    "queries-given-back-early": ("pred=tick == last_tick", "pred=tick != last_tick", False),
    "out-of-turn": (
        "mbarrier.arrive(turn.index((w + 1) % options.GROUPS), count=1)",
        "mbarrier.arrive(turn.index(w), count=1)",
        False,
    ),
    "out-of-turn-with-a-tangent": (
        "next_turn = turn.index((w + 1) % options.GROUPS)",
        "next_turn = turn.index(w)",
        False,
    ),
    "turn-kept-to-the-end": ("mbarrier.arrive(next_turn, count=1, pred=tick > first_tick)", "pass", False),
    "turn-handed-on-before-any": (
        "mbarrier.arrive(next_turn, count=1, pred=later)",
        "mbarrier.arrive(next_turn, count=1)",
        False,
    ),
    "late-product-of-what-is-not-there": (
        "registers of the softmax\n        wait(memory.full, tile.do_at)",
        "registers of the softmax\n",
        True,
    ),
    "outputs-not-waited-for": ("wait(memory.full, ring_at)", "pass", True),
    "outputs-of-other-rows": ("row + I // KINDS * GROUP_ROWS", "row", False),
    "outputs-of-another-warpgroup": ("I // KINDS == i_w", "I // KINDS == 0", False),
    "tangent-of-outputs-ignored": ("t_delta += ring.inner(v_like, o, LAYOUT)", "pass", False),
    "statistics-not-waited-for": ("wait(memory.s_full, tile.s_at)", "pass", True),
    "statistics-overwritten": ("wait(memory.s_empty, s_at)", "pass", True),
    "mu-dropped": ("b_to = products.increased(b_to, back, b_o)", "pass", False),
    "mu-dropped-backward": (
        "b_ts -= steps.statistic(row_stats.mu, steps.MU, tile, memory, options) * row_stats.per_scale",
        "pass",
        False,
    ),
    "ragged-end": ("query_end, key_end - 1, -1", "query_end, key_end + 99, -1", False),
}


@pytest.fixture(params=[False, True], ids=["", "ahead"])
def several_blocks(request, monkeypatch):
    """Checks several blocks; and where the next one's resident rows are loaded ahead, short ones too, as the ring, if it is full,
    holds that up."""
    monkeypatch.setattr(config, "AHEAD", 1024 if request.param else 0)

    def check_them(launcher):
        for shape in [(1, 400, 700, 1, 1, 64), (4, 100, 100, 1, 1, 64)][: 1 + request.param]:
            check(problem(64, False), *operands(shape), launcher=launcher)

    return check_them


@pytest.mark.parametrize(("old", "new", "late"), MUTANTS.values(), ids=MUTANTS)
@pytest.mark.thorough
def test_broken_kernels_fail(several_blocks, old, new, late):
    launcher = gluon_on_numpy.Launcher(old, new, late=late, multiprocessors=1)
    with pytest.raises(AssertionError):
        several_blocks(launcher)


@pytest.mark.thorough
@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
def test_whole_kernels_pass(several_blocks, late):
    several_blocks(gluon_on_numpy.Launcher(late=late, multiprocessors=1))


def growing(dtype):
    x, tx = operands((1, 100, 600, 1, 1, 64))
    query, key = oracle.with_growing_scores(np.float32(x.query), np.float32(x.key))
    x = x._replace(query=query, key=key)
    return (Operands(*(None if a is None else np.asarray(a).astype(dtype) for a in y)) for y in (x, tx))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16], ids=["bfloat16", "float16"])
@pytest.mark.thorough
def test_growing_scores(dtype):
    check(problem(64, False), *growing(dtype))


@pytest.mark.parametrize("wait", [False, True], ids=["", "broken"])
@pytest.mark.thorough
def test_float16_has_no_room_above_its_tangents(wait):
    """Where maxima wait, P grows up to 2⁸ before sums are rescaled, and P∘Ṡ beyond 65,504."""
    x, tx = operands((1, 64, 512, 1, 1, 64))
    key = 0.1 * np.float32(x.key) + 5 / 8 * (np.arange(512) >= 128)[:, None, None]
    x, tx = x._replace(query=np.ones_like(x.query), key=key), tx._replace(query=None, key=600 * np.float32(tx.key))
    x, tx = (Operands(*(None if a is None else np.asarray(a).astype(np.float16) for a in y)) for y in (x, tx))
    change = ("8 if memory.q[0].dtype == gl.bfloat16 else 0", "8") if wait else ()
    _, _, t_o, _ = jobs.forward(gluon_on_numpy.Launcher(*change), problem(64, False), x, tx)
    assert np.isfinite(np.float32(t_o)).all() != wait


@pytest.mark.parametrize("sums", ["b_o", "b_to"])
@pytest.mark.thorough
def test_growing_scores_not_rescaled_fail(sums):
    with pytest.raises(AssertionError):
        check(problem(64, False), *growing(jnp.bfloat16),
              launcher=gluon_on_numpy.Launcher(f"{sums} = products.rescaled({sums}, alpha)", "pass"))  # fmt: skip


# ------------------------------------------------------------------------------------------------ the backward in one pass


@pytest.fixture
def in_one_pass(monkeypatch):
    take_one_pass(monkeypatch)


@pytest.fixture
def in_order(monkeypatch):
    take_one_pass(monkeypatch, in_order=True)


ONE_PASS = {
    "D64": dict(shape=(1, 200, 300, 2, 1, 64)),
    "D128-causal": dict(shape=(2, 130, 200, 2, 1, 128), is_causal=True),
    "D72-causal": dict(shape=(1, 200, 150, 2, 1, 72), is_causal=True),
    "D96-lengths": dict(shape=(2, 130, 200, 2, 1, 96), key_lengths=lengths(200, 60)),
    "D40-lengths": dict(shape=(2, 130, 200, 2, 1, 40), key_lengths=lengths(200, 60)),
    "keys-nobody-sees": dict(shape=(1, 70, 400, 1, 1, 64), is_causal=True),
    "queries-that-see-nothing": dict(shape=(1, 300, 140, 1, 1, 64), is_causal=True, lower_right=True),
    "all": dict(shape=SHAPE, **FEATURES["all"]),
    "segments": dict(shape=SHAPE, **LISTED["segments"]),
    "mask": dict(shape=(2, 70, 150, 6, 2, 64), mask=patches(2, 2, 70, 150)),
    **{
        name: dict(dict(shape=SHAPE) | LISTED[name])
        for name in ("ranges", "packed", "packed-from-the-middle", "blocks", "blocks-ranges")
    },
}


OTHER_RINGS = {
    "turns": dict(turns=True), "undeferred": dict(deferred=False), "late": dict(late_dp=True), "lag-2": dict(lag=2, kept=4),
    "three": dict(groups=3, deferred=False, late_dp=True, slots=2, held=False, time=1),
}  # fmt: skip


def one_ring(name):
    return (config.ONE_PASS[64][0]._replace(**OTHER_RINGS[name]),)


def check_one_pass(case, launcher, kernel="one_pass"):
    given = dict(case)
    shape = given.pop("shape")
    x, tx = operands(shape)
    x = x._replace(**{name: given.pop(name) for name in x._fields if name in given})
    case = Problem(scale=shape[-1] ** -0.5, implementation="hopper", **given)
    check(case, x, tx if kernel == "one_pass_dual" else NO_TANGENT, launcher=launcher)
    assert kernel in {name for name, *_ in launcher.launched}


@pytest.mark.usefixtures("in_one_pass")
@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
@pytest.mark.parametrize("case", [pytest.param(n, marks=[pytest.mark.thorough] * (n != "D64")) for n in ONE_PASS])
def test_one_pass(case, late):
    check_one_pass(ONE_PASS[case], gluon_on_numpy.Launcher(late=late))


@pytest.mark.usefixtures("in_one_pass")
@pytest.mark.parametrize("ring", OTHER_RINGS)
@pytest.mark.thorough
def test_one_pass_in_other_ways(monkeypatch, ring):
    monkeypatch.setitem(config.ONE_PASS, 64, one_ring(ring))
    check_one_pass(ONE_PASS["D64"], gluon_on_numpy.Launcher())


ONE_PASS_MUTANTS = {  # and whether it takes late copies to notice
    "zeros-missed": (
        "gl.arange(0, 1024, layout=layout), zeros)",
        "gl.arange(0, 1024, layout=layout), zeros + 1.0)",
        False,
    ),
    "added-before-it-is-there": ("wait(memory.dq_full, slot_of(i, 1))", "pass", False),
    "not-waited-for": ("tma.store_wait(0)  # until it is read", "pass", False),
    "given-to-the-wrong-warpgroup": ("memory.dq_empty.index(i % options.GROUPS)", "memory.dq_empty.index(0)", False),
    "of-another-tile": ("[of_tile * desc.block_type.shape[0], 0]", "[0, 0]", False),
    "dS-not-waited-for": ("wait(memory.ds_full, use)", "pass", False),
    "last-tiles-lost": ("for more in range(options.LAG):", "for more in range(0):", False),
    "keys-of-one-warpgroup": (
        "matrix(memory.k, unfolded(w, i))[PART], b_dq",
        "matrix(memory.k, 0)[PART], b_dq",
        False,
    ),
    "queries-not-waited-for": ("    wait(memory.q_full, use)\n    if options.TURNS", "    if options.TURNS", True),
    "queries-given-back-early": (
        "mbarrier.arrive(memory.q_empty.index(slot), count=1, pred=i > 0)\n    else",
        "give_back(memory.q_empty, use)\n    else",
        False,
    ),
    "product-of-another-tile": ("options.SLOTS - 1, options.SLOTS)", "options.SLOTS, options.SLOTS)", False),
    "values-not-waited-for": ("mbarrier.wait(memory.v_full.index(0), 0)", "pass", True),
    "keys-of-another-warpgroup-held": ("for part in matrix(buffers, w)]", "for part in matrix(buffers, 0)]", False),
    "keys-held-for-values": ("step_one_pass.held_rows(memory.v", "step_one_pass.held_rows(memory.k", False),
}


@pytest.mark.usefixtures("in_one_pass")
@pytest.mark.parametrize(("old", "new", "late"), ONE_PASS_MUTANTS.values(), ids=ONE_PASS_MUTANTS)
@pytest.mark.thorough
def test_one_pass_broken_fails(old, new, late):
    with pytest.raises(AssertionError):
        check_one_pass(ONE_PASS["D64"], gluon_on_numpy.Launcher(old, new, late=late))


@pytest.mark.usefixtures("in_one_pass")
@pytest.mark.parametrize(
    ("case", "old", "new"),
    [
        ("D96-lengths", "ring.clean(matrix(buffers[I], w), 0, n)", "pass"),
        (
            "D40-lengths",
            "ring.clean(matrix(buffers[I], w), 0, n)",
            "if I == 1: ring.clean(matrix(buffers[I], w), 0, n)",
        ),
        ("lag-2", "mbarrier.wait(memory.dq_empty.index(w), odd)", "pass"),
        ("D64", "wait_empty(memory.ds_empty, kept)", "pass"),
        ("turns", "mbarrier.arrive(memory.turn.index((w + 1) % options.GROUPS), count=1)", "pass"),
        ("undeferred", "give_back(memory.q_empty, use)", "pass"),
        ("three", "ds = memory.ds.index(options.GROUPS * slot + w)", "ds = memory.ds.index(2 * slot + w)"),
    ],
)
@pytest.mark.thorough
def test_one_pass_broken_elsewhere_fails(monkeypatch, case, old, new):
    if case in OTHER_RINGS:
        monkeypatch.setitem(config.ONE_PASS, 64, one_ring(case))
    with pytest.raises(AssertionError):
        check_one_pass(ONE_PASS.get(case, ONE_PASS["D64"]), gluon_on_numpy.Launcher(old, new))


@pytest.mark.parametrize("is_causal", [False, True])
def test_programs_of_a_ring_end_while_others_wait(is_causal):
    """One for each block, so that what sends the next shard need not wait until all of them have ended."""
    o = jax.ShapeDtypeStruct((1, 2048, 24, 64), jnp.bfloat16)
    for partial in (False, True):
        recorder = Recorder(90)
        jobs.forward(
            recorder, Problem(0.1, implementation="hopper", partial=partial, is_causal=is_causal), Operands(o, o, o)
        )
        ((*_, constants, _),) = recorder.launches
        features = constants["FEATURES"]
        assert (features.persistent or features.dynamic or features.shared) == (not partial)


ALL, NO = (True,) * 4, (False,) * 4
GRADIENTS = (True, True, True, False)
IN_ORDER = {
    "all-keys": dict(shape=(2, 130, 500, 2, 1, 64)),
    "causal": dict(shape=(1, 500, 500, 2, 1, 128), is_causal=True),
    "window": dict(shape=(1, 500, 700, 1, 1, 128), window=(150, 70)),
    "left": dict(shape=(1, 700, 500, 1, 1, 128), window=(200, None)),
    "window-lengths": dict(shape=(2, 400, 500, 2, 1, 64), window=(90, 200), key_lengths=lengths(410, 60)),
    "queries-that-see-nothing": dict(shape=(1, 500, 270, 1, 1, 128), is_causal=True, lower_right=True),
    "window-ahead": dict(shape=(1, 500, 700, 1, 1, 128), window=(-20, 290)),
}


def check_order(case, *change, late=False, kernel="one_pass"):
    """Programs that run together, the last ones first, add in the order of their blocks."""
    launcher, given = gluon_on_numpy.Launcher(*change, late=late, together=kernel), dict(IN_ORDER[case])
    if kernel == "one_pass_dual":
        given["shape"] = *given["shape"][:-1], 64
    check_one_pass(given, launcher, kernel)
    assert max(map(len, launcher.added.values())) > 1
    for programs in launcher.added.values():
        assert programs == sorted(programs), "out of order"


@pytest.mark.usefixtures("in_order")
@pytest.mark.parametrize("kernel", ["one_pass", "one_pass_dual"])
@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
@pytest.mark.parametrize("case", [pytest.param(n, marks=[pytest.mark.thorough] * (n != "window")) for n in IN_ORDER])
def test_one_pass_in_order(case, late, kernel):
    check_order(case, late=late, kernel=kernel)


@pytest.mark.usefixtures("in_one_pass")
@pytest.mark.thorough
def test_one_pass_in_no_order():
    with pytest.raises(AssertionError, match="out of order"):
        check_order("all-keys")


@pytest.mark.usefixtures("in_order")
@pytest.mark.parametrize("kernel", ["one_pass", "one_pass_dual"])
@pytest.mark.parametrize(
    ("case", "old", "new"),
    [
        ("all-keys", "await_count(COUNTS + of_tile, blocks_before(j, block, ints, options), seen)", "pass"),
        ("all-keys", "cp.async.bulk.wait_group 0;", ""),
        ("all-keys", "with_counter(COUNTS + of_tile, 0, ADDED)", "pass"),
        ("all-keys", ("gl.store(COUNTS + i, 0)", "gl.store(COUNTS + 2 * i + 1, 0)"), "pass"),
        ("all-keys", "        seen = gl.full(", "        seen = seen if i_g else gl.full("),
        ("window", "return block.i_block - first", "return block.i_block"),
        ("left", "j * options.T - ints.left, 0)", "j * options.T - ints.left, 0) + options.T"),
    ],
    ids=["in-no-order", "counted-early", "not-counted", "no-zeros", "count-of-another-head", "too-many", "too-few"],
)
@pytest.mark.thorough
def test_one_pass_out_of_order_fails(case, old, new, kernel):
    old = old if isinstance(old, str) else old[kernel == "one_pass_dual"]
    with pytest.raises(AssertionError):
        check_order(case, old, new, kernel=kernel)


def with_documents(x):
    ids = jax.ShapeDtypeStruct(x.query.shape[:2], jnp.int32)
    return x._replace(query_segments=ids, key_segments=ids)


def orders(recorder, kernel):
    """Of each launch of the kernel, whether it adds in order."""
    return [constants["ORDERED"] for k, _, constants, _ in recorder.launches if k.__name__ == kernel]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("change", "sums"),
    [
        (dict(), "in order"),
        (dict(length=1024), "in any order"),  # six rounds to 0.97, of few tiles each
        (dict(length=1024, heads=70), None),  # five to 0.85: enough from 2048 on alone
        (dict(heads=9), None),  # three quarters of a round of 192 keys, more than half of two of 128
        (dict(heads=32, length=4096), "in order"),  # eight rounds to 0.97
        (dict(heads=16, length=4096, head_dim=80), "in any order"),  # four rounds to 0.97
        (dict(heads=14, length=4096, head_dim=80), None),  # to 0.85: enough for 64 channels alone
        (dict(heads=8), "in any order"),  # in one round order would cost too much
        (dict(is_causal=True), "in any order"),
        (dict(is_causal=True, length=4096), "in order"),
        (dict(is_causal=True, length=4096, head_dim=128), "in any order"),
        (dict(documents=True), "in any order"),
        (dict(want=(False, True, True, False)), None),
    ],
    ids=str,
)
def test_when_the_backward_takes_one_pass(change, sums, deterministic):
    """In long sequences that fill the GPU, where all gradients are wanted; in order where that takes hardly longer, and, if bits
    are to be the same on every run, only then."""
    given = dict(length=2048, heads=96, head_dim=64, documents=False, want=GRADIENTS) | change
    length, heads, head_dim, documents, want = (
        given.pop(n) for n in ("length", "heads", "head_dim", "documents", "want")
    )
    recorder = Recorder(90)
    recorder.multiprocessors = 132
    o = jax.ShapeDtypeStruct((1, length, heads, head_dim), jnp.bfloat16)
    x, statistic = Operands(o, o, o), jax.ShapeDtypeStruct((1, heads, length), jnp.float32)
    if documents:
        x = with_documents(x)
    case = Problem(scale=0.1, implementation="hopper", deterministic=deterministic, **given)
    jobs.backward(recorder, case, x, (o, statistic), (o, None), want)
    ordered = orders(recorder, "one_pass")
    if sums is None or (deterministic and sums == "in any order"):
        assert ordered == []
    else:
        assert ordered == [sums == "in order"]


@pytest.mark.parametrize(
    ("length", "heads", "how", "groups"),
    [
        (1024, 16, {}, 2),  # one round of either
        (1536, 16, {}, 3),  # two of 128 keys, one of 192
        (2048, 16, {}, 2),  # two of either
        (3072, 16, {}, 3),  # three and two
        (8192, 16, {}, 2),  # eight and six
        (1536, 16, dict(is_causal=True), 2),  # as long as the longest block takes
        (3072, 16, dict(is_causal=True), 3),
        (3072, 16, dict(documents=True), 2),  # lists of blocks of 192 keys there are none
    ],
)
def test_which_blocks_one_pass_has(length, heads, how, groups):
    """Those that leave fewer multiprocessors idle."""
    recorder = Recorder(90)
    recorder.multiprocessors = 132
    o = jax.ShapeDtypeStruct((1, length, heads, 64), jnp.bfloat16)
    x = with_documents(Operands(o, o, o)) if "documents" in how else Operands(o, o, o)
    case = Problem(scale=0.1, implementation="hopper", is_causal="is_causal" in how)
    assert HopperCall(recorder, case, x, one_pass.one_pass).sweep(by_key=True).ring_of_one_pass(False).groups == groups


# ------------------------------------------------------------------------------------------------ the dual backward in one pass


ONE_PASS_DUAL = {
    "D64": dict(shape=(1, 100, 150, 2, 1, 64)),
    "D40-causal": dict(shape=(2, 130, 200, 2, 1, 40), is_causal=True),
    "keys-nobody-sees": dict(shape=(1, 70, 400, 1, 1, 64), is_causal=True),
    "queries-that-see-nothing": dict(shape=(1, 300, 140, 1, 1, 64), is_causal=True, lower_right=True),
    "window": dict(shape=(1, 330, 300, 2, 2, 64), window=(100, 30)),
    "key-lengths": dict(shape=(2, 200, 300, 2, 1, 64), key_lengths=lengths(200, 0)),
    "all": dict(shape=SHAPE, **FEATURES["all"]),
    "segments": dict(shape=SHAPE, **LISTED["segments"]),
    "mask": dict(shape=(2, 70, 150, 6, 2, 64), mask=patches(2, 2, 70, 150)),
    **{
        name: dict(dict(shape=SHAPE) | LISTED[name])
        for name in ("ranges", "packed-from-the-middle", "ranges-mask", "blocks")
    },
}
OTHER_DUAL_RINGS = {"lag-2": dict(lag=2), "kept-2": dict(kept=2), "slots-2": dict(slots=2)}
check_one_pass_dual = functools.partial(check_one_pass, kernel="one_pass_dual")


@pytest.mark.usefixtures("in_one_pass")
@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
@pytest.mark.parametrize("case", [pytest.param(n, marks=[pytest.mark.thorough] * (n != "D64")) for n in ONE_PASS_DUAL])
def test_one_pass_dual(case, late):
    check_one_pass_dual(ONE_PASS_DUAL[case], gluon_on_numpy.Launcher(late=late))


@pytest.mark.usefixtures("in_one_pass")
@pytest.mark.parametrize("ring", OTHER_DUAL_RINGS)
@pytest.mark.thorough
def test_one_pass_dual_in_other_ways(monkeypatch, ring):
    monkeypatch.setitem(config.ONE_PASS_DUAL, 64, (config.ONE_PASS_DUAL[64][0]._replace(**OTHER_DUAL_RINGS[ring]),))
    check_one_pass_dual(ONE_PASS_DUAL["D64"], gluon_on_numpy.Launcher(late=True))


ONE_PASS_DUAL_MUTANTS = {  # and whether it takes late copies to notice
    "zeros-missed": ("store_zeros(DQ + y * (2 * COLUMNS), 2 * COLUMNS)", "store_zeros(DQ, 2 * COLUMNS)", False),
    "added-before-it-is-there": ("wait(memory.dq_full, slot_of(i, 1))", "pass", False),
    "not-waited-for": ("tma.store_wait(0)  # until it is read", "pass", False),
    "overwritten": ("mbarrier.wait(memory.dq_empty.index(w), odd)  #", "#", False),
    "given-to-the-wrong-warpgroup": ("memory.dq_empty.index(i % options.GROUPS)", "memory.dq_empty.index(0)", False),
    "of-another-tile": ("[of_tile * desc.block_type.shape[0], 0]", "[0, 0]", False),
    "dS-not-waited-for": ("wait(memory.ds_full, use)", "pass", False),
    "last-tiles-lost": ("for more in range(options.LAG):", "for more in range(0):", False),
    "keys-of-one-warpgroup": ("matrix(keys, unfolded(w, i))", "matrix(keys, 0)", False),
    "tangents-of-keys-left-out": ("by_thread(b_tdq + b_more)", "by_thread(b_tdq)", False),
    "last-product-lost": ("    if i > 0:\n        b_tdk", "    if i < 0:\n        b_tdk", False),
    "product-of-another-tile": ("options.SLOTS).slot, 0)  # of the tile before\n", "options.SLOTS).slot, 0) * 0\n", False),
    "queries-given-back-early": (
        "mbarrier.arrive(memory.q_empty.index(slot), count=1, pred=i > 0)\n    b_s, b_ts",
        "give_back(memory.q_empty, use)\n    b_s, b_ts",
        False,
    ),
    "cotangents-not-waited-for": (
        "wait(memory.do_full, use)\n    b_dp = products.score_product(matrix(memory.v, z)",
        "b_dp = products.score_product(matrix(memory.v, z)",
        True,
    ),
    "values-not-waited-for": ("mbarrier.wait(memory.v_full.index(0), 0)", "pass", True),
}  # fmt: skip


@pytest.mark.usefixtures("in_one_pass")
@pytest.mark.parametrize(("old", "new", "late"), ONE_PASS_DUAL_MUTANTS.values(), ids=ONE_PASS_DUAL_MUTANTS)
@pytest.mark.thorough
def test_one_pass_dual_broken_fails(old, new, late):
    with pytest.raises(AssertionError):
        check_one_pass_dual(ONE_PASS_DUAL["D64"], gluon_on_numpy.Launcher(old, new, late=late))


@pytest.mark.usefixtures("in_one_pass")
@pytest.mark.parametrize(
    ("case", "old", "new"),
    [
        ("key-lengths", "ring.clean(matrix(buffers[I], w), 0, n)", "if I < 2: ring.clean(matrix(buffers[I], w), 0, n)"),
        ("all", "clean_tile((q, tq), (do, tdo)", "clean_tile((q, tq), (do,)"),
        ("kept-2", "wait_empty(memory.ds_empty, kept)", "pass"),
    ],
)
@pytest.mark.thorough
def test_one_pass_dual_broken_elsewhere_fails(monkeypatch, case, old, new):
    if case in OTHER_DUAL_RINGS:
        monkeypatch.setitem(config.ONE_PASS_DUAL, 64, (config.ONE_PASS_DUAL[64][0]._replace(**OTHER_DUAL_RINGS[case]),))
    with pytest.raises(AssertionError):
        check_one_pass_dual(ONE_PASS_DUAL.get(case, ONE_PASS_DUAL["D64"]), gluon_on_numpy.Launcher(old, new))


@pytest.mark.parametrize("in_order", [False, True])
def test_one_pass_over_a_part_of_the_keys(monkeypatch, in_order):
    """As in a ring: results are float32, to be merged, and round to those of keys of which there are no others."""
    x, tx = operands((1, 100, 200, 2, 1, 64))
    whole = problem(64, True)
    o, log_sum_exp, *ty = jobs.forward(gluon_on_numpy.Launcher(), whole, x, tx)
    y = o, log_sum_exp
    cy, tcy = ((draw(20 + i, 1, 100, 2, 64), np.float32(oracle.normal(30 + i, 1, 2, 100))) for i in range(2))
    take_one_pass(monkeypatch, in_order)
    got = []
    for partial in (False, True):
        launcher = gluon_on_numpy.Launcher()
        case = dataclasses.replace(whole, partial=partial)
        gradients = jobs.backward(launcher, case, x, y, cy, GRADIENTS)[:3]
        gradients += sum(
            (d[:3] for d in jobs.backward_dual(launcher, case, x, y, cy, (tx, ty, tcy), *[GRADIENTS] * 2)), ()
        )
        assert {"one_pass", "one_pass_dual"} <= {name for name, *_ in launcher.launched}
        got.append(gradients)
    for of_all, of_part in zip(*got, strict=True):
        assert of_part.dtype == np.float32
        np.testing.assert_array_equal(of_part.astype(of_all.dtype), of_all)


@pytest.mark.parametrize(
    ("change", "sums"),
    [
        (dict(), "in order"),
        (dict(length=1024, heads=132), None),
        (dict(heads=2), None),
        (dict(heads=8), "in any order"),
        (dict(deterministic=True), "in order"),
        (dict(documents=True), "in any order"),
        (dict(documents=True, deterministic=True), None),
        (dict(head_dim=32), None),
        (dict(head_dim=48), "in order"),
        (dict(want=(False, True, True, False)), None),
        (dict(want=NO), None),
        (dict(want_tangent=(True, False, True, False)), None),
        (dict(without="key"), None),
        (dict(without="cotangent"), None),
    ],
    ids=str,
)
def test_when_the_dual_backward_takes_one_pass(change, sums):
    """In long sequences that fill the GPU, where all gradients and tangents are wanted, along everything; in order as the plain
    one."""
    given = dict(length=2048, heads=66, head_dim=64, deterministic=False, documents=False, without=None)
    given |= dict(want=ALL, want_tangent=ALL) | change
    length, heads = given["length"], given["heads"]
    recorder = Recorder(90)
    recorder.multiprocessors = 132
    o = jax.ShapeDtypeStruct((1, length, heads, given["head_dim"]), jnp.bfloat16)
    x, statistic = Operands(o, o, o), jax.ShapeDtypeStruct((1, heads, length), jnp.float32)
    case = Problem(scale=0.1, implementation="hopper", deterministic=given["deterministic"])
    tx = x._replace(key=None) if given["without"] == "key" else x
    if given["documents"]:
        x = with_documents(x)
    along = (tx, (o, statistic), (None if given["without"] == "cotangent" else o, None))
    jobs.backward_dual(recorder, case, x, (o, statistic), (o, None), along, given["want"], given["want_tangent"])
    ordered = orders(recorder, "one_pass_dual")
    assert ordered == ([] if sums is None else [sums == "in order"])
