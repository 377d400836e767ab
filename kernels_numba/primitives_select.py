"""Warp-wide search and order-preserving keys for the selection kernels, for the GPU and for the simulator.

As in `primitives`: each name stands twice with one meaning. `scratch` is a shared u64 array of one slot a thread that
the GPU leaves alone, and every thread of the block reaches each warp primitive.
"""

import numpy as np
from numba import cuda, float32, int32, uint32, uint64

from kernels_numba.primitives import SIMULATED, WARP, bits_from_float, device_function, float_from_bits

FULL = 0xFFFFFFFF

if SIMULATED:

    def bits_from_double(value):
        """The bits of an f64 as u64."""
        return np.float64(value).view(np.uint64)

    @cuda.jit(device=True)
    def _gather(value, scratch):
        """Every lane's value, in lane order."""
        thread = cuda.threadIdx.x
        first = thread - thread % WARP
        scratch[thread] = value
        cuda.syncthreads()  # every slot is written
        values = [int(slot) for slot in scratch[first : first + WARP]]
        cuda.syncthreads()  # every slot is read
        return values

    def warp_count(value, scratch):
        """The sum over the warp of an i32 that is not negative."""
        return np.int32(sum(_gather(value, scratch)))

    def warp_pick(value, lane, scratch):
        """The u32 that `lane`, the same in every lane, holds."""
        return np.uint32(_gather(value, scratch)[lane])

    def warp_lanes(holds, scratch):
        """The lanes in which `holds` is true, as a mask."""
        return np.uint32(sum(1 << lane for lane, value in enumerate(_gather(int(holds), scratch)) if value))

    def warp_first(key, value, scratch):
        """The greatest high half of the warp's u64 keys, which lanes have it, as a mask, and the u32 value of theirs.

        If several have it, the value is the greatest.
        """
        highs, values = [key >> 32 for key in _gather(key, scratch)], _gather(value, scratch)
        lanes = [lane for lane in range(WARP) if highs[lane] == max(highs)]
        best = max(values[lane] for lane in lanes)
        return np.uint32(max(highs)), np.uint32(sum(1 << lane for lane in lanes)), np.uint32(best)

    def warp_key(key, high, scratch):
        """The warp's greatest u64 key, whose high half is `high`."""
        return np.uint64(max(_gather(key, scratch)))

    def warp_greatest(key, scratch):
        """The warp's greatest u64."""
        return np.uint64(max(_gather(key, scratch)))

    def lowest_lane(mask):
        """The lowest lane of a mask that is not zero."""
        mask = int(mask)
        return np.int32((mask & -mask).bit_length() - 1)

    @cuda.jit(device=True)
    def warp_barrier():
        """Wait until every lane of the warp is here and sees what the others wrote to shared memory."""
        cuda.syncthreads()

else:
    from kernels_numba.intrinsics_select import bits_from_double, redux_add, redux_max

    @device_function
    def warp_count(value, scratch):
        return redux_add(value)

    @device_function
    def warp_pick(value, lane, scratch):
        return uint32(cuda.shfl_sync(FULL, int32(value), int32(lane)))

    @device_function
    def warp_lanes(holds, scratch):
        return uint32(cuda.ballot_sync(FULL, holds))

    @device_function
    def warp_first(key, value, scratch):
        high = uint32(key >> uint64(32))
        top = redux_max(high)
        best = redux_max(value if high == top else uint32(0))
        return top, uint32(cuda.ballot_sync(FULL, high == top)), best

    @device_function
    def warp_key(key, high, scratch):
        low = redux_max(uint32(key & uint64(FULL)) if uint32(key >> uint64(32)) == high else uint32(0))
        return (uint64(high) << uint64(32)) | uint64(low)

    @device_function
    def warp_greatest(key, scratch):
        return warp_key(key, redux_max(uint32(key >> uint64(32))), scratch)

    @device_function
    def lowest_lane(mask):
        return int32(int32(cuda.ffs(mask)) - int32(1))

    @device_function
    def warp_barrier():
        cuda.syncwarp()


@device_function
def sum_key(weight):
    """A u64 that is greater for a greater f64; -0.0 equals 0.0. It is above EMPTY for every finite one."""
    bits = uint64(bits_from_double(weight))
    if bits == uint64(1 << 63):
        bits = uint64(0)
    return uint64(~bits) if bits >> uint64(63) else uint64(bits | uint64(1 << 63))


EMPTY = 0x000FFFFFFFFFFFFF  # the key of -inf: no candidate
EMPTY_HIGH = EMPTY >> 32  # that no other key has


@device_function
def value_of_key(key):
    """The f32 inside a `primitives.order_key`; a zero has lost its sign, a NaN is -inf."""
    ordered = uint32(key >> uint64(32))
    bits = uint32(ordered & uint32(0x7FFFFFFF)) if ordered >> uint32(31) else uint32(~ordered)
    return float32(float_from_bits(bits))


@device_function
def is_finite(value):
    """Whether an f32 is neither infinite nor NaN."""
    return uint32(uint32(bits_from_float(value)) & uint32(0x7F800000)) != uint32(0x7F800000)
