"""Mean flows for one-step generation (Geng et al. 2025, arXiv:2505.13447) on handwritten digits, in PyTorch.

    python examples/meanflow_torch.py                                  # a few minutes on two CPU cores
    python examples/meanflow_torch.py --size mosaic --compare          # 4,096 tokens: flash against naive attention
    python examples/meanflow_torch.py --steps 4000 --resume            # go on from the last checkpoint
    torchrun --nproc_per_node 4 examples/meanflow_torch.py --size mosaic --batch 64    # four GPUs

A network u(z, r, t) learns the *average* velocity of a flow between the times r < t, so that one evaluation crosses
the whole way from noise to data. Its training target needs the derivative of u along the flow, du/dt = v ∂u/∂z + ∂u/∂t:
one Jacobian-vector product through the network, attention included, in every training step. It is taken inside
`forward`, so that DistributedDataParallel and torch.compile see one ordinary call. On a GPU the step is compiled, and replayed
as CUDA graphs. meanflow_jax.py is the same in JAX.
"""

import dataclasses
import sys

import torch
from torch import Tensor, nn

from consistency.compare import compare
from consistency.config import option, parse_config
from consistency.data import load_digits, training_batch
from consistency.models_torch import DiffusionTransformer
from consistency.report import report
from consistency.sampling import generate
from consistency.training_torch import (
    TorchConfig,
    device_facts,
    numpy_sampler,
    process_device,
    rank_and_processes,
    train,
)
from torch_bridge import patch


@dataclasses.dataclass(frozen=True)
class Config(TorchConfig):
    output: str = option("output/meanflow_torch", "folder for pictures, metrics and checkpoints")
    time_mean: float = option(-0.4, "mean of the normal distribution whose sigmoid gives r and t")
    time_deviation: float = option(1.0, "its standard deviation")
    equal_times: float = option(0.75, "share of samples with r = t, where u is the instantaneous velocity")
    loss_power: float = option(1.0, "p of the adaptive weight 1 / (squared error + c)^p")
    loss_constant: float = option(1e-3, "c of the adaptive weight")
    compile: bool = option(torch.cuda.is_available(), "compile the training step, on a GPU with CUDA graphs")


PRESETS = {
    "digits": {},
    # 4,096 tokens with heads of 64 channels
    "mosaic": dict(
        mosaic=16, width=384, depth=6, heads=6, dtype="bfloat16", batch=16, steps=600, learning_rate=1e-3, samples=4096
    ),
}


class MeanFlow(nn.Module):
    """Linear paths z_t = (1 − t) x + t e from data x at t = 0 to noise e at t = 1, with velocity v = e − x."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.network = DiffusionTransformer(config, times=2)

    def average_velocity(self, z: Tensor, r: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        """u(z, r, t) = 1 / (t − r) ∫ v dτ from r to t, and v itself where r = t."""
        return self.network(z, (t, t - r), labels)

    def draw(self, generator: torch.Generator, shape: torch.Size) -> tuple[Tensor, Tensor, Tensor]:
        """Noise e, and times r ≤ t, both logit-normal; r = t for the first `equal_times` of the batch, rounded down."""
        config, options = self.config, dict(generator=generator, device=generator.device)
        e = torch.randn(shape, **options)
        times = torch.sigmoid(config.time_mean + config.time_deviation * torch.randn(2, shape[0], **options))
        r, t = times.amin(0), times.amax(0)
        equal = torch.arange(shape[0], device=t.device) < int(config.equal_times * shape[0])
        return e, torch.where(equal, t, r), t

    def forward(self, x: Tensor, labels: Tensor, e: Tensor, r: Tensor, t: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Algorithm 1: the identity u = v − (t − r) du/dt (Eq. 6) as a regression on its own right-hand side."""
        z = _expand(1 - t) * x + _expand(t) * e
        v = e - x

        def u_fn(z: Tensor, r: Tensor, t: Tensor) -> Tensor:
            return self.average_velocity(z, r, t, labels)

        u, du_dt = torch.func.jvp(u_fn, (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))
        du_dt = du_dt.detach()
        u_target = v - _expand(t - r) * du_dt

        squared_error = (u - u_target).square().sum((1, 2, 3))
        of_samples = torch.stack(
            [squared_error.detach(), du_dt.square().sum((1, 2, 3)), torch.full_like(t, x[0].numel())]
        )
        whole_error, tangent, pixels = self.of_all_processes(of_samples)
        weight = (whole_error + self.config.loss_constant) ** -self.config.loss_power
        metrics = {
            # unweighted: the weighted loss is about 1 throughout
            "loss": (whole_error / pixels).mean(),
            "tangent_norm": (tangent / pixels).sqrt().mean(),
        }
        return (weight * squared_error).mean(), metrics

    def of_all_processes(self, of_samples: Tensor) -> Tensor:
        """Sums over a sample of which each process has a part: here each sample is in one process."""
        return of_samples

    def sample(self, noise: Tensor, labels: Tensor, steps: int) -> Tensor:
        """Algorithm 2, in `steps` equal strides: z_r = z_t − (t − r) u(z_t, r, t) from t = 1 to 0."""
        z = noise
        for index in range(steps):
            t = torch.full_like(z[:, 0, 0, 0], 1 - index / steps)
            r = torch.full_like(t, 1 - (index + 1) / steps)
            z = z - _expand(t - r) * self.average_velocity(z, r, t, labels)
        return z


def main(config: Config) -> None:
    digits, _ = load_digits()
    with process_device() as device, patch():  # linear layers and norms with their tangents written out
        torch.manual_seed(config.seed)
        method, history, steps_per_second = train(
            config,
            MeanFlow(config).to(device),
            lambda step: training_batch(digits, config.batch, config.mosaic, config.seed, step),
        )
        facts = device_facts()  # before sampling, which is not what is compared
        rank, processes = rank_and_processes()
        if rank == 0:
            samples = generate(numpy_sampler(method), config)
            curves = {"loss": "squared error per pixel", "tangent_norm": "root mean square of du/dt"}
            speed = {"steps": config.steps, "steps_per_second": steps_per_second, "processes": processes}
            report(config, "MeanFlow", samples, history, curves, **speed, **facts)


def _expand(time: Tensor) -> Tensor:
    return time[:, None, None, None]


if __name__ == "__main__":
    config = parse_config(Config, PRESETS)
    if config.compare or "," in config.attention:
        sys.exit(compare(config))
    main(config)
