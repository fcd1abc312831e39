"""A MeanFlow step of models of diffusers and transformers, unchanged under `patch()`: eager, and compiled without a break."""

import warnings

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

from torch._dynamo.utils import counters  # noqa: E402
from torch.func import jvp  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.utils._pytree import tree_map_only  # noqa: E402

import torch_bridge  # noqa: E402
from torch_oracle import normal  # noqa: E402

HEADS = dict(num_attention_heads=2, attention_head_dim=8, num_layers=1)
PATCHES = dict(HEADS, sample_size=4, patch_size=2, in_channels=4, out_channels=4)
CROSS = dict(cross_attention_dim=16, caption_channels=12)
TEXT = dict(encoder_hidden_states=normal(2, 5, 12))
MODELS = {  # class, configuration, what else the model is given
    "dit": ("DiTTransformer2DModel", PATCHES | dict(num_embeds_ada_norm=10), dict(class_labels=torch.tensor([1, 2]))),
    "sd3": (
        "SD3Transformer2DModel",
        PATCHES
        | dict(joint_attention_dim=12, caption_projection_dim=16, pooled_projection_dim=12, pos_embed_max_size=4),
        TEXT | dict(pooled_projections=normal(2, 12)),
    ),
    "pixart": (
        "PixArtTransformer2DModel",
        PATCHES | CROSS | dict(norm_type="ada_norm_single", num_embeds_ada_norm=10),
        TEXT | dict(added_cond_kwargs=dict(resolution=None, aspect_ratio=None)),
    ),
    "sana": (
        "SanaTransformer2DModel",
        PATCHES | CROSS | dict(num_cross_attention_heads=2, cross_attention_head_dim=8),
        TEXT,
    ),
    "unet": (
        "UNet2DConditionModel",
        dict(
            sample_size=4, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(8, 16),
            norm_num_groups=4, cross_attention_dim=12, attention_head_dim=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        ),
        TEXT,
    ),
}  # fmt: skip
SMALL = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
NAMED = {
    "vit": ("ViTModel", dict(SMALL, image_size=4, patch_size=2, num_channels=4), lambda z: dict(pixel_values=z)),
    "llama": ("LlamaModel", dict(SMALL, vocab_size=8), lambda z: dict(inputs_embeds=z.flatten(2))),
}


def model_of(name, device="cpu", dtype=torch.float64):
    if name in MODELS:
        cls, config, given = MODELS[name]
        model = getattr(diffusers, cls)(**config)
        given = tree_map_only(torch.Tensor, lambda a: a.to(device, dtype if a.is_floating_point() else None), given)
        predict = lambda z, t: model(z, timestep=t, **given, return_dict=False)[0]
    else:
        cls, config, inputs = NAMED[name]
        cls = getattr(transformers, cls)
        model = cls(cls.config_class(**config))
        predict = lambda z, t: model(**inputs(z * (1 + t[:, None, None, None]))).last_hidden_state
    model.to(device, dtype).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model, predict


def loss_of(predict):
    def loss(data, noise, t):
        z = torch.lerp(data, noise, t[:, None, None, None])
        u, t_u = jvp(predict, (z, t), (noise - data, torch.ones_like(t)))
        return (u + t_u.detach()).square().mean()

    return loss


def gradients(model, run, seed=0):
    like = next(model.parameters())
    both = normal(2, 2, 4, 4, 4, seed=seed).to(like)
    loss = run(*both.unbind(), torch.tensor([0.25, 0.5]).to(like))
    parameters = torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)
    return [loss.detach().clone(), *(torch.zeros(()).to(like) if a is None else a for a in parameters)]


def assert_close(got, expected, tolerance):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * max(1, b.abs().max().item()), check_dtype=False)


CHEAP = ["sd3", "vit"]


@pytest.mark.parametrize(
    "name", [n if n in CHEAP else pytest.param(n, marks=pytest.mark.thorough) for n in (*MODELS, *NAMED)]
)
def test_step(name):
    torch._dynamo.reset()
    counters.clear()
    model, predict = model_of(name)
    loss = loss_of(predict)
    with sdpa_kernel(SDPBackend.MATH):
        expected = gradients(model, loss)
    with torch_bridge.patch(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_close(gradients(model, loss), expected, 1e-9)
        run = torch.compile(loss, backend="aot_eager")
        assert_close(gradients(model, run), expected, 1e-9)
        compiled = counters["stats"]["unique_graphs"]
        for seed in (1, 2):
            assert_close(gradients(model, run, seed), gradients(model, loss, seed), 1e-9)
    assert not counters["graph_break"]
    assert compiled == counters["stats"]["unique_graphs"] == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*MODELS, *NAMED])
def test_step_in_graphs(name):
    """Compiled once, recorded as CUDA graphs and replayed."""
    torch._dynamo.reset()
    counters.clear()
    model, predict = model_of(name, "cuda", torch.float32)
    loss = loss_of(predict)
    with torch_bridge.patch(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = torch.compile(loss, mode="reduce-overhead")
        for seed in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            assert_close(gradients(model, run, seed), gradients(model, loss, seed), 1e-3)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["inductor"]["cudagraph_skips"]
