"""A mean key for each head, or for each row of scores, and whether keys have so much in common that it matters.

What rounding adds to the sum of a row of dS is multiplied by what its keys have in common: `query_side` takes it off, times a
mean key (README.md, "Rounding").  Where every query sees every key the head's will do, of some keys: `key_means`.  Else a row
must know nothing of keys that it does not see, and `row_means` gives P K, over some of the tiles that are seen whole and all
others.
"""

import triton
import triton.language as tl

from jax_flash_jvp.kernels.portable.scores import (
    INTEGERS,
    accumulated,
    aligned,
    before,
    lengths,
    load_block,
    load_rows,
    of_rows,
    own_block,
    parts,
    products,
    scaled,
    scores,
    store_rows,
    sums,
    width,
)
from jax_flash_jvp.kernels.portable.visibility import (
    end_of_seen,
    exists,
    key_bounds,
    listed,
    selected,
    span,
    tile_list,
    visible,
)

ENOUGH = tl.constexpr(1024)  # keys in tiles that are seen whole, of which at least so many are read


@triton.jit(do_not_specialize_on_alignment=INTEGERS)
def key_means(
    K, TK, V, K_LENGTHS, HK, LK, s_kb, s_kh, s_vb, s_vh, step,
    MEAN, T_MEAN, COMMON,
    D: tl.constexpr, DV: tl.constexpr, BN: tl.constexpr,
    s_k: tl.constexpr, s_v: tl.constexpr, UNIT_K: tl.constexpr, UNIT_V: tl.constexpr,
    FEATURES: tl.constexpr, HAS_TK: tl.constexpr,
):  # fmt: skip
    """The mean of every `step`-th key of a head, within its length, and of their tangents.  Keys have much in common where the
    square of the mean is more than twice what it would be by chance, if they had nothing; or it is NaN.  So much that rows of
    their own means pay, values too, where it is half the mean square: δ errs with them."""
    i = tl.program_id(0).to(tl.int64)
    key_end = LK
    if FEATURES.key_lengths:
        key_end = tl.minimum(LK, tl.load(K_LENGTHS + i // HK))
    n = tl.cdiv(key_end, step)
    MEANS: tl.constexpr = not FEATURES.row_means
    chance = 2.0 / tl.maximum(n, 1).to(tl.float32)
    k_offset = (i // HK * s_kb + i % HK * s_kh) * UNIT_K
    common = store_mean(MEAN + i * D, K + k_offset, s_k, step, n, chance, D, BN, MEANS)
    if HAS_TK:
        common = common | store_mean(T_MEAN + i * D, TK + k_offset, s_k, step, n, chance, D, BN, MEANS)
    if not MEANS:
        v_offset = (i // HK * s_vb + i % HK * s_vh) * UNIT_V
        common = common | store_mean(MEAN, V + v_offset, s_v, step, n, 0.5, DV, BN, False)
    tl.store(COMMON + i, common.to(tl.int32))


@triton.jit
def store_mean(
    MEAN, X, s_x: tl.constexpr, step, n, least, D: tl.constexpr, BN: tl.constexpr, STORED: tl.constexpr
):  # fmt: skip
    """Is the square of the mean, which is STORED, not less than so much of the mean square?"""
    o_r = tl.arange(0, BN)
    stride = tl.full([], s_x, tl.int64) * step
    per_n = 1.0 / tl.maximum(n, 1).to(tl.float32)
    squares = 0.0
    squared = 0.0  # the mean
    for PART in tl.static_range(parts(D)):
        o_d = before(D, PART) + tl.arange(0, width(D, PART))
        b_sum = tl.zeros([BN, width(D, PART)], tl.float32)
        b_squares = tl.zeros([BN, width(D, PART)], tl.float32)
        for row in range(0, n, 4 * BN):  # four at a time, whose loads do not wait for each other
            b_k = (load_block(X, row, stride, o_r, n, D, PART, True),)
            for PIECE in tl.static_range(1, 4):
                b_k = b_k + (load_block(X, row + PIECE * BN, stride, o_r, n, D, PART, True),)
            for PIECE in tl.static_range(4):
                b_x = b_k[PIECE].to(tl.float32)
                b_sum += b_x
                b_squares += b_x * b_x
        b_mean = tl.sum(b_sum, 0) * per_n
        if STORED:
            tl.store(MEAN + o_d, b_mean, mask=o_d < D)
        squares += tl.sum(b_squares) * per_n
        squared += tl.sum(b_mean * b_mean)
    return (squared <= least * squares) == 0  # true of NaN, too


@triton.jit(do_not_specialize_on_alignment=INTEGERS)
def row_means(
    Q, K, TK, COMMON, BIAS, TBIAS, MASK, BLOCKS, Q_LENGTHS, K_LENGTHS, Q_SEGMENTS, K_SEGMENTS, RANGES, SEED, TILES,
    scale, HQ, GROUP, LQ, LK, s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, left, right, cap, rate,
    MEAN, T_MEAN,
    D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    s_q: tl.constexpr, s_k: tl.constexpr, s_v: tl.constexpr, UNIT_Q: tl.constexpr, UNIT_K: tl.constexpr, UNIT_V: tl.constexpr,
    FEATURES: tl.constexpr, RAGGED: tl.constexpr,
    HAS_TQ: tl.constexpr, HAS_TK: tl.constexpr, HAS_TV: tl.constexpr, HAS_TBIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """P K and P K̇, of heads whose keys have much in common: a softmax over the tiles that are read."""
    LQ, LK = aligned(LQ, LK, FEATURES)
    i_m, i_bh, _ = own_block(tl.cdiv(LQ, BM), 1, True, FEATURES)
    i_b = i_bh // HQ
    i_h = i_bh % HQ
    if tl.load(COMMON + i_b * (HQ // GROUP) + i_h // GROUP) == 0:
        return
    q_offset = of_rows((i_b * s_qb + i_h * s_qh) * UNIT_Q, i_h, i_m * BM, BM, LQ, s_qh, UNIT_Q, s_q, FEATURES)
    k_offset = (i_b * s_kb + i_h // GROUP * s_kh) * UNIT_K
    query_end, key_end = lengths(Q_LENGTHS, K_LENGTHS, i_b, LQ, LK, FEATURES)
    bias, _, sight, _ = selected(
        BIAS, TBIAS, MASK, BLOCKS, Q_SEGMENTS, K_SEGMENTS, RANGES, SEED,
        i_b, i_h, HQ, GROUP, LQ, LK, query_end, key_end, left, right, False, FEATURES,
    )  # fmt: skip
    o_r = tl.arange(0, BM)
    o_c = tl.arange(0, BN)
    o_m = (i_m * BM + o_r)[:, None]
    b_q = load_rows(Q + q_offset, i_m * BM, s_q, o_r, query_end, D, True)  # [BM, D]
    b_m = tl.full([BM], -float("inf"), tl.float32)  # the running maximum, base 2
    b_l = tl.zeros([BM], tl.float32)
    b_mean = sums(BM, D)
    b_tmean = sums(BM, D) if HAS_TK else 0.0
    start, first, whole, stop = key_bounds(i_m, query_end, key_end, left, right, BM, BN, FEATURES)
    tiles, counts = tile_list(TILES, i_b, i_h, HQ, GROUP, i_m, tl.cdiv(LQ, BM), tl.cdiv(LK, BN), FEATURES)
    for PHASE in tl.static_range(3):
        if exists(PHASE, FEATURES, RAGGED):
            low, high = span(start, first, whole, stop, counts, BN, PHASE, False, FEATURES)
            step = BN
            if PHASE == 0:
                step = BN * tl.maximum(1, (high - low) // ENOUGH)
            for at in range(low, high, step):
                row = listed(tiles, at, BN, FEATURES)
                o_n = (row + o_c)[None, :]
                k_end = end_of_seen(o_m, o_n, row, key_end, sight, PHASE, FEATURES)
                b_k = load_rows(K + k_offset, row, s_k, o_c, k_end, D, PHASE > 0)
                b_s = products(b_q, b_k, PRECISION)  # [BM, BN]
                b_s = scores(b_s, scale, cap, bias, o_m, o_n, LQ, LK, FEATURES)[0]
                if PHASE > 0:
                    b_s = tl.where(visible(o_m, o_n, row, sight, FEATURES), b_s, -float("inf"))
                m_new = tl.maximum(b_m, tl.max(b_s, 1))
                m_shift = tl.where(m_new == -float("inf"), 0.0, m_new)  # nothing seen so far
                b_p = tl.math.exp2(b_s - m_shift[:, None])
                alpha = tl.math.exp2(b_m - m_shift)
                b_m = m_new
                b_l = b_l * alpha + tl.sum(b_p, 1)
                b_mean = accumulated(scaled(b_mean, alpha[:, None]), b_p, b_k, PRECISION)
                if HAS_TK:
                    b_tk = load_rows(TK + k_offset, row, s_k, o_c, k_end, D, PHASE > 0)
                    b_tmean = accumulated(scaled(b_tmean, alpha[:, None]), b_p, b_tk, PRECISION)
    per_l = tl.where(b_l == 0.0, 0.0, 1.0 / b_l)[:, None]
    offset = (i_b * LQ * HQ + i_h) * D
    store_rows(MEAN + offset, i_m * BM, HQ * D, o_r, LQ, D, scaled(b_mean, per_l))
    if HAS_TK:
        store_rows(T_MEAN + offset, i_m * BM, HQ * D, o_r, LQ, D, scaled(b_tmean, per_l))
