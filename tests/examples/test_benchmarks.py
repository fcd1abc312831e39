"""The benchmarks at tiny sizes: they run, count operations as published, and do not time what is wrong."""

import csv
import fcntl
import functools
import importlib
import importlib.machinery
import sys
import types
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import attention as benchmark  # noqa: E402
import forces  # noqa: E402
import gradient_of_gradient  # noqa: E402
import host_time  # noqa: E402
import jax_calls  # noqa: E402
import laplacian  # noqa: E402
import meanflow  # noqa: E402
import measure  # noqa: E402
import published  # noqa: E402
import regret  # noqa: E402
import regret_page  # noqa: E402
import robot_policy  # noqa: E402
import torch_calls  # noqa: E402
import visibility  # noqa: E402
from measure import PRODUCTS, Case, Contender, Oracle  # noqa: E402
from steps import Step  # noqa: E402

torch.set_num_threads(1)
QUICK = ["--rounds", "1", "--rest", "0", "--seconds", "0.001", "--matmul-size", "32"]
TINY = [*QUICK, "--lengths", "32", "--head-dims", "16", "--heads", "2"]
FRAMEWORKS = {"jax": jax_calls, "torch": torch_calls}
COMPARED = {"jax": ["jax-flash-jvp", "XLA"], "torch": ["torch_bridge", "SDPA flash"]}


@pytest.fixture(autouse=True)
def no_overhead(monkeypatch):
    """It takes seconds, and is tested where it is fast."""
    for framework in FRAMEWORKS.values():
        monkeypatch.setattr(framework, "overhead", lambda: "overhead")


@pytest.mark.thorough
def test_one_sequence_over_devices(tmp_path, capsys):
    output = tmp_path / "out"
    arguments = [
        "--devices",
        "2",
        "--feature",
        "causal",
        "--dtype",
        "float32",
        "--jobs",
        "forward + JVP",
        "--output",
        str(output),
    ]
    assert benchmark.main([*TINY, *arguments]) == 0
    ways = [
        "one GPU",
        *(f"{s}{order}" for s in ("ulysses", "ring", "all_gather") for order in ("", " zigzag")),
        "under jit",
    ]
    assert table(output) == [("forward + JVP", who) for who in ways]
    assert "differs" not in capsys.readouterr().out


def table(path):
    with open(path.with_suffix(".csv"), newline="") as file:
        return [(row["job"], row["who"]) for row in csv.DictReader(file)]


@pytest.mark.parametrize(
    ("name", "jobs", "feature"),
    [
        ("jax", ["forward + JVP"], "causal"),
        ("jax", ["dual backward"], "mask"),
        ("jax", ["backward"], "padding"),
        ("jax", ["forward + JVP"], "bias"),
        ("jax", ["forward + JVP"], "teacher-forcing"),
        ("jax", ["backward"], "block-sparse"),
        ("torch", list(PRODUCTS), "causal"),
        ("torch", ["dual backward"], "block-sparse"),
        ("torch", ["forward + JVP"], "varlen"),
        ("torch", ["forward", "dual backward"], "mask"),
        ("torch", ["forward + JVP"], "padding"),
        ("torch", ["backward"], "bias"),
    ],
)
def test_attention(name, jobs, feature, tmp_path, capsys):
    ours, other = COMPARED[name]
    selected = ["--framework", name, "--jobs", *jobs, "--contenders", ours, other, "--batch", "2"]
    assert benchmark.main([*TINY, *selected, "--feature", feature, "--output", str(tmp_path / "out")]) == 0
    contenders = FRAMEWORKS[name].CONTENDERS
    expected = [(job, who) for job in jobs for who in (ours, other) if job in contenders[who].jobs]
    assert table(tmp_path / "out") == expected
    assert (tmp_path / "out.png").exists()
    rows = benchmark.read(tmp_path / "out.csv")
    assert [(r.job, r.who) for r in rows] == expected
    assert {(r.batch, r.feature) for r in rows} == {(2, feature)}
    benchmark.plot([*rows, *(r._replace(who="another") for r in rows)], tmp_path / "both.png")
    assert "WRONG" not in capsys.readouterr().out


