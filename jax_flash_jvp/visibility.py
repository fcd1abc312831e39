"""Who sees whom, in a line: `key_ranges` of the usual patterns, for arrays of JAX, of PyTorch and of numpy.

    from jax_flash_jvp import visibility
    o = dot_product_attention(q, k, v, key_ranges=visibility.prefix(1024, 100, like=q))

Every function but `sliding_tile` returns int32 [1|B, 1, T, R, 2]: of each query the intervals [start, end) of keys that it sees.
`like`, any array, says of which framework, and on which device, the result is; without it, and without other arrays, numpy's.
Numbers that may be arrays of one for each batch entry, [B], may be traced: their values need no recompilation.  Sizes that are
not positive or do not fit raise a ValueError, what is no integer a TypeError.
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
        """Of int32."""
        if self.is_torch:
            return self.module.as_tensor(a, dtype=self.module.int32, device=self.device)
        return self.module.asarray(a).astype(np.int32)

    def places(self, name: str, a: Any) -> Any:
        """Of int32, what users gave; those that no sequence reaches as the furthest that can be counted with."""
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
        """Of starts and ends, each [T], [B, T] or a number."""
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
    """Of a window; None for one that no place reaches, with which int32 could not count."""
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
            f"`{name}` must have shape {tuple(edges[1:].shape)}, a length a document: got {tuple(lengths.shape)}"
        )
    return arrays.module.minimum(edges[:-1] + lengths, edges[1:])


def causal(queries: int, *, offset: Any = 0, like: Any = None) -> Any:
    """Query i sees keys 0 … i + offset; `offset`, a number or [B], is how many keys stand in a cache before the queries."""
    return window(queries, offset=offset, right=0, like=like)


def window(
    queries: int, left: int | None = None, right: int | None = None, *, offset: Any = 0, like: Any = None
) -> Any:
    """Query i sees keys i + offset - left … i + offset + right; None does not limit a side."""
    arrays, left, right = _Arrays(like, offset), _limit("left", left), _limit("right", right)
    i = arrays.numbers(queries) + _rows("offset", offset, arrays)
    end = i * 0 + np.iinfo(np.int32).max if right is None else i + (right + 1)
    return arrays.ranges((i * 0 if left is None else i - left, end))


def prefix(queries: int, length: Any, *, like: Any = None) -> Any:
    """Query i sees keys 0 … i, and all of the first `length`, a number or [B]: a prefix language model."""
    arrays = _Arrays(like, length)
    i, length = arrays.numbers(queries), _rows("length", length, arrays)
    return arrays.ranges((0, arrays.module.maximum(i + 1, length)))


def block_causal(queries: int, block: int, *, like: Any = None) -> Any:
    """A query sees the keys of its block and of those before: frames of a video, one after the other."""
    arrays = _Arrays(like)
    return arrays.ranges((0, (arrays.numbers(queries) // _count("block", block) + 1) * block))


def teacher_forcing(queries: int, block: int, *, like: Any = None) -> Any:
    """Of a sequence and its noisy copy behind it, `queries` in all, in blocks: clean ones see clean ones as in `block_causal`; a
    noisy one sees itself and the clean ones before it.  So every block is generated from clean ones, all in one pass."""
    arrays = _Arrays(like)
    if queries % 2:
        raise ValueError(f"`queries` must be even, a sequence and a noisy copy as long: got {queries}")
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
    """Query i sees the keys of its document: that with cu_seqlens[d] <= i < cu_seqlens[d + 1], whose keys are from
    key_cu_seqlens[d] on (as the queries, if None).  Causality and windows count from the lower right corner of each document, as
    in flash-attn; with `causal_alignment` "upper_left", from its first query and key.  `lengths` and `key_lengths`, integers
    [documents], say how many queries and keys of each document count; None: all.  Queries of no document, and those that do not
    count, see nothing.

    For the kernels to read nothing behind the last document, pass its end as the lengths of queries and keys too:
    `query_seq_lengths=cu_seqlens[-1:]`, `key_value_seq_lengths=key_cu_seqlens[-1:]`."""
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
    """Of a grid of tokens (frames, rows, columns) in tile order, tile after tile of tokens that lie together: every tile sees a
    window of so many tiles around it, which at the grid's edges is moved inwards (arXiv:2502.04507).

    Returns the keywords of the call: `key_ranges`, where few say it; or else a mask of blocks, `mask` (of PyTorch `attn_mask`),
    with its `mask_block_size`."""
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
    """The boolean mask, [1|B, 1, T, keys], that ranges stand for: to look at, not to compute with."""
    arrays = _Arrays(key_ranges)
    j = arrays.numbers(keys)
    return ((key_ranges[..., :1] <= j) & (j < key_ranges[..., 1:])).any(-2)


def _count(name: str, value: int, least: int = 1) -> int:
    if isinstance(value, bool | float | np.floating):  # what PyTorch traces is no int either
        raise TypeError(f"`{name}` must be an integer: got {value!r}")
    if value < least:
        raise ValueError(f"`{name}` must be {'positive' if least else 'zero or more'}: got {value}")
    return value
