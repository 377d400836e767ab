"""Replayed rows summed over prompts: acceptance, speed at a cost, and the best budget, with bootstraps over prompts.

Prompts are what was sampled, not rounds, which follow one another. It runs no model.
"""

from __future__ import annotations

import math
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


def drawn_sums(values: np.ndarray, seed: int = 0) -> np.ndarray:
    """Sums f64[DRAWS, ..] of values [P, ..] over as many prompts as there are, drawn with replacement."""
    count = len(values)
    drawn = np.random.default_rng(seed).integers(count, size=(DRAWS, count))
    times = np.zeros((DRAWS, count))
    np.add.at(times, (np.arange(DRAWS)[:, None], drawn), 1)
    return np.tensordot(times, np.asarray(values, float), 1)


def share_interval(parts: np.ndarray, wholes: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The 95% interval over prompts of sum(parts) / sum(wholes), of each cell of parts and wholes [P, ..].

    Draws without a whole are left out. NaN where fewer than two prompts have one: one says nothing of others.
    """
    ends = np.full((2, *parts.shape[1:]), np.nan)
    if len(parts):
        part, whole = drawn_sums(parts, seed), drawn_sums(wholes, seed)
        seen = (np.asarray(wholes) > 0).sum(axis=0)
        for cell in np.ndindex(seen.shape):
            if seen[cell] > 1:
                known = whole[:, *cell] > 0
                ends[:, *cell] = interval_of(part[known, *cell] / whole[known, *cell])
    return ends[0], ends[1]


def summarise(rows: Iterable[Mapping[str, Any]], seed: int = 0) -> list[Summary]:
    """The rows of `study replay` by shape, budget, depth and temperature, in their order. UsageError without a round.

    The interval draws as many prompts as there are, with replacement, DRAWS times.
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
    low, high = interval_of(drawn_sums(tokens, seed) / drawn_sums(rounds, seed))
    outside = sum(row["rounds_outside_loops"] for row in rows)
    return Summary(
        *key,
        prompts=len(rows),
        acceptance=tokens.sum() / rounds.sum(),
        low=low,
        high=high,
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


def best_budget(summaries: Iterable[Summary]) -> str:
    """At which budget shapes are held against one another, in words: there is no best of one."""
    budgets = {(each.shape, each.budget) for each in summaries}
    several = len(budgets) > len({shape for shape, _ in budgets})
    return "its own best budget" if several else "the only budget replayed of it"


@dataclass(frozen=True)
class Peak:
    """The budget of most tokens per second, `speeds` {budget: tokens/s}, and how sure it is of other prompts.

    `wins` {budget: share} of the bootstrap's draws in which that budget is the fastest, most first; `low` and `high`
    are the 95% interval of the fastest budget.
    """

    budget: int
    low: int
    high: int
    speeds: dict[int, float]
    wins: dict[int, float]

    @property
    def between(self) -> str:
        """Whether the peak lies between the least and the most budget: undecided where the interval reaches one."""
        least, most = min(self.speeds), max(self.speeds)
        if least < self.low and self.high < most:
            return YES
        return NO if self.high == least or self.low == most else OPEN

    def __str__(self) -> str:
        told = [(budget, f"{100 * share:.0f}%") for budget, share in self.wins.items()]
        shares = ", ".join(f"{budget} in {share}" for budget, share in told if share != "0%")
        return f"{self.budget} (95% {self.low} to {self.high}; of draws over prompts {shares})"


def peak_of(rows: Iterable[Mapping[str, Any]], shape: str, cost: CostCurve, seed: int = 0) -> Peak | None:
    """The peak of a shape's rows of one temperature and depth, over the prompts that all its budgets have.

    Each draw of prompts is costed by its own mean rows. Budgets that the curve does not cover are left out, and so is a
    round without a draft. None of fewer than two prompts, or without a budget.
    """
    by_budget: dict[int, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for row in rows:
        if row["shape"] == shape and row["budget"] and row["rounds"]:
            by_budget[row["budget"]][row["trace_sha256"]] = row
    prompts = sorted(set.intersection(*map(set, by_budget.values()))) if by_budget else []
    if len(prompts) < 2:
        return None
    speeds, draws = {}, []
    for budget in sorted(by_budget):
        mine = [by_budget[budget][prompt] for prompt in prompts]
        counts = np.array([[row["tokens"] - 1, row["rounds"], row["nodes"]] for row in mine], float)
        speed = float(_speed(counts.sum(axis=0), cost))
        if np.isfinite(speed):
            speeds[budget] = speed
            draws.append(_speed(drawn_sums(counts, seed), cost))
    if not speeds:
        return None
    budgets = np.array(list(speeds))
    fastest = np.argmax(np.nan_to_num(draws, nan=-np.inf), axis=0)  # the lower budget of a tie
    low, high = interval_of(fastest)
    shares = np.bincount(fastest, minlength=len(budgets)) / len(fastest)
    order = [place for place in np.argsort(-shares, kind="stable") if shares[place] > 0]
    wins = {int(budgets[place]): float(shares[place]) for place in order}
    ends = (int(budgets[place]) for place in (math.floor(low), math.ceil(high)))
    return Peak(max(speeds, key=speeds.__getitem__), *ends, speeds, wins)


def _speed(counts: np.ndarray, cost: CostCurve) -> np.ndarray:
    """Tokens per second of sums [.., 3] of tokens, rounds and nodes."""
    tokens, rounds, nodes = np.moveaxis(counts, -1, 0)
    return 1e3 * tokens / rounds / cost(nodes / rounds + 1)
