"""Eight host devices, no GPU tests without a GPU, and which kernels a function runs."""

import collections
import contextlib
import ctypes
import functools
import gc
import importlib.metadata
import importlib.util
import inspect
import itertools
import os
import pathlib
import sys

import pytest

import mutants
import support

HAS_GPU = any(pathlib.Path("/dev").glob("nvidia[0-9]*"))

# before JAX is imported
flags = ["--xla_force_host_platform_device_count=8"]
# the time goes into compilation
if HAS_GPU:
    flags += ["--xla_gpu_autotune_level=0"]
else:
    flags += ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
    if importlib.metadata.version("jaxlib").startswith("0.10."):  # the older emitters, in a third of it; gone since
        flags += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def pytest_addoption(parser):
    parser.addoption("--write-support", action="store_true", help="write the table of docs/features.md from this run")


def pytest_terminal_summary(terminalreporter, config):
    if config.getoption("--write-support"):
        reports = [r for outcome in ("passed", "failed") for r in terminalreporter.stats.get(outcome, ())]
        support.write([(*value, r.passed) for r in reports for name, value in r.user_properties if name == "supports"])


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.keywords and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


class Memory:
    """Of this process, in bytes, and how much it may have before what was compiled is forgotten."""

    most = 1_000_000_000

    @staticmethod
    def resident():
        pages = pathlib.Path("/proc/self/statm")
        return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if pages.exists() else 0


@pytest.fixture(autouse=True)
def bounded_memory():
    """JAX keeps every program that it compiles, some 20 MB each, and Dynamo too: a worker would come to have 8 GB."""
    yield
    if Memory.resident() < Memory.most:
        return
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # of glibc: gives freed memory back
        ctypes.CDLL(None).malloc_trim(0)
    Memory.most = max(Memory.most, Memory.resident() + 500_000_000)


@pytest.fixture
def eager_kernels():
    """eager_kernels(function, *args) -> its result, and which kernels were called while it ran outside jit."""
    from jax_flash_jvp.kernel_primitive import eager_calls

    def count(function, *args):
        eager_calls.clear()
        return function(*args), collections.Counter(eager_calls)

    return count


@pytest.fixture
def jitted_kernels():
    """jitted_kernels(function, *args) -> the kernels in its traced program that some result depends on.

    Loop bodies and each branch of a conditional count once.
    """
    import jax
    from jax.extend.core import jaxprs_in_params
    from jax.interpreters import partial_eval

    from jax_flash_jvp.kernel_primitive import kernels

    def kernels_in(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name in kernels:
                yield equation.primitive.name
            elif equation.primitive.name.startswith("custom_jvp_call"):  # not its rule
                yield from kernels_in(equation.params["call_jaxpr"].jaxpr)
            else:
                for inner in jaxprs_in_params(equation.params):
                    yield from kernels_in(getattr(inner, "jaxpr", inner))

    def count(function, *args):
        jaxpr = jax.make_jaxpr(function)(*args).jaxpr
        live, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
        return collections.Counter(kernels_in(live))

    return count


@functools.cache
def _compiled_oracle(make):
    import jax

    import oracle

    return jax.jit(make(oracle.attention))


@pytest.fixture
def check(eager_kernels, jitted_kernels):
    """check(make, args, kernels, jitted): make(attention), a function of `args`, agrees with make(oracle), in float64.

    `kernels`: the kernels it runs, {name: times}; `jitted`: those of its traced program, if others.  None: any.
    `eager`: also run it outside jit.  `make_expected`: instead of make, for the oracle; compiled once.
    """
    import jax
    import numpy as np

    import jax_flash_jvp

    def named(counts):
        return {"attention_" + name: times for name, times in counts.items()}

    def check(make, args, kernels=None, jitted=None, *, eager=True, make_expected=None):
        with jax.enable_x64(True):
            args = jax.tree.map(jax.numpy.asarray, args)
            function = make(jax_flash_jvp.dot_product_attention)
            compiled = jax.jit(function)
            expected = _compiled_oracle(make_expected or make)(*args)
            got, called = eager_kernels(function if eager else compiled, *args)
            for results in (got, compiled(*args))[not eager :]:
                assert jax.tree.structure(results) == jax.tree.structure(expected)
                for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
                    np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)
            if kernels is not None:
                assert called == named(kernels)
            if jitted is not None or kernels is not None:
                assert jitted_kernels(compiled, *args) == named(kernels if jitted is None else jitted)

    return check


@pytest.fixture
def broken_kernels(tmp_path, monkeypatch):
    """broken_kernels(module, old, new): the portable kernels, with that change in the source of one of their modules."""
    from jax_flash_jvp.kernels.portable import backward, bias, forward, means, one_tile, visibility

    def replace(module, old, new):
        path = tmp_path / "broken.py"
        path.write_text(mutants.broken(inspect.getsource(module), old, new))
        spec = importlib.util.spec_from_file_location("broken", path)
        broken = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(broken)
        for user, name in itertools.product((forward, backward, bias, means, one_tile, visibility), vars(broken)):
            if hasattr(user, name) and not name.startswith("__"):
                monkeypatch.setattr(user, name, getattr(broken, name))

    return replace
