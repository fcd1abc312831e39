"""One sequence over several devices: what is so in every framework.

Imports no framework: plans are tuples of numbers, and functions of arrays are given jax.numpy or torch as `xp`.

The devices of a ring hold equal shards of a sequence.  Rows (queries, and what belongs to them) stay; columns (keys, values and
their tangents, and the gradients that they collect) travel once around, so that at step s device i computes on the columns of
device i - s.  A job of such a pair of shards is the same job as on one device, with `Problem.partial`: results of a part of the
keys.  With w = exp(ℓ of the part - ℓ), results of the forward are merged,

    ℓ = logsumexp ℓ_i      o = Σ w_i o_i      μ = Σ w_i μ_i      ȯ = Σ w_i (ȯ_i + (μ_i - μ) o_i)

and gradients, whose jobs are given the final o, ℓ, ȯ and μ, are summed.

Shards are of one chunk each, or, "zigzag", of two: of 2n chunks, device i has those at i and 2n - 1 - i.  Then causality leaves
every pair of devices half of its scores, in which no row needs a mask: all rows and the early columns, or the late rows and
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
    """How devices share the sequence of a call: in a ring, or each its rows and all columns, "rows"."""

    axes: tuple[str, ...]  # of a mesh, over which the devices are numbered
    devices: int
    strategy: Literal["ring", "rows"]
    order: Order = "contiguous"


# ------------------------------------------------------------------------------------------------ chunks


def chunks_of(order: Order, devices: int, device: Any) -> tuple[Any, ...]:
    """The numbers of the chunks that a device holds; `device` may be an array."""
    return (device,) if order == "contiguous" else (device, 2 * devices - 1 - device)


def zigzag_positions(length: int, devices: int) -> np.ndarray:
    """Which place in the sequence each row of one in zig-zag order has: integers [length], of numpy.

    Args:
      length: of the whole sequence; a multiple of 2 · `devices`.
      devices: how many share it.

    Raises:
      ValueError: if `length` is no such multiple.
    """
    if length % (2 * devices):
        raise ValueError(
            f"a sequence in zig-zag order must be a multiple of twice the {devices} devices: got {length}; pad it to "
            f"{-(-length // (2 * devices)) * 2 * devices}, and pass lengths or segments that leave out what is padded"
        )
    chunks = [chunk for device in range(devices) for chunk in chunks_of("zigzag", devices, device)]
    return np.arange(length).reshape(2 * devices, -1)[chunks].ravel()


def lengths_in(xp: Any, lengths: Any, starts: Sequence[Any], size: int) -> Any:
    """How much of lengths [*, B] lies in chunks of this size, which begin at these places, the first ones first."""
    return sum(xp.clip(lengths, start, start + size) - start for start in starts)


def ranges_in(xp: Any, ranges: Any, starts: Sequence[Any], size: int) -> Any:
    """Ranges [*, R, 2] of places in such chunks, which stand one behind the other: R for each."""
    chunks = (xp.clip(ranges, start, start + size) - start + i * size for i, start in enumerate(starts))
    return xp.concatenate([*chunks], -2)


# ------------------------------------------------------------------------------------------------ the plan


class Block(NamedTuple):
    """Rows and columns for one job: those from one chunk of a shard up to another, and the window of `Problem` in which rows see
    columns, counted from the first of each; None: they see all."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    window: Window


class Plan(NamedTuple):
    """What each device computes at each step: `kinds[table[device][step]]`, blocks without a row and a column in common.  Of
    most kinds there is one block, or none: then rows see none of these columns."""

    kinds: tuple[tuple[Block, ...], ...]
    table: tuple[tuple[int, ...], ...]

    def blocks(self, device: int, step: int) -> tuple[Block, ...]:
        return self.kinds[self.table[device][step]]


@functools.lru_cache(maxsize=256)
def plan(
    order: Order, devices: int, queries: int, keys: int, left: int | None, right: int | None, *, gathered: bool = False,
    apart: bool = False,
) -> Plan:  # fmt: skip
    """Of shards of so many queries and keys, where a query sees `left` to `right` (see `Problem.reach`, of the whole lengths).

    `gathered`: each device has all keys, in the order of the sequence, and `keys` is their number: one step.
    `apart`: blocks are of a chunk of rows and of columns each, not of several (dropout counts places).
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
    """In which rows see columns, where the first row is `ahead` of the first column; or NOTHING."""
    left = None if left is None else left - ahead
    right = None if right is None else right + ahead
    if (right is not None and right <= -queries) or (left is not None and left <= -keys):
        return NOTHING
    left = None if left is None or left >= queries - 1 else left
    right = None if right is None or right >= keys - 1 else right
    return None if left is None and right is None else (left, right)


def _blocks(grid: list[list[Any]], apart: bool) -> tuple[Block, ...]:
    """Of the windows of chunks of rows and columns; those that see all are put together."""
    of_rows = []
    for windows in grid:
        blocks: list[tuple[tuple[int, int], Window]] = []
        for j, window in enumerate(windows):
            if blocks and window is None is blocks[-1][1] and blocks[-1][0][1] == j and not apart:
                blocks[-1] = ((blocks[-1][0][0], j + 1), None)
            elif window != NOTHING:
                blocks.append(((j, j + 1), window))
        of_rows.append(blocks)
    together = not apart and len({tuple(blocks) for blocks in of_rows}) == 1
    if together and all(window is None for _, window in of_rows[0]):
        return tuple(Block((0, len(grid)), columns, None) for columns, _ in of_rows[0])
    return tuple(Block((i, i + 1), columns, window) for i, blocks in enumerate(of_rows) for columns, window in blocks)


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
    """Ulysses where the heads of keys can be divided among the devices, else a ring.  `along_queries`: the arguments that vary
    along queries and cannot be divided by heads: a bias, a mask; `names`: of the arguments for the strategy and the devices."""
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
