"""PyTorch's flash attention for CPUs is the kernel of that device: which calls it serves, and that no derivative is lost."""

import pytest

torch = pytest.importorskip("torch")

from torch.func import grad, hessian, jvp, vmap  # noqa: E402

from torch_bridge import cpu  # noqa: E402
from torch_bridge import scaled_dot_product_attention as sdpa  # noqa: E402
from torch_oracle import check, everything, leaves, naive, normal  # noqa: E402

SHAPES = [(2, 4, 19, 8), (2, 2, 23, 8), (2, 2, 23, 8)]
MASK = normal(2, 1, 19, 23) > -0.5
MASK[:, :, 3] = False
BIAS = normal(1, 4, 19, 23).masked_fill(~MASK[:1], -torch.inf)
SERVED = {
    "plain": {},
    "causal": dict(is_causal=True),
    "as-a-window": dict(local_window_size=(None, 0)),
    "scale": dict(scale=-0.7),
    "mask": dict(attn_mask=MASK),
    "padding": dict(attn_mask=MASK[:, :, :1]),
    "of-queries": dict(attn_mask=MASK[..., :1]),
    "bias": dict(attn_mask=BIAS),
    "bias-in-float32": dict(attn_mask=BIAS.float()),
    "lengths": dict(query_seq_lengths=torch.tensor([7, 19]), key_value_seq_lengths=torch.tensor([0, 11])),
    "causal-lengths": dict(is_causal=True, key_value_seq_lengths=torch.tensor([5, 23])),
    "mask-and-lengths": dict(attn_mask=MASK, key_value_seq_lengths=torch.tensor([5, 20])),
}
LEFT = {  # to the reference
    "causal-with-a-negative-scale": dict(is_causal=True, scale=-0.7),
    "lower-right": dict(is_causal=True, causal_alignment="lower_right"),
    "soft-cap": dict(logits_soft_cap=2.0),
    "window": dict(local_window_size=(4, None)),
    "causal-mask": dict(attn_mask=MASK, local_window_size=(None, 0)),
    "segments": dict(
        query_segment_ids=torch.arange(38).view(2, 19) // 5, key_value_segment_ids=torch.arange(46).view(2, 23) // 5
    ),
}


@pytest.fixture
def served(monkeypatch):
    """Which operators were asked for, and whether PyTorch's kernel computed them."""
    seen, computed = [], cpu.computed

    def spy(name, *args, **groups):
        results = computed(name, *args, **groups)
        seen.append((name, results is not None))
        return results

    monkeypatch.setattr(cpu, "computed", spy)
    return seen


