"""Forward, with its tangent where one is asked for, or the tangent alone.  The formulas are those of `portable/forward.py`.

A block is 64 queries for each of the consumer warpgroups, of which there are GROUPS, two or three; or, as registers hold no more
than 128 columns of both o and ȯ, 64 in all, of whose sums each warpgroup has a part of the columns (SPLIT).  With a tangent, the
products of Ṡ and of P V̇ run while the softmax and P∘Ṡ are computed; without, the next tile's scores are issued before this
tile's P V (FlashAttention-3's order, arXiv:2407.08608).  With TURNS the warpgroups issue their products in turn, each P V and
the next tile's scores (without a tangent, these first, or with 128 channels alone), so that one computes while the others
multiply.  Tiles that every query sees whole come first, then those that need a mask; in short loops all have one (`one_loop`).
"""

from collections import namedtuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from jax_flash_jvp.kernels.hopper import products, programs, ring, visibility
from jax_flash_jvp.kernels.hopper.blocks import block_of, others_of_streamed, visits_of_head
from jax_flash_jvp.kernels.hopper.handover import finish, hand_over, resume
from jax_flash_jvp.kernels.hopper.products import GROUP_ROWS, LOG2E, accumulated, product_layout, settled, unfolded
from jax_flash_jvp.kernels.hopper.programs import Integers
from jax_flash_jvp.kernels.hopper.ring import Cursor, advance, described, matrix, wait
from jax_flash_jvp.kernels.hopper.skeleton import consume_blocks, produce_blocks, run
from jax_flash_jvp.kernels.hopper.visibility import Selection, has_masked_tiles

# constants; HEIGHT is that of a block in rows of a warpgroup; ROW: resident rows are queries, see `blocks.py`
Options = namedtuple(
    "Options", "C T SLOTS GROUPS HEIGHT SPLIT BUFFERS ROW TURNS HAS_MASKED FEATURES HAS_TQ HAS_TK HAS_TV LINEAR"
)
Call = namedtuple("Call", "SAVED results scale ints selection")  # what all warps are given
Arrays = namedtuple("Arrays", "q tq k tk v tv")  # descriptors, of the parts of each
# shared: resident rows, the ring, barriers, numbers of blocks
Memory = namedtuple("Memory", "q tq ring q_full q_empty full empty turn queue")
Results = namedtuple("Results", "O LSE TO MU EXCHANGE")  # the last between programs: fragments of blocks, or a counter


@gluon.jit
def load_queries(arrays, i_b, i_h, row, memory, q_at, options):
    for w in gl.static_range(options.HEIGHT):
        i = q_at.slot * options.HEIGHT + w
        bar = memory.q_full.index(i)
        mbarrier.wait(memory.q_empty.index(i), q_at.phase)
        ring.expect(bar, 2 if options.HAS_TQ else 1, arrays.q)
        ring.load_resident(arrays.q, i_b, i_h, row, bar, memory.q, i, w)
        if options.HAS_TQ:
            ring.load_resident(arrays.tq, i_b, i_h, row, bar, memory.tq, i, w)


@gluon.jit
def load_block(i, ring_at, q_at, arrays, memory, call, options):
    SLOTS: gl.constexpr = options.SLOTS
    block = block_of(i, call.ints, call.selection, options)
    i_b, i_h, q_row = block.i_b, block.i_resident, block.i_block * (options.HEIGHT * GROUP_ROWS)
    visits = visits_of_head(0, block, call.ints, call.selection, options)
    i_k = i_h // call.ints.GROUP
    # one block after the other: behind the first tiles, where there is room for these alone while queries are still needed
    AFTER: gl.constexpr = options.FEATURES.persistent and options.BUFFERS == 1
    if not AFTER:
        load_queries(arrays, i_b, i_h, q_row, memory, q_at, options)
    first = 1
    for MASKED in gl.static_range(2):
        if visibility.has_loop(MASKED, options.HAS_MASKED, options.FEATURES):
            t_first, t_end = visibility.range_of(visits, MASKED)
            for t in range(t_first, t_end):
                row = visibility.tile_at(t, visits, MASKED, options.FEATURES) * options.T
                ring_at = ring.load_tile(
                    arrays.k, arrays.tk, i_b, i_k, row, memory, ring_at, options.T, SLOTS, options.HAS_TK
                )
                ring_at = ring.load_tile(
                    arrays.v, arrays.tv, i_b, i_k, row, memory, ring_at, options.T, SLOTS, options.HAS_TV
                )
                if AFTER:
                    if first == 1:
                        load_queries(arrays, i_b, i_h, q_row, memory, q_at, options)
                    first = 0
    if AFTER and options.FEATURES.dynamic:
        if first == 1:
            load_queries(arrays, i_b, i_h, q_row, memory, q_at, options)
    return ring_at


