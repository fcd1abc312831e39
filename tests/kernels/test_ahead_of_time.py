"""Every shipped tile, compiled without a GPU; and what JAX would launch."""

import contextlib
import itertools
import re

import jax
import jax.numpy as jnp
import pytest

from compiled import SHARED_LIMITS, Recorder, compiled
from jax_flash_jvp.attention import dot_product_attention
from jax_flash_jvp.kernels.hopper import jobs as hopper
from jax_flash_jvp.kernels.portable import jobs
from jax_flash_jvp.kernels.portable.tiles import HEAD_DIMS, HEAD_DIMS_AND_80, JOBS, find, product, tile
from jax_flash_jvp.problem import Operands, Problem
from recorded import launches_of

NARROW = (16, 32)  # heads that take the tiles of 64 channels
KINDS = {"half": ("bfloat16", "ieee"), "tf32": ("float32", "tf32"), "ieee": ("float32", "ieee")}
NOTHING, QUERY, VALUE, KEY_AND_VALUE, BIAS = (
    tuple(c in wanted for c in "qkvb") for wanted in ("", "q", "v", "kv", "b")
)


def compiled_job(job, head_dim, kind, capability, plain=False, gradients=True, idle=False):
    """The compiled kernel: with a loop over masked tiles and one over whole tiles, or `plain`, with the latter; of the
    dual backward, with the `gradients` or only with their tangents; as on a GPU that would be `idle` for the most part."""
    dtype, precision = KINDS[kind]
    length = 1024 if plain else 1023
    problem = Problem(scale=head_dim**-0.5, is_causal=not plain, precision=precision)
    array = lambda heads: jax.ShapeDtypeStruct((2, length, heads, head_dim), dtype)
    o = array(8)
    bias = jax.ShapeDtypeStruct((1, 8, length, length), dtype) if "score" in job else None
    x = Operands(o, array(2), array(2), bias)
    statistic = jax.ShapeDtypeStruct((2, 8, length), jnp.float32)
    primals = tangents = x, (o, statistic), (o, None)
    backward = lambda want: jobs.backward(recorder, problem, *primals, want)
    dual = lambda want: jobs.backward_dual(recorder, problem, *primals, tangents, want if gradients else NOTHING, want)
    recorder = Recorder(capability)
    recorder.multiprocessors = 10_000 if idle else 1
    {
        "forward": lambda: jobs.forward(recorder, problem, x),
        "forward_dual": lambda: jobs.forward(recorder, problem, x, x),
        "tangent": lambda: jobs.tangent(recorder, problem, x, statistic, x),
        "statistics": lambda: dual(QUERY),
        "key_side": lambda: backward(KEY_AND_VALUE),
        "query_side": lambda: backward(QUERY),
        "key_side_dual": lambda: dual(KEY_AND_VALUE),
        "value_side_dual": lambda: dual(VALUE),
        "query_side_dual": lambda: dual(QUERY),
        "score_side": lambda: backward(BIAS),
        "score_side_dual": lambda: dual(BIAS),
    }[job]()
    # first the statistics and the mean keys, last the values where they are done apart from the keys
    before = ("statistics", "key_means", "row_means") if "side" in job else ()
    launches = (launch for launch in recorder.launches if launch[0].__name__ not in before)
    kernel, signature, constants, options = next(launches)
    return compiled(kernel, signature, constants, capability=capability, **options)


def check(job, head_dim, kind, capability, spill=0, **variant):
    """It spills no more than its tile may, or `spill` if that is more."""
    dtype, precision = KINDS[kind]
    resources = compiled_job(job, head_dim, kind, capability, **variant)
    assert resources.fits(capability), resources
    assert resources.mma or product(dtype, precision, head_dim, capability) == "ieee", resources
    tiles_of = "forward_dual" if job == "tangent" else job
    most = max(spill, tile(tiles_of, head_dim, dtype, precision, capability).spill)
    assert resources.spill_stores <= most, resources


