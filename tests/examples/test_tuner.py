"""The tuner without a GPU: what it proposes reaches the kernels, and what it prints is a row of the tables."""

import argparse
import re
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import proposals  # noqa: E402
import tune  # noqa: E402
from jax_flash_jvp.kernels.hopper import config  # noqa: E402
from jax_flash_jvp.kernels.hopper.ring import SHARED_MEMORY  # noqa: E402
from jax_flash_jvp.kernels.portable import tiles  # noqa: E402
from measure import Case  # noqa: E402

HOPPER_TABLES = ("FORWARD", "FORWARD_DUAL", "KEY_SIDE", "VALUES", "KEYS", "QUERY_SIDE")


def rows(family, widths=config.WIDTHS, dtype="bfloat16", precision="ieee", target=90):
    for job in proposals.KERNELS:
        for width in widths:
            try:
                yield proposals.FAMILIES[family](job, width, dtype, precision, target)
            except KeyError:
                continue


class Launcher:
    """Launches nothing, on a GPU of sm_90."""

    target, descriptors, multiprocessors = 90, True, 132

    def __init__(self, device):
        self.launched, self.launches = [], []
        launchers.append(self)

    def strides(self, array):
        return array.stride()

    def launch(self, launch):
        self.launches.append(launch)
        return launch.results([torch.empty(o.shape, dtype=getattr(torch, o.dtype)) for o in launch.allocations()])


launchers: list[Launcher] = []


def taken(launch):
    """The ring or the tile of a launch."""
    c = launch.constants
    if "SLOTS" not in c:
        return proposals.Tile(c["BM"], c["BN"], launch.num_warps, launch.num_stages, registers=launch.registers)
    f = c["FEATURES"]
    return config.Ring(c["T"], c["SLOTS"], c["TURNS"], c["GROUPS"], f.deferred, f.late_dp, c["HEIGHT"] == 1)


@pytest.mark.parametrize("family", proposals.FAMILIES)
@pytest.mark.parametrize("job", proposals.KERNELS)
def test_what_is_proposed_reaches_the_kernel(job, family, monkeypatch):
    monkeypatch.setattr(tune, "TorchLauncher", Launcher)
    for head_dim in (64, 128, 256):
        feature = "bias" if "score" in job else "causal"
        shape = tune.Shape(Case(1, 128, 2, head_dim, feature), family, job, "ieee", 90)
        try:
            candidates = shape.row.proposals()
        except KeyError:
            continue
        run = tune.prepared(shape)
        for candidate in (candidates[1], candidates[-1]):
            launchers[-1].launches.clear()
            with shape.row.taking(candidate):
                run()
            kernels = [x for x in launchers[-1].launches if "BM" in x.constants or "SLOTS" in x.constants]
            alone = candidate[:7] if family == "hopper" else candidate  # but for what other loops take
            assert [taken(x)[: len(alone)] for x in kernels if x.kernel in tune.TUNED] == [alone]


def test_hopper_proposals():
    every = [*rows("hopper")]
    assert {(row.name, row.key) for row in every} == {
        (name, key) for name in HOPPER_TABLES for key in getattr(config, name)
    }
    for row in every:
        first, *others = found = row.proposals()
        assert first == getattr(config, row.name)[row.key]
        assert len({*found}) == len(found) > 1
        for ring in others:
            assert ring.groups in config.REGISTERS
            assert ring.tile * ring.slots * 2 * row.width <= SHARED_MEMORY
            assert not (ring.late_dp and row.kernel.tangents)


@pytest.mark.parametrize(
    ("dtype", "precision", "target"),
    [("bfloat16", "ieee", 80), ("float16", "ieee", 90), ("float32", "tf32", 86), ("float32", "ieee", 100)],
)
def test_portable_proposals(dtype, precision, target):
    for row in rows("portable", (64, 96, 128, 256), dtype, precision, target):
        found = row.proposals()
        assert len({t[:4] for t in found}) == len(found) > 1
        if row.present:
            assert found[0] == tiles.find(row.job, row.head_dim, dtype, precision, target)


