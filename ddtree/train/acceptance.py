"""Rounds along known continuations, from a drafter's tables: what a tree would have had accepted, without decoding.

Plain trees are the workspace's own; a branch-aware one takes a child's score from a table by parent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ddtree.metrics import in_loop
from ddtree.shapes import branch_aware
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
    """The shape branch_aware's tree over the P best candidates of each depth."""
    conditional = this.conditional[root]
    token_ids = this.token_ids[root][:, : conditional.shape[-1]]
    return branch_aware.build(token_ids, conditional, budget, depth, root_token=int(this.tokens[root]))


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
