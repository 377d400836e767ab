"""The tensor-core part of `linear` for few rows: bf16 weights whose K is a multiple of 8.

    out[i, h, n] = sum over k of bf16(x[i, h, k]) * weight[h, n, k]

A warp makes a tile of 16 columns and 8 rows over one share of K, and loads both sides by itself; the shares of a tile
are warps of one block. How K is split depends on the weight alone. How many column tiles a block makes, or whether
`linear_wgmma` or `linear_wide` makes the product, changes no bit and is chosen for speed.
"""

import functools
from typing import NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, types, uint32

from kernels_numba.launching import allow_shared
from kernels_numba.primitives import SIMULATED, after_previous, device_function
from kernels_numba.primitives_columns import (
    CHUNK,
    MOST_SPLITS,
    MULTIPLE,
    commit_copies,
    copy_shared,
    own_piece,
    piece_to_give,
    pieces_at,
    stay_together,
    wait_copies_but,
)
from kernels_numba.primitives_mma import EXCHANGE, LANES, get_floats, multiply_chunk, pack_pair
from kernels_numba.primitives_ring import NONE, ROW_WORDS, WEIGHT_WORDS, fetch_columns
from kernels_numba.registry import KernelSpec

ROWS, COLUMNS = 8, 16  # of a warp's tile; mma would take 16 rows
SUMS = 8  # of a lane, half of them of rows that are not there
FEWEST_WARPS, MOST_WARPS = (1, 2) if SIMULATED else (4, 8)  # of a block
# Most rows of a launch, and chunks that a warp has under way or in use, 1 KiB of weights and 128 bytes a row each:
# so that a block of MOST_WARPS finds the shared memory that every GPU has.
DEPTHS = {1: 10, 8: 6}
PLAIN_SHARED = (
    1 << 30 if SIMULATED else 40 << 10
)  # bytes of dynamic shared memory that a launch may have unasked
# What the choice of tiles reckons with; an H200.
MULTIPROCESSORS = 132
MEMORY_RATE = 4190.0  # bytes a ns that are copied through memory,
ALL_RATE = 5500.0  # that all multiprocessors together get from the L2 cache,
OWN_RATE = 85.0  # and one
BLOCK_NS = 1800.0  # what a block takes besides


class Tiling(NamedTuple):
    """How a launch is cut: column tiles of a block, and the grid (tiles of rows, blocks of columns, heads)."""

    groups: int
    grid: tuple


@device_function
def _fetch_weights(weight, column, sizes, k, last, place, buffers):
    """The lane's two columns, to where `pieces_at` finds them."""
    own = int64(int32(place + own_piece(int32(cuda.threadIdx.x))))
    fetch_columns(weight, column, sizes, k, last, own, buffers)


@device_function
def _fetch_row(x, start, k, last, there, place, pitch, buffers):
    """Start to copy two pieces of four elements, at k and 16 further, of a row that is `there`; ends a group of copies.

    Eight elements of all rows lie side by side, `pitch` behind the eight before; lanes copy to neighbouring places.
    """
    if there:
        lane, at = int32(int32(cuda.threadIdx.x) & 31), int64(int32(start + k))
        to = int64(int32(place + (lane >> 4) * pitch + (lane & 15) * 4))
        for piece in range(2):
            size = uint32(16) if int32(k + 16 * piece) < last else uint32(0)
            copy_shared(buffers, to + int64(int32(2 * piece * pitch)), x, at + 16 * piece, size)
    commit_copies()


