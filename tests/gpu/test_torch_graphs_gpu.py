"""CUDA graphs by hand: attention and its derivatives, replayed after lengths and masks changed in place, against eager calls."""

import pytest

torch = pytest.importorskip("torch")

from torch.func import jvp  # noqa: E402

import torch_bridge  # noqa: E402
from torch_bridge import scaled_dot_product_attention as sdpa  # noqa: E402
from torch_oracle import leaves, normal  # noqa: E402
from torch_recipes import WIDTH, MeanFlow  # noqa: E402

pytestmark = pytest.mark.gpu
B, H, L, D = 3, 4, 200, 64
SELECTIONS = {  # what hides keys, and what it becomes
    "lengths": lambda: (dict(key_value_seq_lengths=torch.tensor([200, 100, 1])), [torch.tensor([3, 199, 64])]),
    "long-lengths": lambda: (
        dict(query_seq_lengths=torch.tensor([10, 20, 200]).int(), key_value_seq_lengths=torch.tensor([200, 7, 9]).int()),
        [torch.tensor([200, 0, 1]).int(), torch.tensor([1, 200, 33]).int()],
    ),
    "mask": lambda: (dict(attn_mask=normal(B, 1, L, L) > 0), [normal(B, 1, L, L, seed=1) > 1]),
    "bias": lambda: (dict(attn_mask=normal(1, H, L, L).bfloat16()), [normal(1, H, L, L, seed=1).bfloat16()]),
    "segments": lambda: (
        dict(query_segment_ids=_segments(50), key_value_segment_ids=_segments(50)),
        [_segments(30), _segments(70)],
    ),
    "causal": lambda: (dict(is_causal=True), []),
}  # fmt: skip


def _segments(size):
    return (torch.arange(L) // size).int().expand(B, L).clone()


def jobs_of(arguments):
    """Calls without arguments, of leaves that keep their place."""
    draw = lambda seed: normal(B, L, H, D, seed=seed).to("cuda", torch.bfloat16).transpose(1, 2)
    x, t_x = ([draw(seed + i).requires_grad_() for i in range(3)] for seed in (0, 3))
    d_o, d_t = draw(6), draw(7)
    attend = lambda *x: sdpa(*x, deterministic=True, **arguments)
    return {
        "forward": torch.no_grad()(lambda: attend(*x)),
        "jvp": torch.no_grad()(lambda: jvp(attend, tuple(x), tuple(t_x))),
        "backward": lambda: torch.autograd.grad(attend(*x), x, d_o),
        "stopped": lambda: torch.autograd.grad(jvp(attend, tuple(x), tuple(t_x))[0], x, d_o),
        "dual-backward": lambda: torch.autograd.grad(jvp(attend, tuple(x), tuple(t_x)), [*x, *t_x], (d_o, d_t)),
    }


def captured(job):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            job()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = job()
    return graph, leaves([results])


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("name", ["forward", "jvp", "backward", "stopped", "dual-backward"])
def test_replays_see_what_changed_in_place(name, selection):
    arguments, later = SELECTIONS[selection]()
    arguments = {key: a.cuda() if isinstance(a, torch.Tensor) else a for key, a in arguments.items()}
    job = jobs_of(arguments)[name]
    graph, results = captured(job)
    before = [a.clone() for a in leaves([job()])]
    graph.replay()
    assert all(map(torch.equal, results, before))
    changed = [a for a in arguments.values() if isinstance(a, torch.Tensor)]
    for a, new in zip(changed, later, strict=True):
        a.copy_(new)
    graph.replay()
    assert all(map(torch.equal, results, leaves([job()])))
    assert not changed or not all(map(torch.equal, results, before))


def test_dropout_is_drawn_anew_at_each_replay():
    q = normal(B, H, L, D).to("cuda", torch.bfloat16)
    graph, (o,) = captured(torch.no_grad()(lambda: sdpa(q, q, q, dropout_p=0.5)))
    graph.replay()
    first = o.clone()
    graph.replay()
    assert not torch.equal(first, o)


def test_graphed_callable():
    """Of a gradient through the JVP, with a mask that is given and lengths that are not."""
    lengths = torch.tensor([200, 100, 30], device="cuda")

    def through(q, t_q, mask):
        o, t_o = jvp(lambda q: sdpa(q, q, q, mask, key_value_seq_lengths=lengths, deterministic=True), (q,), (t_q,))
        return o.float().square().mean() + t_o.float().square().mean()

    draw = lambda seed: normal(B, H, L, D, seed=seed).to("cuda", torch.bfloat16).requires_grad_()
    mask_of = lambda seed: normal(B, 1, L, L, seed=seed).cuda() > 0
    graphed = torch.cuda.make_graphed_callables(through, (draw(0), draw(1), mask_of(0)))
    for seed in (1, 2):
        lengths.copy_(torch.tensor([20, 200, 64]) * seed // 2)
        q, t_q, mask = draw(seed), draw(seed + 5), mask_of(seed)
        got, expected = (torch.autograd.grad(f(q, t_q, mask), (q, t_q)) for f in (graphed, through))
        assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpoints"])
def test_graphed_step(checkpointed):
    """Of a whole model, with the gradients of its parameters."""

    def batch(seed):
        data, noise = normal(2, 4, 5, WIDTH, seed=seed).float().cuda()
        r, t = torch.sigmoid(normal(2, 4, seed=seed)).sort(0).values.float().cuda()
        return data, noise, r, t

    def gradients(step, seed):
        step.zero_grad()
        loss = step(*batch(seed))
        loss.backward()
        return [loss.detach().clone(), *(p.grad.clone() for p in step.parameters())]

    with torch_bridge.patch():
        step, eager = MeanFlow(checkpointed).cuda(), MeanFlow().cuda()
        eager.load_state_dict(step.state_dict())
        graphed = torch.cuda.make_graphed_callables(step, batch(0))
        for seed in (1, 2):
            torch.testing.assert_close(gradients(graphed, seed), gradients(eager, seed), rtol=1e-4, atol=1e-5)
