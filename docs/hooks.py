"""What the site is built with besides its pages: files from elsewhere in the repository, tables and pictures of measurements,
and LaTeX as MathML, so that a reader's browser fetches nothing from other sites."""

import csv
import html
import pathlib
import re
import sys

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "benchmarks")]

import pictures  # noqa: E402
import regret_page  # noqa: E402

ELSEWHERE = {  # pages whose text stands in the repository, by where they are on the site
    "dev/kernels.md": "jax_flash_jvp/kernels/README.md",
    "dev/contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}


def on_files(files: Files, config) -> Files:
    for page, source in ELSEWHERE.items():
        files.append(File.generated(config, page, content=_relinked(page, source)))
    for name, drawn in pictures.svgs(ROOT).items():
        files.append(File.generated(config, f"images/{name}.svg", content=drawn))
    return files


def on_page_markdown(markdown: str, page, **_) -> str:
    markdown = re.sub(r"<!-- regret: (\S+) -->", lambda found: _regret(found[1]), markdown)
    return re.sub(r"<!-- table: (\S+) (.+?) -->", lambda found: _table(ROOT / found[1], found[2]), markdown)


def on_page_content(content: str, **_) -> str:
    content = re.sub(r'<span class="arithmatex">\\\((.*?)\\\)</span>', _math("inline"), content, flags=re.DOTALL)
    return re.sub(r'<div class="arithmatex">\\\[(.*?)\\\]</div>', _math("block"), content, flags=re.DOTALL)


def _math(display: str):
    def replace(found: re.Match) -> str:
        # browsers do not break lines in MathML: equations that stand beside each other are formulas of their own
        parts = html.unescape(found[1]).split(r"\qquad")
        formula = "".join(convert(part.strip(), display=display) for part in parts)
        formula = formula.replace("<mover>", '<mover accent="true">')  # dots and bars, close to what they stand over
        return formula if display == "inline" else f'<div class="formula">{formula}</div>'

    return replace


def _relinked(page: str, source: str) -> str:
    """The text of a file, its links to other pages from where it is on the site."""
    pages = {path.resolve(): path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    pages |= {(ROOT / other).resolve(): pathlib.Path(name) for name, other in ELSEWHERE.items()}
    folder = (ROOT / source).parent

    def link(found: re.Match) -> str:
        target, _, anchor = found[2].partition("#")
        path = (folder / target).resolve()
        if path not in pages:
            raise FileNotFoundError(f"{source} links to {target}, which is no page of the site")
        up = "../" * page.count("/")
        return f"{found[1]}({up}{pages[path].as_posix()}{'#' + anchor if anchor else ''})"

    return re.sub(r"(\[[^\]]+\])\((?!https?:|#)([^)\s]+)\)", link, (ROOT / source).read_text())


def _regret(pattern: str) -> str:
    """The picture and the tables of all saved runs."""
    paths = sorted(ROOT.glob(pattern))
    if not paths:
        return f"No run is saved in `{pattern}`."
    return f"![Ratio of each call and derivative](images/regret.svg)\n\n{regret_page.tables(regret_page.read(paths))}"


def _table(path: pathlib.Path, job: str) -> str:
    """Milliseconds / TFLOP/s of a job, by length and head dimension, for whoever was measured."""
    with open(path, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["job"] == job]
    if not rows:
        raise ValueError(f"{path} has no job {job!r}")
    who = list(dict.fromkeys(row["who"] for row in rows))
    cases = list(dict.fromkeys((row["length"], row["heads"], row["head_dim"]) for row in rows))
    cells = {(row["length"], row["heads"], row["head_dim"], row["who"]): row for row in rows}
    lines = ["| L | heads × D | " + " | ".join(who) + " |", "|---|---|" + "---|" * len(who)]
    for case in sorted(cases, key=lambda c: (int(c[2]), int(c[0]))):
        found = [cells.get((*case, one)) for one in who]
        times = [
            f"{float(row['milliseconds']):.3g}\u00a0/\u00a0{float(row['tflops']):.0f}" if row else "" for row in found
        ]
        lines.append(f"| {case[0]} | {case[1]} × {case[2]} | " + " | ".join(times) + " |")
    return "\n".join(lines)
