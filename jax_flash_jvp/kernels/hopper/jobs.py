"""The jobs of attention as launches of the Hopper kernels: the same functions as in `portable/jobs.py`, for what they serve."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import triton

from jax_flash_jvp.kernels.hopper import backward as backward_kernels
from jax_flash_jvp.kernels.hopper import forward as forward_kernels
from jax_flash_jvp.kernels.hopper.handover import part_size
from jax_flash_jvp.kernels.hopper.products import GROUP_ROWS, column_widths
from jax_flash_jvp.kernels.hopper.work import DIVISIBLE, TOGETHER, reciprocal
from jax_flash_jvp.kernels.launcher import Launch, Launcher, Output, Rows
from jax_flash_jvp.kernels.portable import jobs as portable
from jax_flash_jvp.kernels.portable.jobs import NO_TANGENT, RowStatistics
from jax_flash_jvp.kernels.portable.tiles import Tile
from jax_flash_jvp.problem import Operands, Problem, dtype_of

GROUP = GROUP_ROWS.value
WIDTHS = (32, 64, 96, 128, 192, 256)  # up to so many channels
WARPS = 4  # of the first warpgroup; the kernels themselves redistribute registers among all of them
REGISTERS = {2: 168, 3: 128}
PAIR_FOR_THREE = 1.15  # how much longer two warpgroups take for the same rows, where three are in the table
PAIR_UP_TO = {True: 1024, False: 3072}  # keys up to which the forward takes two even so, where blocks are alike or not
# Streamed rows up to which a program computes one block after the other, and loads for the next while one ends.  Beyond, where
# that matters less, blocks go to whichever multiprocessor is free.
PERSISTENT = {"forward": 8192, "backward": 4096}
AHEAD = 1024  # up to which it has loaded the next block's resident rows as well, if there is room
# Up to which, or in windows of up to so many, there is one loop, with masks: the instructions of a second, for tiles that need
# none, would take longer to come than masks do.
ONE_LOOP = 1024
# Up to which the query side of the dual backward makes the row statistics, as that of the plain one always does.
STATISTICS_DUAL = 1024
# In shorter loops, where rows end within a sector of memory, programs that read the same rows drift apart, and these have left
# the L2 cache when the last one comes for them: where two arrays are written, so that a program has ROUNDS blocks to twice as
# many, or where resident rows are loaded ahead.
DRIFT_BELOW, SECTOR, ROUNDS = 512, 16, 8
# Blocks that would leave multiprocessors without one at the end are shared, where that saves more than it costs: as long as it
# takes to stream so many rows, for each part of a block but one.
PART = {"forward": 256, "backward": 160}


class Ring(NamedTuple):
    """How a kernel streams: rows of a tile, tiles in flight, warpgroups in turn."""

    tile: int
    slots: int
    turns: bool
    groups: int = 2  # consumer warpgroups
    deferred: bool = False  # the backward's last product of a tile is issued with the next tile's scores
    late: bool = False  # and its dP behind the softmax, not with the scores
    split: bool = False  # all warpgroups have the same resident rows, each a part of the columns of their sums

    @property
    def height(self) -> int:
        """Resident rows of a block, in those of a warpgroup."""
        return 1 if self.split else self.groups


Split = functools.partial(Ring, split=True)

# measured on an H200 at L = 8192, but 96 at 72, mostly on an H100 and at L = 256 too, the tangents alone at 32, and what is
# deferred on an H100 at L = 256 to 16,384, 192 and 256 on an H100 at L = 1024 and 8192, but the tangents alone; what is for short
# loops on an H100 at L = 256 to 8192; keys are the width and, for the backward, what is wanted
FORWARD = {
    32: Ring(128, 8, True, 3), 64: Ring(128, 6, True, 3), 96: Ring(128, 6, True), 128: Ring(128, 4, True),
    192: Ring(64, 4, False), 256: Ring(64, 4, False),
}  # fmt: skip
FORWARD_DUAL = {
    32: Ring(128, 8, False), 64: Ring(128, 8, True), 96: Ring(64, 8, True), 128: Ring(64, 8, True),
    192: Split(32, 14, True), 256: Split(32, 10, True),
}  # fmt: skip
# Of gradients alone ("plain"), of them and their tangents ("dual"), of the tangents alone ("tangent").  All four sums of the
# key side together do not fit the registers above 64, nor two above 128: then a launch for those of the values, another for those
# of the keys.
KEY_SIDE = {
    (32, "plain"): Ring(64, 8, True, 3), (32, "dual"): Ring(32, 16, False, 3), (32, "tangent"): Ring(64, 16, False),
    (64, "plain"): Ring(64, 8, True, 3, deferred=True, late=True),
    (96, "plain"): Ring(64, 6, True, deferred=True), (128, "plain"): Ring(64, 6, True, deferred=True),
    (64, "dual"): Ring(32, 16, False), (64, "tangent"): Ring(64, 8, False), (96, "tangent"): Ring(32, 12, True),
    (128, "tangent"): Ring(32, 12, True, deferred=True),
}  # fmt: skip
# with two warpgroups another tile, and so where blocks are not alike
WITH_TWO = {Ring(64, 6, True, 3): Ring(128, 4, True)}
VALUES = {
    (96, "dual"): Ring(64, 12, False), (128, "dual"): Ring(64, 8, True),
    (192, "plain"): Ring(64, 4, False), (256, "plain"): Ring(64, 4, False),
    (192, "dual"): Split(32, 14, True), (256, "dual"): Split(32, 10, False),
    (192, "tangent"): Split(32, 14, True), (256, "tangent"): Split(32, 10, False),
}  # fmt: skip
KEYS = {
    (96, "dual"): Ring(32, 12, False), (128, "dual"): Ring(32, 12, True, deferred=True),
    (192, "plain"): Ring(64, 4, False), (256, "plain"): Ring(64, 3, False),
    (192, "dual"): Split(32, 10, False), (256, "dual"): Split(32, 6, False),
    (192, "tangent"): Split(32, 10, False), (256, "tangent"): Split(32, 6, False),
}  # fmt: skip
QUERY_SIDE = {
    (32, "plain"): Ring(64, 12, True, 3), (32, "dual"): Ring(64, 16, False), (32, "tangent"): Ring(64, 16, False),
    (64, "plain"): Ring(64, 12, True, 3), (96, "plain"): Ring(128, 6, True), (128, "plain"): Ring(64, 6, True, 3),
    (64, "dual"): Ring(64, 12, False), (96, "dual"): Ring(32, 12, False), (128, "dual"): Ring(32, 8, True),
    (64, "tangent"): Ring(64, 10, False), (96, "tangent"): Ring(64, 8, False), (128, "tangent"): Ring(64, 6, False),
    (192, "plain"): Ring(64, 4, False), (256, "plain"): Ring(64, 3, False),
    (192, "dual"): Split(32, 10, True), (256, "dual"): Split(32, 6, False),
    (192, "tangent"): Split(32, 10, True), (256, "tangent"): Split(32, 6, False),
}  # fmt: skip
STATIC = {FORWARD[64], KEYS[128, "dual"]}  # with which programs take no blocks from a counter
LONG = 1024  # rows; in loops over more, other rings
IN_LONG_LOOPS = {
    Ring(64, 12, True, 3): Ring(64, 12, True, 3, deferred=True), Ring(32, 16, False): Ring(32, 16, True, deferred=True),
}  # fmt: skip
# Where blocks differ and a row sees at most so many others, or those of its segment: smaller tiles and blocks, of which less is
# computed in vain.
SHORT = 512
IN_SHORT_LOOPS = {
    Ring(128, 8, True, 3): Ring(64, 16, True), Ring(128, 6, True, 3): Ring(64, 12, True), Ring(128, 6, True): Ring(64, 12, True),
    Ring(128, 4, True): Ring(64, 8, True), Ring(128, 8, True): Ring(64, 16, True), Ring(64, 6, True, 3): Ring(64, 8, True),
    Ring(64, 12, True, 3): Ring(64, 12, True), Ring(64, 8, True, 3): Ring(64, 8, True),
    Ring(64, 8, True, 3, deferred=True, late=True): Ring(64, 8, True),
}  # fmt: skip

# The shortest sequences, by width and job, for which these kernels are faster; and those where every multiprocessor has a block.
FROM: dict[int, dict[str, int]] = {
    32: dict(forward=1024, forward_dual=512, backward=1024, backward_dual=512),
    64: dict(forward=512, forward_dual=128, backward=1024, backward_dual=512),
    96: dict(forward=512, forward_dual=128, backward=512, backward_dual=128),
    128: dict(forward=512, forward_dual=128, backward=512, backward_dual=128),
    192: dict(forward=128, forward_dual=128, backward=128, backward_dual=128),
    256: dict(forward=128, forward_dual=128, backward=256, backward_dual=128),
}
FROM_IF_MANY: dict[int, dict[str, int]] = {
    32: dict(forward=128, forward_dual=64, backward=128, backward_dual=128),
    64: dict(forward=128, forward_dual=64, backward=128, backward_dual=64),
    96: dict(forward=64, forward_dual=64, backward=128, backward_dual=64),
    128: dict(forward=64, forward_dual=64, backward=64, backward_dual=64),
    192: dict(forward=64, forward_dual=64, backward=64, backward_dual=64),
    256: dict(forward=64, forward_dual=64, backward=64, backward_dual=64),
}


SERVED = Operands._fields[:3] + ("mask", "query_lengths", "key_lengths", "query_segments", "key_segments")


def unserved(launcher: Launcher, problem: Problem, x: Operands) -> str | None:
    """What of this call, which the portable kernels serve, these do not, or None."""
    if launcher.target != 90:
        return "this GPU"
    if not launcher.descriptors:
        return "this launcher, which has no TMA descriptors"
    if dtype_of(x.query) not in ("float16", "bfloat16"):
        return f"{dtype_of(x.query)} arrays"
    for name, a in x._asdict().items():
        if a is not None and name not in SERVED:
            return f"`{name}`"
    if problem.soft_cap is not None:
        return "a soft cap"
    if x.value.shape[-1] != x.query.shape[-1]:
        return "a `value` whose channels differ from those of `query`"
    if problem.scale < 1e-30:  # its reciprocal is to be a float32 too
        return "a `scale` that is not positive, or next to nothing"
    rows = max(x.query.shape[1] * x.query.shape[2], x.key.shape[1] * x.key.shape[2]) * x.query.shape[0]
    if rows // GROUP + x.query.shape[0] * x.query.shape[2] >= DIVISIBLE:
        return "so many rows"
    if any(s % 8 for a in x[:3] for s in launcher.strides(a)[:-1]):
        return "strides that are not multiples of 16 bytes"
    return None


def faster(job: str, launcher: Launcher, problem: Problem, x: Operands) -> bool:
    """Than the portable kernels?  As measured on an H200, and on an H100."""
    (batch, queries, heads, head_dim), keys = x.query.shape, x.key.shape[1]
    width = _width(head_dim)
    many = batch * heads * triton.cdiv(queries, 2 * GROUP) >= (launcher.multiprocessors or math.inf)
    if job == "forward" and x.query_segments is not None and width <= 64:
        return False
    return min(queries, keys) >= (FROM_IF_MANY if many else FROM)[width][job]


def _width(head_dim: int) -> int:
    return next(width for width in WIDTHS if width >= head_dim)


class _Call:
    """What the launches of one call share."""

    def __init__(self, launcher: Launcher, problem: Problem, x: Operands, kernel, lists_counted: bool = True):
        self.launcher, self.problem, self.x, self.kernel = launcher, problem, x, kernel
        self.is_forward = kernel is forward_kernels.forward
        self.batch, self.query_length, self.query_heads, self.head_dim = x.query.shape
        self.key_length, self.key_heads = x.key.shape[1:3]
        self.width = _width(self.head_dim)
        self.portable = portable._Call(launcher, problem, x, word=32)
        f = self.portable.features
        self.alike = not (f.left or f.right or f.lengths or f.tiles.present)  # all blocks
        # are blocks taken from a counter?
        self.counted = not self.alike and (lists_counted or not f.tiles.present)
        sees_nothing = self.portable.reach["right"] < 0 or f.left or f.lengths or f.tiles.present
        self.features = dataclasses.replace(f, empty_rows=sees_nothing)
        self.scalars = dict(self.portable.sizes, **self.portable.reach)
        self.statistic, self.output = self.portable.statistic, self.portable.output
        self.key_gradient = self.portable.key_gradient

    def blocks(self, height: int, by_key: bool) -> int:
        length, heads = (self.key_length, self.key_heads) if by_key else (self.query_length, self.query_heads)
        return triton.cdiv(length, GROUP * height) * self.batch * heads

    def tiles(self, ring: Ring, by_key: bool) -> int:
        """That a block visits."""
        if by_key:
            return triton.cdiv(self.query_length, ring.tile) * (self.query_heads // self.key_heads)
        return triton.cdiv(self.key_length, ring.tile)

    def seen(self, by_key: bool) -> int:
        """Keys by a query, or queries that see a key, at most."""
        rows = self.query_length if by_key else self.key_length
        left, right = self.problem.reach(self.query_length, self.key_length)
        return rows if left is None or right is None else min(rows, left + right + 1)

    def rounds(self, ring: Ring, by_key: bool) -> tuple[float, int]:
        """(how long all blocks take, as multiples of one, how many tiles of the last of them a program has for that), 0 where
        they are not shared."""
        blocks, n_tiles = self.blocks(ring.height, by_key), self.tiles(ring, by_key)
        at_once = self.launcher.multiprocessors or 1
        whole, rest = divmod(blocks, at_once)
        least = triton.cdiv(rest * n_tiles, at_once)
        if self.alike and 0 < least < n_tiles and at_once * n_tiles < DIVISIBLE:
            others = lambda share: -(-n_tiles // share) - 1 + (n_tiles % share > 0)  # parts of a block but one, at most
            tiles = lambda share: share + PART[self.kernel.__name__] / ring.tile * others(share)
            even = (-(-n_tiles // n) for n in range(-(-n_tiles // least) - 1, 1, -1))  # with fewer parts
            share = min((least, *even), key=tiles)
            shared = whole + tiles(share) / n_tiles
            if shared < whole + 1:
                return shared, share
        return whole + (rest > 0), 0

    def ring(self, ring: Ring, by_key: bool = False) -> Ring:
        """For this call: loops may be short or long, blocks of which there are lists have a power of two of rows, and two
        warpgroups may leave fewer multiprocessors without a block than three."""
        seen = self.seen(by_key)
        if not self.alike and self.x.mask is None and (seen <= SHORT or self.features.tiles.present):
            ring = IN_SHORT_LOOPS.get(ring, ring)
        elif self.tiles(ring, by_key) * ring.tile > LONG:
            ring = IN_LONG_LOOPS.get(ring, ring)
        if ring.groups == 3:
            pair = WITH_TWO.get(ring, ring._replace(groups=2))
            two, three = (self.rounds(r, by_key)[0] * r.groups for r in (pair, ring))
            few = self.is_forward and seen <= PAIR_UP_TO[self.alike]
            if (
                few
                or self.features.tiles.present
                or (ring in WITH_TWO and not self.alike)
                or two * PAIR_FOR_THREE < three
            ):
                return pair
        return ring

    def descriptors(self, **arrays: tuple[Any, int]) -> dict[str, Rows]:
        """Of arrays in tiles of so many rows: {name}_d of the first part of their channels, {name}_r of the rest."""
        first, *rest = column_widths(self.head_dim)
        firsts = {f"{name}_d": Rows(a, n, first) for name, (a, n) in arrays.items()}
        rests = {f"{name}_r": Rows(a, n, rest[0]) if rest else Rows(None, 0, 0) for name, (a, n) in arrays.items()}
        return firsts | rests

    def one_loop(self, by_key: bool) -> bool:
        """Do the tiles that need no mask go with the others?  Not where lengths cut tiles, which are cleaned, nor, in the
        backward, where masks or segments are read."""
        if self.alike or self.features.lengths or (self.features.tiles.present and not self.is_forward):
            return False
        return self.seen(by_key) <= ONE_LOOP

    def drifts(self, length: int) -> bool:
        """Do programs that read the same rows, so many for a block, drift apart?"""
        return self.head_dim % SECTOR > 0 and length < DRIFT_BELOW

    def schedule(self, ring: Ring, by_key: bool, written: int) -> tuple[int, int, int, int, dict[str, Any]]:
        """(programs, those of them at once, blocks that one of them each computes, tiles of the others for each, features of the
        kernel).  Blocks are alike where nothing but the ragged end is masked."""
        blocks = self.blocks(ring.height, by_key)
        at_once = self.launcher.multiprocessors or blocks
        length = self.tiles(ring, by_key) * ring.tile
        waves = max(1, blocks // at_once // ROUNDS) if self.drifts(length) and written > 1 else 1
        ahead = length <= AHEAD and (written > 1 or not self.drifts(length))
        order: dict[str, Any] = dict(persistent=True, ahead=ahead)
        if self.counted and blocks > at_once and ring not in STATIC:
            return at_once, at_once, blocks, 0, order | dict(dynamic=True)
        order["waves"] = waves > 1
        share = self.rounds(ring, by_key)[1]
        if share:
            return waves * at_once, at_once, blocks // at_once * at_once, share, order | dict(shared=True)
        if self.alike and blocks > at_once and length <= PERSISTENT[self.kernel.__name__]:
            return waves * at_once, at_once, blocks, 0, order
        return blocks, blocks, blocks, 0, {}

    def run(
        self,
        ring: Ring,
        by_key: bool,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Output | None],
        handed_over: tuple[int, int],
        more_features: Mapping[str, Any] = MappingProxyType({}),
        **constants: Any,
    ) -> dict[str, Any]:
        """The outputs of a kernel.  `handed_over`: sums and statistics of a part of a block."""
        written = sum(o is not None and len(o.shape) == 4 for o in outputs.values())
        programs, at_once, whole, share, order = self.schedule(ring, by_key, written)
        blocks, rows = self.blocks(ring.height, by_key), GROUP * ring.height
        heads, n_tiles = self.key_heads if by_key else self.query_heads, self.tiles(ring, by_key)
        divisors = dict(
            of_blocks=blocks // (self.batch * heads), of_heads=heads, of_tiles=n_tiles, of_share=share or 1,
            of_together=TOGETHER.value, of_rest=self.batch * heads % TOGETHER.value or 1,
        )  # fmt: skip
        block_m, block_n = (ring.tile, rows) if by_key else (rows, ring.tile)
        tiles, between = None, None
        features = dataclasses.replace(
            self.features, deferred=ring.deferred, late=ring.late, one_loop=self.one_loop(by_key), **order, **more_features
        )  # fmt: skip
        if features.tiles.present:
            tiles = self.portable.tiles(Tile(block_m, block_n, WARPS, 1), by_key)
        if features.dynamic:  # the counter
            between = Output((4,), "float32")
        if whole < blocks:  # what programs hand over
            columns = column_widths(self.head_dim)[0] if ring.split else self.head_dim
            between = Output((at_once * ring.groups * part_size(GROUP, *handed_over, columns),), "float32")
        launch = Launch(
            self.kernel, programs, dict(inputs, **self.portable.selected(by_key), TILES=tiles),
            dict(
                self.scalars, scale=float(self.problem.scale), n=blocks, n_whole=whole, share=share, at_once=at_once,
                **{name: reciprocal(n) for name, n in divisors.items()},
            ),
            dict(outputs, PARTS=between),
            dict(
                C=self.head_dim, FEATURES=features, SLOTS=ring.slots, GROUPS=ring.groups,
                HEIGHT=ring.height, TURNS=ring.turns,
                RAGGED=bool((self.query_length if by_key else self.key_length) % ring.tile), **constants
            ), WARPS, 1, REGISTERS[ring.groups],
        )  # fmt: skip
        return self.launcher.launch(launch)


def forward(launcher: Launcher, problem: Problem, x: Operands, tx: Operands = NO_TANGENT):
    """(o, ℓ, ȯ, μ); the last two None without tangents."""
    return _forward(_Call(launcher, problem, x, forward_kernels.forward), tx)


def tangent(launcher: Launcher, problem: Problem, x: Operands, log_sum_exp, tx: Operands):
    """(ȯ, μ), linear in tx, from the saved ℓ."""
    _, _, t_o, mu = _forward(_Call(launcher, problem, x, forward_kernels.forward), tx, log_sum_exp)
    return t_o, mu


def _forward(call: _Call, tx: Operands, saved=None):
    x, dual, linear = call.x, any(t is not None for t in tx[:3]), saved is not None
    ring = call.ring(FORWARD_DUAL[call.width] if dual else FORWARD[call.width])
    descriptors = call.descriptors(
        q=(x.query, GROUP), k=(x.key, ring.tile), v=(x.value, ring.tile),
        tq=(tx.query, GROUP), tk=(tx.key, ring.tile), tv=(tx.value, ring.tile),
    )  # fmt: skip
    got = call.run(
        ring, False, dict(descriptors, SAVED=saved),
        dict(
            O=None if linear else call.output, LSE=None if linear else call.statistic,
            TO=call.output if dual else None, MU=call.statistic if dual else None,
        ), (1 + dual, 2 + dual),
        BN=ring.tile, HAS_TQ=tx.query is not None, HAS_TK=tx.key is not None, HAS_TV=tx.value is not None, LINEAR=linear,
    )  # fmt: skip
    return got["O"], got["LSE"], got["TO"], got["MU"]


def backward(launcher: Launcher, problem: Problem, x: Operands, y, cy, want) -> Operands:
    return backward_dual(launcher, problem, x, y, cy, (NO_TANGENT, (None, None), (None, None)), want, (False,) * 4)[0]


class Wanted(NamedTuple):
    """Of the gradients of a side: of its resident rows a and c, and their tangents."""

    a: bool = False
    c: bool = False
    ta: bool = False
    tc: bool = False

    @property
    def kind(self) -> str:
        gradients, tangents = self.a or self.c, self.ta or self.tc
        return "dual" if gradients and tangents else "tangent" if tangents else "plain"


def backward_dual(launcher: Launcher, problem: Problem, x: Operands, y, cy, tangents, want, want_tangent):
    """Needs a cotangent of o."""
    tx, ty, tcy = tangents
    (o, log_sum_exp), (d_o, d_lse), (t_o, mu), (t_d_o, t_d_lse) = y, cy, ty, tcy
    dual, want, want_tangent = any(want_tangent), Operands(*want), Operands(*want_tangent)
    call = _Call(launcher, problem, x, backward_kernels.backward, lists_counted=not dual)
    query = ((x.query, tx.query), (d_o, t_d_o))
    key = ((x.key, tx.key), (x.value, tx.value))

    def side(ring: Ring, row: bool, wanted: Wanted, statistics, makes: bool = False, last_first: bool = False):
        """The outputs of the kernel: DA, DC, TDA, TDC; of the query side also DELTA_OUT and T_DELTA_OUT, and LSE2_OUT if it
        makes the statistics of its rows."""
        resident, streamed = (query, key) if row else (key, query)
        ((a, ta), (c, tc)), ((b, tb), (e, te)) = resident, streamed
        descriptors = call.descriptors(
            a=(a, GROUP), c=(c, GROUP), b=(b, ring.tile), e=(e, ring.tile),
            ta=(ta, GROUP), tc=(tc, GROUP), tb=(tb, ring.tile), te=(te, ring.tile),
            o=(o if makes else None, GROUP), to=(t_o if makes else None, GROUP),
        )  # fmt: skip
        rows_summed = (wanted.a or (wanted.ta and tb is not None)) + wanted.ta if row else 0
        like = call.output if row else call.key_gradient
        return call.run(
            ring, not row, dict(descriptors, **statistics),
            dict(
                DA=like if wanted.a else None, DC=like if wanted.c else None, TDA=like if wanted.ta else None,
                TDC=like if wanted.tc else None, LSE2_OUT=call.statistic if makes else None,
                DELTA_OUT=call.statistic if row else None, T_DELTA_OUT=call.statistic if row and wanted.ta else None,
            ), (sum(wanted), rows_summed), dict(statistics=makes, last_first=last_first),
            T=ring.tile, ROW=row,
            HAS_TA=ta is not None, HAS_TB=tb is not None, HAS_TC=tc is not None, HAS_TE=te is not None,
            HAS_D_LSE=row and d_lse is not None, HAS_TD_LSE=row and t_d_lse is not None,
            WANT_A=wanted.a, WANT_C=wanted.c, WANT_TA=wanted.ta, WANT_TC=wanted.tc,
        )  # fmt: skip

    d = call.width
    wanted = Wanted(a=want.query, ta=want_tangent.query)
    ring = call.ring(QUERY_SIDE[d, wanted.kind])
    length, pairs = call.tiles(ring, False) * ring.tile, tx.key is not None or tx.value is not None
    if dual:
        makes = want_tangent.query and pairs and length <= STATISTICS_DUAL and not call.drifts(length)
    else:
        makes = want.query and ring.tile >= GROUP  # rows of o in a slot
    if makes:  # of ℓ itself
        rows = RowStatistics(log_sum_exp, None, None)
    else:
        rows = portable.statistics(call.portable, y, cy, ty, tcy, dual)
    statistics = dict(LSE2=rows.lse2, MU=mu, DELTA=rows.delta, T_DELTA=rows.t_delta)
    gradients: dict[str, Any] = {}
    if any(wanted):
        means = call.portable.key_means(tx.key if want_tangent.query else None)
        of_rows = dict(D_LSE=d_lse, TD_LSE=t_d_lse, KEY_MEAN=means.mean, T_KEY_MEAN=means.t_mean, COMMON=means.common)
        got = side(ring, True, wanted, statistics | of_rows, makes)
        gradients |= dict(query=got["DA"], t_query=got["TDA"])
        statistics["DELTA"] = got["DELTA_OUT"]
        if makes:
            statistics["LSE2"] = got["LSE2_OUT"]
        if want_tangent.query:
            statistics["T_DELTA"] = got["T_DELTA_OUT"]
    of_rows = dict.fromkeys(("D_LSE", "TD_LSE", "KEY_MEAN", "T_KEY_MEAN", "COMMON"))

    def key_side(ring: Ring, wanted: Wanted) -> None:
        last_first = call.alike and not dual  # from rows on that the query side has just read
        got = side(call.ring(ring, True), False, wanted, statistics | of_rows, last_first=last_first)
        results = dict(key=got["DA"], value=got["DC"], t_key=got["TDA"], t_value=got["TDC"])
        gradients.update({name: a for name, a in results.items() if a is not None})

    wanted = Wanted(want.key, want.value, want_tangent.key, want_tangent.value)
    if any(wanted) and (d, wanted.kind) in KEY_SIDE:
        key_side(KEY_SIDE[d, wanted.kind], wanted)
    else:
        if wanted.c or wanted.tc:
            key_side(VALUES[d, wanted.kind], Wanted(c=wanted.c, tc=wanted.tc))
        if wanted.a or wanted.ta:
            key_side(KEYS[d, wanted.kind], Wanted(a=wanted.a, ta=wanted.ta))
    found = [Operands(*(gradients.get(prefix + name) for name in ("query", "key", "value"))) for prefix in ("", "t_")]
    return found[0], found[1]
