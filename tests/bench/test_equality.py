"""A tree that holds the autoregressive tokens gives their tokens, logits and cache rows, bit for bit.

In the simulator tests/engine/test_device_rounds.py asks the same.
"""

import numpy as np
import pytest
from engine.micro import write_micro_bundle
from support import tiny, trained

from ddtree import bench_equality
from ddtree.bench_equality import scattered_tree, tree_equals_autoregressive
from ddtree.bundle import open_bundle
from ddtree.engine import Engine

PROMPT = list(range(5, 77))  # crosses a chunk of the prefill
BUDGETS = (1, 2, 3, 15, 16, 33, 64, 128, 512)


def require_equal(records):
    assert [record for record in records if not record["equal"]] == []


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("budget", [1, 2, 14, 15, 16, 63, 200])
def test_a_scattered_tree_holds_the_path_and_none_other_goes_on(budget, seed):
    tokens = [7, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 9][: min(budget, 15) + 2]
    tree = scattered_tree(tokens, budget, 15, 64, np.random.default_rng(seed))
    assert tree.num_nodes == budget and tree.max_depth <= 15
    row, walked = 0, []
    for token in tokens[1:]:
        (*found,) = (child for child in tree.children(row) if tree.token_ids[child] == token)
        if not found:
            break
        (row,) = found
        walked.append(token)
    assert walked == tokens[1:-1]


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_on_the_host(dtype):
    engine = Engine(trained(), dtype=dtype, max_budget=64, max_context=200)
    records = tree_equals_autoregressive(engine, PROMPT, (1, 2, 16, 63))
    require_equal(records)
    assert [record["accepted"] for record in records] == [2, 3, 16, 16]
    rows = records[3]["path_rows"]
    assert rows != list(range(16)) and rows == sorted(rows), (
        "the path is scattered, so that compaction moves it"
    )


def test_another_model_on_the_host():
    engine = Engine(tiny("dsv3"), max_budget=64, max_context=200)
    require_equal(tree_equals_autoregressive(engine, PROMPT, (1, 7, 40)))


@pytest.mark.parametrize("broken", ["logits", "cache"])
def test_a_bit_that_differs_is_found(broken, monkeypatch):
    engine = Engine(tiny("dsv3"), max_budget=16, max_context=200)

    def changed(engine, *arguments, name={"logits": "round_logits", "cache": "committed_cache"}[broken]):
        result = original[name](engine, *arguments)
        if engine.cache.context_len and engine.decodes_started > 1:
            array = result if broken == "logits" else result[1]
            array.reshape(-1).view(np.uint32)[0] ^= 1
        return result

    original = {name: getattr(bench_equality, name) for name in ("round_logits", "committed_cache")}
    monkeypatch.setattr(
        bench_equality, f"{'round_' if broken == 'logits' else 'committed_'}{broken}", changed
    )
    (record,) = tree_equals_autoregressive(engine, PROMPT, (9,))
    assert not record["equal"] and not record[f"{broken}_equal"] and record["tokens_equal"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("graphs", [True, False])
def test_on_the_gpu(dtype, graphs):
    engine = Engine(trained(), backend="cuda", dtype=dtype, max_budget=512, max_context=300, graphs=graphs)
    for start in (0, 100):
        prompt = [start + token for token in PROMPT]
        require_equal(tree_equals_autoregressive(engine, prompt, BUDGETS if graphs else (1, 33, 512)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_the_micro_model_on_the_gpu(dtype, tmp_path):
    bundle = open_bundle(write_micro_bundle(tmp_path))
    engine = Engine(bundle, backend="cuda", dtype=dtype, max_budget=512, max_context=40)
    require_equal(tree_equals_autoregressive(engine, [5, 17, 40], (1, 2, 3, 16, 64, 512)))
