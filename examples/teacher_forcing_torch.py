"""A generator of films, frame after frame, each in one step: mean flows (arXiv:2505.13447) under teacher forcing, in PyTorch.

    python examples/teacher_forcing_torch.py                           # two minutes on two CPU cores
    python examples/teacher_forcing_torch.py --steps 2000 --resume     # go on from the last checkpoint

The films are handwritten digits that count. In training clean frames and noisy ones stand in one sequence, in which a noisy
frame sees itself and the clean frames before it, so that one pass through the network trains all frames: `key_ranges` says who
sees whom, without a mask. teacher_forcing_jax.py is the same in JAX.
"""

import dataclasses

import torch
from torch import Tensor, nn

from consistency.config import option, parse_config
from consistency.data import load_digits
from consistency.frames import film_batch, generate, report
from consistency.models_torch import FrameTransformer
from consistency.training_torch import (
    TorchConfig,
    device_facts,
    numpy_sampler,
    process_device,
    rank_and_processes,
    train,
)


@dataclasses.dataclass(frozen=True)
class Config(TorchConfig):
    output: str = option("output/teacher_forcing_torch", "folder for pictures, metrics and checkpoints")
    frames: int = option(3, "of a film")
    steps: int = option(400, "training steps")
    batch: int = option(32, "films per training step")
    unit = "films"
    equal_times: float = option(0.75, "share of films with r = t, where u is the instantaneous velocity")


PRESETS: dict[str, dict] = {"digits": {}}


class MeanFlow(nn.Module):
    """Paths z_t = (1 − t) x + t e from frames x at t = 0 to noise e at t = 1, with times of their own for each frame."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.network = FrameTransformer(config, config.frames, times=2)

    def average_velocity(self, clean: Tensor, z: Tensor, r: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        return self.network(clean, z, (t, t - r), labels)

    def draw(self, generator: torch.Generator, shape: torch.Size) -> tuple[Tensor, Tensor, Tensor]:
        """Noise e, and times r ≤ t, both logit-normal; r = t for the first `equal_times` of the batch, rounded down."""
        options = dict(generator=generator, device=generator.device)
        e = torch.randn(shape, **options)
        first, second = torch.sigmoid(-0.4 + torch.randn(2, *shape[:2], **options))
        r, t = torch.minimum(first, second), torch.maximum(first, second)
        equal = torch.arange(shape[0], device=t.device)[:, None] < int(self.config.equal_times * shape[0])
        return e, torch.where(equal, t, r), t

    def forward(self, x: Tensor, labels: Tensor, e: Tensor, r: Tensor, t: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        z, v = _expand(1 - t) * x + _expand(t) * e, e - x

        def u_fn(z: Tensor, r: Tensor, t: Tensor) -> Tensor:
            return self.average_velocity(x, z, r, t, labels)  # the clean frames do not move

        u, du_dt = torch.func.jvp(u_fn, (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))
        du_dt = du_dt.detach()
        squared_error = (u - (v - _expand(t - r) * du_dt)).square().sum((2, 3, 4))
        weight = 1 / (squared_error.detach() + 1e-3)
        metrics = {
            # unweighted: the weighted loss is about 1 throughout
            "loss": squared_error.detach().mean() / x[0, 0].numel(),
            "tangent_norm": du_dt.square().mean((2, 3, 4)).sqrt().mean(),
        }
        return (weight * squared_error).mean(), metrics

    def sample(self, noise: Tensor, labels: Tensor, steps: int) -> Tensor:
        """Frame by frame, each from its noise in so many strides."""
        film = torch.zeros_like(noise)  # frames that are not finished nobody sees
        for frame in range(self.config.frames):
            z = noise
            for index in range(steps):
                t, r = (noise.new_full(noise.shape[:2], 1 - i / steps) for i in (index, index + 1))
                z = z - _expand(t - r) * self.average_velocity(film, z, r, t, labels)
            film[:, frame] = z[:, frame]
        return film


def main(config: Config) -> None:
    digits, _ = load_digits()
    with process_device() as device:
        torch.manual_seed(config.seed)
        method, history, steps_per_second = train(
            config,
            MeanFlow(config).to(device),
            lambda step: film_batch(digits, config.batch, config.frames, config.seed, step),
        )
        rank, processes = rank_and_processes()
        if rank == 0:
            facts = device_facts() | {
                "steps": config.steps,
                "steps_per_second": steps_per_second,
                "processes": processes,
            }
            samples = generate(numpy_sampler(method), config, config.frames)
            curves = {"loss": "squared error per pixel", "tangent_norm": "root mean square of du/dt"}
            report(config, "Teacher forcing:", samples, history, curves, **facts)


def _expand(time: Tensor) -> Tensor:
    return time[:, :, None, None, None]


if __name__ == "__main__":
    main(parse_config(Config, PRESETS))
