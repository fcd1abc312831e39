"""flash-attn's entry point for generation: attention to a cache of keys and values, to which new ones are appended."""

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from jax_flash_jvp import visibility
from torch_bridge.attention import attend, context_of_call, options_of
from torch_bridge.checks import check_devices, check_flag, check_integers, check_number, check_tensor, known
from torch_bridge.flash_attn import window_from

UNSERVED = {
    "rotary_cos": "rotate `q` and `k` before the call",
    "rotary_sin": "rotate `q` and `k` before the call",
    "cache_leftpad": "pass the cache without the padding, or `key_ranges` to scaled_dot_product_attention",
    "block_table": "gather the pages of each sequence, as in k_cache[block_table].flatten(1, 2)",
    "alibi_slopes": "pass -slope * distance of query and key as the `bias` of flash_attn_func",
}


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: None = None,
    rotary_sin: None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: None = None,
    block_table: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention to a cache of keys and values, with the arguments of the flash-attn package.

    q is [B, L, Hq, E], k_cache [Bc, S, H, E] and v_cache [Bc, S, H, Ev].  If `k` and `v` are given, they are first written to the
    cache in place, from `cache_seqlens` on.

    Args:
      k, v: [B, new, H, E] and [B, new, H, Ev], to append.  None: nothing.
      cache_seqlens: how many keys each sequence has in the cache, without the new ones: an integer, or integers [B].  The cache
        behind them may hold anything.  None: S; then nothing can be appended.
      cache_batch_idx: integers [B], the cache entry of each sequence, all different.  None: all entries, in their order.
      causal, window_size: count from the lower right corner: the last query sees the last key.  -1 means no limit on that side.
      softmax_scale, softcap: as in :func:`torch_bridge.flash_attn_func`.
      rotary_cos, rotary_sin, cache_leftpad, block_table, alibi_slopes: not served; must be None.
      rotary_interleaved, num_splits: without effect.
      return_softmax_lse: also return the log-sum-exp of the scores, [B, Hq, L].

    Returns:
      [B, L, Hq, Ev] in the dtype of `q`.  With `return_softmax_lse`, the pair of the output and the log-sum-exp.  Both have every
      derivative with respect to `q`, `k`, `v` and the cache.  A backward through an earlier call raises a RuntimeError, since it
      needs values that were overwritten.  In a transform of torch.func, the cache must be an argument of the function, or a copy
      made in it.

    Raises:
      ValueError: shapes or devices that do not fit, numbers out of range, an argument that is not served, an open
        :func:`context_parallel`.  Also new keys for which the cache has no room, if their number is known; on a GPU PyTorch's
        assertion fails.
      TypeError: dtypes that differ or are not supported; also as in :func:`torch_bridge.flash_attn_func`.
    """
    tensors = q, k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx
    if has_torch_function(tensors):
        return handle_torch_function(
            flash_attn_with_kvcache, tensors, q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx,
            cache_leftpad, block_table, softmax_scale, causal, window_size, softcap, rotary_interleaved, alibi_slopes, num_splits,
            return_softmax_lse,
        )  # fmt: skip
    unserved = rotary_cos, rotary_sin, cache_leftpad, block_table, alibi_slopes
    for (name, remedy), given in zip(UNSERVED.items(), unserved, strict=True):
        if given is not None:
            raise ValueError(f"`{name}` is not served: {remedy}")
    for name, flag in (("causal", causal), ("return_softmax_lse", return_softmax_lse)):
        check_flag(name, flag)
    check_number("softcap", softcap)
    if softcap < 0:
        raise ValueError(f"`softcap` must be positive, or 0 for none: got {softcap}")
    if softmax_scale is not None:
        check_number("softmax_scale", softmax_scale)
    for name, a in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(name, a)
        if a.dim() != 4:
            raise ValueError(f"`{name}` must have shape [batch, length, heads, head dimension]: got {tuple(a.shape)}")
    if context_of_call(q) is not None:
        raise ValueError(
            "`k_cache` does not go with a context: call this in context_parallel(None), with the whole cache"
        )
    batch, queries, places = q.shape[0], q.shape[1], k_cache.shape[1]
    if v_cache.shape[:3] != k_cache.shape[:3] or (cache_batch_idx is None and k_cache.shape[0] != batch):
        raise ValueError(
            "`k_cache` and `v_cache` must have as many entries, positions and heads, and an entry for each of the "
            f"{batch} sequences of `q` or a `cache_batch_idx`: got {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    lengths = cache_seqlens
    if isinstance(lengths, int | torch.SymInt):
        lengths = torch.full((batch,), lengths, dtype=torch.int32, device=q.device)
    for name, integers in (("cache_batch_idx", cache_batch_idx), ("cache_seqlens", lengths)):
        if integers is not None:
            check_integers(name, integers, q, batch)
    entries = None if cache_batch_idx is None else cache_batch_idx.long()
    if (k is None) != (v is None):
        raise ValueError("`k` and `v` must be given together, or neither")
    if k is not None and v is not None:
        lengths = _append(q, k_cache, v_cache, k, v, lengths, entries)
    if entries is not None:
        k_cache, v_cache = k_cache[entries], v_cache[entries]
    window = window_from(window_size)
    ranges = None
    if causal or window is not None:
        left, right = window or (None, None)
        right = 0 if causal else right
        ranges = visibility.window(
            queries, left, right, offset=(places if lengths is None else lengths) - queries, like=q
        )
    q, k_cache, v_cache = (a.transpose(1, 2) for a in (q, k_cache, v_cache))
    options, selection = options_of(0.0, "upper_left", None, softcap or None), (None, lengths, None, None, ranges)
    o, log_sum_exp = attend(
        q, k_cache, v_cache, None, False, softmax_scale, True, options, selection, context=None, with_lse=return_softmax_lse
    )  # fmt: skip
    o = o.transpose(1, 2)
    return (o, log_sum_exp) if return_softmax_lse else o


def _append(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, entries: Tensor | None
) -> Tensor:
    """The lengths with new keys, which this writes behind those that are there."""
    if lengths is None:
        raise ValueError("`cache_seqlens` must say where `k` and `v` are appended: pass how many keys the cache has")
    batch, count = q.shape[0], k.shape[1]
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        check_devices(q, ((name, new),))
        shape = (batch, count, *cache.shape[2:])
        if tuple(new.shape) != shape:
            raise ValueError(f"`{name}` must have shape {shape} to be appended to the cache: got {tuple(new.shape)}")
        if new.dtype != cache.dtype:
            raise TypeError(
                f"`{name}` must have the dtype of `{name}_cache`: got {new.dtype} and {cache.dtype}; cast it"
            )
    numbers = known(lengths)
    if numbers and not 0 <= min(numbers) <= max(numbers) <= k_cache.shape[1] - count:
        raise ValueError(
            f"`k_cache` must have room for {count} new keys behind those of `cache_seqlens`: got {k_cache.shape[1]} positions "
            f"and {min(numbers)} to {max(numbers)} keys"
        )
    rows = torch.arange(batch, device=q.device) if entries is None else entries
    places = lengths[:, None].long() + torch.arange(count, device=q.device)
    k_cache[rows[:, None], places] = k
    v_cache[rows[:, None], places] = v
    return lengths + count
