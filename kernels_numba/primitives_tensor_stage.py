"""The tiles of `primitives_tensor` whose rows lie in shared memory: all warps of a block take all of K, in stages.

    sums[row, column] = sum over k of bf16(x[row_at[row] + k]) * weight[column * length + k]

While the rows of a stage are used, those of the next are copied as f32; each thread then rounds what it copied, into
one of two buffers, where an mma lane's four words lie side by side.
"""

import functools
from types import SimpleNamespace

from numba import cuda, float32, int32, int64, uint32

from kernels_numba.primitives import SIMULATED, device_function
from kernels_numba.primitives_mma import (
    copy_or_zero,
    get_floats,
    get_words,
    multiply_chunk,
    pack_pair,
    put_words,
    thread_here,
    wait_copies,
)
from kernels_numba.primitives_tensor import (
    CHUNK,
    FEWEST_WARPS,
    MOST_WARPS,
    MULTIPLE,
    ROW_DEPTH,
    ROWS,
    SUMS,
    TURN,
    WORDS,
    column_starts,
    load_weights,
    make_plain_tile,
    share_of,
)

# Kind and rows of a tile: each warp loads its rows, of its share of K if that is split; staged, for a K that is not;
# staged, one share after the other, where many rows meet a split K.
TILES = (("plain", 8), ("plain", 16), ("staged", 16), ("staged", 32), ("staged", 64), ("shares", 64))
FEW_ROWS = 4  # of a weight whose K is not split; each warp loads them by itself
DEPTH = {1: 8, 2: 4, 4: 4}  # by tiles of 16 rows: chunks of weights under way, as PLAIN_DEPTH
BUFFER = WORDS // 2  # u32 of one buffer: 8 chunks of 16 rows
FLOATS = 2 * BUFFER  # of a stage
UNITS = BUFFER // (4 * 32 * FEWEST_WARPS)  # a thread copies four elements of two rows so often, at most


