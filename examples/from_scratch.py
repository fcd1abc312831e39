"""Flash attention from scratch: from three lines of NumPy to this library's kernels, each step checked against the last.

    python examples/from_scratch.py                                # ten seconds on two CPU cores
    python examples/from_scratch.py --no-causal --length 500       # lengths need not be multiples of the block

Attention lets each of L queries look at L keys: the score of query i and key j is S_ij = σ q_i·k_j, a softmax over each row
turns scores into weights P that sum to one, and the output o_i = Σ_j P_ij v_j is the weighted mean of the values.

    step 0   as the formula says: simple, but S and P take L² numbers, which a GPU writes to its large, slow memory
    step 1   in tiles, with an online softmax: nothing of size L² exists, and the result is exact, not an approximation
    step 2   the same loop with its tangent: how o moves when q, k and v move (forward mode, `jax.jvp`)
    step 3   the loop of step 2 as a CUDA kernel, written in Numba; simulated on the CPU where there is no GPU
    step 4   this library: tensor cores, any batch and heads, every derivative; here too jax.jvp is a single pass

Read on from `naive`.  Where a step is off by more than rounding, the script stops there.  A table of times and errors is
printed, and tiles.png shows in which order the tiles were visited and what became of one row meanwhile.

FlashAttention: arXiv:2205.14135, arXiv:2307.08691; online softmax: arXiv:1805.02867; its tangent: arXiv:2410.11081, appendix.
"""

import argparse
import functools
import importlib.util
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import matplotlib.pyplot as plt
import numpy as np
from matplotlib import colors, patches

from consistency import plots
from jax_flash_jvp import dot_product_attention

# Numba decides when it is imported whether kernels run on a GPU, which takes the package numba-cuda, or are simulated.
HAS_GPU = any(Path("/dev").glob("nvidia[0-9]*"))
os.environ.setdefault("NUMBA_ENABLE_CUDASIM", str(int(not (HAS_GPU and importlib.util.find_spec("numba_cuda")))))
os.environ.setdefault("NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS", "0")  # one head is too little work for a GPU: we know
try:
    import numba
    from numba import cuda, float32
except ImportError as error:
    raise ImportError('step 3 is written in Numba: `pip install numba`, or `pip install -e ".[examples]"`') from error
SIMULATED = bool(numba.config.ENABLE_CUDASIM)

ROUNDINGS = 100  # of the largest entry: by how many a step may be off
REPEATS = 5  # times that each step is timed, of which the median counts
SIMULATED_SIZE = 20, 8, 8  # length, channels and block: every simulated thread is a Python thread
HIDDEN, SKIPPED, MAXIMUM = "#f0b9a6", "#f4f1ea", "#c8553d"  # colours of the picture


class Attention(NamedTuple):
    o: Any  # [L, D] outputs
    l: Any  # [L] ℓ_i = log Σ_j exp(S_ij), the log-sum-exp of each row of scores
    t_o: Any = None  # the tangents of both
    mu: Any = None


# Step 0.  Besides o we keep ℓ, because P = exp(S − ℓ): with it, the backward pass makes any tile of P again in one go.
#
# The tangent.  Let q, k and v move at velocities q̇, k̇ and v̇.  Scores then move at Ṡ = σ (Q̇Kᵀ + QK̇ᵀ), by the product rule.
# ℓ moves at μ_i = Σ_j P_ij Ṡ_ij, the mean velocity of its row's scores, as one sees by differentiating its definition.
# Therefore P = exp(S − ℓ) moves at Ṗ = P∘(Ṡ − μ): weights grow where scores rise faster than the mean.  And by the product
# rule again, ȯ = ṖV + PV̇.


def naive(q, k, v, causal: bool) -> Attention:
    s = scores(q, k, slice(0, len(q)), slice(0, len(k)), causal)  # [L, L]
    l = np.log(np.exp(s - s.max(1, keepdims=True)).sum(1)) + s.max(1)
    return Attention(np.exp(s - l[:, None]) @ v, l)


def naive_jvp(q, k, v, t_q, t_k, t_v, causal: bool) -> Attention:
    o, l, *_ = naive(q, k, v, causal)
    p = np.exp(scores(q, k, slice(0, len(q)), slice(0, len(k)), causal) - l[:, None])
    t_s = (t_q @ k.T + q @ t_k.T) * q.shape[1] ** -0.5
    mu = (p * t_s).sum(1)
    return Attention(o, l, (p * (t_s - mu[:, None])) @ v + p @ t_v, mu)


