"""Shapes: each keeps the interface's promises, and on a spine-only table they are one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes.alike import alike_below_every_parent

from ddtree.errors import ConfigError
from ddtree.shapes import SHAPES, get_shape

ROOT = 2**31 - 1
NEEDS = {"fixed": "fixed:medusa64"}  # what a name stands for here, where it needs a value


def shape(name, **context):
    """The build function of any shape, with all that it may need."""
    return alike_below_every_parent(get_shape(NEEDS.get(name, name), continuation=[3, 1, 4, 1, 5], **context))


def table(num_depths, width, seed=0):
    """Return random candidates (token_ids, log_probs) in descending order."""
    rng = np.random.default_rng(seed)
    log_probs = -np.sort(rng.exponential(2.0, (num_depths, width))).astype(np.float32)
    token_ids = np.argsort(rng.random((num_depths, max(width, 50))), axis=1)[:, :width].astype(np.int32)
    return token_ids, log_probs


@pytest.mark.parametrize("name", SHAPES)
@settings(deadline=None, max_examples=60)
@given(st.integers(0, 6), st.integers(0, 5), st.integers(0, 40), st.integers(0, 8), st.booleans())
def test_every_shape_gives_a_valid_tree_within_bounds(name, num_depths, width, budget, max_depth, cut):
    token_ids, log_probs = table(num_depths, width)
    if cut:
        log_probs[num_depths // 2 :, width // 2 :] = -np.inf
    tree = shape(name)(token_ids, log_probs, budget, max_depth, root_token=ROOT).validate()
    assert tree.num_nodes <= budget
    assert tree.max_depth <= min(max_depth, num_depths)
    assert tree.token_ids[0] == ROOT
    for row in range(1, tree.num_nodes + 1):
        rank = token_ids[tree.depths[row] - 1].tolist().index(tree.token_ids[row])
        assert np.isfinite(log_probs[tree.depths[row] - 1, rank])


@pytest.mark.parametrize(
    ("budget", "max_depth", "nodes"), [(0, 9, 0), (3, 9, 3), (7, 9, 7), (99, 9, 7), (99, 4, 4)]
)
def test_on_a_spine_only_table_they_are_the_chain(budget, max_depth, nodes):
    token_ids, log_probs = table(7, 1, seed=3)
    trees = [
        shape(name)(token_ids, log_probs, budget, max_depth, root_token=5)
        for name in ("chain", "best_first", "branch_aware", "spine_first", "beam")
    ]
    assert trees[0].num_nodes == nodes
    for tree in trees[1:]:
        assert tree.to_json() == trees[0].to_json()
        assert tree.log_weights.tobytes() == trees[0].log_weights.tobytes()


def test_the_chain_is_the_spine_of_the_tree():
    token_ids, log_probs = table(6, 8, seed=1)
    chain = shape("chain")(token_ids, log_probs, 6, 6, root_token=5)
    assert chain.token_ids.tolist() == [5, *token_ids[:, 0].tolist()]
    assert chain.parents.tolist() == [-1, 0, 1, 2, 3, 4, 5]
    assert chain.log_weights[-1] == sum(log_probs[:, 0].tolist())
    best = shape("best_first")(token_ids, log_probs, 5000, 6, root_token=5)
    assert set(chain.log_weights.tolist()) <= set(best.log_weights.tolist())


@pytest.mark.parametrize("bad", [-np.inf, np.nan])
def test_the_chain_stops_before_what_is_not_finite(bad):
    token_ids, log_probs = table(5, 2)
    log_probs[3] = bad
    assert shape("chain")(token_ids, log_probs, 9, 9, root_token=5).num_nodes == 3


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("budget", "max_depth"), [(-1, 3), (3, -1)])
def test_negative_bounds_are_refused(name, budget, max_depth):
    with pytest.raises(ConfigError, match="negative"):
        shape(name)(*table(3, 2), budget, max_depth, root_token=5)
