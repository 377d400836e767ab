"""Products of rows with quantised weights on tensor cores: what a block does from its first copy to its sums.

    sums[row, column] = sum over groups of K of scale[column, group] * (sum over the group of bf16(x) * weight)

Weights go to a ring of shared memory that each warp has for itself, `depth` chunks ahead, and from there through
ldmatrix, which gives each lane its words of a row's 16 bytes, to registers, where they are expanded. The rows of x are
rounded once for the block and lie in a window of shared memory: the fewer there are, the more of K it holds, all of it
for a row or two. Groups are added in the order of K. A row's sums depend on no other row: mma's columns, which the rows
are, never see each other.
"""

import functools
from types import SimpleNamespace
from typing import NamedTuple

from numba import cuda, float32, int32, int64, uint32, uint64

from kernels_numba.primitives import SIMULATED, device_function
from kernels_numba.primitives_quantised import (
    close_group,
    leave4,
    load_floats_if,
    make_wait_groups,
    sync_warp,
)
from kernels_numba.primitives_quantised_formats import CHUNK, FORMATS, ROW_BYTES

COLUMNS = 16  # weight rows of a warp's tile


class Cut(NamedTuple):
    """How blocks with 8, 16 or 32 rows are made."""

    warps: int  # of a block
    depth: int  # chunks in a warp's ring
    window: int  # bits of the number of elements in the window of x
    blocks: int  # on a multiprocessor at a time: what registers must leave room for


CUTS = {
    "int4": {1: Cut(4, 4, 13, 5), 2: Cut(4, 4, 13, 5), 4: Cut(4, 4, 13, 3)},
    "fp8": {1: Cut(4, 3, 13, 5), 2: Cut(4, 3, 13, 5), 4: Cut(4, 3, 13, 4)},
}
ALONE = Cut(3, 5, 13, 3)  # of a matrix and a row or two: fewer blocks, which must have more under way
BATCH = 4  # times eight elements of x whose loads a thread has under way


def cut_of(name, tiles):
    """The Cut of a format's tile of 8 x `tiles` rows; the simulator's blocks are small."""
    cut = CUTS[name][tiles]
    return cut._replace(warps=2, window=12) if SIMULATED else cut


