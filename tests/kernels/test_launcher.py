"""A launch names what each parameter of its kernel is given."""

import dataclasses

import numpy as np
import pytest
import triton

from jax_flash_jvp.kernels.launcher import PLACEHOLDER, Launch, Output, Rows


@triton.jit
def kernel(A, B, n, OUT, MORE, WIDTH):
    pass


@triton.jit
def disordered(OUT, A, B, n, MORE, WIDTH):
    pass


LAUNCH = Launch(
    kernel, 3, dict(B=None, A=np.zeros(2)), dict(n=5), dict(MORE=None, OUT=Output((4,), "int32")), dict(WIDTH=16),
    num_warps=4, num_stages=1,
)  # fmt: skip


def test_arguments_are_in_the_order_of_the_kernel():
    assert [a is LAUNCH.inputs["A"] for a in LAUNCH.arrays()] == [True, True]  # any pointer does for what is never read
    assert LAUNCH.numbers() == [5]
    assert LAUNCH.allocations() == [Output((4,), "int32"), PLACEHOLDER]
    assert LAUNCH.results(["filled", "placeholder"]) == dict(OUT="filled", MORE=None)


def test_the_first_array_may_be_read_through_a_descriptor():
    rows = Rows(np.ones(2), 1, 1)
    launch = dataclasses.replace(LAUNCH, inputs=dict(A=rows, B=None))
    assert launch.arrays() == [rows, rows.array]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(inputs=dict(A=None)), "missing are B, unknown none"),
        (dict(scalars=dict(n=5, m=2)), "missing are none, unknown m"),
        (dict(constants=dict(WIDTH=16, A=2)), "each of its parameters once"),
        (dict(kernel=disordered), "disordered must take inputs, scalars, outputs and constexprs in this order"),
    ],
)
def test_wrong_names(change, message):
    with pytest.raises(TypeError, match=message):
        dataclasses.replace(LAUNCH, **change)
