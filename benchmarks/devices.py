"""What the benchmarks of one sequence over several devices share: jobs, rows, and how these are reported."""

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from measure import Case

PRODUCTS = {"forward": 2, "forward + JVP": 6, "forward + backward": 7, "JVP + dual backward": 21}
ONE = "one GPU"


class Row(NamedTuple):
    job: str
    who: str
    devices: int
    length: int
    heads: int
    head_dim: int
    feature: str
    milliseconds: float
    times_one: float  # how many times as fast as one GPU
    mib: float
    of_one_mib: float


def rows_of(
    job: str, case: Case, n: int, times: Mapping[str, Sequence[float]], memory: Mapping[str, float]
) -> dict[Row, str]:
    """Of milliseconds and MiB by contender, `ONE` among them; and what is said of each."""
    medians, rows = {who: statistics.median(samples) for who, samples in times.items()}, {}
    for who, ms in medians.items():
        row = Row(job, who, n, *case[1:4], case.feature, ms, medians[ONE] / ms, memory[who], memory[ONE])
        rate = case.operations(PRODUCTS[job]) / ms * 1e-9
        rows[row] = (
            f"{job:19s} {who:22s} {case}: {ms:8.2f} ms, {row.times_one:.2f} times one GPU, {rate:6.0f} TFLOP/s; "
            f"{row.mib:.0f} MiB, one GPU {row.of_one_mib:.0f}"
        )
    return rows


def tolerance(case: Case) -> float:
    """By how much a result may differ from one GPU's, of the largest or in norm."""
    return 2e-2 if case.dtype.endswith("16") else 1e-4
