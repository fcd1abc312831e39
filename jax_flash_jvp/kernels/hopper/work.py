"""Which blocks a program computes, or which part of a block."""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jax_flash_jvp.kernels.portable import scores

aligned = gluon.jit(scores.aligned.fn)
TOGETHER = gl.constexpr(8)  # heads whose streamed rows are to share the L2 cache

# the integers of a launch: blocks, query heads, those for each key head, lengths, reach to both sides, blocks that are not
# shared, tiles of the others for each program, programs at once; reciprocals, for `divided`: of a head's blocks, a batch entry's
# heads, a block's tiles, a program's, TOGETHER and the heads that are left of them
Call = namedtuple(
    "Call",
    "n HQ GROUP LQ LK left right n_whole share at_once of_blocks of_heads of_tiles of_share of_together of_rest",
)
# the number of a block, its tiles first … end, the programs since … until whose parts of it are to go with these, whether the
# first of those parts is gone on with, and whether these tiles are handed over themselves
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
def own_block(i, call, n_blocks, FROM_END: gl.constexpr, FEATURES: gl.constexpr):
    """(block, batch entry and head) of number i.  Under causality the longest blocks, first or last, of a few heads go
    before the shorter: head after head, the last ones would begin a long block when others are done.  Where all are alike, they
    may go from the last to the first."""
    if FEATURES.right:
        first = divided(i, n_blocks, call.of_blocks)[0] // TOGETHER * TOGETHER
        left = divided(call.n, n_blocks, call.of_blocks)[0] - first
        few = left < TOGETHER
        block, i_head = divided(
            i - first * n_blocks, gl.where(few, left, TOGETHER), gl.where(few, call.of_rest, call.of_together)
        )
        if FROM_END:
            block = n_blocks - 1 - block
        return block, first + i_head
    else:
        if FEATURES.last_first:  # of those that are not shared
            i = gl.where(i < call.n_whole, call.n_whole - 1 - i, i)
        i_head, block = divided(i, n_blocks, call.of_blocks)
        return block, i_head


@gluon.jit
def in_wave(call, FEATURES: gl.constexpr):
    """This program's number in its wave: they may come in waves, each of a program for every multiprocessor."""
    return gl.program_id(0) % call.at_once if FEATURES.waves else gl.program_id(0)


@gluon.jit
def shared_tiles(call, n_tiles, FEATURES: gl.constexpr):
    """The first of this program's, of the tiles of all shared blocks, and the end, which is before it if there are none left."""
    first = in_wave(call, FEATURES) * call.share
    return first, gl.minimum(first + call.share, (call.n - call.n_whole) * n_tiles)


@gluon.jit
def items(call, n_tiles, FEATURES: gl.constexpr):
    """(first, end): a program computes the `item`s first, first + at_once … below the end, one after the other.  The first, of a
    number below zero, is what another program waits for, the last what waits for others."""
    first = in_wave(call, FEATURES)
    end = call.n_whole
    wave = 0
    waves = 1
    if FEATURES.waves:
        wave = gl.program_id(0) // call.at_once
        waves = gl.num_programs(0) // call.at_once
        rounds = gl.cdiv(call.n_whole, call.at_once)
        first += rounds * wave // waves * call.at_once
        end = gl.minimum(rounds * (wave + 1) // waves * call.at_once, call.n_whole)
    if FEATURES.shared:
        t_first, t_end = shared_tiles(call, n_tiles, FEATURES)
        block, over = divided(t_end, n_tiles, call.of_tiles)
        if (wave == 0) & (over > 0):
            first -= call.at_once
        if (wave == waves - 1) & (block > divided(t_first, n_tiles, call.of_tiles)[0]):
            end += call.at_once
    return first, end


@gluon.jit
def item(i, call, n_tiles, FEATURES: gl.constexpr):
    """The first n_whole blocks, of n_tiles each, are one program's each.  The tiles of the others, fewer than there are programs,
    are `shared`: each program has the next `share` of them, parts of one block or two, until there are none left.  The last part
    of a block comes at its program's end, the others, which are handed over, at their beginning.  They have lower numbers, so
    that they run whenever it waits.  Where they have whole blocks in between, it goes on from the first of these parts; with the
    rest, or all of them, it is put together when its tiles are done."""
    first = 0 * n_tiles
    end = n_tiles
    since = first
    until = first
    handed_over = first > 0
    resumed = handed_over
    if FEATURES.shared:
        handed_over = i < 0
        if handed_over | (i >= call.n_whole):
            share_first, share_end = shared_tiles(call, n_tiles, FEATURES)
            block, _ = divided(gl.where(handed_over, share_end, share_first), n_tiles, call.of_tiles)
            first = gl.maximum(share_first - block * n_tiles, 0)
            end = gl.minimum(share_end - block * n_tiles, n_tiles)
            since, _ = divided(block * n_tiles, call.share, call.of_share)
            until = gl.where(handed_over, since, in_wave(call, FEATURES))
            resumed = (since < until) & (call.n_whole > 0)
            i = call.n_whole + block
    return Item(i, first, end, since, until, resumed, handed_over)
