"""The report's closing part: what these trees would cost larger models, and whether they would pay there."""

from __future__ import annotations

from collections.abc import Sequence

from ddtree.lab import counted
from ddtree.plots_shapes import label_of_shape
from ddtree.study_adaptive import adaptive_gain
from ddtree.study_cost import CostCurve
from ddtree.study_models import ROUTERS, recorded_sharing
from ddtree.study_recordings import Recording
from ddtree.study_report_experts import sharing_lines
from ddtree.study_report_text import interval, table_of
from ddtree.study_scale import CHAIN, TREE, Verdict, at_own_best, batch_limits, verdicts
from ddtree.study_summary import Summary, best_budget

CONTEXTS = (128, 8192, 131072)
BATCHES = (1, 8, 64, 256, 1024)
BATCH_CONTEXT = 8192
BATCH_SOURCE = "analytic"


def scale_lines(summaries: Sequence[Summary]) -> list[str]:
    """In Markdown: each model's tree and chain at their best, and batches, a table a temperature."""
    mine = [each for each in summaries if each.shape in (TREE, CHAIN)]
    found = _not_twice(verdicts(mine, contexts=CONTEXTS))
    if not found:
        return []
    lines = [
        "## Larger models",
        "",
        "Tokens a round are this model's and this drafter's; a larger model's own would differ. The cost of a round is "
        "counted in rounds of a single row without a draft: *measured*, one layer *measured* and multiplied, or, where "
        f"nothing was measured, bytes and FLOPs alone (*analytic*). Each shape at {best_budget(mine)}, no deeper than "
        "that model's drafter reaches where the rows hold such a depth; the interval is that of the tokens alone.",
        "",
        *_assumptions(found),
        "",
        *sharing_lines({way: recorded_sharing(way) for way in ROUTERS}),
        "",
    ]
    for temperature in sorted({each.temperature for each in found}):
        lines += [f"### Temperature {temperature:g}", "", *_at_best(found, temperature), ""]
        lines += _batches([each for each in mine if each.temperature == temperature])
    return lines


def _not_twice(found: Sequence[Verdict]) -> list[Verdict]:
    """Without what is analytic where the same was measured."""
    measured = {(v.model, v.experts, v.context) for v in found if v.source != BATCH_SOURCE}
    return [v for v in found if v.source != BATCH_SOURCE or (v.model, v.experts, v.context) not in measured]


def _at_best(found: Sequence[Verdict], temperature: float) -> list[str]:
    headings = (
        "model",
        "cost",
        "experts counted as",
        "context",
        "shape",
        "nodes",
        "depth",
        "experts a layer",
    )
    cells = []
    for by_shape in at_own_best(each for each in found if each.temperature == temperature).values():
        for each in sorted(by_shape.values(), key=lambda each: -each.speedup):
            cells.append(
                (
                    each.model, each.source, each.experts, f"{each.context:,}", label_of_shape(each.shape),
                    f"{each.rows - 1:.1f}", each.depth, "-" if each.touched is None else f"{each.touched:.0f}",
                    f"{each.tokens:.2f}", f"{each.cost:.2f}",
                    interval(each.speedup, each.speedup_low, each.speedup_high), each.pays,
                )
            )  # fmt: skip
    return table_of((*headings, "tokens a round", "cost of a round", "times no draft", "pays"), cells)


def _assumptions(found: Sequence[Verdict]) -> list[str]:
    """What each way of costing assumes, once."""
    said = dict.fromkeys(
        f"- {each.model}, {each.source}, {each.experts}: {each.assumption}" for each in found
    )
    return list(said)


def _batches(summaries: Sequence[Summary]) -> list[str]:
    """The batch at which a shape stops paying, by bytes and FLOPs alone."""
    limits = [
        limit
        for limit in batch_limits(verdicts(summaries, contexts=(BATCH_CONTEXT,), batches=BATCHES))
        if limit.source == BATCH_SOURCE
    ]
    if not limits:
        return []
    headings = (
        "model",
        "experts counted as",
        "shape",
        *(f"batch {batch:,}" for batch in BATCHES),
        "stops at",
    )
    cells = []
    for limit in limits:
        at = {each.batch: each for each in limit.best}
        speeds = [f"{at[b].speedup:.2f} ({at[b].rows - 1:.0f})" if b in at else "-" for b in BATCHES]
        stops = "-" if limit.stops is None else f"{limit.stops:,}"
        cells.append((limit.model, limit.experts, limit.shape, *speeds, stops))
    said = (
        f"By batch, context {BATCH_CONTEXT:,}, analytic: times no draft at {best_budget(summaries)} (its nodes), "
        "sequences sharing experts as independent rows do; from `stops at` on no batch is sure to pay."
    )
    return [said, "", *table_of(headings, cells), ""]


def adaptive_lines(recordings: Sequence[Recording], cost: CostCurve) -> list[str]:
    """`cost_aware` against the best fixed budget, each round costed by its own size."""
    gain = adaptive_gain(recordings, cost)
    ratio = interval(gain.ratio, gain.low, gain.high)
    return [
        f"`cost_aware` chooses {gain.nodes:.1f} nodes a round on this curve and makes {gain.adaptive:.0f} tokens/s, "
        f"{ratio} times the best fixed budget's ({counted(gain.budget, 'node')}, {gain.fixed:.0f}); a round costs what "
        "its own size does here, and what its mean size does above.",
        "",
    ]
