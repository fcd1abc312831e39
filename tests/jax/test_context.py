"""One sequence over several devices, inside `shard_map`, on 2, 4 and 8 CPU devices, as on one."""

import collections
import functools
import itertools
import os
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import oracle
from jax_flash_jvp import (
    arguments,
    dot_product_attention,
    launch,
    reorder_zigzag,
    restore_zigzag,
    varlen_attention,
    zigzag_positions,
)
from jax_flash_jvp.context import ORDERS, chunks_of, merged, plan
from jax_flash_jvp.kernels import jobs
from jax_flash_jvp.problem import Operands, Problem

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")

SHARD = PartitionSpec(None, "devices")
N, K, H = 4, 2, 8


def draw(*shapes, dtype="float32"):
    return tuple(jnp.asarray(oracle.normal(i, *shape), dtype) for i, shape in enumerate(shapes))


def operands(length, keys=None, batch=2, dtype="float32"):
    return draw(*((batch, n, heads, H) for n, heads in ((length, N), *[(keys or length, K)] * 2)), dtype=dtype)


def mesh_of(devices):
    return jax.make_mesh((devices,), ("devices",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


def shared(devices, order="contiguous", more=(), **options):
    """Attention of whole arrays, the first three and `more` in shards; in zig-zag order inside, where that is asked for."""
    names = [name for name, _ in more]
    inside = jax.shard_map(
        lambda q, k, v, *given: dot_product_attention(
            q, k, v, context_axis="devices", context_order=order, **dict(zip(names, given, strict=True)), **options
        ),
        mesh=mesh_of(devices), in_specs=(SHARD, SHARD, SHARD, *(spec for _, spec in more)), out_specs=SHARD,
    )  # fmt: skip
    if order == "contiguous":
        return inside
    return lambda *x: restore_zigzag(inside(*(reorder_zigzag(a, devices) for a in x[:3]), *x[3:]), devices)


def first_order(attend, *x):
    y, t = jax.jvp(attend, x, x[:2] + x[1:2] + x[3:])
    return y, t, jax.grad(lambda *x: jnp.sin(attend(*x)).sum(), (0, 1, 2))(*x)


def second_order(attend, *x):
    loss = lambda q, k, v: sum(jnp.sin(a).sum() for a in jax.jvp(lambda *x: attend(*x), (q, k, v), (k, q, v)[: len(x)]))
    x = (x[0], *(jnp.repeat(a, N // K, 2) for a in x[1:]))
    return jax.grad(loss, (0, 1, 2))(*x)


def all_orders(attend, *x):
    gradient = jax.grad(lambda *x: jnp.sin(attend(*x)).sum(), (0, 1, 2))
    o, linear = jax.linearize(attend, *x)
    return o, linear(*x), first_order(attend, *x), jax.jvp(gradient, x, x)


def check(function, got, expected, x):
    both = (jax.jit(functools.partial(function, attend))(*x) for attend in (got, expected))
    for a, b in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


# ------------------------------------------------------------------------------------------------ the plan


def visible(i, j, left, right):
    """Of places of rows and of columns."""
    seen = np.ones((len(i), len(j)), bool)
    if left is not None:
        seen &= j >= i[:, None] - left
    return seen if right is None else seen & (j <= i[:, None] + right)


WINDOWS = [(None, None), (None, 0), (3, 0), (1, 2), (None, 5), (-2, 4), (2, -1), (-9, 9)]


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_blocks_are_all_scores_once(order, gathered):
    for n, queries, keys, window, apart in itertools.product((1, 2, 3, 4), (4, 8), (4, 8), WINDOWS, (False, True)):
        columns = keys * n if gathered else keys
        found = plan(order, n, queries, columns, *window, gathered=gathered, apart=apart)
        seen = np.zeros((queries * n, keys * n), int)

        def places(device, length):
            chunks = chunks_of(order, n, device)
            size = length // len(chunks)
            return np.concatenate([np.arange(chunk * size, (chunk + 1) * size) for chunk in chunks]), size

        for device, step in itertools.product(range(n), range(1 if gathered else n)):
            rows, row_size = places(device, queries)
            all_columns, size = (np.arange(columns), columns) if gathered else places((device - step) % n, keys)
            for block in found.blocks(device, step):
                i = rows[block.rows[0] * row_size : block.rows[1] * row_size]
                j = all_columns[block.columns[0] * size : block.columns[1] * size]
                of_block = visible(np.arange(len(i)), np.arange(len(j)), *(block.window or (None, None)))
                seen[np.ix_(i, j)] += of_block
        expected = visible(np.arange(queries * n), np.arange(keys * n), *window)
        np.testing.assert_array_equal(seen, expected, err_msg=f"{n} {queries} {keys} {window} {apart}")


def test_zigzag_is_balanced():
    """A block for every pair of devices, half of its scores."""
    for n in (2, 4, 8):
        blocks = [
            block
            for device in range(n)
            for step in range(1, n)
            for block in plan("zigzag", n, 8, 8, None, 0).blocks(device, step)
        ]
        assert len(blocks) == n * (n - 1)
        assert all(block.window is None for block in blocks)
        assert {np.ptp(block.rows) * np.ptp(block.columns) for block in blocks} == {2}


def test_a_ring_of_many_devices_has_few_programs():
    assert len(plan("contiguous", 64, 128, 128, None, 0).kinds) == 3
    assert len(plan("contiguous", 64, 128, 128, 100, 100).kinds) == 4
    assert len(plan("zigzag", 64, 128, 128, None, 0).kinds) == 3


def test_zigzag_order():
    np.testing.assert_array_equal(zigzag_positions(8, 2), [0, 1, 6, 7, 2, 3, 4, 5])
    (x,) = draw((2, 24, 3))
    for devices, axis in ((2, 1), (4, 1), (3, -2)):
        there = reorder_zigzag(x, devices, axis)
        np.testing.assert_array_equal(there, x[:, zigzag_positions(24, devices)])
        np.testing.assert_array_equal(restore_zigzag(there, devices, axis), x)
    with pytest.raises(ValueError, match="must be a multiple of twice the 5 devices: got 24; pad it to 30"):
        reorder_zigzag(x, 5)


# ------------------------------------------------------------------------------------------------ parts of the keys


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("case", ["plain", "bias", "bias-of-one-key", "dropout"])
def test_kernels_of_a_part(case, dtype):
    """Of the portable kernels: results of parts of the keys are float32, and merged or summed what those of all keys are."""
    x, tx = (Operands(*draw((1, 20, 2, 8), (1, 40, 1, 8), (1, 40, 1, 8), dtype=dtype)) for _ in range(2))
    tx = Operands(*(a + 1 for a in tx[:3]))
    if case.startswith("bias"):
        (bias,) = draw((1, 2, 20, 40), dtype=dtype)
        x, tx = x._replace(bias=bias), tx._replace(bias=bias)
    if case == "dropout":
        x = x._replace(seed=jnp.array([[3, 4, 0, 0, 0]], jnp.int32))
    problem = Problem(scale=0.3, dropout_rate=0.5 if case == "dropout" else 0.0, implementation="portable")
    partial = Problem(**{**vars(problem), "partial": True})
    launcher = launch.Interpreter()
    want = (True, True, True, case.startswith("bias"))

    def part(a, start, stop):
        columns = lambda bias: None if bias is None else bias[..., start:stop]
        a = a._replace(key=a.key[:, start:stop], value=a.value[:, start:stop], bias=columns(a.bias))
        return a if a.seed is None else a._replace(seed=a.seed.at[:, 4].set(start))

    parts = [(0, 1), (1, 40)] if case == "bias-of-one-key" else [(0, 13), (13, 40)]
    got = [jobs.forward(launcher, partial, part(x, *p), part(tx, *p)) for p in parts]
    assert {a.dtype for y in got for a in y} == {jnp.dtype("float32")}
    y = o, lse, t_o, mu = merged(jnp, *got)
    exact = jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a, (x, tx))
    near = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5 if dtype == "float32" else 0.05)
    for a, b in zip(y, jobs.forward(launcher, problem, *exact), strict=True):
        near(a, b)
    pairs = tuple((a.astype(dtype), b) for a, b in ((o, lse), (t_o, mu), (o + 1, lse / 2), (t_o - 1, mu + 1)))
    (y, ty, cy, tcy), wants = pairs, dict(want=want, want_tangent=want)
    expected = jobs.backward_dual(launcher, problem, x, y, cy, (tx, ty, tcy), **wants)
    got = [jobs.backward_dual(launcher, partial, part(x, *p), y, cy, (part(tx, *p), ty, tcy), **wants) for p in parts]
    assert {a.dtype for a in jax.tree.leaves(got)} == {jnp.dtype("float32")}
    for one, two, whole in zip(got[0], got[1], expected, strict=True):
        joined = (one.query + two.query, *(jnp.concatenate([a, b], 1) for a, b in zip(one[1:3], two[1:3], strict=True)))
        bias = () if one.bias is None else (jnp.concatenate([one.bias, two.bias], 3),)
        for a, b in zip((*joined, *bias), jax.tree.leaves(whole), strict=True):
            near(a, np.float32(b), atol=2e-5 if dtype == "float32" else 0.02 * np.abs(np.float32(b)).max())


# ------------------------------------------------------------------------------------------------ every strategy


@pytest.fixture
def computed(monkeypatch):
    """How often each job of one device is computed, on all devices, by the number of queries and of keys."""
    counts, original = collections.Counter(), launch._pair

    def counted(name, problem, x, *args, **static):
        job = (name, x.query.shape[1], x.key.shape[1])
        jax.debug.callback(lambda _: counts.update([job]), x.query[0, 0, 0, 0])
        return original(name, problem, x, *args, **static)

    monkeypatch.setattr(launch, "_pair", counted)
    return counts


@pytest.mark.parametrize(
    ("strategy", "devices", "order"),
    [
        ("ring", 4, "contiguous"), ("ulysses", 2, "zigzag"),
        pytest.param("ring", 4, "zigzag", marks=pytest.mark.thorough),
        pytest.param("ulysses", 2, "contiguous", marks=pytest.mark.thorough),
        *(pytest.param("all_gather", 2, order, marks=pytest.mark.thorough) for order in ORDERS),
    ],
)  # fmt: skip
def test_strategies(strategy, devices, order):
    options = dict(is_causal=True)
    got = shared(devices, order, context_strategy=strategy, **options)
    check(all_orders, got, functools.partial(dot_product_attention, **options), operands(16))


@pytest.mark.parametrize("flags", ["", "--xla_gpu_deterministic_ops=true"])
@pytest.mark.parametrize("under_jit", [False, True])
def test_gpus_that_share_a_sequence_are_warned_of_once(flags, under_jit, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv("XLA_FLAGS", flags)
    arguments._warn_of_drift.cache_clear()
    q, *_ = operands(16)

    def call():
        if not under_jit:
            return shared(2, "contiguous")(q, q, q)
        mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
        q_ = jax.device_put(q, jax.NamedSharding(mesh, PartitionSpec(None, "x")))
        return jax.jit(lambda q: dot_product_attention(q, q, q))(q_)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
        jax.clear_caches()
        call()
    said = [w for w in caught if "can drift apart" in str(w.message)]
    assert len(said) == (0 if flags else 1)


def test_eight_devices(computed):
    got = shared(8, context_strategy="ring", is_causal=True)
    gradient = lambda attend, *x: jax.grad(lambda *x: jnp.sin(attend(*x)).sum(), (0, 1, 2))(*x)
    check(gradient, got, functools.partial(dot_product_attention, is_causal=True), operands(32))
    jax.effects_barrier()
    pairs = {job: times for job, times in computed.items() if job[1] < 32}
    of_own = {(name, 4, 4): 8 for name in ("forward", "backward")}
    others = {(name, *size): 28 for name in ("forward", "backward") for size in ((2, 4), (4, 2))}
    assert pairs == of_own | others


@pytest.mark.thorough
def test_more_devices_than_are_written_out(monkeypatch):
    monkeypatch.setattr("jax_flash_jvp.context_parallel.UNROLLED", 2)
    got = shared(4, context_strategy="ring", is_causal=True)
    gradient = lambda attend, *x: jax.grad(lambda *x: jnp.sin(attend(*x)).sum(), (0, 1, 2))(*x)
    check(gradient, got, functools.partial(dot_product_attention, is_causal=True), operands(16))


def test_what_nothing_is_seen_of_is_not_computed(computed):
    got = shared(4, context_strategy="ring", local_window_size=(2, 1))
    check(first_order, got, functools.partial(dot_product_attention, local_window_size=(2, 1)), operands(16))
    jax.effects_barrier()
    assert computed["forward", 4, 4] == computed["backward", 4, 4] == 4 + 3 + 3


def test_kernels_are_those_of_one_device(jitted_kernels):
    """However many devices there are: a job is one equation."""
    for devices in (2, 8):
        got = shared(devices, context_strategy="ring")
        gradient = jax.grad(lambda *x: sum(a.sum() for a in jax.jvp(got, x, x)), (0, 1, 2))
        assert jitted_kernels(gradient, *operands(16)) == {"attention_forward_dual": 1, "attention_backward_dual": 1}
        loss = lambda *x: jnp.sin(got(*x)).sum()
        assert jitted_kernels(jax.grad(loss), *operands(16)) == {"attention_forward": 1, "attention_backward": 1}


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_kernels_interpreted(strategy):
    """Causal, so that devices differ in what they compute."""
    options = dict(is_causal=True, implementation="interpret")
    got = shared(2, context_strategy=strategy, **options)
    gradients = lambda attend, q, k, v: jax.grad(lambda *x: jnp.sin(attend(*x)).sum(), (0, 1, 2))(q, k, v)
    check(gradients, got, functools.partial(dot_product_attention, is_causal=True), operands(8, batch=1))


LENGTHS = dict(query_seq_lengths=jnp.array([16, 7], jnp.int32), key_value_seq_lengths=jnp.array([13, 5], jnp.int32))
OPTIONS = {
    "lengths": LENGTHS,
    "causal-lengths": dict(LENGTHS, is_causal=True),
    "lower-right": dict(is_causal=True, causal_alignment="lower_right"),
    "window": dict(local_window_size=(5, 2)),
    "dropout": dict(dropout_rate=0.3, dropout_key=jax.random.key(3)),
    "sinks": dict(sinks=jnp.array([0.3, -1.0, 2.0, 0.0])),
}


@pytest.mark.parametrize(
    ("option", "strategy", "order"),
    [
        ("causal-lengths", "ring", "zigzag"), ("dropout", "ring", "zigzag"),
        *(pytest.param(option, strategy, order, marks=pytest.mark.thorough) for option, strategy, order in [
            ("lengths", "ring", "contiguous"), ("lower-right", "ring", "contiguous"), ("window", "ring", "zigzag"),
            ("sinks", "ring", "contiguous"), ("dropout", "ulysses", "contiguous"), ("dropout", "all_gather", "zigzag"),
            ("lengths", "ulysses", "zigzag"), ("lengths", "all_gather", "contiguous"), ("window", "all_gather", "zigzag"),
        ]),
    ],
)  # fmt: skip
def test_options(option, strategy, order):
    got = shared(2, order, context_strategy=strategy, **OPTIONS[option])
    x = operands(16, 24 if option == "lower-right" else None)
    check(first_order, got, functools.partial(dot_product_attention, **OPTIONS[option]), x)


@pytest.mark.parametrize(
    ("strategy", "devices", "order", "heads"),
    [
        ("ring", 2, "zigzag", 1), ("ulysses", 2, "contiguous", K),
        *(pytest.param(*case, marks=pytest.mark.thorough) for case in [
            ("ring", 4, "zigzag", 1), ("ring", 4, "contiguous", N), ("ulysses", 2, "zigzag", 1), ("all_gather", 2, "zigzag", K),
        ]),
    ],
)  # fmt: skip
def test_ranges(strategy, devices, order, heads):
    """Of places in the whole sequence, some beyond its ends and at those of int32; beside causality, and in keys of another
    length."""
    ranges = np.random.default_rng(0).integers(-3, 28, (2, heads, 16, 2, 2), np.int32)
    ranges[0, 0, ::3, :, 0], ranges[0, 0, 1::4, :, 1], ranges[-1, 0, 3] = -(2**31), 2**31 - 1, -(2**31)
    more = [("key_ranges", PartitionSpec(None, None, "devices"))]
    got = shared(devices, order, more, context_strategy=strategy, is_causal=True, causal_alignment="lower_right")
    there = reorder_zigzag(jnp.asarray(ranges), devices, 2) if order == "zigzag" else jnp.asarray(ranges)
    whole = lambda *x: oracle.attention(*x, key_ranges=ranges, is_causal=True, causal_alignment="lower_right")
    check(first_order if devices == 2 else all_orders, lambda *x: got(*x, there), whole, operands(16, 24))


@pytest.mark.parametrize("order", [pytest.param("contiguous", marks=pytest.mark.thorough), "zigzag"])
def test_packed_sequences(order):
    """Over the ends of shards, some empty."""
    edges, key_edges = np.array([0, 3, 3, 9, 16]), np.array([0, 8, 11, 11, 24])
    inside = jax.shard_map(
        lambda *x: varlen_attention(
            *x, edges, key_edges, is_causal=True, context_axis="devices", context_order=order, context_strategy="ring"
        ),
        mesh=mesh_of(2), in_specs=PartitionSpec("devices"), out_specs=PartitionSpec("devices"),
    )  # fmt: skip

    def got(*x):
        if order == "contiguous":
            return inside(*x)
        return restore_zigzag(inside(*(reorder_zigzag(a, 2, 0) for a in x)), 2, 0)

    whole = lambda *x: varlen_attention(*x, edges, key_edges, is_causal=True)
    check(first_order, got, whole, tuple(a[0] for a in operands(16, 24)))


@pytest.mark.filterwarnings("ignore:.*tokens in no sequence")
@pytest.mark.parametrize("traced", [False, True], ids=["", "traced"])
@pytest.mark.parametrize(
    ("strategy", "order"),
    [("ring", "zigzag"), ("ring", "contiguous"), ("all_gather", "zigzag"), ("ulysses", "contiguous")],
)
def test_tokens_of_no_sequence_may_hold_anything(strategy, order, traced):
    """In arrays and cotangents, over the ends of shards."""
    edges, key_edges = np.array([1, 3, 3, 9, 13]), np.array([2, 8, 11, 11, 21])
    written = [np.repeat([False, True, False, True, False], n) for n in ((1, 2, 6, 4, 3), (2, 6, 3, 10, 3))]
    written = [*written, written[1], written[0]]
    x = [np.asarray(a[0]) for a in operands(16, 24)]
    x = [np.where(w[:, None, None], a, np.nan) for a, w in zip([*x, np.cos(x[0])], written, strict=True)]
    attend = jax.shard_map(
        lambda edges, *x: varlen_attention(
            *x, *edges, is_causal=True, context_axis="devices", context_order=order, context_strategy=strategy
        ),
        mesh=mesh_of(2), in_specs=(PartitionSpec(), *[PartitionSpec("devices")] * 3), out_specs=PartitionSpec("devices"),
    )  # fmt: skip
    there, back = lambda a: a, lambda a: a
    if order == "zigzag":
        there, back = lambda a: reorder_zigzag(a, 2, 0), lambda a: restore_zigzag(a, 2, 0)

    def results(edges, *x):
        o, pull = jax.vjp(lambda *x: back(attend(edges, *map(there, x))), *x[:3])
        return o, *pull(x[3])

    @jax.jit
    def expected(*x):
        whole = lambda *x: varlen_attention(*x, edges, key_edges, is_causal=True)
        o, pull = jax.vjp(whole, *x[:3])
        return o, *pull(x[3])

    given = jnp.asarray(edges), jnp.asarray(key_edges)
    if not traced:
        results = functools.partial(results, (edges, key_edges))
    got = jax.jit(results)(given, *x) if traced else jax.jit(results)(*x)
    want = expected(*(np.nan_to_num(a) for a in x))
    for a, b, w in zip(got, want, [written[3], *written[:3]], strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
        assert not np.asarray(a)[~w].any()


def test_a_bias_in_chunks_of_one_key():
    """Which is not the same for all keys.  With x64, where numbers of the host are of another type than the place of a device."""
    with jax.enable_x64(True):
        x = (*operands(4, dtype="float64"), *draw((1, N, 4, 4), dtype="float64"))
        got = shared(2, more=[("bias", PartitionSpec(None, None, "devices"))], is_causal=True)
        whole = functools.partial(dot_product_attention, is_causal=True)
        check(lambda f, *x: jax.grad(lambda *x: jnp.sin(f(*x)).sum(), 3)(*x), got, whole, x)


@pytest.mark.parametrize("strategy", ["ring", pytest.param("ulysses", marks=pytest.mark.thorough)])
def test_segments(strategy):
    ids = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 3, (2, 16))), jnp.int32)
    more = [("query_segment_ids", SHARD), ("key_value_segment_ids", SHARD)]
    got = shared(2, more=more, context_strategy=strategy)
    whole = lambda *x: dot_product_attention(*x, query_segment_ids=ids, key_value_segment_ids=ids)
    check(first_order, lambda *x: got(*x, ids, ids), whole, operands(16))


@pytest.mark.parametrize(
    "shape",
    [
        (1, N, 16, 16),
        pytest.param((2, 1, 1, 16), marks=pytest.mark.thorough),
        pytest.param((1, K, 16, 1), marks=pytest.mark.thorough),
    ],
    ids=["matrix", "keys", "queries"],
)
def test_a_bias_and_its_gradient(shape):
    """Cut along the queries, and along the keys as the ring goes; summed over what it does not vary along."""
    x, (bias,) = operands(16), draw(shape)
    spec = PartitionSpec(None, None, "devices" if shape[2] > 1 else None)
    got = shared(4, more=[("bias", spec)])
    whole = lambda q, k, v, bias: dot_product_attention(q, k, v, bias)

    def derivatives(attend, *x):
        gradient = jax.grad(lambda *x: jnp.sin(attend(*x)).sum(), (0, 3))
        return jax.jvp(attend, x, x), jax.jvp(gradient, x, x)

    check(derivatives, got, whole, (*x, bias))


@pytest.mark.parametrize("strategy", [None, pytest.param("all_gather", marks=pytest.mark.thorough)])
def test_a_mask(strategy):
    mask = jnp.asarray(oracle.normal(0, 2, 1, 16, 16) > 0)
    got = shared(4, more=[("mask", PartitionSpec(None, None, "devices"))], context_strategy=strategy)
    whole = lambda *x: dot_product_attention(*x, mask=mask)
    check(first_order, lambda *x: got(*x, mask), whole, operands(16))


def test_a_mask_of_keys_goes_with_ulysses(jitted_kernels):
    mask = jnp.asarray(oracle.normal(0, 2, N, 1, 16) > 0)
    got = shared(2, more=[("mask", PartitionSpec())])
    check(first_order, lambda *x: got(*x, mask), lambda *x: dot_product_attention(*x, mask=mask), operands(16))
    assert "all_to_all" in str(jax.make_jaxpr(got)(*operands(16), mask))


@pytest.mark.thorough
def test_half_precision_is_rounded_once():
    """A ring of eight in bfloat16 errs as little as one device."""
    x, exact = operands(64, dtype="bfloat16"), operands(64)
    exact = tuple(a.astype(jnp.bfloat16).astype(jnp.float32) for a in exact)
    expected = jax.jit(functools.partial(first_order, dot_product_attention))(*exact)
    results = [
        jax.jit(functools.partial(first_order, attend))(*x)
        for attend in (shared(8, context_strategy="ring"), dot_product_attention)
    ]
    for got, one, e in zip(*map(jax.tree.leaves, (*results, expected)), strict=True):
        assert got.dtype == jnp.bfloat16
        got, one = (np.abs(np.float64(a) - np.float64(e)).max() for a in (got, one))
        assert got <= 1.5 * one


# ------------------------------------------------------------------------------------------------ transformations


@pytest.mark.thorough
def test_layers_and_a_consistency_step(computed):
    """Scan over layers with remat, the tangent stopped: a forward with its tangent and a backward, not the dual one."""
    x, t = draw((2, 16, N, H), (2, 16, N, H))
    weights = 0.3 * draw((3, H, H))[0]

    def step(attend):
        layer = lambda h, w: h + attend(h @ w, h @ (2 * w), h @ w.T)

        def loss(weights, x):
            net = lambda x: jax.lax.scan(lambda h, w: (jax.checkpoint(layer)(h, w), None), x, weights)[0]
            y, t_y = jax.jvp(net, (x,), (t,))
            return ((y - jnp.sin(jax.lax.stop_gradient(t_y))) ** 2).sum()

        return jax.value_and_grad(loss, (0, 1))

    got = shared(4, context_strategy="ring", is_causal=True)
    whole = functools.partial(dot_product_attention, is_causal=True)
    for a, b in zip(*(jax.tree.leaves(jax.jit(step(f))(weights, x)) for f in (got, whole)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.abs(b).max())
    jax.effects_barrier()
    assert {name for name, *_ in computed} == {"forward", "forward_dual", "backward"}


@pytest.mark.parametrize("strategy", ["ring", pytest.param("ulysses", marks=pytest.mark.thorough)])
def test_vmap_and_eager(strategy):
    got = shared(2, context_strategy=strategy, is_causal=True)
    whole = functools.partial(dot_product_attention, is_causal=True)
    x = operands(8)
    many = tuple(jnp.stack([a, 2 * a, -a]) for a in x)
    mapped = lambda attend, *x: jax.vmap(lambda *x: jax.jvp(attend, x, x))(*x)
    check(mapped, got, whole, many)
    for a, b in zip(got(*x), whole(*x), strict=True):  # outside jit
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.thorough
def test_third_order():
    """By the reference, in a ring too."""

    def third(attend, *x):
        f = lambda s: attend(x[0] * s, *x[1:]).sum()
        for _ in range(3):
            f = jax.grad(f) if _ == 1 else (lambda f: lambda s: jax.jvp(f, (s,), (jnp.ones_like(s),))[1])(f)
        return f(jnp.float32(0.7))

    check(third, shared(2, context_strategy="ring"), dot_product_attention, operands(8))


def test_beside_other_axes():
    """Batch and heads over axes of their own."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "devices", "model"), axis_types=(AxisType.Auto,) * 3)
    spec = PartitionSpec("data", "devices", "model")
    inside = functools.partial(dot_product_attention, context_axis="devices", is_causal=True)
    got = jax.shard_map(inside, mesh=mesh, in_specs=spec, out_specs=spec)
    check(first_order, got, functools.partial(dot_product_attention, is_causal=True), operands(8))


@pytest.mark.thorough
def test_two_axes_as_one():
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    spec = PartitionSpec(None, ("a", "b"))
    inside = functools.partial(dot_product_attention, context_axis=("a", "b"), is_causal=True)
    got = jax.shard_map(inside, mesh=mesh, in_specs=spec, out_specs=spec)
    check(first_order, got, functools.partial(dot_product_attention, is_causal=True), operands(16))


TWO_PROCESSES = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, jax.numpy as jnp, numpy as np
jax.distributed.initialize("localhost:" + sys.argv[1], 2, int(sys.argv[2]))
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jax_flash_jvp import dot_product_attention, launch

mesh = jax.make_mesh((4,), ("devices",), axis_types=(AxisType.Auto,))
spec = P(None, "devices")
host = [np.random.default_rng(i).standard_normal((2, 16, heads, 8)).astype(np.float32) for i, heads in enumerate((4, 2, 2))]
x = [jax.make_array_from_callback(a.shape, NamedSharding(mesh, spec), lambda i, a=a: a[i]) for a in host]
def stand_in(name, launcher, x, *args, problem, **static):  # XLA cannot call numpy from what it divides
    return launch.reference_job(name)(x, *args, problem=problem, **static)
launch._by_kernels, launch.Interpreter.on_shards = stand_in, True
def gradient(**options):
    attend = lambda *x: dot_product_attention(*x, is_causal=True, **options)
    if "context_axis" in options:
        attend = jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec)
    return jax.jit(jax.grad(lambda *x: sum(jnp.sin(a).sum() for a in jax.jvp(attend, x, x)), (0, 1, 2)))
with jax.default_device(jax.local_devices()[0]):
    expected = gradient()(*host)
for options in (dict(context_axis="devices", context_strategy="ring"), dict(implementation="interpret")):
    for got, whole in zip(gradient(**options)(*x), map(np.asarray, expected)):
        for shard in got.addressable_shards:
            np.testing.assert_allclose(shard.data, whole[shard.index], rtol=2e-5, atol=2e-5)
"""


@pytest.mark.thorough
def test_two_processes(unused_port):
    """Of two devices each, a ring of four; and, without a word, the same program under jit."""
    environment = dict(os.environ, JAX_PLATFORMS="cpu")
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, str(unused_port), str(i)], env=environment, stderr=subprocess.PIPE
        )
        for i in range(2)
    ]
    for worker in workers:
        _, error = worker.communicate(timeout=600)
        assert worker.returncode == 0, error.decode()[-3000:]


