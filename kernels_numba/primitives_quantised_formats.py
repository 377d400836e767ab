"""How each format of quantised weights is fetched, multiplied and scaled, a chunk of 128 elements of K at a time.

    int4    sums += scale * (sum over 32 elements of x * (nibble - 8))
    fp8     sums += scale * (sum over 128 elements of x * e4m3)

A warp's tile is 16 weight rows in two halves of 8, of one weight or of two, by 8 x `tiles` rows of x. A chunk of it is
a slot of the warp's ring in shared memory: the halves as `place_of` says, then their scales. The rows of x lie
there rounded, a row's 32 elements of a group in 64 bytes, as words that mma takes; rows of a group side by side.
"""

import functools
from types import SimpleNamespace

from numba import cuda, float32, int32, int64, uint32

from kernels_numba.primitives import device_function, float_from_bits, fma
from kernels_numba.primitives_mma import high_of, low_of, pack_pair
from kernels_numba.primitives_quantised import (
    address_of,
    expand_bytes,
    expand_nibbles,
    half_at,
    make_load_matrices,
    multiply32,
    nan_bytes,
    place_of,
    spoiled,
    start4,
    start16,
    take1,
    take2,
    take4,
)

CHUNK = 128  # elements of K
SCALED = 1024  # elements of K whose INT4 scales are fetched at a time: 64 bytes of a row
SCALES_PITCH = 2 * 64 + 16  # bytes of a row of scales; rows do not meet in a bank
ROW_BYTES = 64  # of a row of x in a group of 32 elements
MINUS_ZERO = uint32(0x80000000)  # the bits of f32 -0


@device_function
def lane_of():
    return int32(int32(cuda.threadIdx.x) & 31)


@device_function
def columns_of(first, apart, width, expert):
    """The lane's rows of both halves among the rows of all experts; a column past the last repeats it."""
    row, before, last = int32(lane_of() >> 2), int64(expert) * width, int32(width - 1)
    return before + min(int32(first + row), last), before + min(int32(first + apart + row), last)


def _make_scaled(tiles):
    """A function that multiplies a group of 32 elements and adds it, scaled, to the tile's sums."""

    @device_function
    def add_scaled(rows, at, left, upper, lower, sums, words):
        right, product = cuda.local.array(4, uint32), cuda.local.array(4, float32)
        for t in range(tiles):
            right[0], right[1], right[2], right[3] = take4(rows, uint32(at + uint32(8 * t * ROW_BYTES)))
            for i in range(4):
                product[i] = float32(0)
            multiply32(left, right, product, words)
            sums[4 * t] = fma(product[0], upper, sums[4 * t])
            sums[4 * t + 1] = fma(product[1], upper, sums[4 * t + 1])
            sums[4 * t + 2] = fma(product[2], lower, sums[4 * t + 2])
            sums[4 * t + 3] = fma(product[3], lower, sums[4 * t + 3])

    return add_scaled


