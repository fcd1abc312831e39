"""The four jobs of attention as launches of the portable kernels, for whichever framework brings a `Launcher`.

Arrays have the layout of `problem.py` with one batch axis; queries, keys and values may be strided (their last axis
contiguous), a tangent has its primal's strides, everything else is contiguous.
"""

import math
from typing import Any

import triton

from jax_flash_jvp.kernels.launcher import Launcher, Output
from jax_flash_jvp.kernels.portable import backward as backward_kernels
from jax_flash_jvp.kernels.portable import forward as forward_kernels
from jax_flash_jvp.kernels.portable.tiles import Tile, accumulators, padded, product, tile
from jax_flash_jvp.problem import Operands, Problem, dtype_of

STRIDE_UNIT = 16  # elements; what Triton makes use of


class _Call:
    """What the launches of one call share."""

    def __init__(self, launcher: Launcher, problem: Problem, x: Operands):
        self.launcher, self.problem = launcher, problem
        self.dtype = dtype_of(x.query)
        self.x = x = Operands(*self.rounded(x[:3]))
        self.batch, self.query_length, self.query_heads, self.head_dim = x.query.shape
        self.key_length, self.key_heads = x.key.shape[1:3]
        strides = [self._batch_sequence_head(a) for a in x[:3]]
        unit = math.gcd(STRIDE_UNIT, *(batch for batch, *_ in strides))
        group = self.query_heads // self.key_heads
        self.scalars = (
            float(problem.scale), self.query_heads, group, self.query_length, self.key_length,
            *(batch // unit for batch, *_ in strides),
        )  # fmt: skip
        self.shape_constants = dict(D=self.head_dim, BD=padded(self.head_dim))
        self.constants = dict(
            self.shape_constants, UNIT=unit, CAUSAL=problem.is_causal,
            PRECISION=product(problem.precision, self.head_dim),
        )  # fmt: skip
        for name, (_, sequence, head) in zip("qkv", strides, strict=True):
            self.constants.update({f"s_{name}": sequence, f"s_{name}h": head})
        self.statistic = Output((self.batch, self.query_heads, self.query_length), "float32")
        self.output = Output((self.batch, self.query_length, self.query_heads, self.head_dim), self.dtype)
        self.key_gradient = Output((self.batch, self.key_length, self.key_heads, self.head_dim), self.dtype)

    def _batch_sequence_head(self, array: Any) -> tuple[int, ...]:
        """Strides, of which a stride of an axis of length one is arbitrary and must not spoil their common divisor."""
        return tuple(0 if n == 1 else s for n, s in zip(array.shape[:3], self.launcher.strides(array)[:3], strict=True))

    def rounded(self, arrays) -> tuple:
        """As the operands of products: tensor cores would cut float32 down to TF32, towards zero."""
        if self.dtype != "float32" or self.problem.precision != "tf32":
            return tuple(arrays)
        return tuple(None if a is None else self.launcher.round_to_tf32(a) for a in arrays)

    def tile(self, job: str) -> Tile:
        return tile(job, self.head_dim, self.dtype, self.problem.precision, self.launcher.target)

    def run(self, kernel, tile: Tile, programs: int, inputs, outputs, **constants):
        """`outputs` that are None are not written: a placeholder stands for them."""
        placeholder = Output((1,), "float32")
        got = self.launcher.launch(
            kernel, programs, inputs, self.scalars, [placeholder if o is None else o for o in outputs],
            dict(self.constants, BM=tile.block_m, BN=tile.block_n, **constants), tile.num_warps, tile.num_stages,
        )  # fmt: skip
        return tuple(None if o is None else a for o, a in zip(outputs, got, strict=True))

    def query_programs(self, tile: Tile) -> int:
        return triton.cdiv(self.query_length, tile.block_m) * self.batch * self.query_heads

    def key_programs(self, tile: Tile) -> int:
        return triton.cdiv(self.key_length, tile.block_n) * self.batch * self.key_heads


def _has(tx: Operands) -> dict[str, bool]:
    return dict(HAS_TQ=tx.query is not None, HAS_TK=tx.key is not None, HAS_TV=tx.value is not None)


NO_TANGENT = Operands(None, None, None)


def forward(launcher: Launcher, problem: Problem, x: Operands, tx: Operands = NO_TANGENT):
    """(o, ℓ, ȯ, μ); the last two None without tangents."""
    call = _Call(launcher, problem, x)
    dual = any(t is not None for t in tx[:3])
    t = call.tile("forward_dual" if dual else "forward")
    return call.run(
        forward_kernels.forward, t, call.query_programs(t), (*call.x[:3], *call.rounded(tx[:3])),
        (call.output, call.statistic, *((call.output, call.statistic) if dual else (None, None))),
        RAGGED=bool(call.key_length % t.block_n), NEGATIVE=problem.scale < 0, **_has(tx),
    )  # fmt: skip


def tangent(launcher: Launcher, problem: Problem, x: Operands, o, log_sum_exp, tx: Operands):
    """(ȯ, μ), linear in tx, from the saved o and ℓ."""
    call = _Call(launcher, problem, x)
    t = call.tile("tangent")
    return call.run(
        forward_kernels.tangent, t, call.query_programs(t), (*call.x[:3], *call.rounded(tx[:3]), o, log_sum_exp),
        (call.output, call.statistic), RAGGED=bool(call.key_length % t.block_n), **_has(tx),
    )  # fmt: skip


def backward(launcher: Launcher, problem: Problem, x: Operands, y, cy, want) -> Operands:
    """The wanted gradients of (q, k, v), for y = (o, ℓ) and its cotangents cy, either of which may be None."""
    return _backward(_Call(launcher, problem, x), y, cy, NO_TANGENT, (None, None), (None, None), want, (False,) * 3)[0]


def backward_dual(launcher: Launcher, problem: Problem, x: Operands, y, cy, tangents, want, want_tangent):
    """(the wanted gradients, the wanted tangents of the gradients) along tangents = (tx, ty, tcy)."""
    tx, ty, tcy = tangents
    return _backward(_Call(launcher, problem, x), y, cy, tx, ty, tcy, want, want_tangent)


def _backward(call: _Call, y, cy, tx: Operands, ty, tcy, want, want_tangent):
    (o, log_sum_exp), (d_o, d_lse), (t_o, mu), (t_d_o, t_d_lse) = y, cy, ty, tcy
    dual = any(want_tangent)
    lse2, delta, t_delta = _statistics(call, o, t_o, d_o, t_d_o, log_sum_exp, d_lse, t_d_lse, dual)
    inputs = (*call.x[:3], *call.rounded((*tx[:3], d_o, t_d_o)), lse2, mu, delta, t_delta)
    has = dict(_has(tx), HAS_DO=d_o is not None, HAS_TDO=t_d_o is not None)
    suffix = "_dual" if dual else ""
    dq = t_dq = None
    key_gradients = [None] * 4  # dK, dV and their tangents
    for wanted in _key_passes(call, (*want[1:3], *want_tangent[1:3])):
        t = call.tile(("value_side" if dual and not (wanted[0] or wanted[2]) else "key_side") + suffix)
        got = call.run(
            backward_kernels.key_side, t, call.key_programs(t), inputs,
            [call.key_gradient if w else None for w in wanted],
            RAGGED=bool(call.query_length % t.block_m), HAS_TANGENT=dual,
            **dict(zip(("WANT_K", "WANT_V", "WANT_TK", "WANT_TV"), wanted, strict=True)), **has,
        )  # fmt: skip
        key_gradients = [new if w else old for new, old, w in zip(got, key_gradients, wanted, strict=True)]
    if want[0] or want_tangent[0]:
        t = call.tile("query_side" + suffix)
        dq, t_dq = call.run(
            backward_kernels.query_side, t, call.query_programs(t), inputs,
            [call.output if w else None for w in (want[0], want_tangent[0])],
            RAGGED=bool(call.key_length % t.block_n), WANT_Q=want[0], WANT_TQ=want_tangent[0], **has,
        )  # fmt: skip
    dk, dv, t_dk, t_dv = key_gradients
    return Operands(dq, dk, dv), Operands(t_dq, t_dk, t_dv)


def _key_passes(call: _Call, wanted: tuple[bool, ...]) -> list[tuple[bool, ...]]:
    """What of `wanted` = (dK, dV, their tangents) each launch computes: where the registers do not hold them all, first
    those of the keys, then those of the values, which need fewer products."""
    if sum(wanted) <= accumulators(call.head_dim):
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
        (call.statistic, call.statistic, call.statistic if dual else Output((1,), "float32")),
        dict(
            call.shape_constants, BM=block_m, HAS_TANGENT=dual, HAS_DO=d_o is not None, HAS_TDO=t_d_o is not None,
            HAS_D_LSE=d_lse is not None, HAS_TD_LSE=t_d_lse is not None,
        ),
        4, 1,
    )  # fmt: skip
