"""The part of `linear` for H100-class GPUs and more than a few rows: bf16 weights whose K is a multiple of 8.

    out[i, h, n] = sum over k of inputs[i, h, k] * weight[h, n, k], inputs = bf16(x)

`linear_wgmma_round` rounds the inputs first. Columns of weight are on the side of 64 of wgmma, rows of input on the
other, so that a batch costs its rows rounded up to 8. The bits are those of `linear_mma` and `linear_wide`: K is split
by the weight's shape alone, an element's sum takes the steps of 16 elements of a share in order, and on this hardware
wgmma of any number of rows and mma.sync add such a step alike. Tests on the GPU hold the kernels to the same bits.
"""

import functools

import numpy as np
from numba import cuda, float32, int32, int64, types

from kernels_numba.launching import allow_shared
from kernels_numba.linear_mma import PLAIN_SHARED
from kernels_numba.primitives import SIMULATED, after_previous
from kernels_numba.primitives_linear_barriers import (
    GROUP,
    TILE,
    align_words,
    arrive,
    show_to_products,
    wait_phase,
)
from kernels_numba.primitives_linear_plan import MOST_GROUPS, SHARED_LIMIT, shared_bytes_of
from kernels_numba.primitives_linear_wgmma import (
    BRINGING,
    CHUNK,
    FILLING,
    ROW_WORDS,
    ROWS,
    bring_inputs,
    bring_weights,
    column_here,
    make_barriers,
    make_tile,
    next_stage,
    place_of,
)
from kernels_numba.primitives_mma import LANES
from kernels_numba.registry import KernelSpec

CAPABILITY = (9, 0)


def threads_of(groups):
    """Threads of a block in which so many groups multiply."""
    return GROUP * groups + BRINGING


@functools.cache
def make_linear_wgmma(rows):
    """The kernel for products of `rows` rows."""
    tile = make_tile(rows)
    multiply, put, num_sums = tile.multiply, tile.put, tile.sums
    options = {} if SIMULATED else {"launch_bounds": (threads_of(MOST_GROUPS[rows]), 1)}

    @cuda.jit(**options)
    def linear_wgmma_kernel(
        inputs,
        weight,
        out,
        num_rows,
        num_heads,
        width,
        length,
        share,
        split_bits,
        apart_bits,
        columns,
        stages,
    ):
        """Flat inputs as `linear_wgmma_round` wrote them, and weight [num_heads, width, length].

        With apart_bits = split_bits each share is an item: out [1 << split_bits, num_rows, num_heads, width]. With 0
        an item is all shares in turn: out [num_rows, num_heads, width]. A block takes every gridDim.x-th item: tiles of
        rows of the same columns run side by side and share the weights in L2. The first weights are on their way
        before the launch ahead has ended.
        """
        buffers = cuda.shared.array(0, float32)
        sums = cuda.local.array(num_sums, float32)
        base, group = align_words(buffers), int32(cuda.threadIdx.x // GROUP)
        groups = int32((cuda.blockDim.x - BRINGING) // GROUP)
        behind = int32(cuda.threadIdx.x - groups * GROUP)  # of the groups that multiply
        apart, all_rows = int32(1 << apart_bits), int32((num_rows + 7) & ~7)
        weight_words = int32(columns * ROW_WORDS)
        stage_words = int32(weight_words + min(int32(rows), all_rows) * ROW_WORDS)
        barriers = int32(base + stages * stage_words)
        if cuda.threadIdx.x == 0:
            make_barriers(buffers, barriers, stages, groups)
            show_to_products()  # the barriers, to copies
        cuda.syncthreads()  # the barriers are there
        share_chunks = int32(share // CHUNK)
        chunks = int32(share_chunks << (split_bits - apart_bits))
        row_tiles, blocks = int32((num_rows + (rows - 1)) // rows), int32((width + columns - 1) // columns)
        items = int32(row_tiles * blocks * num_heads * apart)
        ring = base, barriers, stages, stage_words, weight_words
        work = row_tiles, blocks, columns, apart, share_chunks, chunks
        if behind >= 0 and behind < FILLING:
            bring_weights(buffers, ring, weight, work, width, length, share, items)
        after_previous()
        if behind == FILLING:
            bring_inputs(buffers, ring, inputs, work, rows, all_rows, split_bits, items)
        item, stage, phase = int32(cuda.blockIdx.x), int32(0), int32(0)
        if behind >= 0:
            item = items  # nothing more to do
        for i in range(num_sums):
            sums[i] = float32(0)
        while item < items:
            row_tile, rest = int32(item % row_tiles), int32(item // row_tiles)
            first_column, head, split = place_of(rest, blocks, columns, apart)
            left, until = chunks, int32(chunks - share_chunks)
            while left > 0:
                place, full = int32(base + stage * stage_words), int32(barriers + 2 * stage)
                wait_phase(buffers, full, phase)
                show_to_products()
                columns_at = int32(place + group * (TILE * ROW_WORDS))
                multiply(buffers, columns_at, int32(place + weight_words), sums)
                left = int32(left - 1)
                if cuda.threadIdx.x & (LANES - 1) == 0:
                    arrive(buffers, int32(full + 2 * stages))
                stage, phase = next_stage(stage, phase, stages)
                if left == until:
                    sizes = num_rows, int64(num_heads) * width, min(int32(first_column + columns), width)
                    at = (int64(split) * num_rows * num_heads + head) * width
                    column, more = (
                        int32(first_column + column_here(group)),
                        left < int32(chunks - share_chunks),
                    )
                    put(out, at, sizes, int32(row_tile * rows), column, more, sums)
                    until = int32(until - share_chunks)
            item = int32(item + cuda.gridDim.x)

    return linear_wgmma_kernel


@functools.cache
def can_take():
    """Whether the current device has these products."""
    return (
        not SIMULATED and cuda.is_available() and cuda.get_current_device().compute_capability == CAPABILITY
    )


def launch_groups(inputs, weight, out, sizes, share, split_bits, tiling, stream):
    """Launch the kernel; `out` is that of shares if the tiling keeps them apart. sizes (num_rows, heads, width, K)."""
    bits, shared_bytes = split_bits if tiling.apart else 0, shared_bytes_of(tiling, sizes[0])
    cut = split_bits, bits, tiling.columns, tiling.stages
    numbers = (np.int32(number) for number in (*sizes, share, *cut))
    if shared_bytes > PLAIN_SHARED:
        allow_shared(SPECS[ROWS.index(tiling.rows)], SHARED_LIMIT)
    kernel, threads = make_linear_wgmma(tiling.rows), threads_of(tiling.groups)
    kernel[tiling.blocks, threads, stream, shared_bytes](inputs, weight, out, *numbers)


_FLAT, _BITS = types.Array(types.float32, 1, "C"), types.Array(types.uint16, 1, "C")
SPECS = [
    KernelSpec(
        f"linear_wgmma_{rows}",
        make_linear_wgmma(rows),
        (_FLAT, _BITS, _FLAT) + (types.int32,) * 9,
        threads_of(MOST_GROUPS[rows]),
        capabilities=((9, 0, "a"),),
    )
    for rows in ROWS
]
