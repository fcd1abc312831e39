"""Modules of PyTorch that a transformer or a U-Net holds, in a JVP under `patch()`: eager and compiled, in float64."""

import threading
import warnings

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from functorch.compile import make_boxed_func  # noqa: E402
from torch import nn  # noqa: E402
from torch._dynamo import trace_rules  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.func import grad, hessian, jvp, vmap  # noqa: E402

import torch_bridge  # noqa: E402
from torch_modules import LOSSES, MODULES, UNCHANGED, gradients, loss_of, module_of, rightly  # noqa: E402
from torch_oracle import normal  # noqa: E402

THOROUGH = pytest.mark.thorough


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def check(name, losses, compiled=lambda f: f):
    module = module_of(name)
    for loss in losses:
        run = loss_of(module, LOSSES[loss])
        expected = rightly(lambda run=run: gradients(module, run))
        with torch_bridge.patch():
            got = gradients(module, compiled(run))
        for a, b in zip(got, expected, strict=True):
            a, b = (torch.zeros(()) if g is None else g for g in (a, b))
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, check_dtype=False)


@pytest.mark.parametrize("name", MODULES)
def test_eager(name):
    check(name, LOSSES)


@pytest.mark.parametrize("name", [pytest.param(n, marks=THOROUGH) if n in UNCHANGED else n for n in MODULES])
def test_compiled(name):
    check(name, ["through"], lambda f: torch.compile(f, backend="aot_eager", fullgraph=True))


@THOROUGH
@pytest.mark.parametrize("name", MODULES)
def test_compiled_by_inductor(name, request):
    if "circular" in name:
        request.applymarker(
            pytest.mark.xfail(reason="the gradient along the tangent, without patch() too", strict=True)
        )
    check(name, ["through"], lambda f: torch.compile(f, fullgraph=True))


# ------------------------------------------------------------------------------------------------ derivatives

x, t_x, z, t_z = (normal(2, 4, 16, seed=seed) for seed in range(4))
w, t_w, b, t_b = (normal(16, seed=seed) for seed in range(4, 8))
m, t_m = normal(8, 16, seed=8), normal(8, 16, seed=9)
k, t_k = normal(3, 4, 3, seed=10), normal(3, 4, 3, seed=11)
OF_WEIGHTS = {  # functions of x and of weights, these, their tangents
    "linear": (lambda x, m, b: F.linear(x, m, b), (m, b[:8]), (t_m, t_b[:8])),
    "conv1d": (lambda x, k, b: F.conv1d(x, k, b, padding=1), (k, b[:3]), (t_k, t_b[:3])),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (16,), w, b), (w, b), (t_w, t_b)),
    "rms_norm": (lambda x, w: F.rms_norm(x, (16,), w), (w,), (t_w,)),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), (w[:4], b[:4]), (t_w[:4], t_b[:4])),
    "instance_norm": (lambda x, w, b: F.instance_norm(x, None, None, w, b), (w[:4], b[:4]), (t_w[:4], t_b[:4])),
    "batch_norm": (
        lambda x, w, b: F.batch_norm(x, z[0, :, 0].to(w), z[1, :, 0].exp().to(w), w, b),
        (w[:4], b[:4]),
        (t_w[:4], t_b[:4]),
    ),
    "glu": (lambda x, m: F.glu(F.linear(x, m)), (m,), (t_m,)),
}
sum_of = lambda f, *ws: lambda x: f(x, *ws).sin().sum()
DERIVATIVES = {
    "value": lambda f, ws, t_ws: f(x, *ws),
    "jvp": lambda f, ws, t_ws: jvp(lambda x: f(x, *ws), (x,), (t_x,)),
    "jvp-of-weights": lambda f, ws, t_ws: jvp(lambda *ws: f(x, *ws), ws, t_ws),
    "jvp-of-all": lambda f, ws, t_ws: jvp(f, (x, *ws), (t_x, *t_ws)),
    "jvp-of-grad": lambda f, ws, t_ws: jvp(grad(sum_of(f, *ws)), (x,), (t_x,)),
    "jvp-of-jvp": lambda f, ws, t_ws: jvp(lambda x: jvp(lambda x: f(x, *ws), (x,), (z,))[1], (x,), (t_x,)),
    "grad-of-jvp": lambda f, ws, t_ws: grad(
        lambda *a: sum_of(lambda x: jvp(lambda x: f(x, *a[1:]), (x,), (t_x,))[1])(a[0]), tuple(range(1 + len(ws)))
    )(x, *ws),
    "jvp-of-vmap": lambda f, ws, t_ws: jvp(vmap(lambda x: f(x[None], *ws)), (x,), (t_x,)),
    "vmap-of-jvp": lambda f, ws, t_ws: vmap(lambda t: jvp(lambda x: f(x, *ws), (x,), (t,))[1])(torch.stack([t_x, z])),
    "vmap-of-grad-of-jvp": lambda f, ws, t_ws: vmap(
        lambda x, t: grad(sum_of(lambda x: jvp(lambda x: f(x[None], *ws), (x,), (t,))[1]))(x)
    )(x, t_x),
    "hessian": lambda f, ws, t_ws: hessian(lambda x: f(torch.cat([x, z[:, :, 2:]], 2), *ws).sin().sum())(x[:, :, :2]),
    "level": lambda f, ws, t_ws: by_level(f, ws, t_ws),
}


