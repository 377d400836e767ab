"""The whole model's estimate: by hand from a made-up bench, of the recorded one, and as the command prints it."""

import functools
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from bench.small import SMALL, SMALL_DRAFTER
from support import assert_one_line

from ddtree import bench_layers, cli_bench
from ddtree.bench_estimate import GPUS, draft_costs, estimate, format_estimate, largest_part
from ddtree.bench_memory import held, stage_bytes
from ddtree.bench_random import open_random
from ddtree.bundle import DATA
from ddtree.errors import UsageError
from ddtree.ops.plan_ops import PlanOps
from ddtree.study_costing import OTHER_MS
from ddtree.study_layers import divided, layer_costs

KIMI = DATA / "results" / "h200" / "layers_kimi-k2.6_int4.json"
TOUCHED = {1: 2, 6: 7, 9: 9, 80: 14}
NORMS = 3.0


@pytest.fixture
def config(tmp_path):
    """One dense layer and three with 16 experts, of which a row chooses 2; a drafter of block 6."""
    shape = SMALL | {"num_hidden_layers": 4, "n_routed_experts": 16, "moe_intermediate_size": 32}
    (tmp_path / "small.json").write_text(json.dumps(shape))
    (tmp_path / "small-drafter.json").write_text(json.dumps(SMALL_DRAFTER))
    return str(tmp_path / "small.json")


def forward(rows):
    """Microseconds: dense 10 + rows, MoE 20 + rows + experts of 5 + 2 a touched one, head 7 + rows, embedding 1."""
    experts = 5.0 + 2 * TOUCHED[rows]
    kinds = [("embedding", "", 1.0), (0, "dense", 10.0 + rows), (1, "moe", 20.0 + rows + experts)]
    kinds.append(("head", "", 7.0 + rows))
    alone = [("dense", "add_norm post_norm", NORMS), ("dense", "linear o", 7.0), ("moe", "gate bias", NORMS)]
    alone += [("moe", "experts mlp", experts), ("ends", "linear head", 6.0)]
    return {
        "rows": rows, "context_len": 64, "dtype": "bf16", "forward": {"experts_touched": [TOUCHED[rows]]},
        "layers": [dict(zip(("layer", "kind", "us"), each, strict=True)) for each in kinds],
        "operations": [dict(zip(("kind", "operation", "us"), each, strict=True)) for each in alone],
    }  # fmt: skip


def bench(*rows):
    return {"kind": "ddtree layer bench", "model": "small", "times": [forward(n) for n in rows or TOUCHED]}


def draft(model="small", context=64):
    times = [("draft", 6, 400.0), ("extend", 1, 90.0), ("extend", 6, 100.0)]
    names = ("what", "rows", "us")
    return {
        "kind": "ddtree draft bench",
        "model": model,
        "times": [{"context_len": context} | dict(zip(names, each, strict=True)) for each in times],
    }


def rounds_of(found, **wanted):
    return [each for each in found["rounds"] if wanted.items() <= each.items()]


def test_a_round_by_hand(config):
    found = estimate(bench(), config, draft())
    assert found["layers"] == {"dense": 1, "moe": 3} and found["timed_layers"] == {"dense": 1, "moe": 1}
    (ar,) = rounds_of(found, method="ar", experts="as timed", gpus=1)
    assert ar["ms"] == pytest.approx((11 + 3 * (21 + 9) + 8 + 1) / 1e3) == pytest.approx(ar["verify_ms"])
    assert (ar["rows"], ar["draft_ms"], ar["other_ms"], ar["over_ar"]) == (1, 0, 0, 1)
    (tree,) = rounds_of(found, method="tree", experts="as timed", gpus=1, rows=9)
    verify = (19 + 3 * (29 + 23) + 16 + 1) / 1e3
    assert tree["verify_ms"] == pytest.approx(verify) and tree["draft_ms"] == 0.5
    assert tree["ms"] == pytest.approx(verify + 0.5 + OTHER_MS) and tree["touched"] == pytest.approx(9)
    assert tree["over_ar"] == pytest.approx(tree["ms"] / 0.110)
    (chain,) = rounds_of(found, method="chain", experts="as timed", gpus=1)
    assert chain["rows"] == 6, "the root and the five nodes that the drafter proposes"
    assert chain["verify_ms"] == pytest.approx((16 + 3 * (26 + 19) + 13 + 1) / 1e3)
    (even,) = rounds_of(found, method="tree", experts="independent", gpus=1, rows=9)
    touched = 16 * (1 - (14 / 16) ** 9)
    assert even["touched"] == pytest.approx(touched)
    assert even["verify_ms"] - verify == pytest.approx(3 * 2 * (touched - 9) / 1e3)
    assert [each["rows"] for each in rounds_of(found, method="tree", experts="as timed", gpus=8)] == [
        6,
        9,
        80,
    ]
    assert {each["rows"] for each in rounds_of(found, method="tree", experts="independent")} == {6, 9}


