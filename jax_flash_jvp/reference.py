"""Attention and its derivatives in JAX alone, a tile of scores at a time.

With scores S = σ QKᵀ + bias, -∞ where a key is hidden, ℓ = logsumexp(S) over the keys and P = exp(S - ℓ):

    forward        o = P V,  ℓ
    tangent        Ṡ = σ(Q̇Kᵀ + QK̇ᵀ) + ḃias,  μ = ℓ̇ = rowsum(P∘Ṡ),  ȯ = (P∘Ṡ) V + P V̇ - μ o
    backward       of the cotangents H of o and h of ℓ:
                   dS = P∘W  with  W = H Vᵀ + h - rowsum(H∘o),  dQ = σ dS K,  dK = σ dSᵀQ,  dV = PᵀH,  dbias = dS
    dual backward  the derivative of the backward along the tangents (Q̇, K̇, V̇, ḃias), (ȯ, μ) and (G, g) of (H, h):
                   dṠ = P∘W,  dS = P∘(W∘(Ṡ - μ) + G Vᵀ + H V̇ᵀ + g - rowsum(G∘o + H∘ȯ)),
                   dQ̇ = σ dṠ K             dK̇ = σ dṠᵀQ              dV̇ = PᵀH                     dḃias = dṠ
                   dQ = σ(dS K + dṠ K̇)     dK = σ(dSᵀQ + dṠᵀQ̇)      dV = PᵀG + (P∘(Ṡ - μ))ᵀH     dbias = dS
                   so dẋ are the gradients for (H, h) and dx their tangents

Rows of dṠ sum to h and those of dS to g, but for the rounding of o and ȯ.  What is too much there would be multiplied by all that
keys have in common; so dQ̇ = σ (dṠ K - (rowsum(dṠ) - h) P K), and dQ likewise.  The mean key of a row, P K, knows nothing of the
keys that are hidden from it.  Where the keys are a part of what rows see, rows sum to something else, and are left as they are.
Where a tile has all that its rows see, what is subtracted, rowsum(H∘o) and the like, are the sums of the tile's own rows instead.

as in FlashAttention (Dao et al. 2022, arXiv:2205.14135, algorithms 1 and 4; Dao 2023, arXiv:2307.08691); the tangent as
in Lu & Song 2024, arXiv:2410.11081, appendix.  Products accumulate in float32, or float64 for float64 arrays; P, dS and
the like are rounded to the arrays' dtype before a product, as in the kernels.

Any number c of a row may be subtracted from its Ṡ: ȯ = (P∘(Ṡ - c)) V + P V̇ - (μ - c) o.  With c near μ little is
lost by rounding P∘(Ṡ - c) to bfloat16; without, a tangent that moves all scores of a row alike would drown the rest.
In `forward_dual`, c is the Ṡ of the largest score so far, by differentiating the running maximum.

JAX can differentiate every function here, to any order.  In `forward` the running maximum is a constant to
differentiation (no result depends on it), so that the loops are linear in their sums and need not save them, and the
scores of a tile are recomputed where they are needed: memory is linear in the sequence lengths for any number of
forward modes and one reverse mode.  JAX undoes the recomputation for the reverse modes that are nested inside: a
second one through `forward` saves a maximum for each query and block of keys, a second one through `backward_dual`
sums as large as the keys for each block of queries.
"""

import operator
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_flash_jvp import sight
from jax_flash_jvp.problem import DIFFERENTIABLE, HIDES, Operands, Problem
from jax_flash_jvp.sight import Axis

BLOCK = 256  # a tile has at most so many queries and so many keys

Arrays = dict[str, Any]
Pair = tuple[Array | None, Array | None]  # belonging to (output, log_sum_exp); None is zero
KINDS = {"q": "query", "k": "key", "v": "key", "bias": "scores"}
PLACES = {(False, False): "shared", (True, False): "row", (False, True): "column", (True, True): "pair"}