@gluon.jit
def produce(arrays, memory, call, options):
    produce_blocks(load_block, Cursor(0, 1), call.results.EXCHANGE, arrays, memory, call, options)


@triton.constexpr_function
def is_constant(x):
    return isinstance(x, int | float)


@gluon.jit
def scores(q, tq, kk, next_turn, later, tick, scale, row, k_row, sight, b_bits, MASKED: gl.constexpr, options):
    """q kᵀ [64, T], −∞ where k is hidden, and q k̇ᵀ + q̇ kᵀ, which is still to be waited for, with k̇ below k in kk.  Ends a
    turn, but for the first scores, which come before any (not `later`)."""
    T: gl.constexpr = options.T
    HAS_TQ: gl.constexpr = options.HAS_TQ
    HAS_TK: gl.constexpr = options.HAS_TK
    zero = gl.zeros([GROUP_ROWS, T], gl.float32, product_layout(T))
    PAIRED: gl.constexpr = HAS_TK and options.C > 64  # both products of q in one; at 64 that is slower
    N_TS: gl.constexpr = 0 if PAIRED else products.parts(options.C) * ((1 if HAS_TQ else 0) + (1 if HAS_TK else 0))
    k = ring.rows_from(kk, 0, T)
    b_ts = zero
    if PAIRED:
        zeros = gl.zeros([GROUP_ROWS, 2 * T], gl.float32, product_layout(2 * T))
        b_s = products.score_product(q, kk, zeros, False)
    else:
        b_s = products.score_product(q, k, zero, False)
    if options.TURNS:
        mbarrier.arrive(next_turn, count=1, pred=later)
    if HAS_TQ and not PAIRED:
        b_ts = products.score_product(tq, k, zero, False)
    if HAS_TK and not PAIRED:
        b_ts = products.score_product(q, ring.rows_from(kk, T, T), b_ts, HAS_TQ)
    seen = visibility.loaded_visibility(row, k_row, sight, MASKED, options)
    b_s = warpgroup_mma_wait(N_TS, deps=[b_s])
    if PAIRED:
        b_s, b_ts = products.halves(b_s)
        one = scale * 0 + 1
        if is_constant(scale):  # as jax-triton makes a scale of one
            one = 1 - (tick >> 30)
        b_ts *= one  # sums that no instruction begins are serialised by the assembler
        if HAS_TQ:
            b_ts = products.score_product(tq, k, b_ts, True)
    return visibility.masked_scores(b_s, seen, b_bits, row, k_row, sight, MASKED, options), b_ts


@gluon.jit
def softmax(b_s, b_sm, b_m, b_l, scale, SLACK: gl.constexpr):
    """(p, its sums, what earlier sums are to be multiplied by, maxima in base 2, all sums) with these scores and their maxima.
    Maxima remain where they grow by no more than SLACK, so that p is at most 2 to that power."""
    m_new = gl.maximum(b_m, b_sm * (scale * LOG2E))
    if SLACK > 0:
        m_new = gl.where(m_new - b_m <= SLACK, b_m, m_new)
    b_p = gl.exp2(b_s * (scale * LOG2E) - gl.expand_dims(m_new, 1))
    alpha = gl.exp2(b_m - m_new)
    b_pl = gl.sum(b_p, 1)
    return b_p, b_pl, alpha, m_new, b_l * alpha + b_pl


