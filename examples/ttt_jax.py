"""Test-time training of a small language model, end to end, in JAX.

    python examples/ttt_jax.py                                    # minutes on two CPU cores
    python examples/ttt_jax.py --size long                        # a GPU: windows of up to 32,768 characters
    python examples/ttt_jax.py --steps 800 --resume               # go on from the last checkpoint

A transformer reads a text in chunks.  After each it takes a gradient step on the loss of that chunk, in the weights of its
perceptrons alone, and reads on with what it got: what attention's window no longer sees is remembered in weights.  Training is
on the loss after such steps, and its gradient goes through them (arXiv:2512.23675), so that attention is differentiated twice:
queries of one chunk, keys of the window before it.  The pictures show what the steps are good for on text that training has not
seen, and what one outer gradient costs as the window grows, next to naive attention.
"""

import dataclasses
import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from consistency.compare import OUT_OF_MEMORY
from consistency.config import option, parse_config
from consistency.test_time import PRESETS, describe_cost, report
from consistency.test_time import Config as SharedConfig
from consistency.text import load_text, spread_batch, training_batch
from consistency.training_jax import device_facts, initial_state, make_optimizer, make_train_step, train
from jax_flash_jvp import dot_product_attention

Weights = Any
Cache = list[tuple[jax.Array, jax.Array]]  # keys and values [window, heads, channels] of each block


@dataclasses.dataclass(frozen=True)
class Config(SharedConfig):
    output: str = option("output/ttt_jax", "folder for pictures, metrics and checkpoints")


def initialize(config: Config, vocabulary: int) -> dict[str, Weights]:
    """`fast` is what inner steps change, `slow` what they leave."""
    random, width = np.random.default_rng(config.seed), config.width
    draw = lambda *shape, gain=1.0: jnp.asarray(gain * shape[0] ** -0.5 * random.standard_normal(shape), jnp.float32)
    attention = lambda: dict(qkv=draw(width, 3 * width), out=draw(width, width, gain=0.5))
    perceptron = lambda: dict(up=draw(width, 4 * width), down=draw(4 * width, width, gain=0.5))
    slow = dict(
        embedding=jnp.asarray(0.5 * random.standard_normal((vocabulary, width)), jnp.float32),
        attention=[attention() for _ in range(config.depth)],
        head=draw(width, vocabulary, gain=0.1),
        log_rate=jnp.asarray(np.log(0.1), jnp.float32),
    )
    return dict(slow=slow, fast=[perceptron() for _ in range(config.depth)])


def norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) + 1e-6).astype(x.dtype)


def rotate(x: jax.Array, first: int) -> jax.Array:
    """Rotary positions, from `first` on, of [length, heads, channels]."""
    half = x.shape[-1] // 2
    angles = (first + jnp.arange(len(x)))[:, None, None] * 1e4 ** (-jnp.arange(half) / half)
    (a, b), (cos, sin) = jnp.split(x, 2, -1), (f(angles).astype(x.dtype) for f in (jnp.cos, jnp.sin))
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def naive_attention(q: jax.Array, k: jax.Array, v: jax.Array, window: int) -> jax.Array:
    """With scores and weights as whole [queries, keys] arrays."""
    i, j = jnp.arange(len(q))[:, None] + len(k) - len(q), jnp.arange(len(k))
    scores = jnp.einsum("qhd,khd->hqk", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where((j <= i) & (j > i - window), scores, -jnp.inf))
    return jnp.einsum("hqk,khd->qhd", weights.astype(v.dtype), v)


def attend(name: str, q: jax.Array, k: jax.Array, v: jax.Array, window: int) -> jax.Array:
    if name == "naive":
        return naive_attention(q, k, v, window)
    options = dict(is_causal=True, causal_alignment="lower_right", local_window_size=(window - 1, 0))
    return dot_product_attention(q, k, v, **options, implementation=None if name == "auto" else name)


