"""Spine first: the top-1 path as deep as it goes, and the rest of the budget best-first."""

from ddtree.reference.tree_build import take_best
from ddtree.shapes._nodes import check_bounds, tree_of


def build(token_ids, log_probs, budget, max_depth, *, root_token):
    """Return the DraftTree whose first rows are the chain's; arguments and errors as in ddtree.shapes.

    What follows them is the best-first order of what they leave. It accepts at least what the chain of its budget does.
    """
    check_bounds("spine_first", budget, max_depth)
    nodes = take_best(log_probs[:max_depth, :budget].tolist(), budget, spine=max_depth)
    return tree_of(token_ids, *nodes, root_token)
