"""What the tests of top-k, tree building, branches, accept and compact share: guarded outputs, and NumPy twins.

The twins' results come back in the launchers' form here and nowhere else.
"""

import json
from pathlib import Path

import numpy as np
from kernels.device import poisoned, to_device, to_host

from ddtree.reference import accept as accept_twin
from ddtree.reference import branch_scores as branch_twin
from ddtree.reference import topk as topk_twin
from ddtree.reference import tree_build as tree_twin

TREES = Path(__file__).parents[1] / "fixtures" / "trees"
CASES = json.loads((TREES / "trees.json").read_text())["cases"]
GUARD = 8  # elements before and after each output that must stay as they were


class Guarded:
    """A poisoned device array of a shape, with poisoned elements before and after it."""

    def __init__(self, shape, dtype):
        self.size = int(np.prod(shape))
        self.memory = poisoned(self.size + 2 * GUARD, dtype)
        self.array = self.memory[GUARD : GUARD + self.size].reshape(shape)

    def read(self):
        """The array on the host, once the guards are seen to be untouched."""
        memory = to_host(self.memory)
        outside = np.concatenate((memory[:GUARD], memory[-GUARD:]))
        assert set(outside.tobytes()) == {0xFF}, "wrote outside its array"
        return memory[GUARD:-GUARD].reshape(self.array.shape)


def between_poison(array):
    """A device copy of an array with poison before and after it."""
    if not array.size:
        return to_device(array)
    memory = to_host(poisoned(array.size + 2 * GUARD, array.dtype))
    memory[GUARD : GUARD + array.size] = array.reshape(-1)
    return to_device(memory)[GUARD : GUARD + array.size].reshape(array.shape)


def topk_log_softmax(logits, k):
    """The twin's (token_ids, log_probs)."""
    token_ids, log_probs = np.empty((len(logits), k), np.int32), np.empty((len(logits), k), np.float32)
    with np.errstate(all="ignore"):
        topk_twin.topk_log_softmax(logits, k, token_ids, log_probs)
    return token_ids, log_probs


TREE_OUTPUTS = ("token_ids", "parents", "depths", "log_weights", "lineage", "num_nodes")


def tree_shapes(budget, depths):
    """Shape and dtype of each of a tree's outputs."""
    rows = ((budget + 1,), np.int32)
    lineage = ((budget + 1, depths + 1), np.int32)
    return dict(
        zip(
            TREE_OUTPUTS,
            (rows, rows, rows, ((budget + 1,), np.float64), lineage, ((1,), np.int32)),
            strict=True,
        )
    )


def build_tree(token_ids, log_probs, budget, max_depth):
    """The twin's outputs by name, the root's token poisoned."""
    return _tree(tree_twin.build_tree, (token_ids, log_probs), budget, max_depth)


def build_branch_tree(token_ids, places, log_probs, budget, max_depth):
    """The same of the branch-aware tree."""
    return _tree(tree_twin.build_branch_tree, (token_ids, places, log_probs), budget, max_depth)


def _tree(build, table, budget, max_depth):
    out = {name: np.empty(*form) for name, form in tree_shapes(budget, len(table[0])).items()}
    out["token_ids"][0] = -1
    arrays = [out[name] for name in TREE_OUTPUTS[:-1]]
    out["num_nodes"][0] = build(*table, budget, max_depth, *arrays)
    return out


def branch_scores(token_ids, log_probs, *more):
    """The twin's (places, log_probs), [L, P, P]."""
    shape = *token_ids.shape, token_ids.shape[1]
    places, sorted_log_probs = np.empty(shape, np.int32), np.empty(shape, np.float32)
    branch_twin.branch_scores(token_ids, log_probs, *more, places, sorted_log_probs)
    return places, sorted_log_probs


def accept(parents, token_ids, target_tokens, num_nodes):
    """The twin's (path, result)."""
    path = np.empty(len(parents), np.int32)
    return path, np.array(accept_twin.accept(parents, token_ids, target_tokens, num_nodes, path), np.int32)


def compact(cache, context_len, path):
    """A copy of cache [layers, capacity, width] as the twin leaves it."""
    moved = cache.copy()
    accept_twin.compact(list(moved), context_len, path)
    return moved


def fixture_table(arrays, case):
    """The table of a published case: (token_ids, log_probs), empty where the fixture keeps none."""
    if f"{case['id']}_top_log_probs" not in arrays:
        return np.zeros((case["depth"], 0), np.int32), np.zeros((case["depth"], 0), np.float32)
    return arrays[f"{case['id']}_top_token_ids"], arrays[f"{case['id']}_top_log_probs"]
