"""Rounds made by hand, as a trace holds them."""

import math

import numpy as np

from ddtree.tree import DraftTree

# Two depths of three candidates: 0.5, 0.3, 0.2 and 0.6, 0.3, 0.1
TABLE = (
    np.array([[10, 11, 12], [20, 21, 22]], np.int32),
    np.log(np.array([[0.5, 0.3, 0.2], [0.6, 0.3, 0.1]], np.float32)),
)


def tree_of(parents, tokens, probabilities):
    """A DraftTree of root 0 from its nodes' parents, tokens and path probabilities."""
    parents = np.array([-1, *parents], np.int32)
    depths = np.zeros(len(parents), np.int32)
    for row in range(1, len(parents)):
        depths[row] = depths[parents[row]] + 1
    weights = np.array([0.0, *map(math.log, probabilities)])
    return DraftTree(np.array([0, *tokens], np.int32), parents, depths, weights).validate()


def round_of(index, tokens, tree=None, path=(0,), table=TABLE):
    """A round as a trace holds it."""
    record = {
        "index": index,
        "tree": (tree or DraftTree.root_only(0)).to_json(),
        "path": list(path),
        "bonus": tokens[-1],
        "tokens": tokens,
        "seconds": {},
    }
    if table is not None:
        record["table"] = {"token_ids": table[0].tolist(), "log_probs": table[1].tolist()}
    return record
