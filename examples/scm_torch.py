"""Continuous-time consistency models (sCM; Lu and Song 2024, arXiv:2410.11081) on handwritten digits, in PyTorch.

    python examples/scm_torch.py                                       # a few minutes on two CPU cores
    python examples/scm_torch.py --size mosaic --compare               # 4,096 tokens: flash against naive attention
    python examples/scm_torch.py --steps 4000 --resume                 # go on from the last checkpoint
    torchrun --nproc_per_node 4 examples/scm_torch.py --size mosaic --batch 64    # four GPUs

A consistency model f(x, t) maps every point of a path from data to noise to the path's data end, so that one evaluation
generates. In continuous time it is trained on df/dt = 0 along the path: one Jacobian-vector product through the network,
attention included, in every training step. It is taken inside `forward`, so that DistributedDataParallel and
torch.compile see one ordinary call. scm_jax.py is the same in JAX.

This is consistency training by Algorithm 1. As in the paper it starts on the weights of a diffusion model, which the
first `diffusion_steps` train, and keeps stable by TrigFlow, a time embedding of low frequencies, normalized tangents and
their warm-up. The momentum is small, because g is not the gradient of any function, and overshoots. There is no adaptive
weighting: with normalized tangents the loss is about the same at all times already.
"""

import dataclasses
import math
import sys

import numpy as np
import torch
from torch import Tensor, nn

from consistency.compare import compare
from consistency.config import option, parse_config
from consistency.data import Digits, load_digits, training_batch
from consistency.loop import begin_afresh
from consistency.models_torch import DiffusionTransformer
from consistency.report import report
from consistency.sampling import generate
from consistency.training_torch import (
    Checkpoints,
    TorchConfig,
    device_facts,
    numpy_sampler,
    process_device,
    rank_and_processes,
    train,
)


@dataclasses.dataclass(frozen=True)
class Config(TorchConfig):
    output: str = option("output/scm_torch", "folder for pictures, metrics and checkpoints")
    steps: int = option(800, "training steps of the consistency model")
    learning_rate: float = option(5e-4, "of AdamW, after the warm-up")
    beta1: float = option(0.5, "AdamW's decay of the momentum; with more of it the tangents oscillate")
    beta2: float = option(0.99, "AdamW's decay of the second moment")
    diffusion_steps: int = option(1200, "training steps of the diffusion model, before the others")
    diffusion_learning_rate: float = option(2e-3, "their learning rate")
    tangent_warmup_steps: int = option(300, "steps in which r, the share of the tangent that is dF/dt, rises to 1")
    tangent_constant: float = option(0.1, "c of the normalized tangent g / (‖g‖ + c)")
    time_mean: float = option(-0.4, "mean of the normal distribution of log(σ_d tan t)")
    time_deviation: float = option(1.2, "its standard deviation")


PRESETS = {
    "digits": {},
    # 4,096 tokens with heads of 64 channels
    "mosaic": dict(mosaic=16, width=384, depth=6, heads=6, dtype="bfloat16", batch=16, samples=4096)
    | dict(steps=600, diffusion_steps=600, diffusion_learning_rate=1e-3),
}


