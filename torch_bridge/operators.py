"""The operators: what PyTorch's dispatcher, compiler and profiler see of a kernel, with the names of `reference.py`.

    forward          x                         -> o, ℓ
    forward_dual     x, tx                     -> o, ℓ, ȯ, μ
    tangent          x, tx, y                  -> ȯ, μ
    backward         x, cy, y                  -> the gradients of x
    backward_dual    x, tx, cy, cty, y, ty     -> the gradients of x, and of tx

A gradient that is not wanted is an empty tensor: a fixed number of tensors is what every dispatch key handles.
"""

import collections
import functools
import importlib.util
import logging
import math
import sys
import types
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback  # private
from torch._dynamo import eval_frame
from torch._dynamo.decorators import skip  # private too: this frame alone is not traced
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from jax_flash_jvp.problem import SELECTORS, Operands, Problem
from torch_bridge import reference
from torch_bridge.plans import precision_of
from torch_bridge.reference import Case

GROUPS = {
    "x": "Tensor q, Tensor k, Tensor v, Tensor? mask",
    "tx": "Tensor? t_q, Tensor? t_k, Tensor? t_v, Tensor? t_mask",
    "cy": "Tensor? d_o, Tensor? d_lse",
    "cty": "Tensor? d_to, Tensor? d_mu",
    "y": "Tensor o, Tensor lse",
    "ty": "Tensor t_o, Tensor mu",
}
STATIC = "Tensor? selection, bool is_causal, float scale, str options"  # of `case_of`
WANT = STATIC + ", bool[] want"
OPERATORS = {  # tensors, what follows them, number of results, matrix products if nothing is absent
    "forward": (["x"], STATIC + ", bool compiled=False", 2, 2),
    "forward_dual": (["x", "tx"], STATIC, 4, 6),
    "tangent": (["x", "tx", "y"], STATIC, 2, 6),
    "backward": (["x", "cy", "y"], WANT, 4, 5),
    "backward_dual": (["x", "tx", "cy", "cty", "y", "ty"], WANT, 8, 15),
}
library = torch.library.Library("torch_bridge", "DEF")
ops = torch.ops.torch_bridge
SELECTED = (*SELECTORS, "seed")
launches: collections.Counter[str] = collections.Counter()  # by operator, in this process: what tests count

logger = logging.getLogger(__name__)
TRITON = importlib.util.find_spec("triton") is not None  # PyTorch comes without, but on Linux
VIEWS = torch._C.DispatchKey.ADInplaceOrView
LOST = (
    "a compiled function that contains attention was called with tangents, inside a forward-mode level (torch.func.jvp or "
    "forward_ad.dual_level), where torch.compile loses the tangents of its inputs (pytorch#187284): open the level "
    "inside the compiled function"
)


def loses_tangents() -> bool:
    """Was the compiled program that runs in this thread called with tangents?  Within a forward-mode level, which is open for
    all threads, it does not say so, but the frames above hold what it was called with."""
    frame, found = sys._getframe(1), False
    while frame is not None and not (found and frame.f_code.co_name == "compile_wrapper"):
        # private: Dynamo calls what it compiled through this
        if frame.f_code.co_name == "_fn" and frame.f_code.co_filename == eval_frame.__file__:
            found, given = True, frame.f_locals.get("args", ())
            # as what calls this need not allow: a Function, a mode
            with forward_ad._set_fwd_grad_enabled(True), torch._C._SetExcludeDispatchKeyGuard(VIEWS, False):
                if any(isinstance(a, Tensor) and torch._VF._unpack_dual(a, level=0)[1] is not None for a in given):
                    return True
        frame = frame.f_back
    return not found


def outside_dynamo(function):
    """torch.compiler.disable, which costs a microsecond even where nothing is compiled."""
    disabled = torch.compiler.disable(function)
    return skip(lambda *args: (function if get_eval_frame_callback() is None else disabled)(*args))


def split(name: str, args):
    """The tensors in groups, and what follows them."""
    return [args[part] for part in _parts(name)]


@functools.cache
def _parts(name: str) -> list[slice]:
    ends = [*accumulate([4 if group.endswith("x") else 2 for group in OPERATORS[name][0]])]
    return [slice(*ends) for ends in pairwise([0, *ends, None])]


@functools.lru_cache(maxsize=1024)
def _problem(is_causal: bool, scale: float, options: str, precision: str) -> tuple[Problem, frozenset[str]]:
    """What the options say, and the names of what stands in a selection."""
    words = dict(word.partition("=")[::2] for word in options.split())
    window = tuple(int(words[side]) if side in words else None for side in ("left", "right"))
    problem = Problem(
        scale,
        is_causal,
        window=None if window == (None, None) else window,
        lower_right="lower_right" in words,
        soft_cap=float(words["soft_cap"]) if "soft_cap" in words else None,
        dropout_rate=float(words.get("dropout", 0)),
        precision=precision,
    )
    return problem, frozenset(words)


def case_of(q: Tensor, k: Tensor, selection: Tensor | None, is_causal: bool, scale: float, options: str) -> Case:
    """A selection is int32 [B, 4 + T + S]: the lengths of queries and keys, a seed of two numbers, and the segments of queries
    and keys, of which `options` names those that count."""
    problem, names = _problem(is_causal, scale, options, precision_of(q))
    x = Operands(q, k, None)
    if selection is not None:
        parts = (
            selection[:, 0],
            selection[:, 1],
            *selection[:, 4:].split([q.shape[2], k.shape[2]], 1),
            selection[:, 2:4],
        )
        x = x._replace(**{name: part for name, part in zip(SELECTED, parts, strict=True) if name in names})
    return Case(problem, x)


