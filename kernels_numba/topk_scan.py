"""The first kernel of `topk_log_softmax`: what stands for each group of consecutive logits of a row.

group_key = max(order_key(logit, index)), group_sum = sum(exp(logit - greatest of the group))
"""

import numpy as np
from numba import cuda, float32, types, uint32

from kernels_numba.primitives import SIMULATED, after_previous, device_function, exp, order_key
from kernels_numba.registry import KernelSpec

GROUP = 4 if SIMULATED else 32  # elements behind one key
SCAN_THREADS = 8 if SIMULATED else 256
TILE = SCAN_THREADS * (GROUP + 1)  # a column more: no bank conflicts
NEG_INF = np.float32(-np.inf)


@cuda.jit
def scan_kernel(logits, group_keys, group_sums):
    """The greatest key of each group of a row, and its sum of exponentials; grid (chunks, rows)."""
    after_previous()
    tile = cuda.shared.array(TILE, float32)
    values = cuda.local.array(GROUP, float32)  # in registers
    thread = uint32(cuda.threadIdx.x)
    row = uint32(cuda.blockIdx.y)
    first = uint32(cuda.blockIdx.x) * uint32(SCAN_THREADS * GROUP)
    vocab = uint32(logits.shape[1])
    for i in range(GROUP):  # neighbours load neighbours, all loads in flight
        index = uint32(first + thread + uint32(i * SCAN_THREADS))
        values[i] = logits[row, index] if index < vocab else NEG_INF
    for i in range(GROUP):
        place = uint32(thread + uint32(i * SCAN_THREADS))
        tile[place + place // uint32(GROUP)] = values[i]
    cuda.syncthreads()  # the chunk is in shared memory
    start = uint32(first + thread * uint32(GROUP))
    if start < vocab:
        best, best_index = NEG_INF, start
        for i in range(GROUP):
            values[i] = tile[uint32(thread * uint32(GROUP + 1) + uint32(i))]
            if values[i] > best:  # false for a NaN and for an equal later one
                best, best_index = values[i], uint32(start + uint32(i))
        total = float32(0)
        for i in range(0, GROUP, 4):
            left = term(values[i], best) + term(values[i + 1], best)
            right = term(values[i + 2], best) + term(values[i + 3], best)
            total += left + right
        group = uint32(start // uint32(GROUP))
        group_keys[row, group] = order_key(best, best_index)
        group_sums[row, group] = total


@device_function
def term(value, best):
    """exp(value - best), 0 for -inf beside -inf, NaN for a NaN."""
    return float32(0) if value == NEG_INF else float32(exp(value - best))


_ROWS = types.Array(types.float32, 2, "C")
SPECS = [
    KernelSpec("topk_scan", scan_kernel, (_ROWS, types.Array(types.uint64, 2, "C"), _ROWS), SCAN_THREADS)
]
