"""Steps of a run: learning rate, checkpoints that a killed run goes on from, the log, the bar, the clock.

What a step draws depends on (seed, step) alone, so a checkpoint needs no generator's state, and a resumed run takes
the steps that an uninterrupted one would have: to the same bits on the same kind of device with the same PyTorch, and
with as much free memory, by which it is chosen how much goes through a model at once.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from ddtree.errors import NumericsError, UsageError
from ddtree.train.captured import Captured

LOG_EVERY = 20  # steps; reading a loss waits for the device
CHECKPOINT_EVERY = 60.0  # seconds
CLIP = 1.0  # of the gradient's norm
BETAS = (0.9, 0.95)  # of every AdamW


class Clock:
    """Says when `minutes` are over; None never is."""

    def __init__(self, minutes: float | None):
        self.end = math.inf if minutes is None else time.monotonic() + 60 * minutes

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.end


class Meter:
    """Means of what steps report, and tokens a second, since it was last read. Sums stay on the device."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.steps, self.tokens, self.since = 0, 0, time.monotonic()

    def add(self, parts: dict[str, Tensor], tokens: int) -> None:
        for name, value in parts.items():
            # a sum is never the part itself, which the next step overwrites
            self.sums[name] = self.sums.get(name, 0) + value
        self.steps, self.tokens = self.steps + 1, self.tokens + tokens

    def read(self) -> dict[str, float]:
        """The means by name and `tokens_per_second`; it waits for the device and begins anew."""
        means = {name: value.item() / self.steps for name, value in self.sums.items()}
        speed = self.tokens / (time.monotonic() - self.since)
        self._begin()
        return means | {"tokens_per_second": speed}


