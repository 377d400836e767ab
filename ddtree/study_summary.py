"""Replayed rows summed over prompts: acceptance with a bootstrap interval, and speed at a cost. It runs no model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddtree.errors import UsageError
from ddtree.study_cost import CostCurve

DRAWS = 2000
LEVEL = 0.95
YES, NO, OPEN = "yes", "no", "undecided"


@dataclass(frozen=True)
class Summary:
    """One shape, budget, depth and temperature over `prompts` prompts; lengths count the bonus token.

    `acceptance` is tokens a round, `low` and `high` its 95% bootstrap interval over prompts (without width for one),
    `outside_loops` the mean over rounds that start outside a repetition (None without one), `nodes` the nodes verified
    a round.
    """

    shape: str
    budget: int
    depth: int
    temperature: float
    prompts: int
    acceptance: float
    low: float
    high: float
    outside_loops: float | None
    nodes: float

    def exceeds(self, tokens: float) -> str:
        """Whether acceptance is above so many tokens a round: undecided where the interval holds them.

        So it is of one prompt, which says nothing of others.
        """
        if self.prompts < 2:
            return OPEN
        return YES if self.low > tokens else NO if self.high < tokens else OPEN

    def speed(self, cost: CostCurve) -> float:
        """Tokens per second where a round costs what one of its mean rows does; NaN outside the curve."""
        return float(1e3 * self.acceptance / cost(self.nodes + 1))


def interval_of(draws: np.ndarray) -> tuple[float, float]:
    """The two ends of the 95% interval of bootstrap draws."""
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def summarise(rows: Iterable[Mapping[str, Any]], seed: int = 0) -> list[Summary]:
    """The rows of `study replay` by shape, budget, depth and temperature, in their order. UsageError without a round.

    The interval draws as many prompts as there are, with replacement, DRAWS times: prompts are what was sampled, not
    rounds, which follow one another.
    """
    grouped: dict[tuple, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["rounds"]:
            grouped[row["shape"], row["budget"], row["depth"], row["temperature"]].append(row)
    if not grouped:
        raise UsageError("rows: there is no replayed round in them")
    return [_summary(key, each, seed) for key, each in grouped.items()]


def _summary(key: tuple, rows: list[Mapping[str, Any]], seed: int) -> Summary:
    tokens = np.array([row["tokens"] - 1 for row in rows], float)  # the first comes from the prefill
    rounds, nodes = (np.array([row[name] for row in rows], float) for name in ("rounds", "nodes"))
    drawn = np.random.default_rng(seed).integers(len(rows), size=(DRAWS, len(rows)))
    means = tokens[drawn].sum(axis=1) / rounds[drawn].sum(axis=1)
    low, high = interval_of(means)
    outside = sum(row["rounds_outside_loops"] for row in rows)
    return Summary(
        *key,
        prompts=len(rows),
        acceptance=tokens.sum() / rounds.sum(),
        low=float(low),
        high=float(high),
        outside_loops=sum(row["tokens_outside_loops"] for row in rows) / outside if outside else None,
        nodes=nodes.sum() / rounds.sum(),
    )


def best_of(summaries: Iterable[Summary], cost: CostCurve) -> dict[str, tuple[Summary, float]]:
    """Each shape's fastest summary and its tokens per second; shapes that the curve does not cover are left out."""
    best: dict[str, tuple[Summary, float]] = {}
    for summary in summaries:
        speed = summary.speed(cost)
        if np.isfinite(speed) and speed > best.get(summary.shape, (None, -np.inf))[1]:
            best[summary.shape] = summary, speed
    return best
