"""The same training with one attention after another: a table of speed, memory and quality."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

from consistency.config import TrainingConfig, to_arguments

OUT_OF_MEMORY = (b"RESOURCE_EXHAUSTED", b"Out of memory", b"out of memory", b"OutOfMemoryError")


def compare(config: TrainingConfig) -> int:
    """Runs the calling script once per attention and prints the table; returns the exit status.

    Each run has a process of its own: a device's peak memory cannot be reset within one, and one that runs out of
    memory must not take the others with it. This process leaves the device alone.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ValueError("`compare` starts processes of its own: run it with python, not with torchrun")
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    attentions = config.attention.split(",")
    if len(attentions) == 1:
        attentions = list(dict.fromkeys([*attentions, "naive"]))
    results = {name: _train(dataclasses.replace(config, attention=name, compare=False)) for name in attentions}
    lines = ["attention,steps per second,peak device memory in GiB,one-step class agreement"]
    for name, result in results.items():
        if isinstance(result, str):
            lines.append(f"{name},{result},,")
        else:
            peak = result["peak_device_memory_bytes"]
            memory = "not reported" if peak is None else f"{peak / 2**30:.2f}"
            agreement = result["quality"]["1 step"]["class_agreement"]
            lines.append(f"{name},{result['steps_per_second']:.2f},{memory},{agreement:.1%}")
    (output / "compare.csv").write_text("\n".join(lines) + "\n")
    cells = [line.split(",") for line in lines]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 1 if "failed" in results.values() else 0


def _train(config: TrainingConfig) -> dict | str:
    """What the run wrote into its metrics.json, or why there is none."""
    config = dataclasses.replace(config, output=str(Path(config.output) / config.attention))
    print(f"training with attention {config.attention} in {config.output}", file=sys.stderr)
    process = subprocess.Popen([sys.executable, sys.argv[0], *to_arguments(config)], stderr=subprocess.PIPE)
    complaints = b""
    while chunk := process.stderr.read1():  # the run's progress bar passes through as it comes
        sys.stderr.buffer.write(chunk)
        sys.stderr.flush()
        complaints += chunk
    if process.wait() == 0:
        return json.loads((Path(config.output) / "metrics.json").read_text())
    return "out of memory" if any(sign in complaints for sign in OUT_OF_MEMORY) else "failed"
