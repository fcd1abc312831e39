"""The dual backward in one pass over the scores, up to 64 channels: fifteen products, not the twenty-one of the two sides.

As `one_pass.py`, with tangents.  A block is 64 keys for each of two consumer warpgroups, and streams q and d_o of its query
heads, each with its tangent below it, in tiles of T queries; formulas of dk, dv and their tangents as in `backward.py`, and

    dqᵀ = kᵀ ds    ḋqᵀ = kᵀ ḋs + k̇ᵀ ds    [channels, queries]

Channels in the place of rows: a product has 64 of these, and no more than 32 queries at a time leave registers for four sums.
In shared memory dS of a tile is beside ḋS, so that one product has kᵀ ds and kᵀ ḋs.

Rows of dS and of ḋS are corrected as in `one_pass.py`: dQ' = dQ − e k̄ and ḋQ' = ḋQ − ė k̄ − e k̄̇.
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jax_flash_jvp.kernels.hopper.blocks import block_of, visits_of_head
from jax_flash_jvp.kernels.hopper.one_pass import (
    COMMON_KEYS,
    ODD,
    ONES,
    TILE,
    add,
    at,
    is_masked,
    own_queries,
    row_products,
    row_sums,
    store_zeros,
    tile_of,
    tile_range,
    tiles_of_queries,
    wait_empty,
)
from jax_flash_jvp.kernels.hopper.products import (
    GROUP_ROWS,
    LOG2E,
    accumulated,
    excess_of,
    halves,
    log2_sum_exp,
    mean_at,
    product_layout,
    scaled,
    score_product,
    settled,
    settled_before,
    store_rows,
    sums,
    without_mean,
    zeroed,
)
from jax_flash_jvp.kernels.hopper.programs import Integers, aligned, by_thread, stored
from jax_flash_jvp.kernels.hopper.ring import (
    async_load,
    barriers,
    clean,
    expect,
    give_back,
    load,
    load_resident,
    matrix,
    row_layout,
    rows_from,
    tiles,
    wait,
)
from jax_flash_jvp.kernels.hopper.visibility import Selection, bits, has_masked_tiles, hide, looked_up, selected

STREAMED = gl.constexpr(32)  # queries of a tile
COLUMNS = gl.constexpr(64)  # channels of one, with those that TMA fills up
GROUPS = gl.constexpr(2)  # as registers hold four sums of 64 rows
FLOATS = gl.constexpr(4 * 32)  # rows of 32 floats that TMA adds at a time
# constants as in `one_pass.py`
Options = namedtuple("Options", "C T SLOTS KEPT GROUPS HEIGHT ROW LAG FEATURES HAS_MASKED CORRECTED RAGGED ORDERED")
# descriptors, of rows with channels as in `ring.py`
Arrays = namedtuple("Arrays", "q k v do tq tk tv tdo lse2 mu delta t_delta dq rows")
# shared, and the barriers of each
Memory = namedtuple(
    "Memory",
    "k v tk tv q do lse2 mu delta t_delta ds dq ones rows "
    "k_full v_full cleaned q_full q_empty do_full do_empty ds_full ds_empty dq_full dq_empty",
)
Results = namedtuple("Results", "DK DV TDK TDV")


# ------------------------------------------------------------------------------------------------ the warps that load and add


@gluon.jit
def load_keys(x, tx, place, bar, buffers, t_buffers, options):
    """The block's rows of keys or of values, with their tangents."""
    GROUPS: gl.constexpr = options.GROUPS
    i_b, i_a, row = place
    expect(bar, 2 * GROUPS, x)
    for w in gl.static_range(GROUPS):
        load_resident(x, i_b, i_a, row, bar, buffers, w, w)
        load_resident(tx, i_b, i_a, row, bar, t_buffers, w, w)