def read(config: Config, slow: Weights, fast: Weights, cache: Cache, first: int, tokens: jax.Array):
    """The mean loss of a chunk, [chunk + 1] characters from place `first` on, and the cache for the next."""
    x, kept = slow["embedding"][tokens[:-1]].astype(config.dtype), []
    for attention, perceptron, past in zip(slow["attention"], fast, cache, strict=True):
        qkv = (norm(x) @ attention["qkv"].astype(x.dtype)).reshape(len(x), 3, config.heads, -1)
        q, k, v = rotate(norm(qkv[:, 0]), first), rotate(norm(qkv[:, 1]), first), qkv[:, 2]
        k, v = (jnp.concatenate(pair) for pair in zip(past, (k, v), strict=True))
        kept.append((k[-config.window :], v[-config.window :]))
        o = attend(config.attention, q, k, v, config.window)
        x = x + o.reshape(len(x), -1) @ attention["out"].astype(x.dtype)
        x = x + jax.nn.silu(norm(x) @ perceptron["up"].astype(x.dtype)) @ perceptron["down"].astype(x.dtype)
    logits = (norm(x) @ slow["head"].astype(x.dtype)).astype(jnp.float32)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[1:, None], -1)), kept


def read_on(config: Config, weights: dict[str, Weights], tokens: jax.Array, adapt: bool = True) -> jax.Array:
    """The losses of the chunks of one sequence, each before the inner step on it."""
    slow, fast = weights["slow"], weights["fast"]
    nothing = jnp.zeros((0, config.heads, config.width // config.heads), config.dtype)
    cache, losses = [(nothing, nothing)] * config.depth, []
    for first in range(0, len(tokens) - 1, config.chunk):
        loss = functools.partial(read, config, slow)
        inner = jax.value_and_grad(loss, has_aux=True)
        (value, cache), gradient = inner(fast, cache, first, tokens[first : first + config.chunk + 1])
        losses.append(value)
        if adapt:
            fast = jax.tree.map(lambda w, g: w - jnp.exp(slow["log_rate"]) * g, fast, gradient)
    return jnp.stack(losses)


def measure_cost(config: Config, attention: str, window: int, vocabulary: int) -> dict[str, float] | None:
    """Of one outer gradient, through one inner step, on one sequence of a full window and a chunk."""
    config = dataclasses.replace(config, attention=attention, window=window, chunk=window)
    weights = initialize(config, vocabulary)
    tokens = jnp.arange(2 * window + 1) % vocabulary
    gradient = jax.jit(jax.grad(lambda weights, tokens: read_on(config, weights, tokens).mean()))
    try:
        compiled = gradient.lower(weights, tokens).compile()
        jax.block_until_ready(compiled(weights, tokens))
        times = []
        for _ in range(config.repeats):
            clock = time.perf_counter()
            jax.block_until_ready(compiled(weights, tokens))
            times.append(1e3 * (time.perf_counter() - clock))
    except jax.errors.JaxRuntimeError as error:
        if not any(sign.decode() in str(error) for sign in OUT_OF_MEMORY):
            raise
        return None
    return dict(milliseconds=statistics.median(times), mib=compiled.memory_analysis().temp_size_in_bytes / 2**20)


def main(config: Config) -> None:
    text, attentions = load_text(), config.attention.split(",")
    config = dataclasses.replace(config, attention=attentions[0])

    def loss(weights: dict[str, Weights], key: jax.Array, tokens: jax.Array):
        mean = jax.vmap(functools.partial(read_on, config, weights))(tokens).mean()
        return mean, {"loss": mean, "inner_rate": jnp.exp(weights["slow"]["log_rate"])}

    optimizer = make_optimizer(config)
    state, history, steps_per_second = train(
        config,
        initial_state(initialize(config, text.vocabulary), optimizer),
        make_train_step(loss, optimizer, config),
        lambda step: (training_batch(text.train, config.batch, config.length, config.seed, step),),
        may_be_done=True,
    )
    held_out = spread_batch(text.held_out, config.samples, config.length)
    losses = [
        jax.jit(jax.vmap(functools.partial(read_on, config, state.parameters, adapt=adapt)))(held_out).mean(0)
        for adapt in (True, False)
    ]
    costs: dict[str, dict[int, dict[str, float] | None]] = {}
    for window in map(int, config.timed_windows.split(",")):
        for attention in dict.fromkeys([*attentions, *(["naive"] if config.compare else [])]):
            cost = costs.setdefault(attention, {})[window] = measure_cost(config, attention, window, text.vocabulary)
            print(describe_cost(window, attention, cost), flush=True)
    facts = dict(steps=int(state.step), steps_per_second=steps_per_second, **device_facts())
    report(config, history, *map(np.asarray, losses), costs, **facts)


if __name__ == "__main__":
    main(parse_config(Config, PRESETS))
