"""One block's share of softmax attention: a few query rows that see the same keys, over a range of tiles of keys.

    weight[h, k] = exp(scale * query[h] . key[k] - peak[h]),  sums[h] = sum over k of weight[h, k] * value[k]

A tile is TILE = 128 keys in the order of position. Keys and queries come to shared memory in slabs, 16 bytes of a key
for each warp, copied while the slab before is used; a thread holds the scores of all rows for 4 keys, over its warp's
part of the dims, and the parts are added in the order of warps. Then a thread holds all rows x 4 columns of the sums
over its group's keys, added one by one; groups meet in pairs. A later tile shrinks what earlier ones left in scratch.

All of it is f32 on CUDA cores. In bf16 mode queries, keys and values are bf16 values, the weights are not rounded.
The order of every sum depends on positions and widths alone. What lies behind the last key of a tile gets no weight
and is not used as a value; it must only be memory.
"""

from numba import cuda, float32, int32, int64, uint32, uint64

from kernels_numba.primitives import SIMULATED, WARP, fma, load4
from kernels_numba.primitives_attend_steps import (
    KEYS,
    PITCH,
    THREADS,
    TILE,
    WARPS,
    format_of,
    group_and_column,
    groups_of,
    make_meet,
    make_score,
    make_soften,
    make_weigh,
)
from kernels_numba.primitives_dot import round_pair
from kernels_numba.primitives_words import ALIGN, store4, thread_here, wait_copies

ROWS = (4, 8, 16)  # query rows of a block
MAX_COLUMNS = 4 * THREADS
SLAB = WARPS * PITCH * 4  # words of a slab's keys
STAGE = 2 * SLAB
KEY_ROWS = TILE + KEYS  # loads ahead look at rows behind the last key
# Two blocks a multiprocessor: 128 registers a thread.
OPTIONS = {} if SIMULATED else {"launch_bounds": (THREADS, 2)}


def rows_for(wanted):
    """Query rows of a block: the fewest of ROWS that hold `wanted`, or the most there are."""
    return next((rows for rows in ROWS if rows >= wanted), ROWS[-1])


@cuda.jit(device=True, inline="always")
def sums_place(slot, split, splits, width):
    """Where in scratch the sums of a slot's split stand."""
    return (int64(slot) * splits + split) * width


@cuda.jit(device=True, inline="always")
def stats_place(slot, slots, split, splits, width):
    """Where in scratch the peak of a slot's split stands, and its total behind it."""
    return (int64(slots) * width + 2 * int64(slot)) * splits + 2 * split


