"""Pages of the site as programs: their Python blocks, in order, some of it shortened as the page says in a comment."""

import pathlib
import re
import textwrap

ROOT = pathlib.Path(__file__).parents[2]
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)  # indented in tabs
SHORT = re.compile(r"^<!-- short: (.+) => (.+) -->$", re.MULTILINE)


def code(page: pathlib.Path) -> str:
    text = page.read_text()
    program = "\n\n".join(textwrap.dedent(block) for _, block in BLOCK.findall(text))
    for long, short in SHORT.findall(text):
        if program.count(long) != 1:
            raise ValueError(f"{page} shortens {long!r}, which stands there {program.count(long)} times")
        program = program.replace(long, short)
    return program


def needs(page: pathlib.Path) -> list[str]:
    """Packages without which a page does not run: <!-- needs: NAME NAME -->."""
    found = re.search(r"^<!-- needs: (.+) -->$", page.read_text(), re.MULTILINE)
    return found[1].split() if found else []


def with_code() -> list[pathlib.Path]:
    return [page for page in sorted((ROOT / "docs").rglob("*.md")) if BLOCK.search(page.read_text())]
