"""Which blocks a program computes: all of a block, one after the other, or a fragment of one that it shares with others.

The numbers of a program's blocks are given beforehand (`items`), or taken from a counter in memory (`first_block`, `next_block`,
`received_block`).  What a fragment's loop begins with and what its sums go on to say `resume`, `finish` and `hand_over`.
"""

from collections import namedtuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

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
from jax_flash_jvp.kernels.hopper.ring import AGAIN, advance, barriers, give_back, wait
from jax_flash_jvp.kernels.portable import scores

aligned = gluon.jit(scores.aligned.fn)
TOGETHER = gl.constexpr(8)  # heads whose streamed rows are to share the L2 cache

# those of a launch: blocks, query heads, those for each key head, lengths, reach to both sides, blocks that are not shared,
# tiles of the others for each program, concurrent programs; reciprocals, for `divided`: of a head's blocks, a batch
# entry's heads, a block's tiles, a program's shared tiles, TOGETHER and the heads that are left of them
Integers = namedtuple(
    "Integers",
    "n HQ GROUP LQ LK left right n_whole shared_tiles concurrent "
    "of_blocks of_heads of_tiles of_shared_tiles of_together of_rest",
)
# the number of a block, its tiles first … end, the programs since … until whose fragments of it are to go with these,
# whether the first of those fragments is gone on with, and whether these tiles are handed over themselves
Item = namedtuple("Item", "block first end since until resumed handed_over")

_BITS = 25
BITS = gl.constexpr(_BITS)
DIVISIBLE = 2 ** (_BITS - 1)  # numbers below this


def reciprocal(n):
    """That of n for `divided`: 26 bits of ⌊2²⁵⁺ᵏ / n⌋ + 1, behind those of k = ⌊log₂ n⌋."""
    k = n.bit_length() - 1
    return k << _BITS + 1 | 2 ** (_BITS + k) // n + 1


@gluon.jit
def divided(i, n, reciprocal):
    """(i // n, i % n), by a multiplication, as a division takes more than a hundred cycles."""
    digits = (reciprocal & ((1 << (BITS + 1)) - 1)).to(gl.int64)
    quotient = (i * digits >> (reciprocal >> BITS + 1) + BITS).to(gl.int32)
    return quotient, i - quotient * n


@gluon.jit
def own_block(i, ints, n_blocks, FROM_END: gl.constexpr, FEATURES: gl.constexpr):
    """(block, batch entry and head) of number i.  The longest blocks, first or last, of a few heads go before the shorter: head
    after head, the last ones would begin a long block when others are done.  Where blocks of a head wait for each other, those
    that begin together are of a few heads likewise."""
    if FEATURES.later_longer or FEATURES.heads_in_turn:
        first = divided(i, n_blocks, ints.of_blocks)[0] // TOGETHER * TOGETHER
        left = divided(ints.n, n_blocks, ints.of_blocks)[0] - first
        few = left < TOGETHER
        block, i_head = divided(
            i - first * n_blocks, gl.where(few, left, TOGETHER), gl.where(few, ints.of_rest, ints.of_together)
        )
        if FROM_END:
            block = n_blocks - 1 - block
        return block, first + i_head
    else:
        i_head, block = divided(i, n_blocks, ints.of_blocks)
        return block, i_head


@gluon.jit
def in_wave(ints, FEATURES: gl.constexpr):
    """This program's number in its wave: they may come in waves, each of a program for every multiprocessor."""
    return gl.program_id(0) % ints.concurrent if FEATURES.waves else gl.program_id(0)


@gluon.jit
def own_shared_tiles(ints, n_tiles, FEATURES: gl.constexpr):
    """The first of this program's, of the tiles of all shared blocks, and the end, which is before it if there are none left."""
    first = in_wave(ints, FEATURES) * ints.shared_tiles
    return first, gl.minimum(first + ints.shared_tiles, (ints.n - ints.n_whole) * n_tiles)


