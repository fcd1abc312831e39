"""The jobs of attention as launches of the portable kernels, for whichever framework brings a `Launcher`.

Arrays have the layout of `problem.py` with one batch axis; queries, keys and values may be strided (their last axis
contiguous), a tangent has its primal's strides, everything else is contiguous.  What a call uses beyond plain attention is
named in `features`; a kernel compiles that alone.
"""

import math
from typing import Any

import triton

from jax_flash_jvp.kernels.features import Axes, Features
from jax_flash_jvp.kernels.launcher import PLACEHOLDER, Launcher, Output
from jax_flash_jvp.kernels.portable import backward as backward_kernels
from jax_flash_jvp.kernels.portable import bias as bias_kernels
from jax_flash_jvp.kernels.portable import forward as forward_kernels
from jax_flash_jvp.kernels.portable import visibility
from jax_flash_jvp.kernels.portable.tiles import Tile, accumulators, lighter, product, short, tile
from jax_flash_jvp.problem import DIFFERENTIABLE, Operands, Problem, dtype_of

ALIGNED = 16  # elements; what Triton makes use of


def axes_of(array: Any, query_heads: int, key_heads: int) -> Axes:
    """Of an array [1|B, 1|K|N, 1|T, 1|S], or None."""
    if array is None:
        return Axes()
    b, h, t, s = array.shape
    by_query_head = h == query_heads > 1
    return Axes(
        present=True, batch=b > 1, heads=by_query_head, groups=not by_query_head and h == key_heads > 1, rows=t > 1,
        columns=s > 1,
    )  # fmt: skip


def features(problem: Problem, x: Operands) -> Features:
    (batch, queries, query_heads, _), (_, keys, key_heads, _) = x.query.shape, x.key.shape
    left, right = problem.reach(queries, keys)
    mask = axes_of(x.mask, query_heads, key_heads)
    listed = x.mask is not None or x.query_segments is not None
    by_batch = batch > 1 and any(a is not None for a in (x.query_segments, x.query_lengths, x.key_lengths))
    return Features(
        left=left is not None, right=right is not None, cap=problem.soft_cap is not None,
        query_lengths=x.query_lengths is not None, key_lengths=x.key_lengths is not None,
        segments=x.query_segments is not None, dropout=x.seed is not None,
        queries_aligned=queries % ALIGNED == 0, keys_aligned=keys % ALIGNED == 0,
        bias=axes_of(x.bias, query_heads, key_heads), mask=mask,
        tiles=Axes(present=listed, batch=listed and (mask.batch or by_batch), heads=mask.heads, groups=mask.groups),
    )  # fmt: skip


