"""The derivatives of the operators, at the dispatcher's Autograd key.

The dispatcher calls that key once per level of differentiation (torch.func.grad and torch.func.jvp, and the base level
where requires_grad and forward_ad.dual_level live), the innermost first, and so does AOTAutograd when torch.compile
traces.  Each call sees the tangents and the requires_grad of its own level alone; what it then calls below is the next
level's problem.  So a rule never reasons about nesting, and Dynamo, to whom an operator is a black box, cannot drop it
(pytorch#192985).

    derivative of    forward mode                                  reverse mode
    forward          forward_dual                                  backward
    forward_dual     tangent if x is still, else the reference     backward (without cty) or backward_dual
    tangent          tangent if x is still, else the reference     backward (x fixed) or backward_dual
    backward         backward if x is still, else backward_dual    tangent, then backward_dual
    backward_dual    the reference                                 the reference

One convention holds throughout: y and ty are functions of x and tx, and get no cotangents.
"""

import logging
from functools import partial

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torch_bridge import compute, private, reference
from torch_bridge.operators import filled, library, ops, outside_dynamo
from torch_bridge.options import case_of
from torch_bridge.private import BelowAutograd, make_dual, unpack_dual
from torch_bridge.signatures import split

logger = logging.getLogger(__name__)
NONE = (None,) * 4
_NEITHER = None, None
# the keys that a thread includes while no mode, level or tracer is active, and while levels of torch.func alone are
if private.SHORT_CUTS:
    _AUTOGRAD = private.dispatch_key("AutogradCUDA")
    _EAGER = private.keys("BackendSelect", "ADInplaceOrView")
    _IN_LEVELS = _EAGER + private.keys("FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode")
INSIDE = (
    "a second derivative of attention was taken in reverse mode while the forward_ad.dual_level of its inputs is open: "
    "close the level before you call backward, or use torch.func.jvp and torch.func.grad"
)


VECTORIZED = (
    "attention of tensors that require a gradient, inside a forward-mode level of torch.autograd.functional with "
    "vectorize=True, where PyTorch loses what was saved for it: use torch.func.hessian, torch.func.jacfwd or vectorize=False, "
    "or torch.no_grad() if no gradient is wanted"
)


def _halves(both):
    """What is of y, or of x, or a gradient, and what is of its tangents."""
    n = len(both) // 2
    return both[:n], both[n:]


def _some(tensors) -> bool:
    return any(t is not None for t in tensors)


def _unpack(tensors):
    """Primals and tangents.  Level 0 by name: compiled graphs open it in C++, where forward_ad would not see it."""
    pairs = [_NEITHER if t is None else unpack_dual(t, level=0) for t in tensors]
    return tuple([p for p, _ in pairs]), tuple([t for _, t in pairs])


def _pack(primals, tangents, inputs=NONE):
    """Dual tensors.  `inputs`: the duals behind them, while whose level is open they cannot be differentiated."""
    n, both = len(primals), (*primals, *tangents)
    if _some(inputs):
        # other tensors: of one that goes in and out, a Function would cut the history at the levels below
        with BelowAutograd():
            outputs = [t if t is None else t.view_as(t) for t in both]
        both = _record(_refuse, outputs, both, inputs)
    pairs = zip(both[:n], both[n:], strict=True)
    return tuple(p if t is None or p.dim() == 1 else make_dual(p, t, level=0) for p, t in pairs)


def _alone(args) -> bool:
    """Whether each tensor is no more than it seems."""
    for a in args:
        if type(a) in _PLAIN:
            if a.is_neg() or a._is_zerotensor() or private.is_functorch_wrapped_tensor(a):
                return False
        elif isinstance(a, Tensor):
            return False
    return True


_PLAIN = {Tensor, torch.nn.Parameter}


def _from_above(name, *args):
    """The operator, None for a gradient that is not wanted.  On a GPU without the dispatcher, unless somebody may be listening
    there: a mode, a tracer, a level of torch.func, a profiler, or a tensor that is more than one."""
    if not private.SHORT_CUTS or not compute.on_nvidia(args[0]):
        return getattr(ops, name)(*args)
    if private.included().raw_repr() == _EAGER and _unheard() and _alone(args):
        return RULES[name](*args, below=_straight_below)
    return getattr(ops, name)(*args)


