"""Primitives: bf16 to the bit, the order of keys, sums in their stated order, fused and wide operations."""

import ml_dtypes
import numpy as np
import pytest
from compare_arrays import assert_close, assert_same_bits
from kernels.device import poisoned, to_device, to_host
from numba import cuda, float32, int32, uint64
from seeds import fresh_seed

from kernels_numba import primitives
from kernels_numba import primitives_block as block
from kernels_numba.primitives import SIMULATED, WARP

THREADS = 8 if SIMULATED else 256
MAX_THREADS = block.MAX_THREADS  # a shared array wants a global number
WARPS = (1, 3) if SIMULATED else (1, 3, 8, 31, 32)  # of a block
EPS = np.finfo(np.float32).eps


# --- bf16 and bits ------------------------------------------------------------------------------------------------


@cuda.jit
def convert_kernel(values, rounded, widened, bits, back):
    for i in range(cuda.grid(1), values.shape[0], cuda.gridsize(1)):
        rounded[i] = primitives.float_to_bf16(values[i])
        widened[i] = primitives.bf16_to_float(rounded[i])
        bits[i] = primitives.bits_from_float(values[i])
        back[i] = primitives.float_from_bits(bits[i])


def check_bf16(patterns):
    """f32 of every kind by their bits: rounded as ml_dtypes rounds; a NaN stays a NaN of its sign."""
    values = patterns.view(np.float32)
    outs = [poisoned(len(values), dtype) for dtype in (np.uint16, np.float32, np.uint32, np.float32)]
    convert_kernel[4, THREADS](to_device(values), *outs)
    rounded, widened, bits, back = (to_host(out) for out in outs)
    with np.errstate(over="ignore", invalid="ignore"):
        want = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    nan = np.isnan(values)
    np.testing.assert_array_equal(rounded[~nan], want[~nan])
    assert ((rounded[nan] & 0x7FFF) > 0x7F80).all()
    np.testing.assert_array_equal(rounded[nan] >> 15, patterns[nan] >> 31)
    np.testing.assert_array_equal(widened.view(np.uint32), rounded.astype(np.uint32) << 16)
    np.testing.assert_array_equal(bits, patterns)
    np.testing.assert_array_equal(back.view(np.uint32), patterns)


def patterns_of(high, low):
    return (high.astype(np.uint32)[:, None] << 16 | np.array(low, np.uint32)).reshape(-1)


LOW_HALVES = (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)  # below, at and above the middle between two bf16


@pytest.mark.simulator
def test_bf16_small():
    zero, least, one, greatest, inf, nan = 0, 1, 0x3F80, 0x7F7F, 0x7F80, 0x7FC0
    high = np.array([zero, least, 0x7F, 0x80, one, one + 1, greatest, inf, nan, 0x7FFF])
    check_bf16(patterns_of(np.concatenate([high, high | 0x8000]), LOW_HALVES))


@pytest.mark.gpu
def test_bf16_large():
    rng = np.random.default_rng(fresh_seed())
    check_bf16(patterns_of(np.arange(1 << 16), LOW_HALVES))
    check_bf16(rng.integers(0, 2**32, 1 << 20, dtype=np.uint32))


# --- order keys ---------------------------------------------------------------------------------------------------


@cuda.jit
def key_kernel(values, indices, keys, back):
    for i in range(cuda.grid(1), values.shape[0], cuda.gridsize(1)):
        keys[i] = primitives.order_key(values[i], indices[i])
        back[i] = primitives.index_of_key(keys[i])


def check_keys(values, indices):
    """Sorted by key: the greater value first, the lower index among equals, NaN as -inf, -0.0 as 0.0."""
    keys, back = poisoned(len(values), np.uint64), poisoned(len(values), np.int32)
    key_kernel[4, THREADS](to_device(values), to_device(indices), keys, back)
    keys = to_host(keys)
    np.testing.assert_array_equal(to_host(back), indices)
    assert (keys > 0).all()  # 0 is free to mean none
    rank = np.where(np.isnan(values), -np.inf, values) + 0.0
    want = np.lexsort((indices, -rank))
    np.testing.assert_array_equal(np.argsort(keys)[::-1], want)


