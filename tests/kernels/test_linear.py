"""Matrix products against f64: odd sizes, outliers, bf16 rounding, guards, and rows whose bits are their own."""

import numpy as np
import pytest
from compare_arrays import assert_close, assert_same_bits
from kernels.device import bf16_bits, bf16_values, poisoned, to_device, to_host
from seeds import fresh_seed

from ddtree.reference import linear as twin
from kernels_numba import linear, linear_mma, linear_wide
from kernels_numba.primitives import WARP
from kernels_numba.primitives_columns import MULTIPLE, share_of, split_bits_of
from kernels_numba.primitives_dot import chunk_of
from kernels_numba.primitives_wide import MOST_WARPS, ROW_TILES, WIDTH

DTYPES = ("f32", "bf16")
# A step of 16 products on tensor cores may cut each of its 17 summands off at 2**-24 of the largest: 9 x 2**-23.
ROUNDINGS_A_STEP = 18  # of 2**-24
GUARD = 64  # elements behind the scratch
SMALL = [  # rows, K, N
    *((3, k, 5) for k in (1, 3, 31, 33, 100)),
    *((m, 32, 9) for m in (1, 2, 5, 9)),
    (1, 256, 3),
    (17, 32, 16),
    (2, 1032, 2),  # K is split over the simulator's two warps
    (0, 8, 8),
]
LARGE = [
    *((m, 100, 33) for m in (1, 5, 65)),
    *((m, 33, 65) for m in (1, 2, 4)),
    *(
        (m, k, n)
        for m in (1, 3, 8, 17, 65)
        for k, n in ((1, 1), (3, 31), (31, 3), (256, 2048), (96, 256), (8, 7))
    ),
    *((m, 7168, 576) for m in (1, 2, 4, 7, 33)),
    *((m, 1536, 3000) for m in (1, 9, 64)),
    (1, 18432, 257),
    (16, 2048, 7168),
    *((m, 2048, 768) for m in (1, 8, 64)),
    *((m, 7168, 6400) for m in (1, 64)),
    (257, 1032, 2000),
    (1024, 256, 384),
    (256, 7171, 10),
]
HEADS_SMALL = [(3, 2, 16, 5), (1, 3, 33, 2), (9, 2, 8, 4)]  # rows, heads, A, B
HEADS_LARGE = [
    (m, *shape)
    for m in (1, 3, 17, 65)
    for shape in ((8, 32, 64), (8, 64, 32), (64, 128, 512), (64, 512, 128))
]


