"""RMSNorm, alone and after an add, SwiGLU, sum, column copy against f64: outliers, zeros, in place, no warnings."""

import math

import numpy as np
import pytest
from compare_arrays import assert_close, assert_same_bits
from support import DTYPES, EPS, ODD_SIZES

from ddtree.reference.pointwise import add, add_norm, copy_columns, rms_norm, swiglu

each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def norm_oracle(x, weight, eps):
    """RMSNorm of each row in plain Python floats."""
    rows = []
    for row in x.reshape(-1, x.shape[-1]).astype(np.float64):
        mean_square = math.fsum(value * value for value in row) / len(row)
        rows.append(
            [float(w) * value / math.sqrt(mean_square + eps) for value, w in zip(row, weight, strict=True)]
        )
    return np.array(rows).reshape(x.shape)


@each_dtype
@pytest.mark.parametrize("width", [*ODD_SIZES, 1000])
@pytest.mark.parametrize("eps", [1e-6, 1e-5])
def test_rms_norm(width, eps, dtype):
    rng = np.random.default_rng(width)
    x = rng.standard_normal((9, width)).astype(DTYPES[dtype])
    x[1, width // 2] = 1e4
    x[2] *= 1e4
    x[3] *= 1e-4  # eps weighs as much as the row
    x[4] = 0
    x[5], x[6] = -7, 1e-15
    weight = rng.standard_normal(width).astype(DTYPES[dtype])
    out = np.full(x.shape, np.nan, DTYPES[dtype])
    rms_norm(x, weight, eps, out)
    want = norm_oracle(x, weight, eps)
    assert (out[4] == 0).all()
    assert_close(
        out, want, (4 + math.log2(width)) * EPS[dtype], f"rms_norm {width} {dtype}", elementwise=True
    )
    rms_norm(x, weight, eps, x)
    assert_same_bits(x, out, "in place")


@each_dtype
def test_rms_norm_by_head_and_into_a_cache_slice(dtype):
    rng = np.random.default_rng(1)
    x, weight = (
        rng.standard_normal((5, 3, 33)).astype(DTYPES[dtype]),
        rng.standard_normal(33).astype(DTYPES[dtype]),
    )
    out = np.full((9, 3, 40), np.nan, DTYPES[dtype])
    rms_norm(x, weight, 1e-6, out[2:7, :, :33])
    assert_close(out[2:7, :, :33], norm_oracle(x, weight, 1e-6), 10 * EPS[dtype], "by head", elementwise=True)
    assert np.isnan(out[:2]).all() and np.isnan(out[7:]).all() and np.isnan(out[:, :, 33:]).all()


@each_dtype
def test_rms_norm_of_a_row_with_nan_or_inf_is_nan_there_alone(dtype):
    x = np.ones((3, 4), DTYPES[dtype])
    x[1, 2] = np.nan
    out = np.zeros_like(x)
    rms_norm(x, np.ones(4, DTYPES[dtype]), 1e-6, out)
    assert np.isnan(out).tolist() == [[False] * 4, [True] * 4, [False] * 4]


@each_dtype
def test_swiglu_at_every_size_of_gate_without_a_warning(dtype):
    magnitudes = np.array([0, 1e-30, 1e-4, 0.5, 1, 10, 80, 87, 88, 89, 103, 700, 710, 1e4])
    gate = np.concatenate([-magnitudes, magnitudes]).astype(DTYPES[dtype])
    up = np.array([-3, -1e4, 0, 1, 1e4], DTYPES[dtype])
    gate, up = (np.ascontiguousarray(a) for a in np.broadcast_arrays(gate[:, None], up[None, :]))
    out = np.full(gate.shape, np.nan, DTYPES[dtype])
    swiglu(gate, up, out)
    wide = gate.astype(np.float64)
    sigmoid = np.exp(-np.logaddexp(0, -wide))
    want = wide * sigmoid * up.astype(np.float64)
    tiny = float(np.finfo(DTYPES[dtype]).tiny)  # what exp cannot hold may round to 0
    scale = np.abs(want) + tiny / EPS[dtype] * np.abs(wide * up)
    assert_close(out, want, 6 * EPS[dtype], f"swiglu {dtype}", scale=scale)
    inside = np.abs(wide) <= 80
    assert_close(out[inside], want[inside], 6 * EPS[dtype], f"swiglu {dtype}, |gate| <= 80", elementwise=True)
    swiglu(gate, up, gate)
    assert_same_bits(gate, out, "in place")


@each_dtype
def test_swiglu_is_not_gate_times_up_swapped(dtype):
    gate, up = np.array([2.0], DTYPES[dtype]), np.array([-3.0], DTYPES[dtype])
    out = np.empty(1, DTYPES[dtype])
    swiglu(gate, up, out)
    assert_close(out, np.array([-3 * 2 / (1 + math.exp(-2))]), 4 * EPS[dtype], "silu is of the gate")


@each_dtype
@pytest.mark.parametrize("width", ODD_SIZES)
def test_add_norm_adds_once_and_norms_the_sum(width, dtype):
    rng = np.random.default_rng(width)
    x, y, weight = (
        rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in ((3, width), (3, width), width)
    )
    x[1] *= 1e4
    total = (x.astype(np.longdouble) + y.astype(np.longdouble)).astype(DTYPES[dtype])
    want = np.empty_like(x)
    rms_norm(total, weight, 1e-6, want)
    add_norm(x, y, weight, 1e-6, y)
    assert_same_bits(x, total, "the residual")
    assert_same_bits(y, want, "the norm, in the branch's place")


@each_dtype
def test_add_rounds_the_sum_once_in_either_place(dtype):
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((3, 33)).astype(DTYPES[dtype]) for _ in range(2))
    total = (x.astype(np.longdouble) + y.astype(np.longdouble)).astype(DTYPES[dtype])
    for place in range(3):
        arrays = [x.copy(), y.copy(), np.full_like(x, np.nan)]
        add(arrays[0], arrays[1], arrays[place])
        assert_same_bits(arrays[place], total, f"in place of argument {place}")


@each_dtype
def test_copy_columns_leaves_the_rest(dtype):
    rng = np.random.default_rng(0)
    out = np.full((4, 12), np.nan, DTYPES[dtype])
    parts = [rng.standard_normal((4, 3)).astype(DTYPES[dtype]) for _ in range(2)]
    copy_columns(parts[1], 9, out)
    copy_columns(parts[0], 3, out)
    assert_same_bits(out[:, 9:], parts[1], "last columns")
    assert_same_bits(out[:, 3:6], parts[0], "middle columns")
    assert np.isnan(out[:, :3]).all() and np.isnan(out[:, 6:9]).all()
