"""The page that builds flash attention up: it runs, its steps hold on ragged sizes, and it stops where one is wrong."""

from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def page(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import from_scratch

    monkeypatch.setattr(from_scratch, "REPEATS", 1)
    monkeypatch.setattr(from_scratch, "SIMULATED_SIZE", (11, 3, 4))
    return from_scratch


@pytest.mark.parametrize("causal", ["--causal", "--no-causal"])
def test_page_runs(page, tmp_path, capsys, causal):
    page.main(["--length", "11", "--head-dim", "3", "--block", "4", causal, "--output", str(tmp_path)])
    table = [line.split() for line in capsys.readouterr().out.splitlines()[1:7]]
    assert [row[0] for row in table] == ["0", "0", "1", "2", "3", "4"]
    assert all(float(row[-1]) < 1e-5 for row in table[1:])  # the errors
    assert (tmp_path / "tiles.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("length", "block"), [(1, 4), (7, 1), (9, 4), (12, 16), (32, 8)])
@pytest.mark.parametrize("causal", [True, False])
def test_tiles_visit_each_visible_pair_once(page, length, block, causal):
    seen = np.zeros((length, length), int)
    for rows in page.blocks(0, length, block):
        for keys, masked in page.visited(rows, length, block, causal):
            tile = np.tril(np.ones((length, length), int))[rows, keys] if masked else 1
            assert np.any(tile)
            assert np.any(np.equal(tile, 0)) == masked
            seen[rows, keys] += tile
    np.testing.assert_array_equal(seen, np.tril(np.ones_like(seen)) if causal else 1)


@pytest.mark.parametrize("causal", [True, False])
def test_scores_beyond_the_range_of_exp(page, causal):
    arrays = np.random.default_rng(1).standard_normal((6, 11, 4))
    arrays[:2] *= 40  # scores of thousands
    expected = page.naive_jvp(*arrays, causal)
    assert np.abs(expected.l).max() > 1000
    allowed = np.abs(expected.l).max() * page.ROUNDINGS * np.finfo(np.float64).eps  # exp(S) is as exact as S is
    page.check("tiled", page.tiled_jvp(*arrays, 3, causal), expected, allowed)


BROKEN = {
    "naive_jvp": ("0 with its tangent: mu", lambda result: result._replace(mu=1.01 * result.mu)),
    "tiled": ("1 tiles in NumPy: l", lambda result: result._replace(l=result.l * np.nan)),
    "tiled_jvp": ("2 with their tangent: t_o", lambda result: result._replace(t_o=result.t_o + result.o)),
    "numba_jvp": ("3 Numba.*: o", lambda result: result._replace(o=result.o[::-1])),
    "library_jvp": ("4 jax_flash_jvp: t_o", lambda result: result._replace(t_o=1.001 * result.t_o)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_page_stops_at_a_wrong_step(page, monkeypatch, tmp_path, name):
    function, (message, broken) = getattr(page, name), BROKEN[name]
    monkeypatch.setattr(page, name, lambda *arguments: broken(function(*arguments)))
    with pytest.raises(AssertionError, match=message + " is off by"):
        page.main(["--length", "11", "--head-dim", "3", "--block", "4", "--output", str(tmp_path)])


@pytest.mark.parametrize("option", ["--length", "--head-dim", "--block"])
def test_sizes_are_positive(page, capsys, option):
    with pytest.raises(SystemExit):
        page.main([option, "0"])
    assert option in capsys.readouterr().err