def depth(k, half, heads, width):
    """Roundings a product passes through, on tensor cores: a share's steps, then the shares.

    Else: a lane's fmas, log2(WARP) pairs, the splits.
    """
    if half and k % MULTIPLE == 0:
        splits = 1 << split_bits_of(heads, width, k)
        return -(-k // (32 * splits)) * 2 * ROUNDINGS_A_STEP + splits
    splits = 1 << linear.split_bits_of(heads * width, k)
    stride = WARP * chunk_of(half) * splits
    return -(-k // stride) * chunk_of(half) + WARP.bit_length() + splits


def outliers(rng, *shape):
    """Normals with a few elements of 1e4 and of 1e-4, ties between two bf16, rows of zeros."""
    x = rng.standard_normal(shape)
    x[rng.random(shape) < 0.03] *= 1e4
    x[rng.random(shape) < 0.1] *= 1e-4
    ties = rng.random(shape) < 0.1
    x[ties] = (1 + rng.integers(0, 8, ties.sum()) * 2.0**-8) * rng.choice([-1, 1], ties.sum())
    x[5::7] = 0
    return x.astype(np.float32)


def make(rng, x_shape, weight_shape, dtype):
    """Input and weight as the kernel takes them, and as the f32 values it must multiply."""
    x, weight = outliers(rng, *x_shape), outliers(rng, *weight_shape)
    if dtype == "f32":
        return x, weight, x, weight
    bits = bf16_bits(weight)
    return x, bits, bf16_values(bf16_bits(x)), bf16_values(bits)


def inside_nan(array):
    """A device copy with NaN (bf16: 0xFFFF) before and after it, a row each."""
    rows = np.full(
        (len(array) + 2, *array.shape[1:]), np.nan if array.dtype == np.float32 else 0xFFFF, array.dtype
    )
    rows[1:-1] = array
    return to_device(rows)[1:-1]


def run(operation, x, weight, shape):
    """The output of a launch between guards, with no more scratch than it says, poisoned."""
    guarded, weight_shape = poisoned((shape[0] + 2, *shape[1:])), weight.shape
    heads = weight_shape[0] if len(weight_shape) == 3 else 1
    size = linear.linear_scratch(shape[0], heads, *weight_shape[-2:]) if weight.dtype == np.uint16 else 0
    scratch = poisoned((size + GUARD,))
    operation(inside_nan(x), inside_nan(weight), guarded[1:-1], scratch[:size])
    got = to_host(guarded)
    assert np.isnan(got[0]).all() and np.isnan(got[-1]).all(), "wrote past its rows"
    assert np.isnan(to_host(scratch)[size:]).all(), "wrote past its scratch"
    return got[1:-1]


def check_linear(m, k, n, dtype, seed):
    rng = np.random.default_rng(seed)
    x, weight, values, weights = make(rng, (m, k), (n, k), dtype)
    what = f"linear {m} x {k} x {n} {dtype}, seed {seed}"
    got = run(linear.linear, x, weight, (m, n))
    want = np.empty((m, n))
    twin.linear(values.astype(np.float64), weights.astype(np.float64), want)
    terms = np.abs(values.astype(np.float64)) @ np.abs(weights.astype(np.float64)).T
    assert_close(got, want, depth(k, dtype == "bf16", 1, n) * np.finfo(np.float32).eps / 2, what, scale=terms)
    if m > 1:
        assert_same_bits(run(linear.linear, x[-1:], weight, (1, n)), got[-1:], f"{what}: the last row alone")


def check_heads(m, heads, a, b, dtype, seed):
    rng = np.random.default_rng(seed)
    x, weight, values, weights = make(rng, (m, heads, a), (heads, b, a), dtype)
    what = f"head_linear {m} x {heads} x {a} x {b} {dtype}, seed {seed}"
    got = run(linear.head_linear, x, weight, (m, heads, b))
    want, terms = np.empty((m, heads, b)), np.empty((m, heads, b))
    twin.head_linear(values.astype(np.float64), weights.astype(np.float64), want)
    twin.head_linear(np.abs(values).astype(np.float64), np.abs(weights).astype(np.float64), terms)
    bound = depth(a, dtype == "bf16", heads, b) * np.finfo(np.float32).eps / 2
    assert_close(got, want, bound, what, scale=terms)
    if m > 1:
        alone = run(linear.head_linear, x[-1:], weight, (1, heads, b))
        assert_same_bits(alone, got[-1:], f"{what}: the last row alone")


def check_rows_keep_their_bits(counts, k, n, dtype, seed):
    """The same row at another place, among others, in tiles of every shape."""
    rng = np.random.default_rng(seed)
    most = max(counts)
    x, weight, *_ = make(rng, (most, k), (n, k), dtype)
    want = run(linear.linear, x, weight, (most, n))
    for count in counts:
        rows = rng.choice(most, count, replace=False)
        got = run(linear.linear, x[rows], weight, (count, n))
        assert_same_bits(got, want[rows], f"{count} of {most} rows, K {k}, N {n}, {dtype}, seed {seed}")


def check_heads_keep_their_bits(counts, heads, a, b, dtype, seed):
    """As check_rows_keep_their_bits, for a weight a head."""
    rng = np.random.default_rng(seed)
    x, weight, *_ = make(rng, (max(counts), heads, a), (heads, b, a), dtype)
    want = run(linear.head_linear, x, weight, (max(counts), heads, b))
    for count in counts:
        rows = rng.choice(len(x), count, replace=False)
        got = run(linear.head_linear, x[rows], weight, (count, heads, b))
        assert_same_bits(got, want[rows], f"{count} rows, {heads} heads, {a} x {b}, {dtype}, seed {seed}")


def plans_of(m, k, n, warps):
    """Every way to cut a product of bf16 weights, in blocks of so many warps."""
    bits = split_bits_of(1, n, k)
    share = share_of(k, bits)
    for count in warps:
        groups = max(min(count, linear_mma.MOST_WARPS) >> bits, 1)
        yield bits, share, linear_mma.Tiling(groups, (-(-m // 8), -(-n // (16 * groups)), 1)), None
        for tiles in ROW_TILES:
            many = min(count, MOST_WARPS[tiles])
            for apart in (False, True) if bits else (False,):
                grid = -(-m // (16 * tiles)), -(-n // (WIDTH * many)), 1 << bits if apart else 1
                yield bits, share, None, linear_wide.WideTiling(tiles, many, apart, grid)


def check_tiles_give_the_same_bits(m, k, n, warps, monkeypatch, seed):
    """The result in any tiles, the shares of K side by side or in turn."""
    x, weight, *_ = make(np.random.default_rng(seed), (m, k), (n, k), "bf16")
    want = run(linear.linear, x, weight, (m, n))
    for forced in plans_of(m, k, n, warps):
        monkeypatch.setattr(linear, "tensor_plan", lambda *_, forced=forced: forced)
        got = run(linear.linear, x, weight, (m, n))
        assert_same_bits(got, want, f"{m} x {k} x {n}, {forced}, seed {seed}")


@pytest.mark.simulator
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "k", "n"), SMALL)
def test_small(m, k, n, dtype):
    check_linear(m, k, n, dtype, seed=m * k + n)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "k", "n"), LARGE)
def test_large(m, k, n, dtype):
    check_linear(m, k, n, dtype, fresh_seed())


@pytest.mark.simulator
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "heads", "a", "b"), HEADS_SMALL)
def test_small_heads(m, heads, a, b, dtype):
    check_heads(m, heads, a, b, dtype, seed=m)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "heads", "a", "b"), HEADS_LARGE)
