"""What the card can do, for others' times to be set against: a copy, and chains of multiply-adds.

Copy: out = x, in 16-byte accesses, UNROLL of them in flight a thread. Chain: y <- y * a + b, CHAINS independent ones a
thread, each `rounds` * STEPS long; out[thread] = their sum. It costs 2 * CHAINS * STEPS * rounds FLOPs a thread.

Tensor chain: C <- C + A @ B of 16 x 8, 16 x 16 and 16 x 8 by bf16 mma.sync, TENSOR_CHAINS of them a warp, chain i from
C = i; out[thread] = the sum of what it holds of them. TILE_FLOPS * TENSOR_CHAINS * rounds FLOPs a warp.
"""

from numba import cuda, float32, int32, types

from kernels_numba.checks import check, require
from kernels_numba.primitives import SIMULATED, WARP, after_previous, fma, load4, store4
from kernels_numba.registry import KernelSpec

THREADS = 8 if SIMULATED else 256
UNROLL = 4
CHAINS = 8
STEPS = 16
TENSOR_CHAINS = 8
TILE_FLOPS = 2 * 16 * 8 * 16

if not SIMULATED:
    from kernels_numba.intrinsics_ceilings import tensor_step


@cuda.jit
def copy_kernel(x, out):
    """out = x over flat arrays whose length is a multiple of 4."""
    after_previous()
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
    after_previous()
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


@cuda.jit
def tensor_chain_kernel(words, rounds, out):
    """Lane l has words[l], two bf16, for every word of A and of B; thread i writes out[i]."""
    after_previous()
    word = words[cuda.threadIdx.x % WARP]
    c0, d0, e0, f0 = float32(0), float32(1), float32(2), float32(3)
    g0, h0, i0, j0 = float32(4), float32(5), float32(6), float32(7)
    c1, c2, c3, d1, d2, d3 = c0, c0, c0, d0, d0, d0
    e1, e2, e3, f1, f2, f3 = e0, e0, e0, f0, f0, f0
    g1, g2, g3, h1, h2, h3 = g0, g0, g0, h0, h0, h0
    i1, i2, i3, j1, j2, j3 = i0, i0, i0, j0, j0, j0
    for _ in range(rounds):
        c0, c1, c2, c3 = tensor_step(word, word, c0, c1, c2, c3)
        d0, d1, d2, d3 = tensor_step(word, word, d0, d1, d2, d3)
        e0, e1, e2, e3 = tensor_step(word, word, e0, e1, e2, e3)
        f0, f1, f2, f3 = tensor_step(word, word, f0, f1, f2, f3)
        g0, g1, g2, g3 = tensor_step(word, word, g0, g1, g2, g3)
        h0, h1, h2, h3 = tensor_step(word, word, h0, h1, h2, h3)
        i0, i1, i2, i3 = tensor_step(word, word, i0, i1, i2, i3)
        j0, j1, j2, j3 = tensor_step(word, word, j0, j1, j2, j3)
    total = (c0 + c1 + c2 + c3) + (d0 + d1 + d2 + d3) + (e0 + e1 + e2 + e3) + (f0 + f1 + f2 + f3)
    total += (g0 + g1 + g2 + g3) + (h0 + h1 + h2 + h3) + (i0 + i1 + i2 + i3) + (j0 + j1 + j2 + j3)
    out[cuda.grid(1)] = total


def copy(x, out, blocks, stream=0):
    """out = x; flat f32 arrays of one length, a multiple of 4; `blocks` of THREADS share them. Raises LaunchError."""
    check("copy: x", x, "float32", (None,))
    check("copy: out", out, "float32", x.shape)
    require(x.size % 4 == 0, f"copy: expected a multiple of 4 elements, found {x.size}")
    require(blocks > 0, f"copy: expected at least one block, found {blocks}")
    copy_kernel[blocks, THREADS, stream](x, out)


def chain(x, rounds, out, stream=0):
    """CHAINS chains y <- y * x[0] + x[1] a thread; x f32[2], out f32 [threads], a multiple of THREADS. LaunchError."""
    check("chain: x", x, "float32", (2,))
    check("chain: out", out, "float32", (None,))
    require(out.size % THREADS == 0, f"chain: expected a multiple of {THREADS} threads, found {out.size}")
    chain_kernel[out.size // THREADS, THREADS, stream](x, rounds, out)


def tensor_chain(words, rounds, out, stream=0):
    """TENSOR_CHAINS chains of bf16 tiles a warp; words u32[WARP], out f32 [threads], a multiple of THREADS.

    Raises LaunchError, in the simulator always.
    """
    require(not SIMULATED, "tensor_chain: the simulator has no tensor cores")
    check("tensor_chain: words", words, "uint32", (WARP,))
    check("tensor_chain: out", out, "float32", (None,))
    require(
        out.size % THREADS == 0, f"tensor_chain: expected a multiple of {THREADS} threads, found {out.size}"
    )
    tensor_chain_kernel[out.size // THREADS, THREADS, stream](words, rounds, out)


_FLAT = types.Array(types.float32, 1, "C")
SPECS = [
    KernelSpec("copy", copy_kernel, (_FLAT, _FLAT), THREADS),
    KernelSpec("chain", chain_kernel, (_FLAT, types.int64, _FLAT), THREADS),
    KernelSpec(
        "tensor_chain", tensor_chain_kernel, (types.Array(types.uint32, 1, "C"), types.int64, _FLAT), THREADS
    ),
]
