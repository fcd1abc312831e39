"""Ranges, blocks, FlexAttention's BlockMask and packed sequences in PyTorch."""

import functools

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch._dynamo import reset  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch.func import jvp, vjp, vmap  # noqa: E402
from torch.nn.attention.flex_attention import BlockMask, create_block_mask  # noqa: E402

from jax_flash_jvp import visibility  # noqa: E402
from packed import drawn  # noqa: E402
from torch_bridge import flash_attn_varlen_func, reference, varlen  # noqa: E402
from torch_bridge import scaled_dot_product_attention as sdpa  # noqa: E402
from torch_bridge.block_mask import tensor_of  # noqa: E402
from torch_bridge.options import case_of  # noqa: E402
from torch_bridge.plans import made  # noqa: E402
from torch_launchers import NumpyLauncher, PlannedLauncher  # noqa: E402
from torch_oracle import check, everything, naive, normal  # noqa: E402

B, H, E = 2, 2, 4
OF = torch.arange(300) // 90


def of_documents(b, h, q, k):
    return (OF[q] == OF[k]) & (q >= k - b)


def of_heads(b, h, q, k):
    return (q >= k) & ((q + k + h) % 7 != 0)


MASKS = {
    "documents": (of_documents, 2, None, 128),
    "heads": (of_heads, None, 2, (64, 128)),
    "small": (of_heads, 2, 2, (32, 48)),
    "full": (lambda b, h, q, k: q // 64 >= k // 64, None, None, 64),
}


@pytest.mark.parametrize("case", MASKS)
def test_block_masks(case):
    mod, batch, heads, size = MASKS[case]
    T, S = (256, 192) if case == "full" else (300, 200)
    mask = create_block_mask(mod, batch, heads, T, S, device="cpu", BLOCK_SIZE=size)
    x = [normal(B, H, n, E, seed=i) for i, n in enumerate((T, S, S))]
    index = [torch.arange(n).view([-1 if j == i else 1 for j in range(4)]) for i, n in enumerate((B, H, T, S))]
    dense = mod(*index).expand(B, H, T, S)
    tensor, _ = tensor_of("mask", mask, (B, H, T, S))
    assert tensor.dtype == (torch.bool if case == "full" else torch.int32)
    check(lambda: everything(sdpa, *x, attn_mask=mask), lambda: everything(naive, *x, attn_mask=dense))


def test_a_mask_mod_is_asked_of_partial_blocks_alone():
    """A full block is not asked about, in the way of FlexAttention, nor is an empty one."""
    asked = []

    def mod(b, h, q, k):
        asked.append(0)
        return (q >= k) & (k != 5)

    mask = BlockMask.from_kv_blocks(
        torch.tensor([[[1, 1]]]), torch.tensor([[[[0, 1], [1, 0]]]]), torch.tensor([[[0, 1]]]),
        torch.tensor([[[[0, 1], [0, 1]]]]),        128, mod, (256, 256),
    )  # fmt: skip
    i, j = torch.arange(256)[:, None], torch.arange(256)
    dense = (i >= j) & ((j != 5) | (i >= 128))
    x = [normal(1, 1, 256, E, seed=n) for n in range(3)]
    check(lambda: sdpa(*x, attn_mask=mask), lambda: naive(*x, attn_mask=dense))
    tensor, _ = tensor_of("mask", mask, (1, 1, 256, 256))
    assert tensor.numel() == 1 + 4 + 4 * 128 * 128 // 4  # two blocks are partial


def jobs(x, mask, selection, options, launcher=None):
    """The results of every operator by the kernels, interpreted, or else by the reference; and by the plan that is made of the
    first, where the launcher keeps what one is made of."""
    launch = pytest.importorskip("torch_bridge.launch")
    case = case_of(*x[:2], selection, False, 0.5, options)
    tx = [normal(*a.shape, seed=9).float() for a in x]
    x, tx = [*x, mask], [*tx, None]
    o, lse, t_o, mu = reference.run("forward_dual", case, x, tx)
    cy, tcy = (
        (normal(*o.shape, seed=5).float(), normal(*lse.shape, seed=6).float()),
        (normal(*o.shape, seed=7).float(), None),
    )
    want = [True, True, True, False]
    calls = dict(
        forward_dual=dict(tx=tx), backward=dict(cy=cy, y=(o, lse), want=want),
        backward_dual=dict(tx=tx, cy=cy, tcy=tcy, y=(o, lse), ty=(t_o, mu), want=want * 2),
    )  # fmt: skip
    run = reference.run if launcher is None else lambda *args, **groups: launch.run(launcher, *args, **groups)
    return {name: [a for a in run(name, case, x, **groups) if a is not None] for name, groups in calls.items()}


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["documents", pytest.param("heads", marks=pytest.mark.slow)])
def test_kernels_of_block_masks(case):
    mod, batch, heads, size = MASKS[case]
    T, S = 140, 150
    mask = create_block_mask(mod, batch, heads, T, S, device="cpu", BLOCK_SIZE=size)
    tensor, (b_q, b_k) = tensor_of("mask", mask, (B, H, T, S))
    x = [normal(B, H, n, E, seed=i).float() for i, n in enumerate((T, S, S))]
    given = x, tensor, None, f"mask_block={b_q}x{b_k}"
    got, want = jobs(*given, launcher=NumpyLauncher()), jobs(*given)
    for name in want:
        for a, b in zip(got[name], want[name], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def packed(total, key_total, heads=2, key_heads=2):
    return [
        normal(n, h, E, seed=i)
        for i, (n, h) in enumerate(((total, heads), (key_total, key_heads), (key_total, key_heads)))
    ]


def apart(q, k, v, q_edges, k_edges, **arguments):
    """Sequence by sequence."""
    parts = []
    for first, end, k_first, k_end in zip(q_edges, q_edges[1:], k_edges, k_edges[1:], strict=False):
        one = [a.transpose(0, 1)[None] for a in (q[first:end], k[k_first:k_end], v[k_first:k_end])]
        o = naive(*one, causal_alignment="lower_right", enable_gqa=True, **arguments) if k_end > k_first else one[0] * 0
        parts.append(o[0].transpose(0, 1))
    return torch.cat(parts)


VARLEN = {
    "": ([0, 5, 5, 12, 20], [0, 5, 5, 12, 20], {}, {}),
    "causal": ([0, 3, 9, 20], [0, 8, 9, 15], dict(causal=True), dict(is_causal=True)),
    "window": ([0, 3, 9, 20], [0, 8, 8, 15], dict(window_size=(2, 1)), dict(local_window_size=(2, 1))),
    "window-left": (
        [0, 14, 20], [0, 9, 15], dict(window_size=(4, -1), softcap=1.5), dict(local_window_size=(4, None), logits_soft_cap=1.5)
    ),
}  # fmt: skip


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)], ids=["", "grouped"])
@pytest.mark.parametrize("case", VARLEN)
def test_packed_sequences(case, heads):
    q_edges, k_edges, ours, theirs = VARLEN[case]
    x = packed(q_edges[-1], k_edges[-1], *heads)
    edges = torch.tensor(q_edges), torch.tensor(k_edges, dtype=torch.int32)
    attend = lambda *x: flash_attn_varlen_func(*x, *edges, 20, 20, softmax_scale=0.3, **ours)
    check(
        lambda: everything(attend, *x),
        lambda: everything(lambda *x: apart(*x, q_edges, k_edges, scale=0.3, **theirs), *x),
    )


