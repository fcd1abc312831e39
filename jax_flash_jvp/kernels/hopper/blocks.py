"""A block: which resident rows, and which tiles of streamed rows it visits."""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jax_flash_jvp.kernels.hopper.products import GROUP_ROWS
from jax_flash_jvp.kernels.hopper.programs import divided, item, own_block
from jax_flash_jvp.kernels.hopper.visibility import (
    Bounds,
    Others,
    TileList,
    Visits,
    head_slice,
    key_bounds,
    lengths,
    selected,
    span,
    within,
)

# an `item`: of the resident rows the number of the block, batch entry and head; of the streamed ones the first head and how
# many; ends of queries and of keys, bounds of what is streamed
Block = namedtuple("Block", "work i_block i_b i_resident i_stream group query_end key_end bounds")


@gluon.jit
def tiles_in_all(ints, options):
    """The tiles of a block, those that it does not visit included."""
    if options.ROW:
        return gl.cdiv(ints.LK, options.T)
    else:
        return gl.cdiv(ints.LQ, options.T) * ints.GROUP


@gluon.jit
def block_of(i, ints, selection, options):
    """The i-th block.  ROW: its resident rows are queries, or else keys."""
    T: gl.constexpr = options.T
    ROW: gl.constexpr = options.ROW
    FEATURES: gl.constexpr = options.FEATURES
    ROWS: gl.constexpr = options.HEIGHT * GROUP_ROWS
    HQ, GROUP, LQ, LK, left, right = ints.HQ, ints.GROUP, ints.LQ, ints.LK, ints.left, ints.right
    HA = HQ if ROW else HQ // GROUP
    work = item(i, ints, tiles_in_all(ints, options), FEATURES)
    i_block, i_ba = own_block(work.block, ints, gl.cdiv(LQ if ROW else LK, ROWS), ROW, FEATURES)
    i_b, i_resident = divided(i_ba, HA, ints.of_heads)
    resident_row = i_block * ROWS
    query_end, key_end = lengths(selection.Q_LENGTHS, selection.K_LENGTHS, i_b, LQ, LK, FEATURES)
    if ROW:
        group = 1
        i_stream = i_resident // GROUP
        start, first, whole, stop = key_bounds(resident_row, ROWS, key_end, ints, FEATURES)
    else:
        group = GROUP
        i_stream = i_resident * GROUP
        start = 0
        first = 0
        stop = query_end
        # absent queries are rows of zeros
        whole = query_end if FEATURES.query_lengths else query_end + T - 1
        if FEATURES.right:
            start = resident_row - right
            first = resident_row + ROWS - 1 - right
        if FEATURES.left:
            whole = gl.minimum(whole, resident_row + left + 1)
            stop = gl.minimum(stop, resident_row + ROWS + left)
    if FEATURES.query_lengths if ROW else FEATURES.key_lengths:
        if resident_row >= (query_end if ROW else key_end):
            stop = 0
    return Block(work, i_block, i_b, i_resident, i_stream, group, query_end, key_end, Bounds(start, first, whole, stop))


@gluon.jit
def visits_of_head(i_g, block, ints, selection, options):
    """The tiles to visit for a query head, the i_g-th of a group: a list, as `portable/visibility.py` makes it, or by bounds."""
    T: gl.constexpr = options.T
    FEATURES: gl.constexpr = options.FEATURES
    if FEATURES.tiles.present:
        TILES_AXES: gl.constexpr = FEATURES.tiles
        n_blocks = gl.cdiv(ints.LQ if options.ROW else ints.LK, options.HEIGHT * GROUP_ROWS)
        n_tiles = gl.cdiv(ints.LK if options.ROW else ints.LQ, T)
        i_h = block.i_resident if options.ROW else block.i_stream + i_g
        CLASSES: gl.constexpr = FEATURES.tile_classes
        size = block.i_b.to(gl.int64) * 0 + n_blocks * (n_tiles + CLASSES)
        p_tiles = head_slice(selection.TILES, block.i_b, i_h, ints.HQ, ints.GROUP, size, TILES_AXES)
        p_tiles += block.i_block * (n_tiles + CLASSES)
        plain = 0 if FEATURES.one_loop else gl.load(p_tiles)
        unseen = gl.load(p_tiles + 1) - plain if FEATURES.ranges.present else 0
        visits = Visits(0, plain, 0, gl.load(p_tiles + (CLASSES - 1)) - plain, TileList(p_tiles + CLASSES, unseen))
    else:
        visits = span(block.bounds, T, options.HAS_MASKED, FEATURES)
    if FEATURES.shared:
        visits = within(visits, block.work, i_g, block.group, not options.ROW)
    return visits


@gluon.jit
def others_of_streamed(row, sight, options):
    """The resident rows for `clear_unseen` of streamed ones: those of the block that `row` is in."""
    ROWS: gl.constexpr = options.HEIGHT * GROUP_ROWS
    first = row // ROWS * ROWS
    return Others(first, first + ROWS, 1, sight)


@gluon.jit
def others_of_resident(block, call, options):
    """The streamed rows for `clear_unseen` of resident ones.  Of keys none if a tile without rows that nobody sees is visited:
    then somebody sees them all."""
    T: gl.constexpr = options.T
    FEATURES: gl.constexpr = options.FEATURES
    heads = block.group if FEATURES.ranges.heads else block.group * 0 + 1
    first = call.ints.LQ
    end = 0
    known = 0
    for i_g in range(heads):
        visits = visits_of_head(i_g, block, call.ints, call.selection, options)
        n = visits.plain_end + visits.masked_end
        before = visits.plain_end + visits.which.unseen_first
        if n > before:
            first = gl.minimum(first, gl.load(visits.which.p_tiles + before))
            end = gl.maximum(end, gl.load(visits.which.p_tiles + (n - 1)) + 1)
        if not options.ROW:
            known += before
    if known > 0:
        end = 0
    i_h = block.i_resident if options.ROW else block.i_stream
    sight = selected(block, i_h, call, options)
    return Others(first * T, end * T, heads, sight)
