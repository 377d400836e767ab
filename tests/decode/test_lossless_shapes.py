"""Every shape that a table is enough for gives the tokens of autoregressive decoding, greedy and sampled."""

import pytest
from decode.lossless import PROMPT_LENGTH, SAMPLINGS
from support import branched, run, tokens_of

from ddtree.config import DecodeConfig
from ddtree.engine import Engine
from ddtree.errors import UsageError
from ddtree.shapes import SHAPES

NUM_TOKENS = 24
NAMES = (
    "beam",
    "beam:2",
    "best_first",
    "chain",
    "cost_aware",
    "fixed:medusa64",
    "fixed:sequoia64",
    "spine_first",
)


BRANCH_AWARE = "branch_aware"


@pytest.fixture(scope="module")
def branch_engine():
    """The trained model with a random branch head, for trees of up to 512 nodes."""
    return Engine(branched(), max_budget=512)


def test_no_shape_is_forgotten():
    assert {name.split(":")[0] for name in NAMES} | {BRANCH_AWARE} == set(SHAPES) - {"oracle"}


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("budget", [1, 7, 32])
@pytest.mark.parametrize("name", NAMES)
def test_same_tokens_as_autoregressive(engine, autoregressive, check, name, budget, sampling):
    config = DecodeConfig("tree", budget, NUM_TOKENS, SAMPLINGS[sampling], shape=name)
    accepted = 0
    for prompt in range(2):
        rounds = run(engine, check["prompts"][prompt][:PROMPT_LENGTH], config, sequence=prompt)
        assert tokens_of(rounds) == autoregressive(prompt, sampling, NUM_TOKENS), f"prompt {prompt}"
        assert all(this.tree.num_nodes <= budget for this in rounds)
        accepted += sum(len(this.path) - 1 for this in rounds)
    assert accepted > 0  # drafts were really taken


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("budget", [0, 1, 16, 64, 512])
def test_branch_aware_trees_give_the_same_tokens(branch_engine, autoregressive, check, budget, sampling):
    config = DecodeConfig("tree", budget, NUM_TOKENS, SAMPLINGS[sampling], shape=BRANCH_AWARE)
    plain = DecodeConfig("tree", budget, NUM_TOKENS, SAMPLINGS[sampling])
    accepted, unlike = 0, 0
    for prompt in range(2):
        tokens = check["prompts"][prompt][:PROMPT_LENGTH]
        rounds = run(branch_engine, tokens, config, sequence=prompt)
        assert tokens_of(rounds) == autoregressive(prompt, sampling, NUM_TOKENS), f"prompt {prompt}"
        assert all(this.tree.validate().num_nodes <= budget for this in rounds)
        accepted += sum(len(this.path) - 1 for this in rounds)
        best_first = run(branch_engine, tokens, plain, sequence=prompt)[1].tree
        unlike += rounds[1].tree.to_json() != best_first.to_json()
    assert (accepted > 0) == (budget > 0) and (unlike > 0) == (budget > 0)


def test_a_drafter_without_a_branch_head_is_refused_before_a_round(engine, check):
    config = DecodeConfig("tree", 4, 8, shape=BRANCH_AWARE)
    with pytest.raises(UsageError, match="branch_aware needs a drafter with a branch head"):
        run(engine, check["prompts"][0], config)
    for method in ("ar", "chain"):
        config = DecodeConfig(method, 4, 2, shape=BRANCH_AWARE)
        assert len(tokens_of(run(engine, check["prompts"][0], config))) == 2, "no tree is built"


@pytest.mark.parametrize(
    ("name", "what"),
    [("oracle", "needs continuation"), ("fixed", "needs template"), ("star", "expected one")],
)
def test_what_a_table_is_not_enough_for_is_refused_before_a_round(engine, check, name, what):
    with pytest.raises(UsageError, match=what):
        run(engine, check["prompts"][0], DecodeConfig("tree", 4, 8, shape=name))
