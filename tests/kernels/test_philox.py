"""Philox against Random123's known answers and the NumPy twin, word for word."""

import numpy as np
import pytest
from kernels.device import poisoned, to_device, to_host
from seeds import fresh_seed

from ddtree.reference import philox as twin
from kernels_numba import philox
from kernels_numba.checks import LaunchError

ONES = 0xFFFFFFFF
KNOWN_ANSWERS = [  # Random123 1.14.0, tests/kat_vectors, "philox4x32 10"
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([ONES] * 4, [ONES] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def words(counters, key):
    """The kernel's words of counters [N, 4], into poison and between guards."""
    out = poisoned((len(counters) + 2, 4), np.uint32)
    counters, key = np.array(counters, np.uint32), np.array(key, np.uint32)
    philox.philox4x32_10(to_device(counters), to_device(key), out[1:-1])
    got = to_host(out)
    assert (got[[0, -1]] == ONES).all()
    return got[1:-1]


def check_known_answers():
    for counter, key, want in KNOWN_ANSWERS:
        assert words([counter], key).tolist() == [want]


def check_twin(count, seed):
    rng = np.random.default_rng(seed)
    counters = rng.integers(0, 2**32, (count, 4), dtype=np.uint32)
    key = rng.integers(0, 2**32, 2, dtype=np.uint32)
    np.testing.assert_array_equal(words(counters, key), twin.philox4x32_10(counters, key), f"seed {seed}")


@pytest.mark.simulator
def test_known_answers_small():
    check_known_answers()


@pytest.mark.gpu
def test_known_answers_large():
    check_known_answers()


@pytest.mark.simulator
@pytest.mark.parametrize("count", [1, 33])
def test_twin_small(count):
    check_twin(count, seed=count)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 127, 129, 100_000])
def test_twin_large(count):
    check_twin(count, fresh_seed())


@pytest.mark.simulator
def test_no_counters_are_legal_and_wrong_arguments_are_refused():
    counter, key = to_device(np.zeros((2, 4), np.uint32)), to_device(np.zeros(2, np.uint32))
    philox.philox4x32_10(counter[:0], key, counter[:0])
    for arguments in (
        (counter, key, counter[:1]),
        (counter, key[:1], counter),
        (to_device(np.zeros((2, 4), np.int32)), key, counter),
        (to_device(np.zeros((2, 3), np.uint32)), key, counter),
    ):
        with pytest.raises(LaunchError, match="philox"):
            philox.philox4x32_10(*arguments)