@dataclass
class Run:
    """One stage: its files are `folder`/NAME.pt (checkpoint) and NAME.jsonl (log).

    `draw(index)` says what a step takes, arrays of the same shapes always; `step` makes of them, on the device, the
    loss to go down and what to log. A step takes `tokens`. `settings` are JSON values that a checkpoint must agree
    with; `after` follows the optimizers' steps. On a GPU a step is captured: see `Captured`.
    """

    name: str
    folder: Path
    settings: dict[str, Any]
    steps: int
    warmup: int
    seed: int
    tokens: int
    modules: dict[str, nn.Module]
    optimizers: dict[str, torch.optim.Optimizer]
    draw: Callable[[int], tuple[np.ndarray, ...]]
    step: Callable[..., tuple[Tensor, dict[str, Tensor]]]
    after: Callable[[], None] = lambda: None

    @property
    def checkpoint(self) -> Path:
        return self.folder / f"{self.name}.pt"

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.jsonl"

    def fit(self, clock: Clock, device: torch.device) -> bool:
        """Take the steps that are left; False when the clock stopped it before the last. Raises NumericsError."""
        start, seconds = self._restore(device)
        self._settle(device)
        take = Captured(self.take, device)
        for module in self.modules.values():
            module.train()
        done, began = start, time.monotonic()
        with (
            open(self.log, "a", encoding="utf-8") as log,
            tqdm(total=self.steps, initial=start, desc=self.name, unit="step", mininterval=1.0) as bar,
        ):
            meter, saved = Meter(), began
            while done < self.steps:
                factor = self._set_rate(done)
                meter.add(take(self.draw(done), self.seed * 1_000_003 + done), self.tokens)
                done += 1
                bar.update()
                last = done == self.steps or clock.over
                due = last or time.monotonic() - saved > CHECKPOINT_EVERY
                if due or done == 1 or done % LOG_EVERY == 0:
                    record = {"step": done} | meter.read() | {"lr_factor": factor}
                    record["seconds"] = seconds + time.monotonic() - began
                    self._note(record, log, bar)
                if due:
                    self._save(done, record["seconds"])
                    saved = time.monotonic()
                if last:
                    break
        for module in self.modules.values():
            module.eval()
        return done == self.steps

    def _note(self, record: dict[str, Any], log: TextIO, bar: tqdm) -> None:
        """Log a record and show its loss; NumericsError before a loss that is no number gets into a checkpoint."""
        if not all(map(math.isfinite, record.values())):
            raise NumericsError(f"{self.name}: step {record['step']}: the loss is no number; see {self.log}")
        log.write(json.dumps(record) + "\n")
        log.flush()
        bar.set_postfix_str(f"loss {record['loss']:.3f}, {record['tokens_per_second']:,.0f} tokens/s")

    def _settle(self, device: torch.device) -> None:
        """Learning rates on a GPU, where a captured step reads them; a checkpoint may be another device's."""
        on_gpu = device.type == "cuda"
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                rate = group.setdefault("base_lr", group["lr"])
                group["lr"] = torch.tensor(rate, device=device) if on_gpu else rate
                group |= {name: on_gpu for name in ("fused", "capturable") if name in group}

    def _set_rate(self, index: int) -> float:
        """Linear warm-up, then a cosine to zero."""
        warm = min(1.0, (index + 1) / max(self.warmup, 1))
        factor = warm * 0.5 * (1 + math.cos(math.pi * index / self.steps))
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(group["base_lr"] * factor)
                else:
                    group["lr"] = group["base_lr"] * factor
        return factor

    def take(self, *drawn: Tensor) -> dict[str, Tensor]:
        """A step of what was drawn: the loss, its gradients, the optimizers' steps; what to log."""
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        loss, parts = self.step(*drawn)
        loss.backward()
        for module in self.modules.values():
            nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        for optimizer in self.optimizers.values():
            optimizer.step()
        self.after()
        return parts

    def _save(self, done: int, seconds: float) -> None:
        state = {
            "settings": json.dumps(self.settings, sort_keys=True),
            "step": done,
            "seconds": seconds,
            "modules": {name: module.state_dict() for name, module in self.modules.items()},
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
        }
        temporary = self.checkpoint.with_suffix(".pt.part")
        torch.save(state, temporary)
        os.replace(temporary, self.checkpoint)

    def _restore(self, device: torch.device) -> tuple[int, float]:
        """Steps and seconds that a checkpoint holds, 0 without one; UsageError where it is of other settings."""
        if not self.checkpoint.exists():
            self.log.write_text("", "utf-8")
            return 0, 0.0
        try:
            state = torch.load(self.checkpoint, map_location=device, weights_only=True)
            settings = json.loads(state["settings"])
        except Exception as error:  # what a damaged file raises is not one class
            reason = " ".join(str(error).split())[:100]
            raise UsageError(
                f"{self.checkpoint}: not a checkpoint of this program ({reason}); remove it"
            ) from None
        if other := differing(settings, json.loads(json.dumps(self.settings))):
            raise UsageError(
                f"{self.checkpoint}: begun with other settings ({other}); give another --out, or remove it"
            )
        for name, module in self.modules.items():
            module.load_state_dict(state["modules"][name])
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        self._cut_log(state["step"])
        return state["step"], state["seconds"]

    def _cut_log(self, step: int) -> None:
        """Drop what a killed run logged after its last checkpoint, and a line that it did not finish."""
        lines = self.log.read_text("utf-8").splitlines() if self.log.exists() else []
        kept = []
        for line in lines:
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except (ValueError, KeyError, TypeError):
                continue
        self.log.write_text("".join(kept), "utf-8")


def differing(found: dict[str, Any], wanted: dict[str, Any], prefix: str = "") -> str:
    """The first setting that is not the same, in words; empty where all are."""
    for name in sorted(found.keys() | wanted.keys()):
        left, right = found.get(name), wanted.get(name)
        if isinstance(left, dict) and isinstance(right, dict):
            if inner := differing(left, right, f"{prefix}{name}."):
                return inner
        elif left != right:
            return f"{prefix}{name}: {left!r} there, {right!r} now"[:160]
    return ""
