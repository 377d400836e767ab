"""One block's part of `linear_wgmma`: a ring of stages in shared memory, who fills it, and who multiplies.

    sums[column, row] = sum over k of weight[column * length + k] * inputs[row * length + k]

A stage is a chunk of K, 64 elements: of the block's columns of weight, then of its rows of input, each a row of 128
bytes whose 16-byte pieces are swizzled as wgmma wants it: piece i of row r lies at i ^ (r % 8). Behind the groups that
multiply, which take 64 columns each and all rows, come warps that bring weights and a thread that brings inputs.
Barriers in shared memory tell who waits that a stage is full, or used.
"""

from types import SimpleNamespace

from numba import cuda, float32, int32, int64, uint32

from kernels_numba.primitives import SIMULATED, device_function
from kernels_numba.primitives_linear_barriers import (
    GROUP,
    PLACE_UNIT,
    TILE,
    arrive_for_bytes,
    arrive_with_copies,
    copy_from,
    copy_run,
    make_barrier,
    place_in,
    product_of,
    wait_phase,
)
from kernels_numba.primitives_mma import LANES, thread_here
from kernels_numba.primitives_wide import in_order

CHUNK = 64  # elements of K,
ROW_WORDS = CHUNK // 2  # and u32 of a row of them
# Rows of a product; a launch takes the fewest that are enough, or tiles of the most. 72: a tree of 64 nodes and a root.
ROWS = (8, 16) if SIMULATED else (32, 72, 128)
# Threads behind the groups that multiply, and how many of these, the first ones, bring weights; one brings inputs.
BRINGING, FILLING = (2 * LANES, LANES) if SIMULATED else (3 * LANES, 2 * LANES)
ROWS_AT_ONCE, TURNS = FILLING // 8, 6  # rows that these copy side by side, and how often in a loop


