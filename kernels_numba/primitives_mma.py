"""Tensor-core tiles, each primitive once for the GPU and once for the simulator: warps of 32 lanes in both.

A fragment is what a lane holds of a tile, as u32 words of two bf16 or as f32 sums, in the layout of mma.m16n8k16: lane
l of sums has rows l // 4 and l // 4 + 8, columns l % 4 * 2 and the next. Shared arrays of bf16 are u16; a pitch is an
odd multiple of 8. Every thread of the block must come to each of these: the simulator meets at barriers. `words` is a
shared u32 array of EXCHANGE elements for it.
"""

import threading

import numpy as np
from numba import cuda, float32, int64, uint32

from kernels_numba.primitives import FULL, SIMULATED, device_function, float_from_bits, float_to_bf16

__all__ = [
    "ALIGN",
    "EXCHANGE",
    "LANES",
    "THREADS",
    "WARPS",
    "copy_or_zero",
    "copy_piece",
    "get_float",
    "get_floats",
    "get_words",
    "lanes_max",
    "lanes_sum",
    "load_keys",
    "load_left",
    "load_values",
    "multiply",
    "multiply_chunk",
    "pack_pair",
    "put_floats",
    "put_words",
    "split_pair",
    "thread_here",
    "wait_copies",
]

LANES = 32
ALIGN = None if SIMULATED else 16  # of shared arrays that wide accesses go to
WARPS = 2 if SIMULATED else 8
THREADS = WARPS * LANES
EXCHANGE = 64 * THREADS if SIMULATED else 1  # for blocks of up to twice as many

