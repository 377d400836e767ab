"""The products of bf16 weights on tensor cores: a warp makes 16 columns of a tile of rows, with mma.m16n8k16.

    sums[row, column] = sum over k of bf16(x[row_at[row] + k]) * weight[column * length + k]

K is cut into 1 << split_bits shares, a warp each, and a share into chunks of 32 elements; a sum takes the chunks of
its share in order, two mma each, and `total_of` adds the shares in order. Rows of mma never see each other: so a row
keeps its bits in a tile of any size and at any place, as long as the shares are the same.

Weights go from memory to registers, DEPTH chunks ahead of their use. So do the rows where each warp of a block has a
share of its own (`make_plain_tile`); where all have the same, they are rounded once for the block and lie in shared
memory (`primitives_tensor_stage`). K is a multiple of 8; behind its end, and a share's, both sides are zeros.
"""

import functools
from types import SimpleNamespace

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from kernels_numba.primitives import SIMULATED, bits_from_float, device_function, float_from_bits
from kernels_numba.primitives_mma import multiply_chunk, pack_pair

CHUNK = 32  # elements of K
MULTIPLE = 8  # of K: 16 bytes of weight
ROWS, COLUMNS = 16, 16  # of a warp's tile, at least
SUMS = 8  # of a lane in such a tile
FEWEST_WARPS, MOST_WARPS = (1, 2) if SIMULATED else (4, 16)  # of a block
MOST_SPLITS = 2 if SIMULATED else 8
MANY, ENOUGH = 400, 1024  # column tiles that need no split, and warps that fill the GPU when K is split
SHORTEST_SHARE = 64  # elements of K that are still worth a warp
TURN = 4  # chunks that a loop takes at a time
WORDS = 4096  # u32 of shared memory that the warps' sums lie in at the end, a tile of ROWS rows at a time
# Chunks under way, by rows of a plain tile: of weights, 1 KiB a warp and 8 registers a lane each, 4 or 8; and of rows,
# 8 registers for 8 rows each, 2 or 4.
PLAIN_DEPTH = {8: 8, 16: 4}
ROW_DEPTH = {8: 4, 16: 2}

if SIMULATED:

    def load_words_if(array, index, flag):
        """Four u32 that hold the eight u16 at a flat array's [index], 16-byte aligned, or zeros."""
        return tuple(array[index : index + 8].view(np.uint32) if flag else np.zeros(4, np.uint32))

    def load_floats_if(array, index, flag):
        """Four f32 at a flat array's [index], 16-byte aligned, or zeros."""
        return tuple(array[index : index + 4] if flag else np.zeros(4, np.float32))

else:
    from kernels_numba.intrinsics_dot import load_floats_if, load_words_if


def tensor_split_bits(column_tiles, length):
    """K of a weight with that many tiles of 16 columns is cut into 1 << this many shares: of the weight alone."""
    bits = 0
    while (
        column_tiles < MANY
        and column_tiles << bits < ENOUGH
        and 2 << bits <= MOST_SPLITS
        and length >= SHORTEST_SHARE << bits + 1
    ):
        bits += 1
    return bits


@device_function
def share_of(length, split_bits):
    """Elements of a share, a multiple of CHUNK."""
    return int32((((length + 31) >> 5) + (1 << split_bits) - 1 >> split_bits) << 5)


@device_function
def column_starts(first_column, width, length):
    """Where the lane's two columns of weight start; a column past the last repeats it."""
    column = int32(first_column + ((int32(cuda.threadIdx.x) & 31) >> 2))
    upper = int32(min(column, int32(width - 1)) * length)
    return upper, int32(min(int32(column + 8), int32(width - 1)) * length)


@device_function
def load_weights(weight, starts, k, last, ahead, held, slot):
    """Two chunks of the lane's columns, the first at k + ahead, to two slots of `held`."""
    for c in range(2):
        place = ahead + c * CHUNK
        for side in range(2):
            at, i = int64(int32(starts[side] + k)) + place, (slot + c) * 8 + side * 4
            held[i], held[i + 1], held[i + 2], held[i + 3] = load_words_if(
                weight, at, int32(k + place) < last
            )


