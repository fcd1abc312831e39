"""What the steps of the backward have in common: a warpgroup's work on one tile of streamed rows.

             resident a, c     streamed b, e
key side     k, v              q, d_o            tiles [keys, queries]
query side   q, d_o            k, v              tiles [queries, keys]
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from jax_flash_jvp.kernels.hopper.blocks import others_of_streamed
from jax_flash_jvp.kernels.hopper.products import LOG2E, lane_sums, own_columns, product_layout, unfolded
from jax_flash_jvp.kernels.hopper.ring import advance, clean, give_back, matrix, rows_from, slot_before, wait
from jax_flash_jvp.kernels.hopper.visibility import bits, clear_unseen, masked_scores

# where it is: the first of the resident rows, its number, that in this loop and that of the loop's first, how many tiles the
# warpgroup has seen; what is seen of it, and the bits of a mask; where a and c are, and a; the slots of b and of e and what these
# hold, with tangents below, and each alone; that of the statistics
Tile = namedtuple("Tile", "a_row j t t_first tick sight bits resident a b_at e_at bb ee b e tb te s_at")
# gradients of a and c, their tangents, and row sums of dS and of ḋS
Sums = namedtuple("Sums", "da dc tda tdc r tr")
# of the resident rows, if these are queries; whether their keys have much in common; the reciprocal of the scale
Statistics = namedtuple("Statistics", "lse2 mu delta t_delta common per_scale")
LSE2, MU, DELTA, T_DELTA = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)  # places in shared memory
STAGES = gl.constexpr(2)  # of statistics there


@gluon.jit
def tile_at_hand(place, sight, b_at, s_at, resident, memory, MASKED: gl.constexpr, options):
    """A `Tile`, with b or e itself where it has no tangent."""
    T: gl.constexpr = options.T
    a_row, j, t, t_first, tick = place
    b_bits = bits(a_row, j * T, sight, MASKED, options)
    resident = unfolded(resident, tick)
    a = matrix(memory.a, resident)
    e_at = advance(b_at, options.SLOTS)
    bb, ee = matrix(memory.ring, b_at.slot), matrix(memory.ring, e_at.slot)
    b, e = rows_from(bb, 0, T), rows_from(ee, 0, T)
    tb = rows_from(bb, T, T) if options.USE_TB else b
    te = rows_from(ee, T, T) if options.USE_TE else e
    return Tile(a_row, j, t, t_first, tick, sight, b_bits, resident, a, b_at, e_at, bb, ee, b, e, tb, te, s_at)


@gluon.jit
def clean_tile(tile, memory, MASKED: gl.constexpr, options):
    """Zeros past the end of a sequence, and in rows that nobody sees."""
    if MASKED and (options.FEATURES.key_lengths if options.ROW else options.FEATURES.query_lengths):
        end = tile.sight.key_end if options.ROW else tile.sight.query_end
        wait(memory.full, tile.b_at)
        clean(tile.b, tile.j * options.T, end)
        wait(memory.full, tile.e_at)
        clean(tile.e, tile.j * options.T, end)
        if options.USE_TB:
            clean(tile.tb, tile.j * options.T, end)
        if options.USE_TE:
            clean(tile.te, tile.j * options.T, end)
    if MASKED == 2:
        others = others_of_streamed(tile.a_row, tile.sight, options)
        wait(memory.full, tile.b_at)
        wait(memory.full, tile.e_at)
        tiles = (tile.b, tile.e)
        if options.USE_TB:
            tiles = tiles + (tile.tb,)
        if options.USE_TE:
            tiles = tiles + (tile.te,)
        clear_unseen(tiles, tile.j * options.T, others, options.ROW, options.FEATURES)


@gluon.jit
def await_turn(w: gl.constexpr, tile, memory, options):
    if options.TURNS:
        mbarrier.wait(memory.turn.index(w), tile.tick & 1)


@gluon.jit
def end_turn(w: gl.constexpr, memory, options):
    if options.TURNS:
        mbarrier.arrive(memory.turn.index((w + 1) % options.GROUPS), count=1)


@gluon.jit
def slot_of_tile_before(tile, options):
    """That of b, which is still needed where products are DEFERRED; of the first tile its own."""
    return gl.where(tile.t > tile.t_first, slot_before(tile.b_at, 2, options.SLOTS), tile.b_at.slot)


@gluon.jit
def columns_of(slot, w: gl.constexpr, memory, options):
    """Of the b in a slot the columns of the warpgroup's sums."""
    return own_columns(rows_from(matrix(memory.ring, slot), 0, options.T), w, options.SPLIT)


@gluon.jit
def statistic(of_resident, KIND: gl.constexpr, tile, memory, options):
    """Of the resident rows, or else of the streamed ones, from shared memory."""
    if options.ROW:
        return of_resident
    else:
        layout: gl.constexpr = gl.SliceLayout(0, product_layout(options.T))
        return gl.expand_dims(memory.stats.index(4 * tile.s_at.slot + KIND).load(layout), 0)


@gluon.jit
def probabilities(b_s, lse2, seen, tile, scale, MASKED: gl.constexpr, options):
    """p = exp(s − ℓ), zero where nothing is seen."""
    b_s = masked_scores(b_s, seen, tile.bits, tile.a_row, tile.j * options.T, tile.sight, MASKED, options)
    return gl.exp2(b_s * (scale * LOG2E) - lse2)


@gluon.jit
def with_row_sums(b_r, b_ds, of_rows, tile, dtype: gl.constexpr):
    """If keys have much in common."""
    if unfolded(of_rows.common, tile.tick):  # tested here, as the loop must not wait for it to be loaded
        b_r += lane_sums(b_ds, dtype)
    return b_r


@gluon.jit
def give_back_tile(tile, memory, options):
    """All of it, but b where a product with it is DEFERRED.  Returns where the next tile is in the rings."""
    s_at = tile.s_at
    if not options.ROW:
        give_back(memory.s_empty, s_at)
        s_at = advance(s_at, STAGES)
    if not options.DEFERRED:
        give_back(memory.empty, tile.b_at)
    give_back(memory.empty, tile.e_at)
    return advance(tile.e_at, options.SLOTS), s_at