@device_function
def share_of(length, shares):
    """Elements of K of a share, whole chunks."""
    return int32((length + (shares * CHUNK - 1)) // (shares * CHUNK) * CHUNK)


def _make_use(name, tiles):
    """The format's `use` for as many tiles of 8 rows as there are rows for, a first argument, of 1, 2 or 4 at most."""
    one, two, four = (FORMATS[name](min(count, tiles)).use for count in (1, 2, 4))

    @device_function
    def use_of_one(used, ring, at, area, k, rows, rows_at, pitch, sums, words):
        one(ring, at, area, k, rows, rows_at, pitch, sums, words)

    @device_function
    def use_of_two(used, ring, at, area, k, rows, rows_at, pitch, sums, words):
        if used == 1:
            one(ring, at, area, k, rows, rows_at, pitch, sums, words)
        else:
            two(ring, at, area, k, rows, rows_at, pitch, sums, words)

    @device_function
    def use_of_four(used, ring, at, area, k, rows, rows_at, pitch, sums, words):
        if used <= 2:
            use_of_two(used, ring, at, area, k, rows, rows_at, pitch, sums, words)
        else:
            four(ring, at, area, k, rows, rows_at, pitch, sums, words)

    return {1: use_of_one, 2: use_of_two, 4: use_of_four}[tiles]


@functools.cache
def make_quantised_tile(name, tiles, teams=1, cut=None):
    """The tile of a format for 8 x `tiles` rows; where K is cut in shares, `teams` warps take one each.

    start(ring, weights, starts, length) starts the first copies of weights, and touches nothing else.
    accumulate(x, row_at, count, weights, scales, starts, length, memory, sums) goes on from there: scales are a pair of
    arrays and where they start; row_at is shared and says where each of `count` rows starts in x; memory is the shared
    u32 (ring [tile.ring], rows [tile.rows], words).
    Of `teams` each warp's sums are over its own share. Blocks have the warps of the Cut at most.
    """
    form, cut = FORMATS[name](tiles), cut or cut_of(name, tiles)
    start_chunk, start_scales, slot, step = form.start, form.start_scales, form.slot, form.step
    leave_out = form.leave_out if teams > 1 else None
    use, ends_of, pack, depth = _make_use(name, tiles), form.ends_of, form.pack, cut.depth
    around, window_bits = depth * slot + form.area, cut.window - (teams.bit_length() - 1)
    num_held, num_sums = 8 * BATCH, 4 * tiles
    wait_groups = make_wait_groups(depth - 1)

    @device_function
    def range_of(length):
        """(first element of the warp's, end of them, elements of a share)."""
        share = share_of(length, teams)
        first = int32(((int32(cuda.threadIdx.x) >> 5) & (teams - 1)) * share)
        return first, min(int32(first + share), length), share

    @device_function
    def start(ring, weights, starts, length):
        own = uint32((int32(cuda.threadIdx.x) >> 5) * around)
        first, last, _ = range_of(length)
        for d in range(depth):
            k, more = int32(first + d * CHUNK), int32(first // CHUNK * step + d * step)
            start_chunk(ring, uint32(own + uint32(d * slot)), weights, starts, more, k, last)

    @device_function
    def meet():
        """Wait for those who have the same window."""
        if teams > 1:
            sync_warp()
        else:
            cuda.syncthreads()

    @device_function
    def fill(x, row_at, count, bits, base, need, length, rows, to):
        """Put `need` elements of each row from `base` on, rounded, into the window at `to`."""
        held = cuda.local.array(num_held, float32)
        thread, threads = int32(cuda.threadIdx.x), int32(cuda.blockDim.x)
        if teams > 1:
            thread, threads = int32(thread & 31), int32(32)
        of_row = int32(need >> 3)
        unit, end = thread, int32(of_row * count)
        while unit < end:
            for u in range(BATCH):
                own = int32(unit + u * threads)
                row = int32(uint32(own) // uint32(of_row))
                own = int32(own - row * of_row)
                if row < count:
                    first, second = ends_of(own)
                    k = int32(base + (own >> 2) * 32)
                    at, i = int64(row_at[row] + k), 8 * u
                    held[i], held[i + 1], held[i + 2], held[i + 3] = load_floats_if(
                        x, at + first, int32(k + first) < length
                    )
                    held[i + 4], held[i + 5], held[i + 6], held[i + 7] = load_floats_if(
                        x, at + second, int32(k + second) < length
                    )
            for u in range(BATCH):
                own = int32(unit + u * threads)
                row = int32(uint32(own) // uint32(of_row))
                own = int32(own - row * of_row)
                if row < count:
                    place = int32((((own >> 2) << bits) + row) * ROW_BYTES + (own & 3) * 16)
                    a, b, c, d = pack(held, 8 * u)
                    leave4(rows, uint32(to + uint32(place)), a, b, c, d)
            unit = int32(unit + BATCH * threads)

    @device_function
    def accumulate(x, row_at, count, weights, scales, starts, length, memory, sums):
        (scales, scale_starts), (ring, rows, words) = scales, memory
        warp, lane = int32(cuda.threadIdx.x) >> 5, int32(cuda.threadIdx.x) & 31
        own = uint32(warp * around)
        area = uint32(own + uint32(depth * slot))
        first, last, share = range_of(length)
        for d in range(depth):  # the first group holds all of `start`'s copies, and the scales
            at, k = uint32(own + uint32(d * slot)), int32(first + d * CHUNK)
            start_scales(ring, at, area, scales, scale_starts, k, last)
        for _ in range(depth):
            close_group()
        for i in range(num_sums):
            sums[i] = float32(0)
        row, bits, used = min(int32(lane >> 2), int32(count - 1)), int32(0), int32((count + 7) >> 3)
        while 1 << bits < count:  # no more room than the rows need
            bits = int32(bits + 1)
        window, pitch = int32(1 << (window_bits - bits)), uint32(ROW_BYTES << bits)
        to = uint32((warp & (teams - 1)) << (window_bits + 1))
        mine = uint32(to + uint32(row * ROW_BYTES + (lane & 3) * 16))
        ahead = uint64(first // CHUNK * step + depth * step)
        upper, lower = uint64(starts[0] + ahead), uint64(starts[1] + ahead)  # of the chunks to be copied next
        rows_at, at, base = mine, own, int32(0)
        stop = share
        cuda.syncthreads()  # row_at is there
        while base < stop:
            if base & (window - 1) == 0:
                meet()  # the window has been used
                need = min(window, int32((stop - base + (CHUNK - 1)) & -CHUNK))
                fill(x, row_at, count, bits, int32(first + base), need, length, rows, to)
                meet()  # the window is full
                rows_at = mine
            k = int32(first + base)
            wait_groups()
            if teams > 1 and lane == 0 and k >= last:  # K may end before a share does
                leave_out(ring, at)
            sync_warp()  # the chunk is there, whoever of the warp copied it
            use(used, ring, at, area, k, rows, rows_at, pitch, sums, words)
            sync_warp()  # and every lane has used it
            k = int32(k + depth * CHUNK)
            start_chunk(ring, at, weights, (upper, lower), int32(0), k, last)
            upper, lower = uint64(upper + uint64(step)), uint64(lower + uint64(step))
            start_scales(ring, at, area, scales, scale_starts, k, last)
            close_group()
            at = uint32(at + uint32(slot))
            if at == area:
                at = own
            rows_at = uint32(rows_at + uint32(4) * pitch)
            base = int32(base + CHUNK)

    return SimpleNamespace(
        start=start,
        accumulate=accumulate,
        starts_of=form.starts_of,
        scales_of=form.scales_of,
        warps=cut.warps,
        options={} if SIMULATED else {"launch_bounds": (32 * cut.warps, cut.blocks)},
        ring=cut.warps * around // 4,
        rows=1 << cut.window - 1,
        sums=num_sums,
    )
