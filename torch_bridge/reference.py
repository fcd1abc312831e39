"""Attention and its derivatives in PyTorch alone, a block of queries at a time: memory is linear in the lengths.

Everywhere in this package, None being an absent mask, or a tangent or cotangent that is zero,

    x = (q, k, v, mask)    y = (o, ℓ)    cy the cotangents of y    tx, ty = (ȯ, μ), tcy are their tangents
    q, o [B, N, T, D]    k, v [B, K, S, D]    ℓ, μ [B, N, T]    mask [1|B, 1|N, 1|T, 1|S], boolean or added to scores

A `Case` has what else a call depends on, and is not differentiated.  The formulas stand in `jax_flash_jvp/reference.py`.
All is computed in float32, or float64 for float64, and every result from x, tx, cy and tcy alone, so that PyTorch can
differentiate it.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from jax_flash_jvp.problem import HIDES, Operands, Problem
from torch_bridge.block_mask import booleans, pages_of
from torch_bridge.sight import blocks

# Scores in a block, at most, unless that were fewer than 16 queries.  CPUs keep so many in their caches.
BLOCK, ON_CPU = 2**22, 2**20
MIXED = 2**16  # numbers that CPUs draw at a time


class Case(NamedTuple):
    problem: Problem
    selection: Operands = Operands(None, None, None)  # lengths, segments and the seed


def run(name, case, x, tx=(None,) * 4, y=None, ty=None, cy=(None,) * 2, tcy=(None,) * 2, want=()):
    """The results of an operator, or more than these."""
    if name.startswith("backward"):
        want = [*want, *[False] * (len(GRADIENTS) - len(want))]
        if case.problem.partial:
            return backward_dual_of_part(x, tx, cy, tcy, y, ty or (None, None), case, want)
        return backward_dual(x, tx, cy, tcy, case, want)
    o, lse, t_o, mu = forward_dual(x, tx, case)
    return [t_o, mu] if name == "tangent" else [o, lse, t_o, mu]


def forward_dual(x, tx, case):
    """(o, ℓ, ȯ, μ)"""
    like = None if case.problem.partial else x[0]
    return _sweep(_forward_dual, case, (*x, *tx), OUTPUTS, (like, None, like, None))


def backward_dual(x, tx, cy, tcy, case, want):
    """The wanted gradients of x, then their tangents; the others None."""
    return _sweep(partial(_backward_dual, want), case, (*x, *tx, *cy, *tcy), GRADIENTS, (*x, *x))


def backward_dual_of_part(x, tx, cy, tcy, y, ty, case, want):
    """What a part of the keys adds to the gradients, wide, from the y and ty of all keys."""
    inputs = (*x, *tx, *cy, *tcy, *y, *ty)
    return _sweep(partial(_backward_dual, want), case, inputs, GRADIENTS, (None,) * len(GRADIENTS), OF_PART)


def backward_dual_vjp(inputs, cotangents, case, want, moving):
    """The gradients of the moving `inputs` of `backward_dual`."""
    f = partial(_vjp, partial(_backward_dual, want), moving)
    return _sweep(f, case, (*inputs, *cotangents), INPUTS[: len(inputs)], inputs)


# ------------------------------------------------------------------------------------------------ blocks of queries


# of x, tx, cy, tcy, and of cotangents like x and tx: each by what it is like
OF_KEYS, OF_SCORES = ("k", "v"), ("mask",)
GRADIENTS = ("q", "k", "v", "mask") * 2
OUTPUTS, COTANGENTS = ("o", "lse", "t_o", "mu"), ("d_o", "d_lse", "t_d_o", "t_d_lse")
INPUTS = (*GRADIENTS, *COTANGENTS, *GRADIENTS)
OF_PART = (*GRADIENTS, *COTANGENTS, *OUTPUTS)


def _has_rows(case, name, mask):
    """Has it a row for each query?"""
    if name in OF_SCORES:
        return mask is not None and mask.shape[2] != 1 and case.problem.mask_block is None
    return name not in OF_KEYS


def _keys_axis(case, name, mask):
    """The axis along which it has an element for each key, or None."""
    if name in OF_SCORES and case.problem.mask_block is not None:
        return None
    if name in OF_SCORES:
        return 3 if mask is not None and mask.shape[3] != 1 else None
    return 2 if name in OF_KEYS else None


def outside(case, queries, keys):
    """Which queries [1|B, T] see no key, and which keys [1|B, S] no query sees, as far as lengths and ranges tell; None: none."""
    x = case.selection
    past = [
        None if lengths is None else torch.arange(n, device=lengths.device) >= lengths[:, None]
        for n, lengths in ((queries, x.query_lengths), (keys, x.key_lengths))
    ]
    if x.key_ranges is None:
        return past
    starts, ends = x.key_ranges.long().clamp(0, keys).unbind(-1)
    some = starts < ends
    steps = starts.new_zeros(starts.shape[0], keys + 1)
    for at, change in ((starts, some.long()), (ends, -some.long())):
        steps.scatter_add_(1, at.flatten(1), change.flatten(1))
    unseen = ~some.any(3).any(1), steps.cumsum(1)[:, :-1] <= 0
    return [b if a is None else a | b for a, b in zip(past, unseen, strict=True)]


def cut(a, beyond):
    """What lies outside, and may be anything, as zeros."""
    if a is None or beyond is None:
        return a
    return a.masked_fill(beyond.view(beyond.shape[0], 1, beyond.shape[1], *[1] * (a.ndim - 3)), 0)


def _sweep(f, case, inputs, names, likes, given=INPUTS):
    """Apply f(case, at, *inputs) to one block of queries after the other, `at` = (first query, queries in all, places of the
    keys, keys in all), and to the keys alone that some of these may see.  Results, of these names, that have a row for each query
    are put together, the others summed; then they get the dtypes of `likes`.  `given`: the names of the inputs."""
    q, k, _, mask, *_ = inputs
    given = given[: len(inputs)]
    queries, keys = q.shape[2], k.shape[2]
    dtype = torch.promote_types(q.dtype, torch.float32)
    of_queries, of_keys = outside(case, queries, keys)
    wide = []
    for name, a in zip(given, inputs, strict=True):
        a = a if a is None or not a.is_floating_point() else a.to(dtype)
        wide.append(a if name in OF_SCORES else cut(a, of_keys if name in OF_KEYS else of_queries))
    results = [[] for _ in likes]
    for of_block in blocks(case, q, k, mask, ON_CPU if q.device.type == "cpu" else BLOCK):
        seen = _Seen(of_block, keys, k.device)
        block = []
        for name, a in zip(given, wide, strict=True):
            rows = a if a is None or not _has_rows(case, name, mask) else a[:, :, of_block.first : of_block.last]
            block.append(rows if rows is None else seen.take(rows, _keys_axis(case, name, mask)))
        values = f(case, (of_block.first, queries, seen.places, keys), *block)
        for result, value, name in zip(results, values, names, strict=True):
            axis = _keys_axis(case, name, mask)
            if value is None or not result or _has_rows(case, name, mask):
                result.append(value if value is None else seen.put(value, axis))
            else:
                result[0] = seen.put(value, axis, result[0])
    joined = [None if r[0] is None else torch.cat(r, 2) if len(r) > 1 else r[0] for r in results]
    return [a if a is None or like is None else a.to(like.dtype) for a, like in zip(joined, likes, strict=True)]


class _Seen:
    """The keys of a block, out of all `keys`, and their `places`."""

    def __init__(self, block, keys, device):
        self.begin, self.end, self.keys = block.begin, block.end, keys
        self.gathered = block.places is not None
        self.places = torch.arange(self.begin, self.end, device=device)
        if self.gathered:
            self.places = torch.from_numpy(block.places)

    def take(self, a, axis):
        if axis is None or len(self.places) == self.keys:
            return a
        return a.index_select(axis, self.places) if self.gathered else a.narrow(axis, self.begin, self.end - self.begin)

    def put(self, a, axis, total=None):
        """Added to a total of all keys, which is changed; None: zeros."""
        if axis is None or len(self.places) == self.keys:
            return a if total is None else total + a
        if total is None:
            total = a.new_zeros((*a.shape[:axis], self.keys, *a.shape[axis + 1 :]))
        if self.gathered:
            return total.index_add_(axis, self.places, a)
        total.narrow(axis, self.begin, self.end - self.begin).add_(a)
        return total


def _scores(case, at, q, k, mask):
    """S, and tanh of what is capped."""
    problem, x, u = case.problem, case.selection, None
    s = problem.scale * _outer(q, k)
    if problem.soft_cap is not None:
        u = torch.tanh(s / problem.soft_cap)
        s = problem.soft_cap * u
    first, queries, j, keys = at
    if mask is not None and problem.mask_block is not None:
        mask = _of_elements(mask, problem.mask_block, at, s.shape[2])
    if mask is not None:
        s = (s if mask.dtype == torch.bool else s + mask).masked_fill(_hides(mask), -torch.inf)
    i = first + torch.arange(s.shape[2], device=s.device)[:, None]
    left, right = problem.reach(queries, keys)
    hidden = [j < i - left] if left is not None else []
    hidden += [j > i + right] if right is not None else []
    for position, lengths in ((i, x.query_lengths), (j, x.key_lengths)):
        hidden += [position >= lengths[:, None, None, None]] if lengths is not None else []
    if x.query_segments is not None:
        query_segments = x.query_segments[:, None, first : first + s.shape[2], None]
        hidden += [query_segments != x.key_segments[:, None, None, j]]
    if x.key_ranges is not None:
        hidden += [~_in_ranges(x.key_ranges[:, :, first : first + s.shape[2]], j, s)]
    for h in hidden:
        s = s.masked_fill(h, -torch.inf)
    return s, u


def _of_elements(mask, block, at, rows):
    """The elements of a mask of blocks for so many queries and these keys."""
    first, queries, j, keys = at
    (b_q, b_k), i = block, first + torch.arange(rows, device=mask.device)[:, None]
    if mask.dtype == torch.bool:
        return mask[:, :, i // b_q, j // b_k]
    table, pages = pages_of(mask, block, (queries, keys))
    numbers = table[:, :, 0, 1:].unflatten(2, (-1, -(-keys // b_k)))[:, :, i // b_q, j // b_k].long()
    b, h = (torch.arange(n, device=mask.device) for n in mask.shape[:2])
    return booleans(pages.contiguous(), block)[b[:, None, None, None], h[:, None, None], numbers, i % b_q, j % b_k]


def _in_ranges(ranges, j, s):
    """[B, N, T, S], of the ranges [B, 1|K|N, T, R, 2] of these queries and of keys j."""
    inside = j.new_zeros((), dtype=torch.bool)
    for start, end in (r.split(1, -1) for r in ranges.unbind(3)):
        inside = inside | ((start <= j) & (j < end))
    heads = inside.shape[1]
    return inside if heads in (1, s.shape[1]) else inside.repeat_interleave(s.shape[1] // heads, 1)


def _hides(mask):
    return ~mask if mask.dtype == torch.bool else mask <= HIDES


def _kept(case, at, q, k):
    """1 / (1 - rate) where dropout keeps a probability, else 0, as in the kernels; None: it keeps all."""
    if case.selection.seed is None:
        return None
    seed, other, *first = (n.int()[:, None, None, None] for n in case.selection.seed.unbind(1))
    heads, i = (torch.arange(n, device=q.device, dtype=torch.int32) for n in q.shape[1:3])
    heads, i, j = first[0] + heads[:, None, None], first[1] + (at[0] + i)[:, None], first[2] + at[2].int()
    rate = (np.float64 if q.dtype == torch.float64 else np.float32)(case.problem.dropout_rate)
    least, keys, others = (
        int(np.float32(2**31) * np.float32(rate)),
        _mixed(i ^ _mixed(seed ^ _mixed(heads))),
        other + heads,
    )

    def rows(key):
        bits = _shifted(_mixed(_mixed(j ^ key).add_(key ^ _mixed(others))), 1)
        dropped = bits.sub_(least).bitwise_right_shift_(31)  # -1 or 0: comparisons, and their conversion, take longer
        return dropped.to(q.dtype).add_(1).div_(float(1 - rate))

    size = max(1, MIXED // max(1, q.shape[0] * q.shape[1] * k.shape[2])) if q.device.type == "cpu" else q.shape[2]
    return torch.cat([rows(key) for key in keys.split(max(1, size), 2)], 2)


def _mixed(x):
    """A permutation of 32-bit integers that scatters neighbours; sums and products wrap."""
    x = _shifted(x, 16).bitwise_xor_(x).mul_(0x21F0AAAD)
    x = _shifted(x, 15).bitwise_xor_(x).mul_(0xD35A2D97 - 2**32)
    return _shifted(x, 15).bitwise_xor_(x)


def _shifted(x, n):
    """To the right, zeros following, as of an unsigned integer; a new tensor."""
    return (x >> n).bitwise_and_(2 ** (32 - n) - 1)


def _forward_dual(case, at, *inputs):
    _, _, o, lse, t_o, mu = _probabilities(case, at, *inputs)[:6]
    return o, lse, t_o, mu


def _probabilities(case, at, q, k, v, mask, t_q, t_k, t_v, t_mask):
    """P, Ṡ - μ, o, ℓ, ȯ, μ, and, of the tile: what dropout keeps, the tanh and the tangent of what is capped.  In a row that
    sees no key, P is zero and ℓ = -∞."""
    s, u = _scores(case, at, q, k, mask)
    kept = _kept(case, at, q, k)
    maximum = s.detach().amax(-1, True) if s.shape[-1] else s.new_zeros((*s.shape[:-1], 1))
    maximum = maximum.masked_fill(maximum == -torch.inf, 0)  # a constant to differentiation: no result depends on it
    p = (s - maximum).exp()
    total = p.sum(-1, keepdim=True)
    hidden = total == 0
    total = total.masked_fill(hidden, 1)
    p, lse = p / total, (maximum + total.log()).masked_fill(hidden, -torch.inf).squeeze(-1)
    p_kept = _thinned(p, kept)
    o = _onto_rows(p_kept, v)
    t_x, t_s = _score_tangents(case, u, q, k, t_q, t_k, t_mask)
    mu = torch.zeros_like(o[..., :1]) if t_s is None else (p * t_s).sum(-1, keepdim=True)
    w = None if t_s is None else t_s - mu
    t_o = _add(_onto_rows(_thinned(_times(p, w), kept), v), _onto_rows(p_kept, t_v))
    return p, w, o, lse, torch.zeros_like(o) if t_o is None else t_o, mu.squeeze(-1), kept, u, t_x


def _probabilities_of_part(case, at, q, k, v, mask, t_q, t_k, t_v, t_mask, o, lse, t_o, mu):
    """The same of some of the keys, as y and ty, those of all keys, say."""
    s, u = _scores(case, at, q, k, mask)
    t_x, t_s = _score_tangents(case, u, q, k, t_q, t_k, t_mask)
    p = (s - lse[..., None]).exp().masked_fill(s == -torch.inf, 0)
    w = _add(t_s, None if mu is None else -mu[..., None])
    return p, w, o, lse, t_o, mu, _kept(case, at, q, k), u, t_x


def _score_tangents(case, u, q, k, t_q, t_k, t_mask):
    """The tangents of the products, and of the scores, which are capped."""
    t_x = _times(case.problem.scale, _add(_outer(t_q, k), _outer(q, t_k)))
    return t_x, _add(_under_cap(t_x, u), t_mask)


def _backward_dual(want, case, at, q, k, v, mask, t_q, t_k, t_v, t_mask, d_o, d_lse, t_d_o, t_d_lse, *final):
    inputs = (q, k, v, mask, t_q, t_k, t_v, t_mask)
    probabilities = _probabilities_of_part if final else _probabilities
    p, w, o, _, t_o, _, kept, u, t_x = probabilities(case, at, *inputs, *final)
    delta = _add(_row_sum(d_o, o), None if d_lse is None else -d_lse[..., None])
    t_delta = _add(_row_sum(t_d_o, o), _row_sum(d_o, t_o), None if t_d_lse is None else -t_d_lse[..., None])
    d_p = _add(_thinned(_outer(d_o, v), kept), _times(-1, delta))
    t_d_p = _add(_thinned(_add(_outer(t_d_o, v), _outer(d_o, t_v)), kept), _times(-1, t_delta))
    d_s = _times(p, d_p)
    t_d_s = _times(p, _add(_times(d_p, w), t_d_p))
    d_x, t_d_x = _under_cap(d_s, u), _under_cap(t_d_s, u)  # of the products, under the cap
    if u is not None:
        t_d_x = _add(t_d_x, _times(d_x, _times(-2 / case.problem.soft_cap * u, t_x)))
    scale, p_kept = case.problem.scale, _thinned(p, kept)
    gradients = (
        lambda: _times(scale, _onto_rows(d_x, k)),
        lambda: _times(scale, _onto_columns(d_x, q, k)),
        lambda: _onto_columns(p_kept, d_o, v),
        lambda: d_s if d_s is None else d_s.sum_to_size(*mask.shape),
        lambda: _times(scale, _add(_onto_rows(t_d_x, k), _onto_rows(d_x, t_k))),
        lambda: _times(scale, _add(_onto_columns(t_d_x, q, k), _onto_columns(d_x, t_q, k))),
        lambda: _add(_onto_columns(p_kept, t_d_o, v), _onto_columns(_times(p_kept, w), d_o, v)),
        lambda: t_d_s if t_d_s is None else t_d_s.sum_to_size(*mask.shape),
    )
    return [gradient() if w else None for gradient, w in zip(gradients, want, strict=True)]


def _vjp(f, moving, case, at, *inputs):
    """The gradients of the moving inputs of f, for the cotangents that follow its inputs."""
    inputs, cotangents = inputs[: len(moving)], inputs[len(moving) :]

    def product(*moved):
        moved = iter(moved)
        results = f(case, at, *(next(moved) if m else a for a, m in zip(inputs, moving, strict=True)))
        products = [(r * c).sum() for r, c in zip(results, cotangents, strict=True) if r is not None and c is not None]
        return sum(products, inputs[0].new_zeros(()))

    value, pull = torch.func.vjp(product, *(a for a, m in zip(inputs, moving, strict=True) if m))
    gradients = iter(pull(torch.ones_like(value)))
    return [next(gradients) if m else None for m in moving]


# ------------------------------------------------------------------------------------------------ products


def _outer(a, b):  # [B, N, T, D], [B, K, S, D] -> [B, N, T, S]: N // K heads of queries to a head of keys
    return None if a is None or b is None else (_grouped(a, b) @ b.mT).reshape(*a.shape[:3], b.shape[2])


def _onto_rows(p, b):  # [B, N, T, S], [B, K, S, D] -> [B, N, T, D]
    return None if p is None or b is None else (_grouped(p, b) @ b).reshape(*p.shape[:3], b.shape[3])


def _onto_columns(p, a, k):  # [B, N, T, S], [B, N, T, D] -> [B, K, S, D]
    return None if p is None or a is None else _grouped(p, k).mT @ _grouped(a, k)


def _grouped(a, k):
    return a.reshape(*k.shape[:2], a.shape[1] // max(1, k.shape[1]) * a.shape[2], a.shape[3])


def _thinned(a, kept):
    return a if kept is None else _times(a, kept)


def _under_cap(a, u):
    """`a` times the slope of the soft cap."""
    return a if u is None else _times(a, 1 - u**2)


def _times(a, b):
    return None if a is None or b is None else a * b


def _row_sum(a, b):
    return None if a is None or b is None else (a * b).sum(-1, keepdim=True)


def _add(*terms):
    terms = [t for t in terms if t is not None]
    return sum(terms[1:], terms[0]) if terms else None
