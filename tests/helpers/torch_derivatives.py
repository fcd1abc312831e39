"""Derivatives of attention in PyTorch, of every order and mode: functions of it, and what they launch."""

import torch
from torch.autograd import forward_ad
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

from torch_oracle import naive

torch.manual_seed(0)
q, k, v, tq, tk, tv = (torch.randn(2, 3, 5, 4, dtype=torch.float64) for _ in range(6))
x, tx = (q, k, v), (tq, tk, tv)
bias, t_bias = torch.randn(3, 1, 5, dtype=torch.float64), torch.randn(3, 1, 5, dtype=torch.float64)
square_bias = torch.randn(3, 5, 5, dtype=torch.float64)


def of_query(s):
    return lambda q: s(q, k, v)


def of_value(s):
    return lambda v: s(q, k, v)


def with_bias(s):
    return lambda q, b: s(q, k, v, attn_mask=b)


def square(f):
    return lambda *x: (f(*x) ** 2).sum()


def waves(f):
    return lambda *x: f(*x).sin().sum()


def curvature(f):
    return grad(square(grad(waves(f))))


def slope(f):
    """Of the square of the tangent: what a gradient through a JVP is taken of."""
    return lambda q: (jvp(f, (q,), (tq,))[1] ** 2).sum()


def lead(*arrays):
    return tuple(a.unsqueeze(1) for a in arrays)


def level(s):
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(s(forward_ad.make_dual(q, tq), k, forward_ad.make_dual(v, tv))))


def leaves_of_backward(s):
    arrays = [a.clone().requires_grad_() for a in x]
    square(s)(*arrays).backward()
    return [a.grad for a in arrays]


def double_backward(s):
    arrays = [a.clone().requires_grad_() for a in x]
    first = torch.autograd.grad(square(s)(*arrays), arrays, create_graph=True)
    return torch.autograd.grad(sum((a * t).sum() for a, t in zip(first, tx, strict=True)), arrays)


def forward_over_reverse(s, create_graph):
    arrays = [a.clone().requires_grad_() for a in x]
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(a, t) for a, t in zip(arrays, tx, strict=True)]
        got = torch.autograd.grad(square(s)(*duals), duals, create_graph=create_graph)
        return [forward_ad.unpack_dual(a).tangent for a in got]


def batched_gradients(s):
    a = q.clone().requires_grad_()
    return torch.autograd.grad(of_query(s)(a), a, torch.stack([tq, tk]), is_grads_batched=True)


