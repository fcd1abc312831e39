"""What `compiled` and `recorded` say of small kernels."""

import os
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl
from jaxlib import gpu_triton

from compiled import compiled
from jax_flash_jvp import dot_product_attention, launch
from recorded import import_jax_triton, launches_of, record_launches


@triton.jit
def product(A, B, K, scale, C, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """C = scale A B for one tile of each row block; K runs over blocks."""
    o_m = tl.program_id(0) * BM + tl.arange(0, BM)
    o_n = tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    b_c = tl.zeros([BM, BN], tl.float32)
    for k in range(0, K, BK):
        b_a = tl.load(A + o_m[:, None] * K + (k + o_k)[None, :], mask=(k + o_k)[None, :] < K, other=0.0)
        b_b = tl.load(B + (k + o_k)[:, None] * BN + o_n[None, :], mask=(k + o_k)[:, None] < K, other=0.0)
        b_c = tl.dot(b_a, b_b, b_c)
    tl.store(C + o_m[:, None] * BN + o_n[None, :], (b_c * scale).to(C.dtype.element_ty))


def compiled_product(capability, size=64, num_warps=4, num_stages=2):
    signature = {"A": "*bf16", "B": "*bf16", "K": "i32", "scale": "fp32", "C": "*bf16"}
    constants = {"BM": size, "BN": size, "BK": 64}
    return compiled(product, signature, constants, capability=capability, num_warps=num_warps, num_stages=num_stages)


@pytest.mark.parametrize(("capability", "instruction"), [(80, "mma.sync"), (90, "wgmma"), (100, "tcgen05.mma")])
def test_resources(capability, instruction):
    resources = compiled_product(capability)
    assert instruction in resources.mma
    assert 32 <= resources.registers <= 255
    assert resources.stack == resources.spill_stores == resources.spill_loads == 0
    assert 2 * 64 * 64 * 2 <= resources.shared <= 65536
    assert (resources.tensor_memory > 0) == (capability == 100)
    assert resources.async_copies > 0
    assert resources.fits(capability)


def test_spills_and_shared_memory_in_excess():
    resources = compiled_product(80, size=128, num_stages=12)
    assert resources.registers == 255
    assert min(resources.stack, resources.spill_stores, resources.spill_loads) > 0
    assert 166912 < resources.shared <= 232448
    assert not resources.fits(80)
    assert resources.fits(90)


def test_each_parameter_is_named_once():
    with pytest.raises(ValueError, match="each parameter once"):
        compiled(product, {"A": "*bf16"}, {}, capability=80, num_warps=4, num_stages=2)


def multiply(a, b):
    """The product through jax-triton, whichever version."""
    options = {"kernel": product, "grid": (a.shape[0] // 64,), "name": "multiply", "num_warps": 4, "num_stages": 2}
    constants = {"BM": 64, "BN": b.shape[1], "BK": 64}
    out = jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), a.dtype)
    jax_triton = import_jax_triton()
    if hasattr(jax_triton.triton_lib, "TritonFunction"):  # 0.4
        scale = 0.5
        options |= {"out_type": out, "backend_options": {"enable_fp_fusion": True}}
    else:
        scale = np.float32(0.5)  # a Python float would be fp64
        options |= {"out_shape": out, "enable_fp_fusion": True}
    return jax_triton.triton_call(a, b, a.shape[1], scale, **options, **constants)


@pytest.mark.parametrize("capability", [80, 90])
def test_recorded_launch(capability):
    a, b = jax.ShapeDtypeStruct((128, 96), jnp.bfloat16), jax.ShapeDtypeStruct((96, 64), jnp.bfloat16)
    (launch,) = launches_of(jax.jit(multiply), a, b, capability=capability)
    array, scalars = ("array", 0, 16), (("scalar", 96, "i32"), ("scalar", 0.5, "fp32"))
    assert launch.parameters == (array, array, *scalars, array)
    assert (launch.name, launch.kernel, launch.grid) == ("multiply", "product", (2, 1, 1))
    assert (launch.num_warps, launch.capability) == (4, capability)
    assert f".target sm_{capability}" in launch.ptx
    # the same kernel, so the same shared memory: both compile as jax-triton does
    assert launch.shared == compiled_product(capability).shared


def test_records_each_launch_and_leaves_nothing():
    before = dict(vars(gpu_triton))
    a, b, c = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in [(128, 96), (96, 64), (64, 64)])
    with record_launches() as launches:
        jax.jit(lambda *args: multiply(multiply(*args[:2]), args[2])).trace(a, b, c).lower(lowering_platforms=("cuda",))
    assert [launch.parameters[2][1] for launch in launches] == [96, 64]
    assert before == dict(vars(gpu_triton))
    for _ in range(2):
        assert len(launches_of(multiply, a, b)) == 1


def test_threads_that_lower_their_first_kernels_keep_the_directory_of_the_cache(monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "a place of the user's")
    started = threading.Barrier(8)

    def importing():  # as jax-triton is imported: it sets the directory, which is put back
        before = os.environ["TRITON_CACHE_DIR"]
        os.environ["TRITON_CACHE_DIR"] = ""
        time.sleep(0.02)
        os.environ["TRITON_CACHE_DIR"] = before

    def lower():
        started.wait()
        launch._import_jax_triton()

    monkeypatch.setattr(launch, "_imported", importing)
    workers = [threading.Thread(target=lower) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert os.environ["TRITON_CACHE_DIR"] == "a place of the user's"


@pytest.mark.skipif(hasattr(gpu_triton, "get_compute_capability"), reason="a jaxlib with CUDA")
def test_lowering_for_a_gpu_where_that_cannot_be(monkeypatch, caplog):
    monkeypatch.setenv("TRITON_CACHE_DIR", "a place of the user's")
    # not what another test of this process imported with launches recorded
    monkeypatch.setattr(launch, "_imported", launch._imported.__wrapped__)
    q = jnp.ones((1, 4, 1, 8))
    function = jax.jit(lambda q: dot_product_attention(q, q, q))
    kernels = jax.jit(lambda q: dot_product_attention(q, q, q, implementation="triton"))
    with pytest.raises(ImportError, match="cannot be compiled here"):
        kernels.trace(q).lower(lowering_platforms=("cuda",))
    exported = jax.export.export(function, platforms=("cpu", "cuda"))(q)
    assert "cannot be compiled here" in caplog.text
    assert "the exported program will run the tiled reference on its GPU" in caplog.text
    np.testing.assert_array_equal(exported.call(q), function(q))
    assert os.environ["TRITON_CACHE_DIR"] == "a place of the user's"