def test_ways_to_say_who_sees_whom(tmp_path, capsys, monkeypatch):
    arguments = [*TINY, "--dtype", "float32", "--output", str(tmp_path / "out"), "--longest-mask", "32"]
    assert visibility.main(arguments) == 0
    with open(tmp_path / "out.csv", newline="") as file:
        ways = [row["way"] for row in csv.DictReader(file)]
    assert ways[0] == visibility.ALL
    assert len(ways) == 10
    monkeypatch.setattr(
        torch_calls, "ours", lambda q, k, v, **_: torch_calls.naive_attention(q, k, v)
    )  # sees everything
    assert visibility.main([*arguments, "--ways", "documents, segment ids", "documents, cu_seqlens"]) == 1
    assert "documents, segment ids, H2 L32 D16: WRONG" in capsys.readouterr().out


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_what_is_wrong_is_not_timed(name, tmp_path, capsys, monkeypatch):
    framework, output = FRAMEWORKS[name], tmp_path / "out"
    wrong = Contender(lambda q, k, v, **extra: framework.ours(q, k, 1.05 * v, **extra))
    arguments = [*TINY, "--framework", name, "--jobs", "forward", "--output", str(output), "--contenders"]
    monkeypatch.setitem(framework.CONTENDERS, "broken", wrong)
    assert benchmark.main([*arguments, "broken", framework.OURS]) == 0
    assert "forward, broken, H2 L32 D16: WRONG: errors [0.0" in capsys.readouterr().out
    assert table(output) == [("forward", framework.OURS)]
    monkeypatch.setitem(framework.CONTENDERS, framework.OURS, wrong)
    assert benchmark.main([*arguments, framework.OURS]) == 1
    assert table(output) == []


def flash_attn_3(
    q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
    return_attn_probs=False,
):  # fmt: skip
    assert q.shape == (2, 32, 3, 16), "[B, L, H, D]"
    assert softmax_scale is None
    return torch_calls.naive_attention(*(a.transpose(1, 2) for a in (q, k, v)), is_causal=causal).transpose(1, 2)


def flash_attn_4(
    q, k, v, softmax_scale=None, causal=False, window_size=(None, None), softcap=0.0, num_splits=1, pack_gqa=None,
    deterministic=False, return_lse=False,
):  # fmt: skip
    return flash_attn_3(q, k, v, softmax_scale, causal), None


class BlockSparseMask:
    @classmethod
    def from_bool(cls, mask, *, block_size=32):
        assert mask.dtype == torch.bool
        assert mask.shape == (1, 1, 32, 32)
        assert mask.any(-1).all()
        self = cls()
        self.mask = mask
        return self


def block_sparse_fork(
    q, k, v, *, implementation, attn_mask=None, block_mask=None, dropout_p=0.0, causal=False, sm_scale=None,
    warp_specialize=True, verify_attn_mask=True,
):  # fmt: skip
    assert implementation in {f"{a}_{b}" for a in ("dense", "block_sparse") for b in ("pointer", "tma")}
    assert implementation.startswith("block_sparse") == isinstance(block_mask, BlockSparseMask)
    mask = attn_mask if block_mask is None else block_mask.mask
    return torch_calls.naive_attention(q, k, v, is_causal=causal, attn_mask=mask)


@pytest.mark.parametrize(
    ("who", "modules", "features"),
    [
        ("FlashAttention-3", {torch_calls.FA3: dict(flash_attn_func=flash_attn_3)}, ["none", "causal"]),
        ("FlashAttention-4", {torch_calls.FA4: dict(flash_attn_func=flash_attn_4)}, ["none", "causal"]),
        (
            f"{torch_calls.PEER} (fork)",
            {
                "jvp_flash_attention": dict(flash_attention=block_sparse_fork, BlockSparseMask=BlockSparseMask),
                "jvp_flash_attention.block_sparse": {},
            },
            ["none", "causal", "block-sparse", "teacher-forcing"],
        ),
    ],
    ids=["FlashAttention-3", "FlashAttention-4", "fork"],
)
def test_rivals(who, modules, features, tmp_path, monkeypatch, capsys):
    """Stand-ins with the signatures that the rivals have are found, called, checked and timed."""
    for name, contents in modules.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    found = torch_calls.rivals()
    monkeypatch.setattr(torch_calls, "CONTENDERS", found)
    assert f"{who} of unknown version" in torch_calls.describe()
    sizes = ["--lengths", "32", "--head-dims", "16", "--heads", "3", "--batch", "2", "--dtype", "float32"]
    for feature in features:
        output = tmp_path / feature
        arguments = ["--framework", "torch", "--contenders", who, "--feature", feature, "--output", str(output)]
        assert benchmark.main([*QUICK, *sizes, *arguments]) == 0
        assert table(output) == [(job, who) for job in PRODUCTS if job in found[who].jobs]
    assert ": WRONG" not in capsys.readouterr().out


