"""Random models: the shipped configs are the published shapes, and weights are fixed by seed, name and shape alone."""

import numpy as np
import pytest
from bench.small import SMALL, write_small_config

from ddtree.bench_layers import num_parameters
from ddtree.bench_random import open_random
from ddtree.config import ModelConfig
from ddtree.ops import get_ops
from ddtree.reference import fill as reference_fill
from ddtree.weights import MoeWeights


@pytest.fixture
def small(tmp_path):
    return write_small_config(tmp_path)


BILLIONS = {
    "random-4.8b": 4.81,
    "kimi-k2": 1026.4,
    "kimi-k2.6": 1026.4,
    "deepseek-v3": 671.0,
    "deepseek-v2-lite": 15.7,
}


@pytest.mark.parametrize("name", BILLIONS)
def test_shipped_configs_have_the_published_number_of_parameters(name):
    assert num_parameters(open_random(name).config) / 1e9 == pytest.approx(BILLIONS[name], rel=2e-3)


def test_what_tells_the_shipped_configs_apart():
    v3, k2, k26, lite = (
        open_random(name).config for name in ("deepseek-v3", "kimi-k2", "kimi-k2.6", "deepseek-v2-lite")
    )
    assert (v3.num_attention_heads, v3.n_group, v3.topk_group, v3.first_k_dense_replace) == (128, 8, 4, 3)
    assert (k2.num_attention_heads, k2.routed_scaling_factor, k2.rms_norm_eps, k2.rope.factor) == (
        64,
        2.827,
        1e-6,
        32,
    )
    assert (k26.rms_norm_eps, k26.rope.factor, k26.rope.theta) == (1e-5, 64, 50000)
    assert (lite.q_lora_rank, lite.topk_method, lite.scoring_func, lite.norm_topk_prob) == (
        None,
        "greedy",
        "softmax",
        False,
    )
    assert lite.rope.amplitude == 1 and lite.rope.softmax_mscale == pytest.approx(
        (0.0707 * np.log(40) + 1) ** 2
    )
    drafter = open_random("random-4.8b").drafter_config
    assert (drafter.block_size, drafter.num_hidden_layers, drafter.hidden_size) == (16, 5, 2048)


def arrays(weights):
    layers = [(layer.q_b, layer.w_kc, layer.o, layer.input_norm) for layer in weights.layers]
    experts = [
        (m.mlp.experts.up, m.mlp.bias, m.mlp.router) for m in weights.layers if isinstance(m.mlp, MoeWeights)
    ]
    return [weights.embedding, weights.head, *sum(layers, ()), *sum(experts, ())]


def test_seeds_fix_the_weights(small):
    ops = get_ops("numpy")
    one, two, other = (open_random(str(small), seed=s).target_weights(8, ops) for s in (1, 1, 2))
    for a, b, c in zip(arrays(one), arrays(two), arrays(other), strict=True):
        assert (a == b).all() and ((a == 1).all() or (a != c).mean() > 0.99)
    flat = [array.ravel()[:16].tolist() for array in arrays(one) if (array != 1).any()]
    assert len({tuple(values) for values in flat}) == len(flat), "no two arrays share their numbers"
    assert one.head.std() == pytest.approx(1.5 * 32**-0.5, rel=0.05)
    assert ModelConfig.from_hf(SMALL).num_hidden_layers == len(one.layers)


def test_every_array_is_filled_once(small, monkeypatch):
    filled = []
    fill = reference_fill.fill
    monkeypatch.setattr(reference_fill, "fill", lambda out, *rest: (filled.append(out), fill(out, *rest)))
    weights = open_random(str(small)).target_weights(8, get_ops("numpy"))
    assert len({id(array) for array in filled}) == len(filled)
    experts = weights.layers[1].mlp.experts.down
    assert any(array is experts for array in filled) and experts.std(axis=(1, 2)).min() > 0
    ends = [experts[0, 0, 0], experts[-1, -1, -1]]
    np.testing.assert_array_equal(ends, np.float32([0.28872302174568176, -0.2714914381504059]))


@pytest.mark.simulator
def test_the_simulators_weights_are_numpys(small):
    bundle = open_random(str(small), layers=1)
    host, device = get_ops("numpy"), get_ops("cuda")
    got, want = bundle.target_weights(4, device), bundle.target_weights(4, host)
    for mine, theirs in zip(arrays(got), arrays(want), strict=True):
        np.testing.assert_array_equal(device.read(mine), theirs)
