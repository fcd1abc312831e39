"""The diffusion transformer of models_jax.py in PyTorch: the same network, initialized alike."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consistency.config import TrainingConfig
from consistency.data import CLASSES, DIGIT_SIZE
from consistency.moving import place_waves, shot_ranges
from consistency.waves import position_waves, time_frequencies
from jax_flash_jvp import visibility
from torch_bridge import scaled_dot_product_attention

AttentionFunction = Callable[..., Tensor]


def naive_attention(query: Tensor, key: Tensor, value: Tensor, key_ranges: Tensor | None = None) -> Tensor:
    """softmax(Q Kᵀ / √d) V as it is written, with logits and weights as whole [length, length] arrays."""
    logits = query @ key.mT
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / np.sqrt(query.shape[-1])
    if key_ranges is not None:
        logits = logits.masked_fill(~visibility.matrix(key_ranges, key.shape[-2]), -torch.inf)
    return torch.softmax(logits, -1).to(value.dtype) @ value


ATTENTIONS: dict[str, AttentionFunction] = {"auto": scaled_dot_product_attention, "naive": naive_attention}


def attention_of(config: TrainingConfig) -> AttentionFunction:
    if config.attention not in ATTENTIONS:
        raise ValueError(f"`attention` must be one of {', '.join(ATTENTIONS)}: got {config.attention}")
    return ATTENTIONS[config.attention]


def to_patches(images: Tensor, patch: int) -> Tensor:
    """[batch, height, width, 1] → [batch, token, patch²]"""
    batch, height, width, _ = images.shape
    grid = images.reshape(batch, height // patch, patch, width // patch, patch)
    return grid.permute(0, 1, 3, 2, 4).reshape(batch, -1, patch**2)


def to_images(patches: Tensor, side: int, patch: int) -> Tensor:
    """The images [batch, height, width, 1] of `to_patches`."""
    grid = patches.reshape(-1, side, side, patch, patch)
    return grid.permute(0, 1, 3, 2, 4).reshape(-1, side * patch, side * patch, 1)


class Linear(nn.Linear):
    """Computes in `dtype`, whatever the input has; the parameters stay float32."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype, zeros: bool = False):
        super().__init__(inputs, outputs)
        self.dtype = dtype
        nn.init.normal_(self.weight, std=0.0 if zeros else inputs**-0.5)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.dtype), self.weight.to(self.dtype), self.bias.to(self.dtype))


class LayerNorm(nn.LayerNorm):
    """Computes in float32 at least: on a GPU the tangent of a bfloat16 one would come out in float32 beside a bfloat16 value."""

    def __init__(self, width: int):
        super().__init__(width, eps=1e-6, elementwise_affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(torch.promote_types(x.dtype, torch.float32))).to(x.dtype)


