"""The training loop: AdamW, averaged weights, a progress bar, and checkpoints that a run can go on from."""

import functools
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import tqdm

from consistency.config import TrainingConfig
from consistency.data import Digits

Parameters = Any
History = list[dict[str, float]]
LossFunction = Callable[..., tuple[jax.Array, dict[str, jax.Array]]]


class TrainState(NamedTuple):
    step: jax.Array
    parameters: Parameters
    average: Parameters
    optimizer: optax.OptState


def make_optimizer(config: TrainingConfig) -> optax.GradientTransformation:
    schedule = optax.linear_schedule(0.0, config.learning_rate, config.warmup_steps)
    return optax.adamw(schedule, b2=config.beta2, weight_decay=config.weight_decay)


def initial_state(parameters: Parameters, optimizer: optax.GradientTransformation) -> TrainState:
    average = jax.tree.map(jnp.copy, parameters)  # a copy, because the training step donates both
    return TrainState(jnp.zeros((), jnp.int32), parameters, average, optimizer.init(parameters))


def make_train_step(
    loss: LossFunction, optimizer: optax.GradientTransformation, config: TrainingConfig, needs_average: bool = False
) -> Callable[[TrainState, jax.Array, jax.Array], tuple[TrainState, dict[str, jax.Array]]]:
    """A step down loss(parameters, key, images, labels), or, where it needs them, loss(parameters, average, key, …)."""

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: TrainState, images: jax.Array, labels: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        # The step alone decides the noise, so that a resumed run repeats the uninterrupted one.
        key = jax.random.fold_in(jax.random.key(config.seed), state.step)
        weights = (state.parameters, state.average) if needs_average else (state.parameters,)
        gradients, metrics = jax.grad(loss, has_aux=True)(*weights, key, images, labels)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.parameters)
        parameters = optax.apply_updates(state.parameters, updates)
        # A short memory at first: the initial weights should not linger in the average.
        decay = jnp.minimum(config.ema_decay, (1 + state.step) / (10 + state.step))
        average = optax.incremental_update(parameters, state.average, 1 - decay)
        return TrainState(state.step + 1, parameters, average, optimizer_state), metrics

    return train_step


class Checkpoints:
    """The newest two states of a run, each with the history that led to it."""

    def __init__(self, folder: Path):
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self.manager = ocp.CheckpointManager(folder.resolve(), options=options)

    def save(self, state: TrainState, history: History) -> None:
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), history=ocp.args.JsonSave(history))
        self.manager.save(int(state.step), args=items)
        self.manager.wait_until_finished()  # the next training step donates what is being written

    def restore(self, state: TrainState) -> tuple[TrainState, History]:
        """The newest checkpoint, in the structure of `state`."""
        if self.manager.latest_step() is None:
            raise FileNotFoundError(f"`resume` needs a checkpoint: there is none in {self.manager.directory}")
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), history=ocp.args.JsonRestore())
        restored = self.manager.restore(self.manager.latest_step(), args=items)
        return restored.state, restored.history


def train(
    config: TrainingConfig,
    state: TrainState,
    train_step: Callable[[TrainState, jax.Array, jax.Array], tuple[TrainState, dict[str, jax.Array]]],
    make_batch: Callable[[int], Digits],
) -> tuple[TrainState, History, float]:
    """Trains up to step `config.steps`. Returns the state, what was logged at each step, and steps per second."""
    folder = Path(config.output) / "checkpoints"
    if not config.resume:
        shutil.rmtree(folder, ignore_errors=True)  # a manager would not write steps older than those it finds
    checkpoints = Checkpoints(folder)
    history: History = []
    if config.resume:
        state, history = checkpoints.restore(state)
    start = int(state.step)
    if start >= config.steps:
        raise ValueError(
            f"`steps` must be more than the {start} that the checkpoint has already taken: got {config.steps}"
        )
    speeds: list[float] = []
    pending: list[dict[str, jax.Array]] = []
    clock = time.perf_counter()
    with tqdm.tqdm(total=config.steps, initial=start, unit="step", dynamic_ncols=True) as progress:
        for step in range(start + 1, config.steps + 1):
            state, metrics = train_step(state, *make_batch(step - 1))
            pending.append(metrics)
            is_checkpoint = step % config.checkpoint_every == 0 or step == config.steps
            if step % config.log_every == 0 or step == start + 1 or is_checkpoint:
                # Reading the metrics waits for the device, so it is done once in a while only.
                first = step - len(pending) + 1
                history += _to_floats(first, jax.device_get(pending))
                speeds.append(len(pending) / (time.perf_counter() - clock))
                progress.update(len(pending))
                progress.set_postfix(loss=f"{np.mean([entry['loss'] for entry in history[-len(pending) :]]):.4f}")
                pending.clear()
                if is_checkpoint:
                    checkpoints.save(state, history)
                clock = time.perf_counter()
    # The first interval is the first step, with the compilation.
    return state, history, statistics.median(speeds[1:] or speeds)


def peak_memory_bytes() -> int | None:
    """The most memory that this process has held on the device so far, where the device reports it."""
    statistics_of_device = jax.local_devices()[0].memory_stats()
    return None if statistics_of_device is None else statistics_of_device.get("peak_bytes_in_use")


def _to_floats(first_step: int, metrics: list[dict[str, np.ndarray]]) -> History:
    history = [
        {"step": first_step + index, **{name: float(value) for name, value in entry.items()}}
        for index, entry in enumerate(metrics)
    ]
    for entry in history:
        if not np.isfinite(entry["loss"]):
            raise FloatingPointError(f"the loss became {entry['loss']} at step {entry['step']}")
    return history
