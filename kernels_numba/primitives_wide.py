"""The tiles of `primitives_columns`: a warp makes 32 columns of all rows of its block.

Both sides are copied to shared memory, a chunk of K at a time: rows for the whole block, rounded to bf16 and in the
order of their use; weights for the very warp that copies them.
"""

from types import SimpleNamespace

from numba import cuda, float32, int32, int64, uint32

from kernels_numba.primitives import SIMULATED, device_function, load4, store4
from kernels_numba.primitives_columns import (
    ROWS,
    TILE_WORDS,
    commit_copies,
    copy_weights,
    make_multiply_wide,
    own_piece,
    piece_to_give,
)
from kernels_numba.primitives_mma import LANES, copy_piece, thread_here

# Tiles of 16 rows that a block takes: 65 rows, the root and a tree of 64 nodes, are 5 tiles.
ROW_TILES = (1, 2) if SIMULATED else (2, 5, 8)
# By these, chunks of K under way or in use, and the most warps of a block, for which one block fills a multiprocessor:
# memory answers some 3 us after it was asked when all ask, so that 130 KiB must be under way to get all that it can.
STAGES = {1: 3, 2: 4} if SIMULATED else {2: 10, 5: 9, 8: 8}
MOST_WARPS = {1: 2, 2: 2} if SIMULATED else {2: 10, 5: 10, 8: 9}
# Tiles of 8 columns of a warp. Lane l has column l // 4 * 4 + j of tile j, and sums of 8 columns side by side.
ACROSS = 4
WIDTH = 8 * ACROSS
WARP_WORDS = LANES * 4 * ACROSS  # u32 of a warp's chunk of weights


def shared_words(tiles, warps):
    """u32 of shared memory that a block of so many warps wants."""
    return STAGES[tiles] * (tiles * TILE_WORDS + warps * WARP_WORDS)


def make_wide_tile(tiles):
    """A tile of 16 x `tiles` rows: its functions, and the size of sums f32, in registers.

    fetch_weights(weight, column, sizes, k, last, left, place, buffers): start to copy a chunk of weights, if one is
    left, to that place of the shared buffers f32: of the lane's four columns from `column` on, from its k on, zeros
    from `last` on and from the width on. sizes = (width, length).
    fetch_rows(inputs, source, count, left, place, buffers): so `count` tiles of rows; ends a group, empty or not.
    multiply(place, sums, buffers, exchange): use what lies there.
    put(out, base, sizes, first_row, first_column, more, sums): write the sums to out, or add them there; zero them.
    """
    multiply_wide = make_multiply_wide(tiles, ACROSS)
    row_words = tiles * TILE_WORDS

    @device_function
    def fetch_weights(weight, column, sizes, k, last, left, place, buffers):
        thread = thread_here()
        if left > 0:
            width, length = sizes
            own = int64(int32(place + row_words + (thread >> 5) * WARP_WORDS + own_piece(thread)))
            for j in range(ACROSS):
                size = uint32(16) if k < last and int32(column + j) < width else uint32(0)
                at = int64(int32(int32(column + j) * length + k))
                copy_weights(buffers, own + j * (4 * LANES), weight, at, size)

    @device_function
    def fetch_rows(inputs, source, count, left, place, buffers):
        i = int32(thread_here() * 4)
        end = int32(count * TILE_WORDS) if left > 0 else int32(0)
        while i < end:
            copy_piece(buffers, int64(int32(place + i)), inputs, int64(int32(source + i)))
            i = int32(i + cuda.blockDim.x * 4)
        commit_copies()

    @device_function
    def multiply(place, sums, buffers, exchange):
        thread = thread_here()
        own = int32(place + row_words + (thread >> 5) * WARP_WORDS + piece_to_give(thread))
        multiply_wide(buffers, int64(int32(place + (thread & 31) * 4)), int64(own), sums, exchange)

    return SimpleNamespace(
        fetch_weights=fetch_weights,
        fetch_rows=fetch_rows,
        multiply=multiply,
        put=in_order([_make_put(t) for t in range(tiles)]),
        sums=tiles * ACROSS * 4,
        row_words=row_words,
    )


def _make_put(t):
    """`put` for rows' tile number t."""

    @device_function
    def put(out, base, sizes, first_row, first_column, more, sums):
        num_rows, stride, width = sizes
        lane = int32(thread_here() & 31)  # so that nothing of this lives through the loop
        for half in range(2):
            row = int32(first_row + t * ROWS + half * 8 + (lane >> 2))
            for side in range(2):
                i = t * ACROSS * 4 + half * 2 + side
                column = int32(first_column + (lane & 3) * 8 + side * 4)
                at = base + int64(row) * stride + column
                if row < num_rows:
                    if width & 3 == 0 and column < width:
                        a, b, c, d = sums[i], sums[i + 4], sums[i + 8], sums[i + 12]
                        if more:
                            e, f, g, h = load4(out, at)
                            a, b, c, d = e + a, f + b, g + c, h + d
                        store4(out, at, a, b, c, d)
                    else:
                        _put_one(out, at, column, width, more, sums[i])
                        _put_one(out, at + 1, int32(column + 1), width, more, sums[i + 4])
                        _put_one(out, at + 2, int32(column + 2), width, more, sums[i + 8])
                        _put_one(out, at + 3, int32(column + 3), width, more, sums[i + 12])
                sums[i] = sums[i + 4] = sums[i + 8] = sums[i + 12] = float32(0)

    return put


@device_function
def _put_one(out, at, column, width, more, value):
    if column < width:
        out[at] = out[at] + value if more else value


def in_order(functions):
    """A device function that calls all of them with the same seven arguments."""
    if len(functions) == 1:
        return functions[0]
    first, rest = (
        in_order(part) for part in (functions[: len(functions) // 2], functions[len(functions) // 2 :])
    )

    @device_function
    def both(a, b, c, d, e, f, g):
        first(a, b, c, d, e, f, g)
        rest(a, b, c, d, e, f, g)

    return both
