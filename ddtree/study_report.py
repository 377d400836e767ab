"""One page out of replayed rows: shapes by budget, the fastest of each, and whether a tree pays, here and at scale.

Speeds are acceptance over a measured cost of a round; the part about larger models is bytes from their configs. It runs
no model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddtree.errors import UsageError
from ddtree.lab import counted
from ddtree.study_cost import measured_cost
from ddtree.study_recordings import Recording
from ddtree.study_report_parts import Part
from ddtree.study_report_scale import scale_lines
from ddtree.study_rows import key_of, row_in
from ddtree.study_summary import summarise

EXPECTED = "expected the rows that study replay --out writes"


def read_rows(path: Path | str) -> list[dict[str, Any]]:
    """The rows that `study replay --out` wrote, of one file or of several put together: equal ones count once.

    UsageError for a file that holds something else, for the same setting by another version or shape, and for two
    recordings of one prompt and temperature: an interval over prompts would count them as two prompts.
    """
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {EXPECTED}: {getattr(error, 'strerror', None) or error}") from None
    found: dict[tuple, dict[str, Any]] = {}
    prompts: dict[tuple, str] = {}
    for number, line in enumerate(lines, 1):
        row = row_in(line)
        if row is None:
            raise UsageError(f"{path}: line {number}: {EXPECTED}")
        setting, made_by = key_of(row)[:4], key_of(row)[4:]
        if key_of(found.setdefault(setting, row))[4:] != made_by:
            raise UsageError(
                f"{path}: line {number}: another version or shape made an earlier row of this setting"
            )
        prompt = row["temperature"], row["sequence"], row["prompt"]
        if prompts.setdefault(prompt, row["trace_sha256"]) != row["trace_sha256"]:
            raise UsageError(
                f"{path}: line {number}: another recording of prompt {row['prompt']} at temperature "
                f"{row['temperature']:g}; report on each recording by itself"
            )
    if not found:
        raise UsageError(f"{path}: {EXPECTED}: it is empty")
    return list(found.values())


def _check_alike(rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise UsageError unless all settings of a temperature have rows of the same recordings: they are compared."""
    by_temperature: dict[float, dict[tuple, set[str]]] = defaultdict(lambda: defaultdict(set))
    for row in rows:
        setting = row["shape"], row["budget"], row["depth"]
        by_temperature[row["temperature"]][setting].add(row["trace_sha256"])
    for temperature, settings in by_temperature.items():
        most = set().union(*settings.values())
        for (shape, budget, depth), traces in settings.items():
            if traces != most:
                raise UsageError(
                    f"rows: shape {shape}, budget {budget}, depth {depth}, temperature {temperature:g} has "
                    f"{len(traces)} of {len(most)} prompts; replay all settings on the same recordings"
                )


def write_report(
    rows: Sequence[Mapping[str, Any]], folder: Path | str, recordings: Sequence[Recording] = ()
) -> Path:
    """Write report.md and its figures into `folder`; returns the page's path.

    With the `recordings` that the rows were replayed from, the drafter's siblings and calibration are shown besides;
    others among them are left out. UsageError without a round, for settings replayed on unlike prompts, where a row's
    recording is none of them, and for a folder that cannot be made.
    """
    summaries, folder = summarise(rows), Path(folder)
    _check_alike(rows)
    traces = {row["trace_sha256"] for row in rows}
    if recordings and not traces <= {each.sha256 for each in recordings}:
        raise UsageError(
            f"{recordings[0].path.parent}: the rows were replayed from other recordings than these"
        )
    recordings = [each for each in recordings if each.sha256 in traces]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: cannot make the folder: {error.strerror}") from None
    lines = [
        "# Which draft tree pays",
        "",
        f"{counted(len(traces), 'recording')}, replayed. Acceptance counts the bonus token; its "
        "interval (95%) is over prompts, by bootstrap.",
        "",
    ]
    for temperature in sorted({each.temperature for each in summaries}):
        mine = [each for each in recordings if each.temperature == temperature]
        part = Part(
            [row for row in rows if row["temperature"] == temperature],
            [each for each in summaries if each.temperature == temperature],
            measured_cost(temperature),
            f"temperature {temperature:g}",
            f"t{temperature:g}",
        )
        lines += [f"## Temperature {temperature:g}", "", *part.lines(folder, mine)]
    lines += scale_lines(summaries)
    page = folder / "report.md"
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return page
