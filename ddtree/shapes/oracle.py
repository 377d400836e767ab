"""Oracle: the tokens that really follow, as far as the table has them; no shape can accept more."""

from math import isfinite

from ddtree.shapes._nodes import check_bounds, path_sum, tree_of


def make(continuation):
    """Return the `build` of the chain along `continuation`, the true tokens after the root."""
    truth = [int(token) for token in continuation]

    def build(token_ids, log_probs, budget, max_depth, *, root_token):
        """Return the longest prefix of the truth within the table and bounds; as in ddtree.shapes."""
        check_bounds("oracle", budget, max_depth)
        path, paths, weights = (), [], [0.0]
        for token, candidates, level in zip(
            truth[: min(budget, max_depth)], token_ids, log_probs, strict=False
        ):
            candidates = candidates.tolist()
            if token not in candidates:
                break
            rank = candidates.index(token)
            weight = path_sum(weights[-1], level.tolist(), rank)
            if not isfinite(weight):
                break
            path = (*path, rank)
            paths.append(path)
            weights.append(weight)
        return tree_of(token_ids, paths, range(len(paths)), weights[1:], root_token)

    return build
