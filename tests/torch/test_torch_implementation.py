"""Which code computes attention, by an argument or by `use_implementation`: here the kernels run interpreted, on a CPU."""

import contextlib
import re
import types

import pytest

torch = pytest.importorskip("torch")
launch = pytest.importorskip("torch_bridge.launch")

from torch.func import grad, jvp  # noqa: E402
from torch.utils._pytree import tree_map  # noqa: E402

from jax_flash_jvp.problem import Problem  # noqa: E402
from torch_bridge import compute, flash_attn_func, patch, reference, use_implementation  # noqa: E402
from torch_bridge import scaled_dot_product_attention as sdpa  # noqa: E402
from torch_launchers import NumpyLauncher  # noqa: E402
from torch_oracle import naive, normal  # noqa: E402

x, tx = (tuple(normal(1, 2, 5, 4, seed=seed + i).float() for i in range(3)) for seed in (0, 3))


@pytest.fixture
def told(monkeypatch):
    """A machine that takes its CPU for a GPU: what each of its launches was told."""
    seen = []

    def computed(name, args, groups, case):
        seen.append((name, case.problem.implementation))
        groups = tree_map(lambda a: a.detach() if isinstance(a, torch.Tensor) else a, groups)  # for numpy
        return tuple(launch.run(NumpyLauncher(), name, case, **groups))

    monkeypatch.setattr(compute, "on_nvidia", lambda a: a.device.type == "cpu")
    gpu = types.SimpleNamespace(planned=lambda name, args: None, served=launch.served, computed=computed)
    monkeypatch.setattr(compute, "_launch", lambda: gpu)
    return seen


def test_an_argument_reaches_every_derivative(told):
    attend = lambda *x: sdpa(*x, implementation="portable")
    value = lambda *x: attend(*x).square().sum()
    torch.testing.assert_close(attend(*x), naive(*x))
    jvp(attend, x, tx)
    jvp(grad(value), x, tx)
    leaves = [a.clone().requires_grad_() for a in x]
    torch.autograd.grad(jvp(attend, tuple(leaves), tx)[1].square().sum(), leaves)
    assert {name for name, _ in told} == {"forward", "forward_dual", "backward_dual"}
    assert {implementation for _, implementation in told} == {"portable"}


def test_the_reference_by_request(told, caplog):
    with caplog.at_level("DEBUG", "torch_bridge"):
        o, t_o = jvp(lambda *x: sdpa(*x, implementation="reference"), x, tx)
    torch.testing.assert_close((o, t_o), jvp(naive, x, tx))
    assert told == []
    assert "attention forward_dual: the reference computes it: it is asked for" in caplog.text


def test_on_a_cpu_the_reference_by_request(monkeypatch):
    """Not PyTorch's own flash attention."""
    q, ran = normal(1, 2, 64, 16).float(), []
    run = reference.run
    monkeypatch.setattr(reference, "run", lambda name, *args, **groups: ran.append(name) or run(name, *args, **groups))
    sdpa(q, q, q)
    assert ran == []
    torch.testing.assert_close(sdpa(q, q, q, implementation="reference"), naive(q, q, q))
    assert ran == ["forward"]


def test_the_log_says_who_computes_third_derivatives(caplog):
    tangent = lambda *x: jvp(sdpa, x, tx)[1]
    with caplog.at_level("DEBUG", "torch_bridge"):
        jvp(tangent, x, tx)
    assert "attention forward_dual: the reference alone computes this derivative of it" in caplog.text


def test_use_implementation_reaches_models(told):
    layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True, dropout=0.0)
    with use_implementation("portable"), patch():
        o = layer(normal(1, 5, 8).float())
        flash_attn_func(*(a.transpose(1, 2) for a in x))
        with use_implementation(None):
            sdpa(*x)
        sdpa(*x, implementation="triton")
    o.sum().backward()  # of a call that was told, after the context is closed
    sdpa(*x)
    assert [name for _, name in told] == ["portable", "portable", None, "triton", "portable", None]


def test_compiled_functions_see_it():
    graphs = []

    def backend(module, inputs):
        graphs.append(module.code)
        return module

    def inside(*x):
        with use_implementation("reference"):
            return sdpa(*x)

    for function in (sdpa, inside):
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        torch.testing.assert_close(compiled(*x), naive(*x))
        with use_implementation("reference"):
            torch.testing.assert_close(compiled(*x), naive(*x))
        compiled(*x)
    torch.compile(sdpa, backend=backend, fullgraph=True)(*x, implementation="reference")
    assert ["implementation=xla" in code for code in graphs] == [False, True, *[True] * (len(graphs) - 2)]


@pytest.mark.parametrize(
    ("arguments", "name", "text"),
    [
        (
            x,
            "hoper",
            "`implementation` must be one of (None, 'triton', 'hopper', 'portable', 'reference'): got 'hoper'",
        ),
        (x, "xla", "got 'xla'; the tiled reference is 'reference'"),
        (
            x,
            "triton",
            "'triton' needs an NVIDIA GPU, and these tensors are on cpu; leave `implementation` None, or ask",
        ),
        (
            [a.double() for a in x],
            "portable",
            "'portable' does not serve float64 arrays (cast them to float32); leave",
        ),
    ],
)
def test_errors(arguments, name, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        sdpa(*arguments, implementation=name)
    with pytest.raises(ValueError, match=re.escape(text)), use_implementation(name):
        sdpa(*arguments)


def test_kernels_that_are_asked_for_need_triton(told, monkeypatch):
    monkeypatch.setattr(compute, "TRITON", False)
    with pytest.raises(ImportError, match="'triton' needs Triton, which is not installed"):
        sdpa(*x, implementation="triton")


def test_what_the_kernels_that_are_asked_for_lack(monkeypatch):
    q = normal(1, 2, 5, 4).half()
    case = reference.Case(Problem(0.5, implementation="hopper"))
    with pytest.raises(
        ValueError, match="'hopper' does not serve tensors whose strides or addresses are not multiples"
    ):
        launch.run(NumpyLauncher(), "forward", case, (q, q, q, None))

    def no_tile(*args, **groups):
        raise NotImplementedError("no tile")

    monkeypatch.setattr(launch, "TorchLauncher", lambda device: types.SimpleNamespace(device=device))
    monkeypatch.setattr(launch, "_on", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(launch, "run", no_tile)
    with pytest.raises(NotImplementedError, match="no tile"):
        launch.computed("forward", [q], dict(x=(q, q, q, None)), case)
    assert launch.computed("forward", [q], dict(x=(q, q, q, None)), reference.Case(Problem(0.5))) is None
