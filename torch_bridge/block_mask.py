"""FlexAttention's BlockMask as one tensor: for each block a page of booleans, one for all that are full, one for the empty.

The tensor is int32 [1|B, 1|H, 1, 1 + blocks + …]: how many pages there are, of each block the number of its page (0: nobody sees
anything, 1: everybody sees everything), and the pages, [queries, keys] of a block, byte by byte.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from jax_flash_jvp.problem import blocks_of
from torch_bridge.private import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor

MULTIPLE = 128  # of queries and keys in a page: the widest tiles of the kernels lie in one
CHUNK = 2**22  # elements for which a mask_mod is called at once


@torch.compiler.disable
def tensor_of(name: str, mask: BlockMask, scores: Sequence[int]) -> tuple[Tensor, tuple[int, int]]:
    """(mask, queries and keys of its blocks), for scores [B, H, T, S]; boolean where no block is partial."""
    batch, heads, *lengths = scores
    _refuse_mapped(name, mask.kv_num_blocks, mask.kv_indices)
    if tuple(mask.seq_lengths) != tuple(lengths) or mask.shape[0] not in (1, batch) or mask.shape[1] not in (1, heads):
        raise ValueError(
            f"`{name}` must be a BlockMask of shape {tuple(scores)}, or 1 in place of the first two: got {tuple(mask.shape)}"
        )
    size = (*mask.BLOCK_SIZE,) if isinstance(mask.BLOCK_SIZE, tuple | list) else (mask.BLOCK_SIZE,) * 2
    blocks = blocks_of(lengths, size)
    seen = _dense(mask.kv_num_blocks, mask.kv_indices, blocks)
    full = torch.zeros_like(seen)
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        full = _dense(mask.full_kv_num_blocks, mask.full_kv_indices, blocks)
        seen = seen | full
    if torch.equal(seen, full):
        return full, size
    page = (math.lcm(size[0], MULTIPLE), math.lcm(size[1], MULTIPLE))
    several = (page[0] // size[0], page[1] // size[1])
    some, whole = _pooled(seen, several, False).any(-1), _pooled(full, several, True).all(-1)
    partial = some & ~whole
    number = (partial.flatten(2).cumsum(-1) + 1).view(partial.shape)
    n = int(number.max()) + 1
    pages = torch.zeros(*partial.shape[:2], n, *page, dtype=torch.uint8, device=full.device)
    pages[:, :, 1] = 1
    places = partial.nonzero()
    for b, h, i, j in (p.unbind(1) for p in places.split(max(1, CHUNK // math.prod(page)))):
        q = _positions(i, page[0], lengths[0])
        k = _positions(j, page[1], lengths[1])
        at = b[:, None, None], h[:, None, None], (q // size[0])[:, :, None], (k // size[1])[:, None, :]
        elements = _elements(mask.mask_mod, b, h, q, k)
        _refuse_mapped(name, elements)
        elements = full[at] | (seen[at] & elements)
        pages[b, h, number[b, h, i, j]] = elements.to(torch.uint8)
    table = torch.where(partial, number, (some & whole).long()).to(torch.int32).flatten(2)
    parts = table.new_full((*table.shape[:2], 1), n), table, pages.view(torch.int32).flatten(2)
    return torch.cat(parts, 2)[:, :, None], page


def _refuse_mapped(name: str, *tensors: Tensor) -> None:
    """How many blocks are partial must be known, of all that vmap maps over."""
    for a in tensors:
        while is_functorch_wrapped_tensor(a):
            if is_batchedtensor(a):
                raise ValueError(
                    f"`{name}` must not be a BlockMask that differs along an axis of vmap: make that axis the batch axis of the "
                    "arrays and of create_block_mask, and call this outside vmap; or pass `key_ranges` or a boolean tensor"
                )
            a = get_unwrapped(a)


def pages_of(tensor: Tensor, page: tuple[int, int], lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Views of such a tensor: how many pages and which, and the pages, as integers [B, H, n]."""
    end = 1 + math.prod(blocks_of(lengths, page))
    return tensor[..., :end], tensor[:, :, 0, end:]


def booleans(pages: Tensor, page: tuple[int, int]) -> Tensor:
    """[B, H, pages, queries, keys], of integers that are contiguous."""
    return pages.view(torch.bool).view(*pages.shape[:2], -1, *page)


def _dense(counts: Tensor, indices: Tensor, blocks: Sequence[int]) -> Tensor:
    """[B, H, blocks of queries, blocks of keys], True at the first so many indices of each row."""
    rows, columns = blocks
    counts, indices = counts[:, :, :rows, None], indices[:, :, :rows].long()
    valid = torch.arange(indices.shape[3], device=indices.device) < counts
    dense = torch.zeros(*indices.shape[:3], columns + 1, dtype=torch.bool, device=indices.device)
    return dense.scatter_(3, indices.masked_fill(~valid, columns), True)[..., :columns]


def _pooled(a: Tensor, several: tuple[int, int], beyond: bool) -> Tensor:
    """[B, H, pages of queries, pages of keys, blocks of a page]"""
    (rows, columns), (m, n) = a.shape[2:], several
    a = torch.nn.functional.pad(a, (0, -columns % n, 0, -rows % m), value=beyond)
    return a.unflatten(3, (-1, n)).unflatten(2, (-1, m)).transpose(3, 4).flatten(4)


def _positions(i: Tensor, size: int, length: int) -> Tensor:
    """The positions of the elements of blocks.  Those beyond the end become the last."""
    return (i[:, None] * size + torch.arange(size, device=i.device)).clamp(max=length - 1)


def _elements(mask_mod, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """What a mask_mod, which takes four numbers, says of blocks with the queries q [n, …] and the keys k."""
    by_key = torch.vmap(mask_mod, (None, None, None, 0))
    by_query = torch.vmap(by_key, (None, None, 0, None))
    return torch.vmap(by_query, (0, 0, 0, 0))(b, h, q, k)