@gluon.jit
def load_streamed(x, tx, y, ty, place, use, buffers, y_buffer, ty_buffer, full, empty):
    """A tile of rows and of their tangents, and two statistics."""
    T: gl.constexpr = STREAMED
    i_b, i_h, row, of_statistics = place
    bar = full.index(use.slot)
    wait_empty(empty, use)
    expect(bar, 2, x, 2 * y.block_type.nbytes)
    load(x, i_b, i_h, row, bar, buffers, use.slot, 0, T)
    load(tx, i_b, i_h, row, bar, buffers, use.slot, T, T)
    async_load(y, [of_statistics], bar, y_buffer.index(use.slot))
    async_load(ty, [of_statistics], bar, ty_buffer.index(use.slot))


@gluon.jit
def produce(arrays, memory, ints, selection, options):
    T: gl.constexpr = STREAMED
    block = block_of(gl.program_id(0), ints, selection, options)
    i_b = block.i_b
    n_tiles = tiles_of_queries(ints.LQ, options)
    of_keys = (i_b, block.i_a, block.i_block * (options.GROUPS * GROUP_ROWS))
    load_keys(arrays.k, arrays.tk, of_keys, memory.k_full.index(0), memory.k, memory.tk, options)
    i = 0
    for i_g in range(block.group):
        i_h = block.i_stream + i_g
        visits = visits_of_head(i_g, block, ints, selection, options)
        low, high = tile_range(visits, options)
        for t in range(low, high):
            j = tile_of(t, visits, options)
            use = at(i, options.SLOTS)
            place = (i_b, i_h, j * T, ((i_b * ints.HQ + i_h) * n_tiles + j) * T)
            load_streamed(
                arrays.q, arrays.tq, arrays.lse2, arrays.mu, place, use,
                memory.q, memory.lse2, memory.mu, memory.q_full, memory.q_empty,
            )  # fmt: skip
            if i == 0:  # v is of no use before q is there
                load_keys(arrays.v, arrays.tv, of_keys, memory.v_full.index(0), memory.v, memory.tv, options)
            load_streamed(
                arrays.do, arrays.tdo, arrays.delta, arrays.t_delta, place, use,
                memory.do, memory.delta, memory.t_delta, memory.do_full, memory.do_empty,
            )  # fmt: skip
            i += 1
    if i == 0:
        load_keys(arrays.v, arrays.tv, of_keys, memory.v_full.index(0), memory.v, memory.tv, options)


# ------------------------------------------------------------------------------------------------ the warpgroups that multiply


@gluon.jit
def clean_resident(w: gl.constexpr, n, memory):
    """Zeros for a warpgroup's rows from the n-th on, which may hold anything: all make dq of them."""
    clean(matrix(memory.k, w), 0, n)
    clean(matrix(memory.v, w), 0, n)
    clean(matrix(memory.tk, w), 0, n)
    clean(matrix(memory.tv, w), 0, n)
    fence_async_shared()
    mbarrier.arrive(memory.cleaned.index(0), count=1)
    mbarrier.wait(memory.cleaned.index(0), 0)


@gluon.jit
def key_product(i, slot, keys, N: gl.constexpr, memory, options):
    """xᵀ ds, of keys or their tangents x and the first N columns of a place of dS and ḋS, over all keys of the block."""
    GROUPS: gl.constexpr = options.GROUPS
    b_x = gl.zeros([COLUMNS, N], gl.float32, product_layout(N))
    for w in gl.static_range(GROUPS):
        x = matrix(keys, w + (i >> 30))[0].permute((1, 0))
        ds = memory.ds.index(GROUPS * slot + w).slice(0, N, 1)
        b_x = warpgroup_mma(x, ds, b_x, use_acc=w > 0, is_async=True)
    return b_x


