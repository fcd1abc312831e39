"""Training steps of the examples' diffusion transformer in PyTorch: MeanFlow, and plain flow matching."""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor
from torch.func import jvp
from torch.nn.attention import SDPBackend

import torch_bridge
import torch_calls as calls
from steps import Prepared, Size, Step

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from consistency.models_torch import ATTENTIONS
from meanflow_torch import Config, MeanFlow

PLAIN = "SDPA cuDNN" if calls.DEVICE == "cuda" else "SDPA"
cudnn = calls.sdpa(SDPBackend.CUDNN_ATTENTION)
ATTENTIONS[PLAIN] = cudnn if calls.DEVICE == "cuda" else F.scaled_dot_product_attention
EAGER = {
    calls.OURS: Step("auto"),
    "naive": Step("naive"),
    f"flow matching, {PLAIN}": Step(PLAIN, jvp=False),
}
COMPILED = {f"{who}, compiled": step._replace(compiled=True) for who, step in EAGER.items()}
GRAPHS = {  # without naive attention, whose graphs would keep its scores in memory
    f"{who}, graphs": step._replace(compiled=True, graphs=True) for who, step in EAGER.items() if who != "naive"
}
CONTENDERS = EAGER | COMPILED | (GRAPHS if calls.DEVICE == "cuda" else {})


class FlowMatching(MeanFlow):
    """u(z, t, t) learns the velocity: no derivative along the flow."""

    def forward(self, x: Tensor, labels: Tensor, e: Tensor, r: Tensor, t: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        along = t[:, None, None, None]
        u = self.average_velocity((1 - along) * x + along * e, t, t, labels)
        loss = (u - (e - x)).square().mean()
        return loss, {"loss": loss.detach()}


def method_of(size: Size, step: Step) -> MeanFlow:
    return (MeanFlow if step.jvp else FlowMatching)(Config(**size.options(), attention=step.attention))


@torch.no_grad()
def drawn(method: MeanFlow, width: int) -> MeanFlow:
    """With parameters none of which is zero, as some are where training begins: that would hide what is behind them."""
    generator = torch.Generator(calls.DEVICE).manual_seed(0)
    for parameter in method.parameters():
        parameter.normal_(std=width**-0.5, generator=generator)
    return method


def compiled(function: Callable, step: Step) -> Callable:
    """As the step asks.  With a JVP in it `patch()` is open: tangents of linear layers and of norms are written out."""
    if step.compiled:
        mode = "reduce-overhead" if step.graphs else None
        function = torch.compile(function, dynamic=False, fullgraph=True, mode=mode)

    def run(*args):
        torch.compiler.cudagraph_mark_step_begin()
        with torch_bridge.patch() if step.jvp else contextlib.nullcontext():
            return function(*args)

    return run


def tensors(size: Size) -> list[Tensor]:
    return [torch.as_tensor(a, device=calls.DEVICE) for a in size.draw()]


def part(size: Size, step: Step, exact: bool = False) -> list[np.ndarray]:
    """Of the part: the loss, what is logged beside it, and the gradient of a block's projection to queries, keys, values."""
    size = size.part()
    with torch.device(calls.DEVICE):
        method = drawn(method_of(size._replace(dtype="float64") if exact else size, step), size.width)
    arrays = tensors(size)
    if exact:
        method, arrays = method.double(), [a.double() if a.is_floating_point() else a for a in arrays]
    torch.compiler.reset()
    loss, metrics = compiled(method, step)(*arrays)
    loss.backward()
    weight = method.network.blocks[0].query_key_value.weight
    return [a.ravel() for a in calls.to_numpy([*metrics.values(), weight.grad])]


class Steps:
    """Of one size.  All contenders train the same parameters, which are in memory once."""

    def __init__(self, size: Size):
        torch.compiler.reset()
        self.size, self.arrays = size, tensors(size)
        with torch.device(calls.DEVICE):
            self.method = drawn(method_of(size, EAGER["naive"]), size.width)
        self.optimizer = torch.optim.AdamW(self.method.parameters(), 1e-4, weight_decay=0.0, fused=True)

    def prepare(self, step: Step) -> Prepared:
        with torch.device("meta"):
            method = method_of(self.size, step)
        for module, owner in zip(method.modules(), self.method.modules(), strict=True):
            module._parameters, module._buffers = owner._parameters, owner._buffers
        run = compiled(method, step)

        def call():
            self.optimizer.zero_grad()
            loss, metrics = run(*self.arrays)
            loss.backward()
            self.optimizer.step()
            return metrics

        attention = self._attention(step)
        try:
            with torch._functorch.config.patch(donated_buffer=True):  # private: as it is where nothing runs twice
                call(), attention()  # compile and tune, whose memory does not count
        finally:
            self.optimizer.zero_grad()
        calls.release()
        calls.allocated()
        call()  # and records graphs, which take no memory anew when they are replayed
        return Prepared(call, attention, calls.peak() / 2**30)

    def _attention(self, step: Step):
        batch, length, width, _, heads, dtype = self.size
        attend, of = ATTENTIONS[step.attention], dict(device=calls.DEVICE, dtype=getattr(torch, dtype))

        def project():  # as one product gives queries, keys and values
            parts = torch.randn(batch, length, 3, heads, width // heads, **of).unbind(2)
            return tuple(a.transpose(1, 2).requires_grad_() for a in parts)

        def forward(x, t_x):
            if not step.jvp:
                return attend(*x), None
            o, t_o = jvp(attend, x, t_x)
            return o, t_o.detach()

        x, t_x, run = project(), project(), compiled(forward, step)
        d_o = torch.randn(batch, length, heads, width // heads, **of).transpose(1, 2)

        def call():
            o, t_o = run(x, t_x)
            return t_o, torch.autograd.grad(o, x, d_o)

        return call
