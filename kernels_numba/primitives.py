"""What the simulator has not or does otherwise: warp sums, bit casts, wide loads, fused multiply-add.

Each name stands twice here, once for the GPU and once for Numba's simulator, with the same meaning and the same order
of summation; everything else in this package is one code for both. The simulator's warps are WARP = 4 threads wide,
so that a test of many warps stays affordable; kernels must not assume a width.

A warp primitive takes `scratch`, a shared array of one 4-byte (or 8-byte, as named) slot a thread, which the GPU
leaves alone, and must be reached by every thread of the block: the simulator meets at barriers where a GPU shuffles.
"""

import math

import numpy as np
from numba import config, cuda, int32, int64, uint16, uint32, uint64

__all__ = [
    "FULL",
    "SIMULATED",
    "WARP",
    "after_previous",
    "bf16_to_float",
    "bits_from_float",
    "device_function",
    "exp",
    "float_from_bits",
    "float_to_bf16",
    "fma",
    "index_of_key",
    "load4",
    "load8",
    "load_settled",
    "order_key",
    "store4",
    "warp_max",
    "warp_max_u64",
    "warp_sum",
    "warp_sum_i32",
]

SIMULATED = bool(config.ENABLE_CUDASIM)
WARP = 4 if SIMULATED else 32
FULL = 0xFFFFFFFF


def device_function(function):
    """The decorator of functions that kernels call: inlined always, and by LLVM.

    Numba's own inline="always" types every copy anew: `sample` took 25 s to compile, for the same machine code.
    """
    return cuda.jit(function, device=True, **({} if SIMULATED else {"forceinline": True}))


if SIMULATED:
    import kernels_numba.primitives_simulator  # noqa: F401  shared arrays that are shared

    def after_previous():
        """Wait until all that earlier launches wrote is there, then let the next start: the first line of most kernels.

        In a captured round a launch may overlap the end of the one before it (programmatic dependent launch); its
        blocks stand by and wait here. Before that a kernel touches none of its arrays but `weight`, which no launch of
        a round writes, and those named settled.., which the one ahead does not write: launches before that have ended
        when one begins, since the one ahead waited for them before it let this one start. `load_settled` reads them.
        Every block of every kernel comes here once. No device function calls this.
        """

    def load_settled(array, index):
        """The f32 or i32 at a flat index of an array that a launch before the one ahead wrote, whatever L1 has."""
        return array.reshape(-1)[index]

    def float_from_bits(bits):
        """The f32 whose bits are the u32 given."""
        return np.uint32(bits).view(np.float32)

    def bits_from_float(value):
        """The bits of an f32 as u32."""
        return np.float32(value).view(np.uint32)

    def fma(a, b, c):
        """a * b + c rounded once, in f32 (through f64 here, which differs from one rounding in rare ties alone)."""
        return np.float32(np.float64(a) * np.float64(b) + np.float64(c))

    def exp(value):
        """e**value in f32."""
        return np.float32(math.exp(min(float(value), 89.0))) if not math.isnan(value) else value

    def load4(array, index):
        """Four f32 from a flat array, `index` a multiple of 4: one 16-byte access on the GPU."""
        return array[index], array[index + 1], array[index + 2], array[index + 3]

    def load8(array, index):
        """Eight bf16 (u16 bits) from a flat array as f32, `index` a multiple of 8: one 16-byte access on the GPU."""
        return tuple(bf16_to_float(array[index + i]) for i in range(8))

    def store4(array, index, a, b, c, d):
        """Four f32 to a flat array, `index` a multiple of 4: one 16-byte access on the GPU."""
        array[index], array[index + 1], array[index + 2], array[index + 3] = a, b, c, d

    @cuda.jit(device=True)  # so that the simulator lends it the running thread's cuda.threadIdx and barriers
    def _butterfly(value, scratch, combine):
        thread = cuda.threadIdx.x
        offset = WARP // 2
        while offset:
            cuda.syncthreads()
            scratch[thread] = value
            cuda.syncthreads()
            value = combine(value, scratch[thread ^ offset])
            offset //= 2
        cuda.syncthreads()
        return value

    def warp_sum(value, scratch):
        """The sum over the warp of an f32, the same bits in every lane: pairs at distance WARP/2 first, then nearer."""
        return _butterfly(np.float32(value), scratch, lambda a, b: np.float32(a + b))

    def warp_max(value, scratch):
        """The maximum over the warp of an f32."""
        return _butterfly(np.float32(value), scratch, max)

    def warp_max_u64(value, scratch):
        """The maximum over the warp of a u64; `scratch` has 8-byte slots."""
        return _butterfly(np.uint64(value), scratch, max)

    def warp_sum_i32(value, scratch):
        """The sum over the warp of an i32; `scratch` has i32 slots."""
        return _butterfly(np.int32(value), scratch, lambda a, b: np.int32(a + b))

else:
    from kernels_numba.intrinsics import (
        after_previous,
        bits_from_float,
        float_from_bits,
        fma,
        load4,
        load8,
        load_settled,
        store4,
    )

    @device_function
    def exp(value):
        return math.exp(value)

    @device_function
    def warp_sum(value, scratch):
        offset = int32(WARP // 2)
        while offset > 0:
            value += cuda.shfl_xor_sync(FULL, value, offset)
            offset >>= int32(1)
        return value

    @device_function
    def warp_max(value, scratch):
        offset = int32(WARP // 2)
        while offset > 0:
            value = max(value, cuda.shfl_xor_sync(FULL, value, offset))
            offset >>= int32(1)
        return value

    @device_function
    def warp_max_u64(value, scratch):
        offset = int32(WARP // 2)
        while offset > 0:  # Numba shuffles signed integers alone; the bits are the same
            value = max(value, uint64(cuda.shfl_xor_sync(FULL, int64(value), offset)))
            offset >>= int32(1)
        return value

    @device_function
    def warp_sum_i32(value, scratch):
        offset = int32(WARP // 2)
        while offset > 0:
            value += cuda.shfl_xor_sync(FULL, value, offset)
            offset >>= int32(1)
        return value


@device_function
def bf16_to_float(bits):
    """The f32 value of bf16 bits (u16)."""
    return float_from_bits(uint32(uint32(bits) << uint32(16)))


@device_function
def float_to_bf16(value):
    """An f32 rounded to bf16, nearest even, as u16 bits; a NaN stays a NaN."""
    bits = uint32(bits_from_float(value))
    if uint32(bits & uint32(0x7FFFFFFF)) > uint32(0x7F800000):
        return uint16((bits >> uint32(16)) | uint32(64))
    bias = uint32(0x7FFF) + ((bits >> uint32(16)) & uint32(1))
    return uint16((uint64(bits) + uint64(bias)) >> uint64(16))


@device_function
def order_key(value, index):
    """A u64 that is greater for a greater f32, and for the lower index among equals; NaN counts as -inf.

    -0.0 equals 0.0. The index is `index_of_key(key)`.
    """
    bits = uint32(bits_from_float(value))
    magnitude = uint32(bits & uint32(0x7FFFFFFF))
    if magnitude > uint32(0x7F800000):
        bits = uint32(0xFF800000)
    if magnitude == uint32(0):
        bits = uint32(0)
    ordered = uint32(~bits) if bits >> uint32(31) else uint32(bits | uint32(0x80000000))
    return (uint64(ordered) << uint64(32)) | uint64(uint32(0xFFFFFFFF) - uint32(index))


@device_function
def index_of_key(key):
    """The index inside an `order_key`, as i32."""
    return int32(uint32(0xFFFFFFFF) - uint32(key & uint64(0xFFFFFFFF)))
