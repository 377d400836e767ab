"""The branch-aware builder against two oracles that share nothing with it, and build_tree where rows are alike."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.errors import ConfigError
from ddtree.reference.tree_build import build_branch_tree, build_tree, candidates_of, take_best

TIE_HEAVY = st.sampled_from([0.0, -0.25, -0.5, -1.0, -2.0, -math.inf])
WIDE = st.floats(-(2.0**100), 0, width=32)


def outputs(budget, depths):
    """A tree's five outputs by name, full of garbage."""
    out = {name: np.full(budget + 1, -777, np.int32) for name in ("token_ids", "parents", "depths")}
    out["log_weights"] = np.full(budget + 1, np.nan)
    out["lineage"] = np.full((budget + 1, depths + 1), -777, np.int32)
    return out


def build(table, places, budget, max_depth=99):
    """(num_nodes, outputs); token ids number the candidates: depth x width + candidate."""
    table = np.array(table, np.float32)
    depths, width = table.shape[:2]
    token_ids = np.arange(depths * width, dtype=np.int32).reshape(depths, width)
    out = outputs(budget, depths)
    return build_branch_tree(token_ids, places, table, budget, max_depth, *out.values()), out


@st.composite
def cases(draw, values, most_depths=4, most_width=3):
    """A table [L, P, P] of descending rows, and permutations i32 of the candidates."""
    depths, width = draw(st.integers(1, most_depths)), draw(st.integers(1, most_width))
    row = st.lists(values, min_size=width, max_size=width).map(lambda row: sorted(row, reverse=True))
    rows = draw(st.lists(row, min_size=depths * width, max_size=depths * width))
    order = st.permutations(range(width))
    places = draw(st.lists(order, min_size=depths * width, max_size=depths * width))
    shape = depths, width, width
    return np.array(rows, np.float32).reshape(shape), np.array(places, np.int32).reshape(shape)


def walk(table, places, ranks):
    """(log-probability of each step, candidates) along a path of ranks from the root."""
    above, steps, candidates = 0, [], []
    for depth, rank in enumerate(ranks):
        steps.append(float(table[depth, above, rank]))
        above = int(places[depth, above, rank])
        candidates.append(above)
    return steps, candidates


@settings(deadline=None, max_examples=200)
@given(cases(TIE_HEAVY), st.integers(0, 130), st.integers(0, 5))
def test_the_tree_is_the_first_of_all_paths(case, budget, max_depth):
    """All paths, by descending sum and then by their ranks: quarters, so sums are exact in any order."""
    table, places = case
    depths, width = table.shape[:2]
    paths = []
    for depth in range(1, min(depths, max_depth) + 1):
        for ranks in itertools.product(range(width), repeat=depth):
            steps, candidates = walk(table, places, ranks)
            if math.isfinite(sum(steps)):
                paths.append((-sum(steps), ranks, candidates))
    want = sorted(paths)[:budget]
    num_nodes, out = build(table, places, budget, max_depth)
    assert num_nodes == len(want)
    for row, (negated, ranks, candidates) in enumerate(want, 1):
        ancestors = out["lineage"][row, 1 : len(ranks) + 1]
        tokens = [depth * width + candidate for depth, candidate in enumerate(candidates)]
        assert out["token_ids"][ancestors].tolist() == tokens
        assert out["depths"][row] == len(ranks) and out["parents"][row] == out["lineage"][row, len(ranks) - 1]
        assert ancestors[-1] == row and out["lineage"][row, 0] == 0
        assert out["log_weights"][row] == -negated
    assert (out["parents"][num_nodes + 1 :] == -1).all() and (out["lineage"][num_nodes + 1 :] == -1).all()
    assert (out["token_ids"][num_nodes + 1 :] == 0).all() and out["token_ids"][0] == -777


