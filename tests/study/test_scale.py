"""Verdicts on larger models: by hand, and held to what the same numbers say another way."""

import json
from dataclasses import replace

import numpy as np
import pytest

from ddtree.bundle import DATA
from ddtree.errors import UsageError
from ddtree.study_analytic import WeightBytes, drafter_bytes, expected_experts, forward_bytes
from ddtree.study_cost import measured_cost
from ddtree.study_costing import OTHER_MS, costings, layers_cost
from ddtree.study_experts import effective_rows
from ddtree.study_models import (
    MACHINE,
    MODELS,
    ROUTERS,
    default_draft_ms,
    drafter_config,
    recorded_sharing,
    target_config,
)
from ddtree.study_scale import at_own_best, batch_limits, place_of, verdicts
from ddtree.study_summary import Summary

BUDGETS = (2, 8, 64)


def summary(shape="best_first", budget=8, tokens=3.0, temperature=0.0, depth=15, nodes=None):
    nodes = float(budget if nodes is None else nodes)
    spread = (tokens * 0.95, tokens * 1.05)
    return Summary(shape, budget, depth, temperature, 64, tokens, *spread, None, nodes)


TOKENS = {2: 2.4, 8: 3.8, 64: 4.9}
CHAIN = {2: 2.3, 8: 3.4, 64: 3.5}
SUMMARIES = [summary(budget=b, tokens=t) for b, t in TOKENS.items()]
SUMMARIES += [summary("chain", b, t, nodes=min(b, 14)) for b, t in CHAIN.items()]


def ways_of(found):
    return {(each.source, each.experts) for each in found}


def test_which_ways_are_known_where():
    found = verdicts(SUMMARIES, contexts=(128, 8192), batches=(1, 4))
    analytic = {("analytic", each) for each in ("independent", *ROUTERS)}
    layers = {("measured layers", each) for each in ("independent", "random router", *ROUTERS)}
    want = {
        ("py12m", 128, 1): {("measured rounds", "measured")},
        ("random-4.8b", 128, 1): layers | analytic,
        ("random-4.8b", 8192, 1): analytic,
        ("kimi-k2.6", 128, 1): layers | analytic,
        ("kimi-k2.6", 8192, 1): layers | analytic,
        ("deepseek-v3", 8192, 1): analytic,
        ("kimi-k2.6", 8192, 4): analytic,
    }
    for (model, context, batch), ways in want.items():
        mine = [v for v in found if (v.model, v.context, v.batch) == (model, context, batch)]
        assert ways_of(mine) == ways, (model, context, batch)
    assert not [v for v in found if v.model == "py12m" and (v.context, v.batch) != (128, 1)]
    assert all(v.assumption and np.isfinite(v.cost) and v.cost > 1 for v in found)
    with pytest.raises(UsageError, match="expected a model of py12m, random"):
        verdicts(SUMMARIES, ["gpt"])


def test_the_shipped_models_rounds_are_the_timed_ones():
    (found,) = verdicts([summary(budget=16, tokens=4.3, nodes=15.8)], ["py12m"])
    cost = measured_cost(0.0)
    assert found.cost == pytest.approx(cost(16.8) / cost(1)) and found.touched is None
    assert found.speedup == pytest.approx(4.3 / found.cost) and found.pays == "yes"
    (sampled,) = verdicts([summary(budget=16, tokens=4.3, nodes=15.8, temperature=0.6)], ["py12m"])
    assert sampled.cost == pytest.approx(measured_cost(0.8)(16.8) / measured_cost(0.8)(1))


def test_a_kimi_round_by_hand():
    """A timed dense layer, sixty MoE layers of 9 rows that touch 66 INT4 experts, the head, and a timed draft."""
    (found,) = [
        v
        for v in verdicts([summary()], ["kimi-k2.6"], (8192,))
        if (v.source, v.experts) == ("measured layers", "independent")
    ]
    assert found.touched == pytest.approx(expected_experts(384, 8, 9)) == pytest.approx(66.2, abs=0.1)
    one = 0.3126 + 60 * (0.1540 + 0.0044 + 8 * 0.007872) + 0.5523
    nine = 0.3696 + 60 * (0.2021 + 0.0044 + 66.22 * 0.007872) + 0.5410
    draft = MODELS["kimi-k2.6"].draft_ms
    assert found.cost == pytest.approx((nine + draft + OTHER_MS) / one, rel=0.001)


