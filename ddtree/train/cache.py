"""A cache of latents for many sequences of their own lengths, as generation uses it."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from ddtree.config import ModelConfig


class Cache:
    """Latent and rotated key of each position, f32 [layers, sequences, positions, rank + rope]; `lengths` of each.

    The prompts go through at once, padded on the right: `start` says how long each is. From then on it is stepping:
    one token a sequence, written at its length; `advance` after each.
    """

    def __init__(self, config: ModelConfig, sequences: int, positions: int, device: torch.device):
        width = config.kv_lora_rank + config.qk_rope_head_dim
        shape = (config.num_hidden_layers, sequences, positions, width)
        self.keys = torch.zeros(shape, device=device)
        self.index = torch.arange(sequences, device=device)
        self.places = torch.arange(positions, device=device)
        self.stepping = False
        self.most = 0

    def part(self, rows: slice) -> Cache:
        """The same memory for some of the sequences, while their prompts go through."""
        part = copy.copy(self)
        part.keys = self.keys[:, rows]
        return part

    def put(self, layer: int, latent: Tensor, key: Tensor) -> None:
        """Write the rows of a call: [B, S, .] from position 0, or one row at each sequence's length."""
        rows = torch.cat([latent, key.to(latent.dtype)], dim=-1).to(self.keys.dtype)
        if self.stepping:
            self.keys[layer][self.index, self.lengths] = rows[:, 0]
        else:
            self.keys[layer][:, : rows.shape[1]] = rows

    def rows(self, layer: int) -> Tensor:
        """The positions that any sequence has, the new one included."""
        return self.keys[layer][:, : self.most]

    def start(self, lengths: Tensor, most: int) -> None:
        """The prompts are in: each sequence has `lengths` rows, the longest of them `most`."""
        self.lengths, self.stepping = lengths.clone(), True
        self._see(most + 1)

    def advance(self) -> None:
        """The token of this step is in."""
        self.lengths = self.lengths + 1
        self._see(self.most + 1)

    def _see(self, most: int) -> None:
        self.most = most
        hidden = self.places[:most] > self.lengths.unsqueeze(1)
        self.hidden = torch.zeros(hidden.shape, device=hidden.device).masked_fill(hidden, float("-inf"))