FEATURES = {
    "bias": dict(bias=(1, 1, 1023, 1001)),
    "mask": dict(mask=(2, 1, 1023, 1001)),
    "lengths-window": dict(query_lengths=(2,), key_lengths=(2,), window=(256, 128)),
    "segments": dict(query_segments=(2, 1023), key_segments=(2, 1001)),
    "ranges": dict(key_ranges=(2, 1, 1023, 2, 2)),
    "blocks": dict(mask=(2, 1, 16, 8), mask_block=(64, 128)),
    "soft-cap": dict(soft_cap=30.0),
    "dropout": dict(seed=(2, 5), dropout_rate=0.1),
    "everything": dict(
        bias=(2, 8, 1, 1001), mask=(2, 1, 1023, 1001), query_segments=(2, 1023), key_segments=(2, 1001), soft_cap=30.0,
        query_lengths=(2,), key_lengths=(2,), seed=(2, 5), dropout_rate=0.1, window=(256, 0), lower_right=True,
    ),
}  # fmt: skip
DTYPES = dict(bias="bfloat16", mask="bool")


def featured():
    for feature in FEATURES:
        for head_dim, kind, capability in ((64, "half", 90), (128, "half", 80), (64, "tf32", 90), (128, "half", 90)):
            slow = feature not in ("bias", "mask") or (head_dim, kind) != (64, "half")
            yield pytest.param(feature, head_dim, kind, capability, marks=[pytest.mark.slow] * slow)


@pytest.mark.parametrize(("feature", "head_dim", "kind", "capability"), list(featured()))
@pytest.mark.thorough
def test_features(feature, head_dim, kind, capability):
    """Every kernel of a call with it compiles, fits, uses the matrix cores and spills little, though nobody tells the compiler
    what the numbers of queries and keys are multiples of."""
    dtype, precision = KINDS[kind]
    arrays = {
        name: jax.ShapeDtypeStruct(shape, DTYPES.get(name, "int32"))
        for name, shape in FEATURES[feature].items()
        if name in Operands._fields
    }
    static = {name: value for name, value in FEATURES[feature].items() if name not in arrays}
    problem = Problem(scale=0.1, precision=precision, **static)
    array = lambda length, heads, channels: jax.ShapeDtypeStruct((2, length, heads, channels), dtype)
    q, k, v, o = array(1023, 8, head_dim), array(1001, 2, head_dim), array(1001, 2, 64), array(1023, 8, 64)
    statistic = jax.ShapeDtypeStruct((2, 8, 1023), jnp.float32)
    x, tx = Operands(q, k, v, **arrays), Operands(q, k, v, arrays.get("bias"))
    primals = tangents = x, (o, statistic), (o, None)
    want = (True, True, True, "bias" in arrays)
    recorder = Recorder(capability)
    jobs.forward(recorder, problem, x)
    jobs.forward(recorder, problem, x, tx)
    jobs.tangent(recorder, problem, x, statistic, tx)
    jobs.backward(recorder, problem, *primals, want)
    jobs.backward_dual(recorder, problem, *primals, (tx, *tangents[1:]), want, want)
    for kernel, signature, constants, options in recorder.launches:
        resources = compiled(kernel, signature, constants, capability=capability, **options)
        assert resources.fits(capability), (kernel, resources)
        # of ranges the loop over tiles with rows that nobody sees spills, which the others do not feel
        most = {"everything": 2200, "ranges": 2500}.get(feature, 900)
        if (kernel.__name__, head_dim, kind) == ("query_side", 64, "half"):  # the dual one spills with a cap
            most = {"everything": 3200, "soft-cap": 1800}.get(feature, most)
        assert resources.spill_stores <= most, (kernel, resources)
        others = ("statistics", "key_means", "look_at_tiles", "list_tiles", "list_few_tiles", "pack", "sum_shares")
        assert resources.mma or kernel.__name__ in others, kernel


def cases():
    """Each tile with the loop over whole tiles; with the others, and narrower heads in these tiles, as slow: half an hour."""
    for capability in (80, 90, 100):
        for kind, (dtype, precision) in KINDS.items():
            for head_dim in (*NARROW, *(HEAD_DIMS_AND_80 if capability == 90 else HEAD_DIMS)):
                for job, plain in itertools.product(JOBS, (False, True)[: 1 if head_dim in NARROW else 2]):
                    if find(job, head_dim, dtype, precision, capability):
                        name = f"{job}-D{head_dim}-{kind}-sm{capability}{'-whole' * plain}"
                        marks = [pytest.mark.slow] * (not plain)
                        yield pytest.param(job, head_dim, kind, capability, plain, id=name, marks=marks)


