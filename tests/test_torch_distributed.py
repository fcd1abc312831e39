"""DDP and FSDP2 with a JVP in the step, on two processes: gradients as of one process with the whole batch."""

import collections
import datetime
import os
import traceback

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from test_torch_oracle import Model, batch, by_func, by_level, gradients, launched, loss, naive  # noqa: E402

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch is built without torch.distributed")


class Step(nn.Module):
    """The JVP is taken inside forward, so that the wrapper sees one ordinary call."""

    def __init__(self, derivative):
        super().__init__()
        self.net, self.derivative = Model(), derivative

    def forward(self, through, *data):
        return loss(self.net, self.derivative, through, data)


def sharded(derivative, blocks):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    step, mesh = Step(derivative), init_device_mesh("cpu", (2,))
    for block in step.net.blocks if blocks else ():
        fully_shard(block, mesh=mesh)
    return fully_shard(step, mesh=mesh)


def call(module, derivative, through, data):
    return module(through, *data)


def call_inside(module, derivative, through, data):
    return loss(module, derivative, through, data)


# FSDP2 of each block hands zeros on for the absent cotangent of the tangent, which costs one dual backward (S)
Case = collections.namedtuple("Case", "module run stopped through error", defaults=("DDBB", "DDSS", None))
CASES = {
    "DDP-func": Case(lambda: DistributedDataParallel(Step(by_func)), call),
    "DDP-level": Case(lambda: DistributedDataParallel(Step(by_level)), call),
    "DDP-jvp-of-the-wrapper": Case(lambda: DistributedDataParallel(Model()), call_inside),
    "DDP-compiled": Case(lambda: torch.compile(DistributedDataParallel(Step(by_func)), backend="aot_eager"), call),
    "FSDP2-func": Case(lambda: sharded(by_func, False), call),
    "FSDP2-level": Case(lambda: sharded(by_level, False), call),
    "FSDP2-blocks-func": Case(lambda: sharded(by_func, True), call, "DDBS"),
    "FSDP2-blocks-level": Case(lambda: sharded(by_level, True), call, error="jvp is not returning a view"),
}


def run_case(name, through, data):
    """None, or what went wrong."""
    case = CASES[name]
    expected = gradients(Model(naive), lambda net: loss(net, by_func, through, batch()))[1:]
    launched()
    module = case.module()
    try:
        case.run(module, by_func, through, data).backward()
    except RuntimeError as error:
        if case.error and case.error in str(error):
            return None
        raise
    if case.error:
        return f"{name}: did not raise"
    seen, wanted = launched(), case.through if through else case.stopped
    got = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in module.parameters()]
    error = max((a - b).abs().max().item() for a, b in zip(got, expected, strict=True))
    return None if error < 1e-12 and seen == wanted else f"{name} through={through}: error {error}, launched {seen}"


def worker(rank, folder):
    torch.set_num_threads(1)
    failures = []
    limit = datetime.timedelta(minutes=2)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2, timeout=limit)
    data = [a[2 * rank : 2 * rank + 2] for a in batch()]
    for name in CASES:
        for through in (False, True):
            torch.compiler.reset()
            try:
                problem = run_case(name, through, data)
            except Exception:
                problem = f"{name} through={through}: {traceback.format_exc()}"
            if problem:
                failures.append(f"rank {rank}, {problem}")
            dist.barrier()
    (folder / f"failures-{rank}").write_text("\n".join(failures))
    dist.destroy_process_group()


def test_two_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
    torch.multiprocessing.spawn(worker, (tmp_path,), nprocs=2)
    assert [(tmp_path / f"failures-{rank}").read_text() for rank in range(2)] == ["", ""]
