"""The log-sum-exp of PyTorch's attention: its values, and its derivatives beside those of the output."""

import warnings

import pytest

torch = pytest.importorskip("torch")

from torch.func import grad, jvp, vmap  # noqa: E402

import torch_bridge  # noqa: E402
from torch_bridge import reference  # noqa: E402
from torch_bridge import scaled_dot_product_attention as sdpa  # noqa: E402
from torch_derivatives import DERIVATIVES, of_query, q, square, tq, x  # noqa: E402
from torch_launchers import NumpyLauncher  # noqa: E402
from torch_oracle import check, everything, naive, normal, with_lse  # noqa: E402

LENGTHS = torch.tensor([3, 0], dtype=torch.int32)
ARGUMENTS = {
    "plain": dict(),
    "causal": dict(is_causal=True),
    "bias": dict(attn_mask=normal(3, 5, 5)),
    "empty-rows": dict(key_value_seq_lengths=LENGTHS),
    "sinks": dict(sinks=normal(3)),
    "sinks-empty-rows": dict(sinks=normal(3), key_value_seq_lengths=LENGTHS, logits_soft_cap=1.5),
}


@pytest.mark.parametrize(("derivative", "launches"), DERIVATIVES.values(), ids=DERIVATIVES)
def test_derivative(derivative, launches):
    check(lambda: derivative(with_lse(sdpa)), lambda: derivative(with_lse(naive)), launches, tolerance=1e-9)


@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
def test_values_and_derivatives(arguments):
    check(lambda: sdpa(*x, **arguments, return_lse=True), lambda: naive(*x, **arguments, return_lse=True), "F")
    results = [lambda s=s: everything(with_lse(s), *x, **arguments) for s in (sdpa, naive)]
    check(*results, "FDDBS", 1e-10)


@pytest.mark.parametrize("arguments", [ARGUMENTS["plain"], ARGUMENTS["sinks-empty-rows"]], ids=["plain", "sinks"])
def test_by_the_kernels(arguments, monkeypatch):
    launch = pytest.importorskip("torch_bridge.launch")
    run = lambda name, case, want=(), **groups: launch.run(NumpyLauncher(), name, case, want=want, **groups)
    monkeypatch.setattr(reference, "run", run)
    to = lambda dtype, a: {name: value.to(dtype) if name == "sinks" else value for name, value in a.items()}
    narrow, wide = (lambda s=s, d=d: [a.double() for part in everything(
        with_lse(s), *(a.to(d) for a in x), **to(d, arguments)) for a in part]
        for s, d in ((sdpa, torch.float32), (naive, torch.float64)))  # fmt: skip
    check(narrow, wide, "FDDBS", 1e-4)


@pytest.mark.parametrize("sinks", [None, -60.0, -8.0, 20.0, 120.0])
def test_far_from_a_sink(sinks):
    """Derivatives in float32 keep their digits, and are finite."""

    def derivatives(attention, dtype):
        arrays, at = [a.to(dtype) for a in x], torch.full((3,), sinks or 0.0, dtype=dtype)
        given = dict() if sinks is None else dict(sinks=at)
        total = lambda q, s: attention(q, *arrays[1:], **(given and dict(sinks=s)), return_lse=True)[1].sin().sum()
        slope = grad(total, (0, 1))
        return [*slope(arrays[0], at), *jvp(slope, (arrays[0], at), (arrays[1], torch.ones_like(at)))[1]]

    for a, b in zip(derivatives(sdpa, torch.float32), derivatives(naive, torch.float64), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=max(2e-5 * b.abs().max().item(), 1e-30))


