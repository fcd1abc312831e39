"""A group of processes that share a sequence: which part each has, and whether they agree on what they share.

Operators take no records, so that a group is a word: the order of its parts, and the name by which PyTorch finds it.
"""

import urllib.parse
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from jax_flash_jvp.context import Order, chunks_of
from torch_bridge import private


class Group(NamedTuple):
    name: str
    size: int
    rank: int
    order: Order = "contiguous"

    @property
    def word(self) -> str:
        return f"{self.order}:{urllib.parse.quote(self.name, safe='')}"

    @staticmethod
    def of_word(word: str) -> "Group":
        order, _, name = word.partition(":")
        name = urllib.parse.unquote(name)
        process_group = _process_group(name)
        return Group(name, process_group.size(), process_group.rank(), order)  # type: ignore[arg-type]

    @property
    def process_group(self) -> Any:
        return _process_group(self.name)

    @property
    def chunks(self) -> int:
        """In how many a process's part is cut."""
        return len(self.chunks_of(self.rank))

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """Their numbers, among all of the sequence."""
        return chunks_of(self.order, self.size, rank)

    @property
    def all_chunks(self) -> list[int]:
        """In the order in which the group has them."""
        return [chunk for rank in range(self.size) for chunk in self.chunks_of(rank)]

    def cut(self, a: Tensor, axis: int) -> Tensor:
        """A whole sequence as [n, T/n] along that axis and the next, a part for each process."""
        if self.order == "zigzag":
            a = _permuted(a, axis, self.all_chunks)
        return a.unflatten(axis, (self.size, -1))

    def joined(self, a: Tensor, axis: int) -> Tensor:
        """The inverse of `cut`."""
        a = a.flatten(axis, axis + 1)
        if self.order == "zigzag":
            chunks = self.all_chunks
            a = _permuted(a, axis, [chunks.index(i) for i in range(len(chunks))])
        return a


def _permuted(a: Tensor, axis: int, chunks: list[int]) -> Tensor:
    parts = a.chunk(len(chunks), axis)
    return torch.cat([parts[i] for i in chunks], axis)


def _process_group(name: str) -> Any:
    return private.process_group(name)


def all_gather(group: Group, result: Tensor, a: Tensor, **options: Any) -> Any:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before PyTorch 2.13
    return gather(result, a, group=group.process_group, **options)


# calls on which a group has agreed, for as long as there is that group
_agreed: weakref.WeakKeyDictionary[Any, set[tuple]] = weakref.WeakKeyDictionary()
MOST = 1024  # of a group, which then forgets them all: at the same call in each of its processes, which call alike
BYTES = 1024  # of a description


def agree(group: Group, what: str, tensors: Sequence[Tensor | None]) -> None:
    """Raise a ValueError in every process of the group unless all are about to do the same with tensors that look the same.
    They ask one another at the first such call, since to compare takes as long as a transfer."""
    looks = tuple([None if a is None else (a.dtype, *a.shape) for a in tensors])
    agreed, key = _agreed.setdefault(group.process_group, set()), (group.order, what, looks)
    if key in agreed:
        return
    text = f"{what} of " + ", ".join(
        "x".join(map(str, [*look[1:], str(look[0]).removeprefix("torch.")])) for look in looks if look is not None
    )
    like = next(a for a in tensors if a is not None)
    mine = torch.tensor([*text.encode()[:BYTES].ljust(BYTES)], dtype=torch.uint8, device=like.device)
    everyones = mine.new_empty(group.size, BYTES)
    all_gather(group, everyones.view(-1), mine)
    texts = [bytes(row).decode(errors="replace").strip() for row in everyones.cpu().numpy()]
    if len({*texts}) > 1:
        listed = "; ".join(f"rank {rank}: {said}" for rank, said in enumerate(texts))
        raise ValueError(
            "the processes of `context_group` must call attention alike, with equal parts of the sequence, the same strategy and "
            f"the same arguments: pad the sequence to a multiple of {group.size * group.chunks} and hide the padding by "
            f"`key_value_seq_lengths`; got, as they are computed, {listed}"
        )
    if len(agreed) >= MOST:
        agreed.clear()
    agreed.add(key)