def test_fa4_jax(monkeypatch):
    """By a stand-in that takes what the package takes."""
    naive = lambda q, k, v, *, causal=False: jax_calls.xla(q, k, v, is_causal=causal)
    monkeypatch.setitem(sys.modules, "fa4_jax", types.SimpleNamespace(flash_attn=naive))
    contender, case = Contender(jax_calls.fa4), Case(1, 32, 2, 16, "causal")
    arrays, extra = jax_calls.draw(case), jax_calls.extra(case)
    oracle = Oracle(jax_calls, "forward + JVP", extra, arrays)
    prepared = measure.prepare(jax_calls, contender, "forward + JVP", extra, arrays, oracle)
    assert isinstance(prepared, measure.Prepared), prepared
    refused = measure.prepare(jax_calls, contender, "forward", {"mask": None}, arrays, oracle)
    assert "unexpected keyword argument 'mask'" in refused.reason


def test_beside_another_version(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_calls, "CONTENDERS", {torch_calls.OURS: torch_calls.CONTENDERS[torch_calls.OURS]})
    checkout, output = str(Path(__file__).parents[2]), tmp_path / "out"
    selected = ["--framework", "torch", "--jobs", *PRODUCTS, "--before", checkout, "--output", str(output)]
    assert benchmark.main([*TINY, *selected]) == 0
    assert table(output) == [(job, who) for job in PRODUCTS for who in (torch_calls.OURS, "before")]


@pytest.mark.parametrize(
    "arguments", [["--heads", "1", "2", "3"], ["--contenders", "nobody"], ["--before", "somewhere"]]
)
def test_arguments_that_do_not_fit(arguments, capsys):
    with pytest.raises(SystemExit):
        benchmark.main(arguments)
    assert f"{arguments[0]} must" in capsys.readouterr().err


@pytest.mark.parametrize("job", PRODUCTS)
def test_float64_by_rows(job, monkeypatch):
    arrays = torch_calls.draw(Case(1, 40, 3, 8, dtype="float32"))
    whole = Oracle(torch_calls, job, {"is_causal": True}, arrays)
    monkeypatch.setattr(measure, "SCORES", 40 * 12)
    for a, b in zip(Oracle(torch_calls, job, {"is_causal": True}, arrays).exact, whole.exact, strict=True):
        assert a.shape == (1, 2, 40, 8)
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)
    assert 0 < max(whole.allowed(rounds_scores=False)) < 1e-6


@pytest.mark.parametrize("feature", ["causal", "mask", "padding", "bias"])
def test_float64_in_jax(feature, monkeypatch):
    """Agrees with the one in PyTorch, by rows too."""
    extra = jax_calls.extra(Case(1, 12, 2, 8, feature, "float32"))
    same = {n: a if a is True else torch.tensor(np.asarray(a)) for n, a in extra.items()}
    same = {"attn_mask" if n in ("mask", "bias") else n: a for n, a in same.items()}
    arrays = torch_calls.draw(Case(1, 12, 2, 8, dtype="float32"))
    other = [np.asarray(a.transpose(1, 2)) for a in arrays]
    monkeypatch.setattr(measure, "SCORES", 12 * 8)
    exact = Oracle(torch_calls, "backward", same, arrays).exact
    for a, b in zip(Oracle(jax_calls, "backward", extra, other).exact, exact, strict=True):
        np.testing.assert_allclose(a.swapaxes(1, 2), b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("job", "billions"), [("forward", 549.756), ("forward + JVP", 1649.267)])
