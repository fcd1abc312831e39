"""The public functions."""

import contextlib
import math
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from jax_flash_jvp.problem import Operands, check_operands
from torch_bridge import rules  # noqa: F401  (gives the operators their derivatives)
from torch_bridge.operators import ops


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    r"""Attention that can be differentiated in any mode and order, by fused kernels on a GPU.

    .. math::  O = \mathrm{softmax}(\sigma Q K^T + M) V

    Takes the place of :func:`torch.nn.functional.scaled_dot_product_attention`.  In shapes, N… are any number of batch
    axes, Hq the number of query heads and H of key heads, L the number of queries and S of keys, E and Ev the channels
    of a head, at most 256.

    Args:
      query: [N…, Hq, L, E]; float16, bfloat16, float32 or float64, of any strides.
      key: [N…, H, S, E], in the dtype of `query`.
      value: [N…, H, S, Ev], likewise.  Leading axes broadcast.
      attn_mask: broadcasts to [N…, Hq, L, S].  Boolean: True where a query attends to a key.  Floating point: added to
        the scores, and differentiable.
      dropout_p: must be 0.
      is_causal: query i attends to keys 0 … i.  Not together with `attn_mask`.
      scale: σ, a number; 1 / sqrt(E) by default.
      enable_gqa: let Hq be a multiple of H; consecutive groups of Hq // H query heads share a key head
        (arXiv:2305.13245).

    Returns:
      [N…, Hq, L, Ev] in the dtype of `query`, in the memory order of [N…, L, Hq, Ev].  Scores and sums are accumulated
      in float32 (float64 for float64 tensors).  A query that attends to no key gives zeros, and zero derivatives, where
      some of PyTorch's kernels give NaN.

    Raises:
      ValueError: shapes or devices that do not fit, `dropout_p` above 0, `attn_mask` together with `is_causal`.
      TypeError: dtypes that are not supported or differ, a `scale` that is a tensor.
      RuntimeError: a derivative that torch.compile or forward_ad would get wrong; the text says what to do instead.

    A call with tangents (torch.func.jvp, forward_ad) launches the kernel that computes the output and its tangent
    together.  What the kernels do not serve, and tensors that are not on an NVIDIA GPU, are computed in PyTorch, in
    memory linear in L and S.  Float32 products on a GPU follow torch.set_float32_matmul_precision.

    FlashAttention: arXiv:2205.14135, arXiv:2307.08691; its tangent: arXiv:2410.11081, appendix.
    """
    if dropout_p > 0.0:
        raise ValueError(f"`dropout_p` must be 0: got {dropout_p}; apply dropout to the output of attention instead")
    if is_causal and attn_mask is not None:
        raise ValueError("`attn_mask` and `is_causal` must not be given together: mask the future in `attn_mask`")
    return _attend(query, key, value, attn_mask, is_causal, scale, enable_gqa)


def flash_attn_func(q, k, v, bias=None, causal: bool = False, softmax_scale: float | None = None) -> Tensor:
    """:func:`scaled_dot_product_attention` in the layout, and with the arguments, of Tri Dao's `flash_attn_triton.py`:
    q [B, L, Hq, E], k [B, S, H, E] and v [B, S, H, Ev], Hq a multiple of H, give a contiguous [B, L, Hq, Ev].
    `bias` is like `attn_mask`, but goes with `causal` too: query i attends to keys 0 … i."""
    q, k, v = (a.transpose(1, 2) for a in (q, k, v))
    return _attend(q, k, v, bias, causal, softmax_scale, True).transpose(1, 2)


def flash_attn_qkvpacked_func(qkv, bias=None, causal: bool = False, softmax_scale: float | None = None) -> Tensor:
    """:func:`flash_attn_func` of qkv [B, L, 3, H, E], which is not copied."""
    return flash_attn_func(*qkv.unbind(2), bias, causal, softmax_scale)


def flash_attn_kvpacked_func(q, kv, bias=None, causal: bool = False, softmax_scale: float | None = None) -> Tensor:
    """:func:`flash_attn_func` of q [B, L, Hq, E] and kv [B, S, 2, H, E], which is not copied."""
    return flash_attn_func(q, *kv.unbind(2), bias, causal, softmax_scale)


