"""The warps of a program, and the loop of each over the blocks that the program computes: once, for every kernel.

A kernel brings a `consume` for its warpgroups, a `produce` for the warp that loads, and maybe an `add` for the one that adds dQ
up.  Those that compute several blocks a program bring what one block takes, `compute_block` and `load_block`, and leave the loop
to `consume_blocks` and `produce_blocks`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jax_flash_jvp.kernels.hopper.blocks import tiles_in_all
from jax_flash_jvp.kernels.hopper.programs import first_block, items, next_block, received_block
from jax_flash_jvp.kernels.hopper.ring import Cursor, advance


@gluon.jit
def consumer(w: gl.constexpr, consume: gl.constexpr, memory, call, options):
    consume(w, memory, call, options)


@gluon.jit
def helper(work: gl.constexpr, arrays, memory, call, options):
    work(arrays, memory, call, options)


@gluon.jit
def run(consume: gl.constexpr, produce: gl.constexpr, arrays, memory, call, options):
    """Two or three warpgroups that multiply, and a warp that loads."""
    if options.GROUPS == 2:
        gl.warp_specialize([
            (consumer, (0, consume, memory, call, options)),
            (consumer, (1, consume, memory, call, options)),
            (helper, (produce, arrays, memory, call, options)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (0, consume, memory, call, options)),
            (consumer, (1, consume, memory, call, options)),
            (consumer, (2, consume, memory, call, options)),
            (helper, (produce, arrays, memory, call, options)),
        ], [4, 4, 1], [160, 160, 24])  # fmt: skip


@gluon.jit
def run_adding(consume: gl.constexpr, first: gl.constexpr, second: gl.constexpr, arrays, memory, call, options):
    """Two or three warpgroups that multiply, and two warps, of which one loads and one adds."""
    if options.GROUPS == 2:
        gl.warp_specialize([
            (consumer, (0, consume, memory, call, options)),
            (consumer, (1, consume, memory, call, options)),
            (helper, (first, arrays, memory, call, options)),
            (helper, (second, arrays, memory, call, options)),
        ], [4, 1, 1], [240, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (0, consume, memory, call, options)),
            (consumer, (1, consume, memory, call, options)),
            (consumer, (2, consume, memory, call, options)),
            (helper, (first, arrays, memory, call, options)),
            (helper, (second, arrays, memory, call, options)),
        ], [4, 4, 1, 1], [160, 160, 24, 24])  # fmt: skip


@gluon.jit
def consume_blocks(w: gl.constexpr, compute_block: gl.constexpr, start, memory, call, options):
    """A warpgroup's.  `start`: what one block hands to the next, cursors of rings for instance."""
    state = start
    resident_at = Cursor(0, 0)
    if options.FEATURES.dynamic:
        i = gl.program_id(0)
        i_at = Cursor(0, 0)
        while i < call.ints.n:
            state = compute_block(i, w, state, resident_at, memory, call, options)
            resident_at = advance(resident_at, options.BUFFERS)
            i, i_at = received_block(memory.queue, i_at)
    elif options.FEATURES.persistent:
        first, end = items(call.ints, tiles_in_all(call.ints, options), options.FEATURES)
        for i in range(first, end, call.ints.concurrent):
            state = compute_block(i, w, state, resident_at, memory, call, options)
            resident_at = advance(resident_at, options.BUFFERS)
    else:
        compute_block(gl.program_id(0), w, state, resident_at, memory, call, options)


@gluon.jit
def produce_blocks(load_block: gl.constexpr, start, COUNTER, arrays, memory, call, options):
    """That of the warp that loads, which takes the numbers of blocks from the counter, if there is one."""
    state = start
    resident_at = Cursor(0, 1)
    if options.FEATURES.dynamic:
        i = first_block(COUNTER, call.ints)
        i_at = Cursor(0, 1)
        while i < call.ints.n:
            state = load_block(i, state, resident_at, arrays, memory, call, options)
            resident_at = advance(resident_at, options.BUFFERS)
            i, i_at = next_block(COUNTER, memory.queue, i_at, call.ints)
    elif options.FEATURES.persistent:
        first, end = items(call.ints, tiles_in_all(call.ints, options), options.FEATURES)
        for i in range(first, end, call.ints.concurrent):
            state = load_block(i, state, resident_at, arrays, memory, call, options)
            resident_at = advance(resident_at, options.BUFFERS)
    else:
        load_block(gl.program_id(0), state, resident_at, arrays, memory, call, options)
