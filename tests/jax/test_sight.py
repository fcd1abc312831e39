"""What the tiled reference computes in JAX: tiles that somebody sees, or a band."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from jax_flash_jvp import dot_product_attention, reference, sight, varlen_attention, visibility
from jax_flash_jvp.problem import Operands, Problem

B, T, S, N, H = 2, 37, 45, 4, 3
attention = functools.partial(dot_product_attention, implementation="xla")


def drawn(seed, most):
    """Arguments of calls that hide keys at random; queries see few keys where `most` is 4: a band."""
    random = np.random.default_rng(seed)
    integers = lambda low, high, *shape: random.integers(low, high, shape).astype(np.int32)
    start = np.arange(T, dtype=np.int32)[:, None] + integers(-3, 3, B, 1, T, 2)
    ranges = np.stack([start, start + integers(-2, most, B, 1, T, 2)], -1)
    lengths = dict(query_seq_lengths=integers(0, T + 1, B), key_value_seq_lengths=integers(0, S + 1, B))
    ids = lambda n: np.sort(integers(0, 9, B, n), 1)
    segments = dict(query_segment_ids=ids(T), key_value_segment_ids=ids(S))
    band = np.abs(np.arange(8)[:, None] * 5 - np.arange(8) * 6) < most
    blocks = dict(mask=(integers(0, 2, B, N, 8, 8) == 0) & band, mask_block_size=(5, 6))
    return {
        "ranges": dict(key_ranges=ranges),
        "ranges-of-heads": dict(key_ranges=np.broadcast_to(ranges, (B, N, T, 2, 2)), local_window_size=(9, 3)),
        "ranges-bias": dict(key_ranges=ranges, bias=oracle.normal(seed, 1, N, T, S)),
        "ranges-dropout": dict(key_ranges=ranges, dropout_rate=0.3, dropout_key=np.array([1, 2], np.uint32)),
        "lengths-causal": dict(lengths, is_causal=True),
        "segments": segments,
        "segments-window": dict(segments, local_window_size=(6, 4), causal_alignment="lower_right"),
        "blocks": blocks,
        "all": dict(blocks, key_ranges=ranges, is_causal=True, **segments, **lengths),
    }


def derivatives(attend, q, k, v):
    f = lambda *x: attend(*x)
    gradients = lambda *x: jax.vjp(f, *x)[1](jnp.cos(jnp.arange(B * T * N * H).reshape(B, T, N, H).astype(q.dtype)))
    along = (q + 1, k - 1, 2 * v)
    return jax.jvp(f, (q, k, v), along), jax.jvp(gradients, (q, k, v), along), jax.vjp(gradients, q, k, v)[1](along)


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize(
    ("case", "most"),
    [*((case, 4) for case in drawn(0, 4)), *((case, 20) for case in ("ranges-bias", "segments", "all"))],
)
def test_equals_attention_to_second_order(case, most, monkeypatch, float64):
    monkeypatch.setattr(reference, "BLOCK", 8)
    arguments = drawn(1, most)[case]
    x = [jnp.asarray(oracle.normal(i, B, n, h, H)) for i, (n, h) in enumerate(((T, N), (S, 2), (S, 2)))]
    run = lambda: jax.jit(lambda *x: derivatives(lambda *x: attention(*x, **arguments), *x))(*x)
    if "dropout_key" in arguments:  # what is dropped depends on the places alone: beside the tiles
        monkeypatch.setattr(sight, "WIDTH", S)
        want = run()
    else:
        want = derivatives(lambda *x: oracle.attention(*x, **arguments), *x)
    jax.clear_caches()
    for name, value in dict(BAND=2, GRAIN=1, WIDTH=14, BLOCKS_AT_ONCE=4).items():
        monkeypatch.setattr(sight, name, value)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-9), run(), want)


def test_third_order_of_a_band(monkeypatch, float64):
    for name, value in dict(BAND=2, GRAIN=1, WIDTH=14, BLOCKS_AT_ONCE=4).items():
        monkeypatch.setattr(sight, name, value)
    ranges = drawn(2, 4)["ranges"]
    q, k, v = (jnp.asarray(oracle.normal(i, B, n, 2, H)) for i, n in enumerate((T, S, S)))

    def third(attend):
        second = lambda k: jax.jvp(lambda k: jax.jvp(lambda k: attend(q, k, v, **ranges), (k,), (v,))[1], (k,), (k,))[1]
        return jax.grad(lambda k: (second(k) ** 2).sum())(k)

    np.testing.assert_allclose(jax.jit(third, static_argnums=0)(attention), third(oracle.attention), atol=1e-8)


def test_mapped_ranges_are_skipped_for_all_entries_together():
    """A condition that vmap maps would compute both of its branches."""
    x = Operands(*[jnp.ones((3, 1, 512, 1, 4))] * 3, key_ranges=jnp.ones((3, 1, 1, 512, 1, 2), jnp.int32))
    text = str(jax.make_jaxpr(jax.vmap(lambda x: reference.forward(x, Problem(1.0))))(x))
    assert text.count(" cond[") >= 2  # of the band, and of a tile


def seconds(f, *x):
    compiled = jax.jit(f).lower(*x).compile()
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*x))
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def test_what_nobody_sees_takes_no_time():
    x = [jnp.asarray(oracle.normal(i, 2048, 4, 16), jnp.float32) for i in range(3)]
    packed = lambda edges: lambda *x: jax.vjp(lambda *x: varlen_attention(*x, edges, is_causal=True), *x)[1](x[0])
    one, many, some = (np.arange(0, 2049, n, dtype=np.int32) for n in (2048, 8, 256))
    whole = seconds(packed(one), *x)
    assert seconds(packed(many), *x) < whole / 3  # a band
    assert seconds(packed(some), *x) < whole / 1.5  # tiles


def test_tiles_that_nobody_sees():
    axis = sight.Axis.cut(1024, 256)
    operands = Operands(*[jax.ShapeDtypeStruct((1, 1024, 1, 4), jnp.float32)] * 3)
    plain, blocks = Problem(1.0), Problem(1.0, mask_block=(64, 64))
    count = lambda problem=plain, **selected: int(
        sight.visible(operands._replace(**selected), problem, axis, axis).sum()
    )
    documents = visibility.documents(1024, np.arange(0, 1025, 8, dtype=np.int32), is_causal=True)
    assert count(key_ranges=jnp.asarray(documents)) == 4
    assert count(key_ranges=jnp.asarray(visibility.causal(1024))) == 10
    assert count(key_ranges=jnp.asarray(visibility.window(1024, 100, 0))) == 7
    assert count(key_ranges=jnp.zeros((1, 1, 1024, 1, 2), jnp.int32)) == 0
    segments = jnp.arange(1024)[None] // 8
    assert count(query_segments=segments, key_segments=segments) == 4
    assert count(key_lengths=jnp.array([100])) == 4
    assert count(blocks, mask=jnp.eye(16, dtype=bool)[None, None]) == 4
    assert count(blocks, mask=jnp.ones((1, 1, 16, 16), bool)) == 16
