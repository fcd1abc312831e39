"""Measures candidate tiles of the portable kernels on the GPU at hand, for `jax_flash_jvp/kernels/portable/tiles.py`.

Compiles all candidates in parallel first, checks each against float64 on two heads, then times them in turn.  Needs torch.

    python benchmarks/tune.py --jobs forward forward_dual --head-dims 64 128 --length 8192
"""

import argparse
import csv
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Iterator

import torch
import triton

from jax_flash_jvp.kernels.portable import jobs
from jax_flash_jvp.kernels.portable.tiles import Tile
from jax_flash_jvp.problem import Operands, Problem
from torch_bridge.launch import TorchLauncher

PRODUCTS = dict(
    forward=2,
    forward_dual=6,
    key_side=4,
    query_side=3,
    key_side_dual=12,
    # above 64 channels the key side is two launches: `value_side_dual` and `key_side_dual` of the tables
    key_v=5,
    key_k=9,
    query_side_dual=9,
)
HEADS = {64: 32, 128: 24}


def candidates(job: str, head_dim: int) -> Iterator[Tile]:
    """(block_m, block_n, warps, stages)"""
    small = head_dim <= 96
    spans = {
        "forward": [(128, 128), (128, 64), (64, 64), (64, 128)] + ([] if small else [(128, 32)]),
        "forward_dual": [(128, 128), (128, 64), (64, 64), (64, 128)]
        if small
        else [(128, 64), (128, 32), (64, 64), (64, 32)],
        "key_side": [(64, 128), (128, 128), (64, 64), (32, 128)]
        if small
        else [(64, 128), (32, 128), (64, 64), (32, 64)],
        "query_side": [(128, 128), (128, 64), (64, 64), (128, 32)]
        if small
        else [(128, 64), (128, 32), (64, 64), (64, 32)],
        "key_side_dual": [(32, 64), (32, 128), (64, 64)],
        "key_v": [(64, 128), (32, 128), (64, 64)],
        "key_k": [(64, 128), (32, 128), (64, 64), (32, 64)],
        "query_side_dual": [(128, 64), (64, 64), (128, 32), (64, 32)],
    }[job]
    for bm, bn in spans:
        rows = max(bm, bn) if "side" in job or "key" in job else bm
        for warps, stages in itertools.product((4, 8), (2, 3, 4)):
            if (warps == 8) != (rows >= 128) and not (rows >= 128 and warps == 4 and small and job == "forward"):
                continue
            yield Tile(bm, bn, warps, stages)


