"""The backward of short sequences, with its tangent where one is asked for: a program has all scores of a head.

The formulas are those of `backward.py`.  As a row is there at once, nothing is kept of the forward: P is made anew, and with the
cotangents g of ℓ and ġ of its tangent

    δ = rowsum(P∘d_o Vᵀ) − g      μ = rowsum(P∘Ṡ)      δ̇ = rowsum(P∘(ḋ_o Vᵀ + d_o V̇ᵀ) + P∘w∘d_o Vᵀ) − ġ

so that rows sum to what they should until they are rounded.  What rounding adds, e, times a mean key of the row is taken off:
dQ' = dQ − e P K and ḋQ' = ḋQ − ė P K − e P K̇.

A program goes through the heads that share a matrix of the bias, and adds up its gradient.
"""

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from jax_flash_jvp.kernels.launcher import Launch, Output
from jax_flash_jvp.kernels.portable.bias import store_sum
from jax_flash_jvp.kernels.portable.scores import (
    INTEGERS,
    UNROUNDED,
    accumulated,
    aligned,
    lengths,
    load_if,
    load_rows,
    operand,
    products,
    results,
    scaled,
    scores,
    store_rows,
    sums,
    tangent_products,
    tangent_scores,
    under_cap,
    unfolded,
    without,
)
from jax_flash_jvp.kernels.portable.tiles import padded, rows_for
from jax_flash_jvp.kernels.portable.visibility import kept, selected, thinned, visible

# Queries, and keys, up to which this is the kernel: H200, 2026-11-28 and -29, 0.1 to 1.0 of the time of two sides.  Two kinds of
# calls take it up to FEWER: the dual backward in float32, which is 1.3 to 1.5 beyond, except with three products of 33 to 64
# channels; and on other GPUs, where nothing was timed, all but the plain backward of 33 to 64 channels.
LONGEST, FEWER, CHANNELS = 64, 32, 64
LONGEST_INTERPRETED = 16  # as the blocks of the other kernels
# Of so few queries the plain backward in half precision has more keys, whose gradients want more registers; of these channels, as
# others were not timed.  H200, 2026-11-29: forward and backward in 0.77 of the time of two sides; with tangents 1.3 to 1.9; of
# 197 keys, with spills, 0.92 to 1.04.
FEW_QUERIES, KEYS_OF_FEW, CHANNELS_OF_FEW = 16, 128, (32, 64)
ELEMENTS, ELEMENTS_OF_FEW = 512, 2048  # of scores, or of the operands' rows, for each warp
PROGRAMS = 4  # for each multiprocessor, which has registers for so many of two warps; measured with 31 alone


def serves(call: Any, d_o: Any, dual: bool) -> bool:
    """Is this the kernel of a call?  It does not clear rows that nobody sees, and products without tensor cores are unrolled."""
    features, target, wide = call.features, call.launcher.target, padded(call.widest) > 32
    interpreted = target == "interpret"
    if wide and call.dtype == "float32" and not interpreted and target != 90:  # would spill
        return False
    slower = dual and call.dtype == "float32" and not (wide and call.precision == "tf32x3")
    elsewhere = target != 90 and (dual or not wide)
    longest = LONGEST_INTERPRETED if interpreted else FEWER if slower or elsewhere else LONGEST
    few = target == 90 and call.query_length <= FEW_QUERIES and padded(call.widest) in CHANNELS_OF_FEW
    most_keys = KEYS_OF_FEW if few and call.dtype != "float32" and not dual else longest
    if call.query_length > longest or call.key_length > most_keys or call.widest > CHANNELS or d_o is None:
        return False
    if features.partial or features.rows_of_head or features.ranges.present or call.query_heads != call.key_heads:
        return False
    return interpreted or call.precision != "ieee"


def heads_each(call: Any) -> int:
    """The heads of a program: those that share a matrix of the bias, if programs are enough."""
    shared = call.x.bias is not None and call.x.bias.shape[0] == call.batch and call.x.bias.shape[1] == 1
    return call.query_heads if shared and call.batch >= PROGRAMS * (call.launcher.multiprocessors or 1) else 1


