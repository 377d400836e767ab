"""Traces: what was written is read back, broken files are named by line, and a killed write leaves the old file."""

import hashlib
import json

import numpy as np
import pytest
from compare_arrays import assert_same_bits
from support import assert_one_line, branched, run

from ddtree.bundle import DEFAULT_MODEL
from ddtree.config import DecodeConfig, SamplingConfig
from ddtree.decode import STAGES
from ddtree.engine import Engine
from ddtree.errors import DdtreeError, UsageError
from ddtree.study_budgets import mean_budget_curve
from ddtree.study_rounds import seen_rounds
from ddtree.trace import SCHEMA, read_trace, write_trace

TREE = DecodeConfig("tree", 16, 20, SamplingConfig(0.7, 40, 0.9, seed=2**64 - 1), stop_token_ids=(0, 2))


@pytest.fixture(scope="module")
def decoded(engine, check):
    """Two decodes: (prompt id, prompt, config, rounds)."""
    prompts = [check["prompts"][i][:30].tolist() for i in (0, 1)]
    configs = [TREE, DecodeConfig("chain", 8, 6)]
    return [
        (f"prompt-{i}", prompt, config, run(engine, prompt, config, sequence=i))
        for i, (prompt, config) in enumerate(zip(prompts, configs, strict=True))
    ]


@pytest.fixture
def trace(tmp_path, engine, decoded):
    """A written trace, with the drafter's tables."""
    path = tmp_path / "run.jsonl"
    with write_trace(path, engine) as writer:
        for sequence, (name, prompt, config, rounds) in enumerate(decoded):
            writer.run(name, prompt, config, sequence)
            for this in rounds:
                writer.round(this, with_table=True)
    return path


def test_round_trip(trace, decoded):
    header, runs = read_trace(trace)
    assert header["schema"] == SCHEMA == 1
    assert (header["backend"], header["dtype"], header["route"], header["device"]) == (
        "numpy",
        "f32",
        "device",
        "cpu",
    )
    assert {"ddtree", "numpy", "tokenizers", "python"} <= set(header["packages"])
    kinds = ("target", "drafter")
    want = {kind: hashlib.sha256((DEFAULT_MODEL / f"{kind}.kdtr").read_bytes()).hexdigest() for kind in kinds}
    assert header["model_sha256"] == want
    assert len(runs) == len(decoded)
    for sequence, (each, (name, prompt, config, rounds)) in enumerate(zip(runs, decoded, strict=True)):
        settings = each.settings
        assert (settings["prompt_id"], settings["prompt_ids"], settings["sequence"]) == (
            name,
            prompt,
            sequence,
        )
        assert (settings["method"], settings["budget"]) == (config.method, config.budget)
        assert settings["sampling"]["seed"] == config.sampling.seed
        assert settings["stop_token_ids"] == list(config.stop_token_ids)
        assert len(each.rounds) == len(rounds)
        for index, (record, this) in enumerate(zip(each.rounds, rounds, strict=True)):
            for key in ("token_ids", "parents", "depths", "log_weights"):
                assert_same_bits(getattr(each.tree(index), key), getattr(this.tree, key), key)
            assert (
                record["target_tokens"] == this.target_tokens.tolist()
                and record["path"] == this.path.tolist()
            )
            assert tuple(record["tokens"]) == this.tokens and record["bonus"] == this.bonus
            assert record["context_len"] == this.context_len and record["index"] == index
            assert list(record["seconds"]) == list(STAGES) and record["seconds"] == this.seconds
            assert record["finish"] == this.finish and record["num_bad_rows"] == 0
            assert ("table" in record) == (this.table is not None)
            if this.table is not None:
                assert_same_bits(np.array(record["table"]["token_ids"], np.int32), this.table[0], "table ids")
                assert_same_bits(
                    np.array(record["table"]["log_probs"], np.float32), this.table[1], "table log-probs"
                )


def test_every_line_is_strict_json(trace, decoded):
    lines = trace.read_text("utf-8").splitlines()
    assert [json.loads(line)["type"] for line in lines[:3]] == ["header", "run", "round"]
    assert len(lines) == 1 + sum(1 + len(rounds) for *_, rounds in decoded)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    for line in lines:
        json.loads(line, parse_constant=refuse)


def test_log_probs_that_are_not_finite_become_null_and_tables_are_left_out_unless_asked(
    tmp_path, engine, decoded
):
    name, prompt, config, rounds = decoded[0]
    this = next(this for this in rounds if this.table is not None)
    token_ids, log_probs = (array.copy() for array in this.table)
    log_probs[0, -1], log_probs[1, -1] = -np.inf, np.nan
    path = tmp_path / "run.jsonl"
    with write_trace(path, engine) as writer:
        writer.run(name, prompt, config, 0)
        writer.round(type(this)(**{**this.__dict__, "table": (token_ids, log_probs)}), with_table=True)
        writer.round(this)
    with_table, without = read_trace(path)[1][0].rounds
    assert [row[-1] for row in with_table["table"]["log_probs"][:2]] == [None, None]
    assert "table" not in without


