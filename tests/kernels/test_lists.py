"""Lists of tiles: one launch makes those of short sequences, and lists what two launches list."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton.language as tl

from compiled import Recorder
from jax_flash_jvp.kernels.hopper import jobs as hopper
from jax_flash_jvp.kernels.portable import jobs, visibility
from jax_flash_jvp.kernels.portable.tiles import Tile
from jax_flash_jvp.launch import Interpreter, JaxTriton
from jax_flash_jvp.problem import Operands, Problem

B, N, K = 2, 4, 2


def documents(random, length, sort=True):
    """The segments of B batch entries: in order, as packed sequences have them, or in none."""
    ids = random.integers(0, 4, (B, length)).astype(np.int32)
    return np.sort(ids, 1) if sort else ids


def ranges(random, batch, heads, queries, keys, intervals):
    ends = np.sort(random.integers(0, keys + 1, (batch, heads, queries, intervals, 2)), -1)
    ends[:, :, : queries // 3] = (0, keys)  # some see all
    ends[:, :, queries // 2 : queries // 2 + 20] = keys // 2  # some nothing
    return ends.astype(np.int32)


def segments(random, T, S, sort=True):
    return dict(query_segments=documents(random, T, sort), key_segments=documents(random, S, sort))


def lengths(random, T, S):
    return dict(
        query_lengths=random.integers(0, T + 1, B).astype(np.int32),
        key_lengths=random.integers(0, S + 1, B).astype(np.int32),
    )


CASES = {  # name: (operands, fields of the problem) for T queries and S keys
    "segments": (segments, {}),
    "segments-in-no-order": (lambda *x: segments(*x, sort=False), {}),
    "segments-causal": (segments, dict(is_causal=True)),
    "segments-window-lengths": (lambda *x: segments(*x) | lengths(*x), dict(window=(20, 9))),
    "ranges": (lambda random, T, S: dict(key_ranges=ranges(random, 1, 1, T, S, 1)), {}),
    "ranges-of-entries": (lambda random, T, S: dict(key_ranges=ranges(random, B, 1, T, S, 2)), dict(is_causal=True)),
    "ranges-of-heads": (lambda random, T, S: dict(key_ranges=ranges(random, 1, N, T, S, 2)), {}),
    "ranges-of-key-heads": (
        lambda random, T, S: dict(key_ranges=ranges(random, B, K, T, S, 1)) | lengths(random, T, S), {}
    ),
    "ranges-and-segments": (
        lambda random, T, S: dict(key_ranges=ranges(random, B, 1, T, S, 1)) | segments(random, T, S), dict(window=(30, None))
    ),
    "mask-of-keys": (lambda random, T, S: dict(mask=random.random((B, N, 1, S)) < 0.1), {}),
    "mask-of-queries": (lambda random, T, S: dict(mask=random.random((1, K, T, 1)) < 0.1), dict(is_causal=True)),
}  # fmt: skip


def seen(launcher, problem, x, tile, by_key):
    """The list of each block: how many tiles of each class, and these, the rest of an array as zeros."""
    call = jax.jit(lambda x: jobs.PortableCall(launcher, problem, x).tiles(tile, by_key))
    counts, tiles = np.split(np.asarray(call(x)), [2 if x.key_ranges is None else 3], -1)
    return counts, np.where(np.arange(tiles.shape[-1]) < counts[..., -1:], tiles, 0)


@pytest.mark.parametrize("launcher", [Interpreter, pytest.param(JaxTriton, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("by_key", [False, True], ids=["", "by-key"])
@pytest.mark.parametrize("name", CASES)
def test_one_launch_lists_what_two_do(name, by_key, launcher, monkeypatch):
    given, fields = CASES[name]
    sizes = [(70, 90, 16, 16), (64, 33, 32, 16), (17, 100, 16, 32)]
    if launcher is JaxTriton:
        sizes += [(400, 400, 64, 64), (500, 1000, 128, 64), (512, 500, 64, 128)]
    for seed, (T, S, block_m, block_n) in enumerate(sizes):
        random = np.random.default_rng(seed)
        arrays = {name: jnp.asarray(a) for name, a in given(random, T, S).items()}
        q, k = jnp.zeros((B, T, N, 16)), jnp.zeros((B, S, K, 16))
        call = Problem(scale=0.25, **fields), Operands(q, k, k, **arrays), Tile(block_m, block_n, 4, 1), by_key
        at_once = seen(launcher(), *call)
        with monkeypatch.context() as without:
            without.setattr(visibility, "MOST_TILES", tl.constexpr(0))
            apart = seen(launcher(), *call)
        assert at_once[0].any()
        jax.tree.map(np.testing.assert_array_equal, at_once, apart)


BOTH, EACH = ["list_few_tiles"], ["look_at_tiles", "list_tiles"]


@pytest.mark.parametrize(
    ("family", "length", "given", "names"),
    [
        (jobs, 1024, dict(query_segments=(2, 1024), key_segments=(2, 1024)), BOTH),
        (jobs, 1025, dict(query_segments=(2, 1025), key_segments=(2, 1025)), EACH),
        (jobs, 1024, dict(mask=(2, 1, 1, 1024)), BOTH),
        (jobs, 512, dict(key_ranges=(2, 1, 512, 2, 2)), BOTH),
        (jobs, 513, dict(key_ranges=(2, 1, 513, 2, 2)), EACH),
        (jobs, 100, dict(mask=(2, 1, 100, 100)), ["pack", *EACH]),
        (hopper, 1024, dict(query_segments=(2, 1024), key_segments=(2, 1024)), BOTH),
        (hopper, 4096, dict(query_segments=(2, 4096), key_segments=(2, 4096)), EACH),
    ],
)
def test_launches(family, length, given, names):
    """Of blocks of up to 16 tiles, or 8 of ranges; those of the portable forward are of 64 keys."""
    array = jax.ShapeDtypeStruct((2, length, 4, 64), "bfloat16")
    arrays = {name: jax.ShapeDtypeStruct(s, "bool" if name == "mask" else "int32") for name, s in given.items()}
    recorder = Recorder(90)
    family.forward(recorder, Problem(scale=0.125), Operands(array, array, array, **arrays))
    launched = [kernel.__name__ for kernel, *_ in recorder.launches]
    assert [*itertools.takewhile(lambda name: name != "forward", launched)] == names