def _unheard() -> bool:
    return not private.excluded(_AUTOGRAD) and not private.profiled()


def _from_jvp(args, with_lse):
    """forward inside a torch.func.jvp that is the only level, as that level would have it computed, but by one way through the
    dispatcher in place of four.  None where it is not so, or somebody may be listening."""
    top = private.levels()
    if top.key() != private.TransformType.Jvp or top.level() != 1 or not _unheard():
        return None
    if not (private.is_fwd_grad_enabled() and private.CJvpInterpreterPtr(top).prevFwdGradMode()):
        return None
    q, k, v, mask, selection, *static = args
    x = (q, k, v, mask)
    tx = _unpack(x)[1]
    # primals as they lie beneath, not as unpacked: autograd has one node less for each
    beneath = lambda tensors: [private.get_unwrapped(a) if _wrapped(a) else a for a in tensors]
    x, tx, (selection,) = beneath(x), beneath(tx), beneath([selection])
    if not _some(tx) or not compute.on_nvidia(x[0]) or not _alone((*x, *tx, selection)):
        return None
    level = private.pop_dynamic_layer_stack()
    try:
        # beneath there are no tangents: PyTorch has one level of forward_ad, which this jvp took
        results = _dual(x, tx, (selection, *static), below=_straight_below)
    finally:
        private.push_dynamic_layer_stack(level)
    o, lse, t_o, mu = results
    dual = lambda a, t: make_dual(private.wrap_for_grad(a, 1), private.wrap_for_grad(t, 1), level=0)
    return dual(o, t_o), dual(lse, mu) if with_lse else None


def _wrapped(a) -> bool:
    return a is not None and private.maybe_get_level(a) == 1


@outside_dynamo
def forward(args, with_lse: bool):
    """(o, ℓ) of an eager call; ℓ may be None unless it is asked for."""
    if private.SHORT_CUT_OF_JVP and private.included().raw_repr() == _IN_LEVELS:
        results = _from_jvp(args, with_lse)
        if results is not None:
            return results
    return _from_above("forward", *args)


def _below(name, *args):
    """The operator beneath this key, None for a gradient that is not wanted.  On a GPU without the dispatcher, which takes as
    long as a launch, unless somebody may be listening there: a mode, a level of torch.func, the older vmap, or a tensor that
    is more than one.  A profiler then sees the operator above and the kernel."""
    if private.SHORT_CUTS and compute.on_nvidia(args[0]) and _unlayered() and _alone(args):
        return _straight_below(name, *args)
    with BelowAutograd():
        return getattr(ops, name)(*args)


def _unlayered() -> bool:
    return private.dispatch_modes() == 0 and private.levels() is None and not private.in_mode(private.VMAP_MODE)


def _straight_below(name, *args):
    with BelowAutograd():
        return compute.compute(name, *args)


class _Record(private.SingleLevelFunction):
    """Gives computed `outputs` the reverse rule pullback(inputs, outputs, kept, cotangents, wanted), at this level only: a
    Function would visit every level."""

    @staticmethod
    def forward(ctx, pullback, outputs, kept, *inputs):
        ctx.set_materialize_grads(False)  # a zero cotangent of a tangent would cost the dual backward
        ctx.pullback, ctx.counts = pullback, (len(inputs), len(inputs) + len(outputs))
        ctx.save_for_backward(*inputs, *outputs, *kept)
        return tuple(outputs)

    @staticmethod
    @outside_dynamo
    def backward(ctx, *cotangents):
        (n, m), wanted, saved = ctx.counts, ctx.needs_input_grad[3:], ctx.saved_tensors
        if not _some(cotangents):
            return (None,) * (3 + n)
        gradients = ctx.pullback(saved[:n], saved[n:m], saved[m:], cotangents, wanted)
        return None, None, None, *(g if w else None for g, w in zip(gradients, wanted, strict=True))


