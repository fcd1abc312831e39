"""One attention call, described: its static part, its arrays, and the errors that its arguments raise in both frameworks.

Imports no framework: shapes are tuples and dtypes are names, so that JAX and PyTorch share the descriptions and the texts.
Everywhere below the public functions the logical layout is

    query [*, B, T, N, H]    key [*, B, S, K, H]    value [*, B, S, K, Hv]    output [*, B, T, N, Hv]
    bias, mask [*, 1|B, 1|K|N, 1|T, 1|S]    query_lengths, key_lengths [*, B]    log_sum_exp [*, B, N, T]
    query_segments [*, B, T]    key_segments [*, B, S]    key_ranges [*, 1|B, 1|K|N, T, R, 2]    seed [*, B, 5]

where `*` stands for the leading axes that vmap adds, and K divides N (grouped-query attention).  A mask of blocks, of
`mask_block` queries and keys, has the axes ⌈T / b_q⌉ and ⌈S / b_k⌉ in the place of T and S.
"""

import dataclasses
import itertools
import math
import operator
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, get_args

from jax_flash_jvp.context import Context

MAX_HEAD_DIM = 256  # of the kernels
# A bias that is not above it hides: beside such scores, float32 does not hold the logarithm of a sum.  -1e5 in bfloat16.
HIDES = -99840.0
DTYPES = ("float16", "bfloat16", "float32", "float64")
KERNEL_DTYPES = ("float16", "bfloat16", "float32")
KernelImplementation = Literal["triton", "hopper", "portable"]  # any kernels, or those of one family
Implementation = Literal[KernelImplementation, "xla", "interpret"]
Precision = Literal["ieee", "tf32"]  # of float32 products
Alignment = Literal["upper_left", "lower_right"]  # of causality and windows
KERNEL_IMPLEMENTATIONS = get_args(KernelImplementation)


class Operands(NamedTuple):
    """The arrays of a call.  Absent ones are None; in a tangent, None also means zero."""

    query: Any
    key: Any
    value: Any
    bias: Any = None
    mask: Any = None
    query_lengths: Any = None
    key_lengths: Any = None
    query_segments: Any = None
    key_segments: Any = None
    key_ranges: Any = None
    seed: Any = (
        None  # of dropout: two numbers, and the places of the first head, query and key among those of the whole call
    )
    mask_pages: Any = (
        None  # [1|B, 1|N, P, b_q, b_k]: of a mask that says for each block its page, behind how many there are
    )