@pytest.mark.filterwarnings("ignore:.*tokens in no sequence")
def test_tokens_of_no_sequence():
    x, edges = packed(12, 12), torch.tensor([4, 7, 12])
    o = flash_attn_varlen_func(*x, edges, edges)
    assert not o[:4].any()
    torch.testing.assert_close(o[4:], apart(*(a[4:] for a in x), [0, 3, 8], [0, 3, 8]))


def of_packed(attend, x, tangents, weights):
    """o and ȯ; gradients, their tangents, and gradients through the tangent, for cotangents that are these weights."""
    g, h = weights
    pull = lambda *x: vjp(attend, *x[:3])[1](x[3])
    results = [*jvp(attend, x, tangents), *pull(*x, g), *jvp(pull, (*x, g), (*tangents, h))[1]]
    results += vjp(lambda *x: jvp(attend, x[:3], x[3:]), *x, *tangents)[1]((g, h))
    leaf = [a.clone().requires_grad_() for a in x]
    return [*results, *torch.autograd.grad(attend(*leaf), leaf, g)]


@pytest.mark.filterwarnings("ignore:.*tokens in no sequence")
@pytest.mark.parametrize("by", ["", "traced", pytest.param("kernels", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", ["", "causal", "window"])
def test_tokens_of_no_sequence_may_hold_anything(case, seed, by, monkeypatch):
    """In tensors, tangents and cotangents.  Results are zero there, and elsewhere those of the sequences put together."""
    edges, inside, compact = drawn(seed)
    _, _, ours, theirs = VARLEN[case]
    rows = [torch.from_numpy(inside[i]) for i in (0, 1, 1, 0)]
    heads = (4, 2, 2, 4)
    dtype, close = (torch.float32, 1e-4) if by == "kernels" else (torch.float64, 1e-10)
    given = [[normal(int(r.sum()), h, E, seed=10 * i + j, dtype=dtype) for j, (r, h) in enumerate(zip(rows, heads, strict=True))]
             for i in range(2)]  # fmt: skip
    spread = lambda a, r: a.new_full((len(r), *a.shape[1:]), torch.nan).index_put((r,), a)
    torn = [[spread(a, r) for a, r in zip(some, rows, strict=True)] for some in given]
    if by:  # as on a GPU
        monkeypatch.setattr(varlen, "known", lambda a: None)
    q_edges, k_edges = map(torch.from_numpy, edges)
    attend = lambda *x: flash_attn_varlen_func(*x, q_edges, k_edges, **ours)
    want = of_packed(lambda *x: apart(*x, *compact, **theirs), *[(*a[:3],) for a in given], [a[3] for a in given])
    if by == "kernels":
        launch = pytest.importorskip("torch_bridge.launch")
        monkeypatch.setattr(reference, "run", functools.partial(launch.run, NumpyLauncher()))
    got = of_packed(attend, *[(*a[:3],) for a in torn], [a[3] for a in torn])
    for a, b in zip(got, want, strict=True):
        r = next(r for r in rows if len(r) == len(a) and r.sum() == len(b))
        assert not a[~r].any()
        torch.testing.assert_close(a[r].detach(), b.detach(), rtol=close, atol=close)


@pytest.mark.parametrize("edges", [[0, 5, 14], torch.tensor([0, 5, 14])], ids=["known", "traced"])
def test_ranges_of_documents_keep_the_others_out(edges):
    """Without lengths, where the reference computes."""
    x = [normal(1, H, 20, E, seed=i) for i in range(3)]
    ranges = visibility.documents(20, edges, is_causal=True, like=x[0])
    torn = [torch.cat([a[:, :, :14], torch.full_like(a[:, :, 14:], torch.nan)], 2).requires_grad_() for a in x]
    short = [a[:, :, :14].clone().requires_grad_() for a in x]
    got, want = sdpa(*torn, key_ranges=ranges), sdpa(*short, key_ranges=ranges[:, :, :14])
    torch.testing.assert_close(got[:, :, :14], want)
    assert not got[:, :, 14:].any()
    for a, b in zip(torch.autograd.grad(got.sum(), torn), torch.autograd.grad(want.sum(), short), strict=True):
        torch.testing.assert_close(a[:, :, :14], b)
        assert not a[:, :, 14:].any()


def test_sequences_that_do_not_begin_at_the_first_token_warn():
    x, edges = packed(12, 12), torch.tensor([4, 7, 12])
    with pytest.warns(
        UserWarning, match=r"`cu_seqlens_q`=\[4, 7, 12\] leaves the first 4 tokens in no sequence.*begin with 0"
    ):
        flash_attn_varlen_func(*x, edges, edges)


def test_compiled_for_every_packing():
    """And for lengths that vary."""
    reset()
    count = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, dynamic=True, backend=count)
    def loss(q, k, v, edges, ranges, mask):
        o = flash_attn_varlen_func(q, k, v, edges, edges, causal=True)
        lengths_first = [a.transpose(0, 1)[None] for a in (q, k, v)]
        return (
            o.sin().sum() + sdpa(*lengths_first, key_ranges=ranges, attn_mask=mask, mask_block_size=(4, 4)).sin().sum()
        )

    frames = []
    for total, cuts in ((20, [0, 5, 20]), (20, [0, 11, 20]), (26, [0, 7, 26])):
        x = [a.requires_grad_() for a in packed(total, total)]
        ranges = visibility.prefix(total, 3, like=x[0])
        mask = normal(1, 1, -(-total // 4), -(-total // 4)) > 0
        given = (*x, torch.tensor(cuts), ranges, mask)
        got = loss(*given)
        want = loss._torchdynamo_orig_callable(*given)
        frames.append(count.frame_count)
        pairs = ((got, *torch.autograd.grad(got, x)), (want, *torch.autograd.grad(want, x)))
        for a, b in zip(*pairs, strict=True):
            torch.testing.assert_close(a, b)
    assert len(frames) == 3
    assert len({*frames}) == 1


def test_vmap():
    x = [normal(3, B, H, n, E, seed=i) for i, n in enumerate((6, 9, 9))]
    ranges = torch.stack([visibility.window(6, n, 1, like=x[0]) for n in range(3)])
    mask = normal(1, 1, 2, 3) > 0
    attend = lambda q, k, v, ranges: sdpa(q, k, v, key_ranges=ranges, attn_mask=mask, mask_block_size=(3, 3))
    check(
        lambda: vmap(attend)(*x, ranges), lambda: torch.stack([attend(*(a[i] for a in (*x, ranges))) for i in range(3)])
    )


def test_block_masks_in_vmap():
    """Those that do not differ along its axis, whether made inside or not."""
    x = normal(3, 1, H, 6, E)
    made_there = lambda n: create_block_mask(lambda b, h, q, k: k < n, None, None, 6, 6, device="cpu", BLOCK_SIZE=2)
    made_here, want = made_there(3), vmap(lambda x: sdpa(x, x, x, torch.arange(6) < 3))(x)
    for attend in (lambda x: sdpa(x, x, x, made_there(3)), lambda x: sdpa(x, x, x, made_here)):
        torch.testing.assert_close(vmap(attend)(x), want)
    with pytest.raises(ValueError, match="`attn_mask` must not be a BlockMask that differs along an axis of vmap"):
        vmap(lambda x, n: sdpa(x, x, x, made_there(n)))(x, torch.tensor([1, 3, 6]))

    def of_full_blocks(x, n):
        mask = made_there(5)
        mask.mask_mod = lambda b, h, q, k: k < n
        return sdpa(x, x, x, mask)

    with pytest.raises(ValueError, match="`attn_mask` must not be a BlockMask that differs along an axis of vmap"):
        vmap(of_full_blocks)(x, torch.tensor([1, 3, 6]))


def test_a_plan_of_ranges():
    """Of a later call with other ranges."""
    launcher = PlannedLauncher()
    x = [normal(1, H, 20, E, seed=i).float() for i in range(3)]
    selection = torch.cat([torch.zeros(1, 7 + 40, dtype=torch.int32), visibility.causal(20, like=x[0]).flatten(1)], 1)
    case = case_of(*x[:2], selection, False, 0.5, "key_ranges=1x1")
    from torch_bridge import launch, plans

    args = (*x, None, selection, False, 0.5, "key_ranges=1x1")
    plan = made(args, launcher.launched, launch.run(launcher, "forward", case, (*x, None)))
    other = torch.cat([selection[:, :47], visibility.window(20, 3, 2, like=x[0]).flatten(1)], 1)
    args = (*x, None, other, False, 0.5, "key_ranges=1x1")
    got = plans.follow(plan, args, plans.look("forward", args)[1])
    torch.testing.assert_close(got[0], sdpa(*x, scale=0.5, local_window_size=(3, 2)))


X = [torch.zeros(2, 4, 6, 8) for _ in range(3)]
RANGES, BLOCKS = torch.zeros(1, 1, 6, 1, 2, dtype=torch.int32), torch.ones(2, 3, dtype=torch.bool)
EDGES = torch.tensor([0, 6])
of_tokens = lambda a, b: flash_attn_varlen_func(*(a_[0].transpose(0, 1) for a_ in X), torch.tensor(a), torch.tensor(b))


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: sdpa(*X, key_ranges=RANGES[:, :, :5]), ValueError, "`key_ranges` must have shape"),
        (lambda: sdpa(*X, key_ranges=RANGES[0]), ValueError, "`key_ranges` must have shape"),
        (lambda: sdpa(*X, key_ranges=RANGES.float()), TypeError, "`key_ranges` must be of integers"),
        (lambda: sdpa(*X, key_ranges=3), TypeError, "`key_ranges` must be a tensor"),
        (lambda: sdpa(*X, BLOCKS, mask_block_size=(3, 3)), ValueError, r"must have 2 rows and 2 columns.*\(3, 3\)"),
        (lambda: sdpa(*X, BLOCKS.float(), mask_block_size=(3, 2)), TypeError, "must be boolean"),
        (lambda: sdpa(*X, mask_block_size=(3, 2)), ValueError, "there is no mask"),
        (lambda: sdpa(*X, BLOCKS, mask_block_size=3), TypeError, "must be a pair of integers"),
        (lambda: sdpa(*X, BLOCKS, mask_block_size=(0, 2)), ValueError, "must be positive"),
        (lambda: of_tokens([0, 7, 6], [0, 3, 6]), ValueError, "`cu_seqlens_q` must not decrease"),
        (lambda: of_tokens([-1, 3, 6], [0, 3, 6]), ValueError, "`cu_seqlens_q` must not decrease, nor begin below zero"),
        (lambda: of_tokens([0, 3, 6], [0, 3, 7]), ValueError, "`cu_seqlens_k` must not end beyond the 6 tokens"),
        (lambda: of_tokens([0, 6], [0, 3, 6]), ValueError, "`cu_seqlens_k` must have shape"),
        (lambda: of_tokens([0.0, 6.0], [0, 6]), TypeError, "`cu_seqlens_q` must be of integers"),
        (lambda: flash_attn_varlen_func(*X, EDGES, EDGES), ValueError, "`q` must have shape"),
        (
            lambda: sdpa(*X, create_block_mask(of_heads, None, None, 7, 6, device="cpu", BLOCK_SIZE=2)),
            ValueError, "must be a BlockMask of shape",
        ),
        (
            lambda: sdpa(*X, create_block_mask(of_heads, None, None, 6, 6, device="cpu", BLOCK_SIZE=2), mask_block_size=(2, 2)),
            ValueError, "which has its own",
        ),
    ],
)  # fmt: skip
def test_bad_arguments(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_a_tangent_of_packed_sequences_is_one_kernel():
    x, edges = (*packed(12, 12),), torch.tensor([0, 7, 12])
    attend = lambda q: flash_attn_varlen_func(q, *x[1:], edges, edges)
    check(
        lambda: jvp(attend, x[:1], x[:1]),
        lambda: jvp(lambda q: apart(q, *x[1:], [0, 7, 12], [0, 7, 12]), x[:1], x[:1]),
        "D",
    )
