"""The one reordering a checkpoint gets: rotary rows from interleaved pairs to halves, and back.

Checkpoints keep a rotary pair in rows (2i, 2i + 1); the kernels rotate rows (i, i + d / 2). Permuting the rows
that make the query's and the shared key's rotary parts turns one into the other; scores, sums over these rows
of query times key, do not change. A row of an INT4 weight takes its words and its scales along. Rows of fp8 share
scales in blocks of 128: bytes alone are permuted, so no row may leave its block. None does where the rotary width
divides 128 and the rows before it (128 and 512 by 64 in every published model); another shape is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ddtree.checkpoint_formats import MATRICES
from ddtree.config import DrafterConfig, ModelConfig
from ddtree.errors import CheckpointError
from ddtree.quantised import BLOCK

KEY = "self_attn.kv_a_proj_with_mqa.weight"
QUERIES = ("self_attn.q_b_proj.weight", "self_attn.q_proj.weight")


def rotary_weights(config: ModelConfig | DrafterConfig, formats: Mapping[str, str]) -> list[str]:
    """Endings of the names of the tensors to permute; none for a drafter or where halves are stored already."""
    if isinstance(config, DrafterConfig) or not config.rope_interleave:
        return []
    weights = [QUERIES[config.q_lora_rank is None], KEY]
    packed = [name for name in weights if any(formats[w] == "int4" for w in formats if w.endswith(name))]
    return weights + [name + ending for name in packed for ending in MATRICES["int4"]]


def check_blocks(formats: Mapping[str, str], config: ModelConfig | DrafterConfig, where: str) -> None:
    """CheckpointError where the permutation would move a row of an fp8 weight to another block of scales."""
    endings = tuple(rotary_weights(config, {}))
    for name, stored in formats.items():
        if stored != "fp8" or not name.endswith(endings or "\0"):
            continue
        groups, plain = _layout(name, config)
        rows = np.arange(groups * (plain + config.qk_rope_head_dim))[:, None]
        moved = rows.copy()
        to_halves(moved, name, config)
        crossing = np.flatnonzero(moved // BLOCK != rows // BLOCK)
        if len(crossing):
            raise CheckpointError(
                f"{where}: {name}: fp8 scales of {BLOCK} rows cut a rotary part ({config.qk_rope_head_dim} rows after "
                f"{plain}) at row {crossing[0]}: its pairs cannot be reordered; give a bf16 checkpoint"
            )


def pairs_to_halves(dim: int) -> np.ndarray:
    """Source row of each row: 0, 2, 4, .. then 1, 3, 5, ..; i64[dim]."""
    return np.arange(dim).reshape(dim // 2, 2).T.reshape(-1)


def to_halves(weight: np.ndarray, name: str, config: ModelConfig) -> None:
    """Reorder the rotary rows of `weight` [rows, in] in place, from interleaved pairs to halves."""
    _reorder(weight, name, config, pairs_to_halves(config.qk_rope_head_dim))


def to_pairs(weight: np.ndarray, name: str, config: ModelConfig) -> None:
    """Undo `to_halves`, in place."""
    _reorder(weight, name, config, np.argsort(pairs_to_halves(config.qk_rope_head_dim)))


def _layout(name: str, config: ModelConfig) -> tuple[int, int]:
    """(groups, rows before the rotary ones of each): rows are [latent, rope] in the key, [nope, rope] in each query."""
    if KEY in name:
        return 1, config.kv_lora_rank
    return config.num_attention_heads, config.qk_nope_head_dim


def _reorder(weight: np.ndarray, name: str, config: ModelConfig, order: np.ndarray) -> None:
    groups, plain = _layout(name, config)
    rotary = weight.reshape(groups, plain + config.qk_rope_head_dim, -1)[:, plain:]
    rotary[:] = rotary[:, order]
