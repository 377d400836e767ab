"""The best-first builder and the walk, compiled for one CPU core: the same trees, bit for bit, at a study's speed.

Knows tables and trees; `reference/tree_build.py` is what it is held to, tie for tie and sum for sum.
"""

import numpy as np
from numba import njit

from ddtree.shapes import get_shape
from ddtree.tree import DraftTree

MOST_SCANNED = (
    4096  # a scan of all live candidates for the best: beyond this the plain builder's heap is faster
)


def _compiled(function):
    """Compile at the first call, and keep the code for later processes where numba finds a folder it may write."""
    try:
        return njit(cache=True)(function)
    except RuntimeError:  # no such folder: each process compiles anew
        return njit(function)


def best_first(token_ids, log_probs, budget, max_depth, *, root_token):
    """Return the DraftTree that shapes.best_first builds; arguments as in ddtree.shapes, ConfigError as there."""
    if not 0 <= budget <= MOST_SCANNED or max_depth < 0:
        return get_shape("best_first")(token_ids, log_probs, budget, max_depth, root_token=root_token)
    tokens, parents, depths = (np.empty(budget + 1, np.int32) for _ in range(3))
    log_weights = np.empty(budget + 1, np.float64)
    tokens[0], parents[0], depths[0], log_weights[0] = root_token, -1, 0, 0.0
    count = 1 + _take_best(token_ids, log_probs, budget, max_depth, tokens, parents, depths, log_weights)
    return DraftTree(tokens[:count], parents[:count], depths[:count], log_weights[:count])


@_compiled
def _take_best(token_ids, log_probs, budget, max_depth, tokens, parents, depths, log_weights):
    """Fill rows 1.. of the outputs [budget + 1] and return how many nodes were taken."""
    num_depths = min(log_probs.shape[0], max_depth)
    width = min(log_probs.shape[1], budget)
    if num_depths == 0 or width == 0 or not np.isfinite(log_probs[0, 0]):
        return 0
    # A node taken leaves its place to its sibling and opens one for its child: at most budget + 1 live at once.
    weight = np.empty(budget + 2, np.float64)
    parent = np.empty(budget + 2, np.int32)
    depth = np.empty(budget + 2, np.int32)
    ranks = np.empty((budget + 2, num_depths), np.int32)
    weight[0], parent[0], depth[0], ranks[0, 0] = np.float64(log_probs[0, 0]), 0, 1, 0
    live, taken = 1, 0
    while live and taken < budget:
        best = 0
        for other in range(1, live):
            if weight[other] > weight[best] or (
                weight[other] == weight[best]
                and _precedes(ranks[other], depth[other], ranks[best], depth[best])
            ):
                best = other
        taken += 1
        total, level = weight[best], depth[best]
        rank = ranks[best, level - 1]
        tokens[taken], parents[taken] = token_ids[level - 1, rank], parent[best]
        depths[taken], log_weights[taken] = level, total
        if level < num_depths:
            child = total + np.float64(log_probs[level, 0])
            if np.isfinite(child):
                weight[live], parent[live], depth[live] = child, taken, level + 1
                ranks[live, :level] = ranks[best, :level]
                ranks[live, level] = 0
                live += 1
        sibling = np.nan
        if rank + 1 < width:
            sibling = (
                total - np.float64(log_probs[level - 1, rank]) + np.float64(log_probs[level - 1, rank + 1])
            )
        if np.isfinite(sibling):
            weight[best], ranks[best, level - 1] = sibling, rank + 1
        else:
            live -= 1
            weight[best], parent[best], depth[best] = weight[live], parent[live], depth[live]
            ranks[best] = ranks[live]
    return taken


@_compiled
def _precedes(left, left_length, right, right_length):
    """Whether one tuple of ranks is lexicographically smaller than another."""
    for place in range(min(left_length, right_length)):
        if left[place] != right[place]:
            return left[place] < right[place]
    return left_length < right_length


@_compiled
def accepted_length(parents, token_ids, continuation):
    """Rows on the path, the root included, of a target that says `continuation` i32 [n >= 1]: tokens of the round.

    parents and token_ids i32 [M] as in a DraftTree. The continuation's last token is never a row's: it would be the
    bonus token of a walk that got that far.
    """
    row, length = 0, 1
    for each in range(1, len(parents)):  # parents precede children, so one pass meets every step of the walk
        if length == len(continuation):
            break
        if parents[each] == row and token_ids[each] == continuation[length - 1]:
            row = each
            length += 1
    return length
