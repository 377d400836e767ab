"""The state that a round leaves on the device for the next one, and the one report that the host copies.

settle: a bad row on the walk makes result's length 0, so that nothing is committed; the report's head says length,
bonus, number of drafted nodes, bad rows off the walk, and the first bad row of the walk or -1.
advance: context_len += length; wanted -= length; the bonus token becomes the root of the next tree and of the next
block; max_depth = max(0, min(horizon, wanted - 1, max_context - 1 - context_len)).
stamp: times[slot] = the GPU's clock in nanoseconds.
"""

from numba import cuda, int32, types, uint32, uint64

from kernels_numba.checks import check, require
from kernels_numba.intrinsics_time import clock_ns
from kernels_numba.primitives import SIMULATED, after_previous
from kernels_numba.registry import KernelSpec

THREADS = 8 if SIMULATED else 128
HEAD = 5  # report slots before the arrays


@cuda.jit
def settle_kernel(
    path, target_tokens, bad, num_nodes, tree_token_ids, parents, depths, log_weights, result, report
):
    """One block. The arrays of the tree and the walk have N + 1 rows; report i32[HEAD + 7 (N + 1)] gets them all.

    Behind its head: target_tokens, path, token_ids, parents, depths, then log_weights as pairs of words, low first.
    """
    after_previous()
    first_bad = cuda.shared.array(1, int32)
    num_bad = cuda.shared.array(1, int32)
    thread, rows, length = int32(cuda.threadIdx.x), int32(path.shape[0]), result[0]
    if thread == 0:
        first_bad[0], num_bad[0] = rows, int32(0)
    cuda.syncthreads()  # the counters are set
    for row in range(thread, rows, THREADS):
        if row <= num_nodes[0] and bad[row] != 0:
            cuda.atomic.add(num_bad, 0, int32(1))
        if row < length and bad[path[row]] != 0:
            cuda.atomic.min(first_bad, 0, path[row])
            cuda.atomic.add(num_bad, 0, int32(-1))
        report[HEAD + row] = target_tokens[row]
        report[HEAD + rows + row] = path[row]
        report[HEAD + 2 * rows + row] = tree_token_ids[row]
        report[HEAD + 3 * rows + row] = parents[row]
        report[HEAD + 4 * rows + row] = depths[row]
        bits = log_weights[row]
        report[HEAD + 5 * rows + 2 * row] = int32(uint32(bits & uint64(0xFFFFFFFF)))
        report[HEAD + 5 * rows + 2 * row + 1] = int32(uint32(bits >> uint64(32)))
    cuda.syncthreads()  # every row was looked at
    if thread == 0:
        failed = first_bad[0] < rows
        result[0] = int32(0) if failed else length
        report[0], report[1], report[2] = result[0], result[1], num_nodes[0]
        report[3], report[4] = num_bad[0], first_bad[0] if failed else int32(-1)


@cuda.jit
def finish_chunk_kernel(count, target_tokens, bad, result, report):
    """One thread: a prompt's chunk commits `count` rows, and its last row alone chooses a token."""
    after_previous()
    last = count[0] - int32(1)
    failed = bad[last] != 0
    result[0], result[1] = count[0], target_tokens[last]
    report[0], report[1], report[2], report[3] = count[0], target_tokens[last], int32(0), int32(0)
    report[4] = last if failed else int32(-1)


@cuda.jit
def stamp_kernel(times, slot):
    """One thread: times u64[slots]."""
    after_previous()
    times[slot] = clock_ns()


@cuda.jit
def advance_kernel(
    result, horizon, max_context, context_len, wanted, max_depth, tree_token_ids, block_token_ids
):
    """One thread. All but the two numbers are i32 arrays, read or changed at [0]."""
    after_previous()
    length = result[0]
    if length > 0:
        tree_token_ids[0] = result[1]
        block_token_ids[0] = result[1]
    context_len[0] += length
    wanted[0] -= length
    depth = min(horizon, min(wanted[0] - int32(1), max_context - int32(1) - context_len[0]))
    max_depth[0] = max(int32(0), depth)


@cuda.jit
def next_positions_kernel(depths, context_len, out):
    """out[i] = context_len + depths[i] + 1: the position of the token that row i chooses."""
    after_previous()
    i = cuda.grid(1)
    if i < out.shape[0]:
        out[i] = context_len[0] + depths[i] + int32(1)


def report_size(num_rows):
    """i32 slots of a report for trees of that many rows, the root counted."""
    return HEAD + 7 * num_rows


