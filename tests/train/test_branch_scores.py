"""The NumPy definition of branch-aware scores against sums written out term by term."""

import numpy as np
import pytest

from ddtree.reference.branch_scores import branch_scores

DEPTHS, K, VOCAB, HIDDEN, RANK = 3, 4, 20, 6, 2


@pytest.fixture
def case():
    rng = np.random.default_rng(8)
    ids = np.stack([rng.permutation(VOCAB)[:K] for _ in range(DEPTHS)]).astype(np.int32)
    log_probs = -np.sort(rng.random((DEPTHS, K)) * 3 + 0.5, axis=1).astype(np.float32)
    hidden = rng.normal(size=(DEPTHS, HIDDEN)).astype(np.float32)
    tables = [rng.normal(size=(VOCAB, HIDDEN)).astype(np.float32) for _ in range(2)]
    maps = [rng.normal(size=(RANK, HIDDEN)).astype(np.float32) for _ in range(3)]
    return ids, log_probs, hidden, tables, maps


def scores_of(case):
    ids, log_probs, hidden, tables, maps = case
    out = np.full((DEPTHS, K, K), np.nan, np.float32)
    branch_scores(ids, log_probs, 5, hidden, *tables, *maps, out)
    return out


def test_scores_are_the_sums_of_the_formula(case):
    ids, log_probs, hidden, (embedding, head), (parent, gate, child) = case
    out = scores_of(case)
    for depth in range(DEPTHS):
        for row, p in enumerate([5] if depth == 0 else ids[depth - 1]):
            raw = []
            for column, c in enumerate(ids[depth]):
                s = 0.0
                for r in range(RANK):
                    s += (
                        float(np.dot(parent[r].astype(float), embedding[p]))
                        * (1 + float(np.dot(gate[r].astype(float), hidden[depth])))
                        * float(np.dot(child[r].astype(float), head[c]))
                    )
                raw.append(float(log_probs[depth, column]) + s)
            moved = np.log(np.exp(log_probs[depth].astype(float)).sum()) - np.log(np.exp(raw).sum())
            assert out[depth, row] == pytest.approx(np.array(raw) + moved, rel=1e-5)
    assert (out[0, 1:] == -np.inf).all()


def test_every_parent_leaves_the_candidates_together_what_they_had(case):
    out, log_probs = scores_of(case), case[1]
    for depth in range(DEPTHS):
        for row in out[depth, : 1 if depth == 0 else K]:
            assert np.exp(row).sum() == pytest.approx(np.exp(log_probs[depth]).sum(), rel=1e-6)
    assert not np.allclose(out[1, 0], out[1, 1])


def test_a_head_that_says_nothing_leaves_the_marginal(case):
    case[4][2][:] = 0
    out = scores_of(case)
    assert np.allclose(out[0, 0], case[1][0])
    assert np.allclose(out[1:], case[1][1:, None, :])


def test_a_candidate_without_probability_stays_so(case):
    case[1][1, -1] = -np.inf
    out = scores_of(case)
    assert (out[1, :, -1] == -np.inf).all() and np.isfinite(out[1, :, :-1]).all()
