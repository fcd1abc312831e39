"""Every kernel on short sequences, for tools that watch a process, and whether it computes the same bits every time.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/helpers/every_kernel.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/helpers/every_kernel.py
    compute-sanitizer --tool synccheck --error-exitcode 1 python tests/helpers/every_kernel.py
    python tests/helpers/every_kernel.py --repeats 1000

Run it once without the tools first: they would watch the compiler too.
"""

import argparse
import dataclasses
import itertools
import math

import torch

from jax_flash_jvp.kernels import jobs
from jax_flash_jvp.kernels.hopper import config
from jax_flash_jvp.problem import Operands, Problem
from torch_bridge.launch import TorchLauncher

JOBS = ("forward", "forward_dual", "tangent", "backward", "backward_dual", "backward_tangent")
HOPPER = ("whole", "short", "shared", "causal", "window-lengths", "mask", "segments")
KINDS = (*HOPPER, "bias", "soft-cap", "dropout")
CASES = [
    *itertools.product(["hopper"], HOPPER, (32, 64, 72, 128, 256), JOBS),
    *itertools.product(["hopper"], ["long", "long causal-lengths"], (64, 72, 96, 128), ["backward"]),  # in one pass
    *itertools.product(["hopper"], ["long", "long causal-lengths"], (64,), ["backward_dual"]),  # likewise
    *itertools.product(["portable"], KINDS, (64, 72), JOBS),
    *itertools.product(["portable"], ["tiny-bias"], (16, 64), ["backward", "backward_dual"]),  # in one tile
]


def job(family, kind, head_dim, name, deterministic):
    """A function without arguments, and what it is to return every time, if `deterministic`."""
    torch.manual_seed(0)
    heads, key_heads = 4, 2
    # short: so many blocks of the same length that a program computes several, one after the other; and where blocks differ,
    # so many that programs take them from a counter
    sizes = {
        "short": (35, 190, 180),
        "whole": (1, 384, 256),
        "shared": (2, 2300, 1100),
        "long": (2, 2100, 2050),
        "tiny-bias": (600, 21, 30),
    }
    key_heads = heads if "tiny" in kind else key_heads
    batch, queries, keys = sizes.get(kind.split()[0], (24, 290, 270))
    draw = lambda *shape: torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    rows = lambda: Operands(
        draw(batch, queries, heads, head_dim), draw(batch, keys, key_heads, head_dim), draw(batch, keys, key_heads, head_dim)
    )  # fmt: skip
    integers = lambda *n: torch.tensor(n, dtype=torch.int32, device="cuda")
    x, tx = rows(), rows()
    problem = Problem(
        scale=head_dim**-0.5, is_causal="causal" in kind, implementation=family, deterministic=deterministic
    )
    if "lengths" in kind:
        problem = dataclasses.replace(problem, window=(100, 50) if "window" in kind else None)
        several = lambda *n: integers(*n * (batch // len(n)))
        x = x._replace(query_lengths=several(queries, 131), key_lengths=several(200, keys))
    if kind == "mask":
        x = x._replace(mask=torch.rand(batch, 1, queries, keys, device="cuda") < 0.5)
    if kind == "segments":
        ids = lambda n: (torch.arange(n, device="cuda", dtype=torch.int32) // 70).expand(batch, n).contiguous()
        x = x._replace(query_segments=ids(queries), key_segments=ids(keys))
    if kind == "tiny-bias":
        x, tx = (a._replace(bias=draw(batch, 1, queries, keys)) for a in (x, tx))
    if kind == "bias":
        x, tx = (a._replace(bias=draw(1, heads, queries, keys)) for a in (x, tx))
    if kind == "soft-cap":
        problem = dataclasses.replace(problem, soft_cap=1.0)
    if kind == "dropout":
        problem = dataclasses.replace(problem, dropout_rate=0.3)
        x = x._replace(seed=integers(3, 4, 0, 0, 0).expand(batch, 5).contiguous())
    if kind.startswith("long"):
        if deterministic:
            config.ORDER_MAY_COST = config.ORDERED_UNLIKE_UP_TO = math.inf
        config.ONE_PASS_FROM = dict.fromkeys(config.ONE_PASS, (config.OnePassThreshold(0, 0),))
        config.ONE_PASS_DUAL_FROM = dict.fromkeys(config.ONE_PASS_DUAL, (config.OnePassThreshold(0, 0),))
    launcher = TorchLauncher(x.query.device)
    o, log_sum_exp, t_o, mu = jobs.forward(launcher, problem, x, tx)
    y, cy, along = (o, log_sum_exp), (draw(*o.shape), None), (tx, (t_o, mu), (draw(*o.shape), None))
    every, none = (True, True, True, x.bias is not None), (False,) * 4
    run = {
        "forward": lambda: jobs.forward(launcher, problem, x),
        "forward_dual": lambda: jobs.forward(launcher, problem, x, tx),
        "tangent": lambda: jobs.tangent(launcher, problem, x, log_sum_exp, tx),
        "backward": lambda: jobs.backward(launcher, problem, x, y, cy, every),
        "backward_dual": lambda: sum(jobs.backward_dual(launcher, problem, x, y, cy, along, every, every), ()),
        "backward_tangent": lambda: jobs.backward_dual(launcher, problem, x, y, cy, along, none, every)[1],
    }[name]

    def results():
        launcher.launched.clear()
        return [a for a in run() if a is not None]

    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--families", nargs="+", default=["hopper", "portable"])
    parser.add_argument(
        "--part", nargs=2, type=int, default=(0, 1), metavar=("I", "N"), help="part I of N of the cases"
    )
    options = parser.parse_args()
    part, parts = options.part
    different = 0
    cases = [case for case in CASES if case[0] in options.families][part::parts]
    for case in cases:
        results = job(*case, options.repeats > 1)
        first = results()
        assert all(a.isfinite().all() for a in first if a.shape[-1] == case[2]), case
        unequal = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(options.repeats - 1):
            # as integers, for -inf is a result like any other
            unequal += sum(
                (a.view(torch.uint8) != b.view(torch.uint8)).sum() for a, b in zip(first, results(), strict=True)
            )
        different += bool(unequal)
        print(
            *case, f"{len(first)} results", f"{unequal.item()} bytes differ" if options.repeats > 1 else "", flush=True
        )
    print(f"{len(cases)} cases, {different} of them with different bits")
    raise SystemExit(bool(different))


if __name__ == "__main__":
    main()
