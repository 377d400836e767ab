"""What an engine owns, allocated once: weights, caches, buffers, the state of rounds, the kernels' scratch.

The same code allocates for an engine and, on a backend that only counts, for the report of what one would take.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any

from ddtree.bundle import Bundle
from ddtree.cache import LatentCache
from ddtree.config import MAX_BUDGET
from ddtree.drafter import Drafter
from ddtree.engine_state import DeviceState
from ddtree.errors import UsageError
from ddtree.model import Model

PREFILL_CHUNK = 64  # rows a prompt goes through at once


@dataclass(frozen=True)
class EngineSizes:
    """The largest call: trees of `max_budget` nodes, `max_context` positions, prompts in chunks of `prefill_chunk`."""

    max_budget: int
    max_context: int
    prefill_chunk: int = PREFILL_CHUNK

    @classmethod
    def checked(
        cls, longest: int, max_budget: int, max_context: int | None, prefill_chunk: int
    ) -> EngineSizes:
        """Sizes for a model of `longest` positions, all of them when `max_context` is None; UsageError otherwise."""
        sizes = cls(max_budget, longest if max_context is None else max_context, prefill_chunk)
        for name, value, least, most in (
            ("max_budget", sizes.max_budget, 0, MAX_BUDGET),
            ("context", sizes.max_context, 1, longest),
            ("prefill_chunk", sizes.prefill_chunk, 1, MAX_BUDGET),
        ):
            if isinstance(value, bool) or not isinstance(value, Integral) or not least <= value <= most:
                raise UsageError(f"{name}: expected an integer from {least} to {most}, found {value!r}")
        return sizes

    @property
    def max_rows(self) -> int:
        """The most rows of one forward call."""
        return max(self.max_budget + 1, self.prefill_chunk)

    @property
    def capacity(self) -> int:
        """Rows of the caches: the context and the largest call on top of it."""
        return self.max_context + self.max_rows


@dataclass
class EngineParts:
    """`drafter` is None without one in the bundle, `state` on a backend whose rounds the host computes."""

    model: Model
    cache: LatentCache
    drafter: Drafter | None
    state: DeviceState | None


def allocate(bundle: Bundle, sizes: EngineSizes, ops: Any) -> EngineParts:
    """Allocate and load all that an engine of these sizes owns. Raises DeviceMemoryError, and KdtrError on loading."""
    config, drafter, rows = bundle.config, bundle.drafter_config, sizes.max_rows
    state = None
    if ops.name == "cuda":
        ops.reserve(config, drafter, rows, sizes.capacity, bundle.fp8)
        state = DeviceState(config.vocab_size, drafter, sizes.max_budget, sizes.prefill_chunk, ops)
    cache = LatentCache(config, sizes.capacity, ops)
    positions = sizes.max_context + (drafter.block_size if drafter else 0)
    weights = bundle.target_weights(positions, ops)
    model = Model(config, weights, rows, drafter.target_layer_ids if drafter else (), ops)
    if drafter is None:
        return EngineParts(model, cache, None, state)
    drafter_weights = bundle.drafter_weights(positions, ops)
    return EngineParts(model, cache, Drafter(drafter, drafter_weights, sizes.capacity, rows, ops), state)
