"""Times the ways to say who sees whom, beside the call in which everybody sees everybody, in one run of PyTorch.

Every result is first checked against float64 on two heads.  A way that costs no more than what it leaves takes as large a part
of the full call's time as of its scores: "over its share" is then 1.

    python benchmarks/visibility.py                                     # L = 32768, H24 D128: forward + JVP
    python benchmarks/visibility.py --lengths 8192 --longest-mask 8192  # beside boolean masks of L²
    python benchmarks/visibility.py --lengths 64 --head-dims 16 --heads 2 --matmul-size 64 --quick     # on a CPU
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import torch_calls as framework
from jax_flash_jvp import visibility
from measure import (
    DOCUMENTS,
    FEATURES,
    PRODUCTS,
    Case,
    Contender,
    Failure,
    Oracle,
    add_timing_options,
    in_turns,
    parse,
    prepare,
    write,
)
from torch_bridge import flash_attn_varlen_func

ALL = "all keys"


class Seen(NamedTuple):
    """What queries see, and the ways to say so."""

    share: float  # of all scores
    meaning: dict[str, Any]  # said to the oracle
    ways: dict[str, Callable]


class Row(NamedTuple):
    job: str
    way: str
    length: int
    heads: int
    head_dim: int
    milliseconds: float
    of_all_keys: float
    over_its_share: float
    temporary_mib: float
    peak_mib: float


def given(**arguments: Any) -> Callable:
    return lambda q, k, v, **_: framework.ours(q, k, v, **arguments)


def by_cu_seqlens(edges: torch.Tensor, longest: int) -> Callable:
    def attention(q, k, v, **_):
        packed = [a[0].transpose(0, 1) for a in (q, k, v)]
        return flash_attn_varlen_func(*packed, edges, edges, longest, longest).transpose(0, 1)[None]

    return attention


def everything_seen(case: Case, with_masks: bool) -> Iterator[Seen]:
    length, on = case.length, lambda a: torch.as_tensor(a, device=framework.DEVICE)
    yield Seen(1.0, {}, {ALL: given()})
    causal = {"is_causal": True}
    by_ranges = given(key_ranges=on(visibility.causal(length)))
    yield Seen(0.5, causal, {"causal, is_causal": given(**causal), "causal, ranges": by_ranges})
    for feature in ("teacher-forcing", "block-sparse"):
        meaning = {name: on(a) for name, a in case._replace(feature=feature).structure().items()}
        ways = {f"{feature}, {'blocks' if 'blocks' in meaning else 'ranges'}": given(**meaning)}
        if with_masks:
            mask = framework.elements(meaning.get("key_ranges"), meaning.get("blocks"), length, length)
            ways[f"{feature}, boolean mask"] = given(attn_mask=mask)
        yield Seen(FEATURES[feature], meaning, ways)
    edges = [n * length // 16 for n in DOCUMENTS]
    ranges = {"key_ranges": on(visibility.documents(length, edges))}
    ids = on(torch.bucketize(torch.arange(length), torch.tensor(edges[1:]), right=True))[None].expand(case.batch, -1)
    longest = max(b - a for a, b in itertools.pairwise(edges))
    ways = {
        "documents, ranges": given(**ranges),
        "documents, segment ids": given(query_segment_ids=ids, key_value_segment_ids=ids),
        "documents, cu_seqlens": by_cu_seqlens(on(torch.tensor(edges, dtype=torch.int32)), longest),
    }
    yield Seen(FEATURES["varlen"], ranges, ways)


def run(options: argparse.Namespace) -> bool:
    """Whether all was right."""
    rows, all_right = [], True
    for heads, head_dim in zip(options.heads, options.head_dims, strict=True):
        for length in options.lengths:
            case = Case(1, length, heads, head_dim, dtype=options.dtype)
            arrays = framework.draw(case)
            for job in options.jobs:
                prepared, shares = {}, {}
                for seen in everything_seen(case, length <= options.longest_mask):
                    asked = [name for name in seen.ways if not options.ways or name in (*options.ways, ALL)]
                    if not asked:
                        continue
                    oracle = Oracle(framework, job, seen.meaning, arrays)
                    for name in asked:
                        contender = Contender(seen.ways[name])
                        outcome = prepare(framework, contender, job, seen.meaning, arrays, oracle)
                        if isinstance(outcome, Failure):
                            print(f"{job}, {name}, {case}: {outcome.reason}", flush=True)
                            all_right = False
                        else:
                            prepared[name], shares[name] = outcome, seen.share
                medians, matmul = in_turns(framework, {name: p.call for name, p in prepared.items()}, options)
                for name, ms in medians.items():
                    ratio = ms / medians.get(ALL, float("nan"))
                    over, memory = ratio / shares[name], (prepared[name].temporary_mib, prepared[name].peak_mib)
                    rows.append(Row(job, name, *case[1:4], ms, ratio, over, *memory))
                    print(
                        f"{job:14s} {name:30s} {case}: {ms:8.3f} ms, {ratio:.3f} of all keys, over its share {over:.2f}; "
                        f"temporaries {memory[0]:.1f} MiB, peak {memory[1]:.1f} MiB; product {matmul:.0f} TFLOP/s",
                        flush=True,
                    )
                write(options.output.with_suffix(".csv"), Row._fields, rows)
                prepared.clear()
                framework.release()
    return all_right


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", choices=list(PRODUCTS), default=["forward + JVP"])
    parser.add_argument("--ways", nargs="+", help='all by default; "all keys" is always timed')
    parser.add_argument("--lengths", nargs="+", type=int, default=[32768])
    parser.add_argument("--head-dims", nargs="+", type=int, default=[128])
    parser.add_argument("--heads", nargs="+", type=int, default=[24], help="one number for each head dim")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--longest-mask", type=int, default=0, help="up to which boolean masks of L² are timed too")
    parser.add_argument("--output", type=Path, default=Path("results/visibility"), help="without an ending")
    add_timing_options(parser, rounds=5)
    options = parse(parser, arguments)
    if len(options.heads) != len(options.head_dims):
        parser.error(f"--heads must have one number for each of --head-dims: got {options.heads}, {options.head_dims}")
    print(f"{framework.describe()}, {options.dtype}")
    return 0 if run(options) else 1


if __name__ == "__main__":
    sys.exit(main())
