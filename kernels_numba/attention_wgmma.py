"""The kernel of `attention` for H100-class GPUs, latents of 512 + ropes of 64 in bf16 and heads a multiple of 64.

    scratch[h, split] = sum over k of weight[h, k] * latent[k],  weight[h, k] = exp(scale * query[h] . key[k] - peak[h])

See `attention` for the formula and `primitives_attend_wgmma` for how a block makes a split. The weights are rounded to
bf16 here, as any input of a product is in bf16 mode, and added to the totals as rounded: `attention` of the other GPUs
keeps them in f32. A row's splits depend on the number of its keys alone.
"""

import numpy as np
from numba import cuda, float32, int32, int64, types, uint32

from kernels_numba.attention_combine import keys_of_row
from kernels_numba.attention_wgmma_combine import combine_items
from kernels_numba.launching import allow_shared
from kernels_numba.primitives import SIMULATED, after_previous, device_function
from kernels_numba.primitives_attend import stats_place, sums_place
from kernels_numba.primitives_attend_items import (
    HEADS,
    TILE,
    over,
    run_of,
    span_tiles,
    splits_for,
    starts_item,
    tiles_of,
)
from kernels_numba.primitives_attend_panels import (
    NO_ROW,
    PRODUCERS_AT,
    QUERY_FLOATS,
    RANK,
    ROPE,
    SCORERS_AT,
    SHARED_BYTES,
    THREADS,
    bring_tile,
    fetch_queries,
    key_here,
    make_barriers,
    put_queries,
)
from kernels_numba.primitives_attend_wgmma import meet_over_queries, score_split, weigh_split
from kernels_numba.registry import KernelSpec

if not SIMULATED:
    from kernels_numba.intrinsics_shared import policy_of, shared_address
    from kernels_numba.primitives_attend_wgmma import become_producer, become_scorer, become_weigher

CAPABILITY = (9, 0)
LOG2_E = 1.4426950408889634
MOST_ITEMS = 2048  # of rows at once: 270 MB of scratch


@device_function
def cache_row(position, last, lineage, row, context, capacity):
    """The cache row of a position of a row; 0, which is memory, where a lineage points out of the cache."""
    if position >= last:
        return int32(NO_ROW)
    found = position
    if position >= context:
        found = int32(context + lineage[row, uint32(position - context)])
    return found if uint32(found) < uint32(capacity) else int32(0)


@device_function
def tiles_and_span(keys):
    """(tiles, tiles of a split) of a row that sees that many keys."""
    tiles = tiles_of(keys)
    return tiles, span_tiles(tiles)


