"""Which rows go to which expert, listed on the device: the first kernel of `experts`, one block.

    pairs = the (expert, row) with gates[expert, row] != 0, in that order, then each shared expert with every row

Each warp takes a run of the flat gates [E, M], whose order is that of the pairs: it counts, learns where its own begin,
and writes them. Then a thread a pair finds its expert's first, notes it for its row, and opens a tile where one begins.
Where the gates are no more than the threads, a thread has one of each, and what others need of it is in shared memory.
"""

from numba import cuda, float32, int32, types, uint32

from kernels_numba.checks import require
from kernels_numba.primitives import SIMULATED, WARP, after_previous, device_function
from kernels_numba.primitives_lanes import count_below, lane_and_warp
from kernels_numba.registry import KernelSpec

PLAN_THREADS = 8 if SIMULATED else 1024
PLAN_WARPS = PLAN_THREADS // WARP
PLAN_FIRSTS = PLAN_THREADS + 1
MAX_CHOSEN = 32  # experts a row


def plan_size(num_rows, num_experts, num_chosen):
    """Elements of the i32 scratch `plan`, in its order, where P = num_rows x num_chosen; both count shared experts.

    [P] a pair's place in the flat gates [E, M]; [P] a tile's rows, or 0, [P] its first pair and [P] its expert;
    [M, num_chosen] a row's pairs in any order and [M] how many they are; [E + 1] an expert's first pair.
    """
    return 5 * num_rows * num_chosen + num_rows + num_experts + 1


def check_counts(what, routed, num_experts, num_chosen, width):
    """Raise LaunchError unless experts, of `width` activations each, are as many as the kernels take."""
    require(num_experts, f"{what}: weights: expected an expert at least, found none")
    require(width, f"{what}: hidden: expected an activation of an expert at least, found none")
    require(routed <= num_experts, f"{what}: gates: expected at most {num_experts} experts, found {routed}")
    least = max(1, num_experts - routed)
    require(
        least <= num_chosen <= MAX_CHOSEN,
        f"{what}: num_chosen: expected {least} to {MAX_CHOSEN}, found {num_chosen}"
        + f", with {num_experts - routed} shared experts" * (least > 1),
    )


@device_function
def gate_of(gates, place):
    """The gate of a pair by its place in the flat gates, behind whose end shared experts lie."""
    return gates[place] if place < gates.shape[0] else float32(1)


@device_function
def tile_of(plan, capacity):
    """(rows, first pair, expert) of the tile of this block's blockIdx.x; no rows where there is none."""
    place = int32(capacity + cuda.blockIdx.x)
    return plan[place], plan[place + capacity], plan[place + 2 * capacity]


@device_function
def open_tile(plan, at, expert, first, end, capacity, tile_bits, num_tiles):
    """Note the tile that begins with pair `at` of an expert's pairs first .. end - 1, if one does."""
    before = int32(at - first)
    if before & ((1 << tile_bits) - 1) == 0:
        tile = at if num_tiles == capacity else (first >> tile_bits) + expert + (before >> tile_bits)
        plan[capacity + tile] = min(int32(1 << tile_bits), int32(end - at))
        plan[2 * capacity + tile] = at
        plan[3 * capacity + tile] = expert


