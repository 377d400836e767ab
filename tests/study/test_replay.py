"""Replayed rounds equal those of real decodes, one for one: trees, tokens and what they sum to."""

import json
import time
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from support import assert_one_line, run

from ddtree import rounds
from ddtree.config import DecodeConfig
from ddtree.engine import Engine
from ddtree.errors import UsageError
from ddtree.metrics import Tally
from ddtree.shapes import SHAPES
from ddtree.study_record import record
from ddtree.study_replay import Cell, count, replay, replay_rounds, totals

ONLY_REPLAYED = {"oracle"}  # wants the continuation, which no decode has
SPELLED = {"fixed": "fixed:sequoia64"}
BY_BUDGET = ("best_first", "branch_aware", "chain")
CASES = [(shape, budget) for shape in BY_BUDGET for budget in (0, 1, 16, 64)]
CASES += [(name, 24) for name in SHAPES if name not in {*BY_BUDGET} | ONLY_REPLAYED]
DECODED = [name for name in SHAPES if name not in ONLY_REPLAYED]


@pytest.fixture
def made(request, shape):
    """(engine, recordings) that the shape's trees can be built with."""
    prefix = "branch_" if shape == "branch_aware" else ""
    return [request.getfixturevalue(prefix + name) for name in ("engine", "recorded")]


def decode_as(engine, recording, config, shape, budget):
    """The rounds after the prefill of a real decode; a chain by the method of that name."""
    sampling = replace(config.sampling, temperature=recording.temperature)
    method, shape = ("chain", "best_first") if shape == "chain" else ("tree", shape)
    config = replace(config, method=method, budget=budget, sampling=sampling, shape=shape)
    return run(engine, recording.prompt_ids, config, recording.sequence)


def assert_same_rounds(mine, real, recording):
    """The same roots, trees and tokens."""
    assert [this.tokens.tolist() for this in mine] == [list(this.tokens) for this in real]
    for this, that in zip(mine, real, strict=True):
        assert len(recording.prompt_ids) + this.root == that.context_len
        assert this.tree.to_json() == that.tree.to_json()


@pytest.mark.parametrize(("shape", "budget"), CASES)
def test_replayed_rounds_are_those_of_a_real_decode(made, shape, budget):
    engine, recorded = made
    name = SPELLED.get(shape, shape)
    chosen = [recorded.recordings[place] for place in (0, 1, 3, 5)]
    assert {recording.temperature for recording in chosen} == {0.0, 0.6}
    rows = replay(chosen, [name], [budget])
    for recording, row in zip(chosen, rows, strict=True):
        real = decode_as(engine, recording, recorded.config, name, budget)
        assert_same_rounds(list(replay_rounds(recording, name, budget)), real[1:], recording)
        tally = Tally()
        tally.add(recording.prompt_ids, real)
        for key in ("rounds", "tokens", "nodes", "loop_tokens", "mean_acceptance", "nodes_per_round"):
            assert row[key] == getattr(tally, key), key
        assert row["rounds_outside_loops"] == tally.rounds_outside
        assert row["tokens_outside_loops"] == tally.tokens_outside
        assert row["mean_acceptance_outside_loops"] == tally.mean_acceptance_outside_loops
        assert row["rounds_inside_loops"] + row["rounds_outside_loops"] == row["rounds"]
        assert row["trace_sha256"] == recording.sha256 and row["prompt"] == recording.prompt


@pytest.mark.parametrize("shape", DECODED)
@pytest.mark.parametrize("depth", [0, 1, 4])
def test_a_depth_bounds_the_trees(made, monkeypatch, shape, depth):
    engine, recorded = made
    recording, honest, name = recorded.recordings[4], rounds.max_depth_of, SPELLED.get(shape, shape)
    monkeypatch.setattr(rounds, "max_depth_of", lambda *args: min(depth, honest(*args)))
    real = decode_as(engine, recording, recorded.config, name, 16)
    mine = list(replay_rounds(recording, name, 16, depth))
    assert_same_rounds(mine, real[1:], recording)
    assert max(this.tree.max_depth for this in mine) == depth


