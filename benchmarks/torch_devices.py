"""One sequence over several GPUs of a host, from PyTorch, beside one GPU that has all of it.

Each way is first compared with one GPU: a way that fails is reported and not timed.  All take turns, each in all processes at
once, and a figure is the median over rounds of the slowest process.  Memory is the peak of a process, arguments included.
"""

import contextlib
import datetime
import functools
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.func import jvp

from devices import ONE, PRODUCTS, Row, rows_of, tolerance
from measure import Case, write
from torch_bridge import reorder_zigzag, scaled_dot_product_attention
from torch_bridge.exchange import move
from torch_bridge.groups import Group

PLAIN = ("forward", "forward + backward")


class Way(NamedTuple):
    attend: Callable  # of this process's parts; or, if `pairs`, of (part, tangent) each, to such a pair
    order: str = "contiguous"
    jobs: tuple[str, ...] = tuple(PRODUCTS)
    context: Callable = contextlib.nullcontext  # within which it is called
    pairs: bool = False


def ways(n: int, causal: bool, device: str) -> dict[str, Way]:
    ours = lambda strategy, order: functools.partial(
        scaled_dot_product_attention, is_causal=causal, context_group=dist.group.WORLD, context_strategy=strategy,
        context_order=order,
    )  # fmt: skip
    found = {
        f"{strategy}{' zigzag' if order == 'zigzag' else ''}": Way(ours(strategy, order), order)
        for strategy in ("ulysses", "ring", "all_gather")
        for order in (("contiguous", "zigzag") if causal else ("contiguous",))
    }
    if not causal:
        found["gathered, SDPA"] = Way(functools.partial(gathered, n), jobs=PLAIN)
    if device == "cuda":
        order = "zigzag" if causal else "contiguous"
        sdpa = functools.partial(F.scaled_dot_product_attention, is_causal=causal)
        found["PyTorch's ring"] = Way(sdpa, order, PLAIN, functools.partial(pytorchs, n, causal))
        if not causal and find_spec("rcm"):
            found["rcm's Ulysses"] = Way(rcms, jobs=("forward + JVP",), pairs=True)
    return found


def gathered(n: int, q, k, v):
    group = Group(dist.group.WORLD.group_name, n, dist.get_rank())
    return F.scaled_dot_product_attention(q, *move("gather", group, k, v))


def rcms(*pairs):
    results = _rcm()(*([a.transpose(1, 2) for a in pair] for pair in pairs))
    return tuple(a.transpose(1, 2) for a in results)


@functools.cache
def _rcm() -> Callable:
    """Of NVlabs/rcm, a checkout of which is on PYTHONPATH: of arrays [B, L, H, D]."""
    from rcm.utils.jvp_helper import MinimalA2AAttnOpWithT

    attention = MinimalA2AAttnOpWithT()
    attention.set_context_parallel_group(dist.group.WORLD, None, torch.cuda.Stream())
    return attention


