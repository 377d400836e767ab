"""Rows appended behind the context: cache[context_len + i] = rows[i]. One thread an element."""

import functools

from numba import cuda, int32, int64, types

from kernels_numba.checks import check, require
from kernels_numba.primitives import SIMULATED, after_previous, device_function, float_to_bf16
from kernels_numba.registry import KernelSpec

THREADS = 8 if SIMULATED else 128


@device_function
def _as_is(value):
    return value


@functools.cache
def make_append_rows(bf16):
    """The kernel that stores f32 or bf16."""
    convert = float_to_bf16 if bf16 else _as_is

    @cuda.jit
    def append_rows_kernel(rows, context_len, cache):
        """Block (part of a row, row); rows [M, W], cache [capacity, W]. A row past the capacity is not written."""
        after_previous()
        row, column = cuda.blockIdx.y, int32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
        target = int64(context_len[0]) + row
        if column < rows.shape[1] and target >= int64(0) and target < cache.shape[0]:
            cache[target, column] = convert(rows[row, column])

    return append_rows_kernel


def append_rows(rows, context_len, cache, stream=0):
    """Write f32 rows [M, ...] to cache [capacity, ...], f32 or bf16 bits u16, from row context_len[0] on.

    context_len i32[1]. A row past the capacity is not written. Raises LaunchError.
    """
    require(len(rows.shape) > 1, f"append_rows: rows: expected rows of elements, found shape {rows.shape}")
    count = rows.shape[0]
    check("append_rows: rows", rows, "float32", (count, *cache.shape[1:]))
    check("append_rows: cache", cache, ("float32", "uint16"), (None, *rows.shape[1:]))
    check("append_rows: context_len", context_len, "int32", (1,))
    if rows.size:
        width = rows.size // count
        kernel = make_append_rows(str(cache.dtype) == "uint16")
        kernel[(-(-width // THREADS), count), THREADS, stream](
            rows.reshape(count, width), context_len, cache.reshape(cache.shape[0], width)
        )


_ROWS, _COUNT = types.Array(types.float32, 2, "C"), types.Array(types.int32, 1, "C")
SPECS = [
    KernelSpec("append_rows", make_append_rows(False), (_ROWS, _COUNT, _ROWS), THREADS),
    KernelSpec(
        "append_rows_bf16",
        make_append_rows(True),
        (_ROWS, _COUNT, types.Array(types.uint16, 2, "C")),
        THREADS,
    ),
]
