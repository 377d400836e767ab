"""The trained model's recorded decodes: greedy tokens, and rounds as the published DFlash and DDTree code needed."""

from dataclasses import replace

import pytest
from support import run, tokens_of, trained

from ddtree.config import DecodeConfig
from ddtree.engine import Engine

METHODS = {"ar": ("ar", 0), "chain": ("chain", 15), "tree16": ("tree", 16), "tree64": ("tree", 64)}
JOINED = {
    "chain": (17, 17),
    "tree16": (15, 15),
    "tree64": (13, 15),
}  # prompts 0..3 and 4..7 in one, 64 new tokens
WITHOUT_WINDOW = {"chain": 34, "tree16": 28}  # prompts 0..3 in one


def config(name, max_new_tokens):
    method, budget = METHODS[name]
    return DecodeConfig(method=method, budget=budget, max_new_tokens=max_new_tokens)


@pytest.mark.parametrize("prompt", range(8))
@pytest.mark.parametrize("name", METHODS)
def test_recorded_tokens_and_rounds(engine, check, name, prompt):
    rounds = run(engine, check["prompts"][prompt], config(name, 128))
    assert tokens_of(rounds) == check["greedy"][prompt].tolist()
    assert [this.index for this in rounds] == list(range(len(rounds)))
    if name == "ar":
        assert len(rounds) == 128
    elif prompt < 6:
        # The published code runs on past the tokens wanted, so its last round may have had more to take.
        assert abs(len(rounds) - 1 - int(check[f"rounds_{name}"][prompt])) <= 1


def joined(check, half):
    return check["prompts"][4 * half : 4 * half + 4].reshape(-1)


@pytest.fixture(scope="module")
def joined_tokens(engine, check):
    """What autoregressive decoding gives after four prompts in one."""
    return [tokens_of(run(engine, joined(check, half), config("ar", 64))) for half in (0, 1)]


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("name", JOINED)
def test_a_long_prompt_through_the_drafters_window(engine, check, joined_tokens, name, half):
    """512 positions, of which the drafter sees the last 256 (the rounds are those of an independent f64 sketch)."""
    rounds = run(engine, joined(check, half), config(name, 64))
    assert tokens_of(rounds) == joined_tokens[half]
    assert abs(len(rounds) - 1 - JOINED[name][half]) <= 1


@pytest.fixture(scope="module")
def engine_without_window():
    bundle = trained()
    return Engine(
        replace(bundle, drafter_config=replace(bundle.drafter_config, context_window=None)), max_budget=64
    )


@pytest.mark.parametrize("name", WITHOUT_WINDOW)
def test_without_the_window_drafts_are_worse_and_tokens_the_same(
    engine_without_window, check, joined_tokens, name
):
    assert trained().drafter_config.context_window == 256
    rounds = run(engine_without_window, joined(check, 0), config(name, 64))
    assert tokens_of(rounds) == joined_tokens[0]
    assert abs(len(rounds) - 1 - WITHOUT_WINDOW[name]) <= 1


@pytest.mark.parametrize("prompt", [2, 3])
def test_float64_gives_the_same_greedy_tokens(wide_engine, check, prompt):
    """Up to a near-tie: where f32 and f64 part, the two logits differ by less than f32's own error."""
    prompt_ids, want = check["prompts"][prompt].tolist(), check["greedy"][prompt].tolist()
    got = tokens_of(run(wide_engine, prompt_ids, config("tree16", 128)))
    if got != want:
        at = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
        wide_engine.reset(drafting=False)
        logits = wide_engine.prefill([*prompt_ids, *got[:at]])[0]
        assert abs(logits[got[at]] - logits[want[at]]) < 1e-4


@pytest.fixture(scope="module")
def wide_engine():
    return Engine(trained(), dtype="f64", max_budget=16)
