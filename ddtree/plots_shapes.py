"""Shapes against one another by budget or depth: acceptance with its interval, and speed at a measured cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from ddtree.plots_style import (
    BLACK,
    CONVENTION,
    LINES,
    MARKERS,
    SERIES,
    count_axis,
    figure_heading,
    heading,
    label_axes,
    legend_below,
    new_figure,
    require,
)
from ddtree.study_cost import CostCurve
from ddtree.study_summary import Summary

DODGE = 0.3  # of an axis 60 long or longer
BOUNDS = ("oracle",)  # what no decode can reach has no speed


def label_of_shape(shape: str) -> str:
    """A shape's name; of a template's file its stem."""
    name, _, value = shape.partition(":")
    return f"{name}:{Path(value).stem}" if value.endswith(".json") else shape


def shape_curves(summaries: Sequence[Summary], cost: CostCurve | None = None, title: str = "") -> Figure:
    """Tokens a round by budget, a series a shape, with 95% intervals over prompts; with `cost`, tokens per second
    too, but the oracle's, which no decode can reach.

    `summaries` are of one temperature and depth. The level line is a round without a draft. UsageError without one.
    """
    return _curves(summaries, cost, "budget", "budget (nodes, root not counted)", title or "Shapes by budget")


def depth_curves(summaries: Sequence[Summary], cost: CostCurve | None = None, title: str = "") -> Figure:
    """The same by the depth that no node may pass; `summaries` are of one temperature and budget."""
    return _curves(summaries, cost, "depth", "depth (no node lies deeper)", title or "Shapes by depth")


def _curves(summaries: Sequence[Summary], cost: CostCurve | None, by: str, label: str, title: str) -> Figure:
    require(summaries, "there is no replayed row")
    figure = new_figure(10.5 if cost else 6.5, 4.4)
    panels = figure.subplots(1, 2 if cost else 1, squeeze=False)[0]
    shapes = list(dict.fromkeys(each.shape for each in summaries))
    places = sorted({getattr(each, by) for each in summaries})
    step = DODGE * min(1.0, (places[-1] - places[0]) / 60 if len(places) > 1 else 1.0)
    for index, shape in enumerate(shapes):
        mine = sorted((each for each in summaries if each.shape == shape), key=lambda each: getattr(each, by))
        aside = step * (index - (len(shapes) - 1) / 2)  # so that intervals stand side by side
        at, means = [getattr(each, by) + aside for each in mine], [each.acceptance for each in mine]
        reach = np.array([[each.acceptance - each.low, each.high - each.acceptance] for each in mine]).T
        style = {"color": SERIES[index % 7], "marker": MARKERS[index % 7], "ls": LINES[index % 4], "ms": 4.5}
        panels[0].errorbar(
            at, means, yerr=np.maximum(reach, 0), lw=1.4, capsize=2, label=label_of_shape(shape), **style
        )
        if cost and shape not in BOUNDS:
            panels[1].plot(at, [each.speed(cost) for each in mine], lw=1.4, **style)
    heading(panels[0], "Mean acceptance length, 95% interval over prompts")
    label_axes(panels[0], label, f"tokens a round ({CONVENTION})")
    panels[0].set_ylim(bottom=0)
    if cost:
        alone = float(1e3 / cost(1))
        panels[1].axhline(alone, color=BLACK, ls=(0, (1, 1)), lw=1.4)
        panels[1].annotate(
            "autoregressive",
            (0.99, alone),
            xycoords=("axes fraction", "data"),
            xytext=(0, -11),
            textcoords="offset points",
            ha="right",
            fontsize=8,
        )
        heading(panels[1], "Speed at the measured cost of a round")
        label_axes(panels[1], label, "tokens per second")
        panels[1].set_ylim(bottom=0)
    for axes in panels:
        count_axis(axes.xaxis)
    legend_below(figure, *panels[0].get_legend_handles_labels())
    figure_heading(figure, title)
    return figure
