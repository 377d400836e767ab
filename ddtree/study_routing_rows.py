"""What tells rows of `study routing` apart, so that an interrupted sweep goes on with its own and no other's."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from ddtree.study_journal import RowKind
from ddtree.study_overlap import RELATIONS

KEY = (
    *("target_sha256", "drafter_sha256", "prompt_sha256", "sequence", "backend", "max_new_tokens"),
    *("temperature", "top_k", "top_p", "seed", "shape", "budget", "layer", "version", "shape_sha256"),
)  # rows equal in these are equal
COUNTS = (
    *("rounds", "rounds_full", "rounds_full_outside_loops", "experts", "experts_per_token"),
    *(f"pairs_{name}" for name in RELATIONS),
)
MEANS = {
    **{f"touched_{name}": f"rounds_{name}" for name in ("full", "full_outside_loops")},
    **{f"shared_{name}": f"pairs_{name}" for name in RELATIONS},
}  # a mean, and of how many
NUMBERS = ("sequence", "max_new_tokens", "temperature", "top_k", "top_p", "seed", "budget", "layer")


def key_of(row: Mapping[str, Any]) -> tuple:
    """What a row is told by."""
    return tuple(row[name] for name in KEY)


def row_in(line: bytes) -> dict[str, Any] | None:
    """The row that a line of a file holds; None where it lacks, or has of another kind, what tells it and sums read.

    Nor is a row what holds a number that is not finite, which none is written with.
    """
    try:
        row = json.loads(line)
        json.dumps(row, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    whole = (
        isinstance(row, dict)
        and all(type(row.get(name)) in ((int, float) if name in NUMBERS else (str,)) for name in KEY)
        and all(is_count(row.get(name)) for name in COUNTS)
        and 0 < row["experts_per_token"] < row["experts"]
        and all(name in row and type(row[name]) in (float, type(None)) for name in MEANS)
        and all((row[mean] is None) == (row[count] == 0) for mean, count in MEANS.items())
        and isinstance(row.get("load"), list)
        and len(row["load"]) == row["experts"]
        and all(map(is_count, row["load"]))
    )
    return row if whole else None


def is_count(value: Any) -> bool:
    """Whether it is a whole number from 0 on that a float holds exactly; a truth value is none."""
    return type(value) is int and 0 <= value < 2**53


def difference(key: tuple, wanted: Collection[tuple]) -> str:
    """Why a row of that key is none of a sweep's: the first of KEY in which none of them is like it."""
    for place, name in enumerate(KEY):
        wanted = [other for other in wanted if other[place] == key[place]]
        if not wanted:
            return f"no decode of this sweep has {name.replace('_', ' ')} {key[place]} there"
    raise AssertionError("the key is one of the sweep's")


ROUTED = RowKind("study routing", row_in, key_of, difference)
