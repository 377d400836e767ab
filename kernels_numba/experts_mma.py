"""The tensor-core part of `experts`: bf16 weights whose K is a multiple of 8.

    hidden = silu(x @ w_gate.T) * (x @ w_up.T),  pair_out = gates * (hidden @ w_down.T), inputs rounded to bf16

A block takes a tile of the plan, an expert's weights and some of its columns; how K is split depends on the shapes of
the weights and on num_chosen alone, never on the rows.
"""

import functools

import numpy as np
from numba import cuda, float32, int32, int64, types, uint32

from kernels_numba.experts_plan import gate_of, tile_of
from kernels_numba.linear_mma import MULTIPROCESSORS
from kernels_numba.primitives import SIMULATED, after_previous, exp
from kernels_numba.primitives_mma import ALIGN, EXCHANGE, LANES
from kernels_numba.primitives_tensor import (
    COLUMNS,
    SUMS,
    WORDS,
    column_of,
    keep,
    row_of,
    tensor_split_bits,
    total_of,
)
from kernels_numba.primitives_tensor_stage import TILES, most_warps, options_for, tensor_tile
from kernels_numba.registry import KernelSpec

BLOCK_WARPS = 2 if SIMULATED else 8  # 16 would read the rows of large tiles half as often
FEWER_WARPS = () if SIMULATED else (4, 6)  # where there are multiprocessors enough
ROW_DEPTH = 2  # of plain tiles; 4 needs more registers than there are
MMA_ROWS = (8, 16, 32, 64)  # of a plan's tile


@functools.cache
def make_up_mma(kind, rows):
    """hidden = silu(gate) * up for tiles of at most `rows` pairs: column tiles of gate's and of up's in turn."""
    tile = tensor_tile(kind, rows, ROW_DEPTH)
    load_first, accumulate, num_held = tile.load_first, tile.accumulate, tile.held
    num_sums, num_floats, rows_held = tile.sums, tile.floats, max(16, rows)
    split_warps = kind == "plain"

    @cuda.jit(**options_for(kind))
    def up_mma_kernel(x, w_gate, w_up, hidden, plan, num_rows, length, width, capacity, split_bits):
        """Flat x [M, length], w_gate and w_up [E, width, length], hidden [pairs, width].

        Grid (tiles, blocks of columns): tiles of one expert run side by side and share its weights in L2.
        """
        after_previous()
        buffers = cuda.shared.array(WORDS, uint32, ALIGN)
        floats = cuda.shared.array(num_floats, float32, ALIGN)
        words = cuda.shared.array(EXCHANGE, uint32)
        row_at = cuda.shared.array(rows_held, int32)
        held, sums = cuda.local.array(num_held, uint32), cuda.local.array(num_sums, float32)
        count, pair, expert = tile_of(plan, capacity)
        if count == 0:  # no tile; all threads leave
            return
        thread = int32(cuda.threadIdx.x)
        warp, warp_bits = int32(thread >> 5), split_bits if split_warps else int32(0)
        splits, groups = int32(1 << warp_bits), int32(cuda.blockDim.x >> 6 >> warp_bits)
        group = int32(warp >> warp_bits)
        first_column = int32((cuda.blockIdx.y * groups + (group >> 1)) * COLUMNS)
        weight = w_up if group & 1 else w_gate
        mine, sizes = weight[int64(expert) * width * length :], (width, length, split_bits)
        load_first(mine, first_column, sizes, held)
        if thread < rows_held:
            row = int32(plan[pair + min(thread, int32(count - 1))] - expert * num_rows)
            row_at[thread] = int32(row * length)
        accumulate(x, row_at, count, mine, first_column, sizes, held, sums, (buffers, floats, words))
        count, pair = (
            plan[capacity + cuda.blockIdx.x],
            plan[2 * capacity + cuda.blockIdx.x],
        )  # no registers till now
        first_warp = int32(warp & -2 * splits)  # of gate's columns; splits further there are up's
        for first in range(0, num_sums, SUMS):
            keep(sums, first, buffers)
            for step in range(warp - first_warp, SUMS, 2 * splits):
                row, column = int32(2 * first + row_of(step)), int32(first_column + column_of(step))
                if row < count and column < width:
                    gate = total_of(buffers, first_warp, step, warp_bits)
                    up = total_of(buffers, first_warp + splits, step, warp_bits)
                    hidden[int64(pair + row) * width + column] = gate / (float32(1) + exp(-gate)) * up

    return up_mma_kernel


