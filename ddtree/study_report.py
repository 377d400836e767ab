"""One page out of replayed rows: shapes by budget, the fastest of each, and whether a tree pays, here and at scale.

Speeds are acceptance over a measured cost of a round; the part about larger models is bytes from their configs. It runs
no model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddtree.bundle import DATA
from ddtree.config import ModelConfig
from ddtree.errors import UsageError
from ddtree.plots_shapes import label_of_shape, shape_curves
from ddtree.study_analytic import WeightBytes, expected_experts, forward_bytes
from ddtree.study_cost import CostCurve, cost_curve, points_of_records
from ddtree.study_summary import Summary, best_of, summarise

MEASURED = DATA / "results" / "h200" / "decode.json"
SCALE_CONTEXT = 8192
SCALE = {
    "random-4.8b": WeightBytes(),
    "deepseek-v3": WeightBytes(1, 1, 2),
    "kimi-k2.6": WeightBytes(2, 0.5625, 2),
}


def read_rows(path: Path | str) -> list[dict[str, Any]]:
    """The rows that `study replay --out` wrote. UsageError for a file that holds something else."""
    try:
        rows = [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]
        if not rows or not all({"shape", "budget", "trace_sha256", "rounds"} <= set(row) for row in rows):
            raise ValueError("no rows of study replay")
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path}: expected the rows that study replay --out writes: {error}") from None
    return rows


def measured_cost(temperature: float) -> CostCurve:
    """What rounds cost on the recorded GPU, greedy or sampled."""
    records = json.loads(MEASURED.read_text("utf-8"))["rows"]
    sampled = [
        record["temperature"] for record in records if (record["temperature"] > 0) == (temperature > 0)
    ]
    return cost_curve(points_of_records(records, sampled[0]))


def write_report(rows: Sequence[Mapping[str, Any]], folder: Path | str) -> Path:
    """Write report.md and a figure a temperature into `folder`; returns the page's path. UsageError without a round."""
    summaries, folder = summarise(rows), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    device = json.loads(MEASURED.read_text("utf-8"))["gpu"]
    lines = [
        "# Which draft tree pays",
        "",
        f"{len({row['trace_sha256'] for row in rows})} recordings, replayed.",
    ]
    lines += ["Acceptance counts the bonus token; its interval (95%) is over prompts, by bootstrap.", ""]
    for temperature in sorted({each.temperature for each in summaries}):
        mine, cost = (
            [each for each in summaries if each.temperature == temperature],
            measured_cost(temperature),
        )
        deepest = max(each.depth for each in mine)
        mine, name = [each for each in mine if each.depth == deepest], f"shapes_t{temperature:g}.png"
        title = f"Temperature {temperature:g}, depth at most {deepest}, cost of a round on one {device}"
        shape_curves(mine, cost, title).savefig(folder / name, dpi=150)
        lines += [f"## Temperature {temperature:g}", "", f"![{title}]({name})", "", *_table(mine, cost), ""]
        lines += [*_scale(mine), ""]
    page = folder / "report.md"
    page.write_text("\n".join(lines), encoding="utf-8")
    return page


def _table(summaries: Sequence[Summary], cost: CostCurve) -> list[str]:
    alone, best = float(1e3 / cost(1)), best_of(summaries, cost)
    measured = ", ".join(f"{rows:.3g}" for rows in cost.rows)
    lines = [
        f"A round's cost was measured at {measured} rows (means); between them it is a straight line, "
        "which is a guess. Each shape at its own best budget (the oracle knows the future: an upper bound):",
        "",
        "| shape | budget | nodes | tokens a round | outside loops | tokens/s | over autoregressive |",
        "|---|---|---|---|---|---|---|",
    ]
    for shape, (each, speed) in sorted(best.items(), key=lambda item: -item[1][1]):
        outside = "-" if each.outside_loops is None else f"{each.outside_loops:.2f}"
        accepted = f"{each.acceptance:.2f} ({each.low:.2f} to {each.high:.2f})"
        cells = label_of_shape(shape), each.budget, f"{each.nodes:.1f}", accepted, outside, f"{speed:.0f}"
        lines.append("| " + " | ".join(map(str, (*cells, f"{speed / alone:.2f}"))) + " |")
    real = {shape: speed for shape, (_, speed) in best.items() if shape != "oracle"}
    if real:
        winner = max(real, key=real.__getitem__)
        verdict = "pays" if real[winner] > alone else "does not pay"
        lines += ["", f"Here a draft {verdict}: {winner} {real[winner]:.0f} tokens/s, alone {alone:.0f}."]
    return lines


def _scale(summaries: Sequence[Summary]) -> list[str]:
    """What rows cost larger models by bytes alone, beside what these trees would have to accept."""
    lines = [
        f"On larger models, by bytes alone (context {SCALE_CONTEXT:,}, rows choose experts independently, draft not "
        "counted; an estimate, not a measurement): a round of N nodes costs as much as `cost` single rows, so it pays "
        "where it commits more tokens than that. The tokens are this model's and drafter's; theirs would have others.",
        "",
        "| model | N | experts touched a layer | cost | tokens a round, best_first here | pays |",
        "|---|---|---|---|---|---|",
    ]
    trees = sorted(
        (each for each in summaries if each.shape == "best_first" and each.budget), key=lambda s: s.budget
    )
    for name, weights in SCALE.items():
        config = ModelConfig.from_hf(json.loads((DATA / "configs" / f"{name}.json").read_text("utf-8")), name)
        one = forward_bytes(config, 1, SCALE_CONTEXT, weights)
        for each in trees:
            rows = round(each.nodes) + 1
            cost = forward_bytes(config, rows, SCALE_CONTEXT, weights) / one
            touched = expected_experts(config.n_routed_experts, config.num_experts_per_tok, rows)
            pays = "yes" if each.low > cost else "no" if each.high < cost else "undecided"
            lines.append(
                f"| {name} | {rows - 1} | {touched:.0f} of {config.n_routed_experts} | {cost:.2f} "
                f"| {each.acceptance:.2f} | {pays} |"
            )
    return lines
