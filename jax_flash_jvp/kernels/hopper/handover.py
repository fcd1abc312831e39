"""What programs that share a block hand over to each other.

What is handed over is what a loop over tiles keeps, sums and values of their rows, so that another may go on from there.  Of
fragments of a softmax, each over some of the keys, with their maxima m, in base 2, sums l, o and ȯ, and μ, two at a time:

    m = max(m₀, m₁)   aᵢ = 2 ** (mᵢ − m)   l = Σᵢ aᵢ lᵢ   o = Σᵢ aᵢ oᵢ   μ = Σᵢ aᵢ lᵢ μᵢ / l   ȯ = Σᵢ aᵢ (ȯᵢ + (μᵢ − μ) oᵢ)

The tangent alone has P from the saved ℓ, in the place of m, so that all aᵢ are one.  Gradients, and row sums of dS and
ḋS, are added up.

Every thread hands over what it holds to the thread with its number in the other program, through memory: its elements
of the sums, and of values of rows as many copies as make each thread's own, then a flag.  Nobody else reads these, so
no thread waits for another of its program, and the flag, of 64 bits that memory never holds by chance, need not be
cleared before, but is after.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jax_flash_jvp.kernels.hopper import products
from jax_flash_jvp.kernels.hopper.products import GROUP_ROWS, product_layout
from jax_flash_jvp.kernels.hopper.ring import AGAIN

_COPIES = 8  # of a value for each row: as many columns as the narrowest product has
COPIES = gl.constexpr(_COPIES)
# PTX: a thread's stores are done; those of another are, and its flag is taken down again
SAY = gl.constexpr("""{
.reg .b64 flag;
mov.b64 flag, 0x9E3779B97F4A7C15;
st.release.gpu.global.b64 [$1], flag;
mov.b32 $0, 0;
}""")
AWAIT = gl.constexpr(f"""{{
.reg .pred absent;
.reg .b64 flag, seen;
mov.b64 flag, 0x9E3779B97F4A7C15;
{AGAIN}
mov.b64 seen, 0;
st.global.b64 [$1], seen;
mov.b32 $0, 0;
}}""")


@triton.constexpr_function
def fragment_size(rows, sums, row_values, channels):
    """Floats of a warpgroup's fragment: so many sums [rows, columns of the products] and values of rows [rows, COPIES], and
    two for the flag of every thread, of which there are two for a row."""
    return rows * (sums * products.columns(channels) + _COPIES * row_values + 4)


@gluon.jit
def fragment_at(EXCHANGE, program, w: gl.constexpr, GROUPS: gl.constexpr, sums, row_values, C: gl.constexpr):
    """Where that of a warpgroup is: a program hands over one fragment at most."""
    return EXCHANGE + (program * GROUPS + w) * fragment_size(GROUP_ROWS, len(sums), len(row_values), C)


@gluon.jit
def flags(fragment, sums, row_values, C: gl.constexpr, TEXT: gl.constexpr):
    o = gl.arange(0, 2 * GROUP_ROWS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    address = (fragment + GROUP_ROWS * (len(sums) * products.columns(C) + COPIES * len(row_values)) + 2 * o).to(
        gl.int64
    )
    gl.inline_asm_elementwise(TEXT, "=r,l", [address], gl.int32, False, 1)


@gluon.jit
def by_thread(b_x):
    """[GROUP_ROWS, W] of a product as [W / 8, 4 · threads]: a row has of every thread, in their order, the four elements that it
    holds of eight columns.  Nothing moves."""
    W: gl.constexpr = b_x.shape[1]
    return b_x.reshape([4, 2, 8, W // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([W // 8, 8 * GROUP_ROWS])


@gluon.jit
def places(X, b_y):
    """Pointers to what is ordered by thread, so that a warp reads and writes whole lines of memory."""
    o_r = gl.arange(0, b_y.shape[0], layout=gl.SliceLayout(1, b_y.type.layout))
    o_c = gl.arange(0, b_y.shape[1], layout=gl.SliceLayout(0, b_y.type.layout))
    return X + gl.expand_dims(o_r * b_y.shape[1], 1) + gl.expand_dims(o_c, 0)


@gluon.jit
def store(X, b_x):
    b_y = by_thread(b_x)
    gl.store(places(X, b_y), b_y)


@gluon.jit
def stored(X, like):
    W: gl.constexpr = like.shape[1]
    b_y = gl.load(places(X, by_thread(like)))
    b_x = b_y.reshape([W // 8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5]).reshape([GROUP_ROWS, W])
    return gl.convert_layout(b_x, like.type.layout)


@gluon.jit
def stored_sum(fragment, I: gl.constexpr, like, C: gl.constexpr):
    X = fragment + I * GROUP_ROWS * products.columns(C)
    b_x = ()
    for PART in gl.static_range(products.parts(C)):
        b_x = b_x + (stored(X + GROUP_ROWS * products.before(C, PART), like[PART]),)
    return b_x


@gluon.jit
def copies(b_r):
    """[GROUP_ROWS, COPIES], of a number for each row."""
    zero = gl.zeros([GROUP_ROWS, COPIES], gl.float32, product_layout(COPIES))
    return zero + products.by_row(b_r, zero)


@gluon.jit
def stored_row_values(fragment, sums, row_values, C: gl.constexpr):
    some = ()
    for I in gl.static_range(len(row_values)):
        X = fragment + GROUP_ROWS * (len(sums) * products.columns(C) + I * COPIES)
        b_x = gl.max(stored(X, copies(row_values[I])), 1)
        some = some + (gl.convert_layout(b_x, row_values[I].type.layout),)
    return some


@gluon.jit
def hand_over(EXCHANGE, program, w: gl.constexpr, sums, row_values, options):
    C: gl.constexpr = products.widest(options.C, options.SPLIT)
    fragment = fragment_at(EXCHANGE, program, w, options.GROUPS, sums, row_values, C)
    for I in gl.static_range(len(sums)):
        for PART in gl.static_range(products.parts(C)):
            store(fragment + GROUP_ROWS * (I * products.columns(C) + products.before(C, PART)), sums[I][PART])
    for I in gl.static_range(len(row_values)):
        store(fragment + GROUP_ROWS * (len(sums) * products.columns(C) + I * COPIES), copies(row_values[I]))
    flags(fragment, sums, row_values, C, SAY)


@gluon.jit
def resume(EXCHANGE, work, w: gl.constexpr, sums, row_values, options):
    """What the loop over a fragment's tiles begins with: these zeros, or what was handed over."""
    C: gl.constexpr = products.widest(options.C, options.SPLIT)
    if work.resumed:
        fragment = fragment_at(EXCHANGE, work.since, w, options.GROUPS, sums, row_values, C)
        flags(fragment, sums, row_values, C, AWAIT)
        some = ()
        for I in gl.static_range(len(sums)):
            some = some + (stored_sum(fragment, I, sums[I], C),)
        row_values = stored_row_values(fragment, sums, row_values, C)
        sums = some
    return sums, row_values


