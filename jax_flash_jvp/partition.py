"""A job on every device's own shard, where XLA divides a program among devices: jit of arrays that are sharded.

XLA cannot look into a kernel.  Left alone it gathers the operands, and every device computes all of it; so it is told, by
`jax.experimental.custom_partitioning`, along which axes a job may be cut: those that vmap adds, the batch, and the heads
of keys, together with the heads of queries that share them.  What is spread along others (rows, keys, channels) is gathered.

Not needed where a program is one device's, as inside `shard_map`.  Inside one over some axes of a mesh, XLA does not tell how
arrays are spread along the others: there it gathers, as without, which a warning says, as wherever `_divided` in
`kernel_primitive.py` says so.
"""

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import tree_flatten, tree_leaves, tree_unflatten

from jax_flash_jvp.problem import Operands

logger = logging.getLogger(__name__)

# The axes of the operands, and of o, ℓ and their like; those that vmap adds come before.
AXES = Operands(
    "batch query heads channel", "batch key heads channel", "batch key heads value", "batch heads query key",
    "batch heads query key", "batch", "batch", "batch query", "batch key", "batch word",
)  # fmt: skip
OUTPUT, STATISTIC = "batch query heads value", "batch heads query"
Axes = list[tuple[str, int]]  # of an array: name and length
Pieces = list[int]  # of an axis: the number of that which each device has, of as many as there are devices


def _names(part: Any) -> Iterator[str]:
    """The axes of each leaf of a job's arguments or results."""
    if isinstance(part, Operands):
        yield from (names for names, a in zip(AXES, part, strict=True) if a is not None)
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


def on_shards(job: Callable, *args: Any, label: str, keep: Sequence[str] = ()) -> Any:
    """job(*args), the operands first, on shards along the axes that may be cut but those to `keep`.  The `label` tells jobs
    apart that look alike to JAX's cache of compiled programs, which does not see what is computed."""
    leaves, tree = tree_flatten(args)
    results = jax.eval_shape(job, *args)
    out_tree, ins, outs = jax.tree.structure(results), _axes(args), _axes(results)
    query_heads, key_heads = args[0].query.shape[-2], args[0].key.shape[-2]
    lengths = {name: n for axes in ins for name, n in axes if n > 1} | {"heads": key_heads}
    free = {name for name in lengths if name in ("batch", "heads") or name.startswith("lead")} - {*keep}

    @jax.jit  # constants are its own: `custom_partitioning` takes none
    def on_one(*leaves: Any) -> list[Any]:
        return tree_leaves(job(*tree_unflatten(tree, leaves)))

    def cut(sizes: tuple[int, ...], held: list[list[Pieces]]) -> dict[str, tuple[int, ...]]:
        """Over which axes of a mesh of these sizes each axis is spread: as that array has it which is in most pieces."""
        spread: dict[str, tuple[int, ...]] = {}
        for axes, pieces in zip((*ins, *outs), held, strict=True):
            for (name, n), numbers in zip(axes, pieces, strict=True):
                if n > 1 and name in free:
                    taken = {i for other, over in spread.items() if other != name for i in over}
                    over = _mesh_axes(numbers, sizes)
                    while over and (lengths[name] % _product(sizes, over) or taken & {*over}):
                        over = over[:-1]
                    spread[name] = max(spread.get(name, ()), over, key=lambda over: _product(sizes, over))
        return spread

    def partition(mesh, given, results):
        devices = mesh.devices.ravel()
        held = [_pieces(a, devices) for a in (*given, *results)]
        found = [(sizes, cut(sizes, held)) for sizes in _orders(_primes(len(devices)))]
        in_all = lambda sizes, spread: _product(sizes, itertools.chain(*spread.values()))
        sizes, by_number = max(found, key=lambda found: in_all(*found))
        mesh = Mesh(
            devices.reshape(sizes), tuple(f"p{i}" for i in range(len(sizes))), axis_types=(AxisType.Auto,) * len(sizes)
        )
        spread = {name: tuple(f"p{i}" for i in over) for name, over in by_number.items() if over}
        most = max(math.prod(len({*numbers}) for numbers in pieces) for pieces in held[: len(given)])
        if in_all(sizes, by_number) < most:
            logger.warning(
                "attention on arrays in %d pieces, one or more for each device, is computed in %d, each by several devices: "
                "it can be cut along the batch, what vmap adds and the heads of keys%s, as far as their numbers go", most,
                in_all(sizes, by_number), "" if "heads" in free else " (but where there is dropout)",
            )  # fmt: skip

        def placed(arrays: list[Axes]) -> list[NamedSharding]:
            specs = ([spread.get(name) if n > 1 else None for name, n in axes] for axes in arrays)
            return [NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs]

        # a gradient of a bias, which has not got all axes
        sums = [tuple(m for name, n in axes if n == 1 for m in spread.get(name, ())) for axes in outs]

        def shard(*leaves):
            # traced while XLA compiles, for one device, perhaps under the user's mesh
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                return [_summed(a, over) if over else a for a, over in zip(on_one(*leaves), sums, strict=True)]

        return mesh, shard, placed(outs), tuple(placed(ins))

    ones = (f"one{i}" for i in itertools.count())

    def factor(name: str, n: int) -> str:
        if n == 1:
            return next(ones)
        if name == "heads" and n != key_heads:
            return "(heads group)" if key_heads > 1 else "group"
        return name

    texts = [[factor(*axis) for axis in axes] for axes in (*ins, *outs)]
    words = dict.fromkeys(word for text in texts for axis in text for word in axis.strip("()").split())
    rule = [" ".join(text) for text in texts]
    call = custom_partitioning(on_one)
    call.def_partition(
        partition,
        decode_shardings=False,
        sharding_rule=f"{', '.join(rule[: len(ins)])} -> {', '.join(rule[len(ins) :])}",
        need_replication_factors=tuple(word for word in words if word not in free),
        **({"group": query_heads // key_heads} if "(heads group)" in itertools.chain(*texts) else {}),
    )
    with set_xla_metadata(attention=label):
        return tree_unflatten(out_tree, call(*leaves))


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
    """Those of a mesh that spread an axis so, major first; () where there are none."""
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
