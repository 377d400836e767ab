"""The target in PyTorch: DeepSeek-V3's layers, written for training and for fast generation of many sequences.

Rotary rows are in halves, as in KDTR files. Every expert computes every token and a gate of zero leaves it out: as
many experts as a small model has make one product that is faster than sorting tokens, and needs no dynamic shapes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddtree.config import ModelConfig
from ddtree.model import LORA_NORM_EPS
from ddtree.train.cache import Cache
from ddtree.train.layers import RmsNorm, SwiGlu, attend, matrix, rotary, rotate


class Gate(nn.Module):
    """noaux_tc: sigmoid scores in f32, chosen by scores + bias, weighted by the unbiased scores.

    While `counting`, `load` counts how often each expert was chosen since `balance` was last called.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config, self.counting = config, False
        self.weight = matrix(config.n_routed_experts, config.hidden_size)
        self.register_buffer("bias", torch.zeros(config.n_routed_experts))
        self.register_buffer("load", torch.zeros(config.n_routed_experts), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Gates f32 [rows, routed], zero where not chosen, of x [rows, hidden]."""
        with torch.autocast(x.device.type, enabled=False):
            scores = functional.linear(x.float(), self.weight.float()).sigmoid()
        chosen = (scores.detach() + self.bias).topk(self.config.num_experts_per_tok, dim=-1).indices
        experts = torch.arange(self.config.n_routed_experts, device=x.device)
        # a mask, as the gradient of a gather is a scatter: slow where sums keep their order
        mask = (chosen.unsqueeze(-1) == experts).any(dim=1).float()
        weights = scores * mask
        if self.config.norm_topk_prob:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        if self.counting:
            self.load += mask.sum(dim=0)
        return weights * self.config.routed_scaling_factor

    @torch.no_grad()
    def balance(self, step: float) -> None:
        """bias += step * sign(mean load - load), and forget the load."""
        self.bias += step * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


class Moe(nn.Module):
    """Routed experts and, behind them, shared ones whose gate is 1; gate and up [E + S, I, H], down [E + S, H, I]."""

    def __init__(self, config: ModelConfig, out_std: float):
        super().__init__()
        hidden, width = config.hidden_size, config.moe_intermediate_size
        self.shared = config.n_shared_experts
        count = config.n_routed_experts + self.shared
        self.router = Gate(config)
        self.gate, self.up = (nn.Parameter(torch.randn(count, width, hidden) * 0.02) for _ in range(2))
        self.down = nn.Parameter(torch.randn(count, hidden, width) * out_std)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        gates = functional.pad(self.router(rows), (0, self.shared), value=1.0)
        count, width, hidden = self.gate.shape
        inner = functional.silu(functional.linear(rows, self.gate.reshape(-1, hidden)))
        inner = inner * functional.linear(rows, self.up.reshape(-1, hidden))
        inner = inner.unflatten(1, (count, width)) * gates.to(inner.dtype).unsqueeze(-1)
        down = self.down.transpose(0, 1).reshape(hidden, count * width)
        return functional.linear(inner.flatten(1), down).reshape(x.shape)


class Attention(nn.Module):
    """MLA. Whole sequences go through keys and values; one new token a sequence meets the latents of a cache."""

    def __init__(self, config: ModelConfig, index: int, out_std: float):
        super().__init__()
        c, heads = config, config.num_attention_heads
        self.config, self.index = c, index
        if c.q_lora_rank is not None:
            self.q_a = matrix(c.q_lora_rank, c.hidden_size)
            self.q_a_norm = RmsNorm(c.q_lora_rank, LORA_NORM_EPS)
        self.q_b = matrix(heads * c.q_head_dim, c.q_lora_rank or c.hidden_size)
        self.kv_a = matrix(c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size)
        self.kv_a_norm = RmsNorm(c.kv_lora_rank, LORA_NORM_EPS)
        self.kv_b = matrix(heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
        self.o = matrix(c.hidden_size, heads * c.v_head_dim, out_std)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of x [B, S, H]: q_nope and rotated q_rope [B, S, heads, .], normed latent and rotated key [B, S, .]."""
        c = self.config
        source = self.q_a_norm(functional.linear(x, self.q_a)) if c.q_lora_rank is not None else x
        query = functional.linear(source, self.q_b).unflatten(-1, (c.num_attention_heads, c.q_head_dim))
        q_nope, q_rope = query.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        latent, key = functional.linear(x, self.kv_a).split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        key = rotate(key.unsqueeze(-2), cos, sin).squeeze(-2)
        return q_nope, rotate(q_rope, cos, sin), self.kv_a_norm(latent), key

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None) -> Tensor:
        c = self.config
        q_nope, q_rope, latent, key = self.project(x, cos, sin)
        if cache is not None:
            cache.put(self.index, latent, key)
            if cache.stepping:
                return self.step(q_nope, q_rope, cache)
        kv = functional.linear(latent, self.kv_b).unflatten(-1, (c.num_attention_heads, -1))
        k_nope, value = kv.split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)
        shared = key.to(k_nope.dtype).unsqueeze(-2).expand(*k_nope.shape[:-1], -1)
        query = torch.cat([q_nope, q_rope.to(q_nope.dtype)], dim=-1)
        keys = torch.cat([k_nope, shared], dim=-1)
        value = functional.pad(value, (0, c.q_head_dim - c.v_head_dim))  # the fast kernel wants one width
        q, k, v = (t.transpose(1, 2) for t in (query, keys, value))
        out = attend(q, k, v, c.softmax_scale)
        return functional.linear(out.transpose(1, 2)[..., : c.v_head_dim].flatten(-2), self.o)

    def step(self, q_nope: Tensor, q_rope: Tensor, cache: Cache) -> Tensor:
        """Absorbed attention of one token a sequence over the rows that its sequence has."""
        c = self.config
        kv_b = self.kv_b.unflatten(0, (c.num_attention_heads, -1))
        w_k, w_v = kv_b.split([c.qk_nope_head_dim, c.v_head_dim], dim=1)
        query = torch.cat([torch.einsum("bhn,hnr->bhr", q_nope[:, 0], w_k), q_rope[:, 0]], dim=-1)
        keys = cache.rows(self.index)
        scores = torch.bmm(query, keys.transpose(1, 2)) * c.softmax_scale + cache.hidden.unsqueeze(1)
        latents = torch.bmm(scores.softmax(dim=-1), keys[..., : c.kv_lora_rank])
        out = torch.einsum("bhr,hvr->bhv", latents, w_v)
        return functional.linear(out.flatten(1), self.o).unsqueeze(1)


