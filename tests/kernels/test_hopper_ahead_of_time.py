"""The Hopper kernels for calls that fill a GPU, compiled without one: no serialised wgmma, hardly a spill, fits."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest

from compiled import Recorder, compiled
from in_one_pass import take_one_pass
from jax_flash_jvp.kernels import jobs as every
from jax_flash_jvp.kernels.hopper import config, jobs
from jax_flash_jvp.problem import Operands, Problem
from uniform_registers import loops_of_products, unset_reads

pytestmark = pytest.mark.thorough

NOTHING, QUERY, KEYS, VALUES = (tuple(c in wanted for c in "qkvb") for wanted in ("", "q", "k", "v"))
# bytes that a thread stores, admitted with Triton 3.9; with 3.6 and 3.7 they are fewer
SPILL = {
    "whole": 180,
    "persistent": 330,
    "ahead": 330,
    "ahead-ragged": 370,
    "shared": 500,
    "causal-ragged": 480,
    "window-lengths": 560,
    "mask": 640,
    "segments": 640,
    "ranges": 1700,  # most of it in the loop over tiles with rows that nobody sees
}
SPILL_MORE = {
    ("tangent", 64, "window-lengths"): 780,
    ("forward_dual", 64, "long-window-lengths"): 640,
    # which knows means of rows, too
    ("query_side_dual", 64, "whole"): 200,
    ("query_side_dual", 64, "persistent"): 350,
    ("query_side_dual", 64, "ahead"): 450,
    ("query_side_dual", 64, "ahead-ragged"): 530,
    ("query_side_dual", 64, "window-lengths"): 620,
    ("query_side_dual", 128, "window-lengths"): 690,
    ("query_side_dual", 192, "whole"): 200,
    ("query_side_tangent", 128, "ahead"): 400,
    ("query_side_tangent", 128, "ahead-ragged"): 480,
    ("query_side_tangent", 128, "window-lengths"): 670,
    ("query_side_tangent", 128, "whole"): 250,
    **dict.fromkeys(itertools.product(("query_side_dual", "key_side_dual"), (256,), SPILL), 1600),
    **dict.fromkeys(itertools.product(("key_side_dual",), (192,), SPILL), 700),
}  # fmt: skip
LENGTHS = {"causal-ragged": 1023, "persistent": 2048, "ahead": 512, "ahead-ragged": 500, "shared": 8192}
# of which all programs have as many blocks, or not
MULTIPROCESSORS = {"whole": None, "shared": 90}


def last_launch(job, head_dim, kind):
    return [*launches(job, head_dim, kind).values()][-1]


def launches(job, head_dim, kind):
    """By the names of kernels."""
    recorder, batch = Recorder(90), 4
    long, kind = kind.startswith("long-"), kind.removeprefix("long-")  # loops that have not the rings of short ones
    length = LENGTHS.get(kind, 1024) + 8192 * long
    recorder.multiprocessors = MULTIPROCESSORS.get(kind, 16)
    shape = lambda *shape, dtype="int32": jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    array = lambda heads: shape(batch, length, heads, head_dim, dtype="bfloat16")
    o, statistic = array(8), shape(batch, 8, length, dtype="float32")
    x = Operands(o, array(4), array(4))
    problem = Problem(
        scale=0.125,
        is_causal=kind == "causal-ragged",
        implementation="hopper",
    )
    if kind == "window-lengths":
        problem = dataclasses.replace(problem, window=(length // 2 if long else 100, 10))
        x = x._replace(query_lengths=shape(batch), key_lengths=shape(batch))
    if kind == "mask":
        x = x._replace(mask=shape(batch, 8, length, length, dtype="bool"))
    if kind == "segments":
        x = x._replace(query_segments=shape(batch, length), key_segments=shape(batch, length))
    if kind == "ranges":
        x = x._replace(key_ranges=shape(batch, 1, length, 2, 2))
    cotangents = o, statistic if kind == "ahead" else None
    along = (x, (o, statistic), cotangents)
    backward = lambda want: jobs.backward(recorder, problem, x, (o, statistic), cotangents, want)
    dual = lambda want, tangents: jobs.backward_dual(
        recorder, problem, x, (o, statistic), cotangents, along, want, tangents
    )
    both = (False, True, True)
    {
        "forward": lambda: jobs.forward(recorder, problem, x),
        "forward_dual": lambda: jobs.forward(recorder, problem, x, x),
        "tangent": lambda: jobs.tangent(recorder, problem, x, statistic, x),
        "key_side": lambda: backward(both),
        "query_side": lambda: backward(QUERY),
        "value_side": lambda: backward(VALUES),
        "key_side_dual": lambda: dual(both if head_dim <= 64 else KEYS, both if head_dim <= 64 else KEYS),
        "value_side_dual": lambda: dual(VALUES, VALUES),
        "query_side_dual": lambda: dual(QUERY, QUERY),
        "key_side_tangent": lambda: dual(NOTHING, both),
        "query_side_tangent": lambda: dual(NOTHING, QUERY),
        "one_pass": lambda: backward((True, True, True)),
        "one_pass_dual": lambda: dual((True, True, True), (True, True, True)),
    }[job]()
    return {kernel.__name__: (kernel, *rest) for kernel, *rest in recorder.launches}


JOBS = (
    "forward",
    "forward_dual",
    "tangent",
    "key_side",
    "query_side",
    "key_side_dual",
    "value_side_dual",
    "query_side_dual",
    "key_side_tangent",
    "query_side_tangent",
)


ALONE = ("whole", "causal-ragged", "window-lengths", "mask", "segments", "ranges")  # of which no blocks are shared


SCHEDULES = {
    "persistent": {"persistent"}, "ahead": {"persistent", "ahead"}, "ahead-ragged": {"persistent", "ahead"},
    "shared": {"persistent", "shared"},
}  # fmt: skip


def slow(job, head_dim, kind):
    if kind == "whole":
        return head_dim in (72, 96, 192, 256) or (head_dim < 64 and job not in ("forward_dual", "tangent"))
    return (job, head_dim, kind) not in {
        ("forward_dual", 128, "persistent"), ("query_side", 64, "ahead"), ("key_side", 128, "mask"),
        ("forward_dual", 256, "shared"), ("query_side_dual", 192, "causal-ragged"), ("value_side", 256, "mask"),
        ("forward_dual", 72, "shared"), ("query_side", 64, "long-causal-ragged"), ("forward", 64, "ahead-ragged"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("job", "head_dim", "kind"),
    [
        pytest.param(*c, marks=[pytest.mark.slow] * slow(*c))
        for c in (
            *itertools.product(JOBS, (32, 64, 72, 96, 128, 192, 256), SPILL),
            *itertools.product(("value_side",), (192, 256), SPILL),
            *itertools.product(JOBS, (16, 40), ("whole",)),
            *itertools.product(("query_side", "key_side_dual"), (64,), [f"long-{kind}" for kind in ALONE]),
            *itertools.product(
                ("forward", "forward_dual", "key_side", "query_side"), (32, 64, 96, 128), ("long-window-lengths",)
            ),
            *itertools.product(("forward",), (32, 64), ("long-causal-ragged",)),
        )
    ],
)
def test_compiles_without_serialised_products(job, head_dim, kind):
    if job == "value_side_dual" and head_dim <= 64:
        pytest.skip("one launch serves both sums there")
    kernel, signature, constants, options = last_launch(job, head_dim, kind)
    features = constants["FEATURES"]
    if kind in SCHEDULES:  # it compiles what its name says, whatever else the schedule makes of such a call
        assert {name for name in ("persistent", "shared", "ahead") if getattr(features, name)} == SCHEDULES[kind]
    resources = compiled(kernel, signature, constants, capability=90, **options)
    assert resources.warnings == ()
    assert unset_reads(resources.sass) == {}
    assert resources.fits(90)
    assert resources.mma.get("wgmma", 0) > 0
    assert resources.spill_stores <= SPILL_MORE.get((job, head_dim, kind), SPILL[kind.removeprefix("long-")])
    vector = "v2" if head_dim == 16 else "v4"
    assert f"st.global.{vector}.b32" in resources.ptx  # results, sixteen bytes a thread, of rows of 32 bytes eight
    if kind in ("whole", "persistent", "ahead"):  # others clean tiles in shared memory
        # nor do results come from there, where row statistics do before the first product
        made = features.makes_statistics
        assert "st.shared.v4" not in (resources.ptx.rpartition("wgmma.mma_async")[2] if made else resources.ptx)


@pytest.mark.parametrize(
    ("head_dim", "kind", "ring"),
    [
        pytest.param(d, kind, 0, marks=[pytest.mark.slow] * ((d, kind) not in {(64, "whole"), (128, "causal-ragged")}))
        for d, kind in itertools.product((64, 72, 80, 96, 128), ALONE)
    ]
    + [pytest.param(64, kind, 1, marks=pytest.mark.slow) for kind in ALONE[:3]],
)
def test_one_pass_compiles(monkeypatch, head_dim, kind, ring):
    """Next to nothing is stored to memory of a thread's own within the loop."""
    take_one_pass(monkeypatch, ring=ring)
    kernels = launches("one_pass", head_dim, f"long-{kind}")
    assert {"prepare", "one_pass", "scale_queries"} <= kernels.keys()
    for name in ("prepare", "one_pass", "scale_queries"):
        kernel, signature, constants, options = kernels[name]
        resources = compiled(kernel, signature, constants, capability=90, **options)
        assert resources.warnings == ()
        assert resources.fits(90)
        if name != "one_pass":
            assert resources.spill_stores == 0
            continue
        assert resources.spill_stores <= 500
        assert "cp.reduce.async.bulk.tensor" in resources.ptx
        sass = resources.sass
        assert unset_reads(sass) == {}
        loops = loops_of_products(sass)
        assert len(loops) >= constants["GROUPS"]
        count = lambda word, body: sum(word in i for i in body)
        # with Triton 3.9 keys and values in registers leave none for ranges, nor three warpgroups for masks at either end
        more = {("ranges", 0): (20, 52), ("window-lengths", 1): (24, 56)} if head_dim == 64 else {}
        stores, loads = more.get((kind, ring), (4, 32))
        assert max(count("STL", body) for body in loops) <= stores
        assert max(count("LDL", body) for body in loops) <= loads
        assert (count("LDSM", sass.values()) > 0) == constants["HELD"]  # before the loop, and once
        assert all(count("LDSM", body) == 0 for body in loops)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in ("whole", "causal-ragged"))) for kind in ALONE],
)
def test_one_pass_dual_compiles(monkeypatch, kind):
    """Next to nothing is stored to memory of a thread's own within the loop."""
    take_one_pass(monkeypatch)
    kernels = launches("one_pass_dual", 64, f"long-{kind}")
    for name in ("prepare_dual", "one_pass_dual", "scale_queries_dual"):
        kernel, signature, constants, options = kernels[name]
        resources = compiled(kernel, signature, constants, capability=90, **options)
        assert resources.warnings == ()
        assert resources.fits(90)
        if name != "one_pass_dual":
            assert resources.spill_stores == 0
            continue
        assert resources.spill_stores <= 500
        assert "cp.reduce.async.bulk.tensor" in resources.ptx
        sass = resources.sass
        assert unset_reads(sass) == {}
        loops = loops_of_products(sass)
        assert len(loops) >= 2
        count = lambda word, body: sum(word in i for i in body)
        assert max(count("STL", body) for body in loops) <= 5
        assert max(count("LDL", body) for body in loops) <= 34


