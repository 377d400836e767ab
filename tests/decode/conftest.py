"""Engines that the decode tests share; a test that changes one does so through monkeypatch."""

import functools

import pytest
from decode.lossless import PROMPT_LENGTH, SAMPLINGS
from support import arrays_of, run, tiny, tokens_of, trained

from ddtree.config import DecodeConfig
from ddtree.engine import Engine


@pytest.fixture(scope="session")
def engine():
    """The trained model, f32, for trees of up to 64 nodes."""
    return Engine(trained(), max_budget=64)


@pytest.fixture(scope="session")
def large_engine():
    """The trained model, f32, for trees of up to 512 nodes."""
    return Engine(trained(), max_budget=512)


@pytest.fixture(scope="session")
def tiny_engine():
    """A random model of 512 tokens, f32; its drafter is random too, tests give it a table instead."""
    return Engine(tiny("dsv3"), max_budget=64, max_context=400)


@pytest.fixture(scope="session")
def check():
    """prompts [8, 128], their greedy tokens [8, 128], and the rounds of the published code for the first 6."""
    return arrays_of("check.npz")


@pytest.fixture(scope="module")
def autoregressive(engine, check):
    """autoregressive(prompt, sampling name, number of tokens): its tokens, computed once."""

    @functools.cache
    def tokens(prompt, sampling, number):
        config = DecodeConfig(method="ar", max_new_tokens=number, sampling=SAMPLINGS[sampling])
        return tokens_of(run(engine, check["prompts"][prompt][:PROMPT_LENGTH], config, sequence=prompt))

    return tokens
