"""A call like an earlier one, without the Python in between.

Which kernels a call launches, and with which arguments, follows from what its tensors look like, but takes longer to work
out than a small kernel runs.  A plan keeps the outcome: compiled kernels, and arguments in which the tensors of the next
such call replace those of the first.  Copies of its arguments, to order them, are part of a plan; a call that rounded or
cast a tensor has none.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Part(NamedTuple):
    """A view of an earlier tensor, copied if it is not contiguous: its place, shape, strides and offset, and how many zeros go
    behind each row."""

    place: int
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    zeros: int


class Launch(NamedTuple):
    """Tensors are known by their places: the arguments of the call first, then parts of these and outputs, in turn."""

    run: Callable  # the compiled kernel
    outputs: list[tuple]  # shape, strides and dtype of each
    arguments: list[Any]  # None where a tensor belongs
    pointers: list[tuple[int, int]]  # (of an argument, of its tensor)
    descriptors: list[tuple[int, int, type, dict]]  # and the descriptor's class and fields


class Plan(NamedTuple):
    steps: list[Part | Launch]
    results: list[int | None]  # None: not wanted


plans: dict[tuple, Plan] = {}
MOST_PLANS = 4096


def keep(looks: tuple, plan: Plan | None) -> None:
    if plan is None:
        return
    if len(plans) >= MOST_PLANS:
        plans.clear()
    plans[looks] = plan


def precision_of(q: Tensor) -> str:
    """Of products of such a tensor, by the setting in force."""
    return "tf32" if q.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def look(name: str, args: Sequence[Any], precision: str | None = None) -> tuple:
    """All that the choice of kernels and arguments depends on: a plan holds for calls that look the same.  `precision` is that
    in which the call was computed, or else the one in force, which another thread may change meanwhile."""
    q, parts, places = args[0], [], {}
    for a in args:
        if isinstance(a, Tensor):
            address = a.data_ptr()
            same = places.setdefault(address, len(places))
            parts += (a.shape, a.stride(), a.dtype, address % 16, same)
        else:
            parts.append(tuple(a) if isinstance(a, list) else a)
    return name, q.device.index, precision or precision_of(q), *parts


def follow(plan: Plan, args: Sequence[Any]) -> tuple[Tensor, ...]:
    """The results of the operator for these arguments."""
    tensors = list(args)
    device = args[0].device
    for step in plan.steps:
        if isinstance(step, Part):
            a = tensors[step.place]
            part = a.as_strided(step.shape, step.strides, a.storage_offset() + step.offset)
            tensors.append(torch.nn.functional.pad(part, (0, step.zeros)) if step.zeros else part.contiguous())
            continue
        for shape, strides, dtype in step.outputs:
            tensors.append(torch.empty_strided(shape, strides, dtype=dtype, device=device))
        arguments = step.arguments.copy()
        for i, place in step.pointers:
            arguments[i] = tensors[place]
        for i, place, kind, fields in step.descriptors:
            arguments[i] = descriptor = object.__new__(kind)
            descriptor.__dict__.update(fields, base=tensors[place])
        step.run(*arguments)
    return tuple(args[0].new_empty(0) if place is None else tensors[place] for place in plan.results)


def made(args: Sequence[Any], launched: Sequence[tuple], results: Sequence[Tensor | None]) -> Plan | None:
    """Of one call, its `launched`: (compiled kernel, grid, arguments, their tensors, outputs), or (view, array).  None where some
    tensor is neither an argument of the call nor part of one nor an output of an earlier launch, or a result is no output."""
    places: dict[int, int] = {}
    for i, a in enumerate(args):
        if isinstance(a, Tensor):
            places.setdefault(a.data_ptr(), i)
    seen = {a.data_ptr(): a for a in results if a is not None}
    known, count, steps = [*enumerate(args)], len(args), []
    for step in launched:
        if len(step) == 2:
            view, array = step
            origin = _origin(view, known)
            if origin is None:
                return None
            place, offset = origin
            steps.append(Part(place, view.shape, view.stride(), offset, array.shape[-1] - view.shape[-1]))
            known.append((count, array))
            places[array.data_ptr()], count = count, count + 1
            continue
        compiled, grid, arguments, tensors, outputs = step
        for output in outputs:
            places[output.data_ptr()], count = count, count + 1
        if any(t is not None and t.data_ptr() not in places for t in tensors):
            return None
        as_seen = [seen.get(o.data_ptr(), o) for o in outputs]
        at = [(i, None if t is None else places[t.data_ptr()]) for i, t in enumerate(tensors)]
        steps.append(
            Launch(
                compiled[(grid, 1, 1)],
                [(a.shape, a.stride(), a.dtype) for a in as_seen],
                [a if t is None else None for a, t in zip(arguments, tensors, strict=True)],
                [(i, p) for i, p in at if p is not None and arguments[i] is tensors[i]],
                [
                    (i, p, type(arguments[i]), dict(vars(arguments[i]), base=None))
                    for i, p in at
                    if p is not None and arguments[i] is not tensors[i]
                ],
            )
        )
    if any(a is not None and a.data_ptr() not in places for a in results):
        return None
    return Plan(steps, [None if a is None else places[a.data_ptr()] for a in results])


def _origin(view: Tensor, known: Sequence[tuple[int, Any]]) -> tuple[int, int] | None:
    """The place of the argument, or of the copy of one, that it is a view of, and where in it it begins.  Of arguments that share
    memory, that which begins there too: how far they lie apart may be otherwise in the next call."""
    for i, a in known:
        if isinstance(a, Tensor) and a.dtype == view.dtype and a.data_ptr() == view.data_ptr():
            return i, 0
    for i, a in known:
        if isinstance(a, Tensor) and a.dtype == view.dtype == torch.int32:  # the selection, which is nobody else's
            offset = (view.data_ptr() - a.data_ptr()) // a.itemsize
            if 0 < offset < a.numel():
                return i, offset
    return None
