"""The loop over training steps, whatever takes them: a history, a progress bar, checkpoints and the speed."""

import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tqdm

from consistency.config import TrainingConfig

History = list[dict[str, float]]


def begin_afresh(config: TrainingConfig) -> Path:
    """The folder of checkpoints, without what another run left, which a later --resume must not find, unless it is to go on."""
    folder = Path(config.output) / "checkpoints"
    if not config.resume:
        shutil.rmtree(folder, ignore_errors=True)
    return folder


def training_loop(
    config: TrainingConfig,
    start: int,
    history: History,
    take_step: Callable[[int], Mapping[str, Any]],
    save: Callable[[int, History], None],
    fetch: Callable[[Sequence[Mapping[str, Any]]], Sequence[Mapping[str, Any]]] = lambda metrics: metrics,
    quiet: bool = False,
) -> float:
    """Takes steps `start` … config.steps − 1 and appends what each returns to `history`; returns steps per second.

    `take_step` may return metrics that the device has yet to compute; `fetch` waits for them.
    """
    if start >= config.steps:
        raise ValueError(
            f"`steps` must be more than the {start} that the checkpoint has already taken: got {config.steps}"
        )
    speeds: list[float] = []
    pending: list[Mapping[str, Any]] = []
    clock = time.perf_counter()
    with tqdm.tqdm(total=config.steps, initial=start, unit="step", dynamic_ncols=True, disable=quiet) as progress:
        for step in range(start + 1, config.steps + 1):
            pending.append(take_step(step - 1))
            is_checkpoint = step % config.checkpoint_every == 0 or step == config.steps
            if step % config.log_every == 0 or step == start + 1 or is_checkpoint:
                # Reading the metrics waits for the device, so it is done once in a while only.
                first = step - len(pending) + 1
                history += _to_floats(first, fetch(pending))
                speeds.append(len(pending) / (time.perf_counter() - clock))
                progress.update(len(pending))
                said = f"loss {np.mean([entry['loss'] for entry in history[-len(pending) :]]):.4f}"
                if len(speeds) > 1:  # the first interval is the first step, with the compilation
                    said += (
                        f", {1e3 / speeds[-1]:.1f} ms a step, {speeds[-1] * config.batch:.0f} {config.unit} a second"
                    )
                progress.set_postfix_str(said)
                pending.clear()
                if is_checkpoint:
                    save(step, history)
                clock = time.perf_counter()
    return statistics.median(speeds[1:] or speeds)


def _to_floats(first_step: int, metrics: Sequence[Mapping[str, Any]]) -> History:
    history = [
        {"step": first_step + index, **{name: float(value) for name, value in entry.items()}}
        for index, entry in enumerate(metrics)
    ]
    for entry in history:
        if not np.isfinite(entry["loss"]):
            raise FloatingPointError(f"the loss became {entry['loss']} at step {entry['step']}")
    return history
