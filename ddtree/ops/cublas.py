"""Plain matrix products by cuBLAS, with no promise that a row's bits do not depend on the rows beside it.

f32 weights: sgemm, without TF32. bf16 weights: inputs rounded to bf16, f32 sums and results, as the kernels do it. One
handle and one workspace serve an engine's whole life, so that products can be captured in a CUDA graph. In the
simulator NumPy makes the products.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from ddtree.errors import UsageError
from ddtree.ops.device_memory import CUBLAS_WORKSPACE, DeviceMemory
from ddtree.ops.graphs import INSTALL, simulated
from kernels_numba.append_rows import append_rows
from kernels_numba.checks import check

R_32F, R_16BF = 0, 14  # cudaDataType_t
N, T = 0, 1  # cublasOperation_t: as it is, transposed
COMPUTE_32F = 68  # cublasComputeType_t
DEFAULT_ALGORITHM = -1  # cublasGemmAlgo_t


def products(memory: DeviceMemory) -> LibraryProducts:
    """What makes an engine's products; UsageError where nvmath-python or cuBLAS is missing."""
    return HostProducts(memory) if simulated() else LibraryProducts(memory, open_cublas())


def open_cublas() -> Any:
    """nvmath-python's cuBLAS bindings; UsageError, in one line, where they or the library are missing."""
    try:
        from nvmath.bindings import cublas
    except ImportError:
        raise UsageError(f"gemm cublas: nvmath-python is not installed; {INSTALL}") from None
    try:
        cublas.get_cudart_version()
    except Exception as error:  # the loader's own classes: the library is not there
        raise UsageError(
            f"gemm cublas: cuBLAS cannot be loaded ({type(error).__name__}); {INSTALL}"
        ) from error
    return cublas


class LibraryProducts:
    """`linear` and `head_linear` as `kernels_numba.linear` has them; `library` is nvmath.bindings.cublas."""

    def __init__(self, memory: DeviceMemory, library: Any):
        self.memory, self.library = weakref.proxy(memory), library  # the backend owns this object
        self.start = memory.integers(np.zeros(1))  # the row at which rounded rows begin
        self.stream: Any = None  # the one the handle has
        self.one, self.zero = (
            np.array([value], np.float32) for value in (1, 0)
        )  # read when a product is asked for
        self.handle = self._open()

    def _open(self) -> Any:
        handle = self.library.create()
        weakref.finalize(self, self.library.destroy, handle).atexit = False  # the driver may be gone by then
        return handle

    def linear(self, x: Any, weight: Any, out: Any, stream: Any = 0) -> None:
        """out = x @ weight.T; x f32[M, K], weight f32[N, K] or bf16 bits u16[N, K], out f32[M, N]. LaunchError."""
        check("linear: x", x, "float32", (None, None))
        check("linear: weight", weight, ("float32", "uint16"), (None, x.shape[1]))
        check("linear: out", out, "float32", (x.shape[0], weight.shape[0]))
        self._multiply(self._factor(x, weight, stream), weight, out, 1, stream)

    def head_linear(self, x: Any, weight: Any, out: Any, stream: Any = 0) -> None:
        """out[i, h] = weight[h] @ x[i, h]; x f32[M, H, A], weight [H, B, A], out f32[M, H, B]. LaunchError."""
        check("head_linear: x", x, "float32", (None, None, None))
        rows, heads, length = x.shape
        check("head_linear: weight", weight, ("float32", "uint16"), (heads, None, length))
        check("head_linear: out", out, "float32", (rows, heads, weight.shape[1]))
        self._multiply(self._factor(x, weight, stream), weight, out, heads, stream)

    def _factor(self, x: Any, weight: Any, stream: Any) -> Any:
        """x in the weight's format: itself, or rounded to bf16 into scratch."""
        if str(weight.dtype) == "float32" or not x.size:
            return x
        rounded = self.memory.scratch("gemm input", x.size, np.uint16)[: x.size].reshape(*x.shape)
        append_rows(x, self.start, rounded, stream)
        return rounded

    def _multiply(self, x: Any, weight: Any, out: Any, heads: int, stream: Any) -> None:
        """cuBLAS's matrices lie by columns: out.T [N, M] = weight.T.T [N, K] @ x.T [K, M], for each head."""
        if not out.size:
            return
        self._use(stream)
        rows = x.shape[0]
        length, width = x.size // (rows * heads), out.size // (rows * heads)
        kind = R_32F if str(weight.dtype) == "float32" else R_16BF
        sizes = (self.handle, T, N, width, rows, length, self.one.ctypes.data)
        at_weight, at_x, at_out = (address(array) for array in (weight, x, out))
        zero, lead = self.zero.ctypes.data, heads * length
        end = (COMPUTE_32F, DEFAULT_ALGORITHM)
        if heads > 1:
            factors = (at_weight, kind, length, width * length, at_x, kind, lead, length)
            result = (zero, at_out, R_32F, heads * width, width, heads)
            self.library.gemm_strided_batched_ex(*sizes, *factors, *result, *end)
        elif kind == R_32F:
            self.library.sgemm(*sizes, at_weight, length, at_x, lead, zero, at_out, width)
        else:
            factors = (at_weight, kind, length, at_x, kind, lead)
            self.library.gemm_ex(*sizes, *factors, zero, at_out, R_32F, width, *end)

    def _use(self, stream: Any) -> None:
        """Put the handle on a stream, with a workspace of our own: a capture may not allocate one."""
        if stream is self.stream:
            return
        workspace = self.memory.scratch("gemm workspace", CUBLAS_WORKSPACE, np.uint8)
        self.library.set_stream(self.handle, int(stream))
        self.library.set_workspace(self.handle, address(workspace), CUBLAS_WORKSPACE)
        self.stream = stream


class HostProducts(LibraryProducts):
    """The same products by NumPy, for the simulator."""

    def __init__(self, memory: DeviceMemory):
        super().__init__(memory, None)

    def _open(self) -> None:
        return None

    def _multiply(self, x: Any, weight: Any, out: Any, heads: int, stream: Any) -> None:
        if not out.size:
            return
        x, weight = (values_of(array) for array in (x, weight))
        x, weight = x.reshape(len(x), heads, -1), weight.reshape(heads, -1, weight.shape[-1])
        product = np.matmul(x.transpose(1, 0, 2), weight.transpose(0, 2, 1)).transpose(1, 0, 2)
        out.copy_to_device(np.ascontiguousarray(product).reshape(out.shape))


def address(array: Any) -> int:
    """Where a device array begins."""
    return array.__cuda_array_interface__["data"][0]


def values_of(array: Any) -> np.ndarray:
    """The f32 values of a device array of f32 or of bf16 bits."""
    host = array.copy_to_host()
    return host if host.dtype == np.float32 else (host.astype(np.uint32) << 16).view(np.float32)
