"""Shared memory of attention on warpgroup products: panels of queries and keys, how they come there, and barriers.

Rows of 64 columns, 128 bytes, are panels; 16-byte pieces are swizzled in them as wgmma wants it: piece i of row r lies
at i ^ (r % 8). A panel of keys is at once a row operand of scores and, read across, a column operand of sums. A tile
has eight panels of latents, which are the values too, and one of ropes, whose place the tile's weights take. Latents
and ropes have a barrier each.
"""

from numba import cuda, int32, int64, uint32, uint64

from kernels_numba.primitives import FULL, SIMULATED, device_function, load4
from kernels_numba.primitives_attend_items import HEADS, TILE
from kernels_numba.primitives_mma import LANES, pack_pair

if not SIMULATED:
    from kernels_numba.intrinsics_shared import (
        arrive,
        arrive_with_copies,
        copy_row_piece,
        make_barrier,
        put_two,
        wait_phase,
    )
    from kernels_numba.intrinsics_wgmma import show_to_products

RANK, ROPE = 512, 64
GROUP = 128  # threads of a warpgroup; the first two weigh, the third scores, the fourth brings keys
WEIGHERS, SCORERS_AT, PRODUCERS_AT, THREADS = 2 * GROUP, 2 * GROUP, 3 * GROUP, 4 * GROUP
PANEL = HEADS * 128  # bytes of 64 rows of 64 columns
PANELS = (RANK + ROPE) // 64
BUFFER = PANELS * PANEL  # bytes of the queries, and of a tile of keys
BUFFERS, PIECES = 2, 2  # a tile's pieces are its latents and its ropes
KEYS_AT = BUFFER
FACTORS_AT = KEYS_AT + BUFFERS * BUFFER
BARRIERS_AT = FACTORS_AT + BUFFERS * 4 * HEADS  # full by pieces, then empty, 8 bytes for each buffer
SHARED_BYTES = (
    BARRIERS_AT + 8 * (PIECES + 1) * BUFFERS + 1024
)  # the first 1024 bytes may be skipped: panels start at 1024
NO_ROW = -1  # in place of a cache row: zeros
KEYS_OF_WARP = TILE // 4  # that a warp of the fourth warpgroup brings
QUERY_TURNS, ROPE_TURNS = HEADS * RANK // 4 // WEIGHERS, HEADS * ROPE // 4 // WEIGHERS  # of a weighing thread
QUERY_FLOATS = 4 * (QUERY_TURNS + ROPE_TURNS)


@device_function
def describe(address, wide):
    """wgmma's descriptor of an operand in swizzled panels; `wide` is the panels' distance in bytes, where it counts."""
    low = uint64((address & uint32(0x3FFFF)) >> uint32(4)) | uint64(uint32(wide >> 4)) << uint64(16)
    return low | uint64(1024 >> 4) << uint64(32) | uint64(1) << uint64(62)


@device_function
def full_barrier(base, count, piece):
    """The shared address of the barrier that the copies of a piece of the count-th tile arrive at."""
    return uint32(base + uint32(BARRIERS_AT + 8 * BUFFERS * piece) + uint32(8) * (count % uint32(BUFFERS)))


@device_function
def empty_barrier(base, count):
    """The shared address of the barrier that warps arrive at that have used the count-th tile."""
    return full_barrier(base, count, PIECES)