if SIMULATED:

    def pack_pair(low, high):
        """The u32 of two f32, each rounded to bf16, nearest even."""
        return np.uint32(float_to_bf16(np.float32(low))) | np.uint32(
            float_to_bf16(np.float32(high))
        ) << np.uint32(16)

    def copy_piece(target, at, source, index):
        """Start a copy of 16 bytes to the shared target[at] from a flat global array's [index], both aligned so."""
        count = 16 // source.dtype.itemsize
        target[at : at + count] = source[index : index + count]

    def copy_or_zero(target, at, source, index, count):
        """As copy_piece, of the first `count` bytes; zeros behind them. With count 0 nothing is read."""
        if count:
            copy_piece(target, at, source, index)
        else:
            target[at : at + 16 // source.dtype.itemsize] = 0

    def wait_copies():
        """Wait for all copies that this thread started; a barrier then shows them to the block."""

    @cuda.jit(device=True)
    def thread_here():
        """threadIdx.x, of which the compiler knows no bound: a loop from there on is not unrolled."""
        return np.int32(cuda.threadIdx.x)

    def put_words(array, index, a, b, c, d):
        """Four u32 to the 16 bytes at an array's [index], aligned so."""
        four = np.array((a, b, c, d), np.uint32).view(array.dtype)
        array[index : index + len(four)] = four

    def put_floats(array, index, a, b):
        """Two f32 to 8 aligned bytes from [index] of a u16 or an f32 array on."""
        both = np.array((a, b), np.float32).view(array.dtype)
        array[index : index + len(both)] = both

    def get_words(array, index):
        """Four u32 that are the 16 bytes at an array's [index] of four-byte elements, aligned so."""
        return tuple(array[index : index + 4].view(np.uint32))

    def get_float(array, index):
        """The f32 in a u16 array's [index : index + 2], index even."""
        return array[index : index + 2].view(np.float32)[0]

    def get_floats(array, index):
        """Two f32 at an f32 array's [index], 8-byte aligned."""
        return array[index], array[index + 1]

    def _words(array, at, pitch, rows, columns, across):
        """Matrices of 8 x 8 at the given rows and columns, a lane's word of each."""
        lane = int(cuda.threadIdx.x) % LANES
        found = []
        for row, column in zip(rows, columns, strict=True):
            if across:
                start = at + (row + lane % 4 * 2) * pitch + column + lane // 4
                low, high = array[start], array[start + pitch]
            else:
                start = at + (row + lane // 4) * pitch + column + lane % 4 * 2
                low, high = array[start], array[start + 1]
            found.append(np.uint32(low) | np.uint32(high) << np.uint32(16))
        return found

    @cuda.jit(device=True)
    def load_left(array, at, pitch, held, to):
        held[to : to + 4] = _words_here(array, at, pitch, (0, 8, 0, 8), (0, 0, 8, 8), False)

    @cuda.jit(device=True)
    def load_keys(array, at, pitch, held, to):
        held[to : to + 4] = _words_here(array, at, pitch, (0, 0, 8, 8), (0, 8, 0, 8), False)

    @cuda.jit(device=True)
    def load_values(array, at, pitch, held, to):
        held[to : to + 4] = _words_here(array, at, pitch, (0, 8, 0, 8), (0, 0, 8, 8), True)

    _words_here = cuda.jit(device=True)(_words)

    @cuda.jit(device=True)
    def _exchange(mine, words):
        """The u32 words of all lanes of the warp, [LANES, len(mine)].

        Two halves of `words` take turns: who writes a half again has met all others since they read it.
        """
        own = threading.current_thread()
        own.turn = 1 - getattr(own, "turn", 0)
        thread, count = int(cuda.threadIdx.x), len(mine)
        half = words[own.turn * EXCHANGE // 2 :]
        half[thread * count : (thread + 1) * count] = mine
        cuda.syncthreads()  # every lane's words are there
        first = thread // LANES * LANES
        return half[first * count : (first + LANES) * count].reshape(LANES, count).copy()

    @cuda.jit(device=True)
    def multiply(left, left_at, right, right_at, sums, at, words):
        mine = np.concatenate([left[left_at : left_at + 4], right[right_at : right_at + 4]])
        every = _exchange(mine, words).view(np.uint16).reshape(8, 4, 8, 2)  # lane // 4, lane % 4, word, half
        lane = int(cuda.threadIdx.x) % LANES
        row, column = lane // 4, lane % 4 * 2
        of_row = every[row].transpose(1, 0, 2)[[0, 2, 1, 3]].reshape(2, 16)  # row, row + 8
        of_columns = every[column : column + 2, :, 4:].transpose(2, 0, 1, 3).reshape(2, 2, 2, 8)
        of_columns = of_columns.transpose(0, 2, 1, 3).reshape(4, 16)  # column, the next, column + 8, the next
        a, b = ((bits.astype(np.uint32) << 16).view(np.float32) for bits in (of_row, of_columns))
        with np.errstate(invalid="ignore", over="ignore"):
            product = a.astype(np.float64) @ b.astype(np.float64).T
            sums[at : at + 8] += product.reshape(2, 2, 2).transpose(1, 0, 2).ravel()

    @cuda.jit(device=True)
    def multiply_chunk(left, left_at, right, right_at, sums, at, words):
        lane = int(cuda.threadIdx.x) % LANES
        row, column = lane // 4, lane % 4 * 2
        mine = np.concatenate([left[left_at : left_at + 8], right[right_at : right_at + 8]])
        every = _exchange(mine, words).reshape(8, 4, 16)  # lane // 4, lane % 4, word
        a = _values(every[row, :, :8]).reshape(4, 2, 2, 2, 2)  # lane % 4, step, word, row + 8, half
        b = _values(every[column : column + 2, :, 8:]).reshape(
            2, 4, 2, 2, 2, 2
        )  # column, lane % 4, + 8, step ..
        a = a.transpose(1, 3, 0, 2, 4).reshape(2, 1, 2, 16)
        b = b.transpose(3, 2, 0, 1, 4, 5).reshape(2, 2, 2, 16)
        with np.errstate(invalid="ignore", over="ignore"):
            for left, right in zip(a, b, strict=True):
                sums[at : at + 8] += (left[:, :, None] * right[:, None]).sum(axis=-1).ravel()

    def _values(bits):
        """The f64 values of the two bf16 in each u32 of the last axis."""
        halves = np.ascontiguousarray(bits).view(np.uint16).astype(np.uint32) << np.uint32(16)
        return halves.view(np.float32).astype(np.float64)

    @cuda.jit(device=True)
    def _over_lanes(values, count, words, combine):
        every = _exchange(np.float32(values[:count]).view(np.uint32), words).view(np.float32)
        while len(every) > 1:
            half = len(every) // 2
            every = combine(every[:half], every[half:])
        values[:count] = every[0]

    def lanes_max(values, count, words):
        """values[:count] = the maxima over the 32 lanes."""
        _over_lanes(values, count, words, np.maximum)

    def lanes_sum(values, count, words):
        """values[:count] = the sums over the 32 lanes, pairs at distance 16 first."""
        _over_lanes(values, count, words, np.add)

else:
    from kernels_numba.intrinsics_mma import (
        copy_or_zero,
        copy_piece,
        get_float,
        get_floats,
        get_words,
        load_matrices,
        load_matrices_across,
        mma_words,
        pack_pair,
        put_floats,
        put_words,
        thread_here,
        wait_copies,
    )

    @device_function
    def load_left(array, at, pitch, held, to):
        """held[to : to + 4] = the left fragment of the 16 rows x 16 columns at array[at]."""
        lane = uint32(cuda.threadIdx.x) % uint32(LANES)
        place = uint32(lane % uint32(16)) * uint32(pitch) + uint32(lane // uint32(16)) * uint32(8)
        a, b, c, d = load_matrices(array, at + int64(place))
        held[to], held[to + 1], held[to + 2], held[to + 3] = a, b, c, d

    @device_function
    def load_keys(array, at, pitch, held, to):
        """held[to : to + 4] = two right fragments: columns 0-7 and 8-15 are rows of the 16 x 16 at array[at]."""
        lane = uint32(cuda.threadIdx.x) % uint32(LANES)
        row = uint32(lane % uint32(8)) + uint32(lane // uint32(16)) * uint32(8)
        place = row * uint32(pitch) + uint32(lane // uint32(8) % uint32(2)) * uint32(8)
        a, b, c, d = load_matrices(array, at + int64(place))
        held[to], held[to + 1], held[to + 2], held[to + 3] = a, b, c, d

    @device_function
    def load_values(array, at, pitch, held, to):
        """held[to : to + 4] = two right fragments: columns 0-7 and 8-15 of the 16 x 16 at array[at]."""
        lane = uint32(cuda.threadIdx.x) % uint32(LANES)
        place = uint32(lane % uint32(16)) * uint32(pitch) + uint32(lane // uint32(16)) * uint32(8)
        a, b, c, d = load_matrices_across(array, at + int64(place))
        held[to], held[to + 1], held[to + 2], held[to + 3] = a, b, c, d

    @device_function
    def multiply(left, left_at, right, right_at, sums, at, words):
        """sums[at : at + 8] += the left fragment times the two right ones."""
        for n in range(2):
            i, j = at + 4 * n, right_at + 2 * n
            sums[i], sums[i + 1], sums[i + 2], sums[i + 3] = mma_words(
                left[left_at], left[left_at + 1], left[left_at + 2], left[left_at + 3],
                right[j], right[j + 1], sums[i], sums[i + 1], sums[i + 2], sums[i + 3],
            )  # fmt: skip

    @device_function
    def _multiply_half(left, j, right, k, sums, i):
        sums[i], sums[i + 1], sums[i + 2], sums[i + 3] = mma_words(
            left[j], left[j + 1], left[j + 2], left[j + 3],
            right[k], right[k + 1], sums[i], sums[i + 1], sums[i + 2], sums[i + 3],
        )  # fmt: skip

    @device_function
    def multiply_chunk(left, left_at, right, right_at, sums, at, words):
        """sums[at : at + 8] += 16 rows times 16 columns over 32 elements, two steps of mma.

        A lane has elements l % 4 * 8 and the next seven, as words 0 to 3, of rows and columns l // 4 and that + 8. Its
        left words are those of its two rows in turn, its right words those of one column, then the other. A step takes
        words 2 s and 2 s + 1 of both sides: which elements mma takes these for does not matter, as they meet.
        """
        _multiply_half(left, left_at, right, right_at, sums, at)
        _multiply_half(left, left_at, right, right_at + 4, sums, at + 4)
        _multiply_half(left, left_at + 4, right, right_at + 2, sums, at)
        _multiply_half(left, left_at + 4, right, right_at + 6, sums, at + 4)

    @device_function
    def lanes_max(values, count, words):
        for i in range(count):
            for bit in range(4, -1, -1):
                values[i] = max(values[i], cuda.shfl_xor_sync(FULL, values[i], 1 << bit))

    @device_function
    def lanes_sum(values, count, words):
        for i in range(count):
            for bit in range(4, -1, -1):
                values[i] += cuda.shfl_xor_sync(FULL, values[i], 1 << bit)


@device_function
def low_of(word):
    """The earlier bf16 of a word as f32."""
    return float_from_bits(uint32(word << uint32(16)))


@device_function
def high_of(word):
    """The later bf16 of a word as f32."""
    return float_from_bits(uint32(word & uint32(0xFFFF0000)))


@device_function
def split_pair(a, b, held, at, stride):
    """held[at + t * stride], t = 0, 1, 2: words of two bf16 each, whose sums are a and b."""
    high = pack_pair(a, b)
    a, b = float32(a - low_of(high)), float32(b - high_of(high))
    middle = pack_pair(a, b)
    a, b = float32(a - low_of(middle)), float32(b - high_of(middle))
    held[at], held[at + stride], held[at + 2 * stride] = high, middle, pack_pair(a, b)
