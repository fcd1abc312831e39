"""The forward kernel, with its tangent where one is asked for, and the tangent alone from a saved log-sum-exp.

    o = P V                                  ℓ = logsumexp(S)
    ȯ = (P∘Ṡ) V + P V̇ − μ∘o                  μ = rowsum(P∘Ṡ)             Ṡ = σ (Q̇ Kᵀ + Q K̇ᵀ)

One pass over the keys with an online softmax (arXiv:2307.08691, algorithm 1).  (P∘Ṡ)V and P V̇ are rescaled alike, so they
share an accumulator, and μ∘o is taken off at the end: two [BM, BD] accumulators in all.  Ṡ and μ are counted from a constant
of each row, which cancels (`tangent_center`).
"""

import triton
import triton.language as tl

from jax_flash_jvp.kernels.portable.scores import (
    LN2,
    LOG2E,
    key_bounds,
    load_rows,
    log2_sum_exp,
    operand,
    query_block,
    scores,
    store_rows,
    tangent_center,
    tangent_scores,
    visible,
)


@triton.jit
def forward(
    Q, K, V, TQ, TK, TV,
    scale, HQ, GROUP, LQ, LK, s_qb, s_kb, s_vb,
    O, LSE, TO, MU,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, UNIT: tl.constexpr,
    s_q: tl.constexpr, s_qh: tl.constexpr, s_k: tl.constexpr, s_kh: tl.constexpr, s_v: tl.constexpr, s_vh: tl.constexpr,
    CAUSAL: tl.constexpr, RAGGED: tl.constexpr, NEGATIVE: tl.constexpr,
    HAS_TQ: tl.constexpr, HAS_TK: tl.constexpr, HAS_TV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    HAS_TS: tl.constexpr = HAS_TQ or HAS_TK
    HAS_TANGENT: tl.constexpr = HAS_TS or HAS_TV
    i_m, i_bh = query_block(LQ, HQ, BM, CAUSAL)
    i_b = i_bh // HQ
    i_h = i_bh % HQ
    q_offset = i_b * s_qb * UNIT + i_h * s_qh
    k_offset = i_b * s_kb * UNIT + i_h // GROUP * s_kh
    v_offset = i_b * s_vb * UNIT + i_h // GROUP * s_vh

    o_r = tl.arange(0, BM)
    o_n = tl.arange(0, BN)
    o_d = tl.arange(0, BD)
    o_m = i_m * BM + o_r
    b_q = load_rows(Q + q_offset, i_m * BM, s_q, o_r, o_d, LQ, D, True)  # [BM, BD]
    b_tq = b_q
    if HAS_TQ:
        b_tq = load_rows(TQ + q_offset, i_m * BM, s_q, o_r, o_d, LQ, D, True)
    b_m = tl.full([BM], -float("inf"), tl.float32)  # the running maximum, base 2
    b_l = tl.zeros([BM], tl.float32)
    b_o = tl.zeros([BM, BD], tl.float32)
    b_mu = tl.zeros([BM], tl.float32)
    b_to = tl.zeros([BM, BD], tl.float32) if HAS_TANGENT else 0.0

    if HAS_TS:
        b_k = load_rows(K + k_offset, 0, s_k, o_n, o_d, LK, D, True)
        b_tk = b_k
        if HAS_TK:
            b_tk = load_rows(TK + k_offset, 0, s_k, o_n, o_d, LK, D, True)
        b_c = tangent_center(tangent_scores(b_q, b_k, b_tq, b_tk, HAS_TQ, HAS_TK, PRECISION), LK, scale, BN)
    whole, stop = key_bounds(i_m, LK, BM, BN, CAUSAL)
    for MASKED in tl.static_range(2):  # first the tiles that every row sees whole, then the diagonal and the ragged end
        if not MASKED or CAUSAL or RAGGED:
            for row in range(whole if MASKED else 0, stop if MASKED else whole, BN):
                b_k = load_rows(K + k_offset, row, s_k, o_n, o_d, LK, D, MASKED)
                b_s = scores(b_q, b_k, PRECISION)  # [BM, BN]
                if HAS_TS:  # before the softmax, so that the tensor cores work while it runs
                    b_tk = b_k
                    if HAS_TK:
                        b_tk = load_rows(TK + k_offset, row, s_k, o_n, o_d, LK, D, MASKED)
                    b_ts = tangent_scores(b_q, b_k, b_tq, b_tk, HAS_TQ, HAS_TK, PRECISION)

                if MASKED:
                    b_s = tl.where(
                        visible(o_m[:, None], (row + o_n)[None, :], LK, CAUSAL), b_s * (scale * LOG2E), -float("inf")
                    )
                    m_new = tl.maximum(b_m, tl.max(b_s, 1))
                    b_p = tl.math.exp2(b_s - m_new[:, None])
                else:
                    if NEGATIVE:
                        m_new = tl.maximum(b_m, tl.min(b_s, 1) * (scale * LOG2E))
                    else:
                        m_new = tl.maximum(b_m, tl.max(b_s, 1) * (scale * LOG2E))
                    b_p = tl.math.exp2(b_s * (scale * LOG2E) - m_new[:, None])
                alpha = tl.math.exp2(b_m - m_new)
                b_m = m_new
                b_l = b_l * alpha + tl.sum(b_p, 1)
                b_v = load_rows(V + v_offset, row, s_v, o_n, o_d, LK, D, MASKED)
                b_o = tl.dot(operand(b_p, b_v.dtype, PRECISION), b_v, b_o * alpha[:, None], input_precision=PRECISION)

                if HAS_TANGENT:
                    b_to = b_to * alpha[:, None]
                if HAS_TV:
                    b_tv = load_rows(TV + v_offset, row, s_v, o_n, o_d, LK, D, MASKED)
                    b_to = tl.dot(operand(b_p, b_v.dtype, PRECISION), b_tv, b_to, input_precision=PRECISION)
                if HAS_TS:
                    b_pt = b_p * (b_ts * scale - b_c[:, None])
                    b_mu = b_mu * alpha + tl.sum(b_pt, 1)
                    b_to = tl.dot(operand(b_pt, b_v.dtype, PRECISION), b_v, b_to, input_precision=PRECISION)

    lse = (b_m + tl.math.log2(b_l)) * LN2
    b_l = tl.where(b_l == 0.0, 1.0, b_l)  # a row that sees nothing: zeros, ℓ = −∞
    b_o = b_o / b_l[:, None]
    s_o = HQ * D
    o_offset = (i_b * LQ * HQ + i_h) * D
    store_rows(O + o_offset, i_m * BM, s_o, o_r, o_d, LQ, D, b_o)
    tl.store(LSE + i_bh * LQ + o_m, lse, mask=o_m < LQ)
    if HAS_TANGENT:
        b_mu = b_mu / b_l
        store_rows(TO + o_offset, i_m * BM, s_o, o_r, o_d, LQ, D, b_to / b_l[:, None] - b_mu[:, None] * b_o)
        if HAS_TS:
            b_mu += tl.where(lse == -float("inf"), 0.0, b_c)
        tl.store(MU + i_bh * LQ + o_m, b_mu, mask=o_m < LQ)


@triton.jit
def tangent(
    Q, K, V, TQ, TK, TV, O, LSE,
    scale, HQ, GROUP, LQ, LK, s_qb, s_kb, s_vb,
    TO, MU,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, UNIT: tl.constexpr,
    s_q: tl.constexpr, s_qh: tl.constexpr, s_k: tl.constexpr, s_kh: tl.constexpr, s_v: tl.constexpr, s_vh: tl.constexpr,
    CAUSAL: tl.constexpr, RAGGED: tl.constexpr,
    HAS_TQ: tl.constexpr, HAS_TK: tl.constexpr, HAS_TV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Linear in the tangents: P comes from the saved ℓ, so nothing is rescaled, and o is the saved one."""
    HAS_TS: tl.constexpr = HAS_TQ or HAS_TK
    i_m, i_bh = query_block(LQ, HQ, BM, CAUSAL)
    i_b = i_bh // HQ
    i_h = i_bh % HQ
    q_offset = i_b * s_qb * UNIT + i_h * s_qh
    k_offset = i_b * s_kb * UNIT + i_h // GROUP * s_kh
    v_offset = i_b * s_vb * UNIT + i_h // GROUP * s_vh

    o_r = tl.arange(0, BM)
    o_n = tl.arange(0, BN)
    o_d = tl.arange(0, BD)
    o_m = i_m * BM + o_r
    b_q = load_rows(Q + q_offset, i_m * BM, s_q, o_r, o_d, LQ, D, True)  # [BM, BD]
    b_tq = b_q
    if HAS_TQ:
        b_tq = load_rows(TQ + q_offset, i_m * BM, s_q, o_r, o_d, LQ, D, True)
    lse2 = log2_sum_exp(tl.load(LSE + i_bh * LQ + o_m, mask=o_m < LQ, other=float("inf")))
    b_mu = tl.zeros([BM], tl.float32)
    b_to = tl.zeros([BM, BD], tl.float32)

    if HAS_TS:
        b_k = load_rows(K + k_offset, 0, s_k, o_n, o_d, LK, D, True)
        b_tk = b_k
        if HAS_TK:
            b_tk = load_rows(TK + k_offset, 0, s_k, o_n, o_d, LK, D, True)
        b_c = tangent_center(tangent_scores(b_q, b_k, b_tq, b_tk, HAS_TQ, HAS_TK, PRECISION), LK, scale, BN)
    whole, stop = key_bounds(i_m, LK, BM, BN, CAUSAL)
    for MASKED in tl.static_range(2):
        if not MASKED or CAUSAL or RAGGED:
            for row in range(whole if MASKED else 0, stop if MASKED else whole, BN):
                b_k = load_rows(K + k_offset, row, s_k, o_n, o_d, LK, D, MASKED)
                b_s = scores(b_q, b_k, PRECISION) * (scale * LOG2E)  # [BM, BN]
                if MASKED:
                    b_s = tl.where(visible(o_m[:, None], (row + o_n)[None, :], LK, CAUSAL), b_s, -float("inf"))
                b_p = tl.math.exp2(b_s - lse2[:, None])
                b_v = load_rows(V + v_offset, row, s_v, o_n, o_d, LK, D, MASKED)
                if HAS_TV:
                    b_tv = load_rows(TV + v_offset, row, s_v, o_n, o_d, LK, D, MASKED)
                    b_to = tl.dot(operand(b_p, b_v.dtype, PRECISION), b_tv, b_to, input_precision=PRECISION)
                if HAS_TS:
                    b_tk = b_k
                    if HAS_TK:
                        b_tk = load_rows(TK + k_offset, row, s_k, o_n, o_d, LK, D, MASKED)
                    b_ts = tangent_scores(b_q, b_k, b_tq, b_tk, HAS_TQ, HAS_TK, PRECISION)
                    b_pt = b_p * (b_ts * scale - b_c[:, None])
                    b_mu += tl.sum(b_pt, 1)
                    b_to = tl.dot(operand(b_pt, b_v.dtype, PRECISION), b_v, b_to, input_precision=PRECISION)

    s_o = HQ * D
    o_offset = (i_b * LQ * HQ + i_h) * D
    b_o = load_rows(O + o_offset, i_m * BM, s_o, o_r, o_d, LQ, D, True).to(tl.float32)
    store_rows(TO + o_offset, i_m * BM, s_o, o_r, o_d, LQ, D, b_to - b_mu[:, None] * b_o)
    if HAS_TS:
        b_mu += tl.where(lse2 == float("inf"), 0.0, b_c)
    tl.store(MU + i_bh * LQ + o_m, b_mu, mask=o_m < LQ)
