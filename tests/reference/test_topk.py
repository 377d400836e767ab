"""Top-k: the order is a stable sort's, the log-probabilities are f64's, whatever the row holds."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.errors import ConfigError
from ddtree.reference.topk import argmax, row_is_bad, top_ids, topk_log_softmax

TREES = Path(__file__).parents[1] / "fixtures" / "trees"
with np.load(TREES / "trees.npz") as published:  # large logits are not kept
    CASES = [
        case
        for case in json.loads((TREES / "trees.json").read_text())["cases"]
        if {f"{case['id']}_logits", f"{case['id']}_top_log_probs"} <= set(published.files)
    ]
EPS = np.finfo(np.float32).eps
TIES = st.sampled_from([-np.inf, np.inf, np.nan, -0.0, 0.0, 1.0, -1.0, 1e-42, 3e38, -3e38])


def run(logits, k):
    """Call topk_log_softmax on outputs that hold garbage."""
    token_ids = np.full((len(logits), k), -7, np.int32)
    log_probs = np.full((len(logits), k), np.nan, np.float32)
    topk_log_softmax(logits, k, token_ids, log_probs)
    return token_ids, log_probs


def stable_order(row):
    """Sort ids by (-logit, id), a NaN as -inf, in plain Python."""
    return sorted(range(len(row)), key=lambda i: (np.inf if np.isnan(row[i]) else -row[i], i))


@settings(deadline=None, max_examples=200)
@given(st.lists(TIES, min_size=1, max_size=40), st.data())
def test_order_is_a_stable_sort(row, data):
    row = np.array(row, np.float32)
    k = data.draw(st.integers(0, len(row)))
    assert top_ids(row, k).tolist() == stable_order(row)[:k]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("vocab", [1, 3, 31, 32, 33, 64, 65, 4097])
def test_log_probs_are_the_formula_and_rows_are_independent(vocab, dtype):
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal((5, vocab)) * 8).astype(dtype)
    logits[1] = np.round(logits[1])  # ties across the boundary
    logits[2, 1:] = -np.inf
    logits[3] += 1e4
    k = min(vocab, 17)
    token_ids, log_probs = run(logits, k)
    for row in range(5):
        wide = logits[row].astype(np.float64)
        shifted = wide - wide.max()
        want = shifted[token_ids[row]] - np.log(np.sum(np.exp(shifted)))
        assert token_ids[row].tolist() == stable_order(logits[row])[:k]
        finite = np.isfinite(want)
        np.testing.assert_array_equal(log_probs[row][~finite], want[~finite])
        np.testing.assert_allclose(log_probs[row][finite], want[finite], rtol=EPS, atol=1e-11)
        alone = run(logits[row : row + 1], k)
        assert alone[0][0].tolist() == token_ids[row].tolist()
        assert alone[1][0].tobytes() == log_probs[row].tobytes()
    assert log_probs[2, 0] == 0 and (log_probs[2, 1:] == -np.inf).all()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_published_tables(case):
    with np.load(TREES / "trees.npz") as arrays:
        logits, want_ids, want, log_z = (
            arrays[f"{case['id']}_{key}"] for key in ("logits", "top_token_ids", "top_log_probs", "log_z")
        )
    token_ids, log_probs = run(logits, want.shape[1])
    chosen = np.take_along_axis(logits, want_ids, axis=1).astype(np.float64)
    unique = (logits[:, None, :] == chosen[:, :, None]).sum(
        axis=2
    ) == 1  # the fixture's order of equals is arbitrary
    np.testing.assert_array_equal(token_ids[unique], want_ids[unique])
    finite = np.isfinite(want)
    np.testing.assert_array_equal(log_probs[~finite], want[~finite])
    scale = np.abs(chosen) + np.abs(log_z)[:, None] + 1
    error = np.abs(log_probs[finite].astype(np.float64) - want[finite]) / scale[finite]
    assert error.max() <= 2 * EPS


def test_every_row_without_a_finite_sum_has_nan_log_probs_and_ids_in_range():
    logits = np.zeros((4, 5), np.float32)
    logits[0, 3] = np.nan
    logits[1] = np.nan
    logits[2] = -np.inf
    logits[3, 4] = np.inf
    token_ids, log_probs = run(logits, 5)
    assert token_ids.tolist() == [[0, 1, 2, 4, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [4, 0, 1, 2, 3]]
    assert np.isnan(log_probs).all()


@pytest.mark.parametrize("k", [-1, 6])
def test_k_outside_the_vocabulary_is_refused_before_any_write(k):
    token_ids = np.full((2, max(k, 0)), -7, np.int32)
    with pytest.raises(ConfigError, match=r"wanted 0\.\.5"):
        topk_log_softmax(np.zeros((2, 5), np.float32), k, token_ids, np.zeros(token_ids.shape, np.float32))
    assert (token_ids == -7).all()


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (3, 5)])
def test_nothing_asked_is_legal(shape):
    assert run(np.zeros(shape, np.float32), 0)[0].shape == (shape[0], 0)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(TIES, min_size=7, max_size=7), min_size=1, max_size=6))
def test_argmax_is_the_first_of_the_order_in_every_row(rows):
    logits = np.array(rows, np.float32)
    out = np.full(len(rows), -7, np.int32)
    argmax(logits, out)
    assert out.tolist() == [stable_order(row)[0] for row in logits]


def test_bad_rows_are_told_from_good_ones_wherever_they_stand():
    inf, nan = np.inf, np.nan
    logits = np.array(
        [[0, -inf], [inf, 1], [-inf, -inf], [nan, 1], [inf, -inf], [1, nan], [2, 3]], np.float32
    )
    out = np.zeros(7, bool)
    row_is_bad(logits, out)
    assert out.tolist() == [False, False, True, True, True, True, False]
    empty = np.zeros(2, bool)
    row_is_bad(np.zeros((2, 0), np.float32), empty)
    assert empty.all()


def test_argmax_of_an_empty_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="empty"):
        argmax(np.zeros((2, 0), np.float32), np.zeros(2, np.int32))
    argmax(np.zeros((0, 0), np.float32), np.zeros(0, np.int32))
