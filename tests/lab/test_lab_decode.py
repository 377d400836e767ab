"""Rounds worth drawing, layer times, labels of recorded documents, and tables of several comparisons."""

import io

import numpy as np
import pytest
from plots.examples import record
from plots.layout import assert_readable
from support import tiny, trained

from ddtree import lab_decode
from ddtree.config import DecodeConfig
from ddtree.decode import decode
from ddtree.engine import Engine
from ddtree.lab_decode import (
    draw_round,
    host_table,
    label_of,
    layer_figure,
    layer_times,
    name_of,
    notable_rounds,
    round_table,
    side_by_side,
    tokens_of,
)
from ddtree.rounds import Round
from ddtree.tree import DraftTree


def a_round(index: int, path: list[int]) -> Round:
    """A round on root -> (1 -> (2 -> 5), 3), 4 that accepts `path`."""
    parents, depths = np.array([-1, 0, 1, 1, 0, 2], np.int32), np.array([0, 1, 2, 2, 1, 3], np.int32)
    tree = DraftTree(np.arange(6, dtype=np.int32), parents, depths, -depths.astype(float)).validate()
    return Round(index, 9, tree, np.zeros(6, np.int32), np.array(path), 7, (*path[1:], 7), {}, None, 0, None)


def test_notable_rounds_are_the_longest_the_most_wayward_and_the_shortest() -> None:
    rounds = [a_round(i, path) for i, path in enumerate(([0], [0, 1], [0, 1, 2], [0, 4], [0, 1, 3], [0]))]
    found = notable_rounds(rounds)
    assert {name: this.index for name, this in found.items()} == {
        "keeps to the spine": 2,
        "leaves the spine": 4,
        "ends soonest": 5,
    }
    assert list(notable_rounds(rounds[:2])) == ["keeps to the spine", "ends soonest"]
    assert notable_rounds(rounds[:1]) == {}
    assert tokens_of(rounds[:3]) == [7, 1, 7, 1, 2, 7]


def test_a_decode_as_text_and_trees() -> None:
    bundle = trained()
    engine = Engine(bundle, max_budget=8)
    rounds = list(decode(engine, bundle.encode("def f(self):\n"), DecodeConfig(budget=8, max_new_tokens=12)))
    lines = round_table(bundle, rounds).splitlines()
    assert lines[0].split() == ["round", "nodes", "tokens", "ms", "bonus", "accepted"]
    assert [int(line.split()[2]) for line in lines[1:]] == [len(this.tokens) for this in rounds]
    assert_readable(draw_round(bundle, rounds[-1], "A round"))


def test_a_deep_tree_is_narrow_enough_to_read() -> None:
    bundle = trained()
    longest = max(range(bundle.config.vocab_size), key=lambda token: len(bundle.decode([token]).strip()))
    depths = np.arange(16, dtype=np.int32)
    tree = DraftTree(np.full(16, longest, np.int32), depths - 1, depths, -depths.astype(float)).validate()
    deep = Round(1, 9, tree, depths, depths[:2], longest, (longest, longest), {}, None, 0, None)
    figure = draw_round(bundle, deep, "A round")
    assert figure.get_figwidth() == lab_decode.WIDEST and figure.axes[0].texts[3].get_text().endswith("…")
    assert_readable(figure)


@pytest.mark.parametrize("rows", [1, 5])
def test_layer_times_are_of_every_layer(rows: int) -> None:
    engine = Engine(tiny("dsv3"), max_budget=8, max_context=64)
    times = layer_times(engine, list(range(5, 40)), context=6, rows=rows, repeats=2)
    layers = engine.config.num_hidden_layers
    assert [layer["layer"] for layer in times] == ["embedding", *range(layers), "head"]
    kinds = ["moe" if engine.config.is_moe(layer) else "dense" for layer in range(layers)]
    assert [layer["kind"] for layer in times] == ["", *kinds, ""]
    assert all(layer["ms"] > 0 for layer in times) and engine.context_len == 6


def test_layers_are_drawn() -> None:
    layers = [{"layer": name, "kind": kind, "ms": 1.5} for name, kind in (("embedding", ""), (0, "dense"))]
    figure = layer_figure({"1 row": layers, "16 rows": layers})
    assert_readable(figure)
    assert [bar.get_height() for bar in figure.axes[0].patches] == [1.5] * 4
    figure.savefig(io.BytesIO())


def test_labels_say_where_and_how() -> None:
    mode = {"dtype": "f32", "gemm": "invariant", "mode": "graphs"}
    document = {"gpu": "NVIDIA H200", "model": "py12m", "rows": [mode]}
    assert label_of(document) == "NVIDIA H200, py12m, f32, invariant, graphs"
    times = [mode | {"dtype": "bf16", "mode": "eager"}]
    document = {"gpu": "NVIDIA H200", "model": "small", "times": times, "parity": None}
    assert label_of(document) == "NVIDIA H200, small, bf16, invariant, eager"
    assert name_of(record("ar", 0)) == "ar, greedy"
    assert name_of(record("tree", 16, 0.8)) == "tree 16, temperature 0.8"


def test_comparisons_side_by_side() -> None:
    rows = [record("ar", 0, 0.8), record("tree", 16, 0.0, speed=None)]
    rows = [row | {"tokens_equal": row["method"] == "ar"} for row in rows]
    lines = side_by_side({"here": rows, "there": rows[:1]}).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["here", "here", "there"]
    assert lines[1].split() == ["here", "tree", "16,", "greedy", "16.0", "NO", "3.00", "3.00", "-", "-"]
    assert lines[2].split()[-2:] == ["300", "1.20"]


def test_host_times_are_medians_by_method() -> None:
    spans = {"own": {"median": 69.6, "p90": 140.2}, "wait": {"median": 248.9, "p90": 257.0}}
    lines = host_table(
        [record("tree", 16, 0.8) | {"host_us": spans, "tokens_per_second_wall": 250.4}]
    ).splitlines()
    assert lines[1].split() == ["tree", "16,", "temperature", "0.8", "70", "140", "249", "250", "300"]