def scores(q, k, rows: slice, keys: slice, masked: bool) -> np.ndarray:
    """A tile of S.  Where it is masked, a query does not see the keys after it: −∞, of which the exponential is zero."""
    s = q[rows] @ k[keys].T * q.shape[1] ** -0.5  # σ = 1/√D keeps scores near 1, however many channels there are
    if masked:
        i, j = np.arange(rows.start, rows.stop), np.arange(keys.start, keys.stop)
        s = np.where(j[None, :] <= i[:, None], s, -np.inf)
    return s


# Step 1.  A softmax seems to need its whole row: it divides by Σ_j exp(S_ij), and to keep the exponentials from overflowing
# one first subtracts the row's largest score.  But both can be corrected afterwards.  Suppose that of the keys so far we
# hold, for each query,
#
#     m = the largest score,     total = Σ exp(s − m),     acc = Σ exp(s − m) v.
#
# A new tile of keys may bring a larger score, m'.  Since exp(s − m') = exp(s − m) · exp(m − m'), multiplying both sums by
# α = exp(m − m') makes them as if m' had been known from the start; then the tile's own terms are added.  At the end
# o = acc / total and ℓ = m + log(total).  A tile of scores is used up on the spot: L² numbers become block² at a time.


def blocks(start: int, stop: int, block: int) -> Iterator[slice]:
    return (slice(i, min(i + block, stop)) for i in range(start, stop, block))


def visited(rows: slice, length: int, block: int, causal: bool) -> Iterator[tuple[slice, bool]]:
    """The blocks of keys that some query of `rows` sees, and whether another does not, so that the tile needs a mask.

    Causal attention skips the tiles above the diagonal, nearly half of all, and masks only those that the diagonal cuts.
    """
    for keys in blocks(0, rows.stop if causal else length, block):
        yield keys, causal and keys.stop - 1 > rows.start


def tiled(q, k, v, block: int, causal: bool) -> Attention:
    o, l = np.empty_like(q), np.empty(len(q))
    for rows in blocks(0, len(q), block):
        m = np.full(rows.stop - rows.start, -np.inf)
        total, acc_o = np.zeros(len(m)), np.zeros((len(m), v.shape[1]))
        for keys, masked in visited(rows, len(k), block, causal):
            s = scores(q, k, rows, keys, masked)  # [block, block]
            m_new = np.maximum(m, s.max(1))
            alpha = np.exp(m - m_new)
            p = np.exp(s - m_new[:, None])
            total = total * alpha + p.sum(1)
            acc_o = acc_o * alpha[:, None] + p @ v[keys]
            m = m_new
        o[rows], l[rows] = acc_o / total[:, None], m + np.log(total)
    return Attention(o, l)


# Step 2.  Ṗ = P∘(Ṡ − μ) seems to need a first pass for μ, which is only known when all keys were seen.  But μ is one number
# per row, so it can be taken out of the sum over keys, which leaves what is already there, o:
#
#     ȯ = Σ_j P_j (Ṡ_j − μ) v_j + P_j v̇_j = Σ_j (P_j Ṡ_j v_j + P_j v̇_j) − μ o.
#
# So one pass is enough: a sum for μ and a second accumulator, `acc_to`, are rescaled by α like the others, and μ o is taken
# off at the end.  To the two products of attention, S and PV, come four more: two for Ṡ, (P∘Ṡ)V and PV̇.  (In 16 bits the
# rounding of P∘Ṡ would remain of what μ o takes off, so the library takes the mean so far off each tile instead.)


def tiled_jvp(q, k, v, t_q, t_k, t_v, block: int, causal: bool, visit: Callable = lambda *state: None) -> Attention:
    o, l, t_o, mu = np.empty_like(q), np.empty(len(q)), np.empty_like(q), np.empty(len(q))
    for rows in blocks(0, len(q), block):
        m = np.full(rows.stop - rows.start, -np.inf)
        total, acc_o = np.zeros(len(m)), np.zeros((len(m), v.shape[1]))
        acc_mu, acc_to = np.zeros_like(total), np.zeros_like(acc_o)  # new
        for keys, masked in visited(rows, len(k), block, causal):
            s = scores(q, k, rows, keys, masked)
            t_s = (t_q[rows] @ k[keys].T + q[rows] @ t_k[keys].T) * q.shape[1] ** -0.5  # new
            m_new = np.maximum(m, s.max(1))
            alpha = np.exp(m - m_new)
            p = np.exp(s - m_new[:, None])
            total = total * alpha + p.sum(1)
            acc_o = acc_o * alpha[:, None] + p @ v[keys]
            acc_mu = acc_mu * alpha + (p * t_s).sum(1)  # new
            acc_to = acc_to * alpha[:, None] + (p * t_s) @ v[keys] + p @ t_v[keys]  # new
            m = m_new
            visit(rows, keys, masked, s, m, total)  # for the picture
        o[rows], l[rows] = acc_o / total[:, None], m + np.log(total)
        mu[rows] = acc_mu / total  # new
        t_o[rows] = acc_to / total[:, None] - mu[rows, None] * o[rows]  # new
    return Attention(o, l, t_o, mu)


