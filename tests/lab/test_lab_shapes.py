"""Curves out of one tree are those of a tree for every budget; recorded roots hold what really followed."""

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import trained

from ddtree.config import DecodeConfig
from ddtree.engine import Engine
from ddtree.lab_shapes import (
    Recording,
    Root,
    curve_of,
    curve_table,
    mean_curve,
    record,
    sibling_text,
    walked_rows,
)
from ddtree.prompts import load_prompts
from ddtree.study_budgets import budget_curve, mean_budget_curve, walk
from ddtree.study_draft import SiblingTable, sibling_table

MOST = 24


@functools.cache
def recording() -> Recording:
    engine, prompts = Engine(trained(), max_budget=MOST), load_prompts()[:3]
    return record(engine, prompts, DecodeConfig(budget=MOST, max_new_tokens=40))


@st.composite
def roots(draw) -> Root:
    """A root of up to 4 depths and 4 ranks, with ties, whose continuation often lies in its table."""
    depths, width = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    rows = draw(st.lists(st.permutations(range(6)), min_size=depths, max_size=depths))
    token_ids = np.array(rows, np.int32)[:, :width]
    values = st.lists(st.sampled_from([-0.25, -0.5, -1.0, -3.0]), min_size=width, max_size=width)
    log_probs = np.array([sorted(draw(values), reverse=True) for _ in range(depths)], np.float32)
    continuation = np.array(draw(st.lists(st.integers(0, 5), min_size=depths + 1, max_size=depths + 1)))
    return Root(1, 0, token_ids, log_probs, continuation, False)


@given(roots(), st.integers(1, 4), st.integers(0, 12))
def test_one_tree_gives_the_curve_of_every_budget(root: Root, depth: int, budget: int) -> None:
    depth = min(depth, root.horizon)
    tree = root.tree(budget, depth)
    curve = curve_of(tree, walked_rows(tree, root.continuation), budget)
    table = root.token_ids[:depth], root.log_probs[:depth]
    want = budget_curve(table, root.continuation, range(budget + 1))
    np.testing.assert_allclose(curve.expected, want.expected, rtol=1e-12)
    assert curve.actual.tolist() == want.actual.tolist()
    assert len(walked_rows(tree, root.continuation)) == walk(tree, root.continuation)


@given(roots(), st.integers(1, 4), st.integers(0, 12))
def test_a_root_grows_any_shape(root: Root, depth: int, budget: int) -> None:
    depth = min(depth, root.horizon)
    most = walk(root.tree(budget, depth, "oracle"), root.continuation)
    for shape in ("spine_first", "beam:2", "fixed:medusa64", "cost_aware"):
        assert walk(root.tree(budget, depth, shape).validate(), root.continuation) <= most


def test_a_recording_is_what_was_decoded() -> None:
    found = recording()
    assert list(found.rounds) == [prompt.id for prompt in load_prompts()[:3]]
    assert all(len(tokens) == 40 for tokens in found.tokens().values())
    assert 0 <= found.loop_share <= 1 and len(found.all_rounds) > len(found.all_roots) > 0
    for name, mine in found.roots.items():
        for root in mine:
            this = found.rounds[name][root.index]
            at = sum(len(earlier.tokens) for earlier in found.rounds[name][: root.index])
            assert root.continuation.tolist() == found.tokens()[name][at:]
            assert root.token == found.tokens()[name][at - 1] and len(root.continuation) > root.horizon
            tree = root.tree(MOST, root.horizon)
            assert np.array_equal(tree.token_ids, this.tree.token_ids)
            assert walked_rows(tree, root.continuation) == this.path.tolist()


def test_the_mean_is_the_study_s() -> None:
    found = recording()
    mine = mean_curve(found.all_roots, MOST, found.all_roots[0].horizon)
    study = mean_budget_curve(found.all_rounds, range(1, MOST + 1))
    np.testing.assert_allclose(mine.expected[1:], study.expected, rtol=1e-12)
    np.testing.assert_allclose(mine.actual[1:], study.actual, rtol=1e-12)
    assert (mine.expected[0], mine.actual[0]) == (1, 1)


def test_a_decode_too_short_leaves_rounds_and_no_root() -> None:
    engine = Engine(trained(), max_budget=4)
    found = record(engine, load_prompts()[:1], DecodeConfig(budget=4, max_new_tokens=4))
    assert found.all_rounds and found.all_roots == [] and found.roots == {}


def test_curves_as_text() -> None:
    lines = curve_table({"all": mean_curve(recording().all_roots, MOST, 15)}, (0, 8)).splitlines()
    assert lines[0].split() == ["roots", "budget", "expected", "actual", "ratio"]
    assert lines[1].split() == ["all", "0", "1.00", "1.00", "1.00"] and len(lines) == 3


@pytest.mark.parametrize("ranks", [4, 6])
def test_siblings_as_text(ranks: int) -> None:
    hits = np.zeros((3, ranks), int)
    hits[0, :2], hits[1, 0] = (6, 2), 3
    followed, right = hits.copy(), np.zeros_like(hits)
    right[0, 0], right[0, 1], right[1, 0] = 3, 1, 3
    lines = sibling_text(SiblingTable(hits, np.array([2, 3, 0]), followed, right)).splitlines()
    assert lines[1].split() == ["1", "10", "60%", "20%", "0%", "0%", "20%", "50%", "50%"]
    assert lines[2].split() == ["2", "6", "50%", "0%", "0%", "0%", "50%", "100%", "-"]
    assert lines[3].split() == ["all", "16", "56%", "12%", "0%", "0%", "31%", "67%", "50%"]
    assert sibling_text(sibling_table(recording().all_rounds), 2).count("\n") == 3
