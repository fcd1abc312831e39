"""Attention of one sequence in several processes, against one process: cases, and the processes."""

import datetime
import itertools
import os
import traceback
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.func import grad, jvp  # noqa: E402

from torch_bridge import context_parallel, reorder_zigzag, scaled_dot_product_attention  # noqa: E402
from torch_oracle import Model, by_func, gradients, launched, leaves, loss, naive, normal  # noqa: E402

B, N, K = 2, 4, 2
LIMIT = datetime.timedelta(minutes=2)


class Case(NamedTuple):
    arguments: dict = {}
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
            "mask": Case(dict(attn_mask=visible), cross=True, strategies=by_row),
            "mask-of-keys": Case(dict(attn_mask=visible[:, :, :1]), cross=True),
            "bias": Case(bias=(N, t, s), cross=True, strategies=by_row),
            "bias-of-keys": Case(bias=(B, 1, 1, s), cross=True),
            "bias-of-queries": Case(bias=(N, t, 1), cross=True, strategies=by_row),
            "bias-of-heads": Case(bias=(N, 1, 1)),
            "soft-cap": Case(dict(logits_soft_cap=0.7, scale=0.9)),
            "sinks": Case(dict(is_causal=True), sinks=True),
            "dropout": Case(dict(dropout_p=0.4, is_causal=True)),
        }  # fmt: skip


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
        a = self.cut(a, a.ndim - 2)
        return a if a.shape[-1] == 1 or self.order == "contiguous" else reorder_zigzag(a, self.n, a.ndim - 1)

    def argument(self, name, a):
        if name == "attn_mask":
            return self.mask(a)
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
            return attention(q, k, v, **arguments, **dict(zip(kinds[3:], others, strict=True)))

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
        allowed = [1e-11 if dtype == torch.float64 else 1e-5 if dtype == torch.float32 else 2e-2] * len(leaves(expected))
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
    """The norm of the error over that of what is right, in all processes together."""
    a, b = a.double(), b.double()
    sums = torch.stack([(a - b).square().sum(), b.square().sum()])
    if group is not None:
        dist.all_reduce(sums, group=group)
    error, size = sums.sqrt().tolist()
    return error / max(size, 1e-3)