@gluon.jit
def plus(fragment, sums, row_values, C: gl.constexpr):
    """Sums and values of rows, to which those of a fragment are added that was handed over."""
    rows = stored_row_values(fragment, sums, row_values, C)
    added = ()
    for I in gl.static_range(len(row_values)):
        added = added + (row_values[I] + rows[I],)
    totals = ()
    for I in gl.static_range(len(sums)):
        b_x = stored_sum(fragment, I, sums[I], C)
        b_y = ()
        for PART in gl.static_range(products.parts(C)):
            b_y = b_y + (sums[I][PART] + b_x[PART],)
        totals = totals + (b_y,)
    return totals, added


@gluon.jit
def joined(fragment, sums, row_values, C: gl.constexpr):
    """(o,), (l, m) or (o, ȯ), (l, m, μ) and those of a fragment that was handed over.  One sum of that after the other, as
    registers do not hold both."""
    rows = stored_row_values(fragment, sums, row_values, C)
    l_0, l_1 = row_values[0], rows[0]
    m_0, m_1 = row_values[1], rows[1]
    b_m = gl.maximum(m_0, m_1)
    a_0 = gl.exp2(gl.where(m_0 == b_m, 0.0, m_0 - b_m))
    a_1 = gl.exp2(gl.where(m_1 == b_m, 0.0, m_1 - b_m))
    b_l = l_0 * a_0 + l_1 * a_1
    if len(sums) == 1:
        b_o = products.increased(products.scaled(sums[0], a_0), a_1, stored_sum(fragment, 0, sums[0], C))
        return (b_o,), (b_l, b_m)
    else:
        between = rows[2] - row_values[2]
        step = l_1 * a_1 / gl.where(b_l == 0.0, 1.0, b_l) * between  # of μ
        b_to = products.scaled(products.increased(sums[1], -step, sums[0]), a_0)
        b_x = stored_sum(fragment, 0, sums[0], C)
        b_o = products.increased(products.scaled(sums[0], a_0), a_1, b_x)
        b_to = products.increased(b_to, a_1 * (between - step), b_x)
        b_to = products.increased(b_to, a_1, stored_sum(fragment, 1, sums[1], C))
        return (b_o, b_to), (b_l, b_m, row_values[2] + step)


@gluon.jit
def finish(EXCHANGE, work, w: gl.constexpr, sums, row_values, ADDED: gl.constexpr, options):
    """With what others have handed over, or will have, but not what this fragment has begun with; ADDED, or else of a softmax."""
    C: gl.constexpr = products.widest(options.C, options.SPLIT)
    for program in range(work.since + work.resumed, work.until):
        fragment = fragment_at(EXCHANGE, program, w, options.GROUPS, sums, row_values, C)
        flags(fragment, sums, row_values, C, AWAIT)
        if ADDED:
            sums, row_values = plus(fragment, sums, row_values, C)
        else:
            sums, row_values = joined(fragment, sums, row_values, C)
    return sums, row_values
