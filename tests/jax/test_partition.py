"""Kernels where XLA divides a program among devices: each computes its own shard.  The reference stands in for them, for XLA
cannot look into what `custom_partitioning` wraps either."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import oracle
from jax_flash_jvp import dot_product_attention, launch, partition
from jax_flash_jvp.kernel_primitive import KernelPrimitive, axes_of, result
from recorded import launches_of, record_launches

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")

B, T, N, K, H = 4, 20, 4, 2, 8
attend = functools.partial(dot_product_attention, is_causal=True, implementation="interpret")


@pytest.fixture
def computed(monkeypatch):
    """(job, shape of the queries, heads of the keys) of all that is traced."""
    seen = set()

    def stand_in(name, launcher, x, *args, problem, **static):
        seen.add((name, x.query.shape, x.key.shape[-2]))
        return launch.reference_job(name)(x, *args, problem=problem, **static)

    monkeypatch.setattr(launch, "_by_kernels", stand_in)
    monkeypatch.setattr(launch.Interpreter, "on_shards", True)
    return seen


def draw(*shapes):
    return [jnp.asarray(oracle.normal(i, *shape), jnp.float32) for i, shape in enumerate(shapes)]


def operands(heads=N, key_heads=K):
    return draw((B, T, heads, H), (B, T, key_heads, H), (B, T, key_heads, H))


def on_mesh(function, x, spec, kind=AxisType.Auto, set_mesh=False):
    """The result, and the program, where arrays of a batch are spread so."""
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(kind,))
    with jax.set_mesh(mesh) if set_mesh or kind == AxisType.Explicit else contextlib.nullcontext():
        put = lambda a: jax.device_put(a, NamedSharding(mesh, spec if a.shape[0] == B else PartitionSpec()))
        x = [*map(put, x)]
        compiled = jax.jit(function).lower(*x).compile()
        return compiled(*x), compiled.as_text()


def check(function, x, spec, gathers=False, **how):
    expected = jax.jit(function)(*x)
    got, program = on_mesh(function, x, spec, **how)
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    assert ("all-gather" in program) == gathers
    return program


BATCH, HEADS = PartitionSpec("devices"), PartitionSpec(None, None, "devices")
CONTEXTS = {"auto": {}, "set-mesh": dict(set_mesh=True), "explicit": dict(kind=AxisType.Explicit)}
NAMES = ["auto", pytest.param("set-mesh", marks=pytest.mark.thorough), "explicit"]


@pytest.mark.parametrize("inside", [False, True], ids=["jit", "shard_map"])
@pytest.mark.parametrize(
    ("spec", "alike"),
    [
        (PartitionSpec(("x", "y")), False),
        (PartitionSpec("x", None, "y"), False),
        (PartitionSpec("x", "y"), False),
        (PartitionSpec("x"), True),
        (PartitionSpec(None, "y"), True),
        (PartitionSpec(), True),
    ],
    ids=str,
)
def test_devices_that_compute_the_same_get_the_same_bits(spec, alike, inside, monkeypatch):
    """Sums in any order would let copies of what depends on them drift apart."""
    if inside and spec == PartitionSpec():
        alike = False  # types look as they do without `check_vma`
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    deterministic = []

    def stand_in(name, launcher, x, *args, problem, **static):
        if name == "backward":
            deterministic.append(problem.deterministic)
        return launch.reference_job(name)(x, *args, problem=problem, **static)

    monkeypatch.setattr(launch, "_by_kernels", stand_in)
    monkeypatch.setattr(launch.Interpreter, "on_shards", True)
    put = [jax.device_put(a, NamedSharding(mesh, spec)) for a in operands()]
    function = jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec) if inside else attend
    jax.jit(jax.grad(lambda *x: jnp.sin(function(*x)).sum(), (0, 1, 2))).lower(*put).compile()
    assert deterministic[-1] == alike  # the one that XLA asks for as it divides the program


def test_a_kernel_that_is_no_attention_hears_that_devices_compute_the_same():
    heard = []

    def doubled(a, *, divided, replicated):
        heard.append(replicated)
        return 2 * a

    kernel = KernelPrimitive("doubled", lambda a: result(a.shape, a.dtype, a, axes_of(a)), {"default": doubled}, None)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    for spec in (PartitionSpec("x"), PartitionSpec("x", "y")):
        got = jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=spec, out_specs=spec))(jnp.ones((2, 2)))
        np.testing.assert_array_equal(got, 2 * np.ones((2, 2)))
    assert heard == [True, False]


@pytest.mark.parametrize("context", NAMES)
@pytest.mark.parametrize(
    ("spec", "heads", "shard"),
    [(BATCH, (N, K), ((2, T, N, H), K)), (HEADS, (N, K), ((B, T, 2, H), 1)), (HEADS, (2, 2), ((B, T, 1, H), 1))],
    ids=["batch", "heads", "heads-alike"],
)
def test_every_device_computes_its_shard(context, spec, heads, shard, computed):
    def derivatives(*x):
        loss = lambda *x: jnp.sin(attend(*x)).sum()
        o, linear = jax.linearize(attend, *x)
        return (
            jax.grad(loss, (0, 1, 2))(*x),
            linear(*x),
            jax.jvp(attend, x, x),
            jax.jvp(jax.grad(loss, (0, 1, 2)), x, x),
            o,
        )

    check(derivatives, operands(*heads), spec, **CONTEXTS[context])
    jobs = {"forward", "forward_dual", "tangent", "backward", "backward_dual"}
    assert {job for job, *_ in computed} == jobs <= {job for job, *of in computed if tuple(of) == shard}


@pytest.mark.parametrize(
    ("sizes", "spec", "batch", "shard"),
    [
        ((3, 2), PartitionSpec("x", None, "y"), 6, ((2, T, 2, H), 1)),
        ((2, 3), PartitionSpec("y", None, "x"), 6, ((2, T, 2, H), 1)),
        ((3, 2), PartitionSpec(("y", "x")), 6, ((1, T, N, H), K)),
        ((6, 1), PartitionSpec("x"), 12, ((2, T, N, H), K)),
        ((2, 3), PartitionSpec("y"), 6, ((2, T, N, H), K)),
        ((3, 2), PartitionSpec(None, None, "y"), 6, ((6, T, 2, H), 1)),
        ((1, 3), PartitionSpec("y"), 3, ((1, T, N, H), K)),
    ],
)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_numbers_of_devices_and_their_order(sizes, spec, batch, shard, kind, computed, caplog):
    mesh = jax.make_mesh(sizes, ("x", "y"), axis_types=(kind,) * 2)
    x = draw((batch, T, N, H), (batch, T, K, H), (batch, T, K, H))
    gradient = jax.jit(jax.grad(lambda *x: jnp.sin(attend(*x)).sum(), (0, 1, 2)))
    expected = gradient(*x)
    with jax.set_mesh(mesh) if kind == AxisType.Explicit else contextlib.nullcontext():
        x = [jax.device_put(a, NamedSharding(mesh, spec)) for a in x]
        compiled = gradient.lower(*x).compile()
        for a, b in zip(compiled(*x), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    assert "all-gather" not in compiled.as_text()
    assert not caplog.records
    assert {("forward", *shard), ("backward", *shard)} <= computed


def test_heads_are_cut_as_far_as_their_number_goes(computed, caplog):
    """Of queries, over more devices than keys have heads."""
    mesh = jax.make_mesh((4,), ("devices",), axis_types=(AxisType.Auto,))
    x = operands()
    put = [
        jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(x, (HEADS, *[PartitionSpec()] * 2), strict=True)
    ]
    np.testing.assert_allclose(jax.jit(attend)(*put), attend(*x), rtol=2e-5, atol=2e-5)
    assert ("forward", (B, T, 2, H), 1) in computed
    assert "into 4 pieces, but attention is computed in 2" in caplog.text


def test_results_say_how_to_cut(computed):
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(AxisType.Auto,))
    x = [jax.device_put(a, NamedSharding(mesh, PartitionSpec())) for a in operands()]
    whole = lambda *x: attend(*(jax.lax.with_sharding_constraint(a, NamedSharding(mesh, PartitionSpec())) for a in x))
    got = jax.jit(whole, out_shardings=NamedSharding(mesh, BATCH))(*x)
    np.testing.assert_allclose(got, attend(*x), rtol=2e-5, atol=2e-5)
    assert ("forward", (2, T, N, H), K) in computed


@pytest.mark.parametrize("context", NAMES)
@pytest.mark.parametrize("heads", [1, N])
def test_gradients_of_a_bias_are_summed_over_the_devices(context, heads, computed):
    """Of one that all entries of the batch share, or all heads too."""
    (bias,) = draw((1, heads, T, T))
    loss = lambda bias, *x: jnp.sin(attend(*x, bias)).sum()
    program = check(jax.value_and_grad(loss, range(4)), [bias, *operands()], BATCH, **CONTEXTS[context])
    assert "all-reduce" in program
    many = lambda bias, *x: jax.grad(lambda b: jnp.sin(jax.vmap(lambda *x: attend(*x, b[0]))(*x)).sum())(bias)
    check(many, [bias, *operands()], BATCH, **CONTEXTS[context])
    assert ("backward", (2, 1, T, N, H), K) in computed
    if heads == N:
        check(jax.grad(loss, range(4)), [bias, *operands()], HEADS, gathers=context == "explicit", **CONTEXTS[context])


def test_an_axis_of_the_mesh_cuts_once(computed):
    """Queries are spread by batch, keys by heads."""
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(AxisType.Auto,))
    q, k, v = operands()
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    got = jax.jit(attend)(put(q, BATCH), put(k, HEADS), put(v, HEADS))
    np.testing.assert_allclose(got, attend(q, k, v), rtol=2e-5, atol=2e-5)
    assert computed <= {("forward", (B, T, N, H), K), ("forward", (2, T, N, H), K), ("forward", (B, T, 2, H), 1)}


def test_programs_say_what_they_compute(computed):
    """To JAX's cache of compiled programs, which does not look into a job."""
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(AxisType.Auto,))
    x = [jax.device_put(a, NamedSharding(mesh, BATCH)) for a in operands()]

    def text(scale):
        text = jax.jit(lambda *x: attend(*x, scale=scale)).lower(*x).as_text()
        return re.sub(r'backend_config = "\d+"', "", text)

    assert "CustomSPMDPartitioning" in text(0.5)
    assert text(0.5) == text(0.5) != text(0.25)


