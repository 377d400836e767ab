"""Matrix products with fp8 weights against f64: every byte, every way to cut K, rows whose bits are their own."""

import numpy as np
import pytest
from compare_arrays import assert_close, assert_same_bits
from kernels.device import bf16_bits, bf16_values, poisoned, to_device, to_host
from kernels.quantised import E4M3, EPS, fp8, product, rounded
from seeds import fresh_seed

from ddtree.quantised import Fp8Matrix
from ddtree.reference.linear_quantised import linear_quantised
from kernels_numba.checks import LaunchError
from kernels_numba.linear_fp8 import FEWEST_WARPS, SHARES, linear_fp8, linear_fp8_scratch, shares_of, warps_of

SMALL = [
    (0, 16, 32),
    (1, 3, 16),
    (2, 20, 144),
    (3, 20, 144),
    (9, 17, 32),
    (2, 5, 528),
    (3, 5, 528),
    (20, 5, 0),
]  # rows, N, K; of 528 K is cut
LARGE = [
    *((m, 5, 16) for m in (1, 9, 33)),
    *((m, 300, 1152) for m in (1, 3, 8, 17, 65)),
    *((m, 576, 7168) for m in (1, 8, 9, 16, 65)),
    *((m, 24576, 1536) for m in (1, 17)),
    *((m, 18432, 7168) for m in (1, 16)),
    *((m, 129, 2064) for m in (1, 31, 257)),
    (1, 7168, 16384),
    (0, 16, 32),
]


def inside(array, byte):
    """A device copy between two rows of that byte, all NaN or far too large."""
    rows = np.empty((len(array) + 2, *array.shape[1:]), array.dtype)
    rows.reshape(-1).view(np.uint8)[:] = byte
    rows[1:-1] = array
    return to_device(rows)[1:-1]


def run(x, weight, width):
    """The output of a launch between guards."""
    guarded = poisoned((len(x) + 2, width))
    values, scales = weight
    scratch = poisoned(linear_fp8_scratch(len(x), width, x.shape[1]) + 1)
    linear_fp8(inside(x, 0xFF), inside(values, 0x7F), inside(scales, 0xFF), guarded[1:-1], scratch[:-1])
    got = to_host(guarded)
    assert np.isnan(got[[0, -1]]).all() and np.isnan(to_host(scratch)[-1]), "wrote past its rows or scratch"
    return got[1:-1]


def inputs(rng, m, k):
    """Normals with outliers and ties of bf16; a row of zeros."""
    x = rng.standard_normal((m, k)).astype(np.float32)
    x[rng.random(x.shape) < 0.03] *= 1e4
    ties = rng.random(x.shape) < 0.1
    x[ties] = 1 + rng.integers(0, 8, ties.sum()) * 2.0**-8
    x[5::7] = 0
    return x


def check(m, n, k, seed):
    rng = np.random.default_rng(seed)
    x, weight = inputs(rng, m, k), fp8(rng, n, k)
    what = f"linear_fp8 {m} x {k} x {n}, seed {seed}"
    got = run(x, weight.arrays, n)
    want, error = product(rounded(x), weight, splits=shares_of(n, k))
    assert_close(got, want, 1, what, scale=error)
    twin = np.empty((m, n), np.float32)
    linear_quantised(bf16_values(bf16_bits(x)), Fp8Matrix(*weight.arrays), twin)
    terms = np.abs(rounded(x)) @ np.abs(weight.dense).T
    assert_close(
        got, twin.astype(np.float64), 1, f"{what}: the twin", scale=error + (128 + k // 128) * EPS * terms
    )


@pytest.mark.simulator
@pytest.mark.parametrize(("m", "n", "k"), SMALL)
def test_small(m, n, k):
    check(m, n, k, seed=m * n)


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n", "k"), LARGE)
def test_large(m, n, k):
    check(m, n, k, fresh_seed())


def check_every_byte(m):
    """Rows of a unit matrix give the weight's own values times their scales, rounded once; NaN bytes NaN columns."""
    values = np.arange(256, dtype=np.uint8).reshape(8, 32).repeat(2, axis=0)  # two columns of each 32 bytes
    scales = np.array([[-0.37]], np.float32)
    want = (E4M3[values].astype(np.float32) * scales).T
    want[:, np.isnan(want).any(axis=0)] = np.nan
    got = run(np.eye(32, dtype=np.float32)[:m], (values, scales), 16)
    assert_same_bits(
        np.nan_to_num(got, nan=7777), np.nan_to_num(want[:m] + np.float32(0), nan=7777), "every byte"
    )
    assert np.isnan(got).sum() == 4 * m, "two of the 256 bytes are NaN, in two columns each"


@pytest.mark.simulator
def test_every_byte_small():
    check_every_byte(4)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 8, 16, 32])
