"""What comes before and after a backward in one pass, for a tile of queries each: statistics of rows and zeros to add dQ to; dQ
of the sums.

By how much rows of dS exceed what they should sum to, as they are multiplied, times a mean key is taken off dQ in heads whose
keys have much in common (README.md, "Rounding"): dQ' = dQ − e k̄ and ḋQ' = ḋQ − ė k̄ − e k̄̇.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jax_flash_jvp.kernels.hopper import products
from jax_flash_jvp.kernels.hopper.adding import TILE
from jax_flash_jvp.kernels.hopper.handover import stored
from jax_flash_jvp.kernels.hopper.products import product_layout
from jax_flash_jvp.kernels.hopper.programs import Integers
from jax_flash_jvp.kernels.hopper.ring import row_layout
from jax_flash_jvp.kernels.hopper.step_one_pass_dual import COLUMNS, STREAMED


@gluon.jit
def own_queries(HQ, LQ):
    """The numbers of this program's tile, of its batch entry and head, and of both, and its first row there."""
    n_tiles = gl.cdiv(LQ, TILE)
    i = gl.program_id(0)
    i_bh, row = i // n_tiles, (i % n_tiles) * TILE
    return i, i_bh // HQ, i_bh % HQ, i_bh, row


@gluon.jit
def row_products(X, Y, stride, n, C: gl.constexpr, PART: gl.constexpr):
    """rowsum(x∘y) of a tile, of one part of the columns; zeros from row n on."""
    layout: gl.constexpr = row_layout(products.width(C, PART))
    o_r = gl.expand_dims(gl.arange(0, TILE, layout=gl.SliceLayout(1, layout)), 1)
    o_c = gl.expand_dims(
        products.before(C, PART) + gl.arange(0, products.width(C, PART), layout=gl.SliceLayout(0, layout)), 0
    )
    m_x = (o_r < n) & (o_c < C)
    b_x = gl.load(X + o_r * stride + o_c, mask=m_x, other=0.0).to(gl.float32)
    return gl.sum(b_x * gl.load(Y + o_r * stride + o_c, mask=m_x, other=0.0).to(gl.float32), 1)


@gluon.jit(do_not_specialize_on_alignment=Integers._fields)
def prepare(
    O, DO, LSE, D_LSE, Q_LENGTHS,
    HQ, LQ,
    LSE2, DELTA, DQ, DQ_R, ROWS, COUNTS,
    C: gl.constexpr, HAS_D_LSE: gl.constexpr, ORDERED: gl.constexpr, FEATURES: gl.constexpr,
):  # fmt: skip
    """ℓ in base 2, δ, and zeros to add dq to and to count with, of a tile of queries.  Rows past the end see nothing."""
    i, i_b, i_h, i_bh, row = own_queries(HQ, LQ)
    x_l: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    end = LQ
    if FEATURES.query_lengths:
        end = gl.minimum(LQ, gl.load(Q_LENGTHS + i_b))
    b_delta = gl.zeros([TILE], gl.float32, x_l)
    x = ((i_b.to(gl.int64) * LQ + row) * HQ + i_h) * C
    for PART in gl.static_range(products.parts(C)):
        b_delta += gl.convert_layout(row_products(O + x, DO + x, HQ * C, end - row, C, PART), x_l)
    o_x = gl.arange(0, TILE, layout=x_l)
    m_x = row + o_x < end
    x = i_bh.to(gl.int64) * LQ + row + o_x
    b_lse = gl.load(LSE + x, mask=m_x, other=-float("inf"))
    if HAS_D_LSE:
        b_delta -= gl.load(D_LSE + x, mask=m_x, other=0.0)
    if FEATURES.ranges.present:  # of a row that sees nothing cotangents may be NaN
        b_delta = gl.where(b_lse == -float("inf"), 0.0, b_delta)
    y = i.to(gl.int64) * TILE
    gl.store(LSE2 + y + o_x, products.log2_sum_exp(b_lse))
    gl.store(DELTA + y + o_x, b_delta)
    gl.store(ROWS + y + o_x, gl.zeros([TILE], gl.float32, x_l))
    if ORDERED:
        gl.store(COUNTS + i, 0)
    store_zeros(DQ + y * products.width(C, 0), products.width(C, 0))
    if products.parts(C) == 2:
        store_zeros(DQ_R + y * products.width(C, 1), products.width(C, 1))


