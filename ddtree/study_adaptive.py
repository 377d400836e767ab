"""cost_aware against the best fixed budget at a cost: what it is worth to size each tree by what it may bring.

Replays recordings, runs no model. A round is costed by its own rows, so that shapes whose trees differ in size are told
rightly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddtree.errors import UsageError
from ddtree.study_cost import CostCurve, speed_of_sizes
from ddtree.study_recordings import Recording
from ddtree.study_replay import replay_rounds
from ddtree.study_summary import DRAWS, interval_of

BUDGETS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True)
class Gain:
    """Tokens per second: `adaptive` of cost_aware, `fixed` of best_first at its best `budget`, `alone` without a draft.

    `nodes` are cost_aware's a round. `ratio` is adaptive over fixed, `low` and `high` its 95% bootstrap interval over
    prompts, the budget kept.
    """

    budget: int
    fixed: float
    adaptive: float
    alone: float
    nodes: float
    ratio: float
    low: float
    high: float


def adaptive_gain(
    recordings: Sequence[Recording], cost: CostCurve, budgets: Sequence[int] = BUDGETS, seed: int = 0
) -> Gain:
    """The gain over recordings of one temperature; budgets that the cost, or their tables, do not cover are left out.

    The best budget is the one that turned out best on these very recordings. UsageError without a recording, or a
    budget that is covered.
    """
    most = min((each.most_budget or np.inf for each in recordings), default=0)
    known = [budget for budget in budgets if budget <= most and np.isfinite(cost(budget + 1))]
    if not recordings or not known:
        raise UsageError("adaptive: expected recordings, and a cost that covers one of the budgets")
    fixed = {budget: _sums(recordings, "best_first", budget, cost) for budget in known}
    best = max(known, key=lambda budget: _speed(fixed[budget]))
    adaptive = _sums(recordings, "cost_aware", max(known), cost)
    drawn = np.random.default_rng(seed).integers(len(recordings), size=(DRAWS, len(recordings)))
    ratios = _speed(adaptive[drawn]) / _speed(fixed[best][drawn])
    low, high = interval_of(ratios)
    speeds = float(_speed(fixed[best])), float(_speed(adaptive))
    nodes = float(adaptive[:, 2].sum() / adaptive[:, 3].sum())
    return Gain(best, *speeds, float(1e3 / cost(1)), nodes, speeds[1] / speeds[0], float(low), float(high))


def _sums(recordings: Sequence[Recording], shape: str, budget: int, cost: CostCurve) -> np.ndarray:
    """f64[recordings, 4]: tokens, seconds, nodes and rounds."""
    sums = []
    for recording in recordings:
        rounds = list(replay_rounds(recording, shape, budget, context={"cost": cost}))
        sizes, tokens = [each.tree.num_nodes for each in rounds], sum(len(each.tokens) for each in rounds)
        seconds = tokens / speed_of_sizes(sizes, tokens, cost) if rounds else 0.0
        sums.append((tokens, seconds, sum(sizes), len(rounds)))
    return np.array(sums)


def _speed(sums: np.ndarray) -> np.ndarray:
    total = sums.sum(axis=-2)
    return total[..., 0] / total[..., 1]
