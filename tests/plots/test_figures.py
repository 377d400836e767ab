"""Every figure: units on its axes, the acceptance convention where it counts tokens, text whole and apart."""

import re
from dataclasses import replace

import numpy as np
import pytest
from plots.examples import gates, kernel_document, layer_document, parity_steps, record
from plots.layout import assert_readable

from ddtree import plots
from ddtree.errors import UsageError
from ddtree.plots_style import LINES, MARKERS
from ddtree.study_tables import BudgetCurve, Calibration, CostCurve, SiblingTable, wilson
from ddtree.tree import DraftTree

STAGES = ("draft", "build", "verify", "accept", "compact")
UNIT = re.compile(
    r"\(.+\)|\b(x ar|tokens per second|milliseconds a round|nodes in the bin|rows|expert|layer)\b"
)


def records(temperatures=(0.0, 0.8)):
    pairs = [("ar", 0), ("chain", 4), ("chain", 15), *(("tree", budget) for budget in (4, 16, 64, 256))]
    return [record(method, budget, t, 1 + budget**0.3) for t in temperatures for method, budget in pairs]


def curve(count=64, exact=40):
    budgets = np.arange(1, count + 1)
    values = 1 + np.log1p(budgets)
    return BudgetCurve(budgets, values * 0.9, values, budgets.astype(float), budgets <= exact)


def bins(log=True):
    edges = np.array([0, 1e-3, 1e-2, 1e-1, 1.0]) if log else np.linspace(0, 1, 5)
    counts, hits = np.array([200.0, 90, 40, 0]), np.array([0.0, 2, 10, 0])
    with np.errstate(invalid="ignore"):
        observed = hits / counts
    middle = np.where(counts > 0, (edges[1:] + edges[:-1]) / 2, np.nan)
    return Calibration(edges, counts, middle, observed, *wilson(hits, counts))


