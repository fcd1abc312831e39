"""The warp that adds dQ up in memory, and its order.

A block has a part of the keys, and what it makes of dQ of a tile of queries TMA adds to an accumulator in memory, in float32 and
in the order of registers (`by_thread`): whichever block comes first, or ORDERED.

ORDERED, blocks add to a tile in the order of their keys, and dQ has the same bits on every run.  A counter for each tile says
how many have; a block waits for those before it that visit the tile.  Their programs have smaller numbers (`own_block`) and
have begun, so that the first of all that run waits for nobody.  Blocks visit the last tile first, since of the blocks that
visit a tile, then, those of the first keys come there first: under causality all begin with the same tile, within windows
each next one some tiles farther on.  Blocks that begin together differ in their heads as far as they may
(`Features.heads_in_turn`), so that few wait for each other from the start.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from jax_flash_jvp.kernels.hopper.blocks import block_of, visits_of_head
from jax_flash_jvp.kernels.hopper.products import GROUP_ROWS, parts, product_layout
from jax_flash_jvp.kernels.hopper.programs import with_counter
from jax_flash_jvp.kernels.hopper.ring import Cursor, add_async, wait

TILE = gl.constexpr(64)  # queries, for whole numbers of which there are accumulators
ONES = gl.constexpr(16)  # columns of the narrowest tile that a product reads
ODD, COMMON_KEYS = gl.constexpr(16), gl.constexpr(32)  # see `make_dq_in_turn`

# PTX of one warp.  LOOK: how many have added, for later; it is the fence of ADDED, which comes next, that orders what follows
# behind it.  AWAIT: until $2 have, of whom $3 had before.  ADDED: what the warp has had added is there, for all to see.
LOOK = gl.constexpr("ld.relaxed.gpu.global.u32 $0, [$1];")
AWAIT = gl.constexpr("""{
.reg .pred absent;
mov.b32 $0, $3;
bra ASK;
AGAIN:
ld.acquire.gpu.global.u32 $0, [$1];
ASK:
setp.lt.s32 absent, $0, $2;
vote.sync.any.pred absent, absent, -1;
@absent bra AGAIN;
fence.proxy.async.global;
}""")
ADDED = gl.constexpr("""{
.reg .pred first;
.reg .b32 lane;
cp.async.bulk.wait_group 0;
fence.proxy.async.global;
bar.warp.sync -1;
fence.acq_rel.gpu;
mov.u32 lane, %laneid;
setp.eq.u32 first, lane, 0;
@first red.relaxed.gpu.global.add.u32 [$1], 1;
mov.b32 $0, 0;
}""")


@gluon.jit
def slot_of(i, N: gl.constexpr):
    """The slot of the i-th use of a ring of a power of two of slots, and the phase of its barriers when that is full.  Cursors
    would take two registers for each ring."""
    gl.static_assert(N & (N - 1) == 0, "a power of two")
    LOG: gl.constexpr = N.bit_length() - 1
    return Cursor(i & (N - 1), (i >> LOG) & 1)


@gluon.jit
def wait_empty(bars, at):
    """For the use of a slot by whoever fills it."""
    mbarrier.wait(bars.index(at.slot), at.phase ^ 1)


@gluon.jit
def tile_range(visits, options):
    """What `tile_of` takes: numbers of a list, or of the tiles themselves, from the first that is seen to the last, as they come,
    which takes fewer registers than those before others that are seen whole."""
    n = visits.plain_end + visits.masked_end
    if options.FEATURES.tiles.present:
        return 0, n
    elif options.ORDERED:  # the last first: negative numbers
        return 1 - visits.which.start - n, 1 - visits.which.start
    else:
        return visits.which.start, visits.which.start + n


@gluon.jit
def tile_of(t, visits, options):
    if options.FEATURES.tiles.present:
        return gl.load(visits.which.p_tiles + t)
    elif options.ORDERED:
        return -t
    else:
        return t


@gluon.jit
def is_masked(t, visits, options):
    if options.FEATURES.tiles.present:
        return t >= visits.plain_end
    else:
        j = tile_of(t, visits, options)
        return (j < visits.which.whole_first) | (j >= visits.which.whole_end)


@gluon.jit
def blocks_before(j, block, ints, options):
    """How many blocks of keys before this one visit the j-th tile, which this one does: where ends of blocks grow with their
    numbers, all but the first ones, which see no queries as late."""
    first = 0
    if options.FEATURES.left:
        first = gl.maximum(j * options.T - ints.left, 0) // (options.GROUPS * GROUP_ROWS)
    return block.i_block - first


@gluon.jit
def tiles_of_queries(LQ, options):
    """The number of a head's tiles, counted in whole groups of TILE queries."""
    return gl.cdiv(LQ, TILE) * (TILE // options.T)


@gluon.jit
def await_count(COUNT, number, seen):
    number = number + gl.zeros_like(seen)
    gl.inline_asm_elementwise(
        AWAIT, "=&r,l,r,r", [(COUNT + gl.zeros_like(seen)).to(gl.int64), number, seen], gl.int32, False, 1
    )


@gluon.jit
def add(arrays, memory, call, options):
    """The warp that has TMA add dq, and row sums, to what other blocks have made of them."""
    COUNTS, ints = call.COUNTS, call.ints
    block = block_of(gl.program_id(0), ints, call.selection, options)
    i_b = block.i_b
    n_tiles = tiles_of_queries(ints.LQ, options)
    common = 0
    if options.CORRECTED:
        common = gl.load(call.COMMON + i_b * (ints.HQ // ints.GROUP) + block.i_resident)
    i = 0
    for i_g in range(block.group):
        i_h = block.i_stream + i_g
        visits = visits_of_head(i_g, block, ints, call.selection, options)
        low, high = tile_range(visits, options)
        seen = gl.full([32], -1, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
        for t in range(low, high):
            j = tile_of(t, visits, options)
            of_tile = (i_b * ints.HQ + i_h) * n_tiles + j
            if options.ORDERED:
                await_count(COUNTS + of_tile, blocks_before(j, block, ints, options), seen)
            wait(memory.dq_full, slot_of(i, 1))
            if options.CORRECTED:
                if common:
                    add_async(arrays.rows, [of_tile * arrays.rows.block_type.shape[0]], memory.rows.index(0))
            for PART in gl.static_range(parts(options.C)):
                desc = arrays.dq[PART]
                add_async(desc, [of_tile * desc.block_type.shape[0], 0], memory.dq[PART].index(0))
            if options.ORDERED:  # of the next tile, if there is one, so that the answer is here by then
                seen = with_counter(COUNTS + gl.maximum(of_tile - 1, 0), 0, LOOK)
            tma.store_wait(0)  # until it is read
            i += 1
            mbarrier.arrive(memory.dq_empty.index(i % options.GROUPS), count=1)
            if options.ORDERED:
                with_counter(COUNTS + of_tile, 0, ADDED)


# ------------------------------------------------------------------------------------------------ the warpgroups that make dQ


@gluon.jit
def row_sums(slot, memory, options):
    """The sums of the GROUP_ROWS columns of a place of dS, over all keys of the block: any column of a product with ones."""
    b_r = gl.zeros([GROUP_ROWS, ONES], gl.float32, product_layout(ONES))
    for w in gl.static_range(options.GROUPS):
        ds = memory.ds.index(options.GROUPS * slot + w)
        b_r = warpgroup_mma(ds.permute((1, 0)), memory.ones, b_r, use_acc=w > 0, is_async=True)
    return gl.max(warpgroup_mma_wait(0, deps=[b_r]), 1)


@gluon.jit
def make_dq_in_turn(make_dq: gl.constexpr, i, countdown, w: gl.constexpr, memory, options):
    """After the i-th tile, if it is this warpgroup's; then again after as many tiles as there are warpgroups.  `countdown`, one
    number as registers are few: tiles until then; ODD, as barriers have phases, if so many turns are over; and COMMON_KEYS."""
    if (countdown & (ODD - 1)) == 0:
        make_dq(i - options.LAG, w, (countdown & ODD) // ODD, countdown >= COMMON_KEYS, memory, options)
        countdown = (countdown ^ ODD) + options.GROUPS
    return countdown - 1
