"""Attention and its derivatives in PyTorch alone, a block of queries at a time: memory is linear in the lengths.

Everywhere in this package, None being an absent mask, or a tangent or cotangent that is zero,

    x = (q, k, v, mask)    y = (o, ℓ)    tx, ty = (ȯ, μ) are their tangents, cy, cty the cotangents of y and ty
    q, o [B, N, T, D]    k, v [B, K, S, D]    ℓ, μ [B, N, T]    mask [1|B, 1|N, 1|T, 1|S], boolean or added to scores

The formulas stand in `jax_flash_jvp/reference.py`.  All is computed in float32, or float64 for float64, and every
result from x, tx, cy and cty alone, so that PyTorch can differentiate it.
"""

from functools import partial

import torch

BLOCK = 2**22  # scores in a block, at most, unless that were fewer than 16 queries


def run(name, problem, x, tx=(None,) * 4, cy=(None,) * 2, cty=(None,) * 2, y=None, ty=None, want=()):
    """The results of an operator, or more than these."""
    if name.startswith("backward"):
        return backward_dual(x, tx, cy, cty, problem, [*want, *[False] * (8 - len(want))])
    return forward_dual(x, tx, problem)[2 if name == "tangent" else 0 :]


def forward_dual(x, tx, problem):
    """(o, ℓ, ȯ, μ)"""
    return _sweep(_forward_dual, problem, (*x, *tx), (True,) * 4, (x[0], None) * 2)


def backward_dual(x, tx, cy, cty, problem, want):
    """The wanted gradients of x, then of tx; the others None."""
    inputs = (*x, *tx, *cy, *cty)
    return _sweep(partial(_backward_dual, want), problem, inputs, _has_rows(inputs)[:8], (*x, *x))


def backward_dual_vjp(inputs, cotangents, problem, want, moving):
    """The gradients of the moving `inputs` of `backward_dual`."""
    f = partial(_vjp, partial(_backward_dual, want), moving)
    return _sweep(f, problem, (*inputs, *cotangents), _has_rows(inputs), inputs)


# ------------------------------------------------------------------------------------------------ blocks of queries


def _has_rows(inputs):
    """Which of x, tx, cy, cty, and of results like x and tx, have a row for each query."""
    x = (True, False, False, inputs[3] is not None and inputs[3].shape[2] != 1)
    return (*x, *x, True, True, True, True, *x, *x)[: max(8, len(inputs))]


