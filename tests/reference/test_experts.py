"""The grouped expert product against a dense loop over rows and experts, in f64."""

import numpy as np
import pytest
from compare_arrays import assert_close
from support import DTYPES, EPS, ODD_SIZES

from ddtree.reference.experts import experts

HIDDEN, WIDTH, NUM_EXPERTS = 33, 17, 7


def dense(x, gates, w_gate, w_up, w_down):
    """Every row through every expert, then the weighted sum, f64."""
    x, gates, w_gate, w_up, w_down = (a.astype(np.float64) for a in (x, gates, w_gate, w_up, w_down))
    out = np.zeros(x.shape)
    for row in range(len(x)):
        for expert in range(len(gates)):
            if gates[expert, row]:
                g, u = w_gate[expert] @ x[row], w_up[expert] @ x[row]
                out[row] += gates[expert, row] * (w_down[expert] @ (g * np.exp(-np.logaddexp(0, -g)) * u))
    return out


def make(m, dtype, per_row, seed=0, used=NUM_EXPERTS):
    """Rows, gates with `per_row` of the first `used` experts each, and weights; NaN in the experts no row uses."""
    rng = np.random.default_rng(seed + m)
    x = rng.standard_normal((m, HIDDEN))
    x[1::4] *= 1e2
    gates = np.zeros((NUM_EXPERTS, m))
    for row in range(m):
        gates[rng.choice(used, per_row, replace=False), row] = rng.random(per_row) + 0.1
    weights = [
        rng.standard_normal((NUM_EXPERTS, *shape)) / 5
        for shape in ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    ]
    for weight in weights:
        weight[~gates.any(axis=1)] = np.nan
    return [a.astype(DTYPES[dtype]) for a in (x, gates, *weights)]


def run(x, gates, *weights):
    """Into NaN, with scratch of exactly as many rows as there are pairs."""
    out = np.full(x.shape, np.nan, x.dtype)
    hidden = np.full((np.count_nonzero(gates), WIDTH), np.nan, x.dtype)
    experts(x, gates, *weights, hidden, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_row", [1, 2, NUM_EXPERTS])
@pytest.mark.parametrize("m", ODD_SIZES)
def test_dense_loop(m, per_row, dtype):
    arrays = make(m, dtype, per_row)
    assert_close(run(*arrays), dense(*arrays), 100 * EPS[dtype], f"{m} rows, {per_row} experts each, {dtype}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 3, 33])
def test_experts_behind_the_gates_are_shared(m, dtype):
    """Every row goes to them with gate 1, after the others."""
    x, gates, *weights = make(m, dtype, 2, used=3)
    for weight in weights:
        weight[3:] = np.random.default_rng(m).standard_normal(weight[3:].shape)
    shared = np.concatenate([gates[:3], np.ones((NUM_EXPERTS - 3, m), x.dtype)])
    out, hidden = np.full_like(x, np.nan), np.full((m * (2 + NUM_EXPERTS - 3), WIDTH), np.nan, x.dtype)
    for weight in weights:
        weight[:3][~gates[:3].any(axis=1)] = 0
    experts(x, gates[:3], *weights, hidden, out)
    assert_close(
        out, dense(x, shared, *weights), 100 * EPS[dtype], f"{m} rows, {NUM_EXPERTS - 3} shared, {dtype}"
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_no_row_uses_are_never_read(dtype):
    arrays = make(33, dtype, 2, used=3)
    assert np.isnan(arrays[2][3:]).all()
    assert_close(run(*arrays), dense(*arrays), 100 * EPS[dtype], "4 of 7 experts hold NaN")


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_rows_to_one_expert_and_a_row_to_none(dtype):
    x, gates, *weights = make(9, dtype, 1, used=1)
    gates[0, 4] = 0
    out = run(x, gates, *weights)
    assert (out[4] == 0).all()
    assert_close(out, dense(x, gates, *weights), 100 * EPS[dtype], "one expert")


@pytest.mark.parametrize("dtype", DTYPES)
def test_saturated_activations_without_a_warning(dtype):
    x, gates, *weights = make(31, dtype, 2)
    x *= DTYPES[dtype](1e4)
    assert_close(run(x, gates, *weights), dense(x, gates, *weights), 100 * EPS[dtype], "inputs of 1e6")


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_gates_and_weights_are_left_alone(dtype):
    arrays = make(9, dtype, 2)
    before = [array.tobytes() for array in arrays]
    run(*arrays)
    assert [array.tobytes() for array in arrays] == before


def test_a_negative_gate_counts():
    x, gates, *weights = make(5, "f64", 2)
    gates *= -1
    assert_close(run(x, gates, *weights), dense(x, gates, *weights), 1e-13, "negative gates")


def test_a_swapped_expert_is_noticed():
    x, gates, *weights = make(31, "f64", 2)
    with pytest.raises(AssertionError, match="off by more"):
        assert_close(
            run(x, gates[::-1].copy(), *weights), dense(x, gates, *weights), 1e-10, "experts reversed"
        )
