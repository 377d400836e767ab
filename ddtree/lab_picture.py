"""The picture of a tree-shape explorer: one root's tree, what it promised and gave, and the mean of all roots.

It is one Figure that is drawn again and again: its axes and ticks, which take longest to make, stay.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from ddtree.lab_shapes import Curve, Root, curve_of, walked_rows
from ddtree.plots_style import BLUE, CONVENTION, GREY, VERMILION
from ddtree.plots_tree import ACCEPTED, BONUS, DRAFTED, lay_out
from ddtree.tree import DraftTree

MOST_LINES = 26  # of a tree whose tokens can all be written
LETTERS = 8  # of a token that is written
DPI = 90
NameOf = Callable[[int], str]


def png_of(figure: Figure) -> bytes:
    """The figure as PNG, at its own resolution."""
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()


class CurvePanel:
    """Expected and actual tokens a round against the budget, and where the slider stands."""

    def __init__(self, axes: Axes, most: int):
        self.axes = axes
        look = {"lw": 1.6, "drawstyle": "steps-post"}
        (self.expected,) = axes.plot([], [], color=VERMILION, ls="--", label="expected", **look)
        (self.actual,) = axes.plot([], [], color=BLUE, label="actual", **look)
        self.line = axes.axvline(0, color=GREY, lw=1)
        (self.promised,) = axes.plot([], [], "s", color=VERMILION, ms=6, clip_on=False)
        (self.taken,) = axes.plot([], [], "o", color=BLUE, ms=7, clip_on=False)
        axes.set_xlim(0, most)
        axes.set_xticks(range(0, most + 1, 8))
        axes.grid(axis="y", color="#DDDDDD", lw=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        axes.set_xlabel("budget (nodes, root not counted)", fontsize=9)
        axes.set_ylabel("tokens a round", fontsize=9)
        axes.legend(loc="lower right", fontsize=8, frameon=False, ncols=2)

    def draw(self, curve: Curve, budget: int, title: str) -> None:
        budgets = np.arange(len(curve.actual))
        self.expected.set_data(budgets, curve.expected)
        self.actual.set_data(budgets, curve.actual)
        self.line.set_xdata([budget, budget])
        self.promised.set_data([budget], [curve.expected[budget]])
        self.taken.set_data([budget], [curve.actual[budget]])
        self.axes.set_ylim(0, 1.15 * max(curve.actual.max(), curve.expected.max()))
        ends = f"{curve.actual[budget]:.3g} actual, {curve.expected[budget]:.3g} expected"
        self.axes.set_title(f"{title}: {ends}", fontsize=9.5, loc="left", y=1.02)


class Picture:
    """The figure for roots of one horizon, at budgets up to `most`; `name_of` gives a token's text."""

    def __init__(self, horizon: int, most: int, name_of: NameOf):
        self.most, self.name_of = most, name_of
        self.figure = Figure(figsize=(10, 6.6), dpi=DPI)
        self.tree_axes = axes = self.figure.add_axes((0.02, 0.475, 0.96, 0.42))
        self.mine = CurvePanel(self.figure.add_axes((0.07, 0.08, 0.41, 0.27)), most)
        self.mean = CurvePanel(self.figure.add_axes((0.56, 0.08, 0.41, 0.27)), most)
        self.heading = self.figure.text(0.02, 0.965, "", fontsize=11, parse_math=False)
        self.said = self.figure.text(0.02, 0.925, "", fontsize=10)
        self.artists: list[Any] = []
        axes.set(xlim=(-0.5, horizon + 1.5), yticks=[])
        axes.set_xticks(range(horizon + 2))
        axes.tick_params(labelsize=8)
        axes.spines[["left", "right", "top"]].set_visible(False)
        colours = "blue: accepted; orange: the bonus token; grey: drafted, not taken"
        axes.set_xlabel(f"depth below the root ({colours})", fontsize=9)

    def draw(self, root: Root, budget: int, depth: int, mean: Curve, title: str) -> Figure:
        """The root's tree of that budget and depth, its curve, and the given mean; the figure is this object's own."""
        whole = root.tree(self.most, depth)
        rows = walked_rows(whole, root.continuation)
        columns = (whole.token_ids, whole.parents, whole.depths, whole.log_weights)
        tree = DraftTree(*(column[: budget + 1] for column in columns))
        path = [row for row in rows if row <= tree.num_nodes]
        self._draw_tree(tree, path, int(root.continuation[len(path) - 1]))
        self.mine.draw(curve_of(whole, rows, self.most), budget, "This root")
        self.mean.draw(mean, budget, "Mean of all recorded roots")
        self.heading.set_text(title)
        taken = f"acceptance length {len(path)} ({CONVENTION})"
        self.said.set_text(f"{tree.num_nodes} nodes verified, the deepest at {tree.max_depth}; {taken}")
        return self.figure

    def _draw_tree(self, tree: DraftTree, path: Sequence[int], bonus: int) -> None:
        axes, depths = self.tree_axes, tree.depths
        for artist in self.artists:
            artist.remove()
        height, places = lay_out(tree)
        on_path = np.zeros(len(places), bool)
        on_path[list(path)] = True
        bends = _bends(tree, places)
        last = path[-1]
        taken = ((depths == depths[last] + 1) & (places == places[last])).any()
        spot = (depths[last] + 1, places.max() + 1 if taken else places[last])
        self.artists = [
            axes.add_collection(LineCollection(bends[~on_path[1:]], colors="#BDBDBD", lw=0.9)),
            axes.add_collection(LineCollection(bends[on_path[1:]], colors=ACCEPTED, lw=2.2)),
            *axes.plot([depths[last], spot[0]], [places[last], spot[1]], color=BONUS, ls=":", lw=2),
            *axes.plot(depths[~on_path], places[~on_path], "o", color=DRAFTED, ms=3.5),
            *axes.plot(depths[on_path], places[on_path], "o", color=ACCEPTED, ms=5.5),
            *axes.plot(*spot, "o", color=BONUS, ms=6),
            self._text(spot, bonus, BONUS, "bold"),
        ]
        for row in range(len(places)) if height <= MOST_LINES else path:
            look = (ACCEPTED, "bold") if on_path[row] else ("#333333", "normal")
            self.artists.append(self._text((depths[row], places[row]), tree.token_ids[row], *look))
        low = max(height - 1, spot[1], 6)
        axes.set_ylim(low + 0.5 + 0.02 * low, -0.9 - 0.06 * low)

    def _text(self, place: tuple[float, float], token: int, colour: str, weight: str) -> Any:
        text = self.name_of(int(token))
        text = text if len(text) <= LETTERS else text[: LETTERS - 1] + "…"
        look = {"color": colour, "weight": weight, "family": "monospace", "fontsize": 7, "parse_math": False}
        where = {"xytext": (0, 3), "textcoords": "offset points", "ha": "center", "va": "bottom"}
        return self.tree_axes.annotate(text, place, **where, **look)


def _bends(tree: DraftTree, places: np.ndarray) -> np.ndarray:
    """Edges of rows 1.. as lines of three points f64 [N, 3, 2]: down from the parent, then along."""
    parents, depths, mine = tree.parents[1:], tree.depths[1:], places[1:]
    corners = ((depths - 1, places[parents]), (depths - 0.5, mine), (depths, mine))
    return np.stack([np.stack(corner, axis=1) for corner in corners], axis=1)
