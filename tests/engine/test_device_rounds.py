"""Rounds on the device: tree == autoregressive in tokens and logits, and nothing of one decode is left for the next.

On a GPU with the shipped model, in the simulator with one of a single layer.
"""

import functools

import numpy as np
import pytest
from engine.micro import write_nano_bundle
from support import trained

from ddtree.bench_equality import round_logits, tree_equals_autoregressive
from ddtree.bundle import open_bundle
from ddtree.config import DecodeConfig, SamplingConfig
from ddtree.decode import decode
from ddtree.engine import Engine
from ddtree.ops import get_ops
from ddtree.prompts import load_prompts
from ddtree.reference.gate import GateRule
from ddtree.rounds import HOST_PARTS

SAMPLINGS = {"greedy": SamplingConfig(), "sampled": SamplingConfig(0.8, top_k=40, top_p=0.95, seed=5)}
DTYPES = ("f32", "bf16")
BUDGETS = (1, 2, 16, 33, 64, 128, 512)
EDGES = (62, 63, 64, 65, 66, 126, 127, 128, 129, 130)  # of the positions of one tile of attention, and of two
MARGIN = 1e-4  # between the two greatest logits: two backends may choose otherwise below


@functools.cache
def prompt(index):
    """The token ids of a shipped prompt."""
    return tuple(trained().encode(load_prompts()[index].text))


@functools.cache
def open_engine(dtype="f32", **options):
    """A GPU engine on the shipped model, opened once for those options."""
    return Engine(trained(), backend="cuda", dtype=dtype, **{"max_budget": 512, "max_context": 400} | options)


def walk(
    engine, prompt_ids, method="tree", budget=16, count=32, sampling="greedy", sequence=0, shape="best_first"
):
    """Rounds, tokens, and the bytes of the logits behind each token by position."""
    config = DecodeConfig(method, budget, count, SAMPLINGS[sampling], shape=shape)
    rounds, tokens, logits = [], [], {}
    for this in decode(engine, list(prompt_ids), config, sequence):
        found = round_logits(engine, this)
        for row in this.path[: len(this.tokens)]:
            logits[this.context_len + int(this.tree.depths[row])] = found[row].tobytes()
        rounds.append(this)
        tokens += this.tokens
    assert len(logits) == len(tokens)
    return rounds, tokens, logits


def same(left, right):
    """Tokens and the bits of all logits are equal."""
    assert left[1] == right[1]
    assert [position for position in left[2] if left[2][position] != right[2].get(position)] == []


def trees_of(rounds):
    return [(this.tree.to_json(), this.path.tolist(), this.target_tokens.tolist()) for this in rounds]


# --- on a GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tree_is_autoregressive_bit_for_bit(dtype, sampling):
    engine, accepted = open_engine(dtype), 0
    for index in (0, 9, 33):
        want = walk(engine, prompt(index), "ar", 0, 48, sampling, index)
        for budget in BUDGETS:
            got = walk(engine, prompt(index), "tree", budget, 48, sampling, index)
            same(got, want)
            accepted += sum(len(this.path) - 1 for this in got[0])
        same(walk(engine, prompt(index), "chain", 15, 48, sampling, index), want)
    assert accepted > 0, "drafts were really taken"


@pytest.mark.gpu
def test_greedy_tokens_are_numpys(record_property):
    host = Engine(trained(), max_budget=16)
    for index in range(0, 64, 11):
        want = walk(host, prompt(index), "ar", 0, 48)
        got = walk(open_engine(), prompt(index), "tree", 16, 48)
        if got[1] == want[1]:
            continue
        first = next(i for i, (a, b) in enumerate(zip(got[1], want[1], strict=True)) if a != b)
        logits = np.frombuffer(want[2][len(prompt(index)) - 1 + first], np.float32)
        margin = float(np.diff(np.sort(logits)[-2:])[0])
        record_property(f"prompt {index}", f"token {first} differs at a margin of {margin}")
        assert margin < MARGIN, f"prompt {index}: token {first} differs at a margin of {margin}"


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_eager_rounds_are_the_graphs(dtype, sampling):
    for method, budget in (("ar", 0), ("chain", 7), ("tree", 33)):
        captured = walk(open_engine(dtype), prompt(3), method, budget, 24, sampling)
        eager = walk(open_engine(dtype, graphs=False), prompt(3), method, budget, 24, sampling)
        same(eager, captured)
        assert trees_of(eager[0]) == trees_of(captured[0])


