"""Times attention and its derivatives on the GPU at hand, beside cuDNN, XLA and the matrix product.

Every result is first checked against float64: an implementation that fails is reported and not timed.  Contenders take
turns, in another order each round, so that neither drift nor a predecessor's heat favours one; figures are medians.

    python benchmarks/attention.py                                  # L = 8192, H32 D64 and H24 D128, bf16
    python benchmarks/attention.py --lengths 1024 4096 16384 --causal --output results/causal

TFLOP/s count the matrix products that the job needs: 2 for the forward, 6 for forward + JVP, 5 for the backward, 15 for the
dual backward (the gradient through forward + JVP), each of 2 B H Lq Lk D operations, half of that where causal.
"""

import argparse
import csv
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash_jvp import dot_product_attention

PRODUCTS = {"forward": 2, "forward + JVP": 6, "backward": 5, "dual backward": 15}
HEADS = {64: 32, 128: 24}
enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64


class Row(NamedTuple):
    job: str
    who: str
    length: int
    heads: int
    head_dim: int
    causal: bool
    milliseconds: float
    tflops: float
    of_matmul: float
    temporary_mib: float


def ours(q, k, v, causal):
    return dot_product_attention(q, k, v, is_causal=causal)


def cudnn(q, k, v, causal):
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")


def xla(q, k, v, causal):
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="xla")


CONTENDERS: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "jax-flash-jvp": (ours, tuple(PRODUCTS)),
    "cuDNN": (cudnn, ("forward", "backward")),
    "XLA": (xla, tuple(PRODUCTS)),
}


def job_function(job: str, attention: Callable, causal: bool, x: Any, tx: Any) -> tuple[Callable, tuple]:
    """A jitted function and its leading arguments; cotangents (G of the output, H of the tangent) follow them."""
    f = lambda q, k, v: attention(q, k, v, causal)
    if job == "forward":
        return jax.jit(lambda x, g, h: f(*x)), (x,)
    if job == "forward + JVP":
        return jax.jit(lambda x, tx, g, h: jax.jvp(f, x, tx)), (x, tx)
    if job == "backward":
        pull = jax.jit(lambda x: jax.vjp(f, *x)[1])(x)
        return jax.jit(lambda pull, g, h: pull(g)), (pull,)
    pull = jax.jit(lambda x, tx: jax.vjp(lambda x, tx: jax.jvp(f, x, tx), x, tx)[1])(x, tx)
    return jax.jit(lambda pull, g, h: pull((g, h))), (pull,)


def draw(length: int, heads: int, head_dim: int, dtype: Any) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 8)
    return [jax.random.normal(key, (1, length, heads, head_dim), dtype) for key in keys]


def relative_errors(got: Any, expected: Any) -> list[float]:
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    return [float(np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)) for a, b in pairs]


def two_heads(tree: Any) -> Any:
    return jax.tree.map(lambda a: a[:, :, np.array([0, a.shape[2] - 1])], tree)


def expected_results(job: str, causal: bool, arrays: list[jax.Array]) -> tuple[Any, list[float]]:
    """The job in float64 on the first and the last head, and the errors that naive attention makes in the arrays' dtype."""
    some = two_heads(arrays)

    def compute(arrays, attention):
        function, leading = job_function(job, attention, causal, tuple(arrays[:3]), tuple(arrays[3:6]))
        return jax.tree.map(np.asarray, function(*leading, *arrays[6:]))

    with enable_x64(True):
        exact = compute([a.astype(jnp.float64) for a in some], naive)
    return exact, relative_errors(compute(some, naive), exact)


