"""Matrix products whose rows never see each other: out = x @ weight.T, for one weight or for one a head.

    out[i, h, n] = sum over k of x[i, h, k] * weight[h, n, k]

With f32 weights a warp makes a tile of rows x columns (`primitives_dot`). Where columns are few and K is long, `splits`
warps of a block share K and their sums are added in order; the split depends on the weight's shape alone, never on the
rows. bf16 weights go to tensor cores (`linear_mma`), unless their K is no multiple of 8: such a weight never does.
"""

import functools

import numpy as np
from numba import cuda, float32, int32, int64, types

from kernels_numba.checks import check, require
from kernels_numba.linear_mma import launch_mma
from kernels_numba.primitives import SIMULATED, WARP, after_previous
from kernels_numba.primitives_dot import (
    RAGGED_ROWS,
    SCRATCH,
    TILES,
    chunk_of,
    make_tile,
    rows_of_tile,
)
from kernels_numba.primitives_lanes import THREADS, WARPS, lane_and_warp
from kernels_numba.registry import KernelSpec

ENOUGH_SUMS = 4096  # warps that fill the GPU, one column each
SHORTEST_SPLIT = 512  # elements of K that are still worth a warp
BUSY_BLOCKS = 1 if SIMULATED else 128  # with fewer, smaller tiles use more of the GPU


@functools.cache
def make_kernel(rows, half, ragged):
    """The kernel for tiles of `rows` rows, weight f32 or (`half`) bf16, K a multiple of a chunk or (`ragged`) not."""
    tile = make_tile(rows, half, ragged)
    columns, values, chunk = tile.columns, tile.values, chunk_of(half)
    last_of_chunk = chunk - 1
    accumulate, reduce, held = tile.accumulate, tile.reduce, tile.values * WARPS
    load_first, use_first, num_words, word = tile.load_first, tile.use_first, tile.words, tile.word

    @cuda.jit(**tile.bounds)
    def linear_kernel(x, weight, out, num_rows, num_heads, width, length, split_bits):
        """Flat x [num_rows, num_heads, length], weight [num_heads, width, length], out [num_rows, num_heads, width].

        Grid (tiles of rows, blocks of columns, heads): tiles of one weight run side by side and share it in L2. The
        first weights are on their way before the launch ahead has ended.
        """
        scratch = cuda.shared.array(SCRATCH, float32)
        partial = cuda.shared.array(held, float32)
        words, sums = cuda.local.array(num_words, word), cuda.local.array(values, float32)
        row_at = cuda.local.array(rows, int32)
        column_at = cuda.local.array(columns, int32)
        lane, warp = lane_and_warp()
        head, split = cuda.blockIdx.z, int32(warp & ((1 << split_bits) - 1))
        first_row = int32(cuda.blockIdx.x * rows)
        first_column = int32(((cuda.blockIdx.y * WARPS >> split_bits) + (warp >> split_bits)) * columns)
        for c in range(columns):
            column = min(int32(first_column + c), int32(width - 1))
            column_at[c] = int32(int32(head * width + column) * length)
        share = int32(((length + last_of_chunk) // chunk + (1 << split_bits) - 1 >> split_bits) * chunk)
        k = int32(split * share + lane * chunk)
        last = min(int32((split + 1) * share), length)
        if first_column >= width:  # no column
            last = int32(0)
        load_first(weight, column_at, k, last, length, words)
        after_previous()
        for i in range(values):
            sums[i] = float32(0)
        if first_column < width:
            for r in range(rows):
                row = min(int32(first_row + r), int32(num_rows - 1))
                row_at[r] = int32(int32(row * num_heads + head) * length)
            k = use_first(x, row_at, k, last, length, words, sums)
            accumulate(x, row_at, weight, column_at, k, last, length, sums)
        reduce(sums, lane, scratch, partial, warp * values)
        cuda.syncthreads()  # the sums of all splits are in `partial`
        if split == 0:
            i = lane
            while i < values:
                row, column = int32(first_row + i // columns), int32(first_column + i % columns)
                if row < num_rows and column < width:
                    total = partial[warp * values + i]
                    for other in range(1, 1 << split_bits):
                        total += partial[(warp + other) * values + i]
                    out[int64(int32(row * num_heads + head)) * width + column] = total
                i = int32(i + WARP)

    return linear_kernel


def split_bits_of(columns, length):
    """K of a weight with that many columns (heads x width) is cut into 1 << this many parts."""
    bits = 0
    while 1 << bits < WARPS and columns << bits < ENOUGH_SUMS and length >= SHORTEST_SPLIT << bits + 1:
        bits += 1
    return bits


def _grid(rows, num_rows, width, heads, split_bits):
    columns_a_block = TILES[rows][0] * (WARPS >> split_bits)
    return -(-num_rows // rows), -(-width // columns_a_block), heads


def _launch(x, weight, out, heads, width, length, stream):
    num_rows, half = x.shape[0], str(weight.dtype) == "uint16"
    if not num_rows * heads * width:
        return
    largest = max(x.size, weight.size, num_rows * heads)
    require(largest < 2**31, f"linear: {largest} elements are more than i32 indices reach")
    ragged = length % chunk_of(half) != 0
    if half and not ragged:
        launch_mma(x, weight, out, heads, width, length, stream)
        return
    split_bits = split_bits_of(heads * width, length)
    rows = rows_of_tile(num_rows, ragged)
    grid = _grid(rows, num_rows, width, heads, split_bits)
    if rows == 8 and np.prod(grid) < BUSY_BLOCKS:
        rows = 4
        grid = _grid(rows, num_rows, width, heads, split_bits)
    sizes = (np.int32(size) for size in (num_rows, heads, width, length, split_bits))
    kernel = make_kernel(rows, half, ragged)
    kernel[grid, THREADS, stream](x.reshape(-1), weight.reshape(-1), out.reshape(-1), *sizes)


def linear(x, weight, out, stream=0):
    """out = x @ weight.T; x f32[M, K], weight f32[N, K] or bf16 bits u16[N, K], out f32[M, N]. Raises LaunchError."""
    check("linear: x", x, "float32", (None, None))
    length = x.shape[1]
    check("linear: weight", weight, ("float32", "uint16"), (None, length))
    check("linear: out", out, "float32", (x.shape[0], weight.shape[0]))
    _launch(x, weight, out, 1, weight.shape[0], length, stream)


def head_linear(x, weight, out, stream=0):
    """out[i, h] = weight[h] @ x[i, h]; x f32[M, H, A], weight f32 or bf16 bits u16 [H, B, A], out f32[M, H, B].

    Raises LaunchError.
    """
    check("head_linear: x", x, "float32", (None, None, None))
    num_rows, heads, length = x.shape
    check("head_linear: weight", weight, ("float32", "uint16"), (heads, None, length))
    width = weight.shape[1]
    check("head_linear: out", out, "float32", (num_rows, heads, width))
    _launch(x, weight, out, heads, width, length, stream)


def _spec(rows, half, ragged):
    flat, bits = types.Array(types.float32, 1, "C"), types.Array(types.uint16, 1, "C")
    name = f"linear_{'bf16' if half else 'f32'}_{rows}{'_ragged' if ragged else ''}"
    arguments = (flat, bits if half else flat, flat) + (types.int32,) * 5
    return KernelSpec(name, make_kernel(rows, half, ragged), arguments, THREADS)


SPECS = [
    _spec(rows, half, ragged)
    for half, ragged, sizes in ((False, False, TILES), (False, True, RAGGED_ROWS), (True, True, RAGGED_ROWS))
    for rows in sizes
]
