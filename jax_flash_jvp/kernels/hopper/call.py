"""What the launches of one call share."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import triton

from jax_flash_jvp.kernels.hopper import config, forward
from jax_flash_jvp.kernels.hopper.config import GROUP, Ring
from jax_flash_jvp.kernels.hopper.handover import fragment_size
from jax_flash_jvp.kernels.hopper.products import column_widths
from jax_flash_jvp.kernels.hopper.programs import HEADS_SHARING_L2, reciprocal
from jax_flash_jvp.kernels.hopper.schedule import Schedule, Sweep
from jax_flash_jvp.kernels.launcher import Launch, Launcher, Output, Rows
from jax_flash_jvp.kernels.portable import jobs as portable
from jax_flash_jvp.kernels.portable.tiles import Tile
from jax_flash_jvp.problem import Operands, Problem


class HopperCall:
    """A call of a job that one kernel computes most of."""

    def __init__(self, launcher: Launcher, problem: Problem, x: Operands, kernel, lists_counted: bool = True):
        self.launcher, self.problem, self.x, self.kernel = launcher, problem, x, kernel
        self.batch, self.query_length, self.query_heads, self.head_dim = x.query.shape
        self.key_length, self.key_heads = x.key.shape[1:3]
        self.width = config.width_of(self.head_dim)
        self.portable = portable.PortableCall(launcher, problem, x, word=32)
        f = self.portable.features
        self.counted = lists_counted or not f.tiles.present
        sees_nothing = self.portable.reach["right"] < 0 or f.left or f.lengths or f.tiles.present
        self.features = dataclasses.replace(f, empty_rows=sees_nothing)
        self.scalars = dict(self.portable.sizes, **self.portable.reach, scale=float(problem.scale))
        self.statistic, self.output = self.portable.statistic, self.portable.output
        self.key_gradient = self.portable.key_gradient

    def block_of_means(self, ring: Ring, dual: bool) -> Tile:
        """A tile of the portable kernels for the mean keys of rows: where tiles are listed that of the query side."""
        if self.features.tiles.present:
            return Tile(GROUP * ring.height, ring.tile, 4 * ring.height, 2)
        return self.portable.tile("query_side_dual" if dual else "query_side")

    def sweep(self, by_key: bool) -> Sweep:
        """Over the keys of each query, or `by_key` over the queries of each key."""
        queries, keys = self.query_length, self.key_length
        left, right = self.problem.reach(queries, keys)
        resident, heads, streamed = (keys, self.key_heads, queries) if by_key else (queries, self.query_heads, keys)
        return Sweep(
            kernel="forward" if self.kernel is forward.forward else "backward",
            by_key=by_key, head_dim=self.head_dim, resident=resident, heads=self.batch * heads, streamed=streamed,
            group=self.query_heads // self.key_heads if by_key else 1,
            seen=streamed if left is None or right is None else min(streamed, left + right + 1),
            features=self.features, counted=self.counted, multiprocessors=self.launcher.multiprocessors,
            beside_transfers=self.problem.partial,
        )  # fmt: skip

    def descriptors(self, **arrays: tuple[Any, int]) -> dict[str, Rows]:
        """Descriptors of arrays in tiles of so many rows: {name}_d of the first part of their channels, {name}_r of the rest."""
        first, *rest = column_widths(self.head_dim)
        firsts = {f"{name}_d": Rows(a, n, first) for name, (a, n) in arrays.items()}
        rests = {f"{name}_r": Rows(a, n, rest[0]) if rest else Rows(None, 0, 0) for name, (a, n) in arrays.items()}
        return firsts | rests

    def run(
        self,
        sweep: Sweep,
        ring: Ring,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Output | None],
        handed_over: tuple[int, int],
        more_features: Mapping[str, Any] = MappingProxyType({}),
        **constants: Any,
    ) -> dict[str, Any]:
        """The outputs of a kernel.  `handed_over`: sums and values of rows of a fragment of a block."""
        by_key, rows = sweep.by_key, GROUP * ring.height
        schedule = sweep.schedule(ring, sum(o is not None and len(o.shape) == 4 for o in outputs.values()))
        scheduled: dict[str, Any] = schedule.features()
        features = dataclasses.replace(
            self.features, deferred=ring.deferred, late_dp=ring.late_dp, one_loop=sweep.one_loop, **scheduled, **more_features
        )  # fmt: skip
        selected, tiles = self.portable.selected(by_key), None
        if features.tiles.present:
            block_m, block_n = (ring.tile, rows) if by_key else (rows, ring.tile)
            tiles = self.portable.tiles(Tile(block_m, block_n, config.WARPS, 1), by_key)
        launch = Launch(
            self.kernel, schedule.programs, dict(inputs, **selected, TILES=tiles),
            dict(self.scalars, **self._numbers(sweep, ring, schedule)),
            dict(outputs, EXCHANGE=self._between_programs(ring, schedule, handed_over)),
            dict(
                C=self.head_dim, FEATURES=features, SLOTS=ring.slots, GROUPS=ring.groups, HEIGHT=ring.height, TURNS=ring.turns,
                RAGGED=bool(sweep.streamed % ring.tile), **constants
            ), config.WARPS, num_stages=1, registers=config.REGISTERS[ring.groups].launched,
        )  # fmt: skip
        return self.launcher.launch(launch)

    def _numbers(self, sweep: Sweep, ring: Ring, schedule: Schedule) -> dict[str, int]:
        """The numbers of a launch, and the reciprocals of what kernels divide by."""
        blocks = sweep.blocks(ring)
        divisors = dict(
            self._divisors(sweep, blocks), of_tiles=sweep.tiles(ring), of_shared_tiles=schedule.shared_tiles_per_program or 1
        )  # fmt: skip
        return dict(
            n=blocks, n_whole=schedule.whole_blocks, shared_tiles=schedule.shared_tiles_per_program,
            concurrent=schedule.concurrent,
            **{name: reciprocal(n) for name, n in divisors.items()},
        )  # fmt: skip

    def numbers_in_one_pass(self, sweep: Sweep, rows: int) -> dict[str, int]:
        """The numbers of a launch with one program for each block of so many keys."""
        blocks = triton.cdiv(self.key_length, rows) * sweep.heads
        return dict(n=blocks, **{name: reciprocal(n) for name, n in self._divisors(sweep, blocks).items()})

    def _divisors(self, sweep: Sweep, blocks: int) -> dict[str, int]:
        """By which `own_block` finds the head and the rows of a block."""
        return dict(
            of_blocks=blocks // sweep.heads, of_heads=sweep.heads // self.batch, of_together=HEADS_SHARING_L2.value,
            of_rest=sweep.heads % HEADS_SHARING_L2.value or 1,
        )  # fmt: skip

    def _between_programs(self, ring: Ring, schedule: Schedule, handed_over: tuple[int, int]) -> Output | None:
        """The counter from which they take blocks, or the fragments of blocks that they hand over."""
        if schedule.mode == "dynamic":
            return Output((4,), "float32")
        if schedule.mode == "shared":
            columns = column_widths(self.head_dim)[0] if ring.split else self.head_dim
            size = fragment_size(GROUP, *handed_over, columns)
            return Output((schedule.concurrent * ring.groups * size,), "float32")
        return None
