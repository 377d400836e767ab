"""The steps of `primitives_attend`, each a device function made for a number of query rows: scores, weights, sums.

Indices into shared memory are i64 or unsigned sums of one variable part and constants: they fold into addresses, and
there is no sign to look at. Loops over registers have constant bounds, so that they unroll and nothing is in memory.
"""

import functools
from types import SimpleNamespace

from numba import cuda, float32, int32, int64, uint32, uint64

from kernels_numba.primitives import SIMULATED, WARP, exp, fma, load4, warp_max, warp_sum
from kernels_numba.primitives_words import halves_of, load_row2, load_row4, store4, thread_here

WARPS = 2 if SIMULATED else 8
THREADS = WARPS * WARP
KEYS = 4  # of a tile, a lane
TILE = KEYS * WARP
HALF, HALF_KEYS = TILE // 2, KEYS // 2
PITCH = TILE + 1  # pieces of 16 bytes from one warp's part of a slab to the next: keeps copies off one bank
KEY_WORDS = 4 * KEYS


@cuda.jit(device=True, inline="always")
def warp_and_lane():
    """This thread's warp and lane."""
    thread = thread_here()
    return int64(thread // uint32(WARP)), int64(thread % uint32(WARP))


@cuda.jit(device=True, inline="always")
def group_and_column(columns):
    """This thread's group of keys and the first of its 4 columns, of `columns`."""
    thread = thread_here()
    return int64(thread // uint32(columns // 4)), int64(thread % uint32(columns // 4)) * 4


@cuda.jit(device=True, inline="always")
def _load_f32(array, row, width, column, raw, at):
    raw[at], raw[at + 1], raw[at + 2], raw[at + 3] = load_row4(array, row, width, column)


@cuda.jit(device=True, inline="always")
def _load_bf16(array, row, width, column, raw, at):
    raw[at], raw[at + 1] = load_row2(array, row, width, column)


@cuda.jit(device=True, inline="always")
def _columns_f32(raw, at):
    return raw[at], raw[at + 1], raw[at + 2], raw[at + 3]


@cuda.jit(device=True, inline="always")
def _columns_bf16(raw, at):
    a, b = halves_of(raw[at])
    c, d = halves_of(raw[at + 1])
    return a, b, c, d


@functools.cache
def format_of(half):
    """What differs between f32 and bf16 (`half`).

    dims: elements in 16 bytes; words: of 4 columns; load(array, row, width, column, raw, at) gets 4 columns of a row as
    words; columns(raw, at) makes 4 f32 of them.
    """
    if half:
        return SimpleNamespace(dims=8, words=2, load=_load_bf16, columns=_columns_bf16)
    return SimpleNamespace(dims=4, words=4, load=_load_f32, columns=_columns_f32)


@functools.cache
def make_score(rows, half):
    """score(stage, at, queries, query_at, scores): add the products of a 16-byte piece of each of a lane's keys.

    Key j's piece stands at stage[at + 4 * WARP * j], query h's at queries[query_at + h * WARPS * dims]; its score is
    scores[h * KEYS + j].
    """
    form, pitch = format_of(half), WARPS * format_of(half).dims
    parts, words, columns = form.dims // 4, form.words, form.columns

    @cuda.jit(device=True)
    def score(stage, at, queries, query_at, scores):
        pieces, keys = cuda.local.array(KEY_WORDS, float32), cuda.local.array(KEY_WORDS, float32)
        for j in range(KEYS):
            i = 4 * j
            pieces[i], pieces[i + 1], pieces[i + 2], pieces[i + 3] = load4(stage, at + 4 * WARP * j)
        for part in range(parts):
            for j in range(KEYS):
                i = 4 * j
                keys[i], keys[i + 1], keys[i + 2], keys[i + 3] = columns(pieces, i + words * part)
            for h in range(rows):
                a, b, c, d = load4(queries, query_at + (h * pitch + 4 * part))
                for j in range(KEYS):
                    total = fma(a, keys[4 * j], scores[h * KEYS + j])
                    total = fma(b, keys[4 * j + 1], total)
                    total = fma(c, keys[4 * j + 2], total)
                    scores[h * KEYS + j] = fma(d, keys[4 * j + 3], total)

    return score


@functools.cache
def _make_gather(rows, parts, side):
    """gather(..): add the `parts` of the scores of one half (`side`) of the keys, into mine[o * KEYS + j]."""
    owned = -(-rows // WARPS)

    @cuda.jit(device=True)
    def gather(scores, scale, stage, warp, lane, mine):
        if warp < parts:
            at = warp * (rows * HALF) + lane
            for h in range(rows):
                for j in range(HALF_KEYS):
                    stage[uint64(at + (h * HALF + j * WARP))] = scores[h * KEYS + side * HALF_KEYS + j]
        cuda.syncthreads()  # all parts are there
        at = warp * HALF + lane
        for o in range(owned):
            for j in range(HALF_KEYS):
                total = float32(0)
                if warp + o * WARPS < rows:
                    for part in range(parts):
                        total += stage[uint64(at + ((part * rows + o * WARPS) * HALF + j * WARP))]
                mine[o * KEYS + side * HALF_KEYS + j] = total * scale

    return gather


@functools.cache
def make_soften(rows, parts):
    """soften(..): make weights, shared [TILE, rows + 4], of the scores of a tile's first `count` keys; 0 behind them.

    Warp w looks after rows w, w + WARPS, ..: their running peaks and totals go from [old + h] to [rows - old + h],
    `old` being 0 or `rows`, and factors[h] is what the sums of earlier tiles shrink by.
    """
    owned, kept, pitch = -(-rows // WARPS), -(-rows // WARPS) * KEYS, rows + 4
    first_half, second_half = _make_gather(rows, parts, 0), _make_gather(rows, parts, 1)

    @cuda.jit(device=True)
    def soften(scores, scale, count, stage, weights, factors, peaks, totals, old, lanes):
        warp, lane = warp_and_lane()
        mine = cuda.local.array(kept, float32)
        put = lane * pitch + warp
        cuda.syncthreads()  # the last slab has been used
        first_half(scores, scale, stage, warp, lane, mine)
        cuda.syncthreads()  # half the scores have been read
        second_half(scores, scale, stage, warp, lane, mine)
        for o in range(owned):
            owner = warp + o * WARPS < rows
            at = min(warp + o * WARPS, int64(rows - 1))
            best = float32(-float("inf"))
            for j in range(KEYS):
                if j * WARP + lane < count:
                    best = max(best, mine[o * KEYS + j])
            before = peaks[uint64(old + at)]
            peak = max(before, warp_max(best, lanes))
            shrink = float32(1) if peak == before else exp(before - peak)
            total = float32(0)
            for j in range(KEYS):
                weight = exp(mine[o * KEYS + j] - peak) if j * WARP + lane < count else float32(0)
                total += weight
                if owner:
                    weights[uint64(put + (j * WARP * pitch + o * WARPS))] = weight
            total = fma(totals[uint64(old + at)], shrink, warp_sum(total, lanes))
            if owner and lane == 0:
                factors[uint64(at)] = shrink
                peaks[uint64(rows - old + at)], totals[uint64(rows - old + at)] = peak, total

    return soften


def groups_of(columns):
    """Groups of threads that share a tile's keys when a thread has 4 of `columns`: a power of two."""
    groups = 1
    while 2 * groups * (columns // 4) <= THREADS and 2 * groups <= TILE:
        groups *= 2
    return groups


def make_weigh(rows, half, columns, ahead, load_value):
    """weigh(..): add weights x values of a group's keys below `count`, one by one, to sums[h * 4 + column].

    `ahead` words of values are loaded before they are used.
    """
    words, columns_of, pitch = format_of(half).words, format_of(half).columns, rows + 4
    group_keys, some = TILE // groups_of(columns), ahead // words

    @cuda.jit(device=True)
    def add_key(weights, weight_at, raw, at, sums):
        a, b, c, d = columns_of(raw, at)
        four = cuda.local.array(4, float32)
        for h in range(0, rows, 4):
            four[0], four[1], four[2], four[3] = load4(weights, weight_at + h)
            for i in range(4):
                weight, v = four[i], 4 * (h + i)
                sums[v], sums[v + 1] = fma(weight, a, sums[v]), fma(weight, b, sums[v + 1])
                sums[v + 2], sums[v + 3] = fma(weight, c, sums[v + 2]), fma(weight, d, sums[v + 3])

    @cuda.jit(device=True)
    def weigh(source, key_rows, group, column, count, weights, sums):
        raw, coming = cuda.local.array(ahead, float32), cuda.local.array(ahead, float32)
        key = int32(group * group_keys)
        last = int32(min(count, key + group_keys))
        for j in range(some):
            load_value(source, key_rows[uint32(key + j)], column, coming, j * words)
        while key + some <= last:
            for i in range(ahead):
                raw[i] = coming[i]
            at = int64(uint32(key * pitch))
            key = int32(key + some)
            for j in range(some):  # past the last key these are row 0 or another group's, and not used
                load_value(source, key_rows[uint32(key + j)], column, coming, j * words)
            for j in range(some):
                add_key(weights, at + j * pitch, raw, j * words, sums)
        while key < last:
            load_value(source, key_rows[uint32(key)], column, raw, 0)
            add_key(weights, int64(uint32(key * pitch)), raw, 0, sums)
            key = int32(key + 1)

    return weigh


@functools.cache
def make_meet(rows, columns):
    """meet(sums, group, column, stage): add the sums of all groups into group 0, in pairs, the far half first."""
    groups, size = groups_of(columns), rows * columns

    @cuda.jit(device=True)
    def meet(sums, group, column, stage):
        mine, half = group * size + column, int64(groups // 2)
        while half > 0:
            if group >= half and group < 2 * half:
                for h in range(rows):
                    at, i = mine - half * size + h * columns, 4 * h
                    store4(stage, at, sums[i], sums[i + 1], sums[i + 2], sums[i + 3])
            cuda.syncthreads()  # the far half has given its sums
            if group < half:
                for h in range(rows):
                    a, b, c, d = load4(stage, mine + h * columns)
                    i = 4 * h
                    sums[i], sums[i + 1] = sums[i] + a, sums[i + 1] + b
                    sums[i + 2], sums[i + 3] = sums[i + 2] + c, sums[i + 3] + d
            cuda.syncthreads()  # and they have been added
            half //= 2

    return meet