SPECIALS = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 1.0, -1.0, 3.4e38, -3.4e38]


@pytest.mark.simulator
def test_keys_small():
    values = np.array(SPECIALS * 2, np.float32)
    indices = np.random.default_rng(0).permutation(len(values)).astype(np.int32)
    indices[3] = np.iinfo(np.int32).max
    check_keys(values, indices)


@pytest.mark.gpu
def test_keys_large():
    rng = np.random.default_rng(fresh_seed())
    values = rng.integers(0, 2**32, 1 << 18, dtype=np.uint32).view(np.float32)
    values[::3] = rng.choice(np.array(SPECIALS, np.float32), len(values[::3]))
    check_keys(values, rng.permutation(len(values)).astype(np.int32))


# --- warps and blocks ---------------------------------------------------------------------------------------------


@cuda.jit
def float_kernel(values, warp_sums, warp_maxima, block_sums):
    scratch = cuda.shared.array(MAX_THREADS, float32)
    partials = cuda.shared.array(WARP, float32)
    i = cuda.threadIdx.x
    warp_sums[i] = primitives.warp_sum(values[i], scratch)
    warp_maxima[i] = primitives.warp_max(values[i], scratch)
    first = block.block_sum(values[i], scratch, partials)
    block_sums[i] = block.block_sum(values[i] + first, scratch, partials)  # partials are used again


@cuda.jit
def integer_kernel(values, numbers, warp_sums, maxima, block_maxima, scans):
    scratch = cuda.shared.array(MAX_THREADS, uint64)
    partials = cuda.shared.array(WARP, uint64)
    small = cuda.shared.array(MAX_THREADS, int32)
    i = cuda.threadIdx.x
    warp_sums[i] = primitives.warp_sum_i32(numbers[i], small)
    maxima[i] = block.warp_max_u64(values[i], scratch)
    block_maxima[i] = block.block_max_u64(values[i], scratch, partials)
    scans[i] = block.block_scan_u64(values[i] >> uint64(16), scratch, partials)


def butterfly(values):
    """Each warp's sum in the stated order, in every lane: pairs at distance WARP / 2 first, then nearer."""
    lanes, offset = np.arange(WARP), WARP // 2
    while offset:
        values = values + values[:, lanes ^ offset]
        offset //= 2
    return values


def check_float_warps(warps, seed):
    values = np.random.default_rng(seed).standard_normal((warps, WARP)).astype(np.float32)
    values[0, -1] = 1e4
    outs = [poisoned(values.shape) for _ in range(3)]
    float_kernel[1, warps * WARP](to_device(values.reshape(-1)), *(out.reshape(-1) for out in outs))
    sums, maxima, block_sums = (to_host(out) for out in outs)
    assert_same_bits(sums, butterfly(values), f"warp_sum, seed {seed}")
    assert_same_bits(maxima, np.repeat(values.max(1, keepdims=True), WARP, 1), f"warp_max, seed {seed}")

    def of_block(rows):
        partials = np.zeros((1, WARP), np.float32)
        partials[0, :warps] = butterfly(rows)[:, 0]
        return butterfly(partials)[0, 0]

    want = of_block(values + of_block(values))
    assert_same_bits(block_sums, np.full_like(values, want), f"block_sum of {warps} warps, seed {seed}")


def check_integer_warps(warps, seed):
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 2**64, (warps, WARP), dtype=np.uint64)  # half of them negative to a signed eye
    numbers = rng.integers(-(2**24), 2**24, (warps, WARP)).astype(np.int32)
    sums = poisoned(values.shape, np.int32)
    outs = [sums, *(poisoned(values.shape, np.uint64) for _ in range(3))]
    flat = [to_device(values.reshape(-1)), to_device(numbers.reshape(-1)), *(out.reshape(-1) for out in outs)]
    integer_kernel[1, warps * WARP](*flat)
    sums, maxima, block_maxima, scans = (to_host(out) for out in outs)
    np.testing.assert_array_equal(sums, np.repeat(numbers.sum(1, keepdims=True), WARP, 1))
    np.testing.assert_array_equal(maxima, np.repeat(values.max(1, keepdims=True), WARP, 1))
    assert (block_maxima == values.max()).all()
    np.testing.assert_array_equal(scans.reshape(-1), np.cumsum(values.reshape(-1) >> np.uint64(16)))


