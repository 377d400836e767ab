"""The files that `ddtree plot` is given: traces and documents told apart, and the runs that options choose."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddtree.compare import name_of_method
from ddtree.errors import UsageError
from ddtree.trace import TraceRun, read_trace

Setting = tuple[str, int, float]  # method, budget, temperature


@dataclass
class Inputs:
    """What was read: `runs` and `headers` of traces, result `documents` and the paths of those, all `paths`, and the
    command's options.
    """

    paths: list[str]
    headers: list[dict[str, Any]]
    runs: list[TraceRun]
    documents: list[dict[str, Any]]
    options: dict[str, Any]
    document_paths: list[str] = field(default_factory=list)

    def by_setting(self) -> dict[Setting, list[TraceRun]]:
        """The runs that the options choose, by method, budget and temperature, in the trace's order."""
        found: dict[Setting, list[TraceRun]] = defaultdict(list)
        for run in self.runs:
            setting = setting_of(run)
            if self._chosen(*setting):
                found[setting].append(run)
        for setting, runs in found.items():
            shapes = {run.settings.get("shape") for run in runs} if setting[0] == "tree" else ()
            if len(shapes) > 1:
                shown = ", ".join(sorted(map(str, shapes)))
                raise UsageError(
                    f"{name_of(setting)}: there are trees of several shapes ({shown}): plot each alone"
                )
        if not found:
            raise UsageError("there is no trace with a run as asked for")
        return dict(found)

    def one_setting(
        self, budget_near: int | None = None, method: str = "tree"
    ) -> tuple[Setting, list[TraceRun]]:
        """The runs of one setting: of the method, at the largest budget or nearest the given; one temperature.

        UsageError where there is none, or where the temperature is left open.
        """
        method = self.options["method"] or method
        found = {setting: runs for setting, runs in self.by_setting().items() if setting[0] == method}
        if not found:
            raise UsageError(f"the trace has no run of method {method} as asked for")
        one_temperature({temperature for _, _, temperature in found})
        best = max(found, key=lambda s: s[1] if budget_near is None else -abs(s[1] - budget_near))
        return best, found[best]

    def records(self) -> list[dict[str, Any]]:
        """The rows of comparisons and decode benches that the options choose; UsageError without one."""
        found = [row for document in self.documents for row in _rows_of(document)]
        found = [row for row in found if self._chosen(row["method"], None, row["temperature"])]
        if not found:
            raise UsageError(
                "expected the document of compare --json or bench decode --json, with a row as asked for"
            )
        return found

    def document(self, kind: str) -> list[dict[str, Any]]:
        """The documents of one kind; UsageError without one."""
        found = [document for document in self.documents if document.get("kind") == kind]
        if not found:
            raise UsageError(f"expected a document of kind {kind!r}")
        return found

    def named(self, prefix: str) -> list[tuple[str, dict[str, Any]]]:
        """The documents by their files' names without `prefix` and suffix; by their paths where two have one name."""
        stems = [Path(path).stem.removeprefix(prefix) for path in self.document_paths]
        names = [
            stem if stems.count(stem) == 1 else path
            for stem, path in zip(stems, self.document_paths, strict=True)
        ]
        return list(zip(names, self.documents, strict=True))

    def _chosen(self, method: str, budget: int | None, temperature: float) -> bool:
        asked = (
            (self.options[name], value) for name, value in (("method", method), ("temperature", temperature))
        )
        budget_asked = self.options["budget"]
        fits = budget is None or budget_asked in (None, budget) or method == "ar"
        return fits and all(want in (None, value) for want, value in asked)


def one_temperature(temperatures: set[float]) -> float:
    """The only one; UsageError where there are several."""
    if len(temperatures) > 1:
        shown = ", ".join(f"{t:g}" for t in sorted(temperatures))
        raise UsageError(f"it holds the temperatures {shown}: choose one with --temperature")
    return next(iter(temperatures))


def setting_of(run: TraceRun) -> Setting:
    """Method, budget and temperature of a run."""
    settings = run.settings
    return settings["method"], settings["budget"], settings["sampling"]["temperature"]


def name_of(setting: Setting) -> str:
    """A setting in words: `tree 16, greedy`."""
    method, budget, temperature = setting
    where = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    return f"{method}{f' {budget}' if method != 'ar' else ''}, {where}"


def shape_of(runs: Sequence[TraceRun]) -> str:
    """The shape of one setting's trees; of other methods best_first, which their tables are for."""
    settings = runs[0].settings
    return settings.get("shape", "best_first") if settings["method"] == "tree" else "best_first"


def name_of_runs(setting: Setting, runs: Sequence[TraceRun]) -> str:
    """The setting of some runs in words, with the shape of their trees unless that is best_first."""
    method, budget, temperature = setting
    return name_of((name_of_method({"method": method, "shape": shape_of(runs)}), budget, temperature))


def rounds_of(runs: Sequence[TraceRun]) -> list[dict[str, Any]]:
    """The rounds of runs, one decode after another."""
    return [this for run in runs for this in run.rounds]


def _rows_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    rows = document.get("rows", [])
    return (
        rows
        if isinstance(rows, list) and all(isinstance(row, dict) and "method" in row for row in rows)
        else []
    )


def read_inputs(paths: Sequence[str], options: dict[str, Any]) -> Inputs:
    """Read every file; UsageError names the first that is neither a trace nor a JSON document."""
    inputs = Inputs(list(paths), [], [], [], options)
    for path in paths:
        document = _document(path)
        if document is None:
            header, runs = read_trace(path)
            inputs.headers.append(header)
            inputs.runs += runs
        else:
            inputs.documents.append(document)
            inputs.document_paths.append(path)
    return inputs


def _document(path: str) -> dict[str, Any] | None:
    """A JSON document, a bare list or JSON Lines of rows as one; None for what its first line shows to be a trace."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot read it: {error}") from None
    try:
        first = json.loads(text.split("\n", 1)[0])
    except (ValueError, RecursionError):
        first = None
    if isinstance(first, dict) and first.get("type") == "header":
        return None
    try:
        document = (
            _rows_by_line(text) if isinstance(first, dict) and "\n" in text.strip() else json.loads(text)
        )
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: neither a trace nor a JSON document: {error}") from None
    document = {"rows": document} if isinstance(document, list) else document
    if not isinstance(document, dict):
        raise UsageError(f"{path}: neither a trace nor a JSON document, but a bare {type(document).__name__}")
    return document


def _rows_by_line(text: str) -> list[Any]:
    """The rows of JSON Lines, what `study` writes with --out."""
    return [json.loads(line) for line in text.splitlines()]