@gluon.jit
def store_zeros(X, W: gl.constexpr):
    """For a tile of so many columns."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    zeros = gl.zeros([1024], gl.float32, layout)
    for PIECE in gl.static_range(TILE * W // 1024):
        gl.store(X + 1024 * PIECE + gl.arange(0, 1024, layout=layout), zeros)


@gluon.jit(do_not_specialize_on_alignment=Integers._fields)
def scale_queries(
    SUMS, SUMS_R, ROWS, LSE2, D_LSE, KEY_MEAN, COMMON,
    scale, HQ, GROUP, LQ,
    D_Q,
    C: gl.constexpr, HAS_D_LSE: gl.constexpr, CORRECTED: gl.constexpr, FEATURES: gl.constexpr,
):  # fmt: skip
    """dQ of a tile of queries."""
    i, i_b, i_h, i_bh, row = own_queries(HQ, LQ)
    i_k = i_h // GROUP
    y = i.to(gl.int64) * TILE
    x_l: gl.constexpr = gl.SliceLayout(1, product_layout(products.width(C, 0)))
    o_x = gl.arange(0, TILE, layout=x_l)
    b_dq = (from_sums(SUMS + y * products.width(C, 0), products.width(C, 0)),)
    if products.parts(C) == 2:
        b_dq = b_dq + (from_sums(SUMS_R + y * products.width(C, 1), products.width(C, 1)),)
    if CORRECTED:
        if gl.load(COMMON + i_b * (HQ // GROUP) + i_k):
            lse2 = gl.expand_dims(gl.load(LSE2 + y + o_x), 1)
            x = i_bh.to(gl.int64) * LQ + row + o_x
            excess = products.excess_of(gl.load(ROWS + y + o_x), lse2, D_LSE, x, row + o_x < LQ, HAS_D_LSE)
            mean = products.mean_at(i_b, i_h, i_k, row, HQ, GROUP, LQ, C, FEATURES)
            b_dq = products.without_mean(b_dq, excess, KEY_MEAN, mean, C, 0)
    b_dq = products.scaled(b_dq, gl.full([TILE], scale, gl.float32, x_l))
    products.store_rows(D_Q, i_b, i_h, HQ, row, LQ, b_dq, C)


@gluon.jit
def from_sums(SUMS, W: gl.constexpr):
    return stored(SUMS, gl.zeros([TILE, W], gl.float32, product_layout(W)))


@gluon.jit(do_not_specialize_on_alignment=Integers._fields)
def prepare_dual(
    O, DO, TO, TDO, LSE, MU, D_LSE, TD_LSE, Q_LENGTHS,
    HQ, LQ,
    LSE2, MU_OUT, DELTA, T_DELTA, DQ, ROWS, COUNTS,
    C: gl.constexpr, HAS_D_LSE: gl.constexpr, HAS_TD_LSE: gl.constexpr, ORDERED: gl.constexpr, FEATURES: gl.constexpr,
):  # fmt: skip
    """ℓ in base 2, μ, δ and δ̇, and zeros to add to and to count with, of two tiles of queries.  Rows past the end see
    nothing."""
    i, i_b, i_h, i_bh, row = own_queries(HQ, LQ)
    x_l: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    end = LQ
    if FEATURES.query_lengths:
        end = gl.minimum(LQ, gl.load(Q_LENGTHS + i_b))
    x = ((i_b.to(gl.int64) * LQ + row) * HQ + i_h) * C
    b_delta = row_products(O + x, DO + x, HQ * C, end - row, C, 0)
    b_t_delta = row_products(O + x, TDO + x, HQ * C, end - row, C, 0)
    b_t_delta += row_products(TO + x, DO + x, HQ * C, end - row, C, 0)
    b_delta, b_t_delta = gl.convert_layout(b_delta, x_l), gl.convert_layout(b_t_delta, x_l)
    o_x = gl.arange(0, TILE, layout=x_l)
    m_x = row + o_x < end
    x = i_bh.to(gl.int64) * LQ + row + o_x
    b_lse = gl.load(LSE + x, mask=m_x, other=-float("inf"))
    if HAS_D_LSE:
        b_delta -= gl.load(D_LSE + x, mask=m_x, other=0.0)
    if HAS_TD_LSE:
        b_t_delta -= gl.load(TD_LSE + x, mask=m_x, other=0.0)
    if FEATURES.ranges.present:
        b_delta = gl.where(b_lse == -float("inf"), 0.0, b_delta)
        b_t_delta = gl.where(b_lse == -float("inf"), 0.0, b_t_delta)
    y = i.to(gl.int64) * TILE
    gl.store(LSE2 + y + o_x, products.log2_sum_exp(b_lse))
    gl.store(MU_OUT + y + o_x, gl.load(MU + x, mask=m_x, other=0.0))
    gl.store(DELTA + y + o_x, b_delta)
    gl.store(T_DELTA + y + o_x, b_t_delta)
    zeros = gl.zeros([TILE], gl.float32, x_l)
    gl.store(ROWS + 2 * y + o_x, zeros)
    gl.store(ROWS + 2 * y + TILE + o_x, zeros)
    if ORDERED:
        gl.store(COUNTS + 2 * i, 0)
        gl.store(COUNTS + 2 * i + 1, 0)
    store_zeros(DQ + y * (2 * COLUMNS), 2 * COLUMNS)


@gluon.jit(do_not_specialize_on_alignment=Integers._fields)
def scale_queries_dual(
    SUMS, ROWS, LSE2, D_LSE, TD_LSE, KEY_MEAN, T_KEY_MEAN, COMMON,
    scale, HQ, GROUP, LQ,
    D_Q, TD_Q,
    C: gl.constexpr, HAS_D_LSE: gl.constexpr, HAS_TD_LSE: gl.constexpr, CORRECTED: gl.constexpr, FEATURES: gl.constexpr,
):  # fmt: skip
    """dQ and ḋQ of two tiles of queries."""
    i, i_b, i_h, i_bh, row = own_queries(HQ, LQ)
    i_k = i_h // GROUP
    y = i.to(gl.int64) * TILE
    x_l: gl.constexpr = gl.SliceLayout(1, product_layout(COLUMNS))
    o_x = gl.arange(0, TILE, layout=x_l)
    SUMS += y * (2 * COLUMNS)
    T: gl.constexpr = STREAMED
    b_dq, b_tdq = (from_transposed_sums(SUMS),), (from_transposed_sums(SUMS + T * COLUMNS),)
    if CORRECTED:
        if gl.load(COMMON + i_b * (HQ // GROUP) + i_k):
            lse2 = gl.expand_dims(gl.load(LSE2 + y + o_x), 1)
            x = i_bh.to(gl.int64) * LQ + row + o_x
            m_x = row + o_x < LQ
            # of each of the two sums of dS, then of ḋS
            o_r = 2 * y + o_x // T * (2 * T) + o_x % T
            excess = products.excess_of(gl.load(ROWS + o_r), lse2, D_LSE, x, m_x, HAS_D_LSE)
            t_excess = products.excess_of(gl.load(ROWS + o_r + T), lse2, TD_LSE, x, m_x, HAS_TD_LSE)
            mean = products.mean_at(i_b, i_h, i_k, row, HQ, GROUP, LQ, C, FEATURES)
            b_dq = products.without_mean(b_dq, excess, KEY_MEAN, mean, C, 0)
            b_tdq = products.without_mean(b_tdq, excess, T_KEY_MEAN, mean, C, 0)
            b_tdq = products.without_mean(b_tdq, t_excess, KEY_MEAN, mean, C, 0)
    b_scale = gl.full([TILE], scale, gl.float32, x_l)
    products.store_rows(D_Q, i_b, i_h, HQ, row, LQ, products.scaled(b_dq, b_scale), C)
    products.store_rows(TD_Q, i_b, i_h, HQ, row, LQ, products.scaled(b_tdq, b_scale), C)


@gluon.jit
def from_transposed_sums(SUMS):
    """[queries, channels] of two tiles of dqᵀ, each of which has its ḋqᵀ behind it."""
    like = gl.zeros([COLUMNS, STREAMED], gl.float32, product_layout(STREAMED))
    b_x = gl.join(stored(SUMS, like), stored(SUMS + 2 * STREAMED * COLUMNS, like))
    return gl.convert_layout(b_x.permute((2, 1, 0)).reshape([TILE, COLUMNS]), product_layout(COLUMNS))
