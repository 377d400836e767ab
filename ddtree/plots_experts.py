"""Figure of shared experts: how many a verify's rows touch, and how many independent rows would touch as many."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddtree.plots_style import (
    BLACK,
    GREY,
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
from ddtree.study_analytic import expected_experts
from ddtree.study_experts import Sharing

BAND = 0.18  # opacity


def experts_figure(sharing: Sequence[Sharing], title: str = "") -> Figure:
    """Distinct experts by rows verified, and effective rows, with 95% bands over prompts; a series a tree's kind.

    `sharing` are of one model: series differ in shape, temperature and layer. Dashed is what rows touch that choose
    evenly and independently; dotted, of the first series, independently by the layers' own loads. UsageError for none.
    """
    require(sharing, "there is no row of study routing")
    series = list(dict.fromkeys((each.shape, each.temperature, each.layer) for each in sharing))
    figure = new_figure(10.5, 4.6)
    left, right = figure.subplots(1, 2)
    of = sharing[0].experts, sharing[0].experts_per_token
    most = max(each.rows for each in sharing)
    rows = np.linspace(1, most, 200)
    left.plot(
        rows, expected_experts(*of, rows), color=BLACK, ls="--", lw=1.4, label="independent, even choices"
    )
    right.plot(rows, rows, color=BLACK, ls="--", lw=1.4)
    for index, (shape, temperature, layer) in enumerate(series):
        mine = [each for each in sharing if (each.shape, each.temperature, each.layer) == series[index]]
        mine.sort(key=lambda each: each.rows)
        style = {"color": SERIES[index % 7], "marker": MARKERS[index % 7], "ls": LINES[index % 4], "ms": 4.5}
        name = f"{shape}, {'greedy' if temperature == 0 else f'temperature {temperature:g}'}"
        style["label"] = name if layer is None else f"{name}, layer {layer}"
        if index == 0:
            by_load = [each.by_load for each in mine]
            left.plot(
                _from_one(mine), [of[1], *by_load], color=GREY, ls=":", lw=1.8, label="independent, by load"
            )
        _band(
            left, mine, [(each.touched_low, each.touched, each.touched_high) for each in mine], of[1], style
        )
        known = [
            each for each in mine if None not in (each.effective_low, each.effective, each.effective_high)
        ]
        ends = [(each.effective_low, each.effective, each.effective_high) for each in known]
        _band(right, known, ends, 1, style)
    mean = " (mean over layers)" if {layer for *_, layer in series} == {None} else ""
    left.set_ylim(0, 1.05 * of[0])
    heading(left, f"Distinct experts of {of[0]}, each row choosing {of[1]}")
    label_axes(left, "rows verified (root and nodes)", f"experts a MoE layer{mean}")
    tallest = [each.effective_high for each in sharing if each.effective_high is not None]
    right.set_ylim(0, 1.15 * max([*tallest, 1.0]))
    heading(right, "Effective rows: independent ones that touch as many")
    label_axes(right, "rows verified (root and nodes)", "effective rows")
    for axes in (left, right):
        axes.set_xlim(0, 1.03 * most)
        axes.grid(axis="y", color="#DDDDDD", lw=0.6)
        count_axis(axes.xaxis)
    legend_below(figure, *left.get_legend_handles_labels(), 3)
    figure_heading(
        figure, title or f"Experts that a draft tree touches ({sharing[0].prompts} prompts, 95% bands)"
    )
    return figure


def _from_one(mine: Sequence[Sharing]) -> list[float]:
    return [1.0, *(each.rows for each in mine)]


def _band(
    axes: Axes, mine: Sequence[Sharing], ends: Sequence[tuple], start: float, style: dict[str, object]
) -> None:
    """A line from one row on, which touches `start`, and its band."""
    low, middle, high = np.array([(start,) * 3, *ends], float).T
    axes.fill_between(_from_one(mine), low, high, color=style["color"], alpha=BAND, lw=0)
    axes.plot(_from_one(mine), middle, lw=1.5, **style)
