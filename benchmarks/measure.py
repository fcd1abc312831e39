"""What the benchmarks share: jobs, the check against float64 that precedes every timing, and timing in turns.

`framework` is one of the modules jax_calls and torch_calls, which offer the same names.  Several benchmarks may run at a time:
they compile side by side, and a lock lets one of them time.
"""

import contextlib
import csv
import fcntl
import importlib.metadata
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from jax_flash_jvp import visibility

PRODUCTS = {"forward": 2, "forward + JVP": 6, "backward": 5, "dual backward": 15}
SCORES = 2**26  # of a head, that the float64 computation holds at a time
MATMUL = "bf16 matrix product"
# what attention may have, and how much of the products it leaves
FEATURES = {
    "none": 1, "causal": 1 / 2, "mask": 1, "padding": 3 / 4, "bias": 1, "teacher-forcing": 272 / 32**2, "block-sparse": 1 / 10,
    "varlen": 48 / 16**2,
}  # fmt: skip
DOCUMENTS = (0, 1, 2, 4, 7, 8, 12, 16)  # where they begin and end, in sixteenths of the length


class Case(NamedTuple):
    """A problem of self-attention."""

    batch: int
    length: int
    heads: int
    head_dim: int
    feature: str = "none"  # of FEATURES
    dtype: str = "bfloat16"

    def operations(self, products: int) -> float:
        """Of so many matrix products, each of 2 B H L² D where the feature leaves all of it."""
        whole = 2 * products * self.batch * self.heads * self.length**2 * self.head_dim
        return whole * FEATURES[self.feature]

    def __str__(self) -> str:
        batch = f"B{self.batch} " if self.batch > 1 else ""
        feature = f" {self.feature}" if self.feature != "none" else ""
        return f"{batch}H{self.heads} L{self.length} D{self.head_dim}{feature}"

    def structure(self) -> dict[str, np.ndarray]:
        """What a feature that needs no array of L² gives attention: ranges of keys, or booleans of square blocks."""
        if self.feature == "teacher-forcing":  # in sixteen blocks
            return {"key_ranges": visibility.teacher_forcing(self.length, self.length // 32)}
        if self.feature == "varlen":
            return {"key_ranges": visibility.documents(self.length, [n * self.length // 16 for n in DOCUMENTS])}
        if self.feature == "block-sparse":
            n = self.length // min(128, self.length // 8)
            blocks = np.eye(n, dtype=bool)  # every query sees something
            others = np.random.default_rng(0).permutation(np.flatnonzero(~blocks))
            blocks.flat[others[: max(0, n * n // 10 - n)]] = True
            return {"blocks": blocks[None, None]}
        return {}

    @property
    def extra_shape(self) -> tuple[int, ...]:
        """[B, H, L, L], or 1, of a mask, of one that hides padding, or of a bias: as most models have them."""
        rows = 1 if self.feature == "padding" else self.length
        batch, heads = (1, self.heads) if self.feature == "bias" else (self.batch, 1)
        return batch, heads, rows, self.length


class Contender(NamedTuple):
    attention: Callable  # of q, k, v and, by name, what the feature needs
    jobs: tuple[str, ...] = tuple(PRODUCTS)
    quadratic: bool = False  # memory
    rounds_scores: bool = False  # to the dtype of q: then it may err as naive attention does that rounds them too
    compiled: bool = False  # by torch.compile


class Prepared(NamedTuple):
    """A checked job, ready to be timed."""

    call: Callable[[], Any]
    ends: list[np.ndarray]  # its results on the first and the last head
    temporary_mib: float  # beyond arguments, residuals and results
    peak_mib: float  # of all that, what precedes the timed part included


class Failure(NamedTuple):
    reason: str
    out_of_memory: bool = False


def indices(axis: int, which: slice) -> tuple[slice, ...]:
    return (slice(None),) * axis + (which,)


def end_heads(arrays: Iterable[Any], axis: int) -> list[Any]:
    """The first and the last."""
    return [a[indices(axis, slice(None, None, max(1, a.shape[axis] - 1)))] for a in arrays]


def relative_errors(got: list[np.ndarray], exact: list[np.ndarray]) -> list[float]:
    return [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(got, exact, strict=True)]


class Oracle:
    """A job on the first and the last head: in float64, and the errors that naive attention makes in the arrays' dtype.

    Rows of scores do not depend on one another: results that belong to queries are computed some rows at a time, and
    gradients of keys and values summed over the rows."""

    def __init__(self, framework: ModuleType, job: str, extra: dict[str, Any], arrays: list[Any]):
        self.framework, self.job = framework, job
        self.arrays = end_heads(arrays, framework.HEADS)
        self.extra = {name: a if a is True or name == "blocks" else end_heads([a], 1)[0] for name, a in extra.items()}
        self.exact = self._compute(exact=True)
        self._allowed: dict[bool, list[float]] = {}

    def allowed(self, rounds_scores: bool) -> list[float]:
        if rounds_scores not in self._allowed:
            errors = relative_errors(self._compute(exact=False, rounds_scores=rounds_scores), self.exact)
            self._allowed[rounds_scores] = errors
        return self._allowed[rounds_scores]

    def _compute(self, **how: bool) -> list[np.ndarray]:
        axis, parts = self.framework.ROWS, []
        length = self.arrays[0].shape[axis]
        step = max(1, SCORES // length)
        whole = lambda name, a: a is True or a.shape[2] == 1 or name == "blocks"
        for first in range(0, length, step):
            rows = indices(axis, slice(first, first + step))
            some = [a[rows] if i in (0, 3, 6, 7) else a for i, a in enumerate(self.arrays)]
            extra = {name: a if whole(name, a) else a[indices(2, rows[axis])] for name, a in self.extra.items()}
            parts.append(self.framework.naive(self.job, extra, some, first, **how))
        of_keys = self.job.endswith("backward")
        pieces = enumerate(zip(*parts, strict=True))
        return [sum(p) if of_keys and i % 3 else np.concatenate(p, axis) for i, p in pieces]


def attempt(framework: ModuleType, make: Callable[[], Any]) -> Any:
    """What `make` gives; or the failure that it was."""
    try:
        return make()
    except Exception as error:
        text = str(error).strip().split("\n")[0][:160]
        failure = Failure(f"{type(error).__name__}: {text}", framework.out_of_memory(error))
    framework.release()  # here, where the traceback no longer holds the arrays
    return failure


def mistake(results: list[np.ndarray], exact: list[np.ndarray], allowed: list[float], rounding: float = 1e-3) -> str:
    """What is wrong with results that may err twice as much as naive attention does; nothing if they are right."""
    errors = relative_errors(results, exact)
    right = all(e <= 2 * n + rounding for e, n in zip(errors, allowed, strict=True))
    return "" if right else f"WRONG: errors {errors}, naive {allowed}"


def prepare(framework: ModuleType, contender: Contender, job: str, extra: dict[str, Any], arrays, oracle: Oracle):
    """A job that is right within twice the error of naive attention; or why it cannot be timed."""
    prepared = attempt(framework, lambda: framework.prepare(contender, job, extra, arrays))
    if isinstance(prepared, Failure):
        return prepared
    reason = mistake(prepared.ends, oracle.exact, oracle.allowed(contender.rounds_scores))
    if not reason:
        return prepared
    del prepared
    framework.release()
    return Failure(reason)


def right_ones(
    framework: ModuleType, contenders: dict[str, Callable[[], Any]], results: Callable[[Any], list[np.ndarray]],
    exact: list[np.ndarray], allowed: list[float], rounding: float = 1e-3, title: str = "",
) -> tuple[dict[str, Any], bool]:  # fmt: skip
    """What contenders prepare, of those whose results are right, and whether all that fitted into memory were.  Prints why others
    are left out."""
    prepared, good = {}, True
    for who, make in contenders.items():
        outcome = attempt(framework, make)
        if isinstance(outcome, Failure):
            print(f"{title}{who}: {outcome.reason}", flush=True)
            good &= outcome.out_of_memory
        elif reason := mistake(results(outcome), exact, allowed, rounding):
            print(f"{title}{who}: {reason}", flush=True)
            good = False
        else:
            prepared[who] = outcome
        framework.release()
    return prepared, good


def timed(call: Callable[[], Any], wait: Callable[[Any], Any], seconds: float) -> float:
    """Milliseconds of one call among as many in a row as fit; the device works through them without a gap."""
    wait(call())
    start = time.perf_counter()
    wait(call())
    count = max(1, int(seconds / max(time.perf_counter() - start, 1e-5)))
    start = time.perf_counter()
    for _ in range(count):
        out = call()
    wait(out)
    return (time.perf_counter() - start) / count * 1e3


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """No other benchmark of this user times on this GPU."""
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace("/", "-")  # which names of a GPU's parts have
    path = Path(tempfile.gettempdir()) / f"benchmark-{os.getuid()}-{devices}.lock"  # another user's cannot be opened
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@locked()
def in_turns(framework: ModuleType, calls: dict[str, Callable], options: Any) -> tuple[dict[str, float], float]:
    """Median milliseconds of each call, and the TFLOP/s that the bf16 matrix product reached among them."""
    calls = {MATMUL: framework.matrix_product(options.matmul_size), **calls}
    times: dict[str, list[float]] = {who: [] for who in calls}
    for turn in range(options.rounds):
        order = list(calls)[turn % len(calls) :] + list(calls)[: turn % len(calls)]
        for who in order:
            time.sleep(options.rest)
            times[who].append(timed(calls[who], framework.wait, options.seconds))
    medians = {who: statistics.median(samples) for who, samples in times.items()}
    return medians, 2 * options.matmul_size**3 / medians.pop(MATMUL) * 1e-9


def add_timing_options(parser: Any, rounds: int) -> None:
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument(
        "--seconds", type=float, default=0.03, help="of work per contender and round; 1 shows sustained speed"
    )
    parser.add_argument(
        "--rest", type=float, default=0.1, help="seconds of rest before each, so that none inherits heat"
    )
    parser.add_argument("--matmul-size", type=int, default=8192, help="rows and columns of the matmul")
    parser.add_argument("--quick", action="store_true", help="three rounds without rest: a first look")


def parse(parser: Any, arguments: list[str] | None) -> Any:
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.rest = 3, 0.0
    return options


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # on the path, not installed
        return "of unknown version"


def write(path: Path, columns: Iterable[str], rows: Iterable[Sequence]) -> None:
    """A table, in a folder that is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])
