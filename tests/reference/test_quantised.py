"""Products with fp8 and INT4 weights against their exact values in f64, in every mode, and rows that never meet."""

import ml_dtypes
import numpy as np
import pytest
from checkpoint.quantisers import to_fp8, to_int4
from compare_arrays import assert_close, assert_same_bits
from support import DTYPES, EPS, ODD_SIZES, arrays_of

from ddtree.lab_bf16 import Bf16Ops
from ddtree.ops import get_ops
from ddtree.quantised import Fp8Matrix, Int4Matrix, dequantised
from ddtree.reference.experts import experts
from ddtree.reference.linear import linear

SHAPES = {"int4": [(31, 32), (64, 96), (5, 256)], "fp8": [(31, 24), (130, 150), (257, 384), (1, 128)]}
CASES = [(stored, n, k) for stored, shapes in SHAPES.items() for n, k in shapes]
each_case = pytest.mark.parametrize(("stored", "n", "k"), CASES)
each_stored = pytest.mark.parametrize("stored", SHAPES)


def make(rng, stored, *shape):
    """A quantised matrix or stack of uneven values: outliers, a row of zeros, rows of 1e-4."""
    weight = rng.standard_normal(shape)
    weight[rng.random(shape) < 0.02] *= 30
    weight[..., 1::7, :] *= 1e-4
    weight[..., 3::9, :] = 0
    flat = weight.reshape(-1, *shape[-2:])
    parts = zip(*((to_fp8 if stored == "fp8" else to_int4)(one)[:2] for one in flat), strict=True)
    values, scales = (np.stack(part).reshape(*shape[:-2], *part[0].shape) for part in parts)
    if stored == "fp8":
        return Fp8Matrix(values.view(np.uint8), scales)
    return Int4Matrix(values, scales.view(np.uint16))


def rows_for(rng, m, k):
    x = rng.standard_normal((m, k))
    x[::3] *= 1e3
    x[2::5] = 0
    return x


def product(x, weight, dtype):
    """linear in f32, f64, or the emulated bf16, into NaN."""
    ops = Bf16Ops() if dtype == "bf16" else get_ops("numpy", dtype)
    x = x.astype(ops.dtype)
    out = np.full((len(x), weight.shape[0]), np.nan, ops.dtype)
    ops.linear(x, weight, out)
    return out


@each_case
@pytest.mark.parametrize("m", [0, *ODD_SIZES])
@pytest.mark.parametrize("dtype", [*DTYPES, "bf16"])
def test_linear(stored, n, k, m, dtype):
    rng = np.random.default_rng(m * n + k)
    weight, x = make(rng, stored, n, k), rows_for(rng, m, k)
    given = x.astype(ml_dtypes.bfloat16) if dtype == "bf16" else x.astype(DTYPES[dtype])
    given, values = given.astype(np.float64), dequantised(weight)
    bound = (k + 1) * EPS["f32" if dtype == "bf16" else dtype]
    scale = np.abs(given) @ np.abs(values).T
    got = product(x, weight, dtype)
    assert_close(got, given @ values.T, bound, f"{stored} {m} {n} {k} {dtype}", scale=scale)


@each_stored
def test_scales_multiply_sums_and_not_weights(stored):
    """In f32 the sum over one group is exact here, and rounded once: when its scale multiplies it."""
    rng = np.random.default_rng(4)
    k, most = {"int4": (32, 8000), "fp8": (128, 2)}[stored]  # integers below `most`
    weight, x = make(rng, stored, 50, k), rng.integers(1, most, (1, k)).astype(np.float64)
    exact = (dequantised(weight) * x).sum(axis=1)  # f64 holds it
    got = product(x, weight, "f32")[0]
    np.testing.assert_array_equal(got, exact.astype(np.float32))
    out = np.empty((1, 50), np.float32)
    linear(x.astype(np.float32), dequantised(weight).astype(np.float32), out)
    assert (got != out[0]).any()  # products with dequantised weights are rounded more often


@each_stored
def test_groups_are_summed_in_f32_in_the_order_of_k(stored):
    """2^24 and then ones stay 2^24 in f32; ones first do not, and neither order loses anything in f64."""
    group = {"int4": 32, "fp8": 128}[stored]
    x = np.zeros((2, 9 * group))
    x[:, ::group] = 1
    x[0, 0] = x[1, -group] = 2**24
    if stored == "fp8":
        ones = Fp8Matrix(np.full((1, 9 * group), 0x38, np.uint8), np.ones((1, 9), np.float32))
    else:
        ones = Int4Matrix(np.full((1, 36), -0x66666667, np.int32), np.full((1, 9), 0x3F80, np.uint16))
    assert (dequantised(ones) == 1).all()
    assert (product(x, ones, "f32")[:, 0] - 2**24).tolist() == [0, 8]
    assert (product(x, ones, "f64")[:, 0] - 2**24).tolist() == [8, 8]


