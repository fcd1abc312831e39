"""What the API pages show: docstrings in Markdown, which speak reStructuredText where they name other objects and give formulas,
and signatures without `**unknown`, which takes misspelt arguments in order to name the right ones."""

import re
from typing import Any

import griffe


class Shown(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _markdown(obj.docstring.value)

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        if "unknown" in func.parameters:
            del func.parameters["unknown"]


def _markdown(text: str) -> str:
    text = re.sub(r":(?:func|class|mod|meth|attr):`~?([^`]+)`", r"`\1`", text)
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    text = re.sub(r"^\.\. math::\s+(.+)$", r"\\[\1\\]", text, flags=re.MULTILINE)
    return re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)
