"""cost_aware against the best fixed budget, at the recorded cost of rounds and at that of a larger model."""

from dataclasses import replace

import numpy as np
import pytest
from study.conftest import CONFIG, TEMPERATURES

from ddtree.errors import UsageError
from ddtree.prompts import load_prompts
from ddtree.study_adaptive import adaptive_gain
from ddtree.study_cost import drafted_curve, measured_cost, speed_of_sizes
from ddtree.study_costing import layers_cost
from ddtree.study_record import record
from ddtree.study_replay import replay_rounds

NEAR = 0.98  # of the best fixed budget's speed


def test_cost_aware_is_within_two_percent_of_the_best_fixed_budget(engine, tmp_path):
    """Every second prompt, 32 tokens each, greedy and sampled; the best budget is chosen afterwards, from 14.

    Measured: 1.023 and 1.017 times the best; over all 64 prompts of 64 tokens 1.033 and 1.005. Where rows are dear it
    is worth more: 1.13 and 1.11 at the cost of a Kimi's layers.
    """
    recordings = record(
        engine, load_prompts()[::2], tmp_path, replace(CONFIG, max_new_tokens=32), TEMPERATURES
    )
    for temperature in TEMPERATURES:
        mine = [each for each in recordings if each.temperature == temperature]
        assert len(mine) == 32
        found = adaptive_gain(mine, measured_cost(0.0))
        assert found.ratio > NEAR and found.low < found.ratio < found.high
        assert found.fixed > found.alone and found.nodes < 20
        for budget in (2, 64):
            assert adaptive_gain(mine, measured_cost(0.0), [budget]).fixed < 0.9 * found.fixed, (
                "told from the best"
            )
        assert adaptive_gain(mine, layers_cost("kimi-k2.6", 8192)).ratio > 1.05


def test_a_gain_by_hand(recorded):
    cost = drafted_curve([1, 65], [1.0, 65.0], draft_ms=1.0)
    mine = recorded.recordings[:3]
    found = adaptive_gain(mine, cost, [2, 4])
    rounds = [r for each in mine for r in replay_rounds(each, "best_first", found.budget)]
    spent = sum(r.tree.num_nodes + 2 for r in rounds)
    assert found.fixed == pytest.approx(1e3 * sum(len(r.tokens) for r in rounds) / spent)
    assert found.alone == 1e3 and found.ratio == found.adaptive / found.fixed
    sized = [
        r.tree.num_nodes
        for each in mine
        for r in replay_rounds(each, "cost_aware", 4, context={"cost": cost})
    ]
    assert found.nodes == pytest.approx(np.mean(sized))
    free = adaptive_gain(mine, drafted_curve([1, 65], [1.0, 1.0 + 1e-9], draft_ms=1.0), [4])
    assert free.nodes > 3 and (free.ratio, free.low, free.high) == pytest.approx((1, 1, 1)), (
        "prompts in pairs"
    )
    for nothing in (([], cost, [4]), (mine, cost, [400])):
        with pytest.raises(UsageError, match="expected recordings, and a cost"):
            adaptive_gain(*nothing)


def test_a_round_is_costed_by_its_own_size():
    """Where the curve bends, half the rounds small and half large cost less than all at the mean."""
    curve = drafted_curve([1, 11, 21], [1.0, 6.0, 7.0], draft_ms=2.0, other_ms=1.0)
    assert curve([1, 11]).tolist() == [1, 9] and curve.drafted([1, 11]).tolist() == [4, 9]
    assert speed_of_sizes([0, 20], 8, curve) == pytest.approx(1e3 * 8 / (4 + 10)), (
        "a draft is paid, used or not"
    )
    assert speed_of_sizes([10, 10], 8, curve) == pytest.approx(1e3 * 8 / 18)
    assert np.isnan(speed_of_sizes([0, 60], 8, curve))
