"""Runs a job of attention in JAX where devices share the sequence, in a ring below the rules of differentiation.

Therefore each derivative keeps its kernels, and no residual depends on the ring.  A job here runs the same job on pairs of shards
and merges or sums the results (formulas: `context.py`).  Transfers overlap with the computation of a pair: the shard for the next
step is sent before, and the gradients collected so far arrive meanwhile.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import tree_flatten, tree_unflatten

from jax_flash_jvp.context import Block, Context, chunks_of, lengths_in, merged, plan, ranges_in
from jax_flash_jvp.exchange import from_zigzag, kinds_of, to_zigzag
from jax_flash_jvp.kernel_primitive import vary_as
from jax_flash_jvp.problem import DIFFERENTIABLE, Operands, Problem

Pair = Callable[..., Any]  # pair(name, problem, x, *args, **static): the job of one device
Wants = tuple[bool, ...]
# Devices up to which the steps are written out.  XLA's CPU devices may mix up what is sent in a loop and beside it.
UNROLLED = 8


def columns_of(args: Any) -> list[Any]:
    return [a for a, (kind, _) in zip(jax.tree.leaves(args), kinds_of(args), strict=True) if kind == "columns"]


# ------------------------------------------------------------------------------------------------ the shards


class Shards:
    """A device's share of a call, and the shares of other devices that each step brings."""

    def __init__(self, context: Context, problem: Problem, x: Operands):
        self.axes, self.devices, self.order = context.axes, context.devices, context.order
        self.device = lax.axis_index(self.axes)
        self.gathered = context.strategy == "rows"
        queries, keys = x.query.shape[1], x.key.shape[1]
        self.reach = problem.reach(queries * self.devices, keys if self.gathered else keys * self.devices)
        self.plan = plan(
            self.order, self.devices, queries, keys, *self.reach, gathered=self.gathered, apart=x.seed is not None
        )
        self.steps = len(self.plan.table[0])
        self.row_parts = len(chunks_of(self.order, self.devices, 0))
        self.column_parts = 1 if self.gathered else self.row_parts
        self.row_chunk, self.column_chunk = queries // self.row_parts, keys // self.column_parts
        at_once = all([b.rows for b in blocks] == [(0, self.row_parts)] for blocks in self.plan.kinds)
        self.partial = self.steps > 1 or not at_once
        self.problem = dataclasses.replace(
            problem, context=None, is_causal=False, lower_right=False, partial=self.partial
        )

    def computed(
        self, pair: Pair, name: str, block: Block, step: Any, args: Any, columns: Sequence[Any], **static: Any
    ) -> list[Any]:
        """The results of a block."""
        problem = dataclasses.replace(self.problem, window=block.window)
        got = pair(name, problem, *self.part(block, step, args, columns), **static)
        return vary_as(jax.tree.leaves(got), args[0].query)

    def part(self, block: Block, step: Any, args: Any, columns: Sequence[Any]) -> Any:
        """The arguments for a block, cut from those of all rows of this device and from the columns of this step."""
        leaves, tree = tree_flatten(args)
        arrived, cut = iter(columns), []
        for a, (kind, axis) in zip(leaves, kinds_of(args), strict=True):
            if kind == "rows" or (kind == "scores" and a.shape[2] > 1):
                a = _sliced(a, axis, block.rows, self.row_chunk)
            if kind == "columns":
                a = _sliced(next(arrived), axis, block.columns, self.column_chunk)
            if kind == "scores" and a.shape[3] > 1 and not self.gathered:
                starts = self.column_starts(block, step)
                a = jnp.concatenate([lax.dynamic_slice_in_dim(a, start, self.column_chunk, 3) for start in starts], 3)
            cut.append(a)
        x, *rest = tree_unflatten(tree, cut)
        rows, columns = self.row_starts(block), self.column_starts(block, step)
        if x.query_lengths is not None:
            x = x._replace(query_lengths=lengths_in(jnp, x.query_lengths, rows, self.row_chunk))
        if x.key_lengths is not None:
            x = x._replace(key_lengths=lengths_in(jnp, x.key_lengths, columns, self.column_chunk))
        if x.key_ranges is not None:
            x = x._replace(key_ranges=ranges_in(jnp, x.key_ranges, columns, self.column_chunk))
        if x.seed is not None:
            places = jnp.stack([jnp.asarray(n, jnp.int32) for n in (rows[0], columns[0])])
            x = x._replace(seed=jnp.concatenate([x.seed[:, :3], x.seed[:, 3:] + places], 1))
        return x, *rest

    def row_starts(self, block: Block) -> list[Any]:
        """Where the chunks of a block begin."""
        chunks = chunks_of(self.order, self.devices, self.device)
        return [chunk * self.row_chunk for chunk in chunks[slice(*block.rows)]]

    def column_starts(self, block: Block, step: Any) -> list[Any]:
        chunks = (0,) if self.gathered else chunks_of(self.order, self.devices, (self.device - step) % self.devices)
        return [chunk * self.column_chunk for chunk in chunks[slice(*block.columns)]]

    def added(self, whole: Any, part: Any, zeros: Any, kind: str, block: Block, step: Any) -> Any:
        """The sum of gradients so far, which may be None, with those of a block added."""
        if kind == "scores":
            whole = zeros if whole is None else whole
            row = block.rows[0] * self.row_chunk if whole.shape[2] > 1 else 0
            starts = self.column_starts(block, step)
            for piece, column in zip(jnp.split(part, len(starts), 3), starts, strict=True):
                # of one type, which with x64 numbers would not be
                at = [jnp.asarray(n, jnp.int32) for n in (0, 0, row, column)]
                whole = lax.dynamic_update_slice(whole, lax.dynamic_slice(whole, at, piece.shape) + piece, at)
            return whole
        parts, chunk = (block.rows, self.row_chunk) if kind == "rows" else (block.columns, self.column_chunk)
        if part.shape == zeros.shape:
            return part if whole is None else whole + part
        whole = zeros if whole is None else whole
        return _replaced(whole, _sliced(whole, 1, parts, chunk) + part, 1, parts, chunk)

    def sent(self, tree: Any) -> Any:
        """The arrays, sent to the next device of the ring."""
        ring = [(i, (i + 1) % self.devices) for i in range(self.devices)]
        return jax.tree.map(lambda a: lax.ppermute(a, self.axes, ring), tree)

    def around(self, compute: Callable, columns: list[Any], rows: Any) -> tuple[Any, list[Any]]:
        """Runs all steps.  compute(blocks, step, columns, rows) returns the rows after these blocks, and what the columns
        collect.  Returns the final rows, and what this device's own columns have collected."""

        def at(steps: range, step: Any, columns: list[Any], rows: Any) -> Any:
            numbers = sorted({of_device[s] for of_device in self.plan.table for s in steps})
            kinds = [self.plan.kinds[number] for number in numbers]
            if len(kinds) == 1:
                return compute(kinds[0], step, columns, rows)
            places = [[numbers.index(n) if n in numbers else 0 for n in row] for row in self.plan.table]
            branches = [lambda *operands, blocks=blocks: compute(blocks, step, *operands) for blocks in kinds]
            return lax.switch(jnp.asarray(places, jnp.int32)[self.device, step], branches, columns, rows)

        last = self.steps - 1
        ahead = self.sent(columns) if last else []
        rows, collected = at(range(1), 0, columns, rows)

        def turn(carry: Any, step: Any, among: range) -> Any:
            columns, rows, collected = carry
            ahead, collected = self.sent(columns), self.sent(collected)
            rows, more = at(among, step, columns, rows)
            return ahead, rows, jax.tree.map(jnp.add, collected, more)

        between, carry = range(1, last), (ahead, rows, collected)
        if self.devices <= UNROLLED:
            for step in between:
                carry = turn(carry, step, range(step, step + 1))
        else:
            steps = jnp.asarray(between, jnp.int32)
            carry, _ = lax.scan(lambda carry, step: (turn(carry, step, between), None), carry, steps)
        ahead, rows, collected = carry
        if last:
            collected = self.sent(collected)
            rows, more = at(range(last, last + 1), last, ahead, rows)
            collected = self.sent(jax.tree.map(jnp.add, collected, more))
        return rows, collected


