"""Times attention and its derivatives on the GPU at hand, beside other implementations and a matmul.

Every result is first checked against float64: an implementation that fails is reported and not timed.  Contenders take
turns, in another order each round, so that neither drift nor a predecessor's heat favours one; figures are medians.

    python benchmarks/attention.py                                  # L = 8192, H32 D64 and H24 D128, bf16
    python benchmarks/attention.py --lengths 1024 4096 16384 --feature causal --output results/causal
    python benchmarks/attention.py --batch 8 --lengths 2048 --heads 16 16 --feature mask       # or padding, or bias
    python benchmarks/attention.py --framework torch --lengths 32768 --feature teacher-forcing   # or block-sparse, or varlen
    python benchmarks/attention.py --framework torch --jobs "forward + JVP" --head-dims 128 --heads 16 --quick
    python benchmarks/attention.py --batch 128 --lengths 256 --head-dims 64 72 --heads 16 16       # as image models have it
    python benchmarks/attention.py --framework torch --contenders torch_bridge before --before ../another-checkout
    python benchmarks/attention.py --lengths 1024 4096 16384 --also results/torch.csv      # both frameworks in one picture
    python benchmarks/attention.py --devices 2 --lengths 32768 --head-dims 128     # one sequence over GPUs, beside one of them
    python benchmarks/attention.py --lengths 64 --head-dims 16 --heads 2 --matmul-size 64 --quick     # on a CPU

JAX: beside its portable kernels alone, cuDNN and XLA; and beside fa4-jax where that is installed.  PyTorch: beside
scaled_dot_product_attention through cuDNN, FlashAttention, FlexAttention and, compiled, the math backend; and beside
jvp-flash-attention or its fork with masks of blocks (jefequien/jvp_flash_attention), FlashAttention-3 (flash_attn_interface) and
4 (flash_attn.cute) where these are installed; with --devices, beside PyTorch's ring and NVlabs/rcm where these can be imported.

TFLOP/s count the matmuls that the job needs: 2 for the forward, 6 for forward + JVP, 5 for the backward, 15 for the
dual backward (the gradient through forward + JVP), each of 2 B H Lq Lk D operations, half of that where causal, three quarters
where the last quarter of the keys is padding.  A mask hides half of all scores at random, and saves nothing; a bias is one of
every head.  Teacher forcing is of sixteen blocks, block-sparse attention leaves a tenth of blocks of 128² at random, and varlen
packs seven documents: of each as much as is seen.
"""

import argparse
import csv
import importlib
import statistics
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from measure import (
    FEATURES,
    PRODUCTS,
    Case,
    Failure,
    Oracle,
    Prepared,
    add_timing_options,
    in_turns,
    parse,
    prepare,
    write,
)

HEADS = {64: 32, 128: 24}
OF_DEVICES = ("forward + backward", "JVP + dual backward")  # more jobs, with --devices


class Row(NamedTuple):
    job: str
    who: str
    length: int
    heads: int
    head_dim: int
    feature: str
    milliseconds: float
    tflops: float
    of_matmul: float
    temporary_mib: float
    batch: int


def run(framework: ModuleType, options: argparse.Namespace) -> tuple[list[Row], bool]:
    """The rows, which are written as they come, and whether all of our own results were right."""
    rows, all_right = [], True
    for heads, head_dim in zip(options.heads, options.head_dims, strict=True):
        for length in options.lengths:
            case = Case(options.batch, length, heads, head_dim, options.feature, options.dtype)
            arrays, extra = framework.draw(case), framework.extra(case)
            for job in options.jobs:
                prepared = {}
                oracle = Oracle(framework, job, extra, arrays)
                for who in options.contenders:
                    contender = framework.CONTENDERS[who]
                    if job not in contender.jobs or (contender.quadratic and length > options.longest_xla):
                        continue
                    outcome = prepare(framework, contender, job, extra, arrays, oracle)
                    if isinstance(outcome, Failure):
                        print(f"{job}, {who}, {case}: {outcome.reason}", flush=True)
                        all_right &= who != framework.OURS
                    else:
                        prepared[who] = outcome
                rows += time_job(framework, job, case, prepared, options)
                write(options.output.with_suffix(".csv"), Row._fields, rows)
                prepared.clear()
                framework.release()
    return rows, all_right


