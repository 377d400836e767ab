"""How `linear` cuts K of bf16 weights, and tiles of 32 columns of weight by many rows of input, with mma.m16n8k16.

    sums[row, column] = sum over k of inputs[row, k] * weight[column * length + k]

K is cut into 1 << split_bits shares, of the weight alone, and a share into chunks of 32 elements; a sum takes the
chunks of its share in order, two mma each, and shares are added in order. Rows of mma never see each other: so a row
keeps its bits in a tile of any size and at any place. Behind the end of K, a multiple of 8, both sides are zeros.

A lane l has elements l % 4 * 8 and the next seven of a chunk, as in `primitives_mma.multiply_chunk`. Of a column they
are 16 bytes of weight. Of rows l // 4 and that + 8 `linear_ends` puts them, rounded to bf16, where a lane finds a
step's four words side by side: inputs[head][chunk][tile of 16 rows][step][lane][4 words].
"""

import numpy as np
from numba import cuda

from kernels_numba.primitives import SIMULATED

CHUNK = 32  # elements of K
MULTIPLE = 8  # of K: 16 bytes of weight
ROWS = 16  # of a tile of inputs,
TILE_WORDS = ROWS * CHUNK // 2  # and u32 of a chunk of it
TURN = 4  # chunks that a loop takes at a time
SHARE_UNIT = TURN * CHUNK  # a share is a multiple of so many elements of K
MOST_SPLITS = 2 if SIMULATED else 8
MANY, ENOUGH = (
    400,
    1600,
)  # tiles of 16 columns that a short K need not be split for, and warps that fill the GPU
LONG_SHARE = 2048  # elements of K that are worth a share even then

if SIMULATED:
    from kernels_numba.primitives_mma import LANES, _exchange, _values
    from kernels_numba.primitives_mma import copy_or_zero as copy_shared

    def commit_copies():
        """Let the copies that this thread started since the last time be a group."""

    def wait_copies_but(count):
        """What waits for all of this thread's groups of copies but the last `count`; then a barrier shows them."""
        return lambda: None

    def words_at(array, index):
        """Four u32 that are the 16 bytes at a flat array's [index], aligned so."""
        return tuple(array[index : index + 4].view(np.uint32))

    def copy_weights(target, at, source, index, count):
        """As `primitives_mma.copy_or_zero`, from u16 to f32 words: 16 bytes or, with count 0, zeros."""
        found = source[index : index + 8] if count else np.zeros(8, np.uint16)
        target[at : at + 4] = found.view(target.dtype)

    def make_multiply_wide(tiles, across):
        """multiply(buffers, rows_at, columns_at, sums, exchange): a chunk of tiles of 16 rows times some of 8 columns.

        Of rows' tile t the lane's words are the 16 bytes at the shared buffers[rows_at + 256 t] for the first step, 128
        further for the second; of columns' tile j those at columns_at + 128 j, two words a step. Their product is added
        to sums[(t * across + j) * 4 : + 4]. `exchange` is a shared u32 array of EXCHANGE elements.
        """

        @cuda.jit(device=True)
        def multiply(buffers, rows_at, columns_at, sums, exchange):
            found = [buffers[columns_at + 128 * j :][:4].view(np.uint32) for j in range(across)]
            for t in range(tiles):
                for step in range(2):
                    left = buffers[rows_at + 256 * t + 128 * step :][:4].view(np.uint32)
                    right = [words[2 * step : 2 * step + 2] for words in found]
                    _multiply_step(left, right, sums[t * across * 4 : (t + 1) * across * 4], exchange)

        return multiply

    @cuda.jit(device=True)
    def _multiply_step(left, right, sums, exchange):
        every = _values(_exchange(np.concatenate([left, *right]), exchange).reshape(8, 4, -1))
        lane = int(cuda.threadIdx.x) % LANES
        row, column = lane // 4, lane % 4 * 2
        # lane // 4, lane % 4, word, half
        every = every.reshape(8, 4, -1, 2)
        rows = every[row, :, :4].reshape(4, 2, 2, 2).transpose(2, 1, 0, 3).reshape(2, 16)  # row and row + 8
        with np.errstate(invalid="ignore", over="ignore"):
            for j in range(len(right)):
                words = every[column : column + 2, :, 4 + 2 * j : 6 + 2 * j]
                columns = words.transpose(0, 2, 1, 3).reshape(2, 16)
                sums[4 * j : 4 * j + 4] += (rows @ columns.T).ravel()

else:
    from kernels_numba.intrinsics_columns import copy_shared, copy_weights, make_multiply_wide
    from kernels_numba.intrinsics_mma import get_words as words_at
    from kernels_numba.intrinsics_stages import commit_copies, wait_copies_but

__all__ = [
    "commit_copies",
    "copy_shared",
    "copy_weights",
    "make_multiply_wide",
    "wait_copies_but",
    "words_at",
]


def split_bits_of(heads, width, length):
    """K of a weight [heads, width, length] is cut into 1 << this many shares."""
    column_tiles = heads * -(-width // 16)
    bits, shortest = 0, SHARE_UNIT if column_tiles < MANY else LONG_SHARE
    while 2 << bits <= MOST_SPLITS and column_tiles << bits < ENOUGH and length >= shortest << bits + 1:
        bits += 1
    return bits


def share_of(length, split_bits):
    """Elements of a share, a multiple of SHARE_UNIT."""
    return -(-length // (SHARE_UNIT << split_bits)) * SHARE_UNIT
