"""Looks for better rows of the tables of tiles and rings on the GPU at hand, and prints them as the tables have them.

    python benchmarks/tune.py --jobs forward --head-dims 64                        # both families, or the one that runs here
    python benchmarks/tune.py --family hopper --jobs key_side query_side --lengths 256 2048 8192 --features none causal
    python benchmarks/tune.py --family portable --jobs forward_dual --head-dims 128 --dtype float32 --precision tf32

For each row, all candidates that fit are compiled in parallel, each by a run of its own, and dropped if they spill more than
`--spill` bytes and more than the present row.  A candidate whose results differ from the present row's is reported and not timed:
run `pytest -m gpu` first, which compares those with float64.  The others take turns in CUDA graphs, once quickly, then the
fastest once more.  A row serves all `--lengths` and `--features`: what counts is the geometric mean of the ratios to the time of
the present row, which stays unless another gains `--gain`.

Each line goes into the table that is named above it, and what was found into `docs/dev/tuning-log.md`.
"""

import argparse
import datetime
import functools
import itertools
import math
import multiprocessing
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import triton

import torch_calls
from jax_flash_jvp.kernels import jobs
from jax_flash_jvp.kernels.hopper import forward as hopper_forward
from jax_flash_jvp.kernels.hopper import two_sides as hopper_backward
from jax_flash_jvp.kernels.portable import backward, bias, forward
from jax_flash_jvp.problem import Operands, Problem
from measure import FEATURES, Case, add_timing_options, in_turns, parse
from proposals import FAMILIES, KERNELS
from torch_bridge.launch import TorchLauncher

TUNED = (  # kernels that tiles and rings are for
    forward.forward, backward.query_side, backward.key_side, bias.score_side, hopper_forward.forward, hopper_backward.backward,
)  # fmt: skip
HEADS = {64: 32, 128: 24}
# how far results of two candidates may be apart, where each is right
TOLERANCE = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 2e-3}


class Shape(NamedTuple):
    """What a job is timed on."""

    case: Case
    family: str
    job: str  # of KERNELS
    precision: str
    target: int

    @property
    def row(self) -> Any:
        return FAMILIES[self.family](self.job, self.case.head_dim, self.case.dtype, self.precision, self.target)