def by_level(f, ws, t_ws):
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(f(*map(forward_ad.make_dual, (x, *ws), (t_x, *t_ws)))))


@pytest.mark.parametrize("name", OF_WEIGHTS)
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_derivatives(derivative, name):
    run = lambda: DERIVATIVES[derivative](*OF_WEIGHTS[name])
    expected = rightly(run)
    with torch_bridge.patch():
        got = run()
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", [n if n == "layer_norm" else pytest.param(n, marks=THOROUGH) for n in OF_WEIGHTS])
@pytest.mark.parametrize("derivative", [d for d in DERIVATIVES if d != "value"])
def test_derivatives_compiled(derivative, name):
    torch._dynamo.reset()  # shapes that other cases had would be taken for dynamic ones
    run = lambda: DERIVATIVES[derivative](*OF_WEIGHTS[name])
    expected = rightly(run)
    with torch_bridge.patch():
        got = torch.compile(run, backend="aot_eager", fullgraph=True)()
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", [name for name in OF_WEIGHTS if name != "glu"])  # PyTorch has none
def test_half(name, autocast):
    """In the dtype of a call without tangents, and as exact as PyTorch's."""
    f, ws, _ = OF_WEIGHTS[name]
    half = lambda a: a.to(torch.float32 if autocast else torch.bfloat16)
    expected = DERIVATIVES["jvp"](*OF_WEIGHTS[name][:2], ())

    def run():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            call = lambda x: f(x.bfloat16(), *map(half, ws))
            return jvp(call, (half(x),), (half(t_x),)), call(half(x)).dtype

    theirs, dtype = run()
    with torch_bridge.patch():
        ours, _ = run()
    for a, b, right in zip(ours, theirs, expected, strict=True):
        assert a.dtype == dtype
        off = lambda c, right=right: (c.double() - right).norm()
        assert off(a) <= 1.2 * off(b.to(dtype))  # in a JVP some of theirs are float32


# ------------------------------------------------------------------------------------------------ what is replaced


def test_without_a_level_nothing_changes():
    module = nn.Sequential(nn.Conv1d(4, 4, 1), nn.GroupNorm(2, 4), nn.Linear(16, 16), nn.LayerNorm(16)).double()
    graphs = []

    def results():
        keep = lambda graph, _: graphs.append(graph.code) or graph.forward
        compiled = torch.compile(lambda x: module(x).square().mean(), backend=keep, fullgraph=True)
        torch._dynamo.reset()
        return (
            *grad(lambda x: module(x).sin().sum())(x),
            compiled(x),
            *torch.autograd.grad(compiled(x), module.parameters()),
        )

    expected = results()
    with torch_bridge.patch():
        got = results()
    assert all(map(torch.equal, got, expected))
    assert graphs[0] == graphs[1]


def test_beside_a_jvp_nothing_changes():
    """In what does not depend on its inputs, and in another thread, where PyTorch's level is open too."""
    module = nn.Sequential(nn.Conv1d(4, 4, 1), nn.GroupNorm(2, 4), nn.Linear(16, 16), nn.LayerNorm(16)).double()
    calls = []

    def run():
        a = x.clone().requires_grad_()
        calls.append(torch.autograd.grad(module(a).sin().sum(), [a, *module.parameters()]))

    def f(a):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return a + module(x), module(x)

    run()
    expected = module(x)
    with torch_bridge.patch():
        (_, value), (t_sum, t_value) = jvp(f, (x,), (t_x,))
    assert all(map(torch.equal, *calls))
    assert torch.equal(value, expected)
    assert torch.equal(t_sum, t_x)
    assert not t_value.any()


