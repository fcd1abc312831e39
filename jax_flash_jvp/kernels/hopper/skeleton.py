"""The warps of a program, and the loop of each over the blocks that the program computes: once, for every kernel.

A kernel brings a `consume` for its warpgroups, a `produce` for the warp that loads, and maybe an `add` for the one that adds dQ
up.  Those that compute several blocks a program bring what one block takes, `compute_block` and `load_block`, and leave the loop
to `consume_blocks` and `produce_blocks`.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jax_flash_jvp.kernels.hopper import config
from jax_flash_jvp.kernels.hopper.blocks import tiles_in_all
from jax_flash_jvp.kernels.hopper.programs import first_block, items, next_block, received_block
from jax_flash_jvp.kernels.hopper.ring import Cursor, advance

REGISTERS = gl.constexpr(config.REGISTERS)  # a constant, so that Triton compiles anew where it changes


@triton.constexpr_function
def warps(groups, helpers):
    """Of each consumer warpgroup but the first, and of each helper."""
    return [4] * (groups - 1) + [1] * helpers


@triton.constexpr_function
def registers(groups, helpers):
    """Of a thread of these."""
    return [REGISTERS[groups].consumer] * (groups - 1) + [REGISTERS[groups].helper] * helpers


@gluon.jit
def work(function: gl.constexpr, own, memory, call, options):
    """What `warp_specialize` calls, as it takes no function that is a parameter."""
    function(own, memory, call, options)


@gluon.jit
def run(consume: gl.constexpr, first: gl.constexpr, second: gl.constexpr, arrays, memory, call, options):
    """Two or three warpgroups that multiply, and a warp for each of two functions, or for the `first` alone."""
    HELPERS: gl.constexpr = 1 if second is None else 2
    if options.GROUPS == 2:
        gl.warp_specialize([
            (work, (consume, 0, memory, call, options)),
            (work, (consume, 1, memory, call, options)),
            (work, (first, arrays, memory, call, options)),
            (work, (second, arrays, memory, call, options)),
        ][: 2 + HELPERS], warps(2, HELPERS), registers(2, HELPERS))  # fmt: skip
    else:
        gl.warp_specialize([
            (work, (consume, 0, memory, call, options)),
            (work, (consume, 1, memory, call, options)),
            (work, (consume, 2, memory, call, options)),
            (work, (first, arrays, memory, call, options)),
            (work, (second, arrays, memory, call, options)),
        ][: 3 + HELPERS], warps(3, HELPERS), registers(3, HELPERS))  # fmt: skip


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
