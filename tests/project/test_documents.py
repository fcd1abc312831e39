"""What people read is true: code runs as it stands, links and names lead somewhere, and pages stay as short as they are."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pages
import readme
import support

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://github.com/jax-flash-jvp/jax-flash-jvp/"
SITE = "https://jax-flash-jvp.github.io/jax-flash-jvp/"
LONG = {"meanflow", "hessian"}  # pages that train
TOPS = ("jax_flash_jvp", "torch_bridge", "tests", "examples", "benchmarks", "docs", ".ci")
NAMES = ("jax_flash_jvp/kernels/README.md", "docs/dev/hopper.md", "docs/how-it-works.md", "CONTRIBUTING.md")


def files() -> list[Path]:
    """Of the repository, from its root."""
    everywhere = [*ROOT.glob("*"), *(path for top in TOPS for path in (ROOT / top).rglob("*"))]
    return [path.relative_to(ROOT) for path in everywhere if path.is_file()]


def run(program: str, folder: Path) -> str:
    path = os.pathsep.join(map(str, (ROOT, ROOT / "examples", *os.environ.get("PYTHONPATH", "").split(os.pathsep))))
    environment = os.environ | dict(PYTHONPATH=path, JAX_PLATFORMS="cpu", MPLBACKEND="Agg", OPENBLAS_NUM_THREADS="1")
    command = [sys.executable, "-c", program]
    process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.parametrize(
    ("framework", "shape"), [("JAX", "(2, 256, 4, 64)"), ("PyTorch", "torch.Size([2, 4, 256, 64])")]
)
def test_readme_runs(tmp_path, framework, shape):
    assert run(readme.code(framework), tmp_path).split("\n")[0] == " ".join([shape] * 4)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow if page.stem in LONG else (), id=page.stem)
        for page in pages.with_code()
    ],
)
def test_page_runs(tmp_path, page):
    missing = [package for package in pages.needs(page) if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    run(pages.code(page), tmp_path)


def test_a_page_that_shortens_what_it_does_not_have_fails(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nn = 1\n```\n<!-- short: n = 2 => n = 3 -->\n")
    with pytest.raises(ValueError, match="stands there 0 times"):
        pages.code(page)


@pytest.mark.parametrize(
    ("name", "lines", "columns"),
    [("README.md", 120, 100), ("CONTRIBUTING.md", 90, 130), ("jax_flash_jvp/kernels/README.md", 140, 130)],
)
def test_pages_are_short(name, lines, columns):
    text = (ROOT / name).read_text()
    assert text.count("\n") <= lines
    commands = re.findall(r"^<!-- \w+ -->\n```bash\n(.+)\n```$", text, re.MULTILINE)
    assert [line for line in text.splitlines() if len(line) > columns and line not in commands] == []


def test_readme_has_its_two_commands():
    text = (ROOT / "README.md").read_text()
    for marker, end in (("example", "examples/meanflow_jax.py"), ("test", ".venv/bin/pytest")):
        (command,) = re.findall(rf"^<!-- {marker} -->\n```bash\n(.+)\n```$", text, re.MULTILINE)
        assert command.endswith(end)


def test_links_of_readme_work_elsewhere():
    """A package index shows no relative ones."""
    for link in re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text()):
        if link.startswith(SITE):
            page = link.removeprefix(SITE).partition("#")[0].rstrip("/") or "index"
            assert any((ROOT / "docs" / name).exists() for name in (f"{page}.md", f"{page}/index.md")), link
        else:
            path = re.fullmatch(re.escape(REPOSITORY) + r"(?:blob|raw)/main/(.+)", link)
            assert path, link
            assert (ROOT / path[1]).exists(), link


@pytest.mark.parametrize("name", NAMES)
def test_files_that_pages_name_exist(name):
    """Those in backticks, by the end of their path, with * as in a shell."""
    for named in re.findall(r"`([\w*/.-]+\.(?:py|md|csv|toml))`", (ROOT / name).read_text()):
        assert any(path.match(named) for path in files()), f"{name} names {named}, which is not there"


def test_names_of_the_mechanisms_are_those_of_the_code():
    code = "\n".join((ROOT / path).read_text() for path in files() if path.suffix == ".py")
    stems = {path.stem for path in files()}
    for name in re.findall(r"`([A-Za-z_.]+)`", (ROOT / "docs" / "dev" / "hopper.md").read_text()):
        parts = [part for part in name.split(".") if part not in ("py", "md")]
        assert all(part in code or part in stems for part in parts), name


def test_table_of_features_is_written(tmp_path, monkeypatch):
    page = tmp_path / "features.md"
    page.write_text(f"before\n{support.START}old\n{support.END}after\n")
    monkeypatch.setattr(support, "PAGE", page)
    claims = [(*support.claim(case, "JAX"), passed) for case, passed in (("bias-full", True), ("mask", False))]
    support.write(claims)
    text = page.read_text()
    assert "| additive bias, its gradient and tangent | ✓ |\n| boolean mask | ✗ |" in text
    assert text.startswith("before\n" + support.START)
    assert text.endswith(support.END + "after\n")


def test_page_of_features_has_the_table():
    text = (ROOT / "docs" / "features.md").read_text()
    table = text.split(support.START)[1].split(support.END)[0]
    assert [row.split("|")[1].strip() for row in table.splitlines()[2:]] == list(
        dict.fromkeys(support.FEATURES.values())
    )


def test_version_is_the_same_everywhere():
    import jax_flash_jvp

    assert f"version: {jax_flash_jvp.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {jax_flash_jvp.__version__}" in (ROOT / "CHANGELOG.md").read_text()
