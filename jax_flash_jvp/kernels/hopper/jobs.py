"""The jobs of attention as launches of the Hopper kernels: the same functions as in `portable/jobs.py`, for what they serve."""

from jax_flash_jvp.kernels.hopper import config, one_pass, two_sides
from jax_flash_jvp.kernels.hopper import forward as forward_kernels
from jax_flash_jvp.kernels.hopper.call import HopperCall
from jax_flash_jvp.kernels.hopper.config import GROUP
from jax_flash_jvp.kernels.hopper.plan_one_pass import InOnePass
from jax_flash_jvp.kernels.hopper.plan_two_sides import TwoSides
from jax_flash_jvp.kernels.launcher import Launcher
from jax_flash_jvp.kernels.portable.jobs import NO_TANGENT
from jax_flash_jvp.problem import Operands, Problem


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
