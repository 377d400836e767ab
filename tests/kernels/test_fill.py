"""Random weights against the NumPy twin, bit for bit, in f32 and as bf16 bits."""

import numpy as np
import pytest
from kernels.device import bf16_bits, poisoned, to_host
from seeds import fresh_seed

from ddtree.reference import fill as twin
from kernels_numba import fill
from kernels_numba.checks import LaunchError

DTYPES = {"f32": np.float32, "bf16": np.uint16}
SEED = 0x0123456789ABCDEF


def filled(shape, dtype, seed, index, amplitude):
    """The kernel's numbers, made inside guards that stay as they were."""
    size = int(np.prod(shape))
    out = poisoned(size + 8, DTYPES[dtype])
    fill.fill(out[4 : size + 4].reshape(shape), seed, index, amplitude)
    got = to_host(out)
    assert (np.delete(got, np.s_[4 : size + 4]).view(np.uint8) == 0xFF).all()
    return got[4 : size + 4].reshape(shape)


def check_twin(shape, dtype, seed, index=3, amplitude=0.37):
    want = np.full(shape, np.nan, np.float32)
    twin.fill(want, seed, index, amplitude)
    got = filled(shape, dtype, seed, index, amplitude)
    want = want if dtype == "f32" else bf16_bits(want)
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8), f"seed {seed}")


@pytest.mark.simulator
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (3,), (31,), (65,), (2, 3, 7)])
def test_twin_small(shape, dtype):
    check_twin(shape, dtype, SEED)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (33,), (5, 3, 7), (1025, 4099)])
def test_twin_large(shape, dtype):
    check_twin(shape, dtype, fresh_seed())


@pytest.mark.gpu
def test_past_two_to_the_31():
    """The last elements of an array that i32 indices do not reach."""
    from numba import cuda

    size = 2**31 + 5
    out = cuda.device_array(size, np.uint16)
    fill.fill(out, SEED, 1, 1.0)
    counter = np.zeros((4, 4), np.uint32)
    first = size // 4 - 3
    counter[:, 0], counter[:, 2] = np.arange(first, first + 4), 1
    words = twin.philox4x32_10(counter, (SEED & 0xFFFFFFFF, SEED >> 32)).reshape(-1)
    want = bf16_bits((words >> 8).astype(np.float32) * np.float32(2.0**-23) - np.float32(1))
    np.testing.assert_array_equal(out[4 * first :].copy_to_host(), want[: size - 4 * first])


@pytest.mark.simulator
def test_wrong_arguments_are_refused_and_nothing_is_legal():
    out = poisoned((4, 6))
    fill.fill(out[:0], SEED, 0, 1.0)
    for arguments in (
        (out[:, :3], SEED, 0, 1.0),
        (poisoned(4, np.float64), SEED, 0, 1.0),
        (out, 2**64, 0, 1.0),
        (out, -1, 0, 1.0),
        (out, SEED, 2**32, 1.0),
    ):
        with pytest.raises(LaunchError, match=r"^fill: "):
            fill.fill(*arguments)
    assert np.isnan(to_host(out)).all()


def test_the_twin_is_uniform_and_each_array_its_own():
    one, two, far = (np.empty(40_000, np.float32) for _ in range(3))
    twin.fill(one, 7, 0, 2.0)
    twin.fill(two, 7, 1, 2.0)
    twin.fill(far, 7 + 2**32, 0, 2.0)
    for values in (one, two, far):
        assert -2 <= values.min() < -1.999 and 1.999 < values.max() < 2
        assert abs(values.mean()) < 0.02 and abs(values.std() - 2 / 3**0.5) < 0.01
    assert abs(np.corrcoef([one, two, far]) - np.eye(3)).max() < 0.02
    part = np.empty((5, 3), np.float32)
    twin.fill(part, 7, 0, 2.0)
    assert (part.ravel() == one[:15]).all()
