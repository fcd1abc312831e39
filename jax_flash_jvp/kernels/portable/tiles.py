"""Block sizes, by job, head dim, kind of product and GPU.

For 16-bit inputs on sm_90, head dims 64 to 128, measured on an H200, but for the duals of keys and queries at 64 and 128.
The others were compiled ahead of time and are the largest that fit and hardly spill; tests/kernels/test_ahead_of_time.py compiles
them all again.  What helped: two stages at least, since with one whole tiles are loaded through registers, and for the duals on
`mma.sync`, which holds all operands that the loop does not change in registers, 16 rows of them on eight warps.
"""

from typing import NamedTuple

from jax_flash_jvp.kernels.portable.scores import widths


class Tile(NamedTuple):
    block_m: int  # queries
    block_n: int  # keys
    num_warps: int
    num_stages: int
    spill: int = 80  # bytes that a thread may store, with Triton 3.9: some registers come and go with any constant
    registers: int | None = None  # of a thread, at most; 255 where the assembler would take 32 and spill the rest


HEAD_DIMS = (64, 128, 256)  # the columns: head dims up to each
HEAD_DIMS_AND_96 = (64, 96, 128, 256)  # of rows that have four
HEAD_DIMS_AND_80 = (64, 80, 96, 128, 256)  # of rows that have five
# value_side_dual is key_side for (dV, its tangent) alone; where `accumulators` allows no more than two,
# key_side_dual is for (dK, its tangent) alone.
JOBS = (
    "forward",
    "forward_dual",
    "key_side",
    "query_side",
    "key_side_dual",
    "value_side_dual",
    "query_side_dual",
    "score_side",
    "score_side_dual",
)

