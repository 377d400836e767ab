"""The decode loop: autoregressive, chain and tree are one loop over different trees. No arithmetic is done here.

A round commits the tokens of the accepted path and the bonus token, cut at a stop token and at the tokens wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from numbers import Integral

import numpy as np

from ddtree.config import DecodeConfig
from ddtree.engine import Engine
from ddtree.errors import UsageError
from ddtree.rounds import STAGES, HostRounds, Round, check_shape
from ddtree.rounds_device import DeviceRounds, check_built

__all__ = ["STAGES", "Round", "checked_prompt", "decode"]


def decode(
    engine: Engine, prompt_ids: Sequence[int], config: DecodeConfig, sequence: int = 0
) -> Iterator[Round]:
    """Decode after a prompt, a round at a time, the prefill first; everything is checked before it starts.

    `sequence` is the prompt's index for position-keyed sampling. Raises UsageError for an empty prompt, one that
    leaves no room, ids outside the vocabulary, a shape that is unknown or needs more than the drafter gives, a budget
    above the engine's or a missing drafter; NumericsError when the target's logits cannot decide a token.
    """
    prompt = checked_prompt(engine, prompt_ids)
    check_shape(engine, config)
    if config.method != "ar" and config.budget > engine.max_budget:
        raise UsageError(
            f"budget: this engine was opened for {engine.max_budget} nodes, found {config.budget}"
        )
    if not 0 <= sequence < 2**32:
        raise UsageError(f"sequence: expected an index from 0 to {2**32 - 1}, found {sequence!r}")
    if engine.runner:
        check_built(engine, config)
    engine.reset(drafting=config.method != "ar" and config.budget > 0)
    rounds = (DeviceRounds if engine.runner else HostRounds)(engine, config, sequence)
    return _rounds(rounds, engine, prompt, config, engine.decodes_started)


def checked_prompt(engine: Engine, prompt_ids: Sequence[int]) -> np.ndarray:
    """Token ids as i32[n]; UsageError for an empty prompt, one past the cache, or ids outside the vocabulary."""
    if len(prompt_ids) == 0:
        raise UsageError("prompt: it is empty; give at least one token")
    if len(prompt_ids) > engine.max_context:
        raise UsageError(
            f"prompt: {len(prompt_ids)} tokens do not fit into the {engine.max_context} positions of the cache"
        )
    vocabulary = range(engine.config.vocab_size)
    for token in prompt_ids:
        if isinstance(token, bool) or not isinstance(token, Integral) or token not in vocabulary:
            raise UsageError(f"prompt: token ids are integers in 0..{len(vocabulary) - 1}, found {token!r}")
    return np.asarray(prompt_ids, np.int32)


def _rounds(
    rounds: DeviceRounds | HostRounds, engine: Engine, prompt: np.ndarray, config: DecodeConfig, own: int
) -> Iterator[Round]:
    """The rounds of decode number `own` of this engine, which has one cache: a later decode ends an earlier one."""

    def check_own() -> None:
        if engine.decodes_started != own:
            raise UsageError("decode: another decode has begun on this engine; use an engine for each")

    wanted = min(config.max_new_tokens, engine.max_context - len(prompt) + 1)
    ran_out = "length" if wanted == config.max_new_tokens else "context"
    check_own()
    this, produced = rounds.prefill(prompt), 0
    while True:
        produced += len(this.tokens)
        stopped = this.tokens[-1] in config.stop_token_ids
        if stopped or produced == wanted:
            yield replace(this, finish="stop" if stopped else ran_out)
            return
        yield this
        check_own()
        this = rounds.next(this, wanted - produced)
