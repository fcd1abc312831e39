"""The backward in one pass as launches: before the pass, the pass, and dQ of its sums."""

import dataclasses
from typing import Any

import triton

from jax_flash_jvp.kernels.hopper import around_one_pass, config, one_pass
from jax_flash_jvp.kernels.hopper.adding import TILE
from jax_flash_jvp.kernels.hopper.call import HopperCall
from jax_flash_jvp.kernels.hopper.config import GROUP
from jax_flash_jvp.kernels.hopper.products import column_widths
from jax_flash_jvp.kernels.hopper.step_one_pass_dual import FLOATS, STREAMED
from jax_flash_jvp.kernels.launcher import Blocks, InPlace, Launch, Output
from jax_flash_jvp.kernels.portable.tiles import Tile
from jax_flash_jvp.problem import Operands


class InOnePass:
    """The gradients of q, k and v and, if the kernel is the dual one, their tangents."""

    def __init__(self, call: HopperCall, y, cy, tangents, ordered: bool):
        self.call, self.ordered, self.dual = call, ordered, call.kernel is one_pass.one_pass_dual
        (self.o, self.log_sum_exp), (self.d_o, self.d_lse) = y, cy
        self.tx, (self.t_o, self.mu), (self.t_d_o, self.t_d_lse) = tangents
        self.sweep = call.sweep(by_key=True)
        self.ring = self.sweep.ring_of_one_pass(self.dual)
        self.tile = (STREAMED if self.dual else TILE).value
        self.query_tiles = call.batch * call.query_heads * triton.cdiv(call.query_length, TILE.value)
        self.queries = self.query_tiles * TILE.value  # with those that fill up the last tiles
        # rows of 32 floats of a tile that TMA adds at a time, for each part of the columns
        self.floats = [FLOATS.value] if self.dual else [2 * width for width in column_widths(call.head_dim)]
        self.has = dict(HAS_D_LSE=self.d_lse is not None)
        if self.dual:
            self.has["HAS_TD_LSE"] = self.t_d_lse is not None

    def run(self) -> tuple[Operands, Operands]:
        made = self._prepared()
        call, dual = self.call, self.dual
        query_ring = call.sweep(by_key=False).ring(config.QUERY_SIDE[call.width, "dual" if dual else "plain"])
        means = call.portable.key_means(self.tx.key if dual else None, call.block_of_means(query_ring, dual))
        got = self._swept(made, means.common)
        query = self._scaled(made, got, means)
        gradients = Operands(query["D_Q"], got["DK"], got["DV"])
        if not dual:
            return gradients, Operands(None, None, None)
        return gradients, Operands(query["TD_Q"], got["TDK"], got["TDV"])

    def _around(self, kernel, inputs, more_scalars, outputs, **constants) -> dict[str, Any]:
        """A program for each tile of queries."""
        call = self.call
        scalars = dict(HQ=call.query_heads, LQ=call.query_length, **more_scalars)
        constants = dict(constants, C=call.head_dim, **self.has)
        return call.launcher.launch(
            Launch(kernel, self.query_tiles, inputs, scalars, outputs, constants, config.WARPS, num_stages=1)
        )

    def _prepared(self) -> dict[str, Any]:
        """ℓ in base 2, δ and their tangents, and zeros to add to."""
        statistic, (first, *rest) = Output((self.queries,), "float32"), self.floats
        n_tiles = self.queries // self.tile
        sums = lambda floats: Output((n_tiles * floats, 32), "float32")
        inputs = dict(
            O=self.o, DO=self.d_o, LSE=self.log_sum_exp, D_LSE=self.d_lse, Q_LENGTHS=self.call.x.query_lengths
        )
        outputs = dict(
            LSE2=statistic, DELTA=statistic, ROWS=statistic, DQ=sums(first),
            COUNTS=Output((n_tiles,), "int32") if self.ordered else None,
        )  # fmt: skip
        if self.dual:
            inputs |= dict(TO=self.t_o, TDO=self.t_d_o, MU=self.mu, TD_LSE=self.t_d_lse)
            outputs |= dict(MU_OUT=statistic, T_DELTA=statistic, ROWS=Output((2 * self.queries,), "float32"))
        else:
            outputs["DQ_R"] = sums(rest[0]) if rest else None
        kernel = around_one_pass.prepare_dual if self.dual else around_one_pass.prepare
        return self._around(kernel, inputs, {}, outputs, ORDERED=self.ordered, FEATURES=self.call.features)

    def _swept(self, made: dict[str, Any], common) -> dict[str, Any]:
        """Gradients of k and v, and what is added up: dQ and row sums."""
        call, x, ring, tile = self.call, self.call.x, self.ring, self.tile
        rows = GROUP * ring.groups
        numbers = call.numbers_in_one_pass(self.sweep, rows)
        listed = call.features.tiles.present
        lists = call.portable.tiles(Tile(tile, rows, config.WARPS, 1), by_key=True) if listed else None
        of_tile = lambda name: Blocks(made[name], (tile,))
        sums_of = lambda name, floats: InPlace(Blocks(made[name], (floats, 32)))
        arrays = call.descriptors(q=(x.query, tile), k=(x.key, GROUP), v=(x.value, GROUP), do=(self.d_o, tile))
        statistics = dict(lse2_d=of_tile("LSE2"), delta_d=of_tile("DELTA"))
        outputs = dict(
            dq_d=sums_of("DQ", self.floats[0]), rows_d=InPlace(Blocks(made["ROWS"], (tile * (1 + self.dual),))),
            COUNTS=InPlace(made["COUNTS"]) if self.ordered else None, DK=call.key_gradient, DV=call.key_gradient,
        )  # fmt: skip
        features = dataclasses.replace(
            call.features, one_loop=self.sweep.one_loop, heads_in_turn=self.ordered, deferred=ring.deferred, late_dp=ring.late_dp
        )  # fmt: skip
        constants = dict(
            C=call.head_dim, SLOTS=ring.slots, KEPT=ring.kept, GROUPS=ring.groups, LAG=ring.lag,
            CORRECTED=call.portable.corrected, RAGGED=call.features.key_lengths or call.key_length % rows > 0,
            ORDERED=self.ordered,
        )  # fmt: skip
        if self.dual:
            arrays |= call.descriptors(
                tq=(self.tx.query, tile), tk=(self.tx.key, GROUP), tv=(self.tx.value, GROUP), tdo=(self.t_d_o, tile)
            )
            arrays = {name: rows for name, rows in arrays.items() if name.endswith("_d")}  # of one part
            statistics |= dict(mu_d=of_tile("MU_OUT"), t_delta_d=of_tile("T_DELTA"))
            outputs |= dict(TDK=call.key_gradient, TDV=call.key_gradient)
        else:
            outputs["dq_r"] = sums_of("DQ_R", self.floats[-1])
            constants |= dict(TURNS=ring.turns, HELD=ring.held)
        return call.launcher.launch(
            Launch(
                call.kernel, numbers["n"],
                dict(**arrays, **statistics, **call.portable.selected(True), TILES=lists, COMMON=common),
                dict(call.scalars, **numbers), outputs,
                dict(constants, FEATURES=features), config.WARPS, num_stages=1,
                registers=config.REGISTERS[ring.groups].launched,
            )
        )  # fmt: skip

    def _scaled(self, made: dict[str, Any], got: dict[str, Any], means) -> dict[str, Any]:
        """dQ of the sums, corrected."""
        call = self.call
        inputs = dict(
            SUMS=got["dq_d"], ROWS=got["rows_d"], LSE2=made["LSE2"], D_LSE=self.d_lse, KEY_MEAN=means.mean, COMMON=means.common
        )  # fmt: skip
        outputs = dict(D_Q=call.output)
        if self.dual:
            inputs |= dict(TD_LSE=self.t_d_lse, T_KEY_MEAN=means.t_mean)
            outputs["TD_Q"] = call.output
        else:
            inputs["SUMS_R"] = got["dq_r"]
        return self._around(
            around_one_pass.scale_queries_dual if self.dual else around_one_pass.scale_queries, inputs,
            dict(scale=float(call.problem.scale), GROUP=call.query_heads // call.key_heads), outputs,
            CORRECTED=call.portable.corrected,
            FEATURES=dataclasses.replace(call.features, row_means=call.portable.row_means),
        )  # fmt: skip
