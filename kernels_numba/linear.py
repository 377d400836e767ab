"""Matrix products whose rows never see each other: out = x @ weight.T, for one weight or for one a head.

    out[i, h, n] = sum over k of x[i, h, k] * weight[h, n, k]

With f32 weights a warp makes a tile of rows x columns (`primitives_dot`). Where columns are few and K is long, `splits`
warps of a block share K and their sums are added in order; the split depends on the weight's shape alone, never on the
rows. bf16 weights go to tensor cores, unless their K is no multiple of 8: such a weight never does. Few rows take
`linear_mma`, more take `linear_wgmma` on GPUs of compute capability 9.0 and `linear_wide` on others; the bits are the
same, so that the choice is one of speed.
"""

import functools

import numpy as np
from numba import cuda, float32, int32, int64, types

from kernels_numba import linear_wgmma
from kernels_numba.checks import check, require
from kernels_numba.linear_ends import launch_add, launch_round
from kernels_numba.linear_mma import launch_mma, tiling_of
from kernels_numba.linear_wgmma_round import launch_swizzle
from kernels_numba.linear_wide import launch_wide, wide_tiling_of
from kernels_numba.primitives import SIMULATED, WARP, after_previous
from kernels_numba.primitives_columns import CHUNK, ROWS, TILE_WORDS, share_of
from kernels_numba.primitives_columns import split_bits_of as tensor_split_bits
from kernels_numba.primitives_dot import (
    RAGGED_ROWS,
    SCRATCH,
    TILES,
    chunk_of,
    make_tile,
    rows_of_tile,
)
from kernels_numba.primitives_lanes import THREADS, WARPS, lane_and_warp
from kernels_numba.primitives_linear_plan import GroupTiling, group_tiling_of
from kernels_numba.primitives_linear_wgmma import CHUNK as GROUP_CHUNK
from kernels_numba.registry import KernelSpec

ENOUGH_SUMS = 4096  # warps that fill the GPU, one column each
SHORTEST_SPLIT = 512  # elements of K that are still worth a warp
FEW_ROWS = 8  # that `linear_mma` takes in any case
MOST_APART = 1 << 24  # f32 of shares of K that lie in scratch; of more, a block takes all shares in turn
BUSY_BLOCKS = 1 if SIMULATED else 128  # with fewer, smaller tiles use more of the GPU


