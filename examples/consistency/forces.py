"""What the two examples of forces share: configuration, initial weights, pictures and figures."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np

from consistency import atoms, plots
from consistency.atoms import METALS, Labelled, PairPotential, Structures
from consistency.config import TrainingConfig, option
from consistency.vibrations import Evaluated, force_differences, simulate, vibrations

PRESETS = {
    "metals": {},
    # a GPU: heads of 64 channels
    "wide": dict(width=256, depth=4, batch=128, structures=8192, steps=8000, learning_rate=1e-3),
}


@dataclasses.dataclass(frozen=True)
class Config(TrainingConfig):
    size: str = option("metals", "preset that the other options start from")
    attention: str = option("auto", "auto or naive")
    steps: int = option(2000, "training steps")
    batch: int = option(16, "structures per training step")
    learning_rate: float = option(2e-3, "of AdamW, after the warm-up")
    checkpoint_every: int = option(500, "steps between two checkpoints; one is always written at the end")
    width: int = option(48, "channels of the transformer")
    depth: int = option(2, "blocks of the transformer")
    heads: int = option(4, "attention heads")
    waves: int = option(12, "functions of the distance that biases are made of")
    structures: int = option(1024, "clusters and cells to train on")
    samples: int = option(128, "held-out ones that the figures are measured on")
    energy_weight: float = option(
        1.0, "of the squared error of an atom's energy, in eV, beside that of its force, in eV/Å"
    )
    time_step: float = option(4.0, "of the simulation, in femtoseconds")
    time_steps: int = option(1000, "of the simulation")
    compile = False  # no option: a compiled backward has no second derivative


def initialize(config: Config) -> dict[str, np.ndarray]:
    """The weights of both frameworks, by name; those of the blocks have an axis of blocks in front."""
    random, width, depth = np.random.default_rng(config.seed), config.width, config.depth

    def draw(*shape: int, gain: float = 1.0) -> np.ndarray:
        return (gain * shape[-2] ** -0.5 * random.standard_normal(shape)).astype(np.float32)

    return dict(
        metal=draw(len(METALS), width, gain=len(METALS) ** 0.5),
        qkv=draw(depth, width, 3 * width),
        of_query=draw(depth, width, config.waves * config.heads),
        of_key=draw(depth, width, config.waves * config.heads),
        out=draw(depth, width + config.heads, width, gain=0.5),
        up=draw(depth, width, 2 * width),
        down=draw(depth, 2 * width, width, gain=0.5),
        hidden=draw(width, width),
        energy=draw(width, 1, gain=0.5),
    )


def root_mean_square(errors: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(errors, dtype=float))))


class Data(NamedTuple):
    train: Labelled
    held_out: Labelled
    zero: float  # error of the force zero, in eV/Å
    pairs: float  # error of the pair potential


def prepare(config: Config) -> Data:
    """Structures of both kinds, with energies relative to single atoms; and what the model is compared with."""
    train, held_out = atoms.load(config.structures, config.seed), atoms.load(config.samples, config.seed + 1)
    real = held_out.structures.real
    missed = (PairPotential(train).forces(held_out.structures) - held_out.forces)[real]
    offsets = atoms.atomic_offsets(train)
    errors = root_mean_square(held_out.forces[real]), root_mean_square(missed)
    return Data(train.shifted(offsets), held_out.shifted(offsets), *errors)


def held_out_error(model: Evaluated, data: Labelled, batch: int) -> tuple[np.ndarray, dict[str, float]]:
    """Forces of real atoms, and the errors of forces and of energies per atom."""
    every, forces, energies = np.arange(len(data.energies)), [], []
    for first in range(0, len(every), batch):
        part = Structures(*(a[first : first + batch] for a in data.structures))
        energy, force = model.energies_and_forces(part)
        energies.append(energy)
        forces.append(force)
    forces, energies = np.concatenate(forces), np.concatenate(energies)
    real = data.structures.real
    return forces[real], dict(
        force_error=root_mean_square(forces[real] - data.forces[real]),
        energy_error=root_mean_square((energies - data.energies) / data.structures.lengths),
    )


def draw_learning(path: Path, predicted: np.ndarray, data: Data, history: Sequence[Mapping[str, float]]) -> None:
    """Parity of forces, and their errors while the model learned."""
    figure, axes = plt.subplots(1, 2, figsize=(10.4, 4.2))
    exact = data.held_out.forces[data.held_out.structures.real]
    limit, missed = np.abs(exact).max(), root_mean_square(predicted - exact)
    axes[0].plot([-limit, limit], [-limit, limit], color="#c8553d", linewidth=1)
    axes[0].plot(exact.ravel(), predicted.ravel(), ".", color=plots.INK, markersize=2, alpha=0.4)
    axes[0].set_ylabel("model, eV/Å")
    plots.label_axes(axes[0], "EMT, eV/Å", "force components on held-out structures")
    steps, errors = (np.array([entry[name] for entry in history]) for name in ("step", "force_error"))
    half = max(1, len(steps) // 100)
    smooth = [np.median(errors[max(0, i - half) : i + half + 1]) for i in range(len(steps))]
    axes[1].plot(steps, errors, color=plots.INK, alpha=0.25, linewidth=0.8)
    axes[1].plot(steps, smooth, color=plots.INK, label="training batches")
    lines = {
        "zero, held out": (data.zero, ":"),
        "pair potential, held out": (data.pairs, "--"),
        "model, held out": (missed, "-"),
    }
    for name, (error, style) in lines.items():
        axes[1].axhline(error, color="#c8553d", linestyle=style, linewidth=1.2, label=name)
    axes[1].set_yscale("log")
    axes[1].legend(loc="upper right")
    plots.label_axes(axes[1], "step", "root mean square error of forces, eV/Å")
    plots.save(figure, "Learned forces", path)


def draw_physics(path: Path, modes: Mapping[str, np.ndarray], trajectory: np.ndarray) -> None:
    """Frequencies of the cluster, and energies in the simulation."""
    figure, axes = plt.subplots(1, 3, figsize=(14.4, 4.2))
    styles = {
        "EMT, differences of forces": ("_", "#c8553d", 14),
        "model, differences of forces": ("o", "#8fa9c4", 7),
        "model, Hessian": (".", plots.INK, 5),
    }
    for name, (marker, color, size) in styles.items():
        axes[0].plot(np.arange(1, len(modes[name]) + 1), modes[name], marker, color=color, markersize=size, label=name)
    axes[0].legend(frameon=False)
    plots.label_axes(axes[0], "mode", "frequencies of Ag13, THz")
    time, kinetic, total = trajectory.T
    axes[1].plot(time, kinetic, color=plots.INK, linewidth=1)
    plots.label_axes(axes[1], "picoseconds", "kinetic energy, meV per atom")
    axes[2].plot(time, total - total.mean(), color=plots.INK, linewidth=1)
    axes[2].set_ylim(-0.01 * kinetic.mean(), 0.01 * kinetic.mean())
    plots.label_axes(axes[2], "picoseconds", "total energy less its mean, ±1% of the kinetic energy")
    plots.save(figure, "Vibrations and motion", path)


def report(config: Config, data: Data, model: Evaluated, history: Sequence[Mapping[str, float]], **facts: Any) -> None:
    """Measures the trained model, draws forces.png, physics.png and curves.png, and prints the figures."""
    output = Path(config.output)
    predicted, figures = held_out_error(model, data.held_out, config.batch)
    quotients = force_differences(model, data.held_out.structures, 0.02)
    own = model.energies_and_forces(Structures(*(a[:1] for a in data.held_out.structures)))[1][0][: len(quotients)]
    figures |= dict(zero=data.zero, pair_potential=data.pairs)
    figures["force_from_energy"] = root_mean_square(own - quotients) / root_mean_square(own)
    modes, vibration = vibrations(model)
    trajectory, motion = simulate(model, config.time_step, config.time_steps, config.seed)
    figures |= vibration | motion
    draw_learning(output / "forces.png", predicted, data, history)
    draw_physics(output / "physics.png", modes, trajectory)
    thz = {name: values.tolist() for name, values in modes.items()}
    metrics = {"config": dataclasses.asdict(config), "figures": figures, "frequencies_thz": thz, **facts}
    (output / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    print(
        f"forces: error {figures['force_error']:.3f} eV/Å; a pair potential {data.pairs:.3f}, zero {data.zero:.3f}\n"
        f"energies: error {1e3 * figures['energy_error']:.1f} meV per atom\n"
        f"forces and differences of energies differ by {figures['force_from_energy']:.1e}\n"
        f"Hessian and differences of forces differ by {figures['hessian_error']:.1e}; "
        f"frequencies are off by {figures['frequency_error_thz']:.2f} THz\n"
        f"total energy drifts by {figures['drift_mev_per_atom_per_ps']:+.1e} meV per atom and picosecond "
        f"at {figures['temperature_kelvin']:.0f} K\n"
        f"pictures and metrics.json are in {output}"
    )
