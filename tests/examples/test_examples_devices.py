"""The JAX examples train on several devices as on one, and each computes its part of the batch alone."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from jax_flash_jvp import launch

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = dict(steps=4, checkpoint_every=2, log_every=2, batch=18, samples=36, width=16, heads=2, depth=1, warmup_steps=2)
SCRIPTS = {
    "meanflow_jax": dict(attention="interpret"),  # see `kernels`
    "scm_jax": dict(attention="xla", diffusion_steps=2),
}
DEVICES = 3

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="needs conftest.py's CPU devices"),
]


@dataclasses.dataclass
class Run:
    """Of each call of `train`: the state that it returns, the history, and the compiled step."""

    quality: dict
    states: list
    histories: list
    programs: list


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """XLA is told how to divide "interpret", as it is for kernels on GPUs; the reference stands in for them."""

    def stand_in(name, launcher, *args, **static):
        return launch.reference_job(name)(*args, **static)

    monkeypatch.setattr(launch, "_by_kernels", stand_in)
    monkeypatch.setattr(launch.Interpreter, "on_shards", True)


@pytest.fixture
def run(monkeypatch):
    """run(script, folder, devices): what the script does, with a judge that takes no time."""
    monkeypatch.syspath_prepend(EXAMPLES)
    import consistency.report
    import consistency.training_jax

    keep_state = consistency.training_jax.keep_state
    judge = lambda digits: {"class_agreement": 0.5, "frechet_distance": float(np.square(digits.images).mean())}
    monkeypatch.setattr(consistency.report, "Judge", lambda *_: judge)

    def run(script: str, folder: Path, devices: int, **options) -> Run:
        states, histories, programs = [], [], []

        def watched(train_step, *how, **options):
            train_step, program = keep_state(train_step, *how, **options), None

            def watched_step(state, *batch):
                nonlocal program
                for part in jax.tree.leaves(state):
                    assert part.sharding.is_fully_replicated
                    assert len(part.sharding.device_set) == devices
                for part in batch[:2]:
                    shards = part.addressable_shards
                    assert [len(shard.data) for shard in shards] == [len(part) // devices] * devices
                if program is None:
                    program = train_step.lower(state, *batch).compile()
                    programs.append(program.as_text())
                return program(state, *batch)

            return watched_step

        def train(*arguments, **options):
            result = consistency.training_jax.train(*arguments, jax.devices()[:devices], **options)
            assert all(part.devices() == {jax.devices()[0]} for part in jax.tree.leaves(result[0]))
            states.append(jax.tree.map(np.array, result[0]))  # copies: the next call donates them
            histories.append(result[1])
            return result

        module = __import__(script)
        monkeypatch.setattr(consistency.training_jax, "keep_state", watched)
        monkeypatch.setattr(module, "train", train)
        module.main(module.Config(**TINY | SCRIPTS[script] | options, output=str(folder)))
        return Run(json.loads((folder / "metrics.json").read_text())["quality"], states, histories, programs)

    return run


def assert_close(got, expected):
    """Within a thousandth of each array's largest entry: AdamW enlarges rounding errors where a gradient is small."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, b), a in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(got), strict=True):
        name = jax.tree_util.keystr(path)
        if "['key']['bias']" not in name:  # on which attention does not depend: its gradient is rounding errors
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-3 * np.abs(b).max(), err_msg=name)


@pytest.mark.parametrize(("script", "later"), [("meanflow_jax", DEVICES), ("scm_jax", 1)])
def test_several_devices_train_as_one(script, later, run, tmp_path, caplog):
    one, several = run(script, tmp_path / "one", 1), run(script, tmp_path / "several", DEVICES)
    for what in ("histories", "states", "quality"):
        assert_close(getattr(several, what), getattr(one, what))
    for program in several.programs:
        assert "all-reduce" in program
        assert "all-gather" not in program
    assert not [record for record in caplog.records if record.name.startswith("jax_flash_jvp")]  # "it gathers …"

    # As if the run had been stopped after the checkpoint at step 2, and went on with as many devices, or with one.
    shutil.rmtree(tmp_path / "several" / "checkpoints" / "4")
    resumed = run(script, tmp_path / "several", later, resume=True)
    assert_close(resumed.states[-1], one.states[-1])
    assert_close(resumed.histories[-1], one.histories[-1])


@pytest.mark.parametrize(
    ("devices", "exchange"), [(2, "all-to-all"), (4, "collective-permute")], ids=["ulysses", "ring"]
)
def test_devices_that_share_videos_train_as_one(devices, exchange, tmp_path, monkeypatch, caplog):
    monkeypatch.syspath_prepend(EXAMPLES)
    import consistency.training_jax
    import video_jax

    keep_state, programs = consistency.training_jax.keep_state, []

    def watched(train_step, *how, **options):
        train_step = keep_state(train_step, *how, **options)

        def watched_step(state, *batch):
            if not programs:
                assert batch[0].addressable_shards[0].data.shape[1] == batch[0].shape[1] // devices
                programs.append(train_step.lower(state, *batch).compile().as_text())
            return train_step(state, *batch)

        return watched_step

    monkeypatch.setattr(consistency.training_jax, "keep_state", watched)
    tiny = dict(steps=2, checkpoint_every=1, log_every=1, frames=16, batch=2, samples=2, width=16, heads=2, depth=2)

    def run(devices, folder, **options):
        video_jax.main(video_jax.Config(**tiny | options, devices=devices, output=str(folder)))
        assert (folder / "samples.png").read_bytes().startswith(b"\x89PNG")
        return json.loads((folder / "metrics.json").read_text())

    several = run(devices, tmp_path / "several")
    assert exchange in programs[0]
    gathered = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather\(", programs[0])
    assert len(gathered) == programs[0].count(" all-gather(")
    assert {*gathered} <= {"256,16", "1,1,256,1,2"}  # positions, which shards of tokens train, and what tokens see
    assert not [record for record in caplog.records if record.name.startswith("jax_flash_jvp")]  # "in 2 pieces, …"
    one = run(1, tmp_path / "one")
    np.testing.assert_allclose(several["loss"], one["loss"], rtol=1e-4)
    assert several["tokens"] == 256
    shutil.rmtree(tmp_path / "several" / "checkpoints" / "2")
    np.testing.assert_allclose(run(devices, tmp_path / "several", resume=True)["loss"], several["loss"], rtol=1e-5)
    with pytest.raises(ValueError, match="`frames` must be a multiple of the 3 devices: got 16"):
        run(3, tmp_path / "three")


def test_batches_that_do_not_divide(run, tmp_path):
    with pytest.raises(ValueError, match=r"`batch` must be a multiple of the 3 devices .*: got 20"):
        run("meanflow_jax", tmp_path, DEVICES, batch=20)
