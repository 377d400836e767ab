"""Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers", SC 2011.

A number depends on its counter and key alone, so a token's position fixes its random number.
"""

import numpy as np

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 10
WORD = 0xFFFFFFFF


def philox4x32_10(counter, key):
    """Return the four random words u32 [..., 4] of each counter u32 [..., 4] under key u32 [2]."""
    x0, x1, x2, x3 = (counter[..., word].astype(np.uint64) for word in range(4))
    key0, key1 = int(key[0]), int(key[1])
    for _ in range(NUM_ROUNDS):
        product0 = x0 * np.uint64(MULTIPLIERS[0])
        product1 = x2 * np.uint64(MULTIPLIERS[1])
        x0, x2 = (product1 >> 32) ^ x1 ^ np.uint64(key0), (product0 >> 32) ^ x3 ^ np.uint64(key1)
        x1, x3 = product1 & WORD, product0 & WORD
        key0, key1 = (key0 + KEY_STEPS[0]) & WORD, (key1 + KEY_STEPS[1]) & WORD
    return np.stack((x0, x1, x2, x3), axis=-1).astype(np.uint32)


def uniform(seed, positions, sequence=0):
    """Return f64 numbers in [0, 1 - 2^-24], one for each of positions (integers, 0 <= p < 2^32), any shape.

    u = (word 0 >> 8) x 2^-24 under key = seed (low u32, high u32) and counter = (position, sequence, 0, 0).
    """
    positions = np.asarray(positions)
    assert 0 <= seed < 2**64 and 0 <= sequence < 2**32
    assert not positions.size or (positions.min() >= 0 and positions.max() <= WORD)
    counter = np.zeros((*positions.shape, 4), np.uint32)
    counter[..., 0] = positions
    counter[..., 1] = sequence
    words = philox4x32_10(counter, (seed & WORD, seed >> 32))
    return (words[..., 0] >> 8) * 2.0**-24
