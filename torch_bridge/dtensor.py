"""The operators on DTensors: each process computes its part, which their placements say.

What is sharded by batch or heads is computed where it is; along the sequence of queries and keys, the processes of that
dimension of the mesh share it as a group (`context.py`); along that of queries alone, each has its rows.  The rules of this
module stand beneath the derivatives of the operators, so that DTensors have the same.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard

from jax_flash_jvp.context import Order, Strategy, strategy_of
from torch_bridge.context import Attend, Call
from torch_bridge.exchange import from_first, move, of_how
from torch_bridge.groups import Group
from torch_bridge.operators import library, ops
from torch_bridge.options import HEADS_BEGIN, QUERIES_BEGIN, QUERY_LENGTHS, SEGMENTS, drawn, drops, problem_of, words_of
from torch_bridge.signatures import BIASES, OPERATORS, gives_gradients, split

OF_KEYS = ("k", "v", "t_k", "t_v")
AXES = {"batch": 0, "heads": 1, "sequence": 2, "rows": 2}
MOVED = {"heads": (2, 1), "rows": (1, 2)}  # the axis that is sharded before and after such a move


# ------------------------------------------------------------------------------------------------ what placements say


def _kinds(q: DTensor, k: DTensor) -> list[str | None]:
    """What each dimension of the mesh divides."""
    kinds: list[str | None] = []
    for of_q, of_k in zip(q.placements, k.placements, strict=True):
        pair = [p.dim if type(p) is Shard else "whole" if p.is_replicate() else None for p in (of_q, of_k)]
        named = {(0, 0): "batch", (1, 1): "heads", (2, 2): "sequence", (2, "whole"): "rows", ("whole", "whole"): None}
        if tuple(pair) not in named:
            raise ValueError(
                "`query` and `key` must be sharded alike, by batch, heads or sequence, or `query` alone along its sequence: got "
                f"{q.placements} and {k.placements}; call redistribute"
            )
        kinds.append(named[tuple(pair)])
    if sum(kind in ("sequence", "rows") for kind in kinds) > 1:
        raise ValueError(
            f"`query` must be sharded along its sequence by one dimension of the mesh: got {q.placements}; flatten these of it"
        )
    for name, a, some in (("query", q, AXES), ("key", k, ("batch", "heads", "sequence"))):
        for axis in (0, 1, 2):
            n = _size(q.device_mesh, [kind if kind in some and AXES[kind] == axis else None for kind in kinds])
            if a.shape[axis] % n:
                raise ValueError(f"axis {axis} of `{name}` must be a multiple of its {n} processes: got {a.shape[axis]}")
    return kinds


def _size(mesh: DeviceMesh, kinds: Sequence[str | None]) -> int:
    n = 1
    for d, kind in enumerate(kinds):
        n *= mesh.size(d) if kind is not None else 1
    return n


def _placement(kind: str | None, name: str, shape: Sequence[int]) -> Placement:
    """Of an argument, or a result that is like one."""
    if kind is None or (kind == "rows" and name in OF_KEYS):
        return Replicate()
    axis = AXES[kind]
    if name in BIASES and shape[axis] == 1:
        return Shard(3) if kind == "sequence" and shape[3] > 1 else Replicate()
    return Shard(axis)


def _of_result(kind: str | None, name: str, shape: Sequence[int]) -> Placement:
    """A gradient of what several processes have whole is the sum of theirs."""
    placement = _placement(kind, name, shape)
    return Partial() if kind is not None and placement.is_replicate() else placement


def _group(mesh: DeviceMesh, d: int, order: Order = "contiguous") -> Group:
    return Group(mesh.get_group(d).group_name, mesh.size(d), mesh.get_local_rank(d), order)


class _Layout:
    """Of one call."""

    def __init__(self, q: DTensor, k: DTensor):
        self.mesh, self.kinds = q.device_mesh, _kinds(q, k)

    def begin(self, length: int, *kinds: str) -> tuple[int, int]:
        """Where this process's part of an axis begins that such dimensions divide, and its length."""
        first = 0
        for d, kind in enumerate(self.kinds):
            if kind in kinds:
                length //= self.mesh.size(d)
                first += self.mesh.get_local_rank(d) * length
        return first, length

    def local(self, name: str, a: Any) -> Any:
        if a is None or not isinstance(a, DTensor):
            return a
        wanted = tuple(_placement(kind, name, a.shape) for kind in self.kinds)
        if a.device_mesh != self.mesh:
            raise ValueError(f"`{name}` must be on the mesh of `query`: got {a.device_mesh} and {self.mesh}")
        if a.placements != wanted:
            moved = [p for p, w in zip(a.placements, wanted, strict=True) if p != w and not p.is_replicate()]
            argument = dict(v="value", mask="attn_mask").get(name)
            if moved and argument:
                raise ValueError(f"`{argument}` must be placed as {wanted}: got {a.placements}; redistribute it")
            a = a.redistribute(placements=wanted)
        return a.to_local()

    def selection(self, selection: Tensor | None, queries: int, keys: int) -> Tensor | None:
        """What of a whole one belongs to this process."""
        if selection is None:
            return None
        head, of_queries, of_keys = selection.narrow(0, *self.begin(len(selection), "batch")).split([SEGMENTS, queries, keys], 1)
        head, (first, length) = head.clone(), self.begin(queries, "rows")
        if length < queries:
            head[:, QUERY_LENGTHS] = (head[:, QUERY_LENGTHS] - first).clamp(0, length)
            head[:, QUERIES_BEGIN] += first
        of_queries = of_queries.narrow(1, *self.begin(queries, "rows", "sequence"))
        return torch.cat([head, of_queries, of_keys.narrow(1, *self.begin(keys, "sequence"))], 1)

    def given(self, name: str, shape: Sequence[int], a: Tensor) -> DTensor:
        """A result, of that shape in all."""
        placements = [_of_result(kind, name, shape) for kind in self.kinds]
        b, heads, length, *rest = shape
        by_length = (length * heads * rest[0], rest[0], heads * rest[0], 1) if rest else (heads * length, length, 1)
        stride = torch.empty(shape, device="meta").stride() if name in BIASES else by_length
        return DTensor.from_local(a, self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


# ------------------------------------------------------------------------------------------------ the rules


def _compute(cls: Any, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> tuple[Any, ...]:
    """An operator of attention."""
    name = op._schema.name.split("::")[1]
    *_, (selection, is_causal, scale, options, *rest) = split(name, args)
    named = dict(zip(OPERATORS[name].tensors, args, strict=False))
    q, k = named["q"], named["k"]
    layout = _Layout(q, k)
    heads, _ = layout.begin(q.shape[1], "heads")
    first, length = layout.begin(q.shape[2], "rows")
    selection = layout.selection(selection, q.shape[2], k.shape[2])
    if heads and selection is not None:
        selection[:, HEADS_BEGIN] += heads
    if length < q.shape[2]:
        problem, names = problem_of(is_causal, scale, options, q)
        left, right = problem.reach(q.shape[2], k.shape[2])
        window = None if left is None else left - first, None if right is None else right + first
        options = " ".join((*words_of(window, False, problem.soft_cap, problem.dropout_rate), *sorted(names)))
        is_causal = False
    with torch.no_grad():
        local = [layout.local(argument, a) for argument, a in named.items()]
        results = getattr(ops, name)(*local, selection, is_causal, scale, options, *rest)
    shape = q.shape[:3]
    shapes: dict[str, Any] = dict(o=(*shape, named["v"].shape[3]), lse=shape)
    shapes |= dict(t_o=shapes["o"], mu=shape)
    if gives_gradients(name):
        shapes = {result: named[result.removeprefix("t_")] for result in OPERATORS[name].results}
        shapes = {result: None if a is None else a.shape for result, a in shapes.items()}
    pairs = zip(OPERATORS[name].results, results, strict=True)
    return tuple(q.new_empty(0) if a.dim() == 1 else layout.given(result, shapes[result], a) for result, a in pairs)


@torch.no_grad()
def _move(cls: Any, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> tuple[Any, ...]:
    *tensors, how = args
    kind, group = of_how(how)
    before, after = MOVED[kind]
    local, placements = [], []
    for a in tensors:
        if a is None:
            local.append(None)
            continue
        mesh = a.device_mesh
        d = next(d for d in range(mesh.ndim) if mesh.get_group(d).group_name == group.name)
        wanted = [Shard(before) if i == d else p for i, p in enumerate(a.placements)]
        local.append(a.redistribute(placements=wanted).to_local())
        placements.append([Shard(after) if i == d else p for i, p in enumerate(wanted)])
    moved = move(kind, group, *local)
    results, at = [], iter(placements)
    for a, b in zip(tensors, moved, strict=True):
        if a is None:
            results.append(tensors[0].new_empty(0))
            continue
        batch, heads, length, channels = a.shape
        stride = length * heads * channels, channels, heads * channels, 1
        results.append(DTensor.from_local(b, a.device_mesh, next(at), run_check=False, shape=a.shape, stride=stride))
    return tuple(results)


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

    def attend(self, attend: Attend, mask_name: str, call: Call) -> Tensor:
        q, k = map(innermost, call.x[:2])
        mesh, layout = q.device_mesh, _Layout(q, k)
        call = call._replace(selection=[a.full_tensor() if isinstance(a, DTensor) else a for a in call.selection])
        if drops(call.words):
            seed = drawn(q)
            for d in range(mesh.ndim):
                seed = from_first(_group(mesh, d), seed)
            call = call._replace(seed=seed)
        if "rows" in layout.kinds and self.order != "contiguous":
            raise ValueError("`context_order`='zigzag' needs `key` sharded along its sequence, as `query` is: got it whole")
        if "sequence" not in layout.kinds:
            return attend(call)
        d = layout.kinds.index("sequence")
        group = _group(mesh, d, self.order)
        if self.strategy == "all_gather":
            raise ValueError("`context_strategy`='all_gather' is for plain tensors: redistribute `key` and `value` to Replicate()")
        _, heads = layout.begin(k.shape[1], "heads")
        # a mask that is cut along queries or keys
        by_row = [] if call.mask is None or innermost(call.mask).placements[d].is_replicate() else [mask_name]
        if "heads" in layout.kinds[d:]:  # which heads a process had would not be what placements say
            if self.strategy == "ulysses":
                raise ValueError(
                    "`context_strategy`='ulysses' needs the dimension of the mesh along the sequence behind that along heads: got "
                    f"{q.placements}; order the mesh so, or ask for 'ring'"
                )
            by_row = ["query"]
        if strategy_of(self.strategy, group.size, heads, by_row, ("context_strategy", "the mesh")) == "ring":
            return attend(call._replace(words=(*call.words, f"ring={group.word}")))
        return move("rows", group, attend(call._replace(x=move("heads", group, *call.x))))[0]


def innermost(a: Tensor) -> Tensor:
    """Beneath levels of torch.func, of which a compiler does not tell."""
    while not torch.compiler.is_compiling() and torch._C._functorch.is_functorch_wrapped_tensor(a):
        a = torch._C._functorch.get_unwrapped(a)
    return a


def is_dtensor(a: Any) -> bool:
    return isinstance(a, Tensor) and isinstance(innermost(a), DTensor)
