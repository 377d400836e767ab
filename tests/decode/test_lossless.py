"""Tree and chain give the tokens of autoregressive decoding: every budget, greedy and sampled."""

import pytest
from decode.lossless import PROMPT_LENGTH, SAMPLINGS
from support import run, tokens_of

from ddtree.config import DecodeConfig, SamplingConfig

NUM_TOKENS = 32
BUDGETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 512)
# A chain is never longer than the horizon: from 15 on, chains are one and the same.
CASES = [("chain", budget) for budget in (0, 1, 2, 4, 8, 16)] + [("tree", budget) for budget in BUDGETS]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("method", "budget"), CASES)
def test_same_tokens_as_autoregressive(request, autoregressive, check, method, budget, sampling):
    engine = request.getfixturevalue("engine" if budget <= 64 else "large_engine")
    config = DecodeConfig(method, budget, NUM_TOKENS, SAMPLINGS[sampling])
    accepted = 0
    for prompt in range(4):
        rounds = run(engine, check["prompts"][prompt][:PROMPT_LENGTH], config, sequence=prompt)
        assert tokens_of(rounds) == autoregressive(prompt, sampling, NUM_TOKENS), f"prompt {prompt}"
        assert all(this.tree.num_nodes <= budget for this in rounds)
        accepted += sum(len(this.path) - 1 for this in rounds)
    assert (accepted > 0) == (budget > 0)  # drafts were really taken


def test_the_seed_and_the_sequence_decide(engine, check):
    prompt = check["prompts"][1][:PROMPT_LENGTH]

    def text(method="tree", seed=1, sequence=0, temperature=0.8):
        sampling = SamplingConfig(temperature, top_k=40, top_p=0.9, seed=seed)
        return tokens_of(run(engine, prompt, DecodeConfig(method, 8, 16, sampling), sequence))

    one = text()
    assert text() == one == text("chain") == text("ar")
    others = [text(seed=2), text(seed=1 + 2**32), text(sequence=1)]
    assert len({tuple(tokens) for tokens in [one, *others]}) == 4
    assert text(temperature=0, seed=1) == text(temperature=0, seed=2)


def test_a_prompts_tokens_do_not_depend_on_what_was_decoded_before(engine, check):
    config = DecodeConfig("tree", 16, 16, SAMPLINGS["sampled"])
    prompts = [check["prompts"][i][:40] for i in range(3)]
    forwards = [tokens_of(run(engine, prompt, config, sequence=i)) for i, prompt in enumerate(prompts)]
    backwards = [tokens_of(run(engine, prompts[i], config, sequence=i)) for i in (2, 1, 0)]
    assert forwards == backwards[::-1]


def test_a_spine_only_table_makes_a_tree_of_the_chain(engine, check, monkeypatch):
    """With the siblings' log-probs at -inf, best-first builds the chain: same trees, rounds and tokens."""
    prompt, draft = check["prompts"][4], engine.draft

    def spine_only(root_token, k):
        token_ids, log_probs = draft(root_token, k)
        log_probs[:, 1:] = -float("inf")
        return token_ids, log_probs

    chain = run(engine, prompt, DecodeConfig("chain", 15, 64))
    monkeypatch.setattr(engine, "draft", spine_only)
    tree = run(engine, prompt, DecodeConfig("tree", 64, 64))
    assert [this.tokens for this in tree] == [this.tokens for this in chain]
    assert [this.tree.to_json() for this in tree] == [this.tree.to_json() for this in chain]
    assert max(this.tree.num_nodes for this in tree) == 15
