"""Launching the kernels on torch tensors."""

import contextlib
import copy
import dataclasses
import functools
import inspect
import logging
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

from jax_flash_jvp.kernels import jobs
from jax_flash_jvp.kernels.launcher import DESCRIBED, Blocks, InPlace, Launch, Output, Rows
from jax_flash_jvp.kernels.portable import rounding
from jax_flash_jvp.private import needed, optional
from jax_flash_jvp.problem import DIFFERENTIABLE, Operands, unserved
from torch_bridge import plans
from torch_bridge.block_mask import booleans, pages_of
from torch_bridge.options import SELECTED
from torch_bridge.reference import Case
from torch_bridge.signatures import gives_gradients, wants_bias

logger = logging.getLogger(__name__)
OTHERWISE = (
    AttributeError,
    ImportError,
    KeyError,
    StopIteration,
    TypeError,
)  # where Triton's launcher is not as expected
STRIDES = "tensors whose strides or addresses are not multiples of 16 bytes"


class TorchLauncher:
    """Launches on the device of the tensors, on its current stream."""

    target: int | str
    multiprocessors: int | None

    def __init__(self, device: torch.device):
        self.device = device
        self.target, self.multiprocessors, self.descriptors = _properties(device)
        self.launched: list[plans.Step] = []  # for a plan

    def strides(self, array: torch.Tensor) -> tuple[int, ...]:
        return array.stride()

    def empty(self, output: Output) -> torch.Tensor:
        return torch.empty(output.shape, dtype=getattr(torch, output.dtype), device=self.device)

    def contiguous(self, array: torch.Tensor) -> torch.Tensor:
        """A part of an argument, or all of it."""
        copy = array.contiguous()
        if copy is not array or array.storage_offset():
            self.launched.append(plans.Copied(array, copy))
        return copy

    def round_to_tf32(self, array: torch.Tensor) -> torch.Tensor:
        return rounding.rounded(self, array)

    def padded(self, array: torch.Tensor, n: int) -> torch.Tensor:
        copy = torch.nn.functional.pad(array, (0, n))
        self.launched.append(plans.Copied(array, copy))
        return copy

    def summed(self, array: torch.Tensor, by_column: bool, shape: Sequence[int], dtype: str) -> torch.Tensor:
        def add(a: torch.Tensor) -> torch.Tensor:
            a = a[:, :, None, :] if by_column else a[..., None]
            return _owned(a.sum_to_size(tuple(shape)).to(getattr(torch, dtype)))

        self.launched.append(plans.Summed(add, array, result := add(array)))
        return result

    def launch(self, launch: Launch) -> dict[str, torch.Tensor | None]:
        logger.debug("kernel %s", launch)
        kernel, programs = launch.kernel, launch.programs
        allocated = [self.empty(o) for o in launch.allocations()]
        described = lambda a: _descriptor(a) if isinstance(a, DESCRIBED) else a
        given = [*map(described, launch.arrays()), *launch.numbers()]
        written = [described(a.of if isinstance(a, InPlace) else a) for a in launch.written(allocated).values()]
        options = dict(
            launch.constants, num_warps=launch.num_warps, num_stages=launch.num_stages, enable_fp_fusion=True
        )
        if launch.registers is not None:
            options["maxnreg"] = launch.registers
        compiled = kernel[(programs,)](*given, *written, **options)
        results = launch.results(allocated)
        constexprs = [launch.constants[name] for name in kernel.arg_names if name in launch.constants]
        touched = [None if a is None else w for a, w in zip(results.values(), written, strict=True)]
        new = [a for name, a in results.items() if isinstance(launch.outputs[name], Output)]
        try:
            again = _again(compiled, programs, [*given, *touched, *constexprs])
        except OTHERWISE as error:
            plans.stop(error)
        else:
            self.launched.append(plans.Launched(*again, new))
        return results


@functools.cache
def _properties(device: torch.device) -> tuple[int, int, bool]:
    """(compute capability, multiprocessors, whether Triton has the descriptors that the Hopper kernels take)."""
    properties = torch.cuda.get_device_properties(device)
    target = 10 * properties.major + properties.minor
    descriptors = target == 90 and _tensor_descriptor() is not None
    if target == 90 and not descriptors:
        logger.warning("only the portable kernels run: Triton lacks the descriptors that the Hopper kernels take")
    return target, properties.multi_processor_count, descriptors


@functools.cache
def _tensor_descriptor() -> Any:
    return optional("triton.experimental.gluon.nvidia.hopper.TensorDescriptor")


