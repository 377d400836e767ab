"""Figures of the notebooks alone: errors in units of bounds, a growing tree, errors by operation, layers, caches."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ddtree.lab_tree import Step
from ddtree.plots_layers import layer_panel
from ddtree.plots_style import (
    BLACK,
    BLUE,
    GREY,
    MARKERS,
    SERIES,
    VERMILION,
    figure_heading,
    heading,
    label_axes,
    legend_below,
    new_figure,
)

EXACT = 1e-4  # where an error of exactly 0 is drawn


def error_figure(checks: Mapping[str, np.ndarray], title: str = "") -> Figure:
    """Every element's error in units of its bound, an operation a line, which must end left of the dashed line at 1.

    An error of 0 stands at the left edge, hollow.
    """
    figure = new_figure(8.5, 1.3 + 0.28 * len(checks))
    axes = figure.add_subplot()
    for place, units in enumerate(checks.values()):
        values = np.ravel(units)
        spread = place + 0.5 * (np.arange(values.size) / max(values.size, 1) - 0.5)
        zero = values == 0
        axes.plot(np.maximum(values[~zero], EXACT), spread[~zero], ".", color=BLUE, ms=4, alpha=0.6)
        axes.plot(np.full(zero.sum(), EXACT), spread[zero], "o", color=BLUE, mfc="white", ms=3.5, mew=0.7)
    axes.axvline(1, color=VERMILION, ls="--", lw=1.5)
    axes.set(xscale="log", xlim=(EXACT / 2, 3), ylim=(len(checks) - 0.4, -0.6))
    axes.set_yticks(range(len(checks)), checks)
    ticks = [EXACT, 1e-3, 1e-2, 1e-1, 1]
    axes.set_xticks(ticks, ["exact", "1/1000", "1/100", "1/10", "the bound"])
    axes.grid(axis="x", color="#E5E5E5", lw=0.5)
    label_axes(axes, "error in units of the stated bound, a mark an element", "")
    heading(axes, title or "Kernels against NumPy in f64")
    return figure


def growth_figure(steps: Sequence[Step]) -> Figure:
    """Path sums of the candidates before each step, and the one that the step took."""
    figure = new_figure(8.0, 3.4)
    axes = figure.add_subplot()
    for before, step in itertools.pairwise(steps):
        waiting = [value for value, ranks in before.heap if ranks != step.ranks]
        axes.plot([step.row] * len(waiting), waiting, "o", color=GREY, mfc="white", ms=6)
    axes.plot([step.row for step in steps], [step.weight for step in steps], "o-", color=BLUE, ms=7)
    for step in steps:
        name = "".join(map(str, step.ranks))
        offset = {"textcoords": "offset points", "xytext": (0, 8), "ha": "center", "fontsize": 8}
        axes.annotate(name, (step.row, step.weight), **offset)
    axes.plot([], [], "o", color=GREY, mfc="white", label="waits in the heap")
    axes.plot([], [], "o-", color=BLUE, label="taken (ranks along its path)")
    axes.legend(frameon=False, fontsize=8, loc="lower left")
    axes.set_xticks([step.row for step in steps])
    axes.margins(y=0.15)
    label_axes(axes, "step (the row that the node becomes)", "path sum (natural log)")
    heading(axes, "The candidates of each step, and which was taken")
    return figure


def local_error_figure(errors: Mapping[str, Mapping[str, Sequence[float]]], title: str = "") -> Figure:
    """What each operation errs by on exact inputs, a mark a call in the forward; `errors` is {label: {name: errors}}.

    An error of 0 stands at the left edge, hollow.
    """
    names = list(dict.fromkeys(name for each in errors.values() for name in each))
    positive = [error for each in errors.values() for calls in each.values() for error in calls if error > 0]
    edge = min(positive) / 10
    figure = new_figure(8.5, 1.5 + 0.3 * len(names))
    axes = figure.add_subplot()
    for index, (label, each) in enumerate(errors.items()):
        look = {"color": SERIES[index], "ms": 5, "alpha": 0.8}
        for place, name in enumerate(names):
            values = np.array(each.get(name, ()))
            height = place + 0.18 * (index - (len(errors) - 1) / 2)
            more, zero = values[values > 0], values[values == 0]
            axes.plot(more, np.full(more.size, height), MARKERS[index], **look)
            axes.plot(
                np.full(zero.size, edge), np.full(zero.size, height), MARKERS[index], mfc="white", **look
            )
        axes.plot([], [], MARKERS[index], label=label, **look)
    axes.axvline(2.0**-24, color=BLACK, ls=":", lw=1, label="rounding to f32, 2^-24")
    axes.set(xscale="log", ylim=(len(names) - 0.4, -0.6))
    axes.set_yticks(range(len(names)), names)
    axes.grid(axis="x", color="#E5E5E5", lw=0.5)
    axes.legend(frameon=False, fontsize=8.5, loc="upper left", bbox_to_anchor=(1, 1))
    label_axes(axes, "relative error of the one operation (2-norm)", "")
    heading(axes, title or "Where the error enters: each operation alone, on f64's inputs")
    return figure


def layers_figure(records: Mapping[str, Mapping[str, Any]], title: str = "") -> Figure:
    """Layers inside several forwards' graphs against their floors, a panel a label; `records` are a bench's times."""
    figure = new_figure(4.2 * len(records), 3.4)
    panels = figure.subplots(1, len(records), squeeze=False)[0]
    for axes, (label, record) in zip(panels, records.items(), strict=True):
        layer_panel(axes, record)
        axes.tick_params(axis="x", labelsize=7)
        heading(axes, label)
    handles = {handle.get_label(): handle for handle in panels[0].get_legend_handles_labels()[0]}
    legend_below(figure, list(handles.values()), list(handles), 4)
    figure_heading(figure, title or "Layers inside the forward's graph")
    return figure


def bytes_figure(sizes: Mapping[str, Mapping[str, int]], title: str = "") -> Figure:
    """Cache bytes a token by model: latents beside the keys and values of every head; `sizes` is {model: kv_bytes}."""
    figure = new_figure(8.0, 1.4 + 0.55 * len(sizes))
    axes = figure.add_subplot()
    for index, (kind, label) in enumerate(
        (("latent", "latent + shared rotary key"), ("heads", "every head's key and value"))
    ):
        places = np.arange(len(sizes)) + 0.38 * index - 0.19
        widths = [size[kind] / 1024 for size in sizes.values()]
        bars = axes.barh(
            places, widths, 0.36, color=(BLUE, VERMILION)[index], hatch=("", "///")[index], label=label
        )
        axes.bar_label(bars, [f"{width:,.1f}" for width in widths], padding=3, fontsize=8)
    axes.set_yticks(range(len(sizes)), sizes)
    axes.set(xscale="log", ylim=(len(sizes) - 0.4, -0.6))
    axes.margins(x=0.15)
    axes.legend(frameon=False, fontsize=8.5, loc="lower right")
    label_axes(axes, "KiB of cache a token, all layers, bf16 (log)", "")
    heading(axes, title or "What MLA saves")
    return figure
