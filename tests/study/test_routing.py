"""`study routing`: the recorded experts are those of the forwards, looked at another way; and the command."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from support import tiny

from ddtree.batch import tree_batch
from ddtree.bundle import DEFAULT_MODEL
from ddtree.config import DecodeConfig, SamplingConfig
from ddtree.decode import decode
from ddtree.engine import Engine
from ddtree.errors import UsageError
from ddtree.lab_layers import prefilled
from ddtree.ops import NumpyOps
from ddtree.prompts import load_prompts
from ddtree.study_experts import summarise_routing
from ddtree.study_routing import routing_layers
from ddtree.study_routing_record import plan_decodes, plan_trees, record_routing, routed_rounds, watched_gates

HEADINGS = ["temp", "shape", "budget", "rows", "experts", "from", "to", "even", "by load"]
HEADINGS += ["effective rows", "from", "to"]
CONFIG = DecodeConfig("tree", 8, 12, SamplingConfig(0.6, top_p=0.95, seed=7))


@pytest.mark.parametrize(("method", "budget"), [("tree", 8), ("chain", 5)])
def test_gates_are_those_of_the_same_tree_on_the_same_context(engine, method, budget):
    prompt, checked = engine.bundle.encode(load_prompts()[1].text)[:40], 0
    tokens = []
    for this in routed_rounds(engine, prompt, DecodeConfig(method, budget, 12)):
        if this.round.index:
            session = prefilled(engine.bundle, NumpyOps("f32"), [*prompt, *tokens[:-1]])
            steps = session.observed(tree_batch(this.round.tree, session.cache.context_len))
            assert list(this.gates) == list(range(1, 8))
            for layer, gates in this.gates.items():
                assert np.array_equal(gates, steps["gates", layer])
                checked += gates.shape[1]
        tokens += this.round.tokens
    assert len(tokens) == 12 and checked > 7 * budget


def test_watching_changes_nothing_and_ends(engine):
    prompt = engine.bundle.encode(load_prompts()[0].text)
    before = engine.model.forward
    watched = [this.round.tokens for this in routed_rounds(engine, prompt, CONFIG)]
    assert engine.model.forward == before and "forward" not in vars(engine.model)
    assert watched == [this.tokens for this in decode(engine, prompt, CONFIG)]


def test_rows_are_what_the_rounds_amount_to(engine):
    prompts, heard = load_prompts()[:2], []
    trees = plan_trees(engine.horizon, ["best_first", "chain"], [4, 32])
    assert trees == [("best_first", 4), ("best_first", 32), ("chain", 4), ("chain", 15)]
    plan = plan_decodes(engine, prompts, trees, CONFIG, (0.0, 0.6))
    rows = record_routing(engine, plan, heard.append)
    assert heard == [16] * 16 and len(rows) == 16 * 7
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    wanted = {"prompt": prompts[1].id, "temperature": 0.6, "budget": 32, "layer": 5}
    (row,) = [row for row in rows if wanted.items() <= row.items()]
    prompt = engine.bundle.encode(prompts[1].text)
    again = [this for this in routed_rounds(engine, prompt, replace(CONFIG, budget=32), 1) if this.gates]
    assert row["rounds"] == len(again)
    chosen = [this.gates[5] != 0 for this in again]
    assert row["rows"] == pytest.approx(np.mean([each.shape[1] for each in chosen]))
    assert row["touched"] == pytest.approx(np.mean([each.any(axis=1).sum() for each in chosen]))
    assert row["load"] == np.sum([each.sum(axis=1) for each in chosen], axis=0).tolist()
    assert sum(row["load"]) == 4 * sum(each.shape[1] for each in chosen)
    assert row["independent"] == pytest.approx(np.mean([16 * (1 - 0.75 ** each.shape[1]) for each in chosen]))
    assert row["ratio"] == row["touched"] / row["independent"] < 1
    assert row["target_sha256"] == engine.bundle.sha256()["target"] and row["shared_independent"] == 1
    full = [each.any(axis=1).sum() for each in chosen if each.shape[1] == 33]
    assert row["rounds_full"] == len(full) <= len(chosen) and row["touched_full"] == pytest.approx(
        np.mean(full)
    )
    pairs = sum(value for name, value in row.items() if name.startswith("pairs_"))
    assert pairs == sum(each.shape[1] * (each.shape[1] - 1) // 2 for each in chosen)
    assert row["shared_cousins_same_token"] > row["shared_cousins"], "the same token goes to the same experts"


def test_the_command(command, tmp_path):
    arguments = (
        "--limit",
        1,
        "--max-new-tokens",
        8,
        "--budget",
        4,
        "--shape",
        "best_first",
        "--shape",
        "chain",
    )
    out, gates = tmp_path / "routing.jsonl", tmp_path / "gates.json"
    code, stdout, err = command("study", "routing", *arguments, "--out", out, "--gates", gates)
    rows = list(map(json.loads, out.read_text().splitlines()))
    assert code == 0 and "backend numpy" in err and "routing: 100%" in err
    assert len(rows) == 14 and {row["prompt"] for row in rows} == {load_prompts()[0].id}
    assert "cousins_same_token" in stdout and "NaN" not in stdout
    table, notes = stdout.splitlines()[:3], stdout.splitlines()[3:6]
    assert re.split("  +", table[0].strip()) == HEADINGS and "95% interval over prompts" in notes[2]
    (tree,) = [each for each in summarise_routing(rows) if each.layer is None and each.shape == "best_first"]
    numbers = [tree.touched, tree.touched_low, tree.touched_high, tree.independent, tree.by_load]
    numbers += [tree.effective, tree.effective_low, tree.effective_high]
    assert table[1].split() == ["0", "best_first", "4", "5", *(f"{value:.2f}" for value in numbers)]
    document = json.loads(gates.read_text())
    layers = routing_layers(document)
    assert list(layers) == list(range(1, 8)) and document["prompt"] == rows[0]["prompt"]
    assert all(((each != 0).sum(axis=0) == 4).all() for each in layers.values())
    assert len(document["tokens"]) == len(document["parents"]) == layers[1].shape[1] == 5
    for kind, file, more in (
        ("routing", gates, ("--layer", 3)),
        ("load", gates, ()),
        ("experts", out, ()),
        ("experts", tmp_path / "summary.json", ("--layer", 2, "--temperature", 0)),
    ):
        if file.name == "summary.json":
            code, stdout, _ = command("study", "routing", *arguments, "--json")
            file.write_text(stdout)
            summary = json.loads(stdout)
            assert code == 0 and summary["kind"] == "ddtree routing summary" and summary["prompts"] == 1
        figure = tmp_path / f"{kind}.png"
        assert command("plot", kind, file, "-o", figure, *more)[0] == 0 and figure.stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--out", "nowhere/x.jsonl"), "'nowhere/x.jsonl': cannot write there"),
        (("--gates", "."), "'.': cannot write there"),
        (("--out", ""), "cannot write there"),
        (("--budget", "0"), "Invalid value for '--budget'"),
        (("--shape", "bush"), "shape: expected one of"),
        (("--shape", "oracle"), "oracle"),
        (("--temperature", "0", "--temperature", "-1"), "temperature: expected"),
        (("--model", str(DEFAULT_MODEL / "target.kdtr")), "no drafter"),
    ],
)
def test_what_cannot_be_done_is_one_line(command, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    code, out, err = command("study", "routing", "--limit", 1, "--max-new-tokens", 4, *arguments)
    last = [line for line in err.replace("\r", "\n").splitlines() if line.startswith("ddtree: ")]
    assert code == 2 and out == "" and len(last) == 1 and said in last[0]
    assert list(tmp_path.iterdir()) == []


def test_what_was_decoded_is_kept_where_no_tree_was_full(command, tmp_path):
    """A template of two nodes never has four: rows and gates are written, then it is said."""
    (tmp_path / "two.json").write_text("[[0], [1]]")
    shape, out, gates = f"fixed:{tmp_path / 'two.json'}", tmp_path / "rows.jsonl", tmp_path / "gates.json"
    words = ("study", "routing", "--limit", 1, "--max-new-tokens", 4, "--shape", shape, "--budget", 4)
    code, stdout, err = command(*words, "--out", out, "--gates", gates)
    assert code == 2 and stdout == "" and "with full rounds; found none" in err
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 7 and all(row["rounds"] and not row["rounds_full"] for row in rows)
    assert len(routing_layers(json.loads(gates.read_text()))) == 7


def test_captured_graphs_and_dense_models_are_refused():
    engine = Engine(tiny("dsv3"), max_budget=4)
    engine.runner = type("Runner", (), {"graphs": True})()
    with pytest.raises(UsageError, match="add --no-graphs"), watched_gates(engine):
        pass
    engine.runner, engine.config = (
        None,
        type("Dense", (), {"num_hidden_layers": 2, "is_moe": lambda self, at: False})(),
    )
    with pytest.raises(UsageError, match="no MoE layer"), watched_gates(engine):
        pass
    with pytest.raises(UsageError, match="at least one shape"):
        plan_trees(15, ["best_first"], [0])


@pytest.mark.gpu
def test_a_device_without_graphs_records_the_same(engine):
    """f32: its gates choose as NumPy's do but for near ties; the tokens are those of its own decode."""
    device = Engine(engine.bundle, backend="cuda", graphs=False, max_budget=16)
    trees = plan_trees(engine.horizon, ["best_first", "chain"], [8])
    mine, theirs = (
        record_routing(each, plan_decodes(each, load_prompts()[:2], trees, CONFIG))
        for each in (device, engine)
    )
    assert [row["rounds"] for row in mine] == [row["rounds"] for row in theirs]
    for a, b in zip(mine, theirs, strict=True):
        assert a["touched"] == pytest.approx(b["touched"], abs=0.1)
