"""Forces and the gradient of a loss of forces on a GPU, in the shapes of interatomic potentials, against float64."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

SHAPES = ["64x32x8x16:key", "64x31x8x16:pair", "1x399x10x64:segments", "1x200x10x64:segments+pair"]


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize(("framework", "who"), [("jax", "jax-flash-jvp"), ("torch", "torch_bridge")])
def test_potentials(framework, who, precision, request, tmp_path, monkeypatch, capsys):
    """The benchmark times only what errs at most twice as much as attention written out."""
    if framework == "torch":
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("PyTorch has no GPU")
        before = torch.get_float32_matmul_precision()
        request.addfinalizer(lambda: torch.set_float32_matmul_precision(before))
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import forces

    arguments = ["--framework", framework, "--precision", precision, "--shapes", *SHAPES, "--contenders", who]
    quick = ["--quick", "--seconds", "0.001", "--matmul-size", "64", "--output", str(tmp_path / "out")]
    assert forces.main([*arguments, *quick]) == 0, capsys.readouterr().out
