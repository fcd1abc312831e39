"""Which keys a query sees, which tiles a program visits, and which probabilities dropout keeps.

Query i sees the keys from i − left to i + right (see `Problem.reach`; one that is absent from FEATURES does not limit), before
the lengths of its batch entry, in its own segment, in one of its ranges, and where the mask is true.  What depends on positions
alone bounds the loops (`key_bounds`, `query_bounds`); segments, ranges and masks are looked through beforehand (`look_at_tiles`
and `list_tiles`, or `list_few_tiles` alone).
"""

from collections import namedtuple

import triton
import triton.language as tl

from jax_flash_jvp.kernels.portable.scores import INTEGERS, aligned, head_slice, lengths, load_scores, matrix

# of a batch entry and query head: lengths, reach to both sides, the sizes of segments and mask, and these
MaskReader = namedtuple("MaskReader", "query_end key_end left right LQ LK Q_SEGMENTS K_SEGMENTS ranges mask blocks")


@triton.jit
def words(L, WORD: tl.constexpr):
    """The number of words in a row of L bits, see `pack`."""
    return (L + 4 * WORD - 1) // (4 * WORD) * 4


@triton.constexpr_function
def bits_of(pointers):
    """The number of bits in the integers that they point to."""
    return pointers.element_ty.primitive_bitwidth


@triton.constexpr_function
def block_size(features, of_keys):
    """So many keys, or else queries, an element of the mask stands for."""
    return features.mask_columns if of_keys else features.mask_rows


@triton.jit
def n_blocks(LQ, LK, FEATURES: tl.constexpr):
    """The number of a mask's blocks of queries, and of keys."""
    ROWS: tl.constexpr = FEATURES.mask_rows
    COLUMNS: tl.constexpr = FEATURES.mask_columns
    return tl.cdiv(LQ, ROWS), tl.cdiv(LK, COLUMNS)


@triton.jit
def mask_of(MASK, BLOCKS, i_b, i_h, HQ, GROUP, LQ, LK, BY_KEY: tl.constexpr, FEATURES: tl.constexpr):
    """(`matrix`, packed where it has rows and columns; the pages of its blocks, behind their number)."""
    MASK_AXES: tl.constexpr = FEATURES.mask
    if MASK_AXES.matrix:
        WORD: tl.constexpr = bits_of(MASK.dtype)
        OWN: tl.constexpr = block_size(FEATURES, BY_KEY)
        OTHER: tl.constexpr = block_size(FEATURES, not BY_KEY)
        n_q, n_k = n_blocks(LQ, LK, FEATURES)
        size = tl.full([], 1, tl.int64)
        if FEATURES.mask_pages:
            blocks = head_slice(BLOCKS, i_b, i_h, HQ, GROUP, size * (1 + n_q * n_k), MASK_AXES)
            size *= tl.load(blocks) * (OWN * words(OTHER, WORD))
            return head_slice(MASK, i_b, i_h, HQ, GROUP, size, MASK_AXES), blocks + 1
        else:
            size *= (n_k if BY_KEY else n_q) * words(LQ if BY_KEY else LK, WORD)
            return head_slice(MASK, i_b, i_h, HQ, GROUP, size, MASK_AXES), BLOCKS
    else:
        return matrix(MASK, i_b, i_h, HQ, GROUP, LQ, LK, MASK_AXES), BLOCKS


