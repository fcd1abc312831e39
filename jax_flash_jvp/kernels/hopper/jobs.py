"""The jobs of attention as launches of the Hopper kernels: the same functions as in `portable/jobs.py`, for what they serve."""

import math
from typing import NamedTuple

import triton

from jax_flash_jvp.kernels.hopper import config, one_pass, two_sides
from jax_flash_jvp.kernels.hopper import forward as forward_kernels
from jax_flash_jvp.kernels.hopper.call import HopperCall
from jax_flash_jvp.kernels.hopper.config import GROUP
from jax_flash_jvp.kernels.hopper.plan_one_pass import InOnePass
from jax_flash_jvp.kernels.hopper.plan_two_sides import TwoSides
from jax_flash_jvp.kernels.hopper.programs import DIVISIBLE
from jax_flash_jvp.kernels.launcher import Launcher
from jax_flash_jvp.kernels.portable import one_tile
from jax_flash_jvp.kernels.portable.jobs import NO_TANGENT
from jax_flash_jvp.problem import Operands, Problem, dtype_of

SERVED = (
    "query", "key", "value", "mask", "query_lengths", "key_lengths", "query_segments", "key_segments", "key_ranges",
    "mask_pages",
)  # fmt: skip


def unserved(launcher: Launcher, problem: Problem, x: Operands) -> str | None:
    """What of this call, which the portable kernels serve, these do not, or None."""
    if launcher.target != 90:
        return "this GPU"
    if not launcher.descriptors:
        return "this launcher, which has no TMA descriptors"
    if dtype_of(x.query) not in ("float16", "bfloat16"):
        return f"{dtype_of(x.query)} arrays"
    for name, a in x._asdict().items():
        if a is not None and name not in SERVED:
            return f"`{name}`"
    if problem.soft_cap is not None:
        return "a soft cap"
    if x.value.shape[-1] != x.query.shape[-1]:
        return "a `value` whose head dimension differs from that of `query`"
    if problem.scale < 1e-30:  # its reciprocal is to be a float32 too
        return "a `scale` below 1e-30"
    rows = max(x.query.shape[1] * x.query.shape[2], x.key.shape[1] * x.key.shape[2]) * x.query.shape[0]
    if rows // GROUP + x.query.shape[0] * x.query.shape[2] >= DIVISIBLE:
        return "so many rows"
    if any(s % 8 for a in x[:3] for s in launcher.strides(a)[:-1]):
        return "strides that are not multiples of 16 bytes"
    return None


class Choice(NamedTuple):
    hopper: bool
    reason: str


def choice(job: str, launcher: Launcher, problem: Problem, x: Operands) -> Choice:
    """Are these kernels faster than the portable ones?"""
    (batch, queries, heads, head_dim), keys = x.query.shape, x.key.shape[1]
    width = config.width_of(head_dim)
    if job == "forward" and width <= 64:
        if x.query_segments is not None:
            return Choice(False, "with segment ids and a head dimension up to 64")
        if x.mask is not None and keys <= config.SHORT:
            return Choice(False, f"with a mask of up to {config.SHORT} keys and a head dimension up to 64")
    alone = x.key.shape[2] == heads and x.key_ranges is None
    if job == "backward_dual" and width <= one_tile.CHANNELS and max(queries, keys) <= one_tile.LONGEST and alone:
        # 0.88 of the time at 64 tokens, H200, 2026-11-29
        return Choice(False, "a program of theirs holds all scores of a head")
    fill = lambda heads, rows: batch * heads * triton.cdiv(rows, 2 * GROUP) >= (launcher.multiprocessors or math.inf)
    many = fill(heads, queries)
    length, what = min(queries, keys), "the smaller number"
    sees_all = problem.reach(queries, keys) == (None, None) and all(a is None for a in x[3:])
    # programs share blocks of few queries, and what idle ones do costs nothing; the forward of many such blocks has idle rows
    counts = (keys < queries or job.startswith("backward")) if many else sees_all and queries < keys
    shortest = (config.FROM_IF_MANY if many else config.FROM)[width][job]
    if counts and length >= GROUP:
        length, what = math.isqrt(queries * keys), "√(queries × keys)"
        if job == "backward" and not many and queries <= 2 * GROUP and fill(x.key.shape[2], keys):
            shortest = config.FROM_IF_KEYS_ARE_MANY.get(width, shortest)
    return Choice(length >= shortest, f"the Hopper kernels run if {what} is at least {shortest}")


# ------------------------------------------------------------------------------------------------ the jobs


def forward(launcher: Launcher, problem: Problem, x: Operands, tx: Operands = NO_TANGENT):
    """(o, ℓ, ȯ, μ); the last two None without tangents."""
    return _forward(HopperCall(launcher, problem, x, forward_kernels.forward), tx)


def tangent(launcher: Launcher, problem: Problem, x: Operands, log_sum_exp, tx: Operands):
    """(ȯ, μ), linear in tx, from the saved ℓ."""
    _, _, t_o, mu = _forward(HopperCall(launcher, problem, x, forward_kernels.forward), tx, log_sum_exp)
    return t_o, mu


def _forward(call: HopperCall, tx: Operands, saved=None):
    x, dual, linear = call.x, any(t is not None for t in tx[:3]), saved is not None
    table = config.FORWARD_DUAL if dual else config.FORWARD
    sweep = call.sweep(by_key=False)
    ring = sweep.ring(table[call.width])
    descriptors = call.descriptors(
        q=(x.query, GROUP), k=(x.key, ring.tile), v=(x.value, ring.tile),
        tq=(tx.query, GROUP), tk=(tx.key, ring.tile), tv=(tx.value, ring.tile),
    )  # fmt: skip
    got = call.run(
        sweep, ring, dict(descriptors, SAVED=saved),
        dict(
            O=None if linear else call.output, LSE=None if linear else call.statistic,
            TO=call.output if dual else None, MU=call.statistic if dual else None,
        ), (1 + dual, 2 + dual),
        T=ring.tile, HAS_TQ=tx.query is not None, HAS_TK=tx.key is not None, HAS_TV=tx.value is not None, LINEAR=linear,
    )  # fmt: skip
    return got["O"], got["LSE"], got["TO"], got["MU"]


def backward(launcher: Launcher, problem: Problem, x: Operands, y, cy, want) -> Operands:
    along = (NO_TANGENT, (None, None), (None, None))
    if all(want[:3]):
        call = HopperCall(launcher, problem, x, one_pass.one_pass)
        if sums := call.sweep(by_key=True).in_one_pass(dual=False, deterministic=problem.deterministic):
            return InOnePass(call, y, cy, along, sums == "in order").run()[0]
    return backward_dual(launcher, problem, x, y, cy, along, want, (False,) * 4)[0]


def backward_dual(launcher: Launcher, problem: Problem, x: Operands, y, cy, tangents, want, want_tangent):
    """Needs a cotangent of o."""
    tx, _, (t_d_o, _) = tangents
    along_all = all(a is not None for a in (*tx[:3], t_d_o))
    if along_all and all((*want[:3], *want_tangent[:3])):
        call = HopperCall(launcher, problem, x, one_pass.one_pass_dual)
        if sums := call.sweep(by_key=True).in_one_pass(dual=True, deterministic=problem.deterministic):
            return InOnePass(call, y, cy, tangents, sums == "in order").run()
    call = HopperCall(launcher, problem, x, two_sides.backward, lists_counted=not any(want_tangent))
    return TwoSides(call, y, cy, tangents, Operands(*want), Operands(*want_tangent)).run()
