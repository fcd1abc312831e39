"""The kernels on torch tensors without a GPU."""

import ctypes

import numpy as np
import torch
from ml_dtypes import bfloat16

from jax_flash_jvp import interpret


class NumpyLauncher:
    """The kernels on torch CPU tensors, through Triton's interpreter."""

    target = "interpret"
    descriptors = False
    multiprocessors = None

    def __init__(self):
        self.launched = []

    def strides(self, array):
        return array.stride()

    def contiguous(self, array):
        return array.contiguous()

    def round_to_tf32(self, array):
        from torch_bridge.launch import TorchLauncher

        return TorchLauncher.round_to_tf32(self, array)

    def padded(self, array, n):
        return torch.nn.functional.pad(array, (0, n))

    def summed(self, array, by_column, shape, dtype):
        from torch_bridge.launch import TorchLauncher

        return TorchLauncher.summed(self, array, by_column, shape, dtype)

    def launch(self, launch):
        results = [
            torch.full(o.shape, interpret.unwritten(o.dtype), dtype=getattr(torch, o.dtype))
            for o in launch.allocations()
        ]
        arrays = [*map(memory, launch.arrays()), *launch.numbers(), *map(memory, results)]
        interpret.launch(launch.kernel, (launch.programs,), *arrays, **launch.constants)
        return launch.results(results)


def memory(a):
    """From its first element on, what a strided tensor lies in."""
    extent = 1 + sum((n - 1) * s for n, s in zip(a.shape, a.stride(), strict=True))
    flat = a.detach().as_strided((extent,), (1,))
    return flat.view(torch.int16).numpy().view(bfloat16) if a.dtype == torch.bfloat16 else flat.numpy()


def at(address, like):
    """The array of that size and dtype that begins at an address."""
    return np.frombuffer((ctypes.c_char * like.nbytes).from_address(address), like.dtype)


class PlannedLauncher(NumpyLauncher):
    """Keeps what a plan is made of."""

    def contiguous(self, array):
        from torch_bridge.launch import TorchLauncher

        return TorchLauncher.contiguous(self, array)

    def padded(self, array, n):
        from torch_bridge.launch import TorchLauncher

        return TorchLauncher.padded(self, array, n)

    def launch(self, launch):
        from torch_bridge.plans import Launched

        results = super().launch(launch)
        arguments = [*launch.arrays(), *launch.numbers(), *results.values()]
        types = [memory(a) if isinstance(a, torch.Tensor) else None for a in arguments]

        def run(addresses):
            numbers = [a if t is None else at(a, t) for a, t in zip(addresses, types, strict=True)]
            nothing = np.full(1, np.nan, np.float32)
            arrays = [nothing if a is None else a for a in numbers]
            interpret.launch(launch.kernel, (launch.programs,), *arrays, **launch.constants)
            assert np.isnan(nothing).all()

        self.launched.append(Launched(run, arguments, [a for a in results.values() if a is not None]))
        return results
