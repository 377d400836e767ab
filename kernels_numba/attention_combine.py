"""The last step of split attention: sums of parts of the context become one softmax average, in a fixed order.

    out[i, h] = (sum over s of exp(peak[s] - peak) * partial[s]) / (sum over s of exp(peak[s] - peak) * total[s])

It also says how the context is split, for `attention` and `block_attention` alike: SHORT_SPLITS ways in whole steps of
a block, or MAX_SPLITS ways in whole tiles, whichever is the shorter split. A row of few keys is spread over blocks that
take a step each, so far as one turn of the combine holds them; from 900 keys on splits are tiles, as partial sums cost
more than they save. That depends on the shape and on the number of keys the row sees alone.
Scratch is f32 [slots, splits, width] of sums, then [slots, splits, 2] of peaks and totals. A slot is a query row; a
row of attention has one for each head.

Up to SHORT_SPLITS splits are added by a thread, all of its four columns'. Of more, a warp takes every WARPS-th from its
own on, and has all of them under way before it uses the first; then warps are added in order. Every bit is the same.
"""

import functools

import numpy as np
from numba import cuda, float32, int32, int64, types, uint32

from kernels_numba.primitives import (
    SIMULATED,
    WARP,
    after_previous,
    device_function,
    exp,
    fma,
    load4,
    load_settled,
    store4,
    warp_max,
    warp_sum,
)
from kernels_numba.primitives_attend import stats_place, sums_place
from kernels_numba.primitives_attend_steps import FEWEST_KEYS
from kernels_numba.primitives_mma import ALIGN
from kernels_numba.registry import KernelSpec

TILE = 32 if SIMULATED else 128  # positions; a multiple of every step
# With 4 groups of heads, a block for each of an H200's multiprocessors.
MAX_SPLITS = 3 if SIMULATED else 33
WARPS = 2 if SIMULATED else 8
SHORT_SPLITS = WARPS
THREADS = WARPS * WARP
FEW_THREADS = 4 * WARP  # of a block that adds few splits, at most
FEW_VALUES = 4 * SHORT_SPLITS
COLUMNS = 4 * WARP  # of a block
PARTS = WARPS * COLUMNS


