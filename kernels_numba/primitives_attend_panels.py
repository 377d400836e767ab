"""Shared memory of attention on warpgroup products: panels of queries and keys, how they come there, and barriers.

Rows of 64 columns, 128 bytes, are panels; 16-byte pieces are swizzled in them as wgmma wants it: piece i of row r lies
at i ^ (r % 8). A panel of keys is at once a row operand of scores and, read across, a column operand of sums. A tile
has eight panels of latents, which are the values too, and one of ropes, whose place the tile's weights take.
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
        put_four,
        wait_phase,
    )
    from kernels_numba.intrinsics_wgmma import show_to_products

RANK, ROPE = 512, 64
GROUP = 128  # threads of a warpgroup; the first two weigh, the third scores, the fourth brings keys
WEIGHERS, SCORERS_AT, PRODUCERS_AT, THREADS = 2 * GROUP, 2 * GROUP, 3 * GROUP, 4 * GROUP
PANEL = HEADS * 128  # bytes of 64 rows of 64 columns
PANELS = (RANK + ROPE) // 64
BUFFER = PANELS * PANEL  # bytes of the queries, and of a tile of keys
BUFFERS = 2
KEYS_AT = BUFFER
FACTORS_AT = KEYS_AT + BUFFERS * BUFFER
BARRIERS_AT = FACTORS_AT + BUFFERS * 4 * HEADS  # full, then empty, 8 bytes for each buffer
SHARED_BYTES = BARRIERS_AT + 16 * BUFFERS + 1024  # the first 1024 bytes may be skipped: panels start at 1024
NO_ROW = -1  # in place of a cache row: zeros
KEYS_OF_WARP = TILE // 4  # that a warp of the fourth warpgroup brings
QUERY_TURNS = (
    HEADS * RANK // 8 // WEIGHERS
)  # 16-byte pieces of latents a weighing thread; of ropes an eighth as many
QUERY_FLOATS = 8 * QUERY_TURNS + QUERY_TURNS


@device_function
def describe(address, wide):
    """wgmma's descriptor of an operand in swizzled panels; `wide` is the panels' distance in bytes, where it counts."""
    low = uint64((address & uint32(0x3FFFF)) >> uint32(4)) | uint64(uint32(wide >> 4)) << uint64(16)
    return low | uint64(1024 >> 4) << uint64(32) | uint64(1) << uint64(62)


@device_function
def full_barrier(base, count):
    """The shared address of the barrier that the copies of the count-th tile arrive at."""
    return uint32(base + uint32(BARRIERS_AT) + uint32(8) * (count % uint32(BUFFERS)))


@device_function
def empty_barrier(base, count):
    """The shared address of the barrier that warps arrive at that have used the count-th tile."""
    return uint32(full_barrier(base, count) + uint32(8 * BUFFERS))


@device_function
def make_barriers(base):
    """Set the barriers up; one thread does."""
    for buffer in range(BUFFERS):
        make_barrier(full_barrier(base, uint32(buffer)), uint32(GROUP))
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
def await_keys(base, count):
    """Wait for the keys of the count-th tile."""
    wait_phase(full_barrier(base, count), phase_of(count))
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
def bring_tile(base, count, latents, ropes, row):
    """The fourth warpgroup starts the copies of the count-th tile; `row` is the cache row of key `key_here()`."""
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
        copy_row_piece(place, latents, index, size)
        copy_row_piece(uint32(place + uint32(4 * PANEL)), latents, index + RANK // 2, size)
    tail = uint32(tile + uint32((PANELS - 1) * PANEL))
    for turn in range(KEYS_OF_WARP // 4):
        key = uint32(eighth + uint32(turn * 4))
        found = cuda.shfl_sync(FULL, row, int32(key))
        size = uint32(16) if found >= 0 else uint32(0)
        place = uint32(tail + key * uint32(128) + (piece ^ (key % uint32(8) * uint32(16))))
        index = int64(max(found, int32(0))) * ROPE + int64(uint32(lane % uint32(8) * uint32(8)))
        copy_row_piece(place, ropes, index, size)
    arrive_with_copies(full_barrier(base, count))


@device_function
def fetch_queries(q_latent, q_rope, slot, held):
    """The weighers load the queries of heads slot .. slot + 63; `held` is a thread's QUERY_FLOATS."""
    at = slot * RANK + int64(uint32(8 * cuda.threadIdx.x))
    for i in range(QUERY_TURNS):
        for n in range(0, 8, 4):
            j = 8 * i + n
            held[j], held[j + 1], held[j + 2], held[j + 3] = load4(q_latent, at + (8 * WEIGHERS * i + n))
    at = slot * ROPE + int64(uint32(8 * cuda.threadIdx.x))
    for i in range(QUERY_TURNS // 8):
        for n in range(0, 8, 4):
            j = 8 * (QUERY_TURNS + i) + n
            held[j], held[j + 1], held[j + 2], held[j + 3] = load4(q_rope, at + (8 * WEIGHERS * i + n))


@device_function
def put_pieces(base, held, start, turns, pieces, panel):
    """`turns` 16-byte pieces a thread, of rows of `pieces`, rounded to bf16, to panels from `panel` on."""
    thread = uint32(cuda.threadIdx.x)
    row, piece = uint32(thread // uint32(pieces)), uint32(thread % uint32(pieces))
    place = uint32(base + (piece // uint32(8) + uint32(panel)) * uint32(PANEL))
    for i in range(turns):
        at_row, j = uint32(row + uint32(WEIGHERS // pieces * i)), start + 8 * i
        put_four(
            uint32(place + at_row * uint32(128) + (piece % uint32(8) ^ at_row % uint32(8)) * uint32(16)),
            pack_pair(held[j], held[j + 1]), pack_pair(held[j + 2], held[j + 3]),
            pack_pair(held[j + 4], held[j + 5]), pack_pair(held[j + 6], held[j + 7]),
        )  # fmt: skip


@device_function
def put_queries(base, held):
    """The weighers round what they fetched to bf16, in panels of shared memory."""
    put_pieces(base, held, 0, QUERY_TURNS, RANK // 8, 0)
    put_pieces(base, held, 8 * QUERY_TURNS, QUERY_TURNS // 8, ROPE // 8, PANELS - 1)
    show_to_products()
