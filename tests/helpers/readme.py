"""README's code blocks, to be run as they stand: `python tests/helpers/readme.py JAX` runs those of "60 seconds in JAX"."""

import pathlib
import re
import sys

README = pathlib.Path(__file__).parents[2] / "README.md"


def code(framework: str) -> str:
    """The Python blocks below the heading "60 seconds in <framework>", one after the other."""
    section = re.search(rf"^## 60 seconds in {framework}$(.*?)^## ", README.read_text(), re.DOTALL | re.MULTILINE)
    if section is None:
        raise ValueError(f"README has no section '60 seconds in {framework}'")
    blocks = re.findall(r"^```python\n(.*?)^```$", section[1], re.DOTALL | re.MULTILINE)
    if not blocks:
        raise ValueError(f"README's section '60 seconds in {framework}' has no Python block")
    return "\n".join(blocks)


if __name__ == "__main__":
    exec(compile(code(sys.argv[1]), f"README.md, {sys.argv[1]}", "exec"))
