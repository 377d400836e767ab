"""Quantised weights in registers: each primitive once for the GPU and once for the simulator, and the two formats.

    int4    (nibble - 8) of a word's eight, as bf16 pairs: (nibble | 0x4300) is 128 + nibble, less 136
    fp8     a byte of e4m3 in the places of bf16's exponent and mantissa is its value x 2^-120, times 2^120

Both are exact. A pair's two elements are those that masks cut out of a word at once; the rows of x are packed alike.
Warps have 32 lanes in both worlds, and every thread of the block must come to each function that takes `words`.
"""

import functools

import numpy as np
from numba import cuda, int32, uint32

from kernels_numba.primitives import SIMULATED, device_function
from kernels_numba.primitives_mma import multiply_chunk

__all__ = [
    "address_of",
    "close_group",
    "expand_bytes",
    "expand_nibbles",
    "fma_pair",
    "half_at",
    "leave4",
    "load_floats_if",
    "make_load_matrices",
    "make_wait_groups",
    "multiply32",
    "nan_bytes",
    "place_of",
    "spoiled",
    "start4",
    "start16",
    "sync_warp",
    "take1",
    "take2",
    "take4",
]


@device_function
def place_of(row, piece, half, pieces):
    """The byte where a 16-byte piece of a row of 8 lies: rows that meet in a bank are turned against each other."""
    turn = int32((row >> 1) & 3) if pieces == 4 else int32(row)
    return int32(((half * 8 + row) * pieces + (int32(piece) ^ turn)) * 16)


