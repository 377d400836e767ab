"""What the notebook of a full decode calls: rounds worth a look and their trees, what layers take here, what was
recorded elsewhere. It measures with a clock and decides nothing about decoding.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ddtree.bench_forward import commit, tree_forward, verify_tree
from ddtree.bundle import Bundle
from ddtree.engine import Engine
from ddtree.lab import dash_or, text_table
from ddtree.plots import token_label, tree_figure
from ddtree.plots_style import (
    BLUE,
    ORANGE,
    SKY,
    VERMILION,
    count_axis,
    figure_heading,
    label_axes,
    legend_below,
    new_figure,
)
from ddtree.rounds import Round
from ddtree.study_rounds import departure

DEEP, LETTERS, WIDEST = 9, 8, 13.0  # a tree deeper than that; of a token's text then; inches of its figure


def tokens_of(rounds: Iterable[Round]) -> list[int]:
    """All tokens that a decode returned, in order."""
    return [token for this in rounds for token in this.tokens]


def round_table(bundle: Bundle, rounds: Sequence[Round]) -> str:
    """A line a round: nodes verified, tokens accepted and the bonus token as text, milliseconds."""
    rows = []
    for this in rounds:
        accepted = "".join(_text(bundle, token) for token in this.tree.token_ids[this.path[1:]])
        milliseconds = 1e3 * sum(this.seconds.values())
        bonus = _text(bundle, this.bonus)
        shown = accepted if len(accepted) <= 56 else accepted[:55] + "…"
        rows.append(
            (this.index, this.tree.num_nodes, len(this.tokens), f"{milliseconds:.1f}", bonus, shown or "-")
        )
    return text_table(("round", "nodes", "tokens", "ms", "bonus", "accepted"), rows)


def _text(bundle: Bundle, token: int) -> str:
    return token_label(bundle.decode([int(token)]))


def draw_round(bundle: Bundle, this: Round, title: str) -> Figure:
    """The round's tree with its accepted path, tokens as text; a deep one is narrowed, and its long tokens cut."""
    names = [_text(bundle, token) for token in (*this.tree.token_ids, this.bonus)]
    if this.tree.max_depth > DEEP:
        names = [name if len(name) <= LETTERS else name[: LETTERS - 1] + "…" for name in names]
    figure = tree_figure(this.tree, this.path, names[-1], names[:-1], title)
    figure.set_figwidth(min(figure.get_figwidth(), WIDEST))
    return figure


def notable_rounds(rounds: Sequence[Round]) -> dict[str, Round]:
    """Three rounds after the prefill, the earliest of equals: the longest path that keeps to first children, the one
    that leaves them most often (then the longest), and the shortest. A kind that did not occur is left out.
    """
    seen = [(departure(this.tree, this.path), this) for this in rounds if this.index > 0]
    on_spine = [item for item in seen if item[0][0] == 0 and item[0][1] > 1]
    off_spine = [item for item in seen if item[0][0] > 0]
    found = {}
    if on_spine:
        found["keeps to the spine"] = max(on_spine, key=lambda item: item[0])[1]
    if off_spine:
        found["leaves the spine"] = max(off_spine, key=lambda item: item[0])[1]
    if seen:
        found["ends soonest"] = min(seen, key=lambda item: item[0][1])[1]
    return found


def label_of(document: Mapping[str, Any]) -> str:
    """Where and on what the document of a layer or decode bench was made."""
    records = document["rows"] if "rows" in document else document["times"]
    mode = (records[0][name] for name in ("dtype", "gemm", "mode"))
    return ", ".join([document["gpu"], document["model"], *mode])


def host_table(records: Iterable[Mapping[str, Any]]) -> str:
    """A bench's rounds on the host's clock as text: microseconds of its own work and of waiting for the GPU; speeds.

    `own p90`: nine rounds of ten took less.
    """
    rows = []
    for record in records:
        own, wait = record["host_us"]["own"], record["host_us"]["wait"]
        numbers = (own["median"], own["p90"], wait["median"])
        speeds = record["tokens_per_second_wall"], record["tokens_per_second"]
        rows.append((name_of(record), *(f"{number:.0f}" for number in (*numbers, *speeds))))
    return text_table(("method", "own us", "own p90", "wait us", "tok/s by wall clock", "on the GPU"), rows)


