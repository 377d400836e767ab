"""Quantised checkpoints out of plain ones, by the published formulas, in the layouts of DeepSeek-V3 and Kimi K2.5.

What they make is held to the libraries' own in test_quantised.py, by tests/fixtures/quantised.npz.
"""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from fixtures.seeded import checkpoint_dir
from safetensors import safe_open

from ddtree.checkpoint_names import expected_tensors
from ddtree.config import ModelConfig
from ddtree.quantised import Fp8Matrix, Int4Matrix, arrays_of
from ddtree.weights_pieces import stored_bits

E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
FP8_CONFIG = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
}  # fmt: skip
INT4_CONFIG = {  # as compressed-tensors 0.20.1 writes it
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4, "type": "int", "symmetric": True, "group_size": 32, "strategy": "group",
                "dynamic": False,
            },
            "input_activations": None, "output_activations": None, "format": None,
        }
    },
    "quant_method": "compressed-tensors", "kv_cache_scheme": None, "format": "pack-quantized",
    "quantization_status": "compressed", "global_compression_ratio": None, "moe_sparsity_config": None,
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
}  # fmt: skip
CONFIGS = {"fp8": FP8_CONFIG, "int4": INT4_CONFIG}


def routed(name: str) -> bool:
    """What Kimi K2.5 quantises."""
    return ".mlp.experts." in name


def linear(name: str) -> bool:
    """What DeepSeek-V3 quantises: every matrix of a layer but the router."""
    return name.endswith(("_proj.weight", "_proj_with_mqa.weight"))


def to_fp8(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """e4m3 [N, K] and f32 scales: a block's greatest magnitude becomes 448."""
    weight, (rows, length) = weight.astype(np.float32), weight.shape
    values, scales = np.empty(weight.shape, E4M3), np.ones(arrays_of(weight.shape, "fp8")[1][0], np.float32)
    for i in range(0, rows, 128):
        for j in range(0, length, 128):
            block = weight[i : i + 128, j : j + 128]
            if block.any():
                scales[i // 128, j // 128] = np.float32(1) / (np.float32(448) / np.abs(block).max())
            scale = scales[i // 128, j // 128]
            values[i : i + 128, j : j + 128] = np.clip(block / scale, -448, 448).astype(E4M3)
    return values, scales


def to_int4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Words i32 [N, K / 8], bf16 scales [N, K / 32] (a group's greatest magnitude over 7.5), shape i64 [2]."""
    groups = weight.astype(np.float32).reshape(len(weight), -1, 32)
    scales = (np.abs(groups).max(axis=2) / np.float32(7.5)).astype(BF16)
    wide = scales.astype(np.float32)[..., None]
    nibbles = np.clip(np.round(groups / np.where(wide, wide, 1)), -8, 7).astype(np.int64) + 8
    words = (nibbles.reshape(len(weight), -1, 8) << np.arange(0, 32, 4)).sum(axis=2)
    return words.astype(np.uint32).view(np.int32), scales, np.array(weight.shape, np.int64)


def quantised(tensors: dict, scheme: str, chosen) -> dict[str, np.ndarray]:
    """The tensors with those weights quantised whose names `chosen` says yes to, in place of the plain ones."""
    made = {}
    for name, weight in tensors.items():
        if not chosen(name):
            made[name] = weight
        elif scheme == "fp8":
            made[name], made[f"{name}_scale_inv"] = to_fp8(weight)
        else:
            parts = zip(("_packed", "_scale", "_shape"), to_int4(weight), strict=True)
            made |= {name + ending: array for ending, array in parts}
    return made


def with_config(hf: dict, scheme: str) -> dict:
    """A config.json that says so."""
    return hf | {"quantization_config": CONFIGS[scheme]}


def tiny_source(name: str = "dsv3") -> tuple[dict, dict[str, np.ndarray]]:
    """config.json and every tensor of a tiny target that transformers wrote."""
    directory: Path = checkpoint_dir(name, "target")
    with safe_open(directory / "model.safetensors", framework="numpy") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return json.loads((directory / "config.json").read_text()), tensors


SMALL = {  # a target whose matrices all have inputs in groups of 32, its query's rows within one block of 128
    "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 40, "hidden_size": 64, "intermediate_size": 160,
    "num_hidden_layers": 2, "num_attention_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "moe_intermediate_size": 32, "n_routed_experts": 4, "n_shared_experts": 2,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64, "rope_theta": 10000.0, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
}  # fmt: skip


def small_tensors(scheme: str, chosen, hf: dict = SMALL, seed: int = 0) -> dict[str, np.ndarray]:
    """Normal bf16 weights of SMALL, or of another config, quantised where `chosen`."""
    rng = np.random.default_rng(seed)
    shapes = expected_tensors(ModelConfig.from_hf(hf))
    plain = {name: rng.standard_normal(shape).astype(BF16) for name, shape in shapes.items()}
    return quantised(plain, scheme, chosen)


def matrix_of(tensors, name: str) -> Fp8Matrix | Int4Matrix:
    """A quantised weight out of a mapping of arrays, as the checkpoint's names have it."""
    if f"{name}_scale_inv" in tensors:
        return Fp8Matrix(stored_bits(tensors[name]), tensors[f"{name}_scale_inv"])
    return Int4Matrix(tensors[f"{name}_packed"], stored_bits(tensors[f"{name}_scale"]))