# Step 3.  On a GPU every block of queries gets a block of threads, and here every query a thread.  All blocks run at once:
# the outer loop of step 2 is gone, the inner one stays.  A thread keeps its query and its sums in registers, if they suffice.
# The tiles of k, v and their tangents are copied once per block, by its threads together, to the small and fast shared
# memory, where all of them read it.  That is what makes attention flash: of all that is computed, only o, ℓ and their
# tangents go to the large memory.  (This kernel multiplies number by number; step 4 lets tensor cores multiply tiles.)


@functools.cache  # sizes of shared memory and of registers must be known when a kernel is compiled: there is one for each
def make_kernel(head_dim: int, block: int, causal: bool) -> Any:
    @cuda.jit
    def kernel(q, k, v, t_q, t_k, t_v, scale, o, l, t_o, mu):
        i_r = cuda.threadIdx.x
        i_q = cuda.blockIdx.x * block + i_r
        length = q.shape[0]
        tile_k = cuda.shared.array((block, head_dim), float32)
        tile_v = cuda.shared.array((block, head_dim), float32)
        tile_tk = cuda.shared.array((block, head_dim), float32)
        tile_tv = cuda.shared.array((block, head_dim), float32)
        row_q = cuda.local.array(head_dim, float32)
        row_tq = cuda.local.array(head_dim, float32)
        acc_o = cuda.local.array(head_dim, float32)
        acc_to = cuda.local.array(head_dim, float32)
        row_s = cuda.local.array(block, float32)
        for d in range(head_dim):
            row_q[d] = q[min(i_q, length - 1), d]  # threads past the end repeat the last query, and write nothing
            row_tq[d] = t_q[min(i_q, length - 1), d]
            acc_o[d] = acc_to[d] = float32(0)
        m, total, acc_mu = float32(-math.inf), float32(0), float32(0)

        for start in range(0, min(length, (cuda.blockIdx.x + 1) * block) if causal else length, block):
            keys = min(block, length - start)
            cuda.syncthreads()  # nobody still reads the last tiles
            for n in range(i_r, keys * head_dim, block):  # neighbouring threads copy neighbouring numbers
                j, d = n // head_dim, n % head_dim
                tile_k[j, d], tile_tk[j, d] = k[start + j, d], t_k[start + j, d]
                tile_v[j, d], tile_tv[j, d] = v[start + j, d], t_v[start + j, d]
            cuda.syncthreads()  # these are complete
            m_new = m
            for j in range(keys):
                s = float32(0)
                for d in range(head_dim):
                    s += row_q[d] * tile_k[j, d]
                row_s[j] = s * scale if not causal or start + j <= i_q else float32(-math.inf)
                m_new = max(m_new, row_s[j])
            alpha = math.exp(m - m_new)
            m = m_new
            total *= alpha
            acc_mu *= alpha
            for d in range(head_dim):
                acc_o[d] *= alpha
                acc_to[d] *= alpha
            for j in range(keys):
                p = math.exp(row_s[j] - m)
                t_s = float32(0)
                for d in range(head_dim):
                    t_s += row_tq[d] * tile_k[j, d] + row_q[d] * tile_tk[j, d]
                p_ts = p * t_s * scale
                total += p
                acc_mu += p_ts
                for d in range(head_dim):
                    acc_o[d] += p * tile_v[j, d]
                    acc_to[d] += p_ts * tile_v[j, d] + p * tile_tv[j, d]

        if i_q < length:
            l[i_q], mu[i_q] = m + math.log(total), acc_mu / total
            for d in range(head_dim):
                o[i_q, d] = acc_o[d] / total
                t_o[i_q, d] = acc_to[d] / total - acc_mu / total * o[i_q, d]

    return kernel