@pytest.mark.parametrize(("job", "head_dim", "kind", "capability", "plain"), list(cases()))
@pytest.mark.thorough
def test_tile(job, head_dim, kind, capability, plain):
    check(job, head_dim, kind, capability, plain=plain)


@pytest.mark.parametrize("plain", [True, False], ids=["whole", ""])
@pytest.mark.parametrize("head_dim", [32, 64])
@pytest.mark.parametrize(
    ("job", "kind"), [("forward", "ieee"), ("key_side", "ieee"), ("key_side", "tf32"), ("query_side", "tf32")]
)
@pytest.mark.thorough
def test_halved_tile(job, kind, head_dim, plain):
    """Spills no more than the tile with twice as many rows may, but in the key side's loop over masked tiles."""
    check(job, head_dim, kind, 90, plain=plain, idle=True, spill=250 if job == "key_side" and not plain else 0)


@pytest.mark.parametrize(
    ("kind", "head_dim", "queries", "capability"),
    [
        ("half", 128, 20, 90), ("half", 64, 1, 86), ("tf32", 64, 16, 80), ("half", 256, 1, 100), ("ieee", 64, 9, 90),
        ("half", 128, 8, 90), ("half", 64, 16, 90), ("half", 128, 8, 86), ("tf32", 64, 4, 90), ("tf32", 128, 4, 80),
        ("tf32", 128, 4, 90), ("tf32", 72, 9, 90), ("half", 128, 1, 86),
        ("half", 32, 4, 80), ("ieee", 64, 2, 90), ("ieee", 72, 1, 90),
    ],
)  # fmt: skip
@pytest.mark.thorough
def test_few_queries(kind, head_dim, queries, capability):
    """Every kernel of a call whose keys are divided among programs compiles and fits, those that merge among them.  Query heads
    are the rows of one block where they have at most 64 rows together, 16 in float32."""
    dtype, precision = KINDS[kind]
    array = lambda length, heads: jax.ShapeDtypeStruct((2, length, heads, head_dim), dtype)
    x, statistic = (
        Operands(array(queries, 8), array(4000, 2), array(4000, 2)),
        jax.ShapeDtypeStruct((2, 8, queries), "float32"),
    )
    y, cy, wanted = (x.query, statistic), (x.query, None), (True, True, True, False)
    problem, recorder = Problem(scale=0.1, is_causal=True, lower_right=True, precision=precision), Recorder(capability)
    jobs.forward(recorder, problem, x)
    jobs.forward(recorder, problem, x, x)
    jobs.tangent(recorder, problem, x, statistic, x)
    jobs.backward(recorder, problem, x, y, cy, wanted)
    jobs.backward_dual(recorder, problem, x, y, cy, (x, y, cy), wanted, wanted)
    names = [kernel.__name__ for kernel, *_ in recorder.launches]
    assert names.count("merge") == 3
    assert names.count("sum_shares") == 2 + 4
    for kernel, signature, constants, options in recorder.launches:
        resources = compiled(kernel, signature, constants, capability=capability, **options)
        assert resources.fits(capability), (kernel, constants, resources)
        # of the dual sides: the key side's tile stores up to 4,300 with masks, the query side's 2,700
        most = {("ieee", 64): 3400, ("ieee", 72): 2700, ("tf32", 128): 2700}.get((kind, head_dim), 900)
        assert resources.spill_stores <= most, (kernel, constants, resources)


@pytest.mark.parametrize("head_dim", [64, 72, 96, 128])
@pytest.mark.thorough
def test_one_key_fits(head_dim):
    """In IEEE precision, where the compiler knows that there is one, and loads all at once."""
    array = lambda length: jax.ShapeDtypeStruct((2, length, 2, head_dim), "float32")
    x, y = (
        Operands(array(1000), array(1), array(1)),
        (array(1000), jax.ShapeDtypeStruct((2, 2, 1000), "float32")),
    )
    recorder, problem = Recorder(90), Problem(scale=0.1, precision="ieee")
    jobs.forward(recorder, problem, x)
    jobs.backward(recorder, problem, x, y, (y[0], None), (True, True, True, False))
    for kernel, signature, constants, options in recorder.launches:
        resources = compiled(kernel, signature, constants, capability=90, **options)
        assert resources.fits(90), (kernel, resources)