def test_an_analytic_round_by_hand():
    name, weights = "deepseek-v3", WeightBytes(1, 1, 2)
    config = target_config(name)
    (found,) = [v for v in verdicts([summary()], [name], (8192,)) if v.experts == "independent"]
    one, nine = (forward_bytes(config, n, 8192, weights) for n in (1, 9))
    draft = drafter_bytes(replace(drafter_config("kimi-k2.6-drafter"), vocab_size=129280), 8192)
    assert found.cost == pytest.approx((nine + draft) / one)


def test_a_draft_is_said_to_be_timed_where_it_was():
    for way in costings("random-4.8b", 128):
        timed = way.source == "measured layers"
        said = "draft timed in rounds with trees of 64 nodes" if timed else "draft by its bytes, not timed"
        assert way.assumption.endswith(said), way.source


def test_batches_share_experts_and_not_caches():
    way = next(w for w in costings("kimi-k2.6", 8192, 16) if w.experts == "independent")
    config, weights = target_config("kimi-k2.6"), MODELS["kimi-k2.6"].weights
    cost, touched = way.round_cost("best_first", 0.0, 9.0)
    assert touched == pytest.approx(expected_experts(384, 8, 144))
    moved = [forward_bytes(config, 16 * n, 16 * 8192, weights) for n in (1, 9)]
    draft = drafter_bytes(drafter_config("kimi-k2.6-drafter"), 8192, 16)
    assert cost == pytest.approx((moved[1] + draft) / moved[0])
    assert MACHINE.flops_per_second / MACHINE.bytes_per_second > 100, "bytes bound both"


@pytest.mark.parametrize("router", ROUTERS)
def test_recorded_sharing_lies_between_one_row_and_independent_ones(router):
    sharing, of = recorded_sharing(router), (128, 8) if router == "recorded wide" else (16, 4)
    assert {each.temperature for each in sharing} == {0.0, 0.6}
    assert {each.layer for each in sharing} == {*range(1, 8), None} and {
        each.prompts for each in sharing
    } == {64}
    for each in sharing:
        assert (each.experts, each.experts_per_token) == of
        assert each.experts_per_token < each.touched_low < each.touched < each.touched_high
        assert each.touched < each.independent
        assert each.touched_high < each.independent or (each.layer is not None and each.rows == 3)
        fifth_digit = each.touched * np.array([1 - 5e-5, 1 + 5e-5])  # the document keeps five
        least, most = effective_rows(*of, fifth_digit)
        assert (1 - 5e-5) * least <= each.effective <= (1 + 5e-5) * most
        assert each.effective < each.rows
    trees = [
        each for each in sharing if (each.shape, each.layer, each.temperature) == ("best_first", None, 0.0)
    ]
    found = verdicts([summary(budget=each.budget) for each in trees], ["kimi-k2.6"], (8192,))
    found = [v for v in found if (v.source, v.experts) == ("measured layers", router)]
    for each, verdict in zip(trees, found, strict=True):
        assert verdict.touched == pytest.approx(expected_experts(384, 8, each.effective))
        assert verdict.rows == each.rows


def test_the_wider_router_shares_less_and_a_round_costs_more():
    at = {
        v.experts: v for v in verdicts([summary()], ["kimi-k2.6"], (8192,)) if v.source == "measured layers"
    }
    for few in ("recorded", "recorded small"):
        ways = (few, "recorded wide", "random router", "independent")
        touched, cost = ([getattr(at[way], name) for way in ways] for name in ("touched", "cost"))
        assert touched[0] > 8 and touched == sorted(touched) and cost == sorted(cost)
        assert "(16 experts, top 4)" in at[few].assumption
    assert "(128 experts, top 8)" in at["recorded wide"].assumption


def test_what_was_not_recorded_has_no_verdict_by_it():
    none = verdicts([summary("beam"), summary(temperature=0.3)], ["kimi-k2.6"], (8192,))
    assert not {v.experts for v in none} & set(ROUTERS) and len(none) == 6
    assert not {v.experts for v in verdicts(SUMMARIES, ["kimi-k2.6"], (8192,), sharing=())} & set(ROUTERS)
    own = verdicts([summary()], ["kimi-k2.6"], (8192,), sharing=recorded_sharing("recorded wide"))
    wide = verdicts([summary()], ["kimi-k2.6"], (8192,))
    assert {v.cost for v in own if v.experts == "recorded"} == {
        v.cost for v in wide if v.experts == "recorded wide"
    }