@gluon.jit
def saved_maxima(row, block, call, LAYOUT: gl.constexpr):
    """In the place of the maxima of rows, and of the logarithms of their sums, ℓ in base 2."""
    o_m = row + gl.arange(0, GROUP_ROWS, layout=LAYOUT)
    LQ, i_bh = call.ints.LQ, block.i_b * call.ints.HQ + block.i_resident
    b_lse = gl.load(call.SAVED + i_bh.to(gl.int64) * LQ + o_m, mask=o_m < LQ, other=-float("inf"))
    return products.log2_sum_exp(b_lse)


@gluon.jit
def end_block(i, w: gl.constexpr, tick, sums, rows, query_end, call, options):
    """Writes what a warpgroup has summed, (o,), (l, m) or (o, ȯ), (l, m, c), or hands it over, if another program ends the
    block.  What block it is, is worked out again, where the loop has no registers for it."""
    EXCHANGE = call.results.EXCHANGE
    again = i if options.C <= 64 and not options.FEATURES.shared else unfolded(i, tick)
    block = block_of(again, call.ints, call.selection, options)
    row = (block.i_block * options.HEIGHT + w % options.HEIGHT) * GROUP_ROWS
    if options.FEATURES.shared:
        sums, rows = finish(EXCHANGE, block.work, w, sums, rows, False, options)
    if block.work.handed_over:
        if options.FEATURES.shared:
            hand_over(EXCHANGE, programs.in_wave(call.ints, options.FEATURES), w, sums, rows, options)
    else:
        if len(sums) == 2:
            write_dual(block, row, w, sums, rows, query_end, call, options)
        else:
            write_plain(block, row, sums[0], rows, query_end, call, options)


@gluon.jit
def write_dual(block, row, w: gl.constexpr, both, rows, query_end, call, options):
    FIRST: gl.constexpr = w if options.SPLIT else 0  # part of the columns
    r_l: gl.constexpr = gl.SliceLayout(1, product_layout(options.T))
    i_b, i_h, HQ, LQ = block.i_b, block.i_resident, call.ints.HQ, call.ints.LQ
    b_o, b_to = both
    b_l, b_m, b_c = rows
    if options.LINEAR:
        nothing = b_m == float("inf")
    else:
        nothing = (b_l == 0.0) | (row + gl.arange(0, GROUP_ROWS, layout=r_l) >= query_end)  # and padding
        b_l = gl.where(nothing, 1.0, b_l)
        b_o = products.scaled(b_o, 1.0 / b_l)
        b_to = products.scaled(b_to, 1.0 / b_l)
        b_lse = (b_m + gl.log2(b_l)) * products.LN2
        if options.FEATURES.empty_rows:
            b_o = products.zeroed(b_o, nothing)
            b_lse = gl.where(nothing, -float("inf"), b_lse)
    if options.FEATURES.empty_rows:
        b_to = products.zeroed(b_to, nothing)
        b_c = gl.where(nothing, 0.0, b_c)
    if not options.LINEAR:
        products.store_rows(call.results.O, i_b, i_h, HQ, row, LQ, b_o, options.C, FIRST)
    products.store_rows(call.results.TO, i_b, i_h, HQ, row, LQ, b_to, options.C, FIRST)
    if FIRST == 0:
        if not options.LINEAR:
            products.store_statistics(call.results.LSE, i_b * HQ + i_h, row, LQ, b_lse, r_l)
        products.store_statistics(call.results.MU, i_b * HQ + i_h, row, LQ, b_c, r_l)


@gluon.jit
def write_plain(block, row, b_o, rows, query_end, call, options):
    r_l: gl.constexpr = gl.SliceLayout(1, product_layout(options.T))
    i_b, i_h, HQ, LQ = block.i_b, block.i_resident, call.ints.HQ, call.ints.LQ
    b_l, b_m = rows
    b_lse = (b_m + gl.log2(b_l)) * products.LN2
    if options.FEATURES.empty_rows:
        b_l = gl.where(b_l == 0.0, 1.0, b_l)
    b_o = products.scaled(b_o, 1.0 / b_l)
    if options.FEATURES.empty_rows:
        nothing = (b_lse == -float("inf")) | (row + gl.arange(0, GROUP_ROWS, layout=r_l) >= query_end)
        b_lse = gl.where(nothing, -float("inf"), b_lse)
        b_o = products.zeroed(b_o, nothing)
    products.store_rows(call.results.O, i_b, i_h, HQ, row, LQ, b_o, options.C)
    products.store_statistics(call.results.LSE, i_b * HQ + i_h, row, LQ, b_lse, r_l)


