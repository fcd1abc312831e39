"""Times the Laplacian of a small attention network in JAX, as wave functions and score models need it: thousands of walkers,
8 to 64 electrons, float32, on the GPU at hand.

    python benchmarks/laplacian.py                       # beside naive attention, and folx where it is installed
    python benchmarks/laplacian.py --precision tf32
    python benchmarks/laplacian.py --walkers 2 --electrons 3 --heads 2 --head-dim 4 --matmul-size 64 --quick    # on a CPU

The network gives each walker, [electrons, 3] coordinates, a number f; its Laplacian is the sum of ∂²f/∂x² over the coordinates.

    jvp of jvp    one direction at a time, forward over forward: no gradient, nothing is kept
    HVPs          one direction at a time, forward over reverse: a row of the Hessian, of which one element counts
    linearized    the same, by jax.linearize of the gradient: what does not depend on the direction is computed once, and kept
    folx          all directions in one forward pass, with their values, Jacobian and Laplacian

Directions are mapped, so many at a time.  Every contender is first checked against float64 on two walkers, and may err twice as
much as HVPs of naive attention in float32 do.
"""

import argparse
import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jax_calls
from forces import PRECISIONS
from jax_flash_jvp import dot_product_attention
from measure import Prepared, add_timing_options, in_turns, parse, relative_errors, right_ones, write

COLUMNS = ("precision", "walkers", "electrons", "heads", "head_dim", "depth", "who", "milliseconds", "temporary_mib")
CHECKED = 2  # walkers
Network = Callable[[jax.Array], jax.Array]  # [walkers, electrons, 3] → [walkers]


def naive_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    s = jnp.einsum("bthc,bshc->bhts", q, k) * q.shape[-1] ** -0.5
    return jnp.einsum("bhts,bshc->bthc", jax.nn.softmax(s), v)


def network(options: argparse.Namespace, attention: Callable, dtype: str) -> Network:
    """Coordinates, and distances from the origin, by blocks of attention and a layer of tanh."""
    random, width = np.random.default_rng(0), options.heads * options.head_dim
    draw = lambda *shape: jnp.asarray(shape[0] ** -0.5 * random.standard_normal(shape), dtype)
    first, last = draw(4, width), draw(width, 1)
    blocks = [(draw(width, 3 * width), draw(width, width), draw(width, width)) for _ in range(options.depth)]

    def apply(x: jax.Array) -> jax.Array:
        h = jnp.concatenate([x, jnp.sqrt(1 + jnp.sum(x**2, -1, keepdims=True))], -1) @ first
        for qkv, out, layer in blocks:
            q, k, v = jnp.moveaxis((h @ qkv).reshape(*h.shape[:2], 3, options.heads, -1), 2, 0)
            h = h + attention(q, k, v).reshape(h.shape) @ out
            h = h + jnp.tanh(h @ layer)
        return jnp.sum((h @ last)[..., 0], 1)

    return apply


def over_directions(second: Callable, x: jax.Array, at_once: int) -> jax.Array:
    """[walkers]: the sum over the coordinates of second(direction), so many at a time."""
    directions = jnp.eye(x[0].size, dtype=x.dtype).reshape(-1, *x.shape[1:])
    whole = lambda direction: second(jnp.broadcast_to(direction, x.shape))
    return jax.lax.map(whole, directions, batch_size=min(at_once, len(directions))).sum(0)


def jvp_of_jvp(f: Network, x: jax.Array, at_once: int) -> jax.Array:
    along = lambda x, t: jax.jvp(f, (x,), (t,))[1]
    return over_directions(lambda t: jax.jvp(lambda x: along(x, t), (x,), (t,))[1], x, at_once)


def hvps(f: Network, x: jax.Array, at_once: int) -> jax.Array:
    gradient = jax.grad(lambda x: f(x).sum())
    return over_directions(lambda t: jnp.sum(t * jax.jvp(gradient, (x,), (t,))[1], (1, 2)), x, at_once)