@functools.cache
def make_plain_tile(rows, row_depth):
    """A tile of 8 or 16 rows that each warp loads by itself; its `accumulate` is a warp's sums over its share.

    load_first(weight, first_column, sizes, held) loads the first chunks of weight, and touches nothing else: a kernel
    may do so before `after_previous`. sizes = (width, length, split_bits), held u32 [tile.held] in registers.
    accumulate(x, row_at, count, weight, first_column, sizes, held, sums, memory) goes on from there: row_at is shared
    and says where each of `count` rows starts in x; memory the shared (buffers u32, floats f32, words).
    """
    depth = PLAIN_DEPTH[rows]
    sides, held_words, row_floats = rows // 8, depth * 8, row_depth * rows
    turns = tuple(_make_turn(rows, depth, row_depth, slot) for slot in (0, depth - TURN))
    turn, other_turn, twice = *turns, depth > TURN
    load_rows = _make_load_rows(sides)

    @device_function
    def range_of(length, split_bits):
        """(first k of the lane, end of the warp's share, elements of a share)."""
        thread, share = int32(cuda.threadIdx.x), share_of(length, split_bits)
        split = int32((thread >> 5) & ((1 << split_bits) - 1))
        return int32(split * share + (thread & 3) * MULTIPLE), min(int32((split + 1) * share), length), share

    @device_function
    def load_first(weight, first_column, sizes, held):
        starts = column_starts(first_column, sizes[0], sizes[1])
        k, last, _ = range_of(sizes[1], sizes[2])
        for d in range(0, depth, 2):
            load_weights(weight, starts, k, last, d * CHUNK, held, d)

    @device_function
    def accumulate(x, row_at, count, weight, first_column, sizes, held, sums, memory):
        floats = cuda.local.array(row_floats, float32)
        width, length, split_bits = sizes
        thread = int32(cuda.threadIdx.x)
        starts = column_starts(first_column, width, length)
        k, last, left = range_of(length, split_bits)
        for i in range(SUMS):
            sums[i] = float32(0)
        cuda.syncthreads()  # row_at is there
        row = int32((thread & 31) >> 2)
        row_starts = row_at[min(row, int32(count - 1))], row_at[min(int32(row + 8), int32(count - 1))]
        for d in range(0, row_depth, 2):
            load_rows(x, row_starts, k, last, d * CHUNK, floats, d)
        while left > 0:
            turn(x, row_starts, weight, starts, k, last, held, floats, sums, memory[2])
            k, left = int32(k + TURN * CHUNK), int32(left - TURN * CHUNK)
            if twice and left > 0:
                other_turn(x, row_starts, weight, starts, k, last, held, floats, sums, memory[2])
                k, left = int32(k + TURN * CHUNK), int32(left - TURN * CHUNK)

    return SimpleNamespace(load_first=load_first, accumulate=accumulate, held=held_words, sums=SUMS, floats=1)


def _make_load_rows(sides):
    @device_function
    def load_rows(x, row_starts, k, last, ahead, floats, slot):
        """Two chunks of the lane's one or two rows, the first at k + ahead, to two slots of `floats`."""
        for c in range(2):
            place = ahead + c * CHUNK
            for side in range(sides):
                at, there = int64(int32(row_starts[side] + k)) + place, int32(k + place) < last
                i = ((slot + c) * sides + side) * 8
                floats[i], floats[i + 1], floats[i + 2], floats[i + 3] = load_floats_if(x, at, there)
                floats[i + 4], floats[i + 5], floats[i + 6], floats[i + 7] = load_floats_if(x, at + 4, there)

    return load_rows


@device_function
def _pack_row(floats, at, left, side):
    """Eight elements of a row, rounded, to its words of a left fragment."""
    left[side] = pack_pair(floats[at], floats[at + 1])
    left[side + 2] = pack_pair(floats[at + 2], floats[at + 3])
    left[side + 4] = pack_pair(floats[at + 4], floats[at + 5])
    left[side + 6] = pack_pair(floats[at + 6], floats[at + 7])


def _make_turn(rows, depth, row_depth, slot):
    """A device function that uses TURN chunks of `held` from `slot` on and loads those `depth` later in their place."""
    sides, two, none = rows // 8, rows > 8, np.uint32(0)
    load_rows = _make_load_rows(sides)

    @device_function
    def turn(x, row_starts, weight, starts, k, last, held, floats, sums, words):
        left = cuda.local.array(8, uint32)
        for d in range(TURN):
            first = (d % row_depth) * sides * 8
            _pack_row(floats, first, left, 0)
            if two:
                _pack_row(floats, first + 8, left, 1)
            else:
                left[1], left[3], left[5], left[7] = none, none, none, none
            multiply_chunk(left, 0, held, (slot + d) * 8, sums, 0, words)
            if d % 2 == 1:
                load_weights(weight, starts, k, last, (depth + d - 1) * CHUNK, held, slot + d - 1)
                ahead = (row_depth + d - 1) * CHUNK
                load_rows(x, row_starts, k, last, ahead, floats, (d - 1) % row_depth)

    return turn


@device_function
def keep(sums, first, buffers):
    """Put the lane's SUMS sums from `first` on where the warps of its column tile find them."""
    cuda.syncthreads()  # what was in the buffers has been used
    thread = uint32(cuda.threadIdx.x)
    at = int64((thread >> uint32(5)) * uint32(SUMS * 32) + (thread & uint32(31)))
    for i in range(SUMS):
        buffers[at + 32 * i] = bits_from_float(sums[first + i])
    cuda.syncthreads()  # all shares' sums are there


@device_function
def total_of(buffers, warp, step, split_bits):
    """The lane's sum number `step` over all shares, in order; `warp` is the first of its column tile."""
    lane = uint32(cuda.threadIdx.x) & uint32(31)
    at = int64(uint32(warp) * uint32(SUMS * 32) + uint32(step) * uint32(32) + lane)
    total = float_from_bits(buffers[at])
    for other in range(1, MOST_SPLITS):
        if other < 1 << split_bits:
            total += float_from_bits(buffers[at + other * SUMS * 32])
    return total


@device_function
def row_of(step):
    """Row of the lane's sum number `step` within its tile of ROWS rows."""
    return int32(((int32(cuda.threadIdx.x) & 31) >> 2) + (step & 2) * 4)


@device_function
def column_of(step):
    """Column of the lane's sum number `step` within the warp's COLUMNS."""
    return int32((step >> 2) * 8 + (int32(cuda.threadIdx.x) & 3) * 2 + (step & 1))
