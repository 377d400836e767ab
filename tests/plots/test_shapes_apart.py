"""Trees of another shape than best_first are told apart in figures of comparisons and of traces."""

from dataclasses import dataclass, field

import pytest
from plots.examples import record
from plots.layout import layout_faults
from support import assert_one_line

from ddtree import plots
from ddtree.cli_plot_inputs import Inputs
from ddtree.errors import UsageError


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
