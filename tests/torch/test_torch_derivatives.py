"""Every order and mode of differentiation in PyTorch: values against naive float64 attention, and what is launched."""

import gc
import math
import warnings

import pytest

torch = pytest.importorskip("torch")

from torch.autograd import forward_ad  # noqa: E402
from torch.func import (  # noqa: E402
    functional_call,
    grad,
    jvp,
    vjp,
    vmap,
)
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import (  # noqa: E402
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from torch_bridge import reference  # noqa: E402
from torch_bridge import scaled_dot_product_attention as sdpa  # noqa: E402
from torch_bridge.flops import flops  # noqa: E402
from torch_bridge.groups import Group  # noqa: E402
from torch_bridge.operators import ops  # noqa: E402
from torch_derivatives import (  # noqa: E402
    DERIVATIVES,
    bias,
    k,
    lead,
    of_query,
    q,
    square,
    tq,
    tx,
    v,
    x,
)
from torch_launchers import NumpyLauncher  # noqa: E402
from torch_oracle import (  # noqa: E402
    Model,
    batch,
    by_func,
    by_level,
    check,
    gradients,
    launched,
    loss,
    naive,
    plain_loss,
)


@pytest.mark.parametrize(("derivative", "launches"), DERIVATIVES.values(), ids=DERIVATIVES)
def test_derivative(derivative, launches):
    check(lambda: derivative(sdpa), lambda: derivative(naive), launches, tolerance=1e-10)


LARGE = {"jacfwd", "jacrev", "hessian"}


@pytest.mark.parametrize(
    "derivative",
    [pytest.param(f, id=name, marks=[pytest.mark.slow] * (name in LARGE)) for name, (f, _) in DERIVATIVES.items()],
)
def test_derivative_by_the_kernels(derivative, monkeypatch):
    """With the operators' arrays as a GPU would get them: strides, folded axes and all."""
    launch = pytest.importorskip("torch_bridge.launch")
    in_dtype = lambda dtype, group: [a if a is None or not a.is_floating_point() else a.to(dtype) for a in group]

    def run(name, case, want=(), **groups):
        narrow = {group: in_dtype(torch.float32, tensors) for group, tensors in groups.items()}
        return in_dtype(torch.float64, launch.run(NumpyLauncher(), name, case, want=want, **narrow))

    monkeypatch.setattr(reference, "run", run)
    check(lambda: derivative(sdpa), lambda: derivative(naive), None, 1e-4)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_recording(mode):
    with mode():
        check(lambda: sdpa(*x), lambda: naive(*x), "F")
        check(lambda: vmap(sdpa)(*lead(*x)), lambda: vmap(naive)(*lead(*x)), "F")
        if mode is torch.inference_mode and torch.__version__ < "2.12":
            for derivative in (lambda: jvp(sdpa, x, tx), lambda: grad(square(vmap(sdpa)))(*lead(*x))):
                with pytest.raises(RuntimeError, match=r"use torch\.no_grad"):
                    derivative()
        else:
            check(lambda: jvp(sdpa, x, tx), lambda: jvp(naive, x, tx), "D")
            check(lambda: grad(square(sdpa))(*x), lambda: grad(square(naive))(*x), "FB")


def test_the_graph_is_freed_without_the_garbage_collector():
    count = lambda: sum(type(o).__name__ == "_RecordBackward" for o in gc.get_objects())
    gc.collect()
    gc.disable()
    try:
        before, a = count(), q.clone().requires_grad_()
        with forward_ad.dual_level():
            out = sdpa(forward_ad.make_dual(a, tq), k, v)
        assert count() == before + 1
        del out
        assert count() == before
    finally:
        gc.enable()


def test_reverse_mode_twice_inside_an_open_level_is_refused():
    """The tangents of such gradients would be lost: never silently."""
    a = q.clone().requires_grad_()
    with forward_ad.dual_level():
        (first,) = torch.autograd.grad(square(of_query(sdpa))(forward_ad.make_dual(a, tq)), a, create_graph=True)
        with pytest.raises(RuntimeError, match="close the level"):
            torch.autograd.grad(first.sum(), a)
    (again,) = torch.autograd.grad(square(of_query(sdpa))(a), a, create_graph=True)
    torch.testing.assert_close(first.detach(), again.detach())


# ------------------------------------------------------------------------------------------------ a training step


def train(derivative, through, attention=sdpa):
    return gradients(Model(attention), lambda net: loss(net, derivative, through, batch()))


@pytest.mark.parametrize("derivative", [by_func, by_level])
@pytest.mark.parametrize(("through", "launches"), [(False, "DDBB"), (True, "DDSS")], ids=["stopped", "through"])
def test_consistency_step(derivative, through, launches):
    """One fused forward a layer; a stopped tangent costs the plain backward."""
    check(lambda: train(derivative, through), lambda: train(by_func, through, naive), launches)


@pytest.mark.parametrize("through", [False, True], ids=["stopped", "through"])
def test_backward_before_the_level_is_closed(through):
    def inside(net):
        data = batch()
        with forward_ad.dual_level():
            t = forward_ad.make_dual(data[1], torch.ones_like(data[1]))
            u, du_dt = forward_ad.unpack_dual(net(forward_ad.make_dual(data[0], data[3]), t, data[2]))
            target = data[3] - 0.3 * du_dt
            value = ((u - (target if through else target.detach())) ** 2).mean()
            value.backward()
            return [value.detach(), *(forward_ad.unpack_dual(p.grad).primal.clone() for p in net.parameters())]

    check(lambda: inside(Model()), lambda: train(by_func, through, naive))


def test_per_sample_gradients():
    def per_sample(attention):
        net = Model(attention)
        parameters = {name: p.detach() for name, p in net.named_parameters()}
        one = lambda p, x, t, r: (functional_call(net, p, (x[None], t[None], r[None])) ** 2).mean()
        return vmap(grad(one), (None, 0, 0, 0))(parameters, *batch()[:3])

    check(lambda: per_sample(sdpa), lambda: per_sample(naive), "FFBB")


# ------------------------------------------------------------------------------------------------ checkpoints


class Checkpointed(torch.nn.Module):
    def __init__(self, attention, reentrant):
        super().__init__()
        self.net, self.reentrant = Model(attention), reentrant

    def forward(self, x, t, r):
        return checkpoint(self.net, x, t, r, use_reentrant=self.reentrant)


def requiring(data):
    return [a.clone().requires_grad_() for a in data]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_of_a_plain_step(reentrant):
    step = lambda attention: gradients(
        Checkpointed(attention, reentrant), lambda net: plain_loss(net, *requiring(batch()))
    )
    want = lambda: gradients(Model(naive), lambda net: plain_loss(net, *batch()))
    check(lambda: step(sdpa), want, "FFFFBB")


def test_selective_checkpoint_saves_attention():
    """By the policy that the site gives: the forward is not launched again."""

    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if "torch_bridge" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    def step(net):
        contexts = lambda: create_selective_checkpoint_contexts(policy)
        f = lambda *data: plain_loss(net, *data)
        return checkpoint(f, *requiring(batch()), use_reentrant=False, context_fn=contexts)

    want = lambda: gradients(Model(naive), lambda net: plain_loss(net, *batch()))
    check(lambda: gradients(Model(), step), want, "FFBB")


@pytest.mark.parametrize(("derivative", "reentrant"), [(by_func, False), (by_func, True), (by_level, False)])
def test_checkpoint_around_the_jvp(derivative, reentrant):
    def around(net):
        f = lambda *data: loss(net, derivative, False, data)
        return checkpoint(f, *requiring(batch()), use_reentrant=reentrant)

    check(lambda: gradients(Model(), around), lambda: train(by_func, False, naive), "DDDDBB")


@pytest.mark.parametrize("derivative", [by_func, by_level])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_inside_the_jvp_is_refused_by_torch(derivative, reentrant):
    """As with any operator; checkpoint around the JVP instead."""
    with pytest.raises((RuntimeError, NotImplementedError)):
        gradients(Checkpointed(sdpa, reentrant), lambda net: loss(net, derivative, False, batch()))


# ------------------------------------------------------------------------------------------------ torch's own checks


def empty_row():
    mask = torch.ones(2, 1, 3, 4, dtype=torch.bool)
    mask[0, 0, 1], mask[1, 0, :, 2] = False, False
    return mask


def numbers(*shape):
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape))
    ).requires_grad_()


