"""One token a row by temperature, top-k, top-p and the position's uniform number u: an inverse CDF without a sort.

Candidates stand in the order (-logit, id), a NaN as -inf: the token = the first whose cumulative mass > u * kept mass.
Each of top-k, top-p and the draw looks for the candidate where a cumulative count or mass crosses a target. The kernel
descends to it: histograms of mass and count over buckets of that order narrow it down (first by the exponent
(greatest - logit) / temperature, cut evenly, then by the highest bits of `order_key` in which what is left differs),
until the block can sort what is left. Masses are integers (see primitives_sample), so all of it is exact and the same
in whatever order the threads come.
"""

import numpy as np
from numba import cuda, int32, types, uint32, uint64

from kernels_numba.argmax import check_logits
from kernels_numba.checks import LaunchError, check, require
from kernels_numba.philox import uniform24
from kernels_numba.primitives import SIMULATED, WARP, after_previous, float_from_bits, index_of_key
from kernels_numba.primitives_block import block_max_u64, block_scan_u64
from kernels_numba.primitives_sample import (
    COUNT,
    COUNT_BEFORE,
    FOUND,
    MASS,
    MASS_BEFORE,
    MAX_VOCAB,
    THREADS,
    UNROLL,
    WHICH,
    below,
    choose,
    exponent_of,
    extremes,
    histogram,
    mass_of,
    read4,
    sorted_keys,
    value_of,
)
from kernels_numba.registry import KernelSpec

BOUNDS = (
    {} if SIMULATED else {"launch_bounds": THREADS}
)  # 64 registers a thread, or the block would not start
WORD = 0xFFFFFFFF
SETTINGS = 6  # u32: rate (2 / temperature, f32 bits), top_k, top_p * 2^32 - 1, seed low, seed high, sequence
TOP_K, TOP_P, DRAW = 0, 1, 2


@cuda.jit(**BOUNDS)
def sample_kernel(logits, positions, settings, out):
    """out[row] = the row's token; a block a row."""
    after_previous()
    scratch = cuda.shared.array(THREADS, uint64)
    partials = cuda.shared.array(WARP, uint64)
    keys = cuda.shared.array(THREADS, uint64)
    found = cuda.shared.array(FOUND, uint64)
    totals = cuda.shared.array(2, uint64)
    limbs = cuda.shared.array((4, THREADS), uint32)
    filled = cuda.shared.array(1, int32)
    row, thread = cuda.blockIdx.x, int32(cuda.threadIdx.x)
    rate, top_k = float_from_bits(settings[0]), uint64(settings[1])
    top_p = uint64(settings[2]) + uint64(1)

    key = uint64(0)
    for i in range(thread, int32(logits.shape[1]), int32(UNROLL * THREADS)):
        a, b, c, d = read4(logits, row, i)
        key = max(key, max(max(a, b), max(c, d)))
    greatest = value_of(block_max_u64(key, scratch, partials))

    nothing = uint64(0)
    mass, count = histogram(logits, row, greatest, rate, int32(-1), nothing, nothing, nothing, limbs)
    mass_to = block_scan_u64(mass, scratch, partials)
    count_to = block_scan_u64(count, scratch, partials)
    if thread == THREADS - 1:
        totals[0], totals[1] = mass_to, count_to
    cuda.syncthreads()  # the totals are there
    kept = totals[0]

    for stage in range(int32(TOP_K), int32(DRAW + 1)):
        by_count = stage == TOP_K
        if by_count:
            if top_k == nothing or top_k >= totals[1]:
                continue
            target = top_k - uint64(1)
        elif stage == TOP_P:
            if top_p > uint64(WORD):
                continue
            # The last mass before the prefix reaches top_p: ceil(top_p * kept) - 1.
            target = kept - uint64(1) - below(uint64(1 << 32) - top_p, uint64(32), kept)
        else:
            u = uniform24(positions[row], settings[5], settings[3], settings[4])
            target = below(uint64(u), uint64(24), kept)

        choose(uint64(thread), mass, mass_to, count, count_to, by_count, target, found)
        bucket, digits, mask = int32(found[WHICH]), nothing, nothing
        while found[COUNT] > uint64(THREADS):
            mass_before, count_before = found[MASS_BEFORE], found[COUNT_BEFORE]
            low, high = extremes(logits, row, greatest, rate, bucket, mask, digits, scratch, partials)
            shift = nothing
            while (low ^ high) >> shift >= uint64(THREADS):
                shift += uint64(1)
            m, n = histogram(logits, row, greatest, rate, bucket, mask, digits, shift, limbs)
            m_to = mass_before + block_scan_u64(m, scratch, partials)
            n_to = count_before + block_scan_u64(n, scratch, partials)
            choose(uint64(thread), m, m_to, n, n_to, by_count, target, found)
            prefix = (high >> shift) & ~uint64(THREADS - 1)
            digits = (prefix | (uint64(THREADS - 1) - found[WHICH])) << shift
            mask = ~nothing << shift
        mass_before, count_before, count_in = found[MASS_BEFORE], found[COUNT_BEFORE], found[COUNT]
        key = sorted_keys(logits, row, greatest, rate, bucket, mask, digits, count_in, keys, filled)
        m, n = nothing, nothing
        if key != nothing:
            m, n = mass_of(exponent_of(value_of(key), greatest, rate)), uint64(1)
        m_to = mass_before + block_scan_u64(m, scratch, partials)
        choose(key, m, m_to, n, count_before + uint64(thread) + uint64(1), by_count, target, found)
        kept = found[MASS_BEFORE] + found[MASS]
    if thread == 0:
        out[row] = index_of_key(found[WHICH])