@gluon.jit
def items(ints, n_tiles, FEATURES: gl.constexpr):
    """(first, end): a program computes the `item`s first, first + concurrent … below the end, one after the other.  The first, of
    a number below zero, is what another program waits for, the last what waits for others."""
    first = in_wave(ints, FEATURES)
    end = ints.n_whole
    wave = 0
    waves = 1
    if FEATURES.waves:
        wave = gl.program_id(0) // ints.concurrent
        waves = gl.num_programs(0) // ints.concurrent
        rounds = gl.cdiv(ints.n_whole, ints.concurrent)
        first += rounds * wave // waves * ints.concurrent
        end = gl.minimum(rounds * (wave + 1) // waves * ints.concurrent, ints.n_whole)
    if FEATURES.shared:
        t_first, t_end = own_shared_tiles(ints, n_tiles, FEATURES)
        block, over = divided(t_end, n_tiles, ints.of_tiles)
        if (wave == 0) & (over > 0):
            first -= ints.concurrent
        if (wave == waves - 1) & (block > divided(t_first, n_tiles, ints.of_tiles)[0]):
            end += ints.concurrent
    return first, end


@gluon.jit
def item(i, ints, n_tiles, FEATURES: gl.constexpr):
    """The first n_whole blocks, of n_tiles each, are one program's each.  The tiles of the others, fewer than there are programs,
    are `shared`: each program has the next `shared_tiles` of them, fragments of one block or two, until there are none left.  The
    last fragment of a block comes at its program's end, the others, which are handed over, at their beginning.  They have lower
    numbers, so that they run whenever it waits.  Where they have whole blocks in between, it goes on from the first of these
    fragments; with the rest, or all of them, it is put together when its tiles are done."""
    first = 0 * n_tiles
    end = n_tiles
    since = first
    until = first
    handed_over = first > 0
    resumed = handed_over
    if FEATURES.shared:
        handed_over = i < 0
        if handed_over | (i >= ints.n_whole):
            shared_first, shared_end = own_shared_tiles(ints, n_tiles, FEATURES)
            block, _ = divided(gl.where(handed_over, shared_end, shared_first), n_tiles, ints.of_tiles)
            first = gl.maximum(shared_first - block * n_tiles, 0)
            end = gl.minimum(shared_end - block * n_tiles, n_tiles)
            since, _ = divided(block * n_tiles, ints.shared_tiles, ints.of_shared_tiles)
            until = gl.where(handed_over, since, in_wave(ints, FEATURES))
            resumed = (since < until) & (ints.n_whole > 0)
            i = ints.n_whole + block
    return Item(i, first, end, since, until, resumed, handed_over)


# ------------------------------------------------------------------------------------------------ a counter

# Where blocks take different times, a program computes the one of its own number first, then whichever is next.  The
# producer takes the next number from a counter in memory when it has loaded all that its block needs, so that the number
# comes no earlier than the multiprocessor is about to be free, and no later than the warpgroups are, to whom it is sent
# on.  The first program begins the counter, which may hold anything before, and whoever takes the last number ends it.

# shared: numbers of blocks, on their way from the producer to the warpgroups
Queue = namedtuple("Queue", "numbers full empty")
QUEUED = gl.constexpr(2)
# PTX of one warp: the counter begins with a number; its next number is taken, and if that is the last one, it ends.  The
# flag in front of it has 64 bits that memory never holds by chance.
BEGIN = gl.constexpr("""{
.reg .pred first;
.reg .b32 lane;
.reg .b64 flag;
mov.u32 lane, %laneid;
setp.eq.u32 first, lane, 0;
mov.b64 flag, 0xC2B2AE3D27D4EB4F;
@first st.relaxed.gpu.global.b32 [$1+8], $2;
@first st.release.gpu.global.b64 [$1], flag;
mov.b32 $0, 0;
}""")
TAKE = gl.constexpr(f"""{{
.reg .pred first, absent;
.reg .b32 lane, number;
.reg .b64 flag, seen;
mov.b64 flag, 0xC2B2AE3D27D4EB4F;
{AGAIN}
mov.u32 lane, %laneid;
setp.eq.u32 first, lane, 0;
mov.b32 number, 0;
@first atom.relaxed.gpu.global.add.u32 number, [$1+8], 1;
shfl.sync.idx.b32 number, number, 0, 31, -1;
setp.eq.and.u32 first, number, $2, first;
mov.b64 seen, 0;
@first st.relaxed.gpu.global.b64 [$1], seen;
mov.b32 $0, number;
}}""")


@gluon.jit
def queue(GROUPS: gl.constexpr):
    numbers = gl.allocate_shared_memory(gl.int32, [QUEUED, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Queue(numbers, barriers(QUEUED, 1), barriers(QUEUED, GROUPS))


@gluon.jit
def counted(COUNTER, number, TEXT: gl.constexpr):
    zero = gl.zeros([32], gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    return gl.inline_asm_elementwise(TEXT, "=r,l,r", [(COUNTER + zero).to(gl.int64), zero + number], gl.int32, False, 1)


@gluon.jit
def first_block(COUNTER, ints):
    """This program's own number; the first program begins the counter."""
    if gl.program_id(0) == 0:
        counted(COUNTER, ints.concurrent, BEGIN)
    return gl.program_id(0)


@gluon.jit
def next_block(COUNTER, queue, at, ints):
    """The producer's next number, which it sends to the warpgroups: n or more at the end, one for each program."""
    number = counted(COUNTER, ints.n + ints.concurrent - 1, TAKE)
    wait(queue.empty, at)
    queue.numbers.index(at.slot).store(number)
    mbarrier.arrive(queue.full.index(at.slot), count=1)
    return gl.max(number, 0), advance(at, QUEUED)


@gluon.jit
def received_block(queue, at):
    """That of a warpgroup."""
    wait(queue.full, at)
    number = queue.numbers.index(at.slot).load(gl.BlockedLayout([1], [32], [4], [0]))
    give_back(queue.empty, at)
    return gl.max(number, 0), advance(at, QUEUED)


# ------------------------------------------------------------------------------------------------ fragments of blocks

# What is handed over is what a loop over tiles keeps, sums and values of their rows, so that another may go on from there.  Of
# fragments of a softmax, each over some of the keys, with their maxima m, in base 2, sums l, o and ȯ, and μ, two at a time:
#
#     m = max(m₀, m₁)   aᵢ = 2 ** (mᵢ − m)   l = Σᵢ aᵢ lᵢ   o = Σᵢ aᵢ oᵢ   μ = Σᵢ aᵢ lᵢ μᵢ / l   ȯ = Σᵢ aᵢ (ȯᵢ + (μᵢ − μ) oᵢ)
#
# The tangent alone has P from the saved ℓ, in the place of m, so that all aᵢ are one.  Gradients, and row sums of dS and
# ḋS, are added up.
#
# Every thread hands over what it holds to the thread with its number in the other program, through memory: its elements
# of the sums, and of values of rows as many copies as make each thread's own, then a flag.  Nobody else reads these, so
# no thread waits for another of its program, and the flag, of 64 bits that memory never holds by chance, need not be
# cleared before, but is after.

_COPIES = 8  # of a value for each row: as many columns as the narrowest product has
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
def fragment_size(rows, sums, row_values, channels):
    """Floats of a warpgroup's fragment: so many sums [rows, columns of the products] and values of rows [rows, COPIES], and
    two for the flag of every thread, of which there are two for a row."""
    return rows * (sums * columns(channels) + _COPIES * row_values + 4)


@gluon.jit
def fragment_at(EXCHANGE, program, w: gl.constexpr, GROUPS: gl.constexpr, sums, row_values, C: gl.constexpr):
    """Where that of a warpgroup is: a program hands over one fragment at most."""
    return EXCHANGE + (program * GROUPS + w) * fragment_size(GROUP_ROWS, len(sums), len(row_values), C)


@gluon.jit
def flags(fragment, sums, row_values, C: gl.constexpr, TEXT: gl.constexpr):
    o = gl.arange(0, 2 * GROUP_ROWS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    address = (fragment + GROUP_ROWS * (len(sums) * columns(C) + COPIES * len(row_values)) + 2 * o).to(gl.int64)
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
def stored_sum(fragment, I: gl.constexpr, like, C: gl.constexpr):
    X = fragment + I * GROUP_ROWS * columns(C)
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
def stored_row_values(fragment, sums, row_values, C: gl.constexpr):
    some = ()
    for I in gl.static_range(len(row_values)):
        X = fragment + GROUP_ROWS * (len(sums) * columns(C) + I * COPIES)
        b_x = gl.max(stored(X, copies(row_values[I])), 1)
        some = some + (gl.convert_layout(b_x, row_values[I].type.layout),)
    return some


@gluon.jit
def hand_over(EXCHANGE, program, w: gl.constexpr, GROUPS: gl.constexpr, sums, row_values, C: gl.constexpr):
    fragment = fragment_at(EXCHANGE, program, w, GROUPS, sums, row_values, C)
    for I in gl.static_range(len(sums)):
        for PART in gl.static_range(parts(C)):
            store(fragment + GROUP_ROWS * (I * columns(C) + before(C, PART)), sums[I][PART])
    for I in gl.static_range(len(row_values)):
        store(fragment + GROUP_ROWS * (len(sums) * columns(C) + I * COPIES), copies(row_values[I]))
    flags(fragment, sums, row_values, C, SAY)


@gluon.jit
def resume(EXCHANGE, work, w: gl.constexpr, GROUPS: gl.constexpr, sums, row_values, C: gl.constexpr):
    """What the loop over a fragment's tiles begins with: these zeros, or what was handed over."""
    if work.resumed:
        fragment = fragment_at(EXCHANGE, work.since, w, GROUPS, sums, row_values, C)
        flags(fragment, sums, row_values, C, AWAIT)
        some = ()
        for I in gl.static_range(len(sums)):
            some = some + (stored_sum(fragment, I, sums[I], C),)
        row_values = stored_row_values(fragment, sums, row_values, C)
        sums = some
    return sums, row_values


@gluon.jit
def plus(fragment, sums, row_values, C: gl.constexpr):
    """Sums and values of rows, to which those of a fragment are added that was handed over."""
    rows = stored_row_values(fragment, sums, row_values, C)
    added = ()
    for I in gl.static_range(len(row_values)):
        added = added + (row_values[I] + rows[I],)
    totals = ()
    for I in gl.static_range(len(sums)):
        b_x = stored_sum(fragment, I, sums[I], C)
        b_y = (sums[I][0] + b_x[0],)
        for PART in gl.static_range(1, parts(C)):
            b_y = b_y + (sums[I][PART] + b_x[PART],)
        totals = totals + (b_y,)
    return totals, added


@gluon.jit
def joined(fragment, sums, row_values, C: gl.constexpr):
    """(o,), (l, m) or (o, ȯ), (l, m, μ) and those of a fragment that was handed over.  One sum of that after the other, as
    registers do not hold both."""
    rows = stored_row_values(fragment, sums, row_values, C)
    l_0, l_1 = row_values[0], rows[0]
    m_0, m_1 = row_values[1], rows[1]
    b_m = gl.maximum(m_0, m_1)
    a_0 = gl.exp2(gl.where(m_0 == b_m, 0.0, m_0 - b_m))
    a_1 = gl.exp2(gl.where(m_1 == b_m, 0.0, m_1 - b_m))
    b_l = l_0 * a_0 + l_1 * a_1
    if len(sums) == 1:
        b_o = increased(scaled(sums[0], a_0), a_1, stored_sum(fragment, 0, sums[0], C))
        return (b_o,), (b_l, b_m)
    else:
        between = rows[2] - row_values[2]
        step = l_1 * a_1 / gl.where(b_l == 0.0, 1.0, b_l) * between  # of μ
        b_to = scaled(increased(sums[1], -step, sums[0]), a_0)
        b_x = stored_sum(fragment, 0, sums[0], C)
        b_o = increased(scaled(sums[0], a_0), a_1, b_x)
        b_to = increased(b_to, a_1 * (between - step), b_x)
        b_to = increased(b_to, a_1, stored_sum(fragment, 1, sums[1], C))
        return (b_o, b_to), (b_l, b_m, row_values[2] + step)


@gluon.jit
def finish(
    EXCHANGE, work, w: gl.constexpr, GROUPS: gl.constexpr, sums, row_values, C: gl.constexpr, ADDED: gl.constexpr
):  # fmt: skip
    """With what others have handed over, or will have, but not what this fragment has begun with; ADDED, or else of a softmax."""
    for program in range(work.since + work.resumed, work.until):
        fragment = fragment_at(EXCHANGE, program, w, GROUPS, sums, row_values, C)
        flags(fragment, sums, row_values, C, AWAIT)
        if ADDED:
            sums, row_values = plus(fragment, sums, row_values, C)
        else:
            sums, row_values = joined(fragment, sums, row_values, C)
    return sums, row_values
