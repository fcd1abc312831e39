"""What a learned potential says of atoms in motion: vibrations of a cluster, by its Hessian, and a simulation by ASE."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from ase import Atoms, units
from ase.build import bulk
from ase.calculators.calculator import Calculator, all_changes
from ase.calculators.emt import EMT
from ase.cluster import Icosahedron
from ase.md.verlet import VelocityVerlet
from ase.optimize import BFGS

from consistency.atoms import METALS, Structures, pack


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
        self, atoms: Atoms | None = None, properties: Sequence[str] = ("energy",), system_changes=all_changes
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
    hessians = {}
    for name, calculator in (("EMT", EMT()), ("model", Learned(model))):
        atoms = Icosahedron("Ag", 2, METALS["Ag"])
        atoms.calc = calculator
        BFGS(atoms, logfile=None).run(fmax=2e-3, steps=200)
        hessians[f"{name}, differences of forces"] = hessian_differences(atoms, 0.02)
    n = len(atoms)
    hessians["model, Hessian"] = model.hessian(pack([atoms]))[:n, :, :n].reshape(3 * n, 3 * n)
    modes = {name: frequencies(hessian, atoms.get_masses()) for name, hessian in hessians.items()}
    _, quotients, exact = hessians.values()
    missed = modes["model, Hessian"][6:] - modes["EMT, differences of forces"][6:]
    return modes, dict(
        hessian_error=float(np.linalg.norm(quotients - exact) / np.linalg.norm(exact)),
        frequency_error_thz=float(np.abs(missed).mean()),
    )


def simulate(model: Evaluated, time_step: float, steps: int, seed: int) -> tuple[np.ndarray, dict[str, float]]:
    """[steps, 3] of time in ps, kinetic and total energy in meV per atom, of a periodic cell of an alloy at about 300 K."""
    random = np.random.default_rng(seed)
    atoms = bulk("Ag", "fcc", METALS["Ag"], cubic=True).repeat(2)
    atoms.symbols = random.choice(["Ag", "Au"], len(atoms))
    # twice the temperature, half of which becomes potential energy; and no motion of the whole
    momenta = np.sqrt(600 * units.kB * atoms.get_masses()[:, None]) * random.standard_normal((len(atoms), 3))
    atoms.set_momenta(momenta - momenta.mean(0))
    atoms.calc = Learned(model)
    trajectory = []

    def note() -> None:
        kinetic, n = atoms.get_kinetic_energy(), len(atoms)
        picoseconds = 1e-3 * time_step * len(trajectory)
        trajectory.append((picoseconds, 1e3 * kinetic / n, 1e3 * (kinetic + atoms.get_potential_energy()) / n))

    integrator = VelocityVerlet(atoms, timestep=time_step * units.fs)
    integrator.attach(note)
    integrator.run(steps)
    path = np.array(trajectory)
    (slope, _), spread = np.polyfit(path[:, 0], path[:, 2], 1), path[:, 2].std()
    temperature = path[len(path) // 4 :, 1].mean() * 1e-3 / (1.5 * units.kB)
    return path, dict(
        drift_mev_per_atom_per_ps=float(slope), total_deviation_mev_per_atom=float(spread),
        kinetic_deviation_mev_per_atom=float(path[:, 1].std()), temperature_kelvin=float(temperature),
    )  # fmt: skip
