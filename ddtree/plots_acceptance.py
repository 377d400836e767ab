"""Figures of acceptance: how long rounds are, and what a larger budget brings. Lengths count the bonus token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

from ddtree.compare import name_of_method
from ddtree.plots_style import (
    BLACK,
    BLUE,
    CONVENTION,
    GREY,
    LINES,
    MARKERS,
    METHOD_COLOURS,
    METHOD_MARKERS,
    METHODS,
    SERIES,
    VERMILION,
    count_axis,
    figure_heading,
    heading,
    label_axes,
    legend_below,
    new_figure,
    require,
)
from ddtree.study_budgets import BudgetCurve


def acceptance_histogram(lengths: Mapping[str, Sequence[int]], title: str = "") -> Figure:
    """Share of rounds by acceptance length, a panel a label, its mean as a dashed line.

    `lengths` are tokens a round, bonus token included, the prefill left out. UsageError without a round.
    """
    kept = {label: np.asarray(values, int) for label, values in lengths.items() if len(values)}
    require(kept, "there is no round after the prefill, so no acceptance length")
    longest = max(int(values.max()) for values in kept.values())
    figure = new_figure(7.0, 1.1 + 1.35 * len(kept))
    panels = figure.subplots(len(kept), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (label, values) in zip(panels, kept.items(), strict=True):
        shares = np.bincount(values, minlength=longest + 1)[1:] / len(values)
        axes.bar(np.arange(1, longest + 1), shares, width=0.8, color=BLUE, edgecolor=BLACK, lw=0.6)
        axes.axvline(values.mean(), color=VERMILION, ls="--", lw=1.6)
        heading(axes, f"{label}: mean {values.mean():.2f} (dashed), {len(values)} rounds")
        axes.spines[["top", "right"]].set_visible(False)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.yaxis.get_major_locator().set_params(nbins=3)
    panels[0].set_xlim(0.4, longest + 0.6)
    count_axis(panels[0].xaxis, 16)
    figure.supylabel("share of rounds (%)", fontsize=10)
    panels[-1].set_xlabel(f"acceptance length (tokens a round, {CONVENTION})")
    figure_heading(figure, title or f"Acceptance length, {CONVENTION}")
    return figure


def budget_curves(
    records: Sequence[Mapping[str, Any]], over_ar: bool = False, title: str = "", outside_loops: bool = False
) -> Figure:
    """Mean acceptance length, and speed, against the nodes that were really verified.

    `records` are compare's: one series for each method, shape and temperature, ar as a level line. Speed is tokens per
    second, or with `over_ar` the ratio to ar's. `outside_loops` takes the mean over rounds that start outside a
    repetition. What was not measured (null) is left out. UsageError without a record.
    """
    require(records, "there is no record of a comparison")
    mean = "mean_acceptance_outside_loops" if outside_loops else "mean_acceptance"
    speed = "speed_over_ar" if over_ar else "tokens_per_second"
    where = ", rounds outside loops" if outside_loops else ""
    figure = new_figure(9.0, 4.2)
    left, right = figure.subplots(1, 2)
    temperatures = sorted({record["temperature"] for record in records})
    others = sorted({name_of_method(record) for record in records} - set(METHODS))  # trees of other shapes
    looks = {name: (METHOD_COLOURS[name], METHOD_MARKERS[name]) for name in METHODS}
    looks |= dict(zip(others, zip(SERIES[2:], MARKERS[2:], strict=True), strict=False))
    for axes, column in ((left, mean), (right, speed)):
        for place, temperature in enumerate(temperatures):
            mine = [record for record in records if record["temperature"] == temperature]
            for name, look in looks.items():
                own = [record for record in mine if name_of_method(record) == name]
                _budget_series(axes, own, column, place, *look)
        _nodes_axis(axes, [record["nodes_per_round"] for record in records if record["nodes_per_round"]])
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", color="#DDDDDD", lw=0.6)
    label_axes(left, "nodes verified a round (root not counted)", f"tokens a round ({CONVENTION})")
    label_axes(right, "nodes verified a round (root not counted)", "x ar" if over_ar else "tokens per second")
    heading(left, f"Mean acceptance length{where}")
    heading(right, "Speed, times ar's" if over_ar else "Speed, prefill left out")
    handles = {h.get_label(): h for axes in (left, right) for h in axes.get_lines()}
    legend_below(figure, list(handles.values()), list(handles), 3)
    figure_heading(figure, title or f"What a budget brings (acceptance: {CONVENTION})")
    return figure


def _budget_series(
    axes: Axes, records: list[Mapping[str, Any]], column: str, place: int, colour: str, marker: str
) -> None:
    """One method at the temperature number `place`, hollow after the first; ar, without a node, is a level line."""
    points = sorted((r["nodes_per_round"], r[column]) for r in records if r[column] is not None)
    if not points:
        return
    name, temperature = name_of_method(records[0]), records[0]["temperature"]
    style = {
        "color": colour,
        "ls": LINES[place % len(LINES)],
        "label": f"{name}, {'greedy' if temperature == 0 else f'temperature {temperature:g}'}",
    }
    if name == "ar":
        axes.axhline(points[0][1], lw=1.4, **style)
        return
    filled = {"marker": marker, "ms": 6, "mfc": "white" if place else colour}
    axes.plot(*zip(*points, strict=True), lw=1.8, **filled, **style)


def _nodes_axis(axes: Axes, nodes: Sequence[float]) -> None:
    """A log axis with powers of two as plain numbers."""
    low, high = (min(nodes), max(nodes)) if len(nodes) else (1.0, 2.0)
    axes.set_xscale("log", base=2)
    axes.set_xlim(low / 1.35, high * 1.35)
    ticks = 2.0 ** np.arange(np.ceil(np.log2(low / 1.3)), np.floor(np.log2(high * 1.3)) + 1)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def expected_figure(curve: BudgetCurve, title: str = "") -> Figure:
    """Tokens a round at each budget: as the drafter's probabilities promise, and as the target really took them.

    Budgets whose trees may differ from a wider table's are drawn hollow. UsageError without a budget.
    """
    require(curve.budgets, "there is no budget to draw")
    figure = new_figure(7.0, 4.2)
    axes = figure.subplots()
    series = (
        ("expected: 1 + sum of path probabilities", curve.expected, VERMILION, "s", "--"),
        ("actual", curve.actual, BLUE, "o", "-"),
    )
    every = max(1, len(curve.budgets) // 24)
    for label, values, colour, marker, line in series:
        look = {"color": colour, "marker": marker, "ms": 4.5, "markevery": every}
        axes.plot(curve.budgets, values, ls=line, lw=1.6, label=label, **look)
        at = np.flatnonzero(~curve.exact)
        at = at[at % every == 0]
        axes.plot(curve.budgets[at], values[at], marker, ms=4.5, color=colour, mfc="white")
    handles, labels = axes.get_legend_handles_labels()
    if not curve.exact.all():
        hollow = axes.plot([], [], "o", color=GREY, mfc="white")[0]
        handles, labels = (
            [*handles, hollow],
            [*labels, "hollow: the table was too narrow"],
        )
    count_axis(axes.xaxis)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#DDDDDD", lw=0.6)
    label_axes(axes, "budget (nodes, root not counted)", f"tokens a round ({CONVENTION})")
    legend_below(figure, handles, labels, 2)
    figure_heading(figure, title or f"Expected and actual acceptance length, {CONVENTION}")
    return figure
