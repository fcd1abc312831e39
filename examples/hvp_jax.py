"""The largest eigenvalues of a transformer's Hessian, by Lanczos iteration on Hessian-vector products.

    python examples/hvp_jax.py                                    # three minutes on two CPU cores
    python examples/hvp_jax.py --size long                        # a GPU: products on up to 65,536 tokens
    python examples/hvp_jax.py --steps 1000 --resume              # go on from the last checkpoint

A small transformer learns to tell handwritten digits apart. The Hessian H of its loss is too large to write down, but
H v, the derivative of the gradient along v, costs no more than a few gradients (Pearlmutter 1994), and Lanczos iteration
needs nothing else. For attention, H v is a derivative of second order, forward-over-reverse. Of a classifier's eigenvalues
about as many as there are classes stand out from a bulk near zero (Sagun et al. 2017, arXiv:1706.04454). The last picture
shows what one product costs as images grow, next to naive attention.
"""

import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import scipy.linalg
import tqdm
from flax import nnx

from consistency import plots
from consistency.compare import OUT_OF_MEMORY
from consistency.config import TrainingConfig, option, parse_config
from consistency.data import CLASSES, DIGIT_SIZE, load_digits, training_batch
from consistency.models_jax import Classifier
from consistency.training_jax import (
    History,
    Parameters,
    TrainState,
    initial_state,
    make_optimizer,
    make_train_step,
    train,
)

Product = Callable[[np.ndarray], np.ndarray]  # v → H v


@dataclasses.dataclass(frozen=True)
class Config(TrainingConfig):
    attention: str = option("auto", "auto, triton, xla, interpret or naive; several, with commas between, are timed")
    compare: bool = option(True, "time naive attention too")
    output: str = option("output/hvp_jax", "folder for pictures, metrics and checkpoints")
    steps: int = option(300, "training steps")
    samples: int = option(512, "images that the loss is the mean of, whose Hessian is taken")
    width: int = option(32, "channels of the transformer")
    depth: int = option(2, "blocks of the transformer")
    eigenvalues: int = option(20, "how many of the largest eigenvalues to report")
    iterations: int = option(60, "Lanczos iterations, of one product each")
    sharpness_every: int = option(20, "training steps between two measurements of the largest eigenvalue")
    sharpness_iterations: int = option(8, "Lanczos iterations for each of these")
    timed_mosaics: str = option("1,2,4,8,12", "digits along each side of the one image that a product is timed on")
    timed_dtype: str = option("float32", "of activations and attention in the products that are timed")
    repeats: int = option(3, "times that each product is timed, of which the median counts")


PRESETS = {
    "digits": {},
    # 16 to 65,536 tokens with heads of 64 channels
    "long": dict(width=256, depth=4, learning_rate=5e-4, timed_mosaics="1,2,4,8,16,32,64", timed_dtype="bfloat16"),
}


class Classification:
    """The mean cross-entropy of a classifier, and its second derivative."""

    def __init__(self, model: nnx.GraphDef):
        self.model = model

    def loss(
        self, parameters: Parameters, key: jax.Array | None, images: jax.Array, labels: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        logits = nnx.merge(self.model, parameters)(images)
        loss = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))
        return loss, {"loss": loss, "accuracy": jnp.mean(logits.argmax(-1) == labels)}

    @functools.partial(jax.jit, static_argnames="self")
    def hessian_vector_product(
        self, parameters: Parameters, vector: jax.Array, images: jax.Array, labels: jax.Array
    ) -> jax.Array:
        """H v = ∂/∂ε ∇L(θ + ε v), for v and H v with all parameters in one flat vector."""
        theta, unravel = jax.flatten_util.ravel_pytree(parameters)
        gradient_fn = jax.grad(lambda theta: self.loss(unravel(theta), None, images, labels)[0])
        return jax.jvp(gradient_fn, (theta,), (vector,))[1]


