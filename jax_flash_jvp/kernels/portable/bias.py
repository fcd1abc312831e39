"""The gradient of an additive bias, with its tangent where one is asked for: dS, and ḋS, of `backward.py`, summed over the axes
along which the bias is broadcast.

A program computes a share of the sum of a tile: of a bias [1|B, 1|K|N, T, S] over some of the batch entries and heads that have
the tile in common, of one that varies along the keys alone over some of the queries, to [B, N, S], from which the rest is summed
up outside.  Shares are as many as fill the GPU, and are added in one order (`shares.py`): the same bits on every run.  A bias
that does not vary along the keys needs no such sum: a row of dS sums to the cotangent of ℓ.
"""

import triton
import triton.language as tl

from jax_flash_jvp.kernels.portable.scores import (
    INTEGERS,
    aligned,
    lengths,
    load_if,
    load_rows,
    of_rows,
    products,
    results_of_rows,
    scores,
    tangent_products,
    tangent_scores,
)
from jax_flash_jvp.kernels.portable.visibility import kept, selected, thinned, visible


@triton.jit(do_not_specialize_on_alignment=INTEGERS)
def score_side(
    Q, K, V, TQ, TK, TV, DO, TDO, LSE2, MU, DELTA, T_DELTA,
    BIAS, TBIAS, MASK, BLOCKS, Q_LENGTHS, K_LENGTHS, Q_SEGMENTS, K_SEGMENTS, RANGES, SEED,
    scale, HQ, GROUP, LQ, LK, s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, left, right, cap, rate,
    n_b, n_h, n_shares,
    D_BIAS, TD_BIAS,
    D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    s_q: tl.constexpr, s_k: tl.constexpr, s_v: tl.constexpr, UNIT_Q: tl.constexpr, UNIT_K: tl.constexpr, UNIT_V: tl.constexpr,
    FEATURES: tl.constexpr,
    HAS_TQ: tl.constexpr, HAS_TK: tl.constexpr, HAS_TV: tl.constexpr, HAS_TBIAS: tl.constexpr,
    HAS_DO: tl.constexpr, HAS_TDO: tl.constexpr, WANT: tl.constexpr, WANT_T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`n_b` batch entries and `n_h` heads share a matrix; both are one for a sum along an axis.  Sums are [n_shares, …]."""
    HAS_TS: tl.constexpr = HAS_TQ or HAS_TK or HAS_TBIAS
    BY_ROW: tl.constexpr = FEATURES.bias.rows
    LQ, LK = aligned(LQ, LK, FEATURES)
    n_m = tl.cdiv(LQ, BM)
    n_n = tl.cdiv(LK, BN)
    i_x = (tl.program_id(0)).to(tl.int64)
    i_n = i_x % n_n
    i_x = i_x // n_n
    i_m = 0
    n_tiles = n_m
    n_x = tl.num_programs(0) // (n_shares * n_n)  # matrices, or rows, in a share
    if BY_ROW:
        i_m = i_x % n_m
        i_x = i_x // n_m
        n_tiles = n_b * n_h
        n_x = n_x // n_m
    i_share = i_x // n_x
    i_h0 = i_x % n_x % (HQ // n_h) * n_h
    i_b0 = i_x % n_x // (HQ // n_h) * n_b

    o_r = tl.arange(0, BM)
    o_c = tl.arange(0, BN)
    b_sum = tl.zeros([BM, BN], tl.float32)
    b_tsum = tl.zeros([BM, BN], tl.float32)
    for i in range((i_share * n_tiles // n_shares).to(tl.int32), ((i_share + 1) * n_tiles // n_shares).to(tl.int32)):
        i_b = i_b0
        i_h = i_h0
        if BY_ROW:
            i_b += i // n_h
            i_h += i % n_h
        else:
            i_m = i
        q_offset = of_rows((i_b * s_qb + i_h * s_qh) * UNIT_Q, i_h, i_m * BM, BM, LQ, s_qh, UNIT_Q, s_q, FEATURES)
        k_offset = (i_b * s_kb + i_h // GROUP * s_kh) * UNIT_K
        v_offset = (i_b * s_vb + i_h // GROUP * s_vh) * UNIT_V
        o_offset, s_o = results_of_rows(i_b, i_h, i_m * BM, BM, HQ, LQ, DV, FEATURES)
        query_end, key_end = lengths(Q_LENGTHS, K_LENGTHS, i_b, LQ, LK, FEATURES)
        bias, t_bias, sight, head_seeds = selected(
            BIAS, TBIAS, MASK, BLOCKS, Q_SEGMENTS, K_SEGMENTS, RANGES, SEED,
            i_b, i_h, HQ, GROUP, LQ, LK, query_end, key_end, left, right, False, FEATURES,
        )  # fmt: skip
        row = i_m * BM
        column = i_n * BN
        o_m = (row + o_r)[:, None]
        o_n = (column + o_c)[None, :]
        x = (i_b * HQ + i_h) * LQ + row + o_r
        m_x = row + o_r < query_end
        b_q = load_rows(Q + q_offset, row, s_q, o_r, query_end, D, True)
        b_k = load_rows(K + k_offset, column, s_k, o_c, key_end, D, True)
        b_v = load_rows(V + v_offset, column, s_v, o_c, key_end, DV, True)
        b_s = products(b_q, b_k, PRECISION)  # [BM, BN]
        b_s, b_u = scores(b_s, scale, cap, bias, o_m, o_n, LQ, LK, FEATURES)
        b_p = tl.math.exp2(b_s - tl.load(LSE2 + x, mask=m_x, other=float("inf"))[:, None])
        b_seen = visible(o_m, o_n, column, sight, FEATURES)
        b_p = tl.where(b_seen, b_p, 0.0)
        b_kept = kept(o_m, o_n, head_seeds, rate, FEATURES)
        b_ds = -tl.load(DELTA + x, mask=m_x, other=0.0)[:, None]
        if HAS_DO:
            b_do = load_rows(DO + o_offset, row, s_o, o_r, query_end, DV, True)
            b_ds += thinned(products(b_do, b_v, PRECISION), b_kept, FEATURES)
        b_ds = b_p * b_ds
        if FEATURES.ranges.present:  # rows that nobody sees may hold anything
            b_ds = tl.where(b_seen, b_ds, 0.0)
        b_sum += b_ds
        if WANT_T:
            b_tds = -tl.load(T_DELTA + x, mask=m_x, other=0.0)[:, None]
            if HAS_TDO:
                b_tdo = load_rows(TDO + o_offset, row, s_o, o_r, query_end, DV, True)
                b_tds += thinned(products(b_tdo, b_v, PRECISION), b_kept, FEATURES)
            if HAS_TV and HAS_DO:
                b_tv = load_rows(TV + v_offset, column, s_v, o_c, key_end, DV, True)
                b_tds += thinned(products(b_do, b_tv, PRECISION), b_kept, FEATURES)
            b_tds = b_p * b_tds
            if HAS_TS:
                b_tq = load_if(HAS_TQ, b_q, TQ + q_offset, row, s_q, o_r, query_end, D, True)
                b_tk = load_if(HAS_TK, b_k, TK + k_offset, column, s_k, o_c, key_end, D, True)
                b_ts = tangent_products(b_q, b_k, b_tq, b_tk, HAS_TQ, HAS_TK, PRECISION)
                b_w = tangent_scores(b_ts, b_u, scale, t_bias, o_m, o_n, LQ, LK, FEATURES, HAS_TBIAS)
                b_tds += b_ds * (b_w - tl.load(MU + x, mask=m_x, other=0.0)[:, None])
            if FEATURES.ranges.present:
                b_tds = tl.where(b_seen, b_tds, 0.0)
            b_tsum += b_tds

    if WANT:
        store_sum(D_BIAS, b_sum, i_x, i_m * BM + o_r, i_n * BN + o_c, LQ, LK, BY_ROW)
    if WANT_T:
        store_sum(TD_BIAS, b_tsum, i_x, i_m * BM + o_r, i_n * BN + o_c, LQ, LK, BY_ROW)


@triton.jit
def store_sum(X, b_sum, i_x, o_m, o_n, LQ, LK, BY_ROW: tl.constexpr):
    if BY_ROW:
        p_x = X + (i_x * LQ + o_m[:, None]) * LK + o_n[None, :]
        tl.store(p_x, b_sum.to(X.dtype.element_ty), mask=(o_m < LQ)[:, None] & (o_n < LK)[None, :])
    else:
        tl.store(X + i_x * LK + o_n, tl.sum(b_sum, 0), mask=o_n < LK)


@triton.jit(do_not_specialize_on_alignment=INTEGERS)
def row_side(LSE, D_LSE, n, D_ROWS, BLOCK: tl.constexpr, HAS_D_LSE: tl.constexpr):
    """What rows of dS sum to: the cotangent of ℓ, but nothing where a row sees nothing."""
    x = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_rows = tl.zeros([BLOCK], tl.float32)
    if HAS_D_LSE:
        b_seen = tl.load(LSE + x, mask=x < n, other=0.0) > -float("inf")
        b_rows = tl.where(b_seen, tl.load(D_LSE + x, mask=x < n, other=0.0), 0.0)
    tl.store(D_ROWS + x, b_rows, mask=x < n)
