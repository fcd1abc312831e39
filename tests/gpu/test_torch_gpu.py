"""The PyTorch bridge on a GPU: the kernels against naive attention in float64, at real sizes, and what a call costs."""

import gc
import time

import pytest

torch = pytest.importorskip("torch")

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from torch.func import grad, jacfwd, jvp, vjp, vmap  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import torch_bridge  # noqa: E402
from jax_flash_jvp.kernels.hopper.jobs import Choice  # noqa: E402
from packed import drawn  # noqa: E402
from torch_bridge import plans, reference  # noqa: E402
from torch_bridge import scaled_dot_product_attention as sdpa  # noqa: E402
from torch_oracle import (  # noqa: E402
    Model,
    batch,
    by_func,
    by_level,
    gradients,
    launched,
    leaves,
    loss,
    naive,
    with_lse,
)

pytestmark = pytest.mark.gpu


@pytest.fixture
def kernels_alone(monkeypatch):
    """The reference must not be used."""

    def run(name, *args, **groups):
        raise AssertionError(f"{name} was computed by the reference")

    monkeypatch.setattr(reference, "run", run)


@pytest.fixture(params=["fastest", "hopper"])
def family(request, monkeypatch):
    """The kernels that a call of this size takes, or those for Hopper also where others are faster."""
    if request.param == "hopper":
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("needs a Hopper GPU")
        monkeypatch.setattr("jax_flash_jvp.kernels.hopper.jobs.choice", lambda *_: Choice(True, ""))
    plans.plans.clear()
    yield request.param
    plans.plans.clear()