@gluon.jit
def make_dq(i, w: gl.constexpr, odd, common, memory, options):
    """And ḋq, of the i-th tile."""
    use = at(i, options.KEPT)
    wait(memory.ds_full, use)
    T: gl.constexpr = STREAMED
    if options.CORRECTED:
        if common:
            mbarrier.wait(memory.dq_empty.index(w), odd)
            memory.rows.index(0).store(row_sums(use.slot, memory, options))  # of dS, then of ḋS
    b_dq = key_product(i, use.slot, memory.k, 2 * T, memory, options)
    b_more = key_product(i, use.slot, memory.tk, T, memory, options)
    b_dq = warpgroup_mma_wait(options.GROUPS, deps=[b_dq])
    b_dq, b_tdq = halves(b_dq)
    mbarrier.wait(memory.dq_empty.index(w), odd)  # its place is given from one warpgroup to the next
    memory.dq[0].index(0).slice(0, 2 * T, 0).store(by_thread(b_dq).reshape([2 * T, 32]))
    b_more = warpgroup_mma_wait(0, deps=[b_more])
    give_back(memory.ds_empty, use)
    memory.dq[0].index(0).slice(2 * T, 2 * T, 0).store(by_thread(b_tdq + b_more).reshape([2 * T, 32]))
    fence_async_shared()
    mbarrier.arrive(memory.dq_full.index(0), count=1)


@gluon.jit
def make_dq_in_turn(i, turn, w: gl.constexpr, memory, options):
    """As in `one_pass.py`."""
    if (turn & (ODD - 1)) == 0:
        make_dq(i - options.LAG, w, (turn & ODD) // ODD, turn >= COMMON_KEYS, memory, options)
        turn = (turn ^ ODD) + options.GROUPS
    return turn - 1


@gluon.jit
def statistic(buffer, slot, LAYOUT: gl.constexpr):
    return gl.expand_dims(buffer.index(slot).load(LAYOUT), 0)


@gluon.jit
def multiply(i, j, masked, w: gl.constexpr, a_start, sight, tds, b_dk, b_dv, b_tdk, b_tdv, memory, scale, options):
    """One tile of queries."""
    T: gl.constexpr = STREAMED
    FEATURES: gl.constexpr = options.FEATURES
    s_l: gl.constexpr = product_layout(T)
    x_l: gl.constexpr = gl.SliceLayout(0, s_l)
    p_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=s_l, k_width=2)
    dtype: gl.constexpr = memory.k[0].dtype
    zeros = gl.zeros([GROUP_ROWS, 2 * T], gl.float32, product_layout(2 * T))
    a_start += i >> 30  # so that numbers of rows are worked out here, as the loop has no registers for them
    z = w + (i >> 30)
    use = at(i, options.SLOTS)
    slot = gl.where(i > 0, at(i + options.SLOTS - 1, options.SLOTS).slot, 0)  # of the tile before
    kept = at(i, options.KEPT)
    q_tq = matrix(memory.q, use.slot)
    do_tdo = matrix(memory.do, use.slot)
    q, tq = rows_from(q_tq, 0, T), rows_from(q_tq, T, T)
    do, tdo = rows_from(do_tdo, 0, T), rows_from(do_tdo, T, T)
    if FEATURES.query_lengths:
        if masked:
            wait(memory.q_full, use)
            clean(q, j * T, sight.query_end)
            clean(tq, j * T, sight.query_end)
            wait(memory.do_full, use)
            clean(do, j * T, sight.query_end)
            clean(tdo, j * T, sight.query_end)
    wait(memory.q_full, use)
    b_tdk = accumulated(tds, rows_from(matrix(memory.q, slot), 0, T), b_tdk)
    b_s = score_product(matrix(memory.k, z), q_tq, zeros, False)
    wait(memory.do_full, use)
    b_dp = score_product(matrix(memory.v, z), do_tdo, zeros, False)
    b_tdk, tds, b_s = settled_before(b_tdk, tds, b_s, 1)
    mbarrier.arrive(memory.q_empty.index(slot), count=1, pred=i > 0)
    b_s, b_ts = halves(b_s)
    lse2 = statistic(memory.lse2, use.slot, x_l)
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
    p = gl.convert_layout(b_p.to(dtype), p_l)
    b_ts -= statistic(memory.mu, use.slot, x_l) * (1 / scale)
    b_ts = score_product(matrix(memory.tk, z), q, b_ts, True)
    b_dv = accumulated(p, do, b_dv)
    b_tdv = accumulated(p, tdo, b_tdv)
    b_dp = warpgroup_mma_wait(3, deps=[b_dp])
    b_dp, b_tdp = halves(b_dp)
    b_dp -= statistic(memory.delta, use.slot, x_l)
    b_ds = (b_p * b_dp).to(dtype)
    ds = gl.convert_layout(b_ds, p_l)
    b_tdk = accumulated(ds, tq, b_tdk)
    b_dk = accumulated(ds, q, b_dk)
    place = memory.ds.index(options.GROUPS * kept.slot + w)
    wait_empty(memory.ds_empty, kept)
    place.slice(0, T, 1).store(b_ds)
    b_ts = warpgroup_mma_wait(4, deps=[b_ts])
    b_w = b_ts * scale
    b_tdp += b_dp * b_w - statistic(memory.t_delta, use.slot, x_l)
    b_tdp = score_product(matrix(memory.tv, z), do, b_tdp, True)
    pw = gl.convert_layout((b_p * b_w).to(dtype), p_l)
    b_tdv = accumulated(pw, do, b_tdv)
    b_tdp = warpgroup_mma_wait(1, deps=[b_tdp])
    b_tds = (b_p * b_tdp).to(dtype)
    place.slice(T, T, 1).store(b_tds)
    tds = gl.convert_layout(b_tds, p_l)
    fence_async_shared()
    give_back(memory.ds_full, kept)
    b_tdk, ds = settled(b_tdk, ds)
    b_dk, ds = settled(b_dk, ds)
    b_dv, p = settled(b_dv, p)
    b_tdv, pw = settled(b_tdv, pw)
    give_back(memory.do_empty, use)
    return tds, b_dk, b_dv, b_tdk, b_tdv


