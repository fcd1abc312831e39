"""What every kernel does with one tile: addressing, products, scores.

Dialect: i_ index, o_ offsets, b_ block in registers, t_ tangent, d_ cotangent; constexprs in capitals.  FEATURES names what a
call uses beyond plain attention (`features.py`); what it does not name is not compiled.  `o_m` and `o_n`, queries and
keys, are oriented like the tile, one a column and the other a row: so every function here serves tiles and their transposes.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
HEADS_SHARING_L2 = tl.constexpr(8)  # heads whose streamed rows are to share the L2 cache
# What kernels take by number.  From PyTorch they would be compiled again for each mixture of those that are multiples of 16, from
# JAX for none; what they make use of is in FEATURES, see `aligned`.
INTEGERS = (
    "HQ", "GROUP", "LQ", "LK", "s_qb", "s_qh", "s_kb", "s_kh", "s_vb", "s_vh", "left", "right", "heads", "n_tiles", "n_b", "n_h",
    "HK", "step", "n", "n_shares",
)  # fmt: skip


# ------------------------------------------------------------------------------------------------ addressing


@triton.jit
def own_block(n_blocks, n_shares, FROM_END: tl.constexpr, FEATURES: tl.constexpr):
    """(block, batch entry and head, share of its keys) of this program, as in `hopper/programs.py`."""
    i = tl.program_id(0)
    n = tl.num_programs(0)
    i_share = 0
    if FEATURES.key_shares:
        i_share = i % n_shares
        i = i // n_shares
        n = n // n_shares
    if FEATURES.later_longer:
        first = i // (HEADS_SHARING_L2 * n_blocks) * HEADS_SHARING_L2
        heads = tl.minimum(n // n_blocks - first, HEADS_SHARING_L2)
        i -= first * n_blocks
        block = i // heads
        if FROM_END:
            block = n_blocks - 1 - block
        return block, (first + i % heads).to(tl.int64), i_share
    else:
        return i % n_blocks, (i // n_blocks).to(tl.int64), i_share


@triton.jit
def rows_before(i_share, n_blocks, n_shares, LQ, FEATURES: tl.constexpr):
    """Rows of results, of all heads, in the shares before."""
    if FEATURES.key_shares:
        return i_share.to(tl.int64) * (tl.num_programs(0) // (n_blocks * n_shares)) * LQ
    else:
        return 0


@triton.constexpr_function
def widths(channels):
    """The widths of the blocks that hold a row of so many channels: powers of two, as products want.  There is one, or two where
    these are narrower together.  Wide rows have blocks of 64: wider operands would crowd the registers."""
    if channels > 128:
        blocks, rest = [64] * (channels // 64), channels % 64
    else:
        low = max(16, 1 << (channels.bit_length() - 1))
        rest = max(0, channels - low)
        rest, blocks = (0, [2 * low]) if rest > low // 2 or (rest and low == 16) else (rest, [low])
    return (*blocks, max(16, 1 << (rest - 1).bit_length())) if rest else tuple(blocks)


@triton.constexpr_function
def width(channels, part):
    return widths(channels)[part]


@triton.constexpr_function
def before(channels, part):
    return sum(widths(channels)[:part])


@triton.constexpr_function
def parts(channels):
    return len(widths(channels))


@triton.constexpr_function
def far(stride, rows):
    """Whether so many rows span more than 32 bits count; strides of results, which are contiguous, are not known and short."""
    return isinstance(stride, int) and stride * rows >= 2**31


@triton.jit
def block_pointers(X, row, stride, o_r, D: tl.constexpr, PART: tl.constexpr):
    """Pointers to rows row + o_r of the matrix at X, whose rows lie `stride` elements apart, and their channels."""
    o_d = before(D, PART) + tl.arange(0, width(D, PART))
    start = (tl.full([], 0, tl.int64) + row) * stride  # can pass 2³¹
    if far(stride, o_r.shape[0]):
        o_r = o_r.to(tl.int64)
    return X + start + (o_r[:, None] * stride + o_d[None, :]), o_d


@triton.jit
def load_block(X, row, stride, o_r, L, D: tl.constexpr, PART: tl.constexpr, MASKED: tl.constexpr):
    p_x, o_d = block_pointers(X, row, stride, o_r, D, PART)
    if before(D, PART) + width(D, PART) <= D:
        if MASKED:
            return tl.load(p_x, mask=(row + o_r < L)[:, None], other=0.0)
        else:
            return tl.load(p_x)
    else:
        if MASKED:
            return tl.load(p_x, mask=(row + o_r < L)[:, None] & (o_d < D)[None, :], other=0.0)
        else:
            return tl.load(p_x, mask=(o_d < D)[None, :], other=0.0)


@triton.jit
def load_rows(X, row, stride, o_r, L, D: tl.constexpr, MASKED: tl.constexpr):
    """Rows row + o_r as a tuple of blocks; zeros past D, and past L if MASKED."""
    b_x = (load_block(X, row, stride, o_r, L, D, 0, MASKED),)
    for PART in tl.static_range(1, parts(D)):
        b_x = b_x + (load_block(X, row, stride, o_r, L, D, PART, MASKED),)
    return b_x


@triton.jit
def load_if(PRESENT: tl.constexpr, b_x, X, row, stride, o_r, end, D: tl.constexpr, MASKED: tl.constexpr):
    """What `load_rows` loads, or b_x, which nobody reads, where there is no such array."""
    if PRESENT:
        return load_rows(X, row, stride, o_r, end, D, MASKED)
    else:
        return b_x


@triton.jit
def store_rows(X, row, stride, o_r, L, D: tl.constexpr, b_x):
    for PART in tl.static_range(len(b_x)):
        p_x, o_d = block_pointers(X, row, stride, o_r, D, PART)
        tl.store(p_x, b_x[PART].to(X.dtype.element_ty), mask=(row + o_r < L)[:, None] & (o_d < D)[None, :])


@triton.jit
def load_statistic(X, x, m_x, other: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(X + x, mask=m_x, other=other)
    else:
        return tl.load(X + x)


@triton.jit
def unfolded(x, tick):
    """x, but so that the compiler, which does not know that `tick` is small, works out nothing of it beforehand: else what
    depends on x, as descriptors or operands of resident tiles, stays in registers throughout a loop."""
    return x + (tick >> 30)


# ------------------------------------------------------------------------------------------------ one head's share


@triton.jit
def lengths(Q_LENGTHS, K_LENGTHS, i_b, LQ, LK, FEATURES: tl.constexpr):
    """(queries, keys) of this batch entry; what lies beyond is padding."""
    if FEATURES.query_lengths:
        if FEATURES.rows_of_head == 1:
            LQ = tl.where(tl.load(Q_LENGTHS + i_b) > 0, LQ, 0)
        else:
            LQ = tl.minimum(LQ, tl.load(Q_LENGTHS + i_b))
    if FEATURES.key_lengths:
        LK = tl.minimum(LK, tl.load(K_LENGTHS + i_b))
    return LQ, LK


@triton.jit
def results(i_b, i_h, HQ, LQ, D: tl.constexpr, FEATURES: tl.constexpr):
    """(offset, stride) of the rows of a head in an array like the output, [B, T, N, D]."""
    T: tl.constexpr = FEATURES.rows_of_head
    if T == 1:
        return (i_b * HQ + i_h) * LQ * D, D
    elif T > 1:
        return (i_b * LQ * HQ + i_h) * D, HQ * (LQ // T) * D  # the offset is for `of_rows`
    else:
        return (i_b * LQ * HQ + i_h) * D, HQ * D


@triton.jit
def of_rows(
    offset, i_h, row, R: tl.constexpr, LQ, s_h, UNIT: tl.constexpr, s_t, FEATURES: tl.constexpr
):  # fmt: skip
    """The offset of the R rows from `row` on, less their multiples of s_t.  Where these are T queries of each of a few heads, row
    g T + t lies at g s_h UNIT + t s_t from the first of these heads, so that each has its own, [R, 1]; `offset` counts the heads
    before as if each were alone."""
    T: tl.constexpr = FEATURES.rows_of_head
    if T > 1:
        i_g = ((row + tl.arange(0, R)) // T).to(tl.int64)[:, None]
        return offset + (i_h * (LQ // T - 1) + i_g) * s_h * UNIT - i_g * T * s_t
    else:
        return offset


@triton.jit
def results_of_rows(i_b, i_h, row, R: tl.constexpr, HQ, LQ, D: tl.constexpr, FEATURES: tl.constexpr):
    """`results`, of the R rows from `row` on."""
    offset, s_t = results(i_b, i_h, HQ, LQ, D, FEATURES)
    return of_rows(offset, i_h, row, R, LQ, 1, D, s_t, FEATURES), s_t


@triton.jit
def head_slice(X, i_b, i_h, HQ, GROUP, size, AXES: tl.constexpr):
    """The part for this batch entry and query head of an array [1|B, 1|K|N, size], size int64."""
    if AXES.heads:
        i_b = i_b * HQ + i_h if AXES.batch else i_h
    elif AXES.groups:
        i_b = i_b * (HQ // GROUP) + i_h // GROUP if AXES.batch else i_h // GROUP
    elif not AXES.batch:
        i_b = 0
    return X + i_b * size


@triton.jit
def aligned(LQ, LK, FEATURES: tl.constexpr):
    """The lengths, of which the compiler now sees whether they are multiples of 16: several statistics or segments of rows are
    read at a time then."""
    if FEATURES.queries_aligned:
        LQ = LQ // 16 * 16
    if FEATURES.keys_aligned:
        LK = LK // 16 * 16
    return LQ, LK


@triton.jit
def pitch(LK, AXES: tl.constexpr):
    """From a row of a matrix [1|T, S] to the next: in jobs.py rows are padded to a multiple that the compiler is to see."""
    return (LK + 15) // 16 * 16 if AXES.rows else LK


@triton.jit
def matrix(X, i_b, i_h, HQ, GROUP, LQ, LK, AXES: tl.constexpr):
    """The matrix for this batch entry and query head of an array [1|B, 1|K|N, 1|T, 1|S]."""
    if AXES.present:
        size = tl.full([], 1, tl.int64)
        if AXES.rows:
            size *= LQ
        if AXES.columns:
            size *= pitch(LK, AXES)
        return head_slice(X, i_b, i_h, HQ, GROUP, size, AXES)
    else:
        return X


@triton.jit
def load_scores(X, o_m, o_n, LQ, LK, AXES: tl.constexpr):
    """The tile of a matrix [1|T, 1|S], or its only row or column."""
    if AXES.rows and AXES.columns:
        n = pitch(LK, AXES)
        return tl.load(X + (o_m.to(tl.int64) * n + o_n), mask=(o_m < LQ) & (o_n < n), other=0)
    elif AXES.rows:
        return tl.load(X + o_m, mask=o_m < LQ, other=0)
    elif AXES.columns:
        return tl.load(X + o_n, mask=o_n < LK, other=0)
    else:
        return tl.load(X + (o_m + o_n) * 0)


# ------------------------------------------------------------------------------------------------ scores

UNROUNDED = tl.constexpr("tf32, inputs as they are")  # a PRECISION; "tf32" has inputs that are rounded


@triton.jit
def operand(b_x, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """fp32 values as an operand of a product in `dtype`.  The tensor cores cut float32 down to TF32, towards zero: a bias in
    every sum of probabilities, so they are rounded first, to nearest: less their 2¹³-fold they have eleven bits left.  (What
    exceeds 4e34 becomes infinite or NaN, and so does what is infinite.)"""
    if dtype == tl.float32 and (PRECISION == "tf32" or PRECISION == UNROUNDED):
        b_more = b_x * 8192.0
        return (b_x - b_more) + b_more
    else:
        return b_x.to(dtype)


@triton.jit
def input_operand(b_x, PRECISION: tl.constexpr):
    """A block of an input as an operand, which a launcher has rounded unless it is UNROUNDED."""
    if PRECISION == UNROUNDED:
        return to_tf32(b_x)
    else:
        return b_x


@triton.jit
def to_tf32(b_x):
    """fp32 rounded to nearest, in the middle away from zero; what is above the largest is infinite, and NaN is as it was."""
    b_bits = (b_x.to(tl.int32, bitcast=True) + 2**12) & -(2**13)
    return tl.where(b_x == b_x, b_bits.to(tl.float32, bitcast=True), b_x)


@triton.jit
def dot(b_a, b_b, b_sum, PRECISION: tl.constexpr):
    """sum + a b of operands."""
    INPUTS: tl.constexpr = "tf32" if PRECISION == UNROUNDED else PRECISION
    return tl.dot(b_a, b_b, b_sum, input_precision=INPUTS)


@triton.jit
def products(b_a, b_b, PRECISION: tl.constexpr):
    """a bᵀ of rows a and b of inputs, accumulated in fp32."""
    b_ab = None
    for PART in tl.static_range(len(b_a)):
        b_ab = dot(input_operand(b_a[PART], PRECISION), tl.trans(input_operand(b_b[PART], PRECISION)), b_ab, PRECISION)
    return b_ab


@triton.jit
def sums(R: tl.constexpr, D: tl.constexpr):
    """Zeros, in blocks like rows."""
    b_x = (tl.zeros([R, width(D, 0)], tl.float32),)
    for PART in tl.static_range(1, parts(D)):
        b_x = b_x + (tl.zeros([R, width(D, PART)], tl.float32),)
    return b_x


@triton.jit
def scaled(b_x, factor):
    b_y = (b_x[0] * factor,)
    for PART in tl.static_range(1, len(b_x)):
        b_y = b_y + (b_x[PART] * factor,)
    return b_y


@triton.jit
def accumulated(b_sum, b_p, b_x, PRECISION: tl.constexpr):
    """sum + p x, of rows x of an input and fp32 values p."""
    b_p = operand(b_p, b_x[0].dtype, PRECISION)
    b_y = (dot(b_p, input_operand(b_x[0], PRECISION), b_sum[0], PRECISION),)
    for PART in tl.static_range(1, len(b_x)):
        b_y = b_y + (dot(b_p, input_operand(b_x[PART], PRECISION), b_sum[PART], PRECISION),)
    return b_y


@triton.jit
def inner(b_a, b_b):
    """rowsum(a∘b), in fp32."""
    b_ab = tl.sum(b_a[0].to(tl.float32) * b_b[0].to(tl.float32), 1)
    for PART in tl.static_range(1, len(b_a)):
        b_ab += tl.sum(b_a[PART].to(tl.float32) * b_b[PART].to(tl.float32), 1)
    return b_ab


@triton.jit
def without(b_x, factor, b_y):
    """x − factor y, in fp32."""
    b_z = (b_x[0] - factor * b_y[0].to(tl.float32),)
    for PART in tl.static_range(1, len(b_x)):
        b_z = b_z + (b_x[PART] - factor * b_y[PART].to(tl.float32),)
    return b_z


@triton.jit
def tanh(b_x):
    """To fp32's precision, also near zero (a polynomial there, as in Moshier's Cephes)."""
    b_z = b_x * b_x
    b_near = -5.70498872745e-3 * b_z + 2.06390887954e-2
    b_near = (b_near * b_z - 5.37397155531e-2) * b_z + 1.33314422036e-1
    b_near = (b_near * b_z - 3.33332819422e-1) * b_z * b_x + b_x
    b_far = 1.0 - 2.0 / (tl.math.exp2(tl.abs(b_x) * (2.0 * LOG2E)) + 1.0)
    return tl.where(tl.abs(b_x) < 0.625, b_near, tl.where(b_x < 0, -b_far, b_far))


@triton.jit
def scores(b_s, scale, cap, bias, o_m, o_n, LQ, LK, FEATURES: tl.constexpr):
    """(S in base 2, its tanh where there is a cap) from the products q·k."""
    b_u = 0.0
    if FEATURES.cap:
        b_u = tanh(b_s * (scale / cap))
        b_s = b_u * (cap * LOG2E)
    else:
        b_s = b_s * (scale * LOG2E)
    if FEATURES.bias.present:
        BIAS_AXES: tl.constexpr = FEATURES.bias
        b_bias = load_scores(bias, o_m, o_n, LQ, LK, BIAS_AXES).to(tl.float32)
        b_s += b_bias * LOG2E
    return b_s, b_u


@triton.jit
def tangent_products(b_q, b_k, b_tq, b_tk, HAS_TQ: tl.constexpr, HAS_TK: tl.constexpr, PRECISION: tl.constexpr):
    """(q̇ kᵀ + q k̇ᵀ), without the scale; with the roles of queries and keys swapped, its transpose."""
    b_ts = tl.zeros([b_q[0].shape[0], b_k[0].shape[0]], tl.float32)
    for PART in tl.static_range(len(b_q)):
        if HAS_TQ:
            b_x, b_y = input_operand(b_tq[PART], PRECISION), input_operand(b_k[PART], PRECISION)
            b_ts = dot(b_x, tl.trans(b_y), b_ts, PRECISION)
        if HAS_TK:
            b_x, b_y = input_operand(b_q[PART], PRECISION), input_operand(b_tk[PART], PRECISION)
            b_ts = dot(b_x, tl.trans(b_y), b_ts, PRECISION)
    return b_ts


@triton.jit
def tangent_scores(b_ts, b_u, scale, t_bias, o_m, o_n, LQ, LK, FEATURES: tl.constexpr, HAS_TBIAS: tl.constexpr):
    """Ṡ from its products."""
    b_ts = b_ts * scale
    if FEATURES.cap:
        b_ts *= 1.0 - b_u * b_u
    if HAS_TBIAS:
        BIAS_AXES: tl.constexpr = FEATURES.bias
        b_ts += load_scores(t_bias, o_m, o_n, LQ, LK, BIAS_AXES).to(tl.float32)
    return b_ts


@triton.jit
def under_cap(b_ds, b_u, FEATURES: tl.constexpr):
    """From a cotangent of S that of what was capped."""
    if FEATURES.cap:
        return b_ds * (1.0 - b_u * b_u)
    else:
        return b_ds


@triton.jit
def recentered(b_c, b_rest, b_pts, b_pl, b_l_before, b_l):
    """(c, by how much it moved, rest) of each row: c becomes the mean of Ṡ over the keys so far, weighted by P, with the
    tile's sums of P∘Ṡ and of P, and those of P before the tile and with it.  As long as most of the weight is old, c moves by
    a difference, and what rounding leaves of it, the rest, goes along to the next tile; else it is a mean of two, in which
    nothing remains of scores that no longer count."""
    per_l = 1.0 / tl.where(b_l == 0.0, 1.0, b_l)
    b_rest += b_pts - b_c * b_pl
    fresh = b_l_before < 0.5 * b_l
    c_new = tl.where(fresh, b_c * (b_l_before * per_l) + b_pts * per_l, b_c + b_rest * per_l)
    moved = c_new - b_c
    return c_new, moved, tl.where(fresh, 0.0, b_rest - moved * b_l)


@triton.jit
def log2_sum_exp(b_lse):
    """ℓ in base 2; +inf for rows that see nothing, so that their probabilities are zero."""
    return tl.where(b_lse == -float("inf"), float("inf"), b_lse * LOG2E)