@pytest.fixture(autouse=True)
def exact_float32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def normal(*shape, dtype=torch.float32, device="cuda", seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


def everything(attention, x, tangents, weights, **arguments):
    """o, ȯ; the gradients of ⟨w, o⟩; those of ⟨w, o⟩ + ⟨w', ȯ⟩ in x; and the tangent of the gradient."""
    f = lambda *x: attention(*x, **arguments)
    plain = lambda *x: (f(*x) * weights[0]).sum()

    def through(*x):
        o, t_o = jvp(f, x, tangents)
        return (o * weights[0]).sum() + (t_o * weights[1]).sum()

    every = (0, 1, 2)
    return dict(
        jvp=jvp(f, x, tangents),
        gradients=grad(plain, every)(*x),
        through=grad(through, every)(*x),
        jvp_of_grad=jvp(grad(plain, every), x, tangents)[1],
    )


def as_exact_as_naive(x, tangents, weights, of=lambda attention: attention, **arguments):
    """At most twice the error of naive attention in the same dtype, plus a rounding floor."""
    launched()
    ours = everything(of(sdpa), x, tangents, weights, **arguments)
    assert launched() == "FDDDBSS"
    theirs = everything(of(naive), x, tangents, weights, **arguments)
    wide = [tuple(a.double() for a in group) for group in (x, tangents, weights)]
    exact = everything(of(naive), *wide, **arguments)
    for name in ours:
        largest = max(c.abs().max().item() for c in leaves(exact[name]))
        for i, (a, b, c) in enumerate(zip(*(leaves(r[name]) for r in (ours, theirs, exact)), strict=True)):
            assert a.dtype == x[0].dtype
            unit = torch.finfo(a.dtype).eps
            if a.dtype == torch.float32:  # TF32; or sums of thousands, which cuBLAS splits and the kernels do not
                unit = 4 * unit if torch.get_float32_matmul_precision() == "highest" else 2**-10
            floor = 4 * unit * largest
            error, allowed = (a - c).abs().max().item(), 2 * (b - c).abs().max().item() + floor
            assert error <= allowed, f"{name}[{i}]: error {error:.2e}, allowed {allowed:.2e}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("features", ["plain", "causal-sinks-lengths"])
def test_log_sum_exp(features, dtype, family, kernels_alone):
    shape = 2, 4, 320, 64
    x, tangents, weights = (tuple(normal(*shape, dtype=dtype, seed=3 * j + i) for i in range(3)) for j in range(3))
    arguments = {}
    if features != "plain":
        lengths = torch.tensor([320, 0], dtype=torch.int32, device="cuda")
        arguments = dict(is_causal=True, key_value_seq_lengths=lengths, sinks=normal(4, dtype=torch.float32))
    as_exact_as_naive(x, tangents, weights[:2], with_lse, **arguments)


# name: (batch, query heads, key heads, L, S, D), causal
SHAPES = {
    "B1-H2-L1024-D64": ((1, 2, 2, 1024, 1024, 64), False),
    "B1-H2-L1024-D128-causal": ((1, 2, 2, 1024, 1024, 128), True),
    "B2-H3-L333-S257-D72": ((2, 3, 3, 333, 257, 72), False),
    "B2-H3-L333-S257-D72-causal": ((2, 3, 3, 333, 257, 72), True),
    "B2-H8-K2-L512-D64-causal": ((2, 8, 2, 512, 512, 64), True),
    "B2-H4-K1-L127-S500-D128": ((2, 4, 1, 127, 500, 128), False),
    "B1-H1-L1-S3-D64": ((1, 1, 1, 1, 3, 64), False),
    "B3-H2-L17-D28": ((3, 2, 2, 17, 17, 28), False),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("shape", "causal"), SHAPES.values(), ids=SHAPES)
def test_values_and_derivatives(shape, causal, dtype, kernels_alone, family):
    if dtype == torch.float32 and family == "hopper":
        pytest.skip("these kernels take 16-bit floats")
    b, n, k, length, keys, d = shape
    if dtype == torch.float32 and d > 64:  # the reference computes second order in IEEE, but on sm_90 up to 80
        torch.set_float32_matmul_precision("high")
    shapes = (b, n, length, d), (b, k, keys, d), (b, k, keys, d)
    x, tangents = (tuple(normal(*s, dtype=dtype, seed=10 * j + i) for i, s in enumerate(shapes)) for j in range(2))
    weights = tuple(normal(b, n, length, d, dtype=dtype, seed=30 + i) for i in range(2))
    as_exact_as_naive(x, tangents, weights, is_causal=causal, enable_gqa=True)


def test_float32_of_wide_heads():
    """Second derivatives in IEEE products have no tile: the reference computes them."""
    x, tangents, weights = ([normal(1, 2, 100, 128, seed=10 * j + i) for i in range(3)] for j in range(3))
    assert torch.get_float32_matmul_precision() == "highest"
    as_exact_as_naive(tuple(x), tuple(tangents), weights[:2])


def test_tangents_of_large_offset():
    """A tangent that shifts all scores of a row alike changes nothing."""
    q, k, v = (normal(1, 2, 256, 64, dtype=torch.bfloat16, seed=i) for i in range(3))
    _, t_o = jvp(lambda k: sdpa(q, k, v), (k,), (torch.full_like(k, 2.0),))
    assert t_o.abs().max() < 0.2


# ------------------------------------------------------------------------------------------------ layouts, devices

LAYOUTS = {
    "BHLD": lambda length, heads, seed: normal(2, heads, length, 64, dtype=torch.bfloat16, seed=seed),
    "BLHD": lambda length, heads, seed: normal(2, length, heads, 64, dtype=torch.bfloat16, seed=seed).transpose(1, 2),
    "packed": lambda length, heads, seed: normal(2, length, 3, heads, 64, dtype=torch.bfloat16, seed=seed)[
        :, :, 1
    ].transpose(1, 2),
    "channels-strided": lambda length, heads, seed: normal(2, heads, 64, length, dtype=torch.bfloat16, seed=seed).mT,
    "odd-offset": lambda length, heads, seed: normal(2, heads, length, 65, dtype=torch.bfloat16, seed=seed)[..., 1:],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, kernels_alone, family):
    """With tangents that are strided like their primals, and others."""
    make = LAYOUTS[layout]
    x = tuple(make(200, 4, i) for i in range(3))
    for other in (make, LAYOUTS["BLHD"]):
        tangents = tuple(other(200, 4, 5 + i) for i in range(3))
        as_exact_as_naive(x, tangents, (make(200, 4, 8), make(200, 4, 9)))


def test_mask_at_an_odd_address():
    """Where no vectors of it can be read."""
    q, k, v = (normal(1, 2, 256, 64, dtype=torch.bfloat16, seed=i) for i in range(3))
    mask = (normal(256 * 256 + 1) > 0)[1:].view(256, 256)
    assert torch.equal(sdpa(q, k, v, attn_mask=mask), sdpa(q, k, v, attn_mask=mask.clone()))


def test_calls_like_earlier_ones(kernels_alone, family):
    """They follow the plan of the first, whatever the tensors hold and whether some are the same."""
    make = lambda seed: tuple(LAYOUTS["BLHD"](130, 2, seed + i) for i in range(3))
    counts = []
    for seed in (0, 10, 20):
        x, tangents = make(seed), make(seed + 3)
        as_exact_as_naive(x, tangents, (make(seed + 6)[0], make(seed + 7)[0]))
        as_exact_as_naive(x, x, (make(seed + 6)[0], make(seed + 7)[0]))
        counts.append(len(plans.plans))
    assert counts[0] == counts[-1] > 0


def test_expanded_heads(kernels_alone, family):
    q, k, v = (normal(2, n, 150, 64, dtype=torch.bfloat16, seed=n) for n in (4, 1, 1))
    f = lambda s: lambda q, k, v: s(q, k.expand(2, 4, 150, 64), v.expand(2, 4, 150, 64))
    got, want = (jvp(f(s), (q, k, v), (q, k, v)) for s in (sdpa, naive))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


def test_packed_is_not_copied(kernels_alone, family):
    qkv = normal(2, 512, 3, 8, 64, dtype=torch.bfloat16)
    torch_bridge.flash_attn_qkvpacked_func(qkv)  # compiles
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = torch_bridge.flash_attn_qkvpacked_func(qkv)
    statistics = 2 * 8 * 512 * 4
    assert torch.cuda.max_memory_allocated() - before < out.nbytes + 2 * statistics
    want = naive(*qkv.transpose(1, 3).unbind(2)).transpose(1, 2)
    torch.testing.assert_close(out, want, rtol=0.05, atol=0.05)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one(kernels_alone):
    x, tangents = (tuple(normal(1, 2, 100, 64, device="cuda:1", seed=10 * j + i) for i in range(3)) for j in range(2))
    weights = tuple(normal(1, 2, 100, 64, device="cuda:1", seed=30 + i) for i in range(2))
    gc.collect()  # JAX, if other tests of this process used it, makes an array's GPU the current one where it frees it
    with torch.cuda.device(0):  # whatever earlier tests of this process left current
        as_exact_as_naive(x, tangents, weights)
        assert torch.cuda.current_device() == 0


def test_a_stream_that_is_not_the_default_one(kernels_alone):
    x = tuple(normal(1, 8, 1024, 64, seed=i) for i in range(3))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = x[0]
        for _ in range(50):
            late = late * 1.01
        got = sdpa(late, *x[1:])
    torch.cuda.synchronize()
    torch.testing.assert_close(got, naive(late, *x[1:]), rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------------ the rest

OTHERS = {
    "float64": lambda s, x: s(*(a.double() for a in x)),
    "boolean": lambda s, x: s(*x, attn_mask=normal(1, 1, 100, 100) > 0),
    "bias": lambda s, x: s(*x, attn_mask=normal(2, 100, 100)),
    "Ev": lambda s, x: s(*x[:2], x[2][..., :24]),
    "nothing": lambda s, x: s(x[0][:, :, :0], *x[1:]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_every_feature_runs(name):
    x = tuple(normal(1, 2, 100, 64, seed=i) for i in range(3))
    for f in (
        lambda s: jvp(lambda *x: OTHERS[name](s, x), x, x),
        lambda s: grad(lambda *x: OTHERS[name](s, x).sin().sum())(*x),
    ):
        for a, b in zip(leaves(f(sdpa)), leaves(f(naive)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_any_order():
    x = tuple(normal(1, 2, 40, 64, seed=i, dtype=torch.float32) for i in range(3))
    f = lambda s: lambda q: s(q, *x[1:])
    cases = (
        lambda s: jvp(lambda q: jvp(f(s), (q,), (x[1],))[1], (x[0],), (x[2],)),
        lambda s: vmap(lambda t: jvp(f(s), (x[0],), (t,))[1], randomness="error")(torch.stack(x)),
        lambda s: grad(lambda q: (grad(lambda q: (f(s)(q) ** 2).sum())(q) * x[1]).sum())(x[0]),
        lambda s: jacfwd(lambda a: f(s)(x[0] * a))(torch.ones(3, 1, 1, 1, device="cuda")[:1]),
    )
    for case in cases:
        for a, b in zip(leaves(case(sdpa)), leaves(case(naive)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


# ------------------------------------------------------------------------------------------------ training


def cuda_gradients(attention, run, dtype):
    net = Model(attention).to("cuda", dtype)
    return gradients(net, lambda net: run(net, [a.to("cuda", dtype) for a in batch()]))


@pytest.mark.parametrize("derivative", [by_func, by_level])
@pytest.mark.parametrize(("through", "launches"), [(False, "DDBB"), (True, "DDSS")], ids=["stopped", "through"])
def test_training_step(derivative, through, launches, kernels_alone):
    launched()
    got = cuda_gradients(sdpa, lambda net, data: loss(net, derivative, through, data), torch.float32)
    assert launched() == launches
    want = cuda_gradients(naive, lambda net, data: loss(net, by_func, through, data), torch.float64)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


def test_compiled_training_step(kernels_alone):
    torch.compiler.reset()
    step = torch.compile(lambda net, data: loss(net, by_func, False, data), fullgraph=True)
    launched()
    got = cuda_gradients(sdpa, step, torch.float32)
    assert launched() == "DDBB"
    want = cuda_gradients(naive, lambda net, data: loss(net, by_func, False, data), torch.float64)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


def test_autocast_training_step(kernels_alone):
    def step(net, data):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return loss(net, by_func, False, data)

    got = cuda_gradients(sdpa, step, torch.float32)
    want = cuda_gradients(naive, lambda net, data: loss(net, by_func, False, data), torch.float64)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0.1, atol=0.02)


# ------------------------------------------------------------------------------------------------ overhead


def microseconds(f, times=100):
    """What a call costs the host: this thread's own time, whatever other processes do."""
    torch.cuda.synchronize()
    start = time.thread_time()
    for _ in range(times):
        f()
    return 1e6 * (time.thread_time() - start) / times


def test_allocations_of_a_call(kernels_alone, family):
    """Of one like an earlier one: results, and in a backward one piece for what its kernels hand to one another."""
    x = tuple(normal(1, 2, 256, 64, dtype=torch.bfloat16, seed=i).requires_grad_() for i in range(3))

    def allocations(f):
        f()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        f()
        return torch.cuda.memory_stats()["allocation.all.allocated"] - before

    o = sdpa(*x)
    g = torch.ones_like(o)
    assert allocations(lambda: sdpa(*x)) == 2
    assert allocations(lambda: torch.autograd.grad(o, x, g, retain_graph=True)) == 4


def test_overhead_of_a_call(capsys, kernels_alone):
    """A JVP aims at 80 µs.  Asserted loosely: it depends on the host, and on what else that does."""
    q, k, v = x = tuple(normal(1, 2, 64, 64, dtype=torch.bfloat16, seed=i) for i in range(3))
    dual = torch.autograd.forward_ad

    def in_a_level():
        with dual.dual_level(), torch.no_grad():
            duals = [dual.make_dual(a, a.clone()) for a in x]
            return microseconds(lambda: sdpa(*duals))

    turns = [
        (
            in_a_level(),
            microseconds(lambda: jvp(sdpa, x, x)),
            microseconds(lambda: jvp(lambda q, k, v: q + k + v, x, x)),
            microseconds(lambda: sdpa(q, k, v)),
            microseconds(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v)),
        )
        for _ in range(12)
    ]
    in_level, by_jvp, torch_jvp, plain, theirs = map(min, zip(*turns, strict=True))
    with capsys.disabled():
        print(f"\nhost time of a call, µs: JVP in a dual level {in_level:.0f}, torch.func.jvp {by_jvp:.0f}")
        print(f"(of two additions {torch_jvp:.0f}), without tangents {plain:.0f}, torch's SDPA {theirs:.0f}")
    assert in_level < max(160, 1.2 * torch_jvp)


@pytest.mark.parametrize("channels", [512, 0])
def test_heads_that_the_kernels_do_not_serve(channels, caplog):
    generator = torch.Generator().manual_seed(0)
    x = tuple(torch.randn(1, 2, 40, n, generator=generator, dtype=torch.float64) for n in (channels, channels, 8))
    expected = (*jvp(sdpa, x, x), *grad(lambda *x: sdpa(*x).sin().sum(), (0, 1, 2))(*x))
    on_gpu = tuple(a.float().cuda() for a in x)
    with caplog.at_level("DEBUG", "torch_bridge"):
        got = (*jvp(sdpa, on_gpu, on_gpu), *grad(lambda *x: sdpa(*x).sin().sum(), (0, 1, 2))(*on_gpu))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-4, atol=1e-4)
    assert "the reference computes it" in caplog.text


def test_every_dtype_of_integers_is_an_index():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 2, 40, 16, generator=generator).cuda()
    lengths, segments = (
        torch.tensor([30, 40]).cuda(),
        torch.randint(0, 3, (2, 40), generator=generator).sort().values.cuda(),
    )
    attend = lambda n, s: sdpa(q, q, q, key_value_seq_lengths=n, query_segment_ids=s, key_value_segment_ids=s)
    expected = attend(lengths.int(), segments.int())
    for dtype in (torch.int64, torch.uint8, torch.uint32, torch.uint64):
        torch.testing.assert_close(attend(lengths.to(dtype), segments.to(dtype)), expected, rtol=0, atol=0)


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("seed", range(2))
def test_where_no_packed_sequence_is_anything_may_stand(seed, causal, family, kernels_alone):
    """In tensors, tangents and cotangents, before the first, between and behind them.  Results are zero there, and elsewhere
    those of the sequences put together."""
    edges, inside, compact = drawn(seed, 300)
    sides = 0, 1, 1, 0
    rows = [torch.from_numpy(inside[i]).cuda() for i in sides]
    shapes = [(int(r.sum()), h, 64) for r, h in zip(rows, (4, 2, 2, 4), strict=True)]
    short = [[normal(*s, dtype=torch.bfloat16, seed=10 * n + m) for m, s in enumerate(shapes)] for n in range(2)]
    spread = lambda a, r: a.new_full((len(r), *a.shape[1:]), torch.nan).index_put((r,), a)
    whole = [[spread(a, r) for a, r in zip(some, rows, strict=True)] for some in short]

    def results(edges, x, tx):
        edges = [torch.from_numpy(a).cuda() for a in edges]
        attend = lambda *x: torch_bridge.flash_attn_varlen_func(*x, *edges, causal=causal)
        pull = lambda *x: vjp(attend, *x[:3])[1](x[3])
        through = vjp(lambda *x: jvp(attend, x[:3], x[3:]), *x[:3], *tx[:3])[1]((x[3], tx[3]))
        return [*jvp(attend, (*x[:3],), (*tx[:3],)), *pull(*x), *jvp(pull, (*x,), (*tx,))[1], *through]

    for a, b in zip(results(edges, *whole), results(compact, *short), strict=True):
        r = next(r for r in rows if len(r) == len(a) and r.sum() == len(b))
        assert not a[~r].any()
        scale = b.abs().max().clamp(min=1)
        torch.testing.assert_close(a[r] / scale, b / scale, rtol=0, atol=0.03)


@pytest.mark.parametrize("implementation", ["triton", "hopper", "portable", "reference"])
def test_implementations(implementation, caplog):
    """By argument and by the open context, which a compiled step sees too."""
    if implementation == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    q, t_q = (torch.randn(2, 8, 1030, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    step = lambda q, **named: jvp(lambda q: sdpa(q, q, q, **named), (q,), (t_q,))
    want = step(q)
    for named, scope in ((dict(implementation=implementation), None), ({}, implementation)):
        for run in (step, torch.compile(step)):
            plans.plans.clear()
            caplog.clear()
            with (
                torch_bridge.use_implementation(scope),
                caplog.at_level("DEBUG", "jax_flash_jvp"),
                caplog.at_level("DEBUG", "torch_bridge"),
            ):
                for a, b in zip(run(q, **named), want, strict=True):
                    torch.testing.assert_close(a, b, rtol=0.03, atol=0.03)
            families = {"hopper": ("Hopper",), "portable": ("portable",), "triton": ("Hopper", "portable")}
            ran = {family for family in ("Hopper", "portable") if f"the {family} kernels run" in caplog.text}
            assert ran <= {*families.get(implementation, ())}
            assert bool(ran) == (implementation != "reference")
            assert ("it is asked for" in caplog.text) == (implementation == "reference")


def test_hopper_kernels_that_are_asked_for_refuse_strides():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    q = torch.randn(1, 2, 128, 65, device="cuda", dtype=torch.bfloat16)[..., :64]
    with pytest.raises(ValueError, match="'hopper' does not serve tensors whose strides"):
        sdpa(q, q, q, implementation="hopper")


def test_the_log_says_which_kernels_run_and_the_counter_what_they_compute(caplog):
    q = torch.randn(1, 2, 1030, 64, device="cuda", dtype=torch.bfloat16)
    plans.plans.clear()
    with caplog.at_level("DEBUG", "jax_flash_jvp"), caplog.at_level("DEBUG", "torch_bridge"):
        jvp(sdpa, (q, q, q), (q, q, q))
    assert "kernels run: " in caplog.text
    assert "kernel forward" in caplog.text
    for _ in range(2):  # by a plan too
        with FlopCounterMode(display=False) as counter:
            jvp(sdpa, (q, q, q), (q, q, q))
        assert counter.get_total_flops() == 6 * 2 * 2 * 1030 * 1030 * 64
    caplog.clear()
    with caplog.at_level("DEBUG", "torch_bridge"):
        jvp(sdpa, (q, q, q), (q, q, q))
    assert "the kernels of an earlier call that looked the same" in caplog.text
