"""The examples whose losses need second derivatives of attention: right gradients, right eigenvalues, whole runs."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

pytestmark = pytest.mark.thorough

EXAMPLES = Path(__file__).parents[2] / "examples"
# a batch for 2, 3, 4, 6 or 8 GPUs
TINY = dict(steps=4, checkpoint_every=2, log_every=2, batch=24, samples=48, width=16, heads=2, depth=1)


@pytest.fixture
def examples(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import hvp_jax
    import tvm_jax

    return {"hvp_jax": hvp_jax, "tvm_jax": tvm_jax}


def run(module, folder: Path, **options) -> dict:
    """metrics.json of a short run in this process."""
    module.main(module.Config(**TINY | options, output=str(folder)))
    return json.loads((folder / "metrics.json").read_text())


def initialized(module: nnx.Module) -> tuple[nnx.GraphDef, nnx.State]:
    """The module's parameters in float64, none of them zero, as those of the last layers are before training."""
    graph, parameters = nnx.split(module)
    random = np.random.default_rng(0)
    return graph, jax.tree.map(lambda p: jnp.asarray(p + 0.3 * random.standard_normal(p.shape)), parameters)


def tvm_loss(tvm_jax, attention: str):
    config = tvm_jax.Config(attention=attention, width=8, heads=2, depth=1, patch=4, dtype="float64")
    graph, parameters = initialized(tvm_jax.DiffusionTransformer(config, times=2, rngs=nnx.Rngs(0)))
    method = tvm_jax.TerminalVelocityMatching(config, graph)
    average = jax.tree.map(lambda p: 0.9 * p, parameters)
    images, labels = tvm_jax.training_batch(tvm_jax.load_digits()[0], 3, mosaic=1, seed=0, step=0)

    def loss(parameters):
        return method.loss(parameters, average, jax.random.key(0), jnp.asarray(images, jnp.float64), labels)[0]

    return loss, parameters


def test_tvm_gradient_is_that_of_naive_attention(examples):
    with jax.enable_x64(True):
        results = []
        for attention in ("xla", "naive"):
            loss, parameters = tvm_loss(examples["tvm_jax"], attention)
            results.append(jax.jit(jax.value_and_grad(loss))(parameters))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10), *results)


def test_tvm_gradient_goes_through_the_tangent(examples, jitted_kernels):
    with jax.enable_x64(True):
        loss, parameters = tvm_loss(examples["tvm_jax"], "xla")
        # the network and its tangent once, the network alone twice: for the target and for flow matching
        assert jitted_kernels(jax.grad(loss), parameters) == {
            "attention_forward_dual": 1,
            "attention_backward_dual": 1,
            "attention_forward": 2,
            "attention_backward": 1,
        }


def test_tvm_times(examples):
    tvm_jax = examples["tvm_jax"]
    t, s, r = tvm_jax.TerminalVelocityMatching(tvm_jax.Config(), None).sample_times(jax.random.key(0), 10_000)
    assert s.min() > 0
    assert jnp.all(t > s)
    assert t.max() <= 1 + 1e-6
    assert 0 < r.min() < r.max() < 1


def test_tvm_runs(examples, tmp_path, monkeypatch):
    import consistency.report

    # Fitting the classifier takes longer than the training; test_examples.py does it.
    figures = {"class_agreement": 1.0, "frechet_distance": 0.0}
    monkeypatch.setattr(consistency.report, "Judge", lambda *_: lambda digits: figures)
    metrics = run(examples["tvm_jax"], tmp_path / "tvm")
    assert metrics["steps"] == 4
    assert set(metrics["quality"]) == {"1 step", "2 steps", "4 steps", "held-out digits"}
    assert np.isfinite(metrics["loss"])
    assert (tmp_path / "tvm" / "samples.png").read_bytes().startswith(b"\x89PNG")


def test_lanczos_finds_the_eigenvalues_of_a_dense_hessian(examples):
    hvp_jax = examples["hvp_jax"]
    with jax.enable_x64(True):
        config = hvp_jax.Config(attention="xla", width=4, heads=2, depth=1, patch=4, dtype="float64")
        graph, parameters = initialized(hvp_jax.Classifier(config, nnx.Rngs(0)))
        method = hvp_jax.Classification(graph)
        naive = dataclasses.replace(config, attention="naive")
        naive_method = hvp_jax.Classification(nnx.split(hvp_jax.Classifier(naive, nnx.Rngs(0)))[0])
        images, labels = hvp_jax.training_batch(hvp_jax.load_digits()[0], 10, mosaic=1, seed=0, step=0)
        batch = jnp.asarray(images, jnp.float64), labels
        theta, unravel = jax.flatten_util.ravel_pytree(parameters)
        dense = jax.jit(jax.hessian(lambda theta: naive_method.loss(unravel(theta), None, *batch)[0]))(theta)
        expected = np.linalg.eigvalsh(dense)[::-1]

        def product(vector):
            return np.asarray(method.hessian_vector_product(parameters, vector, *batch))

        np.testing.assert_allclose(product(np.ones_like(theta)), dense.sum(1), rtol=1e-8, atol=1e-10)
        start = np.random.default_rng(0).standard_normal(len(theta))
        krylov = hvp_jax.lanczos(product, start, iterations=40)
        values, vectors = krylov.eigenvectors(5)
        np.testing.assert_allclose(values, expected[:5], rtol=1e-6)
        np.testing.assert_allclose([product(v) for v in vectors], values[:, None] * vectors, atol=1e-5)
        np.testing.assert_allclose(krylov.basis @ krylov.basis.T, np.eye(40), atol=1e-12)


def test_lanczos_stops_where_the_space_ends(examples):
    lanczos = examples["hvp_jax"].lanczos
    matrix = np.diag([3.0, 2.0, 1.0, 1.0, 0.0])
    krylov = lanczos(matrix.__matmul__, np.ones(5), iterations=5)
    np.testing.assert_allclose(krylov.eigenvalues(4), [3, 2, 1, 0], atol=1e-12)
    assert len(krylov.diagonal) == 4
    with pytest.raises(ValueError, match="`iterations`"):
        lanczos(matrix.__matmul__, np.ones(5), iterations=6)


def test_a_product_that_does_not_fit(examples, monkeypatch):
    hvp_jax = examples["hvp_jax"]

    def fail(message):
        def hessian_vector_product(*_):
            raise jax.errors.JaxRuntimeError(message)

        monkeypatch.setattr(hvp_jax.Classification, "hessian_vector_product", hessian_vector_product)
        return hvp_jax.measure_cost(hvp_jax.Config(width=8), "naive", mosaic=1)

    assert fail("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 byte") is None
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        fail("INTERNAL: something else")


def test_hvp_runs(examples, tmp_path, capsys):
    options = dict(timed_mosaics="2", repeats=1, iterations=6, eigenvalues=3, sharpness_every=2, attention="xla")
    metrics = run(examples["hvp_jax"], tmp_path / "hvp", **options)
    assert metrics["steps"] == 4
    assert metrics["eigenvalues"] == sorted(metrics["eigenvalues"], reverse=True)
    assert len(metrics["residuals"]) == 3
    assert {attention: set(costs) for attention, costs in metrics["costs"].items()} == {"xla": {"64"}, "naive": {"64"}}
    assert "64 tokens, naive" in capsys.readouterr().out
    for picture in ("hessian.png", "curves.png", "costs.png"):
        assert (tmp_path / "hvp" / picture).read_bytes().startswith(b"\x89PNG")
