"""Forces of metals by a transformer over atoms, in PyTorch: what forces_jax.py explains.

python examples/forces_torch.py                                # minutes on two CPU cores
python examples/forces_torch.py --size wide                    # a GPU: heads of 64 channels
python examples/forces_torch.py --steps 4000 --resume          # go on from the last checkpoint
"""

import dataclasses

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, hessian

from consistency.atoms import CUTOFF, Structures, training_batch
from consistency.config import option, parse_config
from consistency.forces import PRESETS, initialize, prepare, report
from consistency.forces import Config as SharedConfig
from consistency.training_torch import device_facts, process_device, train
from consistency.vibrations import Evaluated
from torch_bridge import scaled_dot_product_attention


@dataclasses.dataclass(frozen=True)
class Config(SharedConfig):
    attention: str = option("auto", "auto (torch_bridge's) or naive")
    output: str = option("output/forces_torch", "folder for pictures, metrics and checkpoints")


def norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def silu(x: Tensor) -> Tensor:
    return x * x.sigmoid()  # PyTorch's own has no forward mode through its gradient, which a Hessian takes


def naive_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """With all scores, as tensors that are written to memory."""
    scores = q @ k.mT * q.shape[-1] ** -0.5 + bias
    seen = torch.arange(k.shape[-2], device=k.device) < lengths[:, None, None, None]
    scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def attend(name: str, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """[B, heads, L, channels], and the log-sum-exp [B, heads, L]."""
    if name == "naive":
        return naive_attention(q, k, v, bias, lengths)
    return scaled_dot_product_attention(q, k, v, bias, key_value_seq_lengths=lengths, return_lse=True)


class Potential(nn.Module):
    """Energies and forces, and the loss of both."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.weights = nn.ParameterDict({name: torch.tensor(w) for name, w in initialize(config).items()})

    def energies(self, positions: Tensor, metals: Tensor, lengths: Tensor, cells: Tensor) -> Tensor:
        """[B] in eV, of what `Structures` describes."""
        config, weights, atoms = self.config, self.weights, metals.shape[1]
        r = positions[:, None] - positions[:, :, None]
        r = r - cells[:, None, None] * torch.round(r / cells[:, None, None])  # to the nearest image
        d = torch.sqrt(r.square().sum(-1) + 1e-2)  # which has derivatives at zero too
        # the weight of a neighbour that leaves the cutoff goes to zero, and two derivatives with it
        fading = 3 * torch.log(F.relu(1 - (d / CUTOFF) ** 2) + 1e-6)
        centres = torch.linspace(0, 1, config.waves, device=d.device, dtype=d.dtype)
        waves = torch.exp(-(((d[..., None] / CUTOFF - centres) * config.waves) ** 2))
        x = weights["metal"][metals]
        for block in range(config.depth):
            w = {name: weights[name][block] for name in ("qkv", "of_query", "of_key", "out", "up", "down")}
            h = norm(x)
            q, k, v = (h @ w["qkv"]).unflatten(-1, (3, config.heads, -1)).permute(2, 0, 3, 1, 4)
            of_query, of_key = ((h @ w[n]).unflatten(-1, (config.waves, -1)) for n in ("of_query", "of_key"))
            bias = torch.einsum("bijw,biwh->bhij", waves, of_query) + torch.einsum("bijw,bjwh->bhij", waves, of_key)
            o, log_sum_exp = attend(config.attention, q, k, v, bias + fading[:, None], lengths)
            x = x + torch.cat([o.transpose(1, 2).flatten(2), log_sum_exp.mT], -1) @ w["out"]
            x = x + silu(norm(x) @ w["up"]) @ w["down"]
        of_atoms = (silu(norm(x) @ weights["hidden"]) @ weights["energy"])[..., 0]
        real = torch.arange(atoms, device=x.device) < lengths[:, None]
        return torch.where(real, of_atoms, 0).sum(1)

    def energies_and_forces(self, positions: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        def total(positions: Tensor) -> tuple[Tensor, Tensor]:
            each = self.energies(positions, *rest)
            return each.sum(), each

        gradient, each = grad(total, has_aux=True)(positions)
        return each, -gradient

    def draw(self, generator: torch.Generator, shape: torch.Size) -> list[Tensor]:
        return []  # no step needs random tensors

    def forward(self, *batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        *structures, energy, force = batch
        lengths = structures[2]
        got_energy, got_force = self.energies_and_forces(*structures)
        force_error = (got_force - force).square().sum() / (3 * lengths.sum())  # padding has none
        energy_error = ((got_energy - energy) / lengths).square().mean()
        loss = force_error + self.config.energy_weight * energy_error
        roots = {"force_error": force_error.detach().sqrt(), "energy_error": energy_error.detach().sqrt()}
        return loss, {"loss": loss.detach(), **roots}


def evaluated(potential: Potential) -> Evaluated:
    device = potential.weights["metal"].device
    tensors = lambda structures: [torch.as_tensor(a, device=device) for a in structures]

    @torch.no_grad()  # of the weights; torch.func differentiates with respect to positions
    def energies_and_forces(structures: Structures) -> tuple[np.ndarray, np.ndarray]:
        energies, forces = potential.energies_and_forces(*tensors(structures))
        return energies.cpu().numpy(), forces.cpu().numpy()

    @torch.no_grad()
    def curvature(structures: Structures) -> np.ndarray:
        positions, *rest = tensors(structures)
        return hessian(lambda one: potential.energies(one[None], *rest)[0])(positions[0]).cpu().numpy()

    return Evaluated(energies_and_forces, curvature)


def main(config: Config) -> None:
    data = prepare(config)
    with process_device() as device:
        potential, history, steps_per_second = train(
            config,
            Potential(config).to(device),
            lambda step: training_batch(data.train, config.batch, config.seed, step),
            may_be_done=True,
        )
        facts = {"steps": config.steps, "steps_per_second": steps_per_second, **device_facts()}
        report(config, data, evaluated(potential), history, **facts)


if __name__ == "__main__":
    main(parse_config(Config, PRESETS))