@pytest.mark.parametrize(
    ("head_dim", "kind"),
    [
        pytest.param(d, kind, marks=[pytest.mark.slow] * (kind != "whole"))
        for d, kind in ((64, "whole"), (128, "causal-ragged"), (64, "window-lengths"), ("64 dual", "causal-ragged"))
    ],
)
def test_one_pass_in_order_compiles(monkeypatch, head_dim, kind):
    """What is added is waited for, and a fence comes before it is counted."""
    take_one_pass(monkeypatch, in_order=True)
    name = "one_pass_dual" if head_dim == "64 dual" else "one_pass"
    kernel, signature, constants, options = launches(name, int(str(head_dim).split()[0]), f"long-{kind}")[name]
    assert constants["ORDERED"]
    resources = compiled(kernel, signature, constants, capability=90, **options)
    assert resources.warnings == ()
    assert resources.fits(90)
    assert resources.spill_stores <= 500
    steps = ["cp.async.bulk.wait_group 0", "fence.acq_rel.gpu", "red.relaxed.gpu"]
    places = [resources.ptx.index(step) for step in steps]
    assert places == sorted(places)
    sass = [*resources.sass.values()]
    counted = next(i for i, text in enumerate(sass) if "REDG.E.ADD" in text)
    before = sass[counted - 30 : counted]
    fence = max(i for i, text in enumerate(before) if text.startswith("MEMBAR") and "GPU" in text)
    assert any("DEPBAR.LE SB0, 0x0" in text for text in before[:fence])


