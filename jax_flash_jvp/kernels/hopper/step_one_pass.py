"""A tile of the backward in one pass, without tangents, and dQ of one: five products.

(1) s = k qᵀ    (2) p = exp(s − ℓ)    (3) dv += p d_o    (4) dp = v d_oᵀ − δ    (5) ds = p∘dp    (6) dk += ds q    [keys, queries]
(7) dq = dsᵀ k    [queries, keys]
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jax_flash_jvp.kernels.hopper import products, visibility
from jax_flash_jvp.kernels.hopper.adding import row_sums, slot_of, wait_empty
from jax_flash_jvp.kernels.hopper.handover import by_thread
from jax_flash_jvp.kernels.hopper.products import GROUP_ROWS, LOG2E, accumulated, product_layout, settled, unfolded
from jax_flash_jvp.kernels.hopper.ring import clean, give_back, matrix, wait


@gluon.jit
def query_product(i, slot, PART: gl.constexpr, memory, options):
    """dSᵀ K of a tile over all keys of the block, of one part of the columns."""
    l: gl.constexpr = product_layout(products.width(options.C, PART))
    b_dq = gl.zeros([GROUP_ROWS, products.width(options.C, PART)], gl.float32, l)
    for w in gl.static_range(options.GROUPS):
        ds = memory.ds.index(options.GROUPS * slot + w)  # [keys, queries]
        b_dq = warpgroup_mma(
            ds.permute((1, 0)), matrix(memory.k, unfolded(w, i))[PART], b_dq, use_acc=w > 0, is_async=True
        )  # fmt: skip
    return b_dq


@gluon.jit
def make_dq(i, w: gl.constexpr, odd, common, memory, options):
    """(7) of the i-th tile."""
    use = slot_of(i, options.KEPT)
    wait(memory.ds_full, use)
    if options.CORRECTED:
        if common:
            mbarrier.wait(memory.dq_empty.index(w), odd)
            memory.rows.index(0).store(row_sums(use.slot, memory, options))
    b_dq = ()
    for PART in gl.static_range(products.parts(options.C)):
        b_dq = b_dq + (query_product(i, use.slot, PART, memory, options),)
    if products.parts(options.C) == 1:
        b_0 = warpgroup_mma_wait(0, deps=[b_dq[0]])
        b_dq = (b_0,)
    else:
        b_0, b_1 = warpgroup_mma_wait(0, deps=[b_dq[0], b_dq[1]])
        b_dq = (b_0, b_1)
    give_back(memory.ds_empty, use)
    mbarrier.wait(memory.dq_empty.index(w), odd)  # its place is given from one warpgroup to the next
    for PART in gl.static_range(products.parts(options.C)):
        memory.dq[PART].index(0).store(by_thread(b_dq[PART]).reshape([2 * products.width(options.C, PART), 32]))
    fence_async_shared()
    mbarrier.arrive(memory.dq_full.index(0), count=1)


@gluon.jit
def held_rows(buffers, w: gl.constexpr, options):
    """A warpgroup's keys or values in registers, if HELD, or else the shared memory of all of them."""
    if options.HELD:
        return [part.load(products.operand_layout(options.T)) for part in matrix(buffers, w)]
    else:
        return buffers


@gluon.jit
def own_rows(held, w: gl.constexpr, i, options):
    """A warpgroup's, of what `held_rows` returns."""
    if options.HELD:
        return held
    else:
        return matrix(held, unfolded(w, i))


@gluon.jit
def statistic_at(buffer, slot):
    """A statistic of the streamed rows, from shared memory."""
    layout: gl.constexpr = gl.SliceLayout(0, product_layout(buffer.shape[1]))
    return gl.expand_dims(buffer.index(slot).load(layout), 0)


@gluon.jit
def masked_scores(b_s, j, masked, resident_row, sight, options):
    """Scores, −∞ where a key is hidden."""
    if options.RAGGED:  # P of keys that do not exist could be anything, infinite too, and would reach dq
        if resident_row + GROUP_ROWS > sight.key_end:
            o_resident = resident_row + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, product_layout(options.T)))
            b_s = gl.where(gl.expand_dims(o_resident < sight.key_end, 1), b_s, -float("inf"))
    if options.HAS_MASKED:
        if masked:
            b_bits = visibility.bits(resident_row, j * options.T, sight, True, options)
            seen = visibility.loaded_visibility(resident_row, j * options.T, sight, True, options)
            b_s = visibility.masked_scores(b_s, seen, b_bits, resident_row, j * options.T, sight, True, options)
    return b_s