@functools.cache
def make_linear_mma(depth):
    """The kernel for `depth` chunks under way or in use."""
    wait, wait_all, ahead = wait_copies_but(depth - 2), wait_copies_but(0), depth - 1
    options = {} if SIMULATED else {"launch_bounds": (LANES * MOST_WARPS, 1)}

    @cuda.jit(**options)
    def linear_mma_kernel(x, weight, out, num_rows, num_heads, width, length, share, split_bits):
        """Flat x [num_rows, num_heads, length], weight [num_heads, width, length], out [num_rows, num_heads, width].

        Grid (tiles of rows, blocks of columns, heads): tiles of one weight run side by side and share it in L2. The
        first weights are on their way before the launch ahead has ended. Both sides go to shared memory, for the very
        warp that copies them: warps do not wait for each other until their sums meet.
        """
        words = cuda.shared.array(EXCHANGE, uint32)
        buffers = cuda.shared.array(0, float32)
        held, left_words = cuda.local.array(8, uint32), cuda.local.array(8, uint32)
        sums = cuda.local.array(SUMS, float32)
        thread, head = int32(cuda.threadIdx.x), int32(cuda.blockIdx.z)
        lane, warp = int32(thread & 31), int32(thread >> 5)
        splits, groups = int32(1 << split_bits), int32(cuda.blockDim.x >> 5 >> split_bits)
        first_warp, given = int32(warp & -splits), piece_to_give(thread)
        first_column = int32((cuda.blockIdx.y * groups + (warp >> split_bits)) * COLUMNS)
        split, pitch = int32(warp - first_warp), int32(min(int32(num_rows), int32(ROWS)) * 8)
        stage_words = int32(WEIGHT_WORDS + 4 * pitch)
        first_place = int32(warp * depth * stage_words)
        k, last = int32(split * share + (lane & 3) * MULTIPLE), min(int32((split + 1) * share), int32(length))
        mine, column = weight[int64(head) * width * length :], int32(first_column + (lane >> 2))
        for d in range(ahead):
            place = int32(first_place + d * stage_words)
            _fetch_weights(mine, column, (width, length), int32(k + d * CHUNK), last, place, buffers)
        first_row = int32(cuda.blockIdx.x * ROWS)
        row = int32(first_row + (lane >> 2))
        there, source = row < num_rows, int32(first_row + ((lane & 15) >> 1))  # rows to use, and to copy
        copies, start = source < num_rows, int32(int32(source * num_heads + head) * length)
        shift = int32((lane >> 4) * 8 + (lane & 1) * 4 - (lane & 3) * MULTIPLE)
        for i in range(SUMS):
            sums[i] = float32(0)
        for i in range(8):
            left_words[i] = NONE
        after_previous()
        for d in range(ahead):
            place = int32(first_place + d * stage_words + WEIGHT_WORDS)
            _fetch_row(x, start, int32(k + shift + d * CHUNK), last, copies, place, pitch, buffers)
        end = int32(first_place + ahead * stage_words)
        k, place, left = int32(k + ahead * CHUNK), end, int32(share >> 5)
        while left > 0:
            wait()
            stay_together()  # this stage is there, and the stage before has been used
            _fetch_weights(mine, column, (width, length), k, last, place, buffers)
            _fetch_row(x, start, int32(k + shift), last, copies, int32(place + WEIGHT_WORDS), pitch, buffers)
            place = int32(place + stage_words) if place < end else first_place
            own = int64(int32(place + given))
            held[0], held[1], held[2], held[3] = pieces_at(buffers, own)
            held[4], held[5], held[6], held[7] = pieces_at(buffers, own + 4 * LANES)
            if there:
                own = int64(int32(place + WEIGHT_WORDS + lane * 2))
                for piece in range(4):
                    a, b = get_floats(buffers, own + int64(int32(piece * pitch)))
                    left_words[2 * piece] = pack_pair(a, b)
            multiply_chunk(left_words, 0, held, 0, sums, 0, words)
            k, left = int32(k + CHUNK), int32(left - 1)
        wait_all()
        cuda.syncthreads()  # nothing goes to the buffers or is read from them any more
        for i in range(4):
            buffers[(warp * 4 + i) * LANES + lane] = sums[(i & 1) + (i >> 1) * 4]
        cuda.syncthreads()  # all shares' sums are there
        for i in range(split, 4, splits):
            column = int32(first_column + (lane & 3) * 2 + (i & 1) + (i >> 1) * 8)
            if row < num_rows and column < width:
                total = buffers[(first_warp * 4 + i) * LANES + lane]
                for other in range(1, MOST_SPLITS):
                    if other < splits:
                        total += buffers[((first_warp + other) * 4 + i) * LANES + lane]
                out[int64(int32(row * num_heads + head)) * width + column] = total

    return linear_mma_kernel


def depth_of(num_rows):
    """Chunks of a warp for so many rows."""
    return next(depth for rows, depth in DEPTHS.items() if rows >= min(num_rows, ROWS))


def shared_bytes_of(num_rows, warps):
    """Bytes of dynamic shared memory that a block of so many warps wants."""
    return 4 * warps * depth_of(num_rows) * (WEIGHT_WORDS + ROW_WORDS * min(num_rows, ROWS))


@functools.lru_cache(maxsize=1024)
def tiling_of(num_rows, heads, width, length, split_bits):
    """(ns, Tiling) of the least time, reckoned from what all blocks read, and from what the busiest unit does."""
    best = None
    for groups in range(-(-FEWEST_WARPS >> split_bits), (MOST_WARPS >> split_bits) + 1):
        grid = (-(-num_rows // ROWS), -(-width // (COLUMNS * groups)), heads)
        blocks, used = grid[0] * grid[1] * grid[2], min(num_rows, ROWS)
        read = length * groups * (2 * COLUMNS + 4 * used)
        each = -(-blocks // MULTIPROCESSORS)
        resident = max(1, 220_000 // (shared_bytes_of(num_rows, groups << split_bits) + 1024))
        turns = -(-blocks // (MULTIPROCESSORS * resident))
        waits = 1000.0 * length / (CHUNK * depth_of(num_rows) << split_bits)
        own = max(each * read / OWN_RATE, turns * waits) + turns * BLOCK_NS
        all_of_them = max(2 * heads * width * length / MEMORY_RATE, blocks * read / ALL_RATE)
        time = max(all_of_them, own) + own / 8
        if best is None or time < best[0]:
            best = time, Tiling(groups, grid)
    return best


def launch_mma(x, weight, out, sizes, share, split_bits, tiling, stream):
    """Launch the kernel; flat arrays, sizes (num_rows, heads, width, length)."""
    depth, warps = depth_of(sizes[0]), tiling.groups << split_bits
    shared_bytes = shared_bytes_of(sizes[0], warps)
    if shared_bytes > PLAIN_SHARED:
        spec = next(spec for spec in SPECS if spec.kernel is make_linear_mma(depth))
        allow_shared(spec, shared_bytes_of(ROWS if depth == DEPTHS[ROWS] else 1, MOST_WARPS))
    numbers = (np.int32(size) for size in (*sizes, share, split_bits))
    make_linear_mma(depth)[tiling.grid, LANES * warps, stream, shared_bytes](x, weight, out, *numbers)


_FLAT, _BITS = types.Array(types.float32, 1, "C"), types.Array(types.uint16, 1, "C")
SPECS = [
    KernelSpec(
        f"linear_mma_{rows}",
        make_linear_mma(depth),
        (_FLAT, _BITS, _FLAT) + (types.int32,) * 6,
        MOST_WARPS * LANES,
    )
    for rows, depth in DEPTHS.items()
]
