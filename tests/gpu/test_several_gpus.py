"""Each of two GPUs computes its part of a sharded program, and only that: `pytest -m gpu` where there are two."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import oracle
from jax_flash_jvp import dot_product_attention, reorder_zigzag, restore_zigzag

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu" or jax.device_count() < 2, reason="needs two GPUs"),
]

BATCH, HEADS, SEQUENCE = PartitionSpec("devices"), PartitionSpec(None, None, "devices"), PartitionSpec(None, "devices")
B, T, N, K = 4, 300, 4, 2


def draw(*shapes, dtype="bfloat16"):
    return [jnp.asarray(oracle.normal(i, *shape), dtype) for i, shape in enumerate(shapes)]


def operands(head_dim, dtype="bfloat16", key_heads=K):
    return draw((B, T, N, head_dim), (B, T, key_heads, head_dim), (B, T, key_heads, head_dim), dtype=dtype)


def check(function, x, specs, kind=AxisType.Auto, gathers=False):
    """On two GPUs as on one, up to which programs share a block, without gathering an operand."""
    expected = jax.jit(function)(*x)
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(kind,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh) if kind == AxisType.Explicit else contextlib.nullcontext():
        put = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(x, specs, strict=True)]
        compiled = jax.jit(function).lower(*put).compile()
        got = compiled(*put)
    assert ("all-gather" in compiled.as_text()) == gathers
    close(got, expected)


def close(got, expected):
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        a, b = np.float64(a), np.float64(b)
        assert np.abs(b).max() > 0
        np.testing.assert_allclose(a, b, rtol=0, atol=0.01 * np.abs(b).max())


def derivatives(attend, *x):
    loss = lambda *x: jnp.sin(attend(*x)).sum()
    o, linear = jax.linearize(attend, *x)
    gradient = jax.grad(loss, (0, 1, 2))
    return o, gradient(*x), linear(*x), jax.jvp(attend, x, x), jax.jvp(gradient, x, x)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("spec", [BATCH, HEADS], ids=["batch", "heads"])
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(64, "bfloat16"), (128, "float16"), (72, "bfloat16"), (64, "float32"), (40, "float16")]
)
def test_every_gpu_computes_its_shard(head_dim, dtype, spec, kind):
    attend = functools.partial(dot_product_attention, is_causal=True, implementation="triton")
    check(functools.partial(derivatives, attend), operands(head_dim, dtype), [spec] * 3, kind)


@pytest.mark.parametrize("heads", [1, N])
def test_gradients_of_a_bias_are_summed_over_gpus(heads):
    (bias,) = draw((1, heads, T, T))
    loss = lambda bias, *x: jnp.sin(dot_product_attention(*x, bias, implementation="triton")).sum()
    check(jax.value_and_grad(loss, range(4)), [bias, *operands(64)], [PartitionSpec(), *[BATCH] * 3])


@pytest.mark.parametrize("option", ["lengths", "segments", "mask", "window", "dropout"])
def test_what_selects_is_cut_too(option):
    ids = jnp.asarray(np.arange(T) // 70 + np.zeros((B, 1)), jnp.int32)
    options = {
        "lengths": dict(key_value_seq_lengths=jnp.array([T, 3, 130, 0], jnp.int32)),
        "segments": dict(query_segment_ids=ids, key_value_segment_ids=ids),
        "mask": dict(mask=jnp.asarray(oracle.normal(0, B, 1, T, T) > 0)),
        "window": dict(local_window_size=(100, 20)),
        "dropout": dict(dropout_rate=0.5, dropout_key=jax.random.key(0)),
    }[option]
    attend = functools.partial(dot_product_attention, implementation="triton", **options)
    check(functools.partial(derivatives, attend), operands(64), [BATCH] * 3)


def test_gpus_that_compute_the_same_get_the_same_bits():
    """Of sums that one GPU adds up in any order."""
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    x = [jax.device_put(a, NamedSharding(mesh, PartitionSpec())) for a in draw(*[(1, 4096, 4, 64)] * 3)]
    ids = jnp.zeros((1, 4096), jnp.int32)
    options = dict(query_segment_ids=ids, key_value_segment_ids=ids, implementation="hopper")
    gradient = jax.jit(jax.grad(lambda *x: jnp.sin(dot_product_attention(*x, **options)).sum(), (0, 1, 2)))
    for a in gradient(*x):
        first, second = (np.asarray(shard.data) for shard in a.addressable_shards)
        assert first.tobytes() == second.tobytes()


def test_shard_map():
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    x = operands(128)
    function = functools.partial(derivatives, functools.partial(dot_product_attention, implementation="triton"))
    inside = jax.shard_map(function, mesh=mesh, in_specs=BATCH, out_specs=BATCH)
    got, expected = jax.jit(inside)(*x), jax.jit(function)(*x)
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        np.testing.assert_array_equal(np.float64(a), np.float64(b))


def test_memory_of_each_gpu():
    """The one GPU does not hold, or compute, what belongs to the other."""
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    spread = NamedSharding(mesh, BATCH)
    of = lambda batch, **how: [jax.ShapeDtypeStruct((batch, 4096, 8, 64), jnp.bfloat16, **how)] * 3
    gradient = jax.jit(jax.grad(lambda *x: dot_product_attention(*x, implementation="triton").sum(), (0, 1, 2)))
    both, alone = (gradient.lower(*x).compile().memory_analysis() for x in (of(4, sharding=spread), of(2)))
    for size in ("temp_size_in_bytes", "argument_size_in_bytes", "output_size_in_bytes"):
        assert getattr(both, size) <= 1.01 * getattr(alone, size), size


# ------------------------------------------------------------------------------------------ one sequence over both


RING, ULYSSES = 1, 2  # by so many heads of keys


@pytest.mark.parametrize(
    ("family", "head_dim", "dtype", "key_heads", "is_causal", "kind"),
    [
        ("hopper", 64, "bfloat16", RING, True, AxisType.Auto),
        ("hopper", 128, "float16", RING, False, AxisType.Explicit),
        ("hopper", 128, "bfloat16", ULYSSES, True, AxisType.Auto),
        ("triton", 72, "bfloat16", RING, True, AxisType.Explicit),
        ("triton", 64, "float32", RING, False, AxisType.Auto),
    ],
)
def test_a_sequence_is_divided(family, head_dim, dtype, key_heads, is_causal, kind):
    attend = functools.partial(dot_product_attention, is_causal=is_causal, implementation=family)
    check(functools.partial(derivatives, attend), operands(head_dim, dtype, key_heads), [SEQUENCE] * 3, kind)


def first_order(attend, *x):
    return jax.jvp(attend, x, x), jax.grad(lambda *x: jnp.sin(attend(*x)).sum(), (0, 1, 2))(*x)


def test_queries_alone_are_divided():
    attend = functools.partial(dot_product_attention, implementation="triton")
    check(functools.partial(first_order, attend), operands(64), [SEQUENCE, PartitionSpec(), PartitionSpec()])


@pytest.mark.parametrize("option", ["lengths", "segments", "mask", "window", "bias", "dropout"])
def test_what_selects_is_divided_too(option):
    ids = jnp.asarray(np.arange(T) // 70 + np.zeros((B, 1)), jnp.int32)
    options = {
        "lengths": dict(key_value_seq_lengths=jnp.array([T, 3, 130, 0], jnp.int32)),
        "segments": dict(query_segment_ids=ids, key_value_segment_ids=ids),
        "mask": dict(mask=jnp.asarray(oracle.normal(0, B, 1, T, T) > 0)),
        "window": dict(local_window_size=(100, 20)),
        "bias": dict(bias=draw((1, N, T, T))[0]),
        "dropout": dict(dropout_rate=0.5, dropout_key=jax.random.key(0)),
    }[option]
    attend = functools.partial(dot_product_attention, implementation="triton", **options)
    check(functools.partial(first_order, attend), operands(64, key_heads=RING), [SEQUENCE] * 3)


@pytest.mark.parametrize(
    ("strategy", "order"), [("ulysses", "zigzag"), ("ring", "zigzag"), ("all_gather", "contiguous")]
)
def test_strategies(strategy, order):
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    options = dict(is_causal=True, implementation="hopper")
    shared = functools.partial(
        dot_product_attention, context_axis="devices", context_strategy=strategy, context_order=order, **options
    )
    inside = jax.shard_map(shared, mesh=mesh, in_specs=SEQUENCE, out_specs=SEQUENCE)
    there, back = (reorder_zigzag, restore_zigzag) if order == "zigzag" else (lambda a, _: a,) * 2
    attend = lambda *x: back(inside(*(there(a, 2) for a in x)), 2)
    alone = functools.partial(dot_product_attention, **options)
    got, expected = (jax.jit(functools.partial(first_order, f))(*operands(128)) for f in (attend, alone))
    close(got, expected)


def test_memory_of_a_sequence():
    """Of a ring: the residuals of each GPU are those of its part."""
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    spread = NamedSharding(mesh, SEQUENCE)
    of = lambda **how: [jax.ShapeDtypeStruct((1, 16384, heads, 64), jnp.bfloat16, **how) for heads in (8, 1, 1)]

    def layers(q, k, v):
        for _ in range(12):
            q = dot_product_attention(q, k, v, implementation="triton")
        return q.astype(jnp.float32).sum()

    both, alone = (jax.jit(jax.grad(layers)).lower(*x).compile() for x in (of(sharding=spread), of()))
    assert both.memory_analysis().temp_size_in_bytes <= 0.75 * alone.memory_analysis().temp_size_in_bytes
