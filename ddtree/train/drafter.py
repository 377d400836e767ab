"""The DFlash drafter in PyTorch: many blocks of many sequences in one pass.

A block at anchor c is [token c, MASK x (block_size - 1)] at positions c onward; it sees the target's features of the
`context_window` rows before c and itself, without causality (arXiv 2602.06036). Embedding and head are the target's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddtree.config import DrafterConfig
from ddtree.train.layers import HIDDEN, RmsNorm, SwiGlu, attend, matrix, rotary, rotate

TOGETHER = 8  # blocks of a sequence


class DrafterAttention(nn.Module):
    """Grouped-query attention of blocks over the context's and the blocks' own keys, with norms on each head.

    A few blocks of a sequence go together: they read its context's keys once and hide only one another's own.
    """

    def __init__(self, config: DrafterConfig, out_std: float):
        super().__init__()
        c = config
        self.config = c
        self.q = matrix(c.num_attention_heads * c.head_dim, c.hidden_size)
        self.k, self.v = (matrix(c.num_key_value_heads * c.head_dim, c.hidden_size) for _ in range(2))
        self.o = matrix(c.hidden_size, c.num_attention_heads * c.head_dim, out_std)
        self.q_norm, self.k_norm = (RmsNorm(c.head_dim, c.rms_norm_eps) for _ in range(2))

    def project(
        self, x: Tensor, context: Tensor, at: tuple[Tensor, ...], groups: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B x G, kv, each x rows, D] of G groups of `rows` rows, keys and values [B x G, kv, S + rows, D].

        x [B, G x rows, H], context [B, S, H]; `at` is cos and sin of the context's and of x's positions. The queries
        that share one of the kv key heads, `each` a row, stand below one another.
        """
        kv = self.config.num_key_value_heads
        context_cos, context_sin, cos, sin = at
        query = rotate(self.q_norm(self._heads(x, self.q)), cos, sin).to(dtype)
        own = rotate(self.k_norm(self._heads(x, self.k)), cos, sin)
        far = rotate(self.k_norm(self._heads(context, self.k)), context_cos, context_sin)
        keys = self._keys(far, own, groups).to(dtype)
        values = self._keys(self._heads(context, self.v), self._heads(x, self.v), groups).to(dtype)
        query = query.unflatten(2, (kv, -1)).unflatten(1, (groups, -1))  # [B, G, rows, kv, each, D]
        query = query.permute(0, 1, 3, 4, 2, 5).flatten(3, 4).flatten(0, 1)
        return query, keys.flatten(0, 1), values.flatten(0, 1)

    def merge(self, out: Tensor, groups: int) -> Tensor:
        """[B, G x rows, H] of what attention makes of those queries."""
        each = self.config.num_attention_heads // self.config.num_key_value_heads
        out = out.unflatten(0, (-1, groups)).unflatten(3, (each, -1))  # [B, G, kv, each, rows, D]
        return functional.linear(out.permute(0, 1, 4, 2, 3, 5).flatten(3).flatten(1, 2), self.o)

    def _heads(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.linear(x, weight).unflatten(-1, (-1, self.config.head_dim))

    @staticmethod
    def _keys(far: Tensor, own: Tensor, groups: int) -> Tensor:
        """[B, G, heads, S + rows, D]: each group's copy of the context's, and its own rows'."""
        far = far.unsqueeze(1).expand(-1, groups, -1, -1, -1)
        return torch.cat([far, own.unflatten(1, (groups, -1))], dim=2).transpose(2, 3)


class DrafterLayer(nn.Module):
    def __init__(self, config: DrafterConfig):
        super().__init__()
        out_std = 0.02 / (2 * config.num_hidden_layers) ** 0.5
        self.input_norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = DrafterAttention(config, out_std)
        self.post_norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGlu(config.hidden_size, config.intermediate_size, out_std=out_std)

    def forward(self, x: Tensor, context: Tensor, at: tuple[Tensor, ...], bias: Tensor) -> Tensor:
        """bias [B, G, each x rows, S + rows], as `DrafterAttention` stacks its queries."""
        groups, scale = bias.shape[1], self.attention.config.head_dim**-0.5
        q, k, v = self.before(x, context, at, groups, bias.dtype)
        return self.after(x, attend(q, k, v, scale, bias.flatten(0, 1).unsqueeze(1)), groups)

    def before(
        self, x: Tensor, context: Tensor, at: tuple[Tensor, ...], groups: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What attention is of."""
        return self.attention.project(self.input_norm(x), context, at, groups, dtype)

    def after(self, x: Tensor, out: Tensor, groups: int) -> Tensor:
        """The layer's output, once attention is done."""
        x = x + self.attention.merge(out, groups)
        return x + self.mlp(self.post_norm(x))


class Drafter(nn.Module):
    """fc and norm of the features, Qwen3 layers over blocks, the last norm."""

    def __init__(self, config: DrafterConfig, positions: int):
        super().__init__()
        hidden = config.hidden_size
        self.config = config
        self.fc = matrix(hidden, len(config.target_layer_ids) * hidden)
        self.hidden_norm = RmsNorm(hidden, config.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RmsNorm(hidden, config.rms_norm_eps)
        cos, sin = rotary(config.rope, config.head_dim, positions)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, features: Tensor, roots: Tensor, anchors: Tensor, embedding: Tensor) -> Tensor:
        """Normed hidden states [B, A, horizon, H]; times the target's head they are logits of depths 1, 2, ..

        features [B, S, F x H] of a sequence's rows, of which a block uses those before its anchor; roots and anchors
        i64 [B, A]: the token at each anchor and its position; embedding [V, H].
        """
        c, (batch, count) = self.config, anchors.shape
        context = self.hidden_norm(functional.linear(features, self.fc))
        tokens = torch.full((batch, count, c.block_size), c.mask_token_id, device=anchors.device)
        tokens[..., 0] = roots
        steps = torch.arange(c.block_size, device=anchors.device)
        positions = (anchors.unsqueeze(-1) + steps).flatten(1)
        length = features.shape[1]
        at = (self.cos[:length], self.sin[:length], self.cos[positions], self.sin[positions])
        x = functional.embedding(tokens.flatten(1), embedding).float()
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        bias = visibility(anchors, length, c.block_size, c.context_window or length).to(dtype)
        bias = bias.repeat(1, 1, c.num_attention_heads // c.num_key_value_heads, 1)
        for layer in self.layers:
            x = layer(x, context, at, bias)
        return self.norm(x).unflatten(1, (count, c.block_size))[:, :, 1:]


def visibility(anchors: Tensor, length: int, block: int, window: int) -> Tensor:
    """Attention bias f32 [B, G, rows, length + rows]: 0 where a block's row may look, else HIDDEN.

    A block looks at the `window` rows before its anchor and at all of itself. A group's rows are those of the same
    number of blocks, at most TOGETHER.
    """
    count = anchors.shape[1]
    together = max(n for n in range(1, TOGETHER + 1) if count % n == 0)
    places = torch.arange(length, device=anchors.device)
    far = (places < anchors.unsqueeze(-1)) & (places >= anchors.unsqueeze(-1) - window)  # [B, A, S]
    far = far.unflatten(1, (-1, together)).unsqueeze(3).expand(-1, -1, -1, block, -1).flatten(2, 3)
    owner = torch.arange(together * block, device=anchors.device) // block
    near = (owner.unsqueeze(1) == owner).expand(*far.shape[:2], -1, -1)
    seen = torch.cat([far, near], dim=-1)
    return torch.zeros(seen.shape, device=anchors.device).masked_fill(~seen, HIDDEN)