def test_operations_of_jvp_bench(job, billions):
    case = Case(1, 8192, 2048 // 64, 64)
    assert torch_calls.counted_operations(job, case) == case.operations(PRODUCTS[job])
    assert round(case.operations(PRODUCTS[job]) * 1e-9, 3) == billions


@pytest.mark.parametrize(
    ("job", "case", "billions"),
    [("forward + JVP", Case(1, 8192, 1, 128), 103.1), ("dual backward", Case(1, 16384, 24, 128), 19792)],
)
def test_operations_of_sdpa_jvp(job, case, billions):
    assert case.operations(published.COUNTED[job]) * 1e-9 == pytest.approx(billions, rel=1e-3)


def test_causal_counts_half():
    assert 2 * Case(2, 64, 2, 16, "causal").operations(6) == Case(2, 64, 2, 16).operations(6)


def test_jvp_bench(tmp_path, capsys):
    size = ["--bsz", "2", "--model-dim", "32", "--head-dim", "16", "--seq-len", "32"]
    who = ["--contenders", "torch_bridge", "SDPA math", "SDPA flash"]
    assert published.main(["jvp_bench", *size, *QUICK, *who, "--output", str(tmp_path / "out")]) == 0
    pairs = {("forward + JVP", "torch_bridge"), ("forward + JVP", "SDPA math")}
    assert pairs < set(table(tmp_path / "out"))
    with pytest.raises(SystemExit):
        published.main(["jvp_bench", "--model-dim", "100"])
    assert "--model-dim must be a multiple" in capsys.readouterr().err


def failing(error):
    def attention(q, k, v):
        if q.shape[2] > 32:
            raise error
        return torch_calls.naive_attention(q, k, v)

    return Contender(attention, rounds_scores=True)


@pytest.mark.parametrize(
    ("error", "status"), [(torch.OutOfMemoryError("full"), 0), (RuntimeError("broken"), 1)], ids=repr
)
def test_sdpa_jvp(error, status, tmp_path, capsys, monkeypatch):
    """Only memory is forgiven, and what did not fit is not tried at greater lengths."""
    monkeypatch.setitem(published.EVERYONE, "naive", failing(error))
    size = ["--heads", "1", "--lengths", "32", "64", "96", "--head-dim", "8"]
    assert published.main(["sdpa_jvp", *size, *QUICK, "--output", str(tmp_path / "out")]) == status
    rows = table(tmp_path / "out")
    for job in published.COUNTED:
        assert rows.count((job, "torch_bridge")) == 3
        assert rows.count((job, "naive")) == 1
    out = capsys.readouterr().out
    assert f"naive, H1 L64 D8: {type(error).__name__}: {error}" in out
    assert "naive, H1 L96" not in out
    assert "| 1 | 64 |" in out


def test_host_time(capsys):
    jobs = {name: job for name, job in host_time.jobs_of((1, 2, 8, 4), "cpu").items() if "SDPA" not in name}
    medians = host_time.microseconds(jobs, 1, lambda: None)
    assert all(medians[name] > 0 for name in jobs)
    assert {name for job, other, _ in host_time.TARGETS for name in (job, other)} <= {
        *jobs, *(f"{job}, SDPA {name}" for job in (host_time.FORWARD, host_time.BOTH) for name in host_time.BACKENDS)
    }  # fmt: skip
    host_time.profile(jobs[host_time.DUAL], 1, lambda: None)
    assert "function calls" in capsys.readouterr().out


def test_robot_policy(monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))  # C++ takes a minute
    sizes = dict(batch=2, length=24, heads=2, channels=8, depth=1, steps=1)
    ways = ["eager, no checkpoints", "eager", "compiled"]
    assert robot_policy.main([*(f"--{name}={n}" for name, n in sizes.items()), "--ways", *ways]) == 0
    out = capsys.readouterr().out
    assert [line.split("  ")[1] for line in out.splitlines()[1:]] == ways
    assert out.count("steps/s") == 3


