"""The grouped expert product of one row, bf16 weights: an autoregressive step. Two kernels, without plan and pairs.

    hidden[t] = silu(x @ w_gate[e].T) * (x @ w_up[e].T),  out = sum over t of gates[e] * (hidden[t] @ w_down[e].T)

e is the t-th expert whose gate is not zero, then come the shared ones: a slot t each. A block of `down` takes some
columns of all slots, a warp or more each, and adds them in order. Shares of K, chunks, and so all bits are
`experts_mma`'s.
"""

import functools

import numpy as np
from numba import cuda, float32, int32, int64, types, uint32

from kernels_numba.launching import allow_shared
from kernels_numba.linear_mma import MULTIPROCESSORS, PLAIN_SHARED
from kernels_numba.primitives import SIMULATED, WARP, after_previous, device_function, exp, load_settled
from kernels_numba.primitives_lanes import count_below
from kernels_numba.primitives_mma import ALIGN, EXCHANGE, LANES
from kernels_numba.primitives_ring import NONE, ROW_WORDS, WEIGHT_WORDS, make_ring
from kernels_numba.primitives_tensor import COLUMNS, MOST_SPLITS, MULTIPLE, SUMS, share_of
from kernels_numba.registry import KernelSpec

DEPTH = 8  # chunks of a warp under way or in use
UP_WARPS, DOWN_WARPS = (
    (2, 4) if SIMULATED else (8, 10)
)  # of a block, at most: any GPU has shared memory for them
THREADS = LANES * DOWN_WARPS
SLOTS = 16  # room for those of a row
PRODUCTS = SLOTS * COLUMNS
MOST_EXPERTS = 512  # that are not shared
MOST_ELEMENTS = 1 << 26  # of the chosen experts' gates: at 117 M the general kernels are faster
PITCH, STAGE_WORDS = ROW_WORDS // 2, WEIGHT_WORDS + ROW_WORDS
SHARED_ROOM, STATIC_ROOM, MOST_RESIDENT = 220_000, 6144, 64  # bytes of a multiprocessor, a block's own; warps

ring = make_ring(DEPTH)
start_weights, start_rows, add = ring.start_weights, ring.start_rows, ring.add


@device_function
def list_chosen(gates, most, flags, found, scratch):
    """found[t] = the expert of the t-th gate that is not zero, for t < most; -1 where there are no more.

    The gates are in `flags` then. Every thread of the block comes here.
    """
    thread, count = int32(cuda.threadIdx.x), int32(gates.shape[0])
    for i in range(thread, count, int32(cuda.blockDim.x)):
        flags[i] = load_settled(gates, int64(i))
    if thread < SLOTS:
        found[thread] = int32(-1)
    cuda.syncthreads()  # all gates are there
    lane, seen = int32(thread & (WARP - 1)), int32(0)
    for base in range(0, count, WARP):  # every warp alike
        i = int32(base + lane)
        chosen = i < count and flags[min(i, int32(count - 1))] != float32(0)
        below, together = count_below(chosen, lane, scratch)
        if chosen and seen + below < most:
            found[seen + below] = i
        seen = int32(seen + together)
    cuda.syncthreads()  # the experts are there


@device_function
def expert_of(slot, kept, routed, found):
    """The expert of a slot, -1 where there is none; behind the `kept` slots of routed experts are the shared ones."""
    return found[slot] if slot < kept else int32(routed + slot - kept)


@device_function
def keep_sums(sums, buffers):
    """Put the row's sums where the block finds them, in the buffers, which its warps have done with."""
    lane, warp = int32(cuda.threadIdx.x) & 31, int32(cuda.threadIdx.x) >> 5
    cuda.syncthreads()  # no warp is at its ring
    if lane < 4:
        for i in range(4):
            buffers[(warp * 4 + i) * 4 + lane] = sums[(i & 1) + (i >> 1) * 4]
    cuda.syncthreads()  # all shares' sums are there


@device_function
def total_of(buffers, warp, i, splits):
    """The lane's sum number i over all shares, in order; `warp` is the first of its column tile."""
    lane = int32(cuda.threadIdx.x) & 31
    total = buffers[(warp * 4 + i) * 4 + lane]
    for other in range(1, MOST_SPLITS):
        if other < splits:
            total += buffers[((warp + other) * 4 + i) * 4 + lane]
    return total


