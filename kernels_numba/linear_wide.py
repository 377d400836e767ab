"""The tensor-core part of `linear` for many rows: bf16 weights whose K is a multiple of 8.

    out[i, h, n] = sum over k of inputs[i, h, k] * weight[h, n, k], inputs = bf16(x)

`linear_ends` rounds the inputs first. A block takes some rows and columns, over all of K or, where K is split and rows
are few, over one share; then `linear_ends` adds the shares. The bits are those of `linear_mma`. GPUs of compute
capability 9.0 take `linear_wgmma` in its place.
"""

import functools
from typing import NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, types, uint32

from kernels_numba.launching import allow_shared
from kernels_numba.linear_mma import (
    ALL_RATE,
    BLOCK_NS,
    MEMORY_RATE,
    MULTIPROCESSORS,
    OWN_RATE,
    PLAIN_SHARED,
)
from kernels_numba.primitives import SIMULATED, after_previous
from kernels_numba.primitives_columns import CHUNK, MULTIPLE, ROWS, TILE_WORDS, wait_copies_but
from kernels_numba.primitives_mma import EXCHANGE, LANES
from kernels_numba.primitives_wide import (
    ACROSS,
    MOST_WARPS,
    ROW_TILES,
    STAGES,
    WARP_WORDS,
    WIDTH,
    make_wide_tile,
    shared_words,
)
from kernels_numba.registry import KernelSpec

SHARED_LIMIT = 227 << 10  # bytes of shared memory that a block may have, on an H200


MMA_NS = 0.7  # of a multiprocessor for each mma of a warp
LATENCY_NS = 2500.0  # from asking memory to its answer, when all ask
ROUND_NS, ADD_NS, ADD_RATE = 1500.0, 1500.0, 3000.0  # what `linear_ends` takes, and bytes a ns that it adds


class WideTiling(NamedTuple):
    """How a launch is cut: tiles of 16 rows and warps of a block, whether shares are blocks, and the grid."""

    tiles: int
    warps: int
    apart: bool
    grid: tuple


@functools.cache
def make_linear_wide(tiles):
    """The kernel for blocks of 16 x `tiles` rows."""
    tile = make_wide_tile(tiles)
    fetch_weights, fetch_rows, multiply, put = tile.fetch_weights, tile.fetch_rows, tile.multiply, tile.put
    num_sums, row_words = tile.sums, tile.row_words
    ahead = STAGES[tiles] - 1  # chunks that are under way while one is used
    wait = wait_copies_but(ahead - 1)
    options = {} if SIMULATED else {"launch_bounds": (LANES * MOST_WARPS[tiles], 1)}

    @cuda.jit(**options)
    def linear_wide_kernel(
        inputs, weight, out, num_rows, num_heads, width, length, share, split_bits, apart_bits
    ):
        """Inputs as `linear_ends` wrote them, flat weight [num_heads, width, length].

        With apart_bits = split_bits each share is a block's: out [1 << split_bits, num_rows, num_heads, width]. With 0
        a block takes the shares in turn: out [num_rows, num_heads, width]. Grid (tiles of rows, blocks of columns,
        heads x shares apart): tiles of one weight run side by side and share it in L2.
        """
        buffers = cuda.shared.array(0, float32)
        exchange = cuda.shared.array(EXCHANGE, uint32)
        sums = cuda.local.array(num_sums, float32)
        thread = int32(cuda.threadIdx.x)
        head, split = int32(cuda.blockIdx.z >> apart_bits), int32(cuda.blockIdx.z & ((1 << apart_bits) - 1))
        first_column = int32((cuda.blockIdx.y * (cuda.blockDim.x >> 5) + (thread >> 5)) * WIDTH)
        k, last = int32(split * share + (thread & 3) * MULTIPLE), int32(length)
        if apart_bits > 0:
            last = min(int32((split + 1) * share), last)
        mine = weight[int64(head) * width * length :]
        column = int32(first_column + ((thread & 31) >> 2) * ACROSS)
        share_chunks, stage_words = int32(share >> 5), int32(row_words + (cuda.blockDim.x >> 5) * WARP_WORDS)
        left = int32(share_chunks << (split_bits - apart_bits))
        for s in range(ahead):
            there, to = int32(k + s * CHUNK), int32(s * stage_words)
            fetch_weights(mine, column, (width, length), there, last, int32(left - s), to, buffers)
        for i in range(num_sums):
            sums[i] = float32(0)
        all_tiles, first_tile = int32((num_rows + (ROWS - 1)) >> 4), int32(cuda.blockIdx.x * tiles)
        count, pitch = min(int32(tiles), int32(all_tiles - first_tile)), int32(all_tiles * TILE_WORDS)
        source = int32(((head << split_bits) + split) * share_chunks * pitch + first_tile * TILE_WORDS)
        sizes = num_rows, int64(num_heads) * width, width
        base = (int64(split) * num_rows * num_heads + head) * width
        after_previous()
        for s in range(ahead):
            fetch_rows(
                inputs, int32(source + s * pitch), count, int32(left - s), int32(s * stage_words), buffers
            )
        k, source, place = int32(k + ahead * CHUNK), int32(source + ahead * pitch), int32(ahead * stage_words)
        until, more = int32(left - share_chunks), False
        while left > 0:
            wait()
            cuda.syncthreads()  # this stage is there, and the stage before has been used
            fetch_weights(mine, column, (width, length), k, last, int32(left - ahead), place, buffers)
            fetch_rows(inputs, source, count, int32(left - ahead), place, buffers)
            k, source, left = int32(k + CHUNK), int32(source + pitch), int32(left - 1)
            place = int32(place + stage_words) if place < int32(ahead * stage_words) else int32(0)
            multiply(place, sums, buffers, exchange)
            if left == until:
                put(out, base, sizes, int32(first_tile * ROWS), first_column, more, sums)
                until, more = int32(until - share_chunks), True

    return linear_wide_kernel


