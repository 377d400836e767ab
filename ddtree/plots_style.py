"""What all figures share: a palette that colour-blind readers and grey print can tell apart, axes, empty data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ddtree.errors import UsageError

# Okabe and Ito's palette; yellow is left out, it is too light for lines
BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, BLACK, GREY = "#56B4E9", "#CC79A7", "#000000", "#7F7F7F"
SERIES = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, BLACK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-.", ":")

CONVENTION = "bonus token included"
METHODS = ("tree", "chain", "ar")
METHOD_COLOURS = {"tree": BLUE, "chain": VERMILION, "ar": BLACK}
METHOD_MARKERS = {"tree": "o", "chain": "s", "ar": ""}


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of that many inches, laid out so that nothing is cut."""
    return Figure(figsize=(width, height), layout="constrained")


def heading(axes: Axes, text: str) -> None:
    """A title over the left corner; a dollar sign is a dollar sign."""
    axes.set_title(text, fontsize=10, loc="left", parse_math=False)


def figure_heading(figure: Figure, text: str) -> None:
    """A title over all panels, at the left."""
    figure.suptitle(text, fontsize=11, x=0.01, ha="left", parse_math=False)


def label_axes(axes: Axes, x: str, y: str) -> None:
    """Both axis labels; each says what is counted and in which unit."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)


def count_axis(axis: Any, most: int = 8) -> None:
    """Ticks at whole numbers alone, at most about that many."""
    axis.set_major_locator(MaxNLocator(nbins=most, integer=True, min_n_ticks=1))


def legend_below(figure: Figure, handles: Sequence[Any], labels: Sequence[str], columns: int = 4) -> None:
    """One legend under all panels, where it covers no data."""
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(columns, max(len(labels), 1)),
        fontsize=8.5,
        frameon=False,
    )


def require(data: Any, what: str) -> None:
    """UsageError where there is nothing to draw."""
    if not len(data):
        raise UsageError(f"plot: {what}")
