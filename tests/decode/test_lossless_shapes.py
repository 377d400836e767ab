"""Every shape that a table is enough for gives the tokens of autoregressive decoding, greedy and sampled."""

import pytest
from decode.lossless import PROMPT_LENGTH, SAMPLINGS
from support import run, tokens_of

from ddtree.config import DecodeConfig
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


def test_no_shape_is_forgotten():
    assert {name.split(":")[0] for name in NAMES} == set(SHAPES) - {"oracle"}


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


@pytest.mark.parametrize(
    ("name", "what"),
    [("oracle", "needs continuation"), ("fixed", "needs template"), ("star", "expected one")],
)
def test_what_a_table_is_not_enough_for_is_refused_before_a_round(engine, check, name, what):
    with pytest.raises(UsageError, match=what):
        run(engine, check["prompts"][0], DecodeConfig("tree", 4, 8, shape=name))
