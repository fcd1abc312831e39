"""MeanFlow trainings of docs/meanflow-pytorch.md, by two processes as by one."""

import pytest

torch = pytest.importorskip("torch")

import torch_bridge  # noqa: E402
import torch_group  # noqa: E402
import torch_recipes  # noqa: E402
from torch_oracle import normal  # noqa: E402

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without torch.distributed"),
]
OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)  # which cannot take a sharded block through a JVP
NAMES = [
    name
    for name in (
        *("DDP", "DDP + checkpoints", "DDP + autocast", "DDP, compiled", "DDP, compiled + autocast"),
        *(
            "FSDP2",
            "FSDP2 + checkpoints",
            "FSDP2 of blocks",
            "FSDP2 of blocks + checkpoints",
            "FSDP2 of blocks + autocast",
        ),
    )
    if not (OLD and "blocks" in name)
]


def test_two_processes(tmp_path):
    assert torch_group.spawn(torch_recipes.recipes, 2, tmp_path, NAMES) == []


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus(tmp_path):
    assert torch_group.spawn(torch_recipes.gpu_recipes, 2, tmp_path, NAMES) == []


def test_blocks_are_checkpointed_inside_a_compiled_jvp():
    step = torch_recipes.MeanFlow().double()
    batch = *normal(2, 4, 5, torch_recipes.WIDTH), *torch.sigmoid(normal(2, 4)).sort(0).values
    run = torch_recipes.compiled(step)
    gradients = lambda f: torch.autograd.grad(f(*batch), [*step.parameters()])
    torch.compiler.reset()
    with torch_bridge.patch():
        expected = gradients(step)
        step.net.checkpointed = True
        torch.testing.assert_close(gradients(run), expected)
        with pytest.raises(
            (torch.utils.checkpoint.CheckpointError, NotImplementedError)
        ):  # what the page says of eager
            gradients(step)
