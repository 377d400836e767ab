"""Figures of one forward: what its layers and operations cost against their floors, and how far they err."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from ddtree.errors import UsageError
from ddtree.plots_style import (
    BLACK,
    GREY,
    MARKERS,
    ORANGE,
    SERIES,
    SKY,
    count_axis,
    figure_heading,
    heading,
    label_axes,
    legend_below,
    new_figure,
    require,
)

KINDS = {"dense": (SKY, ""), "moe": (ORANGE, "///"), "": (GREY, "...")}
KIND_NAMES = {"dense": "dense layer", "moe": "MoE layer", "": "embedding, head"}
# Black on a white rim: seen on every bar, in print too
FLOOR = {"color": BLACK, "lw": 2.4, "path_effects": [withStroke(linewidth=5, foreground="white")]}
MOST_OPERATIONS = 24  # a kind; the costliest are drawn


def layer_bars(document: Mapping[str, Any], rows: int | None = None, title: str = "") -> Figure:
    """Microseconds of every layer inside a forward's graph, and of each operation alone, against their floors.

    `document` is `bench layers --json`; `rows` picks one of its numbers of rows, the first by default. A layer's floor
    is the sum of its operations': the bytes that must move, at measured copy bandwidth. UsageError without times.
    """
    record = _record_of(document, rows)
    kinds = [
        kind for kind in ("dense", "moe", "ends") if any(op["kind"] == kind for op in record["operations"])
    ]
    operations = {kind: _costliest(record["operations"], kind) for kind in kinds}
    tallest = max(map(len, operations.values()), default=4)
    figure = new_figure(3.6 * max(len(kinds), 2), 5.0 + 0.17 * tallest)
    grid = figure.add_gridspec(2, max(len(kinds), 1), height_ratios=(2.3, 1.2 + 0.17 * tallest))
    layers = figure.add_subplot(grid[0, :])
    layer_panel(layers, record)
    for column, kind in enumerate(kinds):
        _operation_panel(figure.add_subplot(grid[1, column]), operations[kind], kind)
    legend_below(figure, *layers.get_legend_handles_labels(), 5)
    whole = record["forward"]
    rows, times = record["rows"], f"{whole['us']:.4g} us, floor {whole['floor_us']:.4g} us"
    said = f"{rows} row{'s' * (rows != 1)} after {record['context_len']}: {times}"
    figure_heading(figure, title or f"{document['model']}, {record['dtype']}, forward of {said}")
    return figure


def _record_of(document: Mapping[str, Any], rows: int | None) -> Mapping[str, Any]:
    times = document.get("times") or ()
    require(times, "the layer bench holds no times; they need a GPU and graphs")
    found = [record for record in times if rows in (None, record["rows"])]
    if not found:
        raise UsageError(
            f"plot: the layer bench has {', '.join(str(r['rows']) for r in times)} rows, not {rows}"
        )
    return found[0]


def _costliest(operations: Sequence[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    """The operations of one kind in the forward's order, the cheapest left out where there are too many."""
    mine = [operation for operation in operations if operation["kind"] == kind]
    kept = sorted(mine, key=lambda operation: -operation["us"])[:MOST_OPERATIONS]
    return [operation for operation in mine if any(operation is other for other in kept)]


def layer_panel(axes: Axes, record: Mapping[str, Any]) -> None:
    """Bars of one record's layers, their floors as marks."""
    floors = {
        kind: sum(op["floor_us"] for op in record["operations"] if op["kind"] == kind)
        for kind in ("dense", "moe")
    }
    layers = record["layers"]
    for kind, (colour, hatch) in KINDS.items():
        at = [place for place, layer in enumerate(layers) if layer["kind"] == kind]
        bar = {"color": colour, "hatch": hatch, "edgecolor": BLACK, "lw": 0.6, "width": 0.8}
        if at:
            axes.bar(at, [layers[place]["us"] for place in at], label=KIND_NAMES[kind], **bar)
    under = [place for place, layer in enumerate(layers) if layer["kind"]]
    heights = [floors[layers[place]["kind"]] for place in under]
    axes.hlines(
        heights, np.array(under) - 0.4, np.array(under) + 0.4, label="floor (copy bandwidth)", **FLOOR
    )
    shown = _labelled(layers)
    axes.set_xticks(shown, [str(layers[place]["layer"]).replace("embedding", "emb.") for place in shown])
    axes.set_xlim(-0.7, len(layers) - 0.3)
    label_axes(axes, "layer", "time (us)")
    heading(axes, "Layers inside the forward's graph")


