"""The PyTorch functions: values, dtypes, layouts, errors, `patch`, and the kernels behind them."""

import contextlib
import decimal
import inspect
import math
import pickle
import subprocess
import sys
import types
import warnings
from fractions import Fraction
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.func import grad, jvp, vjp, vmap  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # noqa: E402

import torch_bridge  # noqa: E402
from jax_flash_jvp.kernels.launcher import Rows  # noqa: E402
from jax_flash_jvp.problem import Operands, Problem, unserved  # noqa: E402
from torch_bridge import (  # noqa: E402
    attention,
    compute,
    cpu,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    operators,
    patching,
    reference,
    signatures,
)
from torch_bridge import scaled_dot_product_attention as sdpa  # noqa: E402
from torch_bridge.options import case_of  # noqa: E402
from torch_bridge.varlen import flash_attn_varlen_func  # noqa: E402
from torch_launchers import NumpyLauncher, PlannedLauncher  # noqa: E402
from torch_oracle import check, everything, leaves, naive, normal  # noqa: E402

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("causal", [False, True])
def test_oracle_agrees_with_torch(causal):
    q, k, v = (torch.randn(2, 4, 5, 8, dtype=torch.float64) for _ in range(3))
    for arguments in (dict(is_causal=causal), dict(attn_mask=torch.rand(5, 5) > 0.5), dict(attn_mask=q[..., :5])):
        expected = F.scaled_dot_product_attention(q, k, v, **arguments)
        torch.testing.assert_close(naive(q, k, v, **arguments), expected)
    expected = F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True, scale=0.3)
    torch.testing.assert_close(naive(q, k[:, :2], v[:, :2], enable_gqa=True, scale=0.3), expected)


PROBLEMS = {  # shapes of query, key and value; arguments
    "B2-H3-L5": ([(2, 3, 5, 4)] * 3, dict()),
    "causal-L5": ([(2, 3, 5, 4)] * 3, dict(is_causal=True)),
    "causal-L3-S7": ([(1, 2, 3, 4), (1, 2, 7, 4), (1, 2, 7, 4)], dict(is_causal=True)),
    "causal-L7-S3": ([(1, 2, 7, 4), (1, 2, 3, 4), (1, 2, 3, 4)], dict(is_causal=True)),
    "scale": ([(1, 2, 5, 4)] * 3, dict(scale=-0.7)),
    "Ev7": ([(1, 2, 5, 4), (1, 2, 6, 4), (1, 2, 6, 7)], dict()),
    "GQA": ([(2, 6, 5, 4), (2, 2, 7, 4), (2, 2, 7, 4)], dict(enable_gqa=True)),
    "MQA-causal": ([(2, 3, 5, 4), (2, 1, 5, 4), (2, 1, 5, 4)], dict(enable_gqa=True, is_causal=True)),
    "GQA-fewer-values": ([(2, 6, 5, 4), (2, 6, 7, 4), (2, 2, 7, 3)], dict(enable_gqa=True)),
    "GQA-fewer-keys": ([(2, 12, 5, 4), (2, 4, 7, 4), (2, 6, 7, 4)], dict(enable_gqa=True, is_causal=True)),
    "3D-GQA-fewer-values": ([(6, 5, 4), (3, 7, 4), (1, 7, 4)], dict(enable_gqa=True)),
    "one-head-broadcast": ([(2, 3, 5, 4), (2, 1, 6, 4), (2, 1, 6, 4)], dict()),
    "batch-broadcast": ([(2, 3, 5, 4), (1, 3, 6, 4), (3, 6, 4)], dict()),
    "3D": ([(3, 5, 4), (3, 6, 4), (3, 6, 4)], dict()),
    "2D": ([(5, 4), (6, 4), (6, 4)], dict()),
    "5D": ([(2, 3, 2, 5, 4)] * 3, dict(is_causal=True)),
    "5D-GQA": ([(2, 3, 4, 5, 4), (2, 3, 2, 5, 4), (2, 3, 2, 5, 4)], dict(enable_gqa=True)),
    "L1-D1": ([(1, 1, 1, 1)] * 3, dict()),
}


@pytest.mark.parametrize(("shapes", "arguments"), PROBLEMS.values(), ids=PROBLEMS)
def test_values_and_derivatives(shapes, arguments):
    x = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    check(lambda: everything(sdpa, *x, **arguments), lambda: everything(naive, *x, **arguments), tolerance=1e-11)


MASKS = {
    "LS": (5, 6),
    "key": (1, 6),
    "query": (5, 1),
    "head": (3, 1, 1),
    "batch": (2, 1, 1, 6),
    "one": (1, 1, 1, 1),
    "full": (2, 3, 5, 6),
}


@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
def test_bias_broadcasts_and_has_derivatives(shape):
    x = normal(2, 3, 5, 4), normal(2, 3, 6, 4, seed=1), normal(2, 3, 6, 4, seed=2), normal(*shape)
    check(lambda: everything(sdpa, *x), lambda: everything(naive, *x), tolerance=1e-11)


@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
def test_boolean_mask_broadcasts(shape):
    x = normal(2, 3, 5, 4), normal(2, 3, 6, 4, seed=1), normal(2, 3, 6, 4, seed=2)
    mask = normal(*shape) > -0.3  # rows and columns without a key to attend to among them
    got, want = (everything(f, *x, attn_mask=mask) for f in (sdpa, naive))
    check(lambda: got, lambda: want, tolerance=1e-11)


@pytest.mark.parametrize("shape", [(2, 3, 1, 5, 6), (1, 1, 2, 5, 1), (5, 6), (2, 1, 1, 1, 6)], ids=str)
def test_mask_of_several_batch_axes(shape):
    x = [normal(2, 3, 2, n, 4, seed=n) for n in (5, 6, 6)]
    check(lambda: everything(sdpa, *x, normal(*shape)), lambda: everything(naive, *x, normal(*shape)), tolerance=1e-11)


def test_a_row_that_sees_nothing_is_zero():
    x = [normal(1, 2, 3, 4, seed=i) for i in range(3)]
    for mask in (
        torch.ones(3, 3).tril(-1).bool(),
        torch.zeros(3, 3).masked_fill(~torch.ones(3, 3).tril(-1).bool(), -torch.inf),
    ):
        (o, t_o), (d_q, *_), (dd_q, *_) = everything(sdpa, *x, attn_mask=mask)
        for a in (o, t_o, d_q, dd_q):
            assert (a[:, :, 0] == 0).all()
            assert a.isfinite().all()
            assert (a[:, :, 1:] != 0).any()


@pytest.mark.parametrize("lengths", [(0, 3), (3, 0)], ids=["L0", "S0"])
def test_nothing_to_attend_with_or_to(lengths):
    x = [normal(1, 2, n, 4, seed=n) for n in (lengths[0], lengths[1], lengths[1])]
    for a in leaves(everything(sdpa, *x)):
        assert (a == 0).all()


@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
def test_as_exact_as_naive_in_the_same_dtype(dtype):
    x = [normal(2, 3, n, 8, dtype=dtype, seed=n) for n in (9, 11, 11)]
    ours, theirs = everything(sdpa, *x), everything(naive, *x)
    exact = everything(naive, *(a.double() for a in x))
    for a, b, c in zip(leaves(ours), leaves(theirs), leaves(exact), strict=True):
        assert a.dtype == dtype
        floor = 4 * torch.finfo(dtype).eps * c.abs().max()
        assert (a - c).abs().max() <= 2 * (b - c).abs().max() + floor


def test_memory_is_linear_in_the_length(monkeypatch):
    """The reference goes through blocks of queries, and gives the same whatever their size."""
    x = [normal(1, 2, n, 4, seed=n) for n in (40, 21, 21)]
    arguments = dict(attn_mask=normal(40, 21))
    want = everything(sdpa, *x, **arguments)
    monkeypatch.setattr(reference, "ON_CPU", 1)  # 16 queries a block
    sizes = []
    scores = reference._scores
    monkeypatch.setattr(reference, "_scores", lambda *a: sizes.append(scores(*a)[0].shape) or scores(*a))
    check(lambda: everything(sdpa, *x, **arguments), lambda: want)
    assert {s[-2:] for s in sizes} == {(16, 21), (8, 21)}
    third = lambda s: jvp(grad(lambda q: (jvp(lambda q: s(q, *x[1:]), (q,), (q,))[1] ** 2).sum()), (x[0],), (x[0],))
    check(lambda: third(sdpa), lambda: third(naive), tolerance=1e-10)
    fourth = lambda s: vjp(lambda q: third_gradient(s, q), x[0])[1](x[0])
    third_gradient = lambda s, q: grad(lambda q: (jvp(lambda q: s(q, *x[1:]), (q,), (q,))[1] ** 2).sum())(q)
    check(lambda: fourth(sdpa), lambda: fourth(naive), tolerance=1e-10)


SEEN = {  # the keys that the blocks of 40 queries of 21 keys visit
    "causal": (dict(is_causal=True), [16, 21, 21]),
    "lower-right": (dict(is_causal=True, causal_alignment="lower_right"), [0, 13, 21]),
    "window": (dict(local_window_size=(3, 2)), [18, 8, 0]),
    "window-left": (dict(local_window_size=(None, -12)), [4, 20, 21]),
    "window-right": (dict(local_window_size=(-9, None)), [12, 0, 0]),
}


