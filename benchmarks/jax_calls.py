"""Attention and its derivatives in JAX, arrays [B, L, H, D]."""

import contextlib
import functools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash_jvp import dot_product_attention
from measure import PRODUCTS, Case, Contender, Prepared, end_heads, timed

ROWS, HEADS = 1, 2
wait = jax.block_until_ready


def ours(q, k, v, causal):
    return dot_product_attention(q, k, v, is_causal=causal)


def portable(q, k, v, causal):
    return dot_product_attention(q, k, v, is_causal=causal, implementation="portable")


def cudnn(q, k, v, causal):
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")


def xla(q, k, v, causal):
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="xla")


OURS = "jax-flash-jvp"
CONTENDERS: dict[str, Contender] = {
    OURS: Contender(ours),
    **({"portable": Contender(portable)} if jax.default_backend() == "gpu" else {}),
    "cuDNN": Contender(cudnn, ("forward", "backward")),
    "XLA": Contender(xla, tuple(PRODUCTS), quadratic=True),
}


def describe() -> str:
    return f"{jax.devices()[0].device_kind}, JAX {jax.__version__}"


def draw(case: Case) -> list[jax.Array]:
    """q, k, v, their tangents, and the cotangents of the output and of its tangent."""
    keys = jax.random.split(jax.random.key(0), 8)
    shape = case.batch, case.length, case.heads, case.head_dim
    return [jax.random.normal(key, shape, jnp.dtype(case.dtype)) for key in keys]


def job_function(job: str, attention: Callable, causal: bool, arrays: list[jax.Array]) -> tuple[Callable, tuple]:
    """A jitted function and its arguments, the last of which are the cotangents."""
    x, tx, cotangents = tuple(arrays[:3]), tuple(arrays[3:6]), tuple(arrays[6:])
    f = lambda q, k, v: attention(q, k, v, causal)
    if job == "forward":
        return jax.jit(lambda x, g, h: f(*x)), (x, *cotangents)
    if job == "forward + JVP":
        return jax.jit(lambda x, tx, g, h: jax.jvp(f, x, tx)), (x, tx, *cotangents)
    if job == "backward":
        pull = jax.jit(lambda x: jax.vjp(f, *x)[1])(x)
        return jax.jit(lambda pull, g, h: pull(g)), (pull, *cotangents)
    pull = jax.jit(lambda x, tx: jax.vjp(lambda x, tx: jax.jvp(f, x, tx), x, tx)[1])(x, tx)
    return jax.jit(lambda pull, g, h: pull((g, h))), (pull, *cotangents)


def to_numpy(tree: Any) -> list[np.ndarray]:
    return [np.asarray(a, np.float64) for a in tree]


def naive(job, causal, arrays, first, exact, rounds_scores=False) -> list[np.ndarray]:
    """In the arrays' dtype throughout, or in float64; scores and softmax in float32 at least.  `first`: the first row of
    scores that belongs to these queries."""

    def attention(q, k, v, causal):
        wide = q.dtype if rounds_scores else jnp.promote_types(q.dtype, jnp.float32)
        s = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=wide) * q.shape[-1] ** -0.5
        if causal:
            s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool), first), s, -jnp.inf)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s).astype(q.dtype), v)

    with jax.enable_x64(True) if exact else contextlib.nullcontext():
        if exact:
            arrays = [a.astype(jnp.float64) for a in arrays]
        function, arguments = job_function(job, attention, causal, arrays)
        return to_numpy(jax.tree.leaves(function(*arguments)))


def prepare(contender: Contender, job: str, causal: bool, arrays: list[jax.Array]) -> Prepared:
    function, arguments = job_function(job, contender.attention, causal, arrays)
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
    full = jax.jit(lambda x, tx: jax.jvp(lambda *a: ours(*a, False), x, tx))
    empty = jax.jit(lambda x, tx: (x[0] + 1, tx[0] + 1))
    pairs = [(timed(lambda: full(x, tx), wait, 0.05), timed(lambda: empty(x, tx), wait, 0.05)) for _ in range(9)]
    microseconds = [statistics.median(times) * 1e3 for times in zip(*pairs, strict=True)]
    return f"a jitted call costs {microseconds[0] - microseconds[1]:.1f} µs more than an empty one"
