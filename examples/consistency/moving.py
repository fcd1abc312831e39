"""Videos of handwritten digits that move and bounce off the edges."""

from pathlib import Path

import numpy as np

from consistency import plots
from consistency.data import DIGIT_SIZE, Digits
from consistency.waves import position_waves, time_waves
from jax_flash_jvp import visibility

SHOT = 8  # frames

PRESETS = {
    "digits": {},  # 8 frames of 4 x 4 tokens
    # 1,024 frames of them, with heads of 64 channels
    "video": dict(
        frames=1024,
        width=128,
        depth=6,
        heads=2,
        dtype="bfloat16",
        batch=4,
        steps=20000,
        learning_rate=1e-3,
        ema_decay=0.999,
        equal_times=0.5,
    ),
}


def moving_digits(digits: Digits, batch: int, frames: int, side: int, movers: int, seed: int, step: int) -> Digits:
    """`batch` videos [frames, side, side] of so many digits, all of a video from one class.

    Every 8 frames, a shot, each is written anew and takes another direction, in which it moves at constant speed, along each
    side by at most 16 whole pixels: a longer video shows more, rather than the same more often, which nearly pure noise would
    give away already (docs/tutorials/index.md).

    A function of (seed, step) alone, so that a resumed run sees the videos that an uninterrupted one sees.
    """
    generator = np.random.default_rng((seed, step))
    labels = digits.labels[generator.integers(len(digits.labels), size=batch)]
    room, shot = side - DIGIT_SIZE, np.arange(frames) // SHOT
    start = generator.uniform(0, 2 * room, (batch, movers, 2, 1))
    speed = generator.uniform(-16, 16, (batch, movers, 2, shot[-1] + 1)) / SHOT  # pixels a frame
    moved = speed[..., shot]
    path = start + np.cumsum(moved, axis=-1) - moved
    corners = np.rint(room - np.abs(path % (2 * room) - room)).astype(int) if room else np.zeros_like(path, int)
    videos = np.full((batch, frames, side, side), -1, np.float32)
    of_classes = [np.flatnonzero(digits.labels == label) for label in labels]
    written = np.stack([generator.choice(of_class, (movers, shot[-1] + 1)) for of_class in of_classes])[..., shot]
    video, frame, pixel = np.ogrid[:batch, :frames, :DIGIT_SIZE]
    for mover in range(movers):
        rows, columns = (corners[:, mover, axis, :, None] + pixel for axis in range(2))
        places = video[..., None], frame[..., None], rows[..., None], columns[:, :, None]
        videos[places] = np.maximum(videos[places], digits.images[written[:, mover], ..., 0])
    return Digits(videos, labels)


def place_waves(frames: int, side: int, width: int) -> np.ndarray:
    """[frames · side², width]: the waves of each token's place, and of its shot and frame in it, frame after frame."""
    shot, frame = np.divmod(np.arange(frames), SHOT)
    of_time = np.concatenate([time_waves(n.max() + 1, width // 2)[n] for n in (shot, frame)], axis=1)
    return np.tile(position_waves(side, width), (frames, 1)) + of_time.repeat(side**2, axis=0)


def shot_ranges(frames: int, side: int) -> np.ndarray:
    """The `key_ranges` of tokens that each see their shot."""
    tokens = frames * side**2
    return visibility.documents(tokens, np.append(np.arange(0, tokens, SHOT * side**2), tokens))


def film_strips(path: Path, title: str, videos: dict[str, np.ndarray], each: int = 5) -> None:
    """One panel per entry of `videos` [N, frames, side, side], a row for each: its first shot, and eight frames of the others."""
    frames = next(iter(videos.values())).shape[1]
    later = np.linspace(SHOT, frames - 1, np.clip(frames - SHOT, 0, 8)).astype(int)
    chosen = [*range(min(frames, SHOT)), *later]
    strips = {name: np.asarray(video, np.float32)[:each, chosen] for name, video in videos.items()}
    panels = {name: strip.reshape(-1, *strip.shape[2:], 1) for name, strip in strips.items()}
    plots.sample_grid(path, title, panels, columns=len(chosen), wide=frames > SHOT)