@pytest.mark.parametrize(("name", "who"), [("jax", ["jax-flash-jvp", "XLA"]), ("torch", ["torch_bridge", "SDPA math"])])
def test_gradient_of_gradient(name, who, tmp_path):
    size = ["--framework", name, "--chunk", "16", "--window", "48", "--shapes", "2x8", "--contenders", *who]
    assert gradient_of_gradient.main([*size, *QUICK, "--output", str(tmp_path / "out")]) == 0
    with open(tmp_path / "out.csv", newline="") as file:
        rows = [(row["who"], row["queries"], row["keys"]) for row in csv.DictReader(file)]
    assert rows == [(w, "16", "64") for w in who]


def test_gradient_of_gradient_does_not_time_what_is_wrong(tmp_path, monkeypatch, capsys):
    contenders = gradient_of_gradient.in_jax

    def broken(shape):
        given, check = contenders(shape)
        twice = lambda prepare: lambda arrays: prepare([2 * a for a in arrays])
        return {who: twice(prepare) if who == "XLA" else prepare for who, prepare in given.items()}, check

    monkeypatch.setattr(gradient_of_gradient, "in_jax", broken)
    size = ["--chunk", "16", "--window", "48", "--shapes", "2x8", "--output", str(tmp_path / "out")]
    assert gradient_of_gradient.main([*size, *QUICK]) == 1
    assert "XLA: WRONG" in capsys.readouterr().out
    assert "XLA" not in (tmp_path / "out.csv").read_text()


SHORT = ["--shapes", "3x8x2x4:key", "1x60x2x4:segments+pair"]


@pytest.mark.parametrize(("name", "who"), [("jax", ["jax-flash-jvp", "XLA"]), ("torch", ["torch_bridge", "SDPA math"])])
def test_forces(name, who, tmp_path):
    arguments = ["--framework", name, *SHORT, "--contenders", *who, "--output", str(tmp_path / "out")]
    assert forces.main([*arguments, *QUICK]) == 0
    with open(tmp_path / "out.csv", newline="") as file:
        rows = [(row["shape"], row["job"], row["who"]) for row in csv.DictReader(file)]
    assert rows == [(shape, job, w) for shape in SHORT[1:] for job in forces.JOBS for w in who]


def test_forces_with_kernels_of_a_file(tmp_path):
    """As PET's, whose bias is [sequences, keys]."""
    file = tmp_path / "kernels.py"
    file.write_text(
        "import torch.nn.functional as F\n"
        "def triton_memory_efficient_attention(query, key, value, attention_weights):\n"
        "    return F.scaled_dot_product_attention(query, key, value, attention_weights[:, None, None])\n"
    )
    arguments = ["--framework", "torch", "--pet", str(file), *SHORT, "--contenders", "PET"]
    assert forces.main([*arguments, *QUICK, "--output", str(tmp_path / "out")]) == 0
    with open(tmp_path / "out.csv", newline="") as file:
        assert [(row["shape"], row["job"]) for row in csv.DictReader(file)] == [(SHORT[1], job) for job in forces.JOBS]


def test_forces_that_are_wrong_are_not_timed(tmp_path, monkeypatch, capsys):
    given = forces.in_jax

    def broken(*arguments):
        contenders, check = given(*arguments)
        twice = lambda prepare: lambda job, arrays: prepare(job, [2 * a for a in arrays])
        return {who: twice(prepare) if who == "XLA" else prepare for who, prepare in contenders.items()}, check

    monkeypatch.setattr(forces, "in_jax", broken)
    assert forces.main([*SHORT[:2], "--jobs", "forces", *QUICK, "--output", str(tmp_path / "out")]) == 1
    assert "XLA: WRONG" in capsys.readouterr().out
    assert "XLA" not in (tmp_path / "out.csv").read_text()