@pytest.mark.parametrize("case", SEEN)
def test_blocks_visit_the_keys_that_they_see(case, monkeypatch):
    """And a bias with them; gradients of the others are zeros."""
    arguments, visited = SEEN[case]
    arguments = dict(local_window_size=(None, None)) | arguments
    x = [normal(1, 2, n, 4, seed=n) for n in (40, 21, 21)]
    bias, w = normal(2, 40, 21), normal(1, 2, 40, 4)
    seen, scores = [], reference._scores
    monkeypatch.setattr(cpu, "computed", lambda *_, **__: None)
    monkeypatch.setattr(reference, "ON_CPU", 1)
    monkeypatch.setattr(reference, "_scores", lambda *a: seen.append(a[2:4]) or scores(*a))

    def both(s):  # causality as a window, with which a bias may go
        given = dict(arguments)
        if given.pop("is_causal", False):
            given["local_window_size"] = (None, 0)
        biased = lambda q, k, v, b: s(q, k, v, attn_mask=b, **given)
        second = lambda *x: (jvp(lambda *x: biased(*x).sin(), x, x)[1] * w).sum()
        third = lambda q: (jvp(grad(lambda q: second(q, *x[1:], bias)), (q,), (w,))[1] * w).sum()
        return everything(s, *x, **arguments), grad(second, (0, 1, 2, 3))(*x, bias), grad(third)(x[0])

    sdpa(*x, **arguments)
    assert [k.shape[2] for _, k in seen] == visited
    check(lambda: both(sdpa), lambda: both(naive), tolerance=1e-10)


def test_dropout_is_the_same_in_any_blocks(monkeypatch):
    x = [normal(1, 2, n, 4, seed=n) for n in (40, 21, 21)]
    drop = lambda **how: torch.manual_seed(3) and everything(sdpa, *x, dropout_p=0.4, **how)
    wants = [drop(), drop(is_causal=True)]
    monkeypatch.setattr(reference, "ON_CPU", 1)
    monkeypatch.setattr(reference, "MIXED", 1)
    check(lambda: [drop(), drop(is_causal=True)], lambda: wants)


def test_only_wanted_gradients_are_computed():
    x = [normal(1, 2, 5, 4, seed=i).requires_grad_(i == 1) for i in range(3)]
    sdpa(*x).sum().backward()
    assert [a.grad is not None for a in x] == [False, True, False]
    static = (None, False, 0.5, "")
    y = torch.ops.torch_bridge.forward(*x, None, *static)
    got = torch.ops.torch_bridge.backward(*x, None, *y, y[0], None, *static, [False, True, False, False])
    assert [a.numel() for a in got] == [0, 40, 0, 0]


# ------------------------------------------------------------------------------------------------ layouts


def test_views_of_any_strides():
    by_length = normal(2, 5, 3, 4).transpose(1, 2)  # BLHD
    by_channel = normal(2, 3, 4, 5).mT  # the last axis not contiguous
    sliced = normal(2, 3, 9, 8)[:, :, ::2, 1:5]
    for x in ((by_length,) * 3, (by_channel, sliced, by_length), (sliced, by_length, by_channel)):
        check(lambda: everything(sdpa, *x), lambda: everything(naive, *x), tolerance=1e-11)


def test_expanded_heads():
    x = [normal(2, n, 5, 4, seed=n) for n in (3, 1, 1)]
    expanded = lambda s: lambda q, k, v: s(q, k.expand(2, 3, 5, 4), v.expand(2, 3, 5, 4))
    check(lambda: everything(expanded(sdpa), *x), lambda: everything(expanded(naive), *x), tolerance=1e-11)


def test_output_is_in_the_memory_order_of_lengths():
    x = [normal(2, 3, 5, 4)] * 3
    assert sdpa(*x).transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("causal", [False, True])
def test_packed(causal):
    qkv, bias = normal(2, 5, 3, 2, 4), normal(1, 2, 1, 5)

    def expected(qkv, bias):
        q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))
        hidden = torch.ones(5, 5).triu(1).bool() if causal else torch.zeros(5, 5).bool()
        return naive(q, k, v, bias.masked_fill(hidden, -torch.inf), scale=0.3).transpose(1, 2)

    def three(qkv, bias):
        return flash_attn_qkvpacked_func(qkv, bias, causal, 0.3)

    def two(qkv, bias):
        return flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], bias, causal, softmax_scale=0.3)

    def one(qkv, bias):
        return flash_attn_func(*(qkv[:, :, i] for i in range(3)), bias=bias, causal=causal, softmax_scale=0.3)

    for f in (three, two, one):
        check(lambda: everything(f, qkv, bias), lambda: everything(expected, qkv, bias), tolerance=1e-11)
        assert f(qkv, bias).is_contiguous()


def test_packed_is_not_copied(monkeypatch):
    qkv, seen = normal(2, 5, 3, 2, 4), []
    computed = cpu.computed
    monkeypatch.setattr(
        cpu, "computed", lambda name, case, x, **groups: seen.extend(x) or computed(name, case, x, **groups)
    )
    flash_attn_qkvpacked_func(qkv)
    assert [a.data_ptr() for a in seen[:3]] == [qkv[:, :, i].data_ptr() for i in range(3)]
    flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:])
    assert [a.data_ptr() for a in seen[4:7]] == [qkv[:, :, i].data_ptr() for i in range(3)]


def test_kvpacked_with_grouped_heads():
    q, kv = normal(2, 5, 4, 4), normal(2, 7, 2, 2, 4)
    expected = naive(q.transpose(1, 2), *kv.transpose(1, 3).unbind(2), enable_gqa=True).transpose(1, 2)
    check(lambda: flash_attn_kvpacked_func(q, kv), lambda: expected, "F")


# ------------------------------------------------------------------------------------------------ errors

