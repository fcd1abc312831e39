"""Videos of handwritten digits that move and bounce off the edges."""

from pathlib import Path

import numpy as np

from consistency import plots
from consistency.data import DIGIT_SIZE, Digits
from consistency.waves import position_waves, time_waves


def moving_digits(digits: Digits, batch: int, frames: int, side: int, movers: int, seed: int, step: int) -> Digits:
    """`batch` videos [frames, side, side] of so many digits, all of a video from one class, each at a constant speed.

    A video of more frames is a slower one: along each side a digit moves by at most 16 whole pixels in all.

    A function of (seed, step) alone, so that a resumed run sees the videos that an uninterrupted one sees.
    """
    generator = np.random.default_rng((seed, step))
    labels = digits.labels[generator.integers(len(digits.labels), size=batch)]
    room = side - DIGIT_SIZE
    start = generator.uniform(0, 2 * room, (batch, movers, 2, 1))
    distance = generator.uniform(-16, 16, (batch, movers, 2, 1))  # pixels
    path = start + distance * np.arange(frames) / frames
    corners = np.rint(room - np.abs(path % (2 * room) - room)).astype(int) if room else np.zeros_like(path, int)
    videos = np.full((batch, frames, side, side), -1, np.float32)
    for video, label, of_video in zip(videos, labels, corners, strict=True):
        same = np.flatnonzero(digits.labels == label)
        for image, (rows, columns) in zip(generator.choice(same, movers), of_video, strict=True):
            for frame, row, column in zip(video, rows, columns, strict=True):
                place = frame[row : row + DIGIT_SIZE, column : column + DIGIT_SIZE]
                np.maximum(place, digits.images[image, ..., 0], out=place)
    return Digits(videos, labels)


def place_waves(frames: int, side: int, width: int) -> np.ndarray:
    """[frames · side², width]: the waves of place and of time of each token, frame after frame."""
    of_time = np.repeat(time_waves(frames, width), side**2, axis=0)
    return np.tile(position_waves(side, width), (frames, 1)) + of_time


def film_strips(path: Path, title: str, videos: dict[str, np.ndarray], shown: int = 8, each: int = 5) -> None:
    """One panel per entry of `videos` [N, frames, side, side], a row of frames per video."""
    stride = max(1, next(iter(videos.values())).shape[1] // shown)
    strips = {name: np.asarray(video, np.float32)[:each, ::stride][:, :shown] for name, video in videos.items()}
    panels = {name: strip.reshape(-1, *strip.shape[2:], 1) for name, strip in strips.items()}
    plots.sample_grid(path, title, panels, columns=next(iter(strips.values())).shape[1])
