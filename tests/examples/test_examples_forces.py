"""The examples of forces: energies, forces and gradients of the loss are those of attention written out in float64."""

import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ase")

from torch_oracle import launched  # noqa: E402

pytestmark = pytest.mark.thorough

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = dict(width=8, heads=2, depth=2, waves=4)
RUN = dict(TINY, depth=1, steps=4, checkpoint_every=2, log_every=2, batch=2, structures=6, samples=3, time_steps=3)
NAMES = ["forces_jax", "forces_torch"]


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)


@pytest.fixture
def atoms():
    from consistency import atoms

    return atoms


@pytest.fixture
def batch(atoms):
    """A periodic cell and two clusters, without what rounding to float32 makes of their numbers."""
    data = atoms.load(3, 4)
    assert len(set(data.structures.lengths)) == 3
    assert (data.structures.cells.max(1) < atoms.NO_CELL).any()
    return tuple(a.astype(float) if a.dtype == np.float32 else a for a in data.pick(np.arange(3)))


def in_jax(batch, attention: str, dtype: str = "float64", learn: bool = True, **options):
    """Energies and forces; the loss and its gradient too, if the model is to learn."""
    import forces_jax
    from consistency.forces import initialize

    config = forces_jax.Config(**TINY | options, attention=attention)
    with jax.enable_x64(dtype == "float64"):
        weights = {name: jnp.asarray(w, dtype) for name, w in initialize(config).items()}
        arrays = [jnp.asarray(a, dtype if a.dtype == float else None) for a in batch]
        results = jax.jit(functools.partial(forces_jax.energies_and_forces, config))(weights, *arrays[:4])
        if learn:
            loss = lambda weights: forces_jax.loss(config, weights, None, *arrays)[0]
            results += jax.jit(jax.value_and_grad(loss))(weights)
        return [*jax.device_get(results)]


def in_torch(batch, attention: str):
    import forces_torch

    potential = forces_torch.Potential(forces_torch.Config(**TINY, attention=attention)).double()
    arrays = [torch.as_tensor(a) for a in batch]
    launched()
    energies, forces = (a.detach().numpy() for a in potential.energies_and_forces(*arrays[:4]))
    assert launched() == ("" if attention == "naive" else "FFBB")
    loss, _ = potential(*arrays)
    loss.backward()
    assert ("S" in launched()) == (attention != "naive")
    return [energies, forces, loss.item(), {name: p.grad.numpy() for name, p in potential.weights.items()}]


def assert_close(got, expected, rtol: float, atol: float) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol * np.abs(b).max()), got, expected)


def test_both_frameworks_compute_what_is_written_out(batch):
    exact = in_jax(batch, "naive")
    assert_close(in_jax(batch, "xla"), exact, rtol=1e-8, atol=1e-10)
    for attention in ("naive", "auto"):
        assert_close(in_torch(batch, attention), exact, rtol=1e-8, atol=1e-10)


def test_float32_and_the_kernels(batch):
    exact, naive = in_jax(batch, "naive", depth=1), in_jax(batch, "naive", "float32", depth=1)
    for attention in ("auto", "interpret"):
        got = in_jax(batch, attention, "float32", depth=1)
        for a, b, c in zip(*map(jax.tree.leaves, (got, naive, exact)), strict=True):
            error, allowed = (np.abs(x - c).max() for x in (a, b))
            assert error <= 2 * allowed + 1e-5 * np.abs(c).max()


def test_the_loss_takes_the_second_order_kernels(batch, jitted_kernels):
    import forces_jax
    from consistency.forces import initialize

    config = forces_jax.Config(**TINY)
    weights = jax.tree.map(jnp.asarray, initialize(config))
    arrays = [jnp.asarray(a, jnp.float32 if a.dtype == float else None) for a in batch]
    counts = jitted_kernels(jax.grad(lambda w: forces_jax.loss(config, w, None, *arrays)[0]), weights)
    assert counts["attention_backward_dual"] == config.depth


