"""Kernels of its own through `jax_flash_jvp.interpret`, against numpy."""

import threading

import numpy as np
import pytest
import triton
import triton.language as tl
from ml_dtypes import bfloat16
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from jax_flash_jvp.interpret import launch

HALF = tl.constexpr(0.5)


@triton.jit
def _block(P, row, column, ROWS, COLUMNS, BR: tl.constexpr, BC: tl.constexpr):
    """Addresses and mask of one block of a matrix."""
    o_r = row + tl.arange(0, BR)[:, None]
    o_c = column + tl.arange(0, BC)[None, :]
    return P + o_r.to(tl.int64) * COLUMNS + o_c, (o_r < ROWS) & (o_c < COLUMNS)


@triton.jit
def _matmul(A, B, C, M, N, K, scale, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TRANSPOSED: tl.constexpr):
    """C = scale A B, or scale A Bᵀ."""
    i_m = tl.program_id(0)
    i_n = tl.program_id(1)
    b_c = tl.zeros([BM, BN], tl.float32)
    for k in range(0, K, BK):
        p_a, m_a = _block(A, i_m * BM, k, M, K, BM, BK)
        b_a = tl.load(p_a, mask=m_a, other=0.0)  # [BM, BK]
        if TRANSPOSED:
            p_b, m_b = _block(B, i_n * BN, k, N, K, BN, BK)
            b_c = tl.dot(b_a, tl.trans(tl.load(p_b, mask=m_b, other=0.0)), b_c, input_precision="ieee")
        else:
            p_b, m_b = _block(B, k, i_n * BN, K, N, BK, BN)
            b_c += tl.dot(b_a, tl.load(p_b, mask=m_b, other=0.0), input_precision="ieee")
    p_c, m_c = _block(C, i_m * BM, i_n * BN, M, N, BM, BN)
    tl.store(p_c, (b_c * scale).to(C.dtype.element_ty), mask=m_c)


@triton.jit
def _cast(X, Y, N: tl.constexpr):
    o_x = tl.arange(0, N)
    tl.store(Y + o_x, tl.load(X + o_x).to(Y.dtype.element_ty))


@triton.jit
def _arithmetic(X, Y, SUM, LARGER, N: tl.constexpr):
    o_x = tl.arange(0, N)
    b_x = tl.load(X + o_x)
    b_y = tl.load(Y + o_x)
    tl.store(SUM + o_x, -b_x + b_y * HALF)
    tl.store(LARGER + o_x, tl.where(b_x > b_y, b_x, b_y))


@triton.jit
def _log_sum_exp(X, Y, L, BL: tl.constexpr):
    """Base 2, online over blocks."""
    i_r = tl.program_id(0)
    b_m = tl.full([1], float("-inf"), tl.float32)
    b_l = tl.zeros([1], tl.float32)
    for start in tl.range(0, L, BL):
        o_l = start + tl.arange(0, BL)
        b_x = tl.load(X + i_r * L + o_l, mask=o_l < L, other=float("-inf"))
        m_new = tl.maximum(b_m, tl.max(b_x, 0))
        b_l = b_l * tl.math.exp2(b_m - m_new) + tl.sum(tl.math.exp2(b_x - m_new), 0)
        b_m = m_new
    tl.store(Y + i_r + tl.arange(0, 1), b_m + tl.math.log2(b_l))


@triton.jit
def _grid(X, FAR, BASE: tl.constexpr):
    tl.static_assert(BASE > 1)
    place = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2)
    digits = 0
    for exponent in tl.static_range(3):
        digits = digits * BASE + exponent
    if FAR > 2**40:
        digits += tl.where(FAR == 2**40 + 1, 1, 0)
    tl.store(X + place, place + digits)


@triton.jit
def _count(X, n):
    tl.store(X, n.to(tl.float32))


@triton.jit
def _random(X, seed, N: tl.constexpr):
    o_x = tl.arange(0, N)
    tl.store(X + o_x, tl.randint(seed, o_x))


def _normal(rng, shape, dtype):
    return rng.standard_normal(shape).astype(np.float32).astype(dtype)


def _poisoned(shape, dtype=np.float32):
    return np.full(shape, np.nan).astype(dtype)


def _multiply(dtype, transposed=False, shape=(37, 45, 70)):
    rng = np.random.default_rng(0)
    m, n, k = shape
    a, b = _normal(rng, (m, k), dtype), _normal(rng, (n, k) if transposed else (k, n), dtype)
    c = _poisoned((m, n), dtype)
    tiles = {"BM": 16, "BN": 32, "BK": 32}
    launch(_matmul, (triton.cdiv(m, 16), triton.cdiv(n, 32)), a, b, c, m, n, k, 0.25, **tiles, TRANSPOSED=transposed)
    a, b = a.astype(np.float64), b.astype(np.float64)
    return c, 0.25 * (a @ (b.T if transposed else b))


def _compiled():
    constants = {"BM": 32, "BN": 32, "BK": 32, "TRANSPOSED": True}
    signature = dict.fromkeys("ABC", "*bf16") | dict.fromkeys("MNK", "i32") | {"scale": "fp32"}
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(_matmul, signature, {(_matmul.arg_names.index(name),): v for name, v in constants.items()})
    return triton.compile(source, GPUTarget("cuda", 90, 32), {"enable_fp_fusion": True}).asm


@pytest.mark.parametrize("transposed", [False, True], ids=["ab", "abT"])
@pytest.mark.parametrize(("dtype", "epsilon"), [(np.float32, 2**-21), (np.float16, 2**-11), (bfloat16, 2**-8)])
def test_product(dtype, epsilon, transposed):
    actual, expected = _multiply(dtype, transposed)
    np.testing.assert_allclose(actual.astype(np.float64), expected, rtol=1.01 * epsilon, atol=4 * 2**-21)


