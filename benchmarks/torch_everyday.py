"""The calls of `everyday.py` in PyTorch: arrays, contenders, float64 and timing for `regret.py`."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from everyday import Call, checked, entries, joined
from measure import relative_errors
from torch_bridge import scaled_dot_product_attention
from torch_calls import DEVICE, out_of_memory, release, to_numpy, wait  # noqa: F401 (`attempt` asks for the first two)

CHAINED = 10  # calls in a graph: to launch one takes as long as a short call
REPLAYS, SHORT = (1, 10), 1.0  # of a graph, and of one that takes fewer milliseconds
# That the float64 computation holds at a time, in some twenty arrays: all processes may compute so at once.
SCORES = 2**25
BACKENDS = {
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA efficient": SDPBackend.EFFICIENT_ATTENTION,
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
}
Arrays = tuple[tuple, tuple, tuple, dict]


def gpus() -> int:
    return torch.cuda.device_count()


def device() -> str:
    return torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"


def draw(call: Call) -> Arrays:
    """(q, k, v[, bias]), their tangents, the cotangents of the output and of its tangent, and the other arguments."""
    b, t, s, n, k, d, dtype, kind = call
    generator = torch.Generator(DEVICE).manual_seed(0)
    normal = lambda shape: torch.randn(shape, generator=generator, device=DEVICE, dtype=getattr(torch, dtype))
    # as projections give them: heads beside one another
    heads = lambda length, count: normal((b, length, count, d)).transpose(1, 2)
    operands = lambda: (heads(t, n), heads(s, k), heads(s, k), *_bias(call, normal))
    x, tx, cotangents = operands(), operands(), (heads(t, n), heads(t, n))
    extra = {}
    if kind == "lengths":
        extra["lengths"] = torch.randint(s // 2, s + 1, (b,), generator=generator, device=DEVICE)
    if kind in ("mask", "dense mask"):
        rows = t if kind == "dense mask" else 1
        extra["attn_mask"] = torch.rand((b, 1, rows, s), generator=generator, device=DEVICE) < 0.8
    return x, tx, cotangents, extra


def _bias(call: Call, normal: Callable) -> list[torch.Tensor]:
    if call.kind == "bias":
        return [normal((1, call.heads, call.queries, call.keys))]
    return [normal((call.batch, 1, 1, call.keys))] if call.kind == "key bias" else []


def ours(call: Call) -> Callable:
    fixed: dict[str, Any] = dict(enable_gqa=call.heads != call.key_heads)
    if call.kind == "causal":
        fixed |= dict(is_causal=True, causal_alignment="upper_left" if call.queries == call.keys else "lower_right")
    elif call.kind == "window":
        fixed["local_window_size"] = (256, 0)

    def attention(q, k, v, attn_mask=None, lengths=None):
        given = {} if lengths is None else dict(key_value_seq_lengths=lengths)
        return scaled_dot_product_attention(q, k, v, attn_mask, **given, **fixed)

    return attention


def theirs(call: Call, backend: SDPBackend | None = None) -> Callable:
    fixed: dict[str, Any] = dict(enable_gqa=call.heads != call.key_heads)
    mask = None
    if call.kind == "causal" and call.queries == call.keys:
        fixed["is_causal"] = True
    elif call.kind in ("causal", "window"):
        mask = seen(call)

    def attention(q, k, v, attn_mask=None, lengths=None):
        if lengths is not None:
            attn_mask = torch.arange(call.keys, device=q.device) < lengths[:, None, None, None]
        attn_mask = mask if attn_mask is None else attn_mask
        if backend is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask, **fixed)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, attn_mask, **fixed)

    return attention


def seen(call: Call) -> torch.Tensor:
    i, j = (torch.arange(n, device=DEVICE) for n in (call.queries, call.keys))
    i = i[:, None] + call.keys - call.queries
    return (j <= i) & (j >= i - 256) if call.kind == "window" else j <= i


def contenders(call: Call, job: str) -> dict[str, Callable]:
    found = {"default": ours(call), "SDPA": theirs(call)}
    if "JVP" in job:  # that PyTorch's fused kernels refuse
        del found["SDPA"]
        return found | {"SDPA math": theirs(call, SDPBackend.MATH)}
    if DEVICE == "cuda":
        found |= {name: theirs(call, backend) for name, backend in BACKENDS.items()}
    return found


def job_function(job: str, attention: Callable, arrays: Arrays) -> Callable[[], tuple]:
    """A call without arguments; results in a flat tuple."""
    x, tx, cotangents, extra = arrays
    asks = job.endswith("backward")
    x, tx = (tuple(a.detach().requires_grad_(asks) for a in group) for group in (x, tx))

    def f(*x):
        given = dict(extra, attn_mask=x[3]) if len(x) > 3 else extra
        return attention(*x[:3], **given)

    def forward():
        return (f(*x),)

    def forward_and_tangent():
        return torch.func.jvp(f, x, tx)

    def gradients():
        o = f(*x)
        return o, *torch.autograd.grad(o, x, cotangents[0])

    def gradients_through_tangent():
        both = torch.func.jvp(f, x, tx)
        return *both, *torch.autograd.grad(both, (*x, *tx), cotangents)

    if not asks:
        return torch.no_grad()(forward if job == "forward" else forward_and_tangent)
    return gradients if job == "forward + backward" else gradients_through_tangent


def naive(call: Call) -> Callable:
    """Scores and softmax in float32 at least; products in the dtype of the arrays."""

    def attention(q, k, v, attn_mask=None, lengths=None):
        k, v = (a.repeat_interleave(call.heads // call.key_heads, 1) for a in (k, v))
        wide = torch.promote_types(q.dtype, torch.float32)
        s = (q.to(wide) @ k.to(wide).mT) * q.shape[-1] ** -0.5
        hidden = (
            ~seen(call) if call.kind in ("causal", "window") else torch.zeros((), dtype=torch.bool, device=q.device)
        )
        if lengths is not None:
            hidden = torch.arange(call.keys, device=q.device) >= lengths[:, None, None, None]
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            hidden = ~attn_mask
        elif attn_mask is not None:
            s = s + attn_mask.to(s.dtype)
        return s.masked_fill(hidden, -torch.inf).softmax(-1).to(v.dtype) @ v

    return attention


def exact(call: Call, job: str, arrays: Arrays) -> tuple[list[np.ndarray], list[float]]:
    """What `checked` leaves of the results, in float64, and the errors of naive attention in the arrays' dtype."""
    arrays = tree_map(lambda a: checked(call, a), arrays)
    step, found = max(1, SCORES // (call.heads * call.queries * call.keys)), []
    for wide in (True, False):
        cast = lambda a, wide=wide: a.double() if wide and a.is_floating_point() else a
        parts = []
        for first in range(0, len(arrays[0][0]), step):
            some = tree_map(lambda a, first=first, cast=cast: cast(entries(call, a, first, step)), arrays)
            parts.append(to_numpy(job_function(job, naive(call), some)()))
        found.append([joined(call, pieces) for pieces in zip(*parts, strict=True)])
    release()
    return found[0], relative_errors(found[1], found[0])


def prepare(call: Call, job: str, attention: Callable, arrays: Arrays, known: set[str], options: Any):
    """The results, and a function that times the job: milliseconds.  All contenders are programs of their own."""
    run = job_function(job, attention, arrays)
    results = to_numpy(checked(call, a) for a in run())
    replay = _graph(run) if options.graphs else None
    release()  # other processes compile and check on the same GPU
    if replay:
        times = REPLAYS[_milliseconds(replay) < SHORT]
        return results, lambda: _milliseconds(lambda: [replay() for _ in range(times)]) / (times * CHAINED)
    return results, lambda: statistics.median(_milliseconds(run) for _ in range(20))


@functools.cache
def _pool() -> Any:
    """All graphs of a process share memory, since they run one after the other and nobody reads their results."""
    return torch.cuda.graph_pool_handle()


def _graph(run: Callable) -> Callable:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=_pool()):
        for _ in range(CHAINED):
            run()
    return graph.replay


def _milliseconds(call: Callable) -> float:
    wait(None)
    start = time.perf_counter()
    call()
    wait(None)
    return (time.perf_counter() - start) * 1e3
