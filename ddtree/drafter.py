"""The DFlash drafter: one pass over a block of MASK tokens gives a distribution for each of the next positions.

Its context is the target's own hidden states of committed rows, projected once and cached as keys and values of every
layer. A block attends to that context (the last `context_window` rows of it) and to itself, without causality
(arXiv 2602.06036). It knows nothing of trees.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree.config import DrafterConfig
from ddtree.errors import UsageError
from ddtree.weights import DrafterLayerWeights, DrafterWeights


class Drafter:
    """Config, weights, the context's key and value caches, and scratch for `max_rows` context rows a call."""

    def __init__(
        self, config: DrafterConfig, weights: DrafterWeights, capacity: int, max_rows: int, ops: Any
    ):
        self.config, self.weights, self.ops = config, weights, ops
        c, block = config, config.block_size
        layers = range(c.num_hidden_layers)
        kv = (c.num_key_value_heads, c.head_dim)
        self.keys = [ops.empty_cache((capacity, *kv)) for _ in layers]
        self.values = [ops.empty_cache((capacity, *kv)) for _ in layers]
        self.context = ops.empty((max_rows, c.hidden_size))
        self.projected = ops.empty((max_rows, *kv))
        self.block_depths = ops.integers(np.arange(block))
        self.row_depths = ops.integers(np.arange(max_rows))
        self.residual, self.normed, self.branch = (ops.empty((block, c.hidden_size)) for _ in range(3))
        self.query, self.heads = (ops.empty((block, c.num_attention_heads, c.head_dim)) for _ in range(2))
        self.block_key, self.block_value = ops.empty((block, *kv)), ops.empty((block, *kv))
        self.gate, self.up = (ops.empty((block, c.intermediate_size)) for _ in range(2))
        self.logits = ops.empty((c.horizon, c.vocab_size))
        self.gated = ops.empty_f32((c.horizon, c.branch.rank)) if c.branch else None

    def fill_branch_tables(self, embedding: Any, head: Any) -> None:
        """Make the branch head's two tables of the target's embedding and head, once; nothing without a branch head.

        Raises UsageError for a quantised head, whose rows no operation gathers.
        """
        branch, ops = self.weights.branch, self.ops
        if branch is None:
            return
        if hasattr(head, "dtype_name"):
            raise UsageError(
                f"drafter: its branch head reads rows of the target's lm_head, which is {head.dtype_name}; "
                "use a drafter without a branch head"
            )
        tables = (embedding, branch.parent, branch.parent_table), (head, branch.child, branch.child_table)
        for rows, weight, out in tables:
            for start in range(0, out.shape[0], self.context.shape[0]):
                part = rows[start : start + self.context.shape[0]]
                token_ids, x = self.row_depths[: part.shape[0]], self.context[: part.shape[0]]
                ops.embed(token_ids, part, x)
                ops.wide_linear(x, weight, out[start : start + part.shape[0]])

    def extend(self, features: Any, context_len: Any) -> None:
        """Project features [M, F x hidden] of the rows context_len.. into every layer's key and value cache."""
        ops, config, rows = self.ops, self.config, features.shape[0]
        context, projected = self.context[:rows], self.projected[:rows]
        flat = projected.reshape(rows, -1)
        ops.linear(features, self.weights.fc, context)
        ops.rms_norm(context, self.weights.hidden_norm, config.rms_norm_eps, context)
        at = (self.weights.cos, self.weights.sin, self.row_depths[:rows], context_len)
        for layer, keys, values in zip(self.weights.layers, self.keys, self.values, strict=True):
            ops.linear(context, layer.k, flat)
            ops.rms_norm(projected, layer.k_norm, config.rms_norm_eps, projected)
            ops.rope(projected, *at, projected)
            ops.append_rows(projected, context_len, keys)
            ops.linear(context, layer.v, flat)
            ops.append_rows(projected, context_len, values)

    def draft(self, token_ids: Any, context_len: Any, embedding: Any, head: Any) -> Any:
        """Logits [horizon, V] of the tokens at depths 1..horizon after the root at position context_len.

        token_ids i32[block_size] = [root, MASK, MASK, ..]; embedding and head are the target's.
        """
        ops, config = self.ops, self.config
        ops.embed(token_ids, embedding, self.residual)
        eps, norms = config.rms_norm_eps, [layer.input_norm for layer in self.weights.layers]
        norms.append(self.weights.norm)
        ops.rms_norm(self.residual, norms[0], eps, self.normed)
        for index, layer in enumerate(self.weights.layers):
            self._attention(layer, index, context_len)
            ops.add_norm(self.residual, self.branch, layer.post_norm, eps, self.normed)
            ops.linear(self.normed, layer.mlp.gate, self.gate)
            ops.linear(self.normed, layer.mlp.up, self.up)
            ops.swiglu(self.gate, self.up, self.gate)
            ops.linear(self.gate, layer.mlp.down, self.branch)
            ops.add_norm(self.residual, self.branch, norms[index + 1], eps, self.normed)
        ops.linear(self.normed[1:], head, self.logits)
        return self.logits

    def branch_scores(
        self, token_ids: Any, log_probs: Any, block: Any, out_places: Any, out_log_probs: Any
    ) -> None:
        """What a depth's candidates are worth below each parent, of the block that `draft` saw last.

        token_ids i32 and log_probs f32 [horizon, P] are its top P; `block` and the outputs as in
        `reference.branch_scores`. Ask only where there is a branch head.
        """
        branch = self.weights.branch
        self.ops.linear(self.normed[1:], branch.gate, self.gated)
        self.ops.branch_scores(
            token_ids,
            log_probs,
            block,
            self.gated,
            branch.parent_table,
            branch.child_table,
            out_places,
            out_log_probs,
        )

    def _attention(self, layer: DrafterLayerWeights, index: int, context_len: Any) -> None:
        """Per-head norms, rotary on the block's queries and keys, then context and block together."""
        ops, eps, block = self.ops, self.config.rms_norm_eps, self.config.block_size
        at = (self.weights.cos, self.weights.sin, self.block_depths, context_len)
        for weight, norm, out in (
            (layer.q, layer.q_norm, self.query),
            (layer.k, layer.k_norm, self.block_key),
        ):
            ops.linear(self.normed, weight, out.reshape(block, -1))
            ops.rms_norm(out, norm, eps, out)
            ops.rope(out, *at, out)
        ops.linear(self.normed, layer.v, self.block_value.reshape(block, -1))
        ops.block_attention(
            self.query,
            self.keys[index],
            self.values[index],
            self.block_key,
            self.block_value,
            context_len,
            self.config.context_window or 0,
            self.config.head_dim**-0.5,
            self.heads,
        )
        ops.linear(self.heads.reshape(block, -1), layer.o, self.branch)