@cuda.jit(**({} if SIMULATED else {"launch_bounds": (LANES * UP_WARPS, 1)}))
def up_one_kernel(x, w_gate, w_up, gates, hidden, num_chosen, num_shared, length, width, split_bits):
    """x [length], w_gate and w_up [E, width, length], gates [routed], hidden [slots, width], all flat.

    Grid (slots, blocks of columns): a block's warps make column tiles of gate's and of up's in turn.
    """
    after_previous()
    buffers = cuda.shared.array(0, float32, ALIGN)
    flags = cuda.shared.array(MOST_EXPERTS, float32)
    found = cuda.shared.array(SLOTS, int32)
    scratch = cuda.shared.array(THREADS, int32)
    words = cuda.shared.array(EXCHANGE, uint32)
    held, left, sums = (
        cuda.local.array(8, uint32),
        cuda.local.array(8, uint32),
        cuda.local.array(SUMS, float32),
    )
    thread, slot, kept = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x), int32(num_chosen - num_shared)
    lane, warp = int32(thread & 31), int32(thread >> 5)
    list_chosen(gates, kept, flags, found, scratch)
    expert = expert_of(slot, kept, gates.shape[0], found)
    if expert < 0:  # no expert; all threads leave
        return
    splits, groups = int32(1 << split_bits), int32(cuda.blockDim.x >> 6 >> split_bits)
    part, first_warp = int32(warp >> split_bits), int32(warp & -2 * splits)
    first_column = int32((cuda.blockIdx.y * groups + (part >> 1)) * COLUMNS)
    weight = w_up if part & 1 else w_gate
    mine, column = weight[int64(expert) * width * length :], int32(first_column + (lane >> 2))
    share, split = share_of(length, split_bits), int32(warp & (splits - 1))
    k, last = int32(split * share + (lane & 3) * MULTIPLE), min(int32((split + 1) * share), int32(length))
    place, sizes = (int32(warp * (DEPTH * STAGE_WORDS)), int32(STAGE_WORDS), int32(PITCH)), (width, length)
    start_weights(mine, column, sizes, k, last, place, buffers)
    start_rows(x, int32(0), lane < 4, k, last, place, buffers)
    for i in range(8):
        sums[i], left[i] = float32(0), NONE
    add(x, int32(0), lane < 4, mine, column, sizes, k, last, share, place, buffers, held, left, sums, words)
    keep_sums(sums, buffers)
    for i in range(warp - first_warp, 4, 2 * splits):
        column = int32(first_column + lane * 2 + (i & 1) + (i >> 1) * 8)
        if lane < 4 and column < width:
            gate, up = (
                total_of(buffers, first_warp, i, splits),
                total_of(buffers, first_warp + splits, i, splits),
            )
            hidden[slot * width + column] = gate / (float32(1) + exp(-gate)) * up


@cuda.jit(**({} if SIMULATED else {"launch_bounds": (LANES * DOWN_WARPS, 1)}))
def down_one_kernel(hidden, weight, settled, out, num_chosen, num_shared, length, width, split_bits):
    """hidden [slots, length], weight w_down [E, width, length], settled the gates [routed], out [width], all flat.

    A block makes COLUMNS columns, with as many warps as slots have shares of K. The first weights are on their way
    before `up` has ended: `up` does not write the gates.
    """
    buffers = cuda.shared.array(0, float32, ALIGN)
    flags = cuda.shared.array(MOST_EXPERTS, float32)
    found = cuda.shared.array(SLOTS, int32)
    scratch = cuda.shared.array(THREADS, int32)
    products = cuda.shared.array(PRODUCTS, float32)
    words = cuda.shared.array(EXCHANGE, uint32)
    held, left, sums = (
        cuda.local.array(8, uint32),
        cuda.local.array(8, uint32),
        cuda.local.array(SUMS, float32),
    )
    thread, kept, routed = int32(cuda.threadIdx.x), int32(num_chosen - num_shared), int32(settled.shape[0])
    lane, warp, splits = int32(thread & 31), int32(thread >> 5), int32(1 << split_bits)
    list_chosen(settled, kept, flags, found, scratch)
    slot, split = int32(warp >> split_bits), int32(warp & (splits - 1))
    expert, first_column = expert_of(slot, kept, routed, found), int32(cuda.blockIdx.x * COLUMNS)
    share, column = share_of(length, split_bits), int32(first_column + (lane >> 2))
    k, last = int32(split * share + (lane & 3) * MULTIPLE), min(int32((split + 1) * share), int32(length))
    if expert < 0:  # nothing is read
        expert, last = int32(0), int32(0)
    mine = weight[int64(expert) * width * length :]
    place, sizes = (int32(warp * (DEPTH * STAGE_WORDS)), int32(STAGE_WORDS), int32(PITCH)), (width, length)
    start = int32(slot * length)
    start_weights(mine, column, sizes, k, last, place, buffers)
    after_previous()
    start_rows(hidden, start, lane < 4, k, last, place, buffers)
    for i in range(8):
        sums[i], left[i] = float32(0), NONE
    add(hidden, start, lane < 4, mine, column, sizes, k, last, share, place, buffers, held, left, sums, words)
    keep_sums(sums, buffers)
    if lane < 4 and split == 0:
        gate = flags[expert] if slot < kept else float32(1)
        for i in range(4):
            at = int32(slot * COLUMNS + lane * 2 + (i & 1) + (i >> 1) * 8)
            products[at] = gate * total_of(buffers, warp, i, splits)
    cuda.syncthreads()  # all slots' products are there, rounded
    column = int32(first_column + thread)
    if thread < COLUMNS and column < width:
        total = float32(0)
        for other in range(num_chosen):
            if other >= kept or found[other] >= 0:
                total += products[other * COLUMNS + thread]
        out[column] = total


