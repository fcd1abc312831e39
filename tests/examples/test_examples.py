"""The example runs from its command line, picks up where it was stopped, and compares attentions."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TINY = "--steps 4 --checkpoint-every 2 --log-every 2 --batch 20 --samples 40 --width 16 --heads 2 --depth 1"


@pytest.fixture
def consistency(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import consistency.compare
    import consistency.config
    import consistency.data
    import consistency.moving
    import consistency.quality

    return consistency


def run(folder: Path, *arguments: str) -> tuple[dict, str]:
    """metrics.json and the progress bar of a run in another directory than the repository's."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "cache"),  # the second run need not compile again
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, EXAMPLES / "meanflow_jax.py", *TINY.split(), "--output", folder, *arguments]
    process = subprocess.run(command, cwd=folder.parent, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return json.loads((folder / "metrics.json").read_text()), process.stderr


def test_meanflow_runs_and_resumes(tmp_path):
    whole, _ = run(tmp_path / "whole")
    assert whole["steps"] == 4
    assert whole["config"]["width"] == 16
    assert set(whole["quality"]) == {"1 step", "2 steps", "4 steps", "held-out digits"}
    assert whole["quality"]["held-out digits"]["class_agreement"] > 0.95
    assert all(np.isfinite(figure) for figures in whole["quality"].values() for figure in figures.values())
    for picture in ("samples.png", "curves.png"):
        assert (tmp_path / "whole" / picture).read_bytes().startswith(b"\x89PNG")

    # As if the run had been stopped after the checkpoint at step 2.
    shutil.copytree(tmp_path / "whole" / "checkpoints", tmp_path / "resumed" / "checkpoints")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "4")
    resumed, progress = run(tmp_path / "resumed", "--resume")
    assert "2/4" in progress
    assert "1/4" not in progress
    for figure in ("steps", "loss", "quality"):
        assert resumed[figure] == whole[figure]


def test_mosaics_are_cut_where_they_were_joined(consistency):
    data = consistency.data
    train, held_out = data.load_digits()
    assert len(train.labels) + len(held_out.labels) == 1797
    mosaics = data.training_batch(train, 6, mosaic=3, seed=0, step=5)
    assert mosaics.images.shape == (6, 24, 24, 1)
    digits = data.cut_mosaics(mosaics, 3)
    known = {image.tobytes(): label for image, label in zip(*train, strict=True)}
    assert [known[image.tobytes()] for image in digits.images] == list(digits.labels)
    again = data.training_batch(train, 6, mosaic=3, seed=0, step=5)
    np.testing.assert_array_equal(again.images, mosaics.images)


def test_digits_move_in_shots(consistency):
    """In each shot one digit of the class of the video; another in the next."""
    moving, data = consistency.moving, consistency.data
    train, _ = data.load_digits()
    videos = moving.moving_digits(train, 3, frames=20, side=24, movers=1, seed=0, step=5)
    known = {
        image[image.any(1)][:, image.any(0)].tobytes(): label
        for image, label in zip(train.images[..., 0] + 1, train.labels, strict=True)
    }
    for video, label in zip(videos.images + 1, videos.labels, strict=True):
        cut = [frame[frame.any(1)][:, frame.any(0)].tobytes() for frame in video]
        shots = [set(cut[first : first + moving.SHOT]) for first in range(0, 20, moving.SHOT)]
        assert [len(shot) for shot in shots] == [1, 1, 1]
        assert len(set(cut)) == 3
        assert {known[ink] for ink in cut} == {label}
    again = moving.moving_digits(train, 3, frames=20, side=24, movers=1, seed=0, step=5)
    np.testing.assert_array_equal(again.images, videos.images)
    assert moving.place_waves(20, 3, 64).shape == (180, 64)


def test_frechet_distance_between_gaussians(consistency):
    """Of N(0, 1) and N(m, s²) in each of three independent channels: 3 (m² + (1 − s)²)."""
    samples = np.random.default_rng(0).standard_normal((100_000, 3))
    distance = consistency.quality.frechet_distance(samples, 2 + 0.5 * samples[::-1])
    assert distance == pytest.approx(3 * (2**2 + 0.5**2), rel=0.02)
    assert consistency.quality.frechet_distance(samples, samples) == pytest.approx(0, abs=1e-6)


def test_command_line_is_the_configuration(consistency):
    config_class, presets = consistency.config.TrainingConfig, {"digits": {}, "mosaic": {"mosaic": 16, "batch": 8}}
    parse = consistency.config.parse_config
    assert parse(config_class, presets, []) == config_class()
    config = parse(config_class, presets, ["--size", "mosaic", "--batch", "4", "--learning-rate=-2e-5", "--resume"])
    assert config == dataclasses.replace(
        config_class(), size="mosaic", mosaic=16, batch=4, learning_rate=-2e-5, resume=True
    )
    assert parse(config_class, presets, consistency.config.to_arguments(config)) == config


def test_without_warmup_the_first_step_learns(consistency):
    from consistency.training_jax import make_optimizer

    optimizer = make_optimizer(consistency.config.TrainingConfig(warmup_steps=0, learning_rate=0.1))
    weights = np.ones(3, np.float32)
    updates, _ = optimizer.update(weights, optimizer.init(weights), weights)
    np.testing.assert_allclose(updates, -0.1, rtol=1e-5)


def test_comparison_survives_a_run_that_fails(consistency, tmp_path, monkeypatch, capsys):
    script = tmp_path / "script.py"
    script.write_text(
        "import json, pathlib, sys\n"
        "options = dict(argument.split('=', 1) for argument in sys.argv[1:] if '=' in argument)\n"
        "if options['--attention'] == 'naive':\n"
        "    sys.exit('RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 byte')\n"
        "output = pathlib.Path(options['--output'])\n"
        "output.mkdir(parents=True)\n"
        "quality = {'1 step': {'class_agreement': 1}}\n"
        "figures = dict(steps_per_second=2.0, peak_device_memory_bytes=2**30, quality=quality)\n"
        "(output / 'metrics.json').write_text(json.dumps(figures))\n"
    )
    monkeypatch.setattr(sys, "argv", [str(script)])
    config = consistency.config.TrainingConfig(attention="xla,naive", output=str(tmp_path / "output"))
    assert consistency.compare.compare(config) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in table] == ["attention", "xla", "naive"]
    assert "1.00" in table[1]
    assert "out of memory" in table[2]
