"""Rounds: what each one says, that they come one by one, and that nothing leaks from one to the next."""

import itertools

import numpy as np
import pytest
from compare_arrays import assert_same_bits
from support import committed_rows, poison, run, tokens_of, trained

from ddtree.config import DecodeConfig, SamplingConfig
from ddtree.decode import STAGES, decode
from ddtree.engine import Engine

PROMPT_LENGTH = 40


def config(method, max_new_tokens, budget=16, **more):
    return DecodeConfig(method, budget, max_new_tokens, **more)


@pytest.fixture(scope="module")
def prompt(check):
    return check["prompts"][3][:PROMPT_LENGTH].tolist()


@pytest.fixture(scope="module")
def reference(engine, prompt):
    """48 greedy tokens after the prompt, by autoregressive decoding."""
    return tokens_of(run(engine, prompt, config("ar", 48)))


def test_rounds_come_one_by_one(engine, prompt, monkeypatch):
    """Nothing runs before the first round is asked for, and one forward a round after."""
    calls = []
    forward = engine.model.forward
    monkeypatch.setattr(engine.model, "forward", lambda *args: calls.append(1) or forward(*args))
    rounds = decode(engine, prompt, config("tree", 64))
    assert not calls and engine.context_len == 0
    first = next(rounds)
    assert len(calls) == 1 and engine.context_len == PROMPT_LENGTH and first.finish is None
    for count in range(2, 5):
        this = next(rounds)
        assert len(calls) == count and engine.context_len == this.context_len + len(this.tokens)


def test_what_a_round_says(engine, prompt):
    rounds = run(engine, prompt, config("tree", 40))
    first = rounds[0]
    assert (first.tree.num_nodes, first.path.tolist(), first.table) == (0, [0], None)
    assert first.tree.token_ids.tolist() == prompt[-1:] and first.context_len == PROMPT_LENGTH - 1
    root = first.tokens[-1]
    for this in rounds[1:]:
        assert list(this.seconds) == list(STAGES) and all(s >= 0 for s in this.seconds.values())
        this.tree.validate()
        assert this.tree.token_ids[0] == root
        assert this.target_tokens.shape == this.tree.token_ids.shape and this.num_bad_rows == 0
        assert this.path.tolist() == this.tree.path(int(this.path[-1]))
        for row, below in itertools.pairwise(this.path):
            assert this.tree.token_ids[below] == this.target_tokens[row]
        last = int(this.path[-1])
        assert this.bonus == this.target_tokens[last]
        assert this.bonus not in this.tree.token_ids[this.tree.children(last)]
        assert this.tokens == (*this.tree.token_ids[this.path[1:]].tolist(), this.bonus)
        root = this.tokens[-1]


def assert_same_rounds(got, want):
    """Same trees, tables, target tokens and tokens."""
    assert [this.tokens for this in got] == [this.tokens for this in want]
    for mine, theirs in zip(got, want, strict=True):
        assert mine.tree.to_json() == theirs.tree.to_json()
        assert_same_bits(mine.target_tokens, theirs.target_tokens, "target tokens")
        assert (mine.table is None) == (theirs.table is None)
        for a, b in zip(mine.table or (), theirs.table or (), strict=True):
            assert_same_bits(a, b, "the drafter's table")


@pytest.mark.parametrize(
    "before", ["longer tree", "autoregressive", "interrupted", "interrupted before a round"]
)
def test_nothing_of_an_earlier_decode_is_left(engine, check, prompt, before):
    """Trees and tables included: the drafter's context is this prompt's alone."""
    fresh = Engine(trained(), max_budget=64)
    want = run(fresh, prompt[:17], config("tree", 30))
    other = check["prompts"][6].tolist()
    if before == "longer tree":
        run(engine, other, config("tree", 40))
    elif before == "autoregressive":
        run(engine, other, config("ar", 5))
    else:
        rounds = decode(engine, other, config("tree", 40))
        for _ in range(4 if before == "interrupted" else 1):
            next(rounds)
    assert_same_rounds(run(engine, prompt[:17], config("tree", 30)), want)


