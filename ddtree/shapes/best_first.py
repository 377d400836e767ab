"""Best-first: the nodes with the greatest path sums (DDTree, arXiv 2604.12989)."""

import numpy as np

from ddtree.reference.tree_build import build_tree
from ddtree.tree import DraftTree


def build(token_ids, log_probs, budget, max_depth, *, root_token):
    """Return the best-first DraftTree; arguments as in ddtree.shapes, ConfigError as in build_tree."""
    rows = max(budget, 0) + 1
    tokens, parents, depths = (np.empty(rows, np.int32) for _ in range(3))
    log_weights = np.empty(rows, np.float64)
    lineage = np.empty((rows, len(log_probs) + 1), np.int32)
    tokens[0] = root_token
    num_nodes = build_tree(
        token_ids, log_probs, budget, max_depth, tokens, parents, depths, log_weights, lineage
    )
    return DraftTree(*(array[: num_nodes + 1] for array in (tokens, parents, depths, log_weights)))
