"""Figures of the drafter: are its probabilities true, and what follows where its first choice fails?"""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from ddtree.plots_style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    LINES,
    MARKERS,
    ORANGE,
    SKY,
    VERMILION,
    count_axis,
    figure_heading,
    label_axes,
    legend_below,
    new_figure,
    require,
)
from ddtree.study_draft import Calibration, SiblingTable

RANK_COLOURS = (SKY, VERMILION, ORANGE, GREEN)
RANK_HATCHES = ("", "///", "...", "xxx")
RANK_LINES = (BLUE, VERMILION, ORANGE, GREEN)
FEWEST = 5  # hits from which a share is drawn: less is noise


def calibration_figure(bins: Calibration, title: str = "") -> Figure:
    """Predicted path probability against the share of nodes that the target accepted, and nodes in each bin.

    Both axes are logarithmic when the bins are (all edges but a first 0 at equal ratios), else linear. A bin without
    an accepted node shows the upper end of its 95% interval as a mark pointing down.
    """
    require(np.flatnonzero(bins.counts), "there is no drafted node to calibrate")
    figure = new_figure(6.4, 5.6)
    top, low = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    log = _logarithmic(bins.edges)
    least = float(np.nanmin(bins.predicted)) / 1.6
    if log:
        top.set(xscale="log", yscale="log", xlim=(least, 1.25), ylim=(_lowest(bins), 1.6))
    else:
        top.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    top.plot(
        [1e-12 if log else 0, 1], [1e-12 if log else 0, 1], color=GREY, ls="--", lw=1.2, label="as predicted"
    )
    seen, never = (bins.counts > 0) & (bins.observed > 0), (bins.counts > 0) & (bins.observed == 0)
    ends = np.maximum([bins.observed - bins.low, bins.high - bins.observed], 0)[:, seen]
    look = {"fmt": "o", "color": BLUE, "ms": 6, "capsize": 3, "lw": 1.3, "label": "observed, 95% interval"}
    top.errorbar(bins.predicted[seen], bins.observed[seen], yerr=ends, **look)
    if never.any():
        mark = {"marker": "v", "ms": 7, "mfc": "white", "color": BLUE, "ls": ""}
        heights = bins.high[never] if log else bins.observed[never]
        name = "none accepted: upper end of the interval" if log else "none accepted"
        top.plot(bins.predicted[never], heights, label=name, **mark)
    _count_panel(low, bins, least if log else 0.0)
    label_axes(top, "", "share accepted by the target (0 to 1)")
    label_axes(low, "predicted path probability (0 to 1, mean of a bin)", "nodes in the bin")
    legend_below(figure, *top.get_legend_handles_labels(), 3)
    figure_heading(
        figure, title or f"Calibration of {int(bins.counts.sum())} drafted nodes (bonus tokens are none)"
    )
    return figure


def _logarithmic(edges: np.ndarray) -> bool:
    inner = edges[edges > 0]
    return len(inner) > 2 and bool(np.allclose(np.diff(np.log(inner)), np.log(inner[1] / inner[0])))


def _lowest(bins: Calibration) -> float:
    """Lower end of a log axis: below every drawn mark, however wide its interval."""
    drawn = np.where(bins.observed > 0, np.maximum(bins.low, bins.observed / 10), bins.high)
    return float(np.nanmin(drawn)) / 2


def _count_panel(axes: Axes, bins: Calibration, least: float) -> None:
    """A bar a bin, between its edges."""
    filled = bins.counts > 0
    left, right = np.maximum(bins.edges[:-1], least)[filled], bins.edges[1:][filled]
    axes.bar(left, bins.counts[filled], width=right - left, align="edge", color=SKY, edgecolor=BLACK, lw=0.6)
    axes.set_yscale("log")
    axes.set_ylim(0.7, 3 * bins.counts.max())


