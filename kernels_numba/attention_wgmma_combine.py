"""The last step of `attention_wgmma`: the splits of a row become one softmax average, in the order of `make_combine`.

    out[i, h] = (sum over s of 2**(peak[s] - peak) * partial[s]) / (sum over s of 2**(peak[s] - peak) * total[s])

Up to FEW splits are added by a block a head, a thread all of its four columns'; more of them by `make_combine`'s
blocks, whose warps take every eighth. The order, and so every bit, is the same.
"""

import functools

import numpy as np
from numba import cuda, float32, int32, int64, types

from kernels_numba.attention_combine import COLUMNS, WARPS, make_combine, settled_keys_of_row
from kernels_numba.primitives import (
    FULL,
    SIMULATED,
    WARP,
    after_previous,
    device_function,
    fma,
    load4,
    store4,
    warp_max,
    warp_sum,
)
from kernels_numba.primitives_attend import stats_place, sums_place
from kernels_numba.primitives_attend_items import MAX_SPLITS, over, span_tiles, tiles_of
from kernels_numba.primitives_attend_panels import RANK
from kernels_numba.primitives_attend_wgmma import power2
from kernels_numba.registry import KernelSpec

FEW = (8, 24)  # splits that a thread adds
FEW_THREADS = RANK // 4
MANY_THREADS = WARPS * WARP


@device_function
def used_splits(keys):
    """How many splits a row of that many keys has."""
    tiles = tiles_of(keys)
    return over(tiles, span_tiles(tiles))


@functools.cache
def make_few_combine(most):
    """The kernel that adds up to `most` splits, no more than a warp's lanes."""
    held_values, turns = 4 * most, most // 8

    @cuda.jit(**({} if SIMULATED else {"launch_bounds": (FEW_THREADS, 4)}))
    def attention_wgmma_few_kernel(
        scratch, settled_lineage, settled_depths, settled_context, splits, first_row, out
    ):
        """Block (head, row counted from first_row): out[row, head] of flat out [M, heads, RANK].

        How many keys the row sees is looked up before the attention ahead has ended, which does not write that.
        """
        lanes, held = cuda.shared.array(FEW_THREADS, float32), cuda.local.array(held_values, float32)
        row, head, heads = int32(cuda.blockIdx.y), int32(cuda.blockIdx.x), int32(cuda.gridDim.x)
        keys = settled_keys_of_row(int32(first_row + row), settled_lineage, settled_depths, settled_context)
        used = min(used_splits(keys), splits)
        after_previous()
        slot, slots = int32(row * heads + head), int32(cuda.gridDim.y * heads)
        column, lane = int32(4 * cuda.threadIdx.x), int32(cuda.threadIdx.x % WARP)
        place = sums_place(slot, 0, splits, RANK) + column
        for s in range(most):
            i = 4 * s
            if s < used:
                held[i], held[i + 1], held[i + 2], held[i + 3] = load4(scratch, place + s * RANK)
        peak, total, share = float32(-float("inf")), float32(0), float32(0)
        if lane < used:
            place = stats_place(slot, slots, lane, splits, RANK)
            peak, total = scratch[place], scratch[place + 1]
        highest = warp_max(peak, lanes)
        if lane < used:
            share = float32(1) if peak == highest else power2(peak - highest)
        total = warp_sum(share * total, lanes)
        e, f, g, h = float32(0), float32(0), float32(0), float32(0)
        for w in range(8):
            a, b, c, d = float32(0), float32(0), float32(0), float32(0)
            for turn in range(turns):
                s = w + 8 * turn
                i, part = 4 * s, cuda.shfl_sync(FULL, share, s)
                if s < used:
                    a, b = fma(part, held[i], a), fma(part, held[i + 1], b)
                    c, d = fma(part, held[i + 2], c), fma(part, held[i + 3], d)
            e, f, g, h = e + a, f + b, g + c, h + d
        if used == 0:
            total = float32(1)
        at = (int64(first_row) * heads + slot) * RANK + column
        store4(out, at, e / total, f / total, g / total, h / total)

    return attention_wgmma_few_kernel


@functools.cache
def make_many_combine():
    """The kernel that adds up to MAX_SPLITS splits."""
    combine = make_combine(MAX_SPLITS // WARPS, MAX_SPLITS, used_splits, power2)

    @cuda.jit(**({} if SIMULATED else {"launch_bounds": (MANY_THREADS, 2)}))
    def attention_wgmma_many_kernel(
        scratch, settled_lineage, settled_depths, settled_context, splits, first_row, out
    ):
        """Block (columns, head, row counted from first_row): out[row, head, columns] of flat out [M, heads, RANK]."""
        row, head, heads = int32(cuda.blockIdx.z), int32(cuda.blockIdx.y), int32(cuda.gridDim.y)
        keys = settled_keys_of_row(int32(first_row + row), settled_lineage, settled_depths, settled_context)
        after_previous()
        slot, slots = int32(row * heads + head), int32(cuda.gridDim.z * heads)
        at = (int64(first_row) * heads + slot) * RANK
        combine(slot, slots, int32(RANK), keys, splits, scratch, out, at)

    return attention_wgmma_many_kernel


def combine_items(scratch, lineage, depths, context_len, splits, first_row, rows, flat_out, heads, stream):
    """Rows first_row .. first_row + rows - 1 of out [M, heads, RANK] from what `attention_wgmma` left in scratch."""
    arguments = scratch, lineage, depths, context_len, np.int32(splits), np.int32(first_row), flat_out
    most = next((most for most in FEW if splits <= most), None)
    if most:
        make_few_combine(most)[(heads, rows), FEW_THREADS, stream](*arguments)
    else:
        make_many_combine()[(RANK // COLUMNS, heads, rows), MANY_THREADS, stream](*arguments)


_FLAT, _ONE = types.Array(types.float32, 1, "C"), types.Array(types.int32, 1, "C")
_SIGNATURE = (_FLAT, types.Array(types.int32, 2, "C"), _ONE, _ONE, types.int32, types.int32, _FLAT)
_CAPABILITIES = ((9, 0, "a"),)  # where `attention_wgmma` runs
SPECS = [
    KernelSpec(name, kernel, _SIGNATURE, threads, capabilities=_CAPABILITIES)
    for name, kernel, threads in (
        *((f"attention_wgmma_few_{most}", make_few_combine(most), FEW_THREADS) for most in FEW),
        ("attention_wgmma_many", make_many_combine(), MANY_THREADS),
    )
]
