"""One sequence over a group of processes: who shares it, and by which strategy.

Tensors are parts of a sequence here, one in each process.  `ulysses` and `all_gather` move them by linear collectives, whose
derivatives are collectives too (`exchange.py`), around attention as it is; `ring` is a way to compute an operator, beneath
its derivatives (`ring.py`), of which the operators learn by a word of their options.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from jax_flash_jvp.context import (
    ORDERS,
    STRATEGIES,
    Block,
    Order,
    Strategy,
    lengths_in,
    plan,
    strategy_of,
    zigzag_positions,
)
from torch_bridge.exchange import from_first, move
from torch_bridge.groups import Group
from torch_bridge.options import LARGEST, drawn, drops, narrowed, parsed, words_of_part
from torch_bridge.scopes import Scopes, innermost, opened


class Context(NamedTuple):
    """A context of plain tensors, each a part of a sequence."""

    group: Group
    strategy: Strategy | None

    @property
    def parts(self) -> int:
        return self.group.size

    def check_segments(self, segments: Sequence[Tensor | None], lengths: Sequence[int]) -> None:
        """They must be cut as queries and keys are; theirs is the other text about shapes."""
        for name, a, length in zip(("query_segment_ids", "key_value_segment_ids"), segments, lengths, strict=True):
            if a is not None and a.ndim == 2 and a.shape[1] == self.parts * length:
                raise ValueError(
                    f"`{name}` must be cut along the sequence as queries and keys are: got all {a.shape[1]} of them, where this "
                    f"process has {length}; pass its own part"
                )

    def check_chunks(self, **lengths: int) -> None:
        for name, length in lengths.items():
            if length % self.group.chunks:
                raise ValueError(
                    f"`{name}` must have an even number of rows in each process for `context_order`='zigzag': got {length}"
                )

    def part_of(self, ranges: Tensor) -> Tensor:
        """This process's part of the ranges [B, H, T, R, 2] of all queries."""
        self.check_chunks(query=ranges.shape[2] // self.parts)
        return self.group.cut(ranges, 2).select(2, self.group.rank)

    def columns_of(self, name: str, mask: Tensor, queries: int, keys: int) -> int:
        """How many keys a mask must be for: those of this process if it is the same for all queries, else all."""
        n, by_row = self.parts, mask.ndim > 1 and mask.shape[-2] != 1
        if by_row and mask.shape[-2] == n * queries:
            raise ValueError(
                f"`{name}` must be cut along its queries as `query` is: got all {n * queries}, where this process has {queries}; "
                f"pass these rows, with all {n * keys} keys"
            )
        if by_row and mask.shape[-1] == keys:
            raise ValueError(
                f"`{name}` must have all {n * keys} keys for the {queries} queries of this process, or one row for its {keys} "
                f"keys: got shape {tuple(mask.shape)}"
            )
        return keys if mask.ndim and mask.shape[-1] == keys else n * keys

    def attend(self, attend: "Attend", mask_name: str, call: "Call") -> tuple[Tensor, Any]:
        """Attention of parts, by attention of whole sequences, or of a ring."""
        group, (q, k, _) = self.group, call.x
        self.check_chunks(query=q.shape[2], key=k.shape[2])
        by_row = [mask_name] if call.mask is not None and call.mask.shape[2] != 1 else []
        strategy = strategy_of(self.strategy, group.size, k.shape[1], by_row, ("context_strategy", "context_group"))
        if drops(call.words):
            call = call._replace(seed=from_first(group, drawn(q)))
        return {"ulysses": _ulysses, "ring": _ring, "all_gather": _all_gather}[strategy](attend, group, call)


_open: Scopes = []  # of contexts


def context_parallel(
    group: Any, strategy: Strategy | None = None, order: Order = "contiguous"
) -> AbstractContextManager[None]:
    """A context manager.  While it is open, the processes of a group share the sequences of each attention call.

    Each process passes its own part of the sequence, and gets the results of its own queries.  The derivatives work in the same
    way.  The parts must be equal, in the order of the ranks in the group, and all processes must make the same calls.  Keys that
    are not split, such as a text prompt, need no context: open `context_parallel(None)` around such a call.

    The context holds in this thread, and in threads that open none of their own, as autograd's do.  Keep it open over the
    backward of a checkpointed model, which calls the model again.  A compiled function uses the context that was opened last, by
    any thread.

    Args:
      group: a ProcessGroup, or a DeviceMesh of one dimension, such as `mesh["context"]`.  None closes an outer context.
      strategy: "ulysses" exchanges parts of the sequence for parts of the heads, by four all-to-alls a call; the size of the
        group must divide the number of key heads (arXiv:2309.14509).  "ring" passes keys from process to process while it
        computes, and has derivatives up to second order (arXiv:2310.01889).  "all_gather" gives all keys to every process.
        None: Ulysses where it is possible, else the ring.
      order: "contiguous", or "zigzag", in which a causal ring gives all processes the same work: of 2n equal chunks of the
        sequence, process i of n holds chunks i and 2n - 1 - i.  See :func:`reorder_zigzag`.

    Raises:
      ValueError: an unknown strategy or order, torch.distributed is not initialized, or the group does not contain this process.
      TypeError: `group` is not a ProcessGroup or a DeviceMesh.
    """
    return opened(_open, None if group is None else context_of("group", group, strategy, order))


def current(group: Any, strategy: Any, order: Any) -> Context | None:
    """The context of a call, by its own arguments or the open manager; None where there is nobody to share with."""
    context = innermost(_open)
    if group is not None:
        context = context_of("context_group", group, strategy, "contiguous" if order is None else order)
    elif strategy is not None or order is not None:
        if context is None:
            name = "context_strategy" if strategy is not None else "context_order"
            raise ValueError(
                f"`{name}` says how a group shares a sequence: pass `context_group`, or open `context_parallel`"
            )
        strategy, order = of_open(strategy, order)
        context = Context(context.group._replace(order=order), strategy)
    return None if context is None or context.group.size == 1 else context


def of_open(strategy: Any, order: Any) -> tuple[Strategy | None, Order]:
    """How a sequence is shared by those who are known otherwise: as asked, else as the open context says."""
    context = innermost(_open)
    if context is not None:
        strategy, order = strategy or context.strategy, order or context.group.order
    return _strategy("context_strategy", strategy), _checked("context_order", order or "contiguous")


def context_of(name: str, group: Any, strategy: Any, order: Any) -> Context:
    prefix = name.removesuffix("group")
    order = _checked(f"{prefix}order", order)
    return Context(_group(name, group)._replace(order=order), _strategy(f"{prefix}strategy", strategy))


def _strategy(name: str, strategy: Any) -> Strategy | None:
    if strategy is not None and strategy not in STRATEGIES:
        raise ValueError(f"`{name}` must be None or one of {STRATEGIES}: got {strategy!r}")
    return strategy


def _checked(name: str, order: Any) -> Order:
    if order not in ORDERS:
        raise ValueError(f"`{name}` must be one of {ORDERS}: got {order!r}")
    return order


def _group(name: str, group: Any) -> Group:
    if isinstance(group, (str, int, tuple, list)):  # before torch.distributed is asked for, which would not help
        raise TypeError(f"`{name}` must be a ProcessGroup or a DeviceMesh: got {group!r}; name an axis as mesh[axis]")
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(f"`{name}` needs torch.distributed: call torch.distributed.init_process_group first")
    if isinstance(group, dist.DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or ("…",)
            raise ValueError(
                f"`{name}` must be of one dimension: got {group.ndim}; pass one of them, as mesh[{names[-1]!r}]"
            )
        group = group.get_group()
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"`{name}` must be a group that this process is in")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"`{name}` must be a ProcessGroup or a DeviceMesh: got {type(group).__name__}")
    return Group(group.group_name, group.size(), group.rank())


