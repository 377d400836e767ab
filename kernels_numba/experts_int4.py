"""The grouped expert product of INT4 weights, which stay packed in memory. Four kernels, as `experts`.

    out[i] = sum over e of gates[e, i] * down_e(silu(gate_e(x[i])) * up_e(x[i])), weight = (nibble - 8) * scale

Inputs of products are rounded to bf16; 32 products of a row with nibbles less 8, which are exact, are summed in f32,
and the sum is multiplied by its scale and added to the column's, in the order of K. The plan and the sum over a row's
experts are those of `experts`; the tiles are those of `primitives_quantised_tile`, and the kernels serve fp8 as well.
"""

import functools

import numpy as np
from numba import cuda, float32, int32, int64, types, uint32

from kernels_numba.checks import check, require
from kernels_numba.experts import COMBINE_BLOCKS, COMBINE_THREADS, combine_kernel, tile_rows_of
from kernels_numba.experts_plan import check_counts, gate_of, plan_kernel, plan_size, plan_threads, tile_of
from kernels_numba.primitives import after_previous, exp
from kernels_numba.primitives_mma import ALIGN, EXCHANGE
from kernels_numba.primitives_quantised_tile import COLUMNS, cut_of, make_quantised_tile
from kernels_numba.registry import KernelSpec

TILE_ROWS = (8, 16, 32)