@pytest.mark.parametrize("one_pass", [True, False])
def test_one_head_of_one_batch_entry_compiles(monkeypatch, one_pass):
    """Whose numbers PyTorch makes constants of the kernels."""
    if one_pass:
        take_one_pass(monkeypatch)
    recorder, problem = Recorder(90, ones=True), Problem(scale=0.3, implementation="hopper")
    array, statistic = jax.ShapeDtypeStruct((1, 300, 1, 64), "bfloat16"), jax.ShapeDtypeStruct((1, 1, 300), "float32")
    x, y, cy, want = Operands(array, array, array), (array, statistic), (array, None), (True, True, True, False)
    every.forward(recorder, problem, x, x)
    every.backward(recorder, problem, x, y, cy, want)
    every.backward_dual(recorder, problem, x, y, cy, (x, y, cy), want, want)
    for kernel, signature, constants, options in recorder.launches:
        assert compiled(kernel, signature, constants, capability=90, **options).fits(90)
    assert any(constants.get("HQ") == 1 for _, _, constants, _ in recorder.launches)


def test_unset_reads_are_found():
    text = """ULDC UR4, c[0x0][0x10]; @P0 BRA 0x40; UIADD3 UR5, UP0, UR4, 0x2, URZ; BRX R2 -0x30; {}; EXIT;
              R2UR UR7, R4; IMAD R3, R3, UR7, R4; EXIT;"""
    code = lambda read: {16 * i: " ".join(t.split()) for i, t in enumerate(text.format(read).split(";")[:-1])}
    assert unset_reads(code("UMOV UR6, UR4")) == {}
    for read in (
        "UIADD3 UR6, UR5, 0x2, URZ",
        "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24",
        "@P1 IMAD R1, R2, UR5, RZ",
    ):
        assert unset_reads(code(read)) == {64: read}
    for copy in ("UMOV UR6, UR5", "@P1 IMAD.U32 R1, RZ, RZ, UR5"):
        register = copy.split()[-4 if "RZ" in copy else 1].strip(",")
        read = f"IMAD R3, R3, {register}, R4"
        assert unset_reads(code(copy)) == {}
        assert unset_reads(code(f"{copy}; {read}")) == {80: read}