@device_function
def bring_items(base, latents, ropes, lineage, depths, context_len, groups, first_row, units):
    """The fourth warpgroup's part: the keys of all items of the block's run."""
    known = keys_of_row(first_row, lineage, depths, context_len)  # beside the look at the context
    context, capacity = context_len[0], int32(latents.shape[0] // RANK)
    policy = policy_of(uint32(1) if units == 1 else uint32(0))  # no other block reads these keys
    most = tiles_of(int32(context + lineage.shape[1]))
    unit, tile, stop = run_of(cuda.blockIdx.x, cuda.gridDim.x, most, units)
    count = uint32(0)
    while unit < units and unit * most < stop:
        row = int32(first_row + int32(uint32(unit) // uint32(groups)))
        keys = keys_of_row(row, lineage, depths, context_len) if row != first_row else known
        tiles, span = tiles_and_span(keys)
        tile = int32(over(tile, span) * span)
        while starts_item(unit, most, tile, tiles, stop):
            first = int32(tile * TILE)
            last = min(int32(first + span * TILE), keys)
            while first < last:
                found = cache_row(int32(first + key_here()), last, lineage, row, context, capacity)
                bring_tile(base, count, latents, ropes, found, policy)
                count += uint32(1)
                first = int32(first + TILE)
            tile += span
        unit, tile = int32(unit + 1), int32(0)


@device_function
def score_items(base, lineage, depths, context_len, scale, groups, splits, first_row, units, scratch):
    """The third warpgroup's part: the weights, peaks and totals of all items of the block's run."""
    known = keys_of_row(first_row, lineage, depths, context_len)
    most = tiles_of(int32(context_len[0] + lineage.shape[1]))
    unit, tile, stop = run_of(cuda.blockIdx.x, cuda.gridDim.x, most, units)
    count = uint32(0)
    while unit < units and unit * most < stop:
        row = int32(first_row + int32(uint32(unit) // uint32(groups)))
        keys = keys_of_row(row, lineage, depths, context_len) if row != first_row else known
        tiles, span = tiles_and_span(keys)
        split, slot = over(tile, span), int32(unit * HEADS)
        if starts_item(unit, most, int32(split * span), tiles, stop):
            meet_over_queries()
            meet_over_queries()
        while starts_item(unit, most, int32(split * span), tiles, stop):
            first = int32(split * span * TILE)
            stats_at = stats_place(slot, int32(units * HEADS), split, splits, RANK)
            last = min(int32(first + span * TILE), keys)
            count = score_split(base, count, first, last, scale, scratch, stats_at, splits)
            split += int32(1)
        unit, tile = int32(unit + 1), int32(0)


@device_function
def weigh_items(
    base, q_latent, q_rope, lineage, depths, context_len, groups, splits, first_row, units, scratch
):
    """The first two warpgroups' part: the queries and the sums of all items of the block's run."""
    held = cuda.local.array(QUERY_FLOATS, float32)
    unit, tile, stop, most = int32(0), int32(0), int32(1), int32(0)
    if units > 1:
        most = tiles_of(int32(context_len[0] + lineage.shape[1]))
        unit, tile, stop = run_of(cuda.blockIdx.x, cuda.gridDim.x, most, units)
    count = uint32(0)
    while unit < units and unit * most < stop:
        row, slot = int32(first_row + int32(uint32(unit) // uint32(groups))), int32(unit * HEADS)
        fetch_queries(q_latent, q_rope, (int64(first_row) * groups + unit) * HEADS, held)
        if units == 1:  # its queries were known before what says how many keys there are
            most = tiles_of(int32(context_len[0] + lineage.shape[1]))
            unit, tile, stop = run_of(cuda.blockIdx.x, cuda.gridDim.x, most, units)
        keys = keys_of_row(row, lineage, depths, context_len)
        tiles, span = tiles_and_span(keys)
        split = over(tile, span)
        if starts_item(unit, most, int32(split * span), tiles, stop):
            meet_over_queries()  # the last unit's have been used
            put_queries(base, held)
            meet_over_queries()  # this one's are there
        while starts_item(unit, most, int32(split * span), tiles, stop):
            first = int32(split * span * TILE)
            last = min(int32(first + span * TILE), keys)
            count = weigh_split(
                base, count, first, last, scratch, sums_place(slot, split, splits, RANK), splits
            )
            split += int32(1)
        unit, tile = int32(unit + 1), int32(0)


@cuda.jit(**({} if SIMULATED else {"launch_bounds": (THREADS, 1)}))
def attention_wgmma_kernel(
    q_latent,
    q_rope,
    latents,
    ropes,
    lineage,
    depths,
    context_len,
    scale,
    heads,
    splits,
    first_row,
    rows,
    scratch,
):
    """Each block a run of items of rows first_row .. first_row + rows - 1; arrays are flat but lineage [M, D].

    scratch is [slots, splits, RANK], then [slots, splits, 2] of peaks (powers of 2) and totals; a slot is a head of a
    row, counted from the first row's.
    """
    base = uint32(shared_address(cuda.shared.array(0, uint32)))
    base = uint32((base + uint32(1023)) & uint32(0xFFFFFC00))
    if cuda.threadIdx.x == 0:
        make_barriers(base)
    cuda.syncthreads()  # the barriers are there
    after_previous()
    groups = int32(uint32(heads) // uint32(HEADS))
    units = int32(rows * groups)
    if cuda.threadIdx.x >= PRODUCERS_AT:
        become_producer()
        bring_items(base, latents, ropes, lineage, depths, context_len, groups, first_row, units)
    elif cuda.threadIdx.x >= SCORERS_AT:
        become_scorer()
        score_items(base, lineage, depths, context_len, scale, groups, splits, first_row, units, scratch)
    else:
        become_weigher()
        weigh_items(
            *(
                base,
                q_latent,
                q_rope,
                lineage,
                depths,
                context_len,
                groups,
                splits,
                first_row,
                units,
                scratch,
            ),
        )


def wgmma_scratch(rows, heads, capacity):
    """f32 elements of scratch for that many rows over caches of that capacity; rows of more take turns."""
    splits = splits_for(capacity)
    return min(rows, max(1, MOST_ITEMS * HEADS // (splits * heads))) * splits * heads * (RANK + 2)


def can_take(q_latent, q_rope, latent_cache):
    """Whether `attend_rows` can take arguments of these shapes on the current device."""
    heads, rank, rope = *q_latent.shape[1:], q_rope.shape[2]
    fits = (rank, rope) == (RANK, ROPE) and heads % HEADS == 0 and str(latent_cache.dtype) == "uint16"
    return fits and not SIMULATED and cuda.get_current_device().compute_capability == CAPABILITY


def attend_rows(
    q_latent, q_rope, latent_cache, rope_cache, lineage, depths, context_len, scale, out, scratch, stream
):
    """`attention` of checked arguments for which `can_take` holds."""
    if not q_latent.size:
        return
    rows, heads, _ = q_latent.shape
    splits = splits_for(latent_cache.shape[0])
    at_once = min(rows, scratch.size // (splits * heads * (RANK + 2)))
    allow_shared(SPECS[0], SHARED_BYTES)
    flat = [array.reshape(-1) for array in (q_latent, q_rope, latent_cache, rope_cache)]
    flat_out = out.reshape(-1)
    for first in range(0, rows, at_once):
        some = min(at_once, rows - first)
        blocks = min(cuda.get_current_device().MULTIPROCESSOR_COUNT, some * heads // HEADS * splits)
        sizes = (np.int32(size) for size in (heads, splits, first, some))
        attention_wgmma_kernel[blocks, THREADS, stream, SHARED_BYTES](
            *flat, lineage, depths, context_len, np.float32(scale * LOG2_E), *sizes, scratch
        )
        combine_items(
            *(scratch, lineage, depths, context_len, splits, first, some, flat_out, heads, stream),
        )


_FLAT, _BITS, _COUNTS = (types.Array(dtype, 1, "C") for dtype in (types.float32, types.uint16, types.int32))
_LINEAGE = types.Array(types.int32, 2, "C")
SPECS = [
    KernelSpec(
        "attention_wgmma",
        attention_wgmma_kernel,
        (_FLAT, _FLAT, _BITS, _BITS, _LINEAGE, _COUNTS, _COUNTS, types.float32, *(types.int32,) * 4, _FLAT),
        THREADS,
        capabilities=((9, 0, "a"),),
    ),
]
