"""What others published of draft trees, beside the same quantity in replayed rows: does it hold on our data?

Each function takes the rows of one temperature and depth and gives a `Claim`, or None where the rows lack what it asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddtree.study_cost import CostCurve
from ddtree.study_draft import SiblingTable
from ddtree.study_summary import NO, OPEN, YES, best_of, drawn_sums, interval_of, peak_of, summarise

LEAST_GAIN = 1.01  # of tokens a round, below which acceptance no longer rises

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Claim:
    """A statement, what was published for it and by whom, what we measure, and whether it holds here."""

    statement: str
    published: str
    measured: str
    holds: str


def acceptance_ratio(above: Rows, below: Rows, seed: int = 0) -> tuple[float, float, float] | None:
    """Tokens a round of `above` over those of `below`, and the ratio's 95% bootstrap interval over prompts.

    Rows of the same recordings; they are drawn in pairs, so what a pair shares cancels. None of fewer than two pairs:
    one says nothing of others.
    """
    other = {row["trace_sha256"]: row for row in below}
    pairs = [
        (row, other[row["trace_sha256"]]) for row in above if row["rounds"] and row["trace_sha256"] in other
    ]
    if len(pairs) < 2:
        return None
    counts = np.array([[a["tokens"] - 1, a["rounds"], b["tokens"] - 1, b["rounds"]] for a, b in pairs], float)
    whole, many = counts.sum(axis=0), drawn_sums(counts, seed)
    ratios = many[:, 0] / many[:, 1] / (many[:, 2] / many[:, 3])
    low, high = interval_of(ratios)
    return float(whole[0] / whole[1] / (whole[2] / whole[3])), float(low), float(high)


def _at(rows: Rows, shape: str, budget: int) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["shape"] == shape and row["budget"] == budget]


def _budgets(rows: Rows, shape: str) -> list[int]:
    return sorted({row["budget"] for row in rows if row["shape"] == shape and row["rounds"]})


def saturation(rows: Rows, horizon: int) -> Claim | None:
    """The chain stops at the horizon, the tree goes on."""
    shared = [b for b in _budgets(rows, "best_first") if b >= horizon and b in _budgets(rows, "chain")]
    if len(shared) < 2:
        return None
    first, last = shared[0], shared[-1]
    trees, chains = (
        acceptance_ratio(_at(rows, shape, last), _at(rows, shape, first)) for shape in ("best_first", "chain")
    )
    if not trees or not chains:
        return None
    (tree, low, high), (chain, *_) = trees, chains
    rises = YES if low > LEAST_GAIN else NO if high < LEAST_GAIN else OPEN
    return Claim(
        "A chain's acceptance saturates while the tree's rises with the budget",
        "DDTree (arXiv 2604.12989), its code on another model: 4.28 by a chain of block 16; 4.36, 6.19 and 7.62 by "
        "trees of 16, 64 and 256 nodes",
        f"budget {first} to {last}: tree x {tree:.3f} ({low:.3f} to {high:.3f}), chain x {chain:.3f}",
        rises if chain < LEAST_GAIN else NO,
    )


def peak(rows: Rows, cost: CostCurve) -> Claim | None:
    """Speed is greatest at a budget between the least and the most."""
    found = peak_of(rows, "best_first", cost)
    if found is None or len(found.speeds) < 3:
        return None
    ends = (f"{found.speeds[budget]:.0f} at {budget}" for budget in (min(found.speeds), max(found.speeds)))
    return Claim(
        "Speed peaks at an intermediate budget",
        "lucebox, RTX 3090, a 27 B model in 4 bits: best at 22 nodes, slower past it",
        f"best at {found}: {found.speeds[found.budget]:.0f} tokens/s; {', '.join(ends)}",
        found.between,
    )


def tree_over_chain(rows: Rows, cost: CostCurve, horizon: int) -> Claim | None:
    """Speed of the tree over the chain's, at equal budget and, where there are several, each at its own best."""
    shared = [b for b in _budgets(rows, "best_first") if b >= horizon and b in _budgets(rows, "chain")]
    found = [each for each in summarise(rows) if each.shape in ("best_first", "chain")]
    best = best_of(found, cost)
    if not shared or len(best) < 2:
        return None
    budget = shared[0]
    at = {each.shape: each for each in found if each.budget == budget}
    ratios = acceptance_ratio(_at(rows, "best_first", budget), _at(rows, "chain", budget))
    if not ratios:
        return None
    dearer = float(cost(at["best_first"].nodes + 1) / cost(at["chain"].nodes + 1))
    equal, low, high = (ratio / dearer for ratio in ratios)
    ends = f"{best['best_first'][0].budget} and {best['chain'][0].budget} nodes"
    own = f"; each at its best ({ends}): {best['best_first'][1] / best['chain'][1]:.2f} times"
    return Claim(
        "With CUDA graphs on both sides and an equal budget a tree is no faster than a chain",
        "one careful port: 0.61 to 1.01 times the chain's speed",
        f"budget {budget}: {equal:.2f} times ({low:.2f} to {high:.2f}){own if len(found) > 2 else ''}",
        NO if low > 1 else YES if high < 1 else OPEN,
    )


PUBLISHED_RANK_1 = 0.37
PUBLISHED_CHILD = 0.22


def siblings(table: SiblingTable) -> Claim | None:
    """How often the second-best token is right at the first miss, and what follows it; intervals over prompts.

    None of fewer than two prompts with something to see.
    """
    misses, followed = table.first_misses, table.followed.sum(0)
    if not misses or table.hits.shape[1] < 2 or not followed[1] or not followed[0]:
        return None
    caught, child = table.share_of_misses(), table.continuation()
    of_misses, of_child = table.interval_of_misses(), table.interval_of_continuation()
    places = [(caught, of_misses, 1), (child, of_child, 1), (child, of_child, 0)]
    shares = [(share[rank], *(float(end[rank]) for end in ends)) for share, ends, rank in places]
    if np.isnan(shares).any():
        return None
    said = [f"{100 * share:.0f}% ({100 * low:.0f} to {100 * high:.0f})" for share, low, high in shares]
    weaker = _less_often(table)
    published = zip(shares, (PUBLISHED_RANK_1, PUBLISHED_CHILD), strict=False)
    near = all(low <= share <= high for (_, low, high), share in published)
    return Claim(
        "At the first miss the rank-1 sibling is often right, but its child seldom",
        "37% at the first miss; its child 22%, against 65 to 84% on the spine",
        f"{said[0]} of {misses} first misses; its child {said[1]} of {followed[1]}, on the spine {said[2]}",
        "yes, at another rate" if weaker == YES and not near else weaker,
    )


def _less_often(table: SiblingTable) -> str:
    """Whether the child of a rank-1 hit is right less often than that of the spine, by draws of the same prompts."""
    counts = [[each.child_right.sum(0)[:2], each.followed.sum(0)[:2]] for each in table.decodes]
    right, followed = np.moveaxis(drawn_sums(np.array(counts)), 1, 0)
    known = (followed > 0).all(axis=1)
    low, high = interval_of(np.diff(right[known] / followed[known], axis=1)[:, 0])
    return YES if high < 0 else NO if low > 0 else OPEN


def claims(rows: Rows, cost: CostCurve, horizon: int, table: SiblingTable | None = None) -> list[Claim]:
    """All of them that the rows, of one temperature and the depth `horizon`, can answer; siblings need the table."""
    found = [saturation(rows, horizon), peak(rows, cost), tree_over_chain(rows, cost, horizon)]
    return [each for each in (*found, siblings(table) if table else None) if each]
