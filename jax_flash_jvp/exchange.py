"""What devices that share a sequence exchange, besides what goes around a ring: in JAX, within a shard_map or its like."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import tree_flatten, tree_unflatten

from jax_flash_jvp.context import Context, zigzag_positions
from jax_flash_jvp.problem import Operands

KINDS = Operands(  # and which axis the rows or columns are; what else there is, all devices have alike
    ("rows", 1), ("columns", 1), ("columns", 1), ("scores", 2), ("scores", 2), query_segments=("rows", 1),
    key_segments=("columns", 1), key_ranges=("rows", 2),
)  # fmt: skip


def reorder_zigzag(x: jax.Array, devices: int, axis: int = 1) -> jax.Array:
    """A whole sequence in zig-zag order.  Equal shards of the result are what `context_order`="zigzag" expects.

    With n `devices` and 2n equal chunks, shard i holds chunks i and 2n - 1 - i.  The positions for rotary embeddings are then
    `zigzag_positions(length, devices)`.

    Args:
      x: an array with a whole sequence along `axis`.
      devices: the number of devices that share the sequence.
      axis: the axis of the sequence.

    Raises:
      ValueError: the length of the sequence is not a multiple of 2 · `devices`.
    """
    return jnp.take(x, zigzag_positions(x.shape[axis], devices), axis)


def restore_zigzag(x: jax.Array, devices: int, axis: int = 1) -> jax.Array:
    """The inverse of `reorder_zigzag`, with the same arguments.

    Raises:
      ValueError: the length of the sequence is not a multiple of 2 · `devices`.
    """
    return jnp.take(x, np.argsort(zigzag_positions(x.shape[axis], devices)), axis)


def kinds_of(part: Any) -> Iterator[tuple[str | None, int]]:
    """The kind of each leaf of a job's arguments or results, and which axis the rows or columns are."""
    if isinstance(part, Operands):
        yield from (kind or (None, 0) for kind, a in zip(KINDS, part, strict=True) if a is not None)
    elif part is not None and any(isinstance(a, tuple | list) for a in part):
        for a in part:
            yield from kinds_of(a)
    elif part is not None:
        yield from (("rows", axis) for a, axis in zip(part, (1, 2), strict=True) if a is not None)


# ------------------------------------------------------------------------------------------------ between orders

# Each half of a contiguous shard goes to the device that has it in zig-zag order, and back.


def _exchanged(exchange: Callable, tree: Any, context: Context) -> Any:
    leaves, structure = tree_flatten(tree)
    moved = [
        exchange(a, axis, context) if kind is not None and a.shape[axis] > 1 else a
        for a, (kind, axis) in zip(leaves, kinds_of(tree), strict=True)
    ]
    return tree_unflatten(structure, moved)


def _routes(context: Context) -> list[list[tuple[int, int]]]:
    """From whom to whom go first halves, which are the even chunks, and second ones."""
    n = context.devices
    return [
        [(device, min(chunk, 2 * n - 1 - chunk)) for device, chunk in enumerate(range(i, 2 * n, 2))] for i in (0, 1)
    ]


def _turned(a: Any, b: Any, context: Context) -> tuple[Any, Any]:
    """The early chunk and the late one, of the even one and the odd one; or back."""
    even = lax.axis_index(context.axes) % 2 == 0
    return jnp.where(even, a, b), jnp.where(even, b, a)


def to_zigzag(tree: Any, context: Context) -> Any:
    """A job's arguments, of contiguous shards, as those of shards in zig-zag order."""
    return _exchanged(_sent_there, tree, context)


def from_zigzag(tree: Any, context: Context) -> Any:
    return _exchanged(_sent_back, tree, context)


def _sent_there(a: Any, axis: int, context: Context) -> Any:
    halves = zip(jnp.split(a, 2, axis), _routes(context), strict=True)
    even, odd = (lax.ppermute(half, context.axes, to) for half, to in halves)
    return jnp.concatenate(_turned(even, odd, context), axis)


def _sent_back(a: Any, axis: int, context: Context) -> Any:
    early, late = jnp.split(a, 2, axis)
    halves = zip(_turned(early, late, context), _routes(context), strict=True)
    back = [lax.ppermute(half, context.axes, [(s, d) for d, s in to]) for half, to in halves]
    return jnp.concatenate(back, axis)


# ------------------------------------------------------------------------------------------------ without a ring

# "Ulysses": shards of the sequence become shards of the heads, and back.  Both are linear, so their derivatives are JAX's.


def by_heads(args: Any, context: Context) -> Any:
    """A job's arguments with all of the sequence, for this device's share of the heads."""
    return _rearranged(args, context, back=False)


def by_sequence(results: Any, context: Context) -> Any:
    """A job's results, of this device's share of the heads, with this device's share of the sequence."""
    return _rearranged(results, context, back=True)


def _rearranged(tree: Any, context: Context, back: bool) -> Any:
    if isinstance(tree, Operands):
        swapped = [_swapped(a, -3, -2, context, back) for a in tree[:3]]
        x = tree._replace(query=swapped[0], key=swapped[1], value=swapped[2])
        gather = lambda a: None if a is None else in_order(a, a.ndim - 1, context)
        x = x._replace(query_segments=gather(x.query_segments), key_segments=gather(x.key_segments))
        ranges = x.key_ranges
        if ranges is not None:
            one = ranges.shape[-4] == 1  # for all heads
            ranges = in_order(ranges, ranges.ndim - 3, context) if one else _swapped(ranges, -3, -4, context, back)
            x = x._replace(key_ranges=ranges)
        device = lax.axis_index(context.axes)
        if x.mask is not None and x.mask.shape[-3] > 1:
            heads = x.mask.shape[-3] // context.devices
            x = x._replace(mask=lax.dynamic_slice_in_dim(x.mask, device * heads, heads, x.mask.ndim - 3))
        if x.seed is not None:
            x = x._replace(seed=x.seed.at[..., 2].add((device * x.query.shape[-2]).astype(x.seed.dtype)))
        return x
    if tree is None or not any(isinstance(a, tuple | list) for a in tree):
        if tree is None:
            return None
        o, statistic = tree
        return _swapped(o, -3, -2, context, back), _swapped(statistic, -1, -2, context, back)
    return type(tree)(_rearranged(a, context, back) for a in tree)


def _swapped(a: Any, sequence: int, heads: int, context: Context, back: bool) -> Any:
    if a is None:
        return None
    sequence, heads = a.ndim + sequence, a.ndim + heads
    if back:
        if context.order == "zigzag":
            a = reorder_zigzag(a, context.devices, sequence)
        return lax.all_to_all(a, context.axes, split_axis=sequence, concat_axis=heads, tiled=True)
    a = lax.all_to_all(a, context.axes, split_axis=heads, concat_axis=sequence, tiled=True)
    return restore_zigzag(a, context.devices, sequence) if context.order == "zigzag" else a


def in_order(a: Any, axis: int, context: Context) -> Any:
    """All shards of an array, in the order of the sequence."""
    a = lax.all_gather(a, context.axes, axis=axis, tiled=True)
    return restore_zigzag(a, context.devices, axis) if context.order == "zigzag" else a


def with_all_columns(x: Operands, context: Context) -> Operands:
    segments = None if x.key_segments is None else in_order(x.key_segments, 1, context)
    return x._replace(key=in_order(x.key, 1, context), value=in_order(x.value, 1, context), key_segments=segments)
