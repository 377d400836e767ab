"""A warp's sums of 16 columns of weight and up to 8 rows over one share of K, both sides through a ring of its own.

    sums[row, column] = sum over k of bf16(x[start + k]) * weight[column * length + k]

A ring has `depth` chunks of 32 elements in shared memory under way or in use, 1 KiB of weights and 128 bytes a row
each. A lane copies what it will read itself: warps do not wait for each other. Chunks are taken in order, two mma each.
"""

import functools
from types import SimpleNamespace

import numpy as np
from numba import cuda, int32, int64, uint32

from kernels_numba.primitives import device_function, load4
from kernels_numba.primitives_columns import (
    CHUNK,
    commit_copies,
    copy_shared,
    copy_weights,
    wait_copies_but,
)
from kernels_numba.primitives_mma import LANES, get_words, multiply_chunk, pack_pair

WEIGHT_WORDS, ROW_WORDS = LANES * 8, CHUNK  # u32 of a chunk of weights, of one of a row
NONE = np.uint32(0)


@device_function
def fetch_columns(weight, column, sizes, k, last, own, buffers):
    """Start to copy eight elements at k of a column to the buffers' [own], and of that 8 further to 4 * LANES behind.

    Zeros from `last` and the width on; sizes (width, length).
    """
    width, length = sizes
    for side in range(2):
        size = uint32(16) if k < last and int32(column + 8 * side) < width else uint32(0)
        at = int64(int32(int32(column + 8 * side) * length + k))
        copy_weights(buffers, own + side * (4 * LANES), weight, at, size)


@device_function
def _fetch_weights(weight, column, sizes, k, last, place, buffers):
    """The lane's two columns, to its own places."""
    own = int64(int32(place + (int32(cuda.threadIdx.x) & 31) * 4))
    fetch_columns(weight, column, sizes, k, last, own, buffers)


@device_function
def _fetch_row(x, start, k, last, there, place, pitch, buffers):
    """The same of the lane's row, f32, if it is `there`; ends a group of copies."""
    if there:
        size = uint32(16) if k < last else uint32(0)
        to, at = int64(int32(place + (int32(cuda.threadIdx.x) & 31) * 4)), int64(int32(start + k))
        copy_shared(buffers, to, x, at, size)
        copy_shared(buffers, to + pitch, x, at + 4, size)
    commit_copies()


@functools.cache
def make_ring(depth):
    """The ring of `depth` chunks: `start_weights`, `start_rows`, then `add`, which ends with no copy under way.

    `place` is (the ring's first word in `buffers`, words a chunk, words of half a row's chunk times rows). k and last
    are the lane's first element and the end of the share of `share` elements; sizes (width, length). A row's x begins
    at `start` if it is `there`. held and left u32 [8], sums f32 [8] in registers; left's words of no row are zero.
    """
    wait, wait_all, ahead = wait_copies_but(depth - 2), wait_copies_but(0), depth - 1

    @device_function
    def start_weights(weight, column, sizes, k, last, place, buffers):
        first_place, stage_words, _ = place
        for d in range(ahead):
            to = int32(first_place + d * stage_words)
            _fetch_weights(weight, column, sizes, int32(k + d * CHUNK), last, to, buffers)

    @device_function
    def start_rows(x, start, there, k, last, place, buffers):
        first_place, stage_words, pitch = place
        for d in range(ahead):
            to = int32(first_place + d * stage_words + WEIGHT_WORDS)
            _fetch_row(x, start, int32(k + d * CHUNK), last, there, to, pitch, buffers)

    @device_function
    def add(x, start, there, weight, column, sizes, k, last, share, place, buffers, held, left, sums, words):
        first_place, stage_words, pitch = place
        lane = int32(int32(cuda.threadIdx.x) & 31)
        end = int32(first_place + ahead * stage_words)
        k, at, chunks = int32(k + ahead * CHUNK), end, int32(share >> 5)
        while chunks > 0:
            wait()
            _fetch_weights(weight, column, sizes, k, last, at, buffers)
            _fetch_row(x, start, k, last, there, int32(at + WEIGHT_WORDS), pitch, buffers)
            at = int32(at + stage_words) if at < end else first_place
            own = int64(int32(at + lane * 4))
            held[0], held[1], held[2], held[3] = get_words(buffers, own)
            held[4], held[5], held[6], held[7] = get_words(buffers, own + 4 * LANES)
            if there:
                a, b, c, d = load4(buffers, own + WEIGHT_WORDS)
                e, f, g, h = load4(buffers, own + int64(int32(WEIGHT_WORDS + pitch)))
                left[0], left[2] = pack_pair(a, b), pack_pair(c, d)
                left[4], left[6] = pack_pair(e, f), pack_pair(g, h)
            multiply_chunk(left, 0, held, 0, sums, 0, words)
            k, chunks = int32(k + CHUNK), int32(chunks - 1)
        wait_all()

    return SimpleNamespace(start_weights=start_weights, start_rows=start_rows, add=add)
