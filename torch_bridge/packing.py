"""Which tokens of packed sequences count, and blanks in the place of the others."""

from torch import Tensor

from jax_flash_jvp import visibility


def counted(tokens: int, edges: Tensor, lengths: Tensor | None) -> Tensor | None:
    """Which tokens of packed sequences count, where only the first so many of each do; None: all."""
    if lengths is None:
        return None
    own = visibility.documents(tokens, edges, lengths=lengths, key_lengths=lengths, like=edges)[0, 0, :, 0]
    return own[:, 0] < own[:, 1]


def blank(a: Tensor, counts: Tensor | None, fill: float = 0) -> Tensor:
    """[…, tokens, channels] with `fill` where tokens do not count; what lies there, or in its cotangent, goes nowhere."""
    return a if counts is None else a.masked_fill(~counts[:, None], fill)
