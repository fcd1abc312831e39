"""Results that several programs share: how many shares there are, and the launches that add or merge them, in one order.

Without shares a call of few blocks leaves most of the GPU idle.  A share is a float32 array like the result; shares are
[n_shares, …].  dQ, ḋQ, δ', δ̇' and gradients of a bias are added: the first share alone has δ and takes d_ℓ off, so that row sums
come out right; under a soft cap, where these are multiplied with another sum, the query side is not divided.  The forward's are
merged with ℓ = logsumexp ℓ_s and w = exp(ℓ_s − ℓ), as those of a ring's devices (`context.py`):

    o = Σ w o_s      μ = Σ w μ_s      ȯ = Σ w (ȯ_s + (μ_s − μ) o_s)

Of the tangent from a saved ℓ, ℓ_s is the saved ℓ and the logarithm of the share's sum of P.  Each share has as many of the tiles
that a block visits, in the order of their phases.
"""

import math
from typing import Any

import triton
import triton.language as tl

from jax_flash_jvp.kernels.launcher import Launch, Launcher, Output
from jax_flash_jvp.kernels.portable.scores import INTEGERS, LN2, LOG2E

MULTIPROCESSORS = 132  # where their number is not known
BLOCK, SHARES_AT_ONCE = 64, 32  # elements of a program, and shares that it reads at a time
ROWS, FEW = 1, 32  # rows that are merged by a program, and shares that it reads at a time


def multiprocessors(launcher: Launcher) -> int:
    return launcher.multiprocessors or MULTIPROCESSORS


