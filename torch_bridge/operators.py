"""The operators, which PyTorch's dispatcher, compiler and profiler see; `signatures.py` says what they take and give."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from torch_bridge.compute import compute
from torch_bridge.flops import flops
from torch_bridge.private import get_eval_frame_callback, skip
from torch_bridge.signatures import BIASES, OPERATORS, allocate, gives_gradients, split, wants_bias

library = torch.library.Library("torch_bridge", "DEF")
ops = torch.ops.torch_bridge


def outside_dynamo(function: Callable) -> Callable:
    """torch.compiler.disable, which costs a microsecond even where nothing is compiled."""
    disabled = torch.compiler.disable(function)
    if skip is None or get_eval_frame_callback is None:
        return disabled
    return skip(lambda *args: (function if get_eval_frame_callback() is None else disabled)(*args))


def filled(results: Sequence[Tensor | None], like: Tensor) -> tuple[Tensor, ...]:
    """The results as the dispatcher takes them: an empty tensor for each that is not wanted."""
    return tuple([like.new_empty(0) if a is None else a for a in results])


def _fold(name: str, info, in_dims, *args):
    """vmap: the mapped axis joins the batch axis, which a mask need not have unless its gradient is wanted."""

    def lead(a, d):
        return a.unsqueeze(0).expand(info.batch_size, *a.shape) if d is None else a.movedim(d, 0)

    operator = OPERATORS[name]
    place = {tensor: i for i, tensor in enumerate(operator.tensors)}
    q, mask = place["q"], place["mask"]
    batch = lead(args[q], in_dims[q]).shape[1]
    of_mask = gives_gradients(name) and wants_bias(name, args[-1])
    shared = () if of_mask else tuple(place[bias] for bias in BIASES if bias in place)
    # the batch axis of a mask is that of its tangent
    alone = all(args[i] is None or (in_dims[i] is None and args[i].shape[0] == 1) for i in shared)
    folded = list(args)
    for i, (a, d) in enumerate(zip(args, in_dims, strict=True)):
        if isinstance(a, Tensor) and not (i in shared and alone):
            a = lead(a, d)
            folded[i] = a.expand(-1, batch, *a.shape[2:]).flatten(0, 1)
    results = [a if a.dim() == 1 else a.unflatten(0, (info.batch_size, batch)) for a in getattr(ops, name)(*folded)]
    if of_mask and lead(args[mask], in_dims[mask]).shape[1] == 1:
        named = zip(operator.results, results, strict=True)
        results = [a.sum(1, keepdim=True) if result in BIASES and a.dim() > 1 else a for result, a in named]
    return tuple(results), tuple(None if a.dim() == 1 else 0 for a in results)


def _fold_forward_dual(info, in_dims, *args):
    of_x, of_tx, (of_selection, *others) = split("forward_dual", in_dims)
    if any(d is not None for d in (*of_x, of_selection)):
        return _fold("forward_dual", info, in_dims, *args)
    dims = (*of_x, None, None, *of_tx, of_selection, *others)  # of `tangent`, which takes y too
    o, lse, ty, of_ty = _tangent_apart(partial(_fold, "tangent", info, dims), *args)
    return (o, lse, *ty), (None, None, *of_ty)


def _tangent_apart(tangent, *args):
    """forward_dual of many tangents at one point, as in jacfwd: one forward."""
    x, tx, static = split("forward_dual", args)
    y = ops.forward(*x, *static)
    return *y, *tangent(*x, *y, *tx, *static)


for _name, _operator in OPERATORS.items():
    library.define(_name + _operator.schema, tags=torch.Tag.pt2_compliant_tag)
    _kernel = lambda *args, name=_name: filled(compute(name, *args), args[0])
    library.impl(_name, outside_dynamo(_kernel), "CompositeExplicitAutograd")
    torch.library.register_fake(f"torch_bridge::{_name}", partial(allocate, _name), lib=library)
    _rule = _fold_forward_dual if _name == "forward_dual" else partial(_fold, _name)
    torch.library.register_vmap(f"torch_bridge::{_name}", _rule, lib=library)
    register_flop_formula(getattr(ops, _name))(partial(flops, _name))
# torch.autograd.functional.jacobian(strategy="forward-mode", vectorize=True), and gradcheck
library.impl("forward_dual", partial(_tangent_apart, ops.tangent), "Batched")
