"""Trees of every budget and depth out of tables that one decode recorded, held to what followed; it runs the model
once, to record. What a root is: a position where the recorded decode began a round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ddtree.config import DecodeConfig
from ddtree.decode import decode
from ddtree.engine import Engine
from ddtree.lab import text_table
from ddtree.metrics import in_loop
from ddtree.prompts import Prompt
from ddtree.rounds import Round
from ddtree.shapes import get_shape
from ddtree.study_draft import SiblingTable
from ddtree.study_rounds import seen_rounds
from ddtree.tree import DraftTree


@dataclass(frozen=True, eq=False)
class Root:
    """One recorded root with all that a tree on it needs: its round, table, and the tokens that really followed.

    `looping`: it stands inside a repetition (`metrics.in_loop`).
    """

    index: int
    token: int
    token_ids: np.ndarray
    log_probs: np.ndarray
    continuation: np.ndarray
    looping: bool

    @property
    def horizon(self) -> int:
        return len(self.token_ids)

    def tree(self, budget: int, depth: int, shape: str = "best_first") -> DraftTree:
        """The shape's tree of at most `budget` nodes, none deeper than `depth`; `oracle` sees what followed."""
        build = get_shape(shape, continuation=self.continuation)
        return build(self.token_ids, self.log_probs, budget, depth, root_token=self.token)


@dataclass(frozen=True)
class Recording:
    """Decodes of one setting: `rounds` by prompt, and of those the `roots` whose whole horizon is known."""

    rounds: dict[str, list[Round]]
    roots: dict[str, list[Root]]
    loop_share: float

    @property
    def all_rounds(self) -> list[Round]:
        return [this for rounds in self.rounds.values() for this in rounds]

    @property
    def all_roots(self) -> list[Root]:
        return [root for roots in self.roots.values() for root in roots]

    def tokens(self) -> dict[str, list[int]]:
        """What each decode returned."""
        return {name: [t for this in rounds for t in this.tokens] for name, rounds in self.rounds.items()}


def record(engine: Engine, prompts: Sequence[Prompt], config: DecodeConfig) -> Recording:
    """Decode the prompts and keep every round with the drafter's table, on the backend numpy.

    A prompt whose decode left no root with a whole horizon is kept in `rounds` alone.
    """
    rounds, roots, looping = {}, {}, []
    for sequence, prompt in enumerate(prompts):
        prompt_ids = engine.bundle.encode(prompt.text)
        mine = rounds[prompt.id] = list(decode(engine, prompt_ids, config, sequence))
        tokens = [token for this in mine for token in this.tokens]
        loops = in_loop([*prompt_ids, *tokens])[len(prompt_ids) :]
        looping += loops.tolist()
        if found := _roots(mine, loops):
            roots[prompt.id] = found
    return Recording(rounds, roots, float(np.mean(looping)))


def _roots(rounds: Sequence[Round], loops: np.ndarray) -> list[Root]:
    found, at = [], len(rounds[0].tokens)
    for this in seen_rounds(rounds):
        if this.table is not None and len(this.continuation) > len(this.table[0]):
            token = int(this.tree.token_ids[0])
            found.append(Root(this.index, token, *this.table, this.continuation, bool(loops[at - 1])))
        at += len(this.tokens)
    return found


@dataclass(frozen=True)
class Curve:
    """Tokens a round, bonus token included, at budgets 0..B f64 [B + 1]: promised by the drafter, and really taken."""

    expected: np.ndarray
    actual: np.ndarray


def walked_rows(tree: DraftTree, continuation: Sequence[int]) -> list[int]:
    """The rows, root first, that a target takes which says `continuation`; its last token is never a row's."""
    children = {
        (int(p), int(t)): row for row, (p, t) in enumerate(zip(tree.parents, tree.token_ids, strict=True))
    }
    rows = [0]
    for token in continuation[:-1]:
        row = children.get((rows[-1], int(token)))
        if row is None:
            break
        rows.append(row)
    return rows


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


def curve_table(curves: Mapping[str, Curve], budgets: Sequence[int]) -> str:
    """Curves at some budgets as text: expected, actual, and their ratio."""
    rows = []
    for name, curve in curves.items():
        for budget in budgets:
            expected, actual = curve.expected[budget], curve.actual[budget]
            rows.append((name, budget, f"{expected:.2f}", f"{actual:.2f}", f"{actual / expected:.2f}"))
    return text_table(("roots", "budget", "expected", "actual", "ratio"), rows)


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
