"""Errors about arguments that the two frameworks do not share; `jax_flash_jvp/problem.py` has the others."""

import math
import numbers
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jax_flash_jvp.problem import Operands, check_operands
from torch_bridge.private import dispatch_modes, is_functorch_wrapped_tensor


def check_tensor(name: str, a: Any) -> None:
    if not isinstance(a, Tensor):
        raise TypeError(f"`{name}` must be a tensor: got {type(a).__name__}")


def known(a: Tensor) -> list[int] | None:
    """The numbers of a tensor that may be read at once."""
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing() or dispatch_modes is None or dispatch_modes()
    if traced or type(a) is not Tensor or is_functorch_wrapped_tensor(a):
        return None
    return a.flatten().tolist() if a.device.type == "cpu" else None


def check_number(name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        raise TypeError(f"`{name}` must be a number, since it has no gradient: got a tensor; pass its `item()`")
    if type(value) not in (int, float):
        if torch.compiler.is_compiling() or isinstance(value, torch.SymInt | torch.SymFloat):
            return
        try:
            if isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real):  # numpy's would lose a part
                raise TypeError
            value = math.fabs(value)
        except TypeError as error:
            raise TypeError(f"`{name}` must be a number: got {value!r}") from error
        except OverflowError:
            value = math.inf
    if not abs(value) <= torch.finfo(torch.float32).max:
        raise ValueError(f"`{name}` must be finite in float32: got {value}")


def check_flag(name: str, value: Any) -> None:
    if type(value).__name__ not in ("bool", "bool_", "SymBool") and not torch.compiler.is_compiling():  # numpy's too
        raise TypeError(f"`{name}` must be True or False: got {type(value).__name__}")


def check_devices(query: Tensor, named: Iterable[tuple[str, Any]]) -> None:
    for name, a in named:
        check_tensor(name, a)
        if a.device != query.device:
            raise ValueError(f"`{name}` must be on the device of `query`: got {a.device} and {query.device}")
        if a.is_nested:
            where = " where `query` is not one" if not query.is_nested else ""
            raise ValueError(
                f"`{name}` must not be a nested tensor{where}: call scaled_dot_product_attention with `query`, `key` and `value` "
                "all nested, or pad it"
            )
        if (
            type(a) is not type(query)
            and a.is_floating_point()
            and hasattr(a, "placements") != hasattr(query, "placements")
        ):
            must = "must not be a DTensor" if hasattr(a, "placements") else "must be a DTensor"
            raise ValueError(
                f"`{name}` {must} where `query` is {'not one' if hasattr(a, 'placements') else 'one'}: distribute both"
            )
        if a.layout != torch.strided:
            raise ValueError(f"`{name}` must not be sparse: got {a.layout}; pass its `to_dense()`")


def check_integers(name: str, a: Any, query: Tensor, count: int) -> None:
    """One for each of so many sequences."""
    check_devices(query, ((name, a),))
    if a.dim() != 1 or a.shape[0] != count:
        raise ValueError(f"`{name}` must have shape ({count},), one number for each sequence: got {tuple(a.shape)}")
    if a.dtype.is_floating_point or a.dtype.is_complex or a.dtype == torch.bool:
        raise TypeError(f"`{name}` must be of integers: got {a.dtype}; cast it")


class Described(NamedTuple):
    """Shape [B, T, N, H] and dtype of an array."""

    shape: tuple[int, ...]
    dtype: torch.dtype


_checked: set[tuple] = set()  # found good


def check_shapes(*described: Any) -> None:
    """Checks the shapes [B, N, T, D] of query, key and value, then their dtypes."""
    known = not torch.compiler.is_compiling()
    try:
        if known and described in _checked:
            return
    except TypeError:  # symbolic
        known = False
    q, k, v, *dtypes = described
    query, key, value = (Described(s[::2] + s[1::2], d) for s, d in zip((q, k, v), dtypes, strict=True))
    check_operands(Operands(query, key, value))
    if known and len(_checked) < 4096:
        _checked.add(described)
