"""The jobs of attention, each by the fastest kernels that serve the call.

`problem.implementation` may name a family: "hopper" or "portable"; anything else takes the Hopper kernels where they serve.
"""

import logging
from types import ModuleType

from jax_flash_jvp.kernels.launcher import Launcher
from jax_flash_jvp.kernels.portable import jobs as portable
from jax_flash_jvp.problem import Operands, Problem

logger = logging.getLogger(__name__)


def _family(launcher: Launcher, problem: Problem, x: Operands) -> ModuleType:
    if problem.implementation == "portable" or launcher.target != 90:
        return portable
    from jax_flash_jvp.kernels.hopper import jobs as hopper  # needs Gluon, which other GPUs do without

    reason = hopper.unserved(launcher, problem, x)
    if reason is None:
        return hopper
    if problem.implementation == "hopper":
        raise ValueError(
            f"`implementation`='hopper' does not serve {reason}; ask for 'triton', which takes the portable kernels"
        )
    logger.debug("the portable kernels run: those for Hopper do not serve %s", reason)
    return portable


def forward(launcher, problem, x, tx=portable.NO_TANGENT):
    """(o, ℓ, ȯ, μ); the last two None without tangents."""
    return _family(launcher, problem, x).forward(launcher, problem, x, tx)


def tangent(launcher, problem, x, o, log_sum_exp, tx):
    """(ȯ, μ), linear in tx, from the saved o and ℓ."""
    return _family(launcher, problem, x).tangent(launcher, problem, x, o, log_sum_exp, tx)


def backward(launcher, problem, x, y, cy, want):
    """The wanted gradients of (q, k, v), for y = (o, ℓ) and its cotangents cy, either of which may be None."""
    family = portable if cy[0] is None else _family(launcher, problem, x)
    return family.backward(launcher, problem, x, y, cy, want)


def backward_dual(launcher, problem, x, y, cy, tangents, want, want_tangent):
    """(the wanted gradients, the wanted tangents of the gradients) along tangents = (tx, ty, tcy)."""
    family = portable if cy[0] is None else _family(launcher, problem, x)
    return family.backward_dual(launcher, problem, x, y, cy, tangents, want, want_tangent)
