"""Attention of one sequence in several processes, against one process: cases, and the processes."""

import datetime
import itertools
import os
import traceback
import types
from collections.abc import Mapping
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.func import grad, jvp  # noqa: E402

from torch_bridge import reorder_zigzag, scaled_dot_product_attention  # noqa: E402
from torch_oracle import launched, leaves, naive, normal  # noqa: E402

B, N, K = 2, 4, 2
LIMIT = datetime.timedelta(minutes=5)  # on GPUs, one may compile while the other waits


class Case(NamedTuple):
    arguments: Mapping = types.MappingProxyType({})
    cross: bool = False  # to more keys than queries
    groups: bool = False
    strategies: tuple = ("ulysses", "ring", "all_gather")
    bias: tuple | None = None  # its shape
    sinks: bool = False


class Sizes(NamedTuple):
    queries: int = 16
    keys: int = 24
    channels: int = 4

    def cases(self) -> dict[str, Case]:
        t, s = self.queries, self.keys
        ids = lambda length, each: (torch.arange(length) // each).expand(B, -1) + torch.arange(B)[:, None]
        visible = normal(B, 1, t, s) > -0.5
        edges = lambda heads: normal(B, heads, t, 2, 2, seed=3).mul(s).add(s / 2).long()  # some beyond the ends
        by_row = ("ring", "all_gather")
        return {
            "self": Case(),
            "cross": Case(cross=True),
            "causal": Case(dict(is_causal=True)),
            "causal-cross": Case(dict(is_causal=True), cross=True),
            "lower-right": Case(dict(is_causal=True, causal_alignment="lower_right"), cross=True),
            "window": Case(dict(local_window_size=(3 * t // 16, 1))),
            "window-behind": Case(dict(local_window_size=(7 * t // 16, -5 * t // 16))),
            "groups": Case(dict(enable_gqa=True, is_causal=True), groups=True),
            "lengths": Case(
                dict(
                    query_seq_lengths=torch.tensor([t, t // 3]), key_value_seq_lengths=torch.tensor([s // 2 - 3, s - 1]),
                    is_causal=True,
                ), cross=True,
            ),
            "segments": Case(
                dict(
                    query_segment_ids=ids(t, t // 3), key_value_segment_ids=ids(s, s // 3 - 1).to(torch.int32), is_causal=True
                ), cross=True,
            ),
            "ranges": Case(dict(key_ranges=edges(1)[:1], is_causal=True), cross=True),
            "ranges-of-heads": Case(dict(key_ranges=edges(N), enable_gqa=True), groups=True),
            "ranges-of-key-heads": Case(
                dict(key_ranges=edges(K), query_segment_ids=ids(t, 9), key_value_segment_ids=ids(t, 7), enable_gqa=True),
                groups=True,
            ),
            "mask": Case(dict(attn_mask=visible), cross=True, strategies=by_row),
            "mask-of-keys": Case(dict(attn_mask=visible[:, :, :1]), cross=True),
            "bias": Case(bias=(N, t, s), cross=True, strategies=by_row),
            "bias-of-keys": Case(bias=(B, 1, 1, s), cross=True),
            "bias-of-queries": Case(bias=(N, t, 1), cross=True, strategies=by_row),
            "bias-of-heads": Case(bias=(N, 1, 1)),
            "soft-cap": Case(dict(logits_soft_cap=0.7, scale=0.9)),
            "sinks": Case(dict(is_causal=True), sinks=True),
            "lse": Case(dict(return_lse=True, is_causal=True, causal_alignment="lower_right"), sinks=True),
            "dropout": Case(dict(dropout_p=0.4, is_causal=True)),
        }  # fmt: skip


SMALL = Sizes()


class Part:
    """What of whole tensors a process has."""

    def __init__(self, rank, n, order):
        self.rank, self.n, self.order = rank, n, order

    def cut(self, a, axis):
        a = reorder_zigzag(a, self.n, axis) if self.order == "zigzag" else a
        return a.chunk(self.n, axis)[self.rank].clone()

    def mask(self, a):
        if a.shape[-2] == 1:
            return a if a.shape[-1] == 1 else self.cut(a, a.ndim - 1)
        return self.cut(a, a.ndim - 2)

    def argument(self, name, a):
        if name == "attn_mask":
            return self.mask(a)
        if name == "key_ranges":
            return self.cut(a, 2)
        return self.cut(a, 1) if name.endswith("segment_ids") else a


def everything(attention, x, tangents):
    """Value and tangent, gradients, gradients through the tangent, and their tangents."""

    def through(*x):
        o, t_o = jvp(attention, x, tangents)
        return (o.sin() * t_o).sum()

    every = tuple(range(len(x)))
    gradient = grad(lambda *x: attention(*x).sin().sum(), every)
    return jvp(attention, x, tangents), gradient(*x), grad(through, every)(*x), jvp(gradient, x, tangents)[1]


def run_case(case, sizes, strategy, part, group, dtype, device="cpu"):
    """The worst result by the error rule, 1 being what it allows, and what was launched."""
    heads, keys = K if case.groups else N, sizes.keys if case.cross else sizes.queries
    shapes = [(B, N, sizes.queries, sizes.channels), *[(B, heads, keys, sizes.channels)] * 2]
    kinds = ["rows", "rows", "rows"]
    if case.bias is not None:
        shapes, kinds = [*shapes, case.bias], [*kinds, "attn_mask"]
    if case.sinks:
        shapes, kinds = [*shapes, (N,)], [*kinds, "sinks"]
    draw = lambda seed: tuple(normal(*shape, seed=i + seed).to(device, dtype) for i, shape in enumerate(shapes))
    x, tangents = draw(0), draw(50)
    whole = {name: a.to(device) if isinstance(a, torch.Tensor) else a for name, a in case.arguments.items()}

    def of(attention, arguments, seed=7):
        def call(q, k, v, *others):
            torch.manual_seed(seed)
            results = attention(q, k, v, **arguments, **dict(zip(kinds[3:], others, strict=True)))
            if isinstance(results, torch.Tensor):
                return results
            o, lse = results
            return (o * lse[..., None]).to(o.dtype)

        return call

    def cut(tensors):
        cuts = {"rows": lambda a: part.cut(a, 2), "attn_mask": part.mask, "sinks": torch.clone}
        return tuple(cuts[kind](a) for a, kind in zip(tensors, kinds, strict=True))

    arguments = {name: part.argument(name, a) for name, a in whole.items()}
    arguments |= dict(context_group=group, context_strategy=strategy, context_order=part.order)
    launched()
    # all draw as the first does
    got = everything(of(scaled_dot_product_attention, arguments, 7 + part.rank), cut(x), cut(tangents))
    seen = launched()
    if "dropout_p" in whole or dtype == torch.float64:
        expected = everything(of(scaled_dot_product_attention, whole), x, tangents)
        allowed = [1e-11 if dtype == torch.float64 else 1e-5 if dtype == torch.float32 else 2e-2] * len(
            leaves(expected)
        )
    else:
        double = lambda tensors: tuple(a.double() for a in tensors)
        expected = everything(of(naive, whole), double(x), double(tangents))
        rounded = everything(of(naive, whole), x, tangents)
        pairs = zip(leaves(rounded), leaves(expected), strict=True)
        allowed = [2 * relative(a, b) + 4 * torch.finfo(dtype).eps for a, b in pairs]
    errors = []
    for some, all_of_it in zip(got, expected, strict=True):
        primal = some is got[0]
        like = [*cut(x)[:1]] * 2 if primal else cut(x)
        parts = [part.cut(a, 2) for a in all_of_it] if primal else cut(all_of_it)
        for a, b, c in zip(some, parts, like, strict=True):
            assert a.shape == c.shape, (a.shape, c.shape)
            assert a.dtype == dtype
            if not primal and c.shape in (case.bias, (N,)):  # not cut: each process has its share of the gradient
                a = a.double()
                dist.all_reduce(a, group=group)
            errors.append(relative(a, b, group))
    return max(e / a for e, a in zip(errors, allowed, strict=True)), seen


def relative(a, b, group=None):
    """The norm of the error over that of what is right, in all processes together; of what is zero, as the gradient of a bias
    that all keys share, sums of large numbers leave some 1e-14."""
    a, b = a.double(), b.double()
    sums = torch.stack([(a - b).square().sum(), b.square().sum()])
    if group is not None:
        dist.all_reduce(sums, group=group)
    error, size = sums.sqrt().tolist()
    return error / max(size, 1e-2)


def spawn(worker, n, folder, *args):
    """worker(rank, n, folder, *args) -> problems, in n processes of a gloo group."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.multiprocessing.spawn(_process, (n, folder, worker, args), nprocs=n)
    return [line for rank in range(n) for line in (folder / f"problems-{rank}").read_text().splitlines()]


def all_of(rank, n, parts):
    """Several workers, by one set of processes."""
    for worker, *args in parts:
        yield from worker(rank, n, *args)


def _process(rank, n, folder, worker, args):
    torch.set_num_threads(1)
    backend = "nccl" if worker.__name__.startswith("gpu") else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=n, timeout=LIMIT)
    problems = [f"rank {rank} of {n}: {problem}" for problem in worker(rank, n, *args)]
    (folder / f"problems-{rank}").write_text("\n".join(problems))
    dist.barrier()
    dist.destroy_process_group()


def cases(rank, n, names, sizes=SMALL, dtype="float64", device="cpu"):
    """Those of these names, "name", "name/strategy" or "name/strategy/order"; what is wrong with them."""
    dtype = getattr(torch, dtype)
    for name in names:
        name, *chosen = name.split("/")
        case = sizes.cases()[name]
        strategies, orders = chosen[:1] or case.strategies, chosen[1:] or ("contiguous", "zigzag")
        for strategy, order in itertools.product(strategies, orders):
            if strategy == "ulysses" and (K if case.groups else N) % n:
                continue
            try:
                error, seen = run_case(case, sizes, strategy, Part(rank, n, order), dist.group.WORLD, dtype, device)
                if not error <= 1:
                    yield f"{name} {strategy} {order} {dtype}: {error:.2g} times the error that is allowed; launched {seen}"
            except Exception:
                yield f"{name} {strategy} {order} {dtype}: {traceback.format_exc()}".replace("\n", " | ")
            dist.barrier()


def gpu_cases(rank, n, names, sizes, dtype):
    return cases(rank, n, names, sizes, dtype, f"cuda:{rank}")
