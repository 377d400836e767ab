"""The part of `linear_fp8` for more rows: they are rounded first, and copied; tiles of up to 72 rows share weights.

    out[i, n] = sum over k of inputs[i, k] * weight[n, k], inputs = bf16(x)

Where K is cut, each share is a block's, and `linear_ends` adds them. The bits are those of `linear_fp8`'s others.
"""

import functools

import numpy as np
from numba import cuda, float32, int32, int64, types, uint32

from kernels_numba.launching import allow_shared
from kernels_numba.linear_ends import launch_add
from kernels_numba.primitives import SIMULATED, after_previous
from kernels_numba.primitives_mma import ALIGN, EXCHANGE, put_words
from kernels_numba.primitives_quantised import load_floats_if
from kernels_numba.primitives_quantised_formats import CHUNK, FORMATS
from kernels_numba.primitives_quantised_tile import COLUMNS
from kernels_numba.primitives_quantised_wide import MOST_WARPS, WIDE_DEPTH, make_wide_quantised
from kernels_numba.registry import KernelSpec

ROUND_THREADS = 8 if SIMULATED else 128  # of a block that rounds, eight elements each
TILES = tuple(WIDE_DEPTH)  # of 8 rows

_FP8 = FORMATS["fp8"](1)
_ends_of, _pack = _FP8.ends_of, _FP8.pack


@cuda.jit
def linear_fp8_round_kernel(x, inputs, length, whole):
    """Flat x [rows, length] to inputs [rows, whole / 2], words of two in fp8's order, zeros behind.

    Grid (blocks of K, rows).
    """
    after_previous()
    held = cuda.local.array(8, float32)
    unit, row = int32(cuda.blockIdx.x * ROUND_THREADS + cuda.threadIdx.x), int32(cuda.blockIdx.y)
    if unit * 8 < whole:
        first, second = _ends_of(unit)
        k = int32((unit >> 2) * 32)
        at = int64(row) * length + k
        held[0], held[1], held[2], held[3] = load_floats_if(x, at + first, int32(k + first) < length)
        held[4], held[5], held[6], held[7] = load_floats_if(x, at + second, int32(k + second) < length)
        a, b, c, d = _pack(held, 0)
        put_words(inputs, int64(row) * (whole // 2) + unit * 4, a, b, c, d)


@functools.cache
def make_linear_fp8_wide(tiles):
    """The kernel for blocks of 8 x `tiles` rows."""
    tile = make_wide_quantised("fp8", tiles)
    start, accumulate, num_sums = tile.start, tile.accumulate, tile.sums
    starts_of, scales_of = tile.starts_of, tile.scales_of

    @cuda.jit(**tile.options)
    def linear_fp8_wide_kernel(inputs, weight, scales, out, num_rows, width, length, share):
        """Inputs as rounded, flat weight [width, length], scales by blocks of 128, out [shares, num_rows, width].

        Grid (tiles of rows, blocks of columns, shares): tiles of rows run side by side and share weights in L2. The
        first weights are on their way before the launch ahead has ended.
        """
        memory = cuda.shared.array(0, uint32, ALIGN)
        words = cuda.shared.array(EXCHANGE, uint32)
        sums = cuda.local.array(num_sums, float32)
        thread = int32(cuda.threadIdx.x)
        lane, warp = int32(thread & 31), int32(thread >> 5)
        first_column = int32((cuda.blockIdx.y * (cuda.blockDim.x >> 5) + warp) * COLUMNS)
        first = int32(cuda.blockIdx.z * share)
        run = first, min(int32(first + share), length)
        starts = starts_of((weight, weight), first_column, int32(8), width, length, int32(0))
        start(memory, (weight, weight), starts, run)
        first_row = int32(cuda.blockIdx.x * (8 * tiles))
        count = min(int32(8 * tiles), int32(num_rows - first_row))
        after_previous()
        both = scales, scales
        own = both, scales_of(both, first_column, int32(8), width, length, int32(0))
        accumulate(inputs, first_row, count, (weight, weight), own, starts, run, length, memory, words, sums)
        before = int64(cuda.blockIdx.z) * num_rows + first_row
        for i in range(num_sums):
            row = int32((i >> 2) * 8 + (lane & 3) * 2 + (i & 1))
            column = int32(first_column + (lane >> 2) + (i & 2) * 4)
            if row < count and column < width:
                out[(before + row) * width + column] = sums[i]

    return linear_fp8_wide_kernel


def inputs_size(num_rows, length):
    """f32 that the rounded inputs take."""
    return num_rows * (-(-length // CHUNK) * CHUNK // 2)


def room():
    """Shared memory that a block of the current device may have."""
    return 1 << 18 if SIMULATED else cuda.get_current_device().MAX_SHARED_MEMORY_PER_BLOCK_OPTIN


def launch_wide(x, weight, scales, out, scratch, sizes, shares, warps_of, stream):
    """Round x, and launch the product; flat arrays, sizes = (num_rows, width, length)."""
    num_rows, width, length = sizes
    whole, words = -(-length // CHUNK) * CHUNK, inputs_size(num_rows, length)
    grid, inputs = (-(-whole // (8 * ROUND_THREADS)), num_rows), scratch[:words]
    linear_fp8_round_kernel[grid, ROUND_THREADS, stream](x, inputs, np.int32(length), np.int32(whole))
    bytes_of = {tiles: make_wide_quantised("fp8", tiles).bytes for tiles in TILES}
    choices = [tiles for tiles in TILES if bytes_of[tiles] <= room()]
    tiles = next((count for count in choices if 8 * count >= num_rows), choices[-1])
    spec, columns, row_tiles = SPEC_OF[tiles], -(-width // COLUMNS), -(-num_rows // (8 * tiles))
    warps = warps_of(columns, row_tiles * shares, MOST_WARPS)
    if not SIMULATED:
        allow_shared(spec, bytes_of[tiles])
    to = scratch[words : words + shares * out.size] if shares > 1 else out
    numbers = (np.int32(number) for number in (*sizes, -(-whole // (shares * CHUNK)) * CHUNK))
    grid = row_tiles, -(-columns // warps), shares
    spec.kernel[grid, 32 * warps, stream, bytes_of[tiles]](inputs, weight, scales, to, *numbers)
    if shares > 1:
        launch_add(to, out, shares.bit_length() - 1, stream)


_FLAT, _BYTES = types.Array(types.float32, 1, "C"), types.Array(types.uint8, 1, "C")
SPEC_OF = {
    tiles: KernelSpec(
        f"linear_fp8_wide_{8 * tiles}",
        make_linear_fp8_wide(tiles),
        (_FLAT, _BYTES, _FLAT, _FLAT) + (types.int32,) * 4,
        32 * MOST_WARPS,
    )
    for tiles in TILES
}
SPECS = [
    KernelSpec(
        "linear_fp8_round", linear_fp8_round_kernel, (_FLAT, _FLAT) + (types.int32,) * 2, ROUND_THREADS
    ),
    *SPEC_OF.values(),
]
