"""The grouped expert product: each row through its chosen experts, summed in expert order. Four kernels, no host step.

    out[i] = sum over e of gates[e, i] * down_e(silu(gate_e(x[i])) * up_e(x[i]))

Experts behind the gates' last are shared: every row goes to them, its gate 1.
A pair is a row and an expert whose gate is not zero; pairs are numbered by expert, then row. `plan` lists them and cuts
those of an expert into tiles, whose rows share its weights; `up` makes hidden [pairs, I]; `down` makes gate x output
[pairs, H]; `combine` adds a row's pairs in the order of their experts. Launches are for as many tiles as there can be;
blocks without one leave at once. A row's result depends on that row alone. bf16 weights go to tensor cores
(`experts_mma`), unless their K is no multiple of 8; of one row alone `experts_one` makes the same bits.
"""

import functools

import numpy as np
from numba import cuda, float32, int32, int64, types

from kernels_numba import experts_one
from kernels_numba.checks import check, require
from kernels_numba.experts_mma import MMA_ROWS, launch_down, launch_up, split_bits_of
from kernels_numba.experts_plan import (
    MAX_CHOSEN,
    check_counts,
    gate_of,
    plan_kernel,
    plan_size,
    plan_threads,
    tile_of,
)
from kernels_numba.primitives import SIMULATED, WARP, after_previous, device_function, exp
from kernels_numba.primitives_dot import (
    RAGGED_ROWS,
    SCRATCH,
    TILES,
    chunk_of,
    make_tile,
)
from kernels_numba.primitives_lanes import THREADS, WARPS, lane_and_warp
from kernels_numba.registry import KernelSpec

COMBINE_THREADS = 8 if SIMULATED else 256
COMBINE_LOADS = 2 if SIMULATED else 8  # pairs whose loads are under way at a time
COMBINE_BLOCKS = 1 if SIMULATED else 64  # a row, at most


@device_function
def _column_offsets(first_column, width, length, columns, column_at):
    """Where the tile's columns start in a weight [width, length]; columns past the last repeat it."""
    for c in range(columns):
        column_at[c] = int32(min(int32(first_column + c), int32(width - 1)) * length)


