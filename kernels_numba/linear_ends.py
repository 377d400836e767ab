"""What goes before and after `linear_wide`: inputs rounded to bf16 in the order of use, and shares of K added.

inputs = bf16(x);  out = ((share 0 + share 1) + share 2) + ..
"""

import functools

import numpy as np
from numba import cuda, int32, int64, types

from kernels_numba.primitives import (
    SIMULATED,
    after_previous,
    device_function,
    float_from_bits,
    load4,
    store4,
)
from kernels_numba.primitives_columns import CHUNK, MOST_SPLITS, MULTIPLE, ROWS, TILE_WORDS
from kernels_numba.primitives_mma import LANES, pack_pair, put_floats
from kernels_numba.primitives_tensor import load_floats_if
from kernels_numba.registry import KernelSpec

WARPS = 1 if SIMULATED else 8  # of a block that rounds, a chunk each
THREADS = 8 if SIMULATED else 256  # of a block that adds, four elements each


@device_function
def _put_two(inputs, to, upper, lower):
    put_floats(inputs, to, float_from_bits(upper), float_from_bits(lower))


@cuda.jit
def linear_round_kernel(x, inputs, num_rows, num_heads, length, chunks):
    """Flat x [num_rows, num_heads, length] to inputs [num_heads, chunks, tiles of 16 rows, 2, 32, 4], words of two.

    Zeros where there is no row or element. Grid (blocks of chunks, tiles of rows, heads).
    """
    after_previous()
    thread, head, tile = int32(cuda.threadIdx.x), int32(cuda.blockIdx.z), int32(cuda.blockIdx.y)
    lane, chunk = int32(thread & 31), int32(cuda.blockIdx.x * WARPS + (thread >> 5))
    if chunk < chunks:
        k = int32(chunk * CHUNK + (lane & 3) * MULTIPLE)
        row = int32(tile * ROWS + (lane >> 2))
        there, below = k < length and row < num_rows, k < length and int32(row + 8) < num_rows
        at = int64(int32(row * num_heads + head)) * length + k
        under = at + int64(8 * num_heads) * length
        a, b, c, d = load_floats_if(x, at, there)
        e, f, g, h = load_floats_if(x, at + 4, there)
        i, j, m, n = load_floats_if(x, under, below)
        o, p, q, r = load_floats_if(x, under + 4, below)
        to = (int64(int32(head * chunks + chunk)) * cuda.gridDim.y + tile) * TILE_WORDS
        # Its row's lanes want a word each of this lane's piece, in the step that takes the piece.
        to = to + int64(int32(((lane & 2) << 6) + ((lane >> 2) << 4) + ((lane & 1) << 1)))
        _put_two(inputs, to, pack_pair(a, b), pack_pair(i, j))
        _put_two(inputs, to + 4, pack_pair(c, d), pack_pair(m, n))
        _put_two(inputs, to + 8, pack_pair(e, f), pack_pair(o, p))
        _put_two(inputs, to + 12, pack_pair(g, h), pack_pair(q, r))


@functools.cache
def make_linear_add(splits):
    """The kernel for so many shares."""

    @cuda.jit
    def linear_add_kernel(shares, out, count):
        """out [count] = the sum of shares [splits, count], in order."""
        after_previous()
        i = int64(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x) * 4
        if count & 3 == 0 and i < count:
            a, b, c, d = load4(shares, i)
            for s in range(1, splits):
                e, f, g, h = load4(shares, i + int64(s) * count)
                a, b, c, d = a + e, b + f, c + g, d + h
            store4(out, i, a, b, c, d)
        elif i < count:
            for j in range(i, min(i + 4, int64(count))):
                total = shares[j]
                for s in range(1, splits):
                    total += shares[j + int64(s) * count]
                out[j] = total

    return linear_add_kernel


def launch_round(x, inputs, sizes, chunks, stream):
    """Write the rounded inputs; flat arrays, sizes (num_rows, heads, width, length), chunks of 32 elements of K."""
    num_rows, heads, _, length = sizes
    grid = -(-chunks // WARPS), -(-num_rows // ROWS), heads
    numbers = (np.int32(number) for number in (num_rows, heads, length, chunks))
    linear_round_kernel[grid, WARPS * LANES, stream](x, inputs, *numbers)


def launch_add(shares, out, split_bits, stream):
    """Add the shares into the flat out."""
    blocks = -(-out.size // (4 * THREADS))
    make_linear_add(1 << split_bits)[blocks, THREADS, stream](shares, out, np.int32(out.size))


_FLAT = types.Array(types.float32, 1, "C")
SPECS = [
    KernelSpec("linear_round", linear_round_kernel, (_FLAT, _FLAT) + (types.int32,) * 4, WARPS * LANES),
    *(
        KernelSpec(
            f"linear_add_{1 << bits}", make_linear_add(1 << bits), (_FLAT, _FLAT, types.int32), THREADS
        )
        for bits in range(1, MOST_SPLITS.bit_length())
    ),
]
