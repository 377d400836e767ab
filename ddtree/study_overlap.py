"""How the rows of one forward share experts: distinct ones, and shared ones by how two rows stand in the tree.

Knows trees and gates, not the model that made them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddtree.tree import DraftTree

# How two rows of a tree stand to one another. An ancestor is further than the parent; cousins are of equal depth and
# other parents; a drafter that proposes by position gives many of them the same token.
RELATIONS = ("parent_child", "ancestor", "siblings", "cousins", "cousins_same_token", "unrelated")


@dataclass(frozen=True)
class RoundRouting:
    """One verify: its `rows` M, and over L MoE layers of E experts what they touched.

    `touched` i64[L] are distinct experts, `load` i64[L, E] the rows that each expert got, `pairs` i64[R] the pairs of
    rows of each of RELATIONS, `shared` i64[L, R] the experts that those pairs share, summed.
    """

    rows: int
    touched: np.ndarray
    load: np.ndarray
    pairs: np.ndarray
    shared: np.ndarray


def pair_relations(tree: DraftTree) -> np.ndarray:
    """i8[M, M], symmetric: the place in RELATIONS of what two rows are to one another; -1 for a row and itself."""
    rows, parents, depths = np.arange(len(tree.parents)), tree.parents, tree.depths
    visible, child = tree.visible, parents[:, None] == rows
    found = np.full(visible.shape, RELATIONS.index("unrelated"), np.int8)
    level = depths[:, None] == depths
    found[level] = RELATIONS.index("cousins")
    found[level & (tree.token_ids[:, None] == tree.token_ids)] = RELATIONS.index("cousins_same_token")
    found[parents[:, None] == parents] = RELATIONS.index("siblings")
    found[visible | visible.T] = RELATIONS.index("ancestor")
    found[child | child.T] = RELATIONS.index("parent_child")
    np.fill_diagonal(found, -1)
    return found


def round_routing(tree: DraftTree, chosen: np.ndarray) -> RoundRouting:
    """What one verify's rows touched; chosen bool[L, M, E] says which experts each row went to."""
    assert chosen.shape[1] == len(tree.parents), "a row of the tree is a row of the forward"
    first, second = np.triu_indices(chosen.shape[1], 1)
    relation = pair_relations(tree)[first, second]
    wide = chosen.astype(np.float32)
    both = (wide @ wide.transpose(0, 2, 1))[:, first, second]  # whole numbers: exact
    each = (relation == np.arange(len(RELATIONS))[:, None]).astype(np.float32)
    load = chosen.sum(axis=1)
    shared = np.rint(both @ each.T).astype(np.int64)
    return RoundRouting(
        chosen.shape[1], (load > 0).sum(axis=1), load, each.sum(axis=1).astype(np.int64), shared
    )