def test_rejected_rows_and_scratch_are_never_read(engine, prompt, monkeypatch):
    """After each round NaN fills every cache row past the committed ones, of target and drafter, and all scratch."""
    want = run(engine, prompt, config("tree", 64))
    commit, counts = engine.commit, []

    def commit_and_poison(path):
        fed = engine.context_len  # the drafter knows these rows; those of `path` wait as features
        commit(path)
        counts.append(len(path))
        poison([array[engine.context_len :] for array in engine.cache.arrays])
        poison([array[fed:] for array in (*engine.drafter.keys, *engine.drafter.values)])
        buffers = dict(vars(engine.model.buffers))
        del buffers["logits"]  # a prompt's last ones are still to be chosen from
        poison([buffers.pop("features")[len(path) :], *buffers.values()])
        scratch = (value for value in vars(engine.drafter).values() if isinstance(value, np.ndarray))
        poison([array for array in scratch if array.dtype == np.float32])

    monkeypatch.setattr(engine, "commit", commit_and_poison)
    assert_same_rounds(run(engine, prompt, config("tree", 64)), want)
    assert len(counts) == len(want) and any(len(this.path) < len(this.tree.depths) for this in want)


def test_the_drafters_context_is_made_of_the_accepted_nodes(engine, prompt, reference):
    """Its keys and values equal, bit for bit, those of an engine that was given the whole text as a prompt."""
    rounds = run(engine, prompt, config("tree", 48, budget=64))
    assert any((np.diff(this.path) > 1).any() for this in rounds)  # not a prefix of the rows
    fresh = Engine(trained(), max_budget=64)
    fresh.reset(drafting=True)
    fresh.prefill(np.array(prompt + reference[:47], np.int32))
    assert fresh.context_len == engine.context_len
    for each in (engine, fresh):
        each.draft(reference[47], 1)  # hands over the last rows' features
    for name in ("keys", "values"):
        for layer, pair in enumerate(
            zip(getattr(engine.drafter, name), getattr(fresh.drafter, name), strict=True)
        ):
            mine, theirs = (array[: engine.context_len] for array in pair)
            assert_same_bits(mine, theirs, f"drafter {name} of layer {layer}")
    for mine, theirs in zip(committed_rows(engine), committed_rows(fresh), strict=True):
        assert_same_bits(mine, theirs, "the target's committed rows")


@pytest.mark.parametrize(
    ("method", "budget"), [("chain", 1), ("chain", 64), ("tree", 1), ("tree", 4), ("tree", 64)]
)
def test_the_block_is_the_root_and_masks_whatever_the_budget(engine, prompt, monkeypatch, method, budget):
    blocks, draft = [], engine.drafter.draft

    def spy(token_ids, context_len, embedding, head):
        blocks.append((token_ids.tolist(), context_len))
        return draft(token_ids, context_len, embedding, head)

    monkeypatch.setattr(engine.drafter, "draft", spy)
    rounds = run(engine, prompt, config(method, 24, budget))
    drafted = [this for this in rounds if this.table is not None]
    mask = engine.drafter.config.mask_token_id
    want = [([int(this.tree.token_ids[0])] + [mask] * 15, this.context_len) for this in drafted]
    assert blocks == want and len(drafted) >= 3
    assert all(this.table[0].shape == this.table[1].shape == (15, budget) for this in drafted)


def test_positions_are_those_of_the_rows(engine, prompt, monkeypatch):
    """Every forward's rows stand right after the committed ones; what is chosen stands one further."""
    seen = []
    choose, forward = engine.choose, engine.model.forward

    def spy_forward(batch, cache, observe=None):
        assert batch.context_len == cache.context_len
        seen.append(batch.positions.tolist())
        return forward(batch, cache, observe)

    def spy_choose(logits, positions, *rest):
        assert positions.tolist() == (seen[-1] if len(positions) > 1 else seen[-1][-1:])
        return choose(logits, positions, *rest)

    monkeypatch.setattr(engine.model, "forward", spy_forward)
    monkeypatch.setattr(engine, "choose", spy_choose)
    rounds = run(engine, prompt, config("tree", 32))
    assert seen[0] == list(range(PROMPT_LENGTH))
    for positions, this in zip(seen[1:], rounds[1:], strict=True):
        assert positions == (this.context_len + this.tree.depths).tolist()


def test_uniform_numbers_are_asked_for_at_the_tokens_own_positions(engine, prompt, monkeypatch):
    asked, sample = [], engine.ops.sample

    def spy(logits, positions, *rest):
        asked.append(positions.tolist())
        return sample(logits, positions, *rest)

    monkeypatch.setattr(engine.ops, "sample", spy, raising=False)
    rounds = run(engine, prompt, config("tree", 16, sampling=SamplingConfig(1.0, seed=3)))
    assert asked[0] == [PROMPT_LENGTH]
    for positions, this in zip(asked[1:], rounds[1:], strict=True):
        assert positions == (this.context_len + this.tree.depths + 1).tolist()
