"""LatentCache: the committed context, one latent and one rotary row a position and layer, and nothing else."""

from __future__ import annotations

from typing import Any

from ddtree.config import ModelConfig
from ddtree.errors import CapacityError


class LatentCache:
    """`latent` [layers, capacity, kv_lora_rank] and `rope` [layers, capacity, rope dim], with views by layer.

    Rows below `context_len` are committed. Rows above it may hold anything and are never read before written.
    """

    def __init__(self, config: ModelConfig, capacity: int, ops: Any):
        layers = config.num_hidden_layers
        self.capacity = capacity
        self.context_len = 0
        self.latent = ops.empty_cache((layers, capacity, config.kv_lora_rank))
        self.rope = ops.empty_cache((layers, capacity, config.qk_rope_head_dim))
        self.latents = [self.latent[layer] for layer in range(layers)]
        self.ropes = [self.rope[layer] for layer in range(layers)]

    def check_room(self, num_rows: int) -> None:
        """Raise CapacityError unless `num_rows` more rows fit."""
        if self.context_len + num_rows > self.capacity:
            raise CapacityError(
                f"cache: {num_rows} rows on top of {self.context_len} committed ones do not fit into "
                f"{self.capacity}; open the engine with a larger cache or shorten the prompt"
            )

    @property
    def arrays(self) -> list[Any]:
        """Every layer's caches, for compaction."""
        return self.latents + self.ropes
