"""The kernels that measure the card: every element copied, nothing past the end; every step of a chain taken."""

import numpy as np
import pytest
from compare_arrays import assert_close, assert_same_bits
from kernels.device import poisoned, to_device, to_host

from kernels_numba import ceilings
from kernels_numba.checks import LaunchError


def check_copy(size, seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(size).astype(np.float32)
    guarded = poisoned(size + 8)
    ceilings.copy(to_device(x), guarded[:size])
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
    check_copy(size, seed=size)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [0, 4, 1 << 20, (1 << 26) + 12])
def test_copy_large(size):
    check_copy(size, seed=int(np.random.SeedSequence().generate_state(1)[0]))


@pytest.mark.simulator
def test_chain_small():
    check_chain(1, 2)
    check_chain(2, 0)


@pytest.mark.gpu
def test_chain_large():
    check_chain(132 * 8, 64)


@pytest.mark.simulator
def test_wrong_arguments_are_refused():
    flat = to_device(np.zeros(8, np.float32))
    for launch in (
        lambda: ceilings.copy(flat, flat[:4]),
        lambda: ceilings.copy(flat[:6], flat[:6]),
        lambda: ceilings.copy(to_device(np.zeros(8)), flat),
        lambda: ceilings.chain(flat, 1, flat),
        lambda: ceilings.chain(flat[:2], 1, flat[:3]),
    ):
        with pytest.raises(LaunchError):
            launch()
