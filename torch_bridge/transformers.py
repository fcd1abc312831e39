"""`attn_implementation="flash_jvp"` in transformers, from the import of this module on.

    import torch_bridge.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="flash_jvp")
    model.set_attn_implementation("flash_jvp")  # of one that is loaded

"jvp_attention" is the same under a name without "flash", for models that refuse or replace whatever is named so.
A model that does not call attention by name raises a ValueError when it is given this one, and so do calls with
`output_attentions`, with paged caches, and of causal packed sequences with a cache.
"""

# transformers asks two functions of that name: `mask` what the queries of a kind of layers see, and `attention` in each layer.
# What one hands to the other is None (all keys, or in causal layers those up to the query), a mask, or a `Causal`.

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    bidirectional_mask_function,
    causal_mask_function,
)

from torch_bridge.attention import attend, options_of
from torch_bridge.private import is_functorch_wrapped_tensor

NAMES = ("flash_jvp", "jvp_attention")
# models of which a part alone calls attention by name: others add what `mask` gives to scores
BY_HAND = ("BigBirdPegasus",)


class Causal(NamedTuple):
    """Query i of L sees the keys up to i + S - L, but for what these hide; in memory of O(L), where a mask takes L × S."""

    keys: Tensor | None = None  # [B, S]: False where a key is hidden
    left: int | None = None  # of a window
    documents: Tensor | None = None  # [B, L] where L = S: a query sees those of its own

    @property
    def ndim(self) -> int:  # transformers asks a mask that was made before whether it is padding
        return 4

    @property
    def shape(self) -> tuple[int, ...]:
        """In an encoder that generates transformers asks for how many keys it was made, of which `mask` makes nothing."""
        return (1,) * self.ndim


# ------------------------------------------------------------------------------------------------ what queries see


def mask(*, mask_function: Callable = causal_mask_function, **asked: Any) -> Tensor | Causal | None:
    """A `Causal` where that says all, of causality, windows, padding and packed sequences.  Else what transformers makes for
    "sdpa", None or a boolean mask [B, 1, L, S], but [B, 1, 1, S] where it is padding alone."""
    queries, keys, first, first_key = (
        asked.get(name, 0) for name in ("q_length", "kv_length", "q_offset", "kv_offset")
    )
    padding, end = asked.get("attention_mask"), first_key + keys
    if isinstance(padding, Causal):  # made before, by `generate`
        return padding
    # earlier versions tell positions instead; a static cache gives tensors
    told = "q_length" in asked and type(first) is int and type(first_key) is int
    if told and (padding is None or padding.shape[-1] >= end):
        padding = None if padding is None else padding[:, first_key:end]
        if padding is not None and not _unreadable(padding) and padding.all():
            padding = None
        if mask_function is bidirectional_mask_function and padding is not None:
            if asked.get("allow_is_bidirectional_skip"):
                return padding[:, None, None]
        elif first + queries == end:
            seen = _seen(mask_function, keys)
            if seen is not None and (asked.get("allow_is_causal_skip", True) or seen.documents is not None):
                seen = seen._replace(keys=padding)
                # layers need not know that they are causal: of some (NLLB-MoE) `is_causal` is False
                return None if queries == 1 and all(a is None for a in seen) else seen
    return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](mask_function=mask_function, **asked)


def _unreadable(a: Tensor) -> bool:
    return torch.compiler.is_compiling() or is_functorch_wrapped_tensor(a)


def _seen(function: Callable, keys: int) -> Causal | None:
    """What a mask function of transformers says, if it is causal.  Windows and packed sequences stand in closures, which a
    compiler does not read."""
    if function is causal_mask_function:
        return Causal()
    if torch.compiler.is_compiling() or function.__qualname__ != "and_masks.<locals>.and_mask":
        return None
    pair = _closure(function)["mask_functions"]
    if len(pair) != 2:
        return None
    first, second = pair
    if second is causal_mask_function and first.__qualname__ == "sliding_window_overlay.<locals>.inner_mask":
        left = _closure(first)["sliding_window"] - 1
        return Causal(left=left if left < keys - 1 else None)
    if second.__qualname__ != "packed_sequence_mask_function.<locals>.inner_mask":
        return None
    # positions begin anew with each sequence, and so have the order of the tokens
    if first.__qualname__ == "remap_positions_for_packed_sequence.<locals>.inner_mask":
        first = _closure(first)["mask_function"]
    seen = _seen(first, keys)
    return seen and seen._replace(documents=_closure(second)["packed_sequence_mask"])


