"""The description of the built package: README with absolute links, since a package index has none of the repository's files.

They begin with the address that `[project.urls]` of pyproject.toml gives as `Source`, laid out as on GitHub.  As long as there is
none, links to files of the repository become plain text, and pictures are left out.
"""

import pathlib
import re
import tomllib

from setuptools import setup

ROOT = pathlib.Path(__file__).parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)")
CODE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def description(text: str, source: str | None, version: str) -> str:
    def link(found: re.Match) -> str:
        image, words, target = found.groups()
        if source is None:
            return "" if image else words
        return f"{image}[{words}]({source}/{'raw' if image else 'blob'}/v{version}/{target})"

    parts = CODE.split(text)  # prose, code, prose, …
    return "".join(part if i % 2 else LINK.sub(link, part) for i, part in enumerate(parts))


def built() -> str:
    source = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {}).get("Source")
    version = re.search(r'^__version__ = "(.+)"$', (ROOT / "jax_flash_jvp/__init__.py").read_text(), re.MULTILINE)
    if version is None:
        raise ValueError('jax_flash_jvp/__init__.py must have a line __version__ = "…"')
    return description((ROOT / "README.md").read_text(), source, version[1])


setup(long_description=built(), long_description_content_type="text/markdown")
