"""The figure of training losses: what its lines are, where it is cut, and what the command makes of a record."""

import json

import pytest
from plots.layout import assert_readable

from ddtree import plots
from ddtree.bundle import DATA
from ddtree.errors import UsageError


def log(last, least, marginal=None):
    """Loss 8 at step 1, then falling from 3 to `least`."""
    steps = [1, *range(last // 10, last + 1, last // 10)]
    losses = [8.0, *(3 - (3 - least) * place / 9 for place in range(10))]
    more = {} if marginal is None else {"marginal": marginal}
    return [{"step": s, "loss": loss} | more for s, loss in zip(steps, losses, strict=True)]


RUNS = {
    "first": {"target": log(100, 1.0), "drafter": log(400, 1.5), "branch": log(60, 0.5, marginal=4.0)},
    "other": {"drafter": log(200, 2.0)},
}


def test_a_line_a_run_in_a_panel_a_stage():
    figure = plots.training_figure(RUNS)
    assert_readable(figure)
    target, drafter, branch = figure.axes
    assert [[line.get_label() for line in axes.lines] for axes in (target, drafter)] == [
        ["first"],
        ["first", "other"],
    ]
    assert drafter.lines[1].get_xydata().tolist() == [
        [r["step"], r["loss"]] for r in RUNS["other"]["drafter"]
    ]
    head, without = branch.lines
    assert (
        head.get_ydata()[-1] == 0.5 and set(without.get_ydata()) == {4.0} and without.get_linestyle() == ":"
    )
    assert [axes.get_ylim()[1] for axes in figure.axes] == pytest.approx([3.3, 3.3, 4.4]), (
        "not at the first loss"
    )
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["first", "other", "dotted: without the head"]


def test_a_stage_that_no_run_has_takes_no_panel():
    figure = plots.training_figure({"other": RUNS["other"]})
    assert len(figure.axes) == 1 and len(figure.legends[0].get_texts()) == 1
    for nothing in ({}, {"x": {}}, {"x": {"drafter": []}}):
        with pytest.raises(UsageError, match="no log of training"):
            plots.training_figure(nothing)


def test_the_command_draws_records(command, tmp_path, monkeypatch):
    seen = []
    honest = plots.training_figure
    monkeypatch.setattr(
        plots, "training_figure", lambda runs, title: seen.append(runs) or honest(runs, title)
    )
    records = [DATA / "results" / f"train_{name}.json" for name in ("small", "py12m")]
    code, _, err = command("plot", "training", *records, "-o", tmp_path / "a.png")
    assert code == 0, err
    assert list(seen[0]) == ["small", "py12m"] and list(seen[0]["py12m"]) == [
        "drafter",
        "branch",
    ]
    (tmp_path / "none.json").write_text(json.dumps({"logs": {}}))
    code, _, err = command("plot", "training", tmp_path / "none.json", "-o", tmp_path / "b.png")
    assert code == 2 and "no log of training" in err and not (tmp_path / "b.png").exists()
