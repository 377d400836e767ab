"""gemm="cublas": what cuBLAS is asked for, against a column-major product on the host; and where it is not offered."""

import ctypes
import importlib.util

import ml_dtypes
import numpy as np
import pytest
from compare_arrays import assert_close
from conftest import SIMULATED, why_no_gpu
from engine.micro import write_micro_bundle
from seeds import fresh_seed
from support import tokens_of, trained

from ddtree.bundle import open_bundle
from ddtree.cli_options import describe_backend
from ddtree.config import DecodeConfig
from ddtree.decode import decode
from ddtree.engine import Engine
from ddtree.errors import UsageError
from ddtree.ops import get_ops

# M, N, K; and M, heads, B, A
LINEAR = [(1, 3, 8), (5, 7, 16), (3, 1, 1), (0, 4, 8)]
HEADS = [(1, 2, 3, 8), (5, 3, 7, 4), (3, 1, 4, 8)]
EPS = float(np.finfo(np.float32).eps)


def bf16(values):
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def check_products(dtype, linear_sizes, head_sizes, seed, library=None):
    """linear and head_linear of random values against NumPy's products in f64, outputs poisoned."""
    rng, ops = np.random.default_rng(seed), get_ops("cuda", dtype, gemm="cublas")
    if library is not None:
        ops._products = library(ops)
    rounded = bf16 if dtype == "bf16" else np.asarray
    for rows, width, length in linear_sizes:
        x, weight = (
            rng.standard_normal(shape).astype(np.float32) for shape in ((rows, length), (width, length))
        )
        out = ops.put_exact(np.full((rows, width), np.nan))
        ops.linear(ops.put_exact(x), ops.put(weight), out)
        want = rounded(x).astype(np.float64) @ rounded(weight).astype(np.float64).T
        scale = np.abs(rounded(x)) @ np.abs(rounded(weight)).T
        assert_close(
            ops.read(out), want, 4 * length**0.5 * EPS, f"linear {dtype} {rows}x{width}x{length}", scale=scale
        )
    for rows, heads, width, length in head_sizes:
        x, weight = (
            rng.standard_normal(shape).astype(np.float32)
            for shape in ((rows, heads, length), (heads, width, length))
        )
        out = ops.put_exact(np.full((rows, heads, width), np.nan))
        ops.head_linear(ops.put_exact(x), ops.put(weight), out)
        factors = rounded(x).astype(np.float64), rounded(weight).astype(np.float64)
        want, scale = np.einsum("mha,hba->mhb", *factors), np.einsum("mha,hba->mhb", *map(np.abs, factors))
        what = f"head_linear {dtype} {rows}x{heads}x{width}x{length}"
        assert_close(ops.read(out), want, 4 * length**0.5 * EPS, what, scale=scale)


@pytest.mark.simulator
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_products_in_the_simulator(dtype):
    check_products(dtype, LINEAR, HEADS, seed=3)


class ColumnMajor:
    """cuBLAS as its documentation has it, on host memory: the arguments of each product make that product."""

    def __init__(self):
        self.calls, self.handle = [], 77

    def create(self):
        return self.handle

    def destroy(self, handle):
        self.calls.append("destroy")

    def set_stream(self, handle, stream):
        self.calls.append("set_stream")

    def set_workspace(self, handle, place, size):
        assert size == 32 << 20
        self.calls.append("set_workspace")

    def sgemm(self, handle, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):
        self.gemm_ex(handle, ta, tb, m, n, k, alpha, a, 0, lda, b, 0, ldb, beta, c, 0, ldc, 68, -1)

    def gemm_ex(
        self, handle, ta, tb, m, n, k, alpha, a, at, lda, b, bt, ldb, beta, c, ct, ldc, kind, algorithm
    ):
        sizes = (handle, ta, tb, m, n, k, alpha, a, at, lda, 0, b, bt, ldb, 0, beta, c, ct, ldc, 0, 1)
        self.gemm_strided_batched_ex(*sizes, kind, algorithm)

    def gemm_strided_batched_ex(
        self,
        handle,
        ta,
        tb,
        m,
        n,
        k,
        alpha,
        a,
        at,
        lda,
        sa,
        b,
        bt,
        ldb,
        sb,
        beta,
        c,
        ct,
        ldc,
        sc,
        count,
        kind,
        algorithm,
    ):
        assert (handle, ta, tb, ct, kind, algorithm) == (self.handle, 1, 0, 0, 68, -1)
        assert at == bt and min(lda, ldb) >= k and ldc >= m
        one, zero = floats(alpha, 0, 1, 1, 1, 0)[0, 0], floats(beta, 0, 1, 1, 1, 0)[0, 0]
        assert (one, zero) == (1, 0)
        for i in range(count):
            left, right = floats(a, at, k, m, lda, i * sa), floats(b, bt, k, n, ldb, i * sb)
            floats(c, ct, m, n, ldc, i * sc)[...] = left.T @ right
        self.calls.append((m, n, k))


