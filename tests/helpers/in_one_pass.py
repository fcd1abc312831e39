"""Backwards that go once over the scores, however short they are."""

import math


def take_one_pass(monkeypatch, in_order=False, ring=0):
    """Wherever a kernel of one pass serves the call, in order where it can, or in any, by this one of the rings of its width.
    Returns a list to which the kernel of each job is added that does so."""
    from jax_flash_jvp.kernels.hopper import config, jobs

    for name, keys in {"ONE_PASS_FROM": config.ONE_PASS, "ONE_PASS_DUAL_FROM": config.ONE_PASS_DUAL}.items():
        monkeypatch.setattr(config, name, dict.fromkeys(keys, (config.OnePassThreshold(0, 0),)))
    for width, rings in config.ONE_PASS.items():
        monkeypatch.setitem(config.ONE_PASS, width, rings[ring : ring + 1] or rings)
    monkeypatch.setattr(config, "ORDER_MAY_COST", math.inf if in_order else -1)
    monkeypatch.setattr(config, "ORDERED_UNLIKE_UP_TO", math.inf)
    taken = []

    run = jobs.InOnePass.run

    def listening(plan):
        taken.append(plan.call.kernel.__name__)
        return run(plan)

    monkeypatch.setattr(jobs.InOnePass, "run", listening)
    return taken