@gluon.jit
def consume_dual(i, w: gl.constexpr, k_at, tick, own_queries, block, row, sight, visits, memory, call, options):
    """If LINEAR, the tangent alone: P comes from the saved ℓ, so nothing is rescaled."""
    C: gl.constexpr = options.C
    T: gl.constexpr = options.T
    FEATURES: gl.constexpr = options.FEATURES
    full, empty, turn = memory.full, memory.empty, memory.turn
    r_l: gl.constexpr = gl.SliceLayout(1, product_layout(T))
    HAS_TS: gl.constexpr = options.HAS_TQ or options.HAS_TK
    HAS_O: gl.constexpr = HAS_TS or not options.LINEAR
    SLACK: gl.constexpr = 8 if memory.q[0].dtype == gl.bfloat16 else 0  # float16 has no room above P∘Ṡ
    next_turn = turn.index((w + 1) % options.GROUPS)
    first_tick = tick
    last_tick = tick + visits.plain_end - visits.plain_first + visits.masked_end - visits.masked_first - 1
    if options.LINEAR:
        b_m = saved_maxima(row, block, call, r_l)
    else:
        b_m = gl.full([GROUP_ROWS], products.LOWEST, gl.float32, r_l)
    b_l = gl.zeros([GROUP_ROWS], gl.float32, r_l)
    b_c = gl.zeros([GROUP_ROWS], gl.float32, r_l)
    b_o, b_to = products.own_sums(w, options), products.own_sums(w, options)
    if FEATURES.shared:
        both, rows = resume(call.results.EXCHANGE, block.work, w, (b_o, b_to), (b_l, b_m, b_c), options)
        b_o, b_to = both
        b_l, b_m, b_c = rows
    for MASKED in gl.static_range(2):
        if visibility.has_loop(MASKED, options.HAS_MASKED, FEATURES):
            t_first, t_end = visibility.range_of(visits, MASKED)
            upcoming = visibility.first_tile(visits, MASKED, FEATURES)
            for t in range(t_first, t_end):
                j, upcoming = visibility.next_tile(t, upcoming, visits, MASKED, FEATURES)
                b_bits = visibility.bits(row, j * T, sight, MASKED, options)
                q = matrix(memory.q, unfolded(own_queries, tick))
                v_at = advance(k_at, options.SLOTS)
                kk = matrix(memory.ring, k_at.slot)
                vv = products.own_columns(matrix(memory.ring, v_at.slot), w, options.SPLIT)
                v, tv = ring.rows_from(vv, 0, T), ring.rows_from(vv, T, T) if options.HAS_TV else vv

                wait(full, k_at)
                if HAS_TS and MASKED and FEATURES.ranges.present:
                    if t >= visits.which.unseen_first:
                        keys = (ring.rows_from(kk, 0, T),) + ((ring.rows_from(kk, T, T),) if options.HAS_TK else ())
                        visibility.clear_unseen(keys, j * T, others_of_streamed(row, sight, options), True, FEATURES)
                tq = matrix(memory.tq, unfolded(own_queries, tick))
                later = tick > first_tick
                b_s, b_ts = scores(
                    q, tq, kk, next_turn, later, tick, call.scale, row, j * T, sight, b_bits, MASKED, options
                )
                if options.LINEAR:
                    b_p = gl.exp2(b_s * (call.scale * LOG2E) - gl.expand_dims(b_m, 1))
                    b_pl = gl.sum(b_p, 1)
                    b_l += b_pl
                else:
                    b_p, b_pl, alpha, b_m, b_l = softmax(
                        b_s, products.row_max(b_s) if C > 64 else gl.max(b_s, 1), b_m, b_l, call.scale, SLACK
                    )
                    b_o = products.rescaled(b_o, alpha)
                    b_to = products.rescaled(b_to, alpha)
                p = products.operand(b_p.to(memory.q[0].dtype))
                per_l = 1.0 / gl.where(b_l == 0.0, 1.0, b_l)
                if HAS_TS:
                    b_ts = warpgroup_mma_wait(0, deps=[b_ts])
                    if MASKED and FEATURES.key_lengths:
                        b_ts = visibility.zero_columns_from(b_ts, sight.key_end - j * T, options)
                ring.give_back(empty, k_at)
                if FEATURES.persistent:
                    mbarrier.arrive(memory.q_empty.index(own_queries), count=1, pred=tick == last_tick)
                # as `recentered` in `portable/scores.py`, by differences alone: 16 bits show no more; what is added, as the
                # compiler would negate all of o to subtract
                if HAS_TS:
                    back = (b_c * b_pl - products.row_dot(b_p, b_ts) * call.scale) * per_l
                    b_c -= back
                    b_to = products.increased(b_to, back, b_o)
                wait(full, v_at)
                if MASKED and FEATURES.key_lengths:
                    ring.clean(v, j * T, sight.key_end)
                if MASKED and FEATURES.ranges.present:
                    if t >= visits.which.unseen_first:
                        values = (v, tv) if options.HAS_TV else (v,)
                        visibility.clear_unseen(values, j * T, others_of_streamed(row, sight, options), True, FEATURES)
                if options.TURNS:
                    mbarrier.wait(turn.index(w), tick & 1)
                if HAS_O:
                    b_o = accumulated(p, v, b_o)
                if options.HAS_TV:
                    if MASKED and FEATURES.key_lengths:
                        ring.clean(tv, j * T, sight.key_end)
                    b_to = accumulated(p, tv, b_to)
                if HAS_TS:  # behind the products just issued
                    b_pt = b_p * (b_ts * call.scale - gl.expand_dims(b_c, 1))
                    pt = products.operand(b_pt.to(memory.q[0].dtype))
                    b_to = accumulated(pt, v, b_to)
                    b_to, pt = settled(b_to, pt)
                if HAS_O:
                    b_o, p = settled(b_o, p)
                if not HAS_TS:
                    b_to, p = settled(b_to, p)
                ring.give_back(empty, v_at)
                k_at = advance(v_at, options.SLOTS)
                tick += 1

    if options.TURNS:
        mbarrier.arrive(next_turn, count=1, pred=tick > first_tick)
    if FEATURES.dynamic:
        mbarrier.arrive(memory.q_empty.index(own_queries), count=1, pred=tick == first_tick)
    end_block(i, w, tick, (b_o, b_to), (b_l, b_m, b_c), sight.query_end, call, options)
    return k_at, tick


