"""Backwards that go once over the scores, however short they are."""

import itertools


def take_one_pass(monkeypatch):
    """Wherever a kernel of one pass serves the call, in order where bits are to be the same on every run."""
    from jax_flash_jvp.kernels.hopper import config

    tables = {
        "ONE_PASS_FROM": config.ONE_PASS,
        "ONE_PASS_DUAL_FROM": config.ONE_PASS_DUAL,
        "ONE_PASS_ORDERED_FROM": itertools.product(config.ONE_PASS, (False, True)),
    }
    for name, keys in tables.items():
        monkeypatch.setattr(config, name, dict.fromkeys(keys, 0))
    monkeypatch.setattr(config, "ONE_PASS_FILLS", 0)
