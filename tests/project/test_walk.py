"""A call gets from the public function to a Hopper kernel through few files, which a page lists."""

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton")

import jax_flash_jvp
from compiled import Recorder
from jax_flash_jvp import launch
from jax_flash_jvp.problem import Operands

PACKAGE = Path(jax_flash_jvp.__file__).parent
PAGE = Path(__file__).parents[2] / "docs/dev/hopper.md"
FILES = 14
QUERY, KEYS = (jax.ShapeDtypeStruct((2, length, 4, 64), jnp.bfloat16) for length in (1024, 2048))


class Launcher(Recorder):
    on_shards = False

    def launch(self, launch):
        super().launch(launch)
        return launch.results([jnp.zeros(o.shape, o.dtype) for o in launch.allocations()])


def holds_query(argument):
    if isinstance(argument, Operands | tuple | list):
        return any(map(holds_query, argument))
    if isinstance(argument, dict):
        return any(map(holds_query, argument.values()))
    return getattr(argument, "shape", None) == QUERY.shape


def files_that_are_given_query(monkeypatch):
    """In the order in which one of their functions first is, up to that of the kernel."""
    recorder, files = Launcher(90), {}

    def look(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + 2]
            if any(holds_query(frame.f_locals.get(name)) for name in given):
                files[Path(code.co_filename)] = None

    monkeypatch.setattr(launch, "JaxTriton", lambda: recorder)
    traced = jax.jit(lambda *x: jax_flash_jvp.dot_product_attention(*x)).trace
    before = sys.getprofile()
    sys.setprofile(look)
    try:
        traced(QUERY, KEYS, KEYS).lower(lowering_platforms=("cuda",))
    finally:
        sys.setprofile(before)
    [(kernel, *_)] = recorder.launches
    files[Path(kernel.fn.__code__.co_filename)] = None
    return [path.relative_to(PACKAGE).as_posix() for path in files]


def test_a_call_goes_through_few_files(monkeypatch):
    files = files_that_are_given_query(monkeypatch)
    [row] = re.findall(r"^\| How does a call get here\? .*", PAGE.read_text(), re.MULTILINE)
    assert files == re.findall(r"`([\w/]+\.py)`", row)
    assert len(files) <= FILES
