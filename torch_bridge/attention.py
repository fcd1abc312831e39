"""The public function, and what the other entry points share with it."""

import logging
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Never, TypedDict, Unpack, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.nn.attention.flex_attention import BlockMask
from torch.overrides import handle_torch_function, has_torch_function

from jax_flash_jvp.context import Order, Strategy
from jax_flash_jvp.problem import (
    DTYPES,
    SELECTORS,
    Alignment,
    Operands,
    blocks_of,
    check_operands,
    dropout_rate_of,
    lower_right_of,
    mask_block_of,
    of_padding,
    refuse_unknown,
    soft_cap_of,
    warn_of_lengths,
    warn_of_window,
    window_of,
)
from torch_bridge import private, rules
from torch_bridge.block_mask import tensor_of
from torch_bridge.checks import Described, check_devices, check_flag, check_number, check_shapes, check_tensor, known
from torch_bridge.context import Call, Context, current, of_open
from torch_bridge.implementation import Implementation, chosen
from torch_bridge.nested import attend_nested
from torch_bridge.operators import ops
from torch_bridge.options import CODE, select, words_of, words_of_choice

if TYPE_CHECKING:  # some builds have none
    from torch.distributed import DeviceMesh, ProcessGroup

logger = logging.getLogger(__name__)
FLOATS = tuple(getattr(torch, name) for name in DTYPES)
OURS = {  # by their names in other libraries
    "sm_scale": "scale", "softmax_scale": "scale", "causal": "is_causal", "window_size": "local_window_size",
    "sliding_window": "local_window_size", "softcap": "logits_soft_cap", "mask": "attn_mask", "bias": "attn_mask",
    "attn_bias": "attn_mask", "dropout_rate": "dropout_p", "dropout": "dropout_p", "s_aux": "sinks",
    "return_residual": "return_lse", "return_attn_probs": "return_lse",
}  # fmt: skip
DROPS_DERIVATIVES = torch.__version__ < "2.12"  # in inference mode, of every operator


OPEN = "open"  # the context that is


class Options(TypedDict, total=False):
    """The keywords of `scaled_dot_product_attention` after PyTorch's, but `return_lse`, by which its result differs."""

    scale: float | None
    enable_gqa: bool
    causal_alignment: Alignment
    local_window_size: tuple[int | None, int | None] | int | None
    query_seq_lengths: Tensor | None
    key_value_seq_lengths: Tensor | None
    query_segment_ids: Tensor | None
    key_value_segment_ids: Tensor | None
    key_ranges: Tensor | None
    mask_block_size: tuple[int, int] | None
    logits_soft_cap: float | None
    sinks: Tensor | None
    context_group: "ProcessGroup | DeviceMesh | None"
    context_strategy: Strategy | None
    context_order: Order | None
    deterministic: bool | None
    implementation: Implementation | None


