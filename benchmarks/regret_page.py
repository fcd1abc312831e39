"""What runs of `regret.py` saved, as tables and as a picture: for `regret.py --draw` and for the site."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from everyday import CALLS, Call

DEFAULT = "default"
LOSS = 1.05  # regret, above which somebody waits for nothing


class Regret(NamedTuple):
    ratio: float  # of the default's time to that of the best other
    call: str
    job: str
    milliseconds: float  # of the default
    best: str
    best_milliseconds: float


class Run(NamedTuple):
    title: str  # short: JAX
    about: str  # device, versions, date
    found: dict[str, dict[str, Any]]  # by call: times[job][who] in milliseconds, and failures

    @property
    def regrets(self) -> list[Regret]:
        """The worst first."""
        rows = []
        for name, result in self.found.items():
            for job, times in result["times"].items():
                others = {who: ms for who, ms in times.items() if who != DEFAULT}
                if DEFAULT in times and others:
                    best = min(others, key=others.__getitem__)
                    rows.append(Regret(times[DEFAULT] / others[best], name, job, times[DEFAULT], best, others[best]))
        return sorted(rows, reverse=True)

    @property
    def failures(self) -> list[str]:
        """Of the default: what was wrong, or could not be timed."""
        failed = ((name, *f) for name, result in self.found.items() for f in result["failures"].items())
        return [f"{name}, {what}: {reason}" for name, what, reason in failed if what.endswith((DEFAULT, "all"))]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self._asdict(), indent=1))


def read(paths: Sequence[Path]) -> list[Run]:
    """Raises:
    ValueError: no path, or a file that `regret.py` did not save.
    """
    if not paths:
        raise ValueError("there is no saved run: `regret.py --output NAME` saves NAME.json")
    runs = []
    for path in paths:
        saved = json.loads(path.read_text())
        if set(saved) != set(Run._fields):
            raise ValueError(f"{path} is no run that `regret.py` saved: it must have {', '.join(Run._fields)}")
        runs.append(Run(**saved))
    return runs


def shape(call: Call) -> str:
    heads = f"H{call.heads}" + f" K{call.key_heads}" * (call.key_heads != call.heads)
    length = f"L{call.queries}" if call.queries == call.keys else f"T{call.queries} S{call.keys}"
    return f"B{call.batch} {length} {heads} D{call.head_dim}, {call.dtype}" + f", {call.kind}" * bool(call.kind)


def tables(runs: Sequence[Run]) -> str:
    """Markdown: of each run the losses, then all calls, the worst first."""
    return "\n\n".join(part for run in runs for part in _of_run(run))


def _of_run(run: Run) -> list[str]:
    rows = run.regrets
    losses = [row for row in rows if row.ratio > LOSS]
    parts = [f"## {run.title}", f"*{run.about}*"]
    parts.append(
        f"**{len(losses)} of {len(rows)} are losses: the default takes more than {LOSS} times the best other.**"
    )
    if losses:
        head = "| ratio | call | derivative | default, ms | best other, ms |\n|---|---|---|---|---|\n"
        line = "| **{0.ratio:.2f}** | {0.call} | {0.job} | {0.milliseconds:.3g} | {0.best} {0.best_milliseconds:.3g} |"
        parts.append(head + "\n".join(map(line.format, losses)))
    jobs, names = (list(dict.fromkeys(row[i] for row in rows)) for i in (2, 1))
    jobs.sort(key=in_order)
    cells = {(row.call, row.job): f"{row.ratio:.2f}, {row.best}" for row in rows}
    lines = [f"| call | shape | {' | '.join(jobs)} |", "|---" * (2 + len(jobs)) + "|"]
    for name in names:
        lines.append(f"| {name} | {shape(CALLS[name])} | {' | '.join(cells.get((name, j), '') for j in jobs)} |")
    parts.append("\n".join(lines))
    if run.failures:
        parts.append("Not timed:\n\n" + "\n".join(f"- {failure}" for failure in run.failures))
    return parts


def in_order(job: str) -> tuple[bool, bool]:
    """Forward, forward + JVP, forward + backward, JVP + dual backward."""
    return "backward" in job, "JVP" in job


def heat_map(runs: Sequence[Run]) -> Any:
    """A figure, a panel for each run: red is slower than the best other, blue faster."""
    from matplotlib import colors, pyplot

    regrets = {run.title: run.regrets for run in runs}
    worst: dict[str, float] = {}
    for row in (row for rows in regrets.values() for row in rows):
        worst[row.call] = max(row.ratio, worst.get(row.call, 0))
    names = sorted(worst, key=worst.__getitem__, reverse=True)
    size = (2.4 + 2.6 * len(runs), 0.24 * len(names) + 1.6)
    figure, axes = pyplot.subplots(1, len(runs), figsize=size, sharey=True, squeeze=False)
    for axis, (title, rows) in zip(axes[0], regrets.items(), strict=True):
        jobs = sorted({row.job for row in rows}, key=in_order)
        table = np.full((len(names), len(jobs)), np.nan)
        for row in rows:
            table[names.index(row.call), jobs.index(row.job)] = row.ratio
        axis.imshow(np.log2(table), cmap="RdBu_r", norm=colors.CenteredNorm(halfrange=3), aspect="auto")
        for i, j in np.argwhere(np.isfinite(table)):
            pale = abs(np.log2(table[i, j])) < 2
            axis.text(
                j, i, f"{table[i, j]:.2f}", ha="center", va="center", fontsize=7, color="black" if pale else "white"
            )
        axis.set_xticks(range(len(jobs)), [job.replace(" + ", " +\n") for job in jobs], fontsize=7)
        axis.set_yticks(range(len(names)), names, fontsize=8)
        axis.set_title(title, fontsize=9)
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    figure.tight_layout()
    return figure