def settle(
    path,
    target_tokens,
    bad,
    num_nodes,
    tree_token_ids,
    parents,
    depths,
    log_weights,
    result,
    report,
    stream=0,
):
    """Look for bad rows on the walk and write the report; arrays [N + 1], i32, but bad u8 and log_weights f64.

    num_nodes i32[1]; result i32[2] = (length, bonus) as `accept` left it, its length set to 0 when the walk met a bad
    row; report i32[report_size(N + 1)]. Raises LaunchError.
    """
    check("settle: path", path, "int32", (None,))
    shape = path.shape
    for name, array in (
        ("target_tokens", target_tokens),
        ("token_ids", tree_token_ids),
        ("parents", parents),
    ):
        check(f"settle: {name}", array, "int32", shape)
    check("settle: depths", depths, "int32", shape)
    check("settle: bad", bad, "uint8", shape)
    check("settle: log_weights", log_weights, "float64", shape)
    check("settle: num_nodes", num_nodes, "int32", (1,))
    check("settle: result", result, "int32", (2,))
    check("settle: report", report, "int32", (report_size(shape[0]),))
    settle_kernel[1, THREADS, stream](
        path,
        target_tokens,
        bad,
        num_nodes,
        tree_token_ids,
        parents,
        depths,
        log_weights.view("uint64"),
        result,
        report,
    )


def finish_chunk(count, target_tokens, bad, result, report, stream=0):
    """Result and report head of a prompt's chunk of count i32[1] rows; target_tokens i32 and bad u8 [M].

    Raises LaunchError.
    """
    check("finish_chunk: count", count, "int32", (1,))
    check("finish_chunk: target_tokens", target_tokens, "int32", (None,))
    check("finish_chunk: bad", bad, "uint8", target_tokens.shape)
    check("finish_chunk: result", result, "int32", (2,))
    check("finish_chunk: report", report, "int32", (None,))
    require(report.shape[0] >= HEAD, f"finish_chunk: report: expected {HEAD} slots, found {report.shape[0]}")
    finish_chunk_kernel[1, 1, stream](count, target_tokens, bad, result, report)


def stamp(times, slot, stream=0):
    """times u64[slots]: write the GPU's clock to slot, a host number. Raises LaunchError."""
    check("stamp: times", times, "uint64", (None,))
    require(0 <= slot < times.shape[0], f"stamp: slot {slot} of {times.shape[0]}")
    stamp_kernel[1, 1, stream](times, int32(slot))


def advance(
    result, horizon, max_context, context_len, wanted, max_depth, tree_token_ids, block_token_ids, stream=0
):
    """Move on by result i32[2] = (length, bonus); horizon and max_context are host numbers, the rest i32 arrays.

    Raises LaunchError.
    """
    check("advance: result", result, "int32", (2,))
    for name, array in (("context_len", context_len), ("wanted", wanted), ("max_depth", max_depth)):
        check(f"advance: {name}", array, "int32", (1,))
    for name, array in (("tree_token_ids", tree_token_ids), ("block_token_ids", block_token_ids)):
        check(f"advance: {name}", array, "int32", (None,))
        require(array.shape[0] > 0, f"advance: {name}: expected at least one element, found none")
    advance_kernel[1, 1, stream](
        result,
        int32(horizon),
        int32(max_context),
        context_len,
        wanted,
        max_depth,
        tree_token_ids,
        block_token_ids,
    )


def next_positions(depths, context_len, out, stream=0):
    """out i32[M] = context_len[0] + depths i32[M] + 1. Raises LaunchError."""
    check("next_positions: depths", depths, "int32", (None,))
    check("next_positions: context_len", context_len, "int32", (1,))
    check("next_positions: out", out, "int32", depths.shape)
    if depths.size:
        next_positions_kernel[-(-depths.shape[0] // THREADS), THREADS, stream](depths, context_len, out)


_I = types.Array(types.int32, 1, "C")
_BYTES = types.Array(types.uint8, 1, "C")
_WIDE = types.Array(types.uint64, 1, "C")
SPECS = [
    KernelSpec("settle", settle_kernel, (_I, _I, _BYTES, _I, _I, _I, _I, _WIDE, _I, _I), THREADS),
    KernelSpec("finish_chunk", finish_chunk_kernel, (_I, _I, _BYTES, _I, _I), 1),
    KernelSpec("advance", advance_kernel, (_I, types.int32, types.int32, _I, _I, _I, _I, _I), 1),
    KernelSpec("next_positions", next_positions_kernel, (_I, _I, _I), THREADS),
    KernelSpec("stamp", stamp_kernel, (_WIDE, types.int32), 1),
]
