"""Training with PyTorch's own tools: AdamW, averaged weights, checkpoints, and several processes under torchrun."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from consistency.config import TrainingConfig, option
from consistency.loop import History, begin_afresh, training_loop


@dataclasses.dataclass(frozen=True)
class TorchConfig(TrainingConfig):
    attention: str = option("auto", "auto (torch_bridge's) or naive; both, with a comma between, are compared")
    compile: bool = option(False, "compile the training step with torch.compile, on a GPU with CUDA graphs")


@contextlib.contextmanager
def process_device() -> Iterator[torch.device]:
    """The device of this process; one of several, which exchange gradients, if torchrun started it."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # several only wait for each other over matrices as small as these
    if not dist.is_torchelastic_launched():
        yield device
        return
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def rank_and_processes() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class Checkpoints:
    """The newest two states of a run, each with the history that led to it. The first process alone writes them."""

    def __init__(self, folder: Path, state: dict[str, Any]):
        self.folder = folder
        self.state = state  # whatever has state_dict and load_state_dict

    def save(self, step: int, history: History) -> None:
        if rank_and_processes()[0] != 0:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {name: part.state_dict() for name, part in self.state.items()}
        unfinished = self.folder / "unfinished"
        torch.save({"step": step, "history": history, **state}, unfinished)
        unfinished.rename(self.folder / f"{step}.pt")
        for path in self._paths()[:-2]:
            path.unlink()

    def __bool__(self) -> bool:
        """Whether there is one."""
        return bool(self._paths())

    def restore(self, device: torch.device) -> tuple[int, History]:
        """Brings the state to where the newest checkpoint was."""
        if not self:
            raise FileNotFoundError(f"`resume` needs a checkpoint: there is none in {self.folder}")
        checkpoint = torch.load(self._paths()[-1], map_location=device, weights_only=True)
        for name, part in self.state.items():
            part.load_state_dict(checkpoint[name])
        return checkpoint["step"], checkpoint["history"]

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("*.pt"), key=lambda path: int(path.stem))


def train(
    config: TorchConfig,
    method: nn.Module,
    make_batch: Callable[[int], tuple[Any, ...]],
    may_be_done: bool = False,
    divided: int = 0,
) -> tuple[nn.Module, History, float]:
    """Trains up to step `config.steps`. Returns the method with averaged weights, the history and steps per second.

    A checkpoint to resume from that has taken all steps is an error, unless `may_be_done`: then nothing is left to do.

    `method.draw(generator, shape)` gives the random tensors of a step, the batch their first axis, and
    `method(images, labels, …, *random)` the loss and its metrics.  Several processes divide a batch along axis `divided`: 0 of
    its entries, or 1 of the frames of a video, of which a process then has a part; its loss is the mean of theirs.
    """
    device = next(method.parameters()).device
    rank, processes = rank_and_processes()
    if divided == 0 and config.batch % processes:
        raise ValueError(f"`batch` must be a multiple of the {processes} processes: got {config.batch}")
    betas = config.beta1, config.beta2
    optimizer = torch.optim.AdamW(
        method.parameters(), config.learning_rate, betas=betas, weight_decay=config.weight_decay
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, step / config.warmup_steps) if config.warmup_steps else 1.0
    )

    def moving_average(average: Tensor, parameter: Tensor, count: Tensor) -> Tensor:
        # A short memory at first: the initial weights should not linger in the average.
        return parameter.lerp(average, ((1 + count) / (10 + count)).clamp(max=config.ema_decay))

    average = AveragedModel(method, avg_fn=moving_average)
    state = {"method": method, "average": average, "optimizer": optimizer, "schedule": schedule}
    checkpoints = Checkpoints(begin_afresh(config), state)
    start, history = 0, []
    if config.resume:
        start, history = checkpoints.restore(device)
        if may_be_done and start >= config.steps:
            return average.module, history, math.nan

    loss_module = method
    if config.compile:
        torch._dynamo.config.optimize_ddp = (
            False  # which cuts a graph between buckets of gradients, and with it the JVP
        )
        loss_module = torch.compile(method, mode="reduce-overhead" if device.type == "cuda" else None)
    if processes > 1:
        loss_module = DistributedDataParallel(loss_module)

    def take_step(step: int) -> dict[str, Tensor]:
        # The step alone decides the noise, so that a resumed run repeats the uninterrupted one, and every process
        # draws that of the whole batch, so that several repeat one.
        batch = [torch.as_tensor(part, device=device) for part in make_batch(step)]
        seed = np.random.SeedSequence((config.seed, step)).generate_state(1, np.uint64)
        generator = torch.Generator(device).manual_seed(int(seed[0]))
        batch += method.draw(generator, batch[0].shape)
        if divided:
            mine = [part.chunk(processes, divided)[rank] if part.ndim > divided else part for part in batch]
        else:
            mine = [part[rank::processes] for part in batch]
        loss, metrics = loss_module(*mine)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        average.update_parameters(method)
        return {
            name: value.clone() for name, value in metrics.items()
        }  # the next step writes where a graph's results are

    steps_per_second = training_loop(config, start, history, take_step, checkpoints.save, quiet=rank != 0)
    return average.module, history, steps_per_second


def numpy_sampler(method: nn.Module) -> Callable[[np.ndarray, np.ndarray, int], np.ndarray]:
    """method.sample as a function of arrays."""
    device = next(method.parameters()).device

    @torch.no_grad()
    def sample(noise: np.ndarray, labels: np.ndarray, steps: int) -> np.ndarray:
        return method.sample(torch.tensor(noise, device=device), torch.tensor(labels, device=device), steps).cpu()

    return sample


def device_facts() -> dict[str, Any]:
    """The device and the most memory that this process has held on it so far, where it is counted."""
    if not torch.cuda.is_available():
        return {"device": "cpu", "peak_device_memory_bytes": None}
    return {"device": torch.cuda.get_device_name(), "peak_device_memory_bytes": torch.cuda.max_memory_allocated()}
