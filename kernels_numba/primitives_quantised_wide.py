"""The products of `primitives_quantised_tile` for more rows, with the same bits: rows come rounded, and are copied.

    sums[row, column] = sum over groups of K of scale[column, group] * (sum over the group of inputs * weight)

All of a block's shared memory is one array: `depth` slots, each with a chunk of the rows and of every warp's weights,
which are copied together, `depth` - 1 chunks ahead. Where K is cut, a block has one share of it.
"""

import functools
from types import SimpleNamespace

from numba import cuda, float32, int32, uint32, uint64

from kernels_numba.primitives import SIMULATED, device_function
from kernels_numba.primitives_mma import thread_here
from kernels_numba.primitives_quantised import address_of, close_group, make_wait_groups, start16
from kernels_numba.primitives_quantised_formats import CHUNK, FORMATS, ROW_BYTES

MOST_WARPS = 2 if SIMULATED else 9  # of a block, 16 columns each: 1152 tiles of columns are 128 blocks
WIDE_DEPTH = {
    1: 4,
    2: 4,
    5: 3,
    9: 3,
}  # by tiles of 8 rows; 65 rows, the root and a tree of 64 nodes, are 9 tiles


@functools.cache
def make_wide_quantised(name, tiles):
    """The tile of a format for 8 x `tiles` rows.

    start(memory, weights, starts, run) starts the first copies of weights, and touches nothing else; run = (first,
    last) elements of K, `first` whole chunks.
    accumulate(inputs, first_row, count, weights, scales, starts, run, length, memory, words, sums) goes on from there:
    scales are a pair of arrays and where they start; inputs are flat, a row's K up to whole chunks, words of two in the
    format's order; memory is a shared u32 array of tile.bytes.
    """
    form, depth = FORMATS[name](tiles), WIDE_DEPTH[tiles]
    start_chunk, start_scales, use, step = form.start, form.start_scales, form.use, form.step
    rows_bytes = 8 * tiles * 4 * ROW_BYTES
    slot = rows_bytes + MOST_WARPS * form.slot
    around, num_sums, group_bytes = depth * slot, 4 * tiles, 8 * tiles * ROW_BYTES
    weights_slot, area_bytes = form.slot, form.area
    wait_groups = make_wait_groups(depth - 2)

    @device_function
    def start(memory, weights, starts, run):
        own = uint32(rows_bytes + (int32(cuda.threadIdx.x) >> 5) * weights_slot)
        first, last = run
        for d in range(depth - 1):
            k, more = int32(first + d * CHUNK), int32((first >> 7) * step + d * step)
            start_chunk(memory, uint32(own + uint32(d * slot)), weights, starts, more, k, last)

    @device_function
    def fetch_rows(inputs, base, pitch, count, k, at, memory):
        """Start to copy the chunk at k of all rows to the slot at `at`; a row has `pitch` bytes, the first at base."""
        i, end, threads = thread_here(), int32(count << 4), int32(cuda.blockDim.x)
        while i < end:
            row, piece = int32(i >> 4), int32(i & 15)
            to = uint32(at + uint32((piece >> 2) * group_bytes + row * ROW_BYTES + (piece & 3) * 16))
            start16(
                memory,
                to,
                inputs,
                uint64(base + uint64(row) * uint64(pitch)),
                int32(2 * k + piece * 16),
                True,
            )
            i = int32(i + threads)

    @device_function
    def accumulate(inputs, first_row, count, weights, scales, starts, run, length, memory, words, sums):
        scales, scale_starts = scales
        thread, (first, last) = int32(cuda.threadIdx.x), run
        warp, end = int32(thread >> 5), int32((last + (CHUNK - 1)) & -CHUNK)
        pitch = int32(2 * ((length + (CHUNK - 1)) & -CHUNK))
        base = uint64(address_of(inputs, 0) + uint64(first_row) * uint64(pitch))
        area = uint32(around + warp * area_bytes)
        mine = uint32(rows_bytes + warp * weights_slot)
        lane_at = uint32((thread & 31) << 4)
        for d in range(depth - 1):  # the first group holds all of `start`'s copies besides
            at, k = uint32(d * slot), int32(first + d * CHUNK)
            start_scales(memory, uint32(at + mine), area, scales, scale_starts, k, last)
            if k < end:
                fetch_rows(inputs, base, pitch, count, k, at, memory)
            close_group()
        for i in range(num_sums):
            sums[i] = float32(0)
        at, free, k = uint32(0), uint32((depth - 1) * slot), first
        while k < end:
            wait_groups()
            cuda.syncthreads()  # the chunk is there for all, and the one before it has been used
            ahead = int32(k + (depth - 1) * CHUNK)
            if ahead < end:
                own = uint32(free + mine)
                start_chunk(memory, own, weights, starts, int32((ahead >> 7) * step), ahead, last)
                start_scales(memory, own, area, scales, scale_starts, ahead, last)
                fetch_rows(inputs, base, pitch, count, ahead, free, memory)
            close_group()
            rows_at = uint32(at + lane_at)
            use(memory, uint32(at + mine), area, k, memory, rows_at, uint32(group_bytes), sums, words)
            free = at
            at = uint32(at + uint32(slot))
            if at == uint32(around):
                at = uint32(0)
            k = int32(k + CHUNK)

    return SimpleNamespace(
        start=start,
        accumulate=accumulate,
        starts_of=form.starts_of,
        scales_of=form.scales_of,
        options={} if SIMULATED else {"launch_bounds": (32 * MOST_WARPS, 1)},
        bytes=around + MOST_WARPS * area_bytes,
        sums=num_sums,
    )