def test_what_a_branch_head_said_is_read_back(tmp_path, check):
    """And a study of the trace builds the round's own tree of it, though one number in it is not finite."""
    engine = Engine(branched(), max_budget=16)
    config = DecodeConfig("tree", 16, 12, shape="branch_aware")
    rounds = run(engine, check["prompts"][0][:30], config)
    rounds[1].conditional[0, 0, 15] = -np.inf
    path = tmp_path / "run.jsonl"
    with write_trace(path, engine) as writer:
        writer.run("a", [1], config, 0)
        for this in rounds:
            writer.round(this, with_table=True)
    (only,) = read_trace(path)[1]
    assert only.settings["shape"] == "branch_aware"
    assert only.rounds[1]["table"]["conditional"][0][0][15] is None
    for seen, live, this in zip(seen_rounds(only.rounds), seen_rounds(rounds), rounds[1:], strict=True):
        assert live.conditional is this.conditional and (this.conditional is None) == (this.table is None)
        if this.table is not None:  # the last round may want one token alone
            assert_same_bits(seen.conditional, this.conditional, "from the trace")
    curves = [mean_budget_curve(each, [0, 4, 16], "branch_aware") for each in (only.rounds, rounds)]
    assert np.array_equal(curves[0].expected, curves[1].expected) and curves[0].exact.all()
    plain = run(engine, check["prompts"][0][:30], DecodeConfig("tree", 16, 12))
    with pytest.raises(UsageError, match="a branch head's scores, and there are none"):
        mean_budget_curve(plain, [4], "branch_aware")


HEADER = json.dumps({"type": "header", "schema": 1})
RUN, ROUND = json.dumps({"type": "run"}), json.dumps({"type": "round", "tree": {}})
BROKEN = {
    "empty": ("", "found an empty file"),
    "not JSON": (f"{HEADER}\n{RUN}\n{{oops\n", "line 3: not JSON"),
    "cut short": (f"{HEADER}\n{RUN}\n{ROUND[:-3]}", "line 3: not JSON"),
    "a list": (f"{HEADER}\n[1]\n", "line 2: expected a JSON object"),
    "a blank line": (f"{HEADER}\n\n{RUN}\n", "line 2: not JSON"),
    "no header": (f"{RUN}\n", "line 1: expected a trace of schema 1, found 'run'"),
    "another schema": (HEADER.replace("1", "2"), "line 1: expected a trace of schema 1"),
    "two headers": (f"{HEADER}\n{HEADER}\n", "line 2: .*found 'header'"),
    "a round first": (f"{HEADER}\n{ROUND}\n", "line 2: .*found 'round'"),
    "another kind": (f'{HEADER}\n{RUN}\n{{"type": "note"}}\n', "line 3: .*found 'note'"),
    "no kind": (f"{HEADER}\n{{}}\n", "line 2: .*found None"),
    "some other JSON": ('{"a": 1}\n', "line 1: expected a trace of schema 1, found None"),
    "nested too deep": (f"{HEADER}\n{'[' * 200_000}\n", "line 2: not JSON"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_trace_is_named_by_its_first_wrong_line(tmp_path, case):
    text, says = BROKEN[case]
    path = tmp_path / "broken.jsonl"
    path.write_text(text, "utf-8")
    with pytest.raises(UsageError, match=says) as caught:
        read_trace(path)
    assert_one_line(caught.value)
    assert "broken.jsonl" in str(caught.value)


def test_what_is_no_text_or_not_there(tmp_path):
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00KDTR")
    for path in (binary, tmp_path / "absent.jsonl", tmp_path):
        with pytest.raises(UsageError, match="cannot read the trace") as caught:
            read_trace(path)
        assert_one_line(caught.value)


def test_a_round_whose_tree_is_no_tree(tmp_path):
    path = tmp_path / "bad_tree.jsonl"
    path.write_text(f"{HEADER}\n{RUN}\n{ROUND}\n", "utf-8")
    with pytest.raises(DdtreeError, match="token_ids"):
        read_trace(path)[1][0].tree(0)


def test_a_failed_write_leaves_the_old_file_and_nothing_beside_it(trace, engine):
    before = trace.read_bytes()
    with pytest.raises(RuntimeError, match="on purpose"), write_trace(trace, engine) as writer:
        writer.run("p", [1], TREE, 0)
        raise RuntimeError("on purpose")
    assert trace.read_bytes() == before
    assert [path.name for path in trace.parent.iterdir()] == [trace.name]


def test_the_old_file_stands_until_the_new_one_is_complete(trace, engine):
    before = trace.read_bytes()
    with write_trace(trace, engine) as writer:
        writer.run("p", [1], TREE, 0)
        writer.file.flush()
        assert trace.read_bytes() == before
    assert trace.read_bytes() != before
    assert [path.name for path in trace.parent.iterdir()] == [trace.name]


def test_a_place_that_cannot_be_written(tmp_path, engine):
    with (
        pytest.raises(UsageError, match="cannot write the trace") as caught,
        write_trace(tmp_path / "no such folder" / "run.jsonl", engine),
    ):
        raise AssertionError("the block must not be entered")
    assert_one_line(caught.value)
