"""An opaque call over pytrees of arrays, with hooks for every transformation of JAX.  Knows nothing of attention.

`jax.custom_vjp` forbids forward mode, so a kernel that is to be differentiated in any mix of modes needs primitives of its
own.  A `KernelPrimitive` binds one, and lets its rules be written over the arguments as they were passed: pytrees, in
which None stands for an absent array and, in tangents and cotangents, for a symbolic zero.

`tie(primal, dual, linear)` relates the three faces of one function f:

    primal(*args)                 -> f(args)
    dual(*args, tangents)         -> f(args), f'(args)·tangents          one fused kernel
    linear(*args, out, tangents)  -> f'(args)·tangents, given out = f(args)

The JVP rule of the primal binds the dual.  Where JAX evaluates partially (linearize, grad, scan, cond, checkpoint), the
dual falls apart into the primal, which is known, and the linear face, which is not and can be transposed.

Of JAX only exported names are used; `private.py` lists those that it does not document.
"""

import collections
import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jax.tree_util import tree_flatten, tree_leaves, tree_unflatten

from jax_flash_jvp import private

private.check(private.JAX)

eager_calls: collections.Counter[str] = collections.Counter()  # of kernels called outside jit, by name: for tests
kernels: dict[str, "KernelPrimitive"] = {}


# ---------------------------------------------------------------------------------------------- pytrees with holes


def all_none(tree: Any) -> bool:
    return all(leaf is None for leaf in tree_leaves(tree))


def leaves_like(tree: Any, other: Any) -> list[Any]:
    """The leaves of `other` at the leaves of `tree`; a None in `other` stands for as many Nones as `tree` has there."""
    if isinstance(tree, tuple):
        parts = [None] * len(tree) if other is None else other
        return [leaf for a, b in zip(tree, parts, strict=True) for leaf in leaves_like(a, b)]
    return [] if tree is None else [other]


def is_zero(tangent: Any) -> bool:
    return (
        tangent is None
        or type(tangent) in (ad.Zero, jax.custom_derivatives.SymbolicZero)
        or getattr(tangent, "dtype", None) == jax.dtypes.float0
    )


def _zero(x: Any) -> ad.Zero:
    return ad.Zero(jax.typeof(x).to_tangent_aval())


# ---------------------------------------------------------------------------------------------- axes of shard_map


def _type(a: Any) -> Any:
    """The type of an array; a type itself."""
    return a if isinstance(a, jax.core.ShapedArray | jax.ShapeDtypeStruct) else jax.typeof(a)


def _varying(tree: Any) -> frozenset:
    """The manual mesh axes over which some leaf, an array or its type, varies."""
    return frozenset().union(*[_type(a).mat.varying for a in tree_leaves(tree)])


def _vary_alike(leaves: Sequence[Any]) -> list[Any]:
    """Inside shard_map the operands of a primitive must vary over the same mesh axes."""
    return vary_as(leaves, leaves)


