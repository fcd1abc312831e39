"""Which tiles a block visits, and what is seen of those that need a mask."""

from collections import namedtuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from jax_flash_jvp.kernels.hopper.products import GROUP_ROWS, product_layout
from jax_flash_jvp.kernels.hopper.ring import row_layout
from jax_flash_jvp.kernels.portable import scores, visibility
from jax_flash_jvp.kernels.portable.visibility import MaskReader

head_slice, lengths, words = (gluon.jit(f.fn) for f in (scores.head_slice, scores.lengths, visibility.words))
# arrays that say what is seen, as far as there are any
Selection = namedtuple("Selection", "MASK BLOCKS Q_LENGTHS K_LENGTHS Q_SEGMENTS K_SEGMENTS RANGES TILES")
# of what is streamed: the rows start … stop are seen by some resident row, or see it; first … whole by all
Bounds = namedtuple("Bounds", "start first whole stop")
# numbers of whole tiles, then of masked ones, and which tiles these are: those of a list, or those of a span
Visits = namedtuple("Visits", "plain_first plain_end masked_first masked_end which")
# whole tiles, then masked ones, of which those from number `unseen_first` on have rows that nobody sees
TileList = namedtuple("TileList", "p_tiles unseen_first")
# the whole tiles whole_first … whole_end - 1, and the masked ones from `start` on before them, and after them
TileSpan = namedtuple("TileSpan", "start whole_first whole_end")


@triton.constexpr_function
def has_masked_tiles(features, row, ragged):
    """Are there tiles that not everybody sees whole?"""
    ends = features.key_lengths if row else features.query_lengths
    return (row and ragged) or features.left or features.right or features.tiles.present or ends


@triton.constexpr_function
def has_loop(masked, has_masked, features):
    """Over the tiles that everybody sees whole, or the `masked`, which may be all; 2: those with rows that nobody sees, where
    they have a loop of their own."""
    if masked == 2:
        return features.ranges.present
    return has_masked if masked else not (has_masked and features.one_loop)


@triton.constexpr_function
def only_a_mask(features):
    """A matrix, whose bits tell what is seen."""
    others = features.left or features.right or features.lengths or features.segments or features.ranges.present
    return features.mask.matrix and not others


@triton.constexpr_function
def read_by_element(features):
    """Segments, ranges or a vector."""
    return features.tiles.present and (features.segments or features.ranges.present or not features.mask.matrix)


