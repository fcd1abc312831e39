"""What an operator is told besides its tensors: an `options` string, and a selection, one tensor of integers.

Operators take no records, so that options are words: left=N, right=N, lower_right, soft_cap=C, dropout=RATE,
mask_block=QUERIESxKEYS, the names of what counts in the selection (key_ranges=HEADSxRANGES), deterministic, implementation=NAME,
ring=GROUP where tensors are parts of a sequence (`ring.py`), partial of the pairs of these, and code=…, which says nothing to
them: PyTorch keeps compiled programs on disk, gradients included, by the names and arguments of their operators, and would use
those of another version of this package.

A selection is int32 [B, 7 + T + S + 2 H T R]: the lengths of queries and keys, a seed of two numbers and three places, see
`problem.py`, the segments of queries and keys, and, where there are any, the ranges of keys.  In a ring, lengths are of the whole
sequence, and places, of queries and keys, zero.
"""

import functools
import pathlib
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import torch
from torch import Tensor

from jax_flash_jvp.problem import SELECTORS, Implementation, Operands, Precision, Problem
from torch_bridge.plans import precision_of
from torch_bridge.reference import Case

QUERY_LENGTHS, KEY_LENGTHS, SEED, HEADS_BEGIN, QUERIES_BEGIN, KEYS_BEGIN, SEGMENTS = (
    0,
    1,
    2,
    4,
    5,
    6,
    7,
)  # columns of it
THIRD = "a third derivative of attention in a ring, which has two: pass `context_strategy`='ulysses' or 'all_gather'"
LARGEST = 2**31 - 1
NARROW = (torch.int32, torch.int16, torch.int8, torch.uint16, torch.uint8)  # fit int32
SELECTED = (*SELECTORS, "seed")  # what a selection holds
CODE = f"code={zlib.crc32(b''.join(p.read_bytes() for p in sorted(pathlib.Path(__file__).parent.glob('*.py')))):08x}"


def words_of(
    window: tuple[int | None, int | None] | None,
    lower_right: bool,
    soft_cap: float | None,
    dropout_rate: float,
    mask_block: tuple[int, int] | None = None,
) -> tuple[str, ...]:
    left, right = window or (None, None)
    words = [f"left={left}"] if left is not None else []
    words += [f"right={right}"] if right is not None else []
    words += ["lower_right"] if lower_right else []
    words += [f"soft_cap={soft_cap!r}"] if soft_cap is not None else []
    words += [f"mask_block={mask_block[0]}x{mask_block[1]}"] if mask_block is not None else []
    words += [f"dropout={dropout_rate!r}"] if 0 < dropout_rate < 1 else []
    return tuple(words)


def words_of_choice(deterministic: bool, implementation: str | None) -> tuple[str, ...]:
    """The words for how a call is computed, whatever it computes."""
    words = ["deterministic"] if deterministic else []
    words += [f"implementation={implementation}"] if implementation is not None else []
    return tuple(words)


def words_of_part(problem: Problem, window: tuple[int | None, int | None] | None = None) -> tuple[str, ...]:
    """The words for a part of a call.  `window` takes the place of its own causality and window.  It has no mask blocks."""
    words = words_of(window, False, problem.soft_cap, problem.dropout_rate)
    return (*words, *words_of_choice(problem.deterministic, problem.implementation))


def drops(words: Iterable[str]) -> bool:
    """Do these words name a rate of dropout?"""
    return any(word.startswith("dropout=") for word in words)


def select(
    selected: Sequence[Tensor | None], options: tuple[str, ...], q: Tensor, k: Tensor, seed: Tensor | None = None,
    place: tuple[int, int, int] = (0, 0, 0),
) -> tuple[Tensor | None, str]:  # fmt: skip
    """The selection and the options of an operator, of these words.  `selected`: what the first of SELECTORS name; of a part of a
    call, `seed` is that of the call, and `place` where its first head, query and key are."""
    if not options and not selected:
        return None, ""
    dropout = drops(options)
    if not dropout and not selected:
        return None, " ".join(options)
    given = (*selected, *(None,) * (len(SELECTORS) - len(selected)))
    query_lengths, key_lengths, query_segments, key_segments, key_ranges = given
    batch, queries, keys = q.shape[0], q.shape[2], k.shape[2]
    new = lambda *shape: torch.zeros((batch, *shape), dtype=torch.int32, device=q.device)  # plain, whatever q is
    lengths = [new() if a is None else _length(a) for a in (query_lengths, key_lengths)]
    seed = new(2) if not dropout else drawn(q) if seed is None else seed
    places = torch.cat([new(1) + at for at in place], 1) if any(place) else new(3)
    if query_segments is None or key_segments is None:
        segments = [new(queries), new(keys)]
    else:
        segments = narrowed(query_segments, key_segments)
    names = [name for name, a in zip(SELECTORS, given, strict=True) if a is not None]
    if key_ranges is not None:
        _, heads, _, count, _ = key_ranges.shape
        names[-1] += f"={heads}x{count}"
        segments.append(_length(key_ranges).flatten(1).expand(batch, -1))
    return torch.cat([torch.stack(lengths, 1), seed, places, *segments], 1), " ".join(
        (*options, *names, *["seed"] * dropout)
    )


