"""Which blocks a program computes: all of a block, one after the other, or a fragment of one that it shares with others.

The numbers of a program's blocks are given beforehand (`items`), or taken from a counter in memory (`first_block`, `next_block`,
`received_block`).  What a fragment's loop begins with and what its sums go on to, says `handover.py`.
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from jax_flash_jvp.kernels.hopper.ring import AGAIN, advance, barriers, give_back, wait
from jax_flash_jvp.kernels.portable import scores

aligned = gluon.jit(scores.aligned.fn)
HEADS_SHARING_L2 = gl.constexpr(scores.HEADS_SHARING_L2.value)

# those of a launch: blocks, query heads, those for each key head, lengths, reach to both sides, blocks that are not shared,
# tiles of the others for each program, concurrent programs; reciprocals, for `divided`: of a head's blocks, a batch
# entry's heads, a block's tiles, a program's shared tiles, HEADS_SHARING_L2 and the heads that are left of them
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
        first = divided(i, n_blocks, ints.of_blocks)[0] // HEADS_SHARING_L2 * HEADS_SHARING_L2
        left = divided(ints.n, n_blocks, ints.of_blocks)[0] - first
        few = left < HEADS_SHARING_L2
        block, i_head = divided(
            i - first * n_blocks, gl.where(few, left, HEADS_SHARING_L2), gl.where(few, ints.of_rest, ints.of_together)
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
def with_counter(COUNTER, number, TEXT: gl.constexpr):
    zero = gl.zeros([32], gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    return gl.inline_asm_elementwise(TEXT, "=r,l,r", [(COUNTER + zero).to(gl.int64), zero + number], gl.int32, False, 1)


@gluon.jit
def first_block(COUNTER, ints):
    """This program's own number; the first program begins the counter."""
    if gl.program_id(0) == 0:
        with_counter(COUNTER, ints.concurrent, BEGIN)
    return gl.program_id(0)


@gluon.jit
def next_block(COUNTER, queue, cursor, ints):
    """The producer's next number, which it sends to the warpgroups: n or more at the end, one for each program."""
    number = with_counter(COUNTER, ints.n + ints.concurrent - 1, TAKE)
    wait(queue.empty, cursor)
    queue.numbers.index(cursor.slot).store(number)
    mbarrier.arrive(queue.full.index(cursor.slot), count=1)
    return gl.max(number, 0), advance(cursor, QUEUED)


@gluon.jit
def received_block(queue, cursor):
    """That of a warpgroup."""
    wait(queue.full, cursor)
    number = queue.numbers.index(cursor.slot).load(gl.BlockedLayout([1], [32], [4], [0]))
    give_back(queue.empty, cursor)
    return gl.max(number, 0), advance(cursor, QUEUED)
