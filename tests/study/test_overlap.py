"""Kinship in a tree and the experts that rows share, by hand and by brute force."""

import numpy as np
import pytest
from study.recorded import tree_of
from support import random_tree

from ddtree.study_overlap import RELATIONS, pair_relations, round_routing

# root 0 with children 1 (token 7), 2 (8); 3 (9) and 4 (5) under 1; 5 (9) under 2; 6 (4) under 3
TREE = tree_of([0, 0, 1, 1, 2, 3], [7, 8, 9, 5, 9, 4], [0.5] * 6)
KINSHIP = {
    "parent_child": {(0, 1), (0, 2), (1, 3), (1, 4), (2, 5), (3, 6)},
    "ancestor": {(0, 3), (0, 4), (0, 5), (0, 6), (1, 6)},
    "siblings": {(1, 2), (3, 4)},
    "cousins": {(4, 5)},
    "cousins_same_token": {(3, 5)},
    "unrelated": {(1, 5), (2, 3), (2, 4), (2, 6), (4, 6), (5, 6)},
}


def test_every_pair_is_of_one_kin():
    found = pair_relations(TREE)
    assert (found == found.T).all() and (np.diag(found) == -1).all()
    pairs = {name: set() for name in RELATIONS}
    for i in range(7):
        for j in range(i + 1, 7):
            pairs[RELATIONS[found[i, j]]].add((i, j))
    assert pairs == KINSHIP


def test_one_verify_by_hand():
    """Two layers of four experts, two a row."""
    first = [(0, 1), (0, 1), (0, 2), (0, 1), (0, 1), (0, 2), (0, 1)]
    second = [(0, 1), (2, 3), (0, 1), (2, 3), (0, 1), (2, 3), (0, 1)]
    chosen = np.zeros((2, 7, 4), bool)
    for layer, rows in enumerate((first, second)):
        for row, experts in enumerate(rows):
            chosen[layer, row, list(experts)] = True
    found = round_routing(TREE, chosen)
    assert found.rows == 7 and found.touched.tolist() == [3, 4]
    assert found.load.tolist() == [[7, 5, 2, 0], [4, 4, 3, 3]]
    assert dict(zip(RELATIONS, found.pairs.tolist(), strict=True)) == {k: len(v) for k, v in KINSHIP.items()}
    for layer, rows in enumerate((first, second)):
        for place, name in enumerate(RELATIONS):
            want = sum(len(set(rows[i]) & set(rows[j])) for i, j in KINSHIP[name])
            assert found.shared[layer, place] == want, name


@pytest.mark.parametrize("seed", range(5))
def test_against_brute_force(seed):
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, int(rng.integers(1, 40)), 6, max_depth=7)
    rows = len(tree.parents)
    chosen = np.zeros((3, rows, 16), bool)
    for layer in range(3):
        for row in range(rows):
            chosen[layer, row, rng.choice(16, 4, replace=False)] = True
    relation, found = pair_relations(tree), round_routing(tree, chosen)
    paths = [set(tree.path(row)) for row in range(rows)]
    for i in range(rows):
        for j in range(i + 1, rows):
            kin, name = i in paths[j], RELATIONS[relation[i, j]]
            assert kin == (name in ("parent_child", "ancestor"))
            assert (name == "parent_child") == (tree.parents[j] == i)
            assert (name == "siblings") == (tree.parents[i] == tree.parents[j])
    shared = [
        [len(set(np.flatnonzero(a)) & set(np.flatnonzero(b))) for a in layer for b in layer]
        for layer in chosen
    ]
    want = [sum(one) - rows * 4 for one in shared]  # each pair twice, and each row with itself
    assert (2 * found.shared.sum(axis=1)).tolist() == want
    assert found.pairs.sum() == rows * (rows - 1) // 2
    assert found.touched.tolist() == [len(set(np.nonzero(layer)[1])) for layer in chosen]
