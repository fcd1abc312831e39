"""Training steps of the examples' diffusion transformer in JAX: MeanFlow, and plain flow matching."""

import contextlib
import functools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jax_calls as calls
from measure import Case
from steps import Prepared, Size, Step

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from consistency import models_jax
from meanflow_jax import Config, MeanFlow

PLAIN = "cuDNN" if jax.default_backend() == "gpu" else "XLA"
models_jax.ATTENTIONS[PLAIN] = lambda q, k, v, **_: jax.nn.dot_product_attention(q, k, v, implementation=PLAIN.lower())
CONTENDERS = {
    calls.OURS: Step("auto"),
    "naive": Step("naive"),
    f"flow matching, {PLAIN}": Step(PLAIN, jvp=False),
}


class FlowMatching(MeanFlow):
    """u(z, t, t) learns the velocity: no derivative along the flow."""

    def objective(self, parameters, x, labels, e, r, t):
        along = t[:, None, None, None]
        u = self.average_velocity(parameters, (1 - along) * x + along * e, t, t, labels)
        loss = jnp.mean((u - (e - x)) ** 2)
        return loss, {"loss": loss}


def method_of(size: Size, step: Step) -> tuple[MeanFlow, nnx.State]:
    """And the shapes of its parameters."""
    config = Config(**size.options(), attention=step.attention)
    network = nnx.eval_shape(lambda: models_jax.DiffusionTransformer(config, times=2, rngs=nnx.Rngs(0)))
    graph, shapes = nnx.split(network)
    return (MeanFlow if step.jvp else FlowMatching)(config, graph), shapes


def draw(shapes: nnx.State, width: int) -> nnx.State:
    """Parameters, none of them zero, as some are where training begins: that would hide what is behind them."""
    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    drawn = [width**-0.5 * jax.random.normal(key, a.shape, a.dtype) for key, a in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, drawn)


def part(size: Size, step: Step, exact: bool = False) -> list[np.ndarray]:
    """Of the part: the loss, what is logged beside it, and the gradient of a block's projections around attention."""
    size = size.part()
    with jax.enable_x64(True) if exact else contextlib.nullcontext():
        method, shapes = method_of(size._replace(dtype="float64") if exact else size, step)
        parameters, arrays = draw(shapes, size.width), size.draw()
        if exact:
            parameters, arrays = jax.tree.map(
                lambda a: jnp.asarray(a, jnp.float64) if a.dtype == jnp.float32 else a, (parameters, arrays)
            )
        gradient, metrics = jax.jit(jax.grad(method.objective, has_aux=True))(parameters, *arrays)
        of_attention = jax.tree.leaves(gradient["blocks"][0]["attention"])
        return [*map(flat, metrics.values()), np.concatenate([flat(a) for a in of_attention])]


def flat(a: jax.Array) -> np.ndarray:
    return np.asarray(a, np.float64).ravel()


class Steps:
    """Of one size.  All contenders train the same parameters, which are in memory once."""

    def __init__(self, size: Size):
        self.size, self.optimizer = size, optax.adamw(1e-4, weight_decay=0.0)
        self.arrays = [jnp.asarray(a) for a in size.draw()]
        self.state: Any = None

    def prepare(self, step: Step) -> Prepared:
        method, shapes = method_of(self.size, step)

        @functools.partial(jax.jit, donate_argnums=0)
        def train(state, arrays):
            parameters, moments = state
            gradient, metrics = jax.grad(method.objective, has_aux=True)(parameters, *arrays)
            updates, moments = self.optimizer.update(gradient, moments, parameters)
            return (optax.apply_updates(parameters, updates), moments), metrics

        if self.state is None:
            parameters = draw(shapes, self.size.width)
            self.state = parameters, self.optimizer.init(parameters)
        compiled = train.lower(self.state, self.arrays).compile()

        def call():
            state, self.state = self.state, None  # which is donated
            self.state, metrics = compiled(state, self.arrays)
            return metrics

        attention = self._attention(step)
        calls.wait(attention())
        try:
            calls.wait(call())
        except Exception:
            self.state = None
            raise
        memory = compiled.memory_analysis()
        peak = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
        return Prepared(call, attention, (peak - memory.alias_size_in_bytes) / 2**30)

    def _attention(self, step: Step):
        attend = models_jax.make_attention_fn(step.attention)
        size = self.size
        *x, d_o, _ = calls.draw(Case(size.batch, size.length, size.heads, size.width // size.heads, dtype=size.dtype))

        @jax.jit
        def compute(x, t_x, d_o):
            if step.jvp:
                o, pull, t_o = jax.vjp(lambda *x: jax.jvp(attend, x, t_x), *x, has_aux=True)
                return o, t_o, pull(d_o)
            o, pull = jax.vjp(attend, *x)
            return o, pull(d_o)

        arguments = tuple(x[:3]), tuple(x[3:]), d_o
        return lambda: compute(*arguments)
