"""What a warpgroup multiplies, asynchronously, and the sums that its threads hold: of GROUP_ROWS rows, in parts of as many
columns as a product has.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from jax_flash_jvp.kernels.portable import scores

log2_sum_exp, unfolded = (gluon.jit(f.fn) for f in (scores.log2_sum_exp, scores.unfolded))
LOG2E, LN2 = gl.constexpr(scores.LOG2E.value), gl.constexpr(scores.LN2.value)
LOWEST = gl.constexpr(-3.4e38)  # a maximum of scores that is finite where nothing has been seen yet
GROUP_ROWS = gl.constexpr(64)  # resident rows of one consumer warpgroup


@triton.constexpr_function
def column_widths(channels):
    """`widths`, with two exceptions.  Above 128 there are 128 and the rest.  32 and 16 become 64: in newer Tritons the sums of
    two parts leave no registers for long tiles."""
    if channels > 128:
        return (128, *scores.widths(channels - 128))
    return (64,) if 32 < channels <= 48 else scores.widths(channels)


@triton.constexpr_function
def width(channels, part):
    return column_widths(channels)[part]


@triton.constexpr_function
def widest(channels, split):
    """Channels of a warpgroup's sums at most, where warpgroups may divide them."""
    return width(channels, 0) if split else channels


@triton.constexpr_function
def before(channels, part):
    return sum(column_widths(channels)[:part])


@triton.constexpr_function
def parts(channels):
    return len(column_widths(channels))


@triton.constexpr_function
def columns(channels):
    """The columns of all parts."""
    return sum(column_widths(channels))