_HALF_SM80 = dict(
    forward=((128, 64, 8, 3), (128, 128, 8, 3), (128, 32, 8, 2, 400)),
    forward_dual=((128, 64, 8, 2, 600), (64, 32, 8, 2), (32, 32, 8, 2)),
    key_side=((64, 64, 4, 3, 100), (64, 64, 8, 2), (32, 32, 8, 2)),
    query_side=((128, 64, 8, 3), (128, 64, 8, 3, 200), (64, 32, 8, 2, 300, 255)),
    key_side_dual=((32, 32, 4, 2, 200), (16, 32, 8, 2), (32, 16, 8, 2, 400)),
    value_side_dual=((64, 64, 4, 2, 400), (32, 32, 4, 2, 200), (32, 32, 8, 2, 500)),
    query_side_dual=((64, 32, 4, 2, 200), (16, 64, 8, 2), (16, 32, 8, 2, 600)),
)
_HALF_SM86 = dict(  # 99 KiB of shared memory
    _HALF_SM80,
    forward=((128, 64, 8, 3), (128, 64, 8, 2, 200), (64, 32, 4, 2, 200)),
    query_side=((128, 64, 8, 3), (64, 64, 4, 2), (32, 32, 8, 2)),
)
_HALF_SM90 = dict(
    forward=((128, 64, 8, 3), (128, 128, 8, 3), (128, 128, 8, 3), (128, 32, 8, 2)),
    forward_dual=((128, 128, 8, 3, 300), (128, 64, 8, 3), (128, 64, 8, 2, 500), (32, 32, 8, 2)),
    key_side=((64, 64, 4, 3, 200), (64, 64, 4, 3, 500), (64, 64, 4, 2, 1300), (32, 64, 8, 2, 500)),
    query_side=((64, 128, 4, 3), (64, 64, 4, 3), (128, 64, 8, 3), (128, 32, 8, 2)),
    key_side_dual=((32, 64, 4, 3, 300), (32, 128, 8, 3, 200), (32, 128, 8, 3, 200), (16, 16, 8, 2)),
    value_side_dual=((64, 64, 4, 3, 100), (64, 128, 8, 3, 400), (64, 128, 8, 2, 900), (32, 32, 8, 2, 400)),
    query_side_dual=((64, 64, 4, 2, 400), (128, 32, 8, 3, 100), (128, 32, 8, 3, 400), (16, 32, 8, 2, 500)),
    score_side=((64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 8, 2)),
)
_LIGHT_SM90: dict[str, tuple] = {  # for `lighter`; H200, 2026-11-29
    "forward": ((64, 64, 4, 3), (64, 64, 4, 3), (128, 64, 8, 3), None),
    "key_side": ((64, 64, 4, 3), None, None, None),
    "query_side": ((64, 64, 4, 3), None, None, None),
}
_HALF_SM100 = dict(  # sums in tensor memory: 512 columns, which those of Triton before 3.9 fill sooner
    forward=((128, 64, 8, 3), (128, 128, 8, 3), (64, 64, 8, 2)),
    forward_dual=((128, 64, 8, 3), (64, 64, 8, 2), (32, 32, 8, 2)),
    key_side=((64, 128, 8, 2, 200), (64, 64, 4, 2, 700), (32, 32, 8, 2)),
    query_side=((128, 64, 8, 3), (128, 64, 8, 3), (64, 32, 8, 2)),
    key_side_dual=((64, 64, 8, 2, 600), (32, 64, 8, 2, 1000), (16, 16, 8, 2)),
    value_side_dual=((64, 64, 8, 2, 100), (64, 64, 8, 2, 500), (32, 32, 8, 2, 400)),
    query_side_dual=((64, 64, 4, 2, 200), (64, 32, 8, 2), (16, 32, 8, 2, 300)),
)
_TF32 = dict(  # up to head dim 128 within 99 KiB
    forward=((64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 8, 2)),
    forward_dual=((64, 32, 4, 2), (32, 16, 4, 2, 100), (16, 16, 4, 2, 300)),
    key_side=((32, 32, 4, 2), (32, 32, 4, 1), (16, 16, 8, 2)),
    query_side=((64, 32, 4, 2), (32, 32, 8, 2), (32, 16, 8, 2)),
    key_side_dual=((32, 32, 8, 2, 500), (16, 16, 8, 2)),
    value_side_dual=((32, 32, 4, 2), (32, 16, 8, 2)),
    query_side_dual=((16, 32, 4, 2), (16, 16, 8, 2, 500, 255)),
)
_TF32_SM90 = dict(  # H200, 2026-11-28, Triton 3.6: B32 L256 H16 and B4 L1024 H12, at 64, 72 and 128 channels
    forward=((64, 64, 4, 2), (128, 64, 8, 1), (128, 64, 8, 2), (32, 32, 8, 2)),
    forward_dual=((32, 64, 4, 2, 100), (64, 64, 4, 1, 1100), (64, 32, 4, 1, 800), (16, 16, 4, 2, 300)),
    key_side=((64, 128, 8, 1, 200), (64, 128, 8, 1, 500), (32, 128, 8, 1, 200), (16, 16, 8, 2)),
    query_side=((128, 32, 8, 2), (128, 64, 8, 2), (128, 64, 8, 1), (32, 16, 8, 2)),
    key_side_dual=((32, 64, 4, 1, 1300), (16, 64, 4, 1, 800), (32, 64, 4, 1, 2600), None),
    value_side_dual=((32, 32, 4, 2), (32, 64, 4, 1, 800), (32, 16, 8, 2), None),
    query_side_dual=((64, 32, 4, 1, 400), (64, 16, 4, 1, 800), (64, 32, 4, 1, 2500), None),
)
_IEEE = dict(  # up to 64 channels without tensor cores: a product is unrolled over the head dim; then see `product`
    forward=((32, 32, 4, 1), (32, 32, 8, 2), (16, 16, 8, 2)),
    forward_dual=((32, 16, 4, 2), (16, 16, 8, 2, 1000), (16, 16, 8, 2, 800)),
    key_side=((16, 32, 4, 2), (16, 32, 8, 2, 300), (16, 16, 8, 2, 1000)),
    query_side=((32, 16, 4, 2), (16, 32, 8, 2), (16, 16, 8, 2, 500)),
    key_side_dual=((16, 16, 8, 2, 800),),
    value_side_dual=((16, 16, 8, 2),),
    query_side_dual=((16, 16, 8, 2, 800, 255),),
)
# Three products of TF32.  H200, 2026-11-28 and -29, Triton 3.6: B32 L256 H16 and B4 L1024 H12, at 64, 72 and 128 channels
_IEEE_SM90 = dict(  # from 81 channels on shared memory does not hold the dual query side
    forward=((128, 64, 8, 2), *[(64, 64, 4, 2, 600)] * 2, (128, 64, 8, 1, 500), _IEEE["forward"][2]),
    forward_dual=((64, 32, 4, 1, 400), (128, 32, 8, 1, 1700), *[(64, 32, 4, 1, 3300)] * 2, _IEEE["forward_dual"][2]),
    key_side=((32, 128, 8, 1), *[(32, 128, 8, 1, 1200)] * 2, (32, 64, 4, 1, 3200), _IEEE["key_side"][2]),
    query_side=((64, 64, 4, 1, 300), *[(128, 64, 8, 1, 800)] * 2, (64, 32, 4, 1, 1400), _IEEE["query_side"][2]),
    key_side_dual=((32, 64, 4, 1, 4300), (32, 64, 4, 1, 3600), None, None, None),
    value_side_dual=((32, 64, 4, 1, 800), (32, 128, 8, 1, 1700), None, None, None),
    query_side_dual=((64, 32, 4, 1, 2000), (64, 32, 4, 1, 3300), None, None, None),
    score_side=((64, 64, 4, 1, 1000), (64, 64, 4, 1, 1000), None, None, None),
    score_side_dual=((16, 32, 4, 1, 500), (64, 32, 4, 1, 3000), None, None, None),
)
_SCORE_SIDE: dict[str, dict] = {  # of the gradient of a bias; within 99 KiB but on sm_90
    "half": dict(
        score_side=((64, 64, 8, 2), (64, 32, 8, 2), (32, 32, 8, 2)),
        score_side_dual=((64, 32, 4, 2, 300), (32, 64, 8, 2, 200), (16, 32, 4, 2, 100)),
    ),
    "tf32": dict(
        score_side=((32, 32, 4, 2), (32, 32, 8, 2), (16, 16, 8, 2)),
        score_side_dual=((32, 32, 4, 2, 700), (16, 16, 8, 2, 400)),
    ),
    "ieee": dict(
        score_side=((16, 16, 4, 2),),
        score_side_dual=((16, 16, 8, 2),),
    ),
}
_TABLES: dict[str, dict[int, dict]] = {
    "half": {80: _HALF_SM80, 86: _HALF_SM86, 90: _HALF_SM90, 100: _HALF_SM100},
    "tf32": {80: _TF32, 86: {job: row[:2] for job, row in _TF32.items()}, 90: _TF32_SM90, 100: _TF32},
    "ieee": {80: _IEEE, 86: _IEEE, 90: _IEEE_SM90, 100: _IEEE},
}
_LIKE = {80: 80, 87: 80, 90: 90, 100: 100, 103: 100}  # other GPUs have little shared memory, like sm_86