def _by_length(like: Tensor, shape) -> Tensor:
    """Uninitialised, in the memory order [B, T, N, D]: as the kernels write it.  No view, which autograd lets nobody change."""
    _, heads, length, channels = shape
    return like.new_empty_strided(shape, (length * heads * channels, channels, heads * channels, 1))


def _allocate(name: str, q, k, v, mask, *rest) -> tuple[Tensor, ...]:
    """The results, uninitialised: what fake and meta tensors give."""
    if name.startswith("backward"):
        x, new = (q, k, v, mask), (_by_length, _by_length, _by_length, Tensor.new_empty)
        return tuple(new[i % 4](x[i % 4], x[i % 4].shape) if w else q.new_empty(0) for i, w in enumerate(rest[-1]))
    shape, dtype, results = q.shape[:-1], torch.promote_types(q.dtype, torch.float32), OPERATORS[name][2]
    new = partial(_by_length, q, (*shape, v.shape[-1])), partial(q.new_empty, shape, dtype=dtype)
    return tuple(new[i % 2]() for i in range(results))


def on_nvidia(a: Tensor) -> bool:
    return a.is_cuda and torch.version.hip is None  # "cuda" is also what PyTorch calls AMD's


@functools.cache
def _launch() -> types.ModuleType:
    from torch_bridge import launch  # imports Triton

    return launch


def compute(name: str, *args) -> tuple[Tensor | None, ...]:
    """The results; None for a gradient that is not wanted."""
    if name == "forward" and args[-1] is True and forward_ad._current_level >= 0 and loses_tangents():  # private
        raise RuntimeError(LOST)
    launches[name] += 1
    kernels = on_nvidia(args[0])
    if kernels and not TRITON:
        kernels = False
        logger.debug("attention %s: Triton is not installed; the reference computes it", name)
    if kernels:
        results = _launch().planned(name, args)
        if results is not None:
            return results
    *tensors, static = split(name, args)
    case = case_of(*args[:2], *static[:4])
    groups = dict(zip(OPERATORS[name][0], tensors, strict=True), want=args[-1] if name.startswith("backward") else ())
    if kernels and _launch().served(groups["x"]):
        results = _launch().computed(name, args, groups, case)
        if results is not None:
            return results
    with torch.autocast(args[0].device.type, enabled=False):
        values = reference.run(name, case, **groups)
    results = _allocate(name, *args)
    for result, value in zip(results, values, strict=False):
        result.zero_() if value is None else result.copy_(value)
    return results


def filled(results, like: Tensor) -> tuple[Tensor, ...]:
    """As the dispatcher takes results: an empty tensor for each that is not wanted."""
    return tuple([like.new_empty(0) if a is None else a for a in results])


def _fold(name: str, info, in_dims, *args):
    """vmap: the mapped axis joins the batch axis, which a mask need not have unless its gradient is wanted."""

    def lead(a, d):
        return a.unsqueeze(0).expand(info.batch_size, *a.shape) if d is None else a.movedim(d, 0)

    batch = lead(args[0], in_dims[0]).shape[1]
    of_mask = name.startswith("backward") and any(args[-1][3::4])
    shared = () if of_mask else (3, 7) if "tx" in OPERATORS[name][0] else (3,)
    # the batch axis of a mask is that of its tangent
    alone = all(args[i] is None or (in_dims[i] is None and args[i].shape[0] == 1) for i in shared)
    folded = list(args)
    for i, (a, d) in enumerate(zip(args, in_dims, strict=True)):
        if isinstance(a, Tensor) and not (i in shared and alone):
            a = lead(a, d)
            folded[i] = a.expand(-1, batch, *a.shape[2:]).flatten(0, 1)
    results = [a if a.dim() == 1 else a.unflatten(0, (info.batch_size, batch)) for a in getattr(ops, name)(*folded)]
    if of_mask and lead(args[3], in_dims[3]).shape[1] == 1:
        results = [a.sum(1, keepdim=True) if i % 4 == 3 and a.dim() > 1 else a for i, a in enumerate(results)]
    return tuple(results), tuple(None if a.dim() == 1 else 0 for a in results)


def _fold_forward_dual(info, in_dims, *args):
    if any(d is not None for d in (*in_dims[:4], in_dims[8])):  # x or the selection
        return _fold("forward_dual", info, in_dims, *args)
    results = _tangent_apart(partial(_fold, "tangent", info, (*in_dims[:8], None, None, *in_dims[8:])), *args)
    return (*results[:2], *results[2]), (None, None, *results[3])


def _tangent_apart(tangent, *args):
    """forward_dual of many tangents at one point, as in jacfwd: one forward."""
    x, tx, static = split("forward_dual", args)
    y = ops.forward(*x, *static)
    return *y, *tangent(*x, *tx, *y, *static)


for _name, (_groups, _static, _results, _products) in OPERATORS.items():
    _schema = f"({', '.join(GROUPS[g] for g in _groups)}, {_static}) -> ({', '.join(['Tensor'] * _results)})"
    library.define(_name + _schema, tags=torch.Tag.pt2_compliant_tag)
    _kernel = lambda *args, name=_name: filled(compute(name, *args), args[0])
    library.impl(_name, outside_dynamo(_kernel), "CompositeExplicitAutograd")
    torch.library.register_fake(f"torch_bridge::{_name}", partial(_allocate, _name), lib=library)
    _rule = _fold_forward_dual if _name == "forward_dual" else partial(_fold, _name)
    torch.library.register_vmap(f"torch_bridge::{_name}", _rule, lib=library)
    register_flop_formula(getattr(ops, _name))(
        lambda q, k, v, *_, products=_products, **__: products * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])
    )
# torch.autograd.functional.jacobian(strategy="forward-mode", vectorize=True), and gradcheck
library.impl("forward_dual", partial(_tangent_apart, ops.tangent), "Batched")
