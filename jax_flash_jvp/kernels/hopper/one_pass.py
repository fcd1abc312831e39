"""The plain backward in one pass over the scores: five products, not the seven of the two sides of `backward.py`.

A block is 64 keys for each of the GROUPS consumer warpgroups, and streams q and d_o of its query heads in tiles of T queries:

    s = k qᵀ    dp = v d_oᵀ − δ    ds = p∘dp    dv += p d_o    dk += ds q    [keys, queries]        dq = dsᵀ k    [queries, keys]

dq of a tile is a sum over all keys, of which a block has some: dS goes through shared memory, where a warpgroup, each in turn
for a tile, multiplies that of all of them with the keys, LAG tiles behind, so that it waits for nobody.  A warp of its own has
TMA add the outcome to an accumulator in memory, in float32 and in the order of registers (`by_thread`), whoever comes first, so
that the bits of dQ are not the same on every run, or ORDERED, see below.  `prepare` makes the row statistics and zeros,
`scale_queries` dQ of the sums.

By how much rows of dS exceed what they should sum to, as they are multiplied, times a mean key is taken off dQ in heads whose
keys have much in common (README.md, "Rounding"): the sums are a product of dSᵀ with ones, added up beside dq.
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jax_flash_jvp.kernels.hopper.blocks import block_of, visits_of_head
from jax_flash_jvp.kernels.hopper.products import (
    GROUP_ROWS,
    LOG2E,
    accumulated,
    before,
    excess_of,
    log2_sum_exp,
    mean_at,
    parts,
    product_layout,
    scaled,
    score_product,
    settled,
    settled_before,
    store_rows,
    sums,
    width,
    without_mean,
    zeroed,
)
from jax_flash_jvp.kernels.hopper.programs import Integers, aligned, by_thread, counted, stored
from jax_flash_jvp.kernels.hopper.ring import (
    Cursor,
    add_async,
    async_load,
    barriers,
    clean,
    described,
    expect,
    give_back,
    load,
    load_resident,
    matrix,
    row_layout,
    tiles,
    wait,
)
from jax_flash_jvp.kernels.hopper.visibility import (
    Selection,
    bits,
    has_masked_tiles,
    hide,
    looked_up,
    selected,
)

ONES = gl.constexpr(16)  # columns of the narrowest tile that a product reads
TILE = gl.constexpr(64)  # queries, whose dq one warpgroup makes
ODD, COMMON_KEYS = gl.constexpr(16), gl.constexpr(32)  # see `make_dq_in_turn`
# constants: SLOTS of q and of d_o, KEPT tiles of dS; ROW and HEIGHT are for `own`
Options = namedtuple(
    "Options", "C T SLOTS KEPT GROUPS HEIGHT ROW LAG TURNS FEATURES HAS_MASKED CORRECTED RAGGED ORDERED"
)
# descriptors; of q, k, v, d_o and dq those of the parts of their columns
Arrays = namedtuple("Arrays", "q k v do lse2 delta dq rows")
# shared, and the barriers of each
Memory = namedtuple(
    "Memory",
    "k v q do lse2 delta ds dq ones rows "
    "k_full v_full cleaned q_full q_empty do_full do_empty ds_full ds_empty dq_full dq_empty turn",
)
Results = namedtuple("Results", "DK DV")


@gluon.jit
def at(i, N: gl.constexpr):
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
        return 1 - visits.start - n, 1 - visits.start
    else:
        return visits.start, visits.start + n


@gluon.jit
def tile_of(t, visits, options):
    if options.FEATURES.tiles.present:
        return gl.load(visits.start + t)
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
        return (j < visits.first) | (j >= visits.end)


# ------------------------------------------------------------------------------------------------ the order of sums

# ORDERED, blocks add to a tile in the order of their keys, and dQ has the same bits on every run.  A counter for each tile says
# how many have; a block waits for those before it that visit the tile.  Their programs have smaller numbers (`own_block`) and
# have begun, so that the first of all that run waits for nobody.  Blocks visit the last tile first, since of the blocks that
# visit a tile, then, those of the first keys come there first: under causality all begin with the same tile, within windows
# each next one some tiles farther on.  Blocks that begin together differ in their heads as far as they may
# (`Features.heads_in_turn`), so that few wait for each other from the start.

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
def blocks_before(j, block, ints, options):
    """How many blocks of keys before this one visit the j-th tile, which this one does: where ends of blocks grow with their
    numbers, all but the first ones, which see no queries as late."""
    first = 0
    if options.FEATURES.left:
        first = gl.maximum(j * options.T - ints.left, 0) // (options.GROUPS * GROUP_ROWS)
    return block.i_block - first


# ------------------------------------------------------------------------------------------------ the warps that load and add


@gluon.jit
def tiles_of_queries(LQ, options):
    """Of a head, as many as TILE queries at a time need."""
    return gl.cdiv(LQ, TILE) * (TILE // options.T)


@gluon.jit
def load_keys(x, place, bar, buffers, options):
    """The block's rows of keys or of values."""
    GROUPS: gl.constexpr = options.GROUPS
    i_b, i_a, row = place
    expect(bar, GROUPS, x)
    for w in gl.static_range(GROUPS):
        load_resident(x, i_b, i_a, row, bar, buffers, w, w)


