"""The roofline of a kernel bench: what each case reaches of what this GPU was measured to do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddtree.plots_style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    VERMILION,
    figure_heading,
    heading,
    label_axes,
    legend_below,
    new_figure,
    require,
)

# The kernels that multiply and add enough for a roofline; all others are one grey family
FAMILIES = {
    "linear": ("o", BLUE),
    "experts": ("s", VERMILION),
    "attention": ("^", GREEN),
    "block_attention": ("D", ORANGE),
    "head_linear": ("v", PURPLE),
}
CEILINGS = {"fma": ("f32 multiply-add", "--"), "mma": ("bf16 mma.sync", "-.")}
BOUNDS = {
    "copy": ("o", BLUE, "copy bandwidth"),
    "fma": ("s", VERMILION, "f32 multiply-add"),
    "mma": ("^", GREEN, "bf16 mma.sync"),
}

Case = Mapping[str, Any]


def roofline_figure(document: Mapping[str, Any], title: str = "") -> Figure:
    """TFLOP/s against FLOP per byte under the measured ceilings, and the fraction of its bound that each case reaches.

    `document` is `bench kernels --json`. Cases that failed are left out; those without arithmetic stand in the right
    panel alone. UsageError when no case was timed.
    """
    cases = [case for case in document["cases"] if "error" not in case]
    require(cases, "the kernel bench holds no timed case")
    names = list(dict.fromkeys(case["name"].split()[0] for case in cases))
    figure = new_figure(11.0, max(4.6, 1.9 + 0.2 * len(names)))
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    _roofs(left, document["ceilings"], [case for case in cases if case["flops"]])
    _fractions(right, cases, names)
    handles = [*left.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
    legend_below(figure, handles, [handle.get_label() for handle in handles], 4)
    figure_heading(figure, title or f"Kernels on one {document['gpu']}, as nodes of a CUDA graph")
    return figure


def _roofs(axes: Axes, ceilings: Mapping[str, float], cases: Sequence[Case]) -> None:
    """The ceilings as lines, the cases as marks: filled in bf16, hollow in f32."""
    intensity = [case["flops"] / case["bytes"] for case in cases] or [1.0]
    span = np.geomspace(min(intensity) / 2, max(intensity) * 2, 200)
    copy, rates = ceilings["copy_gb_s"] / 1e3, {unit: ceilings.get(f"{unit}_tflop_s") for unit in CEILINGS}
    top = max([rate for rate in rates.values() if rate] or [span[-1] * copy])
    for unit, (name, line) in CEILINGS.items():
        if rate := rates[unit]:
            label = f"{name}: {rate:.0f} TFLOP/s"
            axes.plot(
                [rate / copy, max(span[-1], rate / copy)],
                [rate] * 2,
                color=BLACK,
                ls=line,
                lw=1.4,
                label=label,
            )
    slope = np.array([span[0], top / copy])
    axes.plot(
        slope, slope * copy, color=BLACK, ls=":", lw=1.6, label=f"copy: {1e3 * copy:.0f} GB/s", zorder=1
    )
    groups: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        name = case["name"].split()[0]
        groups[name if name in FAMILIES else "others"].append(case)
    for name, members in groups.items():
        marker, colour = FAMILIES.get(name, (".", GREY))
        for hollow in (False, True):
            mine = [case for case in members if (" f32 " in f"{case['name']} ") == hollow]
            points = [[case["flops"] / case["bytes"] for case in mine], [case["tflop_s"] for case in mine]]
            face = "white" if hollow and name != "others" else colour
            axes.plot(*points, marker, ms=6.5, color=colour, mfc=face, mew=1.2)
        axes.plot([], [], marker, ms=6.5, color=colour, label=name)
    axes.set(xscale="log", yscale="log", xlim=(span[0], max(span[-1], 2 * top / copy)))
    axes.grid(color="#E5E5E5", lw=0.5)
    label_axes(axes, "arithmetic intensity (FLOP per byte moved)", "reached (TFLOP/s)")
    heading(axes, "Roofline, measured ceilings (filled bf16, hollow f32)")


def _fractions(axes: Axes, cases: Sequence[Case], names: Sequence[str]) -> None:
    """A line a kernel, a mark a case, by what bounds it."""
    for bound, (marker, colour, name) in BOUNDS.items():
        mine = [case for case in cases if case["bound"] == bound]
        if mine:
            places = [names.index(case["name"].split()[0]) for case in mine]
            look = {"color": colour, "ms": 5.5, "mfc": "none", "mew": 1.2, "label": f"bound by {name}"}
            axes.plot([case["fraction"] for case in mine], places, marker, **look)
    axes.axvline(1, color=BLACK, ls="--", lw=1.2)
    axes.set_xscale("log")
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
    axes.grid(color="#E5E5E5", lw=0.5)
    label_axes(axes, "reached of what bounds the case (%)", "")
    heading(axes, "Fraction of the bound, a mark a case")
