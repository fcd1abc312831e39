"""The backward and its tangent, for the key side and for the query side: one body.  Formulas as in `portable/backward.py`.

A block is 64 resident rows for each of the GROUPS consumer warpgroups, or, where registers do not hold the sums of all columns,
64 in all, of whose sums each warpgroup has a part of the columns (SPLIT).  It streams the other sequence:

                 resident a, c     streamed b, e     s = a bᵀ, dp = c eᵀ − δ, ds = p∘dp      da += ds b      dc += p e
    key side     k, v              q, d_o            tiles [keys, queries]                   dk              dv
    query side   q, d_o            k, v              tiles [queries, keys]                   dq              –

and, with w = ṡ − μ,  ṡ = a ḃᵀ + ȧ bᵀ,  ḋs = p∘(c ėᵀ + ċ eᵀ − δ̇) + ds∘w,  ḋa += ḋs b + ds ḃ,  ḋc += p ė + (p∘w) e.

ROW says that the statistics (ℓ, μ, δ, δ̇) belong to the resident rows, as on the query side.  That takes the excess of the row
sums of dS and ḋS off its results and, for the key side, off δ and δ̇ (README.md, "Rounding").  It may make the statistics too, ℓ
in base 2, δ and δ̇ (`makes_statistics`): then o and ȯ of its rows come through the ring, before anything is streamed.
Statistics of streamed rows come through shared memory, by the producer.  A tile of b and of ḃ lie one below the other, so that
one product has both a bᵀ and a ḃᵀ, with half the reading of a; c eᵀ and c ėᵀ likewise.  The sums of ṡ and of ḋp begin with
what is taken off or added.
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from jax_flash_jvp.kernels.hopper.products import (
    GROUP_ROWS,
    LOG2E,
    accumulated,
    halves,
    lane_layout,
    lane_sums,
    log2_sum_exp,
    mean_at,
    over_lanes,
    own_columns,
    packed,
    parts,
    product_layout,
    scaled,
    score_product,
    settled,
    settled_before,
    store_rows,
    summed_lanes,
    sums,
    unpacked,
    width,
    without_mean,
    zeroed,
)
from jax_flash_jvp.kernels.hopper.programs import (
    Integers,
    aligned,
    divided,
    finish,
    first_block,
    hand_over,
    in_wave,
    item,
    items,
    next_block,
    own_block,
    queue,
    received_block,
    resume,
)
from jax_flash_jvp.kernels.hopper.ring import (
    Cursor,
    advance,
    barriers,
    clean,
    copy_async,
    described,
    expect,
    give_back,
    inner,
    load,
    load_resident,
    load_tile,
    matrix,
    resident_buffers,
    rows_from,
    slot_before,
    tiles,
    wait,
)
from jax_flash_jvp.kernels.hopper.visibility import (
    Bounds,
    Selection,
    bits,
    first_tile,
    has_loop,
    has_masked_tiles,
    hide,
    key_bounds,
    lengths,
    looked_up,
    next_tile,
    range_of,
    selected,
    tile_at,
    visits_of,
    within,
)

# constants: HEIGHT is that of a block in rows of a warpgroup; USE_… of c, w and the tangents follow from which there are and what
# is wanted
Options = namedtuple(
    "Options",
    "C T SLOTS GROUPS HEIGHT BUFFERS ROW OUTPUTS PER_SLOT TURNS FEATURES HAS_MASKED USE_C USE_W USE_TA USE_TB "
    "USE_TC USE_TE HAS_D_LSE HAS_TD_LSE WANT_A WANT_C WANT_TA WANT_TC",
)
Arrays = namedtuple("Arrays", "a c b e ta tc tb te o to")  # descriptors, of the parts of each
# ℓ itself where they are to be made, then no δ; the cotangents of ℓ; of the keys of a head, and of their tangents, the mean, and
# whether they have much in common
Statistics = namedtuple("Statistics", "LSE2 MU DELTA T_DELTA D_LSE TD_LSE KEY_MEAN T_KEY_MEAN COMMON")
# shared: resident rows, the ring, statistics of streamed rows, and the barriers of each
Memory = namedtuple("Memory", "a c ta tc ring a_full a_empty full empty stats s_full s_empty turn queue")
Results = namedtuple("Results", "DA DC TDA TDC EXCHANGE LSE2 DELTA T_DELTA")
# an `item`: of the resident rows the number of the block, batch entry and head; of the streamed ones the first head and how
# many; ends of queries and of keys, bounds of what is streamed
Block = namedtuple("Block", "work i_block i_b i_a i_stream group query_end key_end bounds")
STAGES = gl.constexpr(2)  # of statistics in shared memory


@gluon.jit
def staged_column(stats, i, LAYOUT: gl.constexpr):
    return gl.expand_dims(stats.index(i).load(LAYOUT), 0)


@gluon.jit
def row_statistic(X, x, m_x, other: gl.constexpr):
    return gl.expand_dims(gl.load(X + x, mask=m_x, other=other), 1)


@gluon.jit
def store_statistic(X, x, b_x, m_x):
    gl.store(X + gl.expand_dims(x, 1), b_x, mask=gl.expand_dims(m_x, 1))


@gluon.jit
def summed_rows(b_r, b_tr, SUM_DS: gl.constexpr, SUM_TDS: gl.constexpr, LAYOUT: gl.constexpr):
    """Of the row sums of dS and of ḋS those that there are."""
    rows = ()
    if SUM_DS:
        rows = rows + (summed_lanes(b_r, LAYOUT),)
    if SUM_TDS:
        rows = rows + (summed_lanes(b_tr, LAYOUT),)
    return rows


@gluon.jit
def excess_of(b_r, lse2, D_LSE, x, m_x, HAS_D_LSE: gl.constexpr):
    """By how much row sums exceed the cotangent of ℓ, which they would be without rounding."""
    if HAS_D_LSE:
        b_d = gl.expand_dims(gl.load(D_LSE + x, mask=m_x, other=0.0), 1)
        b_r -= gl.sum(gl.where(lse2 == float("inf"), 0.0, b_d), 1)  # nothing of a row that sees nothing
    return b_r


@gluon.jit
def tiles_in_all(ints, options):
    """Of a block."""
    if options.ROW:
        return gl.cdiv(ints.LK, options.T)
    else:
        return gl.cdiv(ints.LQ, options.T) * ints.GROUP


@gluon.jit
def own(i, ints, selection, options):
    T: gl.constexpr = options.T
    ROW: gl.constexpr = options.ROW
    FEATURES: gl.constexpr = options.FEATURES
    ROWS: gl.constexpr = options.HEIGHT * GROUP_ROWS
    HQ, GROUP, LQ, LK, left, right = ints.HQ, ints.GROUP, ints.LQ, ints.LK, ints.left, ints.right
    HA = HQ if ROW else HQ // GROUP
    work = item(i, ints, tiles_in_all(ints, options), FEATURES)
    i_block, i_ba = own_block(work.block, ints, gl.cdiv(LQ if ROW else LK, ROWS), ROW, FEATURES)
    i_b, i_a = divided(i_ba, HA, ints.of_heads)
    a_row = i_block * ROWS
    query_end, key_end = lengths(i_b, ints, selection, FEATURES)
    if ROW:
        group = 1
        i_stream = i_a // GROUP
        start, first, whole, stop = key_bounds(a_row, ROWS, key_end, ints, FEATURES)
    else:
        group = GROUP
        i_stream = i_a * GROUP
        start = 0
        first = 0
        stop = query_end
        # absent queries are rows of zeros
        whole = query_end if FEATURES.query_lengths else query_end + T - 1
        if FEATURES.right:
            start = a_row - right
            first = a_row + ROWS - 1 - right
        if FEATURES.left:
            whole = gl.minimum(whole, a_row + left + 1)
            stop = gl.minimum(stop, a_row + ROWS + left)
    if FEATURES.query_lengths if ROW else FEATURES.key_lengths:
        if a_row >= (query_end if ROW else key_end):
            stop = 0
    return Block(work, i_block, i_b, i_a, i_stream, group, query_end, key_end, Bounds(start, first, whole, stop))


@gluon.jit
def visits_of_head(i_g, block, ints, selection, options):
    """The tiles to visit for a query head, the i_g-th of a group."""
    T: gl.constexpr = options.T
    FEATURES: gl.constexpr = options.FEATURES
    n_blocks = gl.cdiv(ints.LQ if options.ROW else ints.LK, options.HEIGHT * GROUP_ROWS)
    n_tiles = gl.cdiv(ints.LK if options.ROW else ints.LQ, T)
    i_h = block.i_a if options.ROW else block.i_stream + i_g
    visits = visits_of(
        selection, block.i_b, i_h, ints, block.i_block, n_blocks, n_tiles, block.bounds, T, options.HAS_MASKED, FEATURES
    )  # fmt: skip
    if FEATURES.shared:
        visits = within(visits, block.work, i_g, block.group, not options.ROW)
    return visits


@gluon.jit
def load_all_resident(arrays, i_b, i_a, row, memory, a_at, options):
    USE_C: gl.constexpr = options.USE_C
    USE_TA: gl.constexpr = options.USE_TA
    USE_TC: gl.constexpr = options.USE_TC
    COUNT: gl.constexpr = 1 + (1 if USE_C else 0) + (1 if USE_TA else 0) + (1 if USE_TC else 0)
    for w in gl.static_range(options.HEIGHT):
        i = a_at.slot * options.HEIGHT + w
        bar = memory.a_full.index(i)
        mbarrier.wait(memory.a_empty.index(i), a_at.phase)
        expect(bar, COUNT, arrays.a)
        load_resident(arrays.a, i_b, i_a, row, bar, memory.a, i, w)
        if USE_C:
            load_resident(arrays.c, i_b, i_a, row, bar, memory.c, i, w)
        if USE_TA:
            load_resident(arrays.ta, i_b, i_a, row, bar, memory.ta, i, w)
        if USE_TC:
            load_resident(arrays.tc, i_b, i_a, row, bar, memory.tc, i, w)


@gluon.jit
def stage_statistics(statistics, x, m_x, memory, s_at, options):
    """Asynchronous.  Zeros for absent queries: their rows are zeros as well, so that a P of one adds nothing."""
    stats, stage = memory.stats, 4 * s_at.slot
    copy_async(stats.index(stage), statistics.LSE2 + x, mask=m_x)
    if options.USE_W:
        copy_async(stats.index(stage + 1), statistics.MU + x, mask=m_x)
    if options.USE_C:
        copy_async(stats.index(stage + 2), statistics.DELTA + x, mask=m_x)
    if options.WANT_TA:
        copy_async(stats.index(stage + 3), statistics.T_DELTA + x, mask=m_x)
    async_copy.mbarrier_arrive(memory.s_full.index(s_at.slot), increment_count=False)
    return advance(s_at, STAGES)


@gluon.jit
def load_outputs(arrays, i_b, i_a, row, memory, at, options):
    """o, and ȯ where tangents are wanted: 64 rows of each for one warpgroup after the other."""
    N: gl.constexpr = options.OUTPUTS
    PER_SLOT: gl.constexpr = options.PER_SLOT
    KINDS: gl.constexpr = N // options.HEIGHT
    for I in gl.static_range(N):
        bar = memory.full.index(at.slot)
        if I % PER_SLOT == 0:
            wait(memory.empty, at)
            expect(bar, PER_SLOT if I + PER_SLOT <= N else N - I, arrays.o)
        o = arrays.o if I % KINDS == 0 else arrays.to
        load(
            o, i_b, i_a, row + I // KINDS * GROUP_ROWS, bar, memory.ring, at.slot, I % PER_SLOT * GROUP_ROWS, GROUP_ROWS
        )
        if (I + 1) % PER_SLOT == 0 or I + 1 == N:
            at = advance(at, options.SLOTS)
    return at


@gluon.jit
def statistics_of_outputs(i_w: gl.constexpr, at, own_rows, memory, options, LAYOUT: gl.constexpr):
    """(rowsum(d_o∘o), rowsum(ḋ_o∘o + d_o∘ȯ)) of the rows of a warpgroup."""
    N: gl.constexpr = options.OUTPUTS
    PER_SLOT: gl.constexpr = options.PER_SLOT
    KINDS: gl.constexpr = N // options.HEIGHT
    delta = gl.zeros([GROUP_ROWS], gl.float32, LAYOUT)
    t_delta = gl.zeros([GROUP_ROWS], gl.float32, LAYOUT)
    c = matrix(memory.c, own_rows)
    tc = matrix(memory.tc, own_rows)
    for I in gl.static_range(N):
        if I % PER_SLOT == 0:
            wait(memory.full, at)
        if I // KINDS == i_w % options.HEIGHT:
            o = rows_from(matrix(memory.ring, at.slot), I % PER_SLOT * GROUP_ROWS, GROUP_ROWS)
            if I % KINDS == 1:
                t_delta += inner(c, o, LAYOUT)
            else:
                delta += inner(c, o, LAYOUT)
                if options.USE_TC:
                    t_delta += inner(tc, o, LAYOUT)
        if (I + 1) % PER_SLOT == 0 or I + 1 == N:
            give_back(memory.empty, at)
            at = advance(at, options.SLOTS)
    return delta, t_delta, at


@gluon.jit
def produce_block(i, at, s_at, a_at, arrays, statistics, memory, ints, selection, options):
    T: gl.constexpr = options.T
    SLOTS: gl.constexpr = options.SLOTS
    FEATURES: gl.constexpr = options.FEATURES
    HQ, LQ = ints.HQ, ints.LQ
    block = own(i, ints, selection, options)
    i_b, i_a = block.i_b, block.i_a
    a_row = block.i_block * (options.HEIGHT * GROUP_ROWS)
    # as in forward.py; o is of no use without d_o, which must not wait for slots that o takes
    ROOM: gl.constexpr = options.OUTPUTS <= (SLOTS - 2) * options.PER_SLOT
    AFTER: gl.constexpr = FEATURES.persistent and options.BUFFERS == 1 and ROOM
    if options.OUTPUTS > 0:
        at = load_outputs(arrays, i_b, i_a, a_row, memory, at, options)
    if not AFTER:
        load_all_resident(arrays, i_b, i_a, a_row, memory, a_at, options)
    first = 1
    for MASKED in gl.static_range(2):
        if has_loop(MASKED, options.HAS_MASKED, FEATURES):
            for i_g in range(block.group):
                i_h = block.i_stream + i_g
                visits = visits_of_head(i_g, block, ints, selection, options)
                t_first, t_end = range_of(visits, MASKED)
                for t in range(t_first, t_end):
                    row = tile_at(t, visits, MASKED, FEATURES) * T
                    if not options.ROW:
                        o_m = row + gl.arange(0, T, layout=gl.BlockedLayout([1], [32], [1], [0]))
                        x = (i_b * HQ + i_h).to(gl.int64) * LQ + o_m
                        wait(memory.s_empty, s_at)
                        s_at = stage_statistics(statistics, x, o_m < block.query_end, memory, s_at, options)
                    at = load_tile(arrays.b, arrays.tb, i_b, i_h, row, memory, at, T, SLOTS, options.USE_TB)
                    at = load_tile(arrays.e, arrays.te, i_b, i_h, row, memory, at, T, SLOTS, options.USE_TE)
                    if AFTER:
                        if first == 1:
                            load_all_resident(arrays, i_b, i_a, a_row, memory, a_at, options)
                        first = 0
    if AFTER and FEATURES.dynamic:
        if first == 1:
            load_all_resident(arrays, i_b, i_a, a_row, memory, a_at, options)
    return at, s_at


@gluon.jit
def produce(arrays, statistics, COUNTER, memory, ints, selection, options):
    FEATURES: gl.constexpr = options.FEATURES
    at = Cursor(0, 1)
    s_at = Cursor(0, 1)
    a_at = Cursor(0, 1)
    if FEATURES.dynamic:
        i = first_block(COUNTER, ints)
        i_at = Cursor(0, 1)
        while i < ints.n:
            at, s_at = produce_block(i, at, s_at, a_at, arrays, statistics, memory, ints, selection, options)
            a_at = advance(a_at, options.BUFFERS)
            i, i_at = next_block(COUNTER, memory.queue, i_at, ints)
    elif FEATURES.persistent:
        first, end = items(ints, tiles_in_all(ints, options), FEATURES)
        for i in range(first, end, ints.concurrent):
            at, s_at = produce_block(i, at, s_at, a_at, arrays, statistics, memory, ints, selection, options)
            a_at = advance(a_at, options.BUFFERS)
    else:
        produce_block(gl.program_id(0), at, s_at, a_at, arrays, statistics, memory, ints, selection, options)


@gluon.jit
def added(last, b, b_da, b_tda, TANGENT: gl.constexpr):
    """The sums with the product of ḋS, or else of dS, with b."""
    if TANGENT:
        return b_da, accumulated(last, b, b_tda)
    else:
        return accumulated(last, b, b_da), b_tda


@gluon.jit
def wanted(a, c, ta, tc, options):
    """Those of the four that are."""
    some = ()
    if options.WANT_A:
        some = some + (a,)
    if options.WANT_C:
        some = some + (c,)
    if options.WANT_TA:
        some = some + (ta,)
    if options.WANT_TC:
        some = some + (tc,)
    return some


@gluon.jit
def all_four(some, zero, options):
    """Of those, with zeros for the others."""
    I_C: gl.constexpr = 1 if options.WANT_A else 0
    I_TA: gl.constexpr = I_C + (1 if options.WANT_C else 0)
    I_TC: gl.constexpr = I_TA + (1 if options.WANT_TA else 0)
    a = some[0] if options.WANT_A else zero
    c = some[I_C] if options.WANT_C else zero
    ta = some[I_TA] if options.WANT_TA else zero
    tc = some[I_TC] if options.WANT_TC else zero
    return a, c, ta, tc


@gluon.jit
def consume_block(
    i, i_w: gl.constexpr, b_at, s_at, tick, a_at, memory, statistics, results, scale, ints, selection, options
):  # fmt: skip
    C: gl.constexpr = options.C
    T: gl.constexpr = options.T
    SLOTS: gl.constexpr = options.SLOTS
    GROUPS: gl.constexpr = options.GROUPS
    ROW: gl.constexpr = options.ROW
    TURNS: gl.constexpr = options.TURNS
    FEATURES: gl.constexpr = options.FEATURES
    USE_C: gl.constexpr = options.USE_C
    USE_W: gl.constexpr = options.USE_W
    USE_TA: gl.constexpr = options.USE_TA
    USE_TB: gl.constexpr = options.USE_TB
    USE_TC: gl.constexpr = options.USE_TC
    USE_TE: gl.constexpr = options.USE_TE
    WANT_A: gl.constexpr = options.WANT_A
    WANT_C: gl.constexpr = options.WANT_C
    WANT_TA: gl.constexpr = options.WANT_TA
    WANT_TC: gl.constexpr = options.WANT_TC
    full, empty, stats, turn = memory.full, memory.empty, memory.stats, memory.turn
    s_l: gl.constexpr = product_layout(T)
    p_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=s_l, k_width=2)
    x_l: gl.constexpr = gl.SliceLayout(1 if ROW else 0, s_l)
    PADDED_A: gl.constexpr = FEATURES.query_lengths if ROW else FEATURES.key_lengths
    PADDED_B: gl.constexpr = FEATURES.key_lengths if ROW else FEATURES.query_lengths
    SPLIT: gl.constexpr = options.HEIGHT < GROUPS
    OWN: gl.constexpr = width(C, i_w) if SPLIT else C  # columns of the sums
    FIRST: gl.constexpr = i_w if SPLIT else 0  # part of these
    WIDEST: gl.constexpr = width(C, 0) if SPLIT else C
    # so many products of each kind are in flight when another is waited for
    N_TS: gl.constexpr = parts(C) if USE_TA else 0
    N_P: gl.constexpr = parts(OWN) * ((1 if WANT_C else 0) + (1 if WANT_TC and USE_TE else 0))
    N_DS: gl.constexpr = parts(OWN) * ((1 if WANT_A else 0) + (1 if WANT_TA and USE_TB else 0))
    N_PW: gl.constexpr = parts(OWN) if WANT_TC and USE_W else 0
    # a tile's last product, of ḋS or else of dS with b, is issued with the next tile's scores: nobody waits for it alone
    DEFERRED: gl.constexpr = FEATURES.deferred and (WANT_TA or (WANT_A and not WANT_TC))
    gl.static_assert(not DEFERRED or SLOTS >= 4, "a tile is kept until e of the next is there")
    LATE_DP: gl.constexpr = FEATURES.late_dp and USE_C  # dP is issued behind the softmax, which has its registers
    gl.static_assert(not LATE_DP or not WANT_TA, "of gradients alone")
    # row sums of dS and of ḋS, where these are multiplied with keys or their tangents, if keys have a part in common
    CORRECTED: gl.constexpr = ROW and (FEATURES.sees_all or FEATURES.row_means)
    SUM_DS: gl.constexpr = CORRECTED and N_DS > 0
    SUM_TDS: gl.constexpr = CORRECTED and WANT_TA
    dtype: gl.constexpr = memory.a[0].dtype
    HQ, GROUP, LQ, LK = ints.HQ, ints.GROUP, ints.LQ, ints.LK
    HA = HQ if ROW else HQ // GROUP
    LA = LQ if ROW else LK
    block = own(i, ints, selection, options)
    i_b, i_a, query_end, key_end = block.i_b, block.i_a, block.query_end, block.key_end
    a_start = (block.i_block * options.HEIGHT + i_w % options.HEIGHT) * GROUP_ROWS
    none = sums(OWN)
    b_da, b_dc, b_tda, b_tdc = none, none, none, none
    zero = gl.zeros([GROUP_ROWS, T], gl.float32, s_l)
    b_r = gl.zeros([GROUP_ROWS, 4], gl.float32, lane_layout())
    b_tr = b_r
    common = 0
    if SUM_DS or SUM_TDS:
        common = gl.load(statistics.COMMON + i_b * (HQ // GROUP) + block.i_stream)
    if FEATURES.shared:
        some, rows = resume(
            results.EXCHANGE, block.work, i_w, GROUPS, wanted(b_da, b_dc, b_tda, b_tdc, options),
            summed_rows(b_r, b_tr, SUM_DS, SUM_TDS, x_l), WIDEST,
        )  # fmt: skip
        b_da, b_dc, b_tda, b_tdc = all_four(some, none, options)
        if SUM_DS:
            b_r = over_lanes(rows[0])
        if SUM_TDS:
            b_tr = over_lanes(rows[len(rows) - 1])
    zeros = gl.zeros([GROUP_ROWS, 2 * T], gl.float32, product_layout(2 * T))
    own_rows = a_at.slot * options.HEIGHT + i_w % options.HEIGHT
    mbarrier.wait(memory.a_full.index(own_rows), a_at.phase)
    if ROW:
        o_a = a_start + gl.arange(0, GROUP_ROWS, layout=x_l)
        x = (i_b * HA + i_a).to(gl.int64) * LA + o_a
        if options.OUTPUTS > 0:
            b_lse = gl.load(statistics.LSE2 + x, mask=o_a < LA, other=-float("inf"))
            b_delta, b_t_delta, b_at = statistics_of_outputs(i_w, b_at, own_rows, memory, options, x_l)
            lse2 = gl.expand_dims(log2_sum_exp(b_lse), 1)
            if options.HAS_D_LSE:
                b_delta -= gl.load(statistics.D_LSE + x, mask=o_a < LA, other=0.0)
            if options.HAS_TD_LSE:
                b_t_delta -= gl.load(statistics.TD_LSE + x, mask=o_a < LA, other=0.0)
            delta, t_delta = gl.expand_dims(b_delta, 1), gl.expand_dims(b_t_delta, 1)
        else:
            lse2 = row_statistic(statistics.LSE2, x, o_a < LA, float("inf"))
            delta = row_statistic(statistics.DELTA, x, o_a < LA, 0.0)
            if WANT_TA:
                t_delta = row_statistic(statistics.T_DELTA, x, o_a < LA, 0.0)
        if USE_W:
            mu = row_statistic(statistics.MU, x, o_a < LA, 0.0)
    per_scale = 1 / scale
    end_a = query_end if ROW else key_end
    end_b = key_end if ROW else query_end
    for MASKED in gl.static_range(2):
        if has_loop(MASKED, options.HAS_MASKED, FEATURES):
            for i_g in range(block.group):
                visits = visits_of_head(i_g, block, ints, selection, options)
                i_h = i_a if ROW else block.i_stream + i_g
                sight = selected(selection, i_b, i_h, ints, query_end, key_end, ROW, FEATURES)
                t_first, t_end = range_of(visits, MASKED)
                if DEFERRED:
                    last = gl.convert_layout(zero.to(dtype), p_l)  # there is no tile before the first
                upcoming = first_tile(visits, MASKED, FEATURES)
                for t in range(t_first, t_end):
                    j, upcoming = next_tile(t, upcoming, visits, MASKED, FEATURES)
                    b_bits = bits(a_start, j * T, sight, T, ROW, MASKED, FEATURES, s_l)
                    # an index that the compiler cannot fold: else it keeps every resident descriptor in registers
                    z = own_rows + (tick >> 30)
                    a = matrix(memory.a, z)
                    e_at = advance(b_at, SLOTS)
                    bb = matrix(memory.ring, b_at.slot)
                    ee = matrix(memory.ring, e_at.slot)
                    b = rows_from(bb, 0, T)
                    e = rows_from(ee, 0, T)
                    tb = rows_from(bb, T, T) if USE_TB else b
                    te = rows_from(ee, T, T) if USE_TE else e
                    if MASKED and PADDED_B:
                        wait(full, b_at)
                        clean(b, j * T, end_b)
                        wait(full, e_at)
                        clean(e, j * T, end_b)
                        if USE_TB:
                            clean(tb, j * T, end_b)
                        if USE_TE:
                            clean(te, j * T, end_b)

                    wait(full, b_at)
                    if TURNS:
                        mbarrier.wait(turn.index(i_w), tick & 1)
                    if DEFERRED:
                        slot = gl.where(t > t_first, slot_before(b_at, 2, SLOTS), b_at.slot)
                        before = own_columns(rows_from(matrix(memory.ring, slot), 0, T), i_w, SPLIT)
                        b_da, b_tda = added(last, before, b_da, b_tda, WANT_TA)
                    if USE_TB:
                        b_s = score_product(a, bb, zeros, False)  # [64, 2 T]
                    else:
                        b_s = score_product(a, b, zero, False)  # [64, T]
                    if not LATE_DP:
                        wait(full, e_at)
                    if USE_C and not LATE_DP:
                        c = matrix(memory.c, z)
                        if USE_TE and WANT_TA:
                            b_dp = score_product(c, ee, zeros, False)
                        else:
                            b_dp = score_product(c, e, zero, False)
                    if TURNS:
                        mbarrier.arrive(turn.index((i_w + 1) % GROUPS), count=1)
                    if not ROW:
                        wait(memory.s_full, s_at)
                        lse2 = staged_column(stats, 4 * s_at.slot, x_l)
                    seen = looked_up(a_start, j * T, sight, T, ROW, MASKED, FEATURES, s_l)
                    if DEFERRED:
                        if WANT_TA:
                            b_tda, last, b_s = settled_before(b_tda, last, b_s, parts(C))
                        else:
                            b_da, last, b_s = settled_before(b_da, last, b_s, 0 if LATE_DP else parts(C))
                        mbarrier.arrive(empty.index(slot), count=1, pred=t > t_first)
                    else:
                        b_s = warpgroup_mma_wait(parts(C) if USE_C and not LATE_DP else 0, deps=[b_s])
                    b_ts = zero
                    if USE_TB:
                        b_s, b_ts = halves(b_s)
                    b_s = hide(b_s, seen, b_bits, a_start, j * T, sight, T, ROW, MASKED, FEATURES, s_l)
                    b_p = gl.exp2(b_s * (scale * LOG2E) - lse2)
                    if N_P > 0:
                        p = gl.convert_layout(b_p.to(dtype), p_l)
                    if LATE_DP:
                        wait(full, e_at)
                        b_dp = score_product(matrix(memory.c, z), e, zero, False)
                    if USE_W:
                        if not ROW:
                            mu = staged_column(stats, 4 * s_at.slot + 1, x_l)
                        b_ts -= mu * per_scale
                    if USE_TA:
                        b_ts = score_product(matrix(memory.ta, z), b, b_ts, True)
                    if WANT_C:
                        b_dc = accumulated(p, own_columns(e, i_w, SPLIT), b_dc)
                    if WANT_TC and USE_TE:
                        b_tdc = accumulated(p, own_columns(te, i_w, SPLIT), b_tdc)

                    if USE_C:
                        if not ROW:
                            delta = staged_column(stats, 4 * s_at.slot + 2, x_l)
                        b_dp = warpgroup_mma_wait(N_TS + N_P, deps=[b_dp])
                        b_tdp = zero
                        if WANT_TA and USE_TE:
                            b_dp, b_tdp = halves(b_dp)
                        b_dp -= delta
                        if N_DS > 0:
                            b_ds = packed(b_p * b_dp, dtype)
                            ds = unpacked(b_ds, dtype, p_l)
                        if WANT_TA and USE_TB:
                            b_tda = accumulated(ds, own_columns(tb, i_w, SPLIT), b_tda)
                        if DEFERRED and not WANT_TA:
                            last = ds
                        elif WANT_A:
                            b_da = accumulated(ds, own_columns(b, i_w, SPLIT), b_da)
                    if USE_TA:
                        b_ts = warpgroup_mma_wait(N_P + N_DS, deps=[b_ts])
                    if USE_W:
                        b_w = b_ts * scale
                    if WANT_TA:
                        if not ROW:
                            t_delta = staged_column(stats, 4 * s_at.slot + 3, x_l)
                        b_tdp -= t_delta
                        if USE_W:
                            b_tdp += b_dp * b_w
                        if USE_TC:
                            b_tdp = score_product(matrix(memory.tc, z), e, b_tdp, True)
                    if N_PW > 0:
                        pw = gl.convert_layout((b_p * b_w).to(dtype), p_l)
                        b_tdc = accumulated(pw, own_columns(e, i_w, SPLIT), b_tdc)
                    if WANT_TA:
                        if USE_TC:
                            b_tdp = warpgroup_mma_wait(N_PW, deps=[b_tdp])
                        if SUM_DS:
                            if common + (tick >> 30):
                                b_r += lane_sums(b_ds, dtype)
                        b_tds = packed(b_p * b_tdp, dtype)
                        tds = unpacked(b_tds, dtype, p_l)
                        if DEFERRED:
                            last = tds
                        else:
                            b_tda = accumulated(tds, own_columns(b, i_w, SPLIT), b_tda)

                    if WANT_TA and not DEFERRED:
                        b_tda, tds = settled(b_tda, tds)
                    if WANT_A and (WANT_TA or not DEFERRED):
                        b_da, ds = settled(b_da, ds)
                    elif N_DS > 0 and WANT_TA:
                        b_tda, ds = settled(b_tda, ds)
                    if WANT_C:
                        b_dc, p = settled(b_dc, p)
                    if WANT_TC and USE_TE:
                        b_tdc, p = settled(b_tdc, p)
                    if N_PW > 0:
                        b_tdc, pw = settled(b_tdc, pw)
                    if SUM_DS and not WANT_TA:
                        if common + (tick >> 30):  # tested here, as the loop must not wait for it to be loaded
                            b_r += lane_sums(b_ds, dtype)
                    if SUM_TDS:
                        if common + (tick >> 30):
                            b_tr += lane_sums(b_tds, dtype)
                    if not ROW:
                        give_back(memory.s_empty, s_at)
                        s_at = advance(s_at, STAGES)
                    if not DEFERRED:
                        give_back(empty, b_at)
                    give_back(empty, e_at)
                    b_at = advance(e_at, SLOTS)
                    tick += 1
                if DEFERRED:
                    if t_first < t_end:
                        slot = slot_before(b_at, 2, SLOTS)
                        before = own_columns(rows_from(matrix(memory.ring, slot), 0, T), i_w, SPLIT)
                        b_da, b_tda = added(last, before, b_da, b_tda, WANT_TA)
                        if WANT_TA:
                            b_tda, last = settled(b_tda, last)
                        else:
                            b_da, last = settled(b_da, last)
                        mbarrier.arrive(empty.index(slot), count=1)
    mbarrier.arrive(memory.a_empty.index(own_rows), count=1)

    # worked out again, where the loop has no registers for it
    again = i if C <= 64 and not FEATURES.shared else i + (tick >> 30)
    block = own(again, ints, selection, options)
    i_b, i_a = block.i_b, block.i_a
    a_start = (block.i_block * options.HEIGHT + i_w % options.HEIGHT) * GROUP_ROWS
    o_a = a_start + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, s_l))
    gradients = wanted(b_da, b_dc, b_tda, b_tdc, options)
    rows = summed_rows(b_r, b_tr, SUM_DS, SUM_TDS, x_l)
    if FEATURES.shared:
        gradients, rows = finish(results.EXCHANGE, block.work, i_w, GROUPS, gradients, rows, WIDEST, True)
    if block.work.handed_over:
        if FEATURES.shared:
            hand_over(results.EXCHANGE, in_wave(ints, FEATURES), i_w, GROUPS, gradients, rows, WIDEST)
    else:
        if ROW:
            x = (i_b * HA + i_a).to(gl.int64) * LA + o_a
            mean = mean_at(i_b, i_a, block.i_stream, a_start, ints, C, FEATURES)
            b_da, _, b_tda, _ = all_four(gradients, none, options)
            if SUM_DS:
                if common:
                    excess = excess_of(rows[0], lse2, statistics.D_LSE, x, o_a < LA, options.HAS_D_LSE)
                    delta += gl.expand_dims(excess, 1)
                    if WANT_A:
                        b_da = without_mean(b_da, excess, statistics.KEY_MEAN, mean, C, FIRST)
                    if WANT_TA and USE_TB:
                        b_tda = without_mean(b_tda, excess, statistics.T_KEY_MEAN, mean, C, FIRST)
            if SUM_TDS:
                if common:
                    excess = excess_of(rows[len(rows) - 1], lse2, statistics.TD_LSE, x, o_a < LA, options.HAS_TD_LSE)
                    t_delta += gl.expand_dims(excess, 1)
                    b_tda = without_mean(b_tda, excess, statistics.KEY_MEAN, mean, C, FIRST)
            if FIRST == 0:
                store_statistic(results.DELTA, x, delta, o_a < LA)
                if WANT_TA:
                    store_statistic(results.T_DELTA, x, t_delta, o_a < LA)
                if options.OUTPUTS > 0:
                    store_statistic(results.LSE2, x, lse2, o_a < LA)
            gradients = wanted(b_da, b_dc, b_tda, b_tdc, options)
        arrays = wanted(results.DA, results.DC, results.TDA, results.TDC, options)
        scales = wanted(scale, 1.0, scale, 1.0, options)
        for I in gl.static_range(len(gradients)):
            b_x = scaled(gradients[I], gl.full([GROUP_ROWS], scales[I], gl.float32, gl.SliceLayout(1, s_l)))
            if PADDED_A:
                b_x = zeroed(b_x, o_a >= end_a)
            store_rows(arrays[I], i_b, i_a, HA, a_start, LA, b_x, C, FIRST)
    return b_at, s_at, tick


@gluon.jit
def consume(i_w: gl.constexpr, memory, statistics, results, scale, ints, selection, options):
    FEATURES: gl.constexpr = options.FEATURES
    at = Cursor(0, 0)
    s_at = Cursor(0, 0)
    tick = 0
    a_at = Cursor(0, 0)
    if FEATURES.dynamic:
        i = gl.program_id(0)
        i_at = Cursor(0, 0)
        while i < ints.n:
            at, s_at, tick = consume_block(
                i, i_w, at, s_at, tick, a_at, memory, statistics, results, scale, ints, selection, options
            )  # fmt: skip
            a_at = advance(a_at, options.BUFFERS)
            i, i_at = received_block(memory.queue, i_at)
    elif FEATURES.persistent:
        first, end = items(ints, tiles_in_all(ints, options), FEATURES)
        for i in range(first, end, ints.concurrent):
            at, s_at, tick = consume_block(
                i, i_w, at, s_at, tick, a_at, memory, statistics, results, scale, ints, selection, options
            )  # fmt: skip
            a_at = advance(a_at, options.BUFFERS)
    else:
        i = gl.program_id(0)
        consume_block(i, i_w, at, s_at, tick, a_at, memory, statistics, results, scale, ints, selection, options)


@gluon.jit
def program(arrays, statistics, results, scale, ints, selection, options):
    """Its shared memory, its warps."""
    GROUPS: gl.constexpr = options.GROUPS
    TURNS: gl.constexpr = options.TURNS
    RESIDENT: gl.constexpr = options.HEIGHT * options.BUFFERS
    a_s = tiles(arrays.a, RESIDENT)
    c_s = tiles(arrays.c, RESIDENT) if options.USE_C else a_s
    ta_s = tiles(arrays.ta, RESIDENT) if options.USE_TA else a_s
    tc_s = tiles(arrays.tc, RESIDENT) if options.USE_TC else a_s
    ring = tiles(arrays.b, options.SLOTS, 2 if options.USE_TB or options.USE_TE else 1)
    a_full = barriers(RESIDENT, 1)
    a_empty = barriers(RESIDENT, GROUPS // options.HEIGHT)
    full = barriers(options.SLOTS, 1)
    empty = barriers(options.SLOTS, GROUPS)
    # none that is not used: its memory would be given to others
    turn = barriers(GROUPS, 1) if TURNS else full
    stats = full
    s_full = full
    s_empty = full
    if not options.ROW:
        stats = gl.allocate_shared_memory(gl.float32, [4 * STAGES, options.T], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        s_full = barriers(STAGES, 32)  # every lane of the producer
        s_empty = barriers(STAGES, GROUPS)
    if TURNS:
        mbarrier.arrive(turn.index(0), count=1)
    fence_async_shared()
    numbers = queue(GROUPS) if options.FEATURES.dynamic else full
    memory = Memory(a_s, c_s, ta_s, tc_s, ring, a_full, a_empty, full, empty, stats, s_full, s_empty, turn, numbers)
    if GROUPS == 2:
        gl.warp_specialize([
            (consume, (0, memory, statistics, results, scale, ints, selection, options)),
            (consume, (1, memory, statistics, results, scale, ints, selection, options)),
            (produce, (arrays, statistics, results.EXCHANGE, memory, ints, selection, options)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (0, memory, statistics, results, scale, ints, selection, options)),
            (consume, (1, memory, statistics, results, scale, ints, selection, options)),
            (consume, (2, memory, statistics, results, scale, ints, selection, options)),
            (produce, (arrays, statistics, results.EXCHANGE, memory, ints, selection, options)),
        ], [4, 4, 1], [160, 160, 24])  # fmt: skip


@gluon.jit(do_not_specialize_on_alignment=Integers._fields)
def backward(
    a_d, c_d, b_d, e_d, ta_d, tc_d, tb_d, te_d, o_d, to_d, a_r, c_r, b_r, e_r, ta_r, tc_r, tb_r, te_r, o_r, to_r,
    MASK, BLOCKS, Q_LENGTHS, K_LENGTHS, Q_SEGMENTS, K_SEGMENTS, RANGES, TILES,
    LSE2, MU, DELTA, T_DELTA, D_LSE, TD_LSE, KEY_MEAN, T_KEY_MEAN, COMMON,
    scale, n, HQ, GROUP, LQ, LK, left, right, n_whole, shared_tiles, concurrent,
    of_blocks, of_heads, of_tiles, of_shared_tiles, of_together, of_rest,
    DA, DC, TDA, TDC, EXCHANGE, LSE2_OUT, DELTA_OUT, T_DELTA_OUT,
    C: gl.constexpr, T: gl.constexpr, SLOTS: gl.constexpr, GROUPS: gl.constexpr, HEIGHT: gl.constexpr,
    ROW: gl.constexpr, TURNS: gl.constexpr, FEATURES: gl.constexpr, RAGGED: gl.constexpr,
    HAS_TA: gl.constexpr, HAS_TB: gl.constexpr, HAS_TC: gl.constexpr, HAS_TE: gl.constexpr,
    HAS_D_LSE: gl.constexpr, HAS_TD_LSE: gl.constexpr,
    WANT_A: gl.constexpr, WANT_C: gl.constexpr, WANT_TA: gl.constexpr, WANT_TC: gl.constexpr,
):  # fmt: skip
    USE_C: gl.constexpr = WANT_A or WANT_TA
    USE_W: gl.constexpr = (HAS_TA or HAS_TB) and (WANT_TA or WANT_TC)
    USE_TA: gl.constexpr = HAS_TA and USE_W
    USE_TB: gl.constexpr = HAS_TB and USE_W
    USE_TC: gl.constexpr = HAS_TC and WANT_TA
    USE_TE: gl.constexpr = HAS_TE and (WANT_TA or WANT_TC)
    # 64 rows of o and of ȯ, so many times for a block, so many in a slot
    OUTPUTS: gl.constexpr = HEIGHT * (2 if WANT_TA else 1) if FEATURES.makes_statistics else 0
    PER_SLOT: gl.constexpr = T * (2 if USE_TB or USE_TE else 1) // GROUP_ROWS
    PAIRS: gl.constexpr = SLOTS // (2 if USE_TB or USE_TE else 1)
    RESIDENT: gl.constexpr = 1 + (1 if USE_C else 0) + (1 if USE_TA else 0) + (1 if USE_TC else 0)
    BUFFERS: gl.constexpr = resident_buffers(RESIDENT * HEIGHT * GROUP_ROWS, SLOTS * T, C, FEATURES)
    LQ, LK = aligned(LQ, LK, FEATURES)
    program(
        Arrays(
            described(a_d, a_r), described(c_d, c_r), described(b_d, b_r), described(e_d, e_r),
            described(ta_d, ta_r), described(tc_d, tc_r), described(tb_d, tb_r), described(te_d, te_r),
            described(o_d, o_r), described(to_d, to_r),
        ), Statistics(LSE2, MU, DELTA, T_DELTA, D_LSE, TD_LSE, KEY_MEAN, T_KEY_MEAN, COMMON),
        Results(DA, DC, TDA, TDC, EXCHANGE, LSE2_OUT, DELTA_OUT, T_DELTA_OUT), scale,
        Integers(
            n, HQ, GROUP, LQ, LK, left, right, n_whole, shared_tiles, concurrent,
            of_blocks, of_heads, of_tiles, of_shared_tiles, of_together, of_rest,
        ),
        Selection(MASK, BLOCKS, Q_LENGTHS, K_LENGTHS, Q_SEGMENTS, K_SEGMENTS, RANGES, TILES),
        Options(
            C, T, PAIRS, GROUPS, HEIGHT, BUFFERS, ROW, OUTPUTS, PER_SLOT, TURNS, FEATURES,
            has_masked_tiles(FEATURES, ROW, RAGGED), USE_C, USE_W, USE_TA, USE_TB, USE_TC, USE_TE, HAS_D_LSE, HAS_TD_LSE,
            WANT_A, WANT_C, WANT_TA, WANT_TC,
        ),
    )  # fmt: skip
