"""The backward kernels, with their tangent where one is asked for: the plain and the dual backward.

With d_o the cotangent of o, δ = rowsum(d_o∘o) (less the cotangent of ℓ), P recomputed from ℓ:

    dP = d_o Vᵀ − δ      dS = P∘dP      dQ = σ dS K      dK = σ dSᵀ Q      dV = Pᵀ d_o

and along tangents of everything that stands there, with w = Ṡ − μ, so that Ṗ = P∘w:

    ḋP = ḋ_o Vᵀ + d_o V̇ᵀ − δ̇      ḋS = P∘ḋP + dS∘w
    ḋQ = σ (ḋS K + dS K̇)      ḋK = σ (ḋSᵀ Q + dSᵀ Q̇)      ḋV = Pᵀ ḋ_o + (P∘w)ᵀ d_o

The tangent of the backward is also the reverse rule of forward + tangent: with d_o the cotangent of ȯ and ḋ_o that of o,
the plain results are the cotangents of the tangents and the dotted ones those of the operands.

Two kernels, since dK and dV sum over queries and dQ over keys: no atomics, the same bits on every run.
"""

import triton
import triton.language as tl

from jax_flash_jvp.kernels.portable.scores import (
    LOG2E,
    key_bounds,
    load_rows,
    load_statistic,
    log2_sum_exp,
    operand,
    query_block,
    query_bounds,
    scores,
    store_rows,
    tangent_scores,
    visible,
)