@gluon.jit
def consume_plain(i, w: gl.constexpr, k_at, tick, own_queries, block, row, sight, visits, memory, call, options):
    T: gl.constexpr = options.T
    FEATURES: gl.constexpr = options.FEATURES
    SCORES_ALONE: gl.constexpr = options.C > 96  # in a turn, without P V
    slots, full, empty, turn = memory.ring, memory.full, memory.empty, memory.turn
    r_l: gl.constexpr = gl.SliceLayout(1, product_layout(T))
    b_m = gl.full([GROUP_ROWS], products.LOWEST, gl.float32, r_l)
    b_l = gl.zeros([GROUP_ROWS], gl.float32, r_l)
    b_o = products.sums(options.C)
    if FEATURES.shared:
        one, rows = resume(call.results.EXCHANGE, block.work, w, (b_o,), (b_l, b_m), options)
        b_o = one[0]
        b_l, b_m = rows
    zero = gl.zeros([GROUP_ROWS, T], gl.float32, product_layout(T))
    for MASKED in gl.static_range(2):
        t_first, t_end = visibility.range_of(visits, MASKED)
        # P is handed from one tile to the next but not from one loop to the other
        if visibility.has_loop(MASKED, options.HAS_MASKED, FEATURES) and t_first < t_end:
            # for this loop alone: what both use, the assembler of Triton 3.6 may work out before the first and then pass over
            q = matrix(memory.q, unfolded(own_queries, tick) if options.BUFFERS > 1 else own_queries)
            upcoming = visibility.first_tile(visits, MASKED, FEATURES)
            j, upcoming = visibility.next_tile(t_first, upcoming, visits, MASKED, FEATURES)
            b_bits = visibility.bits(row, j * T, sight, MASKED, options)
            wait(full, k_at)
            k = matrix(slots, k_at.slot)
            b_s = products.score_product(q, k, zero, False)
            seen = visibility.loaded_visibility(row, j * T, sight, MASKED, options)
            b_s = warpgroup_mma_wait(0, deps=[b_s])
            ring.give_back(empty, k_at)
            b_s = visibility.masked_scores(b_s, seen, b_bits, row, j * T, sight, MASKED, options)
            b_p, _, alpha, b_m, b_l = softmax(b_s, gl.max(b_s, 1), b_m, b_l, call.scale, 0)
            b_o = products.scaled(b_o, alpha)
            pairs = products.packed(b_p, memory.q[0].dtype)
            v_at = advance(k_at, options.SLOTS)
            for t in range(t_first + 1, t_end):
                v_row = j * T
                j, upcoming = visibility.next_tile(t, upcoming, visits, MASKED, FEATURES)
                b_bits = visibility.bits(row, j * T, sight, MASKED, options)
                k_at = advance(v_at, options.SLOTS)
                wait(full, k_at)
                if options.TURNS:
                    mbarrier.wait(turn.index(w), tick & 1)
                k = matrix(slots, k_at.slot)
                b_s = products.score_product(q, k, zero, False)
                if options.TURNS and SCORES_ALONE:
                    mbarrier.arrive(turn.index((w + 1) % options.GROUPS), count=1)
                wait(full, v_at)
                v = matrix(slots, v_at.slot)
                if MASKED and FEATURES.key_lengths:
                    ring.clean(v, v_row, sight.key_end)
                if MASKED and FEATURES.ranges.present:
                    if t > visits.which.unseen_first:
                        visibility.clear_unseen((v,), v_row, others_of_streamed(row, sight, options), True, FEATURES)
                p = products.unpacked(pairs, memory.q[0].dtype, products.operand_layout(T))
                b_o = accumulated(p, v, b_o)
                if options.TURNS and not SCORES_ALONE:
                    mbarrier.arrive(turn.index((w + 1) % options.GROUPS), count=1)
                seen = visibility.loaded_visibility(row, j * T, sight, MASKED, options)
                b_s = warpgroup_mma_wait(products.parts(options.C), deps=[b_s])
                ring.give_back(empty, k_at)
                b_s = visibility.masked_scores(b_s, seen, b_bits, row, j * T, sight, MASKED, options)
                b_p, _, alpha, b_m, b_l = softmax(b_s, gl.max(b_s, 1), b_m, b_l, call.scale, 0)
                b_o, p = settled(b_o, p)
                ring.give_back(empty, v_at)
                pairs = products.packed(b_p, memory.q[0].dtype)
                b_o = products.scaled(b_o, alpha)
                v_at = advance(k_at, options.SLOTS)
                tick += 1
            wait(full, v_at)
            v = matrix(slots, v_at.slot)
            if MASKED and FEATURES.key_lengths:
                ring.clean(v, j * T, sight.key_end)
            if MASKED and FEATURES.ranges.present:
                if t_end > visits.which.unseen_first:
                    visibility.clear_unseen((v,), j * T, others_of_streamed(row, sight, options), True, FEATURES)
            p = products.unpacked(pairs, memory.q[0].dtype, products.operand_layout(T))
            b_o = accumulated(p, v, b_o)
            b_o, p = settled(b_o, p)
            ring.give_back(empty, v_at)
            k_at = advance(v_at, options.SLOTS)
    mbarrier.arrive(memory.q_empty.index(own_queries), count=1)
    end_block(i, w, tick, (b_o,), (b_l, b_m), sight.query_end, call, options)
    return k_at, tick


