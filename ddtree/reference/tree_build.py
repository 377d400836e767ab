"""The best-first tree over per-depth candidates (DDTree, arXiv 2604.12989), and lineage from parents.

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
    if budget < 0 or max_depth < 0:
        raise ConfigError(f"build_tree: budget {budget}, max_depth {max_depth}: neither may be negative")
    num_depths = len(log_probs)
    assert log_probs.ndim == 2 and token_ids.shape == log_probs.shape
    assert out_token_ids.shape == out_parents.shape == out_depths.shape == (budget + 1,)
    assert out_log_weights.shape == (budget + 1,) and out_lineage.shape == (budget + 1, num_depths + 1)

    paths, parents, weights = take_best(log_probs[:max_depth, :budget].tolist(), budget)
    num_nodes = len(paths)
    depths = [len(path) for path in paths]
    used = slice(1, num_nodes + 1)
    out_token_ids[1:] = 0
    out_parents[:] = -1
    out_depths[:] = 0
    out_log_weights[:] = 0.0
    out_parents[used] = parents
    out_depths[used] = depths
    out_log_weights[used] = weights
    out_token_ids[used] = token_ids[out_depths[used] - 1, [path[-1] for path in paths]]
    fill_lineage(out_parents, out_depths, out_lineage)
    out_lineage[num_nodes + 1 :] = -1
    return num_nodes


def take_best(table, budget, spine=0):
    """Return the rank tuples, parent rows and path sums of the nodes taken from table (a list a depth).

    The top-1 path down to depth `spine` is taken first, then the best candidate each time.
    """
    heap = []  # (-path sum, ranks along the path, parent's row); no two have the same ranks
    paths, parents, weights = [], [], []
    if table and table[0] and isfinite(table[0][0]):
        heap.append((-table[0][0], (0,), 0))
    ahead = heap.pop() if heap and spine else None  # the spine's next node, until the spine is done
    while (ahead or heap) and len(paths) < budget:
        negated, ranks, parent = ahead or heapq.heappop(heap)
        ahead = None
        weight = -negated
        paths.append(ranks)
        parents.append(parent)
        weights.append(weight)
        depth, rank = len(ranks), ranks[-1]
        level = table[depth - 1]
        if rank + 1 < len(level):
            sibling = weight - level[rank] + level[rank + 1]
            if isfinite(sibling):
                heapq.heappush(heap, (-sibling, (*ranks[:-1], rank + 1), parent))
        if depth < len(table):
            child = weight + table[depth][0]
            if isfinite(child):
                entry = (-child, (*ranks, 0), len(paths))
                if len(paths) == depth < spine:  # only the spine was taken yet
                    ahead = entry
                else:
                    heapq.heappush(heap, entry)
    return paths, parents, weights


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
