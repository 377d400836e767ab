"""What the loop refuses, in one line and before it starts; and logits that cannot decide a token."""

from dataclasses import replace

import numpy as np
import pytest
from compare_arrays import assert_same_bits
from support import assert_one_line, run, tokens_of, trained

from ddtree.bundle import DEFAULT_MODEL, open_bundle
from ddtree.config import DecodeConfig, SamplingConfig
from ddtree.decode import decode
from ddtree.engine import Engine
from ddtree.errors import ConfigError, NumericsError, UsageError

TREE = DecodeConfig("tree", 16, 24)
NAN, INF = np.nan, np.inf


@pytest.fixture(scope="module")
def prompt(check):
    return check["prompts"][5][:40].tolist()


# --- requests that cannot be met ----------------------------------------------------------------------------------

PROMPTS = {
    "empty": ([], "prompt: it is empty"),
    "too long": ([1] * 1025, "1025 tokens do not fit into the 1024"),
    "past the vocabulary": ([1, 2048], r"0\.\.2047"),
    "negative": ([-1, 5], r"0\.\.2047"),
    "past 64 bits": ([1, 2**70], r"0\.\.2047"),
    "no integers": ([1.5, 2.5], "prompt: .*integers"),
}


@pytest.mark.parametrize("method", ["ar", "chain", "tree"])
@pytest.mark.parametrize("case", PROMPTS)
def test_prompts(engine, case, method):
    prompt_ids, says = PROMPTS[case]
    with pytest.raises(UsageError, match=says) as caught:
        decode(engine, prompt_ids, replace(TREE, method=method))  # before the first round is asked for
    assert_one_line(caught.value)


