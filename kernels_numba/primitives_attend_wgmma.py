"""One block's attention on warpgroup products: 64 heads of a row, a split of its positions, tiles of 64 keys.

    weight[h, k] = 2**(scale * log2(e) * query[h] . key[k] - peak[h]),  sums[h] = sum over k of weight[h, k] * value[k]

Four warpgroups work side by side. The fourth brings keys to two buffers. The third makes the scores of a tile and their
weights, which go to the place of its ropes. The first makes columns 0 to 255 of the sums, the second 256 to 511, while
the third is at the next tile. Weights are rounded to bf16, and so added to the totals.
"""

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from kernels_numba.primitives import FULL, SIMULATED, device_function, fma
from kernels_numba.primitives_attend_items import HEADS, TILE
from kernels_numba.primitives_attend_panels import (
    BUFFERS,
    FACTORS_AT,
    GROUP,
    PANEL,
    PANELS,
    PRODUCERS_AT,
    RANK,
    await_keys,
    describe,
    keys_of_tile,
    release,
    weights_of_tile,
)
from kernels_numba.primitives_mma import LANES, high_of, low_of, pack_pair

QUERIES, WEIGHTS, FACTORS = 1, 2, 2 + BUFFERS  # barriers, the last two for each buffer; 0 is syncthreads
MEETING = PRODUCERS_AT  # threads that meet there: all but the fourth warpgroup
# Registers of a thread: no more than 512 of the four warpgroups together.
WEIGHER_REGISTERS, SCORER_REGISTERS, PRODUCER_REGISTERS = 176, 120, 40

if SIMULATED:

    def power2(value):
        """2**value in f32."""
        return np.float32(np.exp2(np.float64(value)))

else:
    from kernels_numba.intrinsics_shared import get_real, meet, pass_by, put_real, put_word
    from kernels_numba.intrinsics_wgmma import (
        clear_sums,
        leave_sums,
        power2,
        registers_of,
        scale_sums,
        scores_over,
        show_to_products,
        start_weighing,
        wait_for,
    )

    become_weigher, become_scorer = (
        registers_of(WEIGHER_REGISTERS, True),
        registers_of(SCORER_REGISTERS, False),
    )
    become_producer = registers_of(PRODUCER_REGISTERS, False)
    start_scores, add_scores = scores_over(0, PANELS - 1), scores_over(PANELS - 1, PANELS)
    wait_scores, wait_sums = wait_for(32, 0), wait_for(128, 0)


@device_function
def meet_over_queries():
    """Scorers and weighers meet: the queries have been used, or new ones are there."""
    meet(uint32(QUERIES), uint32(MEETING))


