"""Matrix products with fp8 weights, which stay bytes in memory; rows never see each other.

    out[i, n] = sum over k of bf16(x[i, k]) * weight[n, k], weight = e4m3 * scale

128 products of a row, exact in f32, are summed, and the sum is multiplied by its scale and added to the column's, in
the order of K. Where columns are few and K is long, K is cut in SHARES, which are added in order: warps of a block take
one each where rows are few, else (`linear_fp8_wide`) blocks. The cut depends on the weight alone. A NaN of the weight
makes its column NaN.
"""

import functools

import numpy as np
from numba import cuda, float32, int32, int64, types, uint32

from kernels_numba.checks import check, require
from kernels_numba.linear_fp8_wide import inputs_size, launch_wide
from kernels_numba.primitives import SIMULATED, after_previous, bits_from_float, float_from_bits
from kernels_numba.primitives_mma import ALIGN, EXCHANGE
from kernels_numba.primitives_quantised_tile import ALONE, COLUMNS, cut_of, make_quantised_tile
from kernels_numba.registry import KernelSpec

MULTIPROCESSORS = 132  # what the choice of blocks reckons with; an H200
SHARES = 2 if SIMULATED else 4  # of a K that is cut
FEW_TILES = 800  # of 16 columns: with more, K is not cut
SHORTEST_SHARE = 256  # elements of K that are still worth a warp
FEW_ROWS = 2  # with more, they are rounded first
ROWS = 8  # of a tile
FEWEST_WARPS = 2  # of a block


@functools.cache
def make_linear_fp8(teams):
    """The kernel for blocks of up to ROWS rows, with a warp for each of so many shares."""
    tile = make_quantised_tile("fp8", 1, teams, None if teams > 1 or SIMULATED else ALONE)
    start, accumulate, starts_of, scales_of = tile.start, tile.accumulate, tile.starts_of, tile.scales_of
    ring_words, row_words, num_sums, team_bits = tile.ring, tile.rows, tile.sums, teams.bit_length() - 1

    @cuda.jit(**tile.options)
    def linear_fp8_kernel(x, weight, scales, out, num_rows, width, length):
        """Flat x [num_rows, length], weight [width, length], scales by blocks of 128, out [num_rows, width].

        Grid (tiles of rows, blocks of columns): tiles of rows run side by side and share weights in L2. The first
        weights are on their way before the launch ahead has ended.
        """
        ring = cuda.shared.array(ring_words, uint32, ALIGN)
        held_rows = cuda.shared.array(row_words, uint32, ALIGN)
        words = cuda.shared.array(EXCHANGE, uint32)
        row_at = cuda.shared.array(ROWS, int32)
        sums = cuda.local.array(num_sums, float32)
        thread = int32(cuda.threadIdx.x)
        lane, warp = int32(thread & 31), int32(thread >> 5)
        groups = int32(cuda.blockDim.x >> 5 >> team_bits)
        first_column = int32((cuda.blockIdx.y * groups + (warp >> team_bits)) * COLUMNS)
        starts = starts_of((weight, weight), first_column, int32(8), width, length, int32(0))
        start(ring, (weight, weight), starts, length)
        first_row = int32(cuda.blockIdx.x * ROWS)
        count = min(int32(ROWS), int32(num_rows - first_row))
        if thread < count:
            row_at[thread] = int32((first_row + thread) * length)
        after_previous()
        memory, both = (ring, held_rows, words), (scales, scales)
        own = both, scales_of(both, first_column, int32(8), width, length, int32(0))
        accumulate(x, row_at, count, (weight, weight), own, starts, length, memory, sums)
        if teams > 1:
            cuda.syncthreads()  # the rows have been used
            for i in range(num_sums):
                held_rows[int64((warp * num_sums + i) * 32 + lane)] = bits_from_float(sums[i])
            cuda.syncthreads()  # every share's sums are there
            for i in range(num_sums):
                if i & (teams - 1) == warp & (teams - 1):
                    at = int64(((warp & -teams) * num_sums + i) * 32 + lane)
                    total = float_from_bits(held_rows[at])
                    for other in range(1, teams):
                        total += float_from_bits(held_rows[at + other * num_sums * 32])
                    sums[i] = total
        for i in range(num_sums):
            if teams == 1 or i & (teams - 1) == warp & (teams - 1):
                row = int32((i >> 2) * 8 + (lane & 3) * 2 + (i & 1))
                column = int32(first_column + (lane >> 2) + (i & 2) * 4)
                if row < count and column < width:
                    out[int64(first_row + row) * width + column] = sums[i]

    return linear_fp8_kernel