def test_every_byte_large(m):
    check_every_byte(m)


def check_rows_keep_their_bits(most, counts, n, k, seed):
    """The same row at another place, among others, in kernels of every kind."""
    rng = np.random.default_rng(seed)
    x, weight = inputs(rng, most, k), fp8(rng, n, k)
    want = run(x, weight.arrays, n)
    for count in counts:
        rows = rng.choice(most, count, replace=False)
        assert_same_bits(run(x[rows], weight.arrays, n), want[rows], f"{count} rows, {n} x {k}, seed {seed}")


@pytest.mark.simulator
def test_rows_keep_their_bits_small():
    check_rows_keep_their_bits(3, (1, 2), 5, 528, seed=1)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(576, 7168), (13000, 272), (600, 2320), (40, 1024)])
def test_rows_keep_their_bits_large(n, k):
    """Weights whose K is cut, and is not."""
    check_rows_keep_their_bits(80, (1, 2, 3, 8, 9, 16, 17, 33, 64, 65), n, k, fresh_seed())


def check_sign_of_zero(k):
    """Sums of -2^-20 k times 1e-45 round to -0, in kernels of every kind: chunks that a share lacks add nothing.

    Of a K with a share of no chunk at all that sum is +0, and so is the result, for any number of rows.
    """
    x = np.full((9, k), -(2.0**-20), np.float32)
    weight = np.full((5, k), 0x38, np.uint8), np.full((1, -(-k // 128)), 1e-45, np.float32)
    for count in (1, 2, 3, 9):
        got = run(x[:count], weight, 5)
        assert (got == 0).all() and np.signbit(got).all(), f"{count} rows, K {k}: -0 everywhere"


@pytest.mark.simulator
def test_the_sign_of_zero_small():
    check_sign_of_zero(528)


@pytest.mark.gpu
def test_the_sign_of_zero_large():
    check_sign_of_zero(1408)


def test_cuts():
    assert {shares_of(n, k) for n, k in ((18432, 7168), (24576, 1536), (40, 256))} == {1}
    assert {shares_of(n, k) for n, k in ((576, 7168), (7168, 16384))} == {SHARES}
    assert (
        warps_of(1152, 1, 4) == 3
    )  # 384 blocks are three each; four warps would make 288 blocks, three of some
    assert warps_of(1152, 1, 9) == 9 and warps_of(10**6, 1, 4) == 4 and warps_of(1, 1, 4) >= FEWEST_WARPS


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, np.zeros((3, 24), "f4"), "linear_fp8: values: expected shape"),
        (1, np.zeros((20, 32), "i1"), "linear_fp8: values: expected dtype uint8, found int8"),
        (2, np.zeros((2, 1), "f4"), "linear_fp8: scales: expected shape"),
        (3, np.zeros((3, 19), "f4"), "linear_fp8: out: expected shape"),
        (4, np.zeros(191, "f4"), "linear_fp8: scratch: expected 192 elements at least, found 191"),
        (4, None, "linear_fp8: scratch: expected 192 elements at least, found 0"),
    ],
)
def test_arguments_that_do_not_fit(index, value, message):
    shapes = ((3, 32), "f4"), ((20, 32), "u1"), ((1, 1), "f4"), ((3, 20), "f4")
    given = [np.zeros(*shape) for shape in shapes] + [np.zeros(192, "f4")]
    given[index] = value
    with pytest.raises(LaunchError, match=message):
        linear_fp8(*given)


def test_rows_that_no_grid_has():
    shapes = ((2**16, 16), "f4"), ((1, 16), "u1"), ((1, 1), "f4"), ((2**16, 1), "f4")
    with pytest.raises(LaunchError, match="linear_fp8: x: expected fewer than 65536 rows, found 65536"):
        linear_fp8(*(np.zeros(*shape) for shape in shapes))


def test_rows_of_weights_are_whole_pieces_of_16_bytes():
    given = [
        np.zeros((3, 24), "f4"),
        np.zeros((20, 24), "u1"),
        np.zeros((1, 1), "f4"),
        np.zeros((3, 20), "f4"),
    ]
    with pytest.raises(LaunchError, match="linear_fp8: x: expected K a multiple of 16, found 24"):
        linear_fp8(*given)
