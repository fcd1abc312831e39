"""diffusers under `patch()`: tiny random models, whose native backend calls PyTorch's function."""

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from torch.func import grad, jvp  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

import torch_bridge  # noqa: E402
from torch_oracle import launched, normal  # noqa: E402

TEXT = dict(encoder_hidden_states=normal(2, 5, 12), pooled_projections=normal(2, 12))
TIMES = torch.tensor([0.3, 0.7], dtype=torch.float64)
PLACES = dict(img_ids=torch.zeros(9, 3), txt_ids=torch.zeros(5, 3))
HEADS = dict(num_attention_heads=2, attention_head_dim=8)
MODELS = {  # class, configuration, what is differentiated, what else is given, calls of attention
    "dit": (
        "DiTTransformer2DModel",
        dict(HEADS, in_channels=4, num_layers=2, sample_size=8, patch_size=2, num_embeds_ada_norm=10),
        (2, 4, 8, 8),
        dict(timestep=torch.tensor([3, 7]), class_labels=torch.tensor([1, 2])),
        2,
    ),
    "sd3": (
        "SD3Transformer2DModel",
        dict(
            HEADS, sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=2, joint_attention_dim=12,
            caption_projection_dim=16, pooled_projection_dim=12, pos_embed_max_size=8,
        ),
        (2, 4, 8, 8),
        dict(TEXT, timestep=TIMES),
        2,
    ),
    "flux": (
        "FluxTransformer2DModel",
        dict(
            HEADS, patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, joint_attention_dim=12,
            pooled_projection_dim=12, axes_dims_rope=(2, 2, 4),
        ),
        (2, 9, 4),
        dict(TEXT, timestep=TIMES, **PLACES),
        2,
    ),
    "wan": (  # attention to itself and to a text
        "WanTransformer3DModel",
        dict(
            num_attention_heads=2, attention_head_dim=12, patch_size=(1, 2, 2), in_channels=4, out_channels=4,
            text_dim=12, freq_dim=16, ffn_dim=24, num_layers=1, cross_attn_norm=True, rope_max_seq_len=32,
        ),
        (2, 4, 3, 4, 4),
        dict(encoder_hidden_states=TEXT["encoder_hidden_states"], timestep=torch.tensor([3, 7])),
        2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_patched(name):
    cls, config, shape, given, calls = MODELS[name]
    model = getattr(diffusers, cls)(**config).to(torch.float64).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    x, along = normal(*shape), normal(*shape, seed=1)

    def derivatives():
        predict = lambda x: model(x, **given, return_dict=False)[0]
        return *jvp(predict, (x,), (along,)), *jvp(grad(lambda x: predict(x).sin().sum()), (x,), (along,))

    launched()
    with torch_bridge.patch():
        got = derivatives()
    assert launched() == "D" * 2 * calls + "S" * calls
    with sdpa_kernel(SDPBackend.MATH):
        expected = derivatives()
    assert launched() == ""
    tolerance = 1e-6 if name == "wan" else 1e-10  # whose norms are float32
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * b.abs().max().item())