def padded(head_dim: int) -> int:
    """Channels of the blocks that hold a row."""
    return sum(widths(head_dim))


def product(dtype: str, precision: str, head_dim: int, target: int | str) -> str:
    """How `tl.dot` multiplies float32: "ieee" as three products of TF32 parts on sm_90 and of wide heads, for the unrolled
    products of the other cores are slow, and of wide heads do not fit the registers.  Of other dtypes it says nothing, and
    is the same always."""
    if dtype != "float32":
        return "tf32"
    in_parts = target == 90 or padded(head_dim) > HEAD_DIMS[0]
    return "tf32x3" if precision == "ieee" and in_parts else precision


def accumulators(head_dim: int) -> int:
    """How many [BN, D] sums one launch of key_side may hold."""
    return 4 if padded(head_dim) <= 64 else 2


def find(job: str, head_dim: int, dtype: str, precision: str, target: int | str) -> Tile | None:
    """None where no tile is worth launching: the registers would spill at every step, and Triton 3.9 may even crash; and on GPUs
    before sm_80, for whose matrix cores Triton does not compile."""
    if target == "interpret":
        return Tile(16, 16, 4, 1)
    if int(target) < 80:
        return None
    kind = kind_of(dtype, precision)
    if job == "forward_dual" and padded(head_dim) == 32 and product(dtype, precision, head_dim, target) == "ieee":
        return Tile(32, 32, 8, 2)  # on that for 64 channels the compiler of Triton 3.9 stops, on sm_90
    row = row_of(job, kind, int(target))
    column = column_of(row, head_dim)
    return Tile(*row[column]) if column < len(row) and row[column] else None


