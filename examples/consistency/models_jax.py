"""A diffusion transformer (Peebles and Xie 2023, arXiv:2212.09748) in Flax, with any attention."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from consistency.config import TrainingConfig
from consistency.data import CLASSES, DIGIT_SIZE
from consistency.moving import place_waves, shot_ranges
from consistency.waves import position_waves, time_frequencies
from jax_flash_jvp import visibility
from jax_flash_jvp.flax import attention_fn

AttentionFunction = Callable[..., jax.Array]


def naive_attention_fn(
    query: jax.Array, key: jax.Array, value: jax.Array, *, key_ranges: Any = None, **_: object
) -> jax.Array:
    """softmax(Q Kᵀ / √d) V as it is written, with logits and weights as whole [length, length] arrays."""
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=dtype)
    seen = None if key_ranges is None else visibility.matrix(key_ranges, key.shape[1])
    weights = jax.nn.softmax(logits / np.sqrt(query.shape[-1]), axis=-1, where=seen).astype(value.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


ATTENTIONS: dict[str, AttentionFunction] = {"naive": naive_attention_fn}  # beside this package's, by implementation


def make_attention_fn(name: str, **options: Any) -> AttentionFunction:
    if name in ATTENTIONS:
        return functools.partial(ATTENTIONS[name], **options)
    return functools.partial(attention_fn, implementation=None if name == "auto" else name, **options)


def to_patches(images: jax.Array, patch: int) -> jax.Array:
    """[batch, height, width, 1] → [batch, token, patch²]"""
    batch, height, width, _ = images.shape
    grid = images.reshape(batch, height // patch, patch, width // patch, patch)
    return grid.transpose(0, 1, 3, 2, 4).reshape(batch, -1, patch**2)


def to_images(patches: jax.Array, side: int, patch: int) -> jax.Array:
    """The images [batch, height, width, 1] of `to_patches`."""
    grid = patches.reshape(-1, side, side, patch, patch)
    return grid.transpose(0, 1, 3, 2, 4).reshape(-1, side * patch, side * patch, 1)


class TimeEmbedding(nnx.Module):
    def __init__(self, width: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.frequencies = tuple(time_frequencies(width // 2).tolist())
        self.hidden = nnx.Linear(2 * len(self.frequencies), width, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(width, width, dtype=dtype, rngs=rngs)

    def __call__(self, time: jax.Array) -> jax.Array:  # [batch] → [batch, width]
        angles = time[:, None] * jnp.array(self.frequencies)
        waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        return self.out(nnx.silu(self.hidden(waves)))


class Block(nnx.Module):
    """Self-attention and a perceptron, each with its scale, shift and gate from the condition (adaLN-Zero), which is one for
    all tokens, [batch, 1, width], or one for each."""

    def __init__(self, width: int, heads: int, attention: AttentionFunction, dtype: jnp.dtype, rngs: nnx.Rngs):
        norm = functools.partial(nnx.LayerNorm, width, use_bias=False, use_scale=False, dtype=dtype, rngs=rngs)
        linear = functools.partial(nnx.Linear, dtype=dtype, rngs=rngs)
        self.modulation = linear(width, 6 * width, kernel_init=nnx.initializers.zeros)
        self.norm_attention = norm()
        self.attention = nnx.MultiHeadAttention(
            heads, width, dtype=dtype, decode=False, attention_fn=attention, rngs=rngs
        )
        self.norm_perceptron = norm()
        self.expand = linear(width, 4 * width)
        self.contract = linear(4 * width, width)

    def __call__(self, tokens: jax.Array, condition: jax.Array) -> jax.Array:
        modulation = jnp.split(self.modulation(nnx.silu(condition)), 6, axis=-1)
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = modulation
        tokens = tokens + gate_1 * self.attention(self.norm_attention(tokens) * (1 + scale_1) + shift_1)
        hidden = self.expand(self.norm_perceptron(tokens) * (1 + scale_2) + shift_2)
        return tokens + gate_2 * self.contract(nnx.gelu(hidden))


class DiffusionTransformer(nnx.Module):
    """Images, any fixed number of times and a class label → an image of the same shape."""

    def __init__(self, config: TrainingConfig, times: int, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        width = config.width
        self.patch = config.patch
        self.side = config.mosaic * DIGIT_SIZE // config.patch
        linear = functools.partial(nnx.Linear, dtype=dtype, rngs=rngs)
        attention = make_attention_fn(config.attention)
        self.embed_patches = linear(config.patch**2, width)
        self.embed_times = nnx.List(TimeEmbedding(width, dtype, rngs) for _ in range(times))
        self.embed_class = nnx.Embed(CLASSES, width, dtype=dtype, rngs=rngs)
        self.positions = nnx.Param(jnp.asarray(position_waves(self.side, width)))
        self.blocks = nnx.List(Block(width, config.heads, attention, dtype, rngs) for _ in range(config.depth))
        self.norm = nnx.LayerNorm(width, use_bias=False, use_scale=False, dtype=dtype, rngs=rngs)
        self.modulation = linear(width, 2 * width, kernel_init=nnx.initializers.zeros)
        self.out = nnx.Linear(width, config.patch**2, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, images: jax.Array, times: tuple[jax.Array, ...], labels: jax.Array) -> jax.Array:
        tokens = self.embed_patches(self._to_tokens(images))
        tokens = tokens + self.positions[...].astype(tokens.dtype)
        condition = self.embed_class(labels)
        for embed, time in zip(self.embed_times, times, strict=True):
            condition = condition + embed(time)
        condition = condition[:, None, :]
        for block in self.blocks:
            tokens = block(tokens, condition)
        shift, scale = jnp.split(self.modulation(nnx.silu(condition)), 2, axis=-1)
        tokens = self.norm(tokens) * (1 + scale) + shift
        return self._to_images(self.out(tokens.astype(images.dtype)))

    def _to_tokens(self, images: jax.Array) -> jax.Array:
        return to_patches(images, self.patch)

    def _to_images(self, patches: jax.Array) -> jax.Array:
        return to_images(patches, self.side, self.patch)


class FrameTransformer(nnx.Module):
    """Noisy frames [batch, frame, height, width, 1], times for each, a class for the first, and clean frames → frames of the
    same shape.  All clean frames stand before all noisy ones in one sequence: a noisy frame sees itself and the clean ones before
    it (teacher forcing), so that one pass trains every frame of a generator that makes one after the other."""

    def __init__(self, config: TrainingConfig, frames: int, times: int, rngs: nnx.Rngs):
        width, dtype = config.width, jnp.dtype(config.dtype)
        self.patch, self.side, self.frames = config.patch, DIGIT_SIZE // config.patch, frames
        ranges = visibility.teacher_forcing(2 * frames * self.side**2, self.side**2)
        attention = make_attention_fn(config.attention, key_ranges=ranges)
        linear = functools.partial(nnx.Linear, dtype=dtype, rngs=rngs)
        self.embed_patches = linear(config.patch**2, width)
        self.embed_times = nnx.List(TimeEmbedding(width, dtype, rngs) for _ in range(times))
        self.embed_frame = nnx.Embed(2 * frames, width, dtype=dtype, rngs=rngs)  # clean ones, then noisy ones
        self.embed_class = nnx.Embed(CLASSES + 1, width, dtype=dtype, rngs=rngs)  # the last for frames without a class
        self.positions = nnx.Param(jnp.asarray(position_waves(self.side, width)))
        self.blocks = nnx.List(Block(width, config.heads, attention, dtype, rngs) for _ in range(config.depth))
        self.norm = nnx.LayerNorm(width, use_bias=False, use_scale=False, dtype=dtype, rngs=rngs)
        self.modulation = linear(width, 2 * width, kernel_init=nnx.initializers.zeros)
        self.out = nnx.Linear(width, config.patch**2, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(
        self, clean: jax.Array, noisy: jax.Array, times: tuple[jax.Array, ...], labels: jax.Array
    ) -> jax.Array:
        batch, both = len(noisy), 2 * self.frames
        images = jnp.concatenate([clean, noisy], axis=1)
        tokens = self.embed_patches(to_patches(images.reshape(-1, *images.shape[2:]), self.patch))
        tokens = (tokens + self.positions[...].astype(tokens.dtype)).reshape(batch, -1, tokens.shape[-1])
        first = np.arange(both) % self.frames == 0
        condition = self.embed_class(jnp.where(first, labels[:, None], CLASSES)) + self.embed_frame(np.arange(both))
        for embed, time in zip(self.embed_times, times, strict=True):
            time = jnp.concatenate([jnp.zeros_like(time), time], axis=1)  # clean frames are at the end of their flow
            condition = condition + embed(time.reshape(-1)).reshape(condition.shape)
        condition = condition.repeat(self.side**2, axis=1)
        for block in self.blocks:
            tokens = block(tokens, condition)
        shift, scale = jnp.split(self.modulation(nnx.silu(condition)), 2, axis=-1)
        noisy_tokens = (self.norm(tokens) * (1 + scale) + shift).reshape(batch, both, self.side**2, -1)[
            :, self.frames :
        ]
        patches = self.out(noisy_tokens.astype(images.dtype))
        return to_images(patches.reshape(batch * self.frames, self.side**2, -1), self.side, self.patch).reshape(
            noisy.shape
        )


class VideoTransformer(DiffusionTransformer):
    """Videos [batch, frames, side, side], any fixed number of times and a class label → a video. The tokens of all frames
    are one sequence, frame after frame, so that devices that share the frames share the sequence. Every second block sees it
    whole, the others each shot alone, without which long videos are not learnt (docs/tutorials/index.md)."""

    def __init__(self, config: TrainingConfig, frames: int, times: int, rngs: nnx.Rngs):
        super().__init__(config, times, rngs)
        self.frames = frames
        self.positions = nnx.Param(jnp.asarray(place_waves(frames, self.side, config.width)))
        of_shots = make_attention_fn(config.attention, key_ranges=shot_ranges(frames, self.side))
        for block in self.blocks[::2]:
            block.attention.attention_fn = of_shots

    def _to_tokens(self, images: jax.Array) -> jax.Array:
        grid = images.reshape(-1, self.frames, self.side, self.patch, self.side, self.patch)
        return grid.transpose(0, 1, 2, 4, 3, 5).reshape(len(images), -1, self.patch**2)

    def _to_images(self, patches: jax.Array) -> jax.Array:
        grid = patches.reshape(-1, self.frames, self.side, self.side, self.patch, self.patch)
        size = self.side * self.patch
        return grid.transpose(0, 1, 2, 4, 3, 5).reshape(-1, self.frames, size, size)


class EncoderBlock(nnx.Module):
    """Self-attention and a perceptron, each on normalized tokens and added to them."""

    def __init__(self, config: TrainingConfig, rngs: nnx.Rngs):
        width, dtype = config.width, jnp.dtype(config.dtype)
        attention = make_attention_fn(config.attention)
        self.norm_attention = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            config.heads, width, dtype=dtype, decode=False, attention_fn=attention, rngs=rngs
        )
        self.norm_perceptron = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.expand = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.contract = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        tokens = tokens + self.attention(self.norm_attention(tokens))
        return tokens + self.contract(nnx.gelu(self.expand(self.norm_perceptron(tokens))))


class Classifier(nnx.Module):
    """A vision transformer (Dosovitskiy et al. 2021, arXiv:2010.11929): images → a logit for each class."""

    def __init__(self, config: TrainingConfig, rngs: nnx.Rngs):
        side = config.mosaic * DIGIT_SIZE // config.patch
        self.patch = config.patch
        self.embed_patches = nnx.Linear(config.patch**2, config.width, dtype=jnp.dtype(config.dtype), rngs=rngs)
        self.positions = nnx.Param(jnp.asarray(position_waves(side, config.width)))
        self.blocks = nnx.List(EncoderBlock(config, rngs) for _ in range(config.depth))
        self.norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.out = nnx.Linear(config.width, CLASSES, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        tokens = self.embed_patches(to_patches(images, self.patch))
        tokens = tokens + self.positions[...].astype(tokens.dtype)
        for block in self.blocks:
            tokens = block(tokens)
        return self.out(self.norm(tokens.mean(axis=1)))
