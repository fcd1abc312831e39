"""The language reference that Python ships for its `help`: half a million characters of prose and code, nothing to download."""

import pydoc_data.topics
from typing import NamedTuple

import numpy as np


class Text(NamedTuple):
    train: np.ndarray  # [characters], int32
    held_out: np.ndarray  # the last tenth
    characters: str  # what the numbers stand for

    @property
    def vocabulary(self) -> int:
        return len(self.characters)


def load_text() -> Text:
    text = "\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    characters = "".join(sorted(set(text)))
    numbers = {character: number for number, character in enumerate(characters)}
    tokens = np.array([numbers[character] for character in text], np.int32)
    return Text(*np.split(tokens, [len(tokens) * 9 // 10]), characters)


def training_batch(tokens: np.ndarray, batch: int, length: int, seed: int, step: int) -> np.ndarray:
    """[batch, length] consecutive characters from random places."""
    starts = np.random.default_rng((seed, step)).integers(0, len(tokens) - length, batch)
    return tokens[starts[:, None] + np.arange(length)]


def spread_batch(tokens: np.ndarray, batch: int, length: int) -> np.ndarray:
    """[batch, length] consecutive characters from places that are spread evenly."""
    starts = np.linspace(0, len(tokens) - length, batch).astype(int)
    return tokens[starts[:, None] + np.arange(length)]
