"""The kernels that measure the card: every element copied, nothing past the end; every step of a chain taken."""

import numpy as np
import pytest
from compare_arrays import assert_close, assert_same_bits
from kernels.device import bf16_bits, bf16_values, poisoned, to_device, to_host
from seeds import fresh_seed

from kernels_numba import ceilings
from kernels_numba.checks import LaunchError


def check_copy(size, seed, blocks):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(size).astype(np.float32)
    guarded = poisoned(size + 8)
    ceilings.copy(to_device(x), guarded[:size], blocks)
    got = to_host(guarded)
    assert_same_bits(got[:size], x, f"copy of {size}, seed {seed}")
    assert_same_bits(got[size:], to_host(poisoned(8)), "what lies after the copy")


def check_chain(blocks, rounds):
    x = np.array([0.999, 0.5], np.float32)
    out = poisoned(blocks * ceilings.THREADS)
    ceilings.chain(to_device(x), rounds, out)
    y, (a, b) = np.arange(ceilings.CHAINS, dtype=np.float64), x.astype(np.float64)
    for _ in range(rounds * ceilings.STEPS):
        y = y * a + b
    # Each step rounds once and shrinks what earlier steps lost; the limit b / (1 - a) is 500.
    bound = (rounds * ceilings.STEPS + ceilings.CHAINS) * np.finfo(np.float32).eps
    assert_close(to_host(out), np.full(out.size, y.sum()), bound, f"chain, {rounds} rounds")


@pytest.mark.simulator
@pytest.mark.parametrize("size", [0, 4, 60, 64, 68, 256, 332])
def test_copy_small(size):
    check_copy(size, seed=size, blocks=2)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [0, 4, 1 << 20, (1 << 26) + 12])
def test_copy_large(size):
    check_copy(size, fresh_seed(), blocks=132 * 16)


@pytest.mark.simulator
def test_chain_small():
    check_chain(1, 2)
    check_chain(2, 0)


@pytest.mark.gpu
def test_chain_large():
    check_chain(132 * 8, 64)


@pytest.mark.gpu
def test_tensor_chain():
    """By the layout of mma.sync: lane 4 g + t has columns 2 t, 2 t + 1 of row g, and the same words everywhere."""
    rng = np.random.default_rng()
    bits = bf16_bits(rng.standard_normal(2 * ceilings.WARP) * 0.1)
    rounds, out = 3, poisoned(2 * ceilings.THREADS)
    ceilings.tensor_chain(to_device(bits.view(np.uint32)), rounds, out)
    rows = bf16_values(bits).astype(np.float64).reshape(8, 8)  # of A, columns 0..7, and of B transposed
    tile = 2 * rows @ rows.T  # columns 8..15 of A are the same again
    pairs = 2 * tile.reshape(8, 4, 2).sum(axis=2).reshape(ceilings.WARP)  # and so are rows 8..15
    chains = ceilings.TENSOR_CHAINS
    each = chains * rounds * pairs + 4 * sum(range(chains))
    bound = 64 * np.finfo(np.float32).eps  # of the greatest; some 50 sums, products of bf16 are exact
    assert_close(to_host(out), np.tile(each, out.size // ceilings.WARP), bound, "tensor chain")


@pytest.mark.simulator
def test_the_simulator_has_no_tensor_cores():
    with pytest.raises(LaunchError, match="no tensor cores"):
        ceilings.tensor_chain(to_device(np.zeros(4, np.uint32)), 1, poisoned(8))


@pytest.mark.simulator
def test_wrong_arguments_are_refused():
    flat = to_device(np.zeros(8, np.float32))
    for launch in (
        lambda: ceilings.copy(flat, flat[:4], 1),
        lambda: ceilings.copy(flat[:6], flat[:6], 1),
        lambda: ceilings.copy(to_device(np.zeros(8)), flat, 1),
        lambda: ceilings.copy(flat, flat, 0),
        lambda: ceilings.chain(flat, 1, flat),
        lambda: ceilings.chain(flat[:2], 1, flat[:3]),
    ):
        with pytest.raises(LaunchError):
            launch()