@gluon.jit
def span(bounds, T: gl.constexpr, HAS_MASKED: gl.constexpr, FEATURES: gl.constexpr):
    """The tiles within bounds."""
    start, first, whole, stop = bounds
    if HAS_MASKED:
        n = gl.maximum(gl.cdiv(stop, T), 0)
        start = gl.minimum(gl.maximum(start, 0) // T, n)
        first = gl.minimum(gl.maximum(gl.cdiv(first, T), start), n)
        end = gl.minimum(gl.maximum(gl.maximum(whole, 0) // T, first), n)
        if FEATURES.one_loop:
            end = first
        return Visits(0, end - first, 0, first - start + n - end, TileSpan(start, first, end))
    else:
        n = gl.cdiv(stop, T)
        return Visits(0, n, 0, 0, TileSpan(0, 0, n))


@gluon.jit
def clamped(i, n):
    return gl.minimum(gl.maximum(i, 0), n)


@gluon.jit
def within(visits, work, i_g, group, FROM_ZERO: gl.constexpr):
    """The tiles of this fragment that a block visits in the i_g-th of a group of heads.  A fragment has the whole tiles of all
    heads first, then the masked ones.  There is no list of tiles, and nothing but the ragged end is masked.
    FROM_ZERO: the side masks nothing, and its loops begin at zero.  That takes a register less where the number of a tile is
    not needed."""
    _, plain, _, masked, which = visits
    before_plain = i_g * plain
    before_masked = group * plain + i_g * masked
    plain_first = clamped(work.first - before_plain, plain)
    plain_end = clamped(work.end - before_plain, plain)
    masked_first = clamped(work.first - before_masked, masked)
    masked_end = clamped(work.end - before_masked, masked)
    if FROM_ZERO:
        return Visits(0, plain_end - plain_first, 0, 0, TileSpan(0, plain_first, plain_first))
    else:
        return Visits(plain_first, plain_end, masked_first, masked_end, which)


@gluon.jit
def key_bounds(row, ROWS: gl.constexpr, key_end, ints, FEATURES: gl.constexpr):
    """The bounds of the keys, for the ROWS queries from `row` on."""
    start = 0
    first = 0
    whole = key_end
    stop = key_end
    if FEATURES.right:
        whole = gl.minimum(key_end, row + ints.right + 1)
        stop = gl.minimum(key_end, row + ROWS + ints.right)
    if FEATURES.left:
        start = row - ints.left
        first = row + ROWS - 1 - ints.left
    return Bounds(start, first, whole, stop)


@gluon.jit
def n_blocks(LQ, LK, FEATURES: gl.constexpr):
    """The number of a mask's blocks of queries, and of keys."""
    ROWS: gl.constexpr = FEATURES.mask_rows
    COLUMNS: gl.constexpr = FEATURES.mask_columns
    return gl.cdiv(LQ, ROWS), gl.cdiv(LK, COLUMNS)


@gluon.jit
def selected(block, i_h, call, options):
    """What `visible` and `bits` read, for a block and a query head."""
    FEATURES: gl.constexpr = options.FEATURES
    i_b, ints, selection = block.i_b, call.ints, call.selection
    LQ, LK = ints.LQ, ints.LK
    size = i_b.to(gl.int64) * 0 + 1
    blocks = selection.BLOCKS
    MASK_AXES: gl.constexpr = FEATURES.mask
    if FEATURES.mask.matrix:
        OWN: gl.constexpr = FEATURES.mask_rows if options.ROW else FEATURES.mask_columns
        OTHER: gl.constexpr = FEATURES.mask_columns if options.ROW else FEATURES.mask_rows
        n_q, n_k = n_blocks(LQ, LK, FEATURES)
        if FEATURES.mask_pages:
            blocks = head_slice(blocks, i_b, i_h, ints.HQ, ints.GROUP, size * (1 + n_q * n_k), MASK_AXES)
            size *= gl.load(blocks) * (OWN * words(OTHER, 32))
            blocks += 1
        else:
            size *= n_q if options.ROW else n_k
            size *= words(LK if options.ROW else LQ, 32)
    elif FEATURES.mask.rows:
        size *= LQ
    elif FEATURES.mask.columns:
        size *= LK
    mask = head_slice(selection.MASK, i_b, i_h, ints.HQ, ints.GROUP, size, MASK_AXES)
    q_segments, k_segments = selection.Q_SEGMENTS + i_b.to(gl.int64) * LQ, selection.K_SEGMENTS + i_b.to(gl.int64) * LK
    ranges = selection.RANGES
    if FEATURES.ranges.present:
        RANGES_AXES: gl.constexpr = FEATURES.ranges
        size = i_b.to(gl.int64) * 0 + LQ * (2 * FEATURES.intervals)
        ranges = head_slice(ranges, i_b, i_h, ints.HQ, ints.GROUP, size, RANGES_AXES)
    return MaskReader(
        block.query_end, block.key_end, ints.left, ints.right, LQ, LK, q_segments, k_segments, ranges, mask, blocks
    )  # fmt: skip


@gluon.jit
def of_loop(visits, MASKED: gl.constexpr, FEATURES: gl.constexpr):
    """The visits of one loop: masked tiles without rows that nobody sees, or, if MASKED is 2, those with such rows."""
    plain_first, plain_end, masked_first, masked_end, which = visits
    if MASKED == 2:
        return Visits(plain_first, plain_end, which.unseen_first, masked_end, which)
    elif MASKED and FEATURES.ranges.present:
        return Visits(plain_first, plain_end, masked_first, which.unseen_first, which)
    else:
        return visits


@gluon.jit
def range_of(visits, MASKED: gl.constexpr):
    """The first and the end of the numbers that `tile_at` takes."""
    if MASKED:
        return visits.masked_first, visits.masked_end
    else:
        return visits.plain_first, visits.plain_end


@gluon.jit
def tile_at(t, visits, MASKED: gl.constexpr, FEATURES: gl.constexpr):
    """The t-th of the tiles that everybody sees whole, or of the MASKED."""
    if FEATURES.tiles.present:
        return gl.load(visits.which.p_tiles + (visits.plain_end + t if MASKED else t))
    elif MASKED:
        start, whole_first, whole_end = visits.which
        j = start + t
        if j >= whole_first:
            j += whole_end - whole_first
        return j
    else:
        return visits.which.whole_first + t


@gluon.jit
def listed(t, visits, MASKED: gl.constexpr):
    """`tile_at`, or nothing behind the last."""
    at = visits.plain_end + t if MASKED else t
    _, end = range_of(visits, MASKED)
    return gl.load(visits.which.p_tiles + at, mask=t < end, other=0)


@gluon.jit
def first_tile(visits, MASKED: gl.constexpr, FEATURES: gl.constexpr):
    """What `next_tile` is told at first."""
    if FEATURES.mask.matrix:
        return listed(range_of(visits, MASKED)[0], visits, MASKED)
    else:
        return 0


@gluon.jit
def next_tile(t, upcoming, visits, MASKED: gl.constexpr, FEATURES: gl.constexpr):
    """(the t-th tile, the one behind it): where a mask's words wait for it, a list is asked for it a tile ahead."""
    if FEATURES.mask.matrix:
        return upcoming, listed(t + 1, visits, MASKED)
    else:
        return tile_at(t, visits, MASKED, FEATURES), upcoming


@gluon.jit
def column_numbers(T: gl.constexpr):
    """[1, T], numbers of the columns of a product as sums: of constants, which take no register, and of what depends on the
    thread alone."""
    o_t = gl.expand_dims(gl.arange(0, T, layout=gl.SliceLayout(0, product_layout(T))), 0)
    return o_t & ~6, o_t & 6


@gluon.jit
def in_range(I: gl.constexpr, o_m, o_r, column, sight, options):
    """[GROUP_ROWS, T]: is the key in the I-th range of the query, of which o_m are the numbers?"""
    p_range = sight.ranges + (o_m * options.FEATURES.intervals + I) * 2
    # as numbers of keys, which no difference takes past an integer
    b_start = gl.maximum(gl.load(p_range, mask=o_m < sight.LQ, other=0), 0)
    b_end = gl.minimum(gl.maximum(gl.load(p_range + 1, mask=o_m < sight.LQ, other=0), 0), sight.LK)
    if options.ROW:
        o_c, o_x = column_numbers(options.T)
        low, high = gl.expand_dims(b_start - column, 1) - o_x, gl.expand_dims(b_end - column, 1) - o_x
        return (o_c >= low) & (o_c < high)
    else:
        o_n = gl.expand_dims(o_r, 1)
        return (o_n >= gl.expand_dims(b_start, 0)) & (o_n < gl.expand_dims(b_end, 0))


@gluon.jit
def visible(row, column, sight, options):
    """[GROUP_ROWS, T]: which of the keys from `column` on are seen by the queries from `row` on; if not ROW, which of the
    queries from `column` on see the keys from `row` on.  An interval of each row, of which an element costs a comparison or
    two; segments and masks are loaded."""
    ROW: gl.constexpr = options.ROW
    FEATURES: gl.constexpr = options.FEATURES
    query_end, key_end, left, right, LQ, LK, Q_SEGMENTS, K_SEGMENTS, _, mask, _ = sight
    o_r = row + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, product_layout(options.T)))
    o_t = gl.arange(0, options.T, layout=gl.SliceLayout(0, product_layout(options.T)))
    o_c, o_x = column_numbers(options.T)
    if ROW:
        last = gl.where(o_r < query_end, key_end - 1, -1)
        if FEATURES.right:
            last = gl.minimum(last, o_r + right)
    else:
        last = gl.where(o_r < key_end, query_end - 1, -1)
        if FEATURES.left:
            last = gl.minimum(last, o_r + left)
    seen = o_c <= gl.expand_dims(last - column, 1) - o_x
    if ROW and FEATURES.left:
        seen = seen & (o_c >= gl.expand_dims(o_r - left - column, 1) - o_x)
    if FEATURES.right and not ROW:
        seen = seen & (o_c >= gl.expand_dims(o_r - right - column, 1) - o_x)
    if FEATURES.segments:
        if ROW:
            b_r = gl.load(Q_SEGMENTS + o_r, mask=o_r < LQ, other=0)
            b_c = gl.load(K_SEGMENTS + column + o_t, mask=column + o_t < LK, other=0)
        else:
            b_r = gl.load(K_SEGMENTS + o_r, mask=o_r < LK, other=0)
            b_c = gl.load(Q_SEGMENTS + column + o_t, mask=column + o_t < LQ, other=0)
        seen = seen & (gl.expand_dims(b_r, 1) == gl.expand_dims(b_c, 0))
    if FEATURES.ranges.present:
        INTERVALS: gl.constexpr = FEATURES.intervals
        o_m = o_r if ROW else column + o_t
        shown = in_range(0, o_m, o_r, column, sight, options)
        for I in gl.static_range(1, INTERVALS):
            shown = shown | in_range(I, o_m, o_r, column, sight, options)
        seen = seen & shown
    if FEATURES.mask.present and not FEATURES.mask.matrix:
        if FEATURES.mask.rows if ROW else FEATURES.mask.columns:
            b_x = gl.expand_dims(gl.load(mask + o_r, mask=o_r < (LQ if ROW else LK), other=0), 1)
        elif FEATURES.mask.columns if ROW else FEATURES.mask.rows:
            b_x = gl.expand_dims(gl.load(mask + column + o_t, mask=column + o_t < (LK if ROW else LQ), other=0), 0)
        else:
            b_x = gl.load(mask)
        seen = seen & (b_x != 0)
    return seen


# ------------------------------------------------------------------------------------------------ rows that nobody sees


# of tiles in which they are: the first and the end of the rows along the other axis, of so many query heads, and what is seen
Others = namedtuple("Others", "first end heads sight")


@triton.constexpr_function
def lanes_of_rows(columns):
    """`row_layout`, but that a thread has one column."""
    return gl.BlockedLayout([1, 1], [32 * 8 // columns, columns // 8], [4, 1], [1, 0])


@gluon.jit
def seen_keys(o_n, others, ROWS: gl.constexpr, W: gl.constexpr, FEATURES: gl.constexpr, LAYOUT: gl.constexpr):
    """[P, W]: of the keys o_n + P i, up to ROWS, as bit i, is it in a range of one of the queries that a column stands for?"""
    P: gl.constexpr = o_n.shape[0]
    INTERVALS: gl.constexpr = FEATURES.intervals
    sight = others.sight
    o_w = gl.arange(0, W, layout=gl.SliceLayout(0, LAYOUT))
    b_seen = gl.zeros([P, W], gl.int32, LAYOUT)
    for i_g in range(others.heads):
        ranges = sight.ranges + i_g * (sight.LQ * (2 * INTERVALS))
        for first in range(others.first, others.end, W):
            p_range = ranges + (first + o_w) * (2 * INTERVALS)
            m_x = first + o_w < sight.query_end
            for I in gl.static_range(INTERVALS):
                b_start = gl.expand_dims(gl.load(p_range + 2 * I, mask=m_x, other=0), 0)
                b_end = gl.expand_dims(gl.load(p_range + (2 * I + 1), mask=m_x, other=0), 0)
                for ROW in gl.static_range(0, ROWS, P):
                    b_n = gl.expand_dims(o_n + ROW, 1)
                    b_seen = b_seen | (((b_n >= b_start) & (b_n < b_end)).to(gl.int32) << (ROW // P))
    return b_seen


@gluon.jit
def seeing_queries(o_m, sight, ROWS: gl.constexpr, FEATURES: gl.constexpr):
    """[P]: of the queries o_m + P i, up to ROWS, as bit i, has it keys in its ranges?"""
    P: gl.constexpr = o_m.shape[0]
    INTERVALS: gl.constexpr = FEATURES.intervals
    b_seeing = o_m * 0
    for i in range(ROWS // P):
        p_range = sight.ranges + (o_m + i * P) * (2 * INTERVALS)
        m_x = o_m + i * P < sight.query_end
        for I in gl.static_range(INTERVALS):
            b_start = gl.maximum(gl.load(p_range + 2 * I, mask=m_x, other=0), 0)
            b_end = gl.minimum(gl.load(p_range + (2 * I + 1), mask=m_x, other=0), sight.key_end)
            b_seeing = b_seeing | ((b_start < b_end).to(gl.int32) << i)
    return b_seeing


@gluon.jit
def clear_part(tiles, PART: gl.constexpr, row, others, KEYS: gl.constexpr, FEATURES: gl.constexpr):
    """A thread has a row of each piece of P rows, and bits for all of these: few registers, which loops do not have for this."""
    ROWS: gl.constexpr = tiles[0][PART].shape[0]
    D: gl.constexpr = tiles[0][PART].shape[1]
    P: gl.constexpr = ROWS if ROWS < 1024 // D else 1024 // D
    LAYOUT: gl.constexpr = row_layout(D)
    BY_COLUMN: gl.constexpr = lanes_of_rows(D)
    zeros = gl.zeros([P, D], tiles[0][PART].dtype, LAYOUT)
    o_r = row + gl.arange(0, P, layout=gl.SliceLayout(1, BY_COLUMN if KEYS else LAYOUT))
    if KEYS:
        b_bits = seen_keys(o_r, others, ROWS, D // 8, FEATURES, BY_COLUMN)
    else:
        b_bits = seeing_queries(o_r, others.sight, ROWS, FEATURES)
    for ROW in gl.static_range(0, ROWS, P):
        b_bit = (b_bits >> (ROW // P)) & 1
        if KEYS:
            b_bit = gl.convert_layout(gl.max(b_bit, 1), gl.SliceLayout(1, LAYOUT), assert_trivial=True)
        for I in gl.static_range(len(tiles)):
            piece = tiles[I][PART].slice(ROW, P, 0)
            piece.store(gl.where(gl.expand_dims(b_bit != 0, 1), piece.load(LAYOUT), zeros))


@gluon.jit
def clear_unseen(tiles, row, others, KEYS: gl.constexpr, FEATURES: gl.constexpr):
    """Zeros for the rows of tiles in shared memory, from number `row` on: for KEYS that the others do not see, and for queries
    that see no key.  They may hold anything; as `clean` in `ring.py`."""
    for PART in gl.static_range(len(tiles[0])):
        clear_part(tiles, PART, row, others, KEYS, FEATURES)
    fence_async_shared()


# ------------------------------------------------------------------------------------------------ masks


@triton.constexpr_function
def words_layout(columns):
    """A product's, whose columns are 8 i + 2 w + e, as [rows, i, w, e]."""
    of_i = [[0, 1 << b, 0, 0] for b in range((columns // 8).bit_length() - 1)]
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
    registers, warps = [[0, 0, 0, 1], [8, 0, 0, 0], *of_i], [[16, 0, 0, 0], [32, 0, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [GROUP_ROWS, columns // 8, 4, 2])


@gluon.jit
def bits(row, column, sight, MASKED: gl.constexpr, options):
    """[GROUP_ROWS, T]: for each element of a packed mask (`pack`) the word that has its bit, one for each row that a thread
    holds; to be asked for as soon as a tile is known."""
    T: gl.constexpr = options.T
    FEATURES: gl.constexpr = options.FEATURES
    if MASKED and FEATURES.mask.matrix:
        n_rows, n_columns = (sight.LQ, sight.LK) if options.ROW else (sight.LK, sight.LQ)
        OWN: gl.constexpr = FEATURES.mask_rows if options.ROW else FEATURES.mask_columns
        OTHER: gl.constexpr = FEATURES.mask_columns if options.ROW else FEATURES.mask_rows
        w_l: gl.constexpr = words_layout(T)
        no_e: gl.constexpr = gl.SliceLayout(3, w_l)
        o_r = row + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(2, no_e)))
        o_w = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, no_e)))
        o_r = gl.expand_dims(gl.expand_dims(gl.expand_dims(o_r, 1), 2), 3)
        o_w = gl.expand_dims(gl.expand_dims(gl.expand_dims(o_w, 0), 1), 3)
        if FEATURES.mask_pages:  # of one page, as blocks are multiples of a tile and of the rows of all warpgroups
            _, n_k = n_blocks(sight.LQ, sight.LK, FEATURES)
            if options.ROW:
                i_page = row // OWN * n_k + column // OTHER
            else:
                i_page = column // OTHER * n_k + row // OWN
            first = (gl.load(sight.blocks + i_page).to(gl.int64) * OWN + row % OWN - row) * words(OTHER, 32)
            p_words = sight.mask + (o_r * words(OTHER, 32) + first + column % OTHER // 128 * 4 + o_w)
        else:
            p_words = sight.mask + ((o_r // OWN).to(gl.int64) * words(n_columns, 32) + column // 128 * 4 + o_w)
        b_word = gl.load(p_words, mask=o_r < n_rows, other=0)
        if T < 128:
            b_word = b_word >> column % 128 // 4
        b_word = b_word + gl.zeros([GROUP_ROWS, T // 8, 4, 2], gl.int32, w_l)
        return gl.convert_layout(b_word.reshape([GROUP_ROWS, T]), product_layout(T), assert_trivial=True)
    else:
        return 0


@gluon.jit
def loaded_visibility(row, column, sight, MASKED: gl.constexpr, options):
    """What is `visible`, as far as that takes loads: to be asked for before a product is waited for."""
    if MASKED and read_by_element(options.FEATURES):
        return visible(row, column, sight, options)
    else:
        return 0


@gluon.jit
def masked_scores(b_s, seen, b_bits, row, column, sight, MASKED: gl.constexpr, options):
    """Scores, −∞ where a key is hidden."""
    if MASKED:
        if not read_by_element(options.FEATURES):
            seen = visible(row, column, sight, options)
        if options.FEATURES.mask.matrix:
            o_c, _ = column_numbers(options.T)
            shown = (b_bits & (1 << (o_c // 8 * 2 + o_c % 2))) != 0
            seen = shown if only_a_mask(options.FEATURES) else seen & shown
        b_s = gl.where(seen, b_s, -float("inf"))
    return b_s


@gluon.jit
def zero_columns_from(b_x, end, options):
    """[GROUP_ROWS, T], zeros in the columns from `end` on, which may hold anything."""
    o_c, o_x = column_numbers(options.T)
    return gl.where(o_c < end - o_x, b_x, 0.0)
