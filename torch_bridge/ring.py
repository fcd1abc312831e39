"""An operator on a part of a sequence: what belongs to queries stays, what belongs to keys travels from process to process.

Every process computes its queries against the keys of one process after the other, while the keys that come next are under
way.  So the operators of a ring are those of attention, on pairs of parts, and their derivative rules (`rules.py`) and what
these save are the same.  With b the pairs of a row, and w_b = exp(ℓ_b - ℓ),

    ℓ = logsumexp(ℓ_b)    o = Σ w_b o_b    μ = Σ w_b μ_b    ȯ = Σ w_b (ȯ_b + (μ_b - μ) o_b)

What is given the final y and ty (tangent, backward, dual backward) is a sum over pairs.  Results of pairs and their sums are
float32, those that travel with the keys, as their gradients do, included; they are rounded once, at the end.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from jax_flash_jvp.context import Block, lengths_in, plan, ranges_in
from torch_bridge.groups import Group, agree
from torch_bridge.options import (
    KEY_LENGTHS,
    KEYS_BEGIN,
    QUERIES_BEGIN,
    QUERY_LENGTHS,
    joined,
    pieces,
    problem_of,
    with_ranges,
    words_of,
    words_of_part,
)
from torch_bridge.signatures import BIASES, OPERATORS, allocate, gives_gradients, split, wide

ROWS, COLUMNS = 2, 3  # axes of a mask
OF_KEYS = ("k", "v", "t_k", "t_v")


# ------------------------------------------------------------------------------------------------ transfers


class Transfer:
    """What goes `by` processes on and what comes from as far back, while something else is computed."""

    def __init__(self, group: Group, by: int, sent: Sequence[Tensor]):
        self.sent, self.works, self.got = sent, [], list(sent)
        if not sent or by % group.size == 0:
            return
        process_group = group.process_group
        to, origin = (dist.get_global_rank(process_group, (group.rank + d) % group.size) for d in (by, -by))
        self.got = [torch.empty_like(a) for a in sent]
        steps = [dist.P2POp(dist.isend, _plain(a), to, process_group) for a in sent]
        steps += [dist.P2POp(dist.irecv, _plain(a), origin, process_group) for a in self.got]
        self.works = dist.batch_isend_irecv(steps)

    def wait(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        self.works, self.sent = [], ()
        return self.got


def _plain(a: Tensor) -> Tensor:
    return a.view(torch.uint8) if a.dtype == torch.bool else a


# ------------------------------------------------------------------------------------------------ the operators


def run(compute: Callable, name: str, args: Sequence[Any], word: str) -> tuple[Tensor, ...]:
    """The results of an operator on this process's part; `compute` computes those of a pair."""
    group = Group.of_word(word)
    tensors = [a if isinstance(a, Tensor) else None for a in args]
    agree(group, " ".join([name, "in a ring", *(str(a) for a in args if type(a) in (bool, list, str))]), tensors)
    return _Call(group, name, args).run(compute)


class _Call:
    def __init__(self, group: Group, name: str, args: Sequence[Any]):
        self.group, self.name = group, name
        *_, (selection, is_causal, scale, options, *rest) = split(name, args)
        self.want = rest[0] if gives_gradients(name) else None
        self.scale = scale
        self.tensors = dict(zip(OPERATORS[name].tensors, args, strict=False))
        q, k, self.mask, n = self.tensors["q"], self.tensors["k"], self.tensors["mask"], group.size
        self.queries, self.keys = q.shape[2], k.shape[2]
        self.selection = None if selection is None else pieces(selection, options, self.queries, self.keys)
        problem, self.names = problem_of(bool(is_causal), scale, options, q)
        apart = problem.dropout_rate > 0
        self.plan = plan(
            group.order, n, self.queries, self.keys, *problem.reach(n * self.queries, n * self.keys), apart=apart
        )
        self.steps = [step for step in range(n) if any(self.plan.blocks(device, step) for device in range(n))] or [0]
        self.words = (*words_of_part(problem), *sorted(self.names), "partial")
        self.mask_travels = (
            self.mask is not None and self.mask.shape[ROWS] == 1 and self.mask.shape[COLUMNS] == self.keys > 1
        )
        # the gradient of a mask that is the same for all keys is no sum over parts
        self.same_for_keys = self.mask is not None and self.mask.shape[COLUMNS] == 1
        if self.want is not None:
            named = zip(OPERATORS[name].results, self.want, strict=True)
            self.want_of_parts = [w and not (result in BIASES and self.same_for_keys) for result, w in named]

    def run(self, compute: Callable) -> tuple[Tensor, ...]:
        group, results = self.group, _Results(self)
        columns = Transfer(group, self.steps[0], self.columns()).wait()
        gradients: Transfer | None = None
        for here, there in zip(self.steps, (*self.steps[1:], None), strict=True):
            on = Transfer(group, there - here, columns) if there is not None else None
            for block in self.plan.blocks(group.rank, here):
                part = _Part(self, block, here)
                results.add(part, compute(part.name, *part.args(columns)))
            if results.travelling:  # with the keys to the next process, or home
                by = there - here if there is not None else -here
                gradients = Transfer(group, by, results.leave(gradients.wait() if gradients else []))
            columns = on.wait() if on else []
        return results.final(gradients.wait() if gradients else [])

    def columns(self) -> list[Tensor]:
        """What travels: keys and all that belongs to them."""
        given = [self.tensors.get(name) for name in OF_KEYS]
        travelling = [None if a is None else a.transpose(1, 2).contiguous() for a in given]
        if self.mask_travels:
            travelling += [None if a is None else a.contiguous() for a in map(self.tensors.get, BIASES)]
        if self.selection is not None and "key_segments" in self.names:
            travelling.append(self.selection[2].contiguous())
        return [a for a in travelling if a is not None]


