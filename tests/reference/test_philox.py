"""Philox against the published known answers, and the uniform number of a position."""

import numpy as np
import pytest

from ddtree.reference.philox import philox4x32_10, uniform

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


def scalar_philox(counter, key):
    """Compute the ten rounds on Python integers, word by word."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(q >> 32) ^ c[1] ^ k[0], q & ONES, (p >> 32) ^ c[3] ^ k[1], p & ONES]
        k = [(k[0] + 0x9E3779B9) & ONES, (k[1] + 0xBB67AE85) & ONES]
    return c


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN_ANSWERS)
def test_known_answers(counter, key, want):
    words = philox4x32_10(np.array(counter, np.uint32), np.array(key, np.uint32))
    assert words.dtype == np.uint32 and words.tolist() == want == scalar_philox(counter, key)


def test_many_counters_at_once_are_the_same_as_one_by_one():
    rng = np.random.default_rng(0)
    counters = rng.integers(0, 2**32, (3, 7, 4), dtype=np.uint32)
    key = rng.integers(0, 2**32, 2, dtype=np.uint32)
    words = philox4x32_10(counters, key)
    for index in np.ndindex(3, 7):
        assert words[index].tolist() == scalar_philox(counters[index].tolist(), key.tolist())


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**64 - 1, 0x299F31D0A4093822])
def test_a_position_fixes_its_number(seed):
    positions = np.array([0, 5, 5, 2**31 - 1, 2**32 - 1])
    numbers = uniform(seed, positions, sequence=3)
    key = (seed % 2**32, seed >> 32)  # low word first
    want = [(scalar_philox((p, 3, 0, 0), key)[0] >> 8) / 2**24 for p in positions.tolist()]
    assert numbers.dtype == np.float64 and numbers.tolist() == want
    assert numbers[1] == uniform(seed, 5, sequence=3)
    assert uniform(seed, 5) != uniform(seed, 5, sequence=1)


def test_numbers_are_spread_and_below_one():
    numbers = uniform(7, np.arange(1 << 16))
    counts = np.bincount((numbers * 64).astype(int), minlength=64)
    assert numbers.min() >= 0 and numbers.max() <= 1 - 2.0**-24
    assert (np.square(counts - 1024) / 1024).sum() < 63 + 5 * np.sqrt(2 * 63)


@pytest.mark.parametrize(("seed", "position"), [(-1, 0), (2**64, 0), (0, -1), (0, 2**32)])
def test_out_of_range_is_a_mistake(seed, position):
    with pytest.raises(AssertionError):
        uniform(seed, [position])
