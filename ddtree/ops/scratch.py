"""How much scratch the kernels want for the largest call of an engine. Sizes are the launchers' own."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree.config import DrafterConfig, ModelConfig
from kernels_numba import attention, block_attention, experts, linear, linear_fp8, topk

Sizes = dict[str, tuple[int, Any]]


def largest_scratch(
    config: ModelConfig,
    drafter: DrafterConfig | None,
    max_rows: int,
    capacity: int,
    gemm: str = "",
    fp8: bool = True,
) -> Sizes:
    """Elements and dtype of each scratch, by name, for `max_rows` rows over caches of `capacity` rows.

    `gemm` is what multiplies bf16 weights, "cublas" or "invariant", which take scratch for that; empty with f32 ones.
    Beside either, fp8 matrices of target or drafter take some, if there may be any (`fp8`).
    """
    sizes = _target(config, max_rows, capacity)
    if drafter is not None:
        sizes |= _drafter(config, drafter, capacity)
    if gemm == "cublas":
        inputs = _target_input(config) * max_rows
        if drafter is not None:
            inputs = max(inputs, _drafter_input(config, drafter, max_rows))
        sizes["gemm input"] = inputs, np.uint16
    if gemm:
        products = target_products(config, max_rows)
        if drafter is not None:
            products += drafter_products(config, drafter, max_rows)
        layers = [(n, *shape) for n, heads, *shape in products if heads == 1]
        quantised = max(linear_fp8.linear_fp8_scratch(*shape) for shape in layers) if fp8 else 0
        plain = max(linear.linear_scratch(*shape) for shape in products) if gemm == "invariant" else 0
        if count := max(plain, quantised):
            sizes["linear"] = count, np.float32
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


def target_products(config: ModelConfig, rows: int) -> list[tuple[int, int, int, int]]:
    """(rows, heads, N, K) of each product of the target with a weight in the matmul format."""
    c, heads, hidden = config, config.num_attention_heads, config.hidden_size
    nope, value, rank = c.qk_nope_head_dim, c.v_head_dim, c.kv_lora_rank
    found = [(rows, heads, rank, nope), (rows, heads, value, rank)]
    q_lora = c.q_lora_rank or 0
    pairs = [(q_lora + rank + c.qk_rope_head_dim, hidden), (heads * c.q_head_dim, q_lora or hidden)]
    pairs += [(hidden, heads * value), (c.vocab_size, hidden)]
    for width in (c.intermediate_size, c.shared_intermediate_size):
        pairs += [(width, hidden), (hidden, width)] if width else []
    return found + [(rows, 1, *pair) for pair in pairs]


def drafter_products(
    config: ModelConfig, drafter: DrafterConfig, max_rows: int
) -> list[tuple[int, int, int, int]]:
    """The same of the drafter: context features of all rows, and its block."""
    d, hidden = drafter, drafter.hidden_size
    queries, keys = d.num_attention_heads * d.head_dim, d.num_key_value_heads * d.head_dim
    found = [(max_rows, 1, hidden, len(d.target_layer_ids) * config.hidden_size), (max_rows, 1, keys, hidden)]
    pairs = [(queries, hidden), (keys, hidden), (hidden, queries), (d.vocab_size, hidden)]
    pairs += [(d.intermediate_size, hidden), (hidden, d.intermediate_size)]
    if d.branch:
        pairs.append((d.branch.rank, hidden))
        found.append((max_rows, 1, d.branch.rank, hidden))  # of its tables
    return found + [(d.block_size, 1, *pair) for pair in pairs]
