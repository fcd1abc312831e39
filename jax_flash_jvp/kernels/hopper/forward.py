"""Forward, with its tangent where one is asked for, or the tangent alone.  The formulas are those of `portable/forward.py`.

A block is 64 queries for each of the consumer warpgroups, of which there are GROUPS, two or three.  With a tangent, the
products of Ṡ and of P V̇ run while the softmax and P∘Ṡ are computed; without, the next tile's scores are issued before this
tile's P V (FlashAttention-3's order, arXiv:2407.08608).  With TURNS the warpgroups issue their products in turn, each from P V
to the next tile's scores, so that one computes while the others multiply.  Tiles that every query sees whole come first, then
those that need a mask.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from jax_flash_jvp.kernels.hopper.pipeline import (
    GROUP_ROWS,
    LN2,
    LOG2E,
    LOWEST,
    accumulated,
    advance,
    barriers,
    clean,
    end_of_items,
    halves,
    hide,
    increased,
    item,
    key_bounds,
    load_resident,
    load_tile,
    looked_up,
    masks,
    matrix,
    own_block,
    part_rows,
    part_statistic,
    parts,
    product_layout,
    reach,
    rescaled,
    row_dot,
    scaled,
    score_product,
    selected,
    settled,
    store_rows,
    store_rows_from,
    store_statistics,
    sums,
    tile_at,
    tiles,
    until,
    visits,
    within,
    zeroed,
)
from jax_flash_jvp.kernels.portable.scores import has


@gluon.jit
def queries_of(i, call, ROWS: gl.constexpr, BN: gl.constexpr, FEATURES: gl.constexpr):
    """(batch entry, query head, number of the block of queries, first and end of its tiles, place of results) of an `item`."""
    n, HQ, LQ, LK = call[0], call[1], call[3], call[4]
    block, first, end, place = item(i, call, gl.cdiv(LK, BN), FEATURES)
    i_m, i_bh = own_block(block, n, gl.cdiv(LQ, ROWS), True, FEATURES)
    return i_bh // HQ, i_bh % HQ, i_m, first, end, place


@gluon.jit
def own(i, call, selection, ROWS: gl.constexpr, BN: gl.constexpr, MASKS: gl.constexpr, FEATURES: gl.constexpr):
    """(batch entry, query head, first query, what is seen, tiles to visit) of an `item`."""
    _, HQ, GROUP, LQ, LK, left, right, _ = call
    n_m = gl.cdiv(LQ, ROWS)
    i_b, i_h, i_m, first_tile, end_tile, _ = queries_of(i, call, ROWS, BN, FEATURES)
    q_row = i_m * ROWS
    query_end, key_end = reach(i_b, LQ, LK, selection[1], selection[2], FEATURES)
    start, first, whole, stop = key_bounds(q_row, ROWS, key_end, left, right, FEATURES)
    if has(FEATURES, "query_lengths"):
        if q_row >= query_end:
            stop = 0
    bounds = (start, first, whole, stop)
    tiles_of = visits(selection, i_b, i_h, HQ, GROUP, i_m, n_m, gl.cdiv(LK, BN), bounds, BN, MASKS, FEATURES)
    if has(FEATURES, "shared"):
        tiles_of = within(tiles_of, first_tile, end_tile, 0, 1, False)
    sight = selected(selection, i_b, i_h, HQ, GROUP, LQ, LK, query_end, key_end, left, right, FEATURES)
    return i_b, i_h, q_row, sight, tiles_of


@gluon.jit
def load_queries(
    q_d, tq_d, i_b, i_h, row, q_s, tq_s, q_full, q_empty, phase, GROUPS: gl.constexpr, HAS_TQ: gl.constexpr
):
    for w in gl.static_range(GROUPS):
        bar = q_full.index(w)
        mbarrier.wait(q_empty.index(w), phase)
        mbarrier.expect(bar, (2 if HAS_TQ else 1) * q_d.block_type.nbytes)
        load_resident(q_d, i_b, i_h, row, bar, q_s, w)
        if HAS_TQ:
            load_resident(tq_d, i_b, i_h, row, bar, tq_s, w)


@gluon.jit
def produce_block(
    i, q_d, tq_d, k_d, tk_d, v_d, tv_d, q_s, tq_s, ring, q_full, q_empty, full, empty, call, selection, slot, phase,
    q_phase,
    BN: gl.constexpr, SLOTS: gl.constexpr, GROUPS: gl.constexpr, MASKS: gl.constexpr, FEATURES: gl.constexpr,
    HAS_TQ: gl.constexpr, HAS_TK: gl.constexpr, HAS_TV: gl.constexpr,
):  # fmt: skip
    i_b, i_h, q_row, _, tiles_of = own(i, call, selection, GROUPS * GROUP_ROWS, BN, MASKS, FEATURES)
    i_k = i_h // call[2]
    # one block after the other: behind the first tiles, for which there is room while queries are still needed
    AFTER: gl.constexpr = has(FEATURES, "persistent")
    if not AFTER:
        load_queries(q_d, tq_d, i_b, i_h, q_row, q_s, tq_s, q_full, q_empty, q_phase, GROUPS, HAS_TQ)
    first = 1
    for MASKED in gl.static_range(2):
        if not MASKED or MASKS:
            for t in range(tiles_of[2 * MASKED], tiles_of[2 * MASKED + 1]):
                row = tile_at(t, tiles_of, MASKED, FEATURES) * BN
                slot, phase = load_tile(k_d, tk_d, i_b, i_k, row, ring, full, empty, slot, phase, BN, SLOTS, HAS_TK)
                slot, phase = load_tile(v_d, tv_d, i_b, i_k, row, ring, full, empty, slot, phase, BN, SLOTS, HAS_TV)
                if AFTER:
                    if first == 1:
                        load_queries(q_d, tq_d, i_b, i_h, q_row, q_s, tq_s, q_full, q_empty, q_phase, GROUPS, HAS_TQ)
                    first = 0
    return slot, phase


@gluon.jit
def produce(
    q_d, tq_d, k_d, tk_d, v_d, tv_d, q_s, tq_s, ring, q_full, q_empty, full, empty, call, selection,
    BN: gl.constexpr, SLOTS: gl.constexpr, GROUPS: gl.constexpr, MASKS: gl.constexpr, FEATURES: gl.constexpr,
    HAS_TQ: gl.constexpr, HAS_TK: gl.constexpr, HAS_TV: gl.constexpr,
):  # fmt: skip
    slot = 0
    phase = 1
    q_phase = 1
    if has(FEATURES, "persistent"):
        n_tiles = gl.cdiv(call[4], BN)
        for i in range(gl.program_id(0), end_of_items(call, n_tiles, FEATURES), gl.num_programs(0)):
            slot, phase = produce_block(
                i, q_d, tq_d, k_d, tk_d, v_d, tv_d, q_s, tq_s, ring, q_full, q_empty, full, empty, call, selection,
                slot, phase, q_phase, BN, SLOTS, GROUPS, MASKS, FEATURES, HAS_TQ, HAS_TK, HAS_TV,
            )  # fmt: skip
            q_phase ^= 1
    else:
        produce_block(
            gl.program_id(0), q_d, tq_d, k_d, tk_d, v_d, tv_d, q_s, tq_s, ring, q_full, q_empty, full, empty, call, selection,
            slot, phase, q_phase, BN, SLOTS, GROUPS, MASKS, FEATURES, HAS_TQ, HAS_TK, HAS_TV,
        )  # fmt: skip


@gluon.jit
def scores(
    q, tq, kk, next_turn, later, scale, row, k_row, sight, C: gl.constexpr, D: gl.constexpr, BN: gl.constexpr,
    TURNS: gl.constexpr, MASKED: gl.constexpr, FEATURES: gl.constexpr, HAS_TQ: gl.constexpr, HAS_TK: gl.constexpr,
):  # fmt: skip
    """q kᵀ [64, BN], −∞ where k is hidden, and q k̇ᵀ + q̇ kᵀ, which is still to be waited for, with k̇ below k in kk.  Ends a
    turn, but for the first scores, which come before any (not `later`)."""
    zero = gl.zeros([GROUP_ROWS, BN], gl.float32, product_layout(BN))
    PAIRED: gl.constexpr = HAS_TK and D > 64  # both products of q in one; at 64 that is slower
    N_TS: gl.constexpr = 0 if PAIRED else parts(C) * ((1 if HAS_TQ else 0) + (1 if HAS_TK else 0))
    k = kk.slice(0, BN, 0)
    b_ts = zero
    if PAIRED:
        zeros = gl.zeros([GROUP_ROWS, 2 * BN], gl.float32, product_layout(2 * BN))
        b_s = score_product(q, kk, zeros, False, C)
    else:
        b_s = score_product(q, k, zero, False, C)
        if HAS_TQ:
            b_ts = score_product(tq, k, zero, False, C)
        if HAS_TK:
            b_ts = score_product(q, kk.slice(BN, BN, 0), b_ts, HAS_TQ, C)
    if TURNS:
        mbarrier.arrive(next_turn, count=1, pred=later)
    s_l: gl.constexpr = product_layout(BN)
    seen = looked_up(row, k_row, sight, BN, True, MASKED, FEATURES, s_l)
    b_s = warpgroup_mma_wait(N_TS, deps=[b_s])
    if PAIRED:
        b_s, b_ts = halves(b_s)
        b_ts *= scale * 0 + 1  # by one: sums that no instruction begins are serialised by the assembler
        if HAS_TQ:
            b_ts = score_product(tq, k, b_ts, True, C)
    return hide(b_s, seen, row, k_row, sight, BN, True, MASKED, FEATURES, s_l), b_ts


@gluon.jit
def softmax(b_s, b_m, b_l, scale, SLACK: gl.constexpr):
    """(p, its sums, what earlier sums are to be multiplied by, maxima in base 2, all sums) with these scores.  Maxima remain
    where they grow by no more than SLACK, so that p is at most 2 to that power."""
    m_new = gl.maximum(b_m, gl.max(b_s, 1) * (scale * LOG2E))
    if SLACK > 0:
        m_new = gl.where(m_new - b_m <= SLACK, b_m, m_new)
    b_p = gl.exp2(b_s * (scale * LOG2E) - gl.expand_dims(m_new, 1))
    alpha = gl.exp2(b_m - m_new)
    b_pl = gl.sum(b_p, 1)
    return b_p, b_pl, alpha, m_new, b_l * alpha + b_pl


@gluon.jit
def consume_dual(
    w: gl.constexpr, q_s, tq_s, ring, q_empty, full, empty, turn, SAVED, results, scale, call, sight, i, i_b, i_h, row, tiles_of,
    k_slot, k_phase, tick,
    D: gl.constexpr, C: gl.constexpr, BN: gl.constexpr, SLOTS: gl.constexpr, GROUPS: gl.constexpr, TURNS: gl.constexpr,
    MASKS: gl.constexpr, FEATURES: gl.constexpr,
    HAS_TQ: gl.constexpr, HAS_TK: gl.constexpr, HAS_TV: gl.constexpr, LINEAR: gl.constexpr,
):  # fmt: skip
    """If LINEAR, the tangent alone: P comes from the saved ℓ, so nothing is rescaled."""
    HQ, LQ = call[1], call[3]
    s_l: gl.constexpr = product_layout(BN)
    p_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=s_l, k_width=2)
    r_l: gl.constexpr = gl.SliceLayout(1, s_l)
    HAS_TS: gl.constexpr = HAS_TQ or HAS_TK
    HAS_O: gl.constexpr = HAS_TS or not LINEAR
    BLOCKS: gl.constexpr = 2 if HAS_TK or HAS_TV else 1
    SLACK: gl.constexpr = 8 if q_s.dtype == gl.bfloat16 else 0  # float16 has no room above P∘Ṡ
    next_turn = turn.index((w + 1) % GROUPS)
    first_tick = tick
    last_tick = tick + tiles_of[1] - tiles_of[0] + tiles_of[3] - tiles_of[2] - 1
    if LINEAR:
        o_m = row + gl.arange(0, GROUP_ROWS, layout=r_l)
        b_lse = gl.load(SAVED + (i_b * HQ + i_h).to(gl.int64) * LQ + o_m, mask=o_m < LQ, other=-float("inf"))
        b_m = gl.where(b_lse == -float("inf"), float("inf"), b_lse * LOG2E)
    else:
        b_m = gl.full([GROUP_ROWS], LOWEST, gl.float32, r_l)
    b_l = gl.zeros([GROUP_ROWS], gl.float32, r_l)
    b_c = gl.zeros([GROUP_ROWS], gl.float32, r_l)
    b_o = sums(C)
    b_to = sums(C)
    for MASKED in gl.static_range(2):
        if not MASKED or MASKS:
            for t in range(tiles_of[2 * MASKED], tiles_of[2 * MASKED + 1]):
                j = tile_at(t, tiles_of, MASKED, FEATURES)
                # an index that the compiler cannot fold: else it keeps the descriptors of every resident tile in registers
                q = matrix(q_s, w + (tick >> 30), GROUP_ROWS, D)
                v_slot, v_phase = advance(k_slot, k_phase, SLOTS)
                kk = matrix(ring, k_slot, BLOCKS * BN, D)
                vv = matrix(ring, v_slot, BLOCKS * BN, D)
                v, tv = vv.slice(0, BN, 0), vv.slice(BN, BN, 0) if HAS_TV else vv

                mbarrier.wait(full.index(k_slot), k_phase)
                tq = matrix(tq_s, w + (tick >> 30), GROUP_ROWS, D)
                b_s, b_ts = scores(
                    q, tq, kk, next_turn, tick > first_tick, scale, row, j * BN, sight, C, D, BN, TURNS, MASKED, FEATURES,
                    HAS_TQ, HAS_TK,
                )  # fmt: skip
                if LINEAR:
                    b_p = gl.exp2(b_s * (scale * LOG2E) - gl.expand_dims(b_m, 1))
                    b_pl = gl.sum(b_p, 1)
                    b_l += b_pl
                else:
                    b_p, b_pl, alpha, b_m, b_l = softmax(b_s, b_m, b_l, scale, SLACK)
                    b_o = rescaled(b_o, alpha)
                    b_to = rescaled(b_to, alpha)
                p = gl.convert_layout(b_p.to(q_s.dtype), p_l)
                per_l = 1.0 / gl.where(b_l == 0.0, 1.0, b_l)
                if HAS_TS:
                    b_ts = warpgroup_mma_wait(0, deps=[b_ts])
                    if MASKED and has(FEATURES, "key_lengths"):
                        b_ts = until(b_ts, sight[1] - j * BN, BN, s_l)
                mbarrier.arrive(empty.index(k_slot), count=1)
                if has(FEATURES, "persistent"):
                    mbarrier.arrive(q_empty.index(w), count=1, pred=tick == last_tick)
                # as `recentered` in `portable/scores.py`, by differences alone: 16 bits show no more; what is added, as the
                # compiler would negate all of o to subtract
                if HAS_TS:
                    back = (b_c * b_pl - row_dot(b_p, b_ts) * scale) * per_l
                    b_c -= back
                    b_to = increased(b_to, back, b_o)
                mbarrier.wait(full.index(v_slot), v_phase)
                if MASKED and has(FEATURES, "key_lengths"):
                    clean(v, j * BN, sight[1], BN, D)
                if TURNS:
                    mbarrier.wait(turn.index(w), tick & 1)
                if HAS_O:
                    b_o = accumulated(p, v, b_o, C)
                if HAS_TV:
                    if MASKED and has(FEATURES, "key_lengths"):
                        clean(tv, j * BN, sight[1], BN, D)
                    b_to = accumulated(p, tv, b_to, C)
                if HAS_TS:  # behind the products just issued
                    b_pt = b_p * (b_ts * scale - gl.expand_dims(b_c, 1))
                    pt = gl.convert_layout(b_pt.to(q_s.dtype), p_l)
                    b_to = accumulated(pt, v, b_to, C)
                    b_to, pt = settled(b_to, pt)
                if HAS_O:
                    b_o, p = settled(b_o, p)
                if not HAS_TS:
                    b_to, p = settled(b_to, p)
                mbarrier.arrive(empty.index(v_slot), count=1)
                k_slot, k_phase = advance(v_slot, v_phase, SLOTS)
                tick += 1

    if TURNS:
        mbarrier.arrive(next_turn, count=1, pred=tick > first_tick)
    again = i if D <= 64 else i + (tick >> 30)  # worked out again, where the loop has no registers for it
    i_b, i_h, i_m, _, _, place = queries_of(again, call, GROUPS * GROUP_ROWS, BN, FEATURES)
    row = (i_m * GROUPS + w) * GROUP_ROWS
    if LINEAR:
        nothing = b_m == float("inf")
    else:
        nothing = (b_l == 0.0) | (row + gl.arange(0, GROUP_ROWS, layout=r_l) >= sight[0])  # and padding
        b_l = gl.where(nothing, 1.0, b_l)
        b_o = scaled(b_o, 1.0 / b_l)
        b_to = scaled(b_to, 1.0 / b_l)
        b_lse = (b_m + gl.log2(b_l)) * LN2
        if has(FEATURES, "empty"):
            b_o = zeroed(b_o, nothing)
            b_lse = gl.where(nothing, -float("inf"), b_lse)
    if has(FEATURES, "empty"):
        b_to = zeroed(b_to, nothing)
        b_c = gl.where(nothing, 0.0, b_c)
    O, LSE, TO, MU, PARTS = results
    if place < 0:
        if not LINEAR:
            store_rows(O, i_b, i_h, HQ, row, LQ, b_o, C)
            store_statistics(LSE, i_b * HQ + i_h, row, LQ, b_lse, r_l)
        store_rows(TO, i_b, i_h, HQ, row, LQ, b_to, C)
        store_statistics(MU, i_b * HQ + i_h, row, LQ, b_c, r_l)
    if has(FEATURES, "shared"):
        if place >= 0:
            ROWS: gl.constexpr = GROUPS * GROUP_ROWS
            if HAS_O:
                store_rows_from(part_rows(PARTS, place, 0, w, ROWS, 2, 2, C), C, GROUP_ROWS, b_o, C)
            store_rows_from(part_rows(PARTS, place, 1, w, ROWS, 2, 2, C), C, GROUP_ROWS, b_to, C)
            o_r = gl.arange(0, GROUP_ROWS, layout=r_l)
            gl.store(part_statistic(PARTS, place, 0, w, ROWS, 2, 2, C) + o_r, b_l if LINEAR else b_lse)
            gl.store(part_statistic(PARTS, place, 1, w, ROWS, 2, 2, C) + o_r, b_c)
    return k_slot, k_phase, tick


@gluon.jit
def consume_plain(
    w: gl.constexpr, q_s, ring, q_empty, full, empty, turn, results, scale, call, sight, i, i_b, i_h, row, tiles_of,
    k_slot, k_phase, tick,
    D: gl.constexpr, C: gl.constexpr, BN: gl.constexpr, SLOTS: gl.constexpr, GROUPS: gl.constexpr, TURNS: gl.constexpr,
    MASKS: gl.constexpr, FEATURES: gl.constexpr,
):  # fmt: skip
    HQ, LQ = call[1], call[3]
    s_l: gl.constexpr = product_layout(BN)
    p_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=s_l, k_width=2)
    r_l: gl.constexpr = gl.SliceLayout(1, s_l)
    q = matrix(q_s, w, GROUP_ROWS, D)
    b_m = gl.full([GROUP_ROWS], LOWEST, gl.float32, r_l)
    b_l = gl.zeros([GROUP_ROWS], gl.float32, r_l)
    b_o = sums(C)
    zero = gl.zeros([GROUP_ROWS, BN], gl.float32, s_l)
    for MASKED in gl.static_range(2):
        t_first, t_end = tiles_of[2 * MASKED], tiles_of[2 * MASKED + 1]
        # P is handed from one tile to the next but not from one loop to the other, where it would lose its packed registers
        if (not MASKED or MASKS) and t_first < t_end:
            mbarrier.wait(full.index(k_slot), k_phase)
            k = matrix(ring, k_slot, BN, D)
            j = tile_at(t_first, tiles_of, MASKED, FEATURES)
            b_s = score_product(q, k, zero, False, C)
            seen = looked_up(row, j * BN, sight, BN, True, MASKED, FEATURES, s_l)
            b_s = warpgroup_mma_wait(0, deps=[b_s])
            mbarrier.arrive(empty.index(k_slot), count=1)
            b_s = hide(b_s, seen, row, j * BN, sight, BN, True, MASKED, FEATURES, s_l)
            b_p, _, alpha, b_m, b_l = softmax(b_s, b_m, b_l, scale, 0)
            b_o = scaled(b_o, alpha)
            p = gl.convert_layout(b_p.to(q_s.dtype), p_l)
            v_slot, v_phase = advance(k_slot, k_phase, SLOTS)
            for t in range(t_first + 1, t_end):
                v_row = j * BN
                j = tile_at(t, tiles_of, MASKED, FEATURES)
                k_slot, k_phase = advance(v_slot, v_phase, SLOTS)
                mbarrier.wait(full.index(k_slot), k_phase)
                if TURNS:
                    mbarrier.wait(turn.index(w), tick & 1)
                k = matrix(ring, k_slot, BN, D)
                b_s = score_product(q, k, zero, False, C)
                mbarrier.wait(full.index(v_slot), v_phase)
                v = matrix(ring, v_slot, BN, D)
                if MASKED and has(FEATURES, "key_lengths"):
                    clean(v, v_row, sight[1], BN, D)
                b_o = accumulated(p, v, b_o, C)
                if TURNS:
                    mbarrier.arrive(turn.index((w + 1) % GROUPS), count=1)
                seen = looked_up(row, j * BN, sight, BN, True, MASKED, FEATURES, s_l)
                b_s = warpgroup_mma_wait(parts(C), deps=[b_s])
                mbarrier.arrive(empty.index(k_slot), count=1)
                b_s = hide(b_s, seen, row, j * BN, sight, BN, True, MASKED, FEATURES, s_l)
                b_p, _, alpha, b_m, b_l = softmax(b_s, b_m, b_l, scale, 0)
                b_o, p = settled(b_o, p)
                mbarrier.arrive(empty.index(v_slot), count=1)
                p = gl.convert_layout(b_p.to(q_s.dtype), p_l)
                b_o = scaled(b_o, alpha)
                v_slot, v_phase = advance(k_slot, k_phase, SLOTS)
                tick += 1
            mbarrier.wait(full.index(v_slot), v_phase)
            v = matrix(ring, v_slot, BN, D)
            if MASKED and has(FEATURES, "key_lengths"):
                clean(v, j * BN, sight[1], BN, D)
            b_o = accumulated(p, v, b_o, C)
            b_o, p = settled(b_o, p)
            mbarrier.arrive(empty.index(v_slot), count=1)
            k_slot, k_phase = advance(v_slot, v_phase, SLOTS)
    mbarrier.arrive(q_empty.index(w), count=1)
    again = i if D <= 64 else i + (tick >> 30)  # worked out again, where the loop has no registers for it
    i_b, i_h, i_m, _, _, place = queries_of(again, call, GROUPS * GROUP_ROWS, BN, FEATURES)
    row = (i_m * GROUPS + w) * GROUP_ROWS
    b_lse = (b_m + gl.log2(b_l)) * LN2
    if has(FEATURES, "empty") or has(FEATURES, "shared"):
        b_l = gl.where(b_l == 0.0, 1.0, b_l)
    b_o = scaled(b_o, 1.0 / b_l)
    if has(FEATURES, "empty"):
        nothing = (b_lse == -float("inf")) | (row + gl.arange(0, GROUP_ROWS, layout=r_l) >= sight[0])
        b_lse = gl.where(nothing, -float("inf"), b_lse)
        b_o = zeroed(b_o, nothing)
    O, LSE, _, _, PARTS = results
    if place < 0:
        store_rows(O, i_b, i_h, HQ, row, LQ, b_o, C)
        store_statistics(LSE, i_b * HQ + i_h, row, LQ, b_lse, r_l)
    if has(FEATURES, "shared"):
        if place >= 0:
            ROWS: gl.constexpr = GROUPS * GROUP_ROWS
            store_rows_from(part_rows(PARTS, place, 0, w, ROWS, 1, 1, C), C, GROUP_ROWS, b_o, C)
            gl.store(part_statistic(PARTS, place, 0, w, ROWS, 1, 1, C) + gl.arange(0, GROUP_ROWS, layout=r_l), b_lse)
    return k_slot, k_phase, tick


@gluon.jit
def consume_block(
    i, w: gl.constexpr, q_s, tq_s, ring, q_full, q_empty, full, empty, turn, SAVED, results, scale, call, selection,
    k_slot, k_phase, tick, q_phase,
    D: gl.constexpr, C: gl.constexpr, BN: gl.constexpr, SLOTS: gl.constexpr, GROUPS: gl.constexpr, TURNS: gl.constexpr,
    MASKS: gl.constexpr, FEATURES: gl.constexpr,
    HAS_TQ: gl.constexpr, HAS_TK: gl.constexpr, HAS_TV: gl.constexpr, LINEAR: gl.constexpr,
):  # fmt: skip
    i_b, i_h, q_row, sight, tiles_of = own(i, call, selection, GROUPS * GROUP_ROWS, BN, MASKS, FEATURES)
    row = q_row + GROUP_ROWS * w
    mbarrier.wait(q_full.index(w), q_phase)
    if HAS_TQ or HAS_TK or HAS_TV:
        k_slot, k_phase, tick = consume_dual(
            w, q_s, tq_s, ring, q_empty, full, empty, turn, SAVED, results, scale, call, sight, i, i_b, i_h, row, tiles_of,
            k_slot, k_phase, tick,
            D, C, BN, SLOTS, GROUPS, TURNS, MASKS, FEATURES, HAS_TQ, HAS_TK, HAS_TV, LINEAR,
        )  # fmt: skip
    else:
        k_slot, k_phase, tick = consume_plain(
            w, q_s, ring, q_empty, full, empty, turn, results, scale, call, sight, i, i_b, i_h, row, tiles_of,
            k_slot, k_phase, tick, D, C, BN, SLOTS, GROUPS, TURNS, MASKS, FEATURES,
        )  # fmt: skip
    return k_slot, k_phase, tick


@gluon.jit
def consume(
    w: gl.constexpr, q_s, tq_s, ring, q_full, q_empty, full, empty, turn, SAVED, results, scale, call, selection,
    D: gl.constexpr, C: gl.constexpr, BN: gl.constexpr, SLOTS: gl.constexpr, GROUPS: gl.constexpr, TURNS: gl.constexpr,
    MASKS: gl.constexpr, FEATURES: gl.constexpr,
    HAS_TQ: gl.constexpr, HAS_TK: gl.constexpr, HAS_TV: gl.constexpr, LINEAR: gl.constexpr,
):  # fmt: skip
    k_slot = 0
    k_phase = 0
    tick = 0
    q_phase = 0
    if has(FEATURES, "persistent"):
        n_tiles = gl.cdiv(call[4], BN)
        for i in range(gl.program_id(0), end_of_items(call, n_tiles, FEATURES), gl.num_programs(0)):
            k_slot, k_phase, tick = consume_block(
                i, w, q_s, tq_s, ring, q_full, q_empty, full, empty, turn, SAVED, results, scale, call, selection,
                k_slot, k_phase, tick, q_phase,
                D, C, BN, SLOTS, GROUPS, TURNS, MASKS, FEATURES, HAS_TQ, HAS_TK, HAS_TV, LINEAR,
            )  # fmt: skip
            q_phase ^= 1
    else:
        consume_block(
            gl.program_id(0), w, q_s, tq_s, ring, q_full, q_empty, full, empty, turn, SAVED, results, scale, call, selection,
            k_slot, k_phase, tick, q_phase,
            D, C, BN, SLOTS, GROUPS, TURNS, MASKS, FEATURES, HAS_TQ, HAS_TK, HAS_TV, LINEAR,
        )  # fmt: skip


@gluon.jit
def forward(
    q_d, k_d, v_d, tq_d, tk_d, tv_d, MASK, Q_LENGTHS, K_LENGTHS, Q_SEGMENTS, K_SEGMENTS, TILES, SAVED,
    scale, n, HQ, GROUP, LQ, LK, left, right, n_whole,
    O, LSE, TO, MU, PARTS,
    D: gl.constexpr, C: gl.constexpr, BN: gl.constexpr, SLOTS: gl.constexpr, GROUPS: gl.constexpr, TURNS: gl.constexpr,
    FEATURES: gl.constexpr,
    RAGGED: gl.constexpr, HAS_TQ: gl.constexpr, HAS_TK: gl.constexpr, HAS_TV: gl.constexpr, LINEAR: gl.constexpr,
):  # fmt: skip
    """The program: its shared memory, its warps."""
    MASKS: gl.constexpr = masks(FEATURES, True, RAGGED)
    call = (n, HQ, GROUP, LQ, LK, left, right, n_whole)
    results = (O, LSE, TO, MU, PARTS)
    selection = (MASK, Q_LENGTHS, K_LENGTHS, Q_SEGMENTS, K_SEGMENTS, TILES)
    q_s = tiles(q_d, GROUPS)
    tq_s = tiles(q_d, GROUPS) if HAS_TQ else q_s
    BLOCKS: gl.constexpr = 2 if HAS_TK or HAS_TV else 1
    PAIRS: gl.constexpr = SLOTS // BLOCKS
    ring = tiles(k_d, PAIRS, BLOCKS)
    q_full = barriers(GROUPS, 1)
    q_empty = barriers(GROUPS, 1)
    full = barriers(PAIRS, 1)
    empty = barriers(PAIRS, GROUPS)
    turn = barriers(GROUPS, 1) if TURNS else full  # an unused barrier's memory would be given to others
    if TURNS:
        mbarrier.arrive(turn.index(0), count=1)
    fence_async_shared()
    if GROUPS == 2:  # the arguments are written out: in a tuple that is put together, constexprs would become tensors
        gl.warp_specialize([
            (consume, (0, q_s, tq_s, ring, q_full, q_empty, full, empty, turn, SAVED, results, scale, call, selection,
                       D, C, BN, PAIRS, GROUPS, TURNS, MASKS, FEATURES,
                       HAS_TQ, HAS_TK, HAS_TV, LINEAR)),
            (consume, (1, q_s, tq_s, ring, q_full, q_empty, full, empty, turn, SAVED, results, scale, call, selection,
                       D, C, BN, PAIRS, GROUPS, TURNS, MASKS, FEATURES,
                       HAS_TQ, HAS_TK, HAS_TV, LINEAR)),
            (produce, (q_d, tq_d, k_d, tk_d, v_d, tv_d, q_s, tq_s, ring, q_full, q_empty, full, empty, call, selection,
                       BN, PAIRS, GROUPS, MASKS, FEATURES, HAS_TQ, HAS_TK, HAS_TV)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (0, q_s, tq_s, ring, q_full, q_empty, full, empty, turn, SAVED, results, scale, call, selection,
                       D, C, BN, PAIRS, GROUPS, TURNS, MASKS, FEATURES,
                       HAS_TQ, HAS_TK, HAS_TV, LINEAR)),
            (consume, (1, q_s, tq_s, ring, q_full, q_empty, full, empty, turn, SAVED, results, scale, call, selection,
                       D, C, BN, PAIRS, GROUPS, TURNS, MASKS, FEATURES,
                       HAS_TQ, HAS_TK, HAS_TV, LINEAR)),
            (consume, (2, q_s, tq_s, ring, q_full, q_empty, full, empty, turn, SAVED, results, scale, call, selection,
                       D, C, BN, PAIRS, GROUPS, TURNS, MASKS, FEATURES,
                       HAS_TQ, HAS_TK, HAS_TV, LINEAR)),
            (produce, (q_d, tq_d, k_d, tk_d, v_d, tv_d, q_s, tq_s, ring, q_full, q_empty, full, empty, call, selection,
                       BN, PAIRS, GROUPS, MASKS, FEATURES, HAS_TQ, HAS_TK, HAS_TV)),
        ], [4, 4, 1], [160, 160, 24])  # fmt: skip
