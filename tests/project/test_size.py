"""Functions stay small enough to be read at once, and the modules of kernels keep their private parts to themselves."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINES, BRANCHES = 120, 30
PARAMETERS = 15  # of a function that runs on the GPU, but for a kernel itself, whose parameters are what a launch names
BRANCHING = ast.If | ast.IfExp | ast.For | ast.While | ast.comprehension | ast.ExceptHandler | ast.match_case
FILES = [path for package in ("jax_flash_jvp", "torch_bridge") for path in sorted((ROOT / package).rglob("*.py"))]


def functions(path):
    return [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def size(function):
    """(lines, branches), without signature and docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    lines = function.end_lineno - body[0].lineno + 1 if body else 0
    return lines, sum(isinstance(n, BRANCHING) for statement in body for n in ast.walk(statement))


def test_no_function_is_large():
    large = {
        f"{path.relative_to(ROOT).as_posix()}:{f.name}": size(f)
        for path in FILES
        for f in functions(path)
        if size(f)[0] > LINES or size(f)[1] > BRANCHES
    }
    assert not large, f"lines and branches: {large}"


@pytest.mark.parametrize("family", ["hopper"])
def test_parameters_are_grouped(family):
    for path in sorted((ROOT / "jax_flash_jvp/kernels" / family).glob("*.py")):
        for f in functions(path):
            on_the_gpu = any("jit" in ast.unparse(d) for d in f.decorator_list)
            kernel = any("do_not_specialize" in ast.unparse(d) for d in f.decorator_list)
            if on_the_gpu and not kernel:
                assert len(f.args.args) <= PARAMETERS, f"{path.name}:{f.name}"


def test_kernels_import_no_private_names():
    for path in sorted((ROOT / "jax_flash_jvp/kernels").rglob("*.py")):
        for n in ast.walk(ast.parse(path.read_text())):
            if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("jax_flash_jvp"):
                private = [a.name for a in n.names if a.name.startswith("_")]
                assert not private, f"{path.name} imports {private}"


def test_sizes_are_counted():
    text = 'def f(a):\n    """What it does."""\n    if a:\n        return [b for b in a]\n    return 1 if a else 2\n'
    assert size(ast.parse(text).body[0]) == (3, 3)