@functools.cache
def int4(tiles):
    """packed i32[.., N, K / 8], scales u16[.., N, K / 32], the bits of bf16; K a multiple of 32."""
    add_scaled, load = _make_scaled(tiles), make_load_matrices(4)

    @device_function
    def starts_of(weights, first, apart, width, length, expert):
        """Where weights of the lane's rows of both halves start; half 1 is `apart` columns further."""
        upper, lower = columns_of(first, apart, width, expert)
        piece, words = int32((lane_of() & 3) * 4), int32(length >> 3)
        return address_of(weights[0], upper * words + piece), address_of(weights[1], lower * words + piece)

    @device_function
    def scales_of(scales, first, apart, width, length, expert):
        """As `starts_of`, of the scales."""
        upper, lower = columns_of(first, apart, width, expert)
        piece, groups = int32((lane_of() & 3) * 8), int32(length >> 5)
        return address_of(scales[0], upper * groups + piece), address_of(scales[1], lower * groups + piece)

    @device_function
    def start(ring, at, weights, starts, more, k, last):
        """Start to copy the weights of the chunk at k, `more` bytes behind `starts`; from `last` on zeros."""
        lane = lane_of()
        place = uint32(at + uint32(place_of(lane >> 2, lane & 3, 0, 4)))
        there = int32(k + (lane & 3) * 32) < last
        start16(ring, place, weights[0], starts[0], more, there)
        start16(ring, uint32(place + uint32(512)), weights[1], starts[1], more, there)

    @device_function
    def start_scales(ring, at, area, scales, starts, k, last):
        """As `start`, the scales of SCALED elements from the chunk at k on, where such a run begins.

        What is fetched in smaller parts has left the L2 cache before all of a line is used.
        """
        if k & (SCALED - 1) == 0:
            lane = lane_of()
            place = uint32(area + uint32((lane >> 2) * SCALES_PITCH + (lane & 3) * 16 + ((k & SCALED) >> 4)))
            own, more = int32(k + (lane & 3) * 256), int32(k >> 4)
            if last & 255 == 0:
                start16(ring, place, scales[0], starts[0], more, own < last)
                start16(
                    ring, uint32(place + uint32(8 * SCALES_PITCH)), scales[1], starts[1], more, own < last
                )
            else:  # rows of scales start anywhere
                for i in range(8):
                    to, upper, lower = int64(place >> uint32(2)) + (i >> 1), uint32(0), uint32(0)
                    if int32(own + i * 32) < last:
                        upper = half_at(scales[0], starts[0], int32(more + 2 * i))
                        lower = half_at(scales[1], starts[1], int32(more + 2 * i))
                    if i & 1:
                        upper = ring[to] | uint32(upper << uint32(16))
                        lower = ring[to + 2 * SCALES_PITCH] | uint32(lower << uint32(16))
                    ring[to], ring[to + 2 * SCALES_PITCH] = upper, lower

    @device_function
    def use(ring, at, area, k, rows, rows_at, pitch, sums, words):
        """Add the chunk at k, which is there, to the sums; the lane's words of x are at rows_at, a group `pitch` on."""
        left = cuda.local.array(8, uint32)
        own = uint32(area + uint32((lane_of() >> 2) * SCALES_PITCH + ((k >> 4) & 127)))
        upper, lower = take2(ring, own), take2(ring, uint32(own + uint32(8 * SCALES_PITCH)))
        for j in range(2):
            a, b, c, d = load(ring, at, j)
            expand_nibbles(a, left, 0)
            expand_nibbles(b, left, 1)
            own = uint32(rows_at + uint32(2 * j) * pitch)
            add_scaled(rows, own, left, low_of(upper[j]), low_of(lower[j]), sums, words)
            expand_nibbles(c, left, 0)
            expand_nibbles(d, left, 1)
            own = uint32(own + pitch)
            add_scaled(rows, own, left, high_of(upper[j]), high_of(lower[j]), sums, words)

    @device_function
    def ends_of(unit):
        """Where in its group the two runs of four elements start that a lane takes as its eight."""
        return int32((unit & 3) * 8), int32((unit & 3) * 8 + 4)

    @device_function
    def pack(held, i):
        return (
            pack_pair(held[i], held[i + 4]),
            pack_pair(held[i + 1], held[i + 5]),
            pack_pair(held[i + 2], held[i + 6]),
            pack_pair(held[i + 3], held[i + 7]),
        )

    return SimpleNamespace(
        slot=1024,
        step=64,
        area=16 * SCALES_PITCH,
        starts_of=starts_of,
        scales_of=scales_of,
        start=start,
        start_scales=start_scales,
        use=use,
        ends_of=ends_of,
        pack=pack,
    )


