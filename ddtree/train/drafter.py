"""The DFlash drafter in PyTorch: many blocks of many sequences in one pass.

A block at anchor c is [token c, MASK x (block_size - 1)] at positions c onward; it sees the target's features of the
`context_window` rows before c and itself, without causality (arXiv 2602.06036). Embedding and head are the target's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddtree.config import DrafterConfig
from ddtree.train.layers import RmsNorm, SwiGlu, matrix, rotary, rotate


class DrafterAttention(nn.Module):
    """Grouped-query attention of blocks over the context's and the blocks' own keys, with norms on each head."""

    def __init__(self, config: DrafterConfig, out_std: float):
        super().__init__()
        c = config
        self.config = c
        self.q = matrix(c.num_attention_heads * c.head_dim, c.hidden_size)
        self.k, self.v = (matrix(c.num_key_value_heads * c.head_dim, c.hidden_size) for _ in range(2))
        self.o = matrix(c.hidden_size, c.num_attention_heads * c.head_dim, out_std)
        self.q_norm, self.k_norm = (RmsNorm(c.head_dim, c.rms_norm_eps) for _ in range(2))

    def forward(self, x: Tensor, context: Tensor, at: tuple[Tensor, ...], bias: Tensor) -> Tensor:
        """x [B, A x block, H], context [B, S, H]; `at` is cos and sin of the context's and of x's positions."""
        c = self.config
        context_cos, context_sin, cos, sin = at
        query = rotate(self.q_norm(self._heads(x, self.q)), cos, sin)
        own = rotate(self.k_norm(self._heads(x, self.k)), cos, sin)
        far = rotate(self.k_norm(self._heads(context, self.k)), context_cos, context_sin)
        keys = torch.cat([far, own], dim=1)
        values = torch.cat([self._heads(context, self.v), self._heads(x, self.v)], dim=1)
        each = c.num_attention_heads // c.num_key_value_heads
        keys, values = (t.repeat_interleave(each, dim=2) for t in (keys, values))
        q, k, v = (t.to(bias.dtype).transpose(1, 2) for t in (query, keys, values))
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=c.head_dim**-0.5)
        return functional.linear(out.transpose(1, 2).flatten(-2), self.o)

    def _heads(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.linear(x, weight).unflatten(-1, (-1, self.config.head_dim))


class DrafterLayer(nn.Module):
    def __init__(self, config: DrafterConfig):
        super().__init__()
        out_std = 0.02 / (2 * config.num_hidden_layers) ** 0.5
        self.input_norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = DrafterAttention(config, out_std)
        self.post_norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGlu(config.hidden_size, config.intermediate_size, out_std=out_std)

    def forward(self, x: Tensor, context: Tensor, at: tuple[Tensor, ...], bias: Tensor) -> Tensor:
        x = x + self.attention(self.input_norm(x), context, at, bias)
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
        bias = visibility(anchors, length, c.block_size, c.context_window or length)
        x = functional.embedding(tokens.flatten(1), embedding).float()
        bias = bias.to(
            torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        )
        for layer in self.layers:
            x = layer(x, context, at, bias)
        return self.norm(x).unflatten(1, (count, c.block_size))[:, :, 1:]


def visibility(anchors: Tensor, length: int, block: int, window: int) -> Tensor:
    """Attention bias f32 [B, 1, A x block, length + A x block]: 0 where a block's row may look, else -inf.

    A block looks at the `window` rows before its anchor and at all of itself.
    """
    rows = torch.arange(length, device=anchors.device)
    far = (rows < anchors.unsqueeze(-1)) & (rows >= anchors.unsqueeze(-1) - window)  # [B, A, S]
    far = far.repeat_interleave(block, dim=1)
    owner = torch.arange(anchors.shape[1], device=anchors.device).repeat_interleave(block)
    near = (owner.unsqueeze(1) == owner).expand(len(anchors), -1, -1)
    seen = torch.cat([far, near], dim=-1).unsqueeze(1)
    return torch.zeros(seen.shape, device=anchors.device).masked_fill(~seen, float("-inf"))