@pytest.mark.parametrize("sink", [torch.inf, -torch.inf])
def test_infinite_sinks(sink):
    at = torch.full((3,), sink, dtype=torch.float64)
    log_sum_exp = sdpa(*x, sinks=at, return_lse=True)[1]
    torch.testing.assert_close(log_sum_exp, torch.maximum(sdpa(*x, return_lse=True)[1], at[:, None]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_dtype_and_shape(dtype):
    wide = torch.promote_types(dtype, torch.float32)
    for lead in ((), (4,), (2, 3, 4)):
        a = normal(*lead, 5, 8, dtype=dtype)
        o, log_sum_exp = sdpa(a, a[..., :2, :], a[..., :2, :3], return_lse=True)
        assert (o.shape, o.dtype) == ((*lead, 5, 3), dtype)
        assert (log_sum_exp.shape, log_sum_exp.dtype) == ((*lead, 5), wide)


def test_it_is_not_reached_by_dropout():
    expected = jvp(lambda q: sdpa(q, *x[1:], return_lse=True)[1], (q,), (tq,))
    for rate in (0.5, 1):
        got = jvp(lambda q, p=rate: sdpa(q, *x[1:], dropout_p=p, return_lse=True)[1], (q,), (tq,))
        torch.testing.assert_close(got, expected)


def test_two_halves_of_the_keys_are_merged():
    """What the log-sum-exp is for: attention in parts, differentiated through how they are put together."""

    def merged(attention, q, k, v):
        (o_1, a), (o_2, b) = (
            attention(q, k[..., n, :], v[..., n, :], return_lse=True) for n in (slice(2), slice(2, 5))
        )
        share = torch.sigmoid(a - b)[..., None]
        return share * o_1 + (1 - share) * o_2

    check(lambda: everything(lambda *x: merged(sdpa, *x), *x), lambda: everything(naive, *x), None, 1e-10)


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_compiled(dynamic):
    torch._dynamo.reset()
    through = lambda s: lambda q: jvp(grad(square(of_query(with_lse(s)))), (q,), (tq,))
    mapped = lambda s: lambda q: vmap(of_query(with_lse(s)), (1,))(q[:, :, None])
    for f in (through, lambda s: lambda q: with_lse(s)(q, *x[1:], sinks=q[0, :, 0, 0]), mapped):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = torch.compile(f(sdpa), backend="aot_eager", fullgraph=True, dynamic=dynamic)
            if f is mapped:
                torch.testing.assert_close(run(q), f(sdpa)(q))
            else:
                torch.testing.assert_close(run(q), f(naive)(q))


# ------------------------------------------------------------------------------------------------ flash-attn's signatures

FLASH = {  # arguments of flash-attn, and what they are here
    "plain": (dict(), dict()),
    "positional": ((0.0, 0.3, True), dict(scale=0.3, is_causal=True, causal_alignment="lower_right")),
    "causal": (dict(causal=True), dict(is_causal=True, causal_alignment="lower_right")),
    "window": (dict(window_size=(2, 1)), dict(local_window_size=(2, 1), causal_alignment="lower_right")),
    "window-left": (
        dict(window_size=(2, -1), causal=True, softcap=1.5, deterministic=True),
        dict(local_window_size=(2, None), is_causal=True, causal_alignment="lower_right", logits_soft_cap=1.5),
    ),
    "bias": (dict(bias=normal(4, 5, 7), causal=True), dict(attn_mask=normal(4, 5, 7), is_causal=True)),
    "older": ((normal(4, 5, 7), True, 0.3), dict(attn_mask=normal(4, 5, 7), is_causal=True, scale=0.3)),
    "older-no-bias": ((None, True), dict(is_causal=True)),
    "older-by-name": ((None,), dict(is_causal=True)),
}


@pytest.mark.parametrize("name", FLASH)
def test_signatures_of_flash_attn(name):
    given, meant = FLASH[name]
    order, named = (given, {}) if isinstance(given, tuple) else ((), given)
    named = dict(causal=True) if name == "older-by-name" else named
    query, key, value = normal(2, 5, 4, 3), normal(2, 7, 2, 3), normal(2, 7, 2, 6)

    def ours(packed):
        def attend(q, k, v):
            if packed:
                return torch_bridge.flash_attn_kvpacked_func(
                    q, torch.stack([k, v[..., :3]], 2), *order, **named, return_attn_probs=True
                )
            return torch_bridge.flash_attn_func(q, k, v, *order, **named, return_attn_probs=True)

        return attend

    def expected(q, k, v):
        o, log_sum_exp = naive(*(a.transpose(1, 2) for a in (q, k, v)), enable_gqa=True, return_lse=True, **meant)
        return o.transpose(1, 2), log_sum_exp

    for packed in (False, True):
        *results, probabilities = ours(packed)(query, key, value)
        assert probabilities is None
        v = value[..., :3] if packed else value
        check(lambda r=results: r, lambda v=v: expected(query, key, v))
        both = lambda f: lambda *x: f(*x)[0] + f(*x)[1].mT[..., None].sin()
        results = [lambda f=f, v=v: everything(both(f), query, key, v) for f in (ours(packed), expected)]
        check(*results, tolerance=1e-10)


def test_flash_attn_of_one_tensor():
    qkv = normal(2, 5, 3, 2, 4)
    o, log_sum_exp, _ = torch_bridge.flash_attn_qkvpacked_func(qkv, 0.0, None, True, (-1, -1), 0.0, None, False, True)
    expected = naive(*qkv.permute(2, 0, 3, 1, 4), is_causal=True, return_lse=True)
    check(lambda: (o.transpose(1, 2), log_sum_exp), lambda: expected)


def test_flash_attn_drops():
    a = torch.ones(1, 8, 1, 1)
    for rate in (0.0, 0.5, 1.0):
        torch.manual_seed(0)
        got = torch_bridge.flash_attn_func(a, a, a, rate)
        torch.manual_seed(0)
        assert torch.equal(got.transpose(1, 2), sdpa(*[a.transpose(1, 2)] * 3, dropout_p=rate))


F = normal(1, 3, 2, 4)
ERRORS = {
    "alibi": (ValueError, "`alibi_slopes` are not served: pass -slope", dict(alibi_slopes=torch.ones(2))),
    "dropout": (TypeError, "`dropout_p` must be a number: got True; for causality", dict(dropout_p=True)),
    "window": (TypeError, "`window_size` must be a pair of integers", dict(window_size=3)),
    "window-none": (TypeError, "`window_size` must be a pair of integers", dict(window_size=(None, 0))),
    "softcap": (ValueError, "`softcap` must be positive, or 0", dict(softcap=-1.0)),
    "probabilities": (TypeError, "`return_attn_probs` must be True or False", dict(return_attn_probs=1)),
    "rate": (ValueError, "`dropout_p` must be between", dict(dropout_p=2.0)),
    "alignment": (ValueError, "or 'lower_right': got 'right'", dict(causal_alignment="right")),
    "unknown": (TypeError, "unexpected keyword argument 'block_table'", dict(block_table=None)),
}


@pytest.mark.parametrize(("kind", "text", "arguments"), ERRORS.values(), ids=ERRORS)
def test_errors_of_flash_attn(kind, text, arguments):
    with pytest.raises(kind, match=text):
        torch_bridge.flash_attn_func(F, F, F, **arguments)


def test_a_bias_is_given_once_and_first():
    with pytest.raises(TypeError, match="`causal` must not be given twice"):
        torch_bridge.flash_attn_func(F, F, F, None, True, causal=False)
    with pytest.raises(TypeError, match="got 3 arguments"):
        torch_bridge.flash_attn_func(F, F, F, None, True, 0.3, (1, 1))
    with pytest.raises(TypeError, match="`return_lse` must be True or False"):
        sdpa(F, F, F, return_lse="yes")
