"""A generator of films, frame after frame, each in one step: mean flows (arXiv:2505.13447) under teacher forcing.

    python examples/teacher_forcing_jax.py                             # two minutes on two CPU cores
    python examples/teacher_forcing_jax.py --steps 2000 --resume       # go on from the last checkpoint

The films are handwritten digits that count. In training clean frames and noisy ones stand in one sequence, in which a noisy
frame sees itself and the clean frames before it, so that one pass through the network trains all frames: `key_ranges` says who
sees whom, without a mask. The tangent du/dt of the mean flow, one Jacobian-vector product, moves the noisy frames alone.
A film is then made frame by frame, each from those that are finished; of the first alone the model is told the class.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from consistency.config import TrainingConfig, option, parse_config
from consistency.data import load_digits
from consistency.frames import film_batch, generate, report
from consistency.models_jax import FrameTransformer
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
    output: str = option("output/teacher_forcing_jax", "folder for pictures, metrics and checkpoints")
    frames: int = option(3, "of a film")
    steps: int = option(400, "training steps")
    batch: int = option(32, "films per training step")
    unit = "films"
    equal_times: float = option(0.75, "share of films with r = t, where u is the instantaneous velocity")


PRESETS: dict[str, dict] = {"digits": {}}


class MeanFlow:
    """Paths z_t = (1 − t) x + t e from frames x at t = 0 to noise e at t = 1, with times of their own for each frame."""

    def __init__(self, config: Config, model: nnx.GraphDef):
        self.config = config
        self.model = model

    def average_velocity(
        self, parameters: Parameters, clean: jax.Array, z: jax.Array, r: jax.Array, t: jax.Array, labels: jax.Array
    ) -> jax.Array:
        return nnx.merge(self.model, parameters)(clean, z, (t, t - r), labels)

    def loss(
        self, parameters: Parameters, key: jax.Array, x: jax.Array, labels: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        time_key, noise_key = jax.random.split(key)
        times = nnx.sigmoid(-0.4 + jax.random.normal(time_key, (2, *x.shape[:2])))
        equal = jnp.arange(len(x))[:, None] < int(self.config.equal_times * len(x))
        r, t = jnp.where(equal, times.max(0), times.min(0)), times.max(0)
        e = jax.random.normal(noise_key, x.shape)
        z, v = _expand(1 - t) * x + _expand(t) * e, e - x

        def u_fn(z: jax.Array, r: jax.Array, t: jax.Array) -> jax.Array:
            return self.average_velocity(parameters, x, z, r, t, labels)  # the clean frames do not move

        u, du_dt = jax.jvp(u_fn, (z, r, t), (v, jnp.zeros_like(r), jnp.ones_like(t)))
        u_target = jax.lax.stop_gradient(v - _expand(t - r) * du_dt)
        squared_error = jnp.sum((u - u_target) ** 2, axis=(2, 3, 4))
        weight = jax.lax.stop_gradient(1 / (squared_error + 1e-3))
        pixels = x[0, 0].size
        metrics = {
            "loss": jnp.mean(squared_error) / pixels,  # unweighted: the weighted loss is about 1 throughout
            "tangent_norm": jnp.mean(jnp.sqrt(jnp.sum(du_dt**2, axis=(2, 3, 4)) / pixels)),
        }
        return jnp.mean(weight * squared_error), metrics

    @functools.partial(jax.jit, static_argnames=("self", "steps"))
    def sample(self, parameters: Parameters, noise: jax.Array, labels: jax.Array, steps: int) -> jax.Array:
        """Frame by frame, each from its noise in so many strides."""
        film = jnp.zeros_like(noise)  # frames that are not finished nobody sees
        for frame in range(self.config.frames):
            z = noise
            for index in range(steps):
                t, r = (jnp.full(noise.shape[:2], 1 - i / steps) for i in (index, index + 1))
                z = z - _expand(t - r) * self.average_velocity(parameters, film, z, r, t, labels)
            film = film.at[:, frame].set(z[:, frame])
        return film


def main(config: Config) -> None:
    digits, _ = load_digits()
    network = FrameTransformer(config, config.frames, times=2, rngs=nnx.Rngs(config.seed))
    graph, parameters = nnx.split(network)
    method = MeanFlow(config, graph)
    optimizer = make_optimizer(config)
    state, history, steps_per_second = train(
        config,
        initial_state(parameters, optimizer),
        make_train_step(method.loss, optimizer, config),
        lambda step: film_batch(digits, config.batch, config.frames, config.seed, step),
    )
    facts = device_facts() | {"steps": int(state.step), "steps_per_second": steps_per_second}
    samples = generate(functools.partial(method.sample, state.average), config, config.frames)
    curves = {"loss": "squared error per pixel", "tangent_norm": "root mean square of du/dt"}
    report(config, "Teacher forcing:", samples, history, curves, **facts)


def _expand(time: jax.Array) -> jax.Array:
    return time[:, :, None, None, None]


if __name__ == "__main__":
    main(parse_config(Config, PRESETS))
