"""Branch-aware: best-first over what a branch head says of each candidate below each parent."""

import numpy as np

from ddtree.errors import ConfigError
from ddtree.reference.tree_build import candidates_of, take_best
from ddtree.shapes._nodes import check_bounds, tree_of


def build(token_ids, log_probs, budget, max_depth, *, root_token):
    """Return the DraftTree that reference.build_branch_tree builds; token_ids i32 [L, P], log_probs f32 [L, P, P].

    log_probs[d, i, j] is that of candidate j of depth d + 1 below candidate i of depth d, the root standing for all
    of them at d = 0, i = 0. A node's rank is its place among its parent's candidates, best first, equals by candidate.
    Other arguments and errors as in ddtree.shapes; ConfigError besides for a table [L, K], which knows no parents.
    """
    check_bounds("branch_aware", budget, max_depth)
    depths, width = token_ids.shape
    if log_probs.shape != (depths, width, width):
        raise ConfigError(
            f"branch_aware: expected log_probs [{depths}, {width}, {width}], a candidate's below each parent, found "
            f"{list(log_probs.shape)}"
        )
    table = log_probs[:max_depth]
    places = np.argsort(-table, axis=-1, kind="stable")[..., :budget]
    ordered, places = np.take_along_axis(table, places, axis=-1).tolist(), places.tolist()
    paths, parents, weights = take_best(ordered, budget, places=places)
    return tree_of(token_ids, paths, parents, weights, root_token, candidates_of(paths, parents, places))


build.conditional = True
