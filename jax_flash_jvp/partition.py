"""A job on every device's own shard, where XLA divides a program among devices: jit of arrays that are sharded.

XLA cannot look into a kernel.  Left alone it gathers the operands, and every device computes all of it; so it is told, by
`jax.experimental.custom_partitioning`, along which axes a job may be cut: those that vmap adds, the batch, and the heads
of keys, together with the heads of queries that share them.  What is spread along others (rows, keys, channels) is gathered.

Not needed where a program is one device's, as inside `shard_map`.  Inside one over some axes of a mesh, XLA does not tell how
arrays are spread along the others: there it gathers, as without, and where `_divided` in `kernel_primitive.py` says so.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jax.tree_util import tree_flatten, tree_leaves, tree_unflatten

from jax_flash_jvp.problem import Operands

# The axes of the operands, and of o, ℓ and their like; those that vmap adds come before.
AXES = Operands(
    "batch query heads channel", "batch key heads channel", "batch key heads value", "batch heads query key",
    "batch heads query key", "batch", "batch", "batch query", "batch key", "batch word",
)  # fmt: skip
OUTPUT, STATISTIC = "batch query heads value", "batch heads query"
Axes = list[tuple[str, int]]  # of an array: name and length


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

    def partition(mesh, given, _):
        spread: dict[str, tuple[str, ...]] = {}  # over which axes of the mesh: as the first operand that is
        for axes, a in zip(ins, given, strict=True):
            for (name, n), over in zip(axes, (*a.sharding.spec, *(None,) * a.ndim), strict=False):
                over = over if isinstance(over, tuple) else (over,) if over else ()
                fits = n > 1 and name in free and lengths[name] % math.prod(mesh.shape[m] for m in over) == 0
                taken = {m for names in spread.values() for m in names}
                if over and fits and name not in spread and not taken & {*over}:
                    spread[name] = over

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
        sharding_rule=f"{', '.join(rule[: len(ins)])} -> {', '.join(rule[len(ins) :])}",
        need_replication_factors=tuple(word for word in words if word not in free),
        **({"group": query_heads // key_heads} if "(heads group)" in itertools.chain(*texts) else {}),
    )
    with set_xla_metadata(attention=label):
        return tree_unflatten(out_tree, call(*leaves))


def _summed(a: Any, over: tuple[str, ...]) -> Any:
    return jax.lax.psum(a.astype(jnp.promote_types(a.dtype, jnp.float32)), over).astype(a.dtype)
