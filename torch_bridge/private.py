"""The names of PyTorch, and of Triton's launcher, on which this package depends and which these do not document.

See `jax_flash_jvp/private.py`.  What is bound here is used elsewhere as if it were public.
"""

from typing import Any

from torch.autograd import forward_ad

from jax_flash_jvp.private import needed, optional

# ------------------------------------------------------------------------------------------------ without which nothing is right

is_functorch_wrapped_tensor = needed("torch._C._functorch.is_functorch_wrapped_tensor")
is_gradtrackingtensor = needed("torch._C._functorch.is_gradtrackingtensor")
is_batchedtensor = needed("torch._C._functorch.is_batchedtensor")
get_unwrapped = needed("torch._C._functorch.get_unwrapped")
# what torch.func makes of a Function for one level, and its leave to run
SingleLevelFunction = needed("torch.autograd.function._SingleLevelFunction")
single_level = needed("torch._C._functorch.get_single_level_autograd_function_allowed")
allow_single_level = needed("torch._C._functorch.set_single_level_autograd_function_allowed")
DisableFuncTorch = needed("torch._C._DisableFuncTorch")
BelowAutograd = needed("torch._C._AutoDispatchBelowAutograd")  # what every kernel at the Autograd key opens
# whether a compiled function lost the tangents of its inputs
needed("torch.autograd.forward_ad._current_level")
set_fwd_grad_enabled = needed("torch.autograd.forward_ad._set_fwd_grad_enabled")
SetExcludeDispatchKeyGuard = needed("torch._C._SetExcludeDispatchKeyGuard")
VIEWS = needed("torch._C.DispatchKey.ADInplaceOrView")
eval_frame = needed("torch._dynamo.eval_frame")
# whether the vmap before torch.func runs
in_mode = needed("torch._C._dispatch_tls_is_dispatch_key_included")
dispatch_key = needed("torch._C._dispatch_key_parse")
VMAP_MODE = dispatch_key("VmapMode")
interpreter_stack = needed("torch._C._functorch.get_interpreter_stack")
TransformType = needed("torch._C._functorch.TransformType")
tree_leaves = needed("torch.utils._pytree.tree_leaves")

# ------------------------------------------------------------------------------------------------ for which others stand in

# those of forward_ad, without the wrapping
unpack_dual = optional("torch._VF._unpack_dual", lambda a, level: tuple(forward_ad.unpack_dual(a, level=level)))
make_dual = optional("torch._VF._make_dual", forward_ad.make_dual)
# leaves a frame alone untraced; and the callback of a compiler that traces.  Else every call is wrapped
skip = optional("torch._dynamo.decorators.skip")
get_eval_frame_callback = optional("torch._C._dynamo.eval_frame.get_eval_frame_callback")
# finds PyTorch's function for torch.jit.script
register_builtin = optional("torch.jit._builtins._register_builtin")
# attention on a CPU, else by the reference
flash_on_cpu = optional("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default")
flash_on_cpu_backward = optional("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default")
# where pickle finds PyTorch's function
NN = optional("torch._C._nn")

# ------------------------------------------------------------------------------------------------ which some calls alone need


def process_group(name: str) -> Any:
    """A process group by its name, as functional collectives find it."""
    return needed("torch._C._distributed_c10d._resolve_process_group")(name)


def inductor_config() -> Any:
    """By which compiled and eager runs draw the same."""
    return needed("torch._inductor.config")


# ------------------------------------------------------------------------------------------------ the way past the dispatcher

dispatch_modes = optional("torch._C._len_torch_dispatch_stack")
levels = optional("torch._C._functorch.peek_interpreter_stack")
included = optional("torch._C._dispatch_tls_local_include_set")
excluded = optional("torch._C._dispatch_tls_is_dispatch_key_excluded")
profiled = optional("torch._C._autograd._profiler_enabled")
KeySet = optional("torch._C.DispatchKeySet")
is_zerotensor = optional("torch.Tensor._is_zerotensor")
SHORT_CUTS = None not in (dispatch_modes, levels, included, excluded, profiled, KeySet, is_zerotensor)

# and around a torch.func.jvp
CJvpInterpreterPtr = optional("torch._C._functorch.CJvpInterpreterPtr")
is_fwd_grad_enabled = optional("torch._C._is_fwd_grad_enabled")
pop_dynamic_layer_stack = optional("torch._C._functorch.pop_dynamic_layer_stack")
push_dynamic_layer_stack = optional("torch._C._functorch.push_dynamic_layer_stack")
wrap_for_grad = optional("torch._C._functorch._wrap_for_grad")
maybe_get_level = optional("torch._C._functorch.maybe_get_level")
SHORT_CUT_OF_JVP = SHORT_CUTS and None not in (
    CJvpInterpreterPtr, is_fwd_grad_enabled, pop_dynamic_layer_stack, push_dynamic_layer_stack, wrap_for_grad,
    maybe_get_level,
)  # fmt: skip


def keys(*names: str) -> int:
    """A set of dispatch keys."""
    return sum(KeySet(dispatch_key(name)).raw_repr() for name in names)