@triton.constexpr_function
def product_layout(columns):
    """The layout in registers of what a warpgroup makes by multiplying."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@triton.constexpr_function
def operand_layout(columns):
    """The layout in registers of what it multiplies with so many rows in shared memory."""
    return gl.DotOperandLayout(operand_index=0, parent=product_layout(columns), k_width=2)


@gluon.jit
def operand(b_x):
    return gl.convert_layout(b_x, operand_layout(b_x.shape[1]))


@gluon.jit
def score_product(a, b, acc, ADD: gl.constexpr):
    """a bᵀ, added to acc if ADD, of rows in parts; asynchronous.  a is in registers or, as b, in shared memory."""
    for PART in gl.static_range(len(a)):
        acc = warpgroup_mma(a[PART], b[PART].permute((1, 0)), acc, use_acc=ADD or PART > 0, is_async=True)
    return acc


@gluon.jit
def sums(C: gl.constexpr):
    """Zeros [GROUP_ROWS, C], in parts."""
    b_x = ()
    for PART in gl.static_range(parts(C)):
        b_x = b_x + (gl.zeros([GROUP_ROWS, width(C, PART)], gl.float32, product_layout(width(C, PART))),)
    return b_x


@gluon.jit
def own_sums(w: gl.constexpr, options):
    """Zeros for the columns of a warpgroup."""
    if options.SPLIT:
        return sums(width(options.C, w))
    else:
        return sums(options.C)


@gluon.jit
def packed(b_p, dtype: gl.constexpr):
    """Numbers as 16-bit floats, of two columns in 32 bits: from one iteration to the next the compiler may hand over those
    floats one by one, and puts them together each time."""
    W: gl.constexpr = b_p.shape[1] // 2
    TEXT: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    b_0, b_1 = b_p.reshape([GROUP_ROWS, W, 2]).split()
    return gl.inline_asm_elementwise(TEXT, "=r,f,f", [b_0, b_1], gl.int32, True, 1)


@gluon.jit
def unpacked(b_p, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    W: gl.constexpr = 2 * b_p.shape[1]
    b_0 = gl.inline_asm_elementwise("{.reg .b16 x; mov.b32 {$0, x}, $1;}", "=h,r", [b_p], gl.int16, True, 1)
    b_1 = gl.inline_asm_elementwise("{.reg .b16 x; mov.b32 {x, $0}, $1;}", "=h,r", [b_p], gl.int16, True, 1)
    return gl.convert_layout(gl.join(b_0, b_1).reshape([GROUP_ROWS, W]).to(dtype, bitcast=True), LAYOUT)


@gluon.jit
def sum_product(p, rows, b_x, PART: gl.constexpr):
    p = gl.convert_layout(p, operand_layout(rows[PART].shape[1]))
    return warpgroup_mma(p, rows[PART], b_x[PART], is_async=True)


@gluon.jit
def own_columns(tile, w: gl.constexpr, SPLIT: gl.constexpr):
    """The columns of a tile that a warpgroup sums: a part, where they are SPLIT, or all."""
    if SPLIT:
        return (tile[w],)
    else:
        return tile


@gluon.jit
def accumulated(p, rows, b_x):
    """The sums + p rows, of an operand p and rows in shared memory; asynchronous, see `settled`."""
    b_y = ()
    for PART in gl.static_range(len(b_x)):
        b_y = b_y + (sum_product(p, rows, b_x, PART),)
    return b_y


@gluon.jit
def settled(b_x, p):
    """The sums, and the operand of their last product, whose registers must last so long, when no product is in flight."""
    if len(b_x) == 1:
        b_0, p = warpgroup_mma_wait(0, deps=[b_x[0], p])
        return (b_0,), p
    else:
        b_0, b_1, p = warpgroup_mma_wait(0, deps=[b_x[0], b_x[1], p])
        return (b_0, b_1), p


@gluon.jit
def settled_before(b_x, p, b_s, N: gl.constexpr):
    """What `settled` returns, and a product issued after it, while the N issued after that one are in flight."""
    if len(b_x) == 1:
        b_0, p, b_s = warpgroup_mma_wait(N, deps=[b_x[0], p, b_s])
        return (b_0,), p, b_s
    else:
        b_0, b_1, p, b_s = warpgroup_mma_wait(N, deps=[b_x[0], b_x[1], p, b_s])
        return (b_0, b_1), p, b_s


@gluon.jit
def by_row(b_r, b_x):
    """[GROUP_ROWS, 1], of a number for each row, to go with x."""
    return gl.expand_dims(gl.convert_layout(b_r, gl.SliceLayout(1, b_x.type.layout)), 1)


@gluon.jit
def scaled(b_x, b_r):
    """The sums, each row times its number."""
    return [b_y * by_row(b_r, b_y) for b_y in b_x]


@triton.constexpr_function
def rescaling(n):
    """PTX that multiplies n sums of a thread, which are of two rows in turn, and the constraints on its operands."""
    jump = [".reg .pred p;", f"setp.neu.f32 p, ${2 * n}, 0f3F800000;", f"setp.neu.or.f32 p, ${2 * n + 2}, 0f3F800000, p;",
            "vote.sync.any.pred p, p, -1;", "@!p bra DONE;"]  # fmt: skip
    products = [f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n)]
    constraints = ["=f"] * n + [str(i) for i in range(n)] + ["f"] * n
    return "\n".join(["{", *jump, *products, "DONE:", "}"]), ",".join(constraints)


@gluon.jit
def rescaled_part(b_x, b_r):
    N: gl.constexpr = b_x.shape[1] // 2
    PTX: gl.constexpr = rescaling(N)
    b_r, _ = gl.broadcast(by_row(b_r, b_x), b_x)
    return gl.inline_asm_elementwise(PTX[0], PTX[1], [b_x, b_r], gl.float32, True, N)


@gluon.jit
def rescaled(b_x, b_r):
    """r x like `scaled`, with numbers r that are mostly one: a warp whose rows have only ones skips the multiplications."""
    return [rescaled_part(b_y, b_r) for b_y in b_x]


@gluon.jit
def increased(b_x, b_r, b_y):
    """x + r y, with a number r for each row."""
    b_z = ()
    for PART in gl.static_range(len(b_x)):
        b_z = b_z + (b_x[PART] + by_row(b_r, b_x[PART]) * b_y[PART],)
    return b_z


@gluon.jit
def zeroed(b_x, b_r):
    """The sums, zeros in the rows that r marks."""
    return [gl.where(by_row(b_r, b_y), 0.0, b_y) for b_y in b_x]


@gluon.jit
def halves(b_x):
    """The first half of the columns and the others: which registers hold them, nothing moves."""
    T: gl.constexpr = b_x.shape[1] // 2
    b_0, b_1 = b_x.reshape([GROUP_ROWS, 2, T]).permute([0, 2, 1]).split()
    return gl.convert_layout(b_0, product_layout(T)), gl.convert_layout(b_1, product_layout(T))


@gluon.jit
def quarters(b_x):
    """The four quarters of the columns, in order."""
    x_01, x_23 = halves(b_x)
    x_0, x_1 = halves(x_01)
    x_2, x_3 = halves(x_23)
    return x_0, x_1, x_2, x_3


@gluon.jit
def row_max(b_x):
    """A quarter of the columns after the other, as comparisons one by one would wait for each other."""
    x_0, x_1, x_2, x_3 = quarters(b_x)
    b_r = gl.max(gl.maximum(gl.maximum(x_0, x_1), gl.maximum(x_2, x_3)), 1)
    return gl.convert_layout(b_r, gl.SliceLayout(1, b_x.type.layout))


@gluon.jit
def row_dot(b_x, b_y):
    """rowsum(x∘y), likewise."""
    x_0, x_1, x_2, x_3 = quarters(b_x)
    y_0, y_1, y_2, y_3 = quarters(b_y)
    b_r = gl.sum(x_0 * y_0 + x_1 * y_1 + x_2 * y_2 + x_3 * y_3, 1)
    return gl.convert_layout(b_r, gl.SliceLayout(1, b_x.type.layout))


@triton.constexpr_function
def lane_layout():
    """The layout of [GROUP_ROWS, 4]: each of the four threads that hold a row of a product has an element."""
    return gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [GROUP_ROWS, 4]
    )


@gluon.jit
def lane_sums(b_p, dtype: gl.constexpr):
    """[GROUP_ROWS, 4], of packed numbers: of each row the sums of what its four threads hold.  Nothing moves."""
    if dtype == gl.bfloat16:  # by shifts, as conversions would wait for the unit for exponentials
        b_0 = (b_p << 16).to(gl.float32, bitcast=True)
        b_1 = (b_p & -65536).to(gl.float32, bitcast=True)
    else:
        b_x = unpacked(b_p, dtype, product_layout(2 * b_p.shape[1])).to(gl.float32)
        b_0, b_1 = b_x.reshape([GROUP_ROWS, b_p.shape[1], 2]).split()
    b_y = gl.sum((b_0 + b_1).reshape([GROUP_ROWS, b_p.shape[1] // 4, 4]), 1)
    return gl.convert_layout(b_y, lane_layout(), assert_trivial=True)


@gluon.jit
def over_lanes(b_r):
    """A number for each row, as the sum of what its four threads hold."""
    b_r = gl.expand_dims(gl.convert_layout(b_r * 0.25, gl.SliceLayout(1, lane_layout())), 1)
    return b_r + gl.zeros([GROUP_ROWS, 4], gl.float32, lane_layout())


@gluon.jit
def summed_lanes(b_r, LAYOUT: gl.constexpr):
    return gl.convert_layout(gl.sum(b_r, 1), LAYOUT)


@gluon.jit
def excess_of(b_r, lse2, D_LSE, x, m_x, HAS_D_LSE: gl.constexpr):
    """By how much row sums exceed the cotangent of ℓ, which they would be without rounding."""
    if HAS_D_LSE:
        b_d = gl.expand_dims(gl.load(D_LSE + x, mask=m_x, other=0.0), 1)
        b_r -= gl.sum(gl.where(lse2 == float("inf"), 0.0, b_d), 1)  # nothing of a row that sees nothing
    return b_r


@gluon.jit
def mean_at(i_b, i_h, i_k, row, HQ, GROUP, LQ, C: gl.constexpr, FEATURES: gl.constexpr):
    """(offset, rows, from one to the next) of the mean keys: one of a head of keys, or one of each query from `row` on."""
    if FEATURES.row_means:
        return ((i_b.to(gl.int64) * LQ + row) * HQ + i_h) * C, LQ - row, HQ * C
    else:
        return (i_b * (HQ // GROUP) + i_k).to(gl.int64) * C, 1, 0


@gluon.jit
def without_mean(b_x, b_r, MEAN, at, C: gl.constexpr, FIRST: gl.constexpr):
    """The sums x − r m, of a number r for each row and mean keys m of C columns; x has those from part FIRST on."""
    b_y = ()
    for PART in gl.static_range(len(b_x)):
        b_y = b_y + (part_without_mean(b_x[PART], b_r, MEAN, at, C, FIRST + PART),)
    return b_y


@gluon.jit
def part_without_mean(b_x, b_r, MEAN, at, C: gl.constexpr, PART: gl.constexpr):
    offset, rows, stride = at
    o_c = before(C, PART) + gl.arange(0, width(C, PART), layout=gl.SliceLayout(0, b_x.type.layout))
    X = MEAN + offset
    if MEAN.dtype.element_ty == gl.float32:  # of a head
        b_m = gl.expand_dims(gl.load(X + o_c, mask=o_c < C, other=0.0), 0)
    else:
        o_r = gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, b_x.type.layout))
        m_x = gl.expand_dims(o_r < rows, 1) & gl.expand_dims(o_c < C, 0)
        b_m = gl.load(X + gl.expand_dims(o_r * stride, 1) + gl.expand_dims(o_c, 0), mask=m_x, other=0.0).to(gl.float32)
    return b_x - by_row(b_r, b_x) * b_m


@gluon.jit
def store_rows(X, i_b, i_h, H, row, L, b_x, C: gl.constexpr, FIRST: gl.constexpr = 0):
    """From registers: the rows of a warpgroup, as far as they exist, in a contiguous [B, L, H, C] array; its columns from part
    FIRST on."""
    X += ((i_b.to(gl.int64) * L + row) * H + i_h) * C
    for PART in gl.static_range(len(b_x)):
        store_columns(X, H * C, L - row, b_x[PART], C, FIRST + PART)


@triton.constexpr_function
def neighbours(rows, columns, own):
    """A product's layout, but that a thread has `own` columns of a row side by side, 4 or 8, not 2."""
    bits = [[0, 1 << b] for b in range(columns.bit_length() - 1)]
    beside, lanes, far = (bits[:2], [bits[3], bits[2]], bits[4:]) if own == 4 else (bits[:3], bits[3:5], bits[5:])
    return gl.DistributedLinearLayout(
        [*beside, [8, 0], *far], [*lanes, [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [rows, columns]
    )


@gluon.jit
def side_by_side(b_x):
    """So that a thread has up to sixteen bytes of a row to store at once.  Of 16-bit floats in two steps, in each of which two
    threads exchange half of theirs: these the compiler makes of shuffles, where for both at once it wants shared memory."""
    W: gl.constexpr = b_x.shape[1]
    b_x = gl.convert_layout(b_x, neighbours(GROUP_ROWS, W, 4))
    if W >= 32 and b_x.dtype != gl.float32:
        b_x = gl.convert_layout(b_x, neighbours(GROUP_ROWS, W, 8))
    return b_x


@gluon.jit
def store_columns(X, stride, n, b_x, C: gl.constexpr, PART: gl.constexpr):
    b_x = side_by_side(b_x.to(X.dtype.element_ty))
    o_r = gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, b_x.type.layout))
    o_c = before(C, PART) + gl.arange(0, width(C, PART), layout=gl.SliceLayout(0, b_x.type.layout))
    m_x = gl.expand_dims(o_r < n, 1)
    if before(C, PART) + width(C, PART) > C:
        m_x = m_x & gl.expand_dims(o_c < C, 0)
    gl.store(X + gl.expand_dims(o_r * stride, 1) + gl.expand_dims(o_c, 0), b_x, mask=m_x)


@gluon.jit
def store_statistics(X, i_bh, row, L, b_x, LAYOUT: gl.constexpr):
    """Stores a number for each row of a warpgroup in a contiguous [B, H, L] array."""
    o_r = row + gl.arange(0, GROUP_ROWS, layout=LAYOUT)
    gl.store(X + i_bh.to(gl.int64) * L + o_r, b_x, mask=o_r < L)