@pytest.mark.thorough
def test_laplacian(tmp_path, monkeypatch, capsys):
    size = ["--walkers", "3", "--electrons", "3", "--heads", "2", "--head-dim", "4", "--depth", "1"]
    size += ["--output", str(tmp_path / "out")]
    assert laplacian.main([*size, *QUICK]) == 0
    with open(tmp_path / "out.csv", newline="") as file:
        ways = [row["who"] for row in csv.DictReader(file)]
    expected = [f"{who}, {way}" for way in ("jvp of jvp", "HVPs", "linearized") for who in ("jax-flash-jvp", "naive")]
    assert [way for way in ways if "folx" not in way] == expected
    monkeypatch.setattr(laplacian, "dot_product_attention", lambda q, k, v: laplacian.naive_attention(q, k, 1.05 * v))
    assert laplacian.main([*size, *QUICK, "--contenders", "jax-flash-jvp, HVPs"]) == 1
    assert "jax-flash-jvp, HVPs: WRONG" in capsys.readouterr().out


ONE_BLOCK = ["--lengths", "16", "--batches", "4", "--width", "16", "--depth", "1", "--heads", "2", "--dtype", "float32"]


def meanflow_rows(path, *arguments):
    status = meanflow.main([*ONE_BLOCK, *QUICK, *arguments, "--output", str(path)])
    with open(path.with_suffix(".csv"), newline="") as file:
        return status, {row["who"]: row for row in csv.DictReader(file)}