class Case:
    """One job at one head dim, on random data."""

    def __init__(self, job: str, head_dim: int, length: int, causal: bool, dtype: torch.dtype = torch.bfloat16):
        torch.manual_seed(0)
        heads = HEADS.get(head_dim, 24)
        shape = (1, length, heads, head_dim)
        self.job, self.head_dim, self.length, self.causal, self.heads = job, head_dim, length, causal, heads
        draw = lambda: torch.randn(shape, device="cuda", dtype=dtype)
        self.x, self.tx = Operands(draw(), draw(), draw()), Operands(draw(), draw(), draw())
        self.d_o, self.t_d_o = draw().contiguous(), draw().contiguous()
        self.problem = Problem(scale=head_dim**-0.5, is_causal=causal)
        self.launcher = TorchLauncher(self.x.query.device)
        self.y = self.ty = None

    def prepare(self) -> None:
        o, lse, t_o, mu = self._with(
            Tile(64, 32, 4, 2), lambda: jobs.forward(self.launcher, self.problem, self.x, self.tx)
        )
        self.y, self.ty = (o, lse), (t_o, mu)
        call = jobs.PortableCall(self.launcher, self.problem, self.x)
        self.rows = jobs.statistics(call, self.y, (self.d_o, None), self.ty, (self.t_d_o, None), True)

    def _with(self, tile: Tile, call):
        original = jobs.tile
        jobs.tile = lambda *_: tile
        try:
            return call()
        finally:
            jobs.tile = original

    def run(self, tile: Tile):
        return self._with(tile, self._run)

    def _run(self):
        launcher, problem, x, tx = self.launcher, self.problem, self.x, self.tx
        if self.job == "forward":
            return jobs.forward(launcher, problem, x)[:1]
        if self.job == "forward_dual":
            return jobs.forward(launcher, problem, x, tx)[::2]
        none = (False,) * 4
        want, want_t = {
            "key_side": ((False, True, True, False), none),
            "query_side": ((True, False, False, False), none),
            "key_side_dual": ((False, True, True, False),) * 2,
            "key_v": ((False, False, True, False),) * 2,
            "key_k": ((False, True, False, False),) * 2,
            "query_side_dual": ((True, False, False, False),) * 2,
        }[self.job]
        original = jobs.statistics
        jobs.statistics = lambda *_: self.rows
        try:
            dual = any(want_t)
            tangents = (tx, self.ty, (self.t_d_o, None)) if dual else (jobs.NO_TANGENT, (None, None), (None, None))
            call = jobs.PortableCall(launcher, problem, x)
            a, b = jobs._backward(call, self.y, (self.d_o, None), *tangents, want, want_t)
        finally:
            jobs.statistics = original
        return [g for g in (*a, *b) if g is not None]

    def expected(self):
        """The same in float64, for the first and the last head."""
        if not hasattr(self, "_expected"):
            self._expected = [self._dense(h) for h in (0, self.heads - 1)]
        return self._expected

    def _dense(self, h):
        q, k, v, tq, tk, tv, g, tg = (a[0, :, h].double() for a in (*self.x[:3], *self.tx[:3], self.d_o, self.t_d_o))
        scale = self.problem.scale
        s = scale * q @ k.T
        if self.causal:
            s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf)
        p = s.softmax(-1)
        del s
        o = p @ v
        if self.job == "forward":
            return [o]
        if self.job in ("key_side", "query_side"):
            ds = p * (g @ v.T - (g * o).sum(-1, keepdim=True))
            return [scale * ds @ k] if self.job == "query_side" else [scale * ds.T @ q, p.T @ g]
        w = scale * (tq @ k.T + q @ tk.T)
        w -= (p * w).sum(-1, keepdim=True)
        to = (p * w) @ v + p @ tv
        if self.job == "forward_dual":
            return [o, to]
        ds = p * (g @ v.T - (g * o).sum(-1, keepdim=True))
        tds = p * (tg @ v.T + g @ tv.T - (tg * o + g * to).sum(-1, keepdim=True)) + ds * w
        dk, dv, tdk, tdv = scale * ds.T @ q, p.T @ g, scale * (tds.T @ q + ds.T @ tq), p.T @ tg + (p * w).T @ g
        return {
            "key_side_dual": lambda: [dk, dv, tdk, tdv],
            "key_v": lambda: [dv, tdv],
            "key_k": lambda: [dk, tdk],
            "query_side_dual": lambda: [scale * ds @ k, scale * (tds @ k + ds @ tk)],
        }[self.job]()

    def error(self, got) -> float:
        worst = 0.0
        for h, expected in zip((0, self.heads - 1), self.expected(), strict=True):
            for a, b in zip(got, expected, strict=True):
                worst = max(worst, ((a[0, :, h].double() - b).norm() / b.norm()).item())
        return worst

    def flops(self) -> float:
        full = 2 * PRODUCTS[self.job] * self.heads * self.length**2 * self.head_dim
        return full / 2 if self.causal else full


def _compile(args) -> None:
    job, head_dim, tile, causal = args
    try:
        torch.cuda.set_device(0)
        case = Case(job, head_dim, 256, causal)
        case.prepare()
        case.run(tile)
        torch.cuda.synchronize()
    except Exception as error:  # a tile that does not fit is reported when it is timed
        print(f"# {job} {head_dim} {tuple(tile[:4])}: {type(error).__name__}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--jobs", nargs="+", choices=list(PRODUCTS), default=["forward", "forward_dual", "key_side", "query_side"]
    )
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--csv")
    options = parser.parse_args()
    plan = [(j, d, t, options.causal) for j in options.jobs for d in options.head_dims for t in candidates(j, d)]
    start = time.time()
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        pool.map(_compile, plan, chunksize=1)
    print(f"# {len(plan)} candidates compiled in {time.time() - start:.0f} s", flush=True)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    matmul = 2 * 8192**3 / triton.testing.do_bench(lambda: a @ a, return_mode="median") * 1e-9
    print(f"# bf16 matrix product {matmul:.0f} TFLOP/s")
    rows = []
    for (job, d), group in itertools.groupby(plan, key=lambda p: p[:2]):
        case = Case(job, d, options.length, options.causal)
        case.prepare()
        results = []
        for _, _, tile, _ in group:
            try:
                error = case.error(case.run(tile))
                if not error < 2e-2:
                    print(f"WRONG {job} {d} {tuple(tile[:4])} error {error:.1e}")
                    continue
                ms = statistics.median(
                    triton.testing.do_bench(lambda t=tile, c=case: c.run(t), warmup=10, rep=60, return_mode="all")
                )
            except Exception as failure:
                print(f"# {job} {d} {tuple(tile[:4])}: {type(failure).__name__} {str(failure)[:80]}")
                continue
            rate = case.flops() / ms * 1e-9
            results.append((ms, tile, rate, error))
            rows.append([job, d, *tile[:4], ms, rate, error])
        for ms, tile, rate, error in sorted(results)[:4]:
            share = rate / matmul
            print(
                f"{job:16s} D{d:<4d} {tuple(tile[:4])!s:20s} {ms:8.3f} ms {rate:6.0f} TFLOP/s {share:.2f}  error {error:.1e}",
                flush=True,
            )
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            csv.writer(file).writerows(
                [["job", "head_dim", "bm", "bn", "warps", "stages", "ms", "tflops", "error"], *rows]
            )


if __name__ == "__main__":
    main()