def _record(pullback, outputs, inputs, kept=()):
    if not torch.is_grad_enabled() or not any(t is not None and t.requires_grad for t in inputs):
        return outputs
    if private.in_mode(private.VMAP_MODE) and any(
        t is not None and p.requires_grad for p, t in zip(*_unpack(kept), strict=True)
    ):
        raise RuntimeError(VECTORIZED)
    before = private.single_level()
    private.allow_single_level(True)
    try:
        return _Record.apply(pullback, filled(outputs, inputs[0]), kept, *inputs)
    finally:
        private.allow_single_level(before)


def _refuse(inputs, outputs, kept, cotangents, wanted):
    if _some(_unpack(kept)[1]):
        raise RuntimeError(INSIDE)
    return cotangents


def _differentiable(inputs, wanted):
    return [w and a is not None and a.is_floating_point() for a, w in zip(inputs, wanted, strict=True)]


def _forward(*args, below=_below):
    q, k, v, mask, selection, is_causal, scale, options, *_ = args  # `split` takes longer, in every eager call
    x, static = (q, k, v, mask), (selection, is_causal, scale, options)
    # past the dispatcher no compiled graph calls, whose levels forward_ad would not see; to unpack takes as long as to allocate
    px, tx = (x, NONE) if below is _straight_below and forward_ad._current_level < 0 else _unpack(x)
    if _some(tx):
        return _pack(*_halves(_dual(px, tx, static, kept=x)))

    def pullback(x, y, kept, cy, wanted):
        return _from_above("backward", *x, *y, *cy, *static, _differentiable(x, wanted))

    return _record(pullback, below("forward", *args), x)


def _reverse_of_dual(backward_dual, x, y, tx, ty, cy, cty, static, want):
    """The gradients of x and tx for the cotangents cy of y and cty of ty.  The operator is the tangent of the backward, and
    reverse mode takes it too, since mixed second derivatives commute: the gradients for cty are those of tx, and their
    tangents along (tx, ty, cy) those of x."""
    of_x, of_tx = _halves(want)
    dtx, dx = _halves(backward_dual(*x, *y, *cty, *tx, *ty, *cy, *static, [*of_tx, *of_x]))
    return *dx, *dtx


def _dual(x, tx, static, kept=(), below=_below):
    """forward_dual with its reverse rule.  `kept`: x with the tangents of a level that may still be open when the
    backward runs; then the gradients have tangents too."""

    def pullback(inputs, outputs, kept, cotangents, wanted):
        x, tx, _ = split("forward_dual", inputs)
        y, ty = _halves(outputs)
        cy, cty = _halves(cotangents)
        want = _differentiable(inputs, wanted)
        if _some(_unpack(kept)[1]):
            x, y = kept, _pack(y, ty)
        if _some(cty):
            return _reverse_of_dual(partial(_from_above, "backward_dual"), x, y, tx, ty, cy, cty, static, want)
        return *_from_above("backward", *x, *y, *cy, *static, _halves(want)[0]), *NONE

    return _record(pullback, below("forward_dual", *x, *tx, *static), (*x, *tx), kept)


def _say_reference(name):
    logger.debug("attention %s: the reference alone computes this derivative of it", name)


def _forward_dual(*args, below=_below):
    x, tx, static = split("forward_dual", args)
    (px, dx), (ptx, dtx) = _unpack(x), _unpack(tx)
    if _some(dx):
        _say_reference("forward_dual")
        return reference.forward_dual(x, tx, case_of(x[0], x[1], *static))
    if _some(dtx):
        y, ty = _halves(_dual(px, ptx, static))
        return *y, *_pack(ty, ops.tangent(*px, *y, *dtx, *static), tx)
    return _dual(x, tx, static, below=below)


