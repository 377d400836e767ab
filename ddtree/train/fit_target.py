"""The target's training: windows of the corpus, next-token loss, routing bias moved against the load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ddtree.config import ModelConfig
from ddtree.errors import UsageError
from ddtree.train.corpus import Corpus
from ddtree.train.device import autocast
from ddtree.train.loop import BETAS, Clock, Run
from ddtree.train.presets import Preset, TargetRun
from ddtree.train.target import Target

NO_DECAY = 1  # dimensions: norms' weights are not decayed


class Windows:
    """Which windows of the corpus a step takes: every epoch cuts it anew, at an offset, and shuffles the pieces."""

    def __init__(self, tokens: int, run: TargetRun, seed: int):
        self.run, self.seed = run, seed
        self.pieces = (tokens - 1) // run.window - 1  # the offset may push the last one out
        self.batches = self.pieces // run.batch
        if self.batches < 1:
            raise UsageError(
                f"corpus: {tokens} tokens, a step takes {run.batch} x {run.window}: give a larger folder"
            )
        self.epoch, self.starts = -1, np.empty(0, np.int64)

    def starts_of(self, step: int) -> np.ndarray:
        """First positions i64 [batch] of a step's windows: a function of the seed and the step."""
        epoch, batch = divmod(step, self.batches)
        if epoch != self.epoch:
            rng = np.random.default_rng([self.seed, epoch])
            self.starts = rng.integers(self.run.window) + rng.permutation(self.pieces) * self.run.window
            self.epoch = epoch
        return self.starts[batch * self.run.batch :][: self.run.batch]


def fit_target(
    preset: Preset, corpus: Corpus, folder: Path, seed: int, device: torch.device, clock: Clock
) -> tuple[Target, bool]:
    """Train, or go on; the model and whether it is done."""
    torch.manual_seed(seed)
    run, config = preset.target, ModelConfig.from_hf(preset.target_hf())
    model = Target(config, run.dropout).to(device)
    windows = Windows(len(corpus.train), run, seed)
    for gate in model.gates():
        gate.counting = True
    tokens = torch.from_numpy(corpus.train).to(device)
    within = torch.arange(run.window + 1, device=device)

    def step(starts: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        batch = tokens[starts.unsqueeze(1) + within].long()
        with autocast(device):
            logits = model(batch[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        return loss, {"loss": loss.detach()}

    def after() -> None:
        for gate in model.gates():
            gate.balance(run.bias_step)

    settings = {
        "corpus": corpus.meta["sha256"],
        "tokenizer": corpus.meta["tokenizer_sha256"],
        "seed": seed,
        "run": preset.settings()["target"],
        "config": preset.target_hf(),
    }
    fit = Run(
        "target",
        folder,
        settings,
        run.steps,
        run.warmup,
        seed,
        run.batch * run.window,
        {"model": model},
        {"adamw": adamw(model, run.lr, run.weight_decay)},
        lambda index: (windows.starts_of(index),),
        step,
        after,
    )
    done = fit.fit(clock, device)
    return model, done


def adamw(module: torch.nn.Module, lr: float, decay: float) -> torch.optim.AdamW:
    """AdamW; vectors are not decayed."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > NO_DECAY], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim <= NO_DECAY], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS)


@torch.no_grad()
def held_out_loss(model: Target, corpus: Corpus, window: int, device: torch.device) -> dict[str, Any]:
    """Nats a token and bits a byte of the held-out text in windows of that many tokens, in f32.

    Every window but the last is whole; its first token has no prediction, so it is not counted.
    """
    tokens = torch.from_numpy(corpus.held_out).long().to(device)
    size = min(window + 1, len(tokens))
    rows = tokens[: len(tokens) // size * size].reshape(-1, size)
    total, count = 0.0, 0
    for part in rows.split(16):
        logits = model(part[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
        total, count = total + loss.item(), count + part[:, 1:].numel()
    nats = total / count
    bytes_a_token = corpus.meta["held_out_bytes"] / len(tokens)
    return {"nats_per_token": nats, "bits_per_byte": nats / np.log(2) / bytes_a_token, "tokens": count}


@torch.no_grad()
def loads(model: Target, tokens: Tensor) -> list[list[float]]:
    """Each MoE layer's choices by expert, as multiples of an even share, on tokens i64 [B, S]."""
    for gate in model.gates():
        gate.load.zero_()
        gate.counting = True
    model(tokens)
    for gate in model.gates():
        gate.counting = False
    return [(gate.load / gate.load.mean()).tolist() for gate in model.gates()]
