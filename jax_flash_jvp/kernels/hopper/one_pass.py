"""The backward in one pass over the scores, plain and with tangents: five products, not seven, and fifteen, not twenty-one.

A block is 64 keys for each of the GROUPS consumer warpgroups, and streams q and d_o of its query heads in tiles of T queries,
each with its tangent below it, if there is one.  What it does with a tile say `step_one_pass.py` and `step_one_pass_dual.py`.

dq of a tile is a sum over all keys, of which a block has some: dS goes through shared memory, where a warpgroup, each in turn
for a tile, multiplies that of all of them with the keys, LAG tiles behind, so that it waits for nobody.  A warp of its own has
TMA add the outcome to an accumulator in memory (`adding.py`).  Sums of rows of dS, a product of dSᵀ with ones, are added up
beside dq.  What comes before, and what corrects and scales dQ, says `around_one_pass.py`.
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from jax_flash_jvp.kernels.hopper import adding, products, ring, step_one_pass, step_one_pass_dual
from jax_flash_jvp.kernels.hopper.blocks import block_of, others_of_resident, visits_of_head
from jax_flash_jvp.kernels.hopper.products import GROUP_ROWS, product_layout, unfolded
from jax_flash_jvp.kernels.hopper.programs import Integers, aligned
from jax_flash_jvp.kernels.hopper.ring import described, matrix
from jax_flash_jvp.kernels.hopper.skeleton import run
from jax_flash_jvp.kernels.hopper.step_one_pass_dual import STREAMED
from jax_flash_jvp.kernels.hopper.visibility import Selection, clear_unseen, has_masked_tiles, selected

# constants: SLOTS of q and of d_o, KEPT tiles of dS; ROW and HEIGHT are for `block_of`; DUAL: with tangents
Options = namedtuple(
    "Options", "C T SLOTS KEPT GROUPS HEIGHT ROW LAG TURNS HELD FEATURES HAS_MASKED CORRECTED RAGGED ORDERED DUAL"
)
Call = namedtuple("Call", "COMMON COUNTS results scale ints selection")  # what all warps are given
# descriptors: of q, k, v, d_o, their tangents and dq those of the parts of their columns, none where there is no tangent; of ℓ
# and μ, of δ and δ̇, as far as there are; of row sums
Arrays = namedtuple("Arrays", "q k v do tq tk tv tdo of_q of_do dq rows")
# shared, and the barriers of each
Memory = namedtuple(
    "Memory",
    "k v tk tv q do of_q of_do ds dq ones rows "
    "k_full v_full cleaned q_full q_empty do_full do_empty ds_full ds_empty dq_full dq_empty turn",
)


# ------------------------------------------------------------------------------------------------ the warp that loads


@gluon.jit
def load_keys(x, tx, place, bar, buffers, t_buffers, options):
    """The block's rows of keys or of values, and of their tangents."""
    i_b, i_a, row = place
    ring.expect(bar, options.GROUPS * (2 if options.DUAL else 1), x)
    for w in gl.static_range(options.GROUPS):
        ring.load_resident(x, i_b, i_a, row, bar, buffers, w, w)
        if options.DUAL:
            ring.load_resident(tx, i_b, i_a, row, bar, t_buffers, w, w)


@gluon.jit
def load_streamed(x, tx, statistics, place, use, buffers, statistic_buffers, full, empty, options):
    """A tile of rows and of their tangents, and a statistic for each of these."""
    N: gl.constexpr = len(statistics)
    i_b, i_h, row, of_statistics = place
    bar = full.index(use.slot)
    adding.wait_empty(empty, use)
    ring.expect(bar, N, x, N * statistics[0].block_type.nbytes)
    ring.load(x, i_b, i_h, row, bar, buffers, use.slot, 0, options.T)
    if options.DUAL:
        ring.load(tx, i_b, i_h, row, bar, buffers, use.slot, options.T, options.T)
    for I in gl.static_range(N):
        ring.async_load(statistics[I], [of_statistics], bar, statistic_buffers[I].index(use.slot))


