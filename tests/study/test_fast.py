"""The compiled best-first builder and walk against the plain ones, bit for bit."""

import json
import math

import numpy as np
import pytest
from compare_arrays import assert_same_bits
from hypothesis import given
from hypothesis import strategies as st
from support import FIXTURES, random_tree

from ddtree.errors import ConfigError
from ddtree.shapes import get_shape
from ddtree.study_budgets import walk
from ddtree.study_fast import accepted_length, best_first
from ddtree.tree import DTYPES

plain = get_shape("best_first")
CASES = json.loads((FIXTURES / "trees" / "trees.json").read_text())["cases"]
TIE_HEAVY = st.sampled_from([0.0, -0.25, -0.5, -1.0, -2.0, -math.inf])
WIDE = st.floats(-(2.0**100), 0, width=32)
ODD = st.sampled_from([math.nan, math.inf, -math.inf, 3.0, -0.5, -1e-30])


def assert_same_tree(token_ids, log_probs, budget, max_depth):
    """Both builders give the same DraftTree; returns it."""
    mine = best_first(token_ids, log_probs, budget, max_depth, root_token=5)
    want = plain(token_ids, log_probs, budget, max_depth, root_token=5)
    for name in DTYPES:
        assert_same_bits(getattr(mine, name), getattr(want, name), name)
    return mine


def test_published_trees():
    """All 103 fixtures, at the published budget and cut to a few depths."""
    built = 0
    with np.load(FIXTURES / "trees" / "trees.npz") as arrays:
        for case in CASES:
            names = [f"{case['id']}_top_{part}" for part in ("token_ids", "log_probs")]
            if names[0] in arrays.files:  # a budget of 0 keeps no table
                table = [arrays[name] for name in names]
                for max_depth in (99, 3, 1):
                    built += assert_same_tree(*table, case["budget"], max_depth).num_nodes > 0
    assert built > 250


@given(st.data(), st.sampled_from([TIE_HEAVY, WIDE, ODD]), st.integers(0, 80), st.integers(0, 6))
def test_any_table(data, values, budget, max_depth):
    depth, width = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 5))
    cells = data.draw(st.lists(values, min_size=depth * width, max_size=depth * width))
    log_probs = np.array(cells, np.float32).reshape(depth, width)
    if values is not ODD:
        log_probs = -np.sort(-log_probs, axis=1)
    token_ids = np.arange(depth * width, dtype=np.int32).reshape(depth, width)
    assert_same_tree(token_ids, log_probs, budget, max_depth)


@pytest.mark.parametrize("budget", [1, 63, 64, 512, 4096, 5000])
def test_recorded_tables(recorded, budget):
    """Views of a mapped file as they are, and columns past the budget, which must not be read."""
    for recording in recorded.recordings[:2]:
        for root in (0, 7, 22):
            assert_same_tree(*recording.table(root), budget, 15)
            assert_same_tree(*recording.table(root, budget), budget, 9)


def test_negative_sizes_are_refused():
    table = np.zeros((2, 2), np.int32), np.zeros((2, 2), np.float32)
    for budget, max_depth in ((-1, 3), (3, -1)):
        with pytest.raises(ConfigError, match="negative"):
            best_first(*table, budget, max_depth, root_token=0)


def test_the_walk():
    """Against the plain walk on random trees, along random continuations of a small vocabulary."""
    rng, lengths = np.random.default_rng(3), set()
    for _ in range(300):
        tree = random_tree(rng, int(rng.integers(0, 40)), vocab=3 if rng.random() < 0.2 else 9)
        continuation = rng.integers(0, 9, int(rng.integers(1, 9))).astype(np.int32)
        if rng.random() < 0.7:
            path = tree.path(int(rng.integers(len(tree.parents))))[1:]
            continuation = np.concatenate([tree.token_ids[path], continuation]).astype(np.int32)
        length = accepted_length(tree.parents, tree.token_ids, continuation)
        assert length == walk(tree, continuation)
        lengths.add(length)
    assert len(lengths) > 5
