"""Puts together the results of blocks whose tiles several programs shared, see `item` in `work.py`.

Of parts of a softmax, each over some of the keys, with their (o, ℓ, ȯ, μ):

    ℓ = log Σᵢ exp ℓᵢ      aᵢ = exp(ℓᵢ − ℓ)      o = Σᵢ aᵢ oᵢ      μ = Σᵢ aᵢ μᵢ      ȯ = Σᵢ aᵢ (ȯᵢ + (μᵢ − μ) oᵢ)

one after the other, with ℓ, o, μ and ȯ of those so far.  The tangent alone has P from the saved ℓ: its parts are sums as they
are, and ΣP in the place of ℓᵢ.  Gradients are added up.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jax_flash_jvp.kernels.hopper.products import LN2, LOG2E, LOWEST
from jax_flash_jvp.kernels.hopper.work import part_rows, part_statistic


@gluon.jit
def rows_of(ROWS: gl.constexpr, BM: gl.constexpr, LAYOUT: gl.constexpr):
    """(number of the block, the rows of it) that this program puts together."""
    i = gl.program_id(0)
    return i // (ROWS // BM), i % (ROWS // BM) * BM + gl.arange(0, BM, layout=LAYOUT)


@gluon.jit
def sharers(block, share, n_tiles):
    """The first and the last program with tiles of that shared block."""
    return block * n_tiles // share, (block * n_tiles + n_tiles - 1) // share


@gluon.jit
def load_rows(X, o_r, o_c, C: gl.constexpr):
    return gl.load(X + gl.expand_dims(o_r * C, 1) + gl.expand_dims(o_c, 0), mask=gl.expand_dims(o_c, 0) < C, other=0.0)


@gluon.jit
def store(X, i_bh, H, row, L, o_r, o_c, b_x, C: gl.constexpr):
    """In a contiguous [B, L, H, C] array."""
    o_l = gl.expand_dims(row + o_r, 1)
    offset = (i_bh // H).to(gl.int64) * L * H * C + (i_bh % H) * C
    m_x = (o_l < L) & (gl.expand_dims(o_c, 0) < C)
    gl.store(X + offset + o_l.to(gl.int64) * (H * C) + gl.expand_dims(o_c, 0), b_x.to(X.dtype.element_ty), mask=m_x)


@gluon.jit
def merge_forward(
    PARTS, O, LSE, TO, MU, n_whole, share, n_tiles, H, L,
    D: gl.constexpr, C: gl.constexpr, ROWS: gl.constexpr, BM: gl.constexpr,
    HAS_O: gl.constexpr, HAS_T: gl.constexpr, LINEAR: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [128 // D, D // 4], [4, 1], [1, 0])
    r_l: gl.constexpr = gl.SliceLayout(1, layout)
    N: gl.constexpr = 2 if HAS_T else 1  # arrays, and statistics
    block, o_r = rows_of(ROWS, BM, r_l)
    o_c = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    first, last = sharers(block, share, n_tiles)
    b_m = gl.full([BM], LOWEST, gl.float32, r_l)
    b_sum = gl.zeros([BM], gl.float32, r_l)
    b_mu = gl.zeros([BM], gl.float32, r_l)
    b_o = gl.zeros([BM, D], gl.float32, layout)
    b_to = gl.zeros([BM, D], gl.float32, layout)
    for p in range(first, last + 1):
        b_l = gl.load(part_statistic(PARTS, p + block, 0, 0, ROWS, N, N, C) + o_r)
        if HAS_O:
            b_x = load_rows(part_rows(PARTS, p + block, 0, 0, ROWS, N, N, C), o_r, o_c, C)
        if HAS_T:
            b_tx = load_rows(part_rows(PARTS, p + block, 1, 0, ROWS, N, N, C), o_r, o_c, C)
            b_c = gl.load(part_statistic(PARTS, p + block, 1, 0, ROWS, N, N, C) + o_r)
        if not LINEAR:
            m_new = gl.maximum(b_m, b_l)
            b_sum *= gl.exp2((b_m - m_new) * LOG2E)
            b_l = gl.exp2((b_l - m_new) * LOG2E)
            b_m = m_new
        b_sum += b_l
        weight = b_l / gl.where(b_sum == 0.0, 1.0, b_sum)
        if LINEAR:
            old = gl.full([BM, 1], 1.0, gl.float32, layout)
            new = old
        else:
            old = gl.expand_dims(1.0 - weight, 1)
            new = gl.expand_dims(weight, 1)
        if HAS_T:
            step = weight * (b_c - b_mu)  # of μ
            if HAS_O:
                b_to -= gl.expand_dims(step, 1) * b_o
                b_tx += gl.expand_dims(b_c - b_mu - step, 1) * b_x
            b_to = old * b_to + new * b_tx
            b_mu += step
        if HAS_O:
            b_o = old * b_o + new * b_x
    i_bh = (n_whole + block) // gl.cdiv(L, ROWS)
    row = (n_whole + block) % gl.cdiv(L, ROWS) * ROWS
    x = i_bh.to(gl.int64) * L + row + o_r
    m_x = row + o_r < L
    if not LINEAR:
        store(O, i_bh, H, row, L, o_r, o_c, b_o, C)
        gl.store(LSE + x, b_m + gl.log2(b_sum) * LN2, mask=m_x)
    if HAS_T:
        store(TO, i_bh, H, row, L, o_r, o_c, b_to, C)
        gl.store(MU + x, b_mu, mask=m_x)


@gluon.jit
def merge_sum(
    X, I: gl.constexpr, N: gl.constexpr, PARTS, n_whole, share, n_tiles, H, L,
    D: gl.constexpr, C: gl.constexpr, ROWS: gl.constexpr, BM: gl.constexpr,
):  # fmt: skip
    """The I-th of N arrays."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [128 // D, D // 4], [4, 1], [1, 0])
    block, o_r = rows_of(ROWS, BM, gl.SliceLayout(1, layout))
    o_c = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    first, last = sharers(block, share, n_tiles)
    b_x = gl.zeros([BM, D], gl.float32, layout)
    for p in range(first, last + 1):
        b_x += load_rows(part_rows(PARTS, p + block, I, 0, ROWS, N, 0, C), o_r, o_c, C)
    n_m = gl.cdiv(L, ROWS)
    store(X, (n_whole + block) // n_m, H, (n_whole + block) % n_m * ROWS, L, o_r, o_c, b_x, C)


@gluon.jit
def merge_backward(
    PARTS, DA, DC, TDA, TDC, n_whole, share, n_tiles, H, L,
    D: gl.constexpr, C: gl.constexpr, ROWS: gl.constexpr, BM: gl.constexpr,
    WANT_A: gl.constexpr, WANT_C: gl.constexpr, WANT_TA: gl.constexpr, WANT_TC: gl.constexpr,
):  # fmt: skip
    ALL: gl.constexpr = WANT_A + WANT_C + WANT_TA + WANT_TC
    if WANT_A:
        merge_sum(DA, 0, ALL, PARTS, n_whole, share, n_tiles, H, L, D, C, ROWS, BM)
    if WANT_C:
        merge_sum(DC, WANT_A, ALL, PARTS, n_whole, share, n_tiles, H, L, D, C, ROWS, BM)
    if WANT_TA:
        merge_sum(TDA, WANT_A + WANT_C, ALL, PARTS, n_whole, share, n_tiles, H, L, D, C, ROWS, BM)
    if WANT_TC:
        merge_sum(TDC, ALL - 1, ALL, PARTS, n_whole, share, n_tiles, H, L, D, C, ROWS, BM)
