"""How the Hopper kernels are set up, and when they are faster: rings and limits, each with the GPU, the date and the lengths L at
which it was measured.

Widths are those of heads, up to so many channels.  Heads of 65 to 96 channels were measured at 72, mostly at L = 256 too.
"""

import functools
from typing import NamedTuple

from jax_flash_jvp.kernels.hopper.products import GROUP_ROWS

GROUP = GROUP_ROWS.value  # resident rows of a consumer warpgroup
WIDTHS = (32, 64, 96, 128, 192, 256)
WARPS = 4  # of the first warpgroup


class Registers(NamedTuple):
    """What a thread gets of the 65,536 registers of a program."""

    launched: int  # every thread, as the program begins; then its warps divide them anew
    consumer: int  # of a warpgroup that multiplies
    helper: int  # of a warp that loads, or adds dQ up


REGISTERS = {  # by consumer warpgroups
    2: Registers(launched=168, consumer=240, helper=24),
    3: Registers(launched=128, consumer=160, helper=24),
}


def width_of(head_dim: int) -> int:
    return next(width for width in WIDTHS if width >= head_dim)


# ------------------------------------------------------------------------------------------------ rings


class Ring(NamedTuple):
    """How a kernel streams."""

    tile: int  # streamed rows
    slots: int  # tiles in flight
    turns: bool  # do warpgroups issue their products in turn?
    groups: int = 2  # consumer warpgroups
    deferred: bool = False  # the backward's last product of a tile is issued with the next tile's scores
    late_dp: bool = False  # and its dP behind the softmax, not with the scores
    split: bool = False  # all warpgroups have the same resident rows, each a part of the columns of their sums
    # slots in short loops where blocks differ, of tiles and blocks of which less is computed in vain; 0: the same ring
    short: int = 0
    two: tuple[int, int] | None = None  # another tile, and so many slots, for two warpgroups in the place of three
    counted: bool = True  # may programs take blocks from a counter?

    @property
    def height(self) -> int:
        """Resident rows of a block, in those of a warpgroup."""
        return 1 if self.split else self.groups

    @property
    def in_short_loops(self) -> "Ring":
        return Ring(tile=64, slots=self.short, turns=True) if self.short else self

    @property
    def pair(self) -> "Ring":
        """That of two warpgroups, in the place of three."""
        tile, slots = self.two or (self.tile, self.slots)
        return self._replace(tile=tile, slots=slots, groups=2, counted=True)


Split = functools.partial(Ring, split=True)

FORWARD = {
    32: Ring(tile=128, slots=8, turns=True, groups=3, short=16),  # H200, 2026-11-23, L = 8192
    64: Ring(tile=128, slots=6, turns=True, groups=3, short=12, counted=False),  # H200, 2026-11-22, L = 8192
    96: Ring(tile=128, slots=6, turns=True, short=12),  # H100, 2026-11-24, L = 256 and 8192
    128: Ring(tile=128, slots=4, turns=True, short=8),  # H200, 2026-11-22, L = 8192
    192: Ring(tile=64, slots=4, turns=False),  # H100, 2026-11-26, L = 1024 and 8192
    256: Ring(tile=64, slots=4, turns=False),  # likewise
}
FORWARD_DUAL = {
    32: Ring(tile=128, slots=8, turns=False),  # H200, 2026-11-23, L = 8192
    64: Ring(tile=128, slots=8, turns=True, short=16),  # H200, 2026-11-22, L = 8192
    96: Ring(tile=64, slots=8, turns=True),  # H100, 2026-11-24, L = 256 and 8192
    128: Ring(tile=64, slots=8, turns=True),  # H200, 2026-11-22, L = 8192
    # H100, 2026-11-26, L = 1024 and 8192: 0.25 to 0.31 of the portable kernels' time at 256 channels
    192: Split(tile=32, slots=14, turns=True),
    256: Split(tile=32, slots=10, turns=True),  # likewise; without turns 1.03 to 1.07 of the time
}

