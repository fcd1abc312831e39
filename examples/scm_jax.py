"""Continuous-time consistency models (sCM; Lu and Song 2024, arXiv:2410.11081) on handwritten digits, from data alone.

    python examples/scm_jax.py                                         # a few minutes on two CPU cores
    python examples/scm_jax.py --size mosaic --compare                 # 4,096 tokens: flash against naive attention
    python examples/scm_jax.py --steps 4000 --resume                   # go on from the last checkpoint

A consistency model f(x, t) maps every point of a path from data to noise to the path's data end, so that one evaluation
generates. In continuous time it is trained on df/dt = 0 along the path: one Jacobian-vector product through the network,
attention included, in every training step.

This is consistency training by Algorithm 1. As in the paper it starts on the weights of a diffusion model, which the
first `diffusion_steps` train, and keeps stable by TrigFlow, a time embedding of low frequencies, normalized tangents and
their warm-up. The momentum is small, because g is not the gradient of any function, and overshoots. There is no adaptive
weighting: with normalized tangents the loss is about the same at all times already.
"""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from consistency.compare import compare
from consistency.config import TrainingConfig, option, parse_config
from consistency.data import Digits, load_digits, training_batch
from consistency.loop import begin_afresh
from consistency.models_jax import DiffusionTransformer
from consistency.report import report
from consistency.sampling import generate
from consistency.training_jax import (
    Checkpoints,
    Parameters,
    device_facts,
    initial_state,
    make_optimizer,
    make_train_step,
    train,
)


@dataclasses.dataclass(frozen=True)
class Config(TrainingConfig):
    output: str = option("output/scm_jax", "folder for pictures, metrics and checkpoints")
    steps: int = option(800, "training steps of the consistency model")
    learning_rate: float = option(5e-4, "of AdamW, after the warm-up")
    beta1: float = option(0.5, "AdamW's decay of the momentum; with more of it the tangents oscillate")
    beta2: float = option(0.99, "AdamW's decay of the second moment")
    diffusion_steps: int = option(1200, "training steps of the diffusion model, before the others")
    diffusion_learning_rate: float = option(2e-3, "their learning rate")
    tangent_warmup_steps: int = option(300, "steps in which r, the share of the tangent that is dF/dt, rises to 1")
    tangent_constant: float = option(0.1, "c of the normalized tangent g / (‖g‖ + c)")
    time_mean: float = option(-0.4, "mean of the normal distribution of log(σ_d tan t)")
    time_deviation: float = option(1.2, "its standard deviation")


PRESETS = {
    "digits": {},
    # 4,096 tokens with heads of 64 channels
    "mosaic": dict(mosaic=16, width=384, depth=6, heads=6, dtype="bfloat16", batch=16, samples=4096)
    | dict(steps=600, diffusion_steps=600, diffusion_learning_rate=1e-3),
}


