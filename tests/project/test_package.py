"""The description that a package index shows: README, without links to files that are not there."""

import email
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILT = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "jax_flash_jvp/__init__.py", "torch_bridge/__init__.py")
ADDRESS = "https://example.org/someone/jax-flash-jvp"


@pytest.fixture
def metadata(tmp_path):
    """Of the package as it is built, with some lines more in pyproject.toml."""

    def build(more=""):
        for name in BUILT:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
        with open(tmp_path / "pyproject.toml", "a") as file:
            file.write(more)
        program = "from setuptools import build_meta; print(build_meta.prepare_metadata_for_build_wheel('.'))"
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        folder = done.stdout.splitlines()[-1]
        return email.message_from_string((tmp_path / folder / "METADATA").read_text())

    return build


def links(text):
    return re.findall(r"\]\(([^)\s]+)\)", text)


def test_without_an_address_links_are_text(metadata):
    built = metadata()
    assert built["Description-Content-Type"] == "text/markdown"
    text = built.get_payload()
    assert [link for link in links(text) if not link.startswith("http")] == []
    assert "![" not in text
    assert "Install has versions and platforms." in text
    for block in re.findall(r"^```.*?^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE):
        assert block in text


def test_with_an_address_links_are_absolute(metadata):
    import jax_flash_jvp

    text = metadata(f'\n[project.urls]\nSource = "{ADDRESS}"\n').get_payload()
    start = re.compile(rf"{ADDRESS}/(blob|raw)/v{re.escape(jax_flash_jvp.__version__)}/")
    found = links(text)
    assert len(found) == len(links((ROOT / "README.md").read_text()))
    for link in found:
        if link.startswith(ADDRESS):
            assert (ROOT / start.sub("", link).partition("#")[0]).exists(), link
    assert f"![TFLOP/s over the sequence length]({ADDRESS}/raw/" in text
