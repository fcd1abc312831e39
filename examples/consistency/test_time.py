"""What the two examples of test-time training share: their configuration, their pictures and figures."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from consistency import plots
from consistency.config import TrainingConfig, option

PRESETS = {
    "text": {},
    # a GPU: heads of 64 channels, 512 queries and up to 2,560 keys
    "long": dict(
        width=256, depth=6, chunk=512, window=2048, chunks=8, batch=16, steps=3000, dtype="bfloat16", learning_rate=1e-3,
        timed_windows="512,2048,8192,32768",
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Config(TrainingConfig):
    size: str = option("text", "preset that the other options start from")
    attention: str = option("auto", "auto or naive; several, with commas between, are timed")
    compare: bool = option(True, "time naive attention too")
    steps: int = option(400, "training steps")
    batch: int = option(8, "sequences per training step")
    learning_rate: float = option(3e-3, "of AdamW, after the warm-up")
    warmup_steps: int = option(40, "steps in which the learning rate rises from zero")
    log_every: int = option(10, "steps between two updates of the progress bar")
    checkpoint_every: int = option(200, "steps between two checkpoints; one is always written at the end")
    samples: int = option(64, "held-out sequences that the figures are measured on")
    depth: int = option(2, "blocks of the transformer")
    chunk: int = option(32, "characters between two inner steps, which are the queries of attention")
    window: int = option(64, "characters that attention sees, itself included")
    chunks: int = option(4, "chunks of a sequence, and so inner steps and one more")
    timed_windows: str = option("64,256,1024", "windows that one outer gradient is timed with, on one sequence")
    repeats: int = option(3, "times that each is timed, of which the median counts")

    @property
    def length(self) -> int:
        """Of a sequence, and the character after it."""
        return self.chunk * self.chunks + 1


def draw(path: Path, adapted: Sequence[float], fixed: Sequence[float], config: Config) -> None:
    """The held-out loss of each chunk, with the inner steps before it and without."""
    figure, axis = plt.subplots(figsize=(5.6, 4))
    places = config.chunk * np.arange(1, config.chunks + 1)
    axis.plot(places, fixed, "o--", color="#c8553d", markersize=4, label="weights as trained")
    axis.plot(places, adapted, "o-", color=plots.INK, markersize=4, label="after inner steps on what was read")
    axis.legend(frameon=False)
    plots.label_axes(axis, "characters read", "held-out loss of a chunk, nats a character")
    plots.save(figure, "Test-time training", path)


def draw_costs(path: Path, costs: Mapping[str, Mapping[int, Mapping[str, float] | None]]) -> None:
    """Against the window; a line ends where a step no longer fits, and memory is drawn where it is known."""
    names = {"milliseconds": "milliseconds", "mib": "MiB of temporary memory"}
    known = [name for name in names if any(c and c.get(name) for by in costs.values() for c in by.values())]
    figure, axes = plt.subplots(1, len(known), figsize=(5.2 * len(known), 4), squeeze=False)
    for axis, name in zip(axes.flat, known, strict=True):
        for attention, by_window in costs.items():
            fitting = {window: cost[name] for window, cost in by_window.items() if cost}
            style = dict(color="#c8553d", linestyle="--") if attention == "naive" else dict(color=plots.INK)
            axis.loglog(list(fitting), list(fitting.values()), marker="o", markersize=4, label=attention, **style)
        axis.minorticks_off()
        plots.label_axes(axis, "window", names[name])
    axes.flat[0].legend(frameon=False)
    plots.save(figure, "One outer gradient", path)


def report(
    config: Config,
    history: Sequence[Mapping[str, float]],
    adapted: np.ndarray,
    fixed: np.ndarray,
    costs: Mapping[str, Any],
    **facts: Any,
) -> None:
    output = Path(config.output)
    draw(output / "chunks.png", adapted, fixed, config)
    plots.curves(output / "curves.png", "Training", history, {"loss": "loss", "inner_rate": "inner learning rate"})
    draw_costs(output / "costs.png", costs)
    losses = dict(adapted=np.asarray(adapted, float).tolist(), fixed=np.asarray(fixed, float).tolist())
    metrics = {"config": dataclasses.asdict(config), "held_out": losses, "costs": costs, **facts}
    (output / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    for chunk, (a, f) in enumerate(zip(adapted, fixed, strict=True), 1):
        print(f"chunk {chunk}: {a:.3f} nats a character after {chunk - 1} inner steps, {f:.3f} without any")
    print(f"pictures and metrics.json are in {output}")


def describe_cost(window: int, attention: str, cost: Mapping[str, float | None] | None) -> str:
    if cost is None:
        return f"window {window:6}, {attention:8} does not fit"
    memory = f"{cost['mib']:10.1f} MiB" if cost["mib"] else ""
    return f"window {window:6}, {attention:8} {cost['milliseconds']:9.1f} ms {memory}"
