"""A call like an earlier one, without the Python in between.

Which kernels a call launches, and with which arguments, follows from what its tensors look like, but takes longer to work
out than a small kernel runs.  A plan keeps the outcome: compiled kernels, and arguments in which the addresses of the next
such call's tensors replace those of the first.  Copies of its arguments, to order them, are part of a plan, and sums of its
results; a call that cast a tensor has none.  A call by a plan allocates its results, each by itself, and all that kernels hand
to one another in one piece.
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jax_flash_jvp.private import SUPPORTED, version
from jax_flash_jvp.problem import Precision

logger = logging.getLogger(__name__)


class Mapped(NamedTuple):
    """An argument made from the address of a tensor, such as a TMA descriptor's."""

    tensor: Tensor
    make: Callable[[int], Any]


class Launched(NamedTuple):
    """A launch of the first call: tensors stand in `arguments` for their addresses."""

    run: Callable[[list[Any]], Any]
    arguments: Sequence[Any]
    outputs: Sequence[Tensor]


class Copied(NamedTuple):
    """A copy that the first call made of a view of an argument, or of an earlier copy, perhaps with zeros behind each row."""

    view: Tensor
    array: Tensor


class Summed(NamedTuple):
    """A result that PyTorch has made of an output, which nothing else is made of."""

    add: Callable[[Tensor], Tensor]
    output: Tensor
    result: Tensor


Step = Launched | Copied | Summed


class Part(NamedTuple):
    """A view of an earlier tensor, copied if it is not contiguous: its place, shape, strides and offset, and how many zeros go
    behind each row."""

    place: int
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    zeros: int


class Addressed(dict):
    """What `make` makes of an address, kept: the caching allocator gives the same ones again and again."""

    MOST = 256

    def __init__(self, make: Callable[[int], Any]):
        self.make = make

    def __missing__(self, address: int) -> Any:
        if len(self) >= self.MOST:
            self.clear()
        made = self[address] = self.make(address)
        return made


class Launch(NamedTuple):
    """Tensors are known by their places: those among the arguments of the call first, then parts of these, then results, then
    what kernels hand to one another."""

    run: Callable[[list[Any]], Any]
    arguments: list[Any]  # None where an address belongs, and where a tensor is never touched
    pointers: list[tuple[int, int]]  # (of an argument, of its tensor)
    addressed: list[tuple[int, int, Addressed]]


class Plan(NamedTuple):
    parts: list[Part]
    outputs: list[tuple]  # shape, strides and dtype of each that is a result, or summed
    scratch: int  # bytes
    offsets: list[int]  # in it
    launches: list[Launch]
    sums: list[tuple[Callable[[Tensor], Tensor], int]]  # of `outputs`
    results: list[int | None]  # of `outputs` and then of `sums`; None: not wanted


plans: dict[tuple, Plan] = {}
MOST_PLANS = 4096
ALIGNED = 256  # bytes; kernels are compiled for multiples of 16


class _Kept:
    plans = True


def stop(error: Exception) -> None:
    """Triton launches kernels in another way than plans do: from now on it launches those of every call."""
    if _Kept.plans:
        logger.warning(
            "every call of attention is prepared anew, which takes more CPU time: Triton %s does not launch kernels as "
            "%s do: %r", version("triton"), SUPPORTED["triton"], error,
        )  # fmt: skip
    _Kept.plans = False
    plans.clear()


def keep(looks: tuple, plan: Plan | None) -> None:
    if plan is None or not _Kept.plans:
        return
    if len(plans) >= MOST_PLANS:
        plans.clear()
    plans[looks] = plan


def precision_of(q: Tensor) -> Precision:
    """The precision of products of such a tensor, by the setting in force."""
    return "tf32" if q.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def look(name: str, args: Sequence[Any], precision: str | None = None) -> tuple[tuple, list[int]]:
    """All that the choice of kernels and arguments depends on: a plan holds for calls that look the same; and the addresses of
    the tensors.  `precision` is that in which the call was computed, or else the one in force, which another thread may change
    meanwhile."""
    q = args[0]
    parts, addresses = [name, q.device.index, precision or precision_of(q)], []
    for a in args:
        if a is None:
            parts.append(a)
        elif isinstance(a, Tensor):
            address = a.data_ptr()
            addresses.append(address)
            parts += (a.shape, a.stride(), a.dtype, address % 16)
        else:
            parts.append(tuple(a) if type(a) is list else a)
    if len({*addresses}) < len(addresses):  # which are the same
        parts.append(tuple(map(addresses.index, addresses)))
    return tuple(parts), addresses


