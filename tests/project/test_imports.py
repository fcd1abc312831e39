"""No module imports, at once or when it runs, one that imports it."""

import ast
import graphlib
import pathlib

import pytest

import jax_flash_jvp

ROOT = pathlib.Path(jax_flash_jvp.__file__).parent.parent


def imports(package):
    """The modules of a package, each with those that it imports anywhere."""
    paths = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in (ROOT / package).rglob("*.py")}
    found = {}
    for name, path in paths.items():
        nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom) and n.module]
        named = {n.module for n in nodes} | {f"{n.module}.{alias.name}" for n in nodes for alias in n.names}
        found[name] = named & paths.keys() - {name}
    return found


@pytest.mark.parametrize("package", ["jax_flash_jvp", "torch_bridge"])
def test_no_circles(package):
    order = [*graphlib.TopologicalSorter(imports(package)).static_order()]  # raises where there is a circle
    assert len(order) > 10
