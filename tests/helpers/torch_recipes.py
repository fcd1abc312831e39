"""A MeanFlow training as docs/meanflow-pytorch.md has it: wrapped for several processes, with accumulation, checkpoints, autocast
and averaged weights."""

import contextlib
import traceback

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.func import jvp  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import torch_bridge  # noqa: E402
from torch_oracle import normal  # noqa: E402

WIDTH, DECAY = 16, 0.9


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        block = dict(d_model=WIDTH, nhead=2, dim_feedforward=24, dropout=0.0, batch_first=True, norm_first=True)
        self.time = nn.Linear(2, WIDTH)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(**block) for _ in range(2))
        self.checkpointed = False  # inside the JVP, which must be compiled

    def embed(self, z, r, t):
        return z + self.time(torch.stack([r, t], -1))[:, None]

    def forward(self, z, r, t):
        z = self.embed(z, r, t)
        for block in self.blocks:
            z = checkpoint(block, z, use_reentrant=False) if self.checkpointed else block(z)
        return z


class MeanFlow(nn.Module):
    """The JVP is inside forward; that of each block is computed again in the backward, if it is checkpointed."""

    def __init__(self, checkpointed=False):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.checkpointed = Net(), checkpointed

    def forward(self, data, noise, r, t):
        z, v = torch.lerp(data, noise, t[:, None, None]), noise - data
        net = self.net.embed if self.checkpointed else self.net
        u, du_dt = jvp(net, (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))
        for block in self.net.blocks if self.checkpointed else ():
            along = lambda u, du_dt, block=block: jvp(block, (u,), (du_dt,))
            u, du_dt = checkpoint(along, u, du_dt, use_reentrant=False, preserve_rng_state=False)
        target = v - (t - r)[:, None, None] * du_dt
        return (u - target.detach()).square().mean()


def sharded(step, blocks):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(next(step.parameters()).device.type, (dist.get_world_size(),))
    for block in step.net.blocks if blocks else ():
        fully_shard(block, mesh=mesh)
    return fully_shard(step, mesh=mesh)


def compiled(step):
    return torch.compile(step, backend="aot_eager", fullgraph=True)


WRAPS = {
    "DDP": DistributedDataParallel,
    "DDP, compiled": lambda step: DistributedDataParallel(compiled(step)),
    "FSDP2": lambda step: sharded(step, False),
    "FSDP2 of blocks": lambda step: sharded(step, True),
}


def accumulating(step, last):
    """Without the exchange of gradients before the last part of a batch."""
    if isinstance(step, DistributedDataParallel):
        return contextlib.nullcontext() if last else step.no_sync()
    if hasattr(step, "set_requires_gradient_sync"):
        step.set_requires_gradient_sync(last)
    return contextlib.nullcontext()


def train(step, like, rank=0, processes=1, autocast=False):
    """The parameters, and averages of them, after three steps of two parts each."""
    optimizer = torch.optim.SGD(step.parameters(), 0.1, momentum=0.9)
    average = [p.detach().clone() for p in step.parameters()]
    for n in range(3):
        for part in range(2):
            data, noise = normal(2, 4, 5, WIDTH, seed=10 * n + part)
            r, t = torch.sigmoid(normal(2, 4, seed=10 * n + part)).sort(0).values
            mine = [a[rank::processes].to(like) for a in (data, noise, r, t)]
            with accumulating(step, part == 1), torch.autocast(like.device.type, torch.bfloat16, enabled=autocast):
                loss = step(*mine) / 2
            with accumulating(step, part == 1):
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for a, p in zip(average, step.parameters(), strict=True):
            a.lerp_(p.detach(), 1 - DECAY)
    whole = lambda a: a.full_tensor() if hasattr(a, "full_tensor") else a
    return [whole(a.detach()).double() for a in (*step.parameters(), *average)]


def recipes(rank, n, names, device="cpu"):
    """What is wrong with trainings by names like "DDP + checkpoints + autocast", in n processes, against one."""
    for name in names:
        wrap, *more = name.split(" + ")
        checkpointed, autocast = "checkpoints" in more, "autocast" in more
        double = device == "cpu" and not autocast
        like = torch.zeros((), dtype=torch.float64 if double else torch.float32, device=device)
        torch.compiler.reset()
        try:
            with torch_bridge.patch():
                expected = train(MeanFlow().to(like), like, autocast=autocast)
                got = train(WRAPS[wrap](MeanFlow(checkpointed).to(like)), like, rank, n, autocast)
            error = max((a - b).abs().max().item() for a, b in zip(got, expected, strict=True))
            if not error < (1e-12 if double else 1e-2 if autocast else 1e-4):
                yield f"{name}: error {error:.2g}"
        except Exception:
            yield f"{name}: {traceback.format_exc()}".replace("\n", " | ")
        dist.barrier()


def gpu_recipes(rank, n, names):
    return recipes(rank, n, names, f"cuda:{rank}")
