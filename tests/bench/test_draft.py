"""`bench draft`: a drafter without its target computes what an engine's does, and its bytes are those of its arrays."""

import numpy as np
import pytest
from bench.small import SMALL_DRAFTER, write_small_config
from support import assert_one_line

from ddtree.bench_draft import CHUNK, RandomDrafter, format_draft_table, run_draft_bench
from ddtree.bench_random import open_random
from ddtree.engine import Engine
from ddtree.errors import UsageError
from ddtree.ops import get_ops

CONTEXT = CHUNK + 9


@pytest.fixture
def bundle(tmp_path):
    return open_random(str(write_small_config(tmp_path)))


@pytest.fixture
def made(bundle):
    return RandomDrafter(bundle, 2 * CHUNK, get_ops("numpy"))


def test_it_drafts_as_an_engine_does(bundle, made):
    engine = Engine(bundle, max_budget=CHUNK - 1, max_context=2 * CHUNK)
    weights = engine.model.weights
    made.embedding, made.head = weights.embedding, weights.head
    made.fill(CONTEXT)
    for start in range(0, CONTEXT, CHUNK):
        engine.drafter.extend(made.features, start)
    want = engine.drafter.draft(made.block, CONTEXT, weights.embedding, weights.head).copy()
    assert np.array_equal(made.draft(CONTEXT), want) and np.isfinite(want).all()
    made.extend(9, CHUNK - 20)  # other features for rows that the block sees
    assert not np.array_equal(made.draft(CONTEXT), want)


def test_bytes_are_counted(made):
    c = SMALL_DRAFTER
    hidden, keys = c["hidden_size"], c["num_key_value_heads"] * c["head_dim"]
    query = c["num_attention_heads"] * c["head_dim"]
    layer = 2 * hidden * query + 2 * hidden * keys + 3 * hidden * c["intermediate_size"]
    head = c["vocab_size"] * hidden
    assert made.draft_bytes(100) == 4 * (layer + head + 2 * 100 * keys)
    assert made.extend_bytes() == 4 * (2 * hidden * hidden + 2 * hidden * keys)


def test_no_drafter_is_said(tmp_path):
    path = write_small_config(tmp_path)
    path.with_name("small-drafter.json").unlink()
    with pytest.raises(UsageError, match=r"no small-drafter\.json") as caught:
        RandomDrafter(open_random(str(path)), CHUNK, get_ops("numpy"))
    assert_one_line(caught.value)


@pytest.mark.gpu
def test_the_bench_runs(bundle):
    document = run_draft_bench(bundle, (70, 5), "f32")
    found = [(one["context_len"], one["what"], one["rows"]) for one in document["times"]]
    assert found == [(n, *work) for n in (5, 70) for work in (("draft", 6), ("extend", 1), ("extend", 6))]
    assert all(one["us"] > 0 for one in document["times"])
    assert "small: 1 layers, block 6" in format_draft_table(document)
