"""RMSNorm against f64: odd widths, outliers, zeros, in place, guards around the output, and rows that stay alone."""

import math

import numpy as np
import pytest
from compare_arrays import assert_close, assert_same_bits
from kernels.device import poisoned, to_device, to_host
from seeds import fresh_seed

from kernels_numba import norm
from kernels_numba.checks import LaunchError

SMALL = [((9,), 1), ((3,), 3), ((2,), 33), ((2,), 65), ((2,), 64), ((1,), 200), ((2, 2), 8), ((0,), 8)]
LARGE = [
    *(((9,), width) for width in (1, 2, 3, 31, 32, 33, 64, 65, 127, 1536, 4097, 18432)),
    *(((rows,), width) for rows in (1, 3, 31, 64, 65, 513) for width in (256, 2048, 7168)),
    ((16, 64), 128),
    ((513, 8), 128),
    ((5, 3), 33),
]


def bound(width):
    """Relative, in eps = 2 units: half of the sum's adds (in sequence, then in pairs), and seven roundings after it."""
    wide = norm.is_wide(width)
    threads = norm.norm_threads(width, wide)
    adds = -(-width // threads) + 4 + math.log2(threads)
    return (adds / 2 + 7) / 2 * np.finfo(np.float32).eps


def hard_rows(rng, shape):
    """Rows with an outlier, a large one, a small one next to eps, zeros, equal values."""
    x = rng.standard_normal(shape).astype(np.float32)
    rows = x.reshape(-1, shape[-1])
    for row, scale in zip(rows[1::7], (1e4, 1e-4, 1e-15), strict=False):
        row *= scale
    for row in rows[2::7]:
        row[len(row) // 2] = 1e4
    rows[4::7] = 0
    rows[5::7] = -7
    return x


def oracle(x, weight, eps):
    wide = x.astype(np.float64)
    return weight * (wide / np.sqrt(np.square(wide).mean(axis=-1, keepdims=True) + eps))


def check_rms_norm(leading, width, seed, eps=1e-6):
    rng = np.random.default_rng(seed)
    x = hard_rows(rng, (*leading, width))
    weight = rng.standard_normal(width).astype(np.float32)
    what = f"rms_norm {leading} x {width}, seed {seed}"
    guarded = poisoned((leading[0] + 2, *leading[1:], width))
    norm.rms_norm(to_device(x), to_device(weight), eps, guarded[1:-1])
    got = to_host(guarded)
    assert np.isnan(got[0]).all() and np.isnan(got[-1]).all(), f"{what}: wrote past its rows"
    got = got[1:-1]
    assert_close(got, oracle(x, weight, eps), bound(width), what, elementwise=True)

    in_place = to_device(x)
    norm.rms_norm(in_place, to_device(weight), eps, in_place)
    assert_same_bits(to_host(in_place), got, f"{what}, in place")
    if leading[0] > 1:  # a row's bits are its own: alone, and behind others
        last = poisoned((1, *leading[1:], width))
        norm.rms_norm(to_device(x[-1:]), to_device(weight), eps, last)
        assert_same_bits(to_host(last), got[-1:], f"{what}, last row alone")


def check_add_norm(leading, width, seed):
    """The bits of add and rms_norm one after the other, in the residual and in the output."""
    rng = np.random.default_rng(seed)
    x, branch = hard_rows(rng, (*leading, width)), hard_rows(rng, (*leading, width))[::-1].copy()
    weight = to_device(rng.standard_normal(width).astype(np.float32))
    what = f"add_norm {leading} x {width}, seed {seed}"
    residual, normed = poisoned((leading[0] + 2, *leading[1:], width)), poisoned(x.shape)
    residual[1:-1].copy_to_device(x)
    norm.add_norm(residual[1:-1], to_device(branch), weight, 1e-6, normed)
    got = to_host(residual)
    assert np.isnan(got[0]).all() and np.isnan(got[-1]).all(), f"{what}: wrote past its rows"
    assert_same_bits(got[1:-1], x + branch, f"{what}, residual")
    want = poisoned(x.shape)
    norm.rms_norm(to_device(x + branch), weight, 1e-6, want)
    assert_same_bits(to_host(normed), to_host(want), what)

    into_branch = to_device(branch)
    norm.add_norm(to_device(x), into_branch, weight, 1e-6, into_branch)
    assert_same_bits(to_host(into_branch), to_host(normed), f"{what}, out is branch")


@pytest.mark.simulator
@pytest.mark.parametrize(("leading", "width"), SMALL)
def test_small(leading, width):
    check_rms_norm(leading, width, seed=width)


@pytest.mark.simulator
@pytest.mark.parametrize(("leading", "width"), [((3,), 33), ((2,), 64), ((2, 2), 8)])
def test_add_norm_small(leading, width):
    check_add_norm(leading, width, seed=width)


@pytest.mark.gpu
@pytest.mark.parametrize(("leading", "width"), [((65,), 256), ((3,), 7168), ((9,), 4097), ((513,), 2048)])
def test_add_norm_large(leading, width):
    check_add_norm(leading, width, seed=fresh_seed())


@pytest.mark.gpu
@pytest.mark.parametrize(("leading", "width"), LARGE)
def test_large(leading, width):
    check_rms_norm(leading, width, seed=fresh_seed(), eps=1e-5)


def check_nan_stays_in_its_row(width):
    x = np.ones((3, width), np.float32)
    x[1, width - 1] = np.nan
    out = to_device(np.zeros_like(x))
    norm.rms_norm(to_device(x), to_device(np.ones(width, np.float32)), 1e-6, out)
    assert np.isnan(to_host(out)).all(axis=1).tolist() == [False, True, False]
    assert np.isfinite(to_host(out)[[0, 2]]).all()


@pytest.mark.simulator
def test_nan_small():
    check_nan_stays_in_its_row(9)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [9, 7168])
def test_nan_large(width):
    check_nan_stays_in_its_row(width)


@pytest.mark.simulator
def test_wrong_arguments_are_refused():
    x, weight = to_device(np.ones((2, 4), np.float32)), to_device(np.ones(4, np.float32))
    out = to_device(np.zeros((2, 4), np.float32))
    wrong = [
        (to_device(np.ones((2, 4))), weight, 1e-6, out),
        (x, to_device(np.ones(3, np.float32)), 1e-6, out),
        (x, to_device(np.ones(4, np.uint16)), 1e-6, out),
        (x, to_device(np.ones(0, np.float32)), 1e-6, out),
        (x, weight, 0.0, out),
        (x, weight, float("nan"), out),
        (x, weight, 1e-6, out[:1]),
        (x[:, ::2], weight[:2], 1e-6, out[:, ::2]),
    ]
    for arguments in wrong:
        with pytest.raises(LaunchError, match="rms_norm"):
            norm.rms_norm(*arguments)
        with pytest.raises(LaunchError, match="add_norm"):
            norm.add_norm(arguments[0], x, *arguments[1:])
    assert (to_host(out) == 0).all()