def shared_bytes_of(warps):
    """Bytes of dynamic shared memory that a block of so many warps wants."""
    return 4 * warps * DEPTH * STAGE_WORDS


def takes(num_rows, routed, num_chosen, elements, up_bits, down_bits):
    """Whether these kernels make the product: one row, with a warp of a block for every slot and share of K.

    `elements` are those of one expert's gate, size x width.
    """
    fits = 2 << up_bits <= UP_WARPS and num_chosen << down_bits <= DOWN_WARPS
    return num_rows == 1 and fits and routed <= MOST_EXPERTS and num_chosen * elements <= MOST_ELEMENTS


@functools.cache
def groups_of(slots, column_tiles, unit):
    """Column tiles of a block of `up`, `unit` warps each: that all blocks run at once, then as evenly as they can."""

    def cost(groups):
        warps, blocks = groups * unit, slots * -(-column_tiles // groups)
        resident = min(SHARED_ROOM // (shared_bytes_of(warps) + STATIC_ROOM), MOST_RESIDENT // warps)
        return -(-blocks // (MULTIPROCESSORS * resident)), -(-blocks // MULTIPROCESSORS) * warps, -groups

    return min(range(1, UP_WARPS // unit + 1), key=cost)


def _launch(spec, most, grid, warps, arrays, numbers, stream):
    shared_bytes = shared_bytes_of(warps)
    if shared_bytes > PLAIN_SHARED:
        allow_shared(spec, shared_bytes_of(most))
    numbers = (np.int32(number) for number in numbers)
    spec.kernel[grid, LANES * warps, stream, shared_bytes](*arrays, *numbers)


def launch_one(x, gates, w_gate, w_up, w_down, hidden, out, counts, sizes, bits, stream):
    """Launch both; flat arrays, counts (num_chosen, num_shared), sizes (hidden size, width), split bits of both."""
    (slots, _), (size, width), (up_bits, down_bits) = counts, sizes, bits
    tiles, unit = -(-width // COLUMNS), 2 << up_bits
    groups = groups_of(slots, tiles, unit)
    up, down = SPECS
    arrays = x, w_gate, w_up, gates, hidden
    grid = slots, -(-tiles // groups)
    _launch(up, UP_WARPS, grid, groups * unit, arrays, (*counts, size, width, up_bits), stream)
    arrays, grid = (hidden, w_down, gates, out), -(-size // COLUMNS)
    _launch(down, DOWN_WARPS, grid, slots << down_bits, arrays, (*counts, width, size, down_bits), stream)


_FLAT, _BITS = types.Array(types.float32, 1, "C"), types.Array(types.uint16, 1, "C")
_NUMBERS = (types.int32,) * 5
SPECS = [
    KernelSpec(
        "experts_up_one", up_one_kernel, (_FLAT, _BITS, _BITS, _FLAT, _FLAT) + _NUMBERS, LANES * UP_WARPS
    ),
    KernelSpec(
        "experts_down_one", down_one_kernel, (_FLAT, _BITS, _FLAT, _FLAT) + _NUMBERS, LANES * DOWN_WARPS
    ),
]
