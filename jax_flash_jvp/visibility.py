"""Builds `key_ranges` for the common masks, in one line each, for JAX, PyTorch and NumPy arrays.

    from jax_flash_jvp import visibility
    o = dot_product_attention(q, k, v, key_ranges=visibility.prefix(1024, 100, like=q))

Every function except `sliding_tile` and `matrix` returns int32 [1|B, 1, T, R, 2]: for each query the intervals [start, end) of
keys that it attends to.  `like` is any array.  It decides the framework and the device of the result.  Without it the other array
arguments decide, and without these the result is a NumPy array.  Arguments that may be arrays [B] may be traced: new values need
no recompilation.  Sizes that are not positive or do not fit raise a ValueError.  Values that are not integers raise a TypeError.
"""

import importlib
import itertools
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_flash_jvp.problem import Alignment, lower_right_of

MOST_RANGES = 8  # of sliding tiles; more are said by blocks
FAR = 2**30  # no sequence is as long


class _Arrays:
    """What the functions need of a framework, that of some array."""

    def __init__(self, *arrays: Any):
        torch, jax = sys.modules.get("torch"), sys.modules.get("jax")  # a package that is not loaded has made no array
        tensors = [a for a in arrays if torch is not None and isinstance(a, torch.Tensor)]
        self.device = tensors[0].device if tensors else None
        self.is_torch = bool(tensors)
        if tensors:
            self.module: Any = torch
        elif jax is not None and any(isinstance(a, jax.Array) for a in arrays):
            self.module = importlib.import_module("jax.numpy")
        else:
            self.module = np

    def array(self, a: Any) -> Any:
        """`a` as an array of int32."""
        if self.is_torch:
            return self.module.as_tensor(a, dtype=self.module.int32, device=self.device)
        return self.module.asarray(a).astype(np.int32)

    def places(self, name: str, a: Any) -> Any:
        """A user's positions as an int32 array.  Those that no sequence reaches become the furthest that int32 can count with."""
        if self.is_torch:
            a = self.module.as_tensor(a, device=self.device)
        else:  # JAX would cut off what int32 does not hold
            a = np.asarray(a) if isinstance(a, int | np.integer | np.ndarray) else self.module.asarray(a)
        dtype = str(a.dtype).removeprefix("torch.")
        if not dtype.startswith(("int", "uint")):
            raise TypeError(f"`{name}` must be of integers: got {dtype}; cast it")
        if dtype.endswith(("32", "64")):
            a = a.long() if self.is_torch and dtype != "int32" else a
            a = a.clip(0 if dtype.startswith("uint") else -FAR, FAR)
        return self.array(a)

    def numbers(self, n: int) -> Any:
        _count("queries", n, 0)
        if self.is_torch:
            return self.module.arange(n, dtype=self.module.int32, device=self.device)
        return self.module.arange(n, dtype=np.int32)

    def ranges(self, *pairs: tuple[Any, Any]) -> Any:
        """Ranges [B, 1, T, R, 2] of pairs of a start and an end, each [T], [B, T] or a number."""
        edges = [self.array(a) for pair in pairs for a in pair]
        edges = self.module.broadcast_tensors(*edges) if self.is_torch else self.module.broadcast_arrays(*edges)
        edges = self.module.stack(list(edges), -1)
        batch = edges.shape[0] if edges.ndim == 3 else 1
        # Not by None: along that NumPy's strides are 0, which PyTorch's DDP takes for elements that share memory.
        return edges.reshape(batch, 1, edges.shape[-2], len(pairs), 2)

    def place(self, edges: Any, n: Any) -> Any:
        """How many of the edges, in order, are at most n."""
        if self.is_torch:
            return self.module.searchsorted(edges.contiguous(), n, right=True, out_int32=True)
        return self.module.searchsorted(edges, n, side="right").astype(np.int32)


def _rows(name: str, value: Any, arrays: _Arrays) -> Any:
    """A number, or one for each batch entry, against the queries."""
    value = arrays.places(name, value)
    return value[:, None] if value.ndim else value


def _limit(name: str, size: int | None) -> int | None:
    """A window's limit.  None where it is further than int32 can count."""
    if size is not None and not isinstance(size, int | np.integer):
        raise TypeError(f"`{name}` must be an integer, or None for no limit: got {size!r}")
    return None if size is None or size >= FAR else max(int(size), -FAR)


def _ends(name: str, edges: Any, lengths: Any, arrays: _Arrays) -> Any:
    """Where each document ends, or what counts of it."""
    if lengths is None:
        return edges[1:]
    lengths = arrays.places(name, lengths)
    if lengths.shape != edges[1:].shape:
        raise ValueError(
            f"`{name}` must have shape {tuple(edges[1:].shape)}, one length for each document: got {tuple(lengths.shape)}"
        )
    return arrays.module.minimum(edges[:-1] + lengths, edges[1:])


