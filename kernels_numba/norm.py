"""RMSNorm: out = weight * (x * (1 / sqrt(sum(x^2) / H + eps))) over the last axis. One block a row.

`add_norm` adds a branch to the residual stream first: residual += branch; out = norm(residual), the bits of the two
operations apart, in one launch.

The threads of a block, and so the order of the sum, depend on the row's width H alone.
"""

import functools
import math

from numba import cuda, float32, int64, types

from kernels_numba.checks import check, require
from kernels_numba.primitives import after_previous, device_function, fma, load4, store4
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
def add_squares(a, b, c, d, total):
    """total + a^2 + b^2 + c^2 + d^2, from left to right."""
    return fma(d, d, fma(c, c, fma(b, b, fma(a, a, total))))


@device_function
def sum_of_squares4(x, start, width, scratch, partials):
    """The same in 16-byte accesses; start and width are multiples of 4."""
    total = float32(0)
    for i in range(4 * cuda.threadIdx.x, width, 4 * cuda.blockDim.x):
        a, b, c, d = load4(x, start + i)
        total = add_squares(a, b, c, d, total)
    return block_sum(total, scratch, partials)


@device_function
def inverse_rms(total, width, eps):
    """1 / sqrt(total / width + eps)."""
    return float32(1) / float32(math.sqrt(float32(total / float32(width)) + eps))


@functools.cache
def make_wide_norm(adding):
    """The kernel for widths that are multiples of 4, in 16-byte accesses, after x += branch (`adding`) or not."""

    @device_function
    def load_piece(x, branch, at):
        a, b, c, d = load4(x, at)
        if adding:
            e, f, g, h = load4(branch, at)
            a, b, c, d = a + e, b + f, c + g, d + h
            store4(x, at, a, b, c, d)
        return a, b, c, d

    @cuda.jit
    def wide_norm_kernel(x, branch, weight, eps, out):
        """out = weight * (x * inverse_rms(x)); flat x and out of gridDim.x rows, out may be x.

        A thread holds its first piece and that of the weight, so that only the longest rows are read twice. That of the
        weight is on its way before the launch ahead has ended.
        """
        scratch = cuda.shared.array(MAX_THREADS, float32)
        partials = cuda.shared.array(WARP, float32)
        width = int64(weight.shape[0])
        start, step = int64(cuda.blockIdx.x) * width, int64(4 * cuda.blockDim.x)
        i = int64(4 * cuda.threadIdx.x)
        a = b = c = d = wa = wb = wc = wd = float32(0)
        if i < width:
            wa, wb, wc, wd = load4(weight, i)
        after_previous()
        if i < width:
            a, b, c, d = load_piece(x, branch, start + i)
        total = add_squares(a, b, c, d, float32(0))
        for j in range(i + step, width, step):
            e, f, g, h = load_piece(x, branch, start + j)
            total = add_squares(e, f, g, h, total)
        scale = inverse_rms(block_sum(total, scratch, partials), width, eps)
        if i < width:
            store4(out, start + i, wa * (a * scale), wb * (b * scale), wc * (c * scale), wd * (d * scale))
        for j in range(i + step, width, step):
            e, f, g, h = load4(x, start + j)
            we, wf, wg, wh = load4(weight, j)
            store4(out, start + j, we * (e * scale), wf * (f * scale), wg * (g * scale), wh * (h * scale))

    return wide_norm_kernel


@functools.cache
def make_odd_norm(adding):
    """The same for any width."""

    @cuda.jit
    def odd_norm_kernel(x, branch, weight, eps, out):
        """As wide_norm_kernel, an element at a time."""
        after_previous()
        scratch = cuda.shared.array(MAX_THREADS, float32)
        partials = cuda.shared.array(WARP, float32)
        width = weight.shape[0]
        start = int64(cuda.blockIdx.x) * width
        if adding:
            for i in range(cuda.threadIdx.x, width, cuda.blockDim.x):
                x[start + i] += branch[start + i]
        scale = inverse_rms(sum_of_squares(x, start, width, scratch, partials), width, eps)
        for i in range(cuda.threadIdx.x, width, cuda.blockDim.x):
            out[start + i] = weight[i] * (x[start + i] * scale)

    return odd_norm_kernel


def make_norm(wide, adding):
    """The kernel for a launch."""
    return make_wide_norm(adding) if wide else make_odd_norm(adding)


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
        launch = make_norm(wide, adding)[x.size // width, norm_threads(width, wide), stream]
        launch(x.reshape(-1), branch.reshape(-1), weight, float32(eps), out.reshape(-1))


_FLAT = types.Array(types.float32, 1, "C")
SPECS = [
    KernelSpec(
        f"{'add_norm' if adding else 'rms_norm'}{'' if wide else '_odd'}",
        make_norm(wide, adding),
        (_FLAT, _FLAT, _FLAT, types.float32, _FLAT),
        MAX_THREADS,
    )
    for adding in (False, True)
    for wide in (True, False)
]