@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", "ieee"), ("float32", "tf32"), ("float32", "ieee")])
def test_the_number_of_warps_is_a_power_of_two(dtype, precision):
    """Else Triton raises, at that head dimension and length alone."""
    warps = set()
    for head_dim, queries, keys, capability in itertools.product(
        range(8, 257, 8), (1, 30, 300), (20, 100, 300), (80, 90)
    ):
        array = lambda length, d=head_dim: jax.ShapeDtypeStruct((64, length, 4, d), dtype)
        x, y = (
            Operands(array(queries), array(keys), array(keys)),
            (array(queries), jax.ShapeDtypeStruct((64, 4, queries), "float32")),
        )
        given, wanted = (Recorder(capability), Problem(scale=0.1, precision=precision), x), (True, True, True, False)
        with contextlib.suppress(NotImplementedError):  # no tile fits
            jobs.forward(*given)
            jobs.backward(*given, y, (y[0], None), wanted)
            jobs.forward(*given, x)
            jobs.backward_dual(*given, y, (y[0], None), (x, y, (y[0], None)), wanted, wanted)
        warps |= {options["num_warps"] for *_, options in given[0].launches}
    assert warps <= {1, 2, 4, 8, 16}


@pytest.mark.thorough
def test_one_compilation_for_all_lengths(monkeypatch):
    """Also of arrays with the heads' axis first, of which the strides of heads grow with the length.  `key_means` alone is
    compiled anew up to 2,048 keys, where fewer warps read them."""

    def heads_first(recorder, array):
        _, length, heads, head_dim = array.shape
        return heads * length * head_dim, head_dim, length * head_dim, 1

    def constants(length):
        recorder = Recorder(80)
        o, statistic = (
            jax.ShapeDtypeStruct((2, length, 4, 64), jnp.bfloat16),
            jax.ShapeDtypeStruct((2, 4, length), "float32"),
        )
        x = Operands(o, o, o)
        problem = Problem(scale=0.125, is_causal=True)
        jobs.forward(recorder, problem, x, x)
        along, wanted = (x, (o, statistic), (o, None)), (True, True, True, False)
        jobs.backward_dual(recorder, problem, x, (o, statistic), (o, None), along, wanted, wanted)
        return [constants for *_, constants, _ in recorder.launches]

    monkeypatch.setattr(Recorder, "strides", heads_first)
    assert constants(2560) == constants(3584)


@pytest.mark.parametrize("family", [jobs, hopper], ids=["portable", "hopper"])
@pytest.mark.thorough
def test_one_compilation_for_all_numbers(family):
    """From PyTorch too: Triton would compile in which of them are multiples of 16."""
    shape = lambda *n, dtype="bfloat16": jax.ShapeDtypeStruct(n, jnp.dtype(dtype))
    o, statistic = shape(2, 96, 4, 64), shape(2, 4, 96, dtype="float32")
    x = tx = Operands(o, o, o)
    if family is jobs:
        x = tx = x._replace(bias=shape(1, 4, 96, 96))
    x = x._replace(mask=shape(1, 4, 96, 96, dtype="bool"))
    recorder, problem, wanted = Recorder(90), Problem(scale=0.1), (True, True, True, family is jobs)
    y, cy = (o, statistic), (o, None)
    family.forward(recorder, problem, x, tx)
    family.backward_dual(recorder, problem, x, y, cy, (tx, y, cy), wanted, wanted)
    for kernel, signature, *_ in recorder.launches:
        numbers = [p for p in kernel.params if signature.get(p.name) == "i32"]
        assert numbers
        assert all(p.do_not_specialize_on_alignment for p in numbers), kernel


