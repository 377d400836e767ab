"""A micro model of seeded random weights: hidden 32, 2 layers, 4 experts, vocabulary 64, with a drafter of block 4."""

import numpy as np

from ddtree.checkpoint_names import expected_tensors
from ddtree.config import DrafterConfig, ModelConfig
from ddtree.kdtr import save

TARGET = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
DRAFTER = {
    "architectures": ["DFlashDraftModel"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "block_size": 4,
    "max_position_embeddings": 64,
    "dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 1], "context_window": 8},
}


# The same with a branch head, whose maps are drawn last: the rest has the bits of a drafter without one.
BRANCHED = DRAFTER | {
    "dflash_config": DRAFTER["dflash_config"] | {"branch": {"rank": 4, "candidates": 16}},
}

# One MoE layer of one head, and a block of 3: what the simulator decodes in seconds.
NANO_TARGET = TARGET | {
    "hidden_size": 16,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "first_k_dense_replace": 0,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
}
NANO_DRAFTER = DRAFTER | {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 1,
    "head_dim": 8,
    "block_size": 3,
    "dflash_config": {"mask_token_id": 1, "target_layer_ids": [0], "context_window": 8},
}


def write_nano_bundle(folder, seed=0):
    """The same of the smaller model."""
    return write_micro_bundle(folder, seed, NANO_TARGET, NANO_DRAFTER)


def write_micro_bundle(folder, seed=0, target=TARGET, drafter=DRAFTER):
    """Write target.kdtr and drafter.kdtr; weights are normal, scaled so that activations stay near 1."""
    rng = np.random.default_rng(seed)
    parts = (("target", target, ModelConfig), ("drafter", drafter, DrafterConfig))
    for kind, hf, reader in parts:
        arrays = {}
        for name, shape in expected_tensors(reader.from_hf(hf)).items():
            scale = 1.0 if "embed" in name else 0.1 if name.endswith("bias") else 1.5 * shape[-1] ** -0.5
            values = np.ones(shape) if "norm" in name else rng.standard_normal(shape) * scale
            arrays[name] = values.astype(np.float32)
        save(folder / f"{kind}.kdtr", arrays, {"kind": kind, "config": hf, "rope_layout": "halves"})
    return folder
