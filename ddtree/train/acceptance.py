"""Rounds along known continuations, from a drafter's tables: what a tree would have had accepted, without decoding.

Plain trees are the workspace's own; a branch-aware one takes a child's score from a table by parent.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ddtree.metrics import in_loop
from ddtree.study_fast import accepted_length, best_first
from ddtree.tree import DraftTree


@dataclass(frozen=True)
class Continuation:
    """A prompt's own greedy tokens after it i32 [n], and the drafter's table at each of them but the last.

    token_ids i32 and log_probs f32 [n - 1, horizon, K], best first; conditional f32 [n - 1, horizon, P, P] over the P
    best, as `ddtree.reference.branch_scores` defines it, or None.
    """

    prompt: np.ndarray
    tokens: np.ndarray
    token_ids: np.ndarray
    log_probs: np.ndarray
    conditional: np.ndarray | None = None


Build = Callable[[Continuation, int, int, int], DraftTree]  # of a continuation, root, budget and depth


def marginal_tree(this: Continuation, root: int, budget: int, depth: int) -> DraftTree:
    """DDTree's best-first tree."""
    table = this.token_ids[root][:, :budget], this.log_probs[root][:, :budget]
    return best_first(*table, budget, depth, root_token=int(this.tokens[root]))


def branch_tree(this: Continuation, root: int, budget: int, depth: int) -> DraftTree:
    """Best-first over the P best candidates of each depth, a child's log-probability read below its parent."""
    table, ids = this.conditional[root], this.token_ids[root]
    order = np.argsort(-table, axis=-1, kind="stable")
    heap = [
        (-float(table[0, 0, order[0, 0, 0]]), (0,), 0, 0)
    ]  # -sum, ranks, parent's row, parent's candidate
    tokens, parents, depths, sums = [int(this.tokens[root])], [-1], [0], [0.0]
    while heap and len(tokens) <= budget:
        negated, ranks, parent, above = heapq.heappop(heap)
        level, rank = len(ranks), ranks[-1]
        scores, ranking = table[level - 1, above], order[level - 1, above]
        candidate = int(ranking[rank])
        tokens.append(int(ids[level - 1, candidate]))
        parents.append(parent)
        depths.append(level)
        sums.append(-negated)
        if rank + 1 < len(ranking):
            sibling = -negated - float(scores[candidate]) + float(scores[ranking[rank + 1]])
            heapq.heappush(heap, (-sibling, (*ranks[:-1], rank + 1), parent, above))
        if level < depth:
            best = float(table[level, candidate, order[level, candidate, 0]])
            heapq.heappush(heap, (negated - best, (*ranks, 0), len(tokens) - 1, candidate))
    columns = (np.array(column, np.int32) for column in (tokens, parents, depths))
    return DraftTree(*columns, np.array(sums))


def mean_acceptance(continuations: list[Continuation], build: Build, budget: int) -> dict[str, float]:
    """Tokens a round with the bonus token, over all rounds and over those whose root is outside a loop.

    Rounds begin at the first own token and end with the tokens that are known, as a decode of that many tokens does.
    """
    rounds, tokens, outside, tokens_outside = 0, 0, 0, 0
    for this in continuations:
        looping = in_loop([*this.prompt, *this.tokens])[len(this.prompt) :]
        root, count = 0, len(this.tokens)
        while root < count - 1:
            after = this.tokens[root + 1 :].astype(np.int32)
            depth = min(this.log_probs.shape[1], len(after) - 1)
            tree = build(this, root, budget, depth) if depth else DraftTree.root_only(int(this.tokens[root]))
            length = accepted_length(tree.parents, tree.token_ids, after)
            rounds, tokens = rounds + 1, tokens + length
            if not looping[root]:
                outside, tokens_outside = outside + 1, tokens_outside + length
            root += length
    return {
        "rounds": rounds,
        "acceptance": tokens / max(rounds, 1),
        "rounds_outside": outside,
        "acceptance_outside": tokens_outside / max(outside, 1),
    }
