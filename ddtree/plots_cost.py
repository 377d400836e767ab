"""Figures of time: where a round's milliseconds go, and which budget they pay for."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddtree.decode import STAGES
from ddtree.plots_style import (
    BLACK,
    BLUE,
    CONVENTION,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    count_axis,
    figure_heading,
    heading,
    label_axes,
    legend_below,
    new_figure,
    require,
)
from ddtree.study_cost import CostCurve, best_budget

STAGE_COLOURS = dict(zip(STAGES, (ORANGE, GREEN, SKY, VERMILION, PURPLE), strict=True))
STAGE_HATCHES = dict(zip(STAGES, ("///", "xxx", "", "...", "\\\\\\"), strict=True))


def stage_bars(stages: Mapping[str, Mapping[str, float] | None], title: str = "") -> Figure:
    """Mean milliseconds a round by stage, a stacked bar a label with its total.

    A label whose value is None was not timed and is left out. UsageError when none was.
    """
    kept = {label: value for label, value in stages.items() if value}
    require(kept, "no stage times are recorded")
    figure = new_figure(8.0, 1.6 + 0.36 * len(kept))
    axes = figure.subplots()
    places, left = np.arange(len(kept)), np.zeros(len(kept))
    for stage in STAGES:
        widths = np.array([value[stage] for value in kept.values()])
        bar = {"color": STAGE_COLOURS[stage], "hatch": STAGE_HATCHES[stage], "edgecolor": BLACK, "lw": 0.6}
        axes.barh(places, widths, left=left, height=0.72, label=stage, **bar)
        left = left + widths
    for place, total in zip(places, left, strict=True):
        axes.annotate(
            f"{total:.3g} ms",
            (total, place),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_yticks(places, kept, parse_math=False)
    axes.set_ylim(len(kept) - 0.4, -0.6)
    axes.set_xlim(0, 1.13 * left.max() if left.max() else 1.0)
    label_axes(axes, "milliseconds a round (mean, prefill left out)", "")
    legend_below(figure, *axes.get_legend_handles_labels(), 5)
    figure_heading(figure, title or "Where a round's time goes")
    return figure


def cost_figure(
    cost: CostCurve,
    acceptance: Mapping[int, float],
    measured: Mapping[int, float] | None = None,
    title: str = "",
) -> Figure:
    """What rounds cost by rows verified, and tokens per second by budget with the budget that pays.

    `acceptance` is tokens a round (bonus token included) by budget, 0 being autoregressive; `measured` are tokens per
    second really seen at a budget. UsageError when the cost covers none of the budgets.
    """
    best = best_budget(acceptance, cost)
    figure = new_figure(9.0, 4.3)
    left, right = figure.subplots(1, 2)
    _cost_panel(left, cost)
    speeds = {budget: speed for budget, speed in best.tokens_per_second.items() if np.isfinite(speed)}
    drafted = {budget: speed for budget, speed in speeds.items() if budget}
    few = {"marker": "o", "ms": 4} if len(drafted) < 20 else {}
    right.plot(list(drafted), list(drafted.values()), color=BLUE, lw=1.8, label="acceptance / cost", **few)
    if 0 in speeds:
        right.axhline(speeds[0], color=BLACK, ls="--", lw=1.4, label="ar (budget 0)")
    if measured:
        look = {"ls": "", "marker": "D", "ms": 6, "color": VERMILION, "mfc": "white", "label": "measured"}
        right.plot(list(measured), list(measured.values()), **look)
    spot = {"marker": "*", "ms": 15, "color": GREEN, "mec": BLACK, "ls": "", "zorder": 4}
    label = f"best: budget {best.budget}, {speeds[best.budget]:.4g} tokens/s"
    right.plot([best.budget], [speeds[best.budget]], label=label, **spot)
    right.set_ylim(0, 1.08 * max([*speeds.values(), *(measured or {}).values()]))
    right.grid(axis="y", color="#DDDDDD", lw=0.6)
    count_axis(right.xaxis)
    label_axes(right, "budget (nodes, root not counted)", "tokens per second")
    heading(right, f"Speed (acceptance: {CONVENTION})")
    pairs = [pair for axes in (left, right) for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    legend_below(figure, [handle for handle, _ in pairs], [name for _, name in pairs], 5)
    figure_heading(figure, title or "Which budget pays")
    return figure


def _cost_panel(axes: Axes, cost: CostCurve) -> None:
    """Stages stacked over rows; a cross where it was measured."""
    drafted = cost.rows[cost.rows > 1]
    rows = (
        np.unique(np.concatenate([drafted, np.linspace(drafted[0], drafted[-1], 64)])) if len(drafted) else []
    )
    if len(rows):
        layers = axes.stackplot(rows, *cost.stages(rows).values(), edgecolor=BLACK, lw=0.5)
        for stage, layer in zip(STAGES, layers, strict=True):
            layer.set(facecolor=STAGE_COLOURS[stage], hatch=STAGE_HATCHES[stage], label=stage)
    axes.plot(cost.rows, cost(cost.rows), "X", ms=7, color=BLACK, mec="white", label="measured cost")
    axes.set_ylim(0, 1.1 * float(np.nanmax(cost(cost.rows))))
    count_axis(axes.xaxis)
    label_axes(axes, "rows verified a round (root and nodes)", "milliseconds a round")
    heading(axes, "Cost of a round by stage")
