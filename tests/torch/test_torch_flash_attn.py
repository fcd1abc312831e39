"""flash-attn's names for packed tensors of packed sequences, used tokens, and a cache of keys and values."""

import pytest

torch = pytest.importorskip("torch")

from torch._dynamo import reset  # noqa: E402
from torch.func import grad, jvp  # noqa: E402

import torch_bridge  # noqa: E402
from torch_bridge import (  # noqa: E402
    attention,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from torch_oracle import check, everything, naive, normal  # noqa: E402

E = 4
Q_EDGES, K_EDGES = [0, 3, 3, 9, 12], [0, 5, 6, 6, 15]
USED_Q, USED_K = [2, 0, 6, 1], [3, 1, 0, 9]


def apart(q, k, v, q_edges, k_edges, used_q=None, used_k=None, **arguments):
    """Sequence by sequence, of the tokens that are used."""
    o = q.new_zeros(*q.shape[:2], v.shape[-1]) * q.sum()
    for i, (first, k_first) in enumerate(zip(q_edges[:-1], k_edges[:-1], strict=True)):
        end = q_edges[i + 1] if used_q is None else first + used_q[i]
        k_end = k_edges[i + 1] if used_k is None else k_first + used_k[i]
        one = [a.transpose(0, 1)[None] for a in (q[first:end], k[k_first:k_end], v[k_first:k_end])]
        if k_first < k_end:
            part = naive(*one, causal_alignment="lower_right", enable_gqa=True, **arguments)[0].transpose(0, 1)
            o = torch.cat([o[:first], part, o[end:]])
    return o


def tokens(total, *shape, seed=0):
    return normal(total, *shape, E, seed=seed)


def test_packed_in_one_tensor():
    qkv, edges = tokens(12, 3, 2), torch.tensor(Q_EDGES)
    attend = lambda qkv: flash_attn_varlen_qkvpacked_func(qkv, edges, 6, 0.0, 0.3, True, (2, -1), 1.5)
    arguments = dict(scale=0.3, is_causal=True, local_window_size=(2, None), logits_soft_cap=1.5)
    expected = lambda qkv: apart(*qkv.unbind(1), Q_EDGES, Q_EDGES, **arguments)
    check(lambda: everything(attend, qkv), lambda: everything(expected, qkv))
    o, log_sum_exp, none = flash_attn_varlen_qkvpacked_func(qkv, edges, 6, return_attn_probs=True)
    want = flash_attn_varlen_func(*qkv.unbind(1), edges, edges, 6, 6, return_attn_probs=True)
    assert none is None
    torch.testing.assert_close((o, log_sum_exp), want[:2])


def test_keys_and_values_in_one_tensor():
    q, kv, edges = tokens(12, 4), tokens(15, 2, 2), (torch.tensor(Q_EDGES), torch.tensor(K_EDGES))
    attend = lambda q, kv: flash_attn_varlen_kvpacked_func(q, kv, *edges, 6, 9, 0.0, None, True)
    expected = lambda q, kv: apart(q, *kv.unbind(1), Q_EDGES, K_EDGES, is_causal=True)
    check(lambda: everything(attend, q, kv), lambda: everything(expected, q, kv))
    o, log_sum_exp, _ = flash_attn_varlen_kvpacked_func(q, kv, *edges, 6, 9, return_attn_probs=True)
    assert (o.shape, log_sum_exp.shape) == (q.shape, (4, 12))


USED = {
    "both": (USED_Q, USED_K, {}, {}),
    "queries": (USED_Q, None, dict(causal=True), dict(is_causal=True)),
    "keys": (None, USED_K, dict(causal=True, window_size=(2, 0)), dict(is_causal=True, local_window_size=(2, 0))),
}


def unused(edges, used):
    outside = torch.zeros(edges[-1], dtype=torch.bool)
    for i, n in enumerate(used or ()):
        outside[edges[i] + n : edges[i + 1]] = True
    return outside[:, None, None]


@pytest.mark.parametrize("case", USED)
def test_used_tokens(case):
    """Whatever the others, and their tangents and cotangents, hold."""
    used_q, used_k, ours, theirs = USED[case]
    x = tokens(12, 4), tokens(15, 2, seed=1), tokens(15, 2, seed=2)
    used = dict(zip(("seqused_q", "seqused_k"), (n and torch.tensor(n) for n in (used_q, used_k)), strict=True))
    edges = torch.tensor(Q_EDGES), torch.tensor(K_EDGES)
    attend = lambda *x: flash_attn_varlen_func(*x, *edges, **used, **ours)
    expected = lambda *x: apart(*x, Q_EDGES, K_EDGES, used_q, used_k, **theirs)
    check(lambda: everything(attend, *x), lambda: everything(expected, *x))
    outside = unused(Q_EDGES, used_q), *[unused(K_EDGES, used_k)] * 2
    poisoned = tuple(a.masked_fill(out, torch.nan) for a, out in zip(x, outside, strict=True))
    still = tuple(a.masked_fill(out, 0) for a, out in zip(x, outside, strict=True))
    both = lambda *x: (*jvp(attend, x, x), *torch.func.vjp(attend, *x)[1](poisoned[0]))
    want = lambda *x: (*jvp(expected, x, x), *torch.func.vjp(expected, *x)[1](still[0]))
    check(lambda: both(*poisoned), lambda: want(*still))
    _, log_sum_exp, _ = flash_attn_varlen_func(*poisoned, *edges, **used, **ours, return_attn_probs=True)
    assert not log_sum_exp.isnan().any()


CACHE = {
    "all": (None, {}, {}),
    "number": (5, dict(causal=True), dict(is_causal=True)),
    "numbers": (torch.tensor([0, 6]), dict(causal=True, softcap=2.0), dict(is_causal=True, logits_soft_cap=2.0)),
    "window": (
        torch.tensor([4, 2]), dict(window_size=(2, 1), softmax_scale=0.3), dict(local_window_size=(2, 1), scale=0.3)
    ),
}  # fmt: skip


def cached(q, k_cache, v_cache, lengths, **arguments):
    rows = []
    for i, n in enumerate(lengths):
        one = [a[i : i + 1].transpose(1, 2) for a in (q, k_cache[:, :n], v_cache[:, :n])]
        rows.append(naive(*one, causal_alignment="lower_right", enable_gqa=True, **arguments).transpose(1, 2))
    return torch.cat(rows)


@pytest.mark.parametrize("case", CACHE)
def test_a_cache(case):
    """Behind the keys that are there may stand anything."""
    lengths, ours, theirs = CACHE[case]
    numbers = [9, 9] if lengths is None else torch.as_tensor(lengths).expand(2).tolist()
    x = normal(2, 3, 4, E), normal(2, 9, 2, E, seed=1), normal(2, 9, 2, 6, seed=2)
    attend = lambda *x: flash_attn_with_kvcache(*x, cache_seqlens=lengths, **ours)
    expected = lambda *x: cached(*x, numbers, **theirs)
    check(lambda: everything(attend, *x), lambda: everything(expected, *x))
    outside = (torch.arange(9) >= torch.tensor(numbers)[:, None])[..., None, None]
    poisoned = x[0], *(a.masked_fill(outside, torch.nan) for a in x[1:])
    torch.testing.assert_close(attend(*poisoned), expected(*x))
    o, log_sum_exp = flash_attn_with_kvcache(*x, cache_seqlens=lengths, return_softmax_lse=True, **ours)
    assert log_sum_exp.shape == (2, 4, 3)
    torch.testing.assert_close(o, expected(*x))


@pytest.mark.parametrize("lengths", [3, torch.tensor([0, 5])], ids=["number", "numbers"])
@pytest.mark.parametrize("entries", [None, [2, 0]], ids=["", "entries"])
def test_appended(lengths, entries):
    q, k, v = normal(2, 2, 4, E), normal(2, 2, 2, E, seed=1), normal(2, 2, 2, E, seed=2)
    caches = [normal(3 if entries else 2, 7, 2, E, seed=i) for i in (3, 4)]
    at = torch.as_tensor(lengths).expand(2).tolist()

    def written(cache, new):
        rows = []
        for i, n in enumerate(at):
            old = cache[entries[i] if entries else i]
            rows.append(torch.cat([old[:n], new[i], old[n + 2 :]]))
        return torch.stack(rows)

    def attend(q, k, v, *caches):
        caches = [a.clone() for a in caches]
        given = dict(cache_seqlens=lengths, cache_batch_idx=entries and torch.tensor(entries), causal=True)
        o = flash_attn_with_kvcache(q, *caches, k, v, **given)
        for cache, old, new in zip(caches, arrays[3:], (k, v), strict=True):  # in place
            torch.testing.assert_close(cache[entries] if entries else cache, written(old, new))
        return o

    arrays = (q, k, v, *caches)
    n = [m + 2 for m in at]
    expected = lambda q, k, v, *c: cached(q, written(c[0], k), written(c[1], v), n, is_causal=True)
    torch.testing.assert_close(attend(*arrays), expected(*arrays))
    unchecked = lambda *x: flash_attn_with_kvcache(
        x[0], *(a.clone() for a in x[3:]), *x[1:3], cache_seqlens=lengths, causal=True,
        cache_batch_idx=entries and torch.tensor(entries),
    )  # fmt: skip
    check(lambda: everything(unchecked, *arrays), lambda: everything(expected, *arrays))


def test_generation_is_a_causal_call():
    q, k, v = (normal(1, 6, 2, E, seed=i) for i in range(3))
    caches = [torch.full((1, 8, 2, E), torch.nan, dtype=q.dtype) for _ in range(2)]
    step = lambda i, n: flash_attn_with_kvcache(
        q[:, i : i + n], *caches, k[:, i : i + n], v[:, i : i + n], cache_seqlens=i, causal=True
    )
    o = torch.cat([step(0, 3), *(step(i, 1) for i in range(3, 6))], 1)
    torch.testing.assert_close(o, torch_bridge.flash_attn_func(q, k, v, causal=True))


def test_what_autograd_says_of_a_cache():
    q, k, v = (normal(1, 1, 2, E, seed=i).requires_grad_() for i in range(3))
    caches = [torch.zeros(1, 4, 2, E, dtype=q.dtype) for _ in range(2)]
    first = flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=0)
    last = flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(first.sum(), q)
    twice = lambda a: torch.cat([a, a], 1)
    want = torch_bridge.flash_attn_func(q, twice(k), twice(v))
    for a, b in zip(*(torch.autograd.grad(o.sin().sum(), (q, k, v)) for o in (last, want)), strict=True):
        torch.testing.assert_close(a, b)
    leaf = torch.zeros(1, 4, 2, E, dtype=q.dtype, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf"):
        flash_attn_with_kvcache(q, leaf, caches[1], k, v, cache_seqlens=0)
    for of in (lambda k: jvp(lambda k: captured(k), (k,), (k,)), lambda k: grad(lambda k: captured(k).sum())(k)):
        captured = lambda k: flash_attn_with_kvcache(q, *(a.detach() for a in caches), k, k, cache_seqlens=0)
        with pytest.raises(RuntimeError, match="mutate a captured Tensor"):
            of(k.detach())


def test_compiled():
    reset()
    q, kv = tokens(12, 4), tokens(15, 2, 2)
    edges, used = (torch.tensor(Q_EDGES), torch.tensor(K_EDGES)), torch.tensor(USED_K)

    def both(q, kv, cache, n):
        k, v = kv.unbind(1)
        o = flash_attn_varlen_func(q, k, v, *edges, seqused_k=used, causal=True)
        caches = cache.clone(), cache.clone()
        new = kv[None, :2, 0]
        return o, flash_attn_with_kvcache(q[None], *caches, new, new, cache_seqlens=n, causal=True), caches[0]

    cache = normal(1, 8, 2, E)
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    for n in (torch.tensor([2]), torch.tensor([4])):
        torch.testing.assert_close(compiled(q, kv, cache, n), both(q, kv, cache, n))


def test_a_subclass_sees_the_names():
    class Seen(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            return function

    a, edges = torch.zeros(1).as_subclass(Seen), torch.tensor([0, 1])
    assert flash_attn_varlen_qkvpacked_func(a, edges) is flash_attn_varlen_qkvpacked_func
    assert flash_attn_varlen_kvpacked_func(a, a, edges, edges) is flash_attn_varlen_kvpacked_func
    assert flash_attn_with_kvcache(a, a, a) is flash_attn_with_kvcache


X, EDGES = tokens(6, 2), torch.tensor([0, 2, 6])
of_tokens = lambda **named: flash_attn_varlen_func(X, X, X, EDGES, EDGES, **named)
CACHED, NEW = normal(2, 5, 2, E), normal(2, 3, 2, E)
in_cache = lambda *new, **named: flash_attn_with_kvcache(NEW, CACHED.clone(), CACHED.clone(), *new, **named)
THREE = torch.tensor([2, 3])


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: of_tokens(seqused_q=EDGES), ValueError, r"`seqused_q` must have shape \(2,\)"),
        (lambda: of_tokens(seqused_k=THREE.float()), TypeError, "`seqused_k` must be of integers"),
        (lambda: of_tokens(seqused_k=[2, 3]), TypeError, "`seqused_k` must be a tensor"),
        (lambda: flash_attn_varlen_qkvpacked_func(X, EDGES), ValueError, r"`qkv` must have shape \[tokens, 3, heads, head"),
        (lambda: flash_attn_varlen_kvpacked_func(X, X, EDGES, EDGES), ValueError, r"`kv` must have shape \[tokens, 2"),
        (lambda: in_cache(block_table=THREE), ValueError, "`block_table` is not served: gather"),
        (lambda: in_cache(rotary_cos=X), ValueError, "`rotary_cos` is not served: rotate"),
        (lambda: in_cache(cache_leftpad=THREE), ValueError, "`cache_leftpad` is not served"),
        (lambda: in_cache(alibi_slopes=X), ValueError, "`alibi_slopes` is not served"),
        (lambda: in_cache(NEW), ValueError, "`k` and `v` must be given together"),
        (lambda: in_cache(NEW, NEW), ValueError, "`cache_seqlens` must say where"),
        (lambda: in_cache(NEW, NEW, cache_seqlens=3), ValueError, "`k_cache` must have room for 3 new keys"),
        (lambda: in_cache(NEW, NEW, cache_seqlens=THREE), ValueError, "got 5 positions and 2 to 3 keys"),
        (lambda: in_cache(NEW, NEW[:, :2], cache_seqlens=0), ValueError, "`v` must have shape"),
        (lambda: in_cache(NEW.float(), NEW, cache_seqlens=0), TypeError, "`k` must have the dtype of `k_cache`"),
        (lambda: in_cache(cache_seqlens=THREE[:1]), ValueError, r"`cache_seqlens` must have shape \(2,\)"),
        (lambda: in_cache(cache_seqlens=2.0), TypeError, "`cache_seqlens` must be a tensor"),
        (lambda: in_cache(cache_batch_idx=[0, 1]), TypeError, "`cache_batch_idx` must be a tensor"),
        (lambda: flash_attn_with_kvcache(X, CACHED, CACHED), ValueError, "`q` must have shape"),
        (lambda: flash_attn_with_kvcache(NEW[:1], CACHED, CACHED), ValueError, "`k_cache` and `v_cache` must have as many"),
        (lambda: in_cache(softcap=-1.0), ValueError, "`softcap` must be positive"),
    ],
)  # fmt: skip
def test_bad_arguments(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_not_in_a_context(monkeypatch):
    class Context:
        parts = 1

    for module in (torch_bridge.varlen, torch_bridge.kv_cache, attention):
        monkeypatch.setattr(module, "context_of_call", lambda *_: Context())
    with pytest.raises(ValueError, match="`seqused_k` does not go with a context"):
        of_tokens(seqused_k=THREE)
    with pytest.raises(ValueError, match="`k_cache` does not go with a context"):
        in_cache()
