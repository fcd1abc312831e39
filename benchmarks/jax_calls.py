"""Attention and its derivatives in JAX, arrays [B, L, H, D]."""

import contextlib
import functools
import importlib.util
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash_jvp import dot_product_attention, visibility
from measure import PRODUCTS, Case, Contender, Prepared, end_heads, timed, version_of

ROWS, HEADS = 1, 2
wait = jax.block_until_ready


def ours(q, k, v, blocks=None, **extra):
    if blocks is not None:
        extra |= dict(mask=blocks, mask_block_size=(q.shape[1] // blocks.shape[2],) * 2)
    return dot_product_attention(q, k, v, **extra)


def masked(attention: Callable) -> Callable:
    """Of what knows no ranges and no blocks."""

    def call(q, k, v, key_ranges=None, blocks=None, **extra):
        if key_ranges is not None or blocks is not None:
            extra["mask"] = elements(key_ranges, blocks, q.shape[1], k.shape[1])
        return attention(q, k, v, **extra)

    return call


def elements(key_ranges, blocks, queries: int, keys: int, first: int = 0) -> jax.Array:
    """The boolean mask that ranges or blocks stand for, of so many queries from the first on."""
    if blocks is None:
        return visibility.matrix(key_ranges, keys)
    size = keys // blocks.shape[3]
    return blocks[:, :, (first + np.arange(queries)) // size][..., np.arange(keys) // size]


portable = functools.partial(ours, implementation="portable")
cudnn = masked(functools.partial(jax.nn.dot_product_attention, implementation="cudnn"))
xla = masked(functools.partial(jax.nn.dot_product_attention, implementation="xla"))


def fa4(q, k, v, is_causal=False, **extra):
    from fa4_jax import flash_attn

    return flash_attn(q, k, v, causal=is_causal, **extra)


OURS = "jax-flash-jvp"
CONTENDERS: dict[str, Contender] = {
    OURS: Contender(ours),
    **({"portable": Contender(portable)} if jax.default_backend() == "gpu" else {}),
    "cuDNN": Contender(cudnn, ("forward", "backward")),
    **({"fa4-jax": Contender(fa4, tuple(PRODUCTS)[:3])} if importlib.util.find_spec("fa4_jax") else {}),
    "XLA": Contender(xla, tuple(PRODUCTS), quadratic=True),
}


def describe() -> str:
    peer = f"fa4-jax {version_of('fa4-jax')}" if "fa4-jax" in CONTENDERS else "no fa4-jax"
    return f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, {peer}"


def draw(case: Case) -> list[jax.Array]:
    """q, k, v, their tangents, and the cotangents of the output and of its tangent."""
    keys = jax.random.split(jax.random.key(0), 8)
    shape = case.batch, case.length, case.heads, case.head_dim
    return [jax.random.normal(key, shape, jnp.dtype(case.dtype)) for key in keys]


def extra(case: Case) -> dict[str, Any]:
    """What the feature gives attention: `is_causal`, or an array."""
    key = jax.random.key(8)
    if case.feature == "causal":
        return {"is_causal": True}
    if case.feature == "mask":  # half of all
        return {"mask": jax.random.bernoulli(key, shape=case.extra_shape)}
    if case.feature == "padding":  # the last quarter
        return {"mask": jnp.broadcast_to(jnp.arange(case.length) < 3 * case.length // 4, case.extra_shape)}
    if case.feature == "bias":
        return {"bias": jax.random.normal(key, case.extra_shape, jnp.dtype(case.dtype))}
    return {name: jnp.asarray(a) for name, a in case.structure().items()}


def job_function(job: str, attention: Callable, extra: dict, arrays: list[jax.Array]) -> tuple[Callable, tuple]:
    """A jitted function and its arguments, the last of which are the cotangents."""
    x, tx, cotangents = tuple(arrays[:3]), tuple(arrays[3:6]), tuple(arrays[6:])
    extra = dict(extra)
    attention = functools.partial(attention, is_causal=extra.pop("is_causal", False))
    f = lambda e: functools.partial(attention, **e)
    if job == "forward":
        return jax.jit(lambda e, x, g, h: f(e)(*x)), (extra, x, *cotangents)
    if job == "forward + JVP":
        return jax.jit(lambda e, x, tx, g, h: jax.jvp(f(e), x, tx)), (extra, x, tx, *cotangents)
    if job == "backward":
        pull = jax.jit(lambda e, x: jax.vjp(f(e), *x)[1])(extra, x)
        return jax.jit(lambda pull, g, h: pull(g)), (pull, *cotangents)
    pull = jax.jit(lambda e, x, tx: jax.vjp(lambda x, tx: jax.jvp(f(e), x, tx), x, tx)[1])(extra, x, tx)
    return jax.jit(lambda pull, g, h: pull((g, h))), (pull, *cotangents)


def to_numpy(tree: Any) -> list[np.ndarray]:
    return [np.asarray(a, np.float64) for a in tree]


def naive(job, extra, arrays, first, exact, rounds_scores=False) -> list[np.ndarray]:
    """In the arrays' dtype throughout, or in float64; scores and softmax in float32 at least.  `first`: the first row of
    scores that belongs to these queries."""

    def attention(q, k, v, is_causal=False, mask=None, bias=None, key_ranges=None, blocks=None):
        if key_ranges is not None or blocks is not None:
            mask = elements(key_ranges, blocks, q.shape[1], k.shape[1], first)
        wide = q.dtype if rounds_scores else jnp.promote_types(q.dtype, jnp.float32)
        s = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=wide) * q.shape[-1] ** -0.5
        if bias is not None:
            s += bias.astype(s.dtype)
        if is_causal:
            mask = jnp.tril(jnp.ones(s.shape[-2:], bool), first)
        if mask is not None:
            s = jnp.where(mask, s, -jnp.inf)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s).astype(q.dtype), v)

    with jax.enable_x64(True) if exact else contextlib.nullcontext():
        if exact:
            arrays = [a.astype(jnp.float64) for a in arrays]
        function, arguments = job_function(job, attention, extra, arrays)
        return to_numpy(jax.tree.leaves(function(*arguments)))


def prepare(contender: Contender, job: str, extra: dict, arrays: list[jax.Array]) -> Prepared:
    function, arguments = job_function(job, contender.attention, extra, arrays)
    compiled = function.lower(*arguments).compile()
    ends = to_numpy(end_heads(jax.tree.leaves(compiled(*arguments)), HEADS))
    memory = compiled.memory_analysis()
    results = memory.argument_size_in_bytes + memory.output_size_in_bytes
    temporary = memory.temp_size_in_bytes
    return Prepared(lambda: compiled(*arguments), ends, temporary / 2**20, (temporary + results) / 2**20)


@functools.cache
def matrix_product(size: int) -> Callable:
    a = jax.random.normal(jax.random.key(1), (size, size), jnp.bfloat16)
    product = jax.jit(lambda a: a @ a)
    return lambda: product(a)


def out_of_memory(error: Exception) -> bool:
    return "RESOURCE_EXHAUSTED" in str(error)


def release() -> None:
    pass


def overhead() -> str:
    """What a jitted call costs beyond its kernel: back-to-back calls of a tiny forward + JVP, which the host bounds, less
    those of an empty jitted function of the same arguments."""
    arrays = draw(Case(1, 128, 1, 64))
    x, tx = tuple(arrays[:3]), tuple(arrays[3:6])
    full = jax.jit(lambda x, tx: jax.jvp(ours, x, tx))
    empty = jax.jit(lambda x, tx: (x[0] + 1, tx[0] + 1))
    pairs = [(timed(lambda: full(x, tx), wait, 0.05), timed(lambda: empty(x, tx), wait, 0.05)) for _ in range(9)]
    microseconds = [statistics.median(times) * 1e3 for times in zip(*pairs, strict=True)]
    return f"a jitted call costs {microseconds[0] - microseconds[1]:.1f} µs more than an empty one"
