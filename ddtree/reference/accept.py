"""The walk of the target's tokens down the tree, and the move of accepted cache rows into place.

Knows rows and tokens, not how the target chose them.
"""

import numpy as np

from ddtree.errors import CapacityError


def accept(parents, token_ids, target_tokens, num_nodes, out_path):
    """Follow the target from the root and return (length, bonus): rows on the path, the token after it.

    parents, token_ids and target_tokens i32 [N + 1], of which rows 0..num_nodes are read; out_path i32 [N + 1]
    gets the accepted rows, the root first, then -1. length >= 1; the round commits length tokens, the bonus
    included (DDTree, arXiv 2604.12989).
    """
    assert 0 <= num_nodes < len(parents) == len(token_ids) == len(target_tokens) == len(out_path)
    out_path[:] = -1
    row, length = 0, 0
    while True:
        out_path[length] = row
        length += 1
        token = target_tokens[row]
        later = slice(row + 1, num_nodes + 1)  # parents precede children
        matches = np.flatnonzero((parents[later] == row) & (token_ids[later] == token))
        if not matches.size:
            return length, int(token)
        row += 1 + int(matches[0])


def compact(caches, context_len, path):
    """Move cache rows context_len + path[j] to context_len + j in every cache; return how many rows moved.

    caches: arrays [capacity, width]; path: the accepted rows in strictly rising order, the root's 0 first. Rows
    already in place are not written. Raises CapacityError, before any write, for a row past a cache's end.
    """
    path = np.asarray(path, np.int64)
    assert context_len >= 0 and path.ndim == 1 and path.size and path[0] == 0 and (np.diff(path) > 0).all()
    in_place = int((path == np.arange(path.size)).sum())  # a prefix, since path rises strictly
    for index, cache in enumerate(caches):
        if context_len + path[-1] >= len(cache):
            row = context_len + int(path[-1])
            raise CapacityError(f"compact: row {row} of cache {index}, which has {len(cache)} rows")
    if in_place == path.size:
        return 0
    source = context_len + path[in_place:]
    target = slice(context_len + in_place, context_len + path.size)
    for cache in caches:
        cache[target] = cache[source]  # indexing by an array gathers a copy first, so overlap is harmless
    return path.size - in_place
