"""Summaries and their intervals by hand, and the page from replayed rows."""

import json
import re

import numpy as np
import pytest
from plots.layout import layout_faults
from support import assert_one_line

from ddtree.errors import UsageError
from ddtree.plots_shapes import depth_curves, shape_curves
from ddtree.study_cost import cost_curve
from ddtree.study_models import ROUTERS
from ddtree.study_record import record
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
    (unlike,) = summarise([row("a", 31, 10), row("b", 61, 30)])
    assert (unlike.acceptance, unlike.low, unlike.high) == (90 / 40, 2.0, 3.0), (
        "each draw has rounds of its own"
    )
    (alone,) = summarise([row("a", 31, 10)])
    assert alone.low == alone.acceptance == alone.high == 3
    assert [found.exceeds(tokens) for tokens in (2.9, 4, 6.1)] == ["yes", "undecided", "no"]
    assert alone.exceeds(2) == alone.exceeds(4) == "undecided", "one prompt says nothing of others"
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
    for way in ROUTERS:
        assert f"| kimi-k2.6 | measured layers | {way} | 8,192 | best_first |" in page
    assert "| tree of 64 | 15.1 (15.0 to 15.2), even 16.0" in page, "what the routers share"
    assert "Speed peaks at an intermediate budget" in page and "rank-1 sibling" not in page
    assert page.count("Here a draft") == 2 and not re.search("Here a draft .*: oracle", page)
    assert "| random-4.8b | analytic | recorded | 131,072 |" in page, "and not where the same was measured:"
    assert "| random-4.8b | measured layers | recorded | 128 |" in page
    assert "| random-4.8b | analytic | recorded | 128 |" not in page
    assert write_report(read_rows(tmp_path / "rows.jsonl"), tmp_path / "again").read_text() == page
    whole = write_report(rows, tmp_path / "whole", recorded.recordings).read_text()
    assert "rank-1 sibling" in whole and "`cost_aware` chooses" in whole
    for name in ("siblings_t0.png", "calibration_t0.6.png", "shapes_t0.png"):
        assert f"({name})" in whole and (tmp_path / "whole" / name).stat().st_size > 10_000
    for place, temperature in ((1, 0.0), (2, 0.6)):
        mine = [each for each in rows if each["temperature"] == temperature]
        own = [each for each in recorded.recordings if each.temperature == temperature]
        alone = write_report(mine, tmp_path / "alone", own).read_text()
        assert alone.split("\n## ")[1] == whole.split("\n## ")[place], "a temperature's part is its own"
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


def test_there_is_no_best_of_one_budget(rows, tmp_path):
    """Of one budget a shape, the page says so; of two it says which is the fastest."""
    said = "fastest budget", "best budget", "each at its best"
    for budgets, count in (((16,), 0), ((16, 24), 2)):
        mine = [row for row in rows if row["budget"] in budgets]
        page = write_report(mine, tmp_path).read_text()
        assert page.count("Its fastest budget is") == count
        assert page.count("Each shape at the only budget replayed of it") == (0 if count else 3)
        assert [words in page for words in said] == [bool(count)] * 3
        assert page.count("times no draft at the only budget replayed of it (its nodes)") == (
            0 if count else 2
        )


def test_the_figure_can_be_read(rows):
    found = [each for each in summarise(rows) if each.temperature == 0]
    for cost in (None, measured_cost(0.0)):
        assert layout_faults(shape_curves(found, cost)) == []
    with pytest.raises(UsageError, match="no replayed row"):
        shape_curves([])


@pytest.mark.parametrize("text", ["", "{}\n", "no json\n", "\n", json.dumps([1]) + "\n", b"\xff"])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    for each in (path, tmp_path, tmp_path / "none"):
        with pytest.raises(UsageError, match="expected the rows that study replay --out writes") as caught:
            read_rows(each)
        assert_one_line(caught.value)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"tokens": None}, "line 3: expected the rows"),
        ({"rounds": "5"}, "line 3: expected the rows"),
        ({"nodes": -1}, "line 3: expected the rows"),
        ({"version": "0.0.9"}, "line 3: another version or shape made"),
        (
            {"trace_sha256": "0" * 64},
            "line 3: another recording of prompt .* at temperature 0; report on each",
        ),
    ],
)
def test_rows_put_together(rows, tmp_path, change, match):
    """Of overlapping files each row counts once; what would be counted wrongly is refused."""
    write_rows(tmp_path / "twice.jsonl", [*rows[:9], *rows[4:12], *rows[:2]])
    assert read_rows(tmp_path / "twice.jsonl") == rows[:12]
    write_rows(tmp_path / "rows.jsonl", [*rows[:2], rows[0] | change])
    with pytest.raises(UsageError, match=match) as caught:
        read_rows(tmp_path / "rows.jsonl")
    assert_one_line(caught.value)


def test_settings_are_compared_on_the_same_prompts_alone(rows, tmp_path):
    apart = [row for row in rows if (row["shape"] == "chain") == (row["sequence"] == 0)]
    for unlike in (apart, rows[:-1]):
        with pytest.raises(
            UsageError, match=r"has \d of 3 prompts; replay all settings on the same"
        ) as caught:
            write_report(unlike, tmp_path / "none")
        assert_one_line(caught.value)
    assert not (tmp_path / "none").exists()


def test_only_the_recordings_of_the_rows_are_shown(rows, recorded, engine, tmp_path):
    mine = [row for row in rows if row["sequence"] < 2]
    page = write_report(mine, tmp_path / "page", recorded.recordings).read_text()
    assert (
        page
        == write_report(
            mine, tmp_path / "page", recorded.recordings[0:2] + recorded.recordings[3:5]
        ).read_text()
    )
    assert "4 recordings, replayed" in page
    other = record(engine, recorded.prompts[:1], tmp_path / "other", recorded.config, k=8)
    with pytest.raises(UsageError, match="other: the rows were replayed from other recordings than these"):
        write_report(mine, tmp_path / "none", other)
    assert not (tmp_path / "none").exists()
    assert (
        "1 recording, replayed"
        in write_report(
            [row for row in mine if row["sequence"] == 0 and not row["temperature"]], tmp_path / "single"
        ).read_text()
    )
    small = write_report(replay(other, ["best_first"], [4, 8]), tmp_path / "small", other).read_text()
    assert "`cost_aware` chooses" in small, "by budgets that the tables decide"
    assert "Here a draft neither pays nor fails to, surely" in small and "| yes |" not in small


def test_the_page_says_at_which_temperature_rounds_were_timed(rows, tmp_path):
    greedy, sampled = write_report(rows, tmp_path).read_text().split("\n## Temperature 0.6\n")
    assert "rows (means); between" in greedy and "rows (means) and temperature 0.8; between" in sampled


def test_a_folder_that_cannot_be_made_is_one_line(rows, tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match="cannot make the folder") as caught:
            write_report(rows, folder)
        assert_one_line(caught.value)


@pytest.mark.parametrize("shape", ["branch_aware", "beam"])
def test_the_page_says_whose_head_was_not_timed(branch_recorded, tmp_path, shape):
    rows = replay(branch_recorded.recordings, ["best_first", shape], [4, 8])
    write_report(rows, tmp_path)
    text = (tmp_path / "report.md").read_text("utf-8")
    assert (f"`{shape}` reads a branch head, and no round that was timed" in text) == (
        shape == "branch_aware"
    )