@pytest.mark.parametrize(
    ("name", "contenders"),
    [
        pytest.param("jax", ["jax-flash-jvp", "naive"], marks=pytest.mark.thorough),
        pytest.param("jax", ["flow matching, PLAIN"], marks=pytest.mark.thorough),
        ("torch", ["torch_bridge", "naive", "flow matching, PLAIN"]),
        pytest.param("torch", ["torch_bridge, compiled", "flow matching, PLAIN, compiled"], marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_meanflow(name, contenders, tmp_path, monkeypatch):
    """Contenders take checked steps, whose parts are counted; what does not fit is a row."""
    module = importlib.import_module(f"{name}_steps")
    contenders = [who.replace("PLAIN", module.PLAIN) for who in contenders]
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))  # C++ takes a minute
    full = torch.OutOfMemoryError("full") if name == "torch" else RuntimeError("RESOURCE_EXHAUSTED: full")
    prepare = module.Steps.prepare

    def but_naive(steps, step):
        if step.attention == "naive":
            raise full
        return prepare(steps, step)

    monkeypatch.setattr(module.Steps, "prepare", but_naive)
    status, rows = meanflow_rows(tmp_path / "out", "--framework", name, "--contenders", *contenders)
    assert status == 0
    assert list(rows) == contenders
    for who, row in rows.items():
        fits = module.CONTENDERS[who].attention != "naive"
        assert row["note"] == ("" if fits else "does not fit")
        ms, images, share = (float(row[n]) for n in ("milliseconds", "images_per_second", "attention_share"))
        assert np.isfinite(ms) == fits
        if fits:
            assert images == pytest.approx(4000 / ms)
            assert share == pytest.approx(float(row["attention_milliseconds"]) / ms)


@pytest.mark.parametrize("name", [pytest.param("jax", marks=pytest.mark.thorough), "torch"])
def test_meanflow_does_not_time_what_is_wrong(name, tmp_path, monkeypatch, capsys):
    """Attention that takes queries and keys for constants: the loss is nearly right, its derivative along the flow not."""
    module = importlib.import_module(f"{name}_steps")
    if name == "torch":
        attentions, stop = module.ATTENTIONS, lambda a: a.detach() + 0 * a
        attention = attentions["naive"]
        broken = lambda q, k, v: attention(stop(q), stop(k), v)
    else:
        attentions = module.models_jax.ATTENTIONS
        attention, stop = attentions["naive"], jax_calls.jax.lax.stop_gradient
        broken = lambda q, k, v, **_: attention(stop(q), stop(k), v)
    monkeypatch.setitem(attentions, "broken", broken)
    monkeypatch.setitem(module.CONTENDERS, "broken", Step("broken"))
    status, rows = meanflow_rows(tmp_path / "out", "--framework", name, "--contenders", "broken")
    assert status == 1
    assert rows["broken"]["note"].startswith("WRONG")
    assert rows["broken"]["milliseconds"] == "nan"


@pytest.mark.parametrize(
    "arguments", [["--lengths", "9"], ["--batches", "1", "2"], ["--contenders", "nobody"]], ids=lambda a: a[0]
)
def test_meanflow_arguments_that_do_not_fit(arguments, capsys):
    with pytest.raises(SystemExit):
        meanflow.main([*ONE_BLOCK, "--framework", "torch", *arguments])
    assert f"{arguments[0]} must" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_host_time_without_a_gpu(capsys):
    with pytest.raises(SystemExit):
        host_time.main([])
    assert "needs an NVIDIA GPU" in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_regret(framework, tmp_path, capsys):
    """Kinds of calls with a bias, with lengths and with more keys than queries: right, timed, worst first."""
    names = ["BEiT", "decoding, lengths", "speculative decoding"]
    arguments = ["--framework", framework, "--small", "--quick", "--calls", *names, "--output", str(tmp_path / "out")]
    regret.main(arguments)
    printed = [float(line.split()[0]) for line in capsys.readouterr().out.splitlines()]  # no failure among them
    assert len(printed) == 12
    assert printed == sorted(printed, reverse=True)
    assert (tmp_path / "out.png").exists()
    (run,) = regret_page.read([tmp_path / "out.json"])
    assert {row.call for row in run.regrets} == set(names)
    assert "cpu, " in run.about
    assert "small calls" in run.about


def test_what_is_too_short_has_no_regret():
    failures = {}
    samples = {("forward", "default"): [2.0, 1.0, 9.0], ("forward", "XLA"): [-0.01, 0.02, -0.03]}
    assert regret.medians(samples, failures) == {"forward": {"default": 2.0}}
    assert failures == {"forward, XLA": "too short to be timed: -0.01 ms"}


def saved_run(folder, title, ratios, failures=()):
    """Of calls by name: by what the default is slower than the best of two others, in each job."""
    found = {
        name: dict(
            times={job: {"default": ratio, "XLA": 1.0, "portable": 1.5} for job in regret.JOBS},
            failures=dict.fromkeys(failures, "WRONG"),
        )
        for name, ratio in ratios.items()
    }
    run = regret_page.Run(title, "H200, 28 November 2026", found)
    run.save(folder / f"{title}.json")
    return folder / f"{title}.json"


def test_page_of_regret(tmp_path):
    """Losses stand first, the worst at the top; then every call, with its shape; and what is wrong with the default."""
    jax_run = saved_run(
        tmp_path, "JAX", {"Swin": 0.5, "decoding": 2.0, "T5": 1.2}, ["forward, default", "forward, XLA"]
    )
    torch_run = saved_run(tmp_path, "PyTorch", {"Swin": 1.01})
    arguments = ["--draw", str(jax_run), str(torch_run), "--output", str(tmp_path / "page")]
    assert regret.main(arguments) == 0
    assert (tmp_path / "page.png").stat().st_size > 10_000
    of_jax, of_torch = (tmp_path / "page.md").read_text().split("## ")[1:]
    assert "**8 of 12 are losses" in of_jax
    assert "**0 of 4 are losses" in of_torch
    assert (
        of_jax.index("| **2.00** | decoding | ")
        < of_jax.index("| **1.20** | T5 | ")
        < of_jax.index("| decoding | B64 T1")
    )
    assert "| Swin | B2048 L49 H6 D32, bfloat16, bias | 0.50, XLA |" in of_jax
    assert "| decoding | B64 T1 S4096 H32 K8 D128, bfloat16 | 2.00, XLA |" in of_jax
    assert "- T5, forward, default: WRONG" in of_jax
    assert "forward, XLA" not in of_jax


def test_what_is_no_saved_run(tmp_path):
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r"other\.json is no run that `regret.py` saved: it must have title, about, found"
    ):
        regret_page.read([tmp_path / "other.json"])


def test_one_benchmark_times_at_a_time(monkeypatch, tmp_path):
    """Also on a part of a GPU, whose name is like a path."""
    monkeypatch.setattr(measure.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-GPU-0a/1/0")
    with measure.locked():
        (path,) = tmp_path.iterdir()
        with open(path) as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with measure.locked():
        pass
