"""Functions of :mod:`torch.nn.functional` with their tangents written out: what `patch` puts in place of PyTorch's.

PyTorch's rules give an operand without a tangent, such as a weight, one of zeros, and compute with it: a product of matrices too
many for each linear layer, and nodes that Inductor cannot compile.  Its norms with weights do not compile at all, and take their
mean and deviation for constants in a gradient through a JVP, which is wrong.  These functions take a dual tensor apart, compute
primal and tangent by what PyTorch differentiates rightly, and join the two.  Where no forward-mode level is open they are
PyTorch's.
"""

import math
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import has_torch_function

from torch_bridge import private

# PyTorch's, whatever `patch` puts in their place
_batch_norm, _group_norm, _instance_norm, _layer_norm = F.batch_norm, F.group_norm, F.instance_norm, F.layer_norm
_glu, _linear, _make_dual, _rms_norm = F.glu, F.linear, forward_ad.make_dual, F.rms_norm
HALF = torch.float16, torch.bfloat16


def make_dual(tensor: Tensor, tangent: Tensor, *, level: int | None = None) -> Any:
    """A compiler cannot trace views of a dual tensor whose primal is a view itself.  It knows PyTorch's own by its name, under
    which this one may stand."""
    if not torch.compiler.is_compiling():
        return _make_dual(tensor, tangent, level=level)
    return private.make_dual(tensor.clone(), tangent, level=0)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if _plain(input, weight, bias) or input.dim() < 2 or weight.dim() != 2:
        return _linear(input, weight, bias)
    x, t_x = _unpack_dual(input)
    if t_x is None or _dual(weight, bias):
        return _linear(input, weight, bias)
    # of two axes, whose result is no view
    y = private.make_dual(_linear(x.flatten(0, -2), weight, bias), _linear(t_x.flatten(0, -2), weight), level=0)
    return y.unflatten(0, input.shape[:-1])


def _convolution(original: Callable) -> Callable:
    def convolution(input, weight, bias=None, *args, **kwargs):
        if _plain(input, weight, bias) or input.dim() != weight.dim():  # without a batch axis results are views
            return original(input, weight, bias, *args, **kwargs)
        x, t_x = _unpack_dual(input)
        if t_x is None or _dual(weight, bias):
            return original(input, weight, bias, *args, **kwargs)
        y, t_y = original(x, weight, bias, *args, **kwargs), original(t_x, weight, None, *args, **kwargs)
        return private.make_dual(y, t_y, level=0)

    return convolution


def layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    apart = _plain(input, weight, bias) or _constant(input, weight, bias)
    if apart or not _fit(normalized_shape, weight, bias):
        return _layer_norm(input, normalized_shape, weight, bias, eps)
    return _normalized(input, tuple(normalized_shape), weight, bias, eps, lambda a: a)


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    if _plain(input, weight, bias) or _constant(input, weight, bias):
        return _group_norm(input, num_groups, weight, bias, eps)
    if input.dim() < 2 or not input.numel() or input.shape[1] % num_groups or not _fit(input.shape[1:2], weight, bias):
        return _group_norm(input, num_groups, weight, bias, eps)  # which may raise
    groups = input.reshape(input.shape[0], num_groups, -1)
    weight, bias = (_along_channels(a, input) for a in (weight, bias))
    return _normalized(groups, tuple(groups.shape[2:]), weight, bias, eps, lambda a: a.reshape(input.shape))


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, eps=eps)
    if running_mean is not None or input.dim() < 3 or math.prod(input.shape[2:]) == 1 or _plain(input, weight, bias):
        return _instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    return group_norm(input, input.shape[1], weight, bias, eps)


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    apart = _plain(input, weight, bias) or _constant(input, weight, bias, running_mean, running_var)
    left = training or running_mean is None or running_var is None or eps < 0
    if apart or left or not _fit(input.shape[1:2], running_mean, running_var, weight, bias):
        return _batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    mean, var, weight, bias = (_along_channels(a, input) for a in (running_mean, running_var, weight, bias))
    rstd = torch.rsqrt(var + eps)
    x, t_x = _unpack_dual(_wide(input))
    if t_x is None or _dual(running_mean, running_var):
        return _affine((_wide(input) - mean) * rstd, None, weight, bias, input.dtype)
    return _affine((x - mean) * rstd, t_x * rstd, weight, bias, input.dtype)


def rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """PyTorch 2.11 does not compile its own in a JVP."""
    if _plain(input, weight) or _constant(input, weight):
        return _rms_norm(input, normalized_shape, weight, eps)
    axes = tuple(range(-len(normalized_shape), 0))
    if not axes or input.shape[axes[0] :] != tuple(normalized_shape) or not _fit(normalized_shape, weight):
        return _rms_norm(input, normalized_shape, weight, eps)  # which raises
    x, t_x = _unpack_dual(_wide(input))
    rstd = torch.rsqrt((x * x).mean(axes, keepdim=True) + (torch.finfo(x.dtype).eps if eps is None else eps))
    y = x * rstd
    t_y = None if t_x is None else (t_x - y * (y * t_x).mean(axes, keepdim=True)) * rstd
    return _affine(y, t_y, weight, None, _dtype_of_norms(input))


