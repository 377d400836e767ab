"""The drafter's training: blocks at random anchors of the bank, against the target's own tokens and distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ddtree.config import DrafterConfig
from ddtree.errors import UsageError
from ddtree.train.bank import plan_temperatures, segment_ends
from ddtree.train.device import autocast
from ddtree.train.drafter import Drafter
from ddtree.train.loop import Clock, Run
from ddtree.train.presets import DrafterRun, Preset, Segment
from ddtree.train.target import Target

SOFT_TOKENS = 8  # of the target's distribution that a soft label keeps
SHARPEN = 0.6  # its temperature where the token was chosen greedily
LEAST_LABELS = 4  # that a block must have
SMALLEST = 1e-9  # weight that a mean is divided by


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
        self.run, self.seed, self.device = run, seed, device
        self.per_epoch = len(bank["tokens"]) // run.batch
        if not self.per_epoch:
            raise UsageError(f"bank: {len(bank['tokens'])} sequences, a step takes {run.batch}")
        self.tokens = torch.from_numpy(bank["tokens"].astype(np.int16)).to(
            device
        )  # a vocabulary is below 2^15
        self.looping = torch.from_numpy(np.array(bank["looping"])).to(device)
        self.plan = torch.from_numpy(bank["plan"].astype(np.int64)).to(device)
        self.ends = torch.from_numpy(np.stack([segment_ends(plan) for plan in plans])).to(device)
        self.temperatures = torch.from_numpy(np.stack([plan_temperatures(plan) for plan in plans])).to(device)
        self.epoch, self.order = -1, np.empty(0, np.int64)

    def of(self, step: int) -> Batch:
        """Anchors are drawn without replacement, those in loops `loop_weight` times as often as others."""
        epoch, batch = divmod(step, self.per_epoch)
        if epoch != self.epoch:
            self.epoch, self.order = (
                epoch,
                np.random.default_rng([self.seed, 3, epoch]).permutation(len(self.tokens)),
            )
        rows = torch.from_numpy(self.order[batch * self.run.batch :][: self.run.batch]).to(self.device)
        tokens, plan = self.tokens[rows].long(), self.plan[rows]
        ends = functional.pad(self.ends[plan][:, 1:], (0, 1))  # at c: the end of the segment of c + 1
        places = torch.arange(tokens.shape[1], device=self.device)
        usable = ((ends - places - 1) >= LEAST_LABELS) & (places > 0)
        weight = torch.where(self.looping[rows], self.run.loop_weight, 1.0) * usable
        keys = (
            weight.log() - torch.empty_like(weight).exponential_().log()
        )  # Gumbel: the greatest are a weighted draw
        anchors = keys.topk(self.run.anchors, dim=1).indices
        return Batch(
            tokens, anchors, weight.gather(1, anchors), ends.gather(1, anchors), self.temperatures[plan]
        )


def fit_drafter(
    preset: Preset,
    config: DrafterConfig,
    target: Target,
    bank: dict[str, np.ndarray],
    folder: Path,
    made_of: dict[str, str],
    seed: int,
    clock: Clock,
) -> tuple[Drafter, bool]:
    """Train the drafter, or go on; it, and whether it is done."""
    torch.manual_seed(seed)
    device, run = target.head.device, preset.drafter
    drafter = Drafter(config, target.config.max_position_embeddings).to(device)
    batches = Batches(bank, preset.bank.plans, run, seed, device)
    decay = torch.exp(-torch.arange(config.horizon, device=device) / run.decay)

    def step(index: int) -> tuple[Tensor, dict[str, Tensor], int]:
        batch = batches.of(index)
        with autocast(device):
            features, soft = _teach(target, config, batch)
            roots = batch.tokens.gather(1, batch.anchors)
            hidden = drafter(features, roots, batch.anchors, target.embedding)
            logits = functional.linear(hidden, target.head)
            loss, parts = losses(logits, batch, soft, decay, run)
        return loss, parts, batch.anchors.numel() * config.block_size

    matrices = [p for p in drafter.parameters() if p.ndim == 2]
    optimizers: dict[str, torch.optim.Optimizer] = {
        "muon": torch.optim.Muon(
            matrices, lr=run.lr, weight_decay=run.weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        ),
        "norms": torch.optim.AdamW(
            [p for p in drafter.parameters() if p.ndim != 2], lr=run.lr, betas=(0.9, 0.95), weight_decay=0.0
        ),
    }
    settings = made_of | {
        "seed": seed,
        "run": preset.settings()["drafter"],
        "bank": preset.settings()["bank"],
        "drafter_shape": preset.drafter_shape,
    }
    modules: dict[str, nn.Module] = {"drafter": drafter}
    fit = Run("drafter", folder, settings, run.steps, run.warmup, seed, modules, optimizers, step)
    return drafter, fit.fit(clock, device)


@torch.no_grad()
def _teach(target: Target, config: DrafterConfig, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Features [B, S, F x H], and the target's likeliest tokens after each position with their probabilities.

    Those are taken at the temperature that the next token was drawn at, SHARPEN where it was chosen greedily.
    """
    hidden, features = target.run(batch.tokens, config.target_layer_ids)
    values, ids = functional.linear(hidden, target.head).float().topk(SOFT_TOKENS, dim=-1)
    following = functional.pad(batch.temperatures[:, 1:], (0, 1))
    temperature = torch.where(following > 0, following, SHARPEN)
    return features, (ids, (values / temperature.unsqueeze(-1)).softmax(dim=-1))


def losses(
    logits: Tensor,
    batch: Batch,
    soft: tuple[Tensor, Tensor],
    decay: Tensor,
    run: DrafterRun,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weighted means over labels: the loss, and what is logged.

    logits [B, A, horizon, V]: row j - 1 of an anchor c foretells token c + j. A greedy token's label is a mixture of
    itself and of the target's distribution, a sampled one's is that distribution.
    """
    horizon, last = logits.shape[2], batch.tokens.shape[1] - 1
    distances = torch.arange(1, horizon + 1, device=logits.device)
    places = batch.anchors.unsqueeze(-1) + distances
    weight = batch.weight.unsqueeze(-1) * decay * (places < batch.ends.unsqueeze(-1))
    places = places.clamp(max=last)
    rows = torch.arange(len(places), device=logits.device).view(-1, 1, 1)
    labels = batch.tokens[rows, places]
    ids, probabilities = soft[0][rows, places - 1], soft[1][rows, places - 1]
    share = torch.where(batch.temperatures[rows, places] > 0, 1.0, run.soft).unsqueeze(-1)
    wanted = torch.cat([1 - share, share * probabilities], dim=-1)
    log_probs = logits.float().log_softmax(dim=-1).gather(-1, torch.cat([labels.unsqueeze(-1), ids], dim=-1))
    total = weight.sum().clamp(min=SMALLEST)
    loss = -(weight.unsqueeze(-1) * wanted * log_probs).sum() / total
    hard = -(weight * log_probs[..., 0]).sum() / total
    right = (logits[:, :, 0].argmax(dim=-1) == labels[..., 0]) * weight[..., 0]
    parts = {
        "loss": loss,
        "hard": hard,
        "top1_depth1": right.sum() / weight[..., 0].sum().clamp(min=SMALLEST),
    }
    return loss, {name: value.detach() for name, value in parts.items()}
