"""Beam: expand the best few nodes of each depth, then keep the best of all (EAGLE-2, arXiv 2406.16858)."""

import numpy as np

from ddtree.errors import UsageError
from ddtree.shapes._nodes import check_bounds, tree_of

ARGUMENT = "width"


def make(width=10, children=10):
    """Return the `build` that expands the `width` best nodes of a depth by their `children` best candidates each.

    `width` is a number or one a depth (a list, or text such as 8 or 8,4,2), the last of them for all depths below.
    The root is always expanded. The defaults are EAGLE-2's. Raises UsageError unless all are integers >= 1.
    """
    widths, children = _counts("width", width), _counts("children", children)[0]

    def build(token_ids, log_probs, budget, max_depth, *, root_token):
        """Return the beam's DraftTree in descending order of path sums; as in ddtree.shapes.

        Of all that was expanded the `budget` greatest path sums are taken, a child never before its parent.
        """
        check_bounds("beam", budget, max_depth)
        table = log_probs[:max_depth, : min(children, budget)].astype(np.float64)
        parents, ranks, weights = _expand(table, widths)
        if len(weights) > budget:  # equal sums at the edge all stay until their paths are compared
            edge = -np.partition(-weights, budget - 1)[budget - 1] if budget else np.inf
            chosen = np.flatnonzero(weights >= edge)
        else:
            chosen = np.arange(len(weights))
        return tree_of(token_ids, *_rerank(parents, ranks, weights, chosen, budget), root_token)

    return build


def _expand(table, widths):
    """Return parents (-1 for the root), ranks and path sums of all candidates, depth by depth, by path in each."""
    parents, ranks, weights = [], [], []
    open_ids, open_weights, first = np.array([-1]), np.zeros(1), 0
    for depth, level in enumerate(table):
        finite = np.isfinite(level)
        count = len(level) if finite.all() else int(np.argmin(finite))
        if not count:
            break
        # The published order: add the top log-prob, then subtract each predecessor's and add one's own.
        terms = np.empty((len(open_ids), 2 * count))
        terms[:, 0] = open_weights + level[0]
        terms[:, 1::2] = np.append(-level[: count - 1], 0.0)
        terms[:, 2::2] = level[1:count]
        sums = np.add.accumulate(terms, axis=1)[:, ::2].ravel()
        parents.append(np.repeat(open_ids, count))
        ranks.append(np.tile(np.arange(count), len(open_ids)))
        weights.append(sums)
        best = np.argsort(-sums, kind="stable")[: widths[min(depth, len(widths) - 1)]]
        best.sort()
        open_ids, open_weights = first + best, sums[best]
        first += len(sums)
    if not weights:
        return np.zeros(0, int), np.zeros(0, int), np.zeros(0)
    return np.concatenate(parents), np.concatenate(ranks), np.concatenate(weights)


def _rerank(parents, ranks, weights, chosen, budget):
    """Return paths, parents' rows and sums of the best chosen candidates, ties by path, parents first."""
    paths = {-1: ()}
    entries = []
    for node, parent, rank, weight in zip(
        *(array.tolist() for array in (chosen, parents[chosen], ranks[chosen], weights[chosen])), strict=True
    ):
        if parent in paths:  # a log-prob above 0 alone could lift a child over its parent
            paths[node] = (*paths[parent], rank)
            entries.append((-weight, paths[node]))
    rows, kept = {(): 0}, []
    for negated, path in sorted(entries):
        if len(kept) < budget and path[:-1] in rows:
            rows[path] = len(rows)
            kept.append((path, rows[path[:-1]], -negated))
    return tuple(zip(*kept, strict=True)) or ((), (), ())


def _counts(name, value):
    """Return a list of integers >= 1 out of a number, several, or text of them; UsageError otherwise."""
    try:
        given = value.split(",") if isinstance(value, str) else np.atleast_1d(value).tolist()
        counts = [int(each) for each in given]
        if not counts or min(counts) < 1 or any(float(each) != int(each) for each in given):
            raise ValueError
    except (TypeError, ValueError):
        raise UsageError(f"shape: beam: {name}: expected integers >= 1, found {value!r}") from None
    return counts