def kind_of(dtype: str, precision: str) -> str:
    """The kind of products: which tables serve them."""
    return "half" if dtype in ("float16", "bfloat16") else precision


def row_of(job: str, kind: str, target: int) -> tuple[tuple, ...]:
    return (_SCORE_SIDE[kind] | _TABLES[kind][_LIKE.get(target, 86)])[job]


def column_of(row: tuple[tuple, ...], head_dim: int) -> int:
    """The column of a tile in that row; one past the end where it has none."""
    columns = next((c for c in (HEAD_DIMS_AND_96, HEAD_DIMS_AND_80) if len(c) == len(row)), HEAD_DIMS)
    return next(i for i, most in enumerate(columns) if head_dim <= most)


def lighter(tile: Tile, job: str, head_dim: int, dtype: str, target: int | str, loops: bool) -> Tile:
    """For calls that read, or work out, more than a product for each score: a bias, dropout, a cap.  If the kernel goes through
    several tiles, those of `_LIGHT_SM90`.  Else no more than 64 streamed rows, in two stages.  (Keys that are the rows of a
    product stay as many: matrix cores want 64 rows for four warps.)"""
    row = _LIGHT_SM90.get(job) if loops and dtype in ("float16", "bfloat16") and target == 90 else None
    if row and (found := row[column_of(row, head_dim)]):
        return Tile(*found)
    of_keys = job.startswith(("key", "value"))
    return tile._replace(block_n=tile.block_n if of_keys else min(64, tile.block_n), num_stages=min(2, tile.num_stages))


def short(tile: Tile, job: str, head_dim: int, dtype: str, target: int | str) -> Tile:
    """For calls that visit a list of tiles.  Their loops are short: on sm_90 it is faster when two programs share a
    multiprocessor, one of which begins or ends while the other multiplies."""
    if dtype not in ("float16", "bfloat16") or target != 90:
        return lighter(tile, job, head_dim, dtype, target, False)
    changes: dict[tuple, dict[str, int]] = {
        ("forward", 64): dict(registers=128),
        ("forward", 96): dict(block_n=64, num_stages=2),
        ("forward", 128): dict(registers=128, block_n=64, num_stages=2),
        ("key_side", 64): dict(registers=168, num_stages=2),
    }
    return tile._replace(**changes.get((job, padded(head_dim)), dict(num_stages=min(2, tile.num_stages))))


def rows_for(length: int) -> int:
    """The rows of a block that holds so many."""
    return max(16, 1 << (length - 1).bit_length())


