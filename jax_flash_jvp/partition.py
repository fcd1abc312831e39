"""A job on every device's own shard, where XLA divides a program among devices: jit of arrays that are sharded.

XLA cannot look into a kernel.  Left alone it gathers the operands, and every device computes all of it; so it is told, by
`jax.experimental.custom_partitioning`, along which axes a job may be cut: those that vmap adds, the batch, the heads of keys,
together with the heads of queries that share them, and the sequence, of which devices then exchange what they need: see
`_in_context`.  Only what is spread along channels, or along the columns of a bias or a mask, is gathered.

Not needed where a program is one device's, as inside `shard_map`.  Inside one over some axes of a mesh, XLA does not tell how
arrays are spread along the others: there it gathers, as without, which a warning says, as wherever `_divided` in
`kernel_primitive.py` says so.
"""

import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import tree_flatten, tree_leaves, tree_unflatten

from jax_flash_jvp.arguments import warn_of_drift
from jax_flash_jvp.context import Context, strategy_of
from jax_flash_jvp.exchange import by_heads, by_sequence
from jax_flash_jvp.kernel_primitive import float64_if
from jax_flash_jvp.problem import Operands, Problem

logger = logging.getLogger(__name__)

# The axes of the operands, and of o, ℓ and their like; those that vmap adds come before.
AXES = Operands(
    "batch query heads channel", "batch key heads channel", "batch key heads value", "batch heads query column",
    "batch heads query column", "batch", "batch", "batch query", "batch key", "batch heads query range end", "batch word",
    "batch heads page queries keys",
)  # fmt: skip
OUTPUT, STATISTIC = "batch query heads value", "batch heads query"
CUT = ("batch", "heads", "query", "key")  # and what vmap adds
SEQUENCE = ("query", "key")
OTHERWISE = (
    "shard along the batch, axes of vmap, heads of keys or the sequence, over as many devices as divide its length"
)
REMEDIES = {
    "heads": "heads can be sharded over as many devices as divide the number of key heads; shard also the sequence or the batch",
    "key": "keys can be sharded along the sequence if queries are too, over as many devices as divide both lengths; pad them",
    "column": "a bias or a mask can be sharded along queries, not along keys",
    "channel": "the head dimension cannot be sharded; shard heads",
    "value": "the head dimension cannot be sharded; shard heads",
}
WHOLE = (
    "a sequence cannot be sharded if the call has a `mask_block_size`; pass `key_ranges`, a mask without blocks, segments or a "
    "window instead"
)
Axes = list[tuple[str, int]]  # of an array: name and length
Spread = dict[str, tuple[str, ...]]  # over which axes of a mesh each axis is spread
Pieces = list[int]  # of an axis: the number of that which each device has, of as many as there are devices


def _names(part: Any) -> Iterator[str]:
    """The axes of each leaf of a job's arguments or results."""
    if isinstance(part, Operands):
        axes = AXES
        lengths = zip((part.query, part.key), (-2, -1), strict=True)
        if part.mask is not None and any(part.mask.shape[i] not in (1, a.shape[-3]) for a, i in lengths):
            axes = AXES._replace(mask="batch heads rows columns")  # of blocks
        yield from (names for names, a in zip(axes, part, strict=True) if a is not None)
    elif part is not None and any(isinstance(a, tuple | list) for a in part):
        for a in part:
            yield from _names(a)
    elif part is not None:
        yield from (names for names, a in zip((OUTPUT, STATISTIC), part, strict=True) if a is not None)


def _axes(part: Any) -> list[Axes]:
    arrays, all_axes = tree_leaves(part), []
    for names, a in zip(_names(part), arrays, strict=True):
        own = names.split()
        all_axes.append([*zip([*(f"lead{i}" for i in range(a.ndim - len(own))), *own], a.shape, strict=True)])
    return all_axes


class Described(NamedTuple):
    """The axes of a job's arguments and of its results, and which of them may be cut."""

    ins: list[Axes]
    outs: list[Axes]
    lengths: dict[str, int]  # of those of the arguments that are longer than one
    free: set[str]
    whole: bool  # is the sequence not to be cut?  Blocks of a mask need not end where a part does


