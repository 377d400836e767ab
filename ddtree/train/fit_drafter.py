"""The drafter's training: blocks at random anchors of the bank, against the target's own tokens and distribution."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ddtree.config import DrafterConfig
from ddtree.train.device import autocast, compiled
from ddtree.train.drafter import Drafter
from ddtree.train.drafter_batches import Batch, Batches, Teacher
from ddtree.train.loop import BETAS, Clock, Run
from ddtree.train.muon import Muon
from ddtree.train.presets import Preset
from ddtree.train.target import Target

SMALLEST = 1e-9  # weight that a mean is divided by


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
    teacher = Teacher(target, config, batches)
    for layer in drafter.layers:
        layer.before, layer.after = compiled(layer.before, device), compiled(layer.after, device)
    losses_of = compiled(losses, device)
    decay = torch.exp(-torch.arange(config.horizon, device=device) / run.decay)

    def step(rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        batch = batches.of(rows)
        with autocast(device):
            features, soft = teacher.of(rows, batch)
            roots = batch.tokens.gather(1, batch.anchors)
            hidden = drafter(features, roots, batch.anchors, target.embedding)
            return losses_of(hidden, target.head, batch, soft, decay, run.soft)

    matrices = [p for p in drafter.parameters() if p.ndim == 2]
    vectors = [p for p in drafter.parameters() if p.ndim != 2]
    optimizers: dict[str, torch.optim.Optimizer] = {
        "muon": Muon(matrices, run.lr, run.weight_decay),
        "norms": torch.optim.AdamW(vectors, lr=run.lr, betas=BETAS, weight_decay=0.0),
    }
    settings = made_of | {
        "seed": seed,
        "run": preset.settings()["drafter"],
        "bank": preset.settings()["bank"],
        "drafter_shape": preset.drafter_shape,
    }
    modules: dict[str, nn.Module] = {"drafter": drafter}
    fit = Run(
        "drafter",
        folder,
        settings,
        run.steps,
        run.warmup,
        seed,
        run.batch * run.anchors * config.block_size,
        modules,
        optimizers,
        lambda index: (batches.rows_of(index),),
        step,
    )
    return drafter, fit.fit(clock, device)


def losses(
    hidden: Tensor,
    head: Tensor,
    batch: Batch,
    soft: tuple[Tensor, Tensor],
    decay: Tensor,
    soft_share: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weighted means over labels: the loss, and what is logged.

    hidden [B, A, horizon, H], whose row j - 1 of an anchor c foretells token c + j through the head [V, H]. A greedy
    token's label is a mixture of itself and, by soft_share, of the target's distribution, a sampled one's is that
    distribution.
    """
    logits = functional.linear(hidden, head)
    horizon, last = logits.shape[2], batch.tokens.shape[1] - 1
    distances = torch.arange(1, horizon + 1, device=logits.device)
    places = batch.anchors.unsqueeze(-1) + distances
    weight = batch.weight.unsqueeze(-1) * decay * (places < batch.ends.unsqueeze(-1))
    places = places.clamp(max=last)
    rows = torch.arange(len(places), device=logits.device).view(-1, 1, 1)
    labels = batch.tokens[rows, places]
    ids, probabilities = soft[0][rows, places - 1], soft[1][rows, places - 1]
    share = (soft_share + (1 - soft_share) * (batch.temperatures[rows, places] > 0)).unsqueeze(-1)
    wanted = torch.cat([1 - share, share * probabilities], dim=-1).split(1, dim=-1)
    named = torch.cat([labels.unsqueeze(-1), ids], dim=-1).split(1, dim=-1)
    log_probs = logits.float().log_softmax(dim=-1)
    # a mixture over the vocabulary, as the gradient of a gather is a scatter: slow where sums keep their order
    vocabulary = torch.arange(logits.shape[-1], device=logits.device)
    mixture = sum([part * (token == vocabulary) for part, token in zip(wanted, named, strict=True)])
    total = weight.sum().clamp(min=SMALLEST)
    loss = -(weight * (mixture * log_probs).sum(dim=-1)).sum() / total
    hard = -(weight * log_probs.detach().gather(-1, labels.unsqueeze(-1))[..., 0]).sum() / total
    right = (logits[:, :, 0].argmax(dim=-1) == labels[..., 0]) * weight[..., 0]
    parts = {
        "loss": loss,
        "hard": hard,
        "top1_depth1": right.sum() / weight[..., 0].sum().clamp(min=SMALLEST),
    }
    return loss, {name: value.detach() for name, value in parts.items()}