@triton.jit
def statistics(
    O, TO, DO, TDO, LSE, D_LSE, TD_LSE,
    HQ, LQ,
    LSE2, DELTA, T_DELTA,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
    HAS_TANGENT: tl.constexpr, HAS_DO: tl.constexpr, HAS_TDO: tl.constexpr, HAS_D_LSE: tl.constexpr, HAS_TD_LSE: tl.constexpr,
):  # fmt: skip
    """δ = rowsum(d_o∘o) − d_ℓ and its tangent, which the other two kernels take off dP and ḋP, and ℓ in base 2."""
    i_m, i_bh = query_block(LQ, HQ, BM, False)
    o_r = tl.arange(0, BM)
    o_d = tl.arange(0, BD)
    row = i_m * BM
    x = i_bh * LQ + row + o_r
    m_x = row + o_r < LQ
    s_o = HQ * D
    o_offset = (i_bh // HQ * LQ * HQ + i_bh % HQ) * D
    b_o = load_rows(O + o_offset, row, s_o, o_r, o_d, LQ, D, True).to(tl.float32)
    tl.store(LSE2 + x, log2_sum_exp(tl.load(LSE + x, mask=m_x)), mask=m_x)
    b_delta = tl.zeros([BM], tl.float32)
    if HAS_DO:
        b_do = load_rows(DO + o_offset, row, s_o, o_r, o_d, LQ, D, True).to(tl.float32)
        b_delta += tl.sum(b_do * b_o, 1)
    if HAS_D_LSE:
        b_delta -= tl.load(D_LSE + x, mask=m_x, other=0.0)
    tl.store(DELTA + x, b_delta, mask=m_x)
    if HAS_TANGENT:
        b_t_delta = tl.zeros([BM], tl.float32)
        if HAS_DO:
            b_to = load_rows(TO + o_offset, row, s_o, o_r, o_d, LQ, D, True).to(tl.float32)
            b_t_delta += tl.sum(b_do * b_to, 1)
        if HAS_TDO:
            b_tdo = load_rows(TDO + o_offset, row, s_o, o_r, o_d, LQ, D, True).to(tl.float32)
            b_t_delta += tl.sum(b_tdo * b_o, 1)
        if HAS_TD_LSE:
            b_t_delta -= tl.load(TD_LSE + x, mask=m_x, other=0.0)
        tl.store(T_DELTA + x, b_t_delta, mask=m_x)


@triton.jit
def key_side(
    Q, K, V, TQ, TK, TV, DO, TDO, LSE2, MU, DELTA, T_DELTA,
    scale, HQ, GROUP, LQ, LK, s_qb, s_kb, s_vb,
    DK, DV, TDK, TDV,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, UNIT: tl.constexpr,
    s_q: tl.constexpr, s_qh: tl.constexpr, s_k: tl.constexpr, s_kh: tl.constexpr, s_v: tl.constexpr, s_vh: tl.constexpr,
    CAUSAL: tl.constexpr, RAGGED: tl.constexpr, HAS_TQ: tl.constexpr, HAS_TK: tl.constexpr, HAS_TV: tl.constexpr,
    HAS_DO: tl.constexpr, HAS_TDO: tl.constexpr, HAS_TANGENT: tl.constexpr,
    WANT_K: tl.constexpr, WANT_V: tl.constexpr, WANT_TK: tl.constexpr, WANT_TV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(dK, dV) and their tangents for one block of keys: a pass over the queries of every head that reads these keys.
    Tiles are transposed, [BN, BM].  Absent query rows need no mask: their ℓ is +∞, so that P = 0."""
    HAS_TS: tl.constexpr = HAS_TQ or HAS_TK
    if not RAGGED:
        LQ = LQ // BM * BM  # the same, but with a divisor that the compiler sees: it loads statistics in pairs
    n_n = tl.cdiv(LK, BN)
    i_n = tl.program_id(0) % n_n
    i_bh = (tl.program_id(0) // n_n).to(tl.int64)  # of key heads
    HK = HQ // GROUP
    i_b = i_bh // HK
    i_h = i_bh % HK
    k_offset = i_b * s_kb * UNIT + i_h * s_kh
    v_offset = i_b * s_vb * UNIT + i_h * s_vh
    s_o = HQ * D

    o_m = tl.arange(0, BM)
    o_r = tl.arange(0, BN)
    o_d = tl.arange(0, BD)
    o_n = i_n * BN + o_r
    b_k = load_rows(K + k_offset, i_n * BN, s_k, o_r, o_d, LK, D, True)  # [BN, BD]
    b_tk = b_k
    if HAS_TK:
        b_tk = load_rows(TK + k_offset, i_n * BN, s_k, o_r, o_d, LK, D, True)
    if WANT_K or WANT_TK or WANT_TV:
        b_v = load_rows(V + v_offset, i_n * BN, s_v, o_r, o_d, LK, D, True)
        if HAS_TV:
            b_tv = load_rows(TV + v_offset, i_n * BN, s_v, o_r, o_d, LK, D, True)
    b_dk = tl.zeros([BN, BD], tl.float32) if WANT_K else 0.0
    b_dv = tl.zeros([BN, BD], tl.float32) if WANT_V else 0.0
    b_tdk = tl.zeros([BN, BD], tl.float32) if WANT_TK else 0.0
    b_tdv = tl.zeros([BN, BD], tl.float32) if WANT_TV else 0.0

    start, whole = query_bounds(i_n, LQ, BM, BN, CAUSAL)
    for i_g in range(GROUP):
        i_q = i_b * HQ + i_h * GROUP + i_g
        q_offset = i_b * s_qb * UNIT + (i_h * GROUP + i_g) * s_qh
        o_offset = (i_b * LQ * HQ + i_h * GROUP + i_g) * D
        for MASKED in tl.static_range(2):
            if not MASKED or CAUSAL:
                for row in range(start if MASKED else whole, whole if MASKED else LQ, BM):
                    x = i_q * LQ + row + o_m
                    m_x = row + o_m < LQ
                    b_q = load_rows(Q + q_offset, row, s_q, o_m, o_d, LQ, D, RAGGED)  # [BM, BD]
                    lse2 = load_statistic(LSE2, x, m_x, float("inf"), RAGGED)
                    b_p = tl.math.exp2(scores(b_k, b_q, PRECISION) * (scale * LOG2E) - lse2[None, :])  # [BN, BM]
                    if MASKED:
                        b_p = tl.where(visible((row + o_m)[None, :], o_n[:, None], LK, CAUSAL), b_p, 0.0)
                    if HAS_TQ:
                        b_tq = load_rows(TQ + q_offset, row, s_q, o_m, o_d, LQ, D, RAGGED)
                    else:
                        b_tq = b_q
                    if HAS_TS and (WANT_TK or WANT_TV):
                        b_w = tangent_scores(b_k, b_q, b_tk, b_tq, HAS_TK, HAS_TQ, PRECISION) * scale
                        b_w -= load_statistic(MU, x, m_x, 0.0, RAGGED)[None, :]
                    if HAS_DO:
                        b_do = load_rows(DO + o_offset, row, s_o, o_m, o_d, LQ, D, RAGGED)
                        if WANT_V:
                            b_dv = tl.dot(operand(b_p, b_do.dtype, PRECISION), b_do, b_dv, input_precision=PRECISION)
                        if HAS_TS and WANT_TV:
                            b_tdv = tl.dot(
                                operand(b_p * b_w, b_do.dtype, PRECISION), b_do, b_tdv, input_precision=PRECISION
                            )
                    if HAS_TDO:
                        b_tdo = load_rows(TDO + o_offset, row, s_o, o_m, o_d, LQ, D, RAGGED)
                        if WANT_TV:
                            b_tdv = tl.dot(
                                operand(b_p, b_tdo.dtype, PRECISION), b_tdo, b_tdv, input_precision=PRECISION
                            )
                    if WANT_K or WANT_TK:
                        b_ds = -load_statistic(DELTA, x, m_x, 0.0, RAGGED)[None, :]
                        if HAS_DO:
                            b_ds += scores(b_v, b_do, PRECISION)
                        b_ds = b_p * b_ds
                        if WANT_K:
                            b_dk = tl.dot(operand(b_ds, b_q.dtype, PRECISION), b_q, b_dk, input_precision=PRECISION)
                        if WANT_TK:
                            b_tds = -load_statistic(T_DELTA, x, m_x, 0.0, RAGGED)[None, :]
                            if HAS_TDO:
                                b_tds += scores(b_v, b_tdo, PRECISION)
                            if HAS_TV and HAS_DO:
                                b_tds += scores(b_tv, b_do, PRECISION)
                            b_tds = b_p * b_tds
                            if HAS_TS:
                                b_tds += b_ds * b_w
                            b_tdk = tl.dot(operand(b_tds, b_q.dtype, PRECISION), b_q, b_tdk, input_precision=PRECISION)
                            if HAS_TQ:
                                b_tdk = tl.dot(
                                    operand(b_ds, b_q.dtype, PRECISION), b_tq, b_tdk, input_precision=PRECISION
                                )

    s_g = HK * D
    g_offset = (i_b * LK * HK + i_h) * D
    if WANT_K:
        store_rows(DK + g_offset, i_n * BN, s_g, o_r, o_d, LK, D, b_dk * scale)
    if WANT_V:
        store_rows(DV + g_offset, i_n * BN, s_g, o_r, o_d, LK, D, b_dv)
    if WANT_TK:
        store_rows(TDK + g_offset, i_n * BN, s_g, o_r, o_d, LK, D, b_tdk * scale)
    if WANT_TV:
        store_rows(TDV + g_offset, i_n * BN, s_g, o_r, o_d, LK, D, b_tdv)


@triton.jit
def query_side(
    Q, K, V, TQ, TK, TV, DO, TDO, LSE2, MU, DELTA, T_DELTA,
    scale, HQ, GROUP, LQ, LK, s_qb, s_kb, s_vb,
    DQ, TDQ,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, UNIT: tl.constexpr,
    s_q: tl.constexpr, s_qh: tl.constexpr, s_k: tl.constexpr, s_kh: tl.constexpr, s_v: tl.constexpr, s_vh: tl.constexpr,
    CAUSAL: tl.constexpr, RAGGED: tl.constexpr, HAS_TQ: tl.constexpr, HAS_TK: tl.constexpr, HAS_TV: tl.constexpr,
    HAS_DO: tl.constexpr, HAS_TDO: tl.constexpr, WANT_Q: tl.constexpr, WANT_TQ: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ and its tangent for one block of queries: a pass over the keys."""
    HAS_TS: tl.constexpr = HAS_TQ or HAS_TK
    i_m, i_bh = query_block(LQ, HQ, BM, CAUSAL)
    i_b = i_bh // HQ
    i_h = i_bh % HQ
    q_offset = i_b * s_qb * UNIT + i_h * s_qh
    k_offset = i_b * s_kb * UNIT + i_h // GROUP * s_kh
    v_offset = i_b * s_vb * UNIT + i_h // GROUP * s_vh
    s_o = HQ * D
    o_offset = (i_b * LQ * HQ + i_h) * D

    o_r = tl.arange(0, BM)
    o_n = tl.arange(0, BN)
    o_d = tl.arange(0, BD)
    o_m = i_m * BM + o_r
    x = i_bh * LQ + o_m
    m_x = o_m < LQ
    b_q = load_rows(Q + q_offset, i_m * BM, s_q, o_r, o_d, LQ, D, True)  # [BM, BD]
    b_tq = b_q
    if HAS_TQ:
        b_tq = load_rows(TQ + q_offset, i_m * BM, s_q, o_r, o_d, LQ, D, True)
    if HAS_DO:
        b_do = load_rows(DO + o_offset, i_m * BM, s_o, o_r, o_d, LQ, D, True)
    if HAS_TDO:
        b_tdo = load_rows(TDO + o_offset, i_m * BM, s_o, o_r, o_d, LQ, D, True)
    lse2 = tl.load(LSE2 + x, mask=m_x, other=float("inf"))
    delta = tl.load(DELTA + x, mask=m_x, other=0.0)
    if WANT_TQ:
        t_delta = tl.load(T_DELTA + x, mask=m_x, other=0.0)
        mu = tl.load(MU + x, mask=m_x, other=0.0)
    b_dq = tl.zeros([BM, BD], tl.float32) if WANT_Q else 0.0
    b_tdq = tl.zeros([BM, BD], tl.float32) if WANT_TQ else 0.0

    whole, stop = key_bounds(i_m, LK, BM, BN, CAUSAL)
    for MASKED in tl.static_range(2):
        if not MASKED or CAUSAL or RAGGED:
            for row in range(whole if MASKED else 0, stop if MASKED else whole, BN):
                b_k = load_rows(K + k_offset, row, s_k, o_n, o_d, LK, D, MASKED)
                b_v = load_rows(V + v_offset, row, s_v, o_n, o_d, LK, D, MASKED)
                b_p = tl.math.exp2(scores(b_q, b_k, PRECISION) * (scale * LOG2E) - lse2[:, None])  # [BM, BN]
                if MASKED:
                    b_p = tl.where(visible(o_m[:, None], (row + o_n)[None, :], LK, CAUSAL), b_p, 0.0)
                b_ds = -delta[:, None]
                if HAS_DO:
                    b_ds += scores(b_do, b_v, PRECISION)
                b_ds = b_p * b_ds
                if WANT_Q:
                    b_dq = tl.dot(operand(b_ds, b_k.dtype, PRECISION), b_k, b_dq, input_precision=PRECISION)
                if WANT_TQ:
                    b_tk = b_k
                    if HAS_TK:
                        b_tk = load_rows(TK + k_offset, row, s_k, o_n, o_d, LK, D, MASKED)
                    b_tds = -t_delta[:, None]
                    if HAS_TDO:
                        b_tds += scores(b_tdo, b_v, PRECISION)
                    if HAS_TV and HAS_DO:
                        b_tv = load_rows(TV + v_offset, row, s_v, o_n, o_d, LK, D, MASKED)
                        b_tds += scores(b_do, b_tv, PRECISION)
                    b_tds = b_p * b_tds
                    if HAS_TS:
                        b_w = tangent_scores(b_q, b_k, b_tq, b_tk, HAS_TQ, HAS_TK, PRECISION) * scale - mu[:, None]
                        b_tds += b_ds * b_w
                    b_tdq = tl.dot(operand(b_tds, b_k.dtype, PRECISION), b_k, b_tdq, input_precision=PRECISION)
                    if HAS_TK:
                        b_tdq = tl.dot(operand(b_ds, b_k.dtype, PRECISION), b_tk, b_tdq, input_precision=PRECISION)

    if WANT_Q:
        store_rows(DQ + (i_b * LQ * HQ + i_h) * D, i_m * BM, s_o, o_r, o_d, LQ, D, b_dq * scale)
    if WANT_TQ:
        store_rows(TDQ + (i_b * LQ * HQ + i_h) * D, i_m * BM, s_o, o_r, o_d, LQ, D, b_tdq * scale)
