"""Which parameter of the PyTorch modules is which tensor of a checkpoint, both ways.

A name stands for a parameter or a slice of one: experts lie stacked here and one by one there.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from ddtree.config import ModelConfig
from ddtree.train.drafter import Drafter
from ddtree.train.target import Moe, Target

PROJECTIONS = ("gate", "up", "down")
TARGET_ATTENTION = {
    "q_a": "q_a_proj",
    "q_a_norm.weight": "q_a_layernorm",
    "q_b": "q_b_proj",
    "kv_a": "kv_a_proj_with_mqa",
    "kv_a_norm.weight": "kv_a_layernorm",
    "kv_b": "kv_b_proj",
    "o": "o_proj",
}
DRAFTER_ATTENTION = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
DRAFTER_ATTENTION |= {"q_norm.weight": "q_norm", "k_norm.weight": "k_norm"}


def target_views(model: Target) -> dict[str, Tensor]:
    """Checkpoint name -> the tensor it stands for: a view, so that it can be read and written."""
    views = {"model.embed_tokens.weight": model.embedding}
    for index, layer in enumerate(model.layers):
        prefix = f"model.layers.{index}"
        views[f"{prefix}.input_layernorm.weight"] = layer.input_norm.weight
        views |= _attention(layer.attention, f"{prefix}.self_attn", _query_names(model.config))
        views[f"{prefix}.post_attention_layernorm.weight"] = layer.post_norm.weight
        views |= (
            _moe(layer.mlp, f"{prefix}.mlp")
            if isinstance(layer.mlp, Moe)
            else _mlp(layer.mlp, f"{prefix}.mlp")
        )
    views["model.norm.weight"] = model.norm.weight
    views["lm_head.weight"] = model.head
    return views


def _query_names(config: ModelConfig) -> dict[str, str]:
    if config.q_lora_rank is not None:
        return TARGET_ATTENTION
    plain = {name: theirs for name, theirs in TARGET_ATTENTION.items() if not name.startswith("q_")}
    return plain | {"q_b": "q_proj"}


def drafter_views(model: Drafter) -> dict[str, Tensor]:
    """The same for a drafter."""
    views = {}
    for index, layer in enumerate(model.layers):
        prefix = f"layers.{index}"
        views[f"{prefix}.input_layernorm.weight"] = layer.input_norm.weight
        views |= _attention(layer.attention, f"{prefix}.self_attn", DRAFTER_ATTENTION)
        views[f"{prefix}.post_attention_layernorm.weight"] = layer.post_norm.weight
        views |= _mlp(layer.mlp, f"{prefix}.mlp")
    views["fc.weight"] = model.fc
    views["hidden_norm.weight"], views["norm.weight"] = model.hidden_norm.weight, model.norm.weight
    return views


def _attention(module: nn.Module, prefix: str, names: Mapping[str, str]) -> dict[str, Tensor]:
    parameters = dict(module.named_parameters())
    return {f"{prefix}.{theirs}.weight": parameters[ours] for ours, theirs in names.items()}


def _mlp(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}.{name}_proj.weight": getattr(module, name) for name in PROJECTIONS}


def _moe(module: Moe, prefix: str) -> dict[str, Tensor]:
    """Shared experts are one MLP there, as wide as all of them: gate and up by rows, down by columns."""
    routed = len(module.router.bias)
    views = {f"{prefix}.gate.weight": module.router.weight}
    views[f"{prefix}.gate.e_score_correction_bias"] = module.router.bias
    for expert in range(routed):
        for name in PROJECTIONS:
            views[f"{prefix}.experts.{expert}.{name}_proj.weight"] = getattr(module, name)[expert]
    if module.shared:
        for name in PROJECTIONS:
            views[f"{prefix}.shared_experts.{name}_proj.weight"] = getattr(module, name)[routed:]
    return views


def to_checkpoint(name: str, view: Tensor) -> np.ndarray:
    """A view's numbers in the checkpoint's shape, f32; shared experts, the only stack, become one matrix."""
    values = view.detach().float().cpu()
    if values.ndim == 3:
        values = values.transpose(0, 1) if name.endswith("down_proj.weight") else values
        values = values.flatten(1) if name.endswith("down_proj.weight") else values.flatten(0, 1)
    return np.ascontiguousarray(values.numpy())


@torch.no_grad()
def load(views: Mapping[str, Tensor], arrays: Mapping[str, np.ndarray]) -> None:
    """Fill the views with a checkpoint's arrays, whose names and shapes have been checked."""
    for name, view in views.items():
        values = torch.from_numpy(arrays[name].astype(np.float32))
        if view.ndim == 3:
            count, rows, columns = view.shape
            down = name.endswith("down_proj.weight")
            values = (
                values.reshape(rows, count, columns).transpose(0, 1) if down else values.reshape(view.shape)
            )
        view.copy_(values.to(view.device))
