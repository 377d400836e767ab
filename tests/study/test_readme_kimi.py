"""The README's table of what a tree costs Kimi K2.6, from the documents under data/results."""

import json

import pytest

from ddtree import study_costing
from ddtree.bundle import DATA
from ddtree.study_layers import layer_costs
from ddtree.study_scale import verdicts
from ddtree.study_summary import Summary

RESULTS = DATA / "results"
README = (DATA.parent / "README.md").read_text("utf-8")
CONTEXT = 8192
ROWS = {
    "independently, evenly": "independent",
    "as the timed rows, of random weights": "random router",
    "by the shipped model's effective rows, 16 experts, top 4": "recorded",
    "by those of `small`, 16 experts, top 4": "recorded small",
    "by those of `wide`, 128 experts, top 8": "recorded wide",
}


def read(name):
    return json.loads((RESULTS / name).read_text("utf-8"))


def rounds():
    """By the way to count experts, verdicts of greedy rounds with the shipped drafter's acceptance at 7 levels."""
    document = read("replay_py12m.json")
    summaries = [Summary(**dict(zip(document["columns"], row, strict=True))) for row in document["data"]]
    found = verdicts(summaries, ["kimi-k2.6"], (CONTEXT,))
    assert {each.depth for each in found} == {7} and {each.temperature for each in found} == {0.0}
    return {
        way: [each for each in found if (each.source, each.experts) == ("measured layers", way)]
        for way in ROWS.values()
    }


def said(verdict):
    return f"{verdict.speedup:.2f} ({verdict.speedup_low:.2f} to {verdict.speedup_high:.2f})"


def best(found, shape):
    each = max((each for each in found if each.shape == shape), key=lambda each: each.speedup)
    return f"{each.budget} nodes: {said(each)}"


def large(found):
    (each,) = [each for each in found if (each.shape, each.budget) == ("best_first", 64)]
    return each


@pytest.mark.parametrize("row", ROWS)
def test_the_readme_s_rounds_of_kimi(row):
    found = rounds()[ROWS[row]]
    cells = best(found, "best_first"), best(found, "chain"), f"{large(found).cost:.1f}, {said(large(found))}"
    assert f"| {row} | {' | '.join(cells)} |" in README


def test_what_a_smaller_cache_would_change(monkeypatch):
    """Attention of 64 rows by the kernel bench, whose cache ends soon after them, in place of the layers' own."""
    document = read("h200/layers_kimi-k2.6_int4.json")
    (alone,) = [
        case["graph_us"]
        for case in read("h200/kernels.json")["cases"]
        if case["name"] == "attention bf16 64x64x512+64 after 8192"
    ]
    for record in document["times"]:
        if record["context_len"] == CONTEXT and record["rows"] in (64, 65):
            operations = {(each["kind"], each["operation"]): each["us"] for each in record["operations"]}
            for layer in record["layers"]:
                if layer["kind"]:
                    layer["us"] -= operations["moe", "attention"] - alone
    monkeypatch.setattr(study_costing, "timed_layers", lambda _, context: layer_costs(document, context))
    found = rounds()
    few, many = (said(large(found[way])) for way in ("recorded", "recorded wide"))
    text = README.replace("\n", " ")
    assert f"{few} by the shipped model's router and {many} by that of `wide`" in text
    assert document != read("h200/layers_kimi-k2.6_int4.json")


def test_the_acceptance_is_the_shipped_model_s():
    assert read("replay_py12m.json")["model_sha256"] == {
        name: read("train_py12m.json")["sha256"][file]
        for name, file in (("target", "target.kdtr"), ("drafter", "drafter.kdtr, handed in"))
    }


@pytest.mark.parametrize("name", ["small", "wide"])
def test_routing_was_recorded_of_the_model_whose_training_is(name):
    trained = read(f"train_{name}.json")
    shas = {part: trained["sha256"][f"{part}.kdtr"] for part in ("target", "drafter")}
    assert read(f"routing_{name}.json")["model_sha256"] == shas
    assert trained["drafter"]["made_of"]["target"] == shas["target"]
    assert shas.items() <= trained["branch"]["made_of"].items()
