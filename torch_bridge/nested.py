"""Nested tensors of the jagged layout: `values()`, in which the sequences of a batch are packed, and their `offsets()`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge

from jax_flash_jvp import visibility
from jax_flash_jvp.problem import warn_of_window, window_of
from torch_bridge.checks import check_flag, check_tensor, known
from torch_bridge.packing import blank, counted


def attend_nested(attend: Callable, query: Any, key: Any, value: Any, absent: dict[str, Any], **options: Any) -> Any:
    """What `attend`, :func:`torch_bridge.scaled_dot_product_attention`, gives for a nested `query`.  `absent`: the arguments
    that do not go with nested tensors."""
    for name, given in absent.items():
        if given is not None:
            raise ValueError(
                f"`{name}` does not go with nested tensors: leave it out, or call flash_attn_varlen_func with their `values()` "
                "and `offsets()`"
            )
    x = dict(query=query, key=key, value=value)
    ragged = _ragged_axis(x)
    if ragged == 1 and query.dim() > 3:  # not sequences are ragged, but how many there are of them
        results = attend(*map(_values, x.values()), **options)
    else:
        results = _packed(attend, x, ragged, **options)
    nest = _nest if torch.compiler.is_compiling() else _Nest.apply
    results = results if options["return_lse"] else (results,)
    results = tuple(nest(a, query.offsets(), query.lengths(), ragged) for a in results)
    return results if options["return_lse"] else results[0]


def _packed(
    attend: Callable, x: dict[str, Any], ragged: int, is_causal: Any, causal_alignment: Any, local_window_size: Any,
    **options: Any,
) -> Any:  # fmt: skip
    for name, a in x.items():
        if ragged != 2 or a.dim() != 4:
            raise ValueError(
                f"`{name}` must have shape [batch, heads, ragged length, head dimension]: got {a.dim()} axes, the ragged one at "
                f"{ragged}; of [batch, ragged length, heads, head dimension] pass the transpose(1, 2)"
            )
    check_flag("is_causal", is_causal)
    window = window_of(local_window_size)
    if not torch.compiler.is_compiling():  # which may not warn
        warn_of_window(window, is_causal)
    there = lambda n, a: n if n is None else n.to(a.device)  # offsets may be on the CPU
    edges: dict[str, Any] = {name: (there(a.offsets(), a), there(a.lengths(), a)) for name, a in x.items()}
    q, k, v = (blank(_values(a), counted(a.values().shape[1], *edges[name]))[None] for name, a in x.items())
    (q_edges, q_lengths), (k_edges, k_lengths) = edges["query"], edges["key"]
    ranges = visibility.documents(
        q.shape[2], q_edges, k_edges, lengths=q_lengths, key_lengths=k_lengths, is_causal=is_causal,
        window=window or (None, None), causal_alignment=causal_alignment, like=q,
    )  # fmt: skip
    # behind the last sequence is nobody's memory
    results = attend(
        q, k, v, key_ranges=ranges, query_seq_lengths=q_edges[-1:], key_value_seq_lengths=k_edges[-1:], **options
    )
    of_query = counted(q.shape[2], q_edges, q_lengths)
    if not options["return_lse"]:
        return blank(results[0], of_query)
    o, log_sum_exp = (a[0] for a in results)
    return blank(o, of_query), blank(log_sum_exp[..., None], of_query, -torch.inf)[..., 0]


def _ragged_axis(x: dict[str, Any]) -> int:
    """Along which all are ragged."""
    for name, a in x.items():
        check_tensor(name, a)
        if a.layout != torch.jagged:
            got = "a nested tensor of strided layout" if a.is_nested else "a dense tensor"
            raise ValueError(
                f"`{name}` must be a nested tensor of the jagged layout, like the other two: got {got}; "
                "torch.nested.as_nested_tensor(…, layout=torch.jagged) makes one"
            )
    axes = [a._ragged_idx for a in x.values()]  # private
    if not axes[0] == axes[1] == axes[2]:
        raise ValueError(f"`query`, `key` and `value` must be ragged along the same axis: got {axes}")
    query, key, value = x.values()
    for name, a in (("key", key), ("value", value)):
        if a.offsets().shape != query.offsets().shape:
            raise ValueError(
                f"`{name}` must have as many sequences as `query`, {query.offsets().shape[0] - 1}: got {a.offsets().shape[0] - 1}"
            )
    for a, b in ((key.offsets(), value.offsets()), (key.lengths(), value.lengths())):
        if a is not b and (a is None or b is None or known(a) != known(b)):
            raise ValueError(
                "`key` and `value` must have sequences of the same lengths: make both with the same offsets"
            )
    return axes[0]


# What PyTorch computes where a dense tensor becomes a nested one, in a backward with create_graph=True, has no derivative.


def _values(a: Tensor) -> Tensor:
    """`a.values()`; in such a backward, where `a` is a view of a dense tensor, a view of that."""
    values = a.values()
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return values
    base = values._base  # private
    if base is None or base.is_nested or not base.requires_grad or base.dtype != values.dtype:
        return values
    node, source = values.grad_fn, get_gradient_edge(base).node
    while node is not source:
        behind = [n for n, _ in node.next_functions if n is not None] if node is not None else []
        if len(behind) != 1:
            return values  # a leaf, or detached
        node = behind[0]
    return _Either.apply(values, base.as_strided(values.shape, values.stride(), values.storage_offset()))


class _Either(Function):
    """A tensor that was reached in two ways."""

    @staticmethod
    def forward(ctx, first, second):
        return first.view_as(first)

    @staticmethod
    def backward(ctx, cotangent):
        return (None, cotangent) if torch.is_grad_enabled() else (cotangent, None)


def _nest(values: Tensor, offsets: Tensor, lengths: Tensor | None, ragged: int) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=ragged)


class _Nest(Function):
    """`_nest`."""

    @staticmethod
    def forward(ctx, values, *others):
        return _nest(values, *others)

    @staticmethod
    def backward(ctx, cotangent):
        return _values(cotangent), None, None, None
