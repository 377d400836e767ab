"""Branch scores against sums written out term by term; what each parent leaves its candidates; ties, NaN, infinity."""

import math

import numpy as np
import pytest

from ddtree.reference.branch_scores import branch_scores

DEPTHS, WIDTH, VOCAB, RANK = 3, 5, 20, 4
INF, NAN = math.inf, math.nan


@pytest.fixture
def case():
    """token_ids, log_probs, block, gated, parent_table, child_table; no token stands at two depths."""
    rng = np.random.default_rng(8)
    token_ids = rng.permutation(VOCAB)[: DEPTHS * WIDTH].reshape(DEPTHS, WIDTH).astype(np.int32)
    log_probs = -np.sort(rng.random((DEPTHS, WIDTH)) * 3 + 0.5, axis=1).astype(np.float32)
    block = np.array([(set(range(VOCAB)) - set(token_ids.ravel().tolist())).pop(), 3], np.int32)
    arrays = (rng.normal(size=(rows, RANK)).astype(np.float32) for rows in (DEPTHS, VOCAB, VOCAB))
    return token_ids, log_probs, block, *arrays


def sorted_scores(case):
    """(places, log_probs) of outputs full of garbage."""
    depths, width = case[0].shape
    places = np.full((depths, width, width), -777, np.int32)
    log_probs = np.full((depths, width, width), NAN, np.float32)
    branch_scores(*case, places, log_probs)
    return places, log_probs


def scores(case):
    """The same by candidate: [d, i, j] of candidate j of depth d below candidate i of the depth before."""
    places, log_probs = sorted_scores(case)
    assert (np.sort(places, axis=-1) == np.arange(places.shape[-1])).all()
    out = np.full(log_probs.shape, NAN, np.float32)
    np.put_along_axis(out, places, log_probs, axis=-1)
    return out


def plain(case, depth, parent, candidate):
    """The score s of one pair, in Python floats."""
    token_ids, _, block, gated, parents, children = case
    above = block[0] if depth == 0 else token_ids[depth - 1, parent]
    total = 0.0
    for r in range(gated.shape[1]):
        x = float(parents[above, r]) + float(gated[depth, r])
        total += x / (1 + math.exp(-x)) * float(children[token_ids[depth, candidate], r])
    return total


def test_scores_are_the_sums_of_the_formula(case):
    out, log_probs = scores(case), case[1]
    for depth in range(DEPTHS):
        marginal = [float(value) for value in log_probs[depth]]
        for parent in range(1 if depth == 0 else WIDTH):
            raw = [marginal[j] + plain(case, depth, parent, j) for j in range(WIDTH)]
            moved = math.log(sum(map(math.exp, marginal))) - math.log(sum(map(math.exp, raw)))
            assert out[depth, parent] == pytest.approx([value + moved for value in raw], rel=1e-6)


def test_rows_are_sorted_and_the_root_has_one(case):
    places, log_probs = sorted_scores(case)
    assert (np.diff(log_probs[1:], axis=-1) < 0).all() and (np.diff(log_probs[0, 0]) < 0).all()
    assert (log_probs[0, 1:] == -INF).all() and (places[0, 1:] == np.arange(WIDTH)).all()
    assert not (places[1:] == np.arange(WIDTH)).all()  # the parents do change the order


def test_every_parent_leaves_the_candidates_together_what_they_had(case):
    out, log_probs = scores(case), case[1]
    for depth in range(DEPTHS):
        for row in out[depth, : 1 if depth == 0 else WIDTH]:
            assert np.exp(row.astype(float)).sum() == pytest.approx(
                np.exp(log_probs[depth].astype(float)).sum()
            )
    assert not np.allclose(out[1, 0], out[1, 1])


def test_a_head_that_says_nothing_leaves_the_marginal_in_every_bit(case):
    case[5][:] = 0
    case[1][1] = [
        -1e-9,
        -2e-9,
        -3e-9,
        -4e-9,
        -5e-9,
    ]  # what their logsumexp would swallow, were it added first
    places, log_probs = sorted_scores(case)
    assert log_probs[0, 0].tobytes() == case[1][0].tobytes()
    for depth in range(1, DEPTHS):
        assert all(row.tobytes() == case[1][depth].tobytes() for row in log_probs[depth])
    assert (places == np.arange(WIDTH)).all()


def test_only_the_last_tokens_row_speaks_for_the_root(case):
    before = scores(case)
    case[4][case[2][0]] += 1
    after = scores(case)
    assert not np.allclose(before[0, 0], after[0, 0]) and (before[1:] == after[1:]).all()


def test_equal_values_stand_by_the_lower_candidate(case):
    case[1][:] = -1.0
    case[5][:] = case[5][:1]
    places, log_probs = sorted_scores(case)
    assert (places == np.arange(WIDTH)).all() and np.allclose(log_probs[1:], -1)
    case[5][case[0][1, 3]] = 9 * np.sign(case[4][case[0][0, 2]] + case[3][1])
    places, _ = sorted_scores(case)
    assert places[1, 2].tolist() == [3, 0, 1, 2, 4]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_candidate_without_probability_stays_so(case, bad):
    case[1][1, -1] = bad
    out = scores(case)
    assert (out[1, :, -1] == -INF).all() and np.isfinite(out[1, :, :-1]).all() and np.isfinite(out[2]).all()
    left = np.exp(case[1][1, :-1].astype(float)).sum()
    assert np.exp(out[1].astype(float)).sum(axis=1) == pytest.approx([left] * WIDTH)
    assert (sorted_scores(case)[0][1, :, -1] == WIDTH - 1).all()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_score_that_is_not_finite_loses_its_pair_alone(case, bad):
    case[5][case[0][1, 2], 1] = bad
    out, total = scores(case), np.exp(case[1][1].astype(float)).sum()
    assert (out[1, :, 2] == -INF).all() and np.isfinite(np.delete(out[1], 2, axis=1)).all()
    assert np.exp(out[1].astype(float)).sum(axis=1) == pytest.approx([total] * WIDTH)
    case[4][case[0][1, 2], 1] = bad  # the same token as a parent: all below it
    out = scores(case)
    assert (out[2, 2] == -INF).all() and np.isfinite(np.delete(out[2], 2, axis=0)).all()
    case[3][2, 0] = bad
    assert (scores(case)[2] == -INF).all()


def test_no_finite_marginal_leaves_nothing(case):
    case[1][1] = -INF
    places, log_probs = sorted_scores(case)
    assert (log_probs[1] == -INF).all() and (places[1] == np.arange(WIDTH)).all()
    assert np.isfinite(log_probs[2]).all()


def test_sizes_of_nothing_and_of_one(case):
    token_ids, log_probs, block, gated, *tables = case
    assert scores((token_ids[:0], log_probs[:0], block, gated[:0], *tables)).shape == (0, WIDTH, WIDTH)
    assert scores((token_ids[:, :0], log_probs[:, :0], block, gated, *tables)).shape == (DEPTHS, 0, 0)
    one = scores((token_ids[:, :1], log_probs[:, :1], block, gated, *tables))
    assert one == pytest.approx(log_probs[:, :1, None])  # alone, a candidate keeps what it had
