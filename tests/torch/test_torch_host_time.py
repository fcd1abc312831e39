"""What an eager call on a GPU spares its host: the dispatcher, where nobody listens there, and allocations."""

import collections
import contextlib
import types

import pytest

torch = pytest.importorskip("torch")

from torch.autograd import forward_ad  # noqa: E402
from torch.func import grad, jvp, vmap  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from jax_flash_jvp.problem import Problem  # noqa: E402
from torch_bridge import compute, reference, rules, signatures  # noqa: E402
from torch_bridge import scaled_dot_product_attention as sdpa  # noqa: E402
from torch_derivatives import DERIVATIVES  # noqa: E402
from torch_launchers import PlannedLauncher  # noqa: E402
from torch_oracle import (  # noqa: E402
    check,
    leaves,
    naive,
    normal,
)

x, tx = (tuple(normal(1, 2, 5, 4, seed=seed + i) for i in range(3)) for seed in (0, 3))
JOBS = {
    "forward": lambda s: s(*x),
    "no-grad": lambda s: torch.no_grad()(s)(*x),
    "backward": lambda s: backward(s),
    "jvp": lambda s: jvp(s, x, tx),
    "jvp-of-query": lambda s: jvp(lambda q: s(q, *x[1:]), x[:1], tx[:1]),
    "backward-of-jvp": lambda s: backward(lambda *x: jvp(s, x, tx)[1]),
}


def backward(s):
    arrays = [a.clone().requires_grad_() for a in x]
    s(*arrays).sin().sum().backward()
    return [a.grad for a in arrays]


def by_level(s):
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(s(*map(forward_ad.make_dual, x, tx))))


@pytest.fixture
def dispatched(monkeypatch):
    """The operators that go to the dispatcher from the rules, on a machine that takes CPUs for GPUs without kernels."""
    seen, real = [], rules.ops

    class Ops:
        def __getattr__(self, name):
            seen.append(name)
            return getattr(real, name)

    monkeypatch.setattr(rules, "ops", Ops())
    monkeypatch.setattr(compute, "on_nvidia", lambda a: a.device.type == "cpu")
    nothing = types.SimpleNamespace(planned=lambda name, args: None, served=lambda x: False)
    monkeypatch.setattr(compute, "_launch", lambda: nothing)
    return seen


@pytest.mark.parametrize("job", JOBS)
def test_nobody_listens(job, dispatched):
    check(lambda: JOBS[job](sdpa), lambda: JOBS[job](naive))
    assert dispatched == []


@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_derivatives(derivative, dispatched):
    run, launches = DERIVATIVES[derivative]
    check(lambda: run(sdpa), lambda: run(naive), launches)


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl


def within(context, job):
    def run(s):
        with context():
            return job(s)

    return run


def left_over():
    """A tensor of a level of torch.func that is closed."""
    kept = []
    grad(lambda q: kept.append(q) or q.sum())(x[1])
    return kept[0]


