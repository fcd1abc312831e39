"""The entry points of flash-attn, and of Tri Dao's older `flash_attn_triton.py`: their layout, and their arguments."""

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

from torch import Tensor
from torch.nn.attention.bias import CausalBias
from torch.overrides import handle_torch_function, has_torch_function

from jax_flash_jvp.problem import Alignment, lower_right_of
from torch_bridge.attention import alignment_of, attend, context_of_call, options_of, overriding
from torch_bridge.checks import check_flag, check_number, check_tensor

Results = tuple[Tensor, Tensor, None]
OLDER = ("bias", "causal", "softmax_scale")


def _in_either_order(function: Callable) -> Callable:
    """What follows the tensors may also stand in the order of `flash_attn_triton.py`, which begins with a bias or None."""
    names = [*inspect.signature(function).parameters]
    count = names.index("dropout_p")

    @functools.wraps(function)
    def either(*args: Any, **named: Any) -> Any:
        tensors, others = args[:count], args[count:]
        if others and (others[0] is None or isinstance(others[0], Tensor | CausalBias)):
            if len(others) > len(OLDER):
                raise TypeError(
                    f"only `causal` and `softmax_scale` may follow a `bias` by position: got {len(others) - 1} arguments"
                )
            given = dict(zip(OLDER, others, strict=False), causal_alignment="upper_left")
            for name in given.keys() & named.keys():
                raise TypeError(f"`{name}` must not be given twice, by position and by name")
            return function(*tensors, **given, **named)
        return function(*args, **named)

    return either


@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, *arguments: Any, return_attn_probs: Literal[True], **named: Any
) -> Results: ...
@overload
def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **named: Any) -> Tensor: ...
@_in_either_order
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    bias: Tensor | CausalBias | None = None,
    causal_alignment: Alignment | None = None,
) -> Tensor | Results:
    """:func:`torch_bridge.scaled_dot_product_attention` with the layout and the arguments of the flash-attn package.

    q [B, L, Hq, E], k [B, S, H, E] and v [B, S, H, Ev] give a contiguous [B, L, Hq, Ev].  Hq is a multiple of H.

    Args:
      dropout_p, softmax_scale: `dropout_p` and `scale` of that function.
      causal: query i sees keys 0 … i + S - L, so that the last query sees all; but see `causal_alignment`.
      window_size: (left, right): query i sees keys i + S - L - left … i + S - L + right; -1 means no limit on that side.
      softcap: `logits_soft_cap` of that function; 0 means none.
      alibi_slopes: not served; must be None.
      deterministic: `deterministic` of that function; False here is None there.
      return_attn_probs: also return the log-sum-exp of the scores, [B, Hq, L] and differentiable, and None for the
        probabilities, which are never formed.
      bias: `attn_mask` of that function, which may here be combined with `causal`.
      causal_alignment: as in that function.  The default is "lower_right", as in flash-attn since 2.1, and "upper_left" with a
        `bias`.

    Returns:
      [B, L, Hq, Ev] in the dtype of `q`; with `return_attn_probs`, (output, log-sum-exp, None).

    Raises:
      ValueError: shapes or devices that do not fit, numbers out of range, `alibi_slopes`, `causal` beside a CausalBias.
      TypeError: dtypes that are not supported or differ, an argument that should be a tensor, flag or number and is not, a
        `window_size` that is not a pair of integers, an argument given twice, too many arguments after a `bias`.
      RuntimeError: as in :func:`torch_bridge.scaled_dot_product_attention`.

    Calls in the order of `flash_attn_triton.py` keep their meaning: a bias or None after the tensors, then `causal` and
    `softmax_scale`; query i sees keys 0 … i.  Errors about how tensors fit speak of `query`, `key` and `value`.
    """
    tensors = q, k, v, overriding(bias)
    if has_torch_function(tensors):
        return handle_torch_function(
            flash_attn_func, tensors, q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
            deterministic, return_attn_probs, bias=bias, causal_alignment=causal_alignment,
        )  # fmt: skip
    for name, a in zip("qkv", (q, k, v), strict=True):
        check_tensor(name, a)
        if a.dim() != 4:
            raise ValueError(f"`{name}` must have shape [batch, length, heads, head dimension]: got {tuple(a.shape)}")
    context = context_of_call(q)
    check_flag("causal", causal)
    check_flag("deterministic", deterministic)
    check_flag("return_attn_probs", return_attn_probs)
    if isinstance(dropout_p, bool):
        raise TypeError(f"`dropout_p` must be a number: got {dropout_p}; for causality pass causal=True")
    if softmax_scale is not None:
        check_number("softmax_scale", softmax_scale)
    if alibi_slopes is not None:
        raise ValueError(
            "`alibi_slopes` are not served: pass -slope * distance of query and key as a `bias` [1, heads, L, S], or, if "
            "`causal`, slope * position of the key [1, heads, 1, S], which takes less memory"
        )
    if bias is not None:
        check_tensor("bias", bias)
    check_number("softcap", softcap)
    if softcap < 0:
        raise ValueError(f"`softcap` must be positive, or 0 for none: got {softcap}")
    q, k, v = (a.transpose(1, 2) for a in (q, k, v))
    window = window_from(window_size)
    options: tuple[str, ...] = ()
    alignment = causal_alignment or ("lower_right" if bias is None else "upper_left")
    if isinstance(bias, CausalBias):
        if causal:
            raise ValueError("`causal` must not be given together with a `bias` that is a CausalBias: leave it out")
        alignment, bias = alignment_of("bias", bias, q, k, causal_alignment or "upper_left", context), None
        causal = True
    lower_right_of(alignment)  # raises
    if not (causal or window) or q.shape[2] == k.shape[2]:
        alignment = "upper_left"  # which is then the same
    if type(dropout_p) not in (int, float) or dropout_p or softcap or window or alignment == "lower_right":
        options = options_of(dropout_p, alignment, window, softcap or None)
        if dropout_p == 1:
            v = v * 0
    o, log_sum_exp = attend(
        q, k, v, bias, causal, softmax_scale, True, options, context=context, with_lse=return_attn_probs, mask_name="bias",
        deterministic=deterministic or None,
    )  # fmt: skip
    o = o.transpose(1, 2)
    return (o, log_sum_exp, None) if return_attn_probs else o


