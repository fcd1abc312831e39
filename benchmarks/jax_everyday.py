"""The calls of `everyday.py` in JAX, compiled: arrays, contenders, float64 and timing for `regret.py`."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from everyday import Call, checked, entries, joined
from jax_calls import out_of_memory, release  # noqa: F401 (what `attempt` asks of a framework)
from jax_flash_jvp import dot_product_attention
from measure import relative_errors

# Calls in what is timed at once, of long and of short ones: to begin a chain takes 0.3 ms, more or less.
CHAINED = (10, 100)
SHORT = 1.0  # milliseconds of a call with its launch
SCORES = 2**26  # that float64 holds at a time: all processes may compute so at once, and keep the memory


def gpus() -> int:
    return len(jax.devices()) if jax.default_backend() == "gpu" else 0


def device() -> str:
    return jax.devices()[0].device_kind


def draw(call: Call) -> tuple[tuple, tuple, tuple, dict]:
    """(q, k, v[, bias]), their tangents, the cotangents of the output and of its tangent, and the other arguments."""
    b, t, s, n, k, d, dtype, kind = call
    shapes = [(b, t, n, d), (b, s, k, d), (b, s, k, d)]
    shapes += {"bias": [(1, n, t, s)], "key bias": [(b, 1, 1, s)]}.get(kind, [])
    keys = iter(jax.random.split(jax.random.key(0), 16))
    normal = lambda shape: jax.random.normal(next(keys), shape, jnp.dtype(dtype))
    x, tx = (tuple(map(normal, shapes)) for _ in range(2))
    cotangents = normal(shapes[0]), normal(shapes[0])
    extra = {}
    if kind == "lengths":
        extra["key_value_seq_lengths"] = jax.random.randint(next(keys), (b,), s // 2, s + 1)
    if kind in ("mask", "dense mask"):
        extra["mask"] = jax.random.bernoulli(next(keys), 0.8, (b, 1, t if kind == "dense mask" else 1, s))
    return x, tx, cotangents, extra


def visible(call: Call) -> dict[str, Any]:
    """What a kind without arrays is for `jax.nn.dot_product_attention`, and for `dot_product_attention`, with T = S."""
    if call.kind == "causal" and call.queries == call.keys:
        return dict(is_causal=True)
    if call.kind == "window":
        return dict(local_window_size=(256, 0))
    return {}


def ours(call: Call, implementation: str | None = None) -> Callable:
    extra = visible(call)
    if call.kind == "causal" and not extra:
        extra = dict(is_causal=True, causal_alignment="lower_right")
    return functools.partial(dot_product_attention, implementation=implementation, **extra)


def theirs(call: Call, implementation: str) -> Callable:
    extra = visible(call)
    if call.kind == "causal" and not extra:
        extra = dict(mask=jnp.tril(jnp.ones((1, 1, call.queries, call.keys), bool), call.keys - call.queries))
    return functools.partial(jax.nn.dot_product_attention, implementation=implementation, **extra)


def contenders(call: Call, job: str) -> dict[str, Callable]:
    found = {"default": ours(call), "XLA": theirs(call, "xla")}
    if gpus():
        found |= {"hopper": ours(call, "hopper"), "portable": ours(call, "portable")}
        if "JVP" not in job:
            found["cuDNN"] = theirs(call, "cudnn")
    return found


def job_function(job: str, attention: Callable) -> Callable:
    """Of x, tx, the cotangents and the other arguments; results in a flat tuple."""

    def function(x, tx, cotangents, extra):
        f = lambda *x: attention(*x[:3], **extra, **({"bias": x[3]} if len(x) > 3 else {}))
        if job == "forward":
            return (f(*x),)
        if job == "forward + JVP":
            return jax.jvp(f, x, tx)
        if job == "forward + backward":
            o, pull = jax.vjp(f, *x)
            return o, *pull(cotangents[0])
        both, pull = jax.vjp(lambda x, tx: jax.jvp(f, x, tx), x, tx)
        return (*both, *[g for group in pull(cotangents) for g in group])

    return function


def naive(call: Call) -> Callable:
    """Scores and softmax in float32 at least; products in the dtype of the arrays."""

    def attention(q, k, v, bias=None, mask=None, key_value_seq_lengths=None):
        k, v = (jnp.repeat(a, call.heads // call.key_heads, 2) for a in (k, v))
        wide = jnp.promote_types(q.dtype, jnp.float32)
        s = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=wide) * q.shape[-1] ** -0.5
        s = s if bias is None else s + bias.astype(s.dtype)
        i, j = jnp.arange(call.queries)[:, None], jnp.arange(call.keys)
        seen = jnp.ones((1, 1, 1, 1), bool) if mask is None else mask
        if call.kind in ("causal", "window"):
            seen = seen & (j <= i + call.keys - call.queries)
        if call.kind == "window":
            seen = seen & (j >= i - 256)
        if key_value_seq_lengths is not None:
            seen = seen & (j < key_value_seq_lengths[:, None, None, None])
        p = jax.nn.softmax(jnp.where(seen, s, -jnp.inf)).astype(q.dtype)
        return jnp.einsum("bnts,bsnh->btnh", p, v)

    return attention


def exact(call: Call, job: str, arrays: tuple) -> tuple[list[np.ndarray], list[float]]:
    """What `checked` leaves of the results, in float64, and the errors of naive attention in the arrays' dtype."""
    # it is not timed, so that its matrix products need not be tuned, which takes most of the compilation
    untuned = {"xla_gpu_autotune_level": 0} if gpus() else {}
    job_of_naive = jax.jit(job_function(job, naive(call)), compiler_options=untuned)
    arrays = jax.tree.map(lambda a: checked(call, a), arrays)
    step, found = max(1, SCORES // (call.heads * call.queries * call.keys)), []
    for wide in (True, False):
        cast = lambda a, wide=wide: a.astype(jnp.float64) if wide and jnp.issubdtype(a.dtype, jnp.floating) else a
        parts = []
        with jax.enable_x64(wide):
            for first in range(0, len(arrays[0][0]), step):
                some = jax.tree.map(lambda a, first=first, cast=cast: cast(entries(call, a, first, step)), arrays)
                parts.append(to_numpy(job_of_naive(*some)))
        found.append([joined(call, pieces) for pieces in zip(*parts, strict=True)])
    return found[0], relative_errors(found[1], found[0])


def to_numpy(arrays: Any) -> list[np.ndarray]:
    return [np.asarray(a, np.float64) for a in arrays]


def prepare(call: Call, job: str, attention: Callable, arrays: tuple, known: set[str], options: Any):
    """The results, and a function that times the job: milliseconds; None where the program is among those known."""
    step = job_function(job, attention)
    lowered = jax.jit(step).lower(*arrays)
    if (text := lowered.as_text()) in known:
        return None
    known.add(text)
    once = lowered.compile()
    results = once(*arrays)
    found = to_numpy(checked(call, a) for a in results)
    if not gpus():
        return found, lambda: _milliseconds(lambda: once(*arrays))
    calls = CHAINED[min(_milliseconds(lambda: once(*arrays)) for _ in range(3)) < SHORT]  # the host may be busy
    full = jax.jit(_chain(step, calls)).lower(arrays, results).compile()
    types = jax.tree.leaves(jax.tree.map(jax.typeof, (arrays, results)))
    moves = _moves(calls, jax.tree.structure((arrays, results)), *types)

    def net() -> float:
        return (_milliseconds(lambda: full(arrays, results)) - _milliseconds(lambda: moves(arrays, results))) / calls

    return found, net


@functools.cache  # contenders have results of the same shapes
def _moves(calls: int, structure: Any, *types: Any) -> Callable:
    return jax.jit(_chain(None, calls)).lower(*jax.tree.unflatten(structure, types)).compile()


def _chain(step: Callable | None, calls: int) -> Callable:
    """As many calls after one another, each of which needs what the one before gave; of None what moves the operands, alone."""

    def moved(operands, results):
        """Each by a little of a result of its shape, so that nothing is done once for all."""
        results, new = [*results], []
        for a in operands:
            at = next((i for i, r in enumerate(results) if r.shape == a.shape), None)
            new.append(a if at is None else a + (results.pop(at) * 1e-3).astype(a.dtype))
        return new

    def run(arrays, results):
        x, tx, *rest = arrays

        def body(operands, _):
            given = (tuple(operands[: len(x)]), tuple(operands[len(x) :]), *rest)
            return moved(operands, results if step is None else step(*given)), None

        return jax.lax.scan(body, [*x, *tx], None, length=calls)[0]

    return run


def _milliseconds(call: Callable) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return (time.perf_counter() - start) * 1e3
