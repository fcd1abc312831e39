"""What a framework provides to run kernels: the contract between the jobs and JAX, PyTorch or numpy."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol


class Output(NamedTuple):
    """An array that a kernel writes, contiguous."""

    shape: tuple[int, ...]
    dtype: str


PLACEHOLDER = Output((1,), "float32")  # for an output that no kernel touches, then or later: any pointer will do


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
        return (b, h, length, d), (s_b, s_h, s_l, s_d), (1, 1, self.rows, self.channels)


class Launcher(Protocol):
    """Launches kernels whose parameters are, in this order: inputs, scalars, outputs, constexprs."""

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

    def summed(self, array: Any, by_column: bool, like: Any) -> Any:
        """The sum of float32 [B, N, L] in the shape and dtype of a bias that varies along the keys if `by_column`, along the
        queries if its third axis says so, and not along the other axes of length one."""
        ...

    def launch(
        self,
        kernel: Any,
        grid: int,
        inputs: Sequence[Any],
        scalars: Sequence[int | float],
        outputs: Sequence[Output],
        constants: dict[str, Any],
        num_warps: int,
        num_stages: int,
        registers: int | None = None,
    ) -> Sequence[Any]:
        """Run `grid` programs, which begin in order, and return the outputs.  A None input is never read: any pointer will do.
        `registers` caps those of a thread, but not with jax-triton 0.3."""
        ...


def pointers(inputs: Sequence[Any]) -> list[Any]:
    """`inputs` with some array in the place of each None."""
    present = next((i.array if isinstance(i, Rows) else i for i in inputs if i is not None), None)
    return [present if i is None else i for i in inputs]