def _on(device: torch.device) -> Any:
    return contextlib.nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device)


def planned(name: str, args) -> tuple[torch.Tensor | None, ...] | None:
    """The results of an operator, where there is a plan for such a call."""
    looks, addresses = plans.look(name, args)
    plan = plans.plans.get(looks)
    if plan is None:
        return None
    with _on(args[0].device):
        try:
            results = plans.follow(plan, args, addresses)
        except OTHERWISE as error:  # of what it began nobody has heard
            plans.stop(error)
            return None
    logger.debug("attention %s: the kernels of an earlier call that looked the same", name)
    return results


def computed(name: str, args, groups, case: Case) -> tuple[torch.Tensor | None, ...] | None:
    """The results of an operator; None where no tile of it fits the GPU, as of second derivatives in float32 of wide heads."""
    launcher = TorchLauncher(args[0].device)
    with _on(launcher.device):
        try:
            results = run(launcher, name, case, **groups)
        except NotImplementedError as error:
            if case.problem.implementation is not None:
                raise
            logger.debug("attention %s: %s; the reference computes it", name, error)
            return None
        plans.keep(plans.look(name, args, case.problem.precision)[0], plans.made(args, launcher.launched, results))
    return tuple(results)


def _again(compiled, grid: int, arguments: list[Any]) -> tuple[Callable, list[Any]]:
    """What launches a compiled kernel another time, and the arguments that it takes.  Descriptors are taken apart as Triton does
    at each launch: into the encoded map, which alone depends on the address, then shape and strides.  Private in Triton, all of
    it: where it is otherwise than in 3.6 to 3.9, one of the errors of OTHERWISE."""
    launcher, active = compiled.run, triton.runtime.driver.active
    metadata = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    flat, apart = [], False
    for a in arguments:
        if hasattr(a, "block_shape"):
            make = _encoder(a, next(metadata))
            flat += [plans.Mapped(a.base, functools.partial(_map, make)), *make(a.base.data_ptr())[1:]]
            apart = True
        else:
            flat.append(a)
    if apart:  # the launcher beneath the function that takes descriptors apart
        launcher = copy.copy(launcher)
        launcher.launch = inspect.getclosurevars(launcher.launch).nonlocals["launcher"]
    device, stream_of, knobs = active.get_current_device(), active.get_current_stream, triton.knobs.runtime

    def run(arguments):
        stream, said = stream_of(device), None
        enter, leave = knobs.launch_enter_hook, knobs.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):  # a profiler's
            said = compiled.launch_metadata((grid, 1, 1), stream, *arguments)
        else:
            enter = leave = None
        launcher(grid, 1, 1, stream, compiled.function, compiled.packed_metadata, said, enter, leave, *arguments)

    return run, flat


def _map(make: Callable[[int], list[Any]], address: int) -> Any:
    return make(address)[0]


def _encoder(descriptor, metadata) -> Callable[[int], list[Any]]:
    """Encodes descriptors like this one, from the address of their tensor."""
    make_tensordesc_arg = needed("triton.backends.nvidia.driver.make_tensordesc_arg")
    fields = dict(vars(descriptor), base=None)
    more = ((),) if len(inspect.signature(make_tensordesc_arg).parameters) == 3 else ()  # from Triton 3.8 on

    def make(address: int):
        base = types.SimpleNamespace(data_ptr=lambda: address)
        return make_tensordesc_arg(types.SimpleNamespace(**fields | dict(base=base)), metadata, *more)

    return make


def _descriptor(rows: Rows | Blocks) -> Any:
    if rows.array is None:
        return None
    shape, strides, block = rows.view(rows.array.stride())
    return _tensor_descriptor()(rows.array, [*shape], [*strides], [*block], _layout(block, rows.array.dtype))


@functools.cache
def _layout(block, dtype: torch.dtype) -> Any:
    from jax_flash_jvp.kernels.hopper.ring import shared_layout

    return shared_layout(block, str(dtype).removeprefix("torch."))


def served(x) -> bool:
    """Whether the kernels serve this call."""
    q, k, v, _ = x
    reason = unserved(Operands(q, k, v)) if q.numel() and k.numel() else "empty arrays"
    if reason is not None:
        logger.debug("attention: the kernels do not serve %s; the reference computes it", reason)
    return reason is None