SMALL = numbers(2, 2, 3, 2), numbers(2, 2, 4, 2), numbers(2, 2, 4, 3)
GRADCHECKS = {
    "Ev3": (sdpa, SMALL),
    "causal": (lambda *x: sdpa(*x, is_causal=True), [numbers(1, 2, 3, 2) for _ in range(3)]),
    "GQA": (lambda *x: sdpa(*x, enable_gqa=True), (numbers(1, 4, 3, 2), numbers(1, 2, 3, 2), numbers(1, 2, 3, 2))),
    "bias": (sdpa, (*SMALL, numbers(3, 4))),
    "empty-row": (lambda *x: sdpa(*x, attn_mask=empty_row()), SMALL),
}


@pytest.mark.parametrize(("f", "x"), GRADCHECKS.values(), ids=GRADCHECKS)
def test_gradcheck(f, x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.autograd.gradcheck(
            f, x, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
        )


@pytest.mark.parametrize(("f", "x"), GRADCHECKS.values(), ids=GRADCHECKS)
def test_gradgradcheck(f, x):
    """In float64; forward over reverse, and reverse over reverse also mapped over."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.autograd.gradgradcheck(f, x, check_fwd_over_rev=True, check_batched_grad=True)


def operands():
    inputs, tangents = (*SMALL, None), (SMALL[0].detach().sin(), None, SMALL[2].detach().cos(), None)
    static = (None, False, 0.5, "")
    o, lse, t_o, mu = (a.detach() for a in ops.forward_dual(*inputs, *tangents, *static))
    mask = numbers(1, 2, 1, 4)
    return {
        "forward": (*inputs, *static),
        "forward-bias": (*SMALL, mask, *static),
        "forward_dual": (*inputs, *tangents, *static),
        "tangent": (*inputs, o, lse, *tangents, *static),
        "backward": (*inputs, o, lse, t_o, None, *static, [True, False, True, False]),
        "backward-bias": (*SMALL, mask, o, lse, t_o, mu, *static, [True, True, True, True]),
        "backward_dual": (
            *inputs,
            o,
            lse,
            t_o,
            mu,
            *tangents,
            t_o,
            mu,
            o,
            None,
            *static,
            [True] + [False] * 3 + [True] * 3 + [False],
        ),
    }


@pytest.mark.parametrize("name", operands())
def test_opcheck(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = torch.library.opcheck(getattr(ops, name.split("-")[0]).default, operands()[name])
    assert set(results.values()) == {"SUCCESS"}


def products(call, shape=(2, 3, 64, 48, 16, 8), seen=None):
    """Matrix products of L × S × 16 and of L × S × 8 that PyTorch counts, as their sum weighted by 2 and 1."""
    *heads, queries, keys, _, narrow = shape
    with FlopCounterMode(display=False) as counter:
        call()
    unit = 2 * math.prod(heads) * (queries * keys if seen is None else seen) * narrow
    assert counter.get_total_flops() % unit == 0
    return counter.get_total_flops() // unit


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_flops_are_counted(device):
    """2, 6, 5 and 15 products, fewer where a tangent is absent or a gradient is not wanted: wide ones weigh two."""
    shapes = (2, 3, 64, 16), (2, 3, 48, 16), (2, 3, 48, 8)
    x, tx = (tuple(torch.randn(shape, device=device) for shape in shapes) for _ in range(2))
    forward, forward_dual, tangent, backward, backward_dual = 2 + 1, 2 * 3 + 3, 2 * 3 + 2, 2 * 3 + 2, 2 * 9 + 6
    attend = lambda *x: sdpa(*x)
    dual = lambda *both: jvp(attend, both[:3], both[3:])
    assert products(lambda: sdpa(*x)) == forward
    assert products(lambda: dual(*x, *tx)) == forward_dual
    assert products(lambda: jvp(lambda q: sdpa(q, *x[1:]), x[:1], tx[:1])) == forward + 2 + 1
    assert products(lambda: grad(lambda *x: sdpa(*x).sum(), (0, 1, 2))(*x)) == forward + backward
    assert products(lambda: grad(lambda q: sdpa(q, *x[1:]).sum())(x[0])) == forward + 2 * 2 + 1
    both = lambda *both: sum(a.sum() for a in dual(*both))
    assert products(lambda: grad(both, tuple(range(6)))(*x, *tx)) == forward_dual + backward_dual
    assert products(lambda: grad(both, (0, 1, 2))(*x, *tx)) == forward_dual + backward_dual - (2 * 2 + 1)
    tangent_alone = lambda: ops.tangent(
        *x, None, *ops.forward(*x, None, None, False, 1.0, ""), *tx, None, None, False, 1.0, ""
    )
    assert products(tangent_alone) == forward + tangent


@pytest.mark.parametrize(
    "options",
    [{}, dict(causal_alignment="lower_right"), dict(local_window_size=(9, 3)), dict(local_window_size=(None, -2))],
)
def test_flops_count_what_is_seen(options):
    """By causality and windows, in every product."""
    q, k = torch.randn(1, 1, 64, 16), torch.randn(1, 1, 48, 16)
    is_causal = "local_window_size" not in options
    i, j = torch.arange(64)[:, None] + (-16 if "causal_alignment" in options else 0), torch.arange(48)
    left, right = options.get("local_window_size", (None, 0))
    seen = int(((j <= i + right) & (j >= i - (64 if left is None else left))).sum())
    call = lambda: grad(lambda q, k: sdpa(q, k, k, is_causal=is_causal, **options).sum(), (0, 1))(q, k)
    assert products(call, (1, 1, 64, 48, 16, 16), seen) == 2 + 5


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_flops_in_a_ring_are_those_of_all_its_processes(order, monkeypatch):
    whole, part, options = (1, 1, 64, 16), (1, 1, 16, 16), "left=40"
    count = 0
    for rank in range(4):
        group = Group("ring", 4, rank, order)
        monkeypatch.setattr(Group, "of_word", staticmethod(lambda word, group=group: group))
        count += flops("forward", *(part,) * 3, None, None, True, 1.0, f"{options} ring={group.word}")
    assert count == flops("forward", *(whole,) * 3, None, None, True, 1.0, options)


def test_meta_and_fake_tensors():
    launched()
    a = torch.empty(2, 3, 5, 4, device="meta", requires_grad=True)
    u, du = jvp(lambda a: sdpa(a, a, a), (a,), (a.detach(),))
    (u + du).sum().backward()
    assert a.grad.device.type == "meta"
    with torch._subclasses.FakeTensorMode():
        fake = torch.randn(2, 3, 5, 4)
        assert jvp(lambda a: sdpa(a, a, a), (fake,), (fake,))[1].shape == fake.shape
    assert launched() == ""


@pytest.mark.parametrize("level", ["base", "func"])
def test_gradients_through_a_dual_level_inside_a_gradient(level):
    """Of a weight at an outer level: the curvature of an energy along t by dual numbers, differentiated in x by torch.func."""
    numbers = torch.Generator().manual_seed(0)
    x, t = torch.randn(2, 1, 1, 3, 2, dtype=torch.float64, generator=numbers)
    weight = torch.randn(2, 2, dtype=torch.float64, generator=numbers)

    def gradient_in_weight(attention):
        def curvature(x, weight):
            with forward_ad.dual_level():
                energy = lambda x: attention(x @ weight, x, x).sin().sum()
                return forward_ad.unpack_dual(grad(energy)(forward_ad.make_dual(x, t))).tangent

        def value(weight):
            square = lambda x: (curvature(x, weight) ** 2).sum()
            return vjp(lambda x: curvature(x, weight), x)[0].sin().sum() + grad(square)(x).sin().sum()

        if level == "func":
            return grad(value)(weight)
        leaf = weight.clone().requires_grad_()
        return torch.autograd.grad(value(leaf), leaf)[0]

    torch.testing.assert_close(gradient_in_weight(sdpa), gradient_in_weight(naive))


def test_gradients_of_what_is_fixed_are_not_computed():
    seen = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "torch_bridge":
                seen.append((func.overloadpacket.__name__, [*args[-1]] if isinstance(args[-1], list | tuple) else None))
            return func(*args, **(kwargs or {}))

    a, fixed = q.clone().requires_grad_(), [True, False, False, False]
    with Watching():
        (gradient,) = torch.autograd.grad(sdpa(a, k, v, bias).sin().sum(), a, create_graph=True)
        torch.autograd.grad(gradient.sin().sum(), a)
    assert [name for name, _ in seen] == ["forward", "backward", "tangent", "backward_dual", "backward"]
    assert [want for name, want in seen if "backward" in name] == [fixed, [False] * 4 + fixed, fixed]
