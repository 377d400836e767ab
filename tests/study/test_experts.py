"""Effective rows and summaries of routing: by hand, and of rows whose sharing is known."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from study.routed import CHOSEN, EXPERTS, routed
from support import assert_one_line

from ddtree.errors import UsageError
from ddtree.study_analytic import expected_experts
from ddtree.study_experts import effective_curve, effective_rows, summarise_routing
from ddtree.study_experts_table import read_summary, routing_summary
from ddtree.study_overlap import RELATIONS


def test_effective_rows_undo_the_expectation():
    rows = np.array([1.0, 2.0, 7.5, 30.0])
    for of in ((384, 8), (16, 4), (64, 6)):
        assert effective_rows(*of, expected_experts(*of, rows)) == pytest.approx(rows)
    assert np.isinf(effective_rows(16, 4, 16)) and effective_rows(16, 4, 4) == pytest.approx(1)
    for chosen in (0, 16):
        with pytest.raises(UsageError, match="fewer than 16 chosen"):
            effective_rows(16, chosen, 4)


def test_independent_even_rows_count_one_each():
    rng = np.random.default_rng(0)
    found = summarise_routing(routed(lambda: rng.choice(EXPERTS, CHOSEN, replace=False)))
    assert [each.layer for each in found] == [3, 4, None]
    for each in found:
        assert (each.prompts, each.rounds, each.rows) == (40, 400, 9)
        assert each.touched == pytest.approx(each.independent, rel=0.01)
        assert each.by_load == pytest.approx(each.independent, rel=0.01)
        assert each.effective_low < each.effective < each.effective_high
        assert each.effective == pytest.approx(9, rel=0.04)
        for name in ("parent_child", "ancestor", "siblings", "cousins", "unrelated"):
            assert each.shared[name] == pytest.approx(CHOSEN**2 / EXPERTS, rel=0.15)
            low, high = each.shared_interval[name]
            assert low < each.shared[name] < high < 1.3 * low
        assert each.shared["cousins_same_token"] is each.shared_interval["cousins_same_token"] is None
        assert each.touched_outside_loops == pytest.approx(each.touched, rel=0.02)
    assert found[2].touched == pytest.approx((found[0].touched + found[1].touched) / 2)
    assert found[2].touched_high - found[2].touched_low < found[0].touched_high - found[0].touched_low


def test_uneven_load_is_told_from_kinship():
    """Rows apart from one another that prefer few experts: the load explains all that they share."""
    rng = np.random.default_rng(1)
    weight = np.arange(1, EXPERTS + 1.0) ** 2
    found = summarise_routing(
        routed(lambda: rng.choice(EXPERTS, CHOSEN, replace=False, p=weight / weight.sum()))
    )[-1]
    assert found.touched < 0.93 * found.independent
    assert found.by_load == pytest.approx(found.touched, rel=0.02)


def test_a_prompts_own_load_is_told_from_all():
    """Each prompt has four experts of its own, which its rows choose from: only its own load explains it."""
    rng, state = np.random.default_rng(2), {"calls": 0}

    def draw():
        prompt = state["calls"] // (10 * 2 * 9)
        state["calls"] += 1
        return rng.choice(np.arange(4) + 4 * (prompt % 8), CHOSEN, replace=False)

    found = summarise_routing(routed(draw))[-1]
    assert found.touched < 4.001 and found.by_load > 15
    assert found.by_prompt_load == pytest.approx(found.touched, rel=0.02)
    assert found.effective < 1.4


def test_rounds_weigh_alike_and_prompts_are_drawn():
    rows = routed(lambda: [0, 1, 2], prompts=1, layers=1) + routed(
        lambda: [5, 6, 7], prompts=1, layers=1, rounds=30
    )
    rows[1] |= {"prompt": "other", "touched_full": 7.0}
    found = summarise_routing(rows)[0]
    assert found.touched == pytest.approx((3 * 10 + 7 * 30) / 40)
    assert (found.touched_low, found.touched_high) == (3, 7), "one prompt drawn twice"


def test_what_pairs_share_weighs_pairs_and_draws_prompts():
    rows = routed(lambda: [0, 1, 2], prompts=1, layers=2)
    rows += routed(lambda: [5, 6, 7], prompts=1, layers=2, rounds=30)
    for place, row in enumerate(rows):
        row |= {"prompt": str(place // 2), "shared_siblings": (1.0, 2.0, 2.0, 4.0)[place]}
        if place < 2:
            row |= {"pairs_cousins": 0, "shared_cousins": None}
    first, second, both = summarise_routing(rows)
    assert rows[2]["pairs_siblings"] == 3 * rows[0]["pairs_siblings"]
    assert first.shared["siblings"] == (1 + 3 * 2) / 4 and first.shared_interval["siblings"] == (1, 2)
    assert second.shared["siblings"] == (2 + 3 * 4) / 4 and second.shared_interval["siblings"] == (2, 4)
    assert both.shared["siblings"] == (1.5 + 3 * 3) / 4 and both.shared_interval["siblings"] == (1.5, 3)
    assert both.shared["cousins"] == 3 and both.shared_interval["cousins"] is None, "one prompt says nothing"
    third = [row | {"prompt": "third", "shared_cousins": 5.0} for row in rows[2:]]
    assert summarise_routing(rows + third)[-1].shared_interval["cousins"] == (3, 5), (
        "nor do draws without a pair"
    )


def test_cut_rounds_count_for_nothing_but_means():
    """Where rows touch nearly all experts, a tenth of small rounds would make 60 independent rows look like 20."""
    rng = np.random.default_rng(4)
    rows = routed(lambda: rng.choice(EXPERTS, CHOSEN, replace=False), cut=5)
    assert (
        rows[0]["rounds"] == 15 and rows[0]["rounds_full"] == 10 and rows[0]["rows"] == pytest.approx(95 / 15)
    )
    assert rows[0]["touched"] < rows[0]["touched_full"] and rows[0]["rounds_full_outside_loops"] == 5
    found = summarise_routing(rows)[-1]
    assert found.rounds == 400 and found.effective == pytest.approx(9, rel=0.04)
    with pytest.raises(UsageError, match="with full rounds; found none"):
        summarise_routing(routed(lambda: [0, 1, 2], prompts=2, rounds=0, cut=3))


def ends_of(each):
    return {
        f"{name} {end}": pair and pair[end] for name, pair in each.shared_interval.items() for end in (0, 1)
    }


def test_a_summary_is_read_back_and_carried_over():
    rng = np.random.default_rng(3)
    rows = routed(lambda: rng.choice(EXPERTS, CHOSEN, replace=False))
    sharing = summarise_routing(rows)
    document = json.loads(json.dumps(routing_summary(sharing, {"model_sha256": {}}), allow_nan=False))
    read = read_summary(document)
    assert routing_summary(read, {"model_sha256": {}}) == document, "numbers of five digits stay"
    for mine, found in zip(sharing, read, strict=True):
        mine, found = (
            asdict(each) | each.shared | ends_of(each) | {"shape": "", "shared": "", "shared_interval": ""}
            for each in (mine, found)
        )
        assert list(found) == list(mine)
        assert list(found.values()) == [
            value if value in ("", None) else pytest.approx(value, rel=5e-5) for value in mine.values()
        ]
    assert read[-1].touched != sharing[-1].touched and len(f"{read[-1].touched:g}") <= 6
    rows_of_it = [
        dict(zip(document["sharing"]["columns"], row, strict=True)) for row in document["sharing"]["data"]
    ]
    assert [each["shared_siblings"] for each in rows_of_it] == [each.shared["siblings"] for each in read]
    curve = effective_curve(sharing, "best_first", 0.0)
    assert curve(1) == 1 and curve(9) == sharing[-1].effective and np.isnan(curve(10))
    assert curve(5) == pytest.approx((1 + sharing[-1].effective) / 2)
    assert curve.touched(384, 8, 9) == pytest.approx(expected_experts(384, 8, sharing[-1].effective))
    for shape, temperature in (("chain", 0.0), ("best_first", 0.6)):
        with pytest.raises(UsageError, match="was not recorded"):
            effective_curve(sharing, shape, temperature)
    columns, data = document["sharing"]["columns"], document["sharing"]["data"]
    short = len(columns) - 2 * len(RELATIONS)
    older = {"columns": columns[:short], "data": [row[:short] for row in data]}
    before = read_summary(document | {"schema": 2, "sharing": older})
    assert before == [replace(each, shared_interval=dict.fromkeys(RELATIONS)) for each in read]
    other = {"columns": ["rows"], "data": []}
    for wrong in ({}, [], document | {"kind": "x"}, document | {"schema": 1}, document | {"schema": [3]}):
        with pytest.raises(UsageError, match="expected a document of kind"):
            read_summary(wrong)
    tables = ({"columns": columns}, {"data": data}, {"columns": columns, "data": {}}, older, other, None)
    for wrong in tables:
        with pytest.raises(UsageError, match="expected a table `sharing` with the columns of schema 3"):
            read_summary(document | {"sharing": wrong})


DAMAGED = {
    "a count below zero": {"rounds": -1},
    "a count as a float": {"rows": 9.0},
    "every expert chosen": {"experts_per_token": EXPERTS},
    "no expert": {"experts": 0},
    "no number": {"touched": float("nan")},
    "a word": {"touched_high": "many"},
    "too large": {"independent": 10**400},
    "a truth": {"effective": True},
    "half an interval": {"shared_siblings_low": None},
    "the other half": {"shared_siblings_high": None},
    "ends changed over": {"shared_siblings_low": 0.4, "shared_siblings_high": 0.3},
    "an interval of nothing": {"shared_siblings": None},
    "no shape": {"shape": 1},
    "a layer in words": {"layer": "all"},
}


@pytest.mark.parametrize("fault", DAMAGED)
def test_a_damaged_row_is_refused_in_one_line(fault):
    rng = np.random.default_rng(3)
    rows = routed(lambda: rng.choice(EXPERTS, CHOSEN, replace=False), prompts=4)
    document = routing_summary(summarise_routing(rows), {})
    columns, data = document["sharing"]["columns"], document["sharing"]["data"]
    whole = dict(zip(columns, data[0], strict=True))
    sharing = read_summary(document)[0]
    ends = whole["shared_siblings_low"], whole["shared_siblings_high"]
    assert ends == sharing.shared_interval["siblings"] and ends[0] < sharing.shared["siblings"] < ends[1]
    data[0] = list((whole | DAMAGED[fault]).values())
    with pytest.raises(UsageError, match="a row that no summary holds") as caught:
        read_summary(document)
    assert_one_line(caught.value)


def test_rows_of_another_length_are_refused():
    document = routing_summary(summarise_routing(routed(lambda: [0, 1, 2], prompts=2)), {})
    columns, (row, *rest) = document["sharing"]["columns"], document["sharing"]["data"]
    short = len(columns) - 2 * len(RELATIONS)
    for wrong in (row[:short], row[:-1], [*row, None], [], {}, 7, None, "x" * len(row)):
        with pytest.raises(UsageError, match="a row that no summary holds"):
            read_summary(document | {"sharing": {"columns": columns, "data": [wrong, *rest]}})
    with pytest.raises(UsageError, match="a row that no summary holds"):
        read_summary(document | {"schema": 2, "sharing": {"columns": columns[:short], "data": [row]}})


def test_rows_of_two_sweeps_are_not_one():
    rows = routed(lambda: [0, 1, 2], prompts=2)
    other = [row | {"temperature": 0.6} for row in rows]
    for said, wrong in (
        ("one sweep", rows + rows[:1]),
        ("one sweep", rows[:-1]),
        ("one model, found several", rows[:-1] + [rows[-1] | {"experts": EXPERTS + 1}]),
        ("one model, found several", rows + [row | {"target_sha256": "other"} for row in other]),
    ):
        with pytest.raises(UsageError, match=f"expected those of {said}") as caught:
            summarise_routing(wrong)
        assert_one_line(caught.value)
    assert len(summarise_routing(rows + other)) == 6
    with pytest.raises(UsageError, match="found none"):
        summarise_routing([])


def test_all_experts_touched_have_no_effective_rows():
    found = summarise_routing(routed(lambda: list(range(EXPERTS))))
    assert found[-1].effective is None and found[-1].effective_high is None
    json.dumps(routing_summary(found, {}), allow_nan=False)