def test_rounds_to_nearest_even():
    bits = [0x3F800000, 0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0xBF818000, 0x7F7FFFFF, 0x7F800000]
    x, y = np.array(bits, np.uint32).view(np.float32), np.zeros(8, bfloat16)
    launch(_cast, (1,), x, y, N=8)
    expected = [0x3F80, 0x3F80, 0x3F82, 0x3F80, 0x3F81, 0xBF82, 0x7F80, 0x7F80]
    assert y.view(np.uint16).tolist() == expected
    launch(_cast, (1,), np.full(8, np.nan, np.float32), y, N=8)
    assert np.isnan(y.astype(np.float32)).all()


@pytest.mark.parametrize("source", [np.float64, np.float32, np.float16, bfloat16, np.int32, np.int64, np.int8])
@pytest.mark.parametrize("target", [np.float32, np.float16, bfloat16, np.int32])
def test_casts(source, target):
    x, y = np.array([-77, -3, 0, 1, 2, 5, 100, 127]).astype(source), np.zeros(8, target)
    launch(_cast, (1,), x, y, N=8)
    np.testing.assert_array_equal(y.astype(np.float64), x.astype(np.float64))


def test_bfloat16_arithmetic():
    rng = np.random.default_rng(1)
    x, y = _normal(rng, 64, bfloat16), _normal(rng, 64, bfloat16)
    total, larger = _poisoned(64, bfloat16), _poisoned(64, bfloat16)
    launch(_arithmetic, (1,), x, y, total, larger, N=64)
    np.testing.assert_array_equal(total.astype(np.float32), (-x + y * bfloat16(0.5)).astype(np.float32))
    np.testing.assert_array_equal(larger.astype(np.float32), np.maximum(x, y).astype(np.float32))


@pytest.mark.parametrize("length", [1, 16, 37])
def test_log_sum_exp(length):
    x, y = _normal(np.random.default_rng(2), (3, length), np.float32), _poisoned(3)
    launch(_log_sum_exp, (3,), x, y, length, BL=16)
    np.testing.assert_allclose(y, np.logaddexp2.reduce(x.astype(np.float64), axis=1), rtol=1e-6)


def test_grid_loops_and_scalars():
    x = np.full((2, 3, 4), -1, np.int32)
    launch(_grid, (2, 3, 4), x, 2**40 + 1, BASE=10)
    np.testing.assert_array_equal(x, np.arange(24).reshape(2, 3, 4) + 12 + 1)


@pytest.mark.parametrize("one", [1, 1.0, np.float32(1), np.int64(1)])
def test_one_is_a_constant(one):
    x = _poisoned(1)
    launch(_count, (1,), x, one + one)
    assert x[0] == 2
    with pytest.raises(AttributeError, match="'int' object has no attribute 'to'"):  # as when it is compiled
        launch(_count, (1,), x, one)


def test_random_numbers():
    """Philox 4x32-10 in Python integers."""
    x = np.zeros(4, np.int32)
    launch(_random, (1,), x, 1234567, N=4)
    for i in range(4):
        counter, key = [i, 0, 0, 0], [1234567, 0]
        for _ in range(10):
            low, high = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
            counter = [(high >> 32) ^ counter[1] ^ key[0], high % 2**32, (low >> 32) ^ counter[3] ^ key[1], low % 2**32]
            key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
        assert int(x[i]) % 2**32 == counter[0]


def test_threads():
    errors = []

    def work():
        actual, expected = _multiply(np.float32, shape=(16, 32, 32))
        errors.append(np.abs(actual - expected).max())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 4
    assert max(errors) < 1e-4


def test_compiles_before_and_after(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "before"))
    _multiply(bfloat16, shape=(16, 32, 32))  # a process's first leaves some inherited methods as a class's own
    names = dict(vars(tl)), dict(vars(tl.tensor)), set(_matmul.fn.__globals__)
    before = _compiled()["ptx"]
    _multiply(bfloat16, shape=(16, 32, 32))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "after"))
    after = _compiled()["ptx"]
    assert "wgmma" in after or "mma.sync" in after
    assert after == before
    assert names == (dict(vars(tl)), dict(vars(tl.tensor)), set(_matmul.fn.__globals__))
    with pytest.raises(RuntimeError, match="outside of the scope of a kernel"):
        _block(1, 2, 3, 4, 5, 6, 7)


def test_failing_kernel_restores():
    before = tl.load, triton.JITFunction.__call__
    with pytest.raises(AssertionError):
        launch(_grid, (1,), np.zeros(1, np.int32), 1, BASE=1)
    assert before == (tl.load, triton.JITFunction.__call__)


def test_refuses():
    x = np.zeros(8, np.float32)
    with pytest.raises(ValueError, match="`X` must be contiguous"):
        launch(_cast, (1,), np.zeros((8, 2), np.float32)[:, 0], x, N=8)
    with pytest.raises(TypeError, match=r"`Y` must have a dtype .*: got complex64"):
        launch(_cast, (1,), x, x.astype(np.complex64), N=8)
    with pytest.raises(TypeError, match="`X` must be a numpy array, a number or None: got list"):
        launch(_cast, (1,), [1.0], x, N=8)
    with pytest.raises(TypeError, match=r"missing a required .*argument: 'N'"):
        launch(_cast, (1,), x, x)
    with pytest.raises(TypeError, match="num_warps"):
        launch(_cast, (1,), x, x, N=8, num_warps=4)
    with pytest.raises(TypeError, match=r"triton\.jit"):
        launch(_cast.fn, (1,), x, x, N=8)
    with pytest.raises(ValueError, match="at most three"):
        launch(_cast, (1, 1, 1, 1), x, x, N=8)
