"""The operators on DTensors: each process computes its part, which their placements say.

What is sharded by batch or heads is computed where it is; along the sequence of queries and keys, the processes of that
dimension of the mesh share it as a group (`context.py`); along that of queries alone, each has its rows.  The rules of this
module stand beneath the derivatives of the operators, so that DTensors have the same.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard

from jax_flash_jvp.context import Order, Strategy, strategy_of
from torch_bridge.context import Attend, Call, back
from torch_bridge.exchange import from_first, move, of_how
from torch_bridge.groups import Group
from torch_bridge.operators import library, ops
from torch_bridge.options import (
    HEADS_BEGIN,
    QUERIES_BEGIN,
    QUERY_LENGTHS,
    drawn,
    drops,
    joined,
    pieces,
    problem_of,
    with_ranges,
    words_of_part,
)
from torch_bridge.private import get_unwrapped, is_functorch_wrapped_tensor
from torch_bridge.signatures import BIASES, OPERATORS, gives_gradients, split, strides_by_length

OF_KEYS = ("k", "v", "t_k", "t_v")
KINDS: dict[tuple[Placement, ...], str | None] = {  # by the placements of queries and of keys
    (Shard(0), Shard(0)): "batch", (Shard(1), Shard(1)): "heads", (Shard(2), Shard(2)): "sequence",
    (Shard(2), Replicate()): "rows", (Replicate(), Replicate()): None,
}  # fmt: skip
AXES = {"batch": 0, "heads": 1, "sequence": 2, "rows": 2}
MOVED = {"heads": (2, 1), "rows": (1, 2)}  # the axis that is sharded before and after such a move


# ------------------------------------------------------------------------------------------------ what placements say


def _kinds(q: DTensor, k: DTensor) -> list[str | None]:
    """What each dimension of the mesh divides."""
    kinds: list[str | None] = []
    for pair in zip(q.placements, k.placements, strict=True):
        if pair not in KINDS:
            raise ValueError(
                "`query` and `key` must be sharded alike, by batch, heads or sequence, or `query` alone along its sequence: got "
                f"{q.placements} and {k.placements}; call redistribute"
            )
        kinds.append(KINDS[pair])
    if sum(kind in ("sequence", "rows") for kind in kinds) > 1:
        raise ValueError(
            f"`query` must be sharded along its sequence by one dimension of the mesh: got {q.placements}; flatten the mesh "
            "dimensions that shard it into one"
        )
    for name, a in (("query", q), ("key", k)):
        for axis in range(3):
            n = math.prod(a.device_mesh.size(d) for d, p in enumerate(a.placements) if p == Shard(axis))
            if a.shape[axis] % n:
                raise ValueError(
                    f"axis {axis} of `{name}` must be a multiple of the {n} processes that share it: got {a.shape[axis]}; pad it"
                )
    return kinds


def _placement(kind: str | None, name: str, shape: Sequence[int]) -> Placement:
    """The placement of an argument, or of a result that is like one."""
    if kind is None or (kind == "rows" and name in OF_KEYS):
        return Replicate()
    axis = AXES[kind]
    if name in BIASES and shape[axis] == 1:
        return Shard(3) if kind == "sequence" and shape[3] > 1 else Replicate()
    return Shard(axis)


def _of_result(kind: str | None, name: str, shape: Sequence[int]) -> Placement:
    """The gradient of what several processes have whole is the sum of theirs."""
    placement = _placement(kind, name, shape)
    return Partial() if kind is not None and placement.is_replicate() else placement


def _group(mesh: DeviceMesh, d: int, order: Order = "contiguous") -> Group:
    return Group(mesh.get_group(d).group_name, mesh.size(d), mesh.get_local_rank(d), order)


def _from_local(a: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Any, by_length: bool) -> DTensor:
    stride = strides_by_length(shape) if by_length else torch.empty(shape, device="meta").stride()
    return DTensor.from_local(a, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


class _Layout:
    """The layout of one call."""

    def __init__(self, q: DTensor, k: DTensor):
        self.mesh, self.kinds = q.device_mesh, _kinds(q, k)

    def part(self, length: int, *kinds: str) -> tuple[int, int]:
        """Where this process's part of an axis begins that such dimensions divide, and its length."""
        first = 0
        for d, kind in enumerate(self.kinds):
            if kind in kinds:
                length //= self.mesh.size(d)
                first += self.mesh.get_local_rank(d) * length
        return first, length

    def local(self, name: str, a: Any) -> Any:
        if not isinstance(a, DTensor):
            return a
        if a.device_mesh != self.mesh:
            raise ValueError(f"`{name}` must be on the mesh of `query`: got {a.device_mesh} and {self.mesh}")
        wanted = tuple(_placement(kind, name, a.shape) for kind in self.kinds)
        if a.placements != wanted:
            argument = dict(v="value", mask="attn_mask").get(name)  # what else may be elsewhere autograd made
            to_be_moved = any(p != w and not p.is_replicate() for p, w in zip(a.placements, wanted, strict=True))
            if argument is not None and to_be_moved:
                raise ValueError(f"`{argument}` must be placed as {wanted}: got {a.placements}; redistribute it")
            a = a.redistribute(placements=wanted)
        return a.to_local()

    def selection(
        self, selection: Tensor | None, options: str, heads: int, queries: int, keys: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """What of a whole one belongs to this process, and its ranges."""
        if selection is None:
            return None, None
        of_batch = selection.narrow(0, *self.part(len(selection), "batch"))
        head, of_queries, of_keys, ranges = pieces(of_batch, options, queries, keys)
        head, (first, length) = head.clone(), self.part(queries, "rows")
        if length < queries:
            head[:, QUERY_LENGTHS] = (head[:, QUERY_LENGTHS] - first).clamp(0, length)
            head[:, QUERIES_BEGIN] += first
        head[:, HEADS_BEGIN] += self.part(heads, "heads")[0]
        rows = self.part(queries, "rows", "sequence")
        of_queries, ranges = of_queries.narrow(1, *rows), ranges.narrow(2, *rows)
        if ranges.shape[1] > 1:
            ranges = ranges.narrow(1, *self.part(ranges.shape[1], "heads"))
        return joined(head, of_queries, of_keys.narrow(1, *self.part(keys, "sequence")), ranges), ranges

    def result(self, name: str, shape: Sequence[int], a: Tensor) -> DTensor:
        """A result whose parts have that shape together."""
        placements = [_of_result(kind, name, shape) for kind in self.kinds]
        return _from_local(a, self.mesh, placements, shape, by_length=len(shape) == 4 and name not in BIASES)


# ------------------------------------------------------------------------------------------------ the rules


@torch.no_grad()
def _compute(cls: Any, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> tuple[Any, ...]:
    """An operator of attention."""
    name = op.name().split("::")[1]
    *_, (selection, is_causal, scale, options, *rest) = split(name, args)
    named = dict(zip(OPERATORS[name].tensors, args, strict=False))
    q, k, v = named["q"], named["k"], named["v"]
    layout, heads, queries, keys = _Layout(q, k), q.shape[1], q.shape[2], k.shape[2]
    first, length = layout.part(queries, "rows")
    selection, ranges = layout.selection(selection, options, heads, queries, keys)
    words = options.split()
    if length < queries:
        problem, names = problem_of(is_causal, scale, options, q)
        left, right = problem.reach(queries, keys)
        window = None if left is None else left - first, None if right is None else right + first
        words = [*words_of_part(problem, window), *sorted(names)]
        is_causal = False
    if None in layout.kinds:  # some processes compute the same, which is to have the same bits
        words = [*words, "deterministic"]
    local = [layout.local(argument, a) for argument, a in named.items()]
    results = getattr(ops, name)(*local, selection, is_causal, scale, with_ranges(words, ranges), *rest)
    if gives_gradients(name):
        of_like = {result: named[result.removeprefix("t_")] for result in OPERATORS[name].results}
        shapes: dict[str, Any] = {result: None if a is None else a.shape for result, a in of_like.items()}
    else:
        rows = q.shape[:3]
        shapes = dict(o=(*rows, v.shape[3]), lse=rows, t_o=(*rows, v.shape[3]), mu=rows)
    pairs = zip(OPERATORS[name].results, results, strict=True)
    return tuple(q.new_empty(0) if a.dim() == 1 else layout.result(result, shapes[result], a) for result, a in pairs)


@torch.no_grad()
def _move(cls: Any, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> tuple[Any, ...]:
    *tensors, how = args
    kind, group = of_how(how)
    before, after = MOVED[kind]
    first, given = tensors[0], [a for a in tensors if a is not None]  # what is absent comes last
    mesh = first.device_mesh
    along = next(d for d in range(mesh.ndim) if mesh.get_group(d).group_name == group.name)
    placed = lambda a, axis: [Shard(axis) if d == along else p for d, p in enumerate(a.placements)]
    moved = move(kind, group, *(a.redistribute(placements=placed(a, before)).to_local() for a in given))
    results = [_from_local(b, mesh, placed(a, after), a.shape, True) for a, b in zip(given, moved, strict=True)]
    return *results, *(first.new_empty(0) for _ in tensors[len(given) :])


for _name in OPERATORS:
    torch.library.register_torch_dispatch(f"torch_bridge::{_name}", DTensor, _compute, lib=library)
torch.library.register_torch_dispatch("torch_bridge::move", DTensor, _move, lib=library)


# ------------------------------------------------------------------------------------------------ the call


class Distributed(NamedTuple):
    """The context of DTensors."""

    strategy: Strategy | None
    order: Order
    parts: int = 1  # shapes are those of whole tensors

    def check_segments(self, segments: Any, lengths: Any) -> None:
        """They are whole."""

    def columns_of(self, name: str, mask: Tensor, queries: int, keys: int) -> int:
        return keys

    def part_of(self, ranges: Tensor) -> Tensor:
        return ranges

    def attend(self, attend: Attend, mask_name: str, call: Call) -> tuple[Tensor, Any]:
        q, k = _dtensor(call.x[0]), _dtensor(call.x[1])
        mesh, layout = q.device_mesh, _Layout(q, k)
        call = call._replace(selection=[a.full_tensor() if isinstance(a, DTensor) else a for a in call.selection])
        if drops(call.words):
            seed = drawn(q)
            for d in range(mesh.ndim):
                seed = from_first(_group(mesh, d), seed)
            call = call._replace(seed=seed)
        if "rows" in layout.kinds and self.order != "contiguous":
            raise ValueError(
                "`context_order`='zigzag' needs `key` sharded along its sequence, as `query` is: got it whole"
            )
        if "sequence" not in layout.kinds:
            return attend(call)
        if self.strategy == "all_gather":
            raise ValueError(
                "`context_strategy`='all_gather' is for plain tensors: redistribute `key` and `value` to Replicate()"
            )
        group = _group(mesh, along := layout.kinds.index("sequence"), self.order)
        # a mask that is cut along queries or keys
        hinders = [] if call.mask is None or _dtensor(call.mask).placements[along].is_replicate() else [mask_name]
        if "heads" in layout.kinds[along:]:  # which heads a process had would not be what placements say
            hinders = ["query"]
            if self.strategy == "ulysses":
                raise ValueError(
                    "`context_strategy`='ulysses' needs the dimension of the mesh along the sequence behind that along heads: "
                    f"got {q.placements}; order the mesh so, or ask for 'ring'"
                )
        _, heads = layout.part(k.shape[1], "heads")
        if strategy_of(self.strategy, group.size, heads, hinders, ("context_strategy", "the mesh")) == "ring":
            return attend(call._replace(words=(*call.words, f"ring={group.word}")))
        o, lse = attend(call._replace(x=move("heads", group, *call.x)))
        return back(group, o, lse if call.with_lse else None)


def _dtensor(a: Tensor) -> Any:
    """Beneath levels of torch.func, of which a compiler does not tell."""
    while not torch.compiler.is_compiling() and is_functorch_wrapped_tensor(a):
        a = get_unwrapped(a)
    return a


def is_dtensor(a: Any) -> bool:
    return isinstance(a, Tensor) and isinstance(_dtensor(a), DTensor)