@gluon.jit
def compute_block(i, w: gl.constexpr, state, q_at, memory, call, options):
    ring_at, tick = state
    block = block_of(i, call.ints, call.selection, options)
    q_row = block.i_block * (options.HEIGHT * GROUP_ROWS)
    visits = visits_of_head(0, block, call.ints, call.selection, options)
    sight = visibility.selected(block, block.i_resident, call, options)
    row = q_row + GROUP_ROWS * (w % options.HEIGHT)
    own_queries = q_at.slot * options.HEIGHT + w % options.HEIGHT
    mbarrier.wait(memory.q_full.index(own_queries), q_at.phase)
    consumer: gl.constexpr = consume_dual if options.HAS_TQ or options.HAS_TK or options.HAS_TV else consume_plain
    return consumer(i, w, ring_at, tick, own_queries, block, row, sight, visits, memory, call, options)


@gluon.jit
def consume(w: gl.constexpr, memory, call, options):
    consume_blocks(w, compute_block, (Cursor(0, 0), 0), memory, call, options)


@gluon.jit
def program(arrays, call, options):
    """Its shared memory, its warps."""
    TURNS: gl.constexpr = options.TURNS
    RESIDENT: gl.constexpr = options.HEIGHT * options.BUFFERS
    q_s = ring.tiles(arrays.q, RESIDENT)
    tq_s = ring.tiles(arrays.q, RESIDENT) if options.HAS_TQ else q_s
    ring_s = ring.tiles(arrays.k, options.SLOTS, 2 if options.HAS_TK or options.HAS_TV else 1)
    q_full = ring.barriers(RESIDENT, 1)
    q_empty = ring.barriers(RESIDENT, options.GROUPS // options.HEIGHT)
    full = ring.barriers(options.SLOTS, 1)
    empty = ring.barriers(options.SLOTS, options.GROUPS)
    turn = ring.barriers(options.GROUPS, 1) if TURNS else full  # an unused barrier's memory would be given to others
    if TURNS:
        mbarrier.arrive(turn.index(0), count=1)
    fence_async_shared()
    numbers = programs.queue(options.GROUPS) if options.FEATURES.dynamic else full
    memory = Memory(q_s, tq_s, ring_s, q_full, q_empty, full, empty, turn, numbers)
    run(consume, produce, None, arrays, memory, call, options)


@gluon.jit(do_not_specialize_on_alignment=Integers._fields)
def forward(
    q_d, k_d, v_d, tq_d, tk_d, tv_d, q_r, k_r, v_r, tq_r, tk_r, tv_r,
    MASK, BLOCKS, Q_LENGTHS, K_LENGTHS, Q_SEGMENTS, K_SEGMENTS, RANGES, TILES, SAVED,
    scale, n, HQ, GROUP, LQ, LK, left, right, n_whole, shared_tiles, concurrent,
    of_blocks, of_heads, of_tiles, of_shared_tiles, of_together, of_rest,
    O, LSE, TO, MU, EXCHANGE,
    C: gl.constexpr, T: gl.constexpr, SLOTS: gl.constexpr, GROUPS: gl.constexpr, HEIGHT: gl.constexpr,
    TURNS: gl.constexpr, FEATURES: gl.constexpr, RAGGED: gl.constexpr,
    HAS_TQ: gl.constexpr, HAS_TK: gl.constexpr, HAS_TV: gl.constexpr, LINEAR: gl.constexpr,
):  # fmt: skip
    PAIRS: gl.constexpr = SLOTS // (2 if HAS_TK or HAS_TV else 1)
    BUFFERS: gl.constexpr = ring.resident_buffers((2 if HAS_TQ else 1) * HEIGHT * GROUP_ROWS, SLOTS * T, C, FEATURES)
    LQ, LK = programs.aligned(LQ, LK, FEATURES)
    program(
        Arrays(
            described(q_d, q_r), described(tq_d, tq_r), described(k_d, k_r), described(tk_d, tk_r), described(v_d, v_r),
            described(tv_d, tv_r),
        ),
        Call(
            SAVED, Results(O, LSE, TO, MU, EXCHANGE), scale,
            Integers(
                n, HQ, GROUP, LQ, LK, left, right, n_whole, shared_tiles, concurrent,
                of_blocks, of_heads, of_tiles, of_shared_tiles, of_together, of_rest,
            ),
            Selection(MASK, BLOCKS, Q_LENGTHS, K_LENGTHS, Q_SEGMENTS, K_SEGMENTS, RANGES, TILES),
        ),
        Options(
            C, T, PAIRS, GROUPS, HEIGHT, HEIGHT < GROUPS, BUFFERS, True, TURNS, has_masked_tiles(FEATURES, True, RAGGED),
            FEATURES, HAS_TQ, HAS_TK, HAS_TV, LINEAR,
        ),
    )  # fmt: skip