def sibling_figure(table: SiblingTable, title: str = "") -> Figure:
    """Where the target's token stood in the drafter's table at each depth, and how often the next top-1 is right too.

    Left: of the rounds whose spine was right down to a depth, the share that each rank holds. Right: after a hit of
    each rank, the share whose child (the drafter's own top-1 one deeper) is right, with its 95% interval over prompts
    where there are two; depths of fewer than 5 hits are left out. UsageError when no round reached a depth.
    """
    require(np.flatnonzero(table.reached), "no round reached a depth with a known token")
    last = int(np.flatnonzero(table.reached)[-1]) + 1
    figure = new_figure(9.4, 4.5)
    left, right = figure.subplots(1, 2)
    _rank_panel(left, table, last)
    _child_panel(right, table)
    handles = [*left.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
    legend_below(figure, handles, [handle.get_label() for handle in handles], 3)
    figure_heading(
        figure, title or f"Siblings: {int(table.reached[0])} rounds, {table.first_misses} first misses"
    )
    return figure


def _rank_panel(axes: Axes, table: SiblingTable, last: int) -> None:
    depths, bottom, reached = np.arange(1, last + 1), np.zeros(last), np.maximum(table.reached[:last], 1)
    of_misses = table.share_of_misses()
    columns = [
        (f"rank {rank}{_percent(of_misses[rank])}", table.hits[:last, rank])
        for rank in range(table.hits.shape[1])
    ]
    columns[0] = ("rank 0: the spine goes on", columns[0][1])
    looks = [*zip(RANK_COLOURS, RANK_HATCHES, strict=True)]
    for index, (label, counts) in enumerate(
        [*columns, ("later ranks, or not in the table", table.beyond[:last])]
    ):
        colour, hatch = looks[index % len(looks)] if index < len(columns) else ("white", "")
        bar = {"color": colour, "hatch": hatch, "edgecolor": BLACK, "lw": 0.6, "label": label}
        axes.bar(depths, counts / reached, bottom=bottom, width=0.82, **bar)
        bottom = bottom + counts / reached
    for depth in depths[:: max(1, last // 16)]:
        axes.text(depth, 1.015, str(int(table.reached[depth - 1])), ha="center", fontsize=6.5)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlim(0.4, last + 0.6)
    count_axis(axes.xaxis)
    label_axes(axes, "depth below the root (positions ahead)", "share of rounds that got there (%)")
    axes.set_title("Rank of the target's token (on top: rounds)", fontsize=10, loc="left", pad=16)


def _percent(share: float) -> str:
    return "" if np.isnan(share) else f": {100 * share:.0f}% of first misses"


def _child_panel(axes: Axes, table: SiblingTable) -> None:
    overall, (lows, highs) = table.continuation(), table.interval_of_children()
    for rank in range(min(3, table.hits.shape[1])):
        depths = np.flatnonzero(table.followed[:, rank] >= FEWEST)
        name = "after the spine" if rank == 0 else f"after a rank-{rank} hit"
        if not np.isnan(overall[rank]):
            name += f": {100 * overall[rank]:.0f}% of {int(table.followed[:, rank].sum())}"
        counts = table.followed[depths, rank]
        share = table.child_right[depths, rank] / counts
        low, high = lows[depths, rank], highs[depths, rank]
        look = {
            "color": RANK_LINES[rank],
            "marker": MARKERS[rank],
            "ls": LINES[rank],
            "capsize": 2.5,
            "lw": 1.5,
        }
        ends = np.maximum([share - low, high - share], 0)
        axes.errorbar(depths + 1 + 0.12 * (rank - 1), share, yerr=ends, label=name, elinewidth=0.8, **look)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    count_axis(axes.xaxis)
    label_axes(axes, "depth of the hit (positions ahead)", "next top-1 right too (%)")
    over = " (bars: 95% over prompts)" if len(table.decodes) > 1 else ""
    axes.set_title(f"The child after a hit{over}", fontsize=10, loc="left", pad=16)
