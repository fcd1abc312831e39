"""A launch names what each parameter of its kernel is given."""

import ast
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import triton

from jax_flash_jvp import kernels
from jax_flash_jvp.kernels.features import Axes, Features
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


def passed_fields(source):
    """Fields of FEATURES that are no bool and go into a call as they are."""
    of_axes = {field.name for field in dataclasses.fields(Features) if field.type is Axes}
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    arguments = [a for call in calls for a in (*call.args, *(k.value for k in call.keywords))]
    fields = [a for a in arguments if isinstance(a, ast.Attribute) and ast.unparse(a.value) == "FEATURES"]
    return [ast.unparse(a) for a in fields if a.attr in of_axes]


def test_no_field_of_axes_is_passed_to_a_function():
    """Triton 3.6 does not compile that; newer ones, which the tests have, do."""
    assert passed_fields("head_slice(X, size, FEATURES.mask)") == ["FEATURES.mask"]
    sources = Path(kernels.__file__).parent.rglob("*.py")
    assert {path.name: fields for path in sources if (fields := passed_fields(path.read_text()))} == {}
