"""Small synthetic checkpoints in Hugging Face layout, and how two directories are compared."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import deserialize
from safetensors.numpy import save_file

from ddtree.checkpoint import convert_to_kdtr
from ddtree.checkpoint_names import expected_tensors
from ddtree.config import DrafterConfig, ModelConfig
from ddtree.errors import DdtreeError

NUMPY = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}

TARGET = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "q_lora_rank": 10,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 8,
    "v_head_dim": 7,
    "moe_intermediate_size": 9,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
DRAFTER = {
    "architectures": ["DFlashDraftModel"],
    "dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 1, 2]},
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "rms_norm_eps": 1e-6,
    "vocab_size": 40,
    "block_size": 4,
    "rope_theta": 10000.0,
}


def random_tensors(hf: dict, dtype: str = "f16", seed: int = 0) -> dict[str, np.ndarray]:
    """Every expected tensor of a config, filled with random bits (NaN patterns too), the router's bias finite."""
    rng = np.random.default_rng(seed)
    config = (DrafterConfig if "dflash_config" in hf else ModelConfig).from_hf(hf)
    tensors = {}
    for name, shape in expected_tensors(config).items():
        if name.endswith("bias"):
            tensors[name] = rng.standard_normal(shape).astype(NUMPY[dtype])
            continue
        size = int(np.prod(shape)) * np.dtype(NUMPY[dtype]).itemsize
        tensors[name] = np.frombuffer(rng.bytes(size), NUMPY[dtype]).reshape(shape)
    return tensors


def write_hf(directory: Path, hf: dict, tensors: dict[str, np.ndarray], num_shards: int = 1) -> Path:
    """Write a checkpoint with the safetensors library: one file, or `num_shards` of them and an index."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(hf, indent=3))
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        return directory
    weight_map = {}
    for shard in range(num_shards):
        part = dict(list(tensors.items())[shard::num_shards])
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        save_file(part, directory / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def read_hf(directory: Path) -> dict[str, tuple[str, str, tuple[int, ...], bytes]]:
    """Every tensor as the safetensors library reads it: name -> (file, dtype, shape, bytes)."""
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        for name, entry in deserialize(path.read_bytes()):
            tensors[name] = (path.name, entry["dtype"], tuple(entry["shape"]), bytes(entry["data"]))
    return tensors


def assert_same_checkpoint(found: Path, wanted: Path) -> None:
    """Same files, same tensors bit for bit, same JSON files byte for byte (the index: same content)."""
    assert sorted(path.name for path in found.iterdir()) == sorted(path.name for path in wanted.iterdir())
    assert read_hf(found) == read_hf(wanted)
    for path in wanted.glob("*.json"):
        if path.name == "model.safetensors.index.json":
            assert json.loads((found / path.name).read_text()) == json.loads(path.read_text())
        else:
            assert (found / path.name).read_bytes() == path.read_bytes(), path.name


def refuses(tmp_path, source, kind, *fragments) -> None:
    """convert_to_kdtr raises `kind`, in one line that holds every fragment, and writes nothing."""
    before = sorted(tmp_path.iterdir())
    with pytest.raises(kind) as caught:
        convert_to_kdtr(source, tmp_path / "out.kdtr", progress=False)
    message = str(caught.value)
    assert isinstance(caught.value, DdtreeError) and "\n" not in message and len(message) < 1500
    for fragment in fragments:
        assert fragment in message
    assert sorted(tmp_path.iterdir()) == before
