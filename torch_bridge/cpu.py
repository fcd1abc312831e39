"""PyTorch's own flash attention for CPUs: the kernel of that device for a forward and its backward, as far as it goes.

It knows causality, what is added to scores, and heads that share keys.  It says that the log-sum-exp of a row that sees no key
is zero.  In few keys it makes zeros of a query's NaN and of what is infinite, and elsewhere it spreads NaN to queries that do not
see them: the reference computes calls where that may be so.
Under causality it multiplies -∞ by the scale, which must be positive.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jax_flash_jvp.problem import HIDES
from torch_bridge.private import flash_on_cpu, flash_on_cpu_backward
from torch_bridge.reference import Case, cut, outside
from torch_bridge.signatures import by_length, strides_by_length, wants_bias, wide

Tensors = Sequence[Any]
LENGTHS = ("query_lengths", "key_lengths")


def computed(
    name: str, case: Case, x: Tensors, y: Tensors = (), cy: Tensors = (), want: Sequence[bool] = (), **_: Tensors
) -> tuple[Tensor | None, ...] | None:
    """The results of an operator, None for a gradient that is not wanted.  None: the kernel does not serve this."""
    if name == "forward" and _serves(case, x):
        return _forward(case, x)
    if name == "backward" and cy[0] is not None and cy[1] is None and not wants_bias(name, want) and _serves(case, x):
        return _backward(case, x, y, cy[0], want)
    return None


def _serves(case: Case, x: Tensors) -> bool:
    (q, k, v, mask), problem, selection = x, case.problem, case.selection
    if flash_on_cpu is None or flash_on_cpu_backward is None or q.shape[-1] != v.shape[-1] or 0 in (*q.shape, *k.shape):
        return False
    if problem.partial or problem.mask_block is not None or problem.soft_cap is not None:
        return False
    if any(a is not None for name, a in zip(selection._fields[3:], selection[3:], strict=True) if name not in LENGTHS):
        return False
    left, right = problem.reach(q.shape[2], k.shape[2])
    causal = right == 0 and problem.scale > 0 and mask is None
    return left is None and (right is None or causal)


def _prepared(case: Case, x: Tensors) -> tuple[Tensors, dict[str, Any], Tensor | None]:
    """(q, k, v), the other arguments, and which queries [B, T] lie beyond their lengths."""
    q, k, v, mask = x
    no_query, no_key = outside(case, q.shape[2], k.shape[2])
    operands = [cut(q, no_query), cut(k, no_key), cut(v, no_key)]
    operands = [a if a.stride(-1) == 1 else a.contiguous() for a in operands]
    added, dtype = None, wide(q.dtype)
    if mask is not None:
        hides = ~mask if mask.dtype == torch.bool else mask <= HIDES
        added = torch.where(hides, -torch.inf, 0 if mask.dtype == torch.bool else mask.to(dtype)).to(dtype)
    if no_key is not None:
        added = q.new_zeros((1, 1, 1, 1), dtype=dtype) if added is None else added
        added = added.masked_fill(no_key[:, None, None], -torch.inf)
        most = max(1, int((~no_key).sum(1).max()))  # that a batch entry has
        operands[1:], added = [a[:, :, :most] for a in operands[1:]], added[..., :most]
    is_causal = case.problem.reach(q.shape[2], k.shape[2])[1] is not None
    return operands, dict(is_causal=is_causal, attn_mask=added, scale=case.problem.scale), no_query


def _forward(case: Case, x: Tensors) -> tuple[Tensor, ...] | None:
    operands, others, no_query = _prepared(case, x)
    o, log_sum_exp = flash_on_cpu(*operands, **others)
    log_sum_exp, added = log_sum_exp.contiguous(), others["attn_mask"]
    if added is not None and bool((log_sum_exp == 0).any()):
        log_sum_exp.masked_fill_(added.amax(-1) == -torch.inf, -torch.inf)
    if no_query is not None:
        log_sum_exp.masked_fill_(no_query[:, None], -torch.inf)
        o.masked_fill_(no_query[:, None, :, None], 0)
    hidden = bool(((log_sum_exp == 0) | (log_sum_exp == torch.inf)).any())
    if hidden or _has_nan(o) or _has_nan(log_sum_exp):
        return None
    return _laid_out(o), log_sum_exp


def _backward(
    case: Case, x: Tensors, y: Tensors, d_o: Tensor, want: Sequence[bool]
) -> tuple[Tensor | None, ...] | None:
    operands, others, no_query = _prepared(case, x)
    o, log_sum_exp = y
    if no_query is not None or others["attn_mask"] is not None:  # exp(-∞ + ∞) would be NaN
        log_sum_exp = log_sum_exp.masked_fill(log_sum_exp == -torch.inf, 0)
    gradients: Sequence[Tensor]
    gradients = flash_on_cpu_backward(cut(d_o, no_query), *operands, o, log_sum_exp, 0.0, **others)
    if any(map(_has_nan, gradients)):
        return None
    whole = [F.pad(a, (0, 0, 0, like.shape[2] - a.shape[2])) for a, like in zip(gradients, x, strict=False)]
    return *(_laid_out(a) if w else None for a, w in zip(whole, want, strict=False)), None


def _has_nan(a: Tensor) -> bool:
    """Or infinities of both signs."""
    return bool(a.sum().isnan())


def _laid_out(a: Tensor) -> Tensor:
    return a if a.stride() == strides_by_length(a.shape) else by_length(a, a.shape).copy_(a)
