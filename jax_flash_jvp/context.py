"""How several devices share one sequence: the part that is the same in every framework.

This module imports no framework.  Plans are tuples of numbers.  Functions of arrays take jax.numpy or torch as `xp`.

The devices of a ring hold equal shards of a sequence.  Rows (queries and their results) stay.  Columns (keys, values, their
tangents, and the gradients that they collect) travel once around: at step s device i computes on the columns of device i - s.
Each pair of shards runs the same job as one device would, with `Problem.partial`: its results cover a part of the keys.  With
w = exp(ℓ of the part - ℓ), results of the forward are merged by

    ℓ = logsumexp ℓ_i      o = Σ w_i o_i      μ = Σ w_i μ_i      ȯ = Σ w_i (ȯ_i + (μ_i - μ) o_i)

Gradients are summed.  Their jobs take the final o, ℓ, ȯ and μ.

A shard is one chunk.  In "zigzag" order it is two: of 2n chunks, device i has chunks i and 2n - 1 - i.  Then causality leaves
every pair of devices half of its scores, and no row needs a mask: either all rows with the early columns, or the late rows with
all columns.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

Strategy = Literal["ulysses", "ring", "all_gather"]
Order = Literal["contiguous", "zigzag"]  # in which the devices have the chunks of the sequence
STRATEGIES, ORDERS = get_args(Strategy), get_args(Order)
Window = tuple[int | None, int | None] | None


@dataclasses.dataclass(frozen=True)
class Context:
    """How devices share the sequence of a call: "ring", or "rows": each device has its own rows and all columns."""

    axes: tuple[str, ...]  # of a mesh, over which the devices are numbered
    devices: int
    strategy: Literal["ring", "rows"]
    order: Order = "contiguous"


# ------------------------------------------------------------------------------------------------ chunks


def chunks_of(order: Order, devices: int, device: Any) -> tuple[Any, ...]:
    """The numbers of the chunks that a device holds; `device` may be an array."""
    return (device,) if order == "contiguous" else (device, 2 * devices - 1 - device)


def zigzag_positions(length: int, devices: int) -> np.ndarray:
    """The position in the sequence of each row in zig-zag order, for rotary embeddings.

    Args:
      length: the length of the whole sequence, a multiple of 2 · `devices`.
      devices: the number of devices that share the sequence.

    Returns:
      Integers [length], a NumPy array.

    Raises:
      ValueError: `length` is not a multiple of 2 · `devices`.
    """
    if length % (2 * devices):
        raise ValueError(
            f"a sequence in zig-zag order must be a multiple of twice the {devices} devices: got {length}; pad it to "
            f"{-(-length // (2 * devices)) * 2 * devices}, and pass lengths or segments that leave out what is padded"
        )
    chunks = [chunk for device in range(devices) for chunk in chunks_of("zigzag", devices, device)]
    return np.arange(length).reshape(2 * devices, -1)[chunks].ravel()


def lengths_in(xp: Any, lengths: Any, starts: Sequence[Any], size: int) -> Any:
    """How much of lengths [*, B] lies in chunks of this size, which begin at the positions `starts`, in ascending order."""
    return sum(xp.clip(lengths, start, start + size) - start for start in starts)


def ranges_in(xp: Any, ranges: Any, starts: Sequence[Any], size: int) -> Any:
    """Ranges [*, R, 2] as positions within such chunks, one chunk behind the other: R ranges for each chunk."""
    chunks = (xp.clip(ranges, start, start + size) - start + i * size for i, start in enumerate(starts))
    return xp.concatenate([*chunks], -2)


# ------------------------------------------------------------------------------------------------ the plan


class Block(NamedTuple):
    """Rows and columns of one job, from one chunk of a shard up to another.  `window` is that of `Problem`, counted from the
    first row and column; None: rows see all columns."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    window: Window


class Plan(NamedTuple):
    """What each device computes at each step: `kinds[table[device][step]]`.  Blocks of one kind share no score.  Most kinds have
    one block.  A kind without a block means that rows see none of the columns."""

    kinds: tuple[tuple[Block, ...], ...]
    table: tuple[tuple[int, ...], ...]

    def blocks(self, device: int, step: int) -> tuple[Block, ...]:
        return self.kinds[self.table[device][step]]