def glu(input: Tensor, dim: int = -1) -> Tensor:
    """PyTorch's has no gradient through its JVP."""
    if _plain(input) or input.dim() == 0 or input.shape[dim] % 2:
        return _glu(input, dim)  # which may raise
    values, gates = input.chunk(2, dim)
    return values * gates.sigmoid()


def _normalized(input, shape, weight, bias, eps, restore):
    """layer_norm over `shape`; `restore` gives results their own shape, before weight and bias."""
    dtype = _dtype_of_norms(input)
    x, t_x = _unpack_dual(_wide(input))
    y = _layer_norm(x, shape, None, None, eps)
    if t_x is None:
        return _affine(restore(y), None, weight, bias, dtype)
    axes = tuple(range(-len(shape), 0))
    t_x = t_x - t_x.mean(axes, keepdim=True)
    rstd = torch.rsqrt(x.var(axes, correction=0, keepdim=True) + eps)
    t_y = (t_x - y * (y * t_x).mean(axes, keepdim=True)) * rstd
    return _affine(restore(y), restore(t_y), weight, bias, dtype)


def _fit(shape: Any, *tensors: Tensor | None) -> bool:
    """Have all of them this shape?  PyTorch raises where one has not: it must not be broadcast."""
    return all(a is None or a.shape == tuple(shape) for a in tensors)


def _dtype_of_norms(input):
    """CUDA's autocast has float32 for norms, the CPU's leaves them."""
    kind = input.device.type
    return torch.float32 if kind != "cpu" and torch.is_autocast_enabled(kind) else input.dtype


def _affine(y, t_y, weight, bias, dtype):
    """y * weight + bias, a dual tensor if `t_y` is given, rounded once."""
    if t_y is None:
        y = y if weight is None else y * weight
        return (y if bias is None else y + bias).to(dtype)
    if weight is not None:
        weight, t_weight = _unpack_dual(weight)
        t_y = t_y * weight if t_weight is None else t_y * weight + y * t_weight
        y = y * weight
    if bias is not None:
        bias, t_bias = _unpack_dual(bias)
        t_y = t_y if t_bias is None else t_y + t_bias
        y = y + bias
    return private.make_dual(y.to(dtype), t_y.to(dtype), level=0)


def _wide(a: Tensor) -> Tensor:
    return a.float() if a.dtype in HALF else a


def _plain(*tensors: Tensor | None) -> bool:
    """No forward-mode level is open, or a class overrides functions."""
    return not (forward_ad._current_level >= 0 or _traced_level()) or has_torch_function(tensors)


def _constant(*tensors: Tensor | None) -> bool:
    """Tensors without a tangent where one level is open, in a branch that it does not reach, or in another thread."""
    if torch.compiler.is_dynamo_compiling():
        return False
    return len(private.interpreter_stack() or ()) <= 1 and not _dual(*tensors)


def _traced_level() -> bool:
    """Is a JVP open that a compiler replays?  Of these Python knows nothing."""
    if torch.compiler.is_dynamo_compiling():
        return False
    levels = private.interpreter_stack()
    return levels is not None and any(level.key() == private.TransformType.Jvp for level in levels)


def _unpack_dual(a: Tensor) -> tuple[Tensor, Tensor | None]:
    """The primal and the tangent, which is None where there is none, or none of the innermost transformation."""
    return (a, None) if _within_vmap() else forward_ad.unpack_dual(a, level=0)  # PyTorch has one level


@torch.compiler.assume_constant_result  # in a trace too it depends on what is traced alone
def _within_vmap() -> bool:
    """Innermost, which cannot take dual tensors apart."""
    levels = private.interpreter_stack()
    return bool(levels) and levels[-1].key() == private.TransformType.Vmap


def _dual(*tensors: Tensor | None) -> bool:
    return any(a is not None and _unpack_dual(a)[1] is not None for a in tensors)


def _along_channels(a: Any, like: Tensor) -> Any:
    return None if a is None else a.reshape(1, -1, *(1,) * (like.dim() - 2))


FUNCTIONS: dict[Callable, Callable] = {  # by PyTorch's
    _make_dual: make_dual,
    _linear: linear,
    _glu: glu,
    _layer_norm: layer_norm,
    _group_norm: group_norm,
    _instance_norm: instance_norm,
    _rms_norm: rms_norm,
    _batch_norm: batch_norm,
    **{
        function: _convolution(function)
        for name in ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
        for function in [getattr(F, name)]
    },
}
for _theirs, _ours in FUNCTIONS.items():  # torch.jit.script compiles PyTorch's
    if isinstance(_theirs, types.FunctionType):
        _ours.__prepare_scriptable__ = lambda theirs=_theirs: theirs  # type: ignore[attr-defined]
    elif private.register_builtin is not None:
        private.register_builtin(_ours, f"aten::{_theirs.__name__}")
