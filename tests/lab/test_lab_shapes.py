"""Curves out of one tree are those of a tree for every budget; roots hold what really followed."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import branched, trained

from ddtree.config import DecodeConfig
from ddtree.engine import Engine
from ddtree.errors import UsageError
from ddtree.lab_shapes import (
    Root,
    claim_table,
    curve_of,
    curve_table,
    mean_curve,
    roots_of,
    shape_table,
    sibling_text,
    verdict_table,
    walked_rows,
)
from ddtree.prompts import load_prompts
from ddtree.study_budgets import budget_curve, walk
from ddtree.study_cost import drafted_curve
from ddtree.study_draft import SiblingTable, sibling_table
from ddtree.study_published import Claim
from ddtree.study_record import record
from ddtree.study_recordings import Recording
from ddtree.study_replay import replay_rounds
from ddtree.study_rerun import recorded_rounds
from ddtree.study_scale import verdicts
from ddtree.study_summary import Summary

MOST = 24


def test_roots_know_what_a_branch_head_said(tmp_path):
    engine = Engine(branched(), max_budget=1)
    (recording,) = record(engine, load_prompts()[:1], tmp_path, DecodeConfig(max_new_tokens=24), k=MOST)
    roots = roots_of(recording)
    replayed = [this for this in replay_rounds(recording, "branch_aware", MOST, 7) if this.root < len(roots)]
    for this in replayed:
        assert roots[this.root].tree(MOST, 7, "branch_aware").to_json() == this.tree.to_json()
    assert len(replayed) > 1
    plain = replace(roots[0], conditional=None)
    assert plain.tree(MOST, 15).num_nodes == MOST
    with pytest.raises(UsageError, match="a branch head's scores, and there are none"):
        plain.tree(MOST, 15, "branch_aware")


@pytest.fixture(scope="module")
def recordings(tmp_path_factory) -> list[Recording]:
    """Two prompts with roots, 40 tokens each."""
    engine, folder = Engine(trained(), max_budget=1), tmp_path_factory.mktemp("recorded")
    return record(engine, load_prompts()[:2], folder, DecodeConfig(max_new_tokens=40), k=MOST)


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


def test_a_root_is_a_position_with_its_horizon_known(recordings: list[Recording]) -> None:
    for recording in recordings:
        roots, tokens = roots_of(recording), recording.tokens.tolist()
        assert [root.position for root in roots] == list(range(len(tokens) - recording.horizon - 1))
        for at, root in enumerate(roots):
            assert [root.token, *root.continuation.tolist()] == tokens[at:]
            assert len(root.continuation) > root.horizon == recording.horizon
        rounds = [this for this in replay_rounds(recording, "best_first", MOST) if this.root < len(roots)]
        for this in rounds:
            root = roots[this.root]
            tree = root.tree(MOST, root.horizon)
            assert np.array_equal(tree.token_ids, this.tree.token_ids)
            path = tree.token_ids[walked_rows(tree, root.continuation)]
            assert path[1:].tolist() == this.tokens[:-1].tolist()
        assert len(rounds) > 1


def test_a_root_inside_a_repetition_is_told_apart(recordings: list[Recording]) -> None:
    tokens = np.concatenate([np.arange(8), np.full(32, 7)]).astype(np.int32)
    looping = [root.looping for root in roots_of(replace(recordings[0], tokens=tokens))]
    assert looping == replace(recordings[0], tokens=tokens).looping[: len(looping)].tolist()
    assert set(looping) == {True, False}


def test_a_continuation_too_short_has_no_root(recordings: list[Recording], tmp_path) -> None:
    engine, prompt = Engine(trained(), max_budget=1), load_prompts()[:1]
    for tokens, roots in ((16, 0), (17, 1)):
        config = DecodeConfig(max_new_tokens=tokens)
        [short] = record(engine, prompt, tmp_path / str(tokens), config, k=1)
        assert len(roots_of(short)) == roots


def test_the_mean_is_that_of_a_tree_for_every_budget(recordings: list[Recording]) -> None:
    roots = roots_of(recordings[0])
    mine = mean_curve(roots, MOST, 15)
    one_by_one = [budget_curve((r.token_ids, r.log_probs), r.continuation, range(MOST + 1)) for r in roots]
    np.testing.assert_allclose(mine.expected, np.mean([c.expected for c in one_by_one], axis=0), rtol=1e-12)
    np.testing.assert_allclose(mine.actual, np.mean([c.actual for c in one_by_one], axis=0), rtol=1e-12)
    assert (mine.expected[0], mine.actual[0]) == (1, 1)


def test_curves_as_text(recordings: list[Recording]) -> None:
    curves = {"all": mean_curve(roots_of(recordings[0]), MOST, 15)}
    lines = curve_table(curves, (0, 8), {"all": {0: 1.0, 8: 2.345}}).splitlines()
    assert lines[0].split() == ["roots", "budget", "expected", "actual", "ratio", "replayed"]
    assert lines[1].split() == ["all", "0", "1.00", "1.00", "1.00", "1.00"] and len(lines) == 3
    actual = curves["all"].actual[8]
    assert lines[2].split()[3:] == [f"{actual:.2f}", f"{actual / curves['all'].expected[8]:.2f}", "2.35"]


def summary(shape: str, budget: int, acceptance: float, nodes: float) -> Summary:
    ends = acceptance - 0.5, acceptance + 0.5
    return Summary(shape, budget, 7, 0.0, 3, acceptance, *ends, None, nodes)


def test_shapes_as_text() -> None:
    """At 1 ms a row: 2 / 3 against 3 / 6 tokens a millisecond for one shape, 1.5 / 3 against 4 / 7.5 for the other."""
    cost = drafted_curve([1, 10], [1.0, 10.0], 0.0)
    found = [summary("chain", 2, 2.0, 2.0), summary("chain", 8, 3.0, 5.0)]
    found += [summary("beam", 2, 1.5, 2.0), summary("beam", 8, 4.0, 6.5)]
    lines = [line.split() for line in shape_table(found, cost).splitlines()]
    assert lines[0] == ["shape", "2", "8", "fastest", "at", "nodes", "tokens/s"]
    assert lines[1:] == [
        ["chain", "2.00", "3.00", "2", "2.0", "667"],
        ["beam", "1.50", "4.00", "8", "6.5", "533"],
    ]


def test_verdicts_as_text() -> None:
    one = verdicts([summary("chain", 4, 2.0, 3.0)], ["kimi-k2.6"], [8192], sharing=())
    first = next(each for each in one if each.source == "measured layers" and each.experts == "independent")
    second = replace(
        first, experts="counted", budget=8, speedup=0.5, speedup_low=0.4, speedup_high=0.6, pays="no"
    )
    lines = [line.split() for line in verdict_table([first, second]).splitlines()]
    assert lines[0] == ["temp", "shape", "budget", "rows", "tokens", "counted", "independent"]
    said = [f"{first.speedup:.2f}", f"({first.speedup_low:.2f}-{first.speedup_high:.2f})", first.pays]
    assert lines[1] == ["0", "chain", "4", "4.0", "2.00", "-", *said]
    assert lines[2] == ["0", "chain", "8", "4.0", "2.00", "0.50", "(0.40-0.60)", "no", "-"]


def test_claims_as_a_table() -> None:
    one, other = (Claim("a chain stops", "elsewhere: 4", measured, "yes") for measured in ("x 1.1", "x 1.2"))
    lines = claim_table({"greedy": [one, None], "sampled": [other, other]}).splitlines()
    assert lines[0] == "| statement | published | greedy | sampled |"
    assert lines[2:] == [
        "| a chain stops | elsewhere: 4 | x 1.1: **yes** | x 1.2: **yes** |",
        "| a chain stops | elsewhere: 4 | - | x 1.2: **yes** |",
    ]


@pytest.mark.parametrize("ranks", [4, 6])
def test_siblings_as_text(ranks: int, recordings: list[Recording]) -> None:
    hits = np.zeros((3, ranks), int)
    hits[0, :2], hits[1, 0] = (6, 2), 3
    followed, right = hits.copy(), np.zeros_like(hits)
    right[0, 0], right[0, 1], right[1, 0] = 3, 1, 3
    lines = sibling_text(SiblingTable(hits, np.array([2, 3, 0]), followed, right)).splitlines()
    assert lines[1].split() == ["1", "10", "60%", "20%", "0%", "0%", "20%", "50%", "50%"]
    assert lines[2].split() == ["2", "6", "50%", "0%", "0%", "0%", "50%", "100%", "-"]
    assert lines[3].split() == ["all", "16", "56%", "12%", "0%", "0%", "31%", "67%", "50%"]
    rounds = recorded_rounds(recordings, "best_first", MOST)
    assert sibling_text(sibling_table(rounds), 2).count("\n") == 3
