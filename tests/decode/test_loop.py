"""The loop: how many tokens come out, where it stops, and what is committed then."""

import numpy as np
import pytest
from compare_arrays import assert_same_bits
from support import committed_rows, run, tiny, tokens_of, trained, with_continuation

from ddtree.config import DecodeConfig
from ddtree.engine import Engine
from ddtree.metrics import Tally

METHODS = {"ar": DecodeConfig("ar"), "chain": DecodeConfig("chain", 15), "tree": DecodeConfig("tree", 16)}
PROMPT_LENGTH = 40


def config(method, max_new_tokens, budget=None, **more):
    budget = METHODS[method].budget if budget is None else budget
    return DecodeConfig(method, budget, max_new_tokens, **more)


@pytest.fixture(scope="module")
def prompt(check):
    return check["prompts"][3][:PROMPT_LENGTH].tolist()


@pytest.fixture(scope="module")
def reference(engine, prompt):
    """64 greedy tokens after the prompt, by autoregressive decoding."""
    return tokens_of(run(engine, prompt, config("ar", 64)))


@pytest.fixture(scope="module")
def mid_path(engine, prompt):
    """(token, place): a token that a tree round takes inside its accepted path, and that occurs nowhere before."""
    rounds = run(engine, prompt, config("tree", 64))
    place = 0
    for this in rounds:
        for at, token in enumerate(this.tokens):
            if 0 < at < len(this.tokens) - 2 and token not in tokens_of(rounds)[: place + at]:
                return token, place + at
        place += len(this.tokens)
    raise AssertionError("no such token: choose another prompt")


# --- how many tokens ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_exactly_the_tokens_wanted(engine, prompt, reference, method):
    for wanted in range(1, 21):
        rounds = run(engine, prompt, config(method, wanted))
        assert tokens_of(rounds) == reference[:wanted], wanted
        assert [this.finish for this in rounds] == [None] * (len(rounds) - 1) + ["length"]
        assert engine.context_len == PROMPT_LENGTH + wanted - 1
        left = wanted
        for this in rounds:
            assert this.tree.max_depth <= max(left - 1, 0)  # nothing is drafted that could not be returned
            left -= len(this.tokens)


