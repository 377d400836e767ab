"""The target's continuations of many prompts at once, on a cache of latents."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddtree.train.cache import Cache
from ddtree.train.target import Target

PREFILL_ROWS = 1 << 16  # tokens that go through at once


@torch.inference_mode()
def continue_prompts(
    model: Target, prompts: Tensor, lengths: Tensor, temperatures: Sequence[float], generator: torch.Generator
) -> Tensor:
    """The tokens that follow, i64 [B, len(temperatures)]: token i is drawn at temperatures[i], greedily at 0.

    prompts i64 [B, S], padded on the right, with `lengths` i64 [B] tokens each; generator on their device.
    """
    count, new = len(prompts), len(temperatures)
    cache = Cache(model.config, count, prompts.shape[1] + new, prompts.device)
    logits = _prefill(model, prompts, lengths, cache)
    cache.start(lengths, int(lengths.max()))
    out = torch.empty((count, new), dtype=torch.int64, device=prompts.device)
    for index, temperature in enumerate(temperatures):
        out[:, index] = choose(logits, temperature, generator)
        if index + 1 < new:
            logits = model(out[:, index : index + 1], cache)[:, 0]
            cache.advance()
    return out


def _prefill(model: Target, prompts: Tensor, lengths: Tensor, cache: Cache) -> Tensor:
    """Logits [B, V] after each prompt, a part of the sequences at a time."""
    parts, each = [], max(1, PREFILL_ROWS // prompts.shape[1])
    for start in range(0, len(prompts), each):
        rows = slice(start, start + each)
        hidden, _ = model.run(prompts[rows], (), cache.part(rows))
        last = hidden[torch.arange(len(hidden), device=hidden.device), lengths[rows] - 1]
        parts.append(last @ model.head.T)
    return torch.cat(parts)


def choose(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Token ids i64 [B]: the greatest logit, or a draw from softmax(logits / temperature)."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    # the greatest of logits with Gumbel noise is a draw from their softmax
    noise = torch.empty_like(logits).exponential_(generator=generator).log()
    return (logits / temperature - noise).argmax(dim=-1)
