"""Which tensors a checkpoint must hold, which it may hold besides, and how a mismatch is put in one line.

Names are Hugging Face's, without the `language_model.` prefix of Kimi K2.5. It knows no files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ddtree.checkpoint_formats import formats_of, mixed_experts, not_in_groups, stored_tensors
from ddtree.config import DrafterConfig, ModelConfig
from ddtree.errors import CheckpointError

Shape = tuple[int, ...]

LISTED = 8
BIAS = "e_score_correction_bias"
BRANCH_MAPS = ("parent", "gate", "child")
VISION_PREFIXES = ("vision_tower.", "mm_projector.")


def expected_tensors(config: ModelConfig | DrafterConfig) -> dict[str, Shape]:
    """Every tensor name of a target or of a drafter, with its shape."""
    return _drafter_tensors(config) if isinstance(config, DrafterConfig) else _target_tensors(config)


def _mlp(prefix: str, hidden: int, width: int) -> dict[str, Shape]:
    return {
        f"{prefix}.gate_proj.weight": (width, hidden),
        f"{prefix}.up_proj.weight": (width, hidden),
        f"{prefix}.down_proj.weight": (hidden, width),
    }


def _attention(prefix: str, c: ModelConfig) -> dict[str, Shape]:
    heads, hidden = c.num_attention_heads, c.hidden_size
    if c.q_lora_rank is None:
        query = {"q_proj": (heads * c.q_head_dim, hidden)}
    else:
        query = {
            "q_a_proj": (c.q_lora_rank, hidden),
            "q_a_layernorm": (c.q_lora_rank,),
            "q_b_proj": (heads * c.q_head_dim, c.q_lora_rank),
        }
    shapes = query | {
        "kv_a_proj_with_mqa": (c.kv_lora_rank + c.qk_rope_head_dim, hidden),
        "kv_a_layernorm": (c.kv_lora_rank,),
        "kv_b_proj": (heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
        "o_proj": (hidden, heads * c.v_head_dim),
    }
    return {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}


def _moe(prefix: str, c: ModelConfig) -> dict[str, Shape]:
    tensors: dict[str, Shape] = {f"{prefix}.gate.weight": (c.n_routed_experts, c.hidden_size)}
    if c.topk_method == "noaux_tc":
        tensors[f"{prefix}.gate.{BIAS}"] = (c.n_routed_experts,)
    for expert in range(c.n_routed_experts):
        tensors |= _mlp(f"{prefix}.experts.{expert}", c.hidden_size, c.moe_intermediate_size)
    if c.n_shared_experts:
        tensors |= _mlp(f"{prefix}.shared_experts", c.hidden_size, c.shared_intermediate_size)
    return tensors


def _target_tensors(c: ModelConfig) -> dict[str, Shape]:
    tensors: dict[str, Shape] = {"model.embed_tokens.weight": (c.vocab_size, c.hidden_size)}
    for index in range(c.num_hidden_layers):
        layer = f"model.layers.{index}"
        tensors[f"{layer}.input_layernorm.weight"] = (c.hidden_size,)
        tensors |= _attention(f"{layer}.self_attn", c)
        tensors[f"{layer}.post_attention_layernorm.weight"] = (c.hidden_size,)
        if c.is_moe(index):
            tensors |= _moe(f"{layer}.mlp", c)
        else:
            tensors |= _mlp(f"{layer}.mlp", c.hidden_size, c.intermediate_size)
    tensors["model.norm.weight"] = (c.hidden_size,)
    if not c.tie_word_embeddings:
        tensors["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    return tensors


def _drafter_tensors(c: DrafterConfig) -> dict[str, Shape]:
    query, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    attention = {
        "q_proj": (query, c.hidden_size),
        "k_proj": (keys, c.hidden_size),
        "v_proj": (keys, c.hidden_size),
        "o_proj": (c.hidden_size, query),
        "q_norm": (c.head_dim,),
        "k_norm": (c.head_dim,),
    }
    tensors: dict[str, Shape] = {}
    for layer in range(c.num_hidden_layers):
        tensors[f"layers.{layer}.input_layernorm.weight"] = (c.hidden_size,)
        tensors |= {f"layers.{layer}.self_attn.{name}.weight": shape for name, shape in attention.items()}
        tensors[f"layers.{layer}.post_attention_layernorm.weight"] = (c.hidden_size,)
        tensors |= _mlp(f"layers.{layer}.mlp", c.hidden_size, c.intermediate_size)
    tensors["fc.weight"] = (c.hidden_size, len(c.target_layer_ids) * c.hidden_size)
    tensors["hidden_norm.weight"] = tensors["norm.weight"] = (c.hidden_size,)
    if c.branch:
        tensors |= {f"branch.{name}.weight": (c.branch.rank, c.hidden_size) for name in BRANCH_MAPS}
    return tensors


def skip_reason(name: str, config: ModelConfig | DrafterConfig) -> tuple[str, str] | None:
    """Why a tensor is left out, and the module that it belongs to; None for one that is kept."""
    if name.startswith(VISION_PREFIXES):
        return "vision", name.split(".")[0]
    if name.endswith("rotary_emb.inv_freq"):
        return "rotary_frequencies", name.removesuffix(".inv_freq")
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer and isinstance(config, ModelConfig) and int(layer[1]) >= config.num_hidden_layers:
        return "multi_token_prediction", layer[0].rstrip(".")
    return None


def check_tensors(
    found: Mapping[str, tuple[str, Shape]], config: ModelConfig | DrafterConfig, where: str
) -> dict[str, str]:
    """Raise one CheckpointError that names all tensors missing, extra, of the wrong shape or dtype.

    `found` is name -> (dtype, shape), dtypes spelled as in KDTR. Returns the format (fp8, int4) of each weight that is
    quantised.
    """
    weights = expected_tensors(config)
    formats = formats_of(weights, found)
    ragged = not_in_groups(weights, formats)
    if ragged:
        raise CheckpointError(f"{where}: {len(ragged)} weights cannot be INT4 ({abbreviated(ragged)})")
    expected = {
        name: kind
        for weight, shape in weights.items()
        for name, kind in stored_tensors(weight, shape, formats.get(weight, "plain")).items()
    }
    shapes, dtypes = [], []
    for name, (dtype, shape) in found.items():
        wanted, size = expected.get(name, ((dtype,), shape))
        if shape != size:
            shapes.append(f"{name}: expected {list(size)}, found {list(shape)}")
        if dtype not in wanted:
            dtypes.append(f"{name}: expected {', '.join(wanted)}, found {dtype}")
    problems = {
        "missing": [name for name in expected if name not in found],
        "extra": [name for name in found if name not in expected],
        "of the wrong shape": shapes,
        "of the wrong dtype": dtypes,
    }
    lines = [f"{len(names)} {what} ({abbreviated(names)})" for what, names in problems.items() if names]
    if lines:
        raise CheckpointError(f"{where}: tensors do not fit config.json: {'; '.join(lines)}")
    if mixed := mixed_experts(weights, formats):
        raise CheckpointError(
            f"{where}: the routed experts of a layer must be of one format; they differ in {abbreviated(mixed)}"
        )
    return formats


def abbreviated(names: list[str]) -> str:
    """The first names, and how many more there are."""
    rest = len(names) - LISTED
    return "; ".join(names[:LISTED]) + (f"; and {rest} more" if rest > 0 else "")
