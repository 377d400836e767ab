"""Figure of shared experts: how many a verify's rows touch, and how many independent rows would touch as many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddtree.errors import UsageError
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
Router = tuple[str, int, int]  # its model's name, experts, and how many a row chooses
Series = tuple[Router, str, float, int | None]  # with shape, temperature and layer


def experts_figure(records: Mapping[str, Sequence[Sharing]], title: str = "") -> Figure:
    """Distinct experts by rows verified, a panel a router, and all effective rows, with 95% bands over prompts.

    `records` are by the names of their models, which are shown where there are several routers. Series differ in the
    router, shape, temperature and layer. Dashed is what rows touch that choose evenly and independently; dotted, of a
    router's first series, independently by the layers' own loads. UsageError for none, and for two of one series and
    size.
    """
    sharing = [each for mine in records.values() for each in mine]
    require(sharing, "there is no row of study routing")
    series: dict[Series, list[Sharing]] = {}
    for name, mine in records.items():
        for each in sorted(mine, key=lambda each: each.rows):
            series.setdefault(_series_of(name, each), []).append(each)
    if any(len({each.rows for each in mine}) < len(mine) for mine in series.values()):
        raise UsageError("experts: two records of one model, shape, temperature and budget; draw them apart")
    routers = list(dict.fromkeys(router for router, *_ in series))
    figure = new_figure(max(10.5, 4.4 * (len(routers) + 1)), 4.6)
    *touched, effective = figure.subplots(1, len(routers) + 1)
    panels = dict(zip(routers, touched, strict=True))
    most = max(each.rows for each in sharing)
    rows = np.linspace(1, most, 200)
    for router, axes in panels.items():
        axes.plot(
            rows,
            expected_experts(*router[1:], rows),
            color=BLACK,
            ls="--",
            lw=1.4,
            label="independent, even choices",
        )
        mine = next(mine for key, mine in series.items() if key[0] == router)
        load = [router[2], *(each.by_load for each in mine)]
        axes.plot(_from_one(mine), load, color=GREY, ls=":", lw=1.8, label="independent, by load")
        axes.set_ylim(0, 1.05 * router[1])
        model = f"{router[0]}: distinct" if len(routers) > 1 else "Distinct"
        heading(axes, f"{model} experts of {router[1]}, {router[2]} a row")
    effective.plot(rows, rows, color=BLACK, ls="--", lw=1.4)
    for index, ((router, shape, temperature, layer), mine) in enumerate(series.items()):
        style = {
            "color": SERIES[index % 7],
            "marker": MARKERS[(index + index // 7) % 7],
            "ls": LINES[index % 4],
            "ms": 4.5,
        }
        name = f"{shape}, {'greedy' if temperature == 0 else f'temperature {temperature:g}'}"
        name += "" if layer is None else f", layer {layer}"
        style["label"] = name + (", {0}, {2} of {1} experts".format(*router) if len(routers) > 1 else "")
        ends = [(each.touched_low, each.touched, each.touched_high) for each in mine]
        _band(panels[router], mine, ends, router[2], style)
        known = [
            each for each in mine if None not in (each.effective_low, each.effective, each.effective_high)
        ]
        ends = [(each.effective_low, each.effective, each.effective_high) for each in known]
        _band(effective, known, ends, 1, style)
    mean = " (mean over layers)" if {layer for *_, layer in series} == {None} else ""
    tallest = [each.effective_high for each in sharing if each.effective_high is not None]
    effective.set_ylim(0, 1.15 * max([*tallest, 1.0]))
    heading(effective, "Effective rows: independent ones that touch as many")
    for axes in (*touched, effective):
        what = "effective rows" if axes is effective else f"experts a MoE layer{mean}"
        label_axes(axes, "rows verified (root and nodes)", what)
        axes.set_xlim(0, 1.03 * most)
        axes.grid(axis="y", color="#DDDDDD", lw=0.6)
        count_axis(axes.xaxis)
        count_axis(axes.yaxis)
    named = {
        label: handle
        for axes in touched
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    legend_below(figure, list(named.values()), list(named), 3)
    figure_heading(figure, title or f"Experts that a draft tree touches ({_prompts(sharing)}, 95% bands)")
    return figure


def _series_of(name: str, each: Sharing) -> Series:
    return (name, each.experts, each.experts_per_token), each.shape, each.temperature, each.layer


def _prompts(sharing: Sequence[Sharing]) -> str:
    return " and ".join(str(n) for n in dict.fromkeys(each.prompts for each in sharing)) + " prompts"


def _from_one(mine: Sequence[Sharing]) -> list[float]:
    return [1.0, *(each.rows for each in mine)]


def _band(
    axes: Axes, mine: Sequence[Sharing], ends: Sequence[tuple], start: float, style: dict[str, object]
) -> None:
    """A line from one row on, which touches `start`, and its band."""
    low, middle, high = np.array([(start,) * 3, *ends], float).T
    axes.fill_between(_from_one(mine), low, high, color=style["color"], alpha=BAND, lw=0)
    axes.plot(_from_one(mine), middle, lw=1.5, **style)