@gluon.jit
def consume(w: gl.constexpr, memory, COMMON, results, scale, ints, selection, options):
    C: gl.constexpr = options.C
    T: gl.constexpr = STREAMED
    GROUPS: gl.constexpr = options.GROUPS
    FEATURES: gl.constexpr = options.FEATURES
    s_l: gl.constexpr = product_layout(T)
    p_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=s_l, k_width=2)
    block = block_of(gl.program_id(0), ints, selection, options)
    i_b, i_a = block.i_b, block.i_a
    HK = ints.HQ // ints.GROUP
    a_start = (block.i_block * GROUPS + w) * GROUP_ROWS
    b_dk, b_dv, b_tdk, b_tdv = sums(C), sums(C), sums(C), sums(C)
    tds = gl.convert_layout(gl.zeros([GROUP_ROWS, T], memory.k[0].dtype, s_l), p_l)
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
            tds, b_dk, b_dv, b_tdk, b_tdv = multiply(
                i, j, masked, w, a_start, sight, tds, b_dk, b_dv, b_tdk, b_tdv, memory, scale, options
            )  # fmt: skip
            turn = make_dq_in_turn(i, turn, w, memory, options)
            i += 1
    if i > 0:
        b_tdk = accumulated(tds, rows_from(matrix(memory.q, at(i - 1, options.SLOTS).slot), 0, T), b_tdk)
        b_tdk, tds = settled(b_tdk, tds)
    for more in range(options.LAG):
        turn = make_dq_in_turn(i + more, turn, w, memory, options)
    # worked out again, as the loop has no registers for it
    block = block_of(gl.program_id(0) + (i >> 30), ints, selection, options)
    i_b, i_a = block.i_b, block.i_a
    a_start = (block.i_block * GROUPS + w) * GROUP_ROWS
    o_a = a_start + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, s_l))
    b_scale = gl.full([GROUP_ROWS], scale, gl.float32, gl.SliceLayout(1, s_l))
    b_dk, b_tdk = scaled(b_dk, b_scale), scaled(b_tdk, b_scale)
    if FEATURES.key_lengths:
        absent = o_a >= block.key_end
        b_dk, b_dv = zeroed(b_dk, absent), zeroed(b_dv, absent)
        b_tdk, b_tdv = zeroed(b_tdk, absent), zeroed(b_tdv, absent)
    store_rows(results.DV, i_b, i_a, HK, a_start, ints.LK, b_dv, C)
    store_rows(results.DK, i_b, i_a, HK, a_start, ints.LK, b_dk, C)
    store_rows(results.TDV, i_b, i_a, HK, a_start, ints.LK, b_tdv, C)
    store_rows(results.TDK, i_b, i_a, HK, a_start, ints.LK, b_tdk, C)


