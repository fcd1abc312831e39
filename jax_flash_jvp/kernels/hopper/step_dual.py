"""A tile of the backward with tangents, or of these alone.  Formulas of README.md, as of the key side (`steps.py`):

    (1) s = k qᵀ    (2) p = exp(s − ℓ)    (3) dv += p d_o    (4) dp = v d_oᵀ − δ    (5) ds = p∘dp    (6) dk += ds q
    (1') w = k q̇ᵀ + k̇ qᵀ − μ    (3') ḋv += p ḋ_o + (p∘w) d_o    (4') ḋp = v ḋ_oᵀ + v̇ d_oᵀ − δ̇
    (5') ḋs = p∘ḋp + ds∘w = p∘(ḋp + dp∘w)    (6') ḋk += ḋs q + ds q̇

A tile of q and of q̇ lie one below the other, so that one product has both k qᵀ and k q̇ᵀ, with half the reading of k; v d_oᵀ and
v ḋ_oᵀ likewise.  The sums of w and of ḋp begin with what is taken off or added.
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
def step(tile, row_stats, sums, tds, w: gl.constexpr, memory, scale, MASKED: gl.constexpr, options):
    """The sums with this tile's, and ḋs, whose product with q is issued with the next tile's scores if DEFERRED."""
    T: gl.constexpr = options.T
    SPLIT: gl.constexpr = options.SPLIT
    # ds is multiplied with q̇, p with ḋ_o, and p∘w with d_o
    DS_TQ: gl.constexpr = options.WANT_TK and options.USE_TQ
    P_TDO: gl.constexpr = options.WANT_TV and options.USE_TDO
    PW_DO: gl.constexpr = options.WANT_TV and options.USE_W
    TDP: gl.constexpr = options.WANT_TK and options.USE_TDO
    # so many products of each kind are in flight when another is waited for
    N_S: gl.constexpr = products.parts(options.C)
    N_TS: gl.constexpr = N_S * options.USE_TK
    N: gl.constexpr = len(sums.dk)
    N_P: gl.constexpr = N * (options.WANT_V + P_TDO)
    N_DS: gl.constexpr = N * (options.WANT_K + DS_TQ)
    N_PW: gl.constexpr = N * PW_DO
    dtype: gl.constexpr = memory.k_like[0].dtype
    b_dk, b_dv, b_tdk, b_tdv, b_r, b_tr = sums
    steps.clean_tile(tile, memory, MASKED, options)
    wait(memory.full, tile.q_at)
    steps.await_turn(w, tile, memory, options)
    if options.DEFERRED:  # (6') of the tile before
        slot = steps.slot_of_tile_before(tile, options)
        b_tdk = accumulated(tds, steps.columns_of(slot, w, memory, options), b_tdk)
    b_s = with_tangent(tile.k_like, tile.q_pair, options.USE_TQ, T)  # (1)
    wait(memory.full, tile.do_at)
    if options.USE_V:
        b_dp = with_tangent(matrix(memory.v_like, tile.resident), tile.do_pair, TDP, T)  # (4)
    steps.end_turn(w, memory, options)
    if not options.ROW:
        wait(memory.s_full, tile.s_at)
    lse2 = steps.statistic(row_stats.lse2, steps.LSE2, tile, memory, options)
    seen = loaded_visibility(tile.resident_row, tile.j * T, tile.sight, MASKED, options)
    if options.DEFERRED:
        b_tdk, tds, b_s = products.settled_before(b_tdk, tds, b_s, N_S)
        mbarrier.arrive(memory.empty.index(slot), count=1, pred=tile.t > tile.t_first)
    else:
        b_s = warpgroup_mma_wait(N_S if options.USE_V else 0, deps=[b_s])
    b_s, b_ts = taken_apart(b_s, options.USE_TQ, T)
    b_p = steps.probabilities(b_s, lse2, seen, tile, scale, MASKED, options)  # (2)
    if N_P > 0:
        p = products.operand(b_p.to(dtype))
    if options.USE_W:
        b_ts -= steps.statistic(row_stats.mu, steps.MU, tile, memory, options) * row_stats.per_scale
    if options.USE_TK:
        b_ts = products.score_product(matrix(memory.tk_like, tile.resident), tile.q_like, b_ts, True)  # (1')
    if options.WANT_V:
        b_dv = accumulated(p, products.own_columns(tile.do_like, w, SPLIT), b_dv)  # (3)
    if P_TDO:
        b_tdv = accumulated(p, products.own_columns(tile.tdo_like, w, SPLIT), b_tdv)  # (3')
    if options.USE_V:
        delta = steps.statistic(row_stats.delta, steps.DELTA, tile, memory, options)
        b_dp = warpgroup_mma_wait(N_TS + N_P, deps=[b_dp])
        b_dp, b_tdp = taken_apart(b_dp, TDP, T)
        b_dp -= delta
    if N_DS > 0:
        b_ds = products.packed(b_p * b_dp, dtype)  # (5)
        ds = products.unpacked(b_ds, dtype, products.operand_layout(T))
    if DS_TQ:
        b_tdk = accumulated(ds, products.own_columns(tile.tq_like, w, SPLIT), b_tdk)  # (6')
    if options.WANT_K:
        b_dk = accumulated(ds, products.own_columns(tile.q_like, w, SPLIT), b_dk)  # (6)
    if options.USE_TK:
        b_ts = warpgroup_mma_wait(N_P + N_DS, deps=[b_ts])
    b_w = b_ts * scale
    if options.WANT_TK:
        b_tdp -= steps.statistic(row_stats.t_delta, steps.T_DELTA, tile, memory, options)
        if options.USE_W:
            b_tdp += b_dp * b_w
        if options.USE_TV:
            b_tdp = products.score_product(matrix(memory.tv_like, tile.resident), tile.do_like, b_tdp, True)  # (4')
    if PW_DO:
        pw = products.operand((b_p * b_w).to(dtype))
        b_tdv = accumulated(pw, products.own_columns(tile.do_like, w, SPLIT), b_tdv)  # (3')
    if options.WANT_TK:
        if options.USE_TV:
            b_tdp = warpgroup_mma_wait(N_PW, deps=[b_tdp])
        if options.SUM_DS:
            b_r = steps.with_row_sums(b_r, b_ds, row_stats, tile, dtype)
        b_tds = products.packed(b_p * b_tdp, dtype)  # (5')
        tds = products.unpacked(b_tds, dtype, products.operand_layout(T))
        if not options.DEFERRED:
            b_tdk = accumulated(tds, products.own_columns(tile.q_like, w, SPLIT), b_tdk)  # (6')
            b_tdk, tds = settled(b_tdk, tds)
    if options.WANT_K:
        b_dk, ds = settled(b_dk, ds)
    elif DS_TQ:
        b_tdk, ds = settled(b_tdk, ds)
    if options.WANT_V:
        b_dv, p = settled(b_dv, p)
    if P_TDO:
        b_tdv, p = settled(b_tdv, p)
    if PW_DO:
        b_tdv, pw = settled(b_tdv, pw)
    if options.SUM_TDS:
        b_tr = steps.with_row_sums(b_tr, b_tds, row_stats, tile, dtype)
    ring_at, s_at = steps.give_back_tile(tile, memory, options)
    return steps.Sums(b_dk, b_dv, b_tdk, b_tdv, b_r, b_tr), tds, ring_at, s_at