def _sliced(a: Any, axis: int, parts: tuple[int, int], chunk: int) -> Any:
    return lax.slice_in_dim(a, parts[0] * chunk, parts[1] * chunk, axis=axis)


def _replaced(whole: Any, part: Any, axis: int, parts: tuple[int, int], chunk: int) -> Any:
    if part.shape == whole.shape:
        return part
    return lax.dynamic_update_slice_in_dim(whole, part, parts[0] * chunk, axis)


# ------------------------------------------------------------------------------------------------ the jobs


def run(pair: Pair, name: str, problem: Problem, x: Operands, *args: Any, **static: Any) -> Any:
    """Runs a job on this device's shards of the arguments.  Returns its shards of the results."""
    context = problem.context
    assert context is not None
    shards = Shards(context, problem, x)
    causal = shards.reach == (None, 0) and x.query.shape[1] == x.key.shape[1] and not shards.gathered
    if causal and context.order == "contiguous" and x.query.shape[1] % 2 == 0:
        # else the last device would compute all of its pairs, and the first one of them
        zigzag = dataclasses.replace(problem, context=dataclasses.replace(context, order="zigzag"))
        results = run(pair, name, zigzag, *to_zigzag((x, *args), context), **static)
        return from_zigzag(results, context)
    if name == "tangent":  # P of a part of the keys, from the ℓ of all, has rows whose sum is not one
        return _forward(pair, shards, x, args[1])[1]
    if name in ("forward", "forward_dual"):
        return _forward(pair, shards, x, *args)
    if name == "backward":
        return _backward(pair, shards, (x, *args), [static["want"]])[0]
    if name == "backward_tangent":
        y, cy, _, t = args
        return _backward(pair, shards, (x, y, cy, t), [(False,) * len(x), static["want"]])[1]
    return _backward(pair, shards, (x, *args), [static["want"], static["want_tangent"]])