def test_modules_are_left_alone_on_request():
    theirs = lambda: (F.linear, F.layer_norm, F.conv2d, forward_ad.make_dual, torch.conv2d)
    before = theirs()
    with torch_bridge.patch(modules=False):
        assert theirs() == before
        assert F.scaled_dot_product_attention is torch_bridge.scaled_dot_product_attention
        with torch_bridge.patch():
            assert not any(a is b for a, b in zip(theirs()[:4], before[:4], strict=True))
            assert torch.conv2d is before[4]
        assert theirs() == before
        assert F.scaled_dot_product_attention is torch_bridge.scaled_dot_product_attention
    with pytest.raises(TypeError, match="`modules` must be True or False"), torch_bridge.patch(modules=None):
        pass
    with pytest.raises(KeyError), torch_bridge.patch():
        raise KeyError
    assert theirs() == before


def test_errors_are_those_of_pytorch():
    with torch_bridge.patch():
        for f in (
            lambda x: F.layer_norm(x, (4,)),
            lambda x: F.layer_norm(x, (16,), w[:4]),
            lambda x: F.group_norm(x, 3),
            lambda x: F.linear(x, m[:, :4]),
            lambda x: F.glu(x[..., :3]),
            lambda x: F.layer_norm(x, (16,), w[:1]),
            lambda x: F.layer_norm(x, (16,), w, w[:1]),
            lambda x: F.group_norm(x, 2, w[:1]),
            lambda x: F.instance_norm(x, weight=w[:1]),
            lambda x: F.batch_norm(x, w[:1], w[:1]),
            lambda x: F.rms_norm(x, (16,), w[:1]),
            lambda x: F.rms_norm(x, (4,)),
            lambda x: F.rms_norm(x, ()),
        ):
            with pytest.raises(RuntimeError):
                jvp(f, (x,), (t_x,))


def test_a_module_is_scripted_while_patched():
    module = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Conv1d(4, 4, 1), nn.GLU()).double()
    with torch_bridge.patch():
        scripted = torch.jit.script(module)
    assert torch.equal(scripted(x), module(x))


# ------------------------------------------------------------------------------------------------ compiled


def test_inputs_may_be_views_of_one_tensor():
    module = nn.Linear(16, 16).double()

    def loss(pair):
        data, noise = pair.unbind()
        u, t_u = jvp(module, (data,), (noise,))
        return (u - t_u.detach()).square().mean()

    pair = torch.stack([x, t_x])
    with torch_bridge.patch():
        for f in (loss, lambda pair: loss(pair.transpose(0, 1).contiguous().transpose(0, 1))):
            torch.testing.assert_close(torch.compile(f, backend="aot_eager", fullgraph=True)(pair), loss(pair))


def test_no_product_with_zeros():
    """Of the weight's tangent."""
    module = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16)).double()
    graphs = []
    keep = lambda graph, _: graphs.append(graph.code) or make_boxed_func(graph.forward)
    with torch_bridge.patch():
        loss = torch.compile(loss_of(module, 0.1), backend=aot_autograd(fw_compiler=keep), fullgraph=True)(x, t_x)
        loss.backward()
    assert [code.count("mm.default") for code in graphs] == [4, 6]
    assert not any("zero" in code for code in graphs)


NORMS = ["LayerNorm", "GroupNorm", "BatchNorm1d, eval", "InstanceNorm1d", "GLU", "SwiGLU", "TransformerEncoderLayer"]


@pytest.mark.parametrize("name", NORMS)
def test_compiled_where_pytorch_looks_for_its_functions_meanwhile(name):
    """As after torch.distributed.init_process_group: it finds those that stand in their place."""

    def compiled(f):
        trace_rules.clear_lru_cache()
        return torch.compile(f, backend="aot_eager", fullgraph=True)

    try:
        check(name, LOSSES, compiled)
    finally:
        trace_rules.clear_lru_cache()
