"""Parts of a block, from the programs that computed them to the one that puts them together, see `item` in `work.py`.

Of parts of a softmax, each over some of the keys, with their (o, ℓ, ȯ, μ), two at a time:

    ℓ = log(exp ℓ₀ + exp ℓ₁)      aᵢ = exp(ℓᵢ − ℓ)      o = Σᵢ aᵢ oᵢ      μ = Σᵢ aᵢ μᵢ      ȯ = Σᵢ aᵢ (ȯᵢ + (μᵢ − μ) oᵢ)

The tangent alone has P from the saved ℓ: its parts are sums as they are, and ΣP in the place of ℓᵢ.  Gradients are added up.

Every thread hands over what it holds to the thread with its number in the other program, through memory: its elements of the
sums, and of statistics as many copies as make each thread's own, then a flag.  Nobody else reads these, so no thread waits for
another of its program, and the flag, of 64 bits that memory never holds by chance, need not be cleared before, but is after.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jax_flash_jvp.kernels.hopper.pipeline import AGAIN
from jax_flash_jvp.kernels.hopper.products import (
    GROUP_ROWS,
    LN2,
    LOG2E,
    before,
    by_row,
    columns,
    increased,
    parts,
    product_layout,
    scaled,
)

_COPIES = 16  # of a statistic: as many columns as the narrowest product has
COPIES = gl.constexpr(_COPIES)
# PTX: a thread's stores are done; those of another are, and its flag is taken down again
SAY = gl.constexpr("""{
.reg .b64 flag;
mov.b64 flag, 0x9E3779B97F4A7C15;
st.release.gpu.global.b64 [$1], flag;
mov.b32 $0, 0;
}""")
AWAIT = gl.constexpr(f"""{{
.reg .pred absent;
.reg .b64 flag, seen;
mov.b64 flag, 0x9E3779B97F4A7C15;
{AGAIN}
mov.b64 seen, 0;
st.global.b64 [$1], seen;
mov.b32 $0, 0;
}}""")


@triton.constexpr_function
def part_size(rows, sums, statistics, channels):
    """Floats of a warpgroup's part of a block: so many sums [rows, columns of the products] and statistics [rows, COPIES], and
    two for the flag of every thread, of which there are two for a row."""
    return rows * (sums * columns(channels) + _COPIES * statistics + 4)


@gluon.jit
def part_of(
    PARTS, program, w: gl.constexpr, GROUPS: gl.constexpr, SUMS: gl.constexpr, STATISTICS: gl.constexpr, C: gl.constexpr
):
    """Where that of a warpgroup is: a program hands over one part of a block at most."""
    return PARTS + (program * GROUPS + w) * part_size(GROUP_ROWS, SUMS, STATISTICS, C)


@gluon.jit
def flags(part, SUMS: gl.constexpr, STATISTICS: gl.constexpr, C: gl.constexpr, TEXT: gl.constexpr):
    o = gl.arange(0, 2 * GROUP_ROWS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    address = (part + GROUP_ROWS * (SUMS * columns(C) + COPIES * STATISTICS) + 2 * o).to(gl.int64)
    gl.inline_asm_elementwise(TEXT, "=r,l", [address], gl.int32, False, 1)


@gluon.jit
def by_thread(b_x):
    """[GROUP_ROWS, W] of a product as [W / 8, 4 · threads]: a row has of every thread, in their order, the four elements that it
    holds of eight columns.  Nothing moves."""
    W: gl.constexpr = b_x.shape[1]
    return b_x.reshape([4, 2, 8, W // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([W // 8, 8 * GROUP_ROWS])


@gluon.jit
def places(X, b_y):
    """Of what is ordered by thread, where a warp reads and writes whole lines of memory."""
    o_r = gl.arange(0, b_y.shape[0], layout=gl.SliceLayout(1, b_y.type.layout))
    o_c = gl.arange(0, b_y.shape[1], layout=gl.SliceLayout(0, b_y.type.layout))
    return X + gl.expand_dims(o_r * b_y.shape[1], 1) + gl.expand_dims(o_c, 0)


@gluon.jit
def store(X, b_x):
    b_y = by_thread(b_x)
    gl.store(places(X, b_y), b_y)


@gluon.jit
def stored(X, like):
    W: gl.constexpr = like.shape[1]
    b_y = gl.load(places(X, by_thread(like)))
    b_x = b_y.reshape([W // 8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5]).reshape([GROUP_ROWS, W])
    return gl.convert_layout(b_x, like.type.layout)


@gluon.jit
def store_sum(part, I: gl.constexpr, b_x, C: gl.constexpr):
    for PART in gl.static_range(parts(C)):
        store(part + GROUP_ROWS * (I * columns(C) + before(C, PART)), b_x[PART])


@gluon.jit
def stored_sum(part, I: gl.constexpr, like, C: gl.constexpr):
    X = part + I * GROUP_ROWS * columns(C)
    b_y = (stored(X, like[0]),)
    for PART in gl.static_range(1, parts(C)):
        b_y = b_y + (stored(X + GROUP_ROWS * before(C, PART), like[PART]),)
    return b_y


@gluon.jit
def store_statistic(part, I: gl.constexpr, SUMS: gl.constexpr, b_r, C: gl.constexpr):
    zero = gl.zeros([GROUP_ROWS, COPIES], gl.float32, product_layout(COPIES))
    store(part + GROUP_ROWS * (SUMS * columns(C) + I * COPIES), zero + by_row(b_r, zero))


@gluon.jit
def stored_statistic(part, I: gl.constexpr, SUMS: gl.constexpr, C: gl.constexpr, LAYOUT: gl.constexpr):
    zero = gl.zeros([GROUP_ROWS, COPIES], gl.float32, product_layout(COPIES))
    b_x = stored(part + GROUP_ROWS * (SUMS * columns(C) + I * COPIES), zero)
    return gl.convert_layout(gl.max(b_x, 1), LAYOUT)


@gluon.jit
def hand_over_forward(part, b_o, b_to, b_w, b_c, HAS_O: gl.constexpr, HAS_T: gl.constexpr, C: gl.constexpr):
    """o, ȯ, ℓ or ΣP, μ."""
    N: gl.constexpr = 2 if HAS_T else 1
    store_statistic(part, 0, N, b_w, C)
    if HAS_O:
        store_sum(part, 0, b_o, C)
    if HAS_T:
        store_statistic(part, 1, N, b_c, C)
        store_sum(part, 1, b_to, C)
    flags(part, N, N, C, SAY)


@gluon.jit
def with_forward(
    part, b_o, b_to, b_w, b_c,
    HAS_O: gl.constexpr, HAS_T: gl.constexpr, LINEAR: gl.constexpr, C: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The same of all keys of these and of that part, when it has been handed over."""
    N: gl.constexpr = 2 if HAS_T else 1
    flags(part, N, N, C, AWAIT)
    w_1 = stored_statistic(part, 0, N, C, LAYOUT)
    if LINEAR:
        b_sum = b_w + w_1
        new = w_1 / gl.where(b_sum == 0.0, 1.0, b_sum)
        old = 1.0 - new
        b_w = b_sum
    else:
        b_m = gl.maximum(b_w, w_1)
        old = gl.exp2((b_w - b_m) * LOG2E)
        new = gl.exp2((w_1 - b_m) * LOG2E)
        b_sum = old + new
        old /= b_sum
        new /= b_sum
        b_w = b_m + gl.log2(b_sum) * LN2
    if HAS_T:
        c_1 = stored_statistic(part, 1, N, C, LAYOUT) - b_c
        step = new * c_1  # of μ
        c_1 -= step
        b_c += step
        if LINEAR:
            old = gl.full([GROUP_ROWS], 1.0, gl.float32, LAYOUT)
            new = old
        b_t = stored_sum(part, 1, b_to, C)
        if HAS_O:
            b_x = stored_sum(part, 0, b_o, C)
            b_to = increased(b_to, -step, b_o)
            b_t = increased(b_t, c_1, b_x)
            b_o = increased(scaled(b_o, old), new, b_x)
        b_to = increased(scaled(b_to, old), new, b_t)
    else:
        b_o = increased(scaled(b_o, old), new, stored_sum(part, 0, b_o, C))
    return b_o, b_to, b_w, b_c


@gluon.jit
def with_sum(part, I: gl.constexpr, b_x, C: gl.constexpr):
    b_y = stored_sum(part, I, b_x, C)
    b_z = (b_x[0] + b_y[0],)
    for PART in gl.static_range(1, len(b_x)):
        b_z = b_z + (b_x[PART] + b_y[PART],)
    return b_z


@gluon.jit
def hand_over_sums(part, sums, C: gl.constexpr):
    for I in gl.static_range(len(sums)):
        store_sum(part, I, sums[I], C)
    flags(part, len(sums), 0, C, SAY)


@gluon.jit
def with_sums(part, sums, C: gl.constexpr):
    """These and those of that part, when it has been handed over."""
    flags(part, len(sums), 0, C, AWAIT)
    both = (with_sum(part, 0, sums[0], C),)
    for I in gl.static_range(1, len(sums)):
        both = both + (with_sum(part, I, sums[I], C),)
    return both