def spawn(worker, n, folder, *args):
    """worker(rank, n, folder, *args) -> problems, in n processes of a gloo group."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.multiprocessing.spawn(_process, (n, folder, worker, args), nprocs=n)
    return [line for rank in range(n) for line in (folder / f"problems-{rank}").read_text().splitlines()]


def all_of(rank, n, parts):
    """Several of these, by one set of processes."""
    for name, *args in parts:
        yield from globals()[name](rank, n, *args)


def _process(rank, n, folder, worker, args):
    torch.set_num_threads(1)
    backend = "nccl" if worker in (gpu_cases, gpu_models) else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=n, timeout=LIMIT)
    problems = [f"rank {rank} of {n}: {problem}" for problem in worker(rank, n, *args)]
    (folder / f"problems-{rank}").write_text("\n".join(problems))
    dist.barrier()
    dist.destroy_process_group()


def cases(rank, n, names, sizes=Sizes(), dtype="float64", device="cpu"):
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


# ------------------------------------------------------------------------------------------------ models


def by_tokens(width=8, length=16, batch=2):
    """x, t, r and v of a flow map over a sequence."""
    t, r = normal(batch).sigmoid(), normal(batch, seed=1).sigmoid()
    return normal(batch, length, width), t, r, normal(batch, length, width, seed=2)


class Step(torch.nn.Module):
    """A loss, with its JVP inside."""

    def __init__(self, derivative):
        super().__init__()
        self.net, self.derivative = Model(), derivative

    def forward(self, through, *data):
        return loss(self.net, self.derivative, through, data)


def fully_sharded(step):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(next(step.parameters()).device.type, (dist.get_world_size(),))
    return fully_shard(step, mesh=mesh)


WRAPS = {
    "DDP": torch.nn.parallel.DistributedDataParallel if dist.is_available() else None,
    "FSDP2": fully_sharded,
    "DDP, compiled": lambda step: torch.compile(torch.nn.parallel.DistributedDataParallel(step), backend="aot_eager"),
}


def models(rank, n, device="cpu", dtype=torch.float64):
    """A training step whose sequence, and whose parameters, are those of all processes."""
    for wrap, strategy, order, through in itertools.product(WRAPS, ("ulysses", "ring"), ("contiguous", "zigzag"), (False, True)):
        if strategy == "ulysses" and 2 % n:
            continue
        expected = gradients(Model(), lambda net: loss(net, by_func, through, by_tokens()))[1:]
        part = Part(rank, n, order)
        x, t, r, v = by_tokens()
        data = [a.to(device, dtype) for a in (part.cut(x, 1), t, r, part.cut(v, 1))]
        torch.compiler.reset()
        try:
            with context_parallel(dist.group.WORLD, strategy, order):
                module = WRAPS[wrap](Step(by_func).to(device, dtype))
                module(through, *data).backward()
        except Exception:
            yield f"{wrap} {strategy} {order} {through}: {traceback.format_exc()}".replace("\n", " | ")
            continue
        got = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in module.parameters()]
        error = max(relative(a.cpu(), b) for a, b in zip(got, expected, strict=True))
        if not error < (1e-11 if dtype == torch.float64 else 1e-4):
            yield f"{wrap} {strategy} {order} {through}: error {error:.2g}"
        dist.barrier()


def gpu_models(rank, n):
    return models(rank, n, f"cuda:{rank}", torch.float32)


# ------------------------------------------------------------------------------------------------ what runs, and what fails

# by strategy, order and whether it is causal: what process 0 of two launches in the forward, and what it and process 1 do
PAIRS = {
    ("ulysses", "contiguous", True): (1, 1),
    ("ring", "contiguous", False): (2, 2),
    ("ring", "contiguous", True): (1, 2),
    ("ring", "zigzag", True): (2, 2),
    ("all_gather", "contiguous", True): (1, 1),
    ("all_gather", "zigzag", True): (2, 2),
}


def launches(rank, n):
    """Each operator runs once for every pair of parts that see each other, in every mode and order of differentiation."""
    x = tuple(normal(B, N, 8, 4, seed=i) for i in range(3))
    for (strategy, order, causal), pairs in PAIRS.items():
        attend = lambda *x: scaled_dot_product_attention(*x, is_causal=causal, context_strategy=strategy, context_order=order)
        gradient = grad(lambda *x: attend(*x).sin().sum(), (0, 1, 2))
        tangent = lambda *x: (jvp(attend, x, x)[1] ** 2).sum()
        f, jobs = pairs[rank], {
            "F": lambda: attend(*x),
            "D": lambda: jvp(attend, x, x),
            "FB": lambda: gradient(*x),
            "DS": lambda: grad(tangent, (0, 1, 2))(*x),
            "FDB": lambda: grad(lambda *x: (attend(*x) * jvp(attend, x, x)[1].detach()).sum())(*x),
        }  # fmt: skip
        with context_parallel(dist.group.WORLD):
            for letters, job in jobs.items():
                launched()
                job()
                seen, wanted = launched(), "".join(letter * f for letter in letters)
                if seen != wanted:
                    yield f"{strategy} {order} causal={causal}: launched {seen}, not {wanted}"
    # what lies far behind a window does not travel
    launched()
    with context_parallel(dist.group.WORLD, "ring"):
        scaled_dot_product_attention(*x, local_window_size=(0, 0))
    if launched() != "F":
        yield "a window that no pair of processes shares was looked for elsewhere"


def errors(rank, n):
    """Of every process, before anything is sent."""
    q = normal(2, 3, 4, 4)
    world, ids, whole = dist.group.WORLD, torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, 8, dtype=torch.int32)
    attend = lambda *x, **more: scaled_dot_product_attention(*(x or (q, q, q)), context_group=world, **more)
    cases = {
        "divide": lambda: attend(context_strategy="ulysses"),
        "`context_strategy` must be None or one of": lambda: attend(context_strategy="star"),
        "`context_order` must be one of": lambda: attend(context_order="random"),
        "`query_segment_ids` must be cut along the sequence": lambda: attend(query_segment_ids=whole, key_value_segment_ids=whole),
        "must be given together": lambda: attend(query_segment_ids=ids),
        "`attn_mask` must be cut along its queries": lambda: attend(attn_mask=normal(8, 8)),
        "`attn_mask` must have all 8 keys": lambda: attend(attn_mask=normal(4, 4)),
        "ask for 'ring'": lambda: attend(attn_mask=normal(4, 8), context_strategy="ulysses"),
        "`query` must have an even number of rows": lambda: attend(q[:, :, :3], q, q, context_order="zigzag"),
        "`context_group` must be a ProcessGroup or a DeviceMesh": lambda: scaled_dot_product_attention(q, q, q, context_group="all"),
        "third derivative of attention in a ring": lambda: jvp(
            lambda q: jvp(lambda q: attend(q, q, q, context_strategy="ring"), (q,), (q,))[1], (q,), (q,)
        ),
        "must call attention alike": lambda: attend(*[q[:, :, : 2 + rank]] * 3, context_strategy="ring"),
        "same strategy": lambda: attend(*[normal(2, 4, 4, 4)] * 3, context_strategy=("ring", "ulysses")[rank % 2]),
    }  # fmt: skip
    for text, call in cases.items():
        try:
            call()
        except (ValueError, TypeError, RuntimeError) as error:
            if text not in str(error):
                yield f"{text!r} is not in: {error}"
        else:
            yield f"did not raise: {text}"


def failing(rank, n, folder):
    """The last process fails while the others wait for its keys."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=n, timeout=LIMIT)
    q = normal(2, 2, 4, 4)
    with context_parallel(dist.group.WORLD, "ring"):
        scaled_dot_product_attention(q, q, q)
        try:
            if rank == n - 1:
                raise RuntimeError("failed on purpose")
            scaled_dot_product_attention(q, q, q)
        except RuntimeError as error:
            purpose = "purpose" in str(error)
            (folder / f"error-{rank}").write_text("failed on purpose" if purpose else "waited in vain")
            raise


