"""Test-time training of a small language model, end to end, in PyTorch: what ttt_jax.py explains.

python examples/ttt_torch.py                                  # minutes on two CPU cores
python examples/ttt_torch.py --size long                      # a GPU: windows of up to 32,768 characters
python examples/ttt_torch.py --steps 800 --resume             # go on from the last checkpoint
"""

import dataclasses
import functools
import statistics
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

from consistency.config import option, parse_config
from consistency.test_time import PRESETS, describe_cost, report
from consistency.test_time import Config as SharedConfig
from consistency.text import load_text, spread_batch, training_batch
from consistency.training_torch import device_facts, process_device, train
from torch_bridge import scaled_dot_product_attention

Cache = list[tuple[Tensor, Tensor]]  # keys and values [heads, window, channels] of each block


@dataclasses.dataclass(frozen=True)
class Config(SharedConfig):
    attention: str = option("auto", "auto (torch_bridge's) or naive; both, with a comma between, are timed")
    output: str = option("output/ttt_torch", "folder for pictures, metrics and checkpoints")
    compile = False  # no option: a compiled backward has no second derivative


def norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6).to(x.dtype)


def rotate(x: Tensor, first: int) -> Tensor:
    """Rotary positions, from `first` on, of [heads, length, channels]."""
    half = x.shape[-1] // 2
    places = first + torch.arange(x.shape[-2], device=x.device)
    angles = places[:, None] * 1e4 ** (-torch.arange(half, device=x.device) / half)
    (a, b), cos, sin = x.chunk(2, -1), angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def naive_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """With scores and weights as whole [queries, keys] arrays."""
    queries, keys = q.shape[-2], k.shape[-2]
    i, j = torch.arange(queries, device=q.device)[:, None] + keys - queries, torch.arange(keys, device=q.device)
    scores = (q @ k.mT).float() * q.shape[-1] ** -0.5
    return scores.masked_fill((j > i) | (j <= i - window), -torch.inf).softmax(-1).to(v.dtype) @ v


