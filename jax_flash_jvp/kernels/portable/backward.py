"""The backward kernels, with their tangent where one is asked for: the plain and the dual backward.

With d_o the cotangent of o, δ = rowsum(d_o∘o) (less the cotangent of ℓ), P recomputed from ℓ:

    dP = d_o Vᵀ − δ      dS = P∘dP      dQ = σ dS K      dK = σ dSᵀ Q      dV = Pᵀ d_o      dbias = dS

and along tangents of everything that stands there, with w = Ṡ − μ, so that Ṗ = P∘w:

    ḋP = ḋ_o Vᵀ + d_o V̇ᵀ − δ̇      ḋS = P∘ḋP + dS∘w
    ḋQ = σ (ḋS K + dS K̇)      ḋK = σ (ḋSᵀ Q + dSᵀ Q̇)      ḋV = Pᵀ ḋ_o + (P∘w)ᵀ d_o      ḋbias = ḋS

The tangent of the backward is also the reverse rule of forward + tangent: with d_o the cotangent of ȯ and ḋ_o that of o,
the plain results are the cotangents of the tangents and the dotted ones those of the operands.

Short sequences have a kernel for all of it, `one_tile.py`.  Elsewhere there is one each for what sums over queries (dK, dV),
over keys (dQ), and over what a bias is broadcast along (`bias.py`), and one for δ before: no atomics, the same bits on every
run.  Dropout multiplies the products with V and what meets d_o.

A row of dS sums to the cotangent of ℓ, of ḋS to its tangent.  By how much a row exceeds that, as it is rounded and multiplied,
`query_side` takes off δ, for the kernels after it, and off dQ, times a mean key, of the head or of the row (`means.py`): see
README.md, "Rounding".
"""

import triton
import triton.language as tl

from jax_flash_jvp.kernels.portable.scores import (
    INTEGERS,
    accumulated,
    aligned,
    inner,
    lengths,
    load_if,
    load_rows,
    load_statistic,
    log2_sum_exp,
    of_rows,
    operand,
    own_block,
    products,
    results,
    results_of_rows,
    rows_before,
    scaled,
    scores,
    store_rows,
    sums,
    tangent_products,
    tangent_scores,
    under_cap,
)
from jax_flash_jvp.kernels.portable.visibility import (
    end_of_seen,
    exists,
    is_cut,
    kept,
    key_bounds,
    listed,
    query_bounds,
    selected,
    shared_keys,
    span,
    thinned,
    tile_list,
    visible,
    where_seen,
    within,
)


