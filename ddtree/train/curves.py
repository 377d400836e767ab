"""A figure of a training log: loss and speed over steps."""

from __future__ import annotations

import json
from pathlib import Path

from ddtree.plots_style import SERIES, heading, label_axes, new_figure


def draw_curves(log: Path, path: Path) -> None:
    """Draw the records of a JSON Lines log: every loss that they name, and tokens per second."""
    records = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    steps = [record["step"] for record in records]
    names = [n for n in records[0] if n not in ("step", "tokens_per_second", "lr_factor", "seconds")]
    figure = new_figure(8, 3.2)
    losses, speed = figure.subplots(1, 2)
    for name, colour in zip(names, SERIES, strict=False):
        losses.plot(steps, [record[name] for record in records], label=name, color=colour, linewidth=1)
    losses.legend(fontsize=8, frameon=False)
    heading(losses, log.stem)
    label_axes(losses, "step", "nats a token; accuracy")
    speed.plot(steps, [record["tokens_per_second"] / 1e3 for record in records], color=SERIES[0], linewidth=1)
    speed.set_ylim(bottom=0)
    heading(speed, "speed")
    label_axes(speed, "step", "thousand tokens a second")
    figure.savefig(path, dpi=120)
