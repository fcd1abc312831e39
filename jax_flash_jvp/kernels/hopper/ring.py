"""The ring of shared-memory tiles between the producer warp and the consumer warpgroups.

The producer fills slots by TMA, each with a tile and below it that of its tangent, if there is one, or with rows of o for the
row statistics, in the order in which the consumers read them; barrier `full[slot]` says that all of it has landed,
`empty[slot]` that every consumer is done with it.  Descriptors are four-dimensional, [B, H, L, D], so that strided inputs need
no copy; rows past L, and channels that an array has fewer of than its tiles, arrive as zeros.  Tiles are in as many parts of
their columns as products have (`column_widths` in `products.py`), one or two, each with a descriptor and shared memory of its
own: so rows of 72 channels take the room and the traffic of 64 + 16, not of 128.
"""

from collections import namedtuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from jax_flash_jvp.kernels.hopper.products import GROUP_ROWS, columns

# renamed between Triton 3.6 and 3.9
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
# Triton 3.6 and 3.7 have the instruction, but no name for it
if hasattr(tma, "async_atomic_add"):
    add_async = tma.async_atomic_add
else:
    from triton.experimental.gluon.language._core import builtin, ir

    @builtin
    def add_async(tensor_desc, coord, src, _semantic=None):
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)


copy_async = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

Cursor = namedtuple("Cursor", "slot phase")  # where a warp is in a ring, and the phase of that slot's barriers


# PTX that waits for a 64-bit flag at an address, all lanes alike; see `programs.py`
AGAIN = """AGAIN:
ld.acquire.gpu.global.b64 seen, [$1];
setp.ne.b64 absent, seen, flag;
vote.sync.any.pred absent, absent, -1;
@absent bra AGAIN;"""
SHARED_MEMORY = 224 * 1024  # bytes that tiles may fill, beside barriers and statistics


@triton.constexpr_function
def resident_buffers(resident, streamed, channels, features):
    """For how many blocks a program holds so many resident rows, of 16 bits, beside those of its ring: for two, where it is to
    load `ahead` and there is room."""
    row = 2 * columns(channels)
    return 2 if features.ahead and (2 * resident + streamed) * row <= SHARED_MEMORY else 1


def shared_layout(block, dtype: str):
    """The layout in shared memory of a descriptor's tiles."""
    return gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, dtype))


@gluon.jit
def advance(cursor, SLOTS: gl.constexpr):
    slot, phase = cursor
    slot += 1
    if slot == SLOTS:
        slot = 0
        phase ^= 1
    return Cursor(slot, phase)


@gluon.jit
def slot_before(cursor, N: gl.constexpr, SLOTS: gl.constexpr):
    """The slot that a cursor was at before it advanced N times."""
    return gl.where(cursor.slot < N, cursor.slot + SLOTS - N, cursor.slot - N)


@gluon.jit
def wait(bars, cursor):
    mbarrier.wait(bars.index(cursor.slot), cursor.phase)


@gluon.jit
def give_back(bars, cursor):
    mbarrier.arrive(bars.index(cursor.slot), count=1)


