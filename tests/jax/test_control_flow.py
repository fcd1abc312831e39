"""Derivatives through scan, loops, conditionals, checkpoints and shard_map, and the step of a consistency model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jax_flash_jvp import dot_product_attention
from oracle import normal

B, T, N, H = 2, 5, 2, 4
X, TX = (tuple(normal(10 * i + j, B, T, N, H) for j in range(3)) for i in range(2))
D_O = normal(20, B, T, N, H)
WEIGHTS, T_WEIGHTS = 0.5 * normal(21, 2, H, H), normal(22, 2, H, H)
NETWORK = (WEIGHTS, X[0])  # its arguments
STEP = (WEIGHTS, X[0], TX[0])
BATCHED_STEP = (WEIGHTS, *(np.stack([a, 0.7 * a]) for a in STEP[1:]))
ALL = (0, 1, 2)

POLICIES = {  # of checkpoints, and how often the forward kernel then runs
    "nothing": (None, 2),
    "everything": (jax.checkpoint_policies.everything_saveable, 1),
    "dots": (jax.checkpoint_policies.dots_saveable, 2),
    "name": (jax.checkpoint_policies.save_only_these_names("attention"), 1),
    "other-name": (jax.checkpoint_policies.save_only_these_names("elsewhere"), 2),
    "offload": (
        jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=["attention"],
            names_which_can_be_offloaded=[],
            offload_src="device",
            offload_dst="pinned_host",
        ),
        1,
    ),
}


def loss(a):
    return lambda *x: (jnp.sin(a(*x)) * D_O).sum()


def sine(a):
    return lambda *x: jnp.sin(a(*x)).sum()


def same(f):
    return f


def layers(a, wrap=same):
    """The body of a network, and its carry."""
    return wrap(lambda h, w: h + a(h @ w, h @ (w * 2), h @ w.T))


def scanned(a, wrap=same):
    layer = layers(a, wrap)
    return lambda weights, h: jax.lax.scan(lambda h, w: (layer(h, w), None), h, weights)[0]


def looped(a, wrap=same):
    layer = layers(a, wrap)

    def network(weights, h):
        for w in weights:
            h = layer(h, w)
        return h

    return network


def gradient(network):
    return jax.grad(lambda weights, h: jnp.sin(network(weights, h)).sum(), (0, 1))


def gradient_of_gradient(network):
    return jax.grad(lambda weights, h: (gradient(network)(weights, h)[0] * T_WEIGHTS).sum(), (0, 1))


def hvp(network):
    return lambda *x: jax.jvp(gradient(network), x, (T_WEIGHTS, TX[0]))


def step(network, stop=True, wrap=same):
    """Of a consistency model: the tangent of the network, held fixed, is the target of its output."""

    def objective(weights, h, direction):
        y, ty = jax.jvp(lambda h: network(weights, h), (h,), (direction,))
        return ((y - jnp.sin(jax.lax.stop_gradient(ty) if stop else ty)) ** 2).sum()

    return jax.value_and_grad(wrap(objective))


def step_with_aux(network):
    """The same with the tangent as an auxiliary result."""

    def objective(weights, h, direction):
        y, ty = jax.jvp(lambda h: network(weights, h), (h,), (direction,))
        return (y**2).sum(), ty

    return jax.value_and_grad(objective, has_aux=True)


def conditional(a):
    return lambda q, k, v: jax.lax.cond(q.sum() > 0, lambda: loss(a)(q, k, v), lambda: loss(a)(k, q, v))


def repeated(a):
    """A loop of a length that is not known when it is traced: forward mode only."""
    return lambda q, k, v: jax.lax.fori_loop(0, jnp.int32(q.size > 0) + 1, lambda i, h: a(h, k, v), q)


def checkpointed(policy):
    return lambda f: jax.checkpoint(f, policy=policy)


FORWARD_BACKWARD = dict(forward=1, backward=1)
CONSISTENCY = dict(forward_dual=1, backward=1)
DUAL = dict(forward_dual=1, backward_dual=1)

CASES = {
    "grad-scan": (lambda a: gradient(scanned(a)), NETWORK, None, FORWARD_BACKWARD),
    "grad-loop": (lambda a: gradient(looped(a)), NETWORK, dict(forward=2, backward=2)),
    "grad-cond": (lambda a: jax.grad(conditional(a), ALL), X, None, dict(forward=2, backward=2)),
    "grad-checkpoint-cond": (lambda a: jax.grad(jax.checkpoint(conditional(a)), ALL), X),
    "jvp-cond": (lambda a: lambda *x: jax.jvp(conditional(a), x, TX), X, None, dict(forward_dual=2)),
    "jvp-while": (lambda a: lambda *x: jax.jvp(repeated(a), x, TX), X, None, dict(forward_dual=1)),
    "jvp-scan-value-only": (
        lambda a: lambda q, k, v: jax.jvp(
            jax.jit(lambda v: jax.lax.scan(lambda h, _: (a(q, k, h), None), v, None, length=2)[0]), (v,), TX[2:]
        ),
        X, None, dict(forward_dual=1),
    ),
    "grad-jit-checkpoint-jit": (
        lambda a: jax.value_and_grad(jax.jit(jax.checkpoint(jax.jit(loss(a)))), ALL),
        X, None, dict(forward=2, backward=1),
    ),
    # ---- the consistency step
    "step-loop": (lambda a: step(looped(a)), STEP, dict(forward_dual=2, backward=2)),
    "step-scan": (lambda a: step(scanned(a)), STEP, None, CONSISTENCY),
    "step-scan-in-jit": (lambda a: step(scanned(a), wrap=jax.jit), STEP, None, CONSISTENCY),
    "step-scan-of-jit": (lambda a: step(scanned(a, jax.jit)), STEP, None, CONSISTENCY),
    "step-scan-checkpoint": (
        lambda a: step(scanned(a, jax.checkpoint)), STEP, None, dict(forward_dual=1, forward=1, backward=1)
    ),
    "step-loop-checkpoint": (lambda a: step(looped(a, jax.checkpoint)), STEP),
    "step-scan-checkpoint-name": (
        lambda a: step(scanned(a, checkpointed(POLICIES["name"][0]))), STEP, None, CONSISTENCY
    ),
    "step-checkpoint-of-all": (lambda a: step(scanned(a), wrap=jax.checkpoint), STEP),
    "step-aux": (lambda a: step_with_aux(scanned(a)), STEP, None, CONSISTENCY),
    "step-vmap": (lambda a: jax.vmap(step(scanned(a)), (None, 0, 0)), BATCHED_STEP, None, CONSISTENCY),
    "through-tangent-scan": (lambda a: step(scanned(a), stop=False), STEP, None, DUAL),
    "through-tangent-scan-checkpoint": (lambda a: step(scanned(a, jax.checkpoint), stop=False), STEP),
    # ---- second order
    "hvp-scan": (lambda a: hvp(scanned(a)), NETWORK, None, DUAL),
    "hvp-scan-checkpoint": (lambda a: hvp(scanned(a, jax.checkpoint)), NETWORK),
    "grad-of-grad-scan": (lambda a: gradient_of_gradient(scanned(a)), NETWORK),
    "grad-of-grad-scan-checkpoint": (lambda a: gradient_of_gradient(scanned(a, jax.checkpoint)), NETWORK),
    "vmap-grad-scan-checkpoint": (
        lambda a: jax.vmap(gradient(scanned(a, jax.checkpoint)), (None, 0)), BATCHED_STEP[:2]
    ),
}  # fmt: skip


# outside jit, too: most of the time goes into compiling what is traced alike under jit
EAGER = {"grad-loop", "grad-scan", "grad-checkpoint-cond", "jvp-while", "hvp-scan"}
EAGER |= {"step-loop", "step-scan", "step-loop-checkpoint", "step-scan-checkpoint", "step-vmap"}


@pytest.mark.parametrize("name", CASES)
def test_control_flow(name, check):
    check(*CASES[name], eager=name in EAGER)


CHECKPOINTED = {  # with a place for a checkpoint, and how often the backward kernel runs
    "scan": (lambda a, c=same: gradient(scanned(a, c)), NETWORK, 1),
    "loop": (lambda a, c=same: gradient(looped(a, c)), NETWORK, 2),
    "of-scan": (lambda a, c=same: gradient(c(scanned(a))), NETWORK, None),
    "of-jit": (lambda a, c=same: jax.value_and_grad(c(jax.jit(loss(a))), ALL), X, 1),
}


# every policy of a scan and of a call, and elsewhere those that differ in what they save of attention
PAIRS = [(name, policy) for name in CHECKPOINTED for policy in POLICIES if name in ("scan", "of-jit")]
PAIRS += [(name, policy) for name in ("loop", "of-scan") for policy in ("nothing", "everything", "name")]


@pytest.mark.parametrize(("name", "policy"), PAIRS)
def test_checkpoint(name, policy, check):
    (make, args, calls), (function, forwards) = CHECKPOINTED[name], POLICIES[policy]
    kernels = None if None in (calls, forwards) else dict(forward=forwards * calls, backward=calls)
    eager = policy in ("nothing", "name")
    check(lambda a: make(a, checkpointed(function)), args, None, kernels, eager=eager, make_expected=make)


# ------------------------------------------------------------------------------------------------ shard_map


def fixed_tangent(f):
    """A loss of the output and of the tangent, the latter held fixed."""

    def objective(*x):
        y, ty = jax.jvp(f, x[:3], x[3:])
        return (jnp.sin(y) * jax.lax.stop_gradient(ty)).sum()

    return objective


SPLIT, WHOLE = PartitionSpec("devices"), PartitionSpec()
SHARDED = {
    "grad": (lambda a, shard: jax.grad(sine(shard(a)), ALL), X, FORWARD_BACKWARD),
    "grad-keys-on-all-devices": (
        lambda a, shard: jax.grad(
            sine(shard(lambda q, k, v: a(q, jnp.concatenate([k[:1]]), v[:1]), (SPLIT, WHOLE, WHOLE))), ALL
        ),
        X, FORWARD_BACKWARD,
    ),
    "grad-inside": (lambda a, shard: shard(jax.grad(sine(a), ALL), (SPLIT,) * 3, (SPLIT,) * 3), X, FORWARD_BACKWARD),
    "jvp": (lambda a, shard: lambda *x: jax.jvp(shard(a), x[:3], x[3:]), X + TX, dict(forward_dual=1)),
    "jvp-values-on-all-devices": (
        lambda a, shard: shard(lambda *x: jax.jvp(a, x[:3], x[3:]), (WHOLE,) * 3 + (SPLIT,) * 3, (SPLIT, SPLIT)),
        tuple(a[:1] for a in X) + TX, None,
    ),
    "grad-scan-checkpoint": (
        lambda a, shard: gradient(shard(scanned(a, jax.checkpoint), (WHOLE, SPLIT))),
        NETWORK, dict(forward=2, backward=1),
    ),
    "step": (lambda a, shard: jax.grad(fixed_tangent(shard(a)), ALL), X + TX, CONSISTENCY),
}  # fmt: skip


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no-vma"])
@pytest.mark.parametrize("name", SHARDED)
def test_shard_map(name, check_vma, check):
    make, args, kernels = SHARDED[name]
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(AxisType.Auto,))

    def shard(f, in_specs=(SPLIT,) * 3, out_specs=SPLIT):
        return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)

    check(lambda a: make(a, shard), args, None, kernels, eager=name in ("grad", "step"))


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_a_gradient_on_all_devices_along_a_tangent_of_each():
    """The gradient must not vary as its tangent does."""
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(AxisType.Auto,))
    q = jnp.asarray(X[0][:1], jnp.float32)
    gradient = jax.grad(lambda q: jnp.sin(dot_product_attention(q, q, q)).sum())
    hvp = lambda q, t: jax.jvp(gradient, (q,), (t,))
    along = jnp.concatenate([q, jnp.cos(q)])
    got = jax.jit(jax.shard_map(hvp, mesh=mesh, in_specs=(WHOLE, SPLIT), out_specs=(WHOLE, SPLIT)))(q, along)
    expected = gradient(q), jnp.concatenate([hvp(q, t[None])[1] for t in along])
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_second_tangents_on_all_devices_each_along_its_own():
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(AxisType.Auto,))
    q = jnp.asarray(X[0][:1], jnp.float32)
    along = lambda f, t: lambda q: jax.jvp(f, (q,), (t,))[1]
    attend = lambda q: dot_product_attention(q, q, q)
    second = lambda q, t: along(along(attend, t), t)(q)
    of_each = lambda q: jax.lax.pcast(q, "devices", to="varying")  # else its gradient is the sum of theirs
    by_reverse = lambda q, t: jax.grad(lambda q: jnp.sin(second(q, t)).sum())(q)
    tangents = jnp.concatenate([q, jnp.cos(q)])
    for f, own in ((second, lambda q: q), (by_reverse, of_each)):
        on_all = jax.shard_map(lambda q, t: f(own(q), t), mesh=mesh, in_specs=(WHOLE, SPLIT), out_specs=SPLIT)
        expected = jnp.concatenate([f(q, t[None]) for t in tangents])
        np.testing.assert_allclose(jax.jit(on_all)(q, tangents), expected, rtol=1e-4, atol=1e-4)


def test_offloading_is_refused_aloud():
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["attention"], offload_src="device", offload_dst="pinned_host"
    )  # fmt: skip
    q = jnp.ones((1, 5, 2, 4))
    loss = jax.checkpoint(lambda q: jnp.sin(dot_product_attention(q, q, q)).sum(), policy=policy)
    with pytest.warns(UserWarning, match="'attention' are saved where they are"):
        jax.make_jaxpr(jax.grad(loss))(q)