@gluon.jit
def produce(arrays, memory, call, options):
    ints = call.ints
    block = block_of(gl.program_id(0), ints, call.selection, options)
    i_b = block.i_b
    n_tiles = adding.tiles_of_queries(ints.LQ, options)
    of_keys = (i_b, block.i_resident, block.i_block * (options.GROUPS * GROUP_ROWS))
    load_keys(arrays.k, arrays.tk, of_keys, memory.k_full.index(0), memory.k, memory.tk, options)
    i = 0
    for i_g in range(block.group):
        i_h = block.i_stream + i_g
        visits = visits_of_head(i_g, block, ints, call.selection, options)
        low, high = adding.tile_range(visits, options)
        for t in range(low, high):
            j = adding.tile_of(t, visits, options)
            if options.DUAL:  # the order in which each kernel was measured
                use = adding.slot_of(i, options.SLOTS)
                place = (i_b, i_h, j * options.T, ((i_b * ints.HQ + i_h) * n_tiles + j) * options.T)
            else:
                of_tile = (i_b * ints.HQ + i_h) * n_tiles + j
                use = adding.slot_of(i, options.SLOTS)
                place = (i_b, i_h, j * options.T, of_tile * options.T)
            load_streamed(
                arrays.q, arrays.tq, arrays.of_q, place, use, memory.q, memory.of_q, memory.q_full, memory.q_empty, options
            )  # fmt: skip
            if i == 0:  # v is of no use before q is there
                load_keys(arrays.v, arrays.tv, of_keys, memory.v_full.index(0), memory.v, memory.tv, options)
            load_streamed(
                arrays.do, arrays.tdo, arrays.of_do, place, use,
                memory.do, memory.of_do, memory.do_full, memory.do_empty, options,
            )  # fmt: skip
            i += 1
    if i == 0:
        load_keys(arrays.v, arrays.tv, of_keys, memory.v_full.index(0), memory.v, memory.tv, options)


# ------------------------------------------------------------------------------------------------ the warpgroups that multiply


@gluon.jit
def clean_resident(w: gl.constexpr, n, resident_row, others, memory, options):
    """Zeros for a warpgroup's rows of k and v from the n-th on, and for those that nobody sees, which may hold anything: all make
    dq of them."""
    buffers = (memory.k, memory.v) + ((memory.tk, memory.tv) if options.DUAL else ())
    if options.FEATURES.key_lengths:
        for I in gl.static_range(len(buffers)):
            ring.clean(matrix(buffers[I], w), 0, n)
    if options.FEATURES.ranges.present:
        if others.end > others.first:
            clear_unseen([matrix(buffer, w) for buffer in buffers], resident_row, others, True, options.FEATURES)
    fence_async_shared()
    mbarrier.arrive(memory.cleaned.index(0), count=1)
    mbarrier.wait(memory.cleaned.index(0), 0)


@gluon.jit
def as_after(i, ints):
    """The same, but so that the compiler, which does not know, works nothing out of n before the loop."""
    return Integers(
        unfolded(ints.n, i), ints.HQ, ints.GROUP, ints.LQ, ints.LK, ints.left, ints.right, 0, 0, 0,
        ints.of_blocks, ints.of_heads, 0, 0, ints.of_together, ints.of_rest,
    )  # fmt: skip


