"""Clusters and periodic cells of three metals, with energies and forces of ASE's effective-medium potential: made in seconds."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from ase import Atoms
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.cluster import Icosahedron

METALS = {"Pd": 3.89, "Ag": 4.09, "Au": 4.08}  # lattice constants, in Å
CUTOFF = 3.75  # Å: beyond nearest neighbours, and below half of the smallest cell, so that a pair is one pair of images
NO_CELL = 1000.0  # Å: a cluster's box, whose images are out of reach
SMALLEST, CELL = 8, 32  # atoms of the smallest cluster, and of a periodic cell, which is also the largest cluster


class Structures(NamedTuple):
    """Padded to the same number of atoms L."""

    positions: np.ndarray  # [B, L, 3] in Å
    metals: np.ndarray  # [B, L], indices into METALS
    lengths: np.ndarray  # [B] atoms, that is without padding
    cells: np.ndarray  # [B, 3] edges in Å

    @property
    def real(self) -> np.ndarray:
        """[B, L], False for padding."""
        return np.arange(self.positions.shape[1]) < self.lengths[:, None]


class Labelled(NamedTuple):
    structures: Structures
    energies: np.ndarray  # [B] in eV
    forces: np.ndarray  # [B, L, 3] in eV/Å

    def pick(self, indices: np.ndarray) -> tuple[np.ndarray, ...]:
        """The arrays of a batch, one after the other."""
        return tuple(a[indices] for a in (*self.structures, self.energies, self.forces))

    def shifted(self, offsets: np.ndarray) -> "Labelled":
        """With energies relative to single atoms, of which each metal has an energy of its own."""
        return self._replace(energies=(self.energies - counts(self.structures) @ offsets).astype(np.float32))


def draw_atoms(random: np.random.Generator) -> Atoms:
    """An alloy of random composition, strained and rattled: a periodic cell, or a piece of a crystal or an icosahedron."""
    shares = random.dirichlet(np.full(len(METALS), 0.5))
    constant = shares @ np.array([*METALS.values()]) * random.uniform(0.97, 1.04)
    kind = random.integers(3)
    if kind == 0:
        atoms = bulk("Ag", "fcc", constant, cubic=True).repeat(2)
    else:
        whole = bulk("Ag", "fcc", constant, cubic=True).repeat(4) if kind == 1 else Icosahedron("Ag", 3, constant)
        places = whole.positions - whole.positions.mean(0) + random.uniform(-0.3, 0.3, 3) * constant
        nearest = np.argsort(np.linalg.norm(places, axis=1))[: random.integers(SMALLEST, CELL + 1)]
        atoms = Atoms(f"Ag{len(nearest)}", places[nearest])
    atoms.symbols = random.choice([*METALS], len(atoms), p=shares)
    atoms.positions += random.uniform(0.02, 0.15) * random.standard_normal((len(atoms), 3))
    return atoms


def pack(every: Sequence[Atoms], dtype: type = np.float32) -> Structures:
    """Arrays of ASE's atoms, whose cells are right-angled."""
    positions = np.zeros((len(every), CELL, 3), dtype)
    metals = np.zeros((len(every), CELL), np.int32)
    for i, atoms in enumerate(every):
        positions[i, : len(atoms)] = atoms.positions
        metals[i, : len(atoms)] = [[*METALS].index(symbol) for symbol in atoms.symbols]
    cells = [atoms.cell.lengths() if atoms.pbc.all() else np.full(3, NO_CELL) for atoms in every]
    return Structures(positions, metals, np.array([len(a) for a in every], np.int32), np.array(cells, dtype))


def label(every: Sequence[Atoms]) -> Labelled:
    structures = pack(every)
    energies, forces = np.zeros(len(every)), np.zeros_like(structures.positions)
    for i, atoms in enumerate(every):
        atoms.calc = EMT()
        energies[i], forces[i, : len(atoms)] = atoms.get_potential_energy(), atoms.get_forces()
    return Labelled(structures, energies, forces)


def load(count: int, seed: int) -> Labelled:
    return label([draw_atoms(np.random.default_rng((seed, i))) for i in range(count)])


def counts(structures: Structures) -> np.ndarray:
    """[B, metals]: how many atoms of each."""
    return np.stack([((structures.metals == m) & structures.real).sum(1) for m in range(len(METALS))], 1)


def atomic_offsets(data: Labelled) -> np.ndarray:
    """The energy of an atom of each metal that explains the most of the energies per atom."""
    n = data.structures.lengths
    return np.linalg.lstsq(counts(data.structures) / n[:, None], data.energies / n, rcond=None)[0]


def training_batch(data: Labelled, batch: int, seed: int, step: int) -> tuple[np.ndarray, ...]:
    return data.pick(np.random.default_rng((seed, step)).integers(0, len(data.energies), batch))


class PairPotential:
    """The baseline: forces along the bonds, by a function of the distance for each pair of metals, fitted by least squares."""

    centres = np.linspace(1.5, CUTOFF, 16)

    def __init__(self, data: Labelled):
        rows = [self._basis(data.structures, i) for i in range(len(data.energies))]
        targets = [forces[real] for forces, real in zip(data.forces, data.structures.real, strict=True)]
        # of many rows, by the normal equations; distances that do not occur have no say
        matrix = sum(np.einsum("ikp,ikq->pq", row, row) for row in rows)
        vector = sum(np.einsum("ikp,ik->p", row, target) for row, target in zip(rows, targets, strict=True))
        self.coefficients = np.linalg.lstsq(matrix, vector, rcond=1e-10)[0]

    def _basis(self, structures: Structures, i: int) -> np.ndarray:
        """[atoms, 3, pairs of metals × centres]"""
        real, cell, kinds = structures.real[i], structures.cells[i], len(METALS)
        x, metals = structures.positions[i][real].astype(float), structures.metals[i][real]
        r = x[None] - x[:, None]
        r -= cell * np.round(r / cell)
        d = np.linalg.norm(r, axis=-1) + 10 * CUTOFF * np.eye(len(x))
        pull = np.exp(-(((d[..., None] - self.centres) / 0.15) ** 2)) * np.maximum(1 - (d / CUTOFF) ** 2, 0)[..., None]
        low, high = np.minimum(metals[:, None], metals), np.maximum(metals[:, None], metals)
        pair = np.eye(kinds**2)[kinds * low + high][..., [a * kinds + b for a in range(kinds) for b in range(a, kinds)]]
        basis = np.einsum("ijk,ijc,ijp->ikpc", r / d[..., None], pull, pair, optimize=True)
        return basis.reshape(*basis.shape[:2], -1)

    def forces(self, structures: Structures) -> np.ndarray:
        forces = np.zeros(structures.positions.shape)
        for i, real in enumerate(structures.real):
            forces[i][real] = self._basis(structures, i) @ self.coefficients
        return forces