class _Call:
    """What the launches of one call share."""

    def __init__(self, launcher: Launcher, problem: Problem, x: Operands, word: int = 16):
        self.launcher, self.problem = launcher, problem
        self.dtype = dtype_of(x.query)
        self.x = x = x._replace(**dict(zip(("query", "key", "value"), self.rounded(x[:3]), strict=True)))
        self.batch, self.query_length, self.query_heads, self.head_dim = x.query.shape
        _, self.key_length, self.key_heads, self.value_dim = x.value.shape
        strides = [self._batch_sequence_head(a) for a in x[:3]]
        units = [math.gcd(ALIGNED, batch, head) for batch, _, head in strides]
        group = self.query_heads // self.key_heads
        left, right = problem.reach(self.query_length, self.key_length)
        self.sizes = (self.query_heads, group, self.query_length, self.key_length)
        self.reach = (left or 0, right or 0)
        self.scalars = (
            float(problem.scale), *self.sizes,
            *(stride // unit for (batch, _, head), unit in zip(strides, units, strict=True) for stride in (batch, head)),
            *self.reach, float(problem.soft_cap or 0), float(problem.dropout_rate),
        )  # fmt: skip
        self.features = features(problem, x)
        self.bias = self.padded(x.bias)
        self.selection = (x.mask, x.query_lengths, x.key_lengths, x.query_segments, x.key_segments)
        self.word = word  # its bits
        self.packed: dict[bool, Any] = {}  # the mask, by query or by key
        self.value_constants = dict(DV=self.value_dim)
        self.constants = dict(
            self.value_constants, D=self.head_dim, FEATURES=self.features,
            PRECISION=product(self.dtype, problem.precision, self.widest),
        )  # fmt: skip
        for name, (_, sequence, _), unit in zip("qkv", strides, units, strict=True):
            self.constants.update({f"s_{name}": sequence, f"UNIT_{name.upper()}": unit})
        self.statistic = Output((self.batch, self.query_heads, self.query_length), "float32")
        self.output = Output((self.batch, self.query_length, self.query_heads, self.value_dim), self.dtype)
        self.query_gradient = Output(tuple(x.query.shape), self.dtype)
        self.key_gradient, self.value_gradient = (Output(tuple(a.shape), self.dtype) for a in (x.key, x.value))

    @property
    def widest(self) -> int:
        return max(self.head_dim, self.value_dim)

    def _batch_sequence_head(self, array: Any) -> tuple[int, ...]:
        """Strides, of which a stride of an axis of length one is arbitrary and must not spoil their common divisor."""
        return tuple(0 if n == 1 else s for n, s in zip(array.shape[:3], self.launcher.strides(array)[:3], strict=True))

    def rounded(self, arrays) -> tuple:
        """As the operands of products: tensor cores would cut float32 down to TF32, towards zero."""
        if self.dtype != "float32" or self.problem.precision != "tf32":
            return tuple(arrays)
        return tuple(None if a is None else self.launcher.round_to_tf32(a) for a in arrays)

    def padded(self, matrix: Any) -> Any:
        """A bias, the rows of a matrix [T, S] filled up, so that several elements are read at a time."""
        if matrix is None or 1 in matrix.shape[2:] or matrix.shape[3] % ALIGNED == 0:
            return matrix
        return self.launcher.padded(matrix, -matrix.shape[3] % ALIGNED)

    def tile(self, job: str) -> Tile:
        target = self.launcher.target
        found = tile(job, self.widest, self.dtype, self.problem.precision, target)
        if self.features.bias.present or self.features.dropout or self.features.cap:
            found = lighter(found, job)
        return short(found, job, self.widest, self.dtype, target) if self.features.tiles.present else found

    def run(self, kernel, tile: Tile, programs: int, inputs, outputs, tx: Operands, by_key: bool = False, **constants):
        """`outputs` that are None are not written: a placeholder stands for them."""
        length, block = (self.query_length, tile.block_m) if by_key else (self.key_length, tile.block_n)
        ragged = bool(length % block) or self.features.lengths
        given = (*inputs, self.bias, tx.bias, *self.selected(by_key), self.x.seed, self.tiles(tile, by_key))
        got = self.launcher.launch(
            kernel, programs, given, self.scalars, [PLACEHOLDER if o is None else o for o in outputs],
            dict(
                self.constants, BM=tile.block_m, BN=tile.block_n, RAGGED=ragged, **has_tangents(tx), **constants
            ), tile.num_warps, tile.num_stages, registers=tile.registers,
        )  # fmt: skip
        return tuple(None if o is None else a for o, a in zip(outputs, got, strict=True))

    def selected(self, by_key: bool) -> tuple:
        """`selection`, of a mask with rows and columns the bits."""
        mask, *others = self.selection
        if not self.features.mask.matrix:
            return self.selection
        if by_key not in self.packed:
            rows, columns = (self.key_length, self.query_length) if by_key else (self.query_length, self.key_length)
            block_m, block_n = (4 * self.word, 1024 // self.word) if by_key else (16, 256)
            matrices, words = mask.shape[0] * mask.shape[1], visibility.words.fn(columns, self.word)
            programs = matrices * triton.cdiv(self.query_length, block_m) * triton.cdiv(self.key_length, block_n)
            (self.packed[by_key],) = self.launcher.launch(
                visibility.pack, programs, (mask,), self.sizes[2:], [Output((matrices, rows, words), f"int{self.word}")],
                dict(BM=block_m, BN=block_n, BY_KEY=by_key, FEATURES=self.features), 1, 1,
            )  # fmt: skip
        return self.packed[by_key], *others

    def tiles(self, tile: Tile, by_key: bool) -> Any:
        """The list of the tiles in which a mask or segments leave something to see; None without these."""
        by = self.features.tiles
        if not by.present:
            return None
        batch = self.batch if by.batch else 1
        heads = self.query_heads if by.heads else self.key_heads if by.groups else 1
        blocks = (triton.cdiv(self.query_length, tile.block_m), triton.cdiv(self.key_length, tile.block_n))
        n_blocks, n_tiles = reversed(blocks) if by_key else blocks
        if batch * heads * n_blocks * (n_tiles + 2) >= 2**31:
            raise NotImplementedError("lists of tiles for so many scores would hold more than 2³¹ numbers")
        (seen,) = self.launcher.launch(
            visibility.look_at_tiles, batch * heads * n_blocks * n_tiles, self.selected(by_key),
            (*self.sizes, *self.reach, heads), [Output((batch, heads, n_blocks, n_tiles), "int32")],
            dict(BM=tile.block_m, BN=tile.block_n, BY_KEY=by_key, FEATURES=self.features), 4, 1, registers=80,
        )  # fmt: skip
        (listed,) = self.launcher.launch(
            visibility.list_tiles, batch * heads * n_blocks, (seen,), (n_tiles,),
            [Output((batch, heads, n_blocks, n_tiles + 2), "int32")], dict(CHUNK=256), 1, 1,
        )  # fmt: skip
        return listed

    def key_means(self, t_key: Any) -> tuple[Any, Any, Any]:
        """Of each head a mean key, that of the tangents, None without these, and whether keys, or tangents, have much in common:
        from every so many keys, 512 at most."""
        heads = (self.batch, self.key_heads)
        mean = Output((*heads, self.head_dim), "float32")
        step = max(1, min(8, self.key_length // 32), self.key_length // 512)
        warps = 1 if self.key_length <= 512 else 4  # one has nobody to wait for
        constants = {name: self.constants[name] for name in ("D", "s_k", "UNIT_K", "FEATURES")}
        means, t_means, common = self.launcher.launch(
            backward_kernels.key_means, self.batch * self.key_heads, (self.x.key, t_key, self.x.key_lengths),
            (self.key_heads, self.key_length, *self.scalars[7:9], step),
            (mean, Output((1,), "float32") if t_key is None else mean, Output(heads, "int32")),
            dict(constants, BN=8 * warps, HAS_TK=t_key is not None), warps, 1,
        )  # fmt: skip
        return means, None if t_key is None else t_means, common

    def query_programs(self, tile: Tile) -> int:
        return triton.cdiv(self.query_length, tile.block_m) * self.batch * self.query_heads

    def key_programs(self, tile: Tile) -> int:
        return triton.cdiv(self.key_length, tile.block_n) * self.batch * self.key_heads


def has_tangents(tx: Operands) -> dict[str, bool]:
    return {name: t is not None for name, t in zip(("HAS_TQ", "HAS_TK", "HAS_TV", "HAS_TBIAS"), tx, strict=False)}


NO_TANGENT = Operands(None, None, None)


def forward(launcher: Launcher, problem: Problem, x: Operands, tx: Operands = NO_TANGENT):
    """(o, ℓ, ȯ, μ); the last two None without tangents."""
    return _forward(_Call(launcher, problem, x), tx)


def tangent(launcher: Launcher, problem: Problem, x: Operands, log_sum_exp, tx: Operands):
    """(ȯ, μ), linear in tx, from the saved ℓ."""
    return _forward(_Call(launcher, problem, x), tx, log_sum_exp)[2:]


def _forward(call: _Call, tx: Operands, saved=None):
    dual, linear = any(t is not None for t in tx), saved is not None
    tx = tx._replace(bias=call.padded(tx.bias))
    t, y, nothing = call.tile("forward_dual" if dual else "forward"), (call.output, call.statistic), (None, None)
    return call.run(
        forward_kernels.forward, t, call.query_programs(t), (*call.x[:3], *call.rounded(tx[:3]), saved),
        (*(nothing if linear else y), *(y if dual else nothing)), tx, NEGATIVE=call.problem.scale < 0, LINEAR=linear,
    )  # fmt: skip


def backward(launcher: Launcher, problem: Problem, x: Operands, y, cy, want) -> Operands:
    """The wanted gradients of (q, k, v, bias), for y = (o, ℓ) and its cotangents cy, either of which may be None."""
    call = _Call(launcher, problem, x)
    return _backward(call, y, cy, NO_TANGENT, (None, None), (None, None), want, (False,) * DIFFERENTIABLE)[0]


def backward_dual(launcher: Launcher, problem: Problem, x: Operands, y, cy, tangents, want, want_tangent):
    """(the wanted gradients, the wanted tangents of the gradients) along tangents = (tx, ty, tcy)."""
    tx, ty, tcy = tangents
    return _backward(_Call(launcher, problem, x), y, cy, tx, ty, tcy, want, want_tangent)


def _backward(call: _Call, y, cy, tx: Operands, ty, tcy, want, want_tangent):
    (o, log_sum_exp), (d_o, d_lse), (t_o, mu), (t_d_o, t_d_lse) = y, cy, ty, tcy
    dual = any(want_tangent)
    tx = tx._replace(bias=call.padded(tx.bias))
    lse2, delta, t_delta = _statistics(call, o, t_o, d_o, t_d_o, log_sum_exp, d_lse, t_d_lse, dual)
    operands = (*call.x[:3], *call.rounded((*tx[:3], d_o, t_d_o)))
    has = dict(HAS_DO=d_o is not None, HAS_TDO=t_d_o is not None)
    suffix = "_dual" if dual else ""
    dq = t_dq = d_bias = t_d_bias = None
    if want[0] or want_tangent[0]:  # first, for it makes δ and δ̇ more exact
        t = call.tile("query_side" + suffix)
        means = call.key_means(operands[4] if want_tangent[0] else None)
        dq, t_dq, delta, t_delta_of_rows = call.run(
            backward_kernels.query_side, t, call.query_programs(t),
            (*operands, lse2, mu, delta, t_delta, d_lse, t_d_lse, *means[:2]),
            [call.query_gradient if w else None for w in (want[0], want_tangent[0])]
            + [call.statistic, call.statistic if want_tangent[0] else None],
            tx, WANT_Q=want[0], WANT_TQ=want_tangent[0], HAS_D_LSE=d_lse is not None, HAS_TD_LSE=t_d_lse is not None,
            **has,
        )  # fmt: skip
        t_delta = t_delta_of_rows if want_tangent[0] else t_delta
    inputs = (*operands, lse2, mu, delta, t_delta)
    key_gradients = [None] * 4  # dK, dV and their tangents
    for wanted in _key_passes(call, (*want[1:3], *want_tangent[1:3])):
        t = call.tile(("value_side" if dual and not (wanted[0] or wanted[2]) else "key_side") + suffix)
        like = (call.key_gradient, call.value_gradient) * 2
        got = call.run(
            backward_kernels.key_side, t, call.key_programs(t), inputs,
            [g if w else None for g, w in zip(like, wanted, strict=True)], tx, by_key=True,
            **dict(zip(("WANT_K", "WANT_V", "WANT_TK", "WANT_TV"), wanted, strict=True)), **has,
        )  # fmt: skip
        key_gradients = [new if w else old for new, old, w in zip(got, key_gradients, wanted, strict=True)]
    if want[3] or want_tangent[3]:
        d_bias, t_d_bias = _bias_gradients(
            call, inputs, tx, (want[3], want_tangent[3]), has, log_sum_exp, (d_lse, t_d_lse)
        )
    dk, dv, t_dk, t_dv = key_gradients
    return Operands(dq, dk, dv, d_bias), Operands(t_dq, t_dk, t_dv, t_d_bias)


def _bias_gradients(call: _Call, inputs, tx: Operands, want: tuple[bool, bool], has, log_sum_exp, of_lse):
    """The gradient of the bias and its tangent, as far as they are wanted."""
    bias = call.x.bias
    by_row = call.features.bias.rows
    if not call.features.bias.columns:
        rows = [_row_sums(call, log_sum_exp, d) if w else None for d, w in zip(of_lse, want, strict=True)]
        return tuple(None if a is None else call.launcher.summed(a, False, bias) for a in rows)
    t = call.tile("score_side" if not want[1] else "score_side_dual")
    if by_row:
        shape, dtype = tuple(bias.shape), dtype_of(bias)
        shared = (call.batch // bias.shape[0], call.query_heads // bias.shape[1])
    else:
        shape, dtype, shared = (call.batch, call.query_heads, call.key_length), "float32", (1, 1)
    blocks = triton.cdiv(call.query_length, t.block_m) if by_row else 1
    got = call.launcher.launch(
        bias_kernels.score_side, blocks * triton.cdiv(call.key_length, t.block_n) * shape[0] * shape[1],
        (*inputs, call.bias, tx.bias, *call.selected(False), call.x.seed), (*call.scalars, *shared),
        [Output(shape, dtype) if w else PLACEHOLDER for w in want],
        dict(
            call.constants, BM=t.block_m, BN=t.block_n, WANT=want[0], WANT_T=want[1], **has_tangents(tx), **has
        ), t.num_warps, t.num_stages,
    )  # fmt: skip
    return tuple(
        None if not w else a if shape == bias.shape else call.launcher.summed(a, True, bias)
        for a, w in zip(got, want, strict=True)
    )


def _row_sums(call: _Call, log_sum_exp, d_lse):
    n = math.prod(call.statistic.shape)
    (rows,) = call.launcher.launch(
        bias_kernels.row_side, triton.cdiv(n, 1024), (log_sum_exp, d_lse), (n,), [call.statistic],
        dict(BLOCK=1024, HAS_D_LSE=d_lse is not None), 4, 1,
    )  # fmt: skip
    return rows


def _key_passes(call: _Call, wanted: tuple[bool, ...]) -> list[tuple[bool, ...]]:
    """What of `wanted` = (dK, dV, their tangents) each launch computes: where the registers do not hold them all, first
    those of the keys, then those of the values, which need fewer products."""
    if sum(wanted) <= accumulators(call.widest):
        return [wanted] if any(wanted) else []
    keys, values = (True, False, True, False), (False, True, False, True)
    return [tuple(a and b for a, b in zip(wanted, side, strict=True)) for side in (keys, values)]


def _statistics(call: _Call, o, t_o, d_o, t_d_o, log_sum_exp, d_lse, t_d_lse, dual: bool):
    block_m = 16 if call.launcher.target == "interpret" else 64
    return call.launcher.launch(
        backward_kernels.statistics,
        triton.cdiv(call.query_length, block_m) * call.batch * call.query_heads,
        (o, t_o, d_o, t_d_o, log_sum_exp, d_lse, t_d_lse),
        (call.query_heads, call.query_length),
        (call.statistic, call.statistic, call.statistic if dual else PLACEHOLDER),
        dict(
            call.value_constants, BM=block_m, HAS_TANGENT=dual, HAS_DO=d_o is not None, HAS_TDO=t_d_o is not None,
            HAS_D_LSE=d_lse is not None, HAS_TD_LSE=t_d_lse is not None,
        ),
        4, 1,
    )  # fmt: skip