def on_shards(job: Callable, problem: Problem, *args: Any, label: str) -> Any:
    """job(problem, *args), the operands first, on shards along the axes that may be cut.  The `label` tells jobs apart that look
    alike to JAX's cache of compiled programs, which does not see what is computed."""
    leaves, tree = tree_flatten(args)
    results = jax.eval_shape(functools.partial(job, problem), *args)
    ins, outs, key_heads = _axes(args), _axes(results), args[0].key.shape[-2]
    lengths = {name: n for axes in ins for name, n in axes if n > 1} | {"heads": key_heads}
    whole = problem.mask_block is not None
    free = {name for name in lengths if name in CUT or name.startswith("lead")} - {*(SEQUENCE if whole else ())}
    described = Described(ins, outs, lengths, free, whole)

    @functools.partial(jax.jit, static_argnums=0)  # constants are its own: `custom_partitioning` takes none
    def on_one(problem: Problem, *args: Any) -> Any:
        return job(problem, *args)

    call = custom_partitioning(lambda *leaves: tree_leaves(on_one(problem, *tree_unflatten(tree, leaves))))
    call.def_partition(
        functools.partial(_partition, on_one, problem, args, described),
        decode_shardings=False,
        **_rule(described, args[0].query.shape[-2] // key_heads),
    )
    with set_xla_metadata(attention=label):
        return tree_unflatten(jax.tree.structure(results), call(*leaves))


def _rule(described: Described, group: int) -> dict[str, Any]:
    """What XLA is told of the axes, for query heads in groups of so many."""
    key_heads, ones = described.lengths["heads"], (f"one{i}" for i in itertools.count())

    def factor(name: str, n: int) -> str:
        if n == 1:
            return next(ones)
        if name == "heads" and n != key_heads:
            return "(heads group)" if key_heads > 1 else "group"
        return name

    texts = [[factor(*axis) for axis in axes] for axes in (*described.ins, *described.outs)]
    words = dict.fromkeys(word for text in texts for axis in text for word in axis.strip("()").split())
    rule, n = [" ".join(text) for text in texts], len(described.ins)
    return dict(
        sharding_rule=f"{', '.join(rule[:n])} -> {', '.join(rule[n:])}",
        need_replication_factors=tuple(word for word in words if word not in described.free),
        **({"group": group} if "(heads group)" in itertools.chain(*texts) else {}),
    )


def _partition(
    on_one: Callable, problem: Problem, args: Any, described: Described, mesh: Any, given: Any, results: Any
):
    """What `custom_partitioning` asks for: the mesh, the job of a device, and how results and arguments are spread."""
    devices, tree = mesh.devices.ravel(), jax.tree.structure(args)
    held = [_pieces(a, devices) for a in (*given, *results)]
    found = [(sizes, _cut(described, sizes, held)) for sizes in _orders(_primes(len(devices)))]
    parts = [_product(sizes, {*itertools.chain(*of_axes.values())}) for sizes, of_axes in found]
    sizes, by_number = found[parts.index(max(parts))]
    remedies = REMEDIES | (dict.fromkeys(SEQUENCE, WHOLE) if described.whole else {})
    _warn_of_gathering(described.ins, held[: len(given)], sizes, by_number, remedies)
    mesh = Mesh(
        devices.reshape(sizes), tuple(f"p{i}" for i in range(len(sizes))), axis_types=(AxisType.Auto,) * len(sizes)
    )
    spread = {name: tuple(f"p{i}" for i in over) for name, over in by_number.items() if over}
    alike = max(parts) < len(devices)  # some devices compute the same, which is to have the same bits
    on_each = dataclasses.replace(problem, deterministic=True) if alike else problem
    local = _in_context(
        on_one, on_each, args, spread, {name: _product(sizes, over) for name, over in by_number.items()}
    )

    def placed(arrays: list[Axes]) -> list[NamedSharding]:
        specs = ([spread.get(name) if n > 1 else None for name, n in axes] for axes in arrays)
        return [NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs]

    sums = [_summed_over(axes, spread) for axes in described.outs]

    def shard(*leaves):
        # traced while XLA compiles, for one device, perhaps under the user's mesh
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())), float64_if(leaves):
            got = tree_leaves(local(*tree_unflatten(tree, leaves)))
            return [_summed(a, over) if over else a for a, over in zip(got, sums, strict=True)]

    return mesh, shard, placed(described.outs), tuple(placed(described.ins))


def _cut(described: Described, sizes: tuple[int, ...], held: list[list[Pieces]]) -> dict[str, tuple[int, ...]]:
    """Over which axes of a mesh of these sizes each axis is spread: as that array has it which is in most pieces."""
    spread: dict[str, tuple[int, ...]] = {}
    for axes, pieces in zip((*described.ins, *described.outs), held, strict=True):
        for (name, n), numbers in zip(axes, pieces, strict=True):
            if n > 1 and name in described.free:
                together = SEQUENCE if name in SEQUENCE else (name,)
                taken = {i for other, over in spread.items() if other not in together for i in over}
                over = _mesh_axes(numbers, sizes)
                while over and (described.lengths[name] % _product(sizes, over) or taken & {*over}):
                    over = over[:-1]
                spread[name] = max(spread.get(name, ()), over, key=lambda over: _product(sizes, over))
    return spread | _sequence(spread, described.lengths, sizes)


