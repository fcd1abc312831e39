"""What a run leaves behind: samples.png, curves.png and metrics.json."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from consistency import plots
from consistency.config import TrainingConfig
from consistency.data import CLASSES, Digits, cut_mosaics, load_digits, training_batch
from consistency.quality import Judge

HELD_OUT = "held-out digits"


def report(
    config: TrainingConfig,
    title: str,
    samples: Mapping[str, Digits],
    history: Sequence[Mapping[str, float]],
    curves: Mapping[str, str],
    **facts: Any,
) -> None:
    """Judges and draws the samples beside the held-out digits, draws the `curves` of the history, prints the figures.

    `facts` go into metrics.json as they are.
    """
    train, held_out = load_digits()
    judge = Judge(train, held_out)
    quality = {name: judge(cut_mosaics(images, config.mosaic)) for name, images in samples.items()}
    quality[HELD_OUT] = judge(held_out)

    held_out_mosaics = training_batch(held_out, max(100, 1000 // config.mosaic**2), config.mosaic, seed=0, step=0)
    each = 10 if config.mosaic == 1 else 1
    panels = {
        f"{name}: class agreement {quality[name]['class_agreement']:.1%}": _first_of_each_class(images, each)
        for name, images in {**samples, HELD_OUT: held_out_mosaics}.items()
    }
    write(config, title, quality, panels, 10 if each == 10 else 5, history, curves, **facts)


def write(
    config: TrainingConfig,
    title: str,
    quality: Mapping[str, Mapping[str, float]],
    panels: Mapping[str, np.ndarray],
    columns: int,
    history: Sequence[Mapping[str, float]],
    curves: Mapping[str, str],
    **facts: Any,
) -> None:
    """Draws the panels, so many images in a row, and the `curves` of the history, and prints the figures."""
    output = Path(config.output)
    plots.sample_grid(output / "samples.png", f"{title} samples", panels, columns)
    plots.curves(output / "curves.png", f"{title} training", history, curves)

    loss = float(np.mean([entry["loss"] for entry in history[-100:]]))
    metrics = {"config": dataclasses.asdict(config), "loss": loss, "quality": quality, **facts}
    (output / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    for name, figures in quality.items():
        agreement, distance = figures["class_agreement"], figures["frechet_distance"]
        print(f"{name:16} class agreement {agreement:6.1%}   Frechet distance {distance:6.2f}")
    print(f"pictures and metrics.json are in {output}")


def _first_of_each_class(digits: Digits, each: int) -> np.ndarray:
    return np.concatenate([digits.images[digits.labels == label][:each] for label in range(CLASSES)])