@pytest.mark.parametrize("name", NAMES)
def test_forces_and_hessian_are_differences(name, atoms, batch, monkeypatch):
    from ase import Atoms

    from consistency import vibrations
    from consistency.forces import initialize

    pack = functools.partial(atoms.pack, dtype=float)
    monkeypatch.setattr(vibrations, "pack", pack)

    example = __import__(name)
    config = example.Config(**TINY)
    with jax.enable_x64(True):
        if name == "forces_jax":
            weights = {n: jnp.asarray(w, jnp.float64) for n, w in initialize(config).items()}
            model = example.evaluated(config, weights)
        else:
            model = example.evaluated(example.Potential(config).double())
        structures = atoms.Structures(*batch[:4])
        cell = int(structures.cells[:, 0].argmin())
        one = atoms.Structures(*(a[cell : cell + 1] for a in structures))
        forces = model.energies_and_forces(one)[1][0]
        quotients = vibrations.force_differences(model, one, 1e-4)
        np.testing.assert_allclose(forces, quotients, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(forces.sum(0), 0, atol=1e-12)
        few = Atoms("AgAu2", [[0, 0, 0], [2.7, 0, 0], [0.3, 2.8, 0.5]])
        few.calc = vibrations.Learned(model)
        hessian = model.hessian(pack([few]))[:3, :, :3].reshape(9, 9)
        np.testing.assert_allclose(hessian, hessian.T, atol=1e-10)
        np.testing.assert_allclose(hessian, vibrations.hessian_differences(few, 1e-4), rtol=1e-5, atol=1e-6)


def test_energies_know_neither_frame_nor_padding(atoms, batch):
    structures = atoms.Structures(*batch[:4])
    energies, forces = in_jax(batch, "xla", learn=False)
    random = np.random.default_rng(0)
    turn = np.linalg.qr(random.standard_normal((3, 3)))[0]
    moved = structures.positions + random.standard_normal((3, 1, 3))
    moved += structures.cells[:, None] * random.integers(-1, 2, moved.shape) * (structures.cells < 100)[:, None]
    moved[~structures.real] = 5 * random.standard_normal(((~structures.real).sum(), 3))
    got = in_jax((moved, *batch[1:]), "xla", learn=False)
    np.testing.assert_allclose(got[0], energies, rtol=1e-10)
    np.testing.assert_allclose(got[1], forces, atol=1e-10)
    clusters = structures.cells[:, 0] > 100
    turned = [a[clusters] for a in (structures.positions @ turn, *batch[1:])]
    got = in_jax(turned, "xla", learn=False)
    np.testing.assert_allclose(got[0], energies[clusters], rtol=1e-10)
    np.testing.assert_allclose(got[1], forces[clusters] @ turn, atol=1e-10)


def test_structures(atoms):
    data = atoms.load(40, 0)
    structures = data.structures
    periodic = structures.cells[:, 0] < atoms.NO_CELL
    assert 5 < periodic.sum() < 25
    assert (structures.cells[periodic] > 2 * atoms.CUTOFF).all()  # a pair is one pair of images
    assert (data.forces[~structures.real] == 0).all()
    np.testing.assert_allclose(data.forces.sum(1), 0, atol=1e-4)
    own = data._replace(forces=atoms.PairPotential(data).forces(structures))
    again = atoms.PairPotential(own).forces(structures)
    np.testing.assert_allclose(again, own.forces, atol=1e-3 * np.abs(own.forces).max())
    shifted = data.shifted(atoms.atomic_offsets(data))
    before, after = (np.square(d.energies / structures.lengths).mean() for d in (data, shifted))
    assert after < 0.5 * before


def test_frequencies():
    """Of two masses on a spring: the square root of its strength over the reduced mass."""
    from ase import units

    from consistency.vibrations import frequencies

    along = np.array([[2.0, -2.0], [-2.0, 2.0]])
    hessian = np.kron(along, np.diag([1.0, 0.0, 0.0]))
    got = frequencies(hessian, np.array([100.0, 200.0]))
    expected = np.sqrt(2 * units._e * 1e20 / (200 / 3 * units._amu)) / (2 * np.pi) * 1e-12
    np.testing.assert_allclose(got, [0] * 5 + [expected], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_runs_and_resumes(name, tmp_path, capsys):
    example = __import__(name)

    def run(folder, **options):
        example.main(example.Config(**RUN | options, output=str(folder)))
        return json.loads((folder / "metrics.json").read_text())

    whole = run(tmp_path / "whole")
    assert whole["steps"] == 4
    assert np.isfinite([*whole["figures"].values()]).all()
    assert len(whole["frequencies_thz"]["model, Hessian"]) == 39
    for picture in ("forces.png", "physics.png"):
        assert (tmp_path / "whole" / picture).read_bytes().startswith(b"\x89PNG")
    shutil.copytree(tmp_path / "whole" / "checkpoints", tmp_path / "resumed" / "checkpoints")
    last = tmp_path / "resumed" / "checkpoints" / ("4" if name == "forces_jax" else "4.pt")
    shutil.rmtree(last) if last.is_dir() else last.unlink()
    resumed = run(tmp_path / "resumed", resume=True)
    assert resumed["figures"]["force_error"] == pytest.approx(whole["figures"]["force_error"], rel=1e-4)
    assert "a pair potential" in capsys.readouterr().out
