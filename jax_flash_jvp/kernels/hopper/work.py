"""Which blocks a program computes, or which part of a block, and where the results of a part lie."""

from collections import namedtuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jax_flash_jvp.kernels.hopper.products import GROUP_ROWS
from jax_flash_jvp.kernels.portable.scores import has

TOGETHER = gl.constexpr(8)  # heads whose streamed rows are to share the L2 cache

# the integers of a launch: blocks, query heads, those for each key head, lengths, reach to both sides, blocks that are not
# shared, tiles of the others for each program, programs at once
Call = namedtuple("Call", "n HQ GROUP LQ LK left right n_whole share at_once")
Item = namedtuple("Item", "block first end place")  # the number of a block, its tiles first … end, the place of results


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
    """The first of this program's, of the tiles of all shared blocks, and the end."""
    total = (call.n - call.n_whole) * n_tiles
    first = gl.minimum(in_wave(call) * call.share, total)
    return first, gl.minimum(first + call.share, total)


@gluon.jit
def items(call, n_tiles, FEATURES: gl.constexpr):
    """(first, end): a program computes the `item`s first, first + at_once … below the end, one after the other.  Those of the
    last wave have what is shared."""
    wave, waves = gl.program_id(0) // call.at_once, gl.num_programs(0) // call.at_once
    rounds = gl.cdiv(call.n_whole, call.at_once)
    first = in_wave(call) + rounds * wave // waves * call.at_once
    end = gl.minimum(rounds * (wave + 1) // waves * call.at_once, call.n_whole)
    if has(FEATURES, "shared"):
        if wave == waves - 1:
            t_first, t_end = shared_tiles(call, n_tiles)
            n_parts = (t_end - 1) // n_tiles - t_first // n_tiles + 1  # none, if that is the end of all
            end += in_wave(call) + n_parts * call.at_once
    return first, end


@gluon.jit
def item(i, call, n_tiles, FEATURES: gl.constexpr):
    """The first n_whole blocks, of n_tiles each, are one program's each.  The tiles of the others, fewer than there are programs,
    are "shared": each program has the next `share` of them, parts of one block or two, until there are none left.  Results of a
    part go to a place of their own, numbered as parts follow each other, from where `merge.py` takes them; those of a whole
    block, whose place is -1, to where they belong."""
    first = 0 * n_tiles
    end = n_tiles
    place = -1
    if has(FEATURES, "shared"):
        n_whole = call.n_whole
        if i >= n_whole:
            share_first, share_end = shared_tiles(call, n_tiles)
            block = share_first // n_tiles + (i - n_whole) // call.at_once
            i = n_whole + block
            first = gl.maximum(share_first - block * n_tiles, 0)
            end = gl.minimum(share_end - block * n_tiles, n_tiles)
            place = in_wave(call) + block
    return Item(i, first, end, place)


@triton.constexpr_function
def part_size(rows, sums, statistics, channels):
    """Floats of a part of a block: so many sums [rows, channels], then statistics [rows]."""
    return rows * (sums * channels + statistics)


@gluon.jit
def part_rows(
    PARTS, place, I: gl.constexpr, w: gl.constexpr, ROWS: gl.constexpr, SUMS: gl.constexpr, STATISTICS: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """Where a warpgroup's rows of the I-th sum are."""
    return PARTS + place * part_size(ROWS, SUMS, STATISTICS, C) + (I * ROWS + w * GROUP_ROWS) * C


@gluon.jit
def part_statistic(
    PARTS, place, I: gl.constexpr, w: gl.constexpr, ROWS: gl.constexpr, SUMS: gl.constexpr, STATISTICS: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """The same of the I-th statistic."""
    return PARTS + place * part_size(ROWS, SUMS, STATISTICS, C) + (SUMS * C + I) * ROWS + w * GROUP_ROWS
