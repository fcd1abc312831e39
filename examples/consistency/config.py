"""A dataclass is the configuration, and its fields are the command line."""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

Config = TypeVar("Config", bound="TrainingConfig")


def option(default: Any, description: str) -> Any:
    """A dataclass field with the line that `--help` prints for it."""
    return dataclasses.field(default=default, metadata={"help": description})


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """What every example needs, whatever it trains. The defaults are those of the smallest size, "digits"."""

    size: str = option("digits", "preset that the other options start from")
    attention: str = option("auto", "auto, triton, xla, interpret or naive; several, with commas between, are compared")
    compare: bool = option(False, "train once per attention, each in its own process, and print a table")
    output: str = option("output", "folder for pictures, metrics and checkpoints")
    resume: bool = option(False, "go on from the newest checkpoint in the output folder, not afresh")
    seed: int = option(0, "of weights, batches and noise")

    steps: int = option(1500, "training steps")
    batch: int = option(128, "images per training step")
    learning_rate: float = option(2e-3, "of AdamW, after the warm-up")
    warmup_steps: int = option(100, "steps in which the learning rate rises from zero")
    beta1: float = option(0.9, "AdamW's decay of the momentum")
    beta2: float = option(0.95, "AdamW's decay of the second moment")
    weight_decay: float = option(0.0, "AdamW's weight decay")
    ema_decay: float = option(0.995, "decay of the averaged weights, from which samples are drawn")
    log_every: int = option(20, "steps between two updates of the progress bar")
    checkpoint_every: int = option(1000, "steps between two checkpoints; one is always written at the end")
    samples: int = option(1440, "generated digits that the quality figures are measured on")

    mosaic: int = option(1, "digits along each side of an image")
    patch: int = option(2, "pixels along each side of a token")
    width: int = option(64, "channels of the transformer")
    depth: int = option(3, "blocks of the transformer")
    heads: int = option(4, "attention heads")
    unit = "images"  # of a batch; no option

    dtype: str = option("float32", "of activations and attention: float32 or bfloat16; parameters stay float32")


def parse_config(
    config_class: type[Config], presets: Mapping[str, Mapping[str, Any]], arguments: Sequence[str] | None = None
) -> Config:
    """Dataclass defaults, overridden by the preset that `--size` names, overridden by the command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for field in dataclasses.fields(config_class):
        flags = sorted({f"--{field.name}", f"--{field.name.replace('_', '-')}"})
        kind = {"action": argparse.BooleanOptionalAction} if field.type is bool else {"type": field.type}
        choices = {"choices": list(presets)} if field.name == "size" else {}
        parser.add_argument(
            *flags, dest=field.name, default=field.default, help=field.metadata["help"], **kind, **choices
        )
    size = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    size.add_argument("--size", default=config_class.size)
    parser.set_defaults(**presets.get(size.parse_known_args(arguments)[0].size, {}))
    return config_class(**vars(parser.parse_args(arguments)))


def to_arguments(config: TrainingConfig) -> list[str]:
    """The command line that gives this configuration back."""
    arguments = []
    for name, value in dataclasses.asdict(config).items():
        if isinstance(value, bool):
            arguments += [f"--{name}" if value else f"--no-{name}"]
        else:
            arguments += [f"--{name}={value}"]  # which may be negative
    return arguments
