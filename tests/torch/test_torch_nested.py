"""Nested tensors of the jagged layout."""

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch._dynamo import reset  # noqa: E402
from torch.nested import nested_tensor_from_jagged  # noqa: E402

from torch_bridge import attention, flash_attn_func, patch  # noqa: E402
from torch_bridge import scaled_dot_product_attention as sdpa  # noqa: E402
from torch_oracle import check, naive, normal, with_lse  # noqa: E402

E = 4
FOUR = ([0, 2, 2, 7, 9], [0, 3, 4, 4, 11])


def nested(a, edges, lengths=None):
    """[B, H, j, E], of a [tokens, H, E]."""
    lengths = None if lengths is None else torch.tensor(lengths)
    return nested_tensor_from_jagged(a, torch.tensor(edges), lengths).transpose(1, 2)


def ours(edges, lengths=(None, None), attention=sdpa, **arguments):
    """Of tensors [tokens, H, E]."""

    def attend(q, k, v):
        of_keys = edges[1], lengths[1]
        o = attention(nested(q, edges[0], lengths[0]), nested(k, *of_keys), nested(v, *of_keys), **arguments)
        return o.transpose(1, 2).values()

    return attend


def apart(edges, lengths=(None, None), attention=naive, **arguments):
    """Sequence by sequence."""

    def attend(q, k, v):
        rows = torch.zeros(*q.shape[:2], v.shape[-1], dtype=q.dtype)
        for i, firsts in enumerate(zip(*(e[:-1] for e in edges), strict=True)):
            ends = [e[i + 1] if n is None else e[i] + n[i] for e, n in zip(edges, lengths, strict=True)]
            q_at, k_at = (slice(first, end) for first, end in zip(firsts, ends, strict=True))
            if firsts[1] < ends[1]:
                o = attention(
                    *(a[at].transpose(0, 1)[None] for a, at in ((q, q_at), (k, k_at), (v, k_at))), **arguments
                )
                rows = torch.cat([rows[: firsts[0]], o[0].transpose(0, 1), rows[ends[0] :]])
        return rows

    return attend


def flat(edges, heads=(2, 2, 2), channels=(E, E, E)):
    q_edges, k_edges = edges
    tokens = q_edges[-1], k_edges[-1], k_edges[-1]
    each = enumerate(zip(tokens, heads, channels, strict=True))
    return [normal(*shape, seed=i).requires_grad_() for i, shape in each]


def reversed_twice(f, x):
    """Value, gradients, their gradients, and a tangent, which PyTorch finds by differentiating twice."""
    o = f(*x)
    first = torch.autograd.grad(o.sin().sum(), x, create_graph=True)
    second = torch.autograd.grad(sum(g.sin().sum() for g in first), x)
    tangents = tuple(normal(*a.shape, seed=9) for a in x)
    return o, first, second, torch.autograd.functional.jvp(f, tuple(x), tangents)[1]


