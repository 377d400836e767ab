"""The branch head in an engine: its tables, what it says of a round's candidates, and what neither changes."""

from dataclasses import replace

import numpy as np
import pytest
from compare_arrays import assert_same_bits
from engine.micro import BRANCHED, TARGET, write_micro_bundle
from support import assert_one_line, branched, run, tokens_of, trained

from ddtree.bundle import open_bundle
from ddtree.config import DecodeConfig, SamplingConfig
from ddtree.engine import Engine
from ddtree.errors import UsageError
from ddtree.quantised import Fp8Matrix
from ddtree.reference.branch_scores import combine
from ddtree.reference.topk import log_sum_exp

PROMPT = "class Stack:\n    def __init__(self):\n"


def open_engine(**options):
    return Engine(branched(), **{"max_budget": 64, "max_context": 120} | options)


@pytest.fixture(scope="module")
def engine():
    """The trained model with a random branch head, its prompt committed."""
    engine = open_engine()
    engine.reset(drafting=True)
    engine.prefill(np.array(engine.bundle.encode(PROMPT), np.int32))
    return engine


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("max_budget", [5, 64])
def test_tables_are_sums_in_f64_whatever_the_engine(dtype, max_budget):
    """Chunks of rows depend on the largest budget, and no bit on them."""
    engine, file = open_engine(dtype=dtype, max_budget=max_budget, prefill_chunk=3), branched().drafter
    branch, weights = engine.drafter.weights.branch, engine.model.weights
    for table, rows, name in (
        (branch.parent_table, weights.embedding, "parent"),
        (branch.child_table, weights.head, "child"),
    ):
        scores = rows.astype(np.float64) @ file[f"branch.{name}.weight"].astype(np.float64).T
        assert table.dtype == np.float32 and table.shape == (engine.config.vocab_size, 8)
        assert np.abs(table - scores).max() <= np.spacing(np.abs(scores).max().astype(np.float32)) / 2
    other = open_engine().drafter.weights.branch
    for name in ("parent_table", "child_table"):
        assert_same_bits(getattr(branch, name), getattr(other, name), name)


def test_conditionals_are_the_formulas(engine):
    """From the file's own maps and the hidden states behind the logits, in f64."""
    root = 17
    token_ids, log_probs, conditional = engine.draft_branches(root)
    hidden = engine.drafter.normed[1:].astype(np.float64)
    parent, gate, child = (
        branched().drafter[f"branch.{name}.weight"].astype(np.float64) for name in ("parent", "gate", "child")
    )
    embedding, head = (
        table.astype(np.float64) for table in (engine.model.weights.embedding, engine.model.weights.head)
    )
    assert token_ids.shape == log_probs.shape == (15, 16) and conditional.shape == (15, 16, 16)
    assert (conditional[0, 1:] == -np.inf).all()
    for depth in range(15):
        for row, above in enumerate([root] if depth == 0 else token_ids[depth - 1]):
            left = combine(parent @ embedding[above], gate @ hidden[depth])
            scored = log_probs[depth] + head[token_ids[depth]] @ child.T @ left
            want = scored - log_sum_exp(scored) + log_sum_exp(log_probs[depth].astype(np.float64))
            assert conditional[depth, row] == pytest.approx(want, abs=2e-5)
    assert not np.allclose(conditional[1, 0], conditional[1, 1], atol=0.1)


@pytest.mark.parametrize("k", [0, 5, 16, 64])
def test_wider_tables_hold_the_same(engine, k):
    token_ids, log_probs, conditional = engine.draft_branches(17, k)
    assert token_ids.shape == (15, max(k, 16))
    assert_same_bits(conditional, engine.draft_branches(17)[2], "conditional")
    for mine, plain in zip((token_ids, log_probs), engine.draft(17, max(k, 16)), strict=True):
        assert_same_bits(mine, plain, "the table is the plain drafter's")


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(0.8, 40, 0.9, 5)])
def test_other_shapes_are_the_plain_drafters_in_every_bit(sampling):
    plain = Engine(trained(), max_budget=64, max_context=120)
    prompt = plain.bundle.encode(PROMPT)
    for method, shape in (("tree", "best_first"), ("tree", "beam"), ("chain", "best_first")):
        config = DecodeConfig(method, 24, 24, sampling, shape=shape)
        mine, theirs = run(open_engine(), prompt, config), run(plain, prompt, config)
        assert tokens_of(mine) == tokens_of(theirs) and len(mine) > 2
        for one, other in zip(mine, theirs, strict=True):
            assert one.tree.to_json() == other.tree.to_json() and one.conditional is None
            for left, right in zip(one.table or (), other.table or (), strict=True):
                assert_same_bits(left, right, "table")


def test_a_quantised_head_is_refused_in_one_line():
    engine = open_engine()
    weights = engine.model.weights
    stored = Fp8Matrix(np.zeros(weights.head.shape, np.uint8), np.ones((16, 2), np.float32))
    with pytest.raises(UsageError, match="lm_head, which is fp8") as caught:
        engine.drafter.fill_branch_tables(weights.embedding, stored)
    assert_one_line(caught.value)


def test_kernels_limits_are_told(tmp_path):
    from ddtree.ops.plan_ops import PlanOps

    bundle = open_bundle(write_micro_bundle(tmp_path, 0, TARGET, BRANCHED))
    config = bundle.drafter_config
    PlanOps.check_sizes(bundle.config, config, 5)
    for change, said in (({"candidates": 17}, "candidates"), ({"rank": 1025}, "rank")):
        wide = replace(config, branch=replace(config.branch, **change))
        with pytest.raises(UsageError, match=f"the branch head's {said}: the backend cuda takes at most"):
            PlanOps.check_sizes(bundle.config, wide, 5)
