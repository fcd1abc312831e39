"""`patch`: this package's functions in the place of PyTorch's, in models that call these."""

import contextlib
import sys
import threading
import types
from collections.abc import Callable, Iterator

import torch

from torch_bridge import modules as written_out
from torch_bridge import private
from torch_bridge.attention import scaled_dot_product_attention
from torch_bridge.checks import check_flag


class _Functions:
    """Functions in the place of PyTorch's: what all open `patch`es share."""

    def __init__(self, ours: Callable[[], dict[Callable, Callable]]):
        self.find = ours
        self.ours: dict[Callable, Callable] = {}  # by PyTorch's
        self.places: list[tuple[dict, str, Callable]] = []  # where modules hold PyTorch's: namespaces, names, functions
        self.held: tuple[int, ...] = ()  # by how many, when these were looked for
        self.count = 0  # of `patch`es that are open

    def open(self) -> None:
        if not self.count and self.ours != self.find():
            self.ours, self.held = self.find(), ()
        if self.held != self._held():
            self.places = [*(self.places if self.count else ()), *_places(self.ours)]
        self._put(ours=True)
        self.count, self.held = self.count + 1, self._held()

    def close(self) -> None:
        self.count -= 1
        if not self.count:
            self._put(ours=False)
            self.held = self._held()

    def _put(self, ours: bool) -> None:
        for names, name, theirs in self.places:
            old, new = (theirs, self.ours[theirs]) if ours else (self.ours[theirs], theirs)
            if names.get(name) is old:  # nobody else's by now
                names[name] = new

    def _held(self) -> tuple[int, ...]:
        """What changes when another module holds one of PyTorch's: to look into all of them takes long."""
        return *map(sys.getrefcount, self.ours), len(sys.modules)


class _Patch:
    """What all open `patch`es share beside."""

    lock = threading.Lock()
    attention = _Functions(lambda: {torch.nn.functional.scaled_dot_product_attention: scaled_dot_product_attention})
    modules = _Functions(lambda: written_out.FUNCTIONS)
    fastpath = True  # of torch.backends.mha, before


@contextlib.contextmanager
def patch(*, modules: bool = True) -> Iterator[None]:
    """A context manager.  While it is open, this package's function replaces PyTorch's `scaled_dot_product_attention`.

    It replaces the function in :mod:`torch.nn.functional`, and in every loaded module that imported it from there, under any
    name, for all threads.  If several `patch` contexts overlap, it stays replaced until the last one is closed.

    Open it before a compiled model is first called.  Keep it open over the backward of a checkpointed model, which calls the
    model again.  Meanwhile the fast path of PyTorch's own layers (torch.backends.mha), which has no derivatives, is off.
    A module that imports the function while the context is open keeps this package's.

    Args:
      modules: also replace `linear`, `conv1d` to `conv3d`, their transposes, `layer_norm`, `rms_norm`, `group_norm`,
        `instance_norm`, `batch_norm` and `glu` of :mod:`torch.nn.functional` inside a JVP, by functions that write out their
        tangents.  Without these, norms with weights do not compile in a JVP, a gradient through the JVP of `layer_norm` or
        `instance_norm` is wrong, and a linear layer runs one matmul too many.  Also, in compiled code, `make_dual` of
        :mod:`torch.autograd.forward_ad`, which torch.func.jvp calls, copies its primal.  Outside a forward-mode level, and for
        layers that change their state, as `batch_norm` does in training, PyTorch's functions run.

    It does not reach functions held by classes, closures or default arguments; torch.nn.MultiheadAttention with
    need_weights=True, its default, which never calls attention; and code compiled by torch.jit.script.

    Raises:
      TypeError: `modules` is not a bool.

    Calls inside raise what :func:`torch_bridge.scaled_dot_product_attention` raises, for example if `attn_mask` and `is_causal`
    are given together.
    """
    check_flag("modules", modules)
    functions = [_Patch.attention, *([_Patch.modules] if modules else ())]
    with _Patch.lock:
        if not _Patch.attention.count:
            _Patch.fastpath = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
        for a in functions:
            a.open()
    try:
        yield
    finally:
        with _Patch.lock:
            for a in functions:
                a.close()
            if not _Patch.attention.count:
                torch.backends.mha.set_fastpath_enabled(_Patch.fastpath)


def _places(ours: dict[Callable, Callable]) -> list[tuple[dict, str, Callable]]:
    """Where modules hold PyTorch's functions."""
    # torch and its C module are where pickle, torch.jit and torch.compile find them
    apart = torch, private.NN, written_out
    modules = [module for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)]
    # not module.__dict__: some answer for themselves, and load what is asked for
    loaded = [object.__getattribute__(module, "__dict__") for module in modules if all(module is not a for a in apart)]
    originals = {id(a): a for a in ours}
    return [(names, name, originals[id(a)]) for names in loaded for name, a in [*names.items()] if id(a) in originals]
