"""A tile of the backward without tangents.  Formulas of README.md, with a, b, c and e as in `steps.py`:

(1) s = a bᵀ    (2) p = exp(s − ℓ)    (3) dc += p e    (4) dp = c eᵀ − δ    (5) ds = p∘dp    (6) da += ds b
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from jax_flash_jvp.kernels.hopper import products, steps
from jax_flash_jvp.kernels.hopper.products import GROUP_ROWS, accumulated, product_layout, settled
from jax_flash_jvp.kernels.hopper.ring import matrix, wait
from jax_flash_jvp.kernels.hopper.visibility import loaded_visibility


@gluon.jit
def step(tile, of_rows, sums, ds, w: gl.constexpr, memory, scale, MASKED: gl.constexpr, options):
    """The sums with this tile's, and ds, whose product (6) is issued with the next tile's scores if DEFERRED."""
    N_S: gl.constexpr = products.parts(options.C)  # products of scores, in flight
    N_P: gl.constexpr = len(sums.dc) * options.WANT_C  # of p
    dtype: gl.constexpr = memory.a[0].dtype
    zero = gl.zeros([GROUP_ROWS, options.T], gl.float32, product_layout(options.T))
    b_da, b_dc, b_tda, b_tdc, b_r, b_tr = sums
    steps.clean_tile(tile, memory, MASKED, options)
    wait(memory.full, tile.b_at)
    steps.await_turn(w, tile, memory, options)
    if options.DEFERRED:  # (6) of the tile before
        slot = steps.slot_of_tile_before(tile, options)
        b_da = accumulated(ds, steps.columns_of(slot, w, memory, options), b_da)
    b_s = products.score_product(tile.a, tile.b, zero, False)  # (1)
    if not options.LATE_DP:
        wait(memory.full, tile.e_at)
        if options.WANT_A:
            b_dp = products.score_product(matrix(memory.c, tile.resident), tile.e, zero, False)  # (4)
    steps.end_turn(w, memory, options)
    if not options.ROW:
        wait(memory.s_full, tile.s_at)
    lse2 = steps.statistic(of_rows.lse2, steps.LSE2, tile, memory, options)
    seen = loaded_visibility(tile.a_row, tile.j * options.T, tile.sight, MASKED, options)
    if options.DEFERRED:
        b_da, ds, b_s = products.settled_before(b_da, ds, b_s, 0 if options.LATE_DP else N_S)
        mbarrier.arrive(memory.empty.index(slot), count=1, pred=tile.t > tile.t_first)
    else:
        b_s = warpgroup_mma_wait(N_S if options.WANT_A and not options.LATE_DP else 0, deps=[b_s])
    b_p = steps.probabilities(b_s, lse2, seen, tile, scale, MASKED, options)  # (2)
    if options.WANT_C:
        p = products.operand(b_p.to(dtype))
    if options.LATE_DP:  # where this has the registers of the softmax
        wait(memory.full, tile.e_at)
        b_dp = products.score_product(matrix(memory.c, tile.resident), tile.e, zero, False)  # (4)
    if options.WANT_C:
        b_dc = accumulated(p, products.own_columns(tile.e, w, options.SPLIT), b_dc)  # (3)
    if options.WANT_A:
        delta = steps.statistic(of_rows.delta, steps.DELTA, tile, memory, options)
        b_dp = warpgroup_mma_wait(N_P, deps=[b_dp])
        b_ds = products.packed(b_p * (b_dp - delta), dtype)  # (5)
        ds = products.unpacked(b_ds, dtype, products.operand_layout(options.T))
        if not options.DEFERRED:
            b_da = accumulated(ds, products.own_columns(tile.b, w, options.SPLIT), b_da)  # (6)
            b_da, ds = settled(b_da, ds)
    if options.WANT_C:
        b_dc, p = settled(b_dc, p)
    if options.SUM_DS:
        b_r = steps.with_row_sums(b_r, b_ds, of_rows, tile, dtype)
    b_at, s_at = steps.give_back_tile(tile, memory, options)
    return steps.Sums(b_da, b_dc, b_tda, b_tdc, b_r, b_tr), ds, b_at, s_at
