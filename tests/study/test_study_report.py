"""Summaries and their intervals by hand, and the page from replayed rows."""

import json

import numpy as np
import pytest
from plots.layout import layout_faults

from ddtree.errors import UsageError
from ddtree.plots_shapes import depth_curves, shape_curves
from ddtree.study_cost import cost_curve
from ddtree.study_replay import replay, write_rows
from ddtree.study_report import measured_cost, read_rows, write_report
from ddtree.study_summary import best_of, summarise

BUDGETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)


def row(prompt, tokens, rounds, nodes=8, **other):
    found = {"shape": "best_first", "budget": 8, "depth": 15, "temperature": 0.0, "prompt": prompt}
    found |= {"tokens": tokens, "rounds": rounds, "nodes": nodes * rounds, "trace_sha256": prompt}
    return found | {"rounds_outside_loops": rounds, "tokens_outside_loops": tokens - 1} | other


def test_sums_over_prompts():
    (found,) = summarise([row("a", 31, 10), row("b", 61, 10, 6), row("c", 1, 0)])
    assert (found.prompts, found.acceptance, found.nodes, found.outside_loops) == (2, 4.5, 7.0, 4.5)
    assert (found.low, found.high) == (3.0, 6.0), "one prompt drawn twice"
    (alone,) = summarise([row("a", 31, 10)])
    assert alone.low == alone.acceptance == alone.high == 3
    with pytest.raises(UsageError, match="no replayed round"):
        summarise([row("a", 1, 0)])


def test_the_interval_holds_the_mean_as_often_as_it_says():
    rng, inside = np.random.default_rng(3), 0
    for trial in range(60):
        rows = [row(str(i), int(rng.poisson(25) + 1), 10) for i in range(40)]
        (found,) = summarise(rows, seed=trial)
        inside += found.low <= 2.5 <= found.high
    assert 50 <= inside <= 60


def test_speed_and_the_best_budget():
    stages = {"draft": 1.0, "build": 0.0, "verify": 0.0, "accept": 0.0, "compact": 0.0}
    cost = cost_curve([(1.0, stages | {"draft": 0.0, "verify": 1.0}), (17.0, stages | {"verify": 3.0})])
    rows = [row("a", 31, 10), row("a", 51, 10, 16, budget=16), row("a", 81, 10, 64, budget=64)]
    best = best_of(summarise(rows), cost)
    assert best["best_first"][0].budget == 16, "the curve does not reach 65 rows"
    assert best["best_first"][1] == pytest.approx(1e3 * 5 / 4)


@pytest.fixture(scope="module")
def rows(recorded):
    """Every prompt of the recordings, at both temperatures, by shapes and budgets."""
    context = {"cost": measured_cost(0.0)}
    return replay(
        recorded.recordings, ("best_first", "chain", "cost_aware", "oracle"), BUDGETS, context=context
    )


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_the_oracle_is_an_upper_bound(rows, temperature):
    found = summarise(each for each in rows if each["temperature"] == temperature)
    at = {(each.shape, each.budget): each for each in found}
    for budget in BUDGETS:
        shapes = ("best_first", "chain", "cost_aware")
        assert at["oracle", budget].acceptance >= max(at[s, budget].acceptance for s in shapes)


def test_the_page(rows, recorded, tmp_path):
    write_rows(tmp_path / "rows.jsonl", rows)
    plain = write_report(read_rows(tmp_path / "rows.jsonl"), tmp_path / "report")
    page = plain.read_text()
    assert "## Temperature 0\n" in page and "## Temperature 0.6\n" in page
    assert (tmp_path / "report" / "shapes_t0.6.png").stat().st_size > 10_000
    assert "Here a draft" in page and "At equal budget" in page and "## Larger models\n" in page
    assert "| kimi-k2.6 | measured layers | recorded | 8,192 | best_first |" in page
    assert "Speed peaks at an intermediate budget" in page and "rank-1 sibling" not in page
    assert write_report(read_rows(tmp_path / "rows.jsonl"), tmp_path / "again").read_text() == page
    whole = write_report(rows, tmp_path / "whole", recorded.recordings).read_text()
    assert "rank-1 sibling" in whole and "`cost_aware` chooses" in whole
    for name in ("siblings_t0.png", "calibration_t0.6.png", "shapes_t0.png"):
        assert f"({name})" in whole and (tmp_path / "whole" / name).stat().st_size > 10_000
    for line in whole.splitlines():
        assert "nan" not in line.lower().split() and "inf" not in line.lower().split(), line


def test_depths_have_a_figure_of_their_own(recorded, tmp_path):
    rows = replay(recorded.recordings, ("best_first", "chain"), (8, 16), (3, 7, 15))
    page = write_report(rows, tmp_path).read_text()
    assert "(depths_t0.png)" in page and (tmp_path / "depths_t0.6.png").stat().st_size > 10_000
    found = [each for each in summarise(rows) if each.temperature == 0 and each.budget == 16]
    assert layout_faults(depth_curves(found, measured_cost(0.0))) == []
    kimi = [line for line in page.splitlines() if line.startswith("| kimi-k2.6 | measured layers")]
    assert kimi and all(line.split(" | ")[6] == "7" for line in kimi)


def test_the_figure_can_be_read(rows):
    found = [each for each in summarise(rows) if each.temperature == 0]
    for cost in (None, measured_cost(0.0)):
        assert layout_faults(shape_curves(found, cost)) == []
    with pytest.raises(UsageError, match="no replayed row"):
        shape_curves([])


@pytest.mark.parametrize("text", ["", "{}\n", "no json\n", json.dumps([1]) + "\n"])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match="expected the rows that study replay --out writes"):
        read_rows(path)
