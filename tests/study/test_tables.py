"""What studies say of recorded rounds, against small cases computed by hand."""

import time

import numpy as np
import pytest
from study.recorded import TABLE, round_of, tree_of
from support import run, trained

from ddtree.config import DecodeConfig
from ddtree.engine import Engine
from ddtree.errors import UsageError
from ddtree.prompts import load_prompts
from ddtree.study_draft import SiblingTable
from ddtree.study_routing import routing_document, routing_layers
from ddtree.study_tables import (
    budget_curve,
    calibration,
    departure,
    expected_acceptance,
    mean_budget_curve,
    seen_rounds,
    sibling_table,
    walk,
    wilson,
)
from ddtree.trace import read_trace, write_trace
from ddtree.tree import DraftTree


def test_expected_acceptance():
    assert expected_acceptance(DraftTree.root_only(3)) == 1
    assert expected_acceptance(tree_of([0, 1, 0], [10, 20, 11], [0.5, 0.3, 0.3])) == pytest.approx(2.1)


def test_continuations_end_with_their_decode():
    rounds = [round_of(0, [1]), round_of(1, [2, 3]), round_of(2, [4]), round_of(0, [5]), round_of(1, [6])]
    assert [this.continuation.tolist() for this in seen_rounds(rounds)] == [[2, 3, 4], [4], [6]]
    assert [this.continuation.tolist() for this in seen_rounds(rounds[1:3])] == [[2, 3, 4], [4]]
    assert seen_rounds([]) == [] == seen_rounds(rounds[:1])


def test_a_record_without_a_field_is_named():
    broken = round_of(1, [2])
    del broken["path"]
    with pytest.raises(UsageError, match="round 1 has no 'path'"):
        seen_rounds([broken])


def test_an_infinity_comes_back():
    """JSON has no infinities: the writer stores null."""
    record = round_of(1, [2])
    record["table"]["log_probs"][1][2] = None
    (this,) = seen_rounds([record])
    assert this.table[1][1, 2] == -np.inf and this.table[1].dtype == np.float32


def test_calibration_counts_nodes_by_hand():
    tree = tree_of([0, 1, 0], [10, 20, 11], [0.5, 0.3, 0.3])
    rounds = [round_of(1, [10, 9], tree, (0, 1)), round_of(1, [11, 9], tree, (0, 3)), round_of(1, [9], tree)]
    bins = calibration(rounds, [0, 0.4, 0.5, 1])
    assert bins.counts.tolist() == [6, 3, 0]  # 0.5 is the upper edge of its bin
    assert bins.predicted[:2] == pytest.approx([0.3, 0.5]) and np.isnan(bins.predicted[2])
    assert bins.observed[:2] == pytest.approx([1 / 6, 1 / 3]) and np.isnan(bins.observed[2])
    assert (bins.low[:2] < bins.observed[:2]).all() and (bins.observed[:2] < bins.high[:2]).all()
    assert calibration(rounds, 2).counts.tolist() == [9, 0]
    with pytest.raises(UsageError, match="none drafted a node"):
        calibration([round_of(1, [9])])


def test_wilson_is_the_published_interval():
    low, high = wilson(np.array([0, 5, 10.0]), np.array([10, 10, 10.0]))
    assert low == pytest.approx([0, 0.2366, 0.7225], abs=1e-4)
    assert high == pytest.approx([0.2775, 0.7634, 1], abs=1e-4)


def test_sibling_table_by_hand():
    rounds = [
        round_of(1, [10, 20, 9]),  # the spine all the way
        round_of(1, [10, 21, 9]),  # a rank-1 miss at depth 2, the last: no child to see
        round_of(1, [11, 20, 9]),  # a rank-1 miss at depth 1, its child right
        round_of(1, [11, 22, 9]),  # the same, its child wrong
        round_of(1, [12, 20, 9]),  # rank 2: beyond the two ranks asked for
        round_of(1, [99, 20, 9]),  # not in the table
        round_of(1, [10]),  # the end of the text: nothing known at depth 2
        round_of(1, [10, 20], table=None),  # no table
    ]
    table = sibling_table(rounds, ranks=2)
    assert table.hits.tolist() == [[3, 2], [1, 1]] and table.beyond.tolist() == [2, 0]
    assert table.followed.tolist() == [[2, 2], [0, 0]] and table.child_right.tolist() == [[1, 1], [0, 0]]
    assert table.reached.tolist() == [7, 2] and table.first_misses == 5
    assert np.isnan(table.share_of_misses()[0]) and table.share_of_misses()[1] == pytest.approx(3 / 5)
    assert table.continuation() == pytest.approx([1 / 2, 1 / 2])
    with pytest.raises(UsageError, match="record the trace with tables"):
        sibling_table(rounds[-1:])


def test_intervals_of_siblings_are_over_decodes():
    """Two decodes: of one all first misses are rank 1, of the other none; a round more in one changes nothing."""
    one = [round_of(1, [11, 20, 9]), round_of(2, [11, 20, 9])]
    other = [round_of(1, [12, 20, 9]), round_of(2, [10, 21, 9]), round_of(3, [99])]
    table = sibling_table([*one, *other], ranks=2)
    assert [each.hits.tolist() for each in table.decodes] == [[[0, 2], [0, 0]], [[1, 0], [0, 1]]]
    assert [each.beyond.tolist() for each in table.decodes] == [[0, 0], [2, 0]]
    low, high = table.interval_of_misses()
    assert table.share_of_misses()[1] == pytest.approx(3 / 5) and np.isnan([low[0], high[0]]).all()
    assert (low[1:].tolist(), high[1:].tolist()) == ([1 / 3, 0], [1, 2 / 3]), "either decode drawn twice"
    low, high = table.interval_of_continuation()
    assert np.isnan([low, high]).all(), "a hit with a child after it: in one decode for each rank"
    low, high = sibling_table([*one, *one, *other], ranks=2).interval_of_continuation()
    assert (low[1], high[1]) == (1, 1) and np.isnan(low[0])
    low, high = sibling_table([*one, round_of(1, [11, 22, 9])], ranks=2).interval_of_children()
    assert (low[0, 1], high[0, 1]) == (0, 1) and low.shape == (2, 2) and np.isnan(low[1]).all()
    assert np.isnan(sibling_table(one).interval_of_misses()).all(), "one decode says nothing of others"
    assert np.isnan(SiblingTable(*(np.zeros((2, 2)),) * 4).interval_of_children()).all()


