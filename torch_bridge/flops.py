"""The operations of an operator's matrix products, for `torch.utils.flop_counter`."""

from collections.abc import Sequence
from typing import Any

from torch_bridge.groups import Group
from torch_bridge.options import parsed, ring_of
from torch_bridge.signatures import OPERATORS, OPTIONS_AT, gives_gradients


def flops(name: str, *args: Any, **_: Any) -> int:
    """Floating-point operations of a call with these arguments, with shapes in the place of tensors.  Scores that causality and
    the window hide do not count.  Those that tensors hide (masks, lengths, segments, ranges) do."""
    given = dict(zip(OPERATORS[name].tensors, args, strict=False))
    (batch, heads, queries, width), (*_, keys, _), (*_, value_width) = given["q"], given["k"], given["v"]
    is_causal, options = args[OPTIONS_AT[name] - 2], args[OPTIONS_AT[name]]
    by_width, by_value_width = _products(name, given, args[-1] if gives_gradients(name) else ())
    pairs = _seen(bool(is_causal), options, queries, keys)
    return 2 * batch * heads * pairs * (by_width * width + by_value_width * value_width)


def _products(name: str, given: dict[str, Any], want: Sequence[bool]) -> tuple[int, int]:
    """How many matrix products have the width of queries, and how many that of values: P and S are probabilities and scores."""
    t_q, t_k, t_v, t_mask, d_o, t_d_o = (
        given.get(n) is not None for n in ("t_q", "t_k", "t_v", "t_mask", "d_o", "t_d_o")
    )
    t_p = t_q or t_k or t_mask
    if not gives_gradients(name):
        output = name != "tangent"  # o = P v, of which ȯ = Ṗ v + P v̇ is the tangent, and ṡ = q̇ kᵀ + q k̇ᵀ that of scores
        return 1 + t_q + t_k, output + t_p + t_v
    wanted = dict(zip(OPERATORS[name].results, want, strict=True))
    d_q, d_k, d_v, t_d_q, t_d_k, t_d_v = (wanted.get(n, False) for n in ("q", "k", "v", "t_q", "t_k", "t_v"))
    d_s, t_d_s = d_q or d_k or wanted["mask"], t_d_q or t_d_k or wanted.get("t_mask", False)
    scores = 1 + (t_d_s or t_d_v) * (t_q + t_k)
    d_p = (d_s or t_d_s) * d_o + t_d_s * (t_d_o + d_o * t_v)  # d_o vᵀ, and ḋ_o vᵀ + d_o v̇ᵀ
    values = d_v * d_o + t_d_v * (t_d_o + d_o * t_p)  # Pᵀ d_o, and Pᵀ ḋ_o + Ṗᵀ d_o
    # dS k and its like, and ḋS k + dS k̇ and their like
    return scores + d_q + d_k + t_d_q * (1 + t_k) + t_d_k * (1 + t_q), d_p + values


def _seen(is_causal: bool, options: str, queries: int, keys: int) -> int:
    """Pairs of a query and a key that causality and the window leave."""
    if not (isinstance(queries, int) and isinstance(keys, int)):  # symbols
        return queries * keys
    word = ring_of(options)
    rows = [(0, queries)]  # from, to
    everyone = queries
    if word is not None:  # all keys of the sequence pass by
        group = Group.of_word(word)
        everyone, keys, length = group.size * queries, group.size * keys, queries // group.chunks
        rows = [(i * length, (i + 1) * length) for i in group.chunks_of(group.rank)]
    left, right = parsed(is_causal, 1.0, options)[0].reach(everyone, keys)

    def up_to(n: int) -> int:  # Σ min(i, keys) for i = 1 … n
        inside = min(max(n, 0), keys)
        return inside * (inside + 1) // 2 + (max(n, 0) - inside) * keys

    count = 0
    for begin, end in rows:
        last = (end - begin) * keys if right is None else up_to(end + right) - up_to(begin + right)
        hidden = 0 if left is None else up_to(end - left - 1) - up_to(begin - left - 1)
        count += max(last - hidden, 0)
    return count
