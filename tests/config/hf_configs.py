"""Configs as checkpoints spell them: the fixtures', and Kimi K2.6's."""

import json

from support import FIXTURES

NAMES = ("dsv3", "dsv3_yarn")


def read(name, file="config.json", kind="target"):
    return json.loads((FIXTURES / name / kind / file).read_text())


def changed(hf, where, value):
    """A deep copy of hf with the field at dotted `where` set to value, or removed when value is `...`."""
    hf = json.loads(json.dumps(hf))
    *path, last = where.split(".")
    at = hf
    for key in path:
        at = at[key]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return hf


KIMI_YARN = {
    "type": "yarn",
    "factor": 64.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
KIMI = {
    "vocab_size": 163840,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 384,
    "routed_scaling_factor": 2.827,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "rope_scaling": KIMI_YARN,
    "eos_token_id": 163586,
}
