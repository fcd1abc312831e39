"""One sequence over several GPUs of a host, from JAX, beside one GPU that has all of it.

Each way is first compared with one GPU: a way that fails is reported and not timed.  All take turns, and figures are medians.
Memory is what the compiler plans for a GPU: arguments, results and temporaries.
"""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from devices import ONE, PRODUCTS, Row, rows_of, tolerance
from jax_calls import describe, draw
from jax_flash_jvp import dot_product_attention, reorder_zigzag, restore_zigzag
from measure import Case, timed, write

SEQUENCE = PartitionSpec(None, "devices")
JOBS: dict[str, Callable] = {  # of q, k, v, their tangents, and the cotangents of the output and of its tangent
    "forward": lambda f, x, tx, g, h: f(*x),
    "forward + JVP": lambda f, x, tx, g, h: jax.jvp(f, x, tx),
    "forward + backward": lambda f, x, tx, g, h: jax.vjp(f, *x)[1](g),
    "JVP + dual backward": lambda f, x, tx, g, h: jax.vjp(lambda x, tx: jax.jvp(f, x, tx), x, tx)[1]((g, h)),
}


class Way(NamedTuple):
    attend: Callable
    order: str = "contiguous"


def ways(mesh: jax.sharding.Mesh, causal: bool) -> dict[str, Way]:
    def inside(strategy: str, order: str) -> Callable:
        attend = functools.partial(
            dot_product_attention, is_causal=causal, context_axis="devices", context_strategy=strategy, context_order=order
        )  # fmt: skip
        return jax.shard_map(attend, mesh=mesh, in_specs=SEQUENCE, out_specs=SEQUENCE)

    found = {
        f"{strategy}{' zigzag' if order == 'zigzag' else ''}": Way(inside(strategy, order), order)
        for strategy in ("ulysses", "ring", "all_gather")
        for order in (("contiguous", "zigzag") if causal else ("contiguous",))
    }
    found["under jit"] = Way(functools.partial(dot_product_attention, is_causal=causal))
    if not causal:
        found["gathered by XLA, cuDNN"] = Way(functools.partial(jax.nn.dot_product_attention, implementation="cudnn"))
    return found


def compiled(name: str, attend: Callable, arrays: list[jax.Array]) -> tuple[Callable[[], Any], float]:
    """A call, and MiB of a GPU."""
    x, tx, (g, h) = tuple(arrays[:3]), tuple(arrays[3:6]), arrays[6:]
    program = jax.jit(functools.partial(JOBS[name], attend)).lower(x, tx, g, h).compile()
    memory = program.memory_analysis()
    size = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return lambda: program(x, tx, g, h), size / 2**20


def difference(got: Any, expected: Any, devices: int, order: str) -> float:
    errors = []
    for a, b in zip(jax.tree.leaves(got), expected, strict=True):
        a = np.asarray((restore_zigzag(a, devices) if order == "zigzag" else a).astype(jnp.float32))
        errors.append(float(np.linalg.norm(a - b) / np.linalg.norm(b)))
    return max(errors)


def measure(case: Case, options: Any) -> list[Row]:
    n, rows, causal = options.devices, [], case.feature == "causal"
    mesh = jax.make_mesh((n,), ("devices",), axis_types=(AxisType.Auto,), devices=jax.devices()[:n])
    arrays = draw(case)
    for name in options.jobs or PRODUCTS:
        call, one_mib = compiled(name, functools.partial(dot_product_attention, is_causal=causal), arrays)
        expected = [np.asarray(a.astype(jnp.float32)) for a in jax.tree.leaves(call())]
        calls, memory = {ONE: call}, {ONE: one_mib}
        for who, way in ways(mesh, causal).items():
            if options.contenders and who not in options.contenders:
                continue
            there = (lambda a: reorder_zigzag(a, n)) if way.order == "zigzag" else (lambda a: a)
            try:
                shards = [jax.device_put(there(a), NamedSharding(mesh, SEQUENCE)) for a in arrays]
                call, mib = compiled(name, way.attend, shards)
                error = difference(call(), expected, n, way.order)
                if not error < tolerance(case):
                    raise ValueError(f"differs from one GPU by {error:.2g}")
            except Exception as problem:
                print(f"{name}, {who}, {case}: {type(problem).__name__}: {str(problem)[:300]}", flush=True)
                continue
            calls[who], memory[who] = call, mib
        times: dict[str, list[float]] = {who: [] for who in calls}
        for turn in range(options.rounds):
            for who in [*calls][turn % len(calls) :] + [*calls][: turn % len(calls)]:
                time.sleep(options.rest)
                times[who].append(timed(calls[who], jax.block_until_ready, options.seconds))
        for row, text in rows_of(name, case, n, times, memory).items():
            rows.append(row)
            print(text, flush=True)
    return rows


def run(options: Any) -> int:
    """As `attention.py` was asked with --devices."""
    if len(jax.devices()) < options.devices:
        raise ValueError(f"--devices must be at most the {len(jax.devices())} of this host: got {options.devices}")
    print(f"{options.devices} × {describe()}, {options.dtype}")
    rows = []
    for heads, head_dim in zip(options.heads, options.head_dims, strict=True):
        for length in options.lengths:
            rows += measure(Case(options.batch, length, heads, head_dim, options.feature, options.dtype), options)
    write(options.output.with_suffix(".csv"), Row._fields, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit("run attention.py --devices N")