class TimeEmbedding(nn.Module):
    def __init__(self, width: int, dtype: torch.dtype):
        super().__init__()
        frequencies = torch.tensor(time_frequencies(width // 2), dtype=torch.float32)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.hidden = Linear(2 * len(frequencies), width, dtype)
        self.out = Linear(width, width, dtype)

    def forward(self, time: Tensor) -> Tensor:  # [batch] → [batch, width]
        angles = time[:, None] * self.frequencies
        return self.out(F.silu(self.hidden(torch.cat([torch.sin(angles), torch.cos(angles)], -1))))


class Block(nn.Module):
    """Self-attention and a perceptron, each with its scale, shift and gate from the condition (adaLN-Zero), which is one for
    all tokens, [batch, 1, width], or one for each."""

    def __init__(self, width: int, heads: int, attention: AttentionFunction, dtype: torch.dtype):
        super().__init__()
        self.heads, self.attention = heads, attention
        self.modulation = Linear(width, 6 * width, dtype, zeros=True)
        self.norm = LayerNorm(width)
        self.query_key_value = Linear(width, 3 * width, dtype)
        self.project = Linear(width, width, dtype)
        self.expand = Linear(width, 4 * width, dtype)
        self.contract = Linear(4 * width, width, dtype)

    def forward(self, tokens: Tensor, condition: Tensor, **options: Tensor) -> Tensor:
        modulation = self.modulation(F.silu(condition)).chunk(6, -1)
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = modulation
        tokens = tokens + gate_1 * self._attend(self.norm(tokens) * (1 + scale_1) + shift_1, **options)
        hidden = self.expand(self.norm(tokens) * (1 + scale_2) + shift_2)
        return tokens + gate_2 * self.contract(F.gelu(hidden, approximate="tanh"))

    def _attend(self, tokens: Tensor, **options: Tensor) -> Tensor:
        parts = self.query_key_value(tokens).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        return self.project(self.attention(query, key, value, **options).transpose(1, 2).flatten(-2))


class DiffusionTransformer(nn.Module):
    """Images [batch, height, width, 1], any fixed number of times and a class label → an image of the same shape."""

    def __init__(self, config: TrainingConfig, times: int):
        super().__init__()
        width, dtype = config.width, getattr(torch, config.dtype)
        self.patch = config.patch
        self.side = config.mosaic * DIGIT_SIZE // config.patch
        self.embed_patches = Linear(config.patch**2, width, dtype)
        self.embed_times = nn.ModuleList(TimeEmbedding(width, dtype) for _ in range(times))
        self.embed_class = nn.Embedding(CLASSES, width)
        nn.init.normal_(self.embed_class.weight, std=width**-0.5)
        self.positions = nn.Parameter(torch.tensor(position_waves(self.side, width)))
        attention = attention_of(config)
        self.blocks = nn.ModuleList(Block(width, config.heads, attention, dtype) for _ in range(config.depth))
        self.norm = LayerNorm(width)
        self.modulation = Linear(width, 2 * width, dtype, zeros=True)
        self.out = Linear(width, config.patch**2, torch.float32, zeros=True)

    def forward(self, images: Tensor, times: tuple[Tensor, ...], labels: Tensor) -> Tensor:
        tokens = self.embed_patches(self._to_patches(images))
        tokens = tokens + self._positions().to(tokens.dtype)
        condition = self.embed_class(labels).to(tokens.dtype)
        for embed, time in zip(self.embed_times, times, strict=True):
            condition = condition + embed(time)
        condition = condition[:, None, :]
        for index, block in enumerate(self.blocks):
            tokens = block(tokens, condition, **self._seen_by(index))
        shift, scale = self.modulation(F.silu(condition)).chunk(2, -1)
        return self._to_image(self.out(self.norm(tokens) * (1 + scale) + shift))

    def _positions(self) -> Tensor:
        return self.positions

    def _seen_by(self, block: int) -> dict[str, Tensor]:
        """What a block sees, in keywords of attention."""
        return {}

    def _to_patches(self, images: Tensor) -> Tensor:
        return to_patches(images, self.patch)

    def _to_image(self, patches: Tensor) -> Tensor:
        return to_images(patches, self.side, self.patch)


class VideoTransformer(DiffusionTransformer):
    """Videos [batch, frames, side, side], any fixed number of times and a class label → videos. The tokens of all frames are
    one sequence, frame after frame; of several processes, `part` of `parts` is given its share of the frames. Every second block
    sees the sequence whole, the others each shot alone, as in models_jax.py."""

    def __init__(self, config: TrainingConfig, frames: int, times: int, part: int = 0, parts: int = 1):
        super().__init__(config, times)
        self.frames = frames // parts
        self.first = part * self.frames * self.side**2  # token
        self.positions = nn.Parameter(torch.tensor(place_waves(frames, self.side, config.width)))
        self.register_buffer("key_ranges", torch.tensor(shot_ranges(frames, self.side)), persistent=False)

    def _mine(self, of_tokens: Tensor, axis: int = 0) -> Tensor:
        return of_tokens.narrow(axis, self.first, self.frames * self.side**2)

    def _positions(self) -> Tensor:
        return self._mine(self.positions)

    def _seen_by(self, block: int) -> dict[str, Tensor]:
        return {} if block % 2 else {"key_ranges": self._mine(self.key_ranges, -3)}

    def _to_patches(self, videos: Tensor) -> Tensor:  # → [batch, token, patch²]
        grid = videos.reshape(-1, self.frames, self.side, self.patch, self.side, self.patch)
        return grid.permute(0, 1, 2, 4, 3, 5).reshape(len(videos), -1, self.patch**2)

    def _to_image(self, patches: Tensor) -> Tensor:
        grid = patches.reshape(-1, self.frames, self.side, self.side, self.patch, self.patch)
        size = self.side * self.patch
        return grid.permute(0, 1, 2, 4, 3, 5).reshape(-1, self.frames, size, size)


class FrameTransformer(nn.Module):
    """Noisy frames [batch, frame, height, width, 1], times for each, a class for the first, and clean frames → frames of the
    same shape.  All clean frames stand before all noisy ones in one sequence: a noisy frame sees itself and the clean ones before
    it (teacher forcing), so that one pass trains every frame of a generator that makes one after the other."""

    def __init__(self, config: TrainingConfig, frames: int, times: int):
        super().__init__()
        width, dtype = config.width, getattr(torch, config.dtype)
        self.patch, self.side, self.frames = config.patch, DIGIT_SIZE // config.patch, frames
        ranges = visibility.teacher_forcing(2 * frames * self.side**2, self.side**2)
        self.register_buffer("key_ranges", torch.tensor(ranges), persistent=False)
        self.register_buffer("first", torch.arange(2 * frames) % frames == 0, persistent=False)
        self.embed_patches = Linear(config.patch**2, width, dtype)
        self.embed_times = nn.ModuleList(TimeEmbedding(width, dtype) for _ in range(times))
        self.embed_frame = nn.Parameter(width**-0.5 * torch.randn(2 * frames, width))  # clean ones, then noisy ones
        self.embed_class = nn.Embedding(CLASSES + 1, width)  # the last for frames without a class
        nn.init.normal_(self.embed_class.weight, std=width**-0.5)
        self.positions = nn.Parameter(torch.tensor(position_waves(self.side, width)))
        attention = attention_of(config)
        self.blocks = nn.ModuleList(Block(width, config.heads, attention, dtype) for _ in range(config.depth))
        self.norm = LayerNorm(width)
        self.modulation = Linear(width, 2 * width, dtype, zeros=True)
        self.out = Linear(width, config.patch**2, torch.float32, zeros=True)

    def forward(self, clean: Tensor, noisy: Tensor, times: tuple[Tensor, ...], labels: Tensor) -> Tensor:
        images = torch.cat([clean, noisy], 1)
        tokens = self.embed_patches(to_patches(images.flatten(0, 1), self.patch))
        tokens = (tokens + self.positions.to(tokens.dtype)).unflatten(0, images.shape[:2]).flatten(1, 2)
        classes = torch.where(self.first, labels[:, None].long(), CLASSES)
        condition = (self.embed_class(classes) + self.embed_frame).to(tokens.dtype)
        for embed, time in zip(self.embed_times, times, strict=True):
            time = torch.cat([torch.zeros_like(time), time], 1)  # clean frames are at the end of their flow
            condition = condition + embed(time.flatten()).unflatten(0, time.shape)
        condition = condition.repeat_interleave(self.side**2, 1)
        for block in self.blocks:
            tokens = block(tokens, condition, key_ranges=self.key_ranges)
        shift, scale = self.modulation(F.silu(condition)).chunk(2, -1)
        tokens = (self.norm(tokens) * (1 + scale) + shift).unflatten(1, (2 * self.frames, -1))[:, self.frames :]
        return to_images(self.out(tokens).flatten(0, 1), self.side, self.patch).view(noisy.shape)
