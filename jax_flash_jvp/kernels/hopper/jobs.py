"""The jobs of attention as launches of the Hopper kernels: the same functions as in `portable/jobs.py`, for what they serve."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import triton

from jax_flash_jvp.kernels.hopper import config, two_sides
from jax_flash_jvp.kernels.hopper import forward as forward_kernels
from jax_flash_jvp.kernels.hopper import one_pass as one_pass_kernels
from jax_flash_jvp.kernels.hopper import one_pass_dual as dual_kernels
from jax_flash_jvp.kernels.hopper.config import GROUP, Ring
from jax_flash_jvp.kernels.hopper.products import column_widths
from jax_flash_jvp.kernels.hopper.programs import TOGETHER, fragment_size, reciprocal
from jax_flash_jvp.kernels.hopper.schedule import Schedule, Sweep
from jax_flash_jvp.kernels.launcher import Blocks, InPlace, Launch, Launcher, Output, Rows
from jax_flash_jvp.kernels.portable import jobs as portable
from jax_flash_jvp.kernels.portable.jobs import NO_TANGENT, RowStatistics
from jax_flash_jvp.kernels.portable.tiles import Tile
from jax_flash_jvp.problem import Operands, Problem


class HopperCall:
    """What the launches of one call share."""

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
            kernel="forward" if self.kernel is forward_kernels.forward else "backward",
            by_key=by_key, head_dim=self.head_dim, resident=resident, heads=self.batch * heads, streamed=streamed,
            group=self.query_heads // self.key_heads if by_key else 1,
            seen=streamed if left is None or right is None else min(streamed, left + right + 1),
            features=self.features, counted=self.counted, multiprocessors=self.launcher.multiprocessors,
            beside_transfers=self.problem.partial,
        )  # fmt: skip

    def descriptors(self, **arrays: tuple[Any, int]) -> dict[str, Rows]:
        """Of arrays in tiles of so many rows: {name}_d of the first part of their channels, {name}_r of the rest."""
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
            ), config.WARPS, num_stages=1, registers=config.REGISTERS[ring.groups],
        )  # fmt: skip
        return self.launcher.launch(launch)

    def _numbers(self, sweep: Sweep, ring: Ring, schedule: Schedule) -> dict[str, int]:
        """Of a launch, and the reciprocals of what kernels divide by."""
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
        """Those of a launch with one program for each block, of so many keys."""
        blocks = triton.cdiv(self.key_length, rows) * sweep.heads
        return dict(n=blocks, **{name: reciprocal(n) for name, n in self._divisors(sweep, blocks).items()})

    def _divisors(self, sweep: Sweep, blocks: int) -> dict[str, int]:
        """By which `own_block` finds the head and the rows of a block."""
        return dict(
            of_blocks=blocks // sweep.heads, of_heads=sweep.heads // self.batch, of_together=TOGETHER.value,
            of_rest=sweep.heads % TOGETHER.value or 1,
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


def forward(launcher: Launcher, problem: Problem, x: Operands, tx: Operands = NO_TANGENT):
    """(o, ℓ, ȯ, μ); the last two None without tangents."""
    return _forward(HopperCall(launcher, problem, x, forward_kernels.forward), tx)


def tangent(launcher: Launcher, problem: Problem, x: Operands, log_sum_exp, tx: Operands):
    """(ȯ, μ), linear in tx, from the saved ℓ."""
    _, _, t_o, mu = _forward(HopperCall(launcher, problem, x, forward_kernels.forward), tx, log_sum_exp)
    return t_o, mu


def _forward(call: HopperCall, tx: Operands, saved=None):
    x, dual, linear = call.x, any(t is not None for t in tx[:3]), saved is not None
    table = config.FORWARD_DUAL if dual else config.FORWARD
    sweep = call.sweep(by_key=False)
    ring = sweep.ring(table[call.width])
    descriptors = call.descriptors(
        q=(x.query, GROUP), k=(x.key, ring.tile), v=(x.value, ring.tile),
        tq=(tx.query, GROUP), tk=(tx.key, ring.tile), tv=(tx.value, ring.tile),
    )  # fmt: skip
    got = call.run(
        sweep, ring, dict(descriptors, SAVED=saved),
        dict(
            O=None if linear else call.output, LSE=None if linear else call.statistic,
            TO=call.output if dual else None, MU=call.statistic if dual else None,
        ), (1 + dual, 2 + dual),
        T=ring.tile, HAS_TQ=tx.query is not None, HAS_TK=tx.key is not None, HAS_TV=tx.value is not None, LINEAR=linear,
    )  # fmt: skip
    return got["O"], got["LSE"], got["TO"], got["MU"]


def backward(launcher: Launcher, problem: Problem, x: Operands, y, cy, want) -> Operands:
    if all(want[:3]):
        call = HopperCall(launcher, problem, x, one_pass_kernels.one_pass)
        if sums := call.sweep(by_key=True).in_one_pass(dual=False, deterministic=problem.deterministic):
            return _in_one_pass(call, y, cy, sums == "in order")
    return backward_dual(launcher, problem, x, y, cy, (NO_TANGENT, (None, None), (None, None)), want, (False,) * 4)[0]


def _in_one_pass(call: HopperCall, y, cy, ordered: bool) -> Operands:
    """The gradients of q, k and v."""
    x, (o, log_sum_exp), (d_o, d_lse), d = call.x, y, cy, call.head_dim
    sweep = call.sweep(by_key=True)
    ring = sweep.ring_of_one_pass()
    tile, rows, widths = one_pass_kernels.TILE.value, GROUP * ring.groups, column_widths(d)
    query_tiles = call.batch * call.query_heads * triton.cdiv(call.query_length, tile)
    sizes = dict(HQ=call.query_heads, LQ=call.query_length)
    statistic = Output((query_tiles * tile,), "float32")
    sums = [Output((query_tiles * 2 * width, 32), "float32") for width in widths]
    made = call.launcher.launch(
        Launch(
            one_pass_kernels.prepare, query_tiles,
            dict(O=o, DO=d_o, LSE=log_sum_exp, D_LSE=d_lse, Q_LENGTHS=x.query_lengths), sizes,
            dict(
                LSE2=statistic, DELTA=statistic, ROWS=statistic, DQ=sums[0], DQ_R=sums[1] if len(sums) > 1 else None,
                COUNTS=Output((query_tiles,), "int32") if ordered else None,
            ), dict(C=d, HAS_D_LSE=d_lse is not None, ORDERED=ordered, FEATURES=call.features), config.WARPS, num_stages=1,
        )
    )  # fmt: skip
    query_ring = call.sweep(by_key=False).ring(config.QUERY_SIDE[call.width, "plain"])
    means = call.portable.key_means(None, call.block_of_means(query_ring, dual=False))
    listed = call.features.tiles.present
    lists = call.portable.tiles(Tile(tile, rows, config.WARPS, 1), by_key=True) if listed else None
    numbers = call.numbers_in_one_pass(sweep, rows)
    of_tile = lambda name: Blocks(made[name], (tile,))
    sums_of = lambda name, width: InPlace(Blocks(made[name], (2 * width, 32)))
    corrected = dict(CORRECTED=call.portable.corrected)
    got = call.launcher.launch(
        Launch(
            one_pass_kernels.one_pass, numbers["n"],
            dict(
                call.descriptors(q=(x.query, tile), k=(x.key, GROUP), v=(x.value, GROUP), do=(d_o, tile)),
                lse2_d=of_tile("LSE2"), delta_d=of_tile("DELTA"), **call.portable.selected(True), TILES=lists,
                COMMON=means.common,
            ), dict(call.scalars, **numbers),
            dict(
                dq_d=sums_of("DQ", widths[0]), dq_r=sums_of("DQ_R", widths[-1]), rows_d=InPlace(of_tile("ROWS")),
                COUNTS=InPlace(made["COUNTS"]) if ordered else None, DK=call.key_gradient, DV=call.key_gradient,
            ),
            dict(
                C=d, SLOTS=ring.slots, KEPT=ring.kept, GROUPS=ring.groups, LAG=ring.lag, TURNS=ring.turns, **corrected,
                RAGGED=call.features.key_lengths or call.key_length % rows > 0, ORDERED=ordered,
                FEATURES=dataclasses.replace(
                    call.features, deferred=ring.deferred, late_dp=ring.late_dp, one_loop=sweep.one_loop, heads_in_turn=ordered
                ),
            ), config.WARPS, num_stages=1, registers=config.REGISTERS[ring.groups],
        )
    )  # fmt: skip
    of_rows = dict(ROWS=got["rows_d"], LSE2=made["LSE2"], D_LSE=d_lse, KEY_MEAN=means.mean, COMMON=means.common)
    query = call.launcher.launch(
        Launch(
            one_pass_kernels.scale_queries, query_tiles, dict(SUMS=got["dq_d"], SUMS_R=got["dq_r"], **of_rows),
            dict(sizes, scale=float(call.problem.scale), GROUP=call.query_heads // call.key_heads), dict(D_Q=call.output),
            dict(
                C=d, HAS_D_LSE=d_lse is not None, **corrected,
                FEATURES=dataclasses.replace(call.features, row_means=call.portable.row_means),
            ), config.WARPS, num_stages=1,
        )
    )  # fmt: skip
    return Operands(query["D_Q"], got["DK"], got["DV"])


def _dual_in_one_pass(call: HopperCall, y, cy, tangents, ordered: bool) -> tuple[Operands, Operands]:
    """The gradients of q, k and v, and their tangents."""
    tx, (t_o, mu), (t_d_o, t_d_lse) = tangents
    x, (o, log_sum_exp), (d_o, d_lse), d = call.x, y, cy, call.head_dim
    sweep, ring = call.sweep(by_key=True), config.ONE_PASS_DUAL[call.width]
    tile, rows, floats = dual_kernels.STREAMED.value, GROUP * ring.groups, dual_kernels.FLOATS.value
    query_tiles = call.batch * call.query_heads * triton.cdiv(call.query_length, one_pass_kernels.TILE.value)
    queries = query_tiles * one_pass_kernels.TILE.value  # with those that fill up the last tiles
    sizes = dict(HQ=call.query_heads, LQ=call.query_length)
    has = dict(HAS_D_LSE=d_lse is not None, HAS_TD_LSE=t_d_lse is not None)
    statistic = Output((queries,), "float32")
    made = call.launcher.launch(
        Launch(
            dual_kernels.prepare_dual, query_tiles,
            dict(
                O=o, DO=d_o, TO=t_o, TDO=t_d_o, LSE=log_sum_exp, MU=mu, D_LSE=d_lse, TD_LSE=t_d_lse,
                Q_LENGTHS=x.query_lengths,
            ), sizes,
            dict(
                LSE2=statistic, MU_OUT=statistic, DELTA=statistic, T_DELTA=statistic,
                DQ=Output((queries // tile * floats, 32), "float32"), ROWS=Output((2 * queries,), "float32"),
                COUNTS=Output((queries // tile,), "int32") if ordered else None,
            ), dict(C=d, **has, ORDERED=ordered, FEATURES=call.features), config.WARPS, num_stages=1,
        )
    )  # fmt: skip
    query_ring = call.sweep(by_key=False).ring(config.QUERY_SIDE[call.width, "dual"])
    means = call.portable.key_means(tx.key, call.block_of_means(query_ring, dual=True))
    listed = call.features.tiles.present
    lists = call.portable.tiles(Tile(tile, rows, config.WARPS, 1), by_key=True) if listed else None
    numbers = call.numbers_in_one_pass(sweep, rows)
    of_tile = lambda name: Blocks(made[name], (tile,))
    rows_of = lambda a, n: Rows(a, n, dual_kernels.COLUMNS.value)
    corrected = dict(CORRECTED=call.portable.corrected)
    got = call.launcher.launch(
        Launch(
            dual_kernels.one_pass_dual, numbers["n"],
            dict(
                q_d=rows_of(x.query, tile), k_d=rows_of(x.key, GROUP), v_d=rows_of(x.value, GROUP), do_d=rows_of(d_o, tile),
                tq_d=rows_of(tx.query, tile), tk_d=rows_of(tx.key, GROUP), tv_d=rows_of(tx.value, GROUP),
                tdo_d=rows_of(t_d_o, tile), lse2_d=of_tile("LSE2"), mu_d=of_tile("MU_OUT"), delta_d=of_tile("DELTA"),
                t_delta_d=of_tile("T_DELTA"), **call.portable.selected(True), TILES=lists, COMMON=means.common,
            ), dict(call.scalars, **numbers),
            dict(
                dq_d=InPlace(Blocks(made["DQ"], (floats, 32))), rows_d=InPlace(Blocks(made["ROWS"], (2 * tile,))),
                COUNTS=InPlace(made["COUNTS"]) if ordered else None,
                **dict.fromkeys(("DK", "DV", "TDK", "TDV"), call.key_gradient),
            ),
            dict(
                C=d, SLOTS=ring.slots, KEPT=ring.kept, LAG=ring.lag, **corrected,
                RAGGED=call.features.key_lengths or call.key_length % rows > 0, ORDERED=ordered,
                FEATURES=dataclasses.replace(call.features, one_loop=sweep.one_loop, heads_in_turn=ordered),
            ), config.WARPS, num_stages=1, registers=config.REGISTERS[ring.groups],
        )
    )  # fmt: skip
    query = call.launcher.launch(
        Launch(
            dual_kernels.scale_queries_dual, query_tiles,
            dict(
                SUMS=got["dq_d"], ROWS=got["rows_d"], LSE2=made["LSE2"], D_LSE=d_lse, TD_LSE=t_d_lse, KEY_MEAN=means.mean,
                T_KEY_MEAN=means.t_mean, COMMON=means.common,
            ), dict(sizes, scale=float(call.problem.scale), GROUP=call.query_heads // call.key_heads),
            dict(D_Q=call.output, TD_Q=call.output),
            dict(
                C=d, **has, **corrected,
                FEATURES=dataclasses.replace(call.features, row_means=call.portable.row_means),
            ), config.WARPS, num_stages=1,
        )
    )  # fmt: skip
    return Operands(query["D_Q"], got["DK"], got["DV"]), Operands(query["TD_Q"], got["TDK"], got["TDV"])


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
    given = (*tx[:3], t_d_o)
    if all((*want[:3], *want_tangent[:3])) and all(a is not None for a in given):
        call = HopperCall(launcher, problem, x, dual_kernels.one_pass_dual)
        if sums := call.sweep(by_key=True).in_one_pass(dual=True, deterministic=problem.deterministic):
            return _dual_in_one_pass(call, y, cy, tangents, sums == "in order")
    dual, want, want_tangent = any(want_tangent), Operands(*want), Operands(*want_tangent)
    call = HopperCall(launcher, problem, x, two_sides.backward, lists_counted=not dual)
    query = ((x.query, tx.query), (d_o, t_d_o))
    key = ((x.key, tx.key), (x.value, tx.value))
    by_query, by_key = call.sweep(by_key=False), call.sweep(by_key=True)

    def side(sweep: Sweep, ring: Ring, wanted: Wanted, statistics, makes: bool = False):
        """The outputs of the kernel: DA, DC, TDA, TDC; of the query side also DELTA_OUT and T_DELTA_OUT, and LSE2_OUT if it
        makes the statistics of its rows."""
        row = not sweep.by_key
        resident, streamed = (query, key) if row else (key, query)
        ((a, ta), (c, tc)), ((b, tb), (e, te)) = resident, streamed
        descriptors = call.descriptors(
            a=(a, GROUP), c=(c, GROUP), b=(b, ring.tile), e=(e, ring.tile),
            ta=(ta, GROUP), tc=(tc, GROUP), tb=(tb, ring.tile), te=(te, ring.tile),
            o=(o if makes else None, GROUP), to=(t_o if makes else None, GROUP),
        )  # fmt: skip
        rows_summed = (wanted.a or (wanted.ta and tb is not None)) + wanted.ta if row and call.portable.corrected else 0
        like = call.output if row else call.key_gradient
        return call.run(
            sweep, ring, dict(descriptors, **statistics),
            dict(
                DA=like if wanted.a else None, DC=like if wanted.c else None, TDA=like if wanted.ta else None,
                TDC=like if wanted.tc else None, LSE2_OUT=call.statistic if makes else None,
                DELTA_OUT=call.statistic if row else None, T_DELTA_OUT=call.statistic if row and wanted.ta else None,
            ), (sum(wanted), rows_summed), dict(makes_statistics=makes, row_means=row and call.portable.row_means),
            T=ring.tile, ROW=row,
            HAS_TA=ta is not None, HAS_TB=tb is not None, HAS_TC=tc is not None, HAS_TE=te is not None,
            HAS_D_LSE=row and d_lse is not None, HAS_TD_LSE=row and t_d_lse is not None,
            WANT_A=wanted.a, WANT_C=wanted.c, WANT_TA=wanted.ta, WANT_TC=wanted.tc,
        )  # fmt: skip

    d = call.width
    wanted = Wanted(a=want.query, ta=want_tangent.query)
    ring = by_query.ring(config.QUERY_SIDE[d, wanted.kind])
    pairs = tx.key is not None or tx.value is not None
    if dual:
        few = by_query.length(ring) <= config.STATISTICS_DUAL and not by_query.drifts(ring)
        makes = want_tangent.query and pairs and few
    else:
        makes = want.query and ring.tile >= GROUP  # rows of o in a slot
    if makes:  # of ℓ itself
        rows = RowStatistics(log_sum_exp, None, None)
    else:
        rows = portable.statistics(call.portable, y, cy, ty, tcy, dual)
    statistics = dict(LSE2=rows.lse2, MU=mu, DELTA=rows.delta, T_DELTA=rows.t_delta)
    gradients: dict[str, Any] = {}
    if any(wanted):
        means = call.portable.key_means(tx.key if want_tangent.query else None, call.block_of_means(ring, dual))
        of_rows = dict(D_LSE=d_lse, TD_LSE=t_d_lse, KEY_MEAN=means.mean, T_KEY_MEAN=means.t_mean, COMMON=means.common)
        got = side(by_query, ring, wanted, statistics | of_rows, makes)
        gradients |= dict(query=got["DA"], t_query=got["TDA"])
        statistics["DELTA"] = got["DELTA_OUT"]
        if makes:
            statistics["LSE2"] = got["LSE2_OUT"]
        if want_tangent.query:
            statistics["T_DELTA"] = got["T_DELTA_OUT"]
    of_rows = dict.fromkeys(("D_LSE", "TD_LSE", "KEY_MEAN", "T_KEY_MEAN", "COMMON"))

    def key_side(ring: Ring, wanted: Wanted) -> None:
        got = side(by_key, by_key.ring(ring), wanted, statistics | of_rows)
        results = dict(key=got["DA"], value=got["DC"], t_key=got["TDA"], t_value=got["TDC"])
        gradients.update({name: a for name, a in results.items() if a is not None})

    wanted = Wanted(want.key, want.value, want_tangent.key, want_tangent.value)
    if any(wanted) and (d, wanted.kind) in config.KEY_SIDE:
        key_side(config.KEY_SIDE[d, wanted.kind], wanted)
    else:
        if wanted.c or wanted.tc:
            key_side(config.VALUES[d, wanted.kind], Wanted(c=wanted.c, tc=wanted.tc))
        if wanted.a or wanted.ta:
            key_side(config.KEYS[d, wanted.kind], Wanted(a=wanted.a, ta=wanted.ta))
    found = [Operands(*(gradients.get(prefix + name) for name in ("query", "key", "value"))) for prefix in ("", "t_")]
    return found[0], found[1]