def run(launcher, name, case, x, tx=(None,) * 4, y=None, ty=None, cy=(None,) * 2, tcy=(None,) * 2, want=()):
    """The results of an operator; None for a gradient that is not wanted."""
    problem = case.problem
    (*rows, mask), (*t_rows, t_mask) = x, tx
    pairs = [_alike(launcher, a, t) for a, t in zip(rows, t_rows, strict=True)]
    # a gradient that is wanted has the whole shape of the mask
    whole = gives_gradients(name) and wants_bias(name, want)
    mask, t_mask = (mask, t_mask) if whole else _unexpanded(mask, t_mask, 4 if problem.mask_block is None else 2)
    t_x = Operands(*(t for _, t in pairs), None if t_mask is None else launcher.contiguous(t_mask))
    x = Operands(*(a for a, _ in pairs))
    if mask is not None and mask.is_floating_point():
        x = x._replace(bias=launcher.contiguous(mask))
    elif mask is not None and mask.dtype == torch.bool:
        x = x._replace(mask=launcher.contiguous(mask))
    elif mask is not None:
        table, pages = map(launcher.contiguous, pages_of(mask, problem.mask_block, (x.query.shape[1], x.key.shape[1])))
        x = x._replace(mask=table, mask_pages=booleans(pages, problem.mask_block))
    selected = {
        name: launcher.contiguous(a)
        for name, a in case.selection._asdict().items()
        if name in SELECTED and a is not None
    }
    x = x._replace(**selected)
    y, ty, cy, tcy = (
        a and (_by_length(launcher, _as(a[0], x.value)), a[1] if a[1] is None else launcher.contiguous(a[1]))
        for a in (y, ty, cy, tcy)
    )
    through_descriptors = (*x[:3], *t_x[:3], cy[0], tcy[0], y and y[0], ty and ty[0])
    if any(a is not None and not _describable(a) for a in through_descriptors):
        if problem.implementation == "hopper":
            raise ValueError(f"`implementation`='hopper' does not serve {STRIDES}; pass copies, or ask for 'triton'")
        logger.debug("attention %s: TMA does not serve %s", name, STRIDES)
        problem = dataclasses.replace(problem, implementation="portable")
    if name.startswith("forward"):
        o, lse, t_o, mu = jobs.forward(launcher, problem, x, t_x)
        return [_by_head(o), lse, *([] if t_o is None else [_by_head(t_o), mu])]
    if name == "tangent":
        t_o, mu = jobs.tangent(launcher, problem, x, y[1], t_x)
        return _by_head(t_o), mu
    if name == "backward":
        return _gradients(jobs.backward(launcher, problem, x, y, cy, want))
    wants = want[:DIFFERENTIABLE], want[DIFFERENTIABLE:]
    dx, tdx = jobs.backward_dual(launcher, problem, x, y, cy, (t_x, ty, tcy), *wants)
    return [*_gradients(dx), *_gradients(tdx)]


def _gradients(d: Operands) -> list[torch.Tensor | None]:
    """The gradients of q, k, v and the mask, or the tangents of these gradients."""
    return [*(None if a is None else _by_head(a) for a in (d.query, d.key, d.value)), d.bias]


def _unexpanded(mask, t_mask, axes):
    """Without those of the first axes along which both only repeat themselves."""
    if mask is None:
        return None, None
    same = [mask.stride(i) == 0 and (t_mask is None or t_mask.stride(i) == 0) for i in range(axes)]
    return (a if a is None else a[tuple(slice(1 if s else None) for s in same)] for a in (mask, t_mask))


def _describable(a):
    """Whether a TMA descriptor can be had of [B, T, N, D]: it begins, and its rows and heads, at multiples of 16 bytes."""
    return a.data_ptr() % 16 == 0 and all(s and s * a.element_size() % 16 == 0 for s in a.stride()[:-1])


def _as(a, like):
    """In the dtype of that array, which a tangent need not have."""
    return None if a is None else a.to(like.dtype)


def _owned(a):
    """A result, where it is, but not as a view, which autograd lets nobody change."""
    return a.new_empty(0).set_(a.untyped_storage(), a.storage_offset(), a.shape, a.stride())


def _by_head(a):
    """[B, N, T, D] of a result."""
    return _owned(a.transpose(1, 2))


def _by_length(launcher, a):
    return None if a is None else launcher.contiguous(a.transpose(1, 2))


def _alike(launcher, a, t):
    """[B, T, N, D], strided but for the last axis; a tangent as its primal."""
    by_length, t = a.transpose(1, 2), _as(t, a)
    if a.stride(-1) == 1 and (t is None or t.stride() == a.stride()):
        return by_length, None if t is None else t.transpose(1, 2)
    return launcher.contiguous(by_length), _by_length(launcher, t)
