"""Parts of a block, from the programs that computed them to the one that puts them together, see `item` in `work.py`.

What is handed over is what a loop over tiles keeps, sums and statistics of their rows, so that another may go on from there.
Of parts of a softmax, each over some of the keys, with their maxima m, in base 2, sums l, o and ȯ, and μ, two at a time:

    m = max(m₀, m₁)   aᵢ = 2 ** (mᵢ − m)   l = Σᵢ aᵢ lᵢ   o = Σᵢ aᵢ oᵢ   μ = Σᵢ aᵢ lᵢ μᵢ / l   ȯ = Σᵢ aᵢ (ȯᵢ + (μᵢ − μ) oᵢ)

The tangent alone has P from the saved ℓ, in the place of m, so that all aᵢ are one.  Gradients, and row sums of dS and ḋS, are
added up.

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
    before,
    by_row,
    columns,
    increased,
    parts,
    product_layout,
    scaled,
)

_COPIES = 8  # of a statistic: as many columns as the narrowest product has
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
def part_of(PARTS, program, w: gl.constexpr, GROUPS: gl.constexpr, sums, statistics, C: gl.constexpr):
    """Where that of a warpgroup is: a program hands over one part of a block at most."""
    return PARTS + (program * GROUPS + w) * part_size(GROUP_ROWS, len(sums), len(statistics), C)


@gluon.jit
def flags(part, sums, statistics, C: gl.constexpr, TEXT: gl.constexpr):
    o = gl.arange(0, 2 * GROUP_ROWS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    address = (part + GROUP_ROWS * (len(sums) * columns(C) + COPIES * len(statistics)) + 2 * o).to(gl.int64)
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
def stored_sum(part, I: gl.constexpr, like, C: gl.constexpr):
    X = part + I * GROUP_ROWS * columns(C)
    b_x = (stored(X, like[0]),)
    for PART in gl.static_range(1, parts(C)):
        b_x = b_x + (stored(X + GROUP_ROWS * before(C, PART), like[PART]),)
    return b_x


@gluon.jit
def copies(b_r):
    """[GROUP_ROWS, COPIES], of a number for each row."""
    zero = gl.zeros([GROUP_ROWS, COPIES], gl.float32, product_layout(COPIES))
    return zero + by_row(b_r, zero)


@gluon.jit
def stored_statistics(part, sums, statistics, C: gl.constexpr):
    some = ()
    for I in gl.static_range(len(statistics)):
        X = part + GROUP_ROWS * (len(sums) * columns(C) + I * COPIES)
        b_x = gl.max(stored(X, copies(statistics[I])), 1)
        some = some + (gl.convert_layout(b_x, statistics[I].type.layout),)
    return some


@gluon.jit
def hand_over(PARTS, program, w: gl.constexpr, GROUPS: gl.constexpr, sums, statistics, C: gl.constexpr):
    part = part_of(PARTS, program, w, GROUPS, sums, statistics, C)
    for I in gl.static_range(len(sums)):
        for PART in gl.static_range(parts(C)):
            store(part + GROUP_ROWS * (I * columns(C) + before(C, PART)), sums[I][PART])
    for I in gl.static_range(len(statistics)):
        store(part + GROUP_ROWS * (len(sums) * columns(C) + I * COPIES), copies(statistics[I]))
    flags(part, sums, statistics, C, SAY)


@gluon.jit
def resumed(PARTS, work, w: gl.constexpr, GROUPS: gl.constexpr, sums, statistics, C: gl.constexpr):
    """What the loop over a part's tiles begins with: these zeros, or what was handed over."""
    if work.resumed:
        part = part_of(PARTS, work.since, w, GROUPS, sums, statistics, C)
        flags(part, sums, statistics, C, AWAIT)
        some = ()
        for I in gl.static_range(len(sums)):
            some = some + (stored_sum(part, I, sums[I], C),)
        statistics = stored_statistics(part, sums, statistics, C)
        sums = some
    return sums, statistics


@gluon.jit
def plus(part, sums, statistics, C: gl.constexpr):
    """Sums and statistics, to which those of a part are added that was handed over."""
    rows = stored_statistics(part, sums, statistics, C)
    added = ()
    for I in gl.static_range(len(statistics)):
        added = added + (statistics[I] + rows[I],)
    totals = ()
    for I in gl.static_range(len(sums)):
        b_x = stored_sum(part, I, sums[I], C)
        b_y = (sums[I][0] + b_x[0],)
        for PART in gl.static_range(1, parts(C)):
            b_y = b_y + (sums[I][PART] + b_x[PART],)
        totals = totals + (b_y,)
    return totals, added


@gluon.jit
def joined(part, sums, statistics, C: gl.constexpr):
    """(o,), (l, m) or (o, ȯ), (l, m, μ) and those of a part that was handed over.  One sum of that after the other, as registers
    do not hold both."""
    rows = stored_statistics(part, sums, statistics, C)
    l_0, l_1 = statistics[0], rows[0]
    m_0, m_1 = statistics[1], rows[1]
    b_m = gl.maximum(m_0, m_1)
    a_0 = gl.exp2(gl.where(m_0 == b_m, 0.0, m_0 - b_m))
    a_1 = gl.exp2(gl.where(m_1 == b_m, 0.0, m_1 - b_m))
    b_l = l_0 * a_0 + l_1 * a_1
    if len(sums) == 1:
        b_o = increased(scaled(sums[0], a_0), a_1, stored_sum(part, 0, sums[0], C))
        return (b_o,), (b_l, b_m)
    else:
        between = rows[2] - statistics[2]
        step = l_1 * a_1 / gl.where(b_l == 0.0, 1.0, b_l) * between  # of μ
        b_to = scaled(increased(sums[1], -step, sums[0]), a_0)
        b_x = stored_sum(part, 0, sums[0], C)
        b_o = increased(scaled(sums[0], a_0), a_1, b_x)
        b_to = increased(b_to, a_1 * (between - step), b_x)
        b_to = increased(b_to, a_1, stored_sum(part, 1, sums[1], C))
        return (b_o, b_to), (b_l, b_m, statistics[2] + step)


@gluon.jit
def with_others(
    PARTS, work, w: gl.constexpr, GROUPS: gl.constexpr, sums, statistics, C: gl.constexpr, ADDED: gl.constexpr
):  # fmt: skip
    """With what others have handed over, or will have, but not what this part has begun with; ADDED, else parts of a softmax."""
    for program in range(work.since + work.resumed, work.until):
        part = part_of(PARTS, program, w, GROUPS, sums, statistics, C)
        flags(part, sums, statistics, C, AWAIT)
        if ADDED:
            sums, statistics = plus(part, sums, statistics, C)
        else:
            sums, statistics = joined(part, sums, statistics, C)
    return sums, statistics