@pytest.mark.parametrize(("case", "by_kernel"), [*((c, True) for c in SERVED), *((c, False) for c in LEFT)])
def test_every_derivative(case, by_kernel, served):
    arguments = dict((SERVED | LEFT)[case], enable_gqa=True)
    x = [normal(*shape, seed=i) for i, shape in enumerate(SHAPES)]
    sdpa(*x, **arguments)
    grad(lambda q: sdpa(q, *x[1:], **arguments).sum())(x[0])
    assert {s for s in served if s[0] != "forward_dual"} == {("forward", by_kernel), ("backward", by_kernel)}
    check(lambda: everything(sdpa, *x, **arguments), lambda: everything(naive, *x, **arguments), tolerance=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", ["plain", "causal", "padding", "bias"])
def test_as_exact_as_naive_in_the_same_dtype(case, dtype):
    arguments = dict(SERVED[case], enable_gqa=True)
    x = [normal(*shape, seed=i).to(dtype) for i, shape in enumerate(SHAPES)]
    given = {n: a.to(dtype) if n == "attn_mask" and a.is_floating_point() else a for n, a in arguments.items()}
    wide = {n: a.double() if n == "attn_mask" and a.is_floating_point() else a for n, a in given.items()}
    first = lambda s, x, given: [s(*x, **given), *grad(lambda *x: s(*x, **given).sin().sum(), (0, 1, 2))(*x)]
    exact = first(naive, [a.double() for a in x], wide)
    for a, b, c in zip(first(sdpa, x, given), first(naive, x, given), exact, strict=True):
        assert a.dtype == dtype
        assert (a - c).abs().max() <= 2 * (b - c).abs().max() + 4 * torch.finfo(dtype).eps * c.abs().max()


def test_the_log_sum_exp_of_rows_that_see_nothing():
    x = [normal(*shape, seed=i) for i, shape in enumerate(SHAPES)]
    o, log_sum_exp = sdpa(*x, MASK, enable_gqa=True, return_lse=True)
    want, of_want = naive(*x, MASK, enable_gqa=True, return_lse=True)
    torch.testing.assert_close((o, log_sum_exp), (want, of_want))
    assert (log_sum_exp[:, :, 3] == -torch.inf).all()


@pytest.mark.parametrize("operand", [0, 1, 2])
@pytest.mark.parametrize("keys", [1, 3, 16, 40])
def test_nan_is_not_hidden(operand, keys):
    x = [normal(1, 1, n, 4, dtype=torch.float32, seed=n) for n in (2, keys, keys)]
    x[operand][..., 0, :] = torch.nan
    q = x[0].clone().requires_grad_()
    o, log_sum_exp = sdpa(q, *x[1:], return_lse=True)
    assert o.isnan().equal(naive(*x).isnan())
    assert operand == 2 or log_sum_exp[0, 0, 0].isnan()
    o.sum().backward()
    assert q.grad[0, 0, 0].isnan().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("operand", [0, 1, 2])
@pytest.mark.parametrize(("case", "where"), [("causal", 0), ("causal", -1), ("mask", -1), ("bias", -1), ("plain", 3)])
def test_nan_reaches_what_it_reaches_in_the_reference(case, where, operand, value):
    x = [normal(*shape, seed=i) for i, shape in enumerate(SHAPES)]
    x[operand][:, :, where, 0] = value
    mask = MASK & (torch.arange(23) < 22)
    bias = torch.zeros(19, 23).masked_fill(~mask[0, 0], -torch.inf)
    arguments = dict(plain={}, causal=dict(is_causal=True), mask=dict(attn_mask=mask), bias=dict(attn_mask=bias))[case]

    def first(**more):
        attend = lambda *x, **given: sdpa(*x, **arguments, **more, **given, enable_gqa=True)
        return *attend(*x, return_lse=True), *grad(lambda *x: attend(*x).sin().sum(), (0, 1, 2))(*x)

    for a, b in zip(first(), first(implementation="reference"), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


def test_padding_may_be_nan():
    x = [normal(*shape, seed=i) for i, shape in enumerate(SHAPES)]
    arguments = dict(SERVED["lengths"], enable_gqa=True)
    holes = [a.clone() for a in x]
    for a, lengths in zip(holes, ([7, 19], [0, 11], [0, 11]), strict=True):
        for entry, length in zip(a, lengths, strict=True):
            entry[:, length:] = torch.nan
    first = lambda x: [sdpa(*x, **arguments), *grad(lambda *x: sdpa(*x, **arguments).sin().sum(), (0, 1, 2))(*x)]
    for a, b in zip(first(holes), first(x), strict=True):
        torch.testing.assert_close(a, b)


def test_keys_behind_every_length_are_not_read(monkeypatch):
    seen, flash = [], cpu.flash_on_cpu
    monkeypatch.setattr(cpu, "flash_on_cpu", lambda *x, **others: seen.append(x[1].shape[2]) or flash(*x, **others))
    x = [normal(*shape, seed=i) for i, shape in enumerate(SHAPES)]
    sdpa(*x, **SERVED["lengths"], enable_gqa=True)
    assert seen == [11]


@pytest.mark.parametrize("side_by_side", [True, False])
def test_results_lie_as_the_compiler_believes(side_by_side):
    x = [normal(*shape, seed=i) for i, shape in enumerate(SHAPES)]
    x = x if side_by_side else [a.mT.contiguous().mT for a in x]  # their channels
    static = None, False, 0.5, ""

    def both(x):
        y = torch.ops.torch_bridge.forward(*x, None, *static)
        return *y, *torch.ops.torch_bridge.backward(*x, None, *y, y[0], None, *static, [True, True, True, False])

    for a, expected in zip(both(x), both([a.to("meta") for a in x]), strict=True):
        assert (a.shape, a.stride()) == (expected.shape, expected.stride())


@pytest.mark.parametrize("case", ["plain", "mask", "lengths"])
def test_transformed_and_compiled(case):
    arguments = dict(SERVED[case], enable_gqa=True)
    x = tuple(normal(*shape, seed=i) for i, shape in enumerate(SHAPES))
    loss = lambda s: lambda q, k, v: s(q, k, v, **arguments).sin().sum()
    gradients = lambda s: grad(loss(s), (0, 1, 2))
    compiled = torch.compile(gradients(sdpa), backend="aot_eager")
    check(lambda: compiled(*x), lambda: gradients(naive)(*x))
    check(lambda: jvp(gradients(sdpa), x, x), lambda: jvp(gradients(naive), x, x), tolerance=1e-10)


def test_mapped():
    x = [normal(3, 1, 2, 5, 4, seed=i) for i in range(3)]
    loss = lambda s: lambda q, k, v: s(q, k, v).sin().sum()
    for f in (lambda s: s, lambda s: grad(loss(s), (0, 1, 2)), lambda s: hessian(loss(s))):
        for a, b in zip(leaves(vmap(f(sdpa))(*x)), leaves(vmap(f(naive))(*x)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
