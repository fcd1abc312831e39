"""What context managers say while they are open: a list of values, the innermost last, each with the thread that opened it, or
None, which a compiler does not tell."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

Scopes = list[list[Any]]


@contextlib.contextmanager
def opened(scopes: Scopes, value: Any) -> Iterator[None]:
    scope = [value, None if torch.compiler.is_compiling() else threading.get_ident()]
    scopes.append(scope)
    try:
        yield
    finally:
        for i, other in enumerate(scopes):  # threads close theirs in any order
            if other is scope:
                del scopes[i]
                break


def innermost(scopes: Scopes) -> Any:
    """The value of those that this thread opened; where it opened none, as threads in which autograd computes, of all."""
    if not scopes:
        return None
    if not torch.compiler.is_compiling():
        here = threading.get_ident()
        for value, thread in reversed(scopes):
            if thread in (here, None):
                return value
    return scopes[-1][0]
