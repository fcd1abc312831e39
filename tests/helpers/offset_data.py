"""Keys and values with a part in common, for `test_offsets.py` and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import oracle
from jax_flash_jvp import dot_product_attention

B, L, N, K, D = 2, 96, 2, 1, 32
# of keys, of values; other data by name
OFFSETS = {
    "none": (0, 0), "keys-1": (1, 0), "keys-4": (4, 0), "keys-16": (16, 0), "values-4": (0, 4), "both": (1, 2),
    "far": (16, 4), "one-channel": "one-channel", "uniform": "uniform",
}  # fmt: skip
# names of `feature`; with the first every query sees every key, but for padding
SEEING_ALL = ("none", "lengths", "soft-cap", "log-sum-exp")
HIDING = ("causal", "window", "mask", "segments", "bias")


def feature(name, length=L):
    """Arguments for this feature."""
    rng, ids = np.random.default_rng(5), np.stack([np.arange(length) // 40] * B)
    return {
        "none": lambda: {},
        "lengths": lambda: dict(
            query_seq_lengths=np.array([length - 26, length]), key_value_seq_lengths=np.array([length, length - 41])
        ),
        "soft-cap": lambda: dict(logits_soft_cap=20.0),
        "log-sum-exp": lambda: dict(return_residual=True),
        "causal": lambda: dict(is_causal=True),
        "window": lambda: dict(local_window_size=(30, 10)),
        "mask": lambda: dict(mask=rng.random((1, 1, length, length)) < 0.7),
        "segments": lambda: dict(query_segment_ids=ids, key_value_segment_ids=ids),
        "bias": lambda: dict(bias=rng.standard_normal((1, N, length, length))),
    }[name]()


def draw(offset, length=L, channels=D):
    rng = np.random.default_rng(1)
    heads = dict(q=N, k=K, v=K, g=N, t_q=N, t_k=K, t_v=K)
    x = {name: rng.standard_normal((B, length, h, channels)) for name, h in heads.items()}
    if offset == "one-channel":
        x["k"][..., 3] += 30
    elif offset == "uniform":
        x |= {name: rng.uniform(1, 2, x[name].shape) for name in "qkvg"}
    else:
        for name, size in zip(("k", "v", "t_k"), (*offset, offset[0]), strict=True):
            x[name] += size * rng.standard_normal((1, 1, x[name].shape[2], channels))
    return tuple(x.values())


def derivatives(attention, q, k, v, g, t_q, t_k, t_v, scale, **features):
    """The JVP, the gradients, and all six of the gradient of the JVP."""
    wide = jnp.promote_types(q.dtype, jnp.float32)

    def inner(o):
        o, residual = o if isinstance(o, tuple) else (o, None)
        product = (o.astype(wide) * g.astype(wide)).sum()
        return product if residual is None else product + jnp.sin(residual).sum()

    attend = lambda *x: attention(*x, scale=scale, **features)
    x, tx = (q, k, v), (t_q, t_k, t_v)
    loss = lambda *x: inner(attend(*x))
    along = lambda *both: inner(jax.jvp(attend, both[:3], both[3:])[1])
    results = dict(tangent=jax.jvp(attend, x, tx)[1])
    results |= zip(("dq", "dk", "dv"), jax.grad(loss, (0, 1, 2))(*x), strict=True)
    names = ("dq of JVP", "dk of JVP", "dv of JVP", "dt_q", "dt_k", "dt_v")
    return results | dict(zip(names, jax.grad(along, range(6))(*x, *tx), strict=True))


def check(implementation, offset, scale=D**-0.5, dtype="bfloat16", times=2.0, shape=(L, D), **features):
    check_all(implementation, {offset: times}, scale, dtype, shape, **features)


def check_all(implementation, times, scale=D**-0.5, dtype="bfloat16", shape=(L, D), **features):
    """`times` naive attention's error each offset may have; one program serves all of them."""
    compute = functools.partial(derivatives, scale=scale, **features)
    attention = functools.partial(dot_product_attention, implementation=implementation)
    for offset, allowed in times.items():
        oracle.assert_as_exact_on_average(compute, attention, draw(offset, *shape), dtype, times=allowed)
