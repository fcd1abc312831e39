"""Every feature of attention, with derivatives of first and second order, on the interpreted kernels and on the tiled
reference, against dense attention in float64."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl

import oracle
import support
from families import hopper
from jax_flash_jvp import dot_product_attention, interpret, launch
from jax_flash_jvp.kernels.features import Axes, Features
from jax_flash_jvp.kernels.portable import backward, bias, forward, scores, visibility


def lengths(*numbers):
    return np.array(numbers, np.int32)


def make_cases(m: int) -> dict[str, dict]:
    """Lengths and windows are multiples of `m`.  Heads and batch entries are two where a feature tells them apart."""
    B, T, S, N, _ = both_axes = 2, 19 * m, 35 * m, 2, 2
    by_batch, by_head, alone = (B, T, S, 1, 1), (1, T, S, N, N), (1, T, S, 1, 1)
    segments = [
        np.sort(np.random.default_rng(i).integers(0, 4, (B, n)), 1).astype(np.int32) for i, n in enumerate((T, S))
    ]
    sparse = np.random.default_rng(2).random((B, N, T, S)) < 0.1
    sparse[:, :, 16 * m :] = False  # rows that see nothing, and tiles to leave out
    sparse[:, 0, :, : 16 * m] = False
    blocks = np.repeat(np.repeat([[[[True, False, True], [True, True, False]]]], 9 * m, 2), 16 * m, 3)
    blocks[..., : 16 * m : 4] = False  # something is seen of every word, and of none the whole
    edges = (
        np.random.default_rng(3).integers(-3 * m, S + 3 * m, (B, N, T, 2, 2)).astype(np.int32)
    )  # also empty, and past the ends
    edges[:, :, 5 * m : 9 * m] = [[[[[0, 0], [7 * m, 2 * m]]]]]  # rows that see nothing
    near = np.stack([np.arange(T) // (4 * m) * (4 * m), np.arange(T) + 17 * m], -1)[None, None, :, None].astype(
        np.int32
    )
    few = np.random.default_rng(4).random((B, N, -(-T // (4 * m)), -(-S // (8 * m)))) < 0.3
    bias = lambda *axes, **of: dict(bias=oracle.normal(9, *axes), **of)
    both = lambda a, b: dict(query_segment_ids=a, key_value_segment_ids=b)
    cases = {
        "bias": bias(B, N, T, S, shape=both_axes),
        "bias-by-key": bias(1, 1, 1, S),
        "bias-by-query": bias(1, 1, T, 1),
        "bias-by-head": bias(1, N, 1, 1, shape=by_head),
        "bias-by-batch-and-key": bias(B, 1, 1, S, shape=by_batch),
        "bias-hides": dict(bias=np.where(np.arange(S) % 3, 0.0, -np.inf)[None, None, None]),
        "mask": dict(shape=both_axes, mask=sparse),
        "mask-by-key": dict(mask=np.arange(S)[None, None, None] > 20 * m),
        "mask-by-batch": dict(shape=by_batch, mask=sparse[:, :1]),
        "mask-in-words": dict(shape=(1, 18 * m, 48 * m, 1, 1), mask=blocks),
        "mask-lengths": dict(shape=both_axes, mask=sparse[:1], key_value_seq_lengths=lengths(20 * m, S)),
        "key-lengths": dict(shape=by_batch, key_value_seq_lengths=lengths(18 * m, 0)),
        "query-lengths": dict(shape=by_batch, query_seq_lengths=lengths(19 * m, 7 * m)),
        "lengths-causal": dict(
            shape=by_batch, query_seq_lengths=lengths(17 * m, T), key_value_seq_lengths=lengths(S, 7 * m), is_causal=True
        ),
        "segments": dict(shape=by_batch, **both(*segments)),
        "segments-causal": dict(shape=by_batch, **both(*segments), is_causal=True),
        "ranges": dict(key_ranges=near),
        "ranges-two": dict(shape=both_axes, key_ranges=edges),
        "ranges-by-batch": dict(shape=by_batch, key_ranges=edges[:, :1], key_value_seq_lengths=lengths(18 * m, S)),
        "ranges-causal": dict(key_ranges=near, is_causal=True, **bias(1, 1, T, S)),
        "ranges-segments": dict(shape=by_batch, key_ranges=near, **both(*segments)),
        "blocks": dict(shape=both_axes, mask=few, mask_block_size=(4 * m, 8 * m)),
        "blocks-alone": dict(mask=np.ones((1, 1, 1, 2), bool) & [True, False], mask_block_size=(40 * m, 20 * m)),
        "blocks-causal": dict(
            shape=by_batch, mask=few[:, :1], mask_block_size=(4 * m, 8 * m), is_causal=True, key_ranges=near,
            query_seq_lengths=lengths(19 * m, 7 * m), **bias(1, 1, T, 1),
        ),
        "window": dict(local_window_size=(5 * m, 3 * m)),
        "window-left": dict(local_window_size=(6 * m, None)),
        "window-right": dict(local_window_size=(None, 2)),
        "window-causal": dict(local_window_size=(17 * m, 0), is_causal=True, causal_alignment="lower_right"),
        "window-wide": dict(shape=by_batch, local_window_size=(30 * m, 20 * m), key_value_seq_lengths=lengths(S, 30 * m)),
        "lower-right": dict(is_causal=True, causal_alignment="lower_right"),
        "soft-cap": dict(logits_soft_cap=0.7),
        "soft-cap-bias-causal": dict(logits_soft_cap=1.3, is_causal=True, **bias(1, N, T, S, shape=by_head)),
        "sinks": dict(shape=by_head, sinks=oracle.normal(8, N), is_causal=True),
        "sinks-without-keys": dict(shape=both_axes, sinks=oracle.normal(8, N), mask=sparse),
        "dropout": dict(shape=both_axes, dropout_rate=0.4),
        "dropout-bias-window": dict(dropout_rate=0.25, local_window_size=(20 * m, 4 * m), **bias(1, 1, T, S)),
        "values-of-other-width": dict(width=7),
        "grouped-bias": dict(shape=(1, 9, 18, 4, 2), bias=oracle.normal(9, 1, 2, 9, 18)),
        "grouped-bias-of-all-heads": dict(shape=(1, 9, 18, 4, 2), dropout_rate=0.3, **bias(1, 4, 1, 18)),
        "grouped-mask": dict(shape=(2, 9, 18, 4, 2), mask=sparse[:, :, :9, :18], logits_soft_cap=1.0),
        "grouped-mask-uneven": dict(shape=(2, 19 * m - 1, 35 * m - 3, 4, 2), mask=sparse[:, :, :-1, :-3]),
        "grouped-ranges": dict(shape=(2, 19 * m, 35 * m, 4, 2), key_ranges=edges),
        "grouped-ranges-of-all-heads": dict(
            shape=(1, 19 * m, 35 * m, 4, 2), key_ranges=np.concatenate([edges, near + 0 * edges], 1)[:1], mask=few[:1],
            mask_block_size=(4 * m, 8 * m),
        ),
        "grouped-segments": dict(shape=(2, 9, 18, 4, 1), **both(segments[0][:, :9], segments[1][:, :18])),
        "long-window": dict(
            shape=(1, 70 * m, 90 * m, 1, 1), local_window_size=(40 * m, 9), causal_alignment="lower_right"
        ),
        "long-causal-lengths": dict(
            shape=(2, 50 * m, 50 * m, 1, 1), is_causal=True, local_window_size=(30 * m, 0),
            query_seq_lengths=lengths(50 * m, 33 * m), key_value_seq_lengths=lengths(41 * m, 50 * m),
        ),
        "everything": dict(
            shape=both_axes, mask=sparse | (np.arange(S) == 3), is_causal=True, logits_soft_cap=2.0, dropout_rate=0.1, width=3,
            key_value_seq_lengths=lengths(S, 22 * m), **both(*(a // 2 for a in segments)),
            sinks=oracle.normal(8, N), local_window_size=(30 * m, 5 * m), **bias(B, N, 1, S),
        ),
    }  # fmt: skip
    return {name: dict(shape=alone) | case for name, case in cases.items()}


CASES = make_cases(1)  # in tiles of 16, the last ragged
large = functools.cache(lambda: make_cases(16))
SERVED_BY_HOPPER = {
    "shape", "is_causal", "causal_alignment", "local_window_size", "query_seq_lengths", "key_value_seq_lengths", "mask",
    "query_segment_ids", "key_value_segment_ids", "key_ranges", "mask_block_size",
}  # fmt: skip
COLUMNS = {"interpret": "kernels interpreted", "xla": "tiled reference"}
SEED = jax.random.key_data(jax.random.key(5))


@functools.cache
def every_derivative(**static):
    def compute(attention, x, tx, extra, t_extra, fixed, cy, cty):
        moving = (*x, extra), (*tx, t_extra)

        def f(*x):
            *x, extra = x
            return attention(*x, **extra, **fixed, **static, return_residual=True)

        y, tangent = jax.linearize(f, *moving[0])
        cy, cty = (jax.tree.map(lambda c, y: jnp.where(jnp.isneginf(y), 0, c).astype(y.dtype), c, y) for c in (cy, cty))
        return {
            "forward": y,
            "forward with tangent": jax.jvp(f, *moving),
            "tangent": tangent(*moving[1]),
            "backward": jax.linear_transpose(tangent, *moving[0])(cy),
            "gradient of the tangent": jax.vjp(lambda x, tx: jax.jvp(f, x, tx), *moving)[1]((cy, cty)),
            "tangent of the gradient": jax.jvp(lambda x, cy: jax.vjp(f, *x)[1](cy), (moving[0], cy), (moving[1], cty)),
        }

    return compute


@functools.cache
def kept(rate, B, T, S, N, K):
    """What dropout multiplies the probabilities by: shown by equal scores and unit vectors for values."""
    q, k, unit = jnp.zeros((B, T, N, 1)), jnp.zeros((B, S, K, 1)), jnp.eye(S)
    key = jax.random.wrap_key_data(SEED)
    parts = [
        dot_product_attention(
            q, k, jnp.tile(unit[None, :, None, i : i + 128], (B, 1, K, 1)), dropout_rate=rate, dropout_key=key
        )
        for i in range(0, S, 128)
    ]
    return (np.concatenate(parts, -1).transpose(0, 2, 1, 3) > 0) / np.float32(1 - rate)


def check(case, implementation, dtype, D=4, product_epsilon=0):
    arguments = dict(case)
    B, T, S, N, K = arguments.pop("shape")
    width = arguments.pop("width", D)
    arrays = {name: a for name, a in arguments.items() if isinstance(a, np.ndarray)}
    shapes = [(B, T, N, D), (B, S, K, D), (B, S, K, width)]
    x, tx = ([oracle.normal(10 * i + j, *s) for j, s in enumerate(shapes)] for i in range(2))
    cy, cty = ((oracle.normal(20 + i, B, T, N, width), oracle.normal(30 + i, B, T, N)) for i in range(2))
    extra = {name: a for name, a in arrays.items() if np.issubdtype(a.dtype, np.floating)}
    t_extra = {name: oracle.normal(40, *a.shape) for name, a in extra.items()}
    fixed = {name: a for name, a in arrays.items() if name not in extra}
    static = {name: a for name, a in arguments.items() if name not in arrays}
    rate = static.get("dropout_rate", 0)
    factors = kept(rate, B, T, S, N, K) if rate else None  # now, not while JAX traces

    def result_of(*args, **named):
        if rate:
            named["dropout_key"] = jax.random.wrap_key_data(jnp.asarray(SEED))
        return dot_product_attention(*args, **named, implementation=implementation)

    def thinned(*args, dropout_rate=0, **named):
        return oracle.attention(*args, **named, kept=factors)

    naive = thinned if rate else oracle.attention  # the same function for each implementation: compiled once
    inputs = (x, tx, extra, t_extra, fixed, cy, cty)
    oracle.assert_as_exact_as_naive(every_derivative(**static), result_of, inputs, dtype, 4, product_epsilon, naive)


@pytest.mark.parametrize(
    ("implementation", "dtype", "head_dim", "B", "T", "S"),
    [
        ("interpret", "float32", 4, 2, 34, 50),
        pytest.param("interpret", "float32", 4, 2, 32, 48, marks=pytest.mark.thorough),  # whole tiles
        ("xla", "float32", 4, 2, 34, 50),
        pytest.param("portable", "float32", 64, 2, 34, 50, marks=pytest.mark.gpu),
        *(
            pytest.param("hopper", "bfloat16", head_dim, *sizes, marks=[pytest.mark.gpu, hopper])
            for head_dim, *sizes in ((64, 2, 34, 50), *((width, 96, 340, 500) for width in (64, 72, 128, 256)))
        ),
    ],
)
def test_past_the_lengths_anything_may_stand(implementation, dtype, head_dim, B, T, S):
    """In arrays, tangents and cotangents."""
    ends = dict(
        query_seq_lengths=lengths(*(T - T // 8, T // 5) * (B // 2)),
        key_value_seq_lengths=lengths(*(0, S - S // 5) * (B // 2)),
    )
    sizes = [(T, 2), (S, 2), (S, 2), (T, 2)]
    past = [(np.arange(n) >= ends[f"{name}_seq_lengths"][:, None])[..., None, None]
            for name, n in (("query", T), ("key_value", S), ("key_value", S), ("query", T))]  # fmt: skip
    bias, t_bias = (jnp.asarray(oracle.normal(i, 1, 2, T, S), dtype) for i in (8, 9))
    drawn = [[oracle.normal(10 * i + j, B, *size, head_dim) for j, size in enumerate(sizes)] for i in range(2)]
    attend = functools.partial(dot_product_attention, **ends, implementation=implementation)

    def derivatives(filler):
        (*x, g), (*tx, tg) = (
            [jnp.where(p, filler, a).astype(dtype) for p, a in zip(past, arrays, strict=True)] for arrays in drawn
        )
        backward = lambda *x: jax.vjp(attend, *x[:3])[1](x[3])
        pull = jax.vjp(lambda x, tx: jax.jvp(attend, x, tx), tuple(x), tuple(tx))[1]
        tangent = jax.linearize(attend, *x)[1](*tx)
        of_bias = lambda bias, *x: jax.vjp(lambda bias: attend(*x[:3], bias), bias)[1](x[3])
        along = (bias, *x, g), (t_bias, *tx, tg)
        scores = jax.jvp(of_bias, *along) if implementation != "hopper" else None
        return tangent, jax.jvp(attend, x, tx), jax.jvp(backward, (*x, g), (*tx, tg)), pull((g, tg)), scores

    jax.tree.map(np.testing.assert_array_equal, derivatives(np.nan), derivatives(0.0))


@pytest.mark.parametrize("implementation", ["interpret", "xla", pytest.param("triton", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("low", [-1e9, np.finfo(np.float32).min])
def test_large_negative_biases_hide(implementation, low):
    """Also a whole row: in its log-sum-exp nothing would be left of the logarithm."""
    x, t_x = (
        tuple(jnp.asarray(oracle.normal(3 * i + j, 1, 20, 2, 4), jnp.float32) for j in range(3)) for i in range(2)
    )

    def derivatives(low):
        bias = jnp.zeros((20, 20)).at[2].set(low).at[:, 5].set(low)
        attend = lambda *x: dot_product_attention(*x, implementation=implementation)
        both = lambda *x: dot_product_attention(*x, implementation=implementation, return_residual=True)
        moved = jax.jvp(both, (*x, bias), (*t_x, jnp.ones_like(bias)))[1]
        return jax.linearize(attend, *x, bias)[1](*t_x, jnp.zeros_like(bias)), jax.vjp(attend, *x, bias)[1](x[0]), moved

    jax.tree.map(np.testing.assert_array_equal, derivatives(low), derivatives(-np.inf))


@pytest.mark.parametrize("window", [(None, 2**31 - 1), (2**31, 2**31 - 100), 2**63 - 1])
@pytest.mark.parametrize("implementation", ["interpret", "xla"])
def test_windows_wider_than_integers(implementation, window):
    x = [jnp.asarray(oracle.normal(i, 1, 20, 2, 4), jnp.float32) for i in range(3)]
    attend = functools.partial(dot_product_attention, *x, implementation=implementation)
    np.testing.assert_array_equal(attend(local_window_size=window), attend())
    assert not attend(local_window_size=(-(2**40), None)).any()


SLOW = {  # what others show as well
    "bias-by-query", "bias-by-head", "bias-by-batch-and-key", "bias-hides", "mask-by-key", "mask-by-batch", "key-lengths",
    "query-lengths", "segments-causal", "ranges", "ranges-by-batch", "ranges-segments", "blocks",
    "blocks-alone", "grouped-ranges",
    "window-left", "window-right", "window-wide", "soft-cap", "sinks-without-keys",
    "dropout", "grouped-bias", "grouped-mask-uneven", "grouped-segments",
}  # fmt: skip


EDGES = {  # of tiles of 16, met to one query or key; and arrays longer than what is shared says
    "window-of-a-tile": dict(shape=(1, 48, 48, 1, 1), local_window_size=(None, 14)),
    "window-of-two": dict(shape=(1, 48, 48, 1, 1), local_window_size=(None, 1)),
    "window-ahead": dict(shape=(1, 48, 48, 1, 1), local_window_size=(-3, 20)),
    "window-behind": dict(shape=(1, 48, 40, 1, 1), local_window_size=(20, -3), is_causal=True),
    "window-of-none": dict(shape=(1, 20, 20, 1, 1), local_window_size=(-60, 9)),
    "window-of-all-but-one": dict(shape=(1, 9, 9, 1, 1), local_window_size=(None, 7)),
    "causal-two": dict(shape=(1, 2, 2, 1, 1), is_causal=True),
    "keys-less-one": dict(shape=(1, 48, 48, 1, 1), key_value_seq_lengths=lengths(31)),
    "queries-less-one": dict(shape=(1, 48, 48, 1, 1), query_seq_lengths=lengths(31)),
    "lengths-beyond": dict(
        shape=(2, 20, 18, 1, 1), query_seq_lengths=lengths(100, 7), key_value_seq_lengths=lengths(100, 7)
    ),
    "three-heads-a-key": dict(
        shape=(2, 9, 18, 6, 2), mask=oracle.normal(8, 2, 2, 9, 18) > 0, bias=oracle.normal(9, 1, 2, 9, 18)
    ),
    "three-heads-a-key-by-key": dict(shape=(1, 9, 18, 6, 2), bias=oracle.normal(9, 1, 2, 1, 18)),
    "soft-cap-far-away": dict(logits_soft_cap=1e4, shape=(1, 19, 35, 1, 1)),
}


@pytest.mark.parametrize("case", EDGES)
def test_edges(case):
    check(EDGES[case], "interpret", "float32")


MASK_ALONE = Features(mask=Axes(present=True, rows=True, columns=True))


def packed(mask, word):
    """Of as many in a row as four words hold that numbered 8 i + 2 w + e is bit 2 i + e of word w; zeros behind a row."""
    whole = np.pad(mask, ((0, 0),) * (mask.ndim - 1) + ((0, -mask.shape[-1] % (4 * word)),))
    in_words = whole.reshape(*mask.shape[:-1], -1, word // 2, 4, 2).swapaxes(-3, -2)
    return np.packbits(in_words, None, "little").view(f"int{word}").reshape(*mask.shape[:-1], -1)


@pytest.mark.parametrize("by_key", [False, True], ids=["", "by-key"])
@pytest.mark.parametrize("word", [16, 32])
@pytest.mark.parametrize(("T", "S"), [(70, 45), (33, 300), (300, 32), (128, 128)])
def test_masks_are_packed(T, S, word, by_key):
    mask = np.random.default_rng(T + S).random((3, T, S)) < 0.5
    expected = packed(mask.swapaxes(1, 2) if by_key else mask, word)
    got = np.full_like(expected, -1)
    tile = dict(BM=128, BN=16) if by_key else dict(BM=16, BN=128)
    programs = 3 * -(-T // tile["BM"]) * -(-S // tile["BN"])
    interpret.launch(visibility.pack, (programs,), mask, T, S, got, **tile, BY_KEY=by_key, FEATURES=MASK_ALONE)
    np.testing.assert_array_equal(got, expected)


@triton.jit
def look_up(MASK, first, n_rows, n_columns, OUT, R: tl.constexpr, C: tl.constexpr, FEATURES: tl.constexpr):
    o_r, o_c = tl.arange(0, R)[:, None], tl.arange(0, C)[None, :]
    b_seen = visibility.bits(MASK, MASK, o_r, first + o_c, first, n_rows, n_columns, False, FEATURES)
    tl.store(OUT + o_r * C + o_c, b_seen.to(tl.int8))


@pytest.mark.parametrize("S", [14, 50, 64, 65, 128, 150, 200])
@pytest.mark.parametrize("C", [16, 32, 64, 128])
def test_bits_are_looked_up(C, S):
    """In tiles of all widths; nothing is read behind the last row, where all bits are set."""
    mask = np.random.default_rng(S).random((13, S)) < 0.5
    bits = packed(mask, 16)
    bits = np.concatenate([bits, np.full_like(bits[:1], -1)])
    for first in range(0, S, C):
        got = np.full((16, C), -1, np.int8)
        interpret.launch(look_up, (1,), bits, first, 13, S, got, R=16, C=C, FEATURES=MASK_ALONE)
        expected = np.zeros((16, C), np.int8)
        some = mask[:, first : first + C]
        expected[:13, : some.shape[1]] = some
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("by_key", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["", "by-key"])
@pytest.mark.parametrize("kind", ["mask", "segments", "ranges"])
def test_tiles_are_looked_at(kind, by_key):
    """What is said of a tile is what is to be seen there: exactly, if a single limit cuts it, and else no less."""
    none = [None]
    for T, S, left, right, queries, keys in itertools.product(
        (17, 32), (31, 33), (*none, 1, 14), (*none, 0, 1, 14), (*none, 31), (*none, 15)
    ):
        queries = queries and min(queries, T - 1)
        i, j = np.arange(T)[:, None], np.arange(S)
        seen = np.full((T, S), True)
        mask, q_segments, k_segments = seen.copy(), np.ones(T, np.int32), np.where(j < 16, 1, 2).astype(np.int32)
        mask[:16, :16] = False
        ranges = np.stack(np.broadcast_arrays(np.where(i < 20, 2, 16), np.where(i == 3, 2, S - (i > 20))), -1).astype(
            np.int32
        )
        in_ranges = (ranges[:, 0, :1] <= j) & (j < ranges[:, 0, 1:])
        seen &= dict(mask=mask, segments=q_segments[:, None] == k_segments, ranges=in_ranges)[kind]
        limits = {}
        for limit, name, inside in (
            (left, "left", j >= i - (left or 0)), (right, "right", j <= i + (right or 0)),
            (queries, "query_lengths", i < (queries or T)), (keys, "key_lengths", j < (keys or S)),
        ):  # fmt: skip
            if limit is not None:
                limits[name] = True
                seen &= inside
        of_kind = dict(
            mask=MASK_ALONE, segments=Features(segments=True), ranges=Features(ranges=Axes(present=True), intervals=1)
        )
        features = dataclasses.replace(of_kind[kind], **limits)
        n_m, n_n = -(-T // 16), -(-S // 16)
        said = np.full((n_n, n_m) if by_key else (n_m, n_n), -1, np.int32)
        interpret.launch(
            visibility.look_at_tiles, (n_m * n_n,), packed(mask.T if by_key else mask, 16),
            lengths(1), lengths(queries or T), lengths(keys or S), q_segments, k_segments, ranges,
            1, 1, T, S, left or 0, right or 0, 1, said,
            BM=16, BN=16, BY_KEY=by_key, FEATURES=features,
        )  # fmt: skip
        alone = len(limits) <= (kind != "ranges")
        for m, n in itertools.product(range(n_m), range(n_n)):
            tile = seen[16 * m : 16 * m + 16, 16 * n : 16 * n + 16]
            expected = 2 if tile.all() and tile.shape[1] == 16 else 1 if tile.any() else 0
            got = (said.T if by_key else said)[m, n]
            rows, columns = ~seen.any(1)[16 * m : 16 * m + 16], ~seen.any(0)[16 * n : 16 * n + 16]
            if kind == "ranges" and not limits and expected == 1 and (rows.any() or columns.any()):  # seen by nobody
                assert got == 3, (T, S, m, n)
            got = 1 if got == 3 else got
            assert got == expected if alone else (got == 2) == (expected == 2) and got >= expected, (limits, T, S, m, n)


@pytest.mark.parametrize("by_key", [False, True], ids=["", "by-key"])
@pytest.mark.parametrize("word", [16, 32])
@pytest.mark.parametrize("BN", [16, 32, 64, 128])
def test_tiles_of_masks_are_looked_at(BN, word, by_key):
    """Of all widths: full but for one score, empty but for one, and what the end cuts."""
    T, S, BM = 300, 333, 32
    n_m, n_n = -(-T // BM), -(-S // BN)
    full = np.random.default_rng(BN).random((n_m, n_n)) < 0.5
    mask = full.repeat(BM, 0).repeat(BN, 1)[:T, :S]
    for m, n in itertools.product(range(n_m), range(n_n)):
        if (m + n) % 2:
            mask[min(BM * m + 7 * n % BM, T - 1), min(BN * n + 5 * m % BN, S - 1)] ^= True
    said = np.full((n_m, n_n), -1, np.int32)
    sizes, tile = ((S, T), dict(BM=BN, BN=BM)) if by_key else ((T, S), dict(BM=BM, BN=BN))  # by key T is the keys
    interpret.launch(
        visibility.look_at_tiles, (n_m * n_n,), packed(mask, word), *[lengths(1)] * 6, 1, 1, *sizes, 0, 0, 1, said,
        **tile, BY_KEY=by_key, FEATURES=MASK_ALONE,
    )  # fmt: skip
    for m, n in itertools.product(range(n_m), range(n_n)):
        tile = mask[BM * m : BM * m + BM, BN * n : BN * n + BN]
        whole = tile.all() and tile.shape[not by_key] == (BM if by_key else BN)  # cut by the end of the queries alone
        assert said[m, n] == (2 if whole else 1 if tile.any() else 0), (m, n)


@pytest.mark.parametrize("implementation", ["interpret", "xla"])
@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES])
def test_float32(case, implementation, record_property):
    record_property("supports", support.claim(case, f"JAX, {COLUMNS[implementation]}, float32"))
    check(CASES[case], implementation, "float32")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] * (c not in ("bias", "everything"))) for c in CASES]
)
def test_bfloat16(case, record_property):
    record_property("supports", support.claim(case, "JAX, kernels interpreted, bfloat16"))
    check(CASES[case], "interpret", "bfloat16")


def mixture(seed: int) -> dict:
    """Some features together."""
    rng = np.random.default_rng(seed)
    some = lambda: rng.random() < 0.4
    B, T, S = int(rng.integers(1, 3)), int(rng.integers(1, 40)), int(rng.integers(1, 40))
    N, K = [(1, 1), (2, 1), (2, 2), (4, 2)][rng.integers(4)]
    axes = lambda: [int(rng.choice([1, n])) for n in (B, N, T, S)]
    case: dict = dict(
        shape=(B, T, S, N, K), is_causal=some(), causal_alignment=str(rng.choice(["upper_left", "lower_right"]))
    )
    if some():
        case.update(bias=oracle.normal(seed, *axes()))
    if some():
        case.update(mask=rng.random(axes()) < 0.5)
    if some():
        case.update(local_window_size=tuple(None if some() else int(rng.integers(-9, 30)) for _ in range(2)))
    if some():
        case.update(key_value_seq_lengths=rng.integers(0, S + 1, B, np.int32))
    if some():
        case.update(query_seq_lengths=rng.integers(0, T + 1, B, np.int32))
    if some():
        queries, keys = (rng.integers(0, 3, (B, n), np.int32) for n in (T, S))
        case.update(query_segment_ids=queries, key_value_segment_ids=keys)
    if some():
        case.update(logits_soft_cap=float(rng.uniform(0.5, 3)))
    if some():
        case.update(sinks=oracle.normal(seed, N))
    if some():
        case.update(dropout_rate=float(rng.uniform(0.05, 0.6)))
    if some():
        case.update(width=int(rng.integers(1, 9)))
    return case


@pytest.mark.parametrize("implementation", ["interpret", "xla"])
@pytest.mark.parametrize("seed", [pytest.param(i, marks=[pytest.mark.slow] * (i >= 2)) for i in range(40)])
def test_mixtures(seed, implementation, record_property):
    record_property("supports", support.claim("everything", f"JAX, {COLUMNS[implementation]}, float32"))
    check(mixture(seed), implementation, "float32")


MUTANTS = {
    "dropout-not-of-values": (forward, "b_pv = thinned(b_p, b_kept, FEATURES)", "b_pv = b_p", "dropout"),
    "dropout-not-of-tangent": (
        forward, "thinned(b_p * (b_ts - b_c[:, None]), b_kept, FEATURES)", "b_p * (b_ts - b_c[:, None])", "dropout",
    ),
    "dropout-not-of-cotangent": (
        backward, "thinned(products(b_do, b_v, PRECISION), b_kept, FEATURES)", "products(b_do, b_v, PRECISION)", "dropout",
    ),
    "cap-without-tangent": (scores, "b_ts *= 1.0 - b_u * b_u", "b_ts *= 1.0", "soft-cap"),
    "cap-without-curvature": (backward, "(2.0 * scale / cap)", "(0.0 * scale / cap)", "soft-cap"),
    "bias-without-tangent": (scores, "b_ts += load_scores(t_bias", "b_ts += 0.0 * load_scores(t_bias", "bias"),
    "bias-gradient-without-tangent": (bias, "b_tds += b_ds * (b_w", "b_tds += 0.0 * b_ds * (b_w", "bias"),
    "window-by-one": (visibility, "o_n >= o_q - sight.left", "o_n > o_q - sight.left", "window-left"),
    "window-stops-early": (visibility, "i_n * BN + BN + left", "i_n * BN + left", "long-window"),
    "segments-of-keys": (visibility, "b_seen &= b_queries == tl", "b_seen &= b_queries >= tl", "segments"),
    "tile-not-listed": (visibility, "mask=o_t < n_tiles, other", "mask=o_t < n_tiles - 1, other", "mask"),
    "tile-not-whole": (visibility, "(everything & something)", "something", "mask"),
    "bits-ignored": (visibility, "b_word & (1 <<", "b_word | (1 <<", "mask"),
    "bits-of-other-columns": (visibility, "(first % 64 // 4 if", "(0 if", "mask"),
    "bits-of-another-thread": (visibility, "(o_x & 6) * 8", "(o_x & 4) * 8", "mask"),
    "bits-of-another-batch": (visibility, "size *= (n_k if", "size *= 0 * (n_k if", "mask"),
    "word-not-whole": (visibility, "b_word == b_there", "b_word != 0", "mask-in-words"),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(("module", "old", "new", "case"), MUTANTS.values(), ids=MUTANTS)
def test_broken_kernels_fail(module, old, new, case, broken_kernels):
    broken_kernels(module, old, new)
    with pytest.raises(AssertionError, match="error"):
        check(CASES[case], "interpret", "float32")


WIDE = ("bias", "mask", "segments-causal", "soft-cap", "dropout", "everything")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "dtype", "head_dim"),
    [
        *((c, dtype, 64) for c in CASES for dtype in ("bfloat16", "float32")),
        *((c, "bfloat16", 128) for c in WIDE),
        ("bias", "bfloat16", 72),
    ],
)
def test_on_a_gpu(case, dtype, head_dim, record_property):
    record_property("supports", support.claim(case, f"JAX, kernels on a GPU, {dtype}"))
    check(large()[case], "portable", dtype, D=head_dim, product_epsilon=oracle.TF32_EPSILON)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize(
    ("case", "head_dim"),
    [
        *itertools.product([name for name, case in CASES.items() if set(case) <= SERVED_BY_HOPPER], (64, 128)),
        ("mask", 72), ("segments-causal", 72), ("mask", 192), ("mask", 256), ("segments-causal", 256), ("lengths-causal", 256),
    ],
)  # fmt: skip
def test_hopper_kernels(case, head_dim):
    check(large()[case], "hopper", "bfloat16", D=head_dim, product_epsilon=oracle.TF32_EPSILON)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("head_dim", [32, 64, 72, 128, 256])
@pytest.mark.parametrize("case", ["lengths-causal", "long-causal-lengths", "window", "segments-causal", "mask"])
def test_hopper_kernels_with_more_blocks_than_multiprocessors(case, head_dim):
    given = large()[case]
    B, *sizes = given["shape"]
    several = lambda a: np.concatenate([a] * (72 // B)) if isinstance(a, np.ndarray) and len(a) == B > 1 else a
    many = {name: several(a) for name, a in given.items()} | dict(shape=(72, *sizes))
    check(many, "hopper", "bfloat16", D=head_dim, product_epsilon=oracle.TF32_EPSILON)


@pytest.mark.parametrize("implementation", ["interpret", "xla"])
def test_vmap(implementation):
    """Over some arguments, and over a batch that shares the others."""
    B, N, E = 2, 2, 4
    x = [
        jnp.asarray(oracle.normal(i, 3, *s), jnp.float32)
        for i, s in enumerate([(B, 5, N, 8), (B, 18, N, 8), (B, 18, N, E)])
    ]
    bias, t_bias = (jnp.asarray(oracle.normal(i, 1, 1, 5, 18), jnp.float32) for i in (8, 9))
    mask = CASES["mask"]["mask"][:, :1, :5, :18] | (np.arange(18) == 0)
    fixed = dict(mask=mask, key_value_seq_lengths=lengths(18, 9), dropout_rate=0.3, implementation=implementation)
    keys = jax.random.split(jax.random.key(0), 3)

    def f(q, k, v, key, bias):
        attend = lambda bias, q: dot_product_attention(q, k, v, bias, dropout_key=key, **fixed)
        o, pull = jax.vjp(attend, bias, q)
        return o, jax.jvp(attend, (bias, q), (t_bias, q))[1], pull(o)

    got = jax.vmap(f, in_axes=(0, 0, 0, 0, None))(*x, keys, bias)
    expected = jax.tree.map(lambda *a: jnp.stack(a), *(f(*(a[i] for a in x), keys[i], bias) for i in range(3)))
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", [pytest.param("interpret", marks=pytest.mark.thorough), "xla"])
def test_vmap_does_not_copy_a_shared_bias(implementation, monkeypatch):
    n, B, N, T, S = 2, 2, 2, 5, 18
    q, k, v = (jnp.asarray(oracle.normal(i, n, B, length, N, 4), jnp.float32) for i, length in enumerate((T, S, S)))
    bias, t_bias = (jnp.asarray(oracle.normal(8 + i, 1, N, T, S), jnp.float32) for i in range(2))
    mask = jnp.asarray(CASES["mask"]["mask"][:1, :, :T, :S] | (np.arange(S) == 0))
    attend = functools.partial(dot_product_attention, mask=mask, implementation=implementation)
    vmapped = jax.vmap(attend, (0, 0, 0, None))
    one_by_one = lambda q, k, v, bias: jnp.stack([attend(q[i], k[i], v[i], bias) for i in range(n)])

    def derivatives(f):
        tangent = lambda bias, t: jax.jvp(lambda bias: f(q, k, v, bias), (bias,), (t,))
        gradient = jax.grad(lambda q, bias: jnp.sin(f(q, k, v, bias)).sum(), (0, 1))
        return (
            tangent(bias, t_bias),
            jax.jvp(gradient, (q, bias), (q + 1, t_bias)),
            jax.grad(lambda *b: jnp.vdot(*map(jnp.sin, tangent(*b))), (0, 1))(bias, t_bias),
            jax.jacfwd(lambda c: f(q, k, v, bias * c))(jnp.ones(2)[:, None, None]),
        )

    for a, b in zip(*map(jax.tree.leaves, (derivatives(vmapped), derivatives(one_by_one))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    each = jax.vmap(jax.grad(lambda bias, *x: attend(*x, bias).sum()), (None, 0, 0, 0))(bias, q, k, v)  # of each entry
    np.testing.assert_allclose(each.sum(0), jax.grad(lambda bias: vmapped(q, k, v, bias).sum())(bias), atol=1e-5)
    equations = jax.make_jaxpr(lambda *x: jax.jvp(vmapped, x, x))(q, k, v, bias).eqns
    shapes = [v.aval.shape for eqn in equations if eqn.primitive.name == "attention_forward_dual" for v in eqn.invars]
    assert shapes.count((1, 1, N, T, S)) == 3  # bias, its tangent, mask
    if implementation == "interpret":  # nor do its kernels
        job, seen = launch._KERNELS["forward_dual"], []
        spy = lambda launcher, problem, x, tx: seen.append((x, tx)) or job(launcher, problem, x, tx)
        monkeypatch.setitem(launch._KERNELS, "forward_dual", spy)
        jax.jvp(lambda *x: vmapped(*x), (q, k, v, 2 * bias), (q, k, v, bias))
        ((x, tx),) = seen
        assert x.bias.shape == tx.bias.shape == x.mask.shape == (1, N, T, S)


def test_vmap_over_a_sharded_axis_with_a_shared_bias():
    """The gradient of what all entries share has no axis to be sharded."""
    n, T, N = 4, 5, 2
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = [jnp.asarray(oracle.normal(i, n, 2, T, N, 4), jnp.float32) for i in range(3)]
    bias = jnp.asarray(oracle.normal(3, 1, N, T, T), jnp.float32)
    attend = functools.partial(dot_product_attention, implementation="xla")
    loss = lambda bias, *x: jnp.sin(jax.vmap(attend, (0, 0, 0, None))(*x, bias)).sum()
    expected = jax.jit(jax.grad(loss, range(4)))(bias, *x)
    with jax.set_mesh(mesh):
        x = [jax.device_put(a, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))) for a in x]
        got = jax.jit(jax.grad(loss, range(4)))(bias, *x)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_is_random(rate):
    """At its rate, and independent of the neighbour along every axis and of what another key drops."""
    shape = (2, 200, 210, 3, 3)
    dropped = kept(rate, *shape) == 0
    deviation = (rate * (1 - rate) / dropped.size) ** 0.5
    assert abs(dropped.mean() - rate) < 4 * deviation
    for axis in range(4):
        first, second = (np.take(dropped, range(i, dropped.shape[axis] - 1 + i), axis) for i in range(2))
        correlation = np.corrcoef(first.ravel(), second.ravel())[0, 1]
        assert abs(correlation) < 4 / first.size**0.5
    rows = dropped.mean(-1).ravel()  # binomial, too
    assert rows.std() == pytest.approx((rate * (1 - rate) / shape[2]) ** 0.5, rel=0.1)


def test_dropout_in_float64():
    """Keeps probabilities of 1 / S, times 1 / (1 - rate) in float64."""
    with jax.enable_x64(True):
        q = jnp.zeros((1, 50, 1, 4), "float64")
        o = dot_product_attention(q, q, q + 1, dropout_rate=0.3, dropout_key=jax.random.key(0))
    kept = np.asarray(o) * (50 * 0.7)
    np.testing.assert_allclose(kept, kept.round(), rtol=1e-14)


def test_dropout_of_two_keys_and_none():
    x = [jnp.asarray(oracle.normal(i, 2, 9, 2, 8), jnp.float32) for i in range(3)]
    attend = lambda seed, rate: dot_product_attention(*x, dropout_rate=rate, dropout_key=jax.random.key(seed))
    assert (attend(0, 0.3) == attend(0, 0.3)).all()
    assert (attend(0, 0.3) != attend(1, 0.3)).any()
    assert (attend(0, 0.0) == dot_product_attention(*x)).all()
