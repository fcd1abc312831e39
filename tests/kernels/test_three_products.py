"""Float32 as three products of TF32, emulated: the interpreter's own products are exact to fp32; and who rounds to TF32."""

import functools

import jax
import numpy as np
import pytest
from triton.runtime import interpreter

import oracle
from compiled import Recorder
from jax_flash_jvp import dot_product_attention, interpret
from jax_flash_jvp.kernels.portable import jobs
from jax_flash_jvp.kernels.portable.scores import UNROUNDED
from jax_flash_jvp.kernels.portable.tiles import JOBS, find, fitted, least_rows, product
from jax_flash_jvp.launch import Interpreter
from jax_flash_jvp.problem import Operands, Problem

DROPPED = 13  # bits of float32 that TF32 has not


def nearest(a):
    """As `cvt.rna.tf32.f32`: to nearest, and away from zero in the middle."""
    return cut((a.view(np.uint32) + (1 << DROPPED - 1)).view(np.float32))


def cut(a):
    """As tensor cores read an operand."""
    return (a.view(np.uint32) & np.uint32(-1 << DROPPED & 0xFFFFFFFF)).view(np.float32)


def towards_zero(a):
    """From float64 to float32, as tensor cores round a sum."""
    b = a.astype(np.float32)
    return np.where(np.abs(b) > np.abs(a), np.nextafter(b, np.float32(0)), b)


def multiplied(a, b, c):
    """c + a b by tensor cores, eight products at a time."""
    a, b = cut(a), cut(b)
    for at in range(0, a.shape[1], 8):
        c = towards_zero(c + a[:, at : at + 8].astype(np.float64) @ b[at : at + 8].astype(np.float64))
    return c


def three_products(a, b, c):
    """As Triton takes "tf32x3" apart: the sum is added to c in float32."""
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    a_high, b_high = nearest(a), nearest(b)
    y = multiplied(a - a_high, b_high, np.zeros_like(c))
    y = multiplied(a_high, b - b_high, y)
    return multiplied(a_high, b_high, np.where(np.isnan(y), np.float32(0), y)) + c