# ------------------------------------------------------------------------------------------------ attention of parts


class Call(NamedTuple):
    """A call on parts of four axes, checked but for what the group has to do with it."""

    x: Sequence[Tensor]  # query, key, value
    mask: Tensor | None
    selection: Sequence[Tensor | None]  # as SELECTORS, or empty
    is_causal: bool
    words: tuple[str, ...]  # of options
    scale: float
    sinks: Tensor | None
    with_lse: bool
    place: tuple[int, int, int] = (0, 0, 0)  # of the first head, query and key
    seed: Tensor | None = None  # of dropout, if it is drawn


Attend = Callable[[Call], tuple[Tensor, Any]]  # (o, ℓ); ℓ may be None unless it is asked for


def _ring(attend: Attend, group: Group, call: Call) -> tuple[Tensor, Any]:
    selection = call.selection
    if selection and selection[2] is not None and selection[3] is not None:
        everyones = partial(_gathered, group._replace(order="contiguous"))
        selection = (*selection[:2], *narrowed(selection[2], selection[3], everyones), *selection[4:])
    return attend(call._replace(selection=selection, words=(*call.words, f"ring={group.word}")))


def _ulysses(attend: Attend, group: Group, call: Call) -> tuple[Tensor, Any]:
    n, rank, heads = group.size, group.rank, call.x[0].shape[1]
    x = move("heads", group, *call.x)
    of_heads = lambda a, axis: a.unflatten(axis, (n, -1)).select(axis, rank) if a.shape[axis] == heads > 1 else a
    mask = _of_all_keys(group, call)
    mask = None if mask is None else of_heads(mask, 1)
    sinks = None if call.sinks is None else of_heads(call.sinks, 0)
    selection = call.selection
    if selection:
        segments = (a if a is None else _gathered(group, a) for a in selection[2:4])
        selection = (*selection[:2], *segments, *(a if a is None else _of_all_queries(group, a) for a in selection[4:]))
    place = (rank * (heads // n), 0, 0)
    o, lse = attend(call._replace(x=x, mask=mask, selection=selection, sinks=sinks, place=place))
    return back(group, o, lse if call.with_lse else None)


def back(group: Group, o: Tensor, lse: Tensor | None) -> tuple[Tensor, Any]:
    """From processes by heads."""
    o, lse = move("rows", group, o, None if lse is None else lse[..., None])
    return o, None if lse is None else lse[..., 0]


def _all_gather(attend: Attend, group: Group, call: Call) -> tuple[Tensor, Any]:
    q, k, v = call.x
    n, queries = group.size, q.shape[2]
    keys = n * k.shape[2]
    k, v = move("gather", group, k, v)
    mask, selection = _of_all_keys(group, call), call.selection
    padded: list[Tensor | None] = [*selection, *[None] * (5 - len(selection))]
    of_queries, of_keys, query_segments, key_segments, ranges = padded
    if key_segments is not None:
        key_segments = _gathered(group, key_segments)
    problem, _ = parsed(call.is_causal, call.scale, " ".join(call.words))
    reach, rate = problem.reach(n * queries, keys), problem.dropout_rate
    parts = group.chunks
    size = queries // parts
    # without its cache, which a compiler would warn of
    blocks = plan.__wrapped__(group.order, n, queries, keys, *reach, gathered=True, apart=rate > 0)
    seen = {block.rows[0]: block for block in blocks.blocks(group.rank, 0)}
    results, done = [], 0
    while done < parts:
        block = seen.get(done, Block((done, done + 1), (0, 1), (None, -size)))  # or rows that see nothing
        first, last = (i * size for i in block.rows)
        places = [size * chunk for chunk in group.chunks_of(group.rank)[slice(*block.rows)]]
        rows = lambda a, axis, first=first, last=last: a.narrow(axis, first, last - first)
        some = call._replace(
            x=(rows(q, 2), k, v), mask=mask if mask is None or mask.shape[2] == 1 else rows(mask, 2),
            is_causal=False, place=(0, places[0], 0),
            words=words_of_part(problem, block.window),
        )  # fmt: skip
        if selection:
            lengths = None if of_queries is None else lengths_in(torch, of_queries.clamp(-1, LARGEST), places, size)
            segments = None if query_segments is None else rows(query_segments, 1)
            own_ranges = None if ranges is None else rows(ranges, 2)
            some = some._replace(selection=(lengths, of_keys, segments, key_segments, own_ranges))
        results.append(attend(some))
        done = block.rows[1]
    if len(results) == 1:
        return results[0]
    outputs, lses = zip(*results, strict=True)
    return torch.cat(outputs, 2), torch.cat(lses, 2) if call.with_lse else None


def _gathered(group: Group, ids: Tensor) -> Tensor:
    return move("gather", group, ids[:, None, :, None])[0][:, 0, :, 0]


def _of_all_queries(group: Group, ranges: Tensor) -> Tensor:
    """Ranges, for the heads of this process."""
    kind = "gather" if ranges.shape[1] == 1 else "heads"
    return move(kind, group, ranges.flatten(3))[0].unflatten(3, (-1, 2))


def _of_all_keys(group: Group, call: Call) -> Tensor | None:
    """A mask with all keys."""
    mask, keys = call.mask, call.x[1].shape[2]
    if mask is None or mask.shape[3] == 1:
        return mask
    if mask.shape[3] == keys:
        return move("gather", group, mask.transpose(2, 3))[0].transpose(2, 3)
    return mask


# ------------------------------------------------------------------------------------------------ the order


def reorder_zigzag(x: Tensor, devices: int, axis: int = 1) -> Tensor:
    """A whole sequence in zig-zag order.  Under `order="zigzag"`, process i holds the i-th of `devices` equal parts of it.

    Use it for tokens, positions, targets and segment ids.  :func:`restore_zigzag` undoes it.

    Args:
      x: a tensor with a whole sequence along `axis`.
      devices: the number of processes that share the sequence.
      axis: the axis of the sequence.

    Raises:
      ValueError: the length of the sequence is not a multiple of 2 · `devices`.
    """
    return x.index_select(axis, _positions(x, devices, axis))


def restore_zigzag(x: Tensor, devices: int, axis: int = 1) -> Tensor:
    """The inverse of :func:`reorder_zigzag`, with the same arguments.

    Raises:
      ValueError: the length of the sequence is not a multiple of 2 · `devices`.
    """
    return x.index_select(axis, _positions(x, devices, axis).argsort())


def _positions(x: Tensor, devices: int, axis: int) -> Tensor:
    return torch.as_tensor(zigzag_positions(x.shape[axis], devices), device=x.device)
