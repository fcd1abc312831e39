"""The ring of shared-memory tiles between the producer warp and the consumer warpgroups.

The producer fills slots by TMA, each with a tile and below it that of its tangent, if there is one, in the order in which the
consumers read them; barrier `full[slot]` says that all of it has landed, `empty[slot]` that every consumer is done with it.
Descriptors are four-dimensional, [B, H, L, D], so that strided inputs need no copy; rows past L, and channels that an array has
fewer of than its tiles, arrive as zeros.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jax_flash_jvp.kernels.portable.scores import has, widths

# renamed between Triton 3.6 and 3.9
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_async = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(-3.4e38)  # a maximum of scores that is finite where nothing has been seen yet
GROUP_ROWS = gl.constexpr(64)  # resident rows of one consumer warpgroup
TOGETHER = gl.constexpr(8)  # heads whose streamed rows are to share the L2 cache


def shared_layout(block, dtype: str):
    """The layout in shared memory of a descriptor's tiles."""
    return gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, dtype))


@gluon.jit
def advance(slot, phase, SLOTS: gl.constexpr):
    slot += 1
    if slot == SLOTS:
        slot = 0
        phase ^= 1
    return slot, phase


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


@triton.constexpr_function
def blocks(channels):
    """As `widths`, but one where that has 32 and 16, whose sums leave no registers for long tiles in newer Tritons."""
    return (64,) if 32 < channels <= 48 else widths(channels)


@triton.constexpr_function
def width(channels, part):
    return blocks(channels)[part]


@triton.constexpr_function
def before(channels, part):
    return sum(blocks(channels)[:part])


@triton.constexpr_function
def parts(channels):
    return len(blocks(channels))