def _labelled(layers: Sequence[Mapping[str, Any]]) -> list[int]:
    """Places whose label fits: the ends, and of the layers every so many that keeps clear of them."""
    every, last = max(1, round(len(layers) / 20)), len(layers) - 1
    inner = [place for place, layer in enumerate(layers) if layer["kind"] and layer["layer"] % every == 0]
    ends = [place for place, layer in enumerate(layers) if not layer["kind"]]
    return sorted([*ends, *(place for place in inner if min(place, last - place) >= every)])


def _operation_panel(axes: Axes, operations: Sequence[Mapping[str, Any]], kind: str) -> None:
    places = np.arange(len(operations))
    colour, hatch = KINDS["" if kind == "ends" else kind]
    bar = {"color": colour, "hatch": hatch, "edgecolor": BLACK, "lw": 0.5, "height": 0.76}
    axes.barh(places, [operation["us"] for operation in operations], **bar)
    floors = [operation["floor_us"] for operation in operations]
    axes.vlines(floors, places - 0.38, places + 0.38, **FLOOR)
    axes.set_yticks(places, [_short(operation["operation"]) for operation in operations], fontsize=7.5)
    axes.set_ylim(len(operations) - 0.4, -0.6)
    axes.xaxis.get_major_locator().set_params(nbins=4)
    label_axes(axes, "time alone (us)", "")
    heading(axes, {"dense": "Dense layer", "moe": "MoE layer", "ends": "Embedding and head"}[kind])


def _short(operation: str) -> str:
    operation = operation.replace("mlp.experts.", "").replace("mlp.", "")
    return operation if len(operation) <= 26 else operation[:25] + "…"


def parity_figure(
    errors: Mapping[str, Sequence[Mapping[str, Any]]], limit: float | None = None, title: str = ""
) -> Figure:
    """Relative error (norm of the difference over the norm) of each named step, by layer: one series a label.

    `errors` is {label: steps}, the label most often a dtype and steps those of `bench layers`' parity: dicts of `step`,
    `layer`, `error`. An error of exactly 0 stands at the bottom as a hollow mark pointing down, one that is not finite
    at the top as a cross. `limit`, of the step `layer`, is a dashed line. UsageError without a step.
    """
    names = list(dict.fromkeys(step["step"] for steps in errors.values() for step in steps))
    require(names, "there is no parity to draw")
    columns = min(len(names), 5)
    lines = -(-len(names) // columns)
    figure = new_figure(2.15 * max(columns, 3), 1.4 + 2.1 * lines)
    panels = figure.subplots(lines, columns, sharey=True, squeeze=False).ravel()
    low, high = _error_range(errors, limit)
    for axes, name in zip(panels, names, strict=False):
        for index, (label, steps) in enumerate(errors.items()):
            mine = [step for step in steps if step["step"] == name]
            _error_series(axes, mine, label, index, low, high)
        if limit is not None and name == "layer":
            axes.axhline(limit, color=BLACK, ls="--", lw=1.1, label=f"check fails above {limit:g}")
        axes.set(yscale="log", ylim=(low, high))
        count_axis(axes.xaxis, 4)
        heading(axes, name)
        axes.grid(axis="y", color="#E5E5E5", lw=0.5)
        label_axes(axes, "layer", "")
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    figure.supylabel("relative error (2-norm, no unit)", fontsize=10)
    handles = {h.get_label(): h for axes in panels for h in axes.get_legend_handles_labels()[0]}
    legend_below(figure, list(handles.values()), list(handles), 4)
    figure_heading(figure, title or "Error of every step against NumPy in f64")
    return figure


def _error_range(
    errors: Mapping[str, Sequence[Mapping[str, Any]]], limit: float | None
) -> tuple[float, float]:
    values = np.array([step["error"] for steps in errors.values() for step in steps], float)
    values = np.append(values, [] if limit is None else limit)
    values = values[np.isfinite(values) & (values > 0)]
    return (values.min() / 10, values.max() * 10) if len(values) else (1e-8, 1.0)


def _error_series(
    axes: Axes, steps: Sequence[Mapping[str, Any]], label: str, index: int, low: float, high: float
) -> None:
    colour, marker = SERIES[index % len(SERIES)], MARKERS[index % len(MARKERS)]
    layers, values = np.array([s["layer"] for s in steps]), np.array([s["error"] for s in steps], float)
    with np.errstate(invalid="ignore"):
        plain, zero = np.isfinite(values) & (values > 0), values == 0
    axes.plot(layers[plain], values[plain], marker=marker, ms=4.5, lw=0.8, color=colour, label=label)
    axes.plot(layers[zero], np.full(int(zero.sum()), low * 2), "v", ms=5, color=colour, mfc="white")
    wrong = ~np.isfinite(values)
    axes.plot(layers[wrong], np.full(int(wrong.sum()), high / 2), "X", ms=7, color=colour)