@gluon.jit
def consume(w: gl.constexpr, memory, call, options):
    steps: gl.constexpr = step_one_pass_dual if options.DUAL else step_one_pass
    ints, selection = call.ints, call.selection
    block = block_of(gl.program_id(0), ints, selection, options)
    resident_row = (block.i_block * options.GROUPS + w) * GROUP_ROWS
    none = products.sums(options.C)
    totals = (none, none) + ((none, none) if options.DUAL else ())  # dk and dv, and their tangents
    ds = products.operand(gl.zeros([GROUP_ROWS, options.T], memory.ds.dtype, product_layout(options.T)))
    others = 0
    if options.FEATURES.ranges.present:
        others = others_of_resident(block, call, options)
    mbarrier.wait(memory.k_full.index(0), 0)
    mbarrier.wait(memory.v_full.index(0), 0)
    if options.FEATURES.key_lengths or options.FEATURES.ranges.present:
        clean_resident(w, block.key_end - resident_row, resident_row, others, memory, options)
    held = step_one_pass.held_rows(memory.k, w, options), step_one_pass.held_rows(memory.v, w, options)
    countdown = options.LAG + w
    if options.CORRECTED:
        countdown += gl.load(call.COMMON + block.i_b * (ints.HQ // ints.GROUP) + block.i_resident) * adding.COMMON_KEYS
    i = 0
    for i_g in range(block.group):
        visits = visits_of_head(i_g, block, ints, selection, options)
        sight = selected(block, block.i_stream + i_g, call, options)
        low, high = adding.tile_range(visits, options)
        for t in range(low, high):
            j = adding.tile_of(t, visits, options)
            masked = adding.is_masked(t, visits, options)
            unseen = False
            if options.FEATURES.ranges.present:
                unseen = t - visits.plain_end >= visits.which.unseen_first
            ds, totals = steps.step(
                i, j, masked, unseen, w, held, resident_row, sight, ds, totals, memory, call.scale, options
            )
            countdown = adding.make_dq_in_turn(steps.make_dq, i, countdown, w, memory, options)
            i += 1
    totals = steps.last_product(i, ds, totals, memory, options)
    for more in range(options.LAG):
        countdown = adding.make_dq_in_turn(steps.make_dq, i + more, countdown, w, memory, options)
    # worked out again, as the loop has no registers for it
    again = unfolded(gl.program_id(0), i)
    if options.DUAL:
        block = block_of(again, ints, selection, options)
    else:
        block = block_of(again, as_after(i, ints), selection, options)
    write_block(block, w, totals, call, options)


@gluon.jit
def write_block(block, w: gl.constexpr, totals, call, options):
    r_l: gl.constexpr = gl.SliceLayout(1, product_layout(options.T))
    HK = call.ints.HQ // call.ints.GROUP
    resident_row = (block.i_block * options.GROUPS + w) * GROUP_ROWS
    o_resident = resident_row + gl.arange(0, GROUP_ROWS, layout=r_l)
    b_scale = gl.full([GROUP_ROWS], call.scale, gl.float32, r_l)
    ready = ()
    for I in gl.static_range(len(totals)):
        ready = ready + (products.scaled(totals[I], b_scale) if I % 2 == 0 else totals[I],)
    if options.FEATURES.key_lengths:
        ready = [products.zeroed(b_x, o_resident >= block.key_end) for b_x in ready]
    for I in gl.static_range(0, len(totals), 2):
        products.store_rows(
            call.results[I + 1], block.i_b, block.i_resident, HK, resident_row, call.ints.LK, ready[I + 1], options.C
        )
        products.store_rows(
            call.results[I], block.i_b, block.i_resident, HK, resident_row, call.ints.LK, ready[I], options.C
        )


# ------------------------------------------------------------------------------------------------ shared memory


@gluon.jit
def floats(desc, N: gl.constexpr):
    """Shared memory for N blocks of a descriptor of floats."""
    if len(desc.block_type.shape) == 1:
        return gl.allocate_shared_memory(gl.float32, [N, desc.block_type.shape[0]], desc.layout)
    else:
        return gl.allocate_shared_memory(
            gl.float32, [N, desc.block_type.shape[0], desc.block_type.shape[1]], desc.layout
        )


@gluon.jit
def program(arrays, call, options):
    """Its shared memory, its warps."""
    GROUPS: gl.constexpr = options.GROUPS
    SLOTS: gl.constexpr = options.SLOTS
    N: gl.constexpr = 2 if options.DUAL else 1  # tiles with tangents
    dtype: gl.constexpr = arrays.k[0].dtype
    # swizzled in rows of T, so that half of the columns are a tile as well
    ds_l: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * options.T, element_bitwidth=16, rank=2)
    k = ring.tiles(arrays.k, GROUPS)
    tk = ring.tiles(arrays.tk, GROUPS) if options.DUAL else ()
    v = ring.tiles(arrays.v, GROUPS)
    tv = ring.tiles(arrays.tv, GROUPS) if options.DUAL else ()
    q, do = ring.tiles(arrays.q, SLOTS, N), ring.tiles(arrays.do, SLOTS, N)
    of_q, of_do = [floats(x, SLOTS) for x in arrays.of_q], [floats(x, SLOTS) for x in arrays.of_do]
    ds = gl.allocate_shared_memory(dtype, [GROUPS * options.KEPT, GROUP_ROWS, N * options.T], ds_l)
    dq = [floats(x, 1) for x in arrays.dq]
    ones = of_q[0]
    rows = of_q[0]
    if options.CORRECTED:
        rows = floats(arrays.rows, 1)
        ones_l: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * adding.ONES, element_bitwidth=16, rank=2)
        ones = gl.allocate_shared_memory(dtype, [GROUP_ROWS, adding.ONES], ones_l)
        ones.store(gl.full([GROUP_ROWS, adding.ONES], 1.0, dtype, ring.row_layout(adding.ONES)))
    k_full, v_full = ring.barriers(1, 1), ring.barriers(1, 1)
    q_full, q_empty = ring.barriers(SLOTS, 1), ring.barriers(SLOTS, GROUPS)
    do_full, do_empty = ring.barriers(SLOTS, 1), ring.barriers(SLOTS, GROUPS)
    ds_full, ds_empty = ring.barriers(options.KEPT, GROUPS), ring.barriers(options.KEPT, 1)
    dq_full, dq_empty = ring.barriers(1, 1), ring.barriers(GROUPS, 1)
    mbarrier.arrive(dq_empty.index(0), count=1)
    cleaned = k_full
    turn = k_full
    if options.FEATURES.key_lengths or options.FEATURES.ranges.present:
        cleaned = ring.barriers(1, GROUPS)
    if options.TURNS:
        turn = ring.barriers(GROUPS, 1)
        mbarrier.arrive(turn.index(0), count=1)
    fence_async_shared()
    memory = Memory(
        k, v, tk, tv, q, do, of_q, of_do, ds, dq, ones, rows,
        k_full, v_full, cleaned, q_full, q_empty, do_full, do_empty, ds_full, ds_empty, dq_full, dq_empty, turn,
    )  # fmt: skip
    if options.DUAL:
        run(consume, adding.add, produce, arrays, memory, call, options)
    else:
        run(consume, produce, adding.add, arrays, memory, call, options)


