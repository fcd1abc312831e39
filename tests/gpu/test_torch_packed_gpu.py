"""Packed sequences on a GPU under their other names: nested tensors, used tokens, a cache; each against its sequences alone."""

import itertools

import pytest

torch = pytest.importorskip("torch")

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from torch.func import jvp  # noqa: E402
from torch.nested import nested_tensor_from_jagged  # noqa: E402

from torch_bridge import flash_attn_varlen_func, flash_attn_with_kvcache, reference  # noqa: E402
from torch_bridge import scaled_dot_product_attention as sdpa  # noqa: E402
from torch_oracle import naive  # noqa: E402

pytestmark = pytest.mark.gpu
EDGES, USED = [0, 130, 130, 700, 1000], [100, 0, 570, 33]


@pytest.fixture(autouse=True)
def kernels_alone(monkeypatch):
    def run(name, *args, **groups):
        raise AssertionError(f"{name} was computed by the reference")

    monkeypatch.setattr(reference, "run", run)


def normal(*shape, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)


def packed(seed=0):
    return [normal(1000, heads, 64, seed=seed + i) for i, heads in enumerate((4, 2, 2))]


def apart(q, k, v, used=None, **arguments):
    """In float64, [tokens, H, E]."""
    o = torch.zeros_like(q, dtype=torch.float64) * q.double().sum()
    for i, (first, end) in enumerate(itertools.pairwise(EDGES)):
        end = end if used is None else first + used[i]
        if first < end:
            one = [a[first:end].double().transpose(0, 1)[None] for a in (q, k, v)]
            o = torch.cat([o[:first], naive(*one, enable_gqa=True, **arguments)[0].transpose(0, 1), o[end:]])
    return o


def same(got, want):
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b.double()).norm() < 0.02 * b.double().norm()  # not of NaN


@pytest.mark.parametrize("lengths", [None, USED], ids=["", "holes"])
def test_nested_tensors(lengths):
    """Value, gradients and their gradients; what lies in holes is poison."""
    x = [a.requires_grad_() for a in packed()]
    edges, used = torch.tensor(EDGES, device="cuda"), lengths and torch.tensor(lengths, device="cuda")

    def attend(*x):
        nested = [nested_tensor_from_jagged(a, edges, used).transpose(1, 2) for a in x]
        return sdpa(*nested, is_causal=True, enable_gqa=True).transpose(1, 2).values()

    def both(f, x):
        o = f(*x)
        first = torch.autograd.grad(o.double().sin().sum(), x, create_graph=True)
        return o, *first, *torch.autograd.grad(sum(g.double().sin().sum() for g in first), x)

    want = both(lambda *x: apart(*x, lengths, is_causal=True), x)
    if lengths is not None:
        outside = outside_of(lengths)
        x = [a.detach().masked_fill(outside, torch.nan).requires_grad_() for a in x]
    same(both(attend, x), want)


def outside_of(lengths):
    outside = torch.zeros(1000, 1, 1, dtype=torch.bool, device="cuda")
    for i, n in enumerate(lengths):
        outside[EDGES[i] + n : EDGES[i + 1]] = True
    return outside


def test_used_tokens():
    """Unused tokens, tangents and cotangents are poison."""
    x, tangents, outside = packed(), packed(3), outside_of(USED)
    poison = lambda arrays: tuple(a.masked_fill(outside, torch.nan) for a in arrays)
    edges, used = torch.tensor(EDGES, device="cuda"), torch.tensor(USED, device="cuda")
    attend = lambda *x: flash_attn_varlen_func(*x, edges, edges, seqused_q=used, seqused_k=used, causal=True)
    expected = lambda *x: apart(*x, USED, is_causal=True)
    o, t_o = jvp(attend, poison(x), poison(tangents))
    want, t_want = jvp(expected, tuple(x), tuple(tangents))
    same((o, t_o), (want, t_want))
    (cotangent,) = poison([normal(1000, 4, 64, seed=9)])
    gradients = torch.func.vjp(attend, *poison(x))[1](cotangent)
    same(gradients, torch.func.vjp(expected, *x)[1](cotangent.nan_to_num(0).double()))


@pytest.mark.parametrize("count", [1, 70])
def test_a_cache(count):
    caches = [torch.full((2, 600, 2, 64), torch.nan, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    lengths = torch.tensor([500, 3], device="cuda")
    old = [normal(2, 500, 2, 64, seed=i) for i in range(2)]
    for cache, a in zip(caches, old, strict=True):
        for i, n in enumerate(lengths.tolist()):
            cache[i, :n] = a[i, :n]
    q, k, v = (normal(2, count, heads, 64, seed=5 + i) for i, heads in enumerate((4, 2, 2)))
    o = flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths, causal=True)
    for i, n in enumerate(lengths.tolist()):
        one = [q[i], *(torch.cat([a[i, :n], new[i]]) for a, new in zip(old, (k, v), strict=True))]
        one = [a.double().transpose(0, 1)[None] for a in one]
        want = naive(*one, is_causal=True, causal_alignment="lower_right", enable_gqa=True)[0].transpose(0, 1)
        same((o[i],), (want,))