def _sequence(
    spread: dict[str, tuple[int, ...]], lengths: dict[str, int], sizes: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """Rows and columns are cut alike; or rows alone, where the columns are not cut, or cannot be."""
    over = spread.get("query") or spread.get("key") or ()
    while over and lengths.get("query", 1) % _product(sizes, over):
        over = over[:-1]
    both = spread.get("key") and lengths["key"] % _product(sizes, over) == 0
    return {"query": over, "key": over if both else ()}


def _in_context(on_one: Callable, problem: Problem, args: Any, spread: Spread, devices: dict[str, int]) -> Callable:
    """The job of one device, which exchanges with those that share its sequence what they need."""
    x: Operands = args[0]
    sequence = spread.get("query", ())
    places = lambda args: (_placed(args[0], spread.get("heads", ())), *args[1:])
    if not sequence:
        return lambda *args: on_one(problem, *places(args))
    warn_of_drift()
    context = Context(sequence, devices["query"], "ring" if "key" in spread else "rows")
    with_rows = [
        name
        for name, a in (("bias", x.bias), ("mask", x.mask))
        if a is not None and (name == "bias" or a.shape[-2] > 1)
    ]
    key_heads = x.key.shape[-2] // devices.get("heads", 1)
    if context.strategy == "ring" and strategy_of(None, context.devices, key_heads, with_rows) == "ulysses":
        return lambda *args: by_sequence(on_one(problem, *by_heads(places(args), context)), context)
    problem = dataclasses.replace(problem, context=context)
    return lambda *args: on_one(problem, *places(args))


def _placed(x: Operands, over: tuple[str, ...]) -> Operands:
    """Dropout counts heads."""
    if x.seed is None or not over:
        return x
    head = jax.lax.axis_index(over) * x.query.shape[-2]
    return x._replace(seed=x.seed.at[..., 2].add(head.astype(x.seed.dtype)))


def _warn_of_gathering(
    arrays: list[Axes],
    held: list[list[Pieces]],
    sizes: Sequence[int],
    spread: dict[str, tuple],
    remedies: dict[str, str],
) -> None:
    """Where an array is in more pieces than those that a device is to have."""
    for axes, pieces in zip(arrays, held, strict=True):
        pieces_of = {name: len({*numbers}) for (name, _), numbers in zip(axes, pieces, strict=True)}
        kept = _product(sizes, {i for name, n in axes if n > 1 for i in spread.get(name, ())})
        if math.prod(pieces_of.values()) > kept:
            along = [name for name, n in pieces_of.items() if n > _product(sizes, spread.get(name, ()))]
            logger.warning(
                "arrays are sharded into %d pieces, but attention is computed in %d, each on several devices: %s",
                math.prod(pieces_of.values()), kept, "; ".join(remedies.get(name, OTHERWISE) for name in along) or OTHERWISE,
            )  # fmt: skip
            return


def _summed_over(axes: Axes, spread: Spread) -> tuple[str, ...]:
    """The mesh axes over which a gradient is summed: that of a bias without all axes, or of keys that all devices have."""
    absent = [name for name, n in axes if n == 1]
    if "key" not in spread and dict(axes).get("key", 0) > 1:
        absent.append("query")
    return tuple(m for name in absent for m in spread.get(name, ()))


def _summed(a: Any, over: tuple[str, ...]) -> Any:
    return jax.lax.psum(a.astype(jnp.promote_types(a.dtype, jnp.float32)), over).astype(a.dtype)


# ------------------------------------------------------------------------------------------ names for shardings

# XLA says which piece of an array each device has, but not by which axes of whose mesh.  Of a mesh whose sizes are primes, in
# some order, axes can be named that cut an array so.


def _pieces(a: Any, devices: np.ndarray) -> list[Pieces]:
    """Along each axis."""
    slices = a.sharding.devices_indices_map((len(devices),) * a.ndim)
    return [[slices[d][axis].start or 0 for d in devices] for axis in range(a.ndim)]


def _mesh_axes(pieces: Pieces, sizes: Sequence[int]) -> tuple[int, ...]:
    """The axes of a mesh that spread an array's axis so, major first; () where there are none."""
    numbers = np.array(pieces).reshape(sizes)
    steps = [numbers.take(1, i).flat[0] for i in range(len(sizes))]  # from the first device along each
    axes = sorted((i for i, step in enumerate(steps) if step), key=lambda i: -steps[i])
    step, expected = numbers.size, np.zeros_like(numbers)
    for i in axes:
        step //= sizes[i]
        expected += step * np.indices(sizes)[i]
    return tuple(axes) if (numbers == expected).all() else ()


def _product(sizes: Sequence[int], over: Iterable[int]) -> int:
    return math.prod(sizes[i] for i in over)


def _orders(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Each once."""
    if not sizes:
        yield ()
    for first in sorted({*sizes}):
        i = sizes.index(first)
        yield from ((first, *rest) for rest in _orders(sizes[:i] + sizes[i + 1 :]))


def _primes(n: int) -> tuple[int, ...]:
    """Whose product it is."""
    least = next((p for p in range(2, n + 1) if n % p == 0), None)
    return () if least is None else (least, *_primes(n // least))