@functools.lru_cache(maxsize=256)
def plan(
    order: Order, devices: int, queries: int, keys: int, left: int | None, right: int | None, *, gathered: bool = False,
    apart: bool = False,
) -> Plan:  # fmt: skip
    """The plan for shards of so many queries and keys.  A query sees `left` to `right` (`Problem.reach` of the whole lengths).

    `gathered`: each device has all keys in the order of the sequence, and `keys` is their number; then there is one step.
    `apart`: a block has one chunk of rows and one of columns, never several (dropout needs positions).
    """
    found: dict[tuple[Block, ...], int] = {}
    table = []
    for device in range(devices):
        numbers = []
        rows = chunks_of(order, devices, device)
        for step in range(1 if gathered else devices):
            columns = (0,) if gathered else chunks_of(order, devices, (device - step) % devices)
            sizes = queries // len(rows), keys // len(columns)
            grid = [[_window(a * sizes[0] - b * sizes[1], *sizes, left, right) for b in columns] for a in rows]
            causal = left is None and right == 0 and rows == columns and queries == keys
            blocks = (
                (Block((0, len(rows)), (0, len(columns)), (None, 0)),) if causal and not apart else _blocks(grid, apart)
            )
            numbers.append(found.setdefault(blocks, len(found)))
        table.append(tuple(numbers))
    return Plan(tuple(found), tuple(table))


NOTHING = "nothing"


def _window(ahead: int, queries: int, keys: int, left: int | None, right: int | None) -> Any:
    """The window in which rows see columns if the first row is `ahead` of the first column; or NOTHING."""
    left = None if left is None else left - ahead
    right = None if right is None else right + ahead
    if (right is not None and right <= -queries) or (left is not None and left <= -keys):
        return NOTHING
    left = None if left is None or left >= queries - 1 else left
    right = None if right is None or right >= keys - 1 else right
    return None if left is None and right is None else (left, right)


def _blocks(grid: list[list[Any]], apart: bool) -> tuple[Block, ...]:
    """The blocks for the windows of chunks of rows and columns.  Chunks that see everything are joined."""
    by_row = []
    for windows in grid:
        blocks: list[tuple[tuple[int, int], Window]] = []
        for j, window in enumerate(windows):
            if blocks and window is None is blocks[-1][1] and blocks[-1][0][1] == j and not apart:
                blocks[-1] = ((blocks[-1][0][0], j + 1), None)
            elif window != NOTHING:
                blocks.append(((j, j + 1), window))
        by_row.append(blocks)
    together = not apart and len({tuple(blocks) for blocks in by_row}) == 1
    if together and all(window is None for _, window in by_row[0]):
        return tuple(Block((0, len(grid)), columns, None) for columns, _ in by_row[0])
    return tuple(Block((i, i + 1), columns, window) for i, blocks in enumerate(by_row) for columns, window in blocks)


# ------------------------------------------------------------------------------------------------ merging


def merged(xp: Any, first: Sequence[Any], second: Sequence[Any]) -> tuple[Any, ...]:
    """(o, ℓ) or (o, ℓ, ȯ, μ) of the same rows and disjoint columns: [*, B, T, N, Hv] in float32, and [*, B, N, T]."""
    (o_1, lse_1, *t_1), (o_2, lse_2, *t_2) = first, second
    most = xp.maximum(lse_1, lse_2)
    most = xp.where(most == -np.inf, 0, most)  # of rows that see nothing
    e_1, e_2 = xp.exp(lse_1 - most), xp.exp(lse_2 - most)
    nothing = e_1 + e_2 == 0
    total = xp.where(nothing, 1, e_1 + e_2)
    lse = xp.where(nothing, -np.inf, most + xp.log(total))
    w_1, w_2 = e_1 / total, e_2 / total
    column = lambda a: a.mT[..., None]
    if not t_1:
        return column(w_1) * o_1 + column(w_2) * o_2, lse
    (to_1, mu_1), (to_2, mu_2) = t_1, t_2
    mu = w_1 * mu_1 + w_2 * mu_2
    t_o = column(w_1) * (to_1 + column(mu_1 - mu) * o_1) + column(w_2) * (to_2 + column(mu_2 - mu) * o_2)
    return column(w_1) * o_1 + column(w_2) * o_2, lse, t_o, mu


# ------------------------------------------------------------------------------------------------ the choice


def strategy_of(
    asked: Strategy | None, devices: int, key_heads: int, along_queries: Sequence[str],
    names: tuple[str, str] = ("context_strategy", "context_axis"),
) -> Strategy:  # fmt: skip
    """The strategy of a call: "ulysses" if the devices divide the key heads, otherwise "ring".

    `along_queries`: the arguments that vary along queries and cannot be divided by heads (a bias, a mask).
    `names`: what the arguments for the strategy and for the devices are called, for errors."""
    name, of_devices = names
    if asked is not None and asked not in STRATEGIES:
        raise ValueError(f"`{name}` must be None or one of {STRATEGIES}: got {asked!r}")
    divides = key_heads % devices == 0 and not along_queries
    if asked == "ulysses" and not divides:
        reason = (
            f"`{along_queries[0]}`, of which every device would need all rows"
            if along_queries
            else f"{key_heads} heads of `key`, which the {devices} devices of `{of_devices}` do not divide"
        )
        raise ValueError(f"`{name}`='ulysses' does not serve {reason}; ask for 'ring', or leave `{name}` None")
    return asked or ("ulysses" if divides else "ring")