CASES = {
    "": (FOUR, {}, {}),
    "causal": (FOUR, {}, dict(is_causal=True)),
    "lower-right": (FOUR, {}, dict(is_causal=True, causal_alignment="lower_right", scale=0.3)),
    "window": (FOUR, {}, dict(local_window_size=(1, 2), logits_soft_cap=1.5)),
    "groups": (FOUR, dict(heads=(4, 2, 2)), dict(enable_gqa=True)),
    "channels": (FOUR, dict(channels=(E, E, 6)), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_as_sequence_by_sequence(case):
    edges, sizes, arguments = CASES[case]
    x = flat(edges, **sizes)
    check(lambda: reversed_twice(ours(edges, **arguments), x), lambda: reversed_twice(apart(edges, **arguments), x))


def test_the_log_sum_exp():
    def attend(q, k, v):
        q, k, v = (nested(a, e) for a, e in zip((q, k, v), (FOUR[0], FOUR[1], FOUR[1]), strict=True))
        o, log_sum_exp = sdpa(q, k, v, local_window_size=(0, 5), return_lse=True)
        assert log_sum_exp.shape == o.shape[:-1]
        log_sum_exp = log_sum_exp.transpose(1, 2).values()
        return o.transpose(1, 2).values() + torch.where(log_sum_exp == -torch.inf, 0, log_sum_exp).sin()[..., None]

    expected = apart(FOUR, attention=with_lse(naive), local_window_size=(0, 5))
    check(lambda: reversed_twice(attend, flat(FOUR)), lambda: reversed_twice(expected, flat(FOUR)))


def test_pytorchs_own_agrees():
    """On first derivatives, which are all that it has of tensors that become nested."""
    x = flat(FOUR)
    own, mine = (ours(FOUR, attention=one)(*x) for one in (F.scaled_dot_product_attention, sdpa))
    torch.testing.assert_close(mine, own)
    for a, b in zip(*(torch.autograd.grad(o.sin().sum(), x) for o in (mine, own)), strict=True):
        torch.testing.assert_close(a, b)


def test_holes():
    """Tokens that no sequence has may be anything, as may their cotangents."""
    edges, lengths = ([0, 3, 7, 9], [0, 4, 5, 11]), ([2, 4, 0], [1, 1, 4])
    x = flat(edges)
    attend, expected = ours(edges, lengths, is_causal=True), apart(edges, lengths, is_causal=True)
    want = reversed_twice(expected, x)
    in_holes = torch.ones(9, dtype=torch.bool), torch.ones(11, dtype=torch.bool)
    for hole, firsts, used in zip(in_holes, edges, lengths, strict=True):
        for first, n in zip(firsts, used, strict=False):
            hole[first : first + n] = False
    poisoned = [
        a.detach().masked_fill(hole[:, None, None], torch.nan).requires_grad_()
        for a, hole in zip(x, (*in_holes[:1], *in_holes[1:] * 2), strict=True)
    ]
    o = attend(*poisoned)
    torch.testing.assert_close(o, want[0])
    cotangent = o.detach().cos().masked_fill(in_holes[0][:, None, None], torch.nan)
    for a, b in zip(torch.autograd.grad(o, poisoned, cotangent), want[1], strict=True):
        torch.testing.assert_close(a, b)
    check(lambda: reversed_twice(attend, x), lambda: want)
    q = nested(x[0], edges[0], lengths[0])
    assert sdpa(q, q, q).lengths() is q.lengths()


def test_behind_the_last_sequence():
    edges = [0, 2, 7], [0, 3, 4]
    x = flat(edges)
    longer = [torch.cat([a.detach(), torch.full_like(a[:3], torch.nan)]).requires_grad_() for a in x]
    got, want = ours(edges)(*longer), apart(edges)(*x)
    torch.testing.assert_close(got, F.pad(want, (0, 0, 0, 0, 0, 3)))
    for a, b in zip(*(torch.autograd.grad(o.sin().sum(), y) for o, y in ((got, longer), (want, x))), strict=True):
        torch.testing.assert_close(a, F.pad(b, (0, 0, 0, 0, 0, 3)))


def test_gradients_of_nested_tensors():
    """Of leaves, and of what is computed from them."""
    edges = [0, 2, 7], [0, 3, 4]
    x = [normal(e[-1], 2, E, seed=i) for i, e in enumerate((edges[0], edges[1], edges[1]))]
    leaves = [nested(a, e).detach().requires_grad_() for a, e in zip(x, (edges[0], edges[1], edges[1]), strict=True)]
    waves = [a * 2 for a in leaves]
    of_waves = torch.autograd.grad(sdpa(*waves).values().sin().sum(), waves)
    of_leaves = torch.autograd.grad(sdpa(*(a * 2 for a in leaves)).values().sin().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(g.values().sin().sum() for g in of_leaves), leaves)
    x = [a.requires_grad_() for a in x]
    _, want, want_second, _ = reversed_twice(lambda *x: apart(edges)(*(a * 2 for a in x)), x)
    for got, expected in ((of_leaves, want), (second, want_second), ([g * 2 for g in of_waves], want)):
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a.transpose(1, 2).values(), b)


def test_views_of_dense_tensors_have_gradients_too():
    x = flat(FOUR)
    q, k, v = (nested(a, e) for a, e in zip(x, (FOUR[0], FOUR[1], FOUR[1]), strict=True))
    got = torch.autograd.grad(sdpa(q, k, v).values().sin().sum(), (q, k, v))
    want = torch.autograd.grad(apart(FOUR)(*x).sin().sum(), x)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.transpose(1, 2).values(), b)
    assert not sdpa(*[q.detach()] * 3).requires_grad


def test_batches_of_dense_sequences():
    """[B, j, H, L, E]: how many there are of them is ragged."""
    x = [normal(5, 2, 3, E, seed=i).requires_grad_() for i in range(3)]
    edges = torch.tensor([0, 2, 5])
    attend = lambda *x: sdpa(*(nested_tensor_from_jagged(a, edges) for a in x), is_causal=True).values()
    check(lambda: reversed_twice(attend, x), lambda: reversed_twice(lambda *x: naive(*x, is_causal=True), x))


