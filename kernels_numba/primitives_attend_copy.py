"""How rows of caches come to the shared memory of `primitives_attend`, 16 bytes at a time, and how they lie there."""

from types import SimpleNamespace

from numba import cuda, int32, int64, uint32

from kernels_numba.primitives import device_function, load4
from kernels_numba.primitives_mma import (
    THREADS,
    copy_or_zero,
    copy_piece,
    pack_pair,
    put_words,
    thread_here,
)

NO_ROW = -(2**31)  # in place of a row: zeros


def row_pitch(width, half):
    """Elements from one row to the next: a width padded so that eight rows' pieces lie in different banks."""
    return -(-width // 16) * 16 + (8 if half else 4)


def make_copies(keys, row_width, half, width, offset):
    """Copies of `width` elements of each of a step's rows to `offset` of the shared row; both are multiples of 8.

    - plain(cache, index, stride, tile): rows from cache[index] on, `stride` apart;
    - listed(cache, rows, tile): row rows[k] of the cache, zeros for NO_ROW;
    - found(cache, own, rows, tile): row rows[k] of the cache; of f32 `own`, ~rows[k] where that is negative; zeros for
      NO_ROW.
    """
    dims, pitch = 8 if half else 4, row_pitch(row_width, half)
    pieces = width // dims
    count, rows_a_turn = keys * pieces, THREADS // pieces
    regular = THREADS % pieces == 0
    turns = -(-count // THREADS) if regular else 0

    @device_function
    def plain(cache, index, stride, tile):
        if regular:
            thread = uint32(cuda.threadIdx.x)
            key, piece = uint32(thread // uint32(pieces)), uint32(thread % uint32(pieces))
            at = int64(uint32(key * uint32(pitch) + piece * uint32(dims) + uint32(offset)))
            source = index + int64(key) * stride + int64(uint32(piece * uint32(dims)))
            for i in range(turns):
                if count % THREADS == 0 or thread + uint32(i * THREADS) < uint32(count):
                    copy_piece(tile, at + i * rows_a_turn * pitch, cache, source + i * rows_a_turn * stride)
        else:
            for i in range(thread_here(), int32(count), int32(THREADS)):
                key, piece = uint32(uint32(i) // uint32(pieces)), uint32(uint32(i) % uint32(pieces))
                at = int64(uint32(key * uint32(pitch) + piece * uint32(dims) + uint32(offset)))
                copy_piece(tile, at, cache, index + int64(key) * stride + int64(uint32(piece * uint32(dims))))

    @device_function
    def copy_own(own, index, tile, at):
        if half:
            a, b, c, d = load4(own, index)
            e, f, g, h = load4(own, index + 4)
            put_words(tile, at, pack_pair(a, b), pack_pair(c, d), pack_pair(e, f), pack_pair(g, h))
        else:
            copy_piece(tile, at, own, index)

    @device_function
    def listed(cache, rows, tile):
        for i in range(thread_here(), int32(count), int32(THREADS)):
            key, piece = uint32(uint32(i) // uint32(pieces)), uint32(uint32(i) % uint32(pieces))
            at = int64(uint32(key * uint32(pitch) + piece * uint32(dims) + uint32(offset)))
            row, column = rows[key], int64(uint32(piece * uint32(dims)))
            size = uint32(16) if row >= 0 else uint32(0)
            copy_or_zero(tile, at, cache, int64(max(row, int32(0))) * width + column, size)

    @device_function
    def found(cache, own, rows, tile):
        for i in range(thread_here(), int32(count), int32(THREADS)):
            key, piece = uint32(uint32(i) // uint32(pieces)), uint32(uint32(i) % uint32(pieces))
            at = int64(uint32(key * uint32(pitch) + piece * uint32(dims) + uint32(offset)))
            row, column = rows[key], int64(uint32(piece * uint32(dims)))
            if row >= 0 or row == NO_ROW:
                size = uint32(16) if row >= 0 else uint32(0)
                copy_or_zero(tile, at, cache, int64(max(row, int32(0))) * width + column, size)
            else:
                copy_own(own, int64(~row) * width + column, tile, at)

    return SimpleNamespace(plain=plain, listed=listed, found=found)