# ------------------------------------------------------------------------------------------------ DTensors, compiled


def dtensors(rank, n):
    """By batch, heads and sequence, on meshes of one and two dimensions; backward and double backward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def results(attention, x):
        x = [a.detach().requires_grad_() for a in x]
        o = attention(*x)
        gradients = torch.autograd.grad(o.sin().sum(), x, create_graph=True)
        return o, *gradients, *torch.autograd.grad(sum(a.sin().sum() for a in gradients), x)

    mesh = init_device_mesh("cpu", (2,) if n == 2 else (2, 2))
    batch, heads, sequence, whole = Shard(0), Shard(1), Shard(2), Replicate()
    places = [[batch], [heads], [sequence]]
    if n == 4:
        places = [[batch, sequence], [heads, sequence], [sequence, heads], [whole, sequence]]
    options = {
        "causal": dict(is_causal=True),
        "lengths": dict(key_value_seq_lengths=torch.tensor([9, 13]), query_seq_lengths=torch.tensor([16, 7]), is_causal=True),
        "segments": dict(query_segment_ids=torch.arange(16).expand(2, -1) // 5, key_value_segment_ids=torch.arange(16).expand(2, -1) // 4),
        "dropout": dict(dropout_p=0.3, is_causal=True),
        "bias": dict(attn_mask=normal(1, N, 16, 16)),
        "bias-of-keys": dict(attn_mask=normal(2, 1, 1, 16)),
        "sinks": dict(sinks=normal(N)),
        "keys-whole": dict(is_causal=True),
    }  # fmt: skip

    def of(place, name, a):
        """The placement of another tensor."""
        if name == "sinks":
            return [batch if p == heads else whole for p in place]
        axes = {0: batch, 1: heads, 2: sequence, 3: Shard(3)}
        rows = a.shape[2] > 1
        return [axes[d] if a.shape[d := p.dim if p.dim < 2 or rows else 3] > 1 else whole if p != whole else whole for p in place]

    for place, (name, given), strategy in itertools.product(places, options.items(), (None, "ulysses", "ring")):
        if strategy and sequence not in place:
            continue
        if strategy == "ulysses" and (name.startswith("bias") or name == "keys-whole" or place == [sequence, heads]):
            continue
        x, more = [normal(2, N, 16, 4, seed=i) for i in range(3)], {k: a for k, a in given.items() if k in ("attn_mask", "sinks")}
        others = {k: a for k, a in given.items() if k not in more}

        def attention(*x, **how):
            torch.manual_seed(3)
            return scaled_dot_product_attention(*x[:3], **dict(zip(more, x[3:], strict=True)), **others, **how)

        keys = [whole if p == sequence else p for p in place] if name == "keys-whole" else place
        placed = [place, keys, keys, *(of([p for p in place], k, a) for k, a in more.items())]
        x += more.values()
        how = dict(context_strategy=strategy) if strategy else {}
        try:
            got = results(lambda *x: attention(*x, **how), [distribute_tensor(a, mesh, p) for a, p in zip(x, placed, strict=True)])
            error = max(relative(a.full_tensor(), b) for a, b in zip(got, results(attention, x), strict=True))
            if not error < 1e-11:
                yield f"{place} {name} {strategy}: error {error:.2g}"
        except Exception:
            yield f"{place} {name} {strategy}: {traceback.format_exc()}".replace("\n", " | ")


def compiled(rank, n):
    """As in eager programs; a context that opens is another program."""
    x = tuple(normal(B, N, 16, 4, seed=i) for i in range(3))
    attend = lambda *x: scaled_dot_product_attention(*x, is_causal=True)
    jobs = {
        "jvp": lambda *x: jvp(attend, x, x),
        "grad": lambda *x: grad(lambda *x: attend(*x).sin().sum(), (0, 1, 2))(*x),
        "grad of jvp": lambda *x: grad(lambda *x: jvp(attend, x, x)[1].square().sum(), (0, 1, 2))(*x),
    }
    for (name, job), strategy in itertools.product(jobs.items(), ("ulysses", "ring", "all_gather")):
        try:
            torch.compiler.reset()
            program = torch.compile(job, backend="aot_eager", fullgraph=True)
            outside = relative(leaves(program(*x))[0], leaves(job(*x))[0])
            with context_parallel(dist.group.WORLD, strategy, "zigzag"):
                pairs = zip(leaves(program(*x)), leaves(job(*x)), strict=True)
                error = max(outside, *(relative(a, b) for a, b in pairs))
            if not error < 1e-11:
                yield f"compiled {name} {strategy}: error {error:.2g}"
        except Exception:
            yield f"compiled {name} {strategy}: {traceback.format_exc()}".replace("\n", " | ")

    @torch.compile(backend="aot_eager", fullgraph=True)
    def opens(*x):
        with context_parallel(dist.group.WORLD, "ring"):
            return attend(*x)

    try:
        if not relative(opens(*x), attend_in_ring(*x)) < 1e-11:
            yield "a context that a compiled function opens: wrong"
    except Exception:
        yield f"a context that a compiled function opens: {traceback.format_exc()}".replace("\n", " | ")


def attend_in_ring(*x):
    return scaled_dot_product_attention(*x, is_causal=True, context_group=dist.group.WORLD, context_strategy="ring")
