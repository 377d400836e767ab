"""Memory and bf16 primitives of the attention kernels, each once for the GPU and once for the simulator.

A `word` is four bytes of a cache row in an f32 register: one f32, or two bf16 of which the earlier is the low half.
"""

import numpy as np
from numba import cuda, uint32

from kernels_numba.primitives import SIMULATED, bits_from_float, float_from_bits
from kernels_numba.primitives_dot import round_pair

__all__ = [
    "ALIGN",
    "copy16",
    "halves_of",
    "load_row2",
    "load_row4",
    "store4",
    "thread_here",
    "wait_copies",
    "word_of",
]

ALIGN = None if SIMULATED else 16  # of shared arrays that wide accesses go to

if SIMULATED:

    def copy16(target, at, source, row, width, column):
        """Start a copy of 16 bytes to the shared target[at] from [row, column] of a flat global array of `width`.

        Both are 16-byte aligned.
        """
        index, count = int(row) * width + column, 16 // source.dtype.itemsize
        target[at : at + 4] = source[index : index + count].view(np.float32)

    @cuda.jit(device=True)
    def thread_here():
        """threadIdx.x, read anew: what is made of it is made here, and not kept in registers from before a loop."""
        return np.uint32(cuda.threadIdx.x)

    def wait_copies():
        """Wait for all copies that this thread started; a barrier then shows them to the block."""

    def load_row4(array, row, width, column):
        """Four f32 at [row, column] of a flat global f32 array of rows of `width`, 16-byte aligned."""
        return tuple(array[int(row) * width + column + i] for i in range(4))

    def load_row2(array, row, width, column):
        """Four bf16 at [row, column] of a flat global u16 array of rows of `width`, 8-byte aligned, as two words."""
        index = int(row) * width + column
        return tuple(array[index : index + 4].view(np.float32))

    def store4(array, index, a, b, c, d):
        """array[index : index + 4] = a, b, c, d in one access of 16 bytes, aligned so."""
        array[index : index + 4] = a, b, c, d

else:
    from kernels_numba.intrinsics_words import (
        copy16,
        load_row2,
        load_row4,
        store4,
        thread_here,
        wait_copies,
    )


@cuda.jit(device=True, inline="always")
def halves_of(word):
    """The two bf16 of a word as f32, the earlier first."""
    bits = uint32(bits_from_float(word))
    return float_from_bits(uint32(bits << uint32(16))), float_from_bits(uint32(bits & uint32(0xFFFF0000)))


@cuda.jit(device=True, inline="always")
def word_of(a, b):
    """The word of two f32, each rounded to bf16, nearest even."""
    a, b = round_pair(a, b)
    low = uint32(uint32(bits_from_float(a)) >> uint32(16))
    return float_from_bits(uint32(low | uint32(bits_from_float(b))))
