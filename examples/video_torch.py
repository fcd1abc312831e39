"""Mean flows (arXiv:2505.13447) of videos, each one long sequence that all GPUs of the host share, in PyTorch.

    python examples/video_torch.py                                                   # 128 tokens, minutes on two CPU cores
    torchrun --nproc_per_node 2 examples/video_torch.py                              # the same by two processes
    torchrun --nproc_per_node 8 examples/video_torch.py --size video                 # 16,384 tokens, eight GPUs, bfloat16
    torchrun --nproc_per_node 8 examples/video_torch.py --size video --steps 40000 --resume  # go on from the last checkpoint

The model and its training step are those of one GPU. `context_parallel` around them says that processes share a sequence, and
training gives each of them its frames of every video (`divided=1`). Attention, its tangent and their gradients follow: key
heads permitting, shards of the sequence are exchanged for shards of the heads, else keys and values go around in a ring.
video_jax.py is the same in JAX.
"""

import contextlib
import dataclasses
import json
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import torch_bridge
from consistency import plots
from consistency.config import option, parse_config
from consistency.data import CLASSES, DIGIT_SIZE, load_digits
from consistency.models_torch import VideoTransformer
from consistency.moving import PRESETS, film_strips, moving_digits
from consistency.training_torch import device_facts, process_device, rank_and_processes, train
from meanflow_torch import Config as MeanFlowConfig
from meanflow_torch import MeanFlow

SAMPLING_STEPS = (1, 4)


@dataclasses.dataclass(frozen=True)
class Config(MeanFlowConfig):
    output: str = option("output/video_torch", "folder for pictures, metrics and checkpoints")
    mosaic: int = option(2, "digits that fit along each side of a frame")
    frames: int = option(8, "frames of a video")
    movers: int = option(1, "digits that move in a video")
    strategy: str = option("auto", "auto, ulysses, ring or all_gather: how processes share a sequence")
    patch: int = option(4, "pixels along each side of a token")
    batch: int = option(32, "videos per training step")
    unit = "videos"
    samples: int = option(10, "videos to be drawn")
    steps: int = option(2000, "training steps")
    compile: bool = option(False, "compile the training step with torch.compile, on a GPU with CUDA graphs")

    @property
    def tokens(self) -> int:
        return self.frames * (self.mosaic * DIGIT_SIZE // self.patch) ** 2


class VideoMeanFlow(MeanFlow):
    """Each process has its frames of all videos."""

    def __init__(self, config: Config):
        super().__init__(config)
        part, self.parts = rank_and_processes()
        self.network = VideoTransformer(config, config.frames, 2, part, self.parts)

    def forward(self, *batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = super().forward(*batch)
        return self.parts * loss, metrics  # of whose gradients the processes take the mean

    def of_all_processes(self, of_samples: Tensor) -> Tensor:
        if self.parts > 1:
            dist.all_reduce(of_samples)
        return of_samples


def main(config: Config) -> None:
    if config.attention != "auto":
        raise ValueError(f"`attention` must be auto, which is divided along the sequence: got {config.attention}")
    digits, held_out = load_digits()
    side = config.mosaic * DIGIT_SIZE
    with process_device() as device, contextlib.ExitStack() as stack:
        rank, processes = rank_and_processes()
        if config.frames % processes:
            raise ValueError(f"`frames` must be a multiple of the {processes} processes: got {config.frames}")
        if processes > 1:
            strategy = None if config.strategy == "auto" else config.strategy
            stack.enter_context(torch_bridge.context_parallel(dist.group.WORLD, strategy))
        if rank == 0:
            print(f"{config.tokens} tokens a video, {config.tokens // processes} in each of {processes} processes")

        def videos(batch: int, step: int) -> tuple[np.ndarray, np.ndarray]:
            return moving_digits(digits, batch, config.frames, side, config.movers, config.seed, step)

        torch.manual_seed(config.seed)
        method, history, steps_per_second = train(
            config, VideoMeanFlow(config).to(device), lambda step: videos(config.batch, step), divided=1
        )
        facts = device_facts()
        noise = np.random.default_rng(config.seed).standard_normal(
            (config.samples, config.frames, side, side), np.float32
        )
        labels = np.arange(config.samples) % CLASSES
        drawn = {f"{n} step{'s' * (n > 1)}": sample(method, noise, labels, n) for n in SAMPLING_STEPS}
        if rank == 0:
            output = Path(config.output)
            real = moving_digits(held_out, 5, config.frames, side, config.movers, config.seed, 0).images
            film_strips(output / "samples.png", "MeanFlow videos", drawn | {"held out": real})
            curves = {"loss": "squared error per pixel", "tangent_norm": "root mean square of du/dt"}
            plots.curves(output / "curves.png", "MeanFlow videos", history, curves)
            metrics = {
                "config": dataclasses.asdict(config),
                "steps": config.steps,
                "steps_per_second": steps_per_second,
                "tokens": config.tokens,
                "processes": processes,
                "loss": float(np.mean([entry["loss"] for entry in history[-100:]])),
                **facts,
            }
            (output / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
            print(
                f"loss {metrics['loss']:.4f}, {steps_per_second:.2f} steps a second; pictures and metrics.json are in {output}"
            )


@torch.no_grad()
def sample(method: MeanFlow, noise: np.ndarray, labels: np.ndarray, steps: int) -> np.ndarray:
    """Whole videos, of which each process draws its frames."""
    rank, processes = rank_and_processes()
    device = next(method.parameters()).device
    mine = torch.tensor(np.split(noise, processes, 1)[rank], device=device)
    drawn = method.sample(mine, torch.tensor(labels, device=device), steps).contiguous()
    if processes == 1:
        return drawn.cpu().numpy()
    parts = [torch.empty_like(drawn) for _ in range(processes)]
    dist.all_gather(parts, drawn)
    return torch.cat(parts, 1).cpu().numpy()


if __name__ == "__main__":
    main(parse_config(Config, PRESETS))
