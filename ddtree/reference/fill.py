"""Random weights from a seed: element i of array number `index` is uniform in [-amplitude, amplitude).

An element depends on seed, index and i alone, so a model of any size can be made where it is needed.
"""

import numpy as np

from ddtree.reference.philox import WORD, philox4x32_10


def fill(out, seed, index, amplitude):
    """out[i] = ((w >> 8) x 2^-23 - 1) x amplitude, rounded to f32 once and then to the dtype of out.

    i counts the elements of `out` (any shape, f32 or f64) in row-major order; w is word i mod 4 of Philox under
    key = seed (low u32, high u32) and counter = (i / 4 low, i / 4 high, index, 0). 0 <= seed < 2^64, index < 2^32.
    """
    assert 0 <= seed < 2**64 and 0 <= index < 2**32
    quads = np.arange(-(-out.size // 4), dtype=np.uint64)
    counter = np.zeros((len(quads), 4), np.uint32)
    counter[:, 0], counter[:, 1], counter[:, 2] = quads & WORD, quads >> np.uint64(32), index
    words = philox4x32_10(counter, (seed & WORD, seed >> 32)).reshape(-1)[: out.size]
    unit = (words >> 8).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
    out[...] = (unit * np.float32(amplitude)).reshape(out.shape)
