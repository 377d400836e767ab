"""Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers", SC 2011.

A round: (x0, x1, x2, x3) <- (hi(x2 * M1) ^ x1 ^ k0, lo(x2 * M1), hi(x0 * M0) ^ x3 ^ k1, lo(x0 * M0)), then
(k0, k1) <- (k0 + S0, k1 + S1), all in 32 bits. Integers alone, so the words are the NumPy twin's bit for bit.
"""

from numba import cuda, int32, types, uint32, uint64

from kernels_numba.checks import check
from kernels_numba.primitives import SIMULATED, after_previous, device_function
from kernels_numba.registry import KernelSpec

THREADS = 8 if SIMULATED else 128
MULTIPLIER0, MULTIPLIER1 = 0xD2511F53, 0xCD9E8D57
STEP0, STEP1 = 0x9E3779B9, 0xBB67AE85
NUM_ROUNDS = 10
WORD = 0xFFFFFFFF


@device_function
def philox4x32_10_words(x0, x1, x2, x3, key0, key1):
    """The four random words of a counter under a key, all u32."""
    x0, x1, x2, x3 = uint64(x0), uint64(x1), uint64(x2), uint64(x3)
    key0, key1 = uint64(key0), uint64(key1)
    for _ in range(int32(NUM_ROUNDS)):
        product0, product1 = x0 * uint64(MULTIPLIER0), x2 * uint64(MULTIPLIER1)
        x0 = (product1 >> uint64(32)) ^ x1 ^ key0
        x2 = (product0 >> uint64(32)) ^ x3 ^ key1
        x1, x3 = product1 & uint64(WORD), product0 & uint64(WORD)
        key0 = (key0 + uint64(STEP0)) & uint64(WORD)
        key1 = (key1 + uint64(STEP1)) & uint64(WORD)
    return uint32(x0), uint32(x1), uint32(x2), uint32(x3)


@device_function
def uniform24(position, sequence, seed_low, seed_high):
    """The uniform number of a position as u32: u = uniform24 / 2^24, from counter (position, sequence, 0, 0)."""
    word, _, _, _ = philox4x32_10_words(position, sequence, uint32(0), uint32(0), seed_low, seed_high)
    return uint32(word >> uint32(8))


@cuda.jit
def philox_kernel(counter, key, out):
    """out[i] = the words of counter[i] under key; a thread a counter."""
    after_previous()
    i = cuda.grid(1)
    if i < counter.shape[0]:
        words = philox4x32_10_words(
            counter[i, 0], counter[i, 1], counter[i, 2], counter[i, 3], key[0], key[1]
        )
        out[i, 0], out[i, 1], out[i, 2], out[i, 3] = words[0], words[1], words[2], words[3]


def philox4x32_10(counter, key, out, stream=0):
    """out = the four random words of each counter under key; u32 counter [N, 4], key [2], out [N, 4]. LaunchError."""
    check("philox4x32_10: counter", counter, "uint32", (None, 4))
    check("philox4x32_10: key", key, "uint32", (2,))
    check("philox4x32_10: out", out, "uint32", counter.shape)
    if counter.size:
        philox_kernel[-(-counter.shape[0] // THREADS), THREADS, stream](counter, key, out)


_WORDS, _KEY = types.Array(types.uint32, 2, "C"), types.Array(types.uint32, 1, "C")
SPECS = [KernelSpec("philox4x32_10", philox_kernel, (_WORDS, _KEY, _WORDS), THREADS)]
