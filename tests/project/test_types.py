"""What the public functions say of their arguments and results to a type checker."""

import inspect
import pathlib
import typing

import pytest

import jax_flash_jvp
from jax_flash_jvp.attention import IMPLEMENTATIONS, Options, dot_product_attention
from jax_flash_jvp.problem import Implementation

api = pytest.importorskip("mypy.api")

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


def test_results_go_by_what_is_asked_for(checked):
    assert checked(PROGRAM) == (0, "Success: no issues found in 1 source file\n")


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
