"""Loops against a literal oracle, and what a tally adds up."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.decode import STAGES, Round
from ddtree.metrics import LOOP_LENGTH, LOOP_PERIOD, Tally, in_loop
from ddtree.tree import DraftTree


def literal(tokens):
    """Word by word: some period up to 64 for which the 16 tokens ending here equal the 16 one period earlier."""
    return [
        any(
            end - 15 - period >= 0
            and tokens[end - 15 : end + 1] == tokens[end - 15 - period : end + 1 - period]
            for period in range(1, 65)
        )
        for end in range(len(tokens))
    ]


def test_the_stated_lengths():
    assert (LOOP_LENGTH, LOOP_PERIOD) == (16, 64)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 2), max_size=40),
    st.lists(st.integers(0, 2), min_size=1, max_size=70),
    st.integers(1, 5),
    st.lists(st.integers(0, 2), max_size=20),
)
def test_loops_are_the_literal_ones(before, unit, times, after):
    tokens = before + unit * times + after
    assert in_loop(tokens).tolist() == literal(tokens)


@pytest.mark.parametrize("period", [1, 2, 16, 63, 64, 65])
def test_a_loop_of_each_period_begins_when_sixteen_tokens_have_come_again(period):
    tokens = list(range(1000, 1020)) + [5000 + i % period for i in range(period + 40)]
    looping = in_loop(tokens)
    first = 20 + period + 15
    want = [i >= first for i in range(len(tokens))] if period <= 64 else [False] * len(tokens)
    assert looping.tolist() == want == literal(tokens)


@pytest.mark.parametrize("length", [0, 1, 16, 17])
def test_short_texts(length):
    assert in_loop([7] * length).tolist() == [False] * min(length, 16) + [True] * (length - 16)


def a_round(index, tokens, num_nodes=0, seconds=0.0):
    """A Round of which a tally reads the tokens, the tree's size and the seconds."""
    depths = np.arange(num_nodes + 1, dtype=np.int32)
    tree = DraftTree(depths, depths - 1, depths, -depths.astype(np.float64))
    stages = dict.fromkeys(STAGES, seconds)
    return Round(index, 0, tree, depths, depths[:1], tokens[-1], tuple(tokens), stages, None, 0, None)


def test_an_empty_tally_divides_by_nothing():
    tally = Tally()
    assert (tally.mean_acceptance, tally.mean_acceptance_outside_loops, tally.tokens_per_second) == (
        None,
    ) * 3
    assert tally.nodes_per_round is None and tally.loop_share == 0
    assert tally.stage_milliseconds() == dict.fromkeys(STAGES, 0.0)
    tally.add([1, 2], [a_round(0, [3], seconds=9.0)])  # a prefill alone is a token and no round
    assert (tally.rounds, tally.tokens, tally.lengths, tally.mean_acceptance) == (0, 1, [], None)
    assert tally.tokens_per_second is None


def test_prefill_gives_the_first_token_and_counts_for_nothing_else():
    tally = Tally()
    tally.add([1, 2], [a_round(0, [3], seconds=9.0), a_round(1, [4, 5, 6], 7, 0.1), a_round(2, [7], 9, 0.3)])
    tally.add([1], [a_round(0, [8], seconds=9.0), a_round(1, [9, 10], 2, 0.2)])
    assert (tally.tokens, tally.rounds, tally.lengths, tally.nodes) == (8, 3, [3, 1, 2], 18)
    assert tally.mean_acceptance == (8 - 2) / 3  # (tokens - 1) / rounds of each decode, bonus included
    assert tally.nodes_per_round == 6
    assert tally.tokens_per_second == pytest.approx(6 / (5 * 0.6))
    assert tally.stage_milliseconds() == pytest.approx(dict.fromkeys(STAGES, 200.0))
    assert list(tally.seconds) == list(STAGES)
    assert tally.mean_acceptance_outside_loops == tally.mean_acceptance and tally.loop_share == 0


def test_a_round_is_outside_loops_when_its_root_is():
    """The prompt ends one token before its repetition counts as a loop, so the prefill's token is the first inside."""
    prompt = [9] * 16
    tally = Tally()
    tally.add(prompt, [a_round(0, [9]), a_round(1, [9, 9, 9]), a_round(2, [1, 2]), a_round(3, [3])])
    assert in_loop([*prompt, 9])[-1] and not in_loop(prompt)[-1]
    # round 1 starts from a looping root, round 2 too (its root is the last 9), round 3 from a 2
    assert (tally.rounds, tally.rounds_outside, tally.tokens_outside) == (3, 1, 1)
    assert tally.loop_tokens == 4 and tally.loop_share == 4 / 7
    assert tally.mean_acceptance == 2 and tally.mean_acceptance_outside_loops == 1


def test_rounds_may_come_from_an_iterator():
    tally = Tally()
    tally.add((1,), iter([a_round(0, [2]), a_round(1, [3, 4])]))
    assert tally.mean_acceptance == 2