@device_function
def find_peaks(scores, count, scale, peaks, factors):
    """The peaks of a tile's first `count` scores and those before; factors are what sums until now shrink by."""
    if count < TILE:
        column = int32(uint32(cuda.threadIdx.x) % uint32(4) * uint32(2))
        for i in range(32):
            if column + (i // 4 * 8 + i % 2) >= count:
                scores[i] = float32(-float("inf"))
    for side in range(2):
        best = scores[2 * side]
        for j in range(8):
            best = max(best, max(scores[4 * j + 2 * side], scores[4 * j + 2 * side + 1]))
        best = max(best, cuda.shfl_xor_sync(FULL, best, 1))
        best = max(best, cuda.shfl_xor_sync(FULL, best, 2))
        before = peaks[side]
        peak = max(before, best * scale)
        factors[side] = float32(1) if peak == before else power2(before - peak)
        peaks[side] = peak


@device_function
def make_weights(scores, words, scale, peaks):
    """Weights of a tile's scores, in pairs, as bf16."""
    for side in range(2):
        peak = peaks[side]
        for j in range(8):
            i = 4 * j + 2 * side
            low, high = fma(scores[i], scale, -peak), fma(scores[i + 1], scale, -peak)
            words[2 * j + side] = pack_pair(power2(low), power2(high))


@device_function
def add_weights(words, totals, factors):
    """The totals of a tile's weights, as rounded, and of those before."""
    for side in range(2):
        total = float32(0)
        for j in range(8):
            total += low_of(words[2 * j + side])
            total += high_of(words[2 * j + side])
        totals[side] = fma(totals[side], factors[side], total)


@device_function
def row_here():
    """The first of the two rows that a thread of a warpgroup has of a product; the other is 8 further."""
    thread = uint32(cuda.threadIdx.x) % uint32(GROUP)
    return uint32(thread // uint32(LANES) * uint32(16) + thread % uint32(LANES) // uint32(4))


@device_function
def factors_of(base, count):
    """The shared address of this thread's factor for the count-th tile; its other row's is 32 bytes further."""
    buffer = uint32(base + uint32(FACTORS_AT) + count % uint32(BUFFERS) * uint32(4 * HEADS))
    return uint32(buffer + row_here() * uint32(4))


@device_function
def put_factors(base, count, factors):
    """Factors of the count-th tile to shared memory."""
    if uint32(cuda.threadIdx.x) % uint32(4) == uint32(0):
        put_real(factors_of(base, count), factors[0])
        put_real(uint32(factors_of(base, count) + uint32(32)), factors[1])


@device_function
def put_weights(base, count, words):
    """Weights of the count-th tile to shared memory."""
    row, lane = row_here(), uint32(cuda.threadIdx.x) % uint32(4)
    place = uint32(weights_of_tile(base, count) + row * uint32(128) + lane * uint32(4))
    turn = uint32(row % uint32(8) * uint32(16))
    for j in range(8):
        at = uint32(place + (uint32(16 * j) ^ turn))
        put_word(at, words[2 * j])
        put_word(uint32(at + uint32(8 * 128)), words[2 * j + 1])


@device_function
def score_split(base, count, first, last, scale, scratch, stats_at, splits):
    """The third warpgroup's part of an item, whose first tile is the count-th; returns the next tile's number."""
    scores, words = cuda.local.array(32, float32), cuda.local.array(16, uint32)
    peaks, totals = cuda.local.array(2, float32), cuda.local.array(2, float32)
    factors = cuda.local.array(2, float32)
    for i in range(32):
        scores[i] = float32(0)
    peaks[0], peaks[1] = float32(-float("inf")), float32(-float("inf"))
    totals[0], totals[1] = float32(0), float32(0)
    queries = describe(base, 0)
    while first < last:
        keys = describe(keys_of_tile(base, count), 0)
        await_keys(base, count, 0)
        start_scores(scores, queries, keys)
        await_keys(base, count, 1)
        add_scores(scores, queries, keys)
        wait_scores(scores)
        find_peaks(scores, int32(last - first), scale, peaks, factors)
        put_factors(base, count, factors)
        pass_by(uint32(FACTORS) + count % uint32(BUFFERS), uint32(MEETING))
        make_weights(scores, words, scale, peaks)
        put_weights(base, count, words)
        show_to_products()
        pass_by(uint32(WEIGHTS) + count % uint32(BUFFERS), uint32(MEETING))
        add_weights(words, totals, factors)
        count += uint32(1)
        first = int32(first + TILE)
    for side in range(2):
        total = totals[side]
        total += cuda.shfl_xor_sync(FULL, total, 1)
        total += cuda.shfl_xor_sync(FULL, total, 2)
        if uint32(cuda.threadIdx.x) % uint32(4) == uint32(0):
            at = stats_at + int64(uint32(row_here() + uint32(8 * side))) * 2 * splits
            scratch[at], scratch[at + 1] = peaks[side], total
    return count


@device_function
def weigh_split(base, count, first, last, scratch, sums_at, splits):
    """The first or second warpgroup's columns of an item; returns the next tile's number."""
    side = uint32(uint32(cuda.threadIdx.x) // uint32(GROUP))
    sums = cuda.local.array(128, float32)
    clear_sums(sums)
    while first < last:
        meet(uint32(FACTORS) + count % uint32(BUFFERS), uint32(MEETING))  # factors are there
        factor = factors_of(base, count)
        scale_sums(sums, get_real(factor), get_real(uint32(factor + uint32(32))))
        meet(uint32(WEIGHTS) + count % uint32(BUFFERS), uint32(MEETING))  # weights are there, and so keys
        values = uint32(keys_of_tile(base, count) + side * uint32(PANELS // 2 * PANEL))
        start_weighing(sums, describe(weights_of_tile(base, count), 0), describe(values, PANEL))
        wait_sums(sums)
        release(base, count)
        count += uint32(1)
        first = int32(first + TILE)
    lane = uint32(uint32(cuda.threadIdx.x) % uint32(4))
    column = uint32(side * uint32(RANK // 2) + lane * uint32(2) + lane % uint32(2) * uint32(6))
    place = sums_at + int64(row_here()) * splits * RANK + int64(column)
    leave_sums(sums, scratch, place, place + int64(8 * RANK) * splits)
    return count
