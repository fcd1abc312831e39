"""Films of digits that count: frame after frame the next digit, after 9 again 0, in another hand each."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from consistency import report as reporting
from consistency.config import TrainingConfig
from consistency.data import CLASSES, DIGIT_SIZE, Digits, load_digits

SAMPLING_STEPS = (1, 2)  # for each frame


def film_batch(digits: Digits, batch: int, frames: int, seed: int, step: int) -> Digits:
    """`batch` films [batch, frame, 8, 8, 1], each with the label of its first frame: a function of (seed, step) alone."""
    generator = np.random.default_rng((seed, step))
    first = generator.integers(CLASSES, size=batch).astype(np.int32)
    labels = _labels(first, frames)
    by_class = np.argsort(digits.labels, kind="stable")
    counts = np.bincount(digits.labels, minlength=CLASSES)
    chosen = (np.cumsum(counts) - counts)[labels] + (generator.random(labels.shape) * counts[labels]).astype(np.int64)
    return Digits(digits.images[by_class[chosen]], first)


def generate(sampler: Callable, config: TrainingConfig, frames: int) -> dict[str, Digits]:
    """For each number of steps films that begin with every class in turn, all from the same noise."""
    films = max(CLASSES, config.samples // frames)
    films += -films % config.batch  # whole batches, so that one compiled function serves
    first = np.arange(films, dtype=np.int32) % CLASSES
    shape = films, frames, DIGIT_SIZE, DIGIT_SIZE, 1
    noise = np.random.default_rng(config.seed).standard_normal(shape, np.float32)
    batches = np.split(np.arange(films), films // config.batch)
    return {
        f"{steps} step{'s' if steps > 1 else ''} a frame": Digits(
            np.concatenate([np.asarray(sampler(noise[batch], first[batch], steps)) for batch in batches]), first
        )
        for steps in SAMPLING_STEPS
    }


def report(
    config: TrainingConfig,
    title: str,
    samples: Mapping[str, Digits],
    history: Sequence[Mapping[str, float]],
    curves: Mapping[str, str],
    **facts: Any,
) -> None:
    """As of images: a digit agrees if it is the one that counting gives, of which the model is told the first alone."""
    train, held_out = load_digits()
    judge = reporting.Judge(train, held_out)
    frames = next(iter(samples.values())).images.shape[1]
    quality = {name: judge(_cut(films)) for name, films in samples.items()} | {reporting.HELD_OUT: judge(held_out)}
    panels = {
        f"{name}: {quality[name]['class_agreement']:.1%} count on": _strips(films)
        for name, films in {**samples, reporting.HELD_OUT: film_batch(held_out, 400, frames, seed=0, step=0)}.items()
    }
    reporting.write(config, title, quality, panels, 2, history, curves, **facts)


def _labels(first: np.ndarray, frames: int) -> np.ndarray:
    return (first[:, None] + np.arange(frames)) % CLASSES


def _cut(films: Digits) -> Digits:
    """The frames, each with the label that it should have."""
    frames = films.images.shape[1]
    return Digits(films.images.reshape(-1, *films.images.shape[2:]), _labels(films.labels, frames).reshape(-1))


def _strips(films: Digits) -> np.ndarray:
    """A film of each class, frames from left to right."""
    chosen = films.images[[np.flatnonzero(films.labels == label)[0] for label in range(CLASSES)]]
    return np.concatenate([*chosen.transpose(1, 0, 2, 3, 4)], axis=2)