def test_gpus_that_share_every_layer_are_a_bound(config):
    """Norms and gates are done by each; the rest, and the draft, takes an eighth."""
    found = estimate(bench(), config, draft())
    (tree,) = rounds_of(found, method="tree", experts="as timed", gpus=8, rows=9)
    dense, moe, head = NORMS + (19 - NORMS) / 8, NORMS + (52 - NORMS) / 8, 16 / 8
    assert tree["verify_ms"] == pytest.approx((dense + 3 * moe + head + 1) / 1e3)
    assert tree["draft_ms"] == 0.5 / 8 and tree["other_ms"] == OTHER_MS
    costs = layer_costs(divided(bench(), 8), 64)
    assert costs.experts(9) == pytest.approx(23 / 8) and costs.experts_us[2] == 23 / 8
    for one, many in zip(rounds_of(found, gpus=8), rounds_of(found, gpus=16), strict=True):
        (alone,) = [
            each
            for each in rounds_of(
                found, gpus=1, experts=one["experts"], method=one["method"], rows=one["rows"]
            )
        ]
        assert alone["verify_ms"] / 8 < one["verify_ms"] < alone["verify_ms"]
        assert alone["verify_ms"] / 16 < many["verify_ms"] < one["verify_ms"]
    assert divided(bench(), 1) == bench()


def test_a_draft_without_a_document_is_its_bytes(config):
    whole = open_random(config)
    (by_bytes,) = draft_costs(whole, [64]).values()
    item, weights = 2, held(replace(whole).drafter_weights(1, PlanOps("bf16")).fc)
    assert 0 < weights < by_bytes / 1e3 * 4.17e12 < item * 60_000
    assert draft_costs(whole, [64], draft()) == {64: 0.5}
    alone = estimate(bench(), config)
    assert "by its bytes" in alone["draft"] and "timed," in estimate(bench(), config, draft())["draft"]
    for document, match in (
        (bench(), "expected a document of bench draft of small, found 'ddtree layer bench'"),
        (draft("large"), "expected a document of bench draft of small, found .* of 'large'"),
        (draft(context=7), "context 64 was not timed; there is 7"),
    ):
        with pytest.raises(UsageError, match=match) as caught:
            estimate(bench(), config, document)
        assert_one_line(caught.value)


def test_without_a_drafter_none_is_counted(config, tmp_path):
    (tmp_path / "small-drafter.json").unlink()
    found = estimate(bench(), config)
    assert {each["method"] for each in found["rounds"]} == {"ar", "tree"}
    assert {each["draft_ms"] for each in found["rounds"]} == {
        0
    } and "\nno drafter is known" in format_estimate(found)


@pytest.mark.parametrize("weights", ["bf16", "fp8", "int4"])
def test_memory_is_the_loaders(config, weights):
    """Counted from one layer of each kind, all layers are what the loader takes for all."""
    whole = open_random(config, weights=weights)
    target, ops = whole.target_weights(1, PlanOps("bf16")), PlanOps("bf16")
    stages, caches = stage_bytes(whole, None, "bf16", 100)
    assert stages == [held(target.embedding), *map(held, target.layers), held(target.head)]
    assert caches == [0, *[100 * (16 + 8) * 2] * 4, 0]
    drafter = whole.drafter_weights(1, ops)
    tables = held(drafter.cos) + held(drafter.sin)
    arrays = [*drafter.layers, drafter.fc, drafter.norm, drafter.hidden_norm]
    stages, caches = stage_bytes(whole, whole.drafter_config, "bf16", 100)
    norms = sum(held(each) for each in (drafter.norm, drafter.hidden_norm)) * 5
    assert stages[-1] == pytest.approx(sum(map(held, arrays)), abs=norms) and tables
    assert caches[-1] == 100 * 2 * 1 * 16 * 2


def test_a_pipeline_is_cut_where_its_largest_part_is_least():
    rng = np.random.default_rng(0)
    for parts in (1, 2, 3, 5):
        for size in (5, 8):
            stages = rng.integers(1, 50, size).tolist()
            cuts = itertools.combinations(range(1, size), parts - 1)
            best = min(max(sum(stages[a:b]) for a, b in itertools.pairwise((0, *cut, size))) for cut in cuts)
            assert largest_part(stages, parts) == best
    assert largest_part([3, 4], 16) == 4


