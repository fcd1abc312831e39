"""The jobs of attention, each by the fastest kernels that serve the call.

`problem.implementation` may name a family: "hopper" or "portable"; anything else takes the Hopper kernels where they serve
and are faster.
"""

import logging
from types import ModuleType

from jax_flash_jvp.kernels.launcher import Launcher
from jax_flash_jvp.problem import Operands, Problem

logger = logging.getLogger(__name__)


def _family(job: str, launcher: Launcher, problem: Problem, x: Operands, d_o: bool = True) -> ModuleType:
    from jax_flash_jvp.kernels.portable import jobs as portable  # needs Triton, which macOS and Windows do without

    if problem.implementation == "portable":
        logger.debug("the portable kernels run: they are asked for")
        return portable
    if launcher.target != 90 and problem.implementation != "hopper":
        gpu = f"sm_{launcher.target}" if isinstance(launcher.target, int) else "interpreted"
        logger.debug("the portable kernels run: the Hopper kernels need sm_90, and this is %s", gpu)
        return portable
    if not launcher.descriptors and problem.implementation != "hopper":
        logger.debug("the portable kernels run: the Hopper kernels need TMA descriptors, which this launcher lacks")
        return portable
    from jax_flash_jvp.kernels.hopper import jobs as hopper  # needs Gluon, which others do without

    reason = hopper.unserved(launcher, problem, x) if d_o else "a cotangent of the log-sum-exp alone"
    if problem.implementation == "hopper":
        if reason is None:
            logger.debug("the Hopper kernels run: they are asked for")
            return hopper
        raise ValueError(
            f"`implementation`='hopper' does not serve {reason}; ask for 'triton', which takes the portable kernels"
        )
    if reason is not None:
        logger.debug("the portable kernels run: the Hopper kernels do not serve %s", reason)
        return portable
    chosen, queries, keys = hopper.choice(job, launcher, problem, x), x.query.shape[1], x.key.shape[1]
    family, name = (hopper, "Hopper") if chosen.hopper else (portable, "portable")
    found = "the %s kernels run: they are faster for %s of %d queries and %d keys (%s)"
    logger.debug(found, name, job, queries, keys, chosen.reason)
    return family


def forward(launcher, problem, x, tx=Operands(None, None, None)):
    """(o, ℓ, ȯ, μ); the last two None without tangents."""
    job = "forward" if all(t is None for t in tx) else "forward_dual"
    return _family(job, launcher, problem, x).forward(launcher, problem, x, tx)


def tangent(launcher, problem, x, log_sum_exp, tx):
    """(ȯ, μ), linear in tx, from the saved ℓ."""
    return _family("forward_dual", launcher, problem, x).tangent(launcher, problem, x, log_sum_exp, tx)


def backward(launcher, problem, x, y, cy, want):
    """The wanted gradients of (q, k, v, bias), for y = (o, ℓ) and its cotangents cy, either of which may be None."""
    family = _family("backward", launcher, problem, x, cy[0] is not None)
    return family.backward(launcher, problem, x, y, cy, want)


def backward_dual(launcher, problem, x, y, cy, tangents, want, want_tangent):
    """(the wanted gradients, the wanted tangents of the gradients) along tangents = (tx, ty, tcy) of (x, y, cy)."""
    family = _family("backward_dual", launcher, problem, x, cy[0] is not None)
    return family.backward_dual(launcher, problem, x, y, cy, tangents, want, want_tangent)
