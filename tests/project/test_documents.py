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
PAGES = [
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "jax_flash_jvp/kernels/README.md"),
    *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))),
]
GENERATED = dict(re.findall(r'^    "(\S+\.md)": "(\S+)",$', (ROOT / "docs" / "hooks.py").read_text(), re.MULTILINE))
HOSTS = tuple(
    f"https://{host}/"
    for host in ("arxiv.org", "doi.org", "huggingface.co", "github.com/pytorch/pytorch", "github.com/NVlabs")
)
LONG = {"meanflow", "hessian", "forces"}  # pages that train
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


def headings(page: Path) -> set[str]:
    """Their anchors, as GitHub and the site make them of letters, digits and blanks."""
    found = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    """Relative ones to files and headings; the others to sites that are there."""
    path = ROOT / page
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        target, _, anchor = link.partition("#")
        if link.startswith("http"):
            assert link.startswith(HOSTS), link
            continue
        there = path if not target else path.parent / target
        site = (
            GENERATED.get(there.relative_to(ROOT / "docs").as_posix()) if there.is_relative_to(ROOT / "docs") else None
        )
        there = ROOT / site if site else there
        if there.suffix == ".svg":  # drawn when the site is built
            assert re.sub(r"\d+$", "", there.stem) in (ROOT / "docs" / "pictures.py").read_text(), link
        else:
            assert there.exists(), link
            assert not anchor or anchor in headings(there), link


def test_nothing_names_an_address_of_its_own():
    """Nobody has made one."""
    named = [path for path in files() if path.suffix in (".md", ".toml", ".cff", ".yml") and "tests" not in path.parts]
    text = {path: (ROOT / path).read_text() for path in [*named, *(ROOT / ".github").rglob("*.yml")]}
    assert [
        path for path in text if re.search(r"jax-flash-jvp\.github\.io|github\.com/jax-flash-jvp", text[path])
    ] == []


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