@gluon.jit
def statistics(desc, SLOTS: gl.constexpr):
    return gl.allocate_shared_memory(gl.float32, [SLOTS, STREAMED], desc.layout)


@gluon.jit
def program(arrays, COMMON, COUNTS, results, scale, ints, selection, options):
    """Its shared memory, its warps."""
    T: gl.constexpr = STREAMED
    GROUPS: gl.constexpr = options.GROUPS
    SLOTS: gl.constexpr = options.SLOTS
    dtype: gl.constexpr = arrays.k[0].dtype
    # swizzled in rows of T, so that half of the columns are a tile as well
    ds_l: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    k, tk = tiles(arrays.k, GROUPS), tiles(arrays.k, GROUPS)
    v, tv = tiles(arrays.v, GROUPS), tiles(arrays.v, GROUPS)
    q = tiles(arrays.q, SLOTS, 2)
    do = tiles(arrays.do, SLOTS, 2)
    lse2, mu = statistics(arrays.lse2, SLOTS), statistics(arrays.mu, SLOTS)
    delta, t_delta = statistics(arrays.delta, SLOTS), statistics(arrays.t_delta, SLOTS)
    ds = gl.allocate_shared_memory(dtype, [GROUPS * options.KEPT, GROUP_ROWS, 2 * T], ds_l)
    dq = (gl.allocate_shared_memory(gl.float32, [1, FLOATS, 32], arrays.dq[0].layout),)
    ones = lse2
    rows = lse2
    if options.CORRECTED:
        rows = gl.allocate_shared_memory(gl.float32, [1, 2 * T], arrays.rows.layout)
        ones_l: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * ONES, element_bitwidth=16, rank=2)
        ones = gl.allocate_shared_memory(dtype, [GROUP_ROWS, ONES], ones_l)
        ones.store(gl.full([GROUP_ROWS, ONES], 1.0, dtype, row_layout(ONES)))
    k_full, v_full = barriers(1, 1), barriers(1, 1)
    q_full, q_empty = barriers(SLOTS, 1), barriers(SLOTS, GROUPS)
    do_full, do_empty = barriers(SLOTS, 1), barriers(SLOTS, GROUPS)
    ds_full, ds_empty = barriers(options.KEPT, GROUPS), barriers(options.KEPT, 1)
    dq_full, dq_empty = barriers(1, 1), barriers(GROUPS, 1)
    mbarrier.arrive(dq_empty.index(0), count=1)
    cleaned = k_full
    if options.FEATURES.key_lengths:
        cleaned = barriers(1, GROUPS)
    fence_async_shared()
    memory = Memory(
        k, v, tk, tv, q, do, lse2, mu, delta, t_delta, ds, dq, ones, rows,
        k_full, v_full, cleaned, q_full, q_empty, do_full, do_empty, ds_full, ds_empty, dq_full, dq_empty,
    )  # fmt: skip
    gl.warp_specialize([
        (consume, (0, memory, COMMON, results, scale, ints, selection, options)),
        (consume, (1, memory, COMMON, results, scale, ints, selection, options)),
        (add, (arrays, memory, COMMON, COUNTS, ints, selection, options)),
        (produce, (arrays, memory, ints, selection, options)),
    ], [4, 1, 1], [240, 24, 24])  # fmt: skip


