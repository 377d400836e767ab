"""A round's record, and the host's way to run one: stage by stage, on the NumPy backend's arrays."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from ddtree.config import DecodeConfig
from ddtree.engine import Engine
from ddtree.engine_state import STAGES
from ddtree.errors import NumericsError, UsageError
from ddtree.shapes import get_shape, is_conditional, table_for
from ddtree.tree import DraftTree

# What the host does while a round runs on a device: the decode loop and its reader since the round before, launching,
# asking for the report's copy, waiting for it (the device's time, not the host's), and reading it.
HOST_PARTS = ("loop", "launch", "copy", "wait", "bookkeeping")


@dataclass(frozen=True)
class Round:
    """What one round saw and decided. Round 0 is the prefill: a root-only tree at the prompt's last token.

    `tokens` are those committed and returned, the cut made; `path` are the accepted rows before it, the root first.
    `seconds` is by stage; `table` the drafter's (token_ids, log_probs) or None; `num_bad_rows` counts rows off the
    walk whose logits had a NaN or nothing finite; `finish` is None until the last round: stop, length or context.
    `host_seconds` is by HOST_PARTS, None where the host computes the round itself and for the prefill. `conditional` is
    what a branch head says of the table's columns below each parent, f32[L, P, P], None where no tree was made of it.
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
    host_seconds: dict[str, float] | None = None
    conditional: np.ndarray | None = None


class Clock:
    """Seconds by stage, in the one order of `stages`; the first began at `since`, or begins now."""

    def __init__(self, stages: tuple[str, ...] = STAGES, since: float | None = None) -> None:
        self.seconds = dict.fromkeys(stages, 0.0)
        self.last = time.perf_counter() if since is None else since

    def stage(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] += now - self.last
        self.last = now


def max_depth_of(engine: Engine, config: DecodeConfig, wanted: int) -> int:
    """The deepest node that the tokens wanted, the horizon and the context leave room for."""
    if config.method == "ar" or config.budget == 0:
        return 0
    return max(0, min(engine.horizon, wanted - 1, engine.max_context - 1 - engine.context_len))


def cut_at_stop(tokens: tuple[int, ...], stop_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Tokens up to and with the first stop token."""
    for index, token in enumerate(tokens):
        if token in stop_token_ids:
            return tokens[: index + 1]
    return tokens


class HostRounds:
    """The rounds of one decode, run stage by stage with the host between them."""

    def __init__(self, engine: Engine, config: DecodeConfig, sequence: int):
        self.engine, self.config, self.sequence = engine, config, sequence
        self.build = get_shape("chain" if config.method == "chain" else config.shape)

    def prefill(self, prompt: np.ndarray) -> Round:
        """Commit the prompt; its last row gives the first token."""
        engine, clock = self.engine, Clock()
        logits = engine.prefill(prompt)
        clock.stage("verify")
        root = DraftTree.root_only(int(prompt[-1]))
        position = len(prompt) - 1
        tokens, bad = engine.choose(
            logits, np.array([position], np.int32), self.config.sampling, self.sequence
        )
        if bad[0]:
            raise bad_prompt(position)
        clock.stage("accept")
        path, first = np.zeros(1, np.int32), int(tokens[0])
        return Round(0, position, root, tokens, path, first, (first,), clock.seconds, None, 0, None)

    def next(self, last: Round, wanted: int) -> Round:
        """The round after `last`; it commits at most `wanted` tokens."""
        engine, config = self.engine, self.config
        clock, context_len, root = Clock(), engine.context_len, last.tokens[-1]
        tree, table, conditional = self._draft_tree(root, max_depth_of(engine, config, wanted), clock)
        logits = engine.verify(tree)
        clock.stage("verify")
        target_tokens, bad = engine.choose(logits, context_len + tree.depths, config.sampling, self.sequence)
        path, bonus = engine.accept(tree, target_tokens, bad)
        tokens = cut_at_stop((*tree.token_ids[path[1:]].tolist(), bonus), config.stop_token_ids)
        clock.stage("accept")
        engine.commit(path[: len(tokens)])
        clock.stage("compact")
        num_bad = int(bad.sum())  # none of them on the walk, or accept would have raised
        index = last.index + 1
        return Round(
            *(index, context_len, tree, target_tokens, path, bonus, tokens, clock.seconds),
            *(table, num_bad, None, None, conditional),
        )

    def _draft_tree(
        self, root: int, max_depth: int, clock: Clock
    ) -> tuple[DraftTree, tuple[np.ndarray, np.ndarray] | None, np.ndarray | None]:
        """The round's tree, and the table and conditionals it came from."""
        engine, config, conditional = self.engine, self.config, None
        if max_depth == 0:
            return DraftTree.root_only(root), None, None
        if is_conditional(self.build):
            *table, conditional = engine.draft_branches(root)
        else:
            table = engine.draft(root, min(config.budget, engine.config.vocab_size))
        clock.stage("draft")
        tree = self.build(
            *table_for(self.build, table, conditional), config.budget, max_depth, root_token=root
        )
        clock.stage("build")
        return tree, tuple(table), conditional


def check_shape(engine: Engine, config: DecodeConfig) -> None:
    """Raise UsageError for a shape that is unknown, lacks context, or reads a branch head that the drafter lacks."""
    needed = is_conditional(get_shape(config.shape)) and config.method == "tree"
    if needed and engine.drafter is not None and engine.drafter.config.branch is None:
        raise UsageError(
            f"shape: {config.shape} needs a drafter with a branch head, and this one has none; name one with --drafter"
        )


def bad_prompt(position: int) -> NumericsError:
    """The error of a prompt whose last row decides nothing."""
    return NumericsError(f"logits: the prompt's last row, position {position}, has a NaN or no finite value")