class Lanczos(NamedTuple):
    """Qᵀ H Q = T with orthonormal rows of `basis` as Q, where T is tridiagonal."""

    diagonal: np.ndarray  # [iterations]
    off_diagonal: np.ndarray  # [iterations − 1]
    basis: np.ndarray  # [iterations, dimension]

    def eigenvalues(self, iterations: int) -> np.ndarray:
        """Of the leading part of T, in descending order: Ritz values, which approach H's, from the largest on."""
        parts = self.diagonal[:iterations], self.off_diagonal[: iterations - 1]
        return scipy.linalg.eigh_tridiagonal(*parts, eigvals_only=True)[::-1]

    def eigenvectors(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The `count` largest Ritz values, in descending order, and their vectors as rows."""
        values, vectors = scipy.linalg.eigh_tridiagonal(self.diagonal, self.off_diagonal)
        return values[::-1][:count], (vectors.T[::-1][:count] @ self.basis).astype(self.basis.dtype)


def lanczos(product: Product, start: np.ndarray, iterations: int, quiet: bool = True) -> Lanczos:
    """Iterations from `start`, fewer where they exhaust the space that H makes of it (Golub and Van Loan, ch. 10.1)."""
    if not 1 <= iterations <= len(start):
        raise ValueError(f"`iterations` must be from 1 to the {len(start)} parameters: got {iterations}")
    basis = np.empty((iterations, len(start)), start.dtype)
    diagonal, off_diagonal = np.empty(iterations), np.empty(iterations)
    remainder, size = start, np.linalg.norm(start)
    for k in tqdm.trange(iterations, unit="product", dynamic_ncols=True, disable=quiet):
        basis[k] = remainder / size
        remainder = product(basis[k])
        diagonal[k] = basis[k] @ remainder
        for _ in range(2):  # against the whole basis, and once more: rounding would bring back what was removed
            remainder = remainder - (basis[: k + 1] @ remainder) @ basis[: k + 1]
        off_diagonal[k] = size = np.linalg.norm(remainder)
        if size <= 10 * np.finfo(start.dtype).eps * np.abs(diagonal[: k + 1]).max():
            break
    return Lanczos(diagonal[: k + 1], off_diagonal[:k], basis[: k + 1])


class Cost(NamedTuple):
    seconds: float
    temporary_bytes: int


def measure_cost(config: Config, attention: str, mosaic: int) -> Cost | None:
    """Of one product on one image of mosaic × mosaic digits, or None where it does not fit into the device's memory."""
    config = dataclasses.replace(config, attention=attention, mosaic=mosaic, dtype=config.timed_dtype)
    graph, parameters = nnx.split(Classifier(config, nnx.Rngs(config.seed)))
    vector = jnp.ones_like(jax.flatten_util.ravel_pytree(parameters)[0])
    image = training_batch(load_digits()[0], 1, mosaic, config.seed, step=0)
    arguments = jax.device_put((parameters, vector, *image))
    try:
        product = jax.jit(Classification(graph).hessian_vector_product).lower(*arguments).compile()
        jax.block_until_ready(product(*arguments))
        seconds = []
        for _ in range(config.repeats):
            clock = time.perf_counter()
            jax.block_until_ready(product(*arguments))
            seconds.append(time.perf_counter() - clock)
    except jax.errors.JaxRuntimeError as error:
        if not any(sign.decode() in str(error) for sign in OUT_OF_MEMORY):
            raise
        return None
    return Cost(statistics.median(seconds), product.memory_analysis().temp_size_in_bytes)


def measure_costs(config: Config) -> dict[str, dict[int, Cost | None]]:
    """attention → tokens → cost of one product, each printed as it comes."""
    attentions = [*config.attention.split(","), *(["naive"] if config.compare else [])]
    costs: dict[str, dict[int, Cost | None]] = {attention: {} for attention in attentions}
    for mosaic in map(int, config.timed_mosaics.split(",")):
        tokens = (mosaic * DIGIT_SIZE // config.patch) ** 2
        for attention, by_tokens in costs.items():
            cost = by_tokens[tokens] = measure_cost(config, attention, mosaic)
            figures = (
                f"{cost.seconds * 1e3:8.1f} ms {cost.temporary_bytes / 2**20:10.1f} MiB" if cost else "does not fit"
            )
            print(f"one product, {tokens:6} tokens, {attention:8} {figures}", flush=True)
    return costs


def draw_hessian(path: Path, history: History, krylov: Lanczos, values: np.ndarray) -> None:
    """The largest eigenvalue in the course of training, the Ritz values' convergence, and where they end."""
    figure, (training, convergence, final) = plt.subplots(1, 3, figsize=(15.6, 4))
    sharpness = {entry["step"]: entry["sharpness"] for entry in history if "sharpness" in entry}
    sharpness[history[-1]["step"] + 1] = values[0]  # entries are of the parameters before their step
    training.semilogy(list(sharpness), list(sharpness.values()), color=plots.INK)
    plots.label_axes(training, "training step", "largest eigenvalue")

    shown = min(CLASSES, len(values))
    ritz = np.full((len(krylov.diagonal), shown), np.nan)
    for k, row in enumerate(ritz):
        row[: k + 1] = krylov.eigenvalues(k + 1)[:shown]
    convergence.semilogy(np.arange(1, len(ritz) + 1), ritz, color=plots.INK, linewidth=1.2)
    convergence.set_ylim(0.5 * values[shown - 1], 2 * values[0])
    plots.label_axes(convergence, "Lanczos iteration", f"the {shown} largest Ritz values, after training")

    final.semilogy(np.arange(1, len(values) + 1), values, "o", markersize=4, color=plots.INK)
    final.axvline(CLASSES - 0.5, color=plots.INK, alpha=0.4, linestyle=":")
    final.text(CLASSES - 0.3, values[0], f"{CLASSES - 1} = classes − 1", color=plots.INK, va="center")
    final.xaxis.get_major_locator().set_params(integer=True)
    plots.label_axes(final, "rank", f"the {len(values)} largest eigenvalues, after training")
    plots.save(figure, "Hessian of a classifier's loss", path)


def draw_costs(path: Path, costs: dict[str, dict[int, Cost | None]]) -> None:
    """Against the number of tokens; a line ends where a product no longer fits."""
    figure, (seconds, memory) = plt.subplots(1, 2, figsize=(10.4, 4))
    for attention, by_tokens in costs.items():
        fitting = {tokens: cost for tokens, cost in by_tokens.items() if cost}
        style = dict(color="#c8553d", linestyle="--") if attention == "naive" else {}
        style |= dict(marker="o", markersize=4, label=attention)
        seconds.loglog(list(fitting), [1e3 * cost.seconds for cost in fitting.values()], **style)
        memory.loglog(list(fitting), [cost.temporary_bytes / 2**20 for cost in fitting.values()], **style)
    seconds.legend(frameon=False)
    for axis, title in ((seconds, "milliseconds"), (memory, "MiB of temporary memory")):
        tokens = list(next(iter(costs.values())))
        axis.set_xticks(tokens, map(str, tokens))
        axis.minorticks_off()
        plots.label_axes(axis, "tokens", title)
    plots.save(figure, "One Hessian-vector product, on one image", path)


def main(config: Config) -> None:
    if not 1 <= config.eigenvalues <= config.iterations:
        raise ValueError(
            f"`eigenvalues` must be from 1 to the {config.iterations} iterations: got {config.eigenvalues}"
        )
    digits, held_out = load_digits()
    first_attention = config.attention.split(",")[0]
    classifier = Classifier(dataclasses.replace(config, attention=first_attention), nnx.Rngs(config.seed))
    graph, parameters = nnx.split(classifier)
    method = Classification(graph)
    optimizer = make_optimizer(config)
    train_step = make_train_step(method.loss, optimizer, config)
    hessian_batch = training_batch(digits, config.samples, config.mosaic, config.seed + 1, step=0)
    dimension = jax.flatten_util.ravel_pytree(parameters)[0].size
    start = np.random.default_rng(config.seed).standard_normal(dimension, np.float32)

    def product_at(parameters: Parameters) -> Product:
        def product(vector: np.ndarray) -> np.ndarray:
            with jax.default_matmul_precision("highest"):  # TensorFloat32 would drown the smaller eigenvalues
                return np.asarray(method.hessian_vector_product(parameters, vector, *hessian_batch))

        return product

    def measured_step(state: TrainState, *batch: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        sharpness = {}
        if int(state.step) % config.sharpness_every == 0:
            krylov = lanczos(product_at(state.parameters), start, config.sharpness_iterations)
            sharpness["sharpness"] = krylov.eigenvalues(config.sharpness_iterations)[0]
        state, metrics = train_step(state, *batch)
        return state, metrics | sharpness

    state, history, _ = train(
        config,
        initial_state(parameters, optimizer),
        measured_step,
        lambda step: training_batch(digits, config.batch, config.mosaic, config.seed, step),
    )
    product = product_at(state.parameters)
    krylov = lanczos(product, start, config.iterations, quiet=False)
    values, vectors = krylov.eigenvectors(config.eigenvalues)
    pairs = zip(values, vectors, strict=True)
    residuals = np.array([np.linalg.norm(product(vector) - value * vector) for value, vector in pairs])
    held_out_mosaics = training_batch(held_out, len(held_out.labels), config.mosaic, config.seed, step=0)
    accuracy = float(method.loss(state.parameters, None, *held_out_mosaics)[1]["accuracy"])
    print(f"{dimension} parameters; accuracy on held-out digits {accuracy:.1%}")
    for value, residual in zip(values, residuals, strict=True):
        print(f"eigenvalue {value:9.4f}   ‖H v − λ v‖ {residual:.0e}")

    output = Path(config.output)
    draw_hessian(output / "hessian.png", history, krylov, values)
    plots.curves(output / "curves.png", "Training", history, {"loss": "cross-entropy"})
    costs = measure_costs(config)
    draw_costs(output / "costs.png", costs)
    metrics = {
        "config": dataclasses.asdict(config),
        "steps": int(state.step),
        "held_out_accuracy": accuracy,
        "parameters": dimension,
        "eigenvalues": values.tolist(),
        "residuals": residuals.tolist(),
        "costs": {
            attention: {tokens: cost and cost._asdict() for tokens, cost in by_tokens.items()}
            for attention, by_tokens in costs.items()
        },
        "device": jax.local_devices()[0].device_kind,
    }
    (output / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    print(f"pictures and metrics.json are in {output}")


if __name__ == "__main__":
    main(parse_config(Config, PRESETS))