@pytest.mark.gpu
def test_budgets_change_on_one_engine():
    engine = open_engine()
    want = walk(engine, prompt(5), "ar", 0)
    first = walk(engine, prompt(5), "tree", 64)
    for budget in (2, 16, 0, 33, 1, 512, 3):
        same(walk(engine, prompt(5), "tree", budget), want)
    again = walk(engine, prompt(5), "tree", 64)
    same(again, want)
    assert trees_of(again[0]) == trees_of(first[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", EDGES)
def test_prompts_that_end_at_the_edge_of_a_tile(dtype, length):
    tokens = [*prompt(0), *prompt(1), *prompt(2)][:length]
    want = walk(open_engine(dtype, prefill_chunk=50), tokens, "ar", 0, 8)
    same(walk(open_engine(dtype), tokens, "tree", 16, 8), want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("budget", [1, 5, 64])
def test_decodes_that_cross_tiles(dtype, budget):
    """Every position from 40 to 140 is the context of some round, and 64 and 128 lie inside of trees."""
    tokens = prompt(0)[:40]
    want = walk(open_engine(dtype, prefill_chunk=7), tokens, "ar", 0, 100)
    same(walk(open_engine(dtype), tokens, "tree", budget, 100), want)


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_shorter_prompt_after_a_longer_one(sampling):
    long, short = [*prompt(7), *prompt(8)], prompt(9)[:5]
    engine = open_engine()
    walk(engine, long, "tree", 64, 64, sampling)
    after = walk(engine, short, "tree", 64, 32, sampling, 4)
    fresh = walk(Engine(trained(), backend="cuda", max_budget=512), short, "tree", 64, 32, sampling, 4)
    same(after, fresh)
    assert trees_of(after[0]) == trees_of(fresh[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_route_host_is_eager_and_chooses_the_same(dtype):
    host = open_engine(dtype, route="host", max_budget=16)
    assert not host.runner.graphs, "a captured round cannot wait for the host"
    for method, budget in (("ar", 0), ("tree", 16)):
        device = walk(open_engine(dtype), prompt(6), method, budget, 16)
        assert walk(host, prompt(6), method, budget, 16)[1] == device[1]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "experts", "chosen", "groups", "kept"), [(65, 384, 8, 1, 1), (33, 256, 8, 8, 4)]
)
def test_gates_of_both_routes(rows, experts, chosen, groups, kept):
    require_close_gates(rows, experts, chosen, groups, kept)


@pytest.mark.gpu
def test_host_times_are_told():
    for graphs in (True, False):
        require_host_times(walk(open_engine(graphs=graphs), prompt(0), "tree", 16, 16)[0])


# --- here and there -----------------------------------------------------------------------------------------------


def require_close_gates(rows, experts, chosen, groups, kept):
    """Both routes choose the same experts, and their weights agree within 4 ulp (noaux_tc)."""
    rng = np.random.default_rng((rows, experts))
    logits, bias = rng.standard_normal((rows, experts)), 0.1 * rng.standard_normal(experts)
    rule = GateRule(chosen, groups, kept, True, 2.5, "noaux_tc")
    found = []
    for route in ("host", "device"):
        ops = get_ops("cuda", "f32", route)
        gates = ops.empty((experts, rows))
        ops.gate(ops.put_exact(logits), ops.put_exact(bias), rule, gates)
        found.append(ops.read(gates))
    host, device = found
    assert ((host != 0) == (device != 0)).all() and ((host != 0).sum(axis=0) == chosen).all()
    assert np.abs(host.view(np.int32) - device.view(np.int32)).max() <= 4


def require_host_times(rounds):
    """Every round but the prefill says what the host spent on it."""
    assert rounds[0].host_seconds is None and len(rounds) > 1
    for this in rounds[1:]:
        assert tuple(this.host_seconds) == HOST_PARTS
        assert all(seconds >= 0 for seconds in this.host_seconds.values())
        assert this.host_seconds["launch"] > 0


def test_the_host_tells_no_host_times():
    engine = Engine(trained(), max_budget=4, max_context=60)
    rounds = walk(engine, prompt(0)[:20], "tree", 4, 6)[0]
    assert {this.host_seconds for this in rounds} == {None}


# --- in the simulator ---------------------------------------------------------------------------------------------


@pytest.mark.simulator
def test_equal_bits_in_the_simulator(tmp_path):
    """A tree of the autoregressive tokens, verified at once; test_replayed_rounds has what goes stale."""
    bundle = open_bundle(write_nano_bundle(tmp_path, 1))
    engine = Engine(bundle, backend="cuda", prefill_chunk=2, max_budget=3, max_context=6)
    (record,) = tree_equals_autoregressive(engine, [5, 17], (3,), seed=2)
    assert record["equal"] and record["accepted"] == 3
    assert record["path_rows"] != [0, 1, 2], "compaction moves rows"


@pytest.mark.simulator
def test_route_host_in_the_simulator(tmp_path):
    bundle = open_bundle(write_nano_bundle(tmp_path))
    engine = Engine(bundle, backend="cuda", route="host", max_budget=1, max_context=4, prefill_chunk=1)
    assert not engine.runner.graphs
    require_close_gates(2, 8, 2, 2, 1)
