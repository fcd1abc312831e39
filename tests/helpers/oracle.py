"""What attention and its derivatives should be, and how far a result may be from it.

`attention` is the simplest program for it: all scores at once, derivatives by JAX.  In float64 it is the truth.  In
another dtype it is the naive computation, whose error says how exact one can be in that dtype: a result passes when no
element of it is off by more than twice the largest error of the naive computation, plus a rounding floor.

The largest error counts, not a mean, since what goes wrong in a tiled kernel goes wrong somewhere: in the ragged tile,
at the diagonal, in one head.  The floor is needed where the naive computation is exact by accident (one key: P = 1, and
the gradients of scores are zero).  It is relative to the largest of the results of one rank that are compared together,
for results that cancel to nearly zero are sums of terms as large as the others; but ℓ says nothing of the size of o.
"""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FLOOR = 4  # units in the last place
TF32_EPSILON = 2.0**-11  # for `product_epsilon`


def attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    causal_alignment: str = "upper_left",
    query_segment_ids: Any = None,
    key_value_segment_ids: Any = None,
    key_ranges: Any = None,
    mask_block_size: tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    sinks: Any = None,
    kept: Any = None,  # [B, N, T, S]: what dropout multiplies the probabilities by
    implementation: str | None = None,  # so that it can stand in for the public function
    return_residual: bool = False,
) -> Any:
    """Four-dimensional arrays, as in `jax_flash_jvp.dot_product_attention`; softmax in at least float32."""
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    group = query.shape[2] // key.shape[2]
    if mask_block_size is not None:
        for axis, (size, n) in enumerate(zip(mask_block_size, (query.shape[1], key.shape[1]), strict=True)):
            mask = jnp.repeat(mask, size, 2 + axis).take(np.arange(n), 2 + axis)
    if key_ranges is not None:
        j = jnp.arange(key.shape[1])
        in_ranges = ((key_ranges[..., 0, None] <= j) & (j < key_ranges[..., 1, None])).any(-2)
        in_ranges = _for_each_head(in_ranges, query, key)
    bias, mask = (a if a is None else _for_each_head(a, query, key) for a in (bias, mask))
    key, value = jnp.repeat(key, group, axis=2), jnp.repeat(value, group, axis=2)
    scores = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=dtype)
    scores *= query.shape[-1] ** -0.5 if scale is None else scale
    if logits_soft_cap is not None:
        scores = logits_soft_cap * jnp.tanh(scores / logits_soft_cap)
    if bias is not None:
        scores += bias.astype(dtype)

    i, j = jnp.arange(query.shape[1])[:, None], jnp.arange(key.shape[1])
    if causal_alignment == "lower_right":
        i += key.shape[1] - query.shape[1]
    visible = scores > -jnp.inf  # a bias may hide keys, too
    if mask is not None:
        visible &= mask
    if key_ranges is not None:
        visible &= in_ranges
    if query_segment_ids is not None:
        visible &= query_segment_ids[:, None, :, None] == key_value_segment_ids[:, None, None, :]
    if is_causal:
        visible &= j <= i
    if local_window_size is not None:
        left, right = (local_window_size,) * 2 if isinstance(local_window_size, int) else local_window_size
        visible &= (left is None or i - left <= j) & (right is None or j <= i + right)
    if query_seq_lengths is not None:
        visible &= jnp.arange(query.shape[1])[:, None] < query_seq_lengths[:, None, None, None]
    if key_value_seq_lengths is not None:
        visible &= j < key_value_seq_lengths[:, None, None, None]

    some = visible.any(-1, keepdims=True)
    scores = jnp.where(visible, scores, -jnp.inf)
    if sinks is not None:  # one more key, whose value is zero
        sinks = jnp.broadcast_to(sinks.astype(dtype)[:, None, None], (*scores.shape[:3], 1))
        scores, some = jnp.concatenate([scores, sinks], -1), True
    largest = jnp.where(some, jax.lax.stop_gradient(scores).max(-1, keepdims=True, initial=-jnp.inf), 0)
    exponentials = jnp.exp(scores - largest)
    total = jnp.where(some, exponentials.sum(-1, keepdims=True), 1)
    log_sum_exp = jnp.where(some, largest + jnp.log(total), -jnp.inf)[..., 0]
    probabilities = exponentials[..., : key.shape[1]] / total
    probabilities = (probabilities if kept is None else probabilities * kept).astype(value.dtype)
    output = jnp.einsum("bnts,bsnh->btnh", probabilities, value, preferred_element_type=dtype).astype(query.dtype)
    return (output, log_sum_exp.mT) if return_residual else output


def tangents_along_the_scores(attention: Callable, *x: Any) -> dict[str, Any]:
    """The tangents of queries and keys are they themselves: Ṡ is 2 S, and where one key has the weight, far from its mean."""
    return {"fused": jax.jvp(attention, x, x)[1], "linear": jax.linearize(attention, *x)[1](*x)}