@gluon.jit
def produce(arrays, memory, ints, selection, options):
    T: gl.constexpr = options.T
    block = block_of(gl.program_id(0), ints, selection, options)
    i_b = block.i_b
    n_tiles = tiles_of_queries(ints.LQ, options)
    of_keys = (i_b, block.i_a, block.i_block * (options.GROUPS * GROUP_ROWS))
    load_keys(arrays.k, of_keys, memory.k_full.index(0), memory.k, options)
    i = 0
    for i_g in range(block.group):
        i_h = block.i_stream + i_g
        visits = visits_of_head(i_g, block, ints, selection, options)
        low, high = tile_range(visits, options)
        for t in range(low, high):
            j = tile_of(t, visits, options)
            of_tile = (i_b * ints.HQ + i_h) * n_tiles + j
            use = at(i, options.SLOTS)
            place = (i_b, i_h, j * T, of_tile * T)
            load_streamed(arrays.q, arrays.lse2, place, use, memory.q, memory.lse2, memory.q_full, memory.q_empty)
            if i == 0:  # v is of no use before q is there
                load_keys(arrays.v, of_keys, memory.v_full.index(0), memory.v, options)
            load_streamed(arrays.do, arrays.delta, place, use, memory.do, memory.delta, memory.do_full, memory.do_empty)
            i += 1
    if i == 0:
        load_keys(arrays.v, of_keys, memory.v_full.index(0), memory.v, options)


@gluon.jit
def load_streamed(descs, desc, place, use, buffers, statistics, full, empty):
    """A tile of rows, and a statistic of these."""
    i_b, i_h, row, of_statistics = place
    bar = full.index(use.slot)
    wait_empty(empty, use)
    expect(bar, 1, descs, desc.block_type.nbytes)
    load(descs, i_b, i_h, row, bar, buffers, use.slot, 0, descs[0].block_type.shape[2])
    async_load(desc, [of_statistics], bar, statistics.index(use.slot))


@gluon.jit
def await_count(COUNT, number, seen):
    number = number + gl.zeros_like(seen)
    gl.inline_asm_elementwise(
        AWAIT, "=&r,l,r,r", [(COUNT + gl.zeros_like(seen)).to(gl.int64), number, seen], gl.int32, False, 1
    )


