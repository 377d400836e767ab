"""Recordings as the rounds that a decode of them would have had: what figures and tables of rounds take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ddtree.study_recordings import Recording
from ddtree.study_replay import replay_rounds
from ddtree.tree import DraftTree


def recorded_rounds(recordings: Iterable[Recording], shape: str, budget: int) -> Iterator[dict[str, Any]]:
    """Each recording's prefill and rounds of that shape and budget, in order, as `ddtree.study_rounds` reads them.

    A round that wants one token alone drafts nothing and has no table. Raises what `replay_rounds` raises.
    """
    for recording in recordings:
        yield {"index": 0, "tokens": recording.tokens[:1]}
        for index, this in enumerate(replay_rounds(recording, shape, budget), 1):
            yield {
                "index": index,
                "tree": this.tree,
                "path": accepted_path(this.tree, this.tokens),
                "bonus": int(this.tokens[-1]),
                "tokens": this.tokens,
                **_tables(recording, this.root),
                "seconds": {},
            }


def _tables(recording: Recording, root: int) -> dict[str, Any]:
    """The table at a root, and what a branch head says of it; None where nothing is drafted."""
    drafted = recording.max_depth(root) > 0
    scored = drafted and recording.conditional is not None
    return {
        "table": recording.table(root) if drafted else None,
        "conditional": recording.conditional[root] if scored else None,
    }


def accepted_path(tree: DraftTree, tokens: np.ndarray) -> np.ndarray:
    """The rows, root first, that carry all `tokens` of a round but the last, which is the bonus token."""
    path = [0]
    for token in tokens[:-1]:
        children = np.flatnonzero((tree.parents == path[-1]) & (tree.token_ids == token))
        path.append(int(children[-1]))  # the root has parent -1, so it is nobody's child
    return np.array(path)