@contextlib.contextmanager
def pytorchs(n: int, causal: bool):
    """PyTorch's context parallel, in the place of its function."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import _attention, context_parallel

    options = _attention._cp_options  # private
    options.enable_load_balance = causal
    mesh = init_device_mesh("cuda", (n,))
    whole = torch.empty(1, 1, 2 * n, 1, device="cuda")
    with context_parallel(mesh, buffers=[whole], buffer_seq_dims=[2]):
        yield


def job(name: str, attend: Callable, arrays: list[torch.Tensor], pairs: bool = False) -> Callable:
    """Of q, k, v, their tangents, and the cotangents of the output and of its tangent: a call without arguments."""
    *x, g, h = arrays
    x, t_x = tuple(x[:3]), tuple(x[3:6])
    moving = [a.detach().requires_grad_() for a in (*x, *t_x)]
    if name == "forward":
        return torch.no_grad()(lambda: (attend(*x),))
    if name == "forward + JVP":
        return torch.no_grad()(lambda: attend(*zip(x, t_x, strict=True)) if pairs else jvp(attend, x, t_x))
    if name == "forward + backward":
        return lambda: torch.autograd.grad(attend(*moving[:3]), moving[:3], g)
    return lambda: torch.autograd.grad(jvp(attend, tuple(moving[:3]), tuple(moving[3:])), moving, (g, h))


def draw(case: Case, device: str) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    shape, dtype = (case.batch, case.length, case.heads, case.head_dim), getattr(torch, case.dtype)
    return [torch.randn(shape, generator=generator, device=device, dtype=dtype).transpose(1, 2) for _ in range(8)]


def part(a: torch.Tensor, n: int, order: str) -> torch.Tensor:
    a = reorder_zigzag(a, n, 2) if order == "zigzag" else a
    return a.chunk(n, 2)[dist.get_rank()].transpose(1, 2).contiguous().transpose(1, 2)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def slowest(milliseconds: float, device: str) -> float:
    a = torch.tensor(milliseconds, device=device)
    dist.all_reduce(a, dist.ReduceOp.MAX)
    return a.item()


def timed(call: Callable, device: str, seconds: float, estimate: float) -> float:
    """Milliseconds of one call among several in a row, in the slowest process."""
    count = max(1, int(seconds * 1e3 / max(estimate, 1e-3)))
    synchronize(device)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(count):
        call()
    synchronize(device)
    return slowest((time.perf_counter() - start) / count * 1e3, device)


def peak(call: Callable, device: str, held: int) -> float:
    """MiB of this process while it runs, and what it is given."""
    if device != "cuda":
        return float("nan")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return slowest((torch.cuda.max_memory_allocated() - before + held) / 2**20, device)


def compare(got, expected, n: int, order: str) -> float:
    errors = []
    for a, b in zip(got, expected, strict=True):
        a, b = a.double(), part(b, n, order).double()
        errors.append((torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b)).item())
    return max(errors)


def measure(case: Case, options: Any, device: str) -> list[Row]:
    n, rows, causal = options.devices, [], case.feature == "causal"
    arrays = draw(case, device)
    one = functools.partial(scaled_dot_product_attention, is_causal=causal)
    for name in [job for job in PRODUCTS if options.jobs is None or job in options.jobs]:
        whole = job(name, one, arrays)
        expected = whole()
        start = time.perf_counter()
        whole()
        synchronize(device)
        estimate = slowest((time.perf_counter() - start) * 1e3, device)
        held = sum(a.nbytes for a in arrays)
        calls: dict[str, tuple[Callable, Callable]] = {ONE: (whole, contextlib.nullcontext)}
        memory = {ONE: peak(whole, device, held)}
        for who, way in ways(n, causal, device).items():
            if name not in way.jobs or (options.contenders and who not in options.contenders):
                continue
            parts = [part(a, n, way.order) for a in arrays]
            call = job(name, way.attend, parts, way.pairs)
            try:
                with way.context():
                    error = slowest(compare(call(), expected, n, way.order), device)
                    if not error < tolerance(case):
                        raise ValueError(f"differs from one GPU by {error:.2g}")
                    memory[who] = peak(call, device, held // n)
            except Exception as problem:
                say(f"{name}, {who}, {case}: {type(problem).__name__}: {str(problem)[:300]}")
                continue
            calls[who] = call, way.context
        del expected
        times: dict[str, list[float]] = {who: [] for who in calls}
        for turn in range(options.rounds):
            order = [*calls][turn % len(calls) :] + [*calls][: turn % len(calls)]
            for who in order:
                call, context = calls[who]
                with context():
                    if estimate < 1e3:
                        call()
                    times[who].append(timed(call, device, options.seconds, estimate / (1 if who == ONE else n)))
                time.sleep(options.rest)
        for row, text in rows_of(name, case, n, times, memory).items():
            rows.append(row)
            say(text)
    return rows


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def worker(rank: int, options: Any, folder: str) -> None:
    n, device = options.devices, "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=n,
        timeout=datetime.timedelta(minutes=5), device_id=torch.device(device, rank) if device == "cuda" else None,
    )  # fmt: skip
    say(
        f"{n} × {torch.cuda.get_device_name() if device == 'cuda' else device}, PyTorch {torch.__version__}, {options.dtype}"
    )
    rows = []
    for heads, head_dim in zip(options.heads, options.head_dims, strict=True):
        for length in options.lengths:
            rows += measure(
                Case(options.batch, length, heads, head_dim, options.feature, options.dtype), options, device
            )
    if rank == 0:
        write(options.output.with_suffix(".csv"), Row._fields, rows)
    dist.destroy_process_group()


def run(options: Any) -> int:
    """As `attention.py` was asked with --devices."""
    if torch.cuda.is_available() and torch.cuda.device_count() < options.devices:
        raise ValueError(
            f"--devices must be at most the {torch.cuda.device_count()} GPUs of this host: got {options.devices}"
        )
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(worker, (options, folder), nprocs=options.devices)
    return 0


if __name__ == "__main__":
    raise SystemExit("run attention.py --framework torch --devices N")
