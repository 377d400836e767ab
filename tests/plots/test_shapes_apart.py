"""Trees of another shape than best_first are told apart in figures of comparisons and of traces."""

import json
from dataclasses import dataclass, field

import numpy as np
import pytest
from plots.examples import record
from plots.layout import layout_faults
from support import assert_one_line, branched, run

from ddtree import plots
from ddtree.cli_plot_inputs import Inputs
from ddtree.cli_plot_kinds import KINDS
from ddtree.config import DecodeConfig
from ddtree.engine import Engine
from ddtree.errors import UsageError
from ddtree.study_tables import mean_budget_curve


@dataclass
class Run:
    """What a trace says of a decode."""

    settings: dict
    rounds: list = field(default_factory=list)


def run_of(shape, method="tree"):
    return Run({"method": method, "budget": 16, "sampling": {"temperature": 0.0}, "shape": shape})


def inputs(*runs):
    options = {"method": None, "temperature": None, "budget": None}
    return Inputs(["trace.jsonl"], [{}], list(runs), [], options)


def test_a_series_for_each_shape():
    plain = [
        record(method, budget) for method, budget in (("ar", 0), ("chain", 15), ("tree", 16), ("tree", 64))
    ]
    other = [record("tree", 16, acceptance=5.0) | {"shape": name} for name in ("branch_aware", "beam:2")]
    figure = plots.budget_curves([*plain, *other, other[0] | {"nodes_per_round": 64.0}])
    axes = figure.axes[0]
    lines = {line.get_label(): line for line in axes.get_lines()}
    names = ("tree", "chain", "ar", "tree beam:2", "tree branch_aware")
    assert list(lines) == [f"{name}, greedy" for name in names]
    assert lines["tree branch_aware, greedy"].get_ydata().tolist() == [5.0, 5.0]
    assert lines["tree, greedy"].get_ydata().tolist() == [3.0, 3.0]
    assert len({(line.get_color(), line.get_marker()) for line in lines.values()}) == 5
    assert not layout_faults(figure)


def test_a_trace_of_several_shapes_is_no_one_setting():
    found = inputs(run_of("best_first"), run_of("best_first"), run_of("branch_aware", "chain")).by_setting()
    assert [len(runs) for runs in found.values()] == [2, 1]
    with pytest.raises(
        UsageError, match=r"tree 16, greedy: .* shapes \(best_first, branch_aware\)"
    ) as caught:
        inputs(run_of("branch_aware"), run_of("best_first")).by_setting()
    assert_one_line(caught.value)


def test_costs_of_several_shapes_are_no_one_curve(tmp_path, command):
    rows = [record("ar", 0), record("tree", 16), record("tree", 64) | {"shape": "branch_aware"}]
    files = [tmp_path / f"{place}.json" for place in range(len(rows))]
    for file, row in zip(files, rows, strict=True):
        file.write_text(json.dumps({"rows": [row]}))
    code, out, err = command("plot", "cost", *files, "-o", tmp_path / "cost.png")
    assert (code, out) == (2, "") and "several shapes (best_first, branch_aware): plot files of one" in err
    assert command("plot", "cost", *files[:2], "-o", tmp_path / "cost.png")[0] == 0


@pytest.mark.parametrize("kind", ["expected", "cost"])
def test_curves_by_budget_are_of_the_shape_that_was_traced(monkeypatch, kind):
    """Its drafter's scores are random, so the trees of the other shape are others."""
    engine, traced = Engine(branched(), max_budget=16, max_context=120), run_of("branch_aware")
    prompt = engine.bundle.encode("class Stack:\n    def __init__(self):\n")
    traced.rounds = run(engine, prompt, DecodeConfig("tree", 16, 24, shape="branch_aware"))
    plain = run_of("best_first")
    plain.settings["budget"], plain.rounds = 8, traced.rounds
    seen = []
    monkeypatch.setattr(plots, f"{kind}_figure", lambda *arguments: seen.extend(arguments))
    found = inputs(traced, plain)
    found.options |= {"title": None, "max_budget": 16}
    KINDS[kind].build(found)
    mine, other = (
        mean_budget_curve(traced.rounds, range(1, 17), shape) for shape in ("branch_aware", "best_first")
    )
    assert mine.actual.tolist() != other.actual.tolist()
    actual = seen[0].actual if kind == "expected" else np.array(list(seen[1].values()))
    assert kind == "expected" or list(seen[2]) == [16], "and no speed of another shape's trees"
    assert actual.tolist() == mine.actual.tolist() and seen[-1].endswith(
        "roots of tree branch_aware 16, greedy"
    )
