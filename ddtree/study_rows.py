"""Rows of replays: what one is told by, its columns, its file of JSON Lines, and sums over prompts."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ddtree.errors import UsageError
from ddtree.shapes import get_shape
from ddtree.shapes.fixed import TEMPLATES
from ddtree.study_recordings import Recording

KEY = ("trace_sha256", "shape", "budget", "depth", "version", "shape_sha256")  # rows equal in these are equal

TEXTS = ("shape", "prompt", "kind", "trace_sha256", "version", "shape_sha256")
COUNTS = (
    *("budget", "depth", "sequence", "rounds", "tokens", "nodes", "loop_tokens"),
    *("rounds_inside_loops", "tokens_inside_loops", "rounds_outside_loops", "tokens_outside_loops"),
)

Setting = tuple[str, int, int]  # shape, budget, depth
Counts = tuple[int, int, int, int]  # rounds, nodes, rounds inside loops and their tokens


def shape_sha256(shape: str, context: Mapping[str, Any] | None = None) -> str:
    """The sha256 of a shape's own code, the module that defines it, and of the file after its colon, if one is there.

    Without a colon the files that its `make` takes by default count. What it imports, and the context, are not in it.
    UsageError as in `get_shape`.
    """
    build = get_shape(shape, continuation=[0], **(context or {}))
    name = getattr(build, "__module__", None) or type(build).__module__
    module, (_, colon, value) = sys.modules.get(name), shape.partition(":")
    defaults = getattr(getattr(module, "make", None), "__defaults__", None) or ()
    files = [value, TEMPLATES / f"{value}.json"] if colon else [p for p in defaults if isinstance(p, Path)]
    digest = hashlib.sha256()
    for path in (getattr(module, "__file__", None), *files):
        try:
            content = Path(path or "").read_bytes()
        except (OSError, ValueError):  # no file: a built-in's module, a number after the colon
            continue
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()


def row_of(
    recording: Recording, setting: Setting, counts: Counts, made_by: Mapping[str, str]
) -> dict[str, Any]:
    """What one replay amounts to; tokens count the first, which the prefill gives. Lengths count the bonus token.

    `made_by` holds the row's version and shape_sha256.
    """
    shape, budget, depth = setting
    rounds, nodes, inside, inside_tokens = counts
    committed = len(recording.tokens) - 1

    def mean(total: int, count: int) -> float | None:
        return total / count if count else None

    return {
        "shape": shape,
        "budget": budget,
        "depth": depth,
        "temperature": recording.temperature,
        "prompt": recording.prompt,
        "kind": recording.kind,
        "sequence": recording.sequence,
        "rounds": rounds,
        "tokens": len(recording.tokens),
        "mean_acceptance": mean(committed, rounds),
        "nodes": nodes,
        "nodes_per_round": mean(nodes, rounds),
        "loop_tokens": int(recording.looping.sum()),
        "rounds_inside_loops": inside,
        "tokens_inside_loops": inside_tokens,
        "mean_acceptance_inside_loops": mean(inside_tokens, inside),
        "rounds_outside_loops": rounds - inside,
        "tokens_outside_loops": committed - inside_tokens,
        "mean_acceptance_outside_loops": mean(committed - inside_tokens, rounds - inside),
        "trace_sha256": recording.sha256,
        **made_by,
    }


def row_in(line: str | bytes) -> dict[str, Any] | None:
    """The row that a line of a file holds; None where it lacks, or has of another kind, what sums and keys read."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = (
        isinstance(row, dict)
        and all(isinstance(row.get(name), str) for name in TEXTS)
        and all(type(row.get(name)) is int and row[name] >= 0 for name in COUNTS)
        and type(row.get("temperature")) in (int, float)
    )
    return row if whole else None


def key_of(row: Mapping[str, Any]) -> tuple:
    """What a row is told by."""
    return tuple(row[name] for name in KEY)


def totals(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows summed over prompts, for each shape, budget, depth and temperature; means weigh rounds equally."""
    keys = ("temperature", "shape", "budget", "depth")
    counts = ("rounds", "tokens", "nodes", "rounds_outside_loops", "tokens_outside_loops")
    sums: dict[tuple, dict[str, Any]] = {}
    for row in rows:
        key = tuple(row[name] for name in keys)
        total = sums.setdefault(
            key, dict(zip(keys, key, strict=True)) | dict.fromkeys((*counts, "prompts"), 0)
        )
        total["prompts"] += 1
        for name in counts:
            total[name] += row[name]
    for total in sums.values():
        rounds, outside = total["rounds"], total["rounds_outside_loops"]
        total["mean_acceptance"] = (total["tokens"] - total["prompts"]) / rounds if rounds else None
        total["nodes_per_round"] = total["nodes"] / rounds if rounds else None
        total["mean_acceptance_outside_loops"] = total["tokens_outside_loops"] / outside if outside else None
    return list(sums.values())


def line_of(row: Mapping[str, Any]) -> str:
    """A row's line of a file."""
    return json.dumps(row, allow_nan=False) + "\n"


def write_rows(path: Path | str, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as JSON Lines to a file that replaces `path` when it is whole; UsageError if it cannot."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp") if path.name else path
    if path.exists() and not path.is_file():
        raise UsageError(f"{path}: cannot write the rows: it is no regular file")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.writelines(map(line_of, rows))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(f"{path}: cannot write the rows: {error.strerror}") from None