@gluon.jit(do_not_specialize_on_alignment=Integers._fields)
def one_pass(
    q_d, k_d, v_d, do_d, q_r, k_r, v_r, do_r, lse2_d, delta_d,
    MASK, BLOCKS, Q_LENGTHS, K_LENGTHS, Q_SEGMENTS, K_SEGMENTS, RANGES, TILES, COMMON,
    scale, n, HQ, GROUP, LQ, LK, left, right, of_blocks, of_heads, of_together, of_rest,
    dq_d, dq_r, rows_d, COUNTS, DK, DV,
    C: gl.constexpr, SLOTS: gl.constexpr, KEPT: gl.constexpr, GROUPS: gl.constexpr, LAG: gl.constexpr, TURNS: gl.constexpr,
    HELD: gl.constexpr, CORRECTED: gl.constexpr, RAGGED: gl.constexpr, ORDERED: gl.constexpr, FEATURES: gl.constexpr,
):  # fmt: skip
    LQ, LK = aligned(LQ, LK, FEATURES)
    program(
        Arrays(
            described(q_d, q_r), described(k_d, k_r), described(v_d, v_r), described(do_d, do_r), (), (), (), (),
            (lse2_d,), (delta_d,), described(dq_d, dq_r), rows_d,
        ),
        Call(
            COMMON, COUNTS, (DK, DV), scale,
            Integers(n, HQ, GROUP, LQ, LK, left, right, 0, 0, 0, of_blocks, of_heads, 0, 0, of_together, of_rest),
            Selection(MASK, BLOCKS, Q_LENGTHS, K_LENGTHS, Q_SEGMENTS, K_SEGMENTS, RANGES, TILES),
        ),
        Options(
            C, adding.TILE, SLOTS, KEPT, GROUPS, GROUPS, False, LAG, TURNS, HELD, FEATURES,
            has_masked_tiles(FEATURES, False, False), CORRECTED, RAGGED, ORDERED, False,
        ),
    )  # fmt: skip


@gluon.jit(do_not_specialize_on_alignment=Integers._fields)
def one_pass_dual(
    q_d, k_d, v_d, do_d, tq_d, tk_d, tv_d, tdo_d, lse2_d, mu_d, delta_d, t_delta_d,
    MASK, BLOCKS, Q_LENGTHS, K_LENGTHS, Q_SEGMENTS, K_SEGMENTS, RANGES, TILES, COMMON,
    scale, n, HQ, GROUP, LQ, LK, left, right, of_blocks, of_heads, of_together, of_rest,
    dq_d, rows_d, COUNTS, DK, DV, TDK, TDV,
    C: gl.constexpr, SLOTS: gl.constexpr, KEPT: gl.constexpr, GROUPS: gl.constexpr, LAG: gl.constexpr,
    CORRECTED: gl.constexpr, RAGGED: gl.constexpr, ORDERED: gl.constexpr, FEATURES: gl.constexpr,
):  # fmt: skip
    LQ, LK = aligned(LQ, LK, FEATURES)
    program(
        Arrays(
            (q_d,), (k_d,), (v_d,), (do_d,), (tq_d,), (tk_d,), (tv_d,), (tdo_d,),
            (lse2_d, mu_d), (delta_d, t_delta_d), (dq_d,), rows_d,
        ),
        Call(
            COMMON, COUNTS, (DK, DV, TDK, TDV), scale,
            Integers(n, HQ, GROUP, LQ, LK, left, right, 0, 0, 0, of_blocks, of_heads, 0, 0, of_together, of_rest),
            Selection(MASK, BLOCKS, Q_LENGTHS, K_LENGTHS, Q_SEGMENTS, K_SEGMENTS, RANGES, TILES),
        ),
        Options(
            C, STREAMED, SLOTS, KEPT, GROUPS, GROUPS, False, LAG, False, False, FEATURES,
            has_masked_tiles(FEATURES, False, False), CORRECTED, RAGGED, ORDERED, True,
        ),
    )  # fmt: skip