def evaluated(line, family):
    """A line of a table, as Python has it."""
    code, _, about = line.partition("  # ")
    assert about
    names = dict(Ring=config.Ring, Split=config.Split)
    return eval(f"dict({code})" if family == "portable" else f"{{{code}}}", names)


@pytest.mark.parametrize("family", proposals.FAMILIES)
def test_what_is_printed_is_a_row(family):
    for row in rows(family):
        for candidate in row.proposals()[:3]:
            got = evaluated(row.written(candidate, 0, "a GPU"), family)
            if family == "hopper":
                assert got == {row.key: candidate}
                continue
            table = tiles.row_of(row.job, row.kind, row.target)
            place = tiles.column_of(table, row.head_dim)
            ((job, new),) = got.items()
            assert (job, tiles.Tile(*new[place])) == (row.job, candidate)
            assert [t for i, t in enumerate(new) if i != place] == [t for i, t in enumerate(table) if i != place]


def test_rows_as_they_are_in_the_source():
    """Letter for letter, but for what a line says of where it was measured."""
    source = {
        name: re.sub(r"\s+", "", Path(m.__file__).read_text()) for name, m in (("hopper", config), ("portable", tiles))
    }
    for family, text in source.items():
        for row in rows(family):
            line = row.written(row.proposals()[0], 0, "a GPU").partition("  # ")[0]
            assert re.sub(r"\s+", "", line) in text, line


def test_a_spilling_tile_says_so():
    row = proposals.PortableRow("forward", 64, "bfloat16", "ieee", 90)
    line = row.written(proposals.Tile(64, 64, 4, 2), 130, "a GPU")
    assert "(64, 64, 4, 2, 200)" in line
    assert "(64, 64, 4, 2)," in row.written(proposals.Tile(64, 64, 4, 2), 80, "a GPU")


@pytest.mark.parametrize("time", [0.9, 0.99])
def test_the_present_row_stays_unless_another_gains(time, monkeypatch, capsys):
    """The geometric mean over all shapes counts, and what spills is not timed."""
    shapes = [tune.Shape(Case(1, n, 32, 64), "hopper", "forward", "ieee", 90) for n in (256, 8192)]
    present, better, spilling, *rest = shapes[0].row.proposals()
    outcomes = dict.fromkeys(rest, "OutOfResources") | {present: 100, better: 0, spilling: 5000}

    class Pool:
        __enter__ = __exit__ = lambda self, *_: self
        starmap_async = lambda self, f, plan, chunksize: self
        get = lambda self, timeout: [outcomes[c] for _ in shapes for c in shapes[0].row.proposals()]

    monkeypatch.setattr(tune.multiprocessing, "get_context", lambda _: argparse.Namespace(Pool=lambda *_, **__: Pool()))
    monkeypatch.setattr(tune, "captured", lambda shape, fits: dict.fromkeys(fits, shape.case.length))
    ms = {(present, 256): 1.0, (better, 256): 1.1, (present, 8192): 1.0, (better, 8192): time / 1.1}
    monkeypatch.setattr(tune, "in_turns", lambda _, calls, options: ({c: ms[c, n] for c, n in calls.items()}, 0.0))
    options = argparse.Namespace(processes=1, spill=800, best=5, gain=0.02, rounds=1, rest=0.0)
    kept = evaluated(tune.tuned(shapes, options), "hopper")
    assert kept == {64: better if time < 0.95 else present}
    assert f"{time**0.5:.3f} {better}" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu(capsys):
    with pytest.raises(SystemExit):
        tune.main([])
    assert "an NVIDIA GPU must be there" in capsys.readouterr().err


def test_a_tile_for_more_channels_than_a_row_has():
    row = proposals.PortableRow("score_side", 256, "float32", "ieee", 80)
    assert "None, (16, 16, 8, 1))," in row.written(proposals.Tile(16, 16, 8, 1), 0, "a GPU")
