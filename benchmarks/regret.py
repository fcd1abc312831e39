"""What a changed import costs: the default, beside all that one could have called instead, over the calls of `everyday.py`.

Regret is the time of the default over that of the best other: another implementation, or a family of kernels that the default
did not choose.  Above 1 somebody waits for nothing.  The table begins with the worst, and the exit status says whether it is
above `--at-most`.  Every result is first checked against float64; what is wrong is reported and not timed.

    python benchmarks/regret.py                                   # JAX: device time of compiled calls
    python benchmarks/regret.py --framework torch                 # PyTorch: wall time of eager calls
    python benchmarks/regret.py --framework torch --graphs        # device time, by CUDA graphs
    python benchmarks/regret.py --gpus 2 --calls Swin BEiT decoding
    python benchmarks/regret.py --small --quick --calls BEiT      # tiny, on a CPU
    python benchmarks/regret.py --draw jax.json torch.json        # tables and one picture of several runs that were saved

Each call is compiled and checked by a process of its own, so many `--at-once`.  Once these are ready, one after the other times
on a GPU.  In JAX a chain of calls runs in one jitted scan, and the chain's own time is taken off, so that no host sets the pace.
"""

import argparse
import datetime
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from everyday import CALLS
from measure import Failure, attempt, locked, mistake, version_of, write
from regret_page import LOSS, Run, heat_map, read, tables

JOBS = ("forward", "forward + JVP", "forward + backward", "JVP + dual backward")


def one_call(name: str, options: argparse.Namespace, path: Path, together: int) -> None:
    """Writes the milliseconds of each job and contender of one call to this path, with .json.  So many calls are compiled
    together, of which this is one."""
    framework = importlib.import_module(f"{options.framework}_everyday")
    call = CALLS[name].small() if options.small else CALLS[name]
    arrays, failures = framework.draw(call), {}
    timers: dict[tuple[str, str], Callable[[], float]] = {}
    for job in options.jobs:
        values, allowed = framework.exact(call, job, arrays)
        known: set[str] = set()  # programs
        for who, attention in framework.contenders(call, job).items():
            made = attempt(
                framework, lambda j=job, a=attention, k=known: framework.prepare(call, j, a, arrays, k, options)
            )
            if made is None:  # a family that the default has chosen
                continue
            reason = made.reason if isinstance(made, Failure) else mistake(made[0], values, allowed)
            if reason:
                failures[f"{job}, {who}"] = reason
            else:
                timers[job, who] = made[1]
    if options.gpus:
        wait_for_others(path, together, options.patience)
    with locked():
        samples: dict[tuple[str, str], list[float]] = {key: [] for key in timers}
        for turn in range(options.rounds):
            order = list(timers)[turn % len(timers) :] + list(timers)[: turn % len(timers)]
            for key in order:
                samples[key].append(timers[key]())
    times = medians(samples, failures)
    path.with_suffix(".json").write_text(json.dumps(dict(times=times, failures=failures)))


def medians(samples: dict[tuple[str, str], list[float]], failures: dict[str, str]) -> dict[str, dict[str, float]]:
    """By job and contender; a failure where a call is so short that its chain's own time, which is taken off, leaves nothing."""
    times: dict[str, dict[str, float]] = {}
    for (job, who), found in samples.items():
        if (middle := statistics.median(found)) > 0:
            times.setdefault(job, {})[who] = middle
        else:
            failures[f"{job}, {who}"] = f"too short to be timed: {middle:.2g} ms"
    return times


def wait_for_others(path: Path, together: int, patience: float) -> None:
    """Nobody compiles beside a timing; but whoever takes too long is not waited for."""
    path.with_suffix(".ready").touch()
    end = time.monotonic() + patience
    while len([*path.parent.glob("*.ready")]) < together and time.monotonic() < end:
        time.sleep(0.5)


def all_calls(options: argparse.Namespace, arguments: list[str]) -> Iterator[dict[str, dict]]:
    """By name, what `one_call` wrote of each so far.  On a CPU one call is timed after the other; on GPUs some are compiled at
    once."""
    found, end = {}, time.monotonic() + options.limit
    at_once = options.at_once if options.gpus else 1
    for first in range(0, len(options.calls), at_once):
        with tempfile.TemporaryDirectory() as folder:
            found |= some_calls(options.calls[first : first + at_once], options, arguments, Path(folder), end)
        yield found