def linearized(f: Network, x: jax.Array, at_once: int) -> jax.Array:
    _, product = jax.linearize(jax.grad(lambda x: f(x).sum()), x)
    return over_directions(lambda t: jnp.sum(t * product(t), (1, 2)), x, at_once)


def by_folx(f: Network, x: jax.Array, at_once: int) -> jax.Array:
    import folx

    one = folx.ForwardLaplacianOperator(0)(lambda x: f(x[None])[0])  # 0: the Jacobian as a whole array
    return jax.lax.map(lambda x: one(x)[0], x, batch_size=min(at_once, len(x)))


def contenders(options: argparse.Namespace) -> dict[str, tuple[Callable, Callable, int]]:
    """By name: the way, the attention, and how many at a time, directions or, for folx, walkers."""
    found = {
        f"{name}, {way}": (take, attention, options.directions)
        for way, take in (("jvp of jvp", jvp_of_jvp), ("HVPs", hvps), ("linearized", linearized))
        for name, attention in (("jax-flash-jvp", dot_product_attention), ("naive", naive_attention))
    }
    if importlib.util.find_spec("folx"):
        found["naive, folx"] = by_folx, naive_attention, options.walkers_at_once
    return {who: given for who, given in found.items() if who in (options.contenders or found)}


def measure(electrons: int, options: argparse.Namespace) -> tuple[list[tuple], bool]:
    """Rows of the table, and whether all that fitted into memory was right."""
    x = np.random.default_rng(1).standard_normal((options.walkers, electrons, 3), np.float32)

    def laplacian(way, attention, at_once, dtype="float32"):
        return jax.jit(lambda x: way(network(options, attention, dtype), x, at_once))

    def prepare(*given):
        compiled = laplacian(*given).lower(jnp.asarray(x)).compile()
        ends = jax_calls.to_numpy([compiled(x)[:CHECKED]])
        temporary = compiled.memory_analysis().temp_size_in_bytes / 2**20
        return Prepared(lambda: compiled(x), ends, temporary, temporary)

    with jax.enable_x64(True):
        exact = jax_calls.to_numpy([laplacian(hvps, naive_attention, 1, "float64")(x[:CHECKED].astype(float))])
    with jax.default_matmul_precision(PRECISIONS[options.precision][0]):
        plain = jax_calls.to_numpy([laplacian(hvps, naive_attention, 1)(x[:CHECKED])])
        makers = {who: functools.partial(prepare, *given) for who, given in contenders(options).items()}
        allowed, rounding = relative_errors(plain, exact), PRECISIONS[options.precision][2]
        prepared, good = right_ones(
            jax_calls, makers, lambda p: p.ends, exact, allowed, rounding, f"{electrons} electrons, "
        )
    medians, matmul = in_turns(jax_calls, {who: p.call for who, p in prepared.items()}, options)
    print(f"{options.walkers} walkers of {electrons} electrons: the bf16 matmul {matmul:.0f} TFLOP/s")
    for who, ms in medians.items():
        print(f"  {who:28} {ms:9.3f} ms {prepared[who].temporary_mib:10.1f} MiB of temporary memory", flush=True)
    sizes = options.precision, options.walkers, electrons, options.heads, options.head_dim, options.depth
    return [(*sizes, who, ms, prepared[who].temporary_mib) for who, ms in medians.items()], good


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=tuple(PRECISIONS), default="ieee", help="of float32 matmuls")
    parser.add_argument("--walkers", type=int, default=2048)
    parser.add_argument("--electrons", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--directions", type=int, default=8, help="at a time")
    parser.add_argument(
        "--walkers-at-once", type=int, default=256, help="of folx, which takes all directions at a time"
    )
    parser.add_argument("--contenders", nargs="+", help="by the names that the table has")
    parser.add_argument("--output", type=Path, default=Path("results/laplacian"), help="without an ending")
    add_timing_options(parser, rounds=5)
    options = parse(parser, arguments)
    print(jax_calls.describe())
    rows, good = [], True
    for electrons in options.electrons:
        more, right = measure(electrons, options)
        rows, good = rows + more, good and right
    write(options.output.with_suffix(".csv"), COLUMNS, rows)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
