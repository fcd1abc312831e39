"""Times a whole MeanFlow training step (arXiv:2505.13447) of DiT-XL/2 on the GPU at hand: the JVP along (v, 0, 1), its stopped
target, the loss, the backward and AdamW, on random latents, in bfloat16 with float32 parameters.

    python benchmarks/meanflow.py                                     # 32 images of 256 tokens, 8 of 1,024
    python benchmarks/meanflow.py --framework torch                   # eager, compiled, with CUDA graphs
    python benchmarks/meanflow.py --lengths 256 --batches 64
    python benchmarks/meanflow.py --lengths 16 --batches 2 --width 32 --depth 2 --heads 2 --matmul-size 64 --quick  # on a CPU

Contenders are this package's attention and naive attention in the network of examples/meanflow_*.py, and in the same network
plain flow matching, which has no JVP, with cuDNN's attention.  One block with two images is computed in float64 first: in its
loss, the norm of its derivative along the flow and the gradient of its projections to queries, keys and values a contender may
err twice as much as naive attention in the dtype at hand, and by one rounding.  What does not fit into memory is a row without
figures.  Memory is the highest that the allocator holds during a step; in JAX, what the compiled step asks of it.  Attention's
share is the time of what one block's attention computes in a step, measured by itself, times the blocks, over the step's; in
PyTorch, with as few tokens as here, it is the host's time, and says nothing of a compiled step.
Compiled, the loss is one graph with its JVP, and its backward another, which "graphs" replays as CUDA graphs; the optimizer is
PyTorch's fused one, and not compiled.  In PyTorch all steps with a JVP run under `torch_bridge.patch()`.
"""

import argparse
import importlib
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from measure import Failure, add_timing_options, attempt, in_turns, mistake, parse, relative_errors, timed, write
from steps import Prepared, Size

NONE = float("nan")


class Row(NamedTuple):
    framework: str
    who: str
    batch: int
    length: int
    width: int
    depth: int
    heads: int
    dtype: str
    milliseconds: float = NONE
    images_per_second: float = NONE
    peak_gib: float = NONE
    attention_milliseconds: float = NONE  # of one block
    attention_share: float = NONE
    note: str = ""

    def __str__(self) -> str:
        if self.note:
            return f"  {self.who:36} {self.note}"
        return (
            f"  {self.who:36} {self.images_per_second:8.1f} images/s {self.milliseconds:9.2f} ms {self.peak_gib:7.2f} GiB, "
            f"attention {self.attention_milliseconds:.3f} ms a block, {self.attention_share:.0%}"
        )


def measure(module: ModuleType, name: str, size: Size, options: argparse.Namespace) -> tuple[list[Row], bool]:
    """Rows of the table, and whether all that fitted into memory was right."""
    framework, steps = module.calls, module.Steps(size)
    prepared: dict[str, Prepared] = {}
    notes: dict[str, str] = {}
    good, rule = True, {}
    for who in options.contenders:
        step = module.CONTENDERS[who]
        if step.jvp not in rule:
            naive = step._replace(attention="naive", compiled=False)
            exact = module.part(size, naive, exact=True)
            rule[step.jvp] = exact, relative_errors(module.part(size, naive), exact)
        results = attempt(framework, lambda step=step: module.part(size, step))
        if not isinstance(results, Failure):
            reason = mistake(results, *rule[step.jvp], rounding=2**-7 if size.dtype.endswith("16") else 1e-3)
            results = Failure(reason) if reason else attempt(framework, lambda step=step: steps.prepare(step))
        if isinstance(results, Failure):
            notes[who] = "does not fit" if results.out_of_memory else results.reason
            good &= results.out_of_memory
        else:
            prepared[who] = results
            notes[who] = f"right; a first step takes {timed(results.call, framework.wait, 0):.2f} ms"
        print(f"  {who}: {notes[who]}", flush=True)
        framework.release()
    times, matmul = in_turns(
        framework,
        {(who, part): getattr(p, part) for who, p in prepared.items() for part in ("call", "attention")},
        options,
    )
    print(f"{name}, {size}: the bf16 matmul {matmul:.0f} TFLOP/s")
    rows = []
    for who in options.contenders:
        if who in prepared:
            ms, alone = times[who, "call"], times[who, "attention"]
            figures = ms, size.batch / ms * 1e3, prepared[who].peak_gib, alone, size.depth * alone / ms
            row = Row(name, who, *size, *figures)
        else:
            row = Row(name, who, *size, note=notes[who])
        print(row, flush=True)
        rows.append(row)
    return rows, good


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=("jax", "torch"), default="jax")
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=[256, 1024], help="tokens of an image, squares of even"
    )
    parser.add_argument("--batches", nargs="+", type=int, default=[32, 8], help="images, one number for each length")
    parser.add_argument("--width", type=int, default=1152)
    parser.add_argument("--depth", type=int, default=28)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--contenders", nargs="+", help="by the names that the table has; all by default")
    parser.add_argument("--output", type=Path, default=Path("results/meanflow"), help="without an ending")
    add_timing_options(parser, rounds=5)
    options = parse(parser, arguments)
    module = importlib.import_module(f"{options.framework}_steps")
    options.contenders = options.contenders or list(module.CONTENDERS)
    for who in options.contenders:
        if who not in module.CONTENDERS:
            parser.error(f"--contenders must be among {', '.join(module.CONTENDERS)}: got {who}")
    if len(options.lengths) != len(options.batches):
        parser.error(f"--batches must have one number for each of --lengths: got {options.batches}, {options.lengths}")
    for length in options.lengths:
        if math.isqrt(length) ** 2 != length or length % 4:
            parser.error(f"--lengths must be squares of even numbers: got {length}")
    print(f"{module.calls.describe()}, {options.dtype}")
    rows, good = [], True
    for batch, length in zip(options.batches, options.lengths, strict=True):
        size = Size(batch, length, options.width, options.depth, options.heads, options.dtype)
        more, right = measure(module, options.framework, size, options)
        rows, good = rows + more, good and right
        write(options.output.with_suffix(".csv"), Row._fields, rows)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