@triton.constexpr_function
def product_layout(columns):
    """The layout in registers of what a warpgroup multiplies."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.jit
def score_product(a, b, acc, ADD: gl.constexpr, C: gl.constexpr):
    """a bᵀ, added to acc if ADD, of rows in shared memory; asynchronous.  In parts, so that of the zeros that fill up narrow
    rows most are left out."""
    for PART in gl.static_range(parts(C)):
        a_part = a.slice(before(C, PART), width(C, PART), 1)
        b_part = b.slice(before(C, PART), width(C, PART), 1)
        acc = warpgroup_mma(a_part, b_part.permute((1, 0)), acc, use_acc=ADD or PART > 0, is_async=True)
    return acc


@gluon.jit
def sums(C: gl.constexpr):
    """Zeros [GROUP_ROWS, C], in parts."""
    b_x = (gl.zeros([GROUP_ROWS, width(C, 0)], gl.float32, product_layout(width(C, 0))),)
    for PART in gl.static_range(1, parts(C)):
        b_x = b_x + (gl.zeros([GROUP_ROWS, width(C, PART)], gl.float32, product_layout(width(C, PART))),)
    return b_x


@gluon.jit
def sum_product(p, rows, b_x, C: gl.constexpr, PART: gl.constexpr):
    p_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=product_layout(width(C, PART)), k_width=2)
    part = rows.slice(before(C, PART), width(C, PART), 1)
    return warpgroup_mma(gl.convert_layout(p, p_l), part, b_x[PART], is_async=True)


@gluon.jit
def accumulated(p, rows, b_x, C: gl.constexpr):
    """The sums + p rows, of an operand p and rows in shared memory; asynchronous, see `settled`."""
    b_y = (sum_product(p, rows, b_x, C, 0),)
    for PART in gl.static_range(1, parts(C)):
        b_y = b_y + (sum_product(p, rows, b_x, C, PART),)
    return b_y


@gluon.jit
def settled(b_x, p):
    """The sums, and the operand of their last product, whose registers must last so long, when no product is in flight."""
    if len(b_x) == 1:
        b_0, p = warpgroup_mma_wait(0, deps=[b_x[0], p])
        return (b_0,), p
    else:
        b_0, b_1, p = warpgroup_mma_wait(0, deps=[b_x[0], b_x[1], p])
        return (b_0, b_1), p


@gluon.jit
def by_row(b_r, b_x):
    """[GROUP_ROWS, 1], of a number for each row, to go with x."""
    return gl.expand_dims(gl.convert_layout(b_r, gl.SliceLayout(1, b_x.type.layout)), 1)


@gluon.jit
def scaled(b_x, b_r):
    """The sums, each row times its number."""
    b_y = (b_x[0] * by_row(b_r, b_x[0]),)
    for PART in gl.static_range(1, len(b_x)):
        b_y = b_y + (b_x[PART] * by_row(b_r, b_x[PART]),)
    return b_y


@triton.constexpr_function
def rescaling(n):
    """PTX that multiplies n sums of a thread, which are of two rows in turn, and the constraints on its operands."""
    jump = [".reg .pred p;", f"setp.neu.f32 p, ${2 * n}, 0f3F800000;", f"setp.neu.or.f32 p, ${2 * n + 2}, 0f3F800000, p;",
            "vote.sync.any.pred p, p, -1;", "@!p bra DONE;"]  # fmt: skip
    products = [f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n)]
    constraints = ["=f"] * n + [str(i) for i in range(n)] + ["f"] * n
    return "\n".join(["{", *jump, *products, "DONE:", "}"]), ",".join(constraints)


@gluon.jit
def rescaled_part(b_x, b_r):
    N: gl.constexpr = b_x.shape[1] // 2
    PTX: gl.constexpr = rescaling(N)
    b_r, _ = gl.broadcast(by_row(b_r, b_x), b_x)
    return gl.inline_asm_elementwise(PTX[0], PTX[1], [b_x, b_r], gl.float32, True, N)


@gluon.jit
def rescaled(b_x, b_r):
    """As `scaled`, of numbers that are mostly one: a warp in whose rows they all are passes over the multiplications."""
    b_y = (rescaled_part(b_x[0], b_r),)
    for PART in gl.static_range(1, len(b_x)):
        b_y = b_y + (rescaled_part(b_x[PART], b_r),)
    return b_y


@gluon.jit
def increased(b_x, b_r, b_y):
    """x + r y, with a number r for each row."""
    b_z = (b_x[0] + by_row(b_r, b_x[0]) * b_y[0],)
    for PART in gl.static_range(1, len(b_x)):
        b_z = b_z + (b_x[PART] + by_row(b_r, b_x[PART]) * b_y[PART],)
    return b_z


@gluon.jit
def zeroed(b_x, b_r):
    """The sums, zeros in the rows that r marks."""
    b_y = (gl.where(by_row(b_r, b_x[0]), 0.0, b_x[0]),)
    for PART in gl.static_range(1, len(b_x)):
        b_y = b_y + (gl.where(by_row(b_r, b_x[PART]), 0.0, b_x[PART]),)
    return b_y


@gluon.jit
def halves(b_x):
    """The first half of the columns and the others: which registers hold them, nothing moves."""
    T: gl.constexpr = b_x.shape[1] // 2
    b_0, b_1 = b_x.reshape([GROUP_ROWS, 2, T]).permute([0, 2, 1]).split()
    return gl.convert_layout(b_0, product_layout(T)), gl.convert_layout(b_1, product_layout(T))


@gluon.jit
def row_dot(b_x, b_y):
    """rowsum(x∘y): a quarter of the columns after the other, as additions one by one would wait for each other."""
    x_01, x_23 = halves(b_x)
    y_01, y_23 = halves(b_y)
    x_0, x_1 = halves(x_01)
    y_0, y_1 = halves(y_01)
    x_2, x_3 = halves(x_23)
    y_2, y_3 = halves(y_23)
    b_r = gl.sum(x_0 * y_0 + x_1 * y_1 + x_2 * y_2 + x_3 * y_3, 1)
    return gl.convert_layout(b_r, gl.SliceLayout(1, b_x.type.layout))


@triton.constexpr_function
def masks(features, row, ragged):
    """Are there tiles that not everybody sees whole?"""
    lengths = "key_lengths" if row else "query_lengths"
    return (row and ragged) or bool({"left", "right", "tiles", lengths} & {*features.split()})


@gluon.jit
def own_block(i, n, n_blocks, FROM_END: gl.constexpr, FEATURES: gl.constexpr):
    """(block, batch entry and head) of number i of n.  Under causality the longest blocks, first or last, of a few heads go
    before the shorter: head after head, the last ones would begin a long block when others are done."""
    if has(FEATURES, "right"):
        first = i // (TOGETHER * n_blocks) * TOGETHER
        heads = gl.minimum(n // n_blocks - first, TOGETHER)
        i -= first * n_blocks
        block = i // heads
        if FROM_END:
            block = n_blocks - 1 - block
        return block, first + i % heads
    else:
        return i % n_blocks, i // n_blocks


@gluon.jit
def share_of(p, programs, n_tiles):
    """(first, end) of the tiles of program p, where all programs share n_tiles evenly."""
    each = n_tiles // programs
    more = n_tiles % programs
    first = p * each + gl.minimum(p, more)
    return first, first + each + gl.where(p < more, 1, 0)


@gluon.jit
def sharer(tile, programs, n_tiles):
    """The program whose share that tile is in."""
    each = n_tiles // programs
    more = n_tiles % programs
    if tile < more * (each + 1):
        return tile // (each + 1)
    else:
        return (tile - more) // each


@gluon.jit
def end_of_items(call, n_tiles, FEATURES: gl.constexpr):
    """A program computes the `item`s program_id, program_id + num_programs … below this, one after the other."""
    n, n_whole = call[0], call[7]
    if has(FEATURES, "shared"):
        p, programs = gl.program_id(0), gl.num_programs(0)
        first, end = share_of(p, programs, (n - n_whole) * n_tiles)
        return n_whole + p + ((end - 1) // n_tiles - first // n_tiles + 1) * programs
    else:
        return n


@gluon.jit
def item(i, call, n_tiles, FEATURES: gl.constexpr):
    """(block, first tile, end, place).  The first n_whole blocks, of n_tiles each, are one program's each.  The tiles of the
    others, fewer than there are programs, are "shared" by all: a program has parts of one or two.  Results of a part go to a
    place of their own, numbered as parts follow each other, from where `merge.py` takes them; those of a whole block, whose
    place is -1, to where they belong."""
    first = 0 * n_tiles
    end = n_tiles
    place = -1
    if has(FEATURES, "shared"):
        n, n_whole = call[0], call[7]
        if i >= n_whole:
            p, programs = gl.program_id(0), gl.num_programs(0)
            share_first, share_end = share_of(p, programs, (n - n_whole) * n_tiles)
            k = (i - n_whole) // programs
            block = share_first // n_tiles + k
            i = n_whole + block
            first = gl.maximum(share_first - block * n_tiles, 0)
            end = gl.minimum(share_end - block * n_tiles, n_tiles)
            place = p + block
    return i, first, end, place


@gluon.jit
def clamped(i, n):
    return gl.minimum(gl.maximum(i, 0), n)


@gluon.jit
def within(tiles_of, first, end, i_g, group, FROM_ZERO: gl.constexpr):
    """Of the tiles that a block visits in the i_g-th of a group of heads, those among its tiles first … end, which are the whole
    ones of all heads, then the masked ones; where there is no list of tiles and nothing but the ragged end is masked.
    FROM_ZERO: of a side that masks none, as loops that begin there, which takes a register less where the number of a tile is
    not needed."""
    _, plain, _, masked, start, span_first, span_end = tiles_of
    before_plain = i_g * plain
    before_masked = group * plain + i_g * masked
    plain_first = clamped(first - before_plain, plain)
    plain_end = clamped(end - before_plain, plain)
    masked_first = clamped(first - before_masked, masked)
    masked_end = clamped(end - before_masked, masked)
    if FROM_ZERO:
        return 0, plain_end - plain_first, 0, 0, 0, plain_first, plain_first
    else:
        return plain_first, plain_end, masked_first, masked_end, start, span_first, span_end


@gluon.jit
def reach(i_b, LQ, LK, Q_LENGTHS, K_LENGTHS, FEATURES: gl.constexpr):
    """(queries, keys) of this batch entry; what lies beyond is padding."""
    if has(FEATURES, "query_lengths"):
        LQ = gl.minimum(LQ, gl.load(Q_LENGTHS + i_b))
    if has(FEATURES, "key_lengths"):
        LK = gl.minimum(LK, gl.load(K_LENGTHS + i_b))
    return LQ, LK


@gluon.jit
def span(start, first, whole, stop, T: gl.constexpr, MASKS: gl.constexpr):
    """(0, whole tiles, 0, masked tiles, start, first, end) of a loop over the rows start … stop, of which first … whole are seen
    by everybody: the tiles first … end - 1, which need no mask, come first; then those from `start` on, and those after."""
    if MASKS:
        n = gl.maximum(gl.cdiv(stop, T), 0)
        start = gl.minimum(gl.maximum(start, 0) // T, n)
        first = gl.minimum(gl.maximum(gl.cdiv(first, T), start), n)
        end = gl.minimum(gl.maximum(gl.maximum(whole, 0) // T, first), n)
        return 0, end - first, 0, first - start + n - end, start, first, end
    else:
        n = gl.cdiv(stop, T)
        return 0, n, 0, 0, 0, 0, n


@gluon.jit
def key_bounds(row, ROWS: gl.constexpr, key_end, left, right, FEATURES: gl.constexpr):
    """(start, first, whole, stop) for `span`: of the keys, for the ROWS queries from `row` on."""
    start = 0
    first = 0
    whole = key_end
    stop = key_end
    if has(FEATURES, "right"):
        whole = gl.minimum(key_end, row + right + 1)
        stop = gl.minimum(key_end, row + ROWS + right)
    if has(FEATURES, "left"):
        start = row - left
        first = row + ROWS - 1 - left
    return start, first, whole, stop


@gluon.jit
def share(X, i_b, i_h, HQ, GROUP, size, FEATURES: gl.constexpr, NAME: gl.constexpr):
    """As in `portable/scores.py`."""
    i = i_b * 0
    if has(FEATURES, NAME + ":heads"):
        i += i_b * HQ + i_h if has(FEATURES, NAME + ":batch") else i_h
    elif has(FEATURES, NAME + ":groups"):
        i += i_b * (HQ // GROUP) + i_h // GROUP if has(FEATURES, NAME + ":batch") else i_h // GROUP
    elif has(FEATURES, NAME + ":batch"):
        i += i_b
    return X + i.to(gl.int64) * size


@gluon.jit
def selected(selection, i_b, i_h, HQ, GROUP, LQ, LK, query_end, key_end, left, right, FEATURES: gl.constexpr):
    """What `visible` reads, for this batch entry and query head."""
    MASK, _, _, Q_SEGMENTS, K_SEGMENTS, _ = selection
    size = i_b.to(gl.int64) * 0 + 1
    if has(FEATURES, "mask:rows"):
        size *= LQ
    if has(FEATURES, "mask:columns"):
        size *= LK // 16 * 16 if has(FEATURES, "mask:aligned") else LK  # a divisor that the compiler sees
    mask = share(MASK, i_b, i_h, HQ, GROUP, size, FEATURES, "mask")
    return query_end, key_end, left, right, LQ, LK, Q_SEGMENTS + i_b * LQ, K_SEGMENTS + i_b * LK, mask


@gluon.jit
def visits(
    selection, i_b, i_h, HQ, GROUP, i_block, n_blocks, n_tiles, bounds, T: gl.constexpr, MASKS: gl.constexpr,
    FEATURES: gl.constexpr,
):  # fmt: skip
    """The tiles that a block visits, for `tile_at`: where there is a mask or there are segments those of its list, see
    `portable/visibility.py`, else those within bounds = (start, first, whole, stop), see `span`."""
    if has(FEATURES, "tiles"):
        size = i_b.to(gl.int64) * 0 + n_blocks * (n_tiles + 2)
        p_tiles = share(selection[5], i_b, i_h, HQ, GROUP, size, FEATURES, "tiles") + i_block * (n_tiles + 2)
        plain = gl.load(p_tiles)
        return 0, plain, 0, gl.load(p_tiles + 1) - plain, p_tiles + 2, 0, 0
    else:
        start, first, whole, stop = bounds
        return span(start, first, whole, stop, T, MASKS)


@gluon.jit
def tile_at(t, tiles_of, MASKED: gl.constexpr, FEATURES: gl.constexpr):
    """The t-th of the tiles that everybody sees whole, or of the MASKED."""
    _, plain, _, _, start, first, end = tiles_of
    if has(FEATURES, "tiles"):
        return gl.load(start + (plain + t if MASKED else t))
    elif MASKED:
        j = start + t
        if j >= first:
            j += end - first
        return j
    else:
        return first + t


@gluon.jit
def visible(row, column, sight, T: gl.constexpr, ROW: gl.constexpr, FEATURES: gl.constexpr, LAYOUT: gl.constexpr):
    """[GROUP_ROWS, T]: which of the keys from `column` on are seen by the queries from `row` on; if not ROW, which of the
    queries from `column` on see the keys from `row` on.  An interval of each row, of which an element costs a comparison or
    two; segments and masks are loaded."""
    query_end, key_end, left, right, LQ, LK, Q_SEGMENTS, K_SEGMENTS, mask = sight
    o_r = row + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, LAYOUT))
    o_t = gl.arange(0, T, layout=gl.SliceLayout(0, LAYOUT))
    o_c = gl.expand_dims(o_t, 0)
    if ROW:
        last = gl.where(o_r < query_end, key_end - 1, -1)
        if has(FEATURES, "right"):
            last = gl.minimum(last, o_r + right)
    else:
        last = gl.where(o_r < key_end, query_end - 1, -1)
        if has(FEATURES, "left"):
            last = gl.minimum(last, o_r + left)
    seen = o_c <= gl.expand_dims(last - column, 1)
    if ROW and has(FEATURES, "left"):
        seen = seen & (o_c >= gl.expand_dims(o_r - left - column, 1))
    if has(FEATURES, "right") and not ROW:
        seen = seen & (o_c >= gl.expand_dims(o_r - right - column, 1))
    if has(FEATURES, "segments"):
        if ROW:
            b_r = gl.load(Q_SEGMENTS + o_r, mask=o_r < LQ, other=0)
            b_c = gl.load(K_SEGMENTS + column + o_t, mask=column + o_t < LK, other=0)
        else:
            b_r = gl.load(K_SEGMENTS + o_r, mask=o_r < LK, other=0)
            b_c = gl.load(Q_SEGMENTS + column + o_t, mask=column + o_t < LQ, other=0)
        seen = seen & (gl.expand_dims(b_r, 1) == gl.expand_dims(b_c, 0))
    if has(FEATURES, "mask"):
        seen = seen & (masked_in(row, column, mask, LQ, LK, T, ROW, FEATURES, LAYOUT) != 0)
    return seen


@gluon.jit
def masked_in(
    row, column, mask, LQ, LK, T: gl.constexpr, ROW: gl.constexpr, FEATURES: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """The tile of a mask [1|T, 1|S], or its only row or column.  A whole tile is read along the memory's rows, and then handed
    to the threads that need it."""
    if has(FEATURES, "mask:rows") and has(FEATURES, "mask:columns"):
        if has(FEATURES, "mask:aligned"):
            LK = LK // 16 * 16
        if ROW:
            layout: gl.constexpr = gl.BlockedLayout([1, 16], [512 // T, T // 16], [4, 1], [1, 0])
        else:
            layout: gl.constexpr = gl.BlockedLayout([16, 1], [4, 8], [1, 4], [0, 1])
        o_r = gl.expand_dims(row + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, layout)), 1)
        o_c = gl.expand_dims(column + gl.arange(0, T, layout=gl.SliceLayout(0, layout)), 0)
        o_m, o_n = (o_r, o_c) if ROW else (o_c, o_r)
        b_x = gl.load(mask + (o_m.to(gl.int64) * LK + o_n), mask=(o_m < LQ) & (o_n < LK), other=0)
        return gl.convert_layout(b_x.to(gl.int8), LAYOUT)
    elif has(FEATURES, "mask:rows" if ROW else "mask:columns"):
        o_r = row + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, LAYOUT))
        return gl.expand_dims(gl.load(mask + o_r, mask=o_r < (LQ if ROW else LK), other=0), 1)
    elif has(FEATURES, "mask:columns" if ROW else "mask:rows"):
        o_c = column + gl.arange(0, T, layout=gl.SliceLayout(0, LAYOUT))
        return gl.expand_dims(gl.load(mask + o_c, mask=o_c < (LK if ROW else LQ), other=0), 0)
    else:
        return gl.load(mask)


@gluon.jit
def looked_up(
    row, column, sight, T: gl.constexpr, ROW: gl.constexpr, MASKED: gl.constexpr, FEATURES: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """What is `visible` for `hide`, as far as that takes loads: to be asked for before a product is waited for."""
    if MASKED and has(FEATURES, "tiles"):
        return visible(row, column, sight, T, ROW, FEATURES, LAYOUT)
    else:
        return 0


@gluon.jit
def hide(
    b_s, seen, row, column, sight,
    T: gl.constexpr, ROW: gl.constexpr, MASKED: gl.constexpr, FEATURES: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores, −∞ where a key is hidden."""
    if MASKED:
        if not has(FEATURES, "tiles"):
            seen = visible(row, column, sight, T, ROW, FEATURES, LAYOUT)
        b_s = gl.where(seen, b_s, -float("inf"))
    return b_s


