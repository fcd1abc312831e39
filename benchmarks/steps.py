"""What the benchmarks of whole training steps share: sizes of a diffusion transformer, its data, and contenders."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

PATCH = 4  # of one channel: as many numbers in a token as 2 × 2 of the four channels of a latent have
CLASSES = 10


class Size(NamedTuple):
    batch: int
    length: int
    width: int
    depth: int
    heads: int
    dtype: str

    def part(self) -> "Size":
        """What is computed in float64 too: one block, two images."""
        return self._replace(batch=2, depth=1)

    def options(self) -> dict[str, Any]:
        """Those of the examples' configuration, in which a picture is a square of digits of 8 × 8 pixels."""
        return {"mosaic": math.isqrt(self.length) * PATCH // 8, "patch": PATCH} | {
            name: getattr(self, name) for name in ("batch", "width", "depth", "heads", "dtype")
        }

    def draw(self) -> list[np.ndarray]:
        """Random images, labels, noise and times r ≤ t, which are equal in three quarters of the images."""
        random, side = np.random.default_rng(0), PATCH * math.isqrt(self.length)
        x, e = random.standard_normal((2, self.batch, side, side, 1), np.float32)
        r, t = np.sort(random.random((2, self.batch), np.float32), 0)
        equal = 3 * self.batch // 4
        r[:equal] = t[:equal]
        return [x, np.arange(self.batch, dtype=np.int32) % CLASSES, e, r, t]


class Step(NamedTuple):
    attention: str  # by the name that the examples know
    jvp: bool = True  # or plain flow matching
    compiled: bool = False  # by torch.compile
    graphs: bool = False  # which are CUDA's, of a compiled step


class Prepared(NamedTuple):
    call: Callable[[], Any]  # one training step
    attention: Callable[[], Any]  # what a block's attention computes in it: the JVP where it has one, and the backward
    peak_gib: float  # of parameters, optimizer, activations and all
