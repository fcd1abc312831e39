"""Runs Triton kernels on numpy arrays, through Triton's interpreter.

Triton interprets a kernel when `TRITON_INTERPRET` is set before the import of the kernel, and then only on torch
tensors; such a process can no longer compile. Here the kernel stays an ordinary `triton.JITFunction`, which the same
process may compile as well (though not from another thread while a launch is under way: the interpreter replaces
attributes of `triton.language`, which are put back when the launch ends).

What differs from a GPU: products are exact to fp32 whatever the `input_precision`, programs run one after the other, so
races stay hidden, and an access slightly out of bounds goes unnoticed. `for i in range(...)` counts in Python integers,
which have no `.to` and do not overflow. Inline assembly and libdevice are not available.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import itertools
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton
import triton.language as tl
from ml_dtypes import bfloat16
from triton.runtime import interpreter

from jax_flash_jvp import private

private.check(private.INTERPRETER)

_LOCK = threading.Lock()  # the place in the grid and the replaced attributes belong to the whole process
_PROGRAMS: dict[Callable, Callable] = {}


def launch(kernel: triton.JITFunction, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Runs `kernel` once for each place in `grid`.

    Args:
        kernel: a function decorated with `triton.jit`.
        grid: up to three extents.
        *arguments: numpy arrays, which the kernel reads and writes in place, integers, floats (fp32 in the kernel) and
            None, in the order of the kernel's parameters. A number equal to 1 is the constant 1 in the kernel.
        **constants: the kernel's `tl.constexpr` parameters.

    Raises:
        TypeError: `kernel` is no `triton.JITFunction`, the arguments do not fit its parameters, or one has a type that
            the interpreter does not know.
        ValueError: an array is not contiguous, or `grid` has more than three extents.
    """
    if not isinstance(kernel, triton.JITFunction):
        raise TypeError(f"`kernel` must be a function decorated with triton.jit: got {type(kernel).__name__}")
    if len(grid) > 3:
        raise ValueError(f"`grid` must have at most three extents: got {grid}")
    bound = kernel.signature.bind(*arguments, **constants)
    bound.apply_defaults()
    constexprs = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    values = {name: value if name in constexprs else _tensor(name, value) for name, value in bound.arguments.items()}
    extents = (*grid, 1, 1)[:3]
    with _interpreting(), np.errstate(all="ignore"):
        program = _rewritten(kernel)
        interpreter.interpreter_builder.set_grid_dim(*extents)
        for place in itertools.product(*map(range, extents)):
            interpreter.interpreter_builder.set_grid_idx(*place)
            program(**values)


def unwritten(dtype: str) -> float:
    """What results hold before a kernel runs, so that a gap shows: NaN, or −1 among integers."""
    return -1 if dtype.startswith("int") else float("nan")


def _tensor(name: str, value: Any) -> tl.tensor | int | None:
    """The argument `value` as the interpreter wants it: a tensor of one element, for an array its address."""
    if value is None:
        return None
    if (
        isinstance(value, (int, float, np.number)) and value == 1
    ):  # compiled in by jax-triton: no `.to`, not even of 1.0
        return 1
    if isinstance(value, np.ndarray):
        pointee = tl.int1 if value.dtype == bool else getattr(tl, value.dtype.name, None)
        if not isinstance(pointee, tl.dtype):
            raise TypeError(f"`{name}` must have a dtype that Triton knows under the same name: got {value.dtype.name}")
        if not value.flags.c_contiguous:
            raise ValueError(f"`{name}` must be contiguous: got shape {value.shape}, strides {value.strides} in bytes")
        dtype, data = tl.pointer_type(pointee), np.array([value.ctypes.data], np.uint64)
    elif isinstance(value, (bool, np.bool_)):
        dtype, data = tl.int1, np.array([value], bool)
    elif isinstance(value, (int, np.integer)):  # 32 bits where they suffice, as the compiler has it
        dtype = tl.int32 if -(2**31) <= value < 2**31 else tl.int64
        data = np.array([value], dtype.name)
    elif isinstance(value, (float, np.floating)):
        dtype, data = tl.float32, np.array([value], np.float32)
    else:
        raise TypeError(f"`{name}` must be a numpy array, a number or None: got {type(value).__name__}")
    return tl.tensor(interpreter.TensorHandle(data, dtype), dtype)


def _rewritten(kernel: triton.JITFunction) -> Callable:
    """The Python function that interprets `kernel`: each assigned value becomes a tensor, as in the compiler."""
    if kernel.fn not in _PROGRAMS:  # not keyed by `kernel`, whose hash is that of its whole source
        names = ("interpreter_semantic", "_InterpreterComparison")  # globals of the interpreter that the new code reads
        tree = ast.parse(f"def outer({', '.join(names)}):\n    return {kernel.fn.__name__}")
        outer: Any = tree.body[0]
        outer.body[:0] = interpreter.ASTTransformer().visit(ast.parse(kernel.src)).body
        first_line = next(i for i, line in enumerate(kernel.raw_src) if line.lstrip().startswith("def "))
        ast.increment_lineno(ast.fix_missing_locations(tree), kernel.starting_line_number + first_line - 1)
        scope: dict[str, Callable] = {}
        exec(compile(tree, kernel.fn.__code__.co_filename, "exec"), kernel.fn.__globals__, scope)
        _PROGRAMS[kernel.fn] = scope["outer"](*(getattr(interpreter, name, None) for name in names))
    return _PROGRAMS[kernel.fn]


