"""How `linear` cuts K of bf16 weights, and tiles of 32 columns of weight by many rows of input, with mma.m16n8k16.

    sums[row, column] = sum over k of inputs[row, k] * weight[column * length + k]

K is cut into 1 << split_bits shares, of the weight alone, and a share into chunks of 32 elements; a sum takes the
chunks of its share in order, two mma each, and shares are added in order. Rows of mma never see each other: so a row
keeps its bits in a tile of any size and at any place. Behind the end of K, a multiple of 8, both sides are zeros.

A step of mma takes 16 elements in order, the bits of which are wgmma's on the GPUs that have both. A column's chunk
is four pieces of 16 bytes, which the lanes l // 4 = column copy, l % 4 each, to l ^ (l // 8): there neither the copies
nor ldmatrix, which gives a lane a word of each piece of its column, meet in a bank of shared memory. Of rows l // 4 and
that + 8 `linear_ends` puts a lane's words, rounded to bf16, where it finds a step's four side by side:
inputs[head][chunk][tile of 16 rows][step][lane][4 words].
"""

import numpy as np
from numba import cuda, int32

from kernels_numba.primitives import SIMULATED, device_function

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

    @cuda.jit(device=True)
    def stay_together():
        """A warp's lanes wait for each other, and see what the others have copied and waited for."""
        cuda.syncthreads()

    @cuda.jit(device=True)
    def pieces_at(buffers, index):
        """The lane's u32 of each of the four pieces of its column; index = start + its `piece_to_give`."""
        lane = int(cuda.threadIdx.x) % LANES
        words = buffers[index - piece_to_give(lane) :][: 4 * LANES].view(np.uint32).reshape(8, 4, 4)
        return tuple(words[lane // 4, piece ^ lane // 8, lane % 4] for piece in range(4))

    def copy_weights(target, at, source, index, count):
        """As `primitives_mma.copy_or_zero`, from u16 to f32 words: 16 bytes or, with count 0, zeros."""
        found = source[index : index + 8] if count else np.zeros(8, np.uint16)
        target[at : at + 4] = found.view(target.dtype)

    def make_multiply_wide(tiles, across):
        """multiply(buffers, rows_at, columns_at, sums, exchange): a chunk of tiles of 16 rows times some of 8 columns.

        Of rows' tile t the lane's words are the 16 bytes at the shared buffers[rows_at + 256 t] for the first step, 128
        further for the second; of columns' tile j those of `pieces_at` columns_at + 128 j, two a step. Their product is
        added to sums[(t * across + j) * 4 : + 4]. `exchange` is a shared u32 array of EXCHANGE elements.
        """

        @cuda.jit(device=True)
        def multiply(buffers, rows_at, columns_at, sums, exchange):
            found = [np.array(pieces_at(buffers, columns_at + 128 * j)) for j in range(across)]
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
    from kernels_numba.intrinsics_mma import load_matrices as pieces_at
    from kernels_numba.intrinsics_stages import commit_copies, wait_copies_but

    @device_function
    @cuda.jit(device=True)
    def stay_together():
        cuda.syncwarp()


__all__ = [
    "commit_copies",
    "copy_shared",
    "copy_weights",
    "make_multiply_wide",
    "own_piece",
    "piece_to_give",
    "pieces_at",
    "stay_together",
    "wait_copies_but",
]


@device_function
def own_piece(thread):
    """Where a lane copies its piece of its column to, in words from the first of the eight columns' 32 pieces."""
    return int32(((thread & 31) ^ ((thread & 24) >> 3)) << 2)


@device_function
def piece_to_give(thread):
    """The piece whose place a lane gives to `pieces_at`, as ldmatrix asks: that l // 8 of column l % 8."""
    return int32((((thread & 7) << 2) + (((thread & 24) >> 3) ^ ((thread & 6) >> 1))) << 2)


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