@pytest.mark.parametrize(("job", "head_dim"), [("forward_dual", 64), ("forward_dual", 128), ("tangent", 96)])
def test_a_scale_of_one(job, head_dim):
    """Which jax-triton makes a constant."""
    kernel, signature, constants, options = last_launch(job, head_dim, "whole")
    del signature["scale"]
    assert compiled(kernel, signature, dict(constants, scale=1), capability=90, **options).warnings == ()


@pytest.mark.parametrize("job", ["query_side", "forward_dual"])
def test_waiting_for_a_part_leaves_warps_together(job):
    """Where warps may part, the assembler keeps nothing in uniform registers: the loop over tiles took a fifth longer."""
    kernel, signature, constants, options = last_launch(job, 64, "shared")
    resources = compiled(kernel, signature, constants, capability=90, **options)
    assert "ld.acquire.gpu" in resources.ptx
    assert not any("WARPSYNC" in instruction for instruction in resources.sass.values())


@pytest.mark.parametrize(
    ("heads", "length", "head_dim", "share"),
    [
        (24, 512, 64, 0),
        (24, 1024, 64, 4),
        (24, 1024, 128, 8),
        (33, 1024, 128, 0),
        (4, 2048, 128, 16),
        (4, 2048, 64, 8),
        (29, 8192, 64, 8),
        (32, 8192, 64, 33),
        (3, 10**7, 64, 44390),
        (3, 2 * 10**7, 64, 0),  # numbers of tiles are too large to divide
    ],
)
def test_tiles_of_shared_blocks_that_a_program_has(heads, length, head_dim, share):
    """Of forward + tangent on 132 multiprocessors: as few as give all of them as many, or halves of a block, and the like."""
    x = Operands(*[jax.ShapeDtypeStruct((1, length, heads, head_dim), jnp.bfloat16)] * 3)
    call = jobs.HopperCall(Recorder(90), Problem(scale=0.1), x, jobs.forward_kernels.forward)
    rounds = call.sweep(by_key=False).rounds(config.FORWARD_DUAL[head_dim])
    assert rounds.shared_tiles_per_program == share