@overload
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | BlockMask | None = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | BlockMask | None = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    *,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...
@overload
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | BlockMask | None = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    *,
    return_lse: bool,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]: ...
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | BlockMask | None = None,
    dropout_p: float = 0,  # torch.compile(dynamic=True) makes an input of 0.0, which torch.cond cannot be without
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    causal_alignment: Alignment = "upper_left",
    local_window_size: tuple[int | None, int | None] | int | None = None,
    query_seq_lengths: Tensor | None = None,
    key_value_seq_lengths: Tensor | None = None,
    query_segment_ids: Tensor | None = None,
    key_value_segment_ids: Tensor | None = None,
    key_ranges: Tensor | None = None,
    mask_block_size: tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    sinks: Tensor | None = None,
    context_group: "ProcessGroup | DeviceMesh | None" = None,
    context_strategy: Strategy | None = None,
    context_order: Order | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    implementation: Implementation | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Flash attention with fused JVPs, gradients and Hessian-vector products.

    .. math::  O = \mathrm{softmax}(\sigma Q K^T + M) V

    Replaces :func:`torch.nn.functional.scaled_dot_product_attention`.  The arguments up to `enable_gqa` are PyTorch's; the
    others are those of :func:`jax_flash_jvp.dot_product_attention`.  In shapes, N… are any number of batch axes, Hq is the
    number of query heads and H of key heads, L the number of queries and S of keys, E and Ev the head dimensions.

    Args:
      query: [N…, Hq, L, E]; float16, bfloat16, float32 or float64, of any strides.  The kernels serve E and Ev from 1 to 256.
      key: [N…, H, S, E], in the dtype of `query`.
      value: [N…, H, S, Ev], in the dtype of `query`.  Leading axes broadcast.
      attn_mask: broadcasts to [N…, Hq, L, S].  Boolean: True where a query sees a key.  Floating point: a bias that is added to
        the scores, and differentiable; -1e5 or less hides the key, and a row with no sum above -9e4 may count as fully hidden.
        May also be a :class:`torch.nn.attention.bias.CausalBias`, or FlexAttention's
        :class:`~torch.nn.attention.flex_attention.BlockMask`; each call evaluates its `mask_mod`, for partial blocks only.
      dropout_p: the share of probabilities to drop, in [0, 1], by PyTorch's default generator; the others are divided by
        1 - dropout_p.  Every derivative drops the same ones, except that torch.func.linearize draws anew whenever its result
        is called, as for PyTorch's own dropout.
      is_causal: query i sees keys 0 … i.  Must not be combined with `attn_mask`.
      scale: σ, a number; 1 / sqrt(E) by default.
      enable_gqa: let Hq be a multiple of H; consecutive groups of Hq // H query heads share a key head (arXiv:2305.13245).
        `value` may then have another number of heads that divides Hq.
      causal_alignment: "upper_left", or "lower_right".  With "lower_right", `is_causal` and `local_window_size` count from the
        last key: i + S - L replaces i.  Lengths do not change this.
      local_window_size: (left, right), or one number for both: query i sees keys i - left … i + right.  Either may be negative.
        None for one of the two means no limit on that side.
      query_seq_lengths, key_value_seq_lengths: integers [B], where B is the number of batch entries in N….  Everything beyond is
        padding: such queries give zeros, such keys are hidden.  Lengths below 0 count as 0, and lengths beyond the tensor as its
        length; a warning says so if they are on a CPU.
      query_segment_ids, key_value_segment_ids: integers [B, L] and [B, S]; a query sees the keys of its own segment.  Ids of
        dtype int64, uint32 or uint64 are sorted first.
      key_ranges: integers [B, Hq, L, R, 2]; the heads may be H or one, B may be one.  Query i sees the keys in any of the R
        intervals [start, end).  Intervals may be empty, overlap or pass the ends.  Keep R small;
        :mod:`jax_flash_jvp.visibility` makes the usual ones.  Fully masked tiles are skipped.
      mask_block_size: (b_q, b_k); each element of a boolean `attn_mask` then stands for a block of b_q queries and b_k keys.
        The mask must be [N…, Hq, ⌈L / b_q⌉, ⌈S / b_k⌉], and broadcasts in all but the last two axes.  Hidden blocks are
        skipped.
      logits_soft_cap: c; scores become c tanh(σ q·k / c), before `attn_mask` (arXiv:2408.00118, section 2).
      sinks: [Hq]; one more score for each head, with a value of zero (arXiv:2309.17453).  Differentiable.
      context_group, context_strategy, context_order: which processes share the sequences, and how; see
        :func:`context_parallel`, whose open context they override.  Tensors are then this process's parts, and L and S count
        its own queries and keys.  Segment ids and the rows of `key_ranges` are cut in the same way.  Lengths, windows and
        positions in ranges refer to the whole sequence.  `attn_mask` has this process's queries and all keys in the order of
        the sequence, or one row for its own keys; block masks raise.  All processes use the dropout of the first one.  For
        DTensors the placements say who shares what, and shapes are those of whole tensors.
      return_lse: also return the log-sum-exp of the scores.
      deterministic: True: gradients have the same bits on every run.  None: as torch.are_deterministic_algorithms_enabled()
        says at the call.  False: in long sequences, where a fixed order would take more than 5% longer, the terms of the
        query's gradient are added in any order, which changes its last bits.  DTensors that several processes hold whole get
        the same bits in all of them, whatever this says.
      implementation: None: the kernels on an NVIDIA GPU if they serve the call, else the tiled reference.  "triton": the
        kernels; a call that they do not serve raises.  "hopper" or "portable": one family of them, for comparison.
        "reference": the tiled reference, in PyTorch operations.  Derivatives use it too, except third derivatives, which
        always use the reference.  :func:`use_implementation` sets it for all calls inside a model.

    Returns:
      [N…, Hq, L, Ev] in the dtype of `query`, in the memory order of [N…, L, Hq, Ev].  With `return_lse`, the pair of the
      output and the log-sum-exp (natural logarithm) of each row of scores, [N…, Hq, L], in float32 (float64 for float64
      tensors), differentiable like the output.  Scores and sums are accumulated in float32 (float64).  A query that sees no key
      gives zeros, where some of PyTorch's kernels give NaN, and a log-sum-exp of -inf, with zero derivatives.  With `sinks` its
      log-sum-exp is the sink.

    Raises:
      ValueError: shapes or devices that do not fit, numbers out of range, `attn_mask` together with `is_causal`, a block mask
        where processes share a sequence, an `implementation` that is unknown or does not serve the call.
      TypeError: dtypes that are not supported or differ, a tensor as `scale` or `dropout_p`, an `is_causal` that is not a bool.
      UserWarning: a window that hides all keys, such as (-1, -1), or that has a -1 beside another number, such as (3, -1);
        lengths on a CPU that are out of range.  No warnings where torch.compile traces.
      RuntimeError: a derivative that torch.compile or forward_ad would get wrong; the message says what to do instead.
      NotImplementedError: an `implementation` is asked for, and one of its kernels does not fit the GPU.

    A call with tangents (torch.func.jvp, forward_ad) runs one kernel for the output and its tangent.  PyTorch code computes
    what the kernels do not serve, and tensors that are not on an NVIDIA GPU, in memory linear in L and S.  Two exceptions: a
    gradient through a JVP of a JVP keeps its scores, and autocast reaches into third derivatives.  Float32 matmuls on a GPU
    follow torch.backends.cuda.matmul.fp32_precision, and so torch.set_float32_matmul_precision.

    FlashAttention: arXiv:2205.14135, arXiv:2307.08691; its tangent: arXiv:2410.11081, appendix.
    """
    if unknown:
        refuse_unknown("scaled_dot_product_attention", unknown, OURS)
    tensors = query, key, value, overriding(attn_mask)
    if has_torch_function(tensors):  # subclasses, modes, torch.fx
        return handle_torch_function(
            scaled_dot_product_attention, tensors, query, key, value, attn_mask, dropout_p, is_causal,
            scale=scale, enable_gqa=enable_gqa, causal_alignment=causal_alignment, local_window_size=local_window_size,
            query_seq_lengths=query_seq_lengths, key_value_seq_lengths=key_value_seq_lengths,
            query_segment_ids=query_segment_ids, key_value_segment_ids=key_value_segment_ids,
            key_ranges=key_ranges, mask_block_size=mask_block_size, logits_soft_cap=logits_soft_cap, sinks=sinks,
            context_group=context_group, context_strategy=context_strategy, context_order=context_order, return_lse=return_lse,
            deterministic=deterministic, implementation=implementation,
        )  # fmt: skip
    context = context_of_call(query, context_group, context_strategy, context_order)
    if getattr(query, "is_nested", False):
        absent = dict(
            attn_mask=attn_mask, query_seq_lengths=query_seq_lengths, key_value_seq_lengths=key_value_seq_lengths,
            query_segment_ids=query_segment_ids, key_value_segment_ids=key_value_segment_ids, key_ranges=key_ranges,
            mask_block_size=mask_block_size, context_group=context,
        )  # fmt: skip
        return attend_nested(
            scaled_dot_product_attention, query, key, value, absent, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
            enable_gqa=enable_gqa, causal_alignment=causal_alignment, local_window_size=local_window_size,
            logits_soft_cap=logits_soft_cap, sinks=sinks, return_lse=return_lse, deterministic=deterministic,
            implementation=implementation,
        )  # fmt: skip
    check_flag("is_causal", is_causal)
    check_flag("enable_gqa", enable_gqa)
    check_flag("return_lse", return_lse)
    if deterministic is not None:
        check_flag("deterministic", deterministic)
    if is_causal and attn_mask is not None:
        raise ValueError("`attn_mask` and `is_causal` must not be given together: mask the future in `attn_mask`")
    if isinstance(attn_mask, CausalBias):
        check_tensor("query", query)
        check_tensor("key", key)
        is_causal, causal_alignment = True, alignment_of("attn_mask", attn_mask, query, key, causal_alignment, context)
        attn_mask = None
    mask_block = mask_block_of(mask_block_size, attn_mask)
    if isinstance(attn_mask, BlockMask):
        if context is not None:
            raise ValueError(
                "`attn_mask` must not be a BlockMask in a context: say it in `key_ranges`, or in a boolean tensor"
            )
        attn_mask, mask_block = _of_block_mask(attn_mask, query, key, mask_block)
    options: tuple[str, ...] = ()
    plain = type(dropout_p) in (int, float) and not dropout_p and causal_alignment == "upper_left"
    if not plain or local_window_size is not None or logits_soft_cap is not None or mask_block is not None:
        options = options_of(dropout_p, causal_alignment, local_window_size, logits_soft_cap, mask_block)
        if local_window_size is not None and not torch.compiler.is_compiling():  # which may not warn
            warn_of_window(window_of(local_window_size), bool(is_causal))
        if dropout_p == 1:
            check_tensor("value", value)
            value = value * 0
    selection: tuple[Tensor | None, ...]
    selection = query_seq_lengths, key_value_seq_lengths, query_segment_ids, key_value_segment_ids, key_ranges
    if any(a is not None for a in selection):
        check_tensor("query", query)
        named = zip(SELECTORS.values(), selection, strict=True)
        check_devices(query, ((name, a) for name, a in named if a is not None))
    else:
        selection = ()
    o, log_sum_exp = attend(
        query, key, value, attn_mask, is_causal, scale, enable_gqa, options, selection, sinks, context, return_lse,
        mask_block=mask_block, deterministic=deterministic, implementation=implementation,
    )  # fmt: skip
    if context is None and not torch.compiler.is_compiling():
        for name, lengths, a in zip(SELECTORS.values(), selection[:2], (query, key), strict=False):
            warn_of_lengths(name, lengths if lengths is None else known(lengths), a.shape[-2])
    return (o, log_sum_exp) if return_lse else o


def context_of_call(query: Any, group: Any = None, strategy: Any = None, order: Any = None) -> Any:
    """Who shares the sequences of a call; None: nobody."""
    if "torch.distributed.tensor" in sys.modules:
        from torch_bridge.dtensor import Distributed, is_dtensor

        if is_dtensor(query):
            if group is None:
                return Distributed(*of_open(strategy, order))
            raise ValueError(
                "`context_group` must not be given for DTensors: their placements say which processes share the sequence"
            )
    return current(group, strategy, order)


def overriding(mask):
    """A mask whose class may override a function: not a CausalBias, which would call PyTorch's kernels, nor what is no tensor."""
    return None if type(mask) in (CausalBias, BlockMask) else mask