@functools.cache
def fp8(tiles):
    """values u8[.., N, K], the bytes of e4m3, scales f32[.., ceil(N / 128), ceil(K / 128)]; K a multiple of 16."""
    load, sums_a_tile = make_load_matrices(8), 4 * tiles

    @device_function
    def starts_of(weights, first, apart, width, length, expert):
        """Where weights of the lane's rows of both halves start; half 1 is `apart` columns further."""
        upper, lower = columns_of(first, apart, width, expert)
        piece = int32((lane_of() & 3) * 16)
        return address_of(weights[0], upper * length + piece), address_of(weights[1], lower * length + piece)

    @device_function
    def scales_of(scales, first, apart, width, length, expert):
        """Where the scales of both halves start; a tile of 16 columns lies in one block of 128."""
        block = int64(expert) * ((width + 127) >> 7) + (min(first, int32(width - 1)) >> 7)
        block = block * ((length + 127) >> 7)
        return address_of(scales[0], block), address_of(scales[1], block)

    @device_function
    def start(ring, at, weights, starts, more, k, last):
        """Start to copy the weights of the chunk at k, `more` bytes behind `starts`; from `last` on zeros."""
        lane = lane_of()
        for i in range(2):
            place = uint32(at + uint32(place_of(lane >> 2, int32((lane & 3) + 4 * i), 0, 8)))
            there = int32(k + (lane & 3) * 16 + 64 * i) < last
            start16(ring, place, weights[0], starts[0], int32(more + 64 * i), there)
            start16(ring, uint32(place + uint32(1024)), weights[1], starts[1], int32(more + 64 * i), there)

    @device_function
    def start_scales(ring, at, area, scales, starts, k, last):
        """As `start`, the scales of the chunk."""
        lane, place, more = lane_of(), uint32(at + uint32(2048)), int32(k >> 7 << 2)
        if lane == 0:
            start4(ring, place, scales[0], starts[0], more, k < last)
            start4(ring, uint32(place + uint32(4)), scales[1], starts[1], more, k < last)

    @device_function
    def leave_out(ring, at):
        """Scales of -0 for a chunk of zeros that has arrived: +0 x -0 leaves every sum as it is, a sum of -0 too."""
        place = uint32(uint32(at + uint32(2048)) >> uint32(2))
        ring[place], ring[place + uint32(1)] = MINUS_ZERO, MINUS_ZERO

    @device_function
    def use(ring, at, area, k, rows, rows_at, pitch, sums, words):
        """Add the chunk at k, which is there, to the sums; the lane's words of x are at rows_at, a group `pitch` on."""
        left, right = cuda.local.array(8, uint32), cuda.local.array(4, uint32)
        products, product = cuda.local.array(sums_a_tile, float32), cuda.local.array(4, float32)
        for i in range(sums_a_tile):
            products[i] = float32(0)
        upper_nan, lower_nan = uint32(0), uint32(0)
        for j in range(4):
            a, b, c, d = load(ring, at, j)
            expand_bytes(a, left, 0)
            expand_bytes(b, left, 1)
            expand_bytes(c, left, 4)
            expand_bytes(d, left, 5)
            upper_nan |= uint32(nan_bytes(a) | nan_bytes(c))
            lower_nan |= uint32(nan_bytes(b) | nan_bytes(d))
            if j == 3:
                left[6] |= spoiled(upper_nan)
                left[7] |= spoiled(lower_nan)
            for t in range(tiles):
                place = uint32(rows_at + uint32(j) * pitch + uint32(8 * t * ROW_BYTES))
                right[0], right[1], right[2], right[3] = take4(rows, place)
                for i in range(4):
                    product[i] = products[4 * t + i]
                multiply32(left, right, product, words)
                for i in range(4):
                    products[4 * t + i] = product[i]
        own = uint32(at + uint32(2048))
        upper = float_from_bits(take1(ring, own))
        lower = float_from_bits(take1(ring, uint32(own + uint32(4))))
        for t in range(tiles):
            sums[4 * t] = fma(products[4 * t], upper, sums[4 * t])
            sums[4 * t + 1] = fma(products[4 * t + 1], upper, sums[4 * t + 1])
            sums[4 * t + 2] = fma(products[4 * t + 2], lower, sums[4 * t + 2])
            sums[4 * t + 3] = fma(products[4 * t + 3], lower, sums[4 * t + 3])

    @device_function
    def ends_of(unit):
        """Where in its group the two runs of four elements start that a lane takes as its eight."""
        return int32((unit & 3) * 4), int32((unit & 3) * 4 + 16)

    @device_function
    def pack(held, i):
        return (
            pack_pair(held[i], held[i + 2]),
            pack_pair(held[i + 1], held[i + 3]),
            pack_pair(held[i + 4], held[i + 6]),
            pack_pair(held[i + 5], held[i + 7]),
        )

    return SimpleNamespace(
        slot=2048 + 16,
        step=128,
        area=0,
        starts_of=starts_of,
        scales_of=scales_of,
        start=start,
        start_scales=start_scales,
        leave_out=leave_out,
        use=use,
        ends_of=ends_of,
        pack=pack,
    )


FORMATS = {"int4": int4, "fp8": fp8}
