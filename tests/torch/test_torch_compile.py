"""torch.compile and torch.export: right numbers by the kernels of eager mode, or a clear error; never wrong numbers."""

import contextlib
import math
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import warnings

import pytest

torch = pytest.importorskip("torch")

from functorch.compile import make_boxed_func  # noqa: E402
from torch import nn  # noqa: E402
from torch._dynamo import reset  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch.func import grad, hessian, jacfwd, jvp, vmap  # noqa: E402

import torch_bridge  # noqa: E402
from torch_bridge import scaled_dot_product_attention as sdpa  # noqa: E402
from torch_bridge.attention import CODE  # noqa: E402
from torch_derivatives import of_query, square  # noqa: E402
from torch_oracle import (  # noqa: E402
    Model,
    batch,
    by_func,
    by_level,
    check,
    gradients,
    loss,
    naive,
    plain_loss,
)

torch.manual_seed(0)
q, k, v, tq, tk, tv = (torch.randn(2, 3, 5, 4, dtype=torch.float64) for _ in range(6))
x, tx = (q, k, v), (tq, tk, tv)
BEFORE_2_14 = torch.__version__ < "2.14"
SLOW_INDUCTOR = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]  # it compiles C++


@pytest.fixture(autouse=True)
def fresh():
    reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def compiled(f, backend, fullgraph=True, **options):
    return torch.compile(f, backend=backend, fullgraph=fullgraph, **options)


# ------------------------------------------------------------------------------------------------ a training step

STEPS = {  # the loss, its arguments, launches
    "plain": (plain_loss, (), "FFBB"),
    "func-stopped": (loss, (by_func, False), "DDBB"),
    "func-through": (loss, (by_func, True), "DDSS"),
    "level-stopped": (loss, (by_level, False), "DDBB"),
    "level-through": (loss, (by_level, True), "DDSS"),
}


def step(run, f, arguments, attention=sdpa):
    data = batch() if f is plain_loss else (batch(),)
    return gradients(Model(attention), lambda net: run(net, *arguments, *data))