DIFFERENTIABLE = 4  # the first four of Operands have tangents; the rest select
SELECTORS = {  # which users know by other names
    "query_lengths": "query_seq_lengths",
    "key_lengths": "key_value_seq_lengths",
    "query_segments": "query_segment_ids",
    "key_segments": "key_value_segment_ids",
    "key_ranges": "key_ranges",
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """The static part of a call: hashable, so that it can be a parameter of a compiled function."""

    scale: float
    is_causal: bool = False
    window: tuple[int | None, int | None] | None = None  # (left, right): keys from i - left to i + right; None: all
    lower_right: bool = False  # count i from the end: the last query is where the last key is
    soft_cap: float | None = None  # c of c tanh(σ q·k / c)
    dropout_rate: float = 0.0
    context: Context | None = None  # the devices that share the sequence; None: one device has it
    partial: bool = False  # the keys are some of those that queries see: results are float32, to be merged or summed
    mask_block: tuple[int, int] | None = None  # queries and keys that an element of the mask stands for; None: one each
    precision: Precision = "ieee"
    deterministic: bool = False  # the same bits on every run
    implementation: Implementation | None = (
        None  # None: the kernels on a GPU where they serve the call, else the tiled reference
    )

    def reach(self, queries: int, keys: int) -> tuple[int | None, int | None]:
        """(left, right): query i sees keys i - left to i + right, either of which may be negative; None: no such limit, or none
        that these lengths reach."""
        left, right = self.window or (None, None)
        if self.is_causal:
            right = 0 if right is None else min(right, 0)
        shift = keys - queries if self.lower_right else 0
        return (  # where all keys are hidden, no further than that takes
            None if left is None or left - shift >= queries - 1 else max(left - shift, -keys),
            None if right is None or right + shift >= keys - 1 else max(right + shift, -queries),
        )


def shape_of(name: str, array: Any) -> tuple[int, ...]:
    shape = getattr(array, "shape", None)
    if shape is None:
        raise TypeError(f"`{name}` must be an array: got {type(array).__name__}")
    return tuple(shape)


def dtype_of(array: Any) -> str:
    return str(array.dtype).removeprefix("torch.")


# ------------------------------------------------------------------------------------------------ the static part


def window_of(size: Any) -> tuple[int | None, int | None] | None:
    """`Problem.window` from `local_window_size`: None, one number for both sides, or a pair of numbers or None."""
    pair = size if isinstance(size, tuple | list) else (size, size)
    try:
        left, right = (n if n is None else _integer_of(n) for n in pair)
    except (TypeError, ValueError):
        raise TypeError(f"`local_window_size` must be an integer or a pair of integers or None: got {size!r}") from None
    return None if left is right is None else (left, right)


def _integer_of(n: Any) -> int:
    if isinstance(n, bool) or (not isinstance(n, int) and hasattr(n, "dtype") and dtype_of(n) == "bool"):
        raise TypeError
    return operator.index(n)


def mask_block_of(size: Any, mask: Any) -> tuple[int, int] | None:
    """`Problem.mask_block` from `mask_block_size`: None, or a pair of numbers."""
    if size is None:
        return None
    try:
        b_q, b_k = map(_integer_of, size)
    except (TypeError, ValueError):
        raise TypeError(
            f"`mask_block_size` must be a pair of integers (queries, keys), or None: got {size!r}"
        ) from None
    if min(b_q, b_k) < 1:
        raise ValueError(f"`mask_block_size` must be positive: got {(b_q, b_k)}")
    if mask is None:
        raise ValueError(
            "`mask_block_size` says what an element of the mask stands for, but there is no mask: give one"
        )
    return b_q, b_k


def lower_right_of(alignment: Any) -> bool:
    if not isinstance(alignment, str) or alignment not in ("upper_left", "lower_right"):
        raise ValueError(f"`causal_alignment` must be 'upper_left' or 'lower_right': got {alignment!r}")
    return alignment == "lower_right"


def soft_cap_of(value: float | None) -> float | None:
    if value is not None and not 1e-30 <= value < math.inf:  # second derivatives, which divide by it, are to be finite
        raise ValueError(
            f"`logits_soft_cap` must be positive and at least 1e-30: got {value}; leave it None for no cap"
        )
    return value if value is None else float(value)


def warn_of_window(window: tuple[int | None, int | None] | None, is_causal: bool) -> None:
    """-1 is what other libraries write for no limit; here windows may begin behind a query, and may then be empty."""
    left, right = window or (None, None)
    last = min(right or 0, 0) if is_causal else right
    remedy = "for no limit on a side pass None, not -1"
    if left is not None and last is not None and left + last < 0:
        text = f"`local_window_size`={window} hides every key from every query: the result is zero"
        warnings.warn(f"{text}; {remedy}", stacklevel=3)
    elif left is not None and right is not None and -1 in (left, right):
        seen = f"keys i {-left:+} … i {last:+}".replace("+", "+ ").replace("-", "- ")
        warnings.warn(f"`local_window_size`={window} shows query i only the {seen}; {remedy}", stacklevel=3)


def warn_of_lengths(name: str, numbers: Iterable[int] | None, rows: int) -> None:
    """Warns of lengths out of range, where their `numbers` are known."""
    beyond = [n for n in numbers or () if not 0 <= n <= rows]
    if beyond:
        text = f"`{name}` should be between 0 and {rows}, the length of the array: got {_few(beyond)}"
        warnings.warn(f"{text}; less counts as 0, more as {rows}", stacklevel=3)


def refuse_unknown(function: str, unknown: Iterable[str], ours: dict[str, str]) -> NoReturn:
    """A TypeError that names the argument of `ours` that another library calls so."""
    name = next(iter(unknown))
    hint = f": did you mean `{ours[name]}`?" if name in ours else ""
    raise TypeError(f"{function}() got an unexpected keyword argument '{name}'{hint}")


def dropout_rate_of(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise ValueError(f"`{name}` must be between 0 and 1: got {value}")
    return 1.0 if value == 1 else min(float(value), 1 - 2**-24)  # float32's last below 1


# ------------------------------------------------------------------------------------------------ the arrays


def check_operands(
    x: Operands, columns: int | None = None, mask_block: tuple[int, int] | None = None, given: Mapping[str, Any] | None = None
) -> None:  # fmt: skip
    """Raise a ValueError or TypeError unless the (four-dimensional) arrays describe one attention call.  `columns`: of bias and
    mask, if there are more than keys here; `given`: their shapes as the caller passed them."""
    query, key, value = (shape_of(n, a) for n, a in zip(("query", "key", "value"), x[:3], strict=True))
    _check_dtypes(x)
    if not query[0] == key[0] == value[0]:
        raise ValueError(
            f"`query`, `key` and `value` must have the same batch size: got {query[0]}, {key[0]} and {value[0]}"
        )
    if key[1] != value[1]:
        raise ValueError(f"`value` must be as long as `key`: got {value[1]} rows in value and {key[1]} in key")
    if key[2] != value[2]:
        raise ValueError(f"`value` must have as many heads as `key`: got {value[2]} heads in value and {key[2]} in key")
    if query[3] != key[3]:
        raise ValueError(
            f"`key` must have the head dimension of `query`: got query[..., {query[3]}] and key[..., {key[3]}]"
        )
    if query[2] % key[2] if key[2] else query[2]:
        swapped = query[1] == key[1] < min(query[2], key[2])
        hint = "; if heads and length are the wrong way round, swap these two axes of each" if swapped else ""
        raise ValueError(
            f"the number of heads of `query` must be a multiple of that of `key`: got {query[2]} and {key[2]}{hint}"
        )
    batch, queries, keys = query[0], query[1], key[1]
    scores = (batch, query[2], queries, columns or keys)
    given = given or {}
    if x.bias is not None:
        _check_broadcast("bias", shape_of("bias", x.bias), scores, key[2], given.get("bias"))
    if x.mask is not None and mask_block is None:
        _check_broadcast("mask", shape_of("mask", x.mask), scores, key[2], given.get("mask"))
    elif x.mask is not None and mask_block is not None:
        _check_blocks(shape_of("mask", x.mask), scores, key[2], mask_block)
    for field, shape, what in (
        ("query_lengths", (batch,), "one length for each batch entry"),
        ("key_lengths", (batch,), "one length for each batch entry"),
        ("query_segments", (batch, queries), "one segment for each query"),
        ("key_segments", (batch, keys), "one segment for each key"),
    ):
        name, array = SELECTORS[field], getattr(x, field)
        if array is not None and shape_of(name, array) != shape:
            raise ValueError(f"`{name}` must have shape {shape}, {what}: got {tuple(array.shape)}")
        if array is not None and not dtype_of(array).startswith(("int", "uint")):
            raise TypeError(f"`{name}` must be of integers: got {dtype_of(array)}; cast it")
    if x.key_ranges is not None:
        ranges = shape_of("key_ranges", x.key_ranges)
        # no sets: torch.compile would make constants of lengths that it hashes
        fits = len(ranges) == 5 and ranges[0] in (1, batch) and ranges[1] in (1, key[2], query[2])
        if not fits or ranges[2] != queries or ranges[3] < 1 or ranges[4] != 2:
            raise ValueError(
                f"`key_ranges` must have shape ({_either(1, batch)}, {_either(1, key[2], query[2])}, {queries}, R, 2), [start, "
                f"end) of R ranges of keys for each query: got {ranges}"
            )
        if not dtype_of(x.key_ranges).startswith(("int", "uint")):
            raise TypeError(f"`key_ranges` must be of integers: got {dtype_of(x.key_ranges)}; cast it")
    if (x.query_segments is None) != (x.key_segments is None):
        raise ValueError("`query_segment_ids` and `key_value_segment_ids` must be given together, or neither")


def _check_dtypes(x: Operands) -> None:
    dtype = dtype_of(x.query)
    if dtype not in DTYPES:
        raise TypeError(f"`query` must be one of {', '.join(DTYPES)}: got {dtype}; cast it first")
    for name, array in (("key", x.key), ("value", x.value)):
        if dtype_of(array) != dtype:
            raise TypeError(
                f"`{name}` must have the dtype of `query`: got {dtype_of(array)} and {dtype}; cast one of them"
            )
    if x.bias is not None and dtype_of(x.bias) not in DTYPES:
        remedy = "a boolean array belongs in `mask`" if dtype_of(x.bias) == "bool" else "cast it"
        raise TypeError(f"`bias` must be one of {', '.join(DTYPES)}: got {dtype_of(x.bias)}; {remedy}")
    if x.mask is not None and dtype_of(x.mask) != "bool":
        raise TypeError(
            f"`mask` must be boolean, True where a query attends: got {dtype_of(x.mask)}; "
            "cast it, or pass an additive mask as `bias`"
        )


def _check_broadcast(
    name: str, shape: Sequence[int], scores: Sequence[int], key_heads: int, given: Sequence[int] | None
) -> None:
    allowed = [{1, n} for n in scores]
    allowed[1].add(key_heads)
    if len(shape) != 4 or any(n not in some for n, some in zip(shape, allowed, strict=True)):
        raise ValueError(
            f"`{name}` must broadcast to (batch, query heads, query length, key length) = {tuple(scores)}, or have the "
            f"{key_heads} heads of `key`: got {tuple(given or shape)}{of_padding(name, given or shape, scores)}"
        )


def of_padding(name: str, shape: Sequence[int], scores: Sequence[int], lengths: bool = True) -> str:
    """What an error adds about a mask of that shape if it is one for each batch entry and key."""
    if tuple(shape) != (scores[0], scores[-1]):
        return ""
    remedy = f"; if this is padding [batch, key length], pass `{name}[:, None, None]`"
    return f"{remedy}, or lengths as `key_value_seq_lengths`" if lengths else remedy


def check_cu_seqlens(name: str, a: Any, of_queries: Any, tokens: int, numbers: Sequence[int] | None) -> None:
    """Checks the edges of packed sequences against those of the queries, and their `numbers` where these are known."""
    shape = shape_of(name, a)
    if len(shape) != 1 or not shape[0] or shape != shape_of(name, of_queries):
        raise ValueError(
            f"`{name}` must have shape [sequences + 1], the same for queries and keys: got {shape} and "
            f"{tuple(of_queries.shape)}"
        )
    if not dtype_of(a).startswith(("int", "uint")):
        raise TypeError(f"`{name}` must be of integers: got {dtype_of(a)}; cast it")
    if numbers is None:
        return
    if numbers[0] < 0 or any(a > b for a, b in itertools.pairwise(numbers)):
        raise ValueError(f"`{name}` must not decrease, nor begin below zero: got {_few(numbers)}")
    if numbers[-1] > tokens:
        raise ValueError(f"`{name}` must not end beyond the {tokens} tokens: got {_few(numbers)}")
    if numbers[0]:
        warnings.warn(
            f"`{name}`={_few(numbers)} leaves the first {numbers[0]} tokens in no sequence, and their results are zero: begin "
            "with 0 if they are the first sequence",
            stacklevel=3,
        )


def _few(numbers: Sequence[int]) -> str:
    return str(list(numbers)) if len(numbers) <= 8 else f"[{', '.join(map(str, numbers[:4]))}, …, {numbers[-1]}]"


def blocks_of(lengths: Sequence[int], block: tuple[int, int]) -> tuple[int, ...]:
    """The number of blocks of queries, and of keys."""
    return tuple(-(-n // size) for n, size in zip(lengths, block, strict=True))


def _either(*sizes: int) -> str:
    return " or ".join(dict.fromkeys(map(str, sizes)))


def _check_blocks(shape: Sequence[int], scores: Sequence[int], key_heads: int, block: tuple[int, int]) -> None:
    """Checks the shape of a mask of blocks, for scores [B, N, T, S]."""
    batch, heads, *lengths = scores
    blocks = blocks_of(lengths, block)
    fits = len(shape) == 4 and shape[0] in (1, batch) and shape[1] in (1, key_heads, heads) and shape[2:] == blocks
    if not fits:
        raise ValueError(
            f"`mask` must have shape ({_either(1, batch)}, {_either(1, key_heads, heads)}, {blocks[0]}, {blocks[1]}), as "
            f"many blocks of `mask_block_size`={block} as {lengths[0]} queries and {lengths[1]} keys have: got {tuple(shape)}"
        )


def check_implementation(implementation: Any, allowed: Sequence[str | None], reference: str) -> None:
    if implementation not in allowed:
        known = implementation in ("reference", "xla")
        hint = f"the tiled reference is {reference!r}" if known else "None takes the kernels where they serve the call"
        raise ValueError(f"`implementation` must be one of {allowed}: got {implementation!r}; {hint}")


def check_served(implementation: str | None, x: Operands, reference: str) -> None:
    reason = unserved(x) if implementation in (*KERNEL_IMPLEMENTATIONS, "interpret") else None
    if reason is not None:
        raise ValueError(
            f"`implementation`={implementation!r} does not serve {reason}; leave `implementation` None or ask for "
            f"{reference!r}: the tiled reference computes it"
        )


def unserved(x: Operands) -> str | None:
    """What of this call the kernels do not serve, or None."""
    if dtype_of(x.query) not in KERNEL_DTYPES:
        return f"{dtype_of(x.query)} arrays (cast them to float32)"
    if not all(isinstance(n, int) for n in x.query.shape):
        return "a symbolic batch"
    for name in ("query", "value"):
        head_dim = getattr(x, name).shape[-1]
        if not 1 <= head_dim <= MAX_HEAD_DIM:
            return f"a head dimension of {head_dim} in `{name}` (1 to {MAX_HEAD_DIM} are served)"
    return None
