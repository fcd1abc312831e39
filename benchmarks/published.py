"""Two published tables of attention's JVP, made on the GPU at hand with PyTorch.

jvp_bench, of the thread Dao-AILab/flash-attention#1672, counts FLOPs with torch.utils.flop_counter over the math backend:

    python benchmarks/published.py jvp_bench --bsz 1 --model-dim 2048 --head-dim 64 --seq-len 8192

Its 497.6 TFLOP/s on an H100 came of a kernel that left three quarters of the output unwritten.  Here a result is checked
against float64 before it is timed.

sdpa_jvp, of lumalabs/tvm (jvp_utils/README.md), has time and peak memory of forward + JVP and of its backward, whose FLOPs
it counts as those of naive attention (6 and 12 products), and naive attention as far as it fits:

    python benchmarks/published.py sdpa_jvp --heads 1 24 --lengths 128 1024 4096 8192 16384 32768

Time is that of the job alone; memory includes arguments, results and what the backward keeps.  The exit status is 1 if
anything but memory stood in the way of a result.
"""

import argparse
import sys
from pathlib import Path

import torch_calls as framework
from measure import Case, Contender, Failure, Oracle, add_timing_options, in_turns, parse, prepare, write

EVERYONE: dict[str, Contender] = framework.CONTENDERS | framework.EAGER
BENCHED = {  # contenders in jvp_bench; the forward is its sanity check
    "forward + JVP": [framework.OURS, "SDPA math, compiled", "SDPA math", framework.PEER],
    "forward": [framework.OURS, "SDPA flash"],
}
COUNTED = {"forward + JVP": 6, "dual backward": 12}  # products, in the table of sdpa_jvp
LENGTHS = [128, 1024, 4096, 8192, 16384, 32768]
# job, heads: its milliseconds and MB by length
PUBLISHED = {
    ("forward + JVP", 1): [(1.07, 32.25), (1.06, 34.01), (1.04, 40.05), (1.48, 48.09), (2.58, 64.19), (11.34, 96.38)],
    ("forward + JVP", 24): [
        (1.02, 38.04),
        (1.01, 80.28),
        (4.25, 225.1),
        (16.67, 418.3),
        (64.09, 804.5),
        (286.44, 1577),
    ],
    ("dual backward", 1): [(1.09, 64.69), (1.21, 69.52), (2.06, 86.06), (4.66, 108.1), (15.18, 152.3), (60.06, 240.5)],
    ("dual backward", 24): [(1.21, 80.55), (1.85, 196.4), (22.91, 593.5), (90.73, 1123), (358.9, 2182), (1434, 4300)],
}


class Table:
    """Rows for a CSV file, and whether anything failed for another reason than memory."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.failed, self.rows = options, False, []

    def measure(self, job: str, case: Case, contenders: list[str], operations: float) -> dict[str, dict]:
        """By contender: milliseconds, TFLOP/s, their ratio to the product's, MiB; all missing of what did not fit."""
        arrays = framework.draw(case)
        oracle, prepared, results = Oracle(framework, job, {}, arrays), {}, {}
        for who in contenders:
            outcome = prepare(framework, EVERYONE[who], job, {}, arrays, oracle)
            if isinstance(outcome, Failure):
                print(f"{job}, {who}, {case}: {outcome.reason}", flush=True)
                self.failed |= not outcome.out_of_memory or who == framework.OURS
            else:
                prepared[who] = outcome
        medians, matmul = in_turns(framework, {who: p.call for who, p in prepared.items()}, self.options)
        for who, ms in medians.items():
            rate, mib = operations / ms * 1e-9, prepared[who].peak_mib
            results[who] = dict(ms=ms, tflops=rate, of_matmul=rate / matmul, mib=mib)
            self.rows.append((job, who, *case, ms, operations, rate, rate / matmul, mib))
        print(f"{job}, {case}: {operations * 1e-9:.1f} GFLOP; the bf16 matmul: {matmul:.0f} TFLOP/s", flush=True)
        prepared.clear()
        framework.release()
        return results

    def write(self) -> None:
        columns = (*Case._fields, "milliseconds", "operations", "tflops", "of_matmul", "peak_mib")
        write(self.options.output.with_suffix(".csv"), ("job", "who", *columns), self.rows)


def jvp_bench(table: Table, options: argparse.Namespace) -> None:
    heads = options.model_dim // options.head_dim
    case = Case(options.bsz, options.seq_len, heads, options.head_dim, dtype=options.dtype)
    for job in BENCHED:
        asked = [w for w in options.contenders or BENCHED[job] if w in EVERYONE and job in EVERYONE[w].jobs]
        results = table.measure(job, case, asked, framework.counted_operations(job, case))
        for who, r in results.items():
            print(
                f"  {who:20s} {r['tflops']:6.1f} TFLOP/s = {r['of_matmul']:.2f} of the product; {r['ms']:.3f} ms, "
                f"{r['mib']:.0f} MiB",
                flush=True,
            )


def sdpa_jvp(table: Table, options: argparse.Namespace) -> None:
    asked = options.contenders or [framework.OURS, "naive"]
    for job, products in COUNTED.items():
        contenders = [who for who in asked if job in EVERYONE[who].jobs]
        lines = [["H", "S", *(f"[ms] {w}" for w in contenders), *(f"[MiB] {w}" for w in contenders)]]
        lines[0] += ["[ms] published", "[MB] published", "GFLOPs"]
        for heads in options.heads:
            fits = list(contenders)
            for length in sorted(options.lengths):
                case = Case(1, length, heads, options.head_dim, dtype=options.dtype)
                results = table.measure(job, case, fits, case.operations(products))
                fits = [who for who in fits if who in results]
                figures = [f"{results[w][k]:.3f}" if w in results else "-" for k in ("ms", "mib") for w in contenders]
                known = dict(zip(LENGTHS, PUBLISHED.get((job, heads), ()), strict=False)).get(length, ("-", "-"))
                known = known if options.head_dim == 128 else ("-", "-")
                lines.append([heads, length, *figures, *known, f"{case.operations(products) * 1e-9:.4g}"])
        print(f"\n{job}")
        for i, line in enumerate(lines):
            print("| " + " | ".join(map(str, line)) + " |" + ("\n" + "|---" * len(line) + "|" if i == 0 else ""))
        print(flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = parser.add_subparsers(required=True)
    for make in (jvp_bench, sdpa_jvp):
        table = tables.add_parser(make.__name__)
        table.set_defaults(make=make)
        table.add_argument("--head-dim", type=int, default=64 if make is jvp_bench else 128)
        table.add_argument("--dtype", default="bfloat16")
        table.add_argument("--contenders", nargs="+", choices=list(EVERYONE))
        table.add_argument("--output", type=Path, default=Path("results", make.__name__), help="without an ending")
        add_timing_options(table, rounds=5)
        if make is jvp_bench:
            table.add_argument("--bsz", type=int, default=1)
            table.add_argument("--model-dim", type=int, default=2048)
            table.add_argument("--seq-len", type=int, default=8192)
        else:
            table.add_argument("--heads", nargs="+", type=int, default=[1, 24])
            table.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    options = parse(parser, arguments)
    if options.make is jvp_bench and options.model_dim % options.head_dim:
        parser.error(f"--model-dim must be a multiple of --head-dim: got {options.model_dim} and {options.head_dim}")
    print(f"{framework.describe()}, {options.dtype}")
    table = Table(options)
    options.make(table, options)
    table.write()
    return 1 if table.failed else 0


if __name__ == "__main__":
    sys.exit(main())
