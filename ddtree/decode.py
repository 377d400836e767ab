"""The decode loop: autoregressive, chain and tree are one loop over different trees. No arithmetic is done here.

A round commits the tokens of the accepted path and the bonus token, cut at a stop token and at the tokens wanted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Integral

import numpy as np

from ddtree.config import DecodeConfig
from ddtree.engine import Engine
from ddtree.errors import NumericsError, UsageError
from ddtree.shapes import SHAPES
from ddtree.tree import DraftTree

STAGES = ("draft", "build", "verify", "accept", "compact")


@dataclass(frozen=True)
class Round:
    """What one round saw and decided. Round 0 is the prefill: a root-only tree at the prompt's last token.

    `tokens` are those committed and returned, the cut made; `path` are the accepted rows before it, the root first.
    `seconds` is by stage; `table` the drafter's (token_ids, log_probs) or None; `num_bad_rows` counts rows off the
    walk whose logits had a NaN or nothing finite; `finish` is None until the last round: stop, length or context.
    """

    index: int
    context_len: int
    tree: DraftTree
    target_tokens: np.ndarray
    path: np.ndarray
    bonus: int
    tokens: tuple[int, ...]
    seconds: dict[str, float]
    table: tuple[np.ndarray, np.ndarray] | None
    num_bad_rows: int
    finish: str | None


class _Clock:
    """Seconds by stage, in the one order of STAGES."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.last = time.perf_counter()

    def stage(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] += now - self.last
        self.last = now


def decode(
    engine: Engine, prompt_ids: Sequence[int], config: DecodeConfig, sequence: int = 0
) -> Iterator[Round]:
    """Decode after a prompt, a round at a time, the prefill first; everything is checked before it starts.

    `sequence` is the prompt's index for position-keyed sampling. Raises UsageError for an empty prompt, one that
    leaves no room, ids outside the vocabulary, an unknown shape, a budget above the engine's or a missing drafter;
    NumericsError when the target's logits cannot decide a token.
    """
    prompt = _checked_prompt(engine, prompt_ids)
    if config.shape not in SHAPES:
        raise UsageError(f"shape: expected one of {', '.join(sorted(SHAPES))}, found {config.shape!r}")
    if config.method != "ar" and config.budget > engine.max_budget:
        raise UsageError(
            f"budget: this engine was opened for {engine.max_budget} nodes, found {config.budget}"
        )
    engine.reset(drafting=config.method != "ar")
    return _rounds(engine, prompt, config, sequence, engine.decodes_started)


def _checked_prompt(engine: Engine, prompt_ids: Sequence[int]) -> np.ndarray:
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
    engine: Engine, prompt: np.ndarray, config: DecodeConfig, sequence: int, own: int
) -> Iterator[Round]:
    """The rounds of decode number `own` of this engine, which has one cache: a later decode ends an earlier one."""

    def check_own() -> None:
        if engine.decodes_started != own:
            raise UsageError("decode: another decode has begun on this engine; use an engine for each")

    wanted = min(config.max_new_tokens, engine.max_context - len(prompt) + 1)
    ran_out = "length" if wanted == config.max_new_tokens else "context"
    check_own()
    this, produced = _prefill(engine, prompt, config, sequence), 0
    while True:
        produced += len(this.tokens)
        stopped = this.tokens[-1] in config.stop_token_ids
        if stopped or produced == wanted:
            yield replace(this, finish="stop" if stopped else ran_out)
            return
        yield this
        check_own()
        this = _round(engine, this, config, wanted - produced, sequence)


def _prefill(engine: Engine, prompt: np.ndarray, config: DecodeConfig, sequence: int) -> Round:
    clock = _Clock()
    logits = engine.prefill(prompt)
    clock.stage("verify")
    root = DraftTree.root_only(int(prompt[-1]))
    position = len(prompt) - 1
    tokens, bad = engine.choose(logits, np.array([position], np.int32), config.sampling, sequence)
    if bad[0]:
        raise NumericsError(
            f"logits: the prompt's last row, position {position}, has a NaN or no finite value"
        )
    clock.stage("accept")
    path, first = np.zeros(1, np.int32), int(tokens[0])
    return Round(0, position, root, tokens, path, first, (first,), clock.seconds, None, 0, None)


def _round(engine: Engine, last: Round, config: DecodeConfig, wanted: int, sequence: int) -> Round:
    """One round after `last` that commits at most `wanted` tokens."""
    clock, context_len, root = _Clock(), engine.context_len, last.tokens[-1]
    tree, table = _draft_tree(engine, root, config, wanted, clock)
    logits = engine.verify(tree)
    clock.stage("verify")
    target_tokens, bad = engine.choose(logits, context_len + tree.depths, config.sampling, sequence)
    path, bonus = engine.accept(tree, target_tokens, bad)
    tokens = _cut((*tree.token_ids[path[1:]].tolist(), bonus), config.stop_token_ids)
    clock.stage("accept")
    engine.commit(path[: len(tokens)])
    clock.stage("compact")
    num_bad = int(bad.sum())  # none of them on the walk, or accept would have raised
    index = last.index + 1
    return Round(
        index, context_len, tree, target_tokens, path, bonus, tokens, clock.seconds, table, num_bad, None
    )


def _draft_tree(
    engine: Engine, root: int, config: DecodeConfig, wanted: int, clock: _Clock
) -> tuple[DraftTree, tuple[np.ndarray, np.ndarray] | None]:
    """The round's tree, no deeper than the tokens wanted and the context leave, and the table it came from."""
    max_depth = min(engine.horizon, wanted - 1, engine.max_context - 1 - engine.context_len)
    if config.method == "ar" or config.budget == 0 or max_depth == 0:
        return DraftTree.root_only(root), None
    k = min(config.budget, engine.config.vocab_size)
    table = engine.draft(root, k)
    clock.stage("draft")
    build = SHAPES["chain" if config.method == "chain" else config.shape]
    tree = build(*table, config.budget, max_depth, root_token=root)
    clock.stage("build")
    return tree, table


def _cut(tokens: tuple[int, ...], stop_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Tokens up to and with the first stop token."""
    for index, token in enumerate(tokens):
        if token in stop_token_ids:
            return tokens[: index + 1]
    return tokens