if SIMULATED:

    def load_floats_if(array, index, flag):
        """Four f32 at a flat array's [index], 16-byte aligned, or zeros."""
        return tuple(array[index : index + 4] if flag else np.zeros(4, np.float32))

    def address_of(array, index):
        """The address of a flat global array's [index], u64; here within the array."""
        return np.uint64(index * array.dtype.itemsize)

    def start16(target, at, source, base, more, flag):
        """Start a copy of 16 bytes to byte `at` of target from `more` bytes behind `base` in source, or of zeros."""
        _start(target, at, source, base, more, flag, 4)

    def start4(target, at, source, base, more, flag):
        """As start16, 4 bytes."""
        _start(target, at, source, base, more, flag, 1)

    def _start(target, at, source, base, more, flag, words):
        at = int(at) // 4
        target[at : at + words] = 0
        if flag:
            item = source.dtype.itemsize
            index = (int(base) + int(more)) // item
            target[at : at + words] = source[index : index + 4 * words // item].view(np.uint32)

    def half_at(source, base, more):
        """The u16 `more` bytes behind `base` in source, as u32."""
        return np.uint32(source[(int(base) + int(more)) // 2])

    def close_group():
        """The copies that this thread started since the last call are a group."""

    def make_wait_groups(pending):
        """A function that waits until at most `pending` of this thread's groups are under way."""
        return lambda: None

    @cuda.jit(device=True)
    def sync_warp():
        """What lanes of a warp wrote before, all of them may read."""
        cuda.syncthreads()

    def make_load_matrices(pieces):
        """A function of (array, base, j): the lane's words of the 16-byte pieces 2 j, then 2 j + 1, of both halves.

        A half is 8 rows of as many pieces, stored where `place_of` says from `base` on; the lane's are word lane % 4 of
        row lane // 4. It returns piece 2 j of either half, then piece 2 j + 1.
        """

        @cuda.jit(device=True)
        def load(array, base, j):
            lane = int(cuda.threadIdx.x) % 32
            return tuple(
                array[(int(base) + place_of(lane // 4, piece, half, pieces)) // 4 + lane % 4]
                for piece in (2 * j, 2 * j + 1)
                for half in (0, 1)
            )

        return load

    def take4(array, at):
        """Four words at byte `at` of a shared u32 array."""
        return tuple(array[int(at) // 4 : int(at) // 4 + 4])

    def take2(array, at):
        """Two words at byte `at` of a shared u32 array."""
        return tuple(array[int(at) // 4 : int(at) // 4 + 2])

    def take1(array, at):
        """The word at byte `at` of a shared u32 array."""
        return array[int(at) // 4]

    def leave4(array, at, a, b, c, d):
        """Four words to byte `at` of a shared u32 array."""
        array[int(at) // 4 : int(at) // 4 + 4] = a, b, c, d

    def fma_pair(a, b, c):
        """a * b + c of both bf16 in u32 words; exact here, as it is wherever this package calls it."""
        found = 0
        for shift in (0, 16):
            a_part, b_part, c_part = (
                float((np.uint32(int(word) >> shift & 0xFFFF) << np.uint32(16)).view(np.float32))
                for word in (a, b, c)
            )
            found |= int(np.float32(a_part * b_part + c_part).view(np.uint32)) >> 16 << shift
        return np.uint32(found)

    @cuda.jit(device=True)
    def multiply32(left, right, group, words):
        """group f32[4] += 16 weight rows times 8 rows of x over 32 elements, two steps of mma.

        A lane has weight rows l // 4 and l // 4 + 8 as words in turn, left u32[8], and row l // 4 of x, right u32[4];
        of the sums weight rows l // 4 (the first two) and that + 8, and rows l % 4 * 2 and the next of x.
        """
        both, sums = np.zeros(8, np.uint32), np.zeros(8, np.float32)
        both[:4], sums[:4] = right[:4], group[:4]
        multiply_chunk(left, 0, both, 0, sums, 0, words)
        group[:4] = sums[:4]

else:
    from kernels_numba.intrinsics_dot import load_floats_if
    from kernels_numba.intrinsics_mma import mma_words
    from kernels_numba.intrinsics_quantised import (
        address_of,
        close_group,
        fma_pair,
        half_at,
        leave4,
        load_matrices,
        make_wait_groups,
        start4,
        start16,
        take1,
        take2,
        take4,
    )

    @device_function
    def sync_warp():
        cuda.syncwarp()

    @functools.cache
    def make_load_matrices(pieces):
        @device_function
        def load(array, base, j):
            lane = int32(cuda.threadIdx.x) & 31
            own = uint32(place_of(int32(lane & 7), int32(lane >> 4), int32((lane >> 3) & 1), pieces))
            return load_matrices(array, uint32(base + (own ^ uint32(32 * j))))  # j is above the bits of piece

        return load

    @device_function
    def multiply32(left, right, group, words):
        for step in range(2):
            i, j = 4 * step, 2 * step
            group[0], group[1], group[2], group[3] = mma_words(
                left[i], left[i + 1], left[i + 2], left[i + 3],
                right[j], right[j + 1], group[0], group[1], group[2], group[3],
            )  # fmt: skip


@device_function
def expand_nibbles(word, left, side):
    """Eight nibbles less 8 to words `side`, `side` + 2 ..: elements (0, 4), (1, 5), (2, 6), (3, 7)."""
    mask = uint32(
        uint32(0x000F000E) + uint32(cuda.gridDim.z)
    )  # 0x000F000F, which the assembler must not know: it
    magic = uint32(0x43004300)  # would move it to a register for each use
    one, less = uint32(0x3F803F80), uint32(0xC308C308)  # 1 and -136
    left[side] = fma_pair(uint32((word & mask) | magic), one, less)
    left[side + 2] = fma_pair(uint32(((word >> uint32(4)) & mask) | magic), one, less)
    left[side + 4] = fma_pair(uint32(((word >> uint32(8)) & mask) | magic), one, less)
    left[side + 6] = fma_pair(uint32(((word >> uint32(12)) & mask) | magic), one, less)


@device_function
def expand_bytes(word, left, at):
    """Four e4m3 to words `at` and `at` + 2: elements (0, 2) and (1, 3)."""
    sign, rest = uint32(0x80008000), uint32(0x07F007F0)
    large, none = uint32(0x7B807B80), uint32(0x80008000)  # 2^120 and -0
    early = uint32(word << uint32(8))
    left[at] = fma_pair(uint32((early & sign) | ((word << uint32(4)) & rest)), large, none)
    left[at + 2] = fma_pair(uint32((word & sign) | ((word >> uint32(4)) & rest)), large, none)


@device_function
def nan_bytes(word):
    """Bits 0x80808080 of a word: which of four e4m3 are NaN; other bits mean nothing."""
    return uint32((word & uint32(0x7F7F7F7F)) + uint32(0x01010101))


@device_function
def spoiled(found):
    """What turns a pair of bf16 into NaN when any of `nan_bytes` was found, else 0."""
    return uint32(0x7FC07FC0) if found & uint32(0x80808080) else uint32(0)
