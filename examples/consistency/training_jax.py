"""The training loop: AdamW, averaged weights, a progress bar, checkpoints that a run can go on from, and several GPUs."""

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from consistency.config import TrainingConfig
from consistency.loop import History, begin_afresh, training_loop

Parameters = Any
LossFunction = Callable[..., tuple[jax.Array, dict[str, jax.Array]]]


class TrainState(NamedTuple):
    step: jax.Array
    parameters: Parameters
    average: Parameters
    optimizer: optax.OptState


def make_optimizer(config: TrainingConfig) -> optax.GradientTransformation:
    schedule = (
        optax.linear_schedule(0.0, config.learning_rate, config.warmup_steps)
        if config.warmup_steps
        else config.learning_rate
    )
    return optax.adamw(schedule, b1=config.beta1, b2=config.beta2, weight_decay=config.weight_decay)


def initial_state(parameters: Parameters, optimizer: optax.GradientTransformation) -> TrainState:
    average = jax.tree.map(jnp.copy, parameters)  # a copy, because the training step donates both
    return TrainState(jnp.zeros((), jnp.int32), parameters, average, optimizer.init(parameters))


def make_train_step(
    loss: LossFunction, optimizer: optax.GradientTransformation, config: TrainingConfig, needs_average: bool = False
) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
    """A step down loss(parameters, key, images, labels), or, where it needs them, loss(parameters, average, key, …)."""

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: TrainState, *batch: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        # The step alone decides the noise, so that a resumed run repeats the uninterrupted one.
        key = jax.random.fold_in(jax.random.key(config.seed), state.step)
        weights = (state.parameters, state.average) if needs_average else (state.parameters,)
        gradients, metrics = jax.grad(loss, has_aux=True)(*weights, key, *batch)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.parameters)
        parameters = optax.apply_updates(state.parameters, updates)
        # A short memory at first: the initial weights should not linger in the average.
        decay = jnp.minimum(config.ema_decay, (1 + state.step) / (10 + state.step))
        average = optax.incremental_update(parameters, state.average, 1 - decay)
        return TrainState(state.step + 1, parameters, average, optimizer_state), metrics

    return train_step


def keep_state(
    train_step: Callable[..., tuple[TrainState, dict[str, jax.Array]]], sharding: NamedSharding, same_bits: bool
) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
    """The step, whose new state is sharded as the old one: XLA would leave parts of it here and there, to be brought back.

    `same_bits`: where devices share each example, all of them compute what becomes of labels and times.  XLA sums an embedding's
    gradient in any order, unless it is told otherwise, and their copies of the weights would grow apart within a thousand steps.
    """
    options = {"xla_gpu_deterministic_ops": True} if same_bits else None
    return jax.jit(train_step, donate_argnums=0, out_shardings=(sharding, None), compiler_options=options)


class Checkpoints:
    """The newest two states of a run, each with the history that led to it."""

    def __init__(self, folder: Path):
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self.manager = ocp.CheckpointManager(folder.resolve(), options=options)

    def save(self, state: TrainState, history: History) -> None:
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), history=ocp.args.JsonSave(history))
        self.manager.save(int(state.step), args=items)
        self.manager.wait_until_finished()  # the next training step donates what is being written

    def __bool__(self) -> bool:
        """Whether there is one."""
        return self.manager.latest_step() is not None

    def restore(self, state: TrainState) -> tuple[TrainState, History]:
        """The newest checkpoint, in the structure of `state`."""
        if not self:
            raise FileNotFoundError(f"`resume` needs a checkpoint: there is none in {self.manager.directory}")
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), history=ocp.args.JsonRestore())
        restored = self.manager.restore(self.manager.latest_step(), args=items)
        return restored.state, restored.history


def train(
    config: TrainingConfig,
    state: TrainState,
    train_step: Callable[..., tuple[TrainState, dict[str, jax.Array]]],
    make_batch: Callable[[int], tuple[Any, ...]],
    devices: Sequence[jax.Device] | None = None,
    may_be_done: bool = False,
    divided: int = 0,
) -> tuple[TrainState, History, float]:
    """Trains up to step `config.steps`. Returns the state, what was logged at each step, and steps per second.

    A checkpoint to resume from that has taken all steps is an error, unless `may_be_done`: then nothing is left to do.

    The `devices`, if not given all GPUs of this host or its CPU, divide each batch among them and compute what one would:
    XLA sums their gradients, and the noise is that of the whole batch.  `divided`: along which axis, 0 of the entries of a
    batch, 1 of the frames of a video, which is then one sequence over all devices.
    """
    if devices is None:
        devices = jax.local_devices()
        devices = devices[:1] if devices[0].platform == "cpu" else devices  # several CPU devices are one CPU
    if divided == 0 and config.batch % len(devices):
        raise ValueError(
            f"`batch` must be a multiple of the {len(devices)} devices (CUDA_VISIBLE_DEVICES chooses fewer): "
            f"got {config.batch}"
        )
    if len(devices) > 1:
        mesh = Mesh(devices, "devices")
        everywhere = NamedSharding(mesh, PartitionSpec())
        shards = NamedSharding(mesh, PartitionSpec(*[None] * divided, "devices"))
        state = jax.device_put(state, everywhere)  # before a checkpoint is restored alike
        train_step = keep_state(train_step, everywhere, same_bits=divided > 0)
    checkpoints = Checkpoints(begin_afresh(config))  # a manager would not write steps older than those it finds
    history: History = []
    if config.resume:
        state, history = checkpoints.restore(state)
        if may_be_done and int(state.step) >= config.steps:
            return jax.device_put(state, devices[0]), history, math.nan

    def take_step(step: int) -> dict[str, jax.Array]:
        nonlocal state
        batch = make_batch(step)
        if len(devices) > 1:
            batch = [
                jax.device_put(part, shards if np.ndim(part) > divided else everywhere) if np.ndim(part) else part
                for part in batch
            ]  # scalars go to all
        state, metrics = train_step(state, *batch)
        return metrics

    def save(_: int, history: History) -> None:
        checkpoints.save(state, history)

    steps_per_second = training_loop(config, int(state.step), history, take_step, save, fetch=jax.device_get)
    return jax.device_put(state, devices[0]), history, steps_per_second  # one device samples


def device_facts() -> dict[str, Any]:
    """The device and the most memory that this process has held on it so far, where the device reports it."""
    device = jax.local_devices()[0]
    memory = device.memory_stats() or {}
    return {"device": device.device_kind, "peak_device_memory_bytes": memory.get("peak_bytes_in_use")}
