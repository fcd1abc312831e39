"""The entry points of Tri Dao's `flash_attn_triton.py`: their layout, and their arguments."""

from torch import Tensor
from torch.nn.attention.bias import CausalBias
from torch.overrides import handle_torch_function, has_torch_function

from torch_bridge.attention import alignment_of, attend, context_of_call, options_of, overriding
from torch_bridge.checks import check_flag, check_number, check_tensor


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | CausalBias | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> Tensor:
    """:func:`torch_bridge.scaled_dot_product_attention` in the layout, and with the arguments, of Tri Dao's
    `flash_attn_triton.py`: q [B, L, Hq, E], k [B, S, H, E] and v [B, S, H, Ev], Hq a multiple of H, give a contiguous
    [B, L, Hq, Ev].  `bias` is like `attn_mask`, but goes with `causal` too: query i attends to keys 0 … i.  Errors about how
    they fit speak of `query`, `key` and `value`."""
    tensors = q, k, v, overriding(bias)
    if has_torch_function(tensors):
        return handle_torch_function(flash_attn_func, tensors, q, k, v, bias, causal, softmax_scale)
    for name, a in zip("qkv", (q, k, v), strict=True):
        check_tensor(name, a)
        if a.dim() != 4:
            raise ValueError(f"`{name}` must have shape [batch, length, heads, channels]: got {tuple(a.shape)}")
    context = context_of_call(q)
    check_flag("causal", causal)
    if softmax_scale is not None:
        check_number("softmax_scale", softmax_scale)
    if bias is not None:
        check_tensor("bias", bias)
    q, k, v = (a.transpose(1, 2) for a in (q, k, v))
    options: tuple[str, ...] = ()
    if isinstance(bias, CausalBias):
        if causal:
            raise ValueError("`causal` must not be given together with a `bias` that is a CausalBias: leave it out")
        causal, options, bias = (
            True,
            options_of(0.0, alignment_of("bias", bias, q, k, context=context), None, None),
            None,
        )
    return attend(q, k, v, bias, causal, softmax_scale, True, options, context=context, mask_name="bias").transpose(
        1, 2
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor, bias: Tensor | CausalBias | None = None, causal: bool = False, softmax_scale: float | None = None
) -> Tensor:
    """:func:`flash_attn_func` of qkv [B, L, 3, H, E], which is not copied."""
    tensors = qkv, overriding(bias)
    if has_torch_function(tensors):
        return handle_torch_function(flash_attn_qkvpacked_func, tensors, qkv, bias, causal, softmax_scale)
    q, k, v = _unpacked("qkv", qkv, 3)
    return flash_attn_func(q, k, v, bias, causal, softmax_scale)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    bias: Tensor | CausalBias | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> Tensor:
    """:func:`flash_attn_func` of q [B, L, Hq, E] and kv [B, S, 2, H, E], which is not copied."""
    tensors = q, kv, overriding(bias)
    if has_torch_function(tensors):
        return handle_torch_function(flash_attn_kvpacked_func, tensors, q, kv, bias, causal, softmax_scale)
    k, v = _unpacked("kv", kv, 2)
    return flash_attn_func(q, k, v, bias, causal, softmax_scale)


def _unpacked(name: str, packed: Tensor, count: int) -> tuple[Tensor, ...]:
    check_tensor(name, packed)
    if packed.dim() != 5 or packed.shape[2] != count:
        raise ValueError(
            f"`{name}` must have shape [batch, length, {count}, heads, channels]: got {tuple(packed.shape)}"
        )
    return packed.unbind(2)