@gluon.jit
def until(b_x, end, T: gl.constexpr, LAYOUT: gl.constexpr):
    """[GROUP_ROWS, T], zeros in the columns from `end` on, which may hold anything."""
    o_c = gl.arange(0, T, layout=gl.SliceLayout(0, LAYOUT))
    return gl.where(gl.expand_dims(o_c, 0) < end, b_x, 0.0)


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


@gluon.jit
def load_tile(
    desc, t_desc, i_b, i_h, row, ring, full, empty, slot, phase,
    T: gl.constexpr, SLOTS: gl.constexpr, TANGENT: gl.constexpr,
):  # fmt: skip
    """T rows of an array, and below them in the same slot, if TANGENT, those of its tangent."""
    bar = full.index(slot)
    mbarrier.wait(empty.index(slot), phase)
    mbarrier.expect(bar, (2 if TANGENT else 1) * desc.block_type.nbytes)
    async_load(desc, [i_b, i_h, row, 0], bar, ring.index(slot).slice(0, T, 2))
    if TANGENT:
        async_load(t_desc, [i_b, i_h, row, 0], bar, ring.index(slot).slice(T, T, 2))
    return advance(slot, phase, SLOTS)


@gluon.jit
def load_resident(desc, i_b, i_h, row, bar, buffer, w: gl.constexpr):
    """The rows of one consumer warpgroup."""
    async_load(desc, [i_b, i_h, row + GROUP_ROWS * w, 0], bar, buffer.index(w))