@gluon.jit(do_not_specialize_on_alignment=Integers._fields)
def one_pass_dual(
    q_d, k_d, v_d, do_d, tq_d, tk_d, tv_d, tdo_d, lse2_d, mu_d, delta_d, t_delta_d,
    MASK, BLOCKS, Q_LENGTHS, K_LENGTHS, Q_SEGMENTS, K_SEGMENTS, RANGES, TILES, COMMON,
    scale, n, HQ, GROUP, LQ, LK, left, right, of_blocks, of_heads, of_together, of_rest,
    dq_d, rows_d, COUNTS, DK, DV, TDK, TDV,
    C: gl.constexpr, SLOTS: gl.constexpr, KEPT: gl.constexpr, LAG: gl.constexpr, CORRECTED: gl.constexpr,
    RAGGED: gl.constexpr, ORDERED: gl.constexpr, FEATURES: gl.constexpr,
):  # fmt: skip
    LQ, LK = aligned(LQ, LK, FEATURES)
    program(
        Arrays(
            (q_d,), (k_d,), (v_d,), (do_d,), (tq_d,), (tk_d,), (tv_d,), (tdo_d,), lse2_d, mu_d, delta_d, t_delta_d, (dq_d,),
            rows_d,
        ), COMMON, COUNTS, Results(DK, DV, TDK, TDV), scale,
        Integers(n, HQ, GROUP, LQ, LK, left, right, 0, 0, 0, of_blocks, of_heads, 0, 0, of_together, of_rest),
        Selection(MASK, BLOCKS, Q_LENGTHS, K_LENGTHS, Q_SEGMENTS, K_SEGMENTS, RANGES, TILES),
        Options(
            C, STREAMED, SLOTS, KEPT, GROUPS, GROUPS, False, LAG, FEATURES, has_masked_tiles(FEATURES, False, False),
            CORRECTED, RAGGED, ORDERED,
        ),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ before and after


@gluon.jit(do_not_specialize_on_alignment=Integers._fields)
def prepare_dual(
    O, DO, TO, TDO, LSE, MU, D_LSE, TD_LSE, Q_LENGTHS,
    HQ, LQ,
    LSE2, MU_OUT, DELTA, T_DELTA, DQ, ROWS, COUNTS,
    C: gl.constexpr, HAS_D_LSE: gl.constexpr, HAS_TD_LSE: gl.constexpr, ORDERED: gl.constexpr, FEATURES: gl.constexpr,
):  # fmt: skip
    """Of two tiles of queries ℓ in base 2, μ, δ and δ̇, and zeros to add to and to count with.  Rows past the end see
    nothing."""
    i, i_bh, row = own_queries(LQ)
    i_b, i_h = i_bh // HQ, i_bh % HQ
    x_l: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    end = LQ
    if FEATURES.query_lengths:
        end = gl.minimum(LQ, gl.load(Q_LENGTHS + i_b))
    x = ((i_b.to(gl.int64) * LQ + row) * HQ + i_h) * C
    b_delta = row_products(O + x, DO + x, HQ * C, end - row, C, 0)
    b_t_delta = row_products(O + x, TDO + x, HQ * C, end - row, C, 0)
    b_t_delta += row_products(TO + x, DO + x, HQ * C, end - row, C, 0)
    b_delta, b_t_delta = gl.convert_layout(b_delta, x_l), gl.convert_layout(b_t_delta, x_l)
    o_x = gl.arange(0, TILE, layout=x_l)
    m_x = row + o_x < end
    x = i_bh.to(gl.int64) * LQ + row + o_x
    b_lse = gl.load(LSE + x, mask=m_x, other=-float("inf"))
    if HAS_D_LSE:
        b_delta -= gl.load(D_LSE + x, mask=m_x, other=0.0)
    if HAS_TD_LSE:
        b_t_delta -= gl.load(TD_LSE + x, mask=m_x, other=0.0)
    y = i.to(gl.int64) * TILE
    gl.store(LSE2 + y + o_x, log2_sum_exp(b_lse))
    gl.store(MU_OUT + y + o_x, gl.load(MU + x, mask=m_x, other=0.0))
    gl.store(DELTA + y + o_x, b_delta)
    gl.store(T_DELTA + y + o_x, b_t_delta)
    zeros = gl.zeros([TILE], gl.float32, x_l)
    gl.store(ROWS + 2 * y + o_x, zeros)
    gl.store(ROWS + 2 * y + TILE + o_x, zeros)
    if ORDERED:
        gl.store(COUNTS + 2 * i, 0)
        gl.store(COUNTS + 2 * i + 1, 0)
    store_zeros(DQ + y * (2 * COLUMNS), 2 * COLUMNS)


@gluon.jit(do_not_specialize_on_alignment=Integers._fields)
def scale_queries_dual(
    SUMS, ROWS, LSE2, D_LSE, TD_LSE, KEY_MEAN, T_KEY_MEAN, COMMON,
    scale, HQ, GROUP, LQ,
    D_Q, TD_Q,
    C: gl.constexpr, HAS_D_LSE: gl.constexpr, HAS_TD_LSE: gl.constexpr, CORRECTED: gl.constexpr, FEATURES: gl.constexpr,
):  # fmt: skip
    """dQ and ḋQ of two tiles of queries."""
    i, i_bh, row = own_queries(LQ)
    i_b, i_h = i_bh // HQ, i_bh % HQ
    i_k = i_h // GROUP
    y = i.to(gl.int64) * TILE
    x_l: gl.constexpr = gl.SliceLayout(1, product_layout(COLUMNS))
    o_x = gl.arange(0, TILE, layout=x_l)
    SUMS += y * (2 * COLUMNS)
    T: gl.constexpr = STREAMED
    b_dq, b_tdq = (from_sums(SUMS),), (from_sums(SUMS + T * COLUMNS),)
    if CORRECTED:
        if gl.load(COMMON + i_b * (HQ // GROUP) + i_k):
            lse2 = gl.expand_dims(gl.load(LSE2 + y + o_x), 1)
            x = i_bh.to(gl.int64) * LQ + row + o_x
            m_x = row + o_x < LQ
            # of each of the two sums of dS, then of ḋS
            o_r = 2 * y + o_x // T * (2 * T) + o_x % T
            excess = excess_of(gl.load(ROWS + o_r), lse2, D_LSE, x, m_x, HAS_D_LSE)
            t_excess = excess_of(gl.load(ROWS + o_r + T), lse2, TD_LSE, x, m_x, HAS_TD_LSE)
            ints = Integers(0, HQ, GROUP, LQ, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
            mean = mean_at(i_b, i_h, i_k, row, ints, C, FEATURES)
            b_dq = without_mean(b_dq, excess, KEY_MEAN, mean, C, 0)
            b_tdq = without_mean(b_tdq, excess, T_KEY_MEAN, mean, C, 0)
            b_tdq = without_mean(b_tdq, t_excess, KEY_MEAN, mean, C, 0)
    b_scale = gl.full([TILE], scale, gl.float32, x_l)
    store_rows(D_Q, i_b, i_h, HQ, row, LQ, scaled(b_dq, b_scale), C)
    store_rows(TD_Q, i_b, i_h, HQ, row, LQ, scaled(b_tdq, b_scale), C)


@gluon.jit
def from_sums(SUMS):
    """[queries, channels] of two tiles of dqᵀ, each of which has its ḋqᵀ behind it."""
    like = gl.zeros([COLUMNS, STREAMED], gl.float32, product_layout(STREAMED))
    b_x = gl.join(stored(SUMS, like), stored(SUMS + 2 * STREAMED * COLUMNS, like))
    return gl.convert_layout(b_x.permute((2, 1, 0)).reshape([TILE, COLUMNS]), product_layout(COLUMNS))
