"""The branch head's own training: rows of a frozen drafter, cross-entropy among each depth's candidates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddtree.errors import UsageError
from ddtree.train.branch import BranchHead, pair_loss
from ddtree.train.branch_rows import Arrays
from ddtree.train.loop import BETAS, Clock, Run
from ddtree.train.presets import Preset
from ddtree.train.target import Target


class Draws:
    """Chooses a step's rows: a function of the seed and the step. Every epoch goes through all rows once."""

    def __init__(self, rows: int, batch: int, seed: int):
        self.rows, self.batch, self.seed = rows, batch, seed
        self.per_epoch = rows // batch
        if not self.per_epoch:
            raise UsageError(f"rows: {rows} of them, a step takes {batch}; give a larger folder of text")
        self.epoch, self.order = -1, np.empty(0, np.int64)

    def of(self, step: int) -> np.ndarray:
        """Rows i64 [batch]."""
        epoch, place = divmod(step, self.per_epoch)
        if epoch != self.epoch:
            self.epoch = epoch
            self.order = np.random.default_rng([self.seed, 5, epoch]).permutation(self.rows)
        return self.order[place * self.batch :][: self.batch]


def fit_branch(
    preset: Preset,
    target: Target,
    rows: Arrays,
    folder: Path,
    made_of: dict[str, Any],
    seed: int,
    clock: Clock,
) -> tuple[BranchHead, bool]:
    """Train a head on those rows, or go on; the head, its scores scaled as the run says, and whether it is done."""
    torch.manual_seed(seed)
    device, run = target.head.device, preset.branch
    branch = BranchHead(target.head.shape[1], preset.branch_rank, target.embedding).to(device)
    draws = Draws(len(rows["labels"]), run.batch, seed)
    arrays = {name: torch.from_numpy(_signed(values)).to(device) for name, values in rows.items()}

    def step(chosen: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        parents, labels, ids = (arrays[name][chosen].long() for name in ("parents", "labels", "token_ids"))
        hidden, marginal = arrays["hidden"][chosen].float(), arrays["log_probs"][chosen]
        scores = marginal + branch(hidden, parents, ids, target.embedding, target.head)
        loss = pair_loss(scores, ids, labels)[0].mean()
        with torch.no_grad():
            right = (ids.gather(1, scores.argmax(dim=1, keepdim=True))[:, 0] == labels).float().mean()
            plain = pair_loss(marginal, ids, labels)[0].mean()
        return loss, {"loss": loss.detach(), "marginal": plain, "top1": right}

    settings = made_of | {"seed": seed, "run": preset.settings()["branch"], "branch_rank": preset.branch_rank}
    steps = max(1, round(run.epochs * draws.per_epoch))
    optimizer = torch.optim.AdamW(branch.parameters(), lr=run.lr, betas=BETAS, weight_decay=0.0)
    fit = Run(
        "branch",
        folder,
        settings,
        steps,
        run.warmup,
        seed,
        run.batch,
        {"branch": branch},
        {"branch": optimizer},
        lambda index: (draws.of(index),),
        step,
    )
    done = fit.fit(clock, device)
    with torch.no_grad():
        branch.child.mul_(run.scale)
    return branch, done


def _signed(values: np.ndarray) -> np.ndarray:
    """u16 as i16, which PyTorch indexes: ids are below 2^15."""
    return values.astype(np.int16) if values.dtype == np.uint16 else np.array(values)
