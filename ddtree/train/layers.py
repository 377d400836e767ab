"""Layers that the target and the drafter share: norm, rotary embedding, SwiGLU."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ddtree.rope import RopeConfig, rotary_tables

# The first that can; not cuDNN's, which is the fastest on a Hopper GPU but adds gradients in no fixed order
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
HIDDEN = -1e4  # added to a score it makes a weight of 0; no kernel stumbles over rows of it, as over -inf


class RmsNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in f32 under autocast too."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    """Attention of q [B, heads, S, D] over k and v [B, heads, T, D]: causal, or with `bias` on the scores instead."""
    with sdpa_kernel(KERNELS, set_priority=True):
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, is_causal=bias is None, scale=scale
        )


def matrix(rows: int, columns: int, std: float = 0.02) -> nn.Parameter:
    """A weight [out, in] of normal numbers."""
    return nn.Parameter(torch.randn(rows, columns) * std)


def rotary(rope: RopeConfig, dim: int, positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin, f32 [positions, dim / 2]."""
    cos, sin = rotary_tables(rope, dim, positions)
    return torch.from_numpy(cos).float(), torch.from_numpy(sin).float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of the last axis: x [.., positions, heads, D], cos and sin [.., positions, D / 2]; f32."""
    first, second = x.float().chunk(2, dim=-1)
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat([first * c - second * s, second * c + first * s], dim=-1)


class SwiGlu(nn.Module):
    """down(silu(gate x) * up x); gate and up [I, H], down [H, I]."""

    def __init__(self, hidden: int, width: int, std: float = 0.02, out_std: float = 0.02):
        super().__init__()
        self.gate, self.up = matrix(width, hidden, std), matrix(width, hidden, std)
        self.down = matrix(hidden, width, out_std)

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.silu(functional.linear(x, self.gate)) * functional.linear(x, self.up)
        return functional.linear(inner, self.down)
