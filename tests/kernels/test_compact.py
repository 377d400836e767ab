"""The move of accepted rows against the twin, bit for bit: overlap, several layers, poison, and rows in place."""

import itertools

import numpy as np
import pytest
from kernels import selection
from kernels.device import scalar, to_device
from kernels.selection import Guarded
from numba import cuda
from seeds import fresh_seed

from kernels_numba import compact
from kernels_numba.checks import LaunchError


def random_path(rng, length, rows):
    """A strictly rising path of `length` rows below `rows`, the root first."""
    return np.concatenate(([0], 1 + np.sort(rng.choice(rows - 1, length - 1, replace=False)))).astype(
        np.int32
    )


def check_compact(seed, path, shape, context_len, dtype=np.uint16, padding=3, what=""):
    """The whole memory after a move against the twin's, where every row but the path's is poison.

    The path's array is longer than the path by `padding`, and goes on with -1.
    """
    path = np.array(path, np.int32)
    what = f"{what} path {path.tolist()[:40]} in {shape} at {context_len}, seed {seed}"
    assert context_len + path[-1] < shape[1]
    guarded = Guarded(shape, dtype)
    cache = np.full(shape, -1, f"i{np.dtype(dtype).itemsize}").view(dtype)
    rows = context_len + path
    bits = np.random.default_rng(seed).integers(0, 2**16, (shape[0], len(path), shape[2]))
    cache[:, rows] = bits.astype(np.uint16) if dtype is np.uint16 else (bits - 30000).astype(np.float32)
    guarded.array.copy_to_device(cache)
    longer = np.concatenate((path, np.full(padding, -1, np.int32)))
    result = np.array([len(path), -12345], np.int32)
    compact.compact(guarded.array, scalar(context_len), to_device(longer), to_device(result))
    want = selection.compact(cache, context_len, path)
    raw = f"u{np.dtype(dtype).itemsize}"
    np.testing.assert_array_equal(guarded.read().view(raw), want.view(raw), what)


PATHS = [
    [0],
    [0, 1, 2, 3, 4, 5, 6],  # in place
    [0, 2, 3, 4, 5, 6, 7],  # each source is the next one's target
    [0, 1, 2, 5, 6, 9, 11],  # in place at first
    [0, 9],
    [0, 3, 4, 5, 9, 10, 11, 12],
]
SMALL = list(itertools.product(PATHS, [(1, 13, 8), (3, 20, 40), (2, 13, 3)], [0, 1]))


@pytest.mark.simulator
@pytest.mark.parametrize(("path", "shape", "context_len"), SMALL)
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_small(path, shape, context_len, dtype):
    check_compact(1, path, shape, min(context_len, shape[1] - 13), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("width", [1, 3, 8, 33, 64, 72, 512, 520, 576, 7168])
def test_every_width(width, dtype):
    for path in PATHS:
        check_compact(fresh_seed(), path, (3, 40, width), 17, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 512])
@pytest.mark.parametrize(
    ("length", "rows"),
    [(2, 513), (17, 65), (32, 33), (33, 33), (33, 34), (34, 65), (65, 513), (300, 513), (512, 513)],
)
def test_real_caches(length, rows, width):
    seed = fresh_seed()
    path = random_path(np.random.default_rng(seed), length, rows)
    check_compact(seed, path, (61, 1100, width), 500, padding=rows - length)
    check_compact(seed, np.concatenate(([0], np.arange(rows - length + 1, rows))), (61, 1100, width), 500)


@pytest.mark.gpu
def test_features():
    """A buffer of f32 rows is a cache of one layer and no context."""
    seed = fresh_seed()
    path = random_path(np.random.default_rng(seed), 12, 65)
    check_compact(seed, path, (1, 65, 6 * 7168), 0, np.float32)


@pytest.mark.gpu
def test_offsets_beyond_32_bits():
    """The last layer of a cache of more than 2**31 elements, of which the path's rows alone are looked at."""
    layers, capacity, width, start = 3, 1_450_000, 512, 1_449_980
    cache = cuda.device_array((layers, capacity, width), np.uint16)
    rows = np.arange(20 * width, dtype=np.uint16).reshape(20, width)
    for layer in range(layers):
        cache[layer, start:].copy_to_device(rows + np.uint16(layer))
    path = np.array([0, 3, 4, 9], np.int32)
    compact.compact(cache, scalar(start), to_device(path), scalar(4))
    for layer in range(layers):
        want = selection.compact((rows + np.uint16(layer))[None], 0, path)[0]
        np.testing.assert_array_equal(cache[layer, start:].copy_to_host(), want)


def check_what_must_not_move():
    cache = np.arange(2 * 9 * 8, dtype=np.uint16).reshape(2, 9, 8)

    def after(path, length, context_len=0):
        held = to_device(cache)
        compact.compact(held, scalar(context_len), to_device(np.array(path, np.int32)), scalar(length))
        return held.copy_to_host()

    assert (after([0, 3, 5], 1) == cache).all()  # nothing but the root was accepted
    assert (after([0, 3, 5], 0) == cache).all()
    assert (after([0, 1, 2], 3) == cache).all()  # in place
    want = cache.copy()
    want[:, 3] = cache[:, 5]
    assert (after([0, 3, 5], 2, 2) == want).all()  # the path's later rows were not accepted
    assert (after([0, 3], 9, 2) == want).all()  # a length past the path's end
    assert (after([0, 3, 7], 3, 2) == want).all()  # a row past the capacity


@pytest.mark.simulator
def test_what_must_not_move_small():
    check_what_must_not_move()


@pytest.mark.gpu
def test_what_must_not_move_large():
    check_what_must_not_move()


@pytest.mark.simulator
def test_wrong_arguments_are_refused():
    def call(cache=(2, 9, 8), context=1, path=3, length=2, dtype=np.uint16, path_dtype=np.int32):
        compact.compact(
            to_device(np.zeros(cache, dtype)),
            to_device(np.zeros(context, np.int32)),
            to_device(np.zeros(path, path_dtype)),
            to_device(np.zeros(length, np.int32)),
        )

    call()
    call(cache=(0, 9, 8))
    for words in (
        {"cache": (9, 8)},
        {"context": 2},
        {"path": 0},
        {"length": 0},
        {"dtype": np.float64},
        {"path_dtype": np.int64},
    ):
        with pytest.raises(LaunchError, match="compact"):
            call(**words)
