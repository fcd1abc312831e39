"""Modules of PyTorch in a JVP under `patch()` on a GPU, eager and compiled, with gradients through the JVP, against float64."""

import warnings

import pytest

torch = pytest.importorskip("torch")

import torch_bridge  # noqa: E402
from torch_modules import MODULES, gradients, loss_of, module_of, rightly  # noqa: E402

pytestmark = pytest.mark.gpu
ON_THE_CPU = ("RoPE", "Embedding")  # they make tensors there


@pytest.mark.parametrize("name", [name for name in MODULES if not name.startswith(ON_THE_CPU)])
@pytest.mark.parametrize("how", ["eager", "compiled", "graphs"])
def test_module(how, name):
    if how != "eager" and "circular" in name:
        pytest.skip("Inductor is wrong of it, without patch() too")
    torch._dynamo.reset()
    module = module_of(name)
    expected = rightly(lambda: gradients(module, loss_of(module, 0.1)))
    module = torch.nn.Sequential(module, torch.nn.PReLU(init=1.0)).float().cuda()  # a parameter says where inputs go
    run = loss_of(module, 0.1)
    if how != "eager":
        run = torch.compile(run, fullgraph=True, mode="reduce-overhead" if how == "graphs" else None)
    with torch_bridge.patch(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3 if how == "graphs" else 1):
            torch.compiler.cudagraph_mark_step_begin()
            got = [None if a is None else a.double().cpu() for a in gradients(module, run)]
    for a, b in zip(got, expected, strict=False):  # not the added parameter's
        a, b = (torch.zeros((), dtype=torch.float64) if g is None else g for g in (a, b))
        torch.testing.assert_close(a, b, rtol=0, atol=2e-3 * max(1.0, b.abs().max().item()))
