"""What a step of the drafter's training takes: rows of the bank, anchors in them, what the target makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from ddtree.config import DrafterConfig
from ddtree.errors import UsageError
from ddtree.train.bank import plan_temperatures, segment_ends
from ddtree.train.device import autocast, room
from ddtree.train.presets import DrafterRun, Segment
from ddtree.train.target import Target

SOFT_TOKENS = 8  # of the target's distribution that a soft label keeps
SHARPEN = 0.6  # its temperature where the token was chosen greedily
LEAST_LABELS = 4  # that a block must have
AT_ONCE = 512  # sequences that go through the target before training


@dataclass(frozen=True)
class Batch:
    """Blocks of one step: tokens i64 [B, S]; anchors i64 [B, A], their weight f32 [B, A] (0: none); ends, each
    anchor's first position without a label, i64 [B, A]; temperatures f32 [B, S] of the tokens."""

    tokens: Tensor
    anchors: Tensor
    weight: Tensor
    ends: Tensor
    temperatures: Tensor


class Batches:
    """Chooses a step's sequences and anchors from the bank: a function of the seed and the step."""

    def __init__(
        self,
        bank: dict[str, np.ndarray],
        plans: Sequence[tuple[Segment, ...]],
        run: DrafterRun,
        seed: int,
        device: torch.device,
    ):
        self.run, self.seed = run, seed
        self.per_epoch = len(bank["tokens"]) // run.batch
        if not self.per_epoch:
            raise UsageError(f"bank: {len(bank['tokens'])} sequences, a step takes {run.batch}")
        tokens = bank["tokens"].astype(np.int16)  # a vocabulary is below 2^15
        ends, temperatures = (
            np.stack([of(plan) for plan in plans]) for of in (segment_ends, plan_temperatures)
        )
        arrays = tokens, np.array(bank["looping"]), bank["plan"].astype(np.int64), ends, temperatures
        self.tokens, self.looping, self.plan, self.ends, self.temperatures = (
            torch.from_numpy(array).to(device) for array in arrays
        )
        self.chance = torch.tensor([1.0, run.loop_weight], device=device)  # outside a loop, in one
        self.places = torch.arange(tokens.shape[1], device=device)
        self.epoch, self.order = -1, np.empty(0, np.int64)

    def rows_of(self, step: int) -> np.ndarray:
        """The bank's rows i64 [batch] that a step takes."""
        epoch, batch = divmod(step, self.per_epoch)
        if epoch != self.epoch:
            self.epoch = epoch
            self.order = np.random.default_rng([self.seed, 3, epoch]).permutation(len(self.tokens))
        return self.order[batch * self.run.batch :][: self.run.batch]

    def of(self, rows: Tensor) -> Batch:
        """Their blocks: anchors are drawn without replacement, those in loops `loop_weight` times as often."""
        tokens, plan = self.tokens[rows].long(), self.plan[rows]
        ends = functional.pad(self.ends[plan][:, 1:], (0, 1))  # at c: the end of the segment of c + 1
        usable = ((ends - self.places - 1) >= LEAST_LABELS) & (self.places > 0)
        weight = self.chance[self.looping[rows].long()] * usable
        # Gumbel noise: the greatest are a weighted draw
        keys = weight.log() - torch.empty_like(weight).exponential_().log()
        anchors = keys.topk(self.run.anchors, dim=1).indices
        return Batch(
            tokens, anchors, weight.gather(1, anchors), ends.gather(1, anchors), self.temperatures[plan]
        )


class Teacher:
    """What the frozen target says along rows of the bank: made once and kept where half of the memory holds it.

    Otherwise it is made at each step, which gives the same but for rounding and takes longer.
    """

    def __init__(self, target: Target, config: DrafterConfig, batches: Batches):
        self.target, self.config = target, config
        device, (count, length) = batches.tokens.device, batches.tokens.shape
        self.kept: tuple[Tensor, ...] = ()
        features = (2 if device.type == "cuda" else 4) * len(config.target_layer_ids) * config.hidden_size
        if count * length * (features + 6 * SOFT_TOKENS) > room(device) // 2:
            return
        for start in tqdm(range(0, count, AT_ONCE), desc="features", unit="batch"):
            rows = slice(start, start + AT_ONCE)
            temperatures = batches.temperatures[batches.plan[rows]]
            with autocast(device):
                made = self._make(batches.tokens[rows].long(), temperatures)
            self.kept = self.kept or tuple(m.new_empty((count, *m.shape[1:])) for m in made)
            for there, here in zip(self.kept, made, strict=True):
                there[rows] = here

    def of(self, rows: Tensor, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Features [B, S, F x H], and the likeliest tokens after each position i64 with their probabilities."""
        made = [kept[rows] for kept in self.kept] or self._make(batch.tokens, batch.temperatures)
        return made[0], (made[1].long(), made[2])

    @torch.no_grad()
    def _make(self, tokens: Tensor, temperatures: Tensor) -> tuple[Tensor, ...]:
        """Features in the type that products take, ids i16, probabilities f32 at the temperature that the next token
        was drawn at, SHARPEN where it was chosen greedily."""
        hidden, features = self.target.run(tokens, self.config.target_layer_ids)
        logits = functional.linear(hidden, self.target.head)
        values, ids = logits.float().topk(SOFT_TOKENS, dim=-1)
        following = functional.pad(temperatures[:, 1:], (0, 1))
        temperature = following + SHARPEN * (following == 0)
        probabilities = (values / temperature.unsqueeze(-1)).softmax(dim=-1)
        return features.to(logits.dtype), ids.to(torch.int16), probabilities
