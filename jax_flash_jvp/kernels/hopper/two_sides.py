"""The backward and its tangent in two passes over the scores, one for each side: one body.

A block is 64 resident rows for each of the GROUPS consumer warpgroups, or, where registers do not hold the sums of all columns,
64 in all, of whose sums each warpgroup has a part of the columns (SPLIT).  It streams the other sequence; what it does with a
tile of that say `step_plain.py` and, with tangents, `step_dual.py`.

ROW says that the statistics (ℓ, μ, δ, δ̇) belong to the resident rows, as on the query side.  That takes the excess of the row
sums of dS and ḋS off its results and, for the key side, off δ and δ̇ (README.md, "Rounding").  It may make the statistics too, ℓ
in base 2, δ and δ̇ (`makes_statistics`): then o and ȯ of its rows come through the ring, before anything is streamed.
Statistics of streamed rows come through shared memory, by the producer.
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from jax_flash_jvp.kernels.hopper import products, programs, ring, step_dual, step_plain, steps, visibility
from jax_flash_jvp.kernels.hopper.blocks import block_of, others_of_resident, visits_of_head
from jax_flash_jvp.kernels.hopper.handover import finish, hand_over, resume
from jax_flash_jvp.kernels.hopper.products import GROUP_ROWS, accumulated, product_layout, settled, unfolded
from jax_flash_jvp.kernels.hopper.programs import Integers
from jax_flash_jvp.kernels.hopper.ring import Cursor, advance, described, matrix, wait
from jax_flash_jvp.kernels.hopper.skeleton import consume_blocks, produce_blocks, run
from jax_flash_jvp.kernels.hopper.visibility import Selection, has_masked_tiles

# constants: HEIGHT is that of a block in rows of a warpgroup; USE_… of v_like, w and tangents follow from what there is and what
# is wanted; DEFERRED, LATE_DP: see `Features`; SUM_…: row sums of dS and of ḋS, where these are multiplied with keys or their
# tangents, if keys have a part in common
Options = namedtuple(
    "Options",
    "C T SLOTS GROUPS HEIGHT SPLIT BUFFERS ROW OUTPUTS PER_SLOT TURNS FEATURES HAS_MASKED USE_V USE_W USE_TK USE_TQ "
    "USE_TV USE_TDO HAS_D_LSE HAS_TD_LSE WANT_K WANT_V WANT_TK WANT_TV DEFERRED LATE_DP SUM_DS SUM_TDS",
)
# what all warps are given
Call = namedtuple("Call", "statistics results scale ints selection")
# descriptors, of the parts of each
Arrays = namedtuple("Arrays", "k_like v_like q_like do_like tk_like tv_like tq_like tdo_like o to")
# ℓ itself where they are to be made, then no δ; the cotangents of ℓ; of the keys of a head, and of their tangents, the mean, and
# whether they have much in common
StatisticArrays = namedtuple("StatisticArrays", "LSE2 MU DELTA T_DELTA D_LSE TD_LSE KEY_MEAN T_KEY_MEAN COMMON")
# shared: resident rows, the ring, statistics of streamed rows, and the barriers of each
Memory = namedtuple(
    "Memory",
    "k_like v_like tk_like tv_like ring resident_full resident_empty full empty stats s_full s_empty turn queue",
)
Results = namedtuple("Results", "DK DV TDK TDV EXCHANGE LSE2 DELTA T_DELTA")


# ------------------------------------------------------------------------------------------------ the warp that loads


@gluon.jit
def used(k_like, v_like, tk_like, tv_like, options):
    """What is read of four resident arrays."""
    some = (k_like,) + ((v_like,) if options.USE_V else ())
    return some + ((tk_like,) if options.USE_TK else ()) + ((tv_like,) if options.USE_TV else ())


@gluon.jit
def load_all_resident(arrays, i_b, i_resident, row, memory, resident_at, options):
    loaded = used(arrays.k_like, arrays.v_like, arrays.tk_like, arrays.tv_like, options)
    buffers = used(memory.k_like, memory.v_like, memory.tk_like, memory.tv_like, options)
    for w in gl.static_range(options.HEIGHT):
        i = resident_at.slot * options.HEIGHT + w
        bar = memory.resident_full.index(i)
        mbarrier.wait(memory.resident_empty.index(i), resident_at.phase)
        ring.expect(bar, len(loaded), arrays.k_like)
        for I in gl.static_range(len(loaded)):
            ring.load_resident(loaded[I], i_b, i_resident, row, bar, buffers[I], i, w)


@gluon.jit
def stage_statistics(statistics, x, m_x, memory, s_at, options):
    """Asynchronous.  Zeros for absent queries: their rows are zeros as well, so that a P of one adds nothing."""
    stage = 4 * s_at.slot
    ring.copy_async(memory.stats.index(stage + steps.LSE2), statistics.LSE2 + x, mask=m_x)
    if options.USE_W:
        ring.copy_async(memory.stats.index(stage + steps.MU), statistics.MU + x, mask=m_x)
    if options.USE_V:
        ring.copy_async(memory.stats.index(stage + steps.DELTA), statistics.DELTA + x, mask=m_x)
    if options.WANT_TK:
        ring.copy_async(memory.stats.index(stage + steps.T_DELTA), statistics.T_DELTA + x, mask=m_x)
    async_copy.mbarrier_arrive(memory.s_full.index(s_at.slot), increment_count=False)
    return advance(s_at, steps.STAGES)


@gluon.jit
def load_outputs(arrays, i_b, i_resident, row, memory, ring_at, options):
    """o, and ȯ where tangents are wanted: 64 rows of each for one warpgroup after the other."""
    N: gl.constexpr = options.OUTPUTS
    PER_SLOT: gl.constexpr = options.PER_SLOT
    KINDS: gl.constexpr = N // options.HEIGHT
    for I in gl.static_range(N):
        bar = memory.full.index(ring_at.slot)
        if I % PER_SLOT == 0:
            wait(memory.empty, ring_at)
            ring.expect(bar, PER_SLOT if I + PER_SLOT <= N else N - I, arrays.o)
        o = arrays.o if I % KINDS == 0 else arrays.to
        ring.load(
            o, i_b, i_resident, row + I // KINDS * GROUP_ROWS, bar,
            memory.ring, ring_at.slot, I % PER_SLOT * GROUP_ROWS, GROUP_ROWS,
        )  # fmt: skip
        if (I + 1) % PER_SLOT == 0 or I + 1 == N:
            ring_at = advance(ring_at, options.SLOTS)
    return ring_at


@gluon.jit
def load_block(i, state, resident_at, arrays, memory, call, options):
    T: gl.constexpr = options.T
    SLOTS: gl.constexpr = options.SLOTS
    ring_at, s_at = state
    ints = call.ints
    block = block_of(i, ints, call.selection, options)
    i_b, i_resident = block.i_b, block.i_resident
    resident_row = block.i_block * (options.HEIGHT * GROUP_ROWS)
    # as in forward.py; o is of no use without d_o, which must not wait for slots that o takes
    ROOM: gl.constexpr = options.OUTPUTS <= (SLOTS - 2) * options.PER_SLOT
    AFTER: gl.constexpr = options.FEATURES.persistent and options.BUFFERS == 1 and ROOM
    if options.OUTPUTS > 0:
        ring_at = load_outputs(arrays, i_b, i_resident, resident_row, memory, ring_at, options)
    if not AFTER:
        load_all_resident(arrays, i_b, i_resident, resident_row, memory, resident_at, options)
    first = 1
    for MASKED in gl.static_range(3):
        if visibility.has_loop(MASKED, options.HAS_MASKED, options.FEATURES):
            for i_g in range(block.group):
                i_h = block.i_stream + i_g
                visits = visibility.of_loop(
                    visits_of_head(i_g, block, ints, call.selection, options), MASKED, options.FEATURES
                )
                t_first, t_end = visibility.range_of(visits, MASKED)
                for t in range(t_first, t_end):
                    row = visibility.tile_at(t, visits, MASKED, options.FEATURES) * T
                    if not options.ROW:
                        o_m = row + gl.arange(0, T, layout=gl.BlockedLayout([1], [32], [1], [0]))
                        x = (i_b * ints.HQ + i_h).to(gl.int64) * ints.LQ + o_m
                        wait(memory.s_empty, s_at)
                        s_at = stage_statistics(call.statistics, x, o_m < block.query_end, memory, s_at, options)
                    ring_at = ring.load_tile(
                        arrays.q_like, arrays.tq_like, i_b, i_h, row, memory, ring_at, T, SLOTS, options.USE_TQ
                    )
                    ring_at = ring.load_tile(
                        arrays.do_like, arrays.tdo_like, i_b, i_h, row, memory, ring_at, T, SLOTS, options.USE_TDO
                    )
                    if AFTER:
                        if first == 1:
                            load_all_resident(arrays, i_b, i_resident, resident_row, memory, resident_at, options)
                        first = 0
    if AFTER and options.FEATURES.dynamic:
        if first == 1:
            load_all_resident(arrays, i_b, i_resident, resident_row, memory, resident_at, options)
    return ring_at, s_at


@gluon.jit
def produce(arrays, memory, call, options):
    produce_blocks(load_block, (Cursor(0, 1), Cursor(0, 1)), call.results.EXCHANGE, arrays, memory, call, options)


# ------------------------------------------------------------------------------------------------ the warpgroups that multiply


@gluon.jit
def row_statistic(X, x, m_x, other: gl.constexpr):
    return gl.expand_dims(gl.load(X + x, mask=m_x, other=other), 1)


@gluon.jit
def store_statistic(X, x, b_x, m_x):
    gl.store(X + gl.expand_dims(x, 1), b_x, mask=gl.expand_dims(m_x, 1))


@gluon.jit
def summed_rows(b_r, b_tr, options):
    """The row sums of dS and of ḋS, as far as they are summed."""
    layout: gl.constexpr = gl.SliceLayout(1, product_layout(options.T))
    rows = (products.summed_lanes(b_r, layout),) if options.SUM_DS else ()
    return rows + ((products.summed_lanes(b_tr, layout),) if options.SUM_TDS else ())


@gluon.jit
def wanted(k, v, tk, tv, options):
    """The wanted ones of four."""
    some = ()
    if options.WANT_K:
        some = some + (k,)
    if options.WANT_V:
        some = some + (v,)
    if options.WANT_TK:
        some = some + (tk,)
    if options.WANT_TV:
        some = some + (tv,)
    return some


@gluon.jit
def all_four(some, zero, options):
    """All four, of the wanted ones: zeros for the others."""
    I_V: gl.constexpr = 1 if options.WANT_K else 0
    I_TK: gl.constexpr = I_V + (1 if options.WANT_V else 0)
    I_TV: gl.constexpr = I_TK + (1 if options.WANT_TK else 0)
    k = some[0] if options.WANT_K else zero
    v = some[I_V] if options.WANT_V else zero
    tk = some[I_TK] if options.WANT_TK else zero
    tv = some[I_TV] if options.WANT_TV else zero
    return k, v, tk, tv


@gluon.jit
def statistics_of_outputs(i_w: gl.constexpr, ring_at, own_rows, memory, options, LAYOUT: gl.constexpr):
    """(rowsum(d_o∘o), rowsum(ḋ_o∘o + d_o∘ȯ)) of the rows of a warpgroup."""
    KINDS: gl.constexpr = options.OUTPUTS // options.HEIGHT
    delta = gl.zeros([GROUP_ROWS], gl.float32, LAYOUT)
    t_delta = gl.zeros([GROUP_ROWS], gl.float32, LAYOUT)
    v_like = matrix(memory.v_like, own_rows)
    tv_like = matrix(memory.tv_like, own_rows)
    for I in gl.static_range(options.OUTPUTS):
        if I % options.PER_SLOT == 0:
            wait(memory.full, ring_at)
        if I // KINDS == i_w % options.HEIGHT:
            o = ring.rows_from(matrix(memory.ring, ring_at.slot), I % options.PER_SLOT * GROUP_ROWS, GROUP_ROWS)
            if I % KINDS == 1:
                t_delta += ring.inner(v_like, o, LAYOUT)
            else:
                delta += ring.inner(v_like, o, LAYOUT)
                if options.USE_TV:
                    t_delta += ring.inner(tv_like, o, LAYOUT)
        if (I + 1) % options.PER_SLOT == 0 or I + 1 == options.OUTPUTS:
            ring.give_back(memory.empty, ring_at)
            ring_at = advance(ring_at, options.SLOTS)
    return delta, t_delta, ring_at


@gluon.jit
def first_sums(block, w: gl.constexpr, results, options):
    """Zeros, or what the loop over a fragment of the block goes on from."""
    none = products.own_sums(w, options)
    b_r = gl.zeros([GROUP_ROWS, 4], gl.float32, products.lane_layout())
    b_tr = b_r
    if options.FEATURES.shared:
        sums, rows = wanted(none, none, none, none, options), summed_rows(b_r, b_tr, options)
        sums, rows = resume(results.EXCHANGE, block.work, w, sums, rows, options)
        b_dk, b_dv, b_tdk, b_tdv = all_four(sums, none, options)
        if options.SUM_DS:
            b_r = products.over_lanes(rows[0])
        if options.SUM_TDS:
            b_tr = products.over_lanes(rows[len(rows) - 1])
        return steps.Sums(b_dk, b_dv, b_tdk, b_tdv, b_r, b_tr)
    else:
        return steps.Sums(none, none, none, none, b_r, b_tr)


@gluon.jit
def statistics_of_rows(block, resident_row, w: gl.constexpr, ring_at, resident, common, memory, call, options):
    """(the statistics of a warpgroup's rows, the next slot of the ring).  If ROW they are loaded, or made of o and ȯ."""
    if not options.ROW:
        return steps.Statistics(0.0, 0.0, 0.0, 0.0, common, 1 / call.scale), ring_at
    else:
        X, ints = call.statistics, call.ints
        layout: gl.constexpr = gl.SliceLayout(1, product_layout(options.T))
        o_r = resident_row + gl.arange(0, GROUP_ROWS, layout=layout)
        x = (block.i_b * ints.HQ + block.i_resident).to(gl.int64) * ints.LQ + o_r
        if options.OUTPUTS > 0:
            b_lse = gl.load(X.LSE2 + x, mask=o_r < ints.LQ, other=-float("inf"))
            b_delta, b_t_delta, ring_at = statistics_of_outputs(w, ring_at, resident, memory, options, layout)
            lse2 = gl.expand_dims(products.log2_sum_exp(b_lse), 1)
            if options.HAS_D_LSE:
                b_delta -= gl.load(X.D_LSE + x, mask=o_r < ints.LQ, other=0.0)
            if options.HAS_TD_LSE:
                b_t_delta -= gl.load(X.TD_LSE + x, mask=o_r < ints.LQ, other=0.0)
            delta, t_delta = gl.expand_dims(b_delta, 1), gl.expand_dims(b_t_delta, 1)
            if options.FEATURES.ranges.present:  # of a row that sees nothing cotangents may be NaN
                delta = gl.where(lse2 == float("inf"), 0.0, delta)
                t_delta = gl.where(lse2 == float("inf"), 0.0, t_delta)
        else:
            lse2 = row_statistic(X.LSE2, x, o_r < ints.LQ, float("inf"))
            delta = row_statistic(X.DELTA, x, o_r < ints.LQ, 0.0)
            t_delta = delta
            if options.WANT_TK:
                t_delta = row_statistic(X.T_DELTA, x, o_r < ints.LQ, 0.0)
        mu = delta
        if options.USE_W:
            mu = row_statistic(X.MU, x, o_r < ints.LQ, 0.0)
        return steps.Statistics(lse2, mu, delta, t_delta, common, 1 / call.scale), ring_at


@gluon.jit
def compute_block(i, w: gl.constexpr, state, resident_at, memory, call, options):
    step: gl.constexpr = step_dual.step if options.WANT_TK or options.WANT_TV else step_plain.step
    ring_at, s_at, tick = state
    ints, selection = call.ints, call.selection
    heads = ints.HQ if options.ROW else ints.HQ // ints.GROUP  # of resident rows
    block = block_of(i, ints, selection, options)
    resident_row = (block.i_block * options.HEIGHT + w % options.HEIGHT) * GROUP_ROWS
    common = 0
    if options.SUM_DS or options.SUM_TDS:
        common = gl.load(call.statistics.COMMON + block.i_b * (ints.HQ // ints.GROUP) + block.i_stream)
    sums = first_sums(block, w, call.results, options)
    resident = resident_at.slot * options.HEIGHT + w % options.HEIGHT
    if options.FEATURES.ranges.present:
        others = others_of_resident(block, call, options)
    mbarrier.wait(memory.resident_full.index(resident), resident_at.phase)
    if options.FEATURES.ranges.present:
        if others.end > others.first:
            clear_resident(resident_row, resident, others, memory, options)
    row_stats, ring_at = statistics_of_rows(block, resident_row, w, ring_at, resident, common, memory, call, options)
    no_ds = gl.zeros([GROUP_ROWS, options.T], memory.k_like[0].dtype, product_layout(options.T))
    for MASKED in gl.static_range(3):
        if visibility.has_loop(MASKED, options.HAS_MASKED, options.FEATURES):
            for i_g in range(block.group):
                visits = visibility.of_loop(
                    visits_of_head(i_g, block, ints, selection, options), MASKED, options.FEATURES
                )
                i_h = block.i_resident if options.ROW else block.i_stream + i_g
                sight = visibility.selected(block, i_h, call, options)
                t_first, t_end = visibility.range_of(visits, MASKED)
                last = products.operand(no_ds)  # there is no tile before the first
                upcoming = visibility.first_tile(visits, MASKED, options.FEATURES)
                for t in range(t_first, t_end):
                    j, upcoming = visibility.next_tile(t, upcoming, visits, MASKED, options.FEATURES)
                    place = (resident_row, j, t, t_first, tick)
                    tile = steps.tile_at_hand(place, sight, ring_at, s_at, resident, memory, MASKED, options)
                    sums, last, ring_at, s_at = step(
                        tile, row_stats, sums, last, w, memory, call.scale, MASKED, options
                    )
                    tick += 1
                if options.DEFERRED:
                    if t_first < t_end:
                        sums = with_last_product(sums, last, ring_at, w, memory, options)
    mbarrier.arrive(memory.resident_empty.index(resident), count=1)
    # worked out again, where the loop has no registers for it
    again = i if options.C <= 64 and not options.FEATURES.shared else unfolded(i, tick)
    write_block(again, heads, block.query_end if options.ROW else block.key_end, w, sums, row_stats, call, options)
    return ring_at, s_at, tick


@gluon.jit
def clear_resident(resident_row, resident, others, memory, options):
    """Zeros for the rows that nobody sees, or that see nothing."""
    buffers = used(memory.k_like, memory.v_like, memory.tk_like, memory.tv_like, options)
    tiles = [matrix(buffer, resident) for buffer in buffers]
    visibility.clear_unseen(tiles, resident_row, others, not options.ROW, options.FEATURES)


@gluon.jit
def with_last_product(sums, ds, ring_at, w: gl.constexpr, memory, options):
    """The sums with the product of the last tile's ḋS, or else of its dS, with q_like, which is then given back."""
    b_dk, b_dv, b_tdk, b_tdv, b_r, b_tr = sums
    slot = ring.slot_before(ring_at, 2, options.SLOTS)
    q_like = steps.columns_of(slot, w, memory, options)
    if options.WANT_TK:
        b_tdk = accumulated(ds, q_like, b_tdk)
        b_tdk, ds = settled(b_tdk, ds)
    else:
        b_dk = accumulated(ds, q_like, b_dk)
        b_dk, ds = settled(b_dk, ds)
    mbarrier.arrive(memory.empty.index(slot), count=1)
    return steps.Sums(b_dk, b_dv, b_tdk, b_tdv, b_r, b_tr)


@gluon.jit
def write_block(i, heads, end, w: gl.constexpr, sums, row_stats, call, options):
    """Writes what a warpgroup has summed, or hands it over, if another program ends the block."""
    FEATURES: gl.constexpr = options.FEATURES
    FIRST: gl.constexpr = w if options.SPLIT else 0  # part of the columns
    ints, results = call.ints, call.results
    block = block_of(i, ints, call.selection, options)
    resident_row = (block.i_block * options.HEIGHT + w % options.HEIGHT) * GROUP_ROWS
    o_r = resident_row + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, product_layout(options.T)))
    gradients = wanted(sums.dk, sums.dv, sums.tdk, sums.tdv, options)
    rows = summed_rows(sums.r, sums.tr, options)
    if FEATURES.shared:
        gradients, rows = finish(results.EXCHANGE, block.work, w, gradients, rows, True, options)
    if block.work.handed_over:
        if FEATURES.shared:
            hand_over(results.EXCHANGE, programs.in_wave(ints, FEATURES), w, gradients, rows, options)
    else:
        if options.ROW:
            gradients = corrected(gradients, rows, row_stats, block, resident_row, o_r, w, call, options)
        store_gradients(gradients, block, heads, end, resident_row, o_r, FIRST, call, options)


@gluon.jit
def corrected(gradients, rows, row_stats, block, resident_row, o_r, w: gl.constexpr, call, options):
    """dQ and ḋQ without what rounding adds to rows of dS and ḋS: README.md, "Rounding".  Writes δ and δ̇ with it."""
    FIRST: gl.constexpr = w if options.SPLIT else 0
    X, ints, results = call.statistics, call.ints, call.results
    x = (block.i_b * ints.HQ + block.i_resident).to(gl.int64) * ints.LQ + o_r
    mean = products.mean_at(
        block.i_b, block.i_resident, block.i_stream, resident_row,
        ints.HQ, ints.GROUP, ints.LQ, options.C, options.FEATURES,
    )  # fmt: skip
    b_dk, b_dv, b_tdk, b_tdv = all_four(gradients, products.own_sums(w, options), options)
    delta, t_delta = row_stats.delta, row_stats.t_delta
    if options.SUM_DS:
        if row_stats.common:
            excess = products.excess_of(rows[0], row_stats.lse2, X.D_LSE, x, o_r < ints.LQ, options.HAS_D_LSE)
            delta += gl.expand_dims(excess, 1)
            if options.WANT_K:
                b_dk = products.without_mean(b_dk, excess, X.KEY_MEAN, mean, options.C, FIRST)
            if options.WANT_TK and options.USE_TQ:
                b_tdk = products.without_mean(b_tdk, excess, X.T_KEY_MEAN, mean, options.C, FIRST)
    if options.SUM_TDS:
        if row_stats.common:
            excess = products.excess_of(
                rows[len(rows) - 1], row_stats.lse2, X.TD_LSE, x, o_r < ints.LQ, options.HAS_TD_LSE
            )
            t_delta += gl.expand_dims(excess, 1)
            b_tdk = products.without_mean(b_tdk, excess, X.KEY_MEAN, mean, options.C, FIRST)
    if FIRST == 0:
        store_statistic(results.DELTA, x, delta, o_r < ints.LQ)
        if options.WANT_TK:
            store_statistic(results.T_DELTA, x, t_delta, o_r < ints.LQ)
        if options.OUTPUTS > 0:
            store_statistic(results.LSE2, x, row_stats.lse2, o_r < ints.LQ)
    return wanted(b_dk, b_dv, b_tdk, b_tdv, options)


@gluon.jit
def store_gradients(gradients, block, heads, end, resident_row, o_r, FIRST: gl.constexpr, call, options):
    ints, results = call.ints, call.results
    length = ints.LQ if options.ROW else ints.LK
    r_l: gl.constexpr = gl.SliceLayout(1, product_layout(options.T))
    arrays = wanted(results.DK, results.DV, results.TDK, results.TDV, options)
    scales = wanted(call.scale, 1.0, call.scale, 1.0, options)
    for I in gl.static_range(len(gradients)):
        b_x = products.scaled(gradients[I], gl.full([GROUP_ROWS], scales[I], gl.float32, r_l))
        if options.FEATURES.query_lengths if options.ROW else options.FEATURES.key_lengths:
            b_x = products.zeroed(b_x, o_r >= end)
        products.store_rows(arrays[I], block.i_b, block.i_resident, heads, resident_row, length, b_x, options.C, FIRST)


@gluon.jit
def consume(w: gl.constexpr, memory, call, options):
    consume_blocks(w, compute_block, (Cursor(0, 0), Cursor(0, 0), 0), memory, call, options)


@gluon.jit
def program(arrays, call, options):
    """Its shared memory, its warps."""
    GROUPS: gl.constexpr = options.GROUPS
    RESIDENT: gl.constexpr = options.HEIGHT * options.BUFFERS
    k_s = ring.tiles(arrays.k_like, RESIDENT)
    v_s = ring.tiles(arrays.v_like, RESIDENT) if options.USE_V else k_s
    tk_s = ring.tiles(arrays.tk_like, RESIDENT) if options.USE_TK else k_s
    tv_s = ring.tiles(arrays.tv_like, RESIDENT) if options.USE_TV else k_s
    ring_s = ring.tiles(arrays.q_like, options.SLOTS, 2 if options.USE_TQ or options.USE_TDO else 1)
    resident_full = ring.barriers(RESIDENT, 1)
    resident_empty = ring.barriers(RESIDENT, GROUPS // options.HEIGHT)
    full = ring.barriers(options.SLOTS, 1)
    empty = ring.barriers(options.SLOTS, GROUPS)
    # none that is not used: its memory would be given to others
    turn = ring.barriers(GROUPS, 1) if options.TURNS else full
    stats = full
    s_full = full
    s_empty = full
    if not options.ROW:
        stats = gl.allocate_shared_memory(
            gl.float32, [4 * steps.STAGES, options.T], gl.SwizzledSharedLayout(1, 1, 1, [0])
        )
        s_full = ring.barriers(steps.STAGES, 32)  # every lane of the producer
        s_empty = ring.barriers(steps.STAGES, GROUPS)
    if options.TURNS:
        mbarrier.arrive(turn.index(0), count=1)
    fence_async_shared()
    numbers = programs.queue(GROUPS) if options.FEATURES.dynamic else full
    memory = Memory(
        k_s, v_s, tk_s, tv_s, ring_s, resident_full, resident_empty, full, empty, stats, s_full, s_empty, turn, numbers
    )
    run(consume, produce, None, arrays, memory, call, options)


@gluon.jit(do_not_specialize_on_alignment=Integers._fields)
def backward(
    k_d, v_d, q_d, do_d, tk_d, tv_d, tq_d, tdo_d, o_d, to_d, k_r, v_r, q_r, do_r, tk_r, tv_r, tq_r, tdo_r, o_r, to_r,
    MASK, BLOCKS, Q_LENGTHS, K_LENGTHS, Q_SEGMENTS, K_SEGMENTS, RANGES, TILES,
    LSE2, MU, DELTA, T_DELTA, D_LSE, TD_LSE, KEY_MEAN, T_KEY_MEAN, COMMON,
    scale, n, HQ, GROUP, LQ, LK, left, right, n_whole, shared_tiles, concurrent,
    of_blocks, of_heads, of_tiles, of_shared_tiles, of_together, of_rest,
    DK, DV, TDK, TDV, EXCHANGE, LSE2_OUT, DELTA_OUT, T_DELTA_OUT,
    C: gl.constexpr, T: gl.constexpr, SLOTS: gl.constexpr, GROUPS: gl.constexpr, HEIGHT: gl.constexpr,
    ROW: gl.constexpr, TURNS: gl.constexpr, FEATURES: gl.constexpr, RAGGED: gl.constexpr,
    HAS_TK: gl.constexpr, HAS_TQ: gl.constexpr, HAS_TV: gl.constexpr, HAS_TDO: gl.constexpr,
    HAS_D_LSE: gl.constexpr, HAS_TD_LSE: gl.constexpr,
    WANT_K: gl.constexpr, WANT_V: gl.constexpr, WANT_TK: gl.constexpr, WANT_TV: gl.constexpr,
):  # fmt: skip
    USE_V: gl.constexpr = WANT_K or WANT_TK
    USE_W: gl.constexpr = (HAS_TK or HAS_TQ) and (WANT_TK or WANT_TV)
    USE_TK: gl.constexpr = HAS_TK and USE_W
    USE_TQ: gl.constexpr = HAS_TQ and USE_W
    USE_TV: gl.constexpr = HAS_TV and WANT_TK
    USE_TDO: gl.constexpr = HAS_TDO and (WANT_TK or WANT_TV)
    # 64 rows of o and of ȯ, so many times for a block, so many in a slot
    OUTPUTS: gl.constexpr = HEIGHT * (2 if WANT_TK else 1) if FEATURES.makes_statistics else 0
    PER_SLOT: gl.constexpr = T * (2 if USE_TQ or USE_TDO else 1) // GROUP_ROWS
    PAIRS: gl.constexpr = SLOTS // (2 if USE_TQ or USE_TDO else 1)
    RESIDENT: gl.constexpr = 1 + (1 if USE_V else 0) + (1 if USE_TK else 0) + (1 if USE_TV else 0)
    BUFFERS: gl.constexpr = ring.resident_buffers(RESIDENT * HEIGHT * GROUP_ROWS, SLOTS * T, C, FEATURES)
    LQ, LK = programs.aligned(LQ, LK, FEATURES)
    # a tile's last product, of ḋS or else of dS with q_like, is issued with the next tile's scores: nobody waits for it alone
    DEFERRED: gl.constexpr = FEATURES.deferred and (WANT_TK or (WANT_K and not WANT_TV))
    LATE_DP: gl.constexpr = FEATURES.late_dp and USE_V  # dP is issued behind the softmax, which has its registers
    gl.static_assert(not DEFERRED or PAIRS >= 4, "a tile is kept until do_like of the next is there")
    gl.static_assert(not LATE_DP or not (WANT_TK or WANT_TV), "of gradients alone")
    CORRECTED: gl.constexpr = ROW and (FEATURES.sees_all or FEATURES.row_means)
    SUM_DS: gl.constexpr = CORRECTED and (WANT_K or (WANT_TK and USE_TQ))
    SUM_TDS: gl.constexpr = CORRECTED and WANT_TK
    program(
        Arrays(
            described(k_d, k_r), described(v_d, v_r), described(q_d, q_r), described(do_d, do_r),
            described(tk_d, tk_r), described(tv_d, tv_r), described(tq_d, tq_r), described(tdo_d, tdo_r),
            described(o_d, o_r), described(to_d, to_r),
        ),
        Call(
            StatisticArrays(LSE2, MU, DELTA, T_DELTA, D_LSE, TD_LSE, KEY_MEAN, T_KEY_MEAN, COMMON),
            Results(DK, DV, TDK, TDV, EXCHANGE, LSE2_OUT, DELTA_OUT, T_DELTA_OUT), scale,
            Integers(
                n, HQ, GROUP, LQ, LK, left, right, n_whole, shared_tiles, concurrent,
                of_blocks, of_heads, of_tiles, of_shared_tiles, of_together, of_rest,
            ),
            Selection(MASK, BLOCKS, Q_LENGTHS, K_LENGTHS, Q_SEGMENTS, K_SEGMENTS, RANGES, TILES),
        ),
        Options(
            C, T, PAIRS, GROUPS, HEIGHT, HEIGHT < GROUPS, BUFFERS, ROW, OUTPUTS, PER_SLOT, TURNS, FEATURES,
            has_masked_tiles(FEATURES, ROW, RAGGED), USE_V, USE_W, USE_TK, USE_TQ, USE_TV, USE_TDO, HAS_D_LSE, HAS_TD_LSE,
            WANT_K, WANT_V, WANT_TK, WANT_TV, DEFERRED, LATE_DP, SUM_DS, SUM_TDS,
        ),
    )  # fmt: skip
