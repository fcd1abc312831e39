"""Modules of PyTorch that a transformer or a U-Net holds, in a JVP under `patch()`: eager and compiled, in float64."""

import warnings

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from functorch.compile import make_boxed_func  # noqa: E402
from torch import nn  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.func import grad, hessian, jvp, vmap  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

import torch_bridge  # noqa: E402
from torch_oracle import normal  # noqa: E402


class Of(nn.Module):
    """`f`, a function of the parts and of x."""

    def __init__(self, f, **parts):
        super().__init__()
        self.f, self.parts = f, nn.ModuleDict(parts)

    def forward(self, x):
        return self.f(self.parts, x)


def square(x):
    """[2, 4, 16] as images [2, 4, 4, 4]."""
    return x.unflatten(2, (4, 4))


def images(module):
    return Of(lambda s, x: s["a"](square(x)), a=module)


def rotated(_, x):
    turned = torch.view_as_complex(x.unflatten(2, (8, 2)))
    return torch.view_as_real(turned * torch.polar(*[torch.ones(4, 8, dtype=x.dtype)] * 2)).flatten(2)


def gated(s, x):
    gate, up = s["a"](x).chunk(2, -1)
    return s["b"](F.silu(gate) * up)


def modulated(s, x):
    shift, scale, gate = s["a"](x.mean(1, keepdim=True)).chunk(3, -1)
    return x + gate * s["b"](F.layer_norm(x, (16,)) * (1 + scale) + shift)


def embedded(s, x):
    time = x.mean((1, 2))[:, None] * torch.exp(-torch.arange(8, dtype=x.dtype))
    return x + s["b"](torch.cat([time.sin(), time.cos()], 1))[:, None] + s["a"](torch.arange(4))


def normalized(x, axes, eps):
    x = x - x.mean(axes, keepdim=True)
    return x * torch.rsqrt(x.square().mean(axes, keepdim=True) + eps)


def layer_norm(x, shape, weight=None, bias=None, eps=1e-5):
    x = normalized(x, tuple(range(-len(shape), 0)), eps)
    return x * (1 if weight is None else weight) + (0 if bias is None else bias)


def group_norm(x, groups, weight=None, bias=None, eps=1e-5):
    y = normalized(x.reshape(len(x), groups, -1), -1, eps).reshape(x.shape)
    weight, bias = (d if a is None else a.reshape(-1, *[1] * (x.dim() - 2)) for a, d in ((weight, 1), (bias, 0)))
    return y * weight + bias


def instance_norm(x, mean=None, var=None, weight=None, bias=None, use_input_stats=True, momentum=0.1, eps=1e-5):
    if use_input_stats:
        return group_norm(x, x.shape[1], weight, bias, eps)
    return F.batch_norm(x, mean, var, weight, bias, False, momentum, eps)


def glu(x, dim=-1):
    values, gates = x.chunk(2, dim)
    return values * gates.sigmoid()


# a gradient through the JVP of PyTorch's own layer_norm or instance_norm is wrong, in float64 too, and glu has none
RIGHT = {"layer_norm": layer_norm, "group_norm": group_norm, "instance_norm": instance_norm, "glu": glu}