def splits_for(keys):
    """The most splits that a row of up to `keys` keys has."""
    return max(1, min(SHORT_SPLITS, -(-keys // FEWEST_KEYS)), min(MAX_SPLITS, -(-keys // TILE)))


def scratch_size(slots, width, keys):
    """f32 elements of scratch for that many slots, of rows that see up to `keys` keys."""
    return slots * splits_for(keys) * (width + 2)


@device_function
def span_of(num_keys, step):
    """Positions of a split, the last one's aside, of a row that sees that many keys; `step` is a block's, a u32."""
    keys, short, long = uint32(num_keys), uint32(step * SHORT_SPLITS), uint32(TILE * MAX_SPLITS)
    by_steps = uint32((keys + short - uint32(1)) // short * step)
    return int32(min(by_steps, uint32((keys + long - uint32(1)) // long * uint32(TILE))))


@device_function
def keys_of_split(num_keys, split, step):
    """(first, last + 1) of the positions of a split of a row that sees that many keys; none where last <= first."""
    span = span_of(num_keys, step)
    first = int32(split * span)
    return first, int32(min(int32(first + span), num_keys))


@device_function
def keys_of_row(row, lineage, depths, context_len):
    """How many positions a row sees: up to its own; a padding row (lineage -1 at its own depth) the context alone."""
    depth, context = depths[row], context_len[0]
    known = depth >= 0 and depth < lineage.shape[1] and lineage[row, depth] >= 0
    return int32(context + depth + 1 if known else context)


@device_function
def settled_keys_of_row(row, lineage, depths, context_len):
    """The same, of arrays that the launch ahead does not write."""
    depth, context = load_settled(depths, int64(row)), load_settled(context_len, int64(0))
    if depth < 0 or depth >= lineage.shape[1]:
        return int32(context)
    known = load_settled(lineage, int64(row) * lineage.shape[1] + depth) >= 0
    return int32(context + depth + 1 if known else context)


def turns_for(splits):
    """Splits that a warp takes: one where that is enough, else as many as there may be. The order is the same."""
    return 1 if splits <= WARPS else -(-MAX_SPLITS // WARPS)


@device_function
def used_splits(keys):
    """How many splits a slot has; keys are (how many it sees, those of a step of the blocks before)."""
    span = uint32(max(span_of(keys[0], uint32(keys[1])), int32(1)))
    return int32((uint32(keys[0]) + span - uint32(1)) // span)


@functools.cache
def make_combine(turns, most=MAX_SPLITS, used_of=used_splits, power=exp):
    """combine(slot, slots, width, keys, splits, scratch, out, at) for up to turns * WARPS splits, and `most`.

    used_of(keys) is how many the slot has; power(peak) the weight of one that stands out by that.
    """
    held_values, looks = 4 * turns, -(-min(most, turns * WARPS) // WARP)

    @device_function
    def combine(slot, slots, width, keys, splits, scratch, out, at):
        """out[at + column] = the average of a slot, 0 where it sees no keys, for this block's columns."""
        shares = cuda.shared.array(most, float32)
        parts = cuda.shared.array(PARTS, float32, ALIGN)
        lanes = cuda.shared.array(THREADS, float32)
        used = min(used_of(keys), splits)
        thread, base = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x * COLUMNS)
        warp, lane = int32(thread // WARP), int32(thread % WARP)
        column = int32(base + 4 * lane)
        held = cuda.local.array(held_values, float32)
        place = sums_place(slot, 0, splits, width) + column
        for j in range(turns):
            s, i = warp + j * WARPS, 4 * j
            if s < used and column < width:
                held[i], held[i + 1], held[i + 2], held[i + 3] = load4(scratch, place + s * width)
            else:
                held[i], held[i + 1], held[i + 2], held[i + 3] = (
                    float32(0),
                    float32(0),
                    float32(0),
                    float32(0),
                )
        peaks, totals = cuda.local.array(looks, float32), cuda.local.array(looks, float32)
        place, peak, total = stats_place(slot, slots, 0, splits, width), float32(-float("inf")), float32(0)
        for j in range(looks):
            s = lane + j * WARP
            if s < used:
                peaks[j], totals[j] = scratch[place + 2 * s], scratch[place + 2 * s + 1]
                peak = max(peak, peaks[j])
            else:
                peaks[j], totals[j] = float32(-float("inf")), float32(0)
        peak = warp_max(peak, lanes)
        for j in range(looks):
            s = lane + j * WARP
            if s < used:
                share = float32(1) if peaks[j] == peak else power(peaks[j] - peak)
                total = fma(share, totals[j], total)
                if warp == 0:
                    shares[s] = share
        total = warp_sum(total, lanes)
        cuda.syncthreads()  # each split's share is there
        a, b, c, d = float32(0), float32(0), float32(0), float32(0)
        for j in range(turns):
            s, i = warp + j * WARPS, 4 * j
            if s < used:
                share = shares[s]
                a, b = fma(share, held[i], a), fma(share, held[i + 1], b)
                c, d = fma(share, held[i + 2], c), fma(share, held[i + 3], d)
        store4(parts, int64(4 * thread), a, b, c, d)
        cuda.syncthreads()  # the warps' parts are there
        for i in range(thread, COLUMNS, THREADS):
            if base + i < width:
                value = float32(0)
                for w in range(WARPS):
                    value += parts[w * COLUMNS + i]
                out[at + (base + i)] = value / total if used > 0 else float32(0)

    return combine


combine_all = make_combine(turns_for(MAX_SPLITS))


@cuda.jit
def attention_combine_few_kernel(
    scratch, settled_lineage, settled_depths, settled_context, width, step, splits, out
):
    """Block (columns, head, row): out[row, head, columns] of flat out [M, heads, width], of up to SHORT_SPLITS splits.

    How many keys the row sees is looked up before the attention ahead has ended, which does not write that.
    """
    shares = cuda.shared.array(SHORT_SPLITS, float32)
    lanes = cuda.shared.array(FEW_THREADS, float32)
    held = cuda.local.array(FEW_VALUES, float32)
    row, head, heads = int32(cuda.blockIdx.z), int32(cuda.blockIdx.y), int32(cuda.gridDim.y)
    thread = int32(cuda.threadIdx.x)
    lane, column = int32(thread % WARP), int32(4 * (cuda.blockIdx.x * cuda.blockDim.x + thread))
    keys = settled_keys_of_row(row, settled_lineage, settled_depths, settled_context), step
    used = min(used_splits(keys), splits)
    slot, slots = int32(row * heads + head), int32(cuda.gridDim.z * heads)
    place = sums_place(slot, 0, splits, width) + min(column, int32(width - 4))
    after_previous()
    for s in range(SHORT_SPLITS):
        if s < used:
            i = 4 * s
            held[i], held[i + 1], held[i + 2], held[i + 3] = load4(scratch, place + s * width)
    peak, total, share = float32(-float("inf")), float32(0), float32(0)
    if lane < used:
        place = stats_place(slot, slots, lane, splits, width)
        peak, total = scratch[place], scratch[place + 1]
    highest = warp_max(peak, lanes)
    if lane < used:
        share = float32(1) if peak == highest else exp(peak - highest)
        if thread < WARP:
            shares[lane] = share
    total = warp_sum(fma(share, total, float32(0)), lanes)
    cuda.syncthreads()  # each split's share is there
    a, b, c, d = float32(0), float32(0), float32(0), float32(0)
    for s in range(SHORT_SPLITS):
        if s < used:
            i, share, zero = 4 * s, shares[s], float32(0)
            a, b = a + fma(share, held[i], zero), b + fma(share, held[i + 1], zero)
            c, d = c + fma(share, held[i + 2], zero), d + fma(share, held[i + 3], zero)
    if used == 0:
        total = float32(1)
    if column < width:
        store4(out, int64(slot) * width + column, a / total, b / total, c / total, d / total)


@cuda.jit
def attention_combine_kernel(
    scratch, settled_lineage, settled_depths, settled_context, width, step, splits, out
):
    """Block (columns, head, row): the same of up to MAX_SPLITS splits."""
    row, head = cuda.blockIdx.z, cuda.blockIdx.y
    keys = settled_keys_of_row(row, settled_lineage, settled_depths, settled_context), step
    after_previous()
    slot, slots = row * cuda.gridDim.y + head, cuda.gridDim.z * cuda.gridDim.y
    combine_all(slot, slots, width, keys, splits, scratch, out, int64(slot) * width)


def combine_rows(scratch, lineage, depths, context_len, step, splits, out, stream):
    """All of out [M, heads, width] from what blocks with that step left in scratch. 4 divides width."""
    rows, heads, width = out.shape
    sizes = (np.int32(size) for size in (width, step, splits))
    kernel, threads, columns = attention_combine_kernel, THREADS, COLUMNS
    if splits <= SHORT_SPLITS:
        kernel, threads = attention_combine_few_kernel, min(FEW_THREADS, -(-width // COLUMNS) * WARP)
        columns = 4 * threads
    kernel[(-(-width // columns), heads, rows), threads, stream](
        scratch, lineage, depths, context_len, *sizes, out.reshape(-1)
    )


_FLAT, _ONE = types.Array(types.float32, 1, "C"), types.Array(types.int32, 1, "C")
_SIGNATURE = (_FLAT, types.Array(types.int32, 2, "C"), _ONE, _ONE, *(types.int32,) * 3, _FLAT)
SPECS = [
    KernelSpec("attention_combine", attention_combine_kernel, _SIGNATURE, THREADS),
    KernelSpec("attention_combine_few", attention_combine_few_kernel, _SIGNATURE, FEW_THREADS),
]