def test_large_heads(m, heads, a, b, dtype):
    check_heads(m, heads, a, b, dtype, fresh_seed())


@pytest.mark.simulator
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_keep_their_bits_small(dtype):
    check_rows_keep_their_bits((1, 5, 9), 72, 5, dtype, seed=1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n"), [(256, 128), (7168, 576), (1536, 1000), (96, 256), (100, 33), (33, 1)])
def test_rows_keep_their_bits_large(k, n, dtype):
    check_rows_keep_their_bits((*range(1, 10), 16, 17, 33, 64, 65, 127), k, n, dtype, fresh_seed())


EVERY_TILE = (1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 130, 257)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("k", "n"), [(7168, 6400), (7168, 2112), (2048, 2048), (2048, 768), (768, 3072), (104, 20)]
)
def test_bf16_rows_keep_their_bits_large(k, n):
    """Weights whose K is not split, and is, in 2, 4 and 8."""
    check_rows_keep_their_bits(EVERY_TILE, k, n, "bf16", fresh_seed())


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "a", "b"), [(16, 128, 512), (16, 512, 128), (64, 128, 512)])
def test_bf16_heads_keep_their_bits_large(heads, a, b):
    check_heads_keep_their_bits(EVERY_TILE, heads, a, b, "bf16", fresh_seed())


@pytest.mark.simulator
def test_heads_keep_their_bits_small():
    check_heads_keep_their_bits((1, 5), 2, 8, 3, "bf16", seed=2)


@pytest.mark.simulator
@pytest.mark.parametrize(("m", "k", "n"), [(9, 40, 5), (18, 264, 36), (9, 264, 5)])
def test_tiles_give_the_same_bits_small(m, k, n, monkeypatch):
    check_tiles_give_the_same_bits(m, k, n, (2,), monkeypatch, seed=m)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("m", "k", "n"), [(130, 1000, 6500), (67, 2048, 768), (9, 120, 33), (200, 520, 4000)]
)
def test_tiles_give_the_same_bits_large(m, k, n, monkeypatch):
    check_tiles_give_the_same_bits(m, k, n, (1, 3, 8, 16), monkeypatch, fresh_seed())
