"""The DFlash drafter: one pass over a block of MASK tokens gives a distribution for each of the next positions.

Its context is the target's own hidden states of committed rows, projected once and cached as keys and values of every
layer. A block attends to that context (the last `context_window` rows of it) and to itself, without causality
(arXiv 2602.06036). It knows nothing of trees.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree.config import DrafterConfig
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
