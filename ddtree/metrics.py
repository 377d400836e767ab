"""What a decode's tokens and rounds amount to: acceptance length, loops, stage times, speed. It runs no model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ddtree.decode import STAGES, Round

LOOP_LENGTH = 16
LOOP_PERIOD = 64


def in_loop(token_ids: Sequence[int]) -> np.ndarray:
    """bool[n]: for a period of at most 64, the 16 tokens that end here equal the 16 one period earlier.

    A small model loops under greedy decoding, and loops are easy to draft: acceptance is reported outside them too.
    """
    tokens = np.asarray(token_ids)
    looping = np.zeros(len(tokens), bool)
    for period in range(1, min(LOOP_PERIOD, len(tokens) - LOOP_LENGTH) + 1):
        equal = np.concatenate([[0], np.cumsum(tokens[period:] == tokens[:-period])])
        run = equal[LOOP_LENGTH:] - equal[:-LOOP_LENGTH] == LOOP_LENGTH
        looping[period + LOOP_LENGTH - 1 :] |= run
    return looping


@dataclass
class Tally:
    """Sums over decodes of one method. Round 0 (the prefill) gives the first token and counts for nothing else."""

    rounds: int = 0
    tokens: int = 0
    nodes: int = 0
    loop_tokens: int = 0
    rounds_outside: int = 0
    tokens_outside: int = 0
    lengths: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    def add(self, prompt_ids: Sequence[int], rounds: Iterable[Round]) -> None:
        """Count one decode. A round is outside loops when the root it starts from is."""
        rounds = list(rounds)
        generated = [token for this in rounds for token in this.tokens]
        looping = in_loop([*prompt_ids, *generated])[len(prompt_ids) :]
        self.loop_tokens += int(looping.sum())
        at = len(rounds[0].tokens)
        self.tokens += at
        for this in rounds[1:]:
            count = len(this.tokens)
            self.rounds += 1
            self.tokens += count
            self.nodes += this.tree.num_nodes
            self.lengths.append(count)
            if not looping[at - 1]:
                self.rounds_outside += 1
                self.tokens_outside += count
            for stage, seconds in this.seconds.items():
                self.seconds[stage] += seconds
            at += count

    @property
    def mean_acceptance(self) -> float | None:
        """Tokens a round, bonus included; None without a round."""
        return sum(self.lengths) / self.rounds if self.rounds else None

    @property
    def mean_acceptance_outside_loops(self) -> float | None:
        return self.tokens_outside / self.rounds_outside if self.rounds_outside else None

    @property
    def loop_share(self) -> float:
        """Share of the generated tokens that stand inside a loop."""
        return self.loop_tokens / self.tokens if self.tokens else 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of the rounds over the rounds' seconds; prefill counts on neither side."""
        total = sum(self.seconds.values())
        return sum(self.lengths) / total if total else None

    @property
    def nodes_per_round(self) -> float | None:
        """Drafted nodes the target really verified, a round."""
        return self.nodes / self.rounds if self.rounds else None

    def stage_milliseconds(self) -> dict[str, float]:
        """Mean milliseconds a round, by stage."""
        return {stage: 1e3 * total / max(self.rounds, 1) for stage, total in self.seconds.items()}
