"""Ranges of keys, masks of blocks and packed sequences in JAX: transformations, shards, and errors."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import oracle
from families import hopper
from jax_flash_jvp import dot_product_attention, launch, varlen_attention, visibility
from packed import drawn as packed_with_tokens_of_none

H = 4


def packed(total, key_total, heads=2, key_heads=2):
    shapes = (total, heads, H), (key_total, key_heads, H), (key_total, key_heads, H)
    return [oracle.normal(i, *shape) for i, shape in enumerate(shapes)]


def apart(q, k, v, q_edges, k_edges, **arguments):
    """Sequence by sequence."""
    parts = []
    for first, end, k_first, k_end in zip(q_edges, q_edges[1:], k_edges, k_edges[1:], strict=False):
        one = (a[None] for a in (q[first:end], k[k_first:k_end], v[k_first:k_end]))
        some = k_end > k_first
        o = oracle.attention(*one, causal_alignment="lower_right", **arguments)[0] if some else q[first:end] * 0
        parts.append(o)
    return jnp.concatenate(parts)


CASES = {
    "": ([0, 5, 5, 12, 20], None, {}),
    "causal": ([0, 3, 9, 20], [0, 8, 9, 15], dict(is_causal=True)),
    "window": ([0, 3, 9, 20], [0, 8, 8, 15], dict(local_window_size=(2, 1))),
    "window-left": ([0, 14, 20], [0, 9, 15], dict(local_window_size=(4, None), logits_soft_cap=1.5)),
}


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)], ids=["", "grouped"])
@pytest.mark.parametrize("case", CASES)
def test_packed_sequences(case, heads, check):
    q_edges, k_edges, arguments = CASES[case]
    attend = functools.partial(
        varlen_attention,
        cu_seqlens_q=np.array(q_edges),
        cu_seqlens_k=k_edges and np.array(k_edges),
        scale=0.3,
        **arguments,
    )
    expected = functools.partial(apart, q_edges=q_edges, k_edges=k_edges or q_edges, scale=0.3, **arguments)

    def derivatives(attend, *x):
        pull = lambda *x: jax.vjp(attend, *x)[1](x[0])
        return jax.jvp(attend, x, x), pull(*x), jax.jvp(pull, x, x)

    make = lambda _: functools.partial(derivatives, attend)
    check(make, packed(q_edges[-1], (k_edges or q_edges)[-1], *heads),
          make_expected=lambda _: functools.partial(derivatives, expected))  # fmt: skip


# names of implementations, and whether edges are traced
NOBODY_WROTE = {
    "xla": ("xla", False),
    "xla-traced": ("xla", True),
    "interpret": pytest.param("interpret", False, marks=pytest.mark.thorough),
    "interpret-traced": ("interpret", True),
    "portable": pytest.param("portable", False, marks=pytest.mark.gpu),
    "portable-traced": pytest.param("portable", True, marks=pytest.mark.gpu),
    "hopper": pytest.param("hopper", False, marks=[pytest.mark.gpu, hopper]),
    "hopper-traced": pytest.param("hopper", True, marks=[pytest.mark.gpu, hopper]),
}


@pytest.mark.filterwarnings("ignore:.*tokens in no sequence")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "arguments", [{}, dict(is_causal=True), dict(local_window_size=(2, 1))], ids=["", "causal", "window"]
)
@pytest.mark.parametrize(("implementation", "traced"), NOBODY_WROTE.values(), ids=NOBODY_WROTE)
def test_tokens_of_no_sequence_may_hold_anything(implementation, traced, arguments, seed):
    """In arrays, tangents and cotangents.  Results are zero there, and elsewhere those of the sequences put together."""
    on_gpu = implementation in ("portable", "hopper")
    dtype, head_dim, longest = ("bfloat16", 64, 90) if on_gpu else ("float32", H, 8)
    edges, inside, compact = packed_with_tokens_of_none(seed, longest)
    rows = [inside[0], inside[1], inside[1], inside[0], inside[0]]
    channels = [
        (4, head_dim),
        (2, head_dim),
        (2, head_dim),
        (4, head_dim),
        (4,),
    ]  # of q, k, v, and cotangents of o and ℓ
    drawn = [[oracle.normal(10 * i + j, r.sum(), *c) for j, (r, c) in enumerate(zip(rows, channels, strict=True))]
             for i in range(2)]  # fmt: skip

    def attend(edges, *x):
        o, lse = varlen_attention(*x, *edges, implementation=implementation, return_residual=True, **arguments)
        return o, jnp.where(jnp.isneginf(lse), 0, lse)

    @jax.jit
    def derivatives(edges, along, tangents):
        call = functools.partial(attend, edges)
        *x, g, h = along
        *tx, tg, th = tangents
        backward = lambda *x: jax.vjp(call, *x[:3])[1](x[3:])
        pull = jax.vjp(lambda x, tx: jax.jvp(call, x, tx), tuple(x), tuple(tx))[1]
        linear = jax.linearize(call, *x)[1](*tx)
        return linear, jax.jvp(call, x, tx), jax.jvp(backward, along, tangents), pull(((g, h), (tg, th)))

    def of(edges, arrays):
        arrays = [[jnp.asarray(a, dtype if a.ndim == 3 else "float32") for a in some] for some in arrays]
        if traced:
            return derivatives([jnp.asarray(a) for a in edges], *arrays)
        return jax.jit(functools.partial(derivatives.__wrapped__, edges))(*arrays)

    def spread(some):
        """With NaN in the place of what nobody wrote."""
        whole = [np.full((len(r), *a.shape[1:]), np.nan) for r, a in zip(rows, some, strict=True)]
        for w, r, a in zip(whole, rows, some, strict=True):
            w[r] = a
        return whole

    got, want = of(edges, [spread(some) for some in drawn]), of(compact, drawn)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        r = next(r for r in inside if len(r) == len(a) and r.sum() == len(b))
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert not a[~r].any()
        scale = np.abs(b).max(initial=1)
        np.testing.assert_allclose(a[r] / scale, b / scale, atol=0.03 if on_gpu else 1e-5)


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_what_nobody_wrote_reaches_no_sinks(implementation):
    """Nor a cotangent of the log-sum-exp, which is −∞ there, with sinks too."""
    edges, inside, compact = packed_with_tokens_of_none(0)
    x = [oracle.normal(i, inside[min(i, 1)].sum(), h, H).astype(np.float32) for i, h in enumerate((4, 2, 2))]
    sinks = oracle.normal(3, 4).astype(np.float32)
    cotangents = [oracle.normal(4 + len(c), len(x[0]), *c).astype(np.float32) for c in ((4, H), (4,))]

    @jax.jit
    def derivatives(edges, x, cotangents):
        attend = lambda *x: varlen_attention(
            *x[:3], *edges, sinks=x[3], implementation=implementation, return_residual=True
        )
        (o, lse), pull = jax.vjp(attend, *x, sinks)
        return [o, lse], pull(tuple(cotangents))

    def spread(a, i):
        whole = np.full((len(inside[i]), *a.shape[1:]), np.nan, np.float32)
        whole[inside[i]] = a
        return whole

    torn = [spread(a, i) for a, i in zip(x, (0, 1, 1), strict=True)], [spread(a, 0) for a in cotangents]
    (o, lse), got = derivatives(edges, *torn)
    (expected, expected_lse), want = derivatives(compact, x, cotangents)
    assert not o[~inside[0]].any()
    assert np.isneginf(lse[~inside[0]]).all()
    for a, b, r in zip((o, lse, *got), (expected, expected_lse, *want), (0, 0, 0, 1, 1, None), strict=True):
        np.testing.assert_allclose(a if r is None else a[inside[r]], b, rtol=1e-4, atol=1e-5)


def test_one_program_for_every_packing():
    traces, x = [], packed(20, 20)

    @jax.jit
    def attend(edges):
        traces.append(edges)
        return varlen_attention(*x, edges, is_causal=True, return_residual=True)

    for edges in ([0, 5, 20], [0, 11, 20], [2, 8, 17]):  # the last of which leaves tokens in no sequence
        first, end = edges[0], edges[-1]
        o, lse = attend(np.array(edges))
        own = apart(*(a[first:end] for a in x), [n - first for n in edges], [n - first for n in edges], is_causal=True)
        np.testing.assert_allclose(o[first:end], own, rtol=1e-4, atol=1e-5)
        for outside in (slice(0, first), slice(end, None)):
            assert not o[outside].any()
            assert np.isneginf(lse[outside]).all()
    assert len(traces) == 1


@pytest.mark.parametrize("implementation", ["xla", pytest.param("interpret", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mapped", [(0, None), (None, 0), (0, 0)], ids=str)
def test_vmap(implementation, mapped):
    """Where some calls share the ranges, or the blocks, and others do not."""
    x = [jnp.asarray(oracle.normal(i, 3, 2, 20, 2, H), jnp.float32) for i in range(3)]
    ranges = jnp.stack([visibility.window(20, n, 3, like=x[0]) for n in (2, 5, 9)])
    blocks = jnp.asarray(oracle.normal(5, 3, 1, 2, 4, 3) > -0.5)
    ranges, blocks = (a if axis == 0 else a[0] for a, axis in zip((ranges, blocks), mapped, strict=True))
    attend = lambda ranges, blocks, *x: dot_product_attention(
        *x, key_ranges=ranges, mask=blocks, mask_block_size=(5, 8), implementation=implementation
    )
    both = lambda *args: jax.jvp(functools.partial(attend, *args[:2]), args[2:], args[2:])
    got = jax.vmap(both, (*mapped, 0, 0, 0))(ranges, blocks, *x)
    of = lambda a, axis, i: a if axis is None else a[i]
    want = [both(of(ranges, mapped[0], i), of(blocks, mapped[1], i), *(a[i] for a in x)) for i in range(3)]
    jax.tree.map(lambda a, *b: np.testing.assert_allclose(a, np.stack(b), rtol=1e-4, atol=1e-5), got, *want)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize(
    "spec", [PartitionSpec("devices"), PartitionSpec(None, None, "devices")], ids=["batch", "heads"]
)
def test_every_device_computes_its_shard(spec, monkeypatch):
    """With its own part of what has an axis of the batch, or of heads, and all of what has not."""
    shapes = set()

    def stand_in(name, launcher, x, *args, problem, **static):
        shapes.add((x.query.shape, x.key_ranges.shape, x.mask.shape))
        return launch.reference_job(name)(x, *args, problem=problem, **static)

    monkeypatch.setattr(launch, "_by_kernels", stand_in)
    monkeypatch.setattr(launch.Interpreter, "on_shards", True)
    x = [jnp.asarray(oracle.normal(i, 2, 20, n, H), jnp.float32) for i, n in enumerate((4, 2, 2))]
    ranges = jnp.concatenate([visibility.window(20, n, 3, like=x[0]) for n in (2, 5)], 1)  # of heads of keys
    blocks = jnp.asarray(oracle.normal(5, 2, 1, 4, 3) > -0.5)
    attend = lambda ranges, blocks, *x: dot_product_attention(
        *x, key_ranges=ranges, mask=blocks, mask_block_size=(5, 8), implementation="interpret"
    )
    gradient = jax.jit(jax.grad(lambda *args: jnp.sin(attend(*args)).sum(), (2, 3, 4)))
    expected = gradient(ranges, blocks, *x)
    sharding = NamedSharding(jax.make_mesh((2,), ("devices",)), spec)
    program = gradient.lower(ranges, blocks, *(jax.device_put(a, sharding) for a in x)).compile()
    got = program(
        *(jax.device_put(a, s) for a, s in zip((ranges, blocks, *x), program.input_shardings[0], strict=True))
    )
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    by_batch = spec[0] is not None
    shard = (
        ((1, 20, 4, H), (1, 2, 20, 1, 2), (1, 1, 4, 3)) if by_batch else ((2, 20, 2, H), (1, 1, 20, 1, 2), (2, 1, 4, 3))
    )
    assert shard in shapes


def test_integers_of_every_width():
    x = packed(9, 9)
    ranges = visibility.window(9, 2, 3)
    expected = dot_product_attention(*x, key_ranges=ranges)
    for dtype in (np.int8, np.int16, np.uint8):
        np.testing.assert_array_equal(dot_product_attention(*x, key_ranges=ranges.clip(0).astype(dtype)), expected)
    with jax.enable_x64(True):
        beyond = np.where(ranges < 9, ranges.astype(np.int64), 2**40)
        np.testing.assert_allclose(dot_product_attention(*x, key_ranges=beyond), expected, rtol=1e-5, atol=1e-5)


X = [np.zeros((2, 6, 4, 8), np.float32)] * 3
RANGES, BLOCKS = np.zeros((1, 1, 6, 1, 2), np.int32), np.ones((2, 3), bool)
attend = functools.partial(dot_product_attention, *X)
of_tokens = lambda q, k=None: varlen_attention(*(a[0] for a in X), np.array(q), k and np.array(k))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: attend(key_ranges=RANGES[:, :, :5]), ValueError,
         "`key_ranges` must have shape (1 or 2, 1 or 4, 6, R, 2), [start, end) of R ranges of keys for each query: got"),
        (lambda: attend(key_ranges=RANGES[..., :1]), ValueError, "`key_ranges` must have shape"),
        (lambda: attend(key_ranges=RANGES[:, :, :, :0]), ValueError, "`key_ranges` must have shape"),
        (lambda: attend(key_ranges=np.repeat(RANGES, 3, 1)), ValueError, "`key_ranges` must have shape"),
        (lambda: attend(key_ranges=RANGES.astype(np.float32)), TypeError, "`key_ranges` must be of integers: got float32"),
        (lambda: attend(mask=BLOCKS, mask_block_size=(3, 3)), ValueError,
         "`mask` must have shape (1 or 2, 1 or 4, 2, 2), as many blocks of `mask_block_size`=(3, 3) as 6 queries and 6"),
        (lambda: attend(mask_block_size=(3, 2)), ValueError, "there is no mask"),
        (lambda: attend(mask=BLOCKS, mask_block_size=3), TypeError, "`mask_block_size` must be a pair of integers"),
        (lambda: attend(mask=BLOCKS, mask_block_size=(3, 0)), ValueError, "`mask_block_size` must be positive"),
        (lambda: of_tokens([0, 4, 3]), ValueError, "`cu_seqlens_q` must not decrease, nor begin below zero: got [0, 4, 3]"),
        (lambda: of_tokens([-1, 6]), ValueError, "`cu_seqlens_q` must not decrease, nor begin below zero: got [-1, 6]"),
        (lambda: of_tokens([0, 7]), ValueError, "`cu_seqlens_q` must not end beyond the 6 tokens: got [0, 7]"),
        (lambda: of_tokens([0, 6], [0, 7]), ValueError, "`cu_seqlens_k` must not end beyond the 6 tokens: got [0, 7]"),
        (lambda: of_tokens([0, 6], [0, 3, 6]), ValueError, "`cu_seqlens_k` must have shape [sequences + 1]"),
        (lambda: of_tokens([0.0, 6.0]), TypeError, "`cu_seqlens_q` must be of integers"),
        (lambda: varlen_attention(*X, np.array([0, 6])), ValueError, "must have shape [tokens, heads, head dimension]"),
    ],
)  # fmt: skip
def test_bad_arguments(call, error, text):
    with pytest.raises(error, match=re.escape(text)):
        call()


def test_blocks_do_not_go_with_a_context():
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec(None, "devices")
    attend = functools.partial(dot_product_attention, context_axis="devices", mask=BLOCKS, mask_block_size=(3, 2))
    with pytest.raises(ValueError, match="`mask_block_size` does not go with a `context_axis`: say it in `key_ranges`"):
        jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)(*X)


def test_block_sizes_are_static():
    with pytest.raises(TypeError, match="`mask_block_size` must be known when the call is traced"):
        jax.jit(lambda n: attend(mask=BLOCKS, mask_block_size=(n, n)))(3)


def test_a_window_with_a_limit_of_less_one_is_told_of():
    x = packed(8, 8)
    with pytest.warns(
        UserWarning, match=r"`local_window_size`=\(3, -1\) shows query i only the keys i - 3 … i - 1"
    ) as told:
        varlen_attention(*x, np.array([0, 3, 8]), local_window_size=(3, -1))
    assert told[0].filename == __file__


def test_tokens_before_the_first_sequence_are_told_once():
    with pytest.warns(UserWarning, match="leaves the first 3 tokens in no sequence") as told:
        varlen_attention(*jnp.ones((3, 8, 2, 4)), np.array([3, 8]))
    assert [w.filename for w in told] == [__file__]