def test_the_recorded_bench_of_kimi():
    """61 layers of what was timed at 8192 positions; INT4 experts fit into 8 GPUs."""
    found = estimate(json.loads(KIMI.read_text()))
    (ar,) = rounds_of(found, context_len=8192, experts="as timed", method="ar", gpus=1)
    assert ar["ms"] == pytest.approx((312.64 + 60 * 224.064 + 2.016 + 550.304) / 1e3)
    assert found["layers"] == {"dense": 1, "moe": 60} and "timed after 8192" in found["draft"]
    memory = {(each["split"], each["gpus"]): each for each in found["memory"]}
    routed = 60 * 384 * 3 * 7168 * 2048
    rest = 1026e9 - routed + 3.48e9  # the drafter among it
    caches = 131072 * 2 * (61 * 576 + 6 * 2 * 8 * 128)
    whole = 4.5 / 8 * routed + 2 * rest + caches
    assert memory["pipeline", 1]["bytes_per_gpu"] == pytest.approx(whole, rel=2e-3)
    assert [memory["pipeline", gpus]["fits"] for gpus in GPUS] == [False, True, True]
    text = format_estimate(found).splitlines()
    figures = [line for line in text if line.split()[:1] == ["estimate"]]
    assert len(figures) == len(rounds_of(found, gpus=1)) + len(found["memory"])
    assert "a draft takes 3.06 ms: draft of random weights timed after 8192 positions" in text
    assert "NOT counted" in "".join(text) and text[0].startswith("estimate, not measured: kimi-k2.6, int4:")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"times": None}, "with times, which need a GPU"),
        ({"kind": "ddtree kernel bench"}, "expected a document of kind 'ddtree layer bench'"),
        ({"times": [forward(6), forward(9)]}, "expected a forward of 1 row, found 6 and more"),
        ({"times": [forward(1)]}, "two numbers of experts touched"),
        (
            {"times": [forward(1), forward(6) | {"layers": forward(6)["layers"][2:]}]},
            "a timed dense layer in every forward",
        ),
        ({"model": "large"}, "config: expected that of 'large', whose layers were timed, found 'small'"),
    ],
)
def test_what_cannot_be_estimated_is_one_line(config, change, match):
    with pytest.raises(UsageError, match=match) as caught:
        estimate(bench() | change, config)
    assert_one_line(caught.value)


# --- the command line -----------------------------------------------------------------------------------------------


@pytest.fixture
def run(command):
    """Run `bench layers` in this process; returns (exit code, stdout, stderr)."""
    return functools.partial(command, "bench", "layers")


def test_a_recorded_document_is_estimated_without_a_gpu(run, config, tmp_path):
    (tmp_path / "bench.json").write_text(json.dumps(bench()))
    (tmp_path / "draft.json").write_text(json.dumps(draft()))
    words = ("--from", tmp_path / "bench.json", "--config", config, "--draft", tmp_path / "draft.json")
    found = estimate(bench(), config, draft())
    assert run(*words) == (0, format_estimate(found) + "\n", "")
    code, out, _ = run(*words, "--json")
    assert code == 0 and json.loads(out) == bench() | {"estimate": json.loads(json.dumps(found))}
    (tmp_path / "other.json").write_text(json.dumps(bench() | {"times": [{"rows": 1}]}))
    (tmp_path / "nan.json").write_text(json.dumps(bench() | {"note": float("nan")}))
    for arguments, said in (
        ((*words, "--rows", 3), "--from times nothing: leave out --rows"),
        ((*words, "--backend", "cuda"), "--from times nothing: leave out --backend"),
        (("--from", tmp_path / "none.json"), "none.json: cannot read the document"),
        (("--from", tmp_path / "nan.json"), "nan.json: cannot read the document: Out of range float"),
        (
            ("--from", tmp_path / "other.json", "--config", config),
            "other.json: not in the form that bench --json",
        ),
        (("--draft", tmp_path / "draft.json"), "draft: only a model of --config has a whole"),
        (("--from", tmp_path / "bench.json"), "config: expected a config.json or one of"),
    ):
        code, out, err = run(*arguments)
        assert code == 2 and out == "" and len(err.splitlines()) == 1 and said in err, arguments


@pytest.mark.parametrize(("rows", "whole"), [((1, 6, 9), True), ((1,), False)])
def test_a_bench_ends_with_the_estimate(run, config, monkeypatch, rows, whole):
    """What was timed is printed even where it is too little for an estimate, which stderr says."""
    timed = bench(*rows) | {"parity": None}
    monkeypatch.setattr(bench_layers, "run_layer_bench", lambda *arguments: dict(timed))
    monkeypatch.setattr(cli_bench, "engine_of", lambda *arguments: None)
    monkeypatch.setattr(cli_bench, "describe_backend", lambda engine: "a GPU")
    code, out, err = run("--config", config, "--layers", 2, "--json")
    document = json.loads(out)
    assert code == 0 and document["times"] == json.loads(json.dumps(timed["times"]))
    assert bool(document.get("estimate")) == whole and ("no estimate of the whole model: " in err) != whole


def test_a_draft_that_does_not_fit_is_refused_before_anything_is_timed(run, config, monkeypatch, tmp_path):
    monkeypatch.setattr(cli_bench, "engine_of", lambda *arguments: pytest.fail("an engine was opened"))
    words = ("--config", config, "--draft", tmp_path / "draft.json", "--context", 64, "--context", 96)
    for document, said in (
        (draft(), "draft: context 96 was not timed; there is 64"),
        (draft() | {"times": [{}]}, "draft.json: not in the form that bench --json writes: KeyError"),
    ):
        (tmp_path / "draft.json").write_text(json.dumps(document))
        code, out, err = run(*words)
        assert code == 2 and out == "" and len(err.splitlines()) == 1 and said in err
