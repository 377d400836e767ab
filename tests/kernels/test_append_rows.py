"""append_rows: rows land behind the context, in f32 or bf16, and nowhere else."""

import numpy as np
import pytest
from kernels.device import bf16_bits, poisoned, scalar, to_device, to_host
from seeds import fresh_seed

from ddtree.reference.position import append_rows as twin
from kernels_numba.append_rows import append_rows
from kernels_numba.checks import LaunchError

SMALL = [(1, (3,), 0, 4), (3, (2, 5), 2, 6), (2, (9,), 5, 7)]  # rows, shape of a row, context, capacity
LARGE = [(1, (8, 128), 0, 40), (16, (4, 32), 300, 400), (65, (7, 33), 63, 128), (3, (513,), 1, 4)]


def check(rows, width, context_len, capacity, bf16, seed):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, *width)).astype(np.float32)
    dtype = np.uint16 if bf16 else np.float32
    cache = poisoned((capacity, *width), dtype)
    want = to_host(cache)
    append_rows(to_device(values), scalar(context_len), cache)
    twin(bf16_bits(values) if bf16 else values, context_len, want)
    np.testing.assert_array_equal(to_host(cache).view(np.uint8), want.view(np.uint8), f"seed {seed}")


@pytest.mark.simulator
@pytest.mark.parametrize("bf16", [False, True], ids=["f32", "bf16"])
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_small(case, bf16):
    check(*case, bf16, seed=1)


@pytest.mark.gpu
@pytest.mark.parametrize("bf16", [False, True], ids=["f32", "bf16"])
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large(case, bf16):
    check(*case, bf16, seed=fresh_seed())


@pytest.mark.simulator
def test_a_row_past_the_capacity_is_not_written():
    cache = poisoned((4, 3))
    guard = cache[:3]
    append_rows(to_device(np.ones((4, 3), np.float32)), scalar(1), guard)
    got = to_host(cache)
    assert np.isnan(got[[0, 3]]).all() and (got[1:3] == 1).all()


@pytest.mark.simulator
def test_wrong_arguments_launch_nothing():
    rows, cache = to_device(np.ones((2, 3), np.float32)), poisoned((5, 3))
    for bad, match in (
        ((to_device(np.ones((2, 4), np.float32)), scalar(0), cache), "rows"),
        ((rows, scalar(0), poisoned((5, 3), np.int32)), "cache"),
        ((rows, to_device(np.zeros(1, np.int64)), cache), "context_len"),
        ((to_device(np.ones((), np.float32)), scalar(0), cache), "rows"),
        ((rows, scalar(0), poisoned(())), "rows"),
    ):
        with pytest.raises(LaunchError, match=match):
            append_rows(*bad)
    assert np.isnan(to_host(cache)).all()
