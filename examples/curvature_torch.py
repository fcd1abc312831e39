"""Curvature of a language model of transformers, by the name of its attention: Hessian and Gauss-Newton products, in PyTorch.

    python examples/curvature_torch.py                            # a minute on two CPU cores
    python examples/curvature_torch.py --size long                # a GPU: up to 16,384 tokens of heads of 64 channels
    python examples/curvature_torch.py --iterations 40 --resume   # go on with the iterations that are written down

A Llama with random weights learns nothing here: its loss on Python's language reference is differentiated.  The Hessian H of the
loss and its Gauss-Newton matrix G = Jᵀ (∂²ℓ/∂z²) J, which is H without the curvature of the network, are too large to write down,
but products with them are one derivative more than the gradient: what attribution of training data and second-order optimizers
need.  Lanczos iterations find the largest eigenvalues of both.  The last picture shows what a product costs as the text grows,
next to eager attention, which keeps every score.
"""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import scipy.linalg
import torch
import torch.nn.functional as F
import tqdm
import transformers
from torch import Tensor
from torch.func import functional_call, grad, jvp, vjp

import torch_bridge.transformers  # noqa: F401  makes the name known
from consistency import plots
from consistency.config import option, parse_config
from consistency.text import load_text, spread_batch

NAMES = {"flash": "flash_jvp", "eager": "eager"}
Product = Callable[[Tensor], Tensor]  # v → H v, or G v


@dataclasses.dataclass(frozen=True)
class Config:
    size: str = option("text", "preset that the other options start from")
    output: str = option("output/curvature_torch", "folder for pictures and metrics")
    resume: bool = option(False, "go on with the iterations in the output folder, not afresh")
    seed: int = option(0, "of weights and of the vector that iterations begin with")
    width: int = option(32, "channels of the model")
    depth: int = option(2, "layers of the model")
    heads: int = option(4, "query heads; half as many key heads")
    length: int = option(64, "characters of a sequence")
    samples: int = option(8, "sequences that the loss is the mean of")
    iterations: int = option(16, "Lanczos iterations, of one product each")
    timed_lengths: str = option("64,128,256", "characters of the one sequence that a product is timed on")
    timed_dtype: str = option("float32", "of weights and activations in the products that are timed")
    repeats: int = option(3, "times that each product is timed, of which the median counts")
    compare: bool = option(True, "time eager attention too")


PRESETS = {
    "text": {},
    "long": dict(width=512, depth=8, heads=8, length=512, timed_lengths="1024,4096,16384", timed_dtype="bfloat16"),
}


