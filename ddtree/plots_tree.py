"""Figures: data in, Figure out. One function a figure; nothing here runs a model or writes a file."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from ddtree.tree import DraftTree

# Okabe and Ito's palette: told apart by colour-blind readers, and in print
ACCEPTED, BONUS, DRAFTED = "#0072B2", "#D55E00", "#7F7F7F"


def tree_figure(
    tree: DraftTree, path: Sequence[int], bonus: str, labels: Sequence[str], title: str = ""
) -> Figure:
    """One round's draft tree with its accepted path: depth to the right, one line a leaf, the likeliest on top.

    `labels` is the text of each row's token, `path` the accepted rows (root first), `bonus` the text of the token
    that the target said after them. The acceptance length in the heading counts the bonus token.
    """
    height, places = lay_out(tree)
    figure = Figure(
        figsize=(max(7.0, 1.15 * (tree.max_depth + 2.6)), max(2.8, 0.36 * height + 1.5)), layout="constrained"
    )
    axes = figure.add_subplot()
    accepted = set(int(row) for row in path)
    for row in range(1, tree.num_nodes + 1):
        parent, taken = int(tree.parents[row]), row in accepted
        _edge(axes, places, tree.depths, parent, row, taken)
    for row, label in enumerate(labels):
        colour = ACCEPTED if row in accepted else DRAFTED
        _token(axes, tree.depths[row], places[row], label, colour, filled=row in accepted)
    last = int(path[-1])
    spot = (tree.depths[last] + 1, _free_place(tree, places, last))
    axes.plot(
        [tree.depths[last], spot[0]], [places[last], spot[1]], color=BONUS, lw=2, ls=(0, (2, 1.5)), zorder=1
    )
    _token(axes, *spot, bonus, BONUS, filled=True)
    _legend_and_axes(axes, max(tree.max_depth, int(spot[0])), height, max(places.max(), spot[1]))
    heading = f"{tree.num_nodes} nodes verified, acceptance length {len(path)} (bonus token included)"
    axes.set_title(f"{title}\n{heading}" if title else heading, fontsize=10, loc="left")
    return figure


def lay_out(tree: DraftTree) -> tuple[int, np.ndarray]:
    """How many lines the tree takes, and each row's line; a first child stands on its parent's line."""
    places, next_line = np.zeros(tree.num_nodes + 1), 0
    children: list[list[int]] = [[] for _ in range(tree.num_nodes + 1)]
    for row in range(1, tree.num_nodes + 1):
        children[tree.parents[row]].append(row)
    stack = [0]
    while stack:
        row = stack.pop()
        parent = int(tree.parents[row])
        if row == 0 or row == children[parent][0]:
            places[row] = places[parent] if row else 0
        else:
            next_line += 1
            places[row] = next_line
        stack.extend(reversed(children[row]))
    return next_line + 1, places


def _free_place(tree: DraftTree, places: np.ndarray, row: int) -> float:
    """A line for the bonus token one deeper than `row`: the row's own when nothing stands there, else below all."""
    beside = (tree.depths == tree.depths[row] + 1) & (places == places[row])
    return places[row] if not beside.any() else places.max() + 1


def _edge(axes, places, depths, parent: int, row: int, taken: bool) -> None:
    corner = depths[row] - 0.5
    x, y = (
        [depths[parent], corner, corner, depths[row]],
        [places[parent], places[parent], places[row], places[row]],
    )
    style = (
        {"color": ACCEPTED, "lw": 2.4, "zorder": 2} if taken else {"color": "#BDBDBD", "lw": 1.0, "zorder": 1}
    )
    axes.plot(x, y, solid_joinstyle="round", **style)


def _token(axes, x: float, y: float, label: str, colour: str, filled: bool) -> None:
    box = {"boxstyle": "round,pad=0.25", "fc": colour if filled else "white", "ec": colour, "lw": 1.0}
    text = {"color": "white" if filled else "black", "family": "monospace", "size": 8}
    axes.text(x, y, label, ha="center", va="center", bbox=box, zorder=3, parse_math=False, **text)


def _legend_and_axes(axes, deepest: int, height: int, lowest: float) -> None:
    kinds = (
        ("accepted (the root is committed already)", ACCEPTED),
        ("bonus token", BONUS),
        ("drafted, not taken", DRAFTED),
    )
    for name, colour in kinds:
        axes.plot([], [], "s", color=colour, label=name)
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.14 - 0.4 / (height + 2)),
        ncols=3,
        fontsize=8,
        frameon=False,
    )
    axes.set_xlabel("depth below the root (positions ahead)")
    axes.set_xticks(range(deepest + 1))
    axes.set_yticks([])
    axes.set_xlim(-0.6, deepest + 0.7)
    axes.set_ylim(lowest + 0.7, -0.7)
    axes.spines[["left", "right", "top"]].set_visible(False)


def token_label(text: str) -> str:
    """A token's text with its white space made visible, long runs counted, cut to 14 characters."""
    text = re.sub(" {3,}", lambda run: f"·×{len(run[0])}", text)
    shown = text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·")
    return shown if len(shown) <= 14 else shown[:13] + "…"