@gluon.jit
def clean_tile(q_tiles, do_tiles, use, j, masked, unseen, sight, memory, options):
    """Zeros past the end of a sequence, and in rows that see nothing: of q, of d_o and of their tangents."""
    if options.FEATURES.query_lengths:
        if masked:
            wait(memory.q_full, use)
            for I in gl.static_range(len(q_tiles)):
                clean(q_tiles[I], j * options.T, sight.query_end)
            wait(memory.do_full, use)
            for I in gl.static_range(len(do_tiles)):
                clean(do_tiles[I], j * options.T, sight.query_end)
    if options.FEATURES.ranges.present:
        if unseen:
            none = visibility.Others(0, 0, 1, sight)
            wait(memory.q_full, use)
            wait(memory.do_full, use)
            visibility.clear_unseen(q_tiles + do_tiles, j * options.T, none, False, options.FEATURES)


@gluon.jit
def step(i, j, masked, unseen, w: gl.constexpr, held, resident_row, sight, ds, sums, memory, scale, options):
    """The sums with the i-th tile's, number j of its head, and ds."""
    DEFERRED: gl.constexpr = options.FEATURES.deferred
    LATE_DP: gl.constexpr = options.FEATURES.late_dp
    N: gl.constexpr = products.parts(options.C)
    dtype: gl.constexpr = memory.ds.dtype
    zero = gl.zeros([GROUP_ROWS, options.T], gl.float32, product_layout(options.T))
    b_dk, b_dv = sums
    resident_row = unfolded(
        resident_row, i
    )  # so that numbers of rows are worked out here, as the loop has no registers for them
    use = slot_of(i, options.SLOTS)
    slot = gl.where(i > 0, slot_of(i + options.SLOTS - 1, options.SLOTS).slot, 0)  # of the tile before
    kept = slot_of(i, options.KEPT)
    q = matrix(memory.q, use.slot)
    do = matrix(memory.do, use.slot)
    clean_tile((q,), (do,), use, j, masked, unseen, sight, memory, options)
    wait(memory.q_full, use)
    if options.TURNS:
        mbarrier.wait(memory.turn.index(w), i & 1)
    if DEFERRED:
        b_dk = accumulated(ds, matrix(memory.q, slot), b_dk)  # (6) of the tile before
    b_s = products.score_product(own_rows(held[0], w, i, options), q, zero, False)  # (1)
    if not LATE_DP:
        wait(memory.do_full, use)
        b_dp = products.score_product(own_rows(held[1], w, i, options), do, zero, False)  # (4)
    if options.TURNS:
        mbarrier.arrive(memory.turn.index((w + 1) % options.GROUPS), count=1)
    if DEFERRED:
        b_dk, ds, b_s = products.settled_before(b_dk, ds, b_s, 0 if LATE_DP else N)
        mbarrier.arrive(memory.q_empty.index(slot), count=1, pred=i > 0)
    else:
        b_s = warpgroup_mma_wait(0 if LATE_DP else N, deps=[b_s])
    lse2 = statistic_at(memory.of_q[0], use.slot)
    b_s = masked_scores(b_s, j, masked, resident_row, sight, options)
    b_p = gl.exp2(b_s * (scale * LOG2E) - lse2)  # (2)
    if LATE_DP:
        wait(memory.do_full, use)
        b_dp = products.score_product(own_rows(held[1], w, i, options), do, zero, False)  # (4)
    p = products.operand(b_p.to(dtype))
    b_dv = accumulated(p, do, b_dv)  # (3)
    b_dp = warpgroup_mma_wait(N, deps=[b_dp])
    delta = statistic_at(memory.of_do[0], use.slot)
    b_ds = (b_p * (b_dp - delta)).to(dtype)  # (5)
    wait_empty(memory.ds_empty, kept)
    memory.ds.index(options.GROUPS * kept.slot + w).store(b_ds)
    ds = products.operand(b_ds)
    fence_async_shared()
    give_back(memory.ds_full, kept)
    if DEFERRED:
        b_dv, p = settled(b_dv, p)
    else:
        b_dk = accumulated(ds, q, b_dk)  # (6)
        b_dk, ds = settled(b_dk, ds)
        b_dv, p = settled(b_dv, p)
        give_back(memory.q_empty, use)
    give_back(memory.do_empty, use)
    return ds, (b_dk, b_dv)


@gluon.jit
def last_product(i, ds, sums, memory, options):
    """The sums with the product (6) of the last of i tiles, where that is issued with the next tile's scores."""
    b_dk, b_dv = sums
    if options.FEATURES.deferred:
        if i > 0:
            b_dk = accumulated(ds, matrix(memory.q, slot_of(i - 1, options.SLOTS).slot), b_dk)
            b_dk, ds = settled(b_dk, ds)
    return b_dk, b_dv