def _of_block_mask(mask: BlockMask, query: Tensor, key: Tensor, mask_block) -> tuple[Tensor, tuple[int, int]]:
    if mask_block is not None:
        raise ValueError(
            "`mask_block_size` must not be given together with an `attn_mask` that is a BlockMask, which has its own"
        )
    check_tensor("query", query)
    check_tensor("key", key)
    if query.dim() != 4:
        raise ValueError(
            f"`query` must have four axes where `attn_mask` is a BlockMask: got shape {tuple(query.shape)}"
        )
    return tensor_of("attn_mask", mask, (*query.shape[:3], key.shape[-2]))


if (
    private.register_builtin is not None
):  # torch.jit.script cannot compile this package's function, but finds PyTorch's for it
    private.register_builtin(scaled_dot_product_attention, "aten::scaled_dot_product_attention")


def alignment_of(
    name: str, bias: CausalBias, query: Tensor, key: Tensor, alignment: Alignment = "upper_left", context: Context | None = None
) -> Alignment:  # fmt: skip
    """`causal_alignment` of a CausalBias, which must have the size of the scores where that matters."""
    lower_right_of(alignment)  # raises
    if bias.variant == CausalVariant.UPPER_LEFT:
        if alignment != "upper_left":
            raise ValueError(f"`{name}` is a causal_upper_left, but `causal_alignment` is {alignment!r}: leave out one")
        return "upper_left"
    n = 1 if context is None else context.parts
    size, scores = (bias.seq_len_q, bias.seq_len_kv), (n * query.shape[-2], n * key.shape[-2])
    if size != scores:
        raise ValueError(f"`{name}` must be made for {scores} queries and keys: got causal_lower_right{size}")
    return "lower_right"


