"""Bytes and FLOPs from a config against what a GPU's bench counted call by call, and the experts that rows touch."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ddtree.bundle import open_bundle
from ddtree.config import ModelConfig
from ddtree.study_analytic import (
    Machine,
    WeightBytes,
    expected_experts,
    forward_bytes,
    forward_flops,
    forward_seconds,
    layer_parameters,
)

DATA = Path(__file__).resolve().parents[2] / "data"


def config_of(name):
    return ModelConfig.from_hf(json.loads((DATA / "configs" / f"{name}.json").read_text()))


def recorded(name):
    return json.loads((DATA / "results" / "h200" / name).read_text())["times"]


@pytest.mark.parametrize(("name", "item"), [("layers.json", 4), ("layers_random-4.8b.json", 2)])
def test_it_is_what_the_bench_counted(name, item):
    config = config_of("random-4.8b") if "random" in name else open_bundle().config
    weights = WeightBytes(item, item, item)
    for record in recorded(name):
        touched = record["forward"]["experts_touched"]
        mine = forward_bytes(config, record["rows"], record["context_len"], weights, touched)
        assert mine == pytest.approx(record["forward"]["bytes"], rel=2e-3)
        assert forward_flops(config, record["rows"], 128) == pytest.approx(
            record["forward"]["flops"], rel=0.02
        )


def test_experts_that_rows_touch():
    assert expected_experts(384, 8, 1) == pytest.approx(8)
    assert expected_experts(384, 8, 64) == pytest.approx(284.2, abs=0.1)
    rng = np.random.default_rng(0)
    drawn = [len({e for _ in range(16) for e in rng.choice(64, 6, replace=False)}) for _ in range(400)]
    assert np.mean(drawn) == pytest.approx(expected_experts(64, 6, 16), rel=0.01)


def test_parameters_are_the_checkpoints():
    config = config_of("kimi-k2.6")
    of, moe = layer_parameters(config), config.num_hidden_layers - config.first_k_dense_replace
    experts = moe * (config.n_routed_experts * of["expert"] + of["shared"] + of["router"])
    total = config.num_hidden_layers * of["attention"] + of["dense"] + experts + 2 * config.vocab_size * 7168
    assert total == pytest.approx(1026e9, rel=1e-3)


def test_seconds_are_the_larger_bound():
    config, machine = config_of("random-4.8b"), Machine(4e12, 6e14)
    assert forward_seconds(config, 1, 128, machine) == forward_bytes(config, 1, 128) / 4e12
    assert forward_seconds(config, 4096, 128, machine) == forward_flops(config, 4096, 128) / 6e14
    batch = forward_seconds(config, 32, 128, machine, experts=[64.0] * 11, sequences=8)
    assert batch == forward_bytes(config, 32, 8 * 128, experts=[64.0] * 11) / 4e12, "each has its own cache"
    half = forward_bytes(config, 64, 128, WeightBytes(experts=0.5625))
    assert half < 0.35 * forward_bytes(config, 64, 128)
    dense = replace(config, first_k_dense_replace=config.num_hidden_layers)
    growth = forward_bytes(dense, 64, 128) / forward_bytes(dense, 1, 128)
    assert growth < 1.01, "without experts 64 rows read what one does"
