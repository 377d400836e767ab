"""The tensor-core part of `linear`: bf16 weights whose K is a multiple of 8.

    out[i, h, n] = sum over k of bf16(x[i, h, k]) * weight[h, n, k]

How K is split depends on the weight alone. Which tile a block makes, rows x columns, changes no bit and is chosen for
speed: a block reads its columns' weights and its rows, so wide tiles read less in all and narrow ones are more blocks.
"""

import functools
from typing import NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, types, uint32

from kernels_numba.primitives import after_previous
from kernels_numba.primitives_mma import ALIGN, EXCHANGE, LANES
from kernels_numba.primitives_tensor import (
    COLUMNS,
    FEWEST_WARPS,
    SUMS,
    WORDS,
    column_of,
    keep,
    row_of,
    tensor_split_bits,
    total_of,
)
from kernels_numba.primitives_tensor_stage import TILES, most_warps, options_for, tensor_tile, tiles_for
from kernels_numba.registry import KernelSpec

# What the choice of tiles reckons with; an H200.
MULTIPROCESSORS = 132
MEMORY_RATE = 4190.0  # bytes a ns that are copied through memory,
ALL_RATE = 5500.0  # that all multiprocessors together get from the L2 cache,
OWN_RATE = 85.0  # and one
SHARED_RATE = 1.75  # accesses of 128 bytes to shared memory or L1 a ns
BLOCK_NS = 300.0  # what a block takes besides,
SHARE_NS = 1500.0  # and each time that it starts to wait for memory anew


class Tiling(NamedTuple):
    """How a launch is cut: the kind and the rows of a block's tile, its column tiles, and the grid."""

    kind: str
    rows: int
    groups: int
    grid: tuple


@functools.cache
def make_linear_mma(kind, rows):
    """The kernel for blocks of `rows` rows."""
    tile = tensor_tile(kind, rows)
    load_first, accumulate, num_held = tile.load_first, tile.accumulate, tile.held
    num_sums, num_floats, rows_held = tile.sums, tile.floats, max(16, rows)
    split_warps = kind == "plain"

    @cuda.jit(**options_for(kind))
    def linear_mma_kernel(x, weight, out, num_rows, num_heads, width, length, split_bits):
        """Flat x [num_rows, num_heads, length], weight [num_heads, width, length], out [num_rows, num_heads, width].

        Grid (tiles of rows, blocks of columns, heads): tiles of one weight run side by side and share it in L2. The
        first weights are on their way before the launch ahead has ended.
        """
        buffers = cuda.shared.array(WORDS, uint32, ALIGN)
        floats = cuda.shared.array(num_floats, float32, ALIGN)
        words = cuda.shared.array(EXCHANGE, uint32)
        row_at = cuda.shared.array(rows_held, int32)
        held, sums = cuda.local.array(num_held, uint32), cuda.local.array(num_sums, float32)
        thread, head = int32(cuda.threadIdx.x), int32(cuda.blockIdx.z)
        warp, warp_bits = int32(thread >> 5), split_bits if split_warps else int32(0)
        splits, groups = int32(1 << warp_bits), int32(cuda.blockDim.x >> 5 >> warp_bits)
        first_warp = int32(warp & -splits)
        first_column = int32((cuda.blockIdx.y * groups + (warp >> warp_bits)) * COLUMNS)
        mine, sizes = weight[int64(head) * width * length :], (width, length, split_bits)
        load_first(mine, first_column, sizes, held)
        first_row = int32(cuda.blockIdx.x * rows)
        count = min(int32(rows), int32(num_rows - first_row))
        if thread < rows_held:
            row_at[thread] = int32(int32((first_row + thread) * num_heads + head) * length)
        after_previous()
        accumulate(x, row_at, count, mine, first_column, sizes, held, sums, (buffers, floats, words))
        for first in range(0, num_sums, SUMS):
            keep(sums, first, buffers)
            for step in range(warp - first_warp, SUMS, splits):
                row, column = int32(2 * first + row_of(step)), int32(first_column + column_of(step))
                if row < count and column < width:
                    total = total_of(buffers, first_warp, step, warp_bits)
                    out[int64(int32((first_row + row) * num_heads + head)) * width + column] = total

    return linear_mma_kernel


@functools.lru_cache(maxsize=1024)
def tiling_of(num_rows, heads, width, length, split_bits):
    """The Tiling of the least time, reckoned from what all blocks read, and from what the busiest unit does."""
    best = None
    for kind, rows in tiles_for(num_rows, split_bits):
        splits, shares = (1 << split_bits, 1) if kind == "plain" else (1, 1 << split_bits)
        for groups in range(-(-FEWEST_WARPS // splits), most_warps(kind) // splits + 1):
            grid = (-(-num_rows // rows), -(-width // (COLUMNS * groups)), heads)
            blocks, used = grid[0] * grid[1] * grid[2], min(num_rows, rows)
            read = length * (2 * COLUMNS * groups + 4 * used)
            # a chunk: 8 accesses for weights; rows of 128 bytes twice a warp, or 32 bytes a warp and 320 more
            passes = groups * (8 + 2 * used) if kind == "plain" else groups * (8 + rows // 2) + 5 * used // 2
            own = (
                max(read / OWN_RATE, passes * length / 32 / SHARED_RATE) + BLOCK_NS + SHARE_NS * (shares - 1)
            )
            own *= -(-blocks // MULTIPROCESSORS)
            all_of_them = max(2 * heads * width * length / MEMORY_RATE, blocks * read / ALL_RATE)
            time = max(all_of_them, own) + own / 8
            if best is None or time < best[0]:
                best = time, Tiling(kind, rows, groups, grid)
    return best[1]


def threads_of(tiling, split_bits):
    """Threads of a block."""
    return LANES * (tiling.groups << split_bits if tiling.kind == "plain" else tiling.groups)


def launch_mma(x, weight, out, heads, width, length, stream):
    """What `linear` and `head_linear` launch for bf16 weights; x has rows of heads x length."""
    split_bits = tensor_split_bits(heads * -(-width // COLUMNS), length)
    tiling = tiling_of(x.shape[0], heads, width, length, split_bits)
    sizes = (np.int32(size) for size in (x.shape[0], heads, width, length, split_bits))
    kernel, threads = make_linear_mma(tiling.kind, tiling.rows), threads_of(tiling, split_bits)
    kernel[tiling.grid, threads, stream](x.reshape(-1), weight.reshape(-1), out.reshape(-1), *sizes)


_FLAT, _BITS = types.Array(types.float32, 1, "C"), types.Array(types.uint16, 1, "C")
SPECS = [
    KernelSpec(
        f"linear_mma_{kind}_{rows}",
        make_linear_mma(kind, rows),
        (_FLAT, _BITS, _FLAT) + (types.int32,) * 5,
        most_warps(kind) * LANES,
    )
    for kind, rows in TILES
]