def _sweep(f, problem, inputs, has_rows, likes):
    """Apply f(problem, first query, *inputs) to one block of queries after the other.  Results that have a row for each
    query are put together, the others summed; then they get the dtypes of `likes`."""
    q, k = inputs[:2]
    dtype = torch.promote_types(q.dtype, torch.float32)
    wide = [a if a is None or a.dtype == torch.bool else a.to(dtype) for a in inputs]
    size = max(16, BLOCK // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    results = [[] for _ in likes]
    for first in range(0, max(1, q.shape[2]), size):
        cut = zip(wide, _has_rows(inputs), strict=True)
        block = [a[:, :, first : first + size] if r and a is not None else a for a, r in cut]
        for result, value, r in zip(results, f(problem, first, *block), has_rows, strict=True):
            result[:] = [*result, value] if r or not result or value is None else [result[0] + value]
    joined = [None if r[0] is None else torch.cat(r, 2) if len(r) > 1 else r[0] for r in results]
    return [a if a is None or like is None else a.to(like.dtype) for a, like in zip(joined, likes, strict=True)]


def _scores(problem, first, q, k, mask):
    s = problem.scale * _outer(q, k)
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask
    if problem.is_causal:
        i, j = (torch.arange(n, device=s.device) for n in s.shape[-2:])
        s = s.masked_fill(first + i[:, None] < j, -torch.inf)
    return s


def _forward_dual(problem, first, *inputs):
    return _probabilities(problem, first, *inputs)[2:]


def _probabilities(problem, first, q, k, v, mask, t_q, t_k, t_v, t_mask):
    """P, Ṡ - μ, o, ℓ, ȯ, μ.  In a row that sees no key, P is zero and ℓ = -∞."""
    s = _scores(problem, first, q, k, mask)
    maximum = s.detach().amax(-1, True) if s.shape[-1] else s.new_zeros((*s.shape[:-1], 1))
    maximum = maximum.masked_fill(maximum == -torch.inf, 0)  # a constant to differentiation: no result depends on it
    p = (s - maximum).exp()
    total = p.sum(-1, keepdim=True)
    hidden = total == 0
    total = total.masked_fill(hidden, 1)
    p, lse = p / total, (maximum + total.log()).masked_fill(hidden, -torch.inf).squeeze(-1)
    o = _onto_rows(p, v)
    t_s = _add(_times(problem.scale, _add(_outer(t_q, k), _outer(q, t_k))), t_mask)
    mu = torch.zeros_like(o[..., :1]) if t_s is None else (p * t_s).sum(-1, keepdim=True)
    w = None if t_s is None else t_s - mu
    t_o = _add(_onto_rows(_times(p, w), v), _onto_rows(p, t_v))
    return p, w, o, lse, torch.zeros_like(o) if t_o is None else t_o, mu.squeeze(-1)


def _backward_dual(want, problem, first, q, k, v, mask, t_q, t_k, t_v, t_mask, d_o, d_lse, d_to, d_mu):
    p, w, o, _, t_o, _ = _probabilities(problem, first, q, k, v, mask, t_q, t_k, t_v, t_mask)
    delta = _add(_row_sum(d_to, o), None if d_mu is None else -d_mu[..., None])
    t_delta = _add(_row_sum(d_o, o), _row_sum(d_to, t_o), None if d_lse is None else -d_lse[..., None])
    hv = _add(_outer(d_to, v), _times(-1, delta))
    d_ts = _times(p, hv)
    d_s = _times(p, _add(_times(hv, w), _outer(d_o, v), _outer(d_to, t_v), _times(-1, t_delta)))
    gradients = (
        lambda: _times(problem.scale, _add(_onto_rows(d_s, k), _onto_rows(d_ts, t_k))),
        lambda: _times(problem.scale, _add(_onto_columns(d_s, q, k), _onto_columns(d_ts, t_q, k))),
        lambda: _add(_onto_columns(p, d_o, v), _onto_columns(_times(p, w), d_to, v)),
        lambda: d_s if d_s is None else d_s.sum_to_size(*mask.shape),
        lambda: _times(problem.scale, _onto_rows(d_ts, k)),
        lambda: _times(problem.scale, _onto_columns(d_ts, q, k)),
        lambda: _onto_columns(p, d_to, v),
        lambda: d_ts if d_ts is None else d_ts.sum_to_size(*mask.shape),
    )
    return [gradient() if w else None for gradient, w in zip(gradients, want, strict=True)]


def _vjp(f, moving, problem, first, *inputs):
    """The gradients of the moving inputs of f, for the cotangents that follow its inputs."""
    inputs, cotangents = inputs[: len(moving)], inputs[len(moving) :]

    def along(*moved):
        moved = iter(moved)
        results = f(problem, first, *(next(moved) if m else a for a, m in zip(inputs, moving, strict=True)))
        return [r for r, c in zip(results, cotangents, strict=True) if r is not None and c is not None]

    _, pull = torch.func.vjp(along, *(a for a, m in zip(inputs, moving, strict=True) if m))
    gradients = iter(pull([c for c in cotangents if c is not None]))
    return [next(gradients) if m else None for m in moving]


# ------------------------------------------------------------------------------------------------ products


def _outer(a, b):  # [B, N, T, D], [B, K, S, D] -> [B, N, T, S]: N // K heads of queries to a head of keys
    return None if a is None or b is None else (_grouped(a, b) @ b.mT).reshape(*a.shape[:3], b.shape[2])


def _onto_rows(p, b):  # [B, N, T, S], [B, K, S, D] -> [B, N, T, D]
    return None if p is None or b is None else (_grouped(p, b) @ b).reshape(*p.shape[:3], b.shape[3])


def _onto_columns(p, a, k):  # [B, N, T, S], [B, N, T, D] -> [B, K, S, D]
    return None if p is None or a is None else _grouped(p, k).mT @ _grouped(a, k)


def _grouped(a, k):
    return a.reshape(*k.shape[:2], a.shape[1] // k.shape[1] * a.shape[2], a.shape[3])


def _times(a, b):
    return None if a is None or b is None else a * b


def _row_sum(a, b):
    return None if a is None or b is None else (a * b).sum(-1, keepdim=True)


def _add(*terms):
    terms = [t for t in terms if t is not None]
    return sum(terms[1:], terms[0]) if terms else None