@functools.cache
def make_up_kernel(rows, half, ragged):
    """hidden = silu(gate) * up for tiles of `rows` pairs: even warps make gate's columns, odd ones up's."""
    tile = make_tile(rows, half, ragged)
    columns, values, chunk = tile.columns, tile.values, chunk_of(half)
    accumulate, reduce, held = tile.accumulate, tile.reduce, tile.values * WARPS

    @cuda.jit(**tile.bounds)
    def up_kernel(x, w_gate, w_up, hidden, plan, num_rows, length, width, capacity):
        """Flat x [M, length], w_gate and w_up [E, width, length], hidden [pairs, width].

        Grid (tiles, blocks of columns): tiles of one expert run side by side and share its weights in L2.
        """
        after_previous()
        scratch = cuda.shared.array(SCRATCH, float32)
        partial = cuda.shared.array(held, float32)
        sums = cuda.local.array(values, float32)
        row_at = cuda.local.array(rows, int32)
        column_at = cuda.local.array(columns, int32)
        count, pair, expert = tile_of(plan, capacity)
        if count == 0:  # no tile; all threads leave
            return
        lane, warp = lane_and_warp()
        first_column = int32(((cuda.blockIdx.y * WARPS + warp) >> 1) * columns)
        for i in range(values):
            sums[i] = float32(0)
        if first_column < width:
            for r in range(rows):
                row = int32(plan[pair + min(int32(r), int32(count - 1))] - expert * num_rows)
                row_at[r] = int32(row * length)
            _column_offsets(first_column, width, length, columns, column_at)
            weight = w_up if warp & 1 else w_gate
            weight = weight[int64(expert) * width * length :]
            accumulate(x, row_at, weight, column_at, int32(lane * chunk), length, length, sums)
        reduce(sums, lane, scratch, partial, warp * values)
        cuda.syncthreads()  # both products are in `partial`
        count = plan[capacity + cuda.blockIdx.x]  # again: cheaper than a register through all of `accumulate`
        if (warp & 1) == 0:
            first_column = int32((cuda.blockIdx.y * (WARPS // 2) + (warp >> 1)) * columns)
            i = lane
            while i < values:
                r, column = int32(i // columns), int32(first_column + i % columns)
                if r < count and column < width:
                    gate, up = partial[warp * values + i], partial[(warp + 1) * values + i]
                    hidden[int64(pair + r) * width + column] = gate / (float32(1) + exp(-gate)) * up
                i = int32(i + WARP)

    return up_kernel


@functools.cache
def make_down_kernel(rows, half, ragged):
    """pair_out = gate x down(hidden) for tiles of `rows` pairs."""
    tile = make_tile(rows, half, ragged)
    columns, values, chunk = tile.columns, tile.values, chunk_of(half)
    accumulate, reduce, held = tile.accumulate, tile.reduce, tile.values * WARPS

    @cuda.jit(**tile.bounds)
    def down_kernel(hidden, w_down, gates, pair_out, plan, num_rows, length, width, capacity):
        """Flat hidden [pairs, length], w_down [E, width, length], pair_out [pairs, width]. Grid as for `up`."""
        after_previous()
        scratch = cuda.shared.array(SCRATCH, float32)
        partial = cuda.shared.array(held, float32)
        sums = cuda.local.array(values, float32)
        row_at = cuda.local.array(rows, int32)
        column_at = cuda.local.array(columns, int32)
        count, pair, expert = tile_of(plan, capacity)
        if count == 0:  # no tile; all threads leave
            return
        lane, warp = lane_and_warp()
        first_column = int32((cuda.blockIdx.y * WARPS + warp) * columns)
        for i in range(values):
            sums[i] = float32(0)
        if first_column < width:
            for r in range(rows):
                row_at[r] = int32((pair + min(int32(r), int32(count - 1))) * length)
            _column_offsets(first_column, width, length, columns, column_at)
            weight = w_down[int64(expert) * width * length :]
            accumulate(hidden, row_at, weight, column_at, int32(lane * chunk), length, length, sums)
        reduce(sums, lane, scratch, partial, warp * values)
        cuda.syncthreads()  # the sums are in `partial`
        count = plan[capacity + cuda.blockIdx.x]  # again: cheaper than a register through all of `accumulate`
        i = lane
        while i < values:
            r, column = int32(i // columns), int32(first_column + i % columns)
            if r < count and column < width:
                product = gate_of(gates, plan[pair + r]) * partial[warp * values + i]
                pair_out[int64(pair + r) * width + column] = product
            i = int32(i + WARP)

    return down_kernel


@cuda.jit
def combine_kernel(pair_out, plan, out, width, num_chosen, capacity):
    """out[i] = the sum of row i's pairs in expert order, 0 without any. Grid (column blocks, rows)."""
    after_previous()
    pairs = cuda.shared.array(MAX_CHOSEN, int32)
    order = cuda.shared.array(MAX_CHOSEN, int32)
    row, thread = int32(cuda.blockIdx.y), int32(cuda.threadIdx.x)
    own, count = int32(4 * capacity + row * num_chosen), min(plan[5 * capacity + row], num_chosen)
    for i in range(thread, num_chosen, COMBINE_THREADS):
        pairs[i] = plan[own + i]
    cuda.syncthreads()  # the row's pairs are there, behind them anything
    for i in range(thread, count, COMBINE_THREADS):
        rank = int32(0)
        for other in range(count):
            if pairs[other] < pairs[i]:
                rank = int32(rank + 1)
        order[rank] = pairs[i]
    cuda.syncthreads()  # `order` is sorted
    held = cuda.local.array(COMBINE_LOADS, float32)
    first, stride = cuda.blockIdx.x * COMBINE_THREADS + thread, cuda.gridDim.x * COMBINE_THREADS
    for column in range(first, width, stride):
        total = float32(0)
        for base in range(0, count, COMBINE_LOADS):
            for j in range(COMBINE_LOADS):
                if base + j < count:
                    held[j] = pair_out[int64(order[base + j]) * width + column]
            for j in range(COMBINE_LOADS):
                if base + j < count:
                    total += held[j]
        out[int64(row) * width + column] = total


def tile_rows_of(num_rows, num_experts, num_chosen, sizes):
    """Rows a tile, of those in `sizes`: room for twice the rows that an expert has when they spread evenly."""
    expected = -(-num_rows * num_chosen // num_experts)
    wanted = min(num_rows, max(2, 2 * expected))
    return next((rows for rows in sizes if rows >= wanted), sizes[-1])


def experts(x, gates, w_gate, w_up, w_down, hidden, out, pair_out, plan, num_chosen, stream=0):
    """out[i] = sum over e of gates[e, i] * down_e(silu(gate_e(x[i])) * up_e(x[i])). Raises LaunchError.

    x and out f32[M, H], gates f32[E, M], w_gate and w_up [E + S, I, H], w_down [E + S, H, I], all f32 or all bf16 bits
    u16. The last S experts are shared: their gates are 1. `num_chosen` is the most experts a row goes to, the shared
    among them. Scratch, with P >= M x num_chosen: hidden f32[P, I], pair_out f32[P, H], plan i32[at least
    plan_size(M, E + S, num_chosen)].
    """
    check("experts: x", x, "float32", (None, None))
    num_rows, size = x.shape
    check("experts: gates", gates, "float32", (None, num_rows))
    check("experts: w_gate", w_gate, ("float32", "uint16"), (None, None, size))
    num_experts, width, dtype = w_gate.shape[0], w_gate.shape[1], str(w_gate.dtype)
    routed = gates.shape[0]
    check_counts("experts", routed, num_experts, num_chosen, width)
    check("experts: w_up", w_up, dtype, (num_experts, width, size))
    check("experts: w_down", w_down, dtype, (num_experts, size, width))
    check("experts: hidden", hidden, "float32", (None, width))
    check("experts: out", out, "float32", (num_rows, size))
    check("experts: pair_out", pair_out, "float32", (None, size))
    check("experts: plan", plan, "int32", (None,))
    capacity = num_rows * num_chosen
    for name, array, least in (
        ("hidden", hidden, capacity),
        ("pair_out", pair_out, capacity),
        ("plan", plan, plan_size(num_rows, num_experts, num_chosen)),
    ):
        require(
            array.shape[0] >= least,
            f"experts: {name}: expected at least {least} rows, found {array.shape[0]}",
        )
    if not out.size:
        return
    half = dtype == "uint16"
    up_ragged, down_ragged = size % chunk_of(half) != 0, width % chunk_of(half) != 0
    up_bits = split_bits_of(2 * width, size, num_chosen)
    down_bits = split_bits_of(size, width, num_chosen)
    whole = half and not up_ragged and not down_ragged
    if whole and experts_one.takes(num_rows, routed, num_chosen, size * width, up_bits, down_bits):
        flat = (array.reshape(-1) for array in (x, gates, w_gate, w_up, w_down, hidden, out))
        counts = num_chosen, num_experts - routed
        experts_one.launch_one(*flat, counts, (size, width), (up_bits, down_bits), stream)
        return
    tile_sizes = tuple(TILES)
    if up_ragged or down_ragged:
        tile_sizes = RAGGED_ROWS
    elif half:
        tile_sizes = MMA_ROWS
    rows = tile_rows_of(num_rows, num_experts, num_chosen, tile_sizes)
    num_tiles = min(capacity, num_experts + capacity // rows)
    tile_bits = rows.bit_length() - 1
    m, e, k, h, i, p = (np.int32(n) for n in (num_rows, num_experts, num_chosen, size, width, capacity))
    x, gates, w_gate, w_up, w_down, hidden, out, pair_out = (
        array.reshape(-1) for array in (x, gates, w_gate, w_up, w_down, hidden, out, pair_out)
    )
    bits, tiles = np.int32(tile_bits), np.int32(num_tiles)
    plan_kernel[1, plan_threads(num_rows, num_experts), stream](gates, plan, m, e, k, bits, tiles)
    if half and not up_ragged:
        launch_up(x, w_gate, w_up, hidden, plan, (m, h, i, p), num_tiles, rows, up_bits, stream)
    else:
        grid = num_tiles, -(-2 * width // (TILES[rows][0] * WARPS))
        kernel = make_up_kernel(rows, half, up_ragged)
        kernel[grid, THREADS, stream](x, w_gate, w_up, hidden, plan, m, h, i, p)
    if half and not down_ragged:
        launch_down(hidden, w_down, gates, pair_out, plan, (m, i, h, p), num_tiles, rows, down_bits, stream)
    else:
        grid = num_tiles, -(-size // (TILES[rows][0] * WARPS))
        kernel = make_down_kernel(rows, half, down_ragged)
        kernel[grid, THREADS, stream](hidden, w_down, gates, pair_out, plan, m, i, h, p)
    grid = (min(-(-size // COMBINE_THREADS), COMBINE_BLOCKS), num_rows)
    combine_kernel[grid, COMBINE_THREADS, stream](pair_out, plan, out, h, k, p)


def _specs():
    flat, bits, integers = (types.Array(t, 1, "C") for t in (types.float32, types.uint16, types.int32))
    number = types.int32
    yield KernelSpec(
        "experts_combine", combine_kernel, (flat, integers, flat) + (number,) * 3, COMBINE_THREADS
    )
    for half, ragged, sizes in ((False, False, TILES), (False, True, RAGGED_ROWS), (True, True, RAGGED_ROWS)):
        weight = bits if half else flat
        for rows in sizes:
            name = f"{'bf16' if half else 'f32'}_{rows}{'_ragged' if ragged else ''}"
            up = (flat, weight, weight, flat, integers) + (number,) * 4
            down = (flat, weight, flat, flat, integers) + (number,) * 4
            yield KernelSpec(f"experts_up_{name}", make_up_kernel(rows, half, ragged), up, THREADS)
            yield KernelSpec(f"experts_down_{name}", make_down_kernel(rows, half, ragged), down, THREADS)


SPECS = list(_specs())
