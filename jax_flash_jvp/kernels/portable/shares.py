"""Sums that several programs share: how many shares there are, and the launch that adds them, in one order.

Without shares a call of few blocks leaves most of the GPU idle.  A share is a float32 array like the result; shares are
[n_shares, …].
"""

import math
from typing import Any

import triton
import triton.language as tl

from jax_flash_jvp.kernels.launcher import Launch, Launcher, Output
from jax_flash_jvp.kernels.portable.scores import INTEGERS

MULTIPROCESSORS = 132  # where their number is not known
BLOCK, TOGETHER = 64, 32  # elements of a program, and shares that it reads at a time


def number(launcher: Launcher, programs: int, each: int, steps: int, least: int, floats: int, most_bytes: float) -> int:
    """Of shares, so that `each` multiprocessor has so many programs: of `programs` without shares, of which each takes `steps`,
    `least` in a share, and so many `floats` in the results of one share; these have `most_bytes` together."""
    wanted = each * (launcher.multiprocessors or MULTIPROCESSORS) // programs
    return max(1, min(wanted, steps // least, int(most_bytes / (4 * floats))))


def added(launcher: Launcher, shares: Any, dtype: str) -> Any:
    """Their sum."""
    n_shares, *shape = shares.shape
    n = math.prod(shape)
    launch = Launch(
        sum_shares, triton.cdiv(n, BLOCK), dict(SHARES=shares), dict(n=n, n_shares=n_shares),
        dict(SUM=Output(tuple(shape), dtype)), dict(BLOCK=BLOCK, TOGETHER=TOGETHER), num_warps=4, num_stages=1,
    )  # fmt: skip
    return launcher.launch(launch)["SUM"]


@triton.jit(do_not_specialize_on_alignment=INTEGERS)
def sum_shares(SHARES, n, n_shares, SUM, BLOCK: tl.constexpr, TOGETHER: tl.constexpr):
    o_x = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_x = o_x < n
    b_sum = tl.zeros([BLOCK], tl.float32)
    for first in range(0, n_shares, TOGETHER):
        o_s = first + tl.arange(0, TOGETHER)
        p_x = SHARES + o_s[:, None].to(tl.int64) * n + o_x[None, :]
        b_sum += tl.sum(tl.load(p_x, mask=(o_s < n_shares)[:, None] & m_x[None, :], other=0.0), 0)
    tl.store(SUM + o_x, b_sum.to(SUM.dtype.element_ty), mask=m_x)
