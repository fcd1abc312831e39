"""The attention family: which kernel is whose tangent and whose transpose.

x are the operands, y = (o, ℓ) the results, cy the cotangents of y, dx the gradients of x; tx, ty = (ȯ, μ), tcy and tdx are the
tangents of these.  The kernels and PyTorch's operators have the same names and order.  The derivation stands in
kernels/README.md.

    kernel             of                         result     linear in    its tangent is         its transpose is
    forward            x                          y          value        forward_dual            backward
    forward_dual       x, tx                      y, ty      tx           second                 backward
    tangent            x, y, tx                   ty         tx           second                 backward
    second             x, tx, (y, ty), (ẋ, ṫx)    ẏ, ṫy      ẋ, ṫx        (reference)            backward_dual
    backward           x, y, cy                   dx         cy           backward_dual          tangent
    backward_dual      x, y, cy, (tx, ty, tcy)    dx, tdx    (…)          (reference)            tangent, backward_dual
    backward_tangent   x, y, cy, dx, (…)          tdx        (…)          (reference)            tangent, backward_dual

cty are the cotangents of ty, and dtx the gradients of tx: only the transpose of `second` has both cy and cty.

One convention holds throughout: y and ty are functions of x and tx.  A rule takes the tangents of y and ty as hints where
it has them, gives y and ty zero cotangents, and x and tx total ones.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash_jvp import launch
from jax_flash_jvp.kernel_primitive import KernelPrimitive, all_none, axes_of, is_zero, lead_of, result, tie
from jax_flash_jvp.problem import DIFFERENTIABLE, Operands, Problem

SAVED_NAME = "attention"  # what a checkpoint policy names to save (o, ℓ)
Mask = tuple[bool, ...]  # which of the Operands


# ------------------------------------------------------------------------------------------------ shapes


def _y_shapes(x: Operands, *args, **__) -> tuple:
    lead, of_lead = lead_of((x, *args), x.query.ndim - 4)
    batch, length, heads, _ = x.query.shape[-4:]
    of_batch, of_length, of_heads, _ = axes_of(x.query)[-4:]
    wide = np.promote_types(x.query.dtype, jnp.float32)
    of_output = (*of_lead, of_batch, of_length, of_heads, None)
    return (
        result((*lead, batch, length, heads, x.value.shape[-1]), x.query.dtype, x.query, of_output),
        result((*lead, batch, heads, length), wide, x.query, (*of_lead, of_batch, of_heads, of_length)),
    )


def _dual_shapes(*args, **__) -> tuple:
    return _y_shapes(*args), _y_shapes(*args)


def _gradient_shapes(x: Operands, *args, want: Mask, **__) -> Operands:
    """The gradients' shapes.  That of a bias is the bias's own: leading axes of length one are summed over."""
    n = x.query.ndim - 4
    lead, of_lead = lead_of((x, *args), n)
    like: list[Any] = [
        result((*lead, *a.shape[n:]), a.dtype, a, (*of_lead, *axes_of(a)[n:])) for a in x[: DIFFERENTIABLE - 1]
    ]
    like += [None if x.bias is None else result(x.bias.shape, x.bias.dtype, x.bias, axes_of(x.bias))]
    return Operands(*[a if w else None for a, w in zip(like, want, strict=False)])


def _backward_dual_shapes(x: Operands, *args, want: Mask, want_tangent: Mask, **__) -> tuple[Operands, Operands]:
    return _gradient_shapes(x, *args, want=want), _gradient_shapes(x, *args, want=want_tangent)


# ------------------------------------------------------------------------------------------------ the kernels


def _shared(mapped: tuple, *, want: Mask = (), want_tangent: Mask = (), **_) -> Any:
    """All that is not mapped; but a bias and its tangents only if none of them is, and their gradients are not wanted."""
    operands = [part for part in jax.tree.leaves(mapped, is_leaf=launch.is_operands) if launch.is_operands(part)]
    bias = not any(part.bias for part in operands) and not any(w[DIFFERENTIABLE - 1] for w in (want, want_tangent) if w)

    def share(part):
        shared = jax.tree.map(lambda m: not m, part)
        return shared._replace(bias=None if part.bias is None else bias) if launch.is_operands(part) else shared

    return jax.tree.map(share, mapped, is_leaf=launch.is_operands)


def _kernel(job: str, shapes: Any) -> KernelPrimitive:
    return KernelPrimitive("attention_" + job, shapes, launch.implementations(job), _shared)


forward = _kernel("forward", _y_shapes)
forward_dual = _kernel("forward_dual", _dual_shapes)
tangent = _kernel("tangent", _y_shapes)
second = _kernel("second", _dual_shapes)
backward = _kernel("backward", _gradient_shapes)
backward_dual = _kernel("backward_dual", _backward_dual_shapes)
backward_tangent = _kernel("backward_tangent", _gradient_shapes)


def _mask(wanted: Any) -> Mask:
    return tuple(bool(w) for w in wanted)


# ------------------------------------------------------------------------------------------------ the forward side


@forward.def_jvp
def forward_jvp(args, tangents, *, problem):
    return forward_fused(args[0], tangents[0], problem=problem)


@forward.def_transpose
def forward_transpose(x, *, wanted, cotangent, problem):
    """The transpose of attention as a linear function of the values, for `jax.linear_transpose` and linear solvers."""
    if any(wanted[:2]) or any(wanted[3:]):
        raise ValueError("attention is linear in `value` alone: it cannot be transposed in other operands")
    if cotangent[0] is None:
        return None
    # neither ℓ nor the gradient of the values depends on the values
    rows = jnp.zeros_like(x.key[..., :1])
    x = x._replace(value=jnp.broadcast_to(rows, (*rows.shape[:-1], cotangent[0].shape[-1])))
    y = forward(x, problem=problem)
    return backward(x, y, (cotangent[0], None), problem=problem, want=_mask(wanted))


@forward_dual.def_jvp
def forward_dual_jvp(args, tangents, *, problem):
    (x, tx), (xd, txd) = args, tangents
    out = y, _ = forward_fused(x, tx, problem=problem)
    if all_none(xd):
        return out, (None, tangent(x, y, txd, problem=problem))
    return out, second(x, tx, out, (xd, txd), problem=problem)


@tangent.def_jvp
def tangent_jvp(args, tangents, *, problem):
    (x, y, tx), (xd, _, txd) = args, tangents
    ty = tangent(x, y, tx, problem=problem)
    if all_none(xd):
        return ty, tangent(x, y, txd, problem=problem)
    return ty, second(x, tx, (y, ty), (xd, txd), problem=problem)[1]


@tangent.def_transpose
def tangent_transpose(x, y, *, wanted, cotangent, problem):
    return backward(x, y, cotangent, problem=problem, want=_mask(wanted))


@second.def_transpose
def second_transpose(x, tx, out, *, wanted, cotangent, problem):
    """The kernel is the tangent of the backward, and reverse mode takes it too, since mixed second derivatives commute: the
    gradients for cty are those of tx, and their tangents along (tx, ty, cy) those of x."""
    (y, ty), (cy, cty), (want, want_t) = out, cotangent, map(_mask, wanted)
    if all_none(cty):
        return backward(x, y, cy, problem=problem, want=want), None
    if not any(want):
        return None, backward(x, y, cty, problem=problem, want=want_t)
    dtx, dx = backward_dual(x, y, cty, (tx, ty, cy), problem=problem, want=want_t, want_tangent=want)
    return dx, dtx


@second.def_dce
def second_dce(args, used, *, problem):
    """The transposition of a scan makes zero cotangents of tangents into arrays; where it then drops what depends on
    them, the consistency step keeps its plain kernels."""
    x, _, (y, _), (xd, _) = args
    return None if any(used[2:]) else (tangent, (x, y, xd), dict(problem=problem), range(2))


forward_fused = tie(forward, forward_dual, tangent, saved_name=SAVED_NAME, split=lambda static: (static, static, 2))


# ------------------------------------------------------------------------------------------------ the backward side


@backward.def_jvp
def backward_jvp(args, tangents, *, problem, want):
    (x, y, cy), (xd, yd, cyd) = args, tangents
    if all_none(xd):
        dx = backward(x, y, cy, problem=problem, want=want)
        return dx, backward(x, y, cyd, problem=problem, want=want)
    if any(t is None for t in yd):
        yd = tangent(x, y, xd, problem=problem)
    return backward_fused(x, y, cy, (xd, yd, cyd), problem=problem, want=want, want_tangent=want)


@backward.def_transpose
def backward_transpose(x, y, *, wanted, cotangent, problem, want):
    return tangent(x, y, cotangent, problem=problem)


@backward.def_dce
def backward_dce(args, used, *, problem, want):
    """Gradients that nobody wants are not computed."""
    if all(used):
        return None
    still = iter(used)
    keep = tuple(w and next(still) for w in want)
    return backward, args, dict(problem=problem, want=keep), [i for i, u in enumerate(used) if u]


@backward_tangent.def_transpose
def backward_tangent_transpose(x, y, cy, dx, *, wanted, cotangent, problem, want):
    """The linear map is (tx, tcy) → tangent of backward(x, y, cy): its transpose at c has tangent(c) for tcy, and for tx the
    tangent of the gradient along c, by the symmetry of second derivatives."""
    want_x, _, want_cy = wanted
    ty = tangent(x, y, cotangent, problem=problem)
    tdx = None
    if any(want_x):
        keep = dict(want=(False,) * len(x), want_tangent=_mask(want_x))
        _, tdx = backward_dual(x, y, cy, (cotangent, ty, (None, None)), problem=problem, **keep)
    return tdx, None, tuple(t if w else None for t, w in zip(ty, want_cy, strict=True))


def _split_backward(static):
    problem, want, want_t = static["problem"], static["want"], static["want_tangent"]
    return dict(problem=problem, want=want), dict(problem=problem, want=want_t), sum(want)


backward_fused = tie(backward, backward_dual, backward_tangent, saved_name=SAVED_NAME, split=_split_backward)

for _kernel_primitive, _job in (
    (second, "second"),
    (backward_dual, "total_backward_dual"),
    (backward_tangent, "total_backward_tangent"),
):
    _kernel_primitive.def_high_order(launch.reference_job(_job))


# ------------------------------------------------------------------------------------------------ the function


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def attend(problem: Problem, *x: Any) -> tuple[Any, Any]:
    """(o, ℓ) of the operands x.  The custom JVP sees which tangents are zero before any kernel is bound."""
    return forward(Operands(*x), problem=problem)


@functools.partial(attend.defjvp, symbolic_zeros=True)
def attend_jvp(problem, x, tx):
    tx = Operands(*[None if is_zero(t) else t for t in tx[:DIFFERENTIABLE]])
    if all_none(tx):
        y = forward(Operands(*x), problem=problem)
        return y, tuple(map(jnp.zeros_like, y))
    return forward_dual(Operands(*x), tx, problem=problem)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def attend_scaled(problem: Problem, scale: Any, *x: Any) -> tuple[Any, Any]:
    """`attend` of queries times a traced scale.  The products are rounded.  In the gradient along the scale most terms cancel,
    but dQ's rounding errors would not.  So it is the product of the cotangents with the tangent along the scale, q̇ = q."""
    return attend(problem, times(x[0], scale), *x[1:])


