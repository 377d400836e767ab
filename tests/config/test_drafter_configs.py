"""A drafter config at a published shape: its parameters as published, the rotary amplitude it was trained with."""

import json
import math

import pytest
from config.hf_configs import changed

from ddtree.bundle import DATA
from ddtree.checkpoint_names import expected_tensors
from ddtree.config import DrafterConfig, ModelConfig

PUBLISHED_GIB = 6.48  # of Kimi-K2.5-DFlash and of Kimi-K2.6-DFlash, bf16


def read(name):
    return json.loads((DATA / "configs" / f"{name}.json").read_text("utf-8"))


def test_kimi_drafter_has_its_published_size_and_fits_its_target():
    config = DrafterConfig.from_hf(read("kimi-k2.6-drafter"))
    config.check_target(ModelConfig.from_hf(read("kimi-k2.6")))
    parameters = sum(math.prod(shape) for shape in expected_tensors(config).values())
    assert round(2 * parameters / 2**30, 2) == PUBLISHED_GIB
    assert (config.block_size, config.mask_token_id) == (8, 163838)
    assert config.target_layer_ids == (1, 12, 24, 35, 47, 58)


def test_kimi_drafter_keeps_the_amplitude_it_was_trained_with():
    """Its config names mscale 1 and mscale_all_dim 1, whose ratio is 1; the YaRN of its Qwen3 layers knew neither."""
    hf = read("kimi-k2.6-drafter")
    assert (hf["rope_scaling"]["mscale"], hf["rope_scaling"]["mscale_all_dim"]) == (1.0, 1.0)
    rope = DrafterConfig.from_hf(hf).rope
    assert rope.amplitude == pytest.approx(1 + 0.1 * math.log(64), rel=1e-15)
    assert rope.softmax_mscale == 1.0
    named = changed(hf, "rope_scaling.attention_factor", 1.25)
    assert DrafterConfig.from_hf(named).rope.amplitude == 1.25
