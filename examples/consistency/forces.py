"""What the two examples of forces share: configuration, initial weights, simulation, vibrations, pictures and figures."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from ase import Atoms, units
from ase.build import bulk
from ase.calculators.calculator import Calculator, all_changes
from ase.calculators.emt import EMT
from ase.cluster import Icosahedron
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution, Stationary
from ase.md.verlet import VelocityVerlet
from ase.optimize import BFGS

from consistency import atoms as metals
from consistency import plots
from consistency.atoms import METALS, Labelled, PairPotential, Structures, pack
from consistency.config import TrainingConfig, option

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


class Evaluated(NamedTuple):
    """A trained model as functions of arrays, whatever computes them."""

    energies_and_forces: Callable[[Structures], tuple[np.ndarray, np.ndarray]]
    hessian: Callable[[Structures], np.ndarray]  # of one structure, [L, 3, L, 3]


class Learned(Calculator):
    """The model for ASE."""

    implemented_properties = ("energy", "forces")

    def __init__(self, model: Evaluated):
        super().__init__()
        self.model = model

    def calculate(
        self, atoms: Atoms = None, properties: Sequence[str] = ("energy",), system_changes=all_changes
    ) -> None:
        super().calculate(atoms, properties, system_changes)
        (energy,), (forces,) = self.model.energies_and_forces(pack([atoms]))
        self.results = dict(energy=float(energy), forces=forces[: len(atoms)].astype(float))


def force_differences(model: Evaluated, structures: Structures, step: float) -> np.ndarray:
    """[atoms, 3] of the first structure: how its energy falls along each coordinate, by central differences."""
    n = structures.lengths[0]
    first = Structures(*(a[:1] for a in structures))
    moved = Structures(*(np.repeat(a, 6 * n, 0) for a in first))
    shifts = step * np.eye(3 * n).reshape(3 * n, n, 3)
    moved.positions[:, :n] += np.concatenate([shifts, -shifts])
    parts = zip(*(np.array_split(a, n) for a in moved), strict=True)  # six at a time
    ahead, behind = np.concatenate([model.energies_and_forces(Structures(*p))[0] for p in parts]).reshape(2, n, 3)
    return (behind.astype(float) - ahead) / (2 * step)


def hessian_differences(atoms: Atoms, step: float) -> np.ndarray:
    """[3 atoms, 3 atoms] by central differences of the forces of whatever calculator the atoms have."""
    rows = []
    for i, k in np.ndindex(len(atoms), 3):
        pair = []
        for sign in (1, -1):
            moved = atoms.copy()
            moved.calc = atoms.calc
            moved.positions[i, k] += sign * step
            pair.append(moved.get_forces().ravel())
        rows.append((pair[1] - pair[0]) / (2 * step))
    return np.stack(rows)


def frequencies(hessian: np.ndarray, masses: np.ndarray) -> np.ndarray:
    """In THz, in ascending order; of the six motions without vibration about zero. An imaginary one is negative."""
    weights = np.repeat(masses, 3) ** -0.5
    squares = np.linalg.eigvalsh(weights[:, None] * (hessian + hessian.T) / 2 * weights)
    return np.sign(squares) * np.sqrt(np.abs(squares)) / (2 * np.pi) * 1e3 * units.fs


def vibrations(model: Evaluated) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Frequencies of an icosahedron of 13 silver atoms, relaxed by the model and, for comparison, by the potential it learned."""
    found = {}
    for name, calculator in (("model", Learned(model)), ("EMT", EMT())):
        atoms = Icosahedron("Ag", 2, METALS["Ag"])
        atoms.calc = calculator
        BFGS(atoms, logfile=None).run(fmax=2e-3, steps=200)
        quotients = hessian_differences(atoms, 0.02)
        found[f"{name}, differences of forces"] = quotients
        if name == "model":
            n = len(atoms)
            exact = model.hessian(pack([atoms]))[:n, :, :n].reshape(3 * n, 3 * n)
            found["model, Hessian"] = exact
            error = np.linalg.norm(quotients - exact) / np.linalg.norm(exact)
    masses = atoms.get_masses()
    modes = {name: frequencies(hessian, masses) for name, hessian in found.items()}
    vibrating = lambda name: modes[name][6:]
    worst = np.abs(vibrating("model, Hessian") - vibrating("EMT, differences of forces"))
    return modes, dict(hessian_error=float(error), frequency_error_thz=float(worst.mean()))


def simulate(model: Evaluated, config: Config) -> tuple[np.ndarray, dict[str, float]]:
    """[steps, 3] of time in ps, kinetic and total energy in meV per atom, of a periodic cell of an alloy at about 300 K."""
    random = np.random.default_rng(config.seed)
    atoms = bulk("Ag", "fcc", METALS["Ag"], cubic=True).repeat(2)
    atoms.symbols = random.choice(["Ag", "Au"], len(atoms))
    MaxwellBoltzmannDistribution(atoms, temperature_K=600, rng=random)  # half of it becomes potential energy
    Stationary(atoms)
    atoms.calc = Learned(model)
    trajectory = []

    def note() -> None:
        kinetic, n = atoms.get_kinetic_energy(), len(atoms)
        picoseconds = 1e-3 * config.time_step * len(trajectory)
        trajectory.append((picoseconds, 1e3 * kinetic / n, 1e3 * (kinetic + atoms.get_potential_energy()) / n))

    integrator = VelocityVerlet(atoms, timestep=config.time_step * units.fs)
    integrator.attach(note)
    integrator.run(config.time_steps)
    path = np.array(trajectory)
    (slope, _), spread = np.polyfit(path[:, 0], path[:, 2], 1), path[:, 2].std()
    temperature = path[len(path) // 4 :, 1].mean() * 1e-3 / (1.5 * units.kB)
    return path, dict(
        drift_mev_per_atom_per_ps=float(slope), total_deviation_mev_per_atom=float(spread),
        kinetic_deviation_mev_per_atom=float(path[:, 1].std()), temperature_kelvin=float(temperature),
    )  # fmt: skip


def root_mean_square(errors: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(errors, dtype=float))))


class Data(NamedTuple):
    train: Labelled
    held_out: Labelled
    zero: float  # error of the force zero, in eV/Å
    pairs: float  # error of the pair potential


def prepare(config: Config) -> Data:
    """Structures of both kinds, with energies relative to single atoms; and what the model is compared with."""
    train, held_out = metals.load(config.structures, config.seed), metals.load(config.samples, config.seed + 1)
    real = held_out.structures.real
    missed = (PairPotential(train).forces(held_out.structures) - held_out.forces)[real]
    offsets = metals.atomic_offsets(train)
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
    trajectory, motion = simulate(model, config)
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