def test_a_patched_model():
    """Whose queries, keys and values are views of one nested tensor, which PyTorch refuses on a CPU."""
    weights = [normal(*shape, seed=7).requires_grad_() for shape in ((24, 8), (8, 8))]

    def model(x):
        q, k, v = (a.unflatten(-1, [2, E]).transpose(1, 2) for a in F.linear(x, weights[0]).chunk(3, -1))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.linear(o.transpose(1, 2).flatten(-2), weights[1])

    x = [normal(n, 8, seed=n) for n in (3, 4)]
    with patch():
        o = model(torch.nested.nested_tensor(x, layout=torch.jagged)).values()
    want = torch.cat([model(a[None])[0] for a in x])
    torch.testing.assert_close(o, want)
    for a, b in zip(*(torch.autograd.grad(o.sin().sum(), weights) for o in (o, want)), strict=True):
        torch.testing.assert_close(a, b)


def test_compiled_with_holes():
    reset()
    edges, lengths = ([0, 3, 7, 9], [0, 4, 5, 11]), ([2, 4, 0], [1, 1, 4])
    x, attend = flat(edges), ours(edges, lengths)
    torch.testing.assert_close(torch.compile(attend, fullgraph=True, backend="aot_eager")(*x), attend(*x))


def test_dropout():
    x = flat(FOUR)
    assert not ours(FOUR, dropout_p=1.0)(*x).any()
    assert not torch.equal(ours(FOUR, dropout_p=0.5)(*x), ours(FOUR)(*x))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend):
    """Nested outside and inside of what is compiled."""
    reset()
    x = flat(FOUR)
    inside = torch.compile(ours(FOUR, is_causal=True), fullgraph=True, backend=backend)
    loss = lambda *x: sdpa(*x, is_causal=True).transpose(1, 2).values()
    outside = torch.compile(loss, fullgraph=True, backend=backend)
    of_nested = lambda *x: outside(*(nested(a, e) for a, e in zip(x, (FOUR[0], FOUR[1], FOUR[1]), strict=True)))
    want = apart(FOUR, is_causal=True)(*x)
    gradients = torch.autograd.grad(want.sin().sum(), x)
    for attend in (inside, of_nested):
        got = attend(*x)
        torch.testing.assert_close(got, want)
        for a, b in zip(torch.autograd.grad(got.sin().sum(), x), gradients, strict=True):
            torch.testing.assert_close(a, b)


Q, K = (nested(normal(e[-1], 2, E), e) for e in FOUR)
DENSE, STRIDED = normal(4, 2, 3, E), torch.nested.nested_tensor([*normal(4, 2, 3, E)])
LENGTHS = torch.tensor([3, 3, 3, 3])


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: sdpa(STRIDED, STRIDED, STRIDED), "`query` must be a nested tensor of the jagged layout.*strided layout"),
        (lambda: sdpa(Q, K, STRIDED), "`value` must be a nested tensor of the jagged layout"),
        (lambda: sdpa(Q, DENSE, DENSE), "`key` must be a nested tensor of the jagged layout.*got a dense tensor"),
        (lambda: sdpa(DENSE, K, K), "`key` must not be a nested tensor where `query` is not one"),
        (lambda: sdpa(DENSE, DENSE, DENSE, attn_mask=Q), "`attn_mask` must not be a nested tensor"),
        (lambda: flash_attn_func(Q, Q, Q), "`query` must not be a nested tensor: call scaled_dot_product_attention"),
        (lambda: sdpa(Q, K, K, attn_mask=torch.ones(3, 3)), "`attn_mask` does not go with nested tensors"),
        (lambda: sdpa(Q, K, K, query_seq_lengths=LENGTHS), "`query_seq_lengths` does not go with nested tensors"),
        (lambda: sdpa(Q.transpose(1, 2), K, K), "must be ragged along the same axis"),
        (lambda: sdpa(*[nested_tensor_from_jagged(normal(9, E), torch.tensor(FOUR[0]))] * 3), "`query` must have shape"),
        (lambda: sdpa(*[Q.unsqueeze(-1)] * 3), "`query` must have shape"),
        (lambda: sdpa(Q, *[nested(normal(9, 2, E), [0, 4, 9])] * 2), "`key` must have as many sequences as `query`, 4: got 2"),
        (lambda: sdpa(Q, K, nested(normal(11, 2, E), [0, 2, 4, 4, 11])), "must have sequences of the same lengths"),
        (lambda: sdpa(Q, K, K, causal_alignment="left"), "`causal_alignment` must be"),
        (lambda: sdpa(Q, *[nested(normal(11, 3, E), FOUR[1])] * 2), "must broadcast"),
    ],
)  # fmt: skip
def test_bad_arguments(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def test_nobody_shares_them(monkeypatch):
    monkeypatch.setattr(attention, "context_of_call", lambda *_: object())
    with pytest.raises(ValueError, match="`context_group` does not go with nested"):
        sdpa(Q, K, K)
