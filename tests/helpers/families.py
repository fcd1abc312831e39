"""The families of kernels, for tests on a GPU."""

import importlib.metadata

import jax
import pytest

hopper = pytest.mark.skipif(
    int(importlib.metadata.version("jax-triton").split(".")[1]) < 4
    or all(d.platform != "gpu" or d.compute_capability != "9.0" for d in jax.devices()),
    reason="the Hopper kernels need jax-triton 0.4 and a Hopper GPU",
)
FAMILIES = ["portable", pytest.param("hopper", marks=hopper)]