def drawn(q: Tensor) -> Tensor:
    """A seed of dropout."""
    return torch.randint(-(2**31), 2**31 - 1, (q.shape[0], 2), device=q.device, dtype=torch.int32)


def _length(a: Tensor) -> Tensor:
    """In int32; beyond all tensors is as good as at their end."""
    if a.dtype in NARROW:
        return a.to(torch.int32)
    wide = a.to(torch.int64)
    wide = wide.masked_fill(wide < 0, LARGEST) if a.dtype == torch.uint64 else wide
    return wide.clamp(-1, LARGEST).to(torch.int32)


def narrowed(queries: Tensor, keys: Tensor, everyones: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    """Segments in int32, in the same order; those of a part of a call in that of all, which `everyones` makes of them."""
    if queries.dtype in NARROW and keys.dtype in NARROW:
        return [queries.to(torch.int32), keys.to(torch.int32)]
    if torch.uint64 in (queries.dtype, keys.dtype) and queries.dtype != keys.dtype:
        raise TypeError(
            "`query_segment_ids` and `key_value_segment_ids` must fit one dtype: got "
            f"{queries.dtype} and {keys.dtype}; cast one of them"
        )
    both = torch.cat([queries.to(torch.int64), keys.to(torch.int64)], 1)
    every = both if everyones is None else everyones(both)
    ranks = torch.searchsorted(every.sort(1).values, both, out_int32=True)
    return [*ranks.split([queries.shape[1], keys.shape[1]], 1)]


def parsed(
    is_causal: bool, scale: float, options: str, precision: Precision = "ieee"
) -> tuple[Problem, frozenset[str]]:
    """What the options say, and the names of what stands in a selection."""
    words = dict(word.partition("=")[::2] for word in options.split())
    left, right = (int(words[side]) if side in words else None for side in ("left", "right"))
    problem = Problem(
        scale,
        is_causal,
        window=None if left is None and right is None else (left, right),
        lower_right="lower_right" in words,
        soft_cap=float(words["soft_cap"]) if "soft_cap" in words else None,
        dropout_rate=float(words.get("dropout", 0)),
        partial="partial" in words,
        mask_block=_pair(words, "mask_block"),
        precision=precision,
        deterministic="deterministic" in words,
        implementation=cast(Implementation | None, words.get("implementation")),
    )
    return problem, frozenset(words) & {*SELECTED}


def _pair(words: dict[str, str], name: str) -> tuple[int, int] | None:
    if name not in words:
        return None
    first, second = map(int, words[name].split("x"))
    return first, second


@functools.lru_cache(maxsize=1024)
def _ranges(options: str) -> tuple[int, int]:
    """For how many heads a selection holds how many ranges."""
    return _pair(dict(word.partition("=")[::2] for word in options.split()), "key_ranges") or (0, 0)


def pieces(selection: Tensor, options: str, queries: int, keys: int) -> tuple[Tensor, ...]:
    """The pieces of a selection: what stands before the segments, those of queries and of keys, and ranges [B, H, T, R, 2]."""
    heads, count = _ranges(options)
    *others, ranges = selection.split([SEGMENTS, queries, keys, 2 * heads * queries * count], 1)
    return *others, ranges.unflatten(1, (heads, queries, count, 2))


def joined(head: Tensor, of_queries: Tensor, of_keys: Tensor, ranges: Tensor) -> Tensor:
    """A selection of its pieces."""
    return torch.cat([head, of_queries, of_keys, ranges.flatten(1)], 1)


def with_ranges(words: Iterable[str], ranges: Tensor | None) -> str:
    """Options of these words, the number of ranges being that of these."""
    here = "" if ranges is None else f"key_ranges={ranges.shape[1]}x{ranges.shape[3]}"
    return " ".join(here if word.startswith("key_ranges") else word for word in words)


_problem = functools.lru_cache(maxsize=1024)(parsed)


def problem_of(is_causal: bool, scale: float, options: str, q: Tensor) -> tuple[Problem, frozenset[str]]:
    return _problem(is_causal, scale, options, precision_of(q))


RING = "ring="


def ring_of(options: str) -> str | None:
    """The group of a ring, as a word."""
    at = options.find(RING)
    return None if at < 0 else options[at + len(RING) :].split(maxsplit=1)[0]


def case_of(q: Tensor, k: Tensor, selection: Tensor | None, is_causal: bool, scale: float, options: str) -> Case:
    problem, names = problem_of(is_causal, scale, options, q)
    if RING in options:
        raise RuntimeError(THIRD)
    x = Operands(q, k, None)
    if selection is not None:
        head, query_segments, key_segments, key_ranges = pieces(selection, options, q.shape[2], k.shape[2])
        held = dict(
            query_lengths=head[:, QUERY_LENGTHS], key_lengths=head[:, KEY_LENGTHS], query_segments=query_segments,
            key_segments=key_segments, key_ranges=key_ranges, seed=head[:, SEED:],
        )  # fmt: skip
        x = x._replace(**{name: held[name] for name in SELECTED if name in names})
    return Case(problem, x)
