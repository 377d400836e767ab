"""Bootstraps over prompts: sums, shares and the best budget, by hand and as often right as they say."""

from dataclasses import replace

import numpy as np
import pytest

from ddtree.study_cost import cost_curve
from ddtree.study_summary import DRAWS, drawn_sums, peak_of, share_interval, summarise

STAGES = dict.fromkeys(("draft", "build", "verify", "accept", "compact"), 0.0)


def cost(one, many, most=65.0):
    """Milliseconds of a round of 1 and of `most` rows, a line between."""
    return cost_curve([(n, STAGES | {"verify": ms}) for n, ms in ((1.0, one), (most, many))])


def rows_of(budget, rounds, shape="best_first"):
    """One row a prompt of 61 tokens; `rounds` by prompt."""
    return [
        {
            "shape": shape, "budget": budget, "depth": 15, "temperature": 0.0, "trace_sha256": str(i), "tokens": 61,
            "rounds": count, "nodes": count * budget, "rounds_outside_loops": 0, "tokens_outside_loops": 0,
        }
        for i, count in enumerate(rounds)
    ]  # fmt: skip


def test_sums_draw_whole_prompts():
    values = np.array([[1.0, 10], [100, 1000], [10000, 100000]])
    sums = drawn_sums(values)
    assert sums.shape == (DRAWS, 2) and (sums[:, 1] == 10 * sums[:, 0]).all()
    digits = sums[:, 0, None] // np.array([1, 100, 10000]) % 100
    assert (
        (digits.sum(axis=1) == 3).all() and digits.mean() == 1 and 0.9 < digits.std() / (2 / 3) ** 0.5 < 1.1
    )
    assert (drawn_sums(values) == sums).all() and (drawn_sums(values, seed=1) != sums).any()


def test_an_interval_of_shares():
    parts, wholes = np.array([[1, 1, 0], [3, 0, 0]]), np.array([[4, 2, 0], [4, 0, 0]])
    low, high = share_interval(parts, wholes)
    assert (low[0], high[0]) == (0.25, 0.75)
    assert np.isnan([low[1:], high[1:]]).all(), "one prompt, and none, had something to see"
    alone = share_interval(parts[:1], wholes[:1])
    assert np.isnan(alone).all() and np.isnan(share_interval(parts[:0], wholes[:0])).all()
    some = share_interval(np.array([1, 1, 0, 0]), np.array([1, 2, 0, 0]))
    assert some == (0.5, 1.0), "draws without a whole are left out"


def test_the_interval_of_shares_holds_the_share_as_often_as_it_says():
    """Prompts of rates of their own, 30% in the mean: rounds taken as independent would say too much."""
    rng, inside, narrow = np.random.default_rng(5), 0, 0
    for trial in range(60):
        wholes = rng.integers(20, 60, 40)
        parts = rng.binomial(wholes, rng.beta(3, 7, 40))
        low, high = share_interval(parts, wholes, seed=trial)
        inside += low <= 0.3 <= high
        half = 1.96 * (0.3 * 0.7 / wholes.sum()) ** 0.5
        narrow += abs(parts.sum() / wholes.sum() - 0.3) <= half
    assert 52 <= inside <= 60 and narrow < 50


def test_the_peak_and_how_often_each_budget_wins():
    """Prompt 0 is faster at 8 nodes, prompt 1 at 32: each alone in a quarter of the draws, both in half."""
    rows = [*rows_of(0, (60, 60)), *rows_of(4, (40, 40)), *rows_of(8, (15, 30)), *rows_of(32, (20, 20))]
    rows += [*rows_of(64, (20, 20)), *rows_of(8, (1, 1), "chain")]
    found = peak_of(rows, "best_first", cost(1.0, 1.0))
    assert found.speeds == pytest.approx({4: 1500, 8: 120e3 / 45, 32: 3000, 64: 3000})
    assert found.budget == 32, "the lower of two that are as fast"
    assert list(found.wins) == [32, 8] and found.wins[8] == pytest.approx(0.25, abs=0.03)
    assert sum(found.wins.values()) == pytest.approx(1) and (found.low, found.high) == (8, 32)
    assert str(replace(found, wins={32: 0.997, 8: 0.003})).endswith("of draws over prompts 32 in 100%)")
    assert found.between == "yes" and str(found).startswith("32 (95% 8 to 32; of draws over prompts 32 in 7")
    (at_8,) = [each for each in summarise(rows) if (each.shape, each.budget) == ("best_first", 8)]
    assert at_8.speed(cost(1.0, 1.0)) == pytest.approx(found.speeds[8])


def test_a_peak_at_an_end_is_none():
    rows = [
        row for budget, rounds in ((4, 30), (8, 20), (32, 15)) for row in rows_of(budget, (rounds, rounds))
    ]
    assert peak_of(rows, "best_first", cost(1.0, 1.0)).between == "no"
    assert peak_of(rows, "best_first", cost(1.0, 90.0)).between == "no"
    mixed = rows_of(4, (30, 10)) + rows_of(8, (20, 14)) + rows_of(32, (19, 15))
    assert peak_of(mixed, "best_first", cost(1.0, 1.2)).between == "undecided"


def test_a_peak_of_what_is_known():
    rows = rows_of(4, (30, 30)) + rows_of(8, (20, 20)) + rows_of(32, (10, 10))
    short = cost(1.0, 1.1, most=12.0)
    assert peak_of(rows, "best_first", short).speeds.keys() == {4, 8}, "the curve ends before"
    missing = [*rows, *rows_of(16, (5, 5))[1:]]
    assert peak_of(missing, "best_first", cost(1.0, 1.0)) is None, "one prompt has all budgets"
    assert peak_of(rows, "beam", cost(1.0, 1.0)) is None
    assert peak_of(rows_of(64, (9, 9)), "best_first", short) is None