def floats(place, kind, rows, columns, lead, offset):
    """A column-major matrix at an address: f32 (0), a view; or bf16 (14), a copy."""
    dtype = np.dtype(np.float32 if kind == 0 else ml_dtypes.bfloat16)
    size = lead * (columns - 1) + rows
    raw = (ctypes.c_char * (size * dtype.itemsize)).from_address(place + offset * dtype.itemsize)
    flat = np.frombuffer(raw, dtype)
    matrix = np.lib.stride_tricks.as_strided(flat, (rows, columns), (dtype.itemsize, lead * dtype.itemsize))
    return matrix if kind == 0 else matrix.astype(np.float32)


@pytest.mark.simulator
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_cublas_is_asked_for_the_right_products(dtype, monkeypatch):
    from ddtree.ops import cublas

    fake = ColumnMajor()
    monkeypatch.setattr(cublas, "address", lambda array: array.ctypes.data)
    check_products(dtype, LINEAR, HEADS, 4, lambda ops: cublas.LibraryProducts(ops, fake))
    assert fake.calls[:2] == ["set_stream", "set_workspace"]
    assert fake.calls[-1] == "destroy", "the handle goes with its backend"
    assert fake.calls.count("set_stream") == 1 and len(fake.calls) >= 2 + 3 + 3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_products_on_a_gpu(dtype):
    seed = fresh_seed()
    linear = [*LINEAR, (64, 7168, 2048), (33, 1023, 511)]
    check_products(dtype, linear, [*HEADS, (64, 16, 512, 128), (17, 16, 128, 512)], seed)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_captured_decode_by_cublas(dtype, tmp_path):
    """Graphs and eager launches ask for the same products, so they give the same tokens."""
    bundle = open_bundle(write_micro_bundle(tmp_path, 167))
    config = DecodeConfig("tree", budget=5, max_new_tokens=8)
    tokens = []
    for graphs in (False, True):
        engine = Engine(
            bundle, backend="cuda", dtype=dtype, gemm="cublas", max_budget=5, max_context=20, graphs=graphs
        )
        for _ in range(2):
            tokens.append(tokens_of(decode(engine, [5, 17, 40], config)))
    assert all(found == tokens[0] for found in tokens)


@pytest.mark.simulator
def test_it_is_said_that_rows_are_not_invariant(tmp_path):
    engine = Engine(open_bundle(write_micro_bundle(tmp_path)), backend="cuda", gemm="cublas", max_context=8)
    assert "gemm cublas (no row invariance)" in describe_backend(engine)


def test_numpy_is_invariant():
    engine = Engine(trained(), max_budget=1, max_context=8)
    assert "gemm invariant" in describe_backend(engine)
    with pytest.raises(UsageError, match="gemm: expected invariant on the backend numpy, found 'cublas'"):
        Engine(trained(), gemm="cublas")


@pytest.mark.simulator
def test_an_unknown_gemm_is_refused():
    with pytest.raises(
        UsageError, match="gemm: expected one of invariant, cublas on the backend cuda, found 'magic'"
    ):
        get_ops("cuda", gemm="magic")


@pytest.mark.skipif(
    SIMULATED or not why_no_gpu(), reason="asks for the bindings where there is neither a GPU nor a simulator"
)
def test_without_the_bindings_it_says_what_to_install():
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed: the extra `ptx` brings it")
    from ddtree.ops.cublas import open_cublas

    missing = importlib.util.find_spec("nvmath") is None
    says = "nvmath-python is not installed" if missing else "cuBLAS cannot be loaded"
    with pytest.raises(UsageError, match=f"gemm cublas: {says}.*extra `gpu`") as caught:
        open_cublas()
    assert "\n" not in str(caught.value)
