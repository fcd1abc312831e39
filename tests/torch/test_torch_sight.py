"""Which keys the reference computes scores of in PyTorch: as few as are seen, and never too few."""

import pytest

torch = pytest.importorskip("torch")

from torch.func import grad, jvp, vmap  # noqa: E402

from jax_flash_jvp import visibility  # noqa: E402
from torch_bridge import flash_attn_varlen_func, sight  # noqa: E402
from torch_bridge import scaled_dot_product_attention as sdpa  # noqa: E402
from torch_bridge.options import case_of, select  # noqa: E402
from torch_oracle import check, everything, naive, normal  # noqa: E402

B, H, T, S, E = 2, 4, 37, 45, 3
MOST = 2**20


@pytest.fixture
def small_grains(monkeypatch):
    for name, value in dict(GRAIN=4, FEW=0, WASTE=0).items():
        monkeypatch.setattr(sight, name, value)


def drawn(seed):
    """Arguments of calls that hide keys at random."""
    random = torch.Generator().manual_seed(seed)
    integers = lambda low, high, *shape: torch.randint(low, high, shape, generator=random)
    start = integers(-3, S, B, 1, T, 2)
    ranges = torch.stack([start, start + integers(-2, 9, B, 1, T, 2)], -1)
    lengths = dict(query_seq_lengths=integers(0, T + 1, B), key_value_seq_lengths=integers(0, S + 1, B))
    segments = dict(
        query_segment_ids=integers(0, 9, B, T).sort(1).values, key_value_segment_ids=integers(0, 9, B, S).sort(1).values
    )
    blocks = dict(attn_mask=integers(0, 6, B, H, 8, 8) == 0, mask_block_size=(5, 6))
    return {
        "ranges": dict(key_ranges=ranges),
        "ranges-of-heads-window": dict(key_ranges=ranges.expand(B, H, T, 2, 2), local_window_size=(9, 3)),
        "ranges-bias": dict(key_ranges=ranges, attn_mask=normal(1, H, T, S, seed=seed)),
        "ranges-bias-by-key": dict(key_ranges=ranges, attn_mask=normal(1, 1, 1, S, seed=seed)),
        "lengths-causal": dict(lengths, is_causal=True),
        "segments": segments,
        "blocks": blocks,
        "blocks-window": dict(blocks, local_window_size=(9, 2), causal_alignment="lower_right"),
        "all": dict(blocks, key_ranges=ranges, **segments, **lengths),
    }


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", drawn(0))
def test_equals_attention_to_second_order(case, seed, small_grains):
    arguments = drawn(seed)[case]
    x = [normal(B, h, n, E, seed=i) for i, (h, n) in enumerate(((H, T), (2, S), (2, S)))]
    check(*(lambda f=f: everything(f, *x, enable_gqa=True, **arguments) for f in (sdpa, naive)), tolerance=1e-10)


@pytest.mark.parametrize("case", ["ranges-bias-by-key", "blocks"])
def test_third_order_and_mapped(case, small_grains):
    arguments = drawn(3)[case]
    x = [normal(B, H, n, E, seed=i) for i, n in enumerate((T, S, S))]

    def third(f):
        along = lambda k: jvp(lambda v: f(x[0], v, x[2], **arguments), (k,), (x[1],))[1]
        return lambda k: grad(lambda k: (jvp(along, (k,), (x[2],))[1] ** 2).sum())(k)

    check(lambda: third(sdpa)(x[1]), lambda: third(naive)(x[1]), tolerance=1e-9)
    several = torch.stack([x[1], x[2]])
    check(lambda: vmap(third(sdpa))(several), lambda: torch.stack([third(naive)(k) for k in several]), tolerance=1e-9)


def scores(tokens, is_causal=False, mask=None, options=(), **selected):
    """How many scores of a query and a key are computed, and how many blocks that takes."""
    q = torch.zeros(1, H, tokens, 16)
    names = ("query_lengths", "key_lengths", "query_segments", "key_segments", "key_ranges")
    selection, words = select([selected.get(name) for name in names] if selected else [], options, q, q)
    blocks = [*sight.blocks(case_of(q, q, selection, is_causal, 1.0, words), q, q, mask, MOST)]
    assert [b.first for b in blocks[1:]] == [b.last for b in blocks[:-1]]
    assert blocks[-1].last == tokens
    widths = [b.end - b.begin if b.places is None else len(b.places) for b in blocks]
    return sum((b.last - b.first) * n for b, n in zip(blocks, widths, strict=True)), len(blocks)


@pytest.mark.parametrize("count", [128, 512, 2048])
def test_what_packed_sequences_cost_grows_as_their_number(count):
    tokens = 8 * count
    edges = torch.arange(0, tokens + 1, 8)
    computed, blocks = scores(tokens, key_ranges=visibility.documents(tokens, edges, is_causal=True))
    assert computed <= 128 * tokens
    assert blocks <= count / 8
    segments = torch.arange(tokens)[None] // 8
    assert scores(tokens, query_segments=segments, key_segments=segments)[0] <= 128 * tokens


def test_what_nobody_sees_is_skipped():
    n, full = 2048, 2048**2
    assert scores(n)[0] == full
    assert scores(n, key_ranges=visibility.window(n, 64, 0, like=torch.empty(0)))[0] < full / 8
    assert scores(n, key_ranges=visibility.causal(n, like=torch.empty(0)))[0] < 0.6 * full
    ones, eye = torch.ones(32, 32, dtype=torch.bool), torch.eye(32, dtype=torch.bool)
    of_blocks = lambda a: scores(n, mask=a[None, None], options=("mask_block=64x64",))[0]
    assert of_blocks(ones) == full
    assert of_blocks(eye) <= full / 16
    eye[:, 0] = True  # not all between the first and the last that a query sees
    assert of_blocks(eye) < full / 8
    assert scores(n, key_lengths=torch.tensor([100]))[0] < full / 16
    assert scores(n, key_ranges=torch.zeros(1, 1, n, 1, 2, dtype=torch.int32))[0] == 0


def test_long_packed_sequences():
    """Larger than what is looked at: values, gradients and tangents beside those of each sequence alone."""
    edges = torch.tensor([0, 8, 8, 300, 301, 620])
    q, k, v = (normal(620, H, E, seed=i) for i in range(3))

    def by_hand(q, k, v):
        parts = zip(*(a.transpose(0, 1)[None].split(edges.diff().tolist(), 2) for a in (q, k, v)), strict=True)
        return torch.cat([naive(*part, is_causal=True)[0].transpose(0, 1) for part in parts])

    packed = lambda q, k, v: flash_attn_varlen_func(q, k, v, edges, edges, causal=True)
    for f in (
        lambda f: f(q, k, v),
        lambda f: jvp(f, (q, k, v), (v, q, k))[1],
        lambda f: grad(lambda k: f(q, k, v).sin().sum())(k),
        lambda f: jvp(grad(lambda k: f(q, k, v).sin().sum()), (k,), (v,))[1],
    ):
        check(lambda f=f: f(packed), lambda f=f: f(by_hand), tolerance=1e-10)