def tensor_tile(kind, rows, row_depth=None):
    """The tile of an entry of TILES; row_depth is that of a plain one, if not ROW_DEPTH's."""
    if kind == "plain":
        return make_plain_tile(rows, row_depth or ROW_DEPTH[rows])
    return make_staged_tile(rows // ROWS, kind == "shares")


def most_warps(kind):
    """Of a block: sums and totals of shares need more registers."""
    return max(MOST_WARPS // 2, FEWEST_WARPS) if kind == "shares" else MOST_WARPS


def options_for(kind):
    """What cuda.jit is told."""
    return {} if SIMULATED else {"launch_bounds": (32 * most_warps(kind), 1)}


def tiles_for(num_rows, split_bits):
    """The entries of TILES that serve as many rows, none larger than they need, for a K that is split, or not."""
    kinds = ("plain", "shares") if split_bits else ("plain",) if num_rows <= FEW_ROWS else ("staged",)
    sizes = [tile for tile in TILES if tile[0] in kinds]
    fewest = next((rows for _, rows in sizes if rows >= num_rows), sizes[-1][1])
    return [tile for tile in sizes if tile[1] <= fewest]


@functools.cache
def make_staged_tile(tiles, shares):
    """A tile of 16 x `tiles` rows, made as make_plain_tile's: of all K, which has `shares`, or is not split."""
    depth, chunks = DEPTH[tiles], min(TURN, BUFFER // (256 * tiles))
    held_words, count_sums = depth * 8, SUMS * tiles
    fetch, store = _make_stage(tiles, chunks)
    turn, other_turn = (_make_turn(tiles, chunks, depth, slot, fetch, store) for slot in (0, depth - TURN))
    twice = depth > TURN

    @device_function
    def load_share(weight, starts, base, stop, length, held):
        """Load the first weights of the elements from base to stop, below length."""
        k, last = int32(base + (int32(cuda.threadIdx.x) & 3) * MULTIPLE), min(stop, length)
        for d in range(0, depth, 2):
            load_weights(weight, starts, k, last, d * CHUNK, held, d)

    @device_function
    def load_first(weight, first_column, sizes, held):
        stop = share_of(sizes[1], sizes[2]) if shares else sizes[1]
        starts = column_starts(first_column, sizes[0], sizes[1])
        load_share(weight, starts, int32(0), stop, sizes[1], held)

    @device_function
    def add_share(x, rows, weight, starts, base, stop, length, held, sums, memory):
        """Add the elements from base to stop, below length, whose first weights are held, to the sums."""
        k, last, place = int32(base + (int32(cuda.threadIdx.x) & 3) * MULTIPLE), min(stop, length), uint32(0)
        cuda.syncthreads()  # row_at is there, and the buffers have been used
        fetch(x, rows, base, last, memory[1])
        store(rows[2], place, memory)
        while base < stop:
            place = turn(x, rows, weight, starts, k, base, last, place, held, sums, memory)
            k, base = int32(k + TURN * CHUNK), int32(base + TURN * CHUNK)
            if twice and base < stop:
                place = other_turn(x, rows, weight, starts, k, base, last, place, held, sums, memory)
                k, base = int32(k + TURN * CHUNK), int32(base + TURN * CHUNK)

    @device_function
    def start(count, first_column, sizes, sums):
        """(bits of the number of pairs of rows, row and row + 8; where the lane's columns start); zero the sums."""
        for i in range(count_sums):
            sums[i] = float32(0)
        bits = int32(0)
        while 1 << bits < min(count, 8) or 8 << bits < count << 2:
            bits = int32(bits + 1)
        return bits, column_starts(first_column, sizes[0], sizes[1])

    @device_function
    def accumulate_all(x, row_at, count, weight, first_column, sizes, held, sums, memory):
        bits, starts = start(count, first_column, sizes, sums)
        add_share(x, (row_at, count, bits), weight, starts, int32(0), sizes[1], sizes[1], held, sums, memory)

    @device_function
    def accumulate_shares(x, row_at, count, weight, first_column, sizes, held, sums, memory):
        totals = cuda.local.array(count_sums, float32)
        bits, starts = start(count, first_column, sizes, sums)
        share = share_of(sizes[1], sizes[2])
        add_share(x, (row_at, count, bits), weight, starts, int32(0), share, sizes[1], held, sums, memory)
        for i in range(count_sums):
            totals[i] = sums[i]
        for s in range(1, 1 << sizes[2]):
            for i in range(count_sums):
                sums[i] = float32(0)
            base = int32(s * share)
            load_share(weight, starts, base, base + share, sizes[1], held)
            add_share(
                x, (row_at, count, bits), weight, starts, base, base + share, sizes[1], held, sums, memory
            )
            for i in range(count_sums):
                totals[i] += sums[i]
        for i in range(count_sums):
            sums[i] = totals[i]

    accumulate = accumulate_shares if shares else accumulate_all
    return SimpleNamespace(
        load_first=load_first, accumulate=accumulate, held=held_words, sums=count_sums, floats=FLOATS
    )


def _make_turn(tiles, chunks, depth, slot, fetch, store, d=0):
    """A device function that uses TURN chunks of `held` from `slot` on and loads those `depth` later in their place.

    It is made of one function a stage, `d` chunks behind the first: so all indices into `held` are constants.
    """
    rest = d + chunks < TURN and _make_turn(tiles, chunks, depth, slot, fetch, store, d + chunks)

    @device_function
    def stage(x, rows, weight, starts, k, base, length, place, held, sums, memory):
        left = cuda.local.array(8, uint32)
        cuda.syncthreads()  # this stage's rows are in their buffer, and the other buffer has been used
        fetch(x, rows, base + (d + chunks) * CHUNK, length, memory[1])
        lane = uint32(thread_here()) & uint32(31)
        first, second = place + lane * uint32(4), place + (lane ^ uint32(4)) * uint32(4)
        for c in range(chunks):
            for tile in range(tiles):
                at = (c * tiles + tile) * 256
                left[0], left[1], left[2], left[3] = get_words(memory[0], int64(first) + at)
                left[4], left[5], left[6], left[7] = get_words(memory[0], int64(second) + (at + 128))
                multiply_chunk(left, 0, held, (slot + d + c) * 8, sums, SUMS * tile, memory[2])
            if (d + c) % 2 == 1:
                load_weights(weight, starts, k, length, (depth + d + c - 1) * CHUNK, held, slot + d + c - 1)
        place ^= uint32(BUFFER)
        store(rows[2], place, memory)
        return place

    if not rest:
        return stage

    @device_function
    def stage_and_rest(x, rows, weight, starts, k, base, length, place, held, sums, memory):
        place = stage(x, rows, weight, starts, k, base, length, place, held, sums, memory)
        return rest(x, rows, weight, starts, k, base, length, place, held, sums, memory)

    return stage_and_rest


def _make_stage(tiles, chunks):
    """(fetch, store): start to copy a stage's rows from `base` on; round them into the buffer at `to`."""

    @device_function
    def fetch(x, rows, base, length, floats):
        row_at, count, bits = rows
        thread, threads = (
            thread_here(),
            int32(cuda.blockDim.x),
        )  # so that nothing of this lives through the loop
        k = int32(base + ((thread & 7) << 2))
        for u in range(UNITS):
            unit = int32(thread + u * threads)
            if unit < int32(chunks << bits + 3):
                pair = int32((unit >> 3) & ((1 << bits) - 1))
                row = int32(((pair & 24) << 1) | (pair & 7))
                own = int32(k + ((unit >> bits + 3) << 5))
                for side in range(2):
                    size = uint32(16) if own < length and int32(row + 8 * side) < count else uint32(0)
                    at = int64(int32(row_at[row + 8 * side] + own))
                    copy_or_zero(floats, int64(unit * 4) + side * BUFFER, x, at, size)

    @device_function
    def store(bits, to, memory):
        thread, threads = thread_here(), int32(cuda.blockDim.x)
        wait_copies()
        step = int32(thread & 1)
        for u in range(UNITS):
            unit = int32(thread + u * threads)
            if unit < int32(chunks << bits + 3):
                pair, own = int32((unit >> 3) & ((1 << bits) - 1)), int64(unit * 4)
                a, b = get_floats(memory[1], own)
                c, d = get_floats(memory[1], own + 2)
                e, f = get_floats(memory[1], own + BUFFER)
                g, h = get_floats(memory[1], own + (BUFFER + 2))
                tile = int32((unit >> bits + 3) * tiles + (pair >> 3))
                lane = int32((((pair & 7) << 2) | ((thread & 7) >> 1)) ^ (step << 2))
                at = int64(to + uint32(tile * 256 + step * 128 + lane * 4))
                put_words(memory[0], at, pack_pair(a, b), pack_pair(e, f), pack_pair(c, d), pack_pair(g, h))

    return fetch, store
