"""The rows that the tables of both families of kernels could have: `kernels/portable/tiles.py`, `kernels/hopper/config.py`.

A row knows what stands in its table, proposes what else could, lets jobs run with that, and writes it as its table does.
"""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

from jax_flash_jvp.kernels.hopper import config
from jax_flash_jvp.kernels.hopper.config import GROUP, Ring
from jax_flash_jvp.kernels.hopper.products import columns
from jax_flash_jvp.kernels.hopper.ring import SHARED_MEMORY
from jax_flash_jvp.kernels.hopper.schedule import Sweep
from jax_flash_jvp.kernels.portable import jobs as portable
from jax_flash_jvp.kernels.portable import tiles
from jax_flash_jvp.kernels.portable.tiles import Tile


class Kernel(NamedTuple):
    """What a row is for: gradients of these operands, their tangents, or both; of none, the forward."""

    wanted: str  # of "qkvb"
    gradients: bool
    tangents: bool


KERNELS = {"forward": Kernel("", False, False), "forward_dual": Kernel("", False, True)} | {
    f"{side}_side{suffix}": Kernel(wanted, gradients, tangents)
    for side, wanted in (("query", "q"), ("key", "kv"), ("value", "v"), ("score", "b"))
    for suffix, gradients, tangents in (("", True, False), ("_dual", True, True), ("_tangent", False, True))
}


