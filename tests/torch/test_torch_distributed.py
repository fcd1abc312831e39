"""DDP and FSDP2 with a JVP in the step, on two processes, or GPUs: gradients as of one process with the whole batch."""

import collections
import datetime
import os
import re
import traceback

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from torch_oracle import Model, batch, by_func, by_level, gradients, launched, loss, naive  # noqa: E402

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not dist.is_available(), reason="torch is built without torch.distributed"),
]


class Step(nn.Module):
    """The JVP is taken inside forward, so that the wrapper sees one ordinary call."""

    def __init__(self, derivative):
        super().__init__()
        self.net, self.derivative = Model(), derivative

    def forward(self, through, *data):
        return loss(self.net, self.derivative, through, data)


def sharded(step, blocks=False):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(next(step.parameters()).device.type, (2,))
    for block in step.net.blocks if blocks else ():
        fully_shard(block, mesh=mesh)
    return fully_shard(step, mesh=mesh)


def call(module, derivative, through, data):
    return module(through, *data)


def call_inside(module, derivative, through, data):
    return loss(module, derivative, through, data)


# FSDP2 of each block hands zeros on for the absent cotangent of the tangent, which costs one dual backward (S); PyTorch 2.11
# cannot take it through a JVP at all
INNER = "jvp is not returning a view|must implement the jvp function|Cannot access storage of TensorWrapper"
OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
Case = collections.namedtuple("Case", "wrap module run stopped through error", defaults=(call, "DDBB", "DDSS", None))
CASES = {
    "DDP-func": Case(DistributedDataParallel, lambda: Step(by_func)),
    "DDP-level": Case(DistributedDataParallel, lambda: Step(by_level)),
    "DDP-jvp-of-the-wrapper": Case(DistributedDataParallel, Model, call_inside),
    "DDP-compiled": Case(
        lambda step: torch.compile(DistributedDataParallel(step), backend="aot_eager"), lambda: Step(by_func)
    ),
    "FSDP2-func": Case(sharded, lambda: Step(by_func)),
    "FSDP2-level": Case(sharded, lambda: Step(by_level)),
    "FSDP2-blocks-func": Case(
        lambda step: sharded(step, True), lambda: Step(by_func), stopped="DDBS", error=INNER if OLD else None
    ),
    "FSDP2-blocks-level": Case(lambda step: sharded(step, True), lambda: Step(by_level), error=INNER),
}


def run_case(name, through, data):
    """None, or what went wrong.  On GPUs in float32, which the kernels serve."""
    case, like = CASES[name], data[0]
    expected = gradients(Model(naive), lambda net: loss(net, by_func, through, batch()))[1:]
    launched()
    module = case.wrap(case.module().to(like.device, like.dtype))
    try:
        case.run(module, by_func, through, data).backward()
    except RuntimeError as error:
        if case.error and re.search(case.error, str(error)):
            return None
        raise
    if case.error:
        return f"{name}: did not raise"
    seen, wanted = launched(), case.through if through else case.stopped
    got = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in module.parameters()]
    error = max((a.double().cpu() - b).abs().max().item() for a, b in zip(got, expected, strict=True))
    fine = error < (1e-5 if like.is_cuda else 1e-12) and seen == wanted
    return None if fine else f"{name} through={through}: error {error}, launched {seen}"


def worker(rank, backend, folder):
    torch.set_num_threads(1)
    failures = []
    to = dict(device="cpu")
    if backend == "nccl":
        torch.cuda.set_device(rank)
        to = dict(device=f"cuda:{rank}", dtype=torch.float32)
    limit = datetime.timedelta(minutes=2)
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2, timeout=limit)
    data = [a[2 * rank : 2 * rank + 2].to(**to) for a in batch()]
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


def run_on_two(backend, folder):
    torch.multiprocessing.spawn(worker, (backend, folder), nprocs=2)
    assert [(folder / f"failures-{rank}").read_text() for rank in range(2)] == ["", ""]


def test_two_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
    run_on_two("gloo", tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus(tmp_path):
    run_on_two("nccl", tmp_path)