@pytest.mark.parametrize("head_dim", [64, 128], ids="D{}".format)
@pytest.mark.parametrize("job", ["key_side_dual", "query_side_dual"])
@pytest.mark.thorough
def test_tangents_alone(job, head_dim):
    """As in the gradient of a JVP by the primals: the sums differ, the tiles are the same."""
    check(job, head_dim, "half", 90, plain=True, gradients=False)


@pytest.mark.parametrize("capability", [80, 90], ids="sm{}".format)
@pytest.mark.parametrize(("head_dim", "kind"), [(64, "half"), (128, "half"), (256, "half"), (64, "tf32")])
@pytest.mark.thorough
def test_tangent_of_the_output_alone(head_dim, kind, capability):
    """As of a linearized function: in the tiles of forward + tangent."""
    check("tangent", head_dim, kind, capability, plain=True)


@pytest.mark.thorough
def test_no_tile():
    """Every job of 16-bit inputs has one, and float32 the plain ones; for the rest, an error says what to do."""
    for job in JOBS:
        assert find(job, 64, "float16", "ieee", 75) is None  # Triton would compile no matrix instructions
        for target in (80, 86, 87, 89, 90, 100, 103, 120, 121, "interpret"):
            assert all(find(job, head_dim, "float16", "ieee", target) for head_dim in (1, 64, 65, 200, 256))
            assert find(job, 64, "float32", "ieee", target)
            assert find(job, 128, "float32", "tf32", target)
        if job in ("forward", "forward_dual", "key_side", "query_side"):
            assert find(job, 256, "float32", "ieee", 80)
    with pytest.raises(NotImplementedError, match=r"no tile of key_side_dual .* head dimension 128 fits sm_90"):
        tile("key_side_dual", 128, "float32", "ieee", 90)


@pytest.mark.parametrize("head_dim", [64, 256], ids="D{}".format)
def test_statistics(head_dim):
    resources = compiled_job("statistics", head_dim, "half", 90)
    assert resources.fits(86)
    assert resources.spill_stores <= 256


@pytest.mark.parametrize("job", ["forward", "forward_dual", "key_side_dual", "query_side_dual"])
@pytest.mark.parametrize(("head_dim", "capability"), [(64, 89), (128, 86), (128, 120)])
@pytest.mark.thorough
def test_small_shared_memory(job, head_dim, capability):
    assert SHARED_LIMITS[capability] == 101376
    check(job, head_dim, "half", capability, plain=True)


def attend(query, key, value):
    return dot_product_attention(query, key, value)


def loss(*arrays):
    return attend(*arrays).astype(jnp.float32).sum()


def tangent_loss(*arrays):
    return jax.jvp(attend, arrays[:3], arrays[3:])[1].astype(jnp.float32).sum()


@pytest.mark.thorough
def test_lists_of_tiles_that_no_integer_counts():
    """Where `implementation` is None, such a call goes to the reference."""
    array = jax.ShapeDtypeStruct((1, 2**20, 32, 64), jnp.bfloat16)
    mask = lambda length: jax.ShapeDtypeStruct((1, 32, length, length), jnp.bool_)
    call = lambda a, mask: jobs.forward(Recorder(90), Problem(0.1), Operands(a, a, a, mask=mask))
    with pytest.raises(NotImplementedError, match="lists of tiles"):
        call(array, mask(2**20))
    short = jax.ShapeDtypeStruct((1, 2**10, 32, 64), jnp.bfloat16)
    call(short, mask(2**10))


@pytest.mark.parametrize("scale", [1e-39, -1e-45])
def test_launches_of_jax_with_a_tiny_scale(scale):
    """Which float32 holds only as a subnormal number."""
    o = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    (launch,) = launches_of(lambda *x: dot_product_attention(*x, scale=scale, implementation="triton"), o, o, o)
    assert launch.parameters[[p[0] for p in launch.parameters].index("scalar")][2] == "fp32"


