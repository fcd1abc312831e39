"""Mean flows (arXiv:2505.13447) of videos, each one long sequence that all GPUs of the host share.

    python examples/video_jax.py                                       # 128 tokens, minutes on two CPU cores
    python examples/video_jax.py --size video                          # 16,384 tokens, bfloat16
    python examples/video_jax.py --size video --steps 40000 --resume   # go on from the last checkpoint
    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/video_jax.py --devices 4     # as if on four

The model and its training step are those of one device. A single line says that devices share each video's frames, and so its
tokens: `divided=1`, the axis of the frames, for which training puts each video on the devices in shards. Attention, its tangent
and their gradients follow: key heads permitting, shards of the sequence are exchanged for shards of the heads, else keys and
values go around in a ring.
"""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from consistency import plots
from consistency.config import option, parse_config
from consistency.data import CLASSES, DIGIT_SIZE, load_digits
from consistency.models_jax import VideoTransformer
from consistency.moving import PRESETS, film_strips, moving_digits
from consistency.training_jax import device_facts, initial_state, make_optimizer, make_train_step, train
from meanflow_jax import Config as MeanFlowConfig
from meanflow_jax import MeanFlow

SAMPLING_STEPS = (1, 4)


@dataclasses.dataclass(frozen=True)
class Config(MeanFlowConfig):
    output: str = option("output/video_jax", "folder for pictures, metrics and checkpoints")
    mosaic: int = option(2, "digits that fit along each side of a frame")
    frames: int = option(8, "frames of a video")
    movers: int = option(1, "digits that move in a video")
    devices: int = option(0, "that share each video; 0: all GPUs of this host, or one CPU device")
    patch: int = option(4, "pixels along each side of a token")
    batch: int = option(32, "videos per training step")
    unit = "videos"
    samples: int = option(10, "videos to be drawn")
    steps: int = option(2000, "training steps")

    @property
    def tokens(self) -> int:
        return self.frames * (self.mosaic * DIGIT_SIZE // self.patch) ** 2


def main(config: Config) -> None:
    if config.attention == "naive":
        raise ValueError("`attention` must not be naive: that is not divided along the sequence")
    devices = jax.local_devices()
    devices = devices[: config.devices or (1 if devices[0].platform == "cpu" else len(devices))]
    if config.frames % len(devices):
        raise ValueError(f"`frames` must be a multiple of the {len(devices)} devices: got {config.frames}")
    print(f"{config.tokens} tokens a video, {config.tokens // len(devices)} on each of {len(devices)} devices")
    digits, held_out = load_digits()
    side = config.mosaic * DIGIT_SIZE
    videos = functools.partial(moving_digits, frames=config.frames, side=side, movers=config.movers, seed=config.seed)
    graph, parameters = nnx.split(VideoTransformer(config, config.frames, times=2, rngs=nnx.Rngs(config.seed)))
    method = MeanFlow(config, graph)
    optimizer = make_optimizer(config)
    state, history, steps_per_second = train(
        config,
        initial_state(parameters, optimizer),
        make_train_step(method.loss, optimizer, config),
        lambda step: videos(digits, config.batch, step=step),
        devices,
        divided=1,
    )
    facts = device_facts()

    mesh = Mesh(devices, "devices")
    noise = np.random.default_rng(config.seed).standard_normal((config.samples, config.frames, side, side), np.float32)
    noise = jax.device_put(noise, NamedSharding(mesh, PartitionSpec(None, "devices")))
    average = jax.device_put(state.average, NamedSharding(mesh, PartitionSpec()))
    labels = np.arange(config.samples) % CLASSES
    drawn = {f"{n} step{'s' * (n > 1)}": np.asarray(method.sample(average, noise, labels, n)) for n in SAMPLING_STEPS}

    output = Path(config.output)
    film_strips(output / "samples.png", "MeanFlow videos", drawn | {"held out": videos(held_out, 5, step=0).images})
    curves = {"loss": "squared error per pixel", "tangent_norm": "root mean square of du/dt"}
    plots.curves(output / "curves.png", "MeanFlow videos", history, curves)
    metrics = {
        "config": dataclasses.asdict(config),
        "steps": int(state.step),
        "steps_per_second": steps_per_second,
        "tokens": config.tokens,
        "devices": len(devices),
        "loss": float(np.mean([entry["loss"] for entry in history[-100:]])),
        **facts,
    }
    (output / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    print(
        f"loss {metrics['loss']:.4f}, {steps_per_second:.2f} steps a second; pictures and metrics.json are in {output}"
    )


if __name__ == "__main__":
    main(parse_config(Config, PRESETS))
