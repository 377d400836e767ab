"""One block's share of softmax attention on tensor cores: up to 16 query rows that see the same keys, some positions.

    weight[h, k] = exp(scale * query[h] . key[k] - peak[h]),  sums[h] = sum over k of weight[h, k] * value[k]

Keys and values come to shared memory in steps of 16, 32 or 64 positions. Warps share the scores of a step out by 16
keys and by dims, whose parts are added in order; then each makes the sums of its own columns over all the step's keys.

A product on tensor cores has bf16 factors and f32 sums. bf16 caches hold bf16 already, queries are rounded to it. An
f32 is three of them exactly, high + middle + low: so are the softmax's weights in either mode, and in f32 mode queries,
keys and values. Of the nine products of two f32 the three below 2**-24 of it are left out. An f32 that rounds to no
finite bf16, above 3.38e38, counts as infinite.

The order of every sum depends on positions and widths alone. What lies behind the last position is zeros here.
"""

from numba import cuda, float32, int32, int64, uint16, uint32

from kernels_numba.primitives import device_function
from kernels_numba.primitives_attend_steps import (
    ROWS,
    TERMS,
    make_loads,
    make_score,
    make_soften,
    make_weigh,
    pairs_of_warp,
    plan_of,
)
from kernels_numba.primitives_mma import (
    ALIGN,
    EXCHANGE,
    LANES,
    THREADS,
    WARPS,
    lanes_sum,
    pack_pair,
    put_floats,
    put_words,
    split_pair,
    wait_copies,
)


@device_function
def sums_place(slot, split, splits, width):
    """Where in scratch the sums of a slot's split stand."""
    return (int64(slot) * splits + split) * width


@device_function
def stats_place(slot, slots, split, splits, width):
    """Where in scratch the peak of a slot's split stands, and its total behind it."""
    return (int64(slots) * width + 2 * int64(slot)) * splits + 2 * split


def make_attend(key_width, value_at, columns, row_width, half, key_warps, ops):
    """(begin, finish), the work of a block: room = begin(source, first, last) takes shared memory and starts to copy.

    Then finish(room, source, first, last, rows, scale, scratch, sums_at, stats_at, splits). Positions first .. last - 1
    of the keys of query rows 0 .. rows - 1, into scratch: row h's sums at sums_at + h * splits * columns, its peak and
    total at stats_at + 2 * h * splits. In shared memory a position has key_width dims of key from 0 on and `columns` of
    value from value_at on, row_width elements in all. `ops` are device functions over `source`, a tuple of theirs, of
    which `begin` needs what `bring` does:
    - bring(source, first, last, found, tile) starts the copies of a step; `found` is a shared i32 array of its size;
    - query_pair(source, h, dim, low, stop) is dims dim and dim + 1 of query row h, 0 behind the last dim; the
      compiler knows low <= dim < stop.
    """
    plan, terms = plan_of(key_width, row_width, half, key_warps), 1 if half else TERMS
    load, load_value = make_loads(half, plan.pitch)
    score, soften = make_score(plan, terms, load), make_soften(plan)
    weigh = make_weigh(plan, terms, value_at, columns, load_value)
    keys, dim_warps, own_steps, own_rows = plan.keys, plan.dim_warps, plan.own_steps, ROWS // WARPS
    own_pairs, tile_size, work_size = pairs_of_warp(columns), keys * plan.pitch, plan.work
    held_queries, held_sums = 4 * own_steps * terms, 8 * own_pairs
    bring, query_pair = ops.bring, ops.query_pair
    tail, pitch = key_width % 16, plan.pitch
    piece, cell = (8, uint16) if half else (4, float32)  # elements of 16 bytes

    @device_function
    def load_queries(source, rows, dim_warp, lane, queries):
        for side in range(2):
            h = min(int32(lane // 4 + 8 * side), int32(rows - 1))
            for k in range(own_steps):
                low = k * dim_warps * 16
                for i in range(2):
                    dim = dim_warp * 16 + lane % 4 * 2 + (low + 8 * i)
                    a, b = query_pair(source, h, dim, low, low + dim_warps * 16)
                    if half:
                        queries[4 * k + 2 * i + side] = pack_pair(a, b)
                    else:
                        split_pair(a, b, queries, 4 * k + 2 * i + side, 4 * own_steps)

    @device_function
    def leave(sums, peaks, totals, warp, lane, rows, scratch, places, splits, words):
        for side in range(2):
            h = lane // 4 + 8 * side
            if h < rows:
                at = places[0] + int64(h) * splits * columns
                for i in range(own_pairs):
                    for n in range(2):
                        column = (warp * own_pairs + i) * 16 + 8 * n + lane % 4 * 2
                        if column < columns:
                            place = 8 * i + 4 * n + 2 * side
                            put_floats(scratch, at + column, sums[place], sums[place + 1])
        lanes_sum(totals, own_rows, words)
        for o in range(own_rows):
            h = warp * own_rows + o
            if lane == 0 and h < rows:
                put_floats(scratch, places[1] + int64(h) * 2 * splits, peaks[o], totals[o])

    @cuda.jit(device=True)
    def begin(source, first, last):
        tile = cuda.shared.array(tile_size, cell, ALIGN)
        work = cuda.shared.array(work_size, uint16, ALIGN)
        factors = cuda.shared.array(ROWS, float32)
        found = cuda.shared.array(keys, int32)
        words = cuda.shared.array(EXCHANGE, uint32)
        places = cuda.shared.array(2, int64)  # needed at the end alone: no registers are kept for them
        if tail:  # dims behind a key's last, once: no copy comes there that a score would see
            zero = uint32(0)
            for key in range(int32(cuda.threadIdx.x), keys, THREADS):
                for i in range(0, 8, piece):
                    put_words(tile, int64(key) * pitch + (key_width + i), zero, zero, zero, zero)
        if first < last:
            bring(source, first, last, found, tile)
        return tile, work, factors, found, words, places

    @cuda.jit(device=True)
    def finish(room, source, first, last, rows, scale, scratch, sums_at, stats_at, splits):
        tile, work, factors, found, words, places = room
        thread = uint32(cuda.threadIdx.x)
        if thread == 0:
            places[0], places[1] = sums_at, stats_at
        warp, lane = int32(thread // uint32(LANES)), int32(thread % uint32(LANES))
        key_warp, dim_warp = int32(uint32(warp) // uint32(dim_warps)), int32(uint32(warp) % uint32(dim_warps))
        queries, sums = cuda.local.array(held_queries, uint32), cuda.local.array(held_sums, float32)
        peaks, totals = cuda.local.array(own_rows, float32), cuda.local.array(own_rows, float32)
        load_queries(source, rows, dim_warp, lane, queries)
        for i in range(held_sums):
            sums[i] = float32(0)
        for o in range(own_rows):
            peaks[o], totals[o] = float32(-float("inf")), float32(0)
        while first < last:
            wait_copies()
            cuda.syncthreads()  # the step's rows are there
            score(tile, key_warp, dim_warp, queries, work, words)
            cuda.syncthreads()  # all parts of the scores are there
            soften(work, scale, int32(min(last - first, int32(keys))), peaks, totals, factors, words)
            cuda.syncthreads()  # the weights are there
            weigh(tile, work, factors, sums, words)
            first = int32(first + keys)
            if first < last:
                cuda.syncthreads()  # the step's rows have been used: the next ones come there
                bring(source, first, last, found, tile)
        leave(sums, peaks, totals, warp, lane, rows, scratch, places, splits, words)

    return begin, finish
