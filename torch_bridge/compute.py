"""The results of an operator: by a plan, by the kernels, by PyTorch's kernel for CPUs, or by the reference."""

import collections
import functools
import importlib.util
import logging
import sys
import types
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torch_bridge import cpu, private, reference, ring
from torch_bridge.options import case_of, ring_of
from torch_bridge.signatures import OPERATORS, OPTIONS_AT, allocate, gives_gradients, split

logger = logging.getLogger(__name__)
launches: collections.Counter[str] = collections.Counter()  # by operator, in this process: what tests count
TRITON = importlib.util.find_spec("triton") is not None  # PyTorch comes without, but on Linux
LOST = (
    "a compiled function that contains attention was called with tangents, inside a forward-mode level (torch.func.jvp or "
    "forward_ad.dual_level), where torch.compile loses the tangents of its inputs (pytorch#187284): open the level "
    "inside the compiled function"
)


def loses_tangents() -> bool:
    """Was the compiled program that runs in this thread called with tangents?  Within a forward-mode level, which is open for
    all threads, it does not say so, but the frames above hold what it was called with."""
    frame: types.FrameType | None = sys._getframe(1)
    found = False
    while frame is not None and not (found and frame.f_code.co_name == "compile_wrapper"):
        # Dynamo calls what it compiled through this
        if frame.f_code.co_name == "_fn" and frame.f_code.co_filename == private.eval_frame.__file__:
            found, given = True, frame.f_locals.get("args", ())
            # as what calls this need not allow: a Function, a mode
            with private.set_fwd_grad_enabled(True), private.SetExcludeDispatchKeyGuard(private.VIEWS, False):
                if any(isinstance(a, Tensor) and private.unpack_dual(a, level=0)[1] is not None for a in given):
                    return True
        frame = frame.f_back
    return not found


def on_nvidia(a: Tensor) -> bool:
    return a.is_cuda and torch.version.hip is None  # "cuda" is also what PyTorch calls AMD's


@functools.cache
def _launch() -> types.ModuleType:
    from torch_bridge import launch  # imports Triton

    return launch


def compute(name: str, *args: Any) -> tuple[Tensor | None, ...]:
    """The results; None for a gradient that is not wanted."""
    if name == "forward" and args[-1] is True and forward_ad._current_level >= 0 and loses_tangents():
        raise RuntimeError(LOST)
    word = ring_of(args[OPTIONS_AT[name]])
    if word is not None:
        return ring.run(compute, name, args, word)
    launches[name] += 1
    kernels = on_nvidia(args[0])
    if kernels and not TRITON:
        kernels = False
        logger.debug("attention %s: Triton is not installed; the reference computes it", name)
    if kernels:
        results = _launch().planned(name, args)
        if results is not None:
            return results
    *tensors, (selection, is_causal, scale, options, *_) = split(name, args)
    groups = dict(zip(OPERATORS[name].groups, tensors, strict=True), want=args[-1] if gives_gradients(name) else ())
    q, k, *_ = groups["x"]
    case = case_of(q, k, selection, is_causal, scale, options)
    asked = case.problem.implementation == "xla"
    if asked:
        logger.debug("attention %s: the reference computes it: it is asked for", name)
    if kernels and not asked and _launch().served(groups["x"]):
        results = _launch().computed(name, args, groups, case)
        if results is not None:
            return results
    if args[0].device.type == "cpu" and not asked:
        results = cpu.computed(name, case, **groups)
        if results is not None:
            logger.debug("attention %s: PyTorch's flash attention for CPUs computes it", name)
            return results
    if not asked and not on_nvidia(args[0]):
        logger.debug("attention %s: this is not computed on an NVIDIA GPU; the reference computes it", name)
    with torch.autocast(args[0].device.type, enabled=False):
        values = reference.run(name, case, **groups)
    results = allocate(name, *args, partial=case.problem.partial)
    for result, value in zip(results, values, strict=False):
        result.zero_() if value is None else result.copy_(value)
    return results
