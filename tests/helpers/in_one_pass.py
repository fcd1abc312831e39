"""Backwards that go once over the scores, however short they are."""

import functools
import itertools


def take_one_pass(monkeypatch, in_order=False):
    """Wherever a kernel of one pass serves the call, the plain one in order where it can, or in any; the dual one is in order
    where it can by itself.  Returns a list to which each job is added that does so."""
    from jax_flash_jvp.kernels.hopper import config, jobs

    widths = config.ONE_PASS
    tables = {
        "ONE_PASS_FROM": widths,
        "ONE_PASS_DUAL_FROM": config.ONE_PASS_DUAL,
        "ONE_PASS_ORDERED_FROM": itertools.product(widths, (False, True)) if in_order else (),
    }
    for name, keys in tables.items():
        monkeypatch.setattr(config, name, dict.fromkeys(keys, 0))
    monkeypatch.setattr(config, "ONE_PASS_FILLS", 0)
    taken = []

    def listening(name, job, *args):
        taken.append(name)
        return job(*args)

    for name in ("_in_one_pass", "_dual_in_one_pass"):
        monkeypatch.setattr(jobs, name, functools.partial(listening, name, getattr(jobs, name)))
    return taken