def numba_jvp(q, k, v, t_q, t_k, t_v, block: int, causal: bool) -> Attention:
    length, head_dim = q.shape
    outputs = [cuda.device_array(shape, np.float32) for shape in ((length, head_dim), length) * 2]
    launch = make_kernel(head_dim, block, causal)[-(-length // block), block]  # so many blocks, so many threads in each
    launch(q, k, v, t_q, t_k, t_v, np.float32(head_dim**-0.5), *outputs)
    return Attention(*(a.copy_to_host() for a in outputs))


# Step 4.  All of the above is one call, and its tangent that call under jax.jvp.


@functools.partial(jax.jit, static_argnames="causal")
def library_jvp(q, k, v, t_q, t_k, t_v, causal: bool) -> Attention:
    def attend(q, k, v):
        one_head = (a[:, None] for a in (q, k, v))  # [L, heads, D]
        o, l = dot_product_attention(*one_head, is_causal=causal, return_residual=True)
        return o[:, 0], l[:, 0]

    with jax.default_matmul_precision("highest"):  # a GPU would multiply in TensorFloat32, of three digits
        (o, l), (t_o, mu) = jax.jvp(attend, (q, k, v), (t_q, t_k, t_v))
    return Attention(o, l, t_o, mu)


def check(name: str, got: Attention, expected: Attention, allowed: float) -> float:
    """The largest error of any result that both have, as a share of that result's largest entry."""
    errors = [0.0]
    for field, a, b in zip(Attention._fields, got, expected, strict=True):
        if a is not None and b is not None:
            errors.append(np.abs(np.asarray(a, np.float64) - b).max() / np.abs(b).max())
            if not errors[-1] <= allowed:  # NaN is not
                raise AssertionError(f"{name}: {field} is off by {errors[-1]:.1e}, and {allowed:.1e} is allowed")
    return max(errors)


def step(name: str, compute: Callable, arrays: Any, before: Attention | None, allowed: float = 0) -> Attention:
    """compute(*arrays), checked against the step before, then timed."""
    got = jax.block_until_ready(compute(*arrays))
    error = f"{check(name, got, before, allowed):.1e}" if before else ""
    seconds = []
    for _ in range(REPEATS):
        clock = time.perf_counter()
        jax.block_until_ready(compute(*arrays))
        seconds.append(time.perf_counter() - clock)
    size = f"{arrays[0].shape[0]} × {arrays[0].shape[1]}"
    print(f"{name:32}{size:>10}{1e3 * statistics.median(seconds):12.2f}{error:>12}", flush=True)
    return got


def draw(path: Path, arrays: list[np.ndarray], block: int, causal: bool) -> None:
    """The tiles in the order in which step 2 visits them, and the statistics of its last row after each tile."""
    tiles, last_row = [], []

    def visit(rows, keys, masked, s, m, total):
        tiles.append((rows.start // block, keys.start // block, masked))
        if rows.stop == len(arrays[0]):
            last_row.append((s[-1].max(), m[-1], m[-1] + np.log(total[-1])))

    final = tiled_jvp(*arrays, block, causal, visit)
    count = tiles[-1][0] + 1
    order = np.full((count, count), np.nan)
    figure, (grid, row) = plt.subplots(1, 2, figsize=(14, 7), width_ratios=(1.25, 1))
    ramp = colors.LinearSegmentedColormap.from_list("visits", ["#dce9f2", plots.INK])
    for number, (i, j, masked) in enumerate(tiles, start=1):
        order[i, j] = number
        if masked:  # the half that is hidden
            corners = [(j - 0.5, i - 0.5), (j + 0.5, i - 0.5), (j + 0.5, i + 0.5)]
            grid.add_patch(patches.Polygon(corners, color=HIDDEN, linewidth=0))
        if count <= 20:
            shade = plots.INK if number < 0.45 * len(tiles) else "white"
            at = (j - 0.2, i + 0.24) if masked else (j, i)
            grid.text(*at, number, ha="center", va="center", fontsize=6 if masked else 8, color=shade)
    image = grid.imshow(np.ma.masked_invalid(order), cmap=ramp.with_extremes(bad=SKIPPED))
    figure.colorbar(image, ax=grid, shrink=0.7, label="order of visit")
    masked = sum(tile[2] for tile in tiles)
    counts = [len(tiles) - masked, masked, count**2 - len(tiles)]
    kinds = zip(counts, ("whole", "masked", "skipped"), (ramp(0.4), HIDDEN, SKIPPED), strict=True)
    legend = [patches.Patch(facecolor=color, edgecolor=plots.INK, label=f"{n} {kind}") for n, kind, color in kinds]
    grid.legend(handles=legend, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3, frameon=False)
    plots.label_axes(grid, "block of keys", f"tiles of {block} queries × {block} keys")
    grid.set_ylabel("block of queries (on a GPU, all at once)")
    grid.grid(False)

    largest, m, l = np.transpose(last_row)
    after = np.arange(1, len(m) + 1)
    row.axhline(final.l[-1], color=plots.INK, linestyle=":", label="ℓ, the log-sum-exp of the whole row")
    row.plot(after, l, ".-", color=plots.INK, label="m + log(total), of the keys so far")
    row.step(after, m, where="post", color=MAXIMUM, label="m, the largest score so far: at every rise, α < 1")
    row.plot(after, largest, "o", color="#8aa6bd", label="largest score of the tile")
    row.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), frameon=False)
    for axis in (grid.xaxis, grid.yaxis, row.xaxis):
        axis.get_major_locator().set_params(integer=True)
    plots.label_axes(row, "tiles visited", "the last query: its online softmax")
    title = f"Flash attention, {'causal' if causal else 'not causal'}, {len(final.l)} queries and keys"
    plots.save(figure, title, path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--length", type=int, default=512, help="of the sequence")
    parser.add_argument("--head-dim", type=int, default=64, help="head dimension")
    parser.add_argument("--block", type=int, default=32, help="queries and keys of a tile")
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, default=True, help="hide later keys")
    parser.add_argument("--output", default="output/from_scratch", help="folder for the picture")
    config = parser.parse_args(arguments)
    if min(config.length, config.head_dim, config.block) < 1:
        parser.error("--length, --head-dim and --block must be at least 1")
    if not SIMULATED and 4 * 4 * config.block * config.head_dim > 48 * 1024:
        parser.error("four float32 tiles exceed 48 KiB of shared memory: make --block or --head-dim smaller")
    block, causal = config.block, config.causal

    def random_arrays(length: int, head_dim: int) -> np.ndarray:
        return np.random.default_rng(0).standard_normal((6, length, head_dim))  # q, k, v and their tangents

    exact, single = (ROUNDINGS * np.finfo(dtype).eps for dtype in (np.float64, np.float32))
    arrays = random_arrays(config.length, config.head_dim)
    x, t_x = arrays[:3], arrays[3:]
    h = np.finfo(np.float64).eps ** (1 / 3)  # where the error of a difference, h², is as small as its rounding, eps / h
    above, below = naive(*(x + h * t_x), causal), naive(*(x - h * t_x), causal)
    difference = Attention(None, None, (above.o - below.o) / (2 * h), (above.l - below.l) / (2 * h))

    print(f"{'step':32}{'L × D':>10}{'ms':>12}{'error':>12}")
    result = step("0 naive", lambda *x: naive(*x, causal), x, None)
    with_tangent = step(
        "0 with its tangent", lambda *x: naive_jvp(*x, causal), arrays, difference, allowed=ROUNDINGS * h**2
    )
    step("1 tiles in NumPy", lambda *x: tiled(*x, block, causal), x, result, exact)
    result = step("2 with their tangent", lambda *x: tiled_jvp(*x, block, causal), arrays, with_tangent, exact)

    if SIMULATED:
        length, head_dim, block = SIMULATED_SIZE
        some = random_arrays(length, head_dim)
        expected, where = tiled_jvp(*some, block, causal), "simulated"
    else:
        some, expected, where = arrays, result, "on the GPU"
    on_gpu = [cuda.to_device(a) for a in some.astype(np.float32)]
    from_numba = step(f"3 Numba, {where}", lambda *x: numba_jvp(*x, block, causal), on_gpu, expected, single)
    for inputs, expected in ((some, from_numba), (arrays, result))[: 1 + SIMULATED]:
        x = jax.device_put(list(inputs.astype(np.float32)))
        step("4 jax_flash_jvp", lambda *x: library_jvp(*x, causal), x, expected, single)
    print("error: the largest, as a share of the largest entry, against the step before at the same L × D; that of the")
    print("first tangent, against a central difference.  Numbers have 64 bits up to step 2, and 32 from there on.")
    if HAS_GPU and SIMULATED:
        print('Step 3 was simulated: to run it on your GPU, `pip install "numba-cuda[cu12]"`, or [cu13].')

    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    draw(output / "tiles.png", arrays, config.block, causal)
    print(f"{output / 'tiles.png'} shows the tiles as they were visited")


if __name__ == "__main__":
    main()
