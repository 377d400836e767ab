"""What goes before `linear_wgmma`: inputs rounded to bf16, swizzled as wgmma wants its operands.

inputs = bf16(x)
"""

import numpy as np
from numba import cuda, int32, int64, types, uint32

from kernels_numba.primitives import SIMULATED, after_previous
from kernels_numba.primitives_linear_wgmma import CHUNK, ROW_WORDS
from kernels_numba.primitives_mma import pack_pair, put_words
from kernels_numba.primitives_tensor import load_floats_if
from kernels_numba.registry import KernelSpec

if SIMULATED:

    def start_next():
        """Let the launch after this start, though what goes before this is not done."""

else:
    from kernels_numba.intrinsics_linear_wgmma import start_next

EARLY = True  # whether `linear_wgmma` may start before what goes before this launch is done
THREADS = 8 if SIMULATED else 256  # of a block, a piece of eight elements each


@cuda.jit
def linear_swizzle_kernel(x, inputs, num_rows, num_heads, length, chunks):
    """Flat x [num_rows, num_heads, length] to inputs [num_heads, chunks of 64, rows to 8, 8 pieces], words.

    Rows are rounded up to a multiple of 8. A piece is four words of two; piece i of row r lies at i ^ (r % 8). Zeros
    where there is no row or element.
    """
    if EARLY:
        start_next()  # it brings weights, and waits for this launch before it reads inputs
    after_previous()
    all_rows = uint32(uint32(num_rows + 7) & uint32(0xFFFFFFF8))
    number = uint32(cuda.blockIdx.x * uint32(THREADS) + cuda.threadIdx.x)
    piece, rest = uint32(number & uint32(7)), uint32(number >> uint32(3))
    row, rest = uint32(rest % all_rows), uint32(rest // all_rows)
    chunk, head = uint32(rest % uint32(chunks)), int32(rest // uint32(chunks))
    if head < num_heads:
        k = int32(chunk * uint32(CHUNK) + piece * uint32(8))
        there = k < length and int32(row) < num_rows
        at = (int64(row) * num_heads + head) * length + k
        a, b, c, d = load_floats_if(x, at, there)
        e, f, g, h = load_floats_if(x, at + 4, there)
        to = int64(rest) * all_rows + row
        to = to * ROW_WORDS + int64(uint32((piece ^ (row & uint32(7))) << uint32(2)))
        put_words(inputs, to, pack_pair(a, b), pack_pair(c, d), pack_pair(e, f), pack_pair(g, h))


def launch_swizzle(x, inputs, sizes, chunks, stream):
    """Write the rounded inputs; flat arrays, sizes (num_rows, heads, width, length), chunks of 64 elements of K."""
    num_rows, heads, _, length = sizes
    pieces = heads * chunks * -(-num_rows // 8) * 64
    numbers = (np.int32(number) for number in (num_rows, heads, length, chunks))
    linear_swizzle_kernel[-(-pieces // THREADS), THREADS, stream](x, inputs, *numbers)


_FLAT = types.Array(types.float32, 1, "C")
SPECS = [
    KernelSpec(
        "linear_swizzle",
        linear_swizzle_kernel,
        (_FLAT, _FLAT) + (types.int32,) * 4,
        THREADS,
        capabilities=((9, 0, "a"),),
    )
]