def siblings(depths=15):
    """Of two prompts, whose top-1 after a hit is right in a third of the cases, and in one of all."""
    hits = np.tile([30, 10, 4, 2], (depths, 1)) // np.arange(1, depths + 1)[:, None]
    decodes = tuple(SiblingTable(hits, hits[:, 0] // 9, hits // 2, right) for right in (hits // 6, hits // 2))
    names = ("hits", "beyond", "followed", "child_right")
    return SiblingTable(*(sum(getattr(each, name) for each in decodes) for name in names), decodes)


def cost():
    rows = np.array([1.0, 5, 17, 65])
    stage_ms = {stage: (1 + index) * (1 + rows / 50) for index, stage in enumerate(STAGES)}
    return CostCurve(rows, stage_ms)


def tree():
    parents, depths = np.array([-1, 0, 1, 0, 3, 3], np.int32), np.array([0, 1, 2, 1, 2, 2], np.int32)
    return DraftTree(np.arange(6, dtype=np.int32), parents, depths, -np.arange(6.0))


TEN = {f"tree {b}, temperature 0.8": dict.fromkeys(STAGES, float(b)) for b in range(1, 11)}
FIGURES = {
    "tree": lambda: plots.tree_figure(tree(), [0, 3, 5], "·bonus", ["·token"] * 6, "A draft tree"),
    "tree, root only": lambda: plots.tree_figure(DraftTree.root_only(3), [0], "b", ["a"]),
    "acceptance": lambda: plots.acceptance_histogram({"tree 16": [1, 2, 2, 16], "chain 15": [1, 1, 5]}),
    "acceptance, one round": lambda: plots.acceptance_histogram({"tree 16": [1], "none": []}),
    "acceptance, large": lambda: plots.acceptance_histogram({f"tree {i}": [1, 2, i] for i in range(30, 36)}),
    "budgets": lambda: plots.budget_curves(records()),
    "budgets over ar": lambda: plots.budget_curves(records((0.0,)), over_ar=True, outside_loops=True),
    "budgets, three temperatures": lambda: plots.budget_curves(records((0.0, 0.5, 1.25))),
    "budgets, unmeasured": lambda: plots.budget_curves([record("tree", 16, speed=None, ms=None)]),
    "budgets, ar alone": lambda: plots.budget_curves([record("ar", 0)]),
    "expected": lambda: plots.expected_figure(curve()),
    "expected, one budget": lambda: plots.expected_figure(curve(1)),
    "stages": lambda: plots.stage_bars(TEN),
    "stages, one": lambda: plots.stage_bars({"ar": dict.fromkeys(STAGES, 0.0), "untimed": None}),
    "cost": lambda: plots.cost_figure(cost(), {b: 1 + b**0.3 for b in range(65)}, {16: 90.0, 64: 60.0}),
    "cost, one budget": lambda: plots.cost_figure(cost(), {16: 3.0}),
    "calibration": lambda: plots.calibration_figure(bins()),
    "calibration, linear": lambda: plots.calibration_figure(bins(log=False)),
    "siblings": lambda: plots.sibling_figure(siblings()),
    "siblings, deep": lambda: plots.sibling_figure(siblings(31)),
    "siblings, one round": lambda: plots.sibling_figure(siblings(1)),
    "roofline": lambda: plots.roofline_figure(kernel_document()),
    "roofline, one ceiling": lambda: plots.roofline_figure(kernel_document(mma=False)),
    "layers": lambda: plots.layer_bars(layer_document(), rows=16),
    "layers, 61": lambda: plots.layer_bars(layer_document(61)),
    "layers, 24": lambda: plots.layer_bars(layer_document(24)),
    "parity": lambda: plots.parity_figure(
        {"f32": parity_steps(8, 1e-7), "bf16": parity_steps(8, 3e-3)}, limit=1e-4
    ),
    "parity, 61 layers": lambda: plots.parity_figure({"f32": parity_steps(61, 1e-7)}),
    "parity, wrong": lambda: plots.parity_figure({"f32": [{"step": "layer", "layer": 3, "error": np.nan}]}),
    "routing": lambda: plots.routing_map({layer: gates(seed=layer) for layer in range(5)}),
    "routing, labelled": lambda: plots.routing_map({2: gates()}, [f"·$tok{i}" for i in range(17)]),
    "routing, counts": lambda: plots.routing_map({2: (gates(384, 64, 8) > 0) * 3}, values="times chosen"),
    "load": lambda: plots.load_bars({layer: gates(seed=layer) for layer in range(3)}),
    "load, 384 experts": lambda: plots.load_bars({7: gates(384, 64, 8)}),
}
COUNT_TOKENS = ("tree", "acceptance", "budgets", "expected", "cost")


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_readable_and_says_what_it_shows(name):
    figure = FIGURES[name]()
    assert_readable(figure)
    for axes in (axes for axes in figure.axes if axes.get_visible()):
        for axis, shared in ((axes.xaxis, figure._supxlabel), (axes.yaxis, figure._supylabel)):
            label = axis.get_label_text() or (shared.get_text() if shared else "")
            labelled = [t for t in axis.get_ticklabels() if t.get_text() and t.get_visible()]
            if labelled and not any(_is_word(text.get_text()) for text in labelled):
                assert (label and UNIT.search(label)) or _labelled_by_a_neighbour(axes, axis), (
                    f"no unit: {label!r}"
                )
    words = " ".join(_words(figure))
    assert "bonus token included" in words or not name.startswith(COUNT_TOKENS)


def _is_word(label):
    """Whether a tick's label is a name, which needs no unit; numbers in mathtext are none."""
    return bool(re.search("[a-z]{2}", re.sub(r"\\[a-z]+", "", label)))


def _labelled_by_a_neighbour(axes, axis):
    """An axis shared with panels, one of which carries the label."""
    which = axis.axis_name
    group = getattr(axes, f"get_shared_{which}_axes")().get_siblings(axes)
    texts = [getattr(each, f"{which}axis").get_label_text() for each in group]
    return any(text and UNIT.search(text) for text in texts)


def _words(figure):
    yield figure._suptitle.get_text() if figure._suptitle else ""
    for axes in figure.axes:
        yield from (axes.get_title(loc) for loc in ("left", "center"))
        yield from (axes.get_xlabel(), axes.get_ylabel())


EMPTY = {
    "acceptance": lambda: plots.acceptance_histogram({"tree 16": []}),
    "budgets": lambda: plots.budget_curves([]),
    "expected": lambda: plots.expected_figure(curve(0)),
    "stages": lambda: plots.stage_bars({"ar": None}),
    "cost": lambda: plots.cost_figure(cost(), {500: 9.0}),
    "calibration": lambda: plots.calibration_figure(Calibration(np.linspace(0, 1, 3), *np.zeros((5, 2)))),
    "siblings": lambda: plots.sibling_figure(
        SiblingTable(*(np.zeros(s, int) for s in ((3, 4), 3, (3, 4), (3, 4))))
    ),
    "roofline": lambda: plots.roofline_figure({"cases": [{"name": "x", "error": "e"}]}),
    "layers": lambda: plots.layer_bars({"times": None}),
    "layers, no such rows": lambda: plots.layer_bars(layer_document(), rows=3),
    "parity": lambda: plots.parity_figure({}),
    "routing": lambda: plots.routing_map({}),
    "routing, no row": lambda: plots.routing_map({1: np.zeros((4, 0))}),
    "routing, too many": lambda: plots.routing_map({layer: gates() for layer in range(13)}),
    "load": lambda: plots.load_bars({1: gates(16), 2: gates(8)}),
}


@pytest.mark.parametrize("name", EMPTY)
def test_nothing_to_draw_is_a_usage_error_of_one_line(name):
    with pytest.raises(UsageError) as caught:
        EMPTY[name]()
    assert str(caught.value) and "\n" not in str(caught.value)


def test_counts_have_whole_ticks():
    for name in ("acceptance", "siblings", "load", "routing"):
        for axes in FIGURES[name]().axes[:1]:
            assert all(float(tick).is_integer() for tick in axes.get_xticks()), name


def test_lengths_are_drawn_as_counted():
    figure = plots.acceptance_histogram({"a": [1, 1, 1, 3]})
    assert [bar.get_height() for bar in figure.axes[0].patches] == [0.75, 0.0, 0.25]
    assert "mean 1.50" in figure.axes[0].get_title("left")


def test_series_differ_in_more_than_colour():
    lines = [line for line in FIGURES["budgets"]().axes[0].get_lines() if len(line.get_xdata()) > 1]
    looks = {(line.get_marker(), line.get_linestyle()) for line in lines}
    assert len(looks) == 6 == len(lines)  # tree, chain and ar at two temperatures
    assert all(len(set(style)) == len(style) for style in (LINES, MARKERS))


def test_what_was_not_measured_is_left_out():
    figure = plots.budget_curves(
        [record("ar", 0, speed=None), record("tree", 16), record("tree", 64, speed=None)]
    )
    left, right = figure.axes
    assert [len(line.get_xdata()) for line in left.get_lines() if line.get_marker() == "o"] == [2]
    assert [len(line.get_xdata()) for line in right.get_lines()] == [1]


def test_bars_of_siblings_are_intervals_over_prompts():
    """Either prompt may be drawn twice; a single prompt has none."""
    table = siblings()
    alone = plots.sibling_figure(replace(table, decodes=table.decodes[:1]))
    assert all(len(bar) == 0 for bar in bars_of(alone))
    low, high = table.interval_of_children()
    bars = np.array(bars_of(plots.sibling_figure(table)))[..., 1]
    assert bars == pytest.approx(np.array([low[: len(bars), 0], high[: len(bars), 0]]).T)
    assert bars[0] == pytest.approx([5 / 15, 1])


def bars_of(figure):
    """The error bars of the children of the spine, by depth."""
    (spine, *_) = figure.axes[1].containers
    return spine.lines[2][0].get_segments()