@each_stored
def test_bf16_rounds_the_rows_alone(stored):
    rng = np.random.default_rng(5)
    weight, x = make(rng, stored, 65, 128), rows_for(rng, 33, 128)
    rounded = x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
    assert_same_bits(product(x, weight, "bf16"), product(rounded, weight, "f32"), f"{stored} bf16")
    assert (product(x, weight, "bf16") != product(x, weight, "f32")).any()


@pytest.mark.parametrize("case", "abc")
def test_products_of_the_libraries_tensors(case):
    """Against the values that compressed-tensors and transformers dequantise to, in f64."""
    z, rng = arrays_of("quantised.npz"), np.random.default_rng(6)
    weights = {
        "int4": Int4Matrix(z[f"int4_{case}_packed"], z[f"int4_{case}_scale"]),
        "fp8": Fp8Matrix(z[f"fp8_{case}"], z[f"fp8_{case}_scale_inv"]),
    }
    for stored, weight in weights.items():
        values = z[f"{stored}_{case}_values"].astype(np.float64)
        x = rows_for(rng, 7, weight.shape[1])
        scale = np.abs(x) @ np.abs(values).T
        assert_close(product(x, weight, "f64"), x @ values.T, 1e-7, f"{stored} {case}", scale=scale)


@each_stored
@pytest.mark.parametrize("dtype", [*DTYPES, "bf16"])
def test_rows_never_see_each_other(stored, dtype):
    rng = np.random.default_rng(7)
    weight, x = make(rng, stored, 130, 160), rows_for(rng, 65, 160)
    alone = np.concatenate([product(x[row : row + 1], weight, dtype) for row in range(65)])
    for size in ODD_SIZES:
        for rows in (np.arange(size), rng.permutation(65)[:size]):
            assert_same_bits(product(x[rows], weight, dtype), alone[rows], f"{stored} {dtype} {size} rows")


@each_stored
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_in_its_row(stored, dtype):
    rng = np.random.default_rng(8)
    weight, x = make(rng, stored, 5, 160), rows_for(rng, 4, 160)
    want = product(x, weight, dtype)
    x[1, 155], x[2, 0] = np.nan, np.nan
    got = product(x, weight, dtype)
    assert np.isnan(got[1:3]).all()
    assert_same_bits(got[::3], want[::3], f"{stored} beside NaN")


# --- experts --------------------------------------------------------------------------------------------------------


def experts_case(stored, m, seed=9):
    """x, gates [6, M] with two each, and a stack of 6 routed experts and a shared one."""
    rng = np.random.default_rng(seed)
    gates = np.zeros((6, m))
    for row in range(m):
        gates[rng.choice(6, 2, replace=False), row] = rng.random(2) + 0.1
    stacks = [make(rng, stored, 7, *shape) for shape in ((64, 96), (64, 96), (96, 64))]
    return rng.standard_normal((m, 96)), gates, stacks


def run(x, gates, stacks, dtype):
    x, gates = x.astype(dtype), gates.astype(dtype)
    hidden, out = np.full((3 * len(x), 64), np.nan, dtype), np.full(x.shape, np.nan, dtype)
    experts(x, gates, *stacks, hidden, out)
    return out


@each_stored
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 3, 33])
def test_experts_are_those_of_the_exact_values(stored, dtype, m):
    x, gates, stacks = experts_case(stored, m)
    want = run(x, gates, [dequantised(stack) for stack in stacks], np.float64)
    got = run(x, gates, stacks, DTYPES[dtype])
    assert_close(got, want, 300 * EPS[dtype], f"{stored} experts, {m} rows, {dtype}")


@each_stored
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_experts_never_see_each_other(stored, dtype):
    x, gates, stacks = experts_case(stored, 40)
    alone = np.concatenate(
        [run(x[row : row + 1], gates[:, row : row + 1], stacks, DTYPES[dtype]) for row in range(40)]
    )
    order = np.random.default_rng(1).permutation(40)
    for rows in (np.arange(40), order, order[:9]):
        got = run(x[rows], gates[:, rows], stacks, DTYPES[dtype])
        assert_same_bits(got, alone[rows], f"{stored} experts {dtype} {len(rows)} rows")