@contextlib.contextmanager
def _interpreting() -> Iterator[None]:
    """Lets `triton.language` act on numpy arrays while it is open."""
    with _LOCK:
        replacements = _replacements()
        try:
            for owner, name, _, after in replacements:
                setattr(owner, name, after)
            yield
        finally:
            for owner, name, before, _ in replacements:
                if before is not interpreter._MISSING:
                    setattr(owner, name, before)
                elif name in vars(owner):
                    delattr(owner, name)


@functools.cache
def _replacements() -> list[tuple[Any, str, Any, Any]]:
    """Owner, attribute, value before and value while interpreting, found once: Triton's search takes milliseconds."""
    scope = interpreter._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    for owner, name, value in _repairs():
        scope.set_attr(owner, name, value)
    first = {(id(owner), name): (owner, name, before) for owner, name, before in reversed(scope._changes)}
    found = [(owner, name, before, getattr(owner, name)) for owner, name, before in first.values()]
    scope.restore()
    return found


def _repairs() -> Iterator[tuple[Any, str, Any]]:
    """What Triton's interpreter lacks: owner, attribute, value."""
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle

    # Functions that a kernel calls are JITFunctions too, those of triton.language among them.
    yield triton.JITFunction, "__call__", lambda self, *args, **named: _rewritten(self)(*args, **named)
    # int() of an array of one element is an error in recent numpy.
    yield tl.tensor, "__index__", lambda self: int(self.handle.data.item())
    # Checks of integer overflow are computed, then ignored.
    options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    yield interpreter.interpreter_builder, "options", options

    # Every intermediate value makes a type, a shape and a table of dtypes anew, which took a third of the time.
    known: dict[tuple, dict[str, Any]] = {}
    shapes: dict[tuple, dict[str, Any]] = {}
    dtypes: dict[str, np.dtype] = {}

    def make_block_type(self, element_ty, shape, original=tl.block_type.__init__):
        key = (element_ty.name, *(getattr(extent, "value", extent) for extent in shape))
        if key not in known:
            original(self, element_ty, shape)
            known[key] = dict(vars(self))
        vars(self).update(known[key], element_ty=element_ty)

    def make_tensor(self, handle, type, original=tl.tensor.__init__):
        key = tuple(type.shape) if type.is_block() else ()
        if key not in shapes:
            original(self, handle, type)
            shapes[key] = dict(vars(self))
        vars(self).update(shapes[key], handle=handle, type=type, dtype=type.scalar)

    def numpy_dtype(dtype, original=interpreter._get_np_dtype):
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = original(dtype)
        return dtypes[name]

    yield tl.block_type, "__init__", make_block_type
    yield tl.tensor, "__init__", make_tensor
    yield interpreter, "_get_np_dtype", numpy_dtype

    # bf16 is kept as bit patterns. The interpreter would compute with the patterns as integers and truncate fp32.
    def narrow(source):
        return handle(source.data.astype(bfloat16).view(np.uint16), tl.bfloat16)

    def widen(source, *dtypes):
        if source.dtype.scalar not in dtypes:
            return source
        data = source.data.view(bfloat16) if source.dtype.scalar == tl.bfloat16 else source.data
        return handle(data.astype(np.float32), tl.float32)

    def cast(self, source, dtype, original=builder.cast_impl):
        source = widen(source, tl.bfloat16)
        return narrow(source) if dtype.scalar == tl.bfloat16 else original(self, source, dtype)

    def elementwise(original):
        def operation(self, *operands_and_function):
            *operands, function = operands_and_function
            if operands[0].dtype.scalar != tl.bfloat16:
                return original(self, *operands_and_function)
            result = original(self, *(widen(operand, tl.bfloat16) for operand in operands), function)
            return result if result.data.dtype == bool else narrow(result)

        return operation

    # numpy multiplies fp16 matrices one element at a time and rounds each sum.
    def dot(self, a, b, *rest, original=builder.create_dot):
        return original(self, widen(a, tl.bfloat16, tl.float16), widen(b, tl.bfloat16, tl.float16), *rest)

    yield builder, "cast_impl", cast
    yield builder, "binary_op", elementwise(builder.binary_op)
    yield builder, "unary_op", elementwise(builder.unary_op)
    yield builder, "create_dot", dot
    yield builder, "get_bf16", lambda self, value: narrow(self.get_fp32(value))  # Triton 3.6 has none
