"""The best-first tree over per-depth candidates (DDTree, arXiv 2604.12989), also below each parent; and lineage.

Knows tables of tokens and log-probabilities, not the drafter that filled them.
"""

import heapq
from math import isfinite

import numpy as np

from ddtree.errors import ConfigError


def build_tree(
    token_ids,
    log_probs,
    budget,
    max_depth,
    out_token_ids,
    out_parents,
    out_depths,
    out_log_weights,
    out_lineage,
):
    """Take the best candidate until budget nodes are taken or none is left; return the count without the root.

    token_ids i32 [L, K] and log_probs f32 [L, K] (natural log, descending along K). Outputs: token_ids,
    parents and depths i32 [budget + 1], log_weights f64 [budget + 1], lineage i32 [budget + 1, L + 1] (row i's
    ancestor at each depth, itself last, -1 beyond). Row 0 is the root; its token is left to the caller.
    Unused rows get token 0, parent -1, depth 0, weight 0.0, lineage -1.

    Best is the greatest path sum, then the lexicographically smaller tuple of ranks. Sums are f64 in the
    published order: a child adds its depth's top log-prob to its parent's sum, a sibling subtracts its
    predecessor's and adds its own. What is not finite is never a candidate, nor is what lies deeper than
    max_depth. Raises ConfigError for a negative budget or max_depth.
    """
    table = _cut("build_tree", log_probs, budget, max_depth)
    assert log_probs.ndim == 2 and log_probs.shape == token_ids.shape
    paths, parents, weights = take_best(table, budget)
    outputs = out_token_ids, out_parents, out_depths, out_log_weights, out_lineage
    return _fill(token_ids, budget, paths, [path[-1] for path in paths], parents, weights, outputs)


def build_branch_tree(
    token_ids,
    places,
    log_probs,
    budget,
    max_depth,
    out_token_ids,
    out_parents,
    out_depths,
    out_log_weights,
    out_lineage,
):
    """build_tree where a candidate's log-probability is read below its parent; return the count without the root.

    token_ids i32 [L, P]; places i32 and log_probs f32 [L, P, P], as reference.branch_scores writes them: row i of depth
    d follows candidate i of depth d - 1, row 0 of depth 0 the root, best first, places among the P of token_ids. A
    node's rank counts along its own row. Outputs, order, ties and errors are build_tree's: with rows that are alike for
    every parent the tree is build_tree's of that row, in every bit.
    """
    table = _cut("build_branch_tree", log_probs, budget, max_depth)
    assert log_probs.shape == places.shape == (*token_ids.shape, token_ids.shape[1])
    places = places[:max_depth].tolist()
    paths, parents, weights = take_best(table, budget, places=places)
    candidates = candidates_of(paths, parents, places)
    outputs = out_token_ids, out_parents, out_depths, out_log_weights, out_lineage
    return _fill(token_ids, budget, paths, candidates, parents, weights, outputs)


def _cut(name, log_probs, budget, max_depth):
    """The part of a table that a tree may use, as lists. Raises ConfigError for a negative budget or max_depth."""
    if budget < 0 or max_depth < 0:
        raise ConfigError(f"{name}: budget {budget}, max_depth {max_depth}: neither may be negative")
    return log_probs[:max_depth, ..., :budget].tolist()


def _fill(token_ids, budget, paths, candidates, parents, weights, outputs):
    """Write the nodes taken to the outputs and return their number; `candidates`: which of its depth's each is."""
    out_token_ids, out_parents, out_depths, out_log_weights, out_lineage = outputs
    num_nodes = len(paths)
    assert out_token_ids.shape == out_parents.shape == out_depths.shape == (budget + 1,)
    assert out_log_weights.shape == (budget + 1,) and out_lineage.shape == (budget + 1, len(token_ids) + 1)
    used = slice(1, num_nodes + 1)
    out_token_ids[1:] = 0
    out_parents[:] = -1
    out_depths[:] = 0
    out_log_weights[:] = 0.0
    out_parents[used] = parents
    out_depths[used] = [len(path) for path in paths]
    out_log_weights[used] = weights
    out_token_ids[used] = token_ids[out_depths[used] - 1, candidates]
    fill_lineage(out_parents, out_depths, out_lineage)
    out_lineage[num_nodes + 1 :] = -1
    return num_nodes


def take_best(table, budget, spine=0, places=None):
    """Return the rank tuples, parent rows and path sums of the nodes taken from table (a list a depth).

    The top-1 path down to depth `spine` is taken first, then the best candidate each time. With `places`, both hold a
    list a depth and candidate of the depth before, as in `build_branch_tree`.
    """
    heap = []  # (-path sum, ranks along the path, parent's row); no two have the same ranks
    paths, parents, weights = [], [], []
    below = [_linked(table, places)]  # of each row, the level its children stand in
    if below[0] and below[0][0] and isfinite(below[0][0][0]):
        heap.append((-below[0][0][0], (0,), 0))
    ahead = heap.pop() if heap and spine else None  # the spine's next node, until the spine is done
    while (ahead or heap) and len(paths) < budget:
        negated, ranks, parent = ahead or heapq.heappop(heap)
        ahead = None
        weight = -negated
        paths.append(ranks)
        parents.append(parent)
        weights.append(weight)
        depth, rank = len(ranks), ranks[-1]
        level, after = below[parent]
        below.append(after[rank])
        if rank + 1 < len(level):
            sibling = weight - level[rank] + level[rank + 1]
            if isfinite(sibling):
                heapq.heappush(heap, (-sibling, (*ranks[:-1], rank + 1), parent))
        if after[rank]:
            child = weight + after[rank][0][0]
            if isfinite(child):
                entry = (-child, (*ranks, 0), len(paths))
                if len(paths) == depth < spine:  # only the spine was taken yet
                    ahead = entry
                else:
                    heapq.heappush(heap, entry)
    return paths, parents, weights


def _linked(table, places):
    """The first level of a table, None if it has none: log-probabilities, and of each rank the level below it."""
    following = None  # of the depth after: one level, or with places one for each of its parents
    for depth in reversed(range(len(table))):
        if places is None:
            following = (table[depth], [following] * len(table[depth]))
        else:
            following = [
                (level, [following and following[place] for place in row[: len(level)]])
                for level, row in zip(table[depth], places[depth], strict=True)
            ]
    return following if places is None or not following else following[0]


def candidates_of(paths, parents, places):
    """Which candidate of its depth each node taken is, a list; places [L, P, P] as `build_branch_tree` has them."""
    rows = [0]
    for path, parent in zip(paths, parents, strict=True):
        rows.append(places[len(path) - 1][rows[parent]][path[-1]])
    return rows[1:]


def fill_lineage(parents, depths, out_lineage):
    """Write each row's ancestor at every depth 0, 1, .. itself, then -1, to out_lineage i32 [M, D].

    parents and depths i32 [M], row 0 the root, D greater than the greatest depth.
    """
    out_lineage[:] = -1
    out_lineage[:, 0] = 0
    for depth in range(1, int(depths.max()) + 1):
        rows = np.flatnonzero(depths == depth)
        out_lineage[rows, :depth] = out_lineage[parents[rows], :depth]
        out_lineage[rows, depth] = rows