@settings(deadline=None, max_examples=100)
@given(cases(WIDE), st.integers(0, 40))
def test_rounded_sums_follow_the_published_order(case, budget):
    """A plain scan of a plain list of candidates, sums in the published order, for sums that round."""
    table, places = case
    depths, width = table.shape[:2]
    candidates, taken = [(float(table[0, 0, 0]), (0,))], []
    while candidates and len(taken) < budget:
        best = min(candidates, key=lambda candidate: (-candidate[0], candidate[1]))
        candidates.remove(best)
        taken.append(best)
        total, ranks = best
        _, along = walk(table, places, ranks)
        row = table[len(ranks) - 1, along[-2] if len(ranks) > 1 else 0].astype(float)
        if ranks[-1] + 1 < width:
            candidates.append((total - row[ranks[-1]] + row[ranks[-1] + 1], (*ranks[:-1], ranks[-1] + 1)))
        if len(ranks) < depths:
            candidates.append((total + float(table[len(ranks), along[-1], 0]), (*ranks, 0)))
    num_nodes, out = build(table, places, budget)
    assert out["log_weights"][1 : num_nodes + 1].tolist() == [total for total, _ in taken]
    tokens = [(len(ranks) - 1) * width + walk(table, places, ranks)[1][-1] for _, ranks in taken]
    assert out["token_ids"][1 : num_nodes + 1].tolist() == tokens


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 1 << 20), st.integers(0, 64), st.integers(0, 7), st.sampled_from([1, 3, 16]))
def test_rows_alike_give_build_tree_bit_for_bit(seed, budget, max_depth, width):
    rng = np.random.default_rng(seed)
    row = -np.sort(rng.exponential(2, (6, width)), axis=1).astype(np.float32)
    row[:, width // 2 :] = np.where(rng.random((6, 1)) < 0.2, -np.inf, row[:, width // 2 :])
    token_ids = rng.integers(0, 1000, (6, width)).astype(np.int32)
    places = np.broadcast_to(np.arange(width, dtype=np.int32), (6, width, width))
    got, want = outputs(budget, 6), outputs(budget, 6)
    table = np.repeat(row[:, None], width, axis=1)
    count = build_branch_tree(token_ids, places, table, budget, max_depth, *got.values())
    assert count == build_tree(token_ids, row, budget, max_depth, *want.values())
    for name, array in want.items():
        assert got[name].tobytes() == array.tobytes(), name


def test_a_child_is_read_below_its_own_parent():
    """After candidate 1 its own row counts; the marginal's best child stands nowhere."""
    table = np.log(np.array([[[0.6, 0.4], [1, 1]], [[0.55, 0.45], [0.95, 0.05]]]))
    places = np.array([[[0, 1], [0, 1]], [[1, 0], [0, 1]]], np.int32)
    num_nodes, out = build(table, places, 4)
    assert num_nodes == 4
    assert out["token_ids"][1:].tolist() == [0, 1, 2, 3]  # 0.6, 0.4, 0.38 below 1, 0.33 below 0
    assert out["parents"][1:].tolist() == [0, 0, 2, 1]
    paths, parents, _ = take_best(table.tolist(), 4, places=places.tolist())
    assert candidates_of(paths, parents, places.tolist()) == [0, 1, 0, 1]


def test_a_parent_without_children_ends_its_branch_alone():
    none = -math.inf
    table = [[[-1, -2], [none, none]], [[none, none], [-1, -3]]]
    num_nodes, out = build(table, np.array([[[0, 1]] * 2] * 2, np.int32), 9)
    assert num_nodes == 4 and out["parents"][1:5].tolist() == [0, 0, 2, 2]


@pytest.mark.parametrize("shape", [(0, 3, 3), (3, 0, 0), (0, 0, 0)])
def test_no_candidates_give_the_root_alone(shape):
    num_nodes, out = build(np.zeros(shape), np.zeros(shape, np.int32), 4)
    assert num_nodes == 0 and out["parents"].tolist() == [-1] * 5


def test_negative_sizes_are_refused():
    table = np.zeros((2, 2), np.int32), np.zeros((2, 2, 2), np.int32), np.zeros((2, 2, 2), np.float32)
    for budget, max_depth in ((-1, 3), (3, -1)):
        with pytest.raises(ConfigError, match=r"build_branch_tree: .*negative"):
            build_branch_tree(*table, budget, max_depth, *[None] * 5)