def number(launcher: Launcher, programs: int, each: int, steps: int, least: int, floats: int, most_bytes: float) -> int:
    """How many shares give a multiprocessor `each` programs.  Without shares there are `programs`, each with `steps`.  A share
    has `least` steps or more.  The results of one are `floats` numbers, those of all at most `most_bytes`."""
    wanted = each * multiprocessors(launcher) // programs
    return max(1, min(wanted, steps // least, int(most_bytes / (4 * floats))))


def added(launcher: Launcher, shares: Any, dtype: str) -> Any:
    """Their sum."""
    n_shares, *shape = shares.shape
    n = math.prod(shape)
    launch = Launch(
        sum_shares, triton.cdiv(n, BLOCK), dict(SHARES=shares), dict(n=n, n_shares=n_shares),
        dict(SUM=Output(tuple(shape), dtype)), dict(BLOCK=BLOCK, SHARES_AT_ONCE=SHARES_AT_ONCE), num_warps=4, num_stages=1,
    )  # fmt: skip
    return launcher.launch(launch)["SUM"]


def merged(launcher: Launcher, got: dict[str, Any], outputs: dict[str, Output | None]) -> dict[str, Any]:
    """(O, LSE, TO, MU) as far as they are wanted, from the shares, [n_shares, B, T, N, Hv] and [n_shares, B, N, T], that
    `forward` has computed."""
    n_shares, batch, queries, heads, channels = got["O"].shape
    launch = Launch(
        merge, triton.cdiv(batch * queries * heads, ROWS),
        {f"{name}_SHARES": got[name] for name in ("O", "LSE", "TO", "MU")},
        dict(HQ=heads, LQ=queries, n=batch * queries * heads, n_shares=n_shares), outputs,
        dict(
            DV=channels, ROWS=ROWS, FEW=FEW, WIDTH=triton.next_power_of_2(channels),
            ALL=triton.next_power_of_2(n_shares), WANT=outputs["O"] is not None, WANT_T=outputs["TO"] is not None,
        ), num_warps=4, num_stages=1,
    )  # fmt: skip
    return launcher.launch(launch)


@triton.jit(do_not_specialize_on_alignment=INTEGERS)
def sum_shares(SHARES, n, n_shares, SUM, BLOCK: tl.constexpr, SHARES_AT_ONCE: tl.constexpr):
    o_x = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_x = o_x < n
    b_sum = tl.zeros([BLOCK], tl.float32)
    for first in range(0, n_shares, SHARES_AT_ONCE):
        o_s = first + tl.arange(0, SHARES_AT_ONCE)
        p_x = SHARES + o_s[:, None].to(tl.int64) * n + o_x[None, :]
        b_sum += tl.sum(tl.load(p_x, mask=(o_s < n_shares)[:, None] & m_x[None, :], other=0.0), 0)
    tl.store(SUM + o_x, b_sum.to(SUM.dtype.element_ty), mask=m_x)


@triton.jit(do_not_specialize_on_alignment=INTEGERS)
def merge(
    O_SHARES, LSE_SHARES, TO_SHARES, MU_SHARES, HQ, LQ, n, n_shares, O, LSE, TO, MU,
    DV: tl.constexpr, ROWS: tl.constexpr, FEW: tl.constexpr, WIDTH: tl.constexpr, ALL: tl.constexpr,
    WANT: tl.constexpr, WANT_T: tl.constexpr,
):  # fmt: skip
    """With w = exp(ℓ of a share − ℓ): o = Σ w o_s, μ = Σ w μ_s, ȯ = Σ w (ȯ_s + (μ_s − μ) o_s)."""
    o_r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # of [B, T, N]
    m_r = o_r < n
    x = (o_r // (LQ * HQ) * HQ + o_r % HQ) * LQ + o_r // HQ % LQ  # of [B, N, T]
    o_s = tl.arange(0, ALL)[None, :]
    m_s = m_r[:, None] & (o_s < n_shares)
    p_s = o_s.to(tl.int64) * n + x[:, None]
    b_lse = tl.load(LSE_SHARES + p_s, mask=m_s, other=-float("inf"))  # [ROWS, ALL]
    b_most = tl.max(b_lse, 1)
    b_most = tl.where(b_most == -float("inf"), 0.0, b_most)  # a row that sees nothing
    b_w = tl.math.exp2((b_lse - b_most[:, None]) * LOG2E)
    b_sum = tl.sum(b_w, 1)
    per_sum = tl.where(b_sum == 0.0, 0.0, 1.0 / b_sum)
    if WANT:
        tl.store(LSE + x, b_most + tl.math.log2(b_sum) * LN2, mask=m_r)
    b_mu = tl.zeros([ROWS], tl.float32)
    if WANT_T:
        b_mu = tl.sum(b_w * tl.load(MU_SHARES + p_s, mask=m_s, other=0.0), 1) * per_sum
        tl.store(MU + x, b_mu, mask=m_r)
    o_d = tl.arange(0, WIDTH)
    b_o = tl.zeros([ROWS, WIDTH], tl.float32)
    b_to = tl.zeros([ROWS, WIDTH], tl.float32)
    for first in range(0, n_shares, FEW):
        o_f = first + tl.arange(0, FEW)
        m_f = (o_f < n_shares)[:, None] & m_r[None, :]
        p_f = o_f.to(tl.int64)[:, None] * n + x[None, :]
        b_weight = tl.load(LSE_SHARES + p_f, mask=m_f, other=-float("inf"))  # [FEW, ROWS]
        b_weight = tl.math.exp2((b_weight - b_most[None, :]) * LOG2E) * per_sum[None, :]
        p_o = (o_f.to(tl.int64)[:, None] * n + o_r[None, :])[:, :, None] * DV + o_d[None, None, :]
        m_o = m_f[:, :, None] & (o_d < DV)[None, None, :]
        b_part = tl.load(O_SHARES + p_o, mask=m_o, other=0.0)  # [FEW, ROWS, WIDTH]
        b_o += tl.sum(b_weight[:, :, None] * b_part, 0)
        if WANT_T:
            b_moved = tl.load(MU_SHARES + p_f, mask=m_f, other=0.0) - b_mu[None, :]
            b_part = tl.load(TO_SHARES + p_o, mask=m_o, other=0.0) + b_moved[:, :, None] * b_part
            b_to += tl.sum(b_weight[:, :, None] * b_part, 0)
    p_x = o_r[:, None] * DV + o_d[None, :]
    m_x = m_r[:, None] & (o_d < DV)[None, :]
    if WANT:
        tl.store(O + p_x, b_o.to(O.dtype.element_ty), mask=m_x)
    if WANT_T:
        tl.store(TO + p_x, b_to.to(TO.dtype.element_ty), mask=m_x)
