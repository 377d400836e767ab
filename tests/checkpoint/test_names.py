"""expected_tensors against checkpoints that others wrote, and against the published parameter counts."""

import json
import math

import pytest
from checkpoint.makers import DRAFTER, TARGET
from fixtures.seeded import CHECKPOINTS, checkpoint_dir
from safetensors import safe_open

from ddtree.checkpoint_names import check_tensors, expected_tensors
from ddtree.checkpoint_source import read_config
from ddtree.config import DrafterConfig, ModelConfig
from ddtree.errors import CheckpointError

DEEPSEEK_V3 = TARGET | {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
}


@pytest.mark.parametrize(("name", "kind"), CHECKPOINTS)
def test_names_and_shapes_are_those_of_transformers(name, kind):
    directory = checkpoint_dir(name, kind)
    config = read_config(json.loads((directory / "config.json").read_text()), name)
    with safe_open(directory / "model.safetensors", framework="numpy") as file:
        found = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    assert expected_tensors(config) == found


def test_deepseek_v3_has_671_billion_parameters():
    tensors = expected_tensors(ModelConfig.from_hf(DEEPSEEK_V3))
    assert sum(map(math.prod, tensors.values())) == 671_026_419_200


def test_a_drafter_has_eleven_tensors_a_layer_and_three():
    tensors = expected_tensors(DrafterConfig.from_hf(DRAFTER))
    assert len(tensors) == 2 * 11 + 3
    assert tensors["fc.weight"] == (24, 3 * 24)
    assert tensors["layers.1.self_attn.k_proj.weight"] == (2 * 6, 24)


def test_long_lists_are_cut_with_a_count():
    with pytest.raises(CheckpointError) as caught:
        check_tensors({}, ModelConfig.from_hf(TARGET), "here")
    missing = len(expected_tensors(ModelConfig.from_hf(TARGET)))
    assert str(caught.value).startswith(
        f"here: tensors do not fit config.json: {missing} missing (model.embed"
    )
    assert str(caught.value).endswith(f"; and {missing - 8} more)")
    assert len(str(caught.value)) < 600
