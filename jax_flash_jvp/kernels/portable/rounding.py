"""Arrays of float32 rounded to TF32's 10 bits of mantissa: tensor cores would cut the others off."""

import math
from typing import Any

import triton
import triton.language as tl

from jax_flash_jvp.kernels.launcher import Launch, Launcher, Output
from jax_flash_jvp.kernels.portable.scores import to_tf32

ELEMENTS = 2048  # of a program


def rounded(launcher: Launcher, array: Any) -> Any:
    """[B, L, H, D], contiguous, of an array with any strides but along its rows."""
    width, rows = triton.next_power_of_2(array.shape[3]), math.prod(array.shape[:3])
    s_b, s_l, s_h, _ = launcher.strides(array)
    block = max(1, ELEMENTS // width)
    launch = Launch(
        round_to_tf32, triton.cdiv(rows, block), dict(X=array),
        dict(n=rows, L=array.shape[1], H=array.shape[2], s_b=s_b, s_l=s_l, s_h=s_h),
        dict(OUT=Output(tuple(array.shape), "float32")), dict(D=array.shape[3], BLOCK=block, WIDTH=width),
        num_warps=4, num_stages=1,
    )  # fmt: skip
    return launcher.launch(launch)["OUT"]


@triton.jit
def round_to_tf32(X, n, L, H, s_b, s_l, s_h, OUT, D: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    o_r = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    o_d = tl.arange(0, WIDTH)
    m_x = (o_r < n)[:, None] & (o_d < D)[None, :]
    offset = o_r // (L * H) * s_b + o_r // H % L * s_l + o_r % H * s_h
    b_x = tl.load(X + offset[:, None] + o_d[None, :], mask=m_x, other=0.0)
    tl.store(OUT + o_r[:, None] * D + o_d[None, :], to_tf32(b_x), mask=m_x)
