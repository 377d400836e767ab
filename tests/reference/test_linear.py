"""Gather and matrix products against f64, at odd sizes, with outliers, into outputs full of NaN."""

import numpy as np
import pytest
from compare_arrays import assert_close, assert_same_bits
from support import DTYPES, EPS, ODD_SIZES

from ddtree.reference.linear import embed, head_linear, linear

SHAPES = [(m, k, n) for m in ODD_SIZES for k, n in ((1, 65), (33, 31), (64, 64), (129, 3))]
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def outliers(rng, dtype, *shape):
    """Normals with a few elements of 1e4 and of 1e-4, whole rows of zeros."""
    x = rng.standard_normal(shape)
    x[rng.random(shape) < 0.03] *= 1e4
    x[rng.random(shape) < 0.1] *= 1e-4
    x[2::7] = 0
    return x.astype(DTYPES[dtype])


@each_dtype
@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_linear(m, k, n, dtype):
    rng = np.random.default_rng(m * k + n)
    x, weight = outliers(rng, dtype, m, k), outliers(rng, dtype, n, k)
    out = np.full((m, n), np.nan, DTYPES[dtype])
    linear(x, weight, out)
    wide, wide_weight = x.astype(np.longdouble), weight.astype(np.longdouble)
    want = (wide @ wide_weight.T).astype(np.float64)
    terms = (np.abs(wide) @ np.abs(wide_weight).T).astype(np.float64)
    assert_close(out, want, (k + 1) * EPS[dtype], f"linear {m} {k} {n} {dtype}", scale=terms)


@each_dtype
@pytest.mark.parametrize(
    ("m", "heads", "a", "b"), [(m, 3, 33, 17) for m in ODD_SIZES] + [(2, 1, 1, 65), (5, 8, 64, 32)]
)
def test_head_linear(m, heads, a, b, dtype):
    rng = np.random.default_rng(m + heads)
    x, weight = outliers(rng, dtype, m, heads, a), outliers(rng, dtype, heads, b, a)
    out = np.full((m, heads, b), np.nan, DTYPES[dtype])
    head_linear(x, weight, out)
    want, terms = np.zeros((m, heads, b)), np.zeros((m, heads, b))
    for i in range(m):
        for h in range(heads):
            wide = x[i, h].astype(np.longdouble), weight[h].astype(np.longdouble)
            want[i, h], terms[i, h] = wide[1] @ wide[0], np.abs(wide[1]) @ np.abs(wide[0])
    assert_close(out, want, (a + 1) * EPS[dtype], f"head_linear {m} {dtype}", scale=terms)


@each_dtype
def test_infinities_and_nan_stay_in_their_rows(dtype):
    x = np.ones((4, 5), DTYPES[dtype])
    x[1, 3], x[2, 0] = -np.inf, np.nan
    weight = np.arange(1, 36, dtype=DTYPES[dtype]).reshape(7, 5)
    out = np.zeros((4, 7), DTYPES[dtype])
    linear(x, weight, out)
    want = np.tile(weight.astype(np.float64).sum(axis=1), (4, 1))
    want[1], want[2] = -np.inf, np.nan
    assert_close(out, want, 0, "linear with -inf and NaN")


@each_dtype
def test_linear_writes_into_a_strided_output_and_reads_strided_rows(dtype):
    """The model hands it views: the first rows of larger scratch, a column block of it."""
    rng = np.random.default_rng(3)
    x, weight = outliers(rng, dtype, 9, 14)[::2, :7], outliers(rng, dtype, 6, 7)
    out, plain = np.full((5, 11), np.nan, DTYPES[dtype]), np.empty((5, 6), DTYPES[dtype])
    linear(x, weight, out[:, 3:9])
    linear(np.ascontiguousarray(x), weight, plain)
    assert_close(out[:, 3:9], plain.astype(np.float64), 8 * EPS[dtype], "strided")
    assert np.isnan(out[:, :3]).all() and np.isnan(out[:, 9:]).all()


@each_dtype
@pytest.mark.parametrize("m", ODD_SIZES)
def test_embed_gathers_the_bits(m, dtype):
    rng = np.random.default_rng(m)
    table = outliers(rng, dtype, 50, 33)
    table[7, 3] = -np.inf
    ids = rng.integers(50, size=m).astype(np.int32)
    ids[0], ids[-1] = 0, 49
    out = np.full((m, 33), np.nan, DTYPES[dtype])
    embed(ids, table, out)
    for row, token in enumerate(ids):
        assert_same_bits(out[row], table[token], f"row {row}, token {token}")


def test_embed_refuses_an_id_past_the_table():
    with pytest.raises(IndexError):
        embed(np.array([50], np.int32), np.zeros((50, 2), np.float32), np.zeros((1, 2), np.float32))