def causal(queries: int, *, offset: Any = 0, like: Any = None) -> Any:
    """Query i attends to keys 0 … i + offset.  `offset`, a number or [B], counts the keys in a cache before the first query."""
    return window(queries, offset=offset, right=0, like=like)


def window(
    queries: int, left: int | None = None, right: int | None = None, *, offset: Any = 0, like: Any = None
) -> Any:
    """Query i attends to keys i + offset - left … i + offset + right.  None does not limit a side.  `offset`: see `causal`."""
    arrays, left, right = _Arrays(like, offset), _limit("left", left), _limit("right", right)
    i = arrays.numbers(queries) + _rows("offset", offset, arrays)
    end = i * 0 + np.iinfo(np.int32).max if right is None else i + (right + 1)
    return arrays.ranges((i * 0 if left is None else i - left, end))


def prefix(queries: int, length: Any, *, like: Any = None) -> Any:
    """Query i attends to keys 0 … i and to the first `length` keys, a number or [B], as in a prefix language model."""
    arrays = _Arrays(like, length)
    i, length = arrays.numbers(queries), _rows("length", length, arrays)
    return arrays.ranges((0, arrays.module.maximum(i + 1, length)))


def block_causal(queries: int, block: int, *, like: Any = None) -> Any:
    """A query attends to the keys of its own block of size `block` and of all earlier blocks, such as the frames of a video."""
    arrays = _Arrays(like)
    return arrays.ranges((0, (arrays.numbers(queries) // _count("block", block) + 1) * block))


def teacher_forcing(queries: int, block: int, *, like: Any = None) -> Any:
    """The first half of the `queries` is a clean sequence, the second half its noisy copy; both are cut into blocks.  A clean
    block attends as in `block_causal`.  A noisy block attends to itself and to the clean blocks before it.  So one pass trains
    the generation of every block from clean ones."""
    arrays = _Arrays(like)
    if queries % 2:
        raise ValueError(f"`queries` must be even, for a sequence and its noisy copy of the same length: got {queries}")
    half = queries // 2
    i = arrays.numbers(queries)
    noisy, first = i >= half, i % max(1, half) // _count("block", block) * block
    where = arrays.module.where
    last = arrays.module.minimum(first + block, arrays.array(half))
    # clean: [0, last), nothing; noisy: [0, first), its own
    return arrays.ranges(
        (0, where(noisy, first, last)),
        (where(noisy, half + first, arrays.array(0)), where(noisy, half + last, arrays.array(0))),
    )


def documents(
    queries: int,
    cu_seqlens: Any,
    key_cu_seqlens: Any = None,
    *,
    lengths: Any = None,
    key_lengths: Any = None,
    is_causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    causal_alignment: Alignment = "lower_right",
    like: Any = None,
) -> Any:
    """A query attends to the keys of its own document.  Queries of no document attend to nothing.
    Queries and keys of no document may hold NaN.

    Args:
      queries: the number of queries, T.
      cu_seqlens: integers [documents + 1].  The queries of document d are cu_seqlens[d] … cu_seqlens[d + 1] - 1.
      key_cu_seqlens: likewise for the keys.  None: as the queries.
      lengths: integers [documents], how many queries of each document are in use; the others attend to nothing.  None: all.
      key_lengths: likewise for the keys; no query attends to the others.
      is_causal: query i attends to no later key of its document.
      window: (left, right), how many keys to either side; None does not limit a side.
      causal_alignment: "lower_right": causality and windows count from the last query and key of each document, as in
        flash-attn.  "upper_left": they count from the first.
      like: any array; decides the framework and the device of the result.
    """
    arrays = _Arrays(like, cu_seqlens, key_cu_seqlens, lengths, key_lengths)
    q_edges = arrays.places("cu_seqlens", cu_seqlens)
    alike = key_cu_seqlens is None or key_cu_seqlens is cu_seqlens
    k_edges = q_edges if alike else arrays.places("key_cu_seqlens", key_cu_seqlens)
    if q_edges.shape != k_edges.shape:
        raise ValueError(
            "`key_cu_seqlens` must have as many edges as `cu_seqlens`, one more than there are documents: got "
            f"{tuple(k_edges.shape)} for {tuple(q_edges.shape)}"
        )
    i = arrays.numbers(queries)
    count = q_edges.shape[0] - 1
    if count < 1:
        return arrays.ranges((i * 0, i * 0))
    module = arrays.module
    q_ends, k_ends = _ends("lengths", q_edges, lengths, arrays), _ends("key_lengths", k_edges, key_lengths, arrays)
    # how far, in each document, the key that causality counts from is behind the query that it counts from
    shift = k_ends - q_ends if lower_right_of(causal_alignment) else k_edges[:-1] - q_edges[:-1]
    rows = module.stack([k_edges[:-1], k_ends, shift, q_ends], -1)
    none = rows[:1] * 0
    found = module.concatenate([none, rows, none])[arrays.place(q_edges, i)]
    k_first, k_end, shift, q_end = (found[:, column] for column in range(4))
    if lengths is not None:
        k_end = module.where(i < q_end, k_end, k_first)
    if not (isinstance(window, Sequence) and len(window) == 2):
        raise TypeError(f"`window` must be a pair of integers or None, to the left and to the right: got {window!r}")
    left, right = (_limit(f"window[{side}]", size) for side, size in enumerate(window))
    if is_causal:
        right = 0 if right is None else min(right, 0)
    if left is None and right is None:
        return arrays.ranges((k_first, k_end))
    at = shift + i
    start = k_first if left is None else module.maximum(k_first, at - left)
    end = k_end if right is None else module.minimum(k_end, at + (right + 1))
    return arrays.ranges((start, end))


def tokens_in_documents(tokens: int, edges: Sequence[int], other_edges: Sequence[int]) -> np.ndarray | None:
    """[tokens]: which of them are in a document with tokens on the other side, queries for keys or keys for queries; None where
    those before the last edge are.  The edges are known numbers, as many on both sides."""
    alive = np.repeat(np.diff(other_edges) > 0, np.diff(edges))
    if not edges[0] and alive.all():
        return None
    return np.concatenate([np.zeros(edges[0], bool), alive, np.zeros(tokens - edges[-1], bool)])


def sliding_tile(
    grid: Sequence[int], tile: Sequence[int], window: Sequence[int], *, like: Any = None
) -> dict[str, Any]:
    """A token of a grid attends to a window of tiles around its own tile (arXiv:2502.04507).  At the edges of the grid the window
    is moved inwards.  The tokens must be in tile order: all tokens of one tile, then those of the next.

    Args:
      grid: the number of tokens along each axis, such as (frames, rows, columns).
      tile: the number of tokens of a tile along each axis; divides `grid`.
      window: the number of tiles in the window along each axis.
      like: any array; decides the framework and the device of the result.

    Returns:
      Keyword arguments for the call: `key_ranges` if at most eight ranges a query suffice, otherwise `mask` (in PyTorch
      `attn_mask`) with `mask_block_size`.
    """
    for name, sizes in (("grid", grid), ("tile", tile), ("window", window)):
        if not len(sizes) == len(grid) > 0:
            raise ValueError(f"`{name}` must have a number for each axis of `grid`: got {tuple(sizes)}")
        for n in sizes:
            _count(name, n)
    if any(n % size for n, size in zip(grid, tile, strict=True)):
        raise ValueError(f"`grid` must be a multiple of `tile` along each axis: got {tuple(grid)} and {tuple(tile)}")
    arrays, tokens = _Arrays(like), math.prod(tile)
    counts = [n // size for n, size in zip(grid, tile, strict=True)]
    widths = [min(size, n) for size, n in zip(window, counts, strict=True)]
    places = np.stack(np.meshgrid(*map(np.arange, counts), indexing="ij"), -1).reshape(-1, len(counts))
    first = np.clip(places - np.array(widths) // 2, 0, np.array(counts) - widths)  # of each tile, of what it sees
    steps = [math.prod(counts[axis + 1 :]) for axis in range(len(counts))]
    # axes from here on are seen whole, so that tiles along the one before are one range
    whole = next((axis for axis in range(len(counts)) if widths[axis:] == counts[axis:]), len(counts))
    last = max(0, whole - 1)
    offsets = np.array([*itertools.product(*map(range, widths[:last]))], int).reshape(math.prod(widths[:last]), last)
    if len(offsets) <= MOST_RANGES:
        before = ((first[:, None, :last] + offsets) * np.array(steps[:last], int)).sum(-1)  # [tiles, R]
        start = before + first[:, None, last] * steps[last]
        edges = np.stack([start, start + widths[last] * steps[last]], -1) * tokens
        return dict(key_ranges=arrays.array(edges.repeat(tokens, 0).reshape(1, 1, -1, *edges.shape[1:])))
    low, high = first, first + widths
    seen = ((low[:, None] <= places) & (places < high[:, None])).all(-1).reshape(1, 1, len(places), -1)
    name = "attn_mask" if arrays.is_torch else "mask"
    mask = arrays.array(seen) != 0
    return {name: mask, "mask_block_size": (tokens, tokens)}


def matrix(key_ranges: Any, keys: int) -> Any:
    """The boolean mask [1|B, 1, T, keys] that the ranges stand for, for inspection."""
    arrays = _Arrays(key_ranges)
    j = arrays.numbers(keys)
    return ((key_ranges[..., :1] <= j) & (j < key_ranges[..., 1:])).any(-2)


def _count(name: str, value: int, least: int = 1) -> int:
    if isinstance(value, bool | float | np.floating):  # what PyTorch traces is no int either
        raise TypeError(f"`{name}` must be an integer: got {value!r}")
    if value < least:
        raise ValueError(f"`{name}` must be {'positive' if least else 'zero or more'}: got {value}")
    return value