# The backward's by width and by what is wanted: gradients alone ("plain"), these and their tangents ("dual"), tangents
# alone ("tangent").  All four sums of the key side together do not fit the registers above 64 channels, nor two above
# 128: then a launch for those of the values, another for those of the keys.
KEY_SIDE = {
    (32, "plain"): Ring(tile=64, slots=8, turns=True, groups=3, short=8),  # H200, 2026-11-23, L = 8192
    (32, "dual"): Ring(tile=32, slots=16, turns=False, groups=3),  # likewise
    (32, "tangent"): Ring(tile=64, slots=16, turns=False),  # not measured
    # H100, 2026-11-25, L = 256 to 16,384: 0.92 of the time at 2048 and 8192, 0.97 at 256, with both deferred and late dP
    (64, "plain"): Ring(tile=64, slots=8, turns=True, groups=3, deferred=True, late_dp=True, short=8),
    # H100, 2026-11-27, L = 512 to 2048: 0.98 to 0.99 of the dual backward's time by being deferred, with turns
    (64, "dual"): Ring(tile=32, slots=16, turns=True, deferred=True),
    (64, "tangent"): Ring(tile=64, slots=8, turns=False),  # H200, 2026-11-22, L = 8192
    # H100, 2026-11-25, L = 256 to 16,384: 0.84 to 0.87 of the time at 72 channels and 0.91 to 0.94 at 128 by being deferred
    (96, "plain"): Ring(tile=64, slots=6, turns=True, deferred=True),
    (128, "plain"): Ring(tile=64, slots=6, turns=True, deferred=True),
    (96, "tangent"): Ring(tile=32, slots=12, turns=True),  # H200, 2026-11-22, L = 8192
    # H100, 2026-11-25, L = 256 to 16,384: 0.91 to 0.93 of the time; with a counter not measured, as the keys' of "dual"
    (128, "tangent"): Ring(tile=32, slots=12, turns=True, deferred=True, counted=False),
}
VALUES = {
    (96, "dual"): Ring(tile=64, slots=12, turns=False),  # H200, 2026-11-22, L = 8192
    (128, "dual"): Ring(tile=64, slots=8, turns=True),  # likewise
    (192, "plain"): Ring(tile=64, slots=4, turns=False),  # H100, 2026-11-26, L = 1024 and 8192
    (256, "plain"): Ring(tile=64, slots=4, turns=False),  # likewise
    # likewise: 0.2 to 0.24 of the portable kernels' time at 256 channels
    (192, "dual"): Split(tile=32, slots=14, turns=True),
    (256, "dual"): Split(tile=32, slots=10, turns=False),  # likewise; with turns 1.04 to 1.21 of the time
    (192, "tangent"): Split(tile=32, slots=14, turns=True),  # not measured: as "dual"
    (256, "tangent"): Split(tile=32, slots=10, turns=False),  # likewise
}
KEYS = {
    (96, "dual"): Ring(tile=32, slots=12, turns=False),  # H200, 2026-11-22, L = 8192
    # H100, 2026-11-25, L = 256 to 16,384: 0.94 to 0.98 of the time by being deferred, 0.99 at 256
    (128, "dual"): Ring(tile=32, slots=12, turns=True, deferred=True, counted=False),
    (192, "plain"): Ring(tile=64, slots=4, turns=False),  # H100, 2026-11-26, L = 1024 and 8192
    (256, "plain"): Ring(tile=64, slots=3, turns=False),  # likewise; six slots of 32 rows take 1.0 to 1.05 of the time
    (192, "dual"): Split(tile=32, slots=10, turns=False),  # likewise; with turns 0.9 to 1.05 of the time
    (256, "dual"): Split(tile=32, slots=6, turns=False),  # likewise; with turns 1.04 to 1.21 of the time
    (192, "tangent"): Split(tile=32, slots=10, turns=False),  # not measured: as "dual"
    (256, "tangent"): Split(tile=32, slots=6, turns=False),  # likewise
}
QUERY_SIDE = {
    # H200, 2026-11-23, L = 8192; deferred: not timed
    (32, "plain"): Ring(tile=64, slots=12, turns=True, groups=3, deferred=True, short=12),
    (32, "dual"): Ring(tile=64, slots=16, turns=False),  # likewise
    (32, "tangent"): Ring(tile=64, slots=16, turns=False),  # not measured
    # H100, 2026-11-27, L = 256 to 2048: 0.99 to 1.01 of the backward's time by being deferred, at 2048 0.99
    (64, "plain"): Ring(tile=64, slots=12, turns=True, groups=3, deferred=True, short=12),
    (64, "dual"): Ring(tile=64, slots=12, turns=False),  # H200, 2026-11-22, L = 8192
    (64, "tangent"): Ring(tile=64, slots=10, turns=False),  # likewise
    (96, "plain"): Ring(tile=128, slots=6, turns=True, short=12),  # H100, 2026-11-24, L = 256 and 8192
    (96, "dual"): Ring(tile=32, slots=12, turns=False),  # H200, 2026-11-22, L = 8192
    (96, "tangent"): Ring(tile=64, slots=8, turns=False),  # H100, 2026-11-24, L = 256 and 8192
    (128, "plain"): Ring(tile=64, slots=6, turns=True, groups=3, short=8, two=(128, 4)),  # H200, 2026-11-24, L = 8192
    (128, "dual"): Ring(tile=32, slots=8, turns=True),  # H200, 2026-11-22, L = 8192
    (128, "tangent"): Ring(tile=64, slots=6, turns=False),  # likewise
    (192, "plain"): Ring(tile=64, slots=4, turns=False),  # H100, 2026-11-26, L = 1024 and 8192
    # likewise; six slots of 32 rows take 1.03 of the time at 8192, causal 1.06
    (256, "plain"): Ring(tile=64, slots=3, turns=False),
    (192, "dual"): Split(tile=32, slots=10, turns=True),  # likewise
    (256, "dual"): Split(tile=32, slots=6, turns=False),  # likewise; with turns 1.04 to 1.21 of the time
    (192, "tangent"): Split(tile=32, slots=10, turns=True),  # not measured: as "dual"
    (256, "tangent"): Split(tile=32, slots=6, turns=False),  # likewise
}


