"""What eager calls from PyTorch cost the host, in µs, beside what PyTorch itself takes for the like, on the GPU at hand:

    python benchmarks/host_time.py

Two times, in turns with the others, medians: of the host, from an idle GPU until the call returns, not until the GPU is done;
and the wall time of one of twenty calls in a row, until the GPU is done.  The forward is held against SDPA's (at most 2×),
forward and backward too (1.5×), torch.func.jvp against that of a multiplication (1.5×), the dual backward against the backward
(1.5×), and a JVP with the gradient through it against SDPA's forward and backward (2.5×).  `--profile JOB` prints where Python
spends a job.
"""

import argparse
import contextlib
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.func import jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from torch_bridge import scaled_dot_product_attention

SHAPES = [(1, 2, 64, 64), (8, 12, 256, 64), (128, 16, 256, 72)]  # B, H, L, D
FORWARD, BOTH, JVP, MULTIPLICATION = "forward", "forward + backward", "torch.func.jvp", "torch.func.jvp of a product"
BACKWARD, DUAL, THROUGH = "backward", "dual backward", "gradient through a JVP"
IN_A_ROW = 20
BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
TARGETS = [  # (job, what it is held against, how many times that it may take)
    (FORWARD, f"{FORWARD}, SDPA cuDNN", 2.0),
    (FORWARD, f"{FORWARD}, SDPA flash", 2.0),
    (BOTH, f"{BOTH}, SDPA cuDNN", 1.5),
    (BOTH, f"{BOTH}, SDPA flash", 1.5),
    (JVP, MULTIPLICATION, 1.5),
    (DUAL, BACKWARD, 1.5),
    (THROUGH, f"{BOTH}, SDPA cuDNN", 2.5),
    (THROUGH, f"{BOTH}, SDPA flash", 2.5),
]


def jobs_of(shape: tuple[int, ...], device: str) -> dict[str, Callable]:
    """Calls without arguments, by name."""
    b, h, length, d = shape
    draw = lambda: torch.randn(b, length, h, d, device=device, dtype=torch.bfloat16).transpose(1, 2)
    x, tx = (tuple(draw() for _ in range(3)) for _ in range(2))
    leaves, t_leaves = (tuple(a.detach().requires_grad_() for a in group) for group in (x, tx))
    cotangents = draw(), draw()
    o = scaled_dot_product_attention(*leaves)
    both = jvp(scaled_dot_product_attention, leaves, t_leaves)

    def forward_and_backward(attention):
        return lambda: torch.autograd.grad(attention(*leaves), leaves, cotangents[:1])

    jobs = {
        FORWARD: torch.no_grad()(lambda: scaled_dot_product_attention(*x)),
        BOTH: forward_and_backward(scaled_dot_product_attention),
        BACKWARD: lambda: torch.autograd.grad(o, leaves, cotangents[:1], retain_graph=True),
        JVP: torch.no_grad()(lambda: jvp(scaled_dot_product_attention, x, tx)),
        MULTIPLICATION: torch.no_grad()(lambda: jvp(lambda q, k, v: q * k, x, tx)),
        DUAL: lambda: torch.autograd.grad(both, (*leaves, *t_leaves), cotangents, retain_graph=True),
        THROUGH: lambda: torch.autograd.grad(
            jvp(scaled_dot_product_attention, leaves, t_leaves), (*leaves, *t_leaves), cotangents
        ),
    }
    theirs = {
        FORWARD: torch.no_grad()(lambda: F.scaled_dot_product_attention(*x)),
        BOTH: forward_and_backward(F.scaled_dot_product_attention),
    }
    return jobs | {f"{job}, SDPA {name}": theirs[job] for name in BACKENDS for job in theirs}


def microseconds(jobs: dict[str, Callable], rounds: int, wait: Callable, calls: int = 1) -> dict[str, float]:
    """Medians of `rounds` calls of each job, in turns, after some that compile and tune.  Of several `calls` in a row the wall
    time of one."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for i in range(rounds + 3):
        for name, job in jobs.items():
            backend = BACKENDS.get(name.rpartition("SDPA ")[2])
            with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
                wait()
                start = time.perf_counter()
                for _ in range(calls):
                    results = job()
                if calls > 1:
                    wait()
                end = time.perf_counter()
            del results
            if i >= 3:
                times[name].append(1e6 * (end - start) / calls)
    return {name: statistics.median(of_job) for name, of_job in times.items()}


def profile(job: Callable, calls: int, wait: Callable) -> None:
    wait()
    with cProfile.Profile() as profiler:
        for _ in range(calls):
            job()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--profile", metavar="JOB", help="one of the names in the table")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("host_time.py needs an NVIDIA GPU: what a call costs the host is another thing on a CPU")
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, µs: host, wall")
    for shape in SHAPES:
        name = "B{} H{} L{} D{}".format(*shape)
        jobs = jobs_of(shape, "cuda")
        host, wall = (microseconds(jobs, options.rounds, torch.cuda.synchronize, calls) for calls in (1, IN_A_ROW))
        print("\n".join([f"\n{name}", *(f"  {host[job]:7.0f} {wall[job]:7.0f}  {job}" for job in jobs)]))
        for job, other, most in TARGETS:
            ratios = [of[job] / of[other] for of in (host, wall)]
            said = "yes" if max(ratios) <= most else "NO"
            print(f"  {ratios[0]:7.2f} {ratios[1]:7.2f}  {job} / {other}; at most {most}: {said}")
        if options.profile in jobs:
            profile(jobs[options.profile], options.rounds, torch.cuda.synchronize)


if __name__ == "__main__":
    main()
