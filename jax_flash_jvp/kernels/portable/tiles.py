"""Block sizes, by job, head dim, kind of product and GPU.

Chosen by measurement on an H200 for 16-bit inputs on sm_90; elsewhere the largest that fit and do not spill, by ahead-of-time
compilation.  `jax_flash_jvp.kernels.portable.tiles.override` replaces entries while tuning.
"""

from typing import NamedTuple

import triton


class Tile(NamedTuple):
    block_m: int  # queries
    block_n: int  # keys
    num_warps: int
    num_stages: int


def padded(head_dim: int) -> int:
    """Matrix products want powers of two from 16 on."""
    return max(16, triton.next_power_of_2(head_dim))


def accumulators(head_dim: int) -> int:
    """How many [BN, D] sums one launch of key_side may hold."""
    return 4 if padded(head_dim) <= 64 else 2


def tile(job: str, head_dim: int, dtype: str, precision: str, target: int | str) -> Tile:
    """job: forward, forward_dual, tangent, key_side, query_side, key_side_dual, query_side_dual."""
    if target == "interpret":
        return Tile(16, 16, 4, 1)
    kind = "half" if dtype in ("float16", "bfloat16") else precision
    return Tile(64, 32, 4, 2) if kind == "half" else Tile(32, 16, 4, 2)