@device_function
def make_barriers(base):
    """Set the barriers up; one thread does."""
    for buffer in range(BUFFERS):
        for piece in range(PIECES):
            make_barrier(full_barrier(base, uint32(buffer), piece), uint32(GROUP))
        make_barrier(empty_barrier(base, uint32(buffer)), uint32(WEIGHERS // LANES))


@device_function
def phase_of(count):
    return uint32(count // uint32(BUFFERS) % uint32(2))


@device_function
def keys_of_tile(base, count):
    """The shared address of the buffer of the count-th tile."""
    return uint32(base + uint32(KEYS_AT) + uint32(BUFFER) * (count % uint32(BUFFERS)))


@device_function
def weights_of_tile(base, count):
    """The shared address of the panel of the count-th tile's weights, once its scores are there."""
    return uint32(keys_of_tile(base, count) + uint32((PANELS - 1) * PANEL))


@device_function
def await_keys(base, count, piece):
    """Wait for a piece of the count-th tile's keys."""
    wait_phase(full_barrier(base, count, piece), phase_of(count))
    show_to_products()


@device_function
def release(base, count):
    """A weighing warp has used the count-th tile."""
    if uint32(cuda.threadIdx.x) % uint32(LANES) == uint32(0):
        arrive(empty_barrier(base, count))


@device_function
def key_here():
    """The key of a tile whose cache row a thread of the fourth warpgroup finds, for its warp's `bring_tile`."""
    thread = uint32(cuda.threadIdx.x) - uint32(PRODUCERS_AT)
    return int32(thread // uint32(LANES) * uint32(KEYS_OF_WARP) + thread % uint32(KEYS_OF_WARP))


@device_function
def bring_tile(base, count, latents, ropes, row, policy):
    """The fourth warpgroup starts the copies of the count-th tile; `row` is the cache row of key `key_here()`.

    `policy` is how they leave the L2 cache.
    """
    thread = uint32(cuda.threadIdx.x) - uint32(PRODUCERS_AT)
    warp, lane = thread // uint32(LANES), thread % uint32(LANES)
    wait_phase(empty_barrier(base, count), phase_of(count) ^ uint32(1))
    tile = uint32(keys_of_tile(base, count) + warp * uint32(KEYS_OF_WARP * 128))
    piece, eighth = uint32(lane % uint32(8) * uint32(16)), uint32(lane // uint32(8))
    start = uint32(tile + eighth * uint32(PANEL) + piece)
    column = int64(uint32(lane * uint32(8)))
    for key in range(KEYS_OF_WARP):
        found = cuda.shfl_sync(FULL, row, key)
        size = uint32(16) if found >= 0 else uint32(0)
        place = uint32((start ^ uint32(key % 8 * 16)) + uint32(key * 128))
        index = int64(max(found, int32(0))) * RANK + column
        copy_row_piece(place, latents, index, size, policy)
        copy_row_piece(uint32(place + uint32(4 * PANEL)), latents, index + RANK // 2, size, policy)
    arrive_with_copies(full_barrier(base, count, 0))
    tail = uint32(tile + uint32((PANELS - 1) * PANEL))
    for turn in range(KEYS_OF_WARP // 4):
        key = uint32(eighth + uint32(turn * 4))
        found = cuda.shfl_sync(FULL, row, int32(key))
        size = uint32(16) if found >= 0 else uint32(0)
        place = uint32(tail + key * uint32(128) + (piece ^ (key % uint32(8) * uint32(16))))
        index = int64(max(found, int32(0))) * ROPE + int64(uint32(lane % uint32(8) * uint32(8)))
        copy_row_piece(place, ropes, index, size, policy)
    arrive_with_copies(full_barrier(base, count, 1))


@device_function
def quarter_of(i):
    """Which quarter of the rows of queries a block's i-th is: blocks that want the same begin at different ones."""
    return uint32(uint32(cuda.blockIdx.x) + uint32(i)) % uint32(4)


@device_function
def fetch_queries(q_latent, q_rope, slot, held):
    """The weighers load the queries of heads slot .. slot + 63; `held` is a thread's QUERY_FLOATS."""
    at = slot * RANK + int64(uint32(4 * cuda.threadIdx.x))
    for quarter in range(4):
        start = at + int64(uint32(quarter_of(quarter) * uint32(HEADS * RANK // 4)))
        for i in range(QUERY_TURNS // 4):
            j, place = 4 * (QUERY_TURNS // 4 * quarter + i), start + 4 * WEIGHERS * i
            held[j], held[j + 1], held[j + 2], held[j + 3] = load4(q_latent, place)
    at = slot * ROPE + int64(uint32(4 * cuda.threadIdx.x))
    for i in range(ROPE_TURNS):
        j, place = 4 * (QUERY_TURNS + i), at + 4 * WEIGHERS * i
        held[j], held[j + 1], held[j + 2], held[j + 3] = load4(q_rope, place)


@device_function
def put_piece(base, held, j, row, piece):
    """Four elements of a row of queries, the piece-th of it, rounded to bf16."""
    place = uint32(base + piece // uint32(16) * uint32(PANEL) + row * uint32(128))
    place = uint32(place + (piece // uint32(2) % uint32(8) ^ row % uint32(8)) * uint32(16))
    low, high = pack_pair(held[j], held[j + 1]), pack_pair(held[j + 2], held[j + 3])
    put_two(uint32(place + piece % uint32(2) * uint32(8)), low, high)


@device_function
def put_queries(base, held):
    """The weighers round what they fetched to bf16, in panels of shared memory."""
    thread, pieces = uint32(cuda.threadIdx.x), RANK // 4
    row, piece = uint32(thread // uint32(pieces)), uint32(thread % uint32(pieces))
    for quarter in range(4):
        start = uint32(row + quarter_of(quarter) * uint32(HEADS // 4))
        for i in range(QUERY_TURNS // 4):
            j = 4 * (QUERY_TURNS // 4 * quarter + i)
            put_piece(base, held, j, uint32(start + uint32(WEIGHERS // pieces * i)), piece)
    pieces = ROPE // 4
    row, piece = uint32(thread // uint32(pieces)), uint32(thread % uint32(pieces) + uint32(RANK // 4))
    for i in range(ROPE_TURNS):
        put_piece(base, held, 4 * (QUERY_TURNS + i), uint32(row + uint32(WEIGHERS // pieces * i)), piece)
    show_to_products()