# name: (function of attention, launches); F forward, D forward_dual, T tangent, B backward, S backward_dual
DERIVATIVES = {
    "value": (lambda s: s(*x), "F"),
    "backward": (leaves_of_backward, "FB"),
    "grad": (lambda s: grad(square(s), (0, 1, 2))(*x), "FB"),
    "vjp": (lambda s: vjp(s, *x)[1](tq), "FB"),
    "jvp": (lambda s: jvp(s, x, tx), "D"),
    "jvp-of-query": (lambda s: jvp(of_query(s), (q,), (tq,)), "D"),
    "jvp-of-value": (lambda s: jvp(lambda v: s(q, k, v), (v,), (tv,)), "D"),
    "dual-level": (level, "D"),
    "linearize": (
        lambda s: jvp(s, x, tx)[1] if s is naive else linearize(s, *x)[1](*tx),
        "FDD",
    ),  # runs it twice, then once
    "jvp-stopped": (
        lambda s: grad(lambda q: (of_query(s)(q) * jvp(of_query(s), (q,), (tq,))[1].detach()).sum())(q),
        "FDB",
    ),
    # second order
    "jvp-of-grad": (lambda s: jvp(grad(square(s), (0, 1, 2)), x, tx), "DS"),
    "grad-of-jvp": (lambda s: grad(lambda *x: square(lambda *x: jvp(s, x, tx)[1])(*x), (0, 1, 2))(*x), "DS"),
    "grad-of-grad": (lambda s: grad(lambda q: (grad(square(of_query(s)))(q) * tq).sum())(q), "FTBBS"),
    "jvp-around-vjp": (
        lambda s: jvp(lambda q: vjp(of_query(s), q)[0], (q,), (tq,)),
        "D",
    ),  # an inner level without tangents
    "double-backward": (double_backward, "FTBBS"),
    "forward-over-reverse": (lambda s: forward_over_reverse(s, False), "DS"),
    "forward-over-reverse-graph": (lambda s: forward_over_reverse(s, True), "DS"),
    "hessian": (lambda s: hessian(square(of_query(s)))(q), "FTS"),
    # many at once
    "jacfwd": (lambda s: jacfwd(of_query(s))(q), "FT"),
    "jacrev": (lambda s: jacrev(of_query(s))(q), "FB"),
    "is-grads-batched": (batched_gradients, "FBB"),
    "vmap": (lambda s: vmap(s)(*lead(*x)), "F"),
    "vmap-in-dims": (lambda s: vmap(s, (3, None, 0), 1)(q.movedim(0, 2)[None], k[:1], v[:, None]), "F"),
    "vmap-of-jvp": (lambda s: vmap(lambda *a: jvp(s, a[:3], a[3:]))(*lead(*x, *tx)), "D"),
    "vmap-of-tangents": (lambda s: vmap(lambda t: jvp(of_query(s), (q,), (t,))[1])(torch.stack([tq, tk])), "FT"),
    "jvp-of-vmap": (lambda s: jvp(vmap(s), lead(*x), lead(*tx)), "D"),
    "vmap-of-jvp-of-grad": (lambda s: vmap(lambda *a: jvp(grad(square(s)), a[:3], a[3:]))(*lead(*x, *tx)), "DS"),
    "vmap-of-grad-of-grad": (
        lambda s: vmap(grad(lambda q: (grad(square(of_query(s)))(q) * tq).sum()))(torch.stack([q, tk])),
        "FTBBS",
    ),
    "jvp-of-functionalize": (lambda s: jvp(functionalize(s), x, tx), None),
    # a bias
    "bias-jvp": (lambda s: jvp(with_bias(s), (q, bias), (tq, t_bias)), "D"),
    "bias-jvp-alone": (lambda s: jvp(lambda b: with_bias(s)(q, b), (bias,), (t_bias,)), "D"),
    "bias-jvp-of-grad": (lambda s: jvp(grad(square(with_bias(s)), (0, 1)), (q, bias), (tq, t_bias)), "DS"),
    "bias-vmap-of-grad": (
        lambda s: vmap(grad(square(lambda b, q: s(q[None], k[:1], v[:1], attn_mask=b))), (None, 0))(bias, q),
        "FB",
    ),
    "bias-vmap": (lambda s: vmap(lambda q, k, v: s(q, k, v, attn_mask=bias))(*lead(*x)), "F"),
    "bias-vmap-of-tangents": (
        lambda s: vmap(lambda t: jvp(lambda b: with_bias(s)(q, b), (bias,), (t,))[1])(torch.stack([bias, t_bias])),
        "FT",
    ),
    "bias-transposed-jvp-of-grad": (
        lambda s: jvp(grad(square(lambda b: s(q, k, v, attn_mask=b.mT))), (square_bias,), (square_bias.mT.sin(),)),
        "DS",
    ),
    "bias-jacrev": (lambda s: jacrev(lambda b: with_bias(s)(q, b)[0, 0, 0])(bias), "FB"),
    "bias-hessian": (lambda s: hessian(lambda b: square(with_bias(s))(q, b))(bias), "FTS"),
    # third order and more: partly the reference, which is not counted
    "jvp-of-jvp": (lambda s: jvp(lambda *x: jvp(s, x, tx)[1], x, (tv, tq, tk)), ""),
    "jvp-of-jvp-of-query": (lambda s: jvp(lambda q: jvp(of_query(s), (q,), (tq,))[1], (q,), (tk,)), ""),
    "grad-of-grad-of-grad": (
        lambda s: grad(lambda q: (grad(lambda q: (grad(square(of_query(s)))(q) * tq).sum())(q) * tk).sum())(q),
        None,
    ),
    "jvp-of-grad-of-jvp": (lambda s: jvp(grad(slope(of_query(s))), (q,), (tk,)), ""),
    "grad-of-jvp-of-jvp": (
        lambda s: grad(square(lambda q: jvp(lambda q: jvp(of_query(s), (q,), (tq,))[1], (q,), (tk,))[1]))(q),
        "",
    ),
    "vmap-of-jvp-of-jvp": (
        lambda s: vmap(lambda t: jvp(lambda q: jvp(of_query(s), (q,), (t,))[1], (q,), (tk,))[1])(torch.stack([tq, tv])),
        "",
    ),
    # attention is linear in the values, so that some of what is wanted of its derivatives is zero
    "grad-of-grad-of-grad-of-value": (lambda s: grad(waves(curvature(of_value(s))))(v), None),
    "jvp-of-grad-of-grad-of-value": (lambda s: jvp(curvature(of_value(s)), (v,), (tv,)), None),
    "grad-of-grad-of-jvp-of-value": (lambda s: curvature(lambda v: jvp(of_value(s), (v,), (v,))[1])(v), None),
    "jvp-of-query-of-grad-of-grad-of-value": (
        lambda s: jvp(lambda q: curvature(lambda v: s(q, k, v))(v), (q,), (tq,)),
        None,
    ),
    "fourth-order": (
        lambda s: jvp(grad(lambda q: (grad(slope(of_query(s)))(q) * tv).sum()), (q,), (tk,)),
        "",
    ),
}
