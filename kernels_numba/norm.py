"""RMSNorm: out = weight * (x * (1 / sqrt(sum(x^2) / H + eps))) over the last axis. One block a row.

The threads of a block, and so the order of the sum, depend on the row's width H alone.
"""

import functools
import math

from numba import cuda, float32, int64, types

from kernels_numba.checks import check, require
from kernels_numba.primitives import device_function, fma, load4, store4
from kernels_numba.primitives_block import MAX_THREADS, WARP, block_sum, threads_for
from kernels_numba.registry import KernelSpec


@device_function
def sum_of_squares(x, start, width, scratch, partials):
    """sum(x[start : start + width]^2) over a flat array, in every thread of the block."""
    total = float32(0)
    for i in range(cuda.threadIdx.x, width, cuda.blockDim.x):
        value = x[start + i]
        total = fma(value, value, total)
    return block_sum(total, scratch, partials)


@device_function
def sum_of_squares4(x, start, width, scratch, partials):
    """The same in 16-byte accesses; start and width are multiples of 4."""
    total = float32(0)
    for i in range(4 * cuda.threadIdx.x, width, 4 * cuda.blockDim.x):
        a, b, c, d = load4(x, start + i)
        total = fma(a, a, total)
        total = fma(b, b, total)
        total = fma(c, c, total)
        total = fma(d, d, total)
    return block_sum(total, scratch, partials)


@device_function
def inverse_rms(total, width, eps):
    """1 / sqrt(total / width + eps)."""
    return float32(1) / float32(math.sqrt(float32(total / float32(width)) + eps))


@functools.cache
def make_rms_norm(wide):
    """The kernel for rows whose width is a multiple of 4 (`wide`: 16-byte accesses), or for any."""
    reduce = sum_of_squares4 if wide else sum_of_squares

    @cuda.jit
    def rms_norm_kernel(x, weight, eps, out):
        """out = weight * (x * inverse_rms(x)); flat x and out of gridDim.x rows, out may be x."""
        scratch = cuda.shared.array(MAX_THREADS, float32)
        partials = cuda.shared.array(WARP, float32)
        width = weight.shape[0]
        start = int64(cuda.blockIdx.x) * width
        scale = inverse_rms(reduce(x, start, width, scratch, partials), width, eps)
        if wide:
            for i in range(4 * cuda.threadIdx.x, width, 4 * cuda.blockDim.x):
                a, b, c, d = load4(x, start + i)
                wa, wb, wc, wd = load4(weight, i)
                store4(out, start + i, wa * (a * scale), wb * (b * scale), wc * (c * scale), wd * (d * scale))
        else:
            for i in range(cuda.threadIdx.x, width, cuda.blockDim.x):
                out[start + i] = weight[i] * (x[start + i] * scale)

    return rms_norm_kernel


def is_wide(*sizes):
    """Whether every row starts on 16 bytes: all sizes are multiples of 4."""
    return all(size % 4 == 0 for size in sizes)


def norm_threads(width, wide):
    """Threads of the block that sums a row of `width`."""
    return threads_for(width // 4 if wide else width)


def rms_norm(x, weight, eps, out, stream=0):
    """out = weight * x / rms(x) over the last axis; f32 x and out [..., H], weight [H], out may be x. LaunchError."""
    check("rms_norm: weight", weight, "float32", (None,))
    width = weight.shape[0]
    require(width > 0, "rms_norm: weight: expected at least one element, found none")
    require(eps > 0, f"rms_norm: eps: expected a number above 0, found {eps}")
    check("rms_norm: x", x, "float32", (*x.shape[:-1], width))
    check("rms_norm: out", out, "float32", x.shape)
    if x.size == 0:
        return
    wide = is_wide(width)
    launch = make_rms_norm(wide)[x.size // width, norm_threads(width, wide), stream]
    launch(x.reshape(-1), weight, float32(eps), out.reshape(-1))


_FLAT = types.Array(types.float32, 1, "C")
SPECS = [
    KernelSpec(name, make_rms_norm(wide), (_FLAT, _FLAT, types.float32, _FLAT), MAX_THREADS)
    for name, wide in (("rms_norm", True), ("rms_norm_odd", False))
]
