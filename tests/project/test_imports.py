"""No module imports, at once or when it runs, one that imports it; PyTorch's half does not need JAX."""

import ast
import graphlib
import importlib.util
import pathlib
import subprocess
import sys

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


WITHOUT_JAX = """
import sys
sys.modules |= dict.fromkeys(("jax", "jaxlib", "jax_triton"))  # importing them raises
import torch
from torch_bridge import scaled_dot_product_attention as attention

q, t_q = torch.randn(2, 1, 2, 8, 4).requires_grad_()
o, t_o = torch.func.jvp(lambda q: attention(q, q, q, is_causal=True), (q,), (t_q,))
torch.autograd.grad(t_o.square().sum(), q)
"""


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_pytorch_without_jax():
    """README says how to install so."""
    process = subprocess.run([sys.executable, "-c", WITHOUT_JAX], cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
