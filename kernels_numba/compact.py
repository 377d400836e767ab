"""The move of accepted cache rows into place: cache[layer, context_len + j] = cache[layer, context_len + path[j]].

In place and in parallel over layers and columns. A block has some columns of one layer; it loads a batch of rows, waits
for all its threads, and stores the batch. path rises strictly, so path[j] >= j, and a batch writes no row that a later
one reads. Rows already in place are not touched.
"""

import functools

from numba import cuda, float32, int32, int64, types, uint16, uint32

from kernels_numba.checks import check, require
from kernels_numba.intrinsics_copy import fetch1, fetch16, put1, put16
from kernels_numba.primitives import SIMULATED, after_previous
from kernels_numba.registry import KernelSpec

THREADS = 8 if SIMULATED else 256
LOG_COLUMNS = 2 if SIMULATED else 6  # accesses of a row that a block makes side by side, at most
BATCH = 2 if SIMULATED else 8  # rows a thread holds in registers


@functools.cache
def compact_kernel(dtype, wide):
    """The kernel for a numba dtype, by 16 bytes an access or by elements; grid (columns, layers)."""
    fetch, put = (fetch16, put16) if wide else (fetch1, put1)
    word, count = (uint32, 4) if wide else (dtype, 1)
    per_access = 128 // dtype.bitwidth if wide else 1
    size = BATCH * count

    @cuda.jit
    def kernel(cache, capacity, width, log_columns, context_len, path, length):
        """cache flat; 2**log_columns accesses of a row side by side, and so THREADS >> log_columns rows at once."""
        after_previous()
        held = cuda.local.array(size, word)  # in registers
        sources = cuda.local.array(BATCH, int32)
        thread = uint32(cuda.threadIdx.x)
        shift = uint32(log_columns)
        lanes = int32(uint32(THREADS) >> shift)
        lane = int32(thread >> shift)
        access = uint32(uint32(cuda.blockIdx.x) << shift) + (
            thread & uint32(uint32(uint32(1) << shift) - uint32(1))
        )
        column = int64(access) * int64(per_access)
        rows = int32(path.shape[0])
        start = context_len[0]
        accepted = min(length[0], rows)
        layer = int64(cuda.blockIdx.y) * capacity * width + column
        first = int32(1)  # row 0 is the root, in place
        while first < accepted:
            for i in range(BATCH):  # without branches, so that all loads are in flight
                sources[i] = path[uint32(min(int32(first + int32(i) * lanes + lane), int32(rows - int32(1))))]
            for i in range(BATCH):
                row = int32(first + int32(i) * lanes + lane)
                moves = (
                    (row < accepted) & (sources[i] > row) & (start + sources[i] < capacity) & (column < width)
                )
                sources[i] = sources[i] if moves else int32(-1)
            for i in range(BATCH):
                if sources[i] >= int32(0):
                    fetch(cache, layer + int64(start + sources[i]) * width, held, i * count)
            cuda.syncthreads()  # every row of the batch is read before one is written
            for i in range(BATCH):
                if sources[i] >= int32(0):
                    row = int32(first + int32(i) * lanes + lane)
                    put(cache, layer + int64(start + row) * width, held, i * count)
            first = int32(first + int32(lanes * int32(BATCH)))

    return kernel


def compact(cache, context_len, path, length, stream=0):
    """Move the accepted rows of one cache into place, in every layer.

    cache [layers, capacity, width], f32, or bf16 as u16, on a 16-byte boundary; context_len i32[1]; path i32 [P],
    strictly rising from the root's 0; length i32 of one element or more, the first the number of accepted rows
    (accept's result will do). Rows of whole 16 bytes move 16 bytes at a time, others by elements. A features buffer
    [rows, width] is a cache of one layer and context_len 0. A row past the capacity is not moved: decode sizes caches
    so that there is none. Raises LaunchError.
    """
    check("compact: cache", cache, ("float32", "uint16"), (None, None, None))
    layers, capacity, width = cache.shape
    check("compact: context_len", context_len, "int32", (1,))
    check("compact: path", path, "int32", (None,))
    check("compact: length", length, "int32", (None,))
    require(path.shape[0] > 0 and length.shape[0] > 0, "compact: path or length is empty")
    if cache.size == 0 or path.shape[0] == 1:
        return
    dtype = float32 if cache.dtype == "float32" else uint16
    per_access = 128 // dtype.bitwidth if width * dtype.bitwidth % 128 == 0 else 1
    accesses = width // per_access
    log_columns = min((accesses - 1).bit_length(), LOG_COLUMNS)
    blocks = -(-accesses >> log_columns)
    kernel = compact_kernel(dtype, per_access > 1)
    flat = cache.reshape(-1)
    kernel[(blocks, layers), THREADS, stream](flat, capacity, width, log_columns, context_len, path, length)


_I32 = types.Array(types.int32, 1, "C")
SPECS = [
    KernelSpec(
        f"compact_{name}{'' if wide else '_by_elements'}",
        compact_kernel(dtype, wide),
        (types.Array(dtype, 1, "C"), types.int64, types.int64, types.int64, _I32, _I32, _I32),
        THREADS,
    )
    for name, dtype in (("f32", float32), ("bf16", uint16))
    for wide in (True, False)
]
