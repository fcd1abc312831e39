"""Attention and its derivatives in PyTorch, arrays [B, H, L, D]."""

import atexit
import functools
import gc
import importlib.util
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._functorch.config
import torch.nn.functional as F
from torch.func import jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.flop_counter import FlopCounterMode

from jax_flash_jvp import visibility
from measure import Case, Contender, Prepared, end_heads, timed, version_of
from torch_bridge import scaled_dot_product_attention

ROWS, HEADS = 2, 1
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
torch._functorch.config.donated_buffer = False  # private: compiled backwards that may run again


def ours(q, k, v, blocks=None, **extra):
    if blocks is not None:
        extra |= dict(attn_mask=blocks, mask_block_size=(q.shape[2] // blocks.shape[2],) * 2)
    return scaled_dot_product_attention(q, k, v, **extra)


def elements(key_ranges, blocks, queries: int, keys: int, first: int = 0) -> torch.Tensor:
    """The boolean mask that ranges or blocks stand for, of so many queries from the first on."""
    if blocks is None:
        return visibility.matrix(key_ranges, keys)
    i, j = (torch.arange(n, device=blocks.device) // (keys // blocks.shape[3]) for n in (first + queries, keys))
    return blocks[:, :, i[first:, None], j]


def sdpa(backend: SDPBackend) -> Callable:
    def attention(q, k, v, key_ranges=None, blocks=None, **extra):
        if key_ranges is not None or blocks is not None:
            extra["attn_mask"] = elements(key_ranges, blocks, q.shape[2], k.shape[2])
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, **extra)

    return attention


def flex(q, k, v, is_causal=False, key_ranges=None, blocks=None):
    """FlexAttention, whose mask is made once."""
    return _flex_attention()(q, k, v, block_mask=_block_mask(is_causal, key_ranges, blocks, q.shape[2], q.device.type))


@functools.cache
def _flex_attention() -> Callable:
    return torch.compile(flex_attention, dynamic=False)


@functools.cache
def _block_mask(is_causal, key_ranges, blocks, length: int, device: str):
    def mask_mod(b, h, i, j):
        if is_causal:
            return i >= j
        if blocks is not None:
            size = length // blocks.shape[2]
            return blocks[0, 0, i // size, j // size]
        seen = [(r[0, 0, i, 0] <= j) & (j < r[0, 0, i, 1]) for r in key_ranges.unbind(3)]
        return functools.reduce(torch.logical_or, seen)

    if not is_causal and key_ranges is None and blocks is None:
        return None
    return create_block_mask(mask_mod, None, None, length, length, device=device)


def peer(q, k, v, is_causal=False, **extra):
    from jvp_flash_attention.jvp_attention import JVPAttn

    return JVPAttn.fwd_dual(q, k, v, causal=is_causal, **extra)


def fork(q, k, v, is_causal=False, attn_mask=None, key_ranges=None, blocks=None):
    """jefequien/jvp_flash_attention, whose masks of tiles are made once."""
    from jvp_flash_attention import flash_attention

    mask = _tiles(key_ranges, blocks, q.shape[2])
    kind = "dense" if mask is None else "block_sparse"
    how = "tma" if q.is_cuda and torch.cuda.get_device_capability(q.device)[0] >= 9 else "pointer"
    extra = dict(implementation=f"{kind}_{how}", attn_mask=attn_mask, block_mask=mask, causal=is_causal)
    return flash_attention(q, k, v, **extra)


@functools.cache
def _tiles(key_ranges, blocks, length: int):
    from jvp_flash_attention import BlockSparseMask

    if key_ranges is None and blocks is None:
        return None
    return BlockSparseMask.from_bool(elements(key_ranges, blocks, length, length))


def flash_attention(module: str) -> Callable:
    """Of the FlashAttention that has this module, whose arrays are [B, L, H, D]."""

    def attention(q, k, v, is_causal=False):
        q, k, v = (a.transpose(1, 2) for a in (q, k, v))
        o = importlib.import_module(module).flash_attn_func(q, k, v, causal=is_causal)
        return (o[0] if isinstance(o, tuple) else o).transpose(1, 2)  # the log-sum-exp comes with it in some versions

    return attention


def naive_attention(
    q, k, v, is_causal=False, attn_mask=None, key_ranges=None, blocks=None, first=0, rounds_scores=True
):  # fmt: skip
    """`first`: the first row of scores that belongs to these queries."""
    wide = q.dtype if rounds_scores else torch.promote_types(q.dtype, torch.float32)
    if key_ranges is not None or blocks is not None:
        attn_mask = elements(key_ranges, blocks, q.shape[2], k.shape[2], first)
    s = q.to(wide) @ k.to(wide).mT * q.shape[-1] ** -0.5
    if is_causal:
        attn_mask = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril(first)
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else s + attn_mask.to(s.dtype)
    return s.softmax(-1).to(v.dtype) @ v


def of_checkout(path: Path) -> Contender:
    """Another version of this project, its packages, and so its operators, under other names."""
    folder, names = Path(tempfile.mkdtemp()), {"jax_flash_jvp": "another_flash_jvp", "torch_bridge": "another_bridge"}
    for package, name in names.items():
        for source in (path / package).rglob("*.py"):
            copy = folder / name / source.relative_to(path / package)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(functools.reduce(lambda text, n: text.replace(n, names[n]), names, source.read_text()))
    atexit.register(shutil.rmtree, folder)  # not before: modules are loaded from it when they are first needed
    sys.path.append(str(folder))
    return Contender(importlib.import_module("another_bridge").scaled_dot_product_attention)


OURS, PEER = "torch_bridge", "jvp-flash-attention"
FA3, FA4 = "flash_attn_interface", "flash_attn.cute"
PLAIN, DUAL = ("forward", "backward"), ("forward + JVP", "dual backward")
CONTENDERS: dict[str, Contender] = {
    OURS: Contender(ours),
    "SDPA cuDNN": Contender(sdpa(SDPBackend.CUDNN_ATTENTION), PLAIN),
    "SDPA flash": Contender(sdpa(SDPBackend.FLASH_ATTENTION), PLAIN),
    "FlexAttention": Contender(flex, PLAIN),
    "SDPA math, compiled": Contender(sdpa(SDPBackend.MATH), DUAL, quadratic=True, rounds_scores=True, compiled=True),
}
# contenders that are there where their module is; the first two are of one name, and have no gradient through the tangent
RIVALS: dict[str, tuple[str, str, Contender]] = {  # with their distribution
    PEER: ("jvp_flash_attention", PEER, Contender(peer, (*PLAIN, "forward + JVP"))),
    f"{PEER} (fork)": ("jvp_flash_attention.block_sparse", PEER, Contender(fork, (*PLAIN, "forward + JVP"))),
    "FlashAttention-3": (FA3, "flash_attn_3", Contender(flash_attention(FA3), PLAIN)),
    "FlashAttention-4": (FA4, "flash-attn-4", Contender(flash_attention(FA4), PLAIN)),
}


def rivals() -> dict[str, Contender]:
    """Those that are installed."""

    def has(module: str) -> bool:
        try:
            return importlib.util.find_spec(module) is not None
        except ImportError:  # of the package that should have it
            return False

    return {who: contender for who, (module, _, contender) in RIVALS.items() if has(module)}


CONTENDERS |= rivals()
EAGER: dict[str, Contender] = {  # slower than compiled, but what the published tables have
    "SDPA math": Contender(sdpa(SDPBackend.MATH), quadratic=True, rounds_scores=True),
    "naive": Contender(naive_attention, quadratic=True, rounds_scores=True),
}


def describe() -> str:
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE
    found = [f"{who} {version_of(package)}" for who, (_, package, _) in RIVALS.items() if who in CONTENDERS]
    missing = [f"no {who}" for who in RIVALS if who not in CONTENDERS]
    return ", ".join([name, f"PyTorch {torch.__version__}", *found, *missing])


def draw(case: Case) -> list[torch.Tensor]:
    """q, k, v, their tangents, and the cotangents of the output and of its tangent."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    shape = case.batch, case.heads, case.length, case.head_dim
    dtype = getattr(torch, case.dtype)
    return [torch.randn(shape, generator=generator, device=DEVICE, dtype=dtype) for _ in range(8)]


def extra(case: Case) -> dict[str, Any]:
    """What the feature gives attention: `is_causal`, or an array."""
    generator = torch.Generator(DEVICE).manual_seed(8)
    if case.feature == "causal":
        return {"is_causal": True}
    if case.feature == "mask":  # half of all
        return {"attn_mask": torch.rand(case.extra_shape, generator=generator, device=DEVICE) < 0.5}
    if case.feature == "padding":  # the last quarter
        return {"attn_mask": (torch.arange(case.length, device=DEVICE) < 3 * case.length // 4).expand(case.extra_shape)}
    if case.feature == "bias":
        dtype = getattr(torch, case.dtype)
        return {"attn_mask": torch.randn(case.extra_shape, generator=generator, device=DEVICE, dtype=dtype)}
    return {name: torch.from_numpy(a).to(DEVICE) for name, a in case.structure().items()}


def starter(contender: Contender, job: str, extra: dict[str, Any]) -> Callable:
    """start(arrays) does what precedes the job, and gives a call of the job without arguments."""
    attend = functools.partial(contender.attention, **extra)
    with_tangent = lambda x, tx: jvp(attend, x, tx)
    if contender.compiled:
        torch.compiler.reset()
        with_tangent = torch.compile(with_tangent, dynamic=False)

    def start(arrays: list[torch.Tensor]) -> Callable:
        backward = job.endswith("backward")
        *x, g, h = [a.detach().requires_grad_(backward and i < 6) for i, a in enumerate(arrays)]
        x, tx = tuple(x[:3]), tuple(x[3:])
        if job == "forward":
            return torch.no_grad()(lambda: (attend(*x),))
        if job == "forward + JVP":
            return torch.no_grad()(lambda: with_tangent(x, tx))
        if job == "backward":
            results, inputs, cotangents = (attend(*x),), x, (g,)
        else:
            results, inputs, cotangents = with_tangent(x, tx), (*x, *tx), (g, h)
        cotangents = [torch.empty_like(o).copy_(c) for o, c in zip(results, cotangents, strict=True)]  # strided like o
        return lambda: torch.autograd.grad(results, inputs, cotangents, retain_graph=True)

    return start


def to_numpy(tensors: Any) -> list[np.ndarray]:
    return [a.detach().double().cpu().numpy() for a in tensors]


def naive(job, extra, arrays, first, exact, rounds_scores=False) -> list[np.ndarray]:
    """In the arrays' dtype throughout, or in float64; scores and softmax in float32 at least, or rounded too."""
    attention = functools.partial(naive_attention, first=first, rounds_scores=rounds_scores)
    arrays = [a.double() for a in arrays] if exact else arrays
    return to_numpy(starter(Contender(attention), job, extra)(arrays)())


def prepare(contender: Contender, job: str, extra: dict[str, Any], arrays: list[torch.Tensor]) -> Prepared:
    start = starter(contender, job, extra)
    start(arrays)()  # compiles and tunes, whose memory does not count
    release()
    before = allocated()
    call = start(arrays)
    highest = peak()
    ready = allocated()
    results = call()
    highest = max(highest, peak())
    temporary = max(peak() - ready - sum(a.nbytes for a in results), 0.0)  # in this order NaN stays NaN
    total = highest - before + sum(a.nbytes for a in arrays[: 6 if job in DUAL else 3])  # cotangents were copied
    return Prepared(call, to_numpy(end_heads(results, HEADS)), temporary / 2**20, total / 2**20)


def allocated() -> float:
    """Bytes; and starts the measurement of a peak."""
    if DEVICE == "cpu":
        return float("nan")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak() -> float:
    return torch.cuda.max_memory_allocated() if DEVICE == "cuda" else float("nan")


def release() -> None:
    if DEVICE == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def wait(results: Any) -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


@functools.cache
def matrix_product(size: int) -> Callable:
    a = torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16)
    return lambda: a @ a


def out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError)


def counted_operations(job: str, case: Case) -> int:
    """Of the math backend's matrix products in a forward job, by PyTorch's own counter."""
    shape = case.batch, case.heads, case.length, case.head_dim
    arrays = [torch.empty(shape, device="meta", dtype=getattr(torch, case.dtype)) for _ in range(8)]
    with FlopCounterMode(display=False) as counter:
        starter(EAGER["SDPA math"], job, {})(arrays)()
    return counter.get_total_flops()


def overhead() -> str:
    """What torch.func.jvp of attention costs the host beyond that of an addition: tiny calls, back to back."""
    arrays = draw(Case(1, 128, 1, 64))
    x, tx = tuple(arrays[:3]), tuple(arrays[3:6])
    attention, addition = (lambda f=f: jvp(f, x, tx) for f in (ours, lambda q, k, v: q + k + v))
    pairs = [(timed(attention, wait, 0.05), timed(addition, wait, 0.05)) for _ in range(9)]
    microseconds = [statistics.median(times) * 1e3 for times in zip(*pairs, strict=True)]
    return f"torch.func.jvp costs {microseconds[0] - microseconds[1]:.1f} µs more than that of two additions"
