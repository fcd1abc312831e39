"""Times a training step of a flow map as robot policies have it, in PyTorch on the GPU at hand: the gradient goes through the
JVP, each sample has a dense boolean mask, and blocks are checkpointed.

    python benchmarks/robot_policy.py                                      # 4 samples of 1,670 tokens, 24 heads × 128
    python benchmarks/robot_policy.py --batch 2 --length 24 --heads 2 --channels 8 --depth 1 --steps 1   # on a CPU

A sample is a prefix of images and text, of which each sample has another length, then a state, then actions: a token sees the
parts up to its own, without padding.  The JVP of each block is checkpointed by itself, which eager PyTorch can do.  Each way of
running the step is held against the eager step without checkpoints first: the gradient of the first block's projection may
differ by 3% of its norm.  A step is the loss, its backward and fused AdamW, float32 parameters under bfloat16 autocast.
Memory is the highest that the allocator holds in a step; of graphs, in the step that records them.
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import jvp
from torch.utils.checkpoint import checkpoint

import torch_bridge
from measure import locked

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WAYS = {  # whether blocks are checkpointed, and options of torch.compile
    "eager, no checkpoints": (False, None),
    "eager": (True, None),
    "compiled": (True, {}),
    "graphs": (True, dict(mode="reduce-overhead")),
    "graphs, no checkpoints": (False, dict(mode="reduce-overhead")),
}


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.query_key_value, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, condition: Tensor, mask: Tensor) -> Tensor:
        parts = self.query_key_value(self.norms[0](x) + condition).chunk(3, -1)
        query, key, value = (a.unflatten(-1, (self.heads, -1)).transpose(1, 2) for a in parts)
        o = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.project(o.transpose(1, 2).flatten(2))
        return x + self.contract(F.gelu(self.expand(self.norms[1](x) + condition), approximate="tanh"))


class FlowMap(nn.Module):
    """u(z, r, t), and the loss of its identity u = v − (t − r) du/dt, none of which is stopped."""

    def __init__(self, width: int, heads: int, depth: int):
        super().__init__()
        self.time = nn.Linear(2, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.checkpointed = False

    def forward(self, data: Tensor, noise: Tensor, r: Tensor, t: Tensor, mask: Tensor) -> Tensor:
        embed = lambda r, t: self.time(torch.stack([r, t], -1))[:, None]
        condition, t_condition = jvp(embed, (r, t), (torch.zeros_like(r), torch.ones_like(t)))
        v, u = noise - data, torch.lerp(data, noise, t[:, None, None])
        du_dt = v
        for block in self.blocks:

            def along(u, condition, du_dt, t_condition, block=block):
                return jvp(lambda u, c: block(u, c, mask), (u, condition), (du_dt, t_condition))

            of_block = u, condition, du_dt, t_condition
            options = dict(use_reentrant=False, preserve_rng_state=False)
            u, du_dt = checkpoint(along, *of_block, **options) if self.checkpointed else along(*of_block)
        return (u - v + (t - r)[:, None, None] * du_dt).float().square().mean()


def drawn(batch: int, length: int, width: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    data, noise = torch.randn(2, batch, length, width, generator=generator)
    r, t = torch.rand(2, batch, generator=generator).sort(0).values
    prefix = length * 7 // 8
    place = torch.arange(length)
    part = (place >= prefix).int() + (place > prefix).int()  # images and text, the state, actions
    used = torch.randint(prefix // 2, prefix + 1, (batch, 1), generator=generator)
    seen = (place < used) | (part > 0)
    mask = (part[:, None] >= part) & seen[:, None, None]
    return [a.to(DEVICE) for a in (data, noise, r, t, mask)]


def step_of(model: FlowMap, way: str):
    model.checkpointed, options = WAYS[way]
    torch.compiler.reset()
    run = model if options is None else torch.compile(model, fullgraph=True, dynamic=False, **options)

    def loss_and_backward(*batch):
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = run(*batch)
        loss.backward()
        return loss

    return loss_and_backward


def gradient(model: FlowMap, run, batch: list[Tensor]) -> Tensor:
    model.zero_grad()
    run(*batch)
    result = model.blocks[0].query_key_value.weight.grad.double().cpu()
    model.zero_grad()
    return result


def measure(model: FlowMap, way: str, batch: list[Tensor], exact: Tensor, steps: int) -> str:
    run = step_of(model, way)
    optimizer = torch.optim.AdamW(model.parameters(), 0.0, weight_decay=0.0, fused=True)
    error = ((gradient(model, run, batch) - exact).norm() / exact.norm()).item()
    wait = torch.cuda.synchronize if DEVICE == "cuda" else lambda: None

    def step():
        run(*batch)
        optimizer.step()
        optimizer.zero_grad()

    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step()  # which records graphs
    peak = torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else float("nan")
    step()
    times = []
    with locked():
        for _ in range(3):
            wait()
            start = time.perf_counter()
            for _ in range(steps):
                step()
            wait()
            times.append((time.perf_counter() - start) / steps)
    seconds = statistics.median(times)
    said = "" if error < 0.03 else "  WRONG"
    return f"{1 / seconds:8.2f} steps/s {1e3 * seconds:9.1f} ms {peak:7.1f} GiB, off by {error:.1%}{said}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in dict(batch=4, length=1670, heads=24, channels=128, depth=4, steps=10).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ways", nargs="+", choices=[*WAYS], default=[*WAYS])
    options = parser.parse_args(arguments)
    width = options.heads * options.channels
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = FlowMap(width, options.heads, options.depth)
    batch, good = drawn(options.batch, options.length, width), True
    print(f"{torch.cuda.get_device_name() if DEVICE == 'cuda' else 'CPU'}, PyTorch {torch.__version__}, {options}")
    with torch_bridge.patch():
        exact = gradient(model, step_of(model, "eager, no checkpoints"), batch)
        for way in options.ways:
            try:
                row = measure(model, way, batch, exact, options.steps)
            except torch.OutOfMemoryError:
                row = "does not fit"
            good &= not row.endswith("WRONG")
            print(f"  {way:24} {row}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