@triton.jit(do_not_specialize_on_alignment=INTEGERS)
def statistics(
    O, TO, DO, TDO, LSE, D_LSE, TD_LSE,
    HQ, LQ,
    LSE2, DELTA, T_DELTA,
    DV: tl.constexpr, BM: tl.constexpr,
    HAS_TANGENT: tl.constexpr, HAS_DO: tl.constexpr, HAS_TDO: tl.constexpr, HAS_D_LSE: tl.constexpr, HAS_TD_LSE: tl.constexpr,
    EMPTY: tl.constexpr,
):  # fmt: skip
    """δ = rowsum(d_o∘o) − d_ℓ and its tangent, which the other kernels take off dP and ḋP, and ℓ in base 2.  EMPTY: of a row that
    sees nothing δ is zero, though its cotangents be NaN."""
    n_m = tl.cdiv(LQ, BM)
    i_m = tl.program_id(0) % n_m
    i_bh = (tl.program_id(0) // n_m).to(tl.int64)
    o_r = tl.arange(0, BM)
    row = i_m * BM
    x = i_bh * LQ + row + o_r
    m_x = row + o_r < LQ
    s_o = HQ * DV
    o_offset = (i_bh // HQ * LQ * HQ + i_bh % HQ) * DV
    b_o = load_rows(O + o_offset, row, s_o, o_r, LQ, DV, True)
    b_lse2 = log2_sum_exp(tl.load(LSE + x, mask=m_x))
    tl.store(LSE2 + x, b_lse2, mask=m_x)
    b_delta = tl.zeros([BM], tl.float32)
    if HAS_DO:
        b_do = load_rows(DO + o_offset, row, s_o, o_r, LQ, DV, True)
        b_delta += inner(b_do, b_o)
    if HAS_D_LSE:
        b_delta -= tl.load(D_LSE + x, mask=m_x, other=0.0)
    if EMPTY:
        b_delta = tl.where(b_lse2 == float("inf"), 0.0, b_delta)
    tl.store(DELTA + x, b_delta, mask=m_x)
    if HAS_TANGENT:
        b_t_delta = tl.zeros([BM], tl.float32)
        if HAS_DO:
            b_to = load_rows(TO + o_offset, row, s_o, o_r, LQ, DV, True)
            b_t_delta += inner(b_do, b_to)
        if HAS_TDO:
            b_tdo = load_rows(TDO + o_offset, row, s_o, o_r, LQ, DV, True)
            b_t_delta += inner(b_tdo, b_o)
        if HAS_TD_LSE:
            b_t_delta -= tl.load(TD_LSE + x, mask=m_x, other=0.0)
        if EMPTY:
            b_t_delta = tl.where(b_lse2 == float("inf"), 0.0, b_t_delta)
        tl.store(T_DELTA + x, b_t_delta, mask=m_x)


@triton.jit(do_not_specialize_on_alignment=INTEGERS)
def key_side(
    Q, K, V, TQ, TK, TV, DO, TDO, LSE2, MU, DELTA, T_DELTA,
    BIAS, TBIAS, MASK, BLOCKS, Q_LENGTHS, K_LENGTHS, Q_SEGMENTS, K_SEGMENTS, RANGES, SEED, TILES,
    scale, HQ, GROUP, LQ, LK, s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, left, right, cap, rate,
    D_K, D_V, TD_K, TD_V,
    D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    s_q: tl.constexpr, s_k: tl.constexpr, s_v: tl.constexpr, UNIT_Q: tl.constexpr, UNIT_K: tl.constexpr, UNIT_V: tl.constexpr,
    FEATURES: tl.constexpr, RAGGED: tl.constexpr,
    HAS_TQ: tl.constexpr, HAS_TK: tl.constexpr, HAS_TV: tl.constexpr, HAS_TBIAS: tl.constexpr,
    HAS_DO: tl.constexpr, HAS_TDO: tl.constexpr,
    WANT_K: tl.constexpr, WANT_V: tl.constexpr, WANT_TK: tl.constexpr, WANT_TV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(dK, dV) and their tangents for one block of keys: a pass over the queries of every head that reads these keys.
    Tiles are transposed, [BN, BM].  Absent query rows need no mask: their ℓ is +∞, so that P = 0."""
    HAS_TS: tl.constexpr = HAS_TQ or HAS_TK or HAS_TBIAS
    LQ, LK = aligned(LQ, LK, FEATURES)
    n_n = tl.cdiv(LK, BN)
    i_n, i_bh, _ = own_block(n_n, 1, False, FEATURES)  # of key heads
    HK = HQ // GROUP
    i_b = i_bh // HK
    i_h = i_bh % HK
    k_offset = (i_b * s_kb + i_h * s_kh) * UNIT_K
    v_offset = (i_b * s_vb + i_h * s_vh) * UNIT_V
    query_end, key_end = lengths(Q_LENGTHS, K_LENGTHS, i_b, LQ, LK, FEATURES)

    o_c = tl.arange(0, BM)
    o_r = tl.arange(0, BN)
    o_n = (i_n * BN + o_r)[:, None]
    b_k = load_rows(K + k_offset, i_n * BN, s_k, o_r, key_end, D, True)  # [BN, D]
    b_tk = load_if(HAS_TK, b_k, TK + k_offset, i_n * BN, s_k, o_r, key_end, D, True)
    if WANT_K or WANT_TK:
        b_v = load_rows(V + v_offset, i_n * BN, s_v, o_r, key_end, DV, True)
        b_tv = load_if(HAS_TV, b_v, TV + v_offset, i_n * BN, s_v, o_r, key_end, DV, True)
    b_dk = sums(BN, D) if WANT_K else 0.0
    b_dv = sums(BN, DV) if WANT_V else 0.0
    b_tdk = sums(BN, D) if WANT_TK else 0.0
    b_tdv = sums(BN, DV) if WANT_TV else 0.0

    start, first, whole, stop = query_bounds(i_n, query_end, key_end, left, right, BM, BN, FEATURES)
    for i_g in range(GROUP):
        i_hq = i_h * GROUP + i_g
        i_q = i_b * HQ + i_hq
        q_offset = (i_b * s_qb + i_hq * s_qh) * UNIT_Q
        o_offset, s_o = results(i_b, i_hq, HQ, LQ, DV, FEATURES)
        bias, t_bias, sight, head_seeds = selected(
            BIAS, TBIAS, MASK, BLOCKS, Q_SEGMENTS, K_SEGMENTS, RANGES, SEED,
            i_b, i_hq, HQ, GROUP, LQ, LK, query_end, key_end, left, right, True, FEATURES,
        )  # fmt: skip
        tiles, counts = tile_list(TILES, i_b, i_hq, HQ, GROUP, i_n, n_n, tl.cdiv(LQ, BM), FEATURES)
        for PHASE in tl.static_range(3):
            if exists(PHASE, FEATURES, False):
                low, high = span(start, first, whole, stop, counts, BM, PHASE, True, FEATURES)
                for at in range(low, high, BM):
                    row = listed(tiles, at, BM, FEATURES)
                    q_rows = of_rows(q_offset, i_hq, row, BM, LQ, s_qh, UNIT_Q, s_q, FEATURES)
                    o_rows = of_rows(o_offset, i_hq, row, BM, LQ, 1, DV, s_o, FEATURES)
                    o_m = (row + o_c)[None, :]
                    x = i_q * LQ + row + o_c
                    m_x = row + o_c < query_end
                    end = end_of_seen(o_m, o_n, row, query_end, sight, PHASE, FEATURES)
                    b_q = load_rows(Q + q_rows, row, s_q, o_c, end, D, is_cut(RAGGED, PHASE, FEATURES))  # [BM, D]
                    lse2 = load_statistic(LSE2, x, m_x, float("inf"), RAGGED)
                    b_s = products(b_k, b_q, PRECISION)  # [BN, BM]
                    b_s, b_u = scores(b_s, scale, cap, bias, o_m, o_n, LQ, LK, FEATURES)
                    if FEATURES.cap:
                        b_u = where_seen(b_u, o_m, o_n, row, sight, PHASE, FEATURES)
                    b_p = tl.math.exp2(b_s - lse2[None, :])
                    if PHASE > 0:
                        b_p = tl.where(visible(o_m, o_n, row, sight, FEATURES), b_p, 0.0)
                    b_kept = kept(o_m, o_n, head_seeds, rate, FEATURES)
                    b_pv = thinned(b_p, b_kept, FEATURES)
                    b_tq = load_if(HAS_TQ, b_q, TQ + q_rows, row, s_q, o_c, end, D, is_cut(RAGGED, PHASE, FEATURES))
                    if HAS_TS and (WANT_TK or WANT_TV):
                        b_ts = tangent_products(b_k, b_q, b_tk, b_tq, HAS_TK, HAS_TQ, PRECISION)
                        b_ts = where_seen(b_ts, o_m, o_n, row, sight, PHASE, FEATURES)
                        b_w = tangent_scores(b_ts, b_u, scale, t_bias, o_m, o_n, LQ, LK, FEATURES, HAS_TBIAS)
                        b_w -= load_statistic(MU, x, m_x, 0.0, RAGGED)[None, :]
                    if HAS_DO:
                        b_do = load_rows(DO + o_rows, row, s_o, o_c, end, DV, is_cut(RAGGED, PHASE, FEATURES))
                        if WANT_V:
                            b_dv = accumulated(b_dv, b_pv, b_do, PRECISION)
                        if HAS_TS and WANT_TV:
                            b_tdv = accumulated(b_tdv, b_pv * b_w, b_do, PRECISION)
                    if HAS_TDO:
                        b_tdo = load_rows(TDO + o_rows, row, s_o, o_c, end, DV, is_cut(RAGGED, PHASE, FEATURES))
                        if WANT_TV:
                            b_tdv = accumulated(b_tdv, b_pv, b_tdo, PRECISION)
                    if WANT_K or WANT_TK:
                        b_ds = -load_statistic(DELTA, x, m_x, 0.0, RAGGED)[None, :]
                        if HAS_DO:
                            b_ds += thinned(products(b_v, b_do, PRECISION), b_kept, FEATURES)
                        b_ds = b_p * where_seen(b_ds, o_m, o_n, row, sight, PHASE, FEATURES)
                        b_dx = under_cap(b_ds, b_u, FEATURES)
                        if WANT_K:
                            b_dk = accumulated(b_dk, b_dx, b_q, PRECISION)
                        if WANT_TK:
                            b_tds = -load_statistic(T_DELTA, x, m_x, 0.0, RAGGED)[None, :]
                            if HAS_TDO:
                                b_tds += thinned(products(b_v, b_tdo, PRECISION), b_kept, FEATURES)
                            if HAS_TV and HAS_DO:
                                b_tds += thinned(products(b_tv, b_do, PRECISION), b_kept, FEATURES)
                            b_tds = b_p * where_seen(b_tds, o_m, o_n, row, sight, PHASE, FEATURES)
                            if HAS_TS:
                                b_tds += b_ds * b_w
                            b_tdx = under_cap(b_tds, b_u, FEATURES)
                            if FEATURES.cap and HAS_TS:
                                b_tdx -= b_dx * b_u * b_ts * (2.0 * scale / cap)
                            b_tdk = accumulated(b_tdk, b_tdx, b_q, PRECISION)
                            if HAS_TQ:
                                b_tdk = accumulated(b_tdk, b_dx, b_tq, PRECISION)

    k_offset = (i_b * LK * HK + i_h) * D
    v_offset = (i_b * LK * HK + i_h) * DV
    if WANT_K:
        store_rows(D_K + k_offset, i_n * BN, HK * D, o_r, LK, D, scaled(b_dk, scale))
    if WANT_V:
        store_rows(D_V + v_offset, i_n * BN, HK * DV, o_r, LK, DV, b_dv)
    if WANT_TK:
        store_rows(TD_K + k_offset, i_n * BN, HK * D, o_r, LK, D, scaled(b_tdk, scale))
    if WANT_TV:
        store_rows(TD_V + v_offset, i_n * BN, HK * DV, o_r, LK, DV, b_tdv)


@triton.jit(do_not_specialize_on_alignment=INTEGERS)
def query_side(
    Q, K, V, TQ, TK, TV, DO, TDO, LSE2, MU, DELTA, T_DELTA, D_LSE, TD_LSE, KEY_MEAN, T_KEY_MEAN, COMMON,
    BIAS, TBIAS, MASK, BLOCKS, Q_LENGTHS, K_LENGTHS, Q_SEGMENTS, K_SEGMENTS, RANGES, SEED, TILES,
    scale, HQ, GROUP, LQ, LK, s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, left, right, cap, rate, n_shares,
    D_Q, TD_Q, DELTA_OUT, T_DELTA_OUT,
    D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    s_q: tl.constexpr, s_k: tl.constexpr, s_v: tl.constexpr, UNIT_Q: tl.constexpr, UNIT_K: tl.constexpr, UNIT_V: tl.constexpr,
    FEATURES: tl.constexpr, RAGGED: tl.constexpr,
    HAS_TQ: tl.constexpr, HAS_TK: tl.constexpr, HAS_TV: tl.constexpr, HAS_TBIAS: tl.constexpr,
    HAS_DO: tl.constexpr, HAS_TDO: tl.constexpr, HAS_D_LSE: tl.constexpr, HAS_TD_LSE: tl.constexpr,
    WANT_Q: tl.constexpr, WANT_TQ: tl.constexpr, CORRECTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ and its tangent for one block of queries, and δ and δ̇ less the excess of row sums: a pass over the keys, or over a share
    of them; then results are [n_shares, …], and add up."""
    SUM_DS: tl.constexpr = CORRECTED and (WANT_Q or (WANT_TQ and HAS_TK))
    SUM_TDS: tl.constexpr = CORRECTED and WANT_TQ
    HAS_TS: tl.constexpr = HAS_TQ or HAS_TK or HAS_TBIAS
    LQ, LK = aligned(LQ, LK, FEATURES)
    i_m, i_bh, i_share = own_block(tl.cdiv(LQ, BM), n_shares, True, FEATURES)
    i_b, i_h = i_bh // HQ, i_bh % HQ
    q_offset = of_rows((i_b * s_qb + i_h * s_qh) * UNIT_Q, i_h, i_m * BM, BM, LQ, s_qh, UNIT_Q, s_q, FEATURES)
    k_offset = (i_b * s_kb + i_h // GROUP * s_kh) * UNIT_K
    v_offset = (i_b * s_vb + i_h // GROUP * s_vh) * UNIT_V
    o_offset, s_o = results_of_rows(i_b, i_h, i_m * BM, BM, HQ, LQ, DV, FEATURES)
    query_end, key_end = lengths(Q_LENGTHS, K_LENGTHS, i_b, LQ, LK, FEATURES)
    bias, t_bias, sight, head_seeds = selected(
        BIAS, TBIAS, MASK, BLOCKS, Q_SEGMENTS, K_SEGMENTS, RANGES, SEED,
        i_b, i_h, HQ, GROUP, LQ, LK, query_end, key_end, left, right, False, FEATURES,
    )  # fmt: skip

    o_r = tl.arange(0, BM)
    o_c = tl.arange(0, BN)
    o_m = (i_m * BM + o_r)[:, None]
    x = i_bh * LQ + i_m * BM + o_r
    m_x = i_m * BM + o_r < query_end
    b_q = load_rows(Q + q_offset, i_m * BM, s_q, o_r, query_end, D, True)  # [BM, D]
    b_tq = load_if(HAS_TQ, b_q, TQ + q_offset, i_m * BM, s_q, o_r, query_end, D, True)
    b_do = load_if(HAS_DO, b_q, DO + o_offset, i_m * BM, s_o, o_r, query_end, DV, True)
    b_tdo = load_if(HAS_TDO, b_q, TDO + o_offset, i_m * BM, s_o, o_r, query_end, DV, True)
    lse2 = tl.load(LSE2 + x, mask=m_x, other=float("inf"))
    delta = tl.load(DELTA + x, mask=m_x, other=0.0)
    if WANT_TQ:
        t_delta = tl.load(T_DELTA + x, mask=m_x, other=0.0)
        mu = tl.load(MU + x, mask=m_x, other=0.0)
    b_dq = sums(BM, D) if WANT_Q else 0.0
    b_tdq = sums(BM, D) if WANT_TQ else 0.0
    b_r, b_tr = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)  # row sums of dS and of ḋS
    b_e, b_te = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)  # of what rounding adds to them under a cap
    b_c = tl.zeros([BM], tl.float32)  # of P under the cap
    mean = i_b * (HQ // GROUP) + i_h // GROUP
    common = tl.load(COMMON + mean) if CORRECTED else 0

    start, first, whole, stop = key_bounds(i_m, query_end, key_end, left, right, BM, BN, FEATURES)
    tiles, counts = tile_list(TILES, i_b, i_h, HQ, GROUP, i_m, tl.cdiv(LQ, BM), tl.cdiv(LK, BN), FEATURES)
    share = shared_keys(start, stop, counts, i_share, n_shares, BN, FEATURES)
    for PHASE in tl.static_range(3):
        if exists(PHASE, FEATURES, RAGGED):
            low, high = span(start, first, whole, stop, counts, BN, PHASE, False, FEATURES)
            low, high = within(low, high, share, FEATURES)
            for at in range(low, high, BN):
                row = listed(tiles, at, BN, FEATURES)
                o_n = (row + o_c)[None, :]
                end = end_of_seen(o_m, o_n, row, key_end, sight, PHASE, FEATURES)
                b_k = load_rows(K + k_offset, row, s_k, o_c, end, D, PHASE > 0)
                b_v = load_rows(V + v_offset, row, s_v, o_c, end, DV, PHASE > 0)
                b_s = products(b_q, b_k, PRECISION)  # [BM, BN]
                b_s, b_u = scores(b_s, scale, cap, bias, o_m, o_n, LQ, LK, FEATURES)
                if FEATURES.cap:
                    b_u = where_seen(b_u, o_m, o_n, row, sight, PHASE, FEATURES)
                b_p = tl.math.exp2(b_s - lse2[:, None])
                if PHASE > 0:
                    b_p = tl.where(visible(o_m, o_n, row, sight, FEATURES), b_p, 0.0)
                b_kept = kept(o_m, o_n, head_seeds, rate, FEATURES)
                b_ds = -delta[:, None]
                if HAS_DO:
                    b_ds += thinned(products(b_do, b_v, PRECISION), b_kept, FEATURES)
                b_ds = b_p * where_seen(b_ds, o_m, o_n, row, sight, PHASE, FEATURES)
                b_dx = under_cap(b_ds, b_u, FEATURES)
                if FEATURES.cap and CORRECTED:
                    b_c += tl.sum(under_cap(b_p, b_u, FEATURES), 1)
                if SUM_DS:
                    b_r, b_e = with_rows(b_r, b_e, b_ds, b_dx, common, b_k[0].dtype, PRECISION, FEATURES)
                if WANT_Q:
                    b_dq = accumulated(b_dq, b_dx, b_k, PRECISION)
                if WANT_TQ:
                    b_tk = load_if(HAS_TK, b_k, TK + k_offset, row, s_k, o_c, end, D, PHASE > 0)
                    b_tds = -t_delta[:, None]
                    if HAS_TDO:
                        b_tds += thinned(products(b_tdo, b_v, PRECISION), b_kept, FEATURES)
                    if HAS_TV and HAS_DO:
                        b_tv = load_rows(TV + v_offset, row, s_v, o_c, end, DV, PHASE > 0)
                        b_tds += thinned(products(b_do, b_tv, PRECISION), b_kept, FEATURES)
                    b_tds = b_p * where_seen(b_tds, o_m, o_n, row, sight, PHASE, FEATURES)
                    if HAS_TS:
                        b_ts = tangent_products(b_q, b_k, b_tq, b_tk, HAS_TQ, HAS_TK, PRECISION)
                        b_ts = where_seen(b_ts, o_m, o_n, row, sight, PHASE, FEATURES)
                        b_w = tangent_scores(b_ts, b_u, scale, t_bias, o_m, o_n, LQ, LK, FEATURES, HAS_TBIAS)
                        b_tds += b_ds * (b_w - mu[:, None])
                    b_tdx = under_cap(b_tds, b_u, FEATURES)
                    if FEATURES.cap and HAS_TS:
                        b_tdx -= b_dx * b_u * b_ts * (2.0 * scale / cap)
                    if SUM_TDS:
                        b_tr, b_te = with_rows(b_tr, b_te, b_tds, b_tdx, common, b_k[0].dtype, PRECISION, FEATURES)
                    b_tdq = accumulated(b_tdq, b_tdx, b_k, PRECISION)
                    if HAS_TK:
                        b_tdq = accumulated(b_tdq, b_dx, b_tk, PRECISION)

    m_x = i_m * BM + o_r < LQ
    q_offset = (i_b * LQ * HQ + i_h) * D
    m_once = m_x
    if FEATURES.key_shares:  # what the first share alone has
        m_once = i_m * BM + o_r < tl.where(i_share == 0, LQ, 0)
        delta = tl.where(m_once, delta, 0.0)
        if WANT_TQ:
            t_delta = tl.where(m_once, t_delta, 0.0)
    if SUM_DS:
        delta, b_r = with_excess(delta, b_r, b_c, b_e, common, lse2, D_LSE, x, m_once, HAS_D_LSE, FEATURES)
        if WANT_Q:
            b_dq = without_mean(b_dq, b_r, KEY_MEAN, mean, q_offset, i_m * BM, HQ, o_r, LQ, common, D, FEATURES)
        if WANT_TQ and HAS_TK:
            b_tdq = without_mean(b_tdq, b_r, T_KEY_MEAN, mean, q_offset, i_m * BM, HQ, o_r, LQ, common, D, FEATURES)
    if SUM_TDS:
        t_delta, b_tr = with_excess(t_delta, b_tr, b_c, b_te, common, lse2, TD_LSE, x, m_once, HAS_TD_LSE, FEATURES)
        b_tdq = without_mean(b_tdq, b_tr, KEY_MEAN, mean, q_offset, i_m * BM, HQ, o_r, LQ, common, D, FEATURES)
    before = rows_before(i_share, tl.cdiv(LQ, BM), n_shares, LQ, FEATURES)
    x += before
    q_offset, s_dq = results_of_rows(i_b, i_h, i_m * BM, BM, HQ, LQ, D, FEATURES)
    q_offset += before * D
    tl.store(DELTA_OUT + x, delta, mask=m_x)
    if WANT_Q:
        store_rows(D_Q + q_offset, i_m * BM, s_dq, o_r, LQ, D, scaled(b_dq, scale))
    if WANT_TQ:
        tl.store(T_DELTA_OUT + x, t_delta, mask=m_x)
        store_rows(TD_Q + q_offset, i_m * BM, s_dq, o_r, LQ, D, scaled(b_tdq, scale))


@triton.jit
def with_rows(b_r, b_e, b_ds, b_dx, common, dtype: tl.constexpr, PRECISION: tl.constexpr, FEATURES: tl.constexpr):
    """Row sums with those of a tile, if keys have much in common: of dS as it is multiplied, or, under a cap, of dS and of what
    rounding adds to it there."""
    if common != 0:
        b_rounded = operand(b_dx, dtype, PRECISION).to(tl.float32)
        if FEATURES.cap:
            b_r += tl.sum(b_ds, 1)
            b_e += tl.sum(b_rounded - b_dx, 1)
        else:
            b_r += tl.sum(b_rounded, 1)
    return b_r, b_e


@triton.jit
def with_excess(delta, b_r, b_c, b_e, common, lse2, D_LSE, x, m_x, HAS_D_LSE: tl.constexpr, FEATURES: tl.constexpr):
    """(δ with the excess of row sums over the cotangent of ℓ, where they were made; the excess before the cap, with the row sums
    of P there and what rounding adds).  A row that sees nothing has no excess."""
    if HAS_D_LSE:
        b_r -= tl.where(lse2 == float("inf"), 0.0, tl.load(D_LSE + x, mask=m_x, other=0.0))
    b_r = tl.where(common != 0, b_r, 0.0)
    delta += b_r
    if FEATURES.cap:
        b_r = b_r * b_c + b_e
    return delta, b_r


@triton.jit
def mean_keys(MEAN, i, offset, row, HQ, o_r, LQ, common, D: tl.constexpr, FEATURES: tl.constexpr):
    """[1, D], of the i-th head of keys, or [BM, D], where each row has its own, of these rows; parts."""
    if FEATURES.row_means:
        return load_rows(MEAN + offset, row, HQ * D, o_r, tl.where(common != 0, LQ, 0), D, True)
    else:
        return load_rows(MEAN + i * D, 0, 0, tl.arange(0, 1), 1, D, False)


@triton.jit
def without_mean(b_x, b_r, MEAN, i, offset, row, HQ, o_r, LQ, common, D: tl.constexpr, FEATURES: tl.constexpr):
    """x − r m, of a number r for each row and the mean keys m."""
    b_mean = mean_keys(MEAN, i, offset, row, HQ, o_r, LQ, common, D, FEATURES)
    b_y = (b_x[0] - b_r[:, None] * b_mean[0],)
    for PART in tl.static_range(1, len(b_x)):
        b_y = b_y + (b_x[PART] - b_r[:, None] * b_mean[PART],)
    return b_y
