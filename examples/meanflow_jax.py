"""Mean flows for one-step generation (Geng et al. 2025, arXiv:2505.13447) on handwritten digits.

    python examples/meanflow_jax.py                                    # a few minutes on two CPU cores
    python examples/meanflow_jax.py --size mosaic --compare            # 4,096 tokens: flash against naive attention
    python examples/meanflow_jax.py --steps 4000 --resume              # go on from the last checkpoint

A network u(z, r, t) learns the *average* velocity of a flow between the times r < t, so that one evaluation crosses
the whole way from noise to data. Its training target needs the derivative of u along the flow, du/dt = v ∂u/∂z + ∂u/∂t:
one Jacobian-vector product through the network, attention included, in every training step.
"""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
from flax import nnx

from consistency.compare import compare
from consistency.config import TrainingConfig, option, parse_config
from consistency.data import load_digits, training_batch
from consistency.models_jax import DiffusionTransformer
from consistency.report import report
from consistency.sampling import generate
from consistency.training_jax import (
    Parameters,
    device_facts,
    initial_state,
    make_optimizer,
    make_train_step,
    train,
)


@dataclasses.dataclass(frozen=True)
class Config(TrainingConfig):
    output: str = option("output/meanflow_jax", "folder for pictures, metrics and checkpoints")
    time_mean: float = option(-0.4, "mean of the normal distribution whose sigmoid gives r and t")
    time_deviation: float = option(1.0, "its standard deviation")
    equal_times: float = option(0.75, "share of samples with r = t, where u is the instantaneous velocity")
    loss_power: float = option(1.0, "p of the adaptive weight 1 / (squared error + c)^p")
    loss_constant: float = option(1e-3, "c of the adaptive weight")


PRESETS = {
    "digits": {},
    # 4,096 tokens with heads of 64 channels
    "mosaic": dict(
        mosaic=16, width=384, depth=6, heads=6, dtype="bfloat16", batch=16, steps=600, learning_rate=1e-3, samples=4096
    ),
}


class MeanFlow:
    """Linear paths z_t = (1 − t) x + t e from data x at t = 0 to noise e at t = 1, with velocity v = e − x."""

    def __init__(self, config: Config, model: nnx.GraphDef):
        self.config = config
        self.model = model

    def average_velocity(
        self, parameters: Parameters, z: jax.Array, r: jax.Array, t: jax.Array, labels: jax.Array
    ) -> jax.Array:
        """u(z, r, t) = 1 / (t − r) ∫ v dτ from r to t, and v itself where r = t."""
        return nnx.merge(self.model, parameters)(z, (t, t - r), labels)

    def sample_times(self, key: jax.Array, batch: int) -> tuple[jax.Array, jax.Array]:
        """r ≤ t, both logit-normal; r = t for the first `equal_times` of the batch, rounded down."""
        config = self.config
        times = nnx.sigmoid(config.time_mean + config.time_deviation * jax.random.normal(key, (2, batch)))
        r, t = times.min(0), times.max(0)
        return jnp.where(jnp.arange(batch) < int(config.equal_times * batch), t, r), t

    def loss(
        self, parameters: Parameters, key: jax.Array, x: jax.Array, labels: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        time_key, noise_key = jax.random.split(key)
        r, t = self.sample_times(time_key, len(x))
        return self.objective(parameters, x, labels, jax.random.normal(noise_key, x.shape), r, t)

    def objective(
        self, parameters: Parameters, x: jax.Array, labels: jax.Array, e: jax.Array, r: jax.Array, t: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Algorithm 1: the identity u = v − (t − r) du/dt (Eq. 6) as a regression on its own right-hand side."""
        z = _expand(1 - t) * x + _expand(t) * e
        v = e - x

        def u_fn(z: jax.Array, r: jax.Array, t: jax.Array) -> jax.Array:
            return self.average_velocity(parameters, z, r, t, labels)

        u, du_dt = jax.jvp(u_fn, (z, r, t), (v, jnp.zeros_like(r), jnp.ones_like(t)))
        u_target = jax.lax.stop_gradient(v - _expand(t - r) * du_dt)

        squared_error = jnp.sum((u - u_target) ** 2, axis=(1, 2, 3))
        weight = jax.lax.stop_gradient((squared_error + self.config.loss_constant) ** -self.config.loss_power)
        pixels = x[0].size
        metrics = {
            "loss": jnp.mean(squared_error) / pixels,  # unweighted: the weighted loss is about 1 throughout
            "tangent_norm": jnp.mean(jnp.sqrt(jnp.sum(du_dt**2, axis=(1, 2, 3)) / pixels)),
        }
        return jnp.mean(weight * squared_error), metrics

    @functools.partial(jax.jit, static_argnames="self")
    def sample(self, parameters: Parameters, noise: jax.Array, labels: jax.Array, steps: int) -> jax.Array:
        """Algorithm 2, in `steps` equal strides: z_r = z_t − (t − r) u(z_t, r, t) from t = 1 to 0."""

        def stride(index: jax.Array, z: jax.Array) -> jax.Array:
            t = jnp.full(len(z), 1 - index / steps)
            r = jnp.full(len(z), 1 - (index + 1) / steps)
            return z - _expand(t - r) * self.average_velocity(parameters, z, r, t, labels)

        return jax.lax.fori_loop(0, steps, stride, noise)


def main(config: Config) -> None:
    digits, _ = load_digits()
    graph, parameters = nnx.split(DiffusionTransformer(config, times=2, rngs=nnx.Rngs(config.seed)))
    method = MeanFlow(config, graph)
    optimizer = make_optimizer(config)
    state, history, steps_per_second = train(
        config,
        initial_state(parameters, optimizer),
        make_train_step(method.loss, optimizer, config),
        lambda step: training_batch(digits, config.batch, config.mosaic, config.seed, step),
    )
    facts = device_facts()  # before sampling, which is not what is compared
    speed = {"steps": int(state.step), "steps_per_second": steps_per_second}
    samples = generate(functools.partial(method.sample, state.average), config)
    curves = {"loss": "squared error per pixel", "tangent_norm": "root mean square of du/dt"}
    report(config, "MeanFlow", samples, history, curves, **speed, **facts)


def _expand(time: jax.Array) -> jax.Array:
    return time[:, None, None, None]


if __name__ == "__main__":
    config = parse_config(Config, PRESETS)
    if config.compare or "," in config.attention:
        sys.exit(compare(config))
    main(config)