def _make_score_tile(rows, half, slabs, ops):
    """score_tile(source, key_rows, stage, queries, scores): one warp's part of all scores of a tile.

    scores[h * KEYS + j] is of query h and key j * WARP + lane.
    """
    dims, score = format_of(half).dims, make_score(rows, half)
    slab_dims, room = WARPS * dims, rows * WARPS * dims
    quads, shares = slab_dims // 4, -(-room // (4 * THREADS))
    even = room % (4 * THREADS) == 0
    has_piece, fetch, fetch_query = ops.has_piece, ops.fetch, ops.fetch_query

    @cuda.jit(device=True)
    def start_slab(source, key_rows, slab, stage, queries):
        """Start this thread's copies of a slab."""
        thread = thread_here()
        buffer, piece = int64(slab & 1), uint32(thread % uint32(WARPS))
        if has_piece(slab, piece):
            keys = cuda.local.array(KEYS, int32)
            key = uint32(thread // uint32(WARPS) * KEYS)
            for j in range(
                KEYS
            ):  # all of them first: a shared load between two copies would hold up the second
                keys[j] = key_rows[uint32(key + j)]
            fetch(source, keys, slab, piece, stage, buffer * SLAB + int64(uint32((piece * PITCH + key) * 4)))
        for i in range(shares):
            share = uint32(thread + i * THREADS)
            if even or share < uint32(rows * quads):
                h, column = int32(share // uint32(quads)), int32(share % uint32(quads) * 4)
                fetch_query(source, h, slab, column, queries, buffer * room + int64(4 * share))

    @cuda.jit(device=True)
    def finish_slab(buffer, queries):
        """Wait for this thread's copies; in bf16 mode round the queries among them."""
        wait_copies()
        if half:
            thread = thread_here()
            for i in range(shares):
                share = uint32(thread + i * THREADS)
                if even or share < uint32(rows * quads):
                    at = buffer * room + int64(4 * share)
                    a, b, c, d = load4(queries, at)
                    a, b = round_pair(a, b)
                    c, d = round_pair(c, d)
                    store4(queries, at, a, b, c, d)

    @cuda.jit(device=True)
    def score_tile(source, key_rows, stage, queries, scores):
        for i in range(rows * KEYS):
            scores[i] = float32(0)
        start_slab(source, key_rows, int32(0), stage, queries)
        slab = int32(0)
        while slab < slabs:
            buffer = int64(slab & 1)
            finish_slab(buffer, queries)
            cuda.syncthreads()  # the slab is there, and the one before has been used
            if slab + 1 < slabs:
                start_slab(source, key_rows, int32(slab + 1), stage, queries)
            thread = thread_here()
            warp, lane = uint32(thread // uint32(WARP)), uint32(thread % uint32(WARP))
            if has_piece(slab, warp):
                at = buffer * SLAB + int64((warp * PITCH + lane) * 4)
                score(stage, at, queries, buffer * room + int64(warp * dims), scores)
            slab = int32(slab + 1)

    return score_tile


def make_attend(rows, half, columns, slabs, parts, ahead, ops):
    """attend(source, first, last, num_keys, scale, scratch, slot, slots), the work of a block.

    rows: query rows of a block. columns: of a value, a multiple of 8. slabs: of WARPS pieces of a key. parts: warps
    that have work in some slab. ahead: words of values a thread loads ahead, 4 or 8. `ops` are device functions over
    `source`, a tuple of theirs:
    - find_row(source, k) is what the others call the row of key k;
    - has_piece(slab, piece) says whether a key reaches there;
    - fetch(source, rows, slab, piece, stage, at) copies that piece of KEYS keys, side by side;
    - fetch_query(source, h, slab, column, queries, at) copies 4 dims of query row h, if it reaches there;
    - load_value(source, row, column, raw, at) loads 4 columns of a row's value, as words.
    """
    score_tile, soften = _make_score_tile(rows, half, slabs, ops), make_soften(rows, parts)
    weigh, meet = make_weigh(rows, half, columns, ahead, ops.load_value), make_meet(rows, columns)
    find_row, groups = ops.find_row, groups_of(columns)
    held_words, two_rows, turns = 4 * rows, 2 * rows, -(-KEY_ROWS // THREADS)
    room = max(TILE * (rows + 4), 2 * rows * WARPS * format_of(half).dims)

    @cuda.jit(device=True)
    def leave(sums, factors, later, scratch, at):
        """Put a thread's sums into scratch, or add them to what the earlier tiles left there."""
        for h in range(rows):
            i = 4 * h
            if later:
                a, b, c, d = load4(scratch, at)
                shrink = factors[h]
                sums[i], sums[i + 1] = fma(a, shrink, sums[i]), fma(b, shrink, sums[i + 1])
                sums[i + 2], sums[i + 3] = fma(c, shrink, sums[i + 2]), fma(d, shrink, sums[i + 3])
            store4(scratch, at, sums[i], sums[i + 1], sums[i + 2], sums[i + 3])
            at += int64(cuda.gridDim.x) * columns

    @cuda.jit(device=True)
    def attend(source, first, last, num_keys, scale, scratch, slot, slots):
        """Tiles first..last - 1 of num_keys keys into scratch: row h is slot + h of `slots`, split blockIdx.x."""
        stage = cuda.shared.array(STAGE, float32, ALIGN)
        weights = cuda.shared.array(room, float32, ALIGN)  # while scores are made: two slabs of queries
        key_rows = cuda.shared.array(KEY_ROWS, int32)
        factors = cuda.shared.array(rows, float32)
        peaks = cuda.shared.array(two_rows, float32)
        totals = cuda.shared.array(two_rows, float32)
        lanes = cuda.shared.array(THREADS, float32)
        plan = cuda.shared.array(
            5, int32
        )  # first and last tile, keys; this tile, its keys: too long lived for registers,
        places = cuda.shared.array(2, int64)  # as is where this split's sums and stats stand in scratch
        held = cuda.local.array(held_words, float32)  # scores, then sums
        thread = int32(thread_here())
        if thread == 0:
            plan[0], plan[1], plan[2] = first, last, num_keys
            places[0] = sums_place(slot, cuda.blockIdx.x, cuda.gridDim.x, columns)
            places[1] = stats_place(slot, slots, cuda.blockIdx.x, cuda.gridDim.x, columns)
        for h in range(thread, two_rows, THREADS):
            peaks[uint64(h)], totals[uint64(h)] = float32(-float("inf")), float32(0)
        cuda.syncthreads()  # the plan is there
        tile = first
        while tile < plan[1]:
            count = int32(min(plan[2] - tile * TILE, TILE))
            if thread_here() == 0:
                plan[3], plan[4] = tile, count
            for i in range(turns):
                k = int32(thread_here() + i * THREADS)
                if k < KEY_ROWS:
                    key_rows[uint32(k)] = find_row(source, int32(tile * TILE + k)) if k < count else 0
            cuda.syncthreads()  # the rows of the tile's keys are there
            score_tile(source, key_rows, stage, weights, held)
            old = int64(plan[3] & 1) * rows
            soften(held, scale, plan[4], stage, weights, factors, peaks, totals, old, lanes)
            cuda.syncthreads()  # the weights are there
            for i in range(rows * 4):
                held[i] = float32(0)
            group, column = group_and_column(columns)
            if group < groups:
                weigh(source, key_rows, group, column, plan[4], weights, held)
            meet(held, group, column, stage)
            if group == 0:
                leave(held, factors, plan[3] > plan[0], scratch, places[0] + column)
            tile = int32(plan[3] + 1)
            cuda.syncthreads()  # all in shared memory has been used: the next tile writes it
        for h in range(int32(thread_here()), rows, THREADS):
            at, now = places[1] + int64(h) * 2 * cuda.gridDim.x, int64(tile & 1) * rows + h
            scratch[uint64(at)], scratch[uint64(at + 1)] = peaks[uint64(now)], totals[uint64(now)]

    return attend
