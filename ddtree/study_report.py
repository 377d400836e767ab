"""One page out of replayed rows: shapes by budget, the fastest of each, and whether a tree pays, here and at scale.

Speeds are acceptance over a measured cost of a round; the part about larger models is bytes from their configs. It runs
no model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddtree.errors import UsageError
from ddtree.study_cost import measured_cost
from ddtree.study_recordings import Recording
from ddtree.study_report_parts import Part
from ddtree.study_report_scale import scale_lines
from ddtree.study_summary import summarise


def read_rows(path: Path | str) -> list[dict[str, Any]]:
    """The rows that `study replay --out` wrote. UsageError for a file that holds something else."""
    try:
        rows = [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]
        if not rows or not all({"shape", "budget", "trace_sha256", "rounds"} <= set(row) for row in rows):
            raise ValueError("no rows of study replay")
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path}: expected the rows that study replay --out writes: {error}") from None
    return rows


def write_report(
    rows: Sequence[Mapping[str, Any]], folder: Path | str, recordings: Sequence[Recording] = ()
) -> Path:
    """Write report.md and its figures into `folder`; returns the page's path. UsageError without a round.

    With the `recordings` that the rows were replayed from, the drafter's siblings and calibration are shown besides.
    """
    summaries, folder = summarise(rows), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        "# Which draft tree pays",
        "",
        f"{len({row['trace_sha256'] for row in rows})} recordings, replayed. Acceptance counts the bonus token; its "
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
