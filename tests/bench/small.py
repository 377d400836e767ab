"""A small config for random weights, with a drafter: 45 thousand parameters, a horizon of 5."""

import json

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "first_k_dense_replace": 1, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "rms_norm_eps": 1e-6, "max_position_embeddings": 300, "rope_theta": 1e4,
}  # fmt: skip
SMALL_DRAFTER = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "block_size": 6,
    "max_position_embeddings": 300, "dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 1]},
}  # fmt: skip


def write_small_config(folder):
    """Write small.json and small-drafter.json; the path of the first."""
    (folder / "small.json").write_text(json.dumps(SMALL))
    (folder / "small-drafter.json").write_text(json.dumps(SMALL_DRAFTER))
    return folder / "small.json"