@functools.cache
def make_down_mma(kind, rows):
    """pair_out = gate x down(hidden) for tiles of at most `rows` pairs."""
    tile = tensor_tile(kind, rows, ROW_DEPTH)
    load_first, accumulate, num_held = tile.load_first, tile.accumulate, tile.held
    num_sums, num_floats, rows_held = tile.sums, tile.floats, max(16, rows)
    split_warps = kind == "plain"

    @cuda.jit(**options_for(kind))
    def down_mma_kernel(hidden, w_down, gates, pair_out, plan, num_rows, length, width, capacity, split_bits):
        """Flat hidden [pairs, length], w_down [E, width, length], pair_out [pairs, width]. Grid as for `up`."""
        after_previous()
        buffers = cuda.shared.array(WORDS, uint32, ALIGN)
        floats = cuda.shared.array(num_floats, float32, ALIGN)
        words = cuda.shared.array(EXCHANGE, uint32)
        row_at = cuda.shared.array(rows_held, int32)
        gate_at = cuda.shared.array(rows_held, float32)
        held, sums = cuda.local.array(num_held, uint32), cuda.local.array(num_sums, float32)
        count, pair, expert = tile_of(plan, capacity)
        if count == 0:  # no tile; all threads leave
            return
        thread = int32(cuda.threadIdx.x)
        warp, warp_bits = int32(thread >> 5), split_bits if split_warps else int32(0)
        splits, groups = int32(1 << warp_bits), int32(cuda.blockDim.x >> 5 >> warp_bits)
        first_warp = int32(warp & -splits)
        first_column = int32((cuda.blockIdx.y * groups + (warp >> warp_bits)) * COLUMNS)
        mine, sizes = w_down[int64(expert) * width * length :], (width, length, split_bits)
        load_first(mine, first_column, sizes, held)
        if thread < rows_held:
            mine_at = int32(pair + min(thread, int32(count - 1)))
            row_at[thread], gate_at[thread] = int32(mine_at * length), gate_of(gates, plan[mine_at])
        accumulate(hidden, row_at, count, mine, first_column, sizes, held, sums, (buffers, floats, words))
        count, pair = (
            plan[capacity + cuda.blockIdx.x],
            plan[2 * capacity + cuda.blockIdx.x],
        )  # no registers till now
        for first in range(0, num_sums, SUMS):
            keep(sums, first, buffers)
            for step in range(warp - first_warp, SUMS, splits):
                row, column = int32(2 * first + row_of(step)), int32(first_column + column_of(step))
                if row < count and column < width:
                    product = gate_at[row] * total_of(buffers, first_warp, step, warp_bits)
                    pair_out[int64(pair + row) * width + column] = product

    return down_mma_kernel


def split_bits_of(width, length, num_chosen):
    """How K of an expert's `width` columns is cut, when num_chosen experts at least are at work side by side."""
    bits = tensor_split_bits(num_chosen * -(-width // COLUMNS), length)
    return min(bits, (BLOCK_WARPS // 2).bit_length() - 1)


def kind_of(rows, split_bits):
    """The kind in TILES that takes a plan's tiles of `rows` rows."""
    if rows <= (16 if split_bits else 8):
        return "plain"
    return "shares" if split_bits else "staged"


def block_warps(kind, warps, num_tiles, unit):
    """Warps of a block, `unit` of which stay together, for num_tiles tiles that take `warps` each: the fewest with
    which each block finds a multiprocessor of its own."""
    sizes = [count for count in FEWER_WARPS if kind == "plain" and count % unit == 0]
    alone = (count for count in sizes if num_tiles * -(-warps // count) <= MULTIPROCESSORS)
    return next(alone, BLOCK_WARPS)


def _launch(make, products, column_tiles, arrays, sizes, num_tiles, rows, split_bits, stream):
    """Launch what `make` makes for a plan's tiles; `products` of column_tiles each lie side by side in a block."""
    kind = kind_of(rows, split_bits)
    kernel = make(*next(tile for tile in TILES if tile[0] == kind and tile[1] >= rows))
    unit = products << split_bits if kind == "plain" else products
    warps = column_tiles * unit
    count = block_warps(kind, warps, num_tiles, unit)
    kernel[(num_tiles, -(-warps // count)), count * LANES, stream](*arrays, *sizes, np.int32(split_bits))


def launch_up(x, w_gate, w_up, hidden, plan, sizes, num_tiles, rows, split_bits, stream):
    """The launch of `up`; flat arrays, sizes (num_rows, length, width, capacity) as i32."""
    arrays, column_tiles = (x, w_gate, w_up, hidden, plan), -(-int(sizes[2]) // COLUMNS)
    _launch(make_up_mma, 2, column_tiles, arrays, sizes, num_tiles, rows, split_bits, stream)


def launch_down(hidden, w_down, gates, pair_out, plan, sizes, num_tiles, rows, split_bits, stream):
    """The launch of `down`; as `launch_up`."""
    arrays, column_tiles = (hidden, w_down, gates, pair_out, plan), -(-int(sizes[2]) // COLUMNS)
    _launch(make_down_mma, 1, column_tiles, arrays, sizes, num_tiles, rows, split_bits, stream)


def _specs():
    flat, bits, integers = (types.Array(t, 1, "C") for t in (types.float32, types.uint16, types.int32))
    numbers = (types.int32,) * 5
    for kind, rows in TILES:
        up, down = (flat, bits, bits, flat, integers), (flat, bits, flat, flat, integers)
        name, threads = f"mma_{kind}_{rows}", most_warps(kind) * LANES
        yield KernelSpec(f"experts_up_{name}", make_up_mma(kind, rows), up + numbers, threads)
        yield KernelSpec(f"experts_down_{name}", make_down_mma(kind, rows), down + numbers, threads)


SPECS = list(_specs())
