"""Which programs compute what, and with which ring: decided on the host, from lengths and features alone."""

import dataclasses
import math
from typing import Literal, NamedTuple

import triton

from jax_flash_jvp.kernels.features import Features
from jax_flash_jvp.kernels.hopper import config
from jax_flash_jvp.kernels.hopper.adding import TILE
from jax_flash_jvp.kernels.hopper.config import GROUP, OnePass, Ring
from jax_flash_jvp.kernels.hopper.programs import DIVISIBLE, HEADS_SHARING_L2
from jax_flash_jvp.kernels.hopper.step_one_pass_dual import STREAMED


class Rounds(NamedTuple):
    """How the blocks of a launch fill a GPU."""

    time: float  # that all take, as multiples of one block's
    shared_tiles_per_program: int  # of the last blocks, for that; 0 where these are not shared


@dataclasses.dataclass(frozen=True)
class Schedule:
    programs: int
    concurrent: int  # of these; more come in waves, one behind the other
    whole_blocks: int  # that one program each computes; the others are shared
    shared_tiles_per_program: int  # of the shared blocks
    # a program for every block; for every multiprocessor, with blocks whose numbers are given beforehand, or taken from a
    # counter, or with part of a shared block besides
    mode: Literal["block", "persistent", "dynamic", "shared"]
    ahead: bool = False  # resident rows of the next block are loaded while one is computed, if there is room

    def features(self) -> dict[str, bool]:
        """The fields of `Features` that say so to the kernel."""
        return dict(
            persistent=self.mode != "block", dynamic=self.mode == "dynamic", shared=self.mode == "shared",
            waves=self.programs > self.concurrent, ahead=self.ahead,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What a kernel computes: blocks of resident rows, each in a loop over the tiles of streamed rows."""

    kernel: Literal["forward", "backward"]
    by_key: bool  # are the resident rows keys and values, or else queries?
    head_dim: int
    resident: int  # rows of a head
    heads: int  # of resident rows, in all batch entries
    streamed: int  # rows of a head
    group: int  # heads of streamed rows for one of resident rows
    seen: int  # streamed rows that a resident one sees, or that see it, at most
    features: Features
    counted: bool  # may programs take blocks from a counter?
    multiprocessors: int | None
    beside_transfers: bool  # between devices, which take multiprocessors as programs end

    @property
    def alike(self) -> bool:
        """Are all blocks?  Where nothing but the ragged end is masked."""
        f = self.features
        return not (f.left or f.right or f.lengths or f.tiles.present)

    @property
    def one_loop(self) -> bool:
        """Do the tiles that need no mask go with the others?  Not where lengths cut tiles, which are cleaned, nor, in the
        backward, where masks or segments are read."""
        if self.alike or self.features.lengths or (self.features.tiles.present and self.kernel == "backward"):
            return False
        return self.seen <= config.ONE_LOOP

    def in_one_pass(self, dual: bool, deterministic: bool) -> Literal["in order", "in any order"] | None:
        """Is the backward to go once over the scores, and how is it to add dq up?  If so, this is the sweep, by key."""
        width, concurrent = config.width_of(self.head_dim), self.multiprocessors or 1
        table = config.ONE_PASS_DUAL_FROM if dual else config.ONE_PASS_FROM
        if width not in table:
            return None
        blocks = self._blocks_of_head(self.ring_of_one_pass(dual))
        rounds = triton.cdiv(blocks * self.heads, concurrent)
        rows, busy = min(self.resident, self.seen), blocks * self.heads / concurrent
        filled = busy / rounds if self.alike else min(1, busy)  # the shorter of other blocks fill the last round
        if not any(rows >= from_rows and filled >= least for from_rows, least in table[width]):
            return None
        # of lists, nobody knows how many blocks before another visit a tile
        orders = not self.features.tiles.present and (self.alike or width <= config.ORDERED_UNLIKE_UP_TO)
        if orders and self._order_costs(dual, blocks, rounds) <= config.ORDER_MAY_COST:
            return "in order"
        return None if deterministic else "in any order"

    def _order_costs(self, dual: bool, blocks: int, rounds: int) -> float:
        """The part of the time that the order costs: of blocks of a head that begin together each is a tile behind the last."""
        together = min(blocks, (self.multiprocessors or 1) / HEADS_SHARING_L2.value)
        tile = STREAMED.value if dual else TILE.value
        tiles = self.seen / tile * self.group * (1 if self.alike else 0.5)  # of a block
        return together / (rounds * tiles)

    def ring_of_one_pass(self, dual: bool) -> OnePass:
        rings = (config.ONE_PASS_DUAL if dual else config.ONE_PASS)[config.width_of(self.head_dim)]
        if self.features.tiles.present:  # of blocks with a power of two of rows
            rings = tuple(ring for ring in rings if ring.groups == 2)
        return min(rings, key=self._time_of_one_pass)

    def _blocks_of_head(self, ring: OnePass) -> int:
        return triton.cdiv(self.resident, GROUP * ring.groups)

    def _time_of_one_pass(self, ring: OnePass) -> float:
        """In rows of keys, one after the other.  Blocks that are not alike, which on average take half as long as the longest,
        fill what rounds of others leave idle."""
        rounds = self._blocks_of_head(ring) * self.heads / (self.multiprocessors or 1)
        return ring.time * ring.groups * (math.ceil(rounds) if self.alike else max(1, rounds / 2))

    def blocks(self, ring: Ring) -> int:
        return triton.cdiv(self.resident, GROUP * ring.height) * self.heads

    def tiles(self, ring: Ring) -> int:
        """That a block visits."""
        return triton.cdiv(self.streamed, ring.tile) * self.group

    def length(self, ring: Ring) -> int:
        """The length of the loop over tiles, in rows."""
        return self.tiles(ring) * ring.tile

    def rounds(self, ring: Ring) -> Rounds:
        blocks, n_tiles = self.blocks(ring), self.tiles(ring)
        concurrent = self.multiprocessors or 1
        whole, rest = divmod(blocks, concurrent)
        least = triton.cdiv(rest * n_tiles, concurrent)
        if self.alike and 0 < least < n_tiles and concurrent * n_tiles < DIVISIBLE:
            # fragments of a block but one, at most
            others = lambda share: triton.cdiv(n_tiles, share) - 1 + (n_tiles % share > 0)
            tiles = lambda share: share + config.FRAGMENT[self.kernel] / ring.tile * others(share)
            # with fewer fragments
            even = (triton.cdiv(n_tiles, n) for n in range(triton.cdiv(n_tiles, least) - 1, 1, -1))
            share = min((least, *even), key=tiles)
            shared = whole + tiles(share) / n_tiles
            if shared < whole + 1:
                return Rounds(shared, share)
        return Rounds(whole + (rest > 0), 0)

    def ring(self, ring: Ring) -> Ring:
        """What becomes of a ring of the table: loops may be short, blocks of which there are lists have a power of two of rows,
        and two warpgroups may leave fewer multiprocessors without a block than three."""
        listed, documents = self.features.tiles.present, self.features.segments
        if not self.alike and not self.features.mask.present and (self.seen <= config.SHORT or documents):
            ring = ring.in_short_loops
        if ring.groups == 3:
            pair = ring.pair
            two, three = (self.rounds(r).time * r.groups for r in (pair, ring))
            few = self.kernel == "forward" and self.seen <= config.PAIR_UP_TO[self.alike]
            other_tile = ring.two is not None and not self.alike
            if few or listed or other_tile or two * config.PAIR_FOR_THREE < three:
                return pair
        return ring

    def drifts(self, ring: Ring) -> bool:
        """Do programs that read the same rows drift apart?"""
        return self.head_dim % config.SECTOR > 0 and self.length(ring) < config.DRIFT_BELOW

    def schedule(self, ring: Ring, written: int) -> Schedule:
        """The schedule of a kernel that writes so many arrays of rows."""
        if self.beside_transfers:
            return Schedule(self.blocks(ring), self.blocks(ring), self.blocks(ring), 0, "block")
        blocks, length, drifts = self.blocks(ring), self.length(ring), self.drifts(ring)
        concurrent = self.multiprocessors or blocks
        waves = max(1, blocks // concurrent // config.ROUNDS) if drifts and written > 1 else 1
        ahead = length <= config.AHEAD and (written > 1 or not drifts)
        if self.counted and not self.alike and blocks > concurrent and ring.counted:
            return Schedule(concurrent, concurrent, blocks, 0, "dynamic", ahead)
        share = self.rounds(ring).shared_tiles_per_program
        if share:
            whole = blocks // concurrent * concurrent
            return Schedule(waves * concurrent, concurrent, whole, share, "shared", ahead)
        if self.alike and blocks > concurrent and length <= config.PERSISTENT[self.kernel]:
            return Schedule(waves * concurrent, concurrent, blocks, 0, "persistent", ahead)
        return Schedule(blocks, blocks, blocks, 0, "block")
