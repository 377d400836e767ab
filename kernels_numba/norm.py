"""RMSNorm: out = weight * (x * (1 / sqrt(sum(x^2) / H + eps))) over the last axis. One block a row.

`add_norm` adds a branch to the residual stream first: residual += branch; out = norm(residual), the bits of the two
operations apart, in one launch.

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
def add_row(x, branch, start, width):
    """x += branch in the row at `start`; each thread adds the elements that it sums and writes later."""
    for i in range(cuda.threadIdx.x, width, cuda.blockDim.x):
        x[start + i] += branch[start + i]


@device_function
def add_row4(x, branch, start, width):
    """The same in 16-byte accesses."""
    for i in range(4 * cuda.threadIdx.x, width, 4 * cuda.blockDim.x):
        a, b, c, d = load4(x, start + i)
        e, f, g, h = load4(branch, start + i)
        store4(x, start + i, a + e, b + f, c + g, d + h)


@device_function
def inverse_rms(total, width, eps):
    """1 / sqrt(total / width + eps)."""
    return float32(1) / float32(math.sqrt(float32(total / float32(width)) + eps))


@functools.cache
def make_rms_norm(wide, adding):
    """The kernel for widths that are multiples of 4 (`wide`: 16-byte accesses) or not, after x += branch or not."""
    reduce, add_to = (sum_of_squares4, add_row4) if wide else (sum_of_squares, add_row)

    @cuda.jit
    def rms_norm_kernel(x, branch, weight, eps, out):
        """out = weight * (x * inverse_rms(x)); flat x and out of gridDim.x rows, out may be x."""
        scratch = cuda.shared.array(MAX_THREADS, float32)
        partials = cuda.shared.array(WARP, float32)
        width = weight.shape[0]
        start = int64(cuda.blockIdx.x) * width
        if adding:
            add_to(x, branch, start, width)
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
    _launch("rms_norm", {"x": x, "out": out}, x, weight, eps, out, False, stream)


def add_norm(residual, branch, weight, eps, out, stream=0):
    """residual += branch, then out = weight * residual / rms(residual); f32 [..., H], weight [H]. LaunchError.

    out may be branch; residual is neither.
    """
    arrays = {"residual": residual, "branch": branch, "out": out}
    _launch("add_norm", arrays, branch, weight, eps, out, True, stream)


def _launch(name, arrays, branch, weight, eps, out, adding, stream):
    check(f"{name}: weight", weight, "float32", (None,))
    width = weight.shape[0]
    require(width > 0, f"{name}: weight: expected at least one element, found none")
    require(eps > 0, f"{name}: eps: expected a number above 0, found {eps}")
    x = next(iter(arrays.values()))
    for label, array in arrays.items():
        check(f"{name}: {label}", array, "float32", (*x.shape[:-1], width))
    if x.size:
        wide = is_wide(width)
        launch = make_rms_norm(wide, adding)[x.size // width, norm_threads(width, wide), stream]
        launch(x.reshape(-1), branch.reshape(-1), weight, float32(eps), out.reshape(-1))


_FLAT = types.Array(types.float32, 1, "C")
SPECS = [
    KernelSpec(
        f"{'add_norm' if adding else 'rms_norm'}{'' if wide else '_odd'}",
        make_rms_norm(wide, adding),
        (_FLAT, _FLAT, _FLAT, types.float32, _FLAT),
        MAX_THREADS,
    )
    for adding in (False, True)
    for wide in (True, False)
]
