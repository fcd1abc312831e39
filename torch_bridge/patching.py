"""`patch`: this package's function in the place of PyTorch's, in models that call that."""

import contextlib
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import ClassVar

import torch

from torch_bridge.attention import scaled_dot_product_attention
from torch_bridge.private import NN


class _Patch:
    """What all open `patch`es share."""

    lock = threading.Lock()
    count = 0  # of those that are open
    original: Callable | None = None  # PyTorch's function
    places: ClassVar[list[tuple[dict, str]]] = []  # where modules hold it: namespaces, and its name there
    held: tuple[int, int] | None = None  # by how many, when these were looked for
    fastpath = True  # of torch.backends.mha, before


@contextlib.contextmanager
def patch() -> Iterator[None]:
    """While open, this package's function is `scaled_dot_product_attention` in :mod:`torch.nn.functional`, and in every
    loaded module that imported it from there, under whatever name, for all threads; where several overlap, until the last
    is closed.

    Open it before a compiled model is first called, and keep it open over the backward of a checkpointed one, which calls the
    model again.  The fast path of PyTorch's own layers (torch.backends.mha), which has no derivatives, is closed meanwhile.
    Modules that import the function while it is open keep this package's.

    Out of reach are classes, closures and defaults of arguments that hold the function; torch.nn.MultiheadAttention with
    need_weights=True, its default, which never calls it; and what torch.jit.script compiles, which calls PyTorch's.

    Raises:
      ValueError, TypeError, RuntimeError: not where it is opened, but in calls meanwhile, which raise what
        :func:`torch_bridge.scaled_dot_product_attention` raises, as where `attn_mask` and `is_causal` are given together.
    """
    with _Patch.lock:
        if not _Patch.count:
            if _Patch.original is not torch.nn.functional.scaled_dot_product_attention:
                _Patch.original, _Patch.held = torch.nn.functional.scaled_dot_product_attention, None
            _Patch.fastpath = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
        if _Patch.held != _held():
            _Patch.places = [*(_Patch.places if _Patch.count else ()), *_places()]
        for names, name in _Patch.places:
            if names.get(name) is _Patch.original:
                names[name] = scaled_dot_product_attention
        _Patch.count, _Patch.held = _Patch.count + 1, _held()
    try:
        yield
    finally:
        with _Patch.lock:
            _Patch.count -= 1
            if not _Patch.count:
                for names, name in _Patch.places:
                    if names.get(name) is scaled_dot_product_attention:  # nobody else's by now
                        names[name] = _Patch.original
                _Patch.held = _held()
                torch.backends.mha.set_fastpath_enabled(_Patch.fastpath)


def _held() -> tuple[int, int]:
    """What changes when another module holds PyTorch's function: to look into all of them takes long."""
    return sys.getrefcount(_Patch.original), len(sys.modules)


def _places() -> list[tuple[dict, str]]:
    """Where modules hold PyTorch's function."""
    modules = [module for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)]
    modules = [module for module in modules if module is not NN]  # where pickle finds it
    # not module.__dict__: some answer for themselves, and load what is asked for
    loaded = [object.__getattribute__(module, "__dict__") for module in modules]
    return [(names, name) for names in loaded for name, a in [*names.items()] if a is _Patch.original]
