"""The document of `study routing --json`: what trees touch and share as one table, written and read back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from ddtree.errors import UsageError
from ddtree.study_experts import Sharing, summarise_routing
from ddtree.study_overlap import RELATIONS
from ddtree.study_routing_rows import is_count

KIND = "ddtree routing summary"
# Of a document's table: the fields of a Sharing, `shared` by RELATIONS, then each one's interval
PLAIN = tuple(field.name for field in fields(Sharing) if not field.name.startswith("shared"))
SHARED = tuple(f"shared_{name}" for name in RELATIONS)
ENDS = tuple(f"{name}_{end}" for name in SHARED for end in ("low", "high"))
COLUMNS = {2: (*PLAIN, *SHARED), 3: (*PLAIN, *SHARED, *ENDS)}  # by schema
NUMBERS = (
    *("temperature", "touched", "touched_low", "touched_high"),
    *("independent", "by_load", "by_prompt_load"),
)  # that every row has
MAYBE = ("effective", "effective_low", "effective_high", "touched_outside_loops")


def routing_summary(sharing: Sequence[Sharing], about: Mapping[str, Any]) -> dict[str, Any]:
    """The document of a summary, its numbers to five digits; `about` says how it was made.

    `sharing` is a table with `columns` and `data`, a row each, as `pandas.DataFrame(**document["sharing"])` takes it.
    """
    data = [[_short(value) for value in _row_of(each)] for each in sharing]
    table = {"columns": list(COLUMNS[3]), "data": data}
    return {"schema": 3, "kind": KIND} | dict(about) | {"sharing": table}


def read_summary(document: Mapping[str, Any]) -> list[Sharing]:
    """What `routing_summary` was made of, to five digits; UsageError for another document or schema, or a damaged row.

    A document of schema 2 has no intervals of what rows share: None.
    """
    about = document if isinstance(document, Mapping) else {}
    kind, schema, table = (about.get(name) for name in ("kind", "schema", "sharing"))
    columns = COLUMNS.get(schema) if type(schema) is int else None
    if kind != KIND or columns is None:
        raise UsageError(
            f"routing: expected a document of kind {KIND!r}, schema 2 or 3, found {kind!r}, {schema!r}"
        )
    if (
        not isinstance(table, Mapping)
        or table.get("columns") != list(columns)
        or type(table.get("data")) is not list
    ):
        raise UsageError(f"routing: expected a table `sharing` with the columns of schema {schema} and data")
    for row in table["data"]:
        if (
            type(row) is not list
            or len(row) != len(columns)
            or not _is_sharing(dict(zip(columns, row, strict=True)))
        ):
            raise UsageError(f"routing: a row that no summary holds: {str(row)[:80]}")
    return [_sharing_of(row) for row in table["data"]]


def sharing_by_model(documents: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, list[Sharing]]:
    """What named documents hold of routing, rows of `study routing` or summaries, by model.

    A model is told by its sha256 and its router, and has the name of its first document; others of it, say of other
    budgets, are put together with that one. Documents of anything else are left out. UsageError for rows of several
    models or sweeps, and as in `read_summary`.
    """
    names: dict[tuple, str] = {}
    rows, summaries = defaultdict(list), defaultdict(list)
    for name, document in documents:
        listed = document["rows"] if isinstance(document.get("rows"), list) else [document]
        found = [row for row in listed if "touched_full" in row]
        read = read_summary(document) if document.get("kind") == KIND else []
        if found:
            model = found[0].get("target_sha256"), found[0]["experts"], found[0]["experts_per_token"]
        elif read:
            sha256 = document.get("model_sha256", {}).get("target")
            model = sha256, read[0].experts, read[0].experts_per_token
        else:
            continue
        names.setdefault(model, name)
        rows[model] += found
        summaries[model] += read
    return {
        name: [*(summarise_routing(rows[model]) if rows[model] else []), *summaries[model]]
        for model, name in names.items()
    }


def _is_sharing(row: Mapping[str, Any]) -> bool:
    """Whether the values of a table's row are of their kinds."""
    counts = [row[name] for name in ("budget", "experts", "experts_per_token", "prompts", "rounds", "rows")]
    known = [row[name] for name in NUMBERS]
    some = [row[name] for name in (*MAYBE, *SHARED)]
    ends = [(row[name], row[f"{name}_low"], row[f"{name}_high"]) for name in SHARED if f"{name}_low" in row]
    return (
        type(row["shape"]) is str
        and (row["layer"] is None or is_count(row["layer"]))
        and all(map(is_count, counts))
        and 0 < row["experts_per_token"] < row["experts"]
        and all(map(_is_number, known))
        and all(value is None or _is_number(value) for value in some)
        and all(
            (low is None and high is None)
            or (value is not None and _is_number(low) and _is_number(high) and low <= high)
            for value, low, high in ends
        )
    )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 2.0**53


def _sharing_of(row: Sequence[Any]) -> Sharing:
    plain, shared, ends = row[: len(PLAIN)], row[len(PLAIN) :][: len(SHARED)], row[len(PLAIN) + len(SHARED) :]
    pairs = [None if low is None else (low, high) for low, high in zip(ends[::2], ends[1::2], strict=True)]
    intervals = pairs or [None] * len(SHARED)
    return Sharing(
        *plain,
        shared=dict(zip(RELATIONS, shared, strict=True)),
        shared_interval=dict(zip(RELATIONS, intervals, strict=True)),
    )


def _row_of(each: Sharing) -> list[Any]:
    ends = [end for pair in each.shared_interval.values() for end in (pair or (None, None))]
    return [*(getattr(each, name) for name in PLAIN), *each.shared.values(), *ends]


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value
