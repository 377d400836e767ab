"""Recorded rounds as studies read them: live `Round` objects and a trace's dicts alike, with what really followed.

Rounds are given as one sequence, a decode after another: a decode's later rounds are the continuation that an earlier
round's draft is held to. Nothing here runs a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddtree.errors import UsageError
from ddtree.rounds import Round
from ddtree.tree import DraftTree

NO_TABLE = "rounds: none holds the drafter's top-K table; record the trace with tables, on the backend numpy"

AnyRound = Round | dict[str, Any]


@dataclass(frozen=True)
class Seen:
    """One round after the prefill: its tree, accepted rows (root first), and the tokens that really followed its root.

    `bonus` is the target's token after the path; `table` the drafter's (token_ids i32[L, K], log_probs f32[L, K]) or
    None; `tokens` those the round committed, the bonus token included; `seconds` are by stage; `conditional` is what a
    branch head said of the table's columns below each parent, f32[L, P, P] or None.
    """

    index: int
    tree: DraftTree
    path: np.ndarray
    bonus: int
    continuation: np.ndarray
    table: tuple[np.ndarray, np.ndarray] | None
    tokens: tuple[int, ...]
    seconds: dict[str, float]
    conditional: np.ndarray | None = None


def seen_rounds(rounds: Iterable[AnyRound]) -> list[Seen]:
    """The rounds but the prefills; a continuation ends where its decode does.

    A decode ends where the next index is not one more than the last. Raises UsageError naming what a record lacks.
    """
    found: list[Seen] = []
    for decode in _decodes(rounds):
        after = np.concatenate([np.asarray(_field(this, "tokens"), np.int64) for this in decode])
        at = 0
        for this in decode:
            if _field(this, "index") > 0:
                found.append(_seen(this, after[at:]))
            at += len(_field(this, "tokens"))
    return found


def _decodes(rounds: Iterable[AnyRound]) -> list[list[AnyRound]]:
    decodes: list[list[AnyRound]] = []
    last = None
    for this in rounds:
        index = _field(this, "index")
        if last is None or index != last + 1:
            decodes.append([])
        decodes[-1].append(this)
        last = index
    return decodes


def _field(this: AnyRound, name: str) -> Any:
    if not isinstance(this, dict):
        return getattr(this, name)
    if name not in this:
        raise UsageError(f"rounds: round {this.get('index', '?')} has no {name!r}")
    return this[name]


def _seen(this: AnyRound, continuation: np.ndarray) -> Seen:
    tree = _field(this, "tree")
    table, conditional = (
        this.get(name) if isinstance(this, dict) else getattr(this, name) for name in ("table", "conditional")
    )
    if isinstance(tree, dict):
        tree = DraftTree.from_json(tree)
    if isinstance(table, dict):
        if "conditional" in table:
            conditional = _log_probs(table["conditional"])
        table = np.array(table["token_ids"], np.int32), _log_probs(table["log_probs"])
    path, tokens = np.asarray(_field(this, "path")), tuple(_field(this, "tokens"))
    return Seen(
        _field(this, "index"),
        tree,
        path,
        _field(this, "bonus"),
        continuation,
        table,
        tokens,
        _field(this, "seconds"),
        conditional,
    )


def _log_probs(values: list) -> np.ndarray:
    """f32 of a trace's lists, where null stood for what is not finite: -inf."""
    numbers = np.array(values, float)  # null becomes NaN
    return np.where(np.isnan(numbers), -np.inf, numbers).astype(np.float32)


def with_tables(rounds: Iterable[AnyRound]) -> list[Seen]:
    """Those of `seen_rounds` that hold a table; UsageError when none does."""
    found = [this for this in seen_rounds(rounds) if this.table is not None]
    if not found:
        raise UsageError(NO_TABLE)
    return found


def departure(tree: DraftTree, path: Sequence[int]) -> tuple[int, int]:
    """How telling a round is: times its path left a first child (two at most count), then the path's length."""
    off_spine = sum(bool((tree.parents[1:row] == tree.parents[row]).any()) for row in path[1:])
    return min(off_spine, 2), len(path)
