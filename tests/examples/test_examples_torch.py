"""The PyTorch examples, and sCM in JAX, run, resume, and train on two processes as on one; JAX and PyTorch compute the
same losses and gradients."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
# a batch for 2, 3, 4, 6 or 8 GPUs
TINY = dict(steps=4, checkpoint_every=2, log_every=2, batch=24, samples=48, width=16, heads=2, depth=1)


@pytest.fixture(autouse=True)
def examples(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)


def run(script: str, folder: Path, monkeypatch, **options) -> dict:
    """metrics.json of a short run in this process."""
    import consistency.report

    # Fitting the classifier takes longer than the training; test_examples.py does it.
    monkeypatch.setattr(consistency.report, "Judge", lambda *_: lambda digits: judge(digits.images))
    module = __import__(script)
    module.main(module.Config(**TINY | options, output=str(folder)))
    return json.loads((folder / "metrics.json").read_text())


def judge(images: np.ndarray) -> dict[str, float]:
    return {"class_agreement": 0.5, "frechet_distance": float(np.square(images).mean())}


SCRIPTS = {
    "meanflow_torch": {},
    "meanflow_torch-naive": dict(attention="naive"),
    "meanflow_torch-bfloat16": dict(dtype="bfloat16"),
    "scm_torch": dict(diffusion_steps=2, warmup_steps=0, tangent_warmup_steps=0),
    "scm_jax": dict(diffusion_steps=2, warmup_steps=0, tangent_warmup_steps=0),
    "teacher_forcing_torch": {},
    "teacher_forcing_torch-naive": dict(attention="naive"),
    "teacher_forcing_jax": {},
}
IN_CI = pytest.param("scm_jax", marks=pytest.mark.thorough)  # which JAX compiles for long


@pytest.mark.parametrize("case", [IN_CI if case == "scm_jax" else case for case in SCRIPTS])
def test_script_runs_and_resumes(case, tmp_path, monkeypatch):
    script, options = case.split("-")[0], SCRIPTS[case]
    whole = run(script, tmp_path / "whole", monkeypatch, **options)
    assert whole["steps"] == 4
    films = script.startswith("teacher")
    drawn = {"1 step a frame", "2 steps a frame"} if films else {"1 step", "2 steps", "4 steps"}
    assert set(whole["quality"]) == drawn | {"held-out digits"}
    assert all(np.isfinite(figure) for figures in whole["quality"].values() for figure in figures.values())
    for picture in ("samples.png", "curves.png"):
        assert (tmp_path / "whole" / picture).read_bytes().startswith(b"\x89PNG")

    # As if the run had been stopped after the checkpoint at step 2.
    checkpoints = tmp_path / "resumed" / "checkpoints"
    shutil.copytree(tmp_path / "whole" / "checkpoints", checkpoints)
    (last,) = checkpoints.glob("4*")
    last.unlink() if last.is_file() else shutil.rmtree(last)
    resumed = run(script, tmp_path / "resumed", monkeypatch, **options, resume=True)
    for figure in ("steps", "loss", "quality"):
        assert resumed[figure] == whole[figure]


@pytest.mark.thorough
@pytest.mark.parametrize("done", [False, True], ids=["", "done"])
@pytest.mark.parametrize("script", ["scm_torch", "scm_jax"])
def test_stopped_in_the_first_stage(script, done, tmp_path, monkeypatch):
    """Of two, with checkpoints of a folder of its own: after some of its steps, or after all."""
    options = dict(diffusion_steps=4, warmup_steps=0, tangent_warmup_steps=0)
    whole = run(script, tmp_path / "whole", monkeypatch, **options)
    checkpoints = tmp_path / "resumed" / "diffusion" / "checkpoints"
    shutil.copytree(tmp_path / "whole" / "diffusion" / "checkpoints", checkpoints)
    if not done:
        (last,) = checkpoints.glob("4*")
        last.unlink() if last.is_file() else shutil.rmtree(last)
    module, steps = __import__(script), []
    batch = module.training_batch
    monkeypatch.setattr(module, "training_batch", lambda *args: steps.append(args[-1]) or batch(*args))
    resumed = run(script, tmp_path / "resumed", monkeypatch, **options, resume=True)
    assert steps == [*([] if done else [2, 3]), *range(4)]
    for figure in ("steps", "loss", "quality"):
        assert resumed[figure] == whole[figure]


@pytest.mark.parametrize("script", ["scm_torch", IN_CI])
def test_a_run_afresh_forgets_the_second_stage_of_another(script, tmp_path, monkeypatch):
    run(script, tmp_path, monkeypatch, diffusion_steps=2)
    module = __import__(script)
    monkeypatch.setattr(module, "train_diffusion", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        module.main(module.Config(output=str(tmp_path)))
    with pytest.raises(ZeroDivisionError):
        module.main(module.Config(output=str(tmp_path), resume=True))


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path, monkeypatch):
    run("meanflow_torch", tmp_path / "one", monkeypatch)
    options = [f"--{name}={value}" for name, value in TINY.items()]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    process = subprocess.run(
        [*launch, EXAMPLES / "meanflow_torch.py", *options, "--output", tmp_path / "two"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert json.loads((tmp_path / "two" / "metrics.json").read_text())["processes"] == 2
    one, two = (torch.load(tmp_path / folder / "checkpoints" / "4.pt", weights_only=True) for folder in ("one", "two"))
    for name, parameter in one["method"].items():
        torch.testing.assert_close(two["method"][name], parameter)


OPTIONS = dict(steps=4, checkpoint_every=2, frames=16, batch=2, samples=2, width=16, heads=2, depth=2)
VIDEO = [f"--{name}={value}" for name, value in OPTIONS.items()]


@pytest.mark.thorough
def test_processes_that_share_videos_train_as_one(tmp_path):
    """And go on from a checkpoint; in a ring, as one key head of two is not to be had by each of four."""
    script = EXAMPLES / "video_torch.py"
    environment = dict(PYTHONPATH=str(ROOT), GLOO_SOCKET_IFNAME=os.environ.get("GLOO_SOCKET_IFNAME", "lo"))

    def train(processes, folder, *options):
        several = ["-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--standalone"]
        command = [sys.executable, *(several if processes > 1 else []), script, *VIDEO, "--output", folder, *options]
        done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads((folder / "metrics.json").read_text()), torch.load(folder / "checkpoints" / "4.pt")["method"]

    one, expected = train(1, tmp_path / "one")
    for processes in (2, 4):
        folder = tmp_path / str(processes)
        several, _ = train(processes, folder)
        (folder / "checkpoints" / "4.pt").unlink()
        resumed, parameters = train(processes, folder, "--resume")
        assert several["processes"] == processes
        assert several["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert resumed["loss"] == pytest.approx(several["loss"], rel=1e-6)
        for name, parameter in expected.items():
            torch.testing.assert_close(parameters[name], parameter, rtol=1e-3, atol=1e-4)
        assert (folder / "samples.png").read_bytes().startswith(b"\x89PNG")


def test_compiled_step(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))  # C++ takes a minute
    run("meanflow_torch", tmp_path, monkeypatch, compile=True, checkpoint_every=4)
    assert re.search(r"loss [\d.]+, [\d.]+ ms a step, \d+ images a second", capsys.readouterr().err)


@pytest.mark.parametrize("method", ["meanflow", "scm"])
def test_jax_and_torch_compute_the_same(method):
    """The loss, what is logged, and all gradients."""
    in_jax, in_torch = __import__(f"{method}_jax"), __import__(f"{method}_torch")
    options = dict(width=16, heads=2, depth=2, batch=8)
    config = in_jax.Config(**options)
    x, labels = in_jax.training_batch(in_jax.load_digits()[0], config.batch, config.mosaic, 0, 0)
    times = 2 if method == "meanflow" else 1
    graph, parameters = split_and_perturb(in_jax.DiffusionTransformer(config, times=times, rngs=nnx.Rngs(0)))
    key = jax.random.key(2)
    if method == "meanflow":
        jax_method, torch_method = in_jax.MeanFlow(config, graph), in_torch.MeanFlow(in_torch.Config(**options))
        time_key, noise_key = jax.random.split(key)
        warmup, random = (), (jax.random.normal(noise_key, x.shape), *jax_method.sample_times(time_key, len(x)))
    else:
        jax_method = in_jax.ConsistencyModel(config, graph, data_deviation=0.7)
        torch_method = in_torch.ConsistencyModel(in_torch.Config(**options), data_deviation=0.7)
        t, x_t, velocity = jax_method.sample_path(key, x)
        cos, sin = (f(t)[:, None, None, None] for f in (jnp.cos, jnp.sin))
        warmup, random = (0.6,), (np.full(len(x), 0.6, np.float32), sin * x_t + cos * velocity, t)
    torch_method.network.load_state_dict(to_torch(parameters))

    (loss, metrics), gradients = jax.jit(jax.value_and_grad(jax_method.loss, has_aux=True))(
        parameters, key, jnp.asarray(x), jnp.asarray(labels), *warmup
    )
    torch_loss, torch_metrics = torch_method(*(torch.tensor(np.asarray(part)) for part in (x, labels, *random)))
    torch_loss.backward()

    rounding = 16 * torch.finfo(torch.float32).eps
    assert torch_loss.item() == pytest.approx(float(loss), rel=rounding)
    for name, value in metrics.items():
        assert torch_metrics[name].item() == pytest.approx(float(value), rel=rounding)
    expected = to_torch(gradients)
    for name, parameter in torch_method.network.named_parameters():
        error = torch.linalg.vector_norm(parameter.grad - expected[name]) / torch.linalg.vector_norm(expected[name])
        assert error < rounding, name


@pytest.mark.parametrize("depth", [1, 2])
def test_every_second_block_sees_shots_alone(depth):
    """In JAX as in PyTorch: of one block, another second shot changes nothing in the first."""
    import consistency.models_jax as in_jax
    import consistency.models_torch as in_torch
    from video_jax import Config

    config = Config(frames=16, width=16, heads=2, depth=depth)
    graph, parameters = split_and_perturb(in_jax.VideoTransformer(config, 16, times=2, rngs=nnx.Rngs(0)))
    network = in_torch.VideoTransformer(config, 16, times=2)
    network.load_state_dict(to_torch(parameters))
    videos = np.random.default_rng(0).standard_normal((2, 16, 16, 16)).astype(np.float32)
    videos[1, :8] = videos[0, :8]
    times, labels = np.full((2, 2), 0.5, np.float32), np.zeros(2, np.int32)
    u = np.asarray(nnx.merge(graph, parameters)(jnp.asarray(videos), (*jnp.asarray(times),), jnp.asarray(labels)))
    of_torch = network(torch.tensor(videos), (*torch.tensor(times),), torch.tensor(labels)).detach().numpy()
    np.testing.assert_allclose(of_torch, u, rtol=1e-4, atol=1e-5 * np.abs(u).max())
    alike = [np.abs(a[0] - a[1])[:8].max() < 1e-6 * np.abs(a).max() for a in (u, of_torch)]
    assert alike == [depth == 1] * 2


def split_and_perturb(model: nnx.Module) -> tuple[nnx.GraphDef, nnx.State]:
    """Of other parameters than its first: zero-initialized layers would hide what is behind them."""
    graph, parameters = nnx.split(model)
    leaves, structure = jax.tree.flatten(parameters)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    leaves = [leaf + 0.1 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    return graph, jax.tree.unflatten(structure, leaves)


def to_torch(state: nnx.State) -> dict[str, torch.Tensor]:
    """Parameters, or gradients, of the Flax transformer under the names that they have in the PyTorch one."""
    arrays = {".".join(map(str, path)): np.asarray(leaf) for path, leaf in nnx.to_flat_state(state)}
    width = arrays["positions"].shape[-1]
    result = {}
    for path, array in arrays.items():
        if ".attention." in path:
            array = array.reshape((width, width) if path.endswith("kernel") else width)  # without the axis of heads
        name = path.replace("kernel", "weight").replace("embedding", "weight").replace("attention.out", "project")
        result[name] = torch.tensor(array.T if path.endswith("kernel") else array)
    for name in [name for name in result if ".attention.query." in name]:
        parts = [result.pop(name.replace("query", part)) for part in ("query", "key", "value")]
        result[name.replace("attention.query", "query_key_value")] = torch.cat(parts)
    return result


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_a_frame_sees_the_clean_ones_before_it(framework, monkeypatch):
    """And itself, not the others, in either framework: what they hold changes nothing."""
    from consistency.config import TrainingConfig

    config = TrainingConfig(width=16, heads=2, depth=2)
    rng, times, labels = np.random.default_rng(0), np.full((2, 3), 0.5, np.float32), np.array([3, 7], np.int32)
    clean, noisy = rng.standard_normal((2, 2, 3, 8, 8, 1), np.float32)
    if framework == "jax":
        from consistency.models_jax import FrameTransformer

        network = FrameTransformer(config, 3, 1, nnx.Rngs(0))
        weights = nnx.state(network, nnx.Param)
        moved = jax.tree.map(
            lambda a: a + 0.1 * rng.standard_normal(a.shape, np.float32), weights
        )  # some begin at zero
        nnx.update(network, moved)
        compute = lambda clean, noisy: np.asarray(network(clean, noisy, (times,), labels))
    else:
        from consistency.models_torch import FrameTransformer

        network = FrameTransformer(config, 3, 1)
        for p in network.parameters():
            torch.nn.init.normal_(p, std=0.3)
        tensor = torch.from_numpy
        compute = lambda *x: network(*map(tensor, x), (tensor(times),), tensor(labels)).detach().numpy()
    before = compute(clean, noisy)
    for which, frames in ((0, 0), (0, 1), (0, 2), (1, 1)):
        changed = [clean.copy(), noisy.copy()]
        changed[which][:, frames] += 1
        differs = np.abs(compute(*changed) - before).max((0, 2, 3, 4)) > 1e-5
        assert differs.tolist() == [i > frames if which == 0 else i == frames for i in range(3)]


def test_times_of_a_small_batch_differ():
    """Of two samples one trains the average velocity."""
    import meanflow_jax
    import meanflow_torch

    r, t = meanflow_jax.MeanFlow(meanflow_jax.Config(), None).sample_times(jax.random.key(0), 2)
    assert (np.asarray(r) < np.asarray(t)).tolist() == [False, True]
    draw = functools.partial(meanflow_torch.MeanFlow.draw, types.SimpleNamespace(config=meanflow_torch.Config()))
    _, r, t = draw(torch.Generator().manual_seed(0), torch.Size((2, 8, 8)))
    assert (r < t).tolist() == [False, True]
