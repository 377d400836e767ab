"""branch_aware: a child's log-probability is read below its own parent; alike rows make it best_first."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shapes.alike import alike_below_every_parent
from shapes.test_hand_made import nodes
from shapes.test_properties import bounds, tables

from ddtree.errors import ConfigError, UsageError
from ddtree.reference.tree_build import build_branch_tree
from ddtree.shapes import get_shape, is_conditional, table_for
from ddtree.study_budgets import budget_curve

TOKENS = np.array([[10, 11], [20, 21], [30, 31]], np.int32)
# [depth, parent's candidate, candidate]: what follows 11 is 21, and what follows that 31; after 10 nothing is sure.
BELOW = np.array(
    [
        [[-0.5, -1.0], [-np.inf, -np.inf]],
        [[-1.5, -2.0], [-4.0, -0.25]],
        [[-1.0, -1.0], [-3.0, -0.25]],
    ],
    np.float32,
)
FIELDS = ("token_ids", "parents", "depths", "log_weights")
build = get_shape("branch_aware")


@st.composite
def conditionals(draw):
    """token_ids [L, P] and log_probs [L, P, P] in any order, with ties and with candidates that are not finite."""
    depths, width = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = depths, width, width
    steps = rng.integers(0, 4, shape) / 4 if draw(st.booleans()) else rng.exponential(1, shape)
    log_probs = -steps.astype(np.float32)
    if draw(st.booleans()):
        log_probs[rng.random(shape) < 0.3] = rng.choice([-np.inf, np.nan])
    return np.argsort(rng.random((depths, 9)), axis=1)[:, :width].astype(np.int32), log_probs


def test_by_hand():
    """11's child 21 and its child 31 come before anything below 10, though 10 is the likelier first token."""
    tree = build(TOKENS, BELOW, 6, 9, root_token=7).validate()
    assert tree.token_ids.tolist() == [7, 10, 11, 21, 31, 20, 21]
    assert tree.parents.tolist() == [-1, 0, 0, 2, 3, 1, 1]
    assert tree.log_weights.tolist() == [0, -0.5, -1.0, -1.25, -1.5, -2.0, -2.5]
    shallow = build(TOKENS, BELOW, 99, 2, root_token=7)
    assert sorted(shallow.depths.tolist()) == [0, 1, 1, 2, 2, 2, 2]


@given(conditionals(), *bounds)
def test_a_valid_tree_and_the_references(table, budget, max_depth):
    """Which is given what `branch_scores` writes: each parent's candidates in order, and where they stand."""
    token_ids, log_probs = table
    tree = build(*table, budget, max_depth, root_token=3).validate()
    places = np.argsort(-log_probs, axis=-1, kind="stable").astype(np.int32)
    ordered = np.take_along_axis(log_probs, places, axis=-1)
    tokens, parents, depths = np.full((3, budget + 1), 3, np.int32)
    weights, lineage = np.empty(budget + 1), np.empty((budget + 1, len(token_ids) + 1), np.int32)
    outputs = tokens, parents, depths, weights, lineage
    count = 1 + build_branch_tree(token_ids, places, ordered, budget, max_depth, *outputs)
    for name, want in zip(FIELDS, outputs[:4], strict=True):
        assert getattr(tree, name).tobytes() == want[:count].tobytes(), name


@given(tables(), *bounds)
def test_alike_rows_make_it_best_first(table, budget, max_depth):
    mine = alike_below_every_parent(build)(*table, budget, max_depth, root_token=3)
    theirs = get_shape("best_first")(*table, budget, max_depth, root_token=3)
    for name in FIELDS:
        assert getattr(mine, name).tobytes() == getattr(theirs, name).tobytes(), name


def test_alike_rows_by_hand():
    best = nodes(get_shape("best_first"), 6)
    assert nodes(alike_below_every_parent(build), 6) == best and len(best) == 6


def test_a_table_that_knows_no_parents_is_refused():
    assert is_conditional(build) and not is_conditional(get_shape("best_first"))
    plain = TOKENS, BELOW[:, 0]
    with pytest.raises(ConfigError, match=r"expected log_probs \[3, 2, 2\], .* found \[3, 2\]"):
        build(*plain, 4, 4, root_token=7)
    with pytest.raises(UsageError, match="a branch head's scores, and there are none"):
        table_for(build, plain)
    assert table_for(get_shape("best_first"), plain) is plain
    wide = np.zeros((3, 9), np.int32), np.zeros((3, 9), np.float32)
    token_ids, log_probs = table_for(build, wide, BELOW)
    assert token_ids.shape == (3, 2) and log_probs is BELOW


def test_budgets_of_a_table_are_its_trees():
    curve = budget_curve((TOKENS, BELOW), [11, 21, 31, 5], [0, 2, 4], "branch_aware")
    assert curve.actual.tolist() == [1, 2, 4] and curve.nodes.tolist() == [0, 2, 4]
    assert curve.exact.all(), "no wider table would have given another tree"