def options_of(dropout_p, alignment, window, soft_cap, mask_block=None) -> tuple[str, ...]:
    """The words of `options`, of arguments that users gave."""
    check_number("dropout_p", dropout_p)
    if soft_cap is not None:
        check_number("logits_soft_cap", soft_cap)
    window, soft_cap = window_of(window), soft_cap_of(soft_cap)
    return words_of(window, lower_right_of(alignment), soft_cap, dropout_rate_of("dropout_p", dropout_p), mask_block)


def _with_sinks(o: Tensor, log_sum_exp: Tensor, sinks: Tensor, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    """A sink takes the share sigmoid(sink - ℓ) of the probability; in a row that sees no key, all of it."""
    hidden = log_sum_exp == -torch.inf
    log_sum_exp = log_sum_exp.masked_fill(hidden, 0)
    sinks = sinks.to(log_sum_exp.dtype)[:, None]
    softplus = lambda x: F.softplus(x, threshold=40)  # x where float64 shows no difference
    # sigmoid(ℓ - sink), as in `jax_flash_jvp`
    share = torch.exp(-softplus(sinks - log_sum_exp)).masked_fill(
        hidden, 0
    )  # no product, as cotangents may be NaN there
    # in the memory order of o: PyTorch cannot change a tangent's where sizes are symbolic
    o = (o.transpose(1, 2) * share.transpose(1, 2)[..., None].contiguous()).to(o.dtype).transpose(1, 2)
    if not with_lse:
        return o, None
    # torch.logaddexp has second derivatives of NaN where the two are far apart
    above, below = log_sum_exp + softplus(sinks - log_sum_exp), sinks + softplus(log_sum_exp - sinks)
    both = torch.where(log_sum_exp > sinks, above, below)
    return o, torch.where(hidden, sinks, both)


def attend(
    query, key, value, mask, is_causal: bool, scale, enable_gqa: bool, options=(), selection=(), sinks=None,
    context=OPEN, with_lse=False, mask_name="attn_mask", mask_block=None, deterministic=None,
    implementation=None,
) -> tuple[Tensor, Any]:  # fmt: skip
    """(o, ℓ); ℓ may be None unless it is asked for."""
    if context is OPEN:
        context = context_of_call(query)
    if context is not None and mask_block is not None:
        raise ValueError(
            "`mask_block_size` does not go with a context: say it in `key_ranges`, or in a mask without blocks"
        )
    compiled = torch.compiler.is_compiling()
    if not compiled and not _Said.sdpa_kernel and logger.isEnabledFor(logging.DEBUG):
        _say_sdpa_kernel()
    if DROPS_DERIVATIVES and not compiled and torch.is_inference_mode_enabled():
        _check_underived()
    x: Sequence[Tensor] = (query, key, value)
    check_devices(query, zip(("query", "key", "value"), x, strict=True))
    if mask is not None:
        check_devices(query, ((mask_name, mask),))
    if scale is not None:
        check_number("scale", scale)
    kind = query.device.type
    if kind in ("cpu", "cuda", "xpu", "mps") and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x = [a.to(dtype) if a.is_floating_point() and a.dtype != torch.float64 else a for a in x]
    whole = query.dim() == key.dim() == value.dim() == 4 and query.shape[0] == key.shape[0] == value.shape[0]
    if not whole or not (key.shape[1] == value.shape[1] and (enable_gqa or key.shape[1] == query.shape[1])):
        x = _broadcast(x, enable_gqa)
    rows = x[0].shape[:-1]
    if mask is not None:
        # what is saved for a backward must not be; a compiler refuses to ask
        if (
            not compiled
            and not mask.is_floating_point()
            and mask.is_inference()
            and not torch.is_inference_mode_enabled()
        ):
            mask = mask.clone()
        keys = x[1].shape[-2]
        if context is not None:
            keys = context.columns_of(mask_name, mask, rows[-1], keys)
        mask = _four_dimensional(mask_name, mask, (*rows, keys), mask_block)
    q, k, v = x if whole else (a.reshape(math.prod(a.shape[:-3]), *((1, 1, *a.shape)[-3:])) for a in x)
    check_shapes(q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype)
    if selection:
        described = (Described(a.shape[::2] + a.shape[1::2], a.dtype) for a in (q, k, v))
        named = dict(
            zip(("query", "key", "value"), described, strict=True), **dict(zip(SELECTORS, selection, strict=False))
        )
        if context is not None:
            context.check_segments(selection[2:4], (q.shape[2], k.shape[2]))
        check_operands(Operands(**named))
    if sinks is not None:
        check_devices(query, (("sinks", sinks),))
        if sinks.dtype not in FLOATS:
            raise TypeError(f"`sinks` must be one of {', '.join(DTYPES)}: got {sinks.dtype}; cast it")
        if sinks.shape != q.shape[1:2]:
            raise ValueError(
                f"`sinks` must have shape ({q.shape[1]},), one number for each query head: got {tuple(sinks.shape)}"
            )
    scale = max(1, q.shape[-1]) ** -0.5 if scale is None else float(scale)
    deterministic = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    options = (*options, *words_of_choice(deterministic, chosen(implementation, q, v)))
    call = Call((q, k, v), mask, selection, bool(is_causal), options, scale, sinks, with_lse)
    o, log_sum_exp = _computed(call) if context is None else context.attend(_computed, mask_name, call)
    if whole:
        return o, log_sum_exp
    return o.reshape(*rows, v.shape[-1]), log_sum_exp.reshape(rows) if with_lse else None


def _computed(call: Call) -> tuple[Tensor, Any]:
    compiled = torch.compiler.is_compiling()
    (q, k, v), words = call.x, call.words
    selected, options = select(call.selection, words, q, k, call.seed, call.place)
    if compiled:
        options = f"{options} {CODE}"
    args = q, k, v, call.mask, selected, call.is_causal, call.scale, options
    o, log_sum_exp = (
        ops.forward(*args, True) if compiled else rules.forward(args, call.with_lse or call.sinks is not None)
    )
    return (o, log_sum_exp) if call.sinks is None else _with_sinks(o, log_sum_exp, call.sinks, call.with_lse)


class _Said:
    sdpa_kernel = False


def _say_sdpa_kernel() -> None:
    b = torch.backends.cuda
    if not (b.flash_sdp_enabled() and b.mem_efficient_sdp_enabled() and b.math_sdp_enabled() and b.cudnn_sdp_enabled()):
        _Said.sdpa_kernel = True
        logger.debug("torch.nn.attention.sdpa_kernel is without effect here: it chooses among the kernels of PyTorch")


def _check_underived() -> None:
    levels = private.interpreter_stack() or ()
    if forward_ad._current_level >= 0 or any(level.key() != private.TransformType.Vmap for level in levels):
        raise RuntimeError(
            "attention was differentiated in torch.inference_mode, where PyTorch before 2.12 gives zeros for the derivatives "
            "of every operator: use torch.no_grad"
        )


def _broadcast(x, enable_gqa: bool):
    """Leading axes broadcast, of heads too unless they are grouped."""
    tail = 3 if enable_gqa else 2
    for name, a in zip(("query", "key", "value"), x, strict=True):
        if a.dim() < tail:
            raise ValueError(f"`{name}` must have at least {tail} axes: got shape {tuple(a.shape)}")
    if enable_gqa:
        x = _as_many_heads(*x)
    try:
        lead = torch.broadcast_shapes(*(a.shape[:-tail] for a in x))
    except RuntimeError as error:
        shapes = ", ".join(str(tuple(a.shape)) for a in x)
        more = "" if enable_gqa else "; for groups of query heads that share a key head, pass enable_gqa=True"
        heads, lengths = {a.shape[-2] for a in x}, {a.shape[-3] for a in x if a.dim() > 2}
        if len(heads) == 1 < len(lengths) and max(heads) < min(lengths):
            more = (
                "; of [batch, length, heads, head dimension], pass the transpose(1, 2) of each, or call flash_attn_func"
            )
        raise ValueError(f"leading axes of `query`, `key` and `value` must broadcast: got {shapes}{more}") from error
    return [a.expand(*lead, *a.shape[-tail:]) for a in x]


def _as_many_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """With as many heads of keys as of values."""
    heads, of_keys, of_values = (a.shape[-3] for a in (query, key, value))
    if of_keys == of_values:
        return query, key, value
    if not of_keys or not of_values or heads % of_keys or heads % of_values:
        raise ValueError(
            "the number of heads of `query` must be a multiple of those of `key` and of `value`: got "
            f"{heads}, {of_keys} and {of_values}"
        )
    n = max(of_keys, of_values)
    n = heads if n % min(of_keys, of_values) else n  # not math.lcm, which takes no symbols
    several = lambda a: a.unsqueeze(-3).expand(*a.shape[:-2], n // a.shape[-3], *a.shape[-2:]).flatten(-4, -3)
    return query, several(key), several(value)


def _four_dimensional(name: str, mask: Tensor, scores, block: tuple[int, int] | None = None) -> Tensor:
    """[1|B, 1|N, 1|T, 1|S]: axes of length one stay, so that a bias is not spread over the batch."""
    if mask.dtype == torch.int32 and block is not None:  # a BlockMask
        return mask
    if block is not None:
        if mask.dtype != torch.bool:
            raise TypeError(f"`{name}` must be boolean where `mask_block_size` is given: got {mask.dtype}")
        blocks = blocks_of(scores[-2:], block)
        if tuple(mask.shape[-2:]) != blocks:
            raise ValueError(
                f"`{name}` must have {blocks[0]} rows and {blocks[1]} columns, as many blocks of `mask_block_size`={block} as "
                f"{scores[-2]} queries and {scores[-1]} keys have: got shape {tuple(mask.shape)}"
            )
        scores = (*scores[:-2], *blocks)
    if mask.dtype not in (torch.bool, *FLOATS):
        raise TypeError(f"`{name}` must be boolean or one of {', '.join(DTYPES)}: got {mask.dtype}; cast it")
    shape = (1,) * (len(scores) - mask.dim()) + tuple(mask.shape)
    if len(shape) != len(scores) or any(n not in (1, m) for n, m in zip(shape, scores, strict=True)):
        hint = of_padding(name, mask.shape, (math.prod(scores[:-3]), *scores[-3:]), name == "attn_mask")
        raise ValueError(f"`{name}` must broadcast to {tuple(scores)}: got shape {tuple(mask.shape)}{hint}")
    lead = scores[:-3] if any(n != 1 for n in shape[:-3]) else ()
    return mask.reshape(shape).expand(*(lead or shape[:-3]), *shape[-3:]).reshape(math.prod(lead), *((1, *shape)[-3:]))