@pytest.fixture
def precisions(monkeypatch):
    """Those of all products, which are computed as tensor cores would."""
    asked = []

    def dot(self, a, b, c, precision, *_):
        asked.append(precision.name)
        return interpreter.TensorHandle(three_products(a.data, b.data, c.data), c.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    monkeypatch.setattr(jobs, "product", lambda *_: product("float32", "ieee", 64, 90))
    interpret._replacements.cache_clear()
    yield asked
    interpret._replacements.cache_clear()


def compute(attention, x, tangents, cotangents):
    return {
        "forward": attention(*x),
        "tangent": jax.jvp(attention, x, tangents)[1],
        "backward": jax.vjp(attention, *x)[1](cotangents[0]),
        "dual backward": jax.vjp(lambda x, t: jax.jvp(attention, x, t), x, tangents)[1](cotangents),
    }


CASES = {  # length, channels, by how much queries are larger, by how much values and cotangents
    "plain": (64, 64, 1.0, 1.0),
    "ragged": (41, 28, 1.0, 1.0),
    "large logits": (64, 64, 10.0, 1.0),
    "huge": (32, 64, 1.0, 1e15),
    "small": (32, 64, 1.0, 1e-15),
}


@pytest.mark.parametrize("case", CASES)
def test_errors(case, precisions):
    length, head_dim, of_queries, of_values = CASES[case]
    rows = [oracle.normal(i, 1, length, 2, head_dim) for i in range(8)]
    rows[0] *= of_queries
    for i in (2, 5, 6, 7):
        rows[i] *= of_values
    arrays = tuple(rows[:3]), tuple(rows[3:6]), tuple(rows[6:])
    attention = functools.partial(dot_product_attention, implementation="interpret")
    largest = of_queries * np.abs(np.einsum("btnh,bsnh->bnts", *rows[:2])).max() / head_dim**0.5
    oracle.assert_as_exact_as_naive(compute, attention, arrays, "float32", largest if of_queries > 1 else 0)
    oracle.assert_as_exact_on_average(compute, attention, arrays, "float32", times=2.5)
    assert set(precisions) == {"TF32x3"}


def test_parts():
    """Nothing is lost in them but what is beyond 22 bits, and what is infinite stays so."""
    a = np.array([1 + 2**-11, -1 - 2**-11, np.pi, 2.0**-120, 0, np.inf, 3e38], np.float32)
    assert nearest(a[:2]).tolist() == [1 + 2**-10, -1 - 2**-10]
    with np.errstate(invalid="ignore"):
        rest = a - nearest(a)
    assert np.abs(rest - cut(rest))[:5].max() <= 2.0**-21
    one = np.ones((1, 1), np.float32)
    with np.errstate(invalid="ignore"):
        assert three_products(a[5:6, None], one, 0 * one).item() == np.inf


@pytest.mark.parametrize(
    ("precision", "head_dim", "target", "expected"),
    [
        ("ieee", 64, 90, "tf32x3"), ("ieee", 16, 90, "tf32x3"), ("tf32", 64, 90, "tf32"), ("ieee", 64, 80, "ieee"),
        ("ieee", 72, 80, "tf32x3"), ("ieee", 64, "interpret", "ieee"),
    ],
)  # fmt: skip
def test_where(precision, head_dim, target, expected):
    assert product("float32", precision, head_dim, target) == expected
    assert product("bfloat16", precision, head_dim, target) == "tf32"


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "length", "capability", "rounds"),
    [
        (64, 64, 1024, 90, "forward"), (33, 33, 1024, 90, "forward"), (32, 64, 1024, 90, "forward"),
        (32, 32, 1024, 90, ""), (64, 72, 1024, 90, ""), (64, 64, 1024, 80, ""),
        (32, 32, 64, 80, "forward forward_dual tangent backward"),
    ],
)  # fmt: skip
def test_which_kernels_round_what_they_read(head_dim, value_dim, length, capability, rounds):
    """To TF32: of long sequences the plain forward alone, of some head dimensions on sm_90."""
    array = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")
    q, v, lse = array(2, length, 8, head_dim), array(2, length, 8, value_dim), array(2, 8, length)
    x, y, problem = Operands(q, q, v), (v, lse), Problem(scale=0.1, precision="tf32")
    every = dict(
        forward=lambda recorder: jobs.forward(recorder, problem, x),
        forward_dual=lambda recorder: jobs.forward(recorder, problem, x, x),
        tangent=lambda recorder: jobs.tangent(recorder, problem, x, lse, x),
        backward=lambda recorder: jobs.backward(recorder, problem, x, y, (v, None), (True, True, True, False)),
    )
    found = []
    for name, job in every.items():
        recorder = Recorder(capability)
        job(recorder)
        (precision,) = {constants["PRECISION"] for _, _, constants, _ in recorder.launches if "PRECISION" in constants}
        found += [name] * (precision == UNROUNDED.value)
    assert " ".join(found) == rounds


def test_kernels_and_launchers_round_alike(monkeypatch):
    """Else ℓ of a forward that rounds what it reads would not be that of a backward's scores.  Many of these numbers lie in the
    middle of two of TF32."""
    q, k, v = (np.float32(np.round(oracle.normal(i, 1, 17, 2, 16) * 2**11) / 2**11) for i in range(3))
    v[0, :5, 0, 0] = 1e-40, -3.4028235e38, np.inf, np.nan, 1
    forward = lambda: jobs.forward(Interpreter(), Problem(scale=0.3, precision="tf32"), Operands(q, k, v))[:2]
    here = forward()
    monkeypatch.setattr(jobs, "READ_ONCE", 0)
    jax.tree.map(np.testing.assert_array_equal, here, forward())


@pytest.mark.parametrize(("queries", "keys"), [(16, 16), (32, 200), (200, 32), (5, 4000)])
@pytest.mark.parametrize(
    ("job", "head_dim"), [(j, d) for d in (64, 72, 96, 128) for j in JOBS if find(j, d, "float32", "ieee", 90)]
)
def test_rows_of_short_sequences(job, head_dim, queries, keys):
    """Four warps have 64 rows of the result or fewer, for with eight of them Triton 3.6 computes what is wrong."""
    least = least_rows(job, "float32", "tf32x3", head_dim, 90)
    tile = fitted(find(job, head_dim, "float32", "ieee", 90), job, queries, keys, least)
    resident = tile.block_n if job.startswith(("key", "value")) else tile.block_m
    assert resident > 64 or tile.num_warps <= 4 or job.startswith("score")
    assert resident >= 64 or job.startswith("score")
