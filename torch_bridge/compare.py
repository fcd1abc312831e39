"""A check of what torch.compile makes of a training step."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from torch_bridge.private import inductor_config, tree_leaves


def compare_compiled(step: Callable, *args: Any, parameters: Iterable[Tensor] = (), **options: Any) -> float:
    """Compares a compiled training step with the eager one.

    Args:
      step: a function of `args` that returns tensors, in any nesting, such as a loss.  It runs twice, so it must not change its
        arguments: leave the optimizer's step outside.
      parameters: tensors that require gradients, such as `model.parameters()`.  Those that require none are left out.
      options: the options of :func:`torch.compile` that your training uses.

    Returns:
      The largest relative error, ‖compiled - eager‖ / ‖eager‖, among the tensors that `step` returns and the gradients of their
      sum with respect to `parameters`.  In float32, 1e-5 is rounding and 1e-2 is an error of the compiler.  Infinity means that
      one of the two lacks a gradient.  Both runs draw the same random numbers.

    Raises:
      TypeError: `step` returns no tensors.
      ValueError: `parameters` are given, but nothing that `step` returns requires a gradient.
    """
    wanted = [p for p in parameters if p.requires_grad]

    def run(function: Callable) -> list[Tensor | None]:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(0)
            results = [a for a in tree_leaves(function(*args)) if isinstance(a, Tensor)]
            if not results:
                raise TypeError("`step` must return tensors, such as a loss: got none")
            moving = [a.sum() for a in results if a.requires_grad]
            if wanted and not moving:
                raise ValueError("`parameters` were given, but nothing that `step` returns requires a gradient")
            gradients = torch.autograd.grad(moving, wanted, allow_unused=True) if wanted else ()
        return [*(a.detach() for a in results), *gradients]

    eager = run(step)
    with inductor_config().patch(fallback_random=True):
        compiled = run(torch.compile(step, **options))
    errors = [_error(a, b) for a, b in zip(compiled, eager, strict=True)]
    return torch.stack(errors).max().item()  # NaN if one is


def _error(got: Tensor | None, expected: Tensor | None) -> Tensor:
    if got is None or expected is None:
        return torch.tensor(0.0 if got is expected else torch.inf, dtype=torch.float64)
    got, expected = got.detach().cpu().double(), expected.detach().cpu().double()
    size = torch.linalg.vector_norm(expected)
    return torch.linalg.vector_norm(got - expected) / torch.where(size == 0, 1, size)
