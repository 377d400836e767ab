"""Random weights from a seed: out[i] = ((w >> 8) * 2^-23 - 1) * amplitude, uniform in [-amplitude, amplitude).

w = word i mod 4 of Philox under the seed's key and counter (i / 4 low, i / 4 high, index, 0): an element depends on
seed, index and i alone. bf16 values are rounded to nearest even, so that one may reach the amplitude itself.
"""

import functools

import numpy as np
from numba import cuda, float32, int32, int64, types, uint32

from kernels_numba.checks import check, require
from kernels_numba.philox import WORD, philox4x32_10_words
from kernels_numba.primitives import SIMULATED, after_previous, float_to_bf16
from kernels_numba.registry import KernelSpec

THREADS = 8 if SIMULATED else 256
MAX_BLOCKS = 2 if SIMULATED else 4096
STEP = np.float32(2.0**-23)


@functools.cache
def make_kernel(half):
    """The kernel for f32, or for bf16 bits (`half`)."""

    @cuda.jit
    def fill_kernel(out, key_low, key_high, index, amplitude):
        """Flat out; a thread makes the four elements of a counter, in a grid-stride loop."""
        after_previous()
        size = int64(out.shape[0])
        quad, stride = int64(cuda.grid(1)), int64(cuda.gridsize(1))
        while int64(4) * quad < size:
            words = philox4x32_10_words(
                uint32(quad & int64(WORD)),
                uint32(quad >> int64(32)),
                index,
                uint32(0),
                key_low,
                key_high,
            )
            first = int64(4) * quad
            for lane in range(int32(4)):
                if first + lane < size:
                    unit = float32(uint32(words[lane]) >> uint32(8)) * STEP - float32(1)
                    value = float32(unit * amplitude)
                    if half:
                        out[first + lane] = float_to_bf16(value)
                    else:
                        out[first + lane] = value
            quad += stride

    return fill_kernel


def fill(out, seed, index, amplitude, stream=0):
    """out, f32 or bf16 bits u16 of any shape, = random numbers of array `index` under `seed`, scaled by `amplitude`.

    0 <= seed < 2^64, 0 <= index < 2^32; a host number each. Raises LaunchError.
    """
    check("fill: out", out, ("float32", "uint16"), (None,) * len(out.shape))
    require(0 <= seed < 2**64, f"fill: seed: expected 0 to 2^64 - 1, found {seed}")
    require(0 <= index < 2**32, f"fill: index: expected 0 to 2^32 - 1, found {index}")
    if not out.size:
        return
    quads = -(-out.size // 4)
    kernel = make_kernel(str(out.dtype) == "uint16")
    kernel[min(MAX_BLOCKS, -(-quads // THREADS)), THREADS, stream](
        out.reshape(-1),
        np.uint32(seed & WORD),
        np.uint32(seed >> 32),
        np.uint32(index),
        np.float32(amplitude),
    )


def _spec(half):
    flat = types.Array(types.uint16 if half else types.float32, 1, "C")
    arguments = (flat, types.uint32, types.uint32, types.uint32, types.float32)
    return KernelSpec(f"fill_{'bf16' if half else 'f32'}", make_kernel(half), arguments, THREADS)


SPECS = [_spec(half) for half in (False, True)]
