"""Which keys the reference computes scores of: those that some query of a block sees, as far as the host knows the values.

Queries and keys are counted in grains.  Of a grain of queries, the grains of keys that some batch entry and some head may see
are the bits of an integer, so that unions and counts cost little.  The last key of a sequence may end a grain early.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_bridge import private
from torch_bridge.block_mask import pages_of

GRAIN = 16
FEW = 2**17  # scores that take no longer than to look at who sees whom
WASTE = 2**15  # scores that nobody sees and that take no longer than a block of their own
DENSE = 0.75  # of the keys between the first and the last that a block sees: they are not worth gathering


class Block(NamedTuple):
    """Queries first … last - 1, and the keys that some of them may see: all of begin … end - 1, or those at `places`."""

    first: int
    last: int
    begin: int
    end: int
    places: np.ndarray | None = None


def blocks(case: Any, q: Tensor, k: Tensor, mask: Tensor | None, most: int) -> Iterator[Block]:
    """All queries in blocks, of at most so many scores unless that were fewer than 16 queries."""
    queries, keys = q.shape[2], k.shape[2]
    each = max(1, q.shape[0] * q.shape[1])  # scores of a query and a key
    seen = _seen(case, mask, queries, keys) if q.device.type == "cpu" and each * queries * keys > FEW else None
    if seen is None:
        reach, size = case.problem.reach(queries, keys), max(GRAIN, most // (each * max(1, keys)))
        for first in range(0, max(1, queries), size):
            yield Block(first, min(first + size, queries), *_reached(reach, first, min(first + size, queries), keys))
        return
    rows = [int.from_bytes(row.tobytes(), "little") for row in np.packbits(seen, 1, bitorder="little")]
    each *= GRAIN * GRAIN
    first, union, useful = 0, rows[0], rows[0].bit_count()
    for i, row in enumerate(rows[1:], 1):
        scores, useful = (i + 1 - first) * (union | row).bit_count(), useful + row.bit_count()
        if each * scores > most or each * (scores - useful) > WASTE:
            yield _block(first, i, union, queries, keys)
            first, union, useful = i, row, row.bit_count()
        union |= row
    yield _block(first, len(rows), union, queries, keys)


def _block(first: int, last: int, union: int, queries: int, keys: int) -> Block:
    """A block, from numbers of grains."""
    begin, end = ((union & -union).bit_length() - 1, union.bit_length()) if union else (0, 0)
    places = None
    if union.bit_count() < DENSE * (end - begin):
        grains = np.array([n for n in range(begin, end) if union >> n & 1])
        places = (grains[:, None] * GRAIN + np.arange(GRAIN)).ravel()
        places = places[places < keys]
    return Block(first * GRAIN, min(last * GRAIN, queries), begin * GRAIN, min(end * GRAIN, keys), places)


def _reached(reach: tuple[int | None, int | None], first: int, last: int, keys: int) -> tuple[int, int]:
    """The first key that causality and windows leave to queries first … last - 1, and the one behind their last."""
    left, right = reach
    begin = 0 if left is None else min(max(0, first - left), keys)
    return begin, keys if right is None else max(begin, min(keys, last + right))


def _seen(case: Any, mask: Tensor | None, queries: int, keys: int) -> np.ndarray | None:
    """[grains of queries, grains of keys], False where nobody sees anything; None: the host does not know, or nothing says so."""
    problem, x = case.problem, case.selection
    fields = ("query_lengths", "key_lengths", "query_segments", "key_segments", "key_ranges")
    given = {name: getattr(x, name) for name in fields if getattr(x, name) is not None}
    if mask is not None and problem.mask_block is not None:
        given["mask"] = mask
    known: dict[str, Any] = {name: _known(a) for name, a in given.items()}
    if not known or any(a is None for a in known.values()):
        return None
    i, j = (_grains(np.arange(n)) for n in (queries, keys))
    i_first, i_last, j_first, j_last = i[:, :1], i[:, -1:], j[:, 0], j[:, -1]
    left, right = problem.reach(queries, keys)
    seen = np.ones((len(i), len(j)), bool)
    if left is not None:
        seen &= i_first - left <= j_last
    if right is not None:
        seen &= i_last + right >= j_first
    if "query_lengths" in known:
        seen &= i_first < known["query_lengths"].max(initial=0)
    if "key_lengths" in known:
        seen &= j_first < known["key_lengths"].max(initial=0)
    if "query_segments" in known:
        of_queries, of_keys = (_grains(known[name].T) for name in ("query_segments", "key_segments"))  # [g, GRAIN, B]
        ends = (a.T for a in (of_queries.min(1), of_queries.max(1), of_keys.min(1), of_keys.max(1)))
        some = np.zeros_like(seen)
        for q_low, q_high, k_low, k_high in zip(*ends, strict=True):  # of each batch entry
            some |= (q_low[:, None] <= k_high) & (q_high[:, None] >= k_low)
        seen &= some
    if "key_ranges" in known:
        start, end = np.moveaxis(known["key_ranges"], -1, 0)  # [B, H, T, R]
        empty = start >= end
        start, end = np.where(empty, keys, start).min((0, 1)), np.where(empty, 0, end).max((0, 1))
        some = np.zeros_like(seen)
        for low, high in zip(_grains(start).min(1).T, _grains(end).max(1).T, strict=True):  # of each range
            some |= (low[:, None] <= j_last) & (high[:, None] > j_first)
        seen &= some
    if mask is not None and problem.mask_block is not None:
        a, (b_q, b_k) = known["mask"], problem.mask_block
        if mask.dtype != torch.bool:  # of pages, of which the first hides all
            a = a[:, :, 0, 1 : pages_of(mask, (b_q, b_k), (queries, keys))[0].shape[3]]
            a = a.reshape(*a.shape[:2], -(-queries // b_q), -(-keys // b_k)) != 0
        a = _some(a.any((0, 1)), i_first[:, 0] // b_q, i_last[:, 0] // b_q)
        seen &= _some(a.T, j_first // b_k, j_last // b_k).T
    return seen


def _known(a: Tensor | None) -> np.ndarray | None:
    """Its numbers; None where it is mapped, or traced."""
    while a is not None and private.is_gradtrackingtensor(a):
        a = private.get_unwrapped(a)
    if type(a) is not Tensor or private.is_functorch_wrapped_tensor(a) or a.device.type != "cpu":
        return None
    with private.DisableFuncTorch():  # a level would wrap what `numpy` asks for on the way
        return a.detach().numpy()


def _grains(a: np.ndarray) -> np.ndarray:
    """[n, …] -> [grains, GRAIN, …], the last filled up with its last row"""
    n = len(a)
    return a[np.minimum(np.arange(-(-n // GRAIN) * GRAIN), n - 1)].reshape(-1, GRAIN, *a.shape[1:])


def _some(a: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Is any of the rows first … last True?  [n, …] -> [grains, …]"""
    counts = np.concatenate([np.zeros_like(a[:1], np.int32), a.cumsum(0, dtype=np.int32)])
    return counts[last + 1] > counts[first]