@gluon.jit
def add(arrays, memory, COMMON, COUNTS, ints, selection, options):
    """The warp that has TMA add dq, and row sums, to what other blocks have made of them."""
    ORDERED: gl.constexpr = options.ORDERED
    block = block_of(gl.program_id(0), ints, selection, options)
    i_b = block.i_b
    n_tiles = tiles_of_queries(ints.LQ, options)
    common = 0
    if options.CORRECTED:
        common = gl.load(COMMON + i_b * (ints.HQ // ints.GROUP) + block.i_a)
    i = 0
    for i_g in range(block.group):
        i_h = block.i_stream + i_g
        visits = visits_of_head(i_g, block, ints, selection, options)
        low, high = tile_range(visits, options)
        seen = gl.full([32], -1, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
        for t in range(low, high):
            j = tile_of(t, visits, options)
            of_tile = (i_b * ints.HQ + i_h) * n_tiles + j
            if ORDERED:
                await_count(COUNTS + of_tile, blocks_before(j, block, ints, options), seen)
            wait(memory.dq_full, at(i, 1))
            if options.CORRECTED:
                if common:
                    add_async(arrays.rows, [of_tile * arrays.rows.block_type.shape[0]], memory.rows.index(0))
            for PART in gl.static_range(parts(options.C)):
                desc = arrays.dq[PART]
                add_async(desc, [of_tile * desc.block_type.shape[0], 0], memory.dq[PART].index(0))
            if ORDERED:  # of the next tile, if there is one, so that the answer is here by then
                seen = counted(COUNTS + gl.maximum(of_tile - 1, 0), 0, LOOK)
            tma.store_wait(0)  # until it is read
            i += 1
            mbarrier.arrive(memory.dq_empty.index(i % options.GROUPS), count=1)
            if ORDERED:
                counted(COUNTS + of_tile, 0, ADDED)


# ------------------------------------------------------------------------------------------------ the warpgroups that multiply


@gluon.jit
def clean_resident(w: gl.constexpr, n, memory):
    """Zeros for a warpgroup's rows of k and v from the n-th on, which may hold anything: all make dq of them."""
    clean(matrix(memory.k, w), 0, n)
    clean(matrix(memory.v, w), 0, n)
    fence_async_shared()
    mbarrier.arrive(memory.cleaned.index(0), count=1)
    mbarrier.wait(memory.cleaned.index(0), 0)


@gluon.jit
def query_product(i, slot, PART: gl.constexpr, memory, options):
    """dSᵀ K of a tile over all keys of the block, of one part of the columns."""
    GROUPS: gl.constexpr = options.GROUPS
    l: gl.constexpr = product_layout(width(options.C, PART))
    b_dq = gl.zeros([GROUP_ROWS, width(options.C, PART)], gl.float32, l)
    for w in gl.static_range(GROUPS):
        ds = memory.ds.index(GROUPS * slot + w)  # [keys, queries]
        b_dq = warpgroup_mma(
            ds.permute((1, 0)), matrix(memory.k, w + (i >> 30))[PART], b_dq, use_acc=w > 0, is_async=True
        )  # fmt: skip
    return b_dq


@gluon.jit
def row_sums(slot, memory, options):
    """Those of the GROUP_ROWS columns of a place of dS, over all keys of the block: all columns of a product with ones."""
    b_r = gl.zeros([GROUP_ROWS, ONES], gl.float32, product_layout(ONES))
    for w in gl.static_range(options.GROUPS):
        ds = memory.ds.index(options.GROUPS * slot + w)
        b_r = warpgroup_mma(ds.permute((1, 0)), memory.ones, b_r, use_acc=w > 0, is_async=True)
    return gl.max(warpgroup_mma_wait(0, deps=[b_r]), 1)


@gluon.jit
def make_dq_in_turn(i, turn, w: gl.constexpr, memory, options):
    """After the i-th tile, if it is this warpgroup's; then again after as many tiles as there are warpgroups.  `turn`, one number
    as registers are few: how many tiles until then, ODD, as barriers have phases, if so many turns are over, and COMMON_KEYS."""
    if (turn & (ODD - 1)) == 0:
        make_dq(i - options.LAG, w, (turn & ODD) // ODD, turn >= COMMON_KEYS, memory, options)
        turn = (turn ^ ODD) + options.GROUPS
    return turn - 1


@gluon.jit
def make_dq(i, w: gl.constexpr, odd, common, memory, options):
    """Of the i-th tile."""
    use = at(i, options.KEPT)
    wait(memory.ds_full, use)
    C: gl.constexpr = options.C
    if options.CORRECTED:
        if common:
            mbarrier.wait(memory.dq_empty.index(w), odd)
            memory.rows.index(0).store(row_sums(use.slot, memory, options))
    b_dq = (query_product(i, use.slot, 0, memory, options),)
    for PART in gl.static_range(1, parts(C)):
        b_dq = b_dq + (query_product(i, use.slot, PART, memory, options),)
    if parts(C) == 1:
        b_0 = warpgroup_mma_wait(0, deps=[b_dq[0]])
        b_dq = (b_0,)
    else:
        b_0, b_1 = warpgroup_mma_wait(0, deps=[b_dq[0], b_dq[1]])
        b_dq = (b_0, b_1)
    give_back(memory.ds_empty, use)
    mbarrier.wait(memory.dq_empty.index(w), odd)  # its place is given from one warpgroup to the next
    for PART in gl.static_range(parts(C)):
        memory.dq[PART].index(0).store(by_thread(b_dq[PART]).reshape([2 * width(C, PART), 32]))
    fence_async_shared()
    mbarrier.arrive(memory.dq_full.index(0), count=1)


@gluon.jit
def multiply(i, j, masked, w: gl.constexpr, a_start, sight, ds, b_dk, b_dv, memory, scale, options):
    """One tile of queries."""
    T: gl.constexpr = options.T
    GROUPS: gl.constexpr = options.GROUPS
    FEATURES: gl.constexpr = options.FEATURES
    DEFERRED: gl.constexpr = FEATURES.deferred
    LATE_DP: gl.constexpr = FEATURES.late_dp
    N: gl.constexpr = parts(options.C)
    s_l: gl.constexpr = product_layout(T)
    x_l: gl.constexpr = gl.SliceLayout(0, s_l)
    p_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=s_l, k_width=2)
    dtype: gl.constexpr = memory.k[0].dtype
    zero = gl.zeros([GROUP_ROWS, T], gl.float32, s_l)
    a_start += i >> 30  # so that numbers of rows are worked out here, as the loop has no registers for them
    use = at(i, options.SLOTS)
    slot = gl.where(i > 0, at(i + options.SLOTS - 1, options.SLOTS).slot, 0)  # of the tile before
    kept = at(i, options.KEPT)
    q = matrix(memory.q, use.slot)
    do = matrix(memory.do, use.slot)
    if FEATURES.query_lengths:
        if masked:
            wait(memory.q_full, use)
            clean(q, j * T, sight.query_end)
            wait(memory.do_full, use)
            clean(do, j * T, sight.query_end)
    wait(memory.q_full, use)
    if options.TURNS:
        mbarrier.wait(memory.turn.index(w), i & 1)
    if DEFERRED:
        b_dk = accumulated(ds, matrix(memory.q, slot), b_dk)
    b_s = score_product(matrix(memory.k, w + (i >> 30)), q, zero, False)
    if not LATE_DP:
        wait(memory.do_full, use)
        b_dp = score_product(matrix(memory.v, w + (i >> 30)), do, zero, False)
    if options.TURNS:
        mbarrier.arrive(memory.turn.index((w + 1) % GROUPS), count=1)
    if DEFERRED:
        b_dk, ds, b_s = settled_before(b_dk, ds, b_s, 0 if LATE_DP else N)
        mbarrier.arrive(memory.q_empty.index(slot), count=1, pred=i > 0)
    else:
        b_s = warpgroup_mma_wait(0 if LATE_DP else N, deps=[b_s])
    lse2 = gl.expand_dims(memory.lse2.index(use.slot).load(x_l), 0)
    if options.RAGGED:  # P of keys that do not exist could be anything, infinite too, and would reach dq
        if a_start + GROUP_ROWS > sight.key_end:
            o_a = a_start + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, s_l))
            b_s = gl.where(gl.expand_dims(o_a < sight.key_end, 1), b_s, -float("inf"))
    if options.HAS_MASKED:
        if masked:
            b_bits = bits(a_start, j * T, sight, T, False, True, FEATURES, s_l)
            seen = looked_up(a_start, j * T, sight, T, False, True, FEATURES, s_l)
            b_s = hide(b_s, seen, b_bits, a_start, j * T, sight, T, False, True, FEATURES, s_l)
    b_p = gl.exp2(b_s * (scale * LOG2E) - lse2)
    if LATE_DP:
        wait(memory.do_full, use)
        b_dp = score_product(matrix(memory.v, w + (i >> 30)), do, zero, False)
    p = gl.convert_layout(b_p.to(dtype), p_l)
    b_dv = accumulated(p, do, b_dv)
    b_dp = warpgroup_mma_wait(N, deps=[b_dp])
    delta = gl.expand_dims(memory.delta.index(use.slot).load(x_l), 0)
    b_ds = (b_p * (b_dp - delta)).to(dtype)
    wait_empty(memory.ds_empty, kept)
    memory.ds.index(GROUPS * kept.slot + w).store(b_ds)
    ds = gl.convert_layout(b_ds, p_l)
    fence_async_shared()
    give_back(memory.ds_full, kept)
    if DEFERRED:
        b_dv, p = settled(b_dv, p)
    else:
        b_dk = accumulated(ds, q, b_dk)
        b_dk, ds = settled(b_dk, ds)
        b_dv, p = settled(b_dv, p)
        give_back(memory.q_empty, use)
    give_back(memory.do_empty, use)
    return ds, b_dk, b_dv


@gluon.jit
def as_after(i, ints):
    """The same, but so that the compiler, which does not know, works nothing out of n before the loop."""
    return Integers(
        ints.n + (i >> 30), ints.HQ, ints.GROUP, ints.LQ, ints.LK, ints.left, ints.right, 0, 0, 0,
        ints.of_blocks, ints.of_heads, 0, 0, ints.of_together, ints.of_rest,
    )  # fmt: skip


@gluon.jit
def consume(w: gl.constexpr, memory, COMMON, results, scale, ints, selection, options):
    C: gl.constexpr = options.C
    T: gl.constexpr = options.T
    GROUPS: gl.constexpr = options.GROUPS
    FEATURES: gl.constexpr = options.FEATURES
    s_l: gl.constexpr = product_layout(T)
    p_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=s_l, k_width=2)
    block = block_of(gl.program_id(0), ints, selection, options)
    i_b, i_a = block.i_b, block.i_a
    HK = ints.HQ // ints.GROUP
    a_start = (block.i_block * GROUPS + w) * GROUP_ROWS
    b_dk, b_dv = sums(C), sums(C)
    ds = gl.convert_layout(gl.zeros([GROUP_ROWS, T], memory.k[0].dtype, s_l), p_l)
    mbarrier.wait(memory.k_full.index(0), 0)
    mbarrier.wait(memory.v_full.index(0), 0)
    if FEATURES.key_lengths:
        clean_resident(w, block.key_end - a_start, memory)
    turn = options.LAG + w
    if options.CORRECTED:
        turn += gl.load(COMMON + i_b * HK + i_a) * COMMON_KEYS
    i = 0
    for i_g in range(block.group):
        visits = visits_of_head(i_g, block, ints, selection, options)
        sight = selected(
            selection, i_b, block.i_stream + i_g, ints, block.query_end, block.key_end, False, FEATURES
        )  # fmt: skip
        low, high = tile_range(visits, options)
        for t in range(low, high):
            j = tile_of(t, visits, options)
            masked = is_masked(t, visits, options)
            ds, b_dk, b_dv = multiply(i, j, masked, w, a_start, sight, ds, b_dk, b_dv, memory, scale, options)
            turn = make_dq_in_turn(i, turn, w, memory, options)
            i += 1
    if FEATURES.deferred:
        if i > 0:
            b_dk = accumulated(ds, matrix(memory.q, at(i - 1, options.SLOTS).slot), b_dk)
            b_dk, ds = settled(b_dk, ds)
    for more in range(options.LAG):
        turn = make_dq_in_turn(i + more, turn, w, memory, options)
    # worked out again, as the loop has no registers for it
    block = block_of(gl.program_id(0) + (i >> 30), as_after(i, ints), selection, options)
    i_b, i_a = block.i_b, block.i_a
    a_start = (block.i_block * GROUPS + w) * GROUP_ROWS
    o_a = a_start + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, s_l))
    b_dk = scaled(b_dk, gl.full([GROUP_ROWS], scale, gl.float32, gl.SliceLayout(1, s_l)))
    if FEATURES.key_lengths:
        b_dk, b_dv = zeroed(b_dk, o_a >= block.key_end), zeroed(b_dv, o_a >= block.key_end)
    store_rows(results.DV, i_b, i_a, HK, a_start, ints.LK, b_dv, C)
    store_rows(results.DK, i_b, i_a, HK, a_start, ints.LK, b_dk, C)