def _closure(function: Callable) -> Mapping[str, Any]:
    cells = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))


# ------------------------------------------------------------------------------------------------ attention


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Causal | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of [B, H, L, E], as a contiguous [B, L, H, Ev], and no weights."""
    if others.get("output_attentions"):
        raise ValueError(
            "`output_attentions` is not served: the kernels never form the weights; set `attn_implementation` to 'eager'"
        )
    if others.get("block_table") is not None:
        raise ValueError("`block_table` is not served: generate without continuous batching, or with 'sdpa'")
    queries, keys = query.shape[2], key.shape[2]
    if is_causal is None:  # of layers that do not say, those that are causal are told by `mask`, but in a static cache
        is_causal = getattr(module, "is_causal", attention_mask is not None or keys > queries)
    causal = bool(is_causal) and queries > 1
    left = right = documents = key_documents = bias = lengths = key_lengths = None
    if isinstance(attention_mask, Causal):
        causal, bias = True, attention_mask.keys
        left, documents = attention_mask.left, attention_mask.documents
        key_documents = documents
    elif attention_mask is not None and attention_mask.dim() != 2:
        causal, bias = False, attention_mask
    else:
        bias = attention_mask  # padding, of models that treat whatever is named flash as FlashAttention
        if bias is None and causal and keys > queries and cu_seq_lens_q is None:  # the first tokens, in a static cache
            key, value, keys = key[:, :, :queries], value[:, :, :queries], queries
            position_bias = None if position_bias is None else position_bias[..., :queries]
        if sliding_window is not None and keys > sliding_window:
            left = right = sliding_window - 1
    if bias is not None and bias.dim() == 2:
        bias = bias[:, None, None].bool()
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None and documents is None:
        if causal and queries != keys:
            raise ValueError(
                f"`cu_seq_lens_q` and `cu_seq_lens_k` of {queries} queries and {keys} keys: causal packed sequences are served "
                "only without a cache"
            )
        documents, lengths = _documents(cu_seq_lens_q, query)
        key_documents, key_lengths = documents, lengths
        if cu_seq_lens_k is not cu_seq_lens_q:
            key_documents, key_lengths = _documents(cu_seq_lens_k, key)
    if position_bias is not None:
        if bias is None:
            bias = position_bias
        elif bias.dtype == torch.bool:
            bias = position_bias.masked_fill(~bias, -torch.inf)
        else:
            bias = position_bias + bias
    window = None if left is None else (left, right)
    from_the_end = queries != keys and (causal or window is not None)
    options = options_of(dropout, "lower_right" if from_the_end else "upper_left", window, softcap)
    if dropout == 1:
        value = value * 0
    selection = () if documents is None else (lengths, key_lengths, documents, key_documents)
    o, _ = attend(query, key, value, bias, causal, scaling, True, options, selection, s_aux, mask_name="attention_mask")
    return o.transpose(1, 2).contiguous(), None


def _documents(edges: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """([B, L], the number of the sequence in which each token is; [B], how many tokens lie before the end of the last one).  The
    sequences of the batch stand one after another; tokens that nobody wrote may lie behind the last."""
    batch, _, length, _ = a.shape
    tokens = torch.arange(batch * length, device=edges.device, dtype=edges.dtype).reshape(batch, length)
    numbers = torch.searchsorted(edges[1:], tokens, right=True, out_int32=True)
    return numbers, (edges[-1] - tokens[:, 0]).clamp(0, length)


# ------------------------------------------------------------------------------------------------ the name

_check = PreTrainedModel._check_and_adjust_attn_implementation


@functools.wraps(_check)
def _accept(self: PreTrainedModel, attn_implementation: str | None, *args: Any, **named: Any) -> str:
    """transformers takes any name with "flash" in it for a kernel to be downloaded, or replaces it by another."""
    if attn_implementation not in NAMES:
        return _check(self, attn_implementation, *args, **named)
    if not self._can_set_attn_implementation() or type(self).__name__.startswith(BY_HAND):
        raise ValueError(
            f"{type(self).__name__} does not call attention by name, which {attn_implementation!r} needs: if it has SDPA, load "
            "it with attn_implementation='sdpa', and call it inside torch_bridge.patch()"
        )
    return attn_implementation


for _name in NAMES:
    AttentionInterface.register(_name, attention)
    AttentionMaskInterface.register(_name, mask)
PreTrainedModel._check_and_adjust_attn_implementation = _accept
