"""One sequence over two GPUs: the kernels of parts, the transfers between GPUs, and models, against one GPU."""

import pytest

torch = pytest.importorskip("torch")

import torch_group  # noqa: E402
import torch_group_programs  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
SIZES = torch_group.Sizes(queries=512, keys=768, channels=64)


# each compiles kernels of its own: what a strategy or an order does to a feature is tried where it differs
CASES = [
    *(f"{name}/ring/contiguous" for name, case in SIZES.cases().items() if not case.arguments.get("is_causal")),
    *(f"{name}/ring/zigzag" for name, case in SIZES.cases().items() if case.arguments.get("is_causal")),
    *(f"{name}/ulysses" for name in ("causal", "mask-of-keys", "sinks", "dropout")),
    *(f"{name}/all_gather/{order}" for name, order in (("causal", "zigzag"), ("bias", "contiguous"))),
    "causal/ring/contiguous",
]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, "bfloat16") for case in CASES), ("causal/ring/zigzag", "float16"), ("causal/ring/zigzag", "float32")],
)
def test_every_feature(tmp_path, case, dtype):
    assert torch_group.spawn(torch_group.gpu_cases, 2, tmp_path, [case], SIZES, dtype) == []


def test_models(tmp_path):
    assert torch_group.spawn(torch_group_programs.gpu_models, 2, tmp_path) == []