@functools.cache
def make_up_quantised(name, rows):
    """hidden = silu(gate) * up for tiles of at most `rows` pairs: a warp makes 8 columns of both."""
    tile = make_quantised_tile(name, rows // 8)
    start, accumulate, starts_of, scales_of = tile.start, tile.accumulate, tile.starts_of, tile.scales_of
    warps, half = tile.warps, COLUMNS // 2
    ring_words, row_words, num_sums = tile.ring, tile.rows, tile.sums

    @cuda.jit(**tile.options)
    def up_quantised_kernel(
        x, gate, gate_scales, up, up_scales, hidden, plan, num_rows, length, width, capacity
    ):
        """Flat x [M, length], gate and up [E, width, length] as stored, hidden [pairs, width].

        Grid (tiles, blocks of columns): tiles of one expert run side by side and share its weights in L2.
        """
        after_previous()
        ring = cuda.shared.array(ring_words, uint32, ALIGN)
        held_rows = cuda.shared.array(row_words, uint32, ALIGN)
        words = cuda.shared.array(EXCHANGE, uint32)
        row_at = cuda.shared.array(rows, int32)
        sums = cuda.local.array(num_sums, float32)
        count, pair, expert = tile_of(plan, capacity)
        if count == 0:  # no tile; all threads leave
            return
        thread = int32(cuda.threadIdx.x)
        first_column = int32((cuda.blockIdx.y * warps + (thread >> 5)) * half)
        weights, scales = (gate, up), (gate_scales, up_scales)
        starts = starts_of(weights, first_column, int32(0), width, length, expert)
        own = scales_of(scales, first_column, int32(0), width, length, expert)
        start(ring, weights, starts, length)
        if thread < count:
            row_at[thread] = int32(int32(plan[pair + thread] - expert * num_rows) * length)
        memory = ring, held_rows, words
        accumulate(x, row_at, count, weights, (scales, own), starts, length, memory, sums)
        column = int32(first_column + ((thread & 31) >> 2))
        if column < width:
            for i in range(num_sums // 2):
                row = int32((i >> 1) * 8 + (thread & 3) * 2 + (i & 1))
                if row < count:
                    one, other = sums[(i >> 1) * 4 + (i & 1)], sums[(i >> 1) * 4 + (i & 1) + 2]
                    hidden[int64(pair + row) * width + column] = one / (float32(1) + exp(-one)) * other

    return up_quantised_kernel


@functools.cache
def make_down_quantised(name, rows):
    """pair_out = gate x down(hidden) for tiles of at most `rows` pairs."""
    tile = make_quantised_tile(name, rows // 8)
    start, accumulate, starts_of, scales_of = tile.start, tile.accumulate, tile.starts_of, tile.scales_of
    warps, ring_words, row_words, num_sums = tile.warps, tile.ring, tile.rows, tile.sums

    @cuda.jit(**tile.options)
    def down_quantised_kernel(hidden, down, down_scales, gates, pair_out, plan, length, width, capacity):
        """Flat hidden [pairs, length], down [E, width, length] as stored, pair_out [pairs, width]. Grid as for `up`."""
        after_previous()
        ring = cuda.shared.array(ring_words, uint32, ALIGN)
        held_rows = cuda.shared.array(row_words, uint32, ALIGN)
        words = cuda.shared.array(EXCHANGE, uint32)
        row_at = cuda.shared.array(rows, int32)
        gate_at = cuda.shared.array(rows, float32)
        sums = cuda.local.array(num_sums, float32)
        count, pair, expert = tile_of(plan, capacity)
        if count == 0:  # no tile; all threads leave
            return
        thread = int32(cuda.threadIdx.x)
        first_column = int32((cuda.blockIdx.y * warps + (thread >> 5)) * COLUMNS)
        weights, scales = (down, down), (down_scales, down_scales)
        starts = starts_of(weights, first_column, int32(8), width, length, expert)
        own = scales_of(scales, first_column, int32(8), width, length, expert)
        start(ring, weights, starts, length)
        if thread < count:
            mine = int32(pair + thread)
            row_at[thread], gate_at[thread] = int32(mine * length), gate_of(gates, plan[mine])
        memory = ring, held_rows, words
        accumulate(hidden, row_at, count, weights, (scales, own), starts, length, memory, sums)
        for i in range(num_sums):
            row = int32((i >> 2) * 8 + (thread & 3) * 2 + (i & 1))
            column = int32(first_column + ((thread & 31) >> 2) + (i & 2) * 4)
            if row < count and column < width:
                pair_out[int64(pair + row) * width + column] = gate_at[row] * sums[i]

    return down_quantised_kernel


def launch(name, arrays, sizes, num_chosen, stream):
    """Launch all four kernels for checked arguments; sizes = (num_rows, size, width, num_experts)."""
    x, gates, gate, up, down, hidden, out, pair_out, plan = arrays
    num_rows, size, width, num_experts = sizes
    capacity = num_rows * num_chosen
    rows = tile_rows_of(num_rows, num_experts, num_chosen, TILE_ROWS)
    num_tiles = min(capacity, num_experts + capacity // rows)
    m, e, k, h, i, p = (np.int32(n) for n in (num_rows, num_experts, num_chosen, size, width, capacity))
    x, gates, hidden, out, pair_out = (array.reshape(-1) for array in (x, gates, hidden, out, pair_out))
    gate, up, down = ([array.reshape(-1) for array in pair] for pair in (gate, up, down))
    bits, tiles = np.int32(rows.bit_length() - 1), np.int32(num_tiles)
    plan_kernel[1, plan_threads(num_rows, num_experts), stream](gates, plan, m, e, k, bits, tiles)
    warps = cut_of(name, rows // 8).warps
    grid, threads = (num_tiles, -(-width // (warps * COLUMNS // 2))), 32 * warps
    make_up_quantised(name, rows)[grid, threads, stream](x, *gate, *up, hidden, plan, m, h, i, p)
    grid = num_tiles, -(-size // (warps * COLUMNS))
    kernel = make_down_quantised(name, rows)
    kernel[grid, threads, stream](hidden, *down, gates, pair_out, plan, i, h, p)
    grid = (min(-(-size // COMBINE_THREADS), COMBINE_BLOCKS), num_rows)
    combine_kernel[grid, COMBINE_THREADS, stream](pair_out, plan, out, h, k, p)


def check_experts(what, arrays, num_experts, num_chosen, multiple):
    """Check what all formats share, K a multiple of `multiple`; returns (num_rows, size, width, num_experts)."""
    x, gates, hidden, out, pair_out, plan = arrays
    check(f"{what}: x", x, "float32", (None, None))
    num_rows, size = x.shape
    check(f"{what}: gates", gates, "float32", (None, num_rows))
    check(f"{what}: hidden", hidden, "float32", (None, None))
    check_counts(what, gates.shape[0], num_experts, num_chosen, hidden.shape[1])
    check(f"{what}: out", out, "float32", (num_rows, size))
    check(f"{what}: pair_out", pair_out, "float32", (None, size))
    check(f"{what}: plan", plan, "int32", (None,))
    for name, length in (("x", size), ("hidden", hidden.shape[1])):
        require(
            length % multiple == 0,
            f"{what}: {name}: expected rows of a multiple of {multiple}, found {length}",
        )
    capacity = num_rows * num_chosen
    for name, array, least in (
        ("hidden", hidden, capacity),
        ("pair_out", pair_out, capacity),
        ("plan", plan, plan_size(num_rows, num_experts, num_chosen)),
    ):
        found = array.shape[0]
        require(found >= least, f"{what}: {name}: expected at least {least} rows, found {found}")
    return num_rows, size, hidden.shape[1], num_experts


def experts_int4(x, gates, gate, up, down, hidden, out, pair_out, plan, num_chosen, stream=0):
    """out[i] = sum over e of gates[e, i] * down_e(silu(gate_e(x[i])) * up_e(x[i])). Raises LaunchError.

    gate, up and down are pairs (packed i32[E, N, K / 8], scales u16[E, N, K / 32]): a word holds eight nibbles along K,
    the lowest first, a scale is the bits of a bf16; K is a multiple of 32. All else as `experts`.
    """
    arrays = x, gates, hidden, out, pair_out, plan
    sizes = check_experts("experts_int4", arrays, gate[0].shape[0], num_chosen, 32)
    _, size, width, num_experts = sizes
    for name, pair, rows, length in (
        ("gate", gate, width, size),
        ("up", up, width, size),
        ("down", down, size, width),
    ):
        check(f"experts_int4: {name}", pair[0], "int32", (num_experts, rows, length // 8))
        check(f"experts_int4: scales of {name}", pair[1], "uint16", (num_experts, rows, length // 32))
    if out.size:
        arrays = x, gates, gate, up, down, hidden, out, pair_out, plan
        launch("int4", arrays, sizes, num_chosen, stream)


def specs_of(name, values, scales):
    """The KernelSpecs of a format whose arrays have those element types."""
    flat, integers = types.Array(types.float32, 1, "C"), types.Array(types.int32, 1, "C")
    values, scales = types.Array(values, 1, "C"), types.Array(scales, 1, "C")
    number = types.int32
    for rows in TILE_ROWS:
        threads = 32 * cut_of(name, rows // 8).warps
        up = (flat, values, scales, values, scales, flat, integers) + (number,) * 4
        down = (flat, values, scales, flat, flat, integers) + (number,) * 3
        yield KernelSpec(f"experts_{name}_up_{rows}", make_up_quantised(name, rows), up, threads)
        yield KernelSpec(f"experts_{name}_down_{rows}", make_down_quantised(name, rows), down, threads)


SPECS = list(specs_of("int4", types.int32, types.uint16))
