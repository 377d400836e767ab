"""What a forward pass must move and compute, from a config alone: bytes, FLOPs, and the least time they take.

On a target with experts the rows of a tree touch more of them than one row does, which no published budget rule counts:
`expected_experts` says how many when rows choose independently; recorded routing may say otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddtree.checkpoint_names import expected_tensors
from ddtree.config import DrafterConfig, ModelConfig

F32_BYTES = 4  # norms, router


@dataclass(frozen=True)
class WeightBytes:
    """Bytes an element: of matrices, of routed experts' matrices (INT4 with its scales: 0.5625) and of the cache."""

    matrices: float = 2.0
    experts: float = 2.0
    cache: float = 2.0


@dataclass(frozen=True)
class Machine:
    """Bytes and FLOPs a second that a machine reaches; of several GPUs, all together."""

    bytes_per_second: float
    flops_per_second: float


def expected_experts(routed: int, chosen: int, rows: Any) -> Any:
    """Distinct experts that `rows` rows touch, each of which chooses `chosen` of `routed` independently and evenly."""
    return routed * (1 - (1 - chosen / routed) ** rows)


def layer_parameters(config: ModelConfig) -> dict[str, int]:
    """Elements of a layer's matrices: attention, the dense MLP, one routed expert, all shared experts, the router."""
    c, heads, q_input = config, config.num_attention_heads, config.q_lora_rank or config.hidden_size
    query = (c.hidden_size * c.q_lora_rank if c.q_lora_rank else 0) + q_input * heads * c.q_head_dim
    keys = c.hidden_size * (c.kv_lora_rank + c.qk_rope_head_dim)
    absorbed = heads * c.kv_lora_rank * (c.qk_nope_head_dim + c.v_head_dim)
    expert = 3 * c.hidden_size * c.moe_intermediate_size
    return {
        "attention": query + keys + absorbed + heads * c.v_head_dim * c.hidden_size,
        "dense": 3 * c.hidden_size * c.intermediate_size,
        "expert": expert,
        "shared": c.n_shared_experts * expert,
        "router": c.hidden_size * c.n_routed_experts,
    }


def forward_bytes(
    config: ModelConfig,
    rows: float,
    context_len: int,
    weights: WeightBytes | None = None,
    experts: Sequence[float] | None = None,
) -> float:
    """The least bytes of a forward of `rows` rows after `context_len` positions: weights and cache rows, each once.

    `experts` are the distinct routed experts touched in each MoE layer; `expected_experts` of each by default. Of a
    batch give its sequences' rows and positions together: each sequence has its own cache.
    """
    c, w, of = config, weights or WeightBytes(), layer_parameters(config)
    moe_layers = sum(c.is_moe(layer) for layer in range(c.num_hidden_layers))
    if experts is None:
        experts = [expected_experts(c.n_routed_experts, c.num_experts_per_tok, rows)] * moe_layers
    norms = 2 * c.hidden_size + c.kv_lora_rank + (c.q_lora_rank or 0)
    each = of["attention"] * w.matrices + norms * F32_BYTES
    moe = of["shared"] * w.matrices + of["router"] * F32_BYTES
    total = c.num_hidden_layers * each + moe_layers * moe + sum(experts) * of["expert"] * w.experts
    total += (c.num_hidden_layers - moe_layers) * of["dense"] * w.matrices
    total += c.vocab_size * c.hidden_size * w.matrices  # the head; of the embedding only the rows' own
    cache = c.num_hidden_layers * (context_len + rows) * (c.kv_lora_rank + c.qk_rope_head_dim)
    return total + cache * w.cache


def forward_flops(config: ModelConfig, rows: float, context_len: int) -> float:
    """FLOPs of it: two for each weight that a row meets, and absorbed attention over the context and the row itself."""
    c, of = config, layer_parameters(config)
    moe_layers = sum(c.is_moe(layer) for layer in range(c.num_hidden_layers))
    moe = of["shared"] + of["router"] + c.num_experts_per_tok * of["expert"]
    met = c.num_hidden_layers * of["attention"] + moe_layers * moe
    met += (c.num_hidden_layers - moe_layers) * of["dense"] + c.vocab_size * c.hidden_size
    pair = c.num_attention_heads * (2 * c.kv_lora_rank + c.qk_rope_head_dim)
    return 2 * rows * (met + c.num_hidden_layers * (context_len + 1) * pair)


def forward_seconds(
    config: ModelConfig,
    rows: float,
    context_len: int,
    machine: Machine,
    weights: WeightBytes | None = None,
    experts: Sequence[float] | None = None,
    sequences: int = 1,
) -> float:
    """The least seconds of a forward, whichever of bytes and FLOPs bounds it. No launch costs.

    `rows` are those of all `sequences` together, `context_len` the positions of each; `experts` as in `forward_bytes`.
    """
    moved = forward_bytes(config, rows, sequences * context_len, weights, experts)
    computed = forward_flops(config, rows, context_len)
    return max(moved / machine.bytes_per_second, computed / machine.flops_per_second)


def drafter_bytes(config: DrafterConfig, context_len: int, sequences: int = 1, item: float = 2.0) -> float:
    """The least bytes of a draft: its weights and the target's head once, its keys and values of each context."""
    weights = sum(math.prod(shape) for shape in expected_tensors(config).values())
    seen = min(context_len, config.context_window or context_len)
    keys = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return item * (weights + config.vocab_size * config.hidden_size + sequences * seen * keys)


def drafter_seconds(
    config: DrafterConfig, context_len: int, machine: Machine, sequences: int = 1, item: float = 2.0
) -> float:
    """The least seconds of a draft of one block a sequence: bytes, or two FLOPs for each weight that a slot meets."""
    met = config.vocab_size * config.hidden_size
    met += sum(math.prod(shape) for shape in expected_tensors(config).values())
    attended = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    flops = 2 * sequences * config.block_size * (met + attended * (context_len + config.block_size))
    moved = drafter_bytes(config, context_len, sequences, item)
    return max(moved / machine.bytes_per_second, flops / machine.flops_per_second)