def _for_each_head(array: Any, query: Any, key: Any) -> Any:
    """A bias or a mask that has the heads of the keys, with those of the queries."""
    heads = key.shape[2]
    shared = array.ndim == 4 and array.shape[1] == heads != query.shape[2]
    return jnp.repeat(array, query.shape[2] // heads, axis=1) if shared and heads > 1 else array


def with_growing_scores(query: np.ndarray, key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """These, such that the largest score of every row grows from each 128 keys to the next, by little or by much."""
    along = np.sign(normal(5, query.shape[-1]))
    steps = np.repeat([0, 0.5, 0.6, 4, 4.1, 9, 9.5, 10], 128)[: key.shape[1], None, None]
    return np.abs(query) * along, key + steps * along


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def evaluate(compute: Callable, attention: Callable, arrays: Any, dtype: str) -> Any:
    """compute(attention, *arrays) with floating-point arrays in `dtype`, every result of that dtype rounded to it."""

    def cast(a: np.ndarray) -> Any:
        return jnp.asarray(a, dtype if jnp.issubdtype(a.dtype, jnp.floating) else a.dtype)

    with jax.enable_x64(dtype == "float64"):
        return _compiled(compute, attention)(*jax.tree.map(cast, arrays))


@functools.lru_cache(maxsize=64)
def _compiled(compute: Callable, attention: Callable) -> Callable:
    options = {"xla_allow_excess_precision": False}
    return jax.jit(functools.partial(compute, attention), compiler_options=options)


def assert_close(got: Any, exact: Any, naive: Any, largest_score: float = 0, product_epsilon: float = 0) -> None:
    """Compare pytrees of results: `got` and `naive` in one dtype, `exact` in float64.

    A kernel that computes P = exp(S - ℓ) from a saved ℓ cannot know P better than S and ℓ are rounded: `largest_score`,
    of |S|, adds that to the floor.  `product_epsilon`: to what the operands of a product are rounded, where that is
    coarser than the dtype.
    """
    assert jax.tree.structure(got) == jax.tree.structure(exact)
    paths, exact = zip(*jax.tree_util.tree_leaves_with_path(exact), strict=True)
    got, naive = jax.tree.leaves(got), jax.tree.leaves(naive)
    largest: dict[int, float] = collections.defaultdict(float)
    for e in exact:
        largest[e.ndim] = max(largest[e.ndim], np.abs(_finite(e)).max(initial=0))
    for path, g, n, e in zip(paths, got, naive, exact, strict=True):
        assert (g.shape, g.dtype) == (n.shape, n.dtype)
        epsilon = max(jnp.finfo(n.dtype).eps, product_epsilon)
        relative = float(epsilon + largest_score * jnp.finfo(jnp.promote_types(n.dtype, "float32")).eps)
        g, n, e = (np.asarray(a, np.float64) for a in (g, n, e))
        result = f"result{jax.tree_util.keystr(path)}"
        assert np.array_equal(np.isneginf(g), np.isneginf(e)), f"{result}: error, -inf in other places"
        error, allowed = _error(g, e), 2 * _error(n, e) + FLOOR * relative * largest[e.ndim]
        assert error <= allowed, f"{result}: error {error:.2g}, allowed {allowed:.2g}"


def assert_as_exact_as_naive(
    compute: Callable,
    result_of: Callable,
    arrays: Sequence[Any],
    dtype: str,
    largest_score: float = 0,
    product_epsilon: float = 0,
    naive: Callable = attention,
) -> None:
    """compute(attention, *arrays), with `result_of` as the attention, meets the rule above, which takes `naive` for it.

    Arrays are rounded to `dtype` first, so that the exact computation starts from the same numbers.  The entries of a
    dictionary are compared one by one.
    """
    rounded = jax.tree.map(
        lambda a: a.astype(dtype).astype(np.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a, arrays
    )
    got, rough = (evaluate(compute, function, rounded, dtype) for function in (result_of, naive))
    exact = evaluate(compute, naive, rounded, "float64")
    for name in exact if isinstance(exact, dict) else ():
        try:
            assert_close(got[name], exact[name], rough[name], largest_score, product_epsilon)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
    if not isinstance(exact, dict):
        assert_close(got, exact, rough, largest_score, product_epsilon)


def assert_as_exact_on_average(
    compute: Callable,
    result_of: Callable,
    arrays: Sequence[Any],
    dtype: str,
    naive: Callable = attention,
    times: float = 1.5,
) -> None:
    """Of each result, the root of the mean square of the error is at most `times` that of the naive computation: for what
    the rule above, with its floor of a few units in the last place of the largest element, would let pass."""
    rounded = jax.tree.map(lambda a: a.astype(dtype).astype(np.float64), arrays)
    got, rough = (evaluate(compute, function, rounded, dtype) for function in (result_of, naive))
    exact = evaluate(compute, naive, rounded, "float64")
    paths = jax.tree_util.tree_leaves_with_path(exact)
    for (path, e), g, n in zip(paths, *map(jax.tree.leaves, (got, rough)), strict=True):
        error, allowed = (np.square(np.asarray(a, np.float64) - e).mean() ** 0.5 for a in (g, n))
        assert error <= times * allowed, f"result{jax.tree_util.keystr(path)}: error {error:.2g}, naive {allowed:.2g}"


def _finite(a: Any) -> np.ndarray:
    return np.where(np.isneginf(a), 0, np.asarray(a, np.float64))


def _error(a: np.ndarray, exact: np.ndarray) -> float:
    """The largest; NaN wherever `a` is."""
    return np.abs(_finite(a) - _finite(exact)).max(initial=0)
