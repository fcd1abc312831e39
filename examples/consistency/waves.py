"""Sines and cosines for positions and times, the same for every framework."""

import numpy as np


def position_waves(side: int, width: int) -> np.ndarray:
    """[side², width]: sines and cosines of row and column, at wavelengths from 2π to 2π · 10,000 tokens."""
    angles = np.arange(side)[:, None] * np.geomspace(1, 1e-4, width // 4)
    waves = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    rows, columns = np.repeat(waves, side, axis=0), np.tile(waves, (side, 1))
    return np.concatenate([rows, columns], axis=1).astype(np.float32)


def time_waves(frames: int, width: int) -> np.ndarray:
    """[frames, width]: sines and cosines of the number of the frame, likewise, at other phases than those of places."""
    angles = 1 + np.arange(frames)[:, None] * np.geomspace(1, 1e-4, width // 2)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def time_frequencies(count: int) -> np.ndarray:
    """Low ones only: the derivative in time, which these methods train on, grows with the highest one.

    With the 1,000 that diffusion models use for times in [0, 1], the tangent drowns the velocity.
    """
    return np.geomspace(0.5, 8.0, count)