@pytest.mark.simulator
@pytest.mark.parametrize("warps", WARPS)
def test_warps_small(warps):
    check_float_warps(warps, seed=warps)
    check_integer_warps(warps, seed=warps)


@pytest.mark.gpu
@pytest.mark.parametrize("warps", WARPS)
def test_warps_large(warps):
    check_float_warps(warps, fresh_seed())
    check_integer_warps(warps, fresh_seed())


def test_threads_for_a_row():
    for units in (1, 2, WARP, WARP + 1, block.MAX_THREADS, block.MAX_THREADS + 1, 9 * block.MAX_THREADS - 1):
        threads = block.threads_for(units)
        assert threads % WARP == 0 and 0 < threads <= block.MAX_THREADS
        assert -(-units // threads) == -(-units // block.MAX_THREADS)


# --- arithmetic and wide accesses ---------------------------------------------------------------------------------


@cuda.jit
def arithmetic_kernel(a, b, c, fused, exponentials):
    for i in range(cuda.grid(1), a.shape[0], cuda.gridsize(1)):
        fused[i] = primitives.fma(a[i], b[i], c[i])
        exponentials[i] = primitives.exp(a[i])


@cuda.jit
def wide_kernel(values, bits, out, widened):
    """One thread a piece: four f32 copied, eight bf16 widened."""
    i = cuda.grid(1)
    if 4 * i < values.shape[0]:
        a, b, c, d = primitives.load4(values, 4 * i)
        primitives.store4(out, 4 * i, a, b, c, d)
    if 8 * i < bits.shape[0]:
        eight = primitives.load8(bits, 8 * i)
        primitives.store4(widened, 8 * i, eight[0], eight[1], eight[2], eight[3])
        primitives.store4(widened, 8 * i + 4, eight[4], eight[5], eight[6], eight[7])


def check_arithmetic(count, seed):
    """fma rounds once, so that c = -round(a * b) leaves the product's rounding error; exp to two units."""
    rng = np.random.default_rng(seed)
    a, b = (rng.uniform(-20, 20, count).astype(np.float32) for _ in range(2))
    c = -(a * b)
    fused, exponentials = poisoned(count), poisoned(count)
    arithmetic_kernel[4, THREADS](to_device(a), to_device(b), to_device(c), fused, exponentials)
    exact = a.astype(np.float64) * b + c  # exact: 48 bits
    assert_same_bits(to_host(fused), exact.astype(np.float32), f"fma, seed {seed}")
    assert (exact != 0).any()
    want = np.exp(a.astype(np.float64))
    assert_close(to_host(exponentials), want, 2 * EPS, f"exp, seed {seed}", elementwise=True)


def check_wide(pieces, seed):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(4 * pieces).astype(np.float32)
    bits = rng.integers(0, 2**16, 8 * pieces, dtype=np.uint16)
    out, widened = poisoned(4 * pieces + 4), poisoned(8 * pieces + 4)
    wide_kernel[-(-pieces // THREADS), THREADS](
        to_device(values), to_device(bits), out[: 4 * pieces], widened[: 8 * pieces]
    )
    guard = to_host(poisoned(4))
    assert_same_bits(to_host(out), np.concatenate([values, guard]), "load4 and store4")
    want = (bits.astype(np.uint32) << 16).view(np.float32)
    assert_same_bits(to_host(widened), np.concatenate([want, guard]), "load8")


@pytest.mark.simulator
def test_arithmetic_small():
    check_arithmetic(33, seed=0)
    check_wide(3, seed=1)


@pytest.mark.gpu
def test_arithmetic_large():
    check_arithmetic(100_003, fresh_seed())
    check_wide(10_001, fresh_seed())