@pytest.mark.parametrize(
    ("capability", "order", "said"),
    [
        (80, 0, r"run: the Hopper kernels need sm_90, and this is sm_80\n.*kernel forward in 2 programs of \d warps\n"),
        (75, 0, "no tile of forward .* fits sm_75"),
        (80, 2, "the tiled reference alone computes this derivative"),
    ],
)
@pytest.mark.thorough
def test_which_kernels_run_is_logged(capability, order, said, caplog):
    o = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    f = dot_product_attention
    for _ in range(order):
        f = lambda *x, f=f: jax.jvp(f, x, x)[1]
    with caplog.at_level("DEBUG", logger="jax_flash_jvp"):
        launches = launches_of(f, o, o, o, capability=capability)
    assert re.search(said, caplog.text)
    assert bool(launches) == (capability >= 80)  # values and first derivatives are on kernels


LENGTH, KEYS, HEADS, GROUP = 200, 104, 4, 2
BACKWARD = ["statistics", "key_means", "query_side", "key_side"]
BACKWARD_DUAL = ["statistics", "key_means", "query_side_dual", "key_side_dual"]
TRANSFORMATIONS = {
    "call": (attend, 3, ["forward"]),
    "jvp": (lambda *a: jax.jvp(attend, a[:3], a[3:]), 6, ["forward_dual"]),
    "grad": (jax.grad(loss, (0, 1, 2)), 3, ["forward", *BACKWARD]),
    "grad-of-jvp": (jax.grad(tangent_loss, (0, 1, 2)), 6, ["forward_dual", *BACKWARD_DUAL]),
    "grad-of-jvp-by-all": (jax.grad(tangent_loss, range(6)), 6, ["forward_dual", *BACKWARD_DUAL]),
}


@pytest.mark.parametrize(
    ("transformation", "head_dim"),
    [*((name, 64) for name in TRANSFORMATIONS), ("grad-of-jvp-by-all", 128)],
)
def test_launches_of_jax(transformation, head_dim):
    """Names, grids, parameters and warps of the kernels, on whichever jax-triton is installed."""
    function, arguments, expected = TRANSFORMATIONS[transformation]
    if transformation == "grad-of-jvp-by-all" and head_dim == 128:  # four sums over the queries, in two launches
        expected = [*expected, "value_side_dual"]
    query = jax.ShapeDtypeStruct((2, LENGTH, HEADS, head_dim), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((2, KEYS, HEADS // GROUP, head_dim), jnp.bfloat16)
    launches = launches_of(jax.jit(function), *([query, key, key] * 2)[:arguments], capability=80)
    kernels = [job.removesuffix("_dual").replace("value", "key") for job in expected]
    assert [launch.kernel for launch in launches] == kernels
    for job, kernel, launch in zip(expected, kernels, launches, strict=True):
        scalars = [p[1:] for p in launch.parameters if p[0] == "scalar"]
        arrays = [p for p in launch.parameters if p[0] == "array"]
        assert all(zeroed == 0 for _, zeroed, _ in arrays)  # kernels write every element
        if job == "statistics":
            assert launch.grid == (-(-LENGTH // 64) * 2 * HEADS, 1, 1)
            assert (len(arrays), scalars, launch.num_warps) == (10, [(HEADS, "i32"), (LENGTH, "i32")], 4)
            continue
        if job == "key_means":
            assert (launch.grid, launch.num_warps) == ((2 * HEADS // GROUP, 1, 1), 1)
            continue
        t = tile(job, head_dim, "bfloat16", "ieee", 80)
        blocks = -(-KEYS // t.block_n) * HEADS // GROUP if kernel == "key_side" else -(-LENGTH // t.block_m) * HEADS
        assert (launch.grid, launch.num_warps) == ((2 * blocks, 1, 1), t.num_warps)
        assert len(arrays) == {"forward": 22, "key_side": 27, "query_side": 32}[kernel]
        of_heads = head_dim // 16  # strides of heads and of the batch come in units of 16 elements
        of_batch = [length * heads * of_heads for length, heads in ((LENGTH, HEADS), (KEYS, HEADS // GROUP))]
        strides = [stride for batch in (*of_batch, of_batch[1]) for stride in (batch, of_heads)]
        integers = [HEADS, GROUP, LENGTH, KEYS, *strides]
        unused = [(0, "i32"), (0, "i32"), (0, "fp32"), (0, "fp32")]  # of windows, a cap and dropout
        assert scalars == [(pytest.approx(head_dim**-0.5), "fp32"), *[(n, "i32") for n in integers], *unused]
