"""What a framework provides to run kernels: the contract between the jobs and JAX, PyTorch or numpy."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class Output(NamedTuple):
    """An array that a kernel writes, contiguous."""

    shape: tuple[int, ...]
    dtype: str


PLACEHOLDER = Output((1,), "float32")  # for an output that the kernel never touches: any pointer will do


class Rows(NamedTuple):
    """An input that a kernel reads through a TMA descriptor: [B, H, L, D] of an array [B, L, H, D], in tiles of so many rows
    and channels.  Where the array is None there is none, and the kernel's parameter is a constant None."""

    array: Any
    rows: int
    channels: int

    def view(self, strides: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Shape, strides and block of the descriptor, for an array of these strides."""
        b, length, h, d = self.array.shape
        s_b, s_l, s_h, s_d = strides
        return (b, h, length, d), (s_b, s_h, s_l, s_d), self.block

    @property
    def block(self) -> tuple[int, ...]:
        return (1, 1, self.rows, self.channels)


class Blocks(NamedTuple):
    """An array, contiguous, that a kernel reads or adds to through a TMA descriptor, in blocks of this shape."""

    array: Any
    block: tuple[int, ...]

    def view(self, strides: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return tuple(self.array.shape), tuple(strides), self.block


DESCRIBED = (Rows, Blocks)


class InPlace(NamedTuple):
    """An output of an earlier launch, or its `Blocks`, that a kernel changes; nobody reads what it was before."""

    of: Any

    @property
    def array(self) -> Any:
        return self.of.array if isinstance(self.of, DESCRIBED) else self.of


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel to run, and what its parameters are given, by name.  A kernel has them in the order inputs, scalars, outputs,
    constexprs."""

    kernel: Any
    programs: int  # which begin in order
    inputs: Mapping[str, Any]  # arrays, `Rows` and `Blocks`; None is never read
    scalars: Mapping[str, int | float]
    outputs: Mapping[str, Output | InPlace | None]  # None is never written
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int
    registers: int | None = None  # of a thread, at most; jax-triton 0.3 has no say in it

    def __post_init__(self):
        given = [*self.inputs, *self.scalars, *self.outputs, *self.constants]
        names = [*self.kernel.arg_names]
        if sorted(given) != sorted(names):
            missing, unknown = (", ".join(sorted(s)) or "none" for s in ({*names} - {*given}, {*given} - {*names}))
            raise TypeError(
                f"a launch of {self.kernel.__name__} must name each of its parameters once: missing are {missing}, "
                f"unknown {unknown}"
            )
        kinds = (self.inputs, self.scalars, self.outputs, self.constants)
        order = [next(i for i, kind in enumerate(kinds) if name in kind) for name in names]
        if order != sorted(order):
            raise TypeError(
                f"kernel {self.kernel.__name__} must take inputs, scalars, outputs and constexprs in this order"
            )
        new = [isinstance(o, Output) for o in self._in_order(self.outputs) if o is not None]
        if new != sorted(new):
            raise TypeError(f"kernel {self.kernel.__name__} must take outputs that are changed in place before others")

    def __str__(self) -> str:  # in the log
        return f"{self.kernel.__name__} in {self.programs} programs of {self.num_warps} warps"

    def _in_order(self, given: Mapping[str, Any]) -> list[Any]:
        return [given[name] for name in self.kernel.arg_names if name in given]

    def arrays(self) -> list[Any]:
        """The inputs in order, with some array in the place of each None."""
        inputs = self._in_order(self.inputs)
        present = next((i.array if isinstance(i, DESCRIBED) else i for i in inputs if i is not None), None)
        return [present if i is None else i for i in inputs]

    def numbers(self) -> list[int | float]:
        """The scalars in order."""
        return self._in_order(self.scalars)

    def allocations(self) -> list[Output]:
        """The outputs in order that are to be allocated, with a placeholder for each that is not written."""
        outputs = self._in_order(self.outputs)
        return [PLACEHOLDER if o is None else o for o in outputs if not isinstance(o, InPlace)]

    def in_place(self) -> dict[str, InPlace]:
        """The other outputs, in order."""
        outputs = ((name, self.outputs[name]) for name in self.kernel.arg_names if name in self.outputs)
        return {name: o for name, o in outputs if isinstance(o, InPlace)}

    def written(self, arrays: Sequence[Any]) -> dict[str, Any]:
        """All outputs in order by name, with these arrays for the `allocations`."""
        rest = iter(arrays)
        outputs = ((name, self.outputs[name]) for name in self.kernel.arg_names if name in self.outputs)
        return {name: o if isinstance(o, InPlace) else next(rest) for name, o in outputs}

    def results(self, arrays: Sequence[Any]) -> dict[str, Any]:
        """By name, of the `allocations`, which the kernel has filled, and of what it has changed; None where there was no
        output."""
        written = ((n, a.array if isinstance(a, InPlace) else a) for n, a in self.written(arrays).items())
        return {n: None if self.outputs[n] is None else a for n, a in written}


class Launcher(Protocol):
    """Launches kernels on the arrays of a framework."""

    target: int | str  # compute capability, 90 for sm_90, or "interpret": selects the tiles
    descriptors: bool  # can it pass `Rows`?
    multiprocessors: int | None  # of the GPU, if known

    def strides(self, array: Any) -> tuple[int, ...]:
        """Strides of `array` in elements."""
        ...

    def round_to_tf32(self, array: Any) -> Any:
        """A float32 array rounded to the nearest values of 10 mantissa bits."""
        ...

    def padded(self, array: Any, n: int) -> Any:
        """`array` with n zeros behind each row of its last axis."""
        ...

    def summed(self, array: Any, by_column: bool, shape: Sequence[int], dtype: str) -> Any:
        """The sum of float32 [B, N, L] in the shape of a bias that varies along the keys if `by_column`, along the
        queries if its third axis says so, and not along the other axes of length one."""
        ...

    def launch(self, launch: Launch) -> dict[str, Any]:
        """Run the kernel, and return its outputs by name; None for one that is not written."""
        ...
