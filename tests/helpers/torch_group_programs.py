"""Programs in several processes, for `torch_group.spawn`: models, DTensors, compiled functions, errors, what is launched."""

import itertools
import os
import traceback
import warnings

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.func import grad, jvp, vjp  # noqa: E402
from torch.nn.attention.flex_attention import create_block_mask  # noqa: E402

from torch_bridge import context_parallel, flash_attn_varlen_func, scaled_dot_product_attention  # noqa: E402
from torch_bridge.attention import attend as attend_with  # noqa: E402
from torch_group import LIMIT, B, N, Part, relative  # noqa: E402
from torch_oracle import Model, by_func, gradients, launched, leaves, loss, normal  # noqa: E402


def draw(length):
    return tuple(normal(B, N, length, 4, seed=i) for i in range(3))


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
    for wrap, strategy, order, through in itertools.product(
        WRAPS, ("ulysses", "ring"), ("contiguous", "zigzag"), (False, True)
    ):
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
    x = draw(8)
    for (strategy, order, causal), pairs in PAIRS.items():
        attend = lambda *x: scaled_dot_product_attention(
            *x, is_causal=causal, context_strategy=strategy, context_order=order
        )
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

    def packed(length, last, order="contiguous"):
        x, edges = normal(length, 2, 4), torch.tensor([0, last])
        with context_parallel(dist.group.WORLD, order=order):
            flash_attn_varlen_func(x, x, x, edges, edges)

    q = normal(2, 3, 4, 4)
    world, ids, whole = dist.group.WORLD, torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, 8, dtype=torch.int32)
    ranges = torch.zeros(1, 1, 8, 1, 2, dtype=torch.int32)
    attend = lambda *x, **more: scaled_dot_product_attention(*(x or (q, q, q)), context_group=world, **more)
    cases = {
        "divide": lambda: attend(context_strategy="ulysses"),
        "`context_strategy` must be None or one of": lambda: attend(context_strategy="star"),
        "`context_order` must be one of": lambda: attend(context_order="random"),
        "`query_segment_ids` must be cut along": lambda: attend(query_segment_ids=whole, key_value_segment_ids=whole),
        "must be given together": lambda: attend(query_segment_ids=ids),
        "`attn_mask` must be cut along its queries": lambda: attend(attn_mask=normal(8, 8)),
        "`attn_mask` must have all 8 keys": lambda: attend(attn_mask=normal(4, 4)),
        "ask for 'ring'": lambda: attend(attn_mask=normal(4, 8), context_strategy="ulysses"),
        "`query` must have an even number of rows": lambda: attend(q[:, :, :3], q, q, context_order="zigzag"),
        "must be a ProcessGroup or a DeviceMesh": lambda: scaled_dot_product_attention(q, q, q, context_group="all"),
        "third derivative of attention in a ring": lambda: jvp(
            lambda q: jvp(lambda q: attend(q, q, q, context_strategy="ring"), (q,), (q,))[1], (q,), (q,)
        ),
        "`mask_block_size` does not go with a context": lambda: attend(attn_mask=whole[:, :4] == 0, mask_block_size=(2, 2)),
        "`attn_mask` must not be a BlockMask in a context": lambda: attend(
            attn_mask=create_block_mask(lambda b, h, i, j: i >= j, None, None, 8, 8, device="cpu")
        ),
        "`key_ranges` must have shape (1 or 2, 1 or 3, 4, R, 2)": lambda: attend(key_ranges=ranges),
        "`cu_seqlens_q` must not end beyond the 8 tokens": lambda: packed(4, 9),
        "`query` must have an even number of rows in": lambda: packed(3, 6, order="zigzag"),
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


def packed_sequences(rank, n):
    """Over the ends of parts, some empty, against one process."""
    x = tuple(normal(24, N, 4, seed=i) for i in range(3))
    edges = torch.tensor([0, 5, 5, 11, 24]), torch.tensor([0, 9, 12, 12, 24])
    gradients = lambda f, x: grad(lambda *x: f(*x).sin().sum(), (0, 1, 2))(*x)
    attend = lambda *x: flash_attn_varlen_func(*x, *edges, causal=True)
    expected = gradients(attend, x)
    for strategy, order in itertools.product(("ulysses", "ring", "all_gather"), ("contiguous", "zigzag")):
        cut = lambda a: Part(rank, n, order).cut(a, 0)
        with context_parallel(dist.group.WORLD, strategy, order):
            got = gradients(attend, [cut(a) for a in x])
        error = max(relative(a, cut(b)) for a, b in zip(got, expected, strict=True))
        if not error < 1e-11:
            yield f"packed sequences {strategy} {order}: error {error:.2g}"
    inside = (torch.arange(24) >= 2) & (torch.arange(24) < 18)  # the others hold NaN
    edges = torch.tensor([2, 5, 11, 18]), torch.tensor([2, 9, 12, 18])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tokens before the first sequence
        expected = gradients(lambda *x: attend(*x)[2:18], x)
        torn = tuple(torch.where(inside[:, None, None], a, torch.nan) for a in x)
        weights = torch.where(inside, 1, torch.nan)[:, None, None]
        for strategy, order in itertools.product(("ulysses", "ring", "all_gather"), ("contiguous", "zigzag")):
            cut = lambda a: Part(rank, n, order).cut(a, 0)
            with context_parallel(dist.group.WORLD, strategy, order):
                o, pull = vjp(attend, *map(cut, torn))
                got = pull(o.cos() * cut(weights))
            error = max(relative(a, cut(b)) for a, b in zip(got, expected, strict=True))
            if not error < 1e-11:
                yield f"packed sequences among NaN {strategy} {order}: error {error:.2g}"
    ids = torch.arange(24).expand(B, -1) // 7
    q = normal(B, N, 24, 4)
    of_transformers = lambda q, ids: attend_with(q, q, q, None, True, None, True, (), (None, None, ids, ids))[0]
    with context_parallel(dist.group.WORLD):
        got = of_transformers(q.chunk(n, 2)[rank], ids.chunk(n, 1)[rank])
    if not relative(got, of_transformers(q, ids).chunk(n, 2)[rank]) < 1e-11:
        yield "documents, as transformers names them, are wrong"


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
    """By batch, heads and sequence, on meshes of one and two dimensions; backward and double backward.  Processes that compute
    the same are to get the same bits."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    import torch_bridge.dtensor

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
    places_in_sequence = torch.arange(16).expand(2, -1)
    options = {
        "causal": dict(is_causal=True),
        "lengths": dict(key_value_seq_lengths=torch.tensor([9, 13]), query_seq_lengths=torch.tensor([16, 7]), is_causal=True),
        "segments": dict(query_segment_ids=places_in_sequence // 5, key_value_segment_ids=places_in_sequence // 4),
        "dropout": dict(dropout_p=0.3, is_causal=True),
        "bias": dict(attn_mask=normal(1, N, 16, 16)),
        "bias-of-keys": dict(attn_mask=normal(2, 1, 1, 16)),
        "sinks": dict(sinks=normal(N)),
        "keys-whole": dict(is_causal=True),
        "ranges": dict(key_ranges=normal(2, N, 16, 2, 2).mul(8).add(8).int()),
        "ranges-keys-whole": dict(key_ranges=normal(1, 1, 16, 1, 2).mul(8).add(8).int(), is_causal=True),
    }  # fmt: skip

    class Heard:
        def __getattr__(self, name):
            def operator(*args):
                same_bits.add(any("deterministic" in a.split() for a in args if isinstance(a, str)))
                return getattr(torch.ops.torch_bridge, name)(*args)

            return operator

    same_bits, torch_bridge.dtensor.ops = set(), Heard()

    def of(place, name, a):
        """The placement of a mask, or of sinks."""
        if name == "sinks":
            return [batch if p == heads else whole for p in place]
        axes = [3 if p == sequence and a.shape[2] == 1 else p.dim if p != whole else None for p in place]
        return [whole if axis is None or a.shape[axis] == 1 else Shard(axis) for axis in axes]

    for place, (name, given), strategy in itertools.product(places, options.items(), (None, "ulysses", "ring")):
        if strategy and sequence not in place:
            continue
        if strategy == "ulysses" and (
            name.startswith("bias") or name.endswith("keys-whole") or place == [sequence, heads]
        ):
            continue
        x, more = draw(16), {k: a for k, a in given.items() if k in ("attn_mask", "sinks")}
        others = {k: a for k, a in given.items() if k not in more}

        def attention(*x, **how):
            torch.manual_seed(3)
            return scaled_dot_product_attention(*x[:3], **dict(zip(more, x[3:], strict=True)), **others, **how)

        keys = [whole if p == sequence else p for p in place] if name.endswith("keys-whole") else place
        placed = [place, keys, keys, *(of(place, k, a) for k, a in more.items())]
        x = [*x, *more.values()]
        how = dict(context_strategy=strategy) if strategy else {}
        try:
            got = results(
                lambda *x: attention(*x, **how), [distribute_tensor(a, mesh, p) for a, p in zip(x, placed, strict=True)]
            )
            error = max(relative(a.full_tensor(), b) for a, b in zip(got, results(attention, x), strict=True))
            if not error < 1e-11:
                yield f"{place} {name} {strategy}: error {error:.2g}"
            if same_bits != {whole in place}:
                yield f"{place} {name} {strategy}: to have the same bits: {same_bits}"
            same_bits.clear()
        except Exception:
            yield f"{place} {name} {strategy}: {traceback.format_exc()}".replace("\n", " | ")


def compiled(rank, n):
    """As in eager programs; a context that opens is another program."""
    x = draw(16)
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