class ConsistencyModel:
    """TrigFlow: x_t = cos(t) x + sin(t) z from data x at t = 0 to noise z at t = π/2, both of deviation σ_d."""

    def __init__(self, config: Config, model: nnx.GraphDef, data_deviation: float):
        self.config = config
        self.model = model
        self.data_deviation = data_deviation

    def network(self, parameters: Parameters, x: jax.Array, t: jax.Array, labels: jax.Array) -> jax.Array:
        """F, the velocity dx_t/dt in units of σ_d, from x_t in these units.

        Of t / 8 the highest frequency that is embedded is 1: beyond, dF/dt outgrows F, and training diverges.
        """
        return nnx.merge(self.model, parameters)(x, (t / 8,), labels)

    def denoise(self, parameters: Parameters, x_t: jax.Array, t: jax.Array, labels: jax.Array) -> jax.Array:
        """f(x_t, t) = cos(t) x_t − sin(t) σ_d F(x_t / σ_d, t), which is x_t at t = 0."""
        sigma = self.data_deviation
        return _expand(jnp.cos(t)) * x_t - _expand(jnp.sin(t)) * sigma * self.network(
            parameters, x_t / sigma, t, labels
        )

    def sample_path(self, key: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Times t with log-normal σ_d tan t, the noise level of other parametrizations; x_t and its velocity dx_t/dt."""
        config, sigma = self.config, self.data_deviation
        time_key, noise_key = jax.random.split(key)
        t = jnp.arctan(
            jnp.exp(config.time_mean + config.time_deviation * jax.random.normal(time_key, (len(x),))) / sigma
        )
        z = sigma * jax.random.normal(noise_key, x.shape)
        cos, sin = _expand(jnp.cos(t)), _expand(jnp.sin(t))
        return t, cos * x + sin * z, cos * z - sin * x

    def diffusion_loss(
        self, parameters: Parameters, key: jax.Array, x: jax.Array, labels: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The mean square of σ_d F(x_t / σ_d, t) − dx_t/dt."""
        t, x_t, velocity = self.sample_path(key, x)
        sigma = self.data_deviation
        loss = jnp.mean((sigma * self.network(parameters, x_t / sigma, t, labels) - velocity) ** 2)
        return loss, {"loss": loss}

    def loss(
        self, parameters: Parameters, key: jax.Array, x: jax.Array, labels: jax.Array, r: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Algorithm 1: F moves along g = −cos²(t) (σ_d F − dx_t/dt) − r cos(t) sin(t) (x_t + σ_d dF/dt), normalized."""
        sigma = self.data_deviation
        t, x_t, velocity = self.sample_path(key, x)
        cos, sin = _expand(jnp.cos(t)), _expand(jnp.sin(t))

        def network_fn(x: jax.Array, t: jax.Array) -> jax.Array:
            return self.network(parameters, x, t, labels)

        # cos(t) sin(t) goes in before the network, not after it, so that tangents stay small in low precision.
        tangents = cos * sin * velocity / sigma, jnp.cos(t) * jnp.sin(t)
        F, scaled_dF = jax.jvp(network_fn, (x_t / sigma, t), tangents)
        F_fixed, scaled_dF = jax.lax.stop_gradient((F, scaled_dF))
        g = -(cos**2) * (sigma * F_fixed - velocity) - r * (cos * sin * x_t + sigma * scaled_dF)
        norm = jnp.sqrt(jnp.sum(g**2, axis=(1, 2, 3), keepdims=True))
        target = F_fixed + g / (norm + self.config.tangent_constant)

        # The loss itself is about 1 / pixels throughout.
        metrics = {"loss": jnp.mean(g**2), "tangent_norm": jnp.mean(jnp.sqrt(jnp.mean(scaled_dF**2, axis=(1, 2, 3))))}
        return jnp.mean((F - target) ** 2), metrics

    @functools.partial(jax.jit, static_argnames="self")
    def sample(self, parameters: Parameters, noise: jax.Array, labels: jax.Array, steps: int) -> jax.Array:
        """From noise to data in one evaluation; then back to less and less noise, and to data again."""

        def again(index: jax.Array, x: jax.Array) -> jax.Array:
            t = jnp.full(len(x), jnp.pi / 2 * (1 - index / steps))
            z = jnp.roll(noise, index, axis=0)  # new noise for each image: what another one started from
            x_t = _expand(jnp.cos(t)) * x + _expand(jnp.sin(t)) * self.data_deviation * z
            return self.denoise(parameters, x_t, t, labels)

        return jax.lax.fori_loop(0, steps, again, jnp.zeros_like(noise))


def main(config: Config) -> None:
    digits, _ = load_digits()
    graph, parameters = nnx.split(DiffusionTransformer(config, times=1, rngs=nnx.Rngs(config.seed)))
    method = ConsistencyModel(config, graph, float(digits.images.std()))
    if not Checkpoints(begin_afresh(config)):
        parameters = train_diffusion(config, method, parameters, digits)  # or what is left of it
        config = dataclasses.replace(config, resume=False)
    optimizer = make_optimizer(config)

    def make_batch(step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        r = np.float32(min(1, step / config.tangent_warmup_steps) if config.tangent_warmup_steps else 1)
        return *training_batch(digits, config.batch, config.mosaic, config.seed, step), r

    state, history, steps_per_second = train(
        config, initial_state(parameters, optimizer), make_train_step(method.loss, optimizer, config), make_batch
    )
    facts = device_facts()  # before sampling, which is not what is compared
    speed = {"steps": int(state.step), "steps_per_second": steps_per_second}
    samples = generate(functools.partial(method.sample, state.average), config)
    curves = {"loss": "squared tangent g per pixel", "tangent_norm": "root mean square of cos t sin t dF/dt"}
    report(config, "Consistency model", samples, history, curves, **speed, **facts)


def train_diffusion(config: Config, method: ConsistencyModel, parameters: Parameters, digits: Digits) -> Parameters:
    """The averaged weights of a diffusion model."""
    config = dataclasses.replace(
        config,
        steps=config.diffusion_steps,
        learning_rate=config.diffusion_learning_rate,
        output=f"{config.output}/diffusion",
    )
    optimizer = make_optimizer(config)
    state, _, _ = train(
        config,
        initial_state(parameters, optimizer),
        make_train_step(method.diffusion_loss, optimizer, config),
        lambda step: training_batch(digits, config.batch, config.mosaic, config.seed, step),
        may_be_done=True,
    )
    return state.average


def _expand(time: jax.Array) -> jax.Array:
    return time[:, None, None, None]


if __name__ == "__main__":
    config = parse_config(Config, PRESETS)
    if config.compare or "," in config.attention:
        sys.exit(compare(config))
    main(config)
