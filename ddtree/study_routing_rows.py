"""What tells rows of `study routing` apart, so that an interrupted sweep goes on with its own and no other's."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from ddtree.study_journal import RowKind

KEY = (
    *("target_sha256", "drafter_sha256", "prompt_sha256", "sequence", "backend", "max_new_tokens"),
    *("temperature", "top_k", "top_p", "seed", "shape", "budget", "layer", "version", "shape_sha256"),
)  # rows equal in these are equal
NUMBERS = ("sequence", "max_new_tokens", "temperature", "top_k", "top_p", "seed", "budget", "layer")


def key_of(row: Mapping[str, Any]) -> tuple:
    """What a row is told by."""
    return tuple(row[name] for name in KEY)


def row_in(line: bytes) -> dict[str, Any] | None:
    """The row that a line of a file holds; None where it lacks, or has of another kind, what tells it and sums read."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = (
        isinstance(row, dict)
        and all(type(row.get(name)) in ((int, float) if name in NUMBERS else (str,)) for name in KEY)
        and all(type(row.get(name)) is int for name in ("rounds", "rounds_full", "rounds_full_outside_loops"))
        and isinstance(row.get("load"), list)
    )
    return row if whole else None


def difference(key: tuple, wanted: Collection[tuple]) -> str:
    """Why a row of that key is none of a sweep's: the first of KEY in which none of them is like it."""
    for place, name in enumerate(KEY):
        wanted = [other for other in wanted if other[place] == key[place]]
        if not wanted:
            return f"no decode of this sweep has {name.replace('_', ' ')} {key[place]} there"
    raise AssertionError("the key is one of the sweep's")


ROUTED = RowKind("study routing", row_in, key_of, difference)
