"""Which blocks a program computes, or which part of a block."""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jax_flash_jvp.kernels.portable.scores import has

TOGETHER = gl.constexpr(8)  # heads whose streamed rows are to share the L2 cache

# the integers of a launch: blocks, query heads, those for each key head, lengths, reach to both sides, blocks that are not
# shared, tiles of the others for each program, programs at once
Call = namedtuple("Call", "n HQ GROUP LQ LK left right n_whole share at_once")
# the number of a block, its tiles first … end, the programs since … until whose parts of it are to go with these, and whether
# these are handed over themselves
Item = namedtuple("Item", "block first end since until handed_over")


@gluon.jit
def own_block(i, call, n_blocks, FROM_END: gl.constexpr, FEATURES: gl.constexpr):
    """(block, batch entry and head) of number i.  Under causality the longest blocks, first or last, of a few heads go
    before the shorter: head after head, the last ones would begin a long block when others are done.  Where all are alike, they
    may go from the last to the first."""
    if has(FEATURES, "right"):
        first = i // (TOGETHER * n_blocks) * TOGETHER
        heads = gl.minimum(call.n // n_blocks - first, TOGETHER)
        i -= first * n_blocks
        block = i // heads
        if FROM_END:
            block = n_blocks - 1 - block
        return block, first + i % heads
    else:
        if has(FEATURES, "last-first"):  # of those that are not shared
            i = gl.where(i < call.n_whole, call.n_whole - 1 - i, i)
        return i % n_blocks, i // n_blocks


@gluon.jit
def in_wave(call):
    """This program's number in its wave: they come in waves, each of a program for every multiprocessor."""
    return gl.program_id(0) % call.at_once


@gluon.jit
def shared_tiles(call, n_tiles):
    """The first of this program's, of the tiles of all shared blocks, and the end, which is before it if there are none left."""
    first = in_wave(call) * call.share
    return first, gl.minimum(first + call.share, (call.n - call.n_whole) * n_tiles)


@gluon.jit
def items(call, n_tiles, FEATURES: gl.constexpr):
    """(first, end): a program computes the `item`s first, first + at_once … below the end, one after the other.  The first, of a
    number below zero, is what another program waits for, the last what waits for others."""
    wave, waves = gl.program_id(0) // call.at_once, gl.num_programs(0) // call.at_once
    rounds = gl.cdiv(call.n_whole, call.at_once)
    first = in_wave(call) + rounds * wave // waves * call.at_once
    end = gl.minimum(rounds * (wave + 1) // waves * call.at_once, call.n_whole)
    if has(FEATURES, "shared"):
        t_first, t_end = shared_tiles(call, n_tiles)
        if (wave == 0) & (t_end % n_tiles > 0):
            first -= call.at_once
        if (wave == waves - 1) & (t_end // n_tiles > t_first // n_tiles):
            end += call.at_once
    return first, end


@gluon.jit
def item(i, call, n_tiles, FEATURES: gl.constexpr):
    """The first n_whole blocks, of n_tiles each, are one program's each.  The tiles of the others, fewer than there are programs,
    are "shared": each program has the next `share` of them, parts of one block or two, until there are none left.  The program
    with the last part of a block puts it together with those that others have handed over, at its end, and these at their
    beginning.  They have lower numbers, so that they run whenever it waits."""
    first = 0 * n_tiles
    end = n_tiles
    since = first
    until = first
    handed_over = first > 0
    if has(FEATURES, "shared"):
        handed_over = i < 0
        if handed_over | (i >= call.n_whole):
            share_first, share_end = shared_tiles(call, n_tiles)
            block = gl.where(handed_over, share_end, share_first) // n_tiles
            first = gl.maximum(share_first - block * n_tiles, 0)
            end = gl.minimum(share_end - block * n_tiles, n_tiles)
            since = block * n_tiles // call.share
            until = gl.where(handed_over, since, in_wave(call))
            i = call.n_whole + block
    return Item(i, first, end, since, until, handed_over)