def _forward(pair: Pair, shards: Shards, x: Operands, *tx: Operands) -> Any:
    name, args, axes = ("forward_dual", (x, *tx), (1, 2, 1, 2)) if tx else ("forward", (x,), (1, 2))
    dtype = np.promote_types(x.query.dtype, jnp.float32)
    zeros = lambda *shape: lax.full_like(x.query, 0, dtype, shape)  # varies over a shard_map's axes as the query does
    o, statistic = zeros(*x.query.shape[:3], x.value.shape[3]), zeros(x.query.shape[0], *x.query.shape[2:0:-1])
    nothing = (o, statistic - np.inf, o, statistic)[: len(axes)]

    def compute(blocks: tuple[Block, ...], step: Any, columns: list[Any], rows: Any) -> Any:
        for block in blocks:
            got = tuple(shards.computed(pair, name, block, step, args, columns))
            if rows is None and got[1].shape == statistic.shape:
                rows = got
                continue
            rows = nothing if rows is None else rows
            place = (block.rows, shards.row_chunk)
            before = [_sliced(a, axis, *place) for a, axis in zip(rows, axes, strict=True)]
            both = merged(jnp, before, got)
            rows = tuple(_replaced(a, part, axis, *place) for a, part, axis in zip(rows, both, axes, strict=True))
        return nothing if rows is None else rows, []

    rows, _ = shards.around(compute, columns_of(args), None)
    o, lse, *t = (a.astype(x.query.dtype) if axis == 1 else a for a, axis in zip(rows, axes, strict=True))
    return ((o, lse), tuple(t)) if tx else (o, lse)


def _backward(pair: Pair, shards: Shards, args: tuple[Any, ...], wants: list[Wants]) -> list[Operands]:
    """The wanted gradients, and if some may be wanted, their tangents."""
    x, (_, lse), cy, *tangents = args
    bias_by_row = (
        x.bias is not None and x.bias.shape[3] == 1
    )  # the gradient of such a bias is that of ℓ, whatever the keys
    asked = [(*w[: DIFFERENTIABLE - 1], w[DIFFERENTIABLE - 1] and not bias_by_row) for w in wants]
    name, static = "backward", dict(want=asked[0])
    if len(asked) == 2:
        name, static = "backward_dual", dict(want=asked[0], want_tangent=asked[1])
    dtype = lambda a: np.promote_types(x.query.dtype, jnp.float32) if shards.partial else a.dtype
    zeros = [
        Operands(*(lax.full_like(x.query, 0, dtype(a), a.shape) if w else None for a, w in zip(x, want, strict=False)))
        for want in asked
    ]
    leaves, tree = tree_flatten(zeros)
    kinds = [str(kind) for kind, _ in kinds_of(zeros)]

    def compute(blocks: tuple[Block, ...], step: Any, columns: list[Any], rows: Any) -> Any:
        sums = [None] * len(leaves) if rows is None else [*rows]
        sums = [None if kind == "columns" else a for a, kind in zip(sums, kinds, strict=True)]
        for block in blocks:
            got = shards.computed(pair, name, block, step, args, columns, **static)
            sums = [shards.added(*each, block, step) for each in zip(sums, got, leaves, kinds, strict=True)]
        sums = [zero if a is None else a for a, zero in zip(sums, leaves, strict=True)]
        rows = [None if kind == "columns" else a for a, kind in zip(sums, kinds, strict=True)]
        return rows, [a for a, kind in zip(sums, kinds, strict=True) if kind == "columns"]

    rows, collected = shards.around(compute, columns_of(args), None)
    of_columns = iter(collected)
    gradients = tree_unflatten(tree, [next(of_columns) if a is None else a for a in rows])
    if bias_by_row:
        cotangents = [d_lse for _, d_lse in (cy, *(tcy for _, _, tcy in tangents))]
        gradients = [
            g._replace(bias=_of_rows(c, lse, x.bias)) if want[DIFFERENTIABLE - 1] else g
            for g, c, want in zip(gradients, cotangents, wants, strict=True)
        ]
    cast = lambda g: Operands(*(None if a is None else a.astype(of.dtype) for a, of in zip(g, x, strict=True)))
    return [cast(g) for g in gradients]


def _of_rows(d_lse: Any, lse: Any, bias: Any) -> Any:
    """The gradient of a bias [1|B, 1|K|N, 1|T, 1]."""
    if d_lse is None:
        return jnp.zeros_like(bias)
    rows = jnp.where(lse == -np.inf, 0, d_lse)[..., None]
    rows = rows.reshape(rows.shape[0], bias.shape[1], -1, *rows.shape[2:]).sum(2)
    return rows.sum([axis for axis in (0, 2) if bias.shape[axis] == 1], keepdims=True)