@gluon.jit
def store_rows(X, i_b, i_h, H, row, L, b_x, C: gl.constexpr):
    """From registers: the rows of a warpgroup, as far as they exist, in a contiguous [B, L, H, C] array."""
    store_rows_from(X + ((i_b.to(gl.int64) * L + row) * H + i_h) * C, H * C, L - row, b_x, C)


@gluon.jit
def store_rows_from(X, stride, n, b_x, C: gl.constexpr):
    for PART in gl.static_range(parts(C)):
        store_columns(X, stride, n, b_x[PART], C, PART)


@gluon.jit
def store_columns(X, stride, n, b_x, C: gl.constexpr, PART: gl.constexpr):
    o_r = gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, b_x.type.layout))
    o_c = before(C, PART) + gl.arange(0, width(C, PART), layout=gl.SliceLayout(0, b_x.type.layout))
    m_x = gl.expand_dims(o_r < n, 1)
    if before(C, PART) + width(C, PART) > C:
        m_x = m_x & gl.expand_dims(o_c < C, 0)
    gl.store(X + gl.expand_dims(o_r * stride, 1) + gl.expand_dims(o_c, 0), b_x.to(X.dtype.element_ty), mask=m_x)


@gluon.jit
def store_statistics(X, i_bh, row, L, b_x, LAYOUT: gl.constexpr):
    """Of the rows of a warpgroup, in a contiguous [B, H, L] array."""
    o_r = row + gl.arange(0, GROUP_ROWS, layout=LAYOUT)
    gl.store(X + i_bh.to(gl.int64) * L + o_r, b_x, mask=o_r < L)


@gluon.jit
def part_rows(
    PARTS, place, I: gl.constexpr, w: gl.constexpr, ROWS: gl.constexpr, SUMS: gl.constexpr, STATISTICS: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """Where a warpgroup's rows of the I-th array of a part of a block are: it has SUMS [ROWS, C], then STATISTICS [ROWS], in
    float32."""
    return PARTS + place * (ROWS * (SUMS * C + STATISTICS)) + (I * ROWS + w * GROUP_ROWS) * C


@gluon.jit
def part_statistic(
    PARTS, place, I: gl.constexpr, w: gl.constexpr, ROWS: gl.constexpr, SUMS: gl.constexpr, STATISTICS: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """The same of the I-th statistic."""
    return PARTS + place * (ROWS * (SUMS * C + STATISTICS)) + (SUMS * C + I) * ROWS + w * GROUP_ROWS
