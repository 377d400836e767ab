"""ForwardBatch: the rows of one forward call. Prefill, decode and verify are three ways to fill it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddtree.tree import DraftTree, visible_rows


@dataclass(frozen=True)
class ForwardBatch:
    """M rows on top of `context_len` committed ones; row i stands at position context_len + depths[i].

    token_ids and depths i32[M]; lineage i32[M, D] holds row i's ancestor at each depth, itself at its own, -1 beyond.
    """

    token_ids: np.ndarray
    depths: np.ndarray
    lineage: np.ndarray
    context_len: int

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    @property
    def positions(self) -> np.ndarray:
        return self.context_len + self.depths

    @property
    def visible(self) -> np.ndarray:
        """bool[M, M]: row i attends to row j."""
        return visible_rows(self.lineage)


def chain_batch(token_ids: np.ndarray, context_len: int) -> ForwardBatch:
    """A causal chain: a prompt, a chunk of one, or (with one token) a decode step."""
    count = len(token_ids)
    row = np.arange(count, dtype=np.int32)
    lineage = np.where(row[None, :] <= row[:, None], row[None, :], np.int32(-1))
    return ForwardBatch(np.asarray(token_ids, np.int32), row, lineage, context_len)


def tree_batch(tree: DraftTree, context_len: int) -> ForwardBatch:
    """The rows of a draft tree, the root first."""
    return ForwardBatch(tree.token_ids, tree.depths, tree.lineage(), context_len)
