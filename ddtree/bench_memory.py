"""Bytes that a whole model holds by stage, counted from its first layers alone; needs no GPU and no weights."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass, replace
from typing import Any

from ddtree.bench_random import RandomBundle
from ddtree.checkpoint_names import expected_tensors
from ddtree.config import DrafterConfig
from ddtree.engine_memory import bytes_of
from ddtree.ops.plan_ops import PlanOps
from ddtree.quantised import Fp8Matrix, Int4Matrix

GPU_BYTES = 141e9  # of an H200, as it is sold
ITEM_BYTES = {"f32": 4, "bf16": 2}


def stage_bytes(
    whole: RandomBundle, drafter: DrafterConfig | None, dtype: str, positions: int
) -> tuple[list[int], list[int]]:
    """Bytes of weights and of caches of `positions` rows, of embedding, each layer, head, and drafter in that order.

    Weights are counted as the loader places them, on a model of one layer of each kind.
    """
    config, item = whole.config, ITEM_BYTES[dtype]
    dense = min(config.first_k_dense_replace, 1)
    cut = replace(config, num_hidden_layers=dense + 1, first_k_dense_replace=dense)
    target = replace(whole, config=cut).target_weights(1, PlanOps(dtype))
    kinds = [
        target.layers[-1] if config.is_moe(n) else target.layers[0] for n in range(config.num_hidden_layers)
    ]
    head = 0 if target.head is target.embedding else held(target.head)
    weights = [held(target.embedding), *map(held, kinds), head]
    cached = positions * (config.kv_lora_rank + config.qk_rope_head_dim) * item
    caches = [0, *[cached] * len(kinds), 0]
    if drafter is not None:
        d = drafter
        weights.append(item * sum(math.prod(shape) for shape in expected_tensors(d).values()))
        seen = min(positions, d.context_window or positions)
        caches.append(2 * item * d.num_hidden_layers * d.num_key_value_heads * d.head_dim * seen)
    return weights, caches


def held(weights: Any) -> int:
    """Bytes of an array, or of all arrays in a dataclass of weights."""
    if weights is None:
        return 0
    if is_dataclass(weights) and not isinstance(weights, Int4Matrix | Fp8Matrix):
        return sum(held(getattr(weights, field.name)) for field in fields(weights))
    return bytes_of(weights)
