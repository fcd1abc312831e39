"""Each of two GPUs computes its part of a sharded program, and only that: `pytest -m gpu` where there are two."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import oracle
from jax_flash_jvp import dot_product_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu" or jax.device_count() < 2, reason="needs two GPUs"),
]

BATCH, HEADS = PartitionSpec("devices"), PartitionSpec(None, None, "devices")
B, T, N, K = 4, 300, 4, 2


def draw(*shapes, dtype="bfloat16"):
    return [jnp.asarray(oracle.normal(i, *shape), dtype) for i, shape in enumerate(shapes)]


def operands(head_dim, dtype="bfloat16"):
    return draw((B, T, N, head_dim), (B, T, K, head_dim), (B, T, K, head_dim), dtype=dtype)


def check(function, x, specs, kind=AxisType.Auto):
    """On two GPUs as on one, up to which programs share a block, without moving an operand."""
    expected = jax.jit(function)(*x)
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(kind,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh) if kind == AxisType.Explicit else contextlib.nullcontext():
        put = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(x, specs, strict=True)]
        compiled = jax.jit(function).lower(*put).compile()
        got = compiled(*put)
    assert "all-gather" not in compiled.as_text()
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
