"""The forward kernel, with its tangent where one is asked for, or the tangent alone from a saved log-sum-exp.

    o = P V                                  ℓ = logsumexp(S)
    ȯ = (P∘(Ṡ − μ)) V + P V̇                  μ = rowsum(P∘Ṡ)             Ṡ = σ (Q̇ Kᵀ + Q K̇ᵀ) + ḃias

One pass over the keys with an online softmax (arXiv:2307.08691, algorithm 1), and with an online μ: a tile is multiplied with
c, the mean of Ṡ so far, in its place, and where the next tile moves c, the sum of ȯ moves by that much of o.  (P∘(Ṡ − c))V and
P V̇ share an accumulator: two [BM, DV] accumulators in all.  Dropout takes from P, after c is summed, what meets V and V̇.
"""

import triton
import triton.language as tl

from jax_flash_jvp import problem
from jax_flash_jvp.kernels.portable.scores import (
    INTEGERS,
    LN2,
    LOG2E,
    accumulated,
    aligned,
    lengths,
    load_if,
    load_rows,
    log2_sum_exp,
    of_rows,
    own_block,
    parts,
    products,
    recentered,
    results_of_rows,
    rows_before,
    scaled,
    scores,
    store_rows,
    sums,
    tangent_products,
    tangent_scores,
    unfolded,
    without,
)
from jax_flash_jvp.kernels.portable.visibility import (
    end_of_seen,
    exists,
    kept,
    key_bounds,
    listed,
    selected,
    shared_keys,
    span,
    thinned,
    tile_list,
    visible,
    where_seen,
    within,
)

HIDES_ROW = tl.constexpr(0.9 * problem.HIDES)  # with the scores that the bias is added to


@triton.jit
def softmax(b_s, b_m, scale, PHASE: tl.constexpr, NEGATIVE: tl.constexpr, LINEAR: tl.constexpr, FEATURES: tl.constexpr):
    """(P, what earlier sums are to be multiplied by, maxima in base 2) with these scores, which `scores` has scaled but in the
    last case, where the scale may be NEGATIVE."""
    if LINEAR:
        m_new = b_m
        b_p = tl.math.exp2(b_s - b_m[:, None])
        alpha = tl.full([b_s.shape[0]], 1.0, tl.float32)
    elif PHASE > 0 or FEATURES.bias.present or FEATURES.cap:
        m_new = tl.maximum(b_m, tl.max(b_s, 1))
        m_shift = tl.where(m_new == -float("inf"), 0.0, m_new)  # nothing seen so far
        b_p = tl.math.exp2(b_s - m_shift[:, None])
        alpha = tl.math.exp2(b_m - m_shift)
    else:
        if NEGATIVE:
            m_new = tl.maximum(b_m, tl.min(b_s, 1) * (scale * LOG2E))
        else:
            m_new = tl.maximum(b_m, tl.max(b_s, 1) * (scale * LOG2E))
        b_p = tl.math.exp2(b_s * (scale * LOG2E) - m_new[:, None])
        alpha = tl.math.exp2(b_m - m_new)
    return b_p, alpha, m_new


