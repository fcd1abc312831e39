"""MeanFlow trainings of docs/meanflow-pytorch.md, by two processes as by one."""

import pytest

torch = pytest.importorskip("torch")

import torch_group  # noqa: E402
import torch_recipes  # noqa: E402

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