class OnePass(NamedTuple):
    """How a backward in one pass streams: 64 queries at a time, or, with tangents, 32."""

    groups: int  # consumer warpgroups
    lag: int  # tiles that dq is behind
    kept: int  # tiles of dS, a power of two above the lag
    turns: bool = False
    deferred: bool = False
    late_dp: bool = False
    slots: int = 2  # of q and of d_o, a power of two
    held: bool = False  # do warpgroups multiply keys and values from registers?
    time: float = 1  # of a row of keys, relative to the other ring


# By width, of which the one that fills rounds better is taken.
ONE_PASS = {
    64: (  # H200, 2026-11-29, L = 512 to 16,384: 0.73 to 1.33 of each other's time, where 0.69 to 1.39 is expected
        OnePass(groups=2, lag=1, kept=2, deferred=True, slots=4, held=True, time=1.04),
        OnePass(groups=3, lag=1, kept=2, late_dp=True),
    ),
    96: (OnePass(groups=2, lag=2, kept=4, late_dp=True),),  # H200, 2026-11-27, L = 8192; no other way was timed
    128: (OnePass(groups=2, lag=1, kept=2, turns=True, late_dp=True),),  # likewise; without turns 0.98, causal 1.01
}


class OnePassThreshold(NamedTuple):
    """For one pass to be faster than the two sides."""

    rows: int  # keys, that are seen by so many queries
    filled: float  # of the multiprocessors, by rounds of blocks


# By width, of which any will do.  H200, 2026-11-27, L = 256 to 16,384; what is to be filled: 2026-11-28, L = 2048 to 8192; of 64
# channels 2026-11-29, L = 512 to 16,384.
ONE_PASS_FROM = {
    64: (OnePassThreshold(rows=1024, filled=0.9), OnePassThreshold(rows=2048, filled=0.82)),
    96: (OnePassThreshold(rows=4096, filled=0.9),),
    128: (OnePassThreshold(rows=2048, filled=0.9),),
}
# Order, by which the bits of dq are the same on every run, is kept where it takes at most so much of the time, and blocks are
# alike or heads have at most so many channels.  H200, 2026-11-27, L = 1024 to 8192: 0 to 4% where 1 to 4% are expected,
# causal heads of 72 and 128 channels 6 to 9%; blocks of 128 rows of 64 channels, 2026-11-29: 3 to 8%, causal 11 to 18%.
ORDER_MAY_COST = 0.05
ORDERED_UNLIKE_UP_TO = 64


# Of 32 queries at a time, each with its tangent, for two consumer warpgroups, of which more have no room for four sums.
ONE_PASS_DUAL = {64: (OnePass(groups=2, lag=1, kept=4, slots=4),)}  # H200, 2026-11-27, L = 8192
# As ONE_PASS_FROM.  H200, 2026-11-27, L = 256 to 8192.
ONE_PASS_DUAL_FROM = {64: (OnePassThreshold(rows=2048, filled=0.9),)}

