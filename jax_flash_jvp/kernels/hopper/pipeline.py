"""The ring of shared-memory tiles between the producer warp and the consumer warpgroups.

The producer fills slots by TMA, each with a tile and below it that of its tangent, if there is one, in the order in which the
consumers read them; barrier `full[slot]` says that all of it has landed, `empty[slot]` that every consumer is done with it.
Descriptors are four-dimensional, [B, H, L, D], so that strided inputs need no copy; rows past L, and channels that an array has
fewer of than its tiles, arrive as zeros.
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from jax_flash_jvp.kernels.hopper.products import GROUP_ROWS

# renamed between Triton 3.6 and 3.9
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_async = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

Cursor = namedtuple("Cursor", "slot phase")  # where a warp is in a ring, and the phase of that slot's barriers


def shared_layout(block, dtype: str):
    """The layout in shared memory of a descriptor's tiles."""
    return gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, dtype))


@gluon.jit
def advance(at, SLOTS: gl.constexpr):
    slot, phase = at
    slot += 1
    if slot == SLOTS:
        slot = 0
        phase ^= 1
    return Cursor(slot, phase)


@gluon.jit
def wait(bars, at):
    mbarrier.wait(bars.index(at.slot), at.phase)


@gluon.jit
def give_back(bars, at):
    mbarrier.arrive(bars.index(at.slot), count=1)


@gluon.jit
def barriers(N: gl.constexpr, COUNT: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@gluon.jit
def tiles(desc, N: gl.constexpr, BLOCKS: gl.constexpr = 1):
    """Shared memory for N tiles, each of so many blocks of a descriptor, one below the other."""
    return gl.allocate_shared_memory(
        desc.dtype, [N, 1, 1, BLOCKS * desc.block_type.shape[2], desc.block_type.shape[3]], desc.layout
    )


@gluon.jit
def matrix(buffer, i, ROWS: gl.constexpr, D: gl.constexpr):
    """Tile i as a matrix [ROWS, D]."""
    return buffer.index(i).reshape([ROWS, D])


@gluon.jit
def load_tile(desc, t_desc, i_b, i_h, row, memory, at, T: gl.constexpr, SLOTS: gl.constexpr, TANGENT: gl.constexpr):
    """T rows of an array, and below them in the same slot, if TANGENT, those of its tangent."""
    bar = memory.full.index(at.slot)
    wait(memory.empty, at)
    mbarrier.expect(bar, (2 if TANGENT else 1) * desc.block_type.nbytes)
    slot = memory.ring.index(at.slot)
    async_load(desc, [i_b, i_h, row, 0], bar, slot.slice(0, T, 2))
    if TANGENT:
        async_load(t_desc, [i_b, i_h, row, 0], bar, slot.slice(T, T, 2))
    return advance(at, SLOTS)


@gluon.jit
def load_resident(desc, i_b, i_h, row, bar, buffer, w: gl.constexpr):
    """The rows of one consumer warpgroup."""
    async_load(desc, [i_b, i_h, row + GROUP_ROWS * w, 0], bar, buffer.index(w))


@gluon.jit
def clean(tile, row, end, ROWS: gl.constexpr, D: gl.constexpr):
    """Zeros for the rows of a tile in shared memory past `end`, which may hold anything: 0 · NaN would be NaN.  Every warpgroup
    does so for itself, unsynchronised: all of them write the same."""
    if row + ROWS > end:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
        o_r = gl.expand_dims(row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout)), 1)
        b_x = tile.load(layout)
        tile.store(gl.where(o_r < end, b_x, gl.zeros([ROWS, D], tile.dtype, layout)))
        fence_async_shared()
