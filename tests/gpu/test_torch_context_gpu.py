"""One sequence over two GPUs: the kernels of parts, the transfers between GPUs, and models, against one GPU."""

import pytest

torch = pytest.importorskip("torch")

import torch_group  # noqa: E402
import torch_group_programs  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
SIZES = torch_group.Sizes(queries=512, keys=768, channels=64)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_feature(tmp_path, dtype):
    assert torch_group.spawn(torch_group.gpu_cases, 2, tmp_path, [*SIZES.cases()], SIZES, dtype) == []


def test_models(tmp_path):
    assert torch_group.spawn(torch_group_programs.gpu_models, 2, tmp_path) == []