class PortableRow:
    """A tile."""

    def __init__(self, job: str, head_dim: int, dtype: str, precision: str, target: int):
        if job not in tiles.JOBS:
            raise KeyError(f"{job} is no row of the portable kernels: these are {', '.join(tiles.JOBS)}")
        self.job, self.head_dim, self.dtype, self.target = job, head_dim, dtype, target
        self.kind = tiles.kind_of(dtype, precision)
        self.place = f"the table of {self.kind!r} for sm_{target} in jax_flash_jvp/kernels/portable/tiles.py"
        self.present = tiles.find(job, head_dim, dtype, precision, target)
        kernel = KERNELS[job]
        one_launch = not kernel.tangents or tiles.accumulators(head_dim) == 4
        self.kernel = kernel if one_launch else kernel._replace(wanted=kernel.wanted[:1])

    def proposals(self) -> list[Tile]:
        """The present one first, then those whose scores and sums keep the registers of a thread busy, and fit them."""
        wanted, _, tangents = self.kernel
        small = self.kind != "half" or self.head_dim > 128
        sums = 0 if wanted == "b" else max(1, len(wanted)) * (1 + tangents)
        found = [self.present] if self.present else []
        sizes, stages = (16, 32, 64, 128), (2, 3, 4) if self.kind == "half" else (1, 2, 3)
        for block_m, block_n, warps, n in itertools.product(sizes, sizes, (4, 8), stages):
            tile, threads = Tile(block_m, block_n, warps, n), 32 * warps
            if wanted == "b" and tile != tiles.lighter(tile, self.job, self.head_dim, self.dtype, self.target, False):
                continue
            scores, resident = block_m * block_n, block_n if wanted in ("k", "v", "kv") else block_m
            rows = 8 * warps if self.target == 90 else 16  # that `wgmma`, or `mma.sync`, has at a time
            busy = resident >= rows and scores >= (4 if small else 16) * threads
            fits = scores * (1 + tangents) + resident * tiles.padded(self.head_dim) * sums <= 240 * threads
            if busy and fits and tile[:4] not in {t[:4] for t in found}:
                found.append(tile)
        return found

    @contextlib.contextmanager
    def taking(self, tile: Tile) -> Iterator[None]:
        found = portable.tile
        of = lambda job: tile if job == self.job else None
        with (
            mock.patch.object(portable, "tile", lambda job, *rest: of(job) or found(job, *rest)),
            mock.patch.object(
                portable, "lighter", lambda other, job, *rest: of(job) or tiles.lighter(other, job, *rest)
            ),
        ):
            yield

    def written(self, tile: Tile, spills: int, about: str) -> str:
        """The whole row, with that tile in its place and, if it is another one that spills more than most, by how much."""
        row = [*tiles.row_of(self.job, self.kind, self.target)]
        if tile != self.present and spills > tile.spill:
            tile = tile._replace(spill=-(-spills // 100) * 100)
        most_have = 4 if tile == Tile(*tile[:4]) else 5 if tile.registers is None else 6
        column = tiles.column_of(tuple(row), self.head_dim)
        row += [None] * (column + 1 - len(row))  # no tile for so many channels yet
        row[column] = tuple(tile[:most_have])
        entries = ", ".join(map(str, row)) + "," * (len(row) == 1)
        return f"    {self.job}=({entries}),  # {self.head_dim} channels: {about}"


class HopperRow:
    """A ring."""

    def __init__(self, job: str, head_dim: int, dtype: str, precision: str, target: int):
        self.job, self.width, self.kernel = job, config.width_of(head_dim), KERNELS[job]
        wanted, gradients, tangents = self.kernel
        if wanted:
            kind = "dual" if gradients and tangents else "tangent" if tangents else "plain"
            self.key: Any = (self.width, kind)
            names = {"q": ["QUERY_SIDE"], "kv": ["KEY_SIDE", "KEYS"], "v": ["VALUES"]}.get(wanted, [])
        else:
            self.key, names = self.width, ["FORWARD_DUAL" if tangents else "FORWARD"]
        self.name = next((name for name in names if self.key in getattr(config, name)), "")
        if not self.name or target != 90:
            raise KeyError(f"{job} with head dimension {head_dim} on sm_{target} is no row of the Hopper kernels")
        if self.name == "KEYS":
            self.kernel = self.kernel._replace(wanted="k")
        self.place = f"{self.name} in jax_flash_jvp/kernels/hopper/config.py"
        self.present: Ring = getattr(config, self.name)[self.key]

    def proposals(self) -> list[Ring]:
        """The present one first, then those that fit shared memory, with resident rows of one block, or of two."""
        wanted, _, tangents = self.kernel
        split = self.present.split
        pairs = 2 if tangents else 1  # a slot has a tile and its tangent
        row, most = 2 * columns(self.width), 32 if split else 128
        # q; or of a and c, c where dP is needed; and tangents of these
        resident = (1 + tangents) * (2 if wanted and wanted != "v" else 1)
        found = [self.present]
        deferrable = wanted in ("q", "k", "kv")
        ways = [(False, False)] + [(True, False)] * deferrable + [(True, True)] * (deferrable and not tangents)
        for tile, turns, groups, way, blocks in itertools.product(
            (32, 64, 128), (True, False), (2,) if split else (2, 3), ways, (1, 2)
        ):  # fmt: skip
            rows = GROUP * (1 if split else groups) * resident * blocks
            slots = min(16, (SHARED_MEMORY // row - rows) // tile // 2 * 2)
            ring = self.present._replace(
                tile=tile, slots=slots, turns=turns, groups=groups, deferred=way[0], late_dp=way[1], split=split
            )
            if tile <= most and slots >= pairs * (4 if way[0] else 2) and ring not in found:
                found.append(ring)
        return found

    @contextlib.contextmanager
    def taking(self, ring: Ring) -> Iterator[None]:
        """That ring itself, whatever the lengths of loops are; but the present one as it is taken now."""
        adapted = Sweep.ring
        if ring == self.present:
            yield
            return
        as_it_is = lambda sweep, r: r if r is ring else adapted(sweep, r)
        with mock.patch.dict(getattr(config, self.name), {self.key: ring}), mock.patch.object(Sweep, "ring", as_it_is):
            yield

    def written(self, ring: Ring, spills: int, about: str) -> str:
        split, defaults = ring.split, Ring._field_defaults
        fields = [
            f"{name}={value!r}"
            for name, value in ring._asdict().items()
            if name != "split" and value != defaults.get(name)
        ]
        return f"    {self.key}: {'Split' if split else 'Ring'}({', '.join(fields)}),  # {about}".replace("'", '"')


FAMILIES = {"portable": PortableRow, "hopper": HopperRow}