def shares_of(width, length):
    """How many shares K of a weight is cut in."""
    return SHARES if -(-width // COLUMNS) < FEW_TILES and length >= SHARES * SHORTEST_SHARE else 1


def warps_of(column_tiles, row_tiles, most):
    """Warps of a block, a column tile each: as many as leave the busiest multiprocessor least to do."""
    busiest = {
        w: w * -(-(-(-column_tiles // w) * row_tiles) // MULTIPROCESSORS)
        for w in range(FEWEST_WARPS, most + 1)
    }
    return min(busiest, key=lambda w: (busiest[w], -w))


def linear_fp8_scratch(num_rows, width, length):
    """f32 that `linear_fp8` wants as scratch; fewer rows want no more."""
    if num_rows <= FEW_ROWS:
        return 0
    shares = shares_of(width, length)
    return inputs_size(num_rows, length) + (shares * num_rows * width if shares > 1 else 0)


def linear_fp8(x, values, scales, out, scratch=None, stream=0):
    """out = x @ weight.T; x f32[M, K], out f32[M, N]. Raises LaunchError.

    values u8[N, K] are the bytes of e4m3, scales f32[ceil(N / 128), ceil(K / 128)]; K is a multiple of 16.
    scratch f32[linear_fp8_scratch(M, N, K)] or more.
    """
    check("linear_fp8: x", x, "float32", (None, None))
    num_rows, length = x.shape
    check("linear_fp8: values", values, "uint8", (None, length))
    width = values.shape[0]
    require(length % 16 == 0, f"linear_fp8: x: expected K a multiple of 16, found {length}")
    check("linear_fp8: scales", scales, "float32", (-(-width // 128), -(-length // 128)))
    check("linear_fp8: out", out, "float32", (num_rows, width))
    require(num_rows < 2**16, f"linear_fp8: x: expected fewer than 65536 rows, found {num_rows}")
    require(x.size < 2**31, f"linear_fp8: x: {x.size} elements are more than i32 indices reach")
    wanted, found = linear_fp8_scratch(num_rows, width, length), 0 if scratch is None else scratch.size
    require(found >= wanted, f"linear_fp8: scratch: expected {wanted} elements at least, found {found}")
    if not out.size:
        return
    shares, tiles, sizes = shares_of(width, length), -(-width // COLUMNS), (num_rows, width, length)
    x, values, scales, out = (array.reshape(-1) for array in (x, values, scales, out))
    if wanted:
        launch_wide(x, values, scales, out, scratch.reshape(-1), sizes, shares, warps_of, stream)
        return
    most = cut_of("fp8", 1).warps if shares > 1 or SIMULATED else ALONE.warps
    warps = most if shares > 1 else warps_of(tiles, 1, most)
    numbers = (np.int32(number) for number in sizes)
    row_tiles = -(-num_rows // ROWS)  # without K many rows come here too
    make_linear_fp8(shares)[(row_tiles, -(-tiles * shares // warps)), 32 * warps, stream](
        x, values, scales, out, *numbers
    )


def _specs():
    flat, bytes_ = types.Array(types.float32, 1, "C"), types.Array(types.uint8, 1, "C")
    for teams in (1, SHARES):
        arguments, warps = (flat, bytes_, flat, flat) + (types.int32,) * 3, cut_of("fp8", 1).warps
        name, threads = f"linear_fp8_{teams}", 32 * (warps if teams > 1 or SIMULATED else ALONE.warps)
        yield KernelSpec(name, make_linear_fp8(teams), arguments, threads)


SPECS = list(_specs())
