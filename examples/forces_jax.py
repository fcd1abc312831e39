"""Forces of metals by a transformer over atoms, in JAX: training differentiates attention twice.

    python examples/forces_jax.py                                  # minutes on two CPU cores
    python examples/forces_jax.py --size wide                      # a GPU: heads of 64 channels
    python examples/forces_jax.py --steps 4000 --resume            # go on from the last checkpoint

A model of the energy E of atoms at positions r gives their forces F = −∂E/∂r, and learns from them: the loss is made of F, so its
gradient goes through a gradient.  The atoms of a cluster or of a periodic cell attend to one another.  Their distances enter as a
bias of the scores alone, so that the energy does not change when all turn or move; lengths hide the padding of small clusters.
How many neighbours an atom has is in no mean over them, but in the log-sum-exp of its scores, from which the energy is made too.
The pictures show forces on structures that training has not seen, the vibrations of a cluster, from the Hessian of E, and a
simulation that conserves energy.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from consistency.atoms import CUTOFF, Structures, training_batch
from consistency.config import option, parse_config
from consistency.forces import PRESETS, initialize, prepare, report
from consistency.forces import Config as SharedConfig
from consistency.training_jax import device_facts, initial_state, make_optimizer, make_train_step, train
from consistency.vibrations import Evaluated
from jax_flash_jvp import dot_product_attention

Weights = dict[str, jax.Array]
BLOCK = ("qkv", "of_query", "of_key", "out", "up", "down")


@dataclasses.dataclass(frozen=True)
class Config(SharedConfig):
    output: str = option("output/forces_jax", "folder for pictures, metrics and checkpoints")


def norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)


def naive_attention(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array, lengths: jax.Array):
    """With all scores, as arrays that are written to memory."""
    scores = jnp.einsum("bihc,bjhc->bhij", q, k) * q.shape[-1] ** -0.5 + bias
    scores = jnp.where(jnp.arange(k.shape[1]) < lengths[:, None, None, None], scores, -jnp.inf)
    return jnp.einsum("bhij,bjhc->bihc", jax.nn.softmax(scores), v), jax.nn.logsumexp(scores, -1).mT


def attend(name: str, q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array, lengths: jax.Array):
    """[B, L, heads, channels], and the log-sum-exp [B, L, heads]."""
    if name == "naive":
        return naive_attention(q, k, v, bias, lengths)
    options = dict(key_value_seq_lengths=lengths, return_residual=True)
    return dot_product_attention(q, k, v, bias, **options, implementation=None if name == "auto" else name)


def energies(
    config: Config, weights: Weights, positions: jax.Array, metals: jax.Array, lengths: jax.Array, cells: jax.Array
) -> jax.Array:
    """[B] in eV, of what `Structures` describes."""
    batch, atoms = metals.shape
    r = positions[:, None] - positions[:, :, None]
    r = r - cells[:, None, None] * jnp.round(r / cells[:, None, None])  # to the nearest image
    d = jnp.sqrt(jnp.sum(r**2, -1) + 1e-2)  # which has derivatives at zero too
    # the weight of a neighbour that leaves the cutoff goes to zero, and two derivatives with it
    fading = 3 * jnp.log(jax.nn.relu(1 - (d / CUTOFF) ** 2) + 1e-6)
    waves = jnp.exp(-jnp.square((d[..., None] / CUTOFF - jnp.linspace(0, 1, config.waves)) * config.waves))
    x = weights["metal"][metals]
    for block in range(config.depth):
        w = {name: weights[name][block] for name in BLOCK}
        h = norm(x)
        q, k, v = jnp.moveaxis((h @ w["qkv"]).reshape(batch, atoms, 3, config.heads, -1), 2, 0)
        of_query, of_key = ((h @ w[n]).reshape(batch, atoms, config.waves, -1) for n in ("of_query", "of_key"))
        bias = jnp.einsum("bijw,biwh->bhij", waves, of_query) + jnp.einsum("bijw,bjwh->bhij", waves, of_key)
        o, log_sum_exp = attend(config.attention, q, k, v, bias + fading[:, None], lengths)
        x = x + jnp.concatenate([o.reshape(x.shape), log_sum_exp], -1) @ w["out"]
        x = x + jax.nn.silu(norm(x) @ w["up"]) @ w["down"]
    of_atoms = (jax.nn.silu(norm(x) @ weights["hidden"]) @ weights["energy"])[..., 0]
    return jnp.sum(jnp.where(jnp.arange(atoms) < lengths[:, None], of_atoms, 0), 1)


def energies_and_forces(config: Config, weights: Weights, positions: jax.Array, *rest: jax.Array):
    def total(positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        each = energies(config, weights, positions, *rest)
        return each.sum(), each

    gradient, each = jax.grad(total, has_aux=True)(positions)
    return each, -gradient


def loss(config: Config, weights: Weights, key: jax.Array, *batch: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    *structures, energy, force = batch
    lengths = structures[2]
    got_energy, got_force = energies_and_forces(config, weights, *structures)
    force_error = jnp.sum(jnp.square(got_force - force)) / (3 * lengths.sum())  # padding has none
    energy_error = jnp.mean(jnp.square((got_energy - energy) / lengths))
    total = force_error + config.energy_weight * energy_error
    return total, {"loss": total, "force_error": jnp.sqrt(force_error), "energy_error": jnp.sqrt(energy_error)}


def evaluated(config: Config, weights: Weights) -> Evaluated:
    forward = jax.jit(functools.partial(energies_and_forces, config))

    @jax.jit
    def hessian(weights: Weights, positions: jax.Array, *rest: jax.Array) -> jax.Array:
        return jax.hessian(lambda one: energies(config, weights, one[None], *rest)[0])(positions[0])

    def to_numpy(structures: Structures) -> tuple[np.ndarray, np.ndarray]:
        return jax.device_get(forward(weights, *structures))

    return Evaluated(to_numpy, lambda structures: np.asarray(hessian(weights, *structures)))


def main(config: Config) -> None:
    data = prepare(config)
    optimizer = make_optimizer(config)
    with jax.default_matmul_precision("highest"):  # TensorFloat32 keeps three digits, too few for a simulation
        state, history, steps_per_second = train(
            config,
            initial_state(jax.tree.map(jnp.asarray, initialize(config)), optimizer),
            make_train_step(functools.partial(loss, config), optimizer, config),
            lambda step: training_batch(data.train, config.batch, config.seed, step),
            may_be_done=True,
        )
        facts = {"steps": int(state.step), "steps_per_second": steps_per_second, **device_facts()}
        report(config, data, evaluated(config, state.average), history, **facts)


if __name__ == "__main__":
    main(parse_config(Config, PRESETS))