@functools.partial(attend_scaled.defjvp, symbolic_zeros=True)
def attend_scaled_jvp(problem, arguments, tangents):
    (scale, query, *x), (t_scale, *tx) = arguments, tangents
    tx = Operands(*[None if is_zero(t) else t for t in tx[:DIFFERENTIABLE]])
    x, along_scale = Operands(times(query, scale), *x), Operands(query, None, None)
    if not all_none(tx):
        tx = tx._replace(query=None if tx.query is None else times(tx.query, scale))
        y, ty = forward_dual(x, tx, problem=problem)
        unit = None if is_zero(t_scale) else tangent(x, y, along_scale, problem=problem)
    elif is_zero(t_scale):
        y, unit = forward(x, problem=problem), None
        ty = tuple(map(jnp.zeros_like, y))
    else:
        y, unit = forward_dual(x, along_scale, problem=problem)
        ty = tuple(map(jnp.zeros_like, y))
    if unit is not None:
        ty = tuple((t.astype(u.dtype) + times(u, t_scale)).astype(t.dtype) for t, u in zip(ty, unit, strict=True))
    return y, ty


def times(a: jax.Array, scale: jax.Array) -> jax.Array:
    dtype = np.promote_types(a.dtype, jnp.float32)
    return (a.astype(dtype) * jnp.asarray(scale).astype(dtype)).astype(a.dtype)