def test_what_pays():
    def pays(tokens, low, high):
        each = replace(summary(tokens=tokens), low=low, high=high)
        return verdicts([each], ["py12m"])[0].pays

    cost = verdicts([summary()], ["py12m"])[0].cost
    assert pays(cost * 1.2, cost * 1.1, cost * 1.3) == "yes"
    assert pays(cost * 1.1, cost * 0.9, cost * 1.3) == "undecided"
    assert pays(cost * 0.9, cost * 0.8, cost * 0.99) == "no"
    alone = replace(summary(tokens=cost * 2), prompts=1)
    assert verdicts([alone], ["py12m"])[0].pays == "undecided", "one prompt says nothing of others"


def test_own_best():
    found = verdicts(SUMMARIES, ["kimi-k2.6", "py12m"], (128, 8192))
    best = at_own_best(found)
    assert len(best) == len({place_of(v) for v in found})
    for place, by_shape in best.items():
        for shape, each in by_shape.items():
            assert each.speedup == max(v.speedup for v in found if place_of(v) == place and v.shape == shape)


def test_where_a_tree_stops_paying():
    batches = (1, 4, 16, 64, 256, 1024)
    limits = batch_limits(verdicts(SUMMARIES, ["kimi-k2.6", "py12m"], (8192,), batches))
    assert {each.model for each in limits} == {"kimi-k2.6"}, "what was timed was timed at a batch of one"
    assert {each.source for each in limits} == {"analytic"} and len(limits) == 2 * (1 + len(ROUTERS))
    for each in limits:
        assert [v.batch for v in each.best] == list(batches)
        after = [v.pays for v in each.best if each.stops and v.batch >= each.stops]
        assert after and "yes" not in after, "arithmetic bounds the largest batches"
        before = [v for v in each.best if v.batch < each.stops]
        assert before[-1].pays == "yes"


def test_a_drafter_reaches_no_deeper_than_its_horizon():
    both = [*SUMMARIES, *(replace(each, depth=7) for each in SUMMARIES)]
    found = verdicts(both, ["kimi-k2.6", "random-4.8b"], (128,))
    assert {(v.model, v.depth) for v in found} == {("kimi-k2.6", 7), ("random-4.8b", 15)}
    assert {v.depth for v in verdicts(SUMMARIES, ["kimi-k2.6"], (128,))} == {15}, "none is as shallow"
    deeper = [*SUMMARIES, *(replace(each, depth=10) for each in SUMMARIES)]
    assert {v.depth for v in verdicts(deeper, ["kimi-k2.6"], (128,))} == {10}, "the nearest to it"
    assert verdicts([summary(budget=0)], ["kimi-k2.6"], (128,)) == [], (
        "a round without a draft is the measure"
    )


@pytest.mark.parametrize("experts", ["independent", "random router", *ROUTERS])
def test_a_curve_of_rounds_is_what_the_verdicts_cost(experts):
    cost = layers_cost("kimi-k2.6", 8192, experts)
    assert cost.rows.tolist() == list(range(1, 66))
    for each in verdicts(SUMMARIES, ["kimi-k2.6"], (8192,)):
        if (each.source, each.experts, each.shape) == ("measured layers", experts, "best_first"):
            assert each.cost == pytest.approx(cost(each.rows) / cost(1), rel=2e-3)
    assert cost.stages(9)["draft"] == default_draft_ms("kimi-k2.6", 8192) == MODELS["kimi-k2.6"].draft_ms
    dear = layers_cost("kimi-k2.6", 8192, experts, draft_ms=5.0)
    assert dear(9) - cost(9) == pytest.approx(5 - MODELS["kimi-k2.6"].draft_ms) and dear(1) == cost(1)


def test_a_curve_is_no_longer_than_what_is_known():
    assert layers_cost("kimi-k2.6", 128, "recorded", "chain").rows[-1] == 16
    rows = json.loads((DATA / "results" / "h200" / "decode_random-4.8b.json").read_text())["rows"]
    (timed,) = [row["stage_ms"]["draft"] for row in rows if (row["method"], row["budget"]) == ("tree", 64)]
    assert layers_cost("random-4.8b", 128).stages(9)["draft"] == pytest.approx(timed, rel=0.001)
    assert layers_cost("random-4.8b", 128).rows[-1] == 65, "timed to 64, and a little further"
    for arguments, match in (
        (("deepseek-v3", 128), "no layer of deepseek-v3 was timed after 128"),
        (("kimi-k2.6", 77), "no layer of kimi-k2.6 was timed after 77"),
        (("py12m", 128), "no layer of py12m was timed"),
        (
            ("kimi-k2.6", 128, "guessed"),
            "expected one of independent, recorded, recorded small, recorded wide, random",
        ),
        (("kimi-k2.6", 128, "recorded", "beam"), "what beam shares at temperature 0 was not recorded"),
    ):
        with pytest.raises(UsageError, match=match):
            layers_cost(*arguments)