def some_calls(
    calls: list[str], options: argparse.Namespace, arguments: list[str], folder: Path, end: float
) -> dict[str, dict]:
    """Of calls that are compiled at the same time, each by a process, and timed when all are ready."""
    processes, found = [], {}
    for i, name in enumerate(calls):
        environment = dict(os.environ, XLA_PYTHON_CLIENT_PREALLOCATE="false", OMP_NUM_THREADS="1")
        if options.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = str(i % options.gpus)
        of_one = ["--gpus", str(options.gpus), "--one", name, str(folder / str(i)), str(len(calls))]
        with open(folder / f"{i}.log", "w") as log:
            processes.append(
                subprocess.Popen([sys.executable, __file__, *arguments, *of_one], env=environment, stderr=log)
            )
    for i, (name, process) in enumerate(zip(calls, processes, strict=True)):
        try:
            process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
        path = folder / f"{i}.json"
        lines = (folder / f"{i}.log").read_text().strip().splitlines()
        ended = "; ".join(lines[-2:]) or "took too long"
        found[name] = json.loads(path.read_text()) if path.exists() else dict(times={}, failures={"all": ended})
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", default="jax", choices=["jax", "torch"])
    parser.add_argument("--graphs", action="store_true", help="PyTorch's device time, by CUDA graphs")
    parser.add_argument(
        "--calls", nargs="+", default=list(CALLS), metavar="NAME", help="of everyday.py; all by default"
    )
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=JOBS)
    parser.add_argument("--gpus", type=int, help="how many to use; those at hand by default, none on a CPU")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--small", action="store_true", help="calls of the same kinds, small: to test the script")
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1, help="calls that are compiled together")
    parser.add_argument("--patience", type=float, default=200, help="seconds that processes wait for one another")
    parser.add_argument("--limit", type=float, default=3600, help="seconds for all")
    parser.add_argument("--at-most", type=float, default=LOSS, help="regret, above which the exit status is 1")
    parser.add_argument("--output", type=Path, default=Path("results/regret"), help="without an ending")
    parser.add_argument("--draw", nargs="+", type=Path, metavar="RUN.json", help="saved runs, and time nothing")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)  # what the processes are called with
    options = parser.parse_args(arguments)
    for name in options.calls:
        if name not in CALLS:
            parser.error(f"--calls must be among {', '.join(CALLS)}: got {name}")
    if options.at_once < 1:
        parser.error(f"--at-once must be 1 or more: got {options.at_once}")
    if options.quick:
        options.rounds = 1
    if options.one:
        name, path, together = options.one
        one_call(name, options, Path(path), int(together))
        return 0
    if options.draw:
        draw(read(options.draw), options.output)
        return 0
    framework = importlib.import_module(f"{options.framework}_everyday")
    if options.gpus is None:
        options.gpus = framework.gpus()
    title, about = titles(options)
    for found in all_calls(options, sys.argv[1:] if arguments is None else arguments):
        run = Run(title, f"{framework.device()}, {about}", found)
        run.save(options.output.with_suffix(".json"))  # whatever interrupts the next
    for row in run.regrets:
        timed = f"{row.milliseconds:9.4f} ms, {row.best} {row.best_milliseconds:9.4f} ms"
        print(f"{row.ratio:6.2f}  {row.call:26s} {row.job:20s} {timed}")
    for name, result in run.found.items():
        for what, reason in result["failures"].items():
            print(f"{name}, {what}: {reason}")
    times = [(name, job, t) for name, r in run.found.items() for job, t in r["times"].items()]
    every = [(name, job, who, ms) for name, job, t in times for who, ms in t.items()]
    write(options.output.with_suffix(".csv"), ("call", "job", "who", "milliseconds"), every)
    draw([run], options.output)
    return 1 if run.failures or not run.regrets or run.regrets[0].ratio > options.at_most else 0


def titles(options: argparse.Namespace) -> tuple[str, str]:
    """What a run is called, and how and when it was made."""
    title = {"jax": "JAX", "torch": "PyTorch, CUDA graphs" if options.graphs else "PyTorch, eager"}[options.framework]
    time_of = "wall time" if title.endswith("eager") else "device time"
    libraries = {"jax": ("jax", "jax-triton"), "torch": ("torch",)}[options.framework]
    versions = ", ".join(f"{name} {version_of(name)}" for name in (*libraries, "triton"))
    size = ", small calls" if options.small else ""
    return title, f"{time_of}, medians of {options.rounds}{size}, {versions}, {datetime.date.today():%d %B %Y}"


def draw(runs: list[Run], path: Path) -> None:
    """Tables and picture, beside each other."""
    import matplotlib

    matplotlib.use("Agg")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".md").write_text(tables(runs) + "\n")
    if any(run.regrets for run in runs):
        heat_map(runs).savefig(path.with_suffix(".png"), dpi=100)


if __name__ == "__main__":
    sys.exit(main())
