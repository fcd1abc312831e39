"""What every kernel does with one tile: addressing, scores, visibility.

Dialect: i_ index, o_ offsets, b_ block in registers, t_ tangent, d_ cotangent; constexprs in capitals.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def query_block(LQ, HQ, BM: tl.constexpr, CAUSAL: tl.constexpr):
    """(i_m, i_bh): this program's block of queries, and its batch entry and head."""
    n_m = tl.cdiv(LQ, BM)
    i_m = tl.program_id(0) % n_m
    if CAUSAL:
        i_m = n_m - 1 - i_m  # the longest rows first
    return i_m, (tl.program_id(0) // n_m).to(tl.int64)


@triton.jit
def rows(X, row, stride, o_r, o_d):
    """Pointers to rows row + o_r of the matrix at X, whose rows lie `stride` elements apart."""
    start = (tl.full([], 0, tl.int64) + row) * stride  # can pass 2³¹
    return X + start + (o_r[:, None] * stride + o_d[None, :])  # [R, BD]


@triton.jit
def load_rows(X, row, stride, o_r, o_d, L, D: tl.constexpr, MASKED: tl.constexpr):
    """Rows row + o_r; zeros past D, and past L if MASKED."""
    p_x = rows(X, row, stride, o_r, o_d)
    if MASKED:
        if D == o_d.shape[0]:
            return tl.load(p_x, mask=(row + o_r < L)[:, None], other=0.0)
        else:
            return tl.load(p_x, mask=(row + o_r < L)[:, None] & (o_d < D)[None, :], other=0.0)
    else:
        if D == o_d.shape[0]:
            return tl.load(p_x)
        else:
            return tl.load(p_x, mask=(o_d < D)[None, :], other=0.0)


@triton.jit
def store_rows(X, row, stride, o_r, o_d, L, D: tl.constexpr, b_x):
    p_x = rows(X, row, stride, o_r, o_d)
    tl.store(p_x, b_x.to(X.dtype.element_ty), mask=(row + o_r < L)[:, None] & (o_d < D)[None, :])


@triton.jit
def operand(b_x, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """fp32 values as an operand of a product in `dtype`.  The tensor cores cut float32 down to TF32, towards zero: a bias in
    every sum of probabilities, so they are rounded first.  (Launchers round the inputs.)"""
    if dtype == tl.float32 and PRECISION == "tf32":
        return ((b_x.to(tl.int32, bitcast=True) + 0x1000) & ~0x1FFF).to(tl.float32, bitcast=True)
    else:
        return b_x.to(dtype)


@triton.jit
def scores(b_a, b_b, PRECISION: tl.constexpr):
    """a bᵀ, accumulated in fp32."""
    return tl.dot(b_a, tl.trans(b_b), input_precision=PRECISION)


@triton.jit
def tangent_scores(b_q, b_k, b_tq, b_tk, HAS_TQ: tl.constexpr, HAS_TK: tl.constexpr, PRECISION: tl.constexpr):
    """(q̇ kᵀ + q k̇ᵀ), without the scale; with the roles of queries and keys swapped, its transpose."""
    if HAS_TQ:
        b_ts = tl.dot(b_tq, tl.trans(b_k), input_precision=PRECISION)
        if HAS_TK:
            b_ts = tl.dot(b_q, tl.trans(b_tk), b_ts, input_precision=PRECISION)
    else:
        b_ts = tl.dot(b_q, tl.trans(b_tk), input_precision=PRECISION)
    return b_ts


@triton.jit
def tangent_center(b_ts, LK, scale, BN: tl.constexpr):
    """A constant for each row, the mean of its tangent scores over the first tile of keys.  P∘Ṡ is rounded to the inputs'
    dtype: where the scores of a row move together, less is lost of P∘(Ṡ − c), and the rest of the formula is the same."""
    b_c = tl.sum(b_ts, 1) * (scale / tl.minimum(LK, BN))
    return tl.where(tl.abs(b_c) < float("inf"), b_c, 0.0)  # hidden keys may hold anything


@triton.jit
def log2_sum_exp(b_lse):
    """ℓ in base 2; +inf for rows that see nothing, so that their probabilities are zero."""
    return tl.where(b_lse == -float("inf"), float("inf"), b_lse * LOG2E)


@triton.jit
def load_statistic(X, x, m_x, other: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(X + x, mask=m_x, other=other)
    else:
        return tl.load(X + x)


@triton.jit
def visible(o_m, o_n, LK, CAUSAL: tl.constexpr):
    """Which of the keys o_n the queries o_m attend to; o_m and o_n are oriented like the tile."""
    if CAUSAL:
        return (o_n < LK) & (o_n <= o_m)
    else:
        return (o_n < LK) & (o_m >= 0)


@triton.jit
def key_bounds(i_m, LK, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr):
    """(whole, stop): tiles of keys before `whole` are visible to every query of block i_m, none from `stop` on is."""
    stop = LK
    whole = LK
    if CAUSAL:
        stop = tl.minimum(LK, (i_m + 1) * BM)
        whole = tl.minimum(LK, i_m * BM + 1)
    return whole // BN * BN, stop


@triton.jit
def query_bounds(i_n, LQ, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr):
    """(start, whole): no tile of queries before `start` sees key block i_n, every one from `whole` on sees it whole."""
    start = 0
    whole = 0
    if CAUSAL:
        start = i_n * BN // BM * BM
        whole = tl.minimum(tl.cdiv(i_n * BN + BN - 1, BM) * BM, tl.cdiv(LQ, BM) * BM)
    return start, whole
