"""Which code computes attention: what the argument of a call says, else the innermost open `use_implementation`."""

from contextlib import AbstractContextManager
from typing import Literal, get_args

from torch import Tensor

from jax_flash_jvp.problem import KernelImplementation, Operands, check_implementation, check_served
from torch_bridge import compute
from torch_bridge.checks import Described
from torch_bridge.scopes import Scopes, innermost, opened

Implementation = Literal[KernelImplementation, "reference"]
REFERENCE = "reference"
IMPLEMENTATIONS = (None, *get_args(KernelImplementation), REFERENCE)

_open: Scopes = []  # of implementations


def use_implementation(implementation: Implementation | None) -> AbstractContextManager[None]:
    """A context manager.  While it is open, calls of this package's attention that name no `implementation` use this one.

    It reaches calls inside models, under :func:`patch` and in transformers.  The derivatives of a call use the implementation
    of the call, also after the context is closed.  It holds in this thread, and in threads that open none of their own, as
    autograd's do: keep it open over the backward of a checkpointed model, which calls the model again.

    Args:
      implementation: "triton" uses the kernels, "hopper" or "portable" those of one family, "reference" the tiled reference in
        PyTorch operations.  None closes an outer context: each call chooses.

    Raises:
      ValueError: a name that is unknown.  Calls raise a ValueError where the implementation does not serve them.
    """
    check_implementation(implementation, IMPLEMENTATIONS, REFERENCE)
    return opened(_open, implementation)


def chosen(implementation: Implementation | None, q: Tensor, v: Tensor) -> str | None:
    """The implementation as `Problem` names it, where the reference is "xla"."""
    if implementation is None and not _open:
        return None
    check_implementation(implementation, IMPLEMENTATIONS, REFERENCE)
    name = innermost(_open) if implementation is None else implementation
    if name is None:
        return None
    if name == REFERENCE:
        return "xla"
    # not their batch, which may be symbolic
    check_served(name, Operands(*(Described((1, 1, 1, a.shape[-1]), a.dtype) for a in (q, q, v))), REFERENCE)
    if not compute.on_nvidia(q):
        raise ValueError(
            f"`implementation`={name!r} needs an NVIDIA GPU, and these tensors are on {q.device}; leave `implementation` None, "
            "or ask for 'reference'"
        )
    if not compute.TRITON:
        raise ImportError(
            f"`implementation`={name!r} needs Triton, which is not installed: install it, or leave it None"
        )
    return name
