"""Figures of expert routing: which rows chose which experts, and how much each expert got."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from ddtree.errors import UsageError
from ddtree.plots_style import (
    BLACK,
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

MOST_LAYERS = 12
# Blues without their palest quarter, so that the smallest weight is told from the white of none
INKS = ListedColormap(colormaps["Blues"](np.linspace(0.25, 1.0, 192)))
MOST_TOKENS = 40  # of which each can have its label


def routing_map(
    layers: Mapping[int, np.ndarray],
    token_labels: Sequence[str] | None = None,
    title: str = "",
    values: str = "gate weight",
) -> Figure:
    """A heat map a layer: expert by row of the forward, white where the expert was not chosen.

    `layers` is {layer: gates f32[experts, tokens]}, or counts of choices in that form with `values` saying so.
    `token_labels` are the rows' texts, shown for up to 40 rows. UsageError without a layer, or with more than 12.
    """
    kept = _checked(layers)
    tokens = next(iter(kept.values())).shape[1]
    labelled = token_labels is not None and len(token_labels) == tokens <= MOST_TOKENS
    columns = 1 if len(kept) == 1 else 2
    lines = -(-len(kept) // columns)
    figure = new_figure(7.0 if columns == 1 else 10.0, 1.3 + lines * (2.6 + 0.5 * labelled))
    panels = figure.subplots(lines, columns, sharex=True, squeeze=False).ravel()
    most = max(float(gates.max()) for gates in kept.values())
    for axes, (layer, gates) in zip(panels, kept.items(), strict=False):
        shown = np.ma.masked_equal(gates, 0)
        look = {"aspect": "auto", "interpolation": "nearest", "origin": "lower", "cmap": INKS}
        image = axes.imshow(shown, vmin=0, vmax=most or 1.0, **look)
        heading(axes, f"layer {layer}: {int((gates != 0).any(1).sum())} of {len(gates)} experts chosen")
        label_axes(axes, "", "expert")
        count_axis(axes.yaxis, 6)
        count_axis(axes.xaxis)
    for axes in panels[len(kept) :]:
        axes.set_visible(False)
    for axes in panels[max(0, len(kept) - columns) : len(kept)]:
        axes.set_xlabel(
            "token of each row of the forward, the root first"
            if labelled
            else "row of the forward (0 is the root)"
        )
        axes.tick_params(labelbottom=True)
        if labelled:
            look = {"rotation": 90, "fontsize": 6.5, "family": "monospace", "parse_math": False}
            axes.set_xticks(range(tokens), token_labels, **look)
    figure.colorbar(image, ax=panels.tolist(), label=f"{values} (white: not chosen)", shrink=0.8)
    figure_heading(figure, title or f"Experts chosen by {tokens} rows")
    return figure


def load_bars(layers: Mapping[int, np.ndarray], title: str = "") -> Figure:
    """How many rows each expert got, a panel a layer, experts by number; dashed where all would get as many.

    `layers` is {layer: gates or counts [experts, tokens]}: what is not 0 was chosen. UsageError as in routing_map.
    """
    kept = _checked(layers)
    figure = new_figure(8.0, 1.5 + 1.35 * len(kept))
    panels = figure.subplots(len(kept), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (layer, gates) in zip(panels, kept.items(), strict=True):
        loads = (gates != 0).sum(1)
        axes.bar(
            np.arange(len(loads)), loads, width=0.85, color=SKY, edgecolor=BLACK, lw=0.5, label="rows it got"
        )
        axes.axhline(loads.mean(), color=VERMILION, ls="--", lw=1.4, label="an even share")
        heading(
            axes, f"layer {layer}: busiest {int(loads.max())}, idle {int((loads == 0).sum())} of {len(loads)}"
        )
        label_axes(axes, "", "rows")
        count_axis(axes.yaxis, 3)
    panels[0].set_xlim(-0.7, len(loads) - 0.3)
    count_axis(panels[-1].xaxis, 12)
    panels[-1].set_xlabel("expert (number)")
    legend_below(figure, *panels[0].get_legend_handles_labels())
    figure_heading(figure, title or f"Load of the experts, {gates.shape[1]} rows")
    return figure


def _checked(layers: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
    """The layers as arrays; UsageError for none, too many, no row, or unequal shapes."""
    require(layers, "there is no layer with routing")
    kept = {layer: np.asarray(gates) for layer, gates in layers.items()}
    shapes = {gates.shape for gates in kept.values()}
    if len(kept) > MOST_LAYERS:
        raise UsageError(
            f"plot: {len(kept)} layers are too many for one figure; choose at most {MOST_LAYERS}"
        )
    if len(shapes) != 1 or len(shape := next(iter(shapes))) != 2 or 0 in shape:
        raise UsageError(f"plot: routing wants equal [experts, tokens] a layer, found {sorted(shapes)}")
    return kept
