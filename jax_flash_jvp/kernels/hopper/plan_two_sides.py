"""The backward in two passes as launches: the query side, then the key side, or two where registers do not hold all sums."""

from typing import Any, NamedTuple

from jax_flash_jvp.kernels.hopper import config
from jax_flash_jvp.kernels.hopper.call import HopperCall
from jax_flash_jvp.kernels.hopper.config import GROUP, Ring
from jax_flash_jvp.kernels.hopper.schedule import Sweep
from jax_flash_jvp.kernels.portable import jobs as portable
from jax_flash_jvp.kernels.portable.jobs import RowStatistics
from jax_flash_jvp.problem import Operands


class Wanted(NamedTuple):
    """Which gradients of a side's resident rows are wanted, and which of their tangents: named as on the key side."""

    k: bool = False
    v: bool = False
    tk: bool = False
    tv: bool = False

    @property
    def kind(self) -> str:
        gradients, tangents = self.k or self.v, self.tk or self.tv
        return "dual" if gradients and tangents else "tangent" if tangents else "plain"


class TwoSides:
    """The wanted gradients of q, k and v, and the wanted tangents of these."""

    def __init__(self, call: HopperCall, y, cy, tangents, want: Operands, want_tangent: Operands):
        self.call, self.want, self.want_tangent = call, want, want_tangent
        self.y, self.cy, (self.tx, self.ty, self.tcy) = y, cy, tangents
        x, tx, d_o, t_d_o = call.x, self.tx, cy[0], self.tcy[0]
        self.of_queries = (x.query, tx.query), (d_o, t_d_o)
        self.of_keys = (x.key, tx.key), (x.value, tx.value)
        self.dual = any(want_tangent)

    def run(self) -> tuple[Operands, Operands]:
        call, want, want_tangent = self.call, self.want, self.want_tangent
        by_query, of_query = call.sweep(by_key=False), Wanted(k=want.query, tk=want_tangent.query)
        ring = by_query.ring(config.QUERY_SIDE[call.width, of_query.kind])
        makes = self._makes_statistics(by_query, ring)
        if makes:  # of ℓ itself
            rows = RowStatistics(self.y[1], None, None)
        else:
            rows = portable.statistics(call.portable, self.y, self.cy, self.ty, self.tcy, self.dual)
        statistics = dict(LSE2=rows.lse2, MU=self.ty[1], DELTA=rows.delta, T_DELTA=rows.t_delta)
        gradients: dict[str, Any] = {}
        if any(of_query):
            got = self._query_side(by_query, ring, of_query, statistics, makes)
            gradients |= dict(query=got["DK"], t_query=got["TDK"])
            statistics["DELTA"] = got["DELTA_OUT"]
            if makes:
                statistics["LSE2"] = got["LSE2_OUT"]
            if want_tangent.query:
                statistics["T_DELTA"] = got["T_DELTA_OUT"]
        gradients |= self._key_sides(Wanted(want.key, want.value, want_tangent.key, want_tangent.value), statistics)
        one, other = (
            Operands(*(gradients.get(prefix + name) for name in ("query", "key", "value"))) for prefix in ("", "t_")
        )
        return one, other

    def _makes_statistics(self, by_query: Sweep, ring: Ring) -> bool:
        """Does the query side make those of its rows?"""
        if not self.dual:
            return self.want.query and ring.tile >= GROUP  # rows of o in a slot
        pairs = self.tx.key is not None or self.tx.value is not None
        few = by_query.length(ring) <= config.STATISTICS_DUAL and not by_query.drifts(ring)
        return self.want_tangent.query and pairs and few

    def _query_side(self, by_query: Sweep, ring: Ring, wanted: Wanted, statistics, makes: bool) -> dict[str, Any]:
        call, (_, d_lse), (_, t_d_lse) = self.call, self.cy, self.tcy
        means = call.portable.key_means(
            self.tx.key if self.want_tangent.query else None, call.block_of_means(ring, self.dual)
        )
        more = dict(D_LSE=d_lse, TD_LSE=t_d_lse, KEY_MEAN=means.mean, T_KEY_MEAN=means.t_mean, COMMON=means.common)
        return self._side(by_query, ring, wanted, statistics | more, makes)

    def _key_sides(self, wanted: Wanted, statistics) -> dict[str, Any]:
        """Gradients of keys and values by name, of one launch or of one for each."""
        width, by_key = self.call.width, self.call.sweep(by_key=True)
        statistics = statistics | dict.fromkeys(("D_LSE", "TD_LSE", "KEY_MEAN", "T_KEY_MEAN", "COMMON"))
        if any(wanted) and (width, wanted.kind) in config.KEY_SIDE:
            launches = [(config.KEY_SIDE, wanted)]
        else:
            launches = [
                (config.VALUES, Wanted(v=wanted.v, tv=wanted.tv)),
                (config.KEYS, Wanted(k=wanted.k, tk=wanted.tk)),
            ]
        gradients: dict[str, Any] = {}
        for table, some in launches:
            if any(some):
                got = self._side(by_key, by_key.ring(table[width, wanted.kind]), some, statistics)
                results = dict(key=got["DK"], value=got["DV"], t_key=got["TDK"], t_value=got["TDV"])
                gradients |= {name: a for name, a in results.items() if a is not None}
        return gradients

    def _side(self, sweep: Sweep, ring: Ring, wanted: Wanted, statistics, makes: bool = False) -> dict[str, Any]:
        """The outputs of the kernel: DK, DV, TDK, TDV; of the query side also DELTA_OUT and T_DELTA_OUT, and LSE2_OUT if it
        makes the statistics of its rows."""
        call, row, (_, d_lse), (_, t_d_lse) = self.call, not sweep.by_key, self.cy, self.tcy
        resident, streamed = (self.of_queries, self.of_keys) if row else (self.of_keys, self.of_queries)
        ((k, tk), (v, tv)), ((q, tq), (do, tdo)) = resident, streamed
        descriptors = call.descriptors(
            k=(k, GROUP), v=(v, GROUP), q=(q, ring.tile), do=(do, ring.tile),
            tk=(tk, GROUP), tv=(tv, GROUP), tq=(tq, ring.tile), tdo=(tdo, ring.tile),
            o=(self.y[0] if makes else None, GROUP), to=(self.ty[0] if makes else None, GROUP),
        )  # fmt: skip
        rows_summed = (wanted.k or (wanted.tk and tq is not None)) + wanted.tk if row and call.portable.corrected else 0
        like = call.output if row else call.key_gradient
        return call.run(
            sweep, ring, dict(descriptors, **statistics),
            dict(
                DK=like if wanted.k else None, DV=like if wanted.v else None, TDK=like if wanted.tk else None,
                TDV=like if wanted.tv else None, LSE2_OUT=call.statistic if makes else None,
                DELTA_OUT=call.statistic if row else None, T_DELTA_OUT=call.statistic if row and wanted.tk else None,
            ), (sum(wanted), rows_summed), dict(makes_statistics=makes, row_means=row and call.portable.row_means),
            T=ring.tile, ROW=row,
            HAS_TK=tk is not None, HAS_TQ=tq is not None, HAS_TV=tv is not None, HAS_TDO=tdo is not None,
            HAS_D_LSE=row and d_lse is not None, HAS_TD_LSE=row and t_d_lse is not None,
            WANT_K=wanted.k, WANT_V=wanted.v, WANT_TK=wanted.tk, WANT_TV=wanted.tv,
        )  # fmt: skip