def test_rows_say_themselves_whether_programs_take_blocks_from_a_counter():
    """Not an equal ring of another row."""
    x = Operands(*[jax.ShapeDtypeStruct((4, 2048, 8, 128), jnp.bfloat16)] * 3)
    call = jobs.HopperCall(Recorder(90), Problem(scale=0.1, is_causal=True), x, jobs.two_sides.backward)
    ring = config.KEYS[128, "dual"]
    modes = [call.sweep(by_key=True).schedule(r, written=2).mode for r in (ring, ring._replace(counted=True))]
    assert modes == ["block", "dynamic"]


def test_hopper_on_another_gpu():
    recorder = Recorder(80)
    o = jax.ShapeDtypeStruct((1, 512, 2, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="'hopper' does not serve this GPU"):
        every.forward(recorder, Problem(scale=0.1, implementation="hopper"), Operands(o, o, o))


def test_hopper_without_a_cotangent_of_the_output():
    recorder = Recorder(90)
    o, statistic = jax.ShapeDtypeStruct((1, 512, 2, 64), jnp.bfloat16), jax.ShapeDtypeStruct((1, 2, 512), jnp.float32)
    arguments = Operands(o, o, o), (o, statistic), (None, statistic), QUERY
    every.backward(recorder, Problem(scale=0.1), *arguments)
    assert "portable" in recorder.launches[-1][0].fn.__module__
    with pytest.raises(ValueError, match="'hopper' does not serve a cotangent of the log-sum-exp alone"):
        every.backward(recorder, Problem(scale=0.1, implementation="hopper"), *arguments)


@pytest.mark.parametrize("scale", [-1.0, 1e-39])
def test_scales_for_the_portable_kernels(scale):
    recorder = Recorder(90)
    o = jax.ShapeDtypeStruct((1, 8192, 2, 64), jnp.bfloat16)
    every.forward(recorder, Problem(scale=scale), Operands(o, o, o))
    assert "portable" in recorder.launches[-1][0].fn.__module__


UNSERVED = {
    "soft-cap": dict(soft_cap=1.0),
    "values-of-other-width": dict(value=(1, 8192, 2, 32)),
    "dropout": dict(dropout_rate=0.1, seed=(1, 5)),
    "bias": dict(bias=(1, 1, 1, 8192)),
    "float32": dict(dtype="float32"),
    "strides-of-values": dict(value=(1, 8192, 2, 60)),
}


@pytest.mark.parametrize("case", UNSERVED)
def test_calls_for_the_portable_kernels(case):
    given, recorder = dict(UNSERVED[case]), Recorder(90)
    dtype = given.pop("dtype", "bfloat16")
    shape = lambda shape: jax.ShapeDtypeStruct(shape, "int32" if shape == (1, 2) else dtype)
    o = shape((1, 8192, 2, 60 if case == "strides-of-values" else 64))
    x = Operands(o, o, o)._replace(**{name: shape(given.pop(name)) for name in [*given] if name in Operands._fields})
    if case == "strides-of-values":  # of queries and keys, rows begin at multiples of 16 bytes
        recorder.strides = lambda a: (8192 * 120, 120, 60, 1) if a is x.value else (8192 * 128, 128, 64, 1)
    every.forward(recorder, Problem(scale=0.1, **given), x)
    assert "portable" in recorder.launches[-1][0].fn.__module__


def test_a_cotangent_of_the_log_sum_exp_alone():
    recorder, o = Recorder(90), jax.ShapeDtypeStruct((1, 8192, 2, 64), jnp.bfloat16)
    statistic = jax.ShapeDtypeStruct((1, 2, 8192), jnp.float32)
    every.backward(recorder, Problem(scale=0.1), Operands(o, o, o), (o, statistic), (None, statistic), QUERY)
    assert "portable" in recorder.launches[-1][0].fn.__module__


@pytest.mark.parametrize(
    ("head_dim", "length", "plain", "dual"),
    [
        (64, 256, False, False),
        (64, 2048, False, True),
        (72, 256, False, True),
        (72, 512, False, False),
        (128, 1024, False, False),
    ],
)
def test_whether_row_statistics_take_a_kernel(head_dim, length, plain, dual):
    """Of the backward, of the dual backward, of one that leaves the queries out, and of one along the queries alone."""
    o = jax.ShapeDtypeStruct((4, length, 2, head_dim), jnp.bfloat16)
    x, statistic = Operands(o, o, o), jax.ShapeDtypeStruct((4, 2, length), jnp.float32)
    case, every_one = Problem(scale=0.1, implementation="hopper", deterministic=True), (True, True, True, False)

    def takes_a_kernel(want, tx=None):
        recorder = Recorder(90)
        tangents = (tx, (o, statistic), (o, None)) if tx else (jobs.NO_TANGENT, (None, None), (None, None))
        jobs.backward_dual(recorder, case, x, (o, statistic), (o, None), tangents, want, want if tx else (False,) * 4)
        return "statistics" in [kernel.__name__ for kernel, *_ in recorder.launches]

    assert takes_a_kernel(every_one) == plain
    assert takes_a_kernel(every_one, x) == dual
    assert takes_a_kernel(KEYS)
    assert takes_a_kernel(every_one, Operands(o, None, None))


@pytest.mark.parametrize(
    ("length", "head_dim", "how", "families"),
    [
        (8192, 64, None, ["hopper"] * 5),
        (256, 64, None, ["portable", "hopper", "portable", "hopper", "portable"]),
        (256, 64, "many", ["hopper"] * 5),
        (64, 64, "many", ["portable"] * 5),
        (256, 64, "many causal", ["hopper"] * 5),
        (256, 64, "many lengths", ["hopper"] * 5),
        (1024, 64, "many documents", ["portable", "hopper", "hopper", "hopper", "hopper"]),
        (1024, 64, "mask", ["hopper"] * 5),
        (1024, 64, None, ["hopper"] * 5),
        (8192, 64, "window", ["hopper"] * 5),
        (8192, 72, None, ["hopper"] * 5),
        (256, 72, None, ["portable", "hopper", "portable", "hopper", "hopper"]),
        (256, 72, "many", ["hopper"] * 5),
        (256, 128, None, ["portable", "hopper", "portable", "hopper", "hopper"]),
        (256, 128, "many causal", ["hopper"] * 5),
        (1024, 128, "many window", ["hopper"] * 5),
        (1024, 128, "many documents", ["hopper"] * 5),
        (1024, 128, "causal", ["hopper"] * 5),
        (256, 16, "many", ["hopper"] * 5),
        (1024, 32, "mask", ["hopper"] * 5),
        (8192, 32, None, ["hopper"] * 5),
        (256, 32, None, ["portable"] * 5),
        (8192, 192, None, ["hopper"] * 5),
        (128, 192, None, ["hopper"] * 5),
        (128, 256, None, ["hopper", "hopper", "portable", "hopper", "hopper"]),
        (1024, 256, "many documents", ["hopper"] * 5),
        (8192, 64, "documents", ["portable", "hopper", "hopper", "hopper", "hopper"]),
        (8192, 72, "documents", ["hopper"] * 5),
        (8192, 128, "documents", ["hopper"] * 5),
    ],
)
def test_which_kernels_are_taken(length, head_dim, how, families, caplog):
    """Of forward, forward + tangent, backward, tangent and dual backward, unless a family is asked for: short sequences do not
    fill the rings, unless there are many.  The log says so."""
    caplog.set_level("DEBUG", "jax_flash_jvp")
    words = (how or "").split()
    recorder, batch = Recorder(90), 66 if "many" in words else 1
    o = jax.ShapeDtypeStruct((batch, length, 2, head_dim), jnp.bfloat16)
    x, statistic = Operands(o, o, o), jax.ShapeDtypeStruct((batch, 2, length), jnp.float32)
    if "documents" in words:
        segments = jax.ShapeDtypeStruct((batch, length), "int32")
        x = x._replace(query_segments=segments, key_segments=segments)
    if "mask" in words:
        x = x._replace(mask=jax.ShapeDtypeStruct((batch, 1, length, length), "bool"))
    if "lengths" in words:
        x = x._replace(key_lengths=jax.ShapeDtypeStruct((batch,), "int32"))
    case = Problem(scale=0.1, is_causal="causal" in words, window=(300, 300) if "window" in words else None)
    every.forward(recorder, case, x)
    every.forward(recorder, case, x, x)
    every.backward(recorder, case, x, (o, statistic), (o, None), QUERY)
    every.tangent(recorder, case, x, statistic, x)
    every.backward_dual(recorder, case, x, (o, statistic), (o, None), (x, (o, statistic), (o, None)), QUERY, QUERY)
    others = ("statistics", "key_means", "row_means", "look_at_tiles", "list_tiles", "list_few_tiles", "pack")
    kernels = [kernel for kernel, *_ in recorder.launches if kernel.__name__ not in others]
    assert [kernel.fn.__module__.split(".")[-2] for kernel in kernels] == families
    computed = zip(("forward", "forward_dual", "backward", "forward_dual", "backward_dual"), families, strict=True)
    faster = "the {} kernels run: they are faster for {} of {} queries and {} keys"
    said = [faster.format(family.replace("h", "H"), job, length, length) for job, family in computed]
    assert [record.getMessage().rpartition(" (")[0] for record in caplog.records] == said


@pytest.mark.parametrize(("groups", "registers"), config.REGISTERS.items())
def test_warps_divide_the_registers_of_a_program(groups, registers):
    """The consumer warpgroups, and a warpgroup's worth for all helpers: as many as there are, of which each gets eights."""
    assert all(n % 8 == 0 for n in registers)
    assert registers.launched * 128 * (groups + 1) <= 65536
    assert 0 <= registers.launched * (groups + 1) - (registers.consumer * groups + registers.helper) < 8 * groups


@pytest.mark.parametrize(
    ("batch", "queries", "keys", "head_dim", "taken"),
    [
        (8, 64, 4096, 64, "forward forward_dual backward backward_dual"),  # H200, 2026-11-28 and 29
        (8, 64, 4096, 32, "forward_dual backward_dual"),
        (8, 64, 2048, 64, "forward_dual"),
        (1, 512, 520, 64, "forward forward_dual backward_dual"),
        (1, 32, 65536, 64, ""),  # half of a warpgroup would be idle
        (1, 1024, 4096, 64, "forward forward_dual backward backward_dual"),
        (1, 512, 2048, 64, "forward forward_dual backward backward_dual"),
        (1, 2048, 512, 64, "forward forward_dual backward_dual"),
    ],
)
def test_lengths_that_differ(batch, queries, keys, head_dim, taken):
    array = lambda length: jax.ShapeDtypeStruct((batch, length, 8, head_dim), jnp.bfloat16)
    x = Operands(array(queries), array(keys), array(keys))
    takes = lambda problem, x: [j for j in config.FROM[64] if jobs.choice(j, Recorder(90), problem, x).hopper]
    assert " ".join(takes(Problem(0.1), x)) == taken
    shortest = x._replace(query=array(min(queries, keys)), key=array(min(queries, keys)))
    if queries < keys:  # blocks that are not alike are not shared
        lengths = x._replace(key_lengths=jax.ShapeDtypeStruct((batch,), "int32"))
        expected = takes(Problem(0.1), shortest)
        assert takes(Problem(0.1, is_causal=True), x) == takes(Problem(0.1), lengths) == expected


@pytest.mark.parametrize(
    ("batch", "queries", "keys", "mask", "taken"),
    [
        (8, 4096, 77, False, "forward forward_dual backward backward_dual"),  # H200, 2026-11-29, as the others
        (32, 64, 4096, False, "backward backward_dual"),
        (256, 64, 64, False, ""),
        (256, 32, 512, False, ""),
        (16, 300, 300, False, "forward forward_dual backward backward_dual"),
        (16, 300, 300, True, "forward_dual backward backward_dual"),
        (16, 600, 600, True, "forward forward_dual backward backward_dual"),
    ],
)
def test_lengths_where_blocks_are_many(batch, queries, keys, mask, taken):
    array = lambda length: jax.ShapeDtypeStruct((batch, length, 8, 64), jnp.bfloat16)
    x = Operands(array(queries), array(keys), array(keys))
    if mask:
        x = x._replace(mask=jax.ShapeDtypeStruct((batch, 1, 1, keys), "bool"))
    takes = [job for job in config.FROM[64] if jobs.choice(job, Recorder(90), Problem(0.1), x).hopper]
    assert " ".join(takes) == taken


@pytest.mark.parametrize(
    ("length", "head_dim", "how", "tiles"),
    [
        (8192, 64, "", [(128, 3), (128, 2), (64, 3), (64, 3)]),
        (1024, 64, "", [(128, 2), (128, 2), (64, 3), (64, 3)]),
        (8192, 64, "causal", [(128, 3), (128, 2), (64, 3), (64, 3)]),
        (2048, 64, "causal", [(128, 2), (128, 2), (64, 3), (64, 3)]),
        (512, 64, "causal", [(64, 2), (64, 2), (64, 2), (64, 2)]),
        (8192, 64, "window", [(64, 2), (64, 2), (64, 2), (64, 2)]),
        (8192, 64, "documents", [(64, 2), (64, 2), (64, 2), (64, 2)]),
        (512, 64, "documents mask", [(128, 2), (128, 2), (64, 2), (64, 2)]),
        (512, 32, "lengths", [(64, 2), (128, 2), (64, 2), (64, 2)]),
        (512, 128, "lengths", [(64, 2), (64, 2), (64, 2), (64, 2)]),
        (1024, 128, "lengths", [(128, 2), (64, 2), (128, 2), (64, 2)]),
    ],
)
def test_tiles_go_by_what_is_seen(monkeypatch, length, head_dim, how, tiles):
    """(streamed rows of a tile, warpgroups) of forward, forward + tangent, and the backward's query side and key side, not in one
    pass."""
    monkeypatch.setattr(config, "ONE_PASS_FROM", {})
    recorder, words = Recorder(90), how.split()
    recorder.multiprocessors = 132
    o = jax.ShapeDtypeStruct((66, length, 2, head_dim), jnp.bfloat16)
    x, ids = Operands(o, o, o), jax.ShapeDtypeStruct((66, length), "int32")
    if "documents" in words:
        x = x._replace(query_segments=ids, key_segments=ids)
    if "mask" in words:
        x = x._replace(mask=jax.ShapeDtypeStruct((66, 1, length, length), "bool"))
    if "lengths" in words:
        x = x._replace(
            query_lengths=jax.ShapeDtypeStruct((66,), "int32"), key_lengths=jax.ShapeDtypeStruct((66,), "int32")
        )
    window = (200, 200) if "window" in words else None
    case = Problem(scale=0.1, is_causal="causal" in words, window=window)
    statistic = jax.ShapeDtypeStruct((66, 2, length), jnp.float32)
    jobs.forward(recorder, case, x)
    jobs.forward(recorder, case, x, x)
    jobs.backward(recorder, case, x, (o, statistic), (o, None), (True, True, True, False))
    launches = [
        constants for kernel, _, constants, _ in recorder.launches if kernel.__name__ in ("forward", "backward")
    ]
    assert [(c["T"], c["GROUPS"]) for c in launches] == tiles
