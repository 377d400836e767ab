"""A warp's lanes among themselves: where a thread is, values of another lane, flags counted over the lanes below.

`scratch` is a shared array of a slot a thread for every value exchanged, which the GPU leaves alone; every thread of
the block must reach each call: the simulator meets at barriers.
"""

import numpy as np
from numba import cuda, int32, uint32

from kernels_numba.primitives import FULL, SIMULATED, WARP, device_function

WARP_BITS = WARP.bit_length() - 1
WARPS = 2 if SIMULATED else 8
THREADS = WARPS * WARP

if SIMULATED:

    @cuda.jit(device=True)
    def exchange(values, count, offset, scratch):
        """Put into values[:count] those of lane `own ^ offset`; every thread of the block must come here."""
        thread = cuda.threadIdx.x
        for j in range(count):
            scratch[j * THREADS + thread] = values[j]
        cuda.syncthreads()  # every value is there
        for j in range(count):
            values[j] = scratch[j * THREADS + (thread ^ offset)]
        cuda.syncthreads()  # every value is read

    @cuda.jit(device=True)
    def count_below(flag, lane, scratch):
        """How many lower lanes of the warp hold a true flag, and how many lanes do; as `exchange`, with i32 scratch."""
        thread = cuda.threadIdx.x
        scratch[thread] = 1 if flag else 0
        cuda.syncthreads()  # every flag is there
        flags = [int(scratch[thread - lane + other]) for other in range(WARP)]
        cuda.syncthreads()  # every flag is read
        return np.int32(sum(flags[:lane])), np.int32(sum(flags))

else:

    @device_function
    def exchange(values, count, offset, scratch):
        for j in range(count):
            values[j] = cuda.shfl_xor_sync(FULL, values[j], offset)

    @device_function
    def count_below(flag, lane, scratch):
        lanes = uint32(cuda.ballot_sync(FULL, flag))
        return int32(cuda.popc(uint32(lanes & ((1 << lane) - 1)))), int32(cuda.popc(lanes))


@device_function
def lane_and_warp():
    """This thread's lane of its warp and its warp of the block, i32."""
    thread = int32(cuda.threadIdx.x)
    return int32(thread & (WARP - 1)), int32(thread >> WARP_BITS)