@functools.cache
def shared_limit():
    """Bytes of shared memory that a block of the current device may have."""
    if SIMULATED or not cuda.is_available():
        return SHARED_LIMIT
    return cuda.get_current_device().MAX_SHARED_MEMORY_PER_BLOCK_OPTIN


@functools.lru_cache(maxsize=1024)
def wide_tiling_of(num_rows, heads, width, length, split_bits, may_part=True):
    """(ns, WideTiling) of the least time, reckoned from memory, the L2 cache and the busiest multiprocessor."""
    best, padded = None, -(-num_rows // ROWS)
    for tiles in ROW_TILES:
        if tiles > min(size for size in ROW_TILES if size >= min(padded, ROW_TILES[-1])):
            continue
        for warps in range(1, MOST_WARPS[tiles] + 1):
            block_bytes = 4 * shared_words(tiles, warps)
            if block_bytes > shared_limit():
                break
            for apart in (False, True) if split_bits and may_part else (False,):
                splits = 1 << split_bits if apart else 1
                grid = -(-padded // tiles), -(-width // (WIDTH * warps)), heads * splits
                blocks = grid[0] * grid[1] * grid[2]
                chunks = -(-length // (CHUNK * splits))
                read = chunks * CHUNK * 2 * (WIDTH * warps + ROWS * min(tiles, padded))
                resident = max(1, min(SHARED_LIMIT // (block_bytes + 1024), MOST_WARPS[tiles] // warps))
                turns, each = (-(-blocks // (MULTIPROCESSORS * at_once)) for at_once in (resident, 1))
                busy = warps * tiles * 8 * MMA_NS
                waits = LATENCY_NS / (STAGES[tiles] - 1)
                own = (
                    max(each * chunks * busy, turns * chunks * waits, each * read / OWN_RATE)
                    + turns * BLOCK_NS
                )
                memory = 2 * heads * width * length / MEMORY_RATE
                time = max(memory, blocks * read / ALL_RATE, own) + own / 8 + ROUND_NS
                if apart:
                    time += ADD_NS + splits * num_rows * heads * width * 8 / ADD_RATE
                if best is None or time < best[0]:
                    best = time, WideTiling(tiles, warps, apart, grid)
    return best


def launch_wide(inputs, weight, out, sizes, share, split_bits, tiling, stream):
    """Launch the kernel; `out` is that of shares if the tiling keeps them apart. sizes as for `launch_mma`."""
    kernel, bits = make_linear_wide(tiling.tiles), split_bits if tiling.apart else 0
    numbers = (np.int32(size) for size in (*sizes, share, split_bits, bits))
    shared_bytes = 4 * shared_words(tiling.tiles, tiling.warps)
    if shared_bytes > PLAIN_SHARED:
        most = 4 * shared_words(tiling.tiles, MOST_WARPS[tiling.tiles])
        allow_shared(SPECS[ROW_TILES.index(tiling.tiles)], min(most, shared_limit()))
    kernel[tiling.grid, LANES * tiling.warps, stream, shared_bytes](inputs, weight, out, *numbers)


_FLAT, _BITS = types.Array(types.float32, 1, "C"), types.Array(types.uint16, 1, "C")
SPECS = [
    KernelSpec(
        f"linear_wide_{ROWS * tiles}",
        make_linear_wide(tiles),
        (_FLAT, _BITS, _FLAT) + (types.int32,) * 7,
        MOST_WARPS[tiles] * LANES,
    )
    for tiles in ROW_TILES
]