def fitted(tile: Tile, job: str, queries: int, keys: int, least: int = 16) -> Tile:
    """For sequences that are shorter than its blocks, which have at least so many rows of the result.  A warp keeps as many
    of these, or as much of a bias."""
    by_key, by_score = job.startswith(("key", "value")), job.startswith("score")
    rows_m, rows_n = rows_for(queries), rows_for(keys)
    if by_key:
        rows_n = max(least, rows_n)
    elif not by_score:
        rows_m = max(least, rows_m)
    block_m, block_n = min(tile.block_m, rows_m), min(tile.block_n, rows_n)
    if (
        least > 16 and block_n == 16 and not by_key
    ):  # of one key all is loaded at once, which 128 rows leave no memory for
        block_m = min(block_m, least)
    fewer = 1 if by_key else tile.block_m // block_m
    if by_key or by_score:
        fewer *= tile.block_n // block_n
    return tile._replace(block_m=block_m, block_n=block_n, num_warps=max(1, tile.num_warps // fewer))


def least_rows(job: str, dtype: str, precision: str, head_dim: int, target: int | str) -> int:
    """The least rows of the result, for `fitted`.  On sm_90 two kinds of kernels in float32 take the instructions for 64 rows,
    which read one operand from shared memory: three products of 33 to 128 channels, and kernels with tangents in TF32 above 64
    channels.  With fewer rows they spill, the second kind up to 34 KB.  (Compiled ahead of time, not measured.)"""
    channels = padded(head_dim)
    three = precision == "tf32x3" and 32 < channels <= HEAD_DIMS[1]
    tangents = job.endswith("dual") and dtype == "float32" and channels > HEAD_DIMS[0]
    return 64 if target == 90 and (three or (tangents and precision not in ("ieee", "tf32x3"))) else 16


LEAST_HALVED = 64  # rows of the result: what four warps want on sm_90


def halved(tile: Tile, job: str, head_dim: int, dtype: str) -> Tile:
    """For calls that leave most of the GPU idle: half of the rows of the result, each warp as many.  A program then has half of
    the work, but for reading the other rows, where each warp has twice as much.  So only float32, whose products take longest,
    has such tiles, and up to 64 channels, since tiles of wider heads spill more.  H200, 2026-11-29."""
    side = "block_n" if job.startswith(("key", "value")) else "block_m"
    rows = getattr(tile, side) // 2
    if dtype != "float32" or padded(head_dim) > HEAD_DIMS[0] or rows < LEAST_HALVED:
        return tile
    return tile._replace(num_warps=tile.num_warps // 2, **{side: rows})


FEW = 32  # queries, beside which all that a call costs is to read the keys and values
_FOR_FEW = {  # elements of a tile of keys, stages: so that a multiprocessor has room for two or three programs
    "forward": (8192, 3), "forward_dual": (8192, 2), "query_side": (8192, 3), "query_side_dual": (4096, 3)
}  # fmt: skip
# Of up to 16 rows: keys, warps and stages, by channels.  H200, 2026-11-29.
_FEWER = {32: (64, 2, 3), 64: (32, 1, 4), 128: (32, 2, 4)}
_FOR_FEWER = {
    ("half", "forward"): _FEWER,
    ("half", "forward_dual"): _FEWER | {128: (32, 2, 2)},
    ("half", "query_side"): _FEWER,
    **{("float32", job): {64: (32, 2, 2)} for job in ("forward", "forward_dual", "query_side")},
}


def for_few(tile: Tile, job: str, queries: int, keys: int, head_dim: int, dtype: str, least: int) -> Tile:
    """For few queries and many more keys: the warps share the columns.  (Compiled ahead of time, not measured, but for
    `_FOR_FEWER`.)"""
    rows, channels = rows_for(queries), rows_for(padded(head_dim))
    kind = "float32" if dtype == "float32" else "half"
    if rows == 16 and (found := _FOR_FEWER.get((kind, job), {}).get(max(32, channels))):
        return Tile(rows, *found)
    elements, stages = _FOR_FEW.get(job, (0, 2))
    block_n = min(128, elements // channels // (2 if dtype == "float32" else 1))
    if block_n < 32:  # four warps want as many; and the key side
        return fitted(tile, job, queries, min(64, keys), least)._replace(num_stages=min(2, tile.num_stages))
    return Tile(rows, block_n, 4, stages)


def tile(job: str, head_dim: int, dtype: str, precision: str, target: int | str) -> Tile:
    """The tile of one of JOBS on a GPU of compute capability `target`, 90 for sm_90, or of "interpret"."""
    found = find(job, head_dim, dtype, precision, target)
    if found is None:
        raise NotImplementedError(
            f"no tile of {job} for {dtype} ({precision}) and head dimension {head_dim} fits sm_{target}: "
            "use the tiled reference, a smaller head dimension or bfloat16"
        )
    return found