def _tangent(*args, below=_below):
    x, y, tx, static = split("tangent", args)
    (px, dx), (ptx, dtx), (py, _) = _unpack(x), _unpack(tx), _unpack(y)
    if _some(dx):
        _say_reference("tangent")
        return _halves(reference.forward_dual(x, tx, case_of(x[0], x[1], *static)))[1]
    if _some(dtx):
        return _pack(ops.tangent(*px, *py, *ptx, *static), ops.tangent(*px, *py, *dtx, *static), tx)

    def pullback(inputs, ty, kept, cty, wanted):
        x, y, tx, _ = split("tangent", inputs)
        wanted_of_x, _, wanted_of_tx, _ = split("tangent", wanted)
        want, want_of_tx = _differentiable(x, wanted_of_x), _differentiable(tx, wanted_of_tx)
        if any(want):
            both = [*want, *want_of_tx]
            of_x, of_tx = _halves(_reverse_of_dual(ops.backward_dual, x, y, tx, ty, _NEITHER, cty, static, both))
        else:
            of_x, of_tx = NONE, ops.backward(*x, *y, *cty, *static, want_of_tx)
        return *of_x, *_NEITHER, *of_tx

    return _record(pullback, below("tangent", *args), (*x, *y, *tx))


def _backward(*args, below=_below):
    x, y, cy, (*static, want) = split("backward", args)
    (px, tx), (pcy, tcy) = _unpack(x), _unpack(cy)
    py, ty = _unpack(y) if _some(tx) or _some(tcy) else (y, ())
    if _some(tx):
        ty = ty if all(t is not None for t in ty) else ops.tangent(*px, *py, *tx, *static)
        dx, tdx = _halves(ops.backward_dual(*px, *py, *pcy, *tx, *ty, *tcy, *static, [*want, *want]))
        return _pack(dx, tdx, (*x, *cy))
    if _some(tcy):
        return _pack(ops.backward(*px, *py, *pcy, *static, want), ops.backward(*px, *py, *tcy, *static, want), cy)

    def pullback(inputs, outputs, kept, c, wanted):
        x, y, cy, _ = split("backward", inputs)
        tx = tuple(t if w else None for t, w in zip(c, want, strict=True))
        ty, tdx = ops.tangent(*x, *y, *tx, *static), NONE
        wanted_of_x, _, _, _ = split("backward", wanted)
        if any(wanted_of_x):  # the tangent of the gradient along c, as second derivatives are symmetric
            tangents = [*[False] * len(x), *_differentiable(x, wanted_of_x)]
            _, tdx = _halves(ops.backward_dual(*x, *y, *cy, *tx, *ty, *_NEITHER, *static, tangents))
        return *tdx, *_NEITHER, *ty

    return _record(pullback, below("backward", *args), (*x, *y, *cy))


def _backward_dual(*args, below=_below):
    """The reference, with y and ty computed afresh."""
    x, _, cy, tx, _, tcy, (*static, want) = split("backward_dual", args)
    inputs, (q, k, _, _) = (*x, *tx, *cy, *tcy), x
    case = partial(case_of, q, k, *static)
    if _some(_unpack(inputs)[1]):
        _say_reference("backward_dual")
        results = reference.backward_dual(x, tx, cy, tcy, case(), want)
        absent = lambda like, wanted: torch.zeros_like(like) if wanted else q.new_empty(0)
        of_each = zip(results, (*x, *x), want, strict=True)
        return tuple(absent(like, wanted) if a is None else a for a, like, wanted in of_each)

    def pullback(inputs, outputs, kept, cotangents, wanted):
        cotangents = [c if w else None for c, w in zip(cotangents, want, strict=True)]
        _say_reference("backward_dual")
        return reference.backward_dual_vjp(inputs, cotangents, case(), want, _differentiable(inputs, wanted))

    return _record(pullback, below("backward_dual", *args), inputs)


# `below` is the way down for the tensors that a rule is given; tangents that it finds in them go by `_below`
RULES = {
    rule.__name__.removeprefix("_"): rule for rule in (_forward, _forward_dual, _tangent, _backward, _backward_dual)
}
for _name, _rule in RULES.items():
    library.impl(_name, outside_dynamo(lambda *args, rule=_rule: filled(rule(*args), args[0])), "Autograd")