def attend(name: str, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    if name == "naive":
        return naive_attention(q, k, v, window)
    options = dict(causal_alignment="lower_right", local_window_size=(window - 1, 0))
    return scaled_dot_product_attention(q, k, v, is_causal=True, **options)


class Reader(nn.Module):
    """A transformer whose perceptrons, `fast`, are changed by inner steps while it reads."""

    def __init__(self, config: Config, vocabulary: int):
        super().__init__()
        random, width = np.random.default_rng(config.seed), config.width

        def draw(*shape: int, gain: float | None = None) -> nn.Parameter:
            scale = shape[0] ** -0.5 if gain is None else gain
            return nn.Parameter(torch.tensor(scale * random.standard_normal(shape), dtype=torch.float32))

        self.config = config
        self.embedding = draw(vocabulary, width, gain=0.5)
        self.qkv = nn.ParameterList(draw(width, 3 * width) for _ in range(config.depth))
        self.out = nn.ParameterList(draw(width, width, gain=0.5 * width**-0.5) for _ in range(config.depth))
        self.head = draw(width, vocabulary, gain=0.1 * width**-0.5)
        self.log_rate = nn.Parameter(torch.tensor(float(np.log(0.1))))
        self.up = nn.ParameterList(draw(width, 4 * width) for _ in range(config.depth))
        self.down = nn.ParameterList(draw(4 * width, width, gain=0.25 * width**-0.5) for _ in range(config.depth))

    def read(self, fast: list[Tensor], cache: Cache, first: int, tokens: Tensor) -> tuple[Tensor, Cache]:
        """The mean loss of a chunk, [chunk + 1] characters from place `first` on, and the cache for the next."""
        config, kept = self.config, []
        x = self.embedding[tokens[:-1]].to(getattr(torch, config.dtype))
        for i, (past_k, past_v) in enumerate(cache):
            qkv = (norm(x) @ self.qkv[i].to(x.dtype)).unflatten(-1, (3, config.heads, -1)).permute(1, 2, 0, 3)
            q, k, v = rotate(norm(qkv[0]), first), rotate(norm(qkv[1]), first), qkv[2]
            k, v = torch.cat([past_k, k], 1), torch.cat([past_v, v], 1)
            kept.append((k[:, -config.window :], v[:, -config.window :]))
            o = attend(config.attention, q, k, v, config.window)
            x = x + o.transpose(0, 1).flatten(1) @ self.out[i].to(x.dtype)
            up, down = (w.to(x.dtype) for w in fast[2 * i : 2 * i + 2])
            x = x + F.silu(norm(x) @ up) @ down
        logits = (norm(x) @ self.head.to(x.dtype)).float()
        return -logits.log_softmax(-1).gather(1, tokens[1:, None]).mean(), kept

    def read_on(self, tokens: Tensor, adapt: bool = True) -> Tensor:
        """The losses of the chunks of one sequence, each before the inner step on it."""
        config = self.config
        fast = [w for pair in zip(self.up, self.down, strict=True) for w in pair]
        nothing = self.head.new_zeros(config.heads, 0, config.width // config.heads, dtype=getattr(torch, config.dtype))
        cache, losses = [(nothing, nothing)] * config.depth, []
        for first in range(0, len(tokens) - 1, config.chunk):
            inner = grad_and_value(self.read, has_aux=True)
            gradients, (value, cache) = inner(fast, cache, first, tokens[first : first + config.chunk + 1])
            losses.append(value)
            if adapt:
                fast = [w - self.log_rate.exp() * g for w, g in zip(fast, gradients, strict=True)]
        return torch.stack(losses)

    def draw(self, generator: torch.Generator, shape: torch.Size) -> list[Tensor]:
        return []  # no step needs random tensors

    def forward(self, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = vmap(self.read_on)(tokens).mean()
        return loss, {"loss": loss.detach(), "inner_rate": self.log_rate.detach().exp()}


def measure_cost(config: Config, attention: str, window: int, vocabulary: int, device: torch.device):
    """Of one outer gradient, through one inner step, on one sequence of a full window and a chunk."""
    config = dataclasses.replace(config, attention=attention, window=window, chunk=window)
    reader = Reader(config, vocabulary).to(device)
    tokens = torch.arange(2 * window + 1, device=device) % vocabulary
    cuda, times = device.type == "cuda", []
    try:
        for _ in range(1 + config.repeats):
            reader.zero_grad()
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                held = torch.cuda.memory_allocated()
            clock = time.perf_counter()
            reader.read_on(tokens).mean().backward()
            if cuda:
                torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - clock))
    except torch.OutOfMemoryError:
        return None
    mib = (torch.cuda.max_memory_allocated() - held) / 2**20 if cuda else None
    return dict(milliseconds=statistics.median(times[1:]), mib=mib)


def main(config: Config) -> None:
    text, attentions = load_text(), config.attention.split(",")
    config = dataclasses.replace(config, attention=attentions[0])
    with process_device() as device:
        reader, history, steps_per_second = train(
            config,
            Reader(config, text.vocabulary).to(device),
            lambda step: (training_batch(text.train, config.batch, config.length, config.seed, step).astype(np.int64),),
            may_be_done=True,
        )
        held_out = torch.as_tensor(
            spread_batch(text.held_out, config.samples, config.length).astype(np.int64), device=device
        )
        read = lambda adapt: vmap(functools.partial(reader.read_on, adapt=adapt), chunk_size=config.batch)
        with torch.no_grad():
            losses = [read(adapt)(held_out).mean(0).cpu().numpy() for adapt in (True, False)]
        costs: dict[str, dict[int, dict[str, float] | None]] = {}
        for window in map(int, config.timed_windows.split(",")):
            for attention in dict.fromkeys([*attentions, *(["naive"] if config.compare else [])]):
                cost = measure_cost(config, attention, window, text.vocabulary, device)
                costs.setdefault(attention, {})[window] = cost
                print(describe_cost(window, attention, cost), flush=True)
        report(config, history, *losses, costs, steps=config.steps, steps_per_second=steps_per_second, **device_facts())


if __name__ == "__main__":
    main(parse_config(Config, PRESETS))