A, B = normal(2, 4, 5, 8), normal(2, 2, 5, 8)
Sharded = type("Sharded", (torch.Tensor,), dict(placements=()))  # as a DTensor
X = normal(1, 1, 3, 4)
ERRORS = {
    "dropout": (ValueError, "`dropout_p` must be between 0 and 1", lambda: sdpa(A, A, A, dropout_p=1.1)),
    "another-name": (TypeError, "argument 'sm_scale': did you mean `scale`", lambda: sdpa(A, A, A, sm_scale=0.5)),
    "no-name": (TypeError, "unexpected keyword argument 'temperature'$", lambda: sdpa(A, A, A, temperature=0.5)),
    "alignment": (ValueError, "or 'lower_right': got 'right'", lambda: sdpa(A, A, A, causal_alignment="right")),
    "alignment-of-a-bias": (
        ValueError,
        "or 'lower_right': got 'right'",
        lambda: sdpa(A, A, A, causal_lower_right(*[A.shape[-2]] * 2), causal_alignment="right"),
    ),
    "window": (TypeError, "`local_window_size` must be an int", lambda: sdpa(A, A, A, local_window_size=(1.5, 0))),
    "window-bool": (
        TypeError,
        "`local_window_size` must be an int",
        lambda: sdpa(A, A, A, local_window_size=torch.tensor(True)),
    ),
    "window-type": (TypeError, "an integer or a pair of", lambda: sdpa(A, A, A, local_window_size=1.5)),
    "soft-cap": (ValueError, "`logits_soft_cap` must be positive", lambda: sdpa(A, A, A, logits_soft_cap=0.0)),
    "sharded": (ValueError, "`key` must not be a DTensor", lambda: sdpa(A, A.as_subclass(Sharded), A)),
    "sinks": (ValueError, "`sinks` must have shape", lambda: sdpa(A, A, A, sinks=torch.zeros(7))),
    "lengths": (
        TypeError,
        "`query_seq_lengths` must be of integers",
        lambda: sdpa(A, A, A, query_seq_lengths=torch.ones(2)),
    ),
    "mask-and-causal": (ValueError, "must not be given together", lambda: sdpa(A, A, A, A[..., :5], is_causal=True)),
    "heads": (ValueError, "pass enable_gqa=True", lambda: sdpa(A, B, B)),
    "swapped": (
        ValueError,
        r"pass the transpose\(1, 2\) of each, or call flash_attn_func",
        lambda: sdpa(normal(2, 9, 4, 8), *[normal(2, 7, 4, 8)] * 2),
    ),
    "swapped-gqa": (
        ValueError,
        "swap these two axes of each",
        lambda: sdpa(normal(2, 9, 4, 8), *[normal(2, 7, 4, 8)] * 2, enable_gqa=True),
    ),
    "heads-gqa": (ValueError, "multiple", lambda: sdpa(A, A[:, :3], A[:, :3], enable_gqa=True)),
    "value-heads": (ValueError, "`key` and of `value`: got 4, 4 and 3", lambda: sdpa(A, A, A[:, :3], enable_gqa=True)),
    "batch": (ValueError, "must broadcast", lambda: sdpa(normal(3, 4, 5, 8), A, A)),
    "channels": (ValueError, r"got query\[..., 8\] and key\[..., 4\]", lambda: sdpa(A, A[..., :4], A)),
    "length": (ValueError, "`value` must be as long as `key`", lambda: sdpa(A, A, A[:, :, :3])),
    "axes": (ValueError, "at least", lambda: sdpa(A[0, 0, 0], A, A)),
    "mask-shape": (ValueError, "`attn_mask` must broadcast", lambda: sdpa(A, A, A, normal(3, 1, 1, 1))),
    "mask-of-padding": (
        ValueError,
        r"got shape \(2, 5\); if this is padding \[batch, key length\], pass `attn_mask\[:, None, None\]`, or lengths as",
        lambda: sdpa(A[:, :, :3], A, A, torch.ones(2, 5, dtype=torch.bool)),
    ),
    "bias-of-padding": (
        ValueError,
        r"`bias` must .*got shape \(2, 5\); if this is padding \[batch, key length\], pass `bias\[:, None, None\]`$",
        lambda: torch_bridge.flash_attn_func(*(A[:, :, :n].transpose(1, 2) for n in (3, 5, 5)), bias=normal(2, 5)),
    ),
    "mask-axes": (ValueError, "`attn_mask` must broadcast", lambda: sdpa(A[0], A[0], A[0], normal(1, 1, 1, 1))),
    "mask-dtype": (
        TypeError,
        "`attn_mask` must be boolean or one of float16",
        lambda: sdpa(A, A, A, torch.ones(5, 5).int()),
    ),
    "dtypes": (TypeError, "`key` must have the dtype of `query`", lambda: sdpa(A, A.float(), A)),
    "dtype": (TypeError, "`query` must be one of", lambda: sdpa(A.int(), A, A)),
    "device": (ValueError, "`key` must be on the device", lambda: sdpa(A, A.to("meta"), A)),
    "scale": (TypeError, "`scale` must be a number", lambda: sdpa(A, A, A, scale=torch.tensor(0.5))),
    "scale-nan": (ValueError, "`scale` must be finite in float32", lambda: sdpa(A, A, A, scale=math.nan)),
    "scale-numpy": (ValueError, "`scale` must be finite in float32", lambda: sdpa(A, A, A, scale=np.float32("nan"))),
    "gqa-number": (TypeError, "`enable_gqa` must be True or False: got int", lambda: sdpa(A, A, A, enable_gqa=1)),
    "causal-text": (TypeError, "`is_causal` must be True or False: got str", lambda: sdpa(A, A, A, is_causal="no")),
    "causal-tensor": (
        TypeError,
        "`is_causal` must be True or False: got Tensor",
        lambda: sdpa(A, A, A, is_causal=torch.tensor(True)),
    ),
    "packed-causal": (TypeError, "`causal` must be", lambda: torch_bridge.flash_attn_func(A, A, A, causal=1)),
    "packed-bias": (TypeError, "`bias` must be a tensor", lambda: torch_bridge.flash_attn_func(A, A, A, bias=[1])),
    "packed-bias-shape": (
        ValueError,
        "`bias` must broadcast",
        lambda: torch_bridge.flash_attn_func(A, A, A, bias=normal(3, 3, 3)),
    ),
    "packed-bias-causal": (
        ValueError,
        "`bias` must be made for",
        lambda: torch_bridge.flash_attn_func(A, A, A, bias=causal_lower_right(99, 98)),
    ),
    "packed-scale": (
        TypeError,
        "`softmax_scale` must be a number",
        lambda: torch_bridge.flash_attn_func(A, A, A, softmax_scale="a"),
    ),
    "scale-large": (ValueError, "`scale` must be finite in float32", lambda: sdpa(A, A, A, scale=1e300)),
    "sparse": (ValueError, "`query` must not be sparse", lambda: sdpa(A.to_sparse(), A, A)),
    "nested": (ValueError, "nested", lambda: sdpa(*[torch.nested.nested_tensor([A[0], A[1]])] * 3)),
    "tensor-cap": (
        TypeError,
        "`logits_soft_cap` must be a number",
        lambda: sdpa(X, X, X, logits_soft_cap=torch.tensor(0.7)),
    ),
    "tensor-rate": (TypeError, "`dropout_p` must be a number", lambda: sdpa(X, X, X, dropout_p=torch.tensor(0.7))),
    "tensor-rate-zero": (TypeError, "`dropout_p` must be a number", lambda: sdpa(X, X, X, dropout_p=torch.tensor(0.0))),
    "no-rate": (TypeError, "`dropout_p` must be a number", lambda: sdpa(X, X, X, dropout_p=None)),
    "no-tensor": (
        TypeError,
        "`query` must be a tensor",
        lambda: sdpa(X.numpy(), X, X, query_seq_lengths=torch.ones(2)),
    ),
    "text": (TypeError, "`scale` must be a number: got '0.5'", lambda: sdpa(X, X, X, scale="0.5")),
    "complex": (TypeError, "`scale` must be a number: got np.complex64", lambda: sdpa(X, X, X, scale=np.complex64(1j))),
    "numbers": (TypeError, "`scale` must be a number: got array", lambda: sdpa(X, X, X, scale=np.ones(2))),
    "huge-fraction": (ValueError, "`scale` must be finite", lambda: sdpa(X, X, X, scale=Fraction(10**400))),
    "no-number": (ValueError, "`scale` must be finite", lambda: sdpa(X, X, X, scale=decimal.Decimal("nan"))),
    "numpy": (TypeError, "`key` must be a tensor: got ndarray", lambda: sdpa(X, X.numpy(), X)),
    "none": (TypeError, "`value` must be a tensor: got NoneType", lambda: sdpa(X, X, None)),
    "list": (TypeError, "`sinks` must be a tensor: got list", lambda: sdpa(X, X, X, sinks=[1.0])),
    "float8-mask": (
        TypeError,
        "`attn_mask` must be boolean or one of float16",
        lambda: sdpa(X, X, X, attn_mask=torch.zeros(X.shape[-2], X.shape[-2], dtype=torch.float8_e4m3fn)),
    ),
    "complex-sinks": (TypeError, "`sinks` must be one of float16", lambda: sdpa(X, X, X, sinks=torch.tensor([1j]))),
    "size-of-bias": (
        ValueError,
        r"made for \(3, 3\) queries and keys",
        lambda: sdpa(X, X, X, attn_mask=causal_lower_right(3, 5)),
    ),
    "two-alignments": (
        ValueError,
        "leave out one",
        lambda: sdpa(X, X, X, attn_mask=causal_upper_left(3, 3), causal_alignment="lower_right"),
    ),
    "packed-rank": (ValueError, "`q` must have shape", lambda: torch_bridge.flash_attn_func(X[0], X[0], X[0])),
    "packed-qkv": (
        ValueError,
        r"`qkv` must have shape \[batch, length, 3",
        lambda: torch_bridge.flash_attn_qkvpacked_func(X),
    ),
    "packed-kv": (
        ValueError,
        r"`kv` must have shape",
        lambda: torch_bridge.flash_attn_kvpacked_func(X, normal(1, 3, 3, 1, 4)),
    ),
    "packed-both": (
        ValueError,
        "leave it out",
        lambda: torch_bridge.flash_attn_func(X, X, X, bias=causal_upper_left(1, 1), causal=True),
    ),
}


@pytest.mark.parametrize(("kind", "text", "call"), ERRORS.values(), ids=ERRORS)
def test_errors_name_the_argument(kind, text, call):
    with pytest.raises(kind, match=text):
        call()


def test_two_dual_levels_are_refused_by_torch():
    level = torch.autograd.forward_ad.dual_level
    with level(), pytest.raises(RuntimeError, match="Nested forward mode"), level():
        pass


# ------------------------------------------------------------------------------------------------ in place of torch's


def test_signature_is_that_of_torch():
    ours = inspect.signature(sdpa).parameters.values()
    theirs = torch.ops.aten.scaled_dot_product_attention.default._schema.arguments
    ours = list(ours)[: len(theirs)]
    assert [p.name for p in ours] == [p.name for p in theirs]
    assert [p.kind == p.KEYWORD_ONLY for p in ours] == [p.kwarg_only for p in theirs]
    assert [p.default for p in ours][3:] == [p.default_value for p in theirs][3:]


def test_patch_reaches_models_and_names():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    x, t_x = normal(2, 5, 8), normal(2, 5, 8, seed=1)
    original = F.scaled_dot_product_attention
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        expected = jvp(layer, (x,), (t_x,))

    def patched():
        with torch_bridge.patch():
            assert F.scaled_dot_product_attention is sdpa
            return jvp(layer, (x,), (t_x,))

    check(patched, lambda: expected, "D")
    assert F.scaled_dot_product_attention is original
    module = types.ModuleType("a_model")
    module.scaled_dot_product_attention = original  # from torch.nn.functional import scaled_dot_product_attention
    module.attend = original  # … as attend
    sys.modules["a_model"] = module
    with torch_bridge.patch():
        with torch_bridge.patch():
            assert module.scaled_dot_product_attention is module.attend is sdpa
        assert module.scaled_dot_product_attention is F.scaled_dot_product_attention is sdpa
    assert sys.modules.pop("a_model").scaled_dot_product_attention is module.attend is original
    with pytest.raises(KeyError), torch_bridge.patch():
        raise KeyError
    assert F.scaled_dot_product_attention is original


def test_patch_looks_again_only_where_something_changed(monkeypatch):
    original, looked = F.scaled_dot_product_attention, []
    places = patching._places
    monkeypatch.setattr(patching, "_places", lambda ours: looked.append(True) or places(ours))
    with torch_bridge.patch():
        looked.clear()
    for _ in range(3):
        with torch_bridge.patch(), torch_bridge.patch():
            assert F.scaled_dot_product_attention is sdpa
    assert not looked
    module = types.ModuleType("a_model")
    monkeypatch.setitem(sys.modules, "a_model", module)
    with torch_bridge.patch():
        pass
    for name in ("attend", "again"):  # of a module that was looked at before
        setattr(module, name, original)
        with torch_bridge.patch():
            assert getattr(module, name) is F.scaled_dot_product_attention is sdpa
        assert getattr(module, name) is F.scaled_dot_product_attention is original


def test_a_module_is_scripted_while_patched():
    class Attention(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with torch_bridge.patch():
        scripted = torch.jit.script(Attention())
    check(lambda: scripted(A, A, A), lambda: naive(A, A, A, is_causal=True), "")


def test_sdpa_kernel_is_told_once_to_be_ignored(caplog, monkeypatch):
    monkeypatch.setattr(attention._Said, "sdpa_kernel", False)
    with caplog.at_level("DEBUG", "torch_bridge.attention"):
        sdpa(A, A, A)
        assert not caplog.text
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            sdpa(A, A, A)
            sdpa(A, A, A)
    assert caplog.text.count("sdpa_kernel is without effect") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        dict(attn_mask=normal(2, 4, 5, 5), local_window_size=(9, 3)),
        dict(attn_mask=normal(5, 5) > -1, logits_soft_cap=2.0, sinks=normal(4)),
        dict(is_causal=True, key_value_seq_lengths=torch.tensor([3, 5])),
    ],
    ids=["bias-window", "mask-cap-sinks", "causal-lengths"],
)
def test_heads_that_are_too_wide_for_the_kernels(arguments):
    """The reference serves them: here with channels of zero, which change nothing."""
    f = partial(sdpa, scale=0.1, **arguments)
    x, value = (A, A + 1), normal(2, 4, 5, 300)
    wider = lambda q, k, v: f(F.pad(q, (0, 272)), F.pad(k, (0, 272)), v)
    check(lambda: everything(wider, *x, value), lambda: everything(f, *x, value), tolerance=1e-11)
    few, wide = (Operands(*(normal(1, 1, 2, n, dtype=torch.float32) for n in (d, d, 3))) for d in (256, 257))
    assert unserved(few) is None
    assert unserved(wide) == "a head dimension of 257 in `query` (1 to 256 are served)"


