"""What the kernels can take: an engine is refused in one line when it is opened, no launch later on."""

from __future__ import annotations

from ddtree.config import DrafterConfig, ModelConfig
from ddtree.errors import UsageError
from ddtree.ops.scratch import drafter_products, target_products
from kernels_numba import accept, attention, block_attention, branch_scores, experts, gate, sample, topk
from kernels_numba.primitives_tree import MAX_BUDGET, MAX_DEPTHS

GRID_ROWS = 65_535  # blocks of a grid in y or z, where rows are
ELEMENTS = 2**31 - 1  # what i32 indices reach


def check_sizes(
    config: ModelConfig,
    drafter: DrafterConfig | None,
    max_budget: int,
    prefill_chunk: int,
    dtype: str,
    gemm: str,
) -> None:
    """Raise UsageError unless the kernels can run a model of these configs in calls of these sizes."""
    for name, value, most in _limits(config, drafter, max_budget, prefill_chunk, gemm):
        if value > most:
            raise UsageError(f"{name}: the backend cuda takes at most {most}, found {value}")
    widths = [
        ("kv_lora_rank", config.kv_lora_rank, attention.MULTIPLE),
        ("qk_rope_head_dim", config.qk_rope_head_dim, attention.MULTIPLE),
        ("the drafter's head_dim", drafter.head_dim if drafter else 0, block_attention.MULTIPLE),
    ]
    for name, value, of in widths:
        if value % of:
            raise UsageError(f"{name}: the backend cuda takes multiples of {of}, found {value}")
    half, width = dtype == "bf16", config.kv_lora_rank + config.qk_rope_head_dim
    shared = [("kv_lora_rank + qk_rope_head_dim", width, attention.key_warps_of(width, half))]
    if drafter:
        dim = drafter.head_dim
        shared.append(("the drafter's head_dim", dim, block_attention.key_warps_of(dim, half)))
    for name, value, key_warps in shared:
        if not key_warps:
            raise UsageError(
                f"{name}: {value} is more than the backend cuda has shared memory for with dtype {dtype}"
            )


def _limits(
    config: ModelConfig, drafter: DrafterConfig | None, max_budget: int, prefill_chunk: int, gemm: str
) -> list[tuple[str, int, int]]:
    """(name, value, the most that kernels take) of each size."""
    rows = max(max_budget + 1, prefill_chunk)
    limits = [
        ("max_budget", max_budget, min(MAX_BUDGET, accept.MAX_ROWS - 1, topk.MAX_K)),
        ("prefill_chunk", prefill_chunk, GRID_ROWS),
        ("vocab_size", config.vocab_size, min(topk.MAX_VOCAB, sample.MAX_VOCAB)),
        ("n_routed_experts", config.n_routed_experts, gate.MAX_EXPERTS),
        ("experts a row", config.experts_a_row, experts.MAX_CHOSEN),
        ("horizon", drafter.horizon if drafter else 0, MAX_DEPTHS),
    ]
    if drafter and drafter.branch:
        limits += [
            ("the branch head's candidates", drafter.candidates, branch_scores.MAX_CANDIDATES),
            ("the branch head's rank", drafter.branch.rank, branch_scores.MAX_RANK),
        ]
    products, size = [], config.moe_intermediate_size  # of the kernels' own products: (rows, heads, N, K)
    if any(config.is_moe(layer) for layer in range(config.num_hidden_layers)):
        products.append((rows * config.experts_a_row, 1, config.hidden_size, size))
    if gemm == "invariant":
        products += target_products(config, rows)
        products += drafter_products(config, drafter, rows) if drafter else []
    weight = max((heads * n * k for _, heads, n, k in products), default=0)
    inputs = max((count * heads * k for count, heads, _, k in products), default=0)
    return [
        *limits,
        ("elements of a weight", weight, ELEMENTS),
        (f"elements of the input of a product, with {rows} rows", inputs, ELEMENTS),
    ]
