"""The backward and its tangent, for the key side and for the query side: one body.  Formulas as in `portable/backward.py`.

A block is 64 resident rows for each of the GROUPS consumer warpgroups, and streams the other sequence:

                 resident a, c     streamed b, e     s = a bᵀ, dp = c eᵀ − δ, ds = p∘dp      da += ds b      dc += p e
    key side     k, v              q, d_o            tiles [keys, queries]                   dk              dv
    query side   q, d_o            k, v              tiles [queries, keys]                   dq              –

and, with w = ṡ − μ,  ṡ = a ḃᵀ + ȧ bᵀ,  ḋs = p∘(c ėᵀ + ċ eᵀ − δ̇) + ds∘w,  ḋa += ḋs b + ds ḃ,  ḋc += p ė + (p∘w) e.

ROW says that the statistics (ℓ, μ, δ, δ̇) belong to the resident rows, as on the query side; those of streamed rows come
through shared memory, by the producer.  A tile of b and of ḃ lie one below the other, so that one product has both a bᵀ and
a ḃᵀ, with half the reading of a; c eᵀ and c ėᵀ likewise.  The sums of ṡ and of ḋp begin with what is taken off or added.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from jax_flash_jvp.kernels.hopper.pipeline import (
    GROUP_ROWS,
    LOG2E,
    accumulated,
    advance,
    barriers,
    clean,
    copy_async,
    end_of_items,
    halves,
    hide,
    item,
    key_bounds,
    load_resident,
    load_tile,
    looked_up,
    masks,
    matrix,
    own_block,
    part_rows,
    parts,
    product_layout,
    reach,
    scaled,
    score_product,
    selected,
    settled,
    store_rows,
    store_rows_from,
    sums,
    tile_at,
    tiles,
    visits,
    within,
    zeroed,
)
from jax_flash_jvp.kernels.portable.scores import has

STAGES = gl.constexpr(2)  # of statistics in shared memory; four took 4% longer at 64 channels


@gluon.jit
def stage_column(X, x, m_x, stats, i):
    """Asynchronous.  Zeros for absent queries: their rows are zeros as well, so that a P of one adds nothing."""
    copy_async(stats.index(i), X + x, mask=m_x)


@gluon.jit
def staged_column(stats, i, LAYOUT: gl.constexpr):
    return gl.expand_dims(stats.index(i).load(LAYOUT), 0)


@gluon.jit
def column(X, row, L, other: gl.constexpr, T: gl.constexpr, RAGGED: gl.constexpr, LAYOUT: gl.constexpr):
    o_b = row + gl.arange(0, T, layout=LAYOUT)
    if RAGGED:
        return gl.expand_dims(gl.load(X + o_b, mask=o_b < L, other=other), 0)
    else:
        return gl.expand_dims(gl.load(X + o_b), 0)


@gluon.jit
def row_statistic(X, x, m_x, other: gl.constexpr):
    return gl.expand_dims(gl.load(X + x, mask=m_x, other=other), 1)


@gluon.jit
def own(i, call, selection, GROUPS: gl.constexpr, T: gl.constexpr, ROW: gl.constexpr, FEATURES: gl.constexpr):
    """(`item`, block, batch entry, resident head, first streamed head, number of these, ends of queries and of keys, bounds of
    what is streamed)."""
    ROWS: gl.constexpr = GROUPS * GROUP_ROWS
    n, HQ, GROUP, LQ, LK, left, right, _ = call
    HA = HQ if ROW else HQ // GROUP
    work = item(i, call, tiles_in_all(call, T, ROW), FEATURES)
    i_block, i_ba = own_block(work[0], n, gl.cdiv(LQ if ROW else LK, ROWS), ROW, FEATURES)
    i_b = i_ba // HA
    i_a = i_ba % HA
    a_row = i_block * ROWS
    query_end, key_end = reach(i_b, LQ, LK, selection[1], selection[2], FEATURES)
    # the streamed rows start … stop that some resident row sees, or is seen by, and of them those that all do
    if ROW:
        group = 1
        i_stream = i_a // GROUP
        start, first, whole, stop = key_bounds(a_row, ROWS, key_end, left, right, FEATURES)
    else:
        group = GROUP
        i_stream = i_a * GROUP
        start = 0
        first = 0
        stop = query_end
        # absent queries are rows of zeros
        whole = query_end if has(FEATURES, "query_lengths") else query_end + T - 1
        if has(FEATURES, "right"):
            start = a_row - right
            first = a_row + ROWS - 1 - right
        if has(FEATURES, "left"):
            whole = gl.minimum(whole, a_row + left + 1)
            stop = gl.minimum(stop, a_row + ROWS + left)
    if has(FEATURES, "query_lengths" if ROW else "key_lengths"):
        if a_row >= (query_end if ROW else key_end):
            stop = 0
    return work, i_block, i_b, i_a, i_stream, group, query_end, key_end, (start, first, whole, stop)


@gluon.jit
def visits_of_head(
    i_g, group, work, i_h, i_block, i_b, bounds, call, selection, GROUPS: gl.constexpr, T: gl.constexpr, ROW: gl.constexpr,
    THROUGH_SHARED: gl.constexpr, MASKS: gl.constexpr, FEATURES: gl.constexpr,
):  # fmt: skip
    """The tiles to visit for a query head, the i_g-th of a group."""
    _, HQ, GROUP, LQ, LK, _, _, _ = call
    n_blocks = gl.cdiv(LQ if ROW else LK, GROUPS * GROUP_ROWS)
    n_tiles = gl.cdiv(LK if ROW else LQ, T)
    tiles_of = visits(selection, i_b, i_h, HQ, GROUP, i_block, n_blocks, n_tiles, bounds, T, MASKS, FEATURES)
    if has(FEATURES, "shared"):
        tiles_of = within(tiles_of, work[1], work[2], i_g, group, THROUGH_SHARED)
    return tiles_of


@gluon.jit
def tiles_in_all(call, T: gl.constexpr, ROW: gl.constexpr):
    """Of a block."""
    _, _, GROUP, LQ, LK, _, _, _ = call
    if ROW:
        return gl.cdiv(LK, T)
    else:
        return gl.cdiv(LQ, T) * GROUP


@gluon.jit
def load_all_resident(
    a_d, c_d, ta_d, tc_d, i_b, i_a, row, a_s, c_s, ta_s, tc_s, a_full, a_empty, phase,
    GROUPS: gl.constexpr, USE_C: gl.constexpr, USE_TA: gl.constexpr, USE_TC: gl.constexpr,
):  # fmt: skip
    COUNT: gl.constexpr = 1 + (1 if USE_C else 0) + (1 if USE_TA else 0) + (1 if USE_TC else 0)
    for w in gl.static_range(GROUPS):
        bar = a_full.index(w)
        mbarrier.wait(a_empty.index(w), phase)
        mbarrier.expect(bar, COUNT * a_d.block_type.nbytes)
        load_resident(a_d, i_b, i_a, row, bar, a_s, w)
        if USE_C:
            load_resident(c_d, i_b, i_a, row, bar, c_s, w)
        if USE_TA:
            load_resident(ta_d, i_b, i_a, row, bar, ta_s, w)
        if USE_TC:
            load_resident(tc_d, i_b, i_a, row, bar, tc_s, w)


@gluon.jit
def produce_block(
    i, a_d, c_d, b_d, e_d, ta_d, tc_d, tb_d, te_d, LSE2, MU, DELTA, T_DELTA,
    a_s, c_s, ta_s, tc_s, ring, a_full, a_empty, full, empty, stats, s_full, s_empty, call, selection,
    slot, phase, stage, s_phase, a_phase,
    T: gl.constexpr, SLOTS: gl.constexpr, GROUPS: gl.constexpr, ROW: gl.constexpr, THROUGH_SHARED: gl.constexpr,
    MASKS: gl.constexpr, FEATURES: gl.constexpr, USE_C: gl.constexpr, USE_W: gl.constexpr,
    USE_TA: gl.constexpr, USE_TB: gl.constexpr, USE_TC: gl.constexpr, USE_TE: gl.constexpr, WANT_TA: gl.constexpr,
):  # fmt: skip
    HQ, LQ = call[1], call[3]
    work, i_block, i_b, i_a, i_stream, group, query_end, _, bounds = own(i, call, selection, GROUPS, T, ROW, FEATURES)
    a_row = i_block * (GROUPS * GROUP_ROWS)
    AFTER: gl.constexpr = has(FEATURES, "persistent")  # as in forward.py
    if not AFTER:
        load_all_resident(
            a_d, c_d, ta_d, tc_d, i_b, i_a, a_row, a_s, c_s, ta_s, tc_s, a_full, a_empty, a_phase, GROUPS, USE_C, USE_TA, USE_TC
        )  # fmt: skip
    first = 1
    for MASKED in gl.static_range(2):
        if not MASKED or MASKS:
            for i_g in range(group):
                i_h = i_stream + i_g
                tiles_of = visits_of_head(
                    i_g, group, work, i_a if ROW else i_h, i_block, i_b, bounds, call, selection, GROUPS, T, ROW,
                    THROUGH_SHARED, MASKS, FEATURES,
                )  # fmt: skip
                for t in range(tiles_of[2 * MASKED], tiles_of[2 * MASKED + 1]):
                    row = tile_at(t, tiles_of, MASKED, FEATURES) * T
                    if THROUGH_SHARED:
                        o_m = row + gl.arange(0, T, layout=gl.BlockedLayout([1], [32], [1], [0]))
                        x = (i_b * HQ + i_h).to(gl.int64) * LQ + o_m
                        mbarrier.wait(s_empty.index(stage), s_phase)
                        stage_column(LSE2, x, o_m < query_end, stats, 4 * stage)
                        if USE_W:
                            stage_column(MU, x, o_m < query_end, stats, 4 * stage + 1)
                        if USE_C:
                            stage_column(DELTA, x, o_m < query_end, stats, 4 * stage + 2)
                        if WANT_TA:
                            stage_column(T_DELTA, x, o_m < query_end, stats, 4 * stage + 3)
                        async_copy.mbarrier_arrive(s_full.index(stage), increment_count=False)
                        stage, s_phase = advance(stage, s_phase, STAGES)
                    slot, phase = load_tile(b_d, tb_d, i_b, i_h, row, ring, full, empty, slot, phase, T, SLOTS, USE_TB)
                    slot, phase = load_tile(e_d, te_d, i_b, i_h, row, ring, full, empty, slot, phase, T, SLOTS, USE_TE)
                    if AFTER:
                        if first == 1:
                            load_all_resident(
                                a_d, c_d, ta_d, tc_d, i_b, i_a, a_row, a_s, c_s, ta_s, tc_s, a_full, a_empty, a_phase,
                                GROUPS, USE_C, USE_TA, USE_TC,
                            )  # fmt: skip
                        first = 0
    return slot, phase, stage, s_phase


@gluon.jit
def produce(
    a_d, c_d, b_d, e_d, ta_d, tc_d, tb_d, te_d, LSE2, MU, DELTA, T_DELTA,
    a_s, c_s, ta_s, tc_s, ring, a_full, a_empty, full, empty, stats, s_full, s_empty, call, selection,
    T: gl.constexpr, SLOTS: gl.constexpr, GROUPS: gl.constexpr, ROW: gl.constexpr, THROUGH_SHARED: gl.constexpr,
    MASKS: gl.constexpr, FEATURES: gl.constexpr, USE_C: gl.constexpr, USE_W: gl.constexpr,
    USE_TA: gl.constexpr, USE_TB: gl.constexpr, USE_TC: gl.constexpr, USE_TE: gl.constexpr, WANT_TA: gl.constexpr,
):  # fmt: skip
    slot = 0
    phase = 1
    stage = 0
    s_phase = 1
    a_phase = 1
    if has(FEATURES, "persistent"):
        n_tiles = tiles_in_all(call, T, ROW)
        for i in range(gl.program_id(0), end_of_items(call, n_tiles, FEATURES), gl.num_programs(0)):
            slot, phase, stage, s_phase = produce_block(
                i, a_d, c_d, b_d, e_d, ta_d, tc_d, tb_d, te_d, LSE2, MU, DELTA, T_DELTA, a_s, c_s, ta_s, tc_s, ring,
                a_full, a_empty, full, empty, stats, s_full, s_empty, call, selection, slot, phase, stage, s_phase, a_phase,
                T, SLOTS, GROUPS, ROW, THROUGH_SHARED, MASKS, FEATURES, USE_C, USE_W, USE_TA, USE_TB, USE_TC, USE_TE, WANT_TA,
            )  # fmt: skip
            a_phase ^= 1
    else:
        produce_block(
            gl.program_id(0), a_d, c_d, b_d, e_d, ta_d, tc_d, tb_d, te_d, LSE2, MU, DELTA, T_DELTA, a_s, c_s, ta_s, tc_s, ring,
            a_full, a_empty, full, empty, stats, s_full, s_empty, call, selection, slot, phase, stage, s_phase, a_phase,
            T, SLOTS, GROUPS, ROW, THROUGH_SHARED, MASKS, FEATURES, USE_C, USE_W, USE_TA, USE_TB, USE_TC, USE_TE, WANT_TA,
        )  # fmt: skip


@gluon.jit
def consume_block(
    i, i_w: gl.constexpr, a_s, c_s, ta_s, tc_s, ring, a_full, a_empty, full, empty, stats, s_full, s_empty, turn,
    LSE2, MU, DELTA, T_DELTA, results, scale, call, selection, b_slot, b_phase, stage, s_phase, tick, a_phase,
    D: gl.constexpr, C: gl.constexpr, T: gl.constexpr, SLOTS: gl.constexpr, GROUPS: gl.constexpr, ROW: gl.constexpr,
    THROUGH_SHARED: gl.constexpr, TURNS: gl.constexpr, FEATURES: gl.constexpr,
    RAGGED: gl.constexpr, MASKS: gl.constexpr,
    USE_C: gl.constexpr, USE_W: gl.constexpr, USE_TA: gl.constexpr,
    USE_TB: gl.constexpr, USE_TC: gl.constexpr, USE_TE: gl.constexpr,
    WANT_A: gl.constexpr, WANT_C: gl.constexpr, WANT_TA: gl.constexpr, WANT_TC: gl.constexpr,
):  # fmt: skip
    s_l: gl.constexpr = product_layout(T)
    p_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=s_l, k_width=2)
    x_l: gl.constexpr = gl.SliceLayout(1 if ROW else 0, s_l)
    BLOCKS: gl.constexpr = 2 if USE_TB or USE_TE else 1
    PADDED_A: gl.constexpr = has(FEATURES, "query_lengths" if ROW else "key_lengths")
    PADDED_B: gl.constexpr = has(FEATURES, "key_lengths" if ROW else "query_lengths")
    # so many products of each kind are in flight when another is waited for
    N_TS: gl.constexpr = parts(C) if USE_TA else 0
    N_P: gl.constexpr = parts(C) * ((1 if WANT_C else 0) + (1 if WANT_TC and USE_TE else 0))
    N_DS: gl.constexpr = parts(C) * ((1 if WANT_A else 0) + (1 if WANT_TA and USE_TB else 0))
    N_PW: gl.constexpr = parts(C) if WANT_TC and USE_W else 0
    dtype: gl.constexpr = a_s.dtype
    HQ, GROUP, LQ, LK = call[1], call[2], call[3], call[4]
    HA = HQ if ROW else HQ // GROUP
    LA = LQ if ROW else LK
    LB = LK if ROW else LQ
    work, i_block, i_b, i_a, i_stream, group, query_end, key_end, bounds = own(
        i, call, selection, GROUPS, T, ROW, FEATURES
    )  # fmt: skip
    a_start = i_block * (GROUPS * GROUP_ROWS) + GROUP_ROWS * i_w
    b_da = sums(C)
    b_dc = sums(C)
    b_tda = sums(C)
    b_tdc = sums(C)
    zero = gl.zeros([GROUP_ROWS, T], gl.float32, s_l)
    zeros = gl.zeros([GROUP_ROWS, 2 * T], gl.float32, product_layout(2 * T))
    if ROW:
        o_a = a_start + gl.arange(0, GROUP_ROWS, layout=x_l)
        x = (i_b * HA + i_a).to(gl.int64) * LA + o_a
        lse2 = row_statistic(LSE2, x, o_a < LA, float("inf"))
        delta = row_statistic(DELTA, x, o_a < LA, 0.0)
        if USE_W:
            mu = row_statistic(MU, x, o_a < LA, 0.0)
        if WANT_TA:
            t_delta = row_statistic(T_DELTA, x, o_a < LA, 0.0)
    per_scale = 1 / scale
    end_a = query_end if ROW else key_end
    end_b = key_end if ROW else query_end
    mbarrier.wait(a_full.index(i_w), a_phase)
    for MASKED in gl.static_range(2):
        if not MASKED or MASKS:
            for i_g in range(group):
                x_g = (i_b * HQ + i_stream + i_g).to(gl.int64) * LB
                i_h = i_a if ROW else i_stream + i_g
                tiles_of = visits_of_head(
                    i_g, group, work, i_h, i_block, i_b, bounds, call, selection, GROUPS, T, ROW, THROUGH_SHARED, MASKS, FEATURES
                )  # fmt: skip
                sight = selected(selection, i_b, i_h, HQ, GROUP, LQ, LK, query_end, key_end, call[5], call[6], FEATURES)
                for t in range(tiles_of[2 * MASKED], tiles_of[2 * MASKED + 1]):
                    j = tile_at(t, tiles_of, MASKED, FEATURES)
                    # an index that the compiler cannot fold: else it keeps every resident descriptor in registers
                    z = i_w + (tick >> 30)
                    a = matrix(a_s, z, GROUP_ROWS, D)
                    e_slot, e_phase = advance(b_slot, b_phase, SLOTS)
                    bb = matrix(ring, b_slot, BLOCKS * T, D)
                    ee = matrix(ring, e_slot, BLOCKS * T, D)
                    b = bb.slice(0, T, 0)
                    e = ee.slice(0, T, 0)
                    tb = bb.slice(T, T, 0) if USE_TB else b
                    te = ee.slice(T, T, 0) if USE_TE else e
                    if MASKED and PADDED_B:
                        mbarrier.wait(full.index(b_slot), b_phase)
                        clean(b, j * T, end_b, T, D)
                        mbarrier.wait(full.index(e_slot), e_phase)
                        clean(e, j * T, end_b, T, D)
                        if USE_TB:
                            clean(tb, j * T, end_b, T, D)
                        if USE_TE:
                            clean(te, j * T, end_b, T, D)

                    if not ROW and not THROUGH_SHARED:
                        lse2 = column(LSE2 + x_g, j * T, end_b, float("inf"), T, RAGGED or PADDED_B, x_l)
                    mbarrier.wait(full.index(b_slot), b_phase)
                    if TURNS:
                        mbarrier.wait(turn.index(i_w), tick & 1)
                    if USE_TB:
                        b_s = score_product(a, bb, zeros, False, C)  # [64, 2 T]
                    else:
                        b_s = score_product(a, b, zero, False, C)  # [64, T]
                    mbarrier.wait(full.index(e_slot), e_phase)
                    if USE_C:
                        c = matrix(c_s, z, GROUP_ROWS, D)
                        if USE_TE and WANT_TA:
                            b_dp = score_product(c, ee, zeros, False, C)
                        else:
                            b_dp = score_product(c, e, zero, False, C)
                    if TURNS:
                        mbarrier.arrive(turn.index((i_w + 1) % GROUPS), count=1)
                    if THROUGH_SHARED:
                        mbarrier.wait(s_full.index(stage), s_phase)
                        lse2 = staged_column(stats, 4 * stage, x_l)
                    seen = looked_up(a_start, j * T, sight, T, ROW, MASKED, FEATURES, s_l)
                    b_s = warpgroup_mma_wait(parts(C) if USE_C else 0, deps=[b_s])
                    b_ts = zero
                    if USE_TB:
                        b_s, b_ts = halves(b_s)
                    b_s = hide(b_s, seen, a_start, j * T, sight, T, ROW, MASKED, FEATURES, s_l)
                    b_p = gl.exp2(b_s * (scale * LOG2E) - lse2)
                    if N_P > 0:
                        p = gl.convert_layout(b_p.to(dtype), p_l)
                    if USE_W:
                        if THROUGH_SHARED:
                            mu = staged_column(stats, 4 * stage + 1, x_l)
                        b_ts -= mu * per_scale
                    if USE_TA:
                        b_ts = score_product(matrix(ta_s, z, GROUP_ROWS, D), b, b_ts, True, C)
                    if WANT_C:
                        b_dc = accumulated(p, e, b_dc, C)
                    if WANT_TC and USE_TE:
                        b_tdc = accumulated(p, te, b_tdc, C)

                    if USE_C:
                        if THROUGH_SHARED:
                            delta = staged_column(stats, 4 * stage + 2, x_l)
                        elif not ROW:
                            delta = column(DELTA + x_g, j * T, end_b, 0.0, T, RAGGED or PADDED_B, x_l)
                        b_dp = warpgroup_mma_wait(N_TS + N_P, deps=[b_dp])
                        b_tdp = zero
                        if WANT_TA and USE_TE:
                            b_dp, b_tdp = halves(b_dp)
                        b_dp -= delta
                        if N_DS > 0:
                            ds = gl.convert_layout((b_p * b_dp).to(dtype), p_l)
                        if WANT_TA and USE_TB:
                            b_tda = accumulated(ds, tb, b_tda, C)
                        if WANT_A:
                            b_da = accumulated(ds, b, b_da, C)
                    if USE_TA:
                        b_ts = warpgroup_mma_wait(N_P + N_DS, deps=[b_ts])
                    if USE_W:
                        b_w = b_ts * scale
                    if WANT_TA:
                        if THROUGH_SHARED:
                            t_delta = staged_column(stats, 4 * stage + 3, x_l)
                        b_tdp -= t_delta
                        if USE_W:
                            b_tdp += b_dp * b_w
                        if USE_TC:
                            b_tdp = score_product(matrix(tc_s, z, GROUP_ROWS, D), e, b_tdp, True, C)
                    if N_PW > 0:
                        pw = gl.convert_layout((b_p * b_w).to(dtype), p_l)
                        b_tdc = accumulated(pw, e, b_tdc, C)
                    if WANT_TA:
                        if USE_TC:
                            b_tdp = warpgroup_mma_wait(N_PW, deps=[b_tdp])
                        tds = gl.convert_layout((b_p * b_tdp).to(dtype), p_l)
                        b_tda = accumulated(tds, b, b_tda, C)

                    if WANT_TA:
                        b_tda, tds = settled(b_tda, tds)
                    if WANT_A:
                        b_da, ds = settled(b_da, ds)
                    elif N_DS > 0:
                        b_tda, ds = settled(b_tda, ds)
                    if WANT_C:
                        b_dc, p = settled(b_dc, p)
                    if WANT_TC and USE_TE:
                        b_tdc, p = settled(b_tdc, p)
                    if N_PW > 0:
                        b_tdc, pw = settled(b_tdc, pw)
                    if THROUGH_SHARED:
                        mbarrier.arrive(s_empty.index(stage), count=1)
                        stage, s_phase = advance(stage, s_phase, STAGES)
                    mbarrier.arrive(empty.index(b_slot), count=1)
                    mbarrier.arrive(empty.index(e_slot), count=1)
                    b_slot, b_phase = advance(e_slot, e_phase, SLOTS)
                    tick += 1
    mbarrier.arrive(a_empty.index(i_w), count=1)

    again = i if D <= 64 else i + (tick >> 30)  # worked out again, where the loop has no registers for it
    work, i_block, i_b, i_a, _, _, _, _, _ = own(again, call, selection, GROUPS, T, ROW, FEATURES)
    a_start = (i_block * GROUPS + i_w) * GROUP_ROWS
    o_a = a_start + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, s_l))
    factor = gl.full([GROUP_ROWS], scale, gl.float32, gl.SliceLayout(1, s_l))
    if PADDED_A:
        b_da = zeroed(b_da, o_a >= end_a)
        b_dc = zeroed(b_dc, o_a >= end_a)
        b_tda = zeroed(b_tda, o_a >= end_a)
        b_tdc = zeroed(b_tdc, o_a >= end_a)
    b_da = scaled(b_da, factor)
    b_tda = scaled(b_tda, factor)
    DA, DC, TDA, TDC, PARTS = results
    place = work[3]
    if place < 0:
        if WANT_A:
            store_rows(DA, i_b, i_a, HA, a_start, LA, b_da, C)
        if WANT_C:
            store_rows(DC, i_b, i_a, HA, a_start, LA, b_dc, C)
        if WANT_TA:
            store_rows(TDA, i_b, i_a, HA, a_start, LA, b_tda, C)
        if WANT_TC:
            store_rows(TDC, i_b, i_a, HA, a_start, LA, b_tdc, C)
    if has(FEATURES, "shared"):
        if place >= 0:
            ROWS: gl.constexpr = GROUPS * GROUP_ROWS
            ALL: gl.constexpr = WANT_A + WANT_C + WANT_TA + WANT_TC
            if WANT_A:
                store_rows_from(part_rows(PARTS, place, 0, i_w, ROWS, ALL, 0, C), C, GROUP_ROWS, b_da, C)
            if WANT_C:
                store_rows_from(part_rows(PARTS, place, WANT_A, i_w, ROWS, ALL, 0, C), C, GROUP_ROWS, b_dc, C)
            if WANT_TA:
                store_rows_from(part_rows(PARTS, place, WANT_A + WANT_C, i_w, ROWS, ALL, 0, C), C, GROUP_ROWS, b_tda, C)
            if WANT_TC:
                store_rows_from(part_rows(PARTS, place, ALL - 1, i_w, ROWS, ALL, 0, C), C, GROUP_ROWS, b_tdc, C)
    return b_slot, b_phase, stage, s_phase, tick


@gluon.jit
def consume(
    i_w: gl.constexpr, a_s, c_s, ta_s, tc_s, ring, a_full, a_empty, full, empty, stats, s_full, s_empty, turn,
    LSE2, MU, DELTA, T_DELTA, results, scale, call, selection,
    D: gl.constexpr, C: gl.constexpr, T: gl.constexpr, SLOTS: gl.constexpr, GROUPS: gl.constexpr, ROW: gl.constexpr,
    THROUGH_SHARED: gl.constexpr, TURNS: gl.constexpr, RAGGED: gl.constexpr,
    MASKS: gl.constexpr, FEATURES: gl.constexpr,
    USE_C: gl.constexpr, USE_W: gl.constexpr,
    USE_TA: gl.constexpr, USE_TB: gl.constexpr, USE_TC: gl.constexpr, USE_TE: gl.constexpr,
    WANT_A: gl.constexpr, WANT_C: gl.constexpr, WANT_TA: gl.constexpr, WANT_TC: gl.constexpr,
):  # fmt: skip
    b_slot = 0
    b_phase = 0
    stage = 0
    s_phase = 0
    tick = 0
    a_phase = 0
    if has(FEATURES, "persistent"):
        n_tiles = tiles_in_all(call, T, ROW)
        for i in range(gl.program_id(0), end_of_items(call, n_tiles, FEATURES), gl.num_programs(0)):
            b_slot, b_phase, stage, s_phase, tick = consume_block(
                i, i_w, a_s, c_s, ta_s, tc_s, ring, a_full, a_empty, full, empty, stats, s_full, s_empty, turn,
                LSE2, MU, DELTA, T_DELTA, results, scale, call, selection,
                b_slot, b_phase, stage, s_phase, tick, a_phase,
                D, C, T, SLOTS, GROUPS, ROW, THROUGH_SHARED, TURNS, FEATURES, RAGGED, MASKS,
                USE_C, USE_W, USE_TA, USE_TB, USE_TC, USE_TE, WANT_A, WANT_C, WANT_TA, WANT_TC,
            )  # fmt: skip
            a_phase ^= 1
    else:
        consume_block(
            gl.program_id(0), i_w, a_s, c_s, ta_s, tc_s, ring, a_full, a_empty, full, empty, stats, s_full, s_empty, turn,
            LSE2, MU, DELTA, T_DELTA, results, scale, call, selection, b_slot, b_phase, stage, s_phase, tick, a_phase,
            D, C, T, SLOTS, GROUPS, ROW, THROUGH_SHARED, TURNS, FEATURES, RAGGED, MASKS,
            USE_C, USE_W, USE_TA, USE_TB, USE_TC, USE_TE, WANT_A, WANT_C, WANT_TA, WANT_TC,
        )  # fmt: skip


@gluon.jit
def backward(
    a_d, c_d, b_d, e_d, ta_d, tc_d, tb_d, te_d,
    MASK, Q_LENGTHS, K_LENGTHS, Q_SEGMENTS, K_SEGMENTS, TILES, LSE2, MU, DELTA, T_DELTA,
    scale, n, HQ, GROUP, LQ, LK, left, right, n_whole,
    DA, DC, TDA, TDC, PARTS,
    D: gl.constexpr, C: gl.constexpr, T: gl.constexpr, SLOTS: gl.constexpr, GROUPS: gl.constexpr, ROW: gl.constexpr,
    TURNS: gl.constexpr, FEATURES: gl.constexpr, RAGGED: gl.constexpr,
    HAS_TA: gl.constexpr, HAS_TB: gl.constexpr, HAS_TC: gl.constexpr, HAS_TE: gl.constexpr,
    WANT_A: gl.constexpr, WANT_C: gl.constexpr, WANT_TA: gl.constexpr, WANT_TC: gl.constexpr,
):  # fmt: skip
    USE_C: gl.constexpr = WANT_A or WANT_TA
    USE_W: gl.constexpr = (HAS_TA or HAS_TB) and (WANT_TA or WANT_TC)
    USE_TA: gl.constexpr = HAS_TA and USE_W
    USE_TB: gl.constexpr = HAS_TB and USE_W
    USE_TC: gl.constexpr = HAS_TC and WANT_TA
    USE_TE: gl.constexpr = HAS_TE and (WANT_TA or WANT_TC)
    MASKS: gl.constexpr = masks(FEATURES, ROW, RAGGED)
    THROUGH_SHARED: gl.constexpr = not ROW and (
        WANT_TA or WANT_TC or GROUPS == 3
    )  # else the few that are needed come straight from memory, if there are registers for them
    if not ROW and not RAGGED:
        LQ = LQ // T * T  # as in portable/backward.py
    call = (n, HQ, GROUP, LQ, LK, left, right, n_whole)
    results = (DA, DC, TDA, TDC, PARTS)
    selection = (MASK, Q_LENGTHS, K_LENGTHS, Q_SEGMENTS, K_SEGMENTS, TILES)

    a_s = tiles(a_d, GROUPS)
    c_s = tiles(c_d, GROUPS) if USE_C else a_s
    ta_s = tiles(ta_d, GROUPS) if USE_TA else a_s
    tc_s = tiles(tc_d, GROUPS) if USE_TC else a_s
    BLOCKS: gl.constexpr = 2 if USE_TB or USE_TE else 1
    PAIRS: gl.constexpr = SLOTS // BLOCKS
    ring = tiles(b_d, PAIRS, BLOCKS)
    a_full = barriers(GROUPS, 1)
    a_empty = barriers(GROUPS, 1)
    full = barriers(PAIRS, 1)
    empty = barriers(PAIRS, GROUPS)
    # none that is not used: its memory would be given to others
    turn = barriers(GROUPS, 1) if TURNS else full
    stats = full
    s_full = full
    s_empty = full
    if THROUGH_SHARED:
        stats = gl.allocate_shared_memory(gl.float32, [4 * STAGES, T], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        s_full = barriers(STAGES, 32)  # every lane of the producer
        s_empty = barriers(STAGES, GROUPS)
    if TURNS:
        mbarrier.arrive(turn.index(0), count=1)
    fence_async_shared()
    if GROUPS == 2:  # the arguments are written out: in a tuple that is put together, constexprs would become tensors
        gl.warp_specialize([
            (consume, (0, a_s, c_s, ta_s, tc_s, ring, a_full, a_empty, full, empty, stats, s_full, s_empty, turn,
                       LSE2, MU, DELTA, T_DELTA, results, scale, call, selection,
                       D, C, T, PAIRS, GROUPS, ROW, THROUGH_SHARED, TURNS, RAGGED,
                       MASKS, FEATURES, USE_C, USE_W, USE_TA, USE_TB, USE_TC, USE_TE,
                       WANT_A, WANT_C, WANT_TA, WANT_TC)),
            (consume, (1, a_s, c_s, ta_s, tc_s, ring, a_full, a_empty, full, empty, stats, s_full, s_empty, turn,
                       LSE2, MU, DELTA, T_DELTA, results, scale, call, selection,
                       D, C, T, PAIRS, GROUPS, ROW, THROUGH_SHARED, TURNS, RAGGED,
                       MASKS, FEATURES, USE_C, USE_W, USE_TA, USE_TB, USE_TC, USE_TE,
                       WANT_A, WANT_C, WANT_TA, WANT_TC)),
            (produce, (a_d, c_d, b_d, e_d, ta_d, tc_d, tb_d, te_d, LSE2, MU, DELTA, T_DELTA,
                       a_s, c_s, ta_s, tc_s, ring, a_full, a_empty, full, empty, stats, s_full, s_empty, call, selection,
                       T, PAIRS, GROUPS, ROW, THROUGH_SHARED, MASKS, FEATURES,
                       USE_C, USE_W, USE_TA, USE_TB, USE_TC, USE_TE, WANT_TA)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (0, a_s, c_s, ta_s, tc_s, ring, a_full, a_empty, full, empty, stats, s_full, s_empty, turn,
                       LSE2, MU, DELTA, T_DELTA, results, scale, call, selection,
                       D, C, T, PAIRS, GROUPS, ROW, THROUGH_SHARED, TURNS, RAGGED,
                       MASKS, FEATURES, USE_C, USE_W, USE_TA, USE_TB, USE_TC, USE_TE,
                       WANT_A, WANT_C, WANT_TA, WANT_TC)),
            (consume, (1, a_s, c_s, ta_s, tc_s, ring, a_full, a_empty, full, empty, stats, s_full, s_empty, turn,
                       LSE2, MU, DELTA, T_DELTA, results, scale, call, selection,
                       D, C, T, PAIRS, GROUPS, ROW, THROUGH_SHARED, TURNS, RAGGED,
                       MASKS, FEATURES, USE_C, USE_W, USE_TA, USE_TB, USE_TC, USE_TE,
                       WANT_A, WANT_C, WANT_TA, WANT_TC)),
            (consume, (2, a_s, c_s, ta_s, tc_s, ring, a_full, a_empty, full, empty, stats, s_full, s_empty, turn,
                       LSE2, MU, DELTA, T_DELTA, results, scale, call, selection,
                       D, C, T, PAIRS, GROUPS, ROW, THROUGH_SHARED, TURNS, RAGGED,
                       MASKS, FEATURES, USE_C, USE_W, USE_TA, USE_TB, USE_TC, USE_TE,
                       WANT_A, WANT_C, WANT_TA, WANT_TC)),
            (produce, (a_d, c_d, b_d, e_d, ta_d, tc_d, tb_d, te_d, LSE2, MU, DELTA, T_DELTA,
                       a_s, c_s, ta_s, tc_s, ring, a_full, a_empty, full, empty, stats, s_full, s_empty, call, selection,
                       T, PAIRS, GROUPS, ROW, THROUGH_SHARED, MASKS, FEATURES,
                       USE_C, USE_W, USE_TA, USE_TB, USE_TC, USE_TE, WANT_TA)),
        ], [4, 4, 1], [160, 160, 24])  # fmt: skip