@pytest.mark.parametrize("sizes", [(0, 0, 4), (0, 2, 4), (4, 2, 0)], ids=["no-heads", "no-query-heads", "no-channels"])
def test_no_heads_or_no_channels(sizes):
    heads, key_heads, channels = sizes
    x = torch.zeros(2, heads, 5, channels), torch.zeros(2, key_heads, 7, channels), torch.ones(2, key_heads, 7, 3)
    f = partial(sdpa, enable_gqa=True, local_window_size=(9, 9))
    torch.testing.assert_close(f(*x), torch.ones(2, heads, 5, 3))
    assert all(a.isfinite().all() for a in leaves(everything(f, *x)))


def test_everything_is_dropped():
    (o, t_o), gradients, _ = everything(sdpa, A, A, A, dropout_p=1)
    assert not any(a.any() for a in (o, t_o, *gradients))
    assert o.shape == A.shape


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint16, torch.uint32, torch.int64, torch.uint64], ids=str)
@pytest.mark.parametrize(
    "wrap", [lambda f: f, lambda f: torch.compile(f, backend="aot_eager")], ids=["eager", "compiled"]
)
def test_every_dtype_of_integers_is_an_index(dtype, wrap):
    lengths, segments = torch.tensor([3, 5]), torch.tensor([[0, 0, 2, 1, 2], [1, 0, 0, 0, 1]])
    mask = segments[:, None, :, None] == segments[:, None, None, :]
    mask = mask & (torch.arange(5) < lengths[:, None])[:, None, None, :]
    f = lambda q, n, s: sdpa(q, q, q, key_value_seq_lengths=n, query_segment_ids=s, key_value_segment_ids=s)
    got = wrap(f)(A, lengths.to(dtype), segments.to(dtype))
    torch.testing.assert_close(got, naive(A, A, A, mask).nan_to_num(0))
    if dtype.itemsize == 8:  # beyond int32
        got = f(A, torch.tensor([2**40, 5]).to(dtype), (segments * 2**32).to(dtype))
        torch.testing.assert_close(got[0], naive(A, A, A, segments[:, None, :, None] == segments[:, None, None, :])[0])
    if dtype == torch.int64:
        mapped = torch.vmap(f)(A[:, None], lengths[:, None], segments[:, None])
        torch.testing.assert_close(mapped[:, 0], f(A, lengths, segments))


def test_segments_of_two_dtypes():
    ids = torch.zeros(2, 5, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"must fit one dtype: got torch\.uint64 and torch\.int64; cast one"):
        sdpa(A, A, A, query_segment_ids=ids.to(torch.uint64), key_value_segment_ids=ids)


def test_a_window_without_keys_is_told_of():
    with pytest.warns(
        UserWarning, match="hides every key from every query: .*for no limit on a side pass None"
    ) as told:
        assert not sdpa(A, A, A, local_window_size=(-1, -1)).any()
    assert told[0].filename == __file__
    assert not torch.compile(partial(sdpa, local_window_size=-1), backend="aot_eager", fullgraph=True)(A, A, A).any()


def test_a_window_with_a_limit_of_less_one_is_told_of():
    with pytest.warns(
        UserWarning, match=r"`local_window_size`=\(3, -1\) shows query i only the keys i - 3 … i - 1"
    ) as told:
        sdpa(A, A, A, local_window_size=(3, -1))
    assert told[0].filename == __file__
    with warnings.catch_warnings(action="error"):
        sdpa(A, A, A, local_window_size=(None, -1))
        torch_bridge.flash_attn_func(A, A, A, window_size=(3, -1))


def test_lengths_out_of_range_are_told_of():
    lengths = torch.tensor([-1, 9])
    with pytest.warns(
        UserWarning, match=r"`key_value_seq_lengths` should be between 0 and 5, .*: got \[-1, 9\]"
    ) as told:
        got = sdpa(A, A, A, key_value_seq_lengths=lengths)
    assert told[0].filename == __file__
    compiled = torch.compile(sdpa, backend="aot_eager", fullgraph=True)
    with warnings.catch_warnings(action="error"):
        assert torch.equal(got, sdpa(A, A, A, key_value_seq_lengths=lengths.clamp(0, 5)))
        assert torch.equal(got, vmap(lambda n: sdpa(A, A, A, key_value_seq_lengths=n))(lengths[None])[0])
        assert torch.equal(got, compiled(A, A, A, key_value_seq_lengths=lengths))


