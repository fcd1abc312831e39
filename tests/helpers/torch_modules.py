"""Modules of PyTorch that a transformer or a U-Net holds, their losses by a JVP, and functions whose derivatives are right."""

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.func import jvp  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

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
    "GroupNorm without weights": lambda: nn.Sequential(nn.GroupNorm(2, 4, affine=False), nn.Flatten()),
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
UNCHANGED = {  # of which `patch` replaces no function
    "Bilinear", "LocalResponseNorm", "normalize", "GELU", "GELU, tanh", "SiLU", "Mish", "ReLU, ELU, LeakyReLU",
    "PReLU", "Softplus, Tanh, Sigmoid", "Hardswish", "Softmax, LogSoftmax", "Dropout, eval", "AvgPool, MaxPool",
    "AdaptiveAvgPool2d", "Upsample, bilinear", "PixelShuffle, ReflectionPad2d", "Unfold", "RoPE",
}  # fmt: skip
LOSSES = {"stopped": 0.0, "through": 0.1}


def module_of(name):
    """In float64."""
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
    """The loss, and its gradients along the input, the tangent and the parameters."""
    like = next(module.parameters(), torch.empty((), dtype=torch.float64))
    x, t_x = (normal(2, 4, 16, seed=seed).to(like).requires_grad_() for seed in (0, 1))
    loss = run(x, t_x)
    return [loss.detach(), *torch.autograd.grad(loss, [x, t_x, *module.parameters()], allow_unused=True)]


def rightly(run):
    """What `run` gives, in PyTorch without `patch()`."""
    with pytest.MonkeyPatch.context() as patch, sdpa_kernel(SDPBackend.MATH):
        for name, right in RIGHT.items():
            patch.setattr(F, name, right)
        return run()
