"""Packed sequences drawn at random, with tokens that belong to none."""

from typing import NamedTuple

import numpy as np


class Packed(NamedTuple):
    """Of queries, then of keys: where sequences begin, which tokens are in one that has tokens on the other side too, and where
    sequences begin when these tokens alone are put together."""

    edges: tuple[np.ndarray, np.ndarray]
    inside: tuple[np.ndarray, np.ndarray]
    compact: tuple[np.ndarray, np.ndarray]


def drawn(seed: int, longest: int = 8, *, gaps: bool = True) -> Packed:
    """Tokens of none lie behind the last sequence, and with `gaps` before the first and in between too: those of a sequence that
    has none on the other side."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, longest, (2, 6))
    ends = rng.integers(1, longest, (2, 2))
    if gaps:
        sizes[[0, 1, 1], rng.permutation(6)[:3]] = 0
    else:
        ends[:, 0] = 0
    alive = (sizes > 0).all(0)
    both = tuple(zip(ends, sizes, strict=True))
    return Packed(
        edges=tuple(np.cumsum([first, *own], dtype=np.int32) for (first, _), own in both),
        inside=tuple(np.repeat([False, *alive, False], [first, *own, last]) for (first, last), own in both),
        compact=tuple(np.cumsum([0, *own[alive]], dtype=np.int32) for _, own in both),
    )