def time_job(framework: ModuleType, job: str, case: Case, prepared: dict[str, Prepared], options) -> list[Row]:
    rows = []
    medians, matmul = in_turns(framework, {who: p.call for who, p in prepared.items()}, options)
    for who, ms in medians.items():
        rate, memory = case.operations(PRODUCTS[job]) / ms * 1e-9, prepared[who].temporary_mib
        rows.append(Row(job, who, *case[1:5], ms, rate, rate / matmul, memory, case.batch))
        print(
            f"{job:14s} {who:14s} {case}: {ms:8.3f} ms {rate:6.0f} TFLOP/s = {rate / matmul:.2f} of the product's "
            f"{matmul:.0f}; temporaries {memory:.1f} MiB",
            flush=True,
        )
    return rows


def read(path: Path) -> list[Row]:
    with open(path, newline="") as file:
        return [
            Row(
                **{name: row[name] for name in ("job", "who", "feature")},
                **{name: int(row[name]) for name in ("length", "heads", "head_dim", "batch")},
                **{name: float(row[name]) for name in ("milliseconds", "tflops", "of_matmul", "temporary_mib")},
            )
            for row in csv.DictReader(file)
        ]


def plot(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    contenders, lengths = list(dict.fromkeys(r.who for r in rows)), sorted({r.length for r in rows})
    dims = sorted({r.head_dim for r in rows})
    jobs = [j for j in PRODUCTS if any(r.job == j for r in rows)]
    matmul = statistics.median(r.tflops / r.of_matmul for r in rows)
    figure, axes = pyplot.subplots(len(dims), len(jobs), figsize=(4 * len(jobs), 3 * len(dims)), squeeze=False)
    for line, head_dim in zip(axes, dims, strict=True):
        for ax, job in zip(line, jobs, strict=True):
            ax.axhline(matmul, color="gray", linestyle="--", label="matmul")
            for color, who in enumerate(contenders):
                points = sorted(
                    (r.length, r.tflops) for r in rows if (r.job, r.head_dim, r.who) == (job, head_dim, who)
                )
                ax.plot(*zip(*points, strict=True) if points else ([], []), marker="o", color=f"C{color}", label=who)
            ax.set(title=f"{job}, D = {head_dim}", xscale="log", ylim=(0, None))
            ax.set_xticks(lengths, [str(n) for n in lengths])
            ax.minorticks_off()
            ax.grid(alpha=0.3)
        line[0].set_ylabel("TFLOP/s")
    axes[-1, 0].set_xlabel("sequence length")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="lower center", ncols=4)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", default="jax", choices=["jax", "torch"])
    parser.add_argument("--jobs", nargs="+", choices=[*PRODUCTS, *OF_DEVICES], help="all by default")
    parser.add_argument("--contenders", nargs="+", help="all by default")
    parser.add_argument("--before", type=Path, help="a checkout of another version to compare with, in PyTorch")
    parser.add_argument("--devices", type=int, default=0, help="one sequence over so many GPUs, beside one of them")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192])
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--heads", nargs="+", type=int, help="one number for each head dim")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--feature", default="none", choices=FEATURES)
    parser.add_argument(
        "--longest-xla",
        "--longest-quadratic",
        type=int,
        default=8192,
        help="XLA and SDPA math run out of memory beyond",
    )
    parser.add_argument("--output", type=Path, default=Path("results/attention"), help="without an ending")
    parser.add_argument("--also", type=Path, nargs="+", default=[], help="tables of other runs, to be drawn as well")
    add_timing_options(parser, rounds=9)
    options = parse(parser, arguments)
    options.heads = options.heads or [HEADS.get(d, 24) for d in options.head_dims]
    if len(options.heads) != len(options.head_dims):
        parser.error(f"--heads must have one number for each of --head-dims: got {options.heads}, {options.head_dims}")
    if options.devices:
        return importlib.import_module(f"{options.framework}_devices").run(options)
    options.jobs = options.jobs or list(PRODUCTS)
    framework = importlib.import_module(f"{options.framework}_calls")
    if options.before:
        if options.framework != "torch" or not (options.before / "torch_bridge").is_dir():
            parser.error(f"--before must be a checkout, and go with --framework torch: got {options.before}")
        framework.CONTENDERS["before"] = framework.of_checkout(options.before)
    options.contenders = options.contenders or list(framework.CONTENDERS)
    for who in options.contenders:
        if who not in framework.CONTENDERS:
            parser.error(f"--contenders must be among {', '.join(framework.CONTENDERS)}: got {who}")
    print(f"{framework.describe()}, {options.dtype}")
    others = [row for path in options.also for row in read(path)]
    rows, all_right = run(framework, options)
    if all_right:
        print(framework.overhead())
    if rows:
        plot([*rows, *others], options.output.with_suffix(".png"))
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main())