def follow(plan: Plan, args: Sequence[Any], addresses: list[int]) -> tuple[Tensor | None, ...]:
    """The results of the operator for these arguments; `addresses`, of `look`, grows."""
    device = args[0].device
    if plan.parts:
        tensors = [a for a in args if isinstance(a, Tensor)]
        for place, shape, strides, offset, zeros in plan.parts:
            a = tensors[place]
            part = a.as_strided(shape, strides, a.storage_offset() + offset)
            tensors.append(torch.nn.functional.pad(part, (0, zeros)) if zeros else part.contiguous())
            addresses.append(tensors[-1].data_ptr())
    outputs = [
        torch.empty_strided(shape, strides, dtype=dtype, device=device) for shape, strides, dtype in plan.outputs
    ]
    for output in outputs:
        addresses.append(output.data_ptr())
    if plan.scratch:
        scratch = torch.empty(plan.scratch, dtype=torch.uint8, device=device)
        first = scratch.data_ptr()
        for offset in plan.offsets:
            addresses.append(first + offset)
    for run, arguments, pointers, addressed in plan.launches:
        arguments = arguments.copy()
        for i, place in pointers:
            arguments[i] = addresses[place]
        for i, place, made in addressed:
            arguments[i] = made[addresses[place]]
        run(arguments)
    outputs += [add(outputs[i]) for add, i in plan.sums]
    return tuple([None if i is None else outputs[i] for i in plan.results])


def made(args: Sequence[Any], launched: Sequence[Step], results: Sequence[Tensor | None]) -> Plan | None:
    """The plan of one call, from what it launched.  None where a tensor is neither an argument of the call, nor part of one, nor
    an output of a launch, or where a result is no output."""
    known = [a for a in args if isinstance(a, Tensor)]
    places: dict[int, int] = {}
    for i, a in enumerate(known):
        places.setdefault(a.data_ptr(), i)
    parts = []
    for step in launched:
        if isinstance(step, Copied):
            origin = _origin(step.view, known)
            if origin is None:
                return None
            place, offset = origin
            zeros = step.array.shape[-1] - step.view.shape[-1]
            parts.append(Part(place, step.view.shape, step.view.stride(), offset, zeros))
            places[step.array.data_ptr()] = len(known)
            known.append(step.array)
    launches = [step for step in launched if isinstance(step, Launched)]
    sums = {step.result.data_ptr(): step for step in launched if isinstance(step, Summed)}
    outputs = {o.data_ptr(): o for step in launches for o in step.outputs}
    seen = {a.data_ptr(): a for a in results if a is not None and a.data_ptr() not in sums}
    seen |= {step.output.data_ptr(): step.output for step in sums.values()}
    if seen.keys() - outputs.keys():
        return None
    between = [o for address, o in outputs.items() if address not in seen]
    sizes = [math.ceil(o.nbytes / ALIGNED) * ALIGNED for o in between]
    for a in (*seen.values(), *between):
        places[a.data_ptr()] = len(known)
        known.append(a)
    planned = []
    for step in launches:
        launch = _launch(step, places)
        if launch is None:
            return None
        planned.append(launch)
    order = {address: i for i, address in enumerate(seen)}
    summed = [(step.add, order[step.output.data_ptr()]) for step in sums.values()]
    order |= {address: len(seen) + i for i, address in enumerate(sums)}  # of which one may begin where its output does
    return Plan(
        parts,
        [(a.shape, a.stride(), a.dtype) for a in seen.values()],
        sum(sizes),
        [sum(sizes[:i]) for i in range(len(sizes))],
        planned,
        summed,
        [None if a is None else order[a.data_ptr()] for a in results],
    )


def _launch(step: Launched, places: dict[int, int]) -> Launch | None:
    template, pointers, addressed = [], [], []
    for i, a in enumerate(step.arguments):
        tensor = a.tensor if isinstance(a, Mapped) else a
        if not isinstance(tensor, Tensor):
            template.append(a)
            continue
        place = places.get(tensor.data_ptr())
        if place is None:
            return None
        template.append(None)
        if isinstance(a, Mapped):
            addressed.append((i, place, Addressed(a.make)))
        else:
            pointers.append((i, place))
    return Launch(step.run, template, pointers, addressed)


def _origin(view: Tensor, known: Sequence[Tensor]) -> tuple[int, int] | None:
    """The place of the argument, or of the copy of one, that it is a view of, and where in it it begins.  Of arguments that share
    memory, that which begins there too: how far they lie apart may be otherwise in the next call."""
    for i, a in enumerate(known):
        if a.dtype == view.dtype and a.data_ptr() == view.data_ptr():
            return i, 0
    for i, a in enumerate(known):
        if a.dtype == view.dtype == torch.int32:  # the selection, which is nobody else's
            offset = (view.data_ptr() - a.data_ptr()) // a.itemsize
            if 0 < offset < a.numel():
                return i, offset
    return None