@cuda.jit
def plan_kernel(gates, plan, num_rows, num_experts, num_chosen, tile_bits, num_tiles):
    """Fill `plan`, as `plan_size` describes it, from the flat gates [E, M]; experts past the gates' are shared.

    A tile has 1 << tile_bits rows. Its place among num_tiles is that of its first pair, or, where that would leave most
    places empty, first pair // rows + expert, which grows by at least one from tile to tile. One block, of PLAN_THREADS
    or as many as `plan_threads` says.
    """
    after_previous()
    scratch = cuda.shared.array(PLAN_THREADS, int32)
    found = cuda.shared.array(PLAN_WARPS, int32)
    firsts = cuda.shared.array(PLAN_FIRSTS, int32)
    tally = cuda.shared.array(PLAN_THREADS, int32)
    thread = int32(cuda.threadIdx.x)
    lane, warp = lane_and_warp()
    capacity, size = int32(num_rows * num_chosen), int32(num_rows * num_experts)
    own, counts, routed = int32(4 * capacity), int32(5 * capacity), int32(gates.shape[0])
    starts = int32(counts + num_rows)
    if size <= PLAN_THREADS:  # a gate a thread
        chosen = thread < size and (thread >= routed or gates[min(thread, int32(routed - 1))] != float32(0))
        below, together = count_below(chosen, lane, scratch)
        if lane == 0:
            found[warp] = together
        tally[thread] = int32(0)
        for i in range(thread, num_tiles, cuda.blockDim.x):
            plan[capacity + i] = int32(0)
        cuda.syncthreads()  # every warp's pairs are counted, tallies and tiles are zero
        at = below
        for other in range(PLAN_WARPS):
            if other < warp:
                at = int32(at + found[other])
        expert = int32(uint32(thread) // uint32(num_rows))
        row = int32(thread - expert * num_rows)
        if row == 0 and thread < size:
            firsts[expert] = min(at, capacity)
        if thread == size - 1:
            firsts[num_experts] = min(int32(at + 1 if chosen else at), capacity)
        cuda.syncthreads()  # experts' first pairs are there
        if chosen and at < capacity:
            plan[at] = thread
            slot = cuda.atomic.add(tally, row, int32(1))
            if slot < num_chosen:
                plan[own + row * num_chosen + slot] = at
            open_tile(plan, at, expert, firsts[expert], firsts[expert + 1], capacity, tile_bits, num_tiles)
        cuda.syncthreads()  # every row's pairs are counted
        if thread < num_rows:
            plan[counts + thread] = tally[thread]
        return
    run = int32(((size + PLAN_THREADS - 1) // PLAN_THREADS) * WARP)
    first = int32(warp * run)
    for i in range(thread, num_rows, PLAN_THREADS):
        plan[counts + i] = int32(0)
    for i in range(thread, num_tiles, PLAN_THREADS):
        plan[capacity + i] = int32(0)
    if lane == 0:
        found[warp] = int32(0)
    cuda.syncthreads()  # counters and tiles are zero
    mine = int32(0)
    for i in range(first + lane, min(first + run, size), WARP):
        if i >= routed or gates[i] != float32(0):
            mine = int32(mine + 1)
    cuda.atomic.add(found, warp, mine)
    cuda.syncthreads()  # every warp's pairs are counted
    pair = int32(0)
    for other in range(PLAN_WARPS):
        if other < warp:
            pair = int32(pair + found[other])
    for step in range(0, run, WARP):
        i = int32(first + step + lane)
        chosen = i < size and (i >= routed or gates[min(i, int32(routed - 1))] != float32(0))
        below, together = count_below(chosen, lane, scratch)
        at = min(int32(pair + below), capacity)
        expert = int32(uint32(i) // uint32(num_rows))
        if i == expert * num_rows and i < size:
            plan[starts + expert] = at
        if chosen and at < capacity:
            plan[at] = i
        pair = int32(pair + together)
    if warp == PLAN_WARPS - 1 and lane == 0:
        plan[starts + num_experts] = min(pair, capacity)
    cuda.syncthreads()  # pairs and experts' first pairs are written
    for at in range(thread, plan[starts + num_experts], PLAN_THREADS):
        expert = int32(uint32(plan[at]) // uint32(num_rows))
        row = int32(plan[at] - expert * num_rows)
        slot = cuda.atomic.add(plan, counts + row, int32(1))
        if slot < num_chosen:
            plan[own + row * num_chosen + slot] = at
        first, end = plan[starts + expert], plan[starts + expert + 1]
        open_tile(plan, at, expert, first, end, capacity, tile_bits, num_tiles)


def plan_threads(num_rows, num_experts):
    """Threads of plan_kernel's block: whole warps for the gates where one block has as many."""
    return min(PLAN_THREADS, -(-num_rows * num_experts // WARP) * WARP)


_FLAT, _INTEGERS = types.Array(types.float32, 1, "C"), types.Array(types.int32, 1, "C")
SPECS = [KernelSpec("experts_plan", plan_kernel, (_FLAT, _INTEGERS) + (types.int32,) * 5, PLAN_THREADS)]
