"""What of a call the tiled reference computes: the tiles of scores that somebody sees, or, where queries see few keys, a band.

In a band, each block of BAND queries is a batch entry of its own, with the WIDTH keys from the first on that it sees: a call of
few queries and few keys, whose ranges are those of the call, counted from that key.  The values, which may be traced, decide
between the two when the call runs.
"""

import dataclasses
from collections.abc import Callable
from functools import reduce
from operator import and_
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_flash_jvp.problem import Operands, Problem

BAND, GRAIN, WIDTH = 16, 8, 48  # queries; keys, of which the first seen is a multiple; keys
BLOCKS_AT_ONCE = 32  # blocks of queries, at most, that are computed at once

Arrays = dict[str, Any]


class Axis(NamedTuple):
    """A sequence axis in blocks of equal length, the last one padded; never without a block."""

    length: int
    blocks: int
    block: int

    @classmethod
    def cut(cls, length: int, most: int) -> "Axis":
        blocks = max(1, -(-length // most))
        return cls(length, blocks, max(1, -(-length // blocks)))

    def positions(self, i: Any) -> Any:
        return i * self.block + np.arange(self.block, dtype=np.int32)

    def split(self, a: Array, axis: int) -> Array:
        """[..., length, ...] -> [blocks, ..., block, ...], `axis` counted from the end"""
        axis += a.ndim
        a = jnp.pad(a, [(0, (self.blocks * self.block - self.length) * (i == axis)) for i in range(a.ndim)])
        return jnp.moveaxis(a.reshape(*a.shape[:axis], self.blocks, self.block, *a.shape[axis + 1 :]), axis, 0)

    def join(self, a: Array, axis: int) -> Array:
        """[blocks, ..., block, ...] -> [..., length, ...], `axis` counted from the end"""
        a = jnp.moveaxis(a, 0, axis - 1)
        axis += a.ndim - 1
        a = a.reshape(*a.shape[:axis], self.blocks * self.block, *a.shape[axis + 2 :])
        return lax.slice_in_dim(a, 0, self.length, axis=axis)

    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """The first and the last position of each block."""
        first = np.arange(self.blocks, dtype=np.int32) * self.block
        return first, np.minimum(first + self.block, self.length) - 1

    def gather(self, a: Array) -> Array:
        """[..., length] -> [..., blocks, block], the last one filled up with its last element"""
        places = np.minimum(np.arange(self.blocks * self.block), self.length - 1)
        return a[..., places].reshape(*a.shape[:-1], self.blocks, self.block)


@jax.custom_batching.custom_vmap
def by_some(seen: Array) -> Array:
    """`seen`.  Under vmap, whether any entry sees it: a condition that differs between entries would skip nothing."""
    return seen


@by_some.def_vmap
def _by_some_mapped(axis_size: int, in_batched: Any, seen: Array) -> tuple[Array, bool]:
    return by_some(seen.any(0)), False


def visible(x: Operands, problem: Problem, rows: Axis, columns: Axis) -> Array | None:
    """[blocks of queries, blocks of keys], False where no batch entry and no head sees anything; None: no array says so."""
    told = (x.query_lengths, x.key_lengths, x.query_segments, x.key_ranges)
    blocks = problem.mask_block if x.mask is not None else None
    if (all(a is None for a in told) and blocks is None) or 0 in (*x.query.shape[:2], x.key.shape[1]):
        return None
    (i_first, i_last), (j_first, j_last) = rows.ends(), columns.ends()
    left, right = problem.reach(rows.length, columns.length)
    tests: list[Any] = [j_last >= i_first[:, None] - left] if left is not None else []
    tests += [j_first <= i_last[:, None] + right] if right is not None else []
    tests += [(i_first < x.query_lengths.max())[:, None]] if x.query_lengths is not None else []
    tests += [(j_first < x.key_lengths.max())[None]] if x.key_lengths is not None else []
    if x.query_segments is not None:
        q, k = rows.gather(x.query_segments), columns.gather(x.key_segments)  # [B, blocks, block]
        q_low, q_high, k_low, k_high = q.min(2), q.max(2), k.min(2), k.max(2)
        tests += [((q_low[..., None] <= k_high[:, None]) & (k_low[:, None] <= q_high[..., None])).any(0)]
    if x.key_ranges is not None:
        start, end = x.key_ranges[..., 0], x.key_ranges[..., 1]  # [1|B, 1|K|N, T, R]
        empty = start >= end
        start, end = jnp.where(empty, columns.length, start).min((0, 1)), jnp.where(empty, 0, end).max((0, 1))
        start, end = rows.gather(start.T).min(2)[..., None], rows.gather(end.T).max(2)[..., None]  # [R, blocks, 1]
        tests += [((start <= j_last[None, None]) & (j_first[None, None] < end)).any(0)]
    if x.mask is not None and blocks is not None:
        seen = some_of(x.mask.any((0, 1)), i_first // blocks[0], i_last // blocks[0])
        tests += [some_of(seen.T, j_first // blocks[1], j_last // blocks[1]).T]
    return by_some(jnp.broadcast_to(reduce(and_, tests), (rows.blocks, columns.blocks)))


def some_of(a: Array, first: np.ndarray, last: np.ndarray) -> Array:
    """Is any of the rows first … last True?  [n, …] -> [blocks, …]"""
    counts = jnp.pad(a.astype(jnp.int32).cumsum(0), ((1, 0), (0, 0)))
    return counts[last + 1] > counts[first]


def sweep(
    f: Callable, x: Operands, problem: Problem, rows: Arrays, keys: Arrays, sums: Arrays, scan: Callable
) -> Arrays:
    """f(x, problem, rows, keys), in a band if all that queries see fits one.  `rows` are further arrays [B, T, N, C], and `keys`
    [B, S, K, C].  Results are like them; `sums` are zeros for those that have a row for each key."""
    of_queries = Axis.cut(x.query.shape[1], BAND)._replace(block=BAND)
    of_keys = Axis(x.key.shape[1], -(-x.key.shape[1] // GRAIN), GRAIN)
    whole = lambda: f(x, problem, rows, keys)
    full = x.bias is not None or (x.mask is not None and problem.mask_block is None)
    if full or x.key.shape[1] < 2 * WIDTH or x.query.shape[1] < BAND:
        return whole()
    groups = -(-of_queries.blocks // BLOCKS_AT_ONCE)
    of_queries = of_queries._replace(blocks=groups * -(-of_queries.blocks // groups))
    seen = visible(x, problem, of_queries, of_keys)
    if seen is None:
        return whole()
    some = seen.any(1)
    argmax = lambda a: jnp.where(some, lax.argmax(a, 1, jnp.int32), 0)
    first = argmax(seen) * GRAIN
    last = jnp.where(some, of_keys.blocks - argmax(seen[:, ::-1]), 0) * GRAIN
    begin = jnp.minimum(first, of_keys.length - WIDTH)
    band = Band(x, problem, of_queries, groups)
    return lax.cond((last - begin <= WIDTH).all(), lambda: band.sweep(f, begin, rows, keys, sums, scan), whole)


class Band:
    """A call as many small ones, `groups` of blocks of queries one after the other."""

    def __init__(self, x: Operands, problem: Problem, blocks: Axis, groups: int) -> None:
        self.x, self.problem, self.blocks, self.groups = x, problem, blocks, groups
        self.batch, self.keys = x.query.shape[0], x.key.shape[1]
        self.small = dataclasses.replace(problem, is_causal=False, window=None, lower_right=False, mask_block=None)

    def ranges(self) -> Array:
        """[1|B, 1|K|N, T, R, 2], from ranges, causality, windows and lengths"""
        x, queries = self.x, self.blocks.length
        i = np.arange(queries, dtype=np.int32)[None, None, :, None]
        ranges = jnp.tile(np.array([0, self.keys], np.int32), (1, 1, queries, 1, 1))
        ranges = ranges if x.key_ranges is None else x.key_ranges
        start, end = ranges[..., 0], ranges[..., 1]
        left, right = self.problem.reach(queries, self.keys)
        start = start if left is None else jnp.maximum(start, i - left)
        end = end if right is None else jnp.minimum(end, i + (right + 1))
        of_entry = lambda lengths: lengths[:, None, None, None]
        end = end if x.key_lengths is None else jnp.minimum(end, of_entry(x.key_lengths))
        end = end if x.query_lengths is None else jnp.where(i < of_entry(x.query_lengths), end, 0)
        return jnp.stack(jnp.broadcast_arrays(jnp.clip(start, 0, self.keys), jnp.clip(end, 0, self.keys)), -1)

    def cut(self, a: Array, axis: int) -> Array:
        """[..., T, ...] -> [groups, blocks, ..., block, ...], `axis` counted from the end"""
        a = self.blocks.split(a, axis)
        return a.reshape(self.groups, -1, *a.shape[1:])

    def entries(self, a: Array) -> Array:
        """[blocks, 1|B, ...] -> [blocks · B, ...]"""
        return jnp.broadcast_to(a, (a.shape[0], self.batch, *a.shape[2:])).reshape(-1, *a.shape[2:])

    def sweep(self, f: Callable, begin: Array, rows: Arrays, keys: Arrays, sums: Arrays, scan: Callable) -> Arrays:
        x, first = self.x, self.blocks.ends()[0].reshape(self.groups, -1)
        cut = {name: self.cut(a, -3) for name, a in {**rows, "query": x.query, "ranges": self.ranges()}.items()}
        if x.query_segments is not None:
            cut["segments"] = self.cut(x.query_segments, -1)

        def one_group(sums: Arrays, inputs: Any) -> tuple[Arrays, Arrays]:
            first, begin, cut = inputs
            places = begin[:, None] + np.arange(WIDTH, dtype=np.int32)[None]  # [blocks, WIDTH]
            query_entries = {name: self.entries(a) for name, a in cut.items()}
            of_keys = {**keys, "key": x.key, "value": x.value}
            of_keys = {name: self.entries(jnp.moveaxis(a[:, places], 1, 0)) for name, a in of_keys.items()}
            ranges = self.entries(cut["ranges"] - begin[:, None, None, None, None, None])
            small = Operands(query_entries.pop("query"), of_keys.pop("key"), of_keys.pop("value"), key_ranges=ranges)
            query_entries.pop("ranges")
            if x.query_segments is not None:
                of_blocks = jnp.moveaxis(x.key_segments[:, places], 1, 0)
                small = small._replace(
                    query_segments=query_entries.pop("segments"), key_segments=self.entries(of_blocks)
                )
            if x.seed is not None:
                moved = jnp.stack([*[first * 0] * 3, first, begin], -1).astype(x.seed.dtype)
                small = small._replace(seed=self.entries(x.seed[None] + moved[:, None]))
            if x.mask is not None and self.problem.mask_block is not None:
                queries, columns = self.problem.mask_block
                i = jnp.minimum(
                    (first[:, None] + np.arange(BAND, dtype=np.int32)[None]) // queries, x.mask.shape[2] - 1
                )
                elements = x.mask[:, :, i[..., None], (places // columns)[:, None]]
                small = small._replace(mask=self.entries(jnp.moveaxis(elements, 2, 0)))
            results = f(small, self.small, query_entries, of_keys)
            results = {n: jnp.moveaxis(a.reshape(-1, self.batch, *a.shape[1:]), 0, 1) for n, a in results.items()}
            sums = {name: a.at[:, places].add(results.pop(name)) for name, a in sums.items()}
            return sums, {name: jnp.moveaxis(a, 1, 0) for name, a in results.items()}

        inputs = first, begin.reshape(self.groups, -1), cut
        sums, results = scan(one_group, sums, inputs, self.groups)
        return sums | {n: self.blocks.join(a.reshape(-1, *a.shape[2:]), -3) for n, a in results.items()}
