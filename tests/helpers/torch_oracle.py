"""What the PyTorch tests share: naive attention as their oracle, launches by operator, and the models that they train.

A string of letters says what was launched: F forward, D forward_dual, T tangent, B backward, S backward_dual (second
order).
"""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.func import grad, jvp  # noqa: E402

from torch_bridge import compute, scaled_dot_product_attention  # noqa: E402

torch.set_num_threads(1)
LETTERS = dict(forward="F", forward_dual="D", tangent="T", backward="B", backward_dual="S")


def naive(
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    *,
    scale=None,
    enable_gqa=False,
    causal_alignment="upper_left",
    local_window_size=(None, None),
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    query_segment_ids=None,
    key_value_segment_ids=None,
    key_ranges=None,
    mask_block_size=None,
    logits_soft_cap=None,
    sinks=None,
    return_lse=False,
    kept=None,  # what dropout multiplies the probabilities by
):
    """Attention as it is written down, which PyTorch differentiates."""
    if enable_gqa:
        key, value = (a.repeat_interleave(query.shape[-3] // a.shape[-3], -3) for a in (key, value))
    s = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if logits_soft_cap is not None:
        s = logits_soft_cap * torch.tanh(s / logits_soft_cap)
    i, j = (torch.arange(n, device=s.device) for n in s.shape[-2:])
    i = i[:, None]
    hidden = torch.zeros(s.shape, dtype=torch.bool, device=s.device)
    if query_seq_lengths is not None:
        hidden = hidden | (i >= query_seq_lengths[:, None, None, None])
    if key_value_seq_lengths is not None:
        hidden = hidden | (j >= key_value_seq_lengths[:, None, None, None])
    if query_segment_ids is not None:
        hidden = hidden | (query_segment_ids[:, None, :, None] != key_value_segment_ids[:, None, None])
    if key_ranges is not None:
        inside = ((key_ranges[..., :1] <= j) & (j < key_ranges[..., 1:])).any(-2)
        heads = 1 if inside.shape[1] == 1 else s.shape[1] // inside.shape[1]
        hidden = hidden | ~inside.repeat_interleave(heads, 1)
    if mask_block_size is not None:
        for axis, (size, n) in enumerate(zip(mask_block_size, s.shape[-2:], strict=True), -2):
            attn_mask = attn_mask.repeat_interleave(size, axis).narrow(axis, 0, n)
    if causal_alignment == "lower_right":
        i = i + s.shape[-1] - s.shape[-2]
    left, right = local_window_size
    if is_causal:
        right = 0 if right is None else min(right, 0)
    if left is not None:
        hidden = hidden | (j < i - left)
    if right is not None:
        hidden = hidden | (j > i + right)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        hidden = hidden | ~attn_mask
    elif attn_mask is not None:
        s = s + attn_mask
    s = s.masked_fill(hidden, -torch.inf)
    if sinks is not None:  # one more key, whose value is zero
        s = torch.cat([s, sinks[:, None, None].expand(*s.shape[:3], 1)], -1)
    nowhere = (s == -torch.inf).all(-1, keepdim=True)
    p = torch.softmax(s.masked_fill(nowhere, 0), -1).masked_fill(nowhere, 0)[..., : key.shape[-2]]
    p = p.to(value.dtype)  # sinks may be wider
    o = (p if kept is None else p * kept) @ value
    if not return_lse:
        return o
    return o, torch.logsumexp(s.masked_fill(nowhere, 0), -1).masked_fill(nowhere[..., 0], -torch.inf)


def with_lse(attention):
    """One tensor of the output and the log-sum-exp, whose derivatives have parts of both."""

    def attend(*x, **arguments):
        o, log_sum_exp = attention(*x, **arguments, return_lse=True)
        return o + torch.where(log_sum_exp == -torch.inf, 0, log_sum_exp).sin()[..., None].to(o.dtype)

    return attend


def leaves(tree):
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [a for branch in (tree.values() if isinstance(tree, dict) else tree) for a in leaves(branch)]


def launched():
    """The letters of what was launched since they were last asked for."""
    letters = "".join(letter * compute.launches[name] for name, letter in LETTERS.items())
    compute.launches.clear()
    return letters


def check(got, want, launches=None, tolerance=1e-12):
    """got() equals want(), and launches these kernels (None: any)."""
    launched()
    results = leaves(got())
    seen = launched()
    expected = leaves(want())
    assert len(results) == len(expected)
    for a, b in zip(results, expected, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=tolerance, atol=tolerance)
    assert launches in (None, seen)


# ------------------------------------------------------------------------------------------------ a consistency step


class Block(nn.Module):
    def __init__(self, attention, width=8, heads=2):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attention, self.heads = attention, heads

    def forward(self, x):
        q, k, v = (a.unflatten(-1, (self.heads, -1)).transpose(1, 2) for a in self.qkv(x).chunk(3, -1))
        return x + self.out(torch.tanh(self.attention(q, k, v)).transpose(1, 2).flatten(-2))


class Model(nn.Module):
    """The network of a flow map, with two attention layers: net(x, t, r)."""

    def __init__(self, attention=scaled_dot_product_attention, block=Block):
        super().__init__()
        torch.manual_seed(0)
        self.time = nn.Linear(2, 8)
        self.blocks = nn.ModuleList(block(attention) for _ in range(2))
        self.double()

    def forward(self, x, t, r):
        x = x + self.time(torch.stack([t, r], -1)).unsqueeze(1)
        for block in self.blocks:
            x = block(x)
        return x


def batch():
    generator = torch.Generator().manual_seed(1)
    x, v = (torch.randn(4, 5, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    t, r = (torch.rand(4, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, t, r, v


def by_func(net, x, t, r, v):
    return jvp(net, (x, t, r), (v, torch.ones_like(t), torch.zeros_like(r)))


def by_level(net, x, t, r, v):
    with forward_ad.dual_level():
        out = net(forward_ad.make_dual(x, v), forward_ad.make_dual(t, torch.ones_like(t)), r)
        return tuple(forward_ad.unpack_dual(out))


def loss(net, derivative, through, data):
    """MeanFlow's; `through`: with the gradient through the JVP."""
    u, du_dt = derivative(net, *data)
    target = data[3] - 0.3 * du_dt
    return ((u - (target if through else target.detach())) ** 2).mean()


def plain_loss(net, *data):
    return (net(*data[:3]) ** 2).mean()


def gradients(net, compute):
    """compute(net) and its gradients."""
    value = compute(net)
    value.backward()
    assert all(p.grad is not None for p in net.parameters())
    return [value, *(p.grad for p in net.parameters())]


def normal(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def everything(attention, *x, **arguments):
    """Value, tangent, gradients, and gradients through the tangent."""

    def f(*x):
        return attention(*x, **arguments)

    def through(*x):
        o, t_o = jvp(f, x, tangents)
        return (o.sin() * t_o).sum()

    tangents = tuple(normal(*a.shape, seed=3).to(a) for a in x)
    every = tuple(range(len(x)))
    return jvp(f, x, tangents), grad(lambda *x: (f(*x).sin()).sum(), every)(*x), grad(through, every)(*x)


# ------------------------------------------------------------------------------------------------ values
