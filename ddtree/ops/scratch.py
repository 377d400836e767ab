"""How much scratch the kernels want for the largest call of an engine. Sizes are the launchers' own."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree.config import DrafterConfig, ModelConfig
from kernels_numba import attention, block_attention, experts, topk

Sizes = dict[str, tuple[int, Any]]


def largest_scratch(
    config: ModelConfig, drafter: DrafterConfig | None, max_rows: int, capacity: int, rounded: bool
) -> Sizes:
    """Elements and dtype of each scratch, by name, for `max_rows` rows over caches of `capacity` rows.

    `rounded` says whether inputs of products are rounded to bf16 into scratch of their own.
    """
    sizes = _target(config, max_rows, capacity)
    if drafter is not None:
        sizes |= _drafter(config, drafter, capacity)
    if rounded:
        inputs = _target_input(config) * max_rows
        if drafter is not None:
            inputs = max(inputs, _drafter_input(config, drafter, max_rows))
        sizes["gemm input"] = inputs, np.uint16
    return sizes


def _target(config: ModelConfig, rows: int, capacity: int) -> Sizes:
    c, chosen = config, config.experts_a_row
    sizes: Sizes = {
        "attention": (
            attention.attention_scratch(rows, c.num_attention_heads, c.kv_lora_rank, capacity),
            np.float32,
        ),
        "argmax": (2 * rows, np.uint64),
    }
    if any(c.is_moe(layer) for layer in range(c.num_hidden_layers)):
        sizes["experts pair_out"] = rows * chosen * c.hidden_size, np.float32
        sizes["experts plan"] = (
            experts.plan_size(rows, c.n_routed_experts + c.n_shared_experts, chosen),
            np.int32,
        )
    return sizes


def _drafter(config: ModelConfig, drafter: DrafterConfig, capacity: int) -> Sizes:
    d, groups = drafter, drafter.horizon * topk.num_groups(config.vocab_size)
    size = block_attention.block_attention_scratch(
        *(d.block_size, d.num_attention_heads, d.num_key_value_heads, d.head_dim),
        *(capacity, d.context_window or 0),
    )
    return {
        "block_attention": (size, np.float32),
        "topk keys": (groups, np.uint64),
        "topk sums": (groups, np.float32),
    }


def _target_input(config: ModelConfig) -> int:
    """The widest row that a product of the target takes."""
    c, heads = config, config.num_attention_heads
    widths = (c.hidden_size, c.q_lora_rank or 0, c.intermediate_size, c.shared_intermediate_size)
    return max(*widths, heads * c.qk_nope_head_dim, heads * c.kv_lora_rank, heads * c.v_head_dim)


def _drafter_input(config: ModelConfig, drafter: DrafterConfig, max_rows: int) -> int:
    """Elements of the largest input of the drafter's products: context features, or rows of a block."""
    d = drafter
    features = max_rows * max(len(d.target_layer_ids) * config.hidden_size, d.hidden_size)
    width = max(d.hidden_size, d.num_attention_heads * d.head_dim, d.intermediate_size)
    return max(features, d.block_size * width)
