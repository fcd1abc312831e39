"""The pictures: a grid of samples, and the curves of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # pictures go to files, also where there is no display

import matplotlib.pyplot as plt
import numpy as np
from matplotlib import ticker

INK = "#1f3b57"


def sample_grid(path: Path, title: str, panels: Mapping[str, np.ndarray], columns: int, wide: bool = False) -> None:
    """One panel of images [N, height, width, 1] in [-1, 1] per entry, `columns` images to a row; two beside each other, or one
    that is `wide`."""
    across, width = (1, 9.6) if wide else (min(len(panels), 2), 4.8)
    down = -(-len(panels) // across)
    pictures = [_tile(images, columns) for images in panels.values()]
    height = (width - 0.4) * pictures[0].shape[0] / pictures[0].shape[1] + 0.4
    figure, axes = plt.subplots(down, across, figsize=(width * across, height * down + 0.6), squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    for axis, name, picture in zip(axes.flat, panels, pictures, strict=False):
        axis.imshow(picture, cmap="gray_r", vmin=-1, vmax=1, interpolation="nearest")
        axis.set_title(name, fontsize=11, color=INK)
    save(figure, title, path)


def curves(path: Path, title: str, history: Sequence[Mapping[str, float]], names: Mapping[str, str]) -> None:
    """One panel per entry of `names` (key in the history → label): every step, and a moving median."""
    figure, axes = plt.subplots(1, len(names), figsize=(5.2 * len(names), 3.8), squeeze=False)
    steps = np.array([entry["step"] for entry in history])
    for axis, (name, label) in zip(axes.flat, names.items(), strict=True):
        values = np.array([entry[name] for entry in history])
        half = max(1, len(values) // 100)
        smooth = [np.median(values[max(0, index - half) : index + half + 1]) for index in range(len(values))]
        axis.plot(steps, values, color=INK, alpha=0.25, linewidth=0.8)
        axis.plot(steps, smooth, color=INK, linewidth=1.8)
        axis.set_yscale("log")
        # Networks start at zero: do not spread the axis for the first few steps.
        if np.any(values > 0):
            axis.set_ylim(bottom=0.8 * np.quantile(values[values > 0], 0.05))
        label_axes(axis, "step", label)
    save(figure, title, path)


def label_axes(axis: plt.Axes, horizontal: str, title: str) -> None:
    """Titles, a grid, and plain numbers where the vertical scale is logarithmic."""
    axis.set_xlabel(horizontal)
    axis.set_title(title, fontsize=11, color=INK)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    if axis.get_yscale() == "log":
        low, high = axis.get_ylim()
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if high < 1e3 * low else (1,)))
        axis.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
        axis.yaxis.set_minor_formatter(ticker.NullFormatter())


def save(figure: plt.Figure, title: str, path: Path) -> None:
    figure.suptitle(title, fontsize=14, color=INK)
    figure.tight_layout(w_pad=3, h_pad=2)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _tile(images: np.ndarray, columns: int) -> np.ndarray:
    """[N, height, width, 1] → one picture, with a gap as wide as an eighth of an image between images."""
    gap = max(1, images.shape[1] // 8)
    padded = np.pad(images[..., 0], ((0, 0), (0, gap), (0, gap)), constant_values=-1)
    rows = len(padded) // columns
    grid = padded[: rows * columns].reshape(rows, columns, *padded.shape[1:])
    return grid.transpose(0, 2, 1, 3).reshape(rows * padded.shape[1], -1)[:-gap, :-gap]
