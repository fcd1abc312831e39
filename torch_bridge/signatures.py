"""What the operators take and give, by name.

    forward          x                         -> o, ℓ
    forward_dual     x, tx                     -> o, ℓ, ȯ, μ
    tangent          x, y, tx                  -> ȯ, μ
    backward         x, y, cy                  -> dx, the gradients of x
    backward_dual    x, y, cy, tx, ty, tcy     -> dx, and its tangents tdx

The names and the order are those of `jax_flash_jvp/differentiation.py`.  A gradient that is not wanted is an empty tensor: a
fixed number of tensors is what every dispatch key handles.
"""

import functools
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

GROUPS = {  # of tensors
    "x": ("q", "k", "v", "mask"),
    "y": ("o", "lse"),
    "cy": ("d_o", "d_lse"),
    "tx": ("t_q", "t_k", "t_v", "t_mask"),
    "ty": ("t_o", "mu"),
    "tcy": ("t_d_o", "t_d_lse"),
}
REQUIRED = ("q", "k", "v", *GROUPS["y"], *GROUPS["ty"])  # the others may be None
BIASES = ("mask", "t_mask")
STATIC = "Tensor? selection, bool is_causal, float scale, str options"  # of `case_of`
WANT = STATIC + ", bool[] want"


class Operator(NamedTuple):
    groups: tuple[str, ...]
    static: str  # what follows the tensors
    results: tuple[str, ...]  # of the backward gradients and their tangents, named like x and tx

    @property
    def tensors(self) -> tuple[str, ...]:
        return tuple(name for group in self.groups for name in GROUPS[group])

    @property
    def schema(self) -> str:
        tensors = [f"Tensor{'' if name in REQUIRED else '?'} {name}" for name in self.tensors]
        return f"({', '.join([*tensors, self.static])}) -> ({', '.join(['Tensor'] * len(self.results))})"


OPERATORS = {
    "forward": Operator(("x",), STATIC + ", bool compiled=False", GROUPS["y"]),
    "forward_dual": Operator(("x", "tx"), STATIC, GROUPS["y"] + GROUPS["ty"]),
    "tangent": Operator(("x", "y", "tx"), STATIC, GROUPS["ty"]),
    "backward": Operator(("x", "y", "cy"), WANT, GROUPS["x"]),
    "backward_dual": Operator(("x", "y", "cy", "tx", "ty", "tcy"), WANT, GROUPS["x"] + GROUPS["tx"]),
}


OPTIONS_AT = {name: len(operator.tensors) + 3 for name, operator in OPERATORS.items()}  # among the arguments


def split(name: str, args: Sequence[Any]) -> list[Any]:
    """The tensors in groups, and what follows them."""
    return [args[part] for part in _slices(name)]


@functools.cache
def _slices(name: str) -> list[slice]:
    ends = [*accumulate(len(GROUPS[group]) for group in OPERATORS[name].groups)]
    return [slice(*ends) for ends in pairwise([0, *ends, None])]


def gives_gradients(name: str) -> bool:
    """Is what follows the tensors of this operator `want`, last of all?"""
    return OPERATORS[name].static == WANT


def wants_bias(name: str, want: Sequence[bool]) -> bool:
    """Is the gradient of a mask wanted, or its tangent?"""
    return any(w and result in BIASES for result, w in zip(OPERATORS[name].results, want, strict=True))


def by_length(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised, in the memory order [B, T, N, D]: as the kernels write it.  No view, which autograd lets nobody change."""
    return like.new_empty_strided(shape, strides_by_length(shape), dtype=dtype or like.dtype)


def strides_by_length(shape: Sequence[int]) -> tuple[int, ...]:
    _, heads, length, channels = shape
    return length * heads * channels, channels, heads * channels, 1


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def allocate(name: str, *args: Any, partial: bool = False) -> tuple[Tensor, ...]:
    """The results, uninitialised: what fake and meta tensors give.  Those of a part of the keys are wide."""
    given, results = dict(zip(OPERATORS[name].tensors, args, strict=False)), OPERATORS[name].results
    q, v = given["q"], given["v"]
    dtype_of = (lambda a: wide(a.dtype)) if partial else (lambda a: a.dtype)
    if gives_gradients(name):
        gradients = []
        for result, wanted in zip(results, args[-1], strict=True):
            like = given[result.removeprefix("t_")]
            if not wanted:
                gradients.append(q.new_empty(0))
            else:
                new = like.new_empty if result in BIASES else functools.partial(by_length, like)
                gradients.append(new(like.shape, dtype=dtype_of(like)))
        return tuple(gradients)
    shape = q.shape[:-1]
    output = lambda: by_length(q, (*shape, v.shape[-1]), dtype_of(q))
    statistic = lambda: q.new_empty(shape, dtype=wide(q.dtype))
    return tuple(output() if result in ("o", "t_o") else statistic() for result in results)
