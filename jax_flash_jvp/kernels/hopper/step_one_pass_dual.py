"""A tile of the backward with tangents in one pass, up to 64 channels, and dQ and ḋQ of one: fifteen products.

Formulas (1) to (6') as in `step_dual.py`, each with its tangent below it, and

    (7) dqᵀ = kᵀ ds    (7') ḋqᵀ = kᵀ ḋs + k̇ᵀ ds    [channels, queries]

Channels in the place of rows: a product has 64 of these, and no more than 32 queries at a time leave registers for four sums.
In shared memory dS of a tile is beside ḋS, so that one product has kᵀ ds and kᵀ ḋs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jax_flash_jvp.kernels.hopper import products
from jax_flash_jvp.kernels.hopper.adding import row_sums, slot_of, wait_empty
from jax_flash_jvp.kernels.hopper.handover import by_thread
from jax_flash_jvp.kernels.hopper.products import GROUP_ROWS, LOG2E, accumulated, product_layout, settled, unfolded
from jax_flash_jvp.kernels.hopper.ring import give_back, matrix, rows_from, wait
from jax_flash_jvp.kernels.hopper.step_one_pass import clean_tile, masked_scores, statistic_at

STREAMED = gl.constexpr(32)  # queries of a tile
COLUMNS = gl.constexpr(64)  # channels of one, with those that TMA fills up
FLOATS = gl.constexpr(2 * COLUMNS * STREAMED // 32)  # rows of 32 floats that TMA adds for a tile


@gluon.jit
def key_product(i, slot, keys, N: gl.constexpr, memory, options):
    """xᵀ ds, of keys or their tangents x and the first N columns of a place of dS and ḋS, over all keys of the block."""
    b_x = gl.zeros([COLUMNS, N], gl.float32, product_layout(N))
    for w in gl.static_range(options.GROUPS):
        x = matrix(keys, unfolded(w, i))[0].permute((1, 0))
        ds = memory.ds.index(options.GROUPS * slot + w).slice(0, N, 1)
        b_x = warpgroup_mma(x, ds, b_x, use_acc=w > 0, is_async=True)
    return b_x


@gluon.jit
def make_dq(i, w: gl.constexpr, odd, common, memory, options):
    """(7) and (7') of the i-th tile."""
    use = slot_of(i, options.KEPT)
    wait(memory.ds_full, use)
    T: gl.constexpr = options.T
    if options.CORRECTED:
        if common:
            mbarrier.wait(memory.dq_empty.index(w), odd)
            memory.rows.index(0).store(row_sums(use.slot, memory, options))  # of dS, then of ḋS
    b_dq = key_product(i, use.slot, memory.k, 2 * T, memory, options)
    b_more = key_product(i, use.slot, memory.tk, T, memory, options)
    b_dq = warpgroup_mma_wait(options.GROUPS, deps=[b_dq])
    b_dq, b_tdq = products.halves(b_dq)
    mbarrier.wait(memory.dq_empty.index(w), odd)  # its place is given from one warpgroup to the next
    memory.dq[0].index(0).slice(0, 2 * T, 0).store(by_thread(b_dq).reshape([2 * T, 32]))
    b_more = warpgroup_mma_wait(0, deps=[b_more])
    give_back(memory.ds_empty, use)
    memory.dq[0].index(0).slice(2 * T, 2 * T, 0).store(by_thread(b_tdq + b_more).reshape([2 * T, 32]))
    fence_async_shared()
    mbarrier.arrive(memory.dq_full.index(0), count=1)


@gluon.jit
def step(i, j, masked, unseen, w: gl.constexpr, held, resident_row, sight, tds, sums, memory, scale, options):
    """The sums with the i-th tile's, number j of its head, and ḋs, whose product is issued with the next tile's scores."""
    T: gl.constexpr = options.T
    dtype: gl.constexpr = memory.ds.dtype
    zeros = gl.zeros([GROUP_ROWS, 2 * T], gl.float32, product_layout(2 * T))
    b_dk, b_dv, b_tdk, b_tdv = sums
    resident_row = unfolded(
        resident_row, i
    )  # so that numbers of rows are worked out here, as the loop has no registers for them
    z = unfolded(w, i)
    use = slot_of(i, options.SLOTS)
    slot = gl.where(i > 0, slot_of(i + options.SLOTS - 1, options.SLOTS).slot, 0)  # of the tile before
    kept = slot_of(i, options.KEPT)
    q_tq = matrix(memory.q, use.slot)
    do_tdo = matrix(memory.do, use.slot)
    q, tq = rows_from(q_tq, 0, T), rows_from(q_tq, T, T)
    do, tdo = rows_from(do_tdo, 0, T), rows_from(do_tdo, T, T)
    clean_tile((q, tq), (do, tdo), use, j, masked, unseen, sight, memory, options)
    wait(memory.q_full, use)
    b_tdk = accumulated(tds, rows_from(matrix(memory.q, slot), 0, T), b_tdk)  # (6') of the tile before
    b_s = products.score_product(matrix(memory.k, z), q_tq, zeros, False)  # (1)
    wait(memory.do_full, use)
    b_dp = products.score_product(matrix(memory.v, z), do_tdo, zeros, False)  # (4)
    b_tdk, tds, b_s = products.settled_before(b_tdk, tds, b_s, 1)
    mbarrier.arrive(memory.q_empty.index(slot), count=1, pred=i > 0)
    b_s, b_ts = products.halves(b_s)
    lse2 = statistic_at(memory.of_q[0], use.slot)
    b_s = masked_scores(b_s, j, masked, resident_row, sight, options)
    b_p = gl.exp2(b_s * (scale * LOG2E) - lse2)  # (2)
    p = products.operand(b_p.to(dtype))
    b_ts -= statistic_at(memory.of_q[1], use.slot) * (1 / scale)
    b_ts = products.score_product(matrix(memory.tk, z), q, b_ts, True)  # (1')
    b_dv = accumulated(p, do, b_dv)  # (3)
    b_tdv = accumulated(p, tdo, b_tdv)  # (3')
    b_dp = warpgroup_mma_wait(3, deps=[b_dp])
    b_dp, b_tdp = products.halves(b_dp)
    b_dp -= statistic_at(memory.of_do[0], use.slot)
    b_ds = (b_p * b_dp).to(dtype)  # (5)
    ds = products.operand(b_ds)
    b_tdk = accumulated(ds, tq, b_tdk)  # (6')
    b_dk = accumulated(ds, q, b_dk)  # (6)
    place = memory.ds.index(options.GROUPS * kept.slot + w)
    wait_empty(memory.ds_empty, kept)
    place.slice(0, T, 1).store(b_ds)
    b_ts = warpgroup_mma_wait(4, deps=[b_ts])
    b_w = b_ts * scale
    b_tdp += b_dp * b_w - statistic_at(memory.of_do[1], use.slot)
    b_tdp = products.score_product(matrix(memory.tv, z), do, b_tdp, True)  # (4')
    pw = products.operand((b_p * b_w).to(dtype))
    b_tdv = accumulated(pw, do, b_tdv)  # (3')
    b_tdp = warpgroup_mma_wait(1, deps=[b_tdp])
    b_tds = (b_p * b_tdp).to(dtype)  # (5')
    place.slice(T, T, 1).store(b_tds)
    tds = products.operand(b_tds)
    fence_async_shared()
    give_back(memory.ds_full, kept)
    b_tdk, ds = settled(b_tdk, ds)
    b_dk, ds = settled(b_dk, ds)
    b_dv, p = settled(b_dv, p)
    b_tdv, pw = settled(b_tdv, pw)
    give_back(memory.do_empty, use)
    return tds, (b_dk, b_dv, b_tdk, b_tdv)


@gluon.jit
def last_product(i, tds, sums, memory, options):
    """The sums with the product (6') of the last of i tiles."""
    b_dk, b_dv, b_tdk, b_tdv = sums
    if i > 0:
        b_tdk = accumulated(
            tds, rows_from(matrix(memory.q, slot_of(i - 1, options.SLOTS).slot), 0, options.T), b_tdk
        )  # fmt: skip
        b_tdk, tds = settled(b_tdk, tds)
    return b_dk, b_dv, b_tdk, b_tdv
