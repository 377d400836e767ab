"""The steps of `primitives_attend`, each a device function made for its sizes: scores, weights, sums.

Indices into shared memory are unsigned sums of one variable part and constants, so that they fold into addresses.
Loops over registers have constant bounds: they unroll, and nothing is in local memory.
"""

from types import SimpleNamespace

from numba import cuda, float32, int32, int64, uint16, uint32

from kernels_numba.primitives import SIMULATED, device_function, exp, fma
from kernels_numba.primitives_attend_copy import row_pitch
from kernels_numba.primitives_mma import (
    LANES,
    THREADS,
    WARPS,
    get_float,
    get_floats,
    lanes_max,
    load_keys,
    load_left,
    load_values,
    multiply,
    put_floats,
    split_pair,
)

ROWS = 16  # query rows of a block
TERMS = 3  # bf16 that make an f32
FEWEST_KEYS = 16  # of a step
MOST_KEY_WARPS = 1 if SIMULATED else 4  # more would leave a multiprocessor fewer blocks to hide waits with
SHARED_BYTES = 48 * 1024 - 512  # of a step: what a plain launch may have, less the small arrays


def plan_of(key_width, row_width, half, key_warps):
    """Sizes of a step of 16 * key_warps keys."""
    keys, dim_warps = FEWEST_KEYS * key_warps, WARPS // key_warps
    pitch, dim_steps = row_pitch(row_width, half), -(-key_width // 16)
    work = max(2 * dim_warps * ROWS * (keys + 4), TERMS * ROWS * (keys + 8))
    return SimpleNamespace(
        keys=keys, dim_warps=dim_warps, pitch=pitch, dim_steps=dim_steps, own_steps=-(-dim_steps // dim_warps),
        work=work, shared_bytes=keys * pitch * (2 if half else 4) + 2 * work,
    )  # fmt: skip


def pairs_of_warp(columns):
    """Pairs of 8 columns of values that a warp sums."""
    return -(-columns // (16 * WARPS))


def key_warps_for(key_width, row_width, half):
    """The key_warps of the largest step that fits into shared memory; 0 when none does."""
    fitting = (warps for warps in (4, 2, 1) if warps <= MOST_KEY_WARPS)
    sizes = {warps: plan_of(key_width, row_width, half, warps).shared_bytes for warps in fitting}
    return next((warps for warps, size in sizes.items() if size <= SHARED_BYTES), 0)


def options_for(key_width, columns, row_width, half):
    """What cuda.jit is told: two blocks a multiprocessor, 128 registers a thread, where they are enough."""
    plan = plan_of(key_width, row_width, half, key_warps_for(key_width, row_width, half))
    held = 4 * plan.own_steps * (1 if half else TERMS) + 8 * pairs_of_warp(columns)  # queries and sums
    return {} if SIMULATED else {"launch_bounds": (THREADS, 2 if held <= 80 else 1)}


def make_loads(half, pitch):
    """(keys, values): each (tile, at, held) loads the right fragments of 16 x 16 elements, 4 words for each term."""
    if half:

        @device_function
        def keys(tile, at, held):
            load_keys(tile, at, pitch, held, 0)

        @device_function
        def values(tile, at, held):
            load_values(tile, at, pitch, held, 0)

        return keys, values

    @device_function
    def split_keys(tile, at, held):
        lane = uint32(cuda.threadIdx.x) % uint32(LANES)
        at += int64(uint32(lane // uint32(4) * uint32(pitch) + lane % uint32(4) * uint32(2)))
        for n in range(2):
            for side in range(2):
                a, b = get_floats(tile, at + (8 * n * pitch + 8 * side))
                split_pair(a, b, held, 2 * n + side, 4)

    @device_function
    def split_values(tile, at, held):
        lane = uint32(cuda.threadIdx.x) % uint32(LANES)
        at += int64(uint32(lane % uint32(4) * uint32(2 * pitch) + lane // uint32(4)))
        for n in range(2):
            for side in range(2):
                place = at + (8 * side * pitch + 8 * n)
                split_pair(tile[place], tile[place + pitch], held, 2 * n + side, 4)

    return split_keys, split_values


def make_score(plan, terms, load):
    """score(tile, key_warp, dim_warp, queries, work, words): leave a warp's part of 16 x 16 scores in `work`.

    `work` is here f32 [dim_warps, ROWS, keys + 4]. Products of the low terms have sums of their own.
    """
    own, pitch, dim_warps, dim_steps = plan.own_steps, plan.pitch, plan.dim_warps, plan.dim_steps
    even, held, part_pitch = own * dim_warps == dim_steps, 4 * terms, plan.keys + 4

    @device_function
    def score(tile, key_warp, dim_warp, queries, work, words):
        right = cuda.local.array(held, uint32)
        large, small = cuda.local.array(8, float32), cuda.local.array(8, float32)
        for i in range(8):
            large[i], small[i] = float32(0), float32(0)
        for k in range(own):
            step = k * dim_warps + dim_warp
            if not even:  # a step behind the last: its queries are zeros
                step = min(step, int32(dim_steps - 1))
            load(tile, int64(uint32(key_warp * 16 * pitch + step * 16)), right)
            multiply(queries, 4 * k, right, 0, large, 0, words)
            for low in range(1, terms):
                for i in range(terms):
                    for j in range(terms):
                        if i + j == low:
                            multiply(queries, 4 * (i * own + k), right, 4 * j, small, 0, words)
        lane = uint32(cuda.threadIdx.x) % uint32(LANES)
        row = uint32(dim_warp * ROWS) + lane // uint32(4)
        at = int64(
            uint32(2) * (row * uint32(part_pitch) + uint32(key_warp * 16) + lane % uint32(4) * uint32(2))
        )
        for n in range(2):
            for side in range(2):
                i = 4 * n + 2 * side
                put_floats(
                    work,
                    at + (16 * n + 16 * side * part_pitch),
                    large[i] + small[i],
                    large[i + 1] + small[i + 1],
                )

    return score


def make_soften(plan):
    """soften(work, scale, count, peaks, totals, factors, words): weights of the scores of a step's first `count` keys.

    They take the scores' place in `work`, as u16 [TERMS, ROWS, keys + 8]. factors[h] is what sums until now shrink by.
    """
    keys, dim_warps, part_pitch, pitch = plan.keys, plan.dim_warps, plan.keys + 4, plan.keys + 8
    rows, turns = ROWS // WARPS, -(-plan.keys // LANES)
    held, full = rows * turns, plan.keys % LANES == 0

    @device_function
    def soften(work, scale, count, peaks, totals, factors, words):
        mine, both = cuda.local.array(held, float32), cuda.local.array(TERMS, uint32)
        bests = cuda.local.array(rows, float32)
        thread = uint32(cuda.threadIdx.x)
        warp, lane = thread // uint32(LANES), thread % uint32(LANES)
        at = int64(uint32(2) * (warp * uint32(rows * part_pitch) + lane))
        for o in range(rows):
            for j in range(turns):
                total = float32(0)
                if full or lane < keys:
                    for part in range(dim_warps):
                        total += get_float(work, at + 2 * ((part * ROWS + o) * part_pitch + j * LANES))
                mine[o * turns + j] = total * scale
        for o in range(rows):
            bests[o] = float32(-float("inf"))
            for j in range(turns):
                if j * LANES + lane < count:
                    bests[o] = max(bests[o], mine[o * turns + j])
        lanes_max(bests, rows, words)
        cuda.syncthreads()  # all scores have been read
        for o in range(rows):
            before = peaks[o]
            peak = max(before, bests[o])
            shrink = float32(1) if peak == before else exp(before - peak)
            total = float32(0)
            for j in range(turns):
                weight = exp(mine[o * turns + j] - peak) if j * LANES + lane < count else float32(0)
                mine[o * turns + j] = weight
                total += weight
            peaks[o], totals[o] = peak, fma(totals[o], shrink, total)
            if lane == 0:
                factors[warp * uint32(rows) + uint32(o)] = shrink
        at = int64(warp * uint32(rows * pitch) + lane)
        for o in range(0, rows, 2):
            for j in range(turns):
                split_pair(mine[o * turns + j], mine[(o + 1) * turns + j], both, 0, 1)
                if full or lane < keys:
                    for t in range(TERMS):
                        place = at + ((t * ROWS + o) * pitch + j * LANES)
                        work[place] = uint16(both[t] & uint32(0xFFFF))
                        work[place + pitch] = uint16(both[t] >> uint32(16))

    return soften


def make_weigh(plan, terms, value_at, columns, load):
    """weigh(tile, work, factors, sums, words): shrink a warp's sums, then add weights times values."""
    keys, pitch, weight_pitch = plan.keys, plan.pitch, plan.keys + 8
    pairs, own = -(-columns // 16), pairs_of_warp(columns)
    even, held_right, held_left, held_sums = pairs == own * WARPS, 4 * terms, 4 * TERMS, 8 * own

    @device_function
    def weigh(tile, work, factors, sums, words):
        right, left = cuda.local.array(held_right, uint32), cuda.local.array(held_left, uint32)
        thread = uint32(cuda.threadIdx.x)
        warp, row = int32(thread // uint32(LANES)), thread % uint32(LANES) // uint32(4)
        upper, lower = factors[row], factors[row + uint32(8)]
        for i in range(0, held_sums, 4):
            sums[i], sums[i + 1] = sums[i] * upper, sums[i + 1] * upper
            sums[i + 2], sums[i + 3] = sums[i + 2] * lower, sums[i + 3] * lower
        for step in range(keys // 16):
            for t in range(TERMS):
                load_left(work, int64(t * ROWS * weight_pitch + step * 16), weight_pitch, left, 4 * t)
            for i in range(own):
                pair = warp * own + i
                if not even:  # a pair behind the last: its sums are not used
                    pair = min(pair, int32(pairs - 1))
                load(tile, int64(uint32(pair * 16)) + (value_at + step * 16 * pitch), right)
                for low in range(TERMS - 1, -1, -1):
                    for t in range(TERMS):
                        for j in range(terms):
                            if t + j == low:
                                multiply(left, 4 * t, right, 4 * j, sums, 8 * i, words)

    return weigh