LISTENERS = {
    "left-over": lambda s: s(x[0], left_over(), x[2]),
    "left-over-in-jvp": lambda s: jvp(lambda q: s(q, left_over(), x[2]), x[:1], tx[:1]),
    "mode": within(Mode, JOBS["backward"]),
    "mode-around-jvp": within(Mode, JOBS["jvp"]),
    "flops": within(lambda: FlopCounterMode(display=False), JOBS["forward"]),
    "profiler": within(torch.profiler.profile, JOBS["forward"]),
    "profiler-around-jvp": within(torch.profiler.profile, JOBS["jvp"]),
    "vmap": lambda s: vmap(s)(*(a[:, None] for a in x)),
    "grad": lambda s: grad(lambda q: s(q, *x[1:]).sin().sum())(x[0]),
    "jvp-of-jvp": lambda s: jvp(lambda q: jvp(s, (q, *x[1:]), tx)[1], x[:1], tx[:1]),
    "negative": lambda s: s(torch.complex(*x[:2]).conj().imag, *x[1:]),
    "subclass": lambda s: s(x[0].as_subclass(Subclass), *x[1:]),
    "inference": within(torch.inference_mode, JOBS["forward"]),
    "trace": lambda s: torch.jit.trace(lambda q: s(q, *x[1:]), x[0], check_trace=False)(x[0]),
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("listener", LISTENERS)
def test_somebody_may_listen(listener, dispatched):
    run = LISTENERS[listener]
    got = [a.as_subclass(torch.Tensor) for a in leaves(run(sdpa))]
    assert dispatched
    check(lambda: got, lambda: run(naive))


def test_levels_are_left_as_they_were_after_an_error(dispatched, monkeypatch):
    def fail(*_, **__):
        raise ValueError("no memory")

    monkeypatch.setattr(reference, "run", fail)
    with pytest.raises(ValueError, match="no memory"):
        jvp(sdpa, x, tx)
    monkeypatch.undo()
    check(lambda: jvp(sdpa, x, tx), lambda: jvp(naive, x, tx))
    check(lambda: by_level(sdpa), lambda: by_level(naive))


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[function._schema.name.removeprefix("aten::")] += 1
        return function(*args, **(kwargs or {}))


# name: (groups of tensors, what is wanted, results, whether kernels hand something to one another)
CALLS = {
    "forward": (dict(), (), 2, False),
    "forward_dual": (dict(tx=True), (), 4, False),
    "tangent": (dict(tx=True, y=True), (), 2, False),
    "backward": (dict(cy=True, y=True), [True, True, True, False], 3, True),
    "backward_dual": (dict(tx=True, cy=True, tcy=True, y=True, ty=True), [True, True, True, False] * 2, 6, True),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_by_a_plan_allocates_its_results_and_one_piece_more(name):
    """And nothing for outputs that nobody wants, of which the kernels of a backward have a dozen."""
    launch, plans = (pytest.importorskip(f"torch_bridge.{name}") for name in ("launch", "plans"))
    groups, want, results, between = CALLS[name]
    make = lambda seed: normal(1, 2, 17, 8, seed=seed, dtype=torch.float32).transpose(1, 2).contiguous().transpose(1, 2)
    statistic = torch.zeros(1, 2, 17)
    tensors = dict(
        x=(*map(make, range(3)), None), tx=(*map(make, range(3, 6)), None), cy=(make(6), None), tcy=(make(7), None),
        y=(make(8), statistic), ty=(make(9), statistic.clone()),
    )  # fmt: skip
    given = {group: tensors[group] for group in signatures.OPERATORS[name].groups if group == "x" or group in groups}
    args = [*(a for group in given.values() for a in group), None, False, 0.3, "", *([want] if want else [])]
    launcher = PlannedLauncher()
    got = launch.run(launcher, name, reference.Case(Problem(0.3)), **given, **(dict(want=want) if want else {}))
    plan = plans.made(args, launcher.launched, got)
    _, addresses = plans.look(name, args)
    with Counted() as counted:
        again = plans.follow(plan, args, addresses)
    assert counted.calls == collections.Counter(empty_strided=results) + collections.Counter(empty=int(between))
    for a, b in zip(again, got, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


def test_what_is_made_of_addresses_is_kept(monkeypatch):
    """Of a training that sees ever new addresses no more than so many fill the memory."""
    plans = pytest.importorskip("torch_bridge.plans")
    monkeypatch.setattr(plans.Addressed, "MOST", 2)
    made = []
    maps = plans.Addressed(lambda address: made.append(address) or f"map of {address}")
    assert [maps[16], maps[32], maps[16]] == ["map of 16", "map of 32", "map of 16"]
    assert made == [16, 32]
    assert maps[48] == "map of 48"
    assert len(maps) == 1


def fails(*args):
    raise TypeError("the launcher takes other arguments")


@pytest.mark.parametrize("beneath", [None, fails, lambda *args: OTHERS], ids=["none", "plain", "closure"])
def test_a_launcher_that_takes_descriptors_apart_otherwise_is_noticed(beneath, monkeypatch):
    launch = pytest.importorskip("torch_bridge.launch")
    active = types.SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: "stream")
    monkeypatch.setattr(launch.triton.runtime, "driver", types.SimpleNamespace(active=active))
    monkeypatch.setattr(launch, "_encoder", lambda descriptor, metadata: lambda address: ["map", 2, 3])
    run = types.SimpleNamespace(launch=beneath) if beneath else types.SimpleNamespace()
    compiled = types.SimpleNamespace(run=run, metadata=types.SimpleNamespace(tensordesc_meta=["meta"]))
    with pytest.raises(launch.OTHERWISE):
        launch._again(compiled, 7, [types.SimpleNamespace(base=torch.zeros(2, 3), block_shape=[1, 1])])


class Doubles:
    """A kernel, and what Triton would give of it once it is compiled: all that `_again` knows of."""

    arg_names = ("A", "OUT")
    __name__ = "doubles"

    def __init__(self, **compiled):
        self.compiled = types.SimpleNamespace(
            run=lambda *args: self.double(*args[-2:]), metadata=None, function=None, packed_metadata=None
        )
        vars(self.compiled).update(compiled)

    def __getitem__(self, grid):
        def launch(a, out, **options):
            self.double(a, out)
            return self.compiled

        return launch

    def double(self, a, out):
        out.copy_(2 * a)


OTHERS = {  # what a plan needs of Triton, taken away or changed
    "compiled": lambda patch, launch, kernel: setattr(kernel, "compiled", None),
    "run": lambda patch, launch, kernel: delattr(kernel.compiled, "run"),
    "metadata": lambda patch, launch, kernel: delattr(kernel.compiled, "metadata"),
    "driver": lambda patch, launch, kernel: patch.delattr(launch.triton.runtime, "driver"),
    "knobs": lambda patch, launch, kernel: patch.delattr(launch.triton, "knobs"),
    "arguments": lambda patch, launch, kernel: setattr(kernel.compiled, "run", fails),
}


@pytest.mark.parametrize("other", OTHERS)
def test_where_tritons_launcher_is_otherwise_it_launches_every_call(other, monkeypatch, caplog):
    launch, plans = (pytest.importorskip(f"torch_bridge.{name}") for name in ("launch", "plans"))
    from jax_flash_jvp.kernels.launcher import Launch, Output

    kernel = Doubles()
    active = types.SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: "stream")
    monkeypatch.setattr(launch.triton.runtime, "driver", types.SimpleNamespace(active=active))
    monkeypatch.setattr(launch, "_properties", lambda device: (80, 132, False))
    monkeypatch.setattr(launch, "_on", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(plans, "plans", {})
    monkeypatch.setattr(plans._Kept, "plans", True)
    OTHERS[other](monkeypatch, launch, kernel)

    def run(launcher, name, case, **groups):
        job = Launch(kernel, 1, dict(A=groups["x"][0]), {}, dict(OUT=Output((3,), "float32")), {}, 4, 1)
        return [launcher.launch(job)["OUT"]]

    monkeypatch.setattr(launch, "run", run)
    for seed in range(3):
        a = normal(3, seed=seed, dtype=torch.float32)
        args = [a, a, a, None, None, False, 0.3, "", False]
        results = launch.planned("forward", args)
        if results is None:
            results = launch.computed("forward", args, dict(x=(a,)), reference.Case(Problem(0.3)))
        assert torch.equal(results[0], 2 * a)
    assert plans.plans == {}
    assert caplog.text.count("every call of attention is prepared anew") == 1