@pytest.mark.parametrize("budget", [0, 1, 2, 4, 15, 16, 40, 64])
@pytest.mark.parametrize("method", ["chain", "tree"])
def test_a_perfect_drafter_takes_budget_plus_one_a_round(tiny_engine, monkeypatch, method, budget):
    """With the right token on top of every depth, a round takes min(budget, 15) nodes and the bonus."""
    prompt = [3, 1, 4, 1, 5]
    want = tokens_of(run(tiny_engine, prompt, config("ar", 70)))
    vocab = tiny_engine.config.vocab_size

    def perfect(root_token, k):
        at = tiny_engine.context_len - len(prompt) + 1
        assert want[at - 1] == root_token
        token_ids, log_probs = with_continuation(want[at : at + 15], vocab, k=k)
        log_probs[:, 1:] -= 20  # the spine before any sibling
        return token_ids, log_probs

    monkeypatch.setattr(tiny_engine, "draft", perfect)
    rounds = run(tiny_engine, prompt, config(method, 70, budget))
    assert tokens_of(rounds) == want
    step = min(budget, 15) + 1
    assert [len(this.tokens) for this in rounds[1:-1]] == [step] * (len(rounds) - 2)
    assert len(rounds) - 1 == -(-69 // step)


@pytest.mark.parametrize("rank", [1, 3, 5])
def test_right_tokens_off_the_spine_are_found_by_a_tree_alone(tiny_engine, monkeypatch, rank):
    """The right token at a low rank: a chain never takes one, a tree's first levels do; both stay lossless."""
    prompt, vocab = [2, 7, 1, 8], tiny_engine.config.vocab_size
    want = tokens_of(run(tiny_engine, prompt, config("ar", 40)))

    def ranked(root_token, k):
        at = tiny_engine.context_len - len(prompt) + 1
        return with_continuation(want[at : at + 15], vocab, rank=min(rank, k - 1), k=k)

    monkeypatch.setattr(tiny_engine, "draft", ranked)
    chain, tree = (run(tiny_engine, prompt, config(method, 40, 64)) for method in ("chain", "tree"))
    assert tokens_of(chain) == tokens_of(tree) == want
    assert len(chain) == 40 and len(tree) < 30
    moved = [this.path for this in tree if (np.diff(this.path) > 1).any()]
    assert moved  # rows really had to be compacted


def test_a_drafter_that_is_always_wrong_costs_no_token(tiny_engine, monkeypatch):
    prompt, vocab = [9, 9, 9], tiny_engine.config.vocab_size
    want = tokens_of(run(tiny_engine, prompt, config("ar", 12)))

    def wrong(root_token, k):
        at = tiny_engine.context_len - len(prompt) + 1
        token_ids, log_probs = with_continuation([*want, 0][at : at + 1] * 15, vocab, k=k + 1)
        return np.ascontiguousarray(token_ids[:, 1:]), np.ascontiguousarray(log_probs[:, 1:])

    monkeypatch.setattr(tiny_engine, "draft", wrong)
    rounds = run(tiny_engine, prompt, config("tree", 12, 32))
    assert tokens_of(rounds) == want and len(rounds) == 12


def test_a_budget_beyond_the_vocabulary():
    """k is cut to the vocabulary: 512 candidates for 700 nodes."""
    engine = Engine(tiny("dsv3"), max_budget=700, max_context=60)
    prompt = [5, 6, 7]
    want = tokens_of(run(engine, prompt, config("ar", 6)))
    rounds = run(engine, prompt, config("tree", 6, 700))
    assert tokens_of(rounds) == want
    assert rounds[1].table[0].shape == (15, 512) and rounds[1].tree.num_nodes == 700


# --- where it stops -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["chain", "tree"])
def test_a_stop_token_inside_the_accepted_path_cuts_there(engine, prompt, reference, mid_path, method):
    """Tokens, cache and counts are those of autoregressive decoding with the same stop."""
    stop, place = mid_path
    assert reference[place] == stop
    want = run(engine, prompt, config("ar", 64, stop_token_ids=(stop,)))
    want_rows = committed_rows(engine)
    rounds = run(engine, prompt, config(method, 64, stop_token_ids=(1999, stop)))
    assert tokens_of(rounds) == tokens_of(want) == reference[: place + 1]
    assert rounds[-1].finish == want[-1].finish == "stop"
    assert engine.context_len == PROMPT_LENGTH + place
    for mine, theirs in zip(committed_rows(engine), want_rows, strict=True):
        assert_same_bits(mine, theirs, "committed rows")
    tally = Tally()
    tally.add(prompt, rounds)
    assert tally.tokens == place + 1 and sum(tally.lengths) == place
    if method == "tree":
        last = rounds[-1]
        assert len(last.path) > len(last.tokens) >= 2  # more was right, and it was cut


@pytest.mark.parametrize("method", METHODS)
def test_a_stop_at_the_first_token(engine, prompt, reference, method):
    rounds = run(engine, prompt, config(method, 64, stop_token_ids=(reference[0],)))
    assert tokens_of(rounds) == reference[:1] and [this.finish for this in rounds] == ["stop"]
    assert engine.context_len == PROMPT_LENGTH


@pytest.mark.parametrize("method", METHODS)
def test_stop_and_length_in_one_round(engine, prompt, reference, mid_path, method):
    """The cap hides no stop before it or at it, and a stop past it is not seen."""
    stop, place = mid_path
    for wanted, finish in ((place, "length"), (place + 1, "stop"), (place + 2, "stop"), (place + 3, "stop")):
        rounds = run(engine, prompt, config(method, wanted, stop_token_ids=(stop,)))
        assert tokens_of(rounds) == reference[: min(wanted, place + 1)]
        assert rounds[-1].finish == finish


@pytest.mark.parametrize("method", METHODS)
def test_a_stop_token_as_bonus_or_root_of_the_prompt(engine, prompt, reference, method):
    """A stop that ends a round as its bonus stops too; one that stands in the prompt does nothing."""
    rounds = run(engine, prompt, config("tree", 64))
    ends = np.cumsum([len(this.tokens) for this in rounds])[1:-1]  # after each round, the prefill left out
    place = next(int(end) - 1 for end in ends if reference[end - 1] not in reference[: end - 1] + prompt)
    got = run(engine, prompt, config(method, 64, stop_token_ids=(reference[place],)))
    assert tokens_of(got) == reference[: place + 1] and got[-1].finish == "stop"
    absent = next(token for token in prompt if token not in reference)
    got = run(engine, prompt, config(method, 64, stop_token_ids=(absent,)))
    assert tokens_of(got) == reference and got[-1].finish == "length"


@pytest.mark.parametrize("room", [0, 1, 2, 9])
@pytest.mark.parametrize("method", METHODS)
def test_a_full_context_ends_the_text(prompt, reference, method, room):
    small = Engine(trained(), max_budget=16, max_context=PROMPT_LENGTH + room)
    rounds = run(small, prompt, config(method, 64))
    assert tokens_of(rounds) == reference[: room + 1]
    assert rounds[-1].finish == "context" and small.context_len == PROMPT_LENGTH + room
    assert all(this.context_len + this.tree.max_depth < small.max_context for this in rounds)
    assert run(small, prompt, config(method, room + 1))[-1].finish == "length"
    stopped = run(small, prompt, config(method, 64, stop_token_ids=(reference[room],)))
    assert stopped[-1].finish == "stop"
