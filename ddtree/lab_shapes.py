"""Trees of every budget and depth at positions of recorded continuations, held to what followed. It runs no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ddtree.lab import text_table
from ddtree.shapes import table_for
from ddtree.study_cost import CostCurve
from ddtree.study_draft import SiblingTable
from ddtree.study_fast import accepted_length
from ddtree.study_published import Claim
from ddtree.study_recordings import Recording
from ddtree.study_replay import builder_of
from ddtree.study_report_parts import table_of
from ddtree.study_rerun import accepted_path
from ddtree.study_scale import Verdict
from ddtree.study_summary import Summary, best_of
from ddtree.tree import DraftTree


@dataclass(frozen=True, eq=False)
class Root:
    """One position of a continuation with all that a tree on it needs: its token, table, and the tokens after it.

    `position` counts the continuation's tokens from 0. `looping`: it stands inside a repetition (`metrics.in_loop`).
    `conditional` is what a branch head says of the table's columns below each parent, or None.
    """

    position: int
    token: int
    token_ids: np.ndarray
    log_probs: np.ndarray
    continuation: np.ndarray
    looping: bool
    conditional: np.ndarray | None = None

    @property
    def horizon(self) -> int:
        return len(self.token_ids)

    def tree(self, budget: int, depth: int, shape: str = "best_first") -> DraftTree:
        """The shape's tree of at most `budget` nodes, none deeper than `depth`; `oracle` sees what followed."""
        build = builder_of(shape)(self.continuation)
        table = table_for(build, (self.token_ids, self.log_probs), self.conditional)
        return build(*table, budget, depth, root_token=self.token)


def roots_of(recording: Recording) -> list[Root]:
    """Every position whose whole horizon, and the bonus token after it, is known; none in a short continuation."""
    tokens, last = recording.tokens, len(recording.tokens) - recording.horizon - 1
    scored = [None] * last if recording.conditional is None else recording.conditional
    return [
        Root(
            at,
            int(tokens[at]),
            *recording.table(at),
            tokens[at + 1 :],
            bool(recording.looping[at]),
            scored[at],
        )
        for at in range(last)
    ]


@dataclass(frozen=True)
class Curve:
    """Tokens a round, bonus token included, at budgets 0..B f64 [B + 1]: promised by the drafter, and really taken."""

    expected: np.ndarray
    actual: np.ndarray


def walked_rows(tree: DraftTree, continuation: np.ndarray) -> list[int]:
    """The rows, root first, that a target takes which says `continuation`; its last token is never a row's."""
    after = np.asarray(continuation, np.int32)
    return accepted_path(tree, after[: accepted_length(tree.parents, tree.token_ids, after)]).tolist()


def curve_of(tree: DraftTree, rows: Sequence[int], budget: int) -> Curve:
    """The curve up to `budget` from the tree of that budget alone: smaller best-first trees are its first rows."""
    expected = np.full(budget + 1, 1.0)
    expected[1 : tree.num_nodes + 1] += np.cumsum(np.exp(tree.log_weights[1:]))
    expected[tree.num_nodes + 1 :] = expected[tree.num_nodes]
    actual = np.searchsorted(np.asarray(rows), np.arange(budget + 1), side="right")
    return Curve(expected, actual.astype(float))


def mean_curve(roots: Sequence[Root], budget: int, depth: int) -> Curve:
    """The mean of the roots' curves."""
    curves = []
    for root in roots:
        tree = root.tree(budget, depth)
        curves.append(curve_of(tree, walked_rows(tree, root.continuation), budget))
    means = (np.mean([getattr(curve, name) for curve in curves], axis=0) for name in ("expected", "actual"))
    return Curve(*means)


def curve_table(
    curves: Mapping[str, Curve], budgets: Sequence[int], replayed: Mapping[str, Mapping[int, float]]
) -> str:
    """Curves at some budgets as text: expected, actual, their ratio, and tokens a round as a decode would have them."""
    rows = []
    for name, curve in curves.items():
        for budget in budgets:
            expected, actual = curve.expected[budget], curve.actual[budget]
            numbers = expected, actual, actual / expected, replayed[name][budget]
            rows.append((name, budget, *(f"{number:.2f}" for number in numbers)))
    return text_table(("roots", "budget", "expected", "actual", "ratio", "replayed"), rows)


def shape_table(summaries: Sequence[Summary], cost: CostCurve) -> str:
    """Tokens a round of each shape at each budget as text, then its fastest budget and tokens per second at `cost`."""
    at = {(each.shape, each.budget): each for each in summaries}
    budgets = sorted({each.budget for each in summaries})
    rows = []
    for shape, (best, speed) in best_of(summaries, cost).items():
        lengths = (f"{at[shape, budget].acceptance:.2f}" for budget in budgets)
        rows.append((shape, *lengths, best.budget, f"{best.nodes:.1f}", f"{speed:.0f}"))
    return text_table(("shape", *map(str, budgets), "fastest at", "nodes", "tokens/s"), rows)


def verdict_table(found: Sequence[Verdict]) -> str:
    """Verdicts of one model and context as text: speedup over rounds of one row with its interval, and whether it
    pays, in a column for each way to count experts; a line each temperature, shape and budget.
    """
    ways = sorted({each.experts for each in found})
    lines: dict[tuple, dict[str, str]] = {}
    for each in found:
        key = (f"{each.temperature:g}", each.shape, each.budget, f"{each.rows:.1f}", f"{each.tokens:.2f}")
        said = f"{each.speedup:.2f} ({each.speedup_low:.2f}-{each.speedup_high:.2f}) {each.pays}"
        lines.setdefault(key, {})[each.experts] = said
    rows = [(*key, *(said.get(way, "-") for way in ways)) for key, said in lines.items()]
    return text_table(("temp", "shape", "budget", "rows", "tokens", *ways), rows)


def claim_table(claims: Mapping[str, Sequence[Claim | None]]) -> str:
    """Published claims as a Markdown table: what was published, and what each setting of `claims` measures of it."""
    rows = []
    for several in zip(*claims.values(), strict=True):
        one = next(each for each in several if each)
        here = (f"{each.measured}: **{each.holds}**" if each else "-" for each in several)
        rows.append((one.statement, one.published, *here))
    return "\n".join(table_of(("statement", "published", *claims), rows))


def sibling_text(table: SiblingTable, depths: int = 8) -> str:
    """The sibling table as text, a line a depth and one for all: rounds that got there, the share that each rank
    holds, and how often the drafter's top-1 one deeper is right after a hit of rank 0 and of rank 1.
    """
    rows = []
    followed, right = table.followed, table.child_right
    for depth in range(min(depths, int(np.count_nonzero(table.reached)))):
        rows.append(
            _sibling_row(depth + 1, table.hits[depth], table.beyond[depth], followed[depth], right[depth])
        )
    rows.append(_sibling_row("all", table.hits.sum(0), table.beyond.sum(), followed.sum(0), right.sum(0)))
    names = ("depth", "rounds", "rank 0", "rank 1", "rank 2", "rank 3", "later", "child | 0", "child | 1")
    return text_table(names, rows)


def _sibling_row(name, hits, beyond, followed, right) -> tuple:
    reached = int(hits.sum() + beyond)
    shares = [f"{100 * count / reached:.0f}%" for count in (*hits[:4], beyond)]
    children = [f"{100 * right[r] / followed[r]:.0f}%" if followed[r] else "-" for r in (0, 1)]
    return (str(name), reached, *shares, *children)