@device_function
def make_barriers(buffers, barriers, stages, groups):
    """Set the barriers up, for each stage one that it is full, then for each one that it is used; one thread does.

    A stage is filled by copies of weights by FILLING threads, and of inputs by one.
    """
    for s in range(stages):
        make_barrier(buffers, int32(barriers + 2 * s), int32(FILLING + 1))
        make_barrier(buffers, int32(barriers + 2 * (stages + s)), int32(groups * (GROUP // LANES)))


@device_function
def place_of(number, blocks, columns, apart):
    """(first column, head, share) of an item, whose tile of rows is left out of its number."""
    rest = int32(number // blocks)
    return int32(number % blocks * columns), int32(rest // apart), int32(rest % apart)


@device_function
def next_stage(stage, phase, stages):
    """The stage after one, and the parity of its phase."""
    stage = int32(stage + 1)
    return (int32(0), int32(phase ^ 1)) if stage == stages else (stage, phase)


@device_function
def fetch_weights(buffers, place, barrier, weight, start, pitch, rows, k_left):
    """FILLING threads copy a chunk of so many rows, `pitch` apart from `start` on; zeros from k_left on."""
    thread = int32(thread_here() & (FILLING - 1))
    row, piece = int32(thread >> 3), int32(thread & 7)
    size = uint32(16) if int32(piece * 8) < k_left else uint32(0)
    at, step = start + int64(row) * pitch + piece * (8 * PLACE_UNIT), pitch * ROWS_AT_ONCE
    to = int32(place + row * ROW_WORDS + ((piece ^ (row & 7)) << 2))
    while row < rows:
        for j in range(TURNS):
            further = int32(row + j * ROWS_AT_ONCE)
            if further < rows:
                turned = int32(to + j * (ROWS_AT_ONCE * ROW_WORDS))
                if ROWS_AT_ONCE % 8:  # where a thread's rows are not all swizzled alike
                    turned = int32(place + further * ROW_WORDS + ((piece ^ (further & 7)) << 2))
                copy_from(buffers, turned, weight, at, size)
            at += step
        row, to = int32(row + TURNS * ROWS_AT_ONCE), int32(to + TURNS * ROWS_AT_ONCE * ROW_WORDS)
    arrive_with_copies(buffers, barrier)


@device_function
def bring_weights(buffers, ring, weight, work, width, length, share, items):
    """FILLING threads' part of all items of the block: weights wait for nothing but a stage that is used."""
    base, barriers, stages, stage_words, _ = ring
    row_tiles, blocks, columns, apart, _, chunks = work
    item, stage, phase = int32(cuda.blockIdx.x), int32(0), int32(1)
    pitch = int64(length) * PLACE_UNIT
    while item < items:
        number = int32(item // row_tiles)
        first_column, head, split = place_of(number, blocks, columns, apart)
        k, last = int32(split * share), min(int32((split + 1) * share), length) if apart > 1 else length
        at = place_in(weight, (int64(head) * width + first_column) * length + k)
        rows = min(columns, int32(width - first_column))
        for _ in range(chunks):
            place, full = int32(base + stage * stage_words), int32(barriers + 2 * stage)
            wait_phase(buffers, int32(full + 2 * stages), phase)
            fetch_weights(buffers, place, full, weight, at, pitch, rows, int32(last - k))
            k, at = int32(k + CHUNK), at + CHUNK * PLACE_UNIT
            stage, phase = next_stage(stage, phase, stages)
        item = int32(item + cuda.gridDim.x)


@device_function
def bring_inputs(buffers, ring, inputs, work, rows, all_rows, split_bits, items):
    """One thread's part of all items of the block: a chunk of rounded inputs is one copy of so many bytes."""
    base, barriers, stages, stage_words, weight_words = ring
    row_tiles, blocks, columns, apart, share_chunks, chunks = work
    item, stage, phase = int32(cuda.blockIdx.x), int32(0), int32(1)
    step = int64(int32(all_rows * ROW_WORDS))
    while item < items:
        row_tile, number = int32(item % row_tiles), int32(item // row_tiles)
        _, head, split = place_of(number, blocks, columns, apart)
        first_row = int32(row_tile * rows)
        source = int64(int32(((head << split_bits) + split) * share_chunks)) * step + int32(
            first_row * ROW_WORDS
        )
        count = int32(min(int32(rows), int32(all_rows - first_row)) * (4 * ROW_WORDS))
        for _ in range(chunks):
            place, full = int32(base + stage * stage_words + weight_words), int32(barriers + 2 * stage)
            wait_phase(buffers, int32(full + 2 * stages), phase)
            arrive_for_bytes(buffers, full, count)
            copy_run(buffers, place, inputs, source, count, full)
            source = source + step
            stage, phase = next_stage(stage, phase, stages)
        item = int32(item + cuda.gridDim.x)


def make_tile(rows):
    """Products of `rows` rows: their functions, and the size of sums f32, in registers.

    multiply(buffers, columns_at, rows_at, sums): use a chunk.
    put(out, base, sizes, first_row, column, more, sums): write the sums to out, or add them there; zero them. `column`
    is the first of the thread's two. sizes = (num_rows, elements between rows of out, columns of out).
    """
    return SimpleNamespace(
        multiply=product_of(rows), put=in_order([_make_put(j) for j in range(rows // 8)]), sums=rows // 2
    )


def _make_put(j):
    """`put` for rows 8 j to 8 j + 7."""

    @device_function
    def put(out, base, sizes, first_row, column, more, sums):
        num_rows, stride, width = sizes
        lane = int32(thread_here() & 3)  # so that nothing of this lives through the loop
        for side in range(2):
            row = int32(first_row + 8 * j + lane * 2 + side)
            if row < num_rows:
                at = base + int64(row) * stride + column
                for half in range(2):
                    if int32(column + 8 * half) < width:
                        value = sums[4 * j + 2 * half + side]
                        out[at + 8 * half] = out[at + 8 * half] + value if more else value
        sums[4 * j] = sums[4 * j + 1] = sums[4 * j + 2] = sums[4 * j + 3] = float32(0)

    return put


@device_function
def column_here(tile):
    """The first of a thread's two columns of the block, if its group has the tile-th 64; the other is 8 further."""
    thread = int32(thread_here() & (GROUP - 1))
    return int32(tile * TILE + (thread >> 5) * 16 + ((thread & 31) >> 2))
