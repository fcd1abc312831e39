"""Terminal velocity matching for one-step generation (Zhou et al. 2025, arXiv:2511.19797) on handwritten digits.

    python examples/tvm_jax.py                                    # five minutes on two CPU cores
    python examples/tvm_jax.py --size mosaic --compare            # 4,096 tokens: flash against naive attention
    python examples/tvm_jax.py --steps 4000 --resume              # go on from the last checkpoint

A network learns the displacement f(x_t, t, s) that the flow brings from time t to time s. Where it arrives, it must move
with the velocity of the flow there: ∂f/∂s = u(x_t + f, s). So the loss is a function of the network's derivative, and
its gradient goes *through* a Jacobian-vector product, attention included: for attention a derivative of second order,
where MeanFlow, which stops the gradient there, needs the first only.
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
    output: str = option("output/tvm_jax", "folder for pictures, metrics and checkpoints")
    steps: int = option(2400, "training steps")
    batch: int = option(64, "images per training step")
    ema_decay: float = option(0.997, "decay of the averaged weights, which give the targets and the samples")
    time_mean: float = option(-0.4, "mean of the normal distribution whose sigmoid gives s")
    time_deviation: float = option(1.0, "its standard deviation")
    stride_mean: float = option(-0.8, "mean of the normal distribution whose sigmoid gives t − s")
    stride_deviation: float = option(1.0, "its standard deviation")


PRESETS = {
    "digits": {},
    # 4,096 tokens with heads of 64 channels
    "mosaic": dict(
        mosaic=16,
        width=384,
        depth=6,
        heads=6,
        dtype="bfloat16",
        batch=16,
        steps=600,
        learning_rate=1e-3,
        ema_decay=0.995,
        samples=4096,
    ),
}


class TerminalVelocityMatching:
    """Linear paths x_t = (1 − t) x_0 + t x_1 from data at t = 0 to noise at t = 1, with velocity v = x_1 − x_0."""

    def __init__(self, config: Config, model: nnx.GraphDef):
        self.config = config
        self.model = model

    def network(self, parameters: Parameters, x: jax.Array, t: jax.Array, s: jax.Array, labels: jax.Array) -> jax.Array:
        """F(x_t, t, s), the average velocity from t to s."""
        return nnx.merge(self.model, parameters)(x, (t, t - s), labels)

    def displacement(
        self, parameters: Parameters, x: jax.Array, t: jax.Array, s: jax.Array, labels: jax.Array
    ) -> jax.Array:
        """f(x_t, t, s) = (s − t) F(x_t, t, s) = ∫ u dτ from t to s, along the flow through x_t."""
        return _expand(s - t) * self.network(parameters, x, t, s, labels)

    def velocity(self, parameters: Parameters, x: jax.Array, s: jax.Array, labels: jax.Array) -> jax.Array:
        """u(x_s, s) = ∂f/∂s at t = s, which is F(x_s, s, s)."""
        return self.network(parameters, x, s, s, labels)

    def sample_times(self, key: jax.Array, batch: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """t > s, with t − s logit-normal and s logit-normal, cut off at 1 − (t − s); and r, logit-normal as s."""
        config = self.config
        stride_key, s_key, r_key = jax.random.split(key, 3)
        stride = config.stride_mean + config.stride_deviation * jax.random.normal(stride_key, (batch,))
        longest = (-stride - config.time_mean) / config.time_deviation  # 1 − sigmoid(x) = sigmoid(−x)
        s = jax.random.truncated_normal(s_key, -jnp.inf, longest)
        r = jax.random.normal(r_key, (batch,))
        s, r = (nnx.sigmoid(config.time_mean + config.time_deviation * normal) for normal in (s, r))
        return s + nnx.sigmoid(stride), s, r

    def loss(
        self, parameters: Parameters, average: Parameters, key: jax.Array, x_0: jax.Array, labels: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """E ‖∂f/∂s (x_t, t, s) − u*(x_t + f(x_t, t, s), s)‖² + ‖u(x_r, r) − v‖², with u* of the averaged weights.

        The first term is the terminal velocity error, the second flow matching, at a time of its own. The gradient
        stops at the target u*, and at the f in it, but not at ∂f/∂s. (The paper averages twice: u* and the samples
        have weights of their own.)
        """
        time_key, noise_key = jax.random.split(key)
        t, s, r = self.sample_times(time_key, len(x_0))
        x_1 = jax.random.normal(noise_key, x_0.shape)
        x_t, x_r = (_expand(1 - time) * x_0 + _expand(time) * x_1 for time in (t, r))
        v = x_1 - x_0

        def f_fn(s: jax.Array) -> jax.Array:
            return self.displacement(parameters, x_t, t, s, labels)

        f, df_ds = jax.jvp(f_fn, (s,), (jnp.ones_like(s),))
        target = jax.lax.stop_gradient(self.velocity(average, x_t + f, s, labels))

        terminal_error = jnp.mean((df_ds - target) ** 2)
        flow_matching_error = jnp.mean((self.velocity(parameters, x_r, r, labels) - v) ** 2)
        loss = terminal_error + flow_matching_error
        return loss, {"loss": loss, "terminal_error": terminal_error, "flow_matching_error": flow_matching_error}

    @functools.partial(jax.jit, static_argnames="self")
    def sample(self, parameters: Parameters, noise: jax.Array, labels: jax.Array, steps: int) -> jax.Array:
        """x_s = x_t + f(x_t, t, s) in `steps` equal strides from t = 1 to 0."""

        def stride(index: jax.Array, x: jax.Array) -> jax.Array:
            t = jnp.full(len(x), 1 - index / steps)
            s = jnp.full(len(x), 1 - (index + 1) / steps)
            return x + self.displacement(parameters, x, t, s, labels)

        return jax.lax.fori_loop(0, steps, stride, noise)


def main(config: Config) -> None:
    digits, _ = load_digits()
    graph, parameters = nnx.split(DiffusionTransformer(config, times=2, rngs=nnx.Rngs(config.seed)))
    method = TerminalVelocityMatching(config, graph)
    optimizer = make_optimizer(config)
    state, history, steps_per_second = train(
        config,
        initial_state(parameters, optimizer),
        make_train_step(method.loss, optimizer, config, needs_average=True),
        lambda step: training_batch(digits, config.batch, config.mosaic, config.seed, step),
    )
    facts = device_facts()  # before sampling, which is not what is compared
    speed = {"steps": int(state.step), "steps_per_second": steps_per_second}
    samples = generate(functools.partial(method.sample, state.average), config)
    curves = {"terminal_error": "terminal velocity error per pixel", "flow_matching_error": "flow matching error"}
    report(config, "Terminal velocity matching", samples, history, curves, **speed, **facts)


def _expand(time: jax.Array) -> jax.Array:
    return time[:, None, None, None]


if __name__ == "__main__":
    config = parse_config(Config, PRESETS)
    if config.compare or "," in config.attention:
        sys.exit(compare(config))
    main(config)
