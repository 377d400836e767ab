"""The walk of the target's tokens down the tree: next[row] = the child of row whose token is target[row].

All rows look at once whether they continue their parent's path; then one thread follows `next` from the root through
shared memory, a step a node of the path. Knows rows and tokens, not how the target chose them.
"""

from numba import cuda, int32, types, uint32

from kernels_numba.checks import check, require
from kernels_numba.primitives import SIMULATED, after_previous
from kernels_numba.registry import KernelSpec

THREADS = 8 if SIMULATED else 512
MAX_ROWS = 41 if SIMULATED else 1025
SHARE = -(-MAX_ROWS // THREADS)  # rows of a thread


@cuda.jit
def accept_kernel(parents, token_ids, target_tokens, num_nodes, out_path, out_result):
    """The whole walk in one block; see the launcher."""
    after_previous()
    targets = cuda.shared.array(MAX_ROWS, int32)
    following = cuda.shared.array(MAX_ROWS, int32)
    path = cuda.shared.array(MAX_ROWS, int32)
    my_parents = cuda.local.array(SHARE, int32)  # in registers
    my_tokens = cuda.local.array(SHARE, int32)
    my_targets = cuda.local.array(SHARE, int32)
    thread = int32(cuda.threadIdx.x)
    rows = int32(parents.shape[0])
    used = min(rows, num_nodes[0] + int32(1))
    for i in range(SHARE):  # without branches, so that all loads are in flight
        row = uint32(min(int32(i * THREADS) + thread, rows - int32(1)))
        my_parents[i], my_tokens[i], my_targets[i] = parents[row], token_ids[row], target_tokens[row]
    for i in range(SHARE):
        row = int32(i * THREADS) + thread
        if row < rows:
            targets[row] = my_targets[i]
            following[row] = rows  # none
            path[row] = int32(-1)
    cuda.syncthreads()  # targets are staged, nothing follows anything
    for i in range(SHARE):
        row, parent = int32(i * THREADS) + thread, my_parents[i]
        if row < used and parent >= int32(0) and parent < row and targets[parent] == my_tokens[i]:
            cuda.atomic.min(following, parent, row)  # siblings have distinct tokens; if not, the first counts
    cuda.syncthreads()  # every row on some path stands behind its parent
    if thread == int32(0):
        last, length = int32(0), int32(1)
        path[0] = int32(0)
        row = following[0]
        while row < rows:
            path[length] = row
            length += int32(1)
            last = row
            row = following[row]
        out_result[0] = length
        out_result[1] = targets[last]
    cuda.syncthreads()  # the path is known
    for i in range(SHARE):
        row = int32(i * THREADS) + thread
        if row < rows:
            out_path[row] = path[row]


def accept(parents, token_ids, target_tokens, num_nodes, out_path, out_result, stream=0):
    """Follow the target from the root; write the accepted rows, and their number and the bonus token.

    parents, token_ids, target_tokens i32 [N + 1] of which rows 0..num_nodes (i32[1]) are used, parents before children.
    out_path i32 [N + 1]: the accepted rows, the root first, then -1. out_result i32 [2]: length >= 1, and the target's
    token after the path, so that the round commits length tokens. N + 1 at most MAX_ROWS. Raises LaunchError.
    """
    check("accept: parents", parents, "int32", (None,))
    rows = parents.shape[0]
    require(1 <= rows <= MAX_ROWS, f"accept: {rows} rows, wanted 1..{MAX_ROWS}")
    for name, array in (("token_ids", token_ids), ("target_tokens", target_tokens), ("out_path", out_path)):
        check(f"accept: {name}", array, "int32", (rows,))
    check("accept: num_nodes", num_nodes, "int32", (1,))
    check("accept: out_result", out_result, "int32", (2,))
    accept_kernel[1, THREADS, stream](parents, token_ids, target_tokens, num_nodes, out_path, out_result)


_I32 = types.Array(types.int32, 1, "C")
SPECS = [KernelSpec("accept", accept_kernel, (_I32,) * 6, THREADS)]