# What rows say beyond the ring of long loops: `short`, where blocks differ and a row sees at most SHORT others, or those of its
# segment: H100, 2026-11-26, L = 256 to 8192.  `two`, where blocks are not alike, too: H200, 2026-11-23, L = 8192.  Not `counted`:
# H100, 2026-11-26: 1.0 to 1.1 of the time with a counter, with windows up to 1.25.
SHORT = 512

# ------------------------------------------------------------------------------------------------ limits of schedules

# How much longer two warpgroups take for the same rows, where three are in the table.  H200, 2026-11-22.
PAIR_FOR_THREE = 1.15
# Keys up to which the forward takes two even so, by whether blocks are alike.  H100, 2026-11-26; H200, 2026-11-29: 0.83 of the
# time at 1178, 1.07 at 2048.
PAIR_UP_TO = {True: 1280, False: 3072}
# Streamed rows up to which a program computes one block after the other, and loads for the next while one ends.  Beyond, where
# that matters less, blocks go to whichever multiprocessor is free.  H200, 2026-11-23.
PERSISTENT = {"forward": 8192, "backward": 4096}
# Streamed rows up to which a program has loaded the next block's resident rows as well, if there is room.  H100,
# 2026-11-25: 0.85 of the time of the plain forward at 64 channels and L = 256.
AHEAD = 1024
# Streamed rows up to which, or in windows of up to so many, there is one loop, with masks: the instructions of a second,
# for tiles that need none, would take longer to come than masks do.  H100, 2026-11-26.
ONE_LOOP = 1024
# Keys up to which the query side of the dual backward makes the row statistics, as that of the plain one always does.  H100,
# 2026-11-25: 0.94 to 1.0 of the time, at 8192 0.99 to 1.03.
STATISTICS_DUAL = 1024
# In loops over fewer than DRIFT_BELOW rows, where rows end within a sector of memory, of so many channels, programs that
# read the same rows drift apart until the rows have left the L2 cache: where two arrays are written, so that a program
# has ROUNDS blocks to twice as many, or where resident rows are loaded ahead.  H100, 2026-11-24: 0.71 to 0.98 of the time
# at 72 channels and L = 256.
DRIFT_BELOW, SECTOR, ROUNDS = 512, 16, 8
# Blocks that would leave multiprocessors without one at the end are shared, where that saves more than it costs: as long
# as it takes to stream so many rows, for each fragment of a block but one.  H100, 2026-11-26, L = 512 to 16,384: 0.62 to 0.99
# of the time.
FRAGMENT = {"forward": 256, "backward": 160}

# ------------------------------------------------------------------------------------------------ when they are faster

# The shortest sequences, by width and job, for which these kernels are faster than the portable ones.  H200 and H100,
# 2026-11-26; of 64 queries and keys, H200, 2026-11-29; where these differ in number, H200, 2026-11-28 and 29 (T64 S4096 with 64
# and 256 heads, T4096 S77, T1024 S120).
FROM: dict[int, dict[str, int]] = {
    32: dict(forward=1024, forward_dual=512, backward=1024, backward_dual=512),
    64: dict(forward=512, forward_dual=128, backward=1024, backward_dual=512),
    96: dict(forward=512, forward_dual=128, backward=512, backward_dual=128),
    128: dict(forward=512, forward_dual=128, backward=512, backward_dual=128),
    192: dict(forward=128, forward_dual=128, backward=128, backward_dual=128),
    256: dict(forward=128, forward_dual=128, backward=256, backward_dual=128),
}
# Those where every multiprocessor has a block.
FROM_IF_MANY: dict[int, dict[str, int]] = {
    32: dict(forward=128, forward_dual=128, backward=128, backward_dual=64),
    64: dict(forward=128, forward_dual=128, backward=128, backward_dual=64),
    96: dict(forward=64, forward_dual=64, backward=128, backward_dual=64),
    128: dict(forward=64, forward_dual=64, backward=64, backward_dual=64),
    192: dict(forward=64, forward_dual=64, backward=64, backward_dual=64),
    256: dict(forward=64, forward_dual=64, backward=64, backward_dual=64),
}
# With so few queries that only blocks of keys fill the GPU, √(queries × keys) from which the backward is faster, by width.  H200,
# 2026-11-28 and 29: of T64 S4096 with 64 heads 0.83 of the time.
FROM_IF_KEYS_ARE_MANY = {64: 512}