class Curvature:
    """The mean cross-entropy of a model, with all parameters in one flat vector, and its second derivatives."""

    def __init__(self, config: Config, attention: str, vocabulary: int, length: int, dtype: torch.dtype, device: str):
        torch.manual_seed(config.seed)
        sizes = dict(hidden_size=config.width, intermediate_size=3 * config.width, num_hidden_layers=config.depth)
        heads = dict(num_attention_heads=config.heads, num_key_value_heads=max(1, config.heads // 2))
        llama = transformers.LlamaConfig(
            **sizes, **heads, vocab_size=vocabulary, max_position_embeddings=length, initializer_range=0.1,
            attn_implementation=NAMES[attention], bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        self.model = transformers.LlamaForCausalLM(llama).to(device, dtype).eval()
        named = dict(self.model.named_parameters())
        self.names, self.shapes = [*named], [p.shape for p in named.values()]
        self.theta = torch.cat([p.detach().flatten() for p in named.values()])

    def logits(self, theta: Tensor, tokens: Tensor) -> Tensor:
        parts = theta.split([shape.numel() for shape in self.shapes])
        named = {n: part.view(s) for n, s, part in zip(self.names, self.shapes, parts, strict=True)}
        return functional_call(self.model, named, (), dict(input_ids=tokens[:, :-1], use_cache=False)).logits

    @staticmethod
    def cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).to(logits.dtype)

    def hessian(self, tokens: Tensor) -> Product:
        """H v = ∂/∂ε ∇L(θ + ε v): forward over reverse."""
        loss = lambda theta: self.cross_entropy(self.logits(theta, tokens), tokens)
        return lambda vector: jvp(grad(loss), (self.theta,), (vector,))[1]

    def gauss_newton(self, tokens: Tensor) -> Product:
        """G v = Jᵀ (∂²ℓ/∂z²) J v: a JVP of the network, a Hessian product of the last layer, a VJP of the network."""
        predict = lambda theta: self.logits(theta, tokens)

        def product(vector: Tensor) -> Tensor:
            logits, along = jvp(predict, (self.theta,), (vector,))
            curved = jvp(grad(lambda z: self.cross_entropy(z, tokens)), (logits,), (along,))[1]
            return vjp(predict, self.theta)[1](curved)[0]

        return product


class Lanczos:
    """Qᵀ A Q = T with orthonormal rows of `basis` as Q, T tridiagonal; it is written down after each iteration."""

    def __init__(self, start: np.ndarray, path: Path, resume: bool):
        self.path, self.basis, self.diagonal, self.sizes = path, [start / np.linalg.norm(start)], [], []
        if resume:
            if not path.exists():
                raise FileNotFoundError(f"`resume` needs iterations that are written down: there is no {path}")
            kept = np.load(path)
            self.basis, self.diagonal, self.sizes = [*kept["basis"]], [*kept["diagonal"]], [*kept["sizes"]]

    def run(self, name: str, product: Callable[[np.ndarray], np.ndarray], iterations: int) -> None:
        for _ in tqdm.trange(len(self.diagonal), iterations, desc=name, unit="product", dynamic_ncols=True):
            remainder = product(self.basis[-1])
            self.diagonal.append(self.basis[-1] @ remainder)
            basis = np.stack(self.basis)
            for _ in range(2):  # rounding would bring back what was removed
                remainder = remainder - (basis @ remainder) @ basis
            self.sizes.append(np.linalg.norm(remainder))
            self.basis.append(remainder / self.sizes[-1])
            np.savez(self.path, basis=self.basis, diagonal=self.diagonal, sizes=self.sizes)

    def eigenvalues(self, count: int) -> np.ndarray:
        """The largest Ritz values, in descending order."""
        values = scipy.linalg.eigh_tridiagonal(self.diagonal, self.sizes[:-1], eigvals_only=True)
        return values[::-1][:count]


def measure(config: Config, attention: str, length: int, vocabulary: int, device: str) -> dict | None:
    """Milliseconds and MiB of both products on one sequence, or None where they do not fit into memory."""
    dtype = getattr(torch, config.timed_dtype)
    try:
        curvature = Curvature(config, attention, vocabulary, length, dtype, device)
        tokens = (torch.arange(length + 1, device=device) % vocabulary)[None]
        vector, cost = torch.ones_like(curvature.theta), {}
        for name, product in (("hessian", curvature.hessian(tokens)), ("gauss_newton", curvature.gauss_newton(tokens))):
            product(vector)
            seconds, held = [], 0
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                held = torch.cuda.memory_allocated()
            for _ in range(config.repeats):
                clock = time.perf_counter()
                product(vector)
                if device == "cuda":
                    torch.cuda.synchronize()
                seconds.append(time.perf_counter() - clock)
            mib = (torch.cuda.max_memory_allocated() - held) / 2**20 if device == "cuda" else None
            cost[name] = dict(milliseconds=1e3 * statistics.median(seconds), mib=mib)
        return cost
    except torch.OutOfMemoryError:
        return None


def draw(path: Path, values: dict[str, np.ndarray], costs: dict[str, dict[int, dict | None]]) -> None:
    memory = any(cost and cost["hessian"]["mib"] for by in costs.values() for cost in by.values())
    figure, axes = plt.subplots(1, 2 + memory, figsize=(5.2 * (2 + memory), 4))
    labels = {"hessian": "Hessian", "gauss_newton": "Gauss-Newton"}
    for name, eigenvalues in values.items():
        axes[0].plot(np.arange(1, len(eigenvalues) + 1), eigenvalues, "o-", markersize=4, label=labels[name])
    plots.label_axes(axes[0], "rank", "largest eigenvalues")
    for axis, unit in zip(axes[1:], ("milliseconds", "mib"), strict=False):
        for attention, by_length in costs.items():
            color = "#c8553d" if attention == "eager" else plots.INK
            fitting = {length: cost for length, cost in by_length.items() if cost}
            for name, style in (("hessian", "o-"), ("gauss_newton", "s--")):
                figures = [cost[name][unit] for cost in fitting.values()]
                axis.loglog(
                    list(fitting), figures, style, color=color, markersize=4, label=f"{labels[name]}, {attention}"
                )
        axis.minorticks_off()
        plots.label_axes(
            axis, "characters", "milliseconds of a product" if unit == "milliseconds" else "MiB of a product"
        )
    for axis in axes[:2]:
        axis.legend(frameon=False)
    plots.save(figure, "Curvature of a language model's loss", path)


def main(config: Config) -> None:
    text, device = load_text(), "cuda" if torch.cuda.is_available() else "cpu"
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    tokens = spread_batch(text.train, config.samples, config.length + 1).astype(np.int64)
    curvature = Curvature(config, "flash", text.vocabulary, config.length, torch.float32, device)
    start = np.random.default_rng(config.seed).standard_normal(len(curvature.theta)).astype(np.float32)
    values = {}
    for name in ("hessian", "gauss_newton"):
        product = getattr(curvature, name)(torch.as_tensor(tokens, device=device))
        krylov = Lanczos(start, output / f"{name}.npz", config.resume)
        krylov.run(name, lambda v, p=product: p(torch.as_tensor(v, device=device)).cpu().numpy(), config.iterations)
        values[name] = krylov.eigenvalues(10)
        print(f"{name}: {', '.join(f'{value:.3g}' for value in values[name])}", flush=True)
    costs: dict[str, dict[int, dict | None]] = {}
    for length in map(int, config.timed_lengths.split(",")):
        for attention in ("flash", "eager") if config.compare else ("flash",):
            cost = costs.setdefault(attention, {})[length] = measure(config, attention, length, text.vocabulary, device)
            figures = {name: f"{c['milliseconds']:.1f} ms" for name, c in cost.items()} if cost else "does not fit"
            print(f"{length:6} characters, {attention}: {figures}", flush=True)
    draw(output / "curvature.png", values, costs)
    figures = {name: v.tolist() for name, v in values.items()}
    metrics = dict(config=dataclasses.asdict(config), eigenvalues=figures, costs=costs, parameters=len(start))
    (output / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    print(f"curvature.png and metrics.json are in {output}")


if __name__ == "__main__":
    main(parse_config(Config, PRESETS))
