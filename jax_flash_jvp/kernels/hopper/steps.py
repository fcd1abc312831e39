"""What the steps of the backward have in common: a warpgroup's work on one tile of streamed rows.

Names are those of the key side.  On the query side queries play the part of keys, d_o that of values, and the other way round:

             resident k_like, v_like    streamed q_like, do_like
key side              k, v                       q, d_o             tiles [keys, queries]
query side            q, d_o                     k, v               tiles [queries, keys]

Names that are made of these leave "_like" out: dk is the gradient of k_like, tdk its tangent, tq_like the tangent of q_like.
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
# warpgroup has seen; what is seen of it, and the bits of a mask; where the resident rows are, and k_like; the slots of q_like
# and of do_like, what these hold, with tangents below, and each alone; the slot of the statistics
Tile = namedtuple(
    "Tile",
    "resident_row j t t_first tick sight bits resident k_like q_at do_at q_pair do_pair q_like do_like tq_like tdo_like s_at",
)
# gradients of k_like and v_like, their tangents, and row sums of dS and of ḋS
Sums = namedtuple("Sums", "dk dv tdk tdv r tr")
# of the resident rows, if these are queries; whether their keys have much in common; the reciprocal of the scale
Statistics = namedtuple("Statistics", "lse2 mu delta t_delta common per_scale")
LSE2, MU, DELTA, T_DELTA = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)  # places in shared memory
STAGES = gl.constexpr(2)  # of statistics there


@gluon.jit
def tile_at_hand(place, sight, ring_at, s_at, resident, memory, MASKED: gl.constexpr, options):
    """A `Tile`, with q_like or do_like itself where it has no tangent."""
    T: gl.constexpr = options.T
    resident_row, j, t, t_first, tick = place
    b_bits = bits(resident_row, j * T, sight, MASKED, options)
    resident = unfolded(resident, tick)
    k_like = matrix(memory.k_like, resident)
    do_at = advance(ring_at, options.SLOTS)
    q_pair, do_pair = matrix(memory.ring, ring_at.slot), matrix(memory.ring, do_at.slot)
    q_like, do_like = rows_from(q_pair, 0, T), rows_from(do_pair, 0, T)
    tq_like = rows_from(q_pair, T, T) if options.USE_TQ else q_like
    tdo_like = rows_from(do_pair, T, T) if options.USE_TDO else do_like
    return Tile(
        resident_row, j, t, t_first, tick, sight, b_bits, resident, k_like, ring_at, do_at, q_pair, do_pair, q_like, do_like,
        tq_like, tdo_like, s_at,
    )  # fmt: skip


@gluon.jit
def clean_tile(tile, memory, MASKED: gl.constexpr, options):
    """Zeros past the end of a sequence, and in rows that nobody sees."""
    tangents = ((tile.tq_like,) if options.USE_TQ else ()) + ((tile.tdo_like,) if options.USE_TDO else ())
    if MASKED and (options.FEATURES.key_lengths if options.ROW else options.FEATURES.query_lengths):
        end = tile.sight.key_end if options.ROW else tile.sight.query_end
        wait(memory.full, tile.q_at)
        clean(tile.q_like, tile.j * options.T, end)
        wait(memory.full, tile.do_at)
        clean(tile.do_like, tile.j * options.T, end)
        for I in gl.static_range(len(tangents)):
            clean(tangents[I], tile.j * options.T, end)
    if MASKED == 2:
        others = others_of_streamed(tile.resident_row, tile.sight, options)
        wait(memory.full, tile.q_at)
        wait(memory.full, tile.do_at)
        tiles = (tile.q_like, tile.do_like) + tangents
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
    """That of q_like, which is still needed where products are DEFERRED; of the first tile its own."""
    return gl.where(tile.t > tile.t_first, slot_before(tile.q_at, 2, options.SLOTS), tile.q_at.slot)


@gluon.jit
def columns_of(slot, w: gl.constexpr, memory, options):
    """The columns that a warpgroup sums, of the q_like in a slot."""
    return own_columns(rows_from(matrix(memory.ring, slot), 0, options.T), w, options.SPLIT)


@gluon.jit
def statistic(of_resident, KIND: gl.constexpr, tile, memory, options):
    """A statistic of the resident rows if ROW, or else of the streamed ones, from shared memory."""
    if options.ROW:
        return of_resident
    else:
        layout: gl.constexpr = gl.SliceLayout(0, product_layout(options.T))
        return gl.expand_dims(memory.stats.index(4 * tile.s_at.slot + KIND).load(layout), 0)


@gluon.jit
def probabilities(b_s, lse2, seen, tile, scale, MASKED: gl.constexpr, options):
    """p = exp(s − ℓ), zero where nothing is seen."""
    b_s = masked_scores(b_s, seen, tile.bits, tile.resident_row, tile.j * options.T, tile.sight, MASKED, options)
    return gl.exp2(b_s * (scale * LOG2E) - lse2)


@gluon.jit
def with_row_sums(b_r, b_ds, row_stats, tile, dtype: gl.constexpr):
    """If keys have much in common."""
    if unfolded(row_stats.common, tile.tick):  # tested here, as the loop must not wait for it to be loaded
        b_r += lane_sums(b_ds, dtype)
    return b_r


@gluon.jit
def give_back_tile(tile, memory, options):
    """All of it, but q_like where a product with it is DEFERRED.  Returns where the next tile is in the rings."""
    s_at = tile.s_at
    if not options.ROW:
        give_back(memory.s_empty, s_at)
        s_at = advance(s_at, STAGES)
    if not options.DEFERRED:
        give_back(memory.empty, tile.q_at)
    give_back(memory.empty, tile.do_at)
    return advance(tile.do_at, options.SLOTS), s_at
