"""What the public functions say of their arguments and results to a type checker."""

import inspect
import pathlib
import typing

import pytest

import jax_flash_jvp
from jax_flash_jvp.attention import IMPLEMENTATIONS, Options, dot_product_attention
from jax_flash_jvp.problem import Implementation

api = pytest.importorskip("mypy.api")

TORCH = """
from torch import Tensor
from typing import assert_type
from torch_bridge import flash_attn_func
from torch_bridge import scaled_dot_product_attention as attend

def f(q: Tensor, some: bool) -> None:
    assert_type(attend(q, q, q, is_causal=True, enable_gqa=True), Tensor)
    assert_type(attend(q, q, q, return_lse=True), tuple[Tensor, Tensor])
    assert_type(attend(q, q, q, return_lse=some), Tensor | tuple[Tensor, Tensor])
    assert_type(flash_attn_func(q, q, q, 0.0, None, True), Tensor)
    assert_type(flash_attn_func(q, q, q, None, True, 0.5), Tensor)
    assert_type(flash_attn_func(q, q, q, return_attn_probs=True), tuple[Tensor, Tensor, None])
"""
PROGRAM = """
import jax
from typing import assert_type
from jax_flash_jvp import dot_product_attention as attend

def f(q: jax.Array, some: bool) -> None:
    assert_type(attend(q, q, q, is_causal=True, implementation="portable"), jax.Array)
    assert_type(attend(q, q, q, return_residual=True), tuple[jax.Array, jax.Array])
    assert_type(attend(q, q, q, return_residual=some), jax.Array | tuple[jax.Array, jax.Array])
"""


@pytest.fixture
def checked(tmp_path, monkeypatch):
    monkeypatch.setenv("MYPYPATH", str(pathlib.Path(jax_flash_jvp.__file__).parent.parent))

    def check(program):
        (tmp_path / "program.py").write_text(program)
        options = ["--config-file=", "--ignore-missing-imports", "--follow-imports=silent"]
        said, _, code = api.run([*options, str(tmp_path / "program.py")])
        return code, said

    return check


@pytest.mark.thorough
def test_results_go_by_what_is_asked_for(checked):
    assert checked(PROGRAM) == (0, "Success: no issues found in 1 source file\n")


@pytest.mark.thorough  # reads all of PyTorch
def test_results_in_torch_go_by_what_is_asked_for(checked):
    pytest.importorskip("torch")
    assert checked(TORCH) == (0, "Success: no issues found in 1 source file\n")
    code, said = checked(TORCH.replace("is_causal", "causal"))
    assert code == 1
    assert "No overload variant" in said


@pytest.mark.thorough
@pytest.mark.parametrize("change", [("portable", "cudnn"), ("is_causal", "causal")])
def test_wrong_arguments_are_found(change, checked):
    code, said = checked(PROGRAM.replace(*change))
    assert code == 1
    assert "No overload variant" in said


def test_overloads_have_all_keywords():
    parameters = inspect.signature(dot_product_attention).parameters.values()
    keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert {*Options.__annotations__, "return_residual"} == keywords
    assert (None, *typing.get_args(Implementation)) == IMPLEMENTATIONS
    assert len(typing.get_overloads(dot_product_attention)) == 3


def test_overloads_in_torch_have_all_keywords():
    attention = pytest.importorskip("torch_bridge.attention")
    function = attention.scaled_dot_product_attention
    parameters = inspect.signature(function).parameters.values()
    keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert {*attention.Options.__annotations__, "return_lse"} == keywords
    assert len(typing.get_overloads(function)) == 3