@gluon.jit
def query_tiles(desc, C: gl.constexpr):
    """For dq of a tile, of each part of the columns what TMA takes at a time."""
    if parts(C) == 1:
        return (gl.allocate_shared_memory(gl.float32, [1, 2 * width(C, 0), 32], desc[0].layout),)
    else:
        return (
            gl.allocate_shared_memory(gl.float32, [1, 2 * width(C, 0), 32], desc[0].layout),
            gl.allocate_shared_memory(gl.float32, [1, 2 * width(C, 1), 32], desc[1].layout),
        )


@gluon.jit
def program(arrays, COMMON, COUNTS, results, scale, ints, selection, options):
    """Its shared memory, its warps."""
    C: gl.constexpr = options.C
    T: gl.constexpr = options.T
    GROUPS: gl.constexpr = options.GROUPS
    SLOTS: gl.constexpr = options.SLOTS
    ds_l: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    k = tiles(arrays.k, GROUPS)
    v = tiles(arrays.v, GROUPS)
    q = tiles(arrays.q, SLOTS)
    do = tiles(arrays.do, SLOTS)
    lse2 = gl.allocate_shared_memory(gl.float32, [SLOTS, T], arrays.lse2.layout)
    delta = gl.allocate_shared_memory(gl.float32, [SLOTS, T], arrays.delta.layout)
    ds = gl.allocate_shared_memory(arrays.k[0].dtype, [GROUPS * options.KEPT, GROUP_ROWS, T], ds_l)
    dq = query_tiles(arrays.dq, C)
    ones = lse2
    rows = lse2
    if options.CORRECTED:
        rows = gl.allocate_shared_memory(gl.float32, [1, T], arrays.rows.layout)
        ones_l: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * ONES, element_bitwidth=16, rank=2)
        ones = gl.allocate_shared_memory(arrays.k[0].dtype, [GROUP_ROWS, ONES], ones_l)
        ones.store(gl.full([GROUP_ROWS, ONES], 1.0, arrays.k[0].dtype, row_layout(ONES)))
    k_full, v_full = barriers(1, 1), barriers(1, 1)
    q_full, q_empty = barriers(SLOTS, 1), barriers(SLOTS, GROUPS)
    do_full, do_empty = barriers(SLOTS, 1), barriers(SLOTS, GROUPS)
    ds_full, ds_empty = barriers(options.KEPT, GROUPS), barriers(options.KEPT, 1)
    dq_full, dq_empty = barriers(1, 1), barriers(GROUPS, 1)
    mbarrier.arrive(dq_empty.index(0), count=1)
    cleaned = k_full
    turn = k_full
    if options.FEATURES.key_lengths:
        cleaned = barriers(1, GROUPS)
    if options.TURNS:
        turn = barriers(GROUPS, 1)
        mbarrier.arrive(turn.index(0), count=1)
    fence_async_shared()
    memory = Memory(
        k, v, q, do, lse2, delta, ds, dq, ones, rows,
        k_full, v_full, cleaned, q_full, q_empty, do_full, do_empty, ds_full, ds_empty, dq_full, dq_empty, turn,
    )  # fmt: skip
    if GROUPS == 2:
        gl.warp_specialize([
            (consume, (0, memory, COMMON, results, scale, ints, selection, options)),
            (consume, (1, memory, COMMON, results, scale, ints, selection, options)),
            (produce, (arrays, memory, ints, selection, options)),
            (add, (arrays, memory, COMMON, COUNTS, ints, selection, options)),
        ], [4, 1, 1], [240, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (0, memory, COMMON, results, scale, ints, selection, options)),
            (consume, (1, memory, COMMON, results, scale, ints, selection, options)),
            (consume, (2, memory, COMMON, results, scale, ints, selection, options)),
            (produce, (arrays, memory, ints, selection, options)),
            (add, (arrays, memory, COMMON, COUNTS, ints, selection, options)),
        ], [4, 4, 1, 1], [160, 160, 24, 24])  # fmt: skip


