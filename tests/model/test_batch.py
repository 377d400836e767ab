"""Batches: lineage and visibility say the same, and a chain is the tree of one path."""

import numpy as np
import pytest
from compare_arrays import assert_same_bits
from support import ODD_SIZES, random_tree

from ddtree.batch import chain_batch, tree_batch, visible_rows
from ddtree.tree import DraftTree


@pytest.mark.parametrize("rows", ODD_SIZES)
def test_a_chain_is_causal_and_the_tree_of_one_path(rows):
    tokens = np.arange(100, 100 + rows)
    batch = chain_batch(tokens, 9)
    depths = np.arange(rows, dtype=np.int32)
    tree = DraftTree(tokens.astype(np.int32), depths - 1, depths, -depths.astype(np.float64))
    for name in ("token_ids", "depths", "lineage"):
        assert_same_bits(getattr(batch, name), getattr(tree_batch(tree, 9), name), name)
    assert (batch.num_rows, batch.context_len) == (rows, 9)
    assert batch.positions.tolist() == list(range(9, 9 + rows))
    np.testing.assert_array_equal(batch.visible, np.tril(np.ones((rows, rows), bool)))


@pytest.mark.parametrize("nodes", [0, *ODD_SIZES])
def test_visibility_is_walking_up_the_parents(nodes):
    tree = random_tree(np.random.default_rng(nodes), nodes, 500)
    batch = tree_batch(tree, 33)
    want = np.zeros((nodes + 1, nodes + 1), bool)
    for row in range(nodes + 1):
        at = row
        while at >= 0:
            want[row, at] = True
            at = tree.parents[at]
    np.testing.assert_array_equal(batch.visible, want)
    np.testing.assert_array_equal(visible_rows(tree.lineage(tree.max_depth + 7)), want)
    assert batch.positions.tolist() == (33 + want.sum(axis=1) - 1).tolist()
    for row in range(nodes + 1):
        line = batch.lineage[row]
        assert line[: tree.depths[row] + 1].tolist() == tree.path(row)
        assert (line[tree.depths[row] + 1 :] == -1).all()
