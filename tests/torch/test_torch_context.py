"""One sequence in several processes against one process: values and derivatives, which operators run, errors, failures."""

import concurrent.futures
import gc
import multiprocessing
import threading
import types
from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

import torch_group  # noqa: E402
import torch_group_programs as programs  # noqa: E402
from torch_bridge import context, context_parallel, groups, reorder_zigzag, restore_zigzag, zigzag_positions  # noqa: E402
from torch_bridge import scaled_dot_product_attention as sdpa  # noqa: E402

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch is built without torch.distributed")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
EVERY = [*torch_group.Sizes().cases()]
MOST = [
    "causal/ring/zigzag", "ranges/ring/zigzag", "ranges-of-key-heads/ulysses/contiguous",
    "ranges/all_gather/zigzag", "causal/ulysses/zigzag", "groups/all_gather/zigzag", "cross/ring/contiguous",
    "segments/ring/contiguous", "lengths/ring/zigzag", "window/ring/contiguous", "bias/ring/contiguous",
    "bias-of-keys/ulysses/zigzag", "sinks/ulysses/contiguous", "dropout/ring/zigzag", "lse/ulysses/zigzag",
]  # fmt: skip


def test_two_processes(tmp_path):
    """The most telling cases, what is launched, and errors that name argument and remedy, by the same two processes."""
    parts = [(torch_group.cases, MOST), (programs.launches,), (programs.errors,), (programs.packed_sequences,)]
    assert torch_group.spawn(torch_group.all_of, 2, tmp_path, parts) == []


@pytest.mark.thorough
@pytest.mark.parametrize("names", [EVERY[:7], EVERY[7:13], EVERY[13:]], ids=lambda names: names[0])
@pytest.mark.parametrize("n", [2, 4])
def test_every_feature(tmp_path, n, names):
    assert torch_group.spawn(torch_group.cases, n, tmp_path, names) == []


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_dtype(tmp_path, dtype):
    names = ["causal", "bias/ring", "segments/ulysses", "bias-of-keys/all_gather", "dropout/ring"]
    assert torch_group.spawn(torch_group.cases, 2, tmp_path, names, torch_group.Sizes(), dtype) == []


@pytest.mark.thorough
@pytest.mark.parametrize("n", [2, 4])
def test_models(tmp_path, n):
    """DDP, FSDP2 and compiled, with the JVP in the step."""
    assert torch_group.spawn(programs.models, n, tmp_path) == []


@pytest.mark.thorough
@pytest.mark.parametrize("n", [2, 4])
def test_dtensors(tmp_path, n):
    assert torch_group.spawn(programs.dtensors, n, tmp_path) == []


@pytest.mark.thorough
def test_compiled(tmp_path):
    assert torch_group.spawn(programs.compiled, 2, tmp_path) == []


def test_a_process_that_fails_ends_the_others(tmp_path):
    """Nobody kills them: whoever waits for the one that is gone gets an error."""
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=programs.failing, args=(rank, 2, tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=100)
    assert [process.exitcode for process in processes] == [1, 1]
    assert [(tmp_path / f"error-{rank}").read_text() for rank in range(2)] == ["waited in vain", "failed on purpose"]


@pytest.mark.thorough
def test_benchmark(tmp_path, monkeypatch, capfd):
    """What is timed was right, and is written down."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import torch_devices

    shape = dict(batch=1, lengths=[64], heads=[2], head_dims=[8], feature="causal", dtype="float32")
    timing = dict(rounds=2, seconds=0.0, rest=0.0, output=tmp_path / "out")
    options = types.SimpleNamespace(devices=2, jobs=["forward + JVP"], contenders=None, **shape, **timing)
    assert torch_devices.run(options) == 0
    ways = ["one GPU", *(s + order for s in ("ulysses", "ring", "all_gather") for order in ("", " zigzag"))]
    assert [line.split(",")[1] for line in (tmp_path / "out.csv").read_text().splitlines()[1:]] == ways
    assert "differs" not in capfd.readouterr().out


def test_the_order_of_zigzag():
    x = torch.arange(24).reshape(2, 12)
    there = reorder_zigzag(x, 3)
    assert there[0].tolist() == [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7] == zigzag_positions(12, 3).tolist()
    assert torch.equal(restore_zigzag(there, 3), x)
    assert torch.equal(reorder_zigzag(x.mT, 3, 0), there.mT)
    with pytest.raises(ValueError, match="pad it to 12"):
        reorder_zigzag(x[:, :11], 3)


def test_errors_without_processes():
    x = torch.ones(1, 2, 4, 4)
    with pytest.raises(ValueError, match="init_process_group"), context_parallel(object()):
        pass
    with pytest.raises(ValueError, match="`context_strategy` says how a group shares a sequence: pass `context_group`"):
        sdpa(x, x, x, context_strategy="ring")
    with context_parallel(None):
        assert torch.equal(sdpa(x, x, x), x)


@pytest.fixture
def named(monkeypatch):
    """Contexts by name, of two processes that nobody needs to have started."""
    group = lambda name: groups.Group(name, 2, 0)
    monkeypatch.setattr(context, "context_of", lambda _, name, strategy, order: context.Context(group(name), strategy))
    return lambda: None if (found := context.current(None, None, None)) is None else found.group.name


def test_contexts_of_threads_do_not_cross(named):
    """Each has its own, in whatever order they close; a thread that opens none, as autograd's, takes the innermost of all."""

    def other():
        with context_parallel("b"):
            assert named() == "b"
            steps.wait()  # both are open
            steps.wait()  # "a" is closed
            with context_parallel(None):
                assert named() is None
            assert named() == "b"
            return "passed"

    steps = threading.Barrier(2, timeout=60)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        with context_parallel("a"):
            result = threads.submit(other)
            steps.wait()
            assert named() == "a"
        with context_parallel("c"):
            assert named() == "c"
        steps.wait()
        assert result.result() == "passed"
        with context_parallel("d"):
            assert threads.submit(named).result() == "d"
    assert named() is None


def test_compiled_functions_open_contexts(named):
    @partial(torch.compile, backend="eager", fullgraph=True)
    def inside(x):
        with context_parallel("b"):
            first = x + len(named())
        return first, context.current(None, None, None) is None

    x = torch.zeros(1)
    assert inside(x)[1]
    with context_parallel("a"):
        assert not inside(x)[1]
        assert named() == "a"
    assert named() is None


def test_what_a_group_agreed_on_is_bounded(monkeypatch):
    class Processes:
        pass

    asked, before = [], len(groups._agreed)
    group, other = groups.Group("one", 2, 0), groups.Group("other", 2, 0)
    found = {"one": Processes(), "other": Processes()}
    monkeypatch.setattr(groups.private, "process_group", found.get)
    monkeypatch.setattr(groups, "MOST", 2)
    monkeypatch.setattr(groups, "all_gather", lambda group, result, a: asked.append(group) or result.copy_(a.repeat(2)))
    for what in "aabbacab":
        groups.agree(group, what, [torch.zeros(1)])
        groups.agree(other, "a", [torch.zeros(1)])  # of which each group remembers its own
    assert asked.count(other) == 1
    assert asked.count(group) == 5  # a b c, and anew a b
    del found["one"]
    gc.collect()
    assert len(groups._agreed) == before + 1