def name_of(record: Mapping[str, Any]) -> str:
    """A comparison's row in words: `tree 16, greedy`."""
    budget = f" {record['budget']}" if record["budget"] else ""
    temperature = record["temperature"]
    return f"{record['method']}{budget}, " + (f"temperature {temperature:g}" if temperature else "greedy")


def side_by_side(documents: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Rows of several comparisons under one another as text, by temperature; what was not timed is a dash.

    accept: tokens a round, bonus token included. nodes: verified a round, root not counted.
    """

    lines = []
    for where, records in documents.items():
        for r in records:
            equal = "yes" if r["tokens_equal"] else "NO"
            nodes, speed = dash_or(r["nodes_per_round"], 1), dash_or(r["tokens_per_second"], 0).rjust(5)
            accept, outside = (
                dash_or(r[column], 2) for column in ("mean_acceptance", "mean_acceptance_outside_loops")
            )
            ratio = dash_or(r["speed_over_ar"], 2).rjust(4)
            lines.append((r["temperature"], where, name_of(r), nodes, equal, accept, outside, speed, ratio))
    lines = [line[1:] for line in sorted(lines, key=lambda line: line[0])]
    names = ("where", "method", "nodes", "equal", "accept", "no loops", "tok/s", "x ar")
    return text_table(names, lines)


def layer_times(
    engine: Engine, tokens: Sequence[int], context: int, rows: int, repeats: int = 7
) -> list[dict[str, Any]]:
    """Milliseconds of the embedding, every layer and the head of a verify of `rows` rows on the host's backend.

    Tokens are the context and more for the tree's path; the median of `repeats` forwards. A layer's time holds the
    norm that feeds the next.
    """
    assert engine.runner is None, "on a device the host's clock sees launches, not layers"
    commit(engine, tokens[:context])
    batch = tree_forward(engine, verify_tree(tokens[context:], rows, engine.config.vocab_size))
    spans = []
    for _ in range(repeats):
        stamps = [time.perf_counter()]

        def see(step: str, layer: int, array: Any, stamps: list[float] = stamps) -> None:
            if step in ("embedding", "layer"):
                stamps.append(time.perf_counter())

        engine.model.forward(batch, engine.cache, see)
        spans.append(np.diff([*stamps, time.perf_counter()]))
    config = engine.config
    layers = range(config.num_hidden_layers)
    kinds = ["", *("moe" if config.is_moe(layer) else "dense" for layer in layers), ""]
    middle = np.median(spans, axis=0) * 1e3
    names = ["embedding", *layers, "head"]
    return [
        {"layer": name, "kind": kind, "ms": float(ms)}
        for name, kind, ms in zip(names, kinds, middle, strict=True)
    ]


def layer_figure(times: Mapping[str, Sequence[Mapping[str, Any]]], title: str = "") -> Figure:
    """Milliseconds of every layer, bars of a colour for each label; `times` as `layer_times` gives them."""
    figure = new_figure(8.5, 3.4)
    axes = figure.add_subplot()
    width = 0.84 / len(times)
    looks = zip(times.items(), (SKY, ORANGE, BLUE, VERMILION), ("", "///", "...", "xxx"), strict=False)
    for number, ((label, layers), colour, hatch) in enumerate(looks):
        places = np.arange(len(layers)) + width * (number - (len(times) - 1) / 2)
        bar = {"color": colour, "hatch": hatch, "edgecolor": "black", "lw": 0.5}
        axes.bar(places, [layer["ms"] for layer in layers], width=width, label=label, **bar)
    names = [f"{layer['layer']}\n{layer['kind']}".strip() for layer in next(iter(times.values()))]
    axes.set_xticks(range(len(names)), names, fontsize=8)
    count_axis(axes.yaxis, 5)
    axes.yaxis.get_major_locator().set_params(integer=False)
    label_axes(axes, "layer", "milliseconds")
    legend_below(figure, *axes.get_legend_handles_labels(), len(times))
    figure_heading(figure, title or "What each layer takes on this machine")
    return figure
