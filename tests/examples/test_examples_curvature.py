"""The example of curvature: products of flash attention's model are those of eager attention's, and a run resumes."""

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5")

from torch.func import jacrev  # noqa: E402

from torch_oracle import launched, normal  # noqa: E402

pytestmark = pytest.mark.thorough

TINY = dict(width=8, heads=2, depth=1, length=6, samples=2, iterations=4, timed_lengths="8", repeats=1)


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    import curvature_torch

    return curvature_torch


def test_products(example, monkeypatch):
    monkeypatch.setattr(torch, "float32", torch.float64)  # to which transformers casts by this name
    tokens = torch.randint(0, 11, (2, 7), generator=torch.Generator().manual_seed(0))
    made = {a: example.Curvature(example.Config(**TINY), a, 11, 6, torch.float64, "cpu") for a in example.NAMES}
    theta = made["eager"].theta
    assert torch.equal(theta, made["flash"].theta)
    vector = normal(len(theta))
    launched()
    hessian = made["flash"].hessian(tokens)(vector)
    assert launched() == "DS"
    torch.testing.assert_close(hessian, made["eager"].hessian(tokens)(vector), rtol=1e-5, atol=1e-7)
    product = made["flash"].gauss_newton(tokens)(vector)
    assert launched() == "FDB"
    logits = made["eager"].logits(theta, tokens)
    jacobian = jacrev(lambda theta: made["eager"].logits(theta, tokens))(theta).flatten(0, -2)
    p = logits.flatten(0, 1).softmax(-1)
    curved = torch.block_diag(*(torch.diag(row) - row[:, None] * row for row in p)) / len(p)
    torch.testing.assert_close(product, jacobian.T @ (curved @ (jacobian @ vector)), rtol=1e-5, atol=1e-7)


def test_runs_and_resumes(example, tmp_path, capsys):
    def run(**options):
        example.main(example.Config(**TINY | options, output=str(tmp_path)))
        return json.loads((tmp_path / "metrics.json").read_text())

    with pytest.raises(FileNotFoundError, match="`resume` needs iterations"):
        run(resume=True)
    first = run(iterations=2)
    assert len(first["eigenvalues"]["hessian"]) == 2
    resumed = run(resume=True)
    whole = run()
    for name, values in whole["eigenvalues"].items():
        assert len(values) == 4
        np.testing.assert_allclose(resumed["eigenvalues"][name], values, rtol=1e-3, atol=1e-4)
    assert set(whole["costs"]) == {"flash", "eager"}
    assert (tmp_path / "curvature.png").read_bytes().startswith(b"\x89PNG")
    assert "8 characters, eager" in capsys.readouterr().out