def pack_settings(temperature, top_k, top_p, seed, sequence):
    """The settings of a draw as u32 [SETTINGS] for the device. top_k 0 and top_p 1.0 are off. Raises LaunchError.

    0 < temperature < inf, 0 < top_p <= 1 (kept to 2^-32), 0 <= seed < 2^64, 0 <= sequence < 2^32. Temperatures past
    what 2 / temperature holds in f32 are drawn as the nearest that do not.
    """
    if not (0 < temperature < float("inf") and top_k >= 0 and 0 < top_p <= 1):
        raise LaunchError(
            f"sample: temperature {temperature}, top_k {top_k}, top_p {top_p}: wanted a finite temperature > 0, "
            "top_k >= 0 and 0 < top_p <= 1"
        )
    require(0 <= seed < 1 << 64, f"sample: seed: expected 0..2^64 - 1, found {seed}")
    require(0 <= sequence <= WORD, f"sample: sequence: expected 0..2^32 - 1, found {sequence}")
    limits = np.finfo(np.float32)
    rate = min(max(2.0 / float(temperature), float(limits.smallest_subnormal)), float(limits.max))
    fixed_top_p = max(1, round(float(top_p) * 2**32)) - 1
    words = [0, min(int(top_k), WORD), fixed_top_p, seed & WORD, seed >> 32, sequence]
    settings = np.array(words, np.uint32)
    settings[:1].view(np.float32)[0] = rate
    return settings


def sample(logits, positions, settings, out, stream=0):
    """Draw out i32 [M] from f32 logits [M, V]; each row depends on itself, its position and the settings alone.

    positions i32 [M]: of the token drawn, that is the row's own position + 1; settings: `pack_settings` on the device.
    The token has mass above 0; +inf logits share all of it; a row with nothing above -inf still gets an id in range.
    V is at most MAX_VOCAB. Raises LaunchError.
    """
    rows, vocab = check_logits("sample", logits)
    require(vocab <= MAX_VOCAB, f"sample: logits: expected at most {MAX_VOCAB} columns, found {vocab}")
    check("sample: positions", positions, "int32", (rows,))
    check("sample: settings", settings, "uint32", (SETTINGS,))
    check("sample: out", out, "int32", (rows,))
    if rows:
        sample_kernel[rows, THREADS, stream](logits, positions, settings, out)


_INTS, _WORDS = types.Array(types.int32, 1, "C"), types.Array(types.uint32, 1, "C")
SPECS = [
    KernelSpec("sample", sample_kernel, (types.Array(types.float32, 2, "C"), _INTS, _WORDS, _INTS), THREADS)
]
