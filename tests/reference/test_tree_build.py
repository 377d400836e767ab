"""The best-first builder: 103 published trees bit for bit, and two oracles that share nothing with it."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.errors import ConfigError
from ddtree.reference.tree_build import build_tree

TREES = Path(__file__).parents[1] / "fixtures" / "trees"
CASES = json.loads((TREES / "trees.json").read_text())["cases"]
TIE_HEAVY = st.sampled_from([0.0, -0.25, -0.5, -1.0, -2.0, -math.inf])
WIDE = st.floats(-(2.0**100), 0, width=32)


def build(log_probs, budget, max_depth=99, token_ids=None):
    """Build into outputs full of garbage; return (num_nodes, the five outputs by name)."""
    log_probs = np.array(log_probs, np.float32)
    if token_ids is None:
        token_ids = np.arange(log_probs.size, dtype=np.int32).reshape(log_probs.shape)
    out = {name: np.full(budget + 1, -777, np.int32) for name in ("token_ids", "parents", "depths")}
    out["log_weights"] = np.full(budget + 1, np.nan)
    out["lineage"] = np.full((budget + 1, len(log_probs) + 1), -777, np.int32)
    return build_tree(token_ids, log_probs, budget, max_depth, *out.values()), out


def rank_paths(num_nodes, out, width):
    """Recover each node's ranks along its path; token ids number the table's cells."""
    return [
        tuple(out["token_ids"][row[1:][row[1:] >= 0]] % width) for row in out["lineage"][1 : num_nodes + 1]
    ]


def tables(values, max_depth=4, max_width=3):
    """Draw descending tables [L, K]."""
    shapes = st.tuples(st.integers(1, max_depth), st.integers(1, max_width))
    return shapes.flatmap(
        lambda shape: st.lists(
            st.lists(values, min_size=shape[1], max_size=shape[1]).map(lambda row: sorted(row, reverse=True)),
            min_size=shape[0],
            max_size=shape[0],
        )
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_published_trees_bit_for_bit(case):
    with np.load(TREES / "trees.npz") as arrays:
        want = {key[5:]: arrays[key] for key in arrays.files if key.startswith(case["id"])}
    if "top_log_probs" not in want:  # a budget of 0 keeps no table
        want["top_log_probs"] = np.zeros((case["depth"], 0), np.float32)
        want["top_token_ids"] = np.zeros((case["depth"], 0), np.int32)
        want["logw"] = np.zeros(0)
    expected = case.get("stats", {}).get("finite_prefix", 0)
    num_nodes, out = build(want["top_log_probs"], case["budget"], token_ids=want["top_token_ids"])
    used = slice(1, num_nodes + 1)
    assert num_nodes == expected
    assert out["token_ids"][used].tolist() == want["tokens"][:expected].tolist()
    assert out["depths"][used].tolist() == want["depths"][:expected].tolist()
    assert out["parents"][: num_nodes + 1].tolist() == want["parents"][: expected + 1].tolist()
    assert out["log_weights"][used].tobytes() == want["logw"][:expected].tobytes()
    rows = len(want["tokens"]) + 1
    visible = np.unpackbits(want["visibility_bits"], count=rows * rows).reshape(rows, rows)
    for row, ancestors in enumerate(out["lineage"][: num_nodes + 1]):
        assert ancestors[ancestors >= 0].tolist() == np.flatnonzero(visible[row]).tolist()


@settings(deadline=None, max_examples=200)
@given(tables(TIE_HEAVY), st.integers(0, 130), st.integers(0, 5))
def test_the_tree_is_the_first_of_all_prefixes(table, budget, max_depth):
    width = len(table[0])
    prefixes = []
    for depth in range(1, min(len(table), max_depth) + 1):
        for ranks in itertools.product(range(width), repeat=depth):
            total = sum(row[rank] for row, rank in zip(table, ranks, strict=False))  # quarters: exact
            if math.isfinite(total):
                prefixes.append((-total, ranks))
    want = sorted(prefixes)[:budget]
    num_nodes, out = build(table, budget, max_depth)
    assert rank_paths(num_nodes, out, width) == [ranks for _, ranks in want]
    assert out["log_weights"][1 : num_nodes + 1].tolist() == [-negated for negated, _ in want]


@settings(deadline=None, max_examples=100)
@given(tables(WIDE), st.integers(0, 40))
def test_rounded_sums_follow_the_published_order(table, budget):
    """A plain scan of a plain list of candidates, sums in the published order, for sums that round."""
    width, taken = len(table[0]), []
    candidates = [(table[0][0], (0,))]
    while candidates and len(taken) < budget:
        best = min(candidates, key=lambda candidate: (-candidate[0], candidate[1]))
        candidates.remove(best)
        taken.append(best)
        total, ranks = best
        level = table[len(ranks) - 1]
        if ranks[-1] + 1 < width:
            candidates.append((total - level[ranks[-1]] + level[ranks[-1] + 1], (*ranks[:-1], ranks[-1] + 1)))
        if len(ranks) < len(table):
            candidates.append((total + table[len(ranks)][0], (*ranks, 0)))
    num_nodes, out = build(table, budget)
    assert rank_paths(num_nodes, out, width) == [ranks for _, ranks in taken]
    assert out["log_weights"][1 : num_nodes + 1].tolist() == [total for total, _ in taken]


def test_a_sibling_subtracts_before_it_adds():
    big = 2.0**53  # big + 1 rounds to big, so the published sum is not the direct one
    num_nodes, out = build([[-big, -2 * big], [-1, -2]], 3)
    assert (num_nodes, out["log_weights"].tolist()) == (3, [0.0, -big, -big, -big])
    assert out["parents"].tolist() == [-1, 0, 1, 1]


def test_sums_are_wider_than_f32():
    _, out = build([[-(2.0**24), -(2.0**25)], [-1, -2]], 3)
    assert out["log_weights"].tolist() == [0, -(2.0**24), -(2.0**24) - 1, -(2.0**24) - 2]


@pytest.mark.parametrize("budget", [0, 1, 5, 14, 15, 100])
def test_what_cannot_be_reached_leaves_defined_rows(budget):
    num_nodes, out = build([[-1, -1]] * 3, budget)  # 14 prefixes in all
    assert num_nodes == min(budget, 14)
    tail = slice(num_nodes + 1, None)
    for name, value in (
        ("token_ids", 0),
        ("parents", -1),
        ("depths", 0),
        ("log_weights", 0),
        ("lineage", -1),
    ):
        assert (out[name][tail] == value).all()
    assert out["token_ids"][0] == -777  # the caller's
    assert (out["parents"][0], out["depths"][0], out["log_weights"][0]) == (-1, 0, 0)
    assert out["lineage"][0].tolist() == [0, -1, -1, -1]


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_no_candidates_give_the_root_alone(shape):
    num_nodes, out = build(np.zeros(shape), 4)
    assert num_nodes == 0 and out["parents"].tolist() == [-1] * 5


@pytest.mark.parametrize("max_depth", [0, 1, 2, 3, 9])
def test_max_depth_bounds_the_depth(max_depth):
    num_nodes, out = build([[-1, -2]] * 3, 50, max_depth)
    assert out["depths"].max() == min(max_depth, 3)
    assert num_nodes == (0, 2, 6, 14)[min(max_depth, 3)]


@pytest.mark.parametrize("bad", [-math.inf, math.nan, math.inf])
def test_a_row_that_is_not_finite_ends_the_tree_there(bad):
    num_nodes, out = build([[-1, -2], [bad, bad], [-1, -1]], 50)
    assert num_nodes == 2 and out["depths"].max() == 1
    num_nodes, out = build([[-1, bad], [-1, bad]], 50)
    assert out["parents"][: num_nodes + 1].tolist() == [-1, 0, 1]


def test_negative_sizes_are_refused():
    token_ids, log_probs = np.zeros((2, 2), np.int32), np.zeros((2, 2), np.float32)
    for budget, max_depth in ((-1, 3), (3, -1)):
        with pytest.raises(ConfigError, match="negative"):
            build_tree(token_ids, log_probs, budget, max_depth, *[None] * 5)