class Layer(nn.Module):
    """Pre-norm attention and MLP on an f32 residual, with dropout on both branches."""

    def __init__(self, config: ModelConfig, index: int, dropout: float):
        super().__init__()
        out_std = 0.02 / math.sqrt(2 * config.num_hidden_layers)
        self.input_norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, index, out_std)
        self.post_norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        dense = SwiGlu(config.hidden_size, config.intermediate_size, out_std=out_std)
        self.mlp = Moe(config, out_std) if config.is_moe(index) else dense
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None) -> Tensor:
        x = x + self.dropout(self.attention(self.input_norm(x), cos, sin, cache))
        return x + self.dropout(self.mlp(self.post_norm(x)))


class Target(nn.Module):
    """The whole model. Built without dropout, as generation and the drafter use it, unless told otherwise."""

    def __init__(self, config: ModelConfig, dropout: float = 0.0):
        super().__init__()
        assert not config.tie_word_embeddings and config.topk_method == "noaux_tc" and config.n_group == 1
        self.config = config
        self.embedding = matrix(config.vocab_size, config.hidden_size)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(config, i, dropout) for i in range(config.num_hidden_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.head = matrix(config.vocab_size, config.hidden_size)
        cos, sin = rotary(config.rope, config.qk_rope_head_dim, config.max_position_embeddings)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Logits [B, S, V] of tokens i64 [B, S]; on a cache that is stepping, S = 1 and rows stand at its lengths."""
        return functional.linear(self.run(tokens, (), cache)[0], self.head)

    def run(
        self, tokens: Tensor, feature_layers: Sequence[int], cache: Cache | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The normed last hidden states [B, S, H] and the features [B, S, F x H]: outputs of `feature_layers`."""
        stepping = cache is not None and cache.stepping
        at = cache.lengths.unsqueeze(1) if stepping else slice(0, tokens.shape[1])
        cos, sin, kept = self.cos[at], self.sin[at], {}
        x = self.dropout(functional.embedding(tokens, self.embedding))
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, cache)
            if index in feature_layers:
                kept[index] = x
        features = torch.cat([kept[index] for index in feature_layers], dim=-1) if feature_layers else None
        return self.norm(x), features

    def gates(self) -> list[Gate]:
        """The routers of all MoE layers."""
        return [layer.mlp.router for layer in self.layers if isinstance(layer.mlp, Moe)]