def prepared(shape: Shape) -> Callable[[], list[torch.Tensor]]:
    """The job, without arguments: its results."""
    case = shape.case
    q, k, v, tq, tk, tv, g, h = (a.transpose(1, 2).contiguous() for a in torch_calls.draw(case))
    arrays, device = torch_calls.extra(case), q.device
    x, tx = Operands(q, k, v), Operands(tq, tk, tv)
    if case.feature == "bias":
        x, tx = (a._replace(bias=arrays["attn_mask"]) for a in (x, tx))
    elif case.feature == "mask":
        x = x._replace(mask=arrays["attn_mask"])
    elif case.feature == "padding":
        x = x._replace(key_lengths=torch.full((case.batch,), 3 * case.length // 4, dtype=torch.int32, device=device))
    problem = Problem(
        scale=case.head_dim**-0.5, is_causal=case.feature == "causal", precision=shape.precision,
        implementation=shape.family,
    )  # fmt: skip
    launcher, kernel = TorchLauncher(device), shape.row.kernel
    want, none = tuple(name in kernel.wanted for name in "qkvb"), (False,) * 4
    tx = tx if kernel.tangents else Operands(None, None, None)
    o, log_sum_exp, t_o, mu = jobs.forward(launcher, problem, x, tx) if kernel.wanted else (None,) * 4
    y, cy, along = (o, log_sum_exp), (g, None), (tx, (t_o, mu), (h, None))

    def run() -> list[torch.Tensor]:
        launcher.launched.clear()  # it would keep all results
        if not kernel.wanted:
            found = jobs.forward(launcher, problem, x, tx)[::2]
        elif not kernel.tangents:
            found = jobs.backward(launcher, problem, x, y, cy, want)
        else:
            both = jobs.backward_dual(launcher, problem, x, y, cy, along, want if kernel.gradients else none, want)
            found = [*both[0], *both[1]]
        return [a for a in found if a is not None]

    return run


def spills() -> dict[int, int]:
    """Bytes that a thread spills, by kernel that this process has loaded."""
    caches = [kernel.device_caches[torch.cuda.current_device()][0] for kernel in TUNED]
    loaded = (k for cache in caches for k in cache.values() if hasattr(k, "n_spills"))  # one that does not fit is not
    return {id(k): 4 * k.n_spills for k in loaded}


def compiled(shape: Shape, candidate: Any) -> int | str:
    """Bytes that a thread spills, or why the candidate cannot run."""
    try:
        run = prepared(shape)
        before = spills()
        with shape.row.taking(candidate):
            run()
        torch.cuda.synchronize()
        return max((n for k, n in spills().items() if k not in before), default=0)
    except Exception as error:  # of compilers too, which stop at some
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[0][:100]}"


def fitting(shapes: list[Shape], options: argparse.Namespace) -> dict[Any, int]:
    """What the candidates spill that can run on all shapes, the present row first."""
    candidates = shapes[0].row.proposals()
    plan = [*itertools.product(shapes, candidates)]
    # a process of its own for each: after an illegal memory access nothing more runs in one
    with multiprocessing.get_context("spawn").Pool(min(options.processes, len(plan)), maxtasksperchild=1) as pool:
        found = pool.starmap_async(compiled, plan, chunksize=1).get(timeout=60 * len(plan))
    worst: dict[Any, int] = {}
    for (_, candidate), outcome in zip(plan, found, strict=True):
        if isinstance(outcome, str):
            print(f"  {candidate}: {outcome}")
            worst[candidate] = sys.maxsize
        else:
            worst[candidate] = max(outcome, worst.get(candidate, 0))
    allowed = {candidates[0]} if shapes[0].row.present else set()
    return {c: n for c, n in worst.items() if n <= options.spill or (c in allowed and n < sys.maxsize)}


def captured(shape: Shape, candidates: Iterable[Any]) -> dict[Any, Callable[[], None]]:
    """Of each candidate whose results are the first one's, a graph's replay."""
    run, expected, calls, pool = prepared(shape), None, {}, torch.cuda.graph_pool_handle()
    for candidate in candidates:
        with shape.row.taking(candidate):
            results = [a.double() for a in run()]
            expected = expected or results  # of the present row
            apart = max(((a - b).norm() / b.norm()).item() for a, b in zip(results, expected, strict=True))
            if not apart <= TOLERANCE[shape.case.dtype]:
                print(f"  {candidate}, {shape.case}: WRONG, {apart:.1e} from the present row's results")
                continue
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                run()
        calls[candidate] = functools.partial(replay, graph, run)
    return calls


def replay(graph: torch.cuda.CUDAGraph, run: Callable) -> None:
    """`run` has the arrays that the graph reads."""
    graph.replay()


def ratios(
    calls: list[dict[Any, Callable]], candidates: list[Any], options: argparse.Namespace
) -> dict[Any, list[float]]:
    """Of times on each shape to the first candidate's."""
    found: dict[Any, list[float]] = {c: [] for c in candidates}
    for of_shape in calls:
        medians, _ = in_turns(torch_calls, {c: of_shape[c] for c in candidates}, options)
        for c in candidates:
            found[c].append(medians[c] / medians[candidates[0]])
    return found


def tuned(shapes: list[Shape], options: argparse.Namespace) -> str:
    """The row, as its table has it."""
    row, fits = shapes[0].row, fitting(shapes, options)
    if not fits:
        return "# nothing fits"
    calls = [captured(shape, fits) for shape in shapes]
    right = [c for c in fits if all(c in of_shape for of_shape in calls)]
    print(f"  {len(row.proposals())} candidates, of which {len(fits)} fit and {len(right)} are right")
    quick = argparse.Namespace(**dict(vars(options), rounds=3, rest=0.0))
    first = ratios(calls, right, quick)
    best = sorted(right[1:], key=lambda c: math.prod(first[c]))[: options.best]
    again = ratios(calls, [*right[:1], *best], options)
    means = {c: math.prod(rs) ** (1 / len(rs)) for c, rs in again.items()}
    for c in sorted(means, key=means.__getitem__):
        print(f"  {means[c]:.3f} {c}: {' '.join(f'{r:.3f}' for r in again[c])}")
    fastest = min(means, key=means.__getitem__)
    if right[0] == row.present and means[fastest] > 1 - options.gain:
        fastest = row.present
    return row.written(fastest, fits[fastest], about(shapes))


def about(shapes: list[Shape]) -> str:
    """GPU, date, versions, and on which shapes."""
    gpu = torch.cuda.get_device_name().removeprefix("NVIDIA ").split()[0] if torch.cuda.is_available() else "no GPU"
    lengths = " and ".join(str(n) for n in dict.fromkeys(s.case.length for s in shapes))
    features = [f for f in dict.fromkeys(s.case.feature for s in shapes) if f != "none"]
    return ", ".join([gpu, f"{datetime.date.today()}", f"Triton {triton.__version__}", f"L = {lengths}", *features])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", default=[*FAMILIES], choices=FAMILIES)
    parser.add_argument("--jobs", nargs="+", default=["forward", "forward_dual"], choices=KERNELS)
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--heads", type=int, help="by default 32 at a head dimension of 64, else 24")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192])
    parser.add_argument("--features", nargs="+", default=["none"], choices=FEATURES)
    parser.add_argument("--dtype", default="bfloat16", choices=TOLERANCE)
    parser.add_argument("--precision", default="tf32", choices=["tf32", "ieee"], help="of float32 matmuls")
    parser.add_argument("--processes", type=int, default=14, help="that compile")
    parser.add_argument("--spill", type=int, default=800, help="bytes that a thread may spill")
    parser.add_argument("--best", type=int, default=5, help="of the candidates that are timed once more")
    parser.add_argument("--gain", type=float, default=0.02, help="for which the present row is left")
    add_timing_options(parser, rounds=9)
    options = parse(parser, arguments)
    if any("score" in job for job in options.jobs) and options.features != ["bias"]:
        parser.error("--features must be bias for the score side, which computes its gradient")
    if not torch.cuda.is_available():
        parser.error("an NVIDIA GPU must be there, to time what is proposed")
    major, minor = torch.cuda.get_device_capability()
    target, lines = 10 * major + minor, []
    for family, job, head_dim in itertools.product(options.family, options.jobs, options.head_dims):
        heads = options.heads or HEADS.get(head_dim, 24)
        shapes = [
            Shape(Case(options.batch, length, heads, head_dim, feature, options.dtype), family, job, options.precision, target)
            for length, feature in itertools.product(options.lengths, options.features)
        ]  # fmt: skip
        try:
            place = shapes[0].row.place
        except KeyError as error:
            print(f"{family}: {error.args[0]}")
            continue
        print(f"{family}, {job}, head dimension {head_dim}", flush=True)
        lines += [f"# {place}", tuned(shapes, options)]
        torch_calls.release()
    print("\n".join(["", *lines]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
