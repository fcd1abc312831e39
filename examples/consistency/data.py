"""The 1,797 handwritten digits that scikit-learn ships: 8x8 pixels, ten classes, nothing to download."""

from typing import NamedTuple

import numpy as np
import sklearn.datasets
import sklearn.model_selection

DIGIT_SIZE = 8
CLASSES = 10


class Digits(NamedTuple):
    images: np.ndarray  # [N, 8, 8, 1] in [-1, 1], float32
    labels: np.ndarray  # [N], int32


def load_digits() -> tuple[Digits, Digits]:
    """Four fifths to train on and one fifth held out, the same split every time."""
    bunch = sklearn.datasets.load_digits()
    images = (bunch.images[..., None] / 8 - 1).astype(np.float32)
    labels = bunch.target.astype(np.int32)
    train_images, held_out_images, train_labels, held_out_labels = sklearn.model_selection.train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=0
    )
    return Digits(train_images, train_labels), Digits(held_out_images, held_out_labels)


def training_batch(digits: Digits, batch: int, mosaic: int, seed: int, step: int) -> Digits:
    """`batch` images of mosaic x mosaic digits, all digits of an image from one class.

    A function of (seed, step) alone, so that a resumed run sees the batches that an uninterrupted one sees.
    """
    generator = np.random.default_rng((seed, step))
    labels = digits.labels[generator.integers(len(digits.labels), size=batch)]
    by_class = np.argsort(digits.labels, kind="stable")
    counts = np.bincount(digits.labels, minlength=CLASSES)
    first = np.cumsum(counts) - counts
    within_class = generator.random((batch, mosaic, mosaic)) * counts[labels, None, None]
    chosen = by_class[first[labels, None, None] + within_class.astype(np.int64)]
    tiles = digits.images[chosen]  # [batch, row, column, 8, 8, 1]
    side = mosaic * DIGIT_SIZE
    return Digits(tiles.transpose(0, 1, 3, 2, 4, 5).reshape(batch, side, side, 1), labels)


def cut_mosaics(mosaics: Digits, mosaic: int) -> Digits:
    """The digits that images of mosaic x mosaic digits consist of, each with its image's label."""
    tiles = mosaics.images.reshape(-1, mosaic, DIGIT_SIZE, mosaic, DIGIT_SIZE, 1).transpose(0, 1, 3, 2, 4, 5)
    return Digits(tiles.reshape(-1, DIGIT_SIZE, DIGIT_SIZE, 1), np.repeat(mosaics.labels, mosaic**2))
