"""The examples of test-time training: gradients through inner steps, right ones, by the second-order kernels; whole runs."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch_oracle import launched  # noqa: E402

pytestmark = pytest.mark.thorough

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = dict(width=8, heads=2, depth=2, chunk=4, window=6, chunks=3)
RUN = dict(TINY, steps=4, checkpoint_every=2, log_every=2, batch=2, samples=4, timed_windows="4,8", repeats=1)


@pytest.fixture(params=["ttt_jax", "ttt_torch"])
def example(request, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return __import__(request.param)


@pytest.fixture
def text(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from consistency import text

    return text


def test_text(text):
    loaded = text.load_text()
    assert len(loaded.train) > 300_000
    assert len(loaded.train) == pytest.approx(9 * len(loaded.held_out), abs=9)
    assert "".join(loaded.characters[n] for n in loaded.train[:2000]).count("the") > 5
    batch = text.training_batch(loaded.train, 3, 5, seed=0, step=1)
    assert batch.shape == (3, 5)
    assert (batch == text.training_batch(loaded.train, 3, 5, seed=0, step=1)).all()


def test_gradients_go_through_the_inner_steps(monkeypatch, jitted_kernels):
    monkeypatch.syspath_prepend(EXAMPLES)
    import ttt_jax

    tokens = jnp.arange(13) * 5 % 11
    with jax.enable_x64(True):
        results = []
        for attention in ("xla", "naive"):
            config = ttt_jax.Config(**TINY, attention=attention, dtype="float64")
            weights = jax.tree.map(lambda a: a.astype(jnp.float64), ttt_jax.initialize(config, 11))
            loss = lambda weights, config=config: ttt_jax.read_on(config, weights, tokens).mean()
            results.append(jax.jit(jax.value_and_grad(loss))(weights))
        # norms are in float32, as is a naive softmax
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), *results)
        rate = dataclasses.replace(config, attention="xla")
        up = lambda r: ttt_jax.read_on(rate, dict(weights, slow=dict(weights["slow"], log_rate=r)), tokens).mean()
        at = weights["slow"]["log_rate"]
        difference = (up(at + 1e-2) - up(at - 1e-2)) / 2e-2
        np.testing.assert_allclose(results[0][1]["slow"]["log_rate"], difference, rtol=1e-2)
        counts = jitted_kernels(jax.grad(lambda w: ttt_jax.read_on(rate, w, tokens).mean()), weights)
        assert counts["attention_backward_dual"] > 0


def test_gradients_go_through_the_inner_steps_in_torch(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import ttt_torch

    tokens, results = torch.arange(13) * 5 % 11, []
    launched()
    for attention in ("auto", "naive"):
        config = ttt_torch.Config(**TINY, attention=attention, dtype="float64")
        reader = ttt_torch.Reader(config, 11).double()
        reader.read_on(tokens).mean().backward()
        results.append({name: p.grad for name, p in reader.named_parameters()})
        if attention == "auto":
            assert "S" in launched()
    for name, gradient in results[1].items():
        torch.testing.assert_close(results[0][name], gradient, rtol=2e-5, atol=1e-6)


def test_runs_and_resumes(example, tmp_path, capsys):
    def run(folder, **options):
        example.main(example.Config(**RUN | options, output=str(folder)))
        return json.loads((folder / "metrics.json").read_text())

    whole = run(tmp_path / "whole")
    assert whole["steps"] == 4
    assert {name: set(costs) for name, costs in whole["costs"].items()} == {"auto": {"4", "8"}, "naive": {"4", "8"}}
    assert np.isfinite(whole["held_out"]["adapted"]).all()
    assert whole["held_out"]["adapted"][0] == pytest.approx(whole["held_out"]["fixed"][0], rel=1e-5)
    for picture in ("chunks.png", "curves.png", "costs.png"):
        assert (tmp_path / "whole" / picture).read_bytes().startswith(b"\x89PNG")
    shutil.copytree(tmp_path / "whole" / "checkpoints", tmp_path / "resumed" / "checkpoints")
    last = tmp_path / "resumed" / "checkpoints" / ("4" if example.__name__ == "ttt_jax" else "4.pt")
    shutil.rmtree(last) if last.is_dir() else last.unlink()
    resumed = run(tmp_path / "resumed", resume=True)
    np.testing.assert_allclose(resumed["held_out"]["adapted"], whole["held_out"]["adapted"], rtol=1e-4)
    assert "chunk 3" in capsys.readouterr().out