class _Part:
    """A block of the queries that are here and of keys that travel."""

    def __init__(self, call: _Call, block: Block, step: int):
        self.call, self.window = call, block.window
        group = call.group
        # the tangent alone is that of all keys
        self.name = "forward_dual" if call.name == "tangent" else call.name
        self.owner = (group.rank - step) % group.size
        self.rows, self.rows_begin, self.rows_size = self._chunks(group.rank, block.rows, call.queries)
        self.columns, self.columns_begin, self.columns_size = self._chunks(self.owner, block.columns, call.keys)

    def _chunks(self, rank: int, some: tuple[int, int], length: int):
        """Where in a part of the sequence these are, the places in the whole where each begins, and their size."""
        group, (a, b) = self.call.group, some
        numbers = group.chunks_of(rank)
        size = length // len(numbers)
        return slice(a * size, b * size), [number * size for number in numbers[a:b]], size

    def args(self, columns: Sequence[Tensor]) -> list[Any]:
        """The operator's arguments."""
        call, travelling = self.call, iter(columns)
        keys = {name: next(travelling).transpose(1, 2) for name in OF_KEYS if call.tensors.get(name) is not None}
        masks: dict[str, Any] = {name: call.tensors.get(name) for name in BIASES}
        if call.mask_travels:
            masks = {name: a if a is None else next(travelling) for name, a in masks.items()}
        args: list[Any] = []
        for name in OPERATORS[self.name].tensors:
            a = call.tensors[name]
            if a is None:
                args.append(None)
            elif name in OF_KEYS:
                args.append(keys[name][:, :, self.columns])
            elif name in BIASES:
                pieces = [masks[name][..., rows, columns] for rows, columns, _ in self.of_mask()]
                args.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces, COLUMNS))
            else:
                args.append(a[:, :, self.rows])
        selection, ranges = self._selected(next(travelling, None))
        options = with_ranges((*words_of(self.window, False, None, 0.0), *call.words), ranges)
        return [*args, selection, False, call.scale, options, *([] if call.want is None else [call.want_of_parts])]

    def of_mask(self) -> list[tuple[slice, slice, slice]]:
        """What of the last two axes of a mask, and of its gradient, belongs to this, and which of the keys here that is."""
        *_, n_rows, n_columns = self.call.mask.shape
        rows, every = slice(None) if n_rows == 1 else self.rows, slice(None)
        if n_columns == 1:
            return [(rows, every, every)]
        if self.call.mask_travels:
            return [(rows, self.columns, every)]
        size, begin = self.columns_size, self.columns_begin  # in the order of the sequence
        return [(rows, slice(at, at + size), slice(i * size, (i + 1) * size)) for i, at in enumerate(begin)]

    def _selected(self, key_segments: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """A selection, and its ranges."""
        if self.call.selection is None:
            return None, None
        head, of_queries, of_keys, ranges = self.call.selection
        head = head.clone()
        head[:, QUERY_LENGTHS] = lengths_in(torch, head[:, QUERY_LENGTHS], self.rows_begin, self.rows_size)
        head[:, KEY_LENGTHS] = lengths_in(torch, head[:, KEY_LENGTHS], self.columns_begin, self.columns_size)
        head[:, QUERIES_BEGIN] += self.rows_begin[0]
        head[:, KEYS_BEGIN] += self.columns_begin[0]
        of_keys = of_keys if key_segments is None else key_segments
        ranges = ranges_in(torch, ranges[:, :, self.rows], self.columns_begin, self.columns_size)
        return joined(head, of_queries[:, self.rows], of_keys[:, self.columns], ranges), ranges


# ------------------------------------------------------------------------------------------------ merges and sums


class _Results:
    """What the parts add up to."""

    def __init__(self, call: _Call):
        self.call = call
        self.sums: dict[str, Tensor] = {}
        self.names = OPERATORS["forward_dual" if call.name == "tangent" else call.name].results
        self.wanted = [name for name, w in zip(self.names, call.want or [True] * len(self.names), strict=True) if w]
        of_keys = (*OF_KEYS, *(BIASES if call.mask_travels else ()))
        self.travelling = [name for name in self.wanted if name in of_keys] if call.want else []
        if call.same_for_keys:
            self._of_rows()

    def _of_rows(self) -> None:
        """The gradient of a mask that is the same for all keys is that of ℓ, and so are their tangents."""
        given = self.call.tensors
        for name, cotangent in (("mask", "d_lse"), ("t_mask", "t_d_lse")) if self.call.want else ():
            if name in self.wanted and given.get(cotangent) is not None:
                d = given[cotangent].masked_fill(given["lse"] == -torch.inf, 0)
                self.sums[name] = d[..., None].sum_to_size(given["mask"].shape)

    def add(self, part: _Part, results: Sequence[Any]) -> None:
        if self.call.want is None:
            self._merge(part, dict(zip(self.names, results, strict=True)))
            return
        for name, a, wanted in zip(self.names, results, self.call.want_of_parts, strict=True):
            if not wanted:
                continue
            if name not in self.sums and a.shape == self._shape(name):
                self.sums[name] = a
            elif name in BIASES:
                for rows, columns, here in part.of_mask():
                    self._sum(name)[..., rows, columns].add_(a[..., here])
            else:
                self._sum(name)[:, :, part.columns if name in self.travelling else part.rows].add_(a)

    def _merge(self, part: _Part, got: dict[str, Tensor]) -> None:
        if self.sums:
            merge({name: self.sums[name][:, :, part.rows] for name in got}, got)
        elif all(a.shape == self._shape(name) for name, a in got.items()):
            self.sums = got
        else:
            for name, a in got.items():
                self._sum(name)[:, :, part.rows] = a

    def _shape(self, name: str) -> torch.Size:
        """The shape of the gradient of an argument, or of o, ℓ and their tangents."""
        given = self.call.tensors
        if self.call.want is not None:
            return given[name.removeprefix("t_")].shape
        rows = given["q"].shape[:3]
        return torch.Size((*rows, given["v"].shape[3])) if name in ("o", "t_o") else rows

    def _sum(self, name: str) -> Tensor:
        if name not in self.sums:
            q = self.call.tensors["q"]
            nothing = -torch.inf if name == "lse" else 0
            self.sums[name] = q.new_full(self._shape(name), nothing, dtype=wide(q.dtype))
        return self.sums[name]

    def leave(self, arrived: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of the keys that were here, with what others found."""
        for name, a in zip(self.travelling, arrived, strict=False):
            self.sums[name] = a.add_(self.sums[name]) if name in self.sums else a
        left = [self._sum(name).contiguous() for name in self.travelling]
        for name in self.travelling:
            del self.sums[name]
        return left

    def final(self, arrived: Sequence[Tensor]) -> tuple[Tensor, ...]:
        self.sums.update(zip(self.travelling, arrived, strict=True))
        call = self.call
        results = allocate(call.name, *call.tensors.values(), *([] if call.want is None else [call.want]))
        for name, result in zip(OPERATORS[call.name].results, results, strict=True):
            if name in self.wanted:
                result.copy_(self._sum(name))
        return results


def merge(y: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """y, of some keys, becomes that of these and others."""
    lse = torch.logaddexp(y["lse"], other["lse"])
    w = (other["lse"] - lse).exp_().masked_fill_(lse == -torch.inf, 0)  # of the others
    y["lse"].copy_(lse)
    if "mu" in y:
        between = (1 - w).mul_(w).mul_(other["mu"] - y["mu"])
        y["mu"].lerp_(other["mu"], w)
        y["t_o"].lerp_(other["t_o"], w[..., None]).addcmul_(between[..., None], other["o"] - y["o"])
    y["o"].lerp_(other["o"], w[..., None])