@triton.jit(do_not_specialize_on_alignment=INTEGERS)
def forward(
    Q, K, V, TQ, TK, TV, SAVED, BIAS, TBIAS, MASK, BLOCKS, Q_LENGTHS, K_LENGTHS, Q_SEGMENTS, K_SEGMENTS, RANGES, SEED, TILES,
    scale, HQ, GROUP, LQ, LK, s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, left, right, cap, rate, n_shares,
    O, LSE, TO, MU,
    D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    s_q: tl.constexpr, s_k: tl.constexpr, s_v: tl.constexpr, UNIT_Q: tl.constexpr, UNIT_K: tl.constexpr, UNIT_V: tl.constexpr,
    FEATURES: tl.constexpr, RAGGED: tl.constexpr, NEGATIVE: tl.constexpr,
    HAS_TQ: tl.constexpr, HAS_TK: tl.constexpr, HAS_TV: tl.constexpr, HAS_TBIAS: tl.constexpr,
    LINEAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """If LINEAR, the tangent alone, ȯ and μ: P comes from the SAVED ℓ, so nothing is rescaled.  Of a share of the keys o and ℓ as
    well, in which shares are merged; results are [n_shares, …]."""
    MERGED: tl.constexpr = FEATURES.key_shares
    HAS_TS: tl.constexpr = HAS_TQ or HAS_TK or HAS_TBIAS
    HAS_TANGENT: tl.constexpr = HAS_TS or HAS_TV
    LQ, LK = aligned(LQ, LK, FEATURES)
    i_m, i_bh, i_share = own_block(tl.cdiv(LQ, BM), n_shares, True, FEATURES)
    i_b = i_bh // HQ
    i_h = i_bh % HQ
    q_offset = of_rows((i_b * s_qb + i_h * s_qh) * UNIT_Q, i_h, i_m * BM, BM, LQ, s_qh, UNIT_Q, s_q, FEATURES)
    k_offset = (i_b * s_kb + i_h // GROUP * s_kh) * UNIT_K
    v_offset = (i_b * s_vb + i_h // GROUP * s_vh) * UNIT_V
    query_end, key_end = lengths(Q_LENGTHS, K_LENGTHS, i_b, LQ, LK, FEATURES)
    bias, t_bias, sight, head_seeds = selected(
        BIAS, TBIAS, MASK, BLOCKS, Q_SEGMENTS, K_SEGMENTS, RANGES, SEED,
        i_b, i_h, HQ, GROUP, LQ, LK, query_end, key_end, left, right, False, FEATURES,
    )  # fmt: skip

    o_r = tl.arange(0, BM)
    o_c = tl.arange(0, BN)
    o_m = (i_m * BM + o_r)[:, None]
    x = i_bh * LQ + i_m * BM + o_r
    m_x = i_m * BM + o_r < LQ
    b_q = load_rows(Q + q_offset, i_m * BM, s_q, o_r, query_end, D, True)  # [BM, D]
    b_tq = load_if(HAS_TQ, b_q, TQ + q_offset, i_m * BM, s_q, o_r, query_end, D, True)
    if LINEAR:
        b_m = log2_sum_exp(tl.load(SAVED + x, mask=m_x, other=float("inf")))
    else:
        b_m = tl.full([BM], -float("inf"), tl.float32)  # the running maximum, base 2
    b_l = tl.zeros([BM], tl.float32)
    b_o = sums(BM, DV)
    b_to = sums(BM, DV) if HAS_TANGENT else 0.0
    b_c = tl.zeros([BM], tl.float32)
    b_rest = tl.zeros([BM], tl.float32)

    start, first, whole, stop = key_bounds(i_m, query_end, key_end, left, right, BM, BN, FEATURES)
    tiles, counts = tile_list(TILES, i_b, i_h, HQ, GROUP, i_m, tl.cdiv(LQ, BM), tl.cdiv(LK, BN), FEATURES)
    share = shared_keys(start, stop, counts, i_share, n_shares, BN, FEATURES)
    for PHASE in tl.static_range(3):  # first the tiles that every row sees whole, then the diagonal and the ragged end
        if exists(PHASE, FEATURES, RAGGED):
            low, high = span(start, first, whole, stop, counts, BN, PHASE, False, FEATURES)
            low, high = within(low, high, share, FEATURES)
            for at in range(low, high, BN):
                row = listed(tiles, at, BN, FEATURES)
                o_n = (row + o_c)[None, :]
                b_k = load_rows(K + k_offset, row, s_k, o_c, key_end, D, PHASE > 0)
                if PRECISION == "tf32x3" and parts(D) > 2:  # held as operands, they would not leave any registers
                    again = unfolded(i_m * BM, row)
                    b_q = load_rows(Q + q_offset, again, s_q, o_r, query_end, D, True)
                    if HAS_TQ:
                        b_tq = load_rows(TQ + q_offset, again, s_q, o_r, query_end, D, True)
                b_s = products(b_q, b_k, PRECISION)  # [BM, BN]
                if HAS_TS:  # before the softmax, so that the tensor cores work while it runs
                    b_tk = load_if(HAS_TK, b_k, TK + k_offset, row, s_k, o_c, key_end, D, PHASE > 0)
                    b_ts = tangent_products(b_q, b_k, b_tq, b_tk, HAS_TQ, HAS_TK, PRECISION)

                b_u = 0.0
                if LINEAR or PHASE > 0 or FEATURES.bias.present or FEATURES.cap:
                    b_s, b_u = scores(b_s, scale, cap, bias, o_m, o_n, LQ, LK, FEATURES)
                    if PHASE > 0:
                        b_s = tl.where(visible(o_m, o_n, row, sight, FEATURES), b_s, -float("inf"))
                b_p, alpha, b_m = softmax(b_s, b_m, scale, PHASE, NEGATIVE, LINEAR, FEATURES)
                b_pl = tl.sum(b_p, 1)
                b_l_before = b_l * alpha
                b_l = b_l_before + b_pl
                b_kept = kept(o_m, o_n, head_seeds, rate, FEATURES)
                b_pv = thinned(b_p, b_kept, FEATURES)
                v_end = end_of_seen(o_m, o_n, row, key_end, sight, PHASE, FEATURES)
                b_v = load_rows(V + v_offset, row, s_v, o_c, v_end, DV, PHASE > 0)
                b_o = scaled(b_o, alpha[:, None])
                if HAS_TANGENT:
                    b_to = scaled(b_to, alpha[:, None])
                if HAS_TS:
                    b_ts = tangent_scores(b_ts, b_u, scale, t_bias, o_m, o_n, LQ, LK, FEATURES, HAS_TBIAS)
                    b_ts = where_seen(b_ts, o_m, o_n, row, sight, PHASE, FEATURES)
                    b_c, moved, b_rest = recentered(b_c, b_rest * alpha, tl.sum(b_p * b_ts, 1), b_pl, b_l_before, b_l)
                    b_to = without(b_to, moved[:, None], b_o)
                if HAS_TS or not LINEAR:
                    b_o = accumulated(b_o, b_pv, b_v, PRECISION)
                if HAS_TV:
                    b_tv = load_rows(TV + v_offset, row, s_v, o_c, v_end, DV, PHASE > 0)
                    b_to = accumulated(b_to, b_pv, b_tv, PRECISION)
                if HAS_TS:
                    b_pt = thinned(b_p * (b_ts - b_c[:, None]), b_kept, FEATURES)
                    b_to = accumulated(b_to, b_pt, b_v, PRECISION)

    o_offset, s_o = results_of_rows(i_b, i_h, i_m * BM, BM, HQ, LQ, DV, FEATURES)
    before = rows_before(i_share, tl.cdiv(LQ, BM), n_shares, LQ, FEATURES)
    x += before
    o_offset += before * DV
    if MERGED or not LINEAR:
        # a bias may hide a whole row, unless it is NaN; in others the probabilities of what it hides are zero anyhow
        if FEATURES.bias.present:
            b_l = tl.where((b_m <= HIDES_ROW * LOG2E) & (b_l == b_l), 0.0, b_l)
        lse = (b_m + tl.math.log2(b_l)) * LN2
        if LINEAR:  # where ℓ is −∞, b_m is +∞
            lse = tl.where(b_l == 0.0, -float("inf"), lse)
        per_l = tl.where(b_l == 0.0, 0.0, 1.0 / b_l)[:, None]  # a row that sees nothing: zeros, ℓ = −∞
        store_rows(O + o_offset, i_m * BM, s_o, o_r, LQ, DV, scaled(b_o, per_l))
        tl.store(LSE + x, lse, mask=m_x)
        if HAS_TANGENT:
            b_to = scaled(b_to, per_l)
        b_c = tl.where(b_l == 0.0, 0.0, b_c)
    if HAS_TANGENT:
        store_rows(TO + o_offset, i_m * BM, s_o, o_r, LQ, DV, b_to)
        tl.store(MU + x, b_c, mask=m_x)