def test_autocast():
    a = normal(2, 3, 5, 4, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        u, du = jvp(lambda a: sdpa(a, a, a), (a,), (torch.ones_like(a),))
        assert sdpa(a.double(), a.double(), a.double()).dtype == torch.float64
        bare = sdpa(a.bfloat16(), a.bfloat16(), a.bfloat16())
    (u - du.detach()).float().sum().backward()
    assert u.dtype == du.dtype == torch.bfloat16
    assert a.grad.dtype == torch.float32
    half = a.bfloat16()  # autocast does not reach into the computation
    assert torch.equal(u, jvp(lambda a: sdpa(a, a, a), (half,), (torch.ones_like(half),))[0])
    assert torch.equal(bare, sdpa(half, half, half))


def test_imports_no_jax():
    code = """
import sys, torch, torch_bridge, torch_bridge.launch
x = torch.ones(1, 1, 2, 4, requires_grad=True)
torch_bridge.scaled_dot_product_attention(x, x, x).sum().backward()
print([m for m in sys.modules if m.split(".")[0] in ("jax", "jaxlib", "jax_triton")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ------------------------------------------------------------------------------------------------ kernels, interpreted


def dense(*shape, seed):
    return normal(*shape, seed=seed, dtype=torch.float32)


LAYOUTS = {
    "BHLD": lambda n, heads, seed: dense(1, heads, n, 8, seed=seed),
    "BLHD": lambda n, heads, seed: dense(1, n, heads, 8, seed=seed).transpose(1, 2),
    "packed": lambda n, heads, seed: dense(1, n, 3, heads, 8, seed=seed)[:, :, 1].transpose(1, 2),
    "channels-strided": lambda n, heads, seed: dense(1, heads, 8, n, seed=seed).mT,
    "expanded": lambda n, heads, seed: dense(1, 1, n, 8, seed=seed).expand(1, heads, n, 8),
}


@pytest.mark.parametrize("queries", [19, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernels_read_torch_layouts(layout, queries):
    """Each operator, by the kernels and by the reference, on strided tensors whose tangents are strided otherwise; also where
    heads are rows of one block."""
    launch = pytest.importorskip("torch_bridge.launch")
    make, other = LAYOUTS[layout], LAYOUTS["BLHD"]
    heads = 2, 1, 1
    x = *(make(n, h, i) for i, (n, h) in enumerate(zip((queries, 17, 17), heads, strict=True))), None
    tx = other(queries, 2, 5), None, make(17, 1, 6), None
    case = reference.Case(Problem(0.3, is_causal=True))
    o, lse, t_o, mu = reference.run("forward_dual", case, x, tx)
    cy, tcy = (LAYOUTS["BHLD"](queries, 2, 7), None), (LAYOUTS["packed"](queries, 2, 8), mu.sin())
    y, ty = (o, lse), (t_o, mu)
    calls = dict(
        forward=dict(),
        forward_dual=dict(tx=tx),
        tangent=dict(tx=tx, y=y),
        backward=dict(cy=cy, y=y, want=[True, False, True, False]),
        backward_dual=dict(tx=tx, cy=cy, tcy=tcy, y=y, ty=ty, want=[True, True, True, False, True, False, True, False]),
    )
    for name, groups in calls.items():
        got = launch.run(NumpyLauncher(), name, case, x, **groups)
        want = reference.run(name, case, x, **groups)
        assert len(got) == dict(forward=2, forward_dual=4, tangent=2, backward=4, backward_dual=8)[name]
        for a, b in zip(got, want, strict=False):
            assert (a is None) == (b is None)
            if a is not None:
                assert a.shape == b.shape
                np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


OVERLAPPING = {  # whose sums and products have other strides
    "one-token-expanded": lambda: dense(2, 16, 1, seed=1).mT[:, None].expand(2, 4, 1, 16),
    "batch-last-expanded": lambda: dense(7, 16, 1, seed=1).permute(2, 0, 1)[:, None].expand(1, 4, 7, 16),
    "unfolded": lambda: dense(1, 1, 23, seed=1).unfold(-1, 16, 1),
}


@pytest.mark.parametrize("layout", OVERLAPPING)
def test_kernels_round_overlapping_tensors_to_tf32(layout):
    launch = pytest.importorskip("torch_bridge.launch")
    k = OVERLAPPING[layout]()
    x = dense(k.shape[0], k.shape[1], 5, 16, seed=2), k, k, None
    case = reference.Case(Problem(0.25, precision="tf32"))
    (o, lse), (exact, exact_lse) = (run(case, x) for run in (
        lambda *args: launch.run(NumpyLauncher(), "forward", *args), lambda *args: reference.run("forward", *args)[:2]
    ))  # fmt: skip
    np.testing.assert_allclose(o, exact, rtol=0, atol=5e-3)
    np.testing.assert_allclose(lse, exact_lse, rtol=0, atol=5e-3)


@pytest.mark.parametrize("shape", [(17, 19), (5, 70), (70, 5)])
def test_kernels_round_short_inputs_themselves(shape, monkeypatch):
    """To the bits that a launcher gives them."""
    launch, jobs = (pytest.importorskip(n) for n in ("torch_bridge.launch", "jax_flash_jvp.kernels.portable.jobs"))
    T, S = shape
    groups = signatures.OPERATORS["backward_dual"].groups
    draw = lambda n, seed: normal(2, n, 2, 24, seed=seed).float().transpose(1, 2)
    x = draw(T, 0), draw(S, 1), draw(S, 2), normal(2, 2, T, S, seed=3).float()
    tx = draw(T, 4), draw(S, 5), draw(S, 6), None
    cotangents = draw(T, 7), normal(2, 2, T, seed=8).float()
    rounded = []

    class Launcher(NumpyLauncher):
        def round_to_tf32(self, array):
            rounded.append(array)
            return super().round_to_tf32(array)

    def everything(precision="tf32"):
        case = reference.Case(Problem(0.2, precision=precision))
        run = lambda name, **given: launch.run(Launcher(), name, case, **given)
        o, lse, t_o, mu = run("forward_dual", x=x, tx=tx)
        tensors = x, (o, lse), cotangents, tx, (t_o, mu), cotangents
        dual = run("backward_dual", **dict(zip(groups, tensors, strict=True)), want=[True] * 8)
        return [o, lse, t_o, *dual, *run("backward", x=x, cy=cotangents, y=(o, lse), want=[True] * 4)]

    here = everything()
    assert not rounded
    monkeypatch.setattr(jobs, "READ_ONCE", 0)
    for a, b, exact in zip(here, everything(), everything("ieee"), strict=True):
        np.testing.assert_array_equal(a, b)
        assert not np.array_equal(a, exact)
    assert rounded


def test_kernels_round_what_is_huge_to_tf32():
    launch = pytest.importorskip("torch_bridge.launch")
    q, k, v = (dense(1, 2, 17, 16, seed=i) for i in range(3))
    v[0, 0, :3, 0] = torch.tensor([1e35, -3e38, torch.inf])
    o = launch.run(NumpyLauncher(), "forward", reference.Case(Problem(0.25, precision="tf32")), (q, k, v, None))[0]
    assert o[0, 0, :, 0].isinf().all()
    assert o[0, 0, :, 1:].isfinite().all()
    assert o[0, 1].isfinite().all()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_kernels_pass_every_nan_on(precision, biased):
    """Of a query and of a cotangent, with the bits that GPUs give it."""
    launch = pytest.importorskip("torch_bridge.launch")
    q, k, v, tv, d_o = (dense(1, 1, 33, 16, seed=i) for i in range(5))
    nan = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    bias = torch.zeros(1, 1, 1, 33) if biased else None
    case = reference.Case(Problem(0.25, precision=precision))

    def run(name, x, **groups):
        return launch.run(NumpyLauncher(), name, case, x, **groups)

    def backward(x, y, cotangent):
        return run("backward", x, y=y, cy=(cotangent, None), want=[True, True, True, False])

    y = run("forward", (q, k, v, bias))
    some = d_o.clone()
    some[0, 0, 5] = nan
    dq, dk, dv, _ = backward((q, k, v, bias), y, some)
    assert dq[0, 0, 5].isnan().all()
    assert dk.isnan().all()
    assert dv.isnan().all()

    q[0, 0, 5] = nan
    x = q, k, v, bias
    o, lse, t_o, _ = run("forward_dual", x, tx=(None, None, tv, None))
    linear, _ = run("tangent", x, tx=(None, None, tv, None), y=(o, lse))
    others = torch.arange(33) != 5
    for result in (o, lse, t_o, linear):
        assert result[0, 0, 5].isnan().all()
        assert result[0, 0, others].isfinite().all()
    dq, dk, dv, _ = backward(x, (o, lse), d_o)
    assert dq[0, 0, 5].isnan().all()
    assert dk.isnan().all()
    assert dv.isnan().all()


def test_kernels_take_tangents_of_other_dtypes():
    launch = pytest.importorskip("torch_bridge.launch")
    make = lambda seed, dtype: (*(dense(1, 2, 17, 16, seed=seed + i).to(dtype) for i in range(3)), None)
    x, tx, case = make(0, torch.bfloat16), make(3, torch.float32), reference.Case(Problem(0.25))
    o, lse, t_o, mu = launch.run(NumpyLauncher(), "forward_dual", case, x, tx)
    cast = *(t.to(torch.bfloat16) for t in tx[:3]), None
    assert t_o.equal(launch.run(NumpyLauncher(), "forward_dual", case, x, cast)[2])
    groups = dict(tx=tx, cy=(o, None), y=(o, lse), ty=(t_o, mu), want=[True, True, True, False] * 2)
    wide, narrow = (
        launch.run(NumpyLauncher(), "backward_dual", case, x, tcy=(t_o.to(dtype), None), **groups)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert all(a is b is None or a.equal(b) for a, b in zip(wide, narrow, strict=True))


class Describing:
    """A launcher as on an H200, which makes the descriptors and launches nothing."""

    target, descriptors, multiprocessors = 90, True, 132

    def __init__(self):
        self.kernels = []

    def strides(self, array):
        return array.stride()

    def contiguous(self, array):
        return array.contiguous()

    def launch(self, launch):
        from torch_bridge.launch import _descriptor

        self.kernels.append(launch.kernel.fn.__module__)
        for array in launch.inputs.values():
            if isinstance(array, Rows):
                _descriptor(array)
        return launch.results([torch.empty(o.shape, dtype=getattr(torch, o.dtype)) for o in launch.allocations()])


COTANGENTS = {
    "rows-of-200-bytes": (100, lambda: torch.zeros(1, 2, 1024, 100, dtype=torch.bfloat16)),
    "one-head": (128, lambda: torch.zeros(1, 1024, 128, dtype=torch.bfloat16)[..., None].permute(0, 3, 1, 2)),
    "whole": (128, lambda: torch.zeros(1, 2, 1024, 128, dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("cotangent", COTANGENTS)
def test_cotangents_that_no_descriptor_describes(cotangent):
    """They go to the portable kernels, wherever the operands lie."""
    launch = pytest.importorskip("torch_bridge.launch")
    channels, make = COTANGENTS[cotangent]
    d_o = make()
    x = *(torch.zeros(*d_o.shape[:3], 128, dtype=torch.bfloat16)[..., :channels] for _ in range(3)), None
    y = torch.zeros_like(d_o), torch.zeros(d_o.shape[:3])
    launcher = Describing()
    groups = dict(cy=(d_o, None), y=y, want=(True, True, True, False))
    launch.run(launcher, "backward", reference.Case(Problem(0.1)), x, **groups)
    assert any("hopper" in kernel for kernel in launcher.kernels) == (cotangent == "whole")


@pytest.mark.parametrize("where", ["operand", "tangent", "cotangent", "output", "tangent of the output", "nowhere"])
def test_arrays_that_no_descriptor_describes(where):
    """That begin two bytes late, or have one head with rows as far apart as channels: whichever of a call's."""
    launch = pytest.importorskip("torch_bridge.launch")

    def make(name):
        late = name == where and name != "cotangent"
        a = torch.zeros(1024 * 128 + late, dtype=torch.bfloat16)[late:].view(1, 1, 1024, 128)
        return COTANGENTS["one-head"][1]() if name == where == "cotangent" else a

    x, tx = ([make(name), *(make("other") for _ in range(2)), None] for name in ("operand", "tangent"))
    launcher, o, statistic = Describing(), make("other"), torch.zeros(1, 1, 1024)
    launch.run(launcher, "forward_dual", reference.Case(Problem(0.1)), x, tx=tx)
    groups = dict(cy=(make("cotangent"), None), tcy=(o, None))
    groups |= dict(y=(make("output"), statistic), ty=(make("tangent of the output"), statistic))
    launch.run(
        launcher, "backward_dual", reference.Case(Problem(0.1)), x, tx=tx, **groups, want=(True, True, True, False) * 2
    )
    hopper = [kernel for kernel in launcher.kernels if "hopper" in kernel]
    assert bool(hopper) == (where not in ("operand", "tangent"))  # the forward has these alone
    assert any(kernel.endswith("hopper.two_sides") for kernel in hopper) == (where == "nowhere")


SWITCHES = {
    "fp32_precision": lambda exact: setattr(torch.backends.cuda.matmul, "fp32_precision", "ieee" if exact else "tf32"),
    "allow_tf32": lambda exact: setattr(torch.backends.cuda.matmul, "allow_tf32", not exact),
    "set_float32_matmul_precision": lambda exact: torch.set_float32_matmul_precision("highest" if exact else "high"),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_precision_follows_every_switch(switch):
    q = torch.zeros(1, 1, 4, 8)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        for exact in (False, True):
            SWITCHES[switch](exact)
            assert (case_of(q, q, None, False, 1.0, "").problem.precision == "ieee") == exact
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


STRIDED_BIASES = {
    "as-its-tangent": (lambda: dense(1, 2, 17, 19, seed=3).mT, lambda: dense(1, 2, 17, 19, seed=4).mT),
    "expanded-tangent": (lambda: dense(1, 2, 19, 17, seed=3), lambda: dense(1, 2, 19, 1, seed=4).expand(1, 2, 19, 17)),
}


@pytest.mark.parametrize("bias", STRIDED_BIASES)
def test_kernels_read_strided_biases(bias):
    launch = pytest.importorskip("torch_bridge.launch")
    mask, t_mask = (make() for make in STRIDED_BIASES[bias])
    make = LAYOUTS["BHLD"]
    x, tx = ((*(make(n, 2, i + seed) for i, n in enumerate((19, 17, 17))), m) for seed, m in ((0, mask), (5, t_mask)))
    case = reference.Case(Problem(0.3))
    o, lse, *ty = reference.run("forward_dual", case, x, tx)
    cotangents = dict(cy=(make(19, 2, 7), None), tcy=(make(19, 2, 8), None), y=(o, lse), ty=ty)
    for name, groups in (
        ("forward_dual", {}),
        ("tangent", dict(y=(o, lse))),
        ("backward_dual", dict(cotangents, want=[True] * 8)),
    ):
        got, want = (
            run(name, case, x, tx=tx, **groups) for run in (partial(launch.run, NumpyLauncher()), reference.run)
        )
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_the_gradient_of_an_expanded_bias_has_its_shape():
    launch = pytest.importorskip("torch_bridge.launch")
    x = *(LAYOUTS["BHLD"](n, 2, i) for i, n in enumerate((19, 17, 17))), dense(1, 2, 19, 1, seed=3).expand(1, 2, 19, 17)
    case = reference.Case(Problem(0.3))
    groups = dict(cy=(LAYOUTS["BHLD"](19, 2, 7), None), y=reference.run("forward", case, x)[:2], want=[True] * 4)
    got, expected = (
        run("backward", case, x, **groups) for run in (partial(launch.run, NumpyLauncher()), reference.run)
    )
    for a, b in zip(got, expected[:4], strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("in_dims", [(None, 0), (0, None), (0, 0), (None, None)], ids=str)
def test_kernels_for_many_biases_or_tangents_of_them(in_dims, monkeypatch):
    launch = pytest.importorskip("torch_bridge.launch")
    q, k, v = (LAYOUTS["BHLD"](n, 2, i).expand(2, 2, n, 8) for i, n in enumerate((19, 17, 17)))
    mask, t_mask = (dense(*(() if d is None else (3,)), 1, 2, 19, 17, seed=i) for i, d in enumerate(in_dims))
    static = None, False, 0.3, ""
    masks = mask if in_dims[0] == 0 else [mask] * 3
    y = map(torch.stack, zip(*(torch.ops.torch_bridge.forward(q, k, v, m, *static) for m in masks), strict=True))
    args = (q, k, v, mask, *y, q, k, None, t_mask, *static)
    dims = (None, None, None, in_dims[0], 0, 0, None, None, None, in_dims[1], *(None,) * 4)

    def tangent(run, *args):
        x, y, tx, _ = signatures.split("tangent", args)
        return tuple(run("tangent", case_of(q, k, *static), x, tx=tx, y=y))

    by_kernels = partial(tangent, partial(launch.run, NumpyLauncher()))
    monkeypatch.setattr(operators, "ops", types.SimpleNamespace(tangent=by_kernels))
    got, _ = operators._fold("tangent", types.SimpleNamespace(batch_size=3), dims, *args)
    for i in range(3):
        want = tangent(reference.run, *(a if d is None else a[i] for a, d in zip(args, dims, strict=True)))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a[i], b, rtol=2e-5, atol=2e-5)


def test_what_has_no_tile_is_left_to_the_reference(monkeypatch):
    launch = pytest.importorskip("torch_bridge.launch")

    def run(*_, **__):
        raise NotImplementedError("no tile")

    monkeypatch.setattr(launch, "run", run)
    monkeypatch.setattr(launch, "TorchLauncher", lambda device: types.SimpleNamespace(device=device))
    monkeypatch.setattr(launch, "_on", contextlib.nullcontext)
    assert launch.computed("backward_dual", [normal(1)], {}, reference.Case(Problem(0.3))) is None


def test_kernels_in_bfloat16():
    launch = pytest.importorskip("torch_bridge.launch")
    x = *(LAYOUTS["packed"](17, 2, i).bfloat16() for i in range(3)), None
    tx = *(LAYOUTS["packed"](17, 2, 5 + i).bfloat16() for i in range(3)), None
    case = reference.Case(Problem(0.3))
    got = launch.run(NumpyLauncher(), "forward_dual", case, x, tx=tx)
    for a, b in zip(got, reference.run("forward_dual", case, x, tx), strict=True):
        np.testing.assert_allclose(a.float(), b.float(), rtol=0.02, atol=0.02)


def test_a_plan_does_for_other_tensors_what_was_done_for_the_first():
    launch, plans = (pytest.importorskip(f"torch_bridge.{name}") for name in ("launch", "plans"))
    groups, case = signatures.OPERATORS["backward_dual"].groups, reference.Case(Problem(0.3, is_causal=True))
    want = [True, True, True, False, True, False, True, False]

    def arguments(seed):
        q, k, v, t_q, t_v, d_o, t_d_o = (
            normal(1, n, 2, 8, seed=seed + i, dtype=torch.float32).transpose(1, 2)
            for i, n in enumerate((19, 17, 17, 19, 17, 19, 19))
        )
        both = reference.run("forward_dual", case, (q, k, v, None), (t_q, None, t_v, None))
        o, lse, *ty = [a if i % 2 else a.mT.contiguous().mT for i, a in enumerate(both)]
        tensors = q, k, v, None, o, lse, d_o, None, t_q, None, t_v, None, *ty, t_d_o, None
        return [*tensors, None, True, 0.3, "", want]

    def computed(args):
        *tensors, _ = signatures.split("backward_dual", args)
        launcher = PlannedLauncher()
        results = launch.run(launcher, "backward_dual", case, **dict(zip(groups, tensors, strict=True)), want=want)
        return results, launcher.launched

    first, second = arguments(0), arguments(100)
    for a in (4, 12):  # o and ȯ in the order in which the kernels read them
        first[a], second[a] = (x[a].transpose(1, 2).contiguous().transpose(1, 2) for x in (first, second))
    plan = plans.made(first, *reversed(computed(first)))
    looks, addresses = plans.look("backward_dual", second)
    assert plans.look("backward_dual", first)[0] == looks
    got, expected = plans.follow(plan, second, addresses), computed(second)[0]
    for a, b in zip(got, expected, strict=True):
        assert (b is None) == (a is None)
        if b is not None:
            assert a.stride() == b.stride()
            assert a._base is None
            assert a.untyped_storage().nbytes() == a.nbytes
            np.testing.assert_array_equal(a, b)
    assert not any(isinstance(a, torch.Tensor) for launch in plan.launches for a in launch.arguments)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_plan_copies_what_was_copied_for_the_first(batch):
    """Of a padded batch: parts of the selection, a cotangent that is expanded, queries whose rows are not in one piece, and a
    bias of columns and of rows that are no whole vectors, copied twice."""
    launch, plans = (pytest.importorskip(f"torch_bridge.{name}") for name in ("launch", "plans"))
    options = "query_lengths key_lengths query_segments key_segments dropout=0.3 seed"
    T, S, want = 17, 19, [True, True, True, False]

    def arguments(seed):
        q = dense(batch, 2, 8, T, seed=seed).mT.float()
        k, v = (normal(batch, 2, S, 8, seed=seed + i, dtype=torch.float32) for i in (1, 2))
        bias = normal(batch, 1, S, T, seed=seed + 4, dtype=torch.float32).mT
        numbers = torch.Generator().manual_seed(seed)
        draw = lambda low, high, *shape: torch.randint(low, high, shape, generator=numbers, dtype=torch.int32)
        segments = [draw(0, 3, batch, n).sort(1)[0] for n in (T, S)]
        seed_and_places = draw(0, 2**31 - 1, batch, 5)
        selection = torch.cat([draw(9, T, batch, 1), draw(9, S, batch, 1), seed_and_places, *segments], 1)
        d_o = normal(batch, 1, 1, 8, seed=seed + 3, dtype=torch.float32).expand(batch, 2, T, 8)
        case = case_of(q, k, selection, False, 0.3, options)
        o, lse, *_ = reference.run("forward", case, (q, k, v, bias))
        y = o.mT.contiguous().mT, lse
        return [q, k, v, bias, *y, d_o, None, selection, False, 0.3, options, want]

    def computed(args):
        x, y, cy, static = signatures.split("backward", args)
        launcher = PlannedLauncher()
        case = case_of(*x[:2], *static[:4])
        return launch.run(launcher, "backward", case, x=x, cy=cy, y=y, want=want), launcher.launched

    first, second = arguments(0), arguments(100)
    plan = plans.made(first, *reversed(computed(first)))
    parts = [part.place for part in plan.parts]
    # the selection's first part begins where it does; then what was copied of the bias, behind the 8 tensors
    assert sorted(parts)[:-1] == [0, 3, 4, 6, *[7] * (5 if batch > 1 else 4)]
    assert max(parts) > 7
    looks, addresses = plans.look("backward", second)
    assert plans.look("backward", first)[0] == looks
    got, expected = plans.follow(plan, second, addresses), computed(second)[0]
    for a, b in zip(got[:3], expected, strict=False):
        assert b.isfinite().all()
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("shape", [(2, 1, 1, 19), (2, 2, 17, 1), (2, 2, 1, 19), (1, 2, 1, 1)])
def test_a_plan_rounds_and_sums(shape):
    """Operands to TF32, and the gradient of a bias over the axes that it lacks; of one that gives rows, over none."""
    launch, plans = (pytest.importorskip(f"torch_bridge.{name}") for name in ("launch", "plans"))
    wants = [True] * 4

    def arguments(seed):
        q, k, v, d_o = (normal(2, 2, n, 8, seed=seed + i) for i, n in enumerate((17, 19, 19, 17)))
        q, k, v, d_o = (a.float().transpose(1, 2).contiguous().transpose(1, 2) for a in (q, k, v, d_o))
        bias, d_lse = normal(*shape, seed=seed + 4).float(), normal(2, 2, 17, seed=seed + 5).float()
        o, lse, *_ = reference.run("forward", case, (q, k, v, bias))
        return [q, k, v, bias, o.mT.contiguous().mT, lse, d_o, d_lse, None, False, 0.3, "", wants]

    def computed(args):
        x, y, cy, _ = signatures.split("backward", args)
        launcher = PlannedLauncher()
        return launch.run(launcher, "backward", case, x=x, cy=cy, y=y, want=wants), launcher.launched

    case = reference.Case(Problem(0.3, precision="tf32"))
    first, second = arguments(0), arguments(100)
    plan = plans.made(first, *reversed(computed(first)))
    got, expected = plans.follow(plan, second, plans.look("backward", second)[1]), computed(second)[0]
    exact = reference.run("backward", case, x=second[:4], cy=second[6:8], y=second[4:6], want=wants)
    for a, b, c in zip(got, expected, exact[: len(got)], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.shape == b.shape
            np.testing.assert_array_equal(a, b)
            np.testing.assert_allclose(a, c, rtol=0, atol=2e-2)


def test_copies_are_of_the_argument_that_begins_there():
    """Not of another that holds the same memory, further off in the next call."""
    plans = pytest.importorskip("torch_bridge.plans")
    packed = torch.zeros(2, 3, 3, 2, 4)
    q, k, v = packed.unbind(2)
    origin = plans._origin
    assert [origin(a.transpose(1, 2), [q, k, v]) for a in (q, k, v)] == [(0, 0), (1, 0), (2, 0)]
    assert origin(k, [q, v]) is None
    selection = torch.zeros(2, 9, dtype=torch.int32)
    assert origin(selection[:, 4:7], [q, k, v, selection]) == (3, 4)
    assert origin(selection.clone(), [q, selection]) is None


@pytest.mark.parametrize("change", ["shape", "strides", "dtype", "address", "shared", "absent", "static"])
def test_calls_that_look_different(change):
    plans = pytest.importorskip("torch_bridge.plans")
    x = [torch.zeros(1, 2, 4, 8) for _ in range(3)]
    other = dict(
        shape=[torch.zeros(1, 2, 5, 8), *x[1:]],
        strides=[torch.zeros(1, 4, 2, 8).transpose(1, 2), *x[1:]],
        dtype=[x[0].half(), *x[1:]],
        address=[torch.zeros(65)[1:].view(1, 2, 4, 8), *x[1:]],
        shared=[x[0], x[0], x[2]],
        absent=[*x[:2], None],
        static=x,
    )[change]
    look = lambda x, flag: plans.look("forward", [*x, flag])[0]
    assert look(x, False) != look(other, change == "static")
    assert look(x, False) == look([torch.zeros_like(a) for a in x], False)


def test_calls_in_another_precision_look_different():
    plans = pytest.importorskip("torch_bridge.plans")
    before, looks = torch.backends.cuda.matmul.fp32_precision, set()
    try:
        for torch.backends.cuda.matmul.fp32_precision in ("ieee", "tf32"):
            looks |= {
                plans.look("forward", [torch.zeros(1, 2, 4, 8, dtype=d)])[0] for d in (torch.float32, torch.float16)
            }
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert len(looks) == 3


def test_plans_are_kept_for_the_precision_that_was_computed(monkeypatch):
    launch, plans = pytest.importorskip("torch_bridge.launch"), pytest.importorskip("torch_bridge.plans")
    q, before = torch.zeros(1, 2, 4, 8), torch.backends.cuda.matmul.fp32_precision
    kept, steps = [], types.SimpleNamespace(device=q.device, launched=[])

    def run(*_):  # as another thread sets it
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        return [q]

    monkeypatch.setattr(launch, "TorchLauncher", lambda device: steps)
    monkeypatch.setattr(launch, "_on", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(launch, "run", run)
    monkeypatch.setattr(plans, "keep", lambda looks, plan: kept.append(looks))
    args = [q, q, q, None, None, False, 0.3, "", False]
    try:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        looks = plans.look("forward", args)
        launch.computed("forward", args, {}, case_of(q, q, None, False, 0.3, ""))
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert kept == [looks[0]]


def test_calls_without_a_plan_leave_those_of_others(monkeypatch):
    plans = pytest.importorskip("torch_bridge.plans")
    monkeypatch.setattr(plans, "plans", {("first",): "its plan"})
    monkeypatch.setattr(plans, "MOST_PLANS", 1)
    plans.keep(("second",), None)
    assert plans.plans == {("first",): "its plan"}
    plans.keep(("third",), "its plan")
    assert [*plans.plans] == [("third",)]


def test_no_plan_of_a_call_that_cast():
    launch, plans = (pytest.importorskip(f"torch_bridge.{name}") for name in ("launch", "plans"))
    x = [dense(1, 2, 8, 17, seed=i).mT for i in range(3)]
    tx = [a.half() for a in x]
    launcher = PlannedLauncher()
    results = launch.run(launcher, "forward_dual", reference.Case(Problem(0.3)), (*x, None), (*tx, None))
    assert plans.made([*x, None, *tx, None, None, False, 0.3, ""], launcher.launched, results) is None


def test_vmap_over_the_selection_alone():
    """Of a JVP: x is shared, lengths and seeds are not."""
    q, ends = normal(2, 2, 3, 4), torch.tensor([[1, 3], [2, 2]], dtype=torch.int32)
    tangent = lambda e: torch.func.jvp(lambda q: sdpa(q, q, q, key_value_seq_lengths=e), (q,), (q,))[1]
    torch.testing.assert_close(torch.func.vmap(tangent)(ends), torch.stack([tangent(e) for e in ends]))
    torch.func.jacfwd(lambda q: sdpa(q, q, q, dropout_p=0.3), randomness="different")(q)


def test_lengths_of_an_empty_batch():
    x = torch.zeros(0, 2, 5, 4, requires_grad=True)
    o = sdpa(x, x, x, key_value_seq_lengths=torch.zeros(0, dtype=torch.int32))
    o.sum().backward()
    assert o.shape == x.grad.shape == x.shape


def test_vmap_of_an_empty_batch():
    z = normal(3, 0, 2, 3, 4)
    assert torch.func.vmap(sdpa)(z, z, z).shape == z.shape
    assert torch.func.jacrev(lambda q: sdpa(q, q, q))(z[0]).shape == (*z[0].shape, *z[0].shape)


def test_gradients_inside_a_vectorized_forward_mode_are_refused():
    """PyTorch would stop the process."""
    k, options = normal(1, 1, 3, 4), dict(vectorize=True, outer_jacobian_strategy="forward-mode")
    with pytest.raises(RuntimeError, match=r"use torch\.func\.hessian"):
        torch.autograd.functional.hessian(lambda q: sdpa(q, k, k).sin().sum(), k, **options)


def test_parameters_inside_a_vectorized_forward_mode():
    q, k = normal(1, 1, 3, 4), normal(1, 1, 3, 4, seed=1).requires_grad_()
    jacobian = lambda **options: torch.autograd.functional.jacobian(lambda q: sdpa(q, k, k), q, **options)
    torch.testing.assert_close(jacobian(strategy="forward-mode", vectorize=True), jacobian())


def test_symbolic_shapes_outside_dynamo():
    trace = make_fx(lambda *x: sdpa(*x), tracing_mode="symbolic")
    q = normal(2, 2, 3, 4)
    torch.testing.assert_close(trace(q, q, q)(q, q, q), sdpa(q, q, q))


@pytest.mark.parametrize("mask", [normal(5, 5) > 0, normal(5, 5)], ids=["boolean", "bias"])
def test_a_mask_that_is_changed_before_the_backward(mask):
    q = normal(1, 2, 5, 4).requires_grad_()
    o = sdpa(q, q, q, mask)
    mask[0, 0] = 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(o.sum(), q)


def test_changes_in_place():
    """Of a result; autograd objects where it needs what was there, and only then."""
    q = normal(2, 3, 5, 4)
    x = q.clone().requires_grad_()
    o = sdpa(x, x, x)
    o += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()

    def changed(q):
        o = sdpa(q, q, q)
        o.mul_(2)[0] = 0
        return o

    (o, t_o), (p, t_p) = jvp(changed, (q,), (q,)), jvp(lambda q: sdpa(q, q, q), (q,), (q,))
    for a, b in ((o, p), (t_o, t_p)):
        assert not a[0].any()
        torch.testing.assert_close(a[1], 2 * b[1])
    launch = pytest.importorskip("torch_bridge.launch")
    for bias in (None, dense(1, 2, 1, 17, seed=9)):
        make = lambda seed: (*(dense(1, 2, 17, 16, seed=seed + i) for i in range(3)), bias)
        x, tx, case = make(0), make(3), reference.Case(Problem(0.25))
        o, lse, t_o, mu = launch.run(NumpyLauncher(), "forward_dual", case, x, tx)
        want = [True] * 3 + [bias is not None]
        gradients = launch.run(NumpyLauncher(), "backward", case, x, y=(o, lse), cy=(t_o, None), want=want)
        assert not any(a._is_view() for a in (o, lse, t_o, mu, *gradients[: sum(want)]))


@pytest.mark.parametrize("sink", [20.0, 0.0, -8.0, -16.0, -60.0])
def test_sinks_far_from_the_scores(sink):
    """As in JAX: derivatives keep their digits."""
    *x, g = (normal(1, 2, 32, 8, seed=i) for i in range(4))

    def derivatives(attend, dtype):
        *arrays, cotangent = (a.to(dtype) for a in (*x, g))
        at = torch.full((2,), sink, dtype=dtype)
        loss = lambda s: (attend(*arrays, sinks=s) * cotangent).sum()
        along = jvp(lambda s: attend(*arrays, sinks=s), (at,), (torch.ones_like(at),))[1]
        return (
            along,
            grad(loss)(at),
            jvp(grad(loss), (at,), (torch.ones_like(at),))[1],
            grad(lambda s: grad(loss)(s).sum())(at),
        )

    def with_sinks(q, k, v, sinks):
        scores = torch.cat([q @ k.mT * q.shape[-1] ** -0.5, sinks[:, None, None].expand(1, 2, 32, 1)], -1)
        return scores.softmax(-1)[..., :-1] @ v

    for a, b in zip(derivatives(sdpa, torch.float32), derivatives(with_sinks, torch.float64), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=1e-5 * b.abs().max().item())


@pytest.mark.parametrize("sink", [torch.inf, -torch.inf])
def test_sinks_that_are_infinite(sink):
    q, at = torch.randn(1, 2, 5, 4), torch.full((2,), sink)
    torch.testing.assert_close(sdpa(q, q, q, sinks=at), sdpa(q, q, q) if sink < 0 else 0 * q)
    loss = lambda q, s: sdpa(q, q, q, sinks=s).square().sum()
    assert all(a.isfinite().all() for t in jvp(grad(loss, (0, 1)), (q, at), (q, torch.ones(2))) for a in t)


def test_sinks_do_not_hide_nan():
    sinks = torch.zeros(1, requires_grad=True)
    sdpa(torch.full((1, 1, 2, 4), torch.nan), *(torch.ones(1, 1, 3, 4),) * 2, sinks=sinks).sum().backward()
    assert sinks.grad.isnan().all()


def test_patches_that_overlap():
    real = torch.nn.functional.scaled_dot_product_attention
    first, second = torch_bridge.patch(), torch_bridge.patch()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.nn.functional.scaled_dot_product_attention is sdpa
    second.__exit__(None, None, None)
    assert torch.nn.functional.scaled_dot_product_attention is real


def test_patch_leaves_what_somebody_else_put_there():
    real, other = torch.nn.functional.scaled_dot_product_attention, lambda *_: None
    try:
        with torch_bridge.patch():
            torch.nn.functional.scaled_dot_product_attention = other
        assert torch.nn.functional.scaled_dot_product_attention is other
    finally:
        torch.nn.functional.scaled_dot_product_attention = real


def test_patch_among_unusual_modules(monkeypatch):
    """Some put a class into sys.modules, or a module that loads what is looked at."""

    class Lazy(types.ModuleType):
        attention = real = torch.nn.functional.scaled_dot_product_attention

        def __getattribute__(self, name):
            raise RuntimeError(f"{name} was loaded")

    monkeypatch.setitem(sys.modules, "a_class", Lazy)
    monkeypatch.setitem(sys.modules, "lazy", Lazy("lazy"))
    with torch_bridge.patch():
        assert torch.nn.functional.scaled_dot_product_attention is sdpa
    assert torch.nn.functional.scaled_dot_product_attention is Lazy.real


def test_what_holds_pytorchs_function_is_pickled_while_patched():
    held = torch.nn.functional.scaled_dot_product_attention
    with torch_bridge.patch():
        assert pickle.loads(pickle.dumps(held)) is held
        assert torch.nn.functional.scaled_dot_product_attention is not held


def test_patch_closes_the_fast_path_of_pytorchs_layers():
    """It has no derivatives."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64).eval()
    x, t_x = normal(2, 5, 8), normal(2, 5, 8, seed=1)
    attend = lambda x: layer(x, x, x, need_weights=False)[0]
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        expected = jvp(attend, (x,), (t_x,))
    assert torch.backends.mha.get_fastpath_enabled()

    def patched():
        with torch_bridge.patch(), torch.no_grad():
            return jvp(attend, (x,), (t_x,))

    check(patched, lambda: expected, "D")
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_mask_of_a_class_that_overrides_functions():
    class Mask(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            return "its own" if function in ours else super().__torch_function__(function, types, args, kwargs or {})

    ours = sdpa, torch_bridge.flash_attn_func, flash_attn_qkvpacked_func, flash_attn_kvpacked_func
    q, mask = normal(1, 3, 2, 4), normal(3, 3).as_subclass(Mask)
    packed = torch.stack([q, q, q], 2)
    calls = zip(ours, ((q, q, q), (q, q, q), (packed,), (q, packed[:, :, 1:])), strict=True)
    assert [function(*arrays, mask) for function, arrays in calls] == ["its own"] * 4


def test_a_mask_that_was_made_in_inference_mode():
    with torch.inference_mode():
        mask = torch.ones(5, 5, dtype=torch.bool).tril()
    q = normal(1, 2, 5, 4).requires_grad_()
    gradients = [torch.autograd.grad(sdpa(q, q, q, mask).sin().sum(), q)[0] for mask in (mask, mask.clone())]
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_causal_bias_of_packed_functions():
    q = normal(1, 5, 2, 4)
    for bias in (causal_upper_left(5, 5), causal_lower_right(5, 5)):
        torch.testing.assert_close(
            torch_bridge.flash_attn_func(q, q, q, bias=bias), torch_bridge.flash_attn_func(q, q, q, causal=True)
        )


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64])
def test_autocast_converts_floating_point_alone(dtype):
    x = torch.ones(1, 1, 3, 4, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="`query` must be one of"):
        sdpa(x, x, x)


def test_a_rate_that_rounds_to_one():
    assert sdpa(X, X, X, dropout_p=1 - 1e-9).isfinite().all()


# ------------------------------------------------------------------------------------------------ __torch_function__


@pytest.mark.parametrize("name", ["sdpa", "packed-not", "packed", "packed-keys"])
def test_functions_are_overridden_as_those_of_torch(name):
    class Named(torch.Tensor):
        pass

    seen = []

    class Seeing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    q, k, v, qkv = *(torch.randn(1, 2, 5, 4) for _ in range(3)), torch.randn(1, 5, 3, 5, 4)
    function, attend, q = {
        "sdpa": (sdpa, lambda q: sdpa(q, k, v, is_causal=True, local_window_size=2), q),
        "packed-not": (flash_attn_func, lambda q: flash_attn_func(q, k, v, causal=True), q),
        "packed": (flash_attn_qkvpacked_func, lambda qkv: flash_attn_qkvpacked_func(qkv, None, True, 0.3), qkv),
        "packed-keys": (flash_attn_kvpacked_func, lambda kv: flash_attn_kvpacked_func(k, kv), qkv[:, :, :2]),
    }[name]
    named = attend(q.as_subclass(Named))
    assert type(named) is Named
    with Seeing():
        got = attend(q)
    assert seen == [function]
    for result in (named.as_subclass(torch.Tensor), got, torch.fx.symbolic_trace(attend)(q)):
        torch.testing.assert_close(result, attend(q))


def test_the_log_says_that_there_is_no_gpu(caplog):
    with caplog.at_level("DEBUG", "torch_bridge"):
        sdpa(A, A, A)
        sdpa(A, A, A, logits_soft_cap=2)
    assert "attention forward: PyTorch's flash attention for CPUs computes it" in caplog.text
    assert "attention forward: this is not computed on an NVIDIA GPU; the reference computes it" in caplog.text


def test_without_triton(monkeypatch, caplog):
    """As in PyTorch for Windows."""

    class OnGpu(torch.Tensor):
        device, is_cuda = types.SimpleNamespace(type="cuda"), True
        __torch_function__ = torch._C._disabled_torch_function_impl

    monkeypatch.setattr(compute, "TRITON", False)
    with caplog.at_level("DEBUG", "torch_bridge"):
        o, _ = compute.compute("forward", A.as_subclass(OnGpu), A, A, None, None, False, 0.5, "", False)
    torch.testing.assert_close(o, naive(A, A, A, scale=0.5))
    assert "Triton is not installed; the reference computes it" in caplog.text


def test_deterministic_or_as_the_framework_is(monkeypatch):
    told, forward = [], attention.rules.forward

    def listening(args, *rest):
        *_, options = args
        told.append(case_of(args[0], args[1], None, False, 1.0, options).problem.deterministic)
        return forward(args, *rest)

    monkeypatch.setattr(attention.rules, "forward", listening)
    q = torch.randn(1, 2, 5, 4)
    for flag in (None, True, False):
        sdpa(q, q, q, deterministic=flag)
    torch.use_deterministic_algorithms(True)
    try:
        for flag in (None, False):
            sdpa(q, q, q, deterministic=flag)
    finally:
        torch.use_deterministic_algorithms(False)
    flash_attn_func(*[q.transpose(1, 2)] * 3, deterministic=True)
    edges = torch.tensor([0, 5])
    flash_attn_varlen_func(*[q[0].transpose(0, 1)] * 3, edges, edges, 5, 5, deterministic=True)
    assert told == [False, True, False, True, False, True, True]
    with pytest.raises(TypeError, match="`deterministic` must be True or False"):
        sdpa(q, q, q, deterministic=1)


def test_plans_of_arrays_that_are_changed_in_place():
    """An output of a launch that a later one adds to, by a descriptor: one place for both."""
    plans = pytest.importorskip("torch_bridge.plans")
    told, sums, result = [], torch.zeros(64), torch.zeros(3)
    launched = [
        plans.Launched(told.append, [torch.ones(2), sums], [sums]),
        plans.Launched(told.append, [plans.Mapped(sums, lambda address: ("descriptor", address)), result], [result]),
    ]
    q = launched[0].arguments[0]
    plan = plans.made([q], launched, [result])
    other = torch.ones(2)
    (got,) = plans.follow(plan, [other], [other.data_ptr()])
    (first, zeros), ((kind, place), written) = told
    assert (first, kind, written) == (other.data_ptr(), "descriptor", got.data_ptr())
    assert zeros == place not in (first, written, sums.data_ptr())