def sums_bias(call: Any) -> bool:
    """Does it add up the whole gradient of the bias?"""
    bias = call.x.bias
    own = bias is not None and bias.shape[0] == call.batch and bias.shape[1] * heads_each(call) == call.query_heads
    return own and call.features.bias.columns


def backward(call: Any, inputs: Mapping[str, Any], of_lse, tx: Any, want: Any, want_tangent: Any) -> dict[str, Any]:
    """The wanted gradients, by the names of outputs; of the bias where `sums_bias`, else statistics of rows for its kernel."""
    n_h, dtype, bias = heads_each(call), call.result_dtype, call.x.bias
    rows_m, rows_n = rows_for(call.query_length), rows_for(call.key_length)
    elements = max(rows_m, rows_n) * max(min(rows_m, rows_n), padded(call.widest))
    each = ELEMENTS_OF_FEW if rows_n > LONGEST else ELEMENTS
    warps = max(1, min(4, triton.next_power_of_2(elements // each)))  # of 33 to 48 channels three would do
    of_bias = Output(tuple(bias.shape), dtype(bias)) if sums_bias(call) else None
    shapes = dict(Q=call.query_gradient, K=call.key_gradient, V=call.value_gradient, BIAS=of_bias)
    outputs: dict[str, Output | None] = {}
    for prefix, of in (("D", want), ("TD", want_tangent)):
        outputs |= {f"{prefix}_{n}": shape if w else None for (n, shape), w in zip(shapes.items(), of[:4], strict=True)}
    leaves = (want.bias or want_tangent.bias) and of_bias is None
    statistic = call.statistic if leaves else None
    outputs |= dict(LSE2=statistic, DELTA=statistic, T_DELTA=statistic if any(want_tangent) else None)
    named = {name: inputs[name] for name in ("Q", "K", "V", "TQ", "TK", "TV", "DO", "TDO")}
    has = {f"HAS_{n}": inputs[n] is not None for n in ("TQ", "TK", "TV", "TDO")}
    has |= dict(HAS_TBIAS=tx.bias is not None, HAS_D_LSE=of_lse[0] is not None, HAS_TD_LSE=of_lse[1] is not None)
    wanted = {f"WANT_{name}": outputs[name] is not None for name in outputs if name not in ("LSE2", "DELTA", "T_DELTA")}
    launch = Launch(
        one_tile, call.batch * call.query_heads // n_h,
        dict(
            named, D_LSE=of_lse[0], TD_LSE=of_lse[1], BIAS=call.bias, TBIAS=tx.bias, **call.selected(False), SEED=call.x.seed
        ), dict(call.scalars, n_h=n_h), outputs,
        dict(
            call.constants, BM=rows_m, BN=rows_n, CORRECTED=call.dtype != "float32" or call.precision == UNROUNDED.value,
            TANGENT=any(want_tangent), STATISTICS=leaves, **wanted, **has,
        ), num_warps=warps, num_stages=1,
    )  # fmt: skip
    return {name: a for name, a in call.launcher.launch(launch).items() if a is not None}


@triton.jit(do_not_specialize_on_alignment=INTEGERS)
def one_tile(
    Q, K, V, TQ, TK, TV, DO, TDO, D_LSE, TD_LSE,
    BIAS, TBIAS, MASK, BLOCKS, Q_LENGTHS, K_LENGTHS, Q_SEGMENTS, K_SEGMENTS, RANGES, SEED,
    scale, HQ, GROUP, LQ, LK, s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, left, right, cap, rate, n_h,
    D_Q, D_K, D_V, D_BIAS, TD_Q, TD_K, TD_V, TD_BIAS, LSE2, DELTA, T_DELTA,
    D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    s_q: tl.constexpr, s_k: tl.constexpr, s_v: tl.constexpr, UNIT_Q: tl.constexpr, UNIT_K: tl.constexpr, UNIT_V: tl.constexpr,
    FEATURES: tl.constexpr,
    HAS_TQ: tl.constexpr, HAS_TK: tl.constexpr, HAS_TV: tl.constexpr, HAS_TBIAS: tl.constexpr, HAS_TDO: tl.constexpr,
    HAS_D_LSE: tl.constexpr, HAS_TD_LSE: tl.constexpr,
    WANT_D_Q: tl.constexpr, WANT_D_K: tl.constexpr, WANT_D_V: tl.constexpr, WANT_D_BIAS: tl.constexpr,
    WANT_TD_Q: tl.constexpr, WANT_TD_K: tl.constexpr, WANT_TD_V: tl.constexpr, WANT_TD_BIAS: tl.constexpr,
    CORRECTED: tl.constexpr, TANGENT: tl.constexpr, STATISTICS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All gradients of one batch entry and n_h heads, and their tangents.  Tiles are [BM, BN]."""
    HAS_TS: tl.constexpr = HAS_TQ or HAS_TK or HAS_TBIAS
    BY_ROW: tl.constexpr = FEATURES.bias.rows
    LQ, LK = aligned(LQ, LK, FEATURES)
    i_x = tl.program_id(0).to(tl.int64)
    i_b = i_x // (HQ // n_h)
    o_r, o_c = tl.arange(0, BM), tl.arange(0, BN)
    o_m, o_n = o_r[:, None], o_c[None, :]
    b_sum, b_tsum = tl.zeros([BM, BN], tl.float32), tl.zeros([BM, BN], tl.float32)
    for i in range(n_h):
        i_h = i_x % (HQ // n_h) * n_h + i
        q_offset = (i_b * s_qb + i_h * s_qh) * UNIT_Q
        k_offset = (i_b * s_kb + i_h * s_kh) * UNIT_K
        v_offset = (i_b * s_vb + i_h * s_vh) * UNIT_V
        o_offset, s_o = results(i_b, i_h, HQ, LQ, DV, FEATURES)
        query_end, key_end = lengths(Q_LENGTHS, K_LENGTHS, i_b, LQ, LK, FEATURES)
        bias, t_bias, sight, head_seeds = selected(
            BIAS, TBIAS, MASK, BLOCKS, Q_SEGMENTS, K_SEGMENTS, RANGES, SEED,
            i_b, i_h, HQ, GROUP, LQ, LK, query_end, key_end, left, right, False, FEATURES,
        )  # fmt: skip
        x = (i_b * HQ + i_h) * LQ + o_r
        b_seen = visible(o_m, o_n, 0, sight, FEATURES) & (o_m < query_end)
        if FEATURES.tiles.present or FEATURES.lengths:
            query_end, key_end = ends(b_seen, query_end, key_end)
        b_q = load_rows(Q + q_offset, 0, s_q, o_r, query_end, D, True)
        b_k = load_rows(K + k_offset, 0, s_k, o_c, key_end, D, True)
        b_v = load_rows(V + v_offset, 0, s_v, o_c, key_end, DV, True)
        b_do = load_rows(DO + o_offset, 0, s_o, o_r, query_end, DV, True)
        b_s = products(b_q, b_k, PRECISION)
        b_s, b_u = scores(b_s, scale, cap, bias, o_m, o_n, LQ, LK, FEATURES)
        b_p, b_lse2 = probabilities(b_s, b_seen)
        m_x = (o_r < query_end) & (b_lse2 != float("inf"))  # the others' cotangents may be NaN
        b_kept = kept(o_m, o_n, head_seeds, rate, FEATURES)
        b_dp = tl.where(b_seen, thinned(products(b_do, b_v, PRECISION), b_kept, FEATURES), 0.0)
        b_delta = delta_of(b_p * b_dp, D_LSE, x, m_x, HAS_D_LSE)
        b_ds = b_p * (b_dp - b_delta[:, None])
        if STATISTICS:
            tl.store(LSE2 + x, b_lse2, mask=o_r < LQ)
            tl.store(DELTA + x, b_delta, mask=o_r < LQ)
        b_dx = under_cap(b_ds, b_u, FEATURES)
        b_sum += b_ds
        q_result, k_result, v_result = (i_b * LQ * HQ + i_h) * D, (i_b * LK * HQ + i_h) * D, (i_b * LK * HQ + i_h) * DV
        dtype: tl.constexpr = b_q[0].dtype
        if WANT_D_V:
            b_dv = accumulated(sums(BN, DV), tl.trans(thinned(b_p, b_kept, FEATURES)), b_do, PRECISION)
            store_rows(D_V + v_result, 0, HQ * DV, o_c, LK, DV, b_dv)
        if WANT_D_K:
            b_dk = accumulated(sums(BN, D), tl.trans(b_dx), b_q, PRECISION)
            store_rows(D_K + k_result, 0, HQ * D, o_c, LK, D, scaled(b_dk, scale))
        if WANT_D_Q:
            b_dq = accumulated(sums(BM, D), b_dx, b_k, PRECISION)
            if CORRECTED:
                b_mean = accumulated(sums(BM, D), b_p, b_k, PRECISION)  # P K
                b_dq = without(b_dq, excess(b_dx, dtype, PRECISION), b_mean)
            store_rows(D_Q + q_result, 0, HQ * D, o_r, LQ, D, scaled(b_dq, scale))
        if TANGENT:
            again = first_row_again(i)  # operands are loaded again where they are used: registers do not hold all
            b_w = tl.zeros([BM, BN], tl.float32)
            if HAS_TS:
                b_q = load_rows(Q + q_offset, again, s_q, o_r, query_end, D, True)
                b_k = load_rows(K + k_offset, again, s_k, o_c, key_end, D, True)
                b_tq = load_if(HAS_TQ, b_q, TQ + q_offset, again, s_q, o_r, query_end, D, True)
                b_tk = load_if(HAS_TK, b_k, TK + k_offset, again, s_k, o_c, key_end, D, True)
                b_ts = tangent_products(b_q, b_k, b_tq, b_tk, HAS_TQ, HAS_TK, PRECISION)
                b_w = tangent_scores(b_ts, b_u, scale, t_bias, o_m, o_n, LQ, LK, FEATURES, HAS_TBIAS)
                b_w = tl.where(b_seen, b_w, 0.0)
                b_w -= tl.sum(b_p * b_w, 1)[:, None]  # μ
            b_tdp = tl.zeros([BM, BN], tl.float32)
            if HAS_TDO:
                b_tdo = load_rows(TDO + o_offset, again, s_o, o_r, query_end, DV, True)
                b_tdp += products(b_tdo, load_rows(V + v_offset, again, s_v, o_c, key_end, DV, True), PRECISION)
            if HAS_TV:
                b_do = load_rows(DO + o_offset, again, s_o, o_r, query_end, DV, True)
                b_tdp += products(b_do, load_rows(TV + v_offset, again, s_v, o_c, key_end, DV, True), PRECISION)
            b_tdp = tl.where(b_seen, thinned(b_tdp, b_kept, FEATURES), 0.0)
            b_t_delta = delta_of(b_p * (b_tdp + b_w * b_dp), TD_LSE, x, m_x, HAS_TD_LSE)
            if STATISTICS:
                tl.store(T_DELTA + x, b_t_delta, mask=o_r < LQ)
            b_tds = b_p * (b_tdp - b_t_delta[:, None]) + b_ds * b_w
            b_tdx = under_cap(b_tds, b_u, FEATURES)
            if FEATURES.cap and HAS_TS:
                b_tdx -= b_dx * b_u * b_ts * (2.0 * scale / cap)
            b_tsum += b_tds
            if WANT_TD_V:
                again = first_row_again(i)
                b_tdv = sums(BN, DV)
                if HAS_TDO:
                    b_tdo = load_rows(TDO + o_offset, again, s_o, o_r, query_end, DV, True)
                    b_tdv = accumulated(b_tdv, tl.trans(thinned(b_p, b_kept, FEATURES)), b_tdo, PRECISION)
                if HAS_TS:
                    b_do = load_rows(DO + o_offset, again, s_o, o_r, query_end, DV, True)
                    b_tdv = accumulated(b_tdv, tl.trans(thinned(b_p * b_w, b_kept, FEATURES)), b_do, PRECISION)
                store_rows(TD_V + v_result, 0, HQ * DV, o_c, LK, DV, b_tdv)
            if WANT_TD_K:
                again = first_row_again(i)
                b_q = load_rows(Q + q_offset, again, s_q, o_r, query_end, D, True)
                b_tdk = accumulated(sums(BN, D), tl.trans(b_tdx), b_q, PRECISION)
                if HAS_TQ:
                    b_tq = load_rows(TQ + q_offset, again, s_q, o_r, query_end, D, True)
                    b_tdk = accumulated(b_tdk, tl.trans(b_dx), b_tq, PRECISION)
                store_rows(TD_K + k_result, 0, HQ * D, o_c, LK, D, scaled(b_tdk, scale))
            if WANT_TD_Q:
                again = first_row_again(i)
                b_k = load_rows(K + k_offset, again, s_k, o_c, key_end, D, True)
                b_tdq = accumulated(sums(BM, D), b_tdx, b_k, PRECISION)
                if HAS_TK:
                    b_tk = load_rows(TK + k_offset, again, s_k, o_c, key_end, D, True)
                    b_tdq = accumulated(b_tdq, b_dx, b_tk, PRECISION)
                if CORRECTED:
                    b_mean = accumulated(sums(BM, D), b_p, b_k, PRECISION)
                    b_tdq = without(b_tdq, excess(b_tdx, dtype, PRECISION), b_mean)
                    if HAS_TK:
                        b_tdq = without(
                            b_tdq, excess(b_dx, dtype, PRECISION), accumulated(sums(BM, D), b_p, b_tk, PRECISION)
                        )
                store_rows(TD_Q + q_result, 0, HQ * D, o_r, LQ, D, scaled(b_tdq, scale))
    if WANT_D_BIAS:
        store_sum(D_BIAS, b_sum, i_x, o_r, o_c, LQ, LK, BY_ROW)
    if WANT_TD_BIAS:
        store_sum(TD_BIAS, b_tsum, i_x, o_r, o_c, LQ, LK, BY_ROW)


@triton.jit
def first_row_again(i):
    """Zero, for loads that are to be repeated: behind a barrier, so that no load moves up to where registers are full."""
    tl.debug_barrier()
    return unfolded(0, i)


@triton.jit
def ends(b_seen, query_end, key_end):
    """These, or zeros where no query sees a key: nothing is read then, for all may be NaN."""
    some = tl.max(tl.max(b_seen.to(tl.int32), 1), 0)
    return query_end * some, key_end * some


@triton.jit
def probabilities(b_s, b_seen):
    """(P, ℓ in base 2) of rows of scores in base 2; zeros and +∞ of a row that sees nothing."""
    b_s = tl.where(b_seen, b_s, -float("inf"))
    b_m = tl.max(b_s, 1)
    b_p = tl.math.exp2(b_s - tl.where(b_m == -float("inf"), 0.0, b_m)[:, None])
    b_l = tl.sum(b_p, 1)
    b_lse2 = tl.where(b_l == 0.0, float("inf"), b_m + tl.math.log2(b_l))
    b_p *= (1.0 / tl.where(b_l == 0.0, 1.0, b_l))[:, None]  # NaN of all keys, where one is
    return tl.where(b_seen, b_p, 0.0), b_lse2


@triton.jit
def delta_of(b_x, D_LSE, x, m_x, HAS_D_LSE: tl.constexpr):
    """δ of what its rows sum up."""
    b_delta = tl.sum(b_x, 1)
    if HAS_D_LSE:
        b_delta -= tl.load(D_LSE + x, mask=m_x, other=0.0)
    return b_delta


@triton.jit
def excess(b_dx, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """[BM, 1]: what rounding adds to the sums of rows."""
    return tl.sum(operand(b_dx, dtype, PRECISION).to(tl.float32) - b_dx, 1)[:, None]