def test_budget_curve_by_hand():
    # best first: 10 (0.5), 10-20 (0.3) or 11 (0.3), ..; ties by rank: 10-20 has ranks (0, 0), before 11's (1,)
    curve = budget_curve(TABLE, [11, 20, 5], [0, 1, 2, 3, 4])
    assert curve.expected == pytest.approx([1, 1.5, 1.8, 2.1, 2.3], abs=1e-6)
    assert curve.actual.tolist() == [1, 1, 1, 2, 2] and curve.nodes.tolist() == [0, 1, 2, 3, 4]
    assert curve.exact.tolist() == [True, True, True, True, False]  # the fourth is 12 (0.2), the last column
    assert budget_curve(TABLE, [10, 20, 5], [2], "chain").actual.tolist() == [3]
    assert budget_curve(TABLE, [10], [4]).actual.tolist() == [1]  # no more than is known
    with pytest.raises(UsageError, match="shape: expected one of"):
        budget_curve(TABLE, [1], [1], "spiral")
    with pytest.raises(UsageError, match="continuation"):
        budget_curve(TABLE, [], [1])


def test_walk():
    tree = tree_of([0, 1, 0], [10, 20, 11], [0.5, 0.3, 0.3])
    cases = (([10, 20, 7], 3), ([10, 21, 7], 2), ([11, 20, 7], 2), ([7], 1), ([10], 1), ([10, 20], 2))
    assert [walk(tree, tokens) for tokens, _ in cases] == [length for _, length in cases]


def test_departure_prefers_paths_off_the_spine():
    tree = tree_of([0, 1, 0], [10, 20, 11], [0.5, 0.3, 0.3])
    assert departure(tree, [0, 1, 2]) == (0, 3) and departure(tree, [0, 3]) == (1, 2)


def test_a_slider_is_quick():
    rng = np.random.default_rng(0)
    log_probs = -np.sort(rng.exponential(2, (15, 64)).astype(np.float32), axis=1)
    table = np.tile(np.arange(64, dtype=np.int32), (15, 1)), log_probs
    start = time.process_time()
    budget_curve(table, list(range(16)), range(65))
    assert time.process_time() - start < 0.5  # 20 ms on an idle core


@pytest.fixture(scope="module")
def decoded(tmp_path_factory):
    """The rounds of two decodes by the shipped model, budget 16, and the same read from their trace."""
    engine, path = Engine(trained(), max_budget=16), tmp_path_factory.mktemp("study") / "trace.jsonl"
    config, rounds = DecodeConfig("tree", 16, 40), []
    with write_trace(path, engine) as writer:
        for prompt in load_prompts()[:2]:
            ids = engine.bundle.encode(prompt.text)
            mine = run(engine, ids, config)
            writer.run(prompt.id, ids, config, 0)
            for this in mine:
                writer.round(this, with_table=True)
            rounds += mine
    return rounds, [this for each in read_trace(path)[1] for this in each.rounds]


def test_live_rounds_and_their_trace_say_the_same(decoded):
    live, read = decoded
    for mine, theirs in zip(seen_rounds(live), seen_rounds(read), strict=True):
        assert mine.continuation.tolist() == theirs.continuation.tolist()
        assert (mine.table is None) == (theirs.table is None)
        if mine.table is not None:
            assert all(np.array_equal(a, b) for a, b in zip(mine.table, theirs.table, strict=True))
    left, right = (sibling_table(rounds) for rounds in decoded)
    assert np.array_equal(left.hits, right.hits) and np.array_equal(left.child_right, right.child_right)
    assert np.array_equal(calibration(live).counts, calibration(read).counts)


def test_at_its_own_budget_a_table_gives_the_round_again(decoded):
    """The tree, its expected acceptance, and the tokens that the round really committed."""
    checked = 0
    for this in seen_rounds(decoded[0]):
        if this.table is None or len(this.continuation) <= len(this.table[0]):
            continue
        curve = budget_curve(this.table, this.continuation, [16])
        assert curve.actual.tolist() == [len(this.tokens)] and curve.nodes.tolist() == [this.tree.num_nodes]
        assert curve.expected[0] == expected_acceptance(this.tree)
        checked += 1
    assert checked > 5
    curve = mean_budget_curve(decoded[0], [1, 4, 16])
    assert (np.diff(curve.actual) >= 0).all() and (np.diff(curve.expected) > 0).all() and curve.exact.all()


def test_routing_comes_back():
    gates = np.array([[0, 0.5], [1, 0]], np.float32)
    (layer,) = routing_layers(routing_document({3: gates})).items()
    assert layer[0] == 3 and np.array_equal(layer[1], gates)
    with pytest.raises(UsageError, match="expected a document of kind"):
        routing_layers({"kind": "other"})
    with pytest.raises(UsageError, match="equal rows"):
        routing_layers(routing_document({}) | {"layers": [{"layer": 1, "gates": [[1], [1, 2]]}]})