@pytest.mark.parametrize("fullgraph", [True, pytest.param(False, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", STEPS)
def test_step(name, fullgraph):
    f, arguments, launches = STEPS[name]
    run = compiled(lambda *a: f(*a), "aot_eager", fullgraph)
    by_jvp = (by_func, *arguments[1:]) if arguments else ()  # torch's dual level trips over its own softmax
    check(lambda: step(run, f, arguments), lambda: step(f, f, by_jvp, naive), launches)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["func-stopped", pytest.param("plain", marks=pytest.mark.slow)])
def test_step_by_inductor(name):
    f, arguments, launches = STEPS[name]
    run = compiled(lambda *a: f(*a), "inductor")
    check(lambda: step(run, f, arguments), lambda: step(f, f, arguments, naive), launches)


@pytest.mark.slow
@pytest.mark.parametrize("derivative", [by_func, by_level])
def test_gradient_through_the_jvp_by_inductor(derivative):
    """Before PyTorch 2.14 inductor writes into the zero tangents of biases (pytorch#177261), whatever the attention; an option
    prevents it."""
    for attention in (sdpa, naive) if BEFORE_2_14 else ():
        reset()
        with pytest.raises(RuntimeError, match="ZeroTensor"):
            step(compiled(lambda *a: loss(*a), "inductor"), loss, (derivative, True), attention)
    options = {"allow_buffer_reuse": False} if BEFORE_2_14 else None
    run = torch.compile(lambda *a: loss(*a), fullgraph=True, options=options)
    check(lambda: step(run, loss, (derivative, True)), lambda: step(loss, loss, (by_func, True), naive), "DDSS")


# ------------------------------------------------------------------------------------------------ from inside

INSIDE = {
    "jvp-of-grad": (lambda s: jvp(grad(square(s), (0, 1, 2)), x, tx), "DS"),
    "grad-of-jvp": (lambda s: grad(lambda *x: square(lambda *x: jvp(s, x, tx)[1])(*x), (0, 1, 2))(*x), "DS"),
    "grad-of-grad": (lambda s: grad(lambda q: (grad(square(of_query(s)))(q) * tq).sum())(q), None),
    "jvp-of-jvp": (lambda s: jvp(lambda q: jvp(of_query(s), (q,), (tq,))[1], (q,), (tk,)), ""),
    "hessian": (lambda s: hessian(square(of_query(s)))(q), "FTS"),
    "jacfwd": (lambda s: jacfwd(of_query(s))(q), "FT"),
    "vmap-of-jvp": (lambda s: vmap(lambda t: jvp(of_query(s), (q,), (t,))[1])(torch.stack([tq, tk])), "FT"),
    "bias": (lambda s: jvp(lambda q, b: s(q, k, v, attn_mask=b), (q, tq[:1, :, :, :1]), (tq, tk[:1, :, :, :1])), "D"),
    "mask": (
        lambda s: jvp(lambda q: s(q, k, v, attn_mask=torch.ones(5, 5, dtype=torch.bool).tril()), (q,), (tq,)),
        "D",
    ),
    "GQA-causal": (
        lambda s: jvp(lambda k: s(q, k, v[:, :1], is_causal=True, enable_gqa=True), (k[:, :1],), (tk[:, :1],)),
        "D",
    ),
    "packed": (lambda s: packed(s, torch.stack([q, k, v], 2)), "F"),
}


def packed(s, qkv):
    if s is naive:
        return naive(*qkv.transpose(1, 3).unbind(2)).transpose(1, 2)
    return torch_bridge.flash_attn_qkvpacked_func(qkv)


@pytest.mark.parametrize("backend", SLOW_INDUCTOR)
@pytest.mark.parametrize("name", INSIDE)
def test_transformation_inside(name, backend):
    f, launches = INSIDE[name]
    want = vmapped_naive if name == "vmap-of-jvp" else lambda: f(naive)
    check(lambda: compiled(lambda: f(sdpa), backend)(), want, launches)


def vmapped_naive():
    return torch.stack([jvp(of_query(naive), (q,), (t,))[1] for t in (tq, tk)])


@pytest.mark.parametrize("backend", SLOW_INDUCTOR)
def test_dynamic_shapes(backend):
    run = compiled(lambda s, *x: jvp(s, x, x), backend, dynamic=True)
    cut = lambda n: [a[:, :, :n].clone() for a in x]
    check(
        lambda: [run(sdpa, *cut(n)) for n in (5, 4, 3)],
        lambda: [jvp(naive, tuple(cut(n)), tuple(cut(n))) for n in (5, 4, 3)],
        "DDD",
    )


def test_dynamic_shapes_with_sinks():
    sinks = q[0, :, 0, 0].contiguous()
    tangent = lambda s, q: jvp(lambda q, sinks: s(q, k, v, sinks=sinks), (q, sinks), (q, -sinks))
    run = compiled(tangent, "aot_eager", dynamic=True)
    for n in (5, 4):
        query = q[:, :, :n].clone()
        check(lambda a=query: run(sdpa, a), lambda a=query: tangent(naive, a), "D")


def test_errors_reach_the_user():
    with pytest.raises(Exception, match="dropout_p"):
        compiled(lambda: sdpa(q, k, v, dropout_p=1.5), "aot_eager", fullgraph=False)()
    with pytest.raises(Exception, match="enable_gqa"):
        compiled(lambda: sdpa(q, k[:, :2], v[:, :2]), "aot_eager", fullgraph=False)()


def test_patched_model():
    def patched():
        net = Model(lambda *x: nn.functional.scaled_dot_product_attention(*x))
        with torch_bridge.patch():
            return gradients(net, lambda net: compiled(lambda *a: loss(*a), "aot_eager")(net, by_func, False, batch()))

    check(patched, lambda: gradients(Model(naive), lambda net: loss(net, by_func, False, batch())), "DDBB")


# ------------------------------------------------------------------------------------------------ from outside


def outside(derivative, backend, fullgraph):
    """A compiled model, differentiated from outside."""
    net = Model()
    return gradients(net, lambda _: loss(compiled(net, backend, fullgraph), derivative, False, batch()))


@pytest.mark.parametrize("backend", SLOW_INDUCTOR)
def test_jvp_of_a_compiled_model(backend):
    """torch runs it without compilation, and refuses where that is not allowed."""
    want = lambda: gradients(Model(naive), lambda net: loss(net, by_func, False, batch()))
    check(lambda: outside(by_func, backend, False), want, "DDBB")
    reset()
    with pytest.raises(Exception, match="Unsupported functorch tracing attempt"):
        outside(by_func, backend, True)
    with torch.no_grad():
        check(
            lambda: by_func(compiled(Model(), backend, False), *batch()), lambda: by_func(Model(naive), *batch()), "DD"
        )


@pytest.mark.parametrize("backend", SLOW_INDUCTOR)
def test_dual_level_around_a_compiled_model(backend):
    """Before PyTorch 2.14 the tangents of all inputs would be lost there, silently (pytorch#187284)."""
    if BEFORE_2_14:
        with pytest.raises(RuntimeError, match="loses the tangents"):
            outside(by_level, backend, False)
    else:
        want = lambda: gradients(Model(naive), lambda net: loss(net, by_func, False, batch()))
        check(lambda: outside(by_level, backend, False), want, "DDBB")


@pytest.mark.parametrize("backend", SLOW_INDUCTOR)
def test_dual_level_around_a_compiled_model_without_gradients(backend):
    with torch.no_grad():
        run = lambda: by_level(compiled(Model(), backend, False), *batch())
        if backend == "inductor" and BEFORE_2_14:
            with pytest.raises(RuntimeError, match="loses the tangents"):
                run()
        else:
            check(run, lambda: by_func(Model(naive), *batch()), "DD")


@pytest.mark.parametrize("backend", SLOW_INDUCTOR)
@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
def test_a_compiled_model_without_tangents_beside_a_level(backend, mode):
    """Of the same thread or of another, in PyTorch for the whole process."""
    net, inputs = Model(), batch()[:3]
    run = compiled(net, backend, False)
    with mode():
        expected = net(*inputs)
    got, level = [], torch.autograd.forward_ad.dual_level

    def call():
        with mode():
            got.append(run(*inputs))

    def from_another_thread(x):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return x.sin()

    with level():
        call()  # compiled here
        call()
        from_another_thread(inputs[0])
    jvp(from_another_thread, inputs[:1], inputs[:1])
    assert len(got) == 4
    for a in got:
        torch.testing.assert_close(a, expected)


def test_programs_name_the_sources_of_their_gradients():
    """PyTorch keeps them on disk by operators' names and arguments: after an update, old gradients would be used."""
    graphs = []
    torch.compile(sdpa, backend=lambda graph, _: graphs.append(graph.code) or graph.forward)(*x)
    assert CODE in graphs[0]


@pytest.mark.slow
def test_programs_of_other_sources_are_not_used(tmp_path):
    program = """if True:
        import torch, torch_bridge
        q = torch.ones(1, 1, 4, 8).cumsum(2).requires_grad_()
        function = torch.compile(lambda q: torch_bridge.scaled_dot_product_attention(q, q, q).sum())
        print(torch.autograd.grad(function(q), q)[0].sum().item())"""
    package = pathlib.Path(torch_bridge.__file__).parent
    shutil.copytree(package, tmp_path / package.name)
    rule = tmp_path / package.name / "rules.py"
    old = 'return _from_above("backward", '
    new = old.replace("return ", "return tuple(2 * g for g in ")
    options = dict(cwd=tmp_path, env=dict(os.environ, TORCHINDUCTOR_CACHE_DIR=f"{tmp_path / 'cache'}"), text=True)
    run = lambda: float(subprocess.check_output([sys.executable, "-c", program], **options))
    before, source = run(), rule.read_text()
    line = next(line for line in source.splitlines() if old in line)
    rule.write_text(source.replace(line, line.replace(old, new) + ")"))
    assert run() == pytest.approx(2 * before)


@pytest.mark.skipif(BEFORE_2_14, reason="fails inside of torch: CompiledFunction has no jvp")
def test_rules_are_not_traced_behind_a_break():
    weight = tq.mT @ tq
    weight.requires_grad_()

    def model(y, *_):
        y = y @ weight
        torch._dynamo.graph_break()
        return sdpa(y, y, y)

    run = compiled(lambda: sum(a.square().mean() for a in by_level(model, q, k, None, tq)), "aot_eager", False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*does not know how to trace")
        run().backward()


def test_double_backward_of_a_compiled_function_is_refused_by_torch():
    a = q.clone().requires_grad_()
    (first,) = torch.autograd.grad(compiled(square(of_query(sdpa)), "aot_eager")(a), a, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(first.sum(), a)


# ------------------------------------------------------------------------------------------------ export


class Attention(nn.Module):
    forward = staticmethod(sdpa)


class Derivative(nn.Module):
    def forward(self, *x):
        return jvp(sdpa, x, x)


def operators_in(program):
    return [str(n.target).split(".")[1] for n in program.graph.nodes if "torch_bridge" in str(n.target)]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="fails inside of torch: Expected FakeTensor")
def test_export():
    with torch.no_grad():
        for strict in (True, False):
            assert operators_in(torch.export.export(Attention(), x, strict=strict)) == ["forward"]
        program = torch.export.export(Derivative(), x).run_decompositions()
        assert operators_in(program) == ["forward_dual"]
        check(lambda: program.module()(*x), lambda: jvp(naive, x, x), "D")
    length = torch.export.Dim("length", min=2)
    program = torch.export.export(Attention(), x, dynamic_shapes=[{2: length}] * 3)
    cut = [a[:, :, :3] for a in x]
    check(lambda: program.module()(*cut), lambda: naive(*cut), "F")


def test_windows_may_change():
    q = batch()[0]
    attend = lambda q, size: sdpa(q, q, q, local_window_size=size)
    run = compiled(attend, "aot_eager")
    for size in (1, 2, (3, 0)):
        torch.testing.assert_close(run(q, size), attend(q, size))


def test_in_a_branch():
    q = batch()[0]
    attend = lambda q: torch.cond(q.sum() > -1e9, lambda q: sdpa(q, q, q).sum(), lambda q: q.sum(), (q,))
    torch.testing.assert_close(compiled(attend, "aot_eager", dynamic=True)(q), sdpa(q, q, q).sum())


def test_numbers_may_be_symbolic():
    q = torch.randn(1, 2, 5, 4)
    scaled = torch.compile(lambda q, scale: sdpa(q, q, q, scale=scale), backend="eager", fullgraph=True)
    for scale in (0.3, 0.4):
        torch.testing.assert_close(scaled(q, scale), sdpa(q, q, q, scale=scale))
    by_shape = lambda q: sdpa(q, q, q, scale=q.shape[-1] ** -0.5)
    torch.testing.assert_close(torch.compile(by_shape, backend="eager", fullgraph=True, dynamic=True)(q), by_shape(q))


# ------------------------------------------------------------------------------------------------ beside eager


def test_a_compiled_step_is_compared_with_the_eager_one():
    net, seen = Model(), []

    def step(net, *inputs):
        o, t_o = by_func(net, *inputs)
        noise = nn.functional.dropout(o, 0.5)
        seen.append(noise.detach())
        return ((noise + t_o.detach()) ** 2).mean(), {"norm": o.norm()}

    def halved(graph, inputs):
        return make_boxed_func(lambda *a: [g if g is None else g / 2 for g in graph(*a)])

    wrong = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph), bw_compiler=halved)
    state = torch.get_rng_state()
    assert torch_bridge.compare_compiled(step, net, *batch(), parameters=net.parameters(), backend="aot_eager") < 1e-12
    torch.testing.assert_close(seen[0], seen[-1])
    assert torch.equal(state, torch.get_rng_state())
    error = torch_bridge.compare_compiled(step, net, *batch(), parameters=net.parameters(), backend=wrong)
    assert abs(error - 0.5) < 1e-12
    assert torch_bridge.compare_compiled(step, net, *batch(), backend=wrong) < 1e-12  # the loss alone

    def unlike():
        return q.detach().requires_grad_() * (nan if torch.compiler.is_compiling() else 1)

    nan = torch.nan
    assert math.isnan(torch_bridge.compare_compiled(unlike, backend="eager"))
    nothing = lambda: net.time.weight.sum() if torch.compiler.is_compiling() else net.time.bias.sum()
    assert torch_bridge.compare_compiled(nothing, parameters=[net.time.bias], backend="eager") == math.inf
    with pytest.raises(TypeError, match="`step` must return tensors, such as a loss: got none"):
        torch_bridge.compare_compiled(lambda: None)
    with pytest.raises(ValueError, match="nothing that `step` returns requires a gradient"):
        torch_bridge.compare_compiled(lambda: q, parameters=net.parameters())
