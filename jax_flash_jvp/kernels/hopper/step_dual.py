"""A tile of the backward with tangents, or of these alone.  Formulas of README.md, with a, b, c and e as in `steps.py`:

    (1) s = a bᵀ    (2) p = exp(s − ℓ)    (3) dc += p e    (4) dp = c eᵀ − δ    (5) ds = p∘dp    (6) da += ds b
    (1') w = a ḃᵀ + ȧ bᵀ − μ    (3') ḋc += p ė + (p∘w) e    (4') ḋp = c ėᵀ + ċ eᵀ − δ̇
    (5') ḋs = p∘ḋp + ds∘w = p∘(ḋp + dp∘w)    (6') ḋa += ḋs b + ds ḃ

A tile of b and of ḃ lie one below the other, so that one product has both a bᵀ and a ḃᵀ, with half the reading of a; c eᵀ and
c ėᵀ likewise.  The sums of w and of ḋp begin with what is taken off or added.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from jax_flash_jvp.kernels.hopper import products, steps
from jax_flash_jvp.kernels.hopper.products import GROUP_ROWS, accumulated, product_layout, settled
from jax_flash_jvp.kernels.hopper.ring import matrix, rows_from, wait
from jax_flash_jvp.kernels.hopper.visibility import loaded_visibility


@gluon.jit
def with_tangent(x, rows, TANGENT: gl.constexpr, T: gl.constexpr):
    """x yᵀ, of streamed rows y and, if TANGENT, x ẏᵀ beside it, which `taken_apart` parts."""
    if TANGENT:
        return products.score_product(x, rows, gl.zeros([GROUP_ROWS, 2 * T], gl.float32, product_layout(2 * T)), False)
    else:
        return products.score_product(
            x, rows_from(rows, 0, T), gl.zeros([GROUP_ROWS, T], gl.float32, product_layout(T)), False
        )


@gluon.jit
def taken_apart(b_x, TANGENT: gl.constexpr, T: gl.constexpr):
    if TANGENT:
        return products.halves(b_x)
    else:
        return b_x, gl.zeros([GROUP_ROWS, T], gl.float32, product_layout(T))


@gluon.jit
def step(tile, of_rows, sums, tds, w: gl.constexpr, memory, scale, MASKED: gl.constexpr, options):
    """The sums with this tile's, and ḋs, whose product with b is issued with the next tile's scores if DEFERRED."""
    T: gl.constexpr = options.T
    SPLIT: gl.constexpr = options.SPLIT
    # ds is multiplied with ḃ, p with ė, and p∘w with e
    DS_TB: gl.constexpr = options.WANT_TA and options.USE_TB
    P_TE: gl.constexpr = options.WANT_TC and options.USE_TE
    PW_E: gl.constexpr = options.WANT_TC and options.USE_W
    TDP: gl.constexpr = options.WANT_TA and options.USE_TE
    # so many products of each kind are in flight when another is waited for
    N_S: gl.constexpr = products.parts(options.C)
    N_TS: gl.constexpr = N_S * options.USE_TA
    N: gl.constexpr = len(sums.da)
    N_P: gl.constexpr = N * (options.WANT_C + P_TE)
    N_DS: gl.constexpr = N * (options.WANT_A + DS_TB)
    N_PW: gl.constexpr = N * PW_E
    dtype: gl.constexpr = memory.a[0].dtype
    b_da, b_dc, b_tda, b_tdc, b_r, b_tr = sums
    steps.clean_tile(tile, memory, MASKED, options)
    wait(memory.full, tile.b_at)
    steps.await_turn(w, tile, memory, options)
    if options.DEFERRED:  # (6') of the tile before
        slot = steps.slot_of_tile_before(tile, options)
        b_tda = accumulated(tds, steps.columns_of(slot, w, memory, options), b_tda)
    b_s = with_tangent(tile.a, tile.bb, options.USE_TB, T)  # (1)
    wait(memory.full, tile.e_at)
    if options.USE_C:
        b_dp = with_tangent(matrix(memory.c, tile.resident), tile.ee, TDP, T)  # (4)
    steps.end_turn(w, memory, options)
    if not options.ROW:
        wait(memory.s_full, tile.s_at)
    lse2 = steps.statistic(of_rows.lse2, steps.LSE2, tile, memory, options)
    seen = loaded_visibility(tile.a_row, tile.j * T, tile.sight, MASKED, options)
    if options.DEFERRED:
        b_tda, tds, b_s = products.settled_before(b_tda, tds, b_s, N_S)
        mbarrier.arrive(memory.empty.index(slot), count=1, pred=tile.t > tile.t_first)
    else:
        b_s = warpgroup_mma_wait(N_S if options.USE_C else 0, deps=[b_s])
    b_s, b_ts = taken_apart(b_s, options.USE_TB, T)
    b_p = steps.probabilities(b_s, lse2, seen, tile, scale, MASKED, options)  # (2)
    if N_P > 0:
        p = products.operand(b_p.to(dtype))
    if options.USE_W:
        b_ts -= steps.statistic(of_rows.mu, steps.MU, tile, memory, options) * of_rows.per_scale
    if options.USE_TA:
        b_ts = products.score_product(matrix(memory.ta, tile.resident), tile.b, b_ts, True)  # (1')
    if options.WANT_C:
        b_dc = accumulated(p, products.own_columns(tile.e, w, SPLIT), b_dc)  # (3)
    if P_TE:
        b_tdc = accumulated(p, products.own_columns(tile.te, w, SPLIT), b_tdc)  # (3')
    if options.USE_C:
        delta = steps.statistic(of_rows.delta, steps.DELTA, tile, memory, options)
        b_dp = warpgroup_mma_wait(N_TS + N_P, deps=[b_dp])
        b_dp, b_tdp = taken_apart(b_dp, TDP, T)
        b_dp -= delta
    if N_DS > 0:
        b_ds = products.packed(b_p * b_dp, dtype)  # (5)
        ds = products.unpacked(b_ds, dtype, products.operand_layout(T))
    if DS_TB:
        b_tda = accumulated(ds, products.own_columns(tile.tb, w, SPLIT), b_tda)  # (6')
    if options.WANT_A:
        b_da = accumulated(ds, products.own_columns(tile.b, w, SPLIT), b_da)  # (6)
    if options.USE_TA:
        b_ts = warpgroup_mma_wait(N_P + N_DS, deps=[b_ts])
    b_w = b_ts * scale
    if options.WANT_TA:
        b_tdp -= steps.statistic(of_rows.t_delta, steps.T_DELTA, tile, memory, options)
        if options.USE_W:
            b_tdp += b_dp * b_w
        if options.USE_TC:
            b_tdp = products.score_product(matrix(memory.tc, tile.resident), tile.e, b_tdp, True)  # (4')
    if PW_E:
        pw = products.operand((b_p * b_w).to(dtype))
        b_tdc = accumulated(pw, products.own_columns(tile.e, w, SPLIT), b_tdc)  # (3')
    if options.WANT_TA:
        if options.USE_TC:
            b_tdp = warpgroup_mma_wait(N_PW, deps=[b_tdp])
        if options.SUM_DS:
            b_r = steps.with_row_sums(b_r, b_ds, of_rows, tile, dtype)
        b_tds = products.packed(b_p * b_tdp, dtype)  # (5')
        tds = products.unpacked(b_tds, dtype, products.operand_layout(T))
        if not options.DEFERRED:
            b_tda = accumulated(tds, products.own_columns(tile.b, w, SPLIT), b_tda)  # (6')
            b_tda, tds = settled(b_tda, tds)
    if options.WANT_A:
        b_da, ds = settled(b_da, ds)
    elif DS_TB:
        b_tda, ds = settled(b_tda, ds)
    if options.WANT_C:
        b_dc, p = settled(b_dc, p)
    if P_TE:
        b_tdc, p = settled(b_tdc, p)
    if PW_E:
        b_tdc, pw = settled(b_tdc, pw)
    if options.SUM_TDS:
        b_tr = steps.with_row_sums(b_tr, b_tds, of_rows, tile, dtype)
    b_at, s_at = steps.give_back_tile(tile, memory, options)
    return steps.Sums(b_da, b_dc, b_tda, b_tdc, b_r, b_tr), tds, b_at, s_at