layer = dict(d_model=16, nhead=2, dim_feedforward=8, dropout=0.0, batch_first=True)
both = lambda s, x: s["a"](x, x.flip(1))
MODULES = {  # all of [2, 4, 16]
    "Linear": lambda: nn.Linear(16, 8),
    "Linear without bias": lambda: nn.Linear(16, 8, bias=False),
    "Bilinear": lambda: Of(both, a=nn.Bilinear(16, 16, 4)),
    "LayerNorm": lambda: nn.LayerNorm(16),
    "LayerNorm without weights": lambda: nn.LayerNorm(16, elementwise_affine=False),
    "LayerNorm without bias, of two axes": lambda: nn.LayerNorm((4, 16), bias=False),
    "RMSNorm": lambda: nn.RMSNorm(16),
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
    "GroupNorm of images": lambda: images(nn.GroupNorm(2, 4)),
    "GroupNorm without weights": lambda: nn.GroupNorm(2, 4, affine=False),
    "BatchNorm1d, eval": lambda: nn.BatchNorm1d(4).eval(),
    "BatchNorm2d without weights, eval": lambda: images(nn.BatchNorm2d(4, affine=False)).eval(),
    "InstanceNorm1d": lambda: nn.InstanceNorm1d(4, affine=True),
    "InstanceNorm2d": lambda: images(nn.InstanceNorm2d(4)),
    "InstanceNorm1d with statistics, eval": lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True).eval(),
    "LocalResponseNorm": lambda: nn.LocalResponseNorm(2),
    "normalize": lambda: Of(lambda _, x: F.normalize(x, dim=-1)),
    "GELU": nn.GELU,
    "GELU, tanh": lambda: nn.GELU("tanh"),
    "SiLU": nn.SiLU,
    "Mish": nn.Mish,
    "ReLU, ELU, LeakyReLU": lambda: Of(lambda _, x: F.relu(x) + F.elu(x) + F.leaky_relu(x)),
    "PReLU": nn.PReLU,
    "Softplus, Tanh, Sigmoid": lambda: nn.Sequential(nn.Softplus(), nn.Tanh(), nn.Sigmoid()),
    "Hardswish": nn.Hardswish,
    "GLU": nn.GLU,
    "Softmax, LogSoftmax": lambda: Of(lambda _, x: x.softmax(-1) + x.log_softmax(1)),
    "Dropout, eval": lambda: nn.Dropout(0.5).eval(),
    "Conv1d": lambda: nn.Conv1d(4, 6, 3, padding=1),
    "Conv2d, strided": lambda: images(nn.Conv2d(4, 4, 3, stride=2, padding=1)),
    "Conv2d, groups, circular": lambda: images(nn.Conv2d(4, 4, 3, padding=1, groups=2, padding_mode="circular")),
    "Conv3d": lambda: Of(lambda s, x: s["a"](square(x)[:, None]), a=nn.Conv3d(1, 2, 2)),
    "ConvTranspose1d": lambda: nn.ConvTranspose1d(4, 2, 2, stride=2),
    "ConvTranspose2d": lambda: images(nn.ConvTranspose2d(4, 2, 2, stride=2)),
    "AvgPool, MaxPool": lambda: images(nn.Sequential(nn.MaxPool2d(2), nn.AvgPool2d(2))),
    "AdaptiveAvgPool2d": lambda: images(nn.AdaptiveAvgPool2d(2)),
    "Upsample": lambda: images(nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(4, 4, 3))),
    "Upsample, bilinear": lambda: images(nn.Upsample(scale_factor=2, mode="bilinear")),
    "PixelShuffle, ReflectionPad2d": lambda: images(nn.Sequential(nn.PixelShuffle(2), nn.ReflectionPad2d(1))),
    "PixelUnshuffle": lambda: images(nn.Sequential(nn.PixelUnshuffle(2), nn.Conv2d(16, 4, 1))),
    "Unfold": lambda: images(nn.Sequential(nn.Unfold(2, stride=2), nn.Fold(4, 2, stride=2))),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(16, 8)),
    "RoPE": lambda: Of(rotated),
    "SwiGLU": lambda: Of(gated, a=nn.Linear(16, 16), b=nn.Linear(8, 16)),
    "AdaLN": lambda: Of(modulated, a=nn.Linear(16, 48), b=nn.Linear(16, 16)),
    "Embedding, of time": lambda: Of(embedded, a=nn.Embedding(4, 16), b=nn.Linear(16, 16)),
    "residual block": lambda: images(
        nn.Sequential(nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4))
    ),
    "MultiheadAttention": lambda: Of(
        lambda s, x: s["a"](x, x, x, need_weights=False)[0], a=nn.MultiheadAttention(16, 2, batch_first=True)
    ),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(**layer),
    "TransformerEncoderLayer, norm first, eval": lambda: nn.TransformerEncoderLayer(**layer, norm_first=True).eval(),
    "TransformerDecoderLayer": lambda: Of(both, a=nn.TransformerDecoderLayer(**layer)),
}  # fmt: skip
THOROUGH = pytest.mark.thorough
LOSSES = {"stopped": 0.0, "through": 0.1}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def module_of(name):
    torch.manual_seed(0)
    module = MODULES[name]().double()
    with torch.no_grad():
        for a in (a for a in (*module.parameters(), *module.buffers()) if a.is_floating_point()):
            a.add_(torch.rand_like(a) * 0.3)
    return module


def loss_of(module, share):
    def loss(x, t_x):
        u, t_u = jvp(module, (x,), (t_x,))
        return (u - t_u.detach()).square().mean() + share * t_u.square().mean()

    return loss


def gradients(module, run):
    x, t_x = (normal(2, 4, 16, seed=seed).requires_grad_() for seed in (0, 1))
    loss = run(x, t_x)
    return [loss.detach(), *torch.autograd.grad(loss, [x, t_x, *module.parameters()], allow_unused=True)]


def rightly(run):
    with pytest.MonkeyPatch.context() as patch, sdpa_kernel(SDPBackend.MATH):
        for name, right in RIGHT.items():
            patch.setattr(F, name, right)
        return run()


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


@pytest.mark.parametrize("name", MODULES)
def test_compiled(name):
    check(name, ["through"], lambda f: torch.compile(f, backend="aot_eager", fullgraph=True))


@THOROUGH
@pytest.mark.parametrize("name", MODULES)
def test_compiled_by_inductor(name):
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
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), (w[:4], b[:4]), (t_w[:4], t_b[:4])),
    "instance_norm": (lambda x, w, b: F.instance_norm(x, None, None, w, b), (w[:4], b[:4]), (t_w[:4], t_b[:4])),
    "batch_norm": (
        lambda x, w, b: F.batch_norm(x, z[0, :, 0].to(w), z[1, :, 0].exp().to(w), w, b),
        (w[:4], b[:4]),
        (t_w[:4], t_b[:4]),
    ),
    "glu": (lambda x, w: F.glu(x) * w[:8], (w,), (t_w,)),
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
        assert off(a) <= 1.2 * off(b)


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
