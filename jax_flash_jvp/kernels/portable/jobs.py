"""The jobs of attention as launches of the portable kernels, for whichever framework brings a `Launcher`.

Arrays have the layout of `problem.py` with one batch axis; queries, keys and values may be strided (their last axis
contiguous), a tangent has its primal's strides, everything else is contiguous.  What a call uses beyond plain attention is
named in `features`; a kernel compiles that alone.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import triton

from jax_flash_jvp.kernels.features import Axes, Features
from jax_flash_jvp.kernels.launcher import Launch, Launcher, Output
from jax_flash_jvp.kernels.portable import backward as backward_kernels
from jax_flash_jvp.kernels.portable import bias as bias_kernels
from jax_flash_jvp.kernels.portable import forward as forward_kernels
from jax_flash_jvp.kernels.portable import means as mean_kernels
from jax_flash_jvp.kernels.portable import one_tile, shares, visibility
from jax_flash_jvp.kernels.portable.scores import UNROUNDED
from jax_flash_jvp.kernels.portable.tiles import (
    FEW,
    Tile,
    accumulators,
    fitted,
    for_few,
    halved,
    least_rows,
    lighter,
    product,
    short,
    tile,
)
from jax_flash_jvp.problem import DIFFERENTIABLE, Operands, Problem, dtype_of

ALIGNED = 16  # elements; what Triton makes use of
ROW_MEANS_FROM = (
    1024  # keys, where every query sees every one: a mean key of each row costs little there, and sums are longer
)
# With so few queries, or keys, a kernel rounds what it reads to TF32: of what there is more of, hardly any is read twice.
READ_ONCE = 64
# The plain forward does so with any number, of so many channels, on sm_90: 0.7 to 0.9 of the time; of 32 and 72 channels 1.2 to
# 1.4, the backward 1.0 to 1.1.  H200, 2026-11-29, L = 197 to 4096.
ROUNDS_IN_FORWARD = range(33, 65)
LOOP = 64  # queries and keys, above which kernels go through several tiles
KEY_PROGRAMS, LEAST_KEYS = 2, 256  # where keys are divided, programs for each multiprocessor, and keys of each
# The most rows that several queries of several heads may be together: 0.36 to 0.65 of the time of each head alone.  Of float32 as
# many as `for_few` takes: with more the duals of wide heads spill.  H200, 2026-11-29.
MOST_HEAD_ROWS, MOST_HEAD_ROWS_OF_FLOAT32 = 64, FEW // 2
SCORE_PROGRAMS = 8  # of the gradient of a bias, for each multiprocessor, which runs two to four at a time


def axes_of(array: Any, query_heads: int, key_heads: int) -> Axes:
    """The axes of an array [1|B, 1|K|N, 1|T, 1|S, …], or of None."""
    if array is None:
        return Axes()
    b, h, t, s = array.shape[:4]
    by_query_head = h == query_heads > 1
    return Axes(
        present=True, batch=b > 1, heads=by_query_head, groups=not by_query_head and h == key_heads > 1, rows=t > 1,
        columns=s > 1,
    )  # fmt: skip


def features(problem: Problem, x: Operands) -> Features:
    (batch, queries, query_heads, _), (_, keys, key_heads, _) = x.query.shape, x.key.shape
    left, right = problem.reach(queries, keys)
    mask = axes_of(x.mask, query_heads, key_heads)
    if problem.mask_block is not None:  # which is packed, however few blocks there are
        mask = dataclasses.replace(mask, rows=True, columns=True)
    ranges, bias = (axes_of(a, query_heads, key_heads) for a in (x.key_ranges, x.bias))
    if problem.partial and bias.present and keys == 1:  # of several, along which it may vary
        bias = dataclasses.replace(bias, columns=True)
    listed = any(a is not None for a in (x.mask, x.query_segments, x.key_ranges))
    by_batch = batch > 1 and any(a is not None for a in (x.query_segments, x.query_lengths, x.key_lengths))
    by_head = mask.heads or ranges.heads
    mask_rows, mask_columns = problem.mask_block or (1, 1)
    return Features(
        left=left is not None, right=right is not None, cap=problem.soft_cap is not None,
        query_lengths=x.query_lengths is not None, key_lengths=x.key_lengths is not None,
        segments=x.query_segments is not None, dropout=x.seed is not None, partial=problem.partial,
        queries_aligned=queries % ALIGNED == 0, keys_aligned=keys % ALIGNED == 0,
        bias=bias, mask=mask, mask_rows=mask_rows, mask_columns=mask_columns,
        mask_pages=x.mask_pages is not None, ranges=ranges,
        intervals=0 if x.key_ranges is None else x.key_ranges.shape[3],
        tiles=Axes(
            present=listed, batch=listed and (mask.batch or ranges.batch or by_batch), heads=by_head,
            groups=not by_head and (mask.groups or ranges.groups),
        ),
    )  # fmt: skip


def rows_of_head(x: Operands, features: Features) -> int:
    """How many rows of a block each query head has, where those that share a head of keys are the rows of one, else 0.  Their
    queries are few, and what a query sees follows from its position."""
    (_, queries, heads, _), key_heads = x.query.shape, x.key.shape[2]
    most = MOST_HEAD_ROWS if dtype_of(x.query) != "float32" else MOST_HEAD_ROWS_OF_FLOAT32
    apart = features.bias.heads or features.mask.heads or features.dropout
    by_query = features.segments or features.ranges.present or features.mask.matrix
    if queries > 1:
        by_query |= features.bias.rows or features.mask.rows or features.query_lengths
    few = queries == 1 or queries * heads <= most * key_heads
    return queries if few and heads > key_heads and not (apart or by_query) else 0


class KeyMeans(NamedTuple):
    """The mean key of each head of keys, or of each row of scores."""

    mean: Any
    t_mean: Any  # of the tangents; None without these
    common: Any  # of each head of keys: have they, or their tangents, much in common?


class RowStatistics(NamedTuple):
    """Statistics of each row of scores."""

    lse2: Any  # ℓ in base 2
    delta: Any
    t_delta: Any  # None without tangents


class PortableCall:
    """What the launches of one call share."""

    def __init__(self, launcher: Launcher, problem: Problem, x: Operands, word: int = 16, plain_forward: bool = False):
        self.launcher, self.problem = launcher, problem
        self.dtype = dtype_of(x.query)
        self.widest = max(x.query.shape[-1], x.value.shape[-1])
        self.precision = product(self.dtype, problem.precision, self.widest, launcher.target)
        once = min(x.query.shape[1], x.key.shape[1]) <= READ_ONCE
        once |= plain_forward and launcher.target == 90 and self.widest in ROUNDS_IN_FORWARD
        if once and self.dtype == "float32" and self.precision == "tf32":
            self.precision = UNROUNDED.value
        self.x = x = x._replace(**dict(zip(("query", "key", "value"), self.rounded(x[:3]), strict=True)))
        self.batch, self.query_length, self.query_heads, self.head_dim = x.query.shape
        _, self.key_length, self.key_heads, self.value_dim = x.value.shape
        self.features = features(problem, x)
        self.statistic = Output((self.batch, self.query_heads, self.query_length), "float32")
        dtype = self.result_dtype(x.query)
        self.output = Output((self.batch, self.query_length, self.query_heads, self.value_dim), dtype)
        self.query_gradient = Output(tuple(x.query.shape), dtype)
        self.key_gradient, self.value_gradient = (Output(tuple(a.shape), dtype) for a in (x.key, x.value))
        left, right = problem.reach(self.query_length, self.key_length)
        strides = [self._batch_sequence_head(a) for a in x[:3]]
        if word == 16 and (rows := rows_of_head(x, self.features)):  # those for Hopper have rows of their own
            heads, self.query_heads = self.query_heads // self.key_heads, self.key_heads
            self.query_length = heads * rows
            if rows == 1:
                strides[0] = (strides[0][0], strides[0][2], heads * strides[0][2])
            aligned = self.query_length % ALIGNED == 0
            self.features = dataclasses.replace(self.features, rows_of_head=rows, queries_aligned=aligned)
        units = [math.gcd(ALIGNED, batch, head) for batch, _, head in strides]
        group = self.query_heads // self.key_heads
        self.sizes = dict(HQ=self.query_heads, GROUP=group, LQ=self.query_length, LK=self.key_length)
        self.reach = dict(left=left or 0, right=right or 0)
        self.scalars: dict[str, int | float] = dict(
            scale=float(problem.scale), cap=float(problem.soft_cap or 0), rate=float(problem.dropout_rate), **self.sizes,
            **self.reach,
        )  # fmt: skip
        row_means_pay = not self.features.sees_all or self.key_length >= ROW_MEANS_FROM
        self.row_means = row_means_pay and self.dtype != "float32" and not problem.partial
        self.of_means = dataclasses.replace(self.features, row_means=self.row_means)  # for kernels that know of them
        self.bias = self.padded(x.bias)
        self.selection = dict(
            MASK=x.mask, BLOCKS=None if x.mask_pages is None else x.mask, Q_LENGTHS=x.query_lengths, K_LENGTHS=x.key_lengths,
            Q_SEGMENTS=x.query_segments, K_SEGMENTS=x.key_segments, RANGES=x.key_ranges,
        )  # fmt: skip
        self.word = word  # its bits
        self.packed: dict[bool, Any] = {}  # the mask, by query or by key
        self.listed: dict[tuple[int, int, bool], Any] = {}  # tiles, by their shape and by query or by key
        self.value_constants = dict(DV=self.value_dim)
        self.constants = dict(
            self.value_constants, D=self.head_dim, FEATURES=self.features,
            PRECISION=self.precision,
        )  # fmt: skip
        for name, (batch, sequence, head), unit in zip("qkv", strides, units, strict=True):
            self.scalars.update({f"s_{name}b": batch // unit, f"s_{name}h": head // unit})
            self.constants.update({f"s_{name}": sequence, f"UNIT_{name.upper()}": unit})

    def result_dtype(self, array: Any) -> str:
        """The dtype of a result that is like this array."""
        return "float32" if self.problem.partial else dtype_of(array)

    def _batch_sequence_head(self, array: Any) -> tuple[int, ...]:
        """Strides, of which a stride of an axis of length one is arbitrary and must not spoil their common divisor."""
        return tuple(0 if n == 1 else s for n, s in zip(array.shape[:3], self.launcher.strides(array)[:3], strict=True))

    def rounded(self, arrays) -> tuple:
        """The arrays as operands of products.  Tensor cores would cut float32 down to TF32, towards zero."""
        if self.precision != "tf32" or self.dtype != "float32":
            return tuple(arrays)
        return tuple(None if a is None else self.launcher.round_to_tf32(a) for a in arrays)

    def padded(self, matrix: Any) -> Any:
        """A bias, the rows of a matrix [T, S] filled up, so that several elements are read at a time."""
        if matrix is None or not self.features.bias.matrix or matrix.shape[3] % ALIGNED == 0:
            return matrix
        return self.launcher.padded(matrix, -matrix.shape[3] % ALIGNED)

    def tile(self, job: str) -> Tile:
        target = self.launcher.target
        found = tile(job, self.widest, self.dtype, self.problem.precision, target)
        if self.features.bias.present or self.features.dropout or self.features.cap:
            several = min(self.query_length, self.key_length) > LOOP and not self.features.tiles.present
            found = lighter(found, job, self.widest, self.dtype, target, several)
        if self.features.tiles.present:
            found = short(found, job, self.widest, self.dtype, target)
        most = FEW if self.dtype != "float32" else FEW // 2
        few = self.query_length <= most and self.key_length > 64 and target != "interpret"
        least = least_rows(job, self.dtype, self.precision, self.widest, target)
        if few and self.precision != "ieee" and not job.startswith("score"):  # whose products are unrolled
            return for_few(found, job, self.query_length, self.key_length, self.widest, self.dtype, least)
        found = fitted(found, job, self.query_length, self.key_length, least)
        return found if job.startswith("score") else self.filling(found, job)

    def filling(self, tile: Tile, job: str) -> Tile:
        """The tile, `halved` where each of so many programs still has a multiprocessor of its own.  Where keys are divided, each
        share has its programs."""
        by_key = job.startswith(("key", "value"))
        programs = self.key_programs if by_key else self.query_programs
        n_shares = 1 if by_key else self.key_shares(job, programs(tile))
        of_fewer = halved(tile, job, self.widest, self.dtype)
        return of_fewer if programs(of_fewer) * n_shares <= shares.multiprocessors(self.launcher) else tile

    def run(
        self,
        kernel: Any,
        tile: Tile,
        programs: int,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Output | None],
        tx: Operands,
        by_key: bool = False,
        n_shares: int | None = None,
        **constants: Any,
    ) -> dict[str, Any]:
        """The outputs of a kernel that goes through tiles; `n_shares`, of one that knows of these, float32 [n_shares, …] of
        several."""
        scalars = self.scalars
        if n_shares is not None:
            scalars = dict(scalars, n_shares=n_shares)
        if n_shares is not None and n_shares > 1:
            programs *= n_shares
            constants["FEATURES"] = dataclasses.replace(constants.get("FEATURES", self.features), key_shares=True)
            outputs = {name: o and Output((n_shares, *o.shape), "float32") for name, o in outputs.items()}
        length, block = (self.query_length, tile.block_m) if by_key else (self.key_length, tile.block_n)
        ragged = bool(length % block) or self.features.lengths
        selected, tiles = self.selected(by_key), self.tiles(tile, by_key)
        return self.launcher.launch(
            Launch(
                kernel, programs,
                dict(inputs, BIAS=self.bias, TBIAS=tx.bias, **selected, SEED=self.x.seed, TILES=tiles), scalars, outputs,
                dict(self.constants, BM=tile.block_m, BN=tile.block_n, RAGGED=ragged, **has_tangents(tx)) | constants,
                tile.num_warps, tile.num_stages, tile.registers,
            )
        )  # fmt: skip

    def selected(self, by_key: bool) -> dict[str, Any]:
        """`selection`, of a mask with rows and columns the bits."""
        if not self.features.mask.matrix:
            return self.selection
        if by_key not in self.packed:
            self.packed[by_key] = self._pack(by_key)
        return self.selection | dict(MASK=self.packed[by_key])

    def _pack(self, by_key: bool) -> Any:
        mask, features, sizes = self.x.mask, self.features, (self.query_length, self.key_length)
        if self.x.mask_pages is not None:
            mask, features = self.x.mask_pages, dataclasses.replace(features, mask_rows=1, mask_columns=1)
            sizes = mask.shape[3:]
        queries, keys = sizes
        if by_key:
            columns, n_m, n_n = queries, queries, triton.cdiv(keys, features.mask_columns)
        else:
            columns, n_m, n_n = keys, triton.cdiv(queries, features.mask_rows), keys
        block_m, block_n = (4 * self.word, 1024 // self.word) if by_key else (16, 256)
        matrices, words = math.prod(mask.shape[:-2]), visibility.words.fn(columns, self.word)
        launch = Launch(
            visibility.pack, matrices * triton.cdiv(n_m, block_m) * triton.cdiv(n_n, block_n), dict(MASK=mask),
            dict(LQ=queries, LK=keys),
            dict(BITS=Output((matrices, n_n if by_key else n_m, words), f"int{self.word}")),
            dict(BM=block_m, BN=block_n, BY_KEY=by_key, FEATURES=features), num_warps=1, num_stages=1,
        )  # fmt: skip
        return self.launcher.launch(launch)["BITS"]

    def tiles(self, tile: Tile, by_key: bool) -> Any:
        """The list of the tiles in which a mask, segments or ranges leave something to see; None without these."""
        if not self.features.tiles.present:
            return None
        shape = (tile.block_m, tile.block_n, by_key)
        if shape not in self.listed:
            self.listed[shape] = self._list_tiles(tile, by_key)
        return self.listed[shape]

    def _list_tiles(self, tile: Tile, by_key: bool) -> Any:
        by = self.features.tiles
        batch = self.batch if by.batch else 1
        heads = self.query_heads if by.heads else self.key_heads if by.groups else 1
        blocks = (triton.cdiv(self.query_length, tile.block_m), triton.cdiv(self.key_length, tile.block_n))
        n_blocks, n_tiles = reversed(blocks) if by_key else blocks
        classes = self.features.tile_classes
        if batch * heads * n_blocks * (n_tiles + classes) >= 2**31:
            raise NotImplementedError("lists of tiles for so many scores would hold more than 2³¹ numbers")
        sizes = dict(self.sizes, **self.reach, heads=heads)
        of_tiles = dict(BM=tile.block_m, BN=tile.block_n, BY_KEY=by_key, FEATURES=self.features)
        lists = dict(TILES=Output((batch, heads, n_blocks, n_tiles + classes), "int32"))
        if self.few_tiles(n_tiles):
            both = Launch(
                visibility.list_few_tiles, batch * heads * n_blocks, self.selected(by_key), sizes, lists, of_tiles,
                num_warps=4 if self.features.ranges.present else 1, num_stages=1,
            )  # fmt: skip
            return self.launcher.launch(both)["TILES"]
        look = Launch(
            visibility.look_at_tiles, batch * heads * n_blocks * n_tiles, self.selected(by_key), sizes,
            dict(SEEN=Output((batch, heads, n_blocks, n_tiles), "int32")), of_tiles, num_warps=4, num_stages=1,
            registers=40 if self.features.ranges.present else 80,  # of which most calls need so few
        )  # fmt: skip
        listing = Launch(
            visibility.list_tiles, batch * heads * n_blocks, self.launcher.launch(look), dict(n_tiles=n_tiles), lists,
            dict(CHUNK=256, CLASSES=classes), num_warps=1, num_stages=1,
        )  # fmt: skip
        return self.launcher.launch(listing)["TILES"]

    def few_tiles(self, n_tiles: int) -> bool:
        """Does one program look at all tiles of a block?  At tiles of ranges that are seen in part it looks twice; those of a
        packed mask take longer to read."""
        each = 2 if self.features.ranges.present else 1
        return each * n_tiles <= visibility.MOST_TILES.value and not self.features.mask.matrix

    @property
    def corrected(self) -> bool:
        """Is the excess of row sums taken off?  In float32 only where that costs next to nothing; of a part of the keys
        nobody knows what rows sum to."""
        return self.features.sees_all or self.row_means

    def key_means(self, t_key: Any, tile: Tile) -> KeyMeans:
        """The mean of every so many keys of a head, 512 at most, or of each row, in blocks like `tile`."""
        if not self.corrected:
            return KeyMeans(None, None, None)
        of_heads = not self.row_means
        heads = (self.batch, self.key_heads)
        mean = Output((*heads, self.head_dim), "float32") if of_heads else None
        step = max(1, min(8, self.key_length // 32), self.key_length // 512)
        # a quarter of the keys that are read at a time, if registers hold so many; one warp has nobody to wait for
        warps = 1 if self.key_length <= 512 else min(16, max(4, triton.next_power_of_2(self.key_length // step // 32)))
        block = min(8 * warps, 8192 // triton.next_power_of_2(self.head_dim))
        names = ("D", "DV", "s_k", "s_v", "UNIT_K", "UNIT_V")
        strides = {name: self.scalars[name] for name in ("s_kb", "s_kh", "s_vb", "s_vh")}
        launch = Launch(
            mean_kernels.key_means, self.batch * self.key_heads,
            dict(K=self.x.key, TK=t_key, V=None if of_heads else self.x.value, K_LENGTHS=self.x.key_lengths),
            dict(HK=self.key_heads, LK=self.key_length, step=step, **strides),
            dict(MEAN=mean, T_MEAN=None if t_key is None else mean, COMMON=Output(heads, "int32")),
            dict(
                {name: self.constants[name] for name in names}, FEATURES=self.of_means, BN=block,
                HAS_TK=t_key is not None,
            ), num_warps=warps, num_stages=1,
        )  # fmt: skip
        got = self.launcher.launch(launch)
        common = got["COMMON"]
        if not of_heads:
            got = self.run(
                mean_kernels.row_means, tile, self.query_programs(tile),
                dict(Q=self.x.query, K=self.x.key, TK=t_key, COMMON=common),
                dict(MEAN=self.query_gradient, T_MEAN=None if t_key is None else self.query_gradient),
                NO_TANGENT._replace(key=t_key),
            )  # fmt: skip
        return KeyMeans(got["MEAN"], got["T_MEAN"], common)

    def shares(self, programs: int, each: int, steps: int, least: int, floats: int) -> int:
        """See `shares.number`; they take no more memory than the operands."""
        size = 4 if self.dtype == "float32" else 2
        operands = size * sum(math.prod(a.shape) for a in self.x[:3])
        return shares.number(self.launcher, programs, each, steps, least, floats, operands)

    def key_shares(self, job: str, programs: int) -> int:
        """Among which the keys of a block of queries are divided."""
        forward = job.startswith("forward")
        if not forward and self.corrected and self.features.cap:
            return 1  # under a cap the excess of row sums is not linear in the shares
        output = self.output if forward else self.query_gradient
        floats = (1 + job.endswith("dual")) * math.prod(output.shape)
        return self.shares(programs, KEY_PROGRAMS, self.key_length, LEAST_KEYS, floats)

    def query_programs(self, tile: Tile) -> int:
        return triton.cdiv(self.query_length, tile.block_m) * self.batch * self.query_heads

    def key_programs(self, tile: Tile) -> int:
        return triton.cdiv(self.key_length, tile.block_n) * self.batch * self.key_heads


def has_tangents(tx: Operands) -> dict[str, bool]:
    return dict(
        HAS_TQ=tx.query is not None, HAS_TK=tx.key is not None, HAS_TV=tx.value is not None, HAS_TBIAS=tx.bias is not None
    )  # fmt: skip


NO_TANGENT = Operands(None, None, None)


def forward(launcher: Launcher, problem: Problem, x: Operands, tx: Operands = NO_TANGENT):
    """(o, ℓ, ȯ, μ); the last two None without tangents."""
    return _forward(PortableCall(launcher, problem, x, plain_forward=all(t is None for t in tx)), tx)


def tangent(launcher: Launcher, problem: Problem, x: Operands, log_sum_exp, tx: Operands):
    """(ȯ, μ), linear in tx, from the saved ℓ."""
    _, _, t_o, mu = _forward(PortableCall(launcher, problem, x), tx, log_sum_exp)
    return t_o, mu


def _forward(call: PortableCall, tx: Operands, saved=None):
    dual, linear = any(t is not None for t in tx), saved is not None
    tx = tx._replace(bias=call.padded(tx.bias))
    t_q, t_k, t_v = call.rounded(tx[:3])
    job = "forward_dual" if dual else "forward"
    tile = call.tile(job)
    programs = call.query_programs(tile)
    n_shares = call.key_shares(job, programs)
    outputs = dict(
        O=None if linear else call.output, LSE=None if linear else call.statistic,
        TO=call.output if dual else None, MU=call.statistic if dual else None,
    )  # fmt: skip
    got = call.run(
        forward_kernels.forward, tile, programs,
        dict(Q=call.x.query, K=call.x.key, V=call.x.value, TQ=t_q, TK=t_k, TV=t_v, SAVED=saved),
        outputs if n_shares == 1 else dict(outputs, O=call.output, LSE=call.statistic), tx, n_shares=n_shares,
        NEGATIVE=call.problem.scale < 0, LINEAR=linear,
    )  # fmt: skip
    if n_shares > 1:
        got = shares.merged(call.launcher, got, outputs)
    return got["O"], got["LSE"], got["TO"], got["MU"]


def backward(launcher: Launcher, problem: Problem, x: Operands, y, cy, want) -> Operands:
    """The wanted gradients of (q, k, v, bias), for y = (o, ℓ) and its cotangents cy, either of which may be None."""
    call = PortableCall(launcher, problem, x)
    return _backward(call, y, cy, NO_TANGENT, (None, None), (None, None), want, (False,) * DIFFERENTIABLE)[0]


def backward_dual(launcher: Launcher, problem: Problem, x: Operands, y, cy, tangents, want, want_tangent):
    """(the wanted gradients, the wanted tangents of the gradients) along tangents = (tx, ty, tcy)."""
    tx, ty, tcy = tangents
    return _backward(PortableCall(launcher, problem, x), y, cy, tx, ty, tcy, want, want_tangent)


def _backward(call: PortableCall, y, cy, tx: Operands, ty, tcy, want, want_tangent):
    (_, log_sum_exp), (d_o, d_lse), (t_d_o, t_d_lse) = y, cy, tcy
    want, want_tangent = Operands(*want), Operands(*want_tangent)
    tx = tx._replace(bias=call.padded(tx.bias))
    t_q, t_k, t_v, d_o, t_d_o = call.rounded((*tx[:3], d_o, t_d_o))
    inputs = dict(Q=call.x.query, K=call.x.key, V=call.x.value, TQ=t_q, TK=t_k, TV=t_v, DO=d_o, TDO=t_d_o, MU=ty[1])
    if one_tile.serves(call, d_o, any(want_tangent)):
        got = one_tile.backward(call, inputs, (d_lse, t_d_lse), tx, want, want_tangent)
        inputs |= {name: got.get(name) for name in ("LSE2", "DELTA", "T_DELTA")}
    else:
        got = _two_sides(
            call, inputs, statistics(call, y, cy, ty, tcy, any(want_tangent)), (d_lse, t_d_lse), tx, want, want_tangent
        )
    if (want.bias or want_tangent.bias) and not got.keys() & {"D_BIAS", "TD_BIAS"}:
        has = dict(HAS_DO=d_o is not None, HAS_TDO=t_d_o is not None)
        got |= _bias_gradients(call, inputs, tx, want.bias, want_tangent.bias, has, log_sum_exp, d_lse, t_d_lse)
    gradients = Operands(*(got.get(name) for name in ("D_Q", "D_K", "D_V", "D_BIAS")))
    return gradients, Operands(*(got.get(name) for name in ("TD_Q", "TD_K", "TD_V", "TD_BIAS")))


def _two_sides(
    call: PortableCall, inputs: dict[str, Any], rows: RowStatistics, of_lse, tx: Operands, want: Operands, want_tangent: Operands
) -> dict[str, Any]:  # fmt: skip
    """The gradients of queries, keys and values, by the query side and the key side.  To the inputs come statistics of rows."""
    d_lse, t_d_lse = of_lse
    inputs |= dict(LSE2=rows.lse2, DELTA=rows.delta, T_DELTA=rows.t_delta)
    has = dict(HAS_DO=inputs["DO"] is not None, HAS_TDO=inputs["TDO"] is not None)
    dual = any(want_tangent)
    suffix = "_dual" if dual else ""
    got: dict[str, Any] = {}
    if want.query or want_tangent.query:  # first, for it makes δ and δ̇ more exact
        job = "query_side" + suffix
        tile = call.tile(job)
        means, programs = call.key_means(inputs["TK"] if want_tangent.query else None, tile), call.query_programs(tile)
        n_shares = call.key_shares(job, programs)
        got = call.run(
            backward_kernels.query_side, tile, programs,
            dict(inputs, D_LSE=d_lse, TD_LSE=t_d_lse, KEY_MEAN=means.mean, T_KEY_MEAN=means.t_mean, COMMON=means.common),
            dict(
                D_Q=call.query_gradient if want.query else None, TD_Q=call.query_gradient if want_tangent.query else None,
                DELTA_OUT=call.statistic, T_DELTA_OUT=call.statistic if want_tangent.query else None,
            ), tx, n_shares=n_shares, WANT_Q=want.query, WANT_TQ=want_tangent.query, CORRECTED=call.corrected,
            FEATURES=call.of_means,
            HAS_D_LSE=d_lse is not None, HAS_TD_LSE=t_d_lse is not None, **has,
        )  # fmt: skip
        if n_shares > 1:
            dtypes = dict.fromkeys(("D_Q", "TD_Q"), call.query_gradient.dtype)
            got = {
                name: a if a is None else shares.added(call.launcher, a, dtypes.get(name, "float32"))
                for name, a in got.items()
            }
        inputs["DELTA"] = got["DELTA_OUT"]
        if want_tangent.query:
            inputs["T_DELTA"] = got["T_DELTA_OUT"]
    for wanted in _key_passes(call, want, want_tangent):
        values_alone = not (wanted["WANT_K"] or wanted["WANT_TK"])
        tile = call.tile(("value_side" if dual and values_alone else "key_side") + suffix)
        outputs = dict(
            D_K=call.key_gradient if wanted["WANT_K"] else None, D_V=call.value_gradient if wanted["WANT_V"] else None,
            TD_K=call.key_gradient if wanted["WANT_TK"] else None, TD_V=call.value_gradient if wanted["WANT_TV"] else None,
        )  # fmt: skip
        results = call.run(
            backward_kernels.key_side, tile, call.key_programs(tile), inputs, outputs, tx, by_key=True, **wanted, **has
        )
        got |= {name: a for name, a in results.items() if a is not None}
    return got


def _bias_gradients(
    call: PortableCall, inputs: Mapping[str, Any], tx: Operands, want: bool, want_tangent: bool, has, log_sum_exp, d_lse, t_d_lse
) -> dict[str, Any]:  # fmt: skip
    """The gradient of the bias, D_BIAS, and its tangent, TD_BIAS, as far as they are wanted."""
    bias, dtype, wanted = call.x.bias, call.result_dtype(call.x.bias), dict(D_BIAS=want, TD_BIAS=want_tangent)
    by_row = call.features.bias.rows
    if not call.features.bias.columns:
        cotangents = dict(D_BIAS=d_lse, TD_BIAS=t_d_lse)
        rows = {name: _row_sums(call, log_sum_exp, cotangents[name]) for name, w in wanted.items() if w}
        return {name: call.launcher.summed(a, False, bias.shape, dtype) for name, a in rows.items()}
    tile = call.tile("score_side_dual" if want_tangent else "score_side")
    if by_row:
        shape, of_sums = tuple(bias.shape), dtype
        shared = dict(n_b=call.batch // bias.shape[0], n_h=call.query_heads // bias.shape[1])
    else:
        shape, of_sums, shared = (call.batch, call.query_heads, call.key_length), "float32", dict(n_b=1, n_h=1)
    blocks = triton.cdiv(call.query_length, tile.block_m)
    programs = triton.cdiv(call.key_length, tile.block_n) * shape[0] * shape[1] * (blocks if by_row else 1)
    steps = shared["n_b"] * shared["n_h"] if by_row else blocks
    n_shares = call.shares(programs, SCORE_PROGRAMS, steps, 1, math.prod(shape))
    if n_shares > 1:
        shape, of_sums = (n_shares, *shape), "float32"
    launch = Launch(
        bias_kernels.score_side, n_shares * programs,
        dict(inputs, BIAS=call.bias, TBIAS=tx.bias, **call.selected(False), SEED=call.x.seed),
        dict(call.scalars, **shared, n_shares=n_shares),
        {name: Output(shape, of_sums) if w else None for name, w in wanted.items()},
        dict(
            call.constants, BM=tile.block_m, BN=tile.block_n, WANT=want, WANT_T=want_tangent, **has_tangents(tx), **has
        ), tile.num_warps, tile.num_stages,
    )  # fmt: skip
    got = {name: a for name, a in call.launcher.launch(launch).items() if a is not None}
    if n_shares > 1:
        got = {name: shares.added(call.launcher, a, dtype if by_row else "float32") for name, a in got.items()}
    if by_row:
        return got
    return {name: call.launcher.summed(a, True, bias.shape, dtype) for name, a in got.items()}


def _row_sums(call: PortableCall, log_sum_exp, d_lse):
    n = math.prod(call.statistic.shape)
    launch = Launch(
        bias_kernels.row_side, triton.cdiv(n, 1024), dict(LSE=log_sum_exp, D_LSE=d_lse), dict(n=n),
        dict(D_ROWS=call.statistic), dict(BLOCK=1024, HAS_D_LSE=d_lse is not None), num_warps=4, num_stages=1,
    )  # fmt: skip
    return call.launcher.launch(launch)["D_ROWS"]


def _key_passes(call: PortableCall, want: Operands, want_tangent: Operands) -> list[dict[str, bool]]:
    """What of dK, dV and their tangents each launch computes: where the registers do not hold all that is wanted, first those of
    the keys, then those of the values, which need fewer products."""
    wanted = dict(WANT_K=want.key, WANT_V=want.value, WANT_TK=want_tangent.key, WANT_TV=want_tangent.value)
    if sum(wanted.values()) <= accumulators(call.widest):
        return [wanted] if any(wanted.values()) else []
    passes = (("WANT_K", "WANT_TK"), ("WANT_V", "WANT_TV"))
    return [{name: w and name in of_pass for name, w in wanted.items()} for of_pass in passes]


def statistics(call: PortableCall, y, cy, ty, tcy, dual: bool) -> RowStatistics:
    """By a kernel of its own."""
    (o, log_sum_exp), (d_o, d_lse), (t_o, _), (t_d_o, t_d_lse) = y, cy, ty, tcy
    block_m = 16 if call.launcher.target == "interpret" else 64
    _, queries, heads, _ = call.x.query.shape
    if call.features.rows_of_head == 1:
        queries, heads = call.query_length, 1
    launch = Launch(
        backward_kernels.statistics, triton.cdiv(queries, block_m) * math.prod(call.statistic.shape) // queries,
        dict(O=o, TO=t_o, DO=d_o, TDO=t_d_o, LSE=log_sum_exp, D_LSE=d_lse, TD_LSE=t_d_lse),
        dict(HQ=heads, LQ=queries),
        dict(LSE2=call.statistic, DELTA=call.statistic, T_DELTA=call.statistic if dual else None),
        dict(
            call.value_constants, BM=block_m, HAS_TANGENT=dual, HAS_DO=d_o is not None, HAS_TDO=t_d_o is not None,
            HAS_D_LSE=d_lse is not None, HAS_TD_LSE=t_d_lse is not None, EMPTY=call.features.ranges.present,
        ), num_warps=4, num_stages=1,
    )  # fmt: skip
    got = call.launcher.launch(launch)
    return RowStatistics(got["LSE2"], got["DELTA"], got["T_DELTA"])
