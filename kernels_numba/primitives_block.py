"""Sums, maxima and scans over a whole block, from warp primitives and barriers.

Every thread of the block must reach each call. A block has a multiple of WARP threads, at most MAX_THREADS. `scratch`
is what warp primitives want: a shared array of one slot a thread, which the GPU leaves alone; `partials` is a shared
array of WARP slots. Both have 8-byte slots where the name says u64.
"""

from numba import cuda, float32, int32, int64, uint64

from kernels_numba.primitives import FULL, SIMULATED, WARP, device_function, warp_max_u64, warp_sum

MAX_THREADS = WARP * WARP  # 1024 on the GPU, 16 in the simulator

if SIMULATED:

    def warp_scan_u64(value, scratch):
        """The sum of a u64 over this lane of the warp and those before it."""
        thread = cuda.threadIdx.x
        cuda.syncthreads()
        scratch[thread] = value
        cuda.syncthreads()
        return scratch[thread - thread % WARP : thread + 1].sum()

    def warp_sum_u64(value, scratch):
        """The sum of a u64 over the warp."""
        thread = cuda.threadIdx.x
        cuda.syncthreads()
        scratch[thread] = value
        cuda.syncthreads()
        return scratch[thread - thread % WARP :][:WARP].sum()

else:  # numba-cuda shuffles signed integers alone

    @device_function
    def warp_sum_u64(value, scratch):
        offset = int32(WARP // 2)
        while offset > 0:
            value += uint64(cuda.shfl_xor_sync(FULL, int64(value), offset))
            offset >>= int32(1)
        return value

    @device_function
    def warp_scan_u64(value, scratch):
        lane, offset = cuda.threadIdx.x % WARP, int32(1)
        while offset < WARP:
            before = uint64(cuda.shfl_up_sync(FULL, int64(value), offset))
            value += before if lane >= offset else uint64(0)
            offset <<= int32(1)
        return value


def threads_for(units):
    """Threads for a row of `units` pieces: as few as keep the most pieces a thread at what MAX_THREADS would have."""
    pieces = max(1, -(-units // MAX_THREADS))
    return max(1, -(-units // (pieces * WARP))) * WARP


@device_function
def block_sum(value, scratch, partials):
    """The sum over the block of an f32, the same bits in every thread, in an order that the block's size fixes."""
    value = warp_sum(value, scratch)
    warp, lane = cuda.threadIdx.x // WARP, cuda.threadIdx.x % WARP
    cuda.syncthreads()  # an earlier call's partials have been read
    if lane == 0:
        partials[warp] = value
    cuda.syncthreads()  # every warp's partial is there
    value = partials[lane] if lane < cuda.blockDim.x // WARP else float32(0)
    return warp_sum(value, scratch)


@device_function
def block_max_u64(value, scratch, partials):
    """The maximum over the block of a u64, in every thread."""
    value = warp_max_u64(value, scratch)
    warp, lane = cuda.threadIdx.x // WARP, cuda.threadIdx.x % WARP
    cuda.syncthreads()  # an earlier call's partials have been read
    if lane == 0:
        partials[warp] = value
    cuda.syncthreads()  # every warp's partial is there
    value = partials[lane] if lane < cuda.blockDim.x // WARP else uint64(0)
    return warp_max_u64(value, scratch)


@device_function
def block_scan_u64(value, scratch, partials):
    """The sum of a u64 over this thread of the block and those before it."""
    value = warp_scan_u64(value, scratch)
    warp, lane = cuda.threadIdx.x // WARP, cuda.threadIdx.x % WARP
    cuda.syncthreads()  # an earlier call's partials have been read
    if lane == WARP - 1:
        partials[warp] = value
    cuda.syncthreads()  # every warp's sum is there
    before = partials[lane] if lane < warp else uint64(0)
    return value + warp_sum_u64(before, scratch)
