"""The one reordering a checkpoint gets: rotary rows from interleaved pairs to halves, and back.

Checkpoints keep a rotary pair in rows (2i, 2i + 1); the kernels rotate rows (i, i + d / 2). Permuting the rows
that make the query's and the shared key's rotary parts turns one into the other; scores, sums over these rows
of query times key, do not change.
"""

from __future__ import annotations

import numpy as np

from ddtree.config import DrafterConfig, ModelConfig

KEY = "self_attn.kv_a_proj_with_mqa.weight"
QUERIES = ("self_attn.q_b_proj.weight", "self_attn.q_proj.weight")


def rotary_weights(config: ModelConfig | DrafterConfig) -> list[str]:
    """Endings of the names of the weights to permute; none for a drafter or where halves are stored already."""
    if isinstance(config, DrafterConfig) or not config.rope_interleave:
        return []
    return [QUERIES[config.q_lora_rank is None], KEY]


def pairs_to_halves(dim: int) -> np.ndarray:
    """Source row of each row: 0, 2, 4, .. then 1, 3, 5, ..; i64[dim]."""
    return np.arange(dim).reshape(dim // 2, 2).T.reshape(-1)


def to_halves(weight: np.ndarray, name: str, config: ModelConfig) -> None:
    """Reorder the rotary rows of `weight` [rows, in] in place, from interleaved pairs to halves."""
    _reorder(weight, name, config, pairs_to_halves(config.qk_rope_head_dim))


def to_pairs(weight: np.ndarray, name: str, config: ModelConfig) -> None:
    """Undo `to_halves`, in place."""
    _reorder(weight, name, config, np.argsort(pairs_to_halves(config.qk_rope_head_dim)))


def _reorder(weight: np.ndarray, name: str, config: ModelConfig, order: np.ndarray) -> None:
    """Rows are [latent, rope] in the key's weight and [nope, rope] per head in the query's."""
    groups, plain = (1, config.kv_lora_rank)
    if not name.endswith(KEY):
        groups, plain = config.num_attention_heads, config.qk_nope_head_dim
    rotary = weight.reshape(groups, plain + config.qk_rope_head_dim, -1)[:, plain:]
    rotary[:] = rotary[:, order]
