"""What another budget would have given: trees of every budget out of a recorded table, held to what really followed.

Data in, numbers out; it runs no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ddtree.errors import UsageError
from ddtree.shapes import get_shape, is_conditional, table_for
from ddtree.study_rounds import AnyRound, with_tables
from ddtree.tree import DraftTree


def expected_acceptance(tree: DraftTree) -> float:
    """Tokens a round (bonus token included) if the drafter's probabilities held: 1 + sum of exp(path log-prob)."""
    return 1.0 + float(np.exp(tree.log_weights[1:]).sum())


@dataclass(frozen=True)
class BudgetCurve:
    """Tokens a round, bonus token included, at each of `budgets` [B]: `expected` by the drafter, and `actual`.

    `nodes` are those the tree really has. `exact` [B] is false where the table's last column was taken, so that a
    wider table might have given another tree.
    """

    budgets: np.ndarray
    expected: np.ndarray
    actual: np.ndarray
    nodes: np.ndarray
    exact: np.ndarray


def budget_curve(
    table: tuple[np.ndarray, np.ndarray],
    continuation: Sequence[int],
    budgets: Sequence[int],
    shape: str = "best_first",
) -> BudgetCurve:
    """Build the tree of each budget from one table, and walk it along the tokens that really followed.

    `table` is (token_ids i32[L, K], log_probs f32[L, K]), or what else the shape's build function takes; a continuation
    shorter than L + 1 bounds the walk, and the tree's depth with it. Raises UsageError for an unknown shape or a
    continuation without a token.
    """
    if not len(continuation):
        raise UsageError("continuation: it is empty; give at least the token that followed")
    build = get_shape(shape, continuation=continuation)
    max_depth = min(len(table[0]), len(continuation) - 1)
    trees = [build(*table, int(budget), max_depth, root_token=0) for budget in budgets]
    columns = (
        [int(budget) for budget in budgets],
        [expected_acceptance(tree) for tree in trees],
        [walk(tree, continuation) for tree in trees],
        [tree.num_nodes for tree in trees],
        [
            tree.num_nodes == 0 or is_conditional(build) or not _took_last_column(tree, table[0])
            for tree in trees
        ],
    )
    return BudgetCurve(*(np.array(column) for column in columns))


def walk(tree: DraftTree, continuation: Sequence[int]) -> int:
    """Tokens that a round on this tree commits, bonus token included, when the target says `continuation`."""
    row, length = 0, 1
    children = {
        (int(p), int(t)): i for i, (p, t) in enumerate(zip(tree.parents, tree.token_ids, strict=True))
    }
    for token in continuation:
        row = children.get((row, int(token)), -1)
        if row < 0 or length == len(continuation):
            break
        length += 1
    return length


def _took_last_column(tree: DraftTree, token_ids: np.ndarray) -> bool:
    return bool((token_ids[tree.depths[1:] - 1, -1] == tree.token_ids[1:]).any())


def mean_budget_curve(
    rounds: Iterable[AnyRound], budgets: Sequence[int], shape: str = "best_first"
) -> BudgetCurve:
    """`budget_curve` averaged over rounds with tables; `exact` where it holds for all of them.

    The roots are those that the recorded decode met: at another budget a decode would meet others. Rounds whose known
    continuation is shorter than the table is deep are left out, unless all are. UsageError without a table.
    """
    seen = with_tables(rounds)
    whole = [this for this in seen if len(this.continuation) > len(this.table[0])] or seen
    build = get_shape(shape, continuation=[0])
    curves = [
        budget_curve(table_for(build, this.table, this.conditional), this.continuation, budgets, shape)
        for this in whole
    ]
    means = (np.mean([getattr(curve, name) for curve in curves], axis=0) for name in ("expected", "actual"))
    nodes = np.mean([curve.nodes for curve in curves], axis=0)
    return BudgetCurve(curves[0].budgets, *means, nodes, np.all([curve.exact for curve in curves], axis=0))