class Tiles:
    """One call cut into tiles: its arrays and sums in blocks, the scores of a tile, and the loop over the tiles.

    In a tile, with G query heads to each of K key heads, queries are [B, K, G, T, H], keys and values [B, K, S, H] and
    scores [B, K, G, T, S].  Arrays and sums are filed by the axes that they have blocks of: "row" (T), "column" (S),
    "pair" (both) or "shared" (neither); a sum over all tiles is filed as "row" and completed at the end.
    """

    def __init__(self, x: Operands, problem: Problem) -> None:
        self.x, self.problem = x, problem
        self.rows, self.columns = (Axis.cut(a.shape[1], BLOCK) for a in (x.query, x.key))
        self.heads = (x.key.shape[2], x.query.shape[2] // max(1, x.key.shape[2]))
        self.dtype = np.promote_types(x.query.dtype, jnp.float32)
        self.reach = problem.reach(self.rows.length, self.columns.length)
        several = self.rows.blocks * self.columns.blocks > 1
        self.seen = sight.visible(x, problem, self.rows, self.columns) if several else None
        self.arrays: dict[str, Arrays] = {place: {} for place in PLACES.values()}
        self.sums: dict[str, Arrays] = {"row": {}, "column": {}, "pair": {}}
        self.add("query", q=x.query)
        self.add("key", k=x.key, v=x.value)
        self.add("scores", bias=x.bias, mask=x.mask if problem.mask_block is None else None)
        for name, lengths in (("query_lengths", x.query_lengths), ("key_lengths", x.key_lengths)):
            if lengths is not None:
                self.arrays["shared"][name] = lengths[:, None, None, None, None]
        if x.query_segments is not None:
            self.arrays["row"]["query_segments"] = self.rows.split(x.query_segments[:, None, None, :, None], -2)
            self.arrays["column"]["key_segments"] = self.columns.split(x.key_segments[:, None, None, None, :], -1)
        if x.key_ranges is not None:  # of each query the R starts, then the ends
            a = self.by_head(x.key_ranges.mT)
            self.arrays["row"]["key_ranges"] = self.rows.split(a.reshape(*a.shape[:4], -1), -2)
        if x.mask is not None and problem.mask_block is not None:
            self.arrays["shared"]["blocks"] = self.by_head(x.mask)
        if x.seed is not None:
            seed, other, *first = (lax.bitcast_convert_type(s, jnp.uint32)[:, None, None, None, None] for s in x.seed.T)
            heads = first[0] + np.arange(x.query.shape[2], dtype=np.uint32).reshape(1, *self.heads, 1, 1)
            self.arrays["shared"]["seeds"] = mixed(seed ^ mixed(heads)), mixed(other + heads), *first[1:]

    def add(self, kind: str, **arrays: Array | None) -> None:
        """File arrays that are a "query" [B, T, N, H], a "key" [B, S, K, H] or "scores" [1|B, 1|N, 1|T, 1|S]."""
        for name, a in arrays.items():
            if a is None:
                continue
            if kind == "query":
                a = a.reshape(*a.shape[:2], *self.heads, a.shape[3]).transpose(0, 2, 3, 1, 4)
                self.arrays["row"][name] = self.rows.split(a, -2)
            elif kind == "key":
                self.arrays["column"][name] = self.columns.split(a.transpose(0, 2, 1, 3), -2)
            else:
                by_row, by_column = a.shape[2] != 1, a.shape[3] != 1
                a = self.by_head(a)
                a = self.columns.split(a, -1) if by_column else a
                self.arrays[PLACES[by_row, by_column]][name] = self.rows.split(a, -2) if by_row else a

    def by_head(self, a: Array) -> Array:
        """[1|B, 1|K|N, …] as [1|B, 1|K, 1|G, …]"""
        heads = self.heads if a.shape[1] == self.x.query.shape[2] else (a.shape[1], 1)
        return a.reshape(a.shape[0], *heads, *a.shape[2:])

    def add_row_sums(self, **channels: int) -> None:
        block = (self.x.query.shape[0], *self.heads, self.rows.block)
        self.sums["row"] |= {n: self.zeros(*block, size) for n, size in channels.items()}

    def add_gradients(self, prefix: str, want: tuple[bool, ...]) -> None:
        """Make sums for the gradients of the wanted ones of query, key, value and bias."""
        for name, wanted in zip(KINDS, want[:DIFFERENTIABLE], strict=True):
            for place, leading in (("row", 1), ("column", 1), ("pair", 2), ("shared", 0)):
                if wanted and name in self.arrays[place]:
                    zeros = self.zeros(*self.arrays[place][name].shape[leading:])
                    self.sums["row" if place == "shared" else place][prefix + name] = zeros

    def zeros(self, *shape: int) -> Array:
        return lax.full_like(self.x.query, 0, self.dtype, shape)  # varies over a shard_map's axes as the query does

    def take(self, kind: str, a: Array, shape: tuple[int, ...]) -> Array:
        """The blocks of a sum, joined to an array as `add` would take it."""
        if kind == "query":
            return self.rows.join(a, -2).transpose(0, 3, 1, 2, 4).reshape(shape)
        if kind == "key":
            return self.columns.join(a, -2).transpose(0, 2, 1, 3)
        by_row, by_column = shape[2] != 1, shape[3] != 1
        a = self.rows.join(a, -2) if by_row else a if by_column else a.sum(0)
        return (self.columns.join(a, -1) if by_column else a).reshape(shape)

    def take_rows(self, a: Array) -> Array:
        return self.take("query", a, (*self.x.query.shape[:3], a.shape[-1]))

    def take_gradients(self, prefix: str, sums: Arrays) -> Arrays:
        def gradient(name: str, like: Array) -> Array:
            a = self.take(KINDS[name], sums[prefix + name], jnp.shape(like))
            return self.problem.scale * a if name in ("q", "k") else a

        pairs = zip(KINDS, self.x[:DIFFERENTIABLE], strict=True)
        return {prefix + name: gradient(name, like) for name, like in pairs if prefix + name in sums}

    def scores(self, i: Any, j: Any, d: Arrays) -> Array:
        """S of the tile of row block i and column block j, and what else depends on the place: added to `d`."""
        s = self.problem.scale * outer(d["q"], d["k"])
        row = self.rows.positions(i).reshape(1, 1, 1, -1, 1)
        column = self.columns.positions(j).reshape(1, 1, 1, 1, -1)
        if self.problem.soft_cap is not None:
            d["u"] = jnp.tanh(s / self.problem.soft_cap)
            s = self.problem.soft_cap * d["u"]
        if "seeds" in d:
            d["kept"] = self.kept(row, column, *d["seeds"])
        if "bias" in d:
            bias = d["bias"].astype(self.dtype)
            s = jnp.where(bias <= HIDES, -np.inf, s + bias)
        left, right = self.reach
        visible = [d["mask"]] if "mask" in d else []
        if "blocks" in d:
            queries, keys = self.problem.mask_block or (1, 1)
            rows = d["blocks"].take(self.rows.positions(i) // queries, 3, mode="clip")
            visible += [rows.take(self.columns.positions(j) // keys, 4, mode="clip")]
        if "key_ranges" in d:
            starts, ends = jnp.split(d["key_ranges"], 2, -1)
            visible += [
                ((starts[..., None, :] <= column[..., None]) & (column[..., None] < ends[..., None, :])).any(-1)
            ]
        visible += [d["query_segments"] == d["key_segments"]] if "query_segments" in d else []
        visible += [column >= row - left] if left is not None else []
        visible += [column <= row + right] if right is not None else []
        for position, axis, name in ((row, self.rows, "query_lengths"), (column, self.columns, "key_lengths")):
            visible += [position < axis.length] if axis.length < axis.blocks * axis.block else []
            visible += [position < d[name]] if name in d else []
        return jnp.where(reduce(operator.and_, visible), s, -np.inf) if visible else s

    def kept(
        self, row: Array, column: Array, seed: Array, other: Array, first_row: Array, first_column: Array
    ) -> Array:
        """1 / (1 - rate) where dropout keeps a probability, else 0: a hash of its place, as in the kernels."""
        rate = np.dtype(self.dtype).type(self.problem.dropout_rate)
        key = mixed((row.astype(jnp.uint32) + first_row) ^ seed)
        bits = mixed(mixed((column.astype(jnp.uint32) + first_column) ^ key) + (key ^ other)) >> 1
        threshold = np.int32(np.float32(2**31) * np.float32(rate))
        return jnp.where(bits.astype(jnp.int32) >= threshold, 1 / (1 - rate), 0).astype(self.dtype)

    def out_of_sight(self, i: Any, j: Any) -> Any:
        """Do causality and the window hide every key of the tile from every query?  None: there are neither."""
        row, column = self.rows.positions(i), self.columns.positions(j)
        left, right = self.reach
        tests = [column[-1] < row[0] - left] if left is not None else []
        tests += [column[0] > row[-1] + right] if right is not None else []
        return reduce(operator.or_, tests) if tests else None

    def tangent_products(self, d: Arrays) -> Array | None:
        """The tangent of σ QKᵀ."""
        return multiply(self.problem.scale, add(outer(d.get("t_q"), d["k"]), outer(d["q"], d.get("t_k"))))

    def tangent_scores(self, d: Arrays) -> Array | None:
        return add(under_cap(d, self.tangent_products(d)), cast(d.get("t_bias"), self.dtype))

    def sweep(self, tile: Callable[[Arrays, Array, Arrays], Arrays]) -> Arrays:
        """The blocks of all sums after `tile(arrays, S, sums) -> sums` has seen every tile."""
        whole_columns = {
            n: jnp.broadcast_to(a, (self.columns.blocks, *a.shape)) for n, a in self.sums["column"].items()
        }

        def one_row(column_sums: Arrays, inputs: Any) -> Any:
            i, row, pairs, seen = inputs

            def one_tile(row_sums: Arrays, inputs: Any) -> Any:
                j, column, pair, column_sums, seen = inputs
                sums = {**row_sums, **column_sums, **self.sums["pair"]}

                def visit(sums: Arrays) -> Arrays:
                    d = {**self.arrays["shared"], **row, **column, **pair}
                    s = self.scores(i, j, d)
                    return tile(d, s, sums)

                skip = self.out_of_sight(i, j) if seen is None else ~seen
                if skip is None:
                    sums = visit(sums)
                else:
                    sums = lax.cond(skip, lambda sums: sums, visit, sums)
                return pick(sums, row_sums), (pick(sums, column_sums), pick(sums, self.sums["pair"]))

            blocks = (np.arange(self.columns.blocks, dtype=np.int32), self.arrays["column"], pairs, column_sums, seen)
            row_sums, (column_sums, pair_sums) = loop(one_tile, self.sums["row"], blocks, self.columns.blocks)
            return column_sums, (row_sums, pair_sums)

        blocks = (np.arange(self.rows.blocks, dtype=np.int32), self.arrays["row"], self.arrays["pair"], self.seen)
        column_sums, (row_sums, pair_sums) = loop(one_row, whole_columns, blocks, self.rows.blocks)
        return {**row_sums, **column_sums, **pair_sums}


def pick(sums: Arrays, names: Any) -> Arrays:
    return {name: sums[name] for name in names}


def loop(body: Callable, carry: Any, blocks: Any, count: int) -> Any:
    """lax.scan that saves nothing of its body for reverse mode; a single step runs as it stands."""
    if count > 1:
        return lax.scan(jax.checkpoint(body, prevent_cse=False), carry, blocks)
    carry, outputs = body(carry, jax.tree.map(lambda a: a[0], blocks))
    return carry, jax.tree.map(lambda a: a[None], outputs)


# Arithmetic in which None is zero, so that an absent tangent or cotangent costs nothing.


def add(*terms: Any) -> Any:
    present = [t for t in terms if t is not None]
    return reduce(operator.add, present) if present else None


def multiply(a: Any, b: Any) -> Any:
    return None if a is None or b is None else a * b


def cast(a: Array | None, dtype: Any) -> Array | None:
    return None if a is None else a.astype(dtype)


def product(subscripts: str, a: Array | None, b: Array | None) -> Any:
    """`a`, rounded to the dtype of `b`, times `b`, accumulated in at least float32."""
    if a is None or b is None:
        return None
    return jnp.einsum(subscripts, a.astype(b.dtype), b, preferred_element_type=np.promote_types(b.dtype, jnp.float32))


outer = partial(product, "bkgtd,bksd->bkgts")  # rows, columns -> scores
onto_rows = partial(product, "bkgts,bksd->bkgtd")  # scores, columns -> rows
onto_columns = partial(product, "bkgts,bkgtd->bksd")  # scores, rows -> columns


def result_dtype(problem: Problem, like: Array) -> Any:
    return np.promote_types(like.dtype, jnp.float32) if problem.partial else like.dtype


def in_one_tile(x: Operands, problem: Problem) -> bool:
    """Does a tile hold all that its rows see?"""
    return x.key.shape[1] <= BLOCK and not problem.partial


def row_sum(a: Array | None) -> Array | None:
    return None if a is None else a.sum(-1, keepdims=True)


def minus_row_sum(a: Array | None, b: Array | None) -> Array | None:
    """-rowsum(a∘b) of arrays [B, T, N, H], as [B, N, T]"""
    if a is None or b is None:
        return None
    dtype = np.promote_types(a.dtype, jnp.float32)
    return -(a.astype(dtype) * b.astype(dtype)).sum(-1).mT


def cut(a: Array | None, inside: Array | None, axis: int = 1) -> Array | None:
    """Rows along an axis that are not inside, and may hold anything, as zeros: 0 · NaN would be NaN."""
    if a is None or inside is None:
        return a
    return jnp.where(inside[:, :, None, None] if axis == 1 else inside[:, None], a, 0)


def cut_operands(operands: Operands, x: Operands) -> Operands:
    query, key, value = operands[:3]
    queries, keys = inside_of(x)
    return operands._replace(query=cut(query, queries), key=cut(key, keys), value=cut(value, keys))


def inside_of(x: Operands) -> tuple[Array | None, Array | None]:
    """Which queries [1|B, T] see a key, and which keys [1|B, S] a query sees, as far as lengths and ranges tell; None: all."""
    queries, keys = (
        None if lengths is None else np.arange(a.shape[1], dtype=np.int32)[None] < lengths[:, None]
        for a, lengths in ((x.query, x.query_lengths), (x.key, x.key_lengths))
    )
    if x.key_ranges is None:
        return queries, keys
    starts, ends = jnp.moveaxis(jnp.clip(x.key_ranges, 0, x.key.shape[1]), -1, 0)
    some = starts < ends
    steps = jnp.zeros_like(some, jnp.int32, shape=(len(some), x.key.shape[1] + 1)) + 0 * starts[:, 0, :1, 0]
    add = jax.vmap(lambda a, at, n: a.at[at.ravel()].add(n.ravel().astype(jnp.int32)))
    seen = jnp.cumsum(add(add(steps, starts, some), ends, -some.astype(jnp.int32)), 1)[:, :-1] > 0
    sees = some.any((1, 3))
    return (sees if queries is None else queries & sees), (seen if keys is None else keys & seen)


def thinned(d: Arrays, a: Array | None) -> Array | None:
    """What dropout leaves."""
    return multiply(a, d["kept"]) if "kept" in d else a


def under_cap(d: Arrays, a: Array | None) -> Array | None:
    """`a` times the slope of the soft cap: from a cotangent of S that of what was capped, or back from a tangent."""
    return multiply(a, 1 - d["u"] ** 2) if "u" in d else a


def mixed(a: Any) -> Any:
    """A permutation of 32-bit integers that scatters neighbours."""
    a = (a ^ (a >> 16)) * np.uint32(0x21F0AAAD)
    a = (a ^ (a >> 15)) * np.uint32(0xD35A2D97)
    return a ^ (a >> 15)


@jax.custom_jvp
def row_maximum(s: Array) -> Array:
    return s.max(-1, keepdims=True)


@row_maximum.defjvp
def row_maximum_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """JAX's own rule divides by zero where XLA computes `s` a second time, and rounds it otherwise than its maximum."""
    (s,), (t_s,) = primals, tangents
    maximum = row_maximum(s)
    largest = s == maximum
    return maximum, jnp.where(largest, t_s, 0).sum(-1, keepdims=True) / jnp.maximum(
        largest.sum(-1, keepdims=True), 1
    ).astype(t_s.dtype)


def accumulate(sums: Arrays, **terms: Array | None) -> Arrays:
    """Add to those sums that there are, each term summed over the axes along which its sum is broadcast."""
    new = dict(sums)
    for name, a in terms.items():
        if a is not None and name in sums:
            axes = [axis for axis in range(a.ndim) if sums[name].shape[axis] == 1 != a.shape[axis]]
            new[name] = sums[name] + a.sum(axes, keepdims=True)
    return new


def forward(x: Operands, problem: Problem) -> tuple[Array, Array]:
    """The output [B, T, N, Hv] and log_sum_exp [B, N, T]."""
    return _forward(x, problem, lax.stop_gradient)


def _forward(x: Operands, problem: Problem, for_maximum: Callable[[Array], Array]) -> tuple[Array, Array]:
    x = cut_operands(x, x)
    a = sight.sweep(partial(_softmax, for_maximum), x, problem, {}, {}, {}, loop)
    return a["o"].astype(result_dtype(problem, x.query)), a["log_sum_exp"].squeeze(-1).mT


def _softmax(
    for_maximum: Callable[[Array], Array], x: Operands, problem: Problem, rows: Arrays, keys: Arrays
) -> Arrays:
    tiles = Tiles(x, problem)
    tiles.add_row_sums(maximum=1, total=1, o=x.value.shape[-1])
    # Not -∞: in a row that sees no key, scores minus maximum would be NaN.
    tiles.sums["row"]["maximum"] += jnp.finfo(tiles.dtype).min

    def tile(d: Arrays, s: Array, sums: Arrays) -> Arrays:
        maximum = jnp.maximum(sums["maximum"], row_maximum(for_maximum(s)))
        decay, p = jnp.exp(sums["maximum"] - maximum), jnp.exp(s - maximum)
        old = {"maximum": maximum, "total": decay * sums["total"], "o": decay * sums["o"]}
        return accumulate(old, total=p, o=onto_rows(thinned(d, p), d["v"]))

    sums = tiles.sweep(tile)
    hidden = sums["total"] == 0
    total = jnp.where(hidden, 1, sums["total"])
    log_sum_exp = jnp.where(hidden, -np.inf, sums["maximum"] + jnp.log(total))
    return dict(o=tiles.take_rows(sums["o"] / total), log_sum_exp=tiles.take_rows(log_sum_exp))


def forward_dual(x: Operands, tx: Operands, problem: Problem) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """(y, ty): `forward` and its tangent along `tx`, in one sweep."""
    moving = [i for i in range(DIFFERENTIABLE) if tx[i] is not None]

    def moved(*arrays: Array) -> tuple[Array, Array]:
        moved_x = x._replace(**{Operands._fields[i]: a for i, a in zip(moving, arrays, strict=True)})
        return _forward(moved_x, problem, lambda s: s)

    return jax.jvp(moved, [x[i] for i in moving], [tx[i] for i in moving])


def backward(x: Operands, y: tuple[Array, Array], cy: Pair, problem: Problem, want: tuple[bool, ...]) -> Operands:
    """The gradients of the wanted operands, for cotangents `cy` of y = forward(x)."""
    no_tangent = (Operands(None, None, None), (None, None), (None, None))
    return backward_dual(x, y, cy, no_tangent, problem, want, (False,) * len(x))[0]


def backward_dual(
    x: Operands,
    y: tuple[Array, Array],
    cy: Pair,
    tangents: tuple[Operands, Pair, Pair],
    problem: Problem,
    want: tuple[bool, ...],
    want_tangent: tuple[bool, ...],
) -> tuple[Operands, Operands]:
    """(dx, tdx): the gradients for the cotangents `cy` of y, and their tangents along `tangents` = (tx, ty, tcy) of (x, y, cy).

    `want` selects from dx, the gradients, and `want_tangent` from tdx, their tangents.
    """
    (o, log_sum_exp), (tx, (t_o, mu), tcy) = y, tangents
    queries, _ = inside_of(x)
    (d_o, d_lse), (t_d_o, t_d_lse) = ((cut(a, queries), cut(b, queries, 2)) for a, b in (cy, tcy))
    x, tx = cut_operands(x, x), cut_operands(tx, x)
    delta = t_delta = None
    if not in_one_tile(x, problem):
        delta = add(d_lse, minus_row_sum(d_o, o))
        t_delta = add(t_d_lse, minus_row_sum(t_d_o, o), minus_row_sum(d_o, t_o))
    seen = log_sum_exp != -np.inf  # rows that see nothing have no gradient
    # and their scores are -∞, but exp(-∞ + ∞) would be NaN
    scalars = dict(log_sum_exp=jnp.where(seen, log_sum_exp, 0), delta=delta, t_delta=t_delta, minus_mu=multiply(-1, mu))
    scalars |= {n: jnp.where(seen, a, 0) for n, a in dict(d_lse=d_lse, t_d_lse=t_d_lse).items() if a is not None}
    rows = dict(t_q=tx.query, t_d_o=t_d_o, d_o=d_o) | {n: a.mT[..., None] for n, a in scalars.items() if a is not None}
    keys = dict(t_k=tx.key, t_v=tx.value)
    rows, keys = ({n: a for n, a in arrays.items() if a is not None} for arrays in (rows, keys))
    dtype = np.promote_types(x.query.dtype, jnp.float32)
    sums = {
        prefix + name: lax.full_like(x.query, 0, dtype, like.shape)
        for prefix, wanted in (("d_", want), ("t_d_", want_tangent))
        for name, like, wants in zip("kv", (x.key, x.value), wanted[1:3], strict=True)
        if wants
    }
    f = partial(_gradients, tx.bias, want, want_tangent)
    a = sight.sweep(f, x, problem, rows, keys, sums, loop)
    names = zip(KINDS, x[:DIFFERENTIABLE], strict=True)
    cast_to = {
        prefix + n: result_dtype(problem, like) for n, like in names if like is not None for prefix in ("d_", "t_d_")
    }
    a = {n: array.astype(cast_to[n]) for n, array in a.items()}
    dx, tdx = (Operands(*[a.get(prefix + n) for n in KINDS]) for prefix in ("d_", "t_d_"))
    return dx, tdx


def _gradients(
    t_bias: Array | None, want: tuple[bool, ...], want_tangent: tuple[bool, ...], x: Operands, problem: Problem,
    rows: Arrays, keys: Arrays,
) -> Arrays:  # fmt: skip
    tiles = Tiles(x, problem)
    tiles.add("query", **rows)
    tiles.add("key", **keys)
    tiles.add("scores", t_bias=t_bias)
    tiles.add("key", **{n: cast(a, tiles.dtype) for n, a in dict(wide_k=x.key, wide_t_k=keys.get("t_k")).items()})
    whole_rows = in_one_tile(x, problem)
    whole = not whole_rows and not problem.partial and (want[0] or want_tangent[0])
    if whole:
        tiles.add_row_sums(rows_of_d_s=1, rows_of_t_d_s=1, mean=x.key.shape[3], t_mean=x.key.shape[3])
    tiles.add_gradients("t_d_", want_tangent)
    tiles.add_gradients("d_", want)

    def tile(d: Arrays, s: Array, sums: Arrays) -> Arrays:
        q, v, t_q, t_v, t_d_o, d_o = map(d.get, ("q", "v", "t_q", "t_v", "t_d_o", "d_o"))
        p = jnp.exp(s - d["log_sum_exp"])
        p_kept = thinned(d, p)

        def less(a: Array | None, delta: str, sums_to: str) -> Array | None:
            return add(a, multiply(-1, row_sum(multiply(p, a))), d.get(sums_to)) if whole_rows else add(a, d.get(delta))

        d_p = less(thinned(d, outer(d_o, v)), "delta", "d_lse")
        w = add(tiles.tangent_scores(d), d.get("minus_mu"))
        d_s = multiply(p, d_p)
        t_d_p = thinned(d, add(outer(t_d_o, v), outer(d_o, t_v)))
        t_d_s = multiply(p, less(add(multiply(d_p, w), t_d_p), "t_delta", "t_d_lse"))
        d_x, t_d_x = under_cap(d, d_s), under_cap(d, t_d_s)  # of the products, under the cap
        if problem.soft_cap is not None:
            bend = multiply(d_x, multiply(-2 / problem.soft_cap * d["u"], tiles.tangent_products(d)))
            t_d_x = add(t_d_x, bend)
        sums = accumulate(
            sums,
            d_q=onto_rows(d_x, d["wide_k"]),
            d_k=onto_columns(d_x, q),
            d_v=onto_columns(p_kept, d_o),
            d_bias=d_s,
        )
        t_d_q = add(onto_rows(t_d_x, d["wide_k"]), onto_rows(d_x, d.get("wide_t_k")))
        t_d_k = add(onto_columns(t_d_x, q), onto_columns(d_x, t_q))
        t_d_v = add(onto_columns(p_kept, t_d_o), onto_columns(multiply(p_kept, w), d_o))
        weights = lax.stop_gradient(under_cap(d, p))  # constant, as they are multiplied by what is zero
        means = dict(mean=onto_rows(weights, d["wide_k"]), t_mean=onto_rows(weights, d.get("wide_t_k")))
        sums = accumulate(sums, rows_of_d_s=d_s, rows_of_t_d_s=t_d_s, **means)
        return accumulate(sums, t_d_q=t_d_q, t_d_k=t_d_k, t_d_v=t_d_v, t_d_bias=t_d_s)

    sums = tiles.sweep(tile)

    d_lse, t_d_lse = (tiles.arrays["row"].get(name) for name in ("d_lse", "t_d_lse"))
    common: Arrays = {}
    if whole:
        less, t_less = add(d_lse, -sums["rows_of_d_s"]), add(t_d_lse, -sums["rows_of_t_d_s"])
        common = dict(d_q=less * sums["mean"], t_d_q=t_less * sums["mean"] + less * sums["t_mean"])
    if x.bias is not None and x.bias.shape[3] == 1 and not problem.partial:  # the same for all keys: the gradient of ℓ
        common |= dict(d_bias=d_lse, t_d_bias=t_d_lse)
        sums |= {name: lax.full_like(sums[name], 0) for name in ("d_bias", "t_d_bias") if name in sums}
    sums = accumulate(sums, **common)
    return tiles.take_gradients("d_", sums) | tiles.take_gradients("t_d_", sums)