@functools.cache
def make_kernel(rows, half, ragged):
    """The kernel for tiles of `rows` rows, weight f32 or (`half`) bf16, K a multiple of a chunk or (`ragged`) not."""
    tile = make_tile(rows, half, ragged)
    columns, values, chunk = tile.columns, tile.values, chunk_of(half)
    last_of_chunk = chunk - 1
    accumulate, reduce, held = tile.accumulate, tile.reduce, tile.values * WARPS
    load_first, use_first, num_words, word = tile.load_first, tile.use_first, tile.words, tile.word

    @cuda.jit(**tile.bounds)
    def linear_kernel(x, weight, out, num_rows, num_heads, width, length, split_bits):
        """Flat x [num_rows, num_heads, length], weight [num_heads, width, length], out [num_rows, num_heads, width].

        Grid (tiles of rows, blocks of columns, heads): tiles of one weight run side by side and share it in L2. The
        first weights are on their way before the launch ahead has ended.
        """
        scratch = cuda.shared.array(SCRATCH, float32)
        partial = cuda.shared.array(held, float32)
        words, sums = cuda.local.array(num_words, word), cuda.local.array(values, float32)
        row_at = cuda.local.array(rows, int32)
        column_at = cuda.local.array(columns, int32)
        lane, warp = lane_and_warp()
        head, split = cuda.blockIdx.z, int32(warp & ((1 << split_bits) - 1))
        first_row = int32(cuda.blockIdx.x * rows)
        first_column = int32(((cuda.blockIdx.y * WARPS >> split_bits) + (warp >> split_bits)) * columns)
        for c in range(columns):
            column = min(int32(first_column + c), int32(width - 1))
            column_at[c] = int32(int32(head * width + column) * length)
        share = int32(((length + last_of_chunk) // chunk + (1 << split_bits) - 1 >> split_bits) * chunk)
        k = int32(split * share + lane * chunk)
        last = min(int32((split + 1) * share), length)
        if first_column >= width:  # no column
            last = int32(0)
        load_first(weight, column_at, k, last, length, words)
        after_previous()
        for i in range(values):
            sums[i] = float32(0)
        if first_column < width:
            for r in range(rows):
                row = min(int32(first_row + r), int32(num_rows - 1))
                row_at[r] = int32(int32(row * num_heads + head) * length)
            k = use_first(x, row_at, k, last, length, words, sums)
            accumulate(x, row_at, weight, column_at, k, last, length, sums)
        reduce(sums, lane, scratch, partial, warp * values)
        cuda.syncthreads()  # the sums of all splits are in `partial`
        if split == 0:
            i = lane
            while i < values:
                row, column = int32(first_row + i // columns), int32(first_column + i % columns)
                if row < num_rows and column < width:
                    total = partial[warp * values + i]
                    for other in range(1, 1 << split_bits):
                        total += partial[(warp + other) * values + i]
                    out[int64(int32(row * num_heads + head)) * width + column] = total
                i = int32(i + WARP)

    return linear_kernel


def split_bits_of(columns, length):
    """K of a weight with that many columns (heads x width) is cut into 1 << this many parts."""
    bits = 0
    while 1 << bits < WARPS and columns << bits < ENOUGH_SUMS and length >= SHORTEST_SPLIT << bits + 1:
        bits += 1
    return bits


def _grid(rows, num_rows, width, heads, split_bits):
    columns_a_block = TILES[rows][0] * (WARPS >> split_bits)
    return -(-num_rows // rows), -(-width // columns_a_block), heads


def tensor_plan(num_rows, heads, width, length):
    """(bits of the number of shares, elements of one, the tiling of few rows or None, the tiling of many or None)."""
    split_bits = tensor_split_bits(heads, width, length)
    share, apart = share_of(length, split_bits), num_rows * heads * width << split_bits <= MOST_APART
    few_ns, few = tiling_of(num_rows, heads, width, length, split_bits)
    if num_rows <= FEW_ROWS or not length:
        return split_bits, share, few, None
    if linear_wgmma.can_take():
        many_ns, many = group_tiling_of(num_rows, heads, width, length, share, split_bits, apart)
    else:
        many_ns, many = wide_tiling_of(num_rows, heads, width, length, split_bits, apart)
    return (split_bits, share, few, None) if few_ns <= many_ns else (split_bits, share, None, many)


def _input_words(num_rows, heads, split_bits, share):
    """Words of the rounded inputs, zeros behind the end of K and of the rows included."""
    return heads * (share // CHUNK << split_bits) * -(-num_rows // ROWS) * TILE_WORDS


def linear_scratch(num_rows, heads, width, length):
    """f32 that `linear` (one head) or `head_linear` wants as scratch for a bf16 weight [heads, width, length].

    Fewer rows want no more.
    """
    if num_rows <= FEW_ROWS or length % chunk_of(True) or not heads * width * length:
        return 0
    split_bits = tensor_split_bits(heads, width, length)
    shares = min(num_rows * heads * width << split_bits, MOST_APART) if split_bits else 0
    return _input_words(num_rows, heads, split_bits, share_of(length, split_bits)) + shares


def _launch(x, weight, out, scratch, heads, width, length, stream):
    num_rows, half = x.shape[0], str(weight.dtype) == "uint16"
    if not num_rows * heads * width:
        return
    largest = max(x.size, weight.size, num_rows * heads)
    require(largest < 2**31, f"linear: {largest} elements are more than i32 indices reach")
    if half and length % chunk_of(half) == 0:
        _launch_on_tensor_cores(x, weight, out, scratch, (num_rows, heads, width, length), stream)
        return
    ragged = length % chunk_of(half) != 0
    split_bits = split_bits_of(heads * width, length)
    rows = rows_of_tile(num_rows, ragged)
    grid = _grid(rows, num_rows, width, heads, split_bits)
    if rows == 8 and np.prod(grid) < BUSY_BLOCKS:
        rows = 4
        grid = _grid(rows, num_rows, width, heads, split_bits)
    sizes = (np.int32(size) for size in (num_rows, heads, width, length, split_bits))
    kernel = make_kernel(rows, half, ragged)
    kernel[grid, THREADS, stream](x.reshape(-1), weight.reshape(-1), out.reshape(-1), *sizes)


def _launch_on_tensor_cores(x, weight, out, scratch, sizes, stream):
    split_bits, share, few, many = tensor_plan(*sizes)
    x, weight, out = x.reshape(-1), weight.reshape(-1), out.reshape(-1)
    if few is not None:
        launch_mma(x, weight, out, sizes, share, split_bits, few, stream)
        return
    words = _input_words(*sizes[:2], split_bits, share)
    wanted = words + (out.size << split_bits if many.apart else 0)
    found = 0 if scratch is None else scratch.size
    require(found >= wanted, f"linear: scratch: expected {wanted} elements at least, found {found}")
    inputs, to = scratch[:words], scratch[words:wanted] if many.apart else out
    if isinstance(many, GroupTiling):
        launch_swizzle(x, inputs, sizes, share // GROUP_CHUNK << split_bits, stream)
        linear_wgmma.launch_groups(inputs, weight, to, sizes, share, split_bits, many, stream)
    else:
        launch_round(x, inputs, sizes, share // CHUNK << split_bits, stream)
        launch_wide(inputs, weight, to, sizes, share, split_bits, many, stream)
    if many.apart:
        launch_add(to, out, split_bits, stream)


def linear(x, weight, out, scratch=None, stream=0):
    """out = x @ weight.T; x f32[M, K], weight f32[N, K] or bf16 bits u16[N, K], out f32[M, N].

    scratch f32[linear_scratch(M, 1, N, K)] or more; f32 weights need none. Raises LaunchError.
    """
    check("linear: x", x, "float32", (None, None))
    length = x.shape[1]
    check("linear: weight", weight, ("float32", "uint16"), (None, length))
    check("linear: out", out, "float32", (x.shape[0], weight.shape[0]))
    _launch(x, weight, out, scratch, 1, weight.shape[0], length, stream)


def head_linear(x, weight, out, scratch=None, stream=0):
    """out[i, h] = weight[h] @ x[i, h]; x f32[M, H, A], weight f32 or bf16 bits u16 [H, B, A], out f32[M, H, B].

    scratch f32[linear_scratch(M, H, B, A)] or more; f32 weights need none. Raises LaunchError.
    """
    check("head_linear: x", x, "float32", (None, None, None))
    num_rows, heads, length = x.shape
    check("head_linear: weight", weight, ("float32", "uint16"), (heads, None, length))
    width = weight.shape[1]
    check("head_linear: out", out, "float32", (num_rows, heads, width))
    _launch(x, weight, out, scratch, heads, width, length, stream)


def _spec(rows, half, ragged):
    flat, bits = types.Array(types.float32, 1, "C"), types.Array(types.uint16, 1, "C")
    name = f"linear_{'bf16' if half else 'f32'}_{rows}{'_ragged' if ragged else ''}"
    arguments = (flat, bits if half else flat, flat) + (types.int32,) * 5
    return KernelSpec(name, make_kernel(rows, half, ragged), arguments, THREADS)


SPECS = [
    _spec(rows, half, ragged)
    for half, ragged, sizes in ((False, False, TILES), (False, True, RAGGED_ROWS), (True, True, RAGGED_ROWS))
    for rows in sizes
]
