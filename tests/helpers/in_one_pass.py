"""Backwards that go once over the scores, however short they are."""

import functools
import itertools


def take_one_pass(monkeypatch):
    """Wherever a kernel of one pass serves the call, in order where bits are to be the same on every run.  Returns a list to
    which each job is added that does so."""
    from jax_flash_jvp.kernels.hopper import config, jobs

    tables = {
        "ONE_PASS_FROM": config.ONE_PASS,
        "ONE_PASS_DUAL_FROM": config.ONE_PASS_DUAL,
        "ONE_PASS_ORDERED_FROM": itertools.product(config.ONE_PASS, (False, True)),
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