@pytest.mark.parametrize("end", ["stop", "context", "length"])
def test_a_decode_ends_in_replay_as_it_does(branch_engine, branch_recorded, tmp_path, end):
    """At a stop token inside an accepted path, where the context is full, and after one token."""
    engine, recorded = branch_engine, branch_recorded
    config, prompts = recorded.config, recorded.prompts[:1]
    greedy = recorded.recordings[0]
    if end == "stop":
        long = next(this for this in replay_rounds(greedy, "best_first", 16) if len(this.tokens) > 2)
        config = replace(config, stop_token_ids=(int(long.tokens[1]),))
    elif end == "context":
        engine = Engine(engine.bundle, max_budget=64, max_context=len(greedy.prompt_ids) + 11)
    else:
        config = replace(config, max_new_tokens=1)
    (recording,) = record(engine, prompts, tmp_path, config, k=16)
    assert recording.finish == end and len(recording.tokens) < 24
    for shape, budget in product(DECODED, (1, 16)):
        name = SPELLED.get(shape, shape)
        real = decode_as(engine, recording, config, name, budget)
        mine = list(replay_rounds(recording, name, budget))
        assert_same_rounds(mine, real[1:], recording)
        assert real[-1].finish == end
        (row,) = replay([recording], [name], [budget])
        assert row["rounds"] == len(mine) and (row["mean_acceptance"] is None) == (end == "length")


def test_the_oracle_accepts_all_of_its_nodes_and_the_most(branch_recorded):
    shapes = [SPELLED.get(name, name) for name in SHAPES]
    for recording in branch_recorded.recordings:
        for this in replay_rounds(recording, "oracle", 64):
            assert len(this.tokens) == this.tree.num_nodes + 1
        rows = {row["shape"]: row for row in replay([recording], shapes, [64])}
        assert min(row["rounds"] for row in rows.values()) == rows["oracle"]["rounds"]


def test_context_reaches_the_shape(recorded):
    recording = recorded.recordings[0]
    (row,) = replay([recording], ["fixed"], [8], context={"template": [[0], [1]]})
    assert row["nodes_per_round"] <= 2 and row["nodes"] > row["rounds"]
    with pytest.raises(UsageError, match="needs template"):
        replay([recording], ["fixed"], [8])


def test_rows_come_in_order_and_are_plain_numbers(recorded):
    heard = []
    rows = replay(
        recorded.recordings,
        ["chain", "best_first"],
        [4, 8],
        [2, 15],
        progress=lambda *step: heard.append(step),
    )
    assert heard == [(0, 48)] + [(1, 48)] * 48
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    settings = [(shape, b, d) for shape in ("chain", "best_first") for b in (4, 8) for d in (2, 15)]
    assert [(row["shape"], row["budget"], row["depth"]) for row in rows] == settings * 6
    sums = totals(rows)
    assert len(sums) == 16 and all(each["prompts"] == 3 for each in sums)
    mine = [row for row in rows if (row["shape"], row["budget"], row["depth"]) == settings[0]][:3]
    assert sums[0]["rounds"] == sum(row["rounds"] for row in mine)
    assert sums[0]["mean_acceptance"] == 3 * 23 / sums[0]["rounds"]


def test_what_cannot_be_replayed_is_refused(recorded):
    recordings = recorded.recordings
    for arguments, match in (
        ((recordings, ["best_first"], [65]), "holds the 64 likeliest tokens .* record with --k 65"),
        ((recordings, ["best_first"], [4], [16]), "proposes at most 15 tokens, found 16"),
        ((recordings, ["best_first"], [-1]), "negative"),
        ((recordings, ["nothing"], [4]), "shape: expected one of"),
        (([], ["best_first"], [4]), "at least one recording"),
        (
            (recordings, ["chain", "branch_aware"], [4]),
            "branch_aware needs the scores of a branch head, and .* none",
        ),
    ):
        with pytest.raises(UsageError, match=match) as caught:
            replay(*arguments)
        assert_one_line(caught.value)


def test_a_table_of_the_whole_vocabulary_decides_every_budget(recorded):
    recording = recorded.recordings[0]
    small = replace(recording, header=recording.header | {"vocab_size": 64})
    assert small.most_budget is None and recording.most_budget == 64
    assert next(replay_rounds(small, "best_first", 100)).tree.num_nodes == 100


def test_two_thousand_trees_of_64_nodes_a_second(recorded):
    """On one core; the best of a few, for the machine is shared. Measured: 70,000 and more."""
    cells = [Cell(recording, "best_first", 64, 15) for recording in recorded.recordings for _ in range(20)]
    speeds = []
    for _ in range(3):
        start = time.perf_counter()
        trees = sum(rounds for rounds, *_ in count(cells))
        speeds.append(trees / (time.perf_counter() - start))
    assert max(speeds) > 2000
    nodes = [this.tree.num_nodes for this in replay_rounds(recorded.recordings[0], "best_first", 64)]
    assert np.mean(nodes) > 60 and DecodeConfig().shape == "best_first"
