"""Costs out of layer benches: the fit of the experts, held to forwards and kernels that were timed apart from it."""

import json
from dataclasses import replace

import numpy as np
import pytest

from ddtree.bundle import DATA
from ddtree.errors import UsageError
from ddtree.study_costing import OTHER_MS
from ddtree.study_layers import fit_experts, layer_costs
from ddtree.study_models import target_config

H200 = DATA / "results" / "h200"


def document(name):
    return json.loads((H200 / f"{name}.json").read_text("utf-8"))


def graph_us(name):
    (case,) = [case for case in document("kernels")["cases"] if case["name"] == name]
    return case["graph_us"]


@pytest.fixture(scope="module")
def kimi():
    return document("layers_kimi-k2.6_int4")


def test_the_fit_says_how_far_it_is_off(kimi):
    fit = fit_experts(kimi)
    assert (fit.points, fit.most_rows, fit.most_touched) == (36, 65, 170)
    assert 0.05 < fit.rms < 0.07 and 0.1 < fit.worst < 0.14
    errors = []
    for each in kimi["times"]:
        (us,) = [one["us"] for one in each["operations"] if one["operation"].startswith("experts ")]
        if each["rows"] <= 65:
            errors.append(fit(each["forward"]["experts_touched"][0]) / us - 1)
    assert np.abs(errors).max() == pytest.approx(fit.worst)
    weights = 3 * 7168 * 2048 * 4.5 / 8
    assert 0.7 < weights / fit.expert_us / 1e3 / kimi["ceilings"]["copy_gb_s"] < 1, (
        "as the kernel bench's cases"
    )


@pytest.mark.parametrize(("rows", "touched"), [(1, 8), (8, 57), (16, 113), (65, 294)])
def test_it_foretells_evenly_routed_experts(kimi, rows, touched):
    """The kernel bench routes at random, far beyond the 170 experts of the fit."""
    (case,) = [c for c in document("kernels")["cases"] if c["name"].startswith(f"experts int4 {rows}x7168")]
    assert case["note"] == f"{touched} experts touched"
    assert fit_experts(kimi)(touched) == pytest.approx(case["graph_us"], rel=0.07)


@pytest.mark.parametrize(
    ("name", "weights", "layers", "context", "within"),
    [
        *(("kimi-k2.6", "_int4", 2, context, 0.095) for context in (128, 8192, 131072)),
        ("random-4.8b", "", 12, 128, 0.06),
    ],
)
def test_layers_add_up_to_the_forward_that_was_timed(name, weights, layers, context, within):
    """As many layers as the bench ran, at its own experts: the whole forward's time, which the costs do not read."""
    config = replace(target_config(name), num_hidden_layers=layers)
    found = document(f"layers_{name}{weights}")
    costs = layer_costs(found, context)
    mine = [each for each in found["times"] if each["context_len"] == context and each["rows"] <= 65]
    assert len(mine) == (12 if layers == 2 else 2)
    for each in mine:
        rows = each["rows"]
        ms = costs.verify_ms(config, rows, costs.bench_touched(config, rows))
        assert ms == pytest.approx(each["forward"]["us"] / 1e3, rel=within), rows


def test_between_and_beyond(kimi):
    config, costs = target_config("kimi-k2.6"), layer_costs(kimi, 8192)
    of = costs.bench_touched(config, [1, 2, 3, 5])
    assert of[0] == pytest.approx(8) and of[1] < of[2] < of[3] == pytest.approx(36)
    assert np.isnan(costs.verify_ms(config, 296, 100)) and np.isnan(costs.bench_touched(config, 296))
    one, more = costs.verify_ms(config, 9, 50), costs.verify_ms(config, 9, 51)
    assert more - one == pytest.approx(60 * costs.experts.expert_us / 1e3)


def test_what_else_a_round_costs_is_what_the_kernels_took():
    us = graph_us("logits_to_tree f32 15x163840 budget 64")
    us += graph_us("accept_compact bf16 61 layers 512+64 64 nodes")
    assert us == pytest.approx(1e3 * OTHER_MS, rel=0.001)


def test_what_cannot_be_costed_is_refused(kimi):
    with pytest.raises(UsageError, match="context 7 was not timed; there is 128, 8192, 131072"):
        layer_costs(kimi, 7)
    with pytest.raises(UsageError, match="expected a document of kind"):
        layer_costs({"kind": "ddtree kernel bench"}, 128)
    with pytest.raises(UsageError, match="two numbers of experts touched"):
        fit_experts(kimi | {"times": kimi["times"][:1]})


def test_rows_that_touched_all_experts_count_as_independent_ones():
    found, config = document("layers_random-4.8b"), target_config("random-4.8b")
    found["times"][-1]["forward"]["experts_touched"] = [64] * 11
    touched = layer_costs(found, 128).bench_touched(config, [1, 16, 64])
    assert touched[0] == pytest.approx(6) and 6 < touched[1] < 60 < touched[2] < 64


@pytest.mark.parametrize("us", [0.0, -1.0, float("nan")])
def test_experts_that_took_no_time_are_refused(kimi, us):
    found = json.loads(json.dumps(kimi))
    for each in found["times"][3]["operations"]:
        each["us"] = us if each["operation"].startswith("experts ") else each["us"]
    with pytest.raises(UsageError, match="expected experts that took time, found"):
        fit_experts(found)