@pytest.fixture
def unused_port():
    import socket

    with socket.socket() as s:  # bound until the test ends, so that nobody else is given it; a server binds beside
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        s.bind(("localhost", 0))
        yield s.getsockname()[1]


# ------------------------------------------------------------------------------------------------ what is refused


def refused(match, x=None, devices=2, kind=ValueError, **options):
    with pytest.raises(kind, match=match):
        jax.eval_shape(shared(devices, **options), *(x or operands(16)))


def test_bad_arguments_are_named():
    refused("`context_strategy` must be None or one of .*: got 'rings'", context_strategy="rings")
    refused(
        "2 heads of `key`, which the 4 devices of `context_axis` do not divide; ask for 'ring'",
        devices=4,
        context_strategy="ulysses",
    )
    mask = jnp.ones((1, 1, 16, 16), bool)
    rows = [("mask", PartitionSpec(None, None, "devices"))]
    refused(
        "'ulysses' does not serve `mask`, of which every device would need all rows; ask for 'ring'",
        (*operands(16), mask),
        more=rows,
        context_strategy="ulysses",
    )
    refused(r"`mask` must broadcast to .* = \(2, 4, 8, 16\)", (*operands(16), mask[..., :8]), more=rows)
    ids = jnp.zeros((2, 16), jnp.int32)
    whole = [("query_segment_ids", PartitionSpec()), ("key_value_segment_ids", SHARD)]
    refused(
        r"`query_segment_ids` must have shape \(2, 8\), one segment for each query: got \(2, 16\)",
        (*operands(16), ids, ids),
        more=whole,
    )
    inside = functools.partial(dot_product_attention, context_axis="devices", context_order="zigzag")
    odd = jax.shard_map(inside, mesh=mesh_of(2), in_specs=SHARD, out_specs=SHARD)
    with pytest.raises(
        ValueError, match="`query` must have an even number of rows on each device for `context_order`='zigzag': got 3"
    ):
        jax.eval_shape(odd, *operands(6))
    for options in (dict(context_strategy="ring"), dict(context_order="zigzag")):
        with pytest.raises(ValueError, match=r"needs a `context_axis`, inside jax\.shard_map"):
            dot_product_attention(*operands(16), **options)
    with pytest.raises(ValueError, match="`context_order` must be one of"):
        dot_product_attention(*operands(16), context_order="zig")
    with pytest.raises(
        ValueError, match=r"`context_axis` must name axes of a jax\.shard_map around the call: got 'devices'"
    ):
        dot_product_attention(*operands(16), context_axis="devices")
    with pytest.raises(TypeError, match="`context_axis` must be the name of an axis"):
        dot_product_attention(*operands(16), context_axis=3)