SETTINGS = {
    "method": (lambda: DecodeConfig(method="beam"), "one of ar, chain, tree, found 'beam'"),
    "budget": (lambda: DecodeConfig(budget=-1), "budget: expected an integer from 0 to 65536, found -1"),
    "tokens": (lambda: DecodeConfig(max_new_tokens=0), "max_new_tokens: expected an integer >= 1, found 0"),
    "temperature": (lambda: SamplingConfig(temperature=-0.1), "temperature.*-0.1"),
    "temperature nan": (lambda: SamplingConfig(temperature=NAN), "temperature.*nan"),
    "temperature inf": (lambda: SamplingConfig(temperature=INF), "temperature.*inf"),
    "top_k": (lambda: SamplingConfig(top_k=-1), "top_k.*-1"),
    "top_p 0": (lambda: SamplingConfig(top_p=0.0), "top_p.*0"),
    "top_p above 1": (lambda: SamplingConfig(top_p=1.01), "top_p.*1.01"),
    "top_p nan": (lambda: SamplingConfig(top_p=NAN), "top_p.*nan"),
    "seed": (lambda: SamplingConfig(seed=-1), "seed.*-1"),
    "seed too large": (lambda: SamplingConfig(seed=2**64), "seed.*18446744073709551616"),
    "backend": (lambda: Engine(trained(), backend="abacus"), "backend: expected one of .*'abacus'"),
    "dtype": (
        lambda: Engine(trained(), dtype="f16"),
        "dtype: expected one of f32, f64 on the backend numpy, found 'f16'",
    ),
    "route": (lambda: Engine(trained(), route="north"), "route: expected one of .*'north'"),
    "context": (
        lambda: Engine(trained(), max_context=1025),
        "context: expected an integer from 1 to 1024, found 1025",
    ),
    "a context of none": (
        lambda: Engine(trained(), max_context=0),
        "context: expected an integer from 1 to 1024, found 0",
    ),
    "less than none": (
        lambda: Engine(trained(), max_context=-3),
        "context: expected an integer from 1 to 1024, found -3",
    ),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings(case):
    make, says = SETTINGS[case]
    with pytest.raises((UsageError, ConfigError), match=says) as caught:
        make()
    assert_one_line(caught.value)


def test_a_budget_or_shape_that_this_engine_lacks(engine, prompt):
    for wrong, says in (
        (replace(TREE, budget=65), "opened for 64 nodes, found 65"),
        (replace(TREE, method="chain", budget=65), "opened for 64 nodes, found 65"),
        (replace(TREE, shape="bonsai"), "shape: expected one of beam, best_first, .*, found 'bonsai'"),
    ):
        with pytest.raises(UsageError, match=says) as caught:
            decode(engine, prompt, wrong)
        assert_one_line(caught.value)


@pytest.mark.parametrize("sequence", [-1, 2**32])
def test_a_sequence_that_no_counter_holds(engine, prompt, sequence):
    with pytest.raises(UsageError, match="sequence: expected an index from 0 to 4294967295") as caught:
        decode(engine, prompt, TREE, sequence)
    assert_one_line(caught.value)


def test_without_a_drafter_only_autoregressive_decoding_works(engine, prompt):
    lone = Engine(open_bundle(DEFAULT_MODEL / "target.kdtr"), max_budget=16)
    assert (lone.drafter, lone.horizon) == (None, 0)
    for method in ("chain", "tree"):
        with pytest.raises(UsageError, match="no drafter") as caught:
            decode(lone, prompt, replace(TREE, method=method))
        assert_one_line(caught.value)
    ar = replace(TREE, method="ar", max_new_tokens=8)
    assert tokens_of(run(lone, prompt, ar)) == tokens_of(run(engine, prompt, ar))


def test_a_refused_request_leaves_a_running_decode_alone(engine, prompt):
    want = tokens_of(run(engine, prompt, TREE))
    rounds = decode(engine, prompt, TREE)
    got = list(next(rounds).tokens)
    with pytest.raises(UsageError):
        decode(engine, [], TREE)
    assert got + tokens_of(rounds) == want


def outcome(rounds):
    """The tokens of what is left of a decode, or "refused"."""
    try:
        return tokens_of(rounds)
    except UsageError as error:
        assert_one_line(error)
        return "refused"


@pytest.mark.parametrize("started", [0, 1, 2])
def test_two_decodes_on_one_engine_never_mix(engine, check, prompt, started):
    """The first is refused once the second began, or both give their own tokens; neither reads the other's cache."""
    prompts = [prompt, check["prompts"][0][:50].tolist()]
    want = [tokens_of(run(engine, each, TREE)) for each in prompts]
    first = decode(engine, prompts[0], TREE)
    got = tokens_of([next(first) for _ in range(started)])
    second = decode(engine, prompts[1], TREE)
    got_second = list(next(second).tokens) if started else []
    assert outcome(first) in ("refused", want[0][len(got) :])
    assert outcome(second) == want[1][len(got_second) :]


# --- logits that decide nothing -----------------------------------------------------------------------------------


def spoil(monkeypatch, engine, at_call, change):
    """From the `at_call`-th verify on (0 the first), `change(logits, call)` the logits that it returns."""
    verify, calls = engine.verify, []

    def spoiled(tree):
        logits = verify(tree)
        calls.append(tree)
        if len(calls) > at_call:
            change(logits, len(calls) - 1)
        return logits

    monkeypatch.setattr(engine, "verify", spoiled)


@pytest.fixture(scope="module")
def clean_rounds(engine, prompt):
    """The prompt's rounds by each method, nothing spoiled."""
    return {method: run(engine, prompt, replace(TREE, method=method)) for method in ("ar", "chain", "tree")}


@pytest.mark.parametrize(
    ("method", "row_on_path"), [("ar", 0), ("chain", 0), ("chain", 2), ("tree", 0), ("tree", 2)]
)
@pytest.mark.parametrize("value", ["a NaN", "all NaN", "nothing finite"])
def test_bad_logits_on_the_walk_commit_nothing(
    engine, prompt, clean_rounds, monkeypatch, method, value, row_on_path
):
    decoding, clean = replace(TREE, method=method), clean_rounds[method]
    number = next(i for i, this in enumerate(clean) if i > 1 and (method == "ar" or len(this.path) > 2))
    this = clean[number]
    row = int(this.path[row_on_path])

    def change(logits, _):
        if value == "a NaN":
            logits[row, 7] = NAN
        else:
            logits[row] = NAN if value == "all NaN" else -INF

    with monkeypatch.context() as patch:
        spoil(patch, engine, number - 1, change)
        rounds = decode(engine, prompt, decoding)
        got = [next(rounds) for _ in range(number)]
        before = [array[: engine.context_len].copy() for array in engine.cache.arrays]
        position = this.context_len + int(this.tree.depths[row])
        with pytest.raises(NumericsError, match=f"row {row} at position {position} ") as caught:
            next(rounds)
    assert_one_line(caught.value)
    assert tokens_of(got) == tokens_of(clean[:number])
    assert engine.context_len == this.context_len
    for mine, theirs in zip(engine.cache.arrays, before, strict=True):
        assert_same_bits(mine[: engine.context_len], theirs, "committed rows")
    assert tokens_of(run(engine, prompt, decoding)) == tokens_of(clean)  # usable afterwards


def test_a_bad_row_is_not_followed_and_the_row_before_it_is_fine(engine, prompt, monkeypatch):
    """NaN in the last accepted row: the token it would choose is the bonus, so it is on the walk too."""
    clean = run(engine, prompt, TREE)
    number = next(i for i, this in enumerate(clean) if i and len(this.path) > 1)
    row = int(clean[number].path[-1])

    def change(logits, call):
        if call == number - 1:
            logits[row, 0] = NAN

    spoil(monkeypatch, engine, 0, change)
    rounds = decode(engine, prompt, TREE)
    with pytest.raises(NumericsError, match=f"row {row} "):
        list(rounds)


@pytest.mark.parametrize(
    "sampling", [SamplingConfig(), SamplingConfig(0.8, seed=4)], ids=["greedy", "sampled"]
)
def test_bad_rows_off_the_walk_are_counted_and_change_nothing(engine, prompt, monkeypatch, sampling):
    decoding = replace(TREE, sampling=sampling)
    clean = run(engine, prompt, decoding)

    def change(logits, call):
        off = np.setdiff1d(np.arange(len(logits)), clean[call + 1].path)
        logits[off[::2], 3] = NAN
        logits[off[1::2]] = -INF

    spoil(monkeypatch, engine, 0, change)
    got = run(engine, prompt, decoding)
    assert [this.tokens for this in got] == [this.tokens for this in clean]
    assert [this.num_bad_rows for this in got[1:]] == [
        len(this.tree.depths) - len(this.path) for this in clean[1:]
    ]
    assert sum(this.num_bad_rows for this in got) > 20 and not any(this.num_bad_rows for this in clean)


def test_infinite_and_wild_logits_that_still_decide_are_fine(engine, prompt, monkeypatch):
    """-inf in all but one place, and finite values of 1e38, are no error."""
    clean = run(engine, prompt, TREE)

    def change(logits, _):
        best = logits.argmax(axis=1)
        logits[:] = -INF
        logits[np.arange(len(logits)), best] = -1e38

    spoil(monkeypatch, engine, 0, change)
    assert tokens_of(run(engine, prompt, TREE)) == tokens_of(clean)


@pytest.mark.parametrize("value", [NAN, -INF])
def test_bad_logits_after_the_prompt(engine, prompt, monkeypatch, value):
    prefill = engine.prefill

    def spoiled(token_ids):
        logits = prefill(token_ids)
        logits[:] = value
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(engine, "prefill", spoiled)
        with pytest.raises(NumericsError, match="position 39") as caught:
            run(engine, prompt, TREE)
    assert_one_line(caught.value)
    assert len(tokens_of(run(engine, prompt, TREE))) == 24


def test_a_model_whose_weights_hold_nan_raises_and_warns_of_nothing(prompt):
    """Warnings are errors here: NaN travels through every operation without one."""
    broken = Engine(trained(), max_budget=16)
    broken.model.weights.layers[2].o[:] = NAN
    with pytest.raises(NumericsError, match="the prompt's last row, position 39"):
        run(broken, prompt, TREE)
