"""Where a name is missing that others do not document, this package goes on, or says which versions it supports."""

import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import without_names
from jax_flash_jvp import launch, private
from jax_flash_jvp.kernels import jobs
from jax_flash_jvp.problem import Operands, Problem

ROOTS = "torch|jax|triton|forward_ad|_functorch|interpreter"
PACKAGES = {"torch": "torch_bridge", "jax": "jax_flash_jvp"}


@pytest.mark.thorough
@pytest.mark.parametrize("framework", PACKAGES)
def test_without_each_name(framework):
    pytest.importorskip(framework)
    command = [sys.executable, without_names.__file__, framework]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    got = dict(line.split(" ", 1) for line in printed.splitlines())
    text = without_names.source(framework)
    for path, said in got.items():
        missing = rf"`{path}_gone` is missing in \w+ [\w.+]+: this package supports \d.*"
        late = re.search(rf'return needed\("{path}"\)', text) or path in private.INTERPRETER  # by a call that needs it
        if late:
            expected = rf"right {missing} "
        elif re.search(rf'optional\("{path}"', text):
            expected = "right "
        else:
            expected = rf"{missing} "
        assert re.fullmatch(expected, said), f"{path}: {said}"
    assert len(got) > 20


def test_no_such_name_stands_elsewhere():
    """But for those that are asked for at every call, and are in the list."""
    listed = {path.rpartition(".")[2] for framework in PACKAGES for path in without_names.names(framework)}
    for path in (Path(private.__file__).parent.parent / package for package in PACKAGES.values()):
        for file in path.rglob("*.py"):
            if file.name != "private.py" and "kernels" not in file.parts:
                found = re.findall(rf"\b(?:{ROOTS})(?:\.\w+)*\.(_(?!_)\w+)", file.read_text())
                found += re.findall(r"\bfrom (?:torch|jax)\.(_\w+)", file.read_text())
                assert {*found} <= listed, file


class GPU(types.SimpleNamespace):
    local_hardware_id = 0


@pytest.fixture
def jax_triton(monkeypatch):
    """A stand-in for version 0.4 on a machine with an H200."""
    library = types.ModuleType("jax_triton.triton_lib")
    library.triton_kernel_call_lib = types.SimpleNamespace(
        TritonKernel=lambda *args, **named: ("kernel", args, named), get_compute_capability=lambda device: 90
    )
    library.CompilationResult = library.TensorDescriptor = object
    library.compile_ttir_to_ptx_inplace = lambda *args, **named: ("ptx", args, named)
    library.TensorDescMeta = type("TensorDescMeta", (), {"__required_keys__": frozenset({"key"})})
    library.TritonFunction = type("TritonFunction", (), {"_compile_kernel": lambda self, *args, **named: args})
    package = types.ModuleType("jax_triton")
    package.triton_lib = library
    monkeypatch.setitem(sys.modules, "jax_triton", package)
    monkeypatch.setitem(sys.modules, "jax_triton.triton_lib", library)
    monkeypatch.setattr(launch, "_imported", lambda: package)
    monkeypatch.setattr(launch, "_gpus", lambda: [GPU(compute_capability="9.0", core_count=132)])
    return package


def test_jax_triton_is_extended(jax_triton):
    assert launch.JaxTriton().descriptors
    library = jax_triton.triton_lib
    # what is not Gluon's is compiled as before, however it is called
    assert library.TritonFunction()._compile_kernel(1, 2) == (1, 2)
    assert library.compile_ttir_to_ptx_inplace(1, a=2) == ("ptx", (1,), {"a": 2})
    assert library.triton_kernel_call_lib.TritonKernel("name", 4, a=2) == ("kernel", ("name", 4), {"a": 2})


@pytest.mark.parametrize("path", private.HOPPER_FROM_JAX)
def test_the_portable_kernels_run_where_jax_triton_cannot_be_extended(path, jax_triton, monkeypatch, caplog):
    pytest.importorskip("triton")
    owner, _, name = path.rpartition(".")
    owner = private.needed(owner)
    if isinstance(owner, type(launch)) and owner.__name__.startswith("triton."):
        monkeypatch.delattr(owner, name)
    else:
        delattr(owner, name)
    before = dict(vars(jax_triton.triton_lib))
    launcher = launch.JaxTriton()
    assert vars(jax_triton.triton_lib) == before
    assert f"`{path}` is missing in" in caplog.text
    assert jobs._family("forward", launcher, Problem(1.0), Operands(None, None, None)).__name__.endswith(
        "portable.jobs"
    )


@pytest.mark.parametrize(("capability", "warns"), [("9.0", False), ("8.0", True)])
def test_gpus_of_one_process_are_asked_each(capability, warns, jax_triton, monkeypatch, caplog):
    gpus = [GPU(compute_capability="9.0", core_count=132), GPU(compute_capability=capability, core_count=108)]
    monkeypatch.setattr(launch, "_gpus", lambda: gpus)
    launch._check_kinds.cache_clear()
    assert launch.JaxTriton().multiprocessors == 108  # programs that wait for each other fit every one
    assert ("compute capabilities 8.0 and 9.0" in caplog.text) == warns
