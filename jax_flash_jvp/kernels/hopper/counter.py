"""Where blocks take different times, a program computes the one of its own number first, then whichever is next.

The producer takes the next number from a counter in memory when it has loaded all that its block needs, so that the number
comes no earlier than the multiprocessor is about to be free, and no later than the warpgroups are, to whom it is sent on.  The
first program begins the counter, which may hold anything before, and whoever takes the last number ends it.
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from jax_flash_jvp.kernels.hopper.pipeline import AGAIN, advance, barriers, give_back, wait

# shared: numbers of blocks, on their way from the producer to the warpgroups
Queue = namedtuple("Queue", "numbers full empty")
QUEUED = gl.constexpr(2)
# PTX of one warp: the counter begins with a number; its next number is taken, and if that is the last one, it ends.  The flag in
# front of it has 64 bits that memory never holds by chance.
BEGIN = gl.constexpr("""{
.reg .pred first;
.reg .b32 lane;
.reg .b64 flag;
mov.u32 lane, %laneid;
setp.eq.u32 first, lane, 0;
mov.b64 flag, 0xC2B2AE3D27D4EB4F;
@first st.relaxed.gpu.global.b32 [$1+8], $2;
@first st.release.gpu.global.b64 [$1], flag;
mov.b32 $0, 0;
}""")
TAKE = gl.constexpr(f"""{{
.reg .pred first, absent;
.reg .b32 lane, number;
.reg .b64 flag, seen;
mov.b64 flag, 0xC2B2AE3D27D4EB4F;
{AGAIN}
mov.u32 lane, %laneid;
setp.eq.u32 first, lane, 0;
mov.b32 number, 0;
@first atom.relaxed.gpu.global.add.u32 number, [$1+8], 1;
shfl.sync.idx.b32 number, number, 0, 31, -1;
setp.eq.and.u32 first, number, $2, first;
mov.b64 seen, 0;
@first st.relaxed.gpu.global.b64 [$1], seen;
mov.b32 $0, number;
}}""")


@gluon.jit
def queue(GROUPS: gl.constexpr):
    numbers = gl.allocate_shared_memory(gl.int32, [QUEUED, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Queue(numbers, barriers(QUEUED, 1), barriers(QUEUED, GROUPS))


@gluon.jit
def counted(COUNTER, number, TEXT: gl.constexpr):
    zero = gl.zeros([32], gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    return gl.inline_asm_elementwise(TEXT, "=r,l,r", [(COUNTER + zero).to(gl.int64), zero + number], gl.int32, False, 1)


@gluon.jit
def begun(COUNTER, call):
    """This program's own number; the first program begins the counter."""
    if gl.program_id(0) == 0:
        counted(COUNTER, call.at_once, BEGIN)
    return gl.program_id(0)


@gluon.jit
def taken(COUNTER, queue, at, call):
    """The producer's next number, which it sends to the warpgroups: n or more at the end, one for each program."""
    number = counted(COUNTER, call.n + call.at_once - 1, TAKE)
    wait(queue.empty, at)
    queue.numbers.index(at.slot).store(number)
    mbarrier.arrive(queue.full.index(at.slot), count=1)
    return gl.max(number, 0), advance(at, QUEUED)


@gluon.jit
def received(queue, at):
    """That of a warpgroup."""
    wait(queue.full, at)
    number = queue.numbers.index(at.slot).load(gl.BlockedLayout([1], [32], [4], [0]))
    give_back(queue.empty, at)
    return gl.max(number, 0), advance(at, QUEUED)