def vary_as(leaves: Sequence[Any], other: Any) -> list[Any]:
    """Over the axes over which some leaf of `other` varies: the results of an opaque call do not know that they do."""
    axes = _varying(other)
    missing = [tuple(axes - jax.typeof(a).mat.varying) for a in leaves]
    return [_vary(a, m) if m else a for a, m in zip(leaves, missing, strict=True)]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _vary(a: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """`jax.lax.pcast`, whose own rule fails where the tangent of `a` varies already."""
    return jax.lax.pcast(a, axes, to="varying")


@_vary.defjvp
def _vary_with_tangent(axes, primals, tangents):
    (a,), (t,) = primals, tangents
    missing = tuple(axis for axis in axes if axis not in jax.typeof(t).mat.varying)
    return _vary(a, axes), _vary(t, missing) if missing else t


def axes_of(a: Any) -> tuple[Any, ...]:
    """The Explicit mesh axes over which each axis of an array, or of its type, is spread."""
    spec = _type(a).sharding.spec
    return (*spec, *(None,) * (a.ndim - len(spec)))


def result(shape: Sequence[int], dtype: Any, like: Any, axes: Sequence[Any]) -> jax.ShapeDtypeStruct:
    """What a kernel gives: spread over these axes of the mesh of `like`."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(_type(like).sharding.mesh, PartitionSpec(*axes)))


def lead_of(tree: Any, n: int) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """The lengths of the first n axes, and the Explicit mesh axes over which these are spread: those of some leaf, as others may
    have an axis of length one there."""
    leaves = tree_leaves(tree)
    longest = [next((a for a in leaves if a.shape[i] != 1), leaves[0]) for i in range(n)]
    return tuple(a.shape[i] for i, a in enumerate(longest)), tuple(axes_of(a)[i] for i, a in enumerate(longest))


def _repeated(a: Any, size: int, mapped: Any, axis: int) -> Any:
    """With a new leading axis, spread over the Explicit mesh axes over which that axis of an array that is mapped is."""
    spread = axes_of(mapped)[axis]
    if spread is None or size == 1 or any(axes_of(a)) or jax.sharding.get_abstract_mesh().empty:
        return jnp.broadcast_to(a, (size, *a.shape))
    sharding = NamedSharding(_type(mapped).sharding.mesh, PartitionSpec(spread))
    return jnp.broadcast_to(a, (size, *a.shape), out_sharding=sharding)


def _summed_to(a: Any, like: Any) -> Any:
    """A cotangent, summed over the axes along which an array of length one serves all."""
    axes = tuple(i for i, (n, m) in enumerate(zip(a.shape, like.shape, strict=True)) if n != m)
    return a.sum(axes, keepdims=True) if axes else a


def _typed(outputs: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    """Results vary over the operands' manual axes."""
    plain = [jax.core.ShapedArray(o.shape, o.dtype) for o in outputs]
    if operands[0].sharding.mesh.empty:
        return plain
    manual = jax.sharding.ManualAxisType(varying=_varying(operands))
    return [p.update(sharding=o.sharding, manual_axis_type=manual) for p, o in zip(plain, outputs, strict=True)]


# ---------------------------------------------------------------------------------------------- several devices


def _divided(ctx: Any) -> tuple[Any, bool | str]:
    """Whether XLA is to divide the program that is lowered among devices, or why it cannot although there are several.  And
    the context, with devices and a mesh, which JAX gives only to primitives on a list of its own and under jax.set_mesh; any
    do."""
    module = ctx.module_context
    axis = module.axis_context
    if isinstance(axis, mlir.SPMDAxisContext):
        rest = math.prod(n for name, n in axis.mesh.shape.items() if name not in axis.manual_axes)
        return ctx, rest > 1 and "in a shard_map over some axes of a mesh"
    if not isinstance(axis, mlir.ShardingContext) or axis.num_devices == 1:
        return ctx, False
    if module.lowering_parameters.for_export:
        return ctx, "in what jax.export exports"
    if not getattr(jax.config, "jax_use_shardy_partitioner", True):
        return ctx, "with the partitioner before Shardy"
    devices = axis.device_assignment or tuple(jax.devices()[: axis.num_devices])
    if len(devices) < axis.num_devices:
        return ctx, "for more devices than there are"
    mesh = axis.abstract_mesh
    if mesh is None or mesh.empty:
        mesh = AbstractMesh((axis.num_devices,), ("devices",), axis_types=(AxisType.Auto,))
    axis = mlir.ShardingContext(axis.num_devices, devices, mesh)
    return ctx.replace(module_context=module.replace(axis_context=axis)), True


def _replicated(operands: Sequence[Any]) -> bool:
    """Whether devices of a shard_map compute the same: its types say so, unless `check_vma` is False."""
    mesh, varying = operands[0].sharding.mesh, _varying(operands)
    manual = [n for name, n in mesh.shape.items() if name in mesh.manual_axes and name not in varying]
    return bool(varying) and math.prod(manual) > 1


# ---------------------------------------------------------------------------------------------- the primitive


def float64_if(arrays: Iterable[Any]) -> Any:
    """JAX's float64, if there is any: arrays may come from where it was enabled to where it no longer is."""
    return jax.enable_x64(True) if any(a.dtype == jnp.float64 for a in arrays) else contextlib.nullcontext()


class KernelPrimitive:
    """`shapes(*args, **static)` gives the pytree of results, each by `result`; `implementations` maps platforms to functions
    of the same arguments in JAX terms, of `divided`, see `_divided`, and of `replicated`: whether several devices compute this,
    whose results are to have the same bits; "default" serves the platforms that are not named.  Every argument may carry
    leading axes: those that vmap adds.  `shared(mapped arguments, **static)` says, leaf by leaf, which of those that are not
    mapped keep an axis of length one there, in place of a copy for each entry: see `lead_of`."""

    def __init__(self, name: str, shapes: Callable, implementations: dict[str, Callable], shared: Callable):
        self.name, self.shapes, self.shared = name, shapes, shared
        self.primitive = core.Primitive(name)
        self.primitive.multiple_results = True
        self.primitive.def_impl(self._eager)
        self.primitive.def_abstract_eval(self._abstract)
        for platform, implementation in implementations.items():
            mlir.register_lowering(
                self.primitive,
                functools.partial(self._lower, implementation),
                platform=None if platform == "default" else platform,
            )
        batching.primitive_batchers[self.primitive] = self._batch
        kernels[name] = self

    def __call__(self, *args: Any, **static: Any) -> Any:
        leaves, tree = tree_flatten(args)
        out = self.primitive.bind(*_vary_alike(leaves), tree=tree, **static)
        return tree_unflatten(self.out_tree(leaves, tree, static), out)

    def out_tree(self, leaves: Sequence[Any], tree: Any, static: dict[str, Any]) -> Any:
        return jax.tree.structure(self.shapes(*tree_unflatten(tree, leaves), **static))

    def _abstract(self, *avals: Any, tree: Any, **static: Any) -> list[Any]:
        return _typed(tree_leaves(self.shapes(*tree_unflatten(tree, avals), **static)), avals)

    def _lower(self, implementation: Callable, ctx: Any, *values: Any, **params: Any) -> Any:
        ctx, divided = _divided(ctx)
        implementation = functools.partial(implementation, divided=divided, replicated=_replicated(ctx.avals_in))
        flat = functools.partial(self._flat, implementation)
        with float64_if(ctx.avals_in):
            return mlir.lower_fun(flat, multiple_results=True)(ctx, *values, **params)

    def _flat(self, implementation: Callable, *leaves: Any, tree: Any, **static: Any) -> list[Any]:
        run = lambda *leaves: tree_leaves(implementation(*tree_unflatten(tree, leaves), **static))
        types = [jax.typeof(a) for a in leaves]
        mesh = types[0].sharding.mesh
        explicit = [
            name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit
        ]
        if explicit:  # it need not be written for these
            out = self._abstract(*types, tree=tree, **static)
            run = jax.sharding.auto_axes(run, axes=tuple(explicit), out_sharding=[o.sharding for o in out])
        return run(*leaves)

    def _eager(self, *leaves: Any, **params: Any) -> Any:
        eager_calls[self.name] += 1
        # else the jitted bind would come back here, also where JAX looks for NaN
        with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
            results = _bind_jitted(*leaves, primitive=self.primitive, params=tuple(params.items()))
        if jax.config.jax_debug_nans and any(bool(jnp.isnan(a).any()) for a in results):  # type: ignore[attr-defined]
            raise FloatingPointError(f"invalid value (nan) encountered in {self.name}")
        return results

    def _batch(
        self, leaves: Sequence[Any], dims: Sequence[int | None], *, tree: Any, **static: Any
    ) -> tuple[list[Any], list[int]]:
        """The mapped axis becomes one more leading axis.  (Merging it with the batch axis here would move data where
        either is spread over devices.)"""
        mapped = next((a, d) for a, d in zip(leaves, dims, strict=True) if d is not None)
        size = mapped[0].shape[mapped[1]]
        shared = tree_leaves(self.shared(tree_unflatten(tree, [d is not None for d in dims]), **static))
        front = [
            _repeated(a, 1 if s else size, *mapped) if d is None else jnp.moveaxis(a, d, 0)
            for a, d, s in zip(leaves, dims, shared, strict=True)
        ]
        out = self.primitive.bind(*_vary_alike(front), tree=tree, **static)
        return out, [0] * len(out)

    # ---- rules over pytrees

    def def_jvp(self, rule: Callable) -> Callable:
        """rule(args, tangents, **static) -> result, tangent of the result."""

        def flat_rule(primals, tangents, *, tree, **static):
            tangents = [None if is_zero(t) else t for t in tangents]
            out, t_out = rule(tree_unflatten(tree, primals), tree_unflatten(tree, tangents), **static)
            pairs = zip(tree_leaves(out), leaves_like(out, t_out), strict=True)
            return tree_leaves(out), [_zero(o) if t is None else t for o, t in pairs]

        ad.primitive_jvps[self.primitive] = flat_rule
        return rule

    def def_transpose(self, rule: Callable) -> Callable:
        """rule(*args, wanted, cotangent, **static) -> cotangent of the last argument; the kernel is linear in those
        leaves of it that `wanted` marks, and `args` are the others before it.  Of a kernel with a single argument, `args`
        is that one, without these leaves."""

        def flat_rule(cotangents, *leaves, tree, **static):
            unknown = [ad.is_undefined_primal(a) for a in leaves]
            avals = [a.aval if u else a for a, u in zip(leaves, unknown, strict=True)]
            args = tree_unflatten(tree, [None if u else a for a, u in zip(leaves, unknown, strict=True)])
            cotangent = tree_unflatten(
                self.out_tree(avals, tree, static), [None if is_zero(c) else c for c in cotangents]
            )
            got: list[Any] = []
            if not all_none(cotangent):
                wanted = tree_unflatten(tree, unknown)[-1]
                got = leaves_like(wanted, rule(*(args[:-1] or args), wanted=wanted, cotangent=cotangent, **static))
            got = [None] * (len(leaves) - len(got)) + got
            zeros = [ad.Zero(a) if u else None for a, u in zip(avals, unknown, strict=True)]
            found = zip(got, zeros, unknown, avals, strict=True)
            return [z if c is None or not u else _summed_to(c, a) for c, z, u, a in found]

        ad.primitive_transposes[self.primitive] = flat_rule
        self.transpose = rule
        return rule

    def def_dce(self, rule: Callable) -> Callable:
        """rule(args, used, **static) -> None to keep the equation, or a cheaper (kernel, args, static, positions), where
        positions say which of the old results the new kernel's results are.  `used` marks the leaves of the result."""

        def flat_rule(used, *rest):  # JAX 0.12 passes the live inputs before the equation
            eqn = rest[-1]
            if not any(used):
                return [False] * len(eqn.invars), None
            new = rule(tree_unflatten(eqn.params["tree"], eqn.invars), list(used), **_static(eqn))
            if new is None or not _alike(eqn, *new):
                return [True] * len(eqn.invars), eqn
            new_eqn = _equation(eqn, *new)
            return [any(v is w for w in new_eqn.invars) for v in eqn.invars], new_eqn

        pe.dce_rules[self.primitive] = flat_rule
        return rule

    def def_high_order(self, reference: Callable) -> None:
        """Differentiate this kernel by JAX's own rules, applied to `reference`, the same function in pure JAX."""

        @self.def_jvp
        def rule(args, tangents, **static):
            leaves, tree = tree_flatten(args)
            t_leaves = leaves_like(args, tangents)
            moving = [i for i, t in enumerate(t_leaves) if t is not None]

            def along(*moved):
                full = list(leaves)
                for i, leaf in zip(moving, moved, strict=True):
                    full[i] = leaf
                return self._flat(reference, *full, tree=tree, **static)

            with float64_if(leaves):
                _, t_out = jax.jvp(along, [leaves[i] for i in moving], [t_leaves[i] for i in moving])
            return self(*args, **static), tree_unflatten(self.out_tree(leaves, tree, static), t_out)


@functools.partial(jax.jit, static_argnames=("primitive", "params"))
def _bind_jitted(*leaves, primitive, params):
    return primitive.bind(*leaves, **dict(params))


# ---------------------------------------------------------------------------------------------- the three faces


def tie(
    primal: KernelPrimitive,
    dual: KernelPrimitive,
    linear: KernelPrimitive,
    *,
    saved_name: str,
    split: Callable[[dict[str, Any]], tuple[dict[str, Any], dict[str, Any], int]],
) -> Callable:
    """Relate three faces of one function, see above; returns what the primal's JVP rule calls with (*args, tangents).

    split(static of the dual) -> static of the primal, static of the linear face, number of result leaves of the primal.
    A checkpoint policy saves the primal's results when it accepts the primal or the name `saved_name`.
    """

    def parts(args: Sequence[Any], static: dict[str, Any]):
        *known, tangents = args
        primal_static, linear_static, _ = split(static)
        return (
            (primal, tuple(known), primal_static),
            lambda out: (linear, (*known, out, tangents), linear_static),
        )

    def apart(args: Sequence[Any], static: dict[str, Any]) -> tuple[Any, Any]:
        (first, first_args, first_static), rest = parts(args, static)
        out = first(*first_args, **first_static)
        second, second_args, second_static = rest(out)
        return out, second(*second_args, **second_static)

    def fused(*args: Any, **static: Any) -> tuple[Any, Any]:
        if _varying(args[-1]) <= _varying(args[:-1]):
            return dual(*args, **static)
        return apart(args, static)  # fused, the primal result would vary over axes over which its arguments do not

    def evaluate_partially(trace, *tracers, tree, **static):
        """jax.grad, jax.linearize and the transposition of control flow: the arguments known, the tangents not."""
        known = [t.is_known() for t in tracers]
        if all(known):
            return dual.primitive.bind(*[t.pval.get_known() for t in tracers], tree=tree, **static)
        if not all(tree_leaves(tree_unflatten(tree, known)[:-1])):
            return trace.default_process_primitive(dual.primitive, tracers, dict(tree=tree, **static))
        args = tree_unflatten(tree, [t.pval.get_known() if k else t for t, k in zip(tracers, known, strict=True)])
        (first, first_args, first_static), rest = parts(args, static)
        out = first(*first_args, **first_static)
        second, second_args, second_static = rest(out)
        with core.set_current_trace(trace):
            t_out = second(*second_args, **second_static)
        return tree_leaves((out, t_out))

    def split_equation(policy, unknown, instantiated, eqn):
        """jax.checkpoint, also around scan and jit: the same split, on an equation.  Returns the known equation, the
        staged one, which results are unknown, which must be instantiated, and the residuals."""
        args, static = tree_unflatten(eqn.params["tree"], eqn.invars), _static(eqn)
        n, m = len(eqn.outvars), split(static)[2]
        residuals = [v for v, i in zip(eqn.invars, instantiated, strict=True) if isinstance(v, core.Var) and not i]
        if not any(unknown):
            saves = _saves(policy, dual, eqn, saved_name)
            return (
                (eqn, None, [False] * n, [False] * n, []) if saves else (eqn, eqn, [False] * n, [True] * n, residuals)
            )
        if any(tree_leaves(tree_unflatten(eqn.params["tree"], unknown)[:-1])):
            return None, eqn, [True] * n, [True] * n, residuals
        first, rest = parts(args, static)
        unknown_out = [False] * m + [True] * (n - m)
        if not _saves(policy, primal, eqn, saved_name):
            return _equation(eqn, *first, range(m)), eqn, unknown_out, [True] * n, residuals
        saved = [core.Var(v.aval) if isinstance(v, core.DropVar) else v for v in eqn.outvars[:m]]
        first_leaves, first_tree = tree_flatten(first[1])
        out = tree_unflatten(primal.out_tree([v.aval for v in first_leaves], first_tree, first[2]), saved)
        return (
            _equation(eqn, *first, saved), _equation(eqn, *rest(out), range(m, n)),
            unknown_out, unknown_out, residuals + saved,
        )  # fmt: skip

    def batch(leaves, dims, *, tree, **static):
        """vmap over the tangents alone computes the primal once."""
        mapped = tree_unflatten(tree, [d is not None for d in dims])
        if any(tree_leaves(mapped[:-1])):
            return dual._batch(leaves, dims, tree=tree, **static)
        (first, first_args, first_static), rest = parts(tree_unflatten(tree, leaves), static)
        out = first(*first_args, **first_static)
        second, second_args, second_static = rest(out)
        second_leaves, second_tree = tree_flatten(second_args)
        count = len(tree_leaves(second_args[-1]))
        second_dims = [None] * (len(second_leaves) - count) + list(dims[len(dims) - count :])
        t_out, t_dims = second._batch(second_leaves, second_dims, tree=second_tree, **second_static)
        return [*tree_leaves(out), *t_out], [None] * len(tree_leaves(out)) + t_dims

    @dual.def_dce
    def drop_tangents(args, used, **static):
        (first, first_args, first_static), _ = parts(args, static)
        m = split(static)[2]
        return None if any(used[m:]) else (first, first_args, first_static, range(m))

    @dual.def_transpose
    def transpose(*args, wanted, cotangent, **static):
        """linear_transpose of a JVP: the dual as a linear function of its tangents."""
        if not all_none(cotangent[0]):
            raise ValueError("the primal result of a JVP is not linear in the tangents: it cannot be transposed")
        (first, first_args, first_static), _ = parts((*args, None), static)
        out = first(*first_args, **first_static)
        return linear.transpose(*args, out, wanted=wanted, cotangent=cotangent[1], **split(static)[1])

    pe.custom_partial_eval_rules[dual.primitive] = evaluate_partially
    pe.partial_eval_jaxpr_custom_rules[dual.primitive] = split_equation
    batching.primitive_batchers[dual.primitive] = batch
    return fused


# ---------------------------------------------------------------------------------------------- equations

_name_primitive = jax.make_jaxpr(lambda x: checkpoint_name(x, "name"))(1.0).eqns[0].primitive


def _static(eqn: Any) -> dict[str, Any]:
    return {k: v for k, v in eqn.params.items() if k != "tree"}


def _equation(eqn: Any, kernel: KernelPrimitive, args: Any, static: dict[str, Any], results: Iterable[Any]) -> Any:
    """`eqn` with another kernel; results are variables or positions among those of `eqn`."""
    leaves, tree = tree_flatten(args)
    outvars = [eqn.outvars[r] if isinstance(r, int) else r for r in results]
    return eqn.replace(primitive=kernel.primitive, invars=leaves, outvars=outvars, params=dict(tree=tree, **static))


def _alike(eqn: Any, kernel: KernelPrimitive, args: Any, static: dict[str, Any], results: Iterable[int]) -> bool:
    """Has another kernel the results of `eqn`?  Not where only what it leaves out is mapped."""
    shapes = tree_leaves(kernel.shapes(*jax.tree.map(lambda v: v.aval, args), **static))
    return all(new.shape == eqn.outvars[r].aval.shape for new, r in zip(shapes, results, strict=True))


def _saves(policy: Callable, kernel: KernelPrimitive, eqn: Any, name: str) -> bool:
    """Does the checkpoint policy save this kernel's results?  It is asked about the kernel and about the name.
    Policies answer with a bool or with an object whose class says so."""

    def yes(answer: Any) -> bool:
        if type(answer).__name__ == "Offloadable":
            warnings.warn(f"results named {name!r} are saved where they are: they cannot be offloaded", stacklevel=2)
            return True
        return answer is True or type(answer).__name__ == "SaveableType"

    by_kernel = policy(kernel.primitive, *[v.aval for v in eqn.invars], **eqn.params)
    return yes(by_kernel) or yes(policy(_name_primitive, eqn.outvars[0].aval, name=name))