class DiffusionModel(nn.Module):
    """TrigFlow: x_t = cos(t) x + sin(t) z from data x at t = 0 to noise z at t = π/2, both of deviation σ_d."""

    def __init__(self, config: Config, data_deviation: float):
        super().__init__()
        self.config = config
        self.data_deviation = data_deviation
        self.network = DiffusionTransformer(config, times=1)

    def velocity(self, x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        """F, the velocity dx_t/dt in units of σ_d, from x_t in these units.

        Of t / 8 the highest frequency that is embedded is 1: beyond, dF/dt outgrows F, and training diverges.
        """
        return self.network(x, (t / 8,), labels)

    def draw(self, generator: torch.Generator, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Noise z, and times t with log-normal σ_d tan t, the noise level of other parametrizations."""
        config, options = self.config, dict(generator=generator, device=generator.device)
        z = self.data_deviation * torch.randn(shape, **options)
        noise_level = torch.exp(config.time_mean + config.time_deviation * torch.randn(shape[0], **options))
        return z, torch.arctan(noise_level / self.data_deviation)

    def forward(self, x: Tensor, labels: Tensor, z: Tensor, t: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean square of σ_d F(x_t / σ_d, t) − dx_t/dt."""
        sigma, cos, sin = self.data_deviation, _expand(torch.cos(t)), _expand(torch.sin(t))
        x_t, dx_dt = cos * x + sin * z, cos * z - sin * x
        loss = (sigma * self.velocity(x_t / sigma, t, labels) - dx_dt).square().mean()
        return loss, {"loss": loss.detach()}


class ConsistencyModel(DiffusionModel):
    """f(x_t, t) = cos(t) x_t − sin(t) σ_d F(x_t / σ_d, t), which is x_t at t = 0."""

    def denoise(self, x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        sigma, cos, sin = self.data_deviation, _expand(torch.cos(t)), _expand(torch.sin(t))
        return cos * x_t - sin * sigma * self.velocity(x_t / sigma, t, labels)

    def forward(self, x: Tensor, labels: Tensor, r: Tensor, z: Tensor, t: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Algorithm 1: F moves along g = −cos²(t) (σ_d F − dx_t/dt) − r cos(t) sin(t) (x_t + σ_d dF/dt), normalized."""
        sigma, cos, sin = self.data_deviation, _expand(torch.cos(t)), _expand(torch.sin(t))
        x_t, dx_dt = cos * x + sin * z, cos * z - sin * x

        def network_fn(x: Tensor, t: Tensor) -> Tensor:
            return self.velocity(x, t, labels)

        # cos(t) sin(t) goes in before the network, not after it, so that tangents stay small in low precision.
        tangents = cos * sin * dx_dt / sigma, torch.cos(t) * torch.sin(t)
        F, scaled_dF = torch.func.jvp(network_fn, (x_t / sigma, t), tangents)
        F_fixed, scaled_dF = F.detach(), scaled_dF.detach()
        g = -(cos**2) * (sigma * F_fixed - dx_dt) - _expand(r) * (cos * sin * x_t + sigma * scaled_dF)
        norm = g.square().sum((1, 2, 3), keepdim=True).sqrt()
        target = F_fixed + g / (norm + self.config.tangent_constant)

        # The loss itself is about 1 / pixels throughout.
        metrics = {"loss": g.square().mean(), "tangent_norm": scaled_dF.square().mean((1, 2, 3)).sqrt().mean()}
        return (F - target).square().mean(), metrics

    def sample(self, noise: Tensor, labels: Tensor, steps: int) -> Tensor:
        """From noise to data in one evaluation; then back to less and less noise, and to data again."""
        x = torch.zeros_like(noise)
        for index in range(steps):
            t = torch.full_like(x[:, 0, 0, 0], math.pi / 2 * (1 - index / steps))
            z = noise.roll(index, 0)  # new noise for each image: what another one started from
            x_t = _expand(torch.cos(t)) * x + _expand(torch.sin(t)) * self.data_deviation * z
            x = self.denoise(x_t, t, labels)
        return x


def main(config: Config) -> None:
    digits, _ = load_digits()
    with process_device() as device:
        torch.manual_seed(config.seed)
        method = ConsistencyModel(config, float(digits.images.std())).to(device)
        if not Checkpoints(begin_afresh(config), {}):
            method.load_state_dict(train_diffusion(config, device, digits).state_dict())  # or what is left of it
            config = dataclasses.replace(config, resume=False)

        def make_batch(step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            r = min(1, step / config.tangent_warmup_steps) if config.tangent_warmup_steps else 1
            batch = training_batch(digits, config.batch, config.mosaic, config.seed, step)
            return *batch, np.full(config.batch, r, np.float32)

        method, history, steps_per_second = train(config, method, make_batch)
        facts = device_facts()  # before sampling, which is not what is compared
        rank, processes = rank_and_processes()
        if rank == 0:
            samples = generate(numpy_sampler(method), config)
            curves = {"loss": "squared tangent g per pixel", "tangent_norm": "root mean square of cos t sin t dF/dt"}
            speed = {"steps": config.steps, "steps_per_second": steps_per_second, "processes": processes}
            report(config, "Consistency model", samples, history, curves, **speed, **facts)


def train_diffusion(config: Config, device: torch.device, digits: Digits) -> nn.Module:
    """A diffusion model with averaged weights."""
    config = dataclasses.replace(
        config,
        steps=config.diffusion_steps,
        learning_rate=config.diffusion_learning_rate,
        output=f"{config.output}/diffusion",
    )
    model = DiffusionModel(config, float(digits.images.std())).to(device)
    model, _, _ = train(
        config,
        model,
        lambda step: training_batch(digits, config.batch, config.mosaic, config.seed, step),
        may_be_done=True,
    )
    return model


def _expand(time: Tensor) -> Tensor:
    return time[:, None, None, None]


if __name__ == "__main__":
    config = parse_config(Config, PRESETS)
    if config.compare or "," in config.attention:
        sys.exit(compare(config))
    main(config)
