"""What shapes share: bounds, path sums in the published order, and a DraftTree out of rank paths."""

from itertools import pairwise

import numpy as np

from ddtree.errors import ConfigError
from ddtree.tree import DraftTree


def check_bounds(shape, budget, max_depth):
    """Raise ConfigError for a negative budget or max_depth."""
    if budget < 0 or max_depth < 0:
        raise ConfigError(f"{shape}: budget {budget}, max_depth {max_depth}: neither may be negative")


def path_sum(weight, level, rank):
    """Return the f64 path sum of a child of that rank: the bits that `reference.build_tree` gives the same path.

    `weight` is the parent's sum and `level` a list of the child's depth. It is not finite where any of the level's
    log-probs up to the rank is not.
    """
    weight = weight + level[0]
    for before, after in pairwise(level[: rank + 1]):
        weight = weight - before + after
    return weight


def tree_of(token_ids, paths, parents, weights, root_token, candidates=None):
    """Return the DraftTree of nodes given as rank tuples, parents' rows and path sums, in the builder's order.

    `candidates` are the nodes' columns of token_ids where those are not the last ranks of their paths.
    """
    depths = np.zeros(len(paths) + 1, np.int32)
    depths[1:] = [len(path) for path in paths]
    tokens = np.empty(len(paths) + 1, np.int32)
    tokens[0] = root_token
    if paths:
        columns = [path[-1] for path in paths] if candidates is None else candidates
        tokens[1:] = token_ids[depths[1:] - 1, columns]
    return DraftTree(
        tokens, np.array([-1, *parents], np.int32), depths, np.array([0.0, *weights], np.float64)
    )
