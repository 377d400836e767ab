"""Recordings that the replay's tests share, made once: three prompts, 24 tokens, greedy and sampled."""

from types import SimpleNamespace

import pytest
from support import branched, trained

from ddtree.config import DecodeConfig, SamplingConfig
from ddtree.engine import Engine
from ddtree.prompts import load_prompts
from ddtree.study_record import record

CONFIG = DecodeConfig("ar", 0, 24, SamplingConfig(top_p=0.95, seed=7))
TEMPERATURES = (0.0, 0.6)


@pytest.fixture(scope="session")
def engine():
    """The trained model, f32, for trees of up to 64 nodes."""
    return Engine(trained(), max_budget=64)


@pytest.fixture(scope="session")
def branch_engine():
    """The same with a random branch head."""
    return Engine(branched(), max_budget=64)


@pytest.fixture(scope="session")
def recorded(engine, tmp_path_factory):
    """The folder, its recordings, and the prompts and settings they were made of."""
    return recorded_by(engine, tmp_path_factory.mktemp("recorded"))


@pytest.fixture(scope="session")
def branch_recorded(branch_engine, tmp_path_factory):
    """The same, with what the branch head says."""
    return recorded_by(branch_engine, tmp_path_factory.mktemp("branch_recorded"))


def recorded_by(engine, directory):
    """Three prompts at two temperatures, recorded by an engine into a folder."""
    prompts = load_prompts()[:3]
    recordings = record(engine, prompts, directory, CONFIG, TEMPERATURES)
    return SimpleNamespace(directory=directory, recordings=recordings, prompts=prompts, config=CONFIG)