@gluon.jit(do_not_specialize_on_alignment=Integers._fields)
def one_pass(
    q_d, k_d, v_d, do_d, q_r, k_r, v_r, do_r, lse2_d, delta_d,
    MASK, BLOCKS, Q_LENGTHS, K_LENGTHS, Q_SEGMENTS, K_SEGMENTS, RANGES, TILES, COMMON,
    scale, n, HQ, GROUP, LQ, LK, left, right, of_blocks, of_heads, of_together, of_rest,
    dq_d, dq_r, rows_d, COUNTS, DK, DV,
    C: gl.constexpr, SLOTS: gl.constexpr, KEPT: gl.constexpr, GROUPS: gl.constexpr, LAG: gl.constexpr, TURNS: gl.constexpr,
    CORRECTED: gl.constexpr, RAGGED: gl.constexpr, ORDERED: gl.constexpr, FEATURES: gl.constexpr,
):  # fmt: skip
    LQ, LK = aligned(LQ, LK, FEATURES)
    program(
        Arrays(
            described(q_d, q_r), described(k_d, k_r), described(v_d, v_r), described(do_d, do_r), lse2_d, delta_d,
            described(dq_d, dq_r), rows_d,
        ), COMMON, COUNTS, Results(DK, DV), scale,
        Integers(n, HQ, GROUP, LQ, LK, left, right, 0, 0, 0, of_blocks, of_heads, 0, 0, of_together, of_rest),
        Selection(MASK, BLOCKS, Q_LENGTHS, K_LENGTHS, Q_SEGMENTS, K_SEGMENTS, RANGES, TILES),
        Options(
            C, TILE, SLOTS, KEPT, GROUPS, GROUPS, False, LAG, TURNS, FEATURES,
            has_masked_tiles(FEATURES, False, False), CORRECTED, RAGGED, ORDERED,
        ),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ before and after


@gluon.jit
def own_queries(LQ):
    """The number of this program's tile, that of its batch entry and head, and its first row there."""
    n_tiles = gl.cdiv(LQ, TILE)
    i = gl.program_id(0)
    return i, i // n_tiles, (i % n_tiles) * TILE


@gluon.jit
def row_products(X, Y, stride, n, C: gl.constexpr, PART: gl.constexpr):
    """rowsum(x∘y) of a tile, of one part of the columns; zeros from row n on."""
    layout: gl.constexpr = row_layout(width(C, PART))
    o_r = gl.expand_dims(gl.arange(0, TILE, layout=gl.SliceLayout(1, layout)), 1)
    o_c = gl.expand_dims(before(C, PART) + gl.arange(0, width(C, PART), layout=gl.SliceLayout(0, layout)), 0)
    m_x = (o_r < n) & (o_c < C)
    b_x = gl.load(X + o_r * stride + o_c, mask=m_x, other=0.0).to(gl.float32)
    return gl.sum(b_x * gl.load(Y + o_r * stride + o_c, mask=m_x, other=0.0).to(gl.float32), 1)


@gluon.jit(do_not_specialize_on_alignment=Integers._fields)
def prepare(
    O, DO, LSE, D_LSE, Q_LENGTHS,
    HQ, LQ,
    LSE2, DELTA, DQ, DQ_R, ROWS, COUNTS,
    C: gl.constexpr, HAS_D_LSE: gl.constexpr, ORDERED: gl.constexpr, FEATURES: gl.constexpr,
):  # fmt: skip
    """Of a tile of queries ℓ in base 2, δ, and zeros to add dq to and to count with.  Rows past the end see nothing."""
    i, i_bh, row = own_queries(LQ)
    i_b, i_h = i_bh // HQ, i_bh % HQ
    x_l: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    end = LQ
    if FEATURES.query_lengths:
        end = gl.minimum(LQ, gl.load(Q_LENGTHS + i_b))
    b_delta = gl.zeros([TILE], gl.float32, x_l)
    x = ((i_b.to(gl.int64) * LQ + row) * HQ + i_h) * C
    for PART in gl.static_range(parts(C)):
        b_delta += gl.convert_layout(row_products(O + x, DO + x, HQ * C, end - row, C, PART), x_l)
    o_x = gl.arange(0, TILE, layout=x_l)
    m_x = row + o_x < end
    x = i_bh.to(gl.int64) * LQ + row + o_x
    b_lse = gl.load(LSE + x, mask=m_x, other=-float("inf"))
    if HAS_D_LSE:
        b_delta -= gl.load(D_LSE + x, mask=m_x, other=0.0)
    y = i.to(gl.int64) * TILE
    gl.store(LSE2 + y + o_x, log2_sum_exp(b_lse))
    gl.store(DELTA + y + o_x, b_delta)
    gl.store(ROWS + y + o_x, gl.zeros([TILE], gl.float32, x_l))
    if ORDERED:
        gl.store(COUNTS + i, 0)
    store_zeros(DQ + y * width(C, 0), width(C, 0))
    if parts(C) == 2:
        store_zeros(DQ_R + y * width(C, 1), width(C, 1))


@gluon.jit
def store_zeros(X, W: gl.constexpr):
    """For a tile of so many columns."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    zeros = gl.zeros([1024], gl.float32, layout)
    for PIECE in gl.static_range(TILE * W // 1024):
        gl.store(X + 1024 * PIECE + gl.arange(0, 1024, layout=layout), zeros)


@gluon.jit(do_not_specialize_on_alignment=Integers._fields)
def scale_queries(
    SUMS, SUMS_R, ROWS, LSE2, D_LSE, KEY_MEAN, COMMON,
    scale, HQ, GROUP, LQ,
    D_Q,
    C: gl.constexpr, HAS_D_LSE: gl.constexpr, CORRECTED: gl.constexpr, FEATURES: gl.constexpr,
):  # fmt: skip
    """dQ of a tile of queries."""
    i, i_bh, row = own_queries(LQ)
    i_b, i_h = i_bh // HQ, i_bh % HQ
    i_k = i_h // GROUP
    y = i.to(gl.int64) * TILE
    x_l: gl.constexpr = gl.SliceLayout(1, product_layout(width(C, 0)))
    o_x = gl.arange(0, TILE, layout=x_l)
    b_dq = (from_sums(SUMS + y * width(C, 0), width(C, 0)),)
    if parts(C) == 2:
        b_dq = b_dq + (from_sums(SUMS_R + y * width(C, 1), width(C, 1)),)
    if CORRECTED:
        if gl.load(COMMON + i_b * (HQ // GROUP) + i_k):
            lse2 = gl.expand_dims(gl.load(LSE2 + y + o_x), 1)
            x = i_bh.to(gl.int64) * LQ + row + o_x
            excess = excess_of(gl.load(ROWS + y + o_x), lse2, D_LSE, x, row + o_x < LQ, HAS_D_LSE)
            ints = Integers(0, HQ, GROUP, LQ, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
            mean = mean_at(i_b, i_h, i_k, row, ints, C, FEATURES)
            b_dq = without_mean(b_dq, excess, KEY_MEAN, mean, C, 0)
    b_dq = scaled(b_dq, gl.full([TILE], scale, gl.float32, x_l))
    store_rows(D_Q, i_b, i_h, HQ, row, LQ, b_dq, C)


@gluon.jit
def from_sums(SUMS, W: gl.constexpr):
    return stored(SUMS, gl.zeros([TILE, W], gl.float32, product_layout(W)))
