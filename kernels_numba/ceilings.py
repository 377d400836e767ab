"""What the card can do, for others' times to be set against: a copy and a chain of multiply-adds.

Copy: out = x, in 16-byte accesses, UNROLL of them in flight a thread. Chain: y <- y * a + b, CHAINS independent ones a
thread, each `rounds` * STEPS long; out[thread] = their sum. It costs 2 * CHAINS * STEPS * rounds FLOPs a thread.
"""

from numba import cuda, float32, int32, types

from kernels_numba.checks import check, require
from kernels_numba.primitives import SIMULATED, fma, load4, store4
from kernels_numba.registry import KernelSpec

THREADS = 8 if SIMULATED else 256
COPY_BLOCKS = 2 if SIMULATED else 132 * 16
UNROLL = 4
CHAINS = 8
STEPS = 16


@cuda.jit
def copy_kernel(x, out):
    """out = x over flat arrays whose length is a multiple of 4."""
    step = 4 * cuda.gridsize(1)
    i = 4 * cuda.grid(1)
    while i + (UNROLL - 1) * step < out.shape[0]:
        first, second = load4(x, i), load4(x, i + step)
        third, fourth = load4(x, i + 2 * step), load4(x, i + 3 * step)
        store4(out, i, first[0], first[1], first[2], first[3])
        store4(out, i + step, second[0], second[1], second[2], second[3])
        store4(out, i + 2 * step, third[0], third[1], third[2], third[3])
        store4(out, i + 3 * step, fourth[0], fourth[1], fourth[2], fourth[3])
        i += UNROLL * step
    while i < out.shape[0]:
        last = load4(x, i)
        store4(out, i, last[0], last[1], last[2], last[3])
        i += step


@cuda.jit
def chain_kernel(x, rounds, out):
    """Each thread: CHAINS chains from 0, 1, .. with factor x[0] and summand x[1]; out[thread] = their sum."""
    a, b = x[0], x[1]
    y0, y1, y2, y3 = float32(0), float32(1), float32(2), float32(3)
    y4, y5, y6, y7 = float32(4), float32(5), float32(6), float32(7)
    for _ in range(rounds):
        for _ in range(int32(STEPS)):
            y0, y1, y2, y3 = fma(y0, a, b), fma(y1, a, b), fma(y2, a, b), fma(y3, a, b)
            y4, y5, y6, y7 = fma(y4, a, b), fma(y5, a, b), fma(y6, a, b), fma(y7, a, b)
    thread = cuda.grid(1)
    if thread < out.shape[0]:
        out[thread] = ((y0 + y1) + (y2 + y3)) + ((y4 + y5) + (y6 + y7))


def copy(x, out, stream=0):
    """out = x; flat f32 arrays of one length, a multiple of 4. Raises LaunchError."""
    check("copy: x", x, "float32", (None,))
    check("copy: out", out, "float32", x.shape)
    require(x.size % 4 == 0, f"copy: expected a multiple of 4 elements, found {x.size}")
    copy_kernel[COPY_BLOCKS, THREADS, stream](x, out)


def chain(x, rounds, out, stream=0):
    """CHAINS chains y <- y * x[0] + x[1] a thread; x f32[2], out f32 [threads], a multiple of THREADS. LaunchError."""
    check("chain: x", x, "float32", (2,))
    check("chain: out", out, "float32", (None,))
    require(out.size % THREADS == 0, f"chain: expected a multiple of {THREADS} threads, found {out.size}")
    chain_kernel[out.size // THREADS, THREADS, stream](x, rounds, out)


_FLAT = types.Array(types.float32, 1, "C")
SPECS = [
    KernelSpec("copy", copy_kernel, (_FLAT, _FLAT), THREADS),
    KernelSpec("chain", chain_kernel, (_FLAT, types.int64, _FLAT), THREADS),
]
