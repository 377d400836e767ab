"""The figure of shared experts: what its lines are, and that it can be read."""

import json
from dataclasses import replace

import numpy as np
import pytest
from plots.layout import assert_readable
from study.routed import CHOSEN, EXPERTS, routed, trees_of_64

from ddtree import plots
from ddtree.bundle import DATA
from ddtree.errors import UsageError
from ddtree.study_analytic import expected_experts
from ddtree.study_experts import summarise_routing
from ddtree.study_experts_table import routing_summary


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
    figure = plots.experts_figure({"mine": mine})
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
    figure = plots.experts_figure({"": found[:-1]})
    assert_readable(figure)
    names = set(lines(figure.axes[0]))
    assert {f"best_first, greedy, layer {n}" for n in range(3, 11)} <= names
    with pytest.raises(UsageError, match="no row of study routing"):
        plots.experts_figure({"mine": []})


def test_one_model_is_not_recorded_twice(mine):
    with pytest.raises(UsageError, match="two records of one model, shape, temperature and budget"):
        plots.experts_figure({"mine": [*mine, replace(mine[0], touched=mine[0].touched + 1)]})


def test_models_of_one_kind_of_router_are_told_by_name(command, tmp_path, monkeypatch):
    """The recorded two of 16 experts, 4 a row; and two files of one name."""
    drawn, honest = [], plots.experts_figure
    monkeypatch.setattr(plots, "experts_figure", lambda *given: drawn.append(honest(*given)) or drawn[-1])
    results = [DATA / "results" / f"routing_{name}.json" for name in ("py12m", "small")]
    for name, path in zip("ab", results, strict=True):
        (tmp_path / name).mkdir()
        (tmp_path / name / "routing_x.json").write_bytes(path.read_bytes())
    monkeypatch.chdir(tmp_path)
    for files, names in (
        (results, ("py12m", "small")),
        (("a/routing_x.json", "b/routing_x.json"), ("a/routing_x.json", "b/routing_x.json")),
    ):
        code, _, err = command("plot", "experts", *files, "--temperature", 0, "-o", "figure.png")
        assert (code, err) == (0, "Wrote figure.png.\n")
        figure = drawn[-1]
        assert_readable(figure)
        panels, series = figure.axes[:2], [f"{shape}, greedy" for shape in ("best_first", "chain")]
        heads = [f"{name}: distinct experts of 16, 4 a row" for name in names]
        assert [axes.get_title("left") for axes in panels] == heads
        for axes, name in zip(panels, names, strict=True):
            assert list(lines(axes))[2:] == [f"{each}, {name}, 4 of 16 experts" for each in series]
        ends = [float(axes.lines[2].get_ydata()[-1]) for axes in panels]
        assert ends == [trees_of_64(router).touched for router in ("recorded", "recorded small")]
    code, _, _ = command("plot", "experts", results[0], "--temperature", 0, "-o", "figure.png")
    assert code == 0 and list(lines(drawn[-1].axes[0]))[2:] == series, "a lone model needs no name"


def test_files_of_one_model_are_one_record(command, tmp_path, monkeypatch):
    """Shapes swept apart, the rows of one and the summary of the other."""
    seen, honest = [], plots.experts_figure
    monkeypatch.setattr(plots, "experts_figure", lambda *given: seen.append(given[0]) or honest(*given))
    rng = np.random.default_rng(0)
    trees, chains = (
        [
            row | {"target_sha256": "mine"}
            for row in routed(lambda: rng.choice(EXPERTS, CHOSEN, replace=False), prompts=2, shape=shape)
        ]
        for shape in ("best_first", "chain")
    )
    files = tmp_path / "trees.jsonl", tmp_path / "chains.json"
    files[0].write_text("".join(json.dumps(row) + "\n" for row in trees))
    summary = routing_summary(summarise_routing(chains), {"model_sha256": {"target": "mine"}})
    files[1].write_text(json.dumps(summary))
    code, _, err = command("plot", "experts", *files, "-o", tmp_path / "a.png")
    assert code == 0, err
    ((name, found),) = seen[0].items()
    assert (name, [each.shape for each in found]) == ("trees", ["best_first", "chain"])


def test_eight_series_differ_in_more_than_their_dashes(mine):
    eight = {"mine": [replace(each, temperature=t) for t in (0.0, 0.2, 0.4, 0.6) for each in mine]}
    seen = [(line.get_color(), line.get_marker()) for line in plots.experts_figure(eight).axes[1].lines[1:]]
    assert len(seen) == len(set(seen)) == 8


def test_routers_have_panels_of_their_own(mine):
    """The same trees, and as a router of 128 experts, 8 a row, would have them."""
    wide = [
        replace(each, experts=128, experts_per_token=8, touched=40.0, touched_low=38.0, touched_high=41.0,
                by_load=55.0, effective=6.0, effective_low=5.5, effective_high=6.5, prompts=5)
        for each in mine
    ]  # fmt: skip
    figure = plots.experts_figure({"mine": mine, "wide": wide})
    assert_readable(figure)
    small, large, effective = figure.axes
    assert [each.get_title("left").split(", ")[0] for each in (small, large)] == [
        f"mine: distinct experts of {EXPERTS}", "wide: distinct experts of 128",
    ]  # fmt: skip
    even = lines(large)["independent, even choices"]
    assert even.get_ydata() == pytest.approx(expected_experts(128, 8, even.get_xdata()))
    assert lines(large)["independent, by load"].get_xydata().tolist() == [[1, 8], [9, 55]]
    names = [f"{shape}, greedy, {of} experts" for of in (f"mine, {CHOSEN} of {EXPERTS}", "wide, 8 of 128")
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
    figure = plots.experts_figure({"mine": sharing(lambda: list(range(EXPERTS)))})
    assert_readable(figure)
    assert lines(figure.axes[1])["best_first, greedy"].get_xydata().tolist() == [[1, 1]]
