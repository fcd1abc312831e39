"""Digits from a trained model, whatever its framework."""

from collections.abc import Callable
from typing import Any

import numpy as np

from consistency.config import TrainingConfig
from consistency.data import CLASSES, DIGIT_SIZE, Digits

SAMPLING_STEPS = (1, 2, 4)
Sampler = Callable[[np.ndarray, np.ndarray, int], Any]  # (noise, labels, steps) → images


def generate(sampler: Sampler, config: TrainingConfig) -> dict[str, Digits]:
    """For each number of steps at least `config.samples` digits, every class in turn, all from the same noise."""
    images = max(CLASSES, config.samples // config.mosaic**2)
    images += -images % config.batch  # whole batches, so that one compiled function serves
    labels = np.arange(images, dtype=np.int32) % CLASSES
    side = config.mosaic * DIGIT_SIZE
    noise = np.random.default_rng(config.seed).standard_normal((images, side, side, 1), np.float32)
    batches = np.split(np.arange(images), images // config.batch)
    return {
        f"{steps} step{'s' if steps > 1 else ''}": Digits(
            np.concatenate([np.asarray(sampler(noise[batch], labels[batch], steps)) for batch in batches]), labels
        )
        for steps in SAMPLING_STEPS
    }
