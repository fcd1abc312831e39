"""Linear collectives within a group of processes that share a sequence, with their derivatives.

    heads      [B, N, T/n, D] -> [B, N/n, T, D]      from a part of the sequence of all heads to all of it of some heads
    rows       [B, N/n, T, D] -> [B, N, T/n, D]      back, which is also the transpose
    gather     [B, N, T/n, D] -> [B, N, T, D]        all parts of the sequence
    sum        [B, N, T, D] -> [B, N, T/n, D]        one's own part of the sum over the processes: the transpose

Sequences are in their natural order where they are whole, and in the group's where they are cut.  One operator moves up to
six tensors, and a tensor is under way while the next is put in order.  Its derivatives are rules at the dispatcher's
Autograd key, as those of attention, see `rules.py`: the tangent of a move is a move, its cotangent the transposed move.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_bridge.groups import Group, agree, all_gather
from torch_bridge.operators import filled, library, ops, outside_dynamo
from torch_bridge.private import BelowAutograd, SingleLevelFunction, allow_single_level, make_dual, single_level
from torch_bridge.rules import _unpack
from torch_bridge.signatures import by_length, strides_by_length

WIDTH = 6
TRANSPOSED = {"heads": "rows", "rows": "heads", "gather": "sum", "sum": "gather"}


def move(kind: str, group: Group, *tensors: Tensor | None) -> tuple[Any, ...]:
    """The tensors, of four axes, all moved alike.  None stays None."""
    how = f"{kind} {group.word}"
    given, moved = [a for a in tensors if a is not None], []
    for first in range(0, len(given), WIDTH):
        some = given[first : first + WIDTH]
        moved += ops.move(*some, *[None] * (WIDTH - len(some)), how)[: len(some)]
    results = iter(moved)
    return tuple([a if a is None else next(results) for a in tensors])


def of_how(how: str) -> tuple[str, Group]:
    kind, word = how.split(" ")
    return kind, Group.of_word(word)


def _shape(kind: str, n: int, shape: Sequence[int]) -> tuple[int, ...]:
    b, heads, length, channels = shape
    if kind == "heads":
        return b, heads // n, length * n, channels
    if kind == "rows":
        return b, heads * n, length // n, channels
    return b, heads, length * n if kind == "gather" else length // n, channels


def _allocate(*args: Any) -> tuple[Tensor, ...]:
    """What fake tensors give."""
    *tensors, how = args
    kind, group = of_how(how)
    like = next(a for a in tensors if a is not None)
    return filled([a if a is None else by_length(a, _shape(kind, group.size, a.shape)) for a in tensors], like)


def _move(*args: Any) -> tuple[Tensor, ...]:
    *tensors, how = args
    kind, group = of_how(how)
    like = next(a for a in tensors if a is not None)
    agree(group, how, tensors)
    under_way = [None if a is None else _start(kind, group, a) for a in tensors]
    results = [
        None if step is None else _finish(kind, group, a, *step) for a, step in zip(tensors, under_way, strict=True)
    ]
    return filled(results, like)


def _start(kind: str, group: Group, a: Tensor):
    """What arrives, and the work to wait for."""
    n, a = group.size, a.transpose(1, 2)  # [B, T, N, D]
    if kind == "gather":
        sent = a.contiguous()
        got = a.new_empty(n, *sent.shape)
        return got, sent, all_gather(group, _bytes(got), _bytes(sent), async_op=True)
    if kind == "heads":
        sent = a.unflatten(2, (n, -1)).movedim(2, 0)
    else:
        sent = group.cut(a, 1).movedim(1, 0)
    sent = sent.contiguous()  # a part for each process
    got = torch.empty_like(sent)
    return got, sent, dist.all_to_all_single(_bytes(got), _bytes(sent), group=group.process_group, async_op=True)


def _finish(kind: str, group: Group, a: Tensor, got: Tensor, sent: Tensor, work: Any) -> Tensor:
    """Results in the memory order [B, T, N, D], and no views."""
    work.wait()
    if kind == "sum":
        got = got.sum(0, dtype=torch.promote_types(a.dtype, torch.float32)).to(a.dtype)
    elif kind == "rows":
        got = got.movedim(0, 2).flatten(2, 3)
    else:
        got = group.joined(got.movedim(0, 1), 1)
    got = got.contiguous()
    b, length, heads, channels = got.shape
    shape = b, heads, length, channels
    return got.new_empty(0).set_(got.untyped_storage(), got.storage_offset(), shape, strides_by_length(shape))


def _bytes(a: Tensor) -> Tensor:
    return a.view(-1).view(torch.uint8)


# ------------------------------------------------------------------------------------------------ derivatives


class _Moved(SingleLevelFunction):
    """Gives moved tensors their reverse rule, at this level only.  Nothing is saved."""

    @staticmethod
    def forward(ctx, how, outputs, *inputs):
        ctx.set_materialize_grads(False)
        ctx.how = how
        return tuple(outputs)

    @staticmethod
    @torch.compiler.disable
    def backward(ctx, *cotangents):
        kind, group = of_how(ctx.how)
        wanted = [c if w else None for c, w in zip(cotangents, ctx.needs_input_grad[2:], strict=True)]
        if all(c is None for c in wanted):
            return None, None, *wanted
        return None, None, *move(TRANSPOSED[kind], group, *wanted)


def _rule(*args: Any) -> tuple[Tensor, ...]:
    *tensors, how = args
    primals, tangents = _unpack(tensors)
    both = [a for a in (*primals, *tangents) if a is not None]
    with BelowAutograd():
        moved = move(*of_how(how), *both)
    if torch.is_grad_enabled() and any(a.requires_grad for a in both):
        before = single_level()
        allow_single_level(True)
        try:
            moved = _Moved.apply(how, moved, *both)  # type: ignore[attr-defined]
        finally:
            allow_single_level(before)
    results = iter(moved)
    moved_primals, moved_tangents = ([a if a is None else next(results) for a in some] for some in (primals, tangents))
    pairs: Any = zip(moved_primals, moved_tangents, strict=True)
    return filled([p if t is None else make_dual(p, t, level=0) for p, t in pairs], tensors[0])


def _fold(info: Any, in_dims: Sequence[Any], *args: Any):
    """vmap: the mapped axis joins the batch axis."""
    *tensors, how = args
    folded = []
    for a, d in zip(tensors, in_dims, strict=False):
        if a is not None:
            a = a.unsqueeze(0).expand(info.batch_size, *a.shape) if d is None else a.movedim(d, 0)
            a = a.flatten(0, 1)
        folded.append(a)
    results = ops.move(*folded, how)
    unfolded = [a if a.dim() == 1 else a.unflatten(0, (info.batch_size, -1)) for a in results]
    return tuple(unfolded), tuple(None if a.dim() == 1 else 0 for a in unfolded)


_names = "abcdef"[:WIDTH]
library.define(
    f"move(Tensor a, {', '.join(f'Tensor? {name}' for name in _names[1:])}, str how) -> "
    f"({', '.join(['Tensor'] * WIDTH)})",
    tags=torch.Tag.pt2_compliant_tag,
)
library.impl("move", outside_dynamo(_move), "CompositeExplicitAutograd")
library.impl("move", outside_dynamo(_rule), "Autograd")
torch.library.register_fake("torch_bridge::move", _allocate, lib=library)
torch.library.register_vmap("torch_bridge::move", _fold, lib=library)


# ------------------------------------------------------------------------------------------------ the seed


def from_first(group: Group, a: Tensor) -> Tensor:
    """That of the first process of the group."""
    return ops.from_first(a, group.word)


def _from_first(a: Tensor, word: str) -> Tensor:
    process_group = Group.of_word(word).process_group
    a = a.clone(memory_format=torch.contiguous_format)
    dist.broadcast(a, dist.get_global_rank(process_group, 0), group=process_group)
    return a


library.define("from_first(Tensor a, str group) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
library.impl("from_first", outside_dynamo(_from_first), "CompositeExplicitAutograd")
torch.library.register_fake("torch_bridge::from_first", lambda a, word: torch.empty_like(a), lib=library)
torch.library.register_vmap(
    "torch_bridge::from_first", lambda info, in_dims, a, word: (ops.from_first(a, word), in_dims[0]), lib=library
)