def test_what_is_exported_is_not_cut(computed, caplog):
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(AxisType.Auto,))
    x = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, BATCH)) for a in operands()]
    assert "CustomSPMDPartitioning" not in jax.export.export(jax.jit(attend))(*x).mlir_module()
    assert "in what jax.export exports, XLA cannot divide it" in caplog.text


def test_nothing_is_said_inside_a_shard_map_over_all_axes(computed, caplog):
    mesh = jax.make_mesh((2, 2), ("devices", "others"), axis_types=(AxisType.Auto,) * 2)
    jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=BATCH, out_specs=BATCH))(*operands())
    assert computed == {("forward", (2, T, N, H), K)}
    assert not caplog.records


@pytest.mark.parametrize("spread", ["queries", "keys"])
def test_heads_of_queries_and_of_keys_are_cut_alike(spread, computed):
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(AxisType.Auto,))
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    query, keys = (HEADS, PartitionSpec()) if spread == "queries" else (PartitionSpec(), HEADS)
    q, k, v = operands()
    compiled = jax.jit(attend).lower(put(q, query), put(k, keys), put(v, keys)).compile()
    assert "all-gather" not in compiled.as_text()
    assert ("forward", (B, T, 2, H), 1) in computed


def test_what_selects_is_cut_too(computed):
    lengths, ids = jnp.array([20, 3, 8, 0], jnp.int32), jnp.asarray(np.arange(T) // 7 + np.zeros((B, 1)), jnp.int32)
    mask = jnp.asarray(oracle.normal(0, B, 1, T, T) > 0)
    options = dict(key_value_seq_lengths=lengths, query_segment_ids=ids, key_value_segment_ids=ids, mask=mask)
    check(jax.grad(lambda *x: jnp.sin(attend(*x, **options)).sum(), (0, 1, 2)), operands(), BATCH)
    assert ("backward", (2, T, N, H), K) in computed


def test_vmap(computed):
    """Over the batch, and over tangents alone."""
    grad = jax.grad(lambda *x: jnp.sin(attend(*x)).sum(), (0, 1, 2))
    check(jax.vmap(grad), operands(), BATCH)
    tangents = lambda *x: jax.vmap(lambda t: jax.jvp(lambda q: attend(q, *x[1:]), x[:1], (t,))[1])(
        jnp.stack([x[0]] * 3)
    )
    check(tangents, operands(), BATCH)
    assert {("backward", (2, 1, T, N, H), K), ("tangent", (1, 2, T, N, H), K)} <= computed


@pytest.mark.parametrize("heads", [(N, 1), (6, 3)], ids=["one-key-head", "three-key-heads"])
def test_what_cannot_be_cut_is_gathered(heads, computed, caplog):
    q, *x = operands(*heads)
    x = [q, *(jnp.concatenate([a, a]) for a in x)]  # which is then not spread
    check(lambda q, k, v: attend(q, k[:B], v[:B]), x, HEADS, gathers=True)
    assert computed == {("forward", q.shape, heads[1])}
    assert "into 2 pieces, but attention is computed in 1" in caplog.text
    assert "heads can be sharded over as many devices as divide the number of key heads" in caplog.text


def test_dropout_counts_all_heads(computed):
    dropped = lambda *x: attend(*x, dropout_rate=0.5, dropout_key=jax.random.key(0))
    check(dropped, operands(), HEADS)
    check(dropped, operands(), BATCH)
    assert {("forward", (B, T, 2, H), 1), ("forward", (2, T, N, H), K)} <= computed


# ------------------------------------------------------------------------------------------------ the sequence

SEQUENCE = PartitionSpec(None, "devices")
drawn_ranges = lambda b, heads, t: np.random.default_rng(0).integers(-2, t + 3, (b, heads, t, 2, 2), np.int32)
EXCHANGES = {"ulysses": "all-to-all", "ring": "collective-permute"}


def second_order(*x):
    gradient = jax.grad(lambda *x: jnp.sin(attend(*x)).sum(), (0, 1, 2))
    return attend(*x), jax.jvp(gradient, x, x)


@pytest.mark.parametrize("context", NAMES)
@pytest.mark.parametrize(
    ("strategy", "heads", "shard"),
    [("ulysses", (N, K), ((B, T, 2, H), 1)), ("ring", (3, 1), ((B, T // 2, 3, H), 1))], ids=EXCHANGES,
)  # fmt: skip
def test_the_sequence_is_cut(context, strategy, heads, shard, computed, caplog):
    program = check(second_order, operands(*heads), SEQUENCE, **CONTEXTS[context])
    assert EXCHANGES[strategy] in program
    assert {("forward", *shard), ("backward_dual", *shard)} <= computed
    assert not caplog.records


@pytest.mark.parametrize(
    ("sizes", "spec", "shard"),
    [
        ((2, 2, 2), PartitionSpec("x", "y", "z"), ((2, 10, 2, H), 1)),
        ((2, 2), PartitionSpec(None, ("x", "y")), ((B, 5, N, H), K)),
        ((2, 4), PartitionSpec("x", "y"), ((2, 5, N, H), K)),
    ],
    ids=["batch-and-heads", "two-axes", "batch"],
)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.thorough
def test_the_sequence_beside_other_axes(sizes, spec, shard, kind, computed, caplog):
    devices = jax.devices()[: np.prod(sizes)]
    mesh = jax.make_mesh(sizes, ("x", "y", "z")[: len(sizes)], axis_types=(kind,) * len(sizes), devices=devices)
    gradient = jax.jit(jax.grad(lambda *x: sum(jnp.sin(a).sum() for a in jax.jvp(attend, x, x)), (0, 1, 2)))
    x = operands()
    expected = gradient(*x)
    with jax.set_mesh(mesh) if kind == AxisType.Explicit else contextlib.nullcontext():
        compiled = gradient.lower(*(jax.device_put(a, NamedSharding(mesh, spec)) for a in x)).compile()
        got = compiled(*(jax.device_put(a, NamedSharding(mesh, spec)) for a in x))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=5e-5, atol=5e-5)
    assert "all-gather" not in compiled.as_text()
    assert not caplog.records
    assert {("forward_dual", *shard), ("backward_dual", *shard)} <= computed


def test_queries_alone_are_cut(computed, caplog):
    """Of keys that all devices have, whose number they need not divide."""
    mesh = jax.make_mesh((4,), ("devices",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    q, k, v = draw((B, T, N, H), (B, 7, K, H), (B, 7, K, H))
    gradient = jax.jit(jax.grad(lambda *x: jnp.sin(attend(*x)).sum(), (0, 1, 2)))
    put = [
        jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in ((q, SEQUENCE), *[(a, PartitionSpec()) for a in (k, v)])
    ]
    compiled = gradient.lower(*put).compile()
    for a, b in zip(compiled(*put), gradient(q, k, v), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    assert "all-gather" not in compiled.as_text()
    assert ("backward", (B, 5, N, H), K) in computed
    assert not caplog.records


@pytest.mark.parametrize(
    ("option", "strategy"),
    [
        ("mask", "ring"), ("bias", "ring"), ("ranges", "ulysses"), ("ranges-mask", "ring"),
        pytest.param("dropout", "ulysses", marks=pytest.mark.thorough),
    ],
)  # fmt: skip
def test_what_goes_with_the_sequence(option, strategy, computed, caplog):
    mask, ranges = (jnp.asarray(oracle.normal(0, B, 1, T, T) > 0), jnp.asarray(drawn_ranges(B, K, T)))
    options = {
        "mask": dict(mask=mask),
        "ranges": dict(key_ranges=ranges),
        "ranges-mask": dict(key_ranges=ranges, mask=mask),
        "bias": dict(bias=draw((1, N, T, T))[0]),
        "dropout": dict(dropout_rate=0.5, dropout_key=jax.random.key(0)),
    }[option]
    gradient = jax.grad(lambda *x: jnp.sin(attend(*x, **options)).sum(), (0, 1, 2))
    program = check(gradient, operands(), SEQUENCE)
    assert EXCHANGES[strategy] in program
    assert not caplog.records


def test_blocks_are_not_cut(computed, caplog):
    mask = jnp.asarray(oracle.normal(0, 1, 1, 4, 5) > 0)
    check(lambda *x: attend(*x, mask=mask, mask_block_size=(5, 4)), operands(), SEQUENCE, gathers=True)
    assert "a sequence cannot be sharded if the call has a `mask_block_size`" in caplog.text


def test_keys_that_alone_are_cut_are_gathered(computed, caplog):
    q, k, v = operands()
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(AxisType.Auto,))
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    got = jax.jit(attend)(put(q[:, :1], PartitionSpec()), put(k, SEQUENCE), put(v, SEQUENCE))
    np.testing.assert_allclose(got, attend(q[:, :1], k, v), rtol=2e-5, atol=2e-5)
    assert "keys can be sharded along the sequence if queries are too" in caplog.text


@pytest.mark.thorough
def test_layers_of_a_sequence():
    """By the reference, which is divided as the kernels are: scan over layers, remat, a consistency step, a third derivative."""
    mesh = jax.make_mesh((4,), ("devices",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    x, t = draw((2, 16, 1, H), (2, 16, 1, H))
    weights = 0.3 * draw((2, H, H))[0]
    layer = lambda h, w: h + dot_product_attention(h @ w, h @ (2 * w), h @ w.T, is_causal=True)
    net = lambda w, x: jax.lax.scan(lambda h, w: (jax.checkpoint(layer)(h, w), None), x, w)[0]

    def step(weights, x, t):
        y, t_y = jax.jvp(functools.partial(net, weights), (x,), (t,))
        return ((y - jnp.sin(jax.lax.stop_gradient(t_y))) ** 2).sum()

    f = lambda s, x: (dot_product_attention(s * x, x, x) ** 2).sum()
    third = lambda x: jax.jacfwd(jax.grad(jax.grad(f)))(0.7, x)
    spread = NamedSharding(mesh, SEQUENCE)
    for function, args in ((jax.value_and_grad(step), (weights, x, t)), (third, (x,))):
        expected = jax.jit(function)(*args)
        put = [
            jax.device_put(a, spread if a.shape[:2] == (2, 16) else NamedSharding(mesh, PartitionSpec())) for a in args
        ]
        compiled = jax.jit(function).lower(*put).compile()
        assert "collective-permute" in compiled.as_text()
        for a, b in zip(*map(jax.tree.leaves, (compiled(*put), expected)), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("spec", [BATCH, PartitionSpec(None, "devices")], ids=["batch", "rows"])
def test_inside_a_shard_map_over_other_axes(spec, computed, caplog):
    mesh = jax.make_mesh((1, 2), ("manual", "devices"), axis_types=(AxisType.Auto,) * 2)
    gradient = jax.grad(lambda *x: jnp.sin(attend(*x)).sum(), range(4))
    specs = (*[PartitionSpec("manual")] * 3, PartitionSpec())
    x = [*operands(), *draw((1, N, T, T))]
    inside = jax.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=specs, axis_names={"manual"}, check_vma=False)
    got = jax.jit(inside)(*[jax.device_put(a, NamedSharding(mesh, spec)) for a in x[:3]], x[3])
    assert "backward: in a shard_map over some axes of a mesh, XLA cannot" in caplog.text
    for a, b in zip(got, gradient(*x), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_kernels_of_a_shard(monkeypatch):
    """What XLA is given to compile for each device: kernels for its part of the batch."""
    given = []

    class Kept(partition.custom_partitioning):
        def def_partition(self, partition, **rule):
            given.append(partition)
            super().def_partition(partition, **rule)

    monkeypatch.setattr(partition, "custom_partitioning", Kept)
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(AxisType.Auto,))
    spread = NamedSharding(mesh, BATCH)
    of = lambda batch: jax.ShapeDtypeStruct((batch, 256, N, 64), jnp.bfloat16, sharding=spread)
    with record_launches() as launches:
        call = jax.jit(lambda *x: dot_product_attention(*x, implementation="triton"))
        assert "CustomSPMDPartitioning" in call.trace(of(B), of(B), of(B)).lower(lowering_platforms=("cuda",)).as_text()
        assert not launches
    statistic = jax.ShapeDtypeStruct((B, N, 256), jnp.float32, sharding=spread)
    _, shard, results, operands = given[0](mesh, [of(B)] * 3, [of(B), statistic])
    assert [len(a.spec) for a in (*operands, *results)] == [4, 4, 4, 4, 3]
    assert all(a.is_equivalent_to(spread, len(a.spec)) for a in (*operands, *results))
    alone = [jax.ShapeDtypeStruct((B // 2, 256, N, 64), jnp.bfloat16)] * 3
    whole = functools.partial(dot_product_attention, implementation="triton")
    got, expected = ([(a.kernel, a.grid) for a in launches_of(f, *alone)] for f in (shard, whole))
    assert got == expected != []