def naive(q, k, v, causal):
    """In the arrays' dtype throughout; scores and softmax in float32 at least."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    s = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=wide) * q.shape[-1] ** -0.5
    if causal:
        s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s).astype(q.dtype), v)


def timed(call: Callable[[], Any], seconds: float) -> float:
    """Milliseconds of one call among as many in a row as fit; the device works through them without a gap."""
    jax.block_until_ready(call())
    start = time.perf_counter()
    jax.block_until_ready(call())
    count = max(1, int(seconds / max(time.perf_counter() - start, 1e-5)))
    start = time.perf_counter()
    for _ in range(count):
        out = call()
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / count * 1e3


def overhead_microseconds() -> float:
    """What a jitted call costs beyond its kernel: back-to-back calls of a tiny forward + JVP, which the host bounds, less
    those of an empty jitted function of the same arguments."""
    arrays = draw(128, 1, 64, jnp.bfloat16)
    x, tx = tuple(arrays[:3]), tuple(arrays[3:6])
    full = jax.jit(lambda x, tx: jax.jvp(lambda *a: ours(*a, False), x, tx))
    empty = jax.jit(lambda x, tx: (x[0] + 1, tx[0] + 1))
    a, b = zip(*[(timed(lambda: full(x, tx), 0.05), timed(lambda: empty(x, tx), 0.05)) for _ in range(9)], strict=True)
    return (statistics.median(a) - statistics.median(b)) * 1e3


def run(options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    a = jax.random.normal(jax.random.key(1), (8192, 8192), jnp.bfloat16)
    product = jax.jit(lambda a: a @ a)
    for head_dim in options.head_dims:
        for length in options.lengths:
            heads = HEADS.get(head_dim, 24)
            arrays = draw(length, heads, head_dim, jnp.dtype(options.dtype))
            for job in options.jobs:
                calls: dict[str, Callable] = {"bf16 matrix product": lambda: product(a)}
                memory: dict[str, float] = {}
                exact, allowed = expected_results(job, options.causal, arrays)
                for who, (attention, jobs) in CONTENDERS.items():
                    if job not in jobs or (who == "XLA" and length > options.longest_xla):
                        continue
                    try:
                        function, leading = job_function(
                            job, attention, options.causal, tuple(arrays[:3]), tuple(arrays[3:6])
                        )
                        compiled = function.lower(*leading, *arrays[6:]).compile()
                        got = jax.tree.map(np.asarray, two_heads(compiled(*leading, *arrays[6:])))
                    except Exception as error:
                        print(f"{job}, {who}, L{length} D{head_dim}: {type(error).__name__}: {str(error)[:90]}")
                        continue
                    errors = relative_errors(got, exact)
                    if not all(e <= 2 * n + 1e-3 for e, n in zip(errors, allowed, strict=True)):
                        print(f"WRONG: {job}, {who}, L{length} D{head_dim}: errors {errors}, naive {allowed}")
                        continue
                    memory[who] = compiled.memory_analysis().temp_size_in_bytes / 2**20
                    calls[who] = lambda c=compiled, args=(*leading, *arrays[6:]): c(*args)
                times: dict[str, list[float]] = {who: [] for who in calls}
                for turn in range(options.rounds):
                    order = list(calls)[turn % len(calls) :] + list(calls)[: turn % len(calls)]
                    for who in order:
                        time.sleep(options.rest)
                        times[who].append(timed(calls[who], options.seconds))
                matmul = 2 * 8192**3 / statistics.median(times.pop("bf16 matrix product")) * 1e-9
                operations = 2 * PRODUCTS[job] * heads * length**2 * head_dim / (2 if options.causal else 1)
                for who, samples in times.items():
                    ms = statistics.median(samples)
                    rate = operations / ms * 1e-9
                    row = Row(job, who, length, heads, head_dim, options.causal, ms, rate, rate / matmul, memory[who])
                    rows.append(row)
                    print(
                        f"{job:14s} {who:14s} H{heads} L{length} D{head_dim}{' causal' if options.causal else ''}: "
                        f"{ms:8.3f} ms {rate:6.0f} TFLOP/s = {row.of_matmul:.2f} of the product's {matmul:.0f}; "
                        f"temporaries {memory[who]:.1f} MiB",
                        flush=True,
                    )
    return rows


def plot(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = sorted({(r.job, r.head_dim) for r in rows}, key=lambda p: (list(PRODUCTS).index(p[0]), p[1]))
    dims = sorted({d for _, d in panels})
    jobs = [j for j in PRODUCTS if any(j == job for job, _ in panels)]
    figure, axes = pyplot.subplots(len(jobs), len(dims), figsize=(5 * len(dims), 2.6 * len(jobs)), squeeze=False)
    for i, job in enumerate(jobs):
        for k, head_dim in enumerate(dims):
            for color, who in enumerate(CONTENDERS):
                points = [(r.length, r.tflops) for r in rows if (r.job, r.head_dim, r.who) == (job, head_dim, who)]
                if points:
                    axes[i, k].plot(*zip(*points, strict=True), marker="o", color=f"C{color}", label=who)
            axes[i, k].set(title=f"{job}, D = {head_dim}", ylabel="TFLOP/s", xscale="log", ylim=(0, None))
            axes[i, k].set_xticks(sorted({r.length for r in rows}), [str(n) for n in sorted({r.length for r in rows})])
            axes[i, k].grid(alpha=0.3)
    axes[-1, 0].set_xlabel("sequence length")
    axes[0, 0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", default=list(PRODUCTS), choices=list(PRODUCTS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192])
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--seconds", type=float, default=0.03, help="of work per contender and round; 1 shows sustained speed"
    )
    parser.add_argument(
        "--rest", type=float, default=0.1, help="seconds of rest before each, so that none inherits heat"
    )
    parser.add_argument("--longest-xla", type=int, default=8192, help="XLA's attention runs out of memory beyond")
    parser.add_argument("--output", type=Path, default=Path("results/attention"), help="without an ending")
    options = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, {options.dtype}")
    rows = run(options)
    print(f"a jitted call costs {overhead_microseconds():.1f} µs more than an empty one")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with open(options.output.with_suffix(".csv"), "w", newline="") as file:
        csv.writer(file).writerows([Row._fields, *rows])
    if rows:
        plot(rows, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
