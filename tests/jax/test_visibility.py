"""Constructors of ranges, each against the boolean mask that it stands for, in numpy, JAX and PyTorch."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash_jvp import dot_product_attention, visibility

I, J = np.arange(24)[:, None], np.arange(24)
EDGES = np.array([0, 5, 5, 12, 24], np.int32)
KEY_EDGES = np.array([0, 7, 9, 9, 24], np.int32)
OF = np.searchsorted(EDGES, I, side="right") - 1
OF_KEYS = np.searchsorted(KEY_EDGES, J, side="right") - 1
USED, KEYS_USED = np.array([3, 0, 9, 12]), np.array([7, 1, 0, 11])  # more than there are, too
USED_END = (EDGES[:-1] + np.minimum(USED, np.diff(EDGES)))[OF]
KEYS_USED_END = (KEY_EDGES[:-1] + np.minimum(KEYS_USED, np.diff(KEY_EDGES)))[OF]
FROM_FIRST = I + (KEY_EDGES[:-1] - EDGES[:-1])[OF]
AT = I + (KEY_EDGES[1:] - EDGES[1:])[OF]  # from the lower right corner of each document
HALF, BLOCK = 12, 5
CLEAN, B_Q, B_K = J < HALF, I % HALF // BLOCK, J % HALF // BLOCK


def two(make):
    """One for each batch entry."""
    return np.stack([make(3), make(9)])[:, None]


CASES = {
    "causal": (lambda like: visibility.causal(24, like=like), J <= I),
    "causal-cache": (lambda like: visibility.causal(24, offset=[3, 9], like=like), two(lambda n: I + n >= J)),
    "window": (lambda like: visibility.window(24, 3, 1, like=like), (J >= I - 3) & (J <= I + 1)),
    "window-left": (lambda like: visibility.window(24, 3, like=like), J >= I - 3),
    "window-none": (lambda like: visibility.window(24, like=like), J >= 0),
    "window-without-end": (lambda like: visibility.window(24, 2**40, 2**31 - 1, like=like), J >= 0),
    "prefix": (lambda like: visibility.prefix(24, 7, like=like), (J <= I) | (J < 7)),
    "prefixes": (lambda like: visibility.prefix(24, [3, 9], like=like), two(lambda n: (J <= I) | (n > J))),
    "block-causal": (lambda like: visibility.block_causal(24, 5, like=like), J // 5 <= I // 5),
    "teacher-forcing": (
        lambda like: visibility.teacher_forcing(24, BLOCK, like=like),
        np.where(I < HALF, CLEAN & (B_K <= B_Q), np.where(CLEAN, B_K < B_Q, B_K == B_Q)),
    ),
    "documents": (
        lambda like: visibility.documents(24, EDGES, like=like),
        np.searchsorted(EDGES, J, side="right") - 1 == OF,
    ),
    "documents-of-others": (lambda like: visibility.documents(24, EDGES, KEY_EDGES, like=like), OF == OF_KEYS),
    "documents-causal": (
        lambda like: visibility.documents(24, EDGES, KEY_EDGES, is_causal=True, like=like), (OF == OF_KEYS) & (J <= AT)
    ),
    "documents-window": (
        lambda like: visibility.documents(24, EDGES, KEY_EDGES, window=(2, 1), like=like),
        (OF == OF_KEYS) & (J >= AT - 2) & (J <= AT + 1),
    ),
    "documents-window-without-end": (
        lambda like: visibility.documents(24, EDGES, KEY_EDGES, window=(2**31 - 1, 2**40), like=like), OF == OF_KEYS
    ),
    "documents-not-of-all": (
        lambda like: visibility.documents(24, [4, 9, 20], like=like),
        (I >= 4) & (I < 20) & (J >= 4) & (J < 20) & ((I < 9) == (J < 9)),
    ),
    "documents-used": (
        lambda like: visibility.documents(24, EDGES, KEY_EDGES, lengths=USED, key_lengths=KEYS_USED, is_causal=True, like=like),
        (OF == OF_KEYS) & (I < USED_END) & (J < KEYS_USED_END) & (J <= I - USED_END + KEYS_USED_END),
    ),
    "documents-from-the-first": (
        lambda like: visibility.documents(24, EDGES, KEY_EDGES, window=(2, 1), causal_alignment="upper_left", like=like),
        (OF == OF_KEYS) & (J >= FROM_FIRST - 2) & (J <= FROM_FIRST + 1),
    ),
    "documents-none": (lambda like: visibility.documents(24, [0], like=like), (I < 0) & (J < 0)),
}  # fmt: skip


def like(framework):
    if framework == "numpy":
        return None
    return jnp.zeros(1) if framework == "jax" else pytest.importorskip("torch").zeros(1)


@pytest.mark.parametrize("framework", ["numpy", "jax", "torch"])
@pytest.mark.parametrize("case", CASES)
def test_ranges_are_the_mask(case, framework):
    make, expected = CASES[case]
    ranges = make(like(framework))
    assert type(ranges).__module__.split(".")[0] in (framework, "jaxlib")
    assert ranges.ndim == 5
    assert str(ranges.dtype).endswith("int32")
    np.testing.assert_array_equal(visibility.matrix(ranges, 24), np.broadcast_to(expected, (len(ranges), 1, 24, 24)))
    if framework == "numpy":
        assert 0 not in ranges.strides  # which torch.tensor keeps, and DDP refuses


TILES = {
    "two-axes": ((6, 8), (2, 2), (3, 3)),
    "whole-rows": ((8, 4, 4), (2, 2, 2), (3, 1, 2)),
    "blocks": ((6, 8, 8), (2, 2, 2), (3, 3, 3)),
    "all": ((4, 4), (2, 2), (9, 9)),
    "one-axis": ((12,), (2,), (3,)),
}


@pytest.mark.parametrize("framework", ["numpy", "jax", "torch"])
@pytest.mark.parametrize("case", TILES)
def test_sliding_tiles(case, framework):
    """Of the tokens of the grid, wherever tile order puts them."""
    grid, tile, window = TILES[case]
    said = visibility.sliding_tile(grid, tile, window, like=like(framework))
    if framework == "numpy":
        assert 0 not in (said["key_ranges"] if "key_ranges" in said else said["mask"]).strides
    tokens = np.array([*itertools.product(*map(range, grid))])
    counts = np.array(grid) // tile
    order = np.lexsort([*tokens.T[::-1], *(tokens // tile).T[::-1]])
    places = (tokens // tile)[order]
    widths = np.minimum(window, counts)
    first = np.clip(places - widths // 2, 0, counts - widths)
    expected = ((first[:, None] <= places) & (places < (first + widths)[:, None])).all(-1)
    if "key_ranges" in said:
        got = visibility.matrix(said["key_ranges"], len(tokens))[0, 0]
    else:
        assert case == "blocks"
        size = said["mask_block_size"][0]
        mask = np.asarray(said["attn_mask" if framework == "torch" else "mask"])[0, 0]
        got = mask.repeat(size, 0).repeat(size, 1)
    np.testing.assert_array_equal(got, expected)


def test_numbers_may_be_traced():
    x = [jnp.asarray(np.random.default_rng(i).standard_normal((2, 24, 2, 4))) for i in range(3)]
    traces = []

    @jax.jit
    def attend(offset):
        traces.append(offset)
        return dot_product_attention(*x, key_ranges=visibility.causal(24, offset=offset, like=x[0]))

    for offset in (0, 5):
        np.testing.assert_allclose(
            attend(jnp.full(2, offset)),
            dot_product_attention(*x, local_window_size=(None, offset)),
            rtol=1e-5,
            atol=1e-5,
        )
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: visibility.block_causal(24, 0), "`block` must be positive: got 0"),
        (lambda: visibility.teacher_forcing(23, 5), "`queries` must be even"),
        (
            lambda: visibility.documents(24, EDGES, EDGES[1:]),
            "`key_cu_seqlens` must have as many edges as `cu_seqlens`",
        ),
        (
            lambda: visibility.documents(24, EDGES, lengths=EDGES),
            r"`lengths` must have shape \(4,\), one length for each document",
        ),
        (lambda: visibility.documents(24, EDGES, causal_alignment="left"), "`causal_alignment` must be"),
        (lambda: visibility.sliding_tile((6, 8), (2,), (3, 3)), "`tile` must have a number for each axis"),
        (lambda: visibility.sliding_tile((6, 8), (2, 2), (3, 0)), "`window` must be positive: got 0"),
        (lambda: visibility.causal(-1), "`queries` must be zero or more: got -1"),
        (lambda: visibility.sliding_tile((6, 8), (4, 2), (3, 3)), "`grid` must be a multiple of `tile`"),
    ],
)
def test_bad_arguments(make, match):
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.parametrize("framework", ["numpy", "jax", "torch"])
@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda like: visibility.causal(24.0, like=like), "`queries` must be an integer: got 24.0"),
        (lambda like: visibility.causal(24, offset=1.5, like=like), "`offset` must be of integers: got float"),
        (lambda like: visibility.prefix(24, [2.0, 3], like=like), "`length` must be of integers: got float"),
        (lambda like: visibility.documents(24, [0.0, 24], like=like), "`cu_seqlens` must be of integers: got float"),
        (lambda like: visibility.documents(24, EDGES, EDGES * 0.5, like=like), "`key_cu_seqlens` must be of integers"),
        (lambda like: visibility.documents(24, EDGES, key_lengths=USED * 0.5, like=like), "`key_lengths` must be of integers"),
        (lambda like: visibility.block_causal(24, 2.5, like=like), "`block` must be an integer: got 2.5"),
        (lambda like: visibility.sliding_tile((4, 4), (2.0, 2), (1, 1), like=like), "`tile` must be an integer: got 2.0"),
    ],
)  # fmt: skip
def test_no_number_is_rounded(make, match, framework):
    with pytest.raises(TypeError, match=match):
        make(like(framework))


@pytest.mark.parametrize("framework", ["numpy", "jax", "torch"])
def test_offsets_beyond_all_sequences(framework):
    for offset, seen in ((2**31 - 1, True), (np.int64(2**40), True), (-(2**31), False)):
        ranges = visibility.causal(4, offset=offset, like=like(framework))
        assert np.asarray(visibility.matrix(ranges, 4) == seen).all(), offset
