"""Best-first: the nodes with the greatest path sums (DDTree, arXiv 2604.12989)."""

from ddtree.reference.tree_build import take_best
from ddtree.shapes._nodes import check_bounds, tree_of


def build(token_ids, log_probs, budget, max_depth, *, root_token):
    """Return the best-first DraftTree, as reference.build_tree builds it; arguments and errors as in ddtree.shapes."""
    check_bounds("best_first", budget, max_depth)
    nodes = take_best(log_probs[:max_depth, :budget].tolist(), budget)
    return tree_of(token_ids, *nodes, root_token)