@contextlib.contextmanager
def patch() -> Iterator[None]:
    """While open, this package's function is `scaled_dot_product_attention` in :mod:`torch.nn.functional`, and in every
    loaded module that imported it from there, for all threads.  Open it before a compiled model is first called."""
    name = scaled_dot_product_attention.__name__
    original = getattr(torch.nn.functional, name)
    loaded = [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]
    places = [namespace for namespace in loaded if namespace.get(name) is original]
    for namespace in places:
        namespace[name] = scaled_dot_product_attention
    try:
        yield
    finally:
        for namespace in places:
            namespace[name] = original


def _attend(query, key, value, mask, is_causal: bool, scale, enable_gqa: bool) -> Tensor:
    x = query, key, value
    for name, a in zip(("query", "key", "value", "attn_mask"), (*x, mask), strict=True):
        if a is not None and a.device != query.device:
            raise ValueError(f"`{name}` must be on the device of `query`: got {a.device} and {query.device}")
        if a is not None and a.is_nested:
            raise ValueError(f"`{name}` must not be a nested tensor: pad it, and hide the padding with `attn_mask`")
    if isinstance(scale, Tensor):
        raise TypeError("`scale` must be a number: got a tensor; multiply `query` by it instead")
    kind = query.device.type
    if kind in ("cpu", "cuda", "xpu") and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x = [a if a.dtype == torch.float64 else a.to(dtype) for a in x]
    whole = all(a.dim() == 4 and a.shape[0] == query.shape[0] for a in x)
    if not whole or not (enable_gqa or query.shape[1] == key.shape[1] == value.shape[1]):
        x = _broadcast(x, enable_gqa)
    rows = x[0].shape[:-1]
    if mask is not None:
        mask = _four_dimensional(mask, (*rows, x[1].shape[-2]))
    q, k, v = x if whole else (a.reshape(math.prod(a.shape[:-3]), *((1, 1, *a.shape)[-3:])) for a in x)
    _check(q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    o, _ = ops.forward(q, k, v, mask, bool(is_causal), scale, torch.compiler.is_compiling())
    return o if whole else o.reshape(*rows, v.shape[-1])


class _Described(NamedTuple):
    """Shape [B, T, N, H] and dtype of an array."""

    shape: tuple[int, ...]
    dtype: torch.dtype


_checked: set[tuple] = set()  # found good


def _check(*described) -> None:
    if not torch.compiler.is_compiling() and described in _checked:
        return
    shapes, dtypes = described[:3], described[3:]
    check_operands(Operands(*(_Described(s[::2] + s[1::2], d) for s, d in zip(shapes, dtypes, strict=True))))
    if not torch.compiler.is_compiling() and len(_checked) < 4096:
        _checked.add(described)


def _broadcast(x, enable_gqa: bool):
    """Leading axes broadcast, of heads too unless they are grouped."""
    tail = 3 if enable_gqa else 2
    for name, a in zip(("query", "key", "value"), x, strict=True):
        if a.dim() < tail:
            raise ValueError(f"`{name}` must have at least {tail} axes: got shape {tuple(a.shape)}")
    try:
        lead = torch.broadcast_shapes(*(a.shape[:-tail] for a in x))
    except RuntimeError as error:
        shapes = ", ".join(str(tuple(a.shape)) for a in x)
        more = "" if enable_gqa else "; for groups of query heads that share a key head, pass enable_gqa=True"
        raise ValueError(f"leading axes of `query`, `key` and `value` must broadcast: got {shapes}{more}") from error
    return [a.expand(*lead, *a.shape[-tail:]) for a in x]


def _four_dimensional(mask: Tensor, scores) -> Tensor:
    """[1|B, 1|N, 1|T, 1|S]: axes of length one stay, so that a bias is not spread over the batch."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"`attn_mask` must be boolean or floating point: got {mask.dtype}; cast it")
    shape = (1,) * (len(scores) - mask.dim()) + tuple(mask.shape)
    if len(shape) != len(scores) or any(n not in (1, m) for n, m in zip(shape, scores, strict=True)):
        raise ValueError(f"`attn_mask` must broadcast to {tuple(scores)}: got shape {tuple(mask.shape)}")
    lead = scores[:-3] if any(n != 1 for n in shape[:-3]) else ()
    return mask.reshape(shape).expand(*(lead or shape[:-3]), *shape[-3:]).reshape(math.prod(lead), *((1, *shape)[-3:]))