@triton.jit
def first_word(blocks, o_r, column, LQ, LK, WORD: tl.constexpr, BY_KEY: tl.constexpr, FEATURES: tl.constexpr):
    """The first of the four words that have the bit of a column, for the rows o_r of a packed mask."""
    OWN: tl.constexpr = block_size(FEATURES, BY_KEY)
    OTHER: tl.constexpr = block_size(FEATURES, not BY_KEY)
    if FEATURES.mask_pages:
        _, n_k = n_blocks(LQ, LK, FEATURES)
        if BY_KEY:
            i_page = column // OTHER * n_k + o_r // OWN
        else:
            i_page = o_r // OWN * n_k + column // OTHER
        page = tl.load(blocks + i_page, mask=o_r < (LK if BY_KEY else LQ), other=0).to(tl.int64)
        return (page * OWN + o_r % OWN) * words(OTHER, WORD) + column % OTHER // (4 * WORD) * 4
    else:
        return (o_r // OWN).to(tl.int64) * words(LQ if BY_KEY else LK, WORD) + column // (4 * WORD) * 4


@triton.jit
def bits(mask, blocks, o_r, o_c, first, LQ, LK, BY_KEY: tl.constexpr, FEATURES: tl.constexpr):
    """[R, C]: is the bit of row o_r and column o_c, which begin at `first`, set in a mask that is packed in words of 16?  Four of
    them are read at a time; in products' layout which of these depends on the thread, and which bit of it is a constant."""
    C: tl.constexpr = o_c.shape[1]
    n_rows, n_columns = (LK, LQ) if BY_KEY else (LQ, LK)
    p_four = mask.to(tl.pointer_type(tl.int64)) + first_word(blocks, o_r, first, LQ, LK, 16, BY_KEY, FEATURES) // 4
    o_x = tl.arange(0, C)[None, :]
    shift = (o_x & 6) * 8 + (first % 64 // 4 if C < 64 else 0)
    b_word = (tl.load(p_four, mask=o_r < n_rows, other=0) >> shift).to(tl.int32)
    for i in tl.static_range(1, C // 64):
        n_next = tl.where(first + 64 * i < n_columns, n_rows, 0)  # a row of words may end with the first four
        b_next = (tl.load(p_four + i, mask=o_r < n_next, other=0) >> shift).to(tl.int32)
        b_word = tl.where(o_x >= 64 * i, b_next, b_word)
    return (b_word & (1 << (o_x % 64 // 8 * 2 + o_x % 2))) != 0


@triton.jit
def bits_of_long_words(mask, blocks, o_r, o_c, LQ, LK, FEATURES: tl.constexpr):
    """`bits` by query, packed in words of 32, as the Hopper kernels read them, one by one."""
    p_words = mask + (first_word(blocks, o_r, o_c, LQ, LK, 32, False, FEATURES) + o_c % 8 // 2)
    b_word = tl.load(p_words, mask=(o_r < LQ) & (o_c < LK), other=0)
    return ((b_word >> (o_c % 128 // 8 * 2 + o_c % 2)) & 1) != 0


@triton.jit
def in_range(ranges, I: tl.constexpr, o_m, first, last, LQ, FEATURES: tl.constexpr):
    """Are all keys first … last in the I-th range of query o_m?"""
    p_range = ranges + (o_m * FEATURES.intervals + I) * 2
    b_start = tl.load(p_range, mask=o_m < LQ, other=0)
    b_end = tl.load(p_range + 1, mask=o_m < LQ, other=0)
    return (first >= b_start) & (last < b_end)


@triton.jit
def in_ranges(ranges, o_m, first, last, LQ, FEATURES: tl.constexpr):
    """Or of any of its ranges?"""
    INTERVALS: tl.constexpr = FEATURES.intervals
    b_seen = in_range(ranges, 0, o_m, first, last, LQ, FEATURES)
    for I in tl.static_range(1, INTERVALS):
        b_seen |= in_range(ranges, I, o_m, first, last, LQ, FEATURES)
    return b_seen


@triton.jit
def visible(o_m, o_n, first, sight, FEATURES: tl.constexpr):
    """Which of the keys o_n the queries o_m see.  `first`: the first of those along the columns of the result."""
    LQ, LK, mask, blocks = sight.LQ, sight.LK, sight.mask, sight.blocks
    T: tl.constexpr = FEATURES.rows_of_head
    o_q = o_m % T if T > 0 else o_m
    if FEATURES.right:
        b_seen = (o_n < sight.key_end) & (o_n <= o_q + sight.right)
    else:
        b_seen = (o_n < sight.key_end) & (o_m >= 0)
    if FEATURES.left:
        b_seen &= o_n >= o_q - sight.left
    if FEATURES.lengths:
        b_seen &= o_m < sight.query_end
    if FEATURES.segments:
        b_queries = tl.load(sight.Q_SEGMENTS + o_m, mask=o_m < LQ, other=0)
        b_seen &= b_queries == tl.load(sight.K_SEGMENTS + o_n, mask=o_n < LK, other=0)
    if FEATURES.ranges.present:
        b_seen &= in_ranges(sight.ranges, o_m, o_n, o_n, LQ, FEATURES)
    if FEATURES.mask.matrix:
        if bits_of(mask.dtype) == 32:
            b_seen &= bits_of_long_words(mask, blocks, o_m, o_n, LQ, LK, FEATURES)
        elif o_m.shape[1] == 1:
            b_seen &= bits(mask, blocks, o_m, o_n, first, LQ, LK, False, FEATURES)
        else:
            b_seen &= bits(mask, blocks, o_n, o_m, first, LQ, LK, True, FEATURES)
    elif FEATURES.mask.present:
        MASK_AXES: tl.constexpr = FEATURES.mask
        b_seen &= load_scores(mask, o_m, o_n, LQ, LK, MASK_AXES) != 0
    return b_seen


@triton.constexpr_function
def exists(phase, features, ragged):
    """Is there this phase of the loop over tiles?  0: tiles that are seen whole; 1: those that are not; 2: those that the left
    end of a window cuts, or of a list those with rows that nobody sees."""
    if features.tiles.present:
        return phase < features.tile_classes
    edges = ragged or features.right or features.left or features.lengths
    return phase == 0 or (phase == 1 and edges) or (phase == 2 and features.left)


@triton.constexpr_function
def has_unseen(phase, features):
    """May tiles of this phase have rows that nobody sees, which may hold anything?"""
    return features.ranges.present and phase == 2


@triton.constexpr_function
def is_cut(ragged, phase, features):
    """Need tiles of this phase masked loads, where whole ones need them if `ragged`?"""
    return ragged or has_unseen(phase, features)


@triton.jit
def key_bounds(i_m, query_end, key_end, left, right, BM: tl.constexpr, BN: tl.constexpr, FEATURES: tl.constexpr):
    """(start, first, whole, stop): tiles of keys from `first` until before `whole` are seen by every query of block i_m;
    before `start` and from `stop` on, by none."""
    start = 0
    first = 0
    whole = key_end
    stop = key_end
    T: tl.constexpr = FEATURES.rows_of_head
    i_first = 0 if T > 0 else i_m * BM
    i_last = T - 1 if T > 0 else (i_m + 1) * BM - 1
    if FEATURES.right:
        stop = tl.minimum(key_end, tl.maximum(0, i_last + 1 + right))
        whole = tl.minimum(key_end, tl.maximum(0, i_first + 1 + right))
    if FEATURES.lengths:
        stop = tl.where(i_m * BM < query_end, stop, 0)
        whole = tl.where((i_m + 1) * BM <= query_end, whole, 0)
    whole = whole // BN * BN
    if FEATURES.left:
        start = tl.maximum(0, i_first - left) // BN * BN
        first = tl.cdiv(tl.maximum(0, i_last - left), BN) * BN
        whole = tl.where(first < whole, whole, start)
        first = tl.minimum(first, whole)
    return start, first, whole, stop


@triton.jit
def query_bounds(i_n, query_end, key_end, left, right, BM: tl.constexpr, BN: tl.constexpr, FEATURES: tl.constexpr):
    """(start, first, whole, stop): likewise for the tiles of queries that see key block i_n."""
    start = 0
    first = 0
    whole = query_end
    stop = query_end
    T: tl.constexpr = FEATURES.rows_of_head
    if T > 0:
        if FEATURES.right:
            stop = tl.where(i_n * BN <= T - 1 + right, stop, 0)
        if FEATURES.left:
            stop = tl.where(i_n * BN + BN - 1 >= -left, stop, 0)
        if FEATURES.left or FEATURES.right:
            first = stop
            whole = stop
    elif FEATURES.right:
        start = tl.maximum(0, i_n * BN - right) // BM * BM
        first = tl.minimum(tl.cdiv(tl.maximum(0, i_n * BN + BN - 1 - right), BM), tl.cdiv(query_end, BM)) * BM
    if FEATURES.left and T == 0:
        stop = tl.minimum(query_end, tl.maximum(0, i_n * BN + BN + left))
        first = tl.minimum(first, tl.cdiv(stop, BM) * BM)
        whole = tl.maximum(first, tl.minimum(query_end, tl.maximum(0, i_n * BN + 1 + left)) // BM * BM)
    if FEATURES.lengths:
        stop = tl.where(i_n * BN < key_end, stop, 0)
        cut = i_n * BN + BN > key_end
        first = tl.where(cut, stop, first)
        whole = tl.where(cut, stop, whole)
    return start, first, whole, stop


@triton.jit
def span(
    start, first, whole, stop, counts, B: tl.constexpr,
    PHASE: tl.constexpr, BY_KEY: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Where a phase begins and ends.  Causality cuts the last keys that a query sees, and the first queries that see a key."""
    if FEATURES.tiles.present:
        if PHASE == 0:
            return 0, counts[0] * B
        else:
            return counts[PHASE - 1] * B, counts[PHASE] * B
    elif PHASE == 0:
        return first, whole
    elif (PHASE == 1) == BY_KEY:
        return start, first
    else:
        return whole, stop


@triton.jit
def shared_keys(start, stop, counts, i_share, n_shares, B: tl.constexpr, FEATURES: tl.constexpr):
    """Where in what all phases go over a share begins and ends."""
    if FEATURES.key_shares:
        if FEATURES.tiles.present:
            LAST: tl.constexpr = FEATURES.tile_classes - 1
            start, stop = 0, counts[LAST] * B
        n = tl.cdiv(tl.maximum(stop - start, 0), B)
        return start + n * i_share // n_shares * B, start + n * (i_share + 1) // n_shares * B
    else:
        return start, stop


@triton.jit
def within(low, high, share, FEATURES: tl.constexpr):
    """What of a phase is in a share."""
    if FEATURES.key_shares:
        return tl.maximum(low, share[0]), tl.minimum(high, share[1])
    else:
        return low, high


@triton.jit
def listed(tiles, at, B: tl.constexpr, FEATURES: tl.constexpr):
    """The first row of the tile that is visited at `at`."""
    if FEATURES.tiles.present:
        return tl.load(tiles + at // B) * B
    else:
        return at


@triton.jit
def tile_list(TILES, i_b, i_h, HQ, GROUP, i_block, n_blocks, n_tiles, FEATURES: tl.constexpr):
    """(list, how many of it come up to the end of each class) of the tiles that this program visits, see `list_tiles`."""
    if FEATURES.tiles.present:
        CLASSES: tl.constexpr = FEATURES.tile_classes
        size = tl.full([], 1, tl.int64) * n_blocks * (n_tiles + CLASSES)
        TILES_AXES: tl.constexpr = FEATURES.tiles
        p_tiles = head_slice(TILES, i_b, i_h, HQ, GROUP, size, TILES_AXES) + i_block * (n_tiles + CLASSES)
        counts = (tl.load(p_tiles), tl.load(p_tiles + 1))
        if CLASSES == 3:
            counts = counts + (tl.load(p_tiles + 2),)
        return p_tiles + CLASSES, counts
    else:
        return TILES, (0, 0)


@triton.jit
def ranges_of(RANGES, i_b, i_h, HQ, GROUP, LQ, FEATURES: tl.constexpr):
    """The ranges of this batch entry and query head."""
    RANGES_AXES: tl.constexpr = FEATURES.ranges
    size = tl.full([], 1, tl.int64) * LQ * (2 * FEATURES.intervals)
    return head_slice(RANGES, i_b, i_h, HQ, GROUP, size, RANGES_AXES)


@triton.jit
def touches_ranges(ranges, o_m, first, last, LQ, FEATURES: tl.constexpr):
    """Is one of the keys first … last in one of the ranges of query o_m?"""
    INTERVALS: tl.constexpr = FEATURES.intervals
    b_seen = o_m < 0
    for I in tl.static_range(INTERVALS):
        p_range = ranges + (o_m * INTERVALS + I) * 2
        b_start = tl.maximum(tl.load(p_range, mask=o_m < LQ, other=0), first)
        b_end = tl.minimum(tl.load(p_range + 1, mask=o_m < LQ, other=0) - 1, last)
        b_seen |= b_start <= b_end
    return b_seen


@triton.jit
def extent(SEGMENTS, start, L, B: tl.constexpr):
    """(lowest, highest) of the segments of B rows."""
    o_x = start + tl.arange(0, B)
    b_x = tl.load(SEGMENTS + o_x, mask=o_x < L, other=tl.load(SEGMENTS + start))
    return tl.min(b_x, 0), tl.max(b_x, 0)


@triton.jit
def words_seen(
    mask, blocks, row, column, LQ, LK, R: tl.constexpr, C: tl.constexpr, BY_KEY: tl.constexpr, FEATURES: tl.constexpr
):  # fmt: skip
    """(has it a bit that is set, are all set that are of a row and column there is) of each word of a tile of a packed mask."""
    n_rows, n_columns = (LK, LQ) if BY_KEY else (LQ, LK)
    WORD: tl.constexpr = bits_of(mask.dtype)
    HELD: tl.constexpr = min(C, 4 * WORD)  # columns of the tile in four words
    o_r = row + tl.arange(0, R)[:, None]
    o_w = tl.arange(0, 4 * C // HELD)[None, :]
    n = tl.minimum(tl.maximum(n_columns - column - o_w // 4 * HELD, 0), HELD)
    n_bits = n // 8 * 2 + tl.minimum(tl.maximum(n % 8 - o_w % 4 * 2, 0), 2)
    b_there = tl.where(n_bits < 32, (1 << n_bits) - 1, -1)
    p_words = mask + (first_word(blocks, o_r, column, LQ, LK, WORD, BY_KEY, FEATURES) + o_w)
    b_word = tl.load(p_words, mask=(o_r < n_rows) & (n > 0), other=0).to(tl.int32)
    b_word = (b_word >> column % (4 * WORD) // 4) & b_there
    return b_word != 0, (b_word == b_there) | (o_r >= n_rows)


@triton.jit
def look(
    MASK, BLOCKS, Q_SEGMENTS, K_SEGMENTS, RANGES, HQ, GROUP, LQ, LK, query_end, key_end, left, right, heads,
    i_b, i_bh, m, n, BM: tl.constexpr, BN: tl.constexpr, BY_KEY: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """What is to be seen in the tile that begins at m and n, 2: everything, 1: perhaps something, 0: nothing; of ranges also 3:
    perhaps something, with rows that nobody sees.  Of HQ // heads query heads the first stands for all.  Of positions and of
    segments the ends tell, so that the tile itself is read of a mask alone."""
    m_last, n_last = tl.minimum(m + BM, LQ) - 1, n + BN - 1
    something = (n < key_end) & (m < query_end)
    everything = (n_last < key_end) & (m_last < query_end)
    T: tl.constexpr = FEATURES.rows_of_head
    i_first, i_last = (0, T - 1) if T > 0 else (m, m_last)
    if FEATURES.right:
        something &= n <= i_last + right
        everything &= n_last <= i_first + right
    if FEATURES.left:
        something &= n_last >= i_first - left
        everything &= n >= i_last - left
    if FEATURES.segments:
        q_low, q_high = extent(Q_SEGMENTS + i_b * LQ, m, LQ, BM)
        k_low, k_high = extent(K_SEGMENTS + i_b * LK, n, LK, BN)
        something &= (q_low <= k_high) & (k_low <= q_high)
        everything &= (q_low == k_high) & (k_low == q_high)
    i_h = i_bh % heads * (HQ // heads)
    if FEATURES.ranges.present:
        ranges = ranges_of(RANGES, i_b, i_h, HQ, GROUP, LQ, FEATURES)
        o_m = m + tl.arange(0, BM)
        b_some = touches_ranges(ranges, o_m, n, n_last, LQ, FEATURES)
        b_all = in_ranges(ranges, o_m, n, n_last, LQ, FEATURES) | (o_m >= LQ)
        something &= tl.max(b_some.to(tl.int32), 0) != 0
        everything &= tl.min(b_all.to(tl.int32), 0) != 0
    if FEATURES.mask.present:
        mask, blocks = mask_of(MASK, BLOCKS, i_b, i_h, HQ, GROUP, LQ, LK, BY_KEY, FEATURES)
        if FEATURES.mask.matrix:
            if BY_KEY:
                b_some, b_all = words_seen(mask, blocks, n, m, LQ, LK, BN, BM, True, FEATURES)
            else:
                b_some, b_all = words_seen(mask, blocks, m, n, LQ, LK, BM, BN, False, FEATURES)
        else:
            o_m = m + tl.arange(0, BM)[:, None]
            o_n = n + tl.arange(0, BN)[None, :]
            MASK_AXES: tl.constexpr = FEATURES.mask
            b_some = load_scores(mask, o_m, o_n, LQ, LK, MASK_AXES) != 0
            b_all = b_some | (o_m >= LQ)
        something &= tl.max(tl.max(b_some.to(tl.int32), 1), 0) != 0
        everything &= tl.min(tl.min(b_all.to(tl.int32), 1), 0) != 0
    seen = something.to(tl.int32) + (everything & something).to(tl.int32)
    if FEATURES.ranges.present:
        if seen == 1:
            if nobody_sees(ranges, m, n, query_end, key_end, BM, BN, FEATURES):
                seen = 3
    return seen


@triton.jit(do_not_specialize_on_alignment=INTEGERS)
def look_at_tiles(
    MASK, BLOCKS, Q_LENGTHS, K_LENGTHS, Q_SEGMENTS, K_SEGMENTS, RANGES,
    HQ, GROUP, LQ, LK, left, right, heads,
    SEEN,
    BM: tl.constexpr, BN: tl.constexpr, BY_KEY: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """A program looks at one tile: for each block of queries, or BY_KEY of keys, at those along the other axis."""
    LQ, LK = aligned(LQ, LK, FEATURES)
    n_m = tl.cdiv(LQ, BM)
    n_n = tl.cdiv(LK, BN)
    i_bh = (tl.program_id(0) // (n_m * n_n)).to(tl.int64)
    i_tile = tl.program_id(0) % (n_m * n_n)
    i_b = i_bh // heads
    query_end, key_end = lengths(Q_LENGTHS, K_LENGTHS, i_b, LQ, LK, FEATURES)
    m = (i_tile % n_m if BY_KEY else i_tile // n_n) * BM
    n = (i_tile // n_m if BY_KEY else i_tile % n_n) * BN
    seen = look(
        MASK, BLOCKS, Q_SEGMENTS, K_SEGMENTS, RANGES, HQ, GROUP, LQ, LK, query_end, key_end, left, right, heads,
        i_b, i_bh, m, n, BM, BN, BY_KEY, FEATURES,
    )  # fmt: skip
    tl.store(SEEN + i_bh * n_m * n_n + i_tile, seen)


@triton.jit
def nobody_sees(ranges, m, n, query_end, key_end, BM: tl.constexpr, BN: tl.constexpr, FEATURES: tl.constexpr):
    """Has a tile queries that see no key, or keys that no query sees, within the lengths?  That somebody sees a key, the queries
    of the tile tell, or the query of the same number, as in packed sequences that attend to themselves; others are not asked."""
    o_m = m + tl.arange(0, BM)
    o_n = n + tl.arange(0, BN)
    b_rows = (o_m >= query_end) | touches_ranges(ranges, o_m, 0, key_end - 1, query_end, FEATURES)
    b_keys = (o_n >= key_end) | in_ranges(ranges, o_n, o_n, o_n, query_end, FEATURES)
    known = tl.min(b_keys.to(tl.int32), 0) != 0
    if known == 0:
        for first in range(0, BM, 16):  # few at a time, as of registers
            o_q = (m + first + tl.arange(0, 16))[:, None]
            b_seen = in_ranges(ranges, o_q, o_n[None, :], o_n[None, :], query_end, FEATURES)
            b_keys |= tl.max(b_seen.to(tl.int32), 0) != 0
        known = tl.min(b_keys.to(tl.int32), 0) != 0
    return (known == 0) | (tl.min(b_rows.to(tl.int32), 0) == 0)


@triton.jit
def end_of_seen(o_m, o_n, first, end, sight, PHASE: tl.constexpr, FEATURES: tl.constexpr):
    """The end of streamed rows; of a tile with rows that nobody sees, for each row, 0 if no resident row sees it: it is loaded as
    zeros then, since 0 · NaN is NaN."""
    if has_unseen(PHASE, FEATURES):
        b_seen = visible(o_m, o_n, first, sight, FEATURES)
        return tl.where(tl.max(b_seen.to(tl.int32), 0) != 0, end, 0)
    else:
        return end


@triton.jit
def where_seen(b_x, o_m, o_n, first, sight, PHASE: tl.constexpr, FEATURES: tl.constexpr):
    """What P is multiplied with; of a tile with rows that nobody sees, zeros where P is zero."""
    if has_unseen(PHASE, FEATURES):
        return tl.where(visible(o_m, o_n, first, sight, FEATURES), b_x, 0.0)
    else:
        return b_x


@triton.jit
def in_words(b_x, AXIS: tl.constexpr, WORD: tl.constexpr):
    """Words whose bits are the 0 and 1 along an axis."""
    M: tl.constexpr = b_x.shape[0]
    N: tl.constexpr = b_x.shape[1]
    o_i = tl.arange(0, WORD // 2) * 2
    o_e = tl.arange(0, 2)
    if AXIS == 1:
        b_x = b_x.reshape([M, N // (4 * WORD), WORD // 2, 4, 2])
        b_x = b_x << (o_i[None, None, :, None, None] + o_e[None, None, None, None, :])
        return tl.sum(tl.sum(b_x, 4), 2).reshape([M, N // WORD])
    else:
        b_x = b_x.reshape([M // (4 * WORD), WORD // 2, 4, 2, N])
        b_x = b_x << (o_i[None, :, None, None, None] + o_e[None, None, None, :, None])
        return tl.sum(tl.sum(b_x, 1), 2).reshape([M // WORD, N])


@triton.jit(do_not_specialize_on_alignment=INTEGERS)
def pack(MASK, LQ, LK, BITS, BM: tl.constexpr, BN: tl.constexpr, BY_KEY: tl.constexpr, FEATURES: tl.constexpr):
    """The matrices of a mask as bits: `words` of keys for each row, or BY_KEY of queries for each column.  Of as many in a row as
    four words hold the one numbered 8 i + 2 w + e is bit 2 i + e of word w: in products' layout a thread has the columns of one
    w, and then finds their bits in one word.  A program packs a tile."""
    WORD: tl.constexpr = bits_of(BITS.dtype)
    LQ, LK = aligned(LQ, LK, FEATURES)
    # a block's bits repeat themselves along what the words hold alone
    n_rows, n_columns = n_blocks(LQ, LK, FEATURES)
    ROWS: tl.constexpr = FEATURES.mask_rows if BY_KEY else 1
    COLUMNS: tl.constexpr = 1 if BY_KEY else FEATURES.mask_columns
    n_q = LQ if BY_KEY else n_rows
    n_k = n_columns if BY_KEY else LK
    n_m, n_n = tl.cdiv(n_q, BM), tl.cdiv(n_k, BN)
    i_x = (tl.program_id(0) // (n_m * n_n)).to(tl.int64)
    i_tile = tl.program_id(0) % (n_m * n_n)
    o_m = i_tile // n_n * BM + tl.arange(0, BM)[:, None]
    o_n = i_tile % n_n * BN + tl.arange(0, BN)[None, :]
    p_x = MASK + i_x * n_rows * n_columns + ((o_m // ROWS).to(tl.int64) * n_columns + o_n // COLUMNS)
    b_x = tl.load(p_x, mask=(o_m < n_q) & (o_n < n_k), other=0)
    b_x = (b_x != 0).to(tl.int32)
    if BY_KEY:
        o_w = i_tile // n_n * (BM // WORD) + tl.arange(0, BM // WORD)[:, None]
        n_words = words(LQ, WORD)
        p_words, m_x = BITS + ((i_x * n_k + o_n) * n_words + o_w), (o_n < n_k) & (o_w < n_words)
    else:
        o_w = i_tile % n_n * (BN // WORD) + tl.arange(0, BN // WORD)[None, :]
        n_words = words(LK, WORD)
        p_words, m_x = BITS + ((i_x * n_q + o_m) * n_words + o_w), (o_m < n_q) & (o_w < n_words)
    tl.store(p_words, in_words(b_x, 0 if BY_KEY else 1, WORD).to(BITS.dtype.element_ty), mask=m_x)


@triton.jit
def append(p_tiles, count, o_t, b_seen, PHASE: tl.constexpr, CLASSES: tl.constexpr):
    """Those of the tiles o_t that are of this class come to the list, which has `count` of them then."""
    b_is = b_seen == (3 if PHASE == 2 else 2 - PHASE)
    tl.store(p_tiles + (CLASSES - 1) + count + tl.cumsum(b_is.to(tl.int32), 0), o_t, mask=b_is)
    return count + tl.sum(b_is.to(tl.int32), 0)


@triton.jit(do_not_specialize_on_alignment=INTEGERS)
def list_tiles(SEEN, n_tiles, TILES, CHUNK: tl.constexpr, CLASSES: tl.constexpr):
    """For each block, how many tiles are seen whole, how many with those that are seen in part, and with those that also have
    rows that nobody sees, if there are CLASSES for them; then their indices, in this order."""
    i_block = tl.program_id(0).to(tl.int64)
    p_tiles = TILES + i_block * (n_tiles + CLASSES)
    count = tl.full([], 0, tl.int32)
    for PHASE in tl.static_range(CLASSES):
        for start in range(0, n_tiles, CHUNK):
            o_t = start + tl.arange(0, CHUNK)
            b_x = tl.load(SEEN + i_block * n_tiles + o_t, mask=o_t < n_tiles, other=0)
            count = append(p_tiles, count, o_t, b_x, PHASE, CLASSES)
        tl.store(p_tiles + PHASE, count)


MOST_TILES = tl.constexpr(16)  # of a block, for `list_few_tiles`


@triton.jit(do_not_specialize_on_alignment=INTEGERS)
def list_few_tiles(
    MASK, BLOCKS, Q_LENGTHS, K_LENGTHS, Q_SEGMENTS, K_SEGMENTS, RANGES,
    HQ, GROUP, LQ, LK, left, right, heads,
    TILES,
    BM: tl.constexpr, BN: tl.constexpr, BY_KEY: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """`look_at_tiles` and `list_tiles` in one launch: a program looks at the tiles of a block one after the other."""
    CLASSES: tl.constexpr = FEATURES.tile_classes
    LQ, LK = aligned(LQ, LK, FEATURES)
    n_m, n_n = tl.cdiv(LQ, BM), tl.cdiv(LK, BN)
    n_blocks, n_tiles = (n_n, n_m) if BY_KEY else (n_m, n_n)
    i_bh = (tl.program_id(0) // n_blocks).to(tl.int64)
    i_block = tl.program_id(0) % n_blocks
    i_b = i_bh // heads
    query_end, key_end = lengths(Q_LENGTHS, K_LENGTHS, i_b, LQ, LK, FEATURES)
    o_t = tl.arange(0, MOST_TILES)
    b_seen = tl.full([MOST_TILES], 0, tl.int32)
    for i_tile in range(0, n_tiles):
        m = (i_tile if BY_KEY else i_block) * BM
        n = (i_block if BY_KEY else i_tile) * BN
        seen = look(
            MASK, BLOCKS, Q_SEGMENTS, K_SEGMENTS, RANGES, HQ, GROUP, LQ, LK, query_end, key_end, left, right, heads,
            i_b, i_bh, m, n, BM, BN, BY_KEY, FEATURES,
        )  # fmt: skip
        b_seen = tl.where(o_t == i_tile, seen, b_seen)
    p_tiles = TILES + (i_bh * n_blocks + i_block) * (n_tiles + CLASSES)
    count = tl.full([], 0, tl.int32)
    for PHASE in tl.static_range(CLASSES):
        count = append(p_tiles, count, o_t, b_seen, PHASE, CLASSES)
        tl.store(p_tiles + PHASE, count)


# ------------------------------------------------------------------------------------------------ dropout


@triton.jit
def _mixed(b_x):
    """A permutation of 32-bit integers that scatters neighbours."""
    b_x = (b_x ^ (b_x >> 16)) * 0x21F0AAAD
    b_x = (b_x ^ (b_x >> 15)) * 0xD35A2D97
    return b_x ^ (b_x >> 15)


@triton.jit
def seeds(SEED, i_b, i_h, FEATURES: tl.constexpr):
    """Two numbers for this head, from the two of its batch entry, and where the queries and the keys begin."""
    if FEATURES.dropout:
        SEED += 5 * i_b
        seed = tl.load(SEED).to(tl.uint32, bitcast=True)
        other = tl.load(SEED + 1).to(tl.uint32, bitcast=True)
        i = (i_h + tl.load(SEED + 2)).to(tl.uint32)
        return _mixed(seed ^ _mixed(i)), _mixed(other + i), tl.load(SEED + 3), tl.load(SEED + 4)
    else:
        return 0, 0, 0, 0


@triton.jit
def kept(o_m, o_n, head_seeds, rate, FEATURES: tl.constexpr):
    """1 / (1 − rate) where dropout keeps a probability, else 0: a hash of its place, the same in every kernel."""
    if FEATURES.dropout:
        seed, other, first_m, first_n = head_seeds
        b_key = _mixed((o_m + first_m).to(tl.uint32) ^ seed)
        b_x = _mixed(_mixed((o_n + first_n).to(tl.uint32) ^ b_key) + (b_key ^ other))
        threshold = (tl.full([], 2.0**31, tl.float32) * rate).to(tl.int32)
        return tl.where((b_x >> 1).to(tl.int32) >= threshold, 1.0 / (1.0 - rate), 0.0)
    else:
        return 1.0


@triton.jit
def thinned(b_x, b_kept, FEATURES: tl.constexpr):
    if FEATURES.dropout:
        return b_x * b_kept
    else:
        return b_x


# ------------------------------------------------------------------------------------------------ one query head


@triton.jit
def selected(
    BIAS, TBIAS, MASK, BLOCKS, Q_SEGMENTS, K_SEGMENTS, RANGES, SEED,
    i_b, i_h, HQ, GROUP, LQ, LK, query_end, key_end, left, right, BY_KEY: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """(bias, its tangent, a `MaskReader`, what `kept` hashes) of this batch entry and query head."""
    BIAS_AXES: tl.constexpr = FEATURES.bias
    bias = matrix(BIAS, i_b, i_h, HQ, GROUP, LQ, LK, BIAS_AXES)
    t_bias = matrix(TBIAS, i_b, i_h, HQ, GROUP, LQ, LK, BIAS_AXES)
    mask, blocks = mask_of(MASK, BLOCKS, i_b, i_h, HQ, GROUP, LQ, LK, BY_KEY, FEATURES)
    ranges = ranges_of(RANGES, i_b, i_h, HQ, GROUP, LQ, FEATURES)
    q_segments, k_segments = Q_SEGMENTS + i_b * LQ, K_SEGMENTS + i_b * LK
    sight = MaskReader(query_end, key_end, left, right, LQ, LK, q_segments, k_segments, ranges, mask, blocks)
    return bias, t_bias, sight, seeds(SEED, i_b, i_h, FEATURES)