@gluon.jit
def barriers(N: gl.constexpr, COUNT: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@gluon.jit
def described(desc, rest):
    """The descriptors of an array, one for each part of its columns; none where there is no array."""
    if desc is None:
        return ()
    elif rest is None:
        return (desc,)
    else:
        return (desc, rest)


@gluon.jit
def tiles(descs, N: gl.constexpr, BLOCKS: gl.constexpr = 1):
    """Shared memory for N tiles, each of so many blocks of the descriptors, one below the other."""
    return [
        gl.allocate_shared_memory(d.dtype, [N, 1, 1, BLOCKS * d.block_type.shape[2], d.block_type.shape[3]], d.layout)
        for d in descs
    ]


@gluon.jit
def matrix(buffers, i):
    """Tile i, of each part a matrix."""
    return [buffer.index(i).reshape([buffer.shape[3], buffer.shape[4]]) for buffer in buffers]


@gluon.jit
def rows_from(tile, first: gl.constexpr, ROWS: gl.constexpr):
    """So many rows of a tile."""
    return [part.slice(first, ROWS, 0) for part in tile]


@gluon.jit
def expect(bar, N: gl.constexpr, descs, MORE: gl.constexpr = 0):
    """N blocks of an array, and so many bytes more."""
    if len(descs) == 1:
        mbarrier.expect(bar, N * descs[0].block_type.nbytes + MORE)
    else:
        mbarrier.expect(bar, N * (descs[0].block_type.nbytes + descs[1].block_type.nbytes) + MORE)


@gluon.jit
def load(descs, i_b, i_h, row, bar, buffers, i, first: gl.constexpr, ROWS: gl.constexpr):
    """A block of an array into tile i, from that row of it on."""
    async_load(descs[0], [i_b, i_h, row, 0], bar, buffers[0].index(i).slice(first, ROWS, 2))
    if len(descs) == 2:
        column: gl.constexpr = descs[0].block_type.shape[3]
        async_load(descs[1], [i_b, i_h, row, column], bar, buffers[1].index(i).slice(first, ROWS, 2))


@gluon.jit
def load_tile(
    descs, t_descs, i_b, i_h, row, memory, cursor, T: gl.constexpr, SLOTS: gl.constexpr, TANGENT: gl.constexpr
):
    """T rows of an array, and below them in the same slot, if TANGENT, those of its tangent."""
    bar = memory.full.index(cursor.slot)
    wait(memory.empty, cursor)
    expect(bar, 2 if TANGENT else 1, descs)
    load(descs, i_b, i_h, row, bar, memory.ring, cursor.slot, 0, T)
    if TANGENT:
        load(t_descs, i_b, i_h, row, bar, memory.ring, cursor.slot, T, T)
    return advance(cursor, SLOTS)


@gluon.jit
def load_resident(descs, i_b, i_h, row, bar, buffers, i, w: gl.constexpr):
    """The rows of one consumer warpgroup."""
    load(descs, i_b, i_h, row + GROUP_ROWS * w, bar, buffers, i, 0, GROUP_ROWS)


@triton.constexpr_function
def row_layout(columns):
    """In which a warpgroup reads rows of so many columns, sixteen bytes a thread."""
    return gl.BlockedLayout([1, 8], [32 * 8 // columns, columns // 8], [4, 1], [1, 0])


@gluon.jit
def inner_part(x, y, LAYOUT: gl.constexpr):
    layout: gl.constexpr = row_layout(x.shape[1])
    return gl.convert_layout(gl.sum(x.load(layout).to(gl.float32) * y.load(layout).to(gl.float32), 1), LAYOUT)


@gluon.jit
def inner(x, y, LAYOUT: gl.constexpr):
    """rowsum(x∘y) of tiles in shared memory."""
    b_r = inner_part(x[0], y[0], LAYOUT)
    for PART in gl.static_range(1, len(x)):
        b_r += inner_part(x[PART], y[PART], LAYOUT)
    return b_r


@gluon.jit
def clean_part(tile, n):
    """Zeros for the rows from n on, in pieces of eight registers a thread."""
    ROWS: gl.constexpr = tile.shape[0]
    D: gl.constexpr = tile.shape[1]
    LAYOUT: gl.constexpr = row_layout(D)
    PIECE: gl.constexpr = ROWS if ROWS < 2048 // D else 2048 // D
    zeros = gl.zeros([PIECE, D], tile.dtype, LAYOUT)
    for ROW in gl.static_range(0, ROWS, PIECE):
        piece = tile.slice(ROW, PIECE, 0)
        if ROW > 0 and n <= ROW:
            piece.store(zeros)
        elif n < ROW + PIECE:
            o_r = gl.expand_dims(ROW + gl.arange(0, PIECE, layout=gl.SliceLayout(1, LAYOUT)), 1)
            piece.store(gl.where(o_r < n, piece.load(LAYOUT), zeros))


@gluon.jit
def clean(tile, row, end):
    """Zeros for the rows of a tile in shared memory past `end`, which may hold anything: 0 · NaN would be NaN.  Every warpgroup
    does so for itself, unsynchronised: all of them write the same."""
    if row + tile[0].shape[0] > end:
        for PART in gl.static_range(len(tile)):
            clean_part(tile[PART], end - row)
        fence_async_shared()
