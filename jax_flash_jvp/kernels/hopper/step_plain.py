"""A tile of the backward without tangents.  Formulas of README.md, as of the key side (`steps.py`):

(1) s = k qᵀ    (2) p = exp(s − ℓ)    (3) dv += p d_o    (4) dp = v d_oᵀ − δ    (5) ds = p∘dp    (6) dk += ds q
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from jax_flash_jvp.kernels.hopper import products, steps
from jax_flash_jvp.kernels.hopper.products import GROUP_ROWS, accumulated, product_layout, settled
from jax_flash_jvp.kernels.hopper.ring import matrix, wait
from jax_flash_jvp.kernels.hopper.visibility import loaded_visibility


@gluon.jit
def step(tile, row_stats, sums, ds, w: gl.constexpr, memory, scale, MASKED: gl.constexpr, options):
    """The sums with this tile's, and ds, whose product (6) is issued with the next tile's scores if DEFERRED."""
    N_S: gl.constexpr = products.parts(options.C)  # products of scores, in flight
    N_P: gl.constexpr = len(sums.dv) * options.WANT_V  # of p
    dtype: gl.constexpr = memory.k_like[0].dtype
    zero = gl.zeros([GROUP_ROWS, options.T], gl.float32, product_layout(options.T))
    b_dk, b_dv, b_tdk, b_tdv, b_r, b_tr = sums
    steps.clean_tile(tile, memory, MASKED, options)
    wait(memory.full, tile.q_at)
    steps.await_turn(w, tile, memory, options)
    if options.DEFERRED:  # (6) of the tile before
        slot = steps.slot_of_tile_before(tile, options)
        b_dk = accumulated(ds, steps.columns_of(slot, w, memory, options), b_dk)
    b_s = products.score_product(tile.k_like, tile.q_like, zero, False)  # (1)
    if not options.LATE_DP:
        wait(memory.full, tile.do_at)
        if options.WANT_K:
            b_dp = products.score_product(matrix(memory.v_like, tile.resident), tile.do_like, zero, False)  # (4)
    steps.end_turn(w, memory, options)
    if not options.ROW:
        wait(memory.s_full, tile.s_at)
    lse2 = steps.statistic(row_stats.lse2, steps.LSE2, tile, memory, options)
    seen = loaded_visibility(tile.resident_row, tile.j * options.T, tile.sight, MASKED, options)
    if options.DEFERRED:
        b_dk, ds, b_s = products.settled_before(b_dk, ds, b_s, 0 if options.LATE_DP else N_S)
        mbarrier.arrive(memory.empty.index(slot), count=1, pred=tile.t > tile.t_first)
    else:
        b_s = warpgroup_mma_wait(N_S if options.WANT_K and not options.LATE_DP else 0, deps=[b_s])
    b_p = steps.probabilities(b_s, lse2, seen, tile, scale, MASKED, options)  # (2)
    if options.WANT_V:
        p = products.operand(b_p.to(dtype))
    if options.LATE_DP:  # where this has the registers of the softmax
        wait(memory.full, tile.do_at)
        b_dp = products.score_product(matrix(memory.v_like, tile.resident), tile.do_like, zero, False)  # (4)
    if options.WANT_V:
        b_dv = accumulated(p, products.own_columns(tile.do_like, w, options.SPLIT), b_dv)  # (3)
    if options.WANT_K:
        delta = steps.statistic(row_stats.delta, steps.DELTA, tile, memory, options)
        b_dp = warpgroup_mma_wait(N_P, deps=[b_dp])
        b_ds = products.packed(b_p * (b_dp - delta), dtype)  # (5)
        ds = products.unpacked(b_ds, dtype, products.operand_layout(options.T))
        if not options.DEFERRED:
            b_dk = accumulated(ds, products.own_columns(tile.q_like, w, options.SPLIT), b_dk)  # (6)
            b_dk, ds = settled(b_dk, ds)
    if options.WANT_V:
        b_dv, p = settled(b_dv, p)
    if options.SUM_DS:
        b_r = steps.with_row_sums(b_r, b_ds, row_stats, tile, dtype)
    ring_at, s_at = steps.give_back_tile(tile, memory, options)
    return steps.Sums(b_dk, b_dv, b_tdk, b_tdv, b_r, b_tr), ds, ring_at, s_at
