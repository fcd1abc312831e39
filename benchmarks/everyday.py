"""Calls of attention that people make, by name: what `regret.py` times."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class Call(NamedTuple):
    batch: int
    queries: int
    keys: int
    heads: int
    key_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    kind: str = ""  # of KINDS

    def small(self) -> "Call":
        """The same kind of call at a size that is computed at once anywhere."""
        queries, keys = min(self.queries, 24), min(self.keys, 40 if self.queries < self.keys else 24)
        heads = max(2, 2 * self.heads // self.key_heads) if self.heads > self.key_heads else 2
        return self._replace(
            batch=2, queries=queries, keys=keys, heads=heads, key_heads=min(2, self.key_heads), head_dim=16
        )


KINDS = {
    "": "all keys",
    "causal": "query i sees keys up to i + keys - queries",
    "window": "query i sees the keys from i - 256 to i",
    "lengths": "each batch entry has keys of its own number, at least half of all",
    "mask": "a boolean for each key of each batch entry, four of five true",
    "dense mask": "a boolean for each score of each batch entry, four of five true",
    "bias": "a learned number for each head, query and key",
    "key bias": "a learned number for each key of each batch entry",
}

CALLS: dict[str, Call] = {
    # images
    "DiT-B/4": Call(256, 64, 64, 12, 12, 64),
    "DiT-S/2": Call(64, 256, 256, 6, 6, 64),
    "DiT-XL/2": Call(32, 256, 256, 16, 16, 72),
    "DiT-XL/2 at 512": Call(8, 1024, 1024, 16, 16, 72),
    "DiT-XL/2, float32": Call(32, 256, 256, 16, 16, 72, "float32"),
    "ViT-B/16": Call(64, 197, 197, 12, 12, 64),
    "ViT-B/16, float32": Call(32, 197, 197, 12, 12, 64, "float32"),
    "SD3": Call(4, 1178, 1178, 24, 24, 64),
    "Stable Diffusion, self": Call(4, 4096, 4096, 8, 8, 40),
    "Stable Diffusion, text": Call(4, 4096, 77, 8, 8, 40),
    "PixArt, text": Call(8, 1024, 120, 16, 16, 72, "bfloat16", "mask"),
    "BEiT": Call(32, 197, 197, 12, 12, 64, "bfloat16", "bias"),
    "Swin": Call(2048, 49, 49, 6, 6, 32, "bfloat16", "bias"),
    "Swin, float32": Call(512, 49, 49, 6, 6, 32, "float32", "bias"),
    # pooling and latents
    "attention pooling": Call(256, 1, 197, 12, 12, 64),
    "Perceiver, reads": Call(8, 64, 4096, 8, 8, 64),
    "Perceiver, writes": Call(8, 4096, 64, 8, 8, 64),
    "Set Transformer": Call(512, 16, 128, 8, 8, 32),
    # language
    "GPT, 512": Call(8, 512, 512, 12, 12, 64, "bfloat16", "causal"),
    "GPT, 1,024": Call(1, 1024, 1024, 16, 16, 64, "bfloat16", "causal"),
    "GPT, float32": Call(4, 1024, 1024, 12, 12, 64, "float32", "causal"),
    "Llama, 2,048": Call(1, 2048, 2048, 32, 8, 128, "bfloat16", "causal"),
    "Mistral, window": Call(1, 4096, 4096, 32, 8, 128, "bfloat16", "window"),
    "BERT, padded": Call(16, 300, 300, 8, 8, 64, "float16", "mask"),
    "T5": Call(4, 1024, 1024, 16, 16, 64, "bfloat16", "bias"),
    "decoding": Call(64, 1, 4096, 32, 8, 128),
    "decoding, lengths": Call(64, 1, 4096, 32, 8, 128, "bfloat16", "lengths"),
    "decoding, one sequence": Call(1, 1, 8192, 32, 8, 128),
    "speculative decoding": Call(16, 8, 4096, 32, 8, 128, "bfloat16", "causal"),
    # audio, policies
    "Whisper": Call(8, 1500, 1500, 12, 12, 64),
    "policy, dense mask": Call(2, 1670, 1670, 24, 24, 128, "bfloat16", "dense mask"),
    "diffusion policy": Call(256, 16, 16, 4, 4, 64),
    "diffusion policy, float32": Call(256, 16, 16, 4, 4, 64, "float32"),
    # science
    "potential, neighbours": Call(4096, 32, 32, 8, 8, 16, "float32", "bias"),
    "potential, cutoff": Call(4096, 32, 32, 8, 8, 16, "float32", "key bias"),
    "potential, bfloat16": Call(2048, 64, 64, 8, 8, 32),
    "molecules": Call(64, 64, 64, 10, 10, 64, "float32", "mask"),
    "wavefunction": Call(1024, 42, 42, 4, 4, 64, "float32"),
    "tiny sequences": Call(4096, 16, 16, 8, 8, 32),
    "triangle": Call(384, 384, 384, 4, 4, 32, "bfloat16", "bias"),
    # what the charts show
    "B1 L1024 H32 D64": Call(1, 1024, 1024, 32, 32, 64),
    "B1 L2048 H32 D64": Call(1, 2048, 2048, 32, 32, 64),
    "B1 L1024 H24 D128": Call(1, 1024, 1024, 24, 24, 128),
    "B4 L1024 H12 D64, float32": Call(4, 1024, 1024, 12, 12, 64, "float32"),
}


def checked(call: Call, a: Any) -> Any:
    """What is compared with float64 of an operand or a result: the first and the last batch entry; all, where entries share the
    gradient of a bias."""
    return a if call.kind == "bias" or a.shape[0] != call.batch else a[:: max(1, call.batch - 1)]


def entries(call: Call, a: Any, first: int, count: int) -> Any:
    """Of what each batch entry has of its own, so many entries."""
    return a if shared(call, a) else a[first : first + count]


def joined(call: Call, pieces: Sequence[np.ndarray]) -> np.ndarray:
    """The results of all entries; the sum of what they share."""
    return sum(pieces) if shared(call, pieces[0]) else np.concatenate(pieces)


def shared(call: Call, a: Any) -> bool:
    return call.kind == "bias" and a.shape == (1, call.heads, call.queries, call.keys)
