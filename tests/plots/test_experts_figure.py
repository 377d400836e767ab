"""The figure of shared experts: what its lines are, and that it can be read."""

from dataclasses import replace

import numpy as np
import pytest
from plots.layout import assert_readable
from study.routed import CHOSEN, EXPERTS, routed

from ddtree import plots
from ddtree.errors import UsageError
from ddtree.study_analytic import expected_experts
from ddtree.study_experts import summarise_routing


def sharing(draw, **more):
    return [each for each in summarise_routing(routed(draw, prompts=3, **more)) if each.layer is None]


@pytest.fixture(scope="module")
def mine():
    """Trees whose rows all choose the same experts but for the chain's, which are drawn."""
    rng = np.random.default_rng(0)
    chain = sharing(lambda: rng.choice(EXPERTS, CHOSEN, replace=False), shape="chain")
    return [*sharing(lambda: [0, 1, 2]), *chain]


def lines(axes):
    return {line.get_label(): line for line in axes.lines}


def test_it_shows_measured_and_independent_experts(mine):
    figure = plots.experts_figure(mine)
    assert_readable(figure)
    left, right = figure.axes
    even = lines(left)["independent, even choices"]
    assert even.get_ydata() == pytest.approx(expected_experts(EXPERTS, CHOSEN, even.get_xdata()))
    assert lines(left)["best_first, greedy"].get_xydata().tolist() == [[1, 3], [9, 3]]
    assert lines(right)["best_first, greedy"].get_ydata() == pytest.approx([1, 1])
    chain = lines(right)["chain, greedy"].get_ydata()
    assert chain[0] == 1 and 7 < chain[1] < 12
    bands = [band.get_datalim(right.transData) for band in right.collections]
    assert len(bands) == 2 and bands[0].height < 0.01 < bands[1].height
    words = " ".join(
        [left.get_ylabel(), right.get_xlabel(), left.get_title("left"), figure._suptitle.get_text()]
    )
    assert "mean over layers" in words and "root and nodes" in words and "3 prompts" in words


def test_layers_and_temperatures_are_series():
    found = summarise_routing(routed(lambda: [0, 1, 2], prompts=2, layers=8))
    figure = plots.experts_figure(found[:-1])
    assert_readable(figure)
    names = set(lines(figure.axes[0]))
    assert {f"best_first, greedy, layer {n}" for n in range(3, 11)} <= names
    with pytest.raises(UsageError, match="no row of study routing"):
        plots.experts_figure([])


def test_two_models_of_one_kind_of_router_are_not_one_line(mine):
    other = [replace(each, touched=each.touched + 1) for each in mine]
    with pytest.raises(UsageError, match="two records of one shape, temperature and kind of router"):
        plots.experts_figure([*mine, *other])


def test_eight_series_differ_in_more_than_their_dashes(mine):
    eight = [replace(each, temperature=t) for t in (0.0, 0.2, 0.4, 0.6) for each in mine]
    seen = [(line.get_color(), line.get_marker()) for line in plots.experts_figure(eight).axes[1].lines[1:]]
    assert len(seen) == len(set(seen)) == 8


def test_routers_have_panels_of_their_own(mine):
    """The same trees, and as a router of 128 experts, 8 a row, would have them."""
    wide = [
        replace(each, experts=128, experts_per_token=8, touched=40.0, touched_low=38.0, touched_high=41.0,
                by_load=55.0, effective=6.0, effective_low=5.5, effective_high=6.5, prompts=5)
        for each in mine
    ]  # fmt: skip
    figure = plots.experts_figure([*mine, *wide])
    assert_readable(figure)
    small, large, effective = figure.axes
    assert [each.get_title("left").split(", ")[0] for each in (small, large)] == [
        f"Distinct experts of {EXPERTS}", "Distinct experts of 128",
    ]  # fmt: skip
    even = lines(large)["independent, even choices"]
    assert even.get_ydata() == pytest.approx(expected_experts(128, 8, even.get_xdata()))
    assert lines(large)["independent, by load"].get_xydata().tolist() == [[1, 8], [9, 55]]
    names = [f"{shape}, greedy, {of} experts" for of in (f"{CHOSEN} of {EXPERTS}", "8 of 128")
             for shape in ("best_first", "chain")]  # fmt: skip
    assert set(names[:2]) <= set(lines(small)) and set(names[2:]) <= set(lines(large))
    assert not set(names[2:]) & set(lines(small)) and set(names) <= set(lines(effective))
    assert lines(large)[names[2]].get_xydata().tolist() == [[1, 8], [9, 40]]
    assert lines(effective)[names[3]].get_xydata().tolist() == [[1, 1], [9, 6]]
    colours = {lines(effective)[name].get_color() for name in names}
    assert len(colours) == 4, "no two series look alike"
    (legend,) = figure.legends
    said = [text.get_text() for text in legend.get_texts()]
    assert sorted(said) == sorted(set(said)) and set(names) < set(said)
    assert "3 and 5 prompts" in figure._suptitle.get_text()


def test_saturated_trees_have_no_effective_rows():
    figure = plots.experts_figure(sharing(lambda: list(range(EXPERTS))))
    assert_readable(figure)
    assert lines(figure.axes[1])["best_first, greedy"].get_xydata().tolist() == [[1, 1]]