@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, *arguments: Any, return_attn_probs: Literal[True], **named: Any
) -> Results: ...
@overload
def flash_attn_qkvpacked_func(qkv: Tensor, *arguments: Any, **named: Any) -> Tensor: ...
@_in_either_order
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    bias: Tensor | CausalBias | None = None,
    causal_alignment: Alignment | None = None,
) -> Tensor | Results:
    """:func:`flash_attn_func` of qkv [B, L, 3, H, E].  The packed tensor is not copied.

    Raises:
      ValueError: `qkv` has another shape; also as in :func:`flash_attn_func`.
      TypeError: `qkv` is not a tensor; also as in :func:`flash_attn_func`.
    """
    tensors = qkv, overriding(bias)
    ours: dict[str, Any] = dict(bias=bias, causal_alignment=causal_alignment)
    others: list[Any]
    others = [dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs]
    if has_torch_function(tensors):
        return handle_torch_function(flash_attn_qkvpacked_func, tensors, qkv, *others, **ours)
    return flash_attn_func(*unpacked("qkv", qkv, 3), *others, **ours)


@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, *arguments: Any, return_attn_probs: Literal[True], **named: Any
) -> Results: ...
@overload
def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *arguments: Any, **named: Any) -> Tensor: ...
@_in_either_order
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    bias: Tensor | CausalBias | None = None,
    causal_alignment: Alignment | None = None,
) -> Tensor | Results:
    """:func:`flash_attn_func` of q [B, L, Hq, E] and kv [B, S, 2, H, E].  The packed tensor is not copied.

    Raises:
      ValueError: `kv` has another shape; also as in :func:`flash_attn_func`.
      TypeError: `kv` is not a tensor; also as in :func:`flash_attn_func`.
    """
    tensors = q, kv, overriding(bias)
    ours: dict[str, Any] = dict(bias=bias, causal_alignment=causal_alignment)
    others: list[Any]
    others = [dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs]
    if has_torch_function(tensors):
        return handle_torch_function(flash_attn_kvpacked_func, tensors, q, kv, *others, **ours)
    return flash_attn_func(q, *unpacked("kv", kv, 2), *others, **ours)


def unpacked(name: str, packed: Tensor, count: int, lead: Sequence[str] = ("batch", "length")) -> tuple[Tensor, ...]:
    check_tensor(name, packed)
    if packed.dim() != len(lead) + 3 or packed.shape[len(lead)] != count:
        raise ValueError(
            f"`{name}` must have shape [{', '.join(lead)}, {count}, heads, head dimension]: got {tuple(packed.shape)}"
        )
    return packed.unbind(len(lead))


def window_from(size: Any) -> tuple[int | None, int | None] | None:
    """`local_window_size` of a `window_size`."""
    try:
        left, right = (operator.index(n) for n in size)
    except (TypeError, ValueError):
        raise TypeError(f"`window_size` must be a pair of integers, -1 for no limit: got {size!r}") from None
    return None if left < 0 and right < 0 else (None if left < 0 else left, None if right < 0 else right)
