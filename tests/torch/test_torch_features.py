"""Every feature of attention in PyTorch: the reference against attention as it is written down, the kernels, interpreted,
against the reference."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.func import jvp, vjp, vmap  # noqa: E402
from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # noqa: E402

import support  # noqa: E402
from torch_bridge import options, reference  # noqa: E402
from torch_bridge import scaled_dot_product_attention as sdpa  # noqa: E402
from torch_launchers import NumpyLauncher  # noqa: E402
from torch_oracle import check, everything, naive, normal  # noqa: E402  # noqa: E402

B, H, E = 2, 2, 4


def lengths(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def make_cases(m, L, S):
    """Lengths and windows are multiples of `m`."""
    first, second = (torch.arange(n).div(7 * m, rounding_mode="floor").int().expand(B, n) for n in (L, S))
    both = lambda a, b: dict(query_segment_ids=a, key_value_segment_ids=b)
    generator = torch.Generator().manual_seed(3)
    edges = torch.randint(-3 * m, S + 3 * m, (B, H, L, 2, 2), generator=generator)  # also empty, and past the ends
    edges[:, :, 5 * m : 9 * m] = torch.tensor([[0, 0], [7 * m, 2 * m]])  # rows that see nothing
    few = torch.rand(B, H, -(-L // (4 * m)), -(-S // (8 * m)), generator=generator) < 0.4
    return {
        "bias": dict(attn_mask=normal(1, H, L, S)),
        "mask": dict(attn_mask=normal(B, 1, L, S) > 0.7),
        "values": dict(width=7),
        "key-lengths": dict(key_value_seq_lengths=lengths(18 * m, 0)),
        "query-lengths": dict(query_seq_lengths=lengths(L, 7 * m)),
        "segments": both(first, second),
        "ranges": dict(key_ranges=edges[:1, :1, :, :1].int()),
        "ranges-lengths": dict(key_ranges=edges, key_value_seq_lengths=lengths(18 * m, S), local_window_size=(None, 9 * m)),
        "blocks": dict(attn_mask=few, mask_block_size=(4 * m, 8 * m)),
        "window": dict(local_window_size=(5 * m, 3 * m)),
        "window-left": dict(local_window_size=(6 * m, None)),
        "lower-right": dict(is_causal=True, causal_alignment="lower_right"),
        "soft-cap": dict(logits_soft_cap=0.7),
        "sinks": dict(sinks=normal(H), key_value_seq_lengths=lengths(18 * m, 0)),
        "dropout": dict(dropout_p=0.4),
        "everything": dict(
            dropout_p=0.2, logits_soft_cap=1.5, local_window_size=(20 * m, 6 * m), sinks=normal(H),
            key_value_seq_lengths=lengths(S, 9 * m), **both(first // 2, second // 2),
        ),
        "grouped-bias": dict(heads=(4, 2), attn_mask=normal(B, 4, L, S), logits_soft_cap=1.5),
        "grouped-mask": dict(heads=(4, 2), attn_mask=normal(1, 4, L, S) > 0.7),
        "grouped-ranges": dict(heads=(4, 2), key_ranges=edges, attn_mask=few[:, :1], mask_block_size=(4 * m, 8 * m)),
        "grouped-dropout": dict(heads=(6, 2), dropout_p=0.3, is_causal=True, width=7, **both(first, second)),
    }  # fmt: skip


L, S = 19, 35
CASES = make_cases(1, L, S)


def same_seed(*x, **arguments):
    torch.manual_seed(0)
    return sdpa(*x, **arguments)


def operands(arguments, L, S, channels):
    """Query, key and value."""
    heads, key_heads = arguments.pop("heads", (H, H))
    arguments |= dict(enable_gqa=True) if heads != key_heads else {}
    shapes = (heads, L, channels), (key_heads, S, channels), (key_heads, S, arguments.pop("width", channels))
    return [normal(B, *shape, seed=i) for i, shape in enumerate(shapes)]


def kept(rate, heads, L, S, device="cpu"):
    """What dropout multiplies the probabilities by: shown by equal scores and unit vectors for values."""
    q, k, unit = (torch.zeros(B, heads, L, 1), torch.zeros(B, heads, S, 1), torch.eye(S).expand(B, heads, S, S))
    parts = [same_seed(*(a.to(device) for a in (q, k, v)), dropout_p=rate) for v in unit.split(128, -1)]
    return (torch.cat(parts, -1) > 0) / (1 - np.float32(rate)).item()


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("case", CASES)
def test_values_and_derivatives(case, bias, record_property):
    record_property("supports", support.claim(case, "PyTorch, tiled reference, float64"))
    arguments = dict(CASES[case])
    x = operands(arguments, L, S, E)
    x += [normal(1, x[0].shape[1], L, S)] if bias and not {"is_causal", "attn_mask"} & {*arguments} else []
    factors = kept(arguments["dropout_p"], x[0].shape[1], L, S) if "dropout_p" in arguments else None

    def expected(*x, **arguments):
        return naive(*x, **arguments, kept=factors)

    check(lambda: everything(same_seed, *x, **arguments), lambda: everything(expected, *x, **arguments), None, 1e-6)


def test_past_the_lengths_anything_may_stand():
    """In arrays, tangents and cotangents."""
    ends = dict(query_seq_lengths=lengths(10, 7), key_value_seq_lengths=lengths(0, 20))
    past = [torch.arange(n) >= ends[f"{name}_seq_lengths"][:, None]
            for name, n in (("query", L), ("key_value", S), ("key_value", S), ("query", L))]  # fmt: skip
    drawn = [[normal(B, H, p.shape[1], E, seed=10 * i + j) for j, p in enumerate(past)] for i in range(2)]
    attend = lambda *x: sdpa(*x, **ends)

    def derivatives(filler):
        fill = lambda arrays: [a.masked_fill(p[:, None, :, None], filler) for a, p in zip(arrays, past, strict=True)]
        (*x, g), (*tx, tg) = map(fill, drawn)
        x, tx = tuple(x), tuple(tx)
        backward = lambda *x: vjp(attend, *x[:3])[1](x[3])
        pull = vjp(lambda x, tx: jvp(attend, x, tx), x, tx)[1]
        return [*jvp(attend, x, tx), *sum(jvp(backward, (*x, g), (*tx, tg)), ()), *sum(pull((g, tg)), ())]

    for a, b in zip(derivatives(torch.nan), derivatives(0.0), strict=True):
        assert torch.equal(a, b)


def test_large_negative_biases_hide():
    x = [normal(B, H, n, E, seed=i) for i, n in enumerate((L, S, S))]

    def derivatives(low):
        bias = torch.zeros(L, S)
        bias[2], bias[:, 5] = low, low
        return everything(lambda *x: sdpa(*x, attn_mask=bias), *x)

    for low in (-1e9, torch.finfo(torch.float32).min):
        check(lambda low=low: derivatives(low), lambda: derivatives(-torch.inf))


ALSO_IN_EVERYTHING = {"key-lengths", "segments", "window", "window-left", "soft-cap", "sinks", "dropout"}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case in ALSO_IN_EVERYTHING)) for case in CASES]
)
def test_kernels(case, record_property):
    record_property("supports", support.claim(case, "PyTorch, kernels interpreted, float32"))
    launch = pytest.importorskip("torch_bridge.launch")
    arguments, seen, forward = dict(CASES[case]), [], torch.ops.torch_bridge.forward
    x = [a.float() for a in operands(arguments, L, S, E)]
    with pytest.MonkeyPatch.context() as patched:
        operator = lambda *a: seen.extend(a) or forward(*a)
        patched.setattr("torch_bridge.rules.ops", type("", (), dict(forward=operator)))
        same_seed(*x, **arguments)
    case, mask = options.case_of(*x[:2], *seen[4:8]), seen[3]
    moving = mask is None or mask.is_floating_point()  # a bias in any case that has no boolean mask
    x += [normal(1, x[0].shape[1], 1, S, seed=4).float() if mask is None else mask.float() if moving else mask]
    tx = [normal(*a.shape, seed=9).float() if a.is_floating_point() else None for a in x]
    o, lse, t_o, mu = reference.run("forward_dual", case, x, tx)
    cy, tcy = (
        (normal(*o.shape, seed=5).float(), normal(*lse.shape, seed=6).float()),
        (normal(*o.shape, seed=7).float(), None),
    )
    calls = dict(
        forward_dual=dict(tx=tx),
        tangent=dict(tx=tx, y=(o, lse)),
        backward=dict(cy=cy, y=(o, lse), want=[True, True, True, moving]),
        backward_dual=dict(tx=tx, cy=cy, tcy=tcy, y=(o, lse), ty=(t_o, mu), want=[True, True, True, moving] * 2),
    )
    for name, groups in calls.items():
        got, want = (
            run(name, case, x, **groups)
            for run in (lambda *a, **k: launch.run(NumpyLauncher(), *a, **k), reference.run)
        )
        for a, b in zip(got, want, strict=False):
            assert (a is None) == (b is None)
            if a is not None:
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_vmap_keeps_lengths_apart():
    x = [normal(3, B, H, n, E, seed=i) for i, n in enumerate((L, S, S))]
    ends = torch.stack([lengths(18, 0), lengths(35, 3), lengths(1, 2)])
    attend = lambda q, k, v, ends: sdpa(q, k, v, key_value_seq_lengths=ends)
    check(lambda: vmap(attend)(*x, ends), lambda: torch.stack([attend(*(a[i] for a in x), ends[i]) for i in range(3)]))


@pytest.mark.parametrize("bias", [causal_lower_right, causal_upper_left])
def test_causal_bias_objects(bias):
    x = [normal(B, H, n, E, seed=i) for i, n in enumerate((L, S, S))]
    alignment = dict(causal_alignment=bias.__name__.removeprefix("causal_"))
    check(lambda: sdpa(*x, attn_mask=bias(L, S)), lambda: naive(*x, is_causal=True, **alignment))


def test_dropout_in_float64():
    """Keeps probabilities of 1 / S, times 1 / (1 - rate) in float64."""
    q = torch.zeros(1, 1, 50, 4, dtype=torch.float64)
    kept = sdpa(q, q, q + 1, dropout_p=0.3) * (50 * 0.7)
    torch.testing.assert_close(kept, kept.round(), rtol=1e-14, atol=0)


def test_dropout_follows_the_generator():
    x = [normal(B, H, n, E, seed=i).requires_grad_() for i, n in enumerate((L, S, S))]
    assert torch.equal(same_seed(*x, dropout_p=0.3), same_seed(*x, dropout_p=0.3))
    assert not torch.equal(sdpa(*x, dropout_p=0.3), sdpa(*x, dropout_p=0.3))
    model = lambda *x: sdpa(*x, dropout_p=0.3).sin().sum()
    torch.manual_seed(0)
    want = torch.autograd.grad(model(*x), x)
    torch.manual_seed(0)
    got = torch.autograd.grad(torch.utils.checkpoint.checkpoint(model, *x, use_reentrant=False), x)
    check(lambda: got, lambda: want)


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(case, bias, monkeypatch, record_property):
    record_property("supports", support.claim(case, "PyTorch, kernels on a GPU, float32"))

    def run(*_, **__):
        raise AssertionError("the reference was used")

    L, S = 19 * 16, 35 * 16
    arguments = {
        name: a if not isinstance(a, torch.Tensor) else a.cuda().float() if a.is_floating_point() else a.cuda()
        for name, a in make_cases(16, L, S)[case].items()
    }
    x = [a.cuda().float() for a in operands(arguments, L, S, 64)]
    x += (
        [normal(1, x[0].shape[1], L, S).cuda().float()]
        if bias and not {"is_causal", "attn_mask"} & {*arguments}
        else []
    )
    factors = kept(arguments["dropout_p"], x[0].shape[1], L, S, "cuda") if "dropout_p" in arguments else None

    def expected(*x, **arguments):
        return naive(*x, **arguments, kept=factors)

    want = everything(expected, *x, **arguments)
    monkeypatch.setattr(reference, "run", run)
    check(lambda: everything(same_seed, *x, **arguments), lambda: want, None, 2e-4)


@pytest.mark.parametrize("group", ["context", 2])
def test_a_context_group_is_no_name(group):
    x = torch.zeros(1, 2, 8, 4)
    with pytest.raises(
        TypeError, match=r"`context_group` must be a ProcessGroup or a DeviceMesh: got .*; name an axis as mesh"
    ):
        sdpa(x, x, x, context_group=group)
