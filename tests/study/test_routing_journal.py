"""`study routing` that is interrupted goes on where it stopped, and ends with the same bytes; nothing is mixed in."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from support import assert_one_line

from ddtree import study_routing_record
from ddtree.config import DecodeConfig, SamplingConfig
from ddtree.engine import Engine
from ddtree.errors import UsageError
from ddtree.prompts import load_prompts
from ddtree.study_journal import Journal
from ddtree.study_replay import replay, write_rows
from ddtree.study_routing_record import plan_decodes, plan_trees, record_routing
from ddtree.study_routing_rows import KEY, ROUTED

CONFIG = DecodeConfig("tree", 4, 6, SamplingConfig(0.6, top_p=0.95, seed=7))
LAYERS = 7


def planned(engine, shapes=("best_first", "chain"), config=CONFIG, prompts=None):
    """Two prompts, two temperatures, two trees: eight decodes of seven rows."""
    trees = plan_trees(engine.horizon, shapes, [4])
    return plan_decodes(engine, prompts or load_prompts()[:2], trees, config, (0.0, 0.6))


@pytest.fixture
def decoded(monkeypatch):
    """The decodes that this process makes from here on."""
    found, honest = [], study_routing_record.routed_rounds

    def routed_rounds(engine, prompt_ids, config, sequence=0):
        found.append((sequence, config.sampling.temperature, config.method))
        return honest(engine, prompt_ids, config, sequence)

    monkeypatch.setattr(study_routing_record, "routed_rounds", routed_rounds)
    return found


@pytest.fixture
def whole(engine, tmp_path):
    """The bytes of the file when nothing interrupts the sweep."""
    record_routing(engine, planned(engine), journal=Journal(tmp_path / "whole.jsonl", kind=ROUTED))
    assert [each.name for each in tmp_path.iterdir()] == ["whole.jsonl"]
    return (tmp_path / "whole.jsonl").read_bytes()


def sweep(engine, path, stop_at=None, said=None, **options):
    """Record into a file; it stops, as by Ctrl-C, after so many decodes."""
    done = []

    def progress(total):
        done.append(total)
        if len(done) == stop_at:
            raise KeyboardInterrupt

    try:
        return record_routing(engine, planned(engine, **options), progress, Journal(path, said, ROUTED))
    except KeyboardInterrupt:
        assert stop_at is not None


def refused(engine, path, match, **options):
    before = {each: each.read_bytes() for each in path.parent.iterdir()}
    with pytest.raises(UsageError, match=match) as caught:
        sweep(engine, path, **options)
    assert_one_line(caught.value)
    assert {each: each.read_bytes() for each in path.parent.iterdir()} == before, "nothing is lost"


def test_an_interrupted_sweep_goes_on(engine, tmp_path, whole, decoded):
    path, said = tmp_path / "rows.jsonl", []
    sweep(engine, path, stop_at=3)
    assert len(decoded) == 3 and not path.exists()
    sweep(engine, path, stop_at=5)
    assert len(decoded) == 5
    rows = sweep(engine, path, said=said.append)
    assert len(decoded) == len(set(decoded)) == 8
    assert said == [f"{5 * LAYERS} of {8 * LAYERS} rows are there already: {path}"]
    assert path.read_bytes() == whole and rows == [json.loads(line) for line in whole.splitlines()]
    assert not path.with_name("rows.jsonl.part").exists()
    assert (
        sweep(engine, path) == rows == record_routing(engine, planned(engine)) and path.read_bytes() == whole
    )
    assert len(decoded) == 16, "without a journal all are decoded, with one none is"


def test_a_decode_cut_short_is_made_again(engine, tmp_path, whole, decoded):
    """As a kill in the middle of a write leaves it: two decodes, three layers of a third, and a torn line."""
    lines = whole.splitlines(keepends=True)
    part = tmp_path / "rows.jsonl.part"
    part.write_bytes(b"".join(lines[: 2 * LAYERS + 3]) + lines[2 * LAYERS + 3][:40])
    sweep(engine, tmp_path / "rows.jsonl")
    assert len(decoded) == 6 and (tmp_path / "rows.jsonl").read_bytes() == whole


def test_a_larger_sweep_takes_the_rows_of_a_smaller(engine, tmp_path, whole, decoded):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(whole)
    rows = sweep(engine, path, prompts=load_prompts()[:3])
    assert len(decoded) == 4 and rows == record_routing(engine, planned(engine, prompts=load_prompts()[:3]))
    refused(engine, path, f"line {8 * LAYERS + 1}: no decode of this sweep has prompt sha256 .* there")


def test_rows_of_another_sweep_are_not_mixed_in(engine, tmp_path, whole, recorded):
    (tmp_path / "mixed").mkdir()
    path = tmp_path / "mixed" / "rows.jsonl"
    path.write_bytes(whole)
    longer, other = replace(CONFIG, max_new_tokens=7), replace(CONFIG.sampling, seed=8)
    first, second = load_prompts()[:2]
    for options, match in (
        ({"config": longer}, "line 1: no decode of this sweep has max new tokens 6 there"),
        ({"config": replace(CONFIG, sampling=other)}, "line 1: no decode of this sweep has seed 7 there"),
        ({"shapes": ("beam", "chain")}, "line 1: no decode of this sweep has shape best_first there"),
        ({"prompts": [second, first]}, "line 1: no decode of this sweep has sequence 0 there"),
        ({"prompts": [replace(first, text=first.text + " "), second]}, "has prompt sha256 .* there"),
    ):
        refused(engine, path, match, **options)
    f64 = Engine(engine.bundle, dtype="f64", max_budget=4)
    refused(f64, path, "has backend numpy .*, f32, .* there; name another --out, or move this file away")
    write_rows(path, replay(recorded.recordings[:1], ["best_first"], [2]))
    refused(engine, path, "line 1: no row of study routing; name another")
    row = json.loads(whole.splitlines()[0])
    broken = [{"rounds_full": "5"}, {"load": 3}, {"layer": None}, {"temperature": []}, {"shape": 1}]
    broken += [{"experts": None}, {"experts_per_token": 16}, {"pairs_siblings": -1}, {"touched_full": "x"}]
    broken += [{"load": row["load"][1:]}, {"load": [*row["load"][1:], "1"]}, {"touched": float("inf")}]
    broken += [{"shared_siblings": 10**400}, {"touched_full": None}, {"pairs_parent_child": 0}]
    spoilt = [json.dumps(row | change).encode() + b"\n" for change in broken]
    lacking = {name: value for name, value in row.items() if name != "touched_full"}
    for text in (b"notes\n", b"[1]\n", *spoilt, json.dumps(lacking).encode()):
        path.write_bytes(text)
        refused(engine, path, "line 1: no row of study routing")


def test_a_prompt_that_was_renamed_has_its_new_name(engine, tmp_path, whole, decoded):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(whole)
    renamed = [replace(prompt, id=f"{prompt.id} again") for prompt in load_prompts()[:2]]
    rows = sweep(engine, path, prompts=renamed)
    assert not decoded and {row["prompt"] for row in rows} == {prompt.id for prompt in renamed}
    assert rows == record_routing(engine, planned(engine, prompts=renamed))


def test_another_file_of_a_shape_is_another_shape(engine, tmp_path):
    (out := tmp_path / "rows").mkdir()
    (template := tmp_path / "two.json").write_text("[[0], [1]]")
    sweep(engine, out / "rows.jsonl", shapes=(f"fixed:{template}",))
    template.write_text("[[0], [0, 0]]")
    refused(engine, out / "rows.jsonl", "has shape sha256 .* there", shapes=(f"fixed:{template}",))


def test_rows_say_what_they_are_told_by(whole):
    rows = [json.loads(line) for line in whole.splitlines()]
    keys = {tuple(row[name] for name in KEY) for row in rows}
    assert len(keys) == len(rows) == 8 * LAYERS and {row["kind"] for row in rows} <= {
        prompt.kind for prompt in load_prompts()
    }


def test_a_command_killed_in_the_middle_goes_on(command, tmp_path, decoded):
    """SIGKILL: what was finished is not decoded again, rows and gates are those of a command that ran through."""
    out, gates, part = (tmp_path / name for name in ("rows.jsonl", "gates.json", "rows.jsonl.part"))
    words = ["study", "routing", "--limit", 3, "--max-new-tokens", 24, "--budget", 4, "--budget", 8, "--out"]
    line = [sys.executable, "-m", "ddtree", *map(str, [*words, out, "--gates", gates])]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and (not part.exists() or part.read_bytes().count(b"\n") < 2 * LAYERS):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL and not out.exists() and not gates.exists()
    kept = part.read_bytes().count(b"\n")
    code, _, err = command(*words, out, "--gates", gates)
    assert code == 0 and f"{kept} of {12 * LAYERS} rows are there already" in err
    assert len(decoded) == 12 - kept // LAYERS + 1, "and once for the gates"
    other = tmp_path / "other.jsonl", tmp_path / "other.json"
    assert command(*words, other[0], "--gates", other[1])[0] == 0
    assert out.read_bytes() == other[0].read_bytes() and gates.read_bytes() == other[1].read_bytes()
